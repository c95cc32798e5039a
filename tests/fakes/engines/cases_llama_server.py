"""A llama-server in router mode: by its contract, and the real program where ``MUSTER_LLAMA_SERVER`` names one."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import LoadPlan
from runner.engines.llama_server import LlamaServer
from tests.fakes.engines.cases_llamacpp import ENDLESS
from tests.fakes.engines.cases_llamacpp import QUESTION as LONG_QUESTION
from tests.fakes.engines.llama_server_contract import run_router
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call, openai_cached_tokens, wait_until
from tests.unit.closed_port import closed_port

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


PROGRAM = os.environ.get("MUSTER_LLAMA_SERVER", "")
_START_LIMIT_S = 60.0


@contextlib.asynccontextmanager
async def run_program(folder: Path, client: aiohttp.ClientSession, port: int) -> AsyncIterator[str]:
    """Yield the address of the real program in router mode, which offers the GGUF files of the folder."""
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "--models-dir", str(folder), "--host", "127.0.0.1", "--port", str(port), "--no-models-autoload",
        "--cache-ram", "0", "--slot-save-path", str(folder), "--parallel", "2", "--ctx-size", "4096", "--metrics",
        "--gpu-layers", "99", "--threads", "1", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    async def answers() -> bool:
        try:
            async with client.get(f"{url}/health") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False

    try:
        assert await wait_until(answers, _START_LIMIT_S), "the program does not answer"
        yield url
    finally:
        process.terminate()
        await process.wait()


@contextlib.asynccontextmanager
async def open_program(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter for the shipped model behind the real program, and one for half of its file."""
    weights = TINY_MODEL_PATH.read_bytes()
    (folder / "tiny.gguf").write_bytes(weights)
    (folder / "half.gguf").write_bytes(weights[:600_000])
    with closed_port() as port:
        pass
    async with run_program(folder, client, port) as url:
        yield EngineUnderTest(
            engine=LlamaServer(server_plan(url), client),
            call=chat_call("tiny", LONG_QUESTION, max_tokens=8),
            streamed=chat_call("tiny", LONG_QUESTION, max_tokens=8, stream=True),
            long=chat_call("tiny", LONG_QUESTION, **ENDLESS),
            broken=LlamaServer(server_plan(url, "half"), client),
            broken_words="could not load half",
            cached=openai_cached_tokens,
        )


CASES = [
    EngineCase("llama-server-router", open_router),
    EngineCase(
        "llama-server-program",
        open_program,
        (pytest.mark.skipif(not PROGRAM, reason="MUSTER_LLAMA_SERVER names no llama-server"),),
    ),
]
