"""ComfyUI, a server of somebody else's that runs graphs of nodes, offered as OpenAI's ``/v1/images/generations``.

It reads a checkpoint when a graph first needs it and keeps it until told to free its memory. So loading is a graph that needs
it, and unloading is telling, and watching the memory go. Requests go to a site of ours on loopback, which has ComfyUI carry
them out: so images are answered as every engine answers, and a client that leaves ends the handler that queued its prompts.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import random
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import msgspec
from aiohttp import web

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.children.web import Refusal, make_app, stream_events
from runner.engines.comfy_server import (
    LOADER,
    PREVIEW,
    ComfyServer,
    Value,
    Workflow,
    image_format,
    make_text_to_image,
    make_warm_up,
    open_job,
    read_workflow,
)
from runner.engines.http import HttpResponse, HttpServer
from runner.engines.http_engine import HttpEngine, bearer, read_option, read_url
from runner.engines.port import (
    IMAGES,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    Priority,
)
from runner.errors import EngineError, ModalityUnsupported
from runner.limits import limits
from wire import clock
from wire.unreadable import UNREADABLE

log = logging.getLogger(__name__)

# ---- requests and answers (OpenAI API reference) ----

MIN_SIDE, MAX_SIDE, SIDE_STEP = 64, 4096, 8
_SIZE = re.compile(r"([0-9]{1,5})x([0-9]{1,5})")


class _Body(msgspec.Struct):
    """The fields that mean something here. Others of OpenAI's (quality, style, background, user …) are passed over."""

    prompt: str
    n: int | None = None
    size: str | None = None
    response_format: str | None = None
    output_format: str | None = None
    stream: bool | None = None
    seed: int | None = None
    negative_prompt: str | None = None
    steps: int | None = None
    cfg: float | None = None


_decoder = msgspec.json.Decoder(_Body)
_FIELD_IN_ERROR = re.compile(r"`\$\.([^`]*)`|field `([^`]*)`")


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """A checked request. ``given`` are the fields the client named, so that a workflow can say which it cannot follow."""

    prompt: str
    negative_prompt: str
    count: int
    width: int
    height: int
    seed: int
    steps: int
    cfg: float
    is_streaming: bool
    given: frozenset[str]


def read_image_request(body: bytes, content_type: str) -> ImageRequest:
    """Return the request. Raises Refusal (400) naming the field; prompts are never repeated."""
    if content_type != "application/json":
        raise Refusal("Send the request as application/json; editing images is not offered.", param="content-type")
    try:
        fields = _decoder.decode(body)
    except msgspec.ValidationError as error:
        found = _FIELD_IN_ERROR.search(str(error))
        raise Refusal(f"Invalid request body: {error}.", param=(found[1] or found[2]) if found else None) from None
    except UNREADABLE:
        raise Refusal("The request body is not valid JSON.") from None
    _check_formats(fields)
    most = limits().comfyui
    if not 1 <= len(fields.prompt) <= most.prompt_chars:
        raise Refusal(f"prompt must have 1 to {most.prompt_chars} characters.", param="prompt")
    if len(fields.negative_prompt or "") > most.prompt_chars:
        raise Refusal(f"negative_prompt must have at most {most.prompt_chars} characters.", param="negative_prompt")
    width, height = _read_size(fields.size)
    names = ("size", "seed", "negative_prompt", "steps", "cfg")
    return ImageRequest(
        prompt=fields.prompt,
        negative_prompt=fields.negative_prompt or "",
        count=int(_within("n", fields.n, 1, 1, most.images)),
        width=width,
        height=height,
        seed=int(_within("seed", fields.seed, random.randint(0, most.seed), 0, most.seed)),  # noqa: S311  # not a secret
        steps=int(_within("steps", fields.steps, 20, 1, most.steps)),
        cfg=_within("cfg", fields.cfg, 7.0, 0.0, most.cfg),
        is_streaming=bool(fields.stream),
        given=frozenset(name for name in names if getattr(fields, name) not in {None, "auto"}),
    )


def render_images(request: ImageRequest, images: Sequence[bytes], *, has_size: bool) -> bytes:
    """Return the answer (OpenAI API reference, images response); ``has_size``: the images are as large as was asked."""
    answer: dict[str, object] = {
        "created": int(clock.unix_s()),
        "output_format": image_format(images[0]) if images else "png",
        "data": [{"b64_json": base64.b64encode(image).decode("ascii")} for image in images],
    }
    if has_size:
        answer["size"] = f"{request.width}x{request.height}"
    return msgspec.json.encode(answer)


