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


@pytest.mark.parametrize("text", ["m", "org/name", "Qwen/Qwen2.5-0.5B_x", "a/b/c/d.gguf", "x" * 200])
def test_names_and_relative_paths_are_model_ids(text: str) -> None:
    assert "/".join(check_model_id(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "/etc", "..", "a/../b", "a..b", "a//b", "a/", "/a", "a\\b", "a b", "a\nb", "a\0b", "~/a", "-rf", "a/-x", ".hidden",
     "a/.hidden", "$(x)", "a;b", "a|b", "a`b", "ä", "x" * 201, "a/./b", "%2e%2e/a", "a?b", "a*b", "a'b"],
)  # fmt: skip
def test_everything_else_is_refused(base: Path, text: str) -> None:
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


def test_a_model_that_is_not_there_is_unknown(base: Path) -> None:
    (base / "empty").mkdir()
    library = make_library(base)

    assert library.find("org/none") is None
    assert library.find("empty") is None
    with pytest.raises(UnknownModel):
        library.resolve("org/none")
    with pytest.raises(UnknownModel):
        make_library(None).resolve("x")


def test_a_split_gguf_appears_once_and_any_part_leads_to_the_first(base: Path) -> None:
    first = write_gguf(base / "m-00001-of-00002.gguf", LLAMA, LLAMA_TENSORS[:1])
    second = write_gguf(base / "m-00002-of-00002.gguf", {"split.no": 1}, LLAMA_TENSORS[1:])
    library = make_library(base)

    assert list(found(library)) == ["m-00001-of-00002"]
    assert found(library)["m-00001-of-00002"].size_bytes == first.stat().st_size + second.stat().st_size
    assert library.resolve("m-00002-of-00002") == first


def test_a_folder_with_several_quantisations_asks_which(base: Path) -> None:
    write_gguf(base / "org" / "m-Q4.gguf")
    write_gguf(base / "org" / "m-Q8.gguf")
    write_gguf(base / "org" / "mmproj-m.gguf")

    with pytest.raises(InvalidRequest, match="holds several models; add one of these after a slash: m-Q4, m-Q8"):
        make_library(base).resolve("org")


def test_a_damaged_model_is_listed_with_what_is_wrong(base: Path) -> None:
    path = write_gguf(base / "broken.gguf")
    path.write_bytes(path.read_bytes()[:-10])
    entry = found(make_library(base))["broken"]

    assert entry.problem is not None
    assert entry.problem.startswith("broken.gguf is damaged")
    assert (entry.backend, entry.size_bytes) == ("gguf", path.stat().st_size)


def test_pickles_are_listed_and_refused_with_the_reason(base: Path) -> None:
    folder = write_folder(base / "old", CONFIG)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    library = make_library(base)

    assert "pickle" in (found(library)["old"].problem or "")
    with pytest.raises(InvalidRequest, match=r"only pickle weights .* convert them to safetensors or GGUF"):
        library.resolve("old")


def test_pickles_beside_safetensors_do_no_harm(base: Path) -> None:
    folder = write_folder(base / "both", CONFIG)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")

    assert make_library(base).resolve("both") == folder


def test_parts_of_pipelines_and_adapters_are_no_models(base: Path) -> None:
    (write_folder(base / "lora", CONFIG) / "adapter_config.json").write_text("{}")
    write_folder(base / "pipeline" / "unet", CONFIG)
    (base / "pipeline" / "model_index.json").write_text("{}")
    write_folder(base / "sentences", CONFIG)
    write_folder(base / "sentences" / "1_Pooling", CONFIG)

    assert list(found(make_library(base))) == ["sentences"]


def test_a_name_that_makes_no_id_is_listed_with_the_advice_to_rename_it(base: Path) -> None:
    write_gguf(base / "my model.gguf")

    assert "rename it" in (found(make_library(base))["my model"].problem or "")


def test_links_inside_the_base_are_followed_to_files_and_never_out_of_it(tmp_path: Path, base: Path) -> None:
    outside = write_gguf(tmp_path / "outside.gguf")
    inside = write_gguf(base / "real.gguf")
    (base / "alias.gguf").symlink_to(inside)
    (base / "leak.gguf").symlink_to(outside)
    (base / "out").symlink_to(tmp_path)
    library = make_library(base)

    assert library.resolve("alias") == inside
    assert library.find("leak") is None
    assert library.find("out/outside") is None
    assert "leads out" in (found(library)["leak"].problem or "")
    assert set(found(library)) == {"real", "alias", "leak"}


@pytest.mark.parametrize("model_id", ["org/m-00001-of-00002", "org/m-00002-of-00002", "org"])
def test_a_part_of_a_split_gguf_that_leads_out_is_refused(tmp_path: Path, base: Path, model_id: str) -> None:
    write_gguf(base / "org" / "m-00001-of-00002.gguf")
    (base / "org" / "m-00002-of-00002.gguf").symlink_to(write_gguf(tmp_path / "outside.gguf"))
    library = make_library(base)

    if model_id.endswith("2-of-00002"):
        assert library.find(model_id) is None
    else:
        with pytest.raises(InvalidRequest, match=r"m-00002-of-00002\.gguf is no regular file, or a link that leads out"):
            library.resolve(model_id)
    assert "leads out" in (found(library)["org/m-00001-of-00002"].problem or "")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_model_folder_with_a_file_that_leads_out_is_refused(tmp_path: Path, base: Path, name: str) -> None:
    folder = write_folder(base / "m", CONFIG)
    secret = tmp_path / "secret"
    if (folder / name).exists():
        (folder / name).rename(secret)
    else:
        secret.write_text("secret")
    (folder / name).symlink_to(secret)
    library = make_library(base)

    with pytest.raises(InvalidRequest, match=f"refused: {name} is no regular file, or a link that leads out"):
        library.resolve("m")
    assert "leads out" in (found(library)["m"].problem or "")


