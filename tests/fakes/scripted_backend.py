"""An OpenAI-compatible server on loopback, for boxes that the gateway calls over HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any  # request bodies are JSON

from aiohttp import web

ABOUT: dict[str, Any] = {"id": "chatcmpl-direct", "created": 1775000000, "model": "m"}
USAGE = {"prompt_tokens": 11, "completion_tokens": 2, "total_tokens": 13}


@dataclass
class Call:
    """One request the backend got."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class ScriptedBackend:
    """The running server. ``hold`` keeps every answer back until it is set; ``gone`` counts callers that left."""

    url: str
    calls: list[Call] = field(default_factory=list)
    gone: int = 0
    hold: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append(Call(request.path, {name.lower(): value for name, value in request.headers.items()}, body))
        try:
            if body.get("stream"):
                return await self._stream(request, body)
            await self.hold.wait()
        except (asyncio.CancelledError, ConnectionError):
            self.gone += 1
            raise
        choice = {"index": 0, "message": {"role": "assistant", "content": "direct"}, "finish_reason": "stop"}
        return web.json_response({**ABOUT, "object": "chat.completion", "choices": [choice], "usage": USAGE})

    async def _stream(self, request: web.Request, body: Any) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": "begun"}}]}))
        await self.hold.wait()
        await response.write(event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}))
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(event({"choices": [], "usage": USAGE}))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def event(content: dict[str, Any]) -> bytes:
    return f"data: {json.dumps({**ABOUT, 'object': 'chat.completion.chunk', **content})}\n\n".encode()


@asynccontextmanager
async def serve_backend() -> AsyncIterator[ScriptedBackend]:
    """Run a backend; answers are not held back until a test clears ``hold``."""
    listener = socket.create_server(("127.0.0.1", 0))
    backend = ScriptedBackend(f"http://127.0.0.1:{listener.getsockname()[1]}")
    backend.hold.set()
    application = web.Application(client_max_size=64 * 1024 * 1024)
    application.router.add_post("/v1/chat/completions", backend.answer)
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    try:
        yield backend
    finally:
        backend.hold.set()
        await runner.cleanup()
