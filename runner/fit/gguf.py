"""The header of a GGUF file, version 2 and 3: metadata and the list of tensors, and the shape of the model that they state.

Source: the GGUF specification of ggml (docs/gguf.md), and of its gguf-py the table of block sizes and the names of keys.
That package does not read them here, see docs/adr/0007-dependencies.md.
"""

from __future__ import annotations

import re
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import BinaryIO

from runner.errors import CorruptModel
from runner.fit.memory import ModelShape
from runner.limits import limits
from wire.memory import KvLayer

Value = int | float | str | bool | tuple[int | float | bool, ...]

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)")

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


class HeaderCursor:
    """A position in a binary file, little-endian. Every method raises CorruptModel where the file ends or a bound is passed,
    so that a hostile file costs neither memory nor hours.

    ``file`` reads ``chunk_bytes`` at a time: few where the header lies scattered between data that are passed over.
    """

    def __init__(self, path: Path, file: BinaryIO, *, chunk_bytes: int) -> None:
        self.size = path.stat().st_size
        self.position = 0
        self._path = path
        self._file = file
        self._chunk_bytes = chunk_bytes
        self._bounds = limits().models
        self._left = self._bounds.walk_bytes
        self._strings_left = self._bounds.strings

    def fail(self, problem: str) -> CorruptModel:
        return CorruptModel.of(self._path, problem)

    def take(self, count: int) -> bytes:
        if count > self._bounds.take_bytes:
            raise self.fail(f"a field of its header says it is {count} bytes long")
        self._go(count, "in the middle of its header", cost=count)
        data = self._file.read(count)
        if len(data) < count:
            raise self.fail("it was cut short while it was read")
        return data

    def skip(self, count: int) -> None:
        """Pass over ``count`` bytes, however many, without reading them."""
        # What follows a long way brings a whole chunk with it, however little of that is wanted.
        self._go(count, f"where at least {self.position + count} are needed", cost=min(count, self._chunk_bytes))
        self._file.seek(self.position)

    def unsigned(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def text(self, length: int) -> str:
        return self.take(length).decode("utf-8", "replace")

    def skip_strings(self, count: int) -> None:
        """Pass over ``count`` strings, each behind its length of 8 bytes."""
        self._strings_left -= count
        if self._strings_left < 0:
            raise self.fail(f"it claims to hold {self._bounds.strings - self._strings_left} strings")
        # Vocabularies have a million entries: short ones take no method call of ours.
        read, at, end = self._file.read, self.position, min(self.size, self.position + self._left)
        for _ in range(count):
            length = int.from_bytes(read(8), "little")
            at += 8 + length
            if at > end:
                break
            if length <= self._chunk_bytes:
                read(length)
            else:
                self._file.seek(at)
        self._go(at - self.position, "in the middle of its header", cost=at - self.position)

    def _go(self, count: int, where: str, *, cost: int) -> None:
        self.position += count
        if self.position > self.size:
            raise self.fail(f"it ends after {self.size} bytes, {where}")
        self._left -= cost
        if self._left < 0:
            raise self.fail("its header does not end")


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    type_name: str
    size_bytes: int


class _Header:
    """What the parts of a GGUF say together, with typed and bounded access to the metadata of its architecture."""

    def __init__(self, path: Path, metadata: dict[str, Value], tensors: list[_Tensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = tensors
        architecture = metadata.get("general.architecture")
        if not isinstance(architecture, str) or not architecture:
            raise CorruptModel.of(path, "it does not name its architecture (general.architecture)")
        self.architecture = architecture

    def get(self, name: str) -> Value | None:
        return self.metadata.get(f"{self.architecture}.{name}")

    def number(self, name: str, *, most: int | None = None) -> int | None:
        """Return a number that is no array, None when the key is missing."""
        value = self.get(name)
        if isinstance(value, tuple) or value is None:
            return None
        return self._check(name, value, limits().models.width if most is None else most)

    def required(self, name: str, *, most: int | None = None) -> int:
        value = self.number(name, most=most)
        if value is None:
            raise CorruptModel.of(self.path, f"its metadata has no {self.architecture}.{name}")
        return value

    def per_layer(self, name: str, layers: int) -> list[int] | None:
        """Return one number per layer: an array as it is (repeated when it is shorter), a scalar for all of them."""
        value = self.get(name)
        items = value if isinstance(value, tuple) else () if value is None else (value,)
        numbers = [self._check(name, item, limits().models.width) for item in items]
        return [numbers[layer % len(numbers)] for layer in range(layers)] if numbers else None

    def _check(self, name: str, value: object, most: int) -> int:
        # A truth value is a number here: window patterns are arrays of both.
        if not isinstance(value, int) or not 0 <= value <= most:
            raise CorruptModel.of(self.path, f"{self.architecture}.{name} is {str(value)[:40]!r}")
        return int(value)


def read_gguf(path: Path) -> ModelShape:
    """Return the shape of the model in a GGUF and, when it is split, all its parts.

    Raises CorruptModel, also when a number that it needs is missing or absurd, and OSError.
    """
    header = _read_header(path)
    layers = header.required("block_count", most=limits().models.layers)
    return ModelShape(
        backend="gguf",
        weights_bytes=sum(tensor.size_bytes for tensor in header.tensors),
        layers=layers,
        kv_layers=_kv_layers(header, layers),
        context_max=header.number("context_length", most=1 << 40),
        quantization=_quantization(header),
    )


def _read_header(path: Path) -> _Header:
    parts = _part_paths(path)
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise CorruptModel.of(path, f"its part {missing[0]} is missing" if len(parts) > 1 else "it is not a file")
    (metadata, tensors), *others = [_read_part(part) for part in parts]
    return _Header(path, metadata, tensors + [tensor for _, more in others for tensor in more])


def _part_paths(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count <= limits().models.parts:
        raise CorruptModel.of(path, "its name does not say which part of how many it is")
    return [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def _read_part(path: Path) -> tuple[dict[str, Value], list[_Tensor]]:
    chunk_bytes = limits().models.chunk_bytes
    with path.open("rb", buffering=chunk_bytes) as file:
        cursor = HeaderCursor(path, file, chunk_bytes=chunk_bytes)
        if cursor.take(4) != b"GGUF":
            raise cursor.fail("it is no GGUF file (its first four bytes say so)")
        version = cursor.unsigned(4)
        if version not in {2, 3}:
            raise cursor.fail(f"its GGUF version is {version}, and 2 and 3 can be read (big-endian files cannot)")
        tensor_count, pair_count = cursor.unsigned(8), cursor.unsigned(8)
        if tensor_count > limits().models.tensors or pair_count > limits().models.pairs:
            raise cursor.fail(f"it claims {tensor_count} tensors and {pair_count} metadata entries")
        pairs = [(cursor.text(cursor.unsigned(8)), _read_value(cursor)) for _ in range(pair_count)]
        metadata = {key: value for key, value in pairs if value is not None}
        infos = [_read_info(cursor) for _ in range(tensor_count)]
        return metadata, _measure(cursor, infos, metadata.get("general.alignment", 32))


def _read_value(cursor: HeaderCursor) -> Value | None:
    """Return a value, None for one that is passed over: a chat template, a licence, a vocabulary."""
    kind = cursor.unsigned(4)
    if kind == _STRING:
        length = cursor.unsigned(8)
        if length <= limits().models.kept_items:
            return cursor.text(length)
        cursor.skip(length)
    elif kind != _ARRAY:
        return _read_scalars(cursor, kind, 1)[0]
    else:
        kind, count = cursor.unsigned(4), cursor.unsigned(8)
        if kind == _STRING:
            cursor.skip_strings(count)
        elif count <= limits().models.kept_items:
            return _read_scalars(cursor, kind, count)
        else:
            cursor.skip(count * struct.calcsize(_scalar(cursor, kind)))
    return None


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


def _measure(cursor: HeaderCursor, infos: list[tuple[str, list[int], int, int]], alignment: Value) -> list[_Tensor]:
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise cursor.fail(f"its alignment is {str(alignment)[:40]}")
    start = -(-cursor.position // alignment) * alignment
    available = cursor.size - start
    tensors: list[_Tensor] = []
    reached = 0
    # In the order of their offsets, one pass sees overlaps, and how far a tensor of an unknown type can reach.
    infos = sorted(infos, key=lambda info: info[3])
    for index, (name, dims, number, offset) in enumerate(infos):
        following = infos[index + 1][3] if index + 1 < len(infos) else max(available, offset)
        tensor = _measure_one(cursor, name, dims, number, gap=following - offset)
        if offset < reached:
            raise cursor.fail(f"the tensor {name[:80]!r} lies on top of another one")
        reached = offset + tensor.size_bytes
        if reached > available:
            raise cursor.fail(f"it has {cursor.size} bytes, and the tensor {name[:80]!r} ends at {start + reached}")
        tensors.append(tensor)
    return tensors


def _measure_one(cursor: HeaderCursor, name: str, dims: list[int], number: int, *, gap: int) -> _Tensor:
    elements = prod(dims)
    if elements > 1 << 62:
        raise cursor.fail(f"the tensor {name[:80]!r} has impossible dimensions")
    known = TENSOR_TYPES.get(number)
    if known is None:  # newer than this program: it reaches to where the next one begins
        return _Tensor(name, f"type{number}", gap)
    type_name, block, block_bytes = known
    if dims and dims[0] % block:
        raise cursor.fail(f"the rows of the tensor {name[:80]!r} are no multiple of {block}, which {type_name} needs")
    return _Tensor(name, type_name, elements // block * block_bytes)


def _quantization(header: _Header) -> str | None:
    # Mixtures such as q4_k_m have a name of their own; the types of the tensors would tell only the largest part.
    number = header.metadata.get("general.file_type")
    if isinstance(number, int) and number in FILE_TYPES:
        return FILE_TYPES[number]
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        sizes[tensor.type_name] += tensor.size_bytes
    return sizes.most_common(1)[0][0] if sizes else None


def _kv_layers(header: _Header, layers: int) -> tuple[KvLayer, ...]:
    attending = _attending_layers(header, layers)
    windows = _windows(header, layers)
    if header.number("attention.key_length_mla") is not None:
        # llama.cpp keeps the latent vector alone; a file without this key comes from before that and is expanded in full.
        width = header.required("attention.kv_lora_rank") + header.required("rope.dimension_count")
        return tuple(KvLayer(1, width, 0) for _ in attending)
    heads = header.per_layer("attention.head_count", layers)
    if heads is None:
        return ()
    kv_heads = header.per_layer("attention.head_count_kv", layers) or heads
    embedding = header.required("embedding_length")
    key_length, value_length = header.number("attention.key_length"), header.number("attention.value_length")
    key_slides, value_slides = header.number("attention.key_length_swa"), header.number("attention.value_length_swa")
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


def _attending_layers(header: _Header, layers: int) -> list[int]:
    parts: dict[int, set[str]] = {}
    for tensor in header.tensors:
        if match := _BLOCK.match(tensor.name):
            parts.setdefault(int(match[1]), set()).add(match[2])
    interval = header.number("full_attention_interval")
    # The last layers of some models read the cache of an earlier one.
    own = layers - (header.number("attention.shared_kv_layers") or 0)
    # Recurrent layers keep no keys and values.
    return [
        layer for layer in range(own) if _attends(parts.get(layer, set())) and (not interval or (layer + 1) % interval == 0)
    ]


def _attends(parts: set[str]) -> bool:
    if not any(part.startswith(("ssm_", "time_mix_", "shortconv")) for part in parts):
        return True
    return bool(parts & {"attn_k", "attn_kv_a_mqa", "attn_k_b", "attn_kv_b"})


def _windows(header: _Header, layers: int) -> list[int | None]:
    window = header.number("attention.sliding_window")
    if not window:
        return [None] * layers
    raw = header.get("attention.sliding_window_pattern")
    if isinstance(raw, tuple):
        flags = header.per_layer("attention.sliding_window_pattern", layers) or [0] * layers
        return [window if flag else None for flag in flags]
    period = header.number("attention.sliding_window_pattern") if raw is not None else WINDOW_PERIODS.get(header.architecture)
    # A layer that nothing is known of counts in full.
    if period is None:
        return [None] * layers
    return [window if period == 0 or layer % period < period - 1 else None for layer in range(layers)]
