"""The adapter for ComfyUI, a server of somebody else's that makes images.

It reads a checkpoint when a graph first needs it and keeps it until told to free its memory. So loading is a graph that needs
it, and unloading is telling, and watching the memory go.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.children.web import Refusal
from runner.engines.comfyui.job import open_job
from runner.engines.comfyui.server import ComfyServer
from runner.engines.comfyui.site import ImageSite
from runner.engines.comfyui.workflow import (
    LOADER,
    PREVIEW,
    Workflow,
    make_text_to_image,
    make_warm_up,
    read_workflow,
)
from runner.engines.elsewhere import bearer, read_url
from runner.engines.http import HttpServer
from runner.engines.library_child import read_option
from runner.engines.port import (
    IMAGES,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    Response,
)
from runner.errors import EngineError, ModalityUnsupported
from runner.limits import limits
from wire import clock


class ComfyUiEngine:
    """The adapter. Options: ``server_url``; ``server_api_key_env``, the variable with the key of a proxy in front of it;
    ``server_model``, the checkpoint's file there (the model's id unless given); ``comfyui_workflow``, the owner's template.
    """

    name = "comfyui"
    poll_s = 5.0
    restart_max_s = 60.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._client = client
        self._door = HttpServer(client)
        self._server: ComfyServer | None = None
        self._site: ImageSite | None = None
        self.capabilities = Capabilities(
            endpoints=(IMAGES,), max_inflight=plan.slots, keeps_nothing=True, engine_priority=True, reports_progress=True
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """None is ours."""
        return ()

    async def load(self, report: Report) -> None:
        """Check that the server can run the workflow with the checkpoint, and have it read that. Raises EngineError."""
        await self._stop_site()
        workflow = await self._read_workflow()
        server = ComfyServer(self._client, read_url(self._plan, example="http://127.0.0.1:8188"), bearer(self._plan))
        report(Progress("asking the server"))
        version = await server.version()
        checkpoint = await self._check_nodes(server, workflow)
        if (LOADER, "ckpt_name") in workflow.checkpoint_inputs:
            # From here on the server may hold the model, so an unload has to ask it to let go.
            self._server = server
            try:
                await self._warm_up(server, checkpoint, report)
            except BaseException:
                await self._give_up(server)
                raise
        site = ImageSite(server, workflow, checkpoint)
        await site.start()
        self._door.base_url, self._door.headers = site.url, {"Authorization": f"Bearer {site.key}"}
        self._server, self._site = server, site
        self.capabilities = replace(self.capabilities, version=version)
        report(Progress("ready", 1.0))

    async def unload(self, *, gently: bool) -> None:
        """Withdraw what runs, have the server free its memory, and see it go, as far as a GPU shows that.

        Raises EngineError when the server keeps it. A server that is gone holds nothing.
        """
        del gently  # the server frees its memory when it is idle, and nothing makes it do so earlier
        await self._stop_site()
        server = self._server
        if server is None:
            return
        if await server.check() is not Health.UNREACHABLE:
            await self._free(server)
        self._server = None

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Say that there is no such thing."""
        del request
        return FlushOutcome(FlushResult.NOTHING_KEPT, "image models have no KV cache; unload frees what the server keeps")

    async def stats(self) -> EngineStats:
        """Return how many prompts run and wait on the server, everybody's."""
        if self._server is None or self._site is None:
            return EngineStats()
        try:
            queue = await self._server.waiting()
        except EngineError:
            return EngineStats()
        return EngineStats(running=len(queue.running), waiting=len(queue.pending))

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Response]:
        """Send a request for images. Raises aiohttp.ClientError, OSError, and ModalityUnsupported for any other."""
        if self._site is None:
            raise aiohttp.ClientConnectionError("ComfyUI is not loaded")
        if call.method != "POST" or call.path.partition("?")[0] != IMAGES:
            raise ModalityUnsupported(f"{self._plan.model_id} answers {IMAGES} only.", param="model")
        async with self._door.send(call, path=f"{IMAGES}?priority={call.priority}") as response:
            yield response

    async def health(self) -> Health:
        """Ask the server for its queue."""
        if self._server is None or self._site is None:
            return Health.UNREACHABLE
        return await self._server.check()

    async def wait_gone(self) -> None:
        """Never return: it is a server of somebody else's."""
        await asyncio.get_running_loop().create_future()

    async def _stop_site(self) -> None:
        site, self._site = self._site, None
        self._door.close()
        if site is not None:
            await site.stop()

    async def _read_workflow(self) -> Workflow:
        """Return the owner's template, or one of ours. Raises EngineError."""
        name = read_option(self._plan.options, "comfyui_workflow", str)
        if not name:
            return make_text_to_image()
        try:
            return read_workflow(await asyncio.to_thread(_read_file, Path(name)))
        except OSError as error:
            raise EngineError(f"comfyui_workflow {name} cannot be read: {error.strerror}") from None

    async def _check_nodes(self, server: ComfyServer, workflow: Workflow) -> str:
        """Return the checkpoint's name on the server, empty when the workflow names its own.

        Raises EngineError when a node or the checkpoint is not there, listing what is.
        """
        choices = {node_type: await server.node_choices(node_type) for node_type in workflow.node_types}
        if missing := sorted(node_type for node_type, found in choices.items() if found is None):
            raise EngineError(f"{server.url} lacks nodes of the workflow: {', '.join(missing)}; install them there")
        wanted = read_option(self._plan.options, "server_model", str) or self._plan.model_id
        checkpoint = "" if not workflow.checkpoint_inputs else wanted
        for node_type, name in workflow.checkpoint_inputs:
            checkpoint = _find_file(wanted, (choices[node_type] or {}).get(name, []), server.url)
        return checkpoint

    async def _warm_up(self, server: ComfyServer, checkpoint: str, report: Report) -> None:
        """Have the server read the checkpoint, where a graph for that is accepted. Raises EngineError with the node's words."""
        report(Progress("loading the checkpoint"))
        graph = make_warm_up(checkpoint, has_preview=await server.node_choices(PREVIEW) is not None)
        cleaners: set[asyncio.Task[None]] = set()
        try:
            async with open_job(server, graph, priority="normal", cleaners=cleaners) as job, aclosing(job.steps()) as steps:
                async for step in steps:
                    report(Progress(f"loading the checkpoint ({step.stage})", min(step.fraction, 0.99) or None))
        except Refusal as refusal:
            if refusal.code != "workflow_refused":  # otherwise the first request loads it
                raise EngineError(refusal.message) from None

    async def _give_up(self, server: ComfyServer) -> None:
        """Ask for the memory of a load that nobody wants any more, and wait for nothing."""
        self._server = None
        with contextlib.suppress(EngineError):
            await server.free()

    async def _free(self, server: ComfyServer) -> None:
        """Have the server free its memory. Raises EngineError when it refuses, or keeps it."""
        before = await server.reserved_bytes()
        await server.free()
        if before is None or before <= limits().comfyui.nothing_bytes:
            return
        bounds = limits().comfyui
        lowest, lowest_at, give_up_at = before, clock.monotonic(), clock.monotonic() + bounds.free_s
        while True:
            reserved, now = await server.reserved_bytes() or 0, clock.monotonic()
            if reserved < lowest:
                lowest, lowest_at = reserved, now
            if reserved <= bounds.nothing_bytes or (lowest < before and now - lowest_at >= bounds.steady_s):
                return
            if now >= give_up_at:
                raise EngineError(
                    f"{server.url} still holds {reserved // 2**20} MB of GPU memory {bounds.free_s:.0f} s after it was told to"
                    " free it: it may be at work for somebody else; unload again when it is idle"
                )
            await asyncio.sleep(bounds.free_poll_s)


def _read_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(limits().comfyui.workflow_bytes + 1)


def _find_file(wanted: str, names: list[str], url: str) -> str:
    """Return the file a checkpoint is in: of exactly that name, or the only one that is called so but for its ending."""
    if wanted in names:
        return wanted
    alike = [name for name in names if name.rpartition(".")[0] == wanted]
    if len(alike) == 1:
        return alike[0]
    most = limits().engines.names
    listed = ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
    raise EngineError(f"{url} has no checkpoint {wanted}; it has {listed or 'none'}: set server_model to one of them")
