"""What policy needs of a request body, JSON or form, read in one pass, leaving the bytes as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, MultipartState, parse_options_header

from core.limits import limits
from gateway.errors import BadRequest, BodyTooLarge, EngineRefused, GatewayError
from gateway.values import PoolOptions, WholeNumber, read_whole_number
from wire.bounds import BOUNDS, find_crowd
from wire.limits import WIRE
from wire.unreadable import UNREADABLE

_STEP_OF_MARKS = re.compile(rb'(?:[^"\[{,]*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+"[^"\[{,]*+)*+[\[{,]){1000}+', re.DOTALL)


def is_crowded(data: bytes) -> bool:
    """Return whether a JSON text holds more values than anybody needs. Texts shorter than ``body_marks`` bytes cannot.

    Marks are counted wherever they stand first, which is quick; only a text with too many is looked at for its strings.
    """
    if len(data) <= WIRE.body_marks or data.count(b",") + data.count(b"[") + data.count(b"{") <= WIRE.body_marks:
        return False
    at = 0
    for _ in range(WIRE.body_marks // 1000):
        found = _STEP_OF_MARKS.match(data, at)
        if found is None:
            return False
        at = found.end()
    return True


# The place stands last: what comes before may hold a name or a value that a client chose.
_PLACE = re.compile(r" - at `\$([^`]*)`\Z")
_NAMED = re.compile(r"Object (?:missing required|contains unknown) field `(.*)`\Z", re.DOTALL)


def read_fault(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the reason and the path below the value that was read, such as ``.content[1].type``; empty = the value itself."""
    said = str(error)
    place = _PLACE.search(said)
    path = place.group(1) if place is not None else ""
    reason = said[: place.start()] if place is not None else said
    named = _NAMED.match(reason)
    if named is not None:
        path += f".{named.group(1)[: limits().gateway.fault_field_chars]}"
    return reason[: limits().gateway.fault_reason_chars], path


def join_fault(error: msgspec.ValidationError) -> tuple[str, str | None]:
    """Return the reason with its place, and the path from the top of a body; None = the body itself."""
    reason, path = read_fault(error)
    place = _PLACE.search(str(error))
    return reason + (place.group() if place is not None else ""), path.removeprefix(".") or None


class _Tool(msgspec.Struct):
    type: object = None
    input_schema: object = None


class _Body(msgspec.Struct):
    tools: list[_Tool] = []


_decoder = msgspec.json.Decoder(_Body)


def has_foreign_tools(body: bytes, *, is_anthropic: bool) -> bool:
    """Whether a request offers tools that are not plain functions, such as ``web_search`` or a custom tool with a grammar."""
    try:
        tools = _decoder.decode(body).tools
    except UNREADABLE:
        return False
    if is_anthropic:
        return any(tool.type not in (None, "custom") or not isinstance(tool.input_schema, dict) for tool in tools)
    return any(tool.type != "function" for tool in tools)


_ABOUT_PARTS = re.compile(
    r"\b(?:content|parts?|files?|documents?|pdf|images?|audio|multimodal|modalit(?:y|ies))\b", re.IGNORECASE
)
_KINDS = {
    "document": "document", "file": "file", "input_file": "file", "image": "image", "input_image": "image",
    "input_audio": "audio",
}  # fmt: skip
_GROUPS = {"file": "document"}
_MENTIONS = re.compile(r"(?P<document>\bfiles?\b|documents?|pdf)|(?P<image>image)|(?P<audio>audio)", re.IGNORECASE)
_REFUSALS = frozenset({400, 415, 422, 501})
_AS_TEXT = frozenset({"text", "content"})
"""Sources of a document that the translation gives to the engine as text."""


class _Source(msgspec.Struct):
    type: object = None


class _Part(msgspec.Struct):
    type: object = None
    source: _Source | str | None = None
    content: list[_Part] | str | None = None


class _Turn(msgspec.Struct):
    content: list[_Part] | str | None = None
    output: list[_Part] | str | None = None


class _Asked(msgspec.Struct):
    messages: list[_Turn] | None = None
    input: list[_Turn] | str | None = None


_content_decoder = msgspec.json.Decoder(_Asked)


