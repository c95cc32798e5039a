"""Whatever a model says, and however its engine and the network cut it up: the same answer comes out, and goes back in.

The oracles are readers that know the API references alone, and the official SDKs.
"""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conformance.exchange import Violation, read_stream
from conformance.readers import messages as messages_reader
from conformance.readers import responses as responses_reader
from core.limits import limits
from gateway.dialects.chat import FailingTranslator
from gateway.dialects.refusal import read_refusal
from gateway.dialects.responses_request import translate_responses
from gateway.dialects.surface import SURFACES
from gateway.errors import GatewayError, StreamTooLarge
from tests.fakes.chat_engine import (
    CONTEXT,
    DONE,
    MESSAGES,
    READERS,
    RESPONSES,
    Json,
    Said,
    call,
    cut,
    open_answer,
    read_said,
    run,
    say_request,
    write_event,
)
from tests.fakes.chat_engine import chunk as spoilt_chunk
from tests.fakes.examples import TIMES
from tests.fakes.golden_cases import CASES, STREAMS, Player
from tests.fakes.golden_cases import write_event as write_golden
from tests.fakes.request_bodies import FLOODS, GOOD, VALUES, list_places, spoil_stream

TOOLS: list[Json] = [
    {"type": "function", "name": "look"},
    {"type": "custom", "name": "patch"},
    {"type": "namespace", "name": "mcp__mail", "tools": [{"type": "function", "name": "send"}]},
]
FIELDS: dict[str, Json] = {MESSAGES: {}, RESPONSES: {"tools": TOOLS}}
NASTY = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.sampled_from(
    ['"', "\\", '\\"}', "\\u0041", "\n\n", "\r\n\r\n", "data: [DONE]\n\n", "\u2028", "😀", "\x00", "}", "{", "</s>", ""]
)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | NASTY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NASTY, inner, max_size=3),
    max_leaves=6,
)
DEEP = json.loads('{"a":' * 90 + "{}" + "}" * 90)
ARGUMENTS = st.dictionaries(NASTY, NESTED, max_size=3) | st.just(DEEP)
both = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
few = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.too_slow])


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
    """What an engine says, in its own terms. ``said``: text and refusals in their order."""

    thought: str = ""
    text: str = ""
    refusal: str = ""
    said: str = ""
    calls: list[Call] = field(default_factory=list)
    deltas: list[Json] = field(default_factory=list)

    @property
    def stream(self) -> bytes:
        """The whole event stream, as short as it can be: it is cut at every byte."""
        finish = "tool_calls" if self.calls else "stop"
        chunks = [write_event({"choices": [{"delta": delta}]}) for delta in self.deltas]
        usage = write_event({"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": 7}})
        return b"".join([*chunks, write_event({"choices": [{"delta": {}, "finish_reason": finish}]}), usage, DONE])

    @property
    def whole(self) -> bytes:
        """The same as one object."""
        calls = [
            {"id": f"call-{n}" if made.has_id else None, "function": {"name": made.name, "arguments": made.arguments}}
            for n, made in enumerate(self.calls)
        ]
        texts = {"content": self.text or None, "refusal": self.refusal, "reasoning": self.thought}
        return write_event({"choices": [{"message": {**texts, "tool_calls": calls}, "finish_reason": "stop"}]})[6:]


@st.composite
def calls(draw: st.DrawFn) -> Call:
    name = draw(st.sampled_from(["look", "patch", "mcp__mail__send", "made_up"]))
    value = {"input": draw(NASTY)} if name == "patch" else draw(ARGUMENTS)
    written = json.dumps(value, ensure_ascii=draw(st.booleans()), indent=draw(st.sampled_from([None, 1])))
    return Call(name, "" if value == {} and draw(st.booleans()) else written, draw(st.booleans()))


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
    size=st.integers(5, 60),
)
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
            answer.deltas += _play_calls(answer, segment)
            continue
        answer.deltas += [{segment.kind: piece} for piece in segment.pieces]
        said = "".join(segment.pieces)
        if segment.kind.startswith("reasoning"):
            answer.thought += said
            continue
        answer.said += said
        answer.text += said if segment.kind == "content" else ""
        answer.refusal += said if segment.kind == "refusal" else ""
    return answer


