"""The ``model.bin`` of CTranslate2, text models and Whisper: names, dimensions and types of its variables, and their shape.

Source: what ctranslate2.specs.model_spec writes (binary versions 4 to 6); the data are passed over, not read.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from runner.errors import CorruptModel
from runner.fit.gguf import HeaderCursor
from runner.fit.memory import ModelShape
from runner.limits import limits
from wire.memory import KvLayer

_TYPES = (("float32", 4), ("int8", 1), ("int16", 2), ("int32", 4), ("float16", 2), ("bfloat16", 2))
_LAYER = re.compile(r"decoder/layer_(\d{1,4})/")


@dataclass(frozen=True, slots=True)
class _Variable:
    """``value`` is that of a small integer, None for weights."""

    dims: tuple[int, ...]
    type_name: str
    size_bytes: int
    value: int | None


def read_ct2(path: Path) -> ModelShape:
    """Return the shape of the model in a ``model.bin``.

    Raises CorruptModel (a PyTorch file of the same name is told apart), also when its variables do not make a decoder that can
    be measured, and OSError.
    """
    spec, variables = _read_variables(path)
    is_whisper = spec == "WhisperSpec"
    numbers = {int(match[1]) for name in variables if (match := _LAYER.match(name))}
    layers = max(numbers) + 1 if numbers else 0
    if layers > limits().models.layers:
        raise CorruptModel.of(path, f"it claims {layers} layers")
    heads = _small(variables, "decoder/num_heads") or 0
    return ModelShape(
        backend="whisper" if is_whisper else "ct2",
        weights_bytes=sum(variable.size_bytes for variable in variables.values()),
        layers=layers,
        kv_layers=_kv_layers(path, variables, layers, heads, is_whisper=is_whisper) if layers and heads else (),
        context_max=448 if is_whisper else None,
        quantization=_quantization(variables),
    )


def _read_variables(path: Path) -> tuple[str, dict[str, _Variable]]:
    chunk_bytes = limits().models.ct2_chunk_bytes
    with path.open("rb", buffering=chunk_bytes) as file:
        cursor = HeaderCursor(path, file, chunk_bytes=chunk_bytes)
        version = cursor.unsigned(4)
        if not 4 <= version <= 6:
            raise cursor.fail("it is no CTranslate2 model of binary version 4 to 6 (weights of PyTorch are not loaded)")
        spec = _name(cursor)
        cursor.unsigned(4)
        count = cursor.unsigned(4)
        if count > limits().models.tensors:
            raise cursor.fail(f"it claims {count} variables")
        return spec, dict(_read_variable(cursor) for _ in range(count))


def _name(cursor: HeaderCursor) -> str:
    length = cursor.unsigned(2)
    if not 1 <= length <= limits().models.ct2_name_bytes:
        raise cursor.fail(f"a name in it is {length} bytes long")
    return cursor.text(length).rstrip("\0")


def _read_variable(cursor: HeaderCursor) -> tuple[str, _Variable]:
    name = _name(cursor)
    rank = cursor.unsigned(1)
    if rank > 8:
        raise cursor.fail(f"the variable {name[:80]!r} has {rank} dimensions")
    dims = tuple(cursor.unsigned(4) for _ in range(rank))
    number, size = cursor.unsigned(1), cursor.unsigned(4)
    if number >= len(_TYPES):
        raise cursor.fail(f"the variable {name[:80]!r} is of the unknown type {number}")
    type_name, width = _TYPES[number]
    # The size is written in 32 bits: that of a variable above 4 GiB has lost its upper part, the dimensions have not.
    exact = prod(dims) * width
    if exact & 0xFFFFFFFF != size:
        raise cursor.fail(f"the variable {name[:80]!r} has {size} bytes, which do not fit its dimensions")
    is_small = exact <= 8 and prod(dims) == 1 and type_name.startswith("int")
    value = int.from_bytes(cursor.take(exact), "little", signed=True) if is_small else None
    if not is_small:
        cursor.skip(exact)
    return name, _Variable(dims, type_name, exact, value)


def _small(variables: dict[str, _Variable], name: str) -> int | None:
    variable = variables.get(name)
    value = variable.value if variable is not None else None
    return value if value is not None and 0 <= value <= 1 << 15 else None


def _kv_layers(
    path: Path, variables: dict[str, _Variable], layers: int, heads: int, *, is_whisper: bool
) -> tuple[KvLayer, ...]:
    embeddings = variables.get("decoder/embeddings/weight")
    if embeddings is None or len(embeddings.dims) != 2:
        raise CorruptModel.of(path, "it has no decoder/embeddings/weight")

    def stated(layer: int, name: str) -> int | None:
        # Equal values of later layers may be written once, under the name of the first.
        own, first = (f"decoder/layer_{number}/self_attention/{name}" for number in (layer, 0))
        return _small(variables, own) or _small(variables, first)

    even = embeddings.dims[1] // heads
    found: list[KvLayer] = []
    for layer in range(layers):
        width = stated(layer, "head_dim") or even
        found.append(KvLayer(stated(layer, "num_heads_kv") or heads, width, width, stated(layer, "sliding_window")))
    if is_whisper:
        found += [KvLayer(heads, even, even, fixed_tokens=1500)] * layers
    return tuple(found)


def _quantization(variables: dict[str, _Variable]) -> str | None:
    sizes: Counter[str] = Counter()
    for name, variable in variables.items():
        # What belongs to a quantisation (scales) or is a setting (no dimensions) is no parameter of the network.
        if variable.dims and not name.endswith("_scale"):
            sizes[variable.type_name] += variable.size_bytes
    return sizes.most_common(1)[0][0] if sizes else None
