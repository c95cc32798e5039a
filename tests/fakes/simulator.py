"""A fleet on the virtual clock: gateways as in production, with everything beyond them played from one seed.

Real: pipeline, keys, rate limits, budgets, dispatcher, placement, ejections, keeper and the writer of records. Played: nodes
with their slots and queue, clients, the database of records, Valkey by the rule of its script (``tests.fakes.budgets``),
and what goes wrong. A seed that fails is run again alone::

    MUSTER_TEST_SEEDS=7 ./muster test tests/system/gateway/test_fleet_simulator.py
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any, cast

import redis.exceptions

from core.limits import GatewayLimits
from gateway.dialects.surface import SURFACES
from gateway.request.budgets import Budgets
from gateway.request.models import KeyEntry
from gateway.values import Budget, BudgetKind, Caller, OwnedBudget, Priority
from gateway.values import Counter as Budgeted
from nodes.links.port import EndKind, Link, Sink
from nodes.session import OpenRequest
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.budgets import MemoryTerms, MemoryValkey
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import CHAT, REPLY, SSE, STREAM, Gateway, MemoryDatabase
from tests.fakes.virtual_loop import VirtualLoop
from tests.fakes.waiting import takes
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState
from wire.credentials import CredentialKind, mint_credential

BEAT_S = 5.0
"""How often a node says that it is there."""
NODE_QUEUE = 16
UNFAIR = 0.1
"""A tenant that waits has so much more or less of the slots than its weight gives it."""
ENOUGH_SAMPLES = 1000
FAULTS = ("lost", "silent", "slow", "flapping", "drained", "partition", "valkey")
BUDGETS = (
    Budget(BudgetKind.TOKENS_PER_DAY, 900), Budget(BudgetKind.ALL_REQUESTS_PER_MINUTE, 40),
    Budget(BudgetKind.CONCURRENT_REQUESTS, 3), None,
)  # fmt: skip
"""Of the tenants, in turn."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large a simulation is. Times in virtual seconds."""

    nodes: int = 40
    gateways: int = 2
    tenants: int = 10
    models: int = 4
    seconds: float = 120.0
    requests_per_s: float = 10.0
    faults_per_min: float = 12.0
    has_budgets: bool = True
    weights: tuple[float, ...] = (1.0,)
    priorities: tuple[Priority, ...] = (Priority.NORMAL,)
    """Of the tenants, in turn, as are weights."""


@dataclass
class Report:
    """What came of a simulation."""

    seed: int
    scale: Scale
    states: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    budgets: Counter[str] = field(default_factory=Counter)
    """The most that a tenant had of a limit or budget."""
    left: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    """What tenants had of the slots while all of them waited, for what their weights give them; the worst of the gateways."""
    waited: Counter[str] = field(default_factory=Counter)
    """The longest time without a grant of a tenant that waits, in whole seconds."""
    held: int = 0
    """Failover slots that were seen held, by the looks at them."""
    broken: list[str] = field(default_factory=list)
    """What did not hold, in sentences."""
    cpu_s: float = 0.0

    def __str__(self) -> str:
        what = f"seed {self.seed}: {self.scale.nodes} nodes, {self.scale.seconds:g} virtual seconds, {self.cpu_s:.1f} s of CPU"
        counts = [f"{name} {dict(sorted(found.items()))}" for name, found in self._counts().items()]
        told = f"clients that left: {self.left}, failover slots seen: {self.held}"
        shares = [f"shares {', '.join(f'{name} {share:.3f}' for name, share in self.shares.items())}"] if self.shares else []
        return "\n  ".join([what, *counts, told, *shares, *(f"BROKEN: {one}" for one in self.broken)])

    def _counts(self) -> dict[str, Counter[Any]]:  # Any: words and numbers
        counts: dict[str, Counter[Any]] = {"records": self.states, "answers": self.statuses, "faults": self.faults}
        return counts | {"most of budgets": self.budgets, "waited": self.waited}


