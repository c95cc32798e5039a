"""A folder of Hugging Face: the headers of its safetensors files and its ``config.json``, and the shape that they state.

Source: the format description of the safetensors library (an 8-byte length, then JSON of names, types, shapes and offsets) and
the field names of transformers. That library does not read them here, see docs/adr/0007-dependencies.md.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from runner.errors import CorruptModel
from runner.fit.memory import ModelShape
from runner.limits import limits
from wire.memory import KvLayer

INDEX_NAME = "model.safetensors.index.json"
DTYPE_BITS = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I8": 8, "U8": 8, "BOOL": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
SLIDING = {"sliding_attention", "chunked_attention", "local", "sliding"}
RECURRENT = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm", "moe", "mlp"}
ATTENTION_FREE = {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"}
ALL_SLIDE = {"mistral", "mixtral", "phi3", "starcoder2"}
WINDOW_PERIODS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "BF16": "bf16", "F16": "fp16", "F32": "fp32"}
Decoded = TypeVar("Decoded")


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


def read_folder(folder: Path) -> ModelShape:
    """Return the shape of a safetensors or EXL3 folder. Raises CorruptModel, OSError."""
    config = _Config(folder / "config.json")
    files = _weight_files(folder)
    if not files:
        raise CorruptModel.of(config.path, "no .safetensors file lies beside it")
    sizes = _sum_tensors(files)
    method, bits = _quantization_method(config)
    layers = config.required("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=limits().models.layers)
    return ModelShape(
        backend="exllamav3" if method == "exl3" else "vllm",
        weights_bytes=sizes.total(),
        layers=layers,
        kv_layers=_kv_layers(config, layers),
        context_max=config.number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", most=1 << 40),
        quantization=_quantization(config, sizes, method, bits),
    )


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        names = _read_index(index)
        # The index comes from strangers: its names must not lead out of the folder.
        for name in names:
            if "/" in name or "\\" in name or name.startswith(".") or not name.endswith(".safetensors"):
                raise CorruptModel.of(index, f"it names the file {name[:80]!r}")
            if not (folder / name).is_file():
                raise CorruptModel.of(index, f"it names {name[:80]}, which is missing")
        return [folder / name for name in names]
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    # Some publishers put the same weights there twice, once in the layout of their own library.
    return [path for path in found if not path.name.startswith("consolidated")] or found


def _read_index(path: Path) -> list[str]:
    if path.stat().st_size > limits().models.safetensors_bytes:
        raise CorruptModel.of(path, f"it is larger than {limits().models.safetensors_bytes} bytes")
    index = _decode(path, path.read_bytes(), _Index, "it is no index of tensors")
    names = sorted(set(index.weight_map.values()))
    if not 1 <= len(names) <= limits().models.files:
        raise CorruptModel.of(path, "it names no files, or too many")
    return names


def _sum_tensors(files: list[Path]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for path in files[: limits().models.files]:
        header, available = _read_header(path)
        total = 0
        for name, raw in header.items():
            if name == "__metadata__":
                continue
            tensor = _decode(path, raw, _Tensor, f"the entry of the tensor {name[:80]!r} cannot be read")
            size = _measure(path, name, tensor, available)
            total += size
            sizes[tensor.dtype] += size
        if total > available:
            raise CorruptModel.of(path, "its tensors lie on top of each other")
    return sizes


def _read_header(path: Path) -> tuple[dict[str, msgspec.Raw], int]:
    size, most = path.stat().st_size, limits().models.safetensors_bytes
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CorruptModel.of(path, f"it has {size} bytes, and its header alone should have {length}")
        if length > most:
            raise CorruptModel.of(path, f"its header of {length} bytes is larger than {most}")
        raw = file.read(length)
    return _decode(path, raw, dict[str, msgspec.Raw], "its header cannot be read"), size - 8 - length


def _decode(path: Path, data: bytes | msgspec.Raw, kind: type[Decoded], otherwise: str) -> Decoded:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise CorruptModel.of(path, f"{otherwise} ({str(error)[:100]})") from None


def _measure(path: Path, name: str, tensor: _Tensor, available: int) -> int:
    begin, end = tensor.data_offsets
    if not 0 <= begin <= end or min(tensor.shape, default=0) < 0 or len(tensor.shape) > 16:
        raise CorruptModel.of(path, f"the tensor {name[:80]!r} has impossible dimensions or offsets")
    if end > available:
        raise CorruptModel.of(path, f"the tensor {name[:80]!r} ends {end - available} bytes behind the end of the file")
    bits = DTYPE_BITS.get(tensor.dtype)
    # A type that is newer than this program is taken at its word.
    if bits is not None and -(-prod(tensor.shape) * bits // 8) != end - begin:
        raise CorruptModel.of(path, f"the tensor {name[:80]!r} has {end - begin} bytes, which do not fit its dimensions")
    return end - begin


class _Config:
    """Typed and bounded access to a ``config.json``; the text part of a model that also sees or hears."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.whole = _read_object(path)
        inner = self.whole.get("text_config") or self.whole.get("llm_config") or self.whole.get("language_config")
        self.fields: dict[str, Any] = inner if isinstance(inner, dict) else self.whole  # Any: values of JSON

    def number(self, *names: str, most: int | None = None) -> int | None:
        """Return the first of these fields that is set. Raises CorruptModel when it is no number in bounds."""
        most = limits().models.width if most is None else most
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise CorruptModel.of(self.path, f"{name} is {str(value)[:40]!r}")
            return value
        return None

    def required(self, *names: str, most: int | None = None) -> int:
        value = self.number(*names, most=most)
        if value is None:
            raise CorruptModel.of(self.path, f"it has no {names[0]}")
        return value


