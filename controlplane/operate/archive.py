"""File of a backup: a ZIP of a dump, what the dump is, and keys and settings that a passphrase seals.

``database.dump`` is pg_dump's custom format and ``manifest.json`` says its hash; ``settings.json`` is sealed by scrypt and
AES-256-GCM with the manifest as associated data, so whoever knows the passphrase sees a change of either.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from controlplane.launcher.console import LauncherError
from core.limits import limits

FORMAT = "muster-backup/1"
_DUMP, _MANIFEST, _SETTINGS = "database.dump", "manifest.json", "settings.json"
_SCRYPT = {"n": 2**17, "r": 8, "p": 1}
"""128 MiB and about half a second for each guess (RFC 7914)."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a dump holds. ``server`` and ``tool``: major versions of PostgreSQL; ``tables``: rows of each; sizes in bytes."""

    made_at: str
    release: str
    server: int
    tool: int
    migrations: list[str]
    tables: dict[str, int]
    table_bytes: int
    dump_bytes: int
    dump_sha256: str
    audit_entries: int
    audit_hash: str
    format: str = FORMAT


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys and settings. ``variables``: of the servers, secrets among them; ``files``: of a folder of ``up``, by their path."""

    variables: dict[str, str]
    files: dict[str, str]


class HashingWriter:
    """Counts and hashes what passes into a stream."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._hash = hashlib.sha256()
        self.count = 0

    def write(self, piece: bytes) -> None:
        self._stream.write(piece)
        self._hash.update(piece)
        self.count += len(piece)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()


@contextmanager
def write_archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Yield a ZIP that becomes ``path``, mode 0600, when the block ends well. Raises LauncherError; nothing is left then."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise LauncherError(f"{partial} is there: another backup writes it, or one was killed. Delete it then") from None
    except OSError as error:
        raise LauncherError(f"cannot write {path}: {error.strerror}. Choose another file") from None
    try:
        try:
            with os.fdopen(descriptor, "wb") as stream:
                with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
                    yield archive
                stream.flush()
                os.fsync(stream.fileno())
            # Not a rename: a file that came to be meanwhile is not replaced.
            os.link(partial, path)
        except OSError as error:
            raise LauncherError(f"cannot write {path}: {error.strerror}. Nothing was kept of it") from None
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def open_dump_writer(archive: zipfile.ZipFile) -> Iterator[HashingWriter]:
    with archive.open(_DUMP, "w", force_zip64=True) as stream:
        yield HashingWriter(stream)


def write_rest(archive: zipfile.ZipFile, manifest: Manifest, kept: Kept, passphrase: str) -> None:
    """Add manifest and settings behind the dump, of which only the manifest knows."""
    told = json.dumps(asdict(manifest), indent=1).encode()
    archive.writestr(_MANIFEST, told)
    archive.writestr(_SETTINGS, seal(kept, passphrase, about=told))


def seal(kept: Kept, passphrase: str, *, about: bytes) -> bytes:
    """Return ``kept`` encrypted, as JSON."""
    salt, nonce = os.urandom(16), os.urandom(12)
    sealed = AESGCM(_derive(passphrase, salt)).encrypt(nonce, json.dumps(asdict(kept)).encode(), about)
    parts = {"salt": salt, "nonce": nonce, "sealed": sealed}
    return json.dumps({name: base64.b64encode(part).decode() for name, part in parts.items()}, indent=1).encode()


def _derive(passphrase: str, salt: bytes) -> bytes:
    return Scrypt(salt=salt, length=32, **_SCRYPT).derive(passphrase.encode())


class Archive:
    """A backup that is there. Every method raises LauncherError when the file is not what it should be."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._told = self._read(_MANIFEST)
        self.manifest = self._read_manifest()

    def open_settings(self, passphrase: str) -> Kept:
        try:
            values: dict[str, Any] = json.loads(self._read(_SETTINGS))
            salt, nonce, sealed = (base64.b64decode(values[name]) for name in ("salt", "nonce", "sealed"))
            kept = json.loads(AESGCM(_derive(passphrase, salt)).decrypt(nonce, sealed, self._told))
            return Kept(variables=_read_texts(kept["variables"]), files=_read_texts(kept["files"]))
        except InvalidTag:
            raise LauncherError(f"{self.path}: the passphrase is wrong, or somebody changed the file") from None
        except (ValueError, KeyError, TypeError):
            raise self._broken("its settings cannot be read") from None

    def read_dump(self, on_piece: Callable[[int], None]) -> Iterator[bytes]:
        """Yield the dump in pieces. Its hash must have been compared before anything of it is used."""
        try:
            with zipfile.ZipFile(self.path) as archive, archive.open(_DUMP) as stream:
                while piece := stream.read(limits().console.backup_piece_bytes):
                    on_piece(len(piece))
                    yield piece
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise self._broken(str(error)) from None

    def check_dump(self, on_piece: Callable[[int], None]) -> None:
        """Compare the dump with its hash."""
        digest = hashlib.sha256()
        for piece in self.read_dump(on_piece):
            digest.update(piece)
        if digest.hexdigest() != self.manifest.dump_sha256:
            raise self._broken("the dump is not the one that was written")

    def _read(self, name: str) -> bytes:
        try:
            with zipfile.ZipFile(self.path) as archive:
                if archive.getinfo(name).file_size > limits().console.backup_told_bytes:
                    raise self._broken(f"{name} is too long")
                return archive.read(name)
        except FileNotFoundError:
            raise LauncherError(f"{self.path} does not exist") from None
        except (OSError, zipfile.BadZipFile, KeyError) as error:
            raise self._broken(str(error)) from None

    def _read_manifest(self) -> Manifest:
        try:
            values = json.loads(self._told)
            if values.get("format") != FORMAT:
                raise LauncherError(f"{self.path} has the format {values.get('format')!r}; this release reads {FORMAT}")
            return Manifest(**values)
        except (ValueError, TypeError, AttributeError):
            raise self._broken("its manifest cannot be read") from None

    def _broken(self, why: str) -> LauncherError:
        return LauncherError(f"{self.path} is no whole backup of Muster ({why}). Take another copy of it")


def _read_texts(values: Mapping[str, object]) -> dict[str, str]:
    return {str(name): str(value) for name, value in values.items()}
