"""Every field that a model definition may have: which backend knows it, its limits, whether a load may override it.

One table, from which the settings are checked, overrides are checked, forms are made and memory keys are cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import get_args

from runner.definitions.definition import TRANSLATABLE, Backend
from runner.definitions.kinds import ENV_VARIABLE, URL, Boolean, Enum, Integer, Kind, Number, Text, TextList, TextMap
from runner.limits import MIB

BACKENDS: tuple[str, ...] = tuple(name for name in get_args(Backend) if name != "attached")
"""Backends that settings may name."""

KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
"""Types of a llama.cpp KV cache."""

COMPUTE_TYPES = (
    "default", "auto", "int8", "int8_float32", "int8_float16", "int8_bfloat16", "int16", "float16", "bfloat16", "float32",
)  # fmt: skip
PROMPT_FORMATS = ("gemma4_template", "translategemma_template")
"""Formats that are more than a model's own chat template: one with a switch for thinking, and one that translates."""
_DEVICE = re.compile(r"cpu|auto|cuda(?::([0-9]{1,3}))?")
_PATH = Text(what="a path")


def is_cache_quant(text: str) -> bool:
    """Return whether it is ``bits`` or ``k,v`` with 2 to 8 bits each, as ExLlamaV3 writes cache quantisation."""
    parts = text.split(",")
    return len(parts) <= 2 and all(len(part) == 1 and part in "2345678" for part in parts)


def is_device(text: str) -> bool:
    """Return whether it is ``cpu``, ``auto``, ``cuda`` or ``cuda:N``."""
    return _DEVICE.fullmatch(text) is not None


def gpu_number(device: str) -> int | None:
    """Return the number in ``cuda:N``, None where a device names none."""
    match = _DEVICE.fullmatch(device)
    return None if match is None or match[1] is None else int(match[1])


def is_gpu_split(text: str) -> bool:
    """Return whether it is a comma list of sizes in GB, one for each GPU."""
    return all(part.strip().replace(".", "", 1).isdecimal() for part in text.split(","))


@dataclass(frozen=True, slots=True)
class Field:
    """One field. ``is_override``: a load may give another value. ``uses_memory``: its value changes what a load takes.

    ``default`` is what the engine does when nobody says; None = its own choice.
    """

    kind: Kind
    is_override: bool = False
    uses_memory: bool = True
    is_required: bool = False
    default: object = None


def _load(kind: Kind, default: object = None) -> Field:
    return Field(kind, is_override=True, default=default)


def _plain(kind: Kind, default: object = None, *, is_required: bool = False) -> Field:
    return Field(kind, uses_memory=False, default=default, is_required=is_required)


COMMON_FIELDS: Mapping[str, Field] = {
    "backend": _plain(Enum(values=BACKENDS)),
    "model_path": _plain(Text(what="a path or a model id", nullable=True)),
    "device": Field(
        Text(what="cpu, cuda, cuda:N (a GPU of the node by its number) or auto", is_valid=is_device, nullable=True)
    ),
    "compute_type": Field(Enum(values=COMPUTE_TYPES, nullable=True)),
    "prompt_format": _plain(Enum(values=PROMPT_FORMATS, nullable=True)),
    "enable_thinking": _plain(Boolean(nullable=True)),
    "enabled": _plain(Boolean()),
    "replicas": Field(Integer(minimum=1, maximum=64, unit="replicas"), is_override=True, uses_memory=False, default=1),
    "replica_max": _plain(Integer(minimum=1, maximum=64, unit="replicas")),
    "target_inflight": Field(Integer(minimum=1, maximum=1024, unit="requests"), is_override=True, uses_memory=False, default=1),
    "revision": _plain(Text(what="a revision of the model's repository", nullable=True)),
    "tidy": _plain(Boolean(nullable=True)),
    "translate": _plain(TextList(item=Text(what=" or ".join(TRANSLATABLE), is_valid=TRANSLATABLE.__contains__))),
}
"""Fields of every backend. ``uses_memory`` of target_inflight is no: it is the plan's ``slots``, which is in every key."""

