"""Credentials in the tools of a request: whoever reads an answer later has no business with them. Pure.

OpenAI neither keeps them nor shows them (guide "Connectors and remote MCP", "Authentication"; guide "Shell", "Domain secrets").
"""

from __future__ import annotations

from gateway.dialects.responses.items import Item

_CREDENTIALS = frozenset({"authorization", "headers", "domain_secrets"})
_DESCRIBED = frozenset({"function", "custom", "tool_search"})
"""Tools whose members describe arguments, where those names mean nothing."""


def hide_tool_credentials(tool: dict[str, object]) -> dict[str, object]:
    """Return a tool as it may be kept and repeated."""
    kind = tool.get("type")
    if isinstance(kind, str) and kind in _DESCRIBED:
        return tool
    tools = tool.get("tools")
    if kind == "namespace" and isinstance(tools, list):
        return {**_drop({**tool, "tools": None}), "tools": [_hide_in_tool(one) for one in tools]}
    return _drop(tool)


def hide_item_credentials(item: Item) -> Item:
    """Return an input item as it may be kept: the tools that it brings without their credentials."""
    tools = item.get("tools")
    return {**item, "tools": [_hide_in_tool(tool) for tool in tools]} if isinstance(tools, list) else item


def _hide_in_tool(tool: object) -> object:
    return hide_tool_credentials(tool) if isinstance(tool, dict) else tool


def _drop(fields: dict[str, object]) -> dict[str, object]:
    return {name: _clean(value) for name, value in fields.items() if name not in _CREDENTIALS}


def _clean(value: object) -> object:
    if isinstance(value, dict):
        return _drop(value)
    return [_clean(one) for one in value] if isinstance(value, list) else value
