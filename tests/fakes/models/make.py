"""Where the tiny models lie: each is made once per machine, in a folder under the system's temporary one.

A folder is written under another name and then renamed, so that two test processes may make the same one at the same time.
``python -m tests.fakes.models.make`` makes them all and prints where they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
import wave
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar  # Any: parts of a CTranslate2 model

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

_SOURCES = sorted(Path(__file__).parent.glob("*.py"))


def hf_model_dir() -> Path:
    """The chat model as a Hugging Face folder: bf16 safetensors, config.json, tokenizer.json, tokenizer_config.json."""
    return _made("muster-tiny-hf", write_hf_model)


def ct2_model_dir() -> Path:
    return _made("muster-tiny-ct2", write_ct2_model)


def lora_dir() -> Path:
    """A rank-8 PEFT adapter for the Hugging Face model; its weights are random and small."""
    return _made("muster-tiny-lora", write_lora)


def whisper_dir(*, multilingual: bool = True) -> Path:
    """A Whisper model for CTranslate2 that says the same words whatever it hears; without languages it is English only."""
    name = "tiny-whisper-ct2" if multilingual else "tiny-whisper-en-ct2"
    return _made(name, lambda to: write_whisper(to, multilingual=multilingual))


def speech_wav() -> Path:
    """A few seconds of 16 kHz mono: bursts of tones like a voice, with pauses between."""
    return _made("speech", lambda to: write_speech(to / "wav")) / "wav"


@cache
def _home() -> Path:
    """The folder of this state of the sources; another state makes its own."""
    digest = hashlib.sha256(version("ctranslate2").encode())
    for path in [*_SOURCES, GGUF]:
        digest.update(path.read_bytes())
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(tempfile.gettempdir()) / f"muster-models-{user}-{digest.hexdigest()[:16]}"


def _made(name: str, write: Callable[[Path], None]) -> Path:
    _home().mkdir(mode=0o700, exist_ok=True)  # each time: temporary folders are cleared now and then
    target = _home() / name
    if target.is_dir():
        return target
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=_home()))
    try:
        write(draft)
        draft.chmod(0o755)
        try:
            draft.rename(target)
        except OSError:  # another process was faster
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return target


if __name__ == "__main__":
    for made in (hf_model_dir(), ct2_model_dir(), lora_dir(), whisper_dir(), whisper_dir(multilingual=False), speech_wav()):
        print(made)


T = TypeVar("T")
Floats = NDArray[np.float32]
Value = int | float | bool | str | list["Value"]

MAGIC = b"GGUF"
F32, F16, Q8_0 = 0, 1, 8
_NUMBERS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufFile:
    """``metadata`` by key; ``tensors`` by name, rows first."""

    metadata: dict[str, Value]
    tensors: dict[str, Floats]

    def get(self, key: str, kind: type[T]) -> T:
        """Return a value of the metadata. Raises AssertionError when it is of another type."""
        value = self.metadata[key]
        assert isinstance(value, kind)
        return value


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, layout: str) -> int | float | bool:
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        assert isinstance(value, int | float)
        return value

    def count(self, layout: str = "<Q") -> int:
        return int(self.take(layout))

    def string(self) -> str:
        length = self.count()
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Value:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            inner, length = self.count("<I"), self.count()
            return [self.value(inner) for _ in range(length)]
        return self.take(_NUMBERS[kind])


def read_gguf(path: Path) -> GgufFile:
    """Read the whole file; raises AssertionError when it is not one, KeyError for a type that is not read here."""
    cursor = _Cursor(path.read_bytes())
    cursor.at = 4
    assert cursor.data[:4] == MAGIC, f"{path} is not a GGUF file"
    assert cursor.count("<I") == 3
    tensor_count, value_count = cursor.count(), cursor.count()
    metadata: dict[str, Value] = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.count("<I"))
    entries = []
    for _ in range(tensor_count):
        name = cursor.string()
        shape = [cursor.count() for _ in range(cursor.count("<I"))]
        entries.append((name, shape[::-1], cursor.count("<I"), cursor.count()))
    alignment = metadata.get("general.alignment", 32)
    assert isinstance(alignment, int)
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _decode(cursor.data, start + offset, kind, shape) for name, shape, kind, offset in entries}
    return GgufFile(metadata, tensors)


def _decode(data: bytes, at: int, kind: int, shape: list[int]) -> Floats:
    count = int(np.prod(shape))
    if kind == F32:
        return np.frombuffer(data, np.float32, count, at).reshape(shape).copy()
    if kind == F16:
        return np.frombuffer(data, np.float16, count, at).reshape(shape).astype(np.float32)
    # q8_0: blocks of 32 weights, one float16 scale and 32 signed bytes each.
    block = {F32: None, F16: None, Q8_0: np.dtype([("scale", np.float16), ("weights", np.int8, 32)])}[kind]
    blocks = np.frombuffer(data, block, count // 32, at)
    values: Floats = blocks["scale"].astype(np.float32)[:, None] * blocks["weights"].astype(np.float32)
    return values.reshape(shape)


def write_safetensors(path: Path, tensors: dict[str, Floats], *, dtype: str) -> None:
    """Write ``tensors``; ``dtype`` is BF16 (rounded to nearest even) or F32."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, tensor in tensors.items():
        data = _bfloat16(tensor) if dtype == "BF16" else np.ascontiguousarray(tensor, np.float32).tobytes()
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(struct.pack("<Q", len(head)) + head + body)


