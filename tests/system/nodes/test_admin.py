"""Operators' pages of boxes, credentials and providers: they show, ask, and act on a confirmed POST alone."""

from __future__ import annotations

import html
import re
from datetime import timedelta
from urllib.parse import quote

import pytest
from django.conf import LazySettings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from governance.services.people import Assurance
from nodes.admin import describe_age
from nodes.models import Node, NodeCredential, Provider, ProviderState
from nodes.services import cordon_node, delete_provider, find_credential
from tests.fakes.governed_nodes import Identity, make_box
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence, make_provider
from tests.system.governance.team import make_governed

pytestmark = pytest.mark.django_db

PAGE_QUERIES = 11


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


def submit(client: Client, url: str, **fields: str) -> tuple[int, str]:
    """Open a page, send its form as a browser would, and return status and page of what follows."""
    response = client.post(url, {"csrfmiddlewaretoken": csrf(client, url), **fields}, follow=True)
    return response.status_code, response.content.decode()


def page(client: Client, name: str, *arguments: object) -> str:
    """Return an admin page that must be there."""
    response = client.get(reverse(f"admin:{name}", args=arguments))
    assert response.status_code == 200
    return response.content.decode()


def confirm_url(kind: str, row: Node | Provider | NodeCredential, change: str) -> str:
    """Return the address of a confirm page."""
    return reverse(f"admin:nodes_{kind}_confirm", args=[row.pk, change])


# Lists


def test_the_page_of_a_box_says_that_a_second_one_wants_its_name(boss: Client) -> None:
    node = make_node("joy-01", rival_seen_at=timezone.now() - timedelta(minutes=5), rival_address="10.9.8.7")
    assert "refused 5 min ago, from 10.9.8.7: give it another name" in page(boss, "nodes_node_change", node.pk)
    Node.objects.update(rival_seen_at=timezone.now() - timedelta(days=2))
    assert "10.9.8.7" not in page(boss, "nodes_node_change", node.pk)


def test_the_list_shows_how_every_box_does(boss: Client) -> None:
    busy = make_node("joy-01", gpu_name="NVIDIA L4", vram_total_mb=23040, model_names=["tiny"], max_concurrent=4)
    make_presence(busy, age_s=3, reported_status="busy", active_requests=3, gpu_util_percent=63, vram_used_mb=18432)
    make_node("joy-02", cordoned=True)
    shown = page(boss, "nodes_node_changelist")
    assert re.search(r"\d+ s ago", shown)
    for text in ("joy-01", "busy", "tiny", "3 / 4", "NVIDIA L4 63 % 18.0/22.5 GiB", "joy-02", "offline", "never"):
        assert text in shown, text
    assert "cordoned" in shown


@pytest.mark.parametrize(("status", "names"), [("available", {"fresh"}), ("draining", {"held"}), ("offline", {"old", "new"})])
def test_the_status_filter_goes_by_the_status_at_this_moment(boss: Client, status: str, names: set[str]) -> None:
    make_presence(make_node("fresh"))
    make_presence(make_node("held", cordoned=True))
    make_presence(make_node("old"), age_s=20)
    make_node("new")
    response = boss.get(reverse("admin:nodes_node_changelist"), {"status": status})
    assert {node.name for node in response.context["cl"].result_list} == names


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


def test_boxes_of_deleted_providers_are_not_shown(boss: Client) -> None:
    credential, _ = make_credential(provider="gone")
    make_node("ghost", credential=credential)
    delete_provider(name="gone", actor=ACTOR)
    assert "ghost" not in page(boss, "nodes_node_changelist")


def test_a_box_has_a_page_that_offers_no_editing(boss: Client) -> None:
    node = make_node("joy-01", model_names=["a", "b", "c", "d", "e"])
    make_presence(
        node,
        connected=True,
        protocol="2026-11-muster-v1",
        peer_address="10.0.0.7",
        last_error="CUDA error",
        replicas=[{"model": "tiny", "state": "loaded", "slots": 4, "active": 1, "weights_mb": 1536}],
    )
    shown = page(boss, "nodes_node_change", node.pk)
    wanted = ("CUDA error", "tiny", "1 / 4", "1.5 GiB", "2026-11-muster-v1 from 10.0.0.7", "a, b, c + 2 more · 1 loaded")
    for text in (node.printed_id, *wanted):
        assert text in shown, text
    assert 'name="_save"' not in shown
    assert 'name="name"' not in shown
    url = reverse("admin:nodes_node_change", args=[node.pk])
    refused = boss.post(url, {"csrfmiddlewaretoken": csrf(boss, confirm_url("node", node, "cordon")), "cordoned": "on"})
    assert refused.status_code == 403
    assert not Node.objects.get().cordoned


