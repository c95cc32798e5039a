"""Reading just what policy needs from a JSON body, in one pass, leaving the bytes as they are."""

from __future__ import annotations

import re

import msgspec

from core.limits import limits
from gateway.dialects.crowding import is_crowded
from gateway.dialects.faults import join_fault, read_fault
from gateway.errors import BadRequest, BodyTooLarge
from gateway.values import PoolOptions
from gateway.whole_numbers import WholeNumber, read_whole_number
from wire.bounds import find_crowd
from wire.limits import WIRE
from wire.unreadable import UNREADABLE

_IMAGE_URL_PREFIX = "data:"


class StreamOptions(msgspec.Struct):
    """``stream_options`` of the OpenAI surfaces, read only for its types: the link next to the engine sees to usage."""

    include_usage: bool | None = None


class RequestBody(msgspec.Struct):
    """The fields policy looks at, over all surfaces. Everything else stays in the bytes."""

    model: str
    stream: bool | None = None
    max_tokens: WholeNumber | None = None
    max_completion_tokens: WholeNumber | None = None
    max_output_tokens: WholeNumber | None = None
    stream_options: StreamOptions | None = None
    messages: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    query: msgspec.Raw = msgspec.Raw()
    documents: msgspec.Raw = msgspec.Raw()
    store: bool | None = None
    previous_response_id: str | None = None
    x_pool_options: msgspec.Raw = msgspec.Raw()

    @property
    def token_limit(self) -> tuple[int | None, str]:
        """The largest number of output tokens the caller asks for, and the field that asks for it."""
        limit, field = self.max_tokens, "max_tokens"
        if self.max_completion_tokens is not None and (limit is None or self.max_completion_tokens > limit):
            limit, field = self.max_completion_tokens, "max_completion_tokens"
        if self.max_output_tokens is not None and (limit is None or self.max_output_tokens > limit):
            limit, field = self.max_output_tokens, "max_output_tokens"
        return limit, field


_decoder = msgspec.json.Decoder(RequestBody, dec_hook=read_whole_number)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_options_decoder = msgspec.json.Decoder(PoolOptions, dec_hook=read_whole_number)
_encoder = msgspec.json.Encoder()
_BLANKS = b" \t\n\r"
_LIST = re.compile(rb"[ \t\n\r]*\[[ \t\n\r]*(\]?)")
_GAP = re.compile(rb"[ \t\n\r]*[{},:]?[ \t\n\r]*")
"""What may stand around a key or a value. It matches everywhere, if need be nothing."""


def read_body(body: bytes) -> RequestBody:
    """Parse a request body. Raises BadRequest naming the field at fault, BodyTooLarge for one of too many values."""
    if not body or body.isspace():
        raise BadRequest("The request body is empty; send a JSON object.")
    if is_crowded(body):
        raise BodyTooLarge(f"The body holds more than {WIRE.body_marks} values; send less at once.")
    if (crowd := find_crowd(body)) is not None:
        raise BadRequest(crowd[1], param=crowd[0])
    if not body.isascii():
        _check_encoding(body)
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        reason, param = join_fault(error)
        raise BadRequest(f"Invalid request body: {reason}.", param=param) from None
    except UNREADABLE as error:
        raise _say_malformed(error) from None


def _say_malformed(error: Exception) -> BadRequest:
    return BadRequest(f"The request body is not valid JSON: {error}.")


def _check_encoding(body: bytes) -> None:
    """Raise BadRequest unless a body is UTF-8 (RFC 8259, section 8.1): fields that are only passed on are not decoded."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"The request body is not UTF-8: {error.reason} (byte {error.start}).") from None


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the top level of a body that ``read_body`` has read. Raises BadRequest for a key that is given twice.

    Readers differ in which of two values counts, so what policy looked at might not be what the engine does.
    """
    try:
        fields = _fields_decoder.decode(body)
    except UNREADABLE as error:  # keys are decoded here for the first time
        raise _say_malformed(error) from None
    once = _encoder.encode(fields)
    if body != once and body.translate(None, _BLANKS) != once.translate(None, _BLANKS):  # else each key stands there once
        _refuse_duplicates(body, fields)
    return fields


def _refuse_duplicates(body: bytes, fields: dict[str, msgspec.Raw]) -> None:
    """Walk over keys and values as they were decoded; whatever lies between them must be punctuation alone."""
    at = _end_of_gap(body, 0)
    for key, raw in fields.items():
        value = memoryview(raw)
        literal = _encoder.encode(key)
        if not body.startswith(literal, at):
            _refuse_twins(body)  # a key with escaped letters, or one that came before
            return
        at = _end_of_gap(body, at + len(literal))
        if body[at : at + len(value)] != value:
            raise BadRequest(f"The field '{key[:80]}' is given twice.", param=key[:80])
        at = _end_of_gap(body, at + len(value))
    if at < len(body):
        _refuse_twins(body)


def _end_of_gap(body: bytes, at: int) -> int:
    found = _GAP.match(body, at)
    return found.end() if found is not None else at


