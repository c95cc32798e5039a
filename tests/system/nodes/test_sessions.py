"""Node credentials, providers, and what a worker session does to the database: enrolment, fencing, presence, routing's rows."""

from __future__ import annotations

import base64
import json
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

from gateway.models import GatewayProcess
from governance.admin_tokens import create_admin_token
from governance.models import Notice
from governance.notices import add_webhook, write_message
from nodes import errors
from nodes.models import Node, NodeCredential, NodeOpKey, NodePresence, ProviderState, Reach
from nodes.services import sessions
from nodes.services.credentials import (
    change_provider_terms,
    create_credential,
    create_provider,
    delete_provider,
    disable_provider,
    enable_provider,
    find_credential,
    revoke_credential,
    trust_models,
)
from nodes.services.drains import (
    cordon_node,
    describe_drain,
    drain_node,
    mark_drained,
    set_mode,
    sweep_presence,
    undrain_node,
    write_drain_counts,
)
from nodes.services.nodes import claim_node
from nodes.services.sessions import KnownNodes, load_node_rows
from nodes.session import Registered
from nodes.states import DrainCount, Figures, ProviderTerms
from tests.fakes.nodes import (
    ACTOR,
    audited,
    make_credential,
    make_gateway,
    make_node,
    make_operator,
    make_presence,
    make_provider,
    make_record,
)
from wire import bridge
from wire.bridge import MUSTER_V1
from wire.contract import ErrorCode, NodeMode, RequestState
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
        ({"name": " "}, errors.BadRequest, "name"),
        ({"name": "x" * 81}, errors.BadRequest, "name"),
        ({"max_nodes": 0}, errors.BadRequest, "max_nodes"),
        ({"max_nodes": 10_001}, errors.BadRequest, "max_nodes"),
        ({"provider_name": "nowhere"}, errors.ProviderNotFound, "provider_name"),
        ({"node_id": uuid.UUID(int=0)}, errors.NodeNotFound, "node_id"),
    ],
)
def test_what_cannot_be_used_is_named(changes: dict[str, Any], error: type[errors.NodeError], param: str) -> None:
    make_provider()
    with pytest.raises(error) as caught:
        create_credential(**{"name": "box", "provider_name": "local", "actor": ACTOR, **changes})
    assert caught.value.param == param
    assert not NodeCredential.objects.exists()
    for name in ("", "-a", "a b", "ä", "a/b", "x" * 61, "a\n"):
        with pytest.raises(errors.BadRequest, match="name"):
            create_provider(name=name, actor=ACTOR)


def test_a_revoked_credential_is_not_found_opens_nothing_and_revoking_twice_records_once() -> None:
    credential, text = make_credential()
    kept, _ = make_credential("kept")
    first = revoke_credential(credential_id=credential.pk, actor=ACTOR)
    again = revoke_credential(credential_id=credential.pk, actor=ACTOR)
    assert first.revoked_at == again.revoked_at is not None
    assert first.updated_at > credential.updated_at
    assert find_credential(text) is None
    assert list(NodeCredential.objects.filter(revoked_at=None)) == [kept]
    assert len(audited("node_credential.revoke")) == 1
    with pytest.raises(errors.EnrolmentRefused, match="revoked"):
        ask(credential)  # it was checked a moment ago
    assert Node.objects.count() == 0
    with pytest.raises(errors.CredentialNotFound):
        revoke_credential(credential_id=0, actor=ACTOR)


def test_a_credential_may_allow_what_its_nodes_declare_and_gateways_hear_of_it() -> None:
    credential, _ = make_credential(allows_models=True)
    make_node(credential=credential)
    plain, _ = make_credential("plain")
    make_node("other", credential=plain)
    assert {row.name: row.allowed_by for row in load_node_rows()} == {"box": "box", "other": ""}
    known = KnownNodes(uuid.uuid4())
    known.refresh()
    for _ in range(2):
        trust_models(credential_id=plain.pk, trusts=True, actor=ACTOR)
    known.refresh()
    assert {row.name: row.allowed_by for row in known.rows.values()} == {"box": "box", "other": "plain"}
    assert len(audited("node_credential.trust_models")) == 1
    revoke_credential(credential_id=plain.pk, actor=ACTOR)
    assert {row.name: row.allowed_by for row in load_node_rows()}["other"] == ""
    with pytest.raises(errors.CredentialNotFound):
        trust_models(credential_id=0, trusts=True, actor=ACTOR)


