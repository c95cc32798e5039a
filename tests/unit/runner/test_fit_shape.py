"""Reading the headers of model files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from runner.errors import CorruptModel
from runner.fit import KvLayer, estimate, read_shape
from tests.fakes.model_files import (
    GGUF_F16,
    LLAMA,
    LLAMA_TENSORS,
    SMALL_TENSORS,
    Tensor,
    ct2_bytes,
    gguf_bytes,
    safetensors_bytes,
    write_ct2,
    write_folder,
    write_gguf,
)

TINY = Path(__file__).resolve().parents[3] / "runner" / "tiny" / "muster-tiny-q8_0.gguf"


def per_token(path: Path) -> int:
    return estimate(read_shape(path), context_tokens=1, slots=1, overhead_bytes=0).kv_bytes_per_token


def test_the_shipped_model_is_read_to_the_last_parameter() -> None:
    shape = read_shape(TINY)

    assert (shape.format, shape.architecture, shape.quantization) == ("gguf", "llama", "q8_0")
    assert shape.parameter_count == 918_656
    assert (shape.layers, shape.heads, shape.vocab, shape.context_max) == (4, 4, 1024, 2048)
    assert shape.kv_layers == (KvLayer(2, 32, 32),) * 4
    assert TINY.stat().st_size - 32_768 < shape.weights_bytes < TINY.stat().st_size
    assert per_token(TINY) == 1024  # measured: vLLM and llama.cpp both keep 1,024 bytes of a token of this model


def test_the_sizes_of_gguf_tensors_are_added_up_exactly(tmp_path: Path) -> None:
    shape = read_shape(write_gguf(tmp_path / "m.gguf"))

    assert shape.weights_bytes == 64 * 32 // 32 * 34 * 2 + 64 * 4 + 64 * 32 * 2
    assert shape.parameter_count == 3 * 64 * 32 + 64
    assert shape.vocab == 3


def test_version_2_of_gguf_is_read_too(tmp_path: Path) -> None:
    assert read_shape(write_gguf(tmp_path / "m.gguf", version=2)).layers == 2


def test_the_parts_of_a_split_gguf_are_added_up_whichever_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m-00001-of-00002.gguf", LLAMA, LLAMA_TENSORS[:2])
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", {"split.no": 1}, LLAMA_TENSORS[2:])

    assert read_shape(second) == read_shape(write_gguf(tmp_path / "whole.gguf"))


def test_a_missing_part_of_a_split_gguf_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m-00001-of-00002.gguf")

    with pytest.raises(CorruptModel, match=r"m-00001-of-00002\.gguf .* its part m-00002-of-00002\.gguf is missing"):
        read_shape(path)


def test_without_a_stated_file_type_the_type_of_most_bytes_counts(tmp_path: Path) -> None:
    metadata = {key: value for key, value in LLAMA.items() if key != "general.file_type"}

    assert read_shape(write_gguf(tmp_path / "m.gguf", metadata)).quantization == "q8_0"


def test_a_tensor_type_newer_than_this_program_reaches_to_the_next_tensor(tmp_path: Path) -> None:
    header, data = gguf_bytes(LLAMA, LLAMA_TENSORS)
    old = struct.pack("<2QI", 64, 32, GGUF_F16)
    assert header.count(old) == 1
    (tmp_path / "m.gguf").write_bytes(header.replace(old, struct.pack("<2QI", 64, 32, 99)) + bytes(data))

    assert read_shape(tmp_path / "m.gguf").weights_bytes == read_shape(write_gguf(tmp_path / "n.gguf")).weights_bytes


def _deepseek_v3(**more: object) -> dict[str, object]:
    return {
        "general.architecture": "deepseek2", "deepseek2.block_count": 61, "deepseek2.embedding_length": 7168,
        "deepseek2.attention.head_count": 128, "deepseek2.attention.kv_lora_rank": 512, "deepseek2.rope.dimension_count": 64,
    } | {f"deepseek2.attention.{key}": value for key, value in more.items()}  # fmt: skip


def test_latent_attention_keeps_one_compressed_vector_per_layer(tmp_path: Path) -> None:
    metadata = _deepseek_v3(head_count_kv=1, key_length=576, value_length=512, key_length_mla=192, value_length_mla=128)
    path = write_gguf(tmp_path / "m.gguf", metadata)

    assert per_token(path) == 61 * (512 + 64) * 2 == 70_272
    assert read_shape(path).latent_rank == 512


def test_an_old_conversion_without_latent_keys_is_kept_in_full_by_llama_cpp(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", _deepseek_v3(head_count_kv=128, key_length=192, value_length=128))

    assert per_token(path) == 61 * 128 * (192 + 128) * 2
    assert read_shape(path).latent_rank is None


def _gemma(architecture: str, layers: int, **more: object) -> dict[str, object]:
    fields = {
        "block_count": layers, "embedding_length": 512, "attention.head_count": 8, "attention.head_count_kv": 4,
        "attention.key_length": 128, "attention.value_length": 128, "attention.sliding_window": 1024, **more,
    }  # fmt: skip
    return {"general.architecture": architecture} | {f"{architecture}.{key}": value for key, value in fields.items()}


@pytest.mark.parametrize(
    ("metadata", "full"),
    [
        (_gemma("gemma3", 12), [5, 11]),
        (_gemma("gemma2", 4), [1, 3]),
        (_gemma("newer", 4), [0, 1, 2, 3]),  # nobody says which layers slide: counted in full
        (_gemma("newer", 4, **{"attention.sliding_window_pattern": [True, True, True, False]}), [3]),
        (_gemma("newer", 6, **{"attention.sliding_window_pattern": [1, 0]}), [1, 3, 5]),
        (_gemma("newer", 6, **{"attention.sliding_window_pattern": 3}), [2, 5]),
        (_gemma("gemma3", 6, **{"attention.sliding_window": 0}), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_layers_with_a_sliding_window_are_told_from_those_that_see_everything(
    tmp_path: Path, metadata: dict[str, object], full: list[int]
) -> None:
    layers = read_shape(write_gguf(tmp_path / "m.gguf", metadata)).kv_layers

    assert [index for index, layer in enumerate(layers) if layer.window is None] == full


def test_layers_that_slide_may_have_a_width_of_their_own_and_the_last_may_share_a_cache(tmp_path: Path) -> None:
    more = {
        "attention.sliding_window_pattern": [True, False], "attention.key_length_swa": 64, "attention.value_length_swa": 64,
        "attention.shared_kv_layers": 2, "attention.head_count_kv": [4, 1, 4, 1],
    }  # fmt: skip
    shape = read_shape(write_gguf(tmp_path / "m.gguf", _gemma("gemma4", 4, **more)))

    assert shape.kv_layers == (KvLayer(4, 64, 64, 1024), KvLayer(1, 128, 128))


@pytest.mark.parametrize(
    ("metadata", "tensors", "attending"),
    [
        # Qwen3-Next: every fourth layer attends, the others have a state of fixed size.
        (_gemma("qwen3next", 8, full_attention_interval=4), [], 2),
        # Jamba: told by its tensors, and by layers without key-value heads.
        (_gemma("jamba", 3), [("blk.0.ssm_in.weight", (32,), 0), ("blk.1.attn_k.weight", (32,), 0)], 2),
        (_gemma("granitehybrid", 4, **{"attention.head_count_kv": [0, 4, 0, 0]}), [], 1),
        # Falcon-H1: both kinds in one layer.
        (_gemma("falcon-h1", 1), [("blk.0.ssm_in.weight", (32,), 0), ("blk.0.attn_k.weight", (32,), 0)], 1),
    ],
)
def test_recurrent_layers_keep_nothing_per_token(
    tmp_path: Path, metadata: dict[str, object], tensors: list[Tensor], attending: int
) -> None:
    assert len(read_shape(write_gguf(tmp_path / "m.gguf", metadata, tensors)).kv_layers) == attending


def _llama_8b() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "hidden_size": 4096, "max_position_embeddings": 131072, "vocab_size": 128256,
    }  # fmt: skip


PUBLISHED: dict[str, tuple[dict[str, object], int]] = {
    "Llama-3.1-8B": (_llama_8b(), 2 * 32 * 8 * 128 * 2),
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
         "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128},
        70_272,
    ),
    "Qwen3-Next-80B": (
        {"model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
         "hidden_size": 2048, "head_dim": 256, "full_attention_interval": 4},
        12 * 2 * 256 * 2 * 2,
    ),
    "Jamba-v0.1": (
        {"model_type": "jamba", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
         "hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4},
        4 * 8 * 128 * 2 * 2,
    ),
    "Nemotron-H (a shortened pattern)": (
        {"model_type": "nemotron_h", "num_hidden_layers": 6, "num_attention_heads": 32, "num_key_value_heads": 8,
         "hidden_size": 4096, "hybrid_override_pattern": "M-M*-M"},
        1 * 8 * 128 * 2 * 2,
    ),
    "Qwen2.5-7B, its window switched off": (
        {"model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
         "hidden_size": 3584, "sliding_window": 131072, "use_sliding_window": False},
        28 * 4 * 128 * 2 * 2,
    ),
    "GPT-2": ({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, 12 * 768 * 2 * 2),
    "Falcon-7B": (
        {"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True},
        32 * 64 * 2 * 2,
    ),
    "Mamba": ({"model_type": "mamba", "num_hidden_layers": 24, "hidden_size": 768}, 0),
    "a model that also sees": ({"model_type": "llava", "text_config": _llama_8b()}, 131_072),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_bytes_per_token_of_published_configurations_are_those_computed_by_hand(tmp_path: Path, name: str) -> None:
    config, expected = PUBLISHED[name]

    assert per_token(write_folder(tmp_path / "m", config)) == expected


@pytest.mark.parametrize(
    ("config", "full"),
    [
        ({"model_type": "gemma3_text", "sliding_window": 1024}, [5, 11]),
        ({"model_type": "gemma3_text", "sliding_window": 1024, "sliding_window_pattern": 4}, [3, 7, 11]),
        ({"model_type": "gpt_oss", "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 6},
         [1, 3, 5, 7, 9, 11]),
        ({"model_type": "mistral", "sliding_window": 4096}, []),
        ({"model_type": "mistral", "sliding_window": None}, list(range(12))),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 10}, list(range(10))),
        ({"model_type": "unheard_of", "sliding_window": 4096}, list(range(12))),
    ],
)  # fmt: skip
def test_windows_of_a_configuration_go_to_the_layers_that_have_them(
    tmp_path: Path, config: dict[str, object], full: list[int]
) -> None:
    base = {"num_hidden_layers": 12, "num_attention_heads": 4, "hidden_size": 64}
    layers = read_shape(write_folder(tmp_path / "m", base | config)).kv_layers

    assert len(layers) == 12
    assert [index for index, layer in enumerate(layers) if layer.window is None] == full


def test_layers_that_share_the_cache_of_another_are_not_counted(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 30, "num_attention_heads": 8, "hidden_size": 64, "num_kv_shared_layers": 10}

    assert len(read_shape(write_folder(tmp_path / "m", config)).kv_layers) == 20


@pytest.mark.parametrize(
    ("section", "expected", "form"),
    [
        ({"quant_method": "awq", "bits": 4}, "awq-4bit", "safetensors"),
        ({"quant_method": "gptq", "bits": 8}, "gptq-8bit", "safetensors"),
        ({"quant_method": "fp8"}, "fp8", "safetensors"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes-4bit", "safetensors"),
        ({"quant_method": "exl3", "bits": 4.25}, "exl3", "exl3"),
        (None, "bf16", "safetensors"),
    ],
)
def test_the_quantisation_is_named_as_the_load_request_names_it(
    tmp_path: Path, section: dict[str, object] | None, expected: str, form: str
) -> None:
    shape = read_shape(write_folder(tmp_path / "m", _llama_8b() | {"quantization_config": section}))

    assert (shape.quantization, shape.format) == (expected, form)


def test_packed_words_count_as_the_parameters_in_them(tmp_path: Path) -> None:
    config = _llama_8b() | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    tensors = {"q.qweight": ("I32", (8, 4), 128), "q.scales": ("F16", (8,), 16)}
    shape = read_shape(write_folder(tmp_path / "m", config, tensors))

    assert (shape.parameter_count, shape.weights_bytes) == (8 * 4 * 8 + 8, 144)


def test_a_second_copy_of_the_weights_in_a_folder_is_not_counted(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", _llama_8b())
    (folder / "consolidated.safetensors").write_bytes(safetensors_bytes({"x": ("U8", (999,), 999)}))
    (folder / "extra.safetensors").write_bytes(safetensors_bytes({"x": ("U8", (999,), 999)}))

    assert read_shape(folder).weights_bytes == 256 + 16


def _with_index(folder: Path, weight_map: dict[str, str]) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_the_shards_in_an_index_are_added_up(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", _llama_8b())
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors_bytes({"x": ("U8", (100,), 100)}))
    names = {"a": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}

    assert read_shape(_with_index(folder, names)).weights_bytes == 256 + 16 + 100


def test_ctranslate2_states_its_key_value_heads_layer_by_layer(tmp_path: Path) -> None:
    shape = read_shape(write_ct2(tmp_path / "m", layers=3))

    assert (shape.format, shape.quantization, shape.vocab, shape.heads) == ("ctranslate2", "int8", 10, 4)
    assert shape.kv_layers == (KvLayer(2, 8, 8),) * 3
    assert shape.parameter_count == 320 + 3 * 2048


def test_a_large_ctranslate2_model_is_passed_over_without_reading_it(tmp_path: Path) -> None:
    variables = [("decoder/num_heads", (), 2, struct.pack("<h", 4)), ("decoder/embeddings/weight", (10, 32), 1, bytes(320))]
    head = ct2_bytes("TransformerDecoderSpec", variables)[:-4]
    dims = (16_384, 16_384)
    big = struct.pack("<H", 4) + b"big\0" + struct.pack("<B2IBI", 2, *dims, 0, dims[0] * dims[1] * 4)
    raw = bytearray(head)
    struct.pack_into("<I", raw, head.index(b"Spec\0") + 9, 3)
    path = tmp_path / "m" / "model.bin"
    path.parent.mkdir()
    with path.open("wb") as file:
        file.write(bytes(raw) + big)
        file.truncate(len(raw) + len(big) + (1 << 30) + 4)

    assert read_shape(tmp_path / "m").weights_bytes == (1 << 30) + 322


def test_whisper_is_told_apart_and_keeps_the_audio_for_its_decoder(tmp_path: Path) -> None:
    folder = write_ct2(tmp_path / "m", layers=1)
    raw = (folder / "model.bin").read_bytes()
    old, new = b"\x17\0TransformerDecoderSpec\0", b"\x0c\0WhisperSpec\0"
    (folder / "model.bin").write_bytes(raw.replace(old, new))
    shape = read_shape(folder)

    assert (shape.format, shape.context_max) == ("whisper", 448)
    assert shape.kv_layers == (KvLayer(2, 8, 8), KvLayer(4, 8, 8, fixed_tokens=1500))


def _truncate(path: Path, by: int) -> None:
    path.write_bytes(path.read_bytes()[:-by])


def _break_gguf(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = write_gguf(folder / "m.gguf")
        change(path)
        return path

    return make


def _break_folder(change: Callable[[Path], object]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        made = write_folder(folder / "m", _llama_8b())
        change(made)
        return made

    return make


def _gguf_with(**metadata: object) -> Callable[[Path], Path]:
    changed = {key.replace("__", "."): value for key, value in metadata.items()}
    return lambda folder: write_gguf(folder / "m.gguf", {k: v for k, v in (LLAMA | changed).items() if v is not None})


DAMAGED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "cut off data": (_break_gguf(lambda path: _truncate(path, 100)), r"m\.gguf is damaged: it has \d+ bytes, and the tensor"),
    "cut off header": (_break_gguf(lambda path: path.write_bytes(path.read_bytes()[:200])), "in the middle of its header"),
    "empty": (_break_gguf(lambda path: path.write_bytes(b"")), "it ends after 0 bytes"),
    "another kind of file": (_break_gguf(lambda path: path.write_bytes(bytes(5000))), "it is no GGUF file"),
    "no architecture": (_gguf_with(general__architecture=None), "does not name its architecture"),
    "no layers": (_gguf_with(llama__block_count=None), "has no llama.block_count"),
    "too many layers": (_gguf_with(llama__block_count=1 << 31), "llama.block_count is '2147483648'"),
    "alignment of zero": (_gguf_with(general__alignment=0), "its alignment is 0"),
    "heads of text": (_gguf_with(llama__attention__head_count_kv="two"), "head_count_kv is 'two'"),
    "gguf that is missing": (lambda folder: folder / "none.gguf", "none.gguf is damaged: it is not a file"),
    "shard cut off": (_break_folder(lambda path: _truncate(path / "model.safetensors", 8)), "8 bytes behind the end"),
    "no weights": (_break_folder(lambda path: (path / "model.safetensors").unlink()), "no .safetensors file lies beside it"),
    "header of another size": (
        _break_folder(lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 20)), "its header alone should have"),
    "no JSON": (_break_folder(lambda path: (path / "config.json").write_text("{")), "config.json is damaged: it is no JSON"),
    "a list": (_break_folder(lambda path: (path / "config.json").write_text("[]")), "it is no JSON object"),
    "deep nesting": (_break_folder(lambda path: (path / "config.json").write_text("[" * 100_000)), "it is no JSON"),
    "missing shard": (_break_folder(lambda path: _with_index(path, {"a": "gone.safetensors"})), "which is missing"),
    "shard elsewhere": (_break_folder(lambda path: _with_index(path, {"a": "../x.safetensors"})), "it names the file"),
    "zero heads": (
        lambda folder: write_folder(folder / "m", _llama_8b() | {"num_attention_heads": 0}), "num_attention_heads is 0"),
    "negative layers": (
        lambda folder: write_folder(folder / "m", _llama_8b() | {"num_hidden_layers": -1}), "num_hidden_layers is '-1'"),
    "sizes that contradict each other": (
        lambda folder: write_folder(folder / "m", _llama_8b(), {"a": ("F16", (4,), 9)}), "do not fit its dimensions"),
    "nothing": (lambda folder: folder, "holds neither a config.json nor a model.bin"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_model_is_refused_naming_the_file_and_what_is_wrong(tmp_path: Path, name: str) -> None:
    make, words = DAMAGED[name]
    path = make(tmp_path)

    with pytest.raises(CorruptModel, match=words):
        read_shape(path)


def test_weights_of_pytorch_that_are_called_model_bin_are_told_apart(tmp_path: Path) -> None:
    folder = write_ct2(tmp_path / "m")
    (folder / "model.bin").write_bytes(b"PK\x03\x04" + bytes(100))

    with pytest.raises(CorruptModel, match=r"weights of PyTorch are not loaded"):
        read_shape(folder)


def test_tensors_on_top_of_each_other_are_refused(tmp_path: Path) -> None:
    header = {
        "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
        "b": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
    }
    text = json.dumps(header).encode()
    folder = write_folder(tmp_path / "m", _llama_8b(), SMALL_TENSORS)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(8))

    with pytest.raises(CorruptModel, match="lie on top of each other"):
        read_shape(folder)
