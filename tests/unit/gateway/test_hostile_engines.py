"""Engines behind a translation that say anything at all: the client's stream stays legal, ends once, and costs little.

The oracles are the strict readers of the conformance suite, which stop at the first event that an SDK would stumble over.
"""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from conformance.events import read_stream
from conformance.readers import messages as messages_reader
from conformance.readers import responses as responses_reader
from conformance.verdicts import Violation
from core.limits import limits
from gateway.dialects import SURFACES
from gateway.dialects.refusal import read_refusal
from gateway.dialects.translation import FailingTranslator
from gateway.errors import GatewayError, StreamTooLarge
from tests.fakes.chat_engine import MESSAGES, RESPONSES, open_answer, run
from tests.fakes.engine_streams import FLOODS, GOOD, VALUES, call, chunk, list_places, spoil_stream
from tests.unit.gateway.test_golden_cases import STREAMS, Player

THE_ENGINES_OWN = ("the pieces of a tool's input are no JSON", "response.usage must be an object and is null")
"""Faults that are passed on: words of the model go out while they come, and nobody invents what was not counted."""
both = pytest.mark.parametrize("path", [MESSAGES, RESPONSES])


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


LEGAL = [name for name, case in STREAMS.items() if "clock" not in case and "custom_tool_call" not in json.dumps(case)]
"""All but what the readers do not know: custom tools, and answers for llm-pool."""


@pytest.mark.parametrize("name", LEGAL)
def test_a_golden_stream_is_legal(name: str) -> None:
    case = STREAMS[name]
    data = Player(case).stream(1 << 20)
    try:
        stream = read_stream(data)
        if case["client"] == MESSAGES:
            assert (messages_reader.read_messages(stream).failure is None) == ("failure" not in case)
        else:
            responses_reader.read_responses(stream)
    except Violation as violation:
        if not any(words in str(violation) for words in THE_ENGINES_OWN):
            raise


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
