"""Rows on refusals by the server itself: shape, status and type in the caller's dialect, JSON always."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Mapping

from conformance.dialects import OPENAI_ERROR_KEYS, Dialect, each
from conformance.engine.script import REASON
from conformance.exchange import LIMITS, Answer, Ask, Connection, Field, NotApplicable, Violation
from conformance.readers.messages import check_error
from conformance.table import CHAT, MESSAGES, MODELS, RESPONSES, Check, Row, Surface, Target, require_status, scripted

_WRONG_KEY = "sk-this-key-is-nobodys-0000000000000000"


def _check_error(answer: Answer, path: str) -> Field:
    """Check an error as the path's dialect has it and return its object. Raises Violation."""
    if not answer.header("content-type").startswith("application/json"):
        raise Violation(f"{answer.status} as {answer.header('content-type') or 'no content-type'}: {answer.body[:80]!r}")
    if path == MESSAGES:
        check_error(answer.json())
        answer.json()["request_id"].word()
        if not answer.header("request-id"):
            raise Violation("the header request-id is missing")
        return answer.json()["error"]
    error = answer.json()["error"]
    error.must_have(OPENAI_ERROR_KEYS)
    error["message"].word()
    error["type"].word()
    if not error["code"].is_null:
        error["code"].text()
    if not answer.header("x-request-id"):
        raise Violation("x-request-id is missing")
    return error


async def _refused(
    target: Target, path: str, body: object, status: int, kind: str, headers: Mapping[str, str | None] | None = None
) -> Field:
    """Return the error object of a request that is to be refused with a status and a type. Raises Violation."""
    answer = await target.send(target.ask_json(path, body, headers))
    require_status(answer, status)
    error = _check_error(answer, path)
    error["type"].must_be(kind)
    return error


def _must_name(error: Field, words: str, what: str) -> None:
    if words not in error["message"].text():
        raise Violation(f"the message does not name the {what}: {error['message'].shown}")


_REFUSING = (CHAT, RESPONSES, MESSAGES)


async def _wrong_key(dialect: Dialect, target: Target) -> None:
    path = dialect.path
    headers = {"x-api-key": _WRONG_KEY} if path == MESSAGES else {"authorization": f"Bearer {_WRONG_KEY}"}
    error = await _refused(target, path, target.body(path), 401, "authentication_error", headers)
    if _WRONG_KEY in error["message"].text():
        raise Violation("the message repeats the key")
    if "Incorrect API key provided" not in error["message"].text():
        raise Violation(f"LiteLLM looks for 'Incorrect API key provided', not for {error['message'].shown}")


async def _no_key(dialect: Dialect, target: Target) -> None:
    headers = {"authorization": None, "x-api-key": None}
    await _refused(target, dialect.path, target.body(dialect.path), 401, "authentication_error", headers)


async def _unknown_model(dialect: Dialect, target: Target) -> None:
    body = target.body(dialect.path, model="nobody-has-this")
    _must_name(await _refused(target, dialect.path, body, 404, "not_found_error"), "nobody-has-this", "model")


async def _broken_json(dialect: Dialect, target: Target) -> None:
    for body in (b'{"model": ', b"", b"[1, 2]", b"\xff\xfe"):
        await _refused(target, dialect.path, body, 400, "invalid_request_error")


async def _missing_model(dialect: Dialect, target: Target) -> None:
    body = target.body(dialect.path)
    del body["model"]
    _must_name(await _refused(target, dialect.path, body, 400, "invalid_request_error"), "model", "field")


async def _wrong_type(dialect: Dialect, target: Target) -> None:
    body = target.body(dialect.path, stream="yes")
    _must_name(await _refused(target, dialect.path, body, 400, "invalid_request_error"), "stream", "field")


async def _method(dialect: Dialect, target: Target) -> None:
    path = dialect.path
    headers = tuple((name, value) for name, value in target.headers_for(path).items() if name != "content-type")
    answer = await target.send(Ask("GET", path, headers))
    require_status(answer, 404, 405)
    _check_error(answer, path)


async def _too_large(dialect: Dialect, target: Target) -> None:
    path = dialect.path
    async with Connection.opened(target.base_url) as connection, asyncio.timeout(LIMITS.refused_s):
        answer = await connection.exchange(target.ask_json(path, b"{" + b" " * 4096), claimed_bytes=LIMITS.claimed_bytes)
    require_status(answer, 413)
    _check_error(answer, path)["type"].must_be("request_too_large" if path == MESSAGES else "invalid_request_error")


