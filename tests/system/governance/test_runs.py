"""Runs of one approval, on several nodes and in several uses; break-glass and its review by people who did not use it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.utils import timezone

from governance.errors import ApprovalRefused, GovernanceError, InvalidProposal, NotPermitted, StateChanged
from governance.models import ApproverKey, AuditEvent, Decision, Operation, OperationRun
from governance.operations import decisions, proposals
from governance.operations.approvals import REVIEW, list_unreviewed, sweep_operations
from governance.operations.decisions import withdraw
from governance.operations.proposals import Proposer, cancel, use_approval
from governance.operations.queries import read_evidence, read_operation
from governance.operations.runs import RunEnd, finish_run, requeue_run, run_due
from governance.states import ApprovalState, RunEvent, RunState
from tests.fakes.governed_team import (
    FakeBox,
    Member,
    Team,
    fake_boxes,
    make_due,
    make_governed,
    make_key,
    make_team,
    propose_load,
)
from tests.fakes.passkeys import SoftPasskey
from wire.optoken.approval import BREAK_GLASS, canonical, read_statement, verify_bundle
from wire.optoken.documents import DEFAULT_CLASSES

pytestmark = pytest.mark.django_db
ANA, BEN, CLEO, DAN, EVE = range(5)


@pytest.fixture
def box() -> Iterator[FakeBox]:
    with fake_boxes() as found:
        yield found


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo", "dan")


def states_of(operation: Operation) -> list[str]:
    return list(operation.runs.order_by("position").values_list("state", flat=True))


def run_of(operation: Operation, target: str = "box-a") -> OperationRun:
    return operation.runs.get(target=target)


def end(operation: Operation, event: RunEvent, target: str = "box-a") -> bool:
    return finish_run(run_of(operation, target).pk, RunEnd(event, "no_memory"))


def run_again(operation: Operation) -> None:
    make_due(operation)
    run_due()


def test_a_batch_is_carried_out_in_its_order_one_at_a_time(box: FakeBox, team: Team) -> None:
    operation = team.sign(propose_load(team[0], "box-c", "box-a", "box-b"))
    for expected in ("box-c", "box-a", "box-b"):  # the end of one wakes the next
        run_due()
        run_again(operation)
        assert [order.target for order in box.sent][-1] == expected
        assert end(operation, RunEvent.SUCCEED, expected)
    assert states_of(operation) == ["succeeded"] * 3
    assert set(box.sent[0].approved_by) == {"ben", "cleo"}


def test_a_failure_and_an_end_of_which_nobody_knows_stop_the_rest_of_a_batch_and_each_has_its_event(
    box: FakeBox, team: Team
) -> None:
    operation, other = (team.sign(propose_load(team[0], "box-a", "box-b", "box-c")) for _ in range(2))
    run_due()
    end(operation, RunEvent.FAIL)
    assert states_of(operation) == ["failed", "skipped", "skipped"]
    assert AuditEvent.objects.filter(op_id=operation.printed_id, action="operation.run.skipped").count() == 2
    for event, states in [(RunEvent.LOSE, ["unknown", "queued"]), (RunEvent.RESOLVE, ["resolved", "skipped"])]:
        end(other, event)
        assert states_of(other)[:2] == states
    run_due()
    assert len(box.sent) == 2


def test_a_batch_that_goes_on_after_failures_passes_a_box_that_is_away(box: FakeBox, team: Team) -> None:
    box.away.add("box-a")
    operation = team.sign(propose_load(team[0], "box-a", "box-b", stops_on_failure=False))
    run_due()
    OperationRun.objects.filter(operation=operation, target="box-b").update(due_at=timezone.now())
    run_due()
    assert states_of(operation) == ["queued", "dispatched"]
    box.away.clear()
    run_again(operation)
    assert states_of(operation) == ["queued", "dispatched"]
    end(operation, RunEvent.FAIL, "box-b")
    run_due()
    assert states_of(operation) == ["dispatched", "failed"]


TOGETHER: dict[str, object] = {"modelId": "m", "together": True}


def test_nodes_that_load_together_are_told_at_once_and_only_when_all_are_there(box: FakeBox, team: Team) -> None:
    operation = team.sign(propose_load(team[0], "box-c", "box-a", "box-b", params=TOGETHER))
    box.away = {"box-b"}
    run_again(operation)
    assert (states_of(operation), box.sent) == (["queued"] * 3, [])
    assert "box-b is away" in run_of(operation).message
    box.away = set()
    run_again(operation)
    assert states_of(operation) == ["dispatched"] * 3
    for target in ("box-b", "box-c", "box-a"):  # in whatever order they end
        assert end(operation, RunEvent.SUCCEED, target)
    assert (states_of(operation), len(box.sent)) == (["succeeded"] * 3, 3)


def test_one_of_those_that_load_together_that_fails_keeps_the_others_from_being_told(box: FakeBox, team: Team) -> None:
    operation = team.sign(propose_load(team[0], "box-c", "box-a", "box-b", params=TOGETHER, stops_on_failure=False))
    # The worker dies over the second and third; by the time another looks the first has waited in vain.
    box.broken = {"box-a", "box-b"}
    with pytest.raises(LookupError):
        run_again(operation)
    assert states_of(operation) == ["dispatched", "queued", "queued"]
    assert end(operation, RunEvent.FAIL, "box-c")
    box.broken = set()
    run_again(operation)
    assert states_of(operation) == ["failed", "skipped", "skipped"]
    assert [order.target for order in box.sent] == ["box-c"]


def test_those_of_a_joint_load_that_were_told_end_by_themselves(box: FakeBox, team: Team) -> None:
    operation = team.sign(propose_load(team[0], "box-c", "box-a", "box-b", params=TOGETHER))
    run_again(operation)
    assert end(operation, RunEvent.FAIL, "box-a")
    run_again(operation)
    assert states_of(operation) == ["dispatched", "failed", "dispatched"], "nothing is said for them"
    assert end(operation, RunEvent.FAIL, "box-b")
    assert end(operation, RunEvent.FAIL, "box-c")
    assert (states_of(operation), len(box.sent)) == (["failed"] * 3, 3)


@pytest.mark.parametrize("signed", [True, False], ids=["stops", "goes on"])
def test_what_was_signed_decides_what_a_failure_stops_whatever_the_row_says(box: FakeBox, team: Team, signed: bool) -> None:
    operation, other = (team.sign(propose_load(team[0], "box-a", "box-b", stops_on_failure=signed)) for _ in range(2))
    Operation.objects.filter(pk=other.pk).update(stops_on_failure=not signed)
    run_due()
    assert (len(box.sent), run_of(other).code) == (1, "approval_invalid")
    Operation.objects.filter(pk=operation.pk).update(stops_on_failure=not signed)
    end(operation, RunEvent.FAIL)
    assert states_of(operation) == ["failed", "skipped" if signed else "queued"]


def test_a_batch_signed_in_the_first_format_stops_at_a_failure_and_stays_provable(box: FakeBox, team: Team) -> None:
    operation = propose_load(team[0], "box-a", "box-b")
    members = {name: value for name, value in json.loads(bytes(operation.statement)).items() if name != "stopsOnFailure"}
    statement = read_statement(canonical(members | {"v": 1}))
    rows = Operation.objects.filter(pk=operation.pk)
    rows.update(statement=statement.raw, digest=statement.digest.hex(), stops_on_failure=False)
    operation.refresh_from_db()
    team.sign(operation)
    run_due()
    end(operation, RunEvent.FAIL)
    assert states_of(operation) == ["failed", "skipped"]
    assert verify_bundle(read_evidence(operation.printed_id))[1] == statement


def test_no_run_of_a_batch_stays_queued_when_its_window_ends_unused(box: FakeBox, team: Team) -> None:
    box.away.add("box-a")
    operation = team.sign(propose_load(team[0], "box-a", "box-b"))
    run_due()
    assert "takes no operations" in run_of(operation).message
    Operation.objects.filter(pk=operation.pk).update(not_after=timezone.now())
    run_again(operation)
    assert states_of(operation) == ["skipped", "skipped"]
    assert Operation.objects.get(pk=operation.pk).state == ApprovalState.EXPIRED.value
    assert AuditEvent.objects.filter(op_id=operation.printed_id, action="operation.expire").count() == 1


def test_one_run_that_cannot_be_handled_does_not_hold_up_the_others(box: FakeBox, team: Team) -> None:
    box.broken.add("box-a")
    box.busy.add("box-c")
    broken, fine, busy = (team.sign(propose_load(team[0], target)) for target in ("box-a", "box-b", "box-c"))
    with pytest.raises(LookupError):
        run_due()
    run_due()
    assert [states_of(each) for each in (broken, fine, busy)] == [["queued"], ["dispatched"], ["queued"]]
    assert Operation.objects.get(pk=broken.pk).dispatched_at is None
    assert run_of(busy, "box-c").message == "box-c is busy"
    assert withdraw(op_id=busy.pk, user=team[1].user).state == ApprovalState.PENDING.value, "it was not sent"


def test_a_box_that_is_silent_for_a_day_after_the_window_is_given_up(box: FakeBox, team: Team) -> None:
    operation = team.sign(propose_load(team[0]))
    run_due()
    long_ago = timezone.now() - timedelta(hours=25)
    Operation.objects.filter(pk=operation.pk).update(not_after=long_ago)
    runs = OperationRun.objects.filter(operation=operation)
    runs.update(updated_at=long_ago + timedelta(hours=1, minutes=1))
    run_again(operation)
    assert states_of(operation) == ["dispatched"]
    runs.update(updated_at=runs.get().updated_at - timedelta(minutes=2))  # looking at it was no hearing of it
    run_again(operation)
    assert (run_of(operation).state, run_of(operation).code) == (RunState.RESOLVED.value, "box_lost")
    actions = list(AuditEvent.objects.filter(op_id=operation.printed_id).order_by("id").values_list("action", flat=True))
    assert actions[-2:] == ["operation.run.unknown", "operation.run.resolved"]


def test_a_change_of_policy_ends_what_a_batch_has_not_sent(box: FakeBox, team: Team) -> None:
    operation = team.sign(propose_load(team[0], "box-a", "box-b"))
    run_due()
    team.sign(team.change_policy())
    run_due()
    end(operation, RunEvent.SUCCEED)
    run_due()
    assert states_of(operation) == ["succeeded", "skipped"]
    assert "policy changed" in run_of(operation, "box-b").message
    sweep_operations()
    assert Operation.objects.get(pk=operation.pk).state == ApprovalState.APPROVED.value


@pytest.mark.parametrize("event", [RunEvent.SUCCEED, RunEvent.FAIL], ids=["success", "failure"])
def test_a_box_that_tells_the_end_of_what_it_was_never_sent_is_not_heard(box: FakeBox, team: Team, event: RunEvent) -> None:
    operation = team.sign(propose_load(team[0], "box-a", "box-b"))
    run_due()
    assert not end(operation, event, "box-b")
    assert states_of(operation) == ["dispatched", "queued"]
    assert requeue_run(run_id=run_of(operation).pk, reason="cut off")
    assert end(operation, event), "it had been sent"
    assert not end(operation, event)


def test_a_run_waits_for_its_window_which_is_not_years_ahead(box: FakeBox, team: Team) -> None:
    with pytest.raises(GovernanceError, match="30 days"):
        propose_load(team[0], not_before=timezone.now() + timedelta(days=400))
    begins = timezone.now() + timedelta(hours=1)
    operation = team.sign(propose_load(team[0], not_before=begins))
    run_again(operation)
    assert run_of(operation).state == RunState.QUEUED.value
    assert run_of(operation).due_at >= begins - timedelta(seconds=2)


# Several uses


@pytest.fixture
def standing(box: FakeBox, team: Team) -> Operation:
    return team.sign(propose_load(team[0], op_class="standing", max_uses=3))


def use(team: Team, operation: Operation, *, end: RunEvent | None = RunEvent.SUCCEED) -> OperationRun:
    run = use_approval(op_id=operation.pk, proposer=team[0].proposer)[0]
    run_due()
    if end is not None:
        assert finish_run(run.pk, RunEnd(end))
    return run


def test_each_use_has_its_number_and_the_last_one_ends_it(box: FakeBox, team: Team, standing: Operation) -> None:
    outsider = Team().add("mallory", is_staff=False)
    for proposer in (outsider.proposer, Proposer("ana", outsider.user.pk)):
        with pytest.raises(NotPermitted):
            use_approval(op_id=standing.pk, proposer=proposer)
    run = use(team, standing, end=RunEvent.LOSE)
    with pytest.raises(StateChanged, match="has not ended"):  # while nobody knows how it went
        use(team, standing)
    finish_run(run.pk, RunEnd(RunEvent.RESOLVE))
    for _ in range(2):
        use(team, standing)
    assert [(order.use, order.op_id) for order in box.sent] == [(number, standing.printed_id) for number in (1, 2, 3)]
    with pytest.raises(ApprovalRefused, match="All 3 uses are spent"):
        use(team, standing)


def test_the_requester_ends_it_between_two_uses_but_not_during_one(team: Team, standing: Operation) -> None:
    run = use(team, standing, end=None)
    with pytest.raises(StateChanged, match="on its way"):
        cancel(op_id=standing.pk, proposer=team[0].proposer)
    finish_run(run.pk, RunEnd(RunEvent.SUCCEED))
    assert cancel(op_id=standing.pk, proposer=team[0].proposer).state == ApprovalState.CANCELLED.value
    with pytest.raises(StateChanged):
        use(team, standing)


def test_an_approval_withdrawn_after_a_use_stops_the_next_and_the_proof_of_the_first_stays(
    team: Team, standing: Operation
) -> None:
    use(team, standing)
    assert withdraw(op_id=standing.pk, user=team[2].user).state == ApprovalState.PENDING.value
    with pytest.raises(StateChanged):
        use(team, standing)
    assert verify_bundle(read_evidence(standing.printed_id))[2].is_met
    team[2].approve(standing)
    use(team, standing)
    assert verify_bundle(read_evidence(standing.printed_id))[2].is_met
    Operation.objects.filter(pk=standing.pk).update(not_after=timezone.now())
    with pytest.raises(StateChanged, match="window"):
        use(team, standing)


# Break-glass


def break_glass(team: Team, key: SoftPasskey, target: str) -> Operation:
    """What the first asked for and the second signed."""
    asked = propose_load(team[ANA], target, op_class=BREAK_GLASS)
    proof = key.sign(bytes.fromhex(asked.digest), approver=team[BEN].name)
    return decisions.approve(op_id=asked.pk, user=team[BEN].user, proof=proof, brought_by="session:ben")


def make_emergency(*names: str, **policy: object) -> tuple[Team, SoftPasskey]:
    """People of whom the second and the third have a key for break-glass, and the key of the second."""
    team = make_team(*names)
    keys = [make_key(member.user, is_break_glass=True)[0] for member in team.members[1:3]]
    team.start(**policy)
    return team, keys[0]


def use_break_glass(box: FakeBox, *names: str, **policy: object) -> tuple[Team, Operation]:
    """People of an emergency, and what has been carried out in it."""
    box.local.add("box-a")
    team, key = make_emergency(*names, **policy)
    used = break_glass(team, key, "box-a")
    run_due()
    assert run_of(used).state == RunState.SUCCEEDED.value
    return team, used


def review(member: Member, used: Operation, **changes: object) -> Operation:
    asked: dict[str, object] = {
        "operation": REVIEW, "targets": [used.printed_id], "params": {}, "reason": "looked at", "proposer": member.proposer,
    }  # fmt: skip
    return proposals.propose(**(asked | changes))  # type: ignore[arg-type]


def test_whoever_used_it_does_not_review_it_and_a_signature_that_is_stored_all_the_same_closes_nothing(box: FakeBox) -> None:
    team, used = use_break_glass(box, "ana", "ben", "cleo", "dan", "eve")
    for who, how in ((ANA, "asked for it"), (BEN, "signed it"), (CLEO, "began a use of it")):
        OperationRun.objects.filter(operation=used).update(started_by="cleo" if who == CLEO else "")
        asked = review(team[ANA if who == CLEO else EVE], used)
        with pytest.raises(ApprovalRefused, match="somebody else") as refusal:
            team[who].approve(asked)
        assert refusal.value.rule == "reviewer_used_it", how
        view = read_operation(asked.pk, team[who].user)
        assert "approve" not in view.actions
        assert "somebody else" in view.hindrances["approve"]
        assert "approve" in read_operation(asked.pk, team[DAN].user).actions
    OperationRun.objects.filter(operation=used).update(started_by="")
    asked = review(team[EVE], used)
    Decision.objects.create(
        operation=asked, person=team[BEN].user, person_name="ben", is_approval=True, proof=team[BEN].proof(asked),
        key=ApproverKey.objects.get(user=team[BEN].user, is_break_glass=False),
    )  # fmt: skip
    team[CLEO].approve(asked)
    run_due()
    run = OperationRun.objects.get(operation=asked)
    assert run.state == RunState.FAILED.value
    assert "ben used" in run.message
    assert list_unreviewed().get() == used


def test_a_review_that_too_few_could_sign_is_refused_with_what_would_help(box: FakeBox) -> None:
    team, used = use_break_glass(box, "ana", "ben", "cleo")
    with pytest.raises(InvalidProposal, match=r"2 approvers who did not use it.* leaves cleo.*change of the policy") as refusal:
        review(team[ANA], used)
    assert refusal.value.param == "targets"
    team.add("dan")
    team.sign(team.change_policy())
    run_due()
    with pytest.raises(InvalidProposal, match="leaves cleo"):
        review(team[3], used)  # whoever asks for the review cannot sign it
    asked = review(team[BEN], used)
    team[CLEO].approve(asked)
    team[3].approve(asked)
    run_due()
    assert not list_unreviewed().exists()


def test_a_review_closes_only_what_its_signers_read_and_is_reminded_of(box: FakeBox) -> None:
    team, used = use_break_glass(box, "ana", "ben", "cleo", "dan", "eve")
    asked, other = review(team[EVE], used, reviews=None), propose_load(team[ANA], "box-b")
    assert asked.reviews_id == used.pk
    with pytest.raises(InvalidProposal, match="same operation"):
        review(team[ANA], used, reviews=other.pk)
    Operation.objects.filter(pk=used.pk).update(dispatched_at=timezone.now() - timedelta(hours=25))
    sweep_operations()
    assert Operation.objects.get(pk=used.pk).warned_percent == 100
    team[CLEO].approve(asked)
    team[DAN].approve(asked)
    Operation.objects.filter(pk=asked.pk).update(reviews=other)
    run_due()
    assert OperationRun.objects.get(operation=asked).state == RunState.FAILED.value
    assert list_unreviewed().get() == used


def test_of_two_break_glass_operations_the_second_waits_for_the_review_of_the_first(box: FakeBox) -> None:
    classes = {**DEFAULT_CLASSES, BREAK_GLASS: {**DEFAULT_CLASSES[BREAK_GLASS], "maxUses": 3}}
    box.local.update({"box-a", "box-b"})
    team, key = make_emergency("ana", "ben", "cleo", "dan", classes=classes)
    with pytest.raises(InvalidProposal, match="used once") as refusal:  # whatever the policy allows
        propose_load(team[ANA], "box-a", op_class=BREAK_GLASS, max_uses=2)
    assert refusal.value.param == "max_uses"
    first, second = break_glass(team, key, "box-a"), break_glass(team, key, "box-b")
    run_due()
    run_again(second)
    assert [order.target for order in box.sent] == ["box-a"]
    assert "has not been reviewed" in OperationRun.objects.get(operation=second).message
    with pytest.raises(NotPermitted, match="propose its review first"):
        propose_load(team[0], "box-c", op_class="break-glass")
    looked_at = review(team[ANA], first)
    team[2].approve(looked_at)
    team[3].approve(looked_at)
    run_due()
    run_again(second)
    assert [order.target for order in box.sent] == ["box-a", "box-b"]


def test_a_key_revoked_after_a_use_was_asked_for_stops_that_use(box: FakeBox, team: Team, standing: Operation) -> None:
    use(team, standing)
    use_approval(op_id=standing.pk, proposer=team[0].proposer)
    ApproverKey.objects.filter(user=team[2].user).update(revoked_at=timezone.now())
    run_due()
    assert len(box.sent) == 1
    assert Operation.objects.get(pk=standing.pk).state == ApprovalState.PENDING.value
    with pytest.raises(ApprovalRefused) as refusal:
        team[2].approve(standing)
    assert refusal.value.rule == "unknown_key"


def test_each_run_has_a_fence_above_all_others_and_keeps_it_when_it_is_sent_again(box: FakeBox, team: Team) -> None:
    first, second = (team.sign(propose_load(team[0], target)) for target in ("box-a", "box-b"))
    run_due()
    fences = [run_of(first).fence, run_of(second, "box-b").fence]
    assert fences[0] is not None
    assert fences[1] is not None
    assert fences[0] < fences[1]
    OperationRun.objects.filter(operation=second).update(fence=fences[1] + 60_000)
    third = team.sign(propose_load(team[0], "box-c"))
    run_due()
    assert run_of(third, "box-c").fence == fences[1] + 60_001
    assert requeue_run(run_id=run_of(first).pk, reason="it was away")
    run_again(first)
    assert [order.target for order in box.sent].count("box-a") == 2
    assert run_of(first).fence == fences[0]
