"""The edges of a child's HTTP server: loopback, a key, bounded bodies, errors in OpenAI's shape, serving until told to stop."""

from __future__ import annotations

import asyncio
import hmac
import logging
import threading
from collections.abc import Awaitable, Callable

from aiohttp import web

from runner.engines.children.base import Parent

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Refusal(Exception):
    """A request that is not carried out. ``param`` names the field that is at fault; texts never carry prompts."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400,
        details: dict[str, object] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status
        self.details: dict[str, object] = details or {}

    def render(self) -> dict[str, object]:
        """Return the body of the answer (OpenAI API reference, error object)."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code, **self.details}}


def make_app(*, key: str, max_body_bytes: int) -> web.Application:
    """Return an application that asks for ``key`` on every path but ``/health`` and renders refusals."""
    wanted = f"Bearer {key}".encode()

    @web.middleware
    async def edge(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if request.path != "/health" and not hmac.compare_digest(given, wanted):
                raise Refusal("the key is missing or wrong", code="invalid_api_key", status=401)
            return await handler(request)
        except Refusal as refusal:
            headers = {"Retry-After": "1"} if refusal.status == 503 else None
            return web.json_response(refusal.render(), status=refusal.status, headers=headers)
        except web.HTTPException as error:
            return web.json_response(_name_error(error).render(), status=error.status)

    app = web.Application(middlewares=[edge], client_max_size=max_body_bytes)

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app.router.add_get("/health", health)
    return app


def _name_error(error: web.HTTPException) -> Refusal:
    if error.status == 413:
        return Refusal("the body is too large", code="request_too_large", status=413)
    return Refusal(error.reason, code="not_found", status=error.status)


async def serve(app: web.Application, parent: Parent, info: dict[str, object]) -> None:
    """Serve on a free loopback port, tell the parent where, and return when it closes our standard input."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()

    def wait() -> None:
        parent.wait_until_told()
        loop.call_soon_threadsafe(told.set)

    # A handler is cancelled when its client goes: that is what stops a generation nobody reads.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        threading.Thread(target=wait, name="stdin", daemon=True).start()
        parent.say(url=f"http://127.0.0.1:{port}", info=info)
        await told.wait()
    finally:
        await runner.cleanup()
