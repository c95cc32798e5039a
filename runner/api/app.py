"""The application behind the port: the route table, who may use it, and what an error becomes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runner.api.access import AccessGuard
from runner.api.refusals import Broken, MethodNotAllowed, ModelLoadFailed, NotFound, OperationFailed, render
from runner.api.routes import make_metrics_routes, make_routes
from runner.config import ApiConfig
from runner.errors import CorruptModel, DownloadFailed, EngineError, InvalidRequest, RequestRefused, RunnerError
from runner.parts import Parts
from wire.ids import new_uuid7

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


@dataclass(frozen=True, slots=True)
class Api:
    """The application, and what ends the answers under way."""

    asgi: ASGIApp
    close: Callable[[], None]


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


def make_app(parts: Parts, config: ApiConfig) -> Api:
    """Return the application of the API's port, metrics included where they have no port of their own."""
    made = make_routes(parts, config)
    return Api(_wrap(made.routes, config), made.close)


def make_metrics_app(parts: Parts, config: ApiConfig) -> ASGIApp:
    """Return the application of the metrics' own port."""
    return _wrap(make_metrics_routes(parts).routes, config)


def _wrap(routes: Sequence[Route], config: ApiConfig) -> ASGIApp:
    app = Starlette(
        routes=routes,
        middleware=[Middleware(RequestIds), Middleware(AccessGuard, config=config)],
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
    return render(Broken("The box failed at this; its log says why."), path=request.scope["path"])
