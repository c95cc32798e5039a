"""Frames by callback: what a server may offer an application beyond ASGI's ``receive``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

SCOPE_FRAMES = "muster.frames"
"""The key under which the scope's extensions carry a ``FrameSource``."""


class FrameSource(Protocol):
    """Hands over message events where they are parsed, without a queue and a task switch."""

    def take_over(self, receiver: Callable[[dict[str, Any]], None]) -> bool:
        """Have ``receiver`` called with each later message event; False while earlier ones still wait."""
