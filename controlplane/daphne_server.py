"""Daphne with flow control in both directions, bounds on what clients send and hold, and a stop that lets requests finish.

Stock Daphne buffers without bound for a client that does not read and for an application that is slower than its
client (django/daphne#170): one socket can take hundreds of megabytes. It also waits without end for a request whose bytes keep
coming, on any number of connections. Nothing else of Daphne is changed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
from collections import Counter
from functools import partial
from http import HTTPStatus
from typing import Any
from weakref import WeakSet

from daphne.server import Server, reactor, twisted_loop  # installs the asyncio reactor, so it stands first

# isort: split
from autobahn.websocket.types import ConnectionDeny
from daphne.http_protocol import HTTPFactory, WebRequest
from daphne.ws_protocol import WebSocketFactory, WebSocketProtocol
from OpenSSL import SSL
from twisted.internet import defer
from twisted.internet.endpoints import SSL4ServerEndpoint, TCP4ServerEndpoint
from twisted.internet.interfaces import IOpenSSLContextFactory, IPushProducer
from twisted.logger import ILogObserver, LogEvent, globalLogBeginner
from twisted.web.http import HTTPChannel
from zope.interface import implementer, provider

from controlplane.tls import CertificateError, Pair, ServedCertificate
from core.limits import limits
from wire.client_address import TrustedProxies
from wire.contract import ErrorCode


@implementer(IPushProducer)
class WriteGate:
    """Closed while the transport holds more unsent bytes than it wants to. What sends waits at the gate."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._is_released = False

    def pauseProducing(self) -> None:  # noqa: N802  # Twisted's interface
        # The transport's buffer is full.
        if not self._is_released:
            self._open.clear()

    def resumeProducing(self) -> None:  # noqa: N802  # Twisted's interface
        # The buffer has drained.
        self._open.set()

    def stopProducing(self) -> None:  # noqa: N802  # Twisted's interface
        # For good: the connection is gone and nobody may wait on it.
        self._is_released = True
        self._open.set()

    async def wait_open(self) -> None:
        await self._open.wait()


class PausingQueue(asyncio.Queue[dict[str, Any]]):  # Any: ASGI messages
    """An application's inbox that stops reading the socket above ``inbox_high`` messages and reads again at ``inbox_low``.

    The bytes of one read may still be parsed into further messages, so its bound is ``inbox_high`` plus one read (64 KiB).
    """

    def __init__(self, transport: Any) -> None:  # Any: one of Twisted's
        super().__init__()
        self._limits = limits().console
        self._transport = transport
        self._is_paused = False

    def put_nowait(self, item: dict[str, Any]) -> None:
        super().put_nowait(item)
        if not self._is_paused and self.qsize() > self._limits.inbox_high:
            self._is_paused = True
            self._transport.pauseProducing()

    async def get(self) -> dict[str, Any]:
        item = await super().get()
        if self._is_paused and self.qsize() <= self._limits.inbox_low:
            self._is_paused = False
            self._transport.resumeProducing()
        return item


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
        super().gotLength(length)
        # Before a byte of the body is stored.
        if length is not None and length > self._most_bytes:
            self._refuse()

    def handleContentChunk(self, data: bytes) -> None:  # noqa: N802  # Twisted's interface
        self._body_bytes += len(data)
        # A chunked body says no length: it is refused as soon as it has grown too large.
        if self._body_bytes > self._most_bytes:
            self._refuse()
        if not self._is_refused:
            super().handleContentChunk(data)

    def process(self) -> object:
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
        # The gate leaves the channel first: the next request on it brings its own.
        if self.producer is not None:
            self.unregisterProducer()
        self.gate.stopProducing()
        super().finish()

    def connectionLost(self, reason: object) -> None:  # noqa: N802  # Twisted's interface
        self.gate.stopProducing()
        super().connectionLost(reason)

    def abort(self) -> None:
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
        self.gate = WriteGate()
        # The HTTP channel that upgraded the connection is its producer until now.
        self.transport.unregisterProducer()
        self.transport.registerProducer(self.gate, True)
        super().connectionMade()

    def connectionLost(self, reason: object = None) -> None:  # noqa: N802  # Twisted's interface
        self.gate.stopProducing()
        self.factory.server_class.open_connections.remove(self.transport)
        super().connectionLost(reason)

    def handle_reply(self, message: dict[str, Any]) -> None:
        # Stock Daphne knows no answer to an upgrade but 101, 403 and 500.
        if message["type"] != "websocket.http.response.start":
            super().handle_reply(message)
            return
        handshake = self.handshake_deferred
        del self.handshake_deferred
        denial = ConnectionDeny(code=message["status"], reason=HTTPStatus(message["status"]).phrase)  # type: ignore[no-untyped-call]  # autobahn ships few types
        handshake.errback(denial)
        self.server.protocol_disconnected(self)

    def serverClose(self, code: int | None = None) -> None:  # noqa: N802  # Daphne's interface
        # Stock Daphne raises for codes of the protocol itself, such as 1013, and stays open.
        self.sendCloseFrame(code=1000 if code is None else code)

    def abort(self) -> None:
        self.transport.abortConnection()


