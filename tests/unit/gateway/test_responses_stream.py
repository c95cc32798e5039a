"""Chat streams and chat answers as responses: events, objects, numbers, and ends that are honest."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.responses import ResponsesTranslator, render_failed_response, translate_responses
from gateway.dialects.translation import AnswerContext
from gateway.errors import (
    ContextTooLong,
    EngineRefused,
    ForwardedRequestFailed,
    GatewayError,
    NoAvailableNode,
    RateLimited,
    RequestInterrupted,
    RequestTimeout,
    StreamTooLarge,
)
from tests.unit.gateway.responses_reader import (
    OBJECT_KEYS,
    Reading,
    ask,
    open_answer,
    read_stream,
    run_stream,
    split_events,
    write_call,
    write_chunk,
)

BEGIN = write_chunk({"role": "assistant", "content": ""})
USAGE = {
    "prompt_tokens": 11,
    "completion_tokens": 5,
    "total_tokens": 16,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
DONE = b"data: [DONE]\n\n"


def tell(*deltas: dict[str, Any], finish_reason: str = "stop", **fields: object) -> Reading:
    """Return what a stream of these deltas is read as."""
    translator = open_answer(stream=True, **fields)
    reading = run_stream(translator, BEGIN, *[write_chunk(delta) for delta in deltas], write_chunk({}, finish_reason), DONE)
    assert translator.failure is None
    return reading


def tell_whole(message: dict[str, Any], finish_reason: str = "stop", **more: object) -> dict[str, Any]:
    """Return the response that a whole chat answer becomes."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish_reason, "logprobs": None}
    translator = open_answer()
    body = translator.translate_whole(json.dumps({"id": "c", "model": "m", "choices": [choice], **more}).encode())
    assert translator.failure is None
    assert translator.kept == body
    response: dict[str, Any] = json.loads(body)
    return response


def test_a_text_has_every_event_in_its_place() -> None:
    reading = tell({"content": "He"}, {"content": "llo"})
    assert reading.names == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert reading.text == "Hello"
    assert reading.response["output"] == [
        {
            "id": "msg_ab12_0",
            "type": "message",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}],
        }
    ]
    assert reading.response["id"] == "resp_ab12"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_a_thought_is_an_item_before_the_message(name: str) -> None:
    reading = tell({name: "hm"}, {name: "m"}, {"content": "So."})
    thought, message = reading.response["output"]
    assert thought == {
        "id": "rs_ab12_0",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hmm"}],
    }
    assert message["id"] == "msg_ab12_1"
    done = reading.names.index("response.output_item.done")
    assert done < reading.names.index("response.output_text.delta"), "the thought ends before the message begins"


def test_an_engine_that_says_its_thought_under_two_names_means_one() -> None:
    assert tell({"reasoning": "hm", "reasoning_content": "hm"}, {"content": "x"}).items[0].parts == ["hm"]


def test_a_call_has_its_arguments_in_pieces_and_as_a_whole() -> None:
    reading = tell(
        {"content": "Wait."},
        write_call(0, "", name="f", call_id="call_1"),
        write_call(0, '{"a":'),
        write_call(0, " 1}"),
        finish_reason="tool_calls",
    )
    assert reading.names[8:-1] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    assert reading.response["output"][1] == {
        "id": "fc_ab12_1",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_1",
        "name": "f",
        "arguments": '{"a": 1}',
    }


def test_interleaved_calls_stay_apart() -> None:
    reading = tell(
        write_call(0, "", name="f", call_id="a"),
        write_call(1, "", name="g", call_id="b"),
        write_call(0, '{"x":1'),
        write_call(1, '{"y":2'),
        write_call(0, "}"),
        write_call(1, "}"),
    )
    assert [(item["call_id"], item["arguments"]) for item in reading.response["output"]] == [("a", '{"x":1}'), ("b", '{"y":2}')]


def test_a_call_without_arguments_has_an_empty_object_of_them() -> None:
    (item,) = tell(write_call(0, "", name="f", call_id="a")).response["output"]
    assert item["arguments"] == "{}"


