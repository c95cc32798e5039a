"""Nodes that are as fast as they compute, asked under different policies of placement, on the virtual clock.

The gateway is real, as in ``tests.fakes.simulator``; played are nodes and clients. A node computes prompts one after the other,
keeps what it computed, and generates for all of its requests at a time, for each the slower the more there are.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import quantiles
from typing import Any

from core.limits import GatewayLimits
from gateway.dialects.surface import SURFACES
from gateway.request.models import KeyEntry
from gateway.request.placement import Choice, Placement, Wish
from gateway.values import Caller
from nodes.links import Link
from nodes.links.port import EndKind, Sink
from nodes.session import OpenRequest
from nodes.states import Windows
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import CHAT, SSE, STREAM, Gateway, MemoryDatabase
from tests.fakes.virtual_loop import VirtualLoop
from tests.fakes.waiting import takes
from wire import clock
from wire.credentials import CredentialKind, mint_credential

TOKEN_CHARS = 4
_PIECE_TOKENS = 64
_STEP = 10
"""Tokens that a chunk stands for."""


class Policy(StrEnum):
    """How a node is chosen."""

    SCORE = "score"
    LEAST_LOAD = "least load"
    ROUND_ROBIN = "round robin"

    @property
    def limits(self) -> dict[str, float]:
        """The limits of a gateway that chooses so."""
        others = ("active", "latency", "reliability", "affinity")
        return {} if self is Policy.SCORE else {"score_load": 1.0, **{f"score_{name}": 0.0 for name in others}}


class InTurn(Placement):
    """Chooses the node that got its last request longest ago, whatever it has to do."""

    def choose(self, links: Sequence[Link], model: str, wish: Wish | None, *, held_s: float) -> Choice:
        return Choice(min(links, key=lambda link: link.last_served), wish, "least_load")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a node can do. ``generate_s``: tokens a second of one request alone; each further one slows all by ``sharing``.

    ``fails_after_s``: from then on every request fails before its first byte.
    """

    slots: int = 8
    prefill_s: float = 2000.0
    generate_s: float = 40.0
    sharing: float = 0.1
    kept_tokens: int = 200_000
    fails_after_s: float = math.inf


@dataclass(frozen=True)
class Asked:
    """One request: who asks it and for how many tokens."""

    prompt: str
    key: int = 0
    tokens: int = 60


@dataclass
class Tally:
    """What came of a contest. Times in milliseconds; ``nodes``: requests by the name of the node that began them."""

    nodes: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    whole_ms: list[float] = field(default_factory=list)
    first_ms: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    reused_tokens: int = 0
    ejected: int = 0

    def percentile(self, times: Sequence[float], share: int) -> float:
        return quantiles(times, n=100)[share - 1]

    def share_of(self, name: str) -> float:
        return self.nodes[name] / sum(self.nodes.values())

    @property
    def reused(self) -> float:
        return self.reused_tokens / self.prompt_tokens

    def __str__(self) -> str:
        shares = ", ".join(f"{name} {self.share_of(name):.0%}" for name in sorted(self.nodes))
        whole, first = (
            " / ".join(f"{self.percentile(times, share):,.0f}" for share in (50, 95))
            for times in (self.whole_ms, self.first_ms)
        )
        failed = sum(count for status, count in self.statuses.items() if status != 200)
        return f"whole p50/p95 {whole} ms, first byte {first} ms, reused {self.reused:.0%}, failed {failed}; {shares}"


