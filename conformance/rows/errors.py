"""Rows on refusals by the server itself: shape, status and type in the caller's dialect, JSON always."""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable

from conformance.engine.script import REASON
from conformance.exchange import LIMITS, Answer, Ask, Connection, Field, NotApplicable, Violation
from conformance.readers.messages import check_error
from conformance.table import CHAT, MESSAGES, MODELS, RESPONSES, Surface, Target, add_row, require_status, requirement

_WRONG_KEY = "sk-this-key-is-nobodys-0000000000000000"


def check_openai_error(answer: Answer) -> Field:
    """Check an error of an OpenAI surface and return its object. Raises Violation."""
    if not answer.header("content-type").startswith("application/json"):
        raise Violation(f"{answer.status} as {answer.header('content-type') or 'no content-type'}: {answer.body[:80]!r}")
    error = answer.json()["error"]
    error.must_have(("message", "type", "param", "code"))
    error["message"].word()
    error["type"].word()
    if not error["code"].is_null:
        error["code"].text()
    if not answer.header("x-request-id"):
        raise Violation("x-request-id is missing")
    return error


def check_anthropic_error(answer: Answer) -> Field:
    """Check an error of an Anthropic surface and return its object. Raises Violation."""
    if not answer.header("content-type").startswith("application/json"):
        raise Violation(f"{answer.status} as {answer.header('content-type') or 'no content-type'}: {answer.body[:80]!r}")
    check_error(answer.json())
    answer.json()["request_id"].word()
    if not answer.header("request-id"):
        raise Violation("the header request-id is missing")
    return answer.json()["error"]


def _for_dialects(name: str, text: str, clients: str) -> Callable[[Callable[[Target, str], Awaitable[None]]], None]:
    """Register a check as a row for each dialect; it is given the path of that."""

    def register(check: Callable[[Target, str], Awaitable[None]]) -> None:
        for dialect, path in (("chat", CHAT), ("responses", RESPONSES), ("messages", MESSAGES)):

            async def run(target: Target, path: str = path) -> None:
                await check(target, path)

            add_row(f"errors.{name}.{dialect}", f"{dialect}: {text}", run, clients=clients, needs=Surface(dialect))

    return register


def _body(target: Target, path: str) -> dict[str, object]:
    return target.messages_body() if path == MESSAGES else target.chat_body() if path == CHAT else target.responses_body()


def _check(answer: Answer, path: str, status: int, openai_type: str, anthropic_type: str) -> Field:
    require_status(answer, status)
    if path == MESSAGES:
        error = check_anthropic_error(answer)
        error["type"].must_be(anthropic_type)
        return error
    error = check_openai_error(answer)
    error["type"].must_be(openai_type)
    return error


@_for_dialects("wrong_key", "a wrong key: 401, authentication_error", "SDKs and LiteLLM raise AuthenticationError")
async def _wrong_key(target: Target, path: str) -> None:
    headers = {"x-api-key": _WRONG_KEY} if path == MESSAGES else {"authorization": f"Bearer {_WRONG_KEY}"}
    answer = await target.send(target.ask_json(path, _body(target, path), headers))
    error = _check(answer, path, 401, "authentication_error", "authentication_error")
    if _WRONG_KEY in error["message"].text():
        raise Violation("the message repeats the key")
    if "Incorrect API key provided" not in error["message"].text():
        raise Violation(f"LiteLLM looks for 'Incorrect API key provided', not for {error['message'].shown}")


@_for_dialects("no_key", "no key: 401", "SDKs raise AuthenticationError")
async def _no_key(target: Target, path: str) -> None:
    answer = await target.send(target.ask_json(path, _body(target, path), {"authorization": None, "x-api-key": None}))
    _check(answer, path, 401, "authentication_error", "authentication_error")


@_for_dialects(
    "unknown_model", "an unknown model: 404, not_found_error, the model named", "SDKs and LiteLLM raise NotFoundError"
)
async def _unknown_model(target: Target, path: str) -> None:
    answer = await target.send(target.ask_json(path, {**_body(target, path), "model": "nobody-has-this"}))
    error = _check(answer, path, 404, "not_found_error", "not_found_error")
    if "nobody-has-this" not in error["message"].text():
        raise Violation(f"the message does not name the model: {error['message'].shown}")


@_for_dialects("broken_json", "a body that is not JSON: 400", "every SDK shows the message")
async def _broken_json(target: Target, path: str) -> None:
    for body in (b'{"model": ', b"", b"[1, 2]", b"\xff\xfe"):
        _check(await target.send(target.ask_json(path, body)), path, 400, "invalid_request_error", "invalid_request_error")


@_for_dialects("missing_model", "no model: 400, the field named", "every SDK shows the message")
async def _missing_model(target: Target, path: str) -> None:
    body = _body(target, path)
    del body["model"]
    error = _check(await target.send(target.ask_json(path, body)), path, 400, "invalid_request_error", "invalid_request_error")
    if "model" not in error["message"].text():
        raise Violation(f"the message does not name the field: {error['message'].shown}")