def test_ids_that_are_missing_late_or_used_twice_are_made_up() -> None:
    reading = tell(
        write_call(0, "{}", name="f"),
        write_call(1, "{}", name="g", call_id="same"),
        write_call(2, "{}", name="h", call_id="same"),
        write_call(0, "", call_id="late"),
    )
    assert [item["call_id"] for item in reading.response["output"]] == ["call_ab12_0", "same", "call_ab12_2"]


def test_a_name_that_comes_late_loses_no_arguments() -> None:
    (item,) = tell(write_call(0, '{"a":', call_id="c"), write_call(0, "", name="f"), write_call(0, "1}")).response["output"]
    assert (item["name"], item["call_id"], item["arguments"]) == ("f", "c", '{"a":1}')


def test_a_name_that_is_repeated_begins_no_other_call() -> None:
    (item,) = tell(
        write_call(0, '{"a"', name="f", call_id="c"),
        write_call(0, ":1", name="f", call_id="c"),
        write_call(0, "}", name="f"),
        write_call(0, "", call_id="changed"),
    ).response["output"]
    assert item["arguments"] == '{"a":1}'


@pytest.mark.parametrize("index", [0, None], ids=["one-index-for-all", "no-index"])
def test_calls_whose_index_says_nothing_are_told_apart(index: int | None) -> None:
    reading = tell(
        write_call(index, '{"a":', name="f", call_id="a"),
        write_call(index, "1}"),
        write_call(index, "{}", name="f", call_id="b"),
    )
    assert [item["arguments"] for item in reading.response["output"]] == ['{"a":1}', "{}"]


def test_calls_with_neither_index_nor_id_are_told_apart_by_their_names() -> None:
    reading = tell(write_call(None, "{}", name="f"), write_call(None, '{"a":1}', name="f"))
    assert [item["arguments"] for item in reading.response["output"]] == ["{}", '{"a":1}']


def test_text_after_a_call_is_another_message() -> None:
    reading = tell({"content": "a"}, write_call(0, "{}", name="f", call_id="c"), {"content": "b"})
    assert [item["type"] for item in reading.response["output"]] == ["message", "function_call", "message"]
    assert reading.text == "ab"


def test_a_refusal_is_a_part_of_its_own() -> None:
    reading = tell({"content": "Well."}, {"refusal": "I "}, {"refusal": "won't."})
    (message,) = reading.response["output"]
    assert [part["type"] for part in message["content"]] == ["output_text", "refusal"]
    assert message["content"][1] == {"type": "refusal", "refusal": "I won't."}
    assert "response.refusal.done" in reading.names


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    reading = tell()
    assert reading.response["output"][0]["content"][0]["text"] == ""
    assert reading.response["status"] == "completed"


@pytest.mark.parametrize(
    ("finish_reason", "reason"),
    [("length", "max_output_tokens"), ("content_filter", "content_filter")],
    ids=["length", "filter"],
)
def test_an_answer_that_was_stopped_early_is_incomplete(finish_reason: str, reason: str) -> None:
    reading = tell({"reasoning": "hm"}, {"content": "Hel"}, finish_reason=finish_reason)
    assert reading.names[-1] == "response.incomplete"
    assert reading.response["status"] == "incomplete"
    assert reading.response["incomplete_details"] == {"reason": reason}
    assert reading.response["completed_at"] is None
    assert [item["status"] for item in reading.response["output"]] == ["completed", "incomplete"]


def test_the_call_that_was_cut_is_the_incomplete_one() -> None:
    reading = tell(
        write_call(0, "{}", name="f", call_id="a"), write_call(1, '{"a', name="f", call_id="b"), finish_reason="length"
    )
    assert [item["status"] for item in reading.response["output"]] == ["completed", "incomplete"]
    assert reading.response["output"][1]["arguments"] == '{"a'


def test_a_call_that_was_cut_before_its_arguments_has_none() -> None:
    (item,) = tell(write_call(0, "", name="f", call_id="a"), finish_reason="length").response["output"]
    assert (item["status"], item["arguments"]) == ("incomplete", "")


def test_nothing_but_a_cut_is_no_message() -> None:
    assert tell(finish_reason="length").response["output"] == []


