"""Fields of one model that depend on each other. Pure; the same rules for settings and for load overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

Problem = tuple[str, str]
"""The field to name, and what is wrong and what would do, to follow the name."""

_EXACT_V_TYPES = frozenset({"f32", "f16", "bf16"})
_SPECULATIVE = (
    "vllm_num_speculative_tokens", "vllm_speculative_moe_backend", "vllm_speculative_attention_backend",
)  # fmt: skip


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
