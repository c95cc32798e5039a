"""What msgspec finds wrong with a JSON text, as a reason and the path of the field: neither says much back of the text."""

from __future__ import annotations

import re

import msgspec

from core.limits import limits

# The place stands last: what comes before may hold a name or a value that a client chose.
_PLACE = re.compile(r" - at `\$([^`]*)`\Z")
_NAMED = re.compile(r"Object (?:missing required|contains unknown) field `(.*)`\Z", re.DOTALL)


def read_fault(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the reason and the path below the value that was read, such as ``.content[1].type``; empty = the value itself."""
    said = str(error)
    place = _PLACE.search(said)
    path = place.group(1) if place is not None else ""
    reason = said[: place.start()] if place is not None else said
    named = _NAMED.match(reason)
    if named is not None:
        path += f".{named.group(1)[: limits().gateway.fault_field_chars]}"
    return reason[: limits().gateway.fault_reason_chars], path


def join_fault(error: msgspec.ValidationError) -> tuple[str, str | None]:
    """Return the reason with its place, and the path from the top of a body; None = the body itself."""
    reason, path = read_fault(error)
    place = _PLACE.search(str(error))
    return reason + (place.group() if place is not None else ""), path.removeprefix(".") or None
