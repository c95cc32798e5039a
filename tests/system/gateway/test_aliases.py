"""Model aliases and what stands in for a model: services, audit, pages, REST, and how gateways learn of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from asgiref.sync import sync_to_async
from django.test import Client
from django.urls import reverse

from core.limits import GatewayLimits, limits
from gateway.models import ModelAlias
from gateway.process import GatewayRuntime
from gateway.request.models import Catalogue
from gateway.routing import Target
from gateway.services.errors import InvalidValue, NameTaken
from gateway.services.keys import create_api_key
from gateway.services.models import allow_model, change_alias, change_model_details, create_alias, list_aliases, remember_models
from gateway.services.tenants import create_tenant
from gateway.urls import make_application
from governance.admin_tokens import create_admin_token
from tests.fakes.asgi_client import on_our_server
from tests.fakes.links import FakeLink
from tests.fakes.nodes import ACTOR, audited, make_node, make_operator, make_presence
from tests.fakes.pipeline import run_gateway

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _models(db: None) -> None:
    """``a``, ``b`` and ``c`` are allowed, ``known`` is not."""
    for name in ("a", "b", "c"):
        allow_model(name=name, actor=ACTOR)
    remember_models(names=["known"])


def make_alias(name: str = "x", **changes: Any) -> ModelAlias:
    wanted: dict[str, Any] = {"name": name, "targets": [Target("a", 3), Target("b", 1)], "actor": ACTOR}
    return create_alias(**wanted | changes)


def load() -> Catalogue:
    """Return what a gateway would know now."""
    catalogue = Catalogue(GatewayLimits())
    catalogue.apply_models(catalogue.load_models())
    catalogue.apply_aliases(catalogue.load_aliases())
    return catalogue


def test_a_name_is_free_once_for_everybody_and_once_for_each_tenant() -> None:
    create_tenant(name="acme", actor=ACTOR)
    make_alias()
    make_alias(tenant_name="acme")
    for tenant, whom in ((None, "for everybody"), ("acme", "of acme")):
        with pytest.raises(NameTaken, match=f"alias x {whom} already") as refusal:
            make_alias(tenant_name=tenant)
        assert (refusal.value.param, refusal.value.status) == ("name", 409)
    assert [alias.tenant and alias.tenant.name for alias in list_aliases()] == [None, "acme"]


BAD_TARGETS: dict[str, tuple[list[Target], str]] = {
    "none": ([], "1 to 16 models"),
    "too many": ([Target(f"m{number}") for number in range(limits().gateway.candidates + 1)], "1 to 16 models"),
    "twice": ([Target("a"), Target(" a ")], "a is named twice"),
    "negative": ([Target("a", -1), Target("b")], "The weight of a"),
    "huge": ([Target("a"), Target("b", limits().gateway.alias_weight + 1)], "The weight of b"),
    "all zero": ([Target("a", 0), Target("b", 0)], "weight above 0"),
    "unknown": ([Target("a"), Target("nobody")], "There is no model nobody"),
    "alias": ([Target("a"), Target("other")], "other is an alias"),
    "empty name": ([Target("")], "1 to 200 printable"),
}


def test_targets_that_make_no_sense_are_refused_when_made_and_when_changed() -> None:
    make_alias("other")
    alias = make_alias()
    for targets, text in BAD_TARGETS.values():
        for is_new in (True, False):
            with pytest.raises(InvalidValue, match=text) as refusal:
                make_alias("y", targets=targets) if is_new else change_alias(alias_id=alias.pk, targets=targets, actor=ACTOR)
            assert refusal.value.param == "targets"
    alias.refresh_from_db()
    assert alias.targets == [{"model": "a", "weight": 3}, {"model": "b", "weight": 1}]
    assert not ModelAlias.objects.filter(name="y").exists()


def test_a_gateway_keeps_a_table_for_each_tenant_in_which_its_own_alias_wins() -> None:
    create_tenant(name="acme", actor=ACTOR)
    make_alias()
    make_alias("y")
    make_alias(tenant_name="acme", targets=[Target("c")])
    make_alias("z", tenant_name="acme", is_active=False)
    catalogue = load()
    own, everybody = catalogue.aliases_for("acme"), catalogue.aliases_for("another")
    assert {name: [t.model for t in alias.targets] for name, alias in own.items()} == {"x": ["c"], "y": ["a", "b"]}
    assert {name: [t.model for t in alias.targets] for name, alias in everybody.items()} == {"x": ["a", "b"], "y": ["a", "b"]}


def test_a_row_that_cannot_be_read_is_left_out_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    make_alias("y")
    rows: list[object] = [[], {}, "a", [{"weight": 1}], [{"model": "a", "weight": "1"}]]
    for number, targets in enumerate(rows):
        ModelAlias.objects.create(name=f"x{number}", targets=targets)
    catalogue = load()
    catalogue.apply_aliases(catalogue.load_aliases())
    assert set(catalogue.aliases_for("acme")) == {"y"}
    assert [record.message.split()[0] for record in caplog.records].count("alias.unreadable") == len(rows)


DETAILS: dict[str, Any] = {
    "fallbacks": ["b", "known"],
    "context_tokens": 8192,
    "tokenizer": "meta/llama-3",
    "tidy": True,
    "resumes": True,
}


def test_details_of_a_model_are_changed_audited_and_reach_the_gateways_and_senseless_ones_are_refused() -> None:
    make_alias()
    for changes, text in BAD_DETAILS:
        with pytest.raises(InvalidValue, match=text) as refusal:
            change_model_details(name="a", actor=ACTOR, **DETAILS | changes)
        assert [refusal.value.param] == list(changes)
    none: dict[str, Any] = {"fallbacks": [], "context_tokens": None, "tokenizer": "", "tidy": False, "resumes": False}
    for _ in range(2):
        change_model_details(name="a", actor=ACTOR, **DETAILS)
    (event,) = audited("model.details")
    assert (event.actor, event.target, event.detail) == (ACTOR, "a", {"from": none, "to": DETAILS})
    entry = load().models["a"]
    assert (entry.fallbacks, entry.context_tokens, entry.tokenizer) == (("b", "known"), 8192, "meta/llama-3")
    assert (entry.tidy, entry.resumes) == (True, True)


BAD_DETAILS: list[tuple[dict[str, Any], str]] = [
    ({"fallbacks": ["a"]}, "stand in for itself"), ({"fallbacks": ["nobody"]}, "no model nobody"),
    ({"fallbacks": ["x"]}, "x is an alias"), ({"fallbacks": [f"m{number}" for number in range(16)]}, "at most 15"),
    ({"context_tokens": 0}, "between 1 and"),
    *(({"tokenizer": name}, "folder below") for name in ("../secrets", "/etc", "a/../b", "a//b", ".hidden", "a\\b", "a" * 201)),
]  # fmt: skip


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    client = Client()
    client.force_login(make_operator())
    return client


def confirm(alias: ModelAlias, change: str) -> str:
    return reverse("admin:gateway_modelalias_confirm", args=[alias.pk, change])


MISTAKES = {
    "": "This field is required", "a\nb 1.5": "Line 2: the weight must be a whole number", "a -1": "Line 1: the weight",
    "a 10%": "Line 1: the weight", "a b": "There is no model a b.", "a 1\na 2": "a is named twice",
}  # fmt: skip


def test_a_mistake_in_the_box_is_explained_and_what_was_typed_stays(boss: Client) -> None:
    alias = make_alias()
    for targets, text in MISTAKES.items():
        new = boss.post(reverse("admin:gateway_modelalias_add"), {"name": "y", "targets": targets})
        for page in (new, boss.post(confirm(alias, "targets"), {"targets": targets})):
            assert (page.status_code, text in page.content.decode(), targets in page.content.decode()) == (200, True, True)
    assert not ModelAlias.objects.filter(name="y").exists()


@pytest.fixture
def admin() -> Client:
    """A client that shows an admin token."""
    _, text = create_admin_token(name="tests", actor=ACTOR)
    return Client(headers={"authorization": f"Bearer {text}"})


def test_an_alias_lives_its_life_over_rest_and_each_of_it_is_audited(admin: Client) -> None:
    create_tenant(name="acme", actor=ACTOR)
    make_presence(make_node("box", model_names=["a"]))
    body = {"name": "x", "tenant": "acme", "targets": [{"model": "a", "weight": 3}, {"model": "b"}]}
    made = admin.post("/api/v1/aliases", body, "application/json")
    shown = made.json()
    assert (made.status_code, made["Location"]) == (201, f"/api/v1/aliases/{shown['id']}")
    states = [{"model": "a", "weight": 3, "state": "served"}, {"model": "b", "weight": 1, "state": "no node"}]
    assert {"name": "x", "tenant": "acme", "is_active": True, "targets": states}.items() <= shown.items()
    assert shown["created_at"].endswith("Z")
    assert admin.get("/api/v1/aliases").json() == {"aliases": [shown]}
    assert admin.get(made["Location"]).json() == shown
    off = admin.patch(made["Location"], {"is_active": False}, "application/json").json()
    assert (off["is_active"], off["targets"]) == (False, shown["targets"])
    for _ in range(2):
        moved = admin.patch(made["Location"], {"targets": [{"model": "c"}]}, "application/json").json()
        assert (moved["is_active"], moved["targets"]) == (False, [{"model": "c", "weight": 1, "state": "no node"}])
    assert admin.delete(made["Location"]).status_code == 204
    assert [answer.status_code for answer in (admin.get(made["Location"]), admin.delete(made["Location"]))] == [404, 404]
    events = [event for action in ("create", "change", "delete") for event in audited(f"alias.{action}")]
    assert [(event.action, event.actor) for event in events] == [
        ("alias.create", "token:tests"), ("alias.change", "token:tests"), ("alias.change", "token:tests"),
        ("alias.delete", "token:tests"),
    ]  # fmt: skip
    made_of, gone = [{"model": "a", "weight": 3}, {"model": "b", "weight": 1}], [{"model": "c", "weight": 1}]
    assert events[0].detail == {"tenant": "acme", "targets": made_of, "is_active": True}
    assert events[-1].detail == events[2].detail["to"] == {"tenant": "acme", "targets": gone, "is_active": False}


A = [{"model": "a"}]
REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"targets": A}, 400, "name"),
    ({"name": "y"}, 400, "targets"),
    ({"name": "y", "targets": []}, 400, "targets"),
    ({"name": "y", "targets": [{"model": "a", "weight": -1}]}, 400, "targets.0.weight"),
    ({"name": "y", "targets": [{"model": "a", "share": 1}]}, 400, "targets.0.share"),
    ({"name": "y", "targets": [{"model": "nobody"}]}, 400, "targets"),
    ({"name": "y", "targets": A, "tenant": "nobody"}, 404, "tenant"),
    ({"name": "x", "targets": A}, 409, "name"),
    ({"name": "y", "targets": A, "enabled": True}, 400, "enabled"),
]


def test_what_cannot_be_made_names_the_field(admin: Client) -> None:
    make_alias()
    for body, status, param in REFUSED:
        answer = admin.post("/api/v1/aliases", body, "application/json")
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert ModelAlias.objects.count() == 1


@pytest.mark.django_db(transaction=True)
async def test_the_model_list_answers_each_caller_in_its_dialect() -> None:
    await sync_to_async(create_tenant)(name="acme", actor=ACTOR)
    await sync_to_async(make_alias)(tenant_name="acme", targets=[Target("a"), Target("b")])
    _, key = await sync_to_async(create_api_key)(name="k", tenant_name="acme", actor=ACTOR)
    async with run_gateway() as runtime, gateway_client(runtime) as client:
        runtime.registry.add(FakeLink("a", "known"))
        everybody = (await client.get("/v1/models")).json()
        own = (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).json()
        assert [model["id"] for model in everybody["data"]] == ["a"]
        assert [model["id"] for model in own["data"]] == ["a", "x"]
        assert own["data"][1]["x_muster"] == {"targets": ["a"]}

        claude = {"x-api-key": key, "anthropic-version": "2026-10-21"}
        page = (await client.get("/v1/models?limit=1", headers=claude)).json()
        assert (page["has_more"], page["first_id"], page["last_id"]) == (True, "a", "a")
        one = (await client.get("/v1/models/x", headers=claude)).json()
        assert (one["type"], one["id"], one["lifecycle"]) == ("model", "x", "active")

        for path, status, kind in (
            ("/v1/models/b", 404, "not_found_error"),
            ("/v1/models?limit=0", 400, "invalid_request_error"),
        ):
            refused = await client.get(path, headers=claude)
            assert (refused.status_code, refused.json()["type"], refused.json()["error"]["type"]) == (status, "error", kind)
        refused = await client.get("/v1/models/auto", headers={"authorization": f"Bearer {key}"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "MODEL_NOT_ALLOWED")


@asynccontextmanager
async def gateway_client(runtime: GatewayRuntime) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the gateway's own application, without a socket."""
    transport = httpx.ASGITransport(on_our_server(make_application(runtime)))
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
