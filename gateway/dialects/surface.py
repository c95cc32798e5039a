"""One value per API surface, and the table of them by path."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.dialects.body import (
    RequestBody,
    UsualChat,
    check_model_name,
    count_prompt_chars,
    name_unread_part,
    read_body,
    read_fields,
    read_form,
    read_options,
    read_usual_chat,
    replace_fields,
    replace_form_model,
    require_list,
)
from gateway.dialects.chat import Translation
from gateway.dialects.messages_request import translate_messages
from gateway.dialects.refusal import complete_error, read_refusal, read_shape
from gateway.dialects.responses_answer import make_response_id, render_error
from gateway.dialects.responses_items import SUMMARY_MARK
from gateway.dialects.responses_request import (
    COMPACT_PATH,
    ResponsesBody,
    read_responses_body,
    render_failed_response,
    translate_compact,
    translate_responses,
)
from gateway.errors import BadRequest, BodyUnreadable, ContextTooLong, GatewayError, PromptTooLarge
from gateway.values import CHAT_PATH, InferenceRequest, derive
from wire import clock
from wire.bounds import BOUNDS, find_out_of_bounds
from wire.events import fail_response
from wire.traces import TRACE_HEADERS
from wire.unreadable import UNREADABLE

_json = msgspec.json.Encoder()
_decode = msgspec.json.Decoder().decode

_COMMENT_PING = b": ping\n\n"
_ANTHROPIC_PING = b'event: ping\ndata: {"type": "ping"}\n\n'
CACHE_MODE, CACHE_TAG = "x-cache-mode", "x-cache-tag"
_PLAIN = frozenset({"", "identity"})
_PROMPT_FIELDS = {
    "/v1/responses": "input",
    COMPACT_PATH: "input",
    "/v1/embeddings": "input",
    "/v1/completions": "prompt",
    "/v1/images/generations": "prompt",
    "/v1/rerank": "documents",
}
"""Where the prompt stands, on the surfaces where it is not ``messages``."""
_CACHE_MODES = frozenset({"prefix", "none", "auto"})
_CACHE_TAG_RE = re.compile(r"[A-Za-z0-9._:-]{1,64}\Z")
_JSON_TYPE = "application/json"
_JSON_TYPES = frozenset({"", _JSON_TYPE, "text/json"})
_OPENAI_HEADERS = frozenset({"content-type", "openai-organization", CACHE_MODE, CACHE_TAG}) | TRACE_HEADERS
_CHAT_ALONE = (CHAT_PATH,)
_SUMMARY = SUMMARY_MARK.encode()
_ANTHROPIC_HEADERS = frozenset({"content-type", "anthropic-version", "anthropic-beta", CACHE_MODE, CACHE_TAG}) | TRACE_HEADERS


class Dialect(StrEnum):
    """Whose words a surface speaks."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


