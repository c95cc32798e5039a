"""The page of a node: its condition, whether it may be powered off, tabs, its log; changes of many nodes, and their removal."""

from __future__ import annotations

import html
import re
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from governance.audit import record_event
from nodes.errors import BadRequest
from nodes.models import GpuMinute, GpuSample, Node, NodeCredential, NodeLog, NodePresence, clock_of, with_clock
from nodes.pages import TABS, hint_at_runner
from nodes.services.conditions import WORDS, Condition, judge_nodes, read_standing
from nodes.services.drains import drain_node
from nodes.services.gpus import follow_gpus
from nodes.services.history import sample_gpus
from nodes.services.nodes import remove_dead_nodes, remove_node
from nodes.tasks import renew_key
from tests.fakes.governed_team import approve_load, make_governed
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence, make_record
from wire import RELEASE
from wire.contract import RequestState

pytestmark = pytest.mark.django_db

GPU = {"index": 0, "name": "NVIDIA L4", "memory_total_mb": 1_000, "memory_used_mb": 250, "utilization_percent": 40.0}
LOADED = {"model": "tiny", "state": "loaded", "slots": 4, "active": 1, "engine": "llamacpp"}


def sign_in(*permissions: str, name: str = "ada") -> Client:
    user = get_user_model().objects.create_user(name, is_staff=True, is_superuser=not permissions)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def boss() -> Client:
    return sign_in()


def stand(node: Node) -> tuple[str, str]:
    """Return the condition of a node, and the words a page has for it."""
    read = with_clock(Node.objects.select_related("presence", "provider")).get(pk=node.pk)
    standing = read_standing(read, now=clock_of(read))
    assert judge_nodes(Node.objects.all())[node.pk] is standing.condition, "a list says the same"
    return standing.condition.value, f"{standing.label}: {standing.text}"


def drained(node: Node) -> None:
    drain_node(node_id=node.pk, actor=ACTOR, reason="fans")
    Node.objects.filter(pk=node.pk).update(drained_at=timezone.now())


def cut(node: Node) -> None:
    drained(node)
    Node.objects.filter(pk=node.pk).update(drain_interrupted=2)


CONDITIONS: tuple[tuple[dict[str, Any], dict[str, Any], Callable[[Node], object] | None, str, str], ...] = (
    ({}, {"active_requests": 1}, None, "ready", "3 of 4 slots are free."),
    ({}, {"active_requests": 4}, None, "busy", "All 4 slots are in use."),
    ({"model_names": []}, {"replicas": [{"model": "big", "state": "loading", "progress": 0.4}]}, None, "loading", "big 40 %"),
    ({"cordoned": True}, {}, None, "cordoned", "It gets no new work; what runs goes on."),
    ({"mode": "spare_off"}, {"active_requests": 1}, None, "reclaimed", "Its owner took it back"),
    ({}, {"is_accepting_jobs": False}, None, "held-back", "It says itself"),
    ({}, {"age_s": 12.0}, None, "late", "overdue"),
    ({}, {"age_s": 99.0}, None, "offline", "since 20"),
    ({}, {"age_s": None}, None, "offline", "It was never heard."),
    ({}, {"reported_status": "error", "last_error": "CUDA error"}, None, "failing", "CUDA error"),
    ({"draining": True}, {"active_requests": 3}, None, "draining", "draining, 3 left"),
    ({}, {"active_requests": 0}, drained, "drained", "safe to power off since 20"),
    ({}, {}, cut, "drained", "2 requests were interrupted"),
    ({}, {"protocol": "2026-04-bridge-v1", "age_s": 1.0}, drained, "drained", "does not say what else it does"),
)


@pytest.mark.parametrize(("node", "presence", "change", "condition", "words"), CONDITIONS)
def test_a_node_stands_in_words_that_say_what_an_operator_may_do(
    node: dict[str, Any], presence: dict[str, Any], change: Callable[[Node], object] | None, condition: str, words: str
) -> None:
    made = make_node(**{"model_names": ["tiny"], "max_concurrent": 4, **node})
    make_presence(made, **presence)
    if change is not None:
        change(made)
    found, text = stand(made)
    assert found == condition
    assert words in text


