"""Arguments of tool calls: text at the engine, which may be no JSON at all; an object in a message."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from gateway.dialects.messages.events import RAW_ARGUMENTS_KEY

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
