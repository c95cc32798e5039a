"""What a node is made of, put together: telemetry, ledger, models, queues, serving, operations. Gateways and port are above."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import aiohttp

from runner.config import BackendConfig, LlamaConfig, RunnerConfig
from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import make_plan, read_vllm_defaults
from runner.definitions.settings import MODELS, Settings, SettingsChange, diff_settings, read_settings
from runner.engines.port import EngineMaker, make_engine
from runner.engines.process import make_private_folder
from runner.engines.supervisor import EngineState
from runner.errors import RunnerError, SettingsConflict
from runner.fit import read_shape
from runner.ledger.ledger import Ledger
from runner.library.hub import PUBLIC_HUB, Hub
from runner.library.library import Library
from runner.limits import MIB, limits
from runner.operations.desired_state import DesiredState
from runner.operations.gate import Gate, GateRules
from runner.operations.operation import LoadBody, Operations
from runner.operations.trust import Governance
from runner.pool.capacity import Capacity
from runner.pool.loads import Loader, LoadOrder, Pool, Unloader
from runner.pool.models import AttachedServer, ModelState, Registry
from runner.queue import FairQueue, WaitBudget, read_rates, read_weights
from runner.serving.costs import Costs
from runner.serving.request import Counters
from runner.serving.service import Serving
from runner.telemetry import Reading, Telemetry, open_telemetry
from runner.tickets import Tickets
from runner.tls import ServerTls
from wire import clock
from wire.traces import open_traces

log = logging.getLogger(__name__)


class Phase(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"


@dataclass(slots=True)
class Parts:
    """One node, without gateways and port. ``reading`` is at most a second old after ``look``."""

    config: RunnerConfig
    settings: Settings
    ledger: Ledger
    pool: Pool
    budget: WaitBudget
    counters: Counters
    serving: Serving
    gate: Gate
    governance: Governance
    operations: Operations
    desired: DesiredState
    costs: Costs
    tickets: Tickets
    tls: ServerTls | None
    _make_queue: Callable[[ModelDefinition], FairQueue]
    phase: Phase = Phase.STARTING
    started_at: float = field(default_factory=clock.unix_s)
    reading: Reading | None = None
    _read_at: float = float("-inf")
    _measured_at: float = float("-inf")
    _discovered_at: float = float("-inf")
    _attached: AttachedServer | None = None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _reloading: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def look(self) -> Reading:
        """Return a reading of the machine, at most a second old; the loaded models are measured every fifteen."""
        now = clock.monotonic()
        if self.reading is None or now - self._read_at >= limits().connection.reading_s:
            self._read_at = now
            self.reading = await self.pool.capacity.read()
        # Reading the processes of engines costs more than reading the machine.
        if now - self._measured_at >= limits().connection.measure_s:
            self._measured_at = now
            for model in self.pool.registry.models:
                for replica in model.replicas if model.is_ready else []:
                    await self.pool.capacity.measure(replica)
        return self.reading

    async def discover(self, *, at_once: bool = False) -> None:
        """Look through the model files, unless that was done within half a minute."""
        now = clock.monotonic()
        if at_once or now - self._discovered_at >= limits().models.discovery_s:
            self._discovered_at = now
            await self.pool.registry.discover()

    async def seek(self, model_id: str) -> None:
        """Look through the model files again for a model that is not known, unless that was done within a second."""
        is_known = any(model.model_id == model_id for model in self.pool.registry.models)
        if not is_known and clock.monotonic() - self._discovered_at >= limits().models.seek_s:
            await self.discover(at_once=True)

    @property
    def is_settled(self) -> bool:
        """Whether the first start of everything the owner wants has succeeded or failed."""
        if self._attached is not None and self._attached.supervisor.state in {EngineState.UNLOADED, EngineState.LOADING}:
            return False
        return all(model.state is not ModelState.LOADING for model in self.pool.registry.models)

    @property
    def attached_error(self) -> str | None:
        """Why the server given with ``--backend`` cannot be used, None while it can or when there is none."""
        return None if self._attached is None else self._attached.supervisor.last_error

    def refresh_attached(self) -> None:
        if self._attached is not None:
            self._attached.refresh()

    async def reload_settings(self) -> SettingsChange:
        """Read the settings files again and take over what changed. Raises InvalidSettings, SettingsConflict."""
        async with self._reloading:  # else what was read first could be taken over last
            return await self._reload_settings()

    async def _reload_settings(self) -> SettingsChange:
        files = self.config.files
        new = await asyncio.to_thread(read_settings, *files.find_settings())
        registry = self.pool.registry
        free = {ModelState.UNLOADED, ModelState.FAILED}
        busy = {model.model_id for model in registry.models if model.replicas or model.state not in free}
        change = diff_settings(self.settings, new, busy)
        if taken := [f"{MODELS}.{model_id}" for model_id in change.added if model_id in busy]:
            raise SettingsConflict(
                f"models that were loaded without settings would get some: {', '.join(taken)}; unload them first.",
                details={"conflicts": taken},
            )
        self.settings = new
        for model_id in [*change.added, *change.updated]:
            registry.define(new.models[model_id])
        for model_id in change.removed:
            registry.forget(model_id)
        await self.discover(at_once=True)
        return change

    async def start_models(self) -> None:
        """Make every model known and start those that the owner wants from the beginning."""
        registry, engine = self.pool.registry, self.config.engine
        for definition in self.settings.models.values():
            registry.define(definition)
        await self.discover(at_once=True)
        if isinstance(engine, LlamaConfig):
            self._start_given(engine)
        elif isinstance(engine, BackendConfig):
            self._attach(engine)
        for definition in self.settings.models.values():
            if definition.enabled:
                self._spawn(self._load_wanted(definition.model_id))
        self._spawn(self.desired.restore())

    def refuse_new(self) -> None:
        """Begin to stop: what runs goes on, nothing new is taken."""
        self.phase = Phase.STOPPING
        self.serving.is_stopping = True
        self.operations.is_stopping = True

    async def close(self) -> None:
        self.refuse_new()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.operations.close()
        await self.pool.unloader.close()
        if self._attached is not None:
            await self._attached.close()

    async def _load_wanted(self, model_id: str) -> None:
        loader = self.pool.loader
        try:
            order = await loader.order(model_id, overrides={})
            if isinstance(order, LoadOrder):
                await loader.carry_out(order, lambda _: None)
        except RunnerError as error:
            log.error("model of the settings was not loaded model=%s: %s", model_id, error)  # noqa: TRY400  # text for the owner
            loader.note_refusal(model_id, error)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _start_given(self, engine: LlamaConfig) -> None:
        definition = ModelDefinition(
            model_id=engine.model_name, backend="gguf", model_path=str(engine.model_path), enabled=True,
            target_inflight=self.config.max_concurrent, options={"gguf_n_ctx": engine.context_tokens},
            translate=engine.translate,
        )  # fmt: skip
        model = self.pool.registry.define(definition)
        plan = make_plan(definition, overrides={}, path=engine.model_path, threads=engine.threads, gpu_ids=self.config.gpu_ids)
        self.pool.loader.start_wanted(model, plan)

    def _attach(self, backend: BackendConfig) -> None:
        slots = self.config.max_concurrent
        queue = self._make_queue(ModelDefinition(model_id="", backend="attached", target_inflight=slots))
        self._attached = AttachedServer(
            self.pool.registry, queue, url=backend.url, key=backend.key, given=backend.models, slots=slots,
            silent_s=limits().engines.silent_s, translate=backend.translate, tidies=backend.tidies,
        )  # fmt: skip
        self._attached.start()


@asynccontextmanager
async def assemble(
    config: RunnerConfig, client: aiohttp.ClientSession, *, on_change: Callable[[], None], wakes: Collection[asyncio.Event],
    engines: EngineMaker = make_engine, telemetry_of_node: Callable[[], Telemetry] = open_telemetry,
) -> AsyncIterator[Parts]:  # fmt: skip
    """Yield the parts of a node; nothing is loaded yet. ``on_change``: models; ``wakes`` are set when a request began or ended.

    Raises ConfigError and InvalidSettings.
    """
    files = config.files
    settings = await asyncio.to_thread(read_settings, *files.find_settings())
    if config.log_level is None and settings.service.log_level is not None:
        logging.getLogger().setLevel(settings.service.log_level.upper())
    if files.data is None:
        log.info("no --data folder: load tasks, measured memory and costs are forgotten when the node stops")
    async with AsyncExitStack() as stack:
        folder = files.data
        if folder is None:
            folder = await asyncio.to_thread(make_private_folder, "node")
            stack.push_async_callback(asyncio.to_thread, shutil.rmtree, folder, ignore_errors=True)
        ledger = await Ledger.open(folder)
        stack.push_async_callback(ledger.close)
        telemetry = await asyncio.to_thread(telemetry_of_node)
        stack.push_async_callback(asyncio.to_thread, telemetry.close)
        governance = await _open_governance(config, ledger)
        parts = _put_together(
            config, settings, telemetry, ledger, governance, client, on_change=on_change, wakes=wakes, engines=engines
        )
        parts.serving.traces = traces = await asyncio.to_thread(
            open_traces, config.environment, service="muster-node", instance=config.name
        )
        if traces is not None:
            stack.push_async_callback(asyncio.to_thread, traces.close)
        stack.push_async_callback(parts.close)
        if parts.tls is not None:
            await asyncio.to_thread(parts.tls.open)
        await parts.desired.open()
        await ledger.abandon_costs()
        await parts.look()  # a registration tells of the GPUs
        yield parts


async def _open_governance(config: RunnerConfig, ledger: Ledger) -> Governance:
    wanted = config.operations
    if wanted.key_path is not None and not wanted.is_level_given:
        log.warning(
            "operation tokens of level L0 are taken, because VERIFIED_OP_TOKEN_KEY_PATH is set: whoever has that key operates "
            "this node alone; say so with OP_TOKEN_LEVEL=0, or ask for more with OP_TOKEN_LEVEL=2"
        )
    if wanted.level == 2 and wanted.runner_id:
        log.warning("MUSTER_RUNNER_ID counts below level 2 only; at level 2 the key of the node names it")
    governance = Governance(wanted, data=config.files.data, name=config.name, ledger=ledger)
    await governance.open()
    if advice := governance.standing.advice:
        log.log(logging.INFO if governance.disabled else logging.WARNING, "%s", advice)
    return governance


def _put_together(
    config: RunnerConfig, settings: Settings, telemetry: Telemetry, ledger: Ledger, governance: Governance,
    client: aiohttp.ClientSession, *, on_change: Callable[[], None], wakes: Collection[asyncio.Event], engines: EngineMaker,
) -> Parts:  # fmt: skip
    files = config.files
    budget = WaitBudget(config.max_queue_depth)
    by_variable = read_weights(config.environment)
    read_vllm_defaults(config.environment)  # a variable that cannot be used is said now, not at the first load

    def weigh(tenant: str) -> float:
        return parts.settings.fairness.weights.get(tenant) or by_variable(tenant)

    def make_queue(definition: ModelDefinition) -> FairQueue:
        return FairQueue(slots=max(1, definition.target_inflight), limits=settings.fairness, budget=budget, weight_of=weigh)

    library = Library(files.model_base, files.hf_home, _make_hub(config), read_shape=read_shape)
    registry = Registry(library=library, make_queue=make_queue, on_change=on_change)
    memory = None if config.memory_budget_mb is None else config.memory_budget_mb * MIB
    capacity = Capacity(telemetry, ledger, budget_bytes=memory)
    unloader = Unloader(registry, capacity=capacity, drain_s=limits().engines.unload_drain_s)
    loader = Loader(
        registry, capacity=capacity, unloader=unloader, make_engine=lambda plan: engines(plan, client),
        threads=config.threads, gpu_ids=config.gpu_ids, defaults=config.environment,
    )  # fmt: skip
    pool, counters = Pool(registry, loader, unloader, capacity), Counters()
    costs = Costs(ledger, lambda: parts.settings.remote)
    serving = Serving(
        registry,
        rates=read_rates(config.environment),
        counters=counters,
        costs=costs,
        queue_timeout_s=limits().admission.timeout_s,
        wakes=wakes,
        decoding=lambda: parts.settings.decoding,
        keeps_engine_errors=config.keeps_engine_errors,
    )
    gate, tickets = _make_gate(config, governance, ledger), Tickets(config.tickets, ledger)
    operations = Operations(pool, gate, ledger, governance.identity, cluster_address=config.operations.cluster_address)

    async def load_again(body: LoadBody) -> Mapping[str, object]:
        await parts.seek(body.modelId)
        return await operations.load_again(body)

    parts = Parts(
        config=config, settings=settings, ledger=ledger, pool=pool, budget=budget,
        counters=counters, serving=serving,
        gate=gate, governance=governance, operations=operations, costs=costs, tickets=tickets,
        tls=None if config.tls is None else ServerTls(config.tls, now=tickets.now),
        _make_queue=make_queue,
        desired=DesiredState(
            ledger, governance, load_again, min_signers=config.operations.min_signers, on_change=on_change
        ),
    )  # fmt: skip
    return parts


def _make_gate(config: RunnerConfig, governance: Governance, ledger: Ledger) -> Gate:
    rules = GateRules(
        key_path=governance.key_path, level=governance.level, min_signers=config.operations.min_signers,
        runner_id=governance.runner_id, policy=lambda: governance.policy, ops_per_hour=config.operations.ops_per_hour,
        disabled=governance.disabled, counted_signers=config.operations.counted_signers,
    )  # fmt: skip
    return Gate(rules, ledger=ledger)


def _make_hub(config: RunnerConfig) -> Hub | None:
    home, env = config.files.hf_home, config.environment
    if home is None:
        return None
    return Hub(
        home / "hub",
        endpoint=env.get("HF_ENDPOINT") or PUBLIC_HUB,
        token=env.get("HF_TOKEN") or None,
        allow=config.files.hub_allow,
    )
