"""Bodies of ``/v1/messages`` as far as a translation reads them, and how a wrong one is named.

Source: Anthropic API reference, "Messages". Fields that are not read here are left out of what the engine gets, so a block
may carry anything beside them (``cache_control``, ``citations``, ``caller``).
"""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from msgspec import Raw

from core.limits import limits
from gateway.dialects.body import read_fault
from gateway.errors import BadRequest
from gateway.values import WholeNumber
from wire.unreadable import UNREADABLE

_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]")
_Value = TypeVar("_Value")


class Block(msgspec.Struct):
    """One content block of any type. What differs in shape between types stays JSON text."""

    type: str
    text: str | None = None
    thinking: str | None = None
    source: Raw = Raw()
    title: str | None = None
    context: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = Raw()
    tool_use_id: str | None = None
    content: Raw = Raw()
    is_error: bool | None = None
    tool_name: str | None = None
    tabs: Raw = Raw()
    tool: Raw = Raw()


class Message(msgspec.Struct):
    """One turn. ``clear_at``: when a system message after the first turn stops being shown."""

    role: str
    content: str | list[Block] | None = None
    clear_at: str | None = None
    output_config: Raw = Raw()


class Source(msgspec.Struct):
    """Where an image or a document is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Raw = Raw()


class Tool(msgspec.Struct):
    """A tool the client runs, or one that only Anthropic's servers have (no ``input_schema``)."""

    name: str | None = None
    type: str | None = None
    description: str | None = None
    input_schema: Raw = Raw()
    strict: bool | None = None
    input_examples: Raw = Raw()


class ToolChange(msgspec.Struct):
    """What ``tool_addition`` and ``tool_removal`` blocks speak of: a tool by name, or a new one."""

    type: str
    name: str | None = None
    definition: Tool | None = None


class ToolChoice(msgspec.Struct):
    """Whether the model must, may or must not call a tool."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model thinks first, and for how many tokens."""

    type: str
    budget_tokens: WholeNumber | None = None


class OutputFormat(msgspec.Struct):
    """What an answer must look like."""

    type: str
    schema: Raw = Raw()


class OutputConfig(msgspec.Struct):
    """How hard to try, and in what form to answer."""

    effort: str | None = None
    format: OutputFormat | None = None
    task_budget: Raw = Raw()


class Metadata(msgspec.Struct):
    """Whom a request is for."""

    user_id: str | None = None


def is_absent(raw: Raw) -> bool:
    """Whether a value is not there, or null."""
    return not raw or (len(raw) == len(b"null") and bytes(raw) == b"null")


def is_object(raw: Raw) -> bool:
    """Whether a value is a JSON object."""
    return memoryview(raw)[:1].tobytes() == b"{"


def decode_as(decoder: msgspec.json.Decoder[_Value], raw: Raw, name: str) -> _Value:
    """Return the value of the field ``name`` (a path such as ``messages[3].content``). Raises BadRequest naming its part."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        reason, path = read_fault(error)
        param = name + path
        raise BadRequest(f"The field '{param}' is not usable: {reason}.", param=param) from None
    except UNREADABLE as error:
        raise BadRequest(f"The field '{name}' is not valid JSON: {error}.", param=name) from None


class LeftOut:
    """Names of what a translation leaves out, each once, fit for a header however a client chose them."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}

    def note(self, name: str) -> None:
        """Remember a name such as ``tools.web_search_20250305``."""
        if len(self._names) < limits().gateway.ignored_names:
            self._names[_UNSAFE.sub("?", name[: limits().gateway.ignored_name_chars])] = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the order in which they were noted."""
        return tuple(self._names)
