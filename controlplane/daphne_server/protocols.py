"""Daphne's two protocols with a gate each, and a ceiling on request bodies."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from autobahn.websocket.types import ConnectionDeny
from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.ws_protocol import WebSocketFactory, WebSocketProtocol

from controlplane.daphne_server.flow import WriteGate
from wire.contract import ErrorCode

MAX_BODY_BYTES = 8 * 1024 * 1024
"""Nothing that is sent here is larger; the largest is a picture in the playground. Daphne itself would spool any size to disk
before the application starts."""

_TOO_LARGE_BODY = json.dumps(
    {
        "error": {
            "code": ErrorCode.BODY_TOO_LARGE.value,
            "message": f"The body is larger than {MAX_BODY_BYTES} bytes.",
            "retryable": False,
            "type": "invalid_request_error",
            "param": None,
        }
    }
).encode()
_TOO_LARGE = (
    b"HTTP/1.1 413 Content Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n"
    + f"content-length: {len(_TOO_LARGE_BODY)}\r\n\r\n".encode()
    + _TOO_LARGE_BODY
)


class GatedRequest(WebRequest):  # type: ignore[misc]  # Daphne ships no types
    """An HTTP request whose response waits for the client."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: Twisted's own signature
        super().__init__(*args, **kwargs)
        self.server.transports.add(self.channel.transport)
        self.gate = WriteGate()
        self.is_endless = False
        self._body_bytes = 0
        self._is_refused = False

    def gotLength(self, length: int | None) -> None:  # noqa: N802  # Twisted's interface
        """Refuse a body that says it is too large before a byte of it is stored."""
        super().gotLength(length)
        if length is not None and length > MAX_BODY_BYTES:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:  # noqa: N802  # Twisted's interface
        """Store a part of the body; a chunked one is refused as soon as it has grown too large."""
        self._body_bytes += len(data)
        if self._body_bytes > MAX_BODY_BYTES:
            self._refuse()
        if not self._is_refused:
            super().handleContentChunk(data)

    def process(self) -> object:
        """Start the application, unless the request was refused."""
        return None if self._is_refused else super().process()

    def handle_reply(self, message: dict[str, Any]) -> None:
        """Write a message of the application; from the first one on the gate follows the transport."""
        if message.get("type") == "http.response.start":
            self.is_endless = any(value.startswith(b"text/event-stream") for _, value in message.get("headers", []))
            if self.channel is not None and self.producer is None:
                self.registerProducer(self.gate, True)
        super().handle_reply(message)

    def finish(self) -> None:
        """End the response. The gate leaves the channel first: the next request on it brings its own."""
        if self.producer is not None:
            self.unregisterProducer()
        self.gate.stopProducing()
        super().finish()

    def connectionLost(self, reason: object) -> None:  # noqa: N802  # Twisted's interface
        """Let whoever waits at the gate go: the client left."""
        self.gate.stopProducing()
        super().connectionLost(reason)

    def abort(self) -> None:
        """Cut the connection without waiting for the client."""
        if self.channel is not None:
            self.channel.transport.abortConnection()

    def _refuse(self) -> None:
        if not self._is_refused:
            self._is_refused = True
            self.channel.transport.write(_TOO_LARGE)
            self.channel.loseConnection()


class GatedWebSocket(WebSocketProtocol):  # type: ignore[misc]  # Daphne ships no types
    """A WebSocket whose frames wait for the client."""

    def connectionMade(self) -> None:  # noqa: N802  # Twisted's interface
        """Take the transport over from the HTTP channel that upgraded it, also as its producer."""
        self.gate = WriteGate()
        self.transport.unregisterProducer()
        self.transport.registerProducer(self.gate, True)
        super().connectionMade()

    def connectionLost(self, reason: object = None) -> None:  # noqa: N802  # Twisted's interface
        """Let whoever waits at the gate go: the client left."""
        self.gate.stopProducing()
        super().connectionLost(reason)

    def handle_reply(self, message: dict[str, Any]) -> None:
        """Take a message of the application; stock Daphne knows no answer to an upgrade but 101, 403 and 500."""
        if message["type"] != "websocket.http.response.start":
            super().handle_reply(message)
            return
        handshake = self.handshake_deferred
        del self.handshake_deferred
        denial = ConnectionDeny(code=message["status"], reason=HTTPStatus(message["status"]).phrase)  # type: ignore[no-untyped-call]  # autobahn ships few types
        handshake.errback(denial)
        self.server.protocol_disconnected(self)

    def serverClose(self, code: int | None = None) -> None:  # noqa: N802  # Daphne's interface
        """Close as the application says. Stock Daphne raises for codes of the protocol itself, such as 1013, and stays open."""
        self.sendCloseFrame(code=1000 if code is None else code)

    def abort(self) -> None:
        """Cut the connection without waiting for the client."""
        self.transport.abortConnection()


class GatedHTTPFactory(HTTPFactory):  # type: ignore[misc]  # Daphne ships no types
    """Makes channels whose requests are gated."""

    def buildProtocol(self, addr: object) -> object:  # noqa: N802  # Twisted's interface
        """Return a channel for one connection."""
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = GatedRequest
        return protocol


class GatedWebSocketFactory(WebSocketFactory):  # type: ignore[misc]  # Daphne ships no types
    """Makes gated WebSockets."""

    protocol = GatedWebSocket