def test_log_probabilities_are_carried_in_the_words_of_responses() -> None:
    def say(text: str, *tokens: dict[str, Any]) -> bytes:
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": None, "logprobs": {"content": list(tokens)}}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    other = {"token": "b", "logprob": -2.0, "bytes": [98]}
    reading = run_stream(
        open_answer(stream=True),
        say("a", {"token": "a", "logprob": -0.5, "bytes": None, "top_logprobs": [{**other, "id": 7}], "id": 9}),
        say("", {"token": "\ufffd", "logprob": -1.0, "bytes": [195]}),
        say("ü", {"token": "\ufffd", "logprob": -1.5, "bytes": [188], "top_logprobs": []}),
        write_chunk({}, "stop"),
    )
    first = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": [other]}
    second = {"token": "\ufffd", "logprob": -1.0, "bytes": [195], "top_logprobs": []}
    third = {"token": "\ufffd", "logprob": -1.5, "bytes": [188], "top_logprobs": []}
    deltas = [event for event in reading.events if event["type"] == "response.output_text.delta"]
    assert [event["logprobs"] for event in deltas] == [[first], [third]]
    assert reading.response["output"][0]["content"][0]["logprobs"] == [first, second, third]
    done = next(event for event in reading.events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == [first, second, third]


def test_log_probabilities_nobody_can_read_are_left_out() -> None:
    unreadable = b'"finish_reason": null, "logprobs": {"content": 7}'
    chunks = [write_chunk({"content": text}).replace(b'"finish_reason": null', unreadable) for text in ("a", "", "")]
    reading = run_stream(open_answer(stream=True), *chunks, write_chunk({}, "stop"))
    assert reading.response["output"][0]["content"][0]["logprobs"] == []
    assert reading.text == "a"


def test_usage_is_counted_and_told_with_its_details() -> None:
    translator = open_answer(stream=True)
    reading = run_stream(translator, BEGIN, write_chunk({"content": "x"}, "stop"), write_chunk(usage=USAGE), DONE)
    assert reading.response["usage"] == {
        "input_tokens": 11,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 16,
    }
    assert translator.usage is not None
    assert (translator.usage.prompt_tokens, translator.usage.completion_tokens, translator.usage.total_tokens) == (11, 5, 16)


def test_usage_nobody_gave_is_null() -> None:
    assert tell({"content": "x"}).response["usage"] is None
    assert open_answer().usage is None


def test_other_choices_than_the_first_are_not_mixed_in() -> None:
    other = b'data: {"choices":[{"index":1,"delta":{"content":"zzz"},"finish_reason":"stop"}]}\n\n'
    translator = open_answer(stream=True)
    assert run_stream(translator, BEGIN, other, write_chunk({"content": "a"}), write_chunk({}, "stop")).text == "a"


def test_comments_blank_events_and_other_line_ends_are_understood() -> None:
    chunks = [BEGIN, b": ping\n\n", write_chunk({"content": "a"}), b"\n\n", write_chunk({"content": "b"}, "stop"), DONE]
    stream = b"".join(chunks).replace(b"\n", b"\r\n")
    assert run_stream(open_answer(stream=True), stream).text == "ab"
    assert run_stream(open_answer(stream=True), b"".join(chunks).replace(b"data: ", b"data:")).text == "ab"


def test_an_event_larger_than_the_cutter_holds_is_put_together() -> None:
    text = "x" * 1_000_000
    stream = BEGIN + write_chunk(write_call(0, json.dumps({"a": text}), name="f", call_id="c")) + write_chunk({}, "tool_calls")
    pieces = [stream[at : at + 60_000] for at in range(0, len(stream), 60_000)]
    (item,) = run_stream(open_answer(stream=True), *pieces).response["output"]
    assert json.loads(item["arguments"]) == {"a": text}


def test_an_event_without_end_is_not_held_without_end() -> None:
    translator = open_answer(stream=True)
    piece = b"x" * 1_000_000
    fed = 0
    while translator.failure is None and fed < 100:
        translator.feed(b"data: " + piece if fed == 0 else piece)
        fed += 1
    assert isinstance(translator.failure, StreamTooLarge)
    assert fed < 40


def test_the_object_repeats_the_request() -> None:
    given: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 9,
        "max_tool_calls": 3,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "temperature": 0.5,
        "text": {"verbosity": "low"},
        "tool_choice": {"type": "function", "name": "f"},
        "top_logprobs": 2,
        "top_p": 0.25,
        "user": "u",
    }
    tools = [{"type": "function", "name": "f"}, {"type": "web_search"}]
    response = tell({"content": "x"}, reasoning={"effort": "low"}, tools=tools, **given).response
    given["text"] = {"format": {"type": "text"}, "verbosity": "low"}
    assert {name: response[name] for name in given} == given
    assert response["tools"] == [
        {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None},
        {"type": "web_search"},
    ]
    assert response["reasoning"] == {"effort": "low", "summary": None}


