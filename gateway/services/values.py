"""Checks of names and limits that several services share."""

from __future__ import annotations

from gateway.services.errors import InvalidValue
from gateway.values import Priority

MAX_NAME_CHARS = 80
MAX_MODEL_NAME_CHARS = 200
MAX_LIMIT = 2_147_483_647
"""The largest number a PostgreSQL integer column holds."""
MAX_KEPT_DAYS = 3650


def clean_name(name: str, *, what: str, param: str = "name", max_chars: int = MAX_NAME_CHARS) -> str:
    """Return ``name`` trimmed. Raises InvalidValue when it is empty, too long or holds control characters."""
    cleaned = name.strip()
    if not cleaned or len(cleaned) > max_chars or not cleaned.isprintable():
        raise InvalidValue(f"Give the {what} a name of 1 to {max_chars} printable characters.", param=param)
    return cleaned


def clean_model_name(name: str, *, param: str = "name") -> str:
    """Return a model name. Raises InvalidValue."""
    return clean_name(name, what="model", param=param, max_chars=MAX_MODEL_NAME_CHARS)


def clean_priority(value: str, *, param: str = "priority") -> Priority:
    """Return a priority. Raises InvalidValue."""
    try:
        return Priority(value)
    except ValueError:
        raise InvalidValue(f"{param} must be one of {', '.join(Priority)}.", param=param) from None


def clean_limit(value: int | None, *, param: str) -> int | None:
    """Return a limit of at least 1, or None for "not set here". Raises InvalidValue."""
    if value is not None and not 1 <= value <= MAX_LIMIT:
        raise InvalidValue(f"{param} must be between 1 and {MAX_LIMIT}, or empty for the default.", param=param)
    return value


def clean_days(value: int, *, param: str) -> int:
    """Return for how many days something is kept. Raises InvalidValue."""
    if not 1 <= value <= MAX_KEPT_DAYS:
        raise InvalidValue(f"{param} must be between 1 and {MAX_KEPT_DAYS}.", param=param)
    return value
