"""Server-sent events as bytes: cutting at event boundaries. Pure; source: WHATWG HTML, section 9.2.6."""

from __future__ import annotations

MAX_HELD_BYTES = 256 * 1024
"""An unfinished event larger than this is passed on in pieces instead of being held."""
_SEAM_BYTES = 2
"""So much of a blank line may lie before the piece that completes it."""


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
    """Passes whole events on as soon as they are complete and holds the rest.

    What is held stays in the pieces it came in, so that an event which comes byte by byte costs no more than its bytes.
    """

    __slots__ = ("_end", "_held", "_held_bytes", "is_inside_event")

    def __init__(self) -> None:
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._end = b""
        """The last bytes of what is held: a blank line may begin there."""
        self.is_inside_event = False
        """Whether what was passed on last ended in the middle of an (oversized) event."""

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes from the engine; return everything up to the last event boundary, which may be nothing."""
        if not self._held and chunk.endswith(b"\n\n"):
            self.is_inside_event = False
            return chunk
        # What is held has no boundary in it, so one that is found ends in the chunk.
        cut = find_boundary(self._end + chunk) - len(self._end) if self._held else find_boundary(chunk)
        if cut > 0:
            whole = self._take_held() + chunk[:cut] if self._held else chunk[:cut]
            if cut < len(chunk):
                self._hold(chunk[cut:])
            self.is_inside_event = False
            return whole
        self._hold(chunk)
        if self._held_bytes > MAX_HELD_BYTES:
            self.is_inside_event = True
            return self._take_held()
        return b""

    def finish(self) -> bytes:
        """Return what is left when the engine closed the stream."""
        return self._take_held()

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)
        self._end = piece[-_SEAM_BYTES:] if len(piece) >= _SEAM_BYTES else (self._end + piece)[-_SEAM_BYTES:]

    def _take_held(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        self._held_bytes, self._end = 0, b""
        return held
