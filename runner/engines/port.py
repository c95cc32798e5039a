"""What the runner needs of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Protocol

Progress = Callable[[str], None]
"""Is told, in a few words, what a start is doing."""


class Health(StrEnum):
    """Outcome of one health check."""

    OK = "ok"
    SILENT = "silent"
    UNREACHABLE = "unreachable"


class Engine(Protocol):
    """One engine. ``poll_s`` is the time between health checks, ``restart_max_s`` the longest back-off, in seconds;
    ``endpoints`` are the API paths it speaks natively.
    """

    name: str
    poll_s: float
    restart_max_s: float
    endpoints: tuple[str, ...]

    @property
    def base_url(self) -> str:
        """Address up to, not including, ``/v1``."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers every request to it needs, such as its key."""

    @property
    def models(self) -> list[str]:
        """The models it serves while it runs, as of the last start or health check."""

    async def start(self, progress: Progress) -> None:
        """Return once it answers. Raises EngineError, with the engine's own last words where it left any."""

    async def stop(self, *, gently: bool) -> None:
        """Leave nothing behind, unloading first if ``gently``; fine to call when it does not run."""

    async def health(self) -> Health:
        """Check it once, in a few seconds at most."""

    async def wait_gone(self) -> None:
        """Return as soon as it is known to have died; for a server of somebody else's, never."""
