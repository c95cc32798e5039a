"""The session of a runner with one gateway, the relay that answers its streams, and streams that engines end early."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import aiohttp
import pytest
from aiohttp.http_websocket import WebSocketWriter
from websockets.frames import Frame as WebSocketFrame
from websockets.frames import Opcode
from websockets.protocol import OPEN
from websockets.server import ServerProtocol

from conformance.exchange import read_stream
from runner.api.bodies import BodyBudget
from runner.api.inference import InferenceEndpoint
from runner.connection import GatewayLink, GatewaySocket, Host, _Session, explain_close
from runner.definitions.fields import Decoding, ModelDefinition
from runner.definitions.plan import LoadPlan
from runner.definitions.settings import Fairness
from runner.engines.port import Call
from runner.engines.supervisor import Supervisor
from runner.errors import (
    AuthRefused,
    EngineUnavailable,
    InvalidRequest,
    ModelNotLoaded,
    NameInUse,
    RateLimitExceeded,
    SessionLost,
    StreamClosed,
)
from runner.fit import read_shape
from runner.library.library import Library
from runner.limits import limits
from runner.pool.models import Registry
from runner.queue import FairQueue, WaitBudget, read_rates
from runner.relay import Relay
from runner.serving.request import Answer, Counters, Inference
from runner.serving.service import Serving
from runner.session import Cancelled, ClientSession, Opened, Reply, Stream
from tests.fakes.engine import FakeEngine, FakeResponse
from tests.fakes.examples import TIMES
from tests.fakes.limits import set_runner_limits
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
    list_errors,
)
from tests.fakes.waiting import eventually, turns
from wire import bridge, frames
from wire.bridge import MUSTER_V1, NAME_TAKEN, ProtocolError, Register, RegisterAck, encode_message
from wire.frames import End

ACK = bridge.RegisterAck(worker_id="w", models=["m"], protocol_version=MUSTER_V1, node_id="node_1")


def accepted_session() -> ClientSession:
    """Return a session past its handshake."""
    session = ClientSession()
    session.register(bridge.Register(models=["m"]))
    assert session.receive_text(bridge.encode_message(ACK)) == ACK
    return session


def open_frames(
    number: int = 7, attempt: int = 1, body: bytes = b"{}", window_bytes: int = 10, path: str = "/v1/x"
) -> list[bytes]:
    """Return the frames of a new stream."""
    meta = frames.OpenMeta(request_id="r", model="m", path=path, window_bytes=window_bytes)
    return frames.encode_open(number, attempt, meta, body)


def open_stream(session: ClientSession, number: int = 7, attempt: int = 1, window_bytes: int = 10) -> Stream:
    """Open a stream and return it."""
    (effect,) = session.receive_bytes(open_frames(number, attempt, window_bytes=window_bytes)[0])
    assert isinstance(effect, Opened)
    return effect.stream


def test_a_body_beyond_the_limit_ends_its_stream_only_and_one_after_its_last_part_is_a_violation() -> None:
    set_runner_limits(connection={"body_bytes": 300_000})
    session = accepted_session()
    (reply,) = [effect for frame in open_frames(body=bytes(400_000)) for effect in session.receive_bytes(frame)]
    assert isinstance(reply, Reply)
    assert frames.decode_end(frames.decode_frame(reply.frame).payload).error == "engine_failed"
    assert session.streams == []
    open_stream(session, number=8)
    with pytest.raises(ProtocolError, match="after its last part"):
        session.receive_bytes(frames.encode_frame(frames.BODY, 8, 1, b"more"))


def test_cancel_ends_the_stream_with_one_end_and_frames_of_another_attempt_or_later_ones_are_dropped() -> None:
    session = accepted_session()
    stream = open_stream(session, attempt=2)
    for kind in (frames.CANCEL, frames.BODY):
        assert session.receive_bytes(frames.encode_frame(kind, 7, 1, b"")) == []
    assert session.receive_bytes(frames.encode_credit(7, 3, 5)) == []
    assert (stream.is_open, stream.window) == (True, 10)
    with pytest.raises(ValueError, match="exceed the window"):
        stream.data(b"x" * 11)
    cancelled, reply = session.receive_bytes(frames.encode_frame(frames.CANCEL, 7, 2, b"client_disconnect"))
    assert cancelled == Cancelled(stream)
    assert isinstance(reply, Reply)
    end = frames.decode_end(frames.decode_frame(reply.frame).payload)
    assert (end.error, end.message) == ("cancelled", "client_disconnect")
    assert session.receive_bytes(frames.encode_credit(7, 2, 5)) == []
    assert session.receive_bytes(frames.encode_frame(frames.CANCEL, 7, 2, b"")) == []
    with pytest.raises(StreamClosed):
        stream.data(b"x")
    with pytest.raises(StreamClosed):
        stream.head(200, {})
    with pytest.raises(StreamClosed):
        stream.end(frames.End())


def test_a_newer_attempt_replaces_the_older_one_and_an_older_one_is_a_violation() -> None:
    session = accepted_session()
    old = open_stream(session, attempt=1)
    stop, start = session.receive_bytes(open_frames(attempt=2)[0])
    assert isinstance(stop, Cancelled)
    assert stop.stream is old
    assert isinstance(start, Opened)
    assert session.streams == [start.stream]
    with pytest.raises(ProtocolError, match="opened twice"):
        session.receive_bytes(open_frames(attempt=2)[0])


def test_too_many_streams_are_refused_as_busy_and_closing_the_session_closes_and_names_them() -> None:
    set_runner_limits(connection={"streams": 5})
    session = accepted_session()
    streams = [open_stream(session, number=number) for number in range(5)]
    (reply,) = session.receive_bytes(open_frames(number=5)[0])
    assert isinstance(reply, Reply)
    end = frames.decode_end(frames.decode_frame(reply.frame).payload)
    assert (end.error, end.retryable) == ("busy", True)
    assert session.close() == streams
    assert not any(stream.is_open for stream in streams)
    assert session.close() == []


async def test_telemetry_that_is_woken_when_its_session_is_lost_does_not_hold_up_the_next_session() -> None:
    wake = asyncio.Event()
    link, host = SimpleNamespace(url="ws://gateway", wake=wake, speaks_bridge=False), SimpleNamespace(relay=None)
    session = _Session(cast("GatewayLink", link), cast("Host", host), limits().connection)
    reporting = asyncio.create_task(session._report())
    await turns(1)
    wake.set()
    await turns(1)
    reporting.cancel()
    await turns(5)
    has_ended = reporting.done()
    reporting.cancel()
    assert has_ended, "it swallowed its cancellation, and the session waits for it"


def test_malformed_and_misdirected_frames_are_violations() -> None:
    of_open = (b"\x00\x00", b"\x00\x00\x00\xff{}", b"\x00\x00\x00\x02[]", b"\x00\x00\x00\x02\xff\xfe")
    for frame in (
        b"", b"\x01short", *(frames.encode_frame(frames.OPEN, 1, 1, payload) for payload in of_open),
        frames.encode_frame(frames.HEAD, 1, 1, b"{}"), frames.encode_frame(frames.DATA, 1, 1, b"x"),
        frames.encode_frame(77, 1, 1, b""), frames.encode_frame(frames.CREDIT, 7, 1, b"\x00"),
    ):  # fmt: skip
        session = accepted_session()
        open_stream(session)
        with pytest.raises(ProtocolError):
            session.receive_bytes(frame)
    for text in ("", "[]", "{}", '{"type":"surprise"}', '{"type":"ping","timestamp_unix_ms":"x"}'):
        with pytest.raises(ProtocolError):
            accepted_session().receive_text(text)


def test_nothing_may_come_before_the_ack_nor_a_second_one_nor_bridge_requests() -> None:
    with pytest.raises(ProtocolError, match="before register_ack"):
        ClientSession().receive_bytes(open_frames()[0])
    with pytest.raises(ProtocolError, match="not register_ack"):
        ClientSession().receive_text(bridge.encode_message(bridge.Ping()))
    with pytest.raises(ProtocolError, match="second register_ack"):
        accepted_session().receive_text(bridge.encode_message(ACK))
    with pytest.raises(ProtocolError, match="binary frames"):
        accepted_session().receive_text(bridge.encode_message(bridge.Cancel(request_id="r", reason="timeout")))
    older = bridge.RegisterAck(worker_id="w", models=[], protocol_version=bridge.BRIDGE_V1)
    with pytest.raises(ProtocolError, match="the gateway speaks"):
        ClientSession().receive_text(bridge.encode_message(older))


class _Wire:
    """A transport that keeps what is written; ``held_bytes`` is what the kernel has not taken."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.held_bytes = 0
        self.is_broken = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def is_closing(self) -> bool:
        return self.is_broken

    def get_write_buffer_size(self) -> int:
        return self.held_bytes


