"""Finding the end of a JSON object that comes in pieces: engines say the arguments of a tool call so."""

from __future__ import annotations

import re

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')


class ObjectScan:
    """Follows the pieces of a JSON object to its end, wherever they are cut, and keeps none of them."""

    __slots__ = ("_depth", "_is_escaped", "_is_in_string", "is_complete")

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False
        """Whether the object has ended; what follows may be white space only."""

    def feed(self, piece: str) -> str:
        """Take the next piece. Returns what of it lies behind the end of the object."""
        at = 0
        if self._is_escaped and piece:
            at, self._is_escaped = 1, False
        while not self.is_complete:
            found = (_IN_STRING if self._is_in_string else _OUTSIDE).search(piece, at)
            if found is None:
                return ""
            at = found.end()
            mark = found.group()
            if mark == "\\":
                at += 1
                if at > len(piece):
                    self._is_escaped = True
                    return ""
            elif mark == '"':
                self._is_in_string = not self._is_in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                self.is_complete = self._depth == 0
        return piece[at:]
