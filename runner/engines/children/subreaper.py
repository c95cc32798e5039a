"""Holds a server that has workers of its own, so that none outlives it: ``python -m … PARENT_PID COMMAND [ARG …]``.

The workers of vLLM and TGI live on, with the GPU's memory, when their server is killed. This process starts the server,
passes SIGTERM on, and kills all that descends from it when the server has exited or the runner has died. It is killed
together with them when the runner kills the process group. It needs the standard library, the clock and the limits alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

from runner.engines.children import PR_SET_PDEATHSIG, ask_linux
from runner.limits import limits
from wire import clock

_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD}
_CANNOT_RUN = 127


def main() -> int:
    """Hold the command; return its exit status."""
    parent = int(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    ask_linux(PR_SET_PDEATHSIG, signal.SIGTERM)
    ask_linux(_PR_SET_CHILD_SUBREAPER, 1)
    child = _start(sys.argv[2:])
    status: int | None = None
    while os.getppid() == parent and status is None:
        if _next_signal() == signal.SIGTERM and os.getppid() == parent:
            os.kill(child, signal.SIGTERM)
        status = _reap(child)
    _kill_descendants()
    return _CANNOT_RUN if status is None else os.waitstatus_to_exitcode(status) & 0xFF


def _start(command: list[str]) -> int:
    holder = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
        ask_linux(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == holder:
            os.execvp(command[0], command)  # noqa: S606  # an argument list of ours
    except OSError as error:
        _complain(f"cannot start {command[0]}: {error.strerror}")
    finally:
        os._exit(_CANNOT_RUN)


def _complain(text: str) -> None:
    os.write(2, f"{text}\n".encode())


def _next_signal() -> int | None:
    if sys.platform != "linux":  # no signal tells of the parent's end there, only its changed number
        clock.sleep(limits().children.subreaper_poll_s)
        pending = signal.sigpending() & _WATCHED
        return signal.sigwait(pending) if pending else None
    arrived = signal.sigtimedwait(_WATCHED, 1.0)
    return arrived.si_signo if arrived is not None else None


def _reap(child: int) -> int | None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)  # any: orphans of the server became ours
        except ChildProcessError:
            return None
        if pid == child:
            return status
        if pid == 0:
            return None


def _kill_descendants() -> None:
    if sys.platform != "linux" and os.getpgrp() == os.getpid():  # without /proc: the whole group, this process included
        os.killpg(0, signal.SIGKILL)
    for _ in range(limits().children.subreaper_rounds):  # a dying parent may still start another
        below = _descendants()
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        # Not whoever is left: a worker that was started while its parent died is not among those killed, and would be waited
        # for until it ends by itself. The next round finds it. A parent stands before its children, which are ours then.
        for pid in below:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not below:
            return


def _descendants() -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The name in parentheses may hold anything, so the fields are counted from its end.
            fields = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            if fields[0] != "Z":
                children[int(fields[1])].append(int(folder.name))
    found, queue = [], [os.getpid()]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


if __name__ == "__main__":
    sys.exit(main())
