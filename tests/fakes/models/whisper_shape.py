"""A tiny Whisper for CTranslate2 with made-up weights: it hears nothing and says the same few words for every sound.

The decoder's position encodings point at the tokens of a script, and nothing else contributes, so that segments, words and
timestamps come out as they do with a real model. The encoder and the attention to it are random.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.fakes.models.gguf_file import Floats

WIDTH, HEADS, LAYERS, HIDDEN, MELS = 64, 2, 2, 128, 80
AUDIO_POSITIONS, TEXT_POSITIONS = 1500, 448
VOCABULARY = 600
UNUSED = "unused"
WORDS = (" the", " box", " dials", " out", " and", " serves", " a", " model")
SECONDS_PER_SEGMENT = 1.2
ROOT = Path(__file__).resolve().parents[3]


def write_whisper(folder: Path, *, multilingual: bool) -> None:
    """Write model.bin, its configuration, tokenizer.json and preprocessor_config.json."""
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


def _fill_encoder(encoder: object, random: np.random.Generator) -> None:
    from ctranslate2.specs import whisper_spec

    assert isinstance(encoder, whisper_spec.WhisperEncoderSpec)
    for conv, inputs in ((encoder.conv1, MELS), (encoder.conv2, WIDTH)):
        conv.weight, conv.bias = _random(random, WIDTH, inputs, 3), _zeros(WIDTH)
    encoder.position_encodings.encodings = _random(random, AUDIO_POSITIONS, WIDTH)
    _fill_norm(encoder.layer_norm)
    for layer in encoder.layer:
        _fill_attention(layer.self_attention, random, crosses=False)
        _fill_feed_forward(layer.ffn, random)


def _fill_decoder(decoder: object, random: np.random.Generator, script: list[int], vocabulary: int) -> None:
    """Fill in weights under which the token after position ``p`` is ``script[p]``: the layers add nothing to the stream."""
    from ctranslate2.specs import transformer_spec

    assert isinstance(decoder, transformer_spec.TransformerDecoderSpec)
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


def _fill_attention(attention: object, random: np.random.Generator, *, crosses: bool) -> None:
    from ctranslate2.specs import attention_spec

    assert isinstance(attention, attention_spec.MultiHeadAttentionSpec)
    for linear, rows in zip(attention.linear, (1, 2, 1) if crosses else (3, 1), strict=True):
        linear.weight, linear.bias = _random(random, rows * WIDTH, WIDTH), _zeros(rows * WIDTH)
    _fill_norm(attention.layer_norm)


def _fill_feed_forward(ffn: object, random: np.random.Generator) -> None:
    from ctranslate2.specs import transformer_spec

    assert isinstance(ffn, transformer_spec.FeedForwardSpec)
    ffn.linear_0.weight, ffn.linear_0.bias = _random(random, HIDDEN, WIDTH), _zeros(HIDDEN)
    ffn.linear_1.weight, ffn.linear_1.bias = _random(random, WIDTH, HIDDEN), _zeros(WIDTH)
    _fill_norm(ffn.layer_norm)


def _fill_norm(norm: object) -> None:
    from ctranslate2.specs import common_spec

    assert isinstance(norm, common_spec.LayerNormSpec)
    norm.gamma, norm.beta = np.ones(WIDTH, np.float32), _zeros(WIDTH)


def _random(random: np.random.Generator, *shape: int) -> Floats:
    return random.normal(0, 0.2, shape).astype(np.float32)


def _zeros(count: int) -> Floats:
    return np.zeros(count, np.float32)