@dataclass(frozen=True, slots=True)
class Surface:
    """How one path is read and how it says errors. ``forwarded`` headers travel to the node; credentials never do.

    ``is_form``: the body is a multipart form with a file instead of JSON. ``translate``: how a request is said to a node
    that is asked on another path.
    """

    path: str
    forwarded: frozenset[str]
    check: Callable[[RequestBody], None]
    dialect: Dialect = Dialect.OPENAI
    is_form: bool = False
    translate: Callable[[InferenceRequest], Translation] | None = None
    paths: tuple[str, ...] = ()
    """The API paths on which a node may be asked, best first; unless it is said otherwise this one alone."""

    def __post_init__(self) -> None:
        if not self.paths:
            object.__setattr__(self, "paths", (self.path,))

    @property
    def is_anthropic(self) -> bool:
        return self.dialect is Dialect.ANTHROPIC

    @property
    def ping(self) -> bytes:
        """What keeps a stream alive between two of its events."""
        return _ANTHROPIC_PING if self.is_anthropic else _COMMENT_PING

    def parse(self, body: bytes, headers: Mapping[str, str]) -> InferenceRequest:
        """Read a body. Raises BadRequest, BodyUnreadable for one that is compressed or no JSON."""
        forwarded = derive(headers, self.path, self._read_headers)
        if self.is_form:
            return self._parse_form(body, forwarded)
        if self.path == CHAT_PATH and (usual := read_usual_chat(body)) is not None:
            return self._make_usual(usual, body, forwarded)
        fields = read_body(body)
        self._check_bounds(read_fields(body))
        self.check(fields)
        check_model_name(fields.model, "model")
        limit, limit_field = fields.token_limit
        is_pool_shaped = False
        if self.dialect is Dialect.RESPONSES:
            own = read_responses_body(body)
            _refuse_unavailable(own)
            is_pool_shaped = any(value is not None for value in (own.decoding, own.source_lang_code, own.target_lang_code))
            for name, asked in own.token_limits.items():
                if limit is None or asked > limit:
                    limit, limit_field = asked, name
        if limit is not None and limit < 0:
            raise BadRequest(f"The field '{limit_field}' must not be negative.", param=limit_field)
        paths = self.paths
        if self.dialect is Dialect.RESPONSES and _SUMMARY in body:
            paths = _CHAT_ALONE  # no engine knows what our compaction items say
        options = None
        if fields.x_pool_options:
            options = read_options(fields.x_pool_options) if bytes(fields.x_pool_options) != b"null" else None
            body = replace_fields(body, drop="x_pool_options")
        return InferenceRequest(
            endpoint=self.path,
            model=fields.model,
            is_streaming=bool(fields.stream),
            max_tokens=limit,
            max_tokens_field=limit_field,
            prompt_chars=count_prompt_chars(
                fields.messages,
                fields.input,
                fields.prompt,
                fields.system,
                fields.instructions,
                fields.tools,
                fields.query,
                fields.documents,
            ),
            body=body,
            headers=forwarded,
            options=options,
            paths=paths,
            store=fields.store,
            previous_response_id=fields.previous_response_id or "",
            is_pool_shaped=is_pool_shaped,
        )

    def _make_usual(self, usual: UsualChat, body: bytes, forwarded: dict[str, str]) -> InferenceRequest:
        check_model_name(usual.model, "model")
        limit, limit_field = usual.token_limit
        return InferenceRequest(
            endpoint=self.path,
            paths=self.paths,
            model=usual.model,
            is_streaming=bool(usual.stream),
            max_tokens=limit,
            max_tokens_field=limit_field,
            prompt_chars=sum([len(turn.content) for turn in usual.messages]),
            body=body,
            headers=forwarded,
        )

    def _read_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        forwarded = {name: headers[name] for name in self.forwarded if name in headers}
        _check_encoding(headers)
        _check_cache_headers(forwarded)
        if not self.is_form:
            _check_type(headers)
        return forwarded

    def _check_bounds(self, fields: Mapping[str, msgspec.Raw]) -> None:
        bounded = BOUNDS.get(self.path)
        given: dict[str, object] = {}
        for name, raw in fields.items():
            if bounded is not None and name in bounded:
                try:
                    given[name] = _decode(raw)
                except UNREADABLE as error:
                    raise BadRequest(f"The field '{name}' cannot be read: {error}.", param=name) from None
        fault = find_out_of_bounds(self.path, given) if given else None
        if fault is not None:
            raise BadRequest(fault[1], param=fault[0])

    def rename(self, request: InferenceRequest, model: str) -> InferenceRequest:
        if model == request.model:
            return request
        if self.is_form:
            body = replace_form_model(request.body, request.headers.get("content-type", ""), model)
        else:
            body = replace_fields(request.body, model=model)
        return msgspec.structs.replace(request, model=model, body=body)

    def _parse_form(self, body: bytes, forwarded: dict[str, str]) -> InferenceRequest:
        form = read_form(body, forwarded.get("content-type", ""))
        check_model_name(form.model, "model")
        if b"file" not in form.files:
            raise BadRequest("The field 'file' is required and must be a file.", param="file")
        return InferenceRequest(
            endpoint=self.path,
            paths=self.paths,
            model=form.model,
            is_streaming=form.stream,
            body=body,
            headers=forwarded,
        )

    def render_error(self, error: GatewayError, request_id: str) -> bytes:
        if self.is_anthropic:
            return _json.encode(
                {
                    "type": "error",
                    "error": {"type": error.anthropic_type, "message": _say_to_anthropic(error), **_contract(error)},
                    "request_id": request_id,
                }
            )
        return _json.encode({"error": self._openai(error)})

    def render_stream_error(self, error: GatewayError, request_id: str) -> bytes:
        """Return the one event that ends a stream that had begun."""
        if self.is_anthropic:
            return b"event: error\ndata: " + self.render_error(error, request_id) + b"\n\n"
        if self.dialect is Dialect.RESPONSES:
            said = self._openai(error)
            event = {"type": "error", "code": error.code, "message": error.message, "param": said["param"]}
            return b"event: error\ndata: " + _json.encode({**event, "error": said}) + b"\n\n"
        return b"data: " + _json.encode({"error": self._openai(error)}) + b"\n\n"

    def render_broken(self, error: GatewayError, *, first: bytes, last: bytes) -> bytes:
        """Return the end of an engine's own response that broke; ``first`` and ``last`` are events that passed.

        Nothing in other dialects, and where no response began: ``render_first_error`` has it then.
        """
        return fail_response(render_error(error), first=first, last=last) if self.dialect is Dialect.RESPONSES else b""

    def render_first_error(self, error: GatewayError, request_id: str, request: InferenceRequest | None) -> bytes:
        """Return what ends a stream of which nothing but signs of life went out: here a response begins before it fails."""
        if self.dialect is not Dialect.RESPONSES or request is None:
            return self.render_stream_error(error, request_id)
        return render_failed_response(
            error,
            response_id=make_response_id(request_id),
            model=request.model,
            created=int(clock.unix_s()),
            body=request.body,
        )

    def wants_count(self, error: GatewayError) -> bool:
        """Whether clients act on how long a prompt is of which the engine only said that it has at least so many tokens."""
        return self.is_anthropic and isinstance(error, ContextTooLong) and error.is_at_least

    def render_refusal(self, status: int, body: bytes, request_id: str, *, translated: bytes | None = None) -> bytes:
        """Return an engine's error body (status 400 and above) in this dialect: as it is when it already speaks it.

        ``translated``: what the client had sent, when the engine was asked in other words.
        """
        shape = read_shape(body)
        error = read_refusal(status, body)
        if translated is not None and (named := name_unread_part(error, translated)) is not error:
            return self.render_error(named, request_id)
        is_other = isinstance(error, ContextTooLong) or error.status != status
        if is_other or not shape.has_message or (self.is_anthropic and not shape.is_anthropic):
            return self.render_error(error, request_id)
        return body if self.is_anthropic or shape.is_openai else complete_error(body, self._openai(error))

    def _openai(self, error: GatewayError) -> dict[str, object]:
        is_about_prompt = isinstance(error, ContextTooLong | PromptTooLarge)
        return {
            "code": error.code,
            "message": error.message,
            "retryable": error.retryable,
            "type": error.type,
            "param": _PROMPT_FIELDS.get(self.path, error.param) if is_about_prompt else error.param,
        }


