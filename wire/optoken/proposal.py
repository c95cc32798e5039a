"""Making what people sign: statements and policy documents from plain values, checked by the verifier before they leave."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from wire.optoken.approval import (
    BREAK_GLASS,
    POLICY_CHANGE,
    PolicyRef,
    Statement,
    canonical,
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