def make_socket(transport: _Wire) -> GatewaySocket:
    """Return a socket over a transport."""
    protocol = SimpleNamespace(_paused=False)
    writer = WebSocketWriter(protocol, transport, use_mask=True)  # type: ignore[arg-type]  # as much of both as is asked for
    loop, times = asyncio.get_running_loop(), aiohttp.ClientWSTimeout()
    return GatewaySocket(None, writer, None, SimpleNamespace(connection=None), times, True, False, loop)


async def test_what_is_posted_in_one_turn_leaves_in_one_write_as_masked_frames() -> None:
    wire = _Wire()
    socket = make_socket(wire)
    sent: list[str | bytes] = [b"", b"x" * 125, b"y" * 126, "ü" * 40_000, bytes(range(256)) * 1024]
    for each in sent:
        socket.post(each)
    assert wire.written == []
    await turns(1)
    assert len(wire.written) == 1
    peer = ServerProtocol(state=OPEN, max_size=None)
    peer.receive_data(wire.written[0])
    found = [frame for frame in peer.events_received() if isinstance(frame, WebSocketFrame)]
    assert [bytes(frame.data).decode() if frame.opcode is Opcode.TEXT else bytes(frame.data) for frame in found] == sent
    assert all(frame.fin for frame in found)
    keys = {wire.written[0][2:6], wire.written[0][8:12]}
    assert len(keys) == 2, "every frame has a key of its own"


