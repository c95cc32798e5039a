"""vLLM's adapter over a contract server of ours; tests/rings/vllm runs the same checks on the real one."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.vllm import VllmEngine
from runner.engines.vllm.command import PYTHON_VARIABLE
from tests.fakes.engines.suite import EngineCase, EngineUnderTest, chat_call, environment, openai_cached_tokens

ROOT = Path(__file__).resolve().parents[3]
SERVER = Path(__file__).with_name("programs") / "vllm_contract.py"
QUESTION = "What is a lambda? " * 12
CAUSE = "ValueError: shape mismatch in model.embed_tokens.weight"


@contextlib.contextmanager
def contract_python(folder: Path) -> Iterator[None]:
    """Have the adapter find a python whose ``-m vllm…`` is the contract server."""
    wrapper = folder / "python-of-vllm"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}" exec "{sys.executable}" "{SERVER}" "$@"\n')
    wrapper.chmod(0o755)
    with environment(**{PYTHON_VARIABLE: str(wrapper)}):
        yield


def contract_model(folder: Path, **faults: object) -> Path:
    """Return a model folder that the contract server accepts, or fails on as ``faults`` say."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    (folder / "contract.json").write_text(json.dumps(faults))
    return folder


def contract_plan(
    model: Path, *, slots: int = 2, gpu_ids: tuple[int, ...] = (), options: Mapping[str, object] | None = None
) -> LoadPlan:
    """Return a plan for a folder of ``contract_model``."""
    return LoadPlan("tiny", "vllm", model, context_tokens=512, slots=slots, gpu_ids=gpu_ids, options=options or {})


@contextlib.asynccontextmanager
async def open_vllm(folder: Path, client: aiohttp.ClientSession) -> AsyncIterator[EngineUnderTest]:
    """Yield an adapter over a contract server, and one whose model it cannot load."""
    broken = contract_model(folder / "broken", fail=CAUSE)
    with contract_python(folder):
        yield EngineUnderTest(
            engine=VllmEngine(contract_plan(contract_model(folder / "model")), client),
            call=chat_call("tiny", QUESTION, max_tokens=4), streamed=chat_call("tiny", QUESTION, max_tokens=8, stream=True),
            long=chat_call("tiny", QUESTION, max_tokens=100_000, stream=True), broken=VllmEngine(contract_plan(broken), client),
            broken_words="shape mismatch in model.embed_tokens.weight", cached=openai_cached_tokens,
        )  # fmt: skip


CASES = [EngineCase("vllm-contract", open_vllm)]