class ScriptedNode(FakeLink):
    """A node and its link."""

    def __init__(self, name: str, machine: Machine, tally: Tally) -> None:
        super().__init__("m", slots=machine.slots, name=name, node_id=uuid.uuid5(uuid.NAMESPACE_DNS, name))
        self.windows = Windows(1e9, 1e9, 1e9)  # nobody says for it that it is there
        self._machine, self._tally = machine, tally
        self._began, self._computing_until = clock.monotonic(), 0.0
        self._kept: OrderedDict[int, None] = OrderedDict()

    def open_stream(self, request: OpenRequest, sink: Sink) -> FakeStream:
        stream = super().open_stream(request, sink)
        loop, now, body = asyncio.get_running_loop(), clock.monotonic(), json.loads(request.body)
        self._tally.nodes[self.node_name] += 1
        if now - self._began >= self._machine.fails_after_s:
            loop.call_later(0.02, lambda: stream.end(EndKind.ENGINE_FAILED, retryable=True))
            return stream
        lacking = self._compute(json.dumps(body["messages"]))
        self._computing_until = max(now, self._computing_until) + lacking / self._machine.prefill_s
        loop.call_at(self._computing_until, self._begin, stream, body["max_tokens"])
        return stream

    def _begin(self, stream: FakeStream, tokens: int) -> None:
        if stream not in self.streams:
            return
        stream.answer(STREAM[0], headers=SSE, ends=False)
        self._generate(stream, tokens)

    def _generate(self, stream: FakeStream, tokens: int) -> None:
        if stream not in self.streams:
            return
        if tokens > 0:
            pace = self._machine.generate_s / (1 + self._machine.sharing * (len(self.streams) - 1))
            stream.sink.on_data(STREAM[1])
            asyncio.get_running_loop().call_later(min(tokens, _STEP) / pace, self._generate, stream, tokens - _STEP)
            return
        for part in STREAM[2:]:
            if stream in self.streams:
                stream.sink.on_data(part)
        stream.end(EndKind.COMPLETE)

    def _compute(self, prompt: str) -> int:
        """Return how many tokens of a prompt it has to compute; from then on it keeps them."""
        size = _PIECE_TOKENS * TOKEN_CHARS
        ends = [*range(size, len(prompt), size), len(prompt)]
        pieces = [hash(prompt[:end]) for end in ends]
        known = next((number for number, piece in enumerate(pieces) if piece not in self._kept), len(pieces))
        for piece in pieces:
            self._kept.pop(piece, None)
            self._kept[piece] = None
        while len(self._kept) > self._machine.kept_tokens // _PIECE_TOKENS:
            self._kept.popitem(last=False)
        whole = len(prompt) // TOKEN_CHARS
        lacking = (len(prompt) - (ends[known - 1] if known else 0)) // TOKEN_CHARS
        self._tally.prompt_tokens += whole
        self._tally.reused_tokens += whole - lacking
        return lacking


class Contest:
    """One gateway, some nodes, and clients that ask them."""

    def __init__(self, policy: Policy, machines: dict[str, Machine], *, keys: int = 1, **limits: Any) -> None:  # Any: limits
        self.tally = Tally()
        bounds = GatewayLimits(**{**policy.limits, **limits})
        self.gateway = Gateway(
            limits=bounds, connect=MemoryDatabase().connect, max_queue=10_000, per_minute=10**9, max_prompt_chars=10**6
        )
        if policy is Policy.ROUND_ROBIN:
            self.gateway.dispatcher._placement = InTurn(bounds)
        self.nodes = [ScriptedNode(name, machine, self.tally) for name, machine in machines.items()]
        for node in self.nodes:
            self.gateway.registry.add(node)
        minted = [mint_credential(CredentialKind.CLIENT) for _ in range(keys)]
        self._keys = [one.text for one in minted]
        entries = [
            (one.keyid, KeyEntry(one.digest, _caller(number), revoked=False, expires_at=None))
            for number, one in enumerate(minted)
        ]
        self.gateway.catalogue.apply_keys(entries, replace=True)

    async def ask(self, asked: Asked) -> None:
        """Ask for a stream and take the times of its first and last byte."""
        body = {
            "model": "m", "messages": [{"role": "user", "content": asked.prompt}], "stream": True, "max_tokens": asked.tokens,
        }  # fmt: skip
        headers = {"authorization": f"Bearer {self._keys[asked.key]}", "content-type": "application/json"}
        client, began = _Client(json.dumps(body).encode(), headers, self.gateway.limits), clock.monotonic()
        await self.gateway.pipeline.serve(client.connection, SURFACES[CHAT])
        self.tally.statuses[client.status] += 1
        if client.status == 200:
            self.tally.first_ms.append((client.first_at - began) * 1000)
            self.tally.whole_ms.append((clock.monotonic() - began) * 1000)

    async def arrive(self, asked: Sequence[Asked], *, per_s: float, draw: random.Random) -> None:
        """Ask at random moments, whatever comes of what was asked before."""
        async with asyncio.TaskGroup() as tasks:
            for one in asked:
                await takes(draw.expovariate(per_s))
                tasks.create_task(self.ask(one))

    async def keep_busy(self, lines: Sequence[Sequence[Asked]], *, pause_s: float = 0.0) -> None:
        """Ask each line of requests one after the other, all lines at a time."""

        async def ask_all(line: Sequence[Asked]) -> None:
            for one in line:
                await self.ask(one)
                if pause_s:
                    await takes(pause_s)

        async with asyncio.TaskGroup() as tasks:
            for line in lines:
                tasks.create_task(ask_all(line))

    async def play(self, ask: Ask) -> Tally:
        """Have clients ask, and return what came of it."""
        ejections = self.gateway.registry.ejections
        task = asyncio.ensure_future(ask(self))
        while not task.done():
            await asyncio.wait([task], timeout=1.0)
            ejections.tick(clock.monotonic())
            self.tally.ejected += bool(list(ejections))
        await task
        await self.gateway.records.stop()
        return self.tally