def test_pipes_and_circles_of_links_are_not_opened(base: Path) -> None:
    os.mkfifo(base / "pipe.gguf")
    (base / "circle.gguf").symlink_to(base / "circle.gguf")
    library = make_library(base)

    assert library.find("pipe") is None
    assert library.find("circle") is None
    assert all("no regular file" in (entry.problem or "") for entry in library.discover())
    assert len(library.discover()) == 2


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
    assert [entry.model_id for entry in library.discover()] == ["a"]


def test_a_tree_that_is_too_deep_is_not_walked_to_its_end(base: Path) -> None:
    write_gguf(base.joinpath(*"abcdef") / "near.gguf")
    write_gguf(base.joinpath(*"abcdefgh") / "far.gguf")

    assert list(found(make_library(base))) == ["a/b/c/d/e/f/near"]


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


def test_snapshots_in_the_cache_are_found_by_repository_and_their_links_are_followed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    snapshot = make_snapshot(home, "org/hf", COMMIT, write_folder(tmp_path / "source", CONFIG))
    gguf = make_snapshot(home, "org/one-gguf", COMMIT, write_gguf(tmp_path / "x-Q8.gguf"))
    library = make_library(None, home)

    assert {name: (entry.path, entry.backend) for name, entry in found(library).items()} == {
        "org/hf": (snapshot, "vllm"), "org/one-gguf": (gguf / "x-Q8.gguf", "gguf")
    }  # fmt: skip
    assert library.resolve("org/hf") == snapshot
    assert library.resolve("org/one-gguf") == library.resolve("org/one-gguf/x-Q8") == gguf / "x-Q8.gguf"


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


def test_a_snapshot_with_a_missing_blob_is_listed_as_incomplete(tmp_path: Path) -> None:
    home = tmp_path / "home"
    snapshot = make_snapshot(home, "org/m", COMMIT, write_folder(tmp_path / "source", CONFIG))
    (snapshot / "model.safetensors").resolve().unlink()
    library = make_library(None, home)

    assert found(library)["org/m"].problem is not None


def test_a_cache_below_the_base_is_not_listed_twice_and_the_owners_folder_wins(base: Path) -> None:
    home = base / "cache"
    mine = write_folder(base / "org" / "both", CONFIG)
    make_snapshot(home, "org/both", COMMIT, mine)
    make_snapshot(home, "org/cached", COMMIT, mine)
    library = make_library(base, home)

    assert list(found(library)) == ["org/both", "org/cached"]
    assert found(library)["org/both"].path == library.resolve("org/both") == mine


@pytest.mark.parametrize(
    "model_id",
    ["meta/Llama-3.1-8B-Instruct", "x/Llama-3.1-8B-Instruct-AWQ", "Llama-3.1-8B-Instruct-Q4_K_M", "llama-3.1-8b-instruct.Q8_0",
     "z/Llama-3.1-8B-Instruct-GGUF/Llama-3.1-8B-Instruct-UD-IQ2_XXS-00001-of-00003", "Llama-3.1-8B-Instruct-GPTQ-Int4",
     "Llama-3.1-8B-Instruct-bf16", "Llama-3.1-8B-Instruct_FP8-Dynamic", "Llama-3.1-8B-Instruct-exl3-4.0bpw",
     "Llama-3.1-8B-Instruct-4bit", "Llama-3.1-8B-Instruct-w4a16"],
)  # fmt: skip
def test_the_ways_of_naming_a_quantisation_do_not_count(model_id: str) -> None:
    assert name_without_quantization(model_id) == "llama-3.1-8b-instruct"


@pytest.mark.parametrize("model_id", ["Llama-3.1-70B-Instruct-Q4_K_M", "Llama-3.1-8B-Q4_K_M", "Llama-3-8B-Instruct", "Q4_0"])
def test_another_model_stays_another_model(model_id: str) -> None:
    assert name_without_quantization(model_id) != "llama-3.1-8b-instruct"
    assert name_without_quantization(model_id)


def make_found(model_id: str, size_bytes: int, *, problem: str | None = None, quantization: str | None = "q") -> FoundModel:
    return FoundModel(model_id, Path("/m") / model_id, "gguf", size_bytes, quantization, problem)


def test_usable_ones_are_returned_largest_first_without_the_model_itself() -> None:
    found = [
        make_found("m-Q4_0", 4), make_found("m-Q8_0", 8), make_found("m-F16", 16), make_found("m-Q2_K", 2, problem="damaged"),
        make_found("other-Q4_0", 4), make_found("m", 20, quantization=None),
    ]  # fmt: skip

    assert [entry.model_id for entry in other_quantizations("m-F16", found)] == ["m-Q8_0", "m-Q4_0"]
