"""What a configured value may be: type, limits, and the same facts as data from which a form can be made. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import urlsplit

from runner.limits import limits

MAX_INTEGER = (1 << 53) - 1
"""Larger whole numbers do not survive every JSON parser (RFC 8259 section 6)."""
ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}", re.ASCII)
MODEL_ID = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._:@+-]|/(?!\.))*", re.ASCII)
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class Kind(Protocol):
    """Type and limits of one field."""

    def allowed(self) -> str:
        """Return what is allowed, to follow "must be"."""

    def accepts(self, value: object) -> bool:
        """Return whether a value out of JSON is allowed."""

    def constraint(self) -> dict[str, object]:
        """Return the same for machines; its ``kind`` is a word of the llm-pool specification where that has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Integer:
    """A whole number; ``maximum`` is inclusive, and values go in steps from ``minimum``. ``unit`` is what is counted."""

    minimum: int
    maximum: int | None = None
    step: int = 1
    unit: str = "count"
    display_unit: str = ""
    nullable: bool = False

    def allowed(self) -> str:
        """Return the limits in words."""
        text = f"a whole number {_range(self.minimum, self.maximum)}"
        if self.step > 1:
            text += f" in steps of {self.step}"
        return text + (", or null" if self.nullable else "")

    def accepts(self, value: object) -> bool:
        """Return whether it is an int (not a bool) within the limits."""
        if value is None:
            return self.nullable
        if not isinstance(value, int) or isinstance(value, bool):
            return False
        is_in_range = self.minimum <= value <= (MAX_INTEGER if self.maximum is None else self.maximum)
        return is_in_range and (value - self.minimum) % self.step == 0

    def constraint(self) -> dict[str, object]:
        """Return kind ``integer`` or ``integer_or_null``."""
        facts: dict[str, object] = {"kind": "integer_or_null" if self.nullable else "integer", "minimum": self.minimum}
        if self.maximum is not None:
            facts["maximum"] = self.maximum
        return {**facts, "step": self.step, "unit": self.unit, "display_unit": self.display_unit or self.unit}


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A finite number; with ``is_above_minimum`` the minimum itself is not allowed."""

    minimum: float
    maximum: float | None = None
    is_above_minimum: bool = False
    nullable: bool = False

    def allowed(self) -> str:
        """Return the limits in words."""
        text = _range(self.minimum, self.maximum)
        if self.is_above_minimum:
            text = f"above {self.minimum:g}" + ("" if self.maximum is None else f" and at most {self.maximum:g}")
        return f"a number {text}" + (", or null" if self.nullable else "")

    def accepts(self, value: object) -> bool:
        """Return whether it is an int or a float (not a bool) within the limits."""
        if value is None:
            return self.nullable
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            return False
        if value < self.minimum or (self.is_above_minimum and value == self.minimum):
            return False
        return self.maximum is None or value <= self.maximum

    def constraint(self) -> dict[str, object]:
        """Return kind ``number`` or ``number_or_null``."""
        facts: dict[str, object] = {"kind": "number_or_null" if self.nullable else "number", "minimum": self.minimum}
        if self.is_above_minimum:
            facts["exclusive_minimum"] = True
        return facts if self.maximum is None else {**facts, "maximum": self.maximum}


@dataclass(frozen=True, slots=True, kw_only=True)
class Enum:
    """One of a few words."""

    values: tuple[str, ...]
    nullable: bool = False

    def allowed(self) -> str:
        """Return the words."""
        return f"one of {', '.join(self.values)}" + (", or null" if self.nullable else "")

    def accepts(self, value: object) -> bool:
        """Return whether it is one of them, letter by letter."""
        return self.nullable if value is None else isinstance(value, str) and value in self.values

    def constraint(self) -> dict[str, object]:
        """Return kind ``enum``; null is among its values where it is allowed."""
        return {"kind": "enum", "values": [*self.values, None] if self.nullable else list(self.values)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A string of one line that is not empty. ``is_valid`` and ``what`` narrow it: a further test, and it in words.

    ``what`` may name a limit. With ``has_any_characters`` line ends and the like are fine too.
    """

    what: str = "a string of 1 to {limits.text_chars} printable characters"
    is_valid: Callable[[str], bool] = bool
    has_any_characters: bool = False
    nullable: bool = False

    def allowed(self) -> str:
        """Return what the string must be."""
        return self.in_words + (", or null" if self.nullable else "")

    @property
    def in_words(self) -> str:
        """``what`` with the limits that it names."""
        return self.what.format(limits=limits().models)

    def accepts(self, value: object) -> bool:
        """Return whether it is such a string."""
        if value is None:
            return self.nullable
        if not isinstance(value, str) or not 0 < len(value) <= limits().models.text_chars:
            return False
        is_clean = value.isprintable() or (self.has_any_characters and not _LONE_SURROGATE.search(value))
        return is_clean and self.is_valid(value)

    def constraint(self) -> dict[str, object]:
        """Return kind ``string`` or ``string_or_null``."""
        return {"kind": "string_or_null" if self.nullable else "string", "format": self.in_words}


