"""How a requirement can come out. Nothing passes in silence: what was not checked says why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Violation(Exception):
    """The server does not do what clients require; the words say what it did instead."""


class NotApplicable(Exception):
    """The requirement cannot be checked here; the words say why."""


class Verdict(StrEnum):
    """One row's outcome."""

    OK = "ok"
    FAIL = "FAIL"
    ENGINE = "engine"
    """Not fulfilled, and the engine itself, asked without the server between, does not fulfil it either."""
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one row. ``detail``: the violation or the reason, empty when it is fulfilled; a violation of the engine's
    begins with ``engine:``.
    """

    row_id: str
    verdict: Verdict
    detail: str
    took_s: float