def test_every_condition_has_a_word() -> None:
    assert set(WORDS) == set(Condition)


def ask(client: Client, node: Node) -> str:
    """Return what the page answers to the question whether the node may be powered off."""
    shown = client.get(reverse("admin:nodes_node_change", args=[node.pk])).content.decode()
    found = re.search(r'<div class="mst-power.*?</section>', shown, re.DOTALL)
    assert found is not None
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", found[0])).split())


def test_may_i_power_it_off_is_no_while_requests_run_and_says_what_would_be_lost(boss: Client) -> None:
    node = make_node(model_names=["tiny", "big"], op_level="L2", runner_id="box:1")
    make_presence(node, active_requests=3, replicas=[LOADED, {**LOADED, "model": "big", "kept": True}])
    for age_s in (40, 5):
        make_record(age_s=age_s, state=RequestState.RUNNING, node_id=node.pk, node_name=node.name, model="tiny")
    answer = ask(boss, node)
    for text in (
        "No. 3 requests run on it.",
        "2 requests for tiny would end with an error; the oldest runs for 4",
        "1 request on the node's own port would end.",
        "No other node serves big, tiny: clients get 503 meanwhile.",
        "unless the node's settings load it: tiny.",
        "Drain it, so that it may go",
    ):
        assert text in answer, text
    other = make_node("other", credential=make_credential("other")[0], model_names=["tiny"])
    make_presence(other)
    assert "No other node serves big: clients" in ask(boss, node)
    assert "Drain it" not in ask(sign_in("view_node", name="eve"), node)


def test_it_is_not_yet_while_a_request_may_come_and_yes_once_it_is_drained_or_gone(boss: Client) -> None:
    node = make_node()
    presence = make_presence(node)
    assert "Not yet. Nothing runs on it now, and a request may come at any moment." in ask(boss, node)
    drain_node(node_id=node.pk, actor=ACTOR, reason="")
    assert "Not yet. Nothing runs on it; its gateways are about to confirm that." in ask(boss, node)
    Node.objects.update(drained_at=timezone.now())
    assert "Yes. It gets no new work, and nothing runs on it." in ask(boss, node)
    NodePresence.objects.filter(pk=presence.pk).update(last_heartbeat_at=timezone.now() - timedelta(hours=1))
    assert "Yes. Nothing runs on it for Muster: it is offline." in ask(boss, node)


def test_an_operation_under_way_keeps_a_drained_node_on(boss: Client) -> None:
    team = make_governed()
    node = make_node("rig", runner_id="box:rig", op_level="L2")
    make_presence(node)
    drained(node)
    operation = approve_load(team, "box:rig")
    operation.runs.update(node_id=node.pk)
    assert "No. An approved operation is under way on it." in ask(boss, node)
    assert (
        f"/approvals/{operation.printed_id}/" in boss.get(reverse("admin:nodes_node_change", args=[node.pk])).content.decode()
    )
    with pytest.raises(BadRequest, match="not offline"):
        remove_node(node_id=node.pk, actor=ACTOR)
    NodePresence.objects.update(last_heartbeat_at=timezone.now() - timedelta(hours=1))
    with pytest.raises(BadRequest, match="operation under way"):
        remove_node(node_id=node.pk, actor=ACTOR)


# Tabs


