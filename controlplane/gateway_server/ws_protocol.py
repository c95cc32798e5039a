"""uvicorn's WebSocket protocol with large messages cut into fragments: workers refuse single frames over 16 MiB."""

from __future__ import annotations

import asyncio
import socket

from uvicorn._types import ASGISendEvent
from uvicorn.protocols.utils import ClientDisconnected
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState

_FRAGMENT_BYTES = 1024 * 1024


class GatewayWebSocketProtocol(WebSocketsSansIOProtocol):
    """One worker socket."""

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
            if size > _FRAGMENT_BYTES:
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
        parts = [payload[i : i + _FRAGMENT_BYTES] for i in range(0, len(payload), _FRAGMENT_BYTES)]
        last = len(parts) - 1
        first_send = self.conn.send_text if is_text else self.conn.send_binary
        first_send(parts[0], fin=last == 0)
        for index, part in enumerate(parts[1:], start=1):
            self.conn.send_continuation(part, fin=index == last)
        self.transport.write(b"".join(self.conn.data_to_send()))
