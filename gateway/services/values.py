"""Checks of names and limits that several services share."""

from __future__ import annotations

from core.limits import limits
from gateway.services.errors import InvalidValue
from gateway.values import Priority


def clean_name(name: str, *, what: str, param: str = "name", max_chars: int | None = None) -> str:
    """Return ``name`` trimmed. Raises InvalidValue when it is empty, too long or holds control characters."""
    cleaned = name.strip()
    max_chars = limits().gateway.name_chars if max_chars is None else max_chars
    if not cleaned or len(cleaned) > max_chars or not cleaned.isprintable():
        raise InvalidValue(f"Give the {what} a name of 1 to {max_chars} printable characters.", param=param)
    return cleaned


def clean_model_name(name: str, *, param: str = "name") -> str:
    """Return a model name. Raises InvalidValue."""
    return clean_name(name, what="model", param=param, max_chars=limits().gateway.model_name_chars)


def clean_priority(value: str, *, param: str = "priority") -> Priority:
    """Return a priority. Raises InvalidValue."""
    try:
        return Priority(value)
    except ValueError:
        raise InvalidValue(f"{param} must be one of {', '.join(Priority)}.", param=param) from None


def clean_limit(value: int | None, *, param: str) -> int | None:
    """Return a limit of at least 1, or None for "not set here". Raises InvalidValue."""
    most = limits().gateway.record_integer
    if value is not None and not 1 <= value <= most:
        raise InvalidValue(f"{param} must be between 1 and {most}, or empty for the default.", param=param)
    return value


def clean_days(value: int, *, param: str) -> int:
    """Return for how many days something is kept. Raises InvalidValue."""
    if not 1 <= value <= limits().gateway.kept_days:
        raise InvalidValue(f"{param} must be between 1 and {limits().gateway.kept_days}.", param=param)
    return value
