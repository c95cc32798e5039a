"""Takes from Python what Windows lacks, and adds what it has instead: a program that starts so would start there.

The folder of this file stands on PYTHONPATH of the program; Python imports the file before anything else.
"""

import asyncio
import fcntl
import os
import signal
import sys
import types
from pathlib import Path

# These have code of their own for Windows, which is not what runs here.
import aiohttp  # noqa: F401
import psutil  # noqa: F401

_MISSING = {"fcntl", "pwd", "grp", "resource", "termios", "tty", "pty", "syslog", "uvloop", "readline"}


class _Windows:
    """Finds nothing of Unix."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in _MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}, as on Windows", name=name)


def _lock(descriptor: int, mode: int, length: int) -> None:
    # What ours stands on: another open file of the same name is refused.
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, length, os.lseek(descriptor, 0, os.SEEK_CUR))
    except BlockingIOError as error:
        raise PermissionError(error.errno, "Permission denied") from None


def _refuse(*_arguments: object, **_options: object) -> None:
    raise NotImplementedError


msvcrt = types.ModuleType("msvcrt")
msvcrt.locking, msvcrt.LK_NBLCK = _lock, 2  # type: ignore[attr-defined]
sys.modules["msvcrt"] = msvcrt
for module in _MISSING:
    sys.modules.pop(module, None)
sys.meta_path.insert(0, _Windows())
_UNIX = (
    "fork forkpty getuid geteuid getgid getegid killpg getpgid setsid fchmod fchown chown statvfs uname getloadavg nice mkfifo "
    "sched_getaffinity sched_setaffinity"
)
for name in _UNIX.split():
    if hasattr(os, name):
        delattr(os, name)
_open = os.open


def _open_no_folder(path: object, flags: int, *rest: object, **options: object) -> int:
    if isinstance(path, str | os.PathLike) and Path(path).is_dir():
        raise PermissionError(13, "Permission denied", str(path))
    return _open(path, flags, *rest, **options)  # type: ignore[arg-type]


os.open = _open_no_folder
for name in ["HUP", "USR1", "USR2", "KILL", "CHLD", "STOP", "CONT", "TSTP", "QUIT", "ALRM", "PIPE"]:
    delattr(signal, f"SIG{name}")
asyncio.BaseEventLoop.add_signal_handler = _refuse  # type: ignore[method-assign]
asyncio.SelectorEventLoop.add_signal_handler = _refuse  # type: ignore[method-assign]
