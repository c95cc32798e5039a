"""Fields of one model that depend on each other. Pure; the same rules for settings and for load overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

Problem = tuple[str, str]
"""The field to name, and what is wrong and what would do, to follow the name."""

_EXACT_V_TYPES = frozenset({"f32", "f16", "bf16"})
_SPECULATIVE = (
    "vllm_num_speculative_tokens", "vllm_speculative_moe_backend", "vllm_speculative_attention_backend",
)  # fmt: skip


_OF_SERVER = "is decided by the server that has the model; take it out"
_NO_TEMPLATE = frozenset({"tgi", "openai_compatible", "whisper", "comfyui"})
"""Backends that are given no variables of a chat template, or have none."""


def find_misplaced(backend: str, values: Mapping[str, object]) -> Problem | None:
    """Return the first common field of a model's settings that would do nothing for its backend, None when all act."""
    device, own = values.get("device"), {name for name, value in values.items() if value is not None}
    is_cpu = device == "cpu"
    if device is not None and backend in {"llama_server", "tabbyapi", "comfyui", "openai_compatible", "tgi"}:
        return "device", _OF_SERVER if backend != "tgi" else "is not told to TGI; say with CUDA_VISIBLE_DEVICES what it may use"
    if is_cpu and backend == "exllamav3":
        return "device", "cannot be cpu: ExLlamaV3 runs on GPUs alone"
    if is_cpu and backend == "gguf" and values.get("gguf_n_gpu_layers") not in {None, 0}:
        return "gguf_n_gpu_layers", f"cannot be {values['gguf_n_gpu_layers']} with device cpu; leave one of them out"
    for name in ("prompt_format", "enable_thinking"):
        if name in own and backend in _NO_TEMPLATE:
            return name, f"does nothing for {backend}, which is given no variables of a chat template; take it out"
    if "enable_thinking" in own and values.get("prompt_format") == "translategemma_template":
        return "enable_thinking", "does nothing with prompt_format translategemma_template, which has no such switch"
    return None


def find_problem(values: Mapping[str, object]) -> Problem | None:
    """Return the first rule that a model's fields break, None when all hold. Absent and null mean the same."""
    for rule in _RULES:
        for problem in rule(values):
            return problem
    return None


def _cache_bits(values: Mapping[str, object]) -> Iterator[Problem]:
    k_bits, v_bits = values.get("exllama_cache_k_bits"), values.get("exllama_cache_v_bits")
    if k_bits is None and v_bits is None:
        return
    if values.get("exllama_cache_quant") is not None:
        yield (
            "exllama_cache_quant",
            "cannot go together with exllama_cache_k_bits and exllama_cache_v_bits; set one of the two ways to null",
        )
    if k_bits is None:
        yield "exllama_cache_k_bits", "is needed too when exllama_cache_v_bits is given; 2 to 8 bits"
    if v_bits is None:
        yield "exllama_cache_v_bits", "is needed too when exllama_cache_k_bits is given; 2 to 8 bits"


def _flash_attention(values: Mapping[str, object]) -> Iterator[Problem]:
    """llama.cpp refuses a quantised V cache without flash attention."""
    type_v = values.get("gguf_type_v")
    if values.get("gguf_flash_attn") == "off" and type_v is not None and type_v not in _EXACT_V_TYPES:
        yield "gguf_type_v", f"cannot be {type_v} with gguf_flash_attn off; set gguf_flash_attn to on or auto"


def _speculation(values: Mapping[str, object]) -> Iterator[Problem]:
    if values.get("vllm_speculative_method") is not None or values.get("vllm_speculative_model") is not None:
        return
    for name in _SPECULATIVE:
        if values.get(name) is not None:
            yield name, "does nothing without vllm_speculative_method or vllm_speculative_model; give one of them"


_RULES: tuple[Callable[[Mapping[str, object]], Iterator[Problem]], ...] = (_cache_bits, _flash_attention, _speculation)
