"""TabbyAPI as its adapter sees it: a server with its routes for one model, from its documentation and source, and its case."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web

from runner.definitions.plan import LoadPlan
from runner.engines.port import FlushResult
from runner.engines.tabby import make_tabby
from tests.fakes.engines.scripted_server import drop, listening, stream_words, words_answer
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chatting, environment
from tests.fakes.waiting import takes

API_KEY, ADMIN_KEY = "an-api-key", "an-admin-key"


def refusal(kind: type[web.HTTPError], words: str) -> web.HTTPError:
    return kind(text=json.dumps({"detail": words}), content_type="application/json")


@dataclass
class TabbyContract:
    """``folders`` are the models it has; ``broken`` of them fail half-way. The rest says what it did."""

    folders: tuple[str, ...] = ("tiny", "other", "bad")
    broken: tuple[str, ...] = ("bad",)
    modules: int = 6
    module_s: float = 0.01
    token_s: float = 0.005
    cuts_load_stream: bool = False
    keeps_model: bool = False
    loaded: str | None = None
    loads: list[dict[str, object]] = field(default_factory=list)
    asked: list[dict[str, object]] = field(default_factory=list)
    asked_by_admin: int = 0
    running: int = 0
    url: str = ""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[TabbyContract]:
        app = web.Application()
        app.router.add_get("/v1/model", self._model)
        app.router.add_post("/v1/model/load", self._load)
        app.router.add_post("/v1/model/unload", self._unload)
        app.router.add_post("/v1/chat/completions", self._chat)
        async with listening(app) as (self.url,):
            yield self
            for task in self._tasks:
                task.cancel()

    def _check(self, request: web.Request, *, admin: bool = False) -> None:
        keys = {request.headers.get("x-admin-key"), request.headers.get("Authorization", "").removeprefix("Bearer ")}
        if not keys & ({ADMIN_KEY} if admin else {API_KEY, ADMIN_KEY}):
            raise refusal(web.HTTPUnauthorized, "Invalid key")

    def _card(self) -> dict[str, object]:
        length = self.loads[-1].get("max_seq_len") if self.loads else None
        return {"id": self.loaded, "object": "model", "owned_by": "tabbyAPI", "parameters": {"max_seq_len": length}}

    def _require_model(self) -> None:
        if self.loaded is None:
            raise refusal(web.HTTPServiceUnavailable, "No models are currently loaded.")

    async def _model(self, request: web.Request) -> web.Response:
        self._check(request)
        self._require_model()
        return web.json_response(self._card())

    async def _load(self, request: web.Request) -> web.StreamResponse:
        self._check(request, admin=True)
        wishes = await request.json()
        if wishes["model_name"] not in self.folders:
            raise refusal(web.HTTPBadRequest, "Could not find the model path for load.")
        self.loads.append(wishes)
        events: asyncio.Queue[dict[str, object] | None] = asyncio.Queue()
        # Detached: a listener that goes does not stop the load.
        task = asyncio.create_task(self._run_load(str(wishes["model_name"]), events))
        self._tasks.add(task)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while (event := await events.get()) is not None:
            await response.write(f"data: {json.dumps(event)}\r\n\r\n".encode())
            if self.cuts_load_stream:
                drop(request)
                break
        return response

    async def _run_load(self, name: str, events: asyncio.Queue[dict[str, object] | None]) -> None:
        if self.loaded != name:
            self.loaded = None
        for module in range(1, self.modules + 1):
            await takes(self.module_s)
            if name in self.broken and module == self.modules // 2:
                events.put_nowait({"error": {"message": "CUDA out of memory", "trace": None}})
                events.put_nowait(None)
                return
            events.put_nowait({"model_type": "model", "module": module, "modules": self.modules, "status": "processing"})
        self.loaded = name
        events.put_nowait({"model_type": "model", "module": self.modules, "modules": self.modules, "status": "finished"})
        events.put_nowait(None)

    async def _unload(self, request: web.Request) -> web.Response:
        self._check(request, admin=True)
        self._require_model()
        if not self.keeps_model:
            self.loaded = None
        return web.json_response(None)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        self._require_model()
        body = await request.json()
        self.asked.append(body)
        self.asked_by_admin += "x-admin-key" in request.headers
        count = int(body.get("max_tokens", 8))
        if not body.get("stream"):
            return web.json_response(words_answer(count, 20))
        self.running += 1
        try:
            return await stream_words(request, count, self.token_s, is_served=lambda _number: self.loaded is not None)
        finally:
            self.running -= 1


def keys_in_environment() -> contextlib.AbstractContextManager[None]:
    return environment(TEST_TABBY_KEY=API_KEY, TEST_TABBY_ADMIN_KEY=ADMIN_KEY)


def tabby_plan(url: str, model: str = "tiny", *, context_tokens: int | None = 4096, **options: object) -> LoadPlan:
    named = {
        "server_url": url, "server_api_key_env": "TEST_TABBY_KEY", "server_admin_key_env": "TEST_TABBY_ADMIN_KEY", **options,
    }  # fmt: skip
    return LoadPlan(model_id=model, backend="tabbyapi", context_tokens=context_tokens, slots=4, options=named)


@contextlib.asynccontextmanager
async def open_tabbyapi(_folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    async with TabbyContract().serve() as server:
        with keys_in_environment():
            yield chatting(
                make_tabby, client, tabby_plan(server.url), tabby_plan(server.url, "bad"), "CUDA out of memory",
                text="Explain lambda.", running=lambda: server.running, flushes=frozenset({FlushResult.NOT_SUPPORTED}),
            )  # fmt: skip


CASES = [EngineCase("tabbyapi", open_tabbyapi)]
