"""Operators' pages of boxes, credentials and providers: they show, ask, and act on a confirmed POST alone.

And what they show of a node whatever its rows hold, its status as SQL filters by it, and its ejections.
"""

from __future__ import annotations

import html
import itertools
import re
import uuid
from dataclasses import replace
from datetime import timedelta
from typing import Any
from urllib.parse import quote

import msgspec
import pytest
from django.conf import LazySettings
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection
from django.template.loader import render_to_string
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from core.limits import limits
from governance.services.people import Assurance
from nodes.admin import describe_age
from nodes.models import Node, NodeCredential, NodePresence, Provider, ProviderState
from nodes.services import cordon_node, delete_provider, describe_gpus, find_credential, judge_status, status_expression
from nodes.services.boxes import BoxView, count_replicas, describe_box, describe_limits, draw_memory, read_box
from nodes.services.ejections import EjectionReport, list_ejections, write_ejections
from nodes.services.overview import read_fleet
from tests.fakes.governed_nodes import Identity, make_box
from tests.fakes.governed_team import make_governed
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence, make_provider
from wire.bridge import BRIDGE_V1, GpuInfo, MemoryInfo, ModelFacts
from wire.contract import NodeMode, NodeStatus

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


def confirm_url(kind: str, row: Node | Provider | NodeCredential, change: str) -> str:
    """Return the address of a confirm page."""
    return reverse(f"admin:nodes_{kind}_confirm", args=[row.pk, change])


# Lists


def test_the_list_shows_how_every_box_does(boss: Client) -> None:
    busy = make_node("joy-01", gpu_name="NVIDIA L4", vram_total_mb=23040, model_names=["tiny"], max_concurrent=4)
    make_presence(busy, age_s=3, reported_status="busy", active_requests=3, gpu_util_percent=63, vram_used_mb=18432)
    make_node("joy-02", cordoned=True)
    make_node("ghost", credential=make_credential(provider="gone")[0])
    delete_provider(name="gone", actor=ACTOR)
    shown = page(boss, "nodes_node_changelist")
    assert re.search(r"\d+ s ago", shown)
    for text in ("joy-01", "busy", "tiny", "3 / 4", "NVIDIA L4 63 % 18.0/22.5 GiB", "joy-02", "offline", "never", "cordoned"):
        assert text in shown, text
    assert "ghost" not in shown
    make_presence(make_node("old"), age_s=20)
    for status, names in (("busy", {"joy-01"}), ("offline", {"joy-02", "old"})):
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


def test_a_box_has_a_page_that_offers_no_editing_and_says_that_a_second_one_wants_its_name(boss: Client) -> None:
    five_ago = timezone.now() - timedelta(minutes=5)
    names: dict[str, Any] = {"model_names": ["a", "b", "c", "d", "e"], "rival_seen_at": five_ago, "rival_address": "10.9.8.7"}
    node = make_node("joy-01", **names)
    replica = {"model": "tiny", "state": "loaded", "slots": 4, "active": 1, "weights_mb": 1536}
    told: dict[str, Any] = {"protocol": "2026-11-muster-v1", "peer_address": "10.0.0.7", "last_error": "CUDA error"}
    make_presence(node, connected=True, replicas=[replica], **told)
    shown = page(boss, "nodes_node_change", node.pk)
    wanted = ("CUDA error", "tiny", "1 / 4", "1.5 GiB", "2026-11-muster-v1 from 10.0.0.7", "a, b, c + 2 more · 1 loaded")
    for text in (node.printed_id, "refused 5 min ago, from 10.9.8.7: give it another name", *wanted):
        assert text in shown, text
    assert 'name="_save"' not in shown
    assert 'name="name"' not in shown
    url = reverse("admin:nodes_node_change", args=[node.pk])
    refused = boss.post(url, {"csrfmiddlewaretoken": csrf(boss, confirm_url("node", node, "cordon")), "cordoned": "on"})
    assert refused.status_code == 403
    assert not Node.objects.get().cordoned
    Node.objects.update(rival_seen_at=timezone.now() - timedelta(days=2))
    assert "10.9.8.7" not in page(boss, "nodes_node_change", node.pk)
    for kind, row in (("node", node), ("nodecredential", node.credential), ("provider", node.provider)):
        assert row is not None
        assert boss.get(reverse(f"admin:nodes_{kind}_delete", args=[row.pk])).status_code == 403


