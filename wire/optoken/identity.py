"""The name of a box that certifies itself: it carries the fingerprint of the box's own key, so nobody else can answer to it."""

from __future__ import annotations

import hmac

from wire.limits import WIRE
from wire.optoken.approval import fingerprint_key


def make_runner_id(name: str, public_key: bytes) -> str:
    """Return ``<name>#<26 letters and digits of SHA-256(public_key)>``. ``public_key``: Ed25519 as SPKI DER.

    Raises ValueError for a name that could be read in two ways.
    """
    if not (0 < len(name) <= WIRE.node_name_chars and name.isprintable() and name == name.strip() and "#" not in name):
        raise ValueError(f"the name of a box is 1 to {WIRE.node_name_chars} printable characters without # and outer blanks")
    return f"{name}#{fingerprint_key(public_key)}"


def owns_runner_id(runner_id: str, public_key: bytes) -> bool:
    """Return whether ``runner_id`` was made from this key, so that what the key signs speaks for that box."""
    name, mark, fingerprint = runner_id.partition("#")
    return bool(name and mark) and hmac.compare_digest(fingerprint.encode(), fingerprint_key(public_key).encode())
