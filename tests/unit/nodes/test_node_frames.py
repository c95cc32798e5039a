"""Frames of nodes that dialled in: what is cut out of a read is what the websockets library finds, however reads are cut."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Iterable
from itertools import accumulate, pairwise
from typing import Any

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from core.limits import limits
from nodes.links.relay import RelayLink
from nodes.session import ServerSession
from tests.fakes.examples import examples
from tests.fakes.links import RequestSink, hello, open_request
from tests.fakes.waiting import eventually
from wire import bridge

UPGRADE = (
    b"GET /v1/worker/connect HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
MAX_BYTES = 70_000
KIB = 1024


class LibraryAlone(GatewayWebSocketProtocol):
    """The same protocol without a cutter."""

    data_received = WebSocketsSansIOProtocol.data_received


class NoLoop:
    """A loop, and a task of it, that runs nothing by itself: the application of a socket never begins."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def create_task(self, coro: Coroutine[Any, Any, Any]) -> NoLoop:
        coro.close()
        return self

    def add_done_callback(self, callback: object) -> None:
        """Never call it."""

    def call_later(self, delay: float, callback: object) -> NoLoop:
        return self

    def cancel(self) -> None:
        """Be a timer that never rang."""


class Wire(asyncio.Transport):
    """The server's end of a TCP connection whose other end is the test."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = b""
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def write(self, data: Any) -> None:
        self.sent += data

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def pause_reading(self) -> None:
        """Nothing is read that the test does not send."""

    def resume_reading(self) -> None:
        """See above."""


class Socket:
    """A server's WebSocket after the upgrade; ``heard``: the messages that its application was called with."""

    def __init__(
        self, kind: type[GatewayWebSocketProtocol] = GatewayWebSocketProtocol, *, takes_over: bool = True, early: bytes = b""
    ) -> None:
        config = uvicorn.Config(
            _never,
            ws_max_size=MAX_BYTES,
            ws_per_message_deflate=False,
            ws_ping_interval=None,
            log_config=None,
            interface="asgi3",
        )
        config.load()
        self.loop = NoLoop()
        self.protocol = kind(config, ServerState(), {}, self.loop)  # type: ignore[arg-type]  # a stand-in
        self.wire = Wire()
        self.protocol.connection_made(self.wire)
        self.protocol.data_received(UPGRADE + early)
        self.protocol.conn.send_response(self.protocol.response)
        self.answer = b"".join(self.protocol.conn.data_to_send())
        self.protocol.handshake_complete = True
        self.heard: list[str | bytes] = []
        if takes_over:
            self.take_over()

    def take_over(self) -> None:
        while not self.protocol.queue.empty():
            event = self.protocol.queue.get_nowait()
            if event["type"] == "websocket.receive":
                text = event.get("text")
                self.heard.append(text if text is not None else event["bytes"] or b"")
        assert self.protocol.take_over(self.heard.append)

    def end_turn(self) -> None:
        """Run what is due behind this turn of the loop."""
        while self.loop.due:
            self.loop.due.pop(0)()

    def take(self, read: bytes) -> None:
        if not self.wire.is_closed:
            self.protocol.data_received(read)

    @property
    def state(self) -> tuple[object, ...]:
        """What anybody can see of it."""
        return self.heard, self.wire.sent, self.wire.is_closed, self.protocol.close_sent, self.protocol.conn.state


