"""From the ``config.json`` of a Hugging Face folder to the shape of the model. Field names as in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from runner.fit.cursor import corrupt
from runner.fit.safetensors import TensorSums, sum_tensors, weight_files
from runner.fit.shape import KvLayer, ModelShape
from runner.limits import limits

SLIDING = {"sliding_attention", "chunked_attention", "local", "sliding"}
ATTENDING = {"full_attention", "attention", "global", "hybrid"} | SLIDING
RECURRENT = {"linear_attention", "mamba", "mamba2", "conv", "recurrent", "ssm", "moe", "mlp"}
ATTENTION_FREE = {"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"}
ALL_SLIDE = {"mistral", "mixtral", "phi3", "starcoder2"}
WINDOW_PERIODS = {"gemma2": 2, "gemma3_text": 6, "gemma3": 6, "cohere2": 4, "gpt_oss": 2}
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "BF16": "bf16", "F16": "fp16", "F32": "fp32"}


class Config:
    """Typed and bounded access to a configuration; the text part of a model that also sees or hears."""

    def __init__(self, path: Path, fields: dict[str, Any]) -> None:
        self.path = path
        self.whole = fields
        inner = fields.get("text_config") or fields.get("llm_config") or fields.get("language_config")
        self.fields: dict[str, Any] = inner if isinstance(inner, dict) else fields

    def number(self, *names: str, most: int | None = None) -> int | None:
        """Return the first of these fields that is set. Raises CorruptModel when it is no number in bounds."""
        most = limits().models.width if most is None else most
        for name in names:
            value = self.fields.get(name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
                raise corrupt(self.path, f"{name} is {str(value)[:40]!r}")
            return value
        return None

    def required(self, *names: str, most: int | None = None) -> int:
        """Return the first of these fields; one of them must be set."""
        value = self.number(*names, most=most)
        if value is None:
            raise corrupt(self.path, f"it has no {names[0]}")
        return value

    def words(self, *names: str) -> list[str] | None:
        """Return the first of these fields that is a list of words."""
        for name in names:
            value = self.fields.get(name)
            if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
                return value[: limits().models.layers]
        return None


def read_config(path: Path) -> dict[str, Any]:
    """Return a JSON object from a file. Raises CorruptModel, OSError."""
    if path.stat().st_size > limits().models.config_bytes:
        raise corrupt(path, f"it is larger than {limits().models.config_bytes} bytes")
    try:
        fields = msgspec.json.decode(path.read_bytes())
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise corrupt(path, f"it is no JSON ({str(error)[:100]})") from None
    if not isinstance(fields, dict):
        raise corrupt(path, "it is no JSON object")
    return fields


def shape_folder(folder: Path) -> ModelShape:
    """Return the shape of a safetensors or EXL3 folder. Raises CorruptModel, OSError."""
    config = Config(folder / "config.json", read_config(folder / "config.json"))
    files = weight_files(folder)
    if not files:
        raise corrupt(config.path, "no .safetensors file lies beside it")
    sums = sum_tensors(files)
    method, bits = _quantization_method(config)
    layers = config.required("num_hidden_layers", "n_layer", "n_layers", "num_layers", most=limits().models.layers)
    packing = 32 // bits if bits and 0 < bits <= 16 else 1
    return ModelShape(
        format="exl3" if method == "exl3" else "safetensors",
        architecture=_architecture(config),
        weights_bytes=sums.size_bytes,
        parameter_count=sums.elements + sums.packed_words * (packing - 1),
        layers=layers,
        heads=config.number("num_attention_heads", "n_head", "n_heads") or 0,
        kv_layers=_kv_layers(config, layers),
        context_max=config.number("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", most=1 << 40),
        quantization=_quantization(config, sums, method, bits),
        vocab=config.number("vocab_size"),
        latent_rank=config.number("kv_lora_rank"),
    )


def _architecture(config: Config) -> str:
    named = config.whole.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        return named[0][:200]
    return str(config.whole.get("model_type") or "unknown")[:200]


def _quantization_method(config: Config) -> tuple[str | None, int | None]:
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


def _quantization(config: Config, sums: TensorSums, method: str | None, bits: int | None) -> str | None:
    if method is not None:
        return f"{method}-{bits}bit" if bits is not None else method
    stated = config.whole.get("dtype") or config.whole.get("torch_dtype") or config.fields.get("dtype")
    stored = sums.bytes_by_type.most_common(1)
    word = stored[0][0] if stored else stated
    return _DTYPES.get(word, word.lower()) if isinstance(word, str) else None


def _kv_layers(config: Config, layers: int) -> tuple[KvLayer, ...]:
    kinds = layer_kinds(config, layers)
    rank = config.number("kv_lora_rank")
    if rank is not None:
        latent = KvLayer(1, rank + (config.number("qk_rope_head_dim") or 0), 0)
        return tuple(latent for kind in kinds if kind != "none")
    if all(kind == "none" for kind in kinds):
        return ()
    heads = config.required("num_attention_heads", "n_head", "n_heads")
    if heads == 0:
        raise corrupt(config.path, "num_attention_heads is 0")
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


def _kv_heads(config: Config, heads: int, layers: int) -> list[int]:
    listed = config.fields.get("num_kv_heads") or config.fields.get("num_key_value_heads")
    if isinstance(listed, list):
        if len(listed) < layers or not all(isinstance(item, int) and 0 <= item <= limits().models.width for item in listed):
            raise corrupt(config.path, "its list of key-value heads does not fit its layers")
        return listed[:layers]
    if config.fields.get("multi_query") is True and config.fields.get("new_decoder_architecture") is not True:
        return [1] * layers
    kv_heads = config.number("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
    return [heads if kv_heads is None else kv_heads] * layers


def layer_kinds(config: Config, layers: int) -> list[str]:
    """Return ``full``, ``sliding`` or ``none`` for each layer. What it does not know counts in full: rather too much."""
    model_type = str(config.fields.get("model_type") or config.whole.get("model_type") or "")
    if model_type in ATTENTION_FREE:
        return ["none"] * layers
    kinds = _stated_kinds(config, layers) or _hybrid_kinds(config, layers) or _sliding_kinds(config, layers, model_type)
    shared = config.number("num_kv_shared_layers", most=layers) or 0
    has_window = bool(config.number("sliding_window", "attention_chunk_size", most=1 << 40))
    kinds = ["full" if kind == "sliding" and not has_window else kind for kind in kinds]
    return kinds[: layers - shared] + ["none"] * shared


def _stated_kinds(config: Config, layers: int) -> list[str] | None:
    stated = config.words("layer_types", "layers_block_type", "block_types")
    if stated is None:
        pattern = config.fields.get("hybrid_override_pattern")
        if not isinstance(pattern, str) or not pattern:
            return None
        stated = ["attention" if letter == "*" else "mamba" for letter in pattern[: limits().models.layers]]
    kinds = ["sliding" if kind in SLIDING else "none" if kind in RECURRENT else "full" for kind in stated]
    return [kinds[layer % len(kinds)] for layer in range(layers)]


def _hybrid_kinds(config: Config, layers: int) -> list[str] | None:
    interval = config.number("full_attention_interval")
    if interval:
        return ["full" if (layer + 1) % interval == 0 else "none" for layer in range(layers)]
    period = config.number("attn_layer_period")
    if period:
        offset = config.number("attn_layer_offset") or 0
        return ["full" if layer % period == offset else "none" for layer in range(layers)]
    return None


def _sliding_kinds(config: Config, layers: int, model_type: str) -> list[str]:
    if not config.number("sliding_window", most=1 << 40) or config.fields.get("use_sliding_window") is False:
        return ["full"] * layers
    if config.fields.get("use_sliding_window") is True:
        first = config.number("max_window_layers") or 0
        return ["sliding" if layer >= first else "full" for layer in range(layers)]
    period = config.number("sliding_window_pattern") or WINDOW_PERIODS.get(model_type)
    if period:
        return ["sliding" if (layer + 1) % period else "full" for layer in range(layers)]
    return ["sliding" if model_type in ALL_SLIDE else "full"] * layers
