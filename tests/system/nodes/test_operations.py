"""The governed operations on nodes: what is offered and may be asked for, what approvers read, and when a node is sent one."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from django.utils.module_loading import import_string
from pytest_django import DjangoDbBlocker, Settings

from core.limits import limits
from gateway.models import RequestRecord
from governance.errors import InvalidProposal, NeedsApproval
from governance.models import Operation
from governance.operations.runs import run_due
from governance.registry import NotNow, RunOrder, Sent
from governance.states import RunState
from nodes.models import Node, NodeOpKey, NodePresence, Reach
from nodes.operations.flush import CACHE_FLUSH
from nodes.operations.hold import NODE_DRAIN, NODE_EVICT
from nodes.operations.load import MODEL_LOAD, MODEL_UNLOAD, SETTINGS_RELOAD
from nodes.services.credentials import revoke_credential
from nodes.services.drains import drain_node
from tests.fakes.governed_team import Identity, Team, approve_load, make_box, make_due, make_governed, only_run, open_session
from tests.fakes.nodes import ACTOR, audited, make_node, shared_rows
from wire.optoken.approval import read_statement

pytestmark = pytest.mark.django_db

PROPOSE = "/approvals/propose"
LOAD: dict[str, object] = {"modelId": "m", "evictModel": "old", "maxContextLength": 4096}


@pytest.fixture
def rig() -> Identity:
    return Identity()


@pytest.fixture
def box(rig: Identity) -> Node:
    made = make_box(rig)
    NodePresence.objects.update(available_models=["new", "old"])
    return made


def texts(kind: Any, *targets: str, params: dict[str, object]) -> str:
    """What the preview says, on one line."""
    return " | ".join(f"{impact.level}: {impact.text}" for impact in kind.preview(targets, params))


def order(target: str, operation: str = "model-load", **changes: Any) -> RunOrder:
    fields: dict[str, Any] = {
        "run_id": uuid.uuid4(), "op_id": "op_1", "use": 1, "operation": operation, "target": target, "params": {"modelId": "m"},
        "token": "t", "token_expires_at": int(timezone.now().timestamp()) + 300, "requested_by": "ana", "approved_by": ("ben",),
    }  # fmt: skip
    return RunOrder(**(fields | changes))


KINDS: list[Any] = [MODEL_LOAD, MODEL_UNLOAD, CACHE_FLUSH, SETTINGS_RELOAD, NODE_DRAIN, NODE_EVICT]
PARAMS: dict[str, object] = {"modelId": "m"}


# Targets


def test_a_box_is_named_by_its_runner_id_its_id_or_a_name_that_is_its_alone(rig: Identity, box: Node) -> None:
    make_box(Identity("thief"), level="L1", runner_id="rig")
    for text in (rig.runner_id, box.printed_id, str(box.pk), "rig", " rig "):
        assert MODEL_LOAD.clean([text], PARAMS).targets == (rig.runner_id,)
        assert NODE_EVICT.clean([text], {}).targets == (box.printed_id,)
    assert MODEL_LOAD.clean(["rig", rig.runner_id], PARAMS).targets == (rig.runner_id,)
    unknown: list[list[str]] = [[], ["nobody"], ["node_" + "0" * 32], [""]]
    for targets in unknown:
        for kind, params in ((MODEL_LOAD, PARAMS), (NODE_EVICT, {})):
            with pytest.raises(InvalidProposal) as caught:
                kind.clean(targets, params)
            assert caught.value.param == "targets"
    plain = make_node("plain")
    assert NODE_EVICT.clean(["plain"], {}).targets == (plain.printed_id,)
    with pytest.raises(InvalidProposal, match="takes no operations from here"):
        MODEL_LOAD.clean(["plain"], PARAMS)
    make_box(Identity())
    with pytest.raises(InvalidProposal, match="say which by its id"):
        MODEL_LOAD.clean(["rig"], PARAMS)


def test_a_token_is_signed_with_the_newest_key_of_the_row_whose_credential_works(rig: Identity, box: Node) -> None:
    NodeOpKey.objects.create(node=box, kid="k2", secret=b"2" * 32)
    NodeOpKey.objects.create(node=box, kid="k3", secret=b"3" * 32, retired_at=timezone.now())
    signer = MODEL_LOAD.find_signer(rig.runner_id)
    assert signer is not None
    assert (signer.level, signer.kid, signer.key, signer.audience) == ("L2", "k2", b"2" * 32, rig.runner_id)
    assert "222" not in repr(signer)
    Node.objects.update(op_level="")
    assert MODEL_LOAD.find_signer(rig.runner_id) is MODEL_LOAD.find_signer("nobody#x") is None
    assert box.credential is not None
    Node.objects.update(op_level="L2")
    revoke_credential(credential_id=box.credential.pk, actor=ACTOR)
    newer = make_box(rig)
    Node.objects.filter(pk=box.pk).update(updated_at=timezone.now() + timedelta(hours=1))
    assert MODEL_LOAD.find_signer(rig.runner_id) is not None
    NodeOpKey.objects.filter(node=newer).delete()
    assert MODEL_LOAD.find_signer(rig.runner_id) is None


def test_nodes_that_cannot_reload_their_settings_from_here_are_named_before_anybody_signs(rig: Identity) -> None:
    node = make_box(rig, reloads_settings=True)
    assert SETTINGS_RELOAD.clean(["rig"], {}).targets == (rig.runner_id,)
    assert SETTINGS_RELOAD.clean(["rig"], {}).params == {}
    with pytest.raises(InvalidProposal, match=r"'modelId'.*takes nothing"):
        SETTINGS_RELOAD.clean(["rig"], {"modelId": "m"})
    make_box(Identity("attic"))
    with pytest.raises(InvalidProposal, match=r"^attic has not said that it can reload its settings") as caught:
        SETTINGS_RELOAD.clean(["rig", "attic"], {})
    assert caught.value.param == "targets"
    # What it said over its session counts no more: its HTTP call takes no token.
    Node.objects.filter(pk=node.pk).update(reach=Reach.DIRECT)
    with pytest.raises(InvalidProposal, match=r"^rig has not said that it can reload its settings"):
        SETTINGS_RELOAD.clean(["rig"], {})


# Keys


# What approvers read


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_operation_says_what_is_now_also_of_a_box_that_is_gone(kind: Any, rig: Identity, box: Node) -> None:
    params = {"modelId": "m", "scope": "all", "timeout_s": 5}
    assert "gone#x" in kind.describe(["gone#x"], params).title
    assert "danger: gone#x is no node that is known here any more." in texts(kind, "gone#x", params=params)
    found = kind.describe([rig.runner_id if kind.is_remote else box.printed_id], LOAD if kind is MODEL_LOAD else params)
    assert "rig" in found.title
    lines = {line.label: (line.value, line.now) for line in found.lines}
    if kind is MODEL_LOAD:
        assert (lines["Model"], lines["Unloaded first"]) == (("m", "not loaded"), ("old", "loaded"))
        assert (lines["Tokens per request"], lines["On"][0]) == (("4096", "as the node is set up"), rig.runner_id)
    assert kind is not NODE_DRAIN or ("5 s", "120 s in a plain drain") in lines.values()


def test_the_preview_says_what_goes_and_whether_it_fits(rig: Identity, box: Node) -> None:
    NodePresence.objects.update(memory={"total_mb": 10_000, "used_mb": 9_000})
    said = texts(MODEL_LOAD, rig.runner_id, params=LOAD)
    for words in ("old is unloaded from rig first", "Memory use of m unknown. 5000 of 10000 MiB are free", "never done on rig"):
        assert words in said
    loaded = [{"model": "m", "state": "loading", "memory_mb": 6000}, {"model": "old", "state": "loaded", "memory_mb": 4000}]
    for total, words in (
        (10_000, "danger: m took 6000 MiB when it was last measured; 5000 MiB"),
        (20_000, "ok: m took 6000 MiB"),
    ):
        NodePresence.objects.update(replicas=loaded, memory={"total_mb": total, "used_mb": 9_000})
        assert words in texts(MODEL_LOAD, rig.runner_id, params=LOAD)


def test_a_load_names_every_gpu_that_it_takes_and_fits_by_the_fullest_of_them(rig: Identity, box: Node) -> None:
    gpus = [{"index": n, "name": "L4", "memory_total_mb": 24_000, "memory_used_mb": 1_000 * (n + 1)} for n in range(3)]
    loaded = [{"model": "old", "state": "loaded", "memory_mb": 500, "gpus": [1]}]
    memory = {"total_mb": 72_000, "used_mb": 6_000}
    NodePresence.objects.update(gpus=gpus, replicas=loaded, memory=memory)
    load: dict[str, object] = {"modelId": "m", "gpus": [0, 1]}
    assert MODEL_LOAD.clean(["rig"], load).params == load
    lines = {line.label: (line.value, line.now) for line in MODEL_LOAD.describe([rig.runner_id], load).lines}
    assert lines["GPUs"] == ("0, 1", "rig: 0 is L4, 1 is L4")
    assert "44000 of 48000 MiB are free" in texts(MODEL_LOAD, rig.runner_id, params=load), "twice what the second one has"
    assert "caution: GPU 1 of rig has old on it." in texts(MODEL_LOAD, rig.runner_id, params=load)
    assert "danger: rig has no GPU 7" in texts(MODEL_LOAD, rig.runner_id, params={"modelId": "m", "gpus": [7]})
    unnamed = {line.label: line.value for line in MODEL_LOAD.describe([rig.runner_id], {"modelId": "m"}).lines}
    assert unnamed["GPUs"] == "as the node is set up"
    for wrong in ("0", [], [0, 0], [True], [-1], [0.5], [99]):
        with pytest.raises(InvalidProposal) as caught:
            MODEL_LOAD.clean(["rig"], {"modelId": "m", "gpus": wrong})
        assert caught.value.param == "gpus"


MEMBERS = [{"node": "head", "gpus": [0, 1]}, {"node": "helper", "gpus": [2, 3]}]


@pytest.fixture
def pair() -> list[Node]:
    """Two nodes that can be in a replica together."""
    return [make_box(Identity(name), cluster_address=f"10.0.0.{n}:8070") for n, name in enumerate(("head", "helper"), start=1)]


def test_a_load_over_several_nodes_is_signed_with_every_node_its_address_and_its_gpus(pair: list[Node]) -> None:
    gpus = [{"index": n, "name": "L4", "memory_total_mb": 24_000, "memory_used_mb": 0} for n in range(4)]
    NodePresence.objects.update(gpus=gpus, memory={"total_mb": 96_000, "used_mb": 0})
    ids = [node.runner_id for node in pair]
    request = MODEL_LOAD.clean(["helper", "head"], {"modelId": "m", "members": MEMBERS})
    assert request.targets == tuple(ids), "the head first, whatever the order of the targets"
    signed = [
        {"node": runner_id, "address": address, "gpus": gpus}
        for runner_id, address, gpus in zip(ids, ("10.0.0.1:8070", "10.0.0.2:8070"), ([0, 1], [2, 3]), strict=True)
    ]
    assert request.params == {"modelId": "m", "members": signed}
    assert MODEL_LOAD.clean(request.targets, request.params) == request, "what was signed can be asked for again"
    found = MODEL_LOAD.describe(request.targets, request.params)
    assert found.title == "Load m as one replica on head, helper"
    lines = {line.label: (line.value, line.now) for line in found.lines}
    assert lines["On 2 nodes, together"][0] == ", ".join(ids)
    assert lines["Head, which serves"] == (f"{ids[0]}: GPU 0, 1, at 10.0.0.1:8070", "0 is L4, 1 is L4")
    assert lines["Lends its GPUs"] == (f"{ids[1]}: GPU 2, 3, at 10.0.0.2:8070", "2 is L4, 3 is L4")
    assert "nobody else" in lines["Network"][0]
    held = [{"model": "other", "state": "reserved", "gpus": [2]}]
    NodePresence.objects.filter(node=pair[1]).update(replicas=held)
    assert "caution: GPU 2 of helper has other on it." in texts(MODEL_LOAD, *ids, params=dict(request.params))
    NodePresence.objects.filter(node=pair[1]).update(
        replicas=[{"model": "m", "state": "reserved", "gpus": [2, 3], "replica_id": "op_1.1", "members": ids}]
    )
    said = texts(MODEL_UNLOAD, ids[1], params={"modelId": "m"})
    assert f"caution: The replica ends on all of its nodes: {', '.join(ids)}." in said
    assert (MODEL_LOAD.is_joint(request.params), MODEL_LOAD.explain_wait(ids)) == (True, "")
    NodePresence.objects.filter(node=pair[1]).update(last_heartbeat_at=timezone.now() - timedelta(days=1))
    assert "helper is offline" in MODEL_LOAD.explain_wait(ids)


def test_a_load_over_several_nodes_that_cannot_be_is_refused_before_anybody_signs(
    pair: list[Node], rig: Identity, box: Node
) -> None:
    other = {"node": "rig", "gpus": [0, 1]}
    cases: list[tuple[list[str], object, dict[str, object], str]] = [
        (["head"], MEMBERS, {}, "must name the nodes of the request"), (["head"], MEMBERS[:1], {}, "two or more"),
        (["head", "helper"], [*MEMBERS, MEMBERS[0]], {}, "each once"),
        (["head", "helper"], [MEMBERS[0], {"node": "helper", "gpus": [2]}], {}, "as many GPUs on each"),
        (["head", "rig"], [MEMBERS[0], other], {}, r"rig has not said that it can be in a replica .* --cluster-address"),
        (["head", "helper"], MEMBERS, {"keepLoaded": True}, "leave those out"),
        (["head", "helper"], MEMBERS, {"gpus": [0]}, "leave those out"),
        (["head", "helper"], "head", {}, "a list of nodes with their GPUs"),
        (["head", "helper"], [{"node": "head", "gpus": [0], "role": "x"}], {}, "a list of nodes with their GPUs"),
        (["head", "helper"], [{"node": "head", "gpus": []}], {}, "members.gpus must be a list"),
    ]  # fmt: skip
    for targets, members, more, words in cases:
        with pytest.raises(InvalidProposal, match=words) as caught:
            MODEL_LOAD.clean(targets, {"modelId": "m", "members": members, **more})
        assert caught.value.param == "members"


def test_the_preview_counts_live_requests_and_their_tenants(rig: Identity, box: Node, settings: Settings) -> None:
    for number, tenant in enumerate(["a", "b", "b"]):
        RequestRecord.objects.create(
            created_at=timezone.now(), gateway_id=uuid.uuid4(), tenant=tenant, key_id=uuid.uuid4(), key_name="k",
            endpoint="/v1/chat/completions", model="old" if number else "m", state="running", node_id=box.pk,
        )  # fmt: skip
    assert "2 requests run on old on rig now. 1 tenant is served. They are cut off." in texts(
        MODEL_UNLOAD, rig.runner_id, params={"modelId": "old", "force": True}
    )
    assert "3 requests run on rig now. 2 tenants are served. All of them are interrupted." in texts(
        NODE_EVICT, box.printed_id, params={}
    )
    settings.NODE_TRAFFIC = ""  # then the node itself is believed
    NodePresence.objects.update(replicas=[{"model": "old", "state": "loaded", "active": 1}])
    assert "1 request runs on old on rig now" in texts(MODEL_UNLOAD, rig.runner_id, params={"modelId": "old"})


NOTHING_SENT = "danger: Nothing is sent for now: "
FAR_OFF = limits().nodes.clock_skew_ms + 1000


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"policy_version": 0}, f"{NOTHING_SENT}rig has no approval policy pinned; run ./muster trust on it."),
        ({"op_level": ""}, f"{NOTHING_SENT}rig takes no operations from here"),
        ({"op_level": "L1"}, "caution: rig works at level L1"),
        ({"clock_skew_ms": 90_000}, "caution: The clock of rig is 90 s off"),
        ({"clock_skew_ms": -FAR_OFF}, f"{NOTHING_SENT}the clock of rig is 241 s off"),
        ({"witness_alarm": "it was rewritten"}, "danger: rig contradicts the audit log: it was rewritten."),
        ({"policy_error": "rollback"}, "caution: rig refused a newer policy: rollback."),
        (None, "danger: rig is offline"),
    ],
)
def test_the_preview_says_what_stands_in_the_way(
    rig: Identity, box: Node, changes: dict[str, object] | None, said: str
) -> None:
    if changes is None:
        NodePresence.objects.update(last_heartbeat_at=timezone.now() - timedelta(seconds=100))
    Node.objects.update(**changes or {"op_level": "L2"})
    assert said in texts(MODEL_LOAD, rig.runner_id, params=LOAD)


# Carrying out


@pytest.mark.parametrize(
    ("changes", "presence", "reason"),
    [
        ({"op_level": ""}, {}, "takes no operations"),
        ({"policy_version": 0}, {}, "run ./muster trust on it"),
        ({"clock_skew_ms": FAR_OFF}, {}, "the clock of rig is 241 s off"),
        ({}, {"last_heartbeat_at": timezone.now() - timedelta(days=1)}, "offline"),
        ({}, {"connected": False}, ""),
    ],
    ids=["no level", "no policy", "clock", "away", "no socket"],
)
def test_a_box_that_would_refuse_or_is_away_is_not_sent_anything_until_it_is_back(
    rig: Identity, box: Node, changes: dict[str, object], presence: dict[str, object], reason: str
) -> None:
    before = Node.objects.values("op_level", "policy_version", "clock_skew_ms").get()
    Node.objects.update(**{**before, **changes})
    NodePresence.objects.update(**{"connected": True, **presence})
    outcome = MODEL_LOAD.carry_out(order(rig.runner_id))
    assert isinstance(outcome, NotNow)
    assert reason in outcome.reason
    Node.objects.update(**before)
    NodePresence.objects.update(connected=True, last_heartbeat_at=timezone.now())
    assert MODEL_LOAD.carry_out(order(rig.runner_id)) == Sent(box.pk)


def test_an_order_that_nobody_approved_forces_nothing(team: Team, box: Node) -> None:
    for operation in ("node-drain", "node-evict", "model-load"):
        with pytest.raises(NeedsApproval):
            drain_node(node_id=box.pk, actor=ACTOR, reason="", timeout_s=0, order=order(box.printed_id, operation))
    assert not Node.objects.get().draining


@pytest.mark.parametrize(("operation", "params", "left_s"), [("node-drain", {"timeout_s": 3}, 3), ("node-evict", {}, 0)])
def test_an_approved_forced_drain_or_eviction_is_carried_out_and_fails_with_words_on_a_box_that_is_gone(
    team: Team, box: Node, operation: str, params: dict[str, object], left_s: float
) -> None:
    approved = approve_load(team, "rig", operation=operation, params=params)
    run_due()
    assert only_run(approved).state == RunState.SUCCEEDED.value
    node = Node.objects.get()
    assert (node.cordoned, node.draining) == (operation == "node-evict", True)
    assert node.drain_deadline_at is not None
    assert node.drain_deadline_at <= timezone.now() + timedelta(seconds=left_s)
    assert [event.actor for event in audited("node.drain")] == ["system:governance"]
    again = approve_load(team, "rig", operation=operation, params=params)
    for kind in (NodeOpKey, NodePresence, Node):
        kind.objects.all().delete()
    make_due(again)
    run_due()
    assert (only_run(again).state, "There is no node" in only_run(again).message) == (RunState.FAILED.value, True)


# What the page that proposes offers, and what the page of the policy says that nodes hold


def fields(kind: Any) -> dict[str, Any]:
    return {field["name"]: field for field in kind.choices()["params"]}


def test_names_that_cannot_be_signed_are_not_offered_and_without_boxes_they_are_typed(rig: Identity) -> None:
    assert MODEL_LOAD.choices()["targets"] == []
    assert "choices" not in fields(MODEL_LOAD)["modelId"]
    for number in range(4):
        make_box(Identity(f"node{number}"))
    NodePresence.objects.update(available_models=["\u202eevil", " x", "", "y" * 201, *(f"m{n:03}" for n in range(300))])
    for kind in (MODEL_LOAD, CACHE_FLUSH, NODE_DRAIN):
        with CaptureQueriesContext(connection) as queries:
            kind.choices()
        assert len(queries) == 1
    offered = fields(MODEL_LOAD)["modelId"]["choices"]
    assert (len(offered), offered[1][0]) == (201, "m000")


# The page


def test_a_load_is_filled_in_looked_at_and_sent(browser: Client, rig: Identity, box: Node) -> None:
    page = browser.get(f"{PROPOSE}?operation=model-load").content.decode()
    assert f'value="{rig.runner_id}" id="id_targets_0" checked' in page  # the only node there is
    filled = {
        "operation": "model-load", "targets": rig.runner_id, "param-modelId": "new", "param-evictModel": "old",
        "param-maxContextLength": "4096", "param-overrides": '{"n_ctx": 9}', "reason": "for the demo", "max_uses": "1",
    }  # fmt: skip
    nothing = {**filled, "param-modelId": "", "step": "look"}
    assert "This field is required" in browser.post(PROPOSE, nothing).content.decode()
    typed = browser.post(PROPOSE, {**nothing, "param-modelId_other": " rare "}).content.decode()
    assert "Load rare on rig" in typed
    assert '<input type="hidden" name="param-modelId_other" value=" rare ">' in typed
    assert "Load new on rig" in browser.post(PROPOSE, {**filled, "step": "look"}).content.decode()
    assert browser.post(PROPOSE, {**filled, "step": "send"}).status_code == 303
    signed = read_statement(bytes(Operation.objects.get(operation="model-load").statement))
    assert signed.targets == (rig.runner_id,)
    assert signed.params == {"modelId": "new", "evictModel": "old", "maxContextLength": 4096, "overrides": {"n_ctx": 9}}


def test_a_replica_over_nodes_is_filled_in_and_signed_with_the_addresses_of_its_nodes(
    browser: Client, pair: list[Node]
) -> None:
    ids = [node.runner_id for node in pair]
    filled = {
        "operation": "model-load", "targets": ids, "param-modelId": "new", "reason": "too large for one", "max_uses": "1",
        "param-members": '[{"node": "head", "gpus": [0, 1]}, {"node": "helper", "gpus": [0, 1]}]',
    }  # fmt: skip
    page = unescape(browser.post(PROPOSE, {**filled, "step": "look"}).content.decode())
    assert f"{ids[1]}: GPU 0, 1, at 10.0.0.2:8070" in page
    wrong = browser.post(PROPOSE, {**filled, "param-members": '{"node": "head"}', "step": "look"}).content.decode()
    assert "Write a JSON list, such as [0, 1]." in wrong
    assert browser.post(PROPOSE, {**filled, "step": "send"}).status_code == 303
    signed = read_statement(bytes(Operation.objects.get(operation="model-load").statement))
    assert signed.targets == tuple(ids)
    assert signed.params["members"] == [
        {"node": runner_id, "address": f"10.0.0.{number}:8070", "gpus": [0, 1]} for number, runner_id in enumerate(ids, start=1)
    ]


# What nodes hold


@pytest.fixture(scope="module")
def team(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> Iterator[Team]:
    with shared_rows(django_db_blocker, make_governed) as made:
        yield made


def test_the_preview_of_a_reload_names_what_stays_loaded(rig: Identity, box: Node) -> None:
    said = texts(SETTINGS_RELOAD, rig.runner_id, params={})
    assert "old is loaded on rig and stays as it is" in said
    lines = {line.label: line.value for line in SETTINGS_RELOAD.describe([rig.runner_id], {}).lines}
    assert "settings.json and local.json" in lines["What is read"]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"policy_version": 1}, "level L2, version 1 pinned"),
        ({"policy_version": 0}, "level L2, none pinned: run ./muster trust on it"),
        ({"policy_version": 2}, "level L2, version 2 pinned; version 1 is in force here, an older one"),
        ({"policy_version": 1, "policy_error": "a gap"}, "level L2, version 1 pinned; it says: a gap"),
        ({"level": "L1"}, "level L1: it checks a key and no approvals, so it pins no policy"),
        ({"level": ""}, "takes no operations from here; it says: the node named no level that is known here"),
    ],
    ids=["newest", "none", "ahead", "error", "L1", "no-level"],
)
def test_the_page_of_the_policy_says_what_each_box_holds(team: Team, said: dict[str, Any], words: str) -> None:
    make_box(Identity(), **said)
    assert import_string(settings.GOVERNANCE_PINS)() == [{"name": "rig", "text": words}]
    assert words in unescape(open_session(team[0].user).get("/approvals/policy").content.decode())
