"""An engine that says what a test has it say: behind the runner's port, without a process and without HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Any, cast

import aiohttp
from multidict import CIMultiDict, CIMultiDictProxy

from runner.engines.port import CHAT, Call, Capabilities, EngineStats, FlushOutcome, FlushRequest, FlushResult, Health, Report
from wire import clock

PROMPT_TOKENS = 7
_EVENTS = "text/event-stream"
_JSON = "application/json"


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
        """Whether the engine works on it."""
        return self.state is CallState.RUNNING

    @property
    def untaken(self) -> int:
        """How many pieces the runner has not taken."""
        return self._chunks.qsize()

    def emit(self, count: int = 1, *, text: str = "") -> None:
        """Say ``count`` pieces of the answer, each with ``text`` behind its name."""
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
        """Break off: the connection is gone."""
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
        """Give a whole answer that is no JSON."""
        self.head.set_result(FakeResponse(200, kind, len(body), self._chunks))
        self._chunks.put_nowait(body)
        self._end(CallState.FINISHED, b"")

    def hang_up(self) -> None:
        """Called when the runner lets go of the answer."""
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
        """Return what is left."""
        parts = []
        while chunk := await self.readany():
            parts.append(chunk)
        return b"".join(parts)


class FakeEngine:
    """A loaded engine of any model. ``calls``: every request that it ever got, oldest first."""

    name = "fake"
    poll_s = 5.0
    restart_max_s = 5.0
    pids: tuple[int, ...] = ()

    def __init__(self, *, name: str, endpoints: Sequence[str] = (CHAT,)) -> None:
        self._name = name
        self.capabilities = Capabilities(tuple(endpoints))
        self.calls: list[EngineCall] = []

    @property
    def running(self) -> list[EngineCall]:
        """What it works on, oldest first."""
        return [call for call in self.calls if call.is_running]

    async def load(self, report: Report) -> None:
        """Be there."""
        del report

    async def unload(self, *, gently: bool) -> None:
        """Be gone."""
        del gently

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Keep nothing."""
        del request
        return FlushOutcome(FlushResult.NOTHING_KEPT)

    async def stats(self) -> EngineStats:
        """Say nothing."""
        return EngineStats()

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """Take a request; its answer begins when the test says so."""
        mine = EngineCall(self, call, f"{self._name}-{len(self.calls)}")
        self.calls.append(mine)
        try:
            yield cast("aiohttp.ClientResponse", await mine.head)
        finally:
            mine.hang_up()

    async def health(self) -> Health:
        """Be well."""
        return Health.OK

    async def wait_gone(self) -> None:
        """Never die."""
        await asyncio.Event().wait()
