"""Operators' pages of nodes, credentials and providers: they show, ask, and act on a confirmed POST alone.

And what they show of a node whatever its rows hold, its status as SQL filters by it, and its ejections.
"""

from __future__ import annotations

import html
import re
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any

import msgspec
import pytest
from django.conf import LazySettings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from governance.people import Assurance
from nodes.models import Node, NodeCredential, NodePresence, Provider, ProviderState
from nodes.services.availability import (
    EjectionReport,
    list_ejections,
    read_fleet,
    write_ejections,
)
from nodes.services.credentials import find_credential
from nodes.services.telemetry import NodeTelemetry, count_replicas, describe_telemetry
from tests.fakes.governed_team import make_governed
from tests.fakes.nodes import audited, make_credential, make_node, make_presence, make_provider
from wire.bridge import MemoryInfo, ModelFacts

pytestmark = pytest.mark.django_db


def sign_in(name: str = "ada", *permissions: str, boss: bool = False) -> Client:
    """Return the browser of an operator with these permissions."""
    user = get_user_model().objects.create_user(username=name, is_staff=True, is_superuser=boss)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client(enforce_csrf_checks=True)
    client.force_login(user)
    return client


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    return sign_in(boss=True)


def csrf(client: Client, url: str) -> str:
    """Open a page with a form and return its token."""
    match = re.search(r'name="csrfmiddlewaretoken" value="([^"]+)"', client.get(url).content.decode())
    assert match is not None
    return match.group(1)


def submit(client: Client, url: str, **fields: str) -> str:
    """Open a page, send its form as a browser would, and return the page of what follows."""
    response = client.post(url, {"csrfmiddlewaretoken": csrf(client, url), **fields}, follow=True)
    assert response.status_code == 200
    return response.content.decode()


def page(client: Client, name: str, *arguments: object) -> str:
    """Return an admin page that must be there."""
    response = client.get(reverse(f"admin:{name}", args=arguments))
    assert response.status_code == 200
    return response.content.decode()


def page_at(client: Client, url: str) -> str:
    return client.get(url).content.decode()


def confirm_url(kind: str, row: Node | Provider | NodeCredential, change: str) -> str:
    """Return the address of a confirm page."""
    return reverse(f"admin:nodes_{kind}_confirm", args=[row.pk, change])


# Lists


@pytest.mark.parametrize("name", ["nodes_node", "nodes_nodecredential", "nodes_provider"])
def test_a_list_takes_as_many_queries_for_many_rows_as_for_one(boss: Client, name: str) -> None:
    def count() -> int:
        with CaptureQueriesContext(connection) as queries:
            page(boss, f"{name}_changelist")
        return len(queries)

    make_presence(make_node("first"))
    page(boss, f"{name}_changelist")
    few = count()
    for number in range(4):
        credential, _ = make_credential(f"box-{number}", provider=f"provider-{number}")
        make_presence(make_node(f"box-{number}", credential=credential))
    assert count() <= few
    assert few <= 12


def test_a_box_has_a_page_that_offers_no_editing_and_says_that_a_second_one_wants_its_name(boss: Client) -> None:
    node = make_node("joy-01", rival_seen_at=timezone.now() - timedelta(minutes=5), rival_address="10.9.8.7")
    make_presence(node, connected=True, last_error="CUDA error", replicas=[replica("tiny", "loaded", slots=4, active=1)])
    shown = page(boss, "nodes_node_change", node.pk) + page(boss, "nodes_node_tab", node.pk, "details")
    for text in (node.printed_id, "from 10.9.8.7 was refused", "Give it another name", "CUDA error", "tiny", "1 / 4"):
        assert text in shown, text
    assert ('name="_save"' in shown, 'name="name"' in shown) == (False, False)
    url = reverse("admin:nodes_node_change", args=[node.pk])
    refused = boss.post(url, {"csrfmiddlewaretoken": csrf(boss, confirm_url("node", node, "cordon")), "cordoned": "on"})
    assert (refused.status_code, Node.objects.get().cordoned) == (403, False)
    for kind, row in (("node", node), ("nodecredential", node.credential), ("provider", node.provider)):
        assert row is not None
        assert boss.get(reverse(f"admin:nodes_{kind}_delete", args=[row.pk])).status_code == 403


# Changes