class _Key(str):
    """A key that is read by way of a hook, which sees it each time it comes."""

    __slots__ = ()


def _refuse_twins(body: bytes) -> None:
    """Raise BadRequest for a top-level key that is given twice, also in another spelling; slow, and exact."""
    seen: set[str] = set()

    def take(_kind: type, name: str) -> _Key:
        if name in seen:
            raise BadRequest(f"The field '{name[:80]}' is given twice.", param=name[:80])
        seen.add(name)
        return _Key(name)

    try:
        msgspec.json.decode(body, type=dict[_Key, msgspec.Raw], dec_hook=take)
    except UNREADABLE as error:
        raise _say_malformed(error) from None


def read_options(raw: msgspec.Raw) -> PoolOptions:
    """Parse ``x_pool_options``. Raises BadRequest naming the field at fault."""
    try:
        options = _options_decoder.decode(raw)
    except msgspec.ValidationError as error:
        reason, path = read_fault(error)
        raise BadRequest(f"Invalid x_pool_options: {reason}.", param=f"x_pool_options{path}") from None
    except UNREADABLE as error:
        raise BadRequest(f"The field 'x_pool_options' is not valid JSON: {error}.", param="x_pool_options") from None
    if options.max_latency_ms is not None and not 0 <= options.max_latency_ms <= limits().gateway.latency_ms:
        name = "x_pool_options.max_latency_ms"
        raise BadRequest(f"The field '{name}' must lie between 0 and {limits().gateway.latency_ms}.", param=name)
    if len(options.fallback_models) > limits().gateway.fallbacks:
        name = "x_pool_options.fallback_models"
        raise BadRequest(f"The field '{name}' may name at most {limits().gateway.fallbacks} models.", param=name)
    for model in options.fallback_models:
        check_model_name(model, "x_pool_options.fallback_models")
    return options


def check_model_name(name: str, field: str) -> None:
    """Raise BadRequest, naming ``field``, for what no model can be called."""
    most = limits().gateway.model_name_chars
    if not name or len(name) > most or not name.isprintable():
        raise BadRequest(f"The field '{field}' must be a name of 1 to {most} printable characters.", param=field)


def replace_fields(body: bytes, *, drop: str = "", model: str = "") -> bytes:
    """Return a JSON body without the field ``drop``, and with ``model`` as its model."""
    fields = _fields_decoder.decode(body)
    if drop:
        fields.pop(drop, None)
    if model:
        fields["model"] = msgspec.Raw(_encoder.encode(model))
    return _encoder.encode(fields)


def require_list(raw: msgspec.Raw, name: str) -> None:
    """Raise BadRequest unless ``raw`` is a non-empty JSON array."""
    if not raw:
        raise BadRequest(f"The field '{name}' is required.", param=name)
    opening = _LIST.match(memoryview(raw))
    if opening is None:
        raise BadRequest(f"The field '{name}' must be a list.", param=name)
    if opening[1]:
        raise BadRequest(f"The field '{name}' must not be empty.", param=name)


class _Source(msgspec.Struct):
    type: str = ""
    data: msgspec.Raw = msgspec.Raw()
    content: str | list[_Part] | None = None


class _Part(msgspec.Struct):
    """A part of a message. Messages nests: tool results hold parts or a text, documents say where theirs is."""

    text: str | None = None
    thinking: str | None = None
    content: str | list[_Part] | None = None
    input: msgspec.Raw = msgspec.Raw()
    source: _Source | None = None


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


_messages_decoder = msgspec.json.Decoder(list[_Message])


def count_prompt_chars(messages: msgspec.Raw, *others: msgspec.Raw) -> int:
    """Return how many characters of text the prompt has. Images and files given as data URLs are not text."""
    total = 0
    if messages:
        try:
            for message in _messages_decoder.decode(messages):
                total += _count_content(message.content) + len(message.tool_calls)
        except UNREADABLE:
            total = _count_text(_decode(messages))
    for raw in others:
        if raw:
            total += _count_text(_decode(raw))
    return total


def _count_content(content: str | list[_Part] | None) -> int:
    if content is None or isinstance(content, str):
        return len(content or "")
    total = 0
    for part in content:
        total += len(part.text or "") + len(part.thinking or "") + len(part.input)
        total += _count_content(part.content)
        if part.source is not None:
            total += _count_content(part.source.content)
            total += len(part.source.data) if part.source.type == "text" else 0
    return total


def _decode(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except UNREADABLE as error:
        raise BadRequest(f"The prompt is not valid JSON: {error}.") from None


def _count_text(value: object) -> int:
    """Return the characters of all text in a JSON value. Walks without recursion: clients choose the depth."""
    total, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            total += 0 if item.startswith(_IMAGE_URL_PREFIX) else len(item)
        elif isinstance(item, list):
            waiting.extend(item)
        elif isinstance(item, dict):
            waiting.extend(part for key, part in item.items() if key not in {"data", "file_data"})
    return total
