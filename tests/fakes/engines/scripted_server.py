"""An OpenAI-compatible server that does what a test says, to stand behind ``--backend``."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.fakes.waiting import takes

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
        self._place = hold_port()
        self._port: int = self._place.getsockname()[1]

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

    async def start(self) -> None:
        self.runner = await set_up([web.get("/v1/models", self._list), web.post("/{tail:.*}", self._answer)])
        if sys.platform != "linux":
            self._place.close()  # elsewhere it would keep the port from us too
        site = web.TCPSite(self.runner, "127.0.0.1", self._port, reuse_address=True)
        await site.start()
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
            self.runner = None

    async def close(self) -> None:
        await self.stop()
        self._place.close()


def says(value: Callable[[], object]) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers with what a value is at the moment, as JSON."""

    async def answer(_request: web.Request) -> web.Response:
        return web.json_response(value())

    return answer


async def set_up(routes: Sequence[web.RouteDef]) -> web.AppRunner:
    """Return a server that needs only a site yet. A handler whose client leaves is cancelled."""
    app = web.Application(client_max_size=1 << 28)
    app.router.add_routes(routes)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    return runner


def hold_port() -> socket.socket:
    """Return what keeps a loopback port from being given to others, while nothing listens on it too: a bound socket."""
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    return place


async def answer_json(_request: web.Request, _body: bytes) -> web.StreamResponse:
    return web.json_response({"ok": True, "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}})


async def stream_words(
    request: web.Request, count: int, token_s: float, *, is_served: Callable[[int], bool] = lambda _number: True,
    headers: Mapping[str, str] | None = None, usage: dict[str, Any] | None = None, **fields: object,
) -> web.StreamResponse:  # fmt: skip
    """Answer with a stream of so many words, broken off where one is not served, and with the usage where it is given."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **(headers or {})})
    await response.prepare(request)

    async def write(event: dict[str, object]) -> None:
        await response.write(f"data: {json.dumps({**fields, **event})}\n\n".encode())

    for number in range(count):
        if not is_served(number):
            return drop(request)
        delta = {"role": "assistant", "content": f"word{number} "}
        await write({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        await takes(token_s)
    if usage is not None:
        await write({"choices": [], "usage": usage})
    await response.write(b"data: [DONE]\n\n")
    return response


def drop(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


def words_answer(count: int, prompt_tokens: int, **fields: object) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", "content": "word " * count}, "finish_reason": "length"}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
    return {"id": "x", "object": "chat.completion", "choices": [choice], "usage": usage, **fields}


@asynccontextmanager
async def listening(app: web.Application, *, ports: int = 1) -> AsyncIterator[list[str]]:
    """Serve an application on ports of loopback; yield their addresses. A handler whose client leaves is cancelled."""
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.2)
    await runner.setup()
    try:
        for _ in range(ports):
            await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield [f"http://127.0.0.1:{address[1]}" for address in runner.addresses]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def run_engine() -> AsyncIterator[ScriptedEngine]:
    engine = ScriptedEngine()
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
