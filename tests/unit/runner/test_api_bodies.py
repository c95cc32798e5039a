"""Bodies of the box's own port: strict JSON, typed values, forms."""

from __future__ import annotations

import pytest

from runner.api.answers import spec_name
from runner.api.bodies import BodyBudget, decode, parse_object
from runner.api.forms import read_form_fields
from runner.errors import InvalidRequest, Unavailable
from runner.operations.bodies import FlushBody, LoadBody

FORM = "multipart/form-data; boundary=line"


def part(name: str, value: bytes, extra: str = "") -> bytes:
    return b"--line\r\n" + f'Content-Disposition: form-data; name="{name}"{extra}\r\n\r\n'.encode() + value + b"\r\n"


def test_an_object_is_parsed() -> None:
    assert parse_object('{"a": [1, 2.5, null, {"b": "é"}]}'.encode()) == {"a": [1, 2.5, None, {"b": "é"}]}


@pytest.mark.parametrize(
    "body",
    [
        b"", b"null", b"[]", b'"text"', b"{", b'{"a":1,"a":1}', b'{"a":{"b":1,"b":2}}', b'{"a":NaN}', b'{"a":Infinity}',
        b'{"a":1}x', b"\xff", b'{"a":"\xff"}', b'{"a":"\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000, b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
def test_what_is_no_json_object_is_refused_without_repeating_it(body: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_object(body)
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "modelId"),
        ({"modelId": 5}, "modelId"),
        ({"modelId": "a", "maxContextLength": True}, "maxContextLength"),
        ({"modelId": "a", "overrides": []}, "overrides"),
        ({"modelId": "a", "surprise": 1}, "surprise"),
    ],
)
def test_the_field_at_fault_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(fields, LoadBody)
    assert caught.value.param == param


def test_a_word_that_is_none_of_an_enum_is_named_by_its_field() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode({"scope": "everything"}, FlushBody)
    assert caught.value.param == "scope"


def test_a_form_gives_up_its_model_and_its_flags_and_no_more() -> None:
    body = (
        part("model", b" whisper ")
        + part("stream", b"True")
        + part("file", b"--lin\r\nmodel", '; filename="a.wav"')
        + b"--line--\r\n"
    )
    fields = read_form_fields(FORM, body)
    assert (fields.model, fields.stream, fields.allow_remote) == ("whisper", True, False)


def test_a_file_that_is_called_model_is_not_the_model() -> None:
    body = part("model", b"real") + part("model", b"other", '; filename="m"') + b"--line--\r\n"
    assert read_form_fields(FORM, body).model == "real"


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        (FORM, part("model", b"a") + part("model", b"b") + b"--line--\r\n"),
        (FORM, part("model", b"") + b"--line--\r\n"),
        (FORM, part("model", b"\xff") + b"--line--\r\n"),
        (FORM, part("model", b"a" * 2000) + b"--line--\r\n"),
        (FORM, part("model", b"a") + part("stream", b"perhaps") + b"--line--\r\n"),
        (FORM, part("model", b"a") + b"".join(part(f"f{number}", b"") for number in range(70)) + b"--line--\r\n"),
        (FORM, b"no form at all"),
        (FORM, b""),
        ("multipart/form-data", part("model", b"a") + b"--line--\r\n"),
        ("multipart/form-data; boundary=", part("model", b"a") + b"--line--\r\n"),
        ("multipart/form-data; boundary=" + "x" * 5000, part("model", b"a")),
    ],
)
def test_a_form_that_cannot_be_trusted_is_refused(content_type: str, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        read_form_fields(content_type, body)


@pytest.mark.parametrize(
    ("name", "wire"),
    [
        ("gpu_memory_total_mb", "gpuMemoryTotalMB"), ("kv_mb", "kvMB"), ("avg_wait_ms", "avgWaitMs"),
        ("p95_wait_ms", "p95WaitMs"),
        ("gpu_ids", "gpuIds"), ("id", "id"), ("kv_cache_size_mb", "kvCacheSizeMB"), ("context_length", "contextLength"),
    ],
)  # fmt: skip
def test_field_names_are_those_of_the_specification(name: str, wire: str) -> None:
    assert spec_name(name) == wire


def test_the_bodies_of_all_requests_share_one_budget_and_give_it_back() -> None:
    budget = BodyBudget(10)
    with budget.hold() as first, budget.hold() as second:
        first(6)
        second(4)
        with pytest.raises(Unavailable):
            first(1)
        assert budget.held_bytes == 10
    assert budget.held_bytes == 0
