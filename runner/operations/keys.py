"""Keys of a runner: those that op tokens are checked with, those that it makes itself, and the one that it signs with.

They lie in small files that only their owner reads, replaced whole and on disk before anybody relies on them.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from runner.errors import ConfigError, OperationsDisabled
from runner.limits import limits
from runner.system import sync_folder
from wire.limits import WIRE
from wire.optoken.op_token import make_runner_id

log = logging.getLogger(__name__)

IDENTITY_NAME = "identity.key"
OP_KEYS_NAME = "op-keys"
"""The folder of the keys that the runner makes itself."""
KEY_SUFFIX = ".key"
_KID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OWN_KID = re.compile(r"(\d{10})-[0-9a-f]{4}")


def write_private(path: Path, content: bytes) -> None:
    """Replace a file in one step, readable by its owner alone. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_private(path: Path) -> bytes | None:
    """Return the content of a file, None when there is none. Raises OSError, and ValueError beyond 4096 bytes."""
    try:
        with path.open("rb") as file:
            content = file.read(limits().operations.key_bytes + 1)
    except FileNotFoundError:
        return None
    if len(content) > limits().operations.key_bytes:
        raise ValueError(f"{path} has more than {limits().operations.key_bytes} bytes")
    return content


def remove_private(path: Path) -> None:
    """Remove a file, if it is there, for good. Raises OSError."""
    path.unlink(missing_ok=True)
    sync_folder(path.parent)


class UnusableKey(ValueError):
    """A key file that is missing, unreadable, empty, too short or too long; the text names it."""


