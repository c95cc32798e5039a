"""llama-server in router mode: one model of it, loaded, followed, unloaded."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import msgspec

from runner.definitions.plan import Progress, Report
from runner.engines.http import HttpServer
from runner.engines.port import Call
from runner.errors import EngineError
from runner.limits import limits
from wire import clock


class Status(msgspec.Struct):
    """State of a model: unloaded, loading, loaded, sleeping, downloading or failed; ``exit_code`` of what served it."""

    value: str = ""
    failed: bool = False
    exit_code: int | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether it answers; a sleeping one wakes up for that."""
        return self.value in {"loaded", "sleeping"}

    @property
    def has_failed(self) -> bool:
        """Whether its last load went wrong."""
        return self.failed or self.value == "failed"


class _Model(msgspec.Struct):
    id: str
    status: Status | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = []


class _Share(msgspec.Struct):
    current: str | None = None
    value: float | None = None


class _EventData(msgspec.Struct):
    progress: _Share | None = None


class _Event(msgspec.Struct):
    model: str = ""
    data: _EventData = msgspec.field(default_factory=_EventData)


class _Problem(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Problem = msgspec.field(default_factory=_Problem)


class LlamaRouter:
    """One model of a router; ``model`` is the router's own name for it."""

    def __init__(self, server: HttpServer, model: str) -> None:
        self._server = server
        self._model = model

    @staticmethod
    def is_one(listed: bytes) -> bool:
        """Return whether an answer to ``GET /models`` is a router's: each model has a state."""
        try:
            models = msgspec.json.decode(listed, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return bool(models) and all(model.status is not None for model in models)

    async def ask_status(self) -> Status:
        """Return the model's state. Raises EngineError, also when the router does not know the model."""
        status, body = await self._server.ask("GET", "/models")
        if status != 200:
            raise EngineError(f"{self._server.base_url}/models answers HTTP {status}")
        try:
            models = msgspec.json.decode(body, type=_Models).data
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise EngineError(f"{self._server.base_url}/models is no list of models: {error}") from None
        for model in models:
            if model.id == self._model and model.status is not None:
                return model.status
        known = ", ".join(sorted(model.id for model in models)[:10])
        raise EngineError(f"the router at {self._server.base_url} does not know {self._model}; it knows: {known}")

    async def load(self, report: Report) -> None:
        """Return once the model is loaded. Raises EngineError; then, or when cancelled, the model is unloaded again."""
        if (await self.ask_status()).is_loaded:
            return
        report(Progress("loading", 0.0))
        listening = asyncio.create_task(self._report_events(report))
        try:
            await self._tell("/models/load")
            async with asyncio.timeout(limits().engines.llama_load_s):
                await self._wait_loaded()
        except TimeoutError:
            await self.give_up()
            raise EngineError(
                f"{self._model} was not loaded by the router within {limits().engines.llama_load_s:.0f} s"
            ) from None
        except BaseException:
            await self.give_up()
            raise
        finally:
            listening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await listening

    async def unload(self) -> None:
        """Return once the router says that the model is unloaded. Raises EngineError when it does not come to that."""
        if _is_out(await self.ask_status()):
            return
        await self._tell("/models/unload")
        bounds = limits().engines
        deadline = clock.monotonic() + bounds.router_unload_s
        while not _is_out(status := await self.ask_status()):
            if clock.monotonic() > deadline:
                raise EngineError(
                    f"the router still has {self._model} ({status.value}) {bounds.router_unload_s:.0f} s after it was told"
                )
            await asyncio.sleep(bounds.router_look_s)

    async def give_up(self) -> None:
        """Have a half-loaded model unloaded; what that says no longer matters."""
        with contextlib.suppress(EngineError):
            await self._tell("/models/unload")

    async def _wait_loaded(self) -> None:
        has_begun = False
        while not (status := await self.ask_status()).is_loaded:
            if has_begun and status.value == "unloaded" and not status.has_failed:
                raise EngineError(f"{self._model} was unloaded again while it was being loaded: see --models-max of the router")
            has_begun = has_begun or status.value != "unloaded"
            if status.has_failed:
                code = "" if status.exit_code is None else f" (exit code {status.exit_code})"
                raise EngineError(f"the router could not load {self._model}{code}: see the log of llama-server")
            await asyncio.sleep(limits().engines.router_look_s)

    async def _tell(self, path: str) -> None:
        """Raise EngineError with the router's words unless it does as it is told."""
        status, body = await self._server.ask(
            "POST", path, body={"model": self._model}, timeout_s=limits().engines.router_start_s
        )
        if status == 200:
            return
        words = ""
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            words = msgspec.json.decode(body, type=_Refusal).error.message
        raise EngineError(f"the router refuses {path} for {self._model} (HTTP {status}): {words[:300] or 'no reason given'}")

    async def _report_events(self, report: Report) -> None:
        """Pass on the progress that the router publishes; it may publish none, the state itself is looked at elsewhere."""
        listen = Call("GET", "/models/sse", {"accept": "text/event-stream"}, b"")
        rest = b""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            async with self._server.send(listen) as response:
                while (data := await response.readany()) and len(rest) <= limits().engines.line_bytes:
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._report_event(line, report)

    def _report_event(self, line: bytes, report: Report) -> None:
        try:
            event = msgspec.json.decode(line.removeprefix(b"data:"), type=_Event)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        share = event.data.progress
        if event.model == self._model and share is not None and share.value is not None:
            report(Progress(share.current or "loading", min(max(share.value, 0.0), 1.0)))


def _is_out(status: Status) -> bool:
    """Return whether nothing of the model is held; a failed one has no process any more."""
    return status.value == "unloaded" or status.has_failed