def name_unread_part(error: GatewayError, body: bytes) -> GatewayError:
    """Return an engine's refusal with the field that it is about, where its words are about parts and there is such a part.

    ``body``: as the client sent it. What the engine mentions first is what it refuses; what it would take comes after that.
    """
    words = error.message
    if not isinstance(error, EngineRefused) or error.status not in _REFUSALS or not _ABOUT_PARTS.search(words):
        return error
    places: dict[str, tuple[str, str]] = {}
    for place, part in _list_parts(body):
        if (kind := _find_kind(part)) is not None:
            places.setdefault(_GROUPS.get(kind, kind), (place, kind))
    group = next((group for group in _list_mentioned(words) if group in places), None)
    if group is None:
        return error
    place, kind = places[group]
    message = f"The {kind} in '{place}' cannot be given to this model. Its engine says: {words.strip()}"
    return EngineRefused(message, status=error.status, param=place)


def holds_part(body: bytes, kinds: frozenset[str]) -> bool:
    """Whether a request holds a part of one of these types, in a turn or in the result of a tool."""
    if not any(b'"%b"' % kind.encode() in body for kind in kinds):  # the usual case, found out without reading it
        return False
    return any(isinstance(part.type, str) and part.type in kinds for _place, part in _list_parts(body))


def _list_mentioned(words: str) -> list[str]:
    found = [match.lastgroup for match in _MENTIONS.finditer(words) if match.lastgroup is not None]
    return [*dict.fromkeys(found), "document"]


def _find_kind(part: _Part) -> str | None:
    is_text = isinstance(part.source, _Source) and part.source.type in _AS_TEXT
    return _KINDS.get(part.type) if isinstance(part.type, str) and not is_text else None


def _list_parts(body: bytes) -> Iterator[tuple[str, _Part]]:
    if is_crowded(body):
        return
    try:
        asked = _content_decoder.decode(body)
    except UNREADABLE:
        return
    for name, turns in (("messages", asked.messages), ("input", asked.input)):
        for number, turn in enumerate(turns if isinstance(turns, list) else []):
            for field, parts in (("content", turn.content), ("output", turn.output)):
                yield from _list_below(parts, f"{name}[{number}].{field}")


def _list_below(parts: list[_Part] | str | None, place: str, *, levels: int = 3) -> Iterator[tuple[str, _Part]]:
    for number, part in enumerate(parts if isinstance(parts, list) else []):
        here = f"{place}[{number}]"
        yield here, part
        if levels > 1:  # results of tools and what documents hold; clients choose the depth
            yield from _list_below(part.content, f"{here}.content", levels=levels - 1)


FORM_TYPE = b"multipart/form-data"
_READ_FIELDS = frozenset({b"model", b"stream"})
_TRUE = frozenset({"true", "1", "on", "yes"})
_FALSE = frozenset({"false", "0", "off", "no", ""})


class FormBody(msgspec.Struct):
    """The fields policy looks at, and the names of all parts that are files."""

    model: str
    stream: bool
    files: frozenset[bytes]


def read_form(body: bytes, content_type: str) -> FormBody:
    """Parse a multipart form. Raises BadRequest naming the field at fault."""
    boundary = _read_boundary(content_type)
    collector = _Collector()
    _run_parser(body, boundary, collector)
    if b"model" not in collector.fields:
        raise BadRequest("The field 'model' is required.", param="model")
    return FormBody(
        model=collector.fields[b"model"],
        stream=_read_flag(collector.fields.get(b"stream", "")),
        files=frozenset(collector.files),
    )


def replace_form_model(body: bytes, content_type: str, model: str) -> bytes:
    boundary = _read_boundary(content_type)
    collector = _Collector()
    _run_parser(body, boundary, collector)
    start, end = collector.model_span
    return body[:start] + model.encode() + body[end:]


def _read_boundary(content_type: str) -> bytes:
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary", b"")
    if kind != FORM_TYPE or not 0 < len(boundary) <= limits().gateway.form_boundary_bytes:
        raise BadRequest("Send this as multipart/form-data, with its boundary in the content-type header.")
    return boundary


