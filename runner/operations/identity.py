"""Who this box is: an Ed25519 key that never leaves it and the runner id that names that key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from runner.errors import ConfigError
from runner.operations.private_files import read_private, write_private
from wire.optoken import make_runner_id

FILE_NAME = "identity.key"


@dataclass(frozen=True, slots=True)
class Identity:
    """``public_key``: SPKI DER. ``certified_id``: the name of the box with the fingerprint of that key. ``is_new``: it was made
    just now, so nobody has approved anything for it yet.
    """

    private_key: Ed25519PrivateKey = field(repr=False)
    public_key: bytes
    certified_id: str
    is_new: bool = False


def load_identity(data: Path, name: str) -> Identity:
    """Return the identity that lies in ``data``, made at the first start. Raises ConfigError, naming what is wrong with it."""
    path = data / FILE_NAME
    try:
        content = read_private(path)
        if content is None:
            key = Ed25519PrivateKey.generate()
            write_private(path, _encode(key))
        else:
            key = _decode(content)
    except OSError as error:
        raise ConfigError(f"the key of this box, {path}, cannot be used: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{path} is not an Ed25519 key; put back the one that was there, or remove it: then the box gets a new runner id"
        ) from None
    public_key = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        return Identity(key, public_key, make_runner_id(name, public_key), is_new=content is None)
    except ValueError as error:
        raise ConfigError(f"--name {name!r} cannot be part of a runner id: {error}") from None


def _encode(key: Ed25519PrivateKey) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _decode(content: bytes) -> Ed25519PrivateKey:
    key = serialization.load_pem_private_key(content, None)
    if not isinstance(key, Ed25519PrivateKey):
        raise TypeError("a key of another kind")
    return key
