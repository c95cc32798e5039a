"""Two things at the same moment: one consistent result, and the loser is told why."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial

import pytest
from django.db import connection, transaction
from django.utils import timezone

from core.limits import limits
from core.models import User
from governance.errors import GovernanceError, TooManyOpen
from governance.models import ApproverKey, AuditEvent, Decision, Operation, OperationRun
from governance.operations import decisions, proposals
from governance.operations.approvals import sweep_operations
from governance.operations.decisions import reject, withdraw
from governance.operations.runs import reconcile, run_due, work_on
from governance.states import ApprovalState, RunState
from tests.fakes.examples import TIMES
from tests.fakes.governed_team import (
    Team,
    fake_boxes,
    make_due,
    make_governed,
    make_key,
    make_team,
    propose_load,
    propose_token,
)
from tests.fakes.limits import set_limits
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(240)]


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo", "dan")


@pytest.fixture(autouse=True)
def long_lease() -> None:
    """Let nobody take over from a worker that only stands still, as the machine may."""
    set_limits(governance={"run_lease_s": 600.0})


def at_once(*jobs: Callable[[], object]) -> list[object]:
    """Run jobs in threads that begin together; return what each returned or raised."""
    barrier = threading.Barrier(len(jobs))

    def run(job: Callable[[], object]) -> object:
        try:
            barrier.wait(timeout=30)
            return job()
        except GovernanceError as error:
            return error
        finally:
            connection.close()

    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=60) for future in [pool.submit(run, job) for job in jobs]]


def test_two_last_approvals_meet_the_quorum_once(team: Team) -> None:
    operation = propose_token(team[0])
    team[1].approve(operation)
    answers = at_once(lambda: team[2].approve(operation), lambda: team[3].approve(operation))
    assert sum(isinstance(answer, GovernanceError) for answer in answers) == 1
    assert Decision.objects.filter(operation=operation, is_approval=True).count() == 2
    assert AuditEvent.objects.filter(op_id=operation.printed_id, action="operation.approved").count() == 1
    other = propose_token(team[0])
    at_once(*[lambda: team[1].approve(other)] * 2)
    assert Decision.objects.filter(operation=other).count() == 1, "one person in two windows"
    assert Operation.objects.get(pk=other.pk).state == ApprovalState.PENDING.value


def test_approval_and_rejection_at_once_end_in_one_of_both(team: Team) -> None:
    operation = propose_token(team[0], not_before=timezone.now() + timedelta(hours=1))
    team[1].approve(operation)
    at_once(lambda: team[2].approve(operation), lambda: reject(op_id=operation.pk, user=team[3].user, comment="no"))
    assert Operation.objects.get(pk=operation.pk).state == ApprovalState.REJECTED.value
    assert not OperationRun.objects.filter(operation=operation).exclude(state=RunState.SKIPPED.value).exists()


def test_withdrawal_and_dispatch_at_once_leave_no_run_without_quorum(team: Team) -> None:
    for _ in range(2 * TIMES):
        operation = propose_token(team[0])
        team.sign(operation)
        at_once(run_due, partial(withdraw, op_id=operation.pk, user=team[2].user))
        found = Operation.objects.get(pk=operation.pk)
        has_run = OperationRun.objects.filter(operation=operation, state=RunState.SUCCEEDED.value).exists()
        withdrawn = Decision.objects.filter(operation=operation, withdrawn_at__isnull=False).exists()
        assert has_run != withdrawn
        assert (found.state == ApprovalState.APPROVED.value) == has_run


@pytest.mark.parametrize("model", [User, ApproverKey])
def test_a_person_who_goes_off_for_a_moment_while_their_approval_is_being_counted_has_approved_nothing(
    team: Team, model: type[User | ApproverKey]
) -> None:
    operation = propose_token(team[0])

    def go_off_and_on() -> None:
        try:
            if model is User:
                User.objects.filter(pk=team[1].user.pk).update(is_active=False)
                User.objects.filter(pk=team[1].user.pk).update(is_active=True)
            else:
                ApproverKey.objects.filter(pk=team[1].key.pk).update(revoked_at=timezone.now())
                ApproverKey.objects.filter(pk=team[1].key.pk).update(revoked_at=None)
        finally:
            connection.close()

    with ThreadPoolExecutor(1) as pool:
        with transaction.atomic():
            team[1].approve(operation)
            moment = pool.submit(go_off_and_on)
            wait_until(lambda: moment.done() or is_somebody_waiting(), what="the change met the approval")
        moment.result(timeout=30)
    assert team[2].approve(operation).state == ApprovalState.PENDING.value
    assert team[3].approve(operation).state == ApprovalState.APPROVED.value


def is_somebody_waiting() -> bool:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_locks WHERE NOT granted")
        return cursor.fetchone() is not None


def test_six_workers_that_are_rung_for_one_run_carry_it_out_once(team: Team) -> None:
    operation = propose_token(team[0])
    team.sign(operation)
    run = OperationRun.objects.get(operation=operation)
    answers = at_once(*[lambda: work_on(run.pk)] * 4, run_due, reconcile)
    assert sum(bool(answer) for answer in answers) == 1
    done = AuditEvent.objects.filter(op_id=operation.printed_id, action="operation.run.succeeded")
    assert done.count() == 1


def test_a_policy_change_and_the_last_approval_at_once_never_run_under_the_old_policy_later(team: Team) -> None:
    pending = propose_token(team[0], not_before=timezone.now() + timedelta(hours=1))
    team[1].approve(pending)
    change = team.change_policy(thresholds={"admin-token-mint": 3, "policy-change": 3})
    for member in team.members[1:]:
        member.approve(change)
    at_once(run_due, lambda: team[2].approve(pending))
    sweep_operations()
    make_due(pending)
    run_due()
    assert Operation.objects.get(pk=pending.pk).state == ApprovalState.BLOCKED.value
    assert not OperationRun.objects.filter(operation=pending, state=RunState.SUCCEEDED.value).exists()


def test_six_workers_on_one_batch_wait_for_each_other_and_never_in_a_circle(team: Team) -> None:
    targets = ("box-a", "box-b", "box-c", "box-d")
    with fake_boxes() as box:
        box.local.update(targets)
        for _ in range(TIMES):
            operation = propose_load(team[0], *targets)
            team.sign(operation)
            make_due(operation)
            runs = list(operation.runs.order_by("-position"))
            at_once(*[partial(work_on, run.pk) for run in runs], run_due, reconcile)
            for _ in targets:
                make_due(operation)
                run_due()
            assert list(operation.runs.order_by("position").values_list("state", flat=True)) == ["succeeded"] * 4
    assert [order.target for order in box.sent] == list(targets) * TIMES


def test_cancelling_and_dispatching_at_once_end_in_one_of_both(team: Team) -> None:
    with fake_boxes() as box:
        for _ in range(2 * TIMES):
            operation = propose_load(team[0], "box-a", "box-b")
            team.sign(operation)
            make_due(operation)
            cancel = partial(proposals.cancel, op_id=operation.pk, proposer=team[0].proposer)
            at_once(run_due, cancel, run_due, sweep_operations)
            is_cancelled = Operation.objects.get(pk=operation.pk).state == ApprovalState.CANCELLED.value
            was_sent = any(order.op_id == operation.printed_id for order in box.sent)
            assert is_cancelled != was_sent
            if is_cancelled:
                assert set(operation.runs.values_list("state", flat=True)) == {"skipped"}


def test_an_approval_in_the_last_moment_is_not_undone_by_the_sweep(team: Team) -> None:
    for _ in range(2 * TIMES):
        operation = propose_token(team[0], not_before=timezone.now() + timedelta(hours=1))
        team[1].approve(operation)
        Operation.objects.filter(pk=operation.pk).update(expires_at=timezone.now() + timedelta(milliseconds=25))
        answers = at_once(partial(team[2].approve, operation), *[sweep_repeatedly] * 2)
        sweep_operations()
        found = Operation.objects.get(pk=operation.pk).state
        was_in_time = not isinstance(answers[0], GovernanceError)
        assert found == (ApprovalState.APPROVED.value if was_in_time else ApprovalState.EXPIRED.value)


def sweep_repeatedly() -> None:
    until = timezone.now() + timedelta(milliseconds=120)
    while timezone.now() < until:
        sweep_operations()


def test_a_requester_who_asks_from_many_windows_stays_under_the_cap(team: Team) -> None:
    for number in range(limits().governance.operation_open - 1):
        propose_token(team[0], params={"name": f"t{number}"})
    answers = at_once(*[lambda: propose_token(team[0])] * 5)
    assert sum(isinstance(answer, TooManyOpen) for answer in answers) == 4


def test_the_same_idempotency_key_at_the_same_moment_is_one_operation(team: Team) -> None:
    answers = at_once(*[lambda: propose_token(team[0], idempotency_key="k")] * 4)
    assert {answer.pk for answer in answers if isinstance(answer, Operation)} == {Operation.objects.get(idempotency_key="k").pk}
    assert not any(isinstance(answer, GovernanceError) for answer in answers)


def test_two_break_glass_uses_at_once_are_one_until_it_is_reviewed() -> None:
    people = make_team("ana", "ben", "cleo", "dan")
    emergency = [make_key(member.user, is_break_glass=True)[0] for member in people.members[1:3]]
    people.start()
    with fake_boxes() as box:
        for name in ("box-a", "box-b"):
            operation = propose_load(people[0], name, op_class="break-glass")
            proof = emergency[0].sign(bytes.fromhex(operation.digest), approver="ben")
            decisions.approve(op_id=operation.pk, user=people[1].user, proof=proof, brought_by="session:ben")
        OperationRun.objects.filter(operation__op_class="break-glass").update(due_at=timezone.now())
        at_once(*[run_due] * 3)
        assert len(box.sent) == 1
        waiting = OperationRun.objects.get(operation__op_class="break-glass", state=RunState.QUEUED.value)
        assert "has not been reviewed" in waiting.message
