"""The shapes of answers: chunks of a stream and whole objects of both endpoints (OpenAI API reference). Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Counts and times of one generation, filled in as it goes on; times in milliseconds."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    tokenize_ms: float = 0.0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0

    def usage(self) -> dict[str, object]:
        """Return the ``usage`` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def timings(self) -> dict[str, object]:
        """Return the ``timings`` object, named as llama.cpp's server names them; ``tokenize_ms`` is our addition."""
        return {
            "prompt_n": self.prompt_tokens - self.cached_tokens,
            "cache_n": self.cached_tokens,
            "prompt_ms": round(self.prompt_ms, 3),
            "predicted_n": self.completion_tokens,
            "predicted_ms": round(self.predicted_ms, 3),
            "tokenize_ms": round(self.tokenize_ms, 3),
        }


class Shape:
    """The objects of one answer; ``chat`` tells the two endpoints apart."""

    def __init__(self, *, chat: bool, number: str, model: str, created: int) -> None:
        self._chat = chat
        prefix, kind = ("chatcmpl-", "chat.completion") if chat else ("cmpl-", "text_completion")
        self._head = {"id": prefix + number, "object": kind, "created": created, "model": model}
        self._chunk_head = {**self._head, "object": "chat.completion.chunk" if chat else kind}

    def opening(self) -> list[bytes]:
        """Return the events before any text: the role, for a chat."""
        return [self._event([self._delta({"role": "assistant", "content": ""}, None)])] if self._chat else []

    def piece(self, text: str) -> bytes:
        """Return the event of one piece of text."""
        return self._event([self._delta({"content": text}, None) if self._chat else self._text(text, None)])

    def closing(self, finish: str, tally: Tally, *, with_usage: bool) -> list[bytes]:
        """Return the last events: the reason, the usage if asked for, and ``[DONE]``; the last object has the timings."""
        last = [self._delta({}, finish) if self._chat else self._text("", finish)]
        if not with_usage:
            return [self._event(last, timings=tally.timings()), b"data: [DONE]\n\n"]
        usage = self._event([], usage=tally.usage(), timings=tally.timings())
        return [self._event(last), usage, b"data: [DONE]\n\n"]

    def whole(self, text: str, finish: str, tally: Tally) -> dict[str, object]:
        """Return the whole answer."""
        choice: dict[str, object] = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        return {**self._head, "choices": [choice], "usage": tally.usage(), "timings": tally.timings()}

    def _event(self, choices: list[dict[str, object]], **more: object) -> bytes:
        return as_event({**self._chunk_head, "choices": choices, **more})

    def _delta(self, delta: dict[str, object], finish: str | None) -> dict[str, object]:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}

    def _text(self, text: str, finish: str | None) -> dict[str, object]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


def as_event(value: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
