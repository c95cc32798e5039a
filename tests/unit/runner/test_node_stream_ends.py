"""Streams that engines end early, on the node's own port and towards a gateway: told once, and counted as errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest

from conformance.events import DONE, Stream, read_stream
from runner.admission import FairQueue, QueueLimits, WaitBudget
from runner.admission.rates import read_rates
from runner.api.bodies import BodyBudget
from runner.api.inference import InferenceEndpoint
from runner.definitions.decoding import Decoding
from runner.definitions.definition import ModelDefinition
from runner.definitions.plan import LoadPlan
from runner.engines.port import Call
from runner.engines.supervisor import Supervisor
from runner.fit import read_shape
from runner.library import Library
from runner.pool import Registry
from runner.serving.door import Door
from runner.serving.pool_surface import PoolSurface
from runner.serving.request import Inference
from runner.serving.service import Serving
from runner.serving.tally import Tally
from tests.fakes.engine import FakeEngine, FakeResponse
from tests.fakes.examples import TIMES
from tests.fakes.recorded_streams import (
    BARE_ERRORS,
    CHAT,
    COMPLETIONS,
    FAILURES,
    MESSAGES,
    POOL_RESPONSES,
    RESPONSES,
    STREAMS,
    RecordedStream,
)

_TURNS = [{"role": "user", "content": "x"}]
ASKED: dict[str, dict[str, object]] = {
    CHAT: {"messages": _TURNS}, COMPLETIONS: {"prompt": "x"}, MESSAGES: {"messages": _TURNS, "max_tokens": 9},
    RESPONSES: {"input": [{"role": "user", "content": "x"}]}, POOL_RESPONSES: {"input": "x"},
}  # fmt: skip


class Passage(NamedTuple):
    """One way from an engine's stream to a client: what it asked for, and in which dialect the engine answers."""

    asked: str
    stream: RecordedStream

    def __str__(self) -> str:
        return f"{self.stream.path} as {self.asked} {self.stream.name}"


PASSAGES = tuple(
    Passage(asked, stream)
    for stream in STREAMS
    for asked in ((CHAT, POOL_RESPONSES) if stream.path == CHAT else (stream.path,))
    if stream.path != POOL_RESPONSES and not (asked == POOL_RESPONSES and stream.name == "several answers")
)


class PaperEngine(FakeEngine):
    """An engine that answers every request with ``pieces`` of an event stream."""

    def __init__(self) -> None:
        super().__init__(endpoints=(CHAT, COMPLETIONS, MESSAGES, RESPONSES))
        self.poll_s, self.pieces = 3600.0, list[bytes]()

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Any]:  # as much of aiohttp.ClientResponse as is asked for
        del call
        chunks = asyncio.Queue[bytes | Exception]()
        for piece in (*self.pieces, b""):
            chunks.put_nowait(piece)
        yield FakeResponse(200, "text/event-stream", None, chunks)


class Node:
    """A node with one model, whose engine is on paper."""

    def __init__(self) -> None:
        self.engine, self.tally = PaperEngine(), Tally()
        library = Library(None, None, None, read_shape=read_shape)
        budget = WaitBudget(9)
        registry = Registry(library=library, make_queue=lambda _: self.queue, on_change=lambda: None)
        self.queue = FairQueue(slots=1, limits=QueueLimits(), budget=budget, weight_of=lambda _tenant: 1.0)
        self.registry = registry
        serving = Serving(
            registry, rates=read_rates({}), tally=self.tally, costs=None, queue_timeout_s=5.0, on_load=lambda: None
        )
        self.serving = serving
        self.door = Door(serving, PoolSurface(serving, Decoding))
        self.endpoint = InferenceEndpoint(self, BodyBudget(), is_form=False)  # type: ignore[arg-type]  # only the door is used
        self.supervisor = Supervisor(self.engine, silent_s=60.0, on_change=lambda: None)

    async def start(self) -> None:
        await self.supervisor.load(lambda _progress: None)
        definition, plan = ModelDefinition(model_id="m", backend="attached"), LoadPlan(model_id="m", backend="attached")
        self.registry.attach(definition, plan, self.supervisor, self.queue)

    async def ask(self, path: str, *pieces: bytes) -> bytes:
        """Ask on the node's own port; return the body that came, which has to be ended in good order."""
        self.engine.pieces = [piece for piece in pieces if piece]
        body = json.dumps({"model": "m", "stream": True, **ASKED[path]}).encode()
        messages: list[dict[str, Any]] = []
        incoming = asyncio.Queue[dict[str, object]]()
        incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        scope = {
            "type": "http", "method": "POST", "path": RESPONSES if path == POOL_RESPONSES else path, "query_string": b"",
            "headers": [(b"content-type", b"application/json")], "state": {"request_id": "r1"},
        }  # fmt: skip
        await self.endpoint(scope, incoming.get, send)  # type: ignore[arg-type]  # ASGI messages are plain dictionaries here
        assert (messages[0]["status"], messages[-1]["more_body"]) == (200, False)
        assert (self.serving.load, self.queue.active) == (0, 0)
        return b"".join(message["body"] for message in messages[1:])

    async def relay(self, path: str, *pieces: bytes) -> bytes:
        """Ask as a gateway does, over its socket."""
        self.engine.pieces = [piece for piece in pieces if piece]
        body = json.dumps({"model": "m", "stream": True, **ASKED[path]}).encode()
        request = Inference(
            "POST", path, {"content-type": "application/json"}, body, "m", "t", is_streaming=True, on_socket=True
        )
        async with self.door.open(request) as answer:
            assert answer.chunks is not None
            return b"".join([chunk async for chunk in answer.chunks])

    def counted(self) -> tuple[int, int]:
        """Return how many requests counted as a success and as an error since the last time."""
        counts, self.tally.requests = self.tally.requests, {}
        return tuple(sum(n for key, n in counts.items() if key[2] == status) for status in ("success", "error"))  # type: ignore[return-value]  # two


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    made = Node()
    await made.start()
    yield made
    await made.supervisor.unload(gently=True)


