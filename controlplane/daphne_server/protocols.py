"""Daphne's two protocols with a gate each, a ceiling on request bodies and a deadline for requests to arrive."""

from __future__ import annotations

import json
from collections import Counter
from http import HTTPStatus
from typing import Any

from autobahn.websocket.types import ConnectionDeny
from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.ws_protocol import WebSocketFactory, WebSocketProtocol
from twisted.web.http import HTTPChannel

from controlplane.daphne_server.flow import WriteGate
from core.limits import limits
from wire.contract import ErrorCode


def _print_refusal(status: str, code: ErrorCode, message: str, *, retryable: bool) -> bytes:
    """Return a whole response that is written past the application, for what never reaches it."""
    error = {"code": code.value, "message": message, "retryable": retryable, "type": "invalid_request_error", "param": None}
    body = json.dumps({"error": error}).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


class GatedRequest(WebRequest):  # type: ignore[misc]  # Daphne ships no types
    """An HTTP request whose response waits for the client."""

    uri: bytes

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: Twisted's own signature
        super().__init__(*args, **kwargs)
        self.server.transports.add(self.channel.transport)
        self.gate = WriteGate()
        self.is_endless = False
        self._most_bytes = limits().console.body_bytes
        self._body_bytes = 0
        self._is_refused = False

    def gotLength(self, length: int | None) -> None:  # noqa: N802  # Twisted's interface
        """Refuse a body that says it is too large before a byte of it is stored."""
        super().gotLength(length)
        if length is not None and length > self._most_bytes:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:  # noqa: N802  # Twisted's interface
        """Store a part of the body; a chunked one is refused as soon as it has grown too large."""
        self._body_bytes += len(data)
        if self._body_bytes > self._most_bytes:
            self._refuse()
        if not self._is_refused:
            super().handleContentChunk(data)

    def process(self) -> object:
        """Start the application, unless the request was refused."""
        if self.uri.startswith(b"//"):  # what follows is a host to autobahn, which would serve "///ws/x" as "/ws/x"
            self.uri = b"/%2F" + self.uri[2:]
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
            message = f"The body is larger than {self._most_bytes} bytes."
            refusal = _print_refusal("413 Content Too Large", ErrorCode.BODY_TOO_LARGE, message, retryable=False)
            self.channel.transport.write(refusal)
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
        self.factory.server_class.open_connections.remove(self.transport)
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


_UntypedChannel: Any = HTTPChannel  # Any: Twisted types it in part, and its own calls not at all


class TimedChannel(_UntypedChannel):  # type: ignore[misc]  # as above
    """A connection on which each request has to arrive in time. It is receiving until the whole of one has."""

    _deadline: Any = None  # Any: Twisted's delayed call

    def connectionMade(self) -> None:  # noqa: N802  # Twisted's interface
        """Count the connection; the clock for the first request runs from here."""
        super().connectionMade()
        self._connections = self.factory.server.open_connections
        self._connections.add(self.transport)
        self._is_receiving = True
        self._expect("headers", self.factory.server.header_timeout_s)

    def dataReceived(self, data: bytes) -> None:  # noqa: N802  # Twisted's interface
        """Parse; with the first byte of a further request its clock begins."""
        if self._deadline is None and self._is_receiving:
            self._expect("headers", self.factory.server.header_timeout_s)
        super().dataReceived(data)

    def allHeadersReceived(self) -> None:  # noqa: N802  # Twisted's interface
        """Let the clock of the body follow that of the headers."""
        super().allHeadersReceived()
        self._expect("body", self.factory.server.body_timeout_s)

    def allContentReceived(self) -> None:  # noqa: N802  # Twisted's interface
        """Stop the clock: what the request takes from here on is ours to bound."""
        self._stop_clock()
        self._is_receiving = False
        self._connections.set_busy(self.transport)
        super().allContentReceived()

    def requestDone(self, request: object) -> None:  # noqa: N802  # Twisted's interface
        """Wait for another request, which may have come already."""
        self._is_receiving = True
        if self.persistent:
            self._connections.set_receiving(self.transport)
        super().requestDone(request)

    def connectionLost(self, reason: object) -> None:  # noqa: N802  # Twisted's interface
        """Forget the connection."""
        self._stop_clock()
        self._connections.remove(self.transport)
        super().connectionLost(reason)

    def _expect(self, what: str, within_s: float) -> None:
        self._stop_clock()
        self._deadline = self.callLater(within_s, self._refuse, what)

    def _stop_clock(self) -> None:
        if self._deadline is not None and self._deadline.active():
            self._deadline.cancel()
        self._deadline = None

    def _refuse(self, what: str) -> None:
        message = f"The request {what} did not arrive in time. Send the request again, without pauses."
        self.transport.write(_print_refusal("408 Request Timeout", ErrorCode.BAD_REQUEST, message, retryable=True))
        self.timeoutConnection()


class OpenConnections:
    """The open connections of a server: at most ``limit``, and ``address_limit`` from one address.

    At a limit the one that has been without a whole request for the longest makes room: whoever sends theirs at once is served
    beside any number of others that do not. A newcomer is turned away only when all the others are being answered.
    """

    def __init__(self, limit: int, address_limit: int) -> None:
        self._limit = limit
        self._address_limit = address_limit
        self._addresses: dict[Any, str] = {}  # Any: Twisted's transports, here and below
        self._counts: Counter[str] = Counter()
        self._receiving: dict[Any, None] = {}
        """The longest waiting first."""

    def has_room(self, address: str) -> bool:
        """Return whether one more may come from ``address``; one that waits is cut off for it."""
        if self._counts[address] >= self._address_limit:
            return self._cut_one_off(address)
        return len(self._addresses) < self._limit or self._cut_one_off(None)

    def add(self, transport: Any) -> None:
        """Count a connection that has just been made."""
        address = self._addresses[transport] = _read_address(transport.getPeer())
        self._counts[address] += 1
        self._receiving[transport] = None

    def set_busy(self, transport: Any) -> None:
        """Note that a whole request has arrived."""
        self._receiving.pop(transport, None)

    def set_receiving(self, transport: Any) -> None:
        """Note that the connection waits for another request."""
        if transport in self._addresses:
            self._receiving[transport] = None

    def remove(self, transport: Any) -> None:
        """Forget a connection, also one that is forgotten already."""
        self._receiving.pop(transport, None)
        address = self._addresses.pop(transport, None)
        if address is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]

    def _cut_one_off(self, address: str | None) -> bool:
        transport = next((each for each in self._receiving if address in {None, self._addresses[each]}), None)
        if transport is None:
            return False
        self.remove(transport)
        transport.abortConnection()
        return True


def _read_address(peer: Any) -> str:  # Any: one of Twisted's kinds of address
    return str(getattr(peer, "host", ""))


class GatedHTTPFactory(HTTPFactory):  # type: ignore[misc]  # Daphne ships no types
    """Makes channels whose requests are gated, for as many connections as there is room for."""

    protocol = TimedChannel

    def buildProtocol(self, addr: object) -> object:  # noqa: N802  # Twisted's interface
        """Return a channel for one connection; None, which closes it, when there is no room."""
        if not self.server.open_connections.has_room(_read_address(addr)):
            return None
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = GatedRequest
        return protocol


class GatedWebSocketFactory(WebSocketFactory):  # type: ignore[misc]  # Daphne ships no types
    """Makes gated WebSockets."""

    protocol = GatedWebSocket