def _read_object(path: Path) -> dict[str, Any]:
    if path.stat().st_size > limits().models.config_bytes:
        raise CorruptModel.of(path, f"it is larger than {limits().models.config_bytes} bytes")
    fields = _decode(path, path.read_bytes(), object, "it is no JSON")
    if not isinstance(fields, dict):
        raise CorruptModel.of(path, "it is no JSON object")
    return fields


def _quantization_method(config: _Config) -> tuple[str | None, int | None]:
    section = config.whole.get("quantization_config") or config.fields.get("quantization_config")
    if not isinstance(section, dict):
        return None, None
    method, bits = section.get("quant_method"), section.get("bits")
    if bits is None and section.get("load_in_4bit") is True:
        bits = 4
    if bits is None and section.get("load_in_8bit") is True:
        bits = 8
    # EXL3 states averages such as 4.25 bits.
    usable = isinstance(bits, int) and not isinstance(bits, bool) and 0 < bits <= 64
    return (method[:40] if isinstance(method, str) else None), (bits if usable else None)


def _quantization(config: _Config, sizes: Counter[str], method: str | None, bits: int | None) -> str | None:
    if method is not None:
        return f"{method}-{bits}bit" if bits is not None else method
    stated = config.whole.get("dtype") or config.whole.get("torch_dtype") or config.fields.get("dtype")
    stored = sizes.most_common(1)
    word = stored[0][0] if stored else stated
    return _DTYPES.get(word, word.lower()) if isinstance(word, str) else None


