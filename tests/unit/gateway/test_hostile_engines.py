"""Engines behind a translation that say anything at all: the client's stream stays legal, ends once, and costs little.

The oracles are the strict readers of the conformance suite, which stop at the first event that an SDK would stumble over.
"""

from __future__ import annotations

import copy
import json
import random
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from gateway.dialects import SURFACES
from gateway.dialects.refusal import read_refusal
from gateway.dialects.responses.answer import MAX_ANSWER_CHARS
from gateway.dialects.translation import AnswerContext, AnswerTranslator, FailingTranslator
from gateway.errors import GatewayError, StreamTooLarge
from tests.conformance.events import read_stream
from tests.conformance.readers import messages as messages_reader
from tests.conformance.readers import responses as responses_reader
from tests.conformance.verdicts import Violation

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED = {
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {
        "input": "x",
        "tools": [
            {"type": "function", "name": "f"},
        ],
    },
}
DONE = b"data: [DONE]\n\n"
THE_ENGINES_OWN = ("the pieces of a tool's input are no JSON", "response.usage must be an object and is null")
"""Faults that are passed on: words of the model go out while they come, and nobody invents what was not counted."""
MOST_CPU_S = 4.0
"""For what would take minutes if its cost grew with the square of its length; a busy machine has its share of it."""
Json = dict[str, Any]
both = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])


def event(content: object) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def chunk(delta: Json | None = None, finish: str | None = None, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more})


def call(index: int | None, **function: str) -> Json:
    return {"tool_calls": [{"index": index, "id": f"call_{index}", "function": function}]}


def open_answer(path: str) -> AnswerTranslator:
    surface = SURFACES[path]
    assert surface.translate is not None
    body = json.dumps({"model": "m", "stream": True, **ASKED[path]}).encode()
    context = AnswerContext(request_id="req_1", model="m", created=1)
    return surface.translate(surface.parse(body, {})).open_answer(context)


def run(path: str, pieces: Iterable[bytes]) -> tuple[bytes, GatewayError | None]:
    """Do with an engine's stream what the relay does; return the client's stream and how it failed."""
    translator = open_answer(path)
    out: list[bytes] = []
    for piece in pieces:
        out.append(translator.feed(piece))
        if translator.failure is not None:
            break
    else:
        out.append(translator.finish())
    failure = translator.failure
    if failure is not None:
        is_failing = isinstance(translator, FailingTranslator)
        out.append(translator.fail(failure) if is_failing else SURFACES[path].render_stream_error(failure, "req_1"))
    return b"".join(out), failure


def check(path: str, data: bytes, failure: GatewayError | None) -> None:
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


# Legal whatever is said

GOOD: list[Json] = [
    {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}], "usage": None},
    {"choices": [{"index": 0, "delta": {"reasoning_content": "hm"}, "finish_reason": None}]},
    {"choices": [{"index": 0, "delta": {"content": "hello"}, "logprobs": {"content": [{"token": "hello", "logprob": -1}]}}]},
    {"choices": [{"index": 0, "delta": call(0, name="f", arguments="")}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": '{"a":'}}]}}]},
    {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "1}"}}]}}]},
    {"choices": [{"index": 0, "delta": call(1, name="patch", arguments='{"input":"x"}')}]},
    {"choices": [{"index": 0, "delta": {"refusal": "no"}}]},
    {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls", "stop_reason": "END"}]},
    {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}},
]
VALUES: list[object] = [
    None, True, 0, -1, 2**31, 2**63, 2**70, 10**400, 0.5, "", "x", "\x00", "\x7f\u2028", "data: [DONE]", '"}', "{", "é" * 400,
    [], [[]], [None], {}, {"": {}}, {"type": "text"}, "stop", "length", "error", "abort", "assistant",
]  # fmt: skip
LINES = [
    b"\n", b"\n\n", b"\r", b"\r\n\r\n", b": ping\n\n", b"event: error\n", b"id: 1\n", b"data:\n\n", b"data: {}\n\n", b"\xff",
    DONE, b"data: null\n\n", b"data: [1]\n\n", b'data: {"error":null}\n\n', b'data: {"error":{"code":2e9}}\n\n',
]  # fmt: skip


def list_places(value: object) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a value with each of its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield value, key
        yield from list_places(inner)