def _play_calls(answer: Answer, segment: Segment) -> Iterator[Json]:
    first = len(answer.calls)
    answer.calls += segment.calls
    waiting: dict[int, list[Json]] = {}
    for n, made in enumerate(segment.calls):
        head = {"index": first + n, "type": "function", "function": {"name": made.name, "arguments": ""}}
        yield {"tool_calls": [{**head, **({"id": f"call-{first + n}"} if made.has_id else {})}]}
        cuts = range(0, len(made.arguments), segment.size)
        waiting[n] = [{"index": first + n, "function": {"arguments": made.arguments[at : at + segment.size]}} for at in cuts]
    for n in [n for n in segment.order if n in waiting] + [n for n, pieces in waiting.items() for _ in pieces]:
        if waiting[n]:
            yield {"tool_calls": [waiting[n].pop(0)]}


ANSWERS = st.lists(SPOKEN | CALLED, max_size=4).map(play)


def mean(made: Call, path: str) -> tuple[str, Any]:
    """Return the name under which a client knows a call, and what it asks for."""
    value = json.loads(made.arguments or "{}")
    if path == MESSAGES:
        return made.name, value
    return {"mcp__mail__send": "send"}.get(made.name, made.name), value["input"] if made.name == "patch" else value


def check(said: Said, answer: Answer, path: str, *, is_whole: bool = False) -> None:
    """Hold what a client heard to what the model said."""
    words = answer.text + answer.refusal if is_whole else answer.said
    texts = (words, "") if path == MESSAGES else (answer.text, answer.refusal)
    assert (said.thought, said.text, said.refusal) == (answer.thought, *texts)
    is_text = [path == RESPONSES and made.name == "patch" for made in answer.calls]
    found = [(name, value if plain else json.loads(value)) for (_, name, value), plain in zip(said.calls, is_text, strict=True)]
    assert found == [mean(made, path) for made in answer.calls]
    ids = [call_id for call_id, _, _ in said.calls]
    assert len(set(ids)) == len(ids)
    assert all(not made.has_id or ids[n] == f"call-{n}" for n, made in enumerate(answer.calls))
    due = "refusal" if answer.refusal else "tool_use" if answer.calls else "end_turn"
    assert said.reason == (due if path == MESSAGES else "completed")