def test_neither_opening_a_confirm_page_nor_a_post_without_its_token_changes_anything(boss: Client) -> None:
    node = make_node("joy-01")
    for change in ("cordon", "drain"):
        assert boss.get(confirm_url("node", node, change)).status_code == 200
        assert boss.post(confirm_url("node", node, change)).status_code == 403
    for unknown in (confirm_url("node", node, "explode"), reverse("admin:nodes_node_confirm", args=["x", "cordon"])):
        assert boss.get(unknown).status_code == 404
    assert Node.objects.values_list("cordoned", "draining", "drain_reason").get() == (False, False, "")
    said: list[tuple[str, dict[str, str], tuple[bool, bool, str]]] = [
        ("cordon", {}, (True, False, "")),
        ("uncordon", {}, (False, False, "")),
        ("drain", {"timeout_s": "-1"}, (False, False, "")),
        ("drain", {"reason": "new fans", "timeout_s": "60"}, (False, True, "new fans")),
        ("undrain", {}, (False, False, "")),
        ("drain", {"reason": "", "timeout_s": ""}, (False, True, "")),
    ]
    for change, form, found in said:
        submit(boss, confirm_url("node", node, change), **form)
        assert Node.objects.values_list("cordoned", "draining", "drain_reason").get() == found
    assert audited("node.cordon")[0].actor == "user:ada"


def test_who_may_only_look_is_offered_nothing_and_refused() -> None:
    node = make_node()
    assert node.credential is not None
    viewer = sign_in("eve", "view_node", "view_nodecredential", "view_provider")
    shown = page(viewer, "nodes_node_changelist") + page(viewer, "nodes_node_change", node.pk)
    assert "/change/cordon/" not in shown
    keeper = sign_in("kim", "view_node", "change_node", "view_nodecredential")
    for client, url in (
        (viewer, confirm_url("node", node, "cordon")),
        (viewer, reverse("admin:nodes_nodecredential_add")),
        (viewer, reverse("admin:nodes_provider_add")),
        (sign_in("joe"), reverse("admin:nodes_node_changelist")),
        (keeper, confirm_url("nodecredential", node.credential, "revoke")),
    ):
        assert client.get(url).status_code == 403
    submit(keeper, confirm_url("node", node, "cordon"))
    assert Node.objects.get().cordoned
    response = Client().get(confirm_url("node", node, "cordon"))
    assert (response.status_code, "/login/" in response["Location"]) == (302, True)


# Credentials and providers


@pytest.mark.parametrize("url", ["https://api.example.com/", "http://127.0.0.1:8080"])
def test_a_new_credential_is_shown_exactly_once_with_the_line_that_starts_the_node(
    boss: Client, settings: LazySettings, url: str
) -> None:
    settings.GATEWAY_PUBLIC_URL = url
    row, add = make_provider("rack2"), reverse("admin:nodes_nodecredential_add")
    assert "max_nodes must be between 1 and 10000" in submit(boss, add, name="x", provider=str(row.pk), max_nodes="10001")
    assert not NodeCredential.objects.exists()
    fields = {"csrfmiddlewaretoken": csrf(boss, add), "name": "rack 4", "provider": str(row.pk), "max_nodes": "3"}
    response = boss.post(add, fields)
    assert (response.status_code, "no-store" in response["Cache-Control"]) == (200, True)
    shown = html.unescape(response.content.decode())
    (text,) = set(re.findall(r"msw_[0-9A-Za-z_]{51}", shown))
    found = find_credential(text)
    assert found is not None
    assert (found.name, found.max_nodes, found.provider) == ("rack 4", 3, row)
    later = page(boss, "nodes_nodecredential_changelist") + page(boss, "nodes_nodecredential_change", found.pk)
    assert text not in f"{later} {dict(boss.session)} {boss.cookies}"
    assert audited("node_credential.create")[0].actor == "user:ada"
    assert f"./muster node --gateway {url.removesuffix('/')} --token {text} --provider rack2 --data" in shown
    assert ("write this machine's address" in shown) is ("127.0.0.1" in url)
    assert "Revoked the node credential rack 4" in submit(boss, confirm_url("nodecredential", found, "revoke"))
    assert find_credential(text) is None


# Governance


