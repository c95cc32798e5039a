"""An engine that does and says what a test has it do and say, behind the runner's port, and the GPU that engines share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any, cast

import aiohttp
import msgspec
from multidict import CIMultiDict, CIMultiDictProxy

from runner.definitions.plan import Progress, Report
from runner.engines.port import (
    CHAT,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    LoopOwner,
)
from runner.errors import EngineError
from runner.telemetry import Reading, Telemetry
from runner.telemetry.memory import TreeMemory
from wire import clock
from wire.bridge import GpuInfo

MIB = 1024 * 1024
FIRST_PID = 2**22 + 1
"""A number that no process has."""
PROMPT_TOKENS = 7
_EVENTS = "text/event-stream"
_JSON = "application/json"


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
        return self.total_mb - self.others_mb - sum(self.held_mb.values())

    def take(self, pid: int, size_mb: int) -> None:
        """Give a process memory. Raises EngineError."""
        if size_mb > self.free_mb:
            raise EngineError("out of memory")
        self.held_mb[pid] = size_mb

    def sample(self) -> Reading:
        used_mb = self.total_mb - self.free_mb
        gpu = GpuInfo(index=0, name="Fake", memory_total_mb=self.total_mb, memory_used_mb=used_mb)
        return Reading(
            gpus=[gpu], kind="gpu", total_mb=self.total_mb, used_mb=used_mb, free_mb=self.free_mb,
        )  # fmt: skip

    def measure(self, roots: Sequence[int]) -> TreeMemory:
        held = [pid for pid in roots if pid in self.held_mb]
        return TreeMemory(host_bytes=0, gpu_bytes=sum(self.held_mb[pid] for pid in held) * MIB, pids=tuple(held))


class CallState(StrEnum):
    """Where a call to the engine stands."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    """Its caller hung up before the end."""


class EngineCall:
    """One request as the engine has it. ``number`` is its ``max_tokens``, by which a Fleet tells requests apart.

    Nothing goes out before ``emit``, ``finish``, ``fail`` or ``refuse``; each piece of text names the call and its place in it.
    """

    def __init__(self, engine: FakeEngine, call: Call, ident: str) -> None:
        is_json = call.headers.get("content-type", _JSON).startswith(_JSON)
        fields: dict[str, Any] = json.loads(call.body) if is_json else {}
        self.engine, self.call, self.ident = engine, call, ident
        self.number = int(fields.get("max_tokens") or fields.get("max_completion_tokens") or 0)
        self.is_streaming = bool(fields.get("stream"))
        self.state = CallState.RUNNING
        self.began_at = clock.monotonic()
        self.ended_at: float | None = None
        """clock.monotonic() seconds."""
        self.emitted: list[str] = []
        self.head: asyncio.Future[FakeResponse] = asyncio.get_running_loop().create_future()
        self._chunks: asyncio.Queue[bytes | Exception] = asyncio.Queue()

    @property
    def is_running(self) -> bool:
        return self.state is CallState.RUNNING

    @property
    def untaken(self) -> int:
        return self._chunks.qsize()

    def emit(self, count: int = 1, *, text: str = "") -> None:
        for _ in range(count):
            piece = f"<{self.ident}.{len(self.emitted)}>" + text
            self.emitted.append(piece)
            if self.is_streaming:
                self._say({"choices": [{"index": 0, "delta": {"content": piece}, "finish_reason": None}]})

    def finish(self) -> None:
        """End the answer as it should end, with its usage: a token for each piece."""
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": len(self.emitted)}
        if self.is_streaming:
            self._say({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
            self._say({"choices": [], "usage": usage})
            self._send(b"data: [DONE]\n\n")
        else:
            message = {"role": "assistant", "content": "".join(self.emitted)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self._answer(200, {"choices": [choice], "usage": usage})
        self._end(CallState.FINISHED, b"")

    def fail(self) -> None:
        error = aiohttp.ClientPayloadError("the engine died")
        if not self.head.done():
            self.head.set_exception(aiohttp.ServerDisconnectedError("the engine died"))
        self._end(CallState.FAILED, error)

    def refuse(self, status: int = 400) -> None:
        """Answer with an error; nothing was said before."""
        assert not self.emitted or not self.is_streaming
        self._answer(status, {"error": {"message": f"refused {self.ident}", "type": "invalid_request_error"}})
        self._end(CallState.FINISHED, b"")

    def reply(self, body: bytes, kind: str) -> None:
        self.head.set_result(FakeResponse(200, kind, len(body), self._chunks))
        self._chunks.put_nowait(body)
        self._end(CallState.FINISHED, b"")

    def hang_up(self) -> None:
        if self.is_running:
            self._end(CallState.CANCELLED, b"")

    # inside

    def _say(self, fields: dict[str, Any]) -> None:
        chunk = {"id": self.ident, "object": "chat.completion.chunk", "created": 1, "model": "m", **fields}
        self._send(b"data: " + json.dumps(chunk).encode() + b"\n\n")

    def _send(self, data: bytes) -> None:
        if not self.head.done():
            self.head.set_result(FakeResponse(200, _EVENTS, None, self._chunks))
        self._chunks.put_nowait(data)

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps({"id": self.ident, "object": "chat.completion", "created": 1, "model": "m", **body}).encode()
        self.head.set_result(FakeResponse(status, _JSON, len(raw), self._chunks))
        self._chunks.put_nowait(raw)

    def _end(self, state: CallState, last: bytes | Exception) -> None:
        self.state, self.ended_at = state, clock.monotonic()
        self._chunks.put_nowait(last)


class FakeResponse:
    """What the runner reads of ``aiohttp.ClientResponse``."""

    def __init__(self, status: int, kind: str, length: int | None, chunks: asyncio.Queue[bytes | Exception]) -> None:
        headers = {"content-type": kind} | ({} if length is None else {"content-length": str(length)})
        self.status, self.content_type, self.content_length = status, kind, length
        self.headers = CIMultiDictProxy(CIMultiDict(headers))
        self.content = self
        self._chunks = chunks

    async def readany(self) -> bytes:
        """Return the next bytes, none at the end. Raises aiohttp.ClientError when the engine broke off."""
        chunk = await self._chunks.get()
        if isinstance(chunk, Exception):
            raise chunk
        return chunk

    async def read(self) -> bytes:
        parts = []
        while chunk := await self.readany():
            parts.append(chunk)
        return b"".join(parts)


class FakeEngine:
    """Every gate is open until a test closes it. ``flushes``: False = it can only be loaded anew to forget.

    ``serves``: False = it answers nobody. Loaded, it is the process ``pid`` and holds ``size_mb`` of ``gpu``.
    ``name``: how the ident of each of its calls begins.
    """

    name = "gated"
    poll_s = 0.05
    restart_max_s = 0.05
    loop: LoopOwner | None = None

    def __init__(
        self, *, name: str = "", endpoints: Sequence[str] = (CHAT,), pid: int = FIRST_PID, gpu: Gpu | None = None,
        size_mb: int = 0, serves: bool = False,
    ) -> None:  # fmt: skip
        self._name = name
        self.capabilities = Capabilities(tuple(endpoints), prefix_caching=True)
        self._pid, self._gpu, self._size_mb, self._serves = pid, gpu, size_mb, serves
        self.may_load, self.may_unload, self.may_flush = asyncio.Event(), asyncio.Event(), asyncio.Event()
        for gate in (self.may_load, self.may_unload, self.may_flush):
            gate.set()
        self.has_died = asyncio.Event()
        self.ends: EngineError | None = None
        """Why it is over, where another node says so, once it has died."""
        self.fails: BaseException | None = None
        self.refuses_unload: BaseException | None = None
        self.flushes = True
        self.is_silent = False
        self.is_loading = False
        self.is_loaded = False
        self.steps: list[str] = []
        self.calls: list[EngineCall] = []
        """Every request that it ever got, oldest first."""
        self.open_calls: list[EngineCall] = []
        """Those whose caller has not let go."""
        self.report: Report | None = None
        """Where the load that is under way says how it goes on."""

    @property
    def running(self) -> list[EngineCall]:
        return [call for call in self.open_calls if call.is_running]

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._pid,) if self.is_loaded else ()

    async def load(self, report: Report) -> None:
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
        self.steps.append("unload" if gently else "kill")
        await self.may_unload.wait()
        if self.refuses_unload is not None:
            raise self.refuses_unload
        self._vanish()

    def die(self) -> None:
        self._vanish()
        self.has_died.set()

    def _vanish(self) -> None:
        self.is_loaded = False
        if self._gpu is not None:
            self._gpu.held_mb.pop(self._pid, None)
        for call in self.running:
            call.fail()

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        del request
        self.steps.append("flush")
        await self.may_flush.wait()
        if self.capabilities.keeps_nothing:
            return FlushOutcome(FlushResult.NOTHING_KEPT, "there is no cache")
        return FlushOutcome(FlushResult.FLUSHED if self.flushes else FlushResult.NOT_SUPPORTED)

    async def stats(self) -> EngineStats:
        return EngineStats()

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """Answer as the test goes on to say, until the client leaves."""
        mine = EngineCall(self, call, f"{self._name}-{len(self.calls)}")
        self.calls.append(mine)
        if not self._serves:
            raise EngineError(f"{call.path} is not served")
        if not self.is_loaded:
            raise aiohttp.ServerDisconnectedError
        self.open_calls.append(mine)
        try:
            yield cast("aiohttp.ClientResponse", await mine.head)  # the runner reads no more of one
        finally:
            mine.hang_up()
            self.open_calls.remove(mine)

    async def health(self) -> Health:
        if not self.is_loaded:
            return Health.UNREACHABLE
        return Health.SILENT if self.is_silent else Health.OK

    async def wait_gone(self) -> None:
        await self.has_died.wait()
        if self.ends is not None:
            raise self.ends

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        raise EngineError(f"a fake counts nothing of {len(fields)} fields")

    async def read_metrics(self) -> str:
        return ""
