"""Node credentials, providers, and what a worker session does to the database: enrolment, fencing, presence, routing's rows."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from threading import Barrier
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from governance.services import create_admin_token
from nodes.errors import (
    BadRequest,
    Conflict,
    CredentialNotFound,
    EnrolmentRefused,
    NameTaken,
    NodeError,
    NodeNotFound,
    ProviderNotFound,
)
from nodes.models import Node, NodeCredential, NodePresence, ProviderState, Reach
from nodes.services import (
    claim_node,
    cordon_node,
    create_credential,
    create_provider,
    delete_provider,
    disable_provider,
    drain_node,
    enable_provider,
    find_credential,
    revoke_credential,
    set_mode,
)
from nodes.services.sessions import (
    OpenedSession,
    PresenceReport,
    ReportedState,
    SessionEnd,
    SessionRequest,
    close_sessions,
    find_revoked,
    is_provider_open,
    load_node_rows,
    open_session,
    write_presences,
)
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence, make_provider
from wire import bridge
from wire.contract import NodeMode
from wire.credentials import CredentialKind, digest_credential, mint_credential

pytestmark = pytest.mark.django_db

HERE, THERE = uuid.UUID(int=1), uuid.UUID(int=2)

# Credentials and providers


def test_a_new_credential_is_found_and_only_its_digest_is_stored() -> None:
    credential, text = make_credential(" rack 4 ", max_nodes=3)
    row = NodeCredential.objects.get()
    assert (row.name, row.max_nodes, bytes(row.digest)) == ("rack 4", 3, digest_credential(text))
    found = find_credential(text)
    assert found is not None
    assert (found.pk, found.provider.name) == (credential.pk, "local")
    assert text not in str(audited("node_credential.create")[0].detail)
    row.refresh_from_db()
    assert (row.last_used_at is not None, row.updated_at) == (True, credential.updated_at), "use does not look like a change"
    _, admin_token = create_admin_token(name="ops", actor=ACTOR)
    forged = mint_credential(CredentialKind.WORKER).text
    same_id = f"msw_{text.split('_')[1]}_{forged.split('_')[2]}"
    client = mint_credential(CredentialKind.CLIENT).text
    for wrong in ("", text[:-1], text + "x", text.replace("msw_", "msa_"), admin_token, client, forged, same_id):
        assert find_credential(wrong) is None, wrong


@pytest.mark.parametrize(
    ("changes", "error", "param"),
    [
        ({"name": " "}, BadRequest, "name"),
        ({"name": "x" * 81}, BadRequest, "name"),
        ({"max_nodes": 0}, BadRequest, "max_nodes"),
        ({"max_nodes": 10_001}, BadRequest, "max_nodes"),
        ({"provider_name": "nowhere"}, ProviderNotFound, "provider_name"),
        ({"node_id": uuid.UUID(int=0)}, NodeNotFound, "node_id"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], error: type[NodeError], param: str) -> None:
    make_provider()
    with pytest.raises(error) as caught:
        create_credential(**{"name": "box", "provider_name": "local", "actor": ACTOR, **changes})
    assert caught.value.param == param
    assert not NodeCredential.objects.exists()
    for name in ("", "-a", "a b", "ä", "a/b", "x" * 61, "a\n"):
        with pytest.raises(BadRequest, match="name"):
            create_provider(name=name, actor=ACTOR)


def test_a_revoked_credential_is_not_found_opens_nothing_and_revoking_twice_records_once() -> None:
    credential, text = make_credential()
    kept, _ = make_credential("kept")
    first = revoke_credential(credential_id=credential.pk, actor=ACTOR)
    again = revoke_credential(credential_id=credential.pk, actor=ACTOR)
    assert first.revoked_at == again.revoked_at is not None
    assert first.updated_at > credential.updated_at
    assert find_credential(text) is None
    assert (find_revoked([kept.pk, credential.pk]), find_revoked([])) == ({credential.pk}, set())
    assert len(audited("node_credential.revoke")) == 1
    with pytest.raises(EnrolmentRefused, match="revoked"):
        ask(credential)  # it was checked a moment ago
    assert Node.objects.count() == 0
    with pytest.raises(CredentialNotFound):
        revoke_credential(credential_id=0, actor=ACTOR)


def test_a_provider_is_switched_off_and_on_and_one_that_comes_back_revives_no_credential() -> None:
    before = make_provider().updated_at
    with pytest.raises(Conflict):
        create_provider(name="local", actor=ACTOR)
    for change, state in ((disable_provider, ProviderState.DISABLED), (enable_provider, ProviderState.ENABLED)):
        first, again = (change(name="local", actor=ACTOR) for _ in range(2))
        assert (first.state, again.state, is_provider_open("local")) == (state, state, state is ProviderState.ENABLED)
        assert first.updated_at > before
        before = again.updated_at
    assert [len(audited(f"provider.{action}")) for action in ("create", "disable", "enable")] == [1, 1, 1]
    _, text = make_credential()
    _, other = make_credential(provider="other")
    delete_provider(name="local", actor=ACTOR)
    assert (find_credential(text), find_credential(other) is not None) == (None, True)
    assert audited("provider.delete")[0].detail == {"revoked_credentials": 1}
    for change in (enable_provider, disable_provider, delete_provider):
        for name in ("local", "never"):
            with pytest.raises(ProviderNotFound):
                change(name=name, actor=ACTOR)
            assert not is_provider_open(name)
    assert create_provider(name="local", actor=ACTOR).state == ProviderState.ENABLED
    assert find_credential(text) is None


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(("names", "made"), [(["a", "b", "c", "d"], 2), (["a", "a", "a", "a"], 1)])
def test_at_once_is_no_way_around_the_limit(names: list[str], made: int) -> None:
    credential, _ = make_credential(max_nodes=2)
    start = Barrier(len(names))

    def enrol(name: str) -> bool:
        try:
            start.wait(30)
            return claim_node(credential=credential, name=name)[1]
        except EnrolmentRefused:
            return False
        finally:
            connection.close()

    with ThreadPoolExecutor(len(names)) as boxes:
        results = list(boxes.map(enrol, names))
    assert sum(results) == made == Node.objects.count()


# Enrolment


def ask(
    credential: NodeCredential,
    name: str = "worker",
    *,
    live: frozenset[uuid.UUID] = frozenset(),
    others: frozenset[uuid.UUID] = frozenset(),
    gateway: uuid.UUID = HERE,
    protocol: str = bridge.MUSTER_V1,
    **fields: object,
) -> OpenedSession:
    """Open a session as a box of that name."""
    message = bridge.Register(worker_name=name, **fields)  # type: ignore[arg-type]  # names of its fields
    request = SessionRequest(
        credential_id=credential.pk, worker_name=name, models=("m",), max_concurrent=3, protocol=protocol, gateway_id=gateway,
        live_nodes=live, other_gateways=others, peer_address="10.0.0.1", message=message,
    )  # fmt: skip
    return open_session(request)


def governed(public_key: str) -> bridge.BoxGovernance:
    return bridge.BoxGovernance(level="L1", runner_id=f"rig-{public_key}", public_key=public_key)


def test_a_new_box_is_enrolled_with_what_it_said() -> None:
    credential, _ = make_credential(max_nodes=2)
    gpu = bridge.GpuInfo(index=0, name="RTX 4090", memory_total_mb=24_000)
    opened = ask(credential, "rig", instance_id="i1", agent_version="1.2", owner_name="ada", gpus=[gpu], current_load=2)
    node = Node.objects.select_related("presence").get(pk=opened.node_id)
    assert (opened.node_name, opened.epoch, opened.mode) == ("rig", 1, "spare_on")
    assert opened == replace(opened, cordoned=False, draining=False)
    assert (node.reach, node.model_names, node.max_concurrent, node.epoch) == (Reach.RELAY, ["m"], 3, 1)
    assert (node.gpu_name, node.vram_total_mb, node.agent_version, node.owner_name) == ("RTX 4090", 24_000, "1.2", "ada")
    presence = node.presence
    assert (presence.connected, presence.gateway_id, presence.active_requests) == (True, HERE, 2)
    assert (presence.protocol, presence.peer_address) == (bridge.MUSTER_V1, "10.0.0.1")
    (event,) = audited("node.connect")
    assert event.detail == {"protocol": bridge.MUSTER_V1, "epoch": 1, "credential": "box"}
    long = "x" * 900
    gpu = bridge.GpuInfo(index=0, name="g" * 900)
    texts: dict[str, Any] = {"instance_id": long, "agent_version": long, "owner_name": long, "gpus": [gpu]}
    cut = Node.objects.get(pk=ask(credential, "n" * 120, current_load=10**30, **texts).node_id)
    assert (len(cut.instance_id), len(cut.agent_version), len(cut.owner_name), len(cut.gpu_name)) == (64, 60, 120, 200)


def test_a_box_that_comes_back_keeps_its_row_and_what_was_decided_about_it() -> None:
    credential, _ = make_credential(max_nodes=3)
    first = ask(credential, "rig", instance_id="i1")
    cordon_node(node_id=first.node_id, actor=ACTOR)
    drain_node(node_id=first.node_id, actor=ACTOR, reason="fans")
    set_mode(node_id=first.node_id, mode=NodeMode.SPARE_OFF, reason="gaming", actor=ACTOR)
    again = ask(credential, "rig", instance_id="i2", live=frozenset({first.node_id}))
    assert again == replace(first, epoch=2, mode="spare_off", cordoned=True, draining=True, link_id=again.link_id)
    assert Node.objects.count() == 1


def test_a_second_box_with_the_name_of_a_live_one_is_refused_and_noted_and_the_first_keeps_its_session() -> None:
    credential, _ = make_credential(max_nodes=3)

    def rig(key: str, start: str, **where: Any) -> OpenedSession:
        return ask(credential, "rig", instance_id=start, governance=governed(key), **where)

    first = rig("a", "a1")
    live = frozenset({first.node_id})
    for _ in range(2):
        with pytest.raises(NameTaken, match="another live box"):
            rig("b", "b1", live=live)
    node = Node.objects.get(pk=first.node_id)
    assert (node.epoch, node.instance_id, node.runner_id) == (1, "a1", "rig-a")
    assert (node.rival_address, node.rival_seen_at is not None) == ("10.0.0.1", True)
    assert len(audited("node.rival_refused")) == 1
    assert rig("a", "a1", live=live).epoch == 1
    assert rig("a", "a2", live=live).epoch == 2, "it was started again"
    assert rig("b", "b1", gateway=THERE).epoch == 3, "once the first is gone"
    with pytest.raises(NameTaken):  # a box of another gateway is as live as one of this
        rig("a", "a1", others=frozenset({THERE}))
    there = ask(credential, gateway=THERE)
    assert ask(credential, others=frozenset({THERE})).node_name == "worker-2"
    NodePresence.objects.update(last_heartbeat_at=timezone.now() - timedelta(minutes=1))
    assert rig("a", "a1", others=frozenset({THERE})).epoch == 4
    assert ask(credential, others=frozenset({THERE})).node_id == there.node_id


@pytest.mark.parametrize("said", [None, governed("a")], ids=["older-box", "copied-folder"])
def test_two_programs_that_cannot_be_told_apart_do_not_take_turns(said: bridge.BoxGovernance | None) -> None:
    """The first program was replaced, as by a restart; that it comes back shows that it was none."""
    credential, _ = make_credential(max_nodes=3)
    first = ask(credential, "rig", instance_id="a1", governance=said)
    live = frozenset({first.node_id})
    assert ask(credential, "rig", instance_id="b1", governance=said, live=live).epoch == 2
    with pytest.raises(NameTaken):
        ask(credential, "rig", instance_id="a1", governance=said, live=live)
    assert ask(credential, "rig", instance_id="b1", governance=said, live=live).epoch == 2
    assert ask(credential, "rig", instance_id="a1", governance=said).epoch == 3  # once the other is gone


def test_workers_that_share_a_name_get_numbers_while_they_live() -> None:
    credential, _ = make_credential(max_nodes=5)
    live: set[uuid.UUID] = set()
    for name in ("worker", "worker-2", "worker-3"):
        opened = ask(credential, live=frozenset(live))
        assert opened.node_name == name
        live.add(opened.node_id)
    two = Node.objects.get(name="worker-2").pk
    assert ask(credential, live=frozenset(live - {two})).node_id == two
    first = ask(credential, "n" * 120)
    second = ask(credential, "n" * 120, live=frozenset({first.node_id}))
    assert (second.node_id != first.node_id, second.node_name[-3:]) == (True, "n-2"), "a long name leaves room"
    for max_nodes in (1, 5):  # whose gateway was killed: that it still looks fresh makes no second node of the same box
        own, _ = make_credential(f"c{max_nodes}", max_nodes=max_nodes)
        before, after = ask(own, gateway=THERE), ask(own)
        assert (after.node_id, after.epoch) == (before.node_id, 2)
        assert after.node_id not in live, "under another credential it is another box"


def test_a_credential_enrols_no_more_boxes_than_it_may_and_a_bound_one_speaks_for_its_node() -> None:
    credential, _ = make_credential(max_nodes=2)
    for name in "ab":
        ask(credential, name, instance_id="1")
    with pytest.raises(EnrolmentRefused, match="2"):
        ask(credential, "c", instance_id="3")
    assert ask(credential, "a", instance_id="4").epoch == 2
    assert Node.objects.count() == 2
    single, _ = make_credential("single", max_nodes=1)
    first = ask(single)
    second = ask(single, live=frozenset({first.node_id}))
    assert (second.node_id, second.epoch) == (first.node_id, 2)
    node = make_node("rig")
    bound, _ = make_credential("bound", node_id=node.pk)
    opened = ask(bound, "another name")
    assert (opened.node_id, opened.node_name, bound.node) == (node.pk, "rig", node)
    make_provider("other")
    with pytest.raises(BadRequest):  # it must be of the node's provider
        create_credential(name="spare", provider_name="other", node_id=node.pk, actor=ACTOR)


# Closing and reporting


def report(opened: OpenedSession, **changes: object) -> PresenceReport:
    """Return what a gateway would say of the box."""
    base = PresenceReport(
        node_id=opened.node_id, epoch=opened.epoch, age_s=2.0, active=1, max_concurrent=3, models=("m",), status="available",
        last_error="", endpoints={}, said=None, link_id=opened.link_id,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]  # names of its fields


def said(**changes: object) -> ReportedState:
    """Return what a box says of itself."""
    base = ReportedState(gpus=[], replicas=[], available=[], memory=None, queue_depth=0, avg_wait_ms=None)
    return replace(base, **changes)  # type: ignore[arg-type]  # names of its fields


def presence_of(opened: OpenedSession) -> NodePresence:
    return NodePresence.objects.get(node_id=opened.node_id)


def close(opened: OpenedSession, *, gateway: uuid.UUID = HERE, reason: str = "gone") -> None:
    """Say that the link of a session is over."""
    close_sessions([SessionEnd(opened.node_id, opened.link_id, reason)], gateway_id=gateway)


def test_what_was_gathered_before_a_node_left_changes_nothing_when_it_is_written_after() -> None:
    opened = ask(make_credential()[0], instance_id="i")
    gathered = report(opened, active=3, models=("late",))
    close(opened)
    write_presences([gathered], gateway_id=HERE)
    presence = presence_of(opened)
    assert (presence.connected, presence.reported_status, presence.active_requests) == (False, "offline", 0)
    assert Node.objects.get(pk=opened.node_id).model_names == ["m"]


@pytest.mark.parametrize("instance", ["i", ""], ids=["the same session, another link", "another session"])
def test_between_the_end_of_a_link_and_the_next_one_old_news_and_old_farewells_change_nothing(instance: str) -> None:
    credential, _ = make_credential()
    first = ask(credential, instance_id=instance)
    gathered = report(first, active=3, models=("x",))
    second = ask(credential, instance_id=instance)
    assert (first.epoch == second.epoch) is bool(instance)
    write_presences([gathered], gateway_id=HERE)
    assert presence_of(second).active_requests == 0
    close(first)
    assert (presence_of(second).connected, audited("node.disconnect")) == (True, [])
    assert Node.objects.get(pk=second.node_id).model_names == ["m"]
    write_presences([report(second, active=2)], gateway_id=HERE)
    assert presence_of(second).active_requests == 2


def test_a_node_on_two_gateways_is_reported_by_both_and_leaves_with_the_one_that_reported_it_last() -> None:
    credential, _ = make_credential()
    here = ask(credential, instance_id="i", others=frozenset({THERE}))
    there = ask(credential, instance_id="i", gateway=THERE, others=frozenset({HERE}))
    write_presences([report(here, active=1)], gateway_id=HERE)
    write_presences([report(there, active=2)], gateway_id=THERE)
    close(here)
    presence = presence_of(there)
    assert (presence.connected, presence.gateway_id, presence.active_requests) == (True, THERE, 2)
    close(there, gateway=THERE)
    assert not presence_of(there).connected
    assert presence_of(there).gateway_links == {}
    ask(credential, instance_id="i", gateway=THERE)
    alone = ask(credential, instance_id="i")
    assert presence_of(alone).gateway_links == {HERE.hex: alone.link_id.hex}, "links of dead gateways are forgotten"


def test_a_report_is_written_with_the_age_of_its_news_and_one_that_says_nothing_leaves_it_alone() -> None:
    opened = ask(make_credential()[0])
    gpus = [
        {"index": 0, "name": "a", "memory_total_mb": 10, "memory_used_mb": 4, "utilization_percent": 30.0},
        {"index": 1, "name": "b", "memory_total_mb": 20, "memory_used_mb": 1, "utilization_percent": 70.5},
    ]
    before = timezone.now()
    state = said(gpus=gpus, replicas=[{"model": "m"}], available=["x"], memory={"kind": "gpu"}, queue_depth=4, avg_wait_ms=70)
    write_presences([report(opened, status="busy", last_error="e" * 900, said=state)], gateway_id=HERE)
    presence = presence_of(opened)
    assert presence.last_heartbeat_at is not None
    heard_ago = timedelta(seconds=2)
    assert before - heard_ago <= presence.last_heartbeat_at <= timezone.now() - heard_ago
    assert (presence.reported_status, presence.active_requests, len(presence.last_error)) == ("busy", 1, 500)
    write_presences([report(opened)], gateway_id=HERE)
    presence = presence_of(opened)
    assert (presence.vram_used_mb, presence.vram_free_mb, presence.gpu_util_percent) == (5, 25, 70.5)
    assert (presence.gpus, presence.replicas) == (gpus, [{"model": "m"}])
    assert (presence.available_models, presence.memory) == (["x"], {"kind": "gpu"})
    assert (presence.queue_depth, presence.avg_wait_ms) == (4, 70)
    write_presences([report(opened, said=said(gpus=[{"index": 0, "name": "a", "memory_used_mb": 4}]))], gateway_id=HERE)
    assert (presence_of(opened).vram_used_mb, presence_of(opened).vram_free_mb) == (4, None)


def test_a_registration_says_at_once_what_the_box_has() -> None:
    replica = bridge.ReplicaInfo(model="m", state="loaded", engine="vllm", endpoints=["/v1/embeddings"], context_tokens=512)
    memory = bridge.MemoryInfo(total_mb=100, used_mb=40)
    credential, _ = make_credential()
    opened = ask(credential, replicas=[replica], memory=memory, available=["other"], instance_id="i")
    presence = presence_of(opened)
    told = {"model": "m", "state": "loaded", "engine": "vllm", "endpoints": ["/v1/embeddings"], "context_tokens": 512}
    assert presence.replicas == [told]
    (row,) = load_node_rows()
    assert (row.contexts, row.engines) == ({"m": 512}, {"m": frozenset({"vllm"})})
    assert (presence.memory, presence.available_models) == ({"total_mb": 100, "used_mb": 40}, ["other"])
    assert Node.objects.get(pk=opened.node_id).model_endpoints == {"m": ["/v1/embeddings"]}
    ask(credential, instance_id="j")
    presence = presence_of(opened)
    assert (presence.replicas, presence.memory, presence.available_models) == ([], None, [])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "poison",
    [
        {"last_error": "a\x00b"},
        {"active": 10**30},
        {"said": said(gpus=[{"index": 0, "name": "a\x00b"}])},
        {"said": said(gpus=[{"index": 0, "name": "a", "memory_used_mb": 10**30}])},
        {"said": said(replicas=[{"model": "a\x00"}])},
    ],
    ids=["last_error", "active", "gpu name", "gpu memory", "replica"],
)
def test_a_report_that_cannot_be_stored_does_not_hold_the_others_up(poison: dict[str, object]) -> None:
    credential, _ = make_credential(max_nodes=3)
    first, bad, last = (ask(credential, name, instance_id="i") for name in "abc")
    values: dict[str, object] = {"status": "busy"}
    reports = [report(first, **values), report(bad, **{**values, **poison}), report(last, **values)]
    write_presences(reports, gateway_id=HERE)
    assert [presence_of(opened).reported_status for opened in (first, bad, last)] == ["busy", "available", "busy"]


# Rows for routing


def test_rows_say_what_routing_needs_in_one_query() -> None:
    credential, _ = make_credential(max_nodes=9)
    opened = ask(credential, "b", instance_id="i1")
    ask(credential, "d", protocol=bridge.BRIDGE_V1)
    began = time.monotonic()
    drain_node(node_id=opened.node_id, actor=ACTOR, reason="fans", timeout_s=60)
    write_presences([report(opened)], gateway_id=HERE)
    url = "https://box.example/v1"
    direct = make_node("a", reach=Reach.DIRECT, public_base_url=url, model_names=["x"], credential=credential)
    make_presence(direct, age_s=3.0, is_accepting_jobs=False)
    make_node("c", credential=credential, reach=Reach.DIRECT)
    with CaptureQueriesContext(connection) as queries:
        rows = load_node_rows()
    assert len(queries) == 1
    one, two, three, four = rows
    assert (one.name, one.is_direct, one.public_base_url, one.model_names) == ("a", True, url, ("x",))
    assert one.heartbeat_age_s is not None
    took_s = time.monotonic() - began
    assert 3.0 <= one.heartbeat_age_s <= 3.0 + took_s
    assert not one.is_accepting_jobs
    assert (two.name, two.draining, two.drain_reason, two.epoch, two.instance_id) == ("b", True, "fans", 1, "i1")
    assert two.drain_remaining_s is not None
    assert 60 - took_s <= two.drain_remaining_s <= 60
    assert (two.connected, two.gateway_id, two.is_direct, two.endpoints) == (True, HERE, False, {})
    assert (three.is_direct, three.heartbeat_age_s, three.connected, three.reported_status) == (False, None, False, "offline")
    assert (two.carries_bytes, four.carries_bytes) == (True, False), "bridge workers carry no bytes"
    paths = {"m": ["/v1/audio/transcriptions", "/v1/audio/translations"]}
    write_presences([report(opened, endpoints=paths)], gateway_id=HERE)
    touched = Node.objects.get(pk=opened.node_id).updated_at
    write_presences([report(opened, endpoints=paths)], gateway_id=HERE)
    assert Node.objects.get(pk=opened.node_id).updated_at == touched
    assert load_node_rows()[1].endpoints == {"m": frozenset(paths["m"])}