@dataclass(frozen=True, slots=True, kw_only=True)
class Boolean:
    """True or false."""

    nullable: bool = False

    def allowed(self) -> str:
        """Return both words."""
        return "true or false" + (", or null" if self.nullable else "")

    def accepts(self, value: object) -> bool:
        """Return whether it is a bool."""
        return self.nullable if value is None else isinstance(value, bool)

    def constraint(self) -> dict[str, object]:
        """Return kind ``boolean``."""
        return {"kind": "boolean_or_null" if self.nullable else "boolean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextList:
    """A list of strings, each as ``item`` says."""

    item: Text = Text()
    maximum: int = 64

    def allowed(self) -> str:
        """Return the limits in words."""
        return f"a list of at most {self.maximum} items, each {self.item.allowed()}"

    def accepts(self, value: object) -> bool:
        """Return whether it is such a list."""
        return isinstance(value, list) and len(value) <= self.maximum and all(map(self.item.accepts, value))

    def constraint(self) -> dict[str, object]:
        """Return kind ``string_list``."""
        return {"kind": "string_list", "maximum": self.maximum}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextMap:
    """An object of strings, under names that could be model ids."""

    item: Text = Text()
    maximum: int = 64

    def allowed(self) -> str:
        """Return the limits in words."""
        return f"an object of at most {self.maximum} names, each with {self.item.allowed()}"

    def accepts(self, value: object) -> bool:
        """Return whether it is such an object."""
        if not isinstance(value, Mapping) or len(value) > self.maximum:
            return False
        return all(is_model_id(name) and self.item.accepts(text) for name, text in value.items())

    def constraint(self) -> dict[str, object]:
        """Return kind ``string_map``."""
        return {"kind": "string_map", "maximum": self.maximum}


def is_model_id(text: str) -> bool:
    """Return whether a text can name a model: letters, digits and ``. _ : @ + - /``, no part that begins with a dot."""
    return len(text) <= limits().models.id_chars and MODEL_ID.fullmatch(text) is not None and not text.endswith("/")


def is_http_url(text: str) -> bool:
    """Return whether it is the address of an HTTP server, without credentials, query or fragment."""
    try:
        parts = urlsplit(text)
        is_complete = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
    return is_complete and parts.username is None and not parts.query and not parts.fragment and " " not in text


def is_env_name(text: str) -> bool:
    """Return whether it can name an environment variable."""
    return ENV_NAME.fullmatch(text) is not None


URL = Text(what="an address such as https://host:port/v1 without credentials, query or fragment", is_valid=is_http_url)
ENV_VARIABLE = Text(what="the name of an environment variable (the value stays in the environment)", is_valid=is_env_name)
ID = Text(
    what="a model id: at most {limits.id_chars} letters, digits and . _ : @ + - / that begins with a letter or digit",
    is_valid=is_model_id,
)


def type_name(value: object) -> str:
    """Return what a value out of JSON is, in a word or two that never show the value itself."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list():
            return "a list"
        case _:
            return "an object"


def _range(minimum: float, maximum: float | None) -> str:
    return f"from {minimum:.12g} to {maximum:.12g}" if maximum is not None else f"of at least {minimum:.12g}"


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False