def make_rich(name: str = "rig", count: int = 1) -> Node:
    """A node with as much of everything that its page shows as ``count`` says."""
    node = make_node(
        name, credential=make_credential(name)[0], runner_id=f"box:{name}", op_level="L2", agent_version="0.0.9",
        model_names=["tiny"], excluded_models=["tiny"], clock_skew_ms=300_000,
    )  # fmt: skip
    facts = [{"name": f"m{n}", "estimate_mb": 100 * 10**n, "estimate_replicas": 1, "replica_max": 2} for n in range(count)]
    memory = {"total_mb": 10_000, "used_mb": 1_000, "weights_mb": 600, "kv_mb": 100, "models": facts}
    available = [f"m{n}" for n in range(count)] + ["unmeasured"]
    make_presence(
        node, gpus=[{**GPU, "index": n} for n in range(count)], replicas=[LOADED], memory=memory, available_models=available
    )
    for number in range(count):
        make_record(node_id=node.pk, node_name=name, model="tiny", latency_ms=1_500, completion_tokens=number)
        record_event(actor="user:ada", action="node.cordon", target=node.printed_id, detail={"name": name})
    NodeLog.objects.create(
        node=node, query_id=uuid.uuid4(), asked_at=timezone.now(), told_at=timezone.now(), is_told=True, left_out=count,
        lines=[{"at_ms": 1, "level": "error", "text": "runner: <b>no</b>"}] * count,
    )  # fmt: skip
    follow_gpus()
    sample_gpus()
    return node


SHOWN = {
    "overview": ("GPU memory", "weights", "600 MiB", "Unload", "GPU utilisation", "operation=model-unload"),
    "models": (
        "It needs 100 MiB; 8.8 GiB are free.",
        "Nobody has measured it here.",
        "operation=model-load",
        "given no requests",
    ),
    "requests": ("No request runs on it.", "1.5 s", "All requests of this node", "Time to first token"),
    "events": ("Cordoned", "ada", "/admin/governance/auditevent/"),
    "logs": ("runner: &lt;b&gt;no&lt;/b&gt;", "1 older warning is no longer kept.", "Ask again"),
    "trust": ("L2: the node itself verifies", "This node trusts no policy yet.", "No operation is sent to it"),
    "details": ("node_", "0.0.9", f"is older than this server ({RELEASE})"),
}


@pytest.mark.parametrize("tab", TABS)
def test_each_tab_has_its_own_address_and_takes_as_many_queries_whatever_it_holds(boss: Client, tab: str) -> None:
    counts, url = [], ""
    for number, count in enumerate((1, 1, 3)):
        node = make_rich(f"rig-{number}", count)
        url = reverse("admin:nodes_node_tab", args=[node.pk, tab])
        boss.get(url)
        with CaptureQueriesContext(connection) as queries:
            response = boss.get(url)
        counts.append(len(queries))
        shown = response.content.decode()
        assert (
            f'<a href="{url if tab != "overview" else reverse("admin:nodes_node_change", args=[node.pk])}" aria-current'
            in shown
        )
        if count == 1:
            for text in SHOWN[tab]:
                assert text in shown, text
    assert counts[1] == counts[2] <= 22, counts
    assert boss.post(url).status_code in (200, 403)


def test_a_tab_or_a_node_that_is_not_there_is_not_found(boss: Client) -> None:
    node = make_node()
    for args in ([node.pk, "nonsense"], [uuid.uuid4(), "logs"], ["x", "overview"]):
        assert boss.get(reverse("admin:nodes_node_tab", args=args)).status_code == 404
    assert sign_in("view_gpu", name="joe").get(reverse("admin:nodes_node_tab", args=[node.pk, "logs"])).status_code == 403


def test_whether_a_model_fits_is_said_with_figures(boss: Client) -> None:
    node = make_rich(count=3)
    shown = boss.get(reverse("admin:nodes_node_tab", args=[node.pk, "models"])).content.decode()
    assert "It needs 1000 MiB; 8.8 GiB are free." in shown
    assert "It needs 9.8 GiB; the node has 9.8 GiB in all." in shown or "Unload another model first." in shown


def test_older_events_are_on_the_next_page_and_runs_stand_among_them(boss: Client) -> None:
    set_limits(nodes={"page_events": 2})
    node = make_rich()
    for action in ("node.drain", "node.undrain", "node.unheard_of"):
        record_event(actor="system:sweep", action=action, target=node.printed_id)
    url = reverse("admin:nodes_node_tab", args=[node.pk, "events"])
    first = boss.get(url).content.decode()
    assert ("node.unheard_of" in first, "Drain ended by an operator" in first, "Drain began" in first) == (True, True, False)
    older = re.search(r'href="(\?before=[^"]+)">Older', first)
    assert older is not None
    second = boss.get(url + older[1]).content.decode()
    assert ("Drain began" in second, "Newest" in second) == (True, True)
    assert boss.get(f"{url}?before=never").status_code == 200