def test_the_object_of_a_bare_request_has_every_key_and_no_user() -> None:
    response = tell({"content": "x"}).response
    assert set(response) == OBJECT_KEYS
    assert (response["object"], response["model"], response["created_at"]) == ("response", "m", 1_795_000_000)
    assert (response["store"], response["background"], response["previous_response_id"]) == (False, False, None)
    assert (response["temperature"], response["tool_choice"], response["tools"]) == (1.0, "auto", [])
    assert (response["text"], response["truncation"]) == ({"format": {"type": "text"}}, "disabled")


def test_a_kept_response_says_so_and_has_the_id_it_is_kept_under() -> None:
    translation = translate_responses(ask(), is_stored=True, previous_response_id="resp_0", response_id="resp_1")
    translator = translation.open_answer(AnswerContext(request_id="req_x", model="real", created=1))
    out = translator.feed(BEGIN + write_chunk({"content": "x"}, "stop")) + translator.finish()
    response = read_stream(out).response
    assert (response["id"], response["store"], response["previous_response_id"]) == ("resp_1", True, "resp_0")
    assert response["model"] == "real"
    assert response["output"][0]["id"] == "msg_1_0"
    assert translator.kept is not None
    assert json.loads(translator.kept) == response


def test_a_response_that_was_to_be_kept_and_failed_does_not_say_that_it_was_kept() -> None:
    translation = translate_responses(ask(), is_stored=True, response_id="resp_1")
    translator = translation.open_answer(AnswerContext(request_id="req_x", model="real", created=1))
    out = translator.feed(BEGIN + write_chunk({"content": "x"})) + translator.finish()
    assert translator.failure is not None
    assert isinstance(translator, ResponsesTranslator)
    out += translator.fail(translator.failure)
    said = [json.loads(event.rpartition(b"data:")[2])["response"] for event in out.split(b"\n\n") if b'"response":{' in event]
    assert [(one["status"], one["store"]) for one in said] == [("in_progress", True)] * 2 + [("failed", False)]
    assert translator.kept is None


def test_times_are_whole_seconds_of_the_clock_that_was_given() -> None:
    readings = iter([5.0, 6.5, 8.2])
    translation = translate_responses(ask())
    translator = translation.open_answer(AnswerContext("req_x", "m", 100, clock=lambda: next(readings)))
    out = translator.feed(write_chunk({"content": "x"}, "stop")) + translator.finish()
    assert read_stream(out).response["completed_at"] == 103


def test_a_whole_answer_is_the_same_response_as_the_streamed_one() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    whole = tell_whole({"reasoning": "hm", "content": "So.", "tool_calls": [call]}, "tool_calls", usage=USAGE)
    translator = open_answer()
    streamed = run_stream(
        translator,
        write_chunk({"reasoning": "hm"}),
        write_chunk({"content": "So."}),
        write_chunk({"tool_calls": [{"index": 0, **call}]}, "tool_calls"),
        write_chunk(usage=USAGE),
    ).response
    assert whole == streamed
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"]


def test_whole_calls_without_ids_stay_apart() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": text}} for text in ("{}", '{"a":1}')]
    output = tell_whole({"content": None, "tool_calls": calls}, "tool_calls")["output"]
    assert [item["arguments"] for item in output] == ["{}", '{"a":1}']
    assert len({item["call_id"] for item in output}) == 2