async def test_a_socket_has_room_again_once_the_gateway_has_read_and_one_that_broke_ends_its_session() -> None:
    set_runner_limits(connection={"outbox_bytes": 1000, "outbox_bytes_max": 3000, "outbox_look_s": 0.001})
    wire = _Wire()
    socket = make_socket(wire)
    watch = asyncio.create_task(socket.watch_room())
    called: list[int] = []
    socket.post(bytes(1001))
    assert not socket.has_room
    wire.held_bytes = 1500
    socket.when_room(lambda: called.append(1))
    await turns(5)
    assert (socket.has_room, called) == (False, [])
    wire.held_bytes = 900
    await eventually(lambda: socket.has_room)
    await turns(5)
    assert called == [1]
    socket.post(bytes(200))
    assert not socket.has_room, "what the transport holds counts"
    wire.is_broken = True
    with pytest.raises(SessionLost):
        await asyncio.wait_for(watch, 30)
    stuck = make_socket(full := _Wire())
    full.held_bytes = 3001
    stuck.when_room(lambda: called.append(2))
    with pytest.raises(SessionLost, match="does not read"):
        await asyncio.wait_for(stuck.watch_room(), 30)
    assert called == [1]


class StreamGateway:
    """One stream and the frames that arrive on it; ``Serve`` is what stands behind the relay."""

    def __init__(self, *, deadline_ms: int = 0) -> None:
        self.frames: list[frames.Frame] = []
        self.session = ClientSession()
        self.session.register(Register(models=["m"]))
        self.session.receive_text(encode_message(RegisterAck(worker_id="w", models=["m"], protocol_version=MUSTER_V1)))
        meta = frames.OpenMeta(
            request_id="r", model="m", path="/v1/x", deadline_ms=deadline_ms, window_bytes=1 << 20, priority="low"
        )
        (effect,) = self.session.receive_bytes(frames.encode_open(1, 1, meta, b"{}")[0])
        assert isinstance(effect, Opened)
        self.stream: Stream = effect.stream

    has_room = True

    def post(self, frame: bytes) -> None:
        self.frames.append(frames.decode_frame(frame))

    def when_room(self, go_on: Callable[[], None]) -> None:
        raise AssertionError("there is room")

    @property
    def kinds(self) -> list[int]:
        return [frame.kind for frame in self.frames]

    @property
    def end(self) -> End:
        """How it ended; the frame before it that holds an answer may be the same."""
        last = self.frames[-1]
        return frames.decode_reply(last.payload)[2] if last.kind == frames.REPLY else frames.decode_end(last.payload)


