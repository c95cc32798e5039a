"""Tables of cases that are grouped by what comes of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import pytest
from _pytest.mark import ParameterSet

Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


def by_outcome(table: Mapping[Outcome, Mapping[str, Case]]) -> list[ParameterSet]:
    """Return (case, outcome) of each row, as ``parametrize`` takes them, under the row's name."""
    return [pytest.param(case, outcome, id=name) for outcome, rows in table.items() for name, case in rows.items()]