def test_whole_calls_that_all_have_one_number_stay_apart() -> None:
    calls = [{"index": 0, "function": {"name": "f", "arguments": text}} for text in ("{}", '{"a":1}')]
    output = tell_whole({"content": None, "tool_calls": calls}, "tool_calls")["output"]
    assert [item["arguments"] for item in output] == ["{}", '{"a":1}']


def test_a_whole_answer_carries_refusals_cuts_and_log_probabilities() -> None:
    assert tell_whole({"refusal": "No."})["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]
    assert tell_whole({"content": "a"}, "length")["incomplete_details"] == {"reason": "max_output_tokens"}
    token = {"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}
    choice = {"message": {"content": "a"}, "finish_reason": "stop", "logprobs": {"content": [token]}}
    response = json.loads(open_answer().translate_whole(json.dumps({"choices": [choice]}).encode()))
    assert response["output"][0]["content"][0]["logprobs"] == [token]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"choices":[]}',
        b'{"choices":[{"message":{"content":"x"}}]}',
        b'{"choices":[{"index":1,"message":{"content":"x"},"finish_reason":"stop"}]}',
        b'{"choices":[{"message":{"content":7},"finish_reason":"stop"}]}',
        b'{"choices":[{"message":{"content":"x"},"finish_reason":"abort"}]}',
        b'{"choices":[{"message":{"tool_calls":[{"function":{"arguments":"{}"}}]},"finish_reason":"tool_calls"}]}',
        b'{"error":{"message":"boom"}}',
        b'{"choices":[{"message":{"content":"\xff"},"finish_reason":"stop"}]}',
    ],
)
def test_a_body_that_is_no_whole_chat_answer_is_a_failure(body: bytes) -> None:
    translator = open_answer()
    assert translator.translate_whole(body) == b""
    assert translator.failure is not None
    assert translator.failure.status == 502
    assert translator.kept is None


@pytest.mark.parametrize(
    "chunk",
    [
        b"data: {broken\n\n",
        b"data: []\n\n",
        b"data: <html>\n\n",
        b'data: {"choices":[{"delta":{"content":"\xff"}}]}\n\n',
        b'data: {"choices":[{"delta":{"content":7}}]}\n\n',
        write_chunk({}, "abort"),
        write_chunk({}, "error"),
        b'data: {"error":{"message":"boom","code":500}}\n\n',
        b'event: error\ndata: {"error":"boom"}\n\n',
    ],
)
def test_what_is_no_chat_stream_ends_it_without_an_ending(chunk: bytes) -> None:
    translator = open_answer(stream=True)
    out = translator.feed(BEGIN + write_chunk({"content": "a"})) + translator.feed(chunk)
    assert translator.failure is not None
    assert translator.feed(write_chunk({"content": "b"}, "stop")) == translator.finish() == b""
    assert read_stream(out).end is None
    assert translator.kept is None


def test_a_failure_before_the_first_event_leaves_nothing_said() -> None:
    translator = open_answer(stream=True)
    assert translator.feed(b'data: {"error":{"message":"boom","code":500}}\n\n') == b""
    assert isinstance(translator.failure, EngineRefused)


def test_a_stream_without_its_end_is_a_failure() -> None:
    translator = open_answer(stream=True)
    out = translator.feed(BEGIN + write_chunk({"content": "a"})) + translator.finish()
    assert isinstance(translator.failure, RequestInterrupted)
    assert read_stream(out).end is None


@pytest.mark.parametrize("said", [b"", BEGIN + write_chunk({"content": "a"})])
def test_an_engine_that_says_done_is_done_without_a_finish_reason_too(said: bytes) -> None:
    translator = open_answer(stream=True)
    out = translator.feed(said + DONE) + translator.finish()
    assert translator.failure is None
    assert read_stream(out).names[-1] == "response.completed"