def _bfloat16(tensor: Floats) -> bytes:
    bits = np.ascontiguousarray(tensor, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


RATE = 16_000
PHRASES_S = ((0.6, 1.4), (5.0, 1.2), (9.4, 1.0))
"""Start and length of each phrase, in seconds."""
TOTAL_S = 12.0


def write_speech(path: Path) -> None:
    sound: Floats = np.zeros(int(TOTAL_S * RATE), np.float32)
    for start_s, length_s in PHRASES_S:
        at, count = int(start_s * RATE), int(length_s * RATE)
        sound[at : at + count] = _phrase(count)
    noise = np.random.default_rng(5).normal(0, 0.0005, sound.size)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((np.clip(sound + noise, -1, 1) * 32767).astype("<i2").tobytes())


def _phrase(count: int) -> Floats:
    """Return vowels: a glottal pitch near 130 Hz, its harmonics shaped by two moving formants, four syllables a second."""
    seconds = np.arange(count) / RATE
    pitch = 130 + 18 * np.sin(2 * np.pi * 0.9 * seconds) + 6 * np.sin(2 * np.pi * 5.0 * seconds)
    phase = 2 * np.pi * np.cumsum(pitch) / RATE
    first = 550 + 200 * np.sin(2 * np.pi * 2.0 * seconds)
    second = 1500 + 500 * np.sin(2 * np.pi * 1.3 * seconds + 1.0)
    voice = np.zeros(count)
    for harmonic in range(1, 28):
        frequency = harmonic * pitch
        gain = sum(np.exp(-(((frequency - formant) / width) ** 2)) for formant, width in ((first, 130), (second, 220)))
        voice += (gain + 0.05) / harmonic**0.5 * np.sin(harmonic * phase)
    syllables = np.clip(np.sin(2 * np.pi * 4.0 * seconds) + 0.6, 0, 1)
    edges = np.minimum(1, np.minimum(seconds, seconds[::-1]) / 0.03)
    result: Floats = (0.35 * voice / np.abs(voice).max() * syllables * edges).astype(np.float32)
    return result


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


def write_llama_tokenizer(gguf: GgufFile, folder: Path) -> None:
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
    gguf = read_gguf(GGUF)
    write_safetensors(folder / "model.safetensors", hf_tensors(gguf), dtype="BF16")
    config = hf_config(gguf)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    write_llama_tokenizer(gguf, folder)


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


def write_ct2_model(folder: Path) -> None:
    """Write the model as CTranslate2's converter would, which itself needs torch."""
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
    spec.optimize(quantization="int8")
    spec.save(str(folder))
    write_llama_tokenizer(gguf, folder)


WIDTH, HEADS, LAYERS, HIDDEN, MELS = 64, 2, 2, 128, 80
AUDIO_POSITIONS, TEXT_POSITIONS = 1500, 448
VOCABULARY = 600
UNUSED = "unused"
WORDS = (" the", " box", " dials", " out", " and", " serves", " a", " model")
SECONDS_PER_SEGMENT = 1.2


def write_whisper(folder: Path, *, multilingual: bool) -> None:
    from ctranslate2.specs import whisper_spec

    tokens = _write_tokenizer(folder / "tokenizer.json", multilingual=multilingual)
    numbers = {token: number for number, token in enumerate(tokens)}
    spec = whisper_spec.WhisperSpec(LAYERS, HEADS, LAYERS, HEADS)
    random = np.random.default_rng(3)
    _fill_encoder(spec.encoder, random)
    _fill_decoder(spec.decoder, random, _script(numbers, multilingual=multilingual), len(tokens))
    # CTranslate2 takes a model for multilingual when its vocabulary has the empty token, as Whisper's has before the specials.
    spec.register_vocabulary(["" if multilingual and token == UNUSED else token for token in tokens])
    spec.config.suppress_ids = []
    spec.config.suppress_ids_begin = []
    spec.config.lang_ids = [numbers[f"<|{code}|>"] for code in _languages()] if multilingual else []
    spec.config.alignment_heads = [[1, 0], [1, 1]]
    spec.validate()
    spec.optimize(quantization="int8")
    spec.save(str(folder))
    extractor = {
        "feature_extractor_type": "WhisperFeatureExtractor", "feature_size": MELS, "sampling_rate": 16_000, "hop_length": 160,
        "chunk_length": 30, "n_fft": 400, "n_samples": 480_000, "nb_max_frames": 3000, "padding_value": 0.0,
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor), encoding="utf-8")


