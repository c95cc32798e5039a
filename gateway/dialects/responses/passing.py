"""Ending a stream of an engine's own that broke on its way: what was passed on untouched tells how it must go on."""

from __future__ import annotations

import re

import msgspec

from gateway.dialects.chat import list_payloads
from gateway.dialects.responses.object import render_error
from gateway.errors import GatewayError
from wire.unreadable import UNREADABLE

_NUMBER = re.compile(rb'"sequence_number"\s*:\s*(\d{1,9})')


class _Created(msgspec.Struct):
    type: str
    response: dict[str, object]


_decoder = msgspec.json.Decoder(_Created)


def fail_passing(error: GatewayError, *, first: bytes, last: bytes) -> bytes:
    """Return ``response.failed`` for a stream that began with the bytes ``first`` and ended with ``last``.

    It keeps the response's id and counts on from the last event. Nothing when the beginning is not ``response.created``.
    """
    response = _find_response(first)
    if response is None:
        return b""
    numbers = _NUMBER.findall(last) or _NUMBER.findall(first)
    fields = response | {"status": "failed", "error": msgspec.Raw(render_error(error))}
    number = int(numbers[-1]) + 1 if numbers else 0
    event = {"type": "response.failed", "sequence_number": number, "response": fields}
    return b"event: response.failed\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _find_response(first: bytes) -> dict[str, object] | None:
    for payload in list_payloads(first):
        try:
            event = _decoder.decode(payload)
        except UNREADABLE:
            return None
        if event.type in {"response.created", "response.in_progress"}:
            return event.response
    return None
