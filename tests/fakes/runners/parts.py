"""The parts of a stand-alone runner in the process of a test, over tiny models or over engines that the test holds up."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from runner.config import TINY_MODEL_PATH, read_config
from runner.definitions.plan import LoadPlan
from runner.definitions.settings import Fairness
from runner.parts import Parts, assemble
from runner.pool.loads import Loader, LoadOrder, LoadResult
from runner.pool.models import Model
from runner.queue import FairQueue, Priority, Turn, WaitBudget
from runner.serving.request import Inference
from tests.fakes.clock import install_virtual_clock
from tests.fakes.engine import FakeEngine
from tests.fakes.waiting import turns

QUESTION = (
    b'{"model":"%b","max_tokens":%d,"ignore_eos":true,"stream":true,"messages":'
    b'[{"role":"user","content":"Explain the gateway, please, in many words."}]}'
)
WEIGHTY = b'"n_probs":1000,'
"""Makes an answer of many megabytes: no buffer takes the rest of one that nobody reads, however long that lasts."""


def write_models(folder: Path, *names: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(TINY_MODEL_PATH, folder / f"{name}.gguf")
    return folder


@asynccontextmanager
async def assembled(tmp_path: Path, *options: str, **env: str) -> AsyncIterator[Parts]:
    """The parts of a stand-alone node over ``tmp_path / "models"``, at least ``a`` and ``b`` in it."""
    models = write_models(tmp_path / "models", "a", "b")
    surroundings = {"MODEL_BASE_PATH": str(models), **env}
    config = read_config(["--standalone", "--threads", "1", "--data", str(tmp_path / "data"), *options], surroundings)
    async with (
        aiohttp.ClientSession(auto_decompress=False) as client,
        assemble(config, client, on_change=lambda: None, wakes=()) as parts,
    ):
        await parts.start_models()
        yield parts


async def load(parts: Parts, model_id: str, *, evict: str | None = None, **overrides: object) -> LoadResult:
    order = await parts.pool.loader.order(model_id, overrides=overrides, evict=evict)
    assert isinstance(order, LoadOrder)
    return await parts.pool.loader.carry_out(order, lambda _: None)


def find(parts: Parts, model_id: str) -> Model:
    return parts.pool.registry.find(model_id)


def ask(model_id: str, *, tenant: str = "t1", tokens: int = 4, is_weighty: bool = False) -> Inference:
    body = QUESTION % (model_id.encode(), tokens)
    if is_weighty:
        body = b"{" + WEIGHTY + body[1:]
    headers = {"content-type": "application/json"}
    return Inference("POST", "/v1/chat/completions", headers, body, model_id, tenant, is_streaming=True)


async def answer(parts: Parts, model_id: str, *, tenant: str = "t1") -> int:
    async with parts.serving.open(ask(model_id, tenant=tenant)) as given:
        assert given.chunks is not None
        assert [chunk async for chunk in given.chunks]
        return given.numbers.cached_tokens or 0


class Bench:
    """The parts of a node whose loads start gated engines; ``engines`` in the order of their making."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.engines: list[FakeEngine] = []
        self.prepare: Callable[[FakeEngine], None] = lambda _engine: None
        pool = parts.pool
        self.unloader = pool.unloader
        self.loader = Loader(
            pool.registry, capacity=pool.capacity, unloader=pool.unloader, make_engine=self.make_engine, threads=1, gpu_ids=(),
            defaults={},
        )  # fmt: skip

    def make_engine(self, plan: LoadPlan) -> FakeEngine:
        del plan
        engine = FakeEngine()
        self.prepare(engine)
        self.engines.append(engine)
        return engine

    async def order(self, model_id: str, *, evict: str | None = None, **overrides: object) -> LoadOrder:
        order = await self.loader.order(model_id, overrides=overrides, evict=evict)
        assert isinstance(order, LoadOrder)
        return order

    async def load(self, model_id: str) -> Model:
        await self.loader.carry_out(await self.order(model_id), lambda _: None)
        return find(self.parts, model_id)

    def start(self, order: LoadOrder) -> asyncio.Task[object]:
        return asyncio.create_task(self.loader.carry_out(order, lambda _: None))


LONG_S = 1000.0


async def settle() -> None:
    await turns(6)


class Visitors:
    """A queue under test; ``served`` are the names of requests in the order in which they got a slot."""

    def __init__(
        self, *, slots: int = 1, limits: Fairness | None = None, max_depth: int = 1000,
        weight_of: Callable[[str], float] = lambda _: 1.0,
    ) -> None:  # fmt: skip
        self.clock = install_virtual_clock()
        self.budget = WaitBudget(max_depth)
        self.queue = FairQueue(slots=slots, limits=limits or Fairness(), budget=self.budget, weight_of=weight_of)
        self.served: list[str] = []
        self.turns: dict[str, Turn] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, *names: str, priority: Priority = "normal", timeout_s: float = LONG_S) -> None:
        """Let requests come; the tenant of request ``a1`` is ``a``."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._visit(name, priority, timeout_s))
        await settle()

    async def go(self, name: str, *, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        self.queue.leave(self.turns.pop(name))
        await settle()

    async def serve_all(self) -> list[str]:
        """End what runs, one request at a time, until nothing is left; return who was served."""
        while self.turns:
            await self.go(next(iter(self.turns)))
        return self.served

    def score_of(self, tenant: str) -> float:
        return next(score for key, score in self.queue.list_accounts() if key.tenant == tenant)

    def known(self) -> set[str]:
        return {key.tenant for key, _ in self.queue.list_accounts()}

    async def _visit(self, name: str, priority: Priority, timeout_s: float) -> None:
        turn = await self.queue.enter(tenant=name[0], priority=priority, timeout_s=timeout_s)
        self.served.append(name)
        self.turns[name] = turn
