"""The catalogue that the product brings, and the arithmetic by which a model of it fits on a node or does not."""

from __future__ import annotations

import re
import uuid
from datetime import date
from typing import Any

import pytest

from gateway.services.catalogue import (
    ENGINES,
    CatalogueFile,
    CatalogueModel,
    Fit,
    ModelKind,
    Wanted,
    judge_room,
    judge_rooms,
    list_entries,
    read_catalogue,
    want_file,
)
from nodes.operations.load import Room
from wire import clock

LISTED = read_catalogue()
FILES = [(model, file) for model in LISTED.models for file in model.files]
HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(/[\w.-]+\.(gguf|safetensors))?", re.ASCII)
BITS = {
    "Q4_K_M": (4.5, 6.6), "Q4_K_XL": (4.3, 6.0), "Q8_0": (8.4, 9.2), "BF16": (15.9, 16.3), "F16": (15.9, 16.6),
    "MXFP4": (4.2, 5.6), "F32": (30.0, 34.0), "FP8": (8.0, 8.5),
}  # fmt: skip
"""What a parameter takes in each form; embeddings of small models are stored finer than the rest."""
GIB = 1024


@pytest.mark.parametrize(("model", "file"), FILES, ids=[file.hub for _model, file in FILES])
def test_a_file_of_the_catalogue_has_an_id_a_hub_can_have_and_a_size_its_parameters_explain(
    model: CatalogueModel, file: CatalogueFile
) -> None:
    least, most = BITS[file.quantization]
    assert HUB.fullmatch(file.hub), "org/name, or org/name/file"
    assert file.hub.endswith(".gguf") is (file.backend == "gguf")
    assert file.backend in ENGINES
    assert file.revision
    assert least <= 8 * file.size_bytes / model.parameters <= most
    # The formula of a cache with keys and values of 16 bits, and nothing for models that keep none.
    need = model.estimate(file, context_tokens=1, has_gpu=True)
    assert need.kv_bytes >= 0
    assert need.total_mb >= file.size_bytes // 2**20


def test_the_catalogue_names_each_model_and_each_file_once_and_says_its_day() -> None:
    assert len({model.slug for model in LISTED.models}) == len(LISTED.models) >= 25
    assert len({file.hub for _model, file in FILES}) == len(FILES)
    assert {model.kind for model in LISTED.models} == set(ModelKind)
    assert date(2026, 11, 1) <= LISTED.listed_on <= clock.now().date()
    assert all(model.licence and model.family for model in LISTED.models)
    assert [model.name for model in LISTED.models if model.context_tokens is None] == [
        model.name for model in LISTED.models if model.kind is ModelKind.IMAGE
    ]


def test_the_cache_of_a_model_grows_with_its_context_up_to_its_windows() -> None:
    (qwen, file), (gemma, other) = LISTED.find("Qwen/Qwen3-8B") or pytest.fail("it is listed"), next(
        (model, model.files[0]) for model in LISTED.models if model.name == "Gemma 3 1B"
    )  # fmt: skip
    # 36 layers, 8 heads of 128 numbers, keys and values of two bytes.
    assert qwen.estimate(file, context_tokens=1000, has_gpu=True).kv_bytes == 1000 * 36 * 2 * 8 * 128 * 2
    short, long = (gemma.estimate(other, context_tokens=tokens, has_gpu=True).kv_bytes for tokens in (512, 32_768))
    assert long < short * 64 / 4, "most of its layers forget"


def make_room(name: str = "rack-1", **changes: Any) -> Room:
    said: dict[str, Any] = {
        "node_id": uuid.UUID(int=1), "node": name, "runner_id": name, "refusal": "", "is_away": False, "keeps": True,
        "has_gpu": True, "total_mb": 24 * GIB, "free_mb": 16 * GIB, "gpus": 1, "one_gpu_mb": 16 * GIB, "loaded": (),
    }  # fmt: skip
    return Room(**(said | changes))


