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
from runner.parts import Parts, assemble
from runner.pool import Loader, LoadOptions, LoadOrder, LoadResult, Model
from runner.serving.request import Inference
from tests.fakes.engine import FakeEngine

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
    """The parts of a stand-alone box over ``tmp_path / "models"``, at least ``a`` and ``b`` in it."""
    models = write_models(tmp_path / "models", "a", "b")
    surroundings = {"MODEL_BASE_PATH": str(models), **env}
    config = read_config(["--standalone", "--threads", "1", "--data", str(tmp_path / "data"), *options], surroundings)
    async with (
        aiohttp.ClientSession(auto_decompress=False) as client,
        assemble(config, client, on_change=lambda: None, on_load=lambda: None) as parts,
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
    return Inference("POST", "/v1/chat/completions", {"content-type": "application/json"}, body, model_id, tenant)


async def answer(parts: Parts, model_id: str, *, tenant: str = "t1") -> int:
    """Ask something and return how many tokens came from the cache."""
    async with parts.door.open(ask(model_id, tenant=tenant)) as given:
        assert given.chunks is not None
        assert [chunk async for chunk in given.chunks]
        return given.numbers.cached_tokens or 0


class Bench:
    """The parts of a box whose loads start gated engines; ``engines`` in the order of their making."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.engines: list[FakeEngine] = []
        self.prepare: Callable[[FakeEngine], None] = lambda _engine: None
        pool = parts.pool
        self.unloader = pool.unloader
        self.loader = Loader(
            pool.registry, capacity=pool.capacity, unloader=pool.unloader, options=LoadOptions(), make_engine=self.make_engine
        )

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