def _languages() -> list[str]:
    from faster_whisper.tokenizer import _LANGUAGE_CODES

    return list(_LANGUAGE_CODES)


def _write_tokenizer(path: Path, *, multilingual: bool) -> list[str]:
    """Write a byte-level BPE tokenizer made of the project's own pages; return its tokens in order."""
    texts = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").rglob("*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*texts, "".join(WORDS) * 20_000], trainer)
    languages = [f"<|{code}|>" for code in _languages()] if multilingual else []
    tasks = ["<|translate|>", "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    tokenizer.add_tokens([UNUSED])
    tokenizer.add_special_tokens(["<|endoftext|>", "<|startoftranscript|>", *languages, *tasks])
    tokenizer.add_tokens([AddedToken(f"<|{number * 0.02:.2f}|>", special=False) for number in range(1501)])
    tokenizer.save(str(path))
    vocabulary = tokenizer.get_vocab()
    return sorted(vocabulary, key=lambda token: vocabulary[token])


def _script(numbers: dict[str, int], *, multilingual: bool) -> list[int]:
    """Return what is to be said after each position: phrases between timestamps, then the end."""
    opening = 3 if multilingual else 1  # start, language, task
    said: list[int] = [numbers["<|endoftext|>"]] * (opening - 1)
    for segment in range(3):
        start, end = segment * SECONDS_PER_SEGMENT, (segment + 1) * SECONDS_PER_SEGMENT
        words = [numbers[word.replace(" ", "Ġ")] for word in WORDS]
        said += [numbers[f"<|{start:.2f}|>"], *words, numbers[f"<|{end:.2f}|>"]]
    end_of_text = numbers["<|endoftext|>"]
    script = [*said, end_of_text]
    # A prompt before the start shifts every position: the script goes round, so that words come out then too.
    return [script[position % len(script)] for position in range(TEXT_POSITIONS)]


def _fill_encoder(encoder: Any, random: np.random.Generator) -> None:
    for conv, inputs in ((encoder.conv1, MELS), (encoder.conv2, WIDTH)):
        conv.weight, conv.bias = _random(random, WIDTH, inputs, 3), _zeros(WIDTH)
    encoder.position_encodings.encodings = _random(random, AUDIO_POSITIONS, WIDTH)
    _fill_norm(encoder.layer_norm)
    for layer in encoder.layer:
        _fill_attention(layer.self_attention, random, crosses=False)
        _fill_feed_forward(layer.ffn, random)


def _fill_decoder(decoder: Any, random: np.random.Generator, script: list[int], vocabulary: int) -> None:
    """Fill in weights under which the token after position ``p`` is ``script[p]``: the layers add nothing to the stream."""
    directions = _random(random, vocabulary, WIDTH)
    directions -= directions.mean(axis=1, keepdims=True)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    decoder.scale_embeddings = False
    decoder.embeddings.weight = (0.05 * directions).astype(np.float32)
    decoder.projection.weight = (4.0 * directions).astype(np.float32)
    decoder.position_encodings.encodings = directions[script].astype(np.float32)
    _fill_norm(decoder.layer_norm)
    for layer in decoder.layer:
        _fill_attention(layer.self_attention, random, crosses=False)
        _fill_attention(layer.attention, random, crosses=True)
        _fill_feed_forward(layer.ffn, random)
        for last in (layer.self_attention.linear[-1], layer.attention.linear[-1], layer.ffn.linear_1):
            last.weight = np.zeros_like(last.weight)


def _fill_attention(attention: Any, random: np.random.Generator, *, crosses: bool) -> None:
    for linear, rows in zip(attention.linear, (1, 2, 1) if crosses else (3, 1), strict=True):
        linear.weight, linear.bias = _random(random, rows * WIDTH, WIDTH), _zeros(rows * WIDTH)
    _fill_norm(attention.layer_norm)


def _fill_feed_forward(ffn: Any, random: np.random.Generator) -> None:
    ffn.linear_0.weight, ffn.linear_0.bias = _random(random, HIDDEN, WIDTH), _zeros(HIDDEN)
    ffn.linear_1.weight, ffn.linear_1.bias = _random(random, WIDTH, HIDDEN), _zeros(WIDTH)
    _fill_norm(ffn.layer_norm)


def _fill_norm(norm: Any) -> None:
    norm.gamma, norm.beta = np.ones(WIDTH, np.float32), _zeros(WIDTH)


def _random(random: np.random.Generator, *shape: int) -> Floats:
    return random.normal(0, 0.2, shape).astype(np.float32)


def _zeros(count: int) -> Floats:
    return np.zeros(count, np.float32)
