"""What the launcher prints: short lines with the seconds since it began, flushed at once."""

from __future__ import annotations

import os
import sys
import time

# The launcher re-executes itself inside the virtual environment; the clock goes on counting from the first of the two.
BEGAN_VARIABLE = "MUSTER_LAUNCHER_BEGAN_AT"
_BEGAN_AT = float(os.environ.pop(BEGAN_VARIABLE, "") or time.time())


def pass_clock_on() -> None:
    """Let the program that replaces this one count from the same moment."""
    os.environ[BEGAN_VARIABLE] = repr(_BEGAN_AT)


def say(text: str) -> None:
    """Print one line for the person at the terminal."""
    print(text, flush=True)


def progress(text: str) -> None:
    """Print one step of the start with the seconds since the launcher began."""
    say(f"[{elapsed_s():5.1f} s] {text}")


def complain(text: str) -> None:
    """Print one line of trouble on standard error."""
    print(f"muster: {text}", file=sys.stderr, flush=True)


def elapsed_s() -> float:
    """Return the seconds since the launcher began."""
    return max(0.0, time.time() - _BEGAN_AT)