def _contract(error: GatewayError) -> dict[str, object]:
    return {"code": error.code, "retryable": error.retryable, "param": error.param}


def _say_to_anthropic(error: GatewayError) -> str:
    # Claude Code knows what to do by the words: it asks for a shorter answer upon these, and summarises upon the next ones.
    if isinstance(error, ContextTooLong) and error.answer_tokens:
        counts = f"{error.prompt_tokens} + {error.answer_tokens} > {error.context_tokens}"
        advice = "decrease input length or `max_tokens` and try again"
        return f"input length and `max_tokens` exceed context limit: {counts}, {advice}"
    if isinstance(error, ContextTooLong) and error.context_tokens:
        return f"prompt is too long: {error.prompt_tokens} tokens > {error.context_tokens} maximum"
    if isinstance(error, PromptTooLarge | ContextTooLong):
        return f"prompt is too long: {error.message}"
    return error.message


def _refuse_unavailable(body: ResponsesBody) -> None:
    if body.background:
        raise BadRequest("Answers are not made in the background here: leave background out, or stream.", param="background")
    if body.conversation is not None:
        raise BadRequest("Conversations are not offered here: send their items as input.", param="conversation")
    if body.prompt is not None:
        raise BadRequest("Stored prompts are not offered here: send the text as instructions and input.", param="prompt")


def _check_encoding(headers: Mapping[str, str]) -> None:
    encoding = headers.get("content-encoding", "").strip().lower()
    if encoding not in _PLAIN:
        raise BodyUnreadable(f"The body is encoded as '{encoding[:40]}'; send it as it is.", param="Content-Encoding")


