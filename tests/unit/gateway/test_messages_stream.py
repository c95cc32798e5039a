"""Streams of chat engines as streams of Messages: every block in its turn, every end said as it was, no end invented."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.messages.strands import MAX_HELD_CHARS
from gateway.dialects.messages.translator import MAX_EVENT_BYTES
from gateway.errors import ContextTooLong, RequestInterrupted, StreamTooLarge
from tests.unit.gateway.messages_engine import DONE, call, chunk, open_answer, say, translate, usage, write_event
from tests.unit.gateway.messages_reader import read_events, read_message

THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "unsigned"}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def tool(call_id: str, name: str, **arguments: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments}


def read_blocks(*chunks: bytes, finish: str = "stop") -> list[dict[str, Any]]:
    data, translator = say(*chunks, finish=finish)
    assert translator.failure is None
    blocks: list[dict[str, Any]] = read_message(data)["content"]
    return blocks


def test_a_text_is_one_block_and_its_deltas_come_as_they_were_said() -> None:
    data, translator = say(chunk(content="Hel"), chunk(content="lo "), chunk(content='\u2028 "wörld" \\ \n'))
    message = read_message(data)
    assert message["content"] == [text('Hello \u2028 "wörld" \\ \n')]
    assert (message["model"], message["id"]) == ("qwen", "msg_0193a5c2")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    deltas = [value["delta"]["text"] for name, value in read_events(data) if name == "content_block_delta"]
    assert deltas == ["Hel", "lo ", '\u2028 "wörld" \\ \n']
    assert translator.kept is None


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_thinking_comes_under_either_name_and_is_signed_before_the_text_begins(name: str) -> None:
    data, _ = say(chunk(**{name: "h"}), chunk(**{name: "m"}), chunk(content="a"), chunk(content="b"))
    assert read_message(data)["content"] == [THOUGHT, text("ab")]
    kinds = [value["delta"]["type"] for event, value in read_events(data) if event == "content_block_delta"]
    assert kinds == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta", "text_delta"]


def test_an_engine_that_says_its_reasoning_under_both_names_thinks_once() -> None:
    assert read_blocks(chunk(reasoning="hm", reasoning_content="hm"), chunk(content="a")) == [THOUGHT, text("a")]


def test_thinking_and_text_in_one_chunk_are_two_blocks() -> None:
    assert read_blocks(chunk(reasoning="hm", content="a"), chunk(content="b")) == [THOUGHT, text("ab")]


def test_thinking_between_texts_is_a_block_of_its_own() -> None:
    assert read_blocks(chunk(content="a"), chunk(reasoning="hm"), chunk(content="b")) == [text("a"), THOUGHT, text("b")]


def test_pieces_of_arguments_go_out_as_they_come() -> None:
    pieces = ['{"ci', 'ty": "Z\\u00', "fcrich \\", '"x"}']
    data, _ = say(call(0, "", name="weather", call_id="call_1"), *[call(0, piece) for piece in pieces], finish="tool_calls")
    message = read_message(data)
    assert message["content"] == [tool("call_1", "weather", city='Zürich "x')]
    assert message["stop_reason"] == "tool_use"
    said = [value["delta"]["partial_json"] for name, value in read_events(data) if name == "content_block_delta"]
    assert said == pieces


def test_whole_arguments_in_one_chunk_are_one_delta() -> None:
    blocks = read_blocks(call(0, '{"a": [1, {"b": "}"}]}', name="f", call_id="c1"), finish="tool_calls")
    assert blocks == [tool("c1", "f", a=[1, {"b": "}"}])]


@pytest.mark.parametrize("arguments", [None, "", "  ", "null", "{}", "\n{}\n"])
def test_a_call_without_arguments_has_an_empty_object(arguments: str | None) -> None:
    assert read_blocks(call(0, arguments, name="f", call_id="c1"), finish="tool_calls") == [tool("c1", "f")]


def test_calls_in_a_row_are_blocks_in_a_row_and_the_second_does_not_wait_for_the_end() -> None:
    translator = open_answer()
    data = translator.feed(call(0, '{"a":1}', name="f", call_id="c1"))
    data += translator.feed(call(1, '{"b"', name="g", call_id="c2"))
    assert [name for name, _ in read_events(data)][-3:] == ["content_block_stop", "content_block_start", "content_block_delta"]
    data += translator.feed(call(1, ":2}")) + translator.feed(chunk("tool_calls")) + translator.finish()
    assert read_message(data)["content"] == [tool("c1", "f", a=1), tool("c2", "g", b=2)]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_the_end_of_arguments_is_found_however_they_are_cut(size: int) -> None:
    arguments = '{"a": "\\"}{", "b\\\\": ["]", {"c": "\\\\\\""}]}'
    pieces = [arguments[at : at + size] for at in range(0, len(arguments), size)]
    translator = open_answer()
    data = b"".join(map(translator.feed, [call(0, "", name="f", call_id="c1"), *[call(0, piece) for piece in pieces[:-1]]]))
    data += translator.feed(chunk(content="wait"))
    assert [name for name, _ in read_events(data)].count("content_block_stop") == 0
    data += translator.feed(call(0, pieces[-1]))
    assert read_message(data, is_whole=False)["content"] == [
        {"type": "tool_use", "id": "c1", "name": "f", "input": json.loads(arguments)},
        text("wait"),
    ]


def test_interleaved_calls_stay_one_block_at_a_time() -> None:
    blocks = read_blocks(
        chunk(content="I will"),
        call(0, '{"a"', name="f", call_id="c1"),
        call(1, '{"b"', name="g", call_id="c2"),
        call(2, None, name="h", call_id="c3"),
        call(1, ":2}"),
        chunk(content=" do it"),
        call(0, ":1}"),
        call(2, "{}"),
        finish="tool_calls",
    )
    assert blocks == [text("I will"), tool("c1", "f", a=1), tool("c2", "g", b=2), tool("c3", "h"), text(" do it")]


def test_several_calls_in_one_chunk_are_several_blocks() -> None:
    parts = [{"index": n, "id": f"c{n}", "function": {"name": "f", "arguments": json.dumps({"n": n})}} for n in range(3)]
    assert read_blocks(chunk(tool_calls=parts), finish="tool_calls") == [tool(f"c{n}", "f", n=n) for n in range(3)]


def test_text_after_a_call_is_a_block_after_it() -> None:
    blocks = read_blocks(call(0, '{"a":1}', name="f", call_id="c1"), chunk(content="done"))
    assert blocks == [tool("c1", "f", a=1), text("done")]


def test_an_id_is_made_where_the_engine_gives_none_and_stays() -> None:
    blocks = read_blocks(call(0, '{"a"', name="f"), call(0, ":1}"), call(1, "{}", name="g", call_id=""), finish="tool_calls")
    assert blocks == [tool("toolu_0193a5c2_0", "f", a=1), tool("toolu_0193a5c2_1", "g")]


def test_an_id_that_comes_late_is_kept_when_nothing_was_said_before_it() -> None:
    assert read_blocks(call(0, None, name="f"), call(0, "{}", call_id="c1"), finish="tool_calls") == [tool("c1", "f")]


def test_two_calls_never_share_an_id() -> None:
    blocks = read_blocks(call(0, "{}", name="f", call_id="same"), call(1, "{}", name="g", call_id="same"))
    assert [block["id"] for block in blocks] == ["same", "toolu_0193a5c2_1"]


def test_a_name_may_come_after_the_first_piece() -> None:
    assert read_blocks(call(0, "", call_id="c1"), call(0, '{"a":', name="f"), call(0, "1}")) == [tool("c1", "f", a=1)]
    pieces = [call(0, '{"a"', call_id="c1"), call(0, ":"), call(0, "1", name="f"), call(0, "}")]
    assert read_blocks(*pieces) == [tool("c1", "f", a=1)]


def test_ids_that_change_or_are_null_in_later_pieces_do_not_change_the_call() -> None:
    later = chunk(tool_calls=[{"index": 0, "id": None, "type": None, "function": {"name": None, "arguments": ":1"}}])
    assert read_blocks(call(0, '{"a"', name="f", call_id="c1"), later, call(0, "}", call_id="c9")) == [tool("c1", "f", a=1)]


def test_calls_without_an_index_are_told_apart_by_id_and_end() -> None:
    blocks = read_blocks(
        call(None, '{"a"', name="f", call_id="c1"),
        call(None, ":1}"),
        call(None, '{"b":2}', name="g", call_id="c2"),
        call(None, ""),
    )
    assert blocks == [tool("c1", "f", a=1), tool("c2", "g", b=2)]


def test_calls_that_all_have_index_0_are_told_apart() -> None:
    blocks = read_blocks(call(0, '{"a":1}', name="f", call_id="c1"), call(0, '{"b":2}', name="f", call_id="c2"))
    assert blocks == [tool("c1", "f", a=1), tool("c2", "f", b=2)]


@pytest.mark.parametrize("arguments", ["plain words", "[1]", '"a', "True"])
def test_arguments_that_are_no_object_stand_under_a_key(arguments: str) -> None:
    assert read_blocks(call(0, arguments, name="f", call_id="c1")) == [tool("c1", "f", INVALID_JSON=arguments)]


def test_arguments_that_were_encoded_twice_are_decoded_once() -> None:
    assert read_blocks(call(0, '"{\\"a\\": 1}"', name="f", call_id="c1")) == [tool("c1", "f", a=1)]


def test_calls_without_arguments_that_all_have_index_0_are_told_apart() -> None:
    assert read_blocks(call(0, "", name="f", call_id="c1"), call(0, "", name="g", call_id="c2")) == [
        tool("c1", "f"),
        tool("c2", "g"),
    ]


def test_an_engine_that_repeats_id_and_name_makes_one_call() -> None:
    pieces = ['{"a"', ":1}", ""]
    assert read_blocks(*[call(0, piece, name="f", call_id="c1") for piece in pieces]) == [tool("c1", "f", a=1)]
    changing = [call(0, piece, name="f", call_id=f"c{number}") for number, piece in enumerate(["", *pieces[:2]])]
    assert read_blocks(*changing, call(0, "")) == [tool("c0", "f", a=1)]


def test_a_name_that_changes_within_arguments_does_not_change_the_call() -> None:
    assert read_blocks(call(0, '{"a"', name="f", call_id="c1"), call(0, ":1}", name="g", call_id="c2")) == [
        tool("c1", "f", a=1)
    ]


def test_calls_without_an_index_may_be_mixed_when_each_piece_has_its_id() -> None:
    pieces = [("c1", '{"a"'), ("c2", '{"b"'), ("c1", ":1}"), ("c2", ":2}")]
    blocks = read_blocks(*[call(None, piece, name=f"f_{call_id}", call_id=call_id) for call_id, piece in pieces])
    assert blocks == [tool("c1", "f_c1", a=1), tool("c2", "f_c2", b=2)]


def test_empty_pieces_and_an_empty_list_of_calls_produce_nothing() -> None:
    data, _ = say(
        chunk(content="a"),
        chunk(content="", tool_calls=[]),
        chunk(content=None),
        chunk(reasoning_content="", content="b"),
        write_event({"choices": [{"index": 0, "finish_reason": None}]}),
        write_event({"choices": [{"index": 0, "delta": {"content": "c"}, "finish_reason": ""}]}),
    )
    assert read_message(data)["content"] == [text("abc")]
    assert sum(name == "content_block_delta" for name, _ in read_events(data)) == 3


def test_other_choices_than_the_first_are_no_part_of_a_message() -> None:
    second = write_event({"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "length"}]})
    assert read_blocks(chunk(content="yes"), second) == [text("yes")]


def test_an_empty_answer_has_one_empty_text() -> None:
    assert read_blocks() == [text("")]


def test_an_answer_cut_while_it_thought_has_its_thinking_only() -> None:
    data, _ = say(chunk(reasoning="hm"), finish="length")
    message = read_message(data)
    assert (message["content"], message["stop_reason"]) == ([THOUGHT], "max_tokens")


def test_arguments_that_were_cut_stay_as_far_as_they_came() -> None:
    data, _ = say(call(0, '{"a": "b', name="f", call_id="c1"), finish="length")
    message = read_message(data)
    assert message["content"][0]["input"] == '{"a": "b'
    assert message["stop_reason"] == "max_tokens"


# How it ends


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("stop", "end_turn"),
        ("length", "max_tokens"),
        ("content_filter", "refusal"),
        ("tool_calls", "end_turn"),
        ("eos_token", "end_turn"),
    ],
)
def test_reasons_of_an_end_without_calls(finish: str, reason: str) -> None:
    data, _ = say(chunk(content="a"), finish=finish)
    assert read_message(data)["stop_reason"] == reason


@pytest.mark.parametrize(
    ("finish", "reason"),
    [("stop", "tool_use"), ("tool_calls", "tool_use"), ("function_call", "tool_use"), ("length", "max_tokens")],
)
def test_reasons_of_an_end_after_calls(finish: str, reason: str) -> None:
    data, _ = say(call(0, "{}", name="f", call_id="c1"), finish=finish)
    assert read_message(data)["stop_reason"] == reason


def end_by(stopped_by: object) -> bytes:
    return write_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "stop_reason": stopped_by}]})


@pytest.mark.parametrize(
    ("stopped_by", "reason", "sequence"),
    [("END", "stop_sequence", "END"), (128009, "end_turn", None), (None, "end_turn", None), ("", "end_turn", None)],
)
def test_the_stop_sequence_is_named_when_the_engine_names_it(stopped_by: object, reason: str, sequence: str | None) -> None:
    data, _ = translate([chunk(content="a"), end_by(stopped_by), usage(), DONE])
    message = read_message(data)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(("matched", "reason"), [("END", "stop_sequence"), (151645, "end_turn"), (None, "end_turn")])
def test_the_stop_sequence_is_known_under_its_other_name_too(matched: object, reason: str) -> None:
    choice = {"index": 0, "delta": {"content": "a"}, "finish_reason": "stop", "matched_stop": matched}
    data, _ = translate([write_event({"choices": [choice]}), usage(), DONE])
    message = read_message(data)
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, "END" if reason == "stop_sequence" else None)


def test_a_stop_sequence_does_not_hide_a_whole_call() -> None:
    data, _ = translate([call(0, "{}", name="f", call_id="c1"), end_by("END")])
    assert read_message(data)["stop_reason"] == "tool_use"


def test_a_call_that_a_stop_sequence_cut_short_is_not_to_be_made() -> None:
    data, _ = translate([call(0, '{"a', name="f", call_id="c1"), end_by("END")])
    assert read_message(data)["stop_reason"] == "stop_sequence"


def test_a_refusal_is_text_and_the_reason() -> None:
    data, _ = say(chunk(refusal="I can"), chunk(refusal="not."))
    message = read_message(data)
    assert (message["content"], message["stop_reason"]) == ([text("I cannot.")], "refusal")


# Counts


def test_final_counts_are_in_the_last_event_and_cached_tokens_are_counted_once() -> None:
    data, translator = translate(
        [chunk(content="a"), chunk("stop"), usage(100, 7, prompt_tokens_details={"cached_tokens": 80})]
    )
    start, delta = read_events(data)[0][1], read_events(data)[-2][1]
    assert start["message"]["usage"]["input_tokens"] == 0
    assert delta["usage"] == {
        "input_tokens": 20,
        "output_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 80,
    }
    assert translator.usage is not None
    assert (translator.usage.prompt_tokens, translator.usage.completion_tokens) == (100, 7)
    assert translator.usage.total_tokens == 107


def test_counts_that_the_engine_says_at_once_are_in_the_first_event() -> None:
    early = {"prompt_tokens": 5, "completion_tokens": 1}
    first = write_event({"choices": [{"index": 0, "delta": {"content": "a"}}], "usage": early})
    data, translator = translate([first, chunk("stop")])
    assert read_events(data)[0][1]["message"]["usage"]["input_tokens"] == 5
    assert read_message(data)["usage"]["output_tokens"] == 1
    assert translator.usage is not None
    assert translator.usage.total_tokens == 6


def test_tokens_of_thinking_are_told_when_they_were_counted() -> None:
    data, _ = translate([chunk("stop"), usage(completion_tokens_details={"reasoning_tokens": 3})])
    assert read_message(data)["usage"]["output_tokens_details"] == {"thinking_tokens": 3}


def test_an_engine_that_counts_nothing_leaves_zeros_and_no_usage() -> None:
    data, translator = translate([chunk(content="a"), chunk("stop"), DONE])
    assert read_message(data)["usage"]["output_tokens"] == 0
    assert translator.usage is None


# Framing


@pytest.mark.parametrize("line_end", [b"\r\n", b"\r"])
def test_other_line_ends_and_comments_are_read(line_end: bytes) -> None:
    stream = b": ping\n\n" + chunk(content="a") + b"id: 7\nevent: message\n" + chunk(content="b") + chunk("stop") + DONE
    data, _ = translate([stream.replace(b"\n", line_end)])
    assert read_message(data)["content"] == [text("ab")]


def test_data_without_a_space_and_over_several_lines_is_read() -> None:
    stream = b'data:{"choices":\ndata: [{"index":0,"delta":{"content":"a"},\ndata:"finish_reason":"stop"}]}\n\n'
    data, _ = translate([stream])
    assert read_message(data)["content"] == [text("a")]


def test_a_last_event_without_a_blank_line_counts_when_it_is_whole() -> None:
    data, translator = translate([chunk(content="a"), chunk("stop").rstrip(b"\n")])
    assert translator.failure is None
    assert read_message(data)["content"] == [text("a")]


@pytest.mark.parametrize("size", [1000, 65_536])
def test_one_event_may_be_larger_than_what_is_usually_held(size: int) -> None:
    words = "word \u00e9\n" * 100_000
    stream = chunk(content="a") + call(0, json.dumps({"text": words}), name="f", call_id="c1") + chunk("tool_calls") + DONE
    data, _ = translate(stream[at : at + size] for at in range(0, len(stream), size))
    assert read_message(data)["content"] == [text("a"), tool("c1", "f", text=words)]


def test_the_stream_may_end_in_such_an_event() -> None:
    stream = chunk(content="x" * 400_000, finish="stop").rstrip(b"\n")
    data, _ = translate(stream[at : at + 100_000] for at in range(0, len(stream), 100_000))
    assert read_message(data)["content"] == [text("x" * 400_000)]


# Failures


def fail(*pieces: bytes) -> tuple[bytes, Any]:
    data, translator = translate(pieces)
    assert translator.failure is not None
    assert b"message_delta" not in data
    assert b"message_stop" not in data
    if data:
        read_events(data)
    assert translator.feed(chunk(content="more")) == b""
    assert translator.finish() == b""
    return data, translator.failure


@pytest.mark.parametrize(
    ("error", "words", "status"),
    [
        ({"message": "out of memory", "type": "server_error", "code": 500}, "out of memory", 500),
        ({"message": "busy", "code": 503}, "busy", 503),
        ({"message": "bad", "code": "internal"}, "bad", 502),
        ("the worker died", "the worker died", 502),
    ],
)
def test_an_error_in_the_stream_is_the_failure_in_the_engines_words(error: object, words: str, status: int) -> None:
    data, failure = fail(chunk(content="a"), write_event({"error": error}), chunk("stop"), DONE)
    assert read_message(data, is_whole=False)["content"] == [text("a")]
    assert (failure.message, failure.status) == (words, status)


def test_an_error_before_anything_was_said_leaves_nothing_to_take_back() -> None:
    data, failure = fail(b"event: error\n" + write_event({"error": {"message": "no", "code": 500}}))
    assert (data, failure.message) == (b"", "no")


def test_an_error_in_the_older_shape_is_an_error() -> None:
    _, failure = fail(write_event({"object": "error", "message": "worse", "code": 500}))
    assert failure.message == "worse"


def test_an_error_about_the_context_is_known_as_one() -> None:
    words = "This model's maximum context length is 4096 tokens, however you requested 5000 tokens."
    _, failure = fail(write_event({"error": {"message": words, "code": 400}}))
    assert isinstance(failure, ContextTooLong)
    assert (failure.prompt_tokens, failure.context_tokens) == (5000, 4096)


def test_null_for_an_error_is_none() -> None:
    event = write_event({"error": None, "choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]})
    data, _ = translate([event])
    assert read_message(data)["content"] == [text("a")]


@pytest.mark.parametrize("last", [b"", usage(), DONE[:8]])
@pytest.mark.parametrize("said", [b"", chunk(content="a")])
def test_an_end_that_the_engine_did_not_announce_interrupts_the_answer(said: bytes, last: bytes) -> None:
    _, failure = fail(said, last)
    assert isinstance(failure, RequestInterrupted)


@pytest.mark.parametrize("done", [DONE, DONE[:-2]])
@pytest.mark.parametrize(("said", "content"), [((), ""), ((chunk(content="a"), usage()), "a")])
def test_an_engine_that_says_done_needs_no_finish_reason(said: tuple[bytes, ...], content: str, done: bytes) -> None:
    data, translator = translate([*said, done])
    message = read_message(data)
    assert (translator.failure, message["content"], message["stop_reason"]) == (None, [text(content)], "end_turn")


@pytest.mark.parametrize("finish", ["abort", "error"])
def test_an_engine_that_gave_up_is_a_failure(finish: str) -> None:
    fail(chunk(content="a"), chunk(finish), DONE)


@pytest.mark.parametrize(
    "garbage",
    [
        b"data: nonsense\n\n",
        b"data: 17\n\n",
        b'data: {"choices": 5}\n\n',
        b'data: {"a"\n\n',
        b"data: \xff\n\n",
        b"data: [1]\n\n",
    ],
)
def test_bytes_that_are_no_chunk_are_a_failure(garbage: bytes) -> None:
    data, _ = fail(chunk(content="a"), garbage, chunk("stop"), DONE)
    assert read_message(data, is_whole=False)["content"] == [text("a")]


def test_events_of_one_read_that_came_before_the_failure_still_go_out() -> None:
    data, _ = fail(chunk(content="a") + chunk(content="b") + b"data: nonsense\n\n" + chunk(content="c"))
    assert read_message(data, is_whole=False)["content"] == [text("ab")]


def test_arguments_after_their_end_are_a_failure() -> None:
    fail(call(0, '{"a":1}', name="f", call_id="c1"), call(0, '{"b":2}'), chunk("tool_calls"))


def test_a_call_without_a_name_is_a_failure() -> None:
    fail(call(0, '{"a":1}', call_id="c1"), chunk("tool_calls"))


def test_what_waits_is_bounded() -> None:
    waiting = call(1, "x" * (MAX_HELD_CHARS // 4), name="g", call_id="c2")
    _, failure = fail(call(0, '{"a', name="f", call_id="c1"), *[waiting] * 5)
    assert isinstance(failure, StreamTooLarge)


def test_one_event_is_bounded() -> None:
    piece = b"x" * 1024 * 1024
    translator = open_answer()
    translator.feed(b'data: {"choices": [{"delta": {"content": "')
    for _ in range(MAX_EVENT_BYTES // len(piece) + 1):
        translator.feed(piece)
    assert isinstance(translator.failure, StreamTooLarge)


def test_a_long_call_that_comes_in_order_is_not_held() -> None:
    piece = call(0, "x" * (MAX_HELD_CHARS // 4))
    data, translator = translate([call(0, '{"a":"', name="f", call_id="c1"), *[piece] * 5, call(0, '"}'), chunk("tool_calls")])
    assert translator.failure is None
    assert len(read_message(data)["content"][0]["input"]["a"]) == 5 * (MAX_HELD_CHARS // 4)
