"""Tools that only the provider of an API can run: engines which speak the surface may refuse a whole request over them."""

from __future__ import annotations

import msgspec

from wire.unreadable import UNREADABLE


class _Tool(msgspec.Struct):
    type: object = None
    input_schema: object = None


class _Body(msgspec.Struct):
    tools: list[_Tool] = []


_decoder = msgspec.json.Decoder(_Body)


def has_foreign_tools(body: bytes, *, is_anthropic: bool) -> bool:
    """Whether a request offers tools that are not plain functions, such as ``web_search`` or a custom tool with a grammar."""
    try:
        tools = _decoder.decode(body).tools
    except UNREADABLE:
        return False
    if is_anthropic:
        return any(tool.type not in (None, "custom") or not isinstance(tool.input_schema, dict) for tool in tools)
    return any(tool.type != "function" for tool in tools)
