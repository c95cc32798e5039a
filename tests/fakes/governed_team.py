"""People who sign: users with software passkeys, the policy that names them, and their approvals through the services."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field, replace
from typing import Any

from django.conf import settings
from django.core.management.color import no_style
from django.db import connection, transaction
from django.db.models import Model
from django.test import Client
from django.utils import timezone

from core.models import User
from governance import services
from governance.models import AdminToken, ApproverKey, AuditEvent, Decision, Operation, OperationRun, PolicyVersion
from governance.services import ApproverChoice, Proposer
from tests.fakes.passkeys import SoftPasskey
from tests.fakes.waiting import wait_until
from wire import clock
from wire.credentials import CredentialKind, mint_credential
from wire.optoken.approval import encode_bytes, read_statement

RP_ID = "localhost"


@dataclass
class Member:
    """One person with a passkey."""

    user: User
    passkey: SoftPasskey
    key: ApproverKey

    @property
    def name(self) -> str:
        return self.user.username

    @property
    def proposer(self) -> Proposer:
        return Proposer(self.name, self.user.pk)

    def proof(self, operation: Operation) -> dict[str, object]:
        return self.passkey.sign(read_statement(bytes(operation.statement)).digest, approver=self.name)

    def approve(self, operation: Operation) -> Operation:
        return services.approve(
            op_id=operation.pk, user=self.user, proof=self.proof(operation), brought_by=f"session:{self.name}"
        )


@dataclass
class Team:
    """Some people, and the policy once ``start`` made one."""

    members: list[Member] = field(default_factory=list)

    def __getitem__(self, index: int) -> Member:
        return self.members[index]

    def add(self, name: str, *, is_staff: bool = True, is_break_glass: bool = False) -> Member:
        user = User.objects.create_user(name, is_staff=is_staff)
        member = Member(user, *make_key(user, is_break_glass=is_break_glass))
        self.members.append(member)
        return member

    def choices(self) -> list[ApproverChoice]:
        ids = {m.name: tuple(ApproverKey.objects.filter(user=m.user).values_list("pk", flat=True)) for m in self.members}
        return [ApproverChoice(m.name, (), ids[m.name]) for m in self.members]

    def sign(self, operation: Operation) -> Operation:
        self[1].approve(operation)
        return self[2].approve(operation)

    def change_policy(self, **changes: object) -> Operation:
        """Have a policy of everybody as they are now asked for by the first; nobody has signed it."""
        return services.draft_policy(
            approvers=self.choices(), reason="anew", proposer=self[0].proposer, **changes,  # type: ignore[arg-type]
        )  # fmt: skip

    def start(self, **changes: object) -> PolicyVersion:
        """Draft, sign and carry out the first policy: asked for by the first person, approved by two others."""
        operation = services.draft_policy(
            approvers=self.choices(),
            reason="the first policy",
            proposer=self[0].proposer,
            **changes,  # type: ignore[arg-type]
        )
        for member in self.members[1:3] or self.members:
            member.approve(operation)
        services.run_due()
        # A control plane that runs beside the test may have taken it.
        wait_until(lambda: not operation.runs.filter(ended_at=None).exists(), what="the policy is in force")
        found = services.active_policy()
        assert found is not None
        return found[0]


def make_key(user: User, *, is_break_glass: bool = False) -> tuple[SoftPasskey, ApproverKey]:
    passkey = SoftPasskey(rp_id=RP_ID, origin=settings.PUBLIC_URL.rstrip("/"))
    spki = passkey.public_key
    import hashlib

    row = ApproverKey.objects.create(
        user=user, kind=ApproverKey.Kind.WEBAUTHN, keyid=passkey.keyid, public_key=encode_bytes(spki),
        thumbprint=hashlib.sha256(spki).hexdigest(), label=f"passkey of {user.username}", is_break_glass=is_break_glass,
    )  # fmt: skip
    return passkey, row


def make_team(*names: str) -> Team:
    """A team without a policy yet."""
    team = Team()
    for name in names or ("ana", "ben", "cleo"):
        team.add(name)
    return team


def make_governed(*names: str, **changes: object) -> Team:
    """A team whose first policy is active: people of the same names sign it once in a process, whose rows are stored again."""
    key = (names, settings.PUBLIC_URL)
    is_usual = not (changes or settings.NOTICE_SENDER) and abs(clock.unix_s() - time.time()) < 1.0
    if is_usual and key in _SIGNED:
        members, rows = _SIGNED[key]
        with transaction.atomic():
            for model, each in rows:
                model._default_manager.bulk_create([copy.copy(row) for row in each])
            with connection.cursor() as cursor:  # rows that bring their ids leave the sequences where they are
                for statement in connection.ops.sequence_reset_sql(no_style(), [model for model, _ in rows]):
                    cursor.execute(statement)
        return Team([replace(member, user=copy.copy(member.user), key=copy.copy(member.key)) for member in members])
    is_first = not any(model._default_manager.exists() for model in _TOLD_OF_A_POLICY)
    team = make_team(*names)
    team.start(**changes)
    if is_usual and is_first:
        rows = [(model, list(model._default_manager.all())) for model in _TOLD_OF_A_POLICY]
        _SIGNED[key] = list(team.members), rows
    return team


_TOLD_OF_A_POLICY: tuple[type[Model], ...] = (User, ApproverKey, PolicyVersion, Operation, Decision, OperationRun, AuditEvent)
"""The tables that the first policy is written into."""
_SIGNED: dict[tuple[tuple[str, ...], str], tuple[list[Member], list[tuple[type[Model], list[Model]]]]] = {}


def propose_token(member: Member, **changes: object) -> Operation:
    asked: dict[str, object] = {
        "operation": "admin-token-mint", "targets": ["control-plane"], "params": {"name": "ci"}, "reason": "for the build",
        "proposer": member.proposer,
    }  # fmt: skip
    return services.propose(**(asked | changes))  # type: ignore[arg-type]


def make_due(operation: Operation) -> None:
    operation.runs.update(due_at=timezone.now())


def make_client(member: Member | None, *, name: str = "ci") -> Client:
    minted = mint_credential(CredentialKind.ADMIN)
    owner = member.user if member else None
    AdminToken.objects.create(name=name, keyid=minted.keyid, digest=minted.digest, owner=owner)
    return Client(headers={"authorization": f"Bearer {minted.text}"})


def post(client: Client, path: str, body: object | None = None, **headers: str) -> Any:
    return client.post(path, body if body is not None else {}, content_type="application/json", headers=headers)


def refusal(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.content
    error: dict[str, Any] = answer.json()["error"]
    assert {"code", "message", "retryable", "type", "param"} <= set(error)
    return error


def open_session(user: User, *, by: str = "passkey") -> Client:
    client = Client()
    client.force_login(user)
    session = client.session
    session["muster_assurance"] = by
    session.save()
    return client
