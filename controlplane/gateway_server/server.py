"""Starting and stopping the gateway on uvicorn: load first, then listen; on a signal finish what runs, then leave."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import sys
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from django.conf import settings
from uvicorn.config import STARTUP_FAILURE, Config
from uvicorn.server import Server

from controlplane.env import read_keyless
from controlplane.gateway_server.fast_path import FastPath
from controlplane.gateway_server.http_protocol import GatewayHttpProtocol, KnownRequests
from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from controlplane.tls import CertificateError, Pair, ServedCertificate, load_pair, make_context
from core.limits import limits
from gateway.process import GatewayRuntime
from gateway.request.client import Receive, Scope, Send
from gateway.request.identity import Keyless
from gateway.request.response import Application
from gateway.urls import make_application, make_inference
from gateway.values import HeaderView
from gateway.views.endpoints import Inference
from wire import clock
from wire.client_address import TrustedProxies

logger = logging.getLogger("muster.gateway")


class GatewayApp:
    """The routes of the gateway plus the lifespan protocol around one runtime, and the edge where clients get their address."""

    def __init__(self, runtime: GatewayRuntime, routes: Application, inference: Mapping[str, Inference] | None = None) -> None:
        self.runtime = runtime
        self.inference = inference or {}
        self._routes = routes
        self._proxies: TrustedProxies | None = settings.TRUSTED_PROXIES or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        if self._proxies:
            self._proxies.correct_scope(scope)
        await self._routes(scope, receive, send)

    def serve_known(self, scope: Scope, headers: HeaderView, body: bytes) -> Coroutine[Any, Any, None]:
        """Serve a request to an inference path that came whole, under headers that came before."""
        if self._proxies:
            self._proxies.correct_scope(scope)
        inference = self.inference[scope["path"]]
        client = inference.make_client(scope, headers, body)
        return inference.serve(client, self.runtime.pipeline.serve(client, inference.surface))

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            await self.runtime.start()
        except Exception as error:  # process edge: the server reports it and does not start
            logger.exception("gateway.start_failed")
            await send({"type": "lifespan.startup.failed", "message": str(error)})
            return
        # What is loaded by now lives as long as the process: the collector need not look at it again, and requests make
        # few cycles, so it need not look often.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.runtime.stop()
        await send({"type": "lifespan.shutdown.complete"})


class GatewayServer(Server):
    """uvicorn that lets running requests finish before it closes the sockets of the nodes that answer them.

    ``certificate``: what the context of ``config`` shows. ``plain_port``: on loopback, for programs of this machine that need
    not know what the certificate names.
    """

    def __init__(
        self, config: Config, runtime: GatewayRuntime, *, certificate: ServedCertificate | None = None, plain_port: int = 0
    ) -> None:
        super().__init__(config)
        self._runtime = runtime
        self._certificate, self._plain_port = certificate, plain_port
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Have uvicorn load, then listen. Exits with a line when a port cannot be used."""
        await super().startup(sockets=[])
        self.started = False
        context = self.config.ssl
        try:
            self.servers = [await self._listen(context, sock=sock) for sock in sockets or ()]
            if not sockets:
                self.servers = [await self._listen(context, host=self.config.host, port=self.config.port)]
            if self._plain_port:
                self.servers.append(await self._listen(None, host="127.0.0.1", port=self._plain_port))
        except OSError as error:
            logger.error("gateway_not_listening: %s", error)  # noqa: TRY400  # text for the owner
            await self.lifespan.shutdown()
            sys.exit(STARTUP_FAILURE)
        if self._certificate is not None:
            self._certificate.watch(asyncio.get_running_loop())
        self.started = True

    async def _listen(self, context: ssl.SSLContext | None, **where: Any) -> asyncio.Server:  # Any: host and port, or a socket
        def serve_connection() -> asyncio.Protocol:
            return GatewayHttpProtocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

        timeout_s = None if context is None else limits().core.tls_handshake_s
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            serve_connection, ssl=context, ssl_handshake_timeout=timeout_s, backlog=self.config.backlog, **where
        )

    async def main_loop(self) -> None:
        """Renew the date of answers each second until a signal says stop; uvicorn itself looks ten times a second."""
        self._loop = asyncio.get_running_loop()
        while not await self.on_tick(0):
            with suppress(TimeoutError):
                async with asyncio.timeout(limits().gateway.server_tick_s):
                    await self._told.wait()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told.set)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Refuse new work, wait for what runs (bounded by the grace period), then close everything."""
        runtime = self._runtime
        runtime.begin_stop()
        for listener in sockets or ():
            listener.shutdown(socket.SHUT_RDWR)  # it is open elsewhere too: closing it alone would let clients wait for nobody
        for server in self.servers:
            server.close()
        until = clock.monotonic() + runtime.limits.shutdown_grace_s
        # Polled: an event would cost every request something to spare one shutdown a wake-up.
        while runtime.running_requests and clock.monotonic() < until and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(limits().gateway.server_stop_poll_s)
        runtime.interrupt_running()
        await runtime.say_goodbye()
        await super().shutdown(sockets)


def serve(*, host: str, port: int, fd: int | None = None, plain_port: int = 0) -> None:
    """Run a gateway until it is told to stop. ``fd``: a socket that is bound to the port, to listen on instead of a new one.

    ``plain_port``: see ``GatewayServer``.
    """
    sockets = None if fd is None else [socket.socket(fileno=fd)]
    names = [host, *(str(one.getsockname()[0]) for one in sockets or ())]
    runtime = GatewayRuntime()
    runtime.keys.keyless = Keyless(read_keyless(*names))
    inference = make_inference(runtime)
    app = GatewayApp(runtime, make_application(runtime, inference), inference)
    context, certificate = open_certificate() if settings.TLS_CERT else (None, None)
    config = make_config(app, host=host, port=port, context=context)
    server = GatewayServer(config, runtime, certificate=certificate, plain_port=plain_port)
    server.run(sockets)


def open_certificate() -> tuple[ssl.SSLContext, ServedCertificate]:
    """Return what speaks TLS with the certificate of the settings. Exits with a line when that cannot be used."""
    context = make_context()
    certificate = ServedCertificate(Pair(Path(settings.TLS_CERT), Path(settings.TLS_KEY)), partial(load_pair, context))
    try:
        certificate.open()
    except CertificateError as error:
        sys.exit(f"muster gateway: {error}")
    return context, certificate


def make_config(app: GatewayApp, *, host: str, port: int, context: ssl.SSLContext | None = None) -> Config:
    bounds = limits().gateway
    GatewayHttpProtocol.header_timeout_s = bounds.header_s
    GatewayHttpProtocol.body_timeout_s = bounds.body_s
    GatewayHttpProtocol.known = KnownRequests(
        app.inference, app.serve_known, FastPath(app.runtime.pipeline, app.inference).begin
    )
    return Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        http=GatewayHttpProtocol,
        ws=GatewayWebSocketProtocol,
        lifespan="on",
        interface="asgi3",
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        log_config=None,
        backlog=bounds.server_backlog,
        ssl_context_factory=None if context is None else lambda *_: context,
        timeout_keep_alive=int(bounds.keep_alive_s),
        timeout_graceful_shutdown=5,
        ws_max_size=limits().nodes.max_message_bytes,
        ws_per_message_deflate=False,
        ws_ping_interval=20.0,
        ws_ping_timeout=40.0,
    )
