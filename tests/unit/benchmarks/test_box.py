"""The scripted box speaks both worker protocols: it registers, streams in order, obeys its window, stops when told."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection, serve

from benchmarks.answers import CHAT, MESSAGES, RESPONSES
from benchmarks.processes import Child
from benchmarks.upstream import Pace
from wire import bridge, frames

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(150)]

STAMP = re.compile(rb'"T[0-9a-f]{16}([0-9a-f]{8})([0-9a-f]{6})([0-9a-f]{6})"')
DEADLINE_S = 50


class Session:
    """The server's end of one box."""

    def __init__(self, socket: ServerConnection, register: bridge.Register, box: Child) -> None:
        self.socket = socket
        self.register = register
        self.box = box

    async def next_frame(self) -> frames.Frame:
        """Return the next binary frame, passing over telemetry."""
        while True:
            data = await self.socket.recv()
            if isinstance(data, bytes):
                return frames.decode_frame(data)

    async def next_message(self) -> bridge.WorkerMessage:
        return bridge.decode_worker_message(await self.socket.recv())

    async def set_pace(self, pace: Pace) -> None:
        self.box.send_line(msgspec.json.encode(pace).decode())
        assert await asyncio.to_thread(self.box.read_line, DEADLINE_S) == "ok"

    async def open_stream(
        self, number: int, *, is_streaming: bool, window_bytes: int = 1 << 20, path: str = CHAT, body: bytes = b"{}"
    ) -> None:
        meta = frames.OpenMeta(request_id="r", model="m", path=path, is_streaming=is_streaming, window_bytes=window_bytes)
        for frame in frames.encode_open(number, 3, meta, body):
            await self.socket.send(frame)

    async def read_stream(self) -> bytes:
        """Return the body of the next stream, its head and end left out."""
        assert (await self.next_frame()).kind == frames.HEAD
        body = b""
        while (frame := await self.next_frame()).kind == frames.DATA:
            body += frame.payload
        assert frame.kind == frames.END
        return body


