"""Plans and calls for the tiny model, and looking at what a running vLLM takes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import aiohttp
import psutil

from runner.definitions.plan import LoadPlan
from runner.engines.port import Call
from runner.engines.vllm import VllmEngine
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call, openai_cached_tokens
from tests.fakes.models.make import hf_model_dir

MIB = 1024 * 1024
LOAD_LIMIT_S = 300.0
"""Twenty seconds on an idle machine; several times that on two busy cores."""
KV_BYTES = 64 * MIB
QUESTION = "Explain the lambda expression of Python, its syntax, and what people use it for, in a few plain sentences. " * 8
"""More than two cache blocks of 128 tokens."""
ENDLESS: dict[str, object] = {"stream": True, "ignore_eos": True, "max_tokens": 1200}


def tiny_plan(model: Path | None = None, *, slots: int = 2, options: Mapping[str, object] | None = None) -> LoadPlan:
    """Return a plan for the tiny model with a small cache."""
    chosen = {"vllm_kv_cache_memory_bytes": KV_BYTES, **(options or {})}
    return LoadPlan("tiny", "vllm", model or hf_model_dir(), context_tokens=2048, slots=slots, threads=1, options=chosen)


def call(path: str, body: Mapping[str, object]) -> Call:
    """Return a request."""
    return Call("POST", path, {"content-type": "application/json"}, json.dumps(body).encode())


def question(**fields: object) -> Call:
    """Return a chat request with a long prompt."""
    return chat_call("tiny", QUESTION, **fields)


def break_model(folder: Path) -> Path:
    """Return a copy of the model whose weights end half-way."""
    folder.mkdir()
    for file in hf_model_dir().iterdir():
        content = file.read_bytes()
        (folder / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".safetensors" else content)
    return folder


def memory_mb(pids: tuple[int, ...]) -> float:
    """Return the memory of process trees in MiB, pages that several share counted once."""
    total = 0
    for pid in pids:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
    return total / MIB


@contextlib.asynccontextmanager
async def open_vllm(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield what the suite of all engines asks for."""
    yield EngineUnderTest(
        engine=VllmEngine(tiny_plan(), client),
        call=question(max_tokens=8),
        streamed=question(max_tokens=8, stream=True, ignore_eos=True),
        long=question(**ENDLESS),
        broken=VllmEngine(tiny_plan(break_model(folder / "half")), client),
        broken_words="[Ss]afetensor",
        cached=openai_cached_tokens,
        load_s=LOAD_LIMIT_S,
    )


CASE = EngineCase("vllm", open_vllm)
