"""Reading token usage, or something to estimate it from, out of answers whose link does not report it."""

from __future__ import annotations

import json

import msgspec

from core.limits import limits
from wire.bridge import TokenCounts
from wire.unreadable import UNREADABLE

_USAGE = b'"usage"'


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class _Body(msgspec.Struct):
    usage: _Usage | None = None


_prefix_decoder = json.JSONDecoder()
_body_decoder = msgspec.json.Decoder(_Body)


def read_usage(body: bytes) -> TokenCounts | None:
    """Return the usage of a whole answer, or None."""
    try:
        return _counts(_body_decoder.decode(body).usage)
    except UNREADABLE:
        return None


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Choices(msgspec.Struct):
    choices: list[_Choice] = []


_choices_decoder = msgspec.json.Decoder(_Choices)


def count_answer_chars(body: bytes) -> int:
    """Return the characters an unstreamed completion says, or of the whole body when it is none."""
    try:
        choices = _choices_decoder.decode(body).choices
    except UNREADABLE:
        return len(body)
    said = [choice.message.content if choice.message is not None else choice.text for choice in choices]
    return sum(len(text) for text in said if text is not None)


def find_usage(data: bytes) -> TokenCounts | None:
    """Return the last usage object in a piece of an event stream."""
    end = len(data)
    # An engine chooses the bytes, and the event loop waits while they are searched: so few places, of bounded size.
    bounds = limits().gateway
    for _ in range(bounds.usage_tries):
        end = data.rfind(_USAGE, 0, end)
        if end < 0:
            break
        start = end + len(_USAGE)
        text = data[start : start + bounds.usage_bytes].decode("latin-1").lstrip()
        try:
            value, _rest = _prefix_decoder.raw_decode(text.removeprefix(":").lstrip())
            counts = _counts(msgspec.convert(value, _Usage | None))
        except (ValueError, RecursionError):
            continue
        if counts is not None:
            return counts
    return None


def _counts(usage: _Usage | None) -> TokenCounts | None:
    if usage is None:
        return None
    prompt = usage.prompt_tokens if usage.prompt_tokens is not None else usage.input_tokens
    completion = usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens
    if prompt is None and completion is None:
        return None
    return TokenCounts(
        prompt_tokens=prompt or 0, completion_tokens=completion or 0, total_tokens=(prompt or 0) + (completion or 0)
    )