def _event(kind: str, fields: dict[str, object]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **fields}))


def _check_formats(fields: _Body) -> None:
    if fields.response_format not in {None, "b64_json"}:
        raise Refusal(
            "response_format must be b64_json: this node keeps no images that an address could lead to.",
            param="response_format",
        )
    if fields.output_format not in {None, "png"}:
        raise Refusal("output_format must be png.", param="output_format")


def _read_size(size: str | None) -> tuple[int, int]:
    if size in {None, "auto"}:
        return 1024, 1024
    found = _SIZE.fullmatch(size or "")
    sides = (int(found[1]), int(found[2])) if found else (0, 0)
    is_allowed = all(MIN_SIDE <= side <= MAX_SIDE and side % SIDE_STEP == 0 for side in sides)
    if not is_allowed or sides[0] * sides[1] > limits().comfyui.pixels:
        raise Refusal(
            f"size must be auto or WIDTHxHEIGHT, each from {MIN_SIDE} to {MAX_SIDE} in steps of {SIDE_STEP}, and together"
            f" at most {limits().comfyui.pixels} pixels.",
            param="size",
        )
    return sides


def _within(name: str, value: float | None, default: float, minimum: float, maximum: float) -> float:
    if value is None:
        return default
    if not minimum <= value <= maximum:
        raise Refusal(f"{name} must be from {minimum:g} to {maximum:.19g}.", param=name)
    return value


# ---- the server that answers them ----

_PRIORITIES: dict[str, Priority] = {"high": "high", "normal": "normal", "low": "low"}

Piece = tuple[int, str] | bytes
"""Percent and stage, or an image."""


class ImageSite:
    """A server on a free loopback port; ``url`` and ``key`` are set once it runs. ``checkpoint`` fills the workflow."""

    def __init__(self, server: ComfyServer, workflow: Workflow, checkpoint: str) -> None:
        self._server = server
        self._workflow = workflow
        self._checkpoint = checkpoint
        self._runner: web.AppRunner | None = None
        self._handlers: set[asyncio.Task[object]] = set()
        self._cleaners: set[asyncio.Task[None]] = set()
        self.url = ""
        self.key = secrets.token_urlsafe(24)

    async def start(self) -> None:
        app = make_app(key=self.key, max_body_bytes=limits().comfyui.body_bytes)
        app.router.add_post(IMAGES, self._generate)
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """End what runs, and return when it was withdrawn or that was given up. Fine to call twice."""
        runner, self._runner = self._runner, None
        if runner is not None:
            for handler in self._handlers:
                handler.cancel()
            if self._handlers:
                await asyncio.wait(self._handlers, timeout=limits().comfyui.stop_s)
            await runner.cleanup()
        if self._cleaners:
            await asyncio.gather(*self._cleaners)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        task = asyncio.current_task()
        if task is not None:
            self._handlers.add(task)
            task.add_done_callback(self._handlers.discard)
        wanted = read_image_request(await request.read(), request.content_type)
        self._refuse_what_it_lacks(wanted)
        priority = _PRIORITIES.get(request.query.get("priority", ""), "normal")
        async with aclosing(self._make(wanted, priority)) as pieces:
            if wanted.is_streaming:
                begun = await anext(pieces)  # what goes wrong before it is an answer of its own
                return await stream_events(
                    request, _events(begun, pieces), end_with=lambda refusal: _event("error", refusal.render())
                )
            images = [piece async for piece in pieces if isinstance(piece, bytes)]
        body = await asyncio.to_thread(render_images, wanted, images, has_size="width" in self._workflow.placeholders)
        return web.Response(body=body, content_type="application/json")

    async def _make(self, wanted: ImageRequest, priority: Priority) -> AsyncGenerator[Piece, None]:
        has_batch = "batch_size" in self._workflow.placeholders
        runs = 1 if has_batch else wanted.count  # a workflow that makes one image at once is run for each
        for run in range(runs):
            values = self._values(wanted, run, batch_size=wanted.count if has_batch else 1)
            try:
                job = open_job(self._server, self._workflow.fill(values), priority=priority, cleaners=self._cleaners)
                async with job as opened, aclosing(opened.steps()) as steps:
                    async for step in steps:
                        yield round(100 * (run + step.fraction) / runs), step.stage
                    images = await opened.images()
            except EngineError as error:
                log.warning("images were not made: %s", error)
                raise Refusal("ComfyUI does not answer.", code="engine_failed", status=502) from None
            for image in images[: wanted.count if has_batch else 1]:
                yield image

    def _values(self, wanted: ImageRequest, run: int, *, batch_size: int) -> dict[str, Value]:
        return {
            "prompt": wanted.prompt,
            "negative_prompt": wanted.negative_prompt,
            "width": wanted.width,
            "height": wanted.height,
            "seed": wanted.seed + run,
            "steps": wanted.steps,
            "cfg": wanted.cfg,
            "batch_size": batch_size,
            "checkpoint": self._checkpoint,
        }

    def _refuse_what_it_lacks(self, wanted: ImageRequest) -> None:
        # Not passed over: an image of another size is not what was asked for.
        for name in sorted(wanted.given):
            needed = {"width", "height"} if name == "size" else {name}
            if not needed <= self._workflow.placeholders:
                raise Refusal(f"The workflow of this model sets {name} itself; leave it out.", param=name)


