"""What model files say of themselves, read once for each version of a file."""

from __future__ import annotations

import asyncio
from pathlib import Path

from runner.errors import CorruptModel
from runner.fit import read_shape
from runner.fit.memory import ModelShape
from runner.limits import limits


class Shapes:
    """Remembers by path and time of change."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int], ModelShape | None] = {}

    async def read(self, path: Path | None) -> ModelShape | None:
        """Return the shape of a model, None when there are no files or they cannot be read."""
        return None if path is None else await asyncio.to_thread(self._read, path)

    def _read(self, path: Path) -> ModelShape | None:
        try:
            key = (path, path.stat().st_mtime_ns)
            if key not in self._known:
                if len(self._known) >= limits().api.shapes:
                    self._known.clear()
                self._known[key] = read_shape(path)
        except (OSError, CorruptModel):
            return None
        return self._known[key]
