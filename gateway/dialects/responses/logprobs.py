"""Log probabilities of a chat answer in the words of the Responses API, which wants every key there."""

from __future__ import annotations

import msgspec


class _Candidate(msgspec.Struct):
    token: str = ""
    logprob: float = 0.0
    bytes: list[int] | None = None


class _Token(_Candidate):
    top_logprobs: list[_Candidate] | None = None


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None


def render_logprobs(logprobs: object) -> bytes:
    """Return the tokens of ``choices[].logprobs`` as JSON without brackets; nothing when there are none to read."""
    try:
        tokens = msgspec.convert(logprobs, _Logprobs).content or []
    except msgspec.ValidationError:
        return b""
    for token in tokens:
        token.top_logprobs = token.top_logprobs or []
        for candidate in (token, *token.top_logprobs):
            candidate.bytes = list(candidate.token.encode()) if candidate.bytes is None else candidate.bytes
    return msgspec.json.encode(tokens)[1:-1]
