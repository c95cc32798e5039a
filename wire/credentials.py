"""Credentials: the printed form of every bearer, ``<kind>_<keyid>_<secret><crc>``, and the cipher of what cannot be a hash.

``kind`` says what the credential may do and is part of the text, so a client key can never be taken for a worker's.
``keyid`` is public and is what the database looks up. ``secret`` carries 190 bits. ``crc`` is the CRC-32 of all that
stands before it, so a scanner can tell a leaked credential from noise without asking us.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import secrets
import zlib
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CRC_LENGTH = 6

CREDENTIAL_PATTERN = r"\b(mst|msw|msa)_[0-9A-Za-z]{12}_[0-9A-Za-z]{38}\b"
"""The published pattern for secret scanners."""
_CREDENTIAL_RE = re.compile(r"(mst|msw|msa)_([0-9A-Za-z]{12})_([0-9A-Za-z]{38})\Z")


class CredentialKind(StrEnum):
    """The three kinds of bearer; one can never stand in for another."""

    CLIENT = "mst"
    WORKER = "msw"
    ADMIN = "msa"


@dataclass(frozen=True, slots=True)
class MintedCredential:
    """A new credential. ``text`` is shown once and never stored; ``digest`` is the SHA-256 that is."""

    kind: CredentialKind
    keyid: str
    text: str
    digest: bytes


def mint_credential(kind: CredentialKind) -> MintedCredential:
    """Return a fresh random credential of ``kind``."""
    keyid = _random_text(12)
    head = f"{kind.value}_{keyid}_{_random_text(32)}"
    text = head + _checksum(head)
    return MintedCredential(kind=kind, keyid=keyid, text=text, digest=digest_credential(text))


@lru_cache(maxsize=8)
def derive_credential(kind: CredentialKind, secret: str, *, secret_key: str) -> MintedCredential:
    """Return the credential that stands for a secret of the operator's own: the same each time under one ``secret_key``.

    Who has the database alone can try no guesses on what is stored of it.
    """
    info = f"muster own {kind.value}".encode()
    number = int.from_bytes(HKDF(algorithm=SHA256(), length=64, salt=secret_key.encode(), info=info).derive(secret.encode()))
    digits = []
    for _ in range(44):
        number, rest = divmod(number, 62)
        digits.append(_ALPHABET[rest])
    head = f"{kind.value}_{''.join(digits[:12])}_{''.join(digits[12:])}"
    text = head + _checksum(head)
    return MintedCredential(kind=kind, keyid=head[4:16], text=text, digest=digest_credential(text))


def stand_in(text: str, own: str, kind: CredentialKind, *, secret_key: str) -> str:
    """Return the credential that stands for ``own`` when ``text`` is that secret of the operator's own, else ``text``."""
    if not own or not hmac.compare_digest(text.encode(), own.encode()) or is_credential(own):
        return text
    return derive_credential(kind, own, secret_key=secret_key).text


def is_credential(text: str) -> bool:
    """Return whether a text has the form of a credential that Muster makes, of whatever kind."""
    return _CREDENTIAL_RE.match(text) is not None


def parse_keyid(text: str, kind: CredentialKind) -> str | None:
    """Return the public key id of a well-formed credential of ``kind``, else None. Says nothing about validity."""
    keyid = read_keyid(text, kind)
    return keyid if keyid is not None and has_good_checksum(text) else None


def read_keyid(text: str, kind: CredentialKind) -> str | None:
    """Return the key id by shape alone; cheap, for callers that compare the whole digest next."""
    match = _CREDENTIAL_RE.match(text)
    return match.group(2) if match is not None and match.group(1) == kind.value else None


def has_good_checksum(text: str) -> bool:
    """Return whether the last characters of a credential are the CRC-32 of the rest."""
    return text[-_CRC_LENGTH:] == _checksum(text[:-_CRC_LENGTH])


def digest_credential(text: str) -> bytes:
    """Return the 32-byte SHA-256 under which a credential is stored."""
    return hashlib.sha256(text.encode()).digest()


def verify_credential(text: str, digest: bytes) -> bool:
    """Return whether ``text`` is the credential stored as ``digest``, in constant time."""
    return hmac.compare_digest(digest_credential(text), digest)


def _random_text(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def _checksum(head: str) -> str:
    number = zlib.crc32(head.encode())
    digits = []
    for _ in range(_CRC_LENGTH):
        number, rest = divmod(number, 62)
        digits.append(_ALPHABET[rest])
    return "".join(reversed(digits))


def derive_cipher(secret_key: str, *, purpose: str) -> Fernet:
    """Return the cipher of credentials that have to be sent in clear later, for one purpose.

    ``secret_key``: the installation's, which is not in the database. Ciphers of two purposes cannot read each other's texts.
    """
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose.encode()).derive(secret_key.encode())
    return Fernet(base64.urlsafe_b64encode(derived))
