"""What the launcher asks of an embedded server."""

from __future__ import annotations

import importlib.util
import signal
from pathlib import Path
from typing import Protocol

from controlplane.launcher.processes import Command


class EmbeddedServer(Protocol):
    """A server that the launcher can prepare, start as a child and ask whether it answers."""

    @property
    def url(self) -> str:
        """What clients connect to."""

    @property
    def stop_signal(self) -> signal.Signals:
        """The signal for an orderly stop that does not wait for clients."""

    def prepare(self) -> None:
        """Make directories and data on first use. Raises LauncherError."""

    def clear_leftovers(self) -> None:
        """End what an earlier run left behind on the same data. Raises LauncherError when something will not go."""

    def command(self) -> Command:
        """Return what to start."""

    def is_ready(self, pid: int) -> bool:
        """Return whether the child ``pid`` answers clients."""


def package_directory(name: str) -> Path:
    """Return the directory of an installed package without importing it. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(name=name)
    return Path(spec.submodule_search_locations[0])