_UntypedChannel: Any = HTTPChannel  # Any: Twisted types it in part, and its own calls not at all


class TimedChannel(_UntypedChannel):  # type: ignore[misc]  # as above
    """A connection on which each request has to arrive in time. It is receiving until the whole of one has."""

    _deadline: Any = None  # Any: Twisted's delayed call

    def connectionMade(self) -> None:  # noqa: N802  # Twisted's interface
        super().connectionMade()
        self._connections = self.factory.server.open_connections
        self._connections.add(self.transport)
        self._is_receiving = True
        # The clock of the first request runs from here.
        self._expect("headers", self.factory.server.header_timeout_s)

    def dataReceived(self, data: bytes) -> None:  # noqa: N802  # Twisted's interface
        # With the first byte of a further request its clock begins.
        if self._deadline is None and self._is_receiving:
            self._expect("headers", self.factory.server.header_timeout_s)
        super().dataReceived(data)

    def allHeadersReceived(self) -> None:  # noqa: N802  # Twisted's interface
        super().allHeadersReceived()
        self._expect("body", self.factory.server.body_timeout_s)

    def allContentReceived(self) -> None:  # noqa: N802  # Twisted's interface
        # What the request takes from here on is ours to bound.
        self._stop_clock()
        self._is_receiving = False
        self._connections.set_busy(self.transport)
        super().allContentReceived()

    def requestDone(self, request: object) -> None:  # noqa: N802  # Twisted's interface
        self._is_receiving = True
        if self.persistent:
            self._connections.set_receiving(self.transport)
        # Another request may have come already: this parses it.
        super().requestDone(request)

    def connectionLost(self, reason: object) -> None:  # noqa: N802  # Twisted's interface
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
    """The open connections of a server: at most ``limit``, and ``address_limit`` from one address."""

    def __init__(self, limit: int, address_limit: int) -> None:
        self._limit = limit
        self._address_limit = address_limit
        self._addresses: dict[Any, str] = {}  # Any: Twisted's transports, here and below
        self._counts: Counter[str] = Counter()
        # The longest waiting first.
        self._receiving: dict[Any, None] = {}

    def has_room(self, address: str) -> bool:
        """Return whether one more may come from ``address``; one that waits is cut off for it."""
        if self._counts[address] >= self._address_limit:
            return self._cut_one_off(address)
        return len(self._addresses) < self._limit or self._cut_one_off(None)

    def add(self, transport: Any) -> None:
        address = self._addresses[transport] = _read_address(transport.getPeer())
        self._counts[address] += 1
        self._receiving[transport] = None

    def set_busy(self, transport: Any) -> None:
        self._receiving.pop(transport, None)

    def set_receiving(self, transport: Any) -> None:
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
        # The one that has been without a whole request for the longest: whoever sends theirs at once is served beside any
        # number of others that do not. Those that are being answered stay, so a newcomer may be turned away.
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
        if not self.server.open_connections.has_room(_read_address(addr)):
            # Twisted closes the connection then.
            return None
        protocol = super().buildProtocol(addr)
        protocol.requestFactory = GatedRequest
        return protocol


class GatedWebSocketFactory(WebSocketFactory):  # type: ignore[misc]  # Daphne ships no types
    protocol = GatedWebSocket


