"""uvicorn's WebSocket protocol for worker sockets: frames by callback, large messages in fragments.

A frame that goes through uvicorn's queue costs a task switch and two changes of the poll set, which is more than relaying
it does; ``SCOPE_FRAMES`` hands it over where it was parsed. Workers refuse single frames over 16 MiB, hence the fragments.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.http11 import Request

from core.limits import limits
from nodes.links.source import SCOPE_FRAMES


class FrameSource:
    """What the scope carries: lets the application take frames by callback (``nodes.links.source.FrameSource``)."""

    __slots__ = ("_protocol",)

    def __init__(self, protocol: GatewayWebSocketProtocol) -> None:
        self._protocol = protocol

    def take_over(self, receiver: Callable[[dict[str, Any]], None]) -> bool:
        """Have ``receiver`` called with each later message event; False while earlier ones still wait in the queue."""
        return self._protocol.set_receiver(receiver)


class GatewayWebSocketProtocol(WebSocketsSansIOProtocol):
    """One worker socket."""

    _receiver: Callable[[dict[str, Any]], None] | None = None

    def handle_connect(self, event: Request) -> None:
        """Begin the handshake; the scope gets a way to take frames directly."""
        self._fragment_bytes = limits().gateway.server_fragment_bytes
        super().handle_connect(event)
        if self.response.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
            self.scope["extensions"][SCOPE_FRAMES] = FrameSource(self)  # type: ignore[assignment]  # a private extension

    def set_receiver(self, receiver: Callable[[dict[str, Any]], None]) -> bool:
        """Switch to the callback unless messages wait in the queue: they come first."""
        if not self.queue.empty():
            return False
        self._receiver = receiver
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
            self._receiver({"type": "websocket.receive", "bytes": data})
            return
        try:
            text = data.decode()
        except UnicodeDecodeError:
            self.conn.send_close(1007)
            self.handle_parser_exception()
            return
        self._receiver({"type": "websocket.receive", "text": text})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Set up the connection without Nagle: a cancel must not wait behind an acknowledgement."""
        super().connection_made(transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def send(self, message: ASGISendEvent) -> None:
        """Send one event; a large message goes out in fragments."""
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
        if message["type"] == "websocket.close" and not self.writable.is_set():
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
