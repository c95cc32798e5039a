"""JSON values printed as literals of a language, as a person would lay them out. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WIDTH = 80
_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]*\Z")
_DECEIVING = re.compile(
    "[\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]",
)
"""Letters that hide, turn round what stands beside them, end a line, or tell a terminal to do something."""


@dataclass(frozen=True, slots=True)
class ImageText:
    """A text whose end is the base64 of a picture, which the printed code reads from a file when it runs."""

    prefix: str


@dataclass(frozen=True, slots=True)
class Notation:
    """How a language writes a value. ``write_image`` takes what stands in front of the base64."""

    write_text: Callable[[str], str]
    write_key: Callable[[str], str]
    write_image: Callable[[str], str]
    true: str = "true"
    false: str = "false"
    null: str = "null"
    indent: str = "  "
    is_padded: bool = False
    """Whether braces on one line stand apart from what they hold."""
    trailing_comma: str = ""


def quote_json(text: str) -> str:
    """Return a JSON string, which Python and JavaScript read as the same text."""
    return _DECEIVING.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _write_javascript_key(key: str) -> str:
    if key == "__proto__":  # anything but a computed key would set the prototype
        return f"[{quote_json(key)}]"
    return key if _IDENTIFIER.match(key) else quote_json(key)


def _escape_here_document(text: str) -> str:
    """Keep a shell from reading ``text`` inside a here-document that it expands."""
    return re.sub(r"([\\$`])", r"\\\1", text)


PYTHON = Notation(
    write_text=quote_json,
    write_key=quote_json,
    write_image=lambda prefix: f'f"{prefix}{{image}}"' if prefix else "image",
    true="True",
    false="False",
    null="None",
    indent="    ",
    trailing_comma=",",
)
JAVASCRIPT = Notation(
    write_text=quote_json,
    write_key=_write_javascript_key,
    write_image=lambda prefix: f"`{prefix}${{image}}`" if prefix else "image",
    is_padded=True,
    trailing_comma=",",
)
JSON = Notation(write_text=quote_json, write_key=quote_json, write_image=quote_json)


def expanding_json(image_name: str) -> Notation:
    """Return JSON for a here-document in which the shell puts the base64 of a file, and changes nothing else."""

    def write(text: str) -> str:
        return _escape_here_document(quote_json(text))

    def write_image(prefix: str) -> str:
        return f'"{prefix}$(base64 < {image_name} | tr -d "\\n")"'

    return Notation(write_text=write, write_key=write, write_image=write_image)


def print_literal(value: object, notation: Notation, *, depth: int = 0, used: int = 0) -> str:
    """Return ``value`` on one line when it fits, else one member to a line. ``used``: columns in front of it."""
    line = _print_line(value, notation)
    if not (isinstance(value, Mapping | list) and value) or len(line) + used + depth * len(notation.indent) <= WIDTH:
        return line
    inner = notation.indent * (depth + 1)
    if isinstance(value, Mapping):
        keys = [f"{notation.write_key(key)}: " for key in value]
        members = [
            key + print_literal(member, notation, depth=depth + 1, used=len(key) + 1)
            for key, member in zip(keys, value.values(), strict=True)
        ]
    else:
        members = [print_literal(member, notation, depth=depth + 1, used=1) for member in value]
    opening, closing = "{}" if isinstance(value, Mapping) else "[]"
    body = f",\n{inner}".join(members)
    return f"{opening}\n{inner}{body}{notation.trailing_comma}\n{notation.indent * depth}{closing}"


def _print_line(value: object, notation: Notation) -> str:
    match value:
        case None:
            return notation.null
        case bool():
            return notation.true if value else notation.false
        case str():
            return notation.write_text(value)
        case ImageText(prefix):
            return notation.write_image(prefix)
        case Mapping():
            members = (f"{notation.write_key(key)}: {_print_line(member, notation)}" for key, member in value.items())
            return _enclose("{", ", ".join(members), "}", is_padded=notation.is_padded)
        case Sequence():
            return _enclose("[", ", ".join(_print_line(member, notation) for member in value), "]")
        case _:
            return json.dumps(value)


def _enclose(opening: str, inside: str, closing: str, *, is_padded: bool = False) -> str:
    pad = " " if is_padded and inside else ""
    return f"{opening}{pad}{inside}{pad}{closing}"
