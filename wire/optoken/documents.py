"""Documents in the canonical form of ``approval``: statements and policies that people sign, receipts that nodes sign.

Statements and policies are read by the verifier before they leave, so that nobody signs what no verifier would accept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from wire.limits import WIRE
from wire.optoken.approval import (
    BREAK_GLASS,
    POLICY_CHANGE,
    RECEIPT_DOMAIN,
    ApprovalError,
    PolicyRef,
    Statement,
    canonical,
    check_receipt,
    encode_bytes,
    read_policy,
    read_statement,
)

REASON_DOMAIN = b"op-reason/v1\x00"
DAY_S = 86_400

_CLASS_DEFAULTS: Mapping[str, object] = MappingProxyType(
    {
        "factors": {}, "denyThreshold": 1, "lifeS": DAY_S, "usableS": DAY_S, "maxUses": 1, "fileProofs": 0, "dailyCap": 0,
        "solo": False, "deviceBound": False, "proposers": [],
    }
)  # fmt: skip


def _make_class(threshold: int, *operations: str, **changes: int) -> Mapping[str, object]:
    return MappingProxyType({**_CLASS_DEFAULTS, "operations": list(operations), "threshold": threshold, **changes})


DEFAULT_CLASSES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "model-load": _make_class(2, "model-load"),
        "model-unload": _make_class(2, "model-unload"),
        "cache-flush": _make_class(2, "cache-flush"),
        "settings-reload": _make_class(2, "settings-reload"),
        "node-drain": _make_class(1, "node-drain"),
        "node-evict": _make_class(2, "node-evict"),
        "limit-raise": _make_class(2, "limit-raise"),
        "admin-token-mint": _make_class(2, "admin-token-mint"),
        POLICY_CHANGE: _make_class(2, POLICY_CHANGE, usableS=7 * DAY_S),
        "unfreeze": _make_class(2, "unfreeze"),
        "break-glass-review": _make_class(2, "break-glass-review"),
        "standing": _make_class(2, "model-load", "model-unload", "cache-flush", maxUses=20, usableS=7 * DAY_S),
        BREAK_GLASS: _make_class(1, "model-load", "model-unload", "cache-flush", "node-drain", "node-evict", dailyCap=2),
    }
)
"""The classes of a new policy, by name: members of a policy document. Safe directions need one person, the others two."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A key of an approver. ``kind``: webauthn or ed25519; ``public_key``: SPKI DER; ``keyid``: unique in the policy.

    A passkey's ``keyid`` is its credential id in base64url.
    """

    keyid: str
    kind: str
    public_key: bytes
    is_break_glass: bool = False


@dataclass(frozen=True, slots=True)
class ApproverEntry:
    """A person of a policy. ``id``: the user name."""

    id: str
    groups: Sequence[str]
    keys: Sequence[KeyEntry]


def digest_reason(reason: str) -> str:
    """Return the digest under which a statement names its reason: 64 hex digits. The text itself stays with the asker."""
    return hashlib.sha256(REASON_DOMAIN + reason.encode()).hexdigest()


def build_statement(
    *,
    op_id: str,
    operation: str,
    op_class: str,
    targets: Sequence[str],
    params: Mapping[str, object],
    policy_ref: PolicyRef,
    requested_by: str,
    reason: str,
    requested_at: int,
    not_before: int,
    not_after: int,
    max_uses: int,
    stops_on_failure: bool = True,
) -> Statement:
    """Return the statement that approvers are to sign. ``params``: every member of the request body that is not null.

    Times are Unix seconds. ``stops_on_failure`` counts with several targets only: such a statement is of version 2, any other
    of version 1, which nodes of earlier releases read as well. Raises ApprovalError (not_canonical, bad_statement); whether a
    policy allows it is not looked at.
    """
    members: dict[str, object] = {
        "v": 1, "opId": op_id, "operation": operation, "class": op_class, "targets": list(targets),
        "params": dict(params), "requestedBy": requested_by, "reasonDigest": digest_reason(reason),
        "policy": {"id": policy_ref.id, "version": policy_ref.version, "sha256": policy_ref.sha256},
        "requestedAt": requested_at, "notBefore": not_before, "notAfter": not_after, "maxUses": max_uses,
    }  # fmt: skip
    if len(targets) > 1:
        members |= {"v": 2, "stopsOnFailure": stops_on_failure}
    return read_statement(canonical(members))


def build_policy(
    *,
    policy_id: str,
    version: int,
    previous: str,
    issued_at: int,
    expires_at: int,
    origins: Sequence[str],
    rp_ids: Sequence[str],
    log_keys: Sequence[str],
    approvers: Sequence[ApproverEntry],
    classes: Mapping[str, Mapping[str, object]],
) -> bytes:
    """Return the document of a policy. ``previous``: SHA-256 of the version before in hex, "" for version 1.

    ``classes``: as in ``DEFAULT_CLASSES``; what a class leaves out has the value it has there in most. The class break-glass is
    left out when nobody has a break-glass key, because nobody could then use it. Raises ApprovalError (bad_policy,
    not_canonical) for a policy that no verifier would accept.
    """
    has_break_glass = any(key.is_break_glass for person in approvers for key in person.keys)
    members: dict[str, object] = {
        "v": 1, "id": policy_id, "version": version, "previous": previous, "issuedAt": issued_at, "expiresAt": expires_at,
        "origins": list(origins), "rpIds": list(rp_ids), "logKeys": list(log_keys),
        "approvers": [_write_approver(person) for person in approvers],
        "classes": {
            name: {**_CLASS_DEFAULTS, **wanted} for name, wanted in classes.items() if has_break_glass or name != BREAK_GLASS
        },
    }  # fmt: skip
    document = canonical(members)
    read_policy(document)
    return document


def _write_approver(person: ApproverEntry) -> dict[str, object]:
    keys = [
        {"keyid": key.keyid, "type": key.kind, "publicKey": encode_bytes(key.public_key), "breakGlass": key.is_break_glass}
        for key in person.keys
    ]
    return {"id": person.id, "groups": list(person.groups), "keys": keys}


# Receipts


Outcome = Literal["succeeded", "failed", "interrupted"]

_DIGEST = re.compile(r"[0-9a-f]{64}")


class ReceiptError(Exception):
    """A receipt that proves nothing: not signed by this key, about another node, or not in the one form it can have."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """How one use of an approval ended on one node. Digests are SHA-256 in hex; times are Unix seconds.

    ``use`` counts from 1. ``statement_digest``: of the approved statement, "" below L2. ``result_digest``: see
    ``digest_result``. ``checkpoint``: size of the last audit log that the node saw, as text; "" = none.
    """

    op_id: str
    use: int
    statement_digest: str
    runner_id: str
    operation: str
    outcome: Outcome
    result_digest: str
    fence: int
    started_at: int
    ended_at: int
    checkpoint: str = ""


_RECEIPT_MEMBERS = {
    "opId": "op_id", "use": "use", "statementDigest": "statement_digest", "runnerId": "runner_id", "operation": "operation",
    "outcome": "outcome", "resultDigest": "result_digest", "fence": "fence", "startedAt": "started_at", "endedAt": "ended_at",
    "checkpoint": "checkpoint",
}  # fmt: skip


def digest_result(result: object) -> str:
    """Return the SHA-256 in hex of a result as sorted, compact JSON. Floats are written as Python writes them (shortest).

    Raises ValueError for NaN and infinities.
    """
    text = json.dumps(result, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def sign_receipt(private_key: Ed25519PrivateKey, receipt: Receipt) -> str:
    """Return base64url of ``{"receipt": …, "signature": …}``. Raises ReceiptError for values that no receipt can hold."""
    _check_members(receipt)
    members: dict[str, object] = {name: getattr(receipt, field) for name, field in _RECEIPT_MEMBERS.items()}
    try:
        body = canonical({"v": 1, **members})
        signature = encode_bytes(private_key.sign(RECEIPT_DOMAIN + body))
        return encode_bytes(canonical({"receipt": {"v": 1, **members}, "signature": signature}))
    except ApprovalError as error:
        raise ReceiptError(f"a value that cannot be signed: {error}") from None


def read_receipt(text: str, public_key: bytes) -> Receipt:
    """Return the receipt that the holder of ``public_key`` (Ed25519, SPKI DER) signed about its own node.

    Raises ReceiptError.
    """
    try:
        members = check_receipt(text, public_key)
    except ApprovalError as error:
        raise ReceiptError(str(error)) from None
    if members.keys() != {"v", *_RECEIPT_MEMBERS} or type(members["v"]) is not int or members["v"] != 1:
        raise ReceiptError("a receipt of version 1 with exactly its members is what can be read")
    values: dict[str, Any] = {field: members[name] for name, field in _RECEIPT_MEMBERS.items()}  # Any: checked below
    receipt = Receipt(**values)
    _check_members(receipt)
    return receipt


def _check_members(receipt: Receipt) -> None:
    texts = (receipt.op_id, receipt.runner_id, receipt.operation)
    digests = (receipt.statement_digest or "0" * 64, receipt.result_digest)
    numbers = (receipt.use, receipt.fence, receipt.started_at, receipt.ended_at)
    fits = (
        all(isinstance(text, str) and 0 < len(text) <= WIRE.receipt_text_chars for text in texts)
        and isinstance(receipt.checkpoint, str)
        and len(receipt.checkpoint) <= WIRE.receipt_text_chars
        and all(isinstance(digest, str) and _DIGEST.fullmatch(digest) for digest in digests)
        and all(type(number) is int and number >= 0 for number in numbers)
        and receipt.use >= 1
        and receipt.outcome in get_args(Outcome)
    )
    if not fits:
        raise ReceiptError("a member of the receipt is of the wrong type or out of range")
