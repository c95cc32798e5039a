"""A request for /v1/responses as a chat completion."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from gateway.dialects.chat import AnswerContext, AnswerTranslator, Translation
from gateway.dialects.responses.answer import AnswerPlan, ResponsesTranslator
from gateway.dialects.responses.items import (
    SUMMARY_MARK,
    Item,
    ToolTable,
    Transcript,
    field_error,
    list_brought_tools,
    translate_choice,
)
from gateway.dialects.responses.object import (
    ResponseFrame,
    ResponseMoment,
    ResponsesRequest,
    Status,
    TextConfig,
    list_input_items,
    read_request,
    render_echo,
    render_error,
    render_response,
    translate_decoding,
    write_event,
)
from gateway.errors import BadRequest, ForwardedRequestFailed, GatewayError
from gateway.values import CHAT_PATH, InferenceRequest
from wire.bridge import TokenCounts

LOGPROBS = "message.output_text.logprobs"

_CARRIED = frozenset({"temperature", "top_p", "presence_penalty", "frequency_penalty", "allow_remote"})
"""Same name and meaning in chat completions."""
_LEFT_OUT = frozenset(
    {
        "access_programs",
        "client_metadata",
        "context_management",
        "image",
        "messages",
        "moderation",
        "n",
        "prompt_cache_options",
        "prompt_cache_retention",
    }
)
"""Nothing here acts on them, and a chat engine would take some of them for its own."""
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
    _refuse_unavailable(asked)
    earlier = [(msgspec.json.decode(item, type=Item), f"history[{n}]") for n, item in enumerate(history)]
    items = [*earlier, *_list_items(asked)]
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


def _refuse_unavailable(asked: ResponsesRequest) -> None:
    if asked.prompt is not None:
        raise field_error("prompt", "names a stored prompt, and none are stored here; send its text as instructions and input")
    if asked.conversation is not None:
        raise field_error("conversation", "is not offered here; send the items of the conversation as input")
    for name in _LANGUAGES:
        if getattr(asked, name) is not None:
            raise field_error(
                name, "needs a box that answers /v1/responses itself, and none serves this model; put it into instructions"
            )


def _list_items(asked: ResponsesRequest) -> list[tuple[Item, str]]:
    if isinstance(asked.input, str):
        return [({"role": "user", "content": asked.input}, "input")]
    return [(item, f"input[{n}]") for n, item in enumerate(asked.input or [])]


def _read_tools(asked: ResponsesRequest, items: list[tuple[Item, str]]) -> ToolTable:
    table = ToolTable()
    table.add(list(asked.tools or []), "tools")
    for item, where in items:
        table.add(list_brought_tools(item, where), f"{where}.tools")
    return table


def _translate_knobs(asked: ResponsesRequest, fields: dict[str, msgspec.Raw]) -> tuple[dict[str, object], list[str]]:
    """Return the chat fields that have another name or shape there, and what was left out."""
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
_encode = msgspec.json.Encoder().encode
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
    return Translation(
        path=translation.path,
        body=translation.body,
        open_answer=partial(CompactionTranslator, translation.open_answer, kept),
        ignored=translation.ignored,
    )


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
        """What the engine counted, as far as it said."""
        return self._answer.usage

    @property
    def failure(self) -> GatewayError | None:
        """Why there is no summary, if there is none."""
        return self._failure or self._answer.failure

    def feed(self, data: bytes) -> bytes:
        """Take bytes of a stream that nobody asked for."""
        del data
        self._failure = ForwardedRequestFailed("The engine streamed an answer that was asked for as a whole.")
        return b""

    def finish(self) -> bytes:
        """Return nothing: there is no stream."""
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


def _list_input(asked: ResponsesRequest) -> list[object]:
    if isinstance(asked.input, str):
        return [{"role": "user", "content": asked.input}]
    return list(asked.input or [])
