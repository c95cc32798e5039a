"""The bytes that are signed. One value has exactly one encoding, whoever writes it.

L1 uses the subset of RFC 8785 on which "keys sorted, compact, UTF-8" is the whole rule: ASCII keys (so that code points and
UTF-16 sort alike), no floats, integers that every JSON reader holds exactly. L0 uses what public runners use.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from wire.limits import WIRE

MAX_INTEGER = 2**53 - 1
"""The largest integer that a JSON reader with doubles holds exactly (RFC 7493 section 2.2)."""

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