# Changes


def test_neither_opening_a_confirm_page_nor_a_post_without_its_token_changes_anything(boss: Client) -> None:
    node = make_node()
    for change in ("cordon", "drain"):
        assert boss.get(confirm_url("node", node, change)).status_code == 200
        assert boss.post(confirm_url("node", node, change)).status_code == 403
    for unknown in (confirm_url("node", node, "explode"), reverse("admin:nodes_node_confirm", args=["x", "cordon"])):
        assert boss.get(unknown).status_code == 404
    node.refresh_from_db()
    assert (node.cordoned, node.draining) == (False, False)


def test_a_box_is_cordoned_and_drained_and_the_other_way_round(boss: Client) -> None:
    node = make_node("joy-01")
    assert confirm_url("node", node, "cordon") in page(boss, "nodes_node_changelist")
    shown = submit(boss, confirm_url("node", node, "cordon"))
    assert "joy-01 is cordoned" in shown
    assert audited("node.cordon")[0].actor == "user:ada"
    assert confirm_url("node", node, "uncordon") in shown
    assert confirm_url("node", node, "cordon") not in shown
    submit(boss, confirm_url("node", node, "uncordon"))
    assert not Node.objects.get().cordoned
    assert "greater than or equal to 0" in submit(boss, confirm_url("node", node, "drain"), timeout_s="-1")
    assert not Node.objects.get().draining
    assert "joy-01 is draining" in submit(boss, confirm_url("node", node, "drain"), reason="new fans", timeout_s="60")
    node.refresh_from_db()
    assert (node.draining, node.drain_reason) == (True, "new fans")
    submit(boss, confirm_url("node", node, "undrain"))
    assert not Node.objects.get().draining
    submit(boss, confirm_url("node", node, "drain"), reason="", timeout_s="")
    assert Node.objects.get().draining


def test_a_change_that_someone_else_made_first_is_said(boss: Client) -> None:
    node = make_node()
    token = csrf(boss, confirm_url("node", node, "cordon"))
    cordon_node(node_id=node.pk, actor="user:bob")
    response = boss.post(confirm_url("node", node, "cordon"), {"csrfmiddlewaretoken": token}, follow=True)
    assert "changed in the meantime" in response.content.decode()
    assert len(audited("node.cordon")) == 1


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


@pytest.mark.parametrize(
    ("url", "provider", "command", "names_this_machine"),
    [
        ("https://api.example.com/", "local", "--gateway https://api.example.com --token {} --data", False),
        ("http://127.0.0.1:8080", "rack2", "--gateway http://127.0.0.1:8080 --token {} --provider rack2 --data", True),
    ],
)
def test_a_new_credential_is_shown_exactly_once_with_the_line_that_starts_the_node(
    boss: Client, settings: LazySettings, url: str, provider: str, command: str, names_this_machine: bool
) -> None:
    settings.GATEWAY_PUBLIC_URL = url
    row, add = make_provider(provider), reverse("admin:nodes_nodecredential_add")
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
    assert f"./muster node {command.format(text)}" in shown
    assert ("write this machine's address" in shown) is names_this_machine
    for page_of_next in ("admin:nodes_node_changelist", "admin:gateway_model_changelist"):
        assert f'href="{reverse(page_of_next)}"' in shown[shown.index("mst-steps") :]
    assert "./muster trust WORDS --data" in shown
    assert "Revoked the node credential rack 4" in submit(boss, confirm_url("nodecredential", found, "revoke"))
    assert find_credential(text) is None
    assert "/change/revoke/" not in page(boss, "nodes_nodecredential_changelist")


