"""llm-pool's POST /v1/responses: the request as a chat completion, and that answer as the pool's JSON or events."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from runner.definitions.fields import (
    DECODING_FIELDS,
    Backend,
    Decoding,
    Field,
    ModelDefinition,
    fields_of,
    merge_decoding,
    show_name,
    text,
    type_name,
)
from runner.engines.port import CHAT
from runner.errors import (
    EngineUnavailable,
    InvalidRequest,
    ModalityUnsupported,
    RemoteNotAllowed,
    make_response_id,
    write_event,
)
from runner.limits import limits
from runner.pool.models import Registry
from runner.serving.request import Answer, Inference, Numbers
from wire import clock
from wire.events import EventCutter
from wire.unreadable import UNREADABLE
from wire.usage import PoolMetrics

log = logging.getLogger(__name__)

_CODE = text("a language code such as en or pt-BR", "[A-Za-z]{2,3}(?:[-_][A-Za-z0-9]{2,8}){0,3}")
_POOL_ONLY = frozenset({"decoding", "source_lang_code", "target_lang_code"})
"""Fields that OpenAI's Responses API does not have. ``allow_remote`` is one too, but useful in both."""


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request, defaults filled in. ``given`` are the decoding fields that the client itself named.

    ``instructions`` None = the client said nothing, an empty text = it wants none.
    """

    model: Annotated[str, text("a model id")]
    input: str
    instructions: str | None = None
    source_lang_code: Annotated[str, _CODE] | None = None
    target_lang_code: Annotated[str, _CODE] | None = None
    stream: bool = False
    allow_remote: bool = False
    decoding: Decoding = Decoding()
    given: frozenset[str] = frozenset()


_FIELDS = {name: one for name, one in fields_of(PoolRequest).items() if name != "given"}
_CHECKED_APART = frozenset({"input", "instructions", "decoding"})
"""Texts of any length and of any characters, and the nested object."""


def uses_pool_shape(body: bytes, *, on_socket: bool) -> bool:
    """Return whether a body for ``/v1/responses`` is llm-pool's rather than OpenAI's.

    On the node's own port (``on_socket`` False) a text as ``input`` and none but llm-pool's fields is enough. Through a
    gateway, whose clients expect OpenAI's shape, it takes a field that only llm-pool has.
    """
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE:
        return False
    if not isinstance(fields, dict):
        return False
    if _POOL_ONLY & fields.keys():
        return True
    if not isinstance(fields.get("input"), str):
        return False
    return "allow_remote" in fields or (not on_socket and fields.keys() <= _FIELDS.keys())


def read_pool_request(body: bytes, *, defaults: Decoding) -> PoolRequest:
    """Return the request. Raises InvalidRequest; ``param`` is the dotted name of the field, and no text is repeated."""
    try:
        fields = msgspec.json.decode(body)
    except UNREADABLE:
        raise InvalidRequest("the body is not JSON in UTF-8") from None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {type_name(fields)}")
    _refuse_unknown(fields, _FIELDS, "")
    for name in ("model", "input"):
        if name not in fields:
            raise InvalidRequest(f"{name} is missing", param=name)
    for name, value in fields.items():
        if name not in _CHECKED_APART:
            _check(name, value, _FIELDS[name])
    _check_text(fields, "input", "a string that is not empty")
    if fields.get("instructions") is not None:
        _check_text(fields, "instructions", "a string or null")
    given = _read_decoding(fields.get("decoding", {}))
    return PoolRequest(**{**fields, "decoding": merge_decoding(defaults, given), "given": frozenset(given)})


def _read_decoding(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"decoding must be an object, not {type_name(value)}", param="decoding")
    _refuse_unknown(value, DECODING_FIELDS, "decoding.")
    for name, given in value.items():
        _check(f"decoding.{name}", given, DECODING_FIELDS[name])
    return value


def _check_text(fields: Mapping[str, object], name: str, what: str) -> None:
    value = fields[name]
    if not isinstance(value, str) or (name == "input" and not value):
        got = "an empty one" if value == "" else type_name(value)
        raise InvalidRequest(f"{name} must be {what}, not {got}", param=name)


def _refuse_unknown(fields: Mapping[str, object], known: Mapping[str, object], prefix: str) -> None:
    for name in fields:
        if name not in known:
            shown = prefix + show_name(name)
            raise InvalidRequest(f"{shown} is unknown; allowed are {', '.join(known)}", param=shown)


def _check(name: str, value: object, kind: Field) -> None:
    if not kind.accepts(value):
        got = type_name(value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            got = str(value)[:40]
        raise InvalidRequest(f"{name} must be {kind.allowed()}, not {got}", param=name)


DEFAULT_INSTRUCTION = "Do what the user asks. Answer in the user's language unless told otherwise, and add nothing else."
"""The system message of requests that bring no instructions."""

TRANSLATE_GEMMA = "translategemma_template"


@dataclass(frozen=True, slots=True)
class PoolBackend:
    """How a backend takes part. ``decoding``: its chat field for each pool field it honours, None = it serves no chat.

    ``is_local`` False: requests must say ``allow_remote``. ``takes_template_kwargs``: it hands ``chat_template_kwargs`` to
    the model's template. ``reads_language_kwargs``: it takes TranslateGemma's languages from there and the text as it is.
    """

    decoding: Mapping[str, str] | None
    is_local: bool = True
    takes_template_kwargs: bool = True
    reads_language_kwargs: bool = False


_OPENAI = {"top_p": "top_p", "temperature": "temperature", "max_tokens": "max_tokens", "stop": "stop"}
_SAMPLERS = {**_OPENAI, "top_k": "top_k", "repetition_penalty": "repetition_penalty"}
_LLAMA = {**_OPENAI, "top_k": "top_k", "repetition_penalty": "repeat_penalty"}

POOL_BACKENDS: Mapping[Backend, PoolBackend] = {
    "gguf": PoolBackend(_LLAMA, reads_language_kwargs=True),
    "llama_server": PoolBackend(_LLAMA, reads_language_kwargs=True),
    "ct2": PoolBackend({**_SAMPLERS, "beam_size": "beam_size"}),
    "vllm": PoolBackend(_SAMPLERS),
    "exllamav3": PoolBackend(_SAMPLERS),
    "tabbyapi": PoolBackend(_SAMPLERS),
    "tgi": PoolBackend(_OPENAI, takes_template_kwargs=False),
    "attached": PoolBackend(_OPENAI),
    "openai_compatible": PoolBackend(_OPENAI, is_local=False, takes_template_kwargs=False),
    "whisper": PoolBackend(None),
    "comfyui": PoolBackend(None),
}
"""``repeat_penalty`` is llama.cpp's own name; TGI's chat route has neither top_k nor a repetition penalty."""


class ChatTranslation(msgspec.Struct, frozen=True, kw_only=True):
    """``body`` for ``/v1/chat/completions``; ``ignored`` are fields the client gave that the backend does not have."""

    body: bytes
    ignored: tuple[str, ...] = ()


def to_chat(request: PoolRequest, definition: ModelDefinition) -> ChatTranslation:
    """Return the request as a chat completion for the model; streams ask for usage.

    Raises RemoteNotAllowed for a remote model without ``allow_remote``, ModalityUnsupported for a model that does not
    chat, InvalidRequest where the model's prompt format needs or knows no languages.
    """
    backend = POOL_BACKENDS[definition.backend]
    if not backend.is_local and not request.allow_remote:
        raise RemoteNotAllowed(f"{request.model} is a remote model; say allow_remote: true to use it", param="allow_remote")
    options = definition.options
    if backend.decoding is None or options.get("gguf_embedding") or options.get("vllm_task") == "embed":
        raise ModalityUnsupported(f"{request.model} does not generate text", param="model")
    body: dict[str, object] = {"model": request.model, **_translate_messages(request, definition, backend)}
    ignored = [f"decoding.{name}" for name in sorted(request.given) if name not in backend.decoding]
    for name, chat_name in backend.decoding.items():
        value = getattr(request.decoding, name)
        if name != "stop" or value:
            body[chat_name] = value
    if request.stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if definition.prompt_format == TRANSLATE_GEMMA and request.instructions:
        ignored.append("instructions")
    return ChatTranslation(body=msgspec.json.encode(body), ignored=tuple(ignored))


def _translate_messages(request: PoolRequest, definition: ModelDefinition, backend: PoolBackend) -> dict[str, object]:
    kwargs: dict[str, object] = {}
    if definition.enable_thinking is not None and backend.takes_template_kwargs:
        kwargs["enable_thinking"] = definition.enable_thinking
    if definition.prompt_format == TRANSLATE_GEMMA:
        languages = _read_languages(request)
        content: object = request.input
        if not backend.reads_language_kwargs:
            content = [{"type": "text", **languages, "text": request.input}]
        elif backend.takes_template_kwargs:
            kwargs |= languages
        messages = [{"role": "user", "content": content}]
    else:
        _refuse_languages(request)
        instructions = DEFAULT_INSTRUCTION if request.instructions is None else request.instructions
        messages = [{"role": "system", "content": instructions}] if instructions else []
        messages.append({"role": "user", "content": request.input})
    return {"messages": messages, **({"chat_template_kwargs": kwargs} if kwargs else {})}


def _read_languages(request: PoolRequest) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("source_lang_code", "target_lang_code"):
        code = getattr(request, name)
        if code is None:
            raise InvalidRequest(f"{name} is missing; {request.model} translates and must be told both languages", param=name)
        found[name] = code
    return found


def _refuse_languages(request: PoolRequest) -> None:
    for name in ("source_lang_code", "target_lang_code"):
        if getattr(request, name) is not None:
            raise InvalidRequest(
                f"{name} is for models with prompt_format {TRANSLATE_GEMMA}; put the languages into instructions", param=name
            )


def make_metrics(numbers: Numbers, *, pool_ms: float, first_token_ms: float | None = None) -> PoolMetrics:
    """Return the metrics of measurements that need not come from one clock.

    ``numbers``: of the engine's answer, from sending the request to its last byte, and its wait in the queue before that.
    ``pool_ms``: the whole request. ``first_token_ms``: from sending to the first text. What the engine itself reports of its
    time is prompt and decoding; without that the rate of tokens is over the time measured around it.
    """
    backend_ms, queue_ms = numbers.wall_ms, numbers.queue_wait_ms
    # An outer timer is never below an inner one, though each is rounded by itself.
    backend = round(backend_ms, 1)
    engine = round(max(backend_ms + queue_ms, backend + round(queue_ms, 1)), 1)
    own_ms = None if numbers.decode_ms is None else (numbers.prompt_ms or 0.0) + numbers.decode_ms
    generated_ms, output = backend_ms if own_ms is None else own_ms, numbers.output_tokens
    return PoolMetrics(
        backend_inference_wall_ms=backend,
        engine_total_wall_ms=engine,
        engine_outside_backend_wall_ms=round(engine - backend, 1),
        pool_total_wall_ms=max(round(pool_ms, 1), engine),
        engine_queue_wait_ms=_round(queue_ms),
        engine_tokenize_ms=_round(numbers.tokenize_ms),
        gpu_time_to_first_token_ms=_round(first_token_ms),
        gpu_generate_total_ms=_round(own_ms),
        gpu_decode_after_first_token_ms=None if first_token_ms is None else _round(max(0.0, generated_ms - first_token_ms)),
        engine_prompt_tokens=numbers.prompt_tokens,
        engine_output_tokens=output,
        engine_tokens_per_second=None if output is None or generated_ms <= 0 else _round(output * 1000.0 / generated_ms),
    )


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    delta: _Message | None = None
    message: _Message | None = None
    finish_reason: str | None = None


class _Failure(msgspec.Struct):
    message: str = ""


class _Chunk(msgspec.Struct):
    """One event of a chat stream, or a whole chat answer."""

    choices: list[_Choice] = []
    error: _Failure | str | None = None


_decoder = msgspec.json.Decoder(_Chunk)


class ResponseBuilder:
    """Collects one answer. Streamed: ``begin``, ``feed`` …, then ``finish`` or ``fail``. Whole: ``take_answer``, ``to_json``.

    What ``begin``, ``feed``, ``finish`` and ``fail`` return goes to the client as it is (text/event-stream).
    """

    def __init__(self, *, model: str) -> None:
        self.response_id = make_response_id()
        self.has_failed = False
        self._model = model
        self._most_chars = limits().serving.text_chars
        self._parts: list[str] = []
        self._chars = 0
        self._is_whole = False
        self._is_over = False
        self._cutter = EventCutter()

    @property
    def has_text(self) -> bool:
        return self._chars > 0

    def begin(self) -> bytes:
        started = {"id": self.response_id, "object": "response", "model": self._model, "output": [], "output_text": ""}
        return write_event("response.created", {"response": started})

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the engine's event stream; return an ``response.output_text.delta`` for each piece of text in them.

        Returns an error event when the stream holds an error or is not a chat stream.
        """
        if self._is_over:
            return b""
        out = b""
        try:
            for payload in _payloads(self._cutter.feed(data)):
                if payload == b"[DONE]":
                    self._is_whole = True
                elif piece := self._take(payload, "the engine sent what is not a chat stream"):
                    out += write_event("response.output_text.delta", {"id": self.response_id, "delta": piece})
        except EngineUnavailable as error:
            out += self.fail(error)
        return out

    def finish(self, metrics: PoolMetrics) -> bytes:
        """Return ``response.metrics`` and ``response.completed``; an error event when the engine broke off before the end."""
        if self._is_over:
            return b""
        rest = self.feed(b"\n\n")
        if self.has_failed:
            return rest
        if not self._is_whole:
            return rest + self.fail(EngineUnavailable("the engine broke off before the end of the answer"))
        self._is_over = True
        return rest + self._complete(metrics)

    def fail(self, error: EngineUnavailable) -> bytes:
        """Return an error event, the last thing that comes out; nothing when the answer is over already."""
        if self._is_over:
            return b""
        # Nothing more comes out, so that there is never a ``response.completed`` behind it.
        self._is_over = self.has_failed = True
        return write_event("error", {"id": self.response_id, "error": {"code": error.code, "message": error.message}})

    def take_answer(self, body: bytes) -> None:
        """Take a whole chat answer. Raises EngineUnavailable for one that is an error, or no chat answer."""
        self._take(body, "the engine answered with what is not a chat completion", is_whole=True)
        self._is_whole = self._is_over = True

    def to_json(self, metrics: PoolMetrics) -> bytes:
        """Return the answer as one JSON body; only after ``take_answer``."""
        assert self._is_whole, "there is no answer yet"
        return msgspec.json.encode(self._envelope(metrics))

    def to_events(self, metrics: PoolMetrics) -> bytes:
        """Return the answer as the events of a stream, all at once; only after ``take_answer``."""
        assert self._is_whole, "there is no answer yet"
        delta = write_event("response.output_text.delta", {"id": self.response_id, "delta": "".join(self._parts)})
        return self.begin() + delta + self._complete(metrics)

    def _complete(self, metrics: PoolMetrics) -> bytes:
        measured = write_event("response.metrics", {"id": self.response_id, "metrics": metrics})
        return measured + write_event("response.completed", {"response": self._envelope(metrics)})

    def _take(self, payload: bytes, otherwise: str, *, is_whole: bool = False) -> str:
        """Return the text of a chunk or a whole answer. Raises EngineUnavailable, with the words ``otherwise`` for neither."""
        try:
            chunk = _decoder.decode(payload)
        except UNREADABLE:
            raise EngineUnavailable(otherwise) from None
        if chunk.error is not None:
            words = chunk.error if isinstance(chunk.error, str) else chunk.error.message
            raise EngineUnavailable(
                f"the engine failed: {words[: limits().engines.said_chars]}" if words else "the engine failed"
            )
        if is_whole and not any(choice.message for choice in chunk.choices):
            raise EngineUnavailable("the engine answered without a message")
        piece = ""
        for choice in chunk.choices:
            if choice.index == 0:
                message = choice.delta or choice.message
                piece += (message.content or "") if message is not None else ""
                self._is_whole = self._is_whole or choice.finish_reason is not None
        self._chars += len(piece)
        if self._chars > self._most_chars:
            raise EngineUnavailable(f"the engine wrote more than {self._most_chars} characters")
        if piece:
            self._parts.append(piece)
        return piece

    def _envelope(self, metrics: PoolMetrics) -> dict[str, object]:
        text = "".join(self._parts)
        return {
            "id": self.response_id,
            "object": "response",
            "model": self._model,
            "output": [{"type": "output_text", "text": text}],
            "output_text": text,
            "metrics": metrics,
        }