def test_only_a_runner_of_an_earlier_release_is_hinted_at() -> None:
    for version, is_old in ((RELEASE, False), ("0.0.1", True), ("9.0.0", False), ("vllm 3", False), ("", False)):
        assert bool(hint_at_runner(Node(agent_version=version))) is is_old


# The log


def test_only_who_may_read_logs_has_the_node_asked_and_only_by_a_post(boss: Client) -> None:
    node = make_node()
    make_presence(node)
    url, tab = (
        reverse(f"admin:nodes_node_{name}", args=args) for name, args in (("log", [node.pk]), ("tab", [node.pk, "logs"]))
    )
    viewer = sign_in("view_node", name="eve")
    assert "You may not read logs of nodes." in viewer.get(tab).content.decode()
    assert (viewer.post(url).status_code, boss.get(url).status_code, NodeLog.objects.count()) == (403, 302, 0)
    assert "The node is asked…" in boss.post(url, follow=True).content.decode()
    assert audited("node.read_log")[0].actor == "user:ada"
    NodePresence.objects.update(connected=False)
    NodeLog.objects.all().delete()
    assert "its log cannot be asked for" in boss.get(tab).content.decode()


# The list


def listed(client: Client, **query: str) -> str:
    response = client.get(reverse("admin:nodes_node_changelist"), query)
    assert response.status_code == 200
    return response.content.decode()


def test_the_list_counts_nodes_by_state_and_filters_them(boss: Client) -> None:
    credential = make_credential("rack", max_nodes=9)[0]
    for name, changes in (("a", {}), ("b", {"cordoned": True}), ("c", {})):
        make_presence(
            make_node(name, credential=credential, model_names=["m1", "m2", "m3", "m4", "m5"], **changes), gpus=[GPU] * 1
        )
    make_presence(make_node("gone", credential=credential), age_s=500.0)
    follow_gpus()
    shown = listed(boss)
    chips = dict(re.findall(r"(?:</i> )?(\w+) <b>(\d+)</b>", shown))
    assert chips == {"All": "4", "ready": "2", "cordoned": "1", "offline": "1"}
    for text in ("+2", "NVIDIA L4", "250 MiB of 1000 MiB", "40 %", 'title="m4, m5"'):
        assert text in shown, text
    filtered = listed(boss, state="cordoned")
    assert (">b</a>" in filtered, ">a</a>" in filtered) == (True, False)


def test_a_list_of_a_thousand_nodes_takes_as_many_queries_as_one_of_ten(boss: Client) -> None:
    credential = make_credential("rack", max_nodes=2_000)[0]

    def grow(first: int, last: int) -> None:
        made = Node.objects.bulk_create(
            Node(name=f"n{n:04}", credential=credential, provider=credential.provider, model_names=["m"])
            for n in range(first, last)
        )
        NodePresence.objects.bulk_create(
            NodePresence(node=node, connected=True, reported_status="available", last_heartbeat_at=timezone.now(), gpus=[GPU])
            for node in made
        )
        follow_gpus()

    counts, shown = [], ""
    for first, last in ((0, 10), (10, 1_000)):
        grow(first, last)
        listed(boss)
        with CaptureQueriesContext(connection) as queries:
            shown = listed(boss)
        counts.append(len(queries))
    assert counts[0] == counts[1] <= 16
    assert shown.count('name="_selected_action"') == 50


def choose(client: Client, action: str, nodes: list[Node], **fields: str) -> str:
    url = reverse("admin:nodes_node_changelist")
    sent = {"action": action, "_selected_action": [str(node.pk) for node in nodes], **fields}
    response = client.post(url, sent, follow=True)
    assert response.status_code == 200
    return response.content.decode()


