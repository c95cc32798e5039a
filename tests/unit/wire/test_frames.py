"""Frames of muster-v1 and messages of the bridge: what is sent comes back, anything else is a protocol error."""

from __future__ import annotations

import contextlib
import json
import struct
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.surface import SURFACES
from gateway.errors import BadRequest
from runner.errors import InvalidRequest
from runner.serving.request import check_bounds, check_crowd
from tests.fakes.examples import examples
from wire import bridge, frames
from wire.bounds import BOUNDS, find_out_of_bounds
from wire.bridge import ProtocolError, TokenCounts, decode_server_message, decode_worker_message, encode_message
from wire.limits import WIRE
from wire.messages_fields import HONOURED, find_unhonoured

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
        '{"type":"pong"} x', '{"type":"pong","x":' + "[" * 200_000, '{"type":"pong","x":' + "[" * 200_000 + "]" * 200_000 + "}",
        b'{"type":"response_chunk","request_id":"a","chunk":"\xff"}', '{"type":"pong","current_load":"my secret prompt"}',
    ],
    ids=lambda frame: str(frame[:40]),
)  # fmt: skip
def test_a_frame_outside_the_protocol_is_a_protocol_error_that_does_not_repeat_it(frame: str | bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        decode_worker_message(frame)
    assert "secret" not in str(caught.value)


CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]}, COMPLETIONS: {"prompt": "hi"}, RESPONSES: {"input": "hi"},
    MESSAGES: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}  # fmt: skip
REFUSED = [
    (CHAT, "temperature", 9, "between 0 and 2; it is 9"), (CHAT, "temperature", -0.1, "between 0 and 2; it is -0.1"),
    (CHAT, "max_tokens", 0, "at least 1; it is 0"), (CHAT, "max_completion_tokens", 0, "at least 1; it is 0"),
    (CHAT, "top_p", 1.5, "between 0 and 1; it is 1.5"), (CHAT, "presence_penalty", -3, "between -2 and 2; it is -3"),
    (CHAT, "n", 0, "between 1 and 128; it is 0"), (COMPLETIONS, "temperature", 2.5, "between 0 and 2; it is 2.5"),
    (COMPLETIONS, "max_tokens", -1, "at least 0; it is -1"), (RESPONSES, "temperature", 9, "between 0 and 2; it is 9"),
    (RESPONSES, "max_output_tokens", 0, "at least 1; it is 0"), (MESSAGES, "temperature", 1.5, "between 0 and 1; it is 1.5"),
    (MESSAGES, "max_tokens", 0, "at least 1; it is 0"), (MESSAGES, "top_k", -1, "at least 0; it is -1"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "field", "value", "words"), REFUSED)
def test_gateway_and_node_say_alike_which_field_and_what_it_may_be(path: str, field: str, value: float, words: str) -> None:
    with pytest.raises(BadRequest) as caught:
        SURFACES[path].parse(json.dumps({"model": "m", **ASKED[path], field: value}).encode(), {})
    assert (caught.value.status, caught.value.param) == (400, field)
    assert caught.value.message == f"The field '{field}' must be {words}."
    with pytest.raises(InvalidRequest) as refused:
        check_bounds(path, {"model": "m", field: value})
    assert (refused.value.param, refused.value.message) == (field, caught.value.message)


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, bounds in BOUNDS.items() for name in bounds])
def test_what_stands_on_a_bound_is_served(path: str, name: str) -> None:
    for value in BOUNDS[path][name]:
        if value is not None:
            body = {"model": "m", **ASKED[path], name: value}
            assert find_out_of_bounds(path, body) is None
            SURFACES[path].parse(json.dumps(body).encode(), {})


def test_a_number_beyond_all_measure_is_judged_too_and_what_is_none_is_not() -> None:
    no_numbers: tuple[object, ...] = (None, "9", True, [], {})
    for value in no_numbers:
        assert find_out_of_bounds(CHAT, {"temperature": value}) is None
    start = json.dumps({"model": "m", **ASKED[CHAT]}).encode()[:-1]
    SURFACES[CHAT].parse(start + b',"temperature":1e-400}', {})
    for number in ("1e400", "9" * 400, "9" * 5000, "-1e400"):
        with pytest.raises(BadRequest) as caught:
            SURFACES[CHAT].parse(start + f',"temperature":{number}}}'.encode(), {})
        assert (caught.value.param, len(caught.value.message) < 200) == ("temperature", True)


def members(count: int) -> dict[str, object]:
    return {f"k{number}": 1 for number in range(count)}


def tool(**properties: object) -> dict[str, object]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "description": "d", "parameters": parameters}}