_SERVER: Mapping[str, Field] = {
    "server_url": _plain(URL, is_required=True),
    "server_api_key_env": _plain(Text(what=ENV_VARIABLE.what, is_valid=ENV_VARIABLE.is_valid, nullable=True)),
    "server_model": _plain(Text(what="the model's name on that server", nullable=True)),
}

EXLLAMA_PAGE_TOKENS = 256
"""Its cache is made of pages of this size (PAGE_SIZE of ExLlamaV3)."""
_EXLLAMA_CACHE: Mapping[str, Field] = {
    "exllama_cache_size": _load(Integer(minimum=EXLLAMA_PAGE_TOKENS, step=EXLLAMA_PAGE_TOKENS, unit="tokens")),
    "exllama_cache_quant": _load(
        Text(what='"bits" or "k,v" with 2 to 8 bits each, such as "8,4"', is_valid=is_cache_quant, nullable=True)
    ),
    "exllama_cache_k_bits": _load(Integer(minimum=2, maximum=8, unit="bits", nullable=True)),
    "exllama_cache_v_bits": _load(Integer(minimum=2, maximum=8, unit="bits", nullable=True)),
    "exllama_tensor_parallel": Field(Boolean()),
    "exllama_gpu_split": Field(Text(what='sizes in GB such as "24,24"', is_valid=is_gpu_split, nullable=True)),
}

