"""A fleet on the virtual clock: gateways as in production, with everything beyond them played from one seed.

Real: pipeline, keys, rate limits, dispatcher, placement, ejections, keeper and the writer of records. Played: nodes with their
slots and queue, clients, the database of records, and what goes wrong. A seed that fails is run again alone::

    MUSTER_TEST_SEEDS=7 ./muster test tests/system/gateway/test_fleet_simulator.py
"""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from core.limits import GatewayLimits
from gateway.dialects.surface import SURFACES
from gateway.request.models import KeyEntry
from gateway.values import Caller, Priority
from nodes.links.port import EndKind, Link, Sink
from nodes.session import OpenRequest
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import CHAT, REPLY, SSE, STREAM, Gateway, MemoryDatabase
from tests.fakes.virtual_loop import VirtualLoop
from tests.fakes.waiting import takes
from wire import clock
from wire.contract import OPEN_REQUEST_STATES
from wire.credentials import CredentialKind, mint_credential

BEAT_S = 5.0
"""How often a node says that it is there."""
NODE_QUEUE = 16
FAULTS = ("lost", "silent", "slow", "flapping", "drained", "partition")


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


@dataclass
class Report:
    """What came of a simulation."""

    seed: int
    scale: Scale
    states: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    left: int = 0
    held: int = 0
    """Failover slots that were seen held, by the looks at them."""
    broken: list[str] = field(default_factory=list)
    """What did not hold, in sentences."""
    cpu_s: float = 0.0

    def __str__(self) -> str:
        what = f"seed {self.seed}: {self.scale.nodes} nodes, {self.scale.seconds:g} virtual seconds, {self.cpu_s:.1f} s of CPU"
        counts = [f"{name} {dict(sorted(found.items()))}" for name, found in self._counts().items()]
        told = f"clients that left: {self.left}, failover slots seen: {self.held}"
        return "\n  ".join([what, *counts, told, *(f"BROKEN: {one}" for one in self.broken)])

    def _counts(self) -> dict[str, Counter[Any]]:  # Any: words and numbers
        return {"records": self.states, "answers": self.statuses, "faults": self.faults}


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

    def end_streams(self, kind: EndKind, message: str) -> None:
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
        self._asked: list[tuple[asyncio.Task[None], MemoryClient, bool]] = []
        self._until = 0.0

    async def run(self) -> Report:
        """Play it to its end, and return what came of it."""
        began, self._until = time.process_time(), clock.monotonic() + self.scale.seconds
        self._build()
        async with asyncio.TaskGroup() as tasks:
            for job in (self._beat(), self._sweep(), self._break_things(), self._ask_for_ever()):
                tasks.create_task(job)
        await self._finish()
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
        entries = []
        for number in range(scale.tenants):
            minted = mint_credential(CredentialKind.CLIENT)
            caller = Caller(
                key_id=uuid.UUID(int=number + 1), key_name="k", tenant=f"t{number}", requests_per_minute=10**6,
                allowed_models=frozenset(), priority=Priority.NORMAL,
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

    # what goes wrong

    async def _break_things(self) -> None:
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

    def _judge_clients(self) -> None:
        for task, client, leaves in self._asked:
            if task.done() and (error := task.exception()) is not None:
                self._complain(f"a request ended with {error!r}")
            self.report.statuses[client.status] += 1
            if not leaves and not client.is_whole:
                self._complain(f"a client has no whole answer: {client.status}")


def simulate(seed: int, scale: Scale) -> Report:
    """Play a fleet from a seed on a virtual clock of its own."""

    async def play() -> Report:
        return await Simulation(seed, scale).run()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play())
