"""The models in a node's folders: which ids lead where, and nothing leads out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import InvalidRequest, UnknownModel
from runner.fit import ModelShape, read_shape
from runner.library import FoundModel, Library, check_model_id, other_quantizations
from runner.library.quantizations import name_without_quantization
from tests.fakes.examples import examples
from tests.fakes.model_files import LLAMA, LLAMA_TENSORS, write_ct2, write_folder, write_gguf

CONFIG = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
COMMIT = "a" * 40


class CountingReader:
    """Reads headers, and remembers of which files."""

    def __init__(self) -> None:
        self.read: list[str] = []

    def __call__(self, path: Path) -> ModelShape:
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


def age(*paths: Path) -> None:
    """Let files and folders look as if they had not been changed for a while."""
    for path in paths:
        os.utime(path, (1_700_000_000, 1_700_000_000))


@pytest.mark.parametrize(
    "text",
    ["", "/etc", "..", "a/../b", "a..b", "a//b", "a/", "/a", "a\\b", "a b", "a\nb", "a\0b", "~/a", "-rf", "a/-x", ".hidden",
     "a/.hidden", "$(x)", "a;b", "a|b", "a`b", "ä", "x" * 201, "a/./b", "%2e%2e/a", "a?b", "a*b", "a'b"],
)  # fmt: skip
def test_everything_else_is_refused(base: Path, text: str) -> None:
    for good in ("m", "org/name", "Qwen/Qwen2.5-0.5B_x", "a/b/c/d.gguf", "x" * 200):
        assert "/".join(check_model_id(good)) == good
    with pytest.raises(InvalidRequest):
        make_library(base).resolve(text)


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
    assert {name: library.resolve(name) for name in found(library)} == {
        name: entry.path for name, entry in found(library).items()
    }
    assert found(library)["a"] == FoundModel("a", base / "a.gguf", "gguf", (base / "a.gguf").stat().st_size, "q8_0")
    assert library.resolve("a.gguf") == base / "a.gguf"
    assert library.resolve("org") == base / "org" / "b-Q8.gguf"  # the only one in it


def test_an_id_that_leads_to_nothing_to_a_part_or_to_several_models_is_answered_as_such(base: Path) -> None:
    (base / "empty").mkdir()
    first = write_gguf(base / "m-00001-of-00002.gguf", LLAMA, LLAMA_TENSORS[:1])
    second = write_gguf(base / "m-00002-of-00002.gguf", {"split.no": 1}, LLAMA_TENSORS[1:])
    library = make_library(base)
    assert (library.find("org/none"), library.find("empty")) == (None, None)
    for missing in (library, make_library(None)):
        with pytest.raises(UnknownModel):
            missing.resolve("org/none")
    assert list(found(library)) == ["m-00001-of-00002"]
    assert found(library)["m-00001-of-00002"].size_bytes == first.stat().st_size + second.stat().st_size
    assert library.resolve("m-00002-of-00002") == first
    for name in ("m-Q4", "m-Q8", "mmproj-m"):
        write_gguf(base / "org" / f"{name}.gguf")
    with pytest.raises(InvalidRequest, match="holds several models; add one of these after a slash: m-Q4, m-Q8"):
        library.resolve("org")


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
        library.resolve("old")
    assert library.resolve("both") == both


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
    assert library.resolve("alias") == inside
    for name in ("leak", "out/outside", "pipe", "circle", "org/m-00002-of-00002"):
        assert library.find(name) is None
    for name in ("org/m-00001-of-00002", "org"):
        with pytest.raises(InvalidRequest, match=r"m-00002-of-00002\.gguf is no regular file, or a link that leads out"):
            library.resolve(name)
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
        library.resolve("m")
    assert "leads out" in (found(library)["m"].problem or "")


def test_what_has_not_changed_is_not_read_again(base: Path) -> None:
    paths = [write_gguf(base / "a.gguf"), write_gguf(base / "sub" / "b.gguf")]
    age(*paths, base / "sub", base)
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
    assert library.resolve("org/one-gguf") == library.resolve("org/one-gguf/x-Q8") == gguf / "x-Q8.gguf"
    mine, both = write_folder(base / "org" / "hf", CONFIG), make_library(base, home)
    assert list(found(both)) == ["org/hf", "org/one-gguf"], "a cache below the base is not listed twice"
    assert found(both)["org/hf"].path == both.resolve("org/hf") == mine
    (snapshot / "model.safetensors").resolve().unlink()
    assert found(library)["org/hf"].problem is not None, "its blob is missing"


def test_the_revision_chooses_among_commits_and_main_goes_first(tmp_path: Path) -> None:
    home = tmp_path / "home"
    source = write_folder(tmp_path / "source", CONFIG)
    old, new = (make_snapshot(home, "org/m", letter * 40, source) for letter in "bc")
    library = make_library(None, home)
    set_ref(old, "main")
    set_ref(new, "v2")
    assert library.resolve("org/m") == old
    assert library.resolve("org/m", revision="v2") == new
    assert library.resolve("org/m", revision="c" * 40) == new
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
        library.resolve("org/m")
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
