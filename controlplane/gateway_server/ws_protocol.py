"""uvicorn's WebSocket protocol for worker sockets: frames by callback, large messages in fragments.

A frame that goes through uvicorn's queue costs a task switch and two changes of the poll set, which is more than relaying
it does; ``SCOPE_FRAMES`` hands it over where it was parsed. The usual frame, a whole masked binary message, is cut out here:
the websockets library takes ten times as long. Workers refuse single frames over 16 MiB, hence the fragments.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import apply_mask  # type: ignore[attr-defined]  # it chooses the C one where that was built
from websockets.http11 import Request
from websockets.protocol import State

from core.limits import limits
from nodes.links.relay import SCOPE_FRAMES

# First byte of a binary message in one frame, without an extension (RFC 6455 section 5.2).
_BINARY = 0x82
_HEAD_END = b"\r\n\r\n"
_LENGTH_BYTES = {0x7E: 2, 0x7F: 8}
_SHORT_BYTES = 0xFFFF


class GatewayWebSocketProtocol(WebSocketsSansIOProtocol):
    """One worker socket; its scope carries it as a ``nodes.links.relay.FrameSource``."""

    # Beside uvicorn's, which are more than 30, each one would be looked up in a dictionary.
    __slots__ = (
        "_begun", "_bytes_to_write", "_cut_bytes", "_cut_receiver", "_fragment_bytes", "_frames_to_write", "_owed_bytes",
        "_receiver",
    )  # fmt: skip

    _receiver: Callable[[str | bytes], None] | None
    _cut_receiver: Callable[[str | bytes], None] | None
    """The receiver while the next frame may be cut here: the library is between two messages and reads on."""
    _owed_bytes: int
    """What the library still has to get of the frame that it began with; -1 = it gets everything."""
    _begun: bytes
    """The beginning of a frame whose length is not known yet. The library has it already."""

    def data_received(self, data: bytes) -> None:
        """Cut whole masked binary messages out; whatever else comes goes to the library, in order and byte for byte."""
        if self._owed_bytes < 0:
            self._receive_all(data)
            return
        at, end, take = 0, len(data), self._cut_receiver
        while at < end:
            if take is not None and data[at] == _BINARY and end - at > 7:
                start, size = at + 6, data[at + 1] - 0x80  # negative: it is not masked
                if size == 0x7E:
                    start, size = at + 8, data[at + 2] << 8 | data[at + 3]
                elif size == 0x7F:
                    size = -1
                stop = start + size
                if stop <= end and 0 <= size <= self._cut_bytes:
                    take(apply_mask(data[start:stop], data[start - 4 : start]))
                    at = stop
                    continue
            at = self._pass_frame(data, at)
            take = self._cut_receiver

    def _receive_all(self, data: bytes) -> None:
        # uvicorn says the upgrade request again in one piece; frames begin behind it.
        is_upgrade = not self.handshake_initiated and data.find(_HEAD_END) == len(data) - len(_HEAD_END)
        super().data_received(data)
        if is_upgrade and self.handshake_initiated and not self.conn.extensions:
            self._owed_bytes = 0

    def _pass_frame(self, data: bytes, at: int) -> int:
        """Give the library the frame that begins at ``at``, or what is there of one; return the index behind it."""
        if self._owed_bytes:
            stop = at + self._owed_bytes
        else:
            frame = self._begun + data[at : at + 10]
            size = _measure_frame(frame)
            stop = at + size - len(self._begun) if size else len(data) + 1
            self._begun = b"" if size else frame
        self._owed_bytes = 0 if self._begun else max(0, stop - len(data))
        super().data_received(data[at:stop])
        if self.conn.state > State.OPEN:  # the library reads nothing more, or only the end
            self._owed_bytes = -1
            if stop < len(data):
                super().data_received(data[stop:])
            return len(data)
        self._choose_reader()
        return min(stop, len(data))

    def _choose_reader(self) -> None:
        is_between = self._owed_bytes == 0 and not self._begun and self.conn.current_size is None
        self._cut_receiver = self._receiver if is_between and self.conn.state is State.OPEN else None

    def handle_connect(self, event: Request) -> None:
        self._fragment_bytes = limits().gateway.server_fragment_bytes
        self._cut_bytes = min(_SHORT_BYTES, self.config.ws_max_size)
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self.scope["extensions"][SCOPE_FRAMES] = self  # type: ignore[assignment]  # a private extension

    def take_over(self, receiver: Callable[[str | bytes], None]) -> bool:
        """Have ``receiver`` called with each later message; False while earlier ones wait in the queue: they come first."""
        if not self.queue.empty():
            return False
        self._receiver = receiver
        self._choose_reader()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        return True

    def send_receive_event_to_app(self) -> None:
        """Hand a message to the callback, or to uvicorn's queue as long as there is none."""
        if self._receiver is None:
            super().send_receive_event_to_app()
            return
        data = self.frames[0] if len(self.frames) == 1 else b"".join(self.frames)
        self.frames = []
        if self.close_sent:
            return
        if self.curr_msg_data_type == "bytes":
            self._receiver(data)
            return
        try:
            text = data.decode()
        except UnicodeDecodeError:
            self.conn.send_close(1007)
            self.handle_parser_exception()
            return
        self._receiver(text)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._receiver = self._cut_receiver = None
        self._owed_bytes, self._begun, self._cut_bytes = -1, b"", 0
        self._frames_to_write: list[bytes] = []
        self._bytes_to_write = 0
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            # A cancel must not wait behind an acknowledgement.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def write_frame(self, frame: bytes) -> bool:
        """Write a binary message, with all others of this turn of the loop in one piece.

        False = the line is not free, or it is too large for one frame.
        """
        size = len(frame)
        if not self.writable.is_set() or self.conn.state is not State.OPEN or self.disconnected or size > self._fragment_bytes:
            return False
        if size < 0x7E:
            head = bytes((_BINARY, size))
        elif size <= _SHORT_BYTES:
            head = b"%c\x7e%b" % (_BINARY, size.to_bytes(2, "big"))
        else:
            head = b"%c\x7f%b" % (_BINARY, size.to_bytes(8, "big"))
        self._frames_to_write += (head, frame)
        self._bytes_to_write += size
        if self._bytes_to_write > _SHORT_BYTES:  # the line shall say soon that it is full
            self._write_frames()
        elif len(self._frames_to_write) == 2:
            self.loop.call_soon(self._write_frames)
        return True

    def _write_frames(self) -> None:
        frames, self._frames_to_write, self._bytes_to_write = self._frames_to_write, [], 0
        if frames and self.conn.state is State.OPEN and not self.disconnected:
            self.transport.write(b"".join(frames))

    async def send(self, message: ASGISendEvent) -> None:
        self._write_frames()
        if message["type"] == "websocket.send" and not self.close_sent and not self.disconnected:
            text, data = message.get("text"), message.get("bytes")
            size = len(text) if text is not None else len(data or b"")
            if size > self._fragment_bytes:
                await self.writable.wait()
                payload = text.encode() if text is not None else data or b""
                try:
                    self._send_fragments(payload, is_text=text is not None)
                except InvalidState:
                    raise ClientDisconnected from None
                return
        if message["type"] == "websocket.close":
            self._cut_receiver = None  # the library forgets the messages that still come
            if not self.writable.is_set():
                self.transport.abort()  # a peer that reads nothing would never see the close frame either
                return
        await super().send(message)

    def _send_fragments(self, payload: bytes, *, is_text: bool) -> None:
        parts = [payload[i : i + self._fragment_bytes] for i in range(0, len(payload), self._fragment_bytes)]
        last = len(parts) - 1
        first_send = self.conn.send_text if is_text else self.conn.send_binary
        first_send(parts[0], fin=last == 0)
        for index, part in enumerate(parts[1:], start=1):
            self.conn.send_continuation(part, fin=index == last)
        self.transport.write(b"".join(self.conn.data_to_send()))


def _measure_frame(frame: bytes) -> int:
    """Return the bytes of a masked frame, of which the first ten at most are given; 0 = its length has not come yet."""
    if len(frame) < 2:
        return 0
    size = frame[1] & 0x7F
    wide = _LENGTH_BYTES.get(size, 0)
    if len(frame) < 2 + wide:
        return 0
    return 6 + wide + (int.from_bytes(frame[2 : 2 + wide], "big") if wide else size)
