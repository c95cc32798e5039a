"""Commands as rows: what is to be sent when, and what becomes of a run by what its box says."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from governance import services
from governance.models import Freeze, OperationRun
from governance.states import RunState
from nodes.commands import Ask, Command, Delivery, Send, plan_deliveries, put_command, store_status
from nodes.commands.rows import park_command
from nodes.models import Node, NodeCommand
from tests.fakes.governed_nodes import Identity, approve_load, make_box, only_run
from tests.fakes.nodes import audited
from tests.system.governance.team import Team, make_due, make_governed
from wire.bridge import OpStatus
from wire.optoken import Level, Operation, Verifier, read_token
from wire.optoken.approval import read_policy

pytestmark = pytest.mark.django_db

GATEWAY, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)
LONG_AGO = timezone.now() - timedelta(days=1)


@pytest.fixture
def team() -> Team:
    return make_governed()


class Sent:
    """One approved load that is on its way to one box."""

    def __init__(self, team: Team, **asked: Any) -> None:
        self.rig = Identity()
        self.node = make_box(self.rig, reloads_settings=True)
        self.operation = approve_load(team, self.rig.runner_id, **asked)
        services.run_due()
        self.command = NodeCommand.objects.get()

    @property
    def run(self) -> OperationRun:
        """The run, as it is now."""
        return only_run(self.operation)

    @property
    def row(self) -> NodeCommand:
        """The command, as it is now."""
        return NodeCommand.objects.get()

    def plan(self, *, gateway: uuid.UUID = GATEWAY, linked_s_ago: float = 3600.0) -> list[Delivery]:
        """What a gateway that holds the box's socket would send now."""
        since = timezone.now() - timedelta(seconds=linked_s_ago)
        return plan_deliveries(linked={self.node.pk: since}, gateway_id=gateway)

    def hear(self, status: OpStatus, *, node: Node | None = None) -> bool:
        """The box says something."""
        return store_status(node_id=(node or self.node).pk, status=status)

    def say(self, state: str, **fields: Any) -> bool:
        """The box says something about this command without a receipt."""
        return self.hear(OpStatus(op_id=self.command.op_id, use=1, state=state, **fields))

    def pass_time(self, seconds: float) -> None:
        """Let the command have been touched so long ago; below zero: as if it were still to come, and so never long ago."""
        before = timezone.now() - timedelta(seconds=seconds)
        NodeCommand.objects.update(updated_at=before)
        NodeCommand.objects.filter(sent_at__isnull=False).update(sent_at=before)


@pytest.fixture
def sent(team: Team) -> Sent:
    return Sent(team)


# What is sent when


@pytest.mark.parametrize(
    ("operation", "params", "model_id"),
    [
        (Operation.MODEL_LOAD, {"modelId": "m"}, "m"),
        (Operation.CACHE_FLUSH, {"scope": "all"}, None),
        (Operation.SETTINGS_RELOAD, {}, None),
    ],
    ids=lambda value: value.value if isinstance(value, Operation) else "",
)
def test_what_is_approved_waits_for_a_gateway_with_a_token_that_the_node_accepts(
    team: Team, operation: Operation, params: dict[str, object], model_id: str | None
) -> None:
    sent = Sent(team, operation=operation.value, params=params)
    assert (sent.run.state, sent.row.state) == (RunState.DISPATCHED.value, "waiting")
    found = services.active_policy()
    assert found is not None
    verifier = Verifier(
        level=Level.L2,
        min_signers=1,
        runner_id=sent.rig.runner_id,
        keys={sent.rig.kid: sent.rig.secret},
        policy=read_policy(bytes(found[0].document)),
    )
    (delivery,) = sent.plan()
    assert isinstance(delivery, Send)
    verified = verifier.verify(
        read_token(delivery.token),
        operation=operation,
        model_id=model_id,
        params=delivery.body,
        now=timezone.now().timestamp(),
    )
    assert (verified.op_id, verified.level) == (delivery.op_id, Level.L2)
    assert (delivery.operation, delivery.body) == (operation.value, params)
    assert "token" not in repr(delivery)


def test_a_command_is_sent_by_one_gateway_once(sent: Sent) -> None:
    assert [type(each) for each in sent.plan()] == [Send]
    sent.pass_time(-60)
    assert sent.plan() == []
    assert sent.plan(gateway=OTHER) == []
    assert (sent.row.state, sent.row.gateway_id) == ("sent", GATEWAY)


def test_a_gateway_without_the_box_sends_nothing(sent: Sent) -> None:
    assert plan_deliveries(linked={}, gateway_id=GATEWAY) == []
    assert plan_deliveries(linked={uuid.uuid4(): LONG_AGO}, gateway_id=GATEWAY) == []
    assert sent.row.state == "waiting"