def schema(**members_of_it: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": members_of_it}}


def repeat(count: int) -> str:
    """Return what a grammar and a pattern take for so many letters that may be left out."""
    return "[a-z+]* " * (count - 1) + "[a-z]?"


GOOD_GRAMMAR = "root ::= r0  # what is it? *** a comment +++\n" + "\n".join(
    f'r{number} ::= "{{*+?\\"{{" [*+?{{\\]]+ ws "a"? (ws | r{number + 1})*' for number in range(200)
)
HELLO = {"role": "user", "content": "hi"}
CROWDS: list[tuple[str | None, dict[str, object], dict[str, object], int]] = [
    (None, members(WIRE.body_members - 8), members(WIRE.body_members), WIRE.body_members),
    ("metadata", {"metadata": members(WIRE.body_members)}, {"metadata": {"a": [members(WIRE.body_members + 1)]}},
     WIRE.body_members),
    ("logit_bias", {"logit_bias": members(WIRE.body_biases)}, {"logit_bias": members(WIRE.body_biases + 1)}, WIRE.body_biases),
    ("logit_bias", {"logit_bias": {}}, {"logit_bias": members(2000)}, WIRE.body_biases),
    ("logit_bias", {"logit_bias": [[1, 2]] * WIRE.body_biases}, {"logit_bias": [[1, 2]] * (WIRE.body_biases + 1)},
     WIRE.body_biases),
    ("tools", {"tools": [tool(**members(900))] * 3}, {"tools": [tool(**members(WIRE.body_members + 1))]}, WIRE.body_members),
    ("tools", {"tools": [tool(a={"enum": ["e"] * WIRE.shape_choices})]}, {"tools": [tool(a={"enum": [1] * 1001})]},
     WIRE.shape_choices),
    ("response_format", {"response_format": schema(enum=["e"] * 1000)}, {"response_format": schema(enum=[1] * 1001)}, 1000),
    ("text", {"text": schema(properties=members(200))}, {"text": schema(properties=members(201))}, WIRE.shape_members),
    ("grammar", {"grammar": GOOD_GRAMMAR}, {"grammar": f"{GOOD_GRAMMAR}\nroot ::= {repeat(51)}"}, WIRE.shape_repeats),
    ("grammar", {"grammar": f"root ::= {repeat(50)}"}, {"grammar": "root ::= " + "[a-z]* " * 2000}, WIRE.shape_repeats),
    ("text", {"text": schema(pattern=repeat(50), enum=["*"] * 99)}, {"text": schema(pattern=repeat(51))}, WIRE.shape_repeats),
    ("tools", {"tools": [tool(a={"pattern": repeat(50)})] * 9}, {"tools": [tool(a={"pattern": repeat(51)})]},
     WIRE.shape_repeats),
    ("messages", {"messages": [HELLO] * WIRE.body_turns}, {"messages": [HELLO] * (WIRE.body_turns + 1)}, WIRE.body_turns),
    ("input", {"input": [HELLO] * WIRE.body_turns}, {"input": [HELLO] * (WIRE.body_turns + 1)}, WIRE.body_turns),
    ("dry_sequence_breakers", {"dry_sequence_breakers": ["a"] * 100}, {"dry_sequence_breakers": ["a"] * 101},
     WIRE.body_breakers),
    ("seed", {"seed": 10 ** (WIRE.body_number_chars - 1)}, {"seed": 10**WIRE.body_number_chars}, WIRE.body_number_chars),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES, MESSAGES])
@pytest.mark.parametrize(("field", "good", "bad", "bound"), CROWDS)
def test_a_body_with_too_much_in_one_value_is_refused_and_one_with_as_much_as_allowed_passes(
    path: str, field: str | None, good: dict[str, object], bad: dict[str, object], bound: int
) -> None:
    start = {"model": "m", **ASKED[path]}

    def at_gateway(more: dict[str, object]) -> None:
        SURFACES[path].parse(json.dumps(start | more).encode(), {"content-type": "application/json"})

    def at_node(more: dict[str, object]) -> None:
        check_crowd(json.dumps(start | more).encode())

    at_gateway(good)
    at_node(good)
    with pytest.raises(BadRequest) as refused:
        at_gateway(bad)
    with pytest.raises(InvalidRequest) as refused_by_node:
        at_node(bad)
    assert refused.value.param == refused_by_node.value.param == field
    assert refused.value.message == refused_by_node.value.message
    assert str(bound) in refused.value.message
    assert len(refused.value.message) < 300


@pytest.mark.parametrize(
    "more",
    [pytest.param({"input": list(range(20_000))}, id="token ids"), pytest.param({"input": ["text"] * 20_000},
            id="texts to embed"), pytest.param({"messages": [{"role": "user", "content": 'say "{": 1, ' * 5000 + "9" * 5000}]},
            id="marks in a text"), pytest.param({"messages": [{"role": "user", "content": "so: " * 5000}]},
            id="colons in a text"), pytest.param({"messages": [{"role": "user", "content": [{"type": "text",
            "text": "h"}] * 9000}]}, id="parts"), pytest.param({"messages": [{"role": "user",
            "content": '"pattern": "' + "what?! *** " * 5000}]}, id="signs in a text"),
        pytest.param({"tools": [tool(pattern={"description": '"pattern":"' + "?" * 99})]}, id="signs in a description"),
        pytest.param({"stop": ["s"] * 9000}, id="stop words"), pytest.param({"metadata": [members(900)] * 20},
            id="many objects that are each small enough")],
)  # fmt: skip
def test_much_in_many_values_passes(more: dict[str, object]) -> None:
    check_crowd(json.dumps({"model": "m", **more}).encode())


