"""The life of the models of one node, as Hypothesis makes it up: a whole runner between a fake gateway and fake engines."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runner.app import Runner
from runner.config import RunnerConfig, read_config
from runner.definitions.plan import LoadPlan
from runner.errors import EngineError
from runner.limits import limits
from runner.parts import Parts
from runner.pool.models import Model, ModelState
from tests.fakes.clock import VirtualClock
from tests.fakes.engine import MIB, EngineCall, FakeEngine, Gpu
from tests.fakes.examples import TIMES
from tests.fakes.model_files import write_gguf
from tests.fakes.runner_process import VirtualLoop
from tests.fakes.scripted_gateway import GatewayStream, MemoryGateway
from wire import clock
from wire.bridge import OpCommand
from wire.ids import new_uuid7
from wire.optoken.op_token import Binding, Grant, encode_token, params_digest, sign_l1
from wire.optoken.verifier import Operation

KEY = b"a key of the tests, 32 bytes long"
FINAL = {"succeeded", "failed", "refused", "interrupted"}
WANTED = "wanted"
"""The model that the settings switch on; approvals are asked for the others."""
MODELS = ["a", WANTED]
SIZE_MB = 48
"""What the runner assumes of llama.cpp before it has measured one: what is predicted is never less than what is taken."""
GPU_MB = 2 * SIZE_MB + 20
DEADLINE_S = 60.0
SLOW_LOAD_S = 20.0
ENDLESS_BYTES = 1 << 20
TICK_S = 0.001

names = st.sampled_from(MODELS)
fates = st.sampled_from(["loads", "loads", "loads slowly", "loads slowly", "hangs", "fails"])
numbers = st.integers(0, 7)
Item = TypeVar("Item")


def choose(items: Iterable[Item], number: int) -> Item | None:
    found = list(items)
    return found[number % len(found)] if found else None


class NodeEngine(FakeEngine):
    """One replica of ``model_id``."""

    def __init__(self, model_id: str, *, pid: int, gpu: Gpu) -> None:
        super().__init__(pid=pid, gpu=gpu, size_mb=SIZE_MB, serves=True)
        self.model_id = model_id
        self.poll_s, self.restart_max_s = 2.0, 30.0


class Complaints(logging.Handler):
    """What the runner says of its own bugs."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.CRITICAL or "unexpected" in record.getMessage():
            self.heard.append(self.format(record))