@pytest.mark.parametrize("gateway", [GATEWAY, OTHER], ids=["the same gateway", "another gateway"])
def test_a_box_that_says_nothing_for_five_seconds_is_asked(sent: Sent, gateway: uuid.UUID) -> None:
    sent.plan()
    sent.pass_time(6)
    assert sent.plan(gateway=gateway) == [Ask(sent.node.pk, sent.command.op_id, 1)]
    assert sent.plan(gateway=gateway) == [], "and then given time to answer"


def test_a_box_that_came_back_to_its_gateway_is_asked_at_once(sent: Sent) -> None:
    sent.plan()
    sent.pass_time(0.2)
    assert sent.plan(linked_s_ago=0.1) == [Ask(sent.node.pk, sent.command.op_id, 1)]


def test_a_box_that_is_new_on_another_gateway_is_not_asked_before_it_can_have_heard(sent: Sent) -> None:
    sent.plan()
    sent.pass_time(0.2)
    assert sent.plan(gateway=OTHER, linked_s_ago=0.1) == []


def test_nothing_is_sent_while_everything_is_frozen(team: Team, sent: Sent) -> None:
    services.freeze(user=team[1].user, reason="stop")
    assert sent.plan() == []
    Freeze.objects.update(lifted_at=timezone.now())
    assert [type(each) for each in sent.plan()] == [Send]


def test_a_box_is_asked_about_what_it_has_while_everything_is_frozen(team: Team, sent: Sent) -> None:
    sent.plan()
    sent.pass_time(6)
    services.freeze(user=team[1].user, reason="stop")
    assert [type(each) for each in sent.plan()] == [Ask]


def test_a_token_that_ran_out_before_the_box_came_is_replaced(sent: Sent) -> None:
    NodeCommand.objects.update(token_expires_at=timezone.now() + timedelta(seconds=4))
    old = sent.row.token
    assert sent.plan() == []
    assert (sent.run.state, sent.row.token) == (RunState.QUEUED.value, "")
    assert sent.plan() == [], "nothing is sent without a token"
    make_due(sent.operation)
    services.run_due()
    (delivery,) = sent.plan()
    assert isinstance(delivery, Send)
    assert delivery.token != old


def test_putting_a_command_again_is_harmless_and_an_ended_one_stays_ended(sent: Sent) -> None:
    again = Command(
        run_id=sent.run.pk,
        node_id=sent.node.pk,
        op_id=sent.command.op_id,
        use=1,
        operation="model-load",
        body={"modelId": "m"},
        token="new",
        token_expires_at=timezone.now() + timedelta(minutes=5),
    )
    sent.plan()
    assert put_command(again)
    assert (sent.row.state, sent.row.token, NodeCommand.objects.count()) == ("waiting", "new", 1)
    NodeCommand.objects.update(state="ended", token="")
    assert not put_command(again)
    assert (sent.row.state, sent.row.token) == ("ended", "")
    assert sent.plan() == []


def test_parking_a_command_leaves_the_token_that_it_has_got_meanwhile(sent: Sent) -> None:
    stale = sent.row
    NodeCommand.objects.update(token="newer")
    park_command(stale)
    assert sent.row.token == "newer"
    park_command(sent.row)
    assert (sent.row.token, sent.row.state) == ("", "waiting")


# What boxes say


def test_progress_is_passed_on(sent: Sent) -> None:
    sent.plan()
    assert sent.say("running", stage="loading", fraction=0.25, eta_s=9.0)
    run = sent.run
    assert (run.state, run.stage, run.fraction, run.eta_s) == (RunState.EXECUTING.value, "loading", 0.25, 9.0)
    assert sent.row.state == "running"


@pytest.mark.parametrize(("state", "end"), [("succeeded", RunState.SUCCEEDED), ("failed", RunState.FAILED)])
def test_an_end_is_kept_with_its_receipt_and_the_key_that_signed_it(sent: Sent, state: Any, end: RunState) -> None:
    sent.plan()
    status = sent.rig.end(sent.command.op_id, state, code="" if state == "succeeded" else "engine_failed", result={"mb": 7})
    assert sent.hear(status)
    run = sent.run
    assert (run.state, run.result, run.receipt) == (end.value, {"mb": 7}, status.receipt)
    assert run.receipt_key == sent.node.box_key
    assert run.code == status.code
    assert (sent.row.state, sent.row.token) == ("ended", "")


def test_the_same_end_twice_is_one_end(sent: Sent) -> None:
    status = sent.rig.end(sent.command.op_id, "succeeded")
    assert sent.hear(status)
    assert not sent.hear(status)
    assert len(audited("operation.run.succeeded")) == 2, "that of the policy, and this one"


def test_progress_that_comes_after_the_end_changes_nothing(sent: Sent) -> None:
    sent.hear(sent.rig.end(sent.command.op_id, "succeeded"))
    assert not sent.say("running", fraction=0.1)
    assert not sent.say("unknown")
    assert sent.run.state == RunState.SUCCEEDED.value


