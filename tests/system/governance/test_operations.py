"""The life of an operation and what it rests on: signed bytes, keys that hold, a policy in force, a freeze that ends."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from html import unescape
from io import StringIO
from pathlib import Path

import pytest
from django.conf import LazySettings
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from controlplane.commands import Command
from core.models import User
from gateway.services.tenants import create_tenant
from governance.admin_tokens import claim_admin_token, create_admin_token, verify_admin_token
from governance.errors import ApprovalRefused, InvalidProposal, NeedsApproval, NotPermitted, StateChanged
from governance.keys import add_key_file
from governance.models import ApproverKey, AuditEvent, Decision, Freeze, Operation, OperationRun, PolicyVersion
from governance.operations import decisions, proposals
from governance.operations import policies as freezes
from governance.operations.approvals import (
    active_policy,
    read_freeze,
    sweep_operations,
)
from governance.operations.policies import draft_policy
from governance.operations.proposals import Proposer, use_approval
from governance.operations.queries import read_inbox, read_operation
from governance.operations.runs import RunEnd, finish_run, run_due
from governance.registry import find_kind
from governance.states import ApprovalState, RunEvent, RunState
from tests.fakes.audit_logs import LOG_KEY, chain_events
from tests.fakes.clock import shift_clock
from tests.fakes.governed_team import (
    FakeBox,
    Member,
    Team,
    fake_boxes,
    make_client,
    make_due,
    make_governed,
    make_team,
    open_session,
    post,
    propose_load,
    propose_token,
    refusal,
)
from tests.fakes.passkeys import KeyFile, twin_of
from wire.ids import new_uuid7
from wire.optoken import approval
from wire.optoken.approval import canonical, encode_bytes, read_statement

pytestmark = pytest.mark.django_db


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo", "dan")


@pytest.fixture
def box() -> Iterator[FakeBox]:
    with fake_boxes() as found:
        yield found


def state_of(operation: Operation) -> str:
    return Operation.objects.get(pk=operation.pk).state


def run_of(operation: Operation) -> OperationRun:
    return OperationRun.objects.get(operation=operation)


def actions_of(operation: Operation) -> list[str]:
    return list(AuditEvent.objects.filter(op_id=operation.printed_id).order_by("id").values_list("action", flat=True))


def test_an_approved_operation_is_carried_out_once_and_its_token_claimed_once() -> None:
    create_admin_token(name="first", actor="user:admin")
    team = make_governed()
    with pytest.raises(NeedsApproval, match="propose admin-token-mint"):
        create_admin_token(name="second", actor="user:admin")
    operation = propose_token(team[0])
    assert team[1].approve(operation).state == ApprovalState.PENDING.value
    assert run_due() == 0
    assert team[2].approve(operation).state == ApprovalState.APPROVED.value
    assert [run_due(), run_due()] == [1, 0]
    assert (run_of(operation).state, run_of(operation).attempt) == (RunState.SUCCEEDED.value, 1)
    token, text = claim_admin_token(op_id=operation.pk, user=team[0].user)
    assert token.owner_id == team[0].user.pk
    assert verify_admin_token(text) == token
    with pytest.raises(StateChanged, match="claimed already"):
        claim_admin_token(op_id=operation.pk, user=team[0].user)
    assert actions_of(operation) == [
        "operation.propose", "operation.approve", "operation.approve", "operation.approved", "operation.run.succeeded",
        "admin_token.create",
    ]  # fmt: skip
    with pytest.raises(StateChanged, match="on its way already"):
        decisions.withdraw(op_id=operation.pk, user=team[1].user)


def test_outsiders_and_people_who_are_switched_off_do_not_count_and_decide_nothing(team: Team) -> None:
    outsider, operation = Team().add("mallory", is_staff=False), propose_token(team[0])
    team[1].approve(operation)
    User.objects.filter(pk=team[1].user.pk).update(is_active=False)
    team[2].approve(operation)
    assert state_of(operation) == ApprovalState.PENDING.value
    for member in (team[1], outsider):
        for act in (
            lambda member=member: decisions.reject(op_id=operation.pk, user=member.user, comment="no"),
            lambda member=member: freezes.freeze(user=member.user, reason="no"),
            lambda member=member: draft_policy(approvers=team.choices(), reason="x", proposer=member.proposer),
        ):
            with pytest.raises(NotPermitted):
                act()
    with pytest.raises(NotPermitted):
        team[1].approve(operation)
    with pytest.raises(ApprovalRefused) as refusal:
        outsider.approve(operation)
    assert refusal.value.rule == "unknown_key"
    for proposer in (Proposer("ben", team[0].user.pk), Proposer("ben")):  # under the name of another
        with pytest.raises(NotPermitted):
            propose_token(team[0], proposer=proposer)


def test_a_change_of_policy_ends_as_succeeded_and_the_log_does_not_say_that_it_was_blocked() -> None:
    team = make_governed()
    pending = propose_token(team[0])
    for version in (2, 3):
        change = team.sign(team.change_policy())
        run_due()
        sweep_operations()
        ended = read_operation(change.pk, None)
        assert (ended.summary.state, ended.summary.run_state, ended.state_reason) == ("approved", "succeeded", "")
        assert ended.runs[0].message == f"Version {version} is in force; {3 - version} pending operations were blocked."
        assert actions_of(change)[-2:] == ["policy.activate", "operation.run.succeeded"]
    assert AuditEvent.objects.get(action="operation.block").op_id == pending.printed_id
    with pytest.raises(StateChanged, match="policy changed"):
        team[1].approve(pending)


WRITTEN: tuple[dict[str, object], ...] = (
    {"operation": "unfreeze"}, {"requested_by": "mallory"}, {"op_class": "standing"}, {"max_uses": 9}, {"digest": "0" * 64},
)  # fmt: skip


def test_what_is_written_into_the_rows_of_operations_carries_nothing_out(box: FakeBox, team: Team) -> None:
    forged = propose_token(team[0])
    team[1].approve(forged)
    Operation.objects.filter(pk=forged.pk).update(state=ApprovalState.APPROVED.value)
    OperationRun.objects.create(operation=forged, target="control-plane", due_at=timezone.now())
    run_due()
    assert run_of(forged).code == "approval_invalid"
    for change in ({}, *WRITTEN):
        operation = team.sign(propose_token(team[0]))
        altered = bytes(operation.statement).replace(b'"name":"ci"', b'"name":"cj"')
        Operation.objects.filter(pk=operation.pk).update(**change or {"statement": altered})
        run_due()
        run = run_of(operation)
        assert (run.state, run.code) == (RunState.FAILED.value, "approval_invalid"), change
        assert state_of(operation) == ApprovalState.BLOCKED.value
    for name, changed in (("box-a", {"target": "box-z"}), ("box-b", {"use": 2})):
        other = team.sign(propose_load(team[0], name))
        OperationRun.objects.filter(operation=other).update(**changed)
        run_due()
        assert box.sent == []


def test_an_approval_copied_to_another_operation_is_not_carried_out_again(team: Team) -> None:
    operation = team.sign(propose_token(team[0]))
    run_due()
    copy, said = Operation.objects.get(pk=operation.pk), list(operation.decisions.all())
    Operation.objects.filter(pk=operation.pk).update(digest="f" * 64)
    copy.pk, copy.dispatched_at = new_uuid7(), None
    for row in (copy, *said):
        if isinstance(row, Decision):
            row.pk, row.operation = None, copy
        row._state.adding = True
        row.save(force_insert=True)
    OperationRun.objects.create(operation=copy, target="control-plane", due_at=timezone.now())
    run_due()
    assert run_of(copy).code == "approval_invalid"


def test_a_claimed_token_has_the_name_and_the_owner_that_were_signed(team: Team) -> None:
    operation = team.sign(propose_token(team[0]))
    run_due()
    OperationRun.objects.filter(operation=operation).update(result={"claimable": True, "name": "other"})
    Operation.objects.filter(pk=operation.pk).update(requested_by="ben")
    with pytest.raises(NotPermitted):
        claim_admin_token(op_id=operation.pk, user=team[1].user)
    token, _ = claim_admin_token(op_id=operation.pk, user=team[0].user)
    assert token.name == "ci"


def test_one_row_that_cannot_be_read_takes_no_list_away(team: Team) -> None:
    operation, fine = propose_token(team[0]), propose_token(team[0])
    Operation.objects.filter(pk=operation.pk).update(statement=b"{}", op_class="gone")
    titles = {line.id: line.title for line in read_inbox(team[1].user).to_approve}
    assert "cannot be read" in titles[operation.pk]
    assert titles[fine.pk].startswith("Make an admin token")
    Operation.objects.filter(pk__in=[operation.pk, fine.pk]).update(expires_at=timezone.now())
    sweep_operations()
    assert {state_of(operation), state_of(fine)} == {ApprovalState.EXPIRED.value}


def test_a_token_that_nobody_claimed_in_the_window_is_not_made(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = team.sign(propose_token(team[0]))
    run_due()
    shift_clock(monkeypatch, 25 * 3600)
    with pytest.raises(StateChanged, match="window is over"):
        claim_admin_token(op_id=operation.pk, user=team[0].user)
    assert "claim" not in read_operation(operation.pk, team[0].user).actions


def test_of_two_first_policies_one_comes_into_force_and_the_other_is_blocked() -> None:
    team = make_team("ana", "ben", "cleo", "dan")
    one, other = team.change_policy(), team.change_policy()
    for operation in (one, other):
        team.sign(operation)
    run_due()
    sweep_operations()
    make_due(one)
    make_due(other)
    run_due()
    assert sorted([state_of(one), state_of(other)]) == [ApprovalState.APPROVED.value, ApprovalState.BLOCKED.value]
    assert PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).count() == 1
    assert PolicyVersion.objects.filter(state=PolicyVersion.State.DROPPED).count() == 1


def test_a_policy_that_has_expired_can_still_be_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    team = make_team("ana", "ben", "cleo", "dan")
    team.start(expires_at=timezone.now() + timedelta(hours=1))
    row = PolicyVersion.objects.get(state=PolicyVersion.State.ACTIVE)
    assert row.version == 1
    change = team.change_policy()
    team[1].approve(change)
    shift_clock(monkeypatch, 2 * 3600)
    with pytest.raises(InvalidProposal, match="has expired"):
        propose_token(team[0])
    team[2].approve(change)
    run_due()
    assert PolicyVersion.objects.get(state=PolicyVersion.State.ACTIVE).version == 2


def test_a_stolen_key_is_taken_out_of_the_policy_while_everything_is_frozen(team: Team) -> None:
    freezes.freeze(user=team[3].user, reason="a laptop is gone")
    change = team.change_policy()
    team.sign(change)
    run_due()
    assert active_policy()[0].version == 2  # type: ignore[index]
    assert read_freeze() is not None


def ask(team: Team, **params: object) -> Operation:
    asked = {"operation": "unfreeze", "targets": ["control-plane"], "params": params, "reason": "all is well"}
    return proposals.propose(**asked, proposer=team[0].proposer)  # type: ignore[arg-type]


def carry_out(team: Team, operation: Operation) -> OperationRun:
    team.sign(operation)
    run_due()
    return run_of(operation)


def freeze(team: Team, reason: str) -> Freeze:
    return freezes.freeze(user=team[3].user, reason=reason)


def test_a_freeze_stops_what_is_approved_until_a_quorum_lifts_it_by_its_name(team: Team) -> None:
    row = freeze(team, "one")
    waiting = team.sign(propose_token(team[0]))
    run_due()
    assert run_of(waiting).message == "everything is frozen"
    with pytest.raises(InvalidProposal, match=f"freeze {row.pk}, by dan") as refusal:
        ask(team, freeze=row.pk + 1)
    assert refusal.value.param == "freeze"
    assert ask(team, freeze=row.pk).digest
    operation = ask(team)
    signed = read_statement(bytes(operation.statement)).params
    assert signed == {"freeze": row.pk, "frozenBy": "dan", "frozenAt": int(row.frozen_at.timestamp())}
    told = find_kind("unfreeze").describe(["control-plane"], signed)
    assert "dan" in told.lines[0].value
    assert told.lines[0].now == "in force"
    assert carry_out(team, operation).state == RunState.SUCCEEDED.value
    assert Freeze.objects.get(pk=row.pk).lifted_by == operation
    make_due(waiting)
    run_due()
    assert read_freeze() is None
    assert run_of(waiting).state == RunState.SUCCEEDED.value


def test_what_was_signed_for_one_freeze_or_for_none_does_not_end_a_later_one(team: Team) -> None:
    freeze(team, "one")
    one, other, third, old = ask(team), ask(team), ask(team), ask(team)
    statement = read_statement(canonical(json.loads(bytes(old.statement)) | {"params": {}}))  # before freezes were named
    Operation.objects.filter(pk=old.pk).update(statement=statement.raw, digest=statement.digest.hex())
    old.refresh_from_db()
    run = carry_out(team, old)
    assert (run.state, "not for the freeze in force" in run.message) == (RunState.FAILED.value, True)
    carry_out(team, one)
    assert read_freeze() is None
    assert "not frozen any more" in carry_out(team, third).message
    later = freeze(team, "two")
    Freeze.objects.filter(pk=later.pk).update(frozen_at=other.requested_at - timedelta(seconds=5))  # a clock that was wrong
    told = find_kind("unfreeze").describe([], read_statement(bytes(other.statement)).params)
    assert "another one, by dan" in told.lines[0].now
    run = carry_out(team, other)
    assert (run.state, run.code) == (RunState.FAILED.value, "state_changed")
    assert "ask for unfreeze again" in run.message
    assert read_freeze() == later


# Proofs that were taken back or dropped, and who brought one

Proof = dict[str, object]


def by_rest(member: Member, operation: Operation, proof: Proof, client: Client) -> None:
    error = refusal(post(client, f"/api/v1/operations/{operation.pk}/approvals", {"proof": proof}), 403)
    assert error["rule"] == "withdrawn_proof"
    assert "taken back" in error["message"]


def by_page(member: Member, operation: Operation, proof: Proof, client: Client) -> None:
    page = open_session(member.user)
    answer = page.post(reverse("approvals:approve", args=[operation.pk]), {"proof": proof}, content_type="application/json")
    assert answer.status_code == 403
    assert "taken back" in answer.json()["error"]["message"]


def withdraw(member: Member, operation: Operation) -> None:
    decisions.withdraw(op_id=operation.pk, user=member.user)


def reject(member: Member, operation: Operation) -> None:
    decisions.reject(op_id=operation.pk, user=member.user, comment="not so")
    Operation.objects.filter(pk=operation.pk).update(state="pending")
    operation.decisions.filter(is_approval=False).update(withdrawn_at=timezone.now())


def switch_off_and_on(member: Member, operation: Operation) -> None:
    User.objects.filter(pk=member.user.pk).update(is_active=False)
    assert sweep_operations()
    User.objects.filter(pk=member.user.pk).update(is_active=True)


def revoke_and_restore(member: Member, operation: Operation) -> None:
    ApproverKey.objects.filter(pk=member.key.pk).update(revoked_at=timezone.now())
    assert sweep_operations()
    ApproverKey.objects.filter(pk=member.key.pk).update(revoked_at=None)


def off_and_on_by_page(member: Member) -> None:
    chief = User.objects.create_superuser("chief")
    boss, path = open_session(chief), f"/admin/controlplane/user/{member.user.pk}/change/"
    whole = {"first_name": "", "last_name": "", "email": "", "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    assert boss.post(path, whole).status_code == 302
    assert not User.objects.get(pk=member.user.pk).is_active
    assert boss.post(path, whole | {"is_active": "on"}).status_code == 302


def off_and_on_by_shell(member: Member) -> None:
    for is_active in (False, True):
        User.objects.filter(pk=member.user.pk).update(is_active=is_active)


def revoked_by_page_and_restored(member: Member) -> None:
    path = f"/sign-in/keys/{member.key.pk}/remove"
    assert open_session(member.user).post(path, {"accept": "on"}).status_code == 302
    ApproverKey.objects.filter(pk=member.key.pk).update(revoked_at=None)


def revoked_by_command_and_restored(member: Member) -> None:
    call_command(Command("approver_keys"), "revoke", member.name, member.key.thumbprint[:8], stdout=StringIO())
    ApproverKey.objects.filter(pk=member.key.pk).update(revoked_at=None)


MOMENTS = [off_and_on_by_page, off_and_on_by_shell, revoked_by_page_and_restored, revoked_by_command_and_restored]


@pytest.mark.parametrize("pass_moment", MOMENTS)
def test_who_was_off_for_a_moment_between_two_sweeps_has_approved_nothing_that_waits(
    pass_moment: Callable[[Member], None],
) -> None:
    team = make_governed("ana", "ben", "cleo", "dan")
    ana, ben, cleo, dan = team.members
    waiting, approved, other = (propose_token(ana, params={"name": name}) for name in ("waits", "approved", "other"))
    proof = ben.proof(waiting)
    decisions.approve(op_id=waiting.pk, user=ben.user, proof=proof, brought_by="session:ben")
    for member in (ben, cleo):
        member.approve(approved)
    for member in (cleo, dan):
        member.approve(other)
    pass_moment(ben)
    assert cleo.approve(waiting).state == "pending"
    run_due()
    states = {row.pk: row.state for row in Operation.objects.filter(pk__in=[waiting.pk, approved.pk])}
    assert states == {waiting.pk: "pending", approved.pk: "pending"}
    assert other.runs.filter(state="succeeded").exists()
    with pytest.raises(ApprovalRefused, match="never counts again"):
        decisions.approve(op_id=waiting.pk, user=ben.user, proof=proof, brought_by="session:ben")
    # Dan signs instead of ben, and ben himself anew: nobody has to ask again.
    assert dan.approve(approved).state == "approved"
    assert ben.approve(waiting).state == "approved"


def test_a_standing_approval_ends_with_a_moment_off_also_while_a_use_is_on_its_way_and_other_changes_cost_nothing() -> None:
    team = make_governed()
    with fake_boxes():
        standing = propose_load(team[0], op_class="standing", max_uses=3)
        for member in team.members[1:]:
            member.approve(standing)
        run = use_approval(op_id=standing.pk, proposer=team[0].proposer)[0]
        run_due()
        User.objects.filter(pk=team[2].user.pk).update(is_active=True, first_name="Cleo")
        ApproverKey.objects.filter(pk=team[2].key.pk).update(label="blue")
        sweep_operations()
        assert not standing.decisions.filter(withdrawn_at__isnull=False).exists()
        off_and_on_by_shell(team[1])
        assert finish_run(run.pk, RunEnd(RunEvent.SUCCEED))
        with pytest.raises(ApprovalRefused, match="another approver must sign"):
            use_approval(op_id=standing.pk, proposer=team[0].proposer)
        sweep_operations()
        assert [d.person_name for d in standing.decisions.filter(withdrawn_at=None)] == ["cleo"]
        team[1].approve(standing)
        assert use_approval(op_id=standing.pk, proposer=team[0].proposer)


def same(proof: Proof) -> Proof:
    return proof


@pytest.mark.parametrize(("door", "alter"), [(by_rest, twin_of), (by_page, same)])
@pytest.mark.parametrize("end", [withdraw, reject, switch_off_and_on, revoke_and_restore])
def test_a_proof_that_was_taken_back_counts_never_again_and_a_new_one_of_the_person_does(
    end: Callable[[Member, Operation], None],
    door: Callable[[Member, Operation, Proof, Client], None],
    alter: Callable[[Proof], Proof],
) -> None:
    team = make_governed()
    client = make_client(team[1])
    operation = propose_token(team[0])
    proof = team[1].proof(operation)
    decisions.approve(op_id=operation.pk, user=team[1].user, proof=proof, brought_by="session:ben")
    end(team[1], operation)
    door(team[1], operation, alter(proof), client)
    assert not operation.decisions.filter(withdrawn_at=None).exists()
    # Ben thinks again and signs anew, and cleo beside him.
    team[1].approve(operation)
    assert team[2].approve(operation).state == "approved"


def test_a_key_file_that_signs_the_same_bytes_again_is_told_what_to_do_and_another_key_counts() -> None:
    team, key, other = make_team(), KeyFile(), KeyFile()
    for each in (key, other):
        add_key_file(user=team[1].user, line=f"ed25519 {encode_bytes(each.public_key)} ben", actor="user:ben")
    team.start()
    operation = propose_token(team[0])
    digest = bytes.fromhex(operation.digest)

    def sign(each: KeyFile) -> Operation:
        proof = each.sign(digest, approver="ben")
        return decisions.approve(op_id=operation.pk, user=team[1].user, proof=proof, brought_by="session:ben")

    sign(key)
    decisions.withdraw(op_id=operation.pk, user=team[1].user)
    with pytest.raises(ApprovalRefused, match="another key of yours, or ask for the operation again"):
        sign(key)
    sign(other)
    assert team[2].approve(operation).state == "approved"


def test_a_token_of_nobody_brings_no_proof_and_is_told_which_would() -> None:
    team = make_governed()
    robot, ben = make_client(None, name="robot"), make_client(team[1])
    operation = propose_token(team[0])
    body = {"proof": team[1].proof(operation)}
    error = refusal(post(robot, f"/api/v1/operations/{operation.pk}/approvals", body), 403)
    assert error["code"] == "NOT_PERMITTED"
    assert "admin-token-mint" in error["message"]
    assert post(ben, f"/api/v1/operations/{operation.pk}/approvals", body).status_code == 200


def test_who_brought_a_proof_is_in_the_log_and_in_evidence_that_holds_alone(tmp_path: Path, settings: LazySettings) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_KEY
    team = make_governed()
    chain_events()
    ben = make_client(team[1], name="of ben")
    operation = propose_token(team[0])
    assert post(ben, f"/api/v1/operations/{operation.pk}/approvals", {"proof": team[1].proof(operation)}).status_code == 200
    page = open_session(team[2].user)
    body = {"proof": team[2].proof(operation)}
    assert (
        page.post(reverse("approvals:approve", args=[operation.pk]), body, content_type="application/json").status_code == 200
    )
    token = team[1].user.admin_tokens.get()
    brought = {"ben": f"token:of ben#{token.keyid}", "cleo": "session:cleo"}
    events = AuditEvent.objects.filter(action="operation.approve", op_id=operation.printed_id)
    assert {event.actor: event.detail["brought_by"] for event in events} == {f"user:{k}": v for k, v in brought.items()}
    bundle = page.get(reverse("approvals:evidence", args=[operation.pk])).json()
    assert {each["approver"]: each["broughtBy"] for each in bundle["decisions"]} == brought
    shown = ben.get(f"/api/v1/operations/{operation.pk}").json()["decisions"]
    assert {each["person"]: each["brought_by"] for each in shown} == brought
    chain_events()
    said = StringIO()
    call_command(Command("audit"), "prove", operation.printed_id, stdout=said)
    older = {name: member for name, member in bundle.items() if name != "decisions"}
    for name, evidence in (("new", bundle), ("older", older), ("proof", json.loads(said.getvalue()))):
        (tmp_path / name).write_text(json.dumps(evidence))
        command = [sys.executable, "-I", str(approval.__file__), name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done
        assert "APPROVED admin-token-mint" in done.stdout
        assert ("token:of ben#" in done.stdout) is (name != "older")


def text_of(client: Client, path: str) -> str:
    response = client.get(path)
    assert response.status_code == 200, response.content.decode()
    return unescape(response.content.decode())


def test_what_can_be_chosen_is_offered(team: Team) -> None:
    create_tenant(name="research", actor="user:ana")
    form = text_of(open_session(team[0].user), reverse("approvals:propose") + "?operation=limit-raise&target=tenant:research")
    assert re.search(r'<input type="checkbox" name="targets" value="tenant:research"[^>]* checked', form)
    assert "Requests per minute" in form
    assert 'name="param-"' not in form
