"""A llama-server in router mode by its documented endpoints (tokens are words), and the one that MUSTER_LLAMA_SERVER names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import LoadPlan
from runner.engines.llama import make_llama_server
from tests.fakes.closed_port import closed_port
from tests.fakes.engines.cases import ENDLESS
from tests.fakes.engines.cases import QUESTION as LONG_QUESTION
from tests.fakes.engines.scripted_server import listening, says, stream_words
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chatting, openai_cached_tokens, wait_until
from tests.fakes.waiting import eventually, takes

SLOTS = 2


@dataclass
class ContractSlot:
    """What one slot holds and whether it works."""

    words: list[str] = field(default_factory=list)
    is_processing: bool = False


@dataclass
class ContractModel:
    """One model of the router. ``load_s``: how long a load takes. ``exit_code``: what its loads end with, None = they work.

    ``needs_listener``: a load goes on when somebody listens to its progress.
    """

    status: str = "unloaded"
    failed: bool = False
    load_s: float = 0.05
    exit_code: int | None = None
    refuses_unload: bool = False
    evicted: bool = False
    needs_listener: bool = False
    slots: list[ContractSlot] = field(default_factory=lambda: [ContractSlot() for _ in range(SLOTS)])


class RouterContract:
    """The server; ``models`` may be changed by a test at any time."""

    def __init__(self) -> None:
        self.models = {"tiny": ContractModel(), "broken": ContractModel(exit_code=1)}
        self.key = ""
        self.is_old = False
        """Whether it is of before the middle of 2026 and counts no messages."""
        self.told: list[str] = []
        self.bodies: list[dict[str, object]] = []
        self.url = ""
        self._events: set[asyncio.Queue[dict[str, object]]] = set()
        self._loads: set[asyncio.Task[None]] = set()

    def count_running(self) -> int:
        return sum(slot.is_processing for model in self.models.values() for slot in model.slots)

    # ---- the router's own endpoints ----

    async def list_models(self, _request: web.Request) -> web.Response:
        data = []
        for name, model in self.models.items():
            status: dict[str, object] = {"value": model.status, "args": ["llama-server"]}
            if model.failed:
                status |= {"failed": True, "exit_code": model.exit_code}
            data.append({"id": name, "object": "model", "status": status})
        return web.json_response({"data": data, "object": "list"})

    async def load(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        self.told.append(f"load {name}")
        if name not in self.models:
            return error(400, f"model '{name}' not found")
        if self.models[name].status != "unloaded":
            return error(400, "model is already running")
        self.models[name].status, self.models[name].failed = "loading", False
        task = asyncio.create_task(self._load(name))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)
        return web.json_response({"success": True})

    async def unload(self, request: web.Request) -> web.Response:
        name = (await request.json())["model"]
        self.told.append(f"unload {name}")
        model = self.models[name]
        if model.refuses_unload:
            return error(500, "the instance does not react")
        if model.status == "unloaded":
            return error(400, "model is not running")
        model.status = "unloaded"
        model.slots = [ContractSlot() for _ in range(SLOTS)]
        return web.json_response({"success": True})

    async def publish_events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        events: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self._events.add(events)
        try:
            while True:
                await response.write(b"data: " + json.dumps(await events.get()).encode() + b"\n\n")
        finally:
            self._events.discard(events)

    async def _load(self, name: str) -> None:
        model = self.models[name]
        if model.needs_listener:
            await eventually(lambda: self._events)
        for step in range(1, 5):
            await takes(model.load_s / 4)
            if model.status != "loading":
                return
            progress = {"stages": ["text_model"], "current": "text_model", "value": step / 4}
            event: dict[str, object] = {"model": name, "event": "model_status"}
            for events in self._events:
                events.put_nowait(event | {"data": {"status": "loading", "progress": progress}})
        await takes(model.load_s / 4)
        if model.status == "loading":
            model.failed = model.exit_code is not None
            model.status = "unloaded" if model.failed or model.evicted else "loaded"

    # ---- what it passes on to the model ----

    async def properties(self, request: web.Request) -> web.Response:
        if "model" not in request.query:
            return web.json_response({"role": "router", "max_instances": 4})
        return web.json_response({
            "total_slots": SLOTS, "chat_template_caps": {"supports_tools": True}, "modalities": {"vision": True},
            "default_generation_settings": {"id": 0, "n_ctx": 4096, "params": {"n_predict": -1}},
            "build_info": "b6000-0123abc",
        })  # fmt: skip

    async def show_slots(self, request: web.Request) -> web.Response:
        slots = self._loaded(request.query.get("model", "")).slots
        return web.json_response([
            {"id": index, "n_ctx": 4096, "is_processing": slot.is_processing, "n_prompt_tokens": len(slot.words)}
            for index, slot in enumerate(slots)
        ])  # fmt: skip

    async def erase_slot(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._loaded(body["model"]).slots[int(request.match_info["slot"])].words = []
        return web.json_response({"n_erased": 1})

    async def count(self, request: web.Request) -> web.Response:
        if self.is_old:
            return error(404, "File Not Found")
        body = await request.json()
        self._loaded(body["model"])
        return web.json_response({"object": "response.input_tokens", "input_tokens": len(read_words(body))})

    async def apply_template(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._loaded(body["model"])
        return web.json_response({"prompt": " ".join(read_words(body))})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._loaded(body["model"])
        assert body["add_special"]
        assert body["parse_special"]
        return web.json_response({"tokens": list(range(len(body["content"].split())))})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        model = self._loaded(body["model"])
        slot = model.slots[body.get("id_slot", 0)]
        words = read_words(body)
        reused = count_common(slot.words, words) if body.get("cache_prompt", True) else 0
        slot.words = words
        usage = {"prompt_tokens": len(words), "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": reused}}
        if not body.get("stream"):
            return web.json_response({"choices": [], "usage": usage, "timings": {"cache_n": reused}})
        slot.is_processing = True
        try:
            return await stream_words(request, body["max_tokens"], 0.01, is_served=lambda _number: model.status != "unloaded")
        finally:
            slot.is_processing = False

    def _loaded(self, name: str) -> ContractModel:
        model = self.models.get(name)
        if model is None or model.status not in {"loaded", "sleeping"}:
            raise web.HTTPBadRequest(text=json.dumps({"error": {"message": f"model '{name}' is not loaded"}}))
        return model

    @web.middleware
    async def _check_key(self, request: web.Request, handler: object) -> web.StreamResponse:
        assert callable(handler)
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return error(401, "Invalid API Key")
        answer: web.StreamResponse = await handler(request)
        return answer

    def build_app(self) -> web.Application:
        app = web.Application(middlewares=[self._check_key])
        get, post = web.get, web.post
        app.router.add_routes([
            get("/health", says(lambda: {"status": "ok"})), get("/models", self.list_models),
            get("/models/sse", self.publish_events),
            post("/models/load", self.load), post("/models/unload", self.unload), get("/props", self.properties),
            get("/slots", self.show_slots), post("/slots/{slot}", self.erase_slot), post("/tokenize", self.tokenize),
            post("/v1/chat/completions/input_tokens", self.count), post("/apply-template", self.apply_template),
            *(post(path, self.complete) for path in ("/completion", "/v1/completions", "/v1/chat/completions")),
        ])  # fmt: skip
        return app


def read_words(body: dict[str, Any]) -> list[str]:
    """Return the prompt of a body: numbers as they are, else the words of its messages."""
    return list(body["prompt"]) if "prompt" in body else " ".join(m["content"] for m in body["messages"]).split()


def count_common(held: list[str], wanted: list[str]) -> int:
    """Return the length of the common beginning, less the last word, which is always processed anew."""
    common = 0
    while common < min(len(held), len(wanted) - 1) and held[common] == wanted[common]:
        common += 1
    return common


def error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"code": status, "message": message, "type": "invalid_request_error"}}, status=status)


@contextlib.asynccontextmanager
async def run_router() -> AsyncIterator[RouterContract]:
    router = RouterContract()
    async with listening(router.build_app()) as (router.url,):
        yield router


QUESTION = "a question of a dozen words that somebody asks again and again here"


def server_plan(url: str, model: str = "tiny", **options: object) -> LoadPlan:
    return LoadPlan(model_id=model, backend="llama_server", slots=2, options={"server_url": url, **options})


@contextlib.asynccontextmanager
async def open_router(_folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    async with run_router() as router:
        yield chatting(
            make_llama_server, client, server_plan(router.url), server_plan(router.url, "broken"),
            r"could not load broken \(exit code 1\)", text=QUESTION, cached=openai_cached_tokens, running=router.count_running,
        )  # fmt: skip


PROGRAM = os.environ.get("MUSTER_LLAMA_SERVER", "")
_START_LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def run_program(folder: Path, client: aiohttp.ClientSession, port: int) -> AsyncIterator[str]:
    """Yield the address of the real program in router mode, which offers the GGUF files of the folder."""
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "--models-dir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--no-models-autoload",
        "--cache-ram", "0", "--slot-save-path", str(folder), "--parallel", "2", "--ctx-size", "4096", "--metrics",
        "--gpu-layers", "99", "--threads", "1", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        try:
            async with client.get(f"{url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    try:
        assert await wait_until(answers, _START_LIMIT_S), "the program does not answer"
        yield url
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def open_program(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter for the shipped model behind the real program, and one for half of its file."""
    weights = TINY_MODEL_PATH.read_bytes()
    (folder / "tiny.gguf").write_bytes(weights)
    (folder / "half.gguf").write_bytes(weights[:600_000])
    with closed_port() as port:
        pass
    async with run_program(folder, client, port) as url:
        yield chatting(
            make_llama_server, client, server_plan(url), server_plan(url, "half"), "could not load half",
            text=LONG_QUESTION, long=ENDLESS, cached=openai_cached_tokens,
        )  # fmt: skip


CASES = [
    EngineCase("llama-server-router", open_router),
    EngineCase(
        "llama-server-program",
        open_program,
        (pytest.mark.skipif(not PROGRAM, reason="MUSTER_LLAMA_SERVER names no llama-server"),),
    ),
]
