"""``x_pool_meta``: where and how a request was served, for clients that sent ``x_pool_options`` (central-server design 3.2).

Unaware clients never see it, so all of this may look into the answer: it is not on the path of their bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

from gateway.values import Unmatched
from wire.events import EventCutter
from wire.unreadable import UNREADABLE

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
_ID = re.compile(rb'"id"\s*:\s*("(?:[^"\\]|\\.){1,200}")')
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){0,400}")')
_CREATED = re.compile(rb'"created"\s*:\s*(\d{1,12})')
_CLOSING_TYPE = re.compile(rb'"type"\s*:\s*"(?:response\.(?:completed|incomplete)|message_stop)"')
_CLOSING_TYPES = frozenset({"response.completed", "response.incomplete", "message_stop"})
_DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)


class Resumed(msgspec.Struct, frozen=True):
    """A node that went on with a stream whose node had died."""

    gpu_id: str
    node: str


class PoolMeta(msgspec.Struct, kw_only=True, omit_defaults=False):
    """Names as in the design; times in milliseconds. ``gpu_id``: the printed id of the node.

    ``unmatched`` None = everything that the client named is something here. ``resumed``: the nodes that went on with a stream
    whose node had died, in their order; left out where none did.
    """

    gpu_id: str
    node: str
    model: str
    asked_model: str
    queue_ms: int
    inference_ms: int
    ttfb_ms: int | None
    attempts: int
    unmatched: Unmatched | None = None
    resumed: list[Resumed] | msgspec.UnsetType = msgspec.UNSET


class _Typed(msgspec.Struct):
    type: str = ""


_typed_decoder = msgspec.json.Decoder(_Typed)


def add_meta(body: bytes, meta: PoolMeta) -> bytes:
    """Return a JSON object with ``x_pool_meta`` in it; anything else as it is."""
    try:
        fields = _fields_decoder.decode(body)
    except UNREADABLE:
        return body
    fields["x_pool_meta"] = msgspec.Raw(_encoder.encode(meta))
    return _encoder.encode(fields)


class MetaStream:
    """Passes an event stream on and puts the numbers in front of its closing event. ``measure`` is called once, then.

    Chat and completions get a chunk without choices before ``[DONE]``, Messages an event of its own before
    ``message_stop``, Responses a field in the object of the closing event. A stream that breaks gets nothing.
    """

    def __init__(self, measure: Callable[[], PoolMeta]) -> None:
        self.measure = measure
        self._cutter = EventCutter()
        self._head = b""
        self._is_done = False

    def feed(self, data: bytes) -> bytes:
        """Take bytes for the client; return what may go out now."""
        out = self._cutter.feed(data)
        if not out or self._is_done:
            return out
        if not self._head and b'"id"' in out:
            self._head = out
        at = 0
        while found := _CLOSING_TYPE.search(out, at):
            blank = out.rfind(b"\n\n", at, found.start())
            at = blank + 2 if blank >= 0 else at
            end = out.find(b"\n\n", found.start())
            kind = _read_type(out[at : end if end >= 0 else len(out)])
            if kind in _CLOSING_TYPES:
                return self._insert(out, at, is_message=kind == "message_stop")
            if end < 0:
                break
            at = end + 2
        done = _DONE.search(out)
        return self._insert(out, done.start()) if done is not None else out

    def finish(self) -> bytes:
        return self._cutter.finish()

    def _insert(self, out: bytes, at: int, *, is_message: bool = False) -> bytes:
        self._is_done = True
        meta = _encoder.encode(self.measure())
        before, closing = out[:at], out[at:]
        if _DONE.match(closing):
            return before + self._chunk(meta) + closing
        if is_message:
            return before + b'event: x_pool_meta\ndata: {"type":"x_pool_meta","x_pool_meta":' + meta + b"}\n\n" + closing
        return before + _add_to_response(closing, meta)

    def _chunk(self, meta: bytes) -> bytes:
        found, model, created = _ID.search(self._head), _MODEL.search(self._head), _CREATED.search(self._head)
        return (
            b'data: {"id":%b,"object":"chat.completion.chunk","created":%b,"model":%b,"choices":[],"x_pool_meta":%b}\n\n'
        ) % (
            found.group(1) if found else b'""',
            created.group(1) if created else b"0",
            model.group(1) if model else b'""',
            meta,
        )


def _read_type(event: bytes) -> str:
    # What the event holds may have types of its own, so its own is decoded.
    try:
        return _typed_decoder.decode(event.partition(b"data:")[2]).type
    except UNREADABLE:
        return ""


def _add_to_response(closing: bytes, meta: bytes) -> bytes:
    event, blank, rest = closing.partition(b"\n\n")
    head, mark, data = event.partition(b"data:")
    try:
        fields = _fields_decoder.decode(data)
        response = _fields_decoder.decode(fields["response"])
    except (*UNREADABLE, KeyError):
        return closing
    response["x_pool_meta"] = msgspec.Raw(meta)
    fields["response"] = msgspec.Raw(_encoder.encode(response))
    return head + mark + b" " + _encoder.encode(fields) + blank + rest
