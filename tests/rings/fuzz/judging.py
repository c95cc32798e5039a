"""Whether an answer is one that a client can read: its status, its type, and errors in the dialect of the surface."""

from __future__ import annotations

import json
from typing import Any  # errors are JSON

from tests.rings.contract.client import Reply
from tests.rings.fuzz.bodies import COUNT_MESSAGES, MESSAGES
from wire.contract import ErrorCode

_OURS = frozenset({400, 401, 403, 404, 405, 408, 413, 415, 429, 431, 500, 502, 503, 504})
_CODES = frozenset(code.value for code in ErrorCode)
_MAX_ERROR_BYTES = 4096
_LEAST_ERROR = 400
_ANTHROPIC = frozenset({MESSAGES, COUNT_MESSAGES})


def find_fault(path: str, reply: Reply, *, of_engine: int = 0) -> str:
    """Return what is wrong with an answer to anything at all; empty = nothing. The status 0 is a connection that was closed."""
    if not reply.whole or reply.status == 0:
        return "the connection was closed without an answer"
    if reply.status < _LEAST_ERROR:
        return ""
    if reply.status not in _OURS and reply.status != of_engine:
        return f"the status {reply.status} is none of ours"
    return _find_fault_of_error(path, reply, of_engine)


def find_fault_of_refusal(path: str, reply: Reply, *, statuses: tuple[int, ...], param: str | None) -> str:
    """Return what is wrong with the answer to a malformed request. ``param``: see ``Malformed``."""
    if reply.status not in statuses:
        return f"the status is {reply.status}, due is {statuses}: {reply.body[:200]!r}"
    fault = find_fault(path, reply)
    if fault:
        return fault
    named = json.loads(reply.body)["error"].get("param")
    return "" if param in {"*", named} else f"param is {named!r}, due is {param!r}"


def _find_fault_of_error(path: str, reply: Reply, of_engine: int) -> str:
    if reply.headers.get("content-type") != "application/json":
        return f"an error of type {reply.headers.get('content-type')}"
    if len(reply.body) > _MAX_ERROR_BYTES:
        return f"an error of {len(reply.body)} bytes"
    try:
        body = json.loads(reply.body)
        error: dict[str, Any] = body["error"]
        message, kind, code, param = error["message"], error.get("type"), error.get("code"), error.get("param")
    except (ValueError, KeyError, TypeError) as fault:
        return f"an error that cannot be read ({fault!r}): {reply.body[:200]!r}"
    if not (isinstance(message, str) and message) or any(
        one is not None and not isinstance(one, str) for one in (kind, code, param)
    ):
        return f"an error with members of other types: {reply.body[:200]!r}"
    if of_engine >= _LEAST_ERROR:
        return ""  # its own words, as far as a client can read them
    if code not in _CODES:
        return f"the code {code!r} is none of ours"
    is_anthropic = body.get("type") == "error" and isinstance(body.get("request_id"), str)
    if is_anthropic != (path in _ANTHROPIC) and "x-request-id" in reply.headers:
        return f"an error of the other dialect: {reply.body[:200]!r}"
    return ""