def test_a_provider_is_made_switched_off_on_and_deleted(boss: Client) -> None:
    assert "Created berlin" in submit(boss, reverse("admin:nodes_provider_add"), name="berlin")
    assert "exists already" in submit(boss, reverse("admin:nodes_provider_add"), name="berlin")
    provider = Provider.objects.get()
    for change, state in (("disable", "disabled"), ("enable", "enabled"), ("delete", "deleted")):
        submit(boss, confirm_url("provider", provider, change))
        provider.refresh_from_db()
        assert provider.state == ProviderState(state)
    for change in ("enable", "disable", "delete"):
        assert f"/change/{change}/" not in page(boss, "nodes_provider_changelist")


# Governance


def test_the_page_of_a_box_says_how_it_decides_and_what_can_be_proposed(boss: Client) -> None:
    rig = Identity()
    node, *_ = make_box(rig, policy_version=1, witness_size=42, clock_ms=1), make_box(Identity("a")), make_box(Identity("b"))
    page(boss, "nodes_node_change", node.pk)
    with CaptureQueriesContext(connection) as queries:
        shown = page(boss, "nodes_node_change", node.pk)
    assert len(queries) <= PAGE_QUERIES, [query["sql"][:120] for query in queries]
    pinned = "version 1 pinned · none is in force"
    for text in ("L2: approvals are verified on the node", rig.runner_id, pinned, "42", "no operation is sent"):
        assert text in shown, text
    target = quote(rig.runner_id, safe="")
    for operation in ("model-load", "model-unload", "cache-flush", "settings-reload"):
        assert f"/approvals/propose?operation={operation}&amp;target={target}" in shown
    for operation in ("node-drain", "node-evict"):
        assert f"/approvals/propose?operation={operation}&amp;target={node.printed_id}" in shown
    assert "Operation key" not in shown
    plain = page(boss, "nodes_node_change", make_node().pk)
    assert "takes no operations from here" in plain
    assert ["operation=model-load" in plain, "operation=node-evict" in plain] == [False, True]


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


def test_whoever_may_propose_is_offered_that_alone_and_a_session_that_may_only_look_reads_why_not() -> None:
    node = make_box(Identity())
    who = sign_in("ivo", "view_node", "add_operation"), sign_in("pia", "view_node", "change_node", "add_operation")
    clients = [*who, sign_in("vic", "view_node")]
    shown = [page(client, "nodes_node_change", node.pk) for client in clients]
    assert ["Propose: load" in each for each in shown] == [True, True, False]
    assert [confirm_url("node", node, "cordon") in each for each in shown] == [False, True, False]
    make_governed()
    said = [page(client, "nodes_node_change", node.pk) for client in clients]
    assert ["/approvals/propose?" in each for each in said] == [False] * 3
    told = re.search(r'id="row-changes">(.*?)</p>', said[1], re.DOTALL)
    assert told is not None
    for words in ("Not in this session: Cordon · Drain", "Propose: load", 'href="/sign-in/keys"'):
        assert words in told[1]
    assert 'id="row-changes"' not in said[2]


# What is shown of a node, whatever its rows hold


def describe(node: Node | None = None, **presence: Any) -> BoxView:
    """Return the view of a box that was heard just now, without a database."""
    box = node or Node(name="box")
    NodePresence(node=box, last_heartbeat_at=timezone.now(), **presence)
    return describe_box(box, now=timezone.now())


def replica(model: str, state: str, **fields: object) -> dict[str, object]:
    return {"model": model, "state": state, **fields}


def test_models_are_shown_by_state_and_name_and_a_long_list_is_cut() -> None:
    rows = [
        replica("b", "loaded", slots=4, active=1, weights_mb=10), replica("a", "loaded"), replica("d", "unloading"),
        replica("c", "loading", progress=0.999, eta_s=3.5, detail="weights"), replica("e", "failed", detail="no room"),
        replica("f", "unloaded"), replica("g", "something new"),
    ]  # fmt: skip
    most = limits().nodes.shown_models
    box = describe(replicas=rows, available_models=[f"m{number}" for number in range(most + 7)])
    assert [view.model for view in box.loaded] == ["a", "b"]
    assert [(view.model, view.percent, view.eta_s) for view in box.changing] == [("c", 99, 3.5), ("d", None, None)]
    assert [(view.model, view.detail) for view in box.failed] == [("e", "no room")]
    assert (len(box.available), box.available_beyond, box.is_current, box.says_something) == (most, 7, True, True)
    assert not describe().says_something


