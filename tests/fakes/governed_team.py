"""People who sign: users with software passkeys, the policy that names them, and their approvals through the services."""

from __future__ import annotations

import copy
import hashlib
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.conf import settings
from django.contrib.auth.models import Permission
from django.core.management.color import no_style
from django.db import connection, transaction
from django.db.models import Model
from django.test import Client, override_settings
from django.utils import timezone

from core.models import User
from governance.models import AdminToken, ApproverKey, AuditEvent, Decision, Operation, OperationRun, PolicyVersion
from governance.operations import decisions
from governance.operations.approvals import active_policy
from governance.operations.policies import ApproverChoice, draft_policy
from governance.operations.proposals import Proposer, propose
from governance.operations.runs import run_due
from governance.registry import Description, Done, Impact, NotNow, Request, RunOrder, Sent, Signer, find_kind
from governance.states import ApprovalState
from nodes.models import Node
from nodes.services.governance import take_governance
from tests.fakes.nodes import make_node, make_presence
from tests.fakes.passkeys import SoftPasskey
from tests.fakes.waiting import wait_until
from wire import clock
from wire.bridge import NodeGovernance, OpStatus
from wire.credentials import CredentialKind, mint_credential
from wire.optoken.approval import encode_bytes, read_statement
from wire.optoken.documents import Outcome, Receipt, digest_result, sign_receipt
from wire.optoken.op_token import make_runner_id

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
        return decisions.approve(
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
        if is_staff:
            user.user_permissions.add(Permission.objects.get(codename="add_operation"))
        member = Member(user, *make_key(user, is_break_glass=is_break_glass))
        self.members.append(member)
        return member

    def choices(self) -> list[ApproverChoice]:
        ids = {m.name: tuple(ApproverKey.objects.filter(user=m.user).values_list("pk", flat=True)) for m in self.members}
        return [ApproverChoice(m.name, (), ids[m.name]) for m in self.members]

    def sign(self, operation: Operation) -> Operation:
        self[1].approve(operation)
        return self[2].approve(operation)

    def change_policy(self, *, reason: str = "anew", **changes: object) -> Operation:
        """Have a policy of everybody as they are now asked for by the first; nobody has signed it."""
        return draft_policy(
            approvers=self.choices(), reason=reason, proposer=self[0].proposer, **changes,  # type: ignore[arg-type]
        )  # fmt: skip

    def start(self, **changes: object) -> PolicyVersion:
        """Draft, sign and carry out the first policy: asked for by the first person, approved by two others."""
        operation = self.change_policy(reason="the first policy", **changes)
        for member in self.members[1:3] or self.members:
            member.approve(operation)
        run_due()
        # A control plane that runs beside the test may have taken it.
        wait_until(lambda: not operation.runs.filter(ended_at=None).exists(), what="the policy is in force")
        found = active_policy()
        assert found is not None
        return found[0]


def make_key(user: User, *, is_break_glass: bool = False) -> tuple[SoftPasskey, ApproverKey]:
    passkey = SoftPasskey(rp_id=RP_ID, origin=settings.PUBLIC_URL.rstrip("/"))
    spki = passkey.public_key
    row = ApproverKey.objects.create(
        user=user, kind=ApproverKey.Kind.WEBAUTHN, keyid=passkey.keyid, public_key=encode_bytes(spki),
        thumbprint=hashlib.sha256(spki).hexdigest(), label=f"passkey of {user.username}", is_break_glass=is_break_glass,
    )  # fmt: skip
    return passkey, row


def make_team(*names: str) -> Team:
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
    return propose(**(asked | changes))  # type: ignore[arg-type]


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


DIGESTS: dict[str, str] = {}
"""What was signed for the operations of ``approve_load``, by their printed ids: a node reads it in the token."""


@dataclass(frozen=True)
class Identity:
    """A node's own key and the HMAC key that it hands over."""

    name: str = "rig"
    private_key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    kid: str = "k1"

    @property
    def public_key(self) -> bytes:
        return self.private_key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    @property
    def runner_id(self) -> str:
        return make_runner_id(self.name, self.public_key)

    def tell(self, **changes: Any) -> NodeGovernance:
        """What the node says when it registers: L2, its first policy pinned, a clock that is right."""
        said: dict[str, Any] = {
            "level": "L2", "runner_id": self.runner_id, "public_key": encode_bytes(self.public_key),
            "op_keys": {self.kid: encode_bytes(self.secret)}, "policy_version": 1, "policy_sha256": "0" * 64,
            "clock_ms": time.time_ns() // 1_000_000,
        }  # fmt: skip
        return NodeGovernance(**(said | changes))

    def receipt(self, status: OpStatus, *, operation: str = "model-load", **changes: Any) -> str:
        outcome: Outcome = status.state  # type: ignore[assignment]  # tests send ends only
        receipt = Receipt(
            op_id=status.op_id, use=status.use, statement_digest=DIGESTS.get(status.op_id, "0" * 64),
            runner_id=self.runner_id, operation=operation, outcome=outcome, result_digest=digest_result(status.result),
            fence=1, started_at=1, ended_at=2,
        )  # fmt: skip
        return sign_receipt(self.private_key, replace(receipt, **changes))

    def end(self, op_id: str, state: Outcome, **fields: Any) -> OpStatus:
        status = OpStatus(op_id=op_id, use=1, state=state, **fields)
        status.receipt = self.receipt(status)
        return status


def make_box(identity: Identity, *, age_s: float = 0.0, **said: Any) -> Node:
    node = make_node(identity.name, model_names=["m"])
    make_presence(node, age_s=age_s, connected=True, replicas=[{"model": "old", "state": "loaded", "memory_mb": 4000}])
    taken = take_governance(node_id=node.pk, said=identity.tell(**said), heard_ms=time.time_ns() // 1_000_000)
    assert taken is not None
    return taken


def approve_load(
    team: Team, *targets: str, operation: str = "model-load", params: Mapping[str, object] | None = None, **asked: Any
) -> Operation:
    """An operation that two people approved; nothing is dispatched yet."""
    row = propose(
        operation=operation, targets=targets, params=params if params is not None else {"modelId": "m"},
        reason="the tests need it", proposer=team[0].proposer, **asked,
    )  # fmt: skip
    DIGESTS[row.printed_id] = row.digest
    for member in team[1], team[2]:
        if row.state == ApprovalState.PENDING.value:  # some need one person alone
            row = member.approve(row)
    return row


def only_run(operation: Operation) -> OperationRun:
    return OperationRun.objects.get(operation=operation)


NAME = "model-load"
"""It stands in the place of this operation, which the default policy has in the classes model-load, standing, break-glass."""


class FakeBox:
    """Nodes named by targets. Those in ``away`` have no signer, in ``busy`` answer not now, in ``local`` do it at once.

    With ``together`` among the parameters all of them carry it out together.

    ``sent``: every order that was taken. ``broken``: targets at which carrying out raises, as a mistake of ours would.
    ``watch`` sees an order at the moment at which it is sent.
    """

    name = NAME
    title = "Load a model"
    is_remote = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.away: set[str] = set()
        self.busy: set[str] = set()
        self.local: set[str] = set()
        self.broken: set[str] = set()
        self.sent: list[RunOrder] = []
        self.watch: Callable[[RunOrder], None] = lambda order: None

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        return Request(tuple(targets), dict(params))

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        del params
        return Description(f"Load on {', '.join(targets)}", [])

    def preview(self, targets: Sequence[str], params: Mapping[str, object]) -> Sequence[Impact]:
        del targets, params
        return ()

    def is_joint(self, params: Mapping[str, object]) -> bool:
        return "together" in params

    def explain_wait(self, targets: Sequence[str]) -> str:
        return ", ".join(f"{target} is away" for target in targets if target in self.away)

    def find_signer(self, target: str) -> Signer | None:
        return None if target in self.away else Signer("L2", "k1", b"k" * 32, target)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        if order.target in self.broken:
            raise LookupError("a mistake of ours")
        if order.target in self.busy:
            return NotNow(f"{order.target} is busy")
        self.watch(order)
        self.sent.append(order)
        return Done("done at once") if order.target in self.local else Sent(uuid.UUID(int=1))


BOX = FakeBox()


@contextmanager
def fake_boxes() -> Iterator[FakeBox]:
    BOX.reset()
    operations = {**settings.OPERATIONS, NAME: f"{__name__}.BOX"}
    with override_settings(OPERATIONS=operations):
        find_kind.cache_clear()
        try:
            yield BOX
        finally:
            find_kind.cache_clear()


def propose_load(member: Member, *targets: str, **changes: object) -> Operation:
    asked: dict[str, object] = {
        "operation": NAME, "targets": targets or ("box-a",), "params": {"modelId": "m"}, "reason": "for the demo",
        "proposer": member.proposer,
    }  # fmt: skip
    return propose(**(asked | changes))  # type: ignore[arg-type]
