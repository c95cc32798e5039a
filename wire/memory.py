"""Memory arithmetic of a model: what its KV cache takes, and what an engine takes beside weights and cache.

The node uses it for the files that it has, the server for models that no node has yet. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

_MIB = 1024 * 1024

CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22), "q4_1": (32, 20),
    "q4_0": (32, 18), "iq4_nl": (32, 18), "fp8": (1, 1), "fp8_e4m3": (1, 1), "fp8_e5m2": (1, 1), "auto": (1, 2),
    "float32": (1, 4), "float16": (1, 2), "bfloat16": (1, 2),
}  # fmt: skip
"""Elements and bytes of one block: those of ggml for its types, one number for the others (``auto``: 16 bits)."""

BATCH_TOKENS = 512
"""A sliding window is kept together with the batch being worked on (n_ubatch of llama.cpp, its default)."""
PAGE_TOKENS = 256

# Bytes that an engine takes beside weights and cache before a load was measured: without a GPU, with one.
FIRST_GUESSES: dict[str, tuple[int, int]] = {
    # llama.cpp took 37 MB with a 1 MB model, 0.7 GB on a GPU, where most of it is CUDA's own; buffers grow with the model.
    "gguf": (48 * _MIB, 768 * _MIB),
    # CTranslate2 took 52 MB with a 1 MB model, 0.6 GB on a GPU.
    "ct2": (64 * _MIB, 640 * _MIB),
    # faster-whisper took 164 MB without a GPU, its audio decoder and voice detector included; with one it was not measured.
    "whisper": (192 * _MIB, 192 * _MIB),
    # The processes of vLLM took 1.7 GB without a GPU, together with a 2 MB model.
    "vllm": (1800 * _MIB, 1800 * _MIB),
    # ExLlamaV3 was never measured; vLLM in one process, on the same PyTorch, took 1.2 GB.
    "exllamav3": (1200 * _MIB, 1200 * _MIB),
}


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one layer keeps of each token: ``kv_heads`` times ``key_dim`` and ``value_dim`` numbers.

    ``window``: a token older than so many is forgotten. ``fixed_tokens``: it always holds so many, whatever the context
    (cross-attention over the audio of Whisper). Multi-head latent attention is one head of rank + rotary numbers and no values.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    fixed_tokens: int | None = None


def count_kv_bytes(
    layers: Iterable[KvLayer], *, context_tokens: int, slots: int, type_k: str = "f16", type_v: str = "f16"
) -> int:
    """Return what ``slots`` requests of ``context_tokens`` each keep. Raises ValueError for an unknown type of cache."""
    return slots * sum(
        _cells(layer, context_tokens)
        * (_row_bytes(layer.kv_heads * layer.key_dim, type_k) + _row_bytes(layer.kv_heads * layer.value_dim, type_v))
        for layer in layers
    )


def _cells(layer: KvLayer, context_tokens: int) -> int:
    if layer.fixed_tokens is not None:
        return layer.fixed_tokens
    if layer.window is None:
        return context_tokens
    return min(context_tokens, -(-(layer.window + BATCH_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS)


def _row_bytes(elements: int, cache_type: str) -> int:
    if cache_type not in CACHE_TYPES:
        raise ValueError(f"{cache_type!r} is no type of KV cache; known are {', '.join(CACHE_TYPES)}")
    block, block_bytes = CACHE_TYPES[cache_type]
    return -(-elements // block) * block_bytes
