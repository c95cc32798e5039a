"""Reading by how much a prompt is too long: every engine has words of its own for it, and clients act on the numbers. Pure.

Sources: the errors of vLLM 0.4 to 0.20, SGLang, llama.cpp, TGI, TabbyAPI, OpenAI, Anthropic.
"""

from __future__ import annotations

import re

from gateway.errors import ContextTooLong
from wire.limits import WIRE

_MARKS = tuple(
    mark.encode()
    for mark in (
        "maximum context length",
        "context_length_exceeded",
        "exceed_context_size_error",
        "available context size",
        "context window",
        "maximum model length",
        "model's context length",
        "exceeds the context length",
        "exceed context limit",
        "context length of only",
        "prompt is too long",
        "maximum prompt length",
        "exceed the configured limit",
        "max_seq_len",
        "`max_new_tokens` must be <=",
    )
)
_NUMBER = r"(\d{1,12})"
_PROMPT = re.compile(rf"{_NUMBER} (?:input tokens|tokens from the input|`inputs` tokens|in the (?:messages|prompt))")
_ANSWER = re.compile(
    rf"requested {_NUMBER} output tokens|{_NUMBER} (?:in|tokens for) the completion"
    rf"|and {_NUMBER} `max_new_tokens`|is too large: {_NUMBER}\."
)
_CONTEXT = re.compile(rf"context length (?:is|of)(?: only)? {_NUMBER}|must be <= {_NUMBER}")
_SUM = re.compile(rf"context limit: {_NUMBER} \+ {_NUMBER} > {_NUMBER}")
_COUNT = re.compile(rf"{_NUMBER}( characters)?")
_AT_LEAST = re.compile(r"\bat least \d")
"""vLLM reads no more of a prompt than shows that it is too long."""
_COMMA = re.compile(r"(?<=\d),(?=\d{3})")


def is_about_context(body: bytes) -> bool:
    """Whether an engine says that prompt and answer do not fit into the context."""
    head = body[: WIRE.error_head_bytes].lower()
    return any(mark in head for mark in _MARKS)


def read_overflow(words: str) -> ContextTooLong:
    """Return the error with the counts that the words name, as far as it is clear what each of them counts."""
    text = _COMMA.sub("", words)
    if found := _SUM.search(text):
        return _make(words, prompt=int(found[1]), answer=int(found[2]), context=int(found[3]))
    prompt, answer, context = (_first(pattern, text) for pattern in (_PROMPT, _ANSWER, _CONTEXT))
    if answer is not None:
        if prompt is None or context is None:
            return ContextTooLong(words)
        return _make(words, prompt=prompt, answer=answer, context=context)
    numbers = [int(found[1]) for found in _COUNT.finditer(text) if found[2] is None]
    if len(numbers) < 2:
        return ContextTooLong(words)
    # Most name the limit before what was asked for, and the first number beyond it is the request's.
    limit = numbers[0]
    asked = next((number for number in numbers[1:] if number > limit), 0)
    if not asked:
        limit, asked = min(numbers), max(numbers)
    return _make(words, prompt=asked, answer=0, context=limit)


def _make(words: str, *, prompt: int, answer: int, context: int) -> ContextTooLong:
    is_at_least = _AT_LEAST.search(words) is not None
    return ContextTooLong(words, prompt_tokens=prompt, context_tokens=context, answer_tokens=answer, is_at_least=is_at_least)


def _first(pattern: re.Pattern[str], text: str) -> int | None:
    found = pattern.search(text)
    return None if found is None else int(next(group for group in found.groups() if group is not None))
