"""TGI's adapter over a contract server of ours, started as its launcher."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.port import FlushResult
from runner.engines.tgi import TgiEngine
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call

SERVER = Path(__file__).with_name("programs") / "tgi_contract.py"
CAUSE = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"


def contract_launcher(folder: Path) -> str:
    """Return a program that is the contract server."""
    wrapper = folder / "text-generation-launcher"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{SERVER}" "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def contract_model(folder: Path, **faults: object) -> Path:
    """Return a model folder on which the contract server does what ``faults`` say."""
    folder.mkdir(exist_ok=True)
    (folder / "contract.json").write_text(json.dumps(faults))
    return folder


def launched_plan(folder: Path, **faults: object) -> LoadPlan:
    """Return a plan that starts the launcher."""
    options = {"tgi_launcher": contract_launcher(folder)}
    return LoadPlan("tiny", "tgi", contract_model(folder / "model", **faults), context_tokens=1024, slots=2, options=options)


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
