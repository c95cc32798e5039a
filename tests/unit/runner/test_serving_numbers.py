"""What engines say of an answer, in the shapes of every API family, and how it is passed on."""

from __future__ import annotations

import pytest

from runner.errors import InvalidRequest
from runner.limits import limits
from runner.serving.numbers import Numbers
from runner.serving.request import read_cache_mode, read_cache_tag, read_fields, read_priority
from runner.serving.tally import OTHER_TENANTS, Histogram, Tally
from wire.usage import StreamReader

CHAT = b'{"usage":{"prompt_tokens":30,"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":12}}}'


@pytest.mark.parametrize(
    ("answer", "cached"),
    [
        (CHAT, 12),
        (b'{"usage":{"input_tokens":30,"output_tokens":7,"input_tokens_details":{"cached_tokens":3}}}', 3),
        (b'{"usage":{"input_tokens":30,"output_tokens":7,"cache_read_input_tokens":4}}', 4),
        (b'{"response":{"usage":{"input_tokens":30,"output_tokens":7,"input_tokens_details":{"cached_tokens":5}}}}', 5),
        (b'{"message":{"usage":{"input_tokens":30,"output_tokens":7,"cache_read_input_tokens":6}}}', 6),
    ],
)
def test_usage_is_read_wherever_an_api_puts_it(answer: bytes, cached: int) -> None:
    numbers = Numbers()
    numbers.take(answer)
    assert (numbers.prompt_tokens, numbers.output_tokens, numbers.cached_tokens) == (30, 7, cached)


def test_the_engines_own_times_make_the_gpu_time_and_without_them_the_wall_does() -> None:
    numbers = Numbers(wall_ms=50.0)
    numbers.take(CHAT)
    assert numbers.gpu_ms == 50.0
    numbers.take(b'{"timings":{"cache_n":9,"prompt_n":3,"prompt_ms":2.5,"predicted_n":7,"predicted_ms":10.0}}')
    assert (numbers.gpu_ms, numbers.cached_tokens) == (12.5, 9)
    numbers.reported_gpu_ms = 3.0
    assert numbers.gpu_ms == 3.0


@pytest.mark.parametrize("answer", [b"", b"no json", b"[1]", b'{"usage":"many"}', b'{"usage":{"prompt_tokens":"x"}}', b"\xff"])
def test_what_cannot_be_read_changes_nothing(answer: bytes) -> None:
    numbers = Numbers(prompt_tokens=1)
    numbers.take(answer)
    assert (numbers.prompt_tokens, numbers.output_tokens) == (1, None)


def test_headers_are_there_even_when_nothing_was_reused() -> None:
    assert Numbers(queue_wait_ms=12.6).headers() == {
        "x-cache-hit": "false",
        "x-cache-tokens-reused": "0",
        "x-queue-wait-ms": "13",
        "x-gpu-time-ms": "0",
    }


def test_a_finished_stream_is_read_from_its_last_events_and_told_in_one_comment() -> None:
    reader = StreamReader(drops_usage=True)
    passed = reader.feed(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[],"usage":{"prompt_tokens":30,')
    passed += reader.feed(
        b'"completion_tokens":7,"prompt_tokens_details":{"cached_tokens":12}},"timings":{"prompt_ms":1,"predicted_ms":2}}\n\n'
    )
    numbers = Numbers()
    numbers.take_stream(reader)
    assert b"usage" not in passed
    assert (numbers.prompt_tokens, numbers.cached_tokens, numbers.gpu_ms) == (30, 12, 3.0)
    assert numbers.comment() == b": x-cache-hit=true; x-cache-tokens-reused=12; x-queue-wait-ms=0; x-gpu-time-ms=3\n\n"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b"", None, "empty"),
        (b"{", None, "not valid JSON"),
        (b"[]", None, "object"),
        (b"{}", "model", "model"),
        (b'{"model":3}', "model", "model"),
        (b'{"model":""}', "model", "1 to 200"),
        (b'{"model":"m","stream":"yes"}', "stream", "stream"),
        (b'{"model":"m","allow_remote":1}', "allow_remote", "allow_remote"),
    ],
)
def test_a_body_that_cannot_be_served_names_the_field(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        read_fields(body)
    assert refused.value.param == param


def test_headers_of_the_specification_are_read_and_anything_else_is_refused_by_name() -> None:
    assert [read_cache_mode(text) for text in ("", " Prefix ", "none", "AUTO")] == ["auto", "prefix", "none", "auto"]
    assert [read_priority(text) for text in ("", "HIGH", "low")] == ["normal", "high", "low"]
    assert read_cache_tag(" session-1:a.b_c ") == "session-1:a.b_c"
    for read, text, name in (
        (read_cache_mode, "all", "X-Cache-Mode"),
        (read_priority, "urgent", "X-Priority"),
        (read_cache_tag, "x" * 65, "X-Cache-Tag"),
        (read_cache_tag, "a b", "X-Cache-Tag"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            read(text)
        assert refused.value.param == name


def test_counts_stay_bounded_however_many_tenants_are_named() -> None:
    tally = Tally()
    for number in range(limits().serving.tenants + 50):
        tally.count(model="m", tenant=f"t{number}", status="success")
    assert len(tally.requests) == limits().serving.tenants + 1
    assert tally.requests["m", OTHER_TENANTS, "success"] == 50


def test_a_histogram_counts_a_value_at_its_bound_and_everything_above_the_last() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.total) == ([2, 1, 1], 4, 102.0)