@_for_dialects("wrong_type", "a field of the wrong type: 400, the field named", "every SDK shows the message")
async def _wrong_type(target: Target, path: str) -> None:
    answer = await target.send(target.ask_json(path, {**_body(target, path), "stream": "yes"}))
    error = _check(answer, path, 400, "invalid_request_error", "invalid_request_error")
    if "stream" not in error["message"].text():
        raise Violation(f"the message does not name the field: {error['message'].shown}")


@_for_dialects("method", "GET where POST is due: 404 or 405 as JSON, no page", "SDKs show `Error code: 405` alone")
async def _method(target: Target, path: str) -> None:
    headers = tuple((name, value) for name, value in target.headers_for(path).items() if name != "content-type")
    answer = await target.send(Ask("GET", path, headers))
    require_status(answer, 404, 405)
    check_anthropic_error(answer) if path == MESSAGES else check_openai_error(answer)


@_for_dialects("too_large", "a body of 300 MB: 413 before it is read", "agents; SDKs do not retry it")
async def _too_large(target: Target, path: str) -> None:
    connection = await Connection.open(target.base_url)
    ask = target.ask_json(path, b"{" + b" " * 4096)
    try:
        status, headers, body = await connection.send_head(ask, claimed_bytes=LIMITS.claimed_bytes)
    finally:
        await connection.close()
    _check(Answer.of(ask, status, headers, body), path, 413, "invalid_request_error", "request_too_large")


@requirement("errors.no_messages.chat", "chat without messages: 400 with param", clients="openai SDKs")
async def _no_messages(target: Target) -> None:
    wrong: tuple[object, ...] = (None, [], "hello")
    bodies = [{**target.chat_body(), "messages": messages} for messages in wrong]
    bodies.append({name: value for name, value in target.chat_body().items() if name != "messages"})
    for body in bodies:
        answer = await target.send(target.ask_json(CHAT, body))
        require_status(answer, 400)
        check_openai_error(answer)["param"].must_be("messages")


@requirement("errors.route", "an unknown route: 404 as JSON, whatever the method", clients="every SDK")
async def _route(target: Target) -> None:
    headers = (("authorization", f"Bearer {target.api_key}"), ("content-type", "application/json"))
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
        answer = await target.send(Ask(method, "/v1/there/is/no/such", headers, b"{}" if method != "GET" else b""))
        require_status(answer, 404)
        check_openai_error(answer)


@requirement(
    "errors.anthropic_route",
    "an unknown route with anthropic-version: 404 that an Anthropic client can read",
    clients="anthropic SDKs",
)
async def _anthropic_route(target: Target) -> None:
    headers = (("x-api-key", target.api_key), ("anthropic-version", "2023-06-01"), ("content-type", "application/json"))
    answer = await target.send(Ask("POST", "/v1/messages/batches", headers, b"{}"))
    require_status(answer, 404)
    answer.json()["error"]["message"].word()
    if "type" not in answer.json()["error"]:
        raise Violation(f"error.type is missing: {answer.json().shown}")


@requirement("errors.models_key", "the list of models with a wrong key: 401 as JSON", clients="openai SDKs, Open WebUI")
async def _models_key(target: Target) -> None:
    answer = await target.send(Ask("GET", MODELS, (("authorization", f"Bearer {_WRONG_KEY}"),)))
    require_status(answer, 401)
    check_openai_error(answer)


@requirement(
    "errors.request_id",
    "x-request-id is on answers and errors, request-id too on Messages",
    clients="openai and anthropic SDKs (_request_id)",
)
async def _request_id(target: Target) -> None:
    for path, name in ((CHAT, "x-request-id"), (MESSAGES, "request-id")):
        for body in (_body(target, path), b"{"):
            answer = await target.send(target.ask_json(path, body))
            if not answer.header(name):
                raise Violation(f"{answer.what} ({answer.status}) has no {name}")
    for stream in (True, False):
        if not (await target.chat(stream=stream)).header("x-request-id"):
            raise Violation(f"a chat answer has no x-request-id (stream: {stream})")
    for path in ("/v1/nothing", "/v1/models"):
        if not (await target.send(Ask("GET", path, (("authorization", f"Bearer {target.api_key}"),)))).header("x-request-id"):
            raise Violation(f"GET {path} has no x-request-id")


@requirement(
    "errors.encoding", "a compressed body is taken, or refused as JSON with 400 or 415", clients="proxies, HTTP libraries"
)
async def _encoding(target: Target) -> None:
    body = gzip.compress(json.dumps(target.chat_body()).encode(), mtime=0)
    answer = await target.send(target.ask_json(CHAT, body, {"content-encoding": "gzip"}))
    if answer.status != 200:
        if answer.status not in (400, 415):
            raise Violation(f"{answer.what}: {answer.status}, 400 or 415 is due")
        check_openai_error(answer)


@requirement("errors.host", "another Host header gets no framework's page", clients="proxies, container names")
async def _host(target: Target) -> None:
    connection = await Connection.open(target.base_url)
    connection.host = "gateway.internal:9999"
    try:
        answer = await connection.exchange(target.ask_json(CHAT, target.chat_body()))
    finally:
        await connection.close()
    require_status(answer, 200)


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
