"""Reading the header of a GGUF file, version 2 and 3: metadata and the list of tensors.

Source: the GGUF specification of ggml (docs/gguf.md) and the table of block sizes in its gguf-py.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path

from runner.fit.cursor import HeaderCursor, corrupt
from runner.limits import limits

Value = int | float | str | bool | tuple[int | float | bool, ...]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4), 1: ("f16", 1, 2), 2: ("q4_0", 32, 18), 3: ("q4_1", 32, 20), 6: ("q5_0", 32, 22), 7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34), 9: ("q8_1", 32, 36), 10: ("q2_k", 256, 84), 11: ("q3_k", 256, 110), 12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176), 14: ("q6_k", 256, 210), 15: ("q8_k", 256, 292), 16: ("iq2_xxs", 256, 66), 17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98), 19: ("iq1_s", 256, 50), 20: ("iq4_nl", 32, 18), 21: ("iq3_s", 256, 110), 22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136), 24: ("i8", 1, 1), 25: ("i16", 1, 2), 26: ("i32", 1, 4), 27: ("i64", 1, 8), 28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56), 30: ("bf16", 1, 2), 34: ("tq1_0", 256, 54), 35: ("tq2_0", 256, 66), 39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36), 41: ("q1_0", 128, 18),
}  # fmt: skip
"""Number in the file -> name, elements of a block, bytes of a block."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: its name, how many numbers it holds, how they are stored, and its bytes in the file."""

    name: str
    elements: int
    type_name: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the parts of a GGUF say together. Text arrays (the vocabulary) are kept only as ``lengths`` by key."""

    path: Path
    metadata: dict[str, Value]
    lengths: dict[str, int]
    tensors: tuple[GgufTensor, ...]


def part_paths(path: Path) -> tuple[Path, ...]:
    """Return all parts of a split GGUF in order, or the path alone. They need not exist. Raises CorruptModel."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return (path,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= limits().models.parts:
        raise corrupt(path, "its name does not say which part of how many it is")
    return tuple(path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))


def read_gguf(path: Path) -> GgufHeader:
    """Read a GGUF and, when it is split, all its parts. Raises CorruptModel, OSError."""
    parts = part_paths(path)
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise corrupt(path, f"its part {missing[0]} is missing" if len(parts) > 1 else "it is not a file")
    first, *others = [_read_part(part) for part in parts]
    tensors = first.tensors + tuple(tensor for part in others for tensor in part.tensors)
    return GgufHeader(path, first.metadata, first.lengths, tensors)


def _read_part(path: Path) -> GgufHeader:
    with path.open("rb", buffering=0) as file:
        cursor = HeaderCursor(path, file, path.stat().st_size, chunk_bytes=limits().models.chunk_bytes)
        tensor_count, pair_count = _read_start(cursor)
        metadata: dict[str, Value] = {}
        lengths: dict[str, int] = {}
        for _ in range(pair_count):
            key = cursor.text(cursor.unsigned(8))
            _read_value(cursor, key, metadata, lengths)
        infos = [_read_info(cursor) for _ in range(tensor_count)]
        return GgufHeader(path, metadata, lengths, _measure(cursor, infos, metadata.get("general.alignment", 32)))


def _read_start(cursor: HeaderCursor) -> tuple[int, int]:
    if cursor.take(4) != b"GGUF":
        raise cursor.fail("it is no GGUF file (its first four bytes say so)")
    version = cursor.unsigned(4)
    if version not in {2, 3}:
        raise cursor.fail(f"its GGUF version is {version}, and 2 and 3 can be read (big-endian files cannot)")
    tensor_count, pair_count = cursor.unsigned(8), cursor.unsigned(8)
    if tensor_count > limits().models.tensors or pair_count > limits().models.pairs:
        raise cursor.fail(f"it claims {tensor_count} tensors and {pair_count} metadata entries")
    return tensor_count, pair_count


def _read_value(cursor: HeaderCursor, key: str, metadata: dict[str, Value], lengths: dict[str, int]) -> None:
    kind = cursor.unsigned(4)
    if kind == _STRING:
        length = cursor.unsigned(8)
        if length > limits().models.kept_items:  # a chat template, a licence
            cursor.skip(length)
        else:
            metadata[key] = cursor.text(length)
    elif kind == _ARRAY:
        _read_array(cursor, key, metadata, lengths)
    else:
        metadata[key] = _read_scalars(cursor, kind, 1)[0]


def _read_array(cursor: HeaderCursor, key: str, metadata: dict[str, Value], lengths: dict[str, int]) -> None:
    kind, count = cursor.unsigned(4), cursor.unsigned(8)
    lengths[key] = count
    if kind == _STRING:
        cursor.skip_strings(count)
    elif count <= limits().models.kept_items:
        metadata[key] = _read_scalars(cursor, kind, count)
    else:
        cursor.skip(count * struct.calcsize(_scalar(cursor, kind)))


def _scalar(cursor: HeaderCursor, kind: int) -> str:
    layout = _SCALARS.get(kind)
    if layout is None:
        raise cursor.fail(f"its metadata has a value of the unknown type {kind}")
    return layout


def _read_scalars(cursor: HeaderCursor, kind: int, count: int) -> tuple[int | float | bool, ...]:
    layout = _scalar(cursor, kind)
    return struct.unpack(f"<{count}{layout[1]}", cursor.take(count * struct.calcsize(layout)))


def _read_info(cursor: HeaderCursor) -> tuple[str, list[int], int, int]:
    name = cursor.text(cursor.unsigned(8))
    rank = cursor.unsigned(4)
    if rank > 8:
        raise cursor.fail(f"the tensor {name[:80]!r} has {rank} dimensions")
    return name, [cursor.unsigned(8) for _ in range(rank)], cursor.unsigned(4), cursor.unsigned(8)


def _measure(cursor: HeaderCursor, infos: list[tuple[str, list[int], int, int]], alignment: Value) -> tuple[GgufTensor, ...]:
    """Return the tensors with their sizes, once all of them lie inside the file and beside each other."""
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise cursor.fail(f"its alignment is {str(alignment)[:40]}")
    start = -(-cursor.position // alignment) * alignment
    available = cursor.size - start
    tensors: list[GgufTensor] = []
    reached = 0
    by_offset = sorted(infos, key=lambda info: info[3])
    for index, (name, dims, number, offset) in enumerate(by_offset):
        following = by_offset[index + 1][3] if index + 1 < len(by_offset) else max(available, offset)
        tensor = _measure_one(cursor, name, dims, number, gap=following - offset)
        if offset < reached:
            raise cursor.fail(f"the tensor {name[:80]!r} lies on top of another one")
        reached = offset + tensor.size_bytes
        if reached > available:
            raise cursor.fail(f"it has {cursor.size} bytes, and the tensor {name[:80]!r} ends at {start + reached}")
        tensors.append(tensor)
    return tuple(tensors)


def _measure_one(cursor: HeaderCursor, name: str, dims: list[int], number: int, *, gap: int) -> GgufTensor:
    elements = 1
    for dim in dims:
        elements *= dim
    if elements > 1 << 62:
        raise cursor.fail(f"the tensor {name[:80]!r} has impossible dimensions")
    known = TENSOR_TYPES.get(number)
    if known is None:  # newer than this program: it reaches to where the next one begins
        return GgufTensor(name, elements, f"type{number}", gap)
    type_name, block, block_bytes = known
    if dims and dims[0] % block:
        raise cursor.fail(f"the rows of the tensor {name[:80]!r} are no multiple of {block}, which {type_name} needs")
    return GgufTensor(name, elements, type_name, elements // block * block_bytes)
