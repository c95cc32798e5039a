"""Runs on their way to nodes: what is sent when, what becomes of a run by what its node says, and where its token is."""

from __future__ import annotations

import inspect
import logging
import secrets
import uuid
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import pytest
import redis
from django.conf import settings
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.test import Client
from django.utils import timezone
from django.utils.module_loading import import_string
from pytest_django import DjangoDbBlocker

from core.limits import limits
from core.models import User
from governance.models import Freeze, Operation, OperationRun
from governance.operations.approvals import active_policy
from governance.operations.policies import freeze
from governance.operations.queries import read_evidence
from governance.operations.runs import run_due
from governance.registry import RunOrder
from governance.states import RunState
from nodes.channel import Delivery, plan_deliveries, store_status
from nodes.models import Node
from tests.fakes.governed_team import Identity, Team, approve_load, make_box, make_due, only_run
from tests.fakes.limits import set_limits
from tests.fakes.nodes import audited, find_tables, shared_rows
from wire.bridge import OpCommand, OpQuery, OpStatus
from wire.optoken.approval import read_policy, read_statement, verify_receipts
from wire.optoken.op_token import read_token
from wire.optoken.verifier import Level, Verifier
from wire.optoken.verifier import Operation as Verb

pytestmark = pytest.mark.django_db

GATEWAY, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)
LONG_AGO = timezone.now() - timedelta(days=1)


class Sent:
    """One approved load that is on its way to one node."""

    def __init__(self, team: Team, **asked: Any) -> None:
        self.rig = Identity()
        self.node = make_box(self.rig, age_s=-3600.0, reloads_settings=True)
        self.operation = approve_load(team, self.rig.runner_id, **asked)
        run_due()
        self.op_id = self.operation.printed_id

    @property
    def run(self) -> OperationRun:
        """The run, as it is now."""
        return only_run(self.operation)

    @property
    def stands(self) -> tuple[str, bool, bool]:
        """Its state, whether there is a token for its node, and whether the node was given it."""
        run = self.run
        return run.state, bool(run.token), run.sent_at is not None

    def plan(self, *, gateway: uuid.UUID = GATEWAY, linked_s_ago: float = 3600.0) -> list[Delivery]:
        """What a gateway that holds the node's socket would send now."""
        since = timezone.now() - timedelta(seconds=linked_s_ago)
        return plan_deliveries(linked={self.node.pk: since}, gateway_id=gateway)

    def hear(self, status: OpStatus, *, node: Node | None = None) -> bool:
        """The node says something."""
        return store_status(node_id=(node or self.node).pk, status=status)

    def say(self, state: str, **fields: Any) -> bool:
        """The node says something about this run without a receipt."""
        return self.hear(OpStatus(op_id=self.op_id, use=1, state=state, **fields))

    def pass_time(self, seconds: float) -> None:
        """Let it have been touched so long ago; below zero: as if that were still to come, and so never long ago."""
        before = timezone.now() - timedelta(seconds=seconds)
        OperationRun.objects.update(contact_at=before)
        OperationRun.objects.filter(sent_at__isnull=False).update(sent_at=before)

    def dispatch_again(self) -> None:
        """Let the next attempt be due, and make it."""
        make_due(self.operation)
        run_due()


@pytest.fixture(scope="module")
def sent(team: Team, django_db_blocker: DjangoDbBlocker) -> Iterator[Sent]:
    with shared_rows(django_db_blocker, lambda: Sent(team)) as made:
        yield made


# What is sent when


