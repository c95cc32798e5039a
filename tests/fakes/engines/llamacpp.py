"""llama.cpp in a child process, with the shipped tiny model."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from runner.config import TINY_MODEL_PATH
from runner.definitions.plan import LoadPlan
from runner.engines.llamacpp import LlamaCpp
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call, openai_cached_tokens

QUESTION = "Explain the lambda expression of Python, its syntax, and what people use it for, in a few plain sentences."
ENDLESS: dict[str, Any] = {"stream": True, "ignore_eos": True, "max_tokens": 100_000, "n_probs": 1000}
"""Any: keywords. Probabilities of the whole vocabulary with every token slow the tiny model down to seconds per context."""


def tiny_plan(
    path: Path = TINY_MODEL_PATH, *, slots: int = 2, context_tokens: int | None = 2048, options: dict[str, object] | None = None
) -> LoadPlan:
    return LoadPlan(
        model_id="tiny", backend="gguf", path=path, context_tokens=context_tokens, slots=slots, threads=1, options=options or {}
    )


@contextlib.asynccontextmanager
async def open_llamacpp(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter for the shipped model, and one for half of its file."""
    broken = folder / "half.gguf"
    broken.write_bytes(TINY_MODEL_PATH.read_bytes()[:600_000])
    yield EngineUnderTest(
        engine=LlamaCpp(tiny_plan(), client), call=chat_call("tiny", QUESTION, max_tokens=8),
        streamed=chat_call("tiny", QUESTION, max_tokens=8, stream=True), long=chat_call("tiny", QUESTION, **ENDLESS),
        broken=LlamaCpp(tiny_plan(broken), client), broken_words="is not within the file bounds", cached=openai_cached_tokens,
    )  # fmt: skip


CASES = [EngineCase("llamacpp", open_llamacpp)]
