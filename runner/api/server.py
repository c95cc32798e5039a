"""The node's own port: who may use it, what an error becomes, its sockets, and leaving in order."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import re
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from runner.api.bodies import render
from runner.api.routes import make_metrics_routes, make_routes
from runner.config import ApiConfig
from runner.errors import (
    AccessRefused,
    Broken,
    ConfigError,
    CorruptModel,
    DownloadFailed,
    EngineError,
    ForeignPage,
    InvalidRequest,
    MethodNotAllowed,
    ModelLoadFailed,
    NotFound,
    OperationFailed,
    RequestRefused,
    RunnerError,
    TicketNotForPath,
)
from runner.limits import limits
from runner.parts import Parts
from runner.tickets import TICKET_PATHS, Tickets
from wire.http_head import HeadFault, find_head_fault, find_size_fault
from wire.ids import new_uuid7
from wire.ticket import is_ticket

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
"""Needs no key: what watches a container has none."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


class AccessGuard:
    """ASGI middleware in front of every route. A ticket that holds lies in the state of the request then."""

    def __init__(self, app: ASGIApp, *, config: ApiConfig, tickets: Tickets) -> None:
        self._app = app
        self._key = config.key.encode()
        self._hosts = _LOOPBACK | {config.host.lower()}
        self._tickets = tickets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                self._check(scope, Headers(scope=scope))
        except RequestRefused as refusal:
            await render(refusal, path=scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope, headers: Headers) -> None:
        path = scope["path"]
        if self._tickets.url and (shown := next(filter(is_ticket, _list_bearers(headers)), "")):
            if scope["method"] != "POST" or path not in TICKET_PATHS:
                raise TicketNotForPath
            scope.setdefault("state", {})["ticket"] = self._tickets.verify(shown)
            return
        if self._key:
            if path not in OPEN_PATHS and not self._has_key(headers):
                # LiteLLM takes a 401 for what it is by the words "Incorrect API key provided".
                raise AccessRefused(
                    "Incorrect API key provided: send the API key of this node as 'Authorization: Bearer KEY' "
                    "or as 'x-api-key: KEY'."
                )
            return
        self._refuse_pages(headers)

    def _has_key(self, headers: Headers) -> bool:
        return any(hmac.compare_digest(key.encode(), self._key) for key in _list_bearers(headers))

    def _refuse_pages(self, headers: Headers) -> None:
        # Without a key, being on this machine is what lets a request in, and a page in the owner's browser is there too.
        if _host_name(headers.get("host", "")) not in self._hosts:
            raise ForeignPage(
                "This port answers to localhost and to the address it is bound to; the Host header names another."
            )
        origins = headers.getlist("origin")
        if origins and not self._are_own(origins, headers.get("host", "")):
            raise ForeignPage("A web page of another origin may not use this node; set an API key to let programs of yours in.")

    def _are_own(self, origins: Iterable[str], host: str) -> bool:
        return all(origin.lower() in {f"http://{host.lower()}", f"https://{host.lower()}"} for origin in origins)


def _list_bearers(headers: Headers) -> list[str]:
    scheme, _, bearer = headers.get("authorization", "").partition(" ")
    given = [bearer.strip()] if scheme.lower() == "bearer" else []
    return [*given, headers.get("x-api-key", "")]


