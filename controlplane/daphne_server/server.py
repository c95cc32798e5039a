"""The server: Daphne's, with gates at both ends of each connection and a graceful stop."""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
from functools import partial
from typing import Any
from weakref import WeakSet

from daphne.server import Server, reactor, twisted_loop  # installs the asyncio reactor, so it stands first
from twisted.internet import defer
from twisted.internet.endpoints import serverFromString
from twisted.logger import ILogObserver, LogEvent, globalLogBeginner
from zope.interface import provider

from controlplane.daphne_server.flow import PausingQueue
from controlplane.daphne_server.protocols import (
    GatedHTTPFactory,
    GatedRequest,
    GatedWebSocket,
    GatedWebSocketFactory,
    OpenConnections,
)
from core.limits import limits
from wire.client_address import TrustedProxies

logger = logging.getLogger(__name__)

Connection = GatedRequest | GatedWebSocket


@provider(ILogObserver)  # type: ignore[untyped-decorator]  # zope.interface ships no types
def _discard(event: LogEvent) -> None:
    """Take Twisted's own log, which would otherwise pile up in memory: what matters is logged by us."""


class FlowControlledServer(Server):  # type: ignore[misc]  # Daphne ships no types
    """Daphne with flow control in both directions. SIGTERM and SIGINT let running requests finish.

    ``header_timeout_s`` and ``body_timeout_s``: a request whose headers or body take longer to arrive is refused.
    ``write_timeout_s``: a client that takes no byte for so long is cut off. ``stop_grace_s``: how long requests may go on
    after a signal. ``proxies``: who is believed about its client's address.
    """

    def __init__(
        self,
        *args: Any,
        proxies: TrustedProxies | None = None,
        header_timeout_s: float = 10.0,
        body_timeout_s: float = 60.0,
        write_timeout_s: float = 60.0,
        stop_grace_s: float = 10.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, signal_handlers=False, **kwargs)
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
        """Serve until a signal. ``listen_failure`` says afterwards why it could not start, if it could not.

        Stands in for Daphne's own, which makes factories that cannot be chosen.
        """
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
        for endpoint in self.endpoints:
            listener = serverFromString(reactor, endpoint).listen(self.http_factory)  # type: ignore[no-untyped-call]  # Twisted
            listener.addCallbacks(self.listen_success, self.listen_error)
        reactor.addSystemEventTrigger("before", "shutdown", self.kill_all_applications)
        if not self.abort_start:
            reactor.run(installSignalHandlers=False)

    def create_application(self, protocol: Connection, scope: dict[str, Any]) -> asyncio.Queue[dict[str, Any]] | None:
        """Start the application of a connection and return its inbox."""
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
        """Remember the listening port, to close it first when stopping."""
        self._ports.append(port)
        super().listen_success(port)

    def listen_error(self, failure: Any) -> None:
        """Say in one line why the address cannot be used, and end."""
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
            while self._is_any_open() and loop.time() < deadline:  # noqa: ASYNC110  # Twisted has no event for "all closed"
                await asyncio.sleep(limits().console.stop_poll_s)
        finally:
            self.stop()

    def _is_any_open(self) -> bool:
        return any(transport.connected for transport in self.transports)

    def _running_applications(self) -> list[asyncio.Future[None]]:
        tasks = (details.get("application_instance") for details in self.connections.values())
        return [task for task in tasks if task is not None and not task.done()]
