"""Bodies of requests, bounded in size and time, JSON or a form; and of refusals."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.responses import Response

from runner.errors import InvalidRequest, RequestRefused, SlowBody, TooLarge, Unavailable, WrongMediaType, refusal_body
from runner.limits import MIB, limits
from runner.serving.request import BodyFields, explain_fault

Body = TypeVar("Body")


class BodyBudget:
    """Bounds what the bodies of all requests take together."""

    held_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yield what counts bytes of one request, which raises Unavailable when none are left; the context gives them back."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.held_bytes + size > limits().api.held_bytes:
                raise Unavailable("The bodies of other requests fill the memory set aside for them.", retry_after_s=2)
            mine += size
            self.held_bytes += size

        try:
            yield take
        finally:
            self.held_bytes -= mine


async def read_body(request: Request, *, most_bytes: int, take: Callable[[int], None] | None = None) -> bytes:
    """Return the body; ``take`` is told its bytes as they come, and may raise.

    Raises TooLarge, SlowBody, and ClientDisconnect when the client leaves meanwhile.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most_bytes:
        raise _too_large(most_bytes)
    pieces: list[bytes] = []
    size = 0
    stream, silence_s = request.stream(), limits().api.body_silence_s
    while True:
        try:
            async with asyncio.timeout(silence_s):
                piece = await anext(stream, None)
        except TimeoutError:
            raise SlowBody(f"Nothing of the body arrived for {silence_s:.0f} s.") from None
        if piece is None:
            return b"".join(pieces)
        size += len(piece)
        if size > most_bytes:
            raise _too_large(most_bytes)
        if take is not None:
            take(len(piece))
        pieces.append(piece)


def check_media_type(request: Request, *allowed: str) -> str:
    """Return the media type of the body, in small letters. Raises WrongMediaType when it is none of ``allowed``."""
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given not in allowed:
        raise WrongMediaType(f"Send the body as {' or '.join(allowed)}, with that Content-Type.")
    return given


async def read_object(request: Request) -> dict[str, object]:
    """Return the JSON object of a body, an empty one where there is no body. Raises RequestRefused."""
    body = await read_body(request, most_bytes=limits().api.operation_bytes)
    if not body.strip():
        return {}
    check_media_type(request, "application/json")
    return parse_object(body)


def parse_object(body: bytes) -> dict[str, object]:
    """Parse a JSON object as RFC 8259 means it: UTF-8, no NaN, no name twice in an object. Raises InvalidRequest."""
    try:
        # msgspec refuses what Python's own reader lets through (NaN, lone surrogates); that one sees names that come twice.
        msgspec.json.decode(body)
        found = json.loads(body, object_pairs_hook=_unique)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {_brief(error)}.") from None
    if not isinstance(found, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return found


def decode(fields: dict[str, object], kind: type[Body]) -> Body:
    """Return the fields as ``kind``. Raises InvalidRequest whose ``param`` is the path of the field at fault."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise explain_fault(error) from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has the same name twice")
    return members


def _brief(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    # Its own text would repeat the body.
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _too_large(most_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {most_bytes // MIB} MiB, the most that this endpoint reads.")


_OURS = frozenset({b"model", b"stream", b"allow_remote"})
_FLAGS = {"true": True, "1": True, "false": False, "0": False, "": False}


class _Reader:
    """Callbacks of the parser: keeps the small fields and lets everything else pass."""

    def __init__(self) -> None:
        self.fields: dict[bytes, bytearray] = {}
        self._parts = 0
        self._header = bytearray()
        self._value = bytearray()
        self._name: bytes | None = None

    def on_part_begin(self) -> None:
        self._parts += 1
        if self._parts > limits().api.form_parts:
            raise InvalidRequest(f"The multipart body has more than {limits().api.form_parts} parts.")
        self._name = None

    def on_header_begin(self) -> None:
        self._header, self._value = bytearray(), bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if bytes(self._header).lower() != b"content-disposition":
            return
        _, options = parse_options_header(bytes(self._value))
        name = options.get(b"name")
        if name not in _OURS or b"filename" in options:
            return
        if name in self.fields:
            text = name.decode()
            raise InvalidRequest(f"The field {text!r} comes twice.", param=text)
        self._name = name
        self.fields[name] = bytearray()

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            return
        value = self.fields[self._name]
        value += data[start:end]
        if len(value) > limits().api.form_value_bytes:
            text = self._name.decode()
            raise InvalidRequest(f"The field {text!r} is too long.", param=text)


def read_form_fields(content_type: str, body: bytes) -> BodyFields:
    """Return what serving reads of a form. Raises InvalidRequest naming the field at fault."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise InvalidRequest("The Content-Type names no boundary, so the multipart body cannot be read.")
    reader = _Reader()
    callbacks = {
        name: getattr(reader, name)
        for name in ("on_part_begin", "on_header_begin", "on_header_field", "on_header_value", "on_header_end", "on_part_data")
    }
    try:
        parser = MultipartParser(boundary, callbacks)  # type: ignore[arg-type]  # its callbacks are a TypedDict
        parser.write(body)
        parser.finalize()
    except FormParserError:
        raise InvalidRequest("The multipart body cannot be read.") from None
    try:
        fields = {name.decode(): value.decode().strip() for name, value in reader.fields.items()}
    except UnicodeDecodeError:
        raise InvalidRequest("A field of the multipart body is not UTF-8.") from None
    if not 1 <= len(fields.get("model", "")) <= limits().models.id_chars:
        raise InvalidRequest(
            f"The field 'model' must be there, with 1 to {limits().models.id_chars} characters.", param="model"
        )
    return BodyFields(fields["model"], stream=_flag(fields, "stream"), allow_remote=_flag(fields, "allow_remote"))


def _flag(fields: dict[str, str], name: str) -> bool:
    try:
        return _FLAGS[fields.get(name, "").lower()]
    except KeyError:
        raise InvalidRequest(f"The field {name!r} must be true or false.", param=name) from None


def render(refusal: RequestRefused, *, path: str, model: str | None = None, headers: dict[str, str] | None = None) -> Response:
    """Return the answer to a request for ``path`` that is refused."""
    sent = {"content-type": "application/json", "cache-control": "no-store"} | (headers or {})
    if refusal.retry_after_s is not None:
        sent["retry-after"] = str(max(1, math.ceil(refusal.retry_after_s)))
    if refusal.status == 401:
        sent["www-authenticate"] = "Bearer"
    return Response(refusal_body(refusal, endpoint=path, model=model), refusal.status, sent)


def answer_json(body: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(body), status, {"content-type": "application/json", "cache-control": "no-store"})