BACKEND_FIELDS: Mapping[str, Mapping[str, Field]] = {
    "gguf": {
        "gguf_n_ctx": _load(Integer(minimum=1, unit="tokens")),
        "gguf_flash_attn": _load(Enum(values=("on", "off", "auto")), "auto"),
        "gguf_type_k": _load(Enum(values=KV_TYPES), "f16"),
        "gguf_type_v": _load(Enum(values=KV_TYPES), "f16"),
        "gguf_n_gpu_layers": Field(Integer(minimum=-1, maximum=4096, unit="layers"), default=-1),
        "gguf_embedding": Field(Boolean(), default=False),
    },
    "llama_server": {
        **_SERVER,
        "llama_server_n_ctx": _load(Integer(minimum=1, unit="tokens")),
        "llama_server_image_max_tokens": _load(Integer(minimum=1, unit="tokens", nullable=True)),
        "llama_server_spec_type": _load(Text(what="a kind of speculation", nullable=True)),
        "llama_server_spec_draft_n_max": _load(Integer(minimum=1, maximum=6, unit="tokens", nullable=True)),
        "llama_server_spec_draft_p_min": _load(Number(minimum=0.0, maximum=1.0, nullable=True)),
    },
    "ct2": {},
    "whisper": {"max_upload_mb": _plain(Integer(minimum=1, maximum=4096, unit="MiB"))},
    "vllm": {
        "vllm_max_model_len": _load(Integer(minimum=EXLLAMA_PAGE_TOKENS, step=EXLLAMA_PAGE_TOKENS, unit="tokens")),
        "vllm_kv_cache_dtype": _load(Enum(values=("auto", "fp8", "fp8_e4m3", "fp8_e5m2")), "auto"),
        "vllm_kv_cache_memory_bytes": _load(
            Integer(minimum=256 * MIB, step=256 * MIB, unit="bytes", display_unit="MiB", nullable=True)
        ),
        "vllm_max_pixels": _load(Integer(minimum=200704, step=200704, unit="pixels", nullable=True)),
        "vllm_speculative_method": _load(Text(what="a speculation method of vLLM", nullable=True)),
        "vllm_speculative_model": _load(Text(what="a path or a model id", nullable=True)),
        "vllm_speculative_moe_backend": _load(Text(what="a MoE backend of vLLM", nullable=True)),
        "vllm_speculative_attention_backend": _load(Text(what="an attention backend of vLLM", nullable=True)),
        "vllm_num_speculative_tokens": _load(Integer(minimum=1, unit="tokens", nullable=True)),
        "vllm_gpu_memory_utilization": Field(Number(minimum=0.0, maximum=1.0, is_above_minimum=True)),
        "vllm_enable_prefix_caching": Field(Boolean(), default=True),
        "vllm_enforce_eager": Field(Boolean(), default=False),
        "vllm_enable_sleep_mode": Field(Boolean(), default=False),
        "vllm_lora": Field(TextMap(item=_PATH)),
        "vllm_max_num_batched_tokens": Field(Integer(minimum=1, unit="tokens")),
        "vllm_task": Field(Enum(values=("generate", "embed")), default="generate"),
        "vllm_tool_call_parser": _plain(Text(what="a tool call parser of vLLM", nullable=True)),
        "vllm_reasoning_parser": _plain(Text(what="a reasoning parser of vLLM", nullable=True)),
        "vllm_max_lora_rank": Field(Integer(minimum=1, maximum=512, unit="dimensions")),
    },
    "exllamav3": {
        **_EXLLAMA_CACHE,
        "exllama_max_rq_tokens": _load(Integer(minimum=1, unit="tokens", nullable=True)),
        "exllama_tp_backend": Field(Enum(values=("native", "nccl"), nullable=True)),
        "exllama_max_batch_size": Field(Integer(minimum=1, maximum=4096, unit="requests")),
        "exllama_max_chunk_size": Field(Integer(minimum=256, unit="tokens")),
        "exllama_max_q_size": Field(Integer(minimum=1, maximum=4096, unit="tokens")),
    },
    "tabbyapi": {
        **_SERVER,
        "server_admin_key_env": _plain(Text(what=ENV_VARIABLE.what, is_valid=ENV_VARIABLE.is_valid, nullable=True)),
        **_EXLLAMA_CACHE,
    },
    "tgi": {
        **{name: replace(field, is_required=False) for name, field in _SERVER.items()},
        "tgi_launcher": _plain(_PATH),
        "tgi_adapters": _plain(TextList(item=Text(what="the name of an adapter"))),
        "tgi_prefix_caching": _plain(Boolean()),
    },
    "comfyui": {**_SERVER, "comfyui_workflow": _plain(_PATH), "comfyui_checkpoints_dir": _plain(_PATH)},
    "openai_compatible": {
        "remote_base_url": _plain(URL, is_required=True),
        "remote_api_kind": _plain(Enum(values=("chat_completions",)), default="chat_completions"),
        "remote_api_key_env": _plain(Text(what=ENV_VARIABLE.what, is_valid=ENV_VARIABLE.is_valid, nullable=True)),
        "remote_model": _plain(Text(what="the model's name at the provider", nullable=True)),
        "remote_timeout_s": _plain(Number(minimum=1.0, maximum=3600.0), default=120),
        "remote_health_check": _plain(Enum(values=("config_only", "models", "completion")), default="config_only"),
        "remote_max_retries": _plain(Integer(minimum=0, maximum=5, unit="retries"), default=0),
        "remote_thinking": _plain(Enum(values=("enabled", "disabled"), nullable=True)),
    },
    "attached": {},
}
"""The fields of each backend beside the common ones; limits are those of the llm-pool admin API where it has the field."""

CONTEXT_FIELDS: Mapping[str, str] = {
    "gguf": "gguf_n_ctx",
    "llama_server": "llama_server_n_ctx",
    "vllm": "vllm_max_model_len",
}
"""The field that says how many tokens one request may have."""

CACHE_FIELDS: Mapping[str, str] = {"exllamav3": "exllama_cache_size", "tabbyapi": "exllama_cache_size"}
"""The field that says how many tokens all requests of a replica may have together."""


def find_field(backend: str, name: str) -> Field | None:
    """Return what a backend's field is, a common one included; None when it does not know the name."""
    return BACKEND_FIELDS[backend].get(name) or COMMON_FIELDS.get(name)


def owners_of(name: str) -> tuple[str, ...]:
    """Return the backends that have a field of this name, none when it does not exist."""
    return tuple(backend for backend, fields in BACKEND_FIELDS.items() if name in fields)


def override_fields(backend: str) -> dict[str, Field]:
    """Return what a load may override for a backend, under the field names."""
    if backend == "attached":
        return {}
    every = {**COMMON_FIELDS, **BACKEND_FIELDS[backend]}
    return {name: field for name, field in every.items() if field.is_override}
