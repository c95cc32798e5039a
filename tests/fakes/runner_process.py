"""Runner of the tests without its sockets: real gate, ledger, operations and commands over an engine pool that does as told.

One process of it is one event loop on the virtual clock. ``RunnerProcess.run`` returns when nothing more happens until a
message comes or the clock is turned, so the same calls always lead to the same states.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import selectors
import shutil
import sqlite3
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, TypeVar, cast

from django.db import connection
from django.db.models.functions import Now

from governance.operations.approvals import active_policy, policy_chain
from nodes.channel import plan_deliveries, store_status
from nodes.models import Node, NodePresence
from nodes.reports import clean_governance, clean_report, clean_status
from nodes.services.governance import take_governance, take_report
from runner.config import OperationsConfig
from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import Cluster, LoadPlan, Report
from runner.engines.port import FlushOutcome, FlushRequest, FlushResult
from runner.errors import EngineError, LoadConflict
from runner.ledger.database import FILE_NAME, LedgerError
from runner.ledger.ledger import Ledger
from runner.library.library import Library
from runner.operations.commands import Commands
from runner.operations.gate import Gate, GateRules
from runner.operations.operation import Operations
from runner.operations.trust import Governance, write_trusted
from runner.pool.capacity import Prediction
from runner.pool.loads import LoadOrder, LoadResult, Pool, UnloadResult
from runner.pool.models import LoadProgress, Model, ModelEvent, ModelState, Registry
from runner.queue import FairQueue
from tests.fakes.clock import VirtualClock
from tests.fakes.waiting import takes
from wire import bridge, clock
from wire.bridge import NodeGovernance, PolicyOffer
from wire.optoken.approval import policy_words

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
        library = cast("Library", SimpleNamespace(can_fetch=lambda _: False))
        no_queue = cast("FairQueue", None)  # nobody sends requests
        self.registry = Registry(library=library, make_queue=lambda _: no_queue, on_change=lambda: None)

    def define(self, model_id: str) -> None:
        self.registry.define(ModelDefinition(model_id=model_id, backend="gguf", is_configured=False))

    def check(self, model: Model, overrides: Mapping[str, object]) -> None:
        """Take any load."""

    async def order(
        self, model_id: str, *, overrides: Mapping[str, object], evict: str | None = None, cluster: Cluster | None = None
    ) -> LoadOrder | Model:
        """Accept a load; a model that is loaded otherwise is loaded anew."""
        del evict, cluster
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

    def start(self, *, kill_at: int | None = None) -> None:
        """Start it. ``kill_at``: as in ``kill_at``, counted from right before it opens its ledger."""
        assert self._loop is None
        self._loop, self._is_dead, self._fuse = VirtualLoop(), False, kill_at
        starting = self._loop.create_task(self._start())
        self.run()
        if self.is_up:
            starting.result()

    async def _start(self) -> None:
        await self._reach()
        self._ledger = await Ledger.open(self.folder)
        await self._reach()
        ledger = cast("Ledger", _MortalLedger(self._ledger, self._reach))
        config = OperationsConfig(
            key_path=None, level=2, is_level_given=True, min_signers=1, runner_id="", ops_per_hour=100
        )  # fmt: skip
        self.governance = Governance(config, data=self.folder, name=self._name, ledger=ledger)
        await self.governance.open()
        rules = GateRules(
            key_path=self.governance.key_path, level=self.governance.level, min_signers=1,
            runner_id=self.governance.runner_id, policy=lambda: self.governance.policy, ops_per_hour=config.ops_per_hour,
        )  # fmt: skip
        self.gate = Gate(rules, ledger=ledger)
        self.engines = EnginePool(self._effects, self._find_policy)
        for model_id in self._models:
            self.engines.define(model_id)
        pool = cast("Pool", SimpleNamespace(registry=self.engines.registry, loader=self.engines, unloader=self.engines))
        operations = Operations(pool, self.gate, ledger, self.governance.identity)
        self._commands = Commands(operations, _seek, _reload)

    def describe(self) -> NodeGovernance:
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
                self._judging = self._loop.create_task(self._judge(message, post))
            case _:
                raise TypeError(message)
        self.run()

    async def _judge(self, offer: PolicyOffer, post: Post) -> None:
        report = await self.governance.take_policies(offer)
        if report is not None:
            post(report)

    def run(self) -> None:
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

    def kill_at(self, calls: int | None) -> None:
        """Have it killed when its ledger was called, or has answered, so many times more; None = not any more."""
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

    def _find_policy(self) -> int:
        policy = self.governance.policy
        return 0 if policy is None else policy.ref.version


async def _seek(model_id: str) -> None:
    """Know every model."""


async def _reload() -> Any:
    raise EngineError("there are no settings files")


def read_ops(folder: Path) -> dict[tuple[str, int], sqlite3.Row]:
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as ledger:
        ledger.row_factory = sqlite3.Row
        rows = ledger.execute("SELECT * FROM operations WHERE op_key IS NOT NULL")
        return {(row["approval_id"], row["use"]): row for row in rows}


def read_desired(folder: Path) -> dict[str, int]:
    """The models that the ledger says are loaded after a restart, with the fence of their load."""
    with contextlib.closing(sqlite3.connect(folder / FILE_NAME)) as ledger:
        return dict(ledger.execute("SELECT model_id, fence FROM desired_models"))


Result = TypeVar("Result")


class _Selector(selectors.DefaultSelector):
    """Lets the time pass where another one would wait; ``rest`` is asked then and says whether it may."""

    turned: VirtualClock | None = None
    rest: Callable[[], bool] = staticmethod(lambda: True)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout != 0 and self.rest():
            assert timeout is not None, "everybody waits, and nothing can wake them"
            assert self.turned is not None, "everybody waits for time, which only the test lets pass"
            self.turned.advance(timeout)
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Not for sockets and processes: they need real time. What is given to a thread is done by the loop itself, a turn later.

    ``turned``: the clock that the loop lets run, None = it only reads ``wire.clock``. ``problems``: what nobody handled.
    """

    def __init__(self, turned: VirtualClock | None = None) -> None:
        self._selector_of_time = _Selector()
        self._selector_of_time.turned = turned
        super().__init__(self._selector_of_time)
        self.problems: list[dict[str, Any]] = []
        self.set_exception_handler(lambda _loop, context: self.problems.append(context))

    def time(self) -> float:
        return clock.monotonic()

    def run_in_executor(  # type: ignore[override]  # the base promises less in its stubs than in its words
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Call ``func`` in a turn of its own."""
        del executor
        done: asyncio.Future[Result] = self.create_future()

        def work() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001  # it is the caller's
                if not done.cancelled():
                    done.set_exception(error)
            else:
                if not done.cancelled():
                    done.set_result(result)

        self.call_soon(work)
        return done

    def settle(self) -> None:
        def stop() -> bool:
            self.stop()
            return False

        self._selector_of_time.rest = stop
        try:
            self.run_forever()
        finally:
            del self._selector_of_time.rest

    def advance(self, seconds: float) -> None:
        self.run_until_complete(takes(seconds))
        self.settle()


Done = TypeVar("Done")
Execute = Callable[..., Any]


class Killed(BaseException):
    """A process of the control plane ends here."""


@dataclass
class Broker:
    """What workers were rung for: ids of runs. It outlives the processes of the control plane."""

    rings: list[str] = field(default_factory=list)

    def send_task(self, name: str, *, args: list[str], **options: object) -> None:
        assert name == "governance.tasks.work"
        assert not options.pop("retry")
        self.rings.append(args[0])


BROKER = Broker()
BROKER_PATH = f"{__name__}.BROKER"
"""For the setting TASK_APP."""


class Processes:
    """The processes of the control plane, one step of one of them after the other."""

    def __init__(self) -> None:
        self.deaths = 0
        self._fuse: int | None = None
        self._has_committed = False
        self._is_dying = self._is_between = False
        self._floor = 0
        self._interlude: Callable[[], object] | None = None

    def kill_at(self, statements: int, *, has_committed: bool) -> None:
        """Have the next step end before its so manieth statement; ``has_committed``: if that is a commit, right after it."""
        self._fuse, self._has_committed = statements, has_committed

    def interrupt(self, interlude: Callable[[], object]) -> None:
        """Have something else happen behind the first commit of the next step, before its process goes on."""
        self._interlude = interlude

    def perform(self, work: Callable[[], Done]) -> Done | None:
        """Do one step, and ring behind it; None = its process was killed. Hints are lost: whoever listens looks at rows too."""
        first = len(connection.run_on_commit)
        self._floor = len(connection.savepoint_ids)
        try:
            with connection.execute_wrapper(self._execute):
                result = work()
                if self._fuse is not None:  # it had fewer statements
                    raise Killed
        except Killed:
            del connection.run_on_commit[first:]
            self.deaths += 1
            return None
        finally:
            self._fuse, self._interlude, self._is_dying = None, None, False
        waiting = connection.run_on_commit[first:]
        del connection.run_on_commit[first:]
        for each in waiting:
            if each[1].__module__ != "core.hints":
                each[1]()
        return result

    def _execute(self, execute: Execute, sql: str, params: Any, many: bool, context: Any) -> Any:
        if self._is_dying or self._is_between:
            return execute(sql, params, many, context)
        is_commit = sql.startswith("RELEASE SAVEPOINT") and len(connection.savepoint_ids) == self._floor
        if self._fuse is not None:
            self._fuse -= 1
            if self._fuse < 0:
                self._die(lambda: execute(sql, params, many, context), sql if is_commit else "")
        result = execute(sql, params, many, context)
        if is_commit and self._interlude is not None:
            interlude, self._interlude, self._is_between = self._interlude, None, True
            try:
                interlude()
            finally:
                self._is_between = False
        return result

    def _die(self, execute: Callable[[], object], commit: str) -> None:
        self._is_dying = True
        if commit and self._has_committed:
            execute()
        elif commit:  # Django rolls back what it was to commit for errors of the database alone
            connection.savepoint_rollback(commit.split('"')[1])
        raise Killed


@dataclass
class Link:
    """The socket between gateway and node, while it is open: encoded frames that have not arrived."""

    since: datetime
    policy_version: int
    down: list[str] = field(default_factory=list)
    up: list[str] = field(default_factory=list)
    is_open: bool = True

    def post(self, message: bridge.Message) -> None:
        """Have the node say something; on a link that is gone nobody hears it."""
        if self.is_open:
            self.up.append(bridge.encode_message(message))


class FleetNode:
    """A node: its row, its runner process and its effects, which nothing undoes."""

    def __init__(self, row: Node, folder: Path, models: list[str]) -> None:
        self.row = row
        self.runner_id = ""
        """As it registered; the same at every start."""
        self.effects: list[Effect] = []
        self.process = RunnerProcess(folder, row.name, effects=self.effects, models=models)
        self.link: Link | None = None

    def take(self, frame: str) -> None:
        if self.link is not None:
            self.process.take(bridge.decode_server_message(frame), self.link.post)
        self.notice_its_end()

    def notice_its_end(self) -> None:
        if not self.process.is_up:
            self.unlink()

    def unlink(self) -> None:
        if self.link is not None:
            self.link.is_open, self.link = False, None
        NodePresence.objects.filter(node=self.row).update(connected=False)


class Gateway:
    """The gateway process: it holds the links, delivers commands and policies, and takes down what nodes say."""

    def __init__(self, processes: Processes, nodes: list[FleetNode]) -> None:
        self._processes = processes
        self._nodes = nodes
        self._id = uuid.uuid4()
        self.sent: list[str] = []
        """Every command that ever left, for whoever has listened."""

    def link(self, node: FleetNode) -> None:
        if not node.process.is_up:
            node.process.start()
        node.unlink()
        said = node.process.describe()
        node.runner_id = said.runner_id
        clean_governance(said)

        def register() -> None:
            taken = take_governance(node_id=node.row.pk, said=said, heard_ms=clock.unix_ms())
            assert taken is not None
            assert taken.op_level == "L2", taken.policy_error
            # Reckoned by the database's clock, which no test turns: it is heard until it is unlinked.
            NodePresence.objects.filter(node=node.row).update(connected=True, last_heartbeat_at=Now() + timedelta(days=1))

        self._perform(register)
        if NodePresence.objects.get(node=node.row).connected:
            node.link = Link(clock.now(), said.policy_version)

    def look(self) -> None:
        """Send what is due: commands, questions, policies."""
        linked = {node.row.pk: node for node in self._nodes if node.link is not None}
        since = {pk: node.link.since for pk, node in linked.items() if node.link is not None}
        deliveries = self._perform(lambda: plan_deliveries(linked=since, gateway_id=self._id))
        for pk, message in deliveries or ():
            if isinstance(message, bridge.OpCommand):
                self.sent.append(bridge.encode_message(message))
            self._send(linked[pk], message)
        for node in linked.values():
            if node.link is not None:
                chain = policy_chain(after_version=node.link.policy_version)
                if chain:
                    self._send(node, bridge.PolicyOffer(policies=chain))

    def take(self, node: FleetNode, frame: str) -> None:
        message = bridge.decode_worker_message(frame)
        match message:
            case bridge.OpStatus():
                clean_status(message)
                self._perform(lambda: store_status(node_id=node.row.pk, status=message))
            case bridge.GovernanceReport():
                clean_report(message)
                if node.link is not None:
                    node.link.policy_version = message.governance.policy_version
                self._perform(lambda: take_report(node_id=node.row.pk, report=message, heard_ms=clock.unix_ms()))
            case _:
                raise TypeError(message)

    def _send(self, node: FleetNode, message: bridge.Message) -> None:
        if node.link is not None:
            node.link.down.append(bridge.encode_message(message))

    def _perform(self, work: Callable[[], Done]) -> Done | None:
        deaths = self._processes.deaths
        result = self._processes.perform(work)
        if self._processes.deaths > deaths:
            self._restart()
        return result

    def _restart(self) -> None:
        self._id = uuid.uuid4()
        for node in self._nodes:
            node.unlink()


def make_folders(place: Path, names: Iterable[str]) -> list[Path]:
    """Data folders of runners on which a person confirmed the active policy, and that have pinned it."""
    found, folders = active_policy(), []
    assert found is not None
    for name in names:
        folder = place / name
        folder.mkdir()
        write_trusted(folder, policy_words(found[1].ref.sha256))
        process = RunnerProcess(folder, name, effects=[], models=[])
        process.start()
        process.take(PolicyOffer(policies=policy_chain(after_version=0)), lambda _: None)
        assert process.governance.policy is not None
        process.kill()
        folders.append(process.folder)
    return folders
