"""Making tokens: for the control plane, for owners' scripts and for tests."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from wire.optoken.approval import STATEMENT_DOMAIN
from wire.optoken.canonical import canonical_bytes, spec_bytes

TOKEN_VERSION = 1


@dataclass(frozen=True, slots=True)
class Grant:
    """What every token says. ``model_id``: None for a flush that names no model. ``issued_at``: Unix seconds."""

    operation: str
    model_id: str | None
    signers: Sequence[str]
    nonce: str
    issued_at: int


@dataclass(frozen=True, slots=True)
class Binding:
    """What an L1 token says beside: for which box, which parameters (see ``params_digest``), which approval, which order.

    ``expires_at``: Unix seconds, at most 300 after the issue. ``op_id`` is the same in all tokens of one approval.
    ``fence`` grows from operation to operation. ``use``: which of its uses, counted from 1; above 1 only at L2.
    """

    audience: str
    params_digest: str
    op_id: str
    fence: int
    expires_at: int
    kid: str = ""
    statement_digest: str | None = None
    checkpoint: str | None = None
    use: int = 1


def sign_l0(key: bytes, grant: Grant) -> dict[str, object]:
    """Return ``{"opToken": …, "signature": hex}`` as public model runners check it."""
    claims = _spec_claims(grant)
    return {"opToken": claims, "signature": hmac.new(key, spec_bytes(claims), hashlib.sha256).hexdigest()}


def sign_jwt(key: bytes, claims: Mapping[str, object]) -> str:
    """Return a compact JWT (RFC 7519, HS256) whose payload is the ``opToken`` of a token of L0 or L1."""
    header = json.dumps({"alg": "HS256", "typ": "JWT"}, separators=(",", ":")).encode()
    payload = json.dumps(dict(claims), ensure_ascii=False, separators=(",", ":")).encode()
    signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in (header, payload))
    return (signed + b"." + base64.urlsafe_b64encode(hmac.digest(key, signed, "sha256")).rstrip(b"=")).decode()


def sign_l1(key: bytes, grant: Grant, binding: Binding) -> dict[str, object]:
    """Return ``{"opToken": …, "signature": base64url}`` over the canonical bytes. Raises NotCanonical."""
    claims = {name: value for name, value in _spec_claims(grant).items() if value is not None}
    claims |= {
        "v": TOKEN_VERSION,
        "kid": binding.kid,
        "aud": binding.audience,
        "exp": binding.expires_at,
        "opId": binding.op_id,
        "paramsDigest": binding.params_digest,
        "fence": binding.fence,
    }
    if binding.statement_digest is not None:
        claims["stmtDigest"] = binding.statement_digest
    if binding.checkpoint is not None:
        claims["checkpoint"] = binding.checkpoint
    if binding.use != 1:
        claims["use"] = binding.use
    mac = hmac.digest(key, canonical_bytes(claims), "sha256")
    return {"opToken": claims, "signature": base64.urlsafe_b64encode(mac).rstrip(b"=").decode()}


def sign_l2(
    key: bytes, grant: Grant, binding: Binding, *, statement: bytes, proofs: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """Return an L1 token with the statement that people signed and their proofs beside it. Raises NotCanonical.

    ``statement``: its exact bytes; their digest goes into the signed members, whatever ``binding`` says of it.
    """
    digest = hashlib.sha256(STATEMENT_DOMAIN + statement).hexdigest()
    token = sign_l1(key, grant, replace(binding, statement_digest=digest))
    encoded = base64.urlsafe_b64encode(statement).rstrip(b"=").decode()
    return {**token, "statement": encoded, "proofs": [dict(proof) for proof in proofs]}


def _spec_claims(grant: Grant) -> dict[str, object]:
    return {
        "operation": str(grant.operation),
        "modelId": grant.model_id,
        "issuedAt": grant.issued_at,
        "signers": list(grant.signers),
        "nonce": grant.nonce,
    }
