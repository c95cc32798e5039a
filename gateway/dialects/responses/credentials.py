"""Credentials in the tools of a request: whoever reads an answer later has no business with them. Pure.

OpenAI neither keeps them nor shows them (guide "Connectors and remote MCP", "Authentication"; guide "Shell", "Domain secrets").
"""

from __future__ import annotations

from core.limits import limits
from gateway.dialects.responses.items import Item
from gateway.errors import BadRequest

_CREDENTIALS = frozenset({"authorization", "headers", "domain_secrets"})
_DESCRIBED = frozenset({"function", "custom", "tool_search"})
"""Tools whose members describe arguments, where those names mean nothing."""


def hide_tool_credentials(tool: dict[str, object], *, levels: int | None = None) -> dict[str, object]:
    """Return a tool as it may be kept and repeated. Raises BadRequest for one with more than ``levels`` levels."""
    levels = limits().gateway.tool_levels if levels is None else levels
    _check(levels)
    kind = tool.get("type")
    if isinstance(kind, str) and kind in _DESCRIBED:
        return tool
    tools = tool.get("tools")
    if kind == "namespace" and isinstance(tools, list):
        return {**_drop({**tool, "tools": None}, levels), "tools": [_hide_in_tool(one, levels - 1) for one in tools]}
    return _drop(tool, levels)


def hide_item_credentials(item: Item) -> Item:
    """Return an input item as it may be kept: the tools that it brings without their credentials. Raises BadRequest."""
    tools = item.get("tools")
    levels = limits().gateway.tool_levels
    return {**item, "tools": [_hide_in_tool(tool, levels) for tool in tools]} if isinstance(tools, list) else item


def _hide_in_tool(tool: object, levels: int) -> object:
    return hide_tool_credentials(tool, levels=levels) if isinstance(tool, dict) else tool


def _drop(fields: dict[str, object], levels: int) -> dict[str, object]:
    return {name: _clean(value, levels - 1) for name, value in fields.items() if name not in _CREDENTIALS}


def _clean(value: object, levels: int) -> object:
    if not isinstance(value, dict | list):
        return value
    _check(levels)
    return _drop(value, levels) if isinstance(value, dict) else [_clean(one, levels - 1) for one in value]


def _check(levels: int) -> None:
    if levels <= 0:
        most = limits().gateway.tool_levels
        raise BadRequest(f"The field 'tools' has more than {most} levels of lists and objects.", param="tools")
