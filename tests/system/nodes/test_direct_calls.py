"""Operations for third-party boxes that are called over HTTP, against a server that keeps the public contract."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone
from pytest_django import Settings
from starlette.responses import PlainTextResponse

from governance import services
from governance.models import Operation, OperationRun
from governance.states import RunState
from nodes.commands.direct import call_direct_box, find_unattended
from nodes.models import Node, NodeCommand, Reach
from nodes.services import set_api_key, set_op_key
from nodes.tasks import call_box, ring_direct_boxes
from tests.fakes.direct_node import DirectNode, run_direct_node
from tests.fakes.governed_nodes import approve_load, only_run
from tests.fakes.nodes import ACTOR, make_node, make_presence
from tests.system.governance.team import Team, make_due, make_governed
from wire.optoken import Level, Verifier, read_token
from wire.optoken import Operation as Verb

pytestmark = pytest.mark.django_db

SECRET = "a key of the tests, 32 bytes long"
LOAD, TASK = "/v1/models/load", "/v1/models/load/load-1"


@pytest.fixture(scope="module")
def server() -> Iterator[DirectNode]:
    with run_direct_node() as contract:
        yield contract


@pytest.fixture
def box(server: DirectNode, settings: Settings) -> DirectNode:
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    server.forget()
    return server


@pytest.fixture
def team() -> Team:
    return make_governed()


class Called:
    """One approved operation for a box called over HTTP."""

    def __init__(self, team: Team, url: str, *, level: str = "L0", **asked: Any) -> None:
        self.node: Node = make_node("far", reach=Reach.DIRECT, public_base_url=url)
        make_presence(self.node, age_s=0)
        set_op_key(node_id=self.node.pk, kid="k1", secret=SECRET, level=level, actor=ACTOR)
        self.operation: Operation = approve_load(team, "far", **asked)
        services.run_due()

    @property
    def run(self) -> OperationRun:
        """The run, as it is now."""
        return only_run(self.operation)

    @property
    def row(self) -> NodeCommand:
        """The command, as it is now."""
        return NodeCommand.objects.get()

    def call(self) -> bool:
        """Take it one step further."""
        return call_direct_box(self.run.pk)


def test_every_call_carries_the_api_key_of_the_node(team: Team, box: DirectNode) -> None:
    called = Called(team, box.url)
    set_api_key(node_id=called.node.pk, api_key="a-key-of-the-node", actor=ACTOR)
    box.answers[LOAD] = (202, {"taskId": "load-1", "status": "loading"})
    box.answers[TASK] = (200, {"status": "completed"})
    assert called.call()
    assert not called.call()
    assert box.bearers == ["Bearer a-key-of-the-node"] * 2


@pytest.mark.parametrize(("level", "kind"), [("L0", Level.L0), ("L1", Level.L1)])
def test_a_load_is_handed_over_polled_and_ended(team: Team, box: DirectNode, level: str, kind: Level) -> None:
    called = Called(team, box.url, level=level)
    box.answers[LOAD] = (202, {"taskId": "load-1", "status": "loading", "stage": "waiting", "progress": 0.0})
    assert called.call()
    (_, _, body) = box.seen[0]
    key = SECRET.encode()
    target = Node.objects.get().runner_id
    verifier = Verifier(level=kind, min_signers=2, runner_id=target, keys={"": key, "k1": key})
    params = {name: value for name, value in body.items() if name != "verifiedOpToken"}
    verified = verifier.verify(
        read_token(body["verifiedOpToken"]),
        operation=Verb.MODEL_LOAD,
        model_id="m",
        params=params,
        now=timezone.now().timestamp(),
    )
    assert (verified.level, set(verified.signers)) == (kind, {"ben", "cleo"})
    box.answers[TASK] = (200, {"taskId": "load-1", "status": "loading", "stage": "weights", "progress": 0.5, "eta": 3})
    assert called.call()
    assert (called.run.state, called.run.stage, called.run.fraction) == (RunState.EXECUTING.value, "weights", 0.5)
    box.answers[TASK] = (200, {"taskId": "load-1", "status": "completed", "gpuMemoryUsedMB": 32})
    assert not called.call()
    assert (called.run.state, called.run.result["gpuMemoryUsedMB"]) == (RunState.SUCCEEDED.value, 32)
    assert (called.row.state, called.row.token) == ("ended", "")
    assert not called.call(), "an ended command is called no more"
    assert box.paths() == [f"POST {LOAD}", f"GET {TASK}", f"GET {TASK}"]


def test_an_unload_that_is_answered_at_once_has_ended(team: Team, box: DirectNode) -> None:
    called = Called(team, box.url, operation="model-unload")
    box.answers["/v1/models/unload"] = (200, {"modelId": "m", "gpuMemoryFreedMB": 9})
    assert not called.call()
    assert (called.run.state, called.run.result["gpuMemoryFreedMB"]) == (RunState.SUCCEEDED.value, 9)


@pytest.mark.parametrize(
    ("answer", "state", "code"),
    [
        ((403, {"error": {"code": "op_token_refused", "message": "no"}}), RunState.FAILED, "op_token_refused"),
        ((500, {}), RunState.FAILED, "http_500"),
        ((302, "http://127.0.0.1:1/elsewhere"), RunState.FAILED, "http_302"),
        ((200, PlainTextResponse("fine")), RunState.RESOLVED, "interrupted"),
        ((200, PlainTextResponse("x" * 300_000)), RunState.RESOLVED, "interrupted"),
        ((503, {"error": {"code": "unavailable"}}), RunState.QUEUED, ""),
    ],
    ids=["refused", "an error without words", "a redirect", "no JSON", "too long", "unavailable"],
)
def test_other_answers_end_it_or_send_it_again(
    team: Team, box: DirectNode, answer: tuple[int, Any], state: RunState, code: str
) -> None:
    called = Called(team, box.url)
    box.answers[LOAD] = answer
    box.answers["/v1/capabilities"] = (200, {"models": {"loaded": [{"id": "seen"}, {"id": 7}, "x"]}})
    assert not called.call()
    run = called.run
    assert (run.state, run.code) == (state.value, code)
    assert not any("elsewhere" in path for path in box.paths())
    if state is RunState.RESOLVED:
        assert run.result["loadedNow"] == ["seen"]


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ((200, {"status": "failed", "error": "no memory", "code": "insufficient_memory"}), RunState.FAILED),
        ((200, {"status": "interrupted"}), RunState.RESOLVED),
        ((404, {"error": {"code": "unknown_task"}}), RunState.RESOLVED),
    ],
    ids=["failed", "interrupted", "forgotten"],
)
def test_a_load_can_end_badly(team: Team, box: DirectNode, answer: tuple[int, Any], state: RunState) -> None:
    called = Called(team, box.url)
    box.answers |= {LOAD: (202, {"taskId": "load-1"}), TASK: answer}
    assert called.call()
    assert not called.call()
    assert called.run.state == state.value


@pytest.mark.parametrize("answer", [(500, {}), (200, PlainTextResponse("?"))], ids=["an error", "no JSON"])
def test_a_poll_without_a_proper_answer_is_tried_again(team: Team, box: DirectNode, answer: tuple[int, Any]) -> None:
    called = Called(team, box.url)
    box.answers |= {LOAD: (202, {"taskId": "load-1"}), TASK: answer}
    assert called.call()
    assert called.call()
    assert called.run.state == RunState.EXECUTING.value


def test_what_the_call_over_http_would_do_without_a_token_is_not_called(team: Team, box: DirectNode) -> None:
    called = Called(team, box.url)
    NodeCommand.objects.update(operation="settings-reload")
    assert not called.call()
    assert (called.run.state, called.run.code) == (RunState.FAILED, "unknown_operation")
    assert "connect the node by its own session" in called.run.message
    assert not box.seen


def test_a_task_id_that_is_no_plain_word_is_not_put_into_a_path(team: Team, box: DirectNode) -> None:
    called = Called(team, box.url)
    box.answers[LOAD] = (202, {"taskId": "../../admin"})
    assert not called.call()
    assert called.run.state == RunState.RESOLVED.value
    assert box.paths() == [f"POST {LOAD}", "GET /v1/capabilities"]


def test_a_box_that_cannot_be_reached_gets_it_again(team: Team, box: DirectNode) -> None:
    with socket.socket() as placeholder:  # bound, so that nobody else listens there meanwhile
        placeholder.bind(("127.0.0.1", 0))
        called = Called(team, f"http://127.0.0.1:{placeholder.getsockname()[1]}")
        assert not called.call()
    assert called.run.state == RunState.QUEUED.value
    Node.objects.update(public_base_url=box.url)
    make_due(called.operation)
    services.run_due()
    box.answers[LOAD] = (200, {"taskId": None, "status": "completed"})
    assert not called.call()
    assert (called.run.state, called.run.attempt) == (RunState.SUCCEEDED.value, 2)


def test_an_address_that_is_not_allowed_is_not_called(team: Team, box: DirectNode, settings: Settings) -> None:
    called = Called(team, box.url)
    settings.NODE_DIRECT_ALLOW_LOOPBACK = False
    assert not called.call()
    assert called.run.state == RunState.QUEUED.value
    assert box.seen == []


def test_two_workers_hand_it_over_once(team: Team, box: DirectNode) -> None:
    called = Called(team, box.url)
    stale = NodeCommand.objects.select_related("node").get()
    box.answers[LOAD] = (202, {"taskId": "load-1"})
    assert called.call()
    from nodes.commands.direct import _hand_over

    assert not _hand_over(stale)
    assert box.paths() == [f"POST {LOAD}"]


def test_a_worker_that_died_with_the_call_leaves_an_outcome_that_nobody_knows(team: Team, box: DirectNode) -> None:
    called = Called(team, box.url)
    NodeCommand.objects.update(state="sent", sent_at=timezone.now())
    assert not called.call()
    assert called.run.state == RunState.RESOLVED.value
    assert f"POST {LOAD}" not in box.paths()


def test_a_command_without_a_worker_is_found_by_the_sweep(team: Team, box: DirectNode) -> None:
    called = Called(team, box.url)
    NodeCommand.objects.update(updated_at=timezone.now() + timedelta(minutes=1))  # however slow the machine is: just now
    assert find_unattended() == []
    NodeCommand.objects.update(updated_at=timezone.now() - timedelta(seconds=6))
    assert find_unattended() == [called.run.pk]
    NodeCommand.objects.update(state="running", task_id="load-1")
    assert find_unattended() == [], "a call may take that long"
    NodeCommand.objects.update(updated_at=timezone.now() - timedelta(seconds=21))
    assert find_unattended() == [called.run.pk]


def test_the_tasks_have_the_names_that_ring_them() -> None:
    from nodes.services.direct_calls import TASK_NAME

    assert call_box.name == TASK_NAME
    assert ring_direct_boxes.name == "nodes.tasks.ring_direct_boxes"