def list_errors(path: str, said: Stream) -> list[int]:
    """Return the places of the events that tell a client of this dialect that its answer failed."""
    names = {MESSAGES: "error", RESPONSES: "response.failed", POOL_RESPONSES: "error"}
    found = []
    for event in said.events:
        body = {} if event.data == DONE else json.loads(event.data)
        if body["type"] in {"response.failed", "error"} if path in {RESPONSES, POOL_RESPONSES} else "error" in body:
            assert event.name == names.get(path, "")
            found.append(event.number)
    return found


def list_cuts(stream: RecordedStream) -> list[int]:
    """Return where a stream is cut: around each end of an event and at every 31st byte, in the rings at every one."""
    ends = {0, len(stream.data), *(stream.data.find(event) + len(event) for event in stream.events), stream.whole_at}
    near = {end + step for end in ends for step in (-1, 0)}
    return [n for n in range(len(stream.data) + 1) if TIMES > 1 or n in near or n % 31 == 0]


async def test_every_recorded_stream_cut_anywhere_is_whole_or_said_to_be_broken_on_the_nodes_own_port(node: Node) -> None:
    cuts = 0
    for passage in PASSAGES:
        data = passage.stream.data
        for length in list_cuts(passage.stream):
            said = read_stream(await node.ask(passage.asked, data[:length]))
            errors, is_whole = list_errors(passage.asked, said), length >= passage.stream.whole_at
            assert errors == ([] if is_whole else [said.events[-1].number]), (str(passage), length)
            assert node.counted() == (is_whole, not is_whole)
            cuts += 1
    assert cuts == sum(len(list_cuts(passage.stream)) for passage in PASSAGES)
    assert node.tally.refusals.keys() == {"engine_failed"}


@pytest.mark.parametrize("passage", [passage for passage in PASSAGES if passage.asked != POOL_RESPONSES], ids=str)
async def test_a_gateway_gets_what_came(passage: Passage, node: Node, caplog: pytest.LogCaptureFixture) -> None:
    stream = passage.stream
    for length in (0, 1, len(stream.events[0]), stream.whole_at - 1, stream.whole_at, len(stream.data)):
        caplog.clear()
        passed = await node.relay(stream.path, stream.data[:length])
        assert stream.data[: stream.whole_at].startswith(passed[: stream.whole_at].rstrip())
        is_whole = length >= stream.whole_at
        assert node.counted() == (is_whole, not is_whole)
        assert ("the stream ended early" in caplog.text) is not is_whole  # and the engine's health is looked at


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
async def test_what_an_engine_said_of_its_failure_is_not_said_twice(path: str, node: Node) -> None:
    word = next(stream for stream in STREAMS if stream.path == path).events[0]
    for said in FAILURES[CHAT if path == COMPLETIONS else path]:
        for frames in ([word, said], [word + said], [word + said + word], [word + said[:9], said[9:]]):
            body = await node.ask(path, *frames)
            assert body.partition(b": x-cache-hit")[0] == b"".join(frames)
            assert node.counted() == (0, 1)


@pytest.mark.parametrize("error", BARE_ERRORS)
async def test_a_native_response_never_ends_with_a_bare_error(error: bytes, node: Node) -> None:
    began, word = next(stream for stream in STREAMS if stream.path == RESPONSES).events[:2]
    body = await node.ask(RESPONSES, began, word + error)
    last = json.loads(read_stream(body).events[-1].data)
    assert (last["type"], last["response"]["id"]) == ("response.failed", "resp_1")
    assert "boom" in last["response"]["error"]["message"]