def _payloads(events: bytes) -> list[bytes]:
    """Return the data of whole server-sent events, comments and empty ones left out."""
    found: list[bytes] = []
    lines: list[bytes] = []
    for line in [*events.splitlines(), b""]:
        if not line and lines:
            found.append(b"\n".join(lines))
            lines = []
        elif line.startswith(b"data:"):
            lines.append(line[5:].removeprefix(b" "))
    return found


@asynccontextmanager
async def answer_pool(
    request: Inference, *, registry: Registry, defaults: Decoding,
    open_chat: Callable[[Inference], AbstractAsyncContextManager[Answer]],
) -> AsyncIterator[Answer]:  # fmt: skip
    """Serve a request in the pool's shape by a chat completion. ``defaults``: of decoding. Raises RequestRefused."""
    began = clock.monotonic()
    wanted = read_pool_request(request.body, defaults=defaults)
    model = registry.find(wanted.model)
    chat = to_chat(wanted, model.definition)
    if chat.ignored:
        log.info("decoding fields ignored model=%s fields=%s", model.model_id, ",".join(chat.ignored))
    inner = replace(
        request, path=CHAT, body=chat.body, model=wanted.model, is_streaming=wanted.stream, allow_remote=wanted.allow_remote
    )
    async with open_chat(inner) as answer:
        if answer.status >= 300:
            yield answer
            return
        builder = ResponseBuilder(model=wanted.model)
        if answer.chunks is not None and answer.is_event_stream:
            headers = {**answer.headers, "content-type": "text/event-stream; charset=utf-8"}
            chunks = _translate(answer, builder, began)
            outer = Answer(answer.status, headers, chunks=chunks, is_event_stream=True, numbers=answer.numbers)
            yield outer
            outer.usage = answer.usage
            return
        whole = answer.body
        if whole is None:
            assert answer.chunks is not None
            whole = b"".join([chunk async for chunk in answer.chunks])
        builder.take_answer(whole)
        answer.numbers.take(whole)  # of one too long to be held nobody has read them
        metrics = make_metrics(answer.numbers, pool_ms=(clock.monotonic() - began) * 1000)
        # Some providers answer a request for a stream with one JSON object.
        body = builder.to_events(metrics) if wanted.stream else builder.to_json(metrics)
        media_type = "text/event-stream; charset=utf-8" if wanted.stream else "application/json"
        headers = {**answer.headers, **answer.numbers.headers(), "content-type": media_type}
        headers["content-length"] = str(len(body))
        yield Answer(
            answer.status, headers, body=body, is_event_stream=wanted.stream, usage=answer.usage, numbers=answer.numbers
        )


async def _translate(answer: Answer, builder: ResponseBuilder, began: float) -> AsyncIterator[bytes]:
    """Yield the pool's events as text comes; an engine that breaks off ends in one error event."""
    assert answer.chunks is not None
    sent_at, first_ms = clock.monotonic(), None
    yield builder.begin()
    try:
        async for chunk in answer.chunks:
            out = builder.feed(chunk)
            if first_ms is None and builder.has_text:
                first_ms = (clock.monotonic() - sent_at) * 1000
            if out:
                yield out
    except EngineUnavailable as error:
        answer.has_failed = True
        yield builder.fail(error)
        return
    pool_ms = (clock.monotonic() - began) * 1000
    last = builder.finish(make_metrics(answer.numbers, pool_ms=pool_ms, first_token_ms=first_ms))
    answer.has_failed = answer.has_failed or builder.has_failed
    yield last + answer.numbers.comment()
