"""The key files that operation tokens are checked with, read again whenever they change."""

from __future__ import annotations

import logging
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.errors import OperationsDisabled
from runner.limits import limits
from wire.limits import WIRE

log = logging.getLogger(__name__)

KEY_SUFFIX = ".key"
_KID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class UnusableKey(ValueError):
    """A key file that is missing, unreadable, empty, too short or too long; the text names it."""


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What tells one content of a file from the next without reading it."""

    path: Path
    modified_ns: int
    size_bytes: int
    inode: int
    mode: int


class KeyRing:
    """The keys at ``path``: one file, whose key has the id ``""``, or a folder of ``<kid>.key`` files.

    A key is all bytes of its file but one newline at the end. To retire a key, remove its file. Used by one thread at a time.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamps: tuple[_Stamp, ...] | None = None
        self._keys: Mapping[str, bytes] = {}
        self._warned: set[Path] = set()

    def read(self) -> Mapping[str, bytes]:
        """Return the keys by id as they are on disk now. Raises OperationsDisabled, naming the file, when none is usable."""
        if self._path is None:
            raise OperationsDisabled("No operation key is configured; set VERIFIED_OP_TOKEN_KEY_PATH to allow operations.")
        try:
            is_folder = self._path.is_dir()
            stamps = tuple(_stamp(path) for path in self._list(is_folder=is_folder))
            if stamps != self._stamps:
                self._keys, self._stamps = self._load(stamps, is_folder=is_folder), stamps
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

    def _load(self, stamps: tuple[_Stamp, ...], *, is_folder: bool) -> Mapping[str, bytes]:
        for stamp in stamps:
            self._warn_if_shared(stamp)
        if not is_folder:
            return {"": read_key(stamps[0].path)}
        keys: dict[str, bytes] = {}
        for stamp in stamps:
            try:
                keys[stamp.path.stem] = read_key(stamp.path)
            except UnusableKey as error:
                log.error("operation key is left out: %s", error)  # noqa: TRY400 - the other keys go on working
        if not keys:
            raise UnusableKey(f"no usable *{KEY_SUFFIX} file in {self._path}")
        return keys

    def _warn_if_shared(self, stamp: _Stamp) -> None:
        if stamp.mode & (stat.S_IRWXG | stat.S_IRWXO) and stamp.path not in self._warned:
            self._warned.add(stamp.path)
            log.warning("operation key is open to other users; run chmod 600 on it file=%s", stamp.path)


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


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise UnusableKey(_describe(path, error)) from None
    return _Stamp(path, found.st_mtime_ns, found.st_size, found.st_ino, found.st_mode)


def _describe(path: Path, error: OSError | UnusableKey) -> str:
    return f"the key file {path} cannot be read: {error.strerror}" if isinstance(error, OSError) else str(error)
