"""What a model needs, edited as one document, and which GPUs can run it: by vendor, capability, memory and what is free."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from gateway.models import Model
from gateway.services.compatibility import (
    Quality,
    Source,
    change_model_requirements,
    explain_misfit,
    find_fits,
    judge_gpu,
    print_document,
    read_document,
    read_requirements,
    update_exclusions,
)
from gateway.services.errors import InvalidValue, ModelNotFound
from gateway.services.models import allow_model
from governance.admin_tokens import create_admin_token
from nodes.operations.load import MODEL_LOAD
from nodes.operations.targets import list_targets
from nodes.services.availability import read_served_models
from nodes.services.gpus import GpuFacts, follow_gpus
from nodes.services.sessions import load_node_rows
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, audited, make_node, make_presence
from wire.contract import NodeStatus

pytestmark = pytest.mark.django_db

CODER = "deepseek-coder-6.7b-instruct"
SEED: dict[str, Any] = {
    "model": CODER,
    "requirements": {
        "min_vram_mb": 4500,
        "quantizations": {
            "q4_k_m": {"vram_mb": 5500, "quality": "good"},
            "q5_k_m": {"vram_mb": 6500, "quality": "better"},
            "f16": {"vram_mb": 14000, "quality": "best"},
        },
        "compute_capability": {"nvidia": "7.0+", "amd": "gfx1030+", "apple": "m1+"},
    },
}


def gpu(vram_mb: int | None, free_mb: int | None = None, vendor: str = "nvidia", capability: str = "8.9") -> GpuFacts:
    return GpuFacts(
        gpu_id=uuid.uuid4(), node_id=uuid.uuid4(), node_name="box", index=0, vendor=vendor, model="card", vram_mb=vram_mb,
        vram_free_mb=free_mb, compute_capability=capability, status=NodeStatus.AVAILABLE, models=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "best", "quality", "now"),
    [
        (gpu(24_576, 24_000), "f16", Quality.BEST, "f16"),
        (gpu(24_576, 6_000), "f16", Quality.BEST, "q4_k_m"),
        (gpu(24_576, 4_600), "f16", Quality.BEST, None),
        (gpu(24_576), "f16", Quality.BEST, None),
        (gpu(8_192, 8_192), "q5_k_m", Quality.BETTER, "q5_k_m"),
        (gpu(6_499, 6_499), "q4_k_m", Quality.GOOD, "q4_k_m"),
        (gpu(16_384, 0, "amd", "gfx1100"), "f16", Quality.BEST, None),
        (gpu(16_384, 0, "apple", "M2"), "f16", Quality.BEST, None),
    ],
)
def test_a_gpu_runs_the_best_that_its_memory_holds(facts: GpuFacts, best: str, quality: Quality, now: str | None) -> None:
    fit = judge_gpu(facts, CODER, read_document(json.dumps(SEED), model=CODER))
    assert (fit.can_run, fit.quantization, fit.quality, fit.now, fit.fits_now) == (True, best, quality, now, now is not None)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (gpu(24_576, capability="6.1"), "it needs nvidia 7.0+, and this is 6.1"),
        (gpu(24_576, vendor="amd", capability="gfx90a"), "it needs amd gfx1030+, and this is gfx90a"),
        (gpu(24_576, vendor="intel", capability=""), "it needs a GPU of nvidia or amd or apple"),
        (gpu(5_499), "it needs 5,500 MiB, and this has 5,499"),
        (gpu(None), "the node does not say how much memory it has"),
    ],
)
def test_a_gpu_that_cannot_run_it_says_why(facts: GpuFacts, reason: str) -> None:
    fit = judge_gpu(facts, CODER, read_document(json.dumps(SEED), model=CODER))
    assert (fit.can_run, fit.fits_now, fit.quantization, fit.reason) == (False, False, None, reason)


@pytest.mark.parametrize(
    ("wanted", "has", "can_run"),
    [("7.0+", "10.0", True), ("7.5", "7.5", True), ("7.5", "8.0", False), ("8+", "8.0", True), ("8.0+", "", True)],
)
def test_capabilities_are_compared_as_numbers_and_an_unknown_one_is_not_held_against_a_gpu(
    wanted: str, has: str, can_run: bool
) -> None:
    document = {"model": "m", "requirements": {"min_vram_mb": 100, "compute_capability": {"NVIDIA": wanted}}}
    fit = judge_gpu(gpu(1_000, 50, capability=has), "m", read_document(json.dumps(document), model="m"))
    assert fit.can_run is can_run
    assert ("does not say" in fit.reason) is (not has)


def test_the_document_of_the_design_is_kept_as_it_was_written() -> None:
    allow_model(name=CODER, actor=ACTOR)
    model = change_model_requirements(name=CODER, document=json.dumps(SEED), actor=ACTOR)
    source, needed = read_requirements(model)
    assert source is Source.DOCUMENT
    assert needed is not None
    assert json.loads(print_document(CODER, needed)) == SEED
    change_model_requirements(name=CODER, document=json.dumps(SEED), actor=ACTOR)
    assert len(audited("model.requirements")) == 1, "the same again is no change"
    change_model_requirements(name=CODER, document=" ", actor=ACTOR)
    assert Model.objects.get(name=CODER).requirements is None
    with pytest.raises(ModelNotFound):
        change_model_requirements(name="other", document="", actor=ACTOR)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min_vram_mb": 0}, "min_vram_mb"),
        ({"min_vram_mb": 2**40}, "min_vram_mb: at most"),
        ({"min_vram_mb": "4500"}, "min_vram_mb"),
        ({"min_vram_mb": None}, "min_vram_mb"),
        ({"quantizations": {"q4": {"vram_mb": -1}}}, "vram_mb"),
        ({"quantizations": {"q4": {"vram_mb": 1, "quality": "superb"}}}, "superb"),
        ({"quantizations": {"": {"vram_mb": 1}}}, "printable"),
        ({"quantizations": {f"q{number}": {"vram_mb": 1} for number in range(33)}}, "at most 32"),
        ({"compute_capability": {"nvidia": "seven"}}, "write it like 7.0+"),
        ({"compute_capability": {"amd": "7.0+"}}, "write it like gfx1030+"),
        ({"compute_capability": {"cerebras": "1+"}}, "the vendors are nvidia, amd, apple"),
        ({"vram": 1}, "vram"),
    ],
)
def test_a_document_that_cannot_be_used_says_what_is_wrong(change: dict[str, Any], words: str) -> None:
    document = {"model": CODER, "requirements": {**SEED["requirements"], **change}}
    with pytest.raises(InvalidValue) as refused:
        read_document(json.dumps(document), model=CODER)
    assert words in str(refused.value)
    assert refused.value.param == "requirements"


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", "[" * 100_000, '{"model": "other", "requirements": {"min_vram_mb": 1}}', "x" * 20_000]
)
def test_what_is_no_document_of_the_model_is_refused(text: str) -> None:
    with pytest.raises(InvalidValue):
        read_document(text, model=CODER)


def test_a_gpu_whose_node_has_the_model_loaded_can_run_it_whatever_it_needs() -> None:
    assert judge_gpu(replace(gpu(None), models=(CODER,)), CODER, None).can_run
    fit = judge_gpu(gpu(24_576), CODER, None)
    assert (fit.can_run, fit.reason) == (False, "nobody knows what the model needs")


def test_a_proposal_to_load_says_why_no_gpu_of_the_node_can_run_the_model() -> None:
    allow_model(name=CODER, actor=ACTOR)
    node = make_node(runner_id="rig", op_level="L1")
    named = [{"index": index, "name": "NVIDIA L4", "memory_total_mb": mb} for index, mb in enumerate((4_000, 6_000))]
    make_presence(node, gpus=named)
    follow_gpus()

    def judge(**params: str) -> list[str]:
        target = next(target for target in list_targets() if target.node.pk == node.pk)
        return [impact.text for impact in MODEL_LOAD.judge(target, {"modelId": CODER, **params}, "rig")]

    assert not [text for text in judge() if "No GPU" in text], "nobody said what it needs"
    change_model_requirements(name=CODER, document=json.dumps(SEED), actor=ACTOR)
    assert not [text for text in judge(quantization="q4_k_m") if "No GPU" in text]
    assert judge(quantization="f16")[0] == f"No GPU of box can run {CODER}: it needs 14,000 MiB, and this has 6,000."


def test_without_a_document_what_nodes_measured_counts() -> None:
    allow_model(name="tiny", actor=ACTOR)
    assert find_fits("tiny").source is Source.UNKNOWN
    replica = {"model": "tiny", "state": "loaded", "memory_mb": 700}
    facts = {"name": "tiny", "estimate_mb": 1_800, "estimate_replicas": 2}
    make_presence(make_node("a"), replicas=[replica], memory={"models": [facts, {"name": "other", "estimate_mb": 9_999}]})
    make_presence(make_node("b"), replicas=[], memory=None, gpus=[{"index": 0, "name": "NVIDIA L4", "memory_total_mb": 1_000}])
    make_presence(make_node("c"), replicas={}, memory=[], gpus=[{"index": 0, "name": "NVIDIA T4", "memory_total_mb": 800}])
    follow_gpus()
    found = find_fits("tiny")
    assert found.source is Source.MEASURED
    assert found.requirements is not None
    assert found.requirements.min_vram_mb == 900
    assert [(fit.gpu.node_name, fit.can_run) for fit in found.fits] == [("b", True), ("c", False)]


def test_a_model_that_a_node_runs_on_its_cpu_is_not_judged_by_its_gpus() -> None:
    allow_model(name=CODER, actor=ACTOR)
    small = [{"index": 0, "name": "NVIDIA T400", "memory_total_mb": 2_000}]
    replica = {"model": CODER, "state": "loaded", "memory_mb": 7_000, "device": "cpu"}
    set_up = {"name": CODER, "estimate_mb": 7_000, "estimate_replicas": 1, "device": "cpu"}
    make_presence(make_node("runs", model_names=[CODER]), gpus=small, replicas=[replica])
    node = make_node("could", runner_id="rig", op_level="L1")
    make_presence(node, gpus=small, memory={"models": [set_up]})
    make_presence(make_node("neither"), gpus=small, memory={"models": []})
    follow_gpus()
    assert find_fits(CODER).source is Source.UNKNOWN, "memory of the host says nothing of GPUs"
    change_model_requirements(name=CODER, document=json.dumps(SEED), actor=ACTOR)
    found = {fit.gpu.node_name: (fit.can_run, fit.is_loaded, fit.reason) for fit in find_fits(CODER).fits}
    assert found == {
        "runs": (True, True, "its node runs it on the CPU"), "could": (True, False, "its node runs it on the CPU"),
        "neither": (False, False, "it needs 5,500 MiB, and this has 2,000"),
    }  # fmt: skip
    assert explain_misfit(CODER, node_id=node.pk) == ""
    assert update_exclusions() == 0


def name_gpu(name: str, memory_mb: int, capability: str) -> dict[str, Any]:
    return {"index": 0, "name": name, "memory_total_mb": memory_mb, "compute_capability": capability}


OLD, SMALL = name_gpu("NVIDIA K80", 24_000, "3.7"), name_gpu("NVIDIA T400", 4_000, "7.5")
LARGE = name_gpu("NVIDIA L4", 24_000, "8.9")


@pytest.mark.parametrize(
    ("gpus", "places", "is_excluded"),
    [
        ([OLD], [[]], True),
        ([SMALL], [[]], True),
        ([LARGE], [[]], False),
        ([], [[]], False),
        ([{"index": 0, "name": "card"}], [[]], False),
        ([OLD, LARGE | {"index": 1}], [[]], False),
        ([OLD, LARGE | {"index": 1}], [[0]], True),
        ([OLD, LARGE | {"index": 1}], [[0], [1]], False),
        ([SMALL, SMALL | {"index": 1}], [[0, 1]], False),
        ([SMALL, OLD | {"index": 1}], [[0, 1]], True),
        ([OLD], [[7]], False),
    ],
)
def test_routing_sends_a_model_to_no_node_whose_gpus_its_document_excludes(
    gpus: list[dict[str, Any]], places: list[list[int]], is_excluded: bool
) -> None:
    allow_model(name=CODER, actor=ACTOR)
    node = make_node(model_names=[CODER, "other"])
    make_presence(node, gpus=gpus, replicas=[{"model": CODER, "state": "loaded", "gpus": numbers} for numbers in places])
    follow_gpus()
    assert update_exclusions() == 0, "without a document nothing is excluded"
    change_model_requirements(name=CODER, document=json.dumps(SEED), actor=ACTOR)
    assert (update_exclusions(), update_exclusions()) == (is_excluded, 0)
    (row,) = load_node_rows()
    assert row.excluded == ({CODER} if is_excluded else set())
    assert (CODER in read_served_models()) is not is_excluded
    change_model_requirements(name=CODER, document="", actor=ACTOR)
    assert update_exclusions() == is_excluded
    assert not load_node_rows()[0].excluded


def test_a_change_of_a_document_tells_routing_at_once(django_capture_on_commit_callbacks: Any) -> None:
    allow_model(name=CODER, actor=ACTOR)
    make_presence(make_node(model_names=[CODER]), gpus=[OLD])
    follow_gpus()
    with django_capture_on_commit_callbacks(execute=True):
        change_model_requirements(name=CODER, document=json.dumps(SEED), actor=ACTOR)
    assert load_node_rows()[0].excluded == {CODER}


def test_what_another_release_stored_is_not_known() -> None:
    allow_model(name="tiny", actor=ACTOR)
    Model.objects.update(requirements={"cores": 4})
    assert find_fits("tiny").source is Source.UNKNOWN


def test_a_fleet_costs_two_queries_whatever_it_holds() -> None:
    allow_model(name=CODER, actor=ACTOR)
    change_model_requirements(name=CODER, document=json.dumps(SEED), actor=ACTOR)
    for number in range(5):
        make_presence(make_node(f"n{number}"), gpus=[{"index": index, "name": "L4"} for index in range(4)])
    follow_gpus()
    with CaptureQueriesContext(connection) as queries:
        assert len(find_fits(CODER).fits) == 20
    assert len(queries) == 2


def test_the_page_of_a_model_edits_its_document_and_shows_which_gpus_can_run_it() -> None:
    client = Client()
    client.force_login(get_user_model().objects.create_user("ada", is_staff=True, is_superuser=True))
    model = allow_model(name=CODER, actor=ACTOR)
    page = reverse("admin:gateway_model_change", args=[model.pk]) + "?tab=compatibility"
    assert "No node has measured it" in client.get(page).content.decode()
    make_presence(make_node(), gpus=[{"index": 0, "name": "NVIDIA L4", "memory_total_mb": 8_192, "memory_used_mb": 0}])
    follow_gpus()
    url = reverse("admin:gateway_model_confirm", args=[model.pk, "requirements"])
    refused = client.post(url, {"requirements": "{}"}).content.decode()
    assert "The document cannot be used" in refused
    client.post(url, {"requirements": json.dumps(SEED)})
    shown = client.get(page).content.decode()
    assert "q5_k_m, better" in shown
    assert "its node does not say that it is 7.0+" in shown
    assert "deepseek-coder-6.7b-instruct" in client.get(url).content.decode()
    set_limits(nodes={"gpu_page_default_rows": 1})
    make_presence(make_node("other"), gpus=[{"index": index, "name": "NVIDIA L4"} for index in range(3)])
    follow_gpus()
    assert "And 3 more" in client.get(page).content.decode()


def test_the_api_says_which_gpus_can_run_a_model() -> None:
    _, token = create_admin_token(name="ops", actor=ACTOR)
    allow_model(name=CODER, actor=ACTOR)
    change_model_requirements(name=CODER, document=json.dumps(SEED), actor=ACTOR)
    node = make_node(model_names=[CODER])
    make_presence(node, gpus=[{"index": 0, "name": "NVIDIA L4", "memory_total_mb": 8_192, "memory_used_mb": 2_500}])
    follow_gpus()

    def ask(**query: str) -> tuple[int, Any]:
        answer = Client().get("/api/v1/compatibility", query, headers={"authorization": f"Bearer {token}"})
        return answer.status_code, answer.json()

    status, answer = ask(model=CODER)
    assert (status, answer["requirements_from"], answer["requirements"]) == (200, "document", SEED["requirements"])
    (fit,) = answer["gpus"]
    said = {
        name: fit[name] for name in ("node_id", "can_run", "quantization", "quality", "fits_now", "quantization_now", "loaded")
    }
    assert said == {
        "node_id": node.printed_id, "can_run": True, "quantization": "q5_k_m", "quality": "better", "fits_now": True,
        "quantization_now": "q4_k_m", "loaded": True,
    }  # fmt: skip
    assert (ask(model="other")[0], ask()[0], ask(model="x" * 999)[0]) == (404, 400, 400)
    assert Client().get("/api/v1/compatibility", {"model": CODER}).status_code == 401


def test_a_program_sets_and_drops_what_a_model_needs() -> None:
    _, token = create_admin_token(name="ops", actor=ACTOR)
    allow_model(name=CODER, actor=ACTOR)

    def send(method: str, body: object = None, *, name: str = CODER, token: str = token) -> tuple[int, Any]:
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {token}"}
        answer = Client().generic(method, f"/api/v1/compatibility/{name}", data, "application/json", headers=headers)
        return answer.status_code, answer.json()

    status, answer = send("PUT", SEED)
    assert (status, answer["requirements_from"], answer["requirements"]) == (200, "document", SEED["requirements"])
    assert [(event.actor, event.detail["to"]) for event in audited("model.requirements")] == [
        ("token:ops", SEED["requirements"])
    ]
    for body, words in (
        ({}, "model"),
        ({**SEED, "model": "other"}, "is of 'other'"),
        ([], "object"),
        (SEED["requirements"], "min_vram_mb"),
    ):
        status, answer = send("PUT", body)
        assert (status, words in answer["error"]["message"]) == (400, True), answer
    worse = {**SEED, "requirements": {**SEED["requirements"], "compute_capability": {"amd": "7.0+"}}}
    assert "write it like gfx1030+" in send("PUT", worse)[1]["error"]["message"]
    assert (send("PUT", SEED, name="other")[0], send("PUT", SEED, token="mst_no")[0]) == (400, 401)
    assert send("PUT", {**SEED, "model": "org/other"}, name="org/other")[0] == 404
    assert Model.objects.get(name=CODER).requirements == SEED["requirements"], "what was refused changed nothing"
    status, answer = send("DELETE")
    assert (status, answer["requirements_from"]) == (200, "unknown")