def test_a_forced_drain_is_sent_to_the_approvals(boss: Client) -> None:
    node = make_node()
    make_governed()
    session = boss.session
    session["muster_assurance"] = Assurance.PASSKEY.value
    session.save()
    shown = submit(boss, confirm_url("node", node, "drain"), reason="", timeout_s="5")
    assert "propose node-drain" in shown
    assert f"/approvals/propose?operation=node-drain&amp;target={node.printed_id}&amp;timeout_s=5" in shown
    assert not Node.objects.get(pk=node.pk).draining


def test_an_operator_gives_a_node_called_over_http_its_keys_and_takes_them_back(boss: Client) -> None:
    node = make_node(reach="direct", public_base_url="http://far.lan")
    url = confirm_url("node", node, "op-key")
    shown = submit(boss, url, level="L0", secret="0123456789abcdef", kid="", runner_id="")
    assert "takes approved operations from now on" in shown
    assert "0123456789abcdef" not in shown
    assert Node.objects.get().op_level == "L0"
    assert "kid must be" in submit(boss, url, level="L1", secret="0123456789abcdef", kid="", runner_id="")
    url = confirm_url("node", node, "api-key")
    shown = submit(boss, url, api_key="a-key-of-the-node")
    assert "carry the API key" in shown
    assert "a-key-of-the-node" not in shown + page(boss, "nodes_node_change", node.pk)
    node.refresh_from_db()
    assert "a-key-of-the-node" not in node.sealed_api_key
    assert node.read_api_key() == "a-key-of-the-node"
    assert "without spaces" in submit(boss, url, api_key="two words")
    submit(boss, url, api_key="")
    assert Node.objects.get().sealed_api_key == ""


# What is shown of a node, whatever its rows hold


def describe(node: Node | None = None, **presence: Any) -> NodeTelemetry:
    """Return the view of a node that was heard just now, without a database."""
    box = node or Node(name="box")
    NodePresence(node=box, last_heartbeat_at=timezone.now(), **presence)
    return describe_telemetry(box, now=timezone.now())


def replica(model: str, state: str, **fields: object) -> dict[str, object]:
    return {"model": model, "state": state, **fields}


@pytest.mark.parametrize("odd", [[{"model": 5}], ["x"], {"a": 1}, [{"model": "m", "state": "loaded", "progress": "half"}]])
def test_rows_that_another_release_wrote_are_no_error(odd: object) -> None:
    box = describe(replicas=odd, gpus=odd, memory={"total_mb": "many"})
    assert not box.says_something
    assert count_replicas(NodePresence(replicas=odd)) == {}


# Ejections

HERE, THERE = uuid.UUID(int=1), uuid.UUID(int=2)


def report(node: Node, **changes: object) -> EjectionReport:
    """Return that a gateway ejected the node for ``m`` now, for twenty seconds."""
    made = EjectionReport(node_id=node.pk, model="m", reason="failed", age_s=0.0, left_s=20.0, is_news=True)
    return replace(made, **changes)  # type: ignore[arg-type]  # the fields of the report


def shown_of(node: Node) -> list[str]:
    return [one.text for one in list_ejections(NodePresence.objects.get(pk=node.pk), now=timezone.now())]


def test_why_and_until_when_a_node_is_ejected_is_told_once_and_goes_when_it_is_over() -> None:
    node, other = make_node("bad"), make_node("good", credential=make_credential("second")[0])
    make_presence(node), make_presence(other)
    write_ejections([report(node)], gateway_id=HERE)
    write_ejections([report(node, is_news=False, left_s=40.0)], gateway_id=HERE)
    (words,) = shown_of(node)
    assert words.startswith("it failed requests that other nodes answered; no new requests until ")
    assert shown_of(other) == []
    (event,) = audited("node.ejected")
    assert (event.target, event.detail["model"]) == (node.printed_id, "m")
    assert {one.name: len(one.ejections) for one in read_fleet().nodes} == {"bad": 1, "good": 0}
    write_ejections([], gateway_id=HERE)
    assert shown_of(node) == []