@pytest.mark.parametrize("odd", [[{"model": 5}], ["x"], {"a": 1}, [{"model": "m", "state": "loaded", "progress": "half"}]])
def test_rows_that_another_release_wrote_are_no_error(odd: object) -> None:
    box = describe(replicas=odd, gpus=odd, memory={"total_mb": "many"})
    assert not box.says_something
    assert count_replicas(NodePresence(replicas=odd)) == {}


@pytest.mark.parametrize(
    ("memory", "parts"),
    [
        (MemoryInfo(total_mb=100, used_mb=60, weights_mb=40, kv_mb=15), [40, 15, 5, 40]),
        (MemoryInfo(total_mb=100, used_mb=60), [0, 0, 60, 40]),
        (MemoryInfo(total_mb=100, used_mb=60, weights_mb=90, kv_mb=90), [60, 0, 0, 40]),
        (MemoryInfo(total_mb=100, used_mb=900, kv_mb=30), [0, 30, 70, 0]),
        (MemoryInfo(total_mb=100), [0, 0, 0, 100]),
    ],
)
def test_the_parts_of_the_bar_fill_it_whatever_the_figures(memory: MemoryInfo, parts: list[int]) -> None:
    bar = draw_memory(memory, [])
    assert bar is not None
    assert [part.mb for part in bar.parts] == parts
    assert sum(part.share for part in bar.parts) == pytest.approx(100)
    assert [part.start for part in bar.parts] == pytest.approx([sum(parts[:index]) for index in range(4)])


def test_without_a_figure_of_the_box_its_gpus_are_added_up_and_without_a_total_there_is_no_bar() -> None:
    gpus = [GpuInfo(index=0, name="a", memory_total_mb=10, memory_used_mb=4), GpuInfo(index=1, name="b", memory_total_mb=30)]
    bar = draw_memory(None, gpus)
    assert bar is not None
    assert (bar.used_mb, bar.total_mb, bar.kind) == (4, 40, "gpu")
    for memory in (None, MemoryInfo(used_mb=5), MemoryInfo(total_mb=0, used_mb=5)):
        assert draw_memory(memory, [GpuInfo(index=0, name="a")]) is None
    box = describe(Node(name="box", gpu_name="L4", vram_total_mb=1000), vram_used_mb=250, gpu_util_percent=30.0)
    assert box.memory is not None
    assert (box.gpus[0].name, box.memory.used_mb, box.memory.total_mb) == ("L4", 250, 1000)
    plain = Node(gpu_name="NVIDIA L4", vram_total_mb=23040)
    two = [{"index": 0, "name": "RTX 4090", "utilization_percent": 5, "memory_used_mb": 1024, "memory_total_mb": 24576},
           {"index": 1, "name": "RTX 3060"}]  # fmt: skip
    assert describe_gpus(plain, NodePresence(gpus=two)) == "RTX 4090 5 % 1.0/24.0 GiB; RTX 3060"
    assert (describe_gpus(plain, None), describe_gpus(Node(), None)) == ("NVIDIA L4 22.5 GiB", "")


def test_a_box_is_read_in_one_query_and_one_of_a_deleted_provider_is_not_there(django_assert_num_queries: Any) -> None:
    node = make_node()
    make_presence(node, age_s=60, replicas=[replica("a", "loading", progress=0.5)])
    with django_assert_num_queries(1):
        box = read_box(node.pk)
    assert box is not None
    assert (box.is_current, box.changing[0].percent) == (False, 50)
    assert [health.models for health in read_fleet().nodes] == ["1 loading"]
    delete_provider(name="local", actor=ACTOR)
    assert read_box(node.pk) is None


