"""The life of an operation and what it rests on: signed bytes, keys that hold, a policy in force, a freeze that ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.utils import timezone

from core.models import User
from governance import services
from governance.errors import InvalidProposal, NeedsApproval, NotPermitted, StateChanged
from governance.models import AdminToken, AuditEvent, Freeze, Operation, OperationRun, PolicyVersion
from governance.registry import find_kind
from governance.services import Proposer
from governance.services.sweeps import sweep_operations
from governance.states import ApprovalState, RunState
from tests.fakes.clock import shift_clock
from tests.fakes.governed_nodes import FakeBox, fake_boxes, propose_load
from tests.fakes.governed_team import Team, make_due, make_governed, make_team, propose_token
from wire.ids import new_uuid7
from wire.optoken.approval import canonical, read_statement

pytestmark = pytest.mark.django_db


def test_an_approved_operation_is_carried_out_once_and_its_token_claimed_once() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    assert team[1].approve(operation).state == ApprovalState.PENDING.value
    assert services.run_due() == 0
    assert team[2].approve(operation).state == ApprovalState.APPROVED.value
    assert services.run_due() == 1
    assert services.run_due() == 0
    run = OperationRun.objects.get(operation=operation)
    assert (run.state, run.attempt) == (RunState.SUCCEEDED.value, 1)
    token, text = services.claim_admin_token(op_id=operation.pk, user=team[0].user)
    assert token.owner_id == team[0].user.pk
    assert services.verify_admin_token(text) == token
    with pytest.raises(StateChanged, match="claimed already"):
        services.claim_admin_token(op_id=operation.pk, user=team[0].user)
    actions = list(AuditEvent.objects.filter(op_id=operation.printed_id).order_by("id").values_list("action", flat=True))
    assert actions == [
        "operation.propose", "operation.approve", "operation.approve", "operation.approved", "operation.run.succeeded",
        "admin_token.create",
    ]  # fmt: skip


def test_governed_changes_are_direct_only_until_there_is_a_policy() -> None:
    services.create_admin_token(name="first", actor="user:admin")
    make_governed()
    with pytest.raises(NeedsApproval, match="propose admin-token-mint"):
        services.create_admin_token(name="second", actor="user:admin")
    assert AdminToken.objects.count() == 1


def test_a_withdrawn_approval_takes_the_quorum_away_until_somebody_else_signs() -> None:
    team = make_governed("ana", "ben", "cleo", "dan")
    operation = propose_token(team[0], not_before=timezone.now() + timedelta(minutes=5))
    team[1].approve(operation)
    team[2].approve(operation)
    assert services.withdraw(op_id=operation.pk, user=team[2].user).state == ApprovalState.PENDING.value
    assert services.run_due() == 0
    assert team[3].approve(operation).state == ApprovalState.APPROVED.value
    assert OperationRun.objects.filter(operation=operation).count() == 1


def test_what_nobody_approves_expires() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    Operation.objects.filter(pk=operation.pk).update(expires_at=timezone.now())
    with pytest.raises(StateChanged, match="in time"):
        team[1].approve(operation)
    sweep_operations()
    assert Operation.objects.get(pk=operation.pk).state == ApprovalState.EXPIRED.value


def test_a_change_of_policy_ends_as_succeeded_and_the_log_does_not_say_that_it_was_blocked() -> None:
    team = make_governed()
    pending = propose_token(team[0])
    for version in (2, 3):
        change = services.draft_policy(approvers=team.choices(), reason=f"version {version}", proposer=team[0].proposer)
        for member in team.members[1:]:
            member.approve(change)
        services.run_due()
        sweep_operations()
        ended = services.read_operation(change.pk, None)
        assert (ended.summary.state, ended.summary.run_state, ended.state_reason) == ("approved", "succeeded", "")
        assert ended.runs[0].message == f"Version {version} is in force; {3 - version} pending operations were blocked."
        actions = list(AuditEvent.objects.filter(op_id=change.printed_id).order_by("id").values_list("action", flat=True))
        assert actions[-2:] == ["policy.activate", "operation.run.succeeded"]
    assert AuditEvent.objects.get(action="operation.block").op_id == pending.printed_id
    with pytest.raises(StateChanged, match="policy changed"):
        team[1].approve(pending)


def test_approvals_forged_in_the_database_are_not_carried_out() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    team[1].approve(operation)
    Operation.objects.filter(pk=operation.pk).update(state=ApprovalState.APPROVED.value)
    OperationRun.objects.create(operation=operation, target="control-plane", due_at=timezone.now())
    services.run_due()
    assert OperationRun.objects.get(operation=operation).code == "approval_invalid"


def test_a_freeze_stops_what_is_approved_until_a_quorum_lifts_it() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    services.freeze(user=team[2].user, reason="something is odd")
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    assert OperationRun.objects.get(operation=operation).message == "everything is frozen"
    lift = services.propose(
        operation="unfreeze", targets=["control-plane"], params={}, reason="all is well", proposer=team[2].proposer
    )
    team[0].approve(lift)
    team[1].approve(lift)
    services.run_due()
    make_due(operation)
    services.run_due()
    assert services.read_freeze() is None
    assert OperationRun.objects.get(operation=operation).state == RunState.SUCCEEDED.value


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


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("statement", b'"name":"cj"'),
        ("operation", "unfreeze"),
        ("requested_by", "mallory"),
        ("op_class", "standing"),
        ("max_uses", 9),
        ("digest", "0" * 64),
    ],
)
def test_a_row_that_says_something_else_than_was_signed_carries_nothing_out(team: Team, column: str, value: object) -> None:
    operation = approve(team, propose_token(team[0]))
    if isinstance(value, bytes):
        value = bytes(operation.statement).replace(b'"name":"ci"', value)
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


def test_nobody_asks_under_the_name_of_another(team: Team) -> None:
    for proposer in (Proposer("ben", team[0].user.pk), Proposer("ben")):
        with pytest.raises(NotPermitted):
            propose_token(team[0], proposer=proposer)


def test_a_token_that_nobody_claimed_in_the_window_is_not_made(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = approve(team, propose_token(team[0]))
    services.run_due()
    shift_clock(monkeypatch, 25 * 3600)
    with pytest.raises(StateChanged, match="window is over"):
        services.claim_admin_token(op_id=operation.pk, user=team[0].user)
    assert "claim" not in services.read_operation(operation.pk, team[0].user).actions


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


def test_a_stolen_key_is_taken_out_of_the_policy_while_everything_is_frozen(team: Team) -> None:
    services.freeze(user=team[3].user, reason="a laptop is gone")
    change = draft(team)
    approve(team, change)
    services.run_due()
    assert services.active_policy()[0].version == 2  # type: ignore[index]
    assert services.read_freeze() is not None


def ask(team: Team, **params: object) -> Operation:
    asked = {"operation": "unfreeze", "targets": ["control-plane"], "params": params, "reason": "all is well"}
    return services.propose(**asked, proposer=team[0].proposer)  # type: ignore[arg-type]


def carry_out(team: Team, operation: Operation) -> OperationRun:
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    return OperationRun.objects.get(operation=operation)


def freeze(team: Team, reason: str) -> Freeze:
    return services.freeze(user=team[3].user, reason=reason)


def test_what_is_signed_names_the_freeze_that_it_ends(team: Team) -> None:
    row = freeze(team, "one")
    operation = ask(team)
    signed = read_statement(bytes(operation.statement)).params
    assert signed == {"freeze": row.pk, "frozenBy": "dan", "frozenAt": int(row.frozen_at.timestamp())}
    told = find_kind("unfreeze").describe(["control-plane"], signed)
    assert "dan" in told.lines[0].value
    assert told.lines[0].now == "in force"
    assert carry_out(team, operation).state == RunState.SUCCEEDED.value
    assert Freeze.objects.get(pk=row.pk).lifted_by == operation


def test_what_was_signed_for_one_freeze_does_not_end_a_later_one(team: Team) -> None:
    freeze(team, "one")
    one, other = ask(team), ask(team)
    carry_out(team, one)
    assert services.read_freeze() is None
    later = freeze(team, "two")
    Freeze.objects.filter(pk=later.pk).update(frozen_at=other.requested_at - timedelta(seconds=5))  # a clock that was wrong
    assert (
        "another one, by dan" in find_kind("unfreeze").describe([], read_statement(bytes(other.statement)).params).lines[0].now
    )
    run = carry_out(team, other)
    assert (run.state, run.code) == (RunState.FAILED.value, "state_changed")
    assert "ask for unfreeze again" in run.message
    assert services.read_freeze() == later


def test_a_number_that_a_restored_database_gives_again_is_another_freeze(team: Team) -> None:
    row = freeze(team, "one")
    operation = ask(team)
    Freeze.objects.filter(pk=row.pk).update(frozen_by="cleo")
    assert carry_out(team, operation).state == RunState.FAILED.value
    assert services.read_freeze() is not None


def test_what_was_signed_before_freezes_were_named_ends_none(team: Team) -> None:
    freeze(team, "one")
    operation = ask(team)
    statement = read_statement(canonical(json.loads(bytes(operation.statement)) | {"params": {}}))
    Operation.objects.filter(pk=operation.pk).update(statement=statement.raw, digest=statement.digest.hex())
    operation.refresh_from_db()
    run = carry_out(team, operation)
    assert run.state == RunState.FAILED.value
    assert "names no freeze" in run.message
    assert services.read_freeze() is not None


def test_a_freeze_that_has_ended_is_not_lifted_twice(team: Team) -> None:
    freeze(team, "one")
    one, other = ask(team), ask(team)
    carry_out(team, one)
    assert "not frozen any more" in carry_out(team, other).message


def test_nobody_asks_to_lift_another_freeze_than_the_one_in_force(team: Team) -> None:
    row = freeze(team, "one")
    assert ask(team, freeze=row.pk).digest
    with pytest.raises(InvalidProposal, match=f"freeze {row.pk}, by dan") as refusal:
        ask(team, freeze=row.pk + 1)
    assert refusal.value.param == "freeze"