def test_what_another_gateway_holds_against_a_node_stays_until_it_is_long_over() -> None:
    node = make_node()
    make_presence(node)
    write_ejections([report(node, reason="slow")], gateway_id=THERE)
    write_ejections([report(node)], gateway_id=HERE)
    write_ejections([], gateway_id=HERE)
    assert len(shown_of(node)) == 1
    write_ejections([report(node, left_s=-1.0)], gateway_id=THERE)
    assert shown_of(node)[0].endswith("one request at a time tries it")
    write_ejections([report(node, left_s=-600.0)], gateway_id=THERE)
    assert shown_of(node) == []
    write_ejections([report(node, is_held=False, left_s=60.0)], gateway_id=HERE)
    assert NodePresence.objects.get(pk=node.pk).ejections.keys() == {HERE.hex}, "a dead gateway's leftovers go"
    assert "gets requests all the same" in shown_of(node)[0]


def test_a_box_over_rest_shows_the_gpu_of_its_heartbeats() -> None:
    box = describe(Node(name="box", gpu_name="L4", vram_total_mb=1000), vram_used_mb=250, gpu_util_percent=30.0)
    assert box.gpus[0].name == "L4"
    assert box.memory is not None
    assert (box.memory.used_mb, box.memory.total_mb) == (250, 1000)


def test_what_loads_take_and_may_set_is_shown() -> None:
    facts = ModelFacts(
        name="m", backend="gguf", state="unloaded", replica_max=4, target_inflight=2, configured_target_inflight=3,
        estimate_mb=700, estimate_replicas=2, estimate_source="model_artifact_size",
        load_constraints={"gguf_n_ctx": {"kind": "integer", "minimum": 1, "step": 1}},
    )  # fmt: skip
    box = describe(memory=msgspec.to_builtins(MemoryInfo(total_mb=10, models=[facts])))
    (shown,) = box.facts
    said = {name: shown[name] for name in ("name", "replicas", "estimate_mb", "estimate")}
    assert said == {"name": "m", "replicas": "up to 4", "estimate_mb": 700, "estimate": "size of the files, 2 replicas"}
    assert shown["limits"] == ["gguf_n_ctx: from 1"]


def shown(node: Node) -> list[str]:
    return [one.text for one in list_ejections(NodePresence.objects.get(pk=node.pk), now=timezone.now())]


def test_who_may_not_allow_models_has_no_credential_allow_them(boss: Client) -> None:
    credential, _ = make_credential()
    ada = sign_in("ada-too", "view_nodecredential", "add_nodecredential", "change_nodecredential", "view_provider")
    add = reverse("admin:nodes_nodecredential_add")
    fields = {"name": "rigs", "provider": str(credential.provider.pk), "max_nodes": "1", "node": ""}
    assert "may not decide which models" in submit(ada, add, **fields, allows_models="on")
    assert not NodeCredential.objects.filter(name="rigs").exists()
    trust = confirm_url("nodecredential", credential, "trust")
    assert ada.get(trust).status_code == 403
    assert "/change/trust/" not in page(ada, "nodes_nodecredential_change", credential.pk)
    assert "Clients may use what the nodes of box declare" in submit(boss, trust)
    credential.refresh_from_db()
    assert credential.allows_models
    submit(boss, add, **fields, allows_models="on")
    assert NodeCredential.objects.get(name="rigs").allows_models
    submit(boss, confirm_url("nodecredential", credential, "distrust"))
    credential.refresh_from_db()
    assert not credential.allows_models


def test_a_provider_is_made_switched_off_on_and_deleted(boss: Client) -> None:
    assert "Created berlin" in submit(boss, reverse("admin:nodes_provider_add"), name="berlin")
    assert "exists already" in submit(boss, reverse("admin:nodes_provider_add"), name="berlin")
    provider = Provider.objects.get()
    url = confirm_url("provider", provider, "terms")
    assert "Changed the limits of berlin" in submit(boss, url, max_queue="7", no_node_s="30", queue_s="", max_models="")
    provider.refresh_from_db()
    assert (provider.max_queue, provider.queue_s, provider.no_node_s, provider.max_models) == (7, None, 30, None)
    assert 'value="7"' in page_at(boss, url)
    for change, state in (("disable", "disabled"), ("enable", "enabled"), ("delete", "deleted")):
        submit(boss, confirm_url("provider", provider, change))
        provider.refresh_from_db()
        assert provider.state == ProviderState(state)
    for change in ("enable", "disable", "delete"):
        assert f"/change/{change}/" not in page(boss, "nodes_provider_changelist")