async def _never(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError


def masked(payload: bytes, opcode: Opcode = Opcode.BINARY, *, fin: bool = True, rsv1: bool = False) -> bytes:
    frame = bytearray(Frame(opcode, payload, fin).serialize(mask=True))
    frame[0] |= 0x40 if rsv1 else 0
    return bytes(frame)


def lengthened(length: int, width: int, payload: bytes = b"") -> bytes:
    """Return a masked binary frame that says its length in ``width`` bytes, whether or not that is true or needed."""
    return bytes((0x82, 0xFE if width == 2 else 0xFF)) + length.to_bytes(width, "big") + bytes(4) + payload


SIZES = st.sampled_from([0, 1, 2, 13, 14, 125, 126, 127, 128, 255, 256, 300, 0x7E7E, 65_535, 65_536, MAX_BYTES, MAX_BYTES + 1])
PAYLOADS = st.binary(max_size=20) | SIZES.map(lambda size: bytes(range(256)) * (size // 256) + bytes(size % 256))
TEXTS = st.text(max_size=9).map(str.encode)
WHOLE = PAYLOADS.map(masked)
PIECES = st.one_of(
    WHOLE,
    WHOLE,
    TEXTS.map(lambda text: masked(text, Opcode.TEXT)),
    st.binary(max_size=130).map(lambda payload: masked(payload, Opcode.PING)),
    st.binary(max_size=9).map(lambda payload: masked(payload, Opcode.PONG)),
    st.tuples(PAYLOADS, PAYLOADS).map(lambda two: masked(two[0], fin=False) + masked(two[1], Opcode.CONT)),
    st.tuples(TEXTS, PAYLOADS).map(lambda two: masked(two[0], Opcode.TEXT, fin=False) + masked(two[1])),
    st.tuples(TEXTS, TEXTS).map(
        lambda two: masked(two[0], Opcode.TEXT, fin=False) + masked(b"p", Opcode.PING) + masked(two[1], Opcode.CONT)
    ),
    st.integers(0, 300).map(lambda size: lengthened(size, 2, bytes(size))),
    st.integers(0, 300).map(lambda size: lengthened(size, 8, bytes(size))),
)
ODD = st.one_of(
    st.sampled_from([b"\x03\xe8", b"\x03\xe8bye", b"", b"\x00"]).map(lambda payload: masked(payload, Opcode.CLOSE)),
    st.binary(max_size=9).map(lambda payload: Frame(Opcode.BINARY, payload).serialize(mask=False)),
    st.binary(max_size=9).map(lambda payload: masked(payload, rsv1=True)),
    st.binary(max_size=9).map(lambda payload: masked(payload, Opcode.CONT)),
    st.sampled_from([MAX_BYTES + 1, 2**31, 2**63, 2**64 - 1]).map(lambda size: lengthened(size, 8)),
    st.binary(max_size=20),
    WHOLE.map(lambda frame: frame[: len(frame) // 2]),
)


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    """Return data in reads that end at these places."""
    edges = sorted({0, len(data), *(place % (len(data) + 1) for place in places)})
    return [data[start:stop] for start, stop in pairwise(edges)]


@given(st.lists(PIECES, max_size=6), st.lists(ODD, max_size=2), st.lists(st.integers(0, 300_000), max_size=6), st.data())
@examples(60)
def test_any_stream_is_read_as_the_library_reads_it(
    pieces: list[bytes], odd: list[bytes], places: list[int], data: st.DataObject
) -> None:
    parts = [*pieces, *odd, masked(b"behind")]
    ends = list(accumulate(map(len, parts)))
    near = [ends[0] + step for step in range(-2, 15)] if data.draw(st.booleans()) else []
    # The library forgets what a read held before a fault: it is given single frames, odd ones in bytes, and forgets nothing.
    apart = {*ends, *range(sum(map(len, pieces)), ends[-1])}
    switch = data.draw(st.integers(0, 8))
    ours, theirs, at = Socket(takes_over=False), Socket(LibraryAlone, takes_over=False), 0
    for number, read in enumerate(cut(b"".join(parts), places + near)):
        if number == switch:  # the application takes over while frames, and parts of them, have come
            ours.take_over()
            theirs.take_over()
        ours.take(read)
        for piece in cut(read, {end - at for end in apart if at < end < at + len(read)}):
            theirs.take(piece)
        at += len(read)
        assert ours.state == theirs.state, "the same, and no later"
        assert len(ours.protocol._begun) < 10, "no part of a frame waits beside the library"


@pytest.mark.parametrize("is_cut_in", range(1, 20))
def test_frames_cut_at_any_byte_arrive_in_order(is_cut_in: int) -> None:
    said: list[str | bytes] = [b"a" * 5, b"b" * 200, "text", b"", b"c" * 65_535, b"d" * 65_536, b"end"]
    stream = b"".join(
        masked(said.encode(), Opcode.TEXT) if isinstance(said, str) else masked(said) + masked(b"p", Opcode.PING)
        for said in said
    )
    socket = Socket()
    for start in range(0, 600, is_cut_in):
        socket.take(stream[start : min(600, start + is_cut_in)])
    socket.take(stream[600:])
    assert socket.heard == said
    assert socket.wire.sent.count(b"\x8a\x01p") == 6


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (lengthened(MAX_BYTES + 1, 8)[:10], 1009),
        (Frame(Opcode.BINARY, b"").serialize(mask=False), 1002),
        (masked(b"x", rsv1=True), 1002),
        (masked(b"x", Opcode.CONT), 1002),
        (masked(b"a", fin=False) + masked(b"b"), 1002),
        (b"\x83\x80", 1002),
    ],
    ids=["too large", "not masked", "compressed", "no message to go on with", "a message in a message", "no opcode"],
)
def test_what_the_library_refuses_is_refused_and_nothing_behind_it_is_taken(frame: bytes, code: int) -> None:
    for behind in (b"", masked(b"behind")):
        socket = Socket()
        socket.take(masked(b"before") + frame + behind)
        assert socket.heard == [b"before"]
        assert socket.protocol.conn.close_sent is not None
        assert (socket.protocol.conn.close_sent.code, socket.wire.is_closed) == (code, True)


def test_a_socket_whose_upgrade_came_with_more_behind_it_is_left_to_the_library() -> None:
    looks_like_one = masked(b"forged")
    frame = lengthened(len(looks_like_one), 2, looks_like_one)
    socket = Socket(early=frame[:8])
    socket.take(frame[8:] + masked(b"next"))
    assert socket.heard == [looks_like_one, b"next"]


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65_535, 65_536, 1024 * KIB])
def test_a_frame_is_written_as_the_library_reads_it(size: int) -> None:
    socket, frame = Socket(), bytes(size)
    assert socket.protocol.write_frame(frame)
    assert socket.protocol.write_frame(b"next")
    socket.end_turn()
    client = ClientProtocol(parse_uri("ws://a/"), state=State.OPEN, max_size=None)
    client.receive_data(socket.wire.sent)
    events = client.events_received()
    for event, sent in zip(events, (frame, b"next"), strict=True):
        assert isinstance(event, Frame)
        assert (event.opcode, event.fin, bytes(event.data)) == (Opcode.BINARY, True, sent)


async def test_frames_of_one_turn_go_out_before_what_is_sent_behind_them_and_not_behind_a_close() -> None:
    socket = Socket()
    assert socket.protocol.write_frame(b"first")
    assert socket.wire.sent == b""
    await socket.protocol.send({"type": "websocket.send", "text": "second"})
    assert socket.wire.sent.index(b"first") < socket.wire.sent.index(b"second")
    assert socket.protocol.write_frame(b"third")
    socket.protocol.conn.send_close(1000)
    socket.end_turn()
    assert b"third" not in socket.wire.sent
    many = Socket()
    while not many.wire.sent:  # so that a line which is full says so
        assert many.protocol.write_frame(bytes(KIB))
    assert len(many.wire.sent) < 70 * KIB


async def test_nothing_is_heard_behind_our_own_close() -> None:
    socket = Socket()
    socket.take(masked(b"before"))
    await socket.protocol.send({"type": "websocket.close", "code": 1000, "reason": None})
    socket.take(masked(b"late") + masked(b"later") + masked(b"\x03\xe8", Opcode.CLOSE))
    assert socket.heard == [b"before"]
    assert socket.protocol.conn.close_rcvd is not None


def test_nothing_is_written_past_a_line_that_is_not_free() -> None:
    socket = Socket()
    assert not socket.protocol.write_frame(bytes(limits().gateway.server_fragment_bytes + 1)), "it has to go in fragments"
    socket.protocol.pause_writing()
    assert not socket.protocol.write_frame(b"x")
    socket.protocol.resume_writing()
    socket.protocol.conn.send_close(1000)
    assert not socket.protocol.write_frame(b"x")
    assert socket.wire.sent == b""


async def test_frames_to_a_node_keep_their_order_when_its_line_is_blocked_and_free_again() -> None:
    sent: list[object] = []
    room, is_free = asyncio.Event(), True

    async def send(event: dict[str, Any]) -> None:
        await room.wait()
        sent.append(event.get("bytes") or event.get("text"))

    def write(frame: bytes) -> bool:
        if is_free:
            sent.append(frame)
        return is_free

    session = ServerSession(limits().nodes)
    session.receive_text(bridge.encode_message(hello()))
    link = RelayLink(
        node_id=uuid.UUID(int=1), node_name="n", models=frozenset({"m"}), max_concurrent=4, session=session, send=send,
        kick=lambda code, reason: None,
    )  # fmt: skip
    link.write_frame = write
    link.send_frames([b"1"])
    is_free = False
    link.send_frames([b"2"])
    is_free = True
    link.send_frames([b"3", "4", b"5"])
    assert (sent, link.outbox.waiting_bytes) == ([b"1"], 4)
    room.set()
    await eventually(lambda: not link.outbox.is_blocked)
    link.send_frames([b"6"])
    assert sent == [b"1", b"2", b"3", "4", b"5", b"6"]
    link.outbox.stop()
    link.send_frames([b"7"])
    assert sent[-1] == b"6", "nothing is written to a node that was given up"
    link.open_stream(open_request(), RequestSink())
    assert sent[-1] == b"6"
