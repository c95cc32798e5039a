"""Rows on errors of the engine: they arrive as errors of the dialect, with status, words and Retry-After kept."""

from __future__ import annotations

from conformance.engine.failures import REASON
from conformance.exchange import Answer
from conformance.rows.errors import check_openai_error
from conformance.table import Surface, requirement
from conformance.target import Target, require_status
from conformance.verdicts import NotApplicable, Violation


async def _failed(target: Target, directive: str, *statuses: int) -> list[Answer]:
    """Return the answers to a request with and without streaming, which must have one of the statuses."""
    answers = [await target.chat(f"[[{directive}]] hello", stream=stream) for stream in (False, True)]
    for answer in answers:
        require_status(answer, *statuses)
    return answers


@requirement(
    "errors.engine.context",
    "a prompt that does not fit: 400, code context_length_exceeded",
    clients="Codex, LangChain, Continue",
    needs_script=True,
    needs=Surface.CHAT,
)
async def _context(target: Target) -> None:
    for dialect in ("error_400_context", "error_400_context:vllm", "error_400_context:openai"):
        for answer in await _failed(target, dialect, 400):
            error = check_openai_error(answer)
            error["type"].must_be("invalid_request_error")
            error["code"].must_be("context_length_exceeded")


@requirement(
    "errors.engine.real_context",
    "a real prompt that does not fit: 400, code context_length_exceeded",
    clients="Codex, LangChain, Continue",
    needs=Surface.CHAT,
)
async def _real_context(target: Target) -> None:
    if target.scripted:
        raise NotApplicable("the scripted engine takes any prompt; errors.engine.context checks its words")
    answer = await target.chat("How many words fit into a window? " * 9000)
    if answer.status == 200:
        raise NotApplicable("the model takes 63 000 words")
    require_status(answer, 400)
    error = check_openai_error(answer)
    error["type"].must_be("invalid_request_error")
    error["code"].must_be("context_length_exceeded", "PROMPT_TOO_LARGE")


@requirement(
    "errors.engine.bad_request",
    "an engine's 400 stays a 400 with its words",
    clients="every SDK shows them",
    needs_script=True,
    needs=Surface.CHAT,
)
async def _bad_request(target: Target) -> None:
    for answer in await _failed(target, "error_400", 400):
        _must_tell(answer, "invalid_request_error")


@requirement(
    "errors.engine.detail",
    "an engine's {detail: …} becomes an error object with its words",
    clients="SDKs lose the message otherwise",
    needs_script=True,
    needs=Surface.CHAT,
)
async def _detail(target: Target) -> None:
    for answer in await _failed(target, "detail_error", 400, 422):
        _must_tell(answer, "invalid_request_error")


@requirement(
    "errors.engine.text",
    "an engine's {error: text} becomes an error object with its words",
    clients="SDKs lose the message otherwise",
    needs_script=True,
    needs=Surface.CHAT,
)
async def _text(target: Target) -> None:
    for answer in await _failed(target, "text_error", 400):
        _must_tell(answer, "invalid_request_error")


@requirement(
    "errors.engine.failure",
    "an engine's 500: 500 or 502, server_error",
    clients="SDKs retry it",
    needs_script=True,
    needs=Surface.CHAT,
)
async def _failure(target: Target) -> None:
    for answer in await _failed(target, "error_500", 500, 502):
        check_openai_error(answer)["type"].must_be("server_error")


@requirement(
    "errors.engine.html", "an engine's page of HTML becomes JSON", clients="every SDK", needs_script=True, needs=Surface.CHAT
)
async def _html(target: Target) -> None:
    for answer in await _failed(target, "html_error", 500, 502):
        if b"<html" in answer.body:
            raise Violation("the page is in the answer")
        check_openai_error(answer)["type"].must_be("server_error")


@requirement(
    "errors.engine.empty",
    "an engine's error without a body becomes an error object",
    clients="SDKs show `Error code: 500` alone",
    needs_script=True,
    needs=Surface.CHAT,
)
async def _empty(target: Target) -> None:
    for answer in await _failed(target, "empty_error", 500, 502):
        check_openai_error(answer)


@requirement(
    "errors.engine.rate",
    "an engine's 429: 429, rate_limit_error, Retry-After kept",
    clients="SDKs wait as told",
    needs_script=True,
    needs=Surface.CHAT,
)
async def _rate(target: Target) -> None:
    for answer in await _failed(target, "error_429", 429):
        check_openai_error(answer)["type"].must_be("rate_limit_error")
        if not answer.header("retry-after"):
            raise Violation("Retry-After is missing")


@requirement(
    "errors.engine.overloaded",
    "an engine's 503: 503 with Retry-After, server_error",
    clients="Codex tries 30 times, SDKs wait as told",
    needs_script=True,
    needs=Surface.CHAT,
)
async def _overloaded(target: Target) -> None:
    for answer in await _failed(target, "error_503", 503):
        check_openai_error(answer)["type"].must_be("server_error")
        if not answer.header("retry-after"):
            raise Violation("Retry-After is missing")


def _must_tell(answer: Answer, kind: str) -> None:
    error = check_openai_error(answer)
    error["type"].must_be(kind)
    if REASON not in error["message"].text():
        raise Violation(f"the engine's words are lost: {error['message'].shown}")
