"""Keeps one engine serving: starts it, checks its health, withdraws its models while it is ill, restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import Callable, Mapping
from enum import StrEnum

from runner.engines.port import Engine, Health
from runner.errors import EngineError

log = logging.getLogger(__name__)

RESTART_FIRST_S = 0.5
STEADY_AFTER_S = 30.0
"""An engine that served this long starts its back-off anew when it dies."""


class EngineState(StrEnum):
    """Contract words for the state of a replica."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


class Supervisor:
    """Owns an engine. ``on_change`` is called, synchronously, whenever state, models or last error changed.

    An engine that does not answer its health checks for ``silent_s`` counts as hung and is restarted.
    """

    def __init__(self, engine: Engine, *, silent_s: float, on_change: Callable[[], None]) -> None:
        self._engine = engine
        self._silent_s = silent_s
        self._on_change = on_change
        self._suspicion = asyncio.Event()
        self._settled = asyncio.Event()
        self._known: tuple[object, ...] = ()
        self.state = EngineState.UNLOADED
        self.detail = ""
        self.last_error: str | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests may be sent to the engine."""
        return self.state is EngineState.LOADED

    @property
    def base_url(self) -> str:
        """Address of the engine up to, not including, ``/v1``."""
        return self._engine.base_url

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers every request to the engine needs."""
        return self._engine.headers

    @property
    def models(self) -> list[str]:
        """The models to declare: none while the engine cannot serve."""
        return self._engine.models if self.is_ready else []

    @property
    def all_models(self) -> list[str]:
        """The models the engine would serve if it were well."""
        return self._engine.models

    async def wait_settled(self, limit_s: float) -> None:
        """Return when the first start has succeeded or failed, or after ``limit_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), limit_s)

    def report_failure(self, reason: str) -> None:
        """Have the engine checked at once because a request to it failed."""
        log.warning("engine failed a request reason=%s", reason)
        self._suspicion.set()

    def check_soon(self) -> None:
        """Have the engine's health and models looked at now."""
        self._suspicion.set()

    async def run(self) -> None:
        """Keep the engine serving until cancelled; then unload it."""
        pause_s, clock = RESTART_FIRST_S, asyncio.get_running_loop().time
        try:
            while True:
                try:
                    await self._start()
                except EngineError as error:
                    if str(error) != self.last_error:
                        log.error("engine does not start: %s", error)  # noqa: TRY400  # the text is for the owner
                    self._become(EngineState.FAILED, error=str(error))
                else:
                    since = clock()
                    reason = await self._watch()
                    log.error("engine is down reason=%s", reason)
                    if clock() - since >= STEADY_AFTER_S:
                        pause_s = RESTART_FIRST_S
                    self._become(EngineState.FAILED, error=reason)
                    await self._engine.stop(gently=False)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, self._engine.restart_max_s)
        finally:
            self._become(EngineState.UNLOADING)
            await self._engine.stop(gently=True)
            self._become(EngineState.UNLOADED)

    async def _start(self) -> None:
        if self.last_error is None:
            self._become(EngineState.LOADING)
        await self._engine.start(self._show_progress)
        self._suspicion.clear()
        self._become(EngineState.LOADED)
        log.info("engine ready engine=%s models=%s", self._engine.name, ",".join(self._engine.models))

    async def _watch(self) -> str:
        """Return why the engine must be restarted, once it must."""
        loop = asyncio.get_running_loop()
        gone = asyncio.create_task(self._engine.wait_gone())
        silent_since: float | None = None
        try:
            while True:
                suspicion = asyncio.create_task(self._suspicion.wait())
                try:
                    await asyncio.wait({gone, suspicion}, timeout=self._engine.poll_s, return_when=FIRST_COMPLETED)
                finally:
                    suspicion.cancel()
                self._suspicion.clear()
                if gone.done():
                    return "the engine process died"
                match await self._engine.health():
                    case Health.OK:
                        silent_since = None
                        self._become(EngineState.LOADED)
                    case Health.UNREACHABLE:
                        return "the engine refuses connections or has no model"
                    case Health.SILENT:
                        silent_since = silent_since if silent_since is not None else loop.time()
                        if loop.time() - silent_since >= self._silent_s:
                            return f"the engine has not answered for {self._silent_s:g} s"
        finally:
            gone.cancel()

    def _show_progress(self, words: str) -> None:
        self.detail = words
        self._tell()

    def _become(self, state: EngineState, *, error: str | None = None) -> None:
        self.state = state
        self.detail = ""
        if state in {EngineState.LOADED, EngineState.FAILED}:
            self._settled.set()
        if state is EngineState.LOADED:
            self.last_error = None
        elif error is not None:
            self.last_error = error
        self._tell()

    def _tell(self) -> None:
        now = (self.state, tuple(self._engine.models), self.detail, self.last_error)
        if now != self._known:
            self._known = now
            self._on_change()