def test_a_stream_cut_inside_an_event_broke_off_and_was_no_rubbish() -> None:
    translator = open_answer(stream=True)
    translator.feed(BEGIN + write_chunk({"content": "a"})[:-20])
    translator.finish()
    assert translator.failure is not None
    assert "broke off" in translator.failure.message


def test_a_call_that_was_never_named_is_a_failure() -> None:
    translator = open_answer(stream=True)
    out = translator.feed(BEGIN + write_chunk(write_call(0, "{}", call_id="c")) + write_chunk({}, "tool_calls"))
    assert read_stream(out + translator.finish()).end is None
    assert isinstance(translator.failure, ForwardedRequestFailed)


def test_a_last_event_without_its_blank_line_counts_when_it_is_whole() -> None:
    translator = open_answer(stream=True)
    out = translator.feed(BEGIN + write_chunk({"content": "a"}, "stop").rstrip(b"\n")) + translator.finish()
    assert read_stream(out).response["status"] == "completed"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ForwardedRequestFailed(), "server_error"),
        (RequestTimeout(), "server_error"),
        (NoAvailableNode(), "server_error"),
        (ContextTooLong(), "context_length_exceeded"),
        (RateLimited(), "rate_limit_exceeded"),
        (EngineRefused("busy", status=429), "rate_limit_exceeded"),
        (EngineRefused("no such parameter", status=400), "invalid_prompt"),
    ],
    ids=lambda value: f"{type(value).__name__}-{value.status}" if isinstance(value, GatewayError) else value,
)
def test_a_broken_stream_ends_with_the_failed_response(error: GatewayError, code: str) -> None:
    translator = open_answer(stream=True)
    out = translator.feed(BEGIN + write_chunk({"reasoning": "hm"}) + write_chunk({"content": "par"}))
    reading = read_stream(out + translator.fail(error))
    assert reading.names[-1] == "response.failed"
    response = reading.response
    param = "input" if isinstance(error, ContextTooLong) else None
    assert response["status"] == "failed"
    assert response["error"] == {"code": code, "message": error.message, "type": error.type, "param": param}
    assert [item["status"] for item in response["output"]] == ["completed", "in_progress"]
    assert response["output"][1]["content"][0]["text"] == "par"
    assert translator.fail(error) == translator.finish() == translator.feed(BEGIN) == b""
    assert translator.kept is None


def test_an_engine_that_overflows_says_so_to_the_client() -> None:
    translator = open_answer(stream=True)
    chunk = (
        b'data: {"error":{"message":"exceeds the available context size","code":400,"type":"exceed_context_size_error"}}\n\n'
    )
    response = run_stream(translator, BEGIN, chunk).response
    assert response["error"]["code"] == "context_length_exceeded"


def test_failing_before_anything_was_said_begins_the_response_first() -> None:
    reading = read_stream(open_answer(stream=True).fail(RequestTimeout()))
    assert reading.names == ["response.created", "response.in_progress", "response.failed"]


def test_a_failure_from_outside_is_the_failure_of_the_answer() -> None:
    translator, error = open_answer(stream=True), RequestTimeout()
    translator.feed(BEGIN)
    translator.fail(error)
    assert translator.failure is error


def test_half_a_custom_call_shows_nothing_of_its_text() -> None:
    translator = open_answer(stream=True, tools=[{"type": "custom", "name": "patch"}])
    out = translator.feed(BEGIN + write_chunk(write_call(0, '{"input": "*** Beg', name="patch", call_id="c")))
    response = read_stream(out + translator.fail(RequestTimeout())).response
    assert response["output"][0]["input"] == ""


def test_nothing_fails_after_the_end() -> None:
    translator = open_answer(stream=True)
    run_stream(translator, BEGIN, write_chunk({"content": "a"}, "stop"))
    assert translator.fail(RequestTimeout()) == b""
    assert translator.failure is None


def test_a_response_can_fail_without_any_translator() -> None:
    body = ask(instructions="Be brief.", stream=True).body
    reading = read_stream(render_failed_response(NoAvailableNode(), response_id="resp_1", model="m", created=7, body=body))
    assert reading.names == ["response.created", "response.failed"]
    assert (reading.response["instructions"], reading.response["created_at"]) == ("Be brief.", 7)
    assert reading.response["error"]["code"] == "server_error"
    assert read_stream(render_failed_response(RequestTimeout(), response_id="r", model="m", created=7, body=b"{")).names


