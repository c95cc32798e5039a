"""Which part of a request an engine cannot take: a document, a picture or a sound. Pure.

Whether an engine reads documents shows only when it is asked, and what it refuses is the translation: a client has to be told
the place in what it sent itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from gateway.dialects.crowding import is_crowded
from gateway.errors import EngineRefused, GatewayError
from wire.unreadable import UNREADABLE

_ABOUT_PARTS = re.compile(
    r"\b(?:content|parts?|files?|documents?|pdf|images?|audio|multimodal|modalit(?:y|ies))\b", re.IGNORECASE
)
_KINDS = {
    "document": "document", "file": "file", "input_file": "file", "image": "image", "input_image": "image",
    "input_audio": "audio",
}  # fmt: skip
_GROUPS = {"file": "document"}
_MENTIONS = re.compile(r"(?P<document>\bfiles?\b|documents?|pdf)|(?P<image>image)|(?P<audio>audio)", re.IGNORECASE)
_REFUSALS = frozenset({400, 415, 422, 501})
_AS_TEXT = frozenset({"text", "content"})
"""Sources of a document that the translation gives to the engine as text."""


class _Source(msgspec.Struct):
    type: object = None


class _Part(msgspec.Struct):
    type: object = None
    source: _Source | str | None = None
    content: list[_Part] | str | None = None


class _Turn(msgspec.Struct):
    content: list[_Part] | str | None = None
    output: list[_Part] | str | None = None


class _Asked(msgspec.Struct):
    messages: list[_Turn] | None = None
    input: list[_Turn] | str | None = None


_decoder = msgspec.json.Decoder(_Asked)


def name_unread_part(error: GatewayError, body: bytes) -> GatewayError:
    """Return an engine's refusal with the field that it is about, where its words are about parts and there is such a part.

    ``body``: as the client sent it. What the engine mentions first is what it refuses; what it would take comes after that.
    """
    words = error.message
    if not isinstance(error, EngineRefused) or error.status not in _REFUSALS or not _ABOUT_PARTS.search(words):
        return error
    places: dict[str, tuple[str, str]] = {}
    for place, part in _list_parts(body):
        if (kind := _find_kind(part)) is not None:
            places.setdefault(_GROUPS.get(kind, kind), (place, kind))
    group = next((group for group in _list_mentioned(words) if group in places), None)
    if group is None:
        return error
    place, kind = places[group]
    message = f"The {kind} in '{place}' cannot be given to this model. Its engine says: {words.strip()}"
    return EngineRefused(message, status=error.status, param=place)


def holds_part(body: bytes, kinds: frozenset[str]) -> bool:
    """Whether a request holds a part of one of these types, in a turn or in the result of a tool."""
    if not any(b'"%b"' % kind.encode() in body for kind in kinds):  # the usual case, found out without reading it
        return False
    return any(isinstance(part.type, str) and part.type in kinds for _place, part in _list_parts(body))


def _list_mentioned(words: str) -> list[str]:
    """Return the groups of parts in the order in which the words mention them; documents in any case."""
    found = [match.lastgroup for match in _MENTIONS.finditer(words) if match.lastgroup is not None]
    return [*dict.fromkeys(found), "document"]


def _find_kind(part: _Part) -> str | None:
    """Return what a part is if it is more than text."""
    is_text = isinstance(part.source, _Source) and part.source.type in _AS_TEXT
    return _KINDS.get(part.type) if isinstance(part.type, str) and not is_text else None


def _list_parts(body: bytes) -> Iterator[tuple[str, _Part]]:
    """Yield every part with its place, in their order."""
    if is_crowded(body):
        return
    try:
        asked = _decoder.decode(body)
    except UNREADABLE:
        return
    for name, turns in (("messages", asked.messages), ("input", asked.input)):
        for number, turn in enumerate(turns if isinstance(turns, list) else []):
            for field, parts in (("content", turn.content), ("output", turn.output)):
                yield from _list_below(parts, f"{name}[{number}].{field}")


def _list_below(parts: list[_Part] | str | None, place: str, *, levels: int = 3) -> Iterator[tuple[str, _Part]]:
    for number, part in enumerate(parts if isinstance(parts, list) else []):
        here = f"{place}[{number}]"
        yield here, part
        if levels > 1:  # results of tools and what documents hold; clients choose the depth
            yield from _list_below(part.content, f"{here}.content", levels=levels - 1)
