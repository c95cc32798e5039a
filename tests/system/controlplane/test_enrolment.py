"""The page that adds nodes: the command is shown once, and the page follows the node up to its first answer."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from gateway.models import ApiKey, Model
from gateway.services.models import remember_models
from gateway.services.tenants import create_tenant
from governance.models import PolicyVersion
from nodes.models import NodeCredential, SetupCode
from nodes.services.credentials import create_provider
from tests.fakes.governed_team import make_governed
from tests.fakes.nodes import ACTOR, make_node, make_operator, make_presence

pytestmark = pytest.mark.django_db
PAGE = "/admin/nodes/node/setup/"


@pytest.fixture
def boss(settings: Any) -> Client:
    settings.GATEWAY_PUBLIC_URL = "https://gateway.example.com"
    create_provider(name="local", actor=ACTOR)
    client = Client()
    client.force_login(make_operator())
    return client


def ask(client: Client, **fields: str) -> Any:  # Django's test response
    return client.post(PAGE, {"software": "ollama", "name": "rack-2", "provider": "local", "command": "", **fields})


def make_member(**changes: Any) -> NodeCredential:
    credential = NodeCredential.objects.get()
    make_presence(make_node(name="rack-2", credential=credential, **changes))
    return credential


def test_the_command_has_the_credential_in_it_and_is_shown_once(boss: Client) -> None:
    assert boss.get(PAGE).status_code == 200
    page = ask(boss)

    (token,) = set(re.findall(r"msw_[0-9A-Za-z_]{51}", page.text))
    assert "no-store" in page["Cache-Control"]
    assert f"--gateway https://gateway.example.com --token {token} --name rack-2" in page.text
    credential = NodeCredential.objects.get()
    assert token not in boss.get(reverse("admin:nodes_node_setup_state", args=[credential.pk])).text


def test_a_code_shows_no_credential_here(boss: Client) -> None:
    page = boss.post(PAGE, {"software": "ours", "name": "attic", "provider": "local", "code": ""})
    assert re.search(r"https://gateway.example.com/setup\?code=[A-Z2-9]{5}-[A-Z2-9]{5}", page.text)
    assert (SetupCode.objects.count(), "msw_" in page.text) == (1, False)


def test_what_is_missing_is_said_beside_its_field_and_nothing_is_made(boss: Client) -> None:
    page = ask(boss, name="")
    assert "This field is required." in page.text
    assert 'value="ollama" checked' in page.text
    assert not NodeCredential.objects.exists()


def test_the_page_follows_the_node_and_allows_its_models(boss: Client) -> None:
    ask(boss)
    state = reverse("admin:nodes_node_setup_state", args=[NodeCredential.objects.get().pk])
    assert "Waiting for the node to connect." in boss.get(state).text
    credential = make_member(model_names=["llama3", "qwen3"])
    remember_models(names=["llama3", "qwen3", "other"])
    shown = boss.get(state).text
    assert "The node is connected." in shown
    assert "Clients may not use its models yet." in shown

    allow = reverse("admin:nodes_node_setup_allow", args=[credential.pk])
    answer = boss.post(allow, {"model": ["llama3", "other"]}).text

    assert set(Model.objects.filter(allowed=True).values_list("name", flat=True)) == {"llama3"}, "only what the node has"
    assert "Ask it something" in answer


def test_a_governed_node_has_to_trust_the_policy_first(boss: Client) -> None:
    ask(boss)
    credential = make_member(model_names=["llama3"], op_level="L2")
    remember_models(names=["llama3"])
    Model.objects.update(allowed=True)
    make_governed()
    shown = boss.get(reverse("admin:nodes_node_setup_state", args=[credential.pk])).text
    assert f"./muster trust {PolicyVersion.objects.get(version=1).words}" in shown
    assert "Ask it something" not in shown


def test_who_may_not_add_nodes_gets_nothing(boss: Client) -> None:
    ask(boss)
    pk = NodeCredential.objects.get().pk
    stranger = Client()
    stranger.force_login(make_operator("bob", is_superuser=False))
    views = [
        ("get", PAGE),
        ("post", PAGE),
        ("get", f"{PAGE}{pk}/state"),
        ("post", f"{PAGE}{pk}/allow"),
        ("post", f"{PAGE}{pk}/test"),
    ]
    assert {getattr(stranger, method)(path).status_code for method, path in views} == {403}
    assert NodeCredential.objects.count() == 1


def test_who_may_add_nodes_and_not_allow_models_is_told_so(boss: Client) -> None:
    ask(boss)
    credential = make_member(model_names=["llama3"])
    bob = make_operator("bob", is_superuser=False)
    bob.user_permissions.add(Permission.objects.get(codename="add_nodecredential"))
    client = Client()
    client.force_login(bob)
    assert "You may not allow models." in client.get(f"{PAGE}{credential.pk}/state").text
    assert client.post(f"{PAGE}{credential.pk}/allow", {"model": "llama3"}).status_code == 403


def test_the_state_takes_as_many_queries_for_many_nodes_as_for_one(boss: Client) -> None:
    ask(boss)
    credential, counts = make_member(model_names=["a"]), []
    for number in range(2):
        with CaptureQueriesContext(connection) as queries:
            boss.get(f"{PAGE}{credential.pk}/state")
        counts.append(len(queries))
        for name in ("x", "y", "z"):
            make_presence(make_node(name=f"{name}{number}", credential=credential))
    assert counts[0] == counts[1]


def test_the_first_steps_lead_to_a_key_that_is_shown_once(boss: Client) -> None:
    page = boss.get(reverse("admin:start"))
    assert "No node takes requests yet." in page.text
    make_presence(make_node(name="attic", model_names=["llama3"]))
    remember_models(names=["llama3"])
    Model.objects.update(allowed=True)
    create_tenant(name="default", actor=ACTOR)

    page = boss.post(reverse("admin:start"), {"name": "my-app"})

    (text,) = set(re.findall(r"mst_[0-9A-Za-z_]{51}", page.text))
    assert (ApiKey.objects.get().name, "no-store" in page["Cache-Control"]) == ("my-app", True)
    assert "attic" in page.text
    assert "Send a test request" in page.text
    assert text not in boss.get(reverse("admin:start")).text