@implementer(IOpenSSLContextFactory)
class TlsContext:
    """What Twisted asks at each connection for the TLS that it shall speak."""

    def __init__(self) -> None:
        self._context: SSL.Context | None = None

    def load(self, pair: Pair) -> None:
        """Have new connections show ``pair``. Raises OSError, and nothing has changed then."""
        context = SSL.Context(SSL.TLS_SERVER_METHOD)
        context.set_min_proto_version(SSL.TLS1_2_VERSION)
        try:
            context.use_certificate_chain_file(str(pair.certificate))
            context.use_privatekey_file(str(pair.key))
            context.check_privatekey()
        except SSL.Error as error:
            raise OSError(str(error)) from None
        self._context = context

    def getContext(self) -> SSL.Context:  # noqa: N802  # Twisted's interface
        assert self._context is not None, "it is loaded before anything listens"
        return self._context


logger = logging.getLogger(__name__)

Connection = GatedRequest | GatedWebSocket


@provider(ILogObserver)  # type: ignore[untyped-decorator]  # zope.interface ships no types
def _discard(event: LogEvent) -> None:
    """Take Twisted's own log, which would otherwise pile up in memory: what matters is logged by us."""


class FlowControlledServer(Server):  # type: ignore[misc]  # Daphne ships no types
    """Daphne with flow control in both directions. SIGTERM and SIGINT let running requests finish.

    ``header_timeout_s`` and ``body_timeout_s``: a request whose headers or body take longer to arrive is refused.
    ``pair``: certificate and key of its port, which speaks TLS then; ``plain_port``: one on loopback that does not.
    ``write_timeout_s``: a client that takes no byte for so long is cut off. ``stop_grace_s``: how long requests may go on
    after a signal. ``proxies``: who is believed about its client's address.
    """

    def __init__(
        self,
        *args: Any,
        host: str,
        port: int,
        plain_port: int = 0,
        pair: Pair | None = None,
        proxies: TrustedProxies | None = None,
        header_timeout_s: float = 10.0,
        body_timeout_s: float = 60.0,
        write_timeout_s: float = 60.0,
        stop_grace_s: float = 10.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *args, endpoints=[f"{host} port {port}"], signal_handlers=False, **kwargs
        )  # only looked at for being there
        self._where, self._plain_port, self._pair = (host.strip("[]"), port), plain_port, pair
        self.proxies = proxies
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = limits().console.connections
        limit = most if files == resource.RLIM_INFINITY else min(most, files // 2)
        self.open_connections = OpenConnections(limit, limit if self.proxies else limit // 2)
        self.header_timeout_s = header_timeout_s
        self.body_timeout_s = body_timeout_s
        self.write_timeout_s = write_timeout_s
        self.stop_grace_s = stop_grace_s
        self.listen_failure: str | None = None
        self.transports: WeakSet[Any] = WeakSet()  # Any: Twisted's transports of HTTP connections
        self._ports: list[Any] = []  # Any: Twisted's listening ports
        self._stopping: asyncio.Task[None] | None = None

    def run(self) -> None:
        """Serve until a signal. ``listen_failure`` says afterwards why it could not start, if it could not."""
        # In the place of Daphne's own ``run``, which makes factories that cannot be chosen.
        self.connections: dict[Connection, dict[str, Any]] = {}  # Any: Daphne's own records
        self.http_factory = GatedHTTPFactory(self)
        self.ws_factory = GatedWebSocketFactory(self, server=self.server_name)
        self.ws_factory.setProtocolOptions(
            autoPingTimeout=self.ping_timeout,
            openHandshakeTimeout=self.websocket_handshake_timeout,
            maxMessagePayloadSize=self.websocket_max_message_size,
            maxFramePayloadSize=self.websocket_max_frame_size,
        )
        globalLogBeginner.beginLoggingTo([_discard], redirectStandardIO=False, discardBuffer=True)
        reactor.callLater(1, self.application_checker)
        reactor.callLater(2, self.timeout_checker)
        asyncio.set_event_loop(twisted_loop)
        for name in (signal.SIGTERM, signal.SIGINT):
            twisted_loop.add_signal_handler(name, self.begin_stop)
        try:
            endpoints = self._make_endpoints()
        except CertificateError as error:
            self.listen_failure = str(error)
            return
        for endpoint in endpoints:
            endpoint.listen(self.http_factory).addCallbacks(self.listen_success, self.listen_error)
        reactor.addSystemEventTrigger("before", "shutdown", self.kill_all_applications)
        if not self.abort_start:
            reactor.run(installSignalHandlers=False)

    def _make_endpoints(self) -> list[Any]:  # Any: Twisted's endpoints
        """Return where the server listens. Raises CertificateError."""
        host, port = self._where
        if self._pair is None:
            endpoints: list[Any] = [TCP4ServerEndpoint(reactor, port, interface=host)]  # type: ignore[no-untyped-call]  # Twisted
        else:
            context = TlsContext()
            certificate = ServedCertificate(self._pair, context.load)
            certificate.open()
            certificate.watch(twisted_loop)
            endpoints = [SSL4ServerEndpoint(reactor, port, context, interface=host)]  # type: ignore[no-untyped-call]
        if self._plain_port:
            near = TCP4ServerEndpoint(reactor, self._plain_port, interface="127.0.0.1")  # type: ignore[no-untyped-call]
            endpoints.append(near)
        return endpoints

    def create_application(self, protocol: Connection, scope: dict[str, Any]) -> asyncio.Queue[dict[str, Any]] | None:
        if protocol not in self.connections:
            return None
        is_socket = scope["type"] == "websocket"
        if self.proxies:
            self.proxies.correct_scope(scope)
            protocol.client_addr = scope["client"]  # what the access log names
        inbox: asyncio.Queue[dict[str, Any]] = PausingQueue(protocol.transport) if is_socket else asyncio.Queue()
        scope.setdefault("asgi", {"version": "3.0"})
        if is_socket:
            scope.setdefault("extensions", {})["websocket.http.response"] = {}
        application = self.application(scope=scope, receive=inbox.get, send=partial(self.handle_reply, protocol))
        self.connections[protocol]["application_instance"] = asyncio.ensure_future(application)
        return inbox

    async def handle_reply(self, protocol: Connection, message: dict[str, Any]) -> None:
        """Write a message of the application, and return to it only when the client can take the next one."""
        await super().handle_reply(protocol, message)
        try:
            async with asyncio.timeout(self.write_timeout_s):
                await protocol.gate.wait_open()
        except TimeoutError:
            logger.warning("client_stalled seconds=%g", self.write_timeout_s)
            protocol.abort()

    def listen_success(self, port: Any) -> None:
        self._ports.append(port)
        super().listen_success(port)

    def listen_error(self, failure: Any) -> None:
        self.listen_failure = failure.getErrorMessage()
        self.stop()

    def begin_stop(self) -> None:
        """Close the ports, let requests finish within the grace, tell sockets and event streams to go away, then end.

        A second call ends at once.
        """
        if self._stopping is not None:
            self.stop()
            return
        self._stopping = asyncio.ensure_future(self._stop_gracefully(), loop=twisted_loop)

    def kill_all_applications(self) -> defer.Deferred[Any]:
        """Cancel what still runs when the reactor ends, and wait for it."""
        running = self._running_applications()
        for task in running:
            task.cancel()
        return defer.Deferred.fromFuture(asyncio.gather(*running, return_exceptions=True))

    async def _stop_gracefully(self) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.stop_grace_s
        try:
            for port in self._ports:
                port.stopListening()
            for protocol in list(self.connections):
                if isinstance(protocol, GatedWebSocket):
                    protocol.sendCloseFrame(code=1001)  # going away; its sendClose accepts codes of applications only
                elif protocol.is_endless:
                    protocol.send_disconnect()
            while (running := self._running_applications()) and loop.time() < deadline:
                await asyncio.wait(running, timeout=deadline - loop.time())
            for transport in self.transports:
                transport.loseConnection()  # after what is still to be written
            # Twisted has no event for "all closed".
            while loop.time() < deadline and any(each.connected for each in self.transports):  # noqa: ASYNC110
                await asyncio.sleep(limits().console.stop_poll_s)
        finally:
            self.stop()

    def _running_applications(self) -> list[asyncio.Future[None]]:
        tasks = (details.get("application_instance") for details in self.connections.values())
        return [task for task in tasks if task is not None and not task.done()]
