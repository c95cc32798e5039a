"""A stolen control plane: its database, its Redis and the signing keys in it, and nobody's approval.

``python -m benchmarks.govcheck.thief``, in its environment: one line of JSON for each attempt (name, operation, state, code,
message).
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "controlplane.settings")

import django

django.setup()

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.db import transaction
from django.utils import timezone

from core.hints import publish_hint
from governance.models import Decision, Operation, OperationRun, PolicyVersion
from nodes.models import Node, NodeOpKey
from wire.ids import format_id, new_uuid7, parse_id
from wire.optoken.approval import Policy, PolicyRef, Statement, encode_bytes, read_policy, read_statement
from wire.optoken.documents import DEFAULT_CLASSES, ApproverEntry, KeyEntry, build_policy, build_statement
from wire.optoken.op_token import Binding, Grant, encode_token, params_digest, sign_l0, sign_l1, sign_l2

LIFE_S = 300
WAIT_S = 30.0
REPEAT_S = 5.0
"""How long an answer is awaited to what names a use that was carried out: the node told of it then, and there may be none."""
Proofs = list[Mapping[str, object]]


@dataclass(frozen=True)
class Loot:
    """What was stolen: the keys that sign tokens, the active policy, and an earlier approval with its proofs."""

    node: Node
    key: NodeOpKey
    policy_row: PolicyVersion
    policy: Policy
    earlier: Statement
    earlier_proofs: Proofs
    own: Ed25519PrivateKey


def take_loot() -> Loot:
    """Read everything that a token needs, but for the approvals."""
    node = Node.objects.get(name="local")
    row = PolicyVersion.objects.get(state=PolicyVersion.State.ACTIVE)
    used = Operation.objects.filter(operation="model-load", runs__state="succeeded").order_by("requested_at").first()
    assert used is not None, "the thief needs an earlier load"
    proofs: Proofs = [dict(d.proof) for d in Decision.objects.filter(operation=used, is_approval=True) if d.proof]
    key = NodeOpKey.objects.filter(node=node, retired_at=None).first()
    assert key is not None
    earlier = read_statement(bytes(used.statement))
    return Loot(node, key, row, read_policy(bytes(row.document)), earlier, proofs, Ed25519PrivateKey.generate())


def main() -> int:
    """Make every attempt."""
    loot = take_loot()
    wishes: list[tuple[str, dict[str, object]]] = [
        ("model-load", {"modelId": str(loot.earlier.params["modelId"])}),
        ("model-unload", {"modelId": "muster-tiny", "force": True}),
        ("cache-flush", {"scope": "all"}),
        ("settings-reload", {}),
    ]
    tokens: dict[str, Callable[[Loot, Statement], dict[str, object]]] = {
        "a level 0 token with the stolen key": _level_0,
        "a level 1 token with the stolen key": _level_1,
        "a statement of its own without proofs": lambda loot, s: _level_2(loot, s, []),
        "proofs by a key of its own, in the names of approvers": lambda loot, s: _level_2(loot, s, _own_proofs(loot, s)),
        "the proofs of an earlier approval": lambda loot, s: _level_2(loot, s, loot.earlier_proofs),
        "one proof of the earlier approval twice": lambda loot, s: _level_2(loot, s, loot.earlier_proofs[:1] * 2),
    }
    for title, make in tokens.items():
        for operation, params in wishes:
            statement = _state(loot, operation, params, loot.policy.ref)
            _attempt(title, loot, statement, make(loot, statement))
    altered = loot.earlier.raw.replace(b'"maxUses":1', b'"maxUses":2')
    changed = read_statement(altered)
    _attempt("the earlier approval with one byte changed", loot, changed, _repeat(loot, altered), within_s=REPEAT_S)
    _attempt("the earlier approval once more", loot, loot.earlier, _repeat(loot, loot.earlier.raw), within_s=REPEAT_S)
    _attempt("the earlier approval as its second use", loot, loot.earlier, _repeat(loot, loot.earlier.raw, use=2), use=2)
    forged = _plant_policy(loot)
    for operation, params in wishes:
        statement = _state(loot, operation, params, forged.ref)
        proofs: Proofs = [_sign(loot.own, statement, name, f"own-{name}") for name in ("x", "y")]
        _attempt("a policy of its own, planted in the database", loot, statement, _level_2(loot, statement, proofs))
    return 0


def _state(loot: Loot, operation: str, params: Mapping[str, object], ref: PolicyRef) -> Statement:
    now = int(time.time())
    return build_statement(
        op_id=format_id("op", new_uuid7()), operation=operation, op_class=operation, targets=[loot.node.runner_id],
        params=params, policy_ref=ref, requested_by="thief", reason="mine", requested_at=now, not_before=now,
        not_after=now + 3600, max_uses=1,
    )  # fmt: skip


def _grant(statement: Statement) -> Grant:
    model = statement.params.get("modelId")
    names = ["ana", "ben", "cleo"]
    return Grant(statement.operation, str(model) if model else None, names, secrets.token_hex(16), int(time.time()))


def _bind(loot: Loot, statement: Statement, *, use: int = 1) -> Binding:
    return Binding(
        audience=loot.node.runner_id, params_digest=params_digest(statement.params), op_id=statement.op_id,
        fence=time.time_ns() // 1_000_000 + 10_000_000, expires_at=int(time.time()) + LIFE_S, kid=loot.key.kid, use=use,
    )  # fmt: skip


def _level_0(loot: Loot, statement: Statement) -> dict[str, object]:
    return sign_l0(bytes(loot.key.secret), _grant(statement))


def _level_1(loot: Loot, statement: Statement) -> dict[str, object]:
    return sign_l1(bytes(loot.key.secret), _grant(statement), _bind(loot, statement))


def _level_2(loot: Loot, statement: Statement, proofs: Proofs) -> dict[str, object]:
    key = bytes(loot.key.secret)
    return sign_l2(key, _grant(statement), _bind(loot, statement), statement=statement.raw, proofs=proofs)


def _repeat(loot: Loot, raw: bytes, *, use: int = 1) -> dict[str, object]:
    statement = read_statement(raw)
    binding = _bind(loot, statement, use=use)
    return sign_l2(bytes(loot.key.secret), _grant(statement), binding, statement=raw, proofs=loot.earlier_proofs)


def _sign(key: Ed25519PrivateKey, statement: Statement, approver: str, keyid: str) -> dict[str, object]:
    return {"type": "ed25519", "approver": approver, "keyid": keyid, "signature": encode_bytes(key.sign(statement.digest))}


def _own_proofs(loot: Loot, statement: Statement) -> Proofs:
    named = {key.approver: key.keyid for key in loot.policy.keys.values()}
    return [_sign(loot.own, statement, name, keyid) for name, keyid in sorted(named.items())]


def _plant_policy(loot: Loot) -> Policy:
    """Put a next policy that names nobody but the thief in force, as far as rows can do that."""
    spki = [Ed25519PrivateKey.generate() for _ in range(2)]
    keys = [loot.own, *spki]
    people = [
        ApproverEntry(name, [], [KeyEntry(f"own-{name}", "ed25519", key.public_key().public_bytes(
            Encoding.DER, PublicFormat.SubjectPublicKeyInfo))])
        for name, key in zip(("x", "y", "z"), keys, strict=True)
    ]  # fmt: skip
    now = int(time.time())
    document = build_policy(
        policy_id=loot.policy.ref.id, version=loot.policy.ref.version + 1, previous=loot.policy.ref.sha256, issued_at=now,
        expires_at=now + 86_400, origins=[], rp_ids=[], log_keys=[], approvers=people, classes=DEFAULT_CLASSES,
    )  # fmt: skip
    policy = read_policy(document)
    params = {"version": policy.ref.version, "sha256": policy.ref.sha256}
    change = _state(loot, "policy-change", params, loot.policy.ref)
    with transaction.atomic():
        PolicyVersion.objects.filter(pk=loot.policy_row.pk).update(state=PolicyVersion.State.SUPERSEDED)
        row = PolicyVersion.objects.create(
            version=policy.ref.version, document=document, sha256=policy.ref.sha256, state=PolicyVersion.State.ACTIVE,
            created_by="thief", activated_at=timezone.now(),
        )  # fmt: skip
        _store(loot, change, adopts=row)
        publish_hint("policy")
    return policy


def _store(loot: Loot, statement: Statement, *, adopts: PolicyVersion | None = None) -> Operation:
    """Write an operation, over the one of that name where there is one."""
    now = timezone.now()
    written = {
        "statement": statement.raw, "digest": uuid.uuid4().hex * 2, "operation": statement.operation,
        "op_class": statement.op_class, "policy": loot.policy_row, "requested_by": "thief", "requested_at": now,
        "not_before": now, "not_after": now + timedelta(hours=1), "expires_at": now + timedelta(hours=1), "state": "approved",
        "adopts": adopts,
    }  # fmt: skip
    ident = parse_id("op", statement.op_id)
    assert ident is not None
    return Operation.objects.update_or_create(pk=ident, defaults=written)[0]


def _attempt(
    title: str, loot: Loot, statement: Statement, token: dict[str, object], *, use: int = 1, within_s: float = WAIT_S
) -> None:
    """Plant a run with its token, and report what the node said."""
    now = timezone.now()
    with transaction.atomic():
        planted = {
            "state": "dispatched", "due_at": now + timedelta(hours=1), "dispatched_at": now, "node_id": loot.node.pk,
            "token": encode_token(token), "token_expires_at": now + timedelta(seconds=LIFE_S), "sent_at": None,
            "contact_at": now, "ended_at": None, "code": "", "message": "",
        }  # fmt: skip
        run, _ = OperationRun.objects.update_or_create(
            operation=_store(loot, statement), target=loot.node.runner_id, use=use, defaults=planted
        )
        publish_hint("commands")
    give_up_at = time.monotonic() + within_s
    while run.ended_at is None and time.monotonic() < give_up_at:
        time.sleep(0.05)
        run.refresh_from_db()
    said = {"name": title, "operation": statement.operation, "state": run.state, "code": run.code, "message": run.message}
    sys.stdout.write(json.dumps(said) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
