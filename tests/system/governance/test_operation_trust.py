"""What an approval rests on: the signed bytes, keys that hold, people who are there, a policy in force, reviews."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from core.models import User
from governance import services
from governance.errors import ApprovalRefused, GovernanceError, InvalidProposal, NotPermitted, StateChanged
from governance.models import AdminToken, ApproverKey, AuditEvent, Operation, OperationRun, PolicyVersion
from governance.services import Proposer
from governance.services.sweeps import sweep_operations
from governance.states import ApprovalState, RunEvent, RunState
from tests.fakes.clock import shift_clock
from tests.fakes.limits import set_limits
from tests.fakes.passkeys import SoftPasskey
from tests.system.governance.fake_box import FakeBox, fake_boxes, propose_load
from tests.system.governance.team import Team, make_due, make_governed, make_key, make_team, propose_token
from wire.ids import new_uuid7

pytestmark = pytest.mark.django_db


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo", "dan")


@pytest.fixture
def box() -> Iterator[FakeBox]:
    with fake_boxes() as found:
        yield found


def approve(team: Team, operation: Operation) -> Operation:
    team[1].approve(operation)
    return team[2].approve(operation)


def state_of(operation: Operation) -> str:
    return Operation.objects.get(pk=operation.pk).state


def actions_of(operation: Operation) -> list[str]:
    return list(AuditEvent.objects.filter(op_id=operation.printed_id).order_by("id").values_list("action", flat=True))


# Rows that were changed


@pytest.mark.parametrize(
    ("column", "value"),
    [("operation", "unfreeze"), ("requested_by", "mallory"), ("op_class", "standing"), ("max_uses", 9), ("digest", "0" * 64)],
)
def test_a_row_that_says_something_else_than_was_signed_carries_nothing_out(team: Team, column: str, value: object) -> None:
    operation = approve(team, propose_token(team[0]))
    Operation.objects.filter(pk=operation.pk).update(**{column: value})
    services.run_due()
    run = OperationRun.objects.get(operation=operation)
    assert (run.state, run.code) == (RunState.FAILED.value, "approval_invalid")
    assert state_of(operation) == ApprovalState.BLOCKED.value


def test_a_run_for_a_target_or_a_use_that_nobody_approved_is_not_carried_out(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0], "box-a"))
    OperationRun.objects.filter(operation=operation).update(target="box-z")
    services.run_due()
    assert box.sent == []
    other = approve(team, propose_load(team[0], "box-b"))
    OperationRun.objects.filter(operation=other).update(use=2)
    services.run_due()
    assert box.sent == []


def test_an_approval_copied_to_another_operation_is_not_carried_out_again(team: Team) -> None:
    operation = approve(team, propose_token(team[0]))
    services.run_due()
    copy = Operation.objects.get(pk=operation.pk)
    decisions = list(operation.decisions.all())
    Operation.objects.filter(pk=operation.pk).update(digest="f" * 64)
    copy.pk, copy.dispatched_at = new_uuid7(), None
    copy._state.adding = True
    copy.save(force_insert=True)
    for decision in decisions:
        decision.pk, decision.operation = None, copy
        decision._state.adding = True
        decision.save(force_insert=True)
    OperationRun.objects.create(operation=copy, target="control-plane", due_at=timezone.now())
    services.run_due()
    assert OperationRun.objects.get(operation=copy).code == "approval_invalid"


def test_a_claimed_token_has_the_name_and_the_owner_that_were_signed(team: Team) -> None:
    operation = approve(team, propose_token(team[0]))
    services.run_due()
    OperationRun.objects.filter(operation=operation).update(result={"claimable": True, "name": "other"})
    Operation.objects.filter(pk=operation.pk).update(requested_by="ben")
    with pytest.raises(NotPermitted):
        services.claim_admin_token(op_id=operation.pk, user=team[1].user)
    token, _ = services.claim_admin_token(op_id=operation.pk, user=team[0].user)
    assert token.name == "ci"


def test_one_row_that_cannot_be_read_takes_no_list_away(team: Team) -> None:
    operation, fine = propose_token(team[0]), propose_token(team[0])
    Operation.objects.filter(pk=operation.pk).update(statement=b"{}", op_class="gone")
    titles = {line.id: line.title for line in services.read_inbox(team[1].user).to_approve}
    assert "cannot be read" in titles[operation.pk]
    assert titles[fine.pk].startswith("Make an admin token")
    Operation.objects.filter(pk__in=[operation.pk, fine.pk]).update(expires_at=timezone.now())
    sweep_operations()
    assert {state_of(operation), state_of(fine)} == {ApprovalState.EXPIRED.value}


# Keys and people


def test_a_key_that_is_revoked_before_dispatch_does_not_count_any_more(team: Team) -> None:
    operation = approve(team, propose_token(team[0]))
    ApproverKey.objects.filter(user=team[2].user).update(revoked_at=timezone.now())
    services.run_due()
    assert state_of(operation) == ApprovalState.PENDING.value
    assert actions_of(operation)[-2:] == ["operation.withdraw", "operation.fall_short"]
    team[3].approve(operation)
    services.run_due()
    assert OperationRun.objects.get(operation=operation).state == RunState.SUCCEEDED.value


def test_a_person_who_is_deactivated_does_not_count_and_decides_nothing(team: Team) -> None:
    operation = propose_token(team[0])
    team[1].approve(operation)
    User.objects.filter(pk=team[1].user.pk).update(is_active=False)
    team[2].approve(operation)
    assert state_of(operation) == ApprovalState.PENDING.value
    for act in (
        lambda: services.reject(op_id=operation.pk, user=team[1].user, comment="no"),
        lambda: services.freeze(user=team[1].user, reason="no"),
        lambda: team[1].approve(operation),
    ):
        with pytest.raises(NotPermitted):
            act()


def test_the_sweep_takes_a_revoked_key_out_so_that_lists_say_what_holds(team: Team) -> None:
    operation = propose_token(team[0])
    team[1].approve(operation)
    ApproverKey.objects.filter(user=team[1].user).update(revoked_at=timezone.now())
    sweep_operations()
    assert services.read_operation(operation.pk, team[2].user).summary.approvals == 0


def test_what_others_signed_runs_though_its_requester_has_left(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0]))
    User.objects.filter(pk=team[0].user.pk).update(is_active=False)
    services.run_due()
    assert [order.op_id for order in box.sent] == [operation.printed_id]


def test_nobody_asks_under_the_name_of_another(team: Team) -> None:
    for proposer in (Proposer("ben", team[0].user.pk), Proposer("ben")):
        with pytest.raises(NotPermitted):
            propose_token(team[0], proposer=proposer)


def test_a_person_who_asked_through_a_token_cannot_approve_as_themselves(team: Team) -> None:
    token = AdminToken(name="laptop", owner=team[1].user)
    assert token.owner is not None
    operation = propose_token(team[0], proposer=Proposer(token.owner.get_username(), token.owner.pk))
    with pytest.raises(ApprovalRefused) as refusal:
        team[1].approve(operation)
    assert refusal.value.rule == "requester_approves"


def test_a_token_that_nobody_claimed_in_the_window_is_not_made(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = approve(team, propose_token(team[0]))
    services.run_due()
    shift_clock(monkeypatch, 25 * 3600)
    with pytest.raises(StateChanged, match="window is over"):
        services.claim_admin_token(op_id=operation.pk, user=team[0].user)
    assert "claim" not in services.read_operation(operation.pk, team[0].user).actions


# The policy


def draft(team: Team, **changes: object) -> Operation:
    return services.draft_policy(
        approvers=team.choices(),
        reason="anew",
        proposer=team[0].proposer,
        **changes,  # type: ignore[arg-type]
    )


def test_of_two_first_policies_one_comes_into_force_and_the_other_is_blocked() -> None:
    team = make_team("ana", "ben", "cleo", "dan")
    one, other = draft(team), draft(team)
    for operation in (one, other):
        approve(team, operation)
    services.run_due()
    sweep_operations()
    make_due(one)
    make_due(other)
    services.run_due()
    assert sorted([state_of(one), state_of(other)]) == [ApprovalState.APPROVED.value, ApprovalState.BLOCKED.value]
    assert PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).count() == 1
    assert PolicyVersion.objects.filter(state=PolicyVersion.State.DROPPED).count() == 1


def test_a_policy_that_has_expired_can_still_be_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    team = make_team("ana", "ben", "cleo", "dan")
    team.start(expires_at=timezone.now() + timedelta(hours=1))
    row = PolicyVersion.objects.get(state=PolicyVersion.State.ACTIVE)
    assert row.version == 1
    change = draft(team)
    team[1].approve(change)
    shift_clock(monkeypatch, 2 * 3600)
    with pytest.raises(InvalidProposal, match="has expired"):
        propose_token(team[0])
    team[2].approve(change)
    services.run_due()
    assert PolicyVersion.objects.get(state=PolicyVersion.State.ACTIVE).version == 2


def test_a_draft_that_was_turned_down_is_no_draft_any_more(team: Team) -> None:
    change = draft(team)
    services.reject(op_id=change.pk, user=team[1].user, comment="no")
    assert {row.state for row in services.list_policy_versions()} == {PolicyVersion.State.ACTIVE}


def test_a_stolen_key_is_taken_out_of_the_policy_while_everything_is_frozen(team: Team) -> None:
    services.freeze(user=team[3].user, reason="a laptop is gone")
    change = draft(team)
    approve(team, change)
    services.run_due()
    assert services.active_policy()[0].version == 2  # type: ignore[index]
    assert services.read_freeze() is not None


def test_outsiders_draft_no_policy(team: Team) -> None:
    outsider = Team().add("mallory", is_staff=False)
    with pytest.raises(NotPermitted):
        services.draft_policy(approvers=team.choices(), reason="mine", proposer=outsider.proposer)


# Break-glass


@pytest.fixture
def emergency() -> tuple[Team, SoftPasskey]:
    found = Team()
    for name in ("ana", "ben", "cleo", "dan"):
        found.add(name)
    keys = [make_key(member.user, is_break_glass=True)[0] for member in found.members[1:3]]
    found.start()
    return found, keys[0]


def break_glass(team: Team, key: SoftPasskey, target: str) -> Operation:
    operation = propose_load(team[0], target, op_class="break-glass")
    proof = key.sign(bytes.fromhex(operation.digest), approver="ben")
    return services.approve(op_id=operation.pk, user=team[1].user, proof=proof, brought_by="session:ben")


def review(team: Team, used: Operation, **changes: object) -> Operation:
    asked: dict[str, object] = {
        "operation": "break-glass-review", "targets": [used.printed_id], "params": {}, "reason": "looked at",
        "proposer": team[0].proposer, "reviews": used.pk,
    }  # fmt: skip
    return services.propose(**(asked | changes))  # type: ignore[arg-type]


def test_of_two_approved_break_glass_operations_the_second_waits_for_the_review_of_the_first(
    box: FakeBox, emergency: tuple[Team, SoftPasskey]
) -> None:
    team, key = emergency
    first, second = break_glass(team, key, "box-a"), break_glass(team, key, "box-b")
    services.run_due()
    make_due(second)
    services.run_due()
    assert [order.target for order in box.sent] == ["box-a"]
    assert "has not been reviewed" in OperationRun.objects.get(operation=second).message
    with pytest.raises(NotPermitted, match="propose its review first"):
        propose_load(team[0], "box-c", op_class="break-glass")
    looked_at = review(team, first)
    team[2].approve(looked_at)
    team[3].approve(looked_at)
    services.run_due()
    make_due(second)
    services.run_due()
    assert [order.target for order in box.sent] == ["box-a", "box-b"]


def test_a_review_of_one_use_does_not_close_another(box: FakeBox, emergency: tuple[Team, SoftPasskey]) -> None:
    team, key = emergency
    first = break_glass(team, key, "box-a")
    unused = propose_load(team[0], "box-b")
    services.run_due()
    with pytest.raises(InvalidProposal, match="same operation"):
        review(team, first, reviews=unused.pk)
    found = review(team, first, reviews=None)
    assert found.reviews_id == first.pk


def test_a_review_that_was_only_asked_for_is_reminded_of(box: FakeBox, emergency: tuple[Team, SoftPasskey]) -> None:
    team, key = emergency
    first = break_glass(team, key, "box-a")
    services.run_due()
    review(team, first)
    Operation.objects.filter(pk=first.pk).update(dispatched_at=timezone.now() - timedelta(hours=25))
    sweep_operations()
    assert Operation.objects.get(pk=first.pk).warned_percent == 100


# Lists and records


def test_what_waits_stays_on_the_list_however_much_is_done(team: Team) -> None:
    set_limits(governance={"page_rows": 5})
    waiting = propose_token(team[0], reason="waits")
    ended = set()
    for number in range(6):
        done = approve(team, propose_token(team[0], params={"name": f"t{number}"}))
        services.run_due()
        Operation.objects.filter(pk=done.pk).update(decided_at=timezone.now() - timedelta(days=3))
        ended.add(done.pk)
    inbox = services.read_inbox(team[1].user)
    assert [line.id for line in inbox.to_approve] == [waiting.pk]
    assert not ended & {line.id for line in inbox.others}


def test_the_list_of_a_hundred_takes_as_many_queries_as_that_of_one(team: Team) -> None:
    first = propose_token(team[0])
    with CaptureQueriesContext(connection) as one:
        services.read_inbox(team[1].user)
    rows = []
    for number in range(99):
        statement = bytes(first.statement).replace(b'"name":"ci"', b'"name":"c%d"' % number)
        rows.append(
            Operation(
                statement=statement, digest=f"{number:064d}", operation=first.operation, op_class=first.op_class,
                policy=first.policy, requested_by="ana", requested_at=first.requested_at, not_before=first.not_before,
                not_after=first.not_after, expires_at=first.expires_at,
            )
        )  # fmt: skip
    Operation.objects.bulk_create(rows)
    with CaptureQueriesContext(connection) as many:
        assert len(services.read_inbox(team[1].user).to_approve) == 100
    assert len(many) == len(one)
    assert len(one) <= 8


def test_every_step_of_a_run_has_its_event(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0]))
    services.run_due()
    run = OperationRun.objects.get(operation=operation)
    services.requeue_run(run_id=run.pk, reason="never heard of it")
    make_due(operation)
    services.run_due()
    for fraction in (0.1, float("nan"), 0.9):
        services.note_progress(run_id=run.pk, stage="weights", fraction=fraction, eta_s=float("inf"))
    services.finish_run(run_id=run.pk, event=RunEvent.LOSE)
    services.finish_run(run_id=run.pk, event=RunEvent.RESOLVE)
    assert [action for action in actions_of(operation) if action.startswith(("operation.run", "operation.dispatch"))] == [
        "operation.dispatch", "operation.run.queued", "operation.dispatch", "operation.run.executing", "operation.run.unknown",
        "operation.run.resolved",
    ]  # fmt: skip
    assert not services.finish_run(run_id=run.pk, event=RunEvent.SUCCEED)


def test_an_order_is_made_of_what_was_signed(box: FakeBox, team: Team) -> None:
    operation = approve(team, propose_load(team[0]))
    services.run_due()
    order = box.sent[0]
    assert (order.op_id, order.requested_by, order.use) == (operation.printed_id, "ana", 1)
    assert set(order.approved_by) == {"ben", "cleo"}


def test_an_ended_operation_says_why_nothing_can_be_approved(team: Team) -> None:
    operation = propose_token(team[0])
    Operation.objects.filter(pk=operation.pk).update(expires_at=timezone.now())
    view = services.read_operation(operation.pk, team[1].user)
    assert "in time" in view.hindrances["approve"]
    with pytest.raises(GovernanceError, match="in time"):
        team[1].approve(operation)