async def _events(piece: Piece | None, others: AsyncGenerator[Piece, None]) -> AsyncIterator[bytes]:
    index = 0
    while piece is not None:
        if isinstance(piece, bytes):
            yield await asyncio.to_thread(_completed_event, piece, index)
            index += 1
        else:  # OpenAI has no such event, and its clients pass over types they do not know
            yield _event("image_generation.progress", {"percent": piece[0], "stage": piece[1]})
        piece = await anext(others, None)


def _completed_event(image: bytes, index: int) -> bytes:
    fields = {
        "b64_json": base64.b64encode(image).decode("ascii"),
        "created_at": int(clock.unix_s()),
        "output_format": image_format(image),
        "index": index,
    }
    return _event("image_generation.completed", fields)


# ---- the adapter ----


def make_comfyui(plan: LoadPlan, client: aiohttp.ClientSession) -> HttpEngine:
    server = HttpServer()
    comfy = ComfyModel(plan, server, client)
    return HttpEngine(
        server, comfy, comfy, name="comfyui", poll_s=5.0, restart_max_s=60.0, check=comfy.check, give_up=comfy.give_up
    )


class ComfyModel:
    """Loader and probe in one. ``server`` is the ImageSite of the model, through which requests go."""

    is_attached = False
    has_metrics = False
    child = None

    def __init__(self, plan: LoadPlan, server: HttpServer, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._client = client
        self._server = server
        # Set from when it may hold the model.
        self._comfy: ComfyServer | None = None
        self._site: ImageSite | None = None
        self.capabilities = Capabilities(endpoints=(IMAGES,), keeps_nothing=True, engine_priority=True)

    async def load(self, report: Report) -> None:
        await self._stop_site()
        workflow = await self._read_workflow()
        comfy = ComfyServer(self._client, read_url(self._plan, example="http://127.0.0.1:8188"), bearer(self._plan))
        report(Progress("asking the server"))
        version = await comfy.version()
        checkpoint = await self._check_nodes(comfy, workflow)
        self._comfy = comfy
        if (LOADER, "ckpt_name") in workflow.checkpoint_inputs:
            await self._warm_up(comfy, checkpoint, report)
        self._site = site = ImageSite(comfy, workflow, checkpoint)
        await site.start()
        self._server.base_url, self._server.headers = site.url, {"Authorization": f"Bearer {site.key}"}
        self.capabilities = replace(self.capabilities, version=version)
        report(Progress("ready", 1.0))

    async def give_up(self) -> None:
        await self._stop_site()
        comfy, self._comfy = self._comfy, None
        if comfy is not None:
            with contextlib.suppress(EngineError):
                await comfy.free()  # what it does then is not waited for

    async def unload(self, *, gently: bool) -> None:
        """Withdraw what runs, have ComfyUI free its memory, and see it go, as far as a GPU shows that.

        Raises EngineError when it keeps it. A server that is gone holds nothing.
        """
        del gently  # it frees its memory when it is idle, and nothing makes it do so earlier
        await self._stop_site()
        if self._comfy is None:
            return
        if await self._comfy.check() is not Health.UNREACHABLE:
            await self._free(self._comfy)
        self._comfy = None

    def send(self, call: Call) -> HttpResponse:
        """Also raises ModalityUnsupported for any request but one for images."""
        if call.method != "POST" or call.path.partition("?")[0] != IMAGES:
            raise ModalityUnsupported(f"{self._plan.model_id} answers {IMAGES} only.", param="model")
        return self._server.send(call, path=f"{IMAGES}?priority={call.priority}")

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        return FlushOutcome(FlushResult.NOTHING_KEPT, "image models have no KV cache; unload frees what the server keeps")

    async def read_stats(self) -> EngineStats:
        if self._comfy is None:
            return EngineStats()
        queue = await self._comfy.waiting()  # everybody's
        return EngineStats(running=len(queue.running), waiting=len(queue.pending))

    async def check(self) -> Health:
        return await self._comfy.check() if self._comfy is not None else Health.UNREACHABLE

    async def _stop_site(self) -> None:
        site, self._site = self._site, None
        if site is not None:
            await site.stop()

    async def _read_workflow(self) -> Workflow:
        name = read_option(self._plan.options, "comfyui_workflow", str)
        if not name:
            return make_text_to_image()
        try:
            return read_workflow(await asyncio.to_thread(_read_file, Path(name)))
        except OSError as error:
            raise EngineError(f"comfyui_workflow {name} cannot be read: {error.strerror}") from None

    async def _check_nodes(self, comfy: ComfyServer, workflow: Workflow) -> str:
        """Return the checkpoint's name on the server, empty when the workflow names its own.

        Raises EngineError when a node or the checkpoint is not there, listing what is.
        """
        choices = {node_type: await comfy.node_choices(node_type) for node_type in workflow.node_types}
        if missing := sorted(node_type for node_type, found in choices.items() if found is None):
            raise EngineError(f"{comfy.url} lacks nodes of the workflow: {', '.join(missing)}; install them there")
        wanted = read_option(self._plan.options, "server_model", str) or self._plan.model_id
        checkpoint = "" if not workflow.checkpoint_inputs else wanted
        for node_type, name in workflow.checkpoint_inputs:
            checkpoint = _find_file(wanted, (choices[node_type] or {}).get(name, []), comfy.url)
        return checkpoint

    async def _warm_up(self, comfy: ComfyServer, checkpoint: str, report: Report) -> None:
        report(Progress("loading the checkpoint"))
        graph = make_warm_up(checkpoint, has_preview=await comfy.node_choices(PREVIEW) is not None)
        cleaners: set[asyncio.Task[None]] = set()
        try:
            async with open_job(comfy, graph, priority="normal", cleaners=cleaners) as job, aclosing(job.steps()) as steps:
                async for step in steps:
                    report(Progress(f"loading the checkpoint ({step.stage})", min(step.fraction, 0.99) or None))
        except Refusal as refusal:
            if refusal.code != "workflow_refused":  # otherwise the first request loads it
                raise EngineError(refusal.message) from None

    async def _free(self, comfy: ComfyServer) -> None:
        before = await comfy.reserved_bytes()
        await comfy.free()
        if before is None or before <= limits().comfyui.nothing_bytes:
            return
        bounds = limits().comfyui
        lowest, lowest_at, give_up_at = before, clock.monotonic(), clock.monotonic() + bounds.free_s
        while True:
            reserved, now = await comfy.reserved_bytes() or 0, clock.monotonic()
            if reserved < lowest:
                lowest, lowest_at = reserved, now
            if reserved <= bounds.nothing_bytes or (lowest < before and now - lowest_at >= bounds.steady_s):
                return
            if now >= give_up_at:
                raise EngineError(
                    f"{comfy.url} still holds {reserved // 2**20} MB of GPU memory {bounds.free_s:.0f} s after it was told to"
                    " free it: it may be at work for somebody else; unload again when it is idle"
                )
            await asyncio.sleep(bounds.free_poll_s)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(limits().comfyui.workflow_bytes + 1)


def _find_file(wanted: str, names: list[str], url: str) -> str:
    if wanted in names:
        return wanted
    alike = [name for name in names if name.rpartition(".")[0] == wanted]
    if len(alike) == 1:
        return alike[0]
    most = limits().engines.names
    listed = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    raise EngineError(f"{url} has no checkpoint {wanted}; it has {listed or 'none'}: set server_model to one of them")
