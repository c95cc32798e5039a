"""CTranslate2 in a child process, with the tiny model in its format."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.ct2 import Ct2Engine
from runner.engines.port import FlushResult
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call
from tests.fakes.models.make import ct2_model_dir

QUESTION = "Explain the lambda expression of Python in a few plain sentences."
LONG_CONTEXT_TOKENS = 200_000
"""Far more than the model was trained for; the library computes it, and the answer lasts for minutes."""


def ct2_plan(
    path: Path | None = None, *, slots: int = 2, context_tokens: int | None = None, threads: int = 2, **options: object
) -> LoadPlan:
    return LoadPlan(
        model_id="tiny", backend="ct2", path=path or ct2_model_dir(), context_tokens=context_tokens, slots=slots,
        threads=threads, options=options,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def open_ct2(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter for the tiny model, and one for half of its weights."""
    broken = folder / "half"
    shutil.copytree(ct2_model_dir(), broken)
    (broken / "model.bin").write_bytes((ct2_model_dir() / "model.bin").read_bytes()[:400_000])
    yield EngineUnderTest(
        engine=Ct2Engine(ct2_plan(context_tokens=LONG_CONTEXT_TOKENS), client),
        call=chat_call("tiny", QUESTION, max_tokens=8),
        streamed=chat_call("tiny", QUESTION, max_tokens=8, stream=True),
        long=chat_call("tiny", QUESTION, max_tokens=100_000, ignore_eos=True, stream=True),
        broken=Ct2Engine(ct2_plan(broken), client),
        broken_words="^half cannot be loaded: .*invalid payload size",
        flushes=frozenset({FlushResult.NOTHING_KEPT}),
    )


CASES = [EngineCase("ct2", open_ct2)]
