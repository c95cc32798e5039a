"""Child processes that cannot outlive us, and process ids that cannot be mistaken for somebody else's."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from core.limits import limits
from wire import clock

_PR_SET_PDEATHSIG = 1
_PROC = Path("/proc")
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def raise_file_limit() -> None:
    """Let us, and whatever we start, open as many files as the system lets us, up to ``open_files``: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for wanted in (limits().launcher.open_files, 10_240):  # macOS says "no limit", and refuses more than its OPEN_MAX
        bounded = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        if soft == resource.RLIM_INFINITY or bounded <= soft:
            return
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (bounded, hard))
            return


@dataclass(frozen=True, slots=True)
class UserIdentity:
    """The numeric user and group that a child runs as."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. ``death_signal`` is what the kernel sends the child when we die (Linux), ``sockets`` what it inherits."""

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    user: UserIdentity | None = None
    death_signal: signal.Signals = signal.SIGKILL
    sockets: tuple[int, ...] = ()


def spawn(command: Command, log: IO[bytes] | int) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session of its own, its output appended to ``log``, its input closed.

    Must be called from the main thread: Linux ties the death signal to the thread that forked. Raises OSError.
    """
    user = command.user
    return subprocess.Popen(
        list(command.argv),
        env=dict(command.env),
        cwd=command.cwd,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        pass_fds=command.sockets,
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=[] if user else None,
        preexec_fn=_tie_to_parent(command.death_signal),  # noqa: PLW1509  # this program has one thread
    )


def _tie_to_parent(death_signal: signal.Signals) -> Callable[[], None] | None:
    """Return what the child runs before exec, so that it dies with us; None where the system has no such thing."""
    if _LIBC is None:
        return None
    parent = os.getpid()
    prctl = _LIBC.prctl

    def arm() -> None:
        prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return arm


def identify(pid: int) -> str | None:
    """Return a text that this process id will never have again once the process is gone, or None when there is none.

    Linux: boot id and start time in clock ticks. Elsewhere: what ``ps`` prints as the start time.
    """
    if _PROC.joinpath("self").exists():
        try:
            stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
            boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        except OSError:
            return None
        fields = stat.rpartition(")")[2].split()
        return None if fields[0] in {"Z", "X"} else f"{boot}/{fields[19]}"
    answer = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.stdout.strip() or None


def is_alive(pid: int, identity: str) -> bool:
    """Return whether ``pid`` is still the very process that had ``identity``."""
    return identify(pid) == identity


def read_command_line(pid: int) -> str:
    """Return the command line of a process, or an empty text when it cannot be read."""
    if _PROC.joinpath("self").exists():
        try:
            raw = (_PROC / str(pid) / "cmdline").read_bytes()
        except OSError:
            return ""
        return raw.replace(b"\0", b" ").decode(errors="replace").strip()
    answer = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return answer.stdout.strip()


def find_by_directory(directory: Path) -> list[int]:
    """Return the processes whose working directory is ``directory`` (Linux; elsewhere always empty)."""
    if not _PROC.joinpath("self").exists():
        return []
    wanted = os.path.realpath(directory)
    found = []
    for entry in os.listdir(_PROC):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if os.readlink(_PROC / entry / "cwd") == wanted and identify(int(entry)):
                    found.append(int(entry))
            except OSError:
                continue
    return found


def find_by_variable(name: str, value: str) -> list[int]:
    """Return the processes that were started with ``name=value`` in their environment (Linux; elsewhere always empty)."""
    if not _PROC.joinpath("self").exists():
        return []
    wanted = f"{name}={value}".encode()
    found = []
    for entry in os.listdir(_PROC):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                if wanted in (_PROC / entry / "environ").read_bytes().split(b"\0") and identify(int(entry)):
                    found.append(int(entry))
            except OSError:
                continue
    return found


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may already be gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def send_group(pgid: int, number: signal.Signals) -> None:
    """Signal a process group that may already be gone. A zombie-only group answers EPERM on macOS."""
    try:
        os.killpg(pgid, number)
    except (ProcessLookupError, PermissionError):
        pass


def wait_gone(is_gone: Callable[[], bool], deadline_s: float) -> bool:
    """Return whether ``is_gone()`` came true within ``deadline_s``."""
    until = clock.monotonic() + deadline_s
    while not is_gone():
        if clock.monotonic() >= until:
            return False
        clock.sleep(0.02)
    return True
