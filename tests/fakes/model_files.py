"""Writers of small model files: GGUF, safetensors, CTranslate2. What is not said is left out or is zeros."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

GGUF_F32, GGUF_F16, GGUF_Q8_0 = 0, 1, 8
_BLOCKS = {0: (1, 4), 1: (1, 2), 2: (32, 18), 8: (32, 34), 12: (256, 144)}
Tensor = tuple[str, tuple[int, ...], int]

LLAMA = {
    "general.architecture": "llama", "general.file_type": 7, "llama.block_count": 2, "llama.context_length": 4096,
    "llama.embedding_length": 64, "llama.attention.head_count": 4, "llama.attention.head_count_kv": 2,
    "tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.scores": [0.0, 1.0, 2.0], "llama.rope.freq_base": 10000.0,
}  # fmt: skip
LLAMA_TENSORS: list[Tensor] = [
    ("token_embd.weight", (64, 32), GGUF_Q8_0), ("blk.0.attn_k.weight", (64, 32), GGUF_Q8_0),
    ("blk.0.attn_norm.weight", (64,), GGUF_F32), ("blk.1.attn_k.weight", (64, 32), GGUF_F16),
]  # fmt: skip


def gguf_bytes(metadata: Mapping[str, object], tensors: Sequence[Tensor], *, version: int = 3) -> tuple[bytes, int]:
    """Return the header of a GGUF, padded to where its data begin, and the size of the data."""
    out = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(metadata))]
    for key, value in metadata.items():
        out += [_text(key), _value(value)]
    offset = 0
    for name, dims, kind in tensors:
        out += [_text(name), struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)]
        offset += -(-tensor_bytes(dims, kind) // 32) * 32
    header = b"".join(out)
    return header + bytes(-len(header) % 32), offset


def tensor_bytes(dims: tuple[int, ...], kind: int) -> int:
    block, size = _BLOCKS[kind]
    elements = 1
    for dim in dims:
        elements *= dim
    return elements // block * size


def write_gguf(
    path: Path, metadata: Mapping[str, object] = LLAMA, tensors: Sequence[Tensor] = tuple(LLAMA_TENSORS), *, version: int = 3
) -> Path:
    header, data = gguf_bytes(metadata, tensors, version=version)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + data)
    return path


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: object) -> bytes:
    if isinstance(value, list):
        kind, items = _items(value)
        return struct.pack("<IIQ", 9, kind, len(value)) + items
    kind, raw = _scalar(value)
    return struct.pack("<I", kind) + raw


def _items(values: list[object]) -> tuple[int, bytes]:
    scalars = [_scalar(value) for value in values]
    return (scalars[0][0] if scalars else 4), b"".join(raw for _, raw in scalars)


def _scalar(value: object) -> tuple[int, bytes]:
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    assert isinstance(value, str)
    return 8, _text(value)


def safetensors_bytes(tensors: Mapping[str, tuple[str, tuple[int, ...], int]]) -> bytes:
    """Return a safetensors file; a tensor is its type, its dimensions and its size in bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, dims, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


SMALL_TENSORS = {"a.weight": ("BF16", (16, 8), 256), "b.weight": ("F32", (4,), 16)}


def write_folder(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, tuple[str, tuple[int, ...], int]] | None = None
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors or SMALL_TENSORS))
    return folder


def ct2_bytes(spec: str, variables: Sequence[tuple[str, tuple[int, ...], int, bytes]]) -> bytes:
    """Return a model.bin of CTranslate2; a variable is its name, dimensions, type number and content."""

    def name(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    out = [struct.pack("<I", 6), name(spec), struct.pack("<II", 8, len(variables))]
    for text, dims, kind, content in variables:
        out += [name(text), struct.pack(f"<B{len(dims)}IBI", len(dims), *dims, kind, len(content) & 0xFFFFFFFF), content]
    return b"".join([*out, struct.pack("<I", 0)])


def write_ct2(folder: Path, *, layers: int = 2) -> Path:
    """Write a CTranslate2 folder with a decoder of four heads, of which two are of keys and values."""
    variables: list[tuple[str, tuple[int, ...], int, bytes]] = [
        ("decoder/num_heads", (), 2, struct.pack("<h", 4)),
        ("decoder/embeddings/weight", (10, 32), 1, bytes(320)),
    ]
    for layer in range(layers):
        prefix = f"decoder/layer_{layer}/self_attention"
        variables.append((f"{prefix}/num_heads_kv", (), 3, struct.pack("<i", 2)))
        variables.append((f"{prefix}/linear_0/weight", (64, 32), 1, bytes(2048)))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_bytes(ct2_bytes("TransformerDecoderSpec", variables))
    return folder
