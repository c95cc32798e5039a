"""Reading JSON that somebody else wrote: every step says where it stands, and what does not fit is a Violation."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any  # JSON of the server under test

from conformance.limits import LIMITS
from conformance.verdicts import Violation


@dataclass(frozen=True, slots=True)
class Field:
    """A JSON value and its path in the answer. All checks raise Violation."""

    value: Any
    path: str

    def __getitem__(self, key: str | int) -> Field:
        """Return a member, which must be there."""
        if isinstance(key, int):
            items = self.items()
            if not -len(items) <= key < len(items):
                raise Violation(f"{self.path} has {len(items)} entries, number {key} is asked for")
            return items[key]
        self.members()
        if key not in self.value:
            raise Violation(f"{self.path}.{key} is missing ({self.shown})")
        return Field(self.value[key], f"{self.path}.{key}")

    def __contains__(self, key: str) -> bool:
        """Whether the member is there, null or not."""
        return isinstance(self.value, dict) and key in self.value

    @property
    def shown(self) -> str:
        """The value as short JSON for a person."""
        text = json.dumps(self.value, ensure_ascii=False)
        return text if len(text) <= LIMITS.shown_chars else text[: LIMITS.shown_chars - 1] + "…"

    @property
    def is_null(self) -> bool:
        """Whether it is null."""
        return self.value is None

    def get(self, key: str) -> Field | None:
        """Return a member, or None when it is absent or null."""
        self.members()
        return None if self.value.get(key) is None else Field(self.value[key], f"{self.path}.{key}")

    def members(self) -> dict[str, Any]:
        """Return the members of an object."""
        if not isinstance(self.value, dict):
            raise Violation(f"{self.path} must be an object and is {self.shown}")
        return self.value

    def items(self) -> list[Field]:
        """Return the entries of a list."""
        if not isinstance(self.value, list):
            raise Violation(f"{self.path} must be a list and is {self.shown}")
        return [Field(item, f"{self.path}[{index}]") for index, item in enumerate(self.value)]

    def text(self) -> str:
        """Return a string, empty or not."""
        if not isinstance(self.value, str):
            raise Violation(f"{self.path} must be a string and is {self.shown}")
        return self.value

    def word(self) -> str:
        """Return a string that is not empty."""
        if not self.text():
            raise Violation(f"{self.path} is empty")
        return str(self.value)

    def count(self) -> int:
        """Return an integer that is not negative."""
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 0:
            raise Violation(f"{self.path} must be an integer of at least 0 and is {self.shown}")
        return self.value

    def number(self) -> float:
        """Return a number."""
        if not isinstance(self.value, int | float) or isinstance(self.value, bool):
            raise Violation(f"{self.path} must be a number and is {self.shown}")
        return self.value

    def flag(self) -> bool:
        """Return true or false."""
        if not isinstance(self.value, bool):
            raise Violation(f"{self.path} must be true or false and is {self.shown}")
        return self.value

    def must_be(self, *expected: object) -> None:
        """Check that it is one of the values given."""
        if not any(type(self.value) is type(one) and self.value == one for one in expected):
            words = " or ".join(json.dumps(one, ensure_ascii=False) for one in expected)
            raise Violation(f"{self.path} must be {words[:300]} and is {self.shown}")

    def must_have(self, names: Iterable[str]) -> None:
        """Check that all these members are there, null or not."""
        missing = [name for name in names if name not in self.members()]
        if missing:
            raise Violation(f"{self.path} lacks {', '.join(missing)}")


def read_json(data: bytes | str, what: str) -> Field:
    """Parse JSON strictly: NaN and Infinity are no JSON. Raises Violation."""
    try:
        return Field(json.loads(data, parse_constant=_refuse_constant), what)
    except ValueError as error:
        shown = data[: LIMITS.shown_chars]
        raise Violation(f"{what} is not JSON: {shown!r} ({error})") from None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