class Box:
    """A node: slots, a short queue, and a link to each gateway. ``speed`` is tokens a second."""

    def __init__(self, number: int, draw: random.Random, *, models: tuple[str, ...]) -> None:
        self._draw, slots, speed = random.Random(draw.random()), draw.randint(1, 4), draw.choice((15.0, 30.0, 60.0))
        self.node_id, self.name = uuid.UUID(int=number + 1), f"n{number}"
        self.models, self.slots, self.speed = models, slots, speed
        self.links: dict[Gateway, SimulatedLink] = {}
        self.is_silent = False
        self.slowness = 1.0
        self._running: set[FakeStream] = set()
        self._waiting: deque[FakeStream] = deque()

    def take(self, stream: FakeStream) -> None:
        if len(self._running) < self.slots:
            self._start(stream)
        elif len(self._waiting) < NODE_QUEUE:
            self._waiting.append(stream)
        else:
            asyncio.get_running_loop().call_soon(lambda: stream.end(EndKind.BUSY, retry_after_s=1.0))

    def drop(self, stream: FakeStream) -> None:
        """The stream is over, or nobody wants it any more."""
        self._running.discard(stream)
        if stream in self._waiting:
            self._waiting.remove(stream)
        while self._waiting and len(self._running) < self.slots:
            self._start(self._waiting.popleft())

    def _start(self, stream: FakeStream) -> None:
        self._running.add(stream)
        tokens = self._draw.randint(20, 80)
        asyncio.get_running_loop().call_later(0.05 * self.slowness, self._begin, stream, tokens)

    def _begin(self, stream: FakeStream, tokens: int) -> None:
        if stream not in self._running or self._is_held(self._begin, stream, tokens):
            return
        if stream.request.is_streaming:
            stream.answer(STREAM[0], headers=SSE, ends=False)
        asyncio.get_running_loop().call_later(tokens / self.speed * self.slowness, self._end, stream)

    def _end(self, stream: FakeStream) -> None:
        if stream not in self._running or self._is_held(self._end, stream):
            return
        if stream.request.is_streaming:
            for part in STREAM[1:]:
                if stream in stream.link.streams:
                    stream.sink.on_data(part)
            stream.end(EndKind.COMPLETE)
        else:
            stream.answer(REPLY)
        self.drop(stream)

    def _is_held(self, again: Callable[..., None], *arguments: Any) -> bool:  # Any: whatever ``again`` takes
        if self.is_silent:
            asyncio.get_running_loop().call_later(1.0, again, *arguments)
        return self.is_silent


class SimulatedLink(FakeLink):
    """The link of a node to one gateway."""

    def __init__(self, box: Box) -> None:
        super().__init__(*box.models, slots=box.slots, name=box.name, node_id=box.node_id)
        self.box = box

    def open_stream(self, request: OpenRequest, sink: Sink) -> FakeStream:
        stream = _Stream(self, super().open_stream(request, sink))
        self.box.take(stream)
        return stream

    def end_streams(self, kind: EndKind, message: str, *, reason: str = "") -> None:
        streams = list(self.streams)
        super().end_streams(kind, message)
        for stream in streams:
            self.box.drop(stream)


class _Stream(FakeStream):
    """A stream whose end, from either side, frees its slot on the node."""

    def __init__(self, link: SimulatedLink, opened: FakeStream) -> None:
        super().__init__(link, opened.request, opened.sink)
        link.streams[link.streams.index(opened)] = self

    def cancel(self, reason: str) -> None:
        super().cancel(reason)
        assert isinstance(self.link, SimulatedLink)
        self.link.box.drop(self)


