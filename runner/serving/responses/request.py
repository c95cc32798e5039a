"""The request: which bodies are in llm-pool's shape, and reading one strictly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from runner.definitions.fields import DECODING_FIELDS, Decoding, Field, merge_decoding, text, type_name
from runner.errors import InvalidRequest
from wire.unreadable import UNREADABLE

_CODE = Field(Annotated[str, text("a language code such as en or pt-BR", "[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8}){0,3}")] | None)

_FIELDS: Mapping[str, Field | None] = {
    "model": Field(Annotated[str, text("a model id")]),
    "input": None,
    "instructions": None,
    "source_lang_code": _CODE,
    "target_lang_code": _CODE,
    "stream": Field(bool),
    "allow_remote": Field(bool),
    "decoding": None,
}
"""Every field of the request; those without a kind are texts of any length, and the nested object."""

_POOL_ONLY = frozenset({"decoding", "source_lang_code", "target_lang_code"})
"""Fields that OpenAI's Responses API does not have. ``allow_remote`` is one too, but useful in both."""


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, defaults filled in. ``given`` are the decoding fields that the client itself named.

    ``instructions`` None = the client said nothing, an empty text = it wants none.
    """

    model: str
    input: str
    instructions: str | None = None
    source_lang_code: str | None = None
    target_lang_code: str | None = None
    stream: bool = False
    allow_remote: bool = False
    decoding: Decoding = Decoding()
    given: frozenset[str] = frozenset()


def uses_pool_shape(body: bytes, *, on_socket: bool) -> bool:
    """Return whether a body for ``/v1/responses`` is llm-pool's rather than OpenAI's.

    On the box's own port (``on_socket`` False) a text as ``input`` and none but llm-pool's fields is enough. Through a
    gateway, whose clients expect OpenAI's shape, it takes a field that only llm-pool has.
    """
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE:
        return False
    if not isinstance(fields, dict):
        return False
    if _POOL_ONLY & fields.keys():
        return True
    if not isinstance(fields.get("input"), str):
        return False
    return "allow_remote" in fields or (not on_socket and fields.keys() <= _FIELDS.keys())


def read_pool_request(body: bytes, *, defaults: Decoding) -> PoolRequest:
    """Return the request. Raises InvalidRequest; ``param`` is the dotted name of the field, and no text is repeated."""
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE:
        raise InvalidRequest("the body is not JSON in UTF-8") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {type_name(fields)}")
    _refuse_unknown(fields, _FIELDS, "")
    for name in ("model", "input"):
        if name not in fields:
            raise InvalidRequest(f"{name} is missing", param=name)
    for name, value in fields.items():
        kind = _FIELDS[name]
        if kind is not None:
            _check(name, value, kind)
    given = _read_decoding(fields.get("decoding", {}))
    return PoolRequest(
        model=fields["model"],
        input=_read_text(fields, "input"),
        instructions=None if fields.get("instructions") is None else _read_text(fields, "instructions"),
        source_lang_code=fields.get("source_lang_code"),
        target_lang_code=fields.get("target_lang_code"),
        stream=fields.get("stream", False),
        allow_remote=fields.get("allow_remote", False),
        decoding=merge_decoding(defaults, given),
        given=frozenset(given),
    )


def _read_decoding(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"decoding must be an object, not {type_name(value)}", param="decoding")
    _refuse_unknown(value, DECODING_FIELDS, "decoding.")
    for name, given in value.items():
        _check(f"decoding.{name}", given, DECODING_FIELDS[name])
    return value


def _read_text(fields: Mapping[str, object], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str) or (name == "input" and not value):
        what = "a string that is not empty" if name == "input" else "a string or null"
        got = "an empty one" if value == "" else type_name(value)
        raise InvalidRequest(f"{name} must be {what}, not {got}", param=name)
    return value


def _refuse_unknown(fields: Mapping[str, object], known: Mapping[str, object], prefix: str) -> None:
    for name in fields:
        if name not in known:
            shown = name if name.isprintable() and len(name) <= 60 else "(a name)"
            allowed = ", ".join(known)
            raise InvalidRequest(f"{prefix}{shown} is unknown; allowed are {allowed}", param=f"{prefix}{shown}")


def _check(name: str, value: object, kind: Field) -> None:
    if not kind.accepts(value):
        got = type_name(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            got = str(value)[:40]
        raise InvalidRequest(f"{name} must be {kind.allowed()}, not {got}", param=name)
