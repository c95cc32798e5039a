"""Bridge v1 as it stands on the wire: golden frames, and what is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import bridge
from wire.bridge import ProtocolError, decode_server_message, decode_worker_message, encode_message

GOLDEN: list[tuple[bridge.Message, str]] = [
    (
        bridge.RegisterAck(worker_id="worker-1", models=["m"], warnings=["w"], protocol_version=bridge.BRIDGE_V1),
        '{"type":"register_ack","worker_id":"worker-1","models":["m"],"warnings":["w"],"protocol_version":"2026-04-bridge-v1"}',
    ),
    (bridge.RegisterAck(worker_id="w", models=[]), '{"type":"register_ack","worker_id":"w","models":[]}'),
    (
        bridge.Request(
            request_id="request-1",
            model="m",
            endpoint_path="/v1/chat/completions",
            is_streaming=False,
            body='{"a":1}',
            headers={"content-type": "application/json"},
        ),
        (
            '{"type":"request","request_id":"request-1","model":"m","endpoint_path":"/v1/chat/completions",'
            '"is_streaming":false,"body":"{\\"a\\":1}","headers":{"content-type":"application/json"}}'
        ),
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
]
"""Server to worker, byte for byte; optional fields that say nothing are left out."""

WORKER_FRAMES: list[tuple[str, bridge.WorkerMessage]] = [
    (
        (
            '{"type":"register","worker_name":"worker","models":["default"],"max_concurrent":1,'
            '"protocol_version":"2026-04-bridge-v1","current_load":0}'
        ),
        bridge.Register(models=["default"], protocol_version=bridge.BRIDGE_V1),
    ),
    ('{"type":"register"}', bridge.Register()),
    (
        '{"type":"response_chunk","request_id":"request-1","chunk":"data: {}\\n\\n"}',
        bridge.ResponseChunk(request_id="request-1", chunk="data: {}\n\n"),
    ),
    (
        (
            '{"type":"response_complete","request_id":"request-1","status_code":200,"headers":{"content-type":"x"},'
            '"body":"b","token_counts":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}'
        ),
        bridge.ResponseComplete(
            request_id="request-1",
            status_code=200,
            headers={"content-type": "x"},
            body="b",
            token_counts=bridge.TokenCounts(prompt_tokens=1, completion_tokens=2, total_tokens=3),
        ),
    ),
    (
        '{"type":"response_complete","request_id":"r","status_code":500}',
        bridge.ResponseComplete(request_id="r", status_code=500),
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
]


@pytest.mark.parametrize(("message", "frame"), GOLDEN, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_server_message_has_its_golden_frame(message: bridge.Message, frame: str) -> None:
    assert encode_message(message) == frame
    assert decode_server_message(frame) == message


@pytest.mark.parametrize(("frame", "message"), WORKER_FRAMES, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_worker_frame_is_understood_as_text_and_as_bytes(frame: str, message: bridge.WorkerMessage) -> None:
    assert decode_worker_message(frame) == message
    assert decode_worker_message(frame.encode()) == message


@pytest.mark.parametrize("frame", [frame for frame, _ in WORKER_FRAMES])
def test_extra_fields_and_another_order_of_a_worker_are_tolerated(frame: str) -> None:
    fields = json.loads(frame)
    shuffled = json.dumps({"extra": [1, {"deep": None}], **dict(reversed(fields.items()))})
    assert decode_worker_message(shuffled) == decode_worker_message(frame)


def test_what_muster_adds_to_the_acknowledgement_is_left_out_for_a_bridge_worker() -> None:
    plain = encode_message(bridge.RegisterAck(worker_id="w", models=["m"], protocol_version=bridge.BRIDGE_V1))
    assert list(json.loads(plain)) == ["type", "worker_id", "models", "protocol_version"]
    ack = bridge.RegisterAck(worker_id="w", models=[], node_id="n", heartbeat_interval_s=5.0, window_bytes=1, accepting=False)
    assert list(json.loads(encode_message(ack))) == [
        "type",
        "worker_id",
        "models",
        "node_id",
        "heartbeat_interval_s",
        "window_bytes",
        "accepting",
    ]


@pytest.mark.parametrize(
    "frame",
    [
        "",
        " ",
        "null",
        "[]",
        "{}",
        "7",
        '"register"',
        '{"type":5}',
        '{"type":"unknown"}',
        '{"type":"ping"}',  # a server's message from a worker
        '{"type":"register","models":"m"}',
        '{"type":"register","models":[1]}',
        '{"type":"register","max_concurrent":"1"}',
        '{"type":"response_chunk","request_id":"r"}',
        '{"type":"response_complete","request_id":"r","status_code":"200"}',
        '{"type":"mode_change","mode":"maybe"}',
        '{"type":"pong","current_load":1.5}',
        '{"type":"pong","current_load":1e999}',
        '{"type":"pong","current_load":NaN}',
        '{"type":"response_chunk","request_id":"r","chunk":"\\ud800"}',
        '{"type":"pong"',
        '{"type":"pong"} x',
        '{"type":"pong","x":' + "[" * 200_000,
        '{"type":"pong","x":' + "[" * 5_000 + "]" * 5_000 + "}",
    ],
    ids=lambda frame: frame[:40],
)
def test_a_frame_outside_the_protocol_is_a_protocol_error(frame: str) -> None:
    with pytest.raises(ProtocolError):
        decode_worker_message(frame)


def test_bytes_that_are_not_utf8_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        decode_worker_message(b'{"type":"response_chunk","request_id":"a","chunk":"\xff"}')


@given(st.one_of(st.text(), st.binary(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_no_frame_raises_anything_but_a_protocol_error(frame: str | bytes) -> None:
    for decode in (decode_worker_message, decode_server_message):
        try:
            decode(frame)
        except ProtocolError:
            pass


def test_an_error_does_not_repeat_what_the_frame_said() -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_worker_message('{"type":"pong","current_load":"my secret prompt"}')
    assert "secret" not in str(caught.value)
