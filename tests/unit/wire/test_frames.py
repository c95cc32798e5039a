"""Binary frames of muster v1."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import frames
from wire.bridge import ProtocolError, TokenCounts
from wire.limits import WIRE

U8, U32, U64 = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TEXTS = st.text(max_size=20)
HEADERS = st.dictionaries(TEXTS, TEXTS, max_size=4)
HEADS = st.builds(frames.Head, status=st.integers(0, 999), headers=HEADERS)
ENDS = st.builds(
    frames.End,
    error=TEXTS,
    message=TEXTS,
    retryable=st.booleans(),
    usage=st.none() | st.builds(TokenCounts, prompt_tokens=st.integers(0, 9), completion_tokens=st.integers(0, 9)),
    queue_wait_ms=st.none() | U32,
    engine_ms=st.none() | U32,
)
METAS = st.builds(
    frames.OpenMeta,
    request_id=TEXTS,
    model=TEXTS,
    path=TEXTS,
    headers=HEADERS,
    is_streaming=st.booleans(),
    deadline_ms=U32,
    tenant=TEXTS,
)


@given(kind=U8, flags=U8, stream=U64, attempt=U32, payload=st.binary(max_size=200))
def test_a_frame_reads_back(kind: int, flags: int, stream: int, attempt: int, payload: bytes) -> None:
    data = frames.encode_frame(kind, stream, attempt, payload, flags)
    assert frames.decode_frame(data) == (kind, flags, stream, attempt, payload)


def test_the_header_has_the_documented_layout() -> None:
    data = frames.encode_frame(frames.DATA, 0x0102030405060708, 9, b"x", frames.FLAG_FIN)
    assert data == bytes([17, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9]) + b"x"
    assert frames.HEADER_BYTES == 14


def join_body(opening: list[bytes]) -> tuple[frames.OpenMeta, bytes, list[frames.Frame]]:
    """Put an opened body together as the box does."""
    decoded = [frames.decode_frame(data) for data in opening]
    meta, body = frames.decode_open(decoded[0].payload)
    return meta, body + b"".join(frame.payload for frame in decoded[1:]), decoded


@given(meta=METAS, body=st.binary(max_size=300), stream=U64, attempt=U32)
def test_an_opening_reads_back(meta: frames.OpenMeta, body: bytes, stream: int, attempt: int) -> None:
    opening = frames.encode_open(stream, attempt, meta, body)
    assert len(opening) == 1
    again, whole, decoded = join_body(opening)
    assert (again, whole) == (meta, body)
    assert decoded[0][:4] == (frames.OPEN, frames.FLAG_FIN, stream, attempt)


@pytest.mark.parametrize("size", [0, 1, *(WIRE.frame_payload_bytes * n + d for n in (1, 2, 3) for d in (-1, 0, 1))])
def test_a_body_is_cut_into_frames_and_only_the_last_ends_it(size: int) -> None:
    body = bytes(i * 31 & 0xFF for i in range(min(size, 4096))) * (size // 4096 + 1)
    body = body[:size]
    meta = frames.OpenMeta(request_id="r", model="m", path="/p")
    again, whole, decoded = join_body(frames.encode_open(1, 2, meta, body))
    assert (again, whole) == (meta, body)
    assert len(decoded) == max(1, -(-size // WIRE.frame_payload_bytes))
    assert [frame.flags for frame in decoded] == [0] * (len(decoded) - 1) + [frames.FLAG_FIN]
    assert [frame.kind for frame in decoded] == [frames.OPEN] + [frames.BODY] * (len(decoded) - 1)
    assert all(len(frame.payload) <= WIRE.frame_payload_bytes + 4096 for frame in decoded)


@given(head=HEADS, end=ENDS, body=st.binary(max_size=100))
def test_heads_ends_and_replies_read_back(head: frames.Head, end: frames.End, body: bytes) -> None:
    assert frames.decode_head(frames.encode_json(head)) == head
    assert frames.decode_end(frames.encode_json(end)) == end
    kind, _, stream, attempt, payload = frames.decode_frame(frames.encode_reply(3, 4, head, body, end))
    assert (kind, stream, attempt) == (frames.REPLY, 3, 4)
    assert frames.decode_reply(payload) == (head, body, end)


@given(U32)
def test_credit_reads_back(amount: int) -> None:
    frame = frames.decode_frame(frames.encode_credit(1, 1, amount))
    assert frame.kind == frames.CREDIT
    assert frames.decode_credit(frame.payload) == amount


DECODERS: list[Callable[[bytes], object]] = [
    frames.decode_open,
    frames.decode_head,
    frames.decode_end,
    frames.decode_reply,
]
LYING_LENGTHS = [b"", b"\0", b"\0\0\0", struct.pack(">I", 5) + b"{}", struct.pack(">I", 2**32 - 1) + b"{}"]
GARBAGE = [b"", b"{", b"null", b"[]", b"\xff" * 9, b'{"x":' + b"[" * 100_000, *LYING_LENGTHS]


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
@pytest.mark.parametrize("payload", GARBAGE, ids=lambda payload: repr(payload[:12]))
def test_a_broken_payload_is_a_protocol_error(decode: Callable[[bytes], object], payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


@given(payload=st.binary(max_size=60))
def test_no_payload_raises_anything_but_a_protocol_error(payload: bytes) -> None:
    for decode in [*DECODERS, frames.decode_credit, frames.decode_frame]:
        try:
            decode(payload)
        except ProtocolError:
            pass


@given(meta=METAS, cut=st.integers(0, 400))
def test_a_truncated_opening_is_refused_or_gives_a_shorter_body_never_another_meta(meta: frames.OpenMeta, cut: int) -> None:
    (opening,) = frames.encode_open(1, 1, meta, b"body")
    payload = frames.decode_frame(opening).payload
    try:
        again, body = frames.decode_open(payload[:cut])
    except ProtocolError:
        return
    assert again == meta
    assert b"body".startswith(body)


@pytest.mark.parametrize("length", range(frames.HEADER_BYTES))
def test_a_frame_shorter_than_its_header_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match="shorter"):
        frames.decode_frame(b"\x11" * length)


@pytest.mark.parametrize("payload", [b"", b"\0\0\0", b"\0\0\0\0\0"])
def test_credit_of_another_size_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="four bytes"):
        frames.decode_credit(payload)


@pytest.mark.parametrize("payload", [b"{}", b'{"status":"200"}', b'{"status":200,"headers":{"a":1}}'])
def test_a_head_of_another_shape_is_refused(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="HEAD"):
        frames.decode_head(payload)


@given(head=HEADS, body=st.binary(max_size=200), end=ENDS)
def test_a_whole_answer_comes_back_as_it_went(head: frames.Head, body: bytes, end: frames.End) -> None:
    frame = frames.decode_frame(frames.encode_reply(7, 2, head, body, end))
    assert (frame.kind, frame.stream, frame.attempt) == (frames.REPLY, 7, 2)
    assert frames.decode_reply(frame.payload) == (head, body, end)


@given(head=HEADS, body=st.binary(max_size=50), end=ENDS, cut=st.integers(0, 400))
def test_a_whole_answer_cut_short_is_a_protocol_error_or_a_shorter_body(
    head: frames.Head, body: bytes, end: frames.End, cut: int
) -> None:
    payload = frames.decode_frame(frames.encode_reply(7, 2, head, body, end)).payload
    kept = payload[: max(0, len(payload) - 1 - cut)]
    try:
        _head, rest, _end = frames.decode_reply(kept)
    except ProtocolError:
        return
    assert body.startswith(rest)
    assert len(rest) < len(body)