@pytest.mark.parametrize(
    ("operation", "params", "model_id"),
    [
        (Verb.MODEL_LOAD, {"modelId": "m"}, "m"),
        (Verb.CACHE_FLUSH, {"scope": "all"}, None),
        (Verb.SETTINGS_RELOAD, {}, None),
    ],
    ids=lambda value: value.value if isinstance(value, Verb) else "",
)
def test_what_is_approved_waits_for_a_gateway_with_a_token_that_the_node_accepts(
    team: Team, operation: Verb, params: dict[str, object], model_id: str | None
) -> None:
    sent = Sent(team, operation=operation.value, params=params)
    assert sent.stands == (RunState.DISPATCHED.value, True, False)
    found = active_policy()
    assert found is not None
    verifier = Verifier(
        level=Level.L2,
        min_signers=1,
        runner_id=sent.rig.runner_id,
        keys={sent.rig.kid: sent.rig.secret},
        policy=read_policy(bytes(found[0].document)),
    )
    ((_, delivery),) = sent.plan()
    assert isinstance(delivery, OpCommand)
    now = timezone.now().timestamp()
    token = read_token(delivery.token)
    verified = verifier.verify(token, operation=operation, model_id=model_id, params=delivery.body, now=now)
    assert (verified.op_id, verified.level) == (delivery.op_id, Level.L2)
    assert (delivery.operation, delivery.body) == (operation.value, params)


def test_a_run_is_sent_by_one_gateway_that_holds_the_node_once(sent: Sent) -> None:
    assert plan_deliveries(linked={}, gateway_id=GATEWAY) == []
    assert plan_deliveries(linked={uuid.uuid4(): LONG_AGO}, gateway_id=GATEWAY) == []
    assert [type(each) for _, each in sent.plan()] == [OpCommand]
    sent.pass_time(-60)
    assert sent.plan() == []
    assert sent.plan(gateway=OTHER) == []
    assert sent.stands == (RunState.DISPATCHED.value, True, True)
    assert sent.run.gateway_id == GATEWAY


@pytest.mark.parametrize(
    ("gateway", "silent_s", "linked_s_ago", "is_asked"),
    [
        (GATEWAY, 6.0, 3600.0, True),
        (OTHER, 6.0, 3600.0, True),
        (GATEWAY, 0.2, 0.1, True),  # back on its gateway
        (OTHER, 0.2, 0.1, False),  # new on another, which cannot have heard yet
    ],
)
def test_a_node_that_may_have_missed_it_is_asked_once(
    sent: Sent, gateway: uuid.UUID, silent_s: float, linked_s_ago: float, is_asked: bool
) -> None:
    sent.plan()
    sent.pass_time(silent_s)
    asked = [(sent.node.pk, OpQuery(op_id=sent.op_id, use=1))] if is_asked else []
    assert sent.plan(gateway=gateway, linked_s_ago=linked_s_ago) == asked
    assert sent.plan(gateway=gateway) == [], "and then given time to answer"


def test_what_waits_is_sent_however_much_has_been_sent(team: Team, sent: Sent) -> None:
    sent.plan()
    other = Identity("other")
    node = make_box(other)
    approve_load(team, other.runner_id)
    run_due()
    set_limits(nodes={"command_batch": 1})
    linked = {sent.node.pk: LONG_AGO, node.pk: LONG_AGO}
    assert [type(each) for _, each in plan_deliveries(linked=linked, gateway_id=GATEWAY)] == [OpCommand]


def test_while_everything_is_frozen_nothing_is_sent_and_what_was_sent_is_asked_about(team: Team, sent: Sent) -> None:
    freeze(user=team[1].user, reason="stop")
    assert sent.plan() == []
    Freeze.objects.update(lifted_at=timezone.now())
    assert [type(each) for _, each in sent.plan()] == [OpCommand]
    freeze(user=team[1].user, reason="stop")
    sent.pass_time(6)
    assert [type(each) for _, each in sent.plan()] == [OpQuery]


def test_a_token_that_ran_out_before_the_box_came_is_replaced(sent: Sent) -> None:
    OperationRun.objects.update(token_expires_at=timezone.now() + timedelta(seconds=4))
    old = sent.run.token
    assert sent.plan() == []
    assert sent.stands == (RunState.QUEUED.value, False, False)
    assert sent.plan() == [], "nothing is sent without a token"
    sent.dispatch_again()
    ((_, delivery),) = sent.plan()
    assert isinstance(delivery, OpCommand)
    assert delivery.token != old