Ask = Callable[[Contest], Awaitable[None]]


class _Client(MemoryClient):
    def __init__(self, body: bytes, headers: dict[str, str], limits: GatewayLimits) -> None:
        super().__init__(body=[body], headers=headers, limits=limits)
        self.first_at = 0.0

    def take(self, event: dict[str, Any]) -> None:
        if not self.first_at and event.get("body"):
            self.first_at = clock.monotonic()
        super().take(event)


def _caller(number: int) -> Caller:
    return Caller(
        key_id=uuid.UUID(int=number + 1), key_name="k", tenant="t", requests_per_minute=10**9, allowed_models=frozenset()
    )


def contest(policy: Policy, machines: dict[str, Machine], ask: Ask, *, keys: int = 1, **limits: Any) -> Tally:  # Any: limits
    """Play a contest on a virtual clock of its own."""

    async def play() -> Tally:
        return await Contest(policy, machines, keys=keys, **limits).play(ask)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(play())


def _words(draw: random.Random, tokens: int) -> str:
    return " ".join(f"{draw.randrange(1 << 24):06x}" for _ in range(tokens * TOKEN_CHARS // 7))


def _ask_slow_node(policy: Policy, requests: int, *, fails_after_s: float = math.inf, **limits: Any) -> Tally:
    machines = {
        "fast": Machine(generate_s=80, prefill_s=4000),
        "slow": Machine(generate_s=20, prefill_s=1000, fails_after_s=fails_after_s),
    }

    async def ask(clients: Contest) -> None:
        draw = random.Random(1)
        asked = [Asked(_words(draw, 200), key=draw.randrange(40), tokens=draw.randint(40, 80)) for _ in range(requests)]
        await clients.arrive(asked, per_s=3.0, draw=draw)

    return contest(policy, machines, ask, keys=40, **limits)


def _ask_failing_node(policy: Policy, requests: int, **limits: Any) -> Tally:
    return _ask_slow_node(policy, requests, fails_after_s=requests / 3 / 10, **limits)


def _ask_hot_prefix(policy: Policy, requests: int, **limits: Any) -> Tally:
    async def ask(clients: Contest) -> None:
        draw = random.Random(2)
        shared = _words(draw, 6000)
        asked = [Asked(shared + _words(draw, 50), key=draw.randrange(40), tokens=draw.randint(40, 80)) for _ in range(requests)]
        await clients.arrive(asked, per_s=6.0, draw=draw)

    return contest(policy, {f"n{number}": Machine() for number in range(4)}, ask, keys=40, **limits)


def _ask_alone(policy: Policy, requests: int, **limits: Any) -> Tally:
    async def ask(clients: Contest) -> None:
        draw = random.Random(3)
        asked = [Asked(_words(draw, 1000), tokens=draw.randint(40, 80)) for _ in range(requests)]
        await clients.keep_busy([asked[start::8] for start in range(8)])

    return contest(policy, {"n0": Machine(), "n1": Machine()}, ask, **limits)


def _ask_conversations(policy: Policy, requests: int, **limits: Any) -> Tally:
    async def ask(clients: Contest) -> None:
        draw, lines = random.Random(4), []
        for _ in range(requests // 8):
            text, line = _words(draw, 200), []
            for _ in range(8):
                text += _words(draw, 600)
                line.append(Asked(text, tokens=draw.randint(30, 60)))
            lines.append(line)
        await clients.keep_busy(lines, pause_s=4.0)

    return contest(policy, {f"n{number}": Machine(kept_tokens=60_000) for number in range(4)}, ask, **limits)


CONTESTS: dict[str, Callable[..., Tally]] = {
    "slow node": _ask_slow_node,
    "failing node": _ask_failing_node,
    "hot prefix": _ask_hot_prefix,
    "lone client": _ask_alone,
    "conversations": _ask_conversations,
}
"""By name: called with a policy, how many requests, and limits.

``slow node``: two nodes, one four times slower; 3 requests a second of 40 keys. ``failing node``: the slow one fails after a
tenth of the time. ``hot prefix``: four equal nodes, 6 requests a second, all beginning with the same 6,000 tokens. ``lone
client``: two equal nodes, one key with eight requests of 1,000 tokens at a time. ``conversations``: four equal nodes, eight
turns each with 600 tokens more, all of one key, without a session's name.
"""
