"""How the relay ends a stream towards its gateway: exactly once, whatever happens behind it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from runner.errors import EngineUnavailable, InvalidRequest, ModelNotLoaded, SessionLost
from runner.relay import Relay
from runner.serving.request import Inference
from runner.serving.service import Answer
from runner.session import ClientSession, Opened, Stream
from wire import frames
from wire.bridge import MUSTER_V1, Register, RegisterAck, encode_message
from wire.frames import End


class Gateway:
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


async def run(gateway: Gateway, serve: Serve) -> Relay:
    """Have the stream served to its end."""
    relay = Relay(serve.open)
    relay.open(gateway.stream, b"{}", gateway.send)
    await asyncio.wait_for(relay.wait_idle(), 30)
    assert relay.load == 0
    return relay


async def test_a_whole_answer_leaves_in_one_frame_and_the_request_says_what_the_gateway_said() -> None:
    gateway, serve = Gateway(), Serve()
    serve.body = b"all of it"
    await run(gateway, serve)
    assert gateway.kinds == [frames.REPLY]
    head, body, end = frames.decode_reply(gateway.frames[0].payload)
    assert (head.status, body, end.error) == (200, b"all of it", "")
    assert (serve.seen[0].priority, serve.seen[0].on_socket, serve.closed) == ("low", True, 1)


async def test_a_streamed_answer_ends_once() -> None:
    gateway, serve = Gateway(), Serve()
    serve.pieces = [b"data: 1\n\n", b"data: 2\n\n"]
    await run(gateway, serve)
    assert gateway.kinds == [frames.HEAD, frames.DATA, frames.DATA, frames.END]
    assert gateway.end.error == ""


@pytest.mark.parametrize(
    ("error", "code", "retryable"),
    [
        (EngineUnavailable("it did not answer"), "engine_failed", True),
        (ModelNotLoaded("it is gone"), "busy", True),
        (ZeroDivisionError("a bug"), "engine_failed", False),
    ],
)
async def test_what_fails_before_its_answer_ends_once(
    error: Exception, code: str, *, retryable: bool, caplog: pytest.LogCaptureFixture
) -> None:
    gateway, serve = Gateway(), Serve()
    serve.error = error
    with caplog.at_level(logging.ERROR):
        await run(gateway, serve)
    assert gateway.kinds == [frames.END]
    assert (gateway.end.error, gateway.end.retryable) == (code, retryable)
    assert ("failed unexpectedly" in caplog.text) is isinstance(error, ZeroDivisionError)
    assert "a bug" not in gateway.end.message


@pytest.mark.parametrize("error", [EngineUnavailable("it broke off"), ZeroDivisionError("a bug")])
async def test_what_fails_in_its_answer_ends_once_and_is_not_to_be_tried_again(error: Exception) -> None:
    gateway, serve = Gateway(), Serve()
    serve.pieces, serve.error_after = [b"data: 1\n\n"], error
    await run(gateway, serve)
    assert gateway.kinds == [frames.HEAD, frames.DATA, frames.END]
    assert (gateway.end.error, gateway.end.retryable) == ("engine_failed", False)


async def test_a_refusal_keeps_its_status_and_says_when_to_come_back() -> None:
    gateway, serve = Gateway(), Serve()
    serve.error = InvalidRequest("no", param="x", retry_after_s=0.2)
    await run(gateway, serve)
    head, body, end = frames.decode_reply(gateway.frames[0].payload)
    assert (head.status, head.headers["retry-after"], end.error) == (400, "1", "")
    assert b'"param":"x"' in body


async def test_a_deadline_ends_a_stream_once_and_frees_what_it_held() -> None:
    gateway, serve = Gateway(deadline_ms=30), Serve()
    serve.pieces, serve.waits = [b"data: 1\n\n"], asyncio.Event()
    await run(gateway, serve)
    assert gateway.kinds == [frames.HEAD, frames.DATA, frames.END]
    assert (gateway.end.error, serve.closed) == ("timeout", 1)


async def test_a_deadline_that_passes_while_credit_is_waited_for_ends_it_too() -> None:
    gateway, serve = Gateway(deadline_ms=30, window_bytes=4), Serve()
    serve.pieces = [b"data: 1\n\n"]
    await run(gateway, serve)
    assert gateway.kinds == [frames.HEAD, frames.DATA, frames.END]
    assert gateway.end.error == "timeout"


async def test_an_answer_that_is_whole_when_time_runs_out_is_delivered() -> None:
    gateway, serve = Gateway(deadline_ms=30), Serve()
    serve.body, serve.closing = b"all of it", asyncio.Event()
    await run(gateway, serve)
    head, body, end = frames.decode_reply(gateway.frames[0].payload)
    assert (gateway.kinds, head.status, body, end.error) == ([frames.REPLY], 200, b"all of it", "")


async def test_a_cancelled_stream_is_ended_by_its_session_alone() -> None:
    gateway, serve = Gateway(), Serve()
    serve.pieces, serve.waits = [b"data: 1\n\n"], asyncio.Event()
    relay = Relay(serve.open)
    relay.open(gateway.stream, b"{}", gateway.send)
    async with asyncio.timeout(30):
        while frames.DATA not in gateway.kinds:
            await asyncio.sleep(0)
        gateway.session.receive_bytes(frames.encode_frame(frames.CANCEL, 1, 1, b"enough"))
        relay.abort(gateway.stream)
        await relay.wait_idle()
    assert gateway.kinds == [frames.HEAD, frames.DATA]
    assert serve.closed == 1


async def test_a_socket_that_is_lost_ends_the_work(caplog: pytest.LogCaptureFixture) -> None:
    gateway, serve = Gateway(), Serve()
    serve.pieces, gateway.is_lost = [b"data: 1\n\n"], True
    with caplog.at_level(logging.ERROR):
        await run(gateway, serve)
    assert (gateway.frames, serve.closed) == ([], 1)
    assert [record for record in caplog.records if record.name.startswith("runner")] == []
