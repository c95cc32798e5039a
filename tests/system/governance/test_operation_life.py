"""The life of an operation: asked for, approved by enough people, carried out once, recorded."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from core.models import User
from governance import services
from governance.errors import ApprovalRefused, InvalidProposal, NeedsApproval, NoPolicy, NotPermitted, StateChanged
from governance.models import AdminToken, AuditEvent, Operation, OperationRun
from governance.services.sweeps import sweep_operations
from governance.states import ApprovalState, RunState
from tests.system.governance.team import Team, make_due, make_governed, make_team, propose_token

pytestmark = pytest.mark.django_db


def test_nothing_can_be_asked_for_before_there_is_a_policy() -> None:
    team = make_team()
    with pytest.raises(NoPolicy, match="Draft the first one"):
        propose_token(team[0])


def test_the_first_policy_is_signed_by_those_it_names_and_then_in_force() -> None:
    team = make_team()
    row = team.start()
    assert row.version == 1
    chain = services.policy_chain(after_version=0)
    assert [sorted(link) for link in chain] == [["document", "proofs", "statement"]]


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


def test_only_the_requester_claims_the_token() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    with pytest.raises(NotPermitted):
        services.claim_admin_token(op_id=operation.pk, user=team[1].user)


def test_governed_changes_are_direct_only_until_there_is_a_policy() -> None:
    services.create_admin_token(name="first", actor="user:admin")
    make_governed()
    with pytest.raises(NeedsApproval, match="propose admin-token-mint"):
        services.create_admin_token(name="second", actor="user:admin")
    assert AdminToken.objects.count() == 1


def test_the_requester_cannot_approve() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    with pytest.raises(ApprovalRefused, match="someone else must") as refusal:
        team[0].approve(operation)
    assert refusal.value.rule == "requester_approves"


def test_one_person_counts_once() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    team[1].approve(operation)
    with pytest.raises(ApprovalRefused, match="counts once") as refusal:
        team[1].approve(operation)
    assert refusal.value.rule == "duplicate_proof"
    assert Operation.objects.get(pk=operation.pk).state == ApprovalState.PENDING.value


def test_a_proof_by_the_key_of_another_person_is_refused() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    with pytest.raises(ApprovalRefused) as refusal:
        services.approve(op_id=operation.pk, user=team[1].user, proof=team[2].proof(operation), brought_by="session:ben")
    assert refusal.value.rule == "unknown_key"


def test_a_proof_of_another_statement_is_refused() -> None:
    team = make_governed()
    one, other = propose_token(team[0]), propose_token(team[0], params={"name": "other"})
    with pytest.raises(ApprovalRefused, match="Another statement was signed") as refusal:
        services.approve(op_id=one.pk, user=team[1].user, proof=team[1].proof(other), brought_by="session:ben")
    assert refusal.value.rule == "wrong_challenge"


def test_an_outsider_cannot_approve_or_reject() -> None:
    team = make_governed()
    outsider = Team().add("mallory")
    operation = propose_token(team[0])
    with pytest.raises(ApprovalRefused) as refusal:
        outsider.approve(operation)
    assert refusal.value.rule == "unknown_key"
    with pytest.raises(NotPermitted):
        services.reject(op_id=operation.pk, user=outsider.user, comment="no")


def test_one_rejection_ends_it_and_says_why() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    team[1].approve(operation)
    rejected = services.reject(op_id=operation.pk, user=team[2].user, comment="not this week")
    assert rejected.state == ApprovalState.REJECTED.value
    assert "not this week" in rejected.state_reason
    with pytest.raises(StateChanged, match="rejected"):
        team[2].approve(operation)


def test_a_withdrawn_approval_takes_the_quorum_away_until_somebody_else_signs() -> None:
    team = make_governed("ana", "ben", "cleo", "dan")
    operation = propose_token(team[0], not_before=timezone.now() + timedelta(minutes=5))
    team[1].approve(operation)
    team[2].approve(operation)
    assert services.withdraw(op_id=operation.pk, user=team[2].user).state == ApprovalState.PENDING.value
    assert services.run_due() == 0
    assert team[3].approve(operation).state == ApprovalState.APPROVED.value
    assert OperationRun.objects.filter(operation=operation).count() == 1


def test_nothing_is_withdrawn_or_cancelled_once_it_is_on_its_way() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    with pytest.raises(StateChanged, match="on its way already"):
        services.withdraw(op_id=operation.pk, user=team[1].user)
    with pytest.raises(StateChanged, match="on its way already"):
        services.cancel(op_id=operation.pk, proposer=team[0].proposer)


def test_only_the_requester_cancels() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    with pytest.raises(NotPermitted, match="Only ana can cancel"):
        services.cancel(op_id=operation.pk, proposer=team[1].proposer)
    assert services.cancel(op_id=operation.pk, proposer=team[0].proposer).state == ApprovalState.CANCELLED.value


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


def test_a_change_of_policy_blocks_what_was_pending() -> None:
    team = make_governed("ana", "ben", "cleo", "dan")
    pending = propose_token(team[0])
    team[1].approve(pending)
    change = services.draft_policy(
        approvers=team.choices(),
        thresholds={"model-load": 3, "policy-change": 3},
        reason="safer",
        proposer=team[0].proposer,
    )
    for member in team.members[1:]:
        member.approve(change)
    services.run_due()
    found = services.active_policy()
    assert found is not None
    assert found[0].version == 2
    blocked = Operation.objects.get(pk=pending.pk)
    assert (blocked.state, blocked.state_reason) == (ApprovalState.BLOCKED.value, "the policy changed meanwhile")
    with pytest.raises(StateChanged, match="policy changed"):
        team[2].approve(pending)


def test_a_statement_altered_in_the_database_is_not_carried_out() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    team[1].approve(operation)
    team[2].approve(operation)
    raw = bytes(Operation.objects.get(pk=operation.pk).statement)
    Operation.objects.filter(pk=operation.pk).update(statement=raw.replace(b'"name":"ci"', b'"name":"cj"'))
    services.run_due()
    run = OperationRun.objects.get(operation=operation)
    assert (run.state, run.code) == (RunState.FAILED.value, "approval_invalid")
    assert "Another statement was signed" in run.message or "another statement was signed" in run.message


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


def test_an_outsider_cannot_freeze() -> None:
    make_governed()
    with pytest.raises(NotPermitted):
        services.freeze(user=User.objects.create_user("mallory"), reason="")


def test_a_solo_policy_lets_its_one_person_approve_and_says_so() -> None:
    team = make_team("ana")
    team.start(is_solo=True)
    operation = propose_token(team[0])
    assert team[0].approve(operation).state == ApprovalState.APPROVED.value
    assert services.read_operation(operation.pk, team[0].user).summary.is_solo


def test_a_policy_that_needs_everybody_is_refused() -> None:
    team = make_team("ana", "ben")
    with pytest.raises(InvalidProposal, match="name at least 3"):
        services.draft_policy(approvers=team.choices(), reason="too tight", proposer=team[0].proposer)


def test_the_same_idempotency_key_returns_the_same_operation() -> None:
    team = make_governed()
    one = propose_token(team[0], idempotency_key="k1")
    assert propose_token(team[0], idempotency_key="k1").pk == one.pk
    with pytest.raises(StateChanged, match="Idempotency-Key"):
        propose_token(team[0], params={"name": "other"}, idempotency_key="k1")


def test_evidence_convinces_the_stand_alone_verifier() -> None:
    from wire.optoken.approval import verify_bundle

    team = make_governed()
    operation = propose_token(team[0])
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    _, statement, verdict = verify_bundle(services.read_evidence(operation.printed_id))[:3]
    assert statement.op_id == operation.printed_id
    assert set(verdict.approved_by) == {"ben", "cleo"}
