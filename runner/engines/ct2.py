"""CTranslate2 text models, each in a child process. It has no HTTP server of its own, so the child brings ours."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import aiohttp

from runner.engines.library_child import LibraryChild, read_option
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    LoadPlan,
    Report,
)
from runner.errors import EngineError


class Ct2Engine:
    """The adapter. Options of the plan: ``device`` (cpu, cuda or auto) and ``compute_type`` (as CTranslate2 names them)."""

    name = "ct2"
    poll_s = 2.0
    restart_max_s = 30.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._child = LibraryChild("runner.engines.children.ct2", client)

    @property
    def capabilities(self) -> Capabilities:
        """Chat only where the model brings a template. Nothing is kept between requests, so tenants cannot meet."""
        has_chat = self._child.info.get("chat", True) is True
        return Capabilities(
            endpoints=(CHAT, COMPLETIONS) if has_chat else (COMPLETIONS,),
            max_inflight=self._plan.slots,
            isolates_tenants=True,
            reports_progress=True,
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """The child process."""
        return self._child.pids

    async def load(self, report: Report) -> None:
        """Start the child and load. Raises EngineError."""
        plan = self._plan
        if plan.path is None or not (plan.path / "model.bin").is_file():
            raise EngineError(f"{plan.model_id}: a folder with a CTranslate2 model.bin is needed, got {plan.path}")
        await self._child.start(
            {
                "folder": str(plan.path),
                "model_name": plan.model_id,
                "slots": plan.slots,
                "threads": plan.threads,
                "device": read_option(plan.options, "device", str) or ("cuda" if plan.gpu_ids else "cpu"),
                "device_index": list(plan.gpu_ids),
                "compute_type": read_option(plan.options, "compute_type", str) or plan.quantization or "default",
                "context_tokens": plan.context_tokens or 0,
            },
            report,
        )

    async def unload(self, *, gently: bool) -> None:
        """Have the child unload and exit, or kill it; return when it is gone."""
        await self._child.stop(gently=gently)

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Say that there is nothing to flush."""
        return FlushOutcome(
            FlushResult.NOT_SUPPORTED, f"CTranslate2 keeps nothing between requests, so there is no {request.scope} to flush"
        )

    async def stats(self) -> EngineStats:
        """Return running and waiting requests; the library tells no more."""
        return await self._child.stats()

    def stream(self, call: Call) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Send a request to the child."""
        return self._child.send(call)

    async def health(self) -> Health:
        """Ask the child once."""
        return await self._child.health()

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        await self._child.wait_gone()
