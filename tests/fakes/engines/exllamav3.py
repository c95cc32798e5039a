"""ExLlamaV3's adapter and child over a stand-in for the library, which needs a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.exllamav3 import ExLlamaV3Engine
from runner.engines.port import FlushResult
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call, environment, openai_cached_tokens
from tests.fakes.models.make import hf_model_dir

FAKES = Path(__file__).resolve().parent / "packages"
QUESTION = "Explain the lambda expression of Python, its syntax, and what people use it for. " * 8
"""More than two pages of 256 tokens, which are characters there."""


def fake_library() -> contextlib.AbstractContextManager[None]:
    return environment(PYTHONPATH=os.pathsep.join(filter(None, [str(FAKES), os.environ.get("PYTHONPATH")])))


def exllama_plan(folder: Path, *, slots: int = 2, fake: dict[str, object] | None = None, **options: object) -> LoadPlan:
    """Return a plan for a model folder made in ``folder``; ``fake`` is how the stand-in behaves."""
    shutil.copytree(hf_model_dir(), folder, dirs_exist_ok=True)
    (folder / "fake.json").write_text(json.dumps(fake or {}), encoding="utf-8")
    options = {"exllama_cache_size": 262_144, **options}
    return LoadPlan(
        model_id="tiny", backend="exllamav3", path=folder, context_tokens=131_072, slots=slots, threads=1, options=options
    )


@contextlib.asynccontextmanager
async def open_exllamav3(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter over the stand-in, and one whose model does not load."""
    with fake_library():
        yield EngineUnderTest(
            engine=ExLlamaV3Engine(exllama_plan(folder / "good", fake={"module_s": 0.02}), client),
            call=chat_call("tiny", QUESTION, max_tokens=8), streamed=chat_call("tiny", QUESTION, max_tokens=8, stream=True),
            long=chat_call("tiny", QUESTION, max_tokens=100_000, ignore_eos=True, stream=True),
            broken=ExLlamaV3Engine(exllama_plan(folder / "bad", fake={"refuses": "CUDA out of memory"}), client),
            broken_words="^CUDA out of memory", cached=openai_cached_tokens, flushes=frozenset({FlushResult.RELOADED}),
        )  # fmt: skip


CASES = [EngineCase("exllamav3", open_exllamav3)]
