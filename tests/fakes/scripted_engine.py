"""An engine behind the port that does what a test says, and the GPU that engines share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

import aiohttp
from multidict import CIMultiDict

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
from runner.telemetry import Reading, Telemetry, TreeMemory
from wire import clock
from wire.bridge import GpuInfo

MIB = 1024 * 1024
FIRST_PID = 2**22 + 1
"""A number that no process has."""


class Gpu(Telemetry):
    """A node's only GPU, and the telemetry of it. ``others_mb``: what programs that are not ours hold."""

    def __init__(self, total_mb: int) -> None:
        super().__init__(nvml=None, cards=())
        self.total_mb = total_mb
        self.others_mb = 0
        self.held_mb: dict[int, int] = {}
        """By process."""

    @property
    def free_mb(self) -> int:
        """What nobody holds."""
        return self.total_mb - self.others_mb - sum(self.held_mb.values())

    def take(self, pid: int, size_mb: int) -> None:
        """Give a process memory. Raises EngineError."""
        if size_mb > self.free_mb:
            raise EngineError("out of memory")
        self.held_mb[pid] = size_mb

    def sample(self) -> Reading:
        """Return how full it is."""
        used_mb = self.total_mb - self.free_mb
        gpu = GpuInfo(index=0, name="Fake", memory_total_mb=self.total_mb, memory_used_mb=used_mb)
        return Reading(
            gpus=[gpu], kind="gpu", total_mb=self.total_mb, used_mb=used_mb, free_mb=self.free_mb, driver_version=None,
            at=clock.unix_s(),
        )  # fmt: skip

    def measure(self, roots: Sequence[int]) -> TreeMemory:
        """Return what processes hold."""
        held = [pid for pid in roots if pid in self.held_mb]
        return TreeMemory(host_bytes=0, gpu_bytes=sum(self.held_mb[pid] for pid in held) * MIB, pids=tuple(held))


class FakeAnswer:
    """One streamed answer, to be filled by the test: what the runner reads of an ``aiohttp.ClientResponse``."""

    status = 200
    content_type = "text/event-stream"
    content_length = None

    def __init__(self, call: Call) -> None:
        self.call = call
        self.headers = CIMultiDict({"Content-Type": self.content_type})
        self.content = self
        self._chunks: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    async def readany(self) -> bytes:
        """Return what comes next, nothing at the end."""
        chunk = await self._chunks.get()
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    def emit(self, event: str) -> None:
        """Have the engine say something."""
        self._chunks.put_nowait(b"data: %b\n\n" % event.encode())

    def finish(self) -> None:
        """Have the answer end as it should."""
        self.emit('{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}')
        self.emit("[DONE]")
        self._chunks.put_nowait(b"")

    def break_off(self) -> None:
        """Have the connection break."""
        self._chunks.put_nowait(aiohttp.ClientPayloadError("the connection broke"))


class FakeEngine:
    """Every gate is open until a test closes it. ``flushes``: False = it can only be loaded anew to forget.

    ``serves``: False = it answers nobody. Loaded, it is the process ``pid`` and holds ``size_mb`` of ``gpu``.
    """

    name = "gated"
    poll_s = 0.05
    restart_max_s = 0.05
    capabilities = Capabilities((CHAT,), prefix_caching=True)

    def __init__(self, *, pid: int = FIRST_PID, gpu: Gpu | None = None, size_mb: int = 0, serves: bool = False) -> None:
        self._pid, self._gpu, self._size_mb, self._serves = pid, gpu, size_mb, serves
        self.may_load, self.may_unload, self.may_flush = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.may_load, self.may_unload, self.may_flush):
            gate.set()
        self.has_died = asyncio.Event()
        self.fails: BaseException | None = None
        self.refuses_unload: BaseException | None = None
        self.flushes = True
        self.is_silent = False
        self.is_loading = False
        self.is_loaded = False
        self.steps: list[str] = []
        self.calls: list[Call] = []
        self.answers: list[FakeAnswer] = []
        """Those under way."""
        self.report: Report | None = None
        """Where the load that is under way says how it goes on."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Its process, while it is loaded."""
        return (self._pid,) if self.is_loaded else ()

    async def load(self, report: Report) -> None:
        """Load once the gate is open."""
        assert not self.is_loading, "it is being loaded twice"
        assert not self.is_loaded, "it is loaded already"
        self.steps.append("load")
        self.report = report
        self.is_loading = True
        try:
            report(Progress("loading", 0.5))
            await self.may_load.wait()
            if self.fails is not None:
                raise self.fails
            if self._gpu is not None:
                self._gpu.take(self._pid, self._size_mb)
        finally:
            self.is_loading = False
        self.has_died.clear()
        self.is_silent = False
        self.is_loaded = True

    async def unload(self, *, gently: bool) -> None:
        """Unload once the gate is open."""
        self.steps.append("unload" if gently else "kill")
        await self.may_unload.wait()
        if self.refuses_unload is not None:
            raise self.refuses_unload
        self._vanish()

    def die(self) -> None:
        """End as a killed process does."""
        self._vanish()
        self.has_died.set()

    def _vanish(self) -> None:
        self.is_loaded = False
        if self._gpu is not None:
            self._gpu.held_mb.pop(self._pid, None)
        for answer in self.answers:
            answer.break_off()

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
        """Answer as the test goes on to say, until the client leaves."""
        self.calls.append(call)
        if not self._serves:
            raise EngineError(f"{call.path} is not served")
        if not self.is_loaded:
            raise aiohttp.ServerDisconnectedError
        answer = FakeAnswer(call)
        self.answers.append(answer)
        try:
            yield cast("aiohttp.ClientResponse", answer)  # the runner reads no more of one
        finally:
            self.answers.remove(answer)

    async def health(self) -> Health:
        """Be well while it is loaded."""
        if not self.is_loaded:
            return Health.UNREACHABLE
        return Health.SILENT if self.is_silent else Health.OK

    async def wait_gone(self) -> None:
        """Return when the test has it die."""
        await self.has_died.wait()