def _run_parser(body: bytes, boundary: bytes, collector: _Collector) -> None:
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": collector.begin_part,
            "on_header_field": collector.take_header_name,
            "on_header_value": collector.take_header_value,
            "on_header_end": collector.end_header,
            "on_headers_finished": collector.end_headers,
            "on_part_data": collector.take_data,
            "on_part_end": collector.end_part,
        },
    )
    mark = b"\r\n--" + boundary
    marks = padded = 0
    try:
        for start in range(0, len(body), limits().gateway.form_piece_bytes):
            end = start + limits().gateway.form_piece_bytes
            # The parser is quick between boundaries and slow at each thing that begins like one.
            marks += body.count(mark, max(0, start - len(mark) + 1), end)
            if marks > limits().gateway.form_parts:
                raise BadRequest(f"The form has too many parts; at most {limits().gateway.form_parts} are accepted.")
            collector.offset = start
            parser.write(body[start:end])
            # Blanks behind a boundary are walked one by one: no form needs more than a piece of them.
            padded = padded + 1 if parser.state is MultipartState.BOUNDARY_PADDING else 0
            if padded > 1:
                raise BadRequest("The form cannot be read: a boundary is followed by too many blanks.")
    except FormParserError:
        raise BadRequest("The form cannot be read: it does not keep to multipart/form-data.") from None
    if parser.state is not MultipartState.END:
        raise BadRequest("The form cannot be read: it ends before its last boundary.")


