"""One model as the owner describes it. Field names are those of the settings files (llm-pool specification)."""

from __future__ import annotations

from typing import Literal

import msgspec

Backend = Literal[
    "gguf", "llama_server", "ct2", "whisper", "vllm", "exllamav3", "tabbyapi", "tgi", "comfyui", "openai_compatible",
    "attached",
]  # fmt: skip
"""``attached`` is not for settings files: a model of the server given with ``--backend``."""


TRANSLATABLE: dict[str, str] = {"messages": "/v1/messages", "responses": "/v1/responses"}
"""Surfaces that a gateway can say in chat completions, by the words of the settings, and their API paths."""


class ModelDefinition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A configured model, defaults filled in. ``options`` holds the backend's own fields under their full names.

    ``translate``: words of TRANSLATABLE; gateways are not told that the engine answers those, so they translate. ``tidy``:
    whether chunks of its chat streams are put right for strict clients; None = where the engine is known to need it.
    """

    model_id: str
    backend: Backend
    model_path: str | None = None
    device: str | None = None
    compute_type: str | None = None
    prompt_format: str | None = None
    enable_thinking: bool | None = None
    enabled: bool = False
    replicas: int = 1
    replica_max: int = 1
    target_inflight: int = 1
    revision: str | None = None
    translate: tuple[str, ...] = ()
    tidy: bool | None = None
    options: dict[str, object] = {}
    is_configured: bool = True
    """False: found among the model files, not described in the settings."""
