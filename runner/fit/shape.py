"""What memory a model needs depends on: a value read from the headers of its files. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Format = Literal["gguf", "safetensors", "exl3", "ctranslate2", "whisper"]


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


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model. ``weights_bytes`` is the exact sum of its tensors as stored, ``parameter_count`` the numbers in them.

    ``layers`` counts all blocks, ``kv_layers`` those that keep something per token: recurrent layers, and layers that share
    the cache of another, are not in it. ``latent_rank`` is set for multi-head latent attention. ``context_max`` in tokens.
    """

    format: Format
    architecture: str
    weights_bytes: int
    parameter_count: int
    layers: int
    heads: int
    kv_layers: tuple[KvLayer, ...]
    context_max: int | None = None
    quantization: str | None = None
    vocab: int | None = None
    latent_rank: int | None = None

    def last_layers(self, count: int) -> ModelShape:
        """Return the part that llama.cpp puts on a GPU for ``n_gpu_layers``: the last blocks, and the output as one more.

        Below zero, and above their number, is all of it. The weights of a block are taken to be alike.
        """
        if not 0 <= count <= self.layers:
            return self
        kept = len(self.kv_layers) * count // self.layers if self.layers else 0
        weights_bytes = self.weights_bytes * count // (self.layers + 1)
        return replace(self, weights_bytes=weights_bytes, kv_layers=self.kv_layers[len(self.kv_layers) - kept :])
