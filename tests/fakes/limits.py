"""Other limits for one test; the fixture ``real_clock`` of tests/conftest.py takes them away again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from core import limits as server
from runner import limits as runner

Held = TypeVar("Held", server.Limits, runner.Limits)


def set_limits(**sections: dict[str, Any]) -> None:
    """Change fields of this process's limits until the test ends: ``set_limits(gateway={"queue_s": 0.1})``.

    What is built before keeps the limits that it was built with.
    """
    server.install(_change(server.limits(), sections))


def set_runner_limits(**sections: dict[str, Any]) -> None:
    """Change fields of what a runner in this process reads: ``set_runner_limits(ledger={"nonces": 3})``."""
    runner.install(_change(runner.limits(), sections))


def _change(held: Held, sections: dict[str, dict[str, Any]]) -> Held:
    return replace(held, **{name: replace(getattr(held, name), **fields) for name, fields in sections.items()})