@pytest.mark.parametrize(
    "body",
    [pytest.param(b'{"a":"' + b'\\"' * 500_000, id="a text that does not end"), pytest.param(b'{"a":' + b'{"":' * 100_000,
            id="objects that do not end"), pytest.param(b'{"a":' + b"[" * 400_000, id="lists that do not end"),
        pytest.param(b'{"a":' + b" " * 1_000_000 + b"}", id="blanks"), pytest.param(b'{"a":[' + b"[        \t" * 400_000,
            id="blanks behind brackets"), pytest.param(b'{"a":' + b"-" * 1_000_000, id="signs")],
)  # fmt: skip
def test_reading_how_much_a_body_holds_takes_time_by_its_size_alone(body: bytes) -> None:
    half = max(min(read_cost(body[: len(body) // 2]) for _ in range(3)), 0.002)
    assert read_cost(body) < 8 * half


@pytest.mark.parametrize("form", ['{"grammar":"%s"}', '{"text":{"pattern":"%s"}}'])
@pytest.mark.parametrize("sign", ["[", '\\"', "*", "#", "\\\\", "?("])
def test_reading_how_often_a_grammar_repeats_takes_time_by_its_size_alone(form: str, sign: str) -> None:
    half = max(min(read_cost((form % (sign * 100_000)).encode()) for _ in range(3)), 0.002)
    assert read_cost((form % (sign * 200_000)).encode()) < 8 * half


def read_cost(body: bytes) -> float:
    """Return the seconds of a core that a node takes to see how much a body holds."""
    began = time.process_time()
    with contextlib.suppress(InvalidRequest):
        check_crowd(body)
    return time.process_time() - began


SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
PLAIN: dict[str, Any] = {
    "model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], "system": "s", "stream": True,
    "temperature": 0.5, "top_p": 1, "top_k": 4, "stop_sequences": ["x"], "tools": [], "metadata": {"user_id": "u"},
    "cache_control": {"type": "ephemeral"}, "allow_remote": True,
}  # fmt: skip


TOOL: dict[str, Any] = {"type": "tool", "name": "f"}
SHAPED = {"output_config": {"format": SCHEMA, "effort": "low"}}
FORGOTTEN: list[tuple[str, dict[str, Any], str]] = [
    ("llamacpp", {"output_config": {"format": SCHEMA}}, "output_config.format"),
    ("llama-server", SHAPED, "output_config.format output_config.effort"),
    ("llamacpp", {"output_format": SCHEMA}, "output_format"), ("llamacpp", {"output_config": {"format": None}}, ""),
    ("llamacpp", {"output_config": {}}, ""), ("llamacpp", {"output_config": None}, ""), ("llamacpp", {"seed": 7}, "seed"),
    ("llamacpp", {"service_tier": "auto"}, "service_tier"),
    ("llamacpp", {"context_management": {"edits": []}}, "context_management"),
    ("llamacpp", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, ""),
    ("llamacpp", {"thinking": {"type": "adaptive"}}, ""), ("llamacpp", {"thinking": {"type": "disabled"}}, "thinking.type"),
    ("llamacpp", {"tool_choice": {"type": "any"}}, ""), ("llamacpp", {"tool_choice": {"type": "none"}}, "tool_choice.type"),
    ("llamacpp", {"tool_choice": TOOL}, "tool_choice.name tool_choice.type"),
    ("llamacpp", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": False}}, ""),
    ("llamacpp", {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice.disable_parallel_tool_use"),
    ("vllm", SHAPED, "output_config.format"), ("vllm", {"tool_choice": TOOL}, ""),
    ("vllm", {"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking.type"), ("somebody-elses", SHAPED, ""),
    *((engine, {}, "") for engine in HONOURED),
]  # fmt: skip


@pytest.mark.parametrize(("engine", "fields", "forgotten"), FORGOTTEN)
def test_what_an_engine_would_forget_is_found_by_its_path(engine: str, fields: dict[str, Any], forgotten: str) -> None:
    assert find_unhonoured([engine], json.dumps({**PLAIN, **fields}).encode()) == tuple(forgotten.split())


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"thinking":5,"tool_choice":"x"}', b'{"output_config":"x"}', b"\xff"])
def test_what_cannot_be_read_is_somebody_elses_to_refuse(body: bytes) -> None:
    assert find_unhonoured(["llamacpp"], body) in ((), ("output_config",))


def test_replicas_of_two_engines_are_asked_for_what_both_honour() -> None:
    body = json.dumps({**PLAIN, "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}).encode()
    assert find_unhonoured(["vllm", "llamacpp"], body) == ("thinking.type", "output_config.effort")
