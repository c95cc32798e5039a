"""The pages of models: where each is, what may be done to it, the catalogue, a load from its form to its first answer."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from gateway.models import Model, RequestHour
from gateway.routing import Target
from gateway.services.models import allow_model, change_model_details, create_alias, remember_models
from gateway.values import Dimension
from governance.models import Operation, OperationRun
from governance.operations.runs import run_due
from governance.states import RunState
from nodes.models import Node, NodePresence
from tests.fakes.governed_team import Identity, Team, make_box, make_due, make_governed, open_session
from tests.fakes.nodes import ACTOR, make_key, make_node, make_operator, make_presence

pytestmark = pytest.mark.django_db
LIST, CATALOGUE, LOAD = (f"/admin/gateway/model/{page}" for page in ("", "catalogue/", "load/"))
QWEN = "Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q4_K_M.gguf"
GIB = 1024


def make_fleet() -> None:
    """Two nodes with models loaded, loading and on disk, and one that is offline."""
    facts = [{"name": "tiny", "backend": "gguf", "quantization": "Q8_0", "estimate_mb": 700, "estimate_replicas": 1}]
    first = make_node(
        "attic", model_names=["tiny"], runner_id="attic#1", op_level="L2", figures={"tiny": {"tokens_per_s": 40.0}}
    )
    make_presence(
        first, available_models=["shelf"], memory={"models": facts},
        replicas=[
            {"model": "tiny", "state": "loaded", "engine": "llama.cpp", "slots": 4, "active": 1, "memory_mb": 900,
             "context_tokens": 8192, "kept": True},
            {"model": "big", "state": "loading", "progress": 0.43, "detail": "reading weights"},
        ],
    )  # fmt: skip
    second = make_node("cellar", model_names=["tiny"], figures={"tiny": {"tokens_per_s": 20.0}})
    make_presence(second, available_models=["shelf", "big"], replicas=[{"model": "tiny", "state": "loaded"}])
    make_presence(make_node("gone", model_names=["lost"]), age_s=9999.0, available_models=["lost"])
    for name in ("tiny", "missing"):
        allow_model(name=name, actor=ACTOR)
    remember_models(names=["big"])
    create_alias(name="gpt-4o", targets=[Target("tiny")], actor=ACTOR)


def read_rows(page: str) -> dict[str, str]:
    """Return the rows of the list by model, as text."""
    body = re.search(r'<table class="mst-table mst-stack mst-models".*?</table>', page, re.DOTALL)
    rows = re.findall(r'<tr role="row">(.*?)</tr>', body[0], re.DOTALL)[1:] if body else []
    texts = [" ".join(re.sub(r"<[^>]+>", " ", row).split()) for row in rows]
    return {text.split()[0]: text for text in texts}


def test_the_list_says_of_every_model_where_it_is_and_whether_it_is_allowed(boss: Client) -> None:
    make_fleet()
    hour = timezone.now().replace(minute=0, second=0, microsecond=0)
    RequestHour.objects.create(dimension=Dimension.MODEL.value, at=hour, name="tiny", served=1, failed=1)
    rows = read_rows(boss.get(LIST).content.decode())
    assert list(rows) == ["big", "missing", "shelf", "tiny"]
    assert rows["tiny"] == (
        "tiny also as gpt-4o loaded on 2 nodes attic, cellar 900 MiB Q8_0 · llama.cpp 8,192 30 2 1 failed allowed Disallow"
    )
    assert rows["big"].startswith("big loading 43 % attic")
    assert rows["shelf"].startswith("shelf on disk at 2 nodes attic, cellar")
    assert rows["missing"].startswith("missing on no node")
    assert [rows[name].endswith("not allowed Allow") for name in ("big", "shelf", "missing")] == [True, True, False]


CHIPS = {
    "all": ["big", "missing", "shelf", "tiny"], "loaded": ["tiny"], "loading": ["big"], "on_disk": ["shelf"],
    "missing": ["missing"], "denied": ["big", "shelf"], "nonsense": ["big", "missing", "shelf", "tiny"],
}  # fmt: skip
SORTS = {
    "sort=name": ["big", "missing", "shelf", "tiny"], "sort=name&dir=back": ["tiny", "shelf", "missing", "big"],
    "sort=state": ["tiny", "big", "shelf", "missing"], "sort=size": ["tiny", "big", "missing", "shelf"],
    "sort=speed": ["tiny", "big", "missing", "shelf"], "q=GPT-4": ["tiny"], "q=nobody": [],
}  # fmt: skip


def test_the_list_is_narrowed_searched_and_sorted(boss: Client) -> None:
    make_fleet()
    for chip, names in CHIPS.items():
        assert list(read_rows(boss.get(f"{LIST}?show={chip}").content.decode())) == names, chip
    for asked, names in SORTS.items():
        assert list(read_rows(boss.get(f"{LIST}?{asked}").content.decode())) == names, asked
    page = boss.get(f"{LIST}?show=denied").content.decode()
    assert re.findall(r">([A-Z][\w, ]+) <span>(\d+)</span>", page) == [
        ("All", "4"), ("Loaded", "1"), ("Loading", "1"), ("On disk", "1"), ("Allowed, on no node", "1"), ("Not allowed", "2"),
    ]  # fmt: skip


def test_an_empty_list_says_what_it_is_for(boss: Client) -> None:
    page = boss.get(LIST).content.decode()
    assert "Models that nodes have appear here by themselves." in page
    assert CATALOGUE in page


def count_queries(client: Client, url: str) -> int:
    with CaptureQueriesContext(connection) as queries:
        assert client.get(url).status_code == 200
    return len(queries)


def stand_in(*names: str) -> None:
    change_model_details(
        name="tiny", fallbacks=names, context_tokens=None, tokenizer="", tidy=False, resumes=False, actor=ACTOR
    )  # fmt: skip


def test_pages_of_models_take_as_many_queries_for_a_fleet_as_for_a_node(boss: Client) -> None:
    make_fleet()
    row = Model.objects.get(name="tiny")
    stand_in("big")
    urls = [LIST, CATALOGUE, f"{LOAD}?model={QWEN}", *(f"{LIST}{row.pk}/change/?tab={tab}" for tab in TABS)]
    few = [count_queries(boss, url) for url in urls]
    for number in range(20):
        node = make_node(f"n{number}", model_names=[f"m{number}", "tiny"])
        replicas = [{"model": name, "state": "loaded"} for name in node.model_names]
        make_presence(node, replicas=replicas, available_models=[f"d{n}" for n in range(number)])
        allow_model(name=f"m{number}", actor=ACTOR)
        create_alias(name=f"a{number}", targets=[Target("tiny"), Target(f"m{number}")], actor=ACTOR)
        make_key(f"key {number}", tenant=f"t{number}", allowed_models=["tiny"])
    stand_in("m1", "m2")
    many = [count_queries(boss, url) for url in urls]
    assert few == many
    assert max(many) <= 18


TABS = {
    "overview": ["attic", "stays loaded", "1 / 4", "Unload…", "key may use every allowed model", "These keys name it"],
    "limits": ["Most tokens to generate", "of the installation", "Price of a million tokens"],
    "routing": ["Free slots", "None. A fallback answers instead", "gpt-4o", "None. With one, a node that answers it wrongly"],
    "compatibility": ["GPUs that can run it", "PUT /api/v1/compatibility"],
    "code": ["from openai import OpenAI", "curl -N", "MUSTER_API_KEY"],
}


@pytest.mark.parametrize("tab", TABS)
def test_each_tab_of_a_model_shows_its_part(boss: Client, tab: str) -> None:
    make_fleet()
    make_key("open")
    make_key("own", tenant="mobile", allowed_models=["tiny"])
    page = boss.get(f"{LIST}{Model.objects.get(name='tiny').pk}/change/?tab={tab}").content.decode()
    assert [words for words in TABS[tab] if words not in page] == []


def test_a_model_that_is_not_there_and_an_operator_without_permission_get_no_page(boss: Client) -> None:
    assert boss.get(f"{LIST}999/change/").status_code == 404
    stranger = open_session(make_operator("bob", is_superuser=False))
    assert [stranger.get(url).status_code for url in (LIST, CATALOGUE, LOAD)] == [403] * 3


def test_the_catalogue_says_where_each_file_fits(boss: Client) -> None:
    make_presence(make_node("attic"), memory={"kind": "gpu", "total_mb": 24 * GIB, "used_mb": 0}, gpus=[
        {"index": 0, "name": "L4", "memory_total_mb": 24 * GIB, "memory_used_mb": 0}])  # fmt: skip
    page = " ".join(re.sub(r"<[^>]+>", " ", boss.get(f"{CATALOGUE}?q=qwen3+8b").content.decode()).split())
    assert re.search(r"Q4_K_M · 4\.7 GiB · llama\.cpp Qwen/Qwen3-8B-GGUF/\S+ · newest revision fits attic needs 6\.6 GiB", page)
    assert "as of 2026-11-28" in page
    nothing = boss.get(f"{CATALOGUE}?q=no-such-model").content.decode()
    assert "No model of the catalogue is like that." in nothing


# From the form of a load to the answer


@pytest.fixture
def rig(db: None) -> Identity:
    return Identity()


@pytest.fixture
def team(db: None) -> Team:
    return make_governed()


@pytest.fixture
def box(rig: Identity, team: Team) -> Node:
    node = make_box(rig, keeps_models=True)
    NodePresence.objects.update(memory={"kind": "gpu", "total_mb": 24 * GIB, "used_mb": 4 * GIB}, gpus=[
        {"index": 0, "name": "L4", "memory_total_mb": 24 * GIB, "memory_used_mb": 4 * GIB}])  # fmt: skip
    return node


def sign_in(team: Team) -> Client:
    person = team[0].user
    person.is_superuser = True
    person.save(update_fields=["is_superuser"])
    return open_session(person)


def read_text(client: Client, url: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", client.get(url).content.decode()).split())


def test_a_load_is_asked_for_followed_and_ends_in_a_question(team: Team, rig: Identity, box: Node) -> None:
    client = sign_in(team)
    form = client.get(LOAD, {"model": QWEN}).content.decode()
    assert f'value="{rig.runner_id}" checked' in form
    assert "On a GPU it needs about 6.6" in form
    assert "2 of ana, ben, cleo" in form or "2 of 3" in form
    sent = {"model": QWEN, "node": rig.runner_id, "keep": "on", "context": "16384", "reason": "for the team"}
    answer = client.post(LOAD, sent)
    row = Model.objects.get(name=QWEN)
    page = reverse("admin:gateway_model_change", args=[row.pk])
    assert (answer.status_code, answer["Location"], row.allowed) == (302, page, False)
    operation = Operation.objects.get(operation="model-load")
    assert operation.read_statement().params == {"keepLoaded": True, "maxContextLength": 16384, "modelId": QWEN}
    assert "waits for approval 0 of 2 have signed; these can: ben, cleo." in read_text(client, page)
    team.sign(operation)
    make_due(operation)
    run_due()
    OperationRun.objects.filter(operation=operation).update(
        state=RunState.EXECUTING.value, stage="downloading (2514.0 of 5027.8 MB)", fraction=0.5, eta_s=42.0
    )
    followed = read_text(client, f"{page}?part=underway")
    assert "loading 50 % downloading (2514.0 of 5027.8 MB) · about 42 s left" in followed
    assert "data-fast" in client.get(f"{page}?part=underway").content.decode()
    OperationRun.objects.filter(operation=operation).update(
        state=RunState.SUCCEEDED.value, ended_at=timezone.now(), result={"modelId": QWEN}
    )
    assert "Allow it, so that clients may ask it" in read_text(client, page)
    allow_model(name=QWEN, actor=ACTOR)
    assert "Ask it something" in read_text(client, page)


def test_a_refused_load_keeps_what_was_typed_and_asks_for_nothing(team: Team, rig: Identity, box: Node) -> None:
    client = sign_in(team)
    Node.objects.update(keeps_models=False)
    sent = {"model": QWEN, "node": rig.runner_id, "keep": "on", "context": "", "reason": "because I say so"}
    page = client.post(LOAD, sent).content.decode()
    assert "has not said that it can keep a model loaded" in page
    assert "because I say so" in page
    wrong = client.post(LOAD, {**sent, "node": "nobody"}).content.decode()
    assert "nobody is not one of the available choices" in wrong
    assert not Operation.objects.filter(operation="model-load").exists()
    assert not Model.objects.filter(name=QWEN).exists()


def test_without_a_policy_the_form_says_what_is_missing(boss: Client, rig: Identity) -> None:
    make_box(rig)
    page = boss.get(LOAD, {"model": "shelf"}).content.decode()
    assert "There is no approval policy yet" in page
    assert "<fieldset disabled>" in page
    assert "Nobody knows yet how much memory it takes." in page
    assert "Choose a model first." in boss.get(LOAD).content.decode()


def test_a_model_that_is_gone_says_since_when_and_is_asked_for_again(team: Team, rig: Identity, box: Node) -> None:
    client = sign_in(team)
    client.post(LOAD, {"model": "m", "node": rig.runner_id, "keep": "", "context": "", "reason": "why"})
    operation = Operation.objects.get(operation="model-load")
    team.sign(operation)
    make_due(operation)
    run_due()
    loaded_at = timezone.now() - timedelta(hours=3)
    OperationRun.objects.filter(operation=operation).update(
        state=RunState.SUCCEEDED.value, ended_at=loaded_at, result={"modelId": "m"}
    )
    Node.objects.update(model_names=["old"])
    page = client.get(reverse("admin:gateway_model_change", args=[Model.objects.get(name="m").pk])).content.decode()
    assert "It was loaded on rig and is gone." in page
    assert f"It was loaded at {loaded_at:%Y-%m-%d %H:%M}" in page
    assert "Its approval did not ask to keep it loaded." in page
    assert re.search(r'href="/approvals/propose\?operation=model-load[^"]*modelId=m', page)
    other = remember_models(names=["other"])
    assert other == 1
    assert "is gone" not in client.get(f"{LIST}{Model.objects.get(name='other').pk}/change/").content.decode()