TERMS: dict[str, Any] = {"max_queue": 5, "queue_s": 60, "no_node_s": 30, "max_models": 2}


def test_the_terms_of_a_provider_reach_gateways_and_what_makes_no_sense_is_named() -> None:
    make_node()
    known = KnownNodes(uuid.uuid4())
    known.refresh()
    for _ in range(2):
        change_provider_terms(name="local", **TERMS, actor=ACTOR)
    known.refresh()
    assert [row.terms for row in known.rows.values()] == [ProviderTerms("local", 5, 60, 30)]
    assert len(audited("provider.terms")) == 1
    for wrong in ({"max_queue": 0}, {"queue_s": 0}, {"queue_s": 3_601}, {"no_node_s": -1}, {"max_models": 257}):
        with pytest.raises(errors.BadRequest) as caught:
            change_provider_terms(name="local", **{**TERMS, **wrong}, actor=ACTOR)
        assert caught.value.param == next(iter(wrong))
    with pytest.raises(errors.ProviderNotFound):
        change_provider_terms(name="nowhere", **TERMS, actor=ACTOR)


def test_a_provider_is_switched_off_and_on_and_one_that_comes_back_revives_no_credential() -> None:
    before = make_provider().updated_at
    with pytest.raises(errors.Conflict):
        create_provider(name="local", actor=ACTOR)
    for change, state in (
        (disable_provider, ProviderState.DISABLED),
        (enable_provider, ProviderState.ENABLED),
    ):
        first, again = (change(name="local", actor=ACTOR) for _ in range(2))
        assert (first.state, again.state) == (state, state)
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
            with pytest.raises(errors.ProviderNotFound):
                change(name=name, actor=ACTOR)
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
        except errors.EnrolmentRefused:
            return False
        finally:
            connection.close()

    with ThreadPoolExecutor(len(names)) as boxes:
        results = list(boxes.map(enrol, names))
    assert sum(results) == made == Node.objects.count()


# Enrolment


def registration(
    credential: NodeCredential, name: str = "worker", *, protocol: str = bridge.MUSTER_V1, **fields: object
) -> sessions.SessionRequest:
    """Return what a node of that name says."""
    message = bridge.Register(worker_name=name, **fields)  # type: ignore[arg-type]  # names of its fields
    return sessions.SessionRequest(credential.pk, "10.0.0.1", Registered(name, ("m",), 3, protocol, (), message))


def ask(
    credential: NodeCredential,
    name: str = "worker",
    *,
    live: frozenset[uuid.UUID] = frozenset(),
    others: frozenset[uuid.UUID] = frozenset(),
    gateway: uuid.UUID = HERE,
    protocol: str = bridge.MUSTER_V1,
    **fields: object,
) -> sessions.OpenedSession:
    """Open a session as a node of that name."""
    request = registration(credential, name, protocol=protocol, **fields)
    (opened,) = sessions.open_sessions([request], gateway_id=gateway, live_nodes=live, other_gateways=others)
    if isinstance(opened, errors.EnrolmentRefused):
        raise opened
    return opened


def governed(public_key: str) -> bridge.NodeGovernance:
    return bridge.NodeGovernance(level="L1", runner_id=f"rig-{public_key}", public_key=public_key)