class ModelLife(RuleBasedStateMachine):
    """The rules are what happens to a node; the invariants hold whenever all that can happen at a moment has happened."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = VirtualClock()
        self._clock_before = clock.install(self.clock)
        self.complaints = Complaints()
        logging.getLogger("runner").addHandler(self.complaints)
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        self.loop = VirtualLoop(self.clock)
        self.gateway = MemoryGateway(self.loop)
        self.gpu = Gpu(GPU_MB)
        self.engines: list[NodeEngine] = []
        self.fates: dict[str, list[str]] = {}
        self.evicted_for: dict[str, str] = {}
        self.operations: dict[str, tuple[Operation, str]] = {}
        self.is_reclaimed = False
        self.is_excused = False
        """Whether memory may be overdrawn: what a dead engine held was free for others, and it comes back by itself."""
        self.unloading_since: dict[str, float] = {}
        self.slots = 2
        self.fence = 0
        self.config = self._configure()
        self._start()

    def _configure(self) -> RunnerConfig:
        for name in MODELS:
            write_gguf(self.folder / "models" / f"{name}.gguf")
        key = self.folder / "op.key"
        key.touch(mode=0o600)
        key.write_bytes(KEY + b"\n")
        (self.folder / "data").mkdir()
        self._write_settings()
        options = ["--gateway", "ws://gateway", "--token", "msw_fake", "--name", "node", "--data", str(self.folder / "data")]
        return read_config(options, {
            "MODEL_BASE_PATH": str(self.folder / "models"), "VERIFIED_OP_TOKEN_KEY_PATH": str(key), "OP_TOKEN_LEVEL": "1",
            "MUSTER_OPS_PER_HOUR": "10000", "MAX_QUEUE_DEPTH": "4",
        })  # fmt: skip

    def _write_settings(self) -> None:
        models = {
            name: {
                "backend": "gguf", "model_path": f"{name}.gguf", "enabled": name == WANTED, "target_inflight": self.slots,
                "replica_max": 2,
            }
            for name in MODELS
        }  # fmt: skip
        text = json.dumps({"engine": {"models": models}})
        (self.folder / "data" / "settings.json").write_text(text)

    def _start(self) -> None:
        self.leave, self.hurry = asyncio.Event(), asyncio.Event()
        self.box = Runner(self.config, self.gateway.client, engines=self.make_engine, telemetry_of_node=lambda: self.gpu)
        self.run = self.loop.create_task(self.box.run(self.leave, self.hurry))
        self.loop.advance(3.0)

    def make_engine(self, plan: LoadPlan, _client: aiohttp.ClientSession) -> NodeEngine:
        """Return an engine with the fate that was chosen for the next load of the model."""
        asked = any(
            operation is Operation.MODEL_LOAD and name == plan.model_id and not self.is_over(op_id)
            for op_id, (operation, name) in self.operations.items()
        )
        assert asked or plan.model_id == WANTED or not self.is_reclaimed, (
            "a model is loaded unasked while its owner has the node"
        )
        engine = NodeEngine(plan.model_id, pid=(1 << 22) + 1 + len(self.engines), gpu=self.gpu)
        fates = self.fates.get(plan.model_id)
        match fates.pop(0) if fates else "loads":
            case "loads slowly":
                engine.may_load.clear()
                self.loop.call_later(SLOW_LOAD_S, engine.may_load.set)
            case "hangs":
                engine.may_load.clear()
            case "fails":
                engine.fails = EngineError("no such file")
        self.engines.append(engine)
        return engine

    @property
    def parts(self) -> Parts:
        return self.box.parts

    @property
    def is_connected(self) -> bool:
        return self.gateway.socket is not None

    def is_over(self, op_id: str) -> bool:
        return any(status.state in FINAL for status in self.gateway.statuses.get(op_id, []))

    def _known(self) -> list[Model]:
        return self.parts.pool.registry.models

    def _name(self, number: int) -> str:
        """Return a model, rather one that is not just lying there."""
        busy = [model.model_id for model in self._known() if model.state is not ModelState.UNLOADED]
        return (busy * 2 + MODELS)[number % (2 * len(busy) + len(MODELS))]

    def _loaded(self) -> list[NodeEngine]:
        return [engine for engine in self.engines if engine.is_loaded]

    def _answers(self) -> list[EngineCall]:
        return [call for engine in self.engines for call in engine.running]

    def _open_streams(self) -> list[GatewayStream]:
        return [stream for stream in self.gateway.streams if not stream.ends and not stream.is_let_go]

    def _command(self, operation: Operation, name: str, **fields: Any) -> None:
        """Have the gateway deliver an approved operation."""
        self.fence += 1
        op_id, body, now = new_uuid7().hex, {"modelId": name, **fields}, int(clock.unix_s())
        grant = Grant(operation, name, ["ann", "bob"], secrets.token_hex(16), now)
        binding = Binding(
            audience="node", params_digest=params_digest(body), op_id=op_id, fence=self.fence, expires_at=now + 300
        )
        token = encode_token(sign_l1(KEY, grant, binding))
        self.operations[op_id] = (operation, name)
        self.gateway.post(OpCommand(op_id=op_id, use=1, operation=operation.value, body=body, token=token))
        self.loop.settle()

    # What approvers do

    @precondition(lambda self: self.is_connected)
    @rule(
        name=names, fate=fates, keep=st.booleans(), evict=st.one_of(st.none(), st.none(), names),
        replicas=st.sampled_from([1, 1, 2]),
    )  # fmt: skip
    def load(self, name: str, fate: str, evict: str | None, replicas: int, *, keep: bool) -> None:
        self.fates[name] = ["loads"] * (replicas - 1) + [fate]
        fields: dict[str, Any] = {"keepLoaded": True} if keep else {}
        if evict is not None and evict != name:
            fields["evictModel"] = self.evicted_for[name] = evict
        if replicas > 1:
            fields["overrides"] = {"replicas": replicas}
        self._command(Operation.MODEL_LOAD, name, **fields)

    @precondition(lambda self: self.is_connected)
    @rule(number=numbers, force=st.booleans())
    def unload(self, number: int, *, force: bool) -> None:
        self._command(Operation.MODEL_UNLOAD, self._name(number), force=force)

    @precondition(lambda self: self.is_connected)
    @rule(number=numbers, how=st.sampled_from(["flushes", "hangs", "is loaded anew"]))
    def flush(self, number: int, how: str) -> None:
        name = self._name(number)
        for engine in self._loaded():
            if engine.model_id == name:
                engine.flushes = how != "is loaded anew"
                if how == "hangs":
                    engine.may_flush.clear()
        self._command(Operation.CACHE_FLUSH, name, scope="model")

    # What clients do

    @precondition(lambda self: self.is_connected)
    @rule(
        number=numbers, tenant=st.sampled_from(["t1", "t2"]), window=st.sampled_from([ENDLESS_BYTES, ENDLESS_BYTES, 64]),
        count=st.integers(1, 4),
    )  # fmt: skip
    def ask(self, number: int, tenant: str, window: int, count: int) -> None:
        for _ in range(count):
            self.gateway.open(self._name(number), tenant=tenant, deadline_s=DEADLINE_S, window_bytes=window)
        self.loop.settle()

    @precondition(lambda self: self._open_streams())
    @rule(number=numbers)
    def leave_an_answer(self, number: int) -> None:
        if (stream := choose(self._open_streams(), number)) is not None:
            self.gateway.cancel(stream)
            self.loop.settle()

    @precondition(lambda self: self._open_streams())
    @rule(number=numbers)
    def read_on(self, number: int) -> None:
        if (stream := choose(self._open_streams(), number)) is not None:
            self.gateway.credit(stream, ENDLESS_BYTES)
            self.loop.settle()

    # What engines do

    @precondition(lambda self: self._answers())
    @rule(number=numbers, what=st.sampled_from(["says a word", "finishes", "finishes", "breaks off"]))
    def answer(self, number: int, what: str) -> None:
        if (given := choose(self._answers(), number)) is not None:
            {"says a word": given.emit, "finishes": given.finish, "breaks off": given.fail}[what]()
            self.loop.settle()

    @precondition(lambda self: self._loaded())
    @rule(number=numbers, what=st.sampled_from(["dies", "falls silent", "cannot start again"]))
    def break_engine(self, number: int, what: str) -> None:
        if (engine := choose(self._loaded(), number)) is not None:
            self.is_excused = True
            if what == "falls silent":
                engine.is_silent = True
            else:
                engine.fails = EngineError("no such file") if what == "cannot start again" else None
                engine.die()
            self.loop.settle()

    @precondition(lambda self: self._loaded())
    @rule(number=numbers)
    def hold_on_to_memory(self, number: int) -> None:
        if (engine := choose(self._loaded(), number)) is not None:
            engine.may_unload.clear()

    @rule()
    def mend_engines(self) -> None:
        for engine in self.engines:
            engine.fails = None
            for gate in (engine.may_load, engine.may_unload, engine.may_flush):
                gate.set()
        self.loop.settle()

    # What owners and machines do

    @rule(others_mb=st.sampled_from([0, 30]))
    def use_the_gpu_for_something_else(self, others_mb: int) -> None:
        if others_mb <= self.gpu.others_mb + self.gpu.free_mb:
            self.is_excused = self.is_excused or others_mb > self.gpu.others_mb
            self.gpu.others_mb = others_mb

    @rule(is_reclaimed=st.booleans())
    def reclaim(self, *, is_reclaimed: bool) -> None:
        self.is_reclaimed = is_reclaimed
        self.loop.call_soon(self.box.set_mode, "spare_off" if is_reclaimed else "spare_on")
        self.loop.settle()

    @rule(slots=st.integers(1, 3))
    def change_slots(self, slots: int) -> None:
        self.slots = slots
        self._write_settings()
        self.loop.run_until_complete(self.box.reload())
        self.loop.settle()

    @rule()
    def lose_the_gateway(self) -> None:
        self.gateway.hang_up()
        self.loop.settle()

    @precondition(lambda self: self.is_connected)
    @rule()
    def stand_still(self) -> None:
        """Have the process stopped for longer than a gateway may be silent: that one is not given up for it."""
        socket = self.gateway.socket
        self.clock.advance(2 * limits().connection.silence_s)
        self.loop.advance(limits().connection.heartbeat_s + limits().connection.report_gap_s)
        assert self.gateway.socket is socket

    @rule(how=st.sampled_from(["gently", "at once", "killed"]))
    def restart(self, how: str) -> None:
        data, copy = self.folder / "data", self.folder / "copy"
        if how == "killed":
            shutil.copytree(data, copy)
        self._stop(hurry=how != "gently")
        if how == "killed":  # what it wrote down on its way out never came to be
            shutil.rmtree(data)
            copy.rename(data)
        self.operations.clear()
        self.evicted_for.clear()
        self._start()

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 3.0, 12.0, 35.0, 65.0, 310.0]))
    def wait(self, seconds: float) -> None:
        self.loop.advance(seconds)

    def _stop(self, *, hurry: bool) -> None:
        """Have the runner leave, and see that it does in time and leaves nothing behind."""
        self.leave.set()
        if hurry:
            self.hurry.set()
        stuck = [engine for engine in self.engines if not engine.may_unload.is_set()]
        drain_s = 0.0 if hurry else limits().connection.drain_s
        limit_s = (
            drain_s
            + limits().connection.farewell_s
            + limits().operations.close_s
            + 3 * limits().engines.unload_s * len(stuck)
            + TICK_S
        )
        self.loop.run_until_complete(asyncio.wait({self.run}, timeout=limit_s))
        assert self.run.done(), f"the runner has not left within {limit_s:g} s"
        self.run.result()
        self.loop.settle()
        assert not asyncio.all_tasks(self.loop), "a task outlives the runner"
        assert not any(engine.is_loaded or engine.is_loading for engine in self.engines if engine not in stuck), (
            "an engine outlives the runner"
        )
        assert not any(engine.open_calls for engine in self.engines)
        for engine in self.engines:
            engine.die()
        self.gateway.hang_up()
        self.engines.clear()
        self.unloading_since.clear()
        self.is_excused = self.gpu.others_mb > 0

    # What holds

    @invariant()
    def nothing_is_unexpected(self) -> None:
        assert not self.loop.problems, self.loop.problems
        assert not self.complaints.heard, self.complaints.heard
        assert not self.run.done()
        told = [status.message for statuses in self.gateway.statuses.values() for status in statuses]
        assert not any(message.startswith("a model that is") for message in told), "a step that the table does not have"

    @invariant()
    def every_model_is_in_one_state(self) -> None:
        now = clock.monotonic()
        for model in self._known():
            is_loading = model.state is ModelState.LOADING
            is_ready = any(replica.supervisor.is_ready for replica in model.replicas)
            assert (model.load is not None) == is_loading, model.state
            assert is_loading or (model.reserved_bytes == 0 and model.load_task is None), model.state
            match model.state:
                case ModelState.UNLOADED:
                    assert not model.replicas
                case ModelState.LOADED:
                    assert is_ready
                    assert model.queue.slots == max(1, model.slots)
                case ModelState.FAILED:
                    assert not is_ready
                    assert model.last_error
            if model.state is not ModelState.UNLOADING:
                self.unloading_since.pop(model.model_id, None)
            since = self.unloading_since.setdefault(model.model_id, now) if model.state is ModelState.UNLOADING else now
            limit_s = (
                limits().engines.unload_drain_s + (1 + len(model.replicas)) * limits().engines.unload_s + limits().engines.cut_s
            )
            assert now - since <= limit_s, "an unload goes on for ever"

    @invariant()
    def every_engine_is_a_replica(self) -> None:
        kept = {replica.supervisor.engine for model in self._known() for replica in model.replicas}
        assert {engine for engine in self.engines if engine.is_loaded or engine.is_loading} <= kept, (
            "an engine belongs to nobody"
        )
        for model in self._known():
            if model.state is ModelState.LOADING:
                assert sum(engine.is_loading for engine in self.engines if engine.model_id == model.model_id) <= 1

    @invariant()
    def memory_is_enough_for_all_that_was_promised(self) -> None:
        promised_mb = 0.0
        spared = {self.evicted_for[name] for name in self.evicted_for if self._state(name) is ModelState.LOADING}
        for model in self._known():
            held_mb = SIZE_MB * sum(engine.is_loaded for engine in self.engines if engine.model_id == model.model_id)
            promised_mb += 0 if model.model_id in spared else max(model.reserved_bytes / MIB, held_mb)
        if promised_mb == 0 and not self._loaded():
            self.is_excused = self.gpu.others_mb > 0
        assert self.is_excused or promised_mb + self.gpu.others_mb <= self.gpu.total_mb

    def _state(self, name: str) -> ModelState | None:
        return next((model.state for model in self._known() if model.model_id == name), None)

    @invariant()
    def slots_are_used_and_given_back(self) -> None:
        known = self._known()
        for model in known:
            queue = model.queue
            assert queue.active >= model.active  # a client that reads nothing may not have noticed that its replica is gone
            assert all(replica.active == len(self._engine_of(replica).open_calls) for replica in model.replicas)
            if all(replica.supervisor.is_ready for replica in model.replicas) and model.state is ModelState.LOADED:
                assert queue.active <= queue.slots
            if model.flush_task is None:
                assert queue.depth == 0 or queue.active >= queue.slots, "a request waits before a free slot"
        waiting, running = sum(model.queue.depth for model in known), sum(model.queue.active for model in known)
        assert self.parts.budget.depth == waiting
        assert self.parts.serving.load == self.box.relay.load == waiting + running

    def _engine_of(self, replica: Any) -> NodeEngine:
        engine = replica.supervisor.engine
        assert isinstance(engine, NodeEngine)
        return engine

    @invariant()
    def every_request_ends_once_and_in_time(self) -> None:
        now = clock.monotonic()
        for stream in self.gateway.streams:
            assert len(stream.ends) <= 1
            assert stream.ends or stream.is_let_go or now - stream.opened_at <= DEADLINE_S + TICK_S, "a request has no end"
        assert self.box.relay.load == len(self._open_streams())

    @invariant()
    def the_gateway_knows_what_is_true(self) -> None:
        now, gateway = clock.monotonic(), self.gateway
        if not self.is_connected:
            return
        assert gateway.models == self.parts.pool.registry.ready_ids()
        if self.is_reclaimed:
            assert gateway.mode == "spare_off"
        if now - max(gateway.told_at, gateway.since) > limits().connection.report_gap_s + TICK_S:
            told = [(replica.model, replica.state, replica.slots) for replica in gateway.replicas]
            assert told == [(replica.model, replica.state, replica.slots) for replica in self.box.describe().replicas]
            assert now - gateway.told_at <= limits().connection.heartbeat_s + limits().connection.report_gap_s + TICK_S

    def teardown(self) -> None:
        try:
            self.mend_engines()
            self._stop(hurry=True)
            assert self.gpu.free_mb == self.gpu.total_mb - self.gpu.others_mb
        finally:
            self.loop.close()
            logging.getLogger("runner").removeHandler(self.complaints)
            clock.install(self._clock_before)
            self._folder.cleanup()


TestModelLife = ModelLife.TestCase
TestModelLife.settings = settings(
    max_examples=25 * TIMES, stateful_step_count=40, deadline=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
