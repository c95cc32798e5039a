"""The parameters of operations, brought into the one form that is signed. What cannot be signed is refused in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from core.limits import limits
from governance.errors import InvalidProposal
from wire.optoken.approval import ApprovalError, canonical

SCOPES = ("all", "model", "tenant", "tag")
_NEEDED_BY_SCOPE = {"model": "modelId", "tenant": "tenantId", "tag": "tag"}
KEEP = "keepLoaded"
"""Of a load: the node loads the model again by itself after every restart."""

Kind = Literal["text", "number", "truth", "object"]


@dataclass(frozen=True, slots=True)
class Field:
    """One member. ``least`` and ``most`` bound a number; None = the largest of a column."""

    kind: Kind
    is_required: bool = False
    least: int = 1
    most: int | None = None


LOAD_FIELDS: Mapping[str, Field] = {
    "modelId": Field("text", is_required=True),
    "quantization": Field("text"),
    "maxContextLength": Field("number"),
    "gpuMemoryBudgetMB": Field("number"),
    "evictModel": Field("text"),
    "overrides": Field("object"),
    KEEP: Field("truth"),
}
UNLOAD_FIELDS: Mapping[str, Field] = {"modelId": Field("text", is_required=True), "force": Field("truth")}
FLUSH_FIELDS: Mapping[str, Field] = {
    "scope": Field("text", is_required=True),
    "tenantId": Field("text"),
    "modelId": Field("text"),
    "tag": Field("text"),
}
DRAIN_FIELDS: Mapping[str, Field] = {"timeout_s": Field("number", is_required=True, least=0, most=86_400)}
RELOAD_FIELDS: Mapping[str, Field] = {}
EVICT_FIELDS: Mapping[str, Field] = {}


def clean_params(params: Mapping[str, object], fields: Mapping[str, Field]) -> dict[str, object]:
    """Return the members that are signed; those that are null or empty text are left out. Raises InvalidProposal."""
    unknown = sorted(params.keys() - fields.keys())
    if unknown:
        known = ", ".join(fields) or "nothing"
        raise InvalidProposal(f"There is no parameter {unknown[0][:60]!r} here; it takes {known}.", param=unknown[0][:60])
    given = {name: value for name, value in params.items() if value is not None and value != ""}
    missing = [name for name, field in fields.items() if field.is_required and name not in given]
    if missing:
        raise InvalidProposal(f"{missing[0]} must be given.", param=missing[0])
    cleaned = {name: _clean_value(name, given[name], field) for name, field in fields.items() if name in given}
    try:
        canonical(cleaned)
    except ApprovalError as error:
        raise InvalidProposal(f"These parameters cannot be signed: {error}.", param="params") from None
    return cleaned


def clean_flush(params: Mapping[str, object]) -> dict[str, object]:
    """Return the members of a flush, with what its scope needs. Raises InvalidProposal."""
    cleaned = clean_params(params, FLUSH_FIELDS)
    scope = str(cleaned["scope"])
    if scope not in SCOPES:
        raise InvalidProposal(f"scope must be one of {', '.join(SCOPES)}.", param="scope")
    needed = _NEEDED_BY_SCOPE.get(scope)
    if needed is not None and needed not in cleaned:
        raise InvalidProposal(f"The scope {scope} needs {needed}.", param=needed)
    allowed = {"scope", "modelId", needed} | ({"tenantId"} if scope == "tag" else set())
    extra = sorted(cleaned.keys() - allowed)
    if extra:
        raise InvalidProposal(f"The scope {scope} makes no use of {extra[0]}; leave it out.", param=extra[0])
    return cleaned


def _clean_value(name: str, value: object, field: Field) -> object:
    match field.kind:
        case "text":
            if (
                not isinstance(value, str)
                or len(value) > limits().nodes.operation_text_chars
                or not value.isprintable()
                or value != value.strip()
            ):
                most = limits().nodes.operation_text_chars
                raise InvalidProposal(
                    f"{name} must be printable text of at most {most} characters, without outer blanks.", param=name
                )
        case "number":
            _check_number(name, value, field)
        case "truth":
            if not isinstance(value, bool):
                raise InvalidProposal(f"{name} must be true or false.", param=name)
        case "object":
            if not isinstance(value, Mapping) or len(value) > limits().nodes.operation_overrides:
                raise InvalidProposal(
                    f"{name} must be an object of at most {limits().nodes.operation_overrides} members.", param=name
                )
            _refuse_floats(name, value)
            return dict(value)
    return value


def _check_number(name: str, value: object, field: Field) -> None:
    _refuse_floats(name, value)
    most = limits().nodes.report_integer if field.most is None else field.most
    if isinstance(value, bool) or not isinstance(value, int) or not field.least <= value <= most:
        raise InvalidProposal(f"{name} must be a whole number from {field.least} to {most}.", param=name)


def _refuse_floats(name: str, value: object) -> None:
    """Fractions have several spellings, and what is signed must have one."""
    if isinstance(value, float):
        raise InvalidProposal(
            f"{name} is {value}: only whole numbers can be signed. Give it in a smaller unit, or set it on the node.",
            param=name,
        )
    if isinstance(value, Mapping):
        for inner, each in value.items():
            _refuse_floats(f"{name}.{inner}", each)
    elif isinstance(value, list | tuple):
        for each in value:
            _refuse_floats(name, each)