@pytest.mark.parametrize("kind", ["node", "nodecredential", "provider"])
def test_nothing_can_be_deleted_through_the_admins_own_pages(boss: Client, kind: str) -> None:
    node = make_node()
    row = {"node": node, "nodecredential": node.credential, "provider": node.provider}[kind]
    assert row is not None
    assert boss.get(reverse(f"admin:nodes_{kind}_delete", args=[row.pk])).status_code == 403


# Changes


def test_opening_a_confirm_page_changes_nothing(boss: Client) -> None:
    node = make_node()
    for change in ("cordon", "drain"):
        assert boss.get(confirm_url("node", node, change)).status_code == 200
        assert boss.head(confirm_url("node", node, change)).status_code == 200
    node.refresh_from_db()
    assert not (node.cordoned)
    assert not (node.draining)


def test_a_post_without_the_pages_token_changes_nothing(boss: Client) -> None:
    node = make_node()
    assert boss.post(confirm_url("node", node, "cordon")).status_code == 403
    assert not Node.objects.get().cordoned


def test_a_box_is_cordoned_and_uncordoned(boss: Client) -> None:
    node = make_node("joy-01")
    assert confirm_url("node", node, "cordon") in page(boss, "nodes_node_changelist")
    status, shown = submit(boss, confirm_url("node", node, "cordon"))
    assert status == 200
    assert "joy-01 is cordoned" in shown
    assert audited("node.cordon")[0].actor == "user:ada"
    assert confirm_url("node", node, "uncordon") in shown
    assert confirm_url("node", node, "cordon") not in shown
    submit(boss, confirm_url("node", node, "uncordon"))
    assert not Node.objects.get().cordoned


def test_a_box_is_drained_with_a_reason_and_a_time_and_undrained(boss: Client) -> None:
    node = make_node("joy-01")
    status, shown = submit(boss, confirm_url("node", node, "drain"), reason="new fans", timeout_s="60")
    assert (status, "joy-01 is draining" in shown) == (200, True)
    node.refresh_from_db()
    assert (node.draining, node.drain_reason) == (True, "new fans")
    submit(boss, confirm_url("node", node, "undrain"))
    assert not Node.objects.get().draining
    submit(boss, confirm_url("node", node, "drain"), reason="", timeout_s="")
    assert Node.objects.get().draining


def test_what_the_form_cannot_take_is_said_and_nothing_changes(boss: Client) -> None:
    node = make_node()
    _, shown = submit(boss, confirm_url("node", node, "drain"), timeout_s="-1")
    assert "greater than or equal to 0" in shown
    assert not Node.objects.get().draining


def test_a_change_that_someone_else_made_first_is_said(boss: Client) -> None:
    node = make_node()
    token = csrf(boss, confirm_url("node", node, "cordon"))
    cordon_node(node_id=node.pk, actor="user:bob")
    response = boss.post(confirm_url("node", node, "cordon"), {"csrfmiddlewaretoken": token}, follow=True)
    assert "changed in the meantime" in response.content.decode()
    assert len(audited("node.cordon")) == 1


def test_an_unknown_row_or_change_is_404(boss: Client) -> None:
    node = make_node()
    assert boss.get(confirm_url("node", node, "explode")).status_code == 404
    assert boss.get(reverse("admin:nodes_node_confirm", args=["x", "cordon"])).status_code == 404


def test_who_may_only_look_is_offered_nothing_and_refused() -> None:
    node = make_node()
    viewer = sign_in("eve", "view_node", "view_nodecredential", "view_provider")
    shown = page(viewer, "nodes_node_changelist") + page(viewer, "nodes_node_change", node.pk)
    assert "/change/cordon/" not in shown
    assert viewer.get(confirm_url("node", node, "cordon")).status_code == 403
    assert viewer.get(reverse("admin:nodes_nodecredential_add")).status_code == 403
    assert viewer.get(reverse("admin:nodes_provider_add")).status_code == 403
    assert sign_in("joe").get(reverse("admin:nodes_node_changelist")).status_code == 403


def test_who_may_change_boxes_may_not_revoke_credentials() -> None:
    node = make_node()
    assert node.credential is not None
    keeper = sign_in("eve", "view_node", "change_node", "view_nodecredential")
    assert submit(keeper, confirm_url("node", node, "cordon"))[0] == 200
    assert keeper.get(confirm_url("nodecredential", node.credential, "revoke")).status_code == 403


def test_anonymous_visitors_are_sent_to_sign_in() -> None:
    response = Client().get(confirm_url("node", make_node(), "cordon"))
    assert response.status_code == 302
    assert "/login/" in response["Location"]


