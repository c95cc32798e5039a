"""Reading request bodies: bounded in size and time, JSON without double names, decoded into typed values."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec
from starlette.requests import Request

from runner.api.refusals import SlowBody, TooLarge, WrongMediaType
from runner.errors import InvalidRequest, Unavailable
from runner.limits import MIB, limits

_AT = re.compile(r" - at `\$?\.?([^`]*)`")
_FIELD = re.compile(r"field `([^`]*)`")

Body = TypeVar("Body")


class BodyBudget:
    """Bounds what the bodies of all requests take together."""

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most_bytes = limits().api.held_bytes if most_bytes is None else most_bytes
        self.held_bytes = 0

    @contextmanager
    def hold(self) -> Iterator[Callable[[int], None]]:
        """Yield what counts bytes of one request, which raises Unavailable when none are left; the context gives them back."""
        mine = 0

        def take(size: int) -> None:
            nonlocal mine
            if self.held_bytes + size > self._most_bytes:
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
        text = str(error)
        at, named = _AT.search(text), _FIELD.search(text)
        path = (at[1] if at else "") or (named[1] if named else None)
        raise InvalidRequest(f"Invalid request body: {text}.", param=path) from None


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("an object has the same name twice")
    return members


def _brief(error: Exception) -> str:
    """Return what is wrong without repeating the body."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error)


def _too_large(most_bytes: int) -> TooLarge:
    return TooLarge(f"The request body is larger than {most_bytes // MIB} MiB, the most that this endpoint reads.")
