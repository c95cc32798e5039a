"""Files made to hurt: whatever is in them, a shape or CorruptModel comes out, and little memory is used."""

from __future__ import annotations

import json
import struct
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import CorruptModel
from runner.fit import ModelShape, estimate, read_shape
from tests.fakes.examples import examples
from tests.fakes.model_files import LLAMA, LLAMA_TENSORS, gguf_bytes, safetensors_bytes, write_ct2

MAX_BYTES = 8 << 20
HEADER, DATA_BYTES = gguf_bytes(LLAMA, LLAMA_TENSORS)
GGUF = HEADER + bytes(DATA_BYTES)
TENSORS = safetensors_bytes({"a": ("F16", (4, 4), 32), "b": ("I8", (8,), 8)})
CONFIG = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 10,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "quantization_config": {"bits": 4},
}  # fmt: skip
edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=8)), max_size=4)
cuts = st.one_of(st.none(), st.integers(0, len(GGUF)))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def damage(content: bytes, changes: list[tuple[int, bytes]], cut: int | None) -> bytes:
    raw = bytearray(content)
    for position, data in changes:
        start = position % len(raw)
        raw[start : start + len(data)] = data
    return bytes(raw[: len(raw) if cut is None else cut % (len(raw) + 1)])


def read_anyhow(path: Path) -> ModelShape | None:
    """Return the shape, or None for a file that is refused; any other exception fails the test."""
    try:
        shape = read_shape(path)
    except CorruptModel:
        return None
    assert estimate(shape, context_tokens=4096, slots=1, overhead_bytes=0).total_bytes >= shape.weights_bytes >= 0
    return shape


@examples(60)
@given(changes=edits, cut=cuts)
def test_a_gguf_that_was_tampered_with_is_read_or_refused(
    folder: Path, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    path = folder / "m.gguf"
    raw = damage(GGUF, [(position % len(HEADER), data) for position, data in changes], cut)
    path.write_bytes(raw)
    shape = read_anyhow(path)

    assert shape is None or shape.weights_bytes <= len(raw)


@examples(60)
@given(changes=edits, cut=cuts)
def test_safetensors_that_were_tampered_with_are_read_or_refused(
    folder: Path, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    model = folder / "hf"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG))
    raw = damage(TENSORS, changes, cut)
    (model / "model.safetensors").write_bytes(raw)
    shape = read_anyhow(model)

    assert shape is None or shape.weights_bytes <= len(raw)


@examples(60)
@given(field=st.sampled_from(sorted(CONFIG)), value=values)
def test_a_configuration_with_any_value_in_a_field_is_read_or_refused(folder: Path, field: str, value: object) -> None:
    model = folder / "config"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(CONFIG | {field: value}, allow_nan=True))
    (model / "model.safetensors").write_bytes(TENSORS)

    read_anyhow(model)


@examples(60)
@given(changes=edits, cut=cuts)
def test_a_ctranslate2_model_that_was_tampered_with_is_read_or_refused(
    folder: Path, changes: list[tuple[int, bytes]], cut: int | None
) -> None:
    model = write_ct2(folder / "ct2")
    (model / "model.bin").write_bytes(damage((model / "model.bin").read_bytes(), changes, cut))

    read_anyhow(model)


HUGE = (1 << 63) - 1
START = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE),
        START + struct.pack("<Q", HUGE),
        START + KEY + struct.pack("<IQ", 8, HUGE),
        START + KEY + struct.pack("<IIQ", 9, 8, HUGE),
        START + KEY + struct.pack("<IIQ", 9, 8, 1 << 16),
        START + KEY + struct.pack("<IIQ", 9, 12, HUGE),
        START + KEY + struct.pack("<IIQ", 9, 9, HUGE),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + KEY + struct.pack("<I", 0xFFFFFFFF),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + KEY + struct.pack("<I4QIQ", 4, HUGE, HUGE, HUGE, HUGE, 0, 0),
    ],
)
def test_numbers_made_to_exhaust_memory_are_refused_cheaply(folder: Path, raw: bytes) -> None:
    path = folder / "huge.gguf"
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(1 << 33)  # a hole of 8 GiB, so that the end of the file is not what stops it
    tracemalloc.start()
    try:
        with pytest.raises(CorruptModel):
            read_shape(path)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()


def test_a_safetensors_header_made_to_exhaust_memory_is_refused_cheaply(folder: Path) -> None:
    model = folder / "large"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 1 << 32))
        file.truncate(1 << 33)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptModel, match="is larger than"):
            read_shape(model)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
