"""Other limits for one test; the fixture ``real_clock`` of tests/conftest.py takes them away again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from core.limits import install, limits


def set_limits(**sections: dict[str, Any]) -> None:
    """Change fields of this process's limits until the test ends: ``set_limits(gateway={"queue_s": 0.1})``.

    What is built before keeps the limits that it was built with.
    """
    install(replace(limits(), **{name: replace(getattr(limits(), name), **fields) for name, fields in sections.items()}))
