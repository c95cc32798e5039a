"""Nodes that are called over HTTP: what a probe makes of their answers, and how an approved operation is handed to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from pytest_django import DjangoDbBlocker, Settings
from starlette.responses import PlainTextResponse

from core.limits import limits
from gateway.services.models import allow_model
from governance.models import Operation, OperationRun
from governance.operations.runs import find_node_run, run_due
from governance.states import RunState
from nodes.api import NodeSerializer
from nodes.direct import TASK_NAME, _hand_over, call_direct_node, find_unattended
from nodes.models import Node, NodeCredential, NodePresence, Reach, clock_of, with_clock
from nodes.services.availability import read_fleet, read_served_models
from nodes.services.governance import set_op_key
from nodes.services.nodes import (
    Heartbeat,
    Registration,
    probe_direct_nodes,
    record_heartbeat,
    register_direct_node,
    set_api_key,
)
from nodes.services.sessions import load_node_rows
from nodes.services.telemetry import describe_telemetry
from nodes.tasks import call_node, schedule_calls
from tests.fakes.closed_port import closed_port
from tests.fakes.direct_node import CAPABILITIES, DirectNode, run_direct_node
from tests.fakes.governed_team import Team, approve_load, make_due, only_run
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, make_credential, make_node, make_presence, shared_rows
from wire.contract import NodeStatus
from wire.optoken.op_token import read_token
from wire.optoken.verifier import Level, Verifier
from wire.optoken.verifier import Operation as Verb

pytestmark = pytest.mark.django_db

TOLD, MODELS = "/v1/capabilities", "/v1/models"
EXAMPLE = CAPABILITIES.encode()


@pytest.fixture(scope="module")
def listening() -> Iterator[DirectNode]:
    with run_direct_node() as node:
        yield node


@pytest.fixture
def far(listening: DirectNode, settings: Settings) -> DirectNode:
    """A node on loopback that answers at once, on a machine that may stand still for a moment."""
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    set_limits(nodes={"probe_s": 30.0})
    listening.forget()
    listening.answers[MODELS] = (200, {})
    return listening


def make_direct(url: str) -> Node:
    node = make_node(reach=Reach.DIRECT, public_base_url=url)
    NodePresence.objects.create(node=node)
    return node


def register(far: DirectNode, **changes: Any) -> tuple[NodeCredential, Registration]:
    """What the node registers with, for a model that is allowed."""
    allow_model(name="m", actor=ACTOR)
    return make_credential()[0], Registration(node_name="agent", current_model="m", public_base_url=far.url, **changes)


def let_probe_be_due() -> None:
    NodePresence.objects.update(probed_at=timezone.now() - timedelta(seconds=limits().nodes.probe_silent_s + 1))


# Probes


def test_a_node_that_answers_is_reachable_and_asked_below_its_base_path_by_its_name(far: DirectNode) -> None:
    make_direct(f"{far.url}/engine")
    assert probe_direct_nodes() == 0
    presence = NodePresence.objects.get()
    assert (presence.probe_error, presence.probed_at is not None) == ("", True)
    assert (far.paths(), set(far.hosts)) == (
        ["GET /engine/v1/capabilities", "GET /engine/v1/models"],
        {f"127.0.0.1:{far.port}"},
    )


def test_a_node_whose_url_nobody_listens_on_is_told_so_and_is_not_available_until_a_call_succeeds(
    far: DirectNode, settings: Settings
) -> None:
    far.answers[MODELS] = (503, {})
    credential, about = register(far)
    registered = register_direct_node(credential=credential, registration=about)
    assert registered.unreachable == "answers with 503"
    heartbeat = Heartbeat(node_id=registered.node.pk, status=NodeStatus.AVAILABLE, is_accepting_jobs=True)
    beaten = record_heartbeat(credential=credential, heartbeat=heartbeat)
    assert (beaten.effective_status, beaten.unreachable) == (NodeStatus.OFFLINE, "answers with 503")
    (row,) = load_node_rows()
    assert row.unreachable == "answers with 503"
    assert read_fleet().served_models == frozenset()
    far.answers[MODELS] = (404, {})  # it has no such path, and it is there
    let_probe_be_due()
    assert probe_direct_nodes() == 0
    assert record_heartbeat(credential=credential, heartbeat=heartbeat).effective_status is NodeStatus.AVAILABLE
    assert read_served_models() == read_fleet().served_models == frozenset({"m"})
    far.seen.clear()
    NodePresence.objects.update(probed_at=None)
    settings.NODE_DIRECT_ALLOW_LOOPBACK = False
    assert probe_direct_nodes() == 1
    assert (bool(NodePresence.objects.get().probe_error), far.seen) == (True, []), "what is not allowed any more is not called"
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    with closed_port() as port:
        Node.objects.update(public_base_url=f"http://127.0.0.1:{port}")
        NodePresence.objects.update(probed_at=None)
        assert probe_direct_nodes() == 1
    assert "ConnectError" in NodePresence.objects.get().probe_error


def test_a_node_that_does_not_answer_or_tells_its_capabilities_is_called_again_sooner(far: DirectNode) -> None:
    far.answers[TOLD] = (200, EXAMPLE)
    make_direct(far.url)
    for error, tells, age_s, calls in (
        ("", False, 10.0, 0), ("", False, 31.0, 1), ("refused", False, 2.0, 0), ("refused", False, 5.0, 1),
        ("", True, 3.0, 0), ("", True, 5.0, 1), ("refused", True, 5.0, 1),
    ):  # fmt: skip
        before = timezone.now() - timedelta(seconds=age_s)
        NodePresence.objects.update(probed_at=before, probe_error=error, capabilities_at=before if tells else None)
        far.seen.clear()
        probe_direct_nodes()
        assert len(far.seen) == calls, (error, tells, age_s)


def test_what_a_node_says_of_its_capabilities_stands_where_the_telemetry_of_a_dialled_in_node_does(far: DirectNode) -> None:
    far.answers[TOLD] = (200, EXAMPLE)
    make_direct(far.url)
    Node.objects.update(gpu_name="NVIDIA H100", model_names=["registered"])
    assert probe_direct_nodes() == 0
    node = with_clock(Node.objects.select_related("provider", "presence")).get()
    said, large = NodeSerializer(node).data, "meta-llama/Llama-3.1-70B-Instruct"
    assert (said["status"], said["reachable"], said["models"]) == ("available", True, [large])
    states = [(large, "loaded"), ("mistralai/Mistral-7B-Instruct-v0.3", "loading")]
    assert [(one["model"], one["state"]) for one in said["replicas"]] == states
    assert said["available_models"] == ["meta-llama/Llama-3.1-8B-Instruct", "deepseek-ai/deepseek-r1-distill-llama-70b"]
    assert (said["queue_depth"], said["avg_wait_ms"], said["vram_free_mb"]) == (3, 150, 23920)
    assert load_node_rows()[0].contexts == {large: 32768}
    view = describe_telemetry(node, now=clock_of(node))
    assert view.memory is not None
    assert (view.memory.total_mb, view.memory.used_mb, view.gpus[0].name) == (81920, 58000, "NVIDIA H100")


def test_a_call_that_tells_nothing_changes_nothing_but_whether_the_node_is_reachable(far: DirectNode) -> None:
    far.answers[TOLD] = (200, EXAMPLE)
    make_direct(far.url)
    probe_direct_nodes()
    changed = {"presence__probed_at", "presence__probe_error"}
    fields = [f"presence__{field.attname}" for field in NodePresence._meta.concrete_fields]
    kept = [name for name in ("model_names", "model_endpoints", *fields) if name not in changed]
    before = Node.objects.values(*kept).get()
    too_long = "ReadError: GET /v1/capabilities answers with more than 1048576 bytes"
    answers: list[tuple[tuple[int, Any], str]] = [
        ((503, b"starting"), "answers with 503"),
        ((200, b"[" + b" " * (1024 * 1024)), too_long),
        ((200, b"<html>"), ""),
        ((200, b'{"models": {"loaded": [{"id": 7}]}}'), ""),
        ((302, "/elsewhere"), ""),
        ((404, b""), ""),
        ((500, b""), ""),
    ]
    for answer, error in answers:
        let_probe_be_due()
        far.answers[TOLD] = answer
        assert probe_direct_nodes() == bool(error)
        assert Node.objects.values(*kept).get() == before
        assert NodePresence.objects.get().probe_error == error
    NodePresence.objects.update(connected=True, replicas=[])
    let_probe_be_due()
    far.answers[TOLD] = (200, EXAMPLE)
    probe_direct_nodes()
    assert NodePresence.objects.get().replicas == [], "a node that holds a socket is not overwritten by what its URL says"


@pytest.mark.parametrize(
    ("health", "beats", "status", "last_error"),
    [
        ("healthy", None, "available", ""),
        ("unhealthy", None, "error", "the node says that its health is unhealthy"),
        ("healthy", NodeStatus.DRAINING, "draining", ""),
        ("unhealthy", NodeStatus.BUSY, "busy", ""),
    ],
)
def test_a_node_that_never_sent_a_heartbeat_lives_by_its_capabilities_and_any_other_by_its_heartbeats(
    far: DirectNode, health: str, beats: NodeStatus | None, status: str, last_error: str
) -> None:
    far.answers[TOLD] = (200, EXAMPLE.replace(b'"healthy"', b'"%s"' % health.encode()))
    credential, about = register(far)
    registered = register_direct_node(credential=credential, registration=about)
    assert registered.status is (NodeStatus.AVAILABLE if health == "healthy" else NodeStatus.ERROR)
    if beats is not None:
        heartbeat = Heartbeat(node_id=registered.node.pk, status=beats, is_accepting_jobs=beats is not NodeStatus.DRAINING)
        record_heartbeat(credential=credential, heartbeat=heartbeat)
    let_probe_be_due()
    heard_at = NodePresence.objects.get().last_heartbeat_at
    assert probe_direct_nodes() == 0
    presence = NodePresence.objects.get()
    assert (presence.reported_status, presence.last_error) == (status, last_error)
    assert (presence.last_heartbeat_at == heard_at) is (beats is not None)


# API keys


@pytest.mark.parametrize(
    ("first", "second", "path", "kept"),
    [
        ("k1", None, "", "k1"),
        ("k1", "k2", "", "k2"),
        ("k1", "", "", ""),
        ("k1", None, "/elsewhere", ""),
        ("k1", "k1", "/elsewhere", "k1"),
        (None, "k2", "", "k2"),
    ],
)
def test_a_key_is_kept_until_another_is_given_or_the_node_has_another_url(
    far: DirectNode, first: str | None, second: str | None, path: str, kept: str
) -> None:
    credential, about = register(far, api_key=first)
    register_direct_node(credential=credential, registration=about)
    before = Node.objects.values("sealed_api_key", "updated_at").get()
    register_direct_node(credential=credential, registration=about)
    assert Node.objects.values("sealed_api_key", "updated_at").get() == before, "the same key again is no change"
    far.bearers.clear()
    moved = replace(about, public_base_url=far.url + path, api_key=second)
    register_direct_node(credential=credential, registration=moved)
    assert set(far.bearers) == {f"Bearer {kept}" if kept else ""}
    assert Node.objects.get().read_api_key() == kept
    (row,) = load_node_rows()
    assert (row.api_key, "k1" in repr(row), "k1" in repr(about)) == (kept, False, False)


def test_a_key_that_the_node_does_not_accept_or_that_cannot_be_decrypted_is_said(far: DirectNode, settings: Settings) -> None:
    far.api_key, far.answers[TOLD] = "right", (200, EXAMPLE)
    node = make_direct(far.url)
    assert probe_direct_nodes() == 0  # without a key any answer says that somebody is there
    set_api_key(node_id=node.pk, api_key="wrong", actor=ACTOR)
    assert probe_direct_nodes() == 1
    assert "does not accept the API key" in NodePresence.objects.get().probe_error
    set_api_key(node_id=node.pk, api_key="right", actor=ACTOR)
    assert probe_direct_nodes() == 0
    assert NodePresence.objects.get().queue_depth == 3
    far.answers |= {TOLD: (307, "/elsewhere"), MODELS: (307, "/elsewhere")}
    far.seen.clear()
    let_probe_be_due()
    probe_direct_nodes()
    assert far.paths() == [f"GET {TOLD}", f"GET {MODELS}"], "a key does not follow a redirect"
    NodePresence.objects.update(probed_at=None)
    settings.SECRET_KEY = "another"
    far.seen.clear()
    assert probe_direct_nodes() == 1
    assert "MUSTER_SECRET_KEY" in NodePresence.objects.get().probe_error
    assert (far.seen, load_node_rows()[0].api_key) == ([], "")


# Operations

SECRET = "a key of the tests, 32 bytes long"
LOAD, TASK = "/v1/models/load", "/v1/models/load/load-1"
BEGUN = (202, {"taskId": "load-1", "status": "loading", "stage": "waiting", "progress": 0.0})


class Called:
    """One approved operation for a node called over HTTP."""

    def __init__(self, team: Team, url: str, *, level: str = "L0", **asked: Any) -> None:
        self.node: Node = make_node("far", reach=Reach.DIRECT, public_base_url=url)
        make_presence(self.node, age_s=-3600.0)
        set_op_key(node_id=self.node.pk, kid="k1", secret=SECRET, level=level, actor=ACTOR)
        self.operation: Operation = approve_load(team, self.node.printed_id, **asked)
        run_due()

    @property
    def run(self) -> OperationRun:
        """The run, as it is now."""
        return only_run(self.operation)

    def call(self) -> bool:
        """Take it one step further."""
        return call_direct_node(self.run.pk)


@pytest.fixture(scope="module")
def sent(team: Team, listening: DirectNode, django_db_blocker: DjangoDbBlocker) -> Iterator[Called]:
    """A load at level L0 that is to be handed over."""
    with shared_rows(django_db_blocker, lambda: Called(team, listening.url)) as made:
        yield made


@pytest.mark.parametrize(("level", "kind"), [("L0", Level.L0), ("L1", Level.L1)])
def test_a_load_is_handed_over_polled_and_ended(team: Team, far: DirectNode, level: str, kind: Level) -> None:
    called = Called(team, far.url, level=level)
    set_api_key(node_id=called.node.pk, api_key="a-key-of-the-node", actor=ACTOR)
    far.answers[LOAD] = BEGUN
    assert called.call()
    (_, _, body) = far.seen[0]
    key = SECRET.encode()
    target = Node.objects.get(pk=called.node.pk).runner_id
    verified = Verifier(level=kind, min_signers=2, runner_id=target, keys={"": key, "k1": key}).verify(
        read_token(body["verifiedOpToken"]),
        operation=Verb.MODEL_LOAD,
        model_id="m",
        params={name: value for name, value in body.items() if name != "verifiedOpToken"},
        now=timezone.now().timestamp(),
    )
    assert (verified.level, set(verified.signers)) == (kind, {"ben", "cleo"})
    far.answers[TASK] = (200, {"taskId": "load-1", "status": "loading", "stage": "weights", "progress": 0.5, "eta": 3})
    assert called.call()
    assert (called.run.state, called.run.stage, called.run.fraction) == (RunState.EXECUTING.value, "weights", 0.5)
    far.answers[TASK] = (200, {"taskId": "load-1", "status": "completed", "gpuMemoryUsedMB": 32})
    assert not called.call()
    assert (called.run.state, called.run.result["gpuMemoryUsedMB"]) == (RunState.SUCCEEDED.value, 32)
    assert called.run.token == ""
    assert not called.call(), "what has ended is called no more"
    assert far.paths() == [f"POST {LOAD}", f"GET {TASK}", f"GET {TASK}"]
    assert far.bearers == ["Bearer a-key-of-the-node"] * 3


def test_an_unload_that_is_answered_at_once_has_ended_and_what_takes_no_token_is_not_called(
    team: Team, sent: Called, far: DirectNode
) -> None:
    Operation.objects.update(operation="settings-reload")
    assert not sent.call()
    assert (sent.run.state, sent.run.code) == (RunState.FAILED, "unknown_operation")
    assert "connect the node by its own session" in sent.run.message
    assert not far.seen
    Node.objects.update(name="away")
    called = Called(team, far.url, operation="model-unload")
    far.answers["/v1/models/unload"] = (200, {"modelId": "m", "gpuMemoryFreedMB": 9})
    assert not called.call()
    assert (called.run.state, called.run.result["gpuMemoryFreedMB"]) == (RunState.SUCCEEDED.value, 9)


GONE = (200, {"models": {"loaded": [{"id": "seen"}, {"id": 7}, "x"]}})
ANSWERS: dict[str, tuple[tuple[int, Any], RunState, str]] = {
    "refused": ((403, {"error": {"code": "op_token_refused", "message": "no"}}), RunState.FAILED, "op_token_refused"),
    "an error without words": ((500, {}), RunState.FAILED, "http_500"),
    "a redirect": ((302, "http://127.0.0.1:1/elsewhere"), RunState.FAILED, "http_302"),
    "no JSON": ((200, PlainTextResponse("fine")), RunState.RESOLVED, "interrupted"),
    "too long": ((200, PlainTextResponse("x" * 300_000)), RunState.RESOLVED, "interrupted"),
    "a task that is a path": ((202, {"taskId": "../../admin"}), RunState.RESOLVED, "interrupted"),
    "unavailable": ((503, {"error": {"code": "unavailable"}}), RunState.QUEUED, ""),
}
POLLS: dict[str, tuple[tuple[int, Any], RunState]] = {
    "failed": ((200, {"status": "failed", "error": "no memory", "code": "insufficient_memory"}), RunState.FAILED),
    "interrupted": ((200, {"status": "interrupted"}), RunState.RESOLVED),
    "forgotten": ((404, {"error": {"code": "unknown_task"}}), RunState.RESOLVED),
    "an error": ((500, {}), RunState.EXECUTING),
    "no JSON": ((200, PlainTextResponse("?")), RunState.EXECUTING),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_other_answers_end_it_or_send_it_again(sent: Called, far: DirectNode, name: str) -> None:
    answer, state, code = ANSWERS[name]
    far.answers |= {LOAD: answer, TOLD: GONE}
    assert not sent.call()
    run = sent.run
    assert (run.state, run.code) == (state.value, code)
    assert set(far.paths()) <= {f"POST {LOAD}", f"GET {TOLD}"}
    assert state is not RunState.RESOLVED or run.result["loadedNow"] == ["seen"]


@pytest.mark.parametrize("name", POLLS)
def test_a_poll_ends_a_load_or_is_tried_again(sent: Called, far: DirectNode, name: str) -> None:
    answer, state = POLLS[name]
    far.answers |= {LOAD: BEGUN, TASK: answer}
    assert sent.call()
    assert sent.call() is (state is RunState.EXECUTING)
    assert sent.run.state == state.value


def test_a_node_that_cannot_be_reached_gets_it_again(sent: Called, far: DirectNode) -> None:
    with closed_port() as port:
        Node.objects.update(public_base_url=f"http://127.0.0.1:{port}")
        assert not sent.call()
    assert sent.run.state == RunState.QUEUED.value
    Node.objects.update(public_base_url=far.url)
    make_due(sent.operation)
    run_due()
    far.answers[LOAD] = (200, {"taskId": None, "status": "completed"})
    assert not sent.call()
    assert (sent.run.state, sent.run.attempt) == (RunState.SUCCEEDED.value, 2)


def test_two_workers_hand_it_over_once_and_an_address_that_is_not_allowed_is_not_called(
    sent: Called, far: DirectNode, settings: Settings
) -> None:
    settings.NODE_DIRECT_ALLOW_LOOPBACK = False
    assert not sent.call()
    assert (sent.run.state, far.seen) == (RunState.QUEUED.value, [])
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    make_due(sent.operation)
    run_due()
    stale = find_node_run(sent.run.pk)
    assert stale is not None
    far.answers[LOAD] = BEGUN
    assert sent.call()
    assert not _hand_over(stale, sent.node)
    assert far.paths() == [f"POST {LOAD}"]


def test_a_worker_that_died_with_the_call_leaves_an_outcome_that_nobody_knows(sent: Called, far: DirectNode) -> None:
    OperationRun.objects.update(sent_at=timezone.now())
    assert not sent.call()
    assert sent.run.state == RunState.RESOLVED.value
    assert f"POST {LOAD}" not in far.paths()


def test_a_command_without_a_worker_is_found_by_the_sweep(sent: Called) -> None:
    OperationRun.objects.update(contact_at=timezone.now() + timedelta(minutes=1))  # however slow the machine is: just now
    assert find_unattended() == []
    OperationRun.objects.update(contact_at=timezone.now() - timedelta(seconds=6))
    assert find_unattended() == [sent.run.pk]
    OperationRun.objects.update(state=RunState.EXECUTING.value, sent_at=timezone.now(), task_id="load-1")
    assert find_unattended() == [], "a call may take that long"
    OperationRun.objects.update(contact_at=timezone.now() - timedelta(seconds=21))
    assert find_unattended() == [sent.run.pk]
    assert call_node.name == TASK_NAME
    assert schedule_calls.name == "nodes.tasks.ring_direct_boxes"