def test_a_new_box_is_enrolled_with_what_it_said() -> None:
    credential, _ = make_credential(max_nodes=2)
    gpu = bridge.GpuInfo(index=0, name="RTX 4090", memory_total_mb=24_000)
    opened = ask(credential, "rig", instance_id="i1", agent_version="1.2", owner_name="ada", gpus=[gpu], current_load=2)
    node = Node.objects.select_related("presence").get(pk=opened.node_id)
    assert (opened.node_name, opened.epoch, opened.mode, opened.cordoned, opened.draining) == (
        "rig",
        1,
        "spare_on",
        False,
        False,
    )
    assert (node.reach, node.model_names, node.max_concurrent, node.epoch) == (Reach.RELAY, ["m"], 3, 1)
    assert (node.gpu_name, node.vram_total_mb, node.agent_version, node.owner_name) == ("RTX 4090", 24_000, "1.2", "ada")
    presence = node.presence
    assert (presence.connected, presence.gateway_id, presence.active_requests) == (True, HERE, 2)
    assert (presence.protocol, presence.peer_address) == (bridge.MUSTER_V1, "10.0.0.1")
    assert audited("node.connect")[0].detail == {"protocol": bridge.MUSTER_V1, "epoch": 1, "credential": "box"}
    texts: dict[str, Any] = dict.fromkeys(("instance_id", "agent_version", "owner_name"), "x" * 900)
    gpu = bridge.GpuInfo(index=0, name="g" * 900)
    cut = Node.objects.get(pk=ask(credential, "n" * 120, current_load=10**30, gpus=[gpu], **texts).node_id)
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

    def rig(key: str, start: str, **where: Any) -> sessions.OpenedSession:
        return ask(credential, "rig", instance_id=start, governance=governed(key), **where)

    first = rig("a", "a1")
    live = frozenset({first.node_id})
    for _ in range(2):
        with pytest.raises(errors.NameTaken, match="another live box"):
            rig("b", "b1", live=live)
    node = Node.objects.get(pk=first.node_id)
    assert (node.epoch, node.instance_id, node.runner_id) == (1, "a1", "rig-a")
    assert (node.rival_address, node.rival_seen_at is not None) == ("10.0.0.1", True)
    assert len(audited("node.rival_refused")) == 1
    assert rig("a", "a1", live=live).epoch == 1
    assert rig("a", "a2", live=live).epoch == 2, "it was started again"
    assert rig("b", "b1", gateway=THERE).epoch == 3, "once the first is gone"
    with pytest.raises(errors.NameTaken):  # a node of another gateway is as live as one of this
        rig("a", "a1", others=frozenset({THERE}))
    there = ask(credential, gateway=THERE)
    assert ask(credential, others=frozenset({THERE})).node_name == "worker-2"
    NodePresence.objects.update(last_heartbeat_at=timezone.now() - timedelta(minutes=1))
    assert rig("a", "a1", others=frozenset({THERE})).epoch == 4
    assert ask(credential, others=frozenset({THERE})).node_id == there.node_id


@pytest.mark.parametrize("said", [None, governed("a")], ids=["older-box", "copied-folder"])
def test_two_programs_that_cannot_be_told_apart_do_not_take_turns(said: bridge.NodeGovernance | None) -> None:
    """The first program was replaced, as by a restart; that it comes back shows that it was none."""
    credential, _ = make_credential(max_nodes=3)
    first = ask(credential, "rig", instance_id="a1", governance=said)
    live = frozenset({first.node_id})
    assert ask(credential, "rig", instance_id="b1", governance=said, live=live).epoch == 2
    with pytest.raises(errors.NameTaken):
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
    for max_nodes in (1, 5):  # whose gateway was killed: that it still looks fresh makes no second node of the same node
        own, _ = make_credential(f"c{max_nodes}", max_nodes=max_nodes)
        before, after = ask(own, gateway=THERE), ask(own)
        assert (after.node_id, after.epoch) == (before.node_id, 2)
        assert after.node_id not in live, "under another credential it is another node"


def test_a_credential_enrols_no_more_boxes_than_it_may_and_a_bound_one_speaks_for_its_node() -> None:
    credential, _ = make_credential(max_nodes=2)
    for name in "ab":
        ask(credential, name, instance_id="1")
    with pytest.raises(errors.EnrolmentRefused, match="2"):
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
    with pytest.raises(errors.BadRequest):  # it must be of the node's provider
        create_credential(name="spare", provider_name="other", node_id=node.pk, actor=ACTOR)


