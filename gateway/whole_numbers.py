"""Integers as clients write them: JSON has one kind of number, in which 5, 5.0 and 5e0 are the same (RFC 8259, section 6).

JSON Schema's ``integer`` means any of them, and the servers whose clients come here take any of them.
"""

from __future__ import annotations

import numbers
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    WholeNumber: TypeAlias = int
else:
    # What msgspec does not know it asks a hook for. Every int is an instance of this, so the values stay plain.
    WholeNumber = numbers.Integral


def read_whole_number(kind: type[Any], value: Any) -> Any:  # Any: msgspec's hook, called with whatever stood in the JSON
    """Return a number for a field of the type ``WholeNumber``; the ``dec_hook`` of a decoder. Raises ValueError."""
    if kind is object:  # unlike Any, it is asked for too
        return value
    if kind is not WholeNumber:
        raise NotImplementedError(kind)
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    raise ValueError(f"Expected `int`, got `{type(value).__name__}`")
