"""The session of a runner with one gateway, and the relay that answers its streams."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from core.limits import NodeLimits
from nodes import session as server_side
from runner.errors import EngineUnavailable, InvalidRequest, ModelNotLoaded, SessionLost, StreamClosed
from runner.relay import Relay
from runner.serving.request import Inference
from runner.serving.service import Answer
from runner.session import (
    Accepted,
    Cancelled,
    ClientSession,
    Credited,
    Opened,
    Reply,
    Stream,
)
from tests.fakes.limits import set_runner_limits
from tests.fakes.waiting import eventually
from wire import bridge, frames
from wire.bridge import MUSTER_V1, ProtocolError, Register, RegisterAck, encode_message
from wire.frames import End

ACK = bridge.RegisterAck(worker_id="w", models=["m"], protocol_version=MUSTER_V1, node_id="node_1")


def accepted_session() -> ClientSession:
    """Return a session past its handshake."""
    session = ClientSession()
    session.register(bridge.Register(models=["m"]))
    assert session.receive_text(bridge.encode_message(ACK)) == [Accepted(ACK)]
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
    assert cancelled == Cancelled(stream, "client_disconnect")
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


def test_box_and_server_sessions_understand_each_other_back_to_back() -> None:
    box, server = ClientSession(), server_side.ServerSession(NodeLimits())
    (registered,) = server.receive_text(box.register(bridge.Register(worker_name="box", models=["m"], max_concurrent=2)))
    assert isinstance(registered, server_side.Registered)
    assert (registered.models, registered.protocol) == (("m",), MUSTER_V1)
    box.receive_text(bridge.encode_message(ACK))
    body = b"z" * 600_000
    request = server_side.OpenRequest(
        request_id="req", attempt=1, model="m", path="/v1/chat/completions", body=body, headers={},
        is_streaming=True, deadline_ms=5000, tenant="t",
    )  # fmt: skip
    number, to_box = server.open_stream(request)
    (opened,) = [effect for frame in to_box for effect in box.receive_bytes(as_bytes(frame))]
    assert isinstance(opened, Opened)
    assert opened.body == body
    stream = opened.stream
    from_box = [stream.head(200, {"content-type": "text/plain"}), stream.data(b"\xe2\x82"), stream.data(b"\xac")]
    effects = [effect for frame in from_box for effect in server.receive_bytes(frame)]
    assert effects == [
        server_side.HeadArrived(number, 200, {"content-type": "text/plain"}),
        server_side.DataArrived(number, b"\xe2\x82"),
        server_side.DataArrived(number, b"\xac"),
    ]
    before = stream.window
    (credit,) = server.grant_credit(number, 3)
    assert box.receive_bytes(as_bytes(credit)) == [Credited(stream)]
    assert stream.window == before + 3
    late = stream.data(b"late")
    (cancel,) = server.cancel_stream(number, "client_disconnect")
    _, farewell = box.receive_bytes(as_bytes(cancel))
    assert isinstance(farewell, Reply)
    dropped = [effect for frame in (late, farewell.frame) for effect in server.receive_bytes(frame)]
    assert dropped == [server_side.FrameDropped(number)] * 2
    assert (server.open_streams, box.streams) == (0, [])


def as_bytes(frame: str | bytes) -> bytes:
    """Return a frame that must be binary."""
    assert isinstance(frame, bytes)
    return frame


class StreamGateway:
    """One stream and the frames that arrive on it; ``Serve`` is what stands behind the relay."""

    def __init__(self, *, deadline_ms: int = 0, window_bytes: int = 1 << 20) -> None:
        self.frames: list[frames.Frame] = []
        self.is_lost = False
        self.session = ClientSession()
        self.session.register(Register(models=["m"]))
        self.session.receive_text(encode_message(RegisterAck(worker_id="w", models=["m"], protocol_version=MUSTER_V1)))
        meta = frames.OpenMeta(
            request_id="r", model="m", path="/v1/x", deadline_ms=deadline_ms, window_bytes=window_bytes, priority="low"
        )
        (effect,) = self.session.receive_bytes(frames.encode_open(1, 1, meta, b"{}")[0])
        assert isinstance(effect, Opened)
        self.stream: Stream = effect.stream

    async def send(self, frame: bytes) -> None:
        if self.is_lost:
            raise SessionLost("gone")
        self.frames.append(frames.decode_frame(frame))

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
        self.waits: asyncio.Event | None = None
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
        if self.waits is not None:
            await self.waits.wait()
        if self.error_after is not None:
            raise self.error_after


async def serve_stream(gateway: StreamGateway, serve: Serve) -> Relay:
    """Have the stream served to its end."""
    relay = Relay(serve.open)
    relay.open(gateway.stream, b"{}", gateway.send)
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
    serve.pieces, serve.error_after = [b"data: 1\n\n", b"data: 2\n\n"], None if code == "busy" else error
    await serve_stream(gateway, serve)
    assert gateway.kinds == [frames.HEAD, frames.DATA, frames.DATA, frames.END]
    assert (gateway.end.error, gateway.end.retryable) == ("" if code == "busy" else code, False)


async def test_a_refusal_keeps_its_status_and_says_when_to_come_back() -> None:
    gateway, serve = StreamGateway(), Serve()
    serve.error = InvalidRequest("no", param="x", retry_after_s=0.2)
    await serve_stream(gateway, serve)
    head, body, end = frames.decode_reply(gateway.frames[0].payload)
    assert (head.status, head.headers["retry-after"], end.error) == (400, "1", "")
    assert b'"param":"x"' in body


@pytest.mark.parametrize("window_bytes", [1 << 20, 4], ids=["waits for the engine", "waits for credit"])
async def test_a_deadline_ends_a_stream_once_and_frees_what_it_held(window_bytes: int) -> None:
    gateway, serve = StreamGateway(deadline_ms=30, window_bytes=window_bytes), Serve()
    serve.pieces, serve.waits = [b"data: 1\n\n"], asyncio.Event()
    await serve_stream(gateway, serve)
    assert gateway.kinds == [frames.HEAD, frames.DATA, frames.END]
    assert (gateway.end.error, serve.closed) == ("timeout", 1)


async def test_a_cancelled_stream_is_ended_by_its_session_alone() -> None:
    gateway, serve = StreamGateway(), Serve()
    serve.pieces, serve.waits = [b"data: 1\n\n"], asyncio.Event()
    relay = Relay(serve.open)
    relay.open(gateway.stream, b"{}", gateway.send)
    await eventually(lambda: frames.DATA in gateway.kinds)
    gateway.session.receive_bytes(frames.encode_frame(frames.CANCEL, 1, 1, b"enough"))
    relay.abort(gateway.stream)
    await asyncio.wait_for(relay.wait_idle(), 30)
    assert gateway.kinds == [frames.HEAD, frames.DATA]
    assert serve.closed == 1


async def test_a_socket_that_is_lost_ends_the_work(caplog: pytest.LogCaptureFixture) -> None:
    gateway, serve = StreamGateway(), Serve()
    serve.pieces, gateway.is_lost = [b"data: 1\n\n"], True
    with caplog.at_level(logging.ERROR):
        await serve_stream(gateway, serve)
    assert (gateway.frames, serve.closed) == ([], 1)
    assert [record for record in caplog.records if record.name.startswith("runner")] == []