def test_many_nodes_are_drained_after_one_question_and_never_without(boss: Client) -> None:
    credential = make_credential("rack", max_nodes=9)[0]
    nodes = [make_node(f"n{number}", credential=credential) for number in range(3)]
    asked = choose(boss, "drain_nodes", nodes)
    assert ("Drain: 3 nodes?" in asked, Node.objects.filter(draining=True).count()) == (True, 0)
    assert "must be" in choose(boss, "drain_nodes", nodes, confirmed="1", timeout_s="-1") or not Node.objects.filter(
        draining=True
    )
    assert "Drain: done for 3 nodes." in choose(boss, "drain_nodes", nodes, confirmed="1", reason="fans", timeout_s="")
    assert Node.objects.filter(draining=True, drain_reason="fans").count() == 3
    assert "nothing to do" in choose(boss, "drain_nodes", nodes)
    choose(boss, "undrain_nodes", nodes[:1], confirmed="1")
    choose(boss, "cordon_nodes", nodes[:1], confirmed="1")
    assert [(node.draining, node.cordoned) for node in Node.objects.order_by("name")] == [
        (False, True),
        (True, False),
        (True, False),
    ]
    assert "Uncordon: 1 node?" in choose(boss, "uncordon_nodes", nodes), "only those for which there is something to do"
    set_limits(nodes={"bulk_nodes": 2})
    assert "Choose at most 2 nodes at once." in choose(boss, "cordon_nodes", nodes, confirmed="1")
    viewer = sign_in("view_node", name="eve")
    choose(viewer, "cordon_nodes", nodes[1:], confirmed="1")
    assert Node.objects.filter(cordoned=True).count() == 1


def test_a_drain_of_many_that_needs_approval_changes_nothing_and_says_so(boss: Client) -> None:
    nodes = [make_node("n0"), make_node("n1", credential=make_credential("other")[0])]
    make_governed()
    session = boss.session
    session["muster_assurance"] = "passkey"
    session.save()
    shown = choose(boss, "drain_nodes", nodes, confirmed="1", timeout_s="5")
    assert ("approval" in shown, Node.objects.filter(draining=True).count()) == (True, 0)


# Removal


def test_a_node_that_is_gone_can_be_removed_and_its_requests_keep_its_name(boss: Client) -> None:
    node = make_node("old", runner_id="box:old")
    presence = make_presence(node, gpus=[GPU])
    follow_gpus()
    sample_gpus()
    bound = make_credential("bound", node_id=node.pk)[0]
    record = make_record(node_id=node.pk, node_name="old")
    url = reverse("admin:nodes_node_confirm", args=[node.pk, "remove"])
    page = boss.get(reverse("admin:nodes_node_change", args=[node.pk])).content.decode()
    assert url not in page, "a node that is heard is not removed"
    NodePresence.objects.filter(pk=presence.pk).update(last_heartbeat_at=timezone.now() - timedelta(days=1))
    assert url in boss.get(reverse("admin:nodes_node_change", args=[node.pk])).content.decode()
    assert "old is removed." in boss.post(url, follow=True).content.decode()
    assert (Node.objects.count(), GpuSample.objects.filter(gpu_id__in=[]).count()) == (0, 0)
    record.refresh_from_db()
    assert record.node_name == "old"
    (event,) = audited("node.remove")
    assert (event.actor, event.target, event.detail["name"]) == ("user:ada", node.printed_id, "old")
    assert NodeCredential.objects.filter(pk=bound.pk, node=None, revoked_at=None).exists()
    assert not GpuMinute.objects.exists()


def test_dead_nodes_leave_by_themselves_after_thirty_days() -> None:
    credential = make_credential("rack", max_nodes=9)[0]
    for name, days in (("dead", 31), ("resting", 29)):
        make_presence(make_node(name, credential=credential), age_s=days * 86_400.0)
    make_node("never", credential=credential)
    Node.objects.update(updated_at=timezone.now() - timedelta(days=31), created_at=timezone.now() - timedelta(days=31))
    make_presence(make_node("here", credential=credential))
    renew_key()
    assert sorted(Node.objects.values_list("name", flat=True)) == ["here", "resting"]
    assert remove_dead_nodes() == 0
    assert {event.actor for event in audited("node.remove")} == {"system:sweep"}