@pytest.mark.parametrize(
    "fault", ["missing", "garbage", "another box", "another operation", "another outcome", "another result", "another use"]
)
def test_an_end_without_a_proper_receipt_is_recorded_as_such(sent: Sent, fault: str) -> None:
    status = OpStatus(op_id=sent.command.op_id, use=1, state="succeeded", result={"a": 1})
    receipts: dict[str, Callable[[], str]] = {
        "missing": lambda: "",
        "garbage": lambda: "AAAA",
        "another box": lambda: Identity().receipt(status),
        "another operation": lambda: sent.rig.receipt(status, op_id="op_other"),
        "another outcome": lambda: sent.rig.receipt(status, outcome="failed"),
        "another result": lambda: sent.rig.receipt(status, result_digest="0" * 64),
        "another use": lambda: sent.rig.receipt(status, use=2),
    }
    status.receipt = receipts[fault]()
    sent.hear(status)
    run = sent.run
    assert (run.state, run.code, run.receipt) == (RunState.SUCCEEDED.value, "receipt_invalid", "")
    (event,) = audited("operation.receipt_invalid")
    assert event.op_id == sent.command.op_id
    assert event.target == sent.rig.runner_id


def test_a_box_below_l2_needs_no_receipt(sent: Sent) -> None:
    Node.objects.update(op_level="L1")
    sent.say("succeeded", result={"a": 1})
    assert (sent.run.state, sent.run.code) == (RunState.SUCCEEDED.value, "")


def test_a_refusal_fails_the_run_with_its_code(sent: Sent) -> None:
    sent.say("refused", code="op_token_refused", message="no")
    assert (sent.run.state, sent.run.code, sent.run.message) == (RunState.FAILED.value, "op_token_refused", "no")


def test_a_box_that_is_busy_gets_it_again_with_a_new_token(sent: Sent) -> None:
    old = sent.row.token
    sent.plan()
    sent.say("refused", code="unavailable")
    assert (sent.run.state, sent.row.state, sent.row.token) == (RunState.QUEUED.value, "waiting", "")
    make_due(sent.operation)
    services.run_due()
    assert sent.row.token not in {"", old}
    assert sent.run.attempt == 2


def test_a_box_that_never_heard_of_it_gets_it_again(sent: Sent) -> None:
    sent.plan()
    sent.pass_time(6)
    assert isinstance(sent.plan()[0], Ask)
    sent.say("unknown")
    assert sent.run.state == RunState.QUEUED.value
    make_due(sent.operation)
    services.run_due()
    assert isinstance(sent.plan()[0], Send)


def test_an_answer_that_is_older_than_what_was_sent_is_not_believed(sent: Sent) -> None:
    sent.plan()
    sent.pass_time(-60)
    sent.say("unknown")
    assert (sent.run.state, sent.row.state) == (RunState.DISPATCHED.value, "sent")


def test_a_box_that_was_cut_off_is_resolved_by_what_it_has_loaded_now(sent: Sent) -> None:
    sent.plan()
    sent.say("running", stage="loading")
    sent.hear(sent.rig.end(sent.command.op_id, "interrupted"))
    run = sent.run
    assert (run.state, run.code, run.result) == (RunState.RESOLVED.value, "interrupted", {"loadedNow": ["old"]})
    assert "Loaded on it now: old" in run.message
    assert run.receipt
    assert sent.row.state == "ended"


def test_a_box_that_forgot_what_it_had_begun_is_not_given_it_again(sent: Sent) -> None:
    sent.plan()
    sent.say("running")
    sent.say("unknown")
    assert sent.run.state == RunState.RESOLVED.value


def test_another_box_cannot_speak_for_this_one(sent: Sent) -> None:
    other = Identity("other")
    status = sent.rig.end(sent.command.op_id, "succeeded")
    assert not sent.hear(status, node=make_box(other))
    assert sent.run.state == RunState.DISPATCHED.value


@pytest.mark.parametrize("state", ["", "approved"])
def test_a_word_that_means_nothing_changes_nothing(sent: Sent, state: str) -> None:
    assert not sent.say(state)
    assert sent.row.state == "waiting"


def test_a_batch_goes_to_one_box_after_the_other_and_stops_at_a_failure(team: Team) -> None:
    first, second = Identity("one"), Identity("two")
    make_box(first)
    make_box(second)
    operation = approve_load(team, first.runner_id, second.runner_id)
    services.run_due()
    command = NodeCommand.objects.get()
    assert command.node.name == "one"
    store_status(node_id=command.node_id, status=first.end(command.op_id, "failed"))
    services.run_due()
    states = list(OperationRun.objects.filter(operation=operation).order_by("position").values_list("state", flat=True))
    assert states == [RunState.FAILED.value, RunState.SKIPPED.value]
    assert NodeCommand.objects.count() == 1