def test_boxes_that_register_at_once_see_each_other_and_each_gets_its_own_answer() -> None:
    credential, _ = make_credential(max_nodes=4)
    revoked, _ = make_credential("revoked")
    revoke_credential(credential_id=revoked.pk, actor=ACTOR)
    asked = [
        *(registration(credential) for _ in range(2)),
        registration(credential, "rig", instance_id="a1", governance=governed("a")),
        registration(credential, "rig", instance_id="b1", governance=governed("b")),
        registration(credential, "rig", instance_id="a2", governance=governed("a")),
        registration(revoked, "x"),
        registration(credential, "d", instance_id="1"),
        registration(credential, "e", instance_id="1"),
    ]
    # The second "rig" cannot be told from a node started again: nobody has seen its instance id, but its key is another one.
    answers = sessions.open_sessions(asked, gateway_id=HERE)
    told = [one.node_name if isinstance(one, sessions.OpenedSession) else type(one).__name__ for one in answers]
    assert told == ["worker", "worker-2", "rig", "NameTaken", "rig", "EnrolmentRefused", "d", "EnrolmentRefused"]
    rigs = [one for one in answers if isinstance(one, sessions.OpenedSession) and one.node_name == "rig"]
    assert (rigs[0].node_id == rigs[1].node_id, [one.epoch for one in rigs]) == (True, [1, 2])
    assert presence_of(rigs[0]).gateway_links == {HERE.hex: rigs[1].link_id.hex}
    assert sorted(Node.objects.values_list("name", flat=True)) == ["d", "rig", "worker", "worker-2"]
    assert (len(audited("node.connect")), len(audited("node.rival_refused"))) == (5, 1)


def test_boxes_that_come_back_and_say_what_they_said_cost_no_statement_each() -> None:
    credential, _ = make_credential(max_nodes=20)

    def come(count: int, key: str = "k" * 43) -> int:
        asked = [
            registration(
                credential, f"rig-{number}", instance_id="i",
                governance=bridge.NodeGovernance(level="L1", runner_id=f"rig-{number}", public_key="", op_keys={"k1": key}),
            )
            for number in range(count)
        ]  # fmt: skip
        with CaptureQueriesContext(connection) as queries:
            answers = sessions.open_sessions(asked, gateway_id=HERE)
        assert all(isinstance(one, sessions.OpenedSession) and one.epoch == 1 for one in answers)
        return len(queries)

    come(12)
    assert come(2) == come(12)
    Node.objects.filter(name="rig-5").update(runner_id="rig-1")  # as when its credential was revoked for a while
    come(2)
    assert dict(Node.objects.filter(name__in=("rig-0", "rig-1")).values_list("name", "op_level")) == {
        "rig-0": "L1",
        "rig-1": "",
    }
    before = set(NodeOpKey.objects.values_list("pk", "secret"))
    come(2, "g" * 43)
    assert {bytes(secret) for _, secret in set(NodeOpKey.objects.values_list("pk", "secret")) - before} == {
        base64.urlsafe_b64decode("g" * 43 + "=")
    }


# Closing and reporting


def report(opened: sessions.OpenedSession, **changes: object) -> sessions.PresenceReport:
    """Return what a gateway would say of the node."""
    base = sessions.PresenceReport(
        node_id=opened.node_id, epoch=opened.epoch, age_s=2.0, active=1, models=("m",), status="available",
        last_error="", endpoints={}, said=None, link_id=opened.link_id,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]  # names of its fields


def presence_of(opened: sessions.OpenedSession) -> NodePresence:
    return NodePresence.objects.get(node_id=opened.node_id)


def close(opened: sessions.OpenedSession, *, gateway: uuid.UUID = HERE, reason: str = "gone") -> None:
    """Say that the link of a session is over."""
    sessions.close_sessions([sessions.SessionEnd(opened.node_id, opened.link_id, reason)], gateway_id=gateway)


def test_what_was_gathered_before_a_node_left_changes_nothing_when_it_is_written_after() -> None:
    opened = ask(make_credential()[0], instance_id="i")
    gathered = report(opened, active=3, models=("late",))
    close(opened)
    sessions.write_presences([gathered], gateway_id=HERE)
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
    sessions.write_presences([gathered], gateway_id=HERE)
    assert presence_of(second).active_requests == 0
    close(first)
    assert (presence_of(second).connected, audited("node.disconnect")) == (True, [])
    assert Node.objects.get(pk=second.node_id).model_names == ["m"]
    sessions.write_presences([report(second, active=2)], gateway_id=HERE)
    assert presence_of(second).active_requests == 2