def _kv_layers(config: _Config, layers: int) -> tuple[KvLayer, ...]:
    kinds = _layer_kinds(config, layers)
    rank = config.number("kv_lora_rank")
    if rank is not None:
        latent = KvLayer(1, rank + (config.number("qk_rope_head_dim") or 0), 0)
        return tuple(latent for kind in kinds if kind != "none")
    if all(kind == "none" for kind in kinds):
        return ()
    heads = config.required("num_attention_heads", "n_head", "n_heads")
    if heads == 0:
        raise CorruptModel.of(config.path, "num_attention_heads is 0")
    width = config.number("head_dim", "kv_channels") or config.required("hidden_size", "n_embd", "d_model") // heads
    value_width = config.number("v_head_dim") or width
    kv_heads = _kv_heads(config, heads, layers)
    wide = config.number("global_head_dim")
    wide_heads = config.number("num_global_key_value_heads")
    window = config.number("sliding_window", "attention_chunk_size", most=1 << 40)
    found: list[KvLayer] = []
    for layer, kind in enumerate(kinds):
        if kind == "sliding":
            found.append(KvLayer(kv_heads[layer], width, value_width, window))
        elif kind == "full":
            found.append(KvLayer(wide_heads or kv_heads[layer], wide or width, wide or value_width))
    return tuple(layer for layer in found if layer.kv_heads)


def _kv_heads(config: _Config, heads: int, layers: int) -> list[int]:
    listed = config.fields.get("num_kv_heads") or config.fields.get("num_key_value_heads")
    if isinstance(listed, list):
        if len(listed) < layers or not all(isinstance(item, int) and 0 <= item <= limits().models.width for item in listed):
            raise CorruptModel.of(config.path, "its list of key-value heads does not fit its layers")
        return listed[:layers]
    if config.fields.get("multi_query") is True and config.fields.get("new_decoder_architecture") is not True:
        return [1] * layers
    kv_heads = config.number("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    return [heads if kv_heads is None else kv_heads] * layers


def _layer_kinds(config: _Config, layers: int) -> list[str]:
    """Return ``full``, ``sliding`` or ``none`` for each layer."""
    model_type = str(config.fields.get("model_type") or config.whole.get("model_type") or "")
    # What follows takes a layer it does not know as one that sees everything: rather too much memory than too little.
    if model_type in ATTENTION_FREE:
        return ["none"] * layers
    kinds = _stated_kinds(config, layers) or _hybrid_kinds(config, layers) or _sliding_kinds(config, layers, model_type)
    shared = config.number("num_kv_shared_layers", most=layers) or 0
    has_window = bool(config.number("sliding_window", "attention_chunk_size", most=1 << 40))
    kinds = ["full" if kind == "sliding" and not has_window else kind for kind in kinds]
    return kinds[: layers - shared] + ["none"] * shared


def _stated_kinds(config: _Config, layers: int) -> list[str] | None:
    lists = [config.fields.get(name) for name in ("layer_types", "layers_block_type", "block_types")]
    most = limits().models.layers
    texts = (entry for entry in lists if isinstance(entry, list) and entry and all(isinstance(item, str) for item in entry))
    stated = next((entry[:most] for entry in texts), None)
    if stated is None:
        pattern = config.fields.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern:
            return None
        stated = ["attention" if letter == "*" else "mamba" for letter in pattern[:most]]
    kinds = ["sliding" if kind in SLIDING else "none" if kind in RECURRENT else "full" for kind in stated]
    return [kinds[layer % len(kinds)] for layer in range(layers)]


def _hybrid_kinds(config: _Config, layers: int) -> list[str] | None:
    interval = config.number("full_attention_interval")
    if interval:
        return ["full" if (layer + 1) % interval == 0 else "none" for layer in range(layers)]
    period = config.number("attn_layer_period")
    if period:
        offset = config.number("attn_layer_offset") or 0
        return ["full" if layer % period == offset else "none" for layer in range(layers)]
    return None


def _sliding_kinds(config: _Config, layers: int, model_type: str) -> list[str]:
    if not config.number("sliding_window", most=1 << 40) or config.fields.get("use_sliding_window") is False:
        return ["full"] * layers
    if config.fields.get("use_sliding_window") is True:
        first = config.number("max_window_layers") or 0
        return ["sliding" if layer >= first else "full" for layer in range(layers)]
    period = config.number("sliding_window_pattern") or WINDOW_PERIODS.get(model_type)
    if period:
        return ["sliding" if (layer + 1) % period else "full" for layer in range(layers)]
    return ["sliding" if model_type in ALL_SLIDE else "full"] * layers
