"""Engines behind a translation that say anything at all: the client's stream stays legal, ends once, and costs little.

The oracles are the strict readers of the conformance suite, which stop at the first event that an SDK would stumble over.
"""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable, Iterable, Iterator

import pytest

from conformance.events import read_stream
from conformance.readers import messages as messages_reader
from conformance.readers import responses as responses_reader
from conformance.verdicts import Violation
from gateway.dialects import SURFACES
from gateway.dialects.refusal import read_refusal
from gateway.dialects.responses.answer import MAX_ANSWER_CHARS
from gateway.dialects.translation import AnswerContext, AnswerTranslator, FailingTranslator
from gateway.errors import GatewayError, StreamTooLarge
from tests.rings.fuzz.engine_streams import DONE, FLOODS, GOOD, VALUES, Json, call, chunk, spoil_stream
from tests.rings.fuzz.mutation import list_places

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
ASKED: dict[str, dict[str, object]] = {
    MESSAGES: {"max_tokens": 9, "messages": [{"role": "user", "content": "x"}]},
    RESPONSES: {
        "input": "x",
        "tools": [
            {"type": "function", "name": "f"},
        ],
    },
}
THE_ENGINES_OWN = ("the pieces of a tool's input are no JSON", "response.usage must be an object and is null")
"""Faults that are passed on: words of the model go out while they come, and nobody invents what was not counted."""
both = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])


def open_answer(path: str) -> AnswerTranslator:
    surface = SURFACES[path]
    assert surface.translate is not None
    asked: dict[str, object] = {"model": "m", "stream": True} | ASKED[path]
    body = json.dumps(asked).encode()
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
        said = translator.fail(failure) if isinstance(translator, FailingTranslator) else b""
        out.append(said or SURFACES[path].render_stream_error(failure, "req_1"))
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


@both
def test_whatever_an_engine_says_the_stream_is_legal_and_ends_once(path: str) -> None:
    for number in range(1200):
        pieces = spoil_stream(random.Random(number))
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


@both
@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_ends_as_a_failure_and_takes_no_more_than_its_bytes(path: str, name: str) -> None:
    data, failure = run(path, FLOODS[name]())
    check(path, data, failure)
    assert failure is not None


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
    ("said", "due"),
    [
        ({"message": "no", "type": 5, "code": None, "param": None}, {"type": "invalid_request_error"}),
        ({"message": "no", "type": "x", "code": "y", "param": ["a"]}, {"type": "x", "code": "y", "param": None}),
        ({"message": "no", "type": True}, {"type": "invalid_request_error", "code": "BAD_REQUEST", "param": None}),
        ({"message": "no", "code": 400, "more": [1]}, {"code": "BAD_REQUEST", "more": [1]}),
    ],
    ids=["type", "param", "type alone", "code"],
)
def test_what_an_error_says_in_another_type_is_said_in_words(said: Json, due: Json) -> None:
    error = json.loads(SURFACES["/v1/embeddings"].render_refusal(400, json.dumps({"error": said}).encode(), "req_1"))["error"]
    assert {name: error[name] for name in due} == due
    assert error["message"] == "no"


def test_an_error_that_is_whole_passes_as_it_is() -> None:
    body = b'{ "error": {"message": "no", "type": "x", "code": null, "param": null, "y": 1e2}}'
    assert SURFACES["/v1/embeddings"].render_refusal(400, body, "req_1") is body


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
