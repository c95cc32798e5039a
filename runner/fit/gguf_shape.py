"""From the metadata of a GGUF to the shape of the model. Key names as in llama.cpp's gguf-py."""

from __future__ import annotations

import re
from collections import Counter

from runner.fit.cursor import corrupt
from runner.fit.gguf import GgufHeader
from runner.fit.shape import KvLayer, ModelShape
from runner.limits import limits

FILE_TYPES = {
    0: "f32", 1: "f16", 2: "q4_0", 3: "q4_1", 7: "q8_0", 8: "q5_0", 9: "q5_1", 10: "q2_k", 11: "q3_k_s", 12: "q3_k_m",
    13: "q3_k_l", 14: "q4_k_s", 15: "q4_k_m", 16: "q5_k_s", 17: "q5_k_m", 18: "q6_k", 19: "iq2_xxs", 20: "iq2_xs",
    21: "q2_k_s", 22: "iq3_xs", 23: "iq3_xxs", 24: "iq1_s", 25: "iq4_nl", 26: "iq3_s", 27: "iq3_m", 28: "iq2_s", 29: "iq2_m",
    30: "iq4_xs", 31: "iq1_m", 32: "bf16", 36: "tq1_0", 37: "tq2_0", 38: "mxfp4", 39: "nvfp4",
}  # fmt: skip
"""``general.file_type``: llama.cpp's enum llama_ftype."""
WINDOW_PERIODS = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "exaone4": 4, "olmo2": 4, "llama4": 4,
    "plamo3": 8, "mellum": 4,
}  # fmt: skip
"""Architectures whose files do not say which layers slide: every n-th layer sees everything, the others the window."""
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")


class _Keys:
    """Typed and bounded access to the metadata of one architecture."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        architecture = header.metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise corrupt(header.path, "it does not name its architecture (general.architecture)")
        self.architecture = architecture

    def number(self, name: str, *, most: int | None = None) -> int | None:
        """Return a number that is no array, None when the key is missing."""
        value = self.header.metadata.get(f"{self.architecture}.{name}")
        if isinstance(value, tuple) or value is None:
            return None
        return self._check(name, value, limits().models.width if most is None else most)

    def required(self, name: str, *, most: int | None = None) -> int:
        """Return a number that must be there."""
        value = self.number(name, most=most)
        if value is None:
            raise corrupt(self.header.path, f"its metadata has no {self.architecture}.{name}")
        return value

    def per_layer(self, name: str, layers: int) -> list[int] | None:
        """Return one number per layer: an array as it is (repeated when it is shorter), a scalar for all of them."""
        value = self.header.metadata.get(f"{self.architecture}.{name}")
        if value is None:
            return None
        items = value if isinstance(value, tuple) else (value,)
        if not items:
            return None
        numbers = [self._check(name, item, limits().models.width) for item in items]
        return [numbers[layer % len(numbers)] for layer in range(layers)]

    def _check(self, name: str, value: object, most: int) -> int:
        if (
            not isinstance(value, int) or not 0 <= value <= most
        ):  # a truth value is a number here: window patterns are arrays of both
            raise corrupt(self.header.path, f"{self.architecture}.{name} is {str(value)[:40]!r}")
        return int(value)


def shape_gguf(header: GgufHeader) -> ModelShape:
    """Return the shape of the model in a GGUF. Raises CorruptModel when a number that it needs is missing or absurd."""
    keys = _Keys(header)
    layers = keys.required("block_count", most=limits().models.layers)
    heads = max(keys.per_layer("attention.head_count", layers) or [0])
    is_latent = keys.number("attention.key_length_mla") is not None
    return ModelShape(
        format="gguf",
        architecture=keys.architecture,
        weights_bytes=sum(tensor.size_bytes for tensor in header.tensors),
        parameter_count=sum(tensor.elements for tensor in header.tensors),
        layers=layers,
        heads=heads,
        kv_layers=_kv_layers(keys, layers),
        context_max=keys.number("context_length", most=1 << 40),
        quantization=_quantization(header),
        vocab=keys.number("vocab_size") or header.lengths.get("tokenizer.ggml.tokens"),
        latent_rank=keys.number("attention.kv_lora_rank") if is_latent else None,
    )


def _quantization(header: GgufHeader) -> str | None:
    number = header.metadata.get("general.file_type")
    if isinstance(number, int) and number in FILE_TYPES:
        return FILE_TYPES[number]
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        sizes[tensor.type_name] += tensor.size_bytes
    return sizes.most_common(1)[0][0] if sizes else None


def _kv_layers(keys: _Keys, layers: int) -> tuple[KvLayer, ...]:
    attending = _attending_layers(keys, layers)
    windows = _windows(keys, layers)
    if keys.number("attention.key_length_mla") is not None:
        # llama.cpp keeps the latent vector alone; a file without this key comes from before that and is expanded in full.
        width = keys.required("attention.kv_lora_rank") + keys.required("rope.dimension_count")
        return tuple(KvLayer(1, width, 0) for _ in attending)
    heads = keys.per_layer("attention.head_count", layers)
    if heads is None:
        return ()
    kv_heads = keys.per_layer("attention.head_count_kv", layers) or heads
    embedding = keys.required("embedding_length")
    key_length, value_length = keys.number("attention.key_length"), keys.number("attention.value_length")
    key_slides, value_slides = keys.number("attention.key_length_swa"), keys.number("attention.value_length_swa")
    found: list[KvLayer] = []
    for layer in attending:
        if kv_heads[layer] == 0:
            continue
        even = embedding // heads[layer] if heads[layer] else 0
        key, value = (even if key_length is None else key_length), (even if value_length is None else value_length)
        window = windows[layer]
        if window is not None:
            key, value = key_slides or key, value_slides or value
        found.append(KvLayer(kv_heads[layer], key, value, window))
    return tuple(found)


def _attending_layers(keys: _Keys, layers: int) -> list[int]:
    """Return the layers that keep keys and values: recurrent ones and those that share another's cache do not."""
    parts: dict[int, set[str]] = {}
    for tensor in keys.header.tensors:
        if match := _BLOCK.match(tensor.name):
            parts.setdefault(int(match[1]), set()).add(match[2])
    interval = keys.number("full_attention_interval")
    own = layers - (keys.number("attention.shared_kv_layers") or 0)
    return [
        layer
        for layer in range(layers)
        if layer < own and _attends(parts.get(layer, set())) and (not interval or (layer + 1) % interval == 0)
    ]


def _attends(parts: set[str]) -> bool:
    if not any(part.startswith(("ssm_", "time_mix_", "shortconv")) for part in parts):
        return True
    return bool(parts & {"attn_k", "attn_kv_a_mqa", "attn_k_b", "attn_kv_b"})


def _windows(keys: _Keys, layers: int) -> list[int | None]:
    """Return the window of each layer, None = it sees everything. A layer we know nothing of counts in full."""
    window = keys.number("attention.sliding_window")
    if not window:
        return [None] * layers
    raw = keys.header.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if isinstance(raw, tuple):
        flags = keys.per_layer("attention.sliding_window_pattern", layers) or [0] * layers
        return [window if flag else None for flag in flags]
    period = keys.number("attention.sliding_window_pattern") if raw is not None else WINDOW_PERIODS.get(keys.architecture)
    if period is None:
        return [None] * layers
    return [window if period == 0 or layer % period < period - 1 else None for layer in range(layers)]
