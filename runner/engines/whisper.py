"""Whisper through faster-whisper, each model in a child process that brings OpenAI's audio endpoints."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import aiohttp

from runner.engines.library_child import LibraryChild, read_option
from runner.engines.port import (
    TRANSCRIPTIONS,
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

TRANSLATIONS = "/v1/audio/translations"
DEFAULT_MAX_UPLOAD_MB = 100


class WhisperEngine:
    """The adapter. Options of the plan: ``device``, ``compute_type`` (as for CTranslate2) and ``max_upload_mb``."""

    name = "whisper"
    poll_s = 2.0
    restart_max_s = 30.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._child = LibraryChild("runner.engines.children.whisper", client)

    @property
    def capabilities(self) -> Capabilities:
        """Translations only where the model knows languages. A client that leaves is noticed between segments."""
        translates = self._child.info.get("multilingual", True) is True
        return Capabilities(
            endpoints=(TRANSCRIPTIONS, TRANSLATIONS) if translates else (TRANSCRIPTIONS,),
            max_inflight=self._plan.slots,
            isolates_tenants=True,
            reports_progress=True,
            audio_input=True,
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """The child process."""
        return self._child.pids

    async def load(self, report: Report) -> None:
        """Start the child and load. Raises EngineError."""
        plan = self._plan
        if plan.path is None or not (plan.path / "model.bin").is_file():
            raise EngineError(f"{plan.model_id}: a folder with a Whisper model.bin of CTranslate2 is needed, got {plan.path}")
        limit_mb = read_option(plan.options, "max_upload_mb", int) or DEFAULT_MAX_UPLOAD_MB
        await self._child.start(
            {
                "folder": str(plan.path),
                "model_name": plan.model_id,
                "slots": plan.slots,
                "threads": plan.threads,
                "device": read_option(plan.options, "device", str) or ("cuda" if plan.gpu_ids else "cpu"),
                "device_index": list(plan.gpu_ids),
                "compute_type": read_option(plan.options, "compute_type", str) or plan.quantization or "default",
                "max_upload_bytes": limit_mb * 1024 * 1024,
            },
            report,
        )

    async def unload(self, *, gently: bool) -> None:
        """Have the child unload and exit, or kill it; return when it is gone."""
        await self._child.stop(gently=gently)

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Say that there is nothing to flush."""
        return FlushOutcome(
            FlushResult.NOT_SUPPORTED, f"Whisper keeps nothing between requests, so there is no {request.scope} to flush"
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
