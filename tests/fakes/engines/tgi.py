"""TGI's adapter over a contract server of ours, started as its launcher."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil

from runner.definitions.plan import LoadPlan
from runner.engines.port import FlushResult
from runner.engines.tgi import TgiEngine
from runner.engines.tgi_launcher import free_ports
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call

ROOT = Path(__file__).resolve().parents[3]
SERVER = Path(__file__).with_name("programs") / "tgi_contract.py"
CAUSE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def contract_launcher(folder: Path) -> str:
    wrapper = folder / "text-generation-launcher"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "{SERVER}" "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def contract_model(folder: Path, **faults: object) -> Path:
    """Return a model folder on which the contract server does what ``faults`` say."""
    folder.mkdir(exist_ok=True)
    (folder / "contract.json").write_text(json.dumps(faults))
    return folder


def launched_plan(folder: Path, **faults: object) -> LoadPlan:
    options = {"tgi_launcher": contract_launcher(folder)}
    return LoadPlan("tiny", "tgi", contract_model(folder / "model", **faults), context_tokens=1024, slots=2, options=options)


@contextlib.asynccontextmanager
async def foreign_server(model_id: str, *flags: str, key: str = "") -> AsyncIterator[str]:
    port = free_ports(1)[0]
    command = [sys.executable, str(SERVER), "--hostname", "127.0.0.1", "--port", str(port), "--model-id", model_id, *flags]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, "API_KEY": key, "PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    shards: list[psutil.Process] = []
    try:
        async with asyncio.timeout(30):
            while b"Connected" not in await process.stdout.readline():
                assert process.returncode is None
        shards = psutil.Process(process.pid).children()
        yield f"http://127.0.0.1:{port}"
    finally:
        for shard in shards:
            shard.kill()
        process.kill()
        await process.wait()


def foreign_plan(url: str, **options: object) -> LoadPlan:
    return LoadPlan("tiny", "tgi", options={"server_url": url, **options})


@contextlib.asynccontextmanager
async def open_tgi(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter that starts a launcher, and one whose shard dies."""
    (folder / "broken").mkdir()
    yield EngineUnderTest(
        engine=TgiEngine(launched_plan(folder), client),
        call=chat_call("tiny", "What is a lambda?", max_tokens=4),
        streamed=chat_call("tiny", "What is a lambda?", max_tokens=8, stream=True),
        long=chat_call("tiny", "What is a lambda?", max_tokens=100_000, stream=True),
        broken=TgiEngine(launched_plan(folder / "broken", fail=CAUSE), client),
        broken_words="CUDA out of memory",
        flushes=frozenset({FlushResult.NOTHING_KEPT}),
    )


CASES = [EngineCase("tgi-contract", open_tgi)]