def _check_type(headers: Mapping[str, str]) -> None:
    said = headers.get("content-type", _JSON_TYPE)
    kind = said if said == _JSON_TYPE else said.partition(";")[0].strip().lower()
    if kind in _JSON_TYPES or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise BodyUnreadable(
        f"The body is said to be '{kind[:60]}'; send JSON with the header Content-Type: application/json.", param="Content-Type"
    )


def _check_cache_headers(headers: Mapping[str, str]) -> None:
    mode, tag = headers.get(CACHE_MODE), headers.get(CACHE_TAG)
    if mode is not None and mode not in _CACHE_MODES:
        raise BadRequest("The header X-Cache-Mode must be prefix, none or auto.", param="X-Cache-Mode")
    if tag is not None and not _CACHE_TAG_RE.match(tag):
        raise BadRequest("The header X-Cache-Tag must have 1 to 64 characters of A-Z a-z 0-9 . _ : -", param="X-Cache-Tag")


def check_turns(body: RequestBody) -> None:
    """Raise BadRequest unless a body has messages."""
    require_list(body.messages, "messages")


def _check_messages(body: RequestBody) -> None:
    if body.max_tokens is None:
        raise BadRequest("The field 'max_tokens' is required.", param="max_tokens")
    check_turns(body)


def _check_input(body: RequestBody) -> None:
    if bytes(body.input).strip() in _NOTHING:
        raise BadRequest("The field 'input' is required.", param="input")


def _check_completion(body: RequestBody) -> None:
    if bytes(body.prompt).strip() in (b"", b"null"):
        raise BadRequest("The field 'prompt' is required.", param="prompt")


def _check_responses(body: RequestBody) -> None:
    if bytes(body.input).strip() in _NOTHING and not body.previous_response_id:
        raise BadRequest("The field 'input' is required.", param="input")


def _check_compact(body: RequestBody) -> None:
    _check_responses(body)
    if body.stream:
        raise BadRequest("A compaction is not streamed; leave stream out.", param="stream")
    if body.store:
        raise BadRequest("A compaction is not kept; leave store out, and send its output as input.", param="store")


def _check_rerank(body: RequestBody) -> None:
    if not bytes(body.query).strip().startswith(b'"'):
        raise BadRequest("The field 'query' is required and must be text.", param="query")
    require_list(body.documents, "documents")


def _check_prompt(body: RequestBody) -> None:
    text = bytes(body.prompt).strip()
    if not text or text == b"null":
        raise BadRequest("The field 'prompt' is required.", param="prompt")
    if not text.startswith(b'"'):
        raise BadRequest("The field 'prompt' must be text.", param="prompt")
    if text == b'""':
        raise BadRequest("The field 'prompt' must not be empty.", param="prompt")


def _check_nothing(body: RequestBody) -> None:
    del body


_NOTHING = (b"", b"null", b"[]", b'""')
SURFACES: dict[str, Surface] = {
    surface.path: surface
    for surface in (
        Surface("/v1/chat/completions", _OPENAI_HEADERS, check_turns),
        Surface("/v1/completions", _OPENAI_HEADERS, _check_completion),
        Surface("/v1/embeddings", _OPENAI_HEADERS, _check_input),
        Surface("/v1/rerank", _OPENAI_HEADERS, _check_rerank),
        Surface(
            "/v1/responses",
            _OPENAI_HEADERS,
            _check_responses,
            Dialect.RESPONSES,
            translate=translate_responses,
            paths=("/v1/responses", CHAT_PATH),
        ),
        Surface(
            COMPACT_PATH, _OPENAI_HEADERS, _check_compact, Dialect.RESPONSES, translate=translate_compact, paths=_CHAT_ALONE
        ),
        Surface("/v1/audio/transcriptions", _OPENAI_HEADERS, _check_nothing, is_form=True),
        Surface("/v1/audio/translations", _OPENAI_HEADERS, _check_nothing, is_form=True),
        Surface("/v1/images/generations", _OPENAI_HEADERS, _check_prompt),
        Surface(
            "/v1/messages",
            _ANTHROPIC_HEADERS,
            _check_messages,
            Dialect.ANTHROPIC,
            translate=translate_messages,
            paths=("/v1/messages", CHAT_PATH),
        ),
    )
}
"""Every inference surface by path."""

DEFAULT_SURFACE = SURFACES["/v1/chat/completions"]
"""How errors are said where no surface is involved."""
