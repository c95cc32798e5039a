"""The shipped chat model as a Hugging Face folder, a CTranslate2 folder and a LoRA adapter for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from tests.fakes.models.gguf_file import Floats, GgufFile, read_gguf
from tests.fakes.models.safetensors_file import write_safetensors

ROOT = Path(__file__).resolve().parents[3]
GGUF = ROOT / "runner" / "tiny" / "muster-tiny-q8_0.gguf"
CONTROL_TOKEN = 3
LORA_RANK = 8
_PARTS = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def hf_tensors(gguf: GgufFile) -> dict[str, Floats]:
    """Return the weights under the names of LlamaForCausalLM.

    GGUF keeps the two channels of a rotary pair side by side, Hugging Face half a head apart: Q and K are permuted back.
    """
    heads = {"attn_q": gguf.get("llama.attention.head_count", int), "attn_k": gguf.get("llama.attention.head_count_kv", int)}
    found = {
        "model.embed_tokens.weight": gguf.tensors["token_embd.weight"],
        "model.norm.weight": gguf.tensors["output_norm.weight"],
    }
    for name, tensor in gguf.tensors.items():
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            continue
        layer, part = match.groups()
        if part in heads:
            rows, columns = tensor.shape
            pairs = tensor.reshape(heads[part], rows // heads[part] // 2, 2, columns)
            found[f"model.layers.{layer}.{_PARTS[part]}.weight"] = pairs.swapaxes(1, 2).reshape(rows, columns)
            continue
        found[f"model.layers.{layer}.{_PARTS[part]}.weight"] = tensor
    return found


def hf_config(gguf: GgufFile) -> dict[str, object]:
    """Return ``config.json`` of LlamaForCausalLM."""
    base = gguf.get("llama.rope.freq_base", float)
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "dtype": "bfloat16", "torch_dtype": "bfloat16", "use_cache": True,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
        "hidden_size": gguf.get("llama.embedding_length", int),
        "intermediate_size": gguf.get("llama.feed_forward_length", int),
        "num_hidden_layers": gguf.get("llama.block_count", int),
        "num_attention_heads": gguf.get("llama.attention.head_count", int),
        "num_key_value_heads": gguf.get("llama.attention.head_count_kv", int),
        "head_dim": gguf.get("llama.attention.key_length", int),
        "max_position_embeddings": gguf.get("llama.context_length", int),
        "rms_norm_eps": gguf.get("llama.attention.layer_norm_rms_epsilon", float),
        "rope_theta": base, "rope_parameters": {"rope_theta": base, "rope_type": "default"},
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id", int),
        "eos_token_id": gguf.get("tokenizer.ggml.eos_token_id", int),
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id", int),
    }  # fmt: skip


def write_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` with the chat template."""
    tokens, kinds = gguf.get("tokenizer.ggml.tokens", list), gguf.get("tokenizer.ggml.token_type", list)
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in gguf.get("tokenizer.ggml.merges", list)],
    }  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [
            {"id": number, "content": token, **special}
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True)) if kind == CONTROL_TOKEN
        ],
        "pre_tokenizer": byte_level, "decoder": byte_level, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "bos_token": tokens[gguf.get("tokenizer.ggml.bos_token_id", int)],
        "eos_token": tokens[gguf.get("tokenizer.ggml.eos_token_id", int)],
        "pad_token": tokens[gguf.get("tokenizer.ggml.padding_token_id", int)],
        "model_max_length": gguf.get("llama.context_length", int),
        "chat_template": gguf.get("tokenizer.chat_template", str),
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def write_hf_model(folder: Path) -> None:
    """Write the model as Hugging Face has it: bf16 safetensors, configuration, tokenizer."""
    gguf = read_gguf(GGUF)
    write_safetensors(folder / "model.safetensors", hf_tensors(gguf), dtype="BF16")
    config = hf_config(gguf)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    write_tokenizer(gguf, folder)


def write_lora(folder: Path) -> None:
    """Write a PEFT adapter with small random weights for the query, value and output projections."""
    tensors: dict[str, Floats] = {}
    random = np.random.default_rng(8)
    targets = ("q_proj", "v_proj", "o_proj")
    for name, tensor in hf_tensors(read_gguf(GGUF)).items():
        if name.split(".")[-2] in targets:
            rows, columns = tensor.shape
            stem = "base_model.model." + name.removesuffix(".weight")
            tensors[f"{stem}.lora_A.weight"] = random.normal(0, 0.05, (LORA_RANK, columns)).astype(np.float32)
            tensors[f"{stem}.lora_B.weight"] = random.normal(0, 0.05, (rows, LORA_RANK)).astype(np.float32)
    write_safetensors(folder / "adapter_model.safetensors", tensors, dtype="F32")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "muster-tiny", "inference_mode": True,
        "r": LORA_RANK, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False,
        "target_modules": list(targets), "modules_to_save": None, "use_rslora": False, "use_dora": False,
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_ct2_model(folder: Path, *, quantization: str) -> None:
    """Write the model as CTranslate2's converter would, which itself needs torch. ``quantization``: int8, float32, …"""
    from ctranslate2 import specs
    from ctranslate2.specs import common_spec, transformer_spec

    gguf = read_gguf(GGUF)
    weights, config = hf_tensors(gguf), hf_config(gguf)
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"], config["num_attention_heads"], activation=common_spec.Activation.SWISH, pre_norm=True,
        ffn_glu=True, rms_norm=True, rotary_dim=0, rotary_interleave=False, rotary_base=config["rope_theta"],
        num_heads_kv=config["num_key_value_heads"], head_dim=config["head_dim"],
    )  # fmt: skip
    assert isinstance(spec, specs.TransformerDecoderModelSpec)
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = decoder.projection.weight = weights["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = weights["model.norm.weight"]
    for number, layer in enumerate(decoder.layer):
        part = {name: weights[f"model.layers.{number}.{name}.weight"] for name in _PARTS.values()}
        layer.self_attention.layer_norm.gamma = part["input_layernorm"]
        layer.self_attention.linear[0].weight = np.concatenate([part[f"self_attn.{which}_proj"] for which in "qkv"])
        layer.self_attention.linear[1].weight = part["self_attn.o_proj"]
        layer.ffn.layer_norm.gamma = part["post_attention_layernorm"]
        layer.ffn.linear_0.weight = part["mlp.gate_proj"]
        layer.ffn.linear_0_noact.weight = part["mlp.up_proj"]
        layer.ffn.linear_1.weight = part["mlp.down_proj"]
    tokens = gguf.get("tokenizer.ggml.tokens", list)
    spec.register_vocabulary(tokens)
    spec.config.bos_token = tokens[gguf.get("tokenizer.ggml.bos_token_id", int)]
    spec.config.eos_token = tokens[gguf.get("tokenizer.ggml.eos_token_id", int)]
    spec.config.unk_token = ""
    spec.config.layer_norm_epsilon = config["rms_norm_eps"]
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    write_tokenizer(gguf, folder)
