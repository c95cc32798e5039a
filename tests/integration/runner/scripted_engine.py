"""An OpenAI-compatible server that does what a test says, to stand behind ``--backend``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from aiohttp import web

Handler = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


class ScriptedEngine:
    """Lists ``models`` and answers every POST with ``handler``; ``seen`` holds what arrived."""

    def __init__(self) -> None:
        self.models = ["alpha", "beta"]
        self.owner = "someone"
        self.key = ""
        self.handler: Handler = answer_json
        self.seen: list[tuple[str, dict[str, str], bytes]] = []
        self.gone = asyncio.Event()
        self.url = ""
        self.runner: web.AppRunner | None = None

    async def _list(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.json_response({"error": "key"}, status=401)
        listed = [{"id": name, "object": "model", "owned_by": self.owner} for name in self.models]
        return web.json_response({"object": "list", "data": listed})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.seen.append((request.path_qs, headers, body))
        try:
            return await self.handler(request, body)
        except (asyncio.CancelledError, ConnectionError):
            self.gone.set()
            raise

    async def start(self, port: int = 0) -> None:
        """Listen on a loopback port."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/v1/models", self._list)
        app.router.add_post("/{tail:.*}", self._answer)
        self.runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", port)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Close the port and every connection."""
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None


async def answer_json(_request: web.Request, _body: bytes) -> web.StreamResponse:
    """Answer with a small completion."""
    return web.json_response({"ok": True, "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}})


@asynccontextmanager
async def run_engine() -> AsyncIterator[ScriptedEngine]:
    """Yield a listening engine."""
    engine = ScriptedEngine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