@pytest.mark.parametrize("state", [RunState.DISPATCHED, RunState.EXECUTING])
def test_what_an_earlier_release_left_on_its_way_is_sent_anew(sent: Sent, state: RunState) -> None:
    """It kept the token in a table of its own, and what its node says of it finds no run."""
    OperationRun.objects.filter(pk=sent.run.pk).update(state=state.value, token="", node_id=None, contact_at=None)
    assert sent.plan() == []
    make_due(sent.operation)
    run_due()
    assert sent.stands == (RunState.QUEUED.value, False, False)
    sent.dispatch_again()
    assert [type(each) for _, each in sent.plan()] == [OpCommand]


def test_a_statement_that_was_changed_on_its_way_is_verified_again_and_not_sent(sent: Sent) -> None:
    Operation.objects.update(statement=b"{}")
    assert sent.plan() == []
    assert sent.stands == (RunState.QUEUED.value, False, False)
    sent.dispatch_again()
    assert (sent.run.state, sent.run.code) == (RunState.FAILED.value, "approval_invalid")


# What nodes say


@pytest.mark.parametrize(("state", "end"), [("succeeded", RunState.SUCCEEDED), ("failed", RunState.FAILED)])
def test_progress_is_passed_on_and_one_end_is_kept_with_its_receipt_and_the_key_that_signed_it(
    sent: Sent, state: Any, end: RunState
) -> None:
    sent.plan()
    assert sent.say("running", stage="loading", fraction=0.25, eta_s=9.0)
    run = sent.run
    assert (run.state, run.stage, run.fraction, run.eta_s) == (RunState.EXECUTING.value, "loading", 0.25, 9.0)
    code = "" if state == "succeeded" else "engine_failed"
    status = sent.rig.end(sent.op_id, state, code=code, result={"mb": 7})
    assert sent.hear(status)
    assert not sent.hear(status)
    assert not sent.say("running", fraction=0.1)
    assert not sent.say("unknown")
    run = sent.run
    assert (run.state, run.result, run.receipt, run.code) == (end.value, {"mb": 7}, status.receipt, code)
    assert run.receipt_key == sent.node.box_key
    (receipt,) = verify_receipts(evidence_of(sent), read_statement(bytes(sent.operation.statement)))
    assert receipt["runnerId"] == sent.rig.runner_id, "it convinces the stand-alone verifier"
    assert run.token == ""
    assert len([event for event in audited(f"operation.run.{state}") if event.op_id == sent.op_id]) == 1


