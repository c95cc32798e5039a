"""Operation token: its canonical bytes, how one is read and signed, the name it is for, and every reason to refuse one.

Reading checks shape alone; nothing read here is believed before ``verifier`` has judged it.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from wire.limits import WIRE
from wire.optoken.approval import MAX_INTEGER, STATEMENT_DOMAIN, encode_bytes, fingerprint_key

Claim = str | int | list[str] | None
"""What a member of ``opToken`` may be; null only where L0 names no model."""

_BASE64URL = re.compile(r"([A-Za-z0-9_-]*)(={0,2})")
_BLANK = " \t\r\n"
_JWT_HEADERS: tuple[dict[str, object], ...] = ({"alg": "HS256"}, {"alg": "HS256", "typ": "JWT"})
"""All that the header of a JWT may say. The algorithm is ours to choose, and no ``kid``, ``jwk`` or URL there chooses a key."""


@dataclass(frozen=True, slots=True)
class SignedToken:
    """A token as received: the signed members, their signature as text, and whatever else came along (unsigned).

    ``jwt_input``: what the signature of a compact JWT covers (RFC 7515 section 5.1); None = the JSON form, whose signature
    covers an encoding of the claims.
    """

    claims: Mapping[str, Claim]
    signature: str
    extra: Mapping[str, object]
    jwt_input: bytes | None = None


def read_token(value: object) -> SignedToken:
    """Return the token in the ``verifiedOpToken`` of a request: an object, its JSON text, base64url of that text, or a compact
    JWT (RFC 7519) whose payload is the ``opToken``.

    Raises OpTokenError (too_large, malformed, duplicate_key, bad_field).
    """
    if isinstance(value, str) and value.count(".") == 2 and not value.lstrip(_BLANK).startswith("{"):
        return _read_jwt(value.strip(_BLANK))
    members = _parse_text(value) if isinstance(value, str) else value
    if not isinstance(members, dict):
        raise OpTokenError(Reason.MALFORMED)
    _check_size(members)
    claims, signature = members.get("opToken"), members.get("signature")
    if not (isinstance(claims, dict) and isinstance(signature, str)):
        raise OpTokenError(Reason.BAD_FIELD)
    _check_claims(claims)
    extra = {name: item for name, item in members.items() if name not in {"opToken", "signature"}}
    return SignedToken(MappingProxyType(dict(claims)), signature, MappingProxyType(extra))


def encode_token(token: Mapping[str, object]) -> str:
    """Return a token object as unpadded base64url of its canonical JSON, the form that fits into one string."""
    return encode_bytes(canonical_bytes(dict(token)))


def decode_base64url(text: str) -> bytes | None:
    """Return the bytes of base64url text; None when it is not the one encoding of them. Padding may be left out."""
    match = _BASE64URL.fullmatch(text)
    if match is None or (match.group(2) and len(text) % 4) or len(match.group(1)) % 4 == 1:
        return None
    body = match.group(1)
    decoded = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    # Unused bits of the last character must be zero, or one signature would have several spellings.
    return decoded if encode_bytes(decoded) == body else None


def _read_jwt(text: str) -> SignedToken:
    if _is_long(text):
        raise OpTokenError(Reason.TOO_LARGE)
    signed, _, signature = text.rpartition(".")
    header, claims = (_parse_segment(segment) for segment in signed.split("."))
    if header not in _JWT_HEADERS or not isinstance(claims, dict):
        raise OpTokenError(Reason.MALFORMED)
    _check_size(claims)
    _check_claims(claims)
    # A JWT carries claims alone, so never the proofs that L2 asks for.
    return SignedToken(MappingProxyType(dict(claims)), signature, MappingProxyType({}), signed.encode())


def _check_size(members: Mapping[str, object]) -> None:
    try:
        size = len(canonical_bytes(members))
    except NotCanonical:
        raise OpTokenError(Reason.MALFORMED) from None
    if size > WIRE.token_bytes:
        raise OpTokenError(Reason.TOO_LARGE)


def _parse_segment(segment: str) -> object:
    decoded = None if segment.endswith("=") else decode_base64url(segment)
    if decoded is None:
        raise OpTokenError(Reason.MALFORMED)
    try:
        return _parse_json(decoded.decode())
    except UnicodeDecodeError:
        raise OpTokenError(Reason.MALFORMED) from None


def _check_claims(claims: Mapping[str, object]) -> None:
    if not all(_is_claim(name, item) for name, item in claims.items()):
        raise OpTokenError(Reason.BAD_FIELD)


def _is_long(text: str) -> bool:
    # Base64 makes four characters of three bytes.
    return len(text) > (WIRE.token_bytes + 2) // 3 * 4


def _parse_text(text: str) -> object:
    if _is_long(text):
        raise OpTokenError(Reason.TOO_LARGE)
    text = text.strip(_BLANK)
    if text.startswith("{"):
        return _parse_json(text)
    decoded = decode_base64url(text)
    if decoded is None:
        raise OpTokenError(Reason.MALFORMED)
    try:
        return _parse_json(decoded.decode())
    except UnicodeDecodeError:
        raise OpTokenError(Reason.MALFORMED) from None


def _parse_json(text: str) -> object:
    if len(text) > WIRE.token_bytes:
        raise OpTokenError(Reason.TOO_LARGE)
    try:
        # Floats and NaN get through here; they have no canonical form.
        parsed: object = json.loads(text, object_pairs_hook=_unique, parse_int=_read_integer)
    except (ValueError, RecursionError):
        raise OpTokenError(Reason.MALFORMED) from None
    return parsed


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise OpTokenError(Reason.DUPLICATE_KEY)
    return members


def _read_integer(digits: str) -> int:
    # It would become 0, which is spelled otherwise.
    if digits == "-0":
        raise OpTokenError(Reason.MALFORMED)
    return int(digits)


def _is_claim(name: str, value: object) -> bool:
    match value:
        case bool():  # which Python takes for a whole number
            return False
        case None:
            return name == "modelId"
        case str() | int():
            return True
        case list():
            return all(isinstance(item, str) for item in value)
        case _:
            return False


TOKEN_MEMBER = "verifiedOpToken"  # noqa: S105 - the name of a member
_PARAMS_DOMAIN = b"op-params/v1\x00"


class NotCanonical(ValueError):
    """The value has no canonical form: a float, a key beyond ASCII, a lone surrogate, too deep, or not JSON at all."""


def canonical_bytes(value: object) -> bytes:
    """Return the RFC 8785 encoding of a JSON value without floats.

    Raises NotCanonical.
    """
    _check(value, depth=0)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True).encode()
    except UnicodeEncodeError:
        raise NotCanonical("text with a lone surrogate") from None


def spec_bytes(claims: Mapping[str, object]) -> bytes:
    """Return what an L0 signature covers: Python's own JSON with sorted keys, a space behind ``,`` and ``:``, ASCII only.

    No object has the same bytes here and in ``canonical_bytes``, so a signature of one level never holds at the other.
    """
    return json.dumps(dict(claims), sort_keys=True).encode()


def params_digest(params: Mapping[str, object]) -> str:
    """Return the digest of a request's parameters: 64 hex digits of a domain-separated SHA-256.

    ``params`` are all members of the request body. The member that holds the token is left out, and so are members that are
    null, which a caller may just as well not send. Raises NotCanonical.
    """
    covered = {name: value for name, value in params.items() if name != TOKEN_MEMBER and value is not None}
    return hashlib.sha256(_PARAMS_DOMAIN + canonical_bytes(covered)).hexdigest()


def _check(value: object, *, depth: int) -> None:
    if depth > WIRE.token_depth:
        raise NotCanonical(f"nested deeper than {WIRE.token_depth}")
    match value:
        case None | bool() | str():
            return
        case int():
            # The largest that a JSON reader with doubles holds exactly (RFC 7493 section 2.2).
            if abs(value) > MAX_INTEGER:
                raise NotCanonical("an integer beyond 2^53")
        case list() | tuple():
            for item in value:
                _check(item, depth=depth + 1)
        case dict():
            for name, item in value.items():
                if not (isinstance(name, str) and name.isascii()):
                    raise NotCanonical("a key that is not ASCII text")
                _check(item, depth=depth + 1)
        case _:
            raise NotCanonical(f"a value of type {type(value).__name__}")


class Reason(StrEnum):
    """The check that failed first."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"
    """Not an object, its JSON text or base64url of it; or JSON beyond the strict subset."""
    DUPLICATE_KEY = "duplicate_key"
    BAD_FIELD = "bad_field"
    """A member is missing, of the wrong type, out of range, or unknown in a format that is closed."""
    UNKNOWN_VERSION = "unknown_version"
    LEVEL_TOO_LOW = "level_too_low"
    UNKNOWN_KEY = "unknown_key"
    BAD_SIGNATURE = "bad_signature"
    WRONG_AUDIENCE = "wrong_audience"
    EXPIRED = "expired"
    NOT_YET_VALID = "not_yet_valid"
    LIFETIME_TOO_LONG = "lifetime_too_long"
    BEFORE_LEDGER = "before_ledger"
    """Issued, or at L2 asked for, before this node began to remember operations, so it may have been carried out already."""
    WRONG_OPERATION = "wrong_operation"
    WRONG_MODEL = "wrong_model"
    UNSIGNABLE_PARAMS = "unsignable_params"
    """The request has a parameter without canonical form (a float); no token can cover it."""
    WRONG_PARAMS = "wrong_params"
    TOO_FEW_SIGNERS = "too_few_signers"
    REPLAYED = "replayed"
    STALE_FENCE = "stale_fence"
    LEDGER_FULL = "ledger_full"
    NO_POLICY = "no_policy"
    """This node wants proofs and has no policy yet to judge them by."""
    WRONG_STATEMENT = "wrong_statement"
    """The statement is not the one that the token was issued for."""
    WRONG_TARGET = "wrong_target"
    """People approved this for other nodes."""
    NOT_APPROVED = "not_approved"
    """The proofs do not make an approval; ``OpTokenError.rule`` says which rule refused them."""