@both
@few
@given(answer=ANSWERS, data=st.data())
@example(answer=play(RICH), data=None)
def test_a_stream_cut_anywhere_says_what_the_model_said(path: str, answer: Answer, data: st.DataObject | None) -> None:
    stream, opened = answer.stream, say_request(path, stream=True, **FIELDS[path]).open_answer
    expected, failure = run(path, [stream], opened(CONTEXT))
    assert failure is None
    check(read_said(path, expected), answer, path)
    assert run(path, cut(stream, 1), opened(CONTEXT))[0] == expected
    step = 1 if data is None else data.draw(st.integers(40, 120))
    for line_end in (b"\n", b"\r\n"):
        wire = stream.replace(b"\n", line_end)
        for at in range(step // 2, len(wire), max(step, len(wire) // 9) if step > 1 else 1):
            assert run(path, [wire[:at], wire[at:]], opened(CONTEXT)) == (expected, None), f"cut at {at}"


@both
@few
@given(answer=ANSWERS, step=st.integers(40, 120))
@example(answer=play(RICH), step=1)
def test_a_stream_that_breaks_off_never_ends_as_if_it_were_whole(path: str, answer: Answer, step: int) -> None:
    stream, opened = answer.stream, say_request(path, stream=True, **FIELDS[path]).open_answer
    said_at = stream.index(b'"finish_reason":') + len(b'"finish_reason":"stop"}]}') + (6 if answer.calls else 0)
    for length in (
        *range(step // 2, said_at - 2, max(step, said_at // 9) if step > 1 else 1),
        *range(said_at - 2, len(stream)),
    ):
        translator = opened(CONTEXT)
        out, failure = run(path, [stream[:length]], translator)
        is_whole = length >= said_at
        assert (failure is None) == is_whole, f"cut at {length}"
        assert (b"\nevent: message_stop\n" in out or b"\nevent: response.completed\n" in out) == is_whole
        assert (translator.kept is not None) == (is_whole and path == RESPONSES)


@both
@settings(deadline=None, max_examples=15)
@given(answer=ANSWERS)
@example(answer=play(RICH))
def test_a_whole_answer_says_what_the_stream_of_it_says(path: str, answer: Answer) -> None:
    translator = open_answer(path, stream=False, **FIELDS[path])
    said = READERS[path](json.loads(translator.translate_whole(answer.whole)))
    assert translator.failure is None
    check(said, answer, path, is_whole=True)


@both
@settings(deadline=None, max_examples=15)
@given(answer=ANSWERS)
@example(answer=play(RICH))
def test_what_was_said_goes_back_as_the_engine_said_it(path: str, answer: Answer) -> None:
    said = read_said(path, run(path, [answer.stream], open_answer(path, **FIELDS[path]))[0])
    first, last = {"role": "user", "content": "x"}, {"role": "user", "content": "y"}
    if path == MESSAGES:
        bodies = [say_request(path, messages=[first, {"role": "assistant", "content": said.items}, last]).body]
    else:
        request = SURFACES[path].parse(json.dumps({"model": "m", "input": "y", "tools": TOOLS}).encode(), {})
        history = [json.dumps(item).encode() for item in (first, *said.items)]
        bodies = [say_request(path, input=[first, *said.items, last], tools=TOOLS).body]
        bodies.append(translate_responses(request, history=history).body)
    for body in bodies:
        turns = json.loads(body)["messages"]
        if path == MESSAGES and not (answer.thought or answer.said or answer.calls):
            assert [turn["role"] for turn in turns] == ["user"]
            continue
        assert [turn["role"] for turn in turns] == ["user", "assistant", "user"]
        turn = turns[1]
        assert (turn["content"] or "", turn.get("refusal", "")) == (said.text, said.refusal)
        assert turn.get("reasoning_content", "") == turn.get("reasoning", "") == answer.thought
        made = [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in turn.get("tool_calls", [])]
        assert [(name, json.loads(arguments)) for _, name, arguments in made] == [
            (call.name, json.loads(call.arguments or "{}")) for call in answer.calls
        ]
        assert [call_id for call_id, _, _ in made] == [call_id for call_id, _, _ in said.calls]


THE_ENGINES_OWN = ("the pieces of a tool's input are no JSON", "response.usage must be an object and is null")
"""Faults that are passed on: words of the model go out while they come, and nobody invents what was not counted."""


def check_grammar(path: str, data: bytes, failure: GatewayError | None) -> None:
    """Hold a stream to its grammar: an honest end without a failure, one error with it, nothing after either."""
    stream = read_stream(data)
    if path == MESSAGES:
        said = messages_reader.read_messages(stream)
        assert (said.failure is None) == (failure is None)
        if failure is None:
            messages_reader.require_end(said)
    else:
        answer = responses_reader.read_responses(stream)
        assert answer.ending == "response.failed" if failure else answer.ending in responses_reader.LAST_EVENTS[:2]


@both
def test_whatever_an_engine_says_the_stream_is_legal_and_ends_once(path: str) -> None:
    for number in range(100 * TIMES):
        pieces = spoil_stream(random.Random(number))
        data, failure = run(path, pieces)
        try:
            check_grammar(path, data, failure)
        except Violation as violation:
            if any(words in str(violation) for words in THE_ENGINES_OWN):
                continue
            pytest.fail(f"stream {number}: {violation}\n{b''.join(pieces)!r}\n{data!r}")
        except AssertionError as error:
            pytest.fail(f"stream {number}: {error}\n{b''.join(pieces)!r}\n{data!r}")


@both
def test_a_whole_answer_of_any_shape_is_an_answer_or_a_failure(path: str) -> None:
    message = {
        "role": "assistant",
        "content": "hi",
        "reasoning": "hm",
        "tool_calls": call(0, name="f", arguments="{}")["tool_calls"],
    }
    whole = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": GOOD[-1]["usage"]}
    for number in range(60 * TIMES):
        rng, answer = random.Random(number), copy.deepcopy(whole)
        for _ in range(rng.randint(0, 2)):
            holder, key = rng.choice(list(list_places(answer)) or [(answer, "choices")])
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        body = json.dumps(answer).encode()
        translator = open_answer(path)
        said = translator.translate_whole(body[: rng.randrange(len(body))] if rng.random() < 0.1 else body)
        assert bool(said) == (translator.failure is None), body
        if said:
            assert json.loads(said)["type" if path == MESSAGES else "object"] == ("message" if path == MESSAGES else "response")


@both
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_as_a_failure_and_takes_no_more_than_its_bytes(path: str, name: str) -> None:
    data, failure = run(path, FLOODS[name]())
    check_grammar(path, data, failure)
    assert failure is not None


ENDLESS: dict[str, Callable[[], Iterator[bytes]]] = {
    "text": lambda: (spoilt_chunk({"content": "a" * 50_000}) for _ in range(1000)),
    "thought and text by turns": lambda: (spoilt_chunk({"content" if n % 2 else "reasoning": "a"}) for n in range(20_000)),
    "arguments": lambda: (spoilt_chunk(call(0, name="f" if n == 0 else "", arguments="[" + "a" * 50_000)) for n in range(1000)),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_that_has_to_be_repeated_at_its_end_may_not_go_on_for_ever(name: str) -> None:
    tracemalloc.start()
    try:
        translator = open_answer(RESPONSES)
        for piece in ENDLESS[name]():
            translator.feed(piece)
            if translator.failure is not None:
                break
        assert isinstance(translator.failure, StreamTooLarge)
        assert isinstance(translator, FailingTranslator)
        ending = translator.fail(translator.failure)
        assert tracemalloc.get_traced_memory()[1] < 8 * limits().gateway.responses_answer_chars
    finally:
        tracemalloc.stop()
    assert ending.count(b"\n\n") == 1


@pytest.mark.parametrize(
    "body",
    [
        b"<" * 16_384,
        b"<script" * 2000,
        b"<style>" * 2000,
        b'{"error":{"message":"context window ' + b"1 " * 4_000_000 + b'"}}',
        b'{"error":{"message":"context window","n_ctx":' + b"9" * 4000 + b',"n_prompt_tokens":' + b"9" * 4000 + b"}}",
        b'{"detail":[' + b"[]," * 2_000_000 + b"[]]}",
        b'{"error":{"message":"x","code":5,"a":' + b"[" * 990 + b"]" * 990 + b"}}",
        b'{"error":{"message":"x","code":5,"\xff":1}}',
        b'{"error":{"message":{"a":"\\ud800"}}}',
    ],
    ids=["<", "<script", "<style>", "numbers", "long numbers", "lists", "depth", "a key that is not UTF-8", "half a character"],
)
def test_no_refusal_is_too_much_to_read(body: bytes) -> None:
    for path in SURFACES:
        for status in (400, 500):
            said = json.loads(SURFACES[path].render_refusal(status, body, "req_1"))
            assert said["error"]["message"] is not None
        assert len(read_refusal(400, body).message) <= 1000


@pytest.mark.parametrize("file", sorted({name.partition(":")[0] for name in CASES}))
def test_the_cases_of_a_file_come_out_to_the_byte(file: str) -> None:
    expected = {name: case for name, case in CASES.items() if name.startswith(f"{file}:")}
    played = {name: Player(case).play() for name, case in expected.items()}
    wrong = [name for name, case in expected.items() if json.dumps(played[name]) != json.dumps(case)]  # 1 is not 1.0
    assert {name: played[name] for name in wrong} == {name: expected[name] for name in wrong}
    assert not wrong, "keys have an order"


@pytest.mark.parametrize("file", sorted({name.partition(":")[0] for name in STREAMS}))
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_a_stream_is_the_same_wherever_it_is_cut(file: str, size: int) -> None:
    for name, case in STREAMS.items():
        if name.startswith(f"{file}:"):
            entries = [entry for entry in case["stream"] if entry[0] == "client"]
            expected = b"".join(write_golden(entry, case["client"], number) for number, entry in enumerate(entries))
            assert Player(case).stream(size) == expected, name
