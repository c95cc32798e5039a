"""The API surfaces clients speak: how a body is read and how errors are said. Pure functions, no I/O."""

from __future__ import annotations

from gateway.dialects.surface import SURFACES, Surface

__all__ = ["SURFACES", "Surface"]
