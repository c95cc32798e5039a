"""The response object of the Responses API: the fields that it repeats, what is kept from who reads it, and its lists."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from core.limits import limits
from gateway.dialects.body import join_fault
from gateway.dialects.chat import ChatTimings, ChatUsage
from gateway.dialects.responses.items import Item, item_kind
from gateway.errors import BadRequest, GatewayError
from gateway.values import WholeNumber, read_whole_number
from wire.bridge import TokenCounts
from wire.contract import ErrorCode
from wire.ids import format_id, new_uuid7
from wire.unreadable import UNREADABLE


class Decoding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``decoding``: how tokens are chosen; what is None was not given."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: WholeNumber | None = None
    repetition_penalty: float | None = None
    max_tokens: WholeNumber | None = None
    stop: list[str] | None = None
    beam_size: WholeNumber | None = None


_CHAT_NAMES = {
    "temperature": ("temperature",),
    "top_p": ("top_p",),
    "top_k": ("top_k",),
    "repetition_penalty": ("repetition_penalty", "repeat_penalty"),  # vLLM's name and llama.cpp's; each ignores the other
    "max_tokens": ("max_tokens",),
    "stop": ("stop",),
}


def translate_decoding(decoding: Decoding) -> tuple[dict[str, object], list[str]]:
    """Return chat fields, and the names of what no chat engine takes."""
    given = {name: value for name, value in msgspec.structs.asdict(decoding).items() if value is not None}
    fields = {chat: value for name, value in given.items() for chat in _CHAT_NAMES.get(name, ())}
    return fields, [f"decoding.{name}" for name in given if name not in _CHAT_NAMES]


class PoolMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds and token counts; None = unknown. backend ⊂ engine ⊂ pool: each outer timer covers the inner one."""

    backend_inference_wall_ms: float | None = None
    engine_total_wall_ms: float | None = None
    engine_outside_backend_wall_ms: float | None = None
    pool_total_wall_ms: float | None = None
    engine_queue_wait_ms: float | None = None
    engine_tokenize_ms: float | None = None
    gpu_time_to_first_token_ms: float | None = None
    gpu_generate_total_ms: float | None = None
    gpu_decode_after_first_token_ms: float | None = None
    engine_prompt_tokens: int | None = None
    engine_output_tokens: int | None = None
    engine_tokens_per_second: float | None = None


class Stopwatch(msgspec.Struct, kw_only=True):
    """Readings of one monotonic clock, in seconds: request received, sent to the box, first text, end of the answer."""

    received_at: float | None
    opened_at: float
    first_text_at: float | None = None
    ended_at: float


def measure(watch: Stopwatch, *, usage: TokenCounts | None, timings: ChatTimings | None) -> PoolMetrics:
    """Return the numbers of an answer as the gateway sees them, with the engine's own where it says them."""
    backend = (watch.ended_at - watch.opened_at) * 1000.0
    waited = None if watch.received_at is None else max(0.0, (watch.opened_at - watch.received_at) * 1000.0)
    whole = backend + (waited or 0.0)
    first = None if watch.first_text_at is None else (watch.first_text_at - watch.opened_at) * 1000.0
    generated = None
    if timings is not None and timings.predicted_ms is not None:
        generated = (timings.prompt_ms or 0.0) + timings.predicted_ms
    spent = backend if generated is None else generated
    output = usage.completion_tokens if usage is not None else None
    return PoolMetrics(
        backend_inference_wall_ms=round(backend, 1),
        engine_total_wall_ms=round(whole, 1),
        engine_outside_backend_wall_ms=round(whole - backend, 1),
        pool_total_wall_ms=round(whole, 1),
        engine_queue_wait_ms=None if waited is None else round(waited, 1),
        gpu_time_to_first_token_ms=None if first is None else round(first, 1),
        gpu_generate_total_ms=None if generated is None else round(generated, 1),
        gpu_decode_after_first_token_ms=None if first is None else round(max(0.0, spent - first), 1),
        engine_prompt_tokens=usage.prompt_tokens if usage is not None else None,
        engine_output_tokens=output,
        engine_tokens_per_second=None if output is None or spent <= 0 else round(output * 1000.0 / spent, 1),
    )


_Read = TypeVar("_Read")
Json = dict[str, Any]
"""An object that is read elsewhere. Any, for msgspec would call the hook for each ``object``."""


class _Common(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    max_output_tokens: WholeNumber | None = None
    decoding: Decoding | None = None
    allow_remote: bool | None = None
    source_lang_code: str | None = None
    target_lang_code: str | None = None

    @property
    def uses_pool_fields(self) -> bool:
        """Whether it has a field that only llm-pool knows."""
        pool_only = (self.decoding, self.allow_remote, self.source_lang_code, self.target_lang_code)
        return any(value is not None for value in pool_only)

    @property
    def token_limits(self) -> dict[str, int]:
        """Every limit of output tokens that is asked for, by the field that asks for it."""
        pool_limit = self.decoding.max_tokens if self.decoding is not None else None
        limits = {"max_output_tokens": self.max_output_tokens, "decoding.max_tokens": pool_limit}
        return {name: limit for name, limit in limits.items() if limit is not None}


class ResponsesBody(_Common, frozen=True, kw_only=True):
    """What policy looks at. ``input`` is the JSON as it came; what stands inside it is not checked here."""

    input: msgspec.Raw = msgspec.Raw()


class TextConfig(msgspec.Struct, frozen=True):
    """``text``: the format of the answer and how long-winded it is."""

    format: Json | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, frozen=True):
    """``reasoning``: how hard to think, and whether to sum it up, which nothing here can."""

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(_Common, frozen=True, kw_only=True):
    """What a translation reads. Everything else of the body goes on as it is."""

    input: str | list[Json] | None = None
    instructions: str | None = None
    include: list[str] | None = None
    metadata: Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    top_logprobs: WholeNumber | None = None
    max_tool_calls: WholeNumber | None = None
    truncation: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    user: str | None = None


