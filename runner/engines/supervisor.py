"""Keeps one engine serving once it was loaded: checks its health, withdraws it while it is ill, restarts it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from asyncio import FIRST_COMPLETED
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from runner.definitions.plan import Report
from runner.engines.port import Engine, Health
from runner.engines.process import list_left
from runner.errors import EngineError
from runner.limits import limits
from wire import clock

log = logging.getLogger(__name__)

# No port of a client: stands for the question to the loop.
_LOOP = 0


class EngineState(StrEnum):
    """Contract words for the state of a replica."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"
    FAILED = "failed"


@dataclass(slots=True)
class _Held:
    """What an engine is to let go of, by numbers of looks: when it was first seen, and since when it waits for nobody."""

    since: int
    waiting_since: int
    limit_s: float


class Supervisor:
    """Owns an engine. ``on_change`` is called, synchronously, whenever its state or last error changed.

    An engine that does not answer its health checks for ``silent_s`` counts as hung and is restarted. With ``on_end`` one that
    is lost is not: it is unloaded, and ``on_end`` hears why.
    """

    def __init__(
        self, engine: Engine, *, silent_s: float, on_change: Callable[[], None], loop_limit_s: float | None = None,
        on_end: Callable[[EngineError], None] | None = None,
    ) -> None:  # fmt: skip
        self.engine = engine
        self._silent_s = silent_s
        self._limits = limits().engines
        self._loop_limit_s = self._limits.loop_s if loop_limit_s is None else loop_limit_s
        self._on_change = on_change
        self._on_end = on_end
        self._suspicion = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None
        self._leaver: asyncio.Task[None] | None = None
        self._left_mib = 0.0
        self._asks_loop = False
        self._disobeys = ""
        self.state = EngineState.UNLOADED
        self.is_ready = False
        """Whether requests may be sent to the engine: it is loaded."""
        self.last_error: str | None = None
        self.restarts = 0

    def report_failure(self, reason: str) -> None:
        log.warning("engine failed a request engine=%s reason=%s", self.engine.name, reason)
        self._suspicion.set()

    def check_soon(self) -> None:
        self._suspicion.set()

    def watch_left(self, sent_bytes: int) -> None:
        """Have the engine restarted unless it soon lets go of a client that has left."""
        if not self.engine.pids or not self.is_ready:  # of a server of somebody else's nothing is known
            return
        self._left_mib += sent_bytes / (1024 * 1024)  # its threads share the cores, and read all at once
        self._asks_loop = self.engine.loop is not None
        if self._leaver is None or self._leaver.done():
            self._leaver = asyncio.create_task(self._watch_left())

    async def _watch_left(self) -> None:
        # Looks are counted, not seconds: while the whole machine stands still, nobody can obey.
        held: dict[int, _Held] = {}
        question: asyncio.Task[None] | None = None
        try:
            for look in itertools.count():
                await asyncio.sleep(self._limits.obey_look_s)
                ports = await asyncio.to_thread(list_left, self.engine.pids)
                if question is not None and question.done():
                    question = None
                elif question is None and self._asks_loop and self.engine.loop is not None:
                    self._asks_loop, question = False, asyncio.create_task(self.engine.loop.ask_loop())
                if question is not None:
                    ports.add(_LOOP)
                oldest_gone = min((held[port].since for port in held.keys() - ports), default=look)
                held = {port: held.get(port) or _Held(look, look, self._limit_s(port)) for port in ports}
                if not held and not self._asks_loop:
                    self._left_mib = 0.0
                    return
                # An engine's few threads take connections in their order, so one that came later or together with another
                # waits for it rightly: its looks count from the last time that such another was let go of, and from nobody's
                # who came after it.
                for port, one in held.items():
                    if oldest_gone <= one.since:
                        one.waiting_since = look
                    if (look - one.waiting_since) * self._limits.obey_look_s > one.limit_s:
                        what = "one step of its work" if port == _LOOP else "a request whose client had left"
                        self._disobeys = f"the engine went on for more than {one.limit_s:.0f} s with {what}"
                        self._suspicion.set()
                        return
        finally:
            if question is not None:
                question.cancel()
                await asyncio.gather(question, return_exceptions=True)

    def _limit_s(self, port: int) -> float:
        if port == _LOOP and self.engine.loop is not None:
            return self._loop_limit_s + self._limits.loop_batches * self.engine.loop.batch_s
        return self._limits.obey_s + self._limits.obey_s_per_mib * self._left_mib

    async def load(self, report: Report) -> None:
        """Load the engine and watch it from then on. Raises EngineError; nothing is left behind then."""
        self._become(EngineState.LOADING)
        try:
            await self.engine.load(report)
        except EngineError as error:
            self._become(EngineState.FAILED, error=str(error))
            raise
        except asyncio.CancelledError:
            self._become(EngineState.UNLOADED)
            raise
        self._become(EngineState.LOADED)
        self._start_watcher(is_loaded=True, report=None)

    def keep_trying(self, report: Report) -> None:
        """Load the engine in the background, again and again until it serves: for what the owner wants to run always."""
        self._start_watcher(is_loaded=False, report=report)

    async def unload(self, *, gently: bool) -> None:
        """Stop watching and unload; return when the adapter has seen that the engine is gone. Raises EngineError."""
        await self._stop_looking()
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
        self._become(EngineState.UNLOADING)
        try:
            await asyncio.wait_for(self.engine.unload(gently=gently), self._limits.unload_s)
        except TimeoutError:
            self._become(EngineState.FAILED, error=f"it did not unload within {self._limits.unload_s:.0f} s")
            raise EngineError(self.last_error or "") from None
        except EngineError as error:
            self._become(EngineState.FAILED, error=str(error))
            raise
        self._become(EngineState.UNLOADED)

    def _start_watcher(self, *, is_loaded: bool, report: Report | None) -> None:
        self._watcher = asyncio.create_task(self._keep(is_loaded=is_loaded, report=report))
        self._watcher.add_done_callback(self._note_end)

    def _note_end(self, watcher: asyncio.Task[None]) -> None:
        if not watcher.cancelled() and (error := watcher.exception()) is not None:
            log.critical("supervision failed unexpectedly engine=%s", self.engine.name, exc_info=error)
            self._become(EngineState.FAILED, error="the runner lost sight of it; unload it and load it again")

    async def _keep(self, *, is_loaded: bool, report: Report | None = None) -> None:
        pause_s = self._limits.restart_first_s
        while True:
            if not is_loaded and not await self._try_load(report):
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, self.engine.restart_max_s)
                continue
            is_loaded, since = False, clock.monotonic()
            error = await self._watch()
            reason = str(error)
            log.error("engine is down engine=%s reason=%s", self.engine.name, reason)
            pause_s = self._limits.restart_first_s if clock.monotonic() - since >= self._limits.steady_after_s else pause_s
            self._become(EngineState.FAILED, error=reason)
            await self._stop_looking()
            with contextlib.suppress(EngineError):  # somebody else's server: nothing of ours to clear away
                await self.engine.unload(gently=False)
            if self._on_end is not None:
                self._on_end(error)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, self.engine.restart_max_s)
            self.restarts += 1

    async def _stop_looking(self) -> None:
        # What comes next is another process, which holds none of the clients that left.
        leaver, self._leaver = self._leaver, None
        if leaver is not None:
            leaver.cancel()
            await asyncio.gather(leaver, return_exceptions=True)
        self._disobeys, self._asks_loop, self._left_mib = "", False, 0.0

    async def _try_load(self, report: Report | None) -> bool:
        if self.last_error is None:
            self._become(EngineState.LOADING)
        try:
            await self.engine.load(report or (lambda _progress: None))
        except EngineError as error:
            if str(error) != self.last_error:
                log.error("engine does not start engine=%s: %s", self.engine.name, error)  # noqa: TRY400  # text for the owner
            self._become(EngineState.FAILED, error=str(error))
            return False
        self._suspicion.clear()
        self._become(EngineState.LOADED)
        return True

    async def _watch(self) -> EngineError:
        gone = asyncio.create_task(self.engine.wait_gone())
        silent_since: float | None = None
        try:
            while True:
                suspicion = asyncio.create_task(self._suspicion.wait())
                try:
                    await asyncio.wait({gone, suspicion}, timeout=self.engine.poll_s, return_when=FIRST_COMPLETED)
                finally:
                    suspicion.cancel()
                self._suspicion.clear()
                if gone.done():
                    error = gone.exception()
                    return error if isinstance(error, EngineError) else EngineError("the engine process died")
                if self._disobeys:
                    return EngineError(self._disobeys)
                match await self.engine.health():
                    case Health.OK:
                        silent_since = None
                        self._become(EngineState.LOADED)
                    case Health.UNREACHABLE:
                        return EngineError("the engine refuses connections or has no model")
                    case Health.SILENT:
                        silent_since = silent_since if silent_since is not None else clock.monotonic()
                        if clock.monotonic() - silent_since >= self._silent_s:
                            return EngineError(f"the engine has not answered for {self._silent_s:g} s")
        finally:
            gone.cancel()

    def _become(self, state: EngineState, *, error: str | None = None) -> None:
        before = (self.state, self.last_error)
        self.state, self.is_ready = state, state is EngineState.LOADED
        if self.is_ready:
            self.last_error = None
        elif error is not None:
            self.last_error = error
        if before != (self.state, self.last_error):
            self._on_change()