@asynccontextmanager
async def accept_box(tmp_path: Path, *, protocol: str, options: Sequence[str] = ()) -> AsyncIterator[Session]:
    """Run a box against a server that accepts it."""
    arrived: asyncio.Future[tuple[ServerConnection, bridge.Register]] = asyncio.get_running_loop().create_future()

    async def handle(socket: ServerConnection) -> None:
        assert socket.request is not None
        assert socket.request.headers["x-worker-secret"] == "secret"
        register = bridge.decode_worker_message(await socket.recv())
        assert isinstance(register, bridge.Register)
        ack = bridge.RegisterAck(worker_id="w", models=register.models, heartbeat_interval_s=60.0)
        await socket.send(bridge.encode_message(ack))
        arrived.set_result((socket, register))
        await socket.wait_closed()

    async with asyncio.timeout(DEADLINE_S), serve(handle, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        argv = [sys.executable, "-m", "benchmarks.box", "--gateway", f"ws://127.0.0.1:{port}", "--model", "m"]
        env = {**os.environ, "MUSTER_BOX_SECRET": "secret"}
        box = Child("box", [*argv, "--protocol", protocol, *options], log_dir=tmp_path, env=env, talks=True)
        try:
            assert await asyncio.to_thread(box.read_line, DEADLINE_S) == "registered"
            socket, register = await arrived
            yield Session(socket, register, box)
        finally:
            await asyncio.to_thread(box.stop)


def read_indexes(data: bytes) -> list[int]:
    return [int(index, 16) for _stream, index, _total in STAMP.findall(data)]


async def test_a_muster_box_streams_head_numbered_chunks_and_end(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        assert session.register.protocol_version == bridge.MUSTER_V1
        await session.set_pace(Pace(chunks=5, delay_us=100))
        await session.open_stream(7, is_streaming=True)
        head = await session.next_frame()
        assert (head.kind, head.stream, head.attempt) == (frames.HEAD, 7, 3)
        assert frames.decode_head(head.payload).status == 200
        body = b""
        while (frame := await session.next_frame()).kind == frames.DATA:
            body += frame.payload
        assert read_indexes(body) == [0, 1, 2, 3, 4]
        assert body.endswith(b"data: [DONE]\n\n")
        end = frames.decode_end(frame.payload)
        assert end.error == ""
        assert end.usage is not None
        assert end.usage.completion_tokens == 5


async def test_a_muster_box_answers_a_request_that_is_not_streamed(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.open_stream(1, is_streaming=False)
        frame = await session.next_frame()
        assert frame.kind == frames.REPLY
        head, body, end = frames.decode_reply(frame.payload)
        assert (head.status, end.error) == (200, "")
        assert read_indexes(body) == [0]


async def test_a_muster_box_declares_chat_alone_unless_it_is_told_other_paths(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        assert session.register.endpoints == [CHAT]
    options = [f"--endpoint={CHAT}", f"--endpoint={MESSAGES}"]
    async with accept_box(tmp_path, protocol="muster", options=options) as session:
        assert session.register.endpoints == [CHAT, MESSAGES]


@pytest.mark.parametrize(("path", "end"), [(MESSAGES, b'{"type":"message_stop"}'), (RESPONSES, b'"status":"completed"')])
async def test_a_muster_box_answers_in_the_words_of_the_path_it_is_asked_on(tmp_path: Path, path: str, end: bytes) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.set_pace(Pace(chunks=3, delay_us=100))
        await session.open_stream(1, is_streaming=True, path=path)
        body = await session.read_stream()
        assert read_indexes(body) == [0, 1, 2]
        assert end in body.rstrip().rpartition(b"\n")[2]
        for line in body.splitlines():
            assert not line.startswith(b"data:") or msgspec.json.decode(line[5:])["type"]
        await session.open_stream(2, is_streaming=False, path=path)
        _head, whole, _end = frames.decode_reply((await session.next_frame()).payload)
        assert read_indexes(whole) == [0]
        assert msgspec.json.decode(whole)["model"] == "mock"


async def test_a_muster_box_counts_tokens_at_the_end_of_a_stream_when_it_is_asked_to(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.set_pace(Pace(chunks=3, delay_us=100))
        for number, body in enumerate((b"{}", b'{"stream_options":{"include_usage":true}}'), start=1):
            await session.open_stream(number, is_streaming=True, body=body)
            assert (b'"completion_tokens":3' in await session.read_stream()) is (number == 2)


async def test_a_muster_box_never_sends_beyond_its_window_and_goes_on_with_credit(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.set_pace(Pace(chunks=50, delay_us=0))
        await session.open_stream(1, is_streaming=True, window_bytes=1000)
        assert (await session.next_frame()).kind == frames.HEAD
        await session.open_stream(2, is_streaming=False)  # its answer comes after all that the first may send
        first = b""
        while (frame := await session.next_frame()).stream == 1:
            first += frame.payload
        assert 0 < len(first) <= 1000
        await session.socket.send(frames.encode_credit(1, 3, 1 << 20))
        while (frame := await session.next_frame()).kind != frames.END or frame.stream != 1:
            first += frame.payload if frame.stream == 1 else b""
        assert read_indexes(first) == list(range(50))


async def test_a_muster_box_stops_a_cancelled_stream(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="muster") as session:
        await session.set_pace(Pace(chunks=100_000, delay_us=1000))
        await session.open_stream(1, is_streaming=True)
        assert (await session.next_frame()).kind == frames.HEAD
        await session.socket.send(frames.encode_frame(frames.CANCEL, 1, 3, b"client_disconnect"))
        while (frame := await session.next_frame()).kind == frames.DATA:
            pass
        assert frames.decode_end(frame.payload).error == "cancelled"


async def test_a_bridge_box_streams_text_chunks_and_completes_with_an_empty_body(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="bridge") as session:
        assert session.register.protocol_version == bridge.BRIDGE_V1
        await session.set_pace(Pace(chunks=3, delay_us=100))
        request = bridge.Request(
            request_id="request-1", model="m", endpoint_path="/v1/chat/completions", is_streaming=True, body="{}"
        )
        await session.socket.send(bridge.encode_message(request))
        text = ""
        while isinstance(message := await session.next_message(), bridge.ResponseChunk):
            text += message.chunk
        assert read_indexes(text.encode()) == [0, 1, 2]
        assert isinstance(message, bridge.ResponseComplete)
        assert (message.request_id, message.status_code, message.body) == ("request-1", 200, "")


async def test_a_box_answers_pings_of_both_kinds(tmp_path: Path) -> None:
    async with accept_box(tmp_path, protocol="bridge") as session:
        await session.socket.send(bridge.encode_message(bridge.Ping(timestamp_unix_ms=5)))
        assert await session.next_message() == bridge.Pong(current_load=0, timestamp_unix_ms=5)
        await (await session.socket.ping())