class KeyRing:
    """The keys at ``path``: one file, whose key has the id ``""``, or a folder of ``<kid>.key`` files.

    A key is all bytes of its file but one newline at the end. To retire a key, remove its file. Used by one thread at a time.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamps: dict[Path, tuple[int, ...]] | None = None
        """What tells one content of a file from the next without reading it."""
        self._keys: Mapping[str, bytes] = {}
        self._warned: set[Path] = set()

    def read(self) -> Mapping[str, bytes]:
        """Return the keys by id as they are on disk now. Raises OperationsDisabled, naming the file, when none is usable."""
        if self._path is None:
            raise OperationsDisabled("No operation key is configured; set VERIFIED_OP_TOKEN_KEY_PATH to allow operations.")
        try:
            is_folder = self._path.is_dir()
            stamps = {path: self._stamp(path) for path in self._list(is_folder=is_folder)}
            if stamps != self._stamps:
                self._keys, self._stamps = self._load(list(stamps), is_folder=is_folder), stamps
        except (OSError, UnusableKey) as error:
            log.error("operations are disabled: %s", _describe(self._path, error))  # noqa: TRY400 - nothing to trace
            raise OperationsDisabled(f"Operations are disabled: {_describe(self._path, error)}.") from None
        return self._keys

    def _list(self, *, is_folder: bool) -> list[Path]:
        assert self._path is not None
        if not is_folder:
            return [self._path]
        found = [path for path in self._path.iterdir() if path.suffix == KEY_SUFFIX and _KID.fullmatch(path.stem)]
        if len(found) > limits().operations.keys:
            raise UnusableKey(f"more than {limits().operations.keys} keys in {self._path}")
        return sorted(found)

    def _load(self, paths: list[Path], *, is_folder: bool) -> Mapping[str, bytes]:
        if not is_folder:
            return {"": read_key(paths[0])}
        keys: dict[str, bytes] = {}
        for path in paths:
            try:
                keys[path.stem] = read_key(path)
            except UnusableKey as error:
                log.error("operation key is left out: %s", error)  # noqa: TRY400 - the other keys go on working
        if not keys:
            raise UnusableKey(f"no usable *{KEY_SUFFIX} file in {self._path}")
        return keys

    def _stamp(self, path: Path) -> tuple[int, ...]:
        try:
            found = path.stat()
        except OSError as error:
            raise UnusableKey(_describe(path, error)) from None
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO) and path not in self._warned:
            self._warned.add(path)
            log.warning("operation key is open to other users; run chmod 600 on it file=%s", path)
        return found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode


def read_key(path: Path) -> bytes:
    """Return the key in a file. Raises UnusableKey; the text names the file and never shows its content."""
    try:
        with path.open("rb") as file:
            content = file.read(limits().operations.key_bytes + 1)
    except OSError as error:
        raise UnusableKey(_describe(path, error)) from None
    key = content.removesuffix(b"\n").removesuffix(b"\r")
    if len(content) > limits().operations.key_bytes:
        raise UnusableKey(f"the key file {path} has more than {limits().operations.key_bytes} bytes")
    if not key:
        raise UnusableKey(f"the key file {path} is empty")
    if len(key) < WIRE.token_least_key_bytes:
        raise UnusableKey(f"the key file {path} has fewer than {WIRE.token_least_key_bytes} bytes")
    return key


def _describe(path: Path, error: OSError | UnusableKey) -> str:
    return f"the key file {path} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)


class TooManyKeys(Exception):
    """As many keys are valid as may be; the oldest are dropped a day after they were replaced."""


class OpKeys:
    """The keys in ``folder``, one file ``<kid>.key`` each. A kid begins with the Unix second in which its key was made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def list_kids(self) -> list[str]:
        """Return the ids of the keys, the newest last. Raises OSError."""
        if not self.folder.is_dir():
            return []
        return sorted(path.stem for path in self.folder.glob(f"*{KEY_SUFFIX}") if _OWN_KID.fullmatch(path.stem))

    def read(self) -> dict[str, bytes]:
        """Return the keys by id, the newest last. Raises OSError and UnusableKey."""
        return {kid: read_key(self._path(kid)) for kid in self.list_kids()}

    def ensure(self, now: float) -> None:
        """Make the first key. Raises OSError."""
        if not self.list_kids():
            self._make(int(now))

    def renew(self, now: float) -> str:
        """Make another key and return its id; those before it are good for a day more. Raises TooManyKeys and OSError."""
        self.drop_retired(now)
        kids = self.list_kids()
        if len(kids) >= limits().operations.op_keys:
            raise TooManyKeys(f"{len(kids)} keys are valid, the most there may be; the oldest is dropped within a day")
        # Above the newest even when the clock was set back, since the order of the ids is that of their age.
        return self._make(max(int(now), _made_at(kids[-1]) + 1 if kids else 0))

    def drop_retired(self, now: float) -> list[str]:
        """Remove every key whose successor was made a day ago; return their ids. Raises OSError."""
        kids = self.list_kids()
        retired = [
            kid for kid, successor in pairwise(kids) if _made_at(successor) + limits().operations.op_key_overlap_s <= now
        ]
        for kid in retired:
            self._path(kid).unlink(missing_ok=True)
        if retired:
            sync_folder(self.folder)
        return retired

    def _make(self, made_at: int) -> str:
        kid = f"{made_at:010d}-{secrets.token_hex(2)}"
        # Text, because readers of key files take one newline off the end.
        write_private(self._path(kid), secrets.token_hex(32).encode())
        return kid

    def _path(self, kid: str) -> Path:
        return self.folder / f"{kid}{KEY_SUFFIX}"


def _made_at(kid: str) -> int:
    return int(kid.partition("-")[0])


@dataclass(frozen=True, slots=True)
class Identity:
    """``public_key``: SPKI DER. ``certified_id``: the name of the node with the fingerprint of that key. ``is_new``: it was
    made just now, so nobody has approved anything for it yet.
    """

    private_key: Ed25519PrivateKey = field(repr=False)
    public_key: bytes
    certified_id: str
    is_new: bool = False


def load_identity(data: Path, name: str) -> Identity:
    """Return the identity that lies in ``data``, made at the first start. Raises ConfigError, naming what is wrong with it."""
    path = data / IDENTITY_NAME
    try:
        content = read_private(path)
        if content is None:
            key = Ed25519PrivateKey.generate()
            pem = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
            write_private(path, key.private_bytes(*pem))
        else:
            found = serialization.load_pem_private_key(content, None)
            if not isinstance(found, Ed25519PrivateKey):
                raise TypeError("a key of another kind")
            key = found
    except OSError as error:
        raise ConfigError(f"the key of this node, {path}, cannot be used: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigError(
            f"{path} is not an Ed25519 key; put back the one that was there, or remove it: then the node gets a new runner id"
        ) from None
    public_key = key.public_key().public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    try:
        return Identity(key, public_key, make_runner_id(name, public_key), is_new=content is None)
    except ValueError as error:
        raise ConfigError(f"--name {name!r} cannot be part of a runner id: {error}") from None