class Serve:
    """Opens answers: an ``error`` before there is one, else ``pieces``, an ``error_after`` them, ``closing`` at its end."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.body: bytes | None = None
        self.pieces: list[bytes] = []
        self.error_after: Exception | None = None
        self.closing: asyncio.Event | None = None
        self.seen: list[Inference] = []
        self.closed = 0

    @asynccontextmanager
    async def open(self, request: Inference) -> AsyncIterator[Answer]:
        self.seen.append(request)
        if self.error is not None:
            raise self.error
        try:
            chunks = None if self.body is not None else self._chunks()
            yield Answer(200, {"content-type": "text/event-stream"}, body=self.body, chunks=chunks, is_event_stream=True)
        finally:
            self.closed += 1
            if self.closing is not None:
                await self.closing.wait()

    async def _chunks(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        if self.error_after is not None:
            raise self.error_after


async def serve_stream(gateway: StreamGateway, serve: Serve) -> Relay:
    """Have the stream served to its end."""
    relay = Relay(serve.open)
    relay.open(gateway.stream, b"{}", gateway)
    await asyncio.wait_for(relay.wait_idle(), 30)
    assert relay.load == 0
    return relay


async def test_a_whole_answer_leaves_in_one_frame_also_when_time_runs_out() -> None:
    for deadline_ms, closing in ((0, None), (30, asyncio.Event())):
        gateway, serve = StreamGateway(deadline_ms=deadline_ms), Serve()
        serve.body, serve.closing = b"all of it", closing
        await serve_stream(gateway, serve)
        head, body, end = frames.decode_reply(gateway.frames[0].payload)
        assert (gateway.kinds, head.status, body, end.error) == ([frames.REPLY], 200, b"all of it", "")
        assert (serve.seen[0].priority, serve.seen[0].on_socket, serve.closed) == ("low", True, 1)


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (EngineUnavailable("it did not answer"), "engine_failed", True), (ModelNotLoaded("it is gone"), "busy", True),
        (ZeroDivisionError("a bug"), "engine_failed", False), (None, "", False),
    ],
)  # fmt: skip
async def test_a_stream_ends_once_and_what_fails_in_its_answer_is_not_to_be_tried_again(
    error: Exception | None, code: str, *, retryable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    if error is not None:
        gateway, serve = StreamGateway(), Serve()
        serve.error = error
        with caplog.at_level(logging.ERROR):
            await serve_stream(gateway, serve)
        assert gateway.kinds == [frames.END]
        assert (gateway.end.error, gateway.end.retryable) == (code, retryable)
        assert ("failed unexpectedly" in caplog.text) is isinstance(error, ZeroDivisionError)
        assert "a bug" not in gateway.end.message
    gateway, serve = StreamGateway(), Serve()
    serve.pieces, serve.error_after = [b"data: 1\n\n", b"data: 2\n\n"], error
    await serve_stream(gateway, serve)
    assert gateway.kinds == [frames.HEAD, frames.DATA, frames.DATA, frames.END]
    assert (gateway.end.error, gateway.end.retryable) == ("" if error is None else "engine_failed", False)


async def test_a_refusal_keeps_its_status_and_says_when_to_come_back() -> None:
    gateway, serve = StreamGateway(), Serve()
    serve.error = InvalidRequest("no", param="x", retry_after_s=0.2)
    await serve_stream(gateway, serve)
    head, body, end = frames.decode_reply(gateway.frames[0].payload)
    assert (head.status, head.headers["retry-after"], end.error) == (400, "1", "")
    assert b'"param":"x"' in body


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

    def __init__(self, **rates: str) -> None:
        self.engine, self.counters = PaperEngine(), Counters()
        library = Library(None, None, None, read_shape=read_shape)
        budget = WaitBudget(9)
        registry = Registry(library=library, make_queue=lambda _: self.queue, on_change=lambda: None)
        self.queue = FairQueue(slots=1, limits=Fairness(), budget=budget, weight_of=lambda _tenant: 1.0)
        self.registry = registry
        self.serving = Serving(
            registry,
            rates=read_rates(rates),
            counters=self.counters,
            costs=None,
            queue_timeout_s=5.0,
            wakes=(),
            decoding=Decoding,
        )
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
        async with self.serving.open(request) as answer:
            assert answer.chunks is not None
            return b"".join([chunk async for chunk in answer.chunks])

    def counted(self) -> tuple[int, int]:
        """Return how many requests counted as a success and as an error since the last time."""
        counts, self.counters.requests = self.counters.requests, {}
        return tuple(sum(n for key, n in counts.items() if key[2] == status) for status in ("success", "error"))  # type: ignore[return-value]  # two


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    made = Node()
    await made.start()
    yield made
    await made.supervisor.unload(gently=True)


async def test_a_tenants_rate_counts_what_it_asks_of_the_nodes_own_port_and_nothing_from_a_gateway() -> None:
    node = Node(TENANT_RATE_LIMIT_t="1req/hour")
    await node.start()
    try:
        node.engine.pieces = [b"data: [DONE]\n\n"]
        ask = partial(Inference, "POST", CHAT, {}, b'{"model":"m"}', "m")
        for served in (ask("t", on_socket=True), ask("t"), ask("other"), ask("t", on_socket=True)):
            async with node.serving.open(served) as answer:
                assert answer.status == 200
        with pytest.raises(RateLimitExceeded, match="Tenant t exceeded 1 req/hour"):
            await node.serving.open(ask("t")).__aenter__()
        assert (node.counters.refusals, node.serving.load, node.queue.active) == ({"rate_limit_exceeded": 1}, 0, 0)
    finally:
        await node.supervisor.unload(gently=True)


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
    assert node.counters.refusals.keys() == {"engine_failed"}


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
        for pieces in ([word, said], [word + said], [word + said + word], [word + said[:9], said[9:]]):
            body = await node.ask(path, *pieces)
            assert body.partition(b": x-cache-hit")[0] == b"".join(pieces)
            assert node.counted() == (0, 1)


@pytest.mark.parametrize("error", BARE_ERRORS)
async def test_a_native_response_never_ends_with_a_bare_error(error: bytes, node: Node) -> None:
    began, word = next(stream for stream in STREAMS if stream.path == RESPONSES).events[:2]
    body = await node.ask(RESPONSES, began, word + error)
    last = json.loads(read_stream(body).events[-1].data)
    assert (last["type"], last["response"]["id"]) == ("response.failed", "resp_1")
    assert "boom" in last["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("code", "reason", "kind", "words"),
    [
        (1002, "worker registration protocol error", SessionLost, f"does not take {MUSTER_V1}"),
        (1002, "worker protocol error", SessionLost, "closed with code 1002 worker protocol error"),
        (1008, "worker authentication failed", AuthRefused, "worker authentication failed"),
        (1008, "worker authentication temporarily rate limited", SessionLost, "rate limited"),
        (1008, NAME_TAKEN, NameInUse, NAME_TAKEN),
        (1012, "", SessionLost, "closed with code 1012"),
    ],
)
def test_a_close_of_the_gateway_is_told_from_others_by_what_its_owner_can_do(
    code: int, reason: str, kind: type[SessionLost], words: str
) -> None:
    found = explain_close(aiohttp.WSMessage(aiohttp.WSMsgType.CLOSE, code, reason))
    assert (type(found), words in str(found)) == (kind, True)
