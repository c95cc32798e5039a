"""Binary frames of muster v1: one stream's bytes, its opening, its end and its flow control.

Header, 14 bytes, big endian: kind (u8), flags (u8), stream (u64), attempt (u32). Then the payload:

====== ============ =========================================================================
kind   direction    payload
====== ============ =========================================================================
OPEN   server→node   u32 length of the meta JSON, the meta, then the first part of the body
BODY   server→node   more of the body
CANCEL server→node   reason, UTF-8
CREDIT server→node   u32: the node may send that many more DATA payload bytes
HEAD   node→server   JSON ``Head``: status and headers, exactly once, before any DATA
DATA   node→server   response bytes, passed on as they are; a chunk may split a UTF-8 character
END    node→server   JSON ``End``: how the stream ended, exactly once
REPLY  node→server   a whole answer at once instead of HEAD, DATA and END: u32 length of the HEAD
                    JSON, that JSON, u32 length of the END JSON, that JSON, the body
====== ============ =========================================================================

``FLAG_FIN`` on OPEN or BODY marks the last part of the body. A stream id is chosen by the gateway and is unique
within one session; the attempt number lets both sides drop frames of an attempt that is no longer theirs.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec

from wire.bridge import ProtocolError, TokenCounts
from wire.limits import WIRE
from wire.unreadable import UNREADABLE

OPEN, BODY, CANCEL, CREDIT = 1, 2, 3, 4
HEAD, DATA, END, REPLY = 16, 17, 18, 19
FLAG_FIN = 1

HEADER = struct.Struct(">BBQI")
HEADER_BYTES = HEADER.size
_U32 = struct.Struct(">I")


class OpenMeta(msgspec.Struct, omit_defaults=True, kw_only=True):
    """What the node must know of a request besides its body. ``deadline_ms`` is what remains when it is sent.

    ``priority``: high, normal or low; empty = normal.
    """

    request_id: str
    model: str
    path: str
    headers: dict[str, str] = {}
    is_streaming: bool = False
    deadline_ms: int = 0
    window_bytes: int = WIRE.stream_window_bytes
    tenant: str = ""
    method: str = "POST"
    priority: str = ""


class Head(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Status and headers of the engine's response."""

    status: int
    headers: dict[str, str] = {}


class End(msgspec.Struct, omit_defaults=True, kw_only=True):
    """How a stream ended. ``error`` is empty for a whole response; ``retryable`` says nothing was computed yet."""

    error: str = ""
    message: str = ""
    retryable: bool = False
    usage: TokenCounts | None = None
    queue_wait_ms: int | None = None
    engine_ms: int | None = None


class Frame(NamedTuple):
    """One decoded binary frame. ``payload`` is everything after the header."""

    kind: int
    flags: int
    stream: int
    attempt: int
    payload: bytes


_encoder = msgspec.json.Encoder()
_open_decoder = msgspec.json.Decoder(OpenMeta)
_head_decoder = msgspec.json.Decoder(Head)
_end_decoder = msgspec.json.Decoder(End)


def decode_frame(data: bytes) -> Frame:
    """Split a binary frame. Raises ProtocolError when it is shorter than its header."""
    if len(data) < HEADER_BYTES:
        raise ProtocolError("binary frame shorter than its header")
    kind, flags, stream, attempt = HEADER.unpack_from(data)
    return Frame(kind, flags, stream, attempt, data[HEADER_BYTES:])


def encode_frame(kind: int, stream: int, attempt: int, payload: bytes = b"", flags: int = 0) -> bytes:
    """Return one binary frame."""
    return HEADER.pack(kind, flags, stream, attempt) + payload


def encode_open(stream: int, attempt: int, meta: OpenMeta, body: bytes) -> list[bytes]:
    """Return the frames that open a stream: one for a body up to ``frame_payload_bytes``, more beyond."""
    head = _encoder.encode(meta)
    parts = [body[i : i + WIRE.frame_payload_bytes] for i in range(0, len(body), WIRE.frame_payload_bytes)] or [b""]
    last = len(parts) - 1
    opening = _U32.pack(len(head)) + head + parts[0]
    frames = [encode_frame(OPEN, stream, attempt, opening, FLAG_FIN if last == 0 else 0)]
    for index, part in enumerate(parts[1:], start=1):
        frames.append(encode_frame(BODY, stream, attempt, part, FLAG_FIN if index == last else 0))
    return frames


def decode_open(payload: bytes) -> tuple[OpenMeta, bytes]:
    """Return meta and first body part of an OPEN payload. Raises ProtocolError."""
    if len(payload) < _U32.size:
        raise ProtocolError("OPEN without meta length")
    (length,) = _U32.unpack_from(payload)
    if length > len(payload) - _U32.size:
        raise ProtocolError("OPEN meta longer than the frame")
    try:
        meta = _open_decoder.decode(payload[_U32.size : _U32.size + length])
    except UNREADABLE as error:
        raise ProtocolError(f"OPEN meta: {error}") from None
    return meta, payload[_U32.size + length :]


def encode_json(value: Head | End) -> bytes:
    """Return the JSON payload of a HEAD or END frame."""
    return _encoder.encode(value)


def decode_head(payload: bytes) -> Head:
    """Parse a HEAD payload. Raises ProtocolError."""
    try:
        return _head_decoder.decode(payload)
    except UNREADABLE as error:
        raise ProtocolError(f"HEAD: {error}") from None


def decode_end(payload: bytes) -> End:
    """Parse an END payload. Raises ProtocolError."""
    try:
        return _end_decoder.decode(payload)
    except UNREADABLE as error:
        raise ProtocolError(f"END: {error}") from None


def encode_reply(stream: int, attempt: int, head: Head, body: bytes, end: End) -> bytes:
    """Return the one frame of a whole answer; ``body`` up to ``frame_payload_bytes``."""
    first, last = _encoder.encode(head), _encoder.encode(end)
    return encode_frame(REPLY, stream, attempt, b"".join((_U32.pack(len(first)), first, _U32.pack(len(last)), last, body)))


def decode_reply(payload: bytes) -> tuple[Head, bytes, End]:
    """Return head, body and end of a REPLY payload. Raises ProtocolError."""
    head, body, end = split_reply(payload)
    return decode_head(head), body, decode_end(end)


def split_reply(payload: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the HEAD payload, the body and the END payload of a REPLY payload. Raises ProtocolError."""
    head, rest = _take_block(payload)
    end, body = _take_block(rest)
    return head, body, end


def _take_block(payload: bytes) -> tuple[bytes, bytes]:
    if len(payload) < _U32.size:
        raise ProtocolError("REPLY without a length")
    (length,) = _U32.unpack_from(payload)
    if length > len(payload) - _U32.size:
        raise ProtocolError("REPLY block longer than the frame")
    return payload[_U32.size : _U32.size + length], payload[_U32.size + length :]


def encode_credit(stream: int, attempt: int, amount: int) -> bytes:
    """Return a CREDIT frame for ``amount`` more bytes."""
    return encode_frame(CREDIT, stream, attempt, _U32.pack(amount))


def decode_credit(payload: bytes) -> int:
    """Return the byte count of a CREDIT payload. Raises ProtocolError."""
    if len(payload) != _U32.size:
        raise ProtocolError("CREDIT must carry four bytes")
    return int(_U32.unpack(payload)[0])
