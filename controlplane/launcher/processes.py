"""Child processes that cannot outlive us, and process ids that cannot be mistaken for somebody else's.

On Linux a child that needs what this process has loaded is a fork of it: both share that memory, and it starts at once.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import io
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import psutil

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
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class Command:
    """What to run. ``death_signal`` is what the kernel sends the child when we die (Linux), ``sockets`` what it inherits.

    ``program``: a module and the arguments of its ``main()``, which a fork of this process runs; empty = ``argv`` is executed.
    """

    argv: Sequence[str]
    env: Mapping[str, str]
    cwd: Path
    user: UserIdentity | None = None
    death_signal: signal.Signals = signal.SIGKILL
    sockets: tuple[int, ...] = ()
    program: tuple[str, ...] = ()


class Fork:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status

    def wait(self) -> int:
        """Wait for its end and return the exit status."""
        if self._status is None:
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._status


Child = Fork | subprocess.Popen[bytes]


def preload(environment: Mapping[str, str], load: Callable[[], None]) -> bool:
    """Load with these variables what forked children share; return whether children can be forked now."""
    # The libraries of macOS do not bear a fork.
    if sys.platform != "linux":
        return False
    before = dict(os.environ)
    try:
        importlib.import_module("setproctitle").getproctitle()  # it looks for our command line beside the first environment
        os.environ.update(environment)
        load()
    # Each child that is then executed reports the same error in its own log.
    except Exception:  # noqa: BLE001 - see above
        return False
    finally:
        os.environ.clear()
        os.environ.update(before)
    gc.collect()
    gc.freeze()  # a collection in a child would write to every page that it shares
    return True


def start(command: Command, log: IO[bytes]) -> Child:
    """Start a child by ``fork`` if the command names a program, otherwise by ``spawn``. Raises OSError."""
    return fork(command, log) if command.program else spawn(command, log)


def fork(command: Command, log: IO[bytes]) -> Fork:
    """Run the program of ``command`` in a fork of this process, as ``spawn`` does it. Raises OSError."""
    tie = _tie_to_parent(command.death_signal)
    sys.stdout.flush()  # the child would say once more what waits here
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        _run_program(command, log.fileno(), tie)
    return Fork(pid)


def _run_program(command: Command, log: int, tie: Callable[[], None] | None) -> NoReturn:
    """Leave everything of the parent but its memory, run the program, and end without a step into the frames of the parent."""
    status: object = 1
    try:
        os.setsid()
        if tie is not None:
            tie()
        signal.set_wakeup_fd(-1)
        for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(each, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (log, 1), (log, 2)):
            os.dup2(number, target)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in command.sockets:
                with suppress(OSError):  # the one by which they are listed is closed already
                    os.close(int(name))
        os.chdir(command.cwd)
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)
        os.environ.clear()
        os.environ.update(command.env)
        sys.argv = list(command.program)
        importlib.import_module("setproctitle").setproctitle(" ".join(command.argv))
        status = importlib.import_module(command.program[0]).main()
    except SystemExit as ended:
        status = ended.code
    except BaseException:
        logging.getLogger("muster.launcher").exception("program_failed")
    finally:
        if isinstance(status, str):
            sys.stderr.write(status + "\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)


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
        # The parent may have died before the signal was armed.
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    return arm


def identify(pid: int) -> str | None:
    """Return a text that this process id will never have again once the process is gone, or None when there is none.

    Linux: boot id and start time in clock ticks. Elsewhere: what ``ps`` prints as the start time.
    """
    if _PROC.joinpath("self").exists():
        try:
            # Not psutil's time of creation: that moves when the clock of the machine is set.
            stat = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
            # Ticks count from the boot: without its id a process of before a reboot could look like one of now.
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
    try:
        return " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return ""


def find_by_directory(directory: Path) -> list[int]:
    """Return the processes whose working directory is ``directory`` (Linux; elsewhere always empty)."""
    wanted = os.path.realpath(directory)
    return _find(lambda process: process.cwd() == wanted)


def find_by_variable(name: str, value: str) -> list[int]:
    """Return the processes that were started with ``name=value`` in their environment (Linux; elsewhere always empty)."""
    return _find(lambda process: process.environ().get(name) == value)


def _find(matches: Callable[[psutil.Process], bool]) -> list[int]:
    found = []
    for process in psutil.process_iter() if sys.platform == "linux" else ():
        with suppress(psutil.Error, OSError):  # it has ended, or it is not ours to look at
            if process.pid != os.getpid() and matches(process) and identify(process.pid):
                found.append(process.pid)
    return found


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may already be gone."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def send_group(pgid: int, number: signal.Signals) -> None:
    """Signal a process group that may already be gone."""
    # A group of zombies alone answers EPERM on macOS.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pgid, number)


def wait_gone(is_gone: Callable[[], bool], deadline_s: float) -> bool:
    until = clock.monotonic() + deadline_s
    while not is_gone():
        if clock.monotonic() >= until:
            return False
        clock.sleep(0.02)
    return True