def test_a_node_on_two_gateways_is_reported_by_both_and_leaves_with_the_one_that_reported_it_last() -> None:
    credential, _ = make_credential()
    here = ask(credential, instance_id="i", others=frozenset({THERE}))
    there = ask(credential, instance_id="i", gateway=THERE, others=frozenset({HERE}))
    sessions.write_presences([report(here, active=1)], gateway_id=HERE)
    sessions.write_presences([report(there, active=2)], gateway_id=THERE)
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
    replica = {"model": "m", "state": "loaded", "engine": "vllm"}
    state = bridge.Telemetry(
        gpus=[bridge.GpuInfo(**gpu) for gpu in gpus],  # type: ignore[arg-type]  # their fields
        replicas=[bridge.ReplicaInfo(model="m", state="loaded", engine="vllm")],
        available=["x"],
        memory=bridge.MemoryInfo(total_mb=30),
        queue_depth=4,
        avg_wait_ms=70,
    )
    before = timezone.now()
    sessions.write_presences([report(opened, status="busy", last_error="e" * 900, said=state)], gateway_id=HERE)
    presence = presence_of(opened)
    assert presence.last_heartbeat_at is not None
    assert before <= presence.last_heartbeat_at + timedelta(seconds=2) <= timezone.now()
    assert (presence.reported_status, presence.active_requests, len(presence.last_error)) == ("busy", 1, 500)
    sessions.write_presences([report(opened)], gateway_id=HERE)
    presence = presence_of(opened)
    assert (presence.vram_used_mb, presence.vram_free_mb, presence.gpu_util_percent) == (5, 25, 70.5)
    assert (presence.gpus, presence.replicas, presence.memory) == (gpus, [replica], {"total_mb": 30})
    assert (presence.available_models, presence.queue_depth, presence.avg_wait_ms) == (["x"], 4, 70)
    state = bridge.Telemetry(gpus=[bridge.GpuInfo(index=0, name="a", memory_used_mb=4)])
    sessions.write_presences([report(opened, said=state)], gateway_id=HERE)
    assert (presence_of(opened).vram_used_mb, presence_of(opened).vram_free_mb) == (4, None)


def test_a_registration_says_at_once_what_the_box_has() -> None:
    credential, _ = make_credential()
    told = {"model": "m", "state": "loaded", "engine": "vllm", "endpoints": ["/v1/embeddings"], "context_tokens": 512}
    memory = bridge.MemoryInfo(total_mb=100, used_mb=40)
    replica = bridge.ReplicaInfo(**told)  # type: ignore[arg-type]  # its fields
    opened = ask(credential, replicas=[replica], memory=memory, available=["other"], instance_id="i")
    presence, (row,) = presence_of(opened), sessions.load_node_rows()
    assert (presence.replicas, row.contexts, row.engines) == ([told], {"m": 512}, {"m": frozenset({"vllm"})})
    assert (presence.memory, presence.available_models) == ({"total_mb": 100, "used_mb": 40}, ["other"])
    assert row.endpoints == {"m": frozenset({"/v1/embeddings"})}
    ask(credential, instance_id="j")
    presence = presence_of(opened)
    assert (presence.replicas, presence.memory, presence.available_models) == ([], None, [])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    "poison",
    [
        {"last_error": "a\x00b"},
        {"active": 10**30},
        {"said": bridge.Telemetry(gpus=[bridge.GpuInfo(index=0, name="a\x00b")])},
        {"said": bridge.Telemetry(gpus=[bridge.GpuInfo(index=0, name="a", memory_used_mb=10**30)])},
        {"said": bridge.Telemetry(replicas=[bridge.ReplicaInfo(model="a\x00", state="loaded", engine="e")])},
    ],
    ids=["last_error", "active", "gpu name", "gpu memory", "replica"],
)
def test_a_report_that_cannot_be_stored_does_not_hold_the_others_up(poison: dict[str, object]) -> None:
    credential, _ = make_credential(max_nodes=3)
    first, bad, last = (ask(credential, name, instance_id="i") for name in "abc")
    values: dict[str, object] = {"status": "busy"}
    reports = [report(first, **values), report(bad, **{**values, **poison}), report(last, **values)]
    sessions.write_presences(reports, gateway_id=HERE)
    assert [presence_of(opened).reported_status for opened in (first, bad, last)] == ["busy", "available", "busy"]


