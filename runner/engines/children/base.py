"""What our engine processes share: dying with the runner, one line of settings in, JSON lines out. Standard library only."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have Linux kill this process when the runner dies; elsewhere the closed standard input must do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        sys.exit(1)


class Parent:
    """The runner at the other end of the pipes. Standard output is kept for our lines; what the engine prints goes to
    standard error.
    """

    def __init__(self) -> None:
        # A Ctrl-C in the terminal reaches the whole process group; when to stop is the parent's decision.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with(int(sys.argv[1]))
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def read_settings(self) -> dict[str, Any]:  # Any: JSON
        """Return the settings."""
        settings: dict[str, Any] = json.loads(sys.stdin.readline())
        return settings

    def say(self, **fields: object) -> None:
        """Send one line: ``stage`` and ``fraction``, or ``url`` (and ``info``), or ``error``."""
        with self._lock:
            self._out.write(json.dumps(fields) + "\n")
            self._out.flush()

    def wait_until_told(self) -> None:
        """Return when the runner closes standard input: unload and exit."""
        sys.stdin.read()