# Credentials and providers


def test_a_new_credential_is_shown_exactly_once(boss: Client) -> None:
    provider = make_provider()
    url = reverse("admin:nodes_nodecredential_add")
    token = csrf(boss, url)
    fields = {"csrfmiddlewaretoken": token, "name": "rack 4", "provider": str(provider.pk), "max_nodes": "3"}
    response = boss.post(url, fields)
    assert response.status_code == 200
    assert "no-store" in response["Cache-Control"]
    (text,) = set(re.findall(r"msw_[0-9A-Za-z_]{51}", response.content.decode()))
    found = find_credential(text)
    assert found is not None
    assert (found.name, found.max_nodes, found.provider) == ("rack 4", 3, provider)
    later = page(boss, "nodes_nodecredential_changelist") + page(boss, "nodes_nodecredential_change", found.pk)
    assert text not in later
    assert text not in str(dict(boss.session))
    assert text not in str(boss.cookies)
    assert audited("node_credential.create")[0].actor == "user:ada"


@pytest.mark.parametrize(
    ("url", "provider", "command", "names_this_machine"),
    [
        ("https://api.example.com/", "local", "./muster node --gateway https://api.example.com --token {} --data", False),
        (
            "http://127.0.0.1:8080",
            "rack2",
            "./muster node --gateway http://127.0.0.1:8080 --token {} --provider rack2 --data",
            True,
        ),
    ],
)
def test_the_page_of_a_new_credential_has_the_line_that_starts_the_node_and_what_comes_next(
    boss: Client, settings: LazySettings, url: str, provider: str, command: str, names_this_machine: bool
) -> None:
    settings.GATEWAY_PUBLIC_URL = url
    row = make_provider(provider)
    answer = submit(boss, reverse("admin:nodes_nodecredential_add"), name="x", provider=str(row.pk), max_nodes="1")
    shown = html.unescape(answer[1])
    (text,) = set(re.findall(r"msw_[0-9A-Za-z_]{20,}", shown))
    assert command.format(text) in shown
    assert ("write this machine's address" in shown) is names_this_machine
    for page_of_next in ("admin:nodes_node_changelist", "admin:gateway_model_changelist"):
        assert f'href="{reverse(page_of_next)}"' in shown[shown.index("mst-steps") :]
    assert "./muster trust WORDS --data" in shown


def test_a_credential_that_cannot_be_made_says_why_at_the_field(boss: Client) -> None:
    provider = make_provider()
    url = reverse("admin:nodes_nodecredential_add")
    status, shown = submit(boss, url, name="x", provider=str(provider.pk), max_nodes="10001")
    assert status == 200
    assert "max_nodes must be between 1 and 10000" in shown
    assert not NodeCredential.objects.exists()


def test_a_credential_is_revoked(boss: Client) -> None:
    credential, text = make_credential()
    assert "Revoked the node credential box" in submit(boss, confirm_url("nodecredential", credential, "revoke"))[1]
    assert find_credential(text) is None
    assert "/change/revoke/" not in page(boss, "nodes_nodecredential_changelist")


def test_a_provider_is_made_switched_off_on_and_deleted(boss: Client) -> None:
    status, shown = submit(boss, reverse("admin:nodes_provider_add"), name="berlin")
    assert (status, "Created berlin" in shown) == (200, True)
    assert "exists already" in submit(boss, reverse("admin:nodes_provider_add"), name="berlin")[1]
    provider = Provider.objects.get()
    for change, state in (("disable", "disabled"), ("enable", "enabled"), ("delete", "deleted")):
        submit(boss, confirm_url("provider", provider, change))
        provider.refresh_from_db()
        assert provider.state == ProviderState(state)
    for change in ("enable", "disable", "delete"):
        assert f"/change/{change}/" not in page(boss, "nodes_provider_changelist")


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        (None, "never"),
        (0.4, "0 s ago"),
        (3, "3 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (7199, "119 min ago"),
        (7200, "2 h ago"),
        (172_800, "2 d ago"),
    ],
)
def test_an_age_reads_well(age_s: float | None, text: str) -> None:
    assert describe_age(age_s) == text


# Governance


