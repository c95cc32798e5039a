"""From what stands in ``verifiedOpToken`` to a token whose shape is right. Nothing here is believed: see ``verifier``."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from wire.limits import WIRE
from wire.optoken.canonical import NotCanonical, canonical_bytes
from wire.optoken.refusal import OpTokenError, Reason

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
    try:
        size = len(canonical_bytes(members))
    except NotCanonical:
        raise OpTokenError(Reason.MALFORMED) from None
    if size > WIRE.token_bytes:
        raise OpTokenError(Reason.TOO_LARGE)
    claims, signature = members.get("opToken"), members.get("signature")
    if not (isinstance(claims, dict) and isinstance(signature, str)):
        raise OpTokenError(Reason.BAD_FIELD)
    _check_claims(claims)
    extra = {name: item for name, item in members.items() if name not in {"opToken", "signature"}}
    return SignedToken(MappingProxyType(dict(claims)), signature, MappingProxyType(extra))


def encode_token(token: Mapping[str, object]) -> str:
    """Return a token object as unpadded base64url of its canonical JSON, the form that fits into one string."""
    return base64.urlsafe_b64encode(canonical_bytes(dict(token))).rstrip(b"=").decode()


def decode_base64url(text: str) -> bytes | None:
    """Return the bytes of base64url text; None when it is not the one encoding of them. Padding may be left out."""
    match = _BASE64URL.fullmatch(text)
    if match is None or (match.group(2) and len(text) % 4) or len(match.group(1)) % 4 == 1:
        return None
    body = match.group(1)
    decoded = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    # Unused bits of the last character must be zero, or one signature would have several spellings.
    return decoded if base64.urlsafe_b64encode(decoded).rstrip(b"=").decode() == body else None


def _read_jwt(text: str) -> SignedToken:
    """Return the token in a compact JWT; it carries claims alone, so never the proofs that L2 asks for."""
    if _is_long(text):
        raise OpTokenError(Reason.TOO_LARGE)
    signed, _, signature = text.rpartition(".")
    header, claims = (_parse_segment(segment) for segment in signed.split("."))
    if header not in _JWT_HEADERS or not isinstance(claims, dict):
        raise OpTokenError(Reason.MALFORMED)
    try:
        size = len(canonical_bytes(claims))
    except NotCanonical:
        raise OpTokenError(Reason.MALFORMED) from None
    if size > WIRE.token_bytes:
        raise OpTokenError(Reason.TOO_LARGE)
    _check_claims(claims)
    return SignedToken(MappingProxyType(dict(claims)), signature, MappingProxyType({}), signed.encode())


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
    """Whether a token in base64 is longer than the largest one can be."""
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
    if digits == "-0":
        raise OpTokenError(Reason.MALFORMED)
    return int(digits)


def _is_claim(name: str, value: object) -> bool:
    match value:
        case bool():
            return False
        case None:
            return name == "modelId"
        case str() | int():
            return True
        case list():
            return all(isinstance(item, str) for item in value)
        case _:
            return False