class TestPool:
    """Requests with llm-pool's own fields."""

    TIMES = (10.0, 10.25, 11.0)

    def open(self, **fields: object) -> ResponsesTranslator:
        readings = iter(self.TIMES)
        asked = ask(stream=True, decoding={"temperature": 0.1}, **fields)
        context = AnswerContext("req_1", "m", 100, clock=lambda: next(readings), received_at=9.5)
        translator = translate_responses(asked).open_answer(context)
        assert isinstance(translator, ResponsesTranslator)
        return translator

    def test_the_reply_has_text_and_numbers_at_the_top(self) -> None:
        timings = {"prompt_ms": 200.0, "predicted_ms": 500.0}
        reading = run_stream(
            self.open(),
            write_chunk({"reasoning": "hm"}),
            write_chunk({"content": "Hallo"}),
            write_chunk({"refusal": "!"}, "stop"),
            write_chunk(usage=USAGE, timings=timings),
        )
        assert reading.names[-2:] == ["response.metrics", "response.completed"]
        response = reading.response
        assert response["output_text"] == "Hallo"
        assert response["output"][1]["text"] == "Hallo"
        assert "text" not in response["output"][0]
        assert response["metrics"] == {
            "backend_inference_wall_ms": 1000.0,
            "engine_total_wall_ms": 1500.0,
            "engine_outside_backend_wall_ms": 500.0,
            "pool_total_wall_ms": 1500.0,
            "engine_queue_wait_ms": 500.0,
            "engine_tokenize_ms": None,
            "gpu_time_to_first_token_ms": 250.0,
            "gpu_generate_total_ms": 700.0,
            "gpu_decode_after_first_token_ms": 450.0,
            "engine_prompt_tokens": 11,
            "engine_output_tokens": 5,
            "engine_tokens_per_second": 7.1,
        }
        metrics = reading.events[-2]
        assert (metrics["id"], metrics["metrics"]) == ("resp_1", response["metrics"])

    def test_a_cut_answer_ends_with_the_only_end_its_readers_know(self) -> None:
        reading = run_stream(self.open(), write_chunk({"content": "Hal"}, "length"))
        assert reading.names[-1] == "response.completed"
        assert reading.response["status"] == "incomplete"

    def test_what_nobody_measured_is_null(self) -> None:
        readings = iter([10.0, 10.5])
        context = AnswerContext("req_1", "m", 100, clock=lambda: next(readings))
        translator = translate_responses(ask(allow_remote=True)).open_answer(context)
        body = b'{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}]}'
        metrics = json.loads(translator.translate_whole(body))["metrics"]
        assert {name for name, value in metrics.items() if value is not None} == {
            "backend_inference_wall_ms",
            "engine_total_wall_ms",
            "engine_outside_backend_wall_ms",
            "pool_total_wall_ms",
        }
        assert metrics["pool_total_wall_ms"] == 500.0

    def test_others_never_see_them(self) -> None:
        reading = tell({"content": "x"})
        assert "response.metrics" not in reading.names
        assert not {"metrics", "output_text"} & reading.response.keys()


def test_the_reader_itself_is_strict() -> None:
    good = b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dumps(event).encode())
        for event in split_events(_write_stream())
    )
    read_stream(good)
    for old, new in (
        (b'"sequence_number": 3', b'"sequence_number": 4'),
        (b"msg_ab12_0", b"msg_other"),
        (b'"delta": "a"', b'"delta": "b"'),
        (b'"output_index": 0', b'"output_index": 1'),
        (b'"truncation": "disabled"', b'"cut": "disabled"'),
    ):
        at = good.rfind(old)
        with pytest.raises((AssertionError, KeyError)):
            read_stream(good[:at] + new + good[at + len(old) :])


def _write_stream() -> bytes:
    translator = open_answer(stream=True)
    return translator.feed(BEGIN + write_chunk({"content": "a"}, "stop")) + translator.finish()
