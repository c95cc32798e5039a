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

from controlplane.models import User
from governance import services
from governance.errors import ApprovalRefused
from governance.models import ApproverKey, AuditEvent, Operation
from governance.services.approver_keys import add_key_file
from governance.services.sweeps import sweep_operations
from tests.integration.governance.audit_rows import LOG_KEY
from tests.integration.governance.governance_rest import make_client, post, refusal
from tests.integration.governance.team import Member, make_governed, make_team, propose_token
from tests.unit.wire.passkeys import KeyFile
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


def same(proof: Proof) -> Proof:
    return proof


def second_signature(proof: Proof) -> Proof:
    """The other signature that ECDSA has for the same message, which anybody can compute from the first."""
    r, s = decode_dss_signature(decode_bytes(proof["signature"]))
    return proof | {"signature": encode_bytes(encode_dss_signature(r, P256_ORDER - s))}


@pytest.mark.parametrize("alter", [same, second_signature])
@pytest.mark.parametrize("door", [by_rest, by_page])
@pytest.mark.parametrize("end", [withdraw, reject, switch_off_and_on, revoke_and_restore])
def test_a_proof_that_was_taken_back_counts_never_again_and_a_new_one_of_the_person_does(
    end: Callable[[Member, Operation], None],
    door: Callable[[Member, Operation, Proof, Client], None],
    alter: Callable[[Proof], Proof],
) -> None:
    team = make_team()
    client = make_client(team[1])
    team.start()
    operation = propose_token(team[0])
    proof = team[1].proof(operation)
    services.approve(op_id=operation.pk, user=team[1].user, proof=proof, brought_by="session:ben")
    end(team[1], operation)
    door(team[1], operation, alter(proof), client)
    assert not operation.decisions.filter(withdrawn_at=None).exists()
    # Ben thinks again and signs anew, and cleo beside him.
    team[1].approve(operation)
    assert team[2].approve(operation).state == "approved"


def test_a_proof_that_was_taken_back_comes_back_by_no_sweep_and_no_dispatch() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    for member in team.members[1:]:
        member.approve(operation)
    services.withdraw(op_id=operation.pk, user=team[1].user)
    sweep_operations()
    services.run_due()
    operation.refresh_from_db()
    assert operation.state == "pending"
    assert operation.dispatched_at is None


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
    team = make_team()
    robot, ben = make_client(None, name="robot"), make_client(team[1])
    team.start()
    operation = propose_token(team[0])
    body = {"proof": team[1].proof(operation)}
    error = refusal(post(robot, f"/api/v1/operations/{operation.pk}/approvals", body), 403)
    assert error["code"] == "NOT_PERMITTED"
    assert "admin-token-mint" in error["message"]
    assert post(ben, f"/api/v1/operations/{operation.pk}/approvals", body).status_code == 200


@pytest.mark.django_db(transaction=True)
def test_who_brought_a_proof_is_in_the_log_and_in_evidence_that_holds_alone(tmp_path: Path, settings: LazySettings) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_KEY
    team = make_team()
    ben = make_client(team[1], name="of ben")
    team.start()
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
