"""Somebody else's llama-server in router mode, by its contract."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.llama_server import LlamaServer
from tests.integration.runner.engine_suite import EngineCase, EngineUnderTest, chat_call, openai_cached_tokens
from tests.integration.runner.llama_server_contract import run_router

QUESTION = "a question of a dozen words that somebody asks again and again here"


def server_plan(url: str, model: str = "tiny", **options: object) -> LoadPlan:
    """Return a plan for a model of a server."""
    return LoadPlan(model_id=model, backend="llama_server", slots=2, options={"server_url": url, **options})


@contextlib.asynccontextmanager
async def open_router(_folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter for a model of a router, and one for a model whose loads fail."""
    async with run_router() as router:

        async def running() -> int:
            return router.count_running()

        yield EngineUnderTest(
            engine=LlamaServer(server_plan(router.url), client),
            call=chat_call("tiny", QUESTION),
            streamed=chat_call("tiny", QUESTION, stream=True, max_tokens=4),
            long=chat_call("tiny", QUESTION, stream=True, max_tokens=100_000),
            broken=LlamaServer(server_plan(router.url, "broken"), client),
            broken_words=r"could not load broken \(exit code 1\)",
            cached=openai_cached_tokens,
            running=running,
        )


CASES = [EngineCase("llama-server-router", open_router)]
