"""The response object: what of it stays the same for the whole answer, and the object at any moment of it.

Every key is there, null where nothing is known, except ``user``, which the published schema wants to be text.
Source: OpenAI API reference, "The response object"; Open Responses, "ResponseResource".
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.dialects.chat import ChatUsage
from gateway.dialects.responses.credentials import hide_tool_credentials
from gateway.dialects.responses.fields import ResponsesRequest
from gateway.errors import GatewayError
from wire.bridge import TokenCounts
from wire.contract import ErrorCode

_encode = msgspec.json.Encoder().encode
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9]")
_FUNCTION_KEYS = ("description", "parameters", "strict")


class Status(StrEnum):
    """How far a response is."""

    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ResponseFrame:
    """What stays the same. ``echo``: the members that repeat the request, as JSON without braces. ``created``: Unix seconds.

    ``is_stored``: the response is to be kept if it does not fail.
    """

    response_id: str
    model: str
    created: int
    echo: bytes
    is_stored: bool = False

    @property
    def stem(self) -> str:
        """What the ids of this response's items have in common."""
        return _NOT_IN_IDS.sub("", self.response_id.removeprefix("resp_"))


@dataclass(frozen=True, slots=True)
class ResponseMoment:
    """What changes; everything but the status as JSON. ``extra``: further members of the object, each after a comma."""

    status: Status = Status.IN_PROGRESS
    output: bytes = b"[]"
    usage: bytes = b"null"
    error: bytes = b"null"
    incomplete_details: bytes = b"null"
    completed_at: bytes = b"null"
    extra: bytes = b""


def make_response_id(request_id: str) -> str:
    """Return the id of a response that the request of this id brings about."""
    return f"resp_{_NOT_IN_IDS.sub('', request_id.removeprefix('req_'))}"


def render_response(frame: ResponseFrame, moment: ResponseMoment) -> bytes:
    """Return the response object as JSON."""
    return (
        b'{"id":%b,"object":"response","created_at":%d,"status":"%b","completed_at":%b,"error":%b,'
        b'"incomplete_details":%b,"model":%b,"output":%b,"usage":%b,"store":%b,%b%b}'
    ) % (
        _encode(frame.response_id),
        frame.created,
        moment.status.encode(),
        moment.completed_at,
        moment.error,
        moment.incomplete_details,
        _encode(frame.model),
        moment.output,
        moment.usage,
        b"true" if frame.is_stored and moment.status is not Status.FAILED else b"false",
        frame.echo,
        moment.extra,
    )


def write_event(name: bytes, sequence: int, members: bytes) -> bytes:
    """Return one event. ``members``: its other members as JSON without braces."""
    return b'event: %b\ndata: {"type":"%b","sequence_number":%d,%b}\n\n' % (name, name, sequence, members)


def render_echo(request: ResponsesRequest, *, previous_response_id: str | None) -> bytes:
    """Return the members that repeat the request, as JSON without braces."""
    echo: dict[str, object] = {
        "background": bool(request.background),
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": previous_response_id,
        "reasoning": {
            "effort": request.reasoning.effort if request.reasoning else None,
            "summary": request.reasoning.summary if request.reasoning else None,
        },
        "service_tier": "default",
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "presence_penalty": request.presence_penalty or 0.0,
        "frequency_penalty": request.frequency_penalty or 0.0,
        "top_logprobs": request.top_logprobs or 0,
        "text": _echo_text(request),
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": [_echo_tool(tool) for tool in request.tools or ()],
        "truncation": "disabled",
        "metadata": request.metadata or {},
        "safety_identifier": request.safety_identifier,
        "prompt_cache_key": request.prompt_cache_key,
    }
    if request.user is not None:
        echo["user"] = request.user
    return _encode(echo)[1:-1]


def render_usage(usage: ChatUsage | None) -> bytes:
    """Return ``usage`` as JSON; null when the engine did not say."""
    counts = count_tokens(usage)
    if usage is None or counts is None:
        return b"null"
    return _encode(
        {
            "input_tokens": counts.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens": counts.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.thought or 0},
            "total_tokens": counts.total_tokens,
        }
    )


def count_tokens(usage: ChatUsage | None) -> TokenCounts | None:
    """Return an engine's counts; None when it gave none."""
    if usage is None or (usage.prompt_tokens is None and usage.completion_tokens is None):
        return None
    return usage.to_counts()


def render_error(error: GatewayError) -> bytes:
    """Return ``error`` of a failed response. Clients act on the code: only ``server_error`` and rate limits are tried again."""
    code = "server_error"
    if error.code == ErrorCode.CONTEXT_LENGTH_EXCEEDED:
        code = "context_length_exceeded"
    elif error.status == 429:
        code = "rate_limit_exceeded"
    elif error.status < 500:
        code = "invalid_prompt"
    param = "input" if error.param == "messages" else error.param
    return _encode({"code": code, "message": error.message, "type": error.type, "param": param})


def _echo_text(request: ResponsesRequest) -> dict[str, object]:
    text = request.text
    echo: dict[str, object] = {"format": text.format if text and text.format is not None else {"type": "text"}}
    if text is not None and text.verbosity is not None:
        echo["verbosity"] = text.verbosity
    return echo


def _echo_tool(tool: dict[str, object]) -> dict[str, object]:
    if tool.get("type") != "function":
        return hide_tool_credentials(tool)
    return {**dict.fromkeys(_FUNCTION_KEYS), **tool}