_body_decoder = msgspec.json.Decoder(ResponsesBody, dec_hook=read_whole_number)
_request_decoder = msgspec.json.Decoder(ResponsesRequest, dec_hook=read_whole_number)
_all_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read_responses_body(body: bytes) -> ResponsesBody:
    """Return what policy looks at. Raises BadRequest naming the field at fault."""
    fields = _decode(_body_decoder, body)
    text = bytes(fields.input).strip()
    if text in {b"", b"null"}:
        if fields.previous_response_id is None and fields.conversation is None and fields.prompt is None:
            raise BadRequest("The field 'input' is required.", param="input")
    elif text[:1] not in {b'"', b"["}:
        raise BadRequest("The field 'input' must be text or a list of items.", param="input")
    elif text[:1] == b"[" and text[1:].lstrip().startswith(b"]"):
        raise BadRequest("The field 'input' must not be empty.", param="input")
    for name, limit in fields.token_limits.items():
        if limit < 1:
            raise BadRequest(f"The field '{name}' must be at least 1.", param=name)
    return fields


def read_request(body: bytes) -> tuple[ResponsesRequest, dict[str, msgspec.Raw]]:
    """Return what a translation reads, and every top-level field as it came. Raises BadRequest naming the field at fault."""
    return _decode(_request_decoder, body), _decode(_all_decoder, body)


def _decode(decoder: msgspec.json.Decoder[_Read], body: bytes) -> _Read:
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        reason, param = join_fault(error)
        raise BadRequest(f"Invalid request body: {reason}.", param=param) from None
    except UNREADABLE as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None


_CREDENTIALS = frozenset({"authorization", "headers", "domain_secrets"})
_DESCRIBED = frozenset({"function", "custom", "tool_search"})
"""Tools whose members describe arguments, where those names mean nothing."""


def hide_tool_credentials(tool: dict[str, object], *, levels: int | None = None) -> dict[str, object]:
    """Return a tool as it may be kept and repeated. Raises BadRequest for one with more than ``levels`` levels."""
    levels = limits().gateway.tool_levels if levels is None else levels
    _check(levels)
    kind = tool.get("type")
    if isinstance(kind, str) and kind in _DESCRIBED:
        return tool
    tools = tool.get("tools")
    if kind == "namespace" and isinstance(tools, list):
        return {**_drop({**tool, "tools": None}, levels), "tools": [_hide_in_tool(one, levels - 1) for one in tools]}
    return _drop(tool, levels)


def hide_item_credentials(item: Item) -> Item:
    """Return an input item as it may be kept: the tools that it brings without their credentials. Raises BadRequest."""
    tools = item.get("tools")
    levels = limits().gateway.tool_levels
    return {**item, "tools": [_hide_in_tool(tool, levels) for tool in tools]} if isinstance(tools, list) else item


def _hide_in_tool(tool: object, levels: int) -> object:
    return hide_tool_credentials(tool, levels=levels) if isinstance(tool, dict) else tool


def _drop(fields: dict[str, object], levels: int) -> dict[str, object]:
    return {name: _clean(value, levels - 1) for name, value in fields.items() if name not in _CREDENTIALS}


def _clean(value: object, levels: int) -> object:
    if not isinstance(value, dict | list):
        return value
    _check(levels)
    return _drop(value, levels) if isinstance(value, dict) else [_clean(one, levels - 1) for one in value]


def _check(levels: int) -> None:
    if levels <= 0:
        most = limits().gateway.tool_levels
        raise BadRequest(f"The field 'tools' has more than {most} levels of lists and objects.", param="tools")


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
    counts = usage.to_counts() if usage is not None else None
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


_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
}


def list_input_items(body: bytes) -> list[bytes]:
    """Return the request's own input as JSON items, each with ``id`` and ``type``; text is one message of the user.

    References are left out: what they name is kept already. Raises BadRequest for a body that cannot be read.
    """
    request, _fields = read_request(body)
    given: list[Item] = []
    if isinstance(request.input, str):
        given = [{"type": "message", "role": "user", "content": request.input}]
    elif request.input is not None:
        given = request.input
    kinds = [(item, item_kind(item)) for item in given]
    return [msgspec.json.encode(_complete(item, kind)) for item, kind in kinds if kind != "item_reference"]


def _complete(item: Item, kind: str) -> Item:
    given = item.get("id")
    new_id = given if isinstance(given, str) and given else format_id(_PREFIXES.get(kind, "item"), new_uuid7())
    complete: Item = {**hide_item_credentials(item), "id": new_id, "type": kind}
    if kind == "message":
        complete.setdefault("status", "completed")
        content = item.get("content")
        if isinstance(content, str):
            is_said = item.get("role") == "assistant"
            part: Item = {"type": "output_text", "text": content, "annotations": []} if is_said else _say(content)
            complete["content"] = [part]
    return complete


def _say(text: str) -> Item:
    return {"type": "input_text", "text": text}
