"""Random answers, written as chat streams and cut everywhere, come out as the same answer, and go back in as it was said."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gateway.dialects.responses import ResponsesTranslator, translate_responses
from gateway.dialects.translation import AnswerContext
from tests.unit.gateway.responses_reader import Reading, ask, read_stream

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "look"},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "mcp__mail", "tools": [{"type": "function", "name": "send"}]},
]
FLAT_NAMES = ("look", "patch", "mcp__mail__send", "made_up")
NASTY = st.text(max_size=12) | st.sampled_from(
    ['"', "\\", '\\"}', "\n\n", "data: [DONE]\n\n", "\u2028", "😀", "\x00", "</s>", ""]
)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | NASTY,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NASTY, inner, max_size=2),
    max_leaves=4,
)


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    has_id: bool


@dataclass(frozen=True)
class Segment:
    """A stretch of an answer: a thought, text or a refusal in pieces, or calls whose pieces are mixed in this order."""

    kind: str
    pieces: tuple[str, ...] = ()
    calls: tuple[Call, ...] = ()
    order: tuple[int, ...] = ()
    size: int = 1


@dataclass
class Answer:
    """What an engine says, in its own terms."""

    thought: str = ""
    text: str = ""
    refusal: str = ""
    calls: list[Call] = field(default_factory=list)
    deltas: list[dict[str, Any]] = field(default_factory=list)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    name = draw(st.sampled_from(FLAT_NAMES))
    if name == "patch":
        arguments = json.dumps({"input": draw(NASTY)}, ensure_ascii=draw(st.booleans()))
    else:
        arguments = draw(st.dictionaries(NASTY, NESTED, max_size=2).map(json.dumps) | NASTY.filter(str.strip) | st.just(""))
    return Call(name, arguments, draw(st.booleans()))


SPOKEN = st.builds(
    Segment,
    kind=st.sampled_from(["reasoning_content", "reasoning", "content", "refusal"]),
    pieces=st.lists(NASTY, max_size=3).map(tuple),
)
CALLED = st.builds(
    Segment,
    kind=st.just("calls"),
    calls=st.lists(calls(), min_size=1, max_size=3).map(tuple),
    order=st.lists(st.integers(0, 2), max_size=8).map(tuple),
    size=st.integers(1, 6),
)
ANSWERS = st.lists(SPOKEN | CALLED, max_size=4)
STEPS = st.integers(40, 120)
"""Bytes from one cut to the next: an answer drawn at random has some thousand bytes; the rich one is cut at each."""


RICH = [
    Segment("reasoning", ("h\n\nm", "😀")),
    Segment("content", ('data: "', "}\n\n")),
    Segment(
        "calls",
        calls=(
            Call("look", '{"a":"\\u00fc\\""}', True),
            Call("patch", '{"input":"+\\n"}', False),
            Call("mcp__mail__send", "", True),
        ),
        order=(0, 1, 0),
        size=5,
    ),
    Segment("refusal", ("no",)),
]


def play(segments: list[Segment]) -> Answer:
    """Write the deltas of an answer and note what they say."""
    answer = Answer()
    for segment in segments:
        if segment.kind == "calls":
            _play_calls(answer, segment)
            continue
        answer.deltas += [{segment.kind: piece} for piece in segment.pieces]
        said = "".join(segment.pieces)
        if segment.kind == "content":
            answer.text += said
        elif segment.kind == "refusal":
            answer.refusal += said
        else:
            answer.thought += said
    return answer


def _play_calls(answer: Answer, segment: Segment) -> None:
    first = len(answer.calls)
    waiting: dict[int, list[dict[str, Any]]] = {}
    for n, call in enumerate(segment.calls):
        index = first + n
        head = {"index": index, "type": "function", "function": {"name": call.name, "arguments": ""}}
        answer.deltas.append({"tool_calls": [{**head, **({"id": f"call-{index}"} if call.has_id else {})}]})
        cuts = range(0, len(call.arguments), segment.size)
        waiting[n] = [{"index": index, "function": {"arguments": call.arguments[at : at + segment.size]}} for at in cuts]
        answer.calls.append(call)
    turns = [n for n in segment.order if n in waiting] + [n for n, pieces in waiting.items() for _ in pieces]
    for n in turns:
        if waiting[n]:
            answer.deltas.append({"tool_calls": [waiting[n].pop(0)]})


def write(answer: Answer, finish_reason: str = "stop") -> tuple[bytes, int]:
    """Return the chat stream of an answer, and where its last choice is whole. Short, for it is cut at every byte."""
    choices = [{"delta": delta} for delta in answer.deltas]
    stream = b"".join(_write({"choices": [choice]}) for choice in [*choices, {"delta": {}, "finish_reason": finish_reason}])
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    return stream + _write({"choices": [], "usage": usage}) + b"data: [DONE]\n\n", len(stream) - 2


def _write(chunk: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(chunk, separators=(",", ":")).encode()


def open_translator() -> ResponsesTranslator:
    context = AnswerContext(request_id="req_ab12", model="m", created=1, clock=lambda: 0.0)
    opened = translate_responses(ask(stream=True, tools=TOOLS)).open_answer(context)
    assert isinstance(opened, ResponsesTranslator)
    return opened


def said(call: Call) -> dict[str, Any]:
    """Return what a call means, whatever its letters are."""
    if call.name == "patch":
        return {"name": "patch", "input": json.loads(call.arguments)["input"]}
    arguments = call.arguments if call.arguments.strip() else "{}"
    if call.name == "mcp__mail__send":
        return {"name": "send", "namespace": "mcp__mail", "arguments": call.arguments + arguments[len(call.arguments) :]}
    return {"name": call.name, "arguments": arguments}


def check_reading(reading: Reading, answer: Answer) -> None:
    parts = [
        (kind, text) for _i, item in sorted(reading.items.items()) for kind, text in zip(item.kinds, item.parts, strict=True)
    ]
    assert "".join(text for kind, text in parts if kind == "reasoning_text") == answer.thought
    assert "".join(text for kind, text in parts if kind == "output_text") == answer.text
    assert "".join(text for kind, text in parts if kind == "refusal") == answer.refusal
    found = [item for item in reading.response["output"] if item["type"].endswith("_call")]
    keys = ("name", "namespace", "arguments", "input")
    assert [{key: item[key] for key in keys if key in item} for item in found] == [said(call) for call in answer.calls]
    for n, (item, call) in enumerate(zip(found, answer.calls, strict=True)):
        assert not call.has_id or item["call_id"] == f"call-{n}"


def expect_message(answer: Answer, call_ids: list[str]) -> dict[str, Any]:
    """Return the chat message an engine would have to see again."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text or None}
    if answer.refusal:
        message["refusal"] = answer.refusal
    if answer.thought:
        message["reasoning_content"] = message["reasoning"] = answer.thought
    if answer.calls:
        message["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call, call_id in zip(answer.calls, call_ids, strict=True)
        ]
    elif message["content"] is None and not answer.refusal:
        message["content"] = ""
    return message


