"""What a model takes: weights as they are, the KV cache by formula, the engine's own share as given. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from runner.fit.shape import KvLayer, ModelShape

CACHE_TYPES: dict[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "q8_0": (32, 34), "q5_1": (32, 24), "q5_0": (32, 22), "q4_1": (32, 20),
    "q4_0": (32, 18), "iq4_nl": (32, 18), "fp8": (1, 1), "fp8_e4m3": (1, 1), "fp8_e5m2": (1, 1), "auto": (1, 2),
    "float32": (1, 4), "float16": (1, 2), "bfloat16": (1, 2),
}  # fmt: skip
"""Elements and bytes of one block: those of ggml for its types, one number for the others (``auto``: 16 bits)."""

BATCH_TOKENS = 512
"""A sliding window is kept together with the batch being worked on (n_ubatch of llama.cpp, its default)."""
PAGE_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes. ``kv_bytes_per_token``: what one more token of one request takes while no window is full."""

    weights_bytes: int
    kv_bytes: int
    overhead_bytes: int
    total_bytes: int
    kv_bytes_per_token: int


def estimate(
    shape: ModelShape, *, context_tokens: int, slots: int, type_k: str = "f16", type_v: str = "f16", overhead_bytes: int
) -> Estimate:
    """Return what ``slots`` requests of ``context_tokens`` each take. Raises ValueError for an unknown type of cache."""
    kv_bytes = slots * sum(
        cells_of(layer, context_tokens) * bytes_per_token(layer, type_k=type_k, type_v=type_v) for layer in shape.kv_layers
    )
    growing = [layer for layer in shape.kv_layers if layer.fixed_tokens is None]
    return Estimate(
        weights_bytes=shape.weights_bytes,
        kv_bytes=kv_bytes,
        overhead_bytes=overhead_bytes,
        total_bytes=shape.weights_bytes + kv_bytes + overhead_bytes,
        kv_bytes_per_token=sum(bytes_per_token(layer, type_k=type_k, type_v=type_v) for layer in growing),
    )


def cells_of(layer: KvLayer, context_tokens: int) -> int:
    """Return for how many tokens of one request a layer has room."""
    if layer.fixed_tokens is not None:
        return layer.fixed_tokens
    if layer.window is None:
        return context_tokens
    padded = -(-(layer.window + BATCH_TOKENS) // PAGE_TOKENS) * PAGE_TOKENS
    return min(context_tokens, padded)


def bytes_per_token(layer: KvLayer, *, type_k: str, type_v: str) -> int:
    """Return the bytes that one layer keeps of one token."""
    return _row_bytes(layer.kv_heads * layer.key_dim, type_k) + _row_bytes(layer.kv_heads * layer.value_dim, type_v)


def _row_bytes(elements: int, cache_type: str) -> int:
    block = CACHE_TYPES.get(cache_type)
    if block is None:
        raise ValueError(f"{cache_type!r} is no type of KV cache; known are {', '.join(CACHE_TYPES)}")
    return -(-elements // block[0]) * block[1]
