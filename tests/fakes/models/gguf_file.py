"""Reads a GGUF file (version 3): its metadata and its tensors as float32. Types f32, f16 and q8_0 only."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Floats = NDArray[np.float32]
Value = int | float | bool | str | list["Value"]

MAGIC = b"GGUF"
F32, F16, Q8_0 = 0, 1, 8
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufFile:
    """``metadata`` by key; ``tensors`` by name, rows first."""

    metadata: dict[str, Value]
    tensors: dict[str, Floats]

    def get(self, key: str, kind: type[T]) -> T:
        """Return a value of the metadata. Raises AssertionError when it is of another type."""
        value = self.metadata[key]
        assert isinstance(value, kind)
        return value


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> int | float | bool:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        assert isinstance(value, int | float)
        return value

    def count(self, layout: str = "<Q") -> int:
        return int(self.take(layout))

    def string(self) -> str:
        length = self.count()
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, length = self.count("<I"), self.count()
            return [self.value(inner) for _ in range(length)]
        return self.take(_NUMBERS[kind])


def read_gguf(path: Path) -> GgufFile:
    """Read the whole file; raises AssertionError when it is not one, KeyError for a type that is not read here."""
    cursor = _Cursor(path.read_bytes())
    cursor.at = 4
    assert cursor.data[:4] == MAGIC, f"{path} is not a GGUF file"
    assert cursor.count("<I") == 3
    tensor_count, value_count = cursor.count(), cursor.count()
    metadata: dict[str, Value] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.count("<I"))
    entries = []
    for _ in range(tensor_count):
        name = cursor.string()
        shape = [cursor.count() for _ in range(cursor.count("<I"))]
        entries.append((name, shape[::-1], cursor.count("<I"), cursor.count()))
    alignment = metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _decode(cursor.data, start + offset, kind, shape) for name, shape, kind, offset in entries}
    return GgufFile(metadata, tensors)


def _decode(data: bytes, at: int, kind: int, shape: list[int]) -> Floats:
    count = int(np.prod(shape))
    if kind == F32:
        return np.frombuffer(data, np.float32, count, at).reshape(shape).copy()
    if kind == F16:
        return np.frombuffer(data, np.float16, count, at).reshape(shape).astype(np.float32)
    # q8_0: blocks of 32 weights, one float16 scale and 32 signed bytes each.
    block = {F32: None, F16: None, Q8_0: np.dtype([("scale", np.float16), ("weights", np.int8, 32)])}[kind]
    blocks = np.frombuffer(data, block, count // 32, at)
    values: Floats = blocks["scale"].astype(np.float32)[:, None] * blocks["weights"].astype(np.float32)
    return values.reshape(shape)