def normalise(message: dict[str, Any]) -> dict[str, Any]:
    """Read the arguments of custom tools: they are written anew from their text. No arguments are an empty object."""
    for call in message.get("tool_calls", []):
        function = call["function"]
        if function["name"] == "patch":
            function["arguments"] = json.loads(function["arguments"])
        elif not function["arguments"].strip():
            function["arguments"] += "{}"
    return message


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANSWERS, STEPS)
@example(RICH, 1)
def test_a_stream_cut_at_any_byte_says_the_same(segments: list[Segment], step: int) -> None:
    answer = play(segments)
    stream, _end = write(answer)
    whole = open_translator()
    expected = whole.feed(stream) + whole.finish()
    check_reading(read_stream(expected), answer)
    for at in range(step // 2, len(stream), step):
        cut = _again(whole)
        assert cut.feed(stream[:at]) + cut.feed(stream[at:]) + cut.finish() == expected
        assert cut.kept == whole.kept
    bytewise = _again(whole)
    assert b"".join(bytewise.feed(stream[at : at + 1]) for at in range(len(stream))) + bytewise.finish() == expected


def _again(translator: ResponsesTranslator) -> ResponsesTranslator:
    return ResponsesTranslator(translator._plan, translator._context)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANSWERS, st.sampled_from(["stop", "length"]), STEPS)
@example(RICH, "stop", 1)
def test_a_stream_that_breaks_off_never_ends_as_if_it_were_whole(
    segments: list[Segment], finish_reason: str, step: int
) -> None:
    stream, end = write(play(segments), finish_reason)
    first = open_translator()
    for n, at in enumerate((*range(step // 2, end - 1, step), *range(max(end - 1, 0), len(stream)))):
        translator = _again(first)
        out = translator.feed(stream[:at]) + translator.finish()
        is_ended = b"\nevent: response.completed\n" in out or b"\nevent: response.incomplete\n" in out
        assert is_ended == (translator.failure is None) == (at >= end)
        assert (translator.kept is not None) == is_ended
        if n % 97 == 0:
            error = translator.failure
            reading = read_stream(out + (translator.fail(error) if error is not None else b""))
            assert reading.response["status"] == ("failed" if at < end else reading.response["status"])


@settings(max_examples=100, deadline=None)
@given(ANSWERS)
@example(RICH)
def test_what_was_said_goes_back_as_the_engine_said_it(segments: list[Segment]) -> None:
    answer = play(segments)
    translator = open_translator()
    translator.feed(write(answer)[0])
    translator.finish()
    assert translator.kept is not None
    output = json.loads(translator.kept)["output"]
    call_ids = [item["call_id"] for item in output if "call_id" in item]
    expected = normalise(expect_message(answer, call_ids))
    question, next_question = {"role": "user", "content": "x"}, {"role": "user", "content": "y"}
    as_input = translate_responses(ask(input=[question, *output, next_question], tools=TOOLS))
    history = [json.dumps(item).encode() for item in (question, *output)]
    as_history = translate_responses(ask(input="y", tools=TOOLS), history=history)
    for translation in (as_input, as_history):
        messages = json.loads(translation.body)["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant", "user"]
        assert normalise(messages[1]) == expected
