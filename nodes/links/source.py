"""Frames by callback: what a server may offer an application beyond ASGI's ``receive`` and ``send``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

SCOPE_FRAMES = "muster.frames"
"""The key under which the scope's extensions carry a ``FrameSource``."""


class FrameSource(Protocol):
    """Hands over messages where they are parsed, and takes frames, without a queue and a task switch."""

    def take_over(self, receiver: Callable[[str | bytes], None]) -> bool:
        """Have ``receiver`` called with each later message; False while earlier ones still wait."""

    def write_frame(self, frame: bytes) -> bool:
        """Write a binary message at once, behind all that was sent before; False = the line is not free, and it was not."""
