"""Arguments of tool calls: text at the engine, which may be no JSON at all; an object in a message."""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from gateway.dialects.messages.events import RAW_ARGUMENTS_KEY

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_object_decoder = msgspec.json.Decoder(dict[str, Raw])
_text_decoder = msgspec.json.Decoder(str)
_encoder = msgspec.json.Encoder()


def read_arguments(text: str) -> Raw:
    """Return arguments as the JSON text of an object. None at all is ``{}``; what is no object stands in one under a key."""
    stripped = text.strip()
    if stripped in {"", "null"}:
        return Raw(b"{}")
    if is_object(stripped):
        return Raw(stripped.encode())
    if stripped.startswith('"'):  # some engines encode the object twice
        try:
            inner = _text_decoder.decode(stripped.encode())
        except (msgspec.DecodeError, UnicodeError):
            inner = ""
        if is_object(inner):
            return Raw(inner.encode())
    return Raw(_encoder.encode({RAW_ARGUMENTS_KEY: text}))


def is_object(text: str) -> bool:
    """Whether a text is one JSON object."""
    try:
        _object_decoder.decode(text.encode())
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


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
