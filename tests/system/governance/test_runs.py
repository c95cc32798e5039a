"""Runs of one approval, on several nodes and in several uses: their order, what a failure stops, what ends them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.utils import timezone

from governance import services
from governance.errors import ApprovalRefused, GovernanceError, NotPermitted, StateChanged
from governance.models import AuditEvent, Operation, OperationRun
from governance.services import Proposer
from governance.services.sweeps import sweep_operations
from governance.states import ApprovalState, RunEvent, RunState
from tests.fakes.governed_nodes import FakeBox, fake_boxes, propose_load
from tests.fakes.governed_team import Team, make_due, make_governed
from wire.optoken.approval import canonical, read_statement, verify_bundle

pytestmark = pytest.mark.django_db


@pytest.fixture
def box() -> Iterator[FakeBox]:
    with fake_boxes() as found:
        yield found


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo", "dan")


def approve(team: Team, operation: Operation) -> Operation:
    team[1].approve(operation)
    return team[2].approve(operation)


def states_of(operation: Operation) -> list[str]:
    return list(operation.runs.order_by("position").values_list("state", flat=True))


def run_of(operation: Operation, target: str) -> OperationRun:
    return operation.runs.get(target=target)


def test_a_batch_is_carried_out_in_its_order_one_at_a_time(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0], "box-c", "box-a", "box-b"))
    for expected in ("box-c", "box-a", "box-b"):  # the end of one wakes the next
        services.run_due()
        assert [order.target for order in box.sent][-1] == expected
        make_due(operation)
        services.run_due()
        assert box.sent[-1].target == expected
        assert services.finish_run(run_id=run_of(operation, expected).pk, event=RunEvent.SUCCEED)
    assert states_of(operation) == ["succeeded"] * 3


def test_a_failure_stops_the_rest_of_a_batch_at_once_and_each_has_its_event(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0], "box-a", "box-b", "box-c"))
    services.run_due()
    services.finish_run(run_id=run_of(operation, "box-a").pk, event=RunEvent.FAIL, code="no_memory")
    assert states_of(operation) == ["failed", "skipped", "skipped"]
    assert AuditEvent.objects.filter(op_id=operation.printed_id, action="operation.run.skipped").count() == 2
    services.run_due()
    assert len(box.sent) == 1


def test_an_end_of_which_nobody_knows_how_it_went_stops_the_rest_of_a_batch_as_well(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0], "box-a", "box-b"))
    services.run_due()
    for event, states in [(RunEvent.LOSE, ["unknown", "queued"]), (RunEvent.RESOLVE, ["resolved", "skipped"])]:
        services.finish_run(run_id=run_of(operation, "box-a").pk, event=event, code="interrupted")
        assert states_of(operation) == states


def test_a_batch_that_goes_on_after_failures_passes_a_box_that_is_away(box: FakeBox, team: Team) -> None:
    box.away.add("box-a")
    operation = approve(team, propose_load(team[0], "box-a", "box-b", stops_on_failure=False))
    services.run_due()
    OperationRun.objects.filter(operation=operation, target="box-b").update(due_at=timezone.now())
    services.run_due()
    assert states_of(operation) == ["queued", "dispatched"]
    box.away.clear()
    make_due(operation)
    services.run_due()
    assert states_of(operation) == ["queued", "dispatched"]
    services.finish_run(run_id=run_of(operation, "box-b").pk, event=RunEvent.FAIL)
    services.run_due()
    assert states_of(operation) == ["dispatched", "failed"]


@pytest.mark.parametrize("signed", [True, False], ids=["stops", "goes on"])
def test_what_was_signed_decides_what_a_failure_stops_whatever_the_row_says(box: FakeBox, team: Team, signed: bool) -> None:
    operation = approve(team, propose_load(team[0], "box-a", "box-b", stops_on_failure=signed))
    services.run_due()
    Operation.objects.filter(pk=operation.pk).update(stops_on_failure=not signed)
    services.finish_run(run_id=run_of(operation, "box-a").pk, event=RunEvent.FAIL)
    assert states_of(operation) == ["failed", "skipped" if signed else "queued"]


def test_a_row_that_says_another_end_of_a_batch_than_was_signed_is_not_carried_out(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0], "box-a", "box-b"))
    Operation.objects.filter(pk=operation.pk).update(stops_on_failure=False)
    services.run_due()
    assert box.sent == []
    assert states_of(operation) == ["failed", "skipped"]
    assert run_of(operation, "box-a").code == "approval_invalid"


def test_a_batch_signed_in_the_first_format_stops_at_a_failure_and_stays_provable(box: FakeBox, team: Team) -> None:
    operation = propose_load(team[0], "box-a", "box-b")
    members = {name: value for name, value in json.loads(bytes(operation.statement)).items() if name != "stopsOnFailure"}
    statement = read_statement(canonical(members | {"v": 1}))
    Operation.objects.filter(pk=operation.pk).update(
        statement=statement.raw, digest=statement.digest.hex(), stops_on_failure=False
    )
    operation.refresh_from_db()
    approve(team, operation)
    services.run_due()
    services.finish_run(run_id=run_of(operation, "box-a").pk, event=RunEvent.FAIL)
    assert states_of(operation) == ["failed", "skipped"]
    assert verify_bundle(services.read_evidence(operation.printed_id))[1] == statement


def test_no_run_of_a_batch_stays_queued_when_its_window_ends_unused(box: FakeBox, team: Team) -> None:
    box.away.add("box-a")
    operation = approve(team, propose_load(team[0], "box-a", "box-b"))
    services.run_due()
    Operation.objects.filter(pk=operation.pk).update(not_after=timezone.now())
    make_due(operation)
    services.run_due()
    assert states_of(operation) == ["skipped", "skipped"]
    assert Operation.objects.get(pk=operation.pk).state == ApprovalState.EXPIRED.value
    assert AuditEvent.objects.filter(op_id=operation.printed_id, action="operation.expire").count() == 1


def test_one_run_that_cannot_be_handled_does_not_hold_up_the_others(box: FakeBox, team: Team) -> None:
    box.broken.add("box-a")
    broken = approve(team, propose_load(team[0], "box-a"))
    fine = approve(team, propose_load(team[0], "box-b"))
    with pytest.raises(LookupError):
        services.run_due()
    services.run_due()
    assert states_of(broken) == ["queued"]
    assert states_of(fine) == ["dispatched"]
    assert Operation.objects.get(pk=broken.pk).dispatched_at is None


def test_a_box_that_is_silent_for_a_day_after_the_window_is_given_up(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0]))
    services.run_due()
    long_ago = timezone.now() - timedelta(hours=25)
    Operation.objects.filter(pk=operation.pk).update(not_after=long_ago)
    OperationRun.objects.filter(operation=operation).update(updated_at=long_ago + timedelta(hours=1, minutes=1))
    make_due(operation)
    services.run_due()
    assert states_of(operation) == ["dispatched"]
    OperationRun.objects.filter(operation=operation).update(updated_at=F_BEFORE(operation))
    make_due(operation)
    services.run_due()
    found = run_of(operation, "box-a")
    assert (found.state, found.code) == (RunState.RESOLVED.value, "box_lost")
    actions = list(AuditEvent.objects.filter(op_id=operation.printed_id).order_by("id").values_list("action", flat=True))
    assert actions[-2:] == ["operation.run.unknown", "operation.run.resolved"]


def F_BEFORE(operation: Operation) -> object:  # noqa: N802
    """Return what the row says it was last heard, two minutes earlier: looking at it must not count as hearing it."""
    return operation.runs.get().updated_at - timedelta(minutes=2)


def test_a_change_of_policy_ends_what_a_batch_has_not_sent(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0], "box-a", "box-b"))
    services.run_due()
    change = services.draft_policy(approvers=team.choices(), reason="anew", proposer=team[0].proposer)
    approve(team, change)
    services.run_due()
    services.finish_run(run_id=run_of(operation, "box-a").pk, event=RunEvent.SUCCEED)
    services.run_due()
    assert states_of(operation) == ["succeeded", "skipped"]
    assert "policy changed" in run_of(operation, "box-b").message
    sweep_operations()
    assert Operation.objects.get(pk=operation.pk).state == ApprovalState.APPROVED.value


@pytest.mark.parametrize("event", [RunEvent.SUCCEED, RunEvent.FAIL], ids=["success", "failure"])
def test_a_box_that_tells_the_end_of_what_it_was_never_sent_is_not_heard(box: FakeBox, team: Team, event: RunEvent) -> None:
    operation = approve(team, propose_load(team[0], "box-a", "box-b"))
    services.run_due()
    assert not services.finish_run(run_id=run_of(operation, "box-b").pk, event=event)
    assert states_of(operation) == ["dispatched", "queued"]
    assert services.requeue_run(run_id=run_of(operation, "box-a").pk, reason="cut off")
    assert services.finish_run(run_id=run_of(operation, "box-a").pk, event=event), "it had been sent"


def test_a_run_that_comes_back_before_its_window_waits_and_does_not_fail(box: FakeBox, team: Team) -> None:
    begins = timezone.now() + timedelta(hours=1)
    operation = approve(team, propose_load(team[0], not_before=begins))
    make_due(operation)
    services.run_due()
    found = run_of(operation, "box-a")
    assert found.state == RunState.QUEUED.value
    assert found.due_at >= begins - timedelta(seconds=2)


@pytest.fixture
def standing(box: FakeBox, team: Team) -> Operation:
    operation = propose_load(team[0], op_class="standing", max_uses=3)
    team[1].approve(operation)
    return team[2].approve(operation)


def use(team: Team, operation: Operation, *, end: RunEvent | None = RunEvent.SUCCEED) -> OperationRun:
    run = services.use_approval(op_id=operation.pk, proposer=team[0].proposer)[0]
    services.run_due()
    if end is not None:
        assert services.finish_run(run_id=run.pk, event=end)
    return run


def test_each_use_has_its_number_and_the_last_one_ends_it(box: FakeBox, team: Team, standing: Operation) -> None:
    for _ in range(3):
        use(team, standing)
    assert [order.use for order in box.sent] == [1, 2, 3]
    assert len({order.op_id for order in box.sent}) == 1
    with pytest.raises(ApprovalRefused, match="All 3 uses are spent"):
        use(team, standing)


def test_no_use_begins_while_nobody_knows_how_the_last_one_went(team: Team, standing: Operation) -> None:
    run = use(team, standing, end=RunEvent.LOSE)
    with pytest.raises(StateChanged, match="has not ended"):
        use(team, standing)
    services.finish_run(run_id=run.pk, event=RunEvent.RESOLVE)
    use(team, standing)


def test_the_requester_ends_it_between_two_uses_but_not_during_one(team: Team, standing: Operation) -> None:
    run = use(team, standing, end=None)
    with pytest.raises(StateChanged, match="on its way"):
        services.cancel(op_id=standing.pk, proposer=team[0].proposer)
    services.finish_run(run_id=run.pk, event=RunEvent.SUCCEED)
    assert services.cancel(op_id=standing.pk, proposer=team[0].proposer).state == ApprovalState.CANCELLED.value
    with pytest.raises(StateChanged):
        use(team, standing)


def test_an_approval_withdrawn_after_a_use_stops_the_next_and_the_proof_of_the_first_stays(
    team: Team, standing: Operation
) -> None:
    use(team, standing)
    assert services.withdraw(op_id=standing.pk, user=team[2].user).state == ApprovalState.PENDING.value
    with pytest.raises(StateChanged):
        use(team, standing)
    assert verify_bundle(services.read_evidence(standing.printed_id))[2].is_met
    team[2].approve(standing)
    use(team, standing)
    assert verify_bundle(services.read_evidence(standing.printed_id))[2].is_met


def test_its_window_bounds_it(team: Team, standing: Operation) -> None:
    use(team, standing)
    Operation.objects.filter(pk=standing.pk).update(not_after=timezone.now())
    with pytest.raises(StateChanged, match="window"):
        use(team, standing)


def test_only_those_who_may_ask_for_it_use_it(team: Team, standing: Operation) -> None:
    outsider = Team().add("mallory", is_staff=False)
    with pytest.raises(NotPermitted):
        services.use_approval(op_id=standing.pk, proposer=outsider.proposer)
    with pytest.raises(NotPermitted):
        services.use_approval(op_id=standing.pk, proposer=Proposer("ana", outsider.user.pk))


def test_a_window_of_years_ahead_is_refused(box: FakeBox, team: Team) -> None:
    with pytest.raises(GovernanceError, match="30 days"):
        propose_load(team[0], not_before=timezone.now() + timedelta(days=400))
