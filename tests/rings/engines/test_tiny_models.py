"""The tiny models that tests are run with: made of the shipped file, the same weights in every shape."""

from __future__ import annotations

import json
import multiprocessing
import struct
import wave
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.models import make
from tests.fakes.models.gguf_file import read_gguf
from tests.fakes.models.llama_shapes import GGUF, hf_tensors
from tests.fakes.models.make import ct2_model_dir, hf_model_dir, lora_dir, speech_wav, whisper_dir


def read_header(path: Path) -> dict[str, dict[str, object]]:
    """Return the header of a safetensors file."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header: dict[str, dict[str, object]] = json.loads(data[8 : 8 + length])
    end = max(offsets[1] for name, entry in header.items() if name != "__metadata__" for offsets in [entry["data_offsets"]])  # type: ignore[index]  # JSON
    assert 8 + length + end == len(data)
    return header


def test_the_hugging_face_folder_holds_every_weight_of_the_configured_shape() -> None:
    header, config = read_header(hf_model_dir() / "model.safetensors"), json.loads((hf_model_dir() / "config.json").read_text())
    assert len(header) - 1 == 2 + 9 * config["num_hidden_layers"]
    assert header["model.embed_tokens.weight"]["shape"] == [config["vocab_size"], config["hidden_size"]]
    rows = config["num_key_value_heads"] * config["head_dim"]
    assert header["model.layers.0.self_attn.k_proj.weight"] == {
        "dtype": "BF16", "shape": [rows, config["hidden_size"]],
        "data_offsets": header["model.layers.0.self_attn.k_proj.weight"]["data_offsets"],
    }  # fmt: skip


def test_rotary_channels_are_half_a_head_apart_in_the_hugging_face_folder() -> None:
    gguf = read_gguf(GGUF)
    theirs, ours = gguf.tensors["blk.0.attn_q.weight"], hf_tensors(gguf)["model.layers.0.self_attn.q_proj.weight"]
    half = gguf.integer("llama.attention.key_length") // 2
    np.testing.assert_array_equal(ours[1], theirs[2])
    np.testing.assert_array_equal(ours[half], theirs[1])


def test_an_adapter_has_both_halves_of_each_of_its_matrices() -> None:
    header, config = (
        read_header(lora_dir() / "adapter_model.safetensors"),
        json.loads((lora_dir() / "adapter_config.json").read_text()),
    )
    halves = [name for name in header if name != "__metadata__"]
    assert len(halves) == 2 * 4 * len(config["target_modules"])
    assert all(config["r"] in header[name]["shape"] for name in halves)  # type: ignore[operator]  # JSON


@pytest.mark.parametrize("quantization", ["int8", "float32"])
def test_the_ctranslate2_model_speaks_in_words_of_the_language_it_was_taught(quantization: str) -> None:
    import ctranslate2
    from tokenizers import Tokenizer

    folder = ct2_model_dir(quantization)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompt = tokenizer.encode("<|user|>What is Muster?<|end|><|assistant|>", add_special_tokens=False).tokens
    generator = ctranslate2.Generator(str(folder), intra_threads=1)
    answer = generator.generate_batch([prompt], max_length=60, include_prompt_in_result=False)[0]
    words = tokenizer.decode(answer.sequences_ids[0]).lower().split()
    assert {"is", "a", "gpus"} <= set(words), words


def test_the_sound_has_pauses_that_a_voice_detector_finds() -> None:
    from faster_whisper.audio import decode_audio
    from faster_whisper.vad import get_speech_timestamps

    with wave.open(str(speech_wav())) as file:
        assert (file.getframerate(), file.getnchannels()) == (16_000, 1)
    spans = get_speech_timestamps(decode_audio(str(speech_wav())))
    assert len(spans) == 3


def _make_in(home: Path, path: str) -> None:
    make._home = lambda: home  # type: ignore[assignment]  # in a process of its own
    Path(path).write_text(str(whisper_dir()), encoding="utf-8")


@pytest.mark.timeout(300)
def test_two_processes_that_make_the_same_model_at_once_get_the_same_whole_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=_make_in, args=(home, str(tmp_path / f"{n}.txt"))) for n in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert len({(tmp_path / f"{n}.txt").read_text(encoding="utf-8") for n in range(2)}) == 1
    assert [entry.name for entry in home.iterdir()] == ["tiny-whisper-ct2"]
    assert (home / "tiny-whisper-ct2" / "model.bin").stat().st_size > 500_000
