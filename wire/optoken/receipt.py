"""What a node says it did: the outcome of one operation, signed with the key that its runner id names."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from wire.limits import WIRE
from wire.optoken.approval import RECEIPT_DOMAIN, ApprovalError, canonical, check_receipt, encode_bytes

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


_MEMBERS = {
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
    _check(receipt)
    members: dict[str, object] = {name: getattr(receipt, field) for name, field in _MEMBERS.items()}
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
    if members.keys() != {"v", *_MEMBERS} or type(members["v"]) is not int or members["v"] != 1:
        raise ReceiptError("a receipt of version 1 with exactly its members is what can be read")
    values: dict[str, Any] = {field: members[name] for name, field in _MEMBERS.items()}  # Any: _check looks at the types
    receipt = Receipt(**values)
    _check(receipt)
    return receipt


def _check(receipt: Receipt) -> None:
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
