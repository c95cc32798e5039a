"""Which fields of a Messages request an engine's own ``/v1/messages`` honours; the rest it takes and forgets. Pure.

A gateway says such a request in chat completions, where the same engine honours more; a node's own port, which translates
nothing, says what is left out. Only engines that are known are in the table: of another nobody can tell.

Sources: llama.cpp, ``server_chat_convert_anthropic_to_oai``; vLLM, ``entrypoints/anthropic/protocol.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from wire.unreadable import UNREADABLE

_ALWAYS = frozenset({"model", "messages", "system", "max_tokens", "stream", "temperature", "top_p", "top_k", "stop_sequences"})
# Read by the gateway or the node, or a hint that changes no answer.
_NOT_THE_ENGINES = frozenset({"x_pool_options", "allow_remote", "cache_control"})


@dataclass(frozen=True, slots=True)
class HonouredFields:
    """``names``: of the top level. ``members``: of these objects only these. ``types``: these values of their ``type``."""

    names: frozenset[str]
    members: Mapping[str, frozenset[str]]
    types: Mapping[str, frozenset[str]]


_LLAMA = HonouredFields(
    _ALWAYS | {"tools", "tool_choice", "metadata", "thinking", "chat_template_kwargs"},
    {"tool_choice": frozenset({"type"})},
    # A tool that is named becomes "any tool", and "none" becomes nothing. Thinking can be bounded and not switched off.
    {"tool_choice": frozenset({"auto", "any"}), "thinking": frozenset({"enabled", "adaptive"})},
)
_VLLM = HonouredFields(
    _ALWAYS | {"tools", "tool_choice", "metadata", "thinking", "output_config", "chat_template_kwargs", "kv_transfer_params"},
    # Newer versions know ``format`` too, older ones forget it: in chat all of them keep to it.
    {"tool_choice": frozenset({"type", "name"}), "output_config": frozenset({"effort"})},
    {"thinking": frozenset({"adaptive"})},
)
HONOURED: Mapping[str, HonouredFields] = {"llamacpp": _LLAMA, "llama-server": _LLAMA, "vllm": _VLLM}
"""By the name of the engine, as nodes report it."""
FORMATS = frozenset({"output_config", "output_config.format", "output_format"})
"""Paths by which a request asks for an answer of a certain shape: one without it is no answer to that request."""

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_ABSENT = frozenset({b"null", b"{}", b"[]"})


def find_unhonoured(engines: Iterable[str], body: bytes) -> tuple[str, ...]:
    """Return the paths of the fields in a Messages body that one of these engines would take and forget.

    A body that cannot be read has none: somebody else says what is wrong with it.
    """
    tables = [HONOURED[name] for name in engines if name in HONOURED]
    if not tables:
        return ()
    try:
        fields = _fields_decoder.decode(body)
        return tuple(dict.fromkeys(path for table in tables for path in _list_unhonoured(table, fields)))
    except UNREADABLE:
        return ()


def _list_unhonoured(table: HonouredFields, fields: Mapping[str, msgspec.Raw]) -> Iterable[str]:
    for name, raw in fields.items():
        if name in _NOT_THE_ENGINES or bytes(raw) in _ABSENT:
            continue
        if name not in table.names:
            yield from _list_members(name, raw) if name == "output_config" else (name,)
            continue
        members, types = table.members.get(name), table.types.get(name)
        if members is None and types is None:
            continue
        inner = _read_object(raw)
        if members is not None:
            yield from (f"{name}.{member}" for member in inner if member not in members and _says_something(inner[member]))
        if types is not None and isinstance(inner.get("type"), str) and inner["type"] not in types:
            yield f"{name}.type"


def _list_members(name: str, raw: msgspec.Raw) -> Iterable[str]:
    """Yield the paths of the members that say something; of what is no object the name itself."""
    inner = _read_object(raw)
    return [f"{name}.{member}" for member, value in inner.items() if _says_something(value)] if inner else (name,)


def _read_object(raw: msgspec.Raw) -> dict[str, object]:
    found = msgspec.json.decode(raw)
    return found if isinstance(found, dict) else {}


def _says_something(value: object) -> bool:
    return value is not None and value is not False