def spoil(rng: random.Random) -> list[bytes]:
    """Return the pieces of a stream that was good once."""
    chunks = copy.deepcopy(GOOD)
    for _ in range(rng.randint(0, 3)):
        holder, key = rng.choice(list(list_places(chunks)))
        action = rng.random()
        if action < 0.2:
            del holder[key]
        elif action < 0.4 and isinstance(holder, list):
            holder.insert(rng.randrange(len(holder) + 1), copy.deepcopy(holder[key]))
        else:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
        if not chunks:
            break
    events = [event(content) for content in chunks] + [DONE] * rng.randint(0, 2)
    for _ in range(rng.choice([0, 0, 1, 2])):
        events.insert(rng.randrange(len(events) + 1), rng.choice(LINES))
    if rng.random() < 0.2:
        rng.shuffle(events)
    stream = b"".join(events)
    if rng.random() < 0.3:
        stream = stream[: rng.randrange(len(stream) + 1)]
    if rng.random() < 0.2:
        stream = stream.replace(b"\n", rng.choice([b"\r\n", b"\r"]))
    if rng.random() < 0.2 and stream:
        at = rng.randrange(len(stream))
        stream = stream[:at] + bytes([rng.randrange(256)]) + stream[at + 1 :]
    cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.choice([0, 1, 5, 40])))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True) if start < end]


@both
def test_whatever_an_engine_says_the_stream_is_legal_and_ends_once(path: str) -> None:
    for number in range(1200):
        pieces = spoil(random.Random(number))
        data, failure = run(path, pieces)
        try:
            check(path, data, failure)
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
    for number in range(600):
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
@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -5, "completion_tokens": -7, "total_tokens": -1},
        {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 99},
        {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": -3}},
        {"prompt_tokens": 2, "completion_tokens": 3, "completion_tokens_details": {"reasoning_tokens": -3}},
        {"prompt_tokens": 2**70, "completion_tokens": 2**70},
        {"prompt_tokens": None},
    ],
    ids=["negative", "a sum that is none", "less than nothing cached", "less than nothing thought", "huge", "null"],
)
def test_counts_are_never_below_zero_and_always_a_sum(path: str, usage: Json) -> None:
    data, failure = run(path, [chunk({"content": "a"}), chunk(finish="stop", usage=usage), DONE])
    assert failure is None
    if usage.get("prompt_tokens") is not None or path == MESSAGES:
        check(path, data, None)  # Responses say null where nothing was counted


# Cheap whatever is said


def of_one_byte(stream: bytes) -> Iterator[bytes]:
    return (stream[at : at + 1] for at in range(len(stream)))


FLOODS: dict[str, Callable[[], Iterable[bytes]]] = {
    "an event without an end, byte by byte": lambda: of_one_byte(b"data: " + b"x" * 260_000),
    "a comment without an end, byte by byte": lambda: of_one_byte(b":" * 260_000),
    "line ends": lambda: [b"\r" * 1_000_000, b"\n" * 1_000_000] * 4,
    "data lines of one event": lambda: [b"data: {}\n" * 50_000] * 10,
    "an event larger than any": lambda: [b'data: {"choices":[{"delta":{"content":"', *[b"a" * 65_536] * 600],
    "calls, one an event": lambda: (chunk(call(n, name="f", arguments="{}")) for n in range(30_000)),
    "calls that wait for the first": lambda: (chunk(call(n, name="f")) for n in range(30_000)),
    "calls in one event": lambda: [
        chunk({"tool_calls": [call(n, name="f", arguments="{}")["tool_calls"][0] for n in range(40_000)]})
    ],
    "pieces of calls that never get a name": lambda: (chunk(call(n, arguments="{")) for n in range(30_000)),
    "a million empty calls": lambda: [b'data: {"choices":[{"delta":{"tool_calls":[' + b"{}," * 1_000_000 + b"{}]}}]}\n\n"],
    "a million empty choices": lambda: [b'data: {"choices":[' + b"{}," * 1_000_000 + b"{}]}\n\n"],
    "a million lists": lambda: [
        b'data: {"choices":[{"delta":{"content":"a"},"logprobs":[' + b"[]," * 1_000_000 + b"[]]}]}\n\n"
    ],
}


@both
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_as_a_failure_and_takes_no_more_than_its_bytes(path: str, name: str) -> None:
    began = time.process_time()
    data, failure = run(path, FLOODS[name]())
    spent_s = time.process_time() - began
    check(path, data, failure)
    assert failure is not None
    assert spent_s < MOST_CPU_S


ENDLESS: dict[str, Callable[[], Iterator[bytes]]] = {
    "text": lambda: (chunk({"content": "a" * 50_000}) for _ in range(1000)),
    "thought and text by turns": lambda: (chunk({"content" if n % 2 else "reasoning": "a"}) for n in range(20_000)),
    "arguments": lambda: (chunk(call(0, name="f" if n == 0 else "", arguments="[" + "a" * 50_000)) for n in range(1000)),
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
        assert tracemalloc.get_traced_memory()[1] < 8 * MAX_ANSWER_CHARS
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
    began = time.process_time()
    for path in SURFACES:
        for status in (400, 500):
            said = json.loads(SURFACES[path].render_refusal(status, body, "req_1"))
            assert said["error"]["message"] is not None
        assert len(read_refusal(400, body).message) <= 1000
    assert time.process_time() - began < MOST_CPU_S