# Rows for routing


def test_rows_say_what_routing_needs_in_one_query() -> None:
    credential, _ = make_credential(max_nodes=9)
    opened = ask(credential, "b", instance_id="i1")
    ask(credential, "d", protocol=bridge.BRIDGE_V1)
    drain_node(node_id=opened.node_id, actor=ACTOR, reason="fans", timeout_s=60)
    sessions.write_presences([report(opened)], gateway_id=HERE)
    url = "https://box.example/v1"
    direct = make_node("a", reach=Reach.DIRECT, public_base_url=url, model_names=["x"], credential=credential)
    make_presence(direct, age_s=3.0, is_accepting_jobs=False)
    make_node("c", credential=credential, reach=Reach.DIRECT)
    with CaptureQueriesContext(connection) as queries:
        one, two, three, four = sessions.load_node_rows()
    assert len(queries) == 1
    assert (one.name, one.is_direct, one.public_base_url, one.model_names) == ("a", True, url, ("x",))
    assert one.heartbeat_age_s is not None
    assert (one.heartbeat_age_s >= 3.0, one.is_accepting_jobs) == (True, False)
    assert (two.name, two.draining, two.drain_reason, two.epoch, two.instance_id) == ("b", True, "fans", 1, "i1")
    assert two.drain_remaining_s is not None
    assert 0 < two.drain_remaining_s <= 60
    assert (two.connected, two.gateway_id, two.is_direct, two.endpoints) == (True, HERE, False, {})
    assert (three.is_direct, three.heartbeat_age_s, three.connected, three.reported_status) == (False, None, False, "offline")
    assert (two.carries_bytes, four.carries_bytes) == (True, False), "bridge workers carry no bytes"
    paths, touched = {"m": ["/v1/audio/transcriptions", "/v1/audio/translations"]}, set()
    for _ in range(2):
        sessions.write_presences([report(opened, endpoints=paths)], gateway_id=HERE)
        touched.add(Node.objects.get(pk=opened.node_id).updated_at)
    assert (len(touched), sessions.load_node_rows()[1].endpoints) == (1, {"m": frozenset(paths["m"])})


def test_rows_carry_the_figures_of_each_model_and_none_that_cannot_be_read() -> None:
    node = make_node(figures={"tiny": {"reliability": 0.9, "latency_ms": 120.0}})
    (row,) = sessions.load_node_rows()
    assert row.figures == {"tiny": Figures(reliability=0.9, latency_ms=120.0)}
    Node.objects.filter(pk=node.pk).update(figures={"tiny": "good"})
    assert sessions.load_node_rows()[0].figures == {}


def drain(name: str = "box", *, active: int = 0, heard_after_s: float = 1.0, **presence: Any) -> Node:
    """Return a draining node that said ``heard_after_s`` after the drain began that it runs ``active`` requests."""
    node = make_node(name)
    values = {"active_requests": active, "connected": True, "protocol": MUSTER_V1, **presence}
    make_presence(node, age_s=0.0, **values)
    node = drain_node(node_id=node.pk, actor=ACTOR, reason="new fans")
    heard = node.draining_since + timedelta(seconds=heard_after_s)  # type: ignore[operator]  # it drains
    NodePresence.objects.update(last_heartbeat_at=heard)
    return node


def tell(node: Node, gateway: GatewayProcess, active: int) -> None:
    """Have a gateway say how many requests it runs on the node, knowing of the drain as the row is now."""
    since = Node.objects.get(pk=node.pk).draining_since
    assert since is not None
    write_drain_counts([DrainCount(node.pk, since, active)], gateway_id=gateway.pk)


def drained_at(node: Node) -> object:
    return Node.objects.get(pk=node.pk).drained_at


def test_a_node_is_drained_when_the_last_gateway_has_said_zero() -> None:
    here, there = make_gateway(), make_gateway()
    node = drain()
    assert sweep_presence().drained == 0, "no gateway has heard of the drain yet"
    tell(node, here, 0)
    tell(node, there, 1)
    assert (sweep_presence().drained, drained_at(node)) == (0, None)
    tell(node, there, 0)
    assert drained_at(node) is not None
    (event,) = audited("node.drained")
    assert (event.target, event.detail) == (node.printed_id, {"name": "box", "interrupted": 0})
    assert sweep_presence().drained == 0
    assert len(audited("node.drained")) == 1