async def _no_messages(target: Target) -> None:
    wrong: tuple[object, ...] = (None, [], "hello")
    bodies = [{**target.body(CHAT), "messages": messages} for messages in wrong]
    bodies.append({name: value for name, value in target.body(CHAT).items() if name != "messages"})
    for body in bodies:
        answer = await target.send(target.ask_json(CHAT, body))
        require_status(answer, 400)
        _check_error(answer, CHAT)["param"].must_be("messages")


async def _route(target: Target) -> None:
    headers = (("authorization", f"Bearer {target.api_key}"), ("content-type", "application/json"))
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
        answer = await target.send(Ask(method, "/v1/there/is/no/such", headers, b"{}" if method != "GET" else b""))
        require_status(answer, 404)
        _check_error(answer, CHAT)


async def _anthropic_route(target: Target) -> None:
    headers = (("x-api-key", target.api_key), ("anthropic-version", "2023-06-01"), ("content-type", "application/json"))
    answer = await target.send(Ask("POST", "/v1/messages/batches", headers, b"{}"))
    require_status(answer, 404)
    answer.json()["error"]["message"].word()
    if "type" not in answer.json()["error"]:
        raise Violation(f"error.type is missing: {answer.json().shown}")


async def _models_key(target: Target) -> None:
    answer = await target.send(Ask("GET", MODELS, (("authorization", f"Bearer {_WRONG_KEY}"),)))
    require_status(answer, 401)
    _check_error(answer, CHAT)


async def _request_id(target: Target) -> None:
    for path, name in ((CHAT, "x-request-id"), (MESSAGES, "request-id")):
        for body in (target.body(path), b"{"):
            answer = await target.send(target.ask_json(path, body))
            if not answer.header(name):
                raise Violation(f"{answer.what} ({answer.status}) has no {name}")
    for stream in (True, False):
        if not (await target.say(CHAT, stream=stream)).header("x-request-id"):
            raise Violation(f"a chat answer has no x-request-id (stream: {stream})")
    for path in ("/v1/nothing", "/v1/models"):
        if not (await target.send(Ask("GET", path, (("authorization", f"Bearer {target.api_key}"),)))).header("x-request-id"):
            raise Violation(f"GET {path} has no x-request-id")


async def _encoding(target: Target) -> None:
    body = gzip.compress(json.dumps(target.body(CHAT)).encode(), mtime=0)
    answer = await target.send(target.ask_json(CHAT, body, {"content-encoding": "gzip"}))
    if answer.status != 200:
        if answer.status not in (400, 415):
            raise Violation(f"{answer.what}: {answer.status}, 400 or 415 is due")
        _check_error(answer, CHAT)


async def _host(target: Target) -> None:
    async with Connection.opened(target.base_url) as connection:
        connection.host = "gateway.internal:9999"
        answer = await connection.exchange(target.ask_json(CHAT, target.body(CHAT)))
    require_status(answer, 200)


async def _failed(target: Target, directive: str, *statuses: int) -> list[Answer]:
    """Return the answers to a request with and without streaming, which must have one of the statuses."""
    answers = [await target.say(CHAT, f"[[{directive}]] hello", stream=stream) for stream in (False, True)]
    for answer in answers:
        require_status(answer, *statuses)
    return answers


async def _context(target: Target) -> None:
    for dialect in ("error_400_context", "error_400_context:vllm", "error_400_context:openai"):
        for answer in await _failed(target, dialect, 400):
            error = _check_error(answer, CHAT)
            error["type"].must_be("invalid_request_error")
            error["code"].must_be("context_length_exceeded")


async def _real_context(target: Target) -> None:
    if target.scripted:
        raise NotApplicable("the scripted engine takes any prompt; errors.engine.context checks its words")
    answer = await target.say(CHAT, "How many words fit into a window? " * 9000)
    if answer.status == 200:
        raise NotApplicable("the model takes 63 000 words")
    require_status(answer, 400)
    error = _check_error(answer, CHAT)
    error["type"].must_be("invalid_request_error")
    error["code"].must_be("context_length_exceeded", "PROMPT_TOO_LARGE")


def _is_said(
    directive: str, *statuses: int, kind: str = "", tells: bool = False, page: bytes = b"", retry: bool = False
) -> Check:
    """Return a check of what becomes of an engine's error: a type, the engine's words, no page, Retry-After."""

    async def check(target: Target) -> None:
        for answer in await _failed(target, directive, *statuses):
            if page and page in answer.body:
                raise Violation("the page is in the answer")
            error = _check_error(answer, CHAT)
            if kind:
                error["type"].must_be(kind)
            if tells and REASON not in error["message"].text():
                raise Violation(f"the engine's words are lost: {error['message'].shown}")
            if retry and not answer.header("retry-after"):
                raise Violation("Retry-After is missing")

    return check


