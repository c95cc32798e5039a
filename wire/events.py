"""Server-sent events as bytes: cutting at event boundaries. Pure; source: WHATWG HTML, section 9.2.6."""

from __future__ import annotations

MAX_HELD_BYTES = 256 * 1024
"""An unfinished event larger than this is passed on in pieces instead of being held."""


def find_boundary(data: bytes, limit: int | None = None) -> int:
    """Return the index just behind the last blank line within ``data[:limit]``, or 0 when there is none.

    Lines end with LF, CRLF or CR; a blank line is two line ends in a row.
    """
    end = len(data) if limit is None else limit
    at = data.rfind(b"\n\n", 0, end)
    best = at + 2 if at >= 0 else 0
    if b"\r" in data:
        for blank in (b"\n\r\n", b"\r\r"):
            at = data.rfind(blank, 0, end)
            best = max(best, at + len(blank)) if at >= 0 else best
    return best


class EventCutter:
    """Passes whole events on as soon as they are complete and holds the rest."""

    __slots__ = ("_held", "is_inside_event")

    def __init__(self) -> None:
        self._held = b""
        self.is_inside_event = False
        """Whether what was passed on last ended in the middle of an (oversized) event."""

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the engine; return everything up to the last event boundary, which may be nothing."""
        if not self._held and chunk.endswith(b"\n\n"):
            self.is_inside_event = False
            return chunk
        data = self._held + chunk if self._held else chunk
        cut = find_boundary(data)
        if cut:
            self._held = data[cut:]
            self.is_inside_event = False
            return data[:cut]
        if len(data) > MAX_HELD_BYTES:
            self._held = b""
            self.is_inside_event = True
            return data
        self._held = data
        return b""

    def finish(self) -> bytes:
        """Return what is left when the engine closed the stream."""
        rest, self._held = self._held, b""
        return rest
