"""Reading just what policy needs from a JSON body, in one pass, leaving the bytes as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

import msgspec

from gateway.errors import BadRequest
from gateway.values import PoolOptions

_PATH_RE = re.compile(r"at `\$\.?([^`]*)`")
_MISSING_RE = re.compile(r"missing required field `([^`]*)`")
_IMAGE_URL_PREFIX = "data:"


class StreamOptions(msgspec.Struct):
    """``stream_options`` of the OpenAI surfaces, read only for its types: the link next to the engine sees to usage."""

    include_usage: bool | None = None


class RequestBody(msgspec.Struct):
    """The fields policy looks at, over all surfaces. Everything else stays in the bytes."""

    model: str
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
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


_decoder = msgspec.json.Decoder(RequestBody)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_options_decoder = msgspec.json.Decoder(PoolOptions)
_encoder = msgspec.json.Encoder()
_GAP = re.compile(rb"[ \t\n\r]*[{},:]?[ \t\n\r]*")
"""What may stand around a key or a value. It matches everywhere, if need be nothing."""
MAX_FALLBACKS = 8
MAX_LATENCY_MS = 3_600_000


def read_body(body: bytes) -> RequestBody:
    """Parse a request body. Raises BadRequest naming the field at fault."""
    if not body.strip():
        raise BadRequest("The request body is empty; send a JSON object.")
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        missing = _MISSING_RE.search(text)
        path = _PATH_RE.search(text)
        param = missing.group(1) if missing else (path.group(1) if path else None)
        raise BadRequest(f"Invalid request body: {text}.", param=param or None) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"The request body is not valid JSON: {error}.") from None


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the top level of a body that ``read_body`` has read. Raises BadRequest for a key that is given twice.

    Readers differ in which of two values counts, so what policy looked at might not be what the engine does.
    """
    fields = _fields_decoder.decode(body)
    if _encoder.encode(fields) != body:  # else it is written without blanks, each key once: the usual case
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


def _refuse_twins(body: bytes) -> None:
    """Raise BadRequest for a top-level key that is given twice, also in another spelling; slow, and exact."""
    outermost: list[tuple[str, object]] = []

    def take(pairs: list[tuple[str, object]]) -> None:
        outermost[:] = pairs  # objects are finished from the inside out: the last one is the body

    json.loads(body, object_pairs_hook=take)
    seen: set[str] = set()
    for name, _value in outermost:
        if name in seen:
            raise BadRequest(f"The field '{name[:80]}' is given twice.", param=name[:80])
        seen.add(name)


def read_options(raw: msgspec.Raw) -> PoolOptions:
    """Parse ``x_pool_options``. Raises BadRequest naming the field at fault."""
    try:
        options = _options_decoder.decode(raw)
    except msgspec.ValidationError as error:
        path = _PATH_RE.search(str(error))
        param = f"x_pool_options.{path.group(1)}" if path else "x_pool_options"
        raise BadRequest(f"Invalid x_pool_options: {error}.", param=param) from None
    if options.max_latency_ms is not None and not 0 <= options.max_latency_ms <= MAX_LATENCY_MS:
        name = "x_pool_options.max_latency_ms"
        raise BadRequest(f"The field '{name}' must lie between 0 and {MAX_LATENCY_MS}.", param=name)
    if len(options.fallback_models) > MAX_FALLBACKS:
        name = "x_pool_options.fallback_models"
        raise BadRequest(f"The field '{name}' may name at most {MAX_FALLBACKS} models.", param=name)
    return options


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
    text = bytes(raw).lstrip()
    if not text:
        raise BadRequest(f"The field '{name}' is required.", param=name)
    if not text.startswith(b"["):
        raise BadRequest(f"The field '{name}' must be a list.", param=name)
    if text[1:].lstrip().startswith(b"]"):
        raise BadRequest(f"The field '{name}' must not be empty.", param=name)


class _Part(msgspec.Struct):
    text: str | None = None


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
                content = message.content
                total += len(content) if isinstance(content, str) else _count_parts(content or ())
                total += len(message.tool_calls)
        except (msgspec.DecodeError, UnicodeDecodeError):
            total = _count_text(_decode(messages))
    for raw in others:
        if raw:
            total += _count_text(_decode(raw))
    return total


def _count_parts(parts: Iterable[_Part]) -> int:
    return sum(len(part.text) for part in parts if part.text is not None)


def _decode(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
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
