"""ComfyUI as its adapter sees it: a server that answers as it does (prompts, queue, history, images, memory), and its case."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
import uuid
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from runner.definitions.plan import LoadPlan
from runner.engines.comfy import make_comfyui
from runner.engines.port import IMAGES, Call, FlushResult
from tests.fakes.engines.scripted_server import listening, says
from tests.fakes.engines.suite import EngineCase, EngineUnderTest
from tests.fakes.waiting import takes

GIB = 2**30
Fields = dict[str, Any]  # Any: JSON of another program


def make_png(width: int, height: int, texts: dict[str, str]) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\x80" * width) * height)
    written = b"".join(chunk(b"tEXt", f"{name}\0{text}".encode()) for name, text in texts.items())
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + written + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@dataclass(order=True)
class Item:
    """One queued prompt."""

    number: float
    prompt_id: str
    graph: Fields = field(compare=False)
    extra: Fields = field(compare=False)

    def wire(self) -> list[object]:
        return [self.number, self.prompt_id, self.graph, self.extra, ["image"]]


@dataclass
class ComfyContract:
    """``fails`` names a kind of node and its words. ``is_old``: of 2024, when prompts had no id of the client's."""

    checkpoints: tuple[str, ...] = ("sd15.safetensors", "broken.safetensors", "sdxl.safetensors")
    lacks: frozenset[str] = frozenset()
    fails: dict[str, tuple[str, str]] = field(default_factory=dict)
    step_s: float = 0.001
    key: str = ""
    is_old: bool = False
    is_mute: bool = False
    keeps_memory: bool = False
    loses_prompts: bool = False
    device: str = "cuda"
    has_combo: bool = False
    folder: Path | None = None
    """Where further checkpoints lie; looked at for every question, as ComfyUI does."""
    pending: list[Item] = field(default_factory=list)
    running: Item | None = None
    history: dict[str, Fields] = field(default_factory=dict)
    files: dict[tuple[str, str, str], bytes] = field(default_factory=dict)
    asked: list[Fields] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    interrupts: list[Fields] = field(default_factory=list)
    innocent: list[str] = field(default_factory=list)
    reserved: int = 8 * 2**20
    frees: int = 0
    url: str = ""
    _number: int = 0
    _interrupted: bool = False
    _wants_free: bool = False
    _sockets: dict[str, web.WebSocketResponse] = field(default_factory=dict)
    _work: asyncio.Event = field(default_factory=asyncio.Event)

    @contextlib.asynccontextmanager
    async def serve(self) -> AsyncIterator[ComfyContract]:
        app = web.Application(client_max_size=16 * 2**20)
        for method, path, handler in (
            ("POST", "/prompt", self._prompt), ("GET", "/prompt", says(self._count)), ("GET", "/queue", says(self._list)),
            ("POST", "/queue", self._delete), ("POST", "/interrupt", self._interrupt), ("POST", "/free", self._free),
            ("GET", "/history/{id}", self._history), ("POST", "/history", self._forget), ("GET", "/view", self._view),
            ("GET", "/object_info/{node}", self._info), ("GET", "/system_stats", self._stats), ("GET", "/ws", self._listen),
        ):  # fmt: skip
            app.router.add_route(method, path, handler)
        app.middlewares.append(self._check)
        async with listening(app) as (self.url,):
            worker = asyncio.create_task(self._run())
            try:
                yield self
            finally:
                worker.cancel()
                await asyncio.gather(worker, return_exceptions=True)
                for socket in tuple(self._sockets.values()):
                    await socket.close()

    def _checkpoints(self) -> tuple[str, ...]:
        found = () if self.folder is None else tuple(path.name for path in self.folder.glob("*.safetensors"))
        return self.checkpoints + found

    def enqueue(self, graph: Fields) -> str:
        prompt_id = str(uuid.uuid4())
        self._put(Item(self._next(), prompt_id, graph, {"client_id": "somebody"}))
        return prompt_id

    def drop_sockets(self) -> None:
        for socket in self._sockets.values():
            if (transport := socket._req.transport if socket._req else None) is not None:
                transport.abort()

    # ---- routes ----

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:  # Any: aiohttp's Handler
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        response: web.StreamResponse = await handler(request)
        return response

    async def _prompt(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        problem = self._validate(body["prompt"])
        if problem is not None:
            return web.json_response(problem, status=400)
        number = float(body["number"]) if "number" in body else self._next() * (-1 if body.get("front") else 1)
        given = None if self.is_old else body.get("prompt_id")
        prompt_id = given or str(uuid.uuid4())
        self._put(Item(number, prompt_id, body["prompt"], {"client_id": body.get("client_id")}))
        return web.json_response({"prompt_id": prompt_id, "number": number, "node_errors": {}})

    def _validate(self, graph: Fields) -> Fields | None:
        if not any(node["class_type"] in {"PreviewImage", "SaveImage", "PreviewAny"} for node in graph.values()):
            error = {"type": "prompt_no_outputs", "message": "Prompt has no outputs", "details": "", "extra_info": {}}
            return {"error": error, "node_errors": {}}
        for node_id, node in graph.items():
            name = node["inputs"].get("ckpt_name")
            if name is not None and name not in self._checkpoints():
                details = f"ckpt_name: '{name}' not in {list(self._checkpoints())}"
                wrong = {"type": "value_not_in_list", "message": "Value not in list", "details": details}
                failed = "prompt_outputs_failed_validation"
                error = {"type": failed, "message": "Prompt outputs failed validation", "details": ""}
                return {"error": error, "node_errors": {node_id: {"errors": [wrong], "class_type": node["class_type"]}}}
        return None

    def _count(self) -> Fields:
        return {"exec_info": {"queue_remaining": len(self.pending) + (self.running is not None)}}

    def _list(self) -> Fields:
        running = [self.running.wire()] if self.running else []
        return {"queue_running": running, "queue_pending": [item.wire() for item in sorted(self.pending)]}

    async def _delete(self, request: web.Request) -> web.Response:
        wanted = (await request.json()).get("delete", [])
        self.pending = [item for item in self.pending if item.prompt_id not in wanted]
        return web.Response()

    async def _interrupt(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.interrupts.append(body)
        named = None if self.is_old else body.get("prompt_id")
        if self.running is not None and named in {None, self.running.prompt_id}:
            self._interrupted = True
            if self.running.extra.get("client_id") == "somebody":
                self.innocent.append(self.running.prompt_id)
        return web.Response()

    async def _history(self, request: web.Request) -> web.Response:
        prompt_id = request.match_info["id"]
        return web.json_response({prompt_id: self.history[prompt_id]} if prompt_id in self.history else {})

    async def _forget(self, request: web.Request) -> web.Response:
        for prompt_id in (await request.json()).get("delete", []):
            self.history.pop(prompt_id, None)
        return web.Response()

    async def _view(self, request: web.Request) -> web.Response:
        query = request.query
        image = self.files.get((query["filename"], query.get("subfolder", ""), query.get("type", "output")))
        return web.Response(status=404) if image is None else web.Response(body=image, content_type="image/png")

    async def _info(self, request: web.Request) -> web.Response:
        node = request.match_info["node"]
        if node in self.lacks:
            return web.json_response({})
        names: list[object] = [list(self._checkpoints()), {}]
        if self.has_combo:
            names = ["COMBO", {"options": list(self._checkpoints())}]
        required = {"ckpt_name": names} if node == "CheckpointLoaderSimple" else {"images": ["IMAGE"]}
        return web.json_response({node: {"input": {"required": required}, "name": node}})

    async def _stats(self, _request: web.Request) -> web.Response:
        device = {"name": "a card", "type": self.device, "index": 0, "vram_total": 24 * GIB, "vram_free": 20 * GIB,
                  "torch_vram_total": self.reserved, "torch_vram_free": 0}  # fmt: skip
        system = {"comfyui_version": "0.3.64", "ram_total": 64 * GIB, "ram_free": 32 * GIB, "pytorch_version": "2.9"}
        return web.json_response({"system": system, "devices": [device]})

    async def _free(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.frees += 1
        self._wants_free = bool(body.get("unload_models"))
        self._work.set()
        return web.Response()

    async def _listen(self, request: web.Request) -> web.StreamResponse:
        if self.is_mute:
            return web.Response(status=404)
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        client_id = request.query["clientId"]
        self._sockets[client_id] = socket
        await socket.send_json({"type": "status", "data": {"status": {"exec_info": {"queue_remaining": 0}}, "sid": client_id}})
        try:
            async for _ in socket:
                pass
        finally:
            self._sockets.pop(client_id, None)
        return socket

    # ---- work ----

    def _next(self) -> float:
        self._number += 1
        return float(self._number)

    def _put(self, item: Item) -> None:
        if not self.loses_prompts:
            self.pending.append(item)
        self._work.set()

    async def _run(self) -> None:
        while True:
            if self.pending:
                self.running = min(self.pending)
                self.pending.remove(self.running)
                self._interrupted = False
                await self._execute(self.running)
                self.running = None
            if self._wants_free:
                self._wants_free = False
                if not self.keeps_memory:
                    self.reserved = 8 * 2**20
            if not self.pending:
                self._work.clear()
                await self._work.wait()

    async def _execute(self, item: Item) -> None:
        start: Fields = {"prompt_id": item.prompt_id}
        messages: list[Fields | list[object]] = [["execution_start", start]]
        await self._send(item, "execution_start", start)
        outputs: Fields = {}
        end = ("execution_success", start)
        for node_id, node in item.graph.items():
            await self._send(item, "executing", {"node": node_id, "prompt_id": item.prompt_id})
            problem = await self._execute_node(item, node_id, node, outputs)
            if problem is not None:
                end = problem
                break
        self.executed.append(item.prompt_id)
        if self.is_old or end[0] == "execution_error":
            await self._send(item, *end)
        messages.append(list(end))
        is_good = end[0] == "execution_success"
        status = {"status_str": "success" if is_good else "error", "completed": is_good, "messages": messages}
        await takes(0.005)  # the events leave before the history has it
        if not self.is_old and end[0] != "execution_error":
            await self._send(item, *end)
        await takes(0.005)
        self.history[item.prompt_id] = {"prompt": item.wire(), "outputs": outputs, "status": status}
        await self._send(item, "executing", {"node": None, "prompt_id": item.prompt_id})

    async def _execute_node(self, item: Item, node_id: str, node: Fields, outputs: Fields) -> tuple[str, Fields] | None:
        """Run a node; return the event that ends the prompt when it goes wrong."""
        kind, inputs = node["class_type"], node["inputs"]
        failure = self.fails.get(kind)
        if kind == "CheckpointLoaderSimple":
            self.reserved = 4 * GIB
            if inputs["ckpt_name"].startswith("broken"):
                failure = ("SafetensorError", "Error while deserializing header: HeaderTooLarge")
        if failure is not None:
            fields = {"prompt_id": item.prompt_id, "node_id": node_id, "node_type": kind, "exception_type": failure[0],
                      "exception_message": failure[1], "traceback": ["line 1"], "current_inputs": {}}  # fmt: skip
            return "execution_error", fields
        steps = inputs.get("steps", 1) if kind == "KSampler" else 1
        for step in range(steps):
            if self._interrupted:
                return "execution_interrupted", {"prompt_id": item.prompt_id, "node_id": node_id, "node_type": kind}
            await takes(self.step_s)
            if kind == "KSampler":
                progress = {"value": step + 1, "max": steps, "prompt_id": item.prompt_id, "node": node_id}
                await self._send(item, "progress", progress)
        if kind in {"PreviewImage", "SaveImage"}:
            outputs[node_id] = {"images": self._save(item, "temp" if kind == "PreviewImage" else "output")}
        return None

    def _save(self, item: Item, kind: str) -> list[Fields]:
        latent: Fields = next((node["inputs"] for node in item.graph.values() if node["class_type"] == "EmptyLatentImage"), {})
        saved: list[Fields] = []
        for index in range(latent.get("batch_size", 1)):
            name = f"made up & {item.prompt_id}_{index}.png"
            texts = {"prompt": json.dumps(item.graph), "n": str(index)}
            self.files[name, "a folder", kind] = make_png(latent.get("width", 8), latent.get("height", 8), texts)
            saved.append({"filename": name, "subfolder": "a folder", "type": kind})
        return saved

    async def _send(self, item: Item, kind: str, data: Fields) -> None:
        socket = self._sockets.get(str(item.extra.get("client_id")))
        if socket is not None:
            with contextlib.suppress(ConnectionError):
                await socket.send_json({"type": kind, "data": data})
                if kind == "progress":  # with a preview behind it
                    await socket.send_bytes(struct.pack(">II", 1, 1) + b"\xff\xd8\xff a preview")


def comfy_plan(url: str, model: str = "sd15", **options: object) -> LoadPlan:
    return LoadPlan(model_id=model, backend="comfyui", slots=4, options={"server_url": url, **options})


def image_call(prompt: str = "a lighthouse", **fields: object) -> Call:
    body = {"model": "sd15", "prompt": prompt, "size": "64x64", "steps": 4, **fields}
    return Call("POST", IMAGES, {"content-type": "application/json"}, json.dumps(body).encode())


@contextlib.asynccontextmanager
async def open_comfyui(_folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter of a server of ours, and one for a checkpoint that cannot be read there."""
    async with ComfyContract(step_s=0.03).serve() as server:
        yield EngineUnderTest(
            engine=make_comfyui(comfy_plan(server.url), client), call=image_call(steps=2), streamed=image_call(stream=True),
            long=image_call(stream=True, steps=150, n=1), broken=make_comfyui(comfy_plan(server.url, "broken"), client),
            broken_words="HeaderTooLarge",
            running=lambda: len(server.pending) + (server.running is not None), flushes=frozenset({FlushResult.NOTHING_KEPT}),
        )  # fmt: skip


CASES = [EngineCase("comfyui", open_comfyui)]