def test_what_loads_take_and_may_set_is_shown() -> None:
    facts = ModelFacts(
        name="m", backend="gguf", state="unloaded", replica_max=4, target_inflight=2, configured_target_inflight=3,
        estimate_mb=700, estimate_replicas=2, estimate_source="model_artifact_size",
        load_constraints={"gguf_n_ctx": {"kind": "integer", "minimum": 1, "step": 1}},
    )  # fmt: skip
    box = describe(memory=msgspec.to_builtins(MemoryInfo(total_mb=10, models=[facts])))
    (shown,) = box.facts
    said = (shown.name, shown.replicas, shown.estimate_mb, shown.estimate, shown.limits)
    assert said == ("m", "up to 4", 700, "size of the files, 2 replicas", ("gguf_n_ctx: from 1",))
    text = render_to_string("admin/muster/box_state.html", {"box": box})
    for words in ("What a load takes and may set", "gguf_n_ctx: from 1", "2 <small>3 in the settings</small>"):
        assert words in text
    assert '<span class="mst-name">m</span> <small>unloaded</small>' in text


def test_limits_of_a_field_and_ages_are_said_in_words() -> None:
    said: list[tuple[dict[str, object], str]] = [
        ({"minimum": 1, "maximum": 64, "step": 1, "unit": "replicas", "default": 1}, "1 to 64 replicas; 1 when left out"),
        ({"minimum": 256, "step": 256, "unit": "tokens", "default": None}, "from 256 in steps of 256 tokens"),
        ({"allowed_values": ["f16", None], "default": "f16"}, "f16, nothing; f16 when left out"),
        ({"kind": "string_or_null", "format": "a path"}, "a path"),
        ({}, "any value"),
    ]
    assert [describe_limits(field) for field, _ in said] == [words for _, words in said]
    ages = {None: "never", 0.4: "0 s ago", 119: "119 s ago", 120: "2 min ago", 7199: "119 min ago", 7200: "2 h ago"}
    assert {age_s: describe_age(age_s) for age_s in ages} == ages
    assert describe_age(172_800) == "2 d ago"


def test_sql_and_python_agree_on_the_status_of_every_combination() -> None:
    credential, _ = make_credential(max_nodes=10_000)
    bools = (False, True)
    kinds = itertools.product((None, 1, 12, 17, 46), ("", BRIDGE_V1), NodeStatus, NodeMode, bools, bools, bools)
    presences = []
    for number, (age_s, protocol, reported, mode, draining, cordoned, accepting) in enumerate(kinds):
        node = Node(
            name=str(number), credential=credential, provider=credential.provider, mode=mode, draining=draining,
            cordoned=cordoned,
        )  # fmt: skip
        heard = None if age_s is None else timezone.now() - timedelta(seconds=age_s)
        told: dict[str, Any] = {"protocol": protocol, "reported_status": reported, "is_accepting_jobs": accepting}
        presences.append(NodePresence(node=node, last_heartbeat_at=heard, **told))
    Node.objects.bulk_create([presence.node for presence in presences])
    NodePresence.objects.bulk_create(presences)
    make_node("never registered a presence", credential=credential)
    now = timezone.now()
    rows = Node.objects.select_related("presence").annotate(status_now=status_expression(now=now))
    judged = [(node.status_now, judge_status(node, getattr(node, "presence", None), now=now)) for node in rows]
    assert len(judged) == 5 * 2 * 5 * 2 * 8 + 1
    assert [pair for pair in judged if pair[0] != pair[1]] == []


# Ejections

HERE, THERE = uuid.UUID(int=1), uuid.UUID(int=2)


def report(node: Node, **changes: object) -> EjectionReport:
    """Return that a gateway ejected the node for ``m`` now, for twenty seconds."""
    made = EjectionReport(node_id=node.pk, model="m", reason="failed", age_s=0.0, left_s=20.0, is_news=True)
    return replace(made, **changes)  # type: ignore[arg-type]  # the fields of the report


def shown_of(node: Node) -> list[str]:
    return [one.words for one in list_ejections(NodePresence.objects.get(pk=node.pk), now=timezone.now())]


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
