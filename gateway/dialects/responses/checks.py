"""Looking into decoded JSON whose shape a client chose, and saying which field is not as it must be."""

from __future__ import annotations

from core.limits import limits
from gateway.errors import BadRequest


def show_name(name: str) -> str:
    """Return a name a client gave, for an error text; long and unprintable ones are not repeated."""
    return f"'{name}'" if name and len(name) <= limits().gateway.fault_shown_chars and name.isprintable() else "another one"


def kind_of(fields: dict[str, object]) -> str:
    """Return the ``type`` of an item, a part or a tool; empty when it has none that is text."""
    kind = fields.get("type")
    return kind if isinstance(kind, str) else ""


def field_error(where: str, reason: str) -> BadRequest:
    """Return the error about the field at the path ``where``."""
    return BadRequest(f"The field '{where}' {reason}.", param=where)


def need_text(fields: dict[str, object], name: str, where: str) -> str:
    """Return a text that must be there. Raises BadRequest."""
    value = fields.get(name)
    if not isinstance(value, str):
        raise field_error(f"{where}.{name}", "is required" if value is None else "must be text")
    return value


def read_text(fields: dict[str, object], name: str, where: str) -> str:
    """Return a text that may be missing or null, then empty. Raises BadRequest for anything else."""
    return "" if fields.get(name) is None else need_text(fields, name, where)


def need_object(value: object, where: str) -> dict[str, object]:
    """Return ``value``, which must be a JSON object. Raises BadRequest."""
    if not isinstance(value, dict):
        raise field_error(where, "must be an object")
    return value


def need_list(value: object, where: str) -> list[object]:
    """Return ``value``, which must be a JSON array. Raises BadRequest."""
    if not isinstance(value, list):
        raise field_error(where, "must be a list")
    return value
