"""What the launcher prints and refuses: short lines with the seconds since it began, flushed at once."""

from __future__ import annotations

import os
import sys
from typing import TextIO

from wire import clock

# The launcher re-executes itself inside the virtual environment; the clock goes on counting from the first of the two.
BEGAN_VARIABLE = "MUSTER_LAUNCHER_BEGAN_AT"
_BEGAN_AT = float(os.environ.pop(BEGAN_VARIABLE, "") or clock.unix_s())


def pass_clock_on() -> None:
    """Let the program that replaces this one count from the same moment."""
    os.environ[BEGAN_VARIABLE] = repr(_BEGAN_AT)


def say(text: str) -> None:
    """Print one line for the person at the terminal."""
    _write(sys.stdout, text)


def progress(text: str) -> None:
    """Print one step of the start with the seconds since the launcher began."""
    _write(sys.stdout, f"[{elapsed_s():5.1f} s] {text}")


def complain(text: str) -> None:
    """Print one line of trouble on standard error."""
    _write(sys.stderr, f"muster: {text}")


def _write(stream: TextIO, text: str) -> None:
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except OSError:
        # The terminal or the pipe is gone. What we supervise must not fall with it.
        return


def elapsed_s() -> float:
    return max(0.0, clock.unix_s() - _BEGAN_AT)


class LauncherError(Exception):
    """The command cannot go on. The text is one line for the person at the terminal: what is wrong and what to do."""


class StopRequested(Exception):
    """Ctrl-C or SIGTERM arrived; whatever was started is to be stopped in order."""
