"""An engine behind the port that loads, unloads and flushes when a test lets it: for what happens between two steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from runner.engines.port import (
    CHAT,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    Progress,
    Report,
)
from runner.errors import EngineError


class GatedEngine:
    """Every gate is open until a test closes it. ``flushes``: False = it can only be loaded anew to forget."""

    name = "gated"
    poll_s = 0.05
    restart_max_s = 0.05
    capabilities = Capabilities((CHAT,), prefix_caching=True)

    def __init__(self) -> None:
        self.may_load, self.may_unload, self.may_flush = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.may_load, self.may_unload, self.may_flush):
            gate.set()
        self.has_died = asyncio.Event()
        self.fails: BaseException | None = None
        self.refuses_unload: BaseException | None = None
        self.flushes = True
        self.is_loaded = False
        self.steps: list[str] = []
        self.calls: list[Call] = []
        self.report: Report | None = None
        """Where the load that is under way says how it goes on."""

    @property
    def pids(self) -> tuple[int, ...]:
        """A number that no process has, while it is loaded."""
        return (2**22 + 1,) if self.is_loaded else ()

    async def load(self, report: Report) -> None:
        """Load once the gate is open."""
        self.steps.append("load")
        self.report = report
        report(Progress("loading", 0.5))
        await self.may_load.wait()
        if self.fails is not None:
            raise self.fails
        self.has_died.clear()
        self.is_loaded = True

    async def unload(self, *, gently: bool) -> None:
        """Unload once the gate is open."""
        self.steps.append("unload" if gently else "kill")
        await self.may_unload.wait()
        if self.refuses_unload is not None:
            raise self.refuses_unload
        self.is_loaded = False

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Flush once the gate is open."""
        del request
        self.steps.append("flush")
        await self.may_flush.wait()
        if self.capabilities.keeps_nothing:
            return FlushOutcome(FlushResult.NOTHING_KEPT, "there is no cache")
        return FlushOutcome(FlushResult.FLUSHED if self.flushes else FlushResult.NOT_SUPPORTED)

    async def stats(self) -> EngineStats:
        """Say nothing."""
        return EngineStats()

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """Answer nobody."""
        self.calls.append(call)
        nobody: list[aiohttp.ClientResponse] = []
        for response in nobody:
            yield response
        raise EngineError(f"{call.path} is not served")

    async def health(self) -> Health:
        """Be well while it is loaded."""
        return Health.OK if self.is_loaded else Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Return when the test has it die."""
        await self.has_died.wait()
