"""Cipher of credentials that have to be sent in clear later and so cannot be kept as a hash."""

from __future__ import annotations

import base64

from cryptography.fernet import Fernet
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


def derive_cipher(secret_key: str, *, purpose: str) -> Fernet:
    """Return the cipher of one purpose.

    ``secret_key``: the installation's, which is not in the database. Ciphers of two purposes cannot read each other's texts.
    """
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose.encode()).derive(secret_key.encode())
    return Fernet(base64.urlsafe_b64encode(derived))
