"""Models in a node's folders: which ids lead where, what their files say of them, and what a load of them takes."""

from __future__ import annotations

import json
import os
import shutil
import struct
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import LoadPlan, Observation
from runner.definitions.settings import Fairness
from runner.errors import CorruptModel, InsufficientMemory, InvalidRequest
from runner.fit import memory, read_shape
from runner.library.files import FoundModel, check_model_id, name_without_quantization, other_quantizations
from runner.library.library import Library
from runner.pool.capacity import Capacity, Prediction
from runner.pool.models import Model
from runner.queue import FairQueue, WaitBudget
from runner.telemetry import Reading, Telemetry
from tests.fakes.examples import examples
from tests.fakes.model_files import (
    GGUF_F16,
    LLAMA,
    LLAMA_TENSORS,
    Tensor,
    gguf_bytes,
    safetensors_bytes,
    write_ct2,
    write_folder,
    write_gguf,
)
from wire.bridge import GpuInfo
from wire.memory import CACHE_TYPES, KvLayer

CONFIG = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
COMMIT = "a" * 40


class CountingReader:
    """Reads headers, and remembers of which files."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, path: Path) -> memory.ModelShape:
        self.read.append(path.name)
        return read_shape(path)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    folder.mkdir()
    return folder


def make_library(base: Path | None, home: Path | None = None) -> Library:
    return Library(base, home, None, read_shape=read_shape)


def found(library: Library) -> dict[str, FoundModel]:
    return {entry.model_id: entry for entry in library.discover()}


@pytest.mark.parametrize(
    "text",
    ["", "/etc", "..", "a/../b", "a..b", "a//b", "a/", "/a", "a\\b", "a b", "a\nb", "a\0b", "~/a", "-rf", "a/-x", ".hidden",
     "a/.hidden", "$(x)", "a;b", "a|b", "a`b", "ä", "x" * 201, "a/./b", "%2e%2e/a", "a?b", "a*b", "a'b"],
)  # fmt: skip
def test_everything_else_is_refused(base: Path, text: str) -> None:
    for good in ("m", "org/name", "Qwen/Qwen2.5-0.5B_x", "a/b/c/d.gguf", "x" * 200):
        assert "/".join(check_model_id(good)) == good
    with pytest.raises(InvalidRequest):
        make_library(base).find(text)


@examples(25)
@given(text=st.text(max_size=40))
def test_an_id_that_passes_never_leads_out_of_a_folder(text: str) -> None:
    try:
        segments = check_model_id(text)
    except InvalidRequest:
        return
    path = Path("/models").joinpath(*segments)
    assert Path(os.path.normpath(path)) == path
    assert path.is_relative_to("/models")
    assert path != Path("/models")


def test_models_are_found_by_their_path_below_the_base(base: Path) -> None:
    write_gguf(base / "a.gguf")
    write_gguf(base / "org" / "b-Q8.gguf")
    write_folder(base / "org" / "hf", CONFIG)
    write_folder(base / "exl", CONFIG | {"quantization_config": {"quant_method": "exl3"}})
    write_ct2(base / "ct2")
    library = make_library(base)
    assert {name: entry.backend for name, entry in found(library).items()} == {
        "a": "gguf", "org/b-Q8": "gguf", "org/hf": "vllm", "exl": "exllamav3", "ct2": "ct2"
    }  # fmt: skip
    assert all(entry.problem is None for entry in library.discover())
    assert {name: library.find(name) for name in found(library)} == {name: entry.path for name, entry in found(library).items()}
    assert found(library)["a"] == FoundModel("a", base / "a.gguf", "gguf", (base / "a.gguf").stat().st_size, "q8_0")
    assert library.find("a.gguf") == base / "a.gguf"
    assert library.find("org") == base / "org" / "b-Q8.gguf"  # the only one in it


def test_an_id_that_leads_to_nothing_to_a_part_or_to_several_models_is_answered_as_such(base: Path) -> None:
    (base / "empty").mkdir()
    first = write_gguf(base / "m-00001-of-00002.gguf", LLAMA, LLAMA_TENSORS[:1])
    second = write_gguf(base / "m-00002-of-00002.gguf", {"split.no": 1}, LLAMA_TENSORS[1:])
    library = make_library(base)
    assert (library.find("org/none"), library.find("empty"), make_library(None).find("org/none")) == (None, None, None)
    assert list(found(library)) == ["m-00001-of-00002"]
    assert found(library)["m-00001-of-00002"].size_bytes == first.stat().st_size + second.stat().st_size
    assert library.find("m-00002-of-00002") == first
    for name in ("m-Q4", "m-Q8", "mmproj-m"):
        write_gguf(base / "org" / f"{name}.gguf")
    with pytest.raises(InvalidRequest, match="holds several models; add one of these after a slash: m-Q4, m-Q8"):
        library.find("org")


def test_what_cannot_be_loaded_is_listed_with_the_reason_and_parts_of_models_are_not(base: Path) -> None:
    path = write_gguf(base / "broken.gguf")
    path.write_bytes(path.read_bytes()[:-10])
    old, both = write_folder(base / "old", CONFIG), write_folder(base / "both", CONFIG)
    (old / "model.safetensors").rename(old / "pytorch_model.bin")
    (both / "pytorch_model.bin").write_bytes(b"\x80\x04")
    write_gguf(base / "my model.gguf")
    (write_folder(base / "lora", CONFIG) / "adapter_config.json").write_text("{}")
    for part in ("pipeline/unet", "both/1_Pooling"):
        write_folder(base / part, CONFIG)
    (base / "pipeline" / "model_index.json").write_text("{}")
    library = make_library(base)
    listed = found(library)
    assert listed.keys() == {"broken", "old", "both", "my model"}
    assert (listed["broken"].problem or "").startswith("broken.gguf is damaged")
    assert (listed["broken"].backend, listed["broken"].size_bytes) == ("gguf", path.stat().st_size)
    assert ("pickle" in (listed["old"].problem or ""), "rename it" in (listed["my model"].problem or "")) == (True, True)
    with pytest.raises(InvalidRequest, match=r"only pickle weights .* convert them to safetensors or GGUF"):
        library.find("old")
    assert library.find("both") == both


def test_links_inside_the_base_are_followed_to_files_and_never_out_of_it(tmp_path: Path, base: Path) -> None:
    outside, inside = write_gguf(tmp_path / "outside.gguf"), write_gguf(base / "real.gguf")
    (base / "alias.gguf").symlink_to(inside)
    (base / "leak.gguf").symlink_to(outside)
    (base / "out").symlink_to(tmp_path)
    os.mkfifo(base / "pipe.gguf")
    (base / "circle.gguf").symlink_to(base / "circle.gguf")
    write_gguf(base / "org" / "m-00001-of-00002.gguf")
    (base / "org" / "m-00002-of-00002.gguf").symlink_to(outside)
    library = make_library(base)
    assert library.find("alias") == inside
    for name in ("leak", "out/outside", "pipe", "circle", "org/m-00002-of-00002"):
        assert library.find(name) is None
    for name in ("org/m-00001-of-00002", "org"):
        with pytest.raises(InvalidRequest, match=r"m-00002-of-00002\.gguf is no regular file, or a link that leads out"):
            library.find(name)
    listed = {name: entry.problem or "" for name, entry in found(library).items()}
    assert listed.keys() == {"real", "alias", "leak", "pipe", "circle", "org/m-00001-of-00002"}
    assert all("leads out" in listed[name] for name in ("leak", "org/m-00001-of-00002"))
    assert all("no regular file" in listed[name] for name in ("pipe", "circle"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_folder_with_a_file_that_leads_out_is_refused(tmp_path: Path, base: Path, name: str) -> None:
    folder, secret, library = write_folder(base / "m", CONFIG), tmp_path / "secret", make_library(base)
    (folder / name).touch()
    (folder / name).rename(secret)
    (folder / name).symlink_to(secret)
    with pytest.raises(InvalidRequest, match=f"refused: {name} is no regular file, or a link that leads out"):
        library.find("m")
    assert "leads out" in (found(library)["m"].problem or "")


def test_what_has_not_changed_is_not_read_again(base: Path) -> None:
    paths = [write_gguf(base / "a.gguf"), write_gguf(base / "sub" / "b.gguf")]
    reader = CountingReader()
    library = Library(base, None, None, read_shape=reader)
    first = library.discover()
    assert library.discover() == first
    assert sorted(reader.read) == ["a.gguf", "b.gguf"]
    paths[1].write_bytes(paths[1].read_bytes() + b"more")
    write_gguf(base / "sub" / "c.gguf")
    assert [entry.model_id for entry in library.discover()] == ["a", "sub/b", "sub/c"]
    assert sorted(reader.read) == ["a.gguf", "b.gguf", "b.gguf", "c.gguf"]
    shutil.rmtree(base / "sub")
    write_gguf(base.joinpath(*"abcdef") / "near.gguf")
    write_gguf(base.joinpath(*"abcdefgh") / "far.gguf")
    assert [entry.model_id for entry in library.discover()] == ["a", "a/b/c/d/e/f/near"], "not walked to its end"


def make_snapshot(home: Path, repo: str, commit: str, source: Path) -> Path:
    """Place a model as huggingface_hub does: blobs, and links to them."""
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    sources = sorted(source.iterdir()) if source.is_dir() else [source]
    for number, path in enumerate(sources):
        blob = folder / "blobs" / f"{commit[0]}{number}"
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def set_ref(snapshot: Path, name: str) -> None:
    path = snapshot.parents[1] / "refs" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(snapshot.name)


def test_snapshots_in_the_cache_are_found_by_repository_and_the_owners_folder_wins(tmp_path: Path, base: Path) -> None:
    home = base / "cache"
    snapshot = make_snapshot(home, "org/hf", COMMIT, write_folder(tmp_path / "source", CONFIG))
    gguf = make_snapshot(home, "org/one-gguf", COMMIT, write_gguf(tmp_path / "x-Q8.gguf"))
    library = make_library(None, home)
    assert {name: (entry.path, entry.backend) for name, entry in found(library).items()} == {
        "org/hf": (snapshot, "vllm"), "org/one-gguf": (gguf / "x-Q8.gguf", "gguf")
    }  # fmt: skip
    assert library.find("org/one-gguf") == library.find("org/one-gguf/x-Q8") == gguf / "x-Q8.gguf"
    mine, both = write_folder(base / "org" / "hf", CONFIG), make_library(base, home)
    assert list(found(both)) == ["org/hf", "org/one-gguf"], "a cache below the base is not listed twice"
    assert found(both)["org/hf"].path == both.find("org/hf") == mine
    (snapshot / "model.safetensors").resolve().unlink()
    assert found(library)["org/hf"].problem is not None, "its blob is missing"


def test_the_revision_chooses_among_commits_and_main_goes_first(tmp_path: Path) -> None:
    home = tmp_path / "home"
    source = write_folder(tmp_path / "source", CONFIG)
    old, new = (make_snapshot(home, "org/m", letter * 40, source) for letter in "bc")
    library = make_library(None, home)
    set_ref(old, "main")
    set_ref(new, "v2")
    assert library.find("org/m") == old
    assert library.find("org/m", revision="v2") == new
    assert library.find("org/m", revision="c" * 40) == new
    assert library.find("org/m", revision="v3") is None
    assert library.find("org/m", revision="d" * 40) is None
    with pytest.raises(InvalidRequest):
        library.find("org/m", revision="../../blobs")


def test_a_snapshot_that_leads_out_of_the_cache_is_not_followed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    snapshot = make_snapshot(home, "org/m", COMMIT, write_folder(tmp_path / "source", CONFIG))
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to(tmp_path / "source" / "config.json")
    library = make_library(None, home)
    with pytest.raises(InvalidRequest, match="leads out"):
        library.find("org/m")
    set_ref(snapshot, "main")
    snapshot.rename(tmp_path / "elsewhere")
    snapshot.symlink_to(tmp_path / "elsewhere")
    assert library.find("org/m") is None
    assert not library.discover()


def test_the_ways_of_naming_a_quantisation_do_not_count_and_another_model_stays_another() -> None:
    for model_id in (
        "meta/Llama-3.1-8B-Instruct", "x/Llama-3.1-8B-Instruct-AWQ", "Llama-3.1-8B-Instruct-Q4_K_M",
        "llama-3.1-8b-instruct.Q8_0",
        "z/Llama-3.1-8B-Instruct-GGUF/Llama-3.1-8B-Instruct-UD-IQ2_XXS-00001-of-00003", "Llama-3.1-8B-Instruct-GPTQ-Int4",
        "Llama-3.1-8B-Instruct-bf16", "Llama-3.1-8B-Instruct_FP8-Dynamic", "Llama-3.1-8B-Instruct-exl3-4.0bpw",
        "Llama-3.1-8B-Instruct-4bit", "Llama-3.1-8B-Instruct-w4a16",
    ):  # fmt: skip
        assert name_without_quantization(model_id) == "llama-3.1-8b-instruct"
    for model_id in ("Llama-3.1-70B-Instruct-Q4_K_M", "Llama-3.1-8B-Q4_K_M", "Llama-3-8B-Instruct", "Q4_0"):
        assert name_without_quantization(model_id) not in {"llama-3.1-8b-instruct", ""}
    sizes = {"m-Q4_0": 4, "m-Q8_0": 8, "m-F16": 16, "m-Q2_K": 2, "other-Q4_0": 4, "m": 20}
    models = [
        FoundModel(name, Path("/m") / name, "gguf", size, None if name == "m" else "q", "damaged" if name == "m-Q2_K" else None)
        for name, size in sizes.items()
    ]
    assert [entry.model_id for entry in other_quantizations("m-F16", models)] == ["m-Q8_0", "m-Q4_0"], "largest first"


def per_token(path: Path) -> int:
    shape = read_shape(path)
    empty, one = (memory.estimate(shape, context_tokens=tokens, slots=1, overhead_bytes=0).kv_bytes for tokens in (0, 1))
    return one - empty


def test_the_tensors_of_a_gguf_are_added_up_exactly_in_every_form_of_the_file(tmp_path: Path) -> None:
    shape = read_shape(write_gguf(tmp_path / "m.gguf"))
    assert shape.weights_bytes == 64 * 32 // 32 * 34 * 2 + 64 * 4 + 64 * 32 * 2
    assert read_shape(write_gguf(tmp_path / "m2.gguf", version=2)) == shape
    untyped = {key: value for key, value in LLAMA.items() if key != "general.file_type"}
    assert read_shape(write_gguf(tmp_path / "untyped.gguf", untyped)).quantization == "q8_0", "the type of most bytes"
    write_gguf(tmp_path / "m-00001-of-00002.gguf", LLAMA, LLAMA_TENSORS[:2])
    second = write_gguf(tmp_path / "m-00002-of-00002.gguf", {"split.no": 1}, LLAMA_TENSORS[2:])
    assert read_shape(second) == shape, "whichever part is named"
    header, data = gguf_bytes(LLAMA, LLAMA_TENSORS)
    old = struct.pack("<2QI", 64, 32, GGUF_F16)
    assert header.count(old) == 1
    (tmp_path / "newer.gguf").write_bytes(header.replace(old, struct.pack("<2QI", 64, 32, 99)) + bytes(data))
    assert read_shape(tmp_path / "newer.gguf").weights_bytes == shape.weights_bytes, "it reaches to the next tensor"


def _deepseek_v3(**more: object) -> dict[str, object]:
    return {
        "general.architecture": "deepseek2", "deepseek2.block_count": 61, "deepseek2.embedding_length": 7168,
        "deepseek2.attention.head_count": 128, "deepseek2.attention.kv_lora_rank": 512, "deepseek2.rope.dimension_count": 64,
    } | {f"deepseek2.attention.{key}": value for key, value in more.items()}  # fmt: skip


def test_latent_attention_keeps_one_compressed_vector_per_layer_unless_an_old_conversion_lacks_its_keys(tmp_path: Path) -> None:
    metadata = _deepseek_v3(head_count_kv=1, key_length=576, value_length=512, key_length_mla=192, value_length_mla=128)
    path = write_gguf(tmp_path / "m.gguf", metadata)
    assert per_token(path) == 61 * (512 + 64) * 2
    path = write_gguf(tmp_path / "old.gguf", _deepseek_v3(head_count_kv=128, key_length=192, value_length=128))
    assert per_token(path) == 61 * 128 * (192 + 128) * 2


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
def test_layers_with_a_sliding_window_are_told_apart(tmp_path: Path, metadata: dict[str, object], full: list[int]) -> None:
    layers = read_shape(write_gguf(tmp_path / "m.gguf", metadata)).kv_layers
    assert [index for index, layer in enumerate(layers) if layer.window is None] == full


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
def test_recurrent_layers_keep_none(tmp_path: Path, metadata: dict[str, object], tensors: list[Tensor], attending: int) -> None:
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
def test_windows_go_to_the_layers_that_have_them(tmp_path: Path, config: dict[str, object], full: list[int]) -> None:
    base = {"num_hidden_layers": 12, "num_attention_heads": 4, "hidden_size": 64}
    layers = read_shape(write_folder(tmp_path / "m", base | config)).kv_layers
    assert len(layers) == 12
    assert [index for index, layer in enumerate(layers) if layer.window is None] == full


def test_the_quantisation_is_named_as_the_load_request_names_it(tmp_path: Path) -> None:
    for section, expected, backend in (
        ({"quant_method": "awq", "bits": 4}, "awq-4bit", "vllm"), ({"quant_method": "fp8"}, "fp8", "vllm"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes-4bit", "vllm"),
        ({"quant_method": "exl3", "bits": 4.25}, "exl3", "exllamav3"), (None, "bf16", "vllm"),
    ):  # fmt: skip
        shape = read_shape(write_folder(tmp_path / expected, _llama_8b() | {"quantization_config": section}))
        assert (shape.quantization, shape.backend) == (expected, backend)


def _with_index(folder: Path, weight_map: dict[str, str]) -> Path:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_weights_of_a_folder_count_once_and_those_of_an_unheard_of_type_as_stated(tmp_path: Path) -> None:
    tensors = {"q.qweight": ("I32", (8, 4), 128), "q.scales": ("F16", (8,), 16), "q.zeros": ("F5_NEW", (8,), 5)}
    assert read_shape(write_folder(tmp_path / "packed", _llama_8b(), tensors)).weights_bytes == 149
    folder = write_folder(tmp_path / "m", _llama_8b())
    (folder / "consolidated.safetensors").write_bytes(safetensors_bytes({"x": ("U8", (999,), 999)}))
    assert read_shape(folder).weights_bytes == 256 + 16, "without the second copy"
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    (folder / "model-00002-of-00002.safetensors").write_bytes(safetensors_bytes({"x": ("U8", (100,), 100)}))
    names = {"a": "model-00001-of-00002.safetensors", "x": "model-00002-of-00002.safetensors"}
    assert read_shape(_with_index(folder, names)).weights_bytes == 256 + 16 + 100


def test_ctranslate2_states_its_heads_layer_by_layer_and_whisper_keeps_the_audio_for_its_decoder(tmp_path: Path) -> None:
    shape = read_shape(write_ct2(tmp_path / "m", layers=3))
    assert (shape.backend, shape.quantization, shape.layers) == ("ct2", "int8", 3)
    assert (shape.kv_layers, shape.weights_bytes) == ((KvLayer(2, 8, 8),) * 3, 2 + 320 + 3 * (4 + 2048))
    folder = write_ct2(tmp_path / "w", layers=1)
    raw = (folder / "model.bin").read_bytes()
    (folder / "model.bin").write_bytes(raw.replace(b"\x17\0TransformerDecoderSpec\0", b"\x0c\0WhisperSpec\0"))
    shape = read_shape(folder)
    assert (shape.backend, shape.context_max) == ("whisper", 448)
    assert shape.kv_layers == (KvLayer(2, 8, 8), KvLayer(4, 8, 8, fixed_tokens=1500))
    (folder / "model.bin").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CorruptModel, match=r"weights of PyTorch are not loaded"):
        read_shape(folder)


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


_TWICE = json.dumps({name: {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for name in "ab"}).encode()
TWICE = struct.pack("<Q", len(_TWICE)) + _TWICE + bytes(8)
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
    "missing part": (lambda folder: write_gguf(folder / "m-00001-of-00002.gguf"), r"part m-00002-of-00002\.gguf is missing"),
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
    "tensors on top": (
        _break_folder(lambda path: (path / "model.safetensors").write_bytes(TWICE)), "lie on top of each other"),
    "nothing": (lambda folder: folder, "holds neither a config.json nor a model.bin"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_model_is_refused_naming_the_file_and_what_is_wrong(tmp_path: Path, name: str) -> None:
    make, words = DAMAGED[name]
    path = make(tmp_path)
    with pytest.raises(CorruptModel, match=words):
        read_shape(path)


MIB = 1 << 20


def make_shape(*layers: KvLayer, weights_bytes: int = 1000) -> memory.ModelShape:
    return memory.ModelShape("gguf", weights_bytes, len(layers), layers)


LLAMA_8B = make_shape(*[KvLayer(8, 128, 128)] * 32, weights_bytes=8_540_000_000)


def test_the_cache_is_tokens_times_slots_times_the_bits_of_its_type_in_whole_blocks() -> None:
    result = memory.estimate(LLAMA_8B, context_tokens=8192, slots=2, overhead_bytes=7)
    assert result.kv_bytes == 2 * 8192 * 131_072
    assert result.total_bytes == 8_540_000_000 + 2 * (1 << 30) + 7
    bits = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5,
            "iq4_nl": 4.5, "fp8": 8.0, "fp8_e5m2": 8.0}  # fmt: skip
    for name, size in bits.items():
        result = memory.estimate(LLAMA_8B, context_tokens=1, slots=1, type_k=name, type_v=name, overhead_bytes=0)
        assert result.kv_bytes == 32 * 2 * 8 * 128 * size / 8
    mixed = memory.estimate(
        make_shape(KvLayer(1, 40, 8)), context_tokens=1, slots=1, type_k="q8_0", type_v="f16", overhead_bytes=0
    )
    assert mixed.kv_bytes == 2 * 34 + 8 * 2
    with pytest.raises(ValueError, match="'q3' is no type of KV cache"):
        memory.estimate(LLAMA_8B, context_tokens=1, slots=1, type_k="q3", overhead_bytes=0)


def test_a_window_bounds_what_a_layer_keeps_and_audio_does_not_grow_with_the_context() -> None:
    # Gemma 3 27B: 62 layers, every sixth sees everything, 16 heads of 128, a window of 1024, at its full context.
    layers = [KvLayer(16, 128, 128, None if (layer + 1) % 6 == 0 else 1024) for layer in range(62)]
    of_token = 16 * (128 + 128) * 2
    result = memory.estimate(make_shape(*layers), context_tokens=131_072, slots=1, overhead_bytes=0)
    assert result.kv_bytes == 10 * 131_072 * of_token + 52 * (1024 + 512) * of_token
    short = memory.estimate(make_shape(KvLayer(1, 1, 1, 4096)), context_tokens=100, slots=3, overhead_bytes=0)
    assert short.kv_bytes == 3 * 100 * 4
    heard = memory.estimate(
        make_shape(KvLayer(1, 1, 1), KvLayer(2, 1, 1, fixed_tokens=1500)),
        context_tokens=448,
        slots=1,
        overhead_bytes=0,
    )
    assert heard.kv_bytes == 448 * 4 + 1500 * 8


def test_layers_that_stay_with_the_host_take_nothing_of_the_gpu() -> None:
    whole = make_shape(*[KvLayer(1, 1, 1, layer) for layer in range(1, 25)], weights_bytes=2500)
    half = whole.last_layers(12)
    assert (half.weights_bytes, [layer.window for layer in half.kv_layers]) == (1200, list(range(13, 25)))
    assert (whole.last_layers(0).weights_bytes, whole.last_layers(0).kv_layers) == (0, ())
    assert whole.last_layers(24).weights_bytes == 2400, "the output stays with the host"
    assert whole.last_layers(-1) == whole.last_layers(25) == whole.last_layers(4096) == whole


def test_a_node_of_several_has_its_share_of_weights_and_layers_rounded_up() -> None:
    whole = make_shape(*[KvLayer(1, 1, 1, layer) for layer in range(1, 8)], weights_bytes=1000)
    part = whole.share(3)
    assert (part.weights_bytes, len(part.kv_layers)) == (334, 3)


def seen(beyond: int, at: float, *, backend: str = "gguf", measured: int | None = None) -> Observation:
    return Observation(backend, "m", "k", 1000, 200, 1200 + beyond if measured is None else measured, 1.0, at)


def test_the_overhead_is_the_median_of_the_newest_twenty_loads_or_a_guess() -> None:
    learn = memory.learn_overhead
    assert learn([seen(5, 1.0, backend="vllm"), seen(0, 1.0, measured=0)], "gguf") == 48 * MIB
    assert learn([], "vllm") > learn([], "whisper") > learn([], "ct2") > learn([], "openai_compatible") == 0
    assert (learn([], "gguf", has_gpu=True), learn([], "vllm", has_gpu=True)) == (768 * MIB, learn([], "vllm"))
    assert learn([], "vllm", has_gpu=True, gpus=4) == 4 * learn([], "vllm")
    old, new = ([seen(9_000_000, float(at)) for at in range(30)], [seen(500 + at, 100.0 + at) for at in range(20)])
    assert learn([*new, *old], "gguf") == 509
    assert learn([seen(100, 1.0), seen(110, 2.0), seen(9_999_999, 3.0)], "gguf") == 110
    assert learn([seen(-500, 1.0)], "gguf") == 0


def on_gpus(*gpu_ids: int, holds: int = 0) -> Model:
    """A model on these GPUs, whose load was promised ``holds`` MiB."""
    queue = FairQueue(slots=1, limits=Fairness(), budget=WaitBudget(1), weight_of=lambda _: 1.0)
    model = Model(ModelDefinition(model_id=f"m{gpu_ids}", backend="vllm"), queue, lambda: None)
    model.plan, model.reserved_bytes = LoadPlan(model.model_id, "vllm", gpu_ids=gpu_ids), holds * MIB
    return model


def test_a_load_on_several_gpus_has_of_each_as_much_as_the_fullest_of_them() -> None:
    gpus = [
        GpuInfo(index=index, name="L4", memory_total_mb=24_000, memory_used_mb=used) for index, used in enumerate((0, 4000, 0))
    ]
    reading = Reading(gpus=gpus, kind="gpu", total_mb=72_000, used_mb=4000, free_mb=68_000, nvidia_count=3)
    capacity = Capacity(Telemetry(nvml=None, cards=()), None, budget_bytes=None)

    def fits(gpu_ids: tuple[int, ...], needs_mb: int, *others: Model) -> bool:
        shape = make_shape(weights_bytes=needs_mb * MIB)
        prediction = Prediction(shape, memory.Estimate(needs_mb * MIB, 0, 0), None)
        needed = (on_gpus(*gpu_ids), LoadPlan("m", "vllm", gpu_ids=gpu_ids), prediction)
        try:
            capacity.decide(*needed, replicas=1, reading=reading, models=others, evictee=None)
        except InsufficientMemory:
            return False
        return True

    for gpu_ids, most_mb in (((0,), 24_000), ((1,), 20_000), ((0, 2), 48_000), ((0, 1), 40_000), ((), 68_000)):
        assert (fits(gpu_ids, most_mb), fits(gpu_ids, most_mb + 1)) == (True, False)
    # What is promised to a load under way counts on its own GPUs, and everywhere when these are not known.
    assert (fits((0, 2), 28_000, on_gpus(2, 1, holds=20_000)), fits((0, 2), 28_001, on_gpus(2, 1, holds=20_000))) == (
        True,
        False,
    )
    assert (fits((0,), 24_000, on_gpus(1, holds=9000)), fits((0,), 20_001, on_gpus(holds=4000))) == (True, False)


def ask(
    free_bytes: int, *, budget_bytes: int | None = None, context_tokens: int = 8192, slots: int = 4, **more: object
) -> memory.DoesNotFit | None:
    predicted = memory.estimate(LLAMA_8B, context_tokens=context_tokens, slots=slots, overhead_bytes=100 * MIB)
    return memory.judge(
        predicted, free_bytes=free_bytes, budget_bytes=budget_bytes, shape=LLAMA_8B, context_tokens=context_tokens, slots=slots,
        **more,  # type: ignore[arg-type]  # the further arguments by name
    )  # fmt: skip


def refused(verdict: memory.DoesNotFit | None) -> dict[memory.SuggestionKind, memory.Suggestion]:
    assert verdict is not None
    return {suggestion.kind: suggestion for suggestion in verdict.suggestions}


NEEDED = 8_540_000_000 + 4 * (1 << 30) + 100 * MIB


def test_one_byte_less_than_enough_is_refused_with_the_longest_context_and_the_most_requests_that_fit() -> None:
    assert ask(NEEDED) is None
    assert ask(NEEDED * 2, budget_bytes=NEEDED - 1) is not None
    suggestion = refused(ask(NEEDED - 1))[memory.SuggestionKind.SHORTER_CONTEXT]
    assert "7936 tokens" in suggestion.text
    assert suggestion.as_dict() == {
        "kind": "shorter_context", "text": suggestion.text, "requiredMB": -(-suggestion.required_bytes // MIB),
        "maxContextLength": 7936,
    }  # fmt: skip
    fewer = refused(ask(NEEDED - 2 * (1 << 30)))[memory.SuggestionKind.FEWER_SLOTS]
    assert (fewer.change, fewer.required_bytes) == ({"slots": 2}, NEEDED - 2 * (1 << 30))
    assert "One request at a time instead of 4" in refused(ask(NEEDED - 3 * (1 << 30)))[memory.SuggestionKind.FEWER_SLOTS].text


def test_smaller_caches_other_quantisations_and_the_fewest_evictions_that_do_are_suggested() -> None:
    free = NEEDED - 2 * (1 << 30)
    smaller = refused(ask(free, kv_types=("q8_0", "unheard_of", "q4_0")))[memory.SuggestionKind.SMALLER_KV_TYPE]
    assert smaller.change == {"kvType": "q4_0"}  # q8_0 takes 8.5 of 16 bits: just too much
    assert memory.SuggestionKind.SMALLER_KV_TYPE not in refused(ask(free))
    sizes = {"q4": ("q4_k_m", 4_900_000_000), "q2": ("q2_k", 3_200_000_000), "f16": ("f16", 1 << 34)}
    others = [memory.Alternative(name, *size) for name, size in sizes.items()]
    other = refused(ask(NEEDED - 3_000_000_000, alternatives=others))[memory.SuggestionKind.OTHER_QUANTIZATION]
    assert other.change == {"modelId": "q4", "quantization": "q4_k_m"}
    assert other.required_bytes == NEEDED - 8_540_000_000 + 4_900_000_000
    loaded = [("small", 1 << 30), ("middle", 3 << 30), ("large", 6 << 30), ("unknown", 0)]
    for missing, evicted in ((2 << 30, ["middle"]), (7 << 30, ["small", "large"])):
        assert refused(ask(NEEDED - missing, loaded=loaded))[memory.SuggestionKind.EVICT].change == {"evict": evicted}
    assert memory.SuggestionKind.EVICT not in refused(ask(NEEDED - (11 << 30), loaded=loaded))
    assert memory.SuggestionKind.EVICT not in refused(ask(NEEDED - 1, budget_bytes=NEEDED - 1, loaded=[("other", 1 << 40)]))


@examples(25)
@given(
    free=st.integers(0, NEEDED + 1), context=st.integers(1, 40_000), slots=st.integers(1, 9),
    sizes=st.lists(st.integers(0, NEEDED), max_size=20),
)  # fmt: skip
def test_every_suggestion_is_enough_by_itself(free: int, context: int, slots: int, sizes: list[int]) -> None:
    loaded = [(f"m{index}", size) for index, size in enumerate(sizes)]
    verdict = ask(free, context_tokens=context, slots=slots, kv_types=tuple(CACHE_TYPES), loaded=loaded)
    needed = memory.estimate(LLAMA_8B, context_tokens=context, slots=slots, overhead_bytes=100 * MIB).total_bytes
    if verdict is None:
        assert needed <= free
        return
    assert verdict.required_bytes == needed > free
    for suggestion in verdict.suggestions:
        change: dict[str, Any] = suggestion.change
        freed, kv_type = sum(size for name, size in loaded if name in change.get("evict", ())), change.get("kvType", "f16")
        again = memory.estimate(
            LLAMA_8B, context_tokens=change.get("maxContextLength", context), slots=change.get("slots", slots),
            type_k=kv_type, type_v=kv_type, overhead_bytes=100 * MIB,
        )  # fmt: skip
        assert again.total_bytes == suggestion.required_bytes <= free + freed
        assert suggestion.text.endswith(".")


MAX_BYTES = 8 << 20
HEADER, DATA_BYTES = gguf_bytes(LLAMA, LLAMA_TENSORS)
GGUF = HEADER + bytes(DATA_BYTES)
TENSORS = safetensors_bytes({"a": ("F16", (4, 4), 32), "b": ("I8", (8,), 8)})
SMALL = {
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


def read_anyhow(path: Path) -> memory.ModelShape | None:
    """Return the shape, or None for a file that is refused; any other exception fails the test."""
    try:
        shape = read_shape(path)
    except CorruptModel:
        return None
    assert memory.estimate(shape, context_tokens=4096, slots=1, overhead_bytes=0).total_bytes >= shape.weights_bytes >= 0
    return shape


@examples(60)
@given(kind=st.sampled_from(["gguf", "safetensors", "ct2"]), changes=edits, cut=cuts)
def test_a_tampered_file_is_read_or_refused(folder: Path, kind: str, changes: list[tuple[int, bytes]], cut: int | None) -> None:
    if kind == "gguf":
        model = path = folder / "m.gguf"
        path.write_bytes(GGUF)
        changes = [(position % len(HEADER), data) for position, data in changes]
    elif kind == "safetensors":
        model = write_folder(folder / "hf", SMALL)
        path = model / "model.safetensors"
        path.write_bytes(TENSORS)
    else:
        model = write_ct2(folder / "ct2")
        path = model / "model.bin"
    raw = damage(path.read_bytes(), changes, cut)
    path.write_bytes(raw)
    shape = read_anyhow(model)
    assert shape is None or kind == "ct2" or shape.weights_bytes <= len(raw)


@examples(25)
@given(field=st.sampled_from(sorted(SMALL)), value=values)
def test_a_configuration_with_any_value_in_a_field_is_read_or_refused(folder: Path, field: str, value: object) -> None:
    model = folder / "config"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(SMALL | {field: value}, allow_nan=True))
    (model / "model.safetensors").write_bytes(TENSORS)
    read_anyhow(model)


HUGE = (1 << 63) - 1
START = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
KEY = struct.pack("<Q", 1) + b"k"


@pytest.mark.parametrize(
    "raw",
    [
        b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), START + struct.pack("<Q", HUGE),
        START + KEY + struct.pack("<IQ", 8, HUGE), START + KEY + struct.pack("<IIQ", 9, 8, HUGE),
        START + KEY + struct.pack("<IIQ", 9, 8, 1 << 16), START + KEY + struct.pack("<IIQ", 9, 12, HUGE),
        START + KEY + struct.pack("<IIQ", 9, 9, HUGE), START + KEY + struct.pack("<IIQQ", 9, 8, 1 << 20, HUGE),
        START + KEY + struct.pack("<IIQQ", 9, 8, 2, 1 << 29), START + KEY + struct.pack("<IIQQ", 9, 8, 1 << 23, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + KEY + struct.pack("<I", 0xFFFFFFFF),
        b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + KEY + struct.pack("<I4QIQ", 4, HUGE, HUGE, HUGE, HUGE, 0, 0),
        struct.pack("<Q", 1 << 32),
    ],
)  # fmt: skip
def test_numbers_made_to_exhaust_memory_are_refused_cheaply(folder: Path, raw: bytes) -> None:
    model = path = folder / "huge.gguf"
    if not raw.startswith(b"GGUF"):
        model = write_folder(folder / "large", SMALL)
        path = model / "model.safetensors"
    with path.open("wb") as file:
        file.write(raw)
        file.truncate(1 << 33)  # a hole of 8 GiB, so that the end of the file is not what stops it
    tracemalloc.start()
    try:
        with pytest.raises(CorruptModel):
            read_shape(model)
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
