"""Which adapter serves which backend. Adapters are imported when the first model of theirs is loaded, not before."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import aiohttp

from runner.definitions.plan import LoadPlan
from runner.engines.port import Engine
from runner.errors import EngineError

ADAPTERS: dict[str, str] = {
    "gguf": "runner.engines.llamacpp:LlamaCpp",
    "llama_server": "runner.engines.llama_server:LlamaServer",
    "ct2": "runner.engines.ct2:Ct2Engine",
    "whisper": "runner.engines.whisper:WhisperEngine",
    "vllm": "runner.engines.vllm:VllmEngine",
    "exllamav3": "runner.engines.exllamav3:ExLlamaV3Engine",
    "tabbyapi": "runner.engines.tabbyapi:TabbyApiEngine",
    "tgi": "runner.engines.tgi:TgiEngine",
    "comfyui": "runner.engines.comfyui:ComfyUiEngine",
    "openai_compatible": "runner.engines.remote:RemoteEngine",
}
"""Backend name of the settings to ``module:class``; every class takes ``(plan, client)``."""

EngineMaker = Callable[[LoadPlan, aiohttp.ClientSession], Engine]


def make_engine(plan: LoadPlan, client: aiohttp.ClientSession) -> Engine:
    """Return an adapter for one replica, nothing started yet. Raises EngineError for a backend without one."""
    try:
        module, _, name = ADAPTERS[plan.backend].partition(":")
    except KeyError:
        raise EngineError(
            f"there is no engine for the backend {plan.backend!r}; known: {', '.join(sorted(ADAPTERS))}"
        ) from None
    engine: Engine = getattr(import_module(module), name)(plan, client)
    return engine
