"""Reading the headers of safetensors files: an 8-byte length, then JSON of names, types, shapes and offsets.

Source: the format description of the safetensors library.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from runner.fit.cursor import corrupt
from runner.limits import limits

INDEX_NAME = "model.safetensors.index.json"
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(slots=True)
class TensorSums:
    """Totals over the files of one model; ``bytes_by_type`` is keyed by the type names of the format.

    ``packed_words``: 32-bit words that hold several quantised weights each.
    """

    size_bytes: int = 0
    elements: int = 0
    packed_words: int = 0
    bytes_by_type: Counter[str] = field(default_factory=Counter)


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that the weights of a folder are in. Raises CorruptModel when the index names one that is missing."""
    index = folder / INDEX_NAME
    if index.is_file():
        names = sorted(set(_read_index(index).weight_map.values()))
        for name in names:
            if "/" in name or "\\" in name or name.startswith(".") or not name.endswith(".safetensors"):
                raise corrupt(index, f"it names the file {name[:80]!r}")
            if not (folder / name).is_file():
                raise corrupt(index, f"it names {name[:80]}, which is missing")
        return tuple(folder / name for name in names)
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    # Some publishers put the same weights there twice, once in the layout of their own library.
    return tuple(path for path in found if not path.name.startswith("consolidated")) or tuple(found)


def sum_tensors(files: tuple[Path, ...]) -> TensorSums:
    """Add up the tensors of some files. Raises CorruptModel, OSError."""
    sums = TensorSums()
    for path in files[: limits().models.files]:
        _add_file(path, sums)
    return sums


def _read_index(path: Path) -> _Index:
    if path.stat().st_size > limits().models.safetensors_bytes:
        raise corrupt(path, f"it is larger than {limits().models.safetensors_bytes} bytes")
    try:
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise corrupt(path, f"it is no index of tensors ({str(error)[:100]})") from None
    if not index.weight_map or len(set(index.weight_map.values())) > limits().models.files:
        raise corrupt(path, "it names no files, or too many")
    return index


def _read_header(path: Path) -> tuple[dict[str, msgspec.Raw], int]:
    """Return the header by tensor name, and how many bytes of data follow it."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise corrupt(path, f"it has {size} bytes, and its header alone should have {length}")
        if length > limits().models.safetensors_bytes:
            raise corrupt(path, f"its header of {length} bytes is larger than {limits().models.safetensors_bytes}")
        raw = file.read(length)
    try:
        return msgspec.json.decode(raw, type=dict[str, msgspec.Raw]), size - 8 - length
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise corrupt(path, f"its header cannot be read ({str(error)[:100]})") from None


def _add_file(path: Path, sums: TensorSums) -> None:
    header, available = _read_header(path)
    total = 0
    for name, raw in header.items():
        if name == "__metadata__":
            continue
        try:
            tensor = msgspec.json.decode(raw, type=_Tensor)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise corrupt(path, f"the entry of the tensor {name[:80]!r} cannot be read ({str(error)[:100]})") from None
        size, elements = _measure(path, name, tensor, available)
        total += size
        sums.elements += elements
        sums.bytes_by_type[tensor.dtype] += size
        if tensor.dtype == "I32" and name.endswith(("qweight", "weight_packed")):
            sums.packed_words += elements
    if total > available:
        raise corrupt(path, "its tensors lie on top of each other")
    sums.size_bytes += total


def _measure(path: Path, name: str, tensor: _Tensor, available: int) -> tuple[int, int]:
    begin, end = tensor.data_offsets
    elements = 1
    for dim in tensor.shape[:16]:
        elements *= dim
    if not 0 <= begin <= end or min(tensor.shape, default=0) < 0 or len(tensor.shape) > 16:
        raise corrupt(path, f"the tensor {name[:80]!r} has impossible dimensions or offsets")
    if end > available:
        raise corrupt(path, f"the tensor {name[:80]!r} ends {end - available} bytes behind the end of the file")
    bits = DTYPE_BITS.get(tensor.dtype)
    if bits is not None and -(-elements * bits // 8) != end - begin:
        raise corrupt(path, f"the tensor {name[:80]!r} has {end - begin} bytes, which do not fit its dimensions")
    return end - begin, elements