def _read_flag(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise BadRequest("The field 'stream' must be true or false.", param="stream")


class _Collector:
    """What the parser calls. One part at a time; of a part that is not read only its name is kept."""

    def __init__(self) -> None:
        self.fields: dict[bytes, str] = {}
        self.files: set[bytes] = set()
        self._header = b""
        self._value = b""
        self._disposition = b""
        self._name: bytes | None = None
        self._data = b""
        self.offset = 0
        """Where in the whole body the piece begins that is being parsed."""
        self.model_span = (0, 0)
        """Where in the whole body the value of ``model`` stands."""

    def begin_part(self) -> None:
        self._disposition, self._name, self._data = b"", None, b""

    def take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            if self._disposition:
                raise BadRequest("The form cannot be read: a part has two Content-Disposition headers.")
            self._disposition = self._value
        self._header = self._value = b""

    def end_headers(self) -> None:
        kind, options = parse_options_header(self._disposition.decode("latin-1"))
        name = options.get(b"name")
        if kind != b"form-data" or name is None:
            raise BadRequest("The form cannot be read: each part needs a Content-Disposition of form-data with a name.")
        is_file = b"filename" in options
        if is_file:
            self.files.add(name)
        if name not in _READ_FIELDS:
            return
        text = name.decode()
        if is_file:
            raise BadRequest(f"The field '{text}' must be text, not a file.", param=text)
        if name in self.fields:
            raise BadRequest(f"The field '{text}' is given twice.", param=text)
        self.fields[name] = ""
        self._name = name

    def take_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            return
        self._data += data[start:end]
        if self._name == b"model":
            first = self.model_span[0] or self.offset + start
            self.model_span = (first, first + len(self._data))
        if len(self._data) > limits().gateway.form_field_bytes:
            text = self._name.decode()
            raise BadRequest(f"The field '{text}' is too long.", param=text)

    def end_part(self) -> None:
        if self._name is None:
            return
        try:
            self.fields[self._name] = self._data.decode()
        except UnicodeDecodeError:
            text = self._name.decode()
            raise BadRequest(f"The field '{text}' is not UTF-8.", param=text) from None


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
        return _find_largest(
            (self.max_tokens, "max_tokens"),
            (self.max_completion_tokens, "max_completion_tokens"),
            (self.max_output_tokens, "max_output_tokens"),
        )


def _find_largest(*asked: tuple[int | None, str]) -> tuple[int | None, str]:
    limit, field = asked[0]
    for other, name in asked[1:]:
        if other is not None and (limit is None or other > limit):
            limit, field = other, name
    return limit, field


_request_decoder = msgspec.json.Decoder(RequestBody, dec_hook=read_whole_number)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_options_decoder = msgspec.json.Decoder(PoolOptions, dec_hook=read_whole_number)
_encoder = msgspec.json.Encoder()
_BLANKS = b" \t\n\r"
_LIST = re.compile(rb"[ \t\n\r]*\[[ \t\n\r]*(\]?)")
# What may stand around a key or a value. It matches everywhere, if need be nothing.
_GAP = re.compile(rb"[ \t\n\r]*[{},:]?[ \t\n\r]*")


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
        return _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        reason, param = join_fault(error)
        raise BadRequest(f"Invalid request body: {reason}.", param=param) from None
    except UNREADABLE as error:
        raise _say_malformed(error) from None


def _within(name: str) -> msgspec.Meta:
    lowest, highest = BOUNDS["/v1/chat/completions"][name]
    return msgspec.Meta(ge=lowest, le=highest)


class _PlainTurn(msgspec.Struct):
    role: str
    content: str


class UsualChat(msgspec.Struct, forbid_unknown_fields=True):
    """A chat request of plain texts and plain numbers. Of a field without a type nothing is looked at."""

    model: str
    messages: Annotated[list[_PlainTurn], msgspec.Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, _within("max_tokens")] | None = None
    max_completion_tokens: Annotated[int, _within("max_completion_tokens")] | None = None
    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    n: Annotated[float, _within("n")] | None = None
    top_logprobs: Annotated[float, _within("top_logprobs")] | None = None
    logprobs: msgspec.Raw | None = None
    seed: msgspec.Raw | None = None
    stop: msgspec.Raw | None = None
    top_k: msgspec.Raw | None = None
    user: msgspec.Raw | None = None

    @property
    def token_limit(self) -> tuple[int | None, str]:
        return _find_largest((self.max_tokens, "max_tokens"), (self.max_completion_tokens, "max_completion_tokens"))


_usual_decoder = msgspec.json.Decoder(UsualChat)
_BLANK_COLON = re.compile(rb'"[ \t\r\n]+:')


def read_usual_chat(body: bytes) -> UsualChat | None:
    """Read a chat request in one pass; None: it is unusual, or wrong, which ``read_body`` and those behind it say.

    What is taken here is taken there. A key that is given twice shows in how many there are: a quote and
    a colon end each. Raises BadRequest for bytes that are not UTF-8.
    """
    if is_crowded(body) or find_crowd(body) is not None or _BLANK_COLON.search(body) is not None:
        return None
    if not body.isascii():
        _check_encoding(body)
    try:
        usual = _usual_decoder.decode(body)
    except UNREADABLE:
        return None
    given = msgspec.structs.astuple(usual)
    keys = len(given) - given.count(None) + 2 * len(usual.messages)
    if usual.stream_options is not None and usual.stream_options.include_usage is not None:
        keys += 1
    return usual if body.count(b'":') == keys else None


def _say_malformed(error: Exception) -> BadRequest:
    return BadRequest(f"The request body is not valid JSON: {error}.")


def _check_encoding(body: bytes) -> None:
    # RFC 8259, section 8.1. Fields that are only passed on are not decoded anywhere else.
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
    # Whatever lies between the keys and values that were decoded must be punctuation alone.
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
    fields = _fields_decoder.decode(body)
    if drop:
        fields.pop(drop, None)
    if model:
        fields["model"] = msgspec.Raw(_encoder.encode(model))
    return _encoder.encode(fields)


def require_list(raw: msgspec.Raw, name: str) -> None:
    if not raw:
        raise BadRequest(f"The field '{name}' is required.", param=name)
    opening = _LIST.match(memoryview(raw))
    if opening is None:
        raise BadRequest(f"The field '{name}' must be a list.", param=name)
    if opening[1]:
        raise BadRequest(f"The field '{name}' must not be empty.", param=name)


class _PartSource(msgspec.Struct):
    type: str = ""
    data: msgspec.Raw = msgspec.Raw()
    content: str | list[_TextPart] | None = None


class _TextPart(msgspec.Struct):
    """A part of a message. Messages nests: tool results hold parts or a text, documents say where theirs is."""

    text: str | None = None
    thinking: str | None = None
    content: str | list[_TextPart] | None = None
    input: msgspec.Raw = msgspec.Raw()
    source: _PartSource | None = None


class _Message(msgspec.Struct):
    content: str | list[_TextPart] | None = None
    tool_calls: msgspec.Raw = msgspec.Raw()


_messages_decoder = msgspec.json.Decoder(list[_Message])


def count_prompt_chars(messages: msgspec.Raw, *others: msgspec.Raw) -> int:
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


def _count_content(content: str | list[_TextPart] | None) -> int:
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
    # No recursion: clients choose the depth.
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