class PageAccess:
    """ASGI middleware that lets pages of the origins which the owner named use tickets from a browser (Fetch, "CORS protocol").

    It opens nothing by itself: what a page sends is judged like everybody's.
    """

    def __init__(self, app: ASGIApp, *, origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin", "").lower()
        if scope["path"] not in TICKET_PATHS or not origin or not ("*" in self._origins or origin in self._origins):
            await self._app(scope, receive, send)
            return
        said = {"access-control-allow-origin": headers["origin"], "access-control-expose-headers": "*", "vary": "Origin"}
        if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            asked = headers.get("access-control-request-headers", "")
            said |= {"access-control-allow-methods": "POST", "access-control-max-age": str(limits().tickets.preflight_age_s)}
            if _HEADER_NAMES.match(asked):
                said["access-control-allow-headers"] = asked
            await Response(status_code=204, headers=said)(scope, receive, send)
            return

        async def send_to_page(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(said)
            await send(message)

        await self._app(scope, receive, send_to_page)


_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~ ,-]{1,1000}\Z")


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


class RequestIds:
    """ASGI middleware: every request has an id, the client's own where it is usable, and every answer repeats it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get("x-request-id", "")
        ident = given if _REQUEST_ID.match(given) else new_uuid7().hex
        scope.setdefault("state", {})["request_id"] = ident

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = ident
            await send(message)

        await self._app(scope, receive, send_with_id)


def make_app(routes: Sequence[Route], config: ApiConfig, tickets: Tickets) -> ASGIApp:
    pages = [Middleware(PageAccess, origins=tickets.origins)] if tickets.origins else []
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestIds), *pages, Middleware(AccessGuard, config=config, tickets=tickets)],
        exception_handlers={RunnerError: _refused, HTTPException: _http_error, ClientDisconnect: _nobody, Exception: _broken},
    )
    app.router.redirect_slashes = False
    return app


def _refused(request: Request, error: Exception) -> Response:
    return render(_as_refusal(error), path=request.scope["path"], model=request.path_params.get("name"))


def _as_refusal(error: Exception) -> RequestRefused:
    match error:
        case RequestRefused():
            return error
        case CorruptModel() | DownloadFailed():
            return ModelLoadFailed(str(error))
        case EngineError():
            return OperationFailed(str(error))
        case _:
            return Broken(str(error))


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = {name.lower(): value for name, value in (error.headers or {}).items()}
    refusal: RequestRefused
    if error.status_code == 405:
        allowed = ", ".join(sorted(headers.pop("allow", "").split(", ")))
        refusal = MethodNotAllowed(f"{request.scope['path']} answers {allowed}, not {request.method}.")
        headers["allow"] = allowed
    elif error.status_code == 404:
        refusal = NotFound("There is no such path here; GET / lists those that are.")
    else:
        refusal = InvalidRequest(error.detail)
    return render(refusal, path=request.scope["path"], headers=headers)


def _nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=499)


def _broken(request: Request, _error: Exception) -> Response:
    # Starlette raises it again after this answer, so that the server logs it.
    return render(Broken("The node failed at this; its log says why."), path=request.scope["path"])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_up = asyncio.Event()
        self._leaving = asyncio.Event()

    # Who stops the node is not its business: uvicorn would take over the signals of the process.
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.is_up.set()

    async def main_loop(self) -> None:
        # Only the Date header needs it; uvicorn's own loop wakes ten times as often.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(limits().api.date_s):
                    await self._leaving.wait()

    def leave(self) -> None:
        self.should_exit = True
        self._leaving.set()


class ApiHttpProtocol(HttpToolsProtocol):
    """uvicorn's, which refuses heads with two readings and takes no trailer for a header."""

    _fault: HeadFault | None = None

    def on_headers_complete(self) -> None:
        is_upgrade = self.parser.should_upgrade()
        self._fault = find_head_fault(self.parser.get_http_version(), self.headers, is_upgrade=is_upgrade)
        self._fault = self._fault or find_size_fault(self.url, self.headers)
        if self._fault is not None:
            # Raising ends the parsing of the connection.
            raise ValueError(self._fault.message)
        super().on_headers_complete()
        if not is_upgrade:
            self.headers = []  # for trailers, which the parser adds here; they are no headers, and nobody reads them

    def send_400_response(self, msg: str) -> None:
        super().send_400_response(self._fault.message if self._fault is not None else msg)


@asynccontextmanager
async def serve_api(parts: Parts, config: ApiConfig) -> AsyncIterator[str]:
    """Serve the API, and the metrics where they have a port of their own; yields the URL once it answers.

    Raises ConfigError for an address that cannot be listened on.
    """
    async with AsyncExitStack() as stack:
        listener = _listen(config.host, config.port)
        stack.callback(listener.close)
        routes, close = make_routes(parts, config)
        if config.has_metrics and config.metrics_port is not None:
            second = _listen(config.host, config.metrics_port)
            stack.callback(second.close)
            await stack.enter_async_context(_serve(make_app(make_metrics_routes(parts), config, parts.tickets), second))
            log.info("metrics listening url=%s", _url(second))
        tls = None if parts.tls is None else parts.tls.context
        await stack.enter_async_context(_serve(make_app(routes, config, parts.tickets), listener, tls=tls))
        stack.callback(close)
        url = _url(listener, scheme="http" if tls is None else "https")
        log.info("api listening url=%s", url)
        sys.stderr.write(f"api listening url={url}\n")
        sys.stderr.flush()
        yield url


@asynccontextmanager
async def _serve(app: ASGIApp, listener: socket.socket, *, tls: ssl.SSLContext | None = None) -> AsyncIterator[None]:
    server = _Server(
        uvicorn.Config(
            app, ssl_context_factory=None if tls is None else lambda *_: tls,
            http=ApiHttpProtocol, lifespan="off", ws="none", interface="asgi3", access_log=False, log_config=None,
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
            async with asyncio.timeout(limits().api.grace_s + limits().api.start_s):
                await running
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # what its client does not read would keep the loop from closing


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another --api-port") from None


def _url(listener: socket.socket, *, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
