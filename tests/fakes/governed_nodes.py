"""Boxes that take operations, and operations for them: an identity with its keys, and a team that approves."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.conf import settings as django_settings
from django.test import override_settings

from governance import services
from governance.models import Operation, OperationRun
from governance.registry import Description, Done, Impact, NotNow, Request, RunOrder, Sent, Signer, find_kind
from governance.states import ApprovalState
from nodes.models import Node
from nodes.services import take_governance
from tests.fakes.governed_team import Member, Team
from tests.fakes.nodes import make_node, make_presence
from wire.bridge import BoxGovernance, OpStatus
from wire.optoken.approval import encode_bytes
from wire.optoken.identity import make_runner_id
from wire.optoken.receipt import Outcome, Receipt, digest_result, sign_receipt

DIGESTS: dict[str, str] = {}
"""What was signed for the operations of ``approve_load``, by their printed ids: a box reads it in the token."""


@dataclass(frozen=True)
class Identity:
    """A box's own key and the HMAC key that it hands over."""

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

    def tell(self, **changes: Any) -> BoxGovernance:
        """What the box says when it registers: L2, its first policy pinned, a clock that is right."""
        said: dict[str, Any] = {
            "level": "L2", "runner_id": self.runner_id, "public_key": encode_bytes(self.public_key),
            "op_keys": {self.kid: encode_bytes(self.secret)}, "policy_version": 1, "policy_sha256": "0" * 64,
            "clock_ms": time.time_ns() // 1_000_000,
        }  # fmt: skip
        return BoxGovernance(**(said | changes))

    def receipt(self, status: OpStatus, *, operation: str = "model-load", **changes: Any) -> str:
        outcome: Outcome = status.state  # type: ignore[assignment]  # tests send ends only
        receipt = Receipt(
            op_id=status.op_id, use=status.use, statement_digest=DIGESTS.get(status.op_id, "0" * 64),
            runner_id=self.runner_id, operation=operation, outcome=outcome, result_digest=digest_result(status.result),
            fence=1, started_at=1, ended_at=2,
        )  # fmt: skip
        return sign_receipt(self.private_key, replace(receipt, **changes))

    def end(self, op_id: str, state: Outcome, *, operation: str = "model-load", **fields: Any) -> OpStatus:
        status = OpStatus(op_id=op_id, use=1, state=state, **fields)
        status.receipt = self.receipt(status, operation=operation)
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
    row = services.propose(
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
    """Boxes named by targets. Those in ``away`` have no signer, in ``busy`` answer not now, in ``local`` do it at once.

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

    def find_signer(self, target: str) -> Signer | None:
        return None if target in self.away else Signer("L2", "k1", b"k" * 32, target)

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        if order.target in self.broken:
            raise LookupError("a mistake of ours")
        if order.target in self.busy:
            return NotNow(f"{order.target} is busy")
        self.watch(order)
        self.sent.append(order)
        return Done("done at once") if order.target in self.local else Sent()


BOX = FakeBox()


@contextmanager
def fake_boxes() -> Iterator[FakeBox]:
    BOX.reset()
    operations = {**django_settings.OPERATIONS, NAME: f"{__name__}.BOX"}
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
    return services.propose(**(asked | changes))  # type: ignore[arg-type]
