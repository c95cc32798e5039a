"""Turn what ``train.py`` wrote into one GGUF file that llama.cpp loads. Needs gguf, numpy and safetensors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
END_OF_TEXT, END_OF_TURN = 0, 4
QUANT = gguf.GGMLQuantizationType.Q8_0


def write_shape(writer: gguf.GGUFWriter, config: dict[str, float]) -> None:
    """Write the hyperparameters of the ``llama`` architecture."""
    writer.add_name("muster-tiny")
    writer.add_license("Training text: Python documentation, PSF-2.0; weights: Apache-2.0")
    writer.add_context_length(int(config["context"]))
    writer.add_embedding_length(int(config["width"]))
    writer.add_block_count(int(config["layers"]))
    writer.add_feed_forward_length(int(config["hidden"]))
    writer.add_head_count(int(config["heads"]))
    writer.add_head_count_kv(int(config["kv_heads"]))
    writer.add_key_length(int(config["head_dim"]))
    writer.add_value_length(int(config["head_dim"]))
    writer.add_rope_dimension_count(int(config["head_dim"]))
    writer.add_rope_freq_base(config["rope_base"])
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_vocab_size(int(config["vocab"]))
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, object]) -> None:
    """Write the byte-level BPE vocabulary, its merges and the chat template."""
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    vocab: dict[str, int] = model["vocab"]  # type: ignore[index]  # the file's shape is fixed by train.py
    specials = {entry["content"] for entry in added}  # type: ignore[attr-defined]  # same
    tokens = sorted(vocab, key=lambda text: vocab[text])
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]  # type: ignore[index]  # same
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in specials else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(END_OF_TURN)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def main() -> None:
    """Convert ``SOURCE`` (a folder) to ``TARGET`` (a file), matrices as q8_0 and norms as f32."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    args = parser.parse_args()
    writer = gguf.GGUFWriter(str(args.target), "llama")
    write_shape(writer, json.loads((args.source / "config.json").read_text(encoding="utf-8")))
    write_tokenizer(writer, json.loads((args.source / "tokenizer.json").read_text(encoding="utf-8")))
    for name, tensor in load_file(args.source / "model.safetensors").items():
        weight = tensor.astype(np.float32)
        if weight.ndim == 1:
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, QUANT), raw_dtype=QUANT)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