class OpTokenError(Exception):
    """A token that is not accepted. The text is the reason, with the rule where there is one: nothing of the token.

    ``rule``: a value of ``approval.Rule``, or "".
    """

    def __init__(self, reason: Reason, *, rule: str = "") -> None:
        super().__init__(f"{reason.value} ({rule})" if rule else reason.value)
        self.reason = reason
        self.rule = rule


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
    """What an L1 token says beside: for which node, which parameters (see ``params_digest``), which approval, which order.

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
    signed = f"{encode_bytes(header)}.{encode_bytes(payload)}"
    return f"{signed}.{encode_bytes(hmac.digest(key, signed.encode(), 'sha256'))}"


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
    return {"opToken": claims, "signature": encode_bytes(mac)}


def sign_l2(
    key: bytes, grant: Grant, binding: Binding, *, statement: bytes, proofs: Sequence[Mapping[str, object]]
) -> dict[str, object]:
    """Return an L1 token with the statement that people signed and their proofs beside it. Raises NotCanonical.

    ``statement``: its exact bytes; their digest goes into the signed members, whatever ``binding`` says of it.
    """
    digest = hashlib.sha256(STATEMENT_DOMAIN + statement).hexdigest()
    token = sign_l1(key, grant, replace(binding, statement_digest=digest))
    return {**token, "statement": encode_bytes(statement), "proofs": [dict(proof) for proof in proofs]}


def _spec_claims(grant: Grant) -> dict[str, object]:
    return {
        "operation": str(grant.operation),
        "modelId": grant.model_id,
        "issuedAt": grant.issued_at,
        "signers": list(grant.signers),
        "nonce": grant.nonce,
    }


def make_runner_id(name: str, public_key: bytes) -> str:
    """Return ``<name>#<26 letters and digits of SHA-256(public_key)>``. ``public_key``: Ed25519 as SPKI DER.

    Raises ValueError for a name that could be read in two ways.
    """
    if not (0 < len(name) <= WIRE.node_name_chars and name.isprintable() and name == name.strip() and "#" not in name):
        raise ValueError(f"the name of a node is 1 to {WIRE.node_name_chars} printable characters without # and outer blanks")
    return f"{name}#{fingerprint_key(public_key)}"


def owns_runner_id(runner_id: str, public_key: bytes) -> bool:
    """Return whether ``runner_id`` was made from this key, so that what the key signs speaks for that node."""
    name, mark, fingerprint = runner_id.partition("#")
    return bool(name and mark) and hmac.compare_digest(fingerprint.encode(), fingerprint_key(public_key).encode())