ROOMS: dict[Fit, tuple[dict[str, Any], str]] = {
    Fit.FITS: ({}, "Needs 15.0 GiB of 16.0 GiB free."),
    Fit.FULL: ({"free_mb": 10 * GIB}, "Needs 15.0 GiB; rack-1 has 10.0 GiB free."),
    Fit.NEVER: ({"total_mb": 12 * GIB, "free_mb": 12 * GIB}, "Needs 15.0 GiB; rack-1 has 12.0 GiB in all."),
    Fit.SPLIT: ({"gpus": 2, "one_gpu_mb": 8 * GIB}, "Needs 15.0 GiB; no GPU of rack-1 has more than 8.0 GiB free."),
    Fit.UNKNOWN: ({"total_mb": None, "free_mb": None}, "rack-1 does not say how much memory it has."),
}  # fmt: skip


@pytest.mark.parametrize("fit", ROOMS, ids=lambda fit: fit.value)
def test_a_node_that_has_no_room_is_told_with_the_reason(fit: Fit) -> None:
    changes, reason = ROOMS[fit]
    found = judge_room(make_room(**changes), Wanted(int(15.04 * GIB), 1))
    assert (found.fit, found.reason.replace("\xa0", " ").replace(".0 GiB", " GiB")) == (fit, reason.replace(".0 GiB", " GiB"))


def test_what_would_have_to_go_is_named_and_only_when_it_is_enough() -> None:
    loaded = (("small", 1 * GIB), ("large", 6 * GIB))
    assert judge_room(make_room(free_mb=10 * GIB, loaded=loaded), Wanted(15 * GIB, 1)).frees == ("large",)
    assert judge_room(make_room(free_mb=3 * GIB, loaded=loaded), Wanted(15 * GIB, 1)).frees == ()


def test_a_node_without_a_gpu_is_asked_for_less_or_refuses_what_needs_one() -> None:
    host = make_room(has_gpu=False, gpus=0, one_gpu_mb=None, free_mb=8 * GIB)
    assert judge_room(host, Wanted(9 * GIB, 7 * GIB)).fit is Fit.FITS
    assert judge_room(host, Wanted(1, None)).reason == "Needs a GPU; rack-1 has none."
    model, file = LISTED.find("Qwen/Qwen3-8B") or pytest.fail("it is listed")
    assert want_file(model, file, context_tokens=100).on_host_mb is None


def test_nodes_that_can_come_before_those_that_cannot() -> None:
    rooms = [
        make_room("away", is_away=True, refusal="away is offline."), make_room("full", free_mb=1), make_room("fits"),
        make_room("roomy", free_mb=20 * GIB),
    ]  # fmt: skip
    found = judge_rooms(rooms, Wanted(15 * GIB, 1))
    assert [one.room.node for one in found] == ["roomy", "fits", "full", "away"]
    assert [one.is_possible for one in found] == [True, True, False, False]


def test_the_catalogue_is_searched_by_words_kind_licence_and_room() -> None:
    rooms = [make_room(free_mb=6 * GIB)]
    assert {entry.model.kind for entry in list_entries(rooms, kind="embedding")} == {ModelKind.EMBEDDING}
    assert {entry.model.name for entry in list_entries(rooms, text="qwen3 8b gguf")} == {"Qwen3 8B"}
    assert all(entry.model.is_open for entry in list_entries(rooms, licence="open"))
    assert {entry.model.licence for entry in list_entries(rooms, licence="Gemma")} == {"Gemma"}
    fitting = list_entries(rooms, fits_only=True)
    assert fitting
    assert all(entry.fits for entry in fitting)
    assert not any(entry.model.name == "Llama 3.3 70B Instruct" for entry in fitting)
    assert list_entries([make_room(is_away=True)], fits_only=True) == []
    (entry,) = list_entries(rooms, text="Qwen3 8B", kind="chat", licence="Apache-2.0")[:1]
    assert [(listed.file.quantization, listed.fits_on) for listed in entry.files] == [("Q4_K_M", 0), ("Q8_0", 0), ("BF16", 0)]
