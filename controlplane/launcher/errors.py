"""What the launcher can refuse to do."""

from __future__ import annotations


class LauncherError(Exception):
    """The command cannot go on. The text is one line for the person at the terminal: what is wrong and what to do."""


class StopRequested(Exception):
    """Ctrl-C or SIGTERM arrived; whatever was started is to be stopped in order."""