ROWS = (
    *each("errors.wrong_key", "a wrong key: 401, authentication_error", "SDKs and LiteLLM raise AuthenticationError",
        _wrong_key, paths=_REFUSING),
    *each("errors.no_key", "no key: 401", "SDKs raise AuthenticationError", _no_key, paths=_REFUSING),
    *each("errors.unknown_model", "an unknown model: 404, not_found_error, the model named",
        "SDKs and LiteLLM raise NotFoundError", _unknown_model, paths=_REFUSING),
    *each("errors.broken_json", "a body that is not JSON: 400", "every SDK shows the message", _broken_json, paths=_REFUSING),
    *each("errors.missing_model", "no model: 400, the field named", "every SDK shows the message",
        _missing_model, paths=_REFUSING),
    *each("errors.wrong_type", "a field of the wrong type: 400, the field named", "every SDK shows the message",
        _wrong_type, paths=_REFUSING),
    *each("errors.method", "GET where POST is due: 404 or 405 as JSON, no page", "SDKs show `Error code: 405` alone",
        _method, paths=_REFUSING),
    *each("errors.too_large", "a body of 300 MB: 413 before it is read", "agents; SDKs do not retry it",
        _too_large, paths=_REFUSING),
    Row("errors.no_messages.chat", "chat without messages: 400 with param", "openai SDKs", _no_messages),
    Row("errors.route", "an unknown route: 404 as JSON, whatever the method", "every SDK", _route),
    Row("errors.anthropic_route", "an unknown route with anthropic-version: 404 that an Anthropic client can read",
        "anthropic SDKs", _anthropic_route),
    Row("errors.models_key", "the list of models with a wrong key: 401 as JSON", "openai SDKs, Open WebUI", _models_key),
    Row("errors.request_id", "x-request-id is on answers and errors, request-id too on Messages",
        "openai and anthropic SDKs (_request_id)", _request_id),
    Row("errors.encoding", "a compressed body is taken, or refused as JSON with 400 or 415", "proxies, HTTP libraries",
        _encoding),
    Row("errors.host", "another Host header gets no framework's page", "proxies, container names", _host),
    scripted("errors.engine.context", "a prompt that does not fit: 400, code context_length_exceeded",
        "Codex, LangChain, Continue", _context, needs=Surface.CHAT),
    Row("errors.engine.real_context", "a real prompt that does not fit: 400, code context_length_exceeded",
        "Codex, LangChain, Continue", _real_context, needs=Surface.CHAT),
    scripted("errors.engine.bad_request", "an engine's 400 stays a 400 with its words", "every SDK shows them",
        _is_said("error_400", 400, kind="invalid_request_error", tells=True), needs=Surface.CHAT),
    scripted("errors.engine.detail", "an engine's {detail: …} becomes an error object with its words",
        "SDKs lose the message otherwise",
        _is_said("detail_error", 400, 422, kind="invalid_request_error", tells=True), needs=Surface.CHAT),
    scripted("errors.engine.text", "an engine's {error: text} becomes an error object with its words",
        "SDKs lose the message otherwise",
        _is_said("text_error", 400, kind="invalid_request_error", tells=True), needs=Surface.CHAT),
    scripted("errors.engine.failure", "an engine's 500: 500 or 502, server_error", "SDKs retry it",
        _is_said("error_500", 500, 502, kind="server_error"), needs=Surface.CHAT),
    scripted("errors.engine.html", "an engine's page of HTML becomes JSON", "every SDK",
        _is_said("html_error", 500, 502, kind="server_error", page=b"<html"), needs=Surface.CHAT),
    scripted("errors.engine.empty", "an engine's error without a body becomes an error object",
        "SDKs show `Error code: 500` alone", _is_said("empty_error", 500, 502), needs=Surface.CHAT),
    scripted("errors.engine.rate", "an engine's 429: 429, rate_limit_error, Retry-After kept", "SDKs wait as told",
        _is_said("error_429", 429, kind="rate_limit_error", retry=True), needs=Surface.CHAT),
    scripted("errors.engine.overloaded", "an engine's 503: 503 with Retry-After, server_error",
        "Codex tries 30 times, SDKs wait as told",
        _is_said("error_503", 503, kind="server_error", retry=True), needs=Surface.CHAT),
)  # fmt: skip
