"""From tokens to text that may be sent: whole characters only, and nothing that could be the start of a stop string. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from runner.limits import limits

REPLACEMENT = "\ufffd"


class Detokeniser:
    """Decodes one answer token by token. ``decode`` turns ids into text and shows broken characters as U+FFFD.

    Only the last few tokens are decoded again each time, against those before them, because a token's text depends on what
    precedes it (a leading space, half a character).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._broken_tokens = limits().children.broken_tokens
        self._ids: list[int] = []
        self._from = 0
        self._to = 0

    def add(self, token: int) -> str:
        """Return the text that ``token`` completes, empty while a character is still incomplete."""
        self._ids.append(token)
        known = self._decode(self._ids[self._from : self._to])
        text = self._decode(self._ids[self._from :])
        if text.endswith(REPLACEMENT) and len(self._ids) - self._to < self._broken_tokens:
            return ""
        self._from, self._to = self._to, len(self._ids)
        return text[len(known) :]

    def finish(self) -> str:
        """Return what is left at the end, less a character that was cut in two."""
        known = self._decode(self._ids[self._from : self._to])
        text = self._decode(self._ids[self._from :])[len(known) :]
        self._from = self._to = len(self._ids)
        return text.rstrip(REPLACEMENT)


class StopStrings:
    """Ends a text before the first of some strings, wherever the borders between its pieces lie."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.hit = False

    def add(self, piece: str) -> str:
        """Return what may be sent now; ``hit`` is set when a stop string was found, and nothing more comes then."""
        if self.hit:
            return ""
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """Return what was held back, now that no stop string can follow."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of ``text`` are the start of ``stop``."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
