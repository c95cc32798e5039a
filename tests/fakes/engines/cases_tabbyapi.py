"""TabbyAPI's adapter against a server that answers as TabbyAPI does."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.port import FlushResult
from runner.engines.tabbyapi import TabbyApiEngine
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call
from tests.fakes.engines.tabbyapi_contract import ADMIN_KEY, API_KEY, TabbyContract

KEY_NAMES = {"TEST_TABBY_KEY": API_KEY, "TEST_TABBY_ADMIN_KEY": ADMIN_KEY}


@contextlib.contextmanager
def keys_in_environment() -> Iterator[None]:
    """Set the variables that the plans name."""
    os.environ.update(KEY_NAMES)
    try:
        yield
    finally:
        for name in KEY_NAMES:
            os.environ.pop(name, None)


def tabby_plan(url: str, model: str = "tiny", *, context_tokens: int | None = 4096, **options: object) -> LoadPlan:
    """Return a plan for a model of the server at ``url``."""
    named = {
        "server_url": url, "server_api_key_env": "TEST_TABBY_KEY", "server_admin_key_env": "TEST_TABBY_ADMIN_KEY", **options,
    }  # fmt: skip
    return LoadPlan(model_id=model, backend="tabbyapi", context_tokens=context_tokens, slots=4, options=named)


@contextlib.asynccontextmanager
async def open_tabbyapi(_folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter of a server of ours, and one for a model that does not load there."""
    async with TabbyContract().serve() as server:

        async def running() -> int:
            return server.running

        with keys_in_environment():
            yield EngineUnderTest(
                engine=TabbyApiEngine(tabby_plan(server.url), client),
                call=chat_call("tiny", "Explain lambda.", max_tokens=8),
                streamed=chat_call("tiny", "Explain lambda.", max_tokens=8, stream=True),
                long=chat_call("tiny", "Explain lambda.", max_tokens=100_000, stream=True),
                broken=TabbyApiEngine(tabby_plan(server.url, "bad"), client),
                broken_words="CUDA out of memory",
                running=running,
                flushes=frozenset({FlushResult.NOT_SUPPORTED}),
            )


CASES = [EngineCase("tabbyapi", open_tabbyapi)]