def test_the_page_of_a_box_says_how_it_decides_and_what_can_be_proposed(boss: Client) -> None:
    rig = Identity()
    node = make_box(rig, policy_version=1, witness_size=42, clock_ms=1)
    shown = page(boss, "nodes_node_change", node.pk)
    for text in (
        "L2: approvals are verified on the node",
        rig.runner_id,
        "version 1 pinned · none is in force",
        "42",
        "no operation is sent",
    ):
        assert text in shown, text
    target = quote(rig.runner_id, safe="")
    for operation in ("model-load", "model-unload", "cache-flush", "settings-reload"):
        assert f"/approvals/propose?operation={operation}&amp;target={target}" in shown
    for operation in ("node-drain", "node-evict"):
        assert f"/approvals/propose?operation={operation}&amp;target={node.printed_id}" in shown
    assert "Operation key" not in shown


def test_a_box_that_takes_no_operations_can_only_be_held_back(boss: Client) -> None:
    shown = page(boss, "nodes_node_change", make_node().pk)
    assert "takes no operations from here" in shown
    assert "operation=model-load" not in shown
    assert "operation=node-evict" in shown


def test_who_may_only_look_is_offered_no_proposal() -> None:
    assert "/approvals/propose" not in page(sign_in("bob", "view_node"), "nodes_node_change", make_box(Identity()).pk)


def test_a_forced_drain_is_sent_to_the_approvals(boss: Client) -> None:
    node = make_node()
    make_governed()
    session = boss.session
    session["muster_assurance"] = Assurance.PASSKEY.value
    session.save()
    status, shown = submit(boss, confirm_url("node", node, "drain"), reason="", timeout_s="5")
    assert status == 200
    assert "propose node-drain" in shown
    assert f"/approvals/propose?operation=node-drain&amp;target={node.printed_id}&amp;timeout_s=5" in shown
    assert not Node.objects.get(pk=node.pk).draining


def test_an_operator_gives_a_box_called_over_http_its_key(boss: Client) -> None:
    node = make_node(reach="direct", public_base_url="http://far.lan")
    url = confirm_url("node", node, "op-key")
    _, shown = submit(boss, url, level="L0", secret="0123456789abcdef", kid="", runner_id="")
    assert "takes approved operations from now on" in shown
    assert "0123456789abcdef" not in shown
    assert Node.objects.get(pk=node.pk).op_level == "L0"
    _, shown = submit(boss, url, level="L1", secret="0123456789abcdef", kid="", runner_id="")
    assert "kid must be" in shown


def test_an_operator_gives_a_node_called_over_http_its_api_key_and_takes_it_back(boss: Client) -> None:
    node = make_node(reach="direct", public_base_url="http://far.lan")
    url = confirm_url("node", node, "api-key")
    _, shown = submit(boss, url, api_key="a-key-of-the-node")
    assert "carry the API key" in shown
    assert "a-key-of-the-node" not in shown + page(boss, "nodes_node_change", node.pk)
    node.refresh_from_db()
    assert "a-key-of-the-node" not in node.sealed_api_key
    assert node.read_api_key() == "a-key-of-the-node"
    _, shown = submit(boss, url, api_key="two words")
    assert "without spaces" in shown
    submit(boss, url, api_key="")
    assert Node.objects.get(pk=node.pk).sealed_api_key == ""


def test_the_page_of_a_box_costs_the_same_however_many_there_are(boss: Client) -> None:
    nodes = [make_box(Identity(f"rig-{number}")) for number in range(8)]
    page(boss, "nodes_node_change", nodes[0].pk)
    with CaptureQueriesContext(connection) as queries:
        page(boss, "nodes_node_change", nodes[0].pk)
    assert len(queries) <= PAGE_QUERIES, [query["sql"][:120] for query in queries]


def test_whoever_may_propose_is_offered_that_without_being_able_to_change_the_node() -> None:
    node = make_box(Identity())
    url = reverse("admin:nodes_node_change", args=[node.pk])
    proposer, viewer = sign_in("ana", "view_node", "add_operation"), sign_in("vic", "view_node")
    pages = [client.get(url).content.decode() for client in (proposer, viewer)]
    assert ["Propose: load" in page for page in pages] == [True, False]
    assert ["Cordon</" in page for page in pages] == [False, False]


def test_a_session_that_may_only_look_reads_why_it_is_offered_neither_changes_nor_proposals() -> None:
    node = make_box(Identity())
    proposer, viewer = sign_in("pia", "view_node", "change_node", "add_operation"), sign_in("vic", "view_node")
    make_governed()
    said = [page(client, "nodes_node_change", node.pk) for client in (proposer, viewer)]
    assert ["/approvals/propose?" in each for each in said] == [False, False]
    told = re.search(r'id="row-changes">(.*?)</p>', said[0], re.DOTALL)
    assert told is not None
    assert "Not in this session: Cordon · Drain" in told[1]
    assert "Propose: load" in told[1]
    assert 'href="/sign-in/keys"' in told[1]
    assert 'id="row-changes"' not in said[1]