Receipt = Callable[[Sent, OpStatus], str]
FAULTS: dict[str, Receipt] = {
    "missing": lambda sent, status: "",
    "garbage": lambda sent, status: "AAAA",
    "another node": lambda sent, status: Identity().receipt(status),
    "another operation": lambda sent, status: sent.rig.receipt(status, op_id="op_other"),
    "another statement": lambda sent, status: sent.rig.receipt(status, statement_digest="ab" * 32),
    "another outcome": lambda sent, status: sent.rig.receipt(status, outcome="failed"),
    "another result": lambda sent, status: sent.rig.receipt(status, result_digest="0" * 64),
    "another use": lambda sent, status: sent.rig.receipt(status, use=2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_end_without_a_proper_receipt_is_recorded_as_such_and_is_no_evidence(sent: Sent, fault: str) -> None:
    status = OpStatus(op_id=sent.op_id, use=1, state="succeeded", result={"a": 1})
    status.receipt = FAULTS[fault](sent, status)
    sent.hear(status)
    run = sent.run
    assert (run.state, run.code, run.receipt) == (RunState.SUCCEEDED.value, "receipt_invalid", "")
    (event,) = audited("operation.receipt_invalid")
    assert (event.op_id, event.target) == (sent.op_id, sent.rig.runner_id)
    assert evidence_of(sent)["receipts"] == []


def evidence_of(sent: Sent) -> dict[str, object]:
    return read_evidence(sent.operation.printed_id)


def test_a_forged_receipt_that_is_sent_again_and_again_is_recorded_a_few_times(sent: Sent) -> None:
    for _ in range(limits().governance.audit_events_per_hour + 5):
        sent.say("succeeded", receipt="AAAA", result={"n": secrets.token_hex(4)})
    assert len(audited("operation.receipt_invalid")) == limits().governance.audit_events_per_hour


@pytest.mark.parametrize("has_receipt", [False, True])
def test_of_a_node_below_l2_no_receipt_is_needed_and_none_is_kept_that_names_no_statement(
    sent: Sent, has_receipt: bool
) -> None:
    Node.objects.update(op_level="L1")
    status = OpStatus(op_id=sent.op_id, use=1, state="succeeded")
    status.receipt = sent.rig.receipt(status, statement_digest="") if has_receipt else ""
    sent.hear(status)
    assert (sent.run.state, sent.run.code, sent.run.receipt) == (RunState.SUCCEEDED.value, "", "")
    assert verify_receipts(evidence_of(sent), read_statement(bytes(sent.operation.statement))) == []


@pytest.mark.parametrize("says", [{"state": "refused", "code": "unavailable"}, {"state": "unknown"}], ids=["busy", "unheard"])
def test_a_node_that_is_busy_or_never_heard_of_it_gets_it_again_with_a_new_token(sent: Sent, says: dict[str, str]) -> None:
    old = sent.run.token
    sent.plan()
    sent.pass_time(6)
    assert isinstance(sent.plan()[0][1], OpQuery)
    sent.say(**says)
    sent.say("refused", code="busy")
    assert sent.stands == (RunState.QUEUED.value, False, False), "also when it says so twice"
    sent.dispatch_again()
    assert sent.run.token not in {"", old}
    assert sent.run.attempt == 2
    assert isinstance(sent.plan()[0][1], OpCommand)


def test_what_means_nothing_comes_from_another_node_or_is_older_than_what_was_sent_changes_nothing(sent: Sent) -> None:
    assert not sent.hear(sent.rig.end(sent.op_id, "succeeded"), node=make_box(Identity("other")))
    assert not any(sent.say(state) for state in ("", "approved"))
    assert sent.stands == (RunState.DISPATCHED.value, True, False)
    sent.plan()
    sent.pass_time(-60)
    sent.say("unknown")
    assert sent.stands == (RunState.DISPATCHED.value, True, True)
    sent.say("refused", code="op_token_refused", message="no")
    assert (sent.run.state, sent.run.code, sent.run.message) == (RunState.FAILED.value, "op_token_refused", "no")


@pytest.mark.parametrize("forgot", [False, True])
def test_a_node_that_was_cut_off_or_forgot_what_it_had_begun_is_resolved_by_what_it_has_now(sent: Sent, forgot: bool) -> None:
    sent.plan()
    sent.say("running", stage="loading")
    sent.say("unknown") if forgot else sent.hear(sent.rig.end(sent.op_id, "interrupted"))
    run = sent.run
    assert sent.stands == (RunState.RESOLVED.value, False, True), "and it is not given it again"
    if not forgot:
        assert (run.code, run.result, bool(run.receipt)) == ("interrupted", {"loadedNow": ["old"]}, True)
        assert "Loaded on it now: old" in run.message


def test_a_word_of_being_cut_off_that_comes_when_it_is_about_to_be_sent_again_ends_nothing(sent: Sent) -> None:
    sent.plan()
    sent.pass_time(6)
    sent.say("refused", code="unavailable")
    sent.say("interrupted")
    assert sent.stands == (RunState.QUEUED.value, False, False)
    sent.dispatch_again()
    assert isinstance(sent.plan()[0][1], OpCommand)


def test_a_batch_goes_to_one_node_after_the_other_and_stops_at_a_failure(team: Team) -> None:
    first, second = Identity("one"), Identity("two")
    box = make_box(first)
    make_box(second)
    operation = approve_load(team, first.runner_id, second.runner_id)
    run_due()
    (run,) = operation.runs.exclude(token="")
    assert (run.target, run.node_id) == (first.runner_id, box.pk)
    store_status(node_id=box.pk, status=first.end(operation.printed_id, "failed"))
    run_due()
    states = list(OperationRun.objects.filter(operation=operation).order_by("position").values_list("state", flat=True))
    assert states == [RunState.FAILED.value, RunState.SKIPPED.value]
    assert operation.runs.filter(node_id__isnull=False).count() == 1


# Where tokens and keys are


def read_redis() -> bytes:
    with redis.Redis.from_url(settings.REDIS_URL) as store:
        return b"".join(cast("bytes", store.dump(key) or b"") for key in store.scan_iter())


def test_a_token_is_in_its_run_alone_and_gone_after_the_end(team: Team, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        sent = Sent(team)
        token, secret = sent.run.token, sent.rig.secret
        mac = token[-60:]
        assert len(token) > 1000
        assert find_tables(token) == {"governance_operationrun"}
        assert find_tables(secret.hex()) == {"nodes_nodeopkey"}
        planned = sent.plan()
        boss = Client()
        boss.force_login(User.objects.create_superuser("boss"))
        pages = [
            f"/admin/nodes/node/{sent.node.pk}/change/", "/admin/nodes/node/", "/admin/governance/auditevent/",
            f"/approvals/{sent.operation.pk}/", f"/approvals/{sent.operation.pk}/evidence", "/admin/",
        ]  # fmt: skip
        answers = [boss.get(page) for page in pages]
        assert [answer.status_code for answer in answers] == [200] * len(pages)
        shown = "".join(answer.content.decode() for answer in answers)
        sent.hear(sent.rig.end(sent.op_id, "succeeded"))
    assert sent.run.token == ""
    assert find_tables(token, mac) == set()
    for secret_text in (token, mac, secret.hex()):
        assert secret_text not in shown + caplog.text
        assert secret_text.encode() not in read_redis()
    order = RunOrder(
        run_id=sent.run.pk, op_id="op", use=1, operation="model-load", target="t", params={}, token="a-token-to-look-for",
        token_expires_at=0, requested_by="ana", approved_by=(),
    )  # fmt: skip
    assert token not in repr(planned)
    assert "a-token-to-look-for" not in repr(order)


def test_every_task_takes_nothing_but_ids() -> None:
    """Arguments of tasks lie in Valkey in clear, and Celery copies them into headers of messages."""
    app = import_string(settings.TASK_APP)
    app.loader.import_default_modules()
    ours = {name: task for name, task in app.tasks.items() if not name.startswith("celery.")}
    assert len(ours) > 8
    assert {name for task in ours.values() for name in inspect.signature(task.run).parameters} == {"run_id"}
    assert not {name for name, entry in settings.CELERY_BEAT_SCHEDULE.items() if entry.get("args") or entry.get("kwargs")}


# Rows of the release before


def migrate(governance: str, nodes: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")  # a table with events that wait cannot be changed
    executor = MigrationExecutor(connection)
    executor.migrate([("governance", governance), ("nodes", nodes)])


def add_command(run_id: uuid.UUID, sent: Sent, *, use: int, state: str, token: str, times: Sequence[datetime | None]) -> None:
    """Write a command as the release before does. ``times``: when its token expires, when it was sent and last heard of."""
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO nodes_nodecommand (run_id, node_id, op_id, use, operation, body, token, state, task_id, gateway_id, "
            "token_expires_at, sent_at, created_at, updated_at) "
            "VALUES (%s, %s, %s, %s, 'model-load', '{}', %s, %s, '', %s, %s, %s, now(), %s)",
            [run_id, sent.node.pk, sent.op_id, use, token, state, GATEWAY, *times],
        )


def test_commands_of_the_release_before_are_taken_over_and_it_can_serve_on(sent: Sent) -> None:
    sent.plan()
    columns = ("node_id", "token", "token_expires_at", "sent_at", "contact_at", "gateway_id", "task_id")
    ours = OperationRun.objects.filter(pk=sent.run.pk)
    before = ours.values("id", *columns).get()
    migrate("0009_void_approvals", "0011_ejections")
    assert before["node_id"] == sent.node.pk
    times = [before[name] for name in ("token_expires_at", "sent_at", "contact_at")]
    add_command(before["id"], sent, use=1, state="sent", token=before["token"], times=times)
    migrate("0010_runs_on_nodes", "0012_commands_are_runs")
    assert ours.values("id", *columns).get() == before
    sent.pass_time(6)
    assert sent.plan() == [(sent.node.pk, OpQuery(op_id=sent.op_id, use=1))]
    with connection.cursor() as cursor:  # as the release before adds a run, and a command, which knows no node any more
        cursor.execute(
            "INSERT INTO governance_operationrun (id, operation_id, target, use, position, started_by, state, attempt, stage, "
            "code, message, result, receipt, receipt_key, queued_at, due_at, lease_owner, updated_at) SELECT %s, operation_id, "
            "'other', 2, 0, '', 'queued', 0, '', '', '', '{}', '', '', now(), now(), '', now() FROM governance_operationrun "
            "WHERE id = %s",
            [uuid.uuid4(), before["id"]],
        )
        cursor.execute("UPDATE nodes_nodecommand SET state = 'ended', token = ''")
    assert OperationRun.objects.get(target="other").token == ""


COMMANDS = {
    "dispatched": "sent",
    "executing": "sent",
    "unknown": "sent",
    "succeeded": "ended",
    "failed": "ended",
    "resolved": "ended",
}
"""The state of the command of the release before, for each state of a run that had one: ended ones keep no token."""


def test_a_run_in_every_state_is_taken_over_with_its_way_to_its_node(sent: Sent) -> None:
    sent.plan()
    template_id = sent.run.pk
    copied = [str(field.column) for field in OperationRun._meta.fields if field.column not in {"id", "use", "state", "fence"}]
    migrate("0009_void_approvals", "0011_ejections")
    with connection.cursor() as cursor:
        cursor.execute("SELECT column_name FROM information_schema.columns WHERE table_name = 'governance_operationrun'")
        there = {name for (name,) in cursor.fetchall()}
        kept = ", ".join(name for name in copied if name in there)
        for number, state in enumerate(RunState, start=2):
            run_id = uuid.uuid4()
            cursor.execute(
                f"INSERT INTO governance_operationrun (id, use, state, {kept}) SELECT %s, %s, %s, {kept} "
                "FROM governance_operationrun WHERE id = %s",
                [run_id, number, state.value, template_id],
            )
            if state in COMMANDS:
                token = "t" if COMMANDS[state] == "sent" else ""
                add_command(run_id, sent, use=number, state=COMMANDS[state], token=token, times=[timezone.now()] * 3)
    migrate("0010_runs_on_nodes", "0012_commands_are_runs")
    after = {run.state: run for run in OperationRun.objects.filter(use__gt=1)}
    assert set(after) == {state.value for state in RunState}
    assert {state for state, run in after.items() if run.node_id == sent.node.pk and run.sent_at} == set(COMMANDS)
    assert {state for state, run in after.items() if run.token} == {name for name, of in COMMANDS.items() if of == "sent"}
    untouched = {state for state in after if state not in COMMANDS}
    assert all((after[state].node_id, after[state].gateway_id, after[state].token) == (None, None, "") for state in untouched)
