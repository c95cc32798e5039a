"""Frames of muster-v1 and messages of the bridge: what is sent comes back, anything else is a protocol error."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.examples import examples
from wire import bridge, frames
from wire.bridge import ProtocolError, TokenCounts, decode_server_message, decode_worker_message, encode_message
from wire.limits import WIRE

U8, U32, U64 = st.integers(0, 255), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
TEXTS = st.text(max_size=20)
HEADERS = st.dictionaries(TEXTS, TEXTS, max_size=4)
COUNTS = st.builds(TokenCounts, prompt_tokens=st.integers(0, 9), completion_tokens=st.integers(0, 9))
HEADS = st.builds(frames.Head, status=st.integers(0, 999), headers=HEADERS)
ENDS = st.builds(
    frames.End, error=TEXTS, message=TEXTS, retryable=st.booleans(), usage=st.none() | COUNTS, queue_wait_ms=st.none() | U32,
    engine_ms=st.none() | U32,
)  # fmt: skip
METAS = st.builds(
    frames.OpenMeta, request_id=TEXTS, model=TEXTS, path=TEXTS, headers=HEADERS, is_streaming=st.booleans(), deadline_ms=U32,
    tenant=TEXTS,
)  # fmt: skip


@examples(25)
@given(kind=U8, flags=U8, stream=U64, attempt=U32, payload=st.binary(max_size=200))
def test_a_frame_reads_back(kind: int, flags: int, stream: int, attempt: int, payload: bytes) -> None:
    data = frames.encode_frame(kind, stream, attempt, payload, flags)
    assert frames.decode_frame(data) == (kind, flags, stream, attempt, payload)


def test_the_header_has_the_documented_layout() -> None:
    data = frames.encode_frame(frames.DATA, 0x0102030405060708, 9, b"x", frames.FLAG_FIN)
    assert data == bytes([17, 1, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0, 9]) + b"x"
    for length in range(frames.HEADER_BYTES):
        with pytest.raises(ProtocolError, match="shorter"):
            frames.decode_frame(b"\x11" * length)


def join_body(opening: list[bytes]) -> tuple[frames.OpenMeta, bytes, list[frames.Frame]]:
    """Put an opened body together as the box does."""
    decoded = [frames.decode_frame(data) for data in opening]
    meta, body = frames.decode_open(decoded[0].payload)
    return meta, body + b"".join(frame.payload for frame in decoded[1:]), decoded


@examples(25)
@given(meta=METAS, body=st.binary(max_size=300), stream=U64, attempt=U32, cut=st.integers(0, 400))
def test_an_opening_reads_back_and_cut_short_never_with_another_meta(
    meta: frames.OpenMeta, body: bytes, stream: int, attempt: int, cut: int
) -> None:
    opening = frames.encode_open(stream, attempt, meta, body)
    again, whole, decoded = join_body(opening)
    assert (again, whole, len(opening)) == (meta, body, 1)
    assert decoded[0][:4] == (frames.OPEN, frames.FLAG_FIN, stream, attempt)
    try:
        again, rest = frames.decode_open(decoded[0].payload[:cut])
    except ProtocolError:
        return
    assert again == meta
    assert body.startswith(rest)


@pytest.mark.parametrize("size", [0, 1, *(WIRE.frame_payload_bytes * n + d for n in (1, 2) for d in (-1, 0, 1))])
def test_a_body_is_cut_into_frames_and_only_the_last_ends_it(size: int) -> None:
    body = (bytes(i * 31 & 0xFF for i in range(min(size, 4096))) * (size // 4096 + 1))[:size]
    meta = frames.OpenMeta(request_id="r", model="m", path="/p")
    again, whole, decoded = join_body(frames.encode_open(1, 2, meta, body))
    assert (again, whole) == (meta, body)
    assert len(decoded) == max(1, -(-size // WIRE.frame_payload_bytes))
    assert [frame.flags for frame in decoded] == [0] * (len(decoded) - 1) + [frames.FLAG_FIN]
    assert [frame.kind for frame in decoded] == [frames.OPEN] + [frames.BODY] * (len(decoded) - 1)
    assert all(len(frame.payload) <= WIRE.frame_payload_bytes + 4096 for frame in decoded)


@examples(25)
@given(head=HEADS, end=ENDS, body=st.binary(max_size=100), amount=U32, cut=st.integers(0, 400))
def test_heads_ends_credit_and_replies_read_back_and_a_reply_cut_short_is_shorter_or_refused(
    head: frames.Head, end: frames.End, body: bytes, amount: int, cut: int
) -> None:
    assert frames.decode_head(frames.encode_json(head)) == head
    assert frames.decode_end(frames.encode_json(end)) == end
    assert frames.decode_credit(frames.decode_frame(frames.encode_credit(1, 1, amount)).payload) == amount
    kind, _, stream, attempt, payload = frames.decode_frame(frames.encode_reply(3, 4, head, body, end))
    assert (kind, stream, attempt) == (frames.REPLY, 3, 4)
    assert frames.decode_reply(payload) == (head, body, end)
    try:
        _head, rest, _end = frames.decode_reply(payload[: max(0, len(payload) - 1 - cut)])
    except ProtocolError:
        return
    assert body.startswith(rest)
    assert len(rest) < len(body)


DECODERS: list[Callable[[bytes], object]] = [frames.decode_open, frames.decode_head, frames.decode_end, frames.decode_reply]
LYING_LENGTHS = [b"", b"\0", b"\0\0\0", struct.pack(">I", 5) + b"{}", struct.pack(">I", 2**32 - 1) + b"{}"]
GARBAGE = [b"", b"{", b"null", b"[]", b"\xff" * 9, b'{"x":' + b"[" * 100_000, *LYING_LENGTHS]
OTHER_SHAPES = [b"{}", b'{"status":"200"}', b'{"status":200,"headers":{"a":1}}']
BROKEN = [*((decode, payload) for decode in DECODERS for payload in GARBAGE), *((frames.decode_head, p) for p in OTHER_SHAPES)]


@pytest.mark.parametrize(("decode", "payload"), [*BROKEN, *((frames.decode_credit, bytes(size)) for size in (0, 3, 5))])
def test_a_broken_payload_is_a_protocol_error(decode: Callable[[bytes], object], payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


@examples(25)
@given(
    payload=st.binary(max_size=60),
    frame=st.one_of(st.text(), st.binary(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)),
)
def test_nothing_raises_anything_but_a_protocol_error(payload: bytes, frame: str | bytes) -> None:
    for decode in [*DECODERS, frames.decode_credit, frames.decode_frame]:
        with contextlib.suppress(ProtocolError):
            decode(payload)
    for read in (decode_worker_message, decode_server_message):
        with contextlib.suppress(ProtocolError):
            read(frame)


REQUEST = bridge.Request(
    request_id="request-1", model="m", endpoint_path="/v1/chat/completions", is_streaming=False, body='{"a":1}',
    headers={"content-type": "application/json"},
)  # fmt: skip
GOLDEN: list[tuple[bridge.Message, str]] = [
    (
        bridge.RegisterAck(worker_id="worker-1", models=["m"], warnings=["w"], protocol_version=bridge.BRIDGE_V1),
        '{"type":"register_ack","worker_id":"worker-1","models":["m"],"warnings":["w"],"protocol_version":"2026-04-bridge-v1"}',
    ),
    (bridge.RegisterAck(worker_id="w", models=[]), '{"type":"register_ack","worker_id":"w","models":[]}'),
    (
        REQUEST,
        ('{"type":"request","request_id":"request-1","model":"m","endpoint_path":"/v1/chat/completions",'
        '"is_streaming":false,"body":"{\\"a\\":1}","headers":{"content-type":"application/json"}}'),
    ),
    (
        bridge.Request(request_id="r", model="m", endpoint_path="/x", is_streaming=True, body=""),
        '{"type":"request","request_id":"r","model":"m","endpoint_path":"/x","is_streaming":true,"body":""}',
    ),
    (
        bridge.Cancel(request_id="request-1", reason=bridge.CANCEL_CLIENT_DISCONNECT),
        '{"type":"cancel","request_id":"request-1","reason":"client_disconnect"}',
    ),
    (bridge.Cancel(request_id="r", reason={"other": "t"}), '{"type":"cancel","request_id":"r","reason":{"other":"t"}}'),
    (bridge.Ping(timestamp_unix_ms=1775000000000), '{"type":"ping","timestamp_unix_ms":1775000000000}'),
    (bridge.Ping(), '{"type":"ping"}'),
    (
        bridge.GracefulShutdown(reason="why", drain_timeout_secs=30),
        '{"type":"graceful_shutdown","reason":"why","drain_timeout_secs":30}',
    ),
    (bridge.GracefulShutdown(), '{"type":"graceful_shutdown"}'),
    (bridge.ModelsRefresh(reason="why"), '{"type":"models_refresh","reason":"why"}'),
    (bridge.ModelsRefresh(), '{"type":"models_refresh"}'),
]  # fmt: skip
"""Server to worker, byte for byte; optional fields that say nothing are left out."""

COMPLETE = bridge.ResponseComplete(
    request_id="request-1", status_code=200, headers={"content-type": "x"}, body="b",
    token_counts=TokenCounts(prompt_tokens=1, completion_tokens=2, total_tokens=3),
)  # fmt: skip
WORKER_FRAMES: list[tuple[str, bridge.WorkerMessage]] = [
    (
        ('{"type":"register","worker_name":"worker","models":["default"],"max_concurrent":1,'
        '"protocol_version":"2026-04-bridge-v1","current_load":0}'),
        bridge.Register(models=["default"], protocol_version=bridge.BRIDGE_V1),
    ),
    ('{"type":"register"}', bridge.Register()),
    (
        '{"type":"response_chunk","request_id":"request-1","chunk":"data: {}\\n\\n"}',
        bridge.ResponseChunk(request_id="request-1", chunk="data: {}\n\n"),
    ),
    (
        ('{"type":"response_complete","request_id":"request-1","status_code":200,"headers":{"content-type":"x"},'
        '"body":"b","token_counts":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}'),
        COMPLETE,
    ),
    (
        '{"type":"pong","current_load":2,"timestamp_unix_ms":1775000000000}',
        bridge.Pong(current_load=2, timestamp_unix_ms=1775000000000),
    ),
    ('{"type":"models_update","models":["m2"],"current_load":1}', bridge.ModelsUpdate(models=["m2"], current_load=1)),
    (
        '{"type":"error","request_id":"request-1","code":"c","message":"m"}',
        bridge.WorkerError(request_id="request-1", code="c", message="m"),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("message", "frame"), GOLDEN, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_server_message_has_its_golden_frame(message: bridge.Message, frame: str) -> None:
    assert encode_message(message) == frame
    assert decode_server_message(frame) == message


@pytest.mark.parametrize(("frame", "message"), WORKER_FRAMES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_worker_frame_is_understood_as_text_as_bytes_and_in_another_order(frame: str, message: bridge.WorkerMessage) -> None:
    shuffled = json.dumps({"extra": [1, {"deep": None}], **dict(reversed(json.loads(frame).items()))})
    for said in (frame, frame.encode(), shuffled):
        assert decode_worker_message(said) == message


def test_what_muster_adds_to_the_acknowledgement_is_left_out_for_a_bridge_worker() -> None:
    plain = encode_message(bridge.RegisterAck(worker_id="w", models=["m"], protocol_version=bridge.BRIDGE_V1))
    assert list(json.loads(plain)) == ["type", "worker_id", "models", "protocol_version"]
    ack = bridge.RegisterAck(worker_id="w", models=[], node_id="n", heartbeat_interval_s=5.0, window_bytes=1, accepting=False)
    added = ["node_id", "heartbeat_interval_s", "window_bytes", "accepting"]
    assert list(json.loads(encode_message(ack))) == ["type", "worker_id", "models", *added]


@pytest.mark.parametrize(
    "frame",
    [
        "", " ", "null", "[]", "{}", "7", '"register"', '{"type":5}', '{"type":"unknown"}',
        '{"type":"ping"}',  # a server's message from a worker
        '{"type":"register","models":"m"}', '{"type":"register","models":[1]}', '{"type":"register","max_concurrent":"1"}',
        '{"type":"response_chunk","request_id":"r"}', '{"type":"response_complete","request_id":"r","status_code":"200"}',
        '{"type":"mode_change","mode":"maybe"}', '{"type":"pong","current_load":1.5}', '{"type":"pong","current_load":1e999}',
        '{"type":"pong","current_load":NaN}', '{"type":"response_chunk","request_id":"r","chunk":"\\ud800"}', '{"type":"pong"',
        '{"type":"pong"} x', '{"type":"pong","x":' + "[" * 200_000, '{"type":"pong","x":' + "[" * 5_000 + "]" * 5_000 + "}",
        b'{"type":"response_chunk","request_id":"a","chunk":"\xff"}', '{"type":"pong","current_load":"my secret prompt"}',
    ],
    ids=lambda frame: str(frame[:40]),
)  # fmt: skip
def test_a_frame_outside_the_protocol_is_a_protocol_error_that_does_not_repeat_it(frame: str | bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_worker_message(frame)
    assert "secret" not in str(caught.value)
