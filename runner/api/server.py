"""Listening: the sockets of the API and of the metrics, uvicorn on our own event loop, and leaving in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runner.api.app import make_app, make_metrics_app
from runner.config import ApiConfig
from runner.errors import ConfigError
from runner.limits import limits
from runner.parts import Parts
from wire.http_head import HeadFault, find_head_fault, find_size_fault

log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn, without signal handlers of its own: who stops the box is not its business."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._leaving = asyncio.Event()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals alone."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        """Keep the Date header right until ``leave``; uvicorn's own loop wakes ten times as often."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._leaving.wait(), limits().api.date_s)

    def leave(self) -> None:
        """Begin to end."""
        self.should_exit = True
        self._leaving.set()


class ApiHttpProtocol(HttpToolsProtocol):
    """uvicorn's, which refuses heads with two readings and takes no trailer for a header."""

    _fault: HeadFault | None = None

    def on_headers_complete(self) -> None:
        """The headers arrived. Raising ends the parsing of the connection."""
        is_upgrade = self.parser.should_upgrade()
        self._fault = find_head_fault(self.parser.get_http_version(), self.headers, is_upgrade=is_upgrade)
        self._fault = self._fault or find_size_fault(self.url, self.headers)
        if self._fault is not None:
            raise ValueError(self._fault.message)
        super().on_headers_complete()
        if not is_upgrade:
            self.headers = []  # for trailers, which the parser adds here; they are no headers, and nobody reads them

    def send_400_response(self, msg: str) -> None:
        """Say what is wrong, where that is known."""
        super().send_400_response(self._fault.message if self._fault is not None else msg)


@asynccontextmanager
async def serve_api(parts: Parts, config: ApiConfig) -> AsyncIterator[str]:
    """Serve the API, and the metrics where they have a port of their own; yields the URL once it answers.

    Raises ConfigError for an address that cannot be listened on.
    """
    async with AsyncExitStack() as stack:
        listener = _listen(config.host, config.port)
        stack.callback(listener.close)
        api = make_app(parts, config)
        if config.has_metrics and config.metrics_port is not None:
            second = _listen(config.host, config.metrics_port)
            stack.callback(second.close)
            await stack.enter_async_context(_serve(make_metrics_app(parts, config), second))
            log.info("metrics listening url=%s", _url(second))
        await stack.enter_async_context(_serve(api.asgi, listener))
        stack.callback(api.close)
        url = _url(listener)
        log.info("api listening url=%s", url)
        sys.stderr.write(f"api listening url={url}\n")
        sys.stderr.flush()
        yield url


@asynccontextmanager
async def _serve(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    server = _Server(
        uvicorn.Config(
            app, http=ApiHttpProtocol, lifespan="off", ws="none", interface="asgi3", access_log=False, log_config=None,
            log_level="warning", server_header=False, proxy_headers=False, limit_concurrency=limits().api.connections,
            timeout_keep_alive=limits().api.keepalive_s, timeout_graceful_shutdown=limits().api.grace_s,
        )
    )  # fmt: skip
    running = asyncio.create_task(server.serve(sockets=[listener]))
    up = asyncio.create_task(server.is_up.wait())
    try:
        await asyncio.wait({running, up}, timeout=limits().api.start_s, return_when=asyncio.FIRST_COMPLETED)
        if not up.done():
            raise ConfigError("the HTTP port could not be opened; the log says why")
        yield
    finally:
        up.cancel()
        server.leave()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(running, limits().api.grace_s + limits().api.start_s)
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # what its client does not read would keep the loop from closing


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another --api-port") from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
