"""Writes safetensors files: eight bytes of length, a JSON header, the tensors."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from tests.fakes.models.gguf_file import Floats


def write_safetensors(path: Path, tensors: dict[str, Floats], *, dtype: str) -> None:
    """Write ``tensors``; ``dtype`` is BF16 (rounded to nearest even) or F32."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, tensor in tensors.items():
        data = _bfloat16(tensor) if dtype == "BF16" else np.ascontiguousarray(tensor, np.float32).tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + body)


def _bfloat16(tensor: Floats) -> bytes:
    bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
