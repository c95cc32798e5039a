"""Runner of the tests without its sockets: real gate, ledger, operations and commands over an engine pool that does as told.

One process of it is one event loop on the virtual clock. ``RunnerProcess.run`` returns when nothing more happens until a
message comes or the clock is turned, so the same calls always lead to the same states.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from runner.admission import FairQueue
from runner.config.values import OperationsConfig
from runner.definitions.definition import ModelDefinition
from runner.definitions.plan import LoadPlan, Report
from runner.engines.port import FlushOutcome, FlushRequest, FlushResult
from runner.errors import EngineError, LoadConflict
from runner.ledger import FILE_NAME, Ledger, LedgerError
from runner.library import Library
from runner.operations.commands import Commands
from runner.operations.gate import Gate, GateRules
from runner.operations.governance import Governance
from runner.operations.receipts import Clerk
from runner.operations.tasks import Operations
from runner.pool import LoadOrder, LoadResult, Model, ModelState, Pool
from runner.pool.capacity import Prediction
from runner.pool.model import LoadProgress
from runner.pool.registry import Registry
from runner.pool.states import ModelEvent
from runner.pool.unloading import UnloadResult
from tests.fakes.loop import VirtualLoop
from wire import bridge, clock
from wire.bridge import BoxGovernance

Answer = TypeVar("Answer")
Mood = Literal["works", "fails", "hangs"]
Post = Callable[[bridge.OpStatus | bridge.GovernanceReport], None]


@dataclass(frozen=True, slots=True)
class Effect:
    """What an engine began to do. ``mark``: of the operation that asked for it; ``policy``: the version pinned at the time."""

    kind: str
    mark: str
    at_s: float
    policy: int


@dataclass
class EnginePool:
    """The models of a node and what their engines do. It outlives no process, but ``effects`` is the list of the node."""

    effects: list[Effect]
    find_policy: Callable[[], int]
    mood: Mood = "works"
    is_dead: bool = False
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        no_queue = cast("FairQueue", None)  # nobody sends requests
        self.registry = Registry(library=cast("Library", _NoLibrary()), make_queue=lambda _: no_queue, on_change=lambda: None)

    def define(self, model_id: str) -> None:
        self.registry.define(ModelDefinition(model_id=model_id, backend="gguf", is_configured=False))

    def check(self, model: Model, overrides: Mapping[str, object]) -> None:
        """Take any load."""

    async def order(self, model_id: str, *, overrides: Mapping[str, object], evict: str | None = None) -> LoadOrder | Model:
        """Accept a load; a model that is loaded otherwise is loaded anew."""
        del evict
        model = self.registry.find(model_id)
        if model.state is ModelState.LOADING:
            if model.overrides != overrides:
                raise LoadConflict(f"{model_id} is being loaded otherwise.")
            return model
        if model.state is ModelState.LOADED:
            model.apply(ModelEvent.UNLOAD)
            model.apply(ModelEvent.VANISH)
        model.overrides, model.load = dict(overrides), LoadProgress()
        model.apply(ModelEvent.LOAD)
        return LoadOrder(model, model.load, cast("LoadPlan", None), 1, Prediction(None, None, None), None, must_fetch=False)

    def call_off(self, order: LoadOrder) -> None:
        order.model.apply(ModelEvent.FAIL)

    async def carry_out(self, order: LoadOrder, report: Report) -> LoadResult:
        del report
        model = order.model
        try:
            await self._act("load", str(model.overrides.get("maxContextLength")))
        except BaseException:
            model.load = None
            model.apply(ModelEvent.FAIL)
            raise
        model.load = None
        model.apply(ModelEvent.SERVE)
        return LoadResult(model.model_id, 1, 0.0, None, None, None)

    async def unload(self, model_id: str, *, force: bool = False) -> UnloadResult:
        del force
        await self._act("unload", model_id)
        return UnloadResult(model_id, 0, 0, 0, was_loaded=True)

    async def flush(self, model: Model, request: FlushRequest) -> FlushOutcome:
        del model
        await self._act("flush", str(request.tag))
        return FlushOutcome(FlushResult.FLUSHED)

    async def _act(self, kind: str, mark: str) -> None:
        if self.is_dead:
            raise EngineError("the process has ended")
        self.effects.append(Effect(kind, mark, clock.unix_s(), self.find_policy()))
        if self.mood == "hangs":
            await self.may_go_on.wait()
        if self.mood == "fails":
            raise EngineError("it broke")


class _NoLibrary:
    """Files of models that nobody asks for."""

    def can_fetch(self, model_id: str) -> bool:
        del model_id
        return False


class _MortalLedger:
    """The real ledger of a process that may end right before or right after any call of it."""

    def __init__(self, ledger: Ledger, reach: Callable[[], Awaitable[None]]) -> None:
        self._ledger = ledger
        self._reach = reach

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._ledger, name)
        if not inspect.iscoroutinefunction(found):
            return found

        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._reach()
            result = await found(*args, **kwargs)
            await self._reach()
            return result

        return call


class RunnerProcess:
    """One process at level L2 over a data folder.

    Killed, it leaves the folder as it is at that moment, and ``folder`` is a copy: what the process writes after its end, while
    Python unwinds it, goes nowhere.
    """

    def __init__(self, folder: Path, name: str, *, effects: list[Effect], models: list[str]) -> None:
        self.folder = folder
        self._name = name
        self._images = 0
        self._effects = effects
        self._models = models
        self._loop: VirtualLoop | None = None
        self._fuse: int | None = None
        self._is_dead = False

    @property
    def is_up(self) -> bool:
        return self._loop is not None

    def start(self) -> None:
        assert self._loop is None
        self._loop, self._is_dead, self._fuse = VirtualLoop(), False, None
        self._finish(self._start())

    async def _start(self) -> None:
        self._ledger = await Ledger.open(self.folder)
        config = OperationsConfig(
            key_path=None, level=2, is_level_given=True, min_signers=1, runner_id="", ops_per_hour=100
        )  # fmt: skip
        self.governance = Governance(config, data=self.folder, name=self._name, ledger=self._ledger)
        await self.governance.open()
        rules = GateRules(
            key_path=self.governance.key_path, level=self.governance.level, min_signers=1,
            runner_id=self.governance.runner_id, policy=lambda: self.governance.policy, ops_per_hour=config.ops_per_hour,
        )  # fmt: skip
        ledger = cast("Ledger", _MortalLedger(self._ledger, self._reach))
        self.gate = Gate(rules, ledger=ledger)
        self.engines = EnginePool(self._effects, self._find_policy)
        for model_id in self._models:
            self.engines.define(model_id)
        pool = cast("Pool", _Pool(self.engines))
        operations = Operations(pool, self.gate, ledger, Clerk(self.governance.identity))
        await operations.recover()
        self._commands = Commands(operations, _seek, _reload)

    def describe(self) -> BoxGovernance:
        said = self.governance.describe()
        assert said is not None
        return said

    def take(self, message: bridge.ServerMessage, post: Post) -> None:
        """Take a message as ``runner.app`` does and go on until nothing more happens; answers go to ``post``."""
        if self._loop is None:
            return
        match message:
            case bridge.OpCommand():
                self._loop.call_soon(self._commands.take, message, post)
            case bridge.OpQuery():
                self._loop.call_soon(self._commands.query, message, post)
            case bridge.PolicyOffer():
                report = self._finish(self.governance.take_policies(message))
                if report is not None:
                    post(report)
            case _:
                raise TypeError(message)
        self.run()

    def run(self) -> None:
        """Go on until nothing more happens."""
        if self._loop is not None:
            self._loop.settle()
            if self._is_dead:
                self._bury()

    def set_mood(self, mood: Mood) -> None:
        """Have engines work, fail or hang from now on; what hangs goes on in the new mood."""
        if self._loop is None:
            return
        self.engines.mood = mood
        if mood != "hangs":
            self._loop.call_soon(self.engines.may_go_on.set)
            self.run()
            if self._loop is not None:
                self.engines.may_go_on.clear()

    def kill_at(self, calls: int) -> None:
        """Have it killed when its ledger was called, or has answered, so many times more."""
        self._fuse = calls

    def kill(self) -> None:
        """End it as ``kill -9`` does."""
        if self._loop is not None:
            self._die()
            self._bury()

    async def _reach(self) -> None:
        if self._is_dead:
            raise LedgerError("the process has ended")
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse < 0:
                self._die()
                await asyncio.Event().wait()

    def _die(self) -> None:
        self._is_dead = self.engines.is_dead = True
        self._images += 1
        image = self.folder.with_name(f"{self._name}-{self._images}")
        # The index of the write-ahead log is of the process; the lock is the process's own.
        shutil.copytree(self.folder, image, ignore=shutil.ignore_patterns("*-shm", "*.lock"))
        self.folder = image

    def _bury(self) -> None:
        loop, self._loop = self._loop, None
        assert loop is not None

        async def unwind() -> None:
            others = asyncio.all_tasks(loop) - {asyncio.current_task()}
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._ledger.close()
            await loop.shutdown_default_executor()

        loop.run_until_complete(unwind())
        loop.close()

    def _finish(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        assert self._loop is not None
        return self._loop.run_until_complete(work)

    def _find_policy(self) -> int:
        policy = self.governance.policy
        return 0 if policy is None else policy.ref.version


class _Pool:
    """The pool as operations see it."""

    def __init__(self, engines: EnginePool) -> None:
        self.registry = engines.registry
        self.loader = self.unloader = engines


async def _seek(model_id: str) -> None:
    """Know every model."""


async def _reload() -> Any:
    raise EngineError("there are no settings files")


def read_ops(folder: Path) -> dict[tuple[str, int], sqlite3.Row]:
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as ledger:
        ledger.row_factory = sqlite3.Row
        return {(row["approval_id"], row["use"]): row for row in ledger.execute("SELECT * FROM ops")}
