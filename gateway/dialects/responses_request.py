"""Requests of /v1/responses: what policy looks at, what is kept and repeated of them, and how chat completions say them."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec

from core.limits import limits
from gateway.dialects.body import join_fault
from gateway.dialects.chat import AnswerContext, AnswerTranslator, Translation
from gateway.dialects.responses_answer import (
    AnswerPlan,
    ResponseFrame,
    ResponseMoment,
    ResponsesTranslator,
    Status,
    render_error,
    render_response,
    write_event,
)
from gateway.dialects.responses_items import (
    SUMMARY_MARK,
    Item,
    ToolTable,
    Transcript,
    field_error,
    item_kind,
    list_brought_tools,
    translate_choice,
)
from gateway.errors import BadRequest, ForwardedRequestFailed, GatewayError
from gateway.values import CHAT_PATH, InferenceRequest, WholeNumber, read_whole_number
from wire.bridge import TokenCounts
from wire.ids import format_id, new_uuid7
from wire.unreadable import UNREADABLE

_encode = msgspec.json.Encoder().encode


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
        pool_only = (self.decoding, self.allow_remote, self.source_lang_code, self.target_lang_code)
        return any(value is not None for value in pool_only)

    @property
    def token_limits(self) -> dict[str, int]:
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


_FUNCTION_KEYS = ("description", "parameters", "strict")


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
    kinds = [(item, item_kind(item)) for item in _list_input(read_request(body)[0])]
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


LOGPROBS = "message.output_text.logprobs"
_CARRIED = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "allow_remote"})
"""Same name and meaning in chat completions."""
# Nothing here acts on them, and a chat engine would take some of them for its own.
_LEFT_OUT = frozenset({
    "access_programs", "client_metadata", "context_management", "image", "messages", "moderation", "n", "prompt_cache_options",
    "prompt_cache_retention",
})  # fmt: skip
_NOT_CARRIED = (frozenset(ResponsesRequest.__struct_fields__) | {"stream_options", "x_pool_options"}) - _CARRIED
_NO_EFFORT = "none"
_NEAREST_EFFORT = {"minimal": "low", "xhigh": "high", "max": "high"}
_LANGUAGES = ("source_lang_code", "target_lang_code")


def translate_responses(
    request: InferenceRequest,
    *,
    history: Sequence[bytes] = (),
    previous_response_id: str | None = None,
    is_stored: bool = False,
    response_id: str | None = None,
) -> Translation:
    """Return the request as a chat completion.

    ``history``: JSON items of earlier turns, input and output, oldest first; they come before the request's own input.
    ``is_stored`` and ``previous_response_id`` stand in the reply; ``response_id`` None: made from the request's id.
    Raises BadRequest naming what a chat completion cannot carry.
    """
    asked, fields = read_request(request.body)
    _refuse_languages(asked)
    earlier = [(msgspec.json.decode(item, type=Item), f"history[{n}]") for n, item in enumerate(history)]
    at = "input" if isinstance(asked.input, str) else "input[{}]"
    items = [*earlier, *((item, at.format(n)) for n, item in enumerate(_list_input(asked)))]
    if not items:
        raise field_error("input", "is required")
    table = _read_tools(asked, items)
    functions, choice = translate_choice(asked.tool_choice, table)
    known_ids = frozenset(found for item, _where in earlier if isinstance(found := item.get("id"), str))
    transcript = Transcript(table, instructions=asked.instructions or "", known_ids=known_ids)
    for item, where in items:
        transcript.add(item, where)
    chat: dict[str, object] = {"model": request.model, "messages": transcript.close()}
    if functions:
        chat["tools"] = functions
        chat |= {"tool_choice": choice} if choice is not None else {}
        chat |= {"parallel_tool_calls": asked.parallel_tool_calls} if asked.parallel_tool_calls is not None else {}
    knobs, left_out = _translate_knobs(asked, fields)
    chat |= knobs
    for name, raw in fields.items():
        if name not in _NOT_CARRIED and name not in _LEFT_OUT and name not in chat and bytes(raw) != b"null":
            chat[name] = raw
    if request.is_streaming:
        chat |= {"stream": True, "stream_options": {"include_usage": True}}
    left_out += [name for name in fields if name in _LEFT_OUT and bytes(fields[name]) != b"null"]
    plan = AnswerPlan(
        echo=render_echo(asked, previous_response_id=previous_response_id),
        table=table,
        response_id=response_id,
        is_stored=is_stored,
        uses_pool_fields=asked.uses_pool_fields,
    )
    return Translation(
        path=CHAT_PATH,
        body=msgspec.json.encode(chat),
        open_answer=partial(ResponsesTranslator, plan),
        ignored=(*table.ignored, *transcript.ignored, *left_out),
    )


def render_failed_response(error: GatewayError, *, response_id: str, model: str, created: int, body: bytes) -> bytes:
    """Return the events of a stream that failed before the engine said anything: a response must begin before it fails.

    ``body``: the request; ``created``: Unix seconds.
    """
    try:
        echo = render_echo(read_request(body)[0], previous_response_id=None)
    except BadRequest:
        echo = render_echo(ResponsesRequest(model=model), previous_response_id=None)
    frame = ResponseFrame(response_id=response_id, model=model, created=created, echo=echo)
    failed = ResponseMoment(Status.FAILED, error=render_error(error))
    began = write_event(b"response.created", 0, b'"response":' + render_response(frame, ResponseMoment()))
    return began + write_event(b"response.failed", 1, b'"response":' + render_response(frame, failed))


def _refuse_languages(asked: ResponsesRequest) -> None:
    for name in _LANGUAGES:
        if getattr(asked, name) is not None:
            raise field_error(
                name, "needs a node that answers /v1/responses itself, and none serves this model; put it into instructions"
            )


def _list_input(asked: ResponsesRequest) -> list[Item]:
    return [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input or []


def _read_tools(asked: ResponsesRequest, items: list[tuple[Item, str]]) -> ToolTable:
    table = ToolTable()
    table.add(list(asked.tools or []), "tools")
    for item, where in items:
        table.add(list_brought_tools(item, where), f"{where}.tools")
    return table


def _translate_knobs(asked: ResponsesRequest, fields: dict[str, msgspec.Raw]) -> tuple[dict[str, object], list[str]]:
    chat: dict[str, object] = {}
    ignored: list[str] = []
    if asked.max_output_tokens is not None:
        chat["max_tokens"] = asked.max_output_tokens
    for value in asked.include or ():
        if value == LOGPROBS:
            chat |= {"logprobs": True, "top_logprobs": asked.top_logprobs or 0}
        elif value == "reasoning.encrypted_content":
            ignored.append("include.reasoning.encrypted_content")
    if asked.text is not None:
        chat |= _translate_text(asked.text)
    if asked.reasoning is not None and asked.reasoning.effort is not None:
        chat |= _translate_effort(asked.reasoning.effort, fields, ignored)
    if asked.reasoning is not None and asked.reasoning.summary is not None:
        ignored.append("reasoning.summary")
    if asked.truncation not in (None, "disabled"):
        ignored.append("truncation")
    if asked.service_tier not in (None, "auto", "default"):
        ignored.append("service_tier")
    if asked.decoding is not None:
        decoding, unknown = translate_decoding(asked.decoding)
        chat |= decoding
        ignored += unknown
    return chat, ignored


def _translate_effort(effort: str, fields: dict[str, msgspec.Raw], ignored: list[str]) -> dict[str, object]:
    """Say how hard to think in what every engine knows: three efforts, and the variable by which templates switch it off."""
    if effort == _NO_EFFORT:
        try:
            asked = msgspec.json.decode(fields.get("chat_template_kwargs", b"{}"), type=dict[str, object] | None)
        except msgspec.ValidationError:
            raise field_error("chat_template_kwargs", "must be an object") from None
        return {"chat_template_kwargs": {"enable_thinking": False, **(asked or {})}}
    if effort in _NEAREST_EFFORT:
        ignored.append("reasoning.effort")
    return {"reasoning_effort": _NEAREST_EFFORT.get(effort, effort)}


def _translate_text(text: TextConfig) -> dict[str, object]:
    chat: dict[str, object] = {"verbosity": text.verbosity} if text.verbosity is not None else {}
    form = text.format
    kind = form.get("type") if form is not None else None
    if form is None or kind == "text":
        return chat
    if kind == "json_object":
        return {**chat, "response_format": {"type": "json_object"}}
    if kind == "json_schema":
        schema = {name: value for name, value in form.items() if name != "type" and value is not None}
        if not isinstance(schema.get("schema"), dict):
            raise field_error("text.format.schema", "is required and must be an object")
        return {**chat, "response_format": {"type": "json_schema", "json_schema": {"name": "response", **schema}}}
    raise field_error("text.format.type", "must be text, json_object or json_schema")


COMPACT_PATH = "/v1/responses/compact"
_ASK = (
    "Summarise this conversation so that you can go on with it from the summary alone. Keep what the user wants, what was "
    "decided and found out, names, numbers, paths and code that still matter, and what is left to do. Write the summary only."
)


class _Part(msgspec.Struct):
    text: str = ""


class _Output(msgspec.Struct):
    type: str = ""
    content: list[_Part] = []


class _Response(msgspec.Struct):
    output: list[_Output] = []
    usage: msgspec.Raw = msgspec.Raw(b"null")


def translate_compact(
    request: InferenceRequest,
    *,
    history: Sequence[bytes] = (),
    previous_response_id: str | None = None,
    is_stored: bool = False,
    response_id: str | None = None,
) -> Translation:
    """Return the request as a chat completion that asks for the summary. The arguments are those of ``translate_responses``.

    Raises BadRequest naming what a chat completion cannot carry.
    """
    asked, fields = read_request(request.body)
    kept = [item for item in [*history, *list_input_items(request.body)] if _is_users(msgspec.json.decode(item))]
    said = {**fields, "input": msgspec.Raw(_encode([*_list_input(asked), {"role": "user", "content": _ASK}]))}
    said.pop("text", None)  # the shape of answers, which a summary need not have
    if asked.tools:
        said["tool_choice"] = msgspec.Raw(b'"none"')
    translation = translate_responses(
        msgspec.structs.replace(request, body=_encode(said)),
        history=history,
        previous_response_id=previous_response_id,
        is_stored=is_stored,
        response_id=response_id,
    )
    return replace(translation, open_answer=partial(CompactionTranslator, translation.open_answer, kept))


class CompactionTranslator:
    """The answer: ``kept`` are the user's messages as JSON items, oldest first. It is never streamed."""

    kept = None

    def __init__(
        self, open_answer: Callable[[AnswerContext], AnswerTranslator], kept: Sequence[bytes], context: AnswerContext
    ) -> None:
        self._answer = open_answer(context)
        self._messages = kept
        self._context = context
        self._failure: GatewayError | None = None

    @property
    def usage(self) -> TokenCounts | None:
        return self._answer.usage

    @property
    def failure(self) -> GatewayError | None:
        return self._failure or self._answer.failure

    def feed(self, data: bytes) -> bytes:
        del data
        self._failure = ForwardedRequestFailed("The engine streamed an answer that was asked for as a whole.")
        return b""

    def finish(self) -> bytes:
        return b""

    def translate_whole(self, body: bytes) -> bytes:
        """Return an unstreamed chat answer as a compacted response; nothing and a ``failure`` when it holds no summary."""
        whole = self._answer.translate_whole(body)
        if self.failure is not None:
            return b""
        response = msgspec.json.decode(whole, type=_Response)
        texts = [part.text for item in response.output if item.type == "message" for part in item.content]
        summary = "".join(texts).strip()
        if not summary:
            self._failure = ForwardedRequestFailed("The model answered without a summary.")
            return b""
        stem = self._context.request_id.removeprefix("req_")
        item = {"id": f"cmp_{stem}", "type": "compaction", "encrypted_content": pack_summary(summary)}
        output = b",".join([*self._messages, _encode(item)])
        return b'{"id":"resp_%b","object":"response.compaction","created_at":%d,"output":[%b],"usage":%b}' % (
            stem.encode(),
            self._context.created,
            output,
            bytes(response.usage),
        )


def pack_summary(summary: str) -> str:
    """Return what ``encrypted_content`` says of a summary; ``items.read_summary`` reads it."""
    return SUMMARY_MARK + base64.b64encode(summary.encode()).decode()


def _is_users(item: Item) -> bool:
    return item.get("type") == "message" and item.get("role") == "user"