@pytest.mark.parametrize(
    ("presence", "is_done"),
    [
        ({}, True),
        ({"active": 1}, False),  # on its own port, or for a gateway whose word has not come
        ({"heard_after_s": -1.0}, False),  # what it said is of before the drain
        ({"active": 1, "reported_status": "offline", "connected": False}, True),
    ],
)
def test_the_nodes_own_account_counts(presence: dict[str, Any], is_done: bool) -> None:
    node = drain(**presence)
    assert mark_drained() == int(is_done)
    assert (drained_at(node) is not None) is is_done


def test_a_request_whose_record_is_open_keeps_the_node_from_being_drained() -> None:
    node = drain()
    record = make_record(state=RequestState.RUNNING, node_id=node.pk)
    assert mark_drained() == 0
    type(record).objects.update(state=RequestState.COMPLETED.value)
    assert mark_drained() == 1


def test_what_a_gateway_said_of_an_earlier_drain_counts_for_nothing() -> None:
    gateway = make_gateway()
    node = drain()
    tell(node, gateway, 1)
    earlier = Node.objects.get().draining_since
    assert earlier is not None
    undrain_node(node_id=node.pk, actor=ACTOR)
    again = drain_node(node_id=node.pk, actor=ACTOR, reason="again")
    NodePresence.objects.update(last_heartbeat_at=again.draining_since)
    write_drain_counts([DrainCount(node.pk, earlier, 0)], gateway_id=gateway.pk)
    assert (mark_drained(), drained_at(node)) == (0, None)
    tell(node, gateway, 0)
    assert drained_at(node) is not None


def test_a_reclaimed_node_is_drained_too_and_lending_it_again_clears_that() -> None:
    node = make_node()
    set_mode(node_id=node.pk, mode=NodeMode.SPARE_OFF, reason="mine", actor="node:box")
    assert mark_drained() == 1
    assert not Notice.objects.exists()
    assert set_mode(node_id=node.pk, mode=NodeMode.SPARE_ON, reason="", actor="node:box").drained_at is None


def test_what_the_deadline_interrupted_is_counted_and_said() -> None:
    node = drain()
    values: dict[str, Any] = {"node_id": node.pk, "error_code": ErrorCode.REQUEST_INTERRUPTED.value}
    later = timezone.now() + timedelta(seconds=1)
    for _ in range(2):
        make_record(state=RequestState.INTERRUPTED, finished_at=later, **values)
    make_record(state=RequestState.INTERRUPTED, finished_at=later - timedelta(hours=1), age_s=3_700, **values)
    make_record(state=RequestState.COMPLETED, finished_at=later, node_id=node.pk)
    mark_drained()
    found = Node.objects.get()
    assert found.drain_interrupted == 2
    said = describe_drain(found)
    assert said == f"drained at {found.drained_at:%Y-%m-%d %H:%M:%S} UTC, 2 requests interrupted: safe to power off"


def test_whoever_asked_for_the_drain_and_every_webhook_are_told(settings: Any) -> None:
    settings.NOTICE_SENDER = "muster@example.org"
    ada = make_operator("ada")
    ada.email = "ada@example.org"
    ada.save()
    make_operator("bob")
    add_webhook(name="pager", url="https://pager.example.org/hook", actor=ACTOR)
    node = drain()
    mark_drained()
    mail, hook = Notice.objects.order_by("webhook")
    if mail.person is None:
        mail, hook = hook, mail
    assert (mail.person, str(hook.webhook)) == (ada, "pager")
    message = write_message(mail)
    assert message.subject == "box is drained: safe to power off"
    assert "nothing runs on it" in message.text
    body = json.loads(json.dumps(dict(write_message(hook).body)))
    assert (body["event"], body["node"]) == ("drained", {"id": node.printed_id, "name": "box"})
    assert body["link"].endswith(f"/admin/nodes/node/{node.pk}/change/")
