"""What adapters share that have their engine count tokens: short questions, and what its refusals mean."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from runner.engines.http import HttpServer
from runner.engines.port import TOKENIZE
from runner.errors import EngineError, InvalidRequest
from runner.limits import limits
from wire.unreadable import UNREADABLE

_REFUSALS = frozenset({400, 413, 422})


class _Reason(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    """An error answer: OpenAI's object, the text of TGI, or a bare message."""

    error: _Reason | str | None = None
    message: str = ""


class _Counted(msgspec.Struct):
    count: int


class _InputTokens(msgspec.Struct):
    input_tokens: int


class _Tokens(msgspec.Struct):
    tokens: list[msgspec.Raw]


class _Prompt(msgspec.Struct):
    prompt: str


_counted_decoder = msgspec.json.Decoder(_Counted)
_input_decoder = msgspec.json.Decoder(_InputTokens)
_tokens_decoder = msgspec.json.Decoder(_Tokens)
_prompt_decoder = msgspec.json.Decoder(_Prompt)
_refusal_decoder = msgspec.json.Decoder(_Refusal)


def take_answer(path: str, status: int, body: bytes) -> bytes:
    """Return the body of a good answer. Raises InvalidRequest with the engine's reason, EngineError for any other failure."""
    if status == 200:
        return body
    if status in _REFUSALS:
        raise InvalidRequest(_read_reason(body) or "The engine does not accept this prompt.")
    raise EngineError(f"{path} answers HTTP {status}")


async def ask_count(server: HttpServer, path: str, fields: Mapping[str, msgspec.Raw]) -> int:
    """Ask an engine that answers ``{"count": …}``. Raises InvalidRequest, EngineError."""
    status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
    try:
        return _counted_decoder.decode(take_answer(path, status, body)).count
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EngineError(f"{path} answers with something else than a count") from None


async def ask_child(server: HttpServer, fields: Mapping[str, msgspec.Raw]) -> int:
    """Ask a child process of ours. Raises InvalidRequest, EngineError."""
    return await ask_count(server, TOKENIZE, fields)


async def ask_llama(server: HttpServer, fields: Mapping[str, msgspec.Raw]) -> int:
    """Ask llama.cpp, for messages as it counts them itself, pictures included. Raises InvalidRequest, EngineError.

    Servers from before the middle of 2026 do not count messages: of those the template and the tokenizer are asked.
    """
    if "messages" not in fields:
        return await _ask_llama_text(server, fields, fields["prompt"])
    path = "/v1/chat/completions/input_tokens"
    status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
    try:
        if status != 404:
            return _input_decoder.decode(take_answer(path, status, body)).input_tokens
        path = "/apply-template"
        status, body = await server.ask("POST", path, body=fields, timeout_s=limits().engines.count_s)
        prompt = _prompt_decoder.decode(take_answer(path, status, body)).prompt
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EngineError(f"{path} does not answer as llama.cpp does") from None
    return await _ask_llama_text(server, fields, msgspec.Raw(msgspec.json.encode(prompt)))


async def _ask_llama_text(server: HttpServer, fields: Mapping[str, msgspec.Raw], text: msgspec.Raw) -> int:
    """Count a text the way llama.cpp reads a prompt: with the special tokens in it, and the one that it begins with."""
    path = "/tokenize"
    asked: dict[str, object] = {"model": fields["model"], "content": text, "add_special": True, "parse_special": True}
    status, body = await server.ask("POST", path, body=asked, timeout_s=limits().engines.count_s)
    try:
        return len(_tokens_decoder.decode(take_answer(path, status, body)).tokens)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EngineError(f"{path} answers with something else than tokens") from None


def _read_reason(body: bytes) -> str:
    try:
        refusal = _refusal_decoder.decode(body)
    except UNREADABLE:
        return ""
    error = refusal.error
    reason = error if isinstance(error, str) else error.message if error is not None else refusal.message
    return reason[: limits().engines.said_chars]
