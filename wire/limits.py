"""Bounds: how a package declares its limits and time-outs, and those of the wire formats, which both ends share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

_KEY = "bound"
Value = TypeVar("Value", int, float)


@dataclass(frozen=True, slots=True)
class Bound:
    """What is said of one field. ``then`` says what happens at it; ``setting`` names the environment variable that sets it.

    ``minimum`` is the least that the setting may be; ``factor`` is what the setting counts in (1,048,576 where it is in MiB).
    """

    name: str
    default: float
    unit: str
    then: str
    setting: str = ""
    minimum: float = 0
    factor: int = 1


def bound(default: Value, unit: str, then: str, *, setting: str = "", minimum: float = 0, factor: int = 1) -> Value:
    """Declare a field of a frozen dataclass of limits. ``unit``: ``s``, ``ms``, ``bytes``, ``characters``, ``requests`` …"""
    said = Bound("", default, unit, then, setting, minimum, factor)
    value: Value = dataclasses.field(default=default, metadata={_KEY: said})
    return value


def list_bounds(section: Any) -> Iterator[Bound]:
    """Yield what is said of each field of a dataclass of limits, in the order of its declaration."""
    for field in dataclasses.fields(section):
        if _KEY in field.metadata:
            yield dataclasses.replace(field.metadata[_KEY], name=field.name)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireLimits:
    """Bounds of the formats themselves: no setting reaches them, because server and runner must agree."""


WIRE = WireLimits()
