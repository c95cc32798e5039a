"""A proof that was taken back or dropped never counts again, by any door; and who brought a proof is written down."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from django.conf import LazySettings
from django.core.management import call_command
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from core.models import User
from governance import services
from governance.errors import ApprovalRefused
from governance.models import ApproverKey, AuditEvent, Operation
from governance.services.approver_keys import add_key_file
from governance.services.sweeps import sweep_operations
from governance.states import RunEvent
from tests.fakes.audit_logs import LOG_KEY, chain_events
from tests.fakes.governed_nodes import fake_boxes, propose_load
from tests.fakes.governed_team import Member, make_client, make_governed, make_key, make_team, post, propose_token, refusal
from tests.fakes.passkeys import KeyFile
from wire.optoken import approval
from wire.optoken.approval import decode_bytes, encode_bytes

pytestmark = pytest.mark.django_db

P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
Proof = dict[str, object]


def by_rest(member: Member, operation: Operation, proof: Proof, client: Client) -> None:
    error = refusal(post(client, f"/api/v1/operations/{operation.pk}/approvals", {"proof": proof}), 403)
    assert error["rule"] == "withdrawn_proof"
    assert "taken back" in error["message"]


def by_page(member: Member, operation: Operation, proof: Proof, client: Client) -> None:
    page = open_session(member)
    answer = page.post(reverse("approvals:approve", args=[operation.pk]), {"proof": proof}, content_type="application/json")
    assert answer.status_code == 403
    assert "taken back" in answer.json()["error"]["message"]


def open_session(member: Member) -> Client:
    """A session of hers that a passkey opened."""
    client = Client()
    client.force_login(member.user)
    session = client.session
    session["muster_assurance"] = "passkey"
    session.save()
    return client


def withdraw(member: Member, operation: Operation) -> None:
    services.withdraw(op_id=operation.pk, user=member.user)


def reject(member: Member, operation: Operation) -> None:
    services.reject(op_id=operation.pk, user=member.user, comment="not so")
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
    """An administrator's two clicks, between two sweeps."""
    chief = User.objects.create_superuser("chief")
    boss, path = open_session(Member(chief, *make_key(chief))), f"/admin/controlplane/user/{member.user.pk}/change/"
    whole = {"first_name": "", "last_name": "", "email": "", "date_joined_0": "2026-01-01", "date_joined_1": "00:00:00"}
    assert boss.post(path, whole).status_code == 302
    assert not User.objects.get(pk=member.user.pk).is_active
    assert boss.post(path, whole | {"is_active": "on"}).status_code == 302


def off_and_on_by_shell(member: Member) -> None:
    for is_active in (False, True):
        User.objects.filter(pk=member.user.pk).update(is_active=is_active)


def revoked_by_page_and_restored(member: Member) -> None:
    path = f"/sign-in/keys/{member.key.pk}/remove"
    assert open_session(member).post(path, {"accept": "on"}).status_code == 302
    ApproverKey.objects.filter(pk=member.key.pk).update(revoked_at=None)


def revoked_by_command_and_restored(member: Member) -> None:
    call_command("approver_keys", "revoke", member.name, member.key.thumbprint[:8], stdout=StringIO())
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
    services.approve(op_id=waiting.pk, user=ben.user, proof=proof, brought_by="session:ben")
    for member in (ben, cleo):
        member.approve(approved)
    for member in (cleo, dan):
        member.approve(other)
    pass_moment(ben)
    assert cleo.approve(waiting).state == "pending"
    services.run_due()
    states = {row.pk: row.state for row in Operation.objects.filter(pk__in=[waiting.pk, approved.pk])}
    assert states == {waiting.pk: "pending", approved.pk: "pending"}
    assert other.runs.filter(state="succeeded").exists()
    with pytest.raises(ApprovalRefused, match="never counts again"):
        services.approve(op_id=waiting.pk, user=ben.user, proof=proof, brought_by="session:ben")
    # Dan signs instead of ben, and ben himself anew: nobody has to ask again.
    assert dan.approve(approved).state == "approved"
    assert ben.approve(waiting).state == "approved"


def test_a_standing_approval_ends_with_a_moment_off_also_while_a_use_is_on_its_way_and_other_changes_cost_nothing() -> None:
    team = make_governed()
    with fake_boxes():
        standing = propose_load(team[0], op_class="standing", max_uses=3)
        for member in team.members[1:]:
            member.approve(standing)
        run = services.use_approval(op_id=standing.pk, proposer=team[0].proposer)[0]
        services.run_due()
        User.objects.filter(pk=team[2].user.pk).update(is_active=True, first_name="Cleo")
        ApproverKey.objects.filter(pk=team[2].key.pk).update(label="blue")
        sweep_operations()
        assert not standing.decisions.filter(withdrawn_at__isnull=False).exists()
        off_and_on_by_shell(team[1])
        assert services.finish_run(run_id=run.pk, event=RunEvent.SUCCEED)
        with pytest.raises(ApprovalRefused, match="another approver must sign"):
            services.use_approval(op_id=standing.pk, proposer=team[0].proposer)
        sweep_operations()
        assert [d.person_name for d in standing.decisions.filter(withdrawn_at=None)] == ["cleo"]
        team[1].approve(standing)
        assert services.use_approval(op_id=standing.pk, proposer=team[0].proposer)


def same(proof: Proof) -> Proof:
    return proof


def second_signature(proof: Proof) -> Proof:
    """The other signature that ECDSA has for the same message, which anybody can compute from the first."""
    r, s = decode_dss_signature(decode_bytes(proof["signature"]))
    return proof | {"signature": encode_bytes(encode_dss_signature(r, P256_ORDER - s))}


@pytest.mark.parametrize(("door", "alter"), [(by_rest, second_signature), (by_page, same)])
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
    services.approve(op_id=operation.pk, user=team[1].user, proof=proof, brought_by="session:ben")
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
        return services.approve(op_id=operation.pk, user=team[1].user, proof=proof, brought_by="session:ben")

    sign(key)
    services.withdraw(op_id=operation.pk, user=team[1].user)
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
    page = open_session(team[2])
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
    call_command("audit", "prove", operation.printed_id, stdout=said)
    older = {name: member for name, member in bundle.items() if name != "decisions"}
    for name, evidence in (("new", bundle), ("older", older), ("proof", json.loads(said.getvalue()))):
        (tmp_path / name).write_text(json.dumps(evidence))
        command = [sys.executable, "-I", str(approval.__file__), name]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0, done
        assert "APPROVED admin-token-mint" in done.stdout
        assert ("token:of ben#" in done.stdout) is (name != "older")
