"""Reading the ``model.bin`` of CTranslate2, text models and Whisper: names, dimensions and types of its variables.

Source: what ctranslate2.specs.model_spec writes (binary versions 4 to 6); the data are passed over, not read.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path

from runner.fit.cursor import HeaderCursor, corrupt
from runner.fit.shape import KvLayer, ModelShape
from runner.limits import limits

_TYPES = (("float32", 4), ("int8", 1), ("int16", 2), ("int32", 4), ("float16", 2), ("bfloat16", 2))
_LAYER = re.compile(r"decoder/layer_(\d{1,4})/")


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable; ``value`` is that of a small integer, None for weights."""

    dims: tuple[int, ...]
    type_name: str
    size_bytes: int
    value: int | None


@dataclass(frozen=True, slots=True)
class Ct2Model:
    """What is in a ``model.bin``."""

    path: Path
    spec: str
    variables: dict[str, Variable]


def read_ct2(path: Path) -> Ct2Model:
    """Read a ``model.bin``. Raises CorruptModel (a PyTorch file of the same name is told apart), OSError."""
    with path.open("rb", buffering=0) as file:
        cursor = HeaderCursor(path, file, path.stat().st_size, chunk_bytes=limits().models.ct2_chunk_bytes)
        version = cursor.unsigned(4)
        if not 4 <= version <= 6:
            raise cursor.fail("it is no CTranslate2 model of binary version 4 to 6 (weights of PyTorch are not loaded)")
        spec = _name(cursor)
        cursor.unsigned(4)
        count = cursor.unsigned(4)
        if count > limits().models.tensors:
            raise cursor.fail(f"it claims {count} variables")
        variables = dict(_read_variable(cursor) for _ in range(count))
        return Ct2Model(path, spec, variables)


def shape_ct2(model: Ct2Model) -> ModelShape:
    """Return the shape of the model. Raises CorruptModel when its variables do not make a decoder that can be measured."""
    is_whisper = model.spec == "WhisperSpec"
    numbers = {int(match[1]) for name in model.variables if (match := _LAYER.match(name))}
    layers = max(numbers) + 1 if numbers else 0
    if layers > limits().models.layers:
        raise corrupt(model.path, f"it claims {layers} layers")
    heads = _small(model, "decoder/num_heads") or 0
    # What belongs to a quantisation (scales) or is a setting (no dimensions) is no parameter of the network.
    weights = [variable for name, variable in model.variables.items() if variable.dims and not name.endswith("_scale")]
    return ModelShape(
        format="whisper" if is_whisper else "ctranslate2",
        architecture=model.spec,
        weights_bytes=sum(variable.size_bytes for variable in model.variables.values()),
        parameter_count=sum(prod(variable.dims) for variable in weights),
        layers=layers,
        heads=heads,
        kv_layers=_kv_layers(model, layers, heads, is_whisper=is_whisper) if layers and heads else (),
        context_max=448 if is_whisper else None,
        quantization=_quantization(weights),
        vocab=_vocab(model),
    )


def _name(cursor: HeaderCursor) -> str:
    length = cursor.unsigned(2)
    if not 1 <= length <= limits().models.ct2_name_bytes:
        raise cursor.fail(f"a name in it is {length} bytes long")
    return cursor.text(length).rstrip("\0")


def _read_variable(cursor: HeaderCursor) -> tuple[str, Variable]:
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
    return name, Variable(dims, type_name, exact, value)


def _small(model: Ct2Model, name: str) -> int | None:
    variable = model.variables.get(name)
    value = variable.value if variable is not None else None
    return value if value is not None and 0 <= value <= 1 << 15 else None


def _kv_layers(model: Ct2Model, layers: int, heads: int, *, is_whisper: bool) -> tuple[KvLayer, ...]:
    embeddings = model.variables.get("decoder/embeddings/weight")
    if embeddings is None or len(embeddings.dims) != 2:
        raise corrupt(model.path, "it has no decoder/embeddings/weight")

    def stated(layer: int, name: str) -> int | None:
        # Equal values of later layers may be written once, under the name of the first.
        path = f"self_attention/{name}"
        return _small(model, f"decoder/layer_{layer}/{path}") or _small(model, f"decoder/layer_0/{path}")

    even = embeddings.dims[1] // heads
    found: list[KvLayer] = []
    for layer in range(layers):
        width = stated(layer, "head_dim") or even
        found.append(KvLayer(stated(layer, "num_heads_kv") or heads, width, width, stated(layer, "sliding_window")))
    if is_whisper:
        found += [KvLayer(heads, even, even, fixed_tokens=1500)] * layers
    return tuple(found)


def _quantization(weights: list[Variable]) -> str | None:
    sizes: Counter[str] = Counter()
    for variable in weights:
        sizes[variable.type_name] += variable.size_bytes
    return sizes.most_common(1)[0][0] if sizes else None


def _vocab(model: Ct2Model) -> int | None:
    embeddings = model.variables.get("decoder/embeddings/weight")
    return embeddings.dims[0] if embeddings is not None and embeddings.dims else None