class Simulation:
    """One run. Everything random comes from ``seed``."""

    def __init__(self, seed: int, scale: Scale) -> None:
        self.draw, self.scale = random.Random(seed), scale
        self.report = Report(seed, scale)
        self.limits = GatewayLimits(no_node_wait_s=10.0)
        self.gateways: list[Gateway] = []
        self.databases: list[MemoryDatabase] = []
        self.boxes: list[Box] = []
        self.keys: list[str] = []
        self.callers: dict[str, Caller] = {}
        self.valkey, self.terms = MemoryValkey(takes_s=0.001), MemoryTerms()
        self._cuts: dict[Gateway, CutValkey] = {}
        self._served: dict[Gateway, Counter[str]] = {}
        self._granted: dict[Gateway, dict[str, tuple[int, float, float]]] = {}
        """The number of a tenant's last grant, and since when it waits for another one, and is the next to get one."""
        self._asked: list[tuple[asyncio.Task[None], MemoryClient, bool]] = []
        self._until = 0.0

    async def run(self) -> Report:
        """Play it to its end, and return what came of it."""
        began, self._until = time.process_time(), clock.monotonic() + self.scale.seconds
        self._build()
        async with asyncio.TaskGroup() as tasks:
            holding = [tasks.create_task(self._budgets_of(gateway).run()) for gateway in self.gateways]
            for job in (self._beat(), self._sweep(), self._weigh(), self._break_things(), self._ask_for_ever()):
                tasks.create_task(job)
            await takes(self.scale.seconds)
            await self._finish()
            for task in holding:
                task.cancel()
        self.report.cpu_s = time.process_time() - began
        return self.report

    def _build(self) -> None:
        scale, models = self.scale, [f"m{number}" for number in range(self.scale.models)]
        for _ in range(scale.gateways):
            database = MemoryDatabase()
            gateway = Gateway(
                limits=self.limits, connect=database.connect, models=dict.fromkeys(models, ()), max_queue=200, per_minute=10**6
            )
            self.gateways.append(gateway)
            self.databases.append(database)
            self._cuts[gateway] = CutValkey(self.valkey)
            self._served[gateway], self._granted[gateway] = Counter(), {}
            gateway.pipeline.budgets = Budgets(
                gateway_id=gateway.gateway_id, valkey=self._cuts[gateway], spending=self, terms=self.terms,
                in_thread=call_at_once, find_others=partial(self._find_others, gateway), currency="EUR",
            )  # fmt: skip
        entries = []
        for number in range(scale.tenants):
            minted = mint_credential(CredentialKind.CLIENT)
            tenant, budget = f"t{number}", BUDGETS[number % len(BUDGETS)] if scale.has_budgets else None
            caller = self.callers[tenant] = Caller(
                key_id=uuid.UUID(int=number + 1), key_name="k", tenant=tenant, requests_per_minute=10**6,
                allowed_models=frozenset(), weight=scale.weights[number % len(scale.weights)],
                priority=scale.priorities[number % len(scale.priorities)],
                budgets=() if budget is None else (OwnedBudget(f"tenant:{tenant}", tenant, budget),),
            )  # fmt: skip
            entries.append((minted.keyid, KeyEntry(minted.digest, caller, revoked=False, expires_at=None)))
            self.keys.append(minted.text)
        for gateway in self.gateways:
            gateway.catalogue.apply_keys(entries, replace=True)
        for number in range(scale.nodes):
            served = tuple(self.draw.sample(models, self.draw.randint(1, min(3, len(models)))))
            box = Box(number, self.draw, models=served)
            self.boxes.append(box)
            for gateway in self.gateways:
                self._connect(box, gateway)

    # nodes

    def _connect(self, box: Box, gateway: Gateway) -> None:
        link = box.links[gateway] = SimulatedLink(box)
        gateway.registry.add(link)

    def _cut(self, box: Box, gateway: Gateway) -> None:
        link = box.links.pop(gateway, None)
        if link is not None:
            gateway.registry.remove(link)

    async def _beat(self) -> None:
        while clock.monotonic() < self._until:
            now = clock.awake()
            for box in self.boxes:
                if not box.is_silent:
                    for link in box.links.values():
                        link.last_seen = now
            self._look()
            await takes(BEAT_S)

    async def _sweep(self) -> None:
        while clock.monotonic() < self._until:
            for gateway in self.gateways:
                gateway.pipeline.dispatcher._keeper.apply((), targets={}, peers={})
            for box in self.boxes:  # a link that was given up is dialled again once the node can
                for gateway, link in list(box.links.items()):
                    if link.closed and not box.is_silent:
                        self._connect(box, gateway)
            await takes(1.0)

    # budgets

    def _budgets_of(self, gateway: Gateway) -> Budgets:
        assert gateway.pipeline.budgets is not None
        return gateway.pipeline.budgets

    def _find_others(self, gateway: Gateway) -> list[uuid.UUID]:
        return [other.gateway_id for other in self.gateways if other is not gateway]

    def sum_before(self, counters: Collection[Budgeted], *, without: Collection[uuid.UUID]) -> dict[Budgeted, int] | None:
        """Say what gateways used that are gone; here none ever is."""
        others = {gateway.gateway_id for gateway in self.gateways} - set(without)
        return None if others else dict.fromkeys(counters, 0)

    def sum_of_gone(self, counter: Budgeted, gateway_id: uuid.UUID) -> int | None:
        return None

    async def _weigh(self) -> None:
        """Look every second who has what of the slots, and who waits for how long without a grant."""
        while clock.monotonic() < self._until:
            await takes(1.0)
            for gateway in self.gateways:
                queue = gateway.dispatcher._queue
                if not queue.lines:
                    self._granted[gateway].clear()
                    continue
                waiting = [tenant for tenant in self.callers if queue.count_tenant(tenant)]
                self._look_for_starvation(gateway, waiting)
                if len(waiting) == len(self.callers):
                    self._served[gateway].update(
                        stream.request.tenant for link in gateway.registry for stream in cast("FakeLink", link).streams
                    )

    @property
    def is_one_line(self) -> bool:
        """Whether all tenants wait for the same, so that what they had says who is next."""
        return self.scale.models == len(set(self.scale.priorities)) == 1

    def _look_for_starvation(self, gateway: Gateway, waiting: list[str]) -> None:
        """Complain of a tenant that is next by what it had, and gets nothing while others do."""
        now, accounts = clock.monotonic(), gateway.dispatcher._queue._accounts
        newest = max((account.last_granted for account in accounts.values()), default=0)
        scores = {tenant: accounts[tenant].score(now) for tenant in waiting}
        least = min(scores.values(), default=0.0)
        for tenant in self.callers:
            last = accounts[tenant].last_granted if tenant in accounts else 0
            number, since, owed = self._granted[gateway].get(tenant, (last, now, now))
            if tenant not in waiting or number != last:
                since = owed = now
            if scores.get(tenant, least) > least:
                owed = now
            self._granted[gateway][tenant] = last, since, owed
            if now - since >= 1:
                self.report.waited[tenant] = max(self.report.waited[tenant], int(now - since))
            if self.is_one_line and now - owed > self.limits.starvation_s and newest > last + len(self.callers):
                self._complain(f"{tenant} is next for {now - owed:.0f} s and was granted nothing, while others were")

    # what goes wrong

    async def _break_things(self) -> None:
        if not self.scale.faults_per_min:
            return
        async with asyncio.TaskGroup() as tasks:
            while clock.monotonic() < self._until:
                await takes(self.draw.expovariate(self.scale.faults_per_min / 60))
                kind = self.draw.choice(FAULTS)
                self.report.faults[kind] += 1
                tasks.create_task(self._fault(kind, self.draw.choice(self.boxes)))

    async def _fault(self, kind: str, box: Box) -> None:
        seconds = self.draw.uniform(2, 40)
        match kind:
            case "lost":
                await self._part([box], self.gateways, seconds)
            case "partition":
                some = self.draw.sample(self.boxes, max(1, len(self.boxes) // 5))
                await self._part(some, [self.draw.choice(self.gateways)], seconds)
            case "flapping":
                for _ in range(6):
                    await self._part([box], self.gateways, 0.1)
                    await takes(2.0)
            case "silent":
                box.is_silent = True
                await takes(seconds)
                box.is_silent = False
            case "valkey":  # for all gateways, or for one alone
                cut = self.valkey if self.draw.random() < 0.5 else self.draw.choice(list(self._cuts.values()))
                cut.is_away = True
                await takes(seconds)
                cut.is_away = False
            case "slow":
                box.slowness = 8.0
                await takes(seconds)
                box.slowness = 1.0
            case _:
                self._drain(box, is_draining=True)
                await takes(seconds)
                self._drain(box, is_draining=False)

    async def _part(self, boxes: Sequence[Box], gateways: Sequence[Gateway], seconds: float) -> None:
        """Cut these nodes off from these gateways for a while."""
        pairs = [(box, gateway) for box in boxes for gateway in gateways]
        for box, gateway in pairs:
            self._cut(box, gateway)
        await takes(seconds)
        for box, gateway in pairs:
            if gateway not in box.links:
                self._connect(box, gateway)

    def _drain(self, box: Box, *, is_draining: bool) -> None:
        for link in box.links.values():
            link.policy.draining = is_draining

    # clients

    async def _ask_for_ever(self) -> None:
        while clock.monotonic() < self._until:
            await takes(self.draw.expovariate(self.scale.requests_per_s))
            self._ask()

    def _ask(self) -> None:
        loop, gateway = asyncio.get_running_loop(), self.draw.choice(self.gateways)
        model, is_streaming = f"m{self.draw.randrange(self.scale.models)}", self.draw.random() < 0.6
        text = f"question {self.draw.randrange(50)} " * self.draw.randint(1, 30)
        body = {"model": model, "messages": [{"role": "user", "content": text[:900]}], "stream": is_streaming}
        headers = {"authorization": f"Bearer {self.draw.choice(self.keys)}", "content-type": "application/json"}
        client = MemoryClient(body=[json.dumps(body).encode()], headers=headers, limits=self.limits)
        task = loop.create_task(gateway.pipeline.serve(client.connection, SURFACES[CHAT]))
        leaves = self.draw.random() < 0.03
        if leaves:
            self.report.left += 1
            loop.call_later(self.draw.uniform(0, 5), client.leave)
        self._asked.append((task, client, leaves))

    # what has to hold

    def _look(self) -> None:
        for gateway in self.gateways:
            held = self._look_at_failover(gateway)
            for link in gateway.registry:
                assert isinstance(link, FakeLink)
                if not 0 <= link.active <= link.max_concurrent:
                    self._complain(f"{link.node_name} runs {link.active} of {link.max_concurrent} requests")
                if len(link.streams) + held[link] > link.active:
                    what = f"{len(link.streams)} streams and {held[link]} slots held for others"
                    self._complain(f"{link.node_name} has {what}, and counts {link.active}")
        used: Counter[Budgeted] = Counter()
        for gateway in self.gateways:
            used.update({counter: share.used for counter, share in self._budgets_of(gateway)._shares.items()})
        for counter, total in used.items():
            (owned,) = self.callers[counter.owner.removeprefix("tenant:")].budgets
            if total > owned.budget.amount:
                self._complain(f"{counter.owner} uses {total} of {owned.budget.amount} {counter.kind}")

    def _look_at_failover(self, gateway: Gateway) -> Counter[Link]:
        """Return how many slots of each node are held for requests of nodes that are silent."""
        found: Counter[Link] = Counter()
        for job, silent in gateway.pipeline.failover.held.items():
            if job.failover is None or job.failover.released:
                continue
            found[job.failover.link] += 1
            if job.failover.link is silent:
                self._complain(f"{silent.node_name} holds a slot for its own request")
            if not silent.closed and 1.5 < silent.silence_s < silent.windows.failover_s:
                self._complain(f"{silent.node_name} was heard, and slots are held for its requests")
        self.report.held += found.total()
        if found.total() > self.limits.failover_slots:
            self._complain(f"{found.total()} failover slots are held")
        return found

    def _complain(self, what: str) -> None:
        if len(self.report.broken) < 20:
            self.report.broken.append(f"at {clock.monotonic():.1f} s: {what}")

    async def _finish(self) -> None:
        """Let what is under way come to its end, and judge."""
        for box in self.boxes:
            box.is_silent, box.slowness = False, 1.0
        within = self.limits.request_s + self.limits.queue_s
        pending = [task for task, _, _ in self._asked if not task.done()]
        if pending:
            _, late = await asyncio.wait(pending, timeout=within)
            if late:
                self._complain(f"{len(late)} requests have no end {within:g} s after the last was asked")
        await takes(5.0)
        self._judge_clients()
        for gateway, database in zip(self.gateways, self.databases, strict=True):
            await gateway.records.stop()
            self.report.states.update(row["state"] for row in database.rows.values())
            if open_ones := sum(row["state"] in OPEN_REQUEST_STATES for row in database.rows.values()):
                self._complain(f"{open_ones} requests that were accepted have no final state")
            if active := sum(link.active for link in gateway.registry):
                self._complain(f"{active} slots are held by nobody")
            if gateway.dispatcher.depth:
                self._complain(f"{gateway.dispatcher.depth} requests wait in a queue that nobody watches")
        self._judge_budgets()
        self._judge_shares()

    def _judge_budgets(self) -> None:
        """Judge by the rows alone, which know nothing of shares."""
        rows: dict[str, list[dict[str, Any]]] = {tenant: [] for tenant in self.callers}
        for database in self.databases:
            for row in database.rows.values():
                if row["state"] != RequestState.REJECTED:
                    rows[row["tenant"]].append(row)
        for tenant, caller in self.callers.items():
            for owned in caller.budgets:
                most = find_most(owned.budget.kind, rows[tenant])
                kind = owned.budget.kind.value
                self.report.budgets[kind] = max(self.report.budgets[kind], most)
                if most > owned.budget.amount:
                    self._complain(f"{tenant} had {most} of {owned.budget.amount} {owned.budget.kind}")

    def _judge_shares(self) -> None:
        if not self.is_one_line:
            return
        whole = sum(caller.weight for caller in self.callers.values())
        for served in self._served.values():
            total = sum(served.values())
            if total < ENOUGH_SAMPLES:
                continue
            for tenant, caller in self.callers.items():
                share = served[tenant] / total / (caller.weight / whole)
                if abs(share - 1) >= abs(self.report.shares.get(tenant, 1.0) - 1):
                    self.report.shares[tenant] = share
                if abs(share - 1) > UNFAIR:
                    self._complain(f"{tenant} had {share:.2f} times its share while all waited")

    def _judge_clients(self) -> None:
        for task, client, leaves in self._asked:
            if task.done() and (error := task.exception()) is not None:
                self._complain(f"a request ended with {error!r}")
            self.report.statuses[client.status] += 1
            if not leaves and not client.is_whole:
                self._complain(f"a client has no whole answer: {client.status}")


class CutValkey:
    """The way of one gateway to Valkey."""

    def __init__(self, valkey: MemoryValkey) -> None:
        self._valkey, self.is_away = valkey, False

    async def eval(self, script: str, numkeys: int, *words: str) -> Any:  # Any: as in redis-py
        self._require_way()
        return await self._valkey.eval(script, numkeys, *words)

    async def hkeys(self, name: str) -> list[bytes]:
        self._require_way()
        return await self._valkey.hkeys(name)

    def _require_way(self) -> None:
        if self.is_away:
            raise redis.exceptions.ConnectionError("Valkey is away from here")


async def call_at_once(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Do what another thread would, within the time that PostgreSQL takes."""
    await takes(0.002)
    return function(*arguments, **named)


def find_most(kind: BudgetKind, rows: list[dict[str, Any]]) -> int:
    """Return the most that requests used of a limit or budget at any time."""
    if kind is BudgetKind.TOKENS_PER_DAY:
        return sum(min(row["prompt_tokens"] + row["completion_tokens"], row["reserved_tokens"]) if row["tokens_estimated"]
                   else (row["prompt_tokens"] or 0) + (row["completion_tokens"] or 0) for row in rows)  # fmt: skip
    began = [datetime.fromisoformat(row["created_at"]) for row in rows]
    if kind is BudgetKind.CONCURRENT_REQUESTS:
        ended = [datetime.fromisoformat(row["finished_at"]) for row in rows]
    else:  # a moment less than the minute: a row is made a moment after its request was counted
        ended = [moment + timedelta(seconds=59.9) for moment in began]
    steps = sorted([*((moment, 1) for moment in began), *((moment, -1) for moment in ended)])
    return max(itertools.accumulate((step for _, step in steps), initial=0))


def simulate(seed: int, scale: Scale) -> Report:
    """Play a fleet from a seed on a virtual clock of its own."""

    async def play() -> Report:
        return await Simulation(seed, scale).run()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play())
