"""A prompt as it is counted, and what a count says of itself."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from core.limits import limits


class Source(StrEnum):
    """Who counted, as ``x-muster-token-count`` says it."""

    TOKENIZER = "tokenizer"
    ENGINE = "engine"
    ESTIMATE = "estimate"


class UnusableFolder(Exception):
    """There is no tokenizer of that name, or it cannot be used; the text says why, to an operator."""


@dataclass(frozen=True, slots=True)
class Count:
    """``is_estimated``: some part of it is not counted but guessed. ``node``: the box that counted, if one did."""

    tokens: int
    source: Source
    is_estimated: bool = False
    node: str = ""


class _Chat(msgspec.Struct):
    """The fields of a chat completion that decide how long its prompt is. Any: JSON."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


_decoder = msgspec.json.Decoder(_Chat)
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation as chat templates read it: contents are text, arguments of tool calls are objects. Any: JSON.

    ``media``: pictures, recordings and files, which are left out of the contents. ``variables``: what the client hands to
    the template.
    """

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    variables: dict[str, Any]
    media: int

    def to_text(self) -> str:
        """Return all of it one after the other, as no template would have it."""
        parts = [_encoder.encode(self.tools).decode()] if self.tools else []
        for message in self.messages:
            parts.append(str(message["content"]))
            if message.get("tool_calls"):
                parts.append(_encoder.encode(message["tool_calls"]).decode())
        return "\n".join(parts)

    @property
    def framing_tokens(self) -> int:
        """Tokens that a template would add to the text."""
        return limits().gateway.token_message * len(self.messages) + limits().gateway.token_answer

    @property
    def media_tokens(self) -> int:
        """Tokens that pictures, recordings and files are taken to have."""
        return limits().gateway.token_media * self.media


def read_prompt(chat: bytes) -> ChatPrompt:
    """Return the prompt of a chat completion that a translation has made."""
    fields = _decoder.decode(chat)
    media = 0
    for message in fields.messages:
        text, left_out = _flatten(message.get("content"))
        media += left_out
        message["content"] = text
        for call in message.get("tool_calls") or ():
            _open_arguments(call.get("function"))
    return ChatPrompt(fields.messages, fields.tools or None, fields.chat_template_kwargs or {}, media)


def estimate_tokens(prompt: ChatPrompt) -> int:
    """Return about how many tokens a prompt has."""
    return -(-len(prompt.to_text().encode()) // limits().gateway.token_bytes) + prompt.framing_tokens + prompt.media_tokens


def _flatten(content: object) -> tuple[str, int]:
    """Return the text of a content, parts on lines of their own as vLLM joins them, and how many parts have none."""
    if not isinstance(content, list):
        return content if isinstance(content, str) else "", 0
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else part for part in content]
    kept = [text for text in texts if isinstance(text, str)]
    return "\n".join(kept), len(texts) - len(kept)


def _open_arguments(function: Any) -> None:  # Any: JSON
    """Put the object in place of its text, which is how templates want the arguments of a call."""
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(arguments, str):
        return
    try:
        opened = json.loads(arguments)
    except (ValueError, RecursionError):
        return
    if isinstance(opened, dict):
        function["arguments"] = opened
