"""The box's half of muster v1: streams, attempts, credit and what ends a session. No I/O anywhere."""

from __future__ import annotations

import pytest

from core.limits import NodeLimits
from nodes import session as server_side
from runner.errors import StreamClosed
from runner.limits import limits
from runner.session import (
    Accepted,
    Cancelled,
    ClientSession,
    Credited,
    Instructed,
    LeaveAsked,
    ModelsWanted,
    Noticed,
    Opened,
    Pinged,
    Reply,
    Stream,
)
from tests.fakes.limits import set_runner_limits
from wire import bridge, frames
from wire.bridge import MUSTER_V1, ProtocolError

ACK = bridge.RegisterAck(worker_id="w", models=["m"], protocol_version=MUSTER_V1, node_id="node_1")


def accepted_session() -> ClientSession:
    """Return a session past its handshake."""
    session = ClientSession()
    session.register(bridge.Register(models=["m"]))
    assert session.receive_text(bridge.encode_message(ACK)) == [Accepted(ACK)]
    return session


def open_frames(
    number: int = 7, attempt: int = 1, body: bytes = b"{}", window_bytes: int = 10, path: str = "/v1/x"
) -> list[bytes]:
    """Return the frames of a new stream."""
    meta = frames.OpenMeta(request_id="r", model="m", path=path, window_bytes=window_bytes)
    return frames.encode_open(number, attempt, meta, body)


def open_stream(session: ClientSession, number: int = 7, attempt: int = 1, window_bytes: int = 10) -> Stream:
    """Open a stream and return it."""
    (effect,) = session.receive_bytes(open_frames(number, attempt, window_bytes=window_bytes)[0])
    assert isinstance(effect, Opened)
    return effect.stream


def test_register_always_announces_muster_v1() -> None:
    first = bridge.decode_worker_message(ClientSession().register(bridge.Register(worker_name="box", models=["m"])))
    assert isinstance(first, bridge.Register)
    assert (first.protocol_version, first.worker_name) == (MUSTER_V1, "box")


def test_open_gives_the_request_with_its_meta_and_body() -> None:
    session = accepted_session()
    (effect,) = session.receive_bytes(open_frames(body=b'{"a":1}', window_bytes=99)[0])
    assert isinstance(effect, Opened)
    assert effect.body == b'{"a":1}'
    assert (effect.stream.ident, effect.stream.attempt, effect.stream.window) == (7, 1, 99)
    assert effect.stream.meta.path == "/v1/x"


def test_a_body_in_several_frames_opens_the_stream_with_the_last_one() -> None:
    session = accepted_session()
    body = bytes(range(256)) * 3000
    *early, last = open_frames(body=body)
    assert [effect for frame in early for effect in session.receive_bytes(frame)] == []
    (effect,) = session.receive_bytes(last)
    assert isinstance(effect, Opened)
    assert effect.body == body


def test_a_body_after_its_last_part_is_a_violation() -> None:
    session = accepted_session()
    open_stream(session)
    with pytest.raises(ProtocolError, match="after its last part"):
        session.receive_bytes(frames.encode_frame(frames.BODY, 7, 1, b"more"))


def test_a_body_beyond_the_limit_ends_its_stream_only() -> None:
    usual = limits().connection.body_bytes
    set_runner_limits(connection={"body_bytes": 300_000})
    session = accepted_session()
    replies = [effect for frame in open_frames(body=bytes(400_000)) for effect in session.receive_bytes(frame)]
    (reply,) = replies
    assert isinstance(reply, Reply)
    assert frames.decode_end(frames.decode_frame(reply.frame).payload).error == "engine_failed"
    assert session.streams == []
    assert usual == 64 * 1024 * 1024


def test_frames_of_a_stream_carry_its_number_and_attempt() -> None:
    session = accepted_session()
    stream = open_stream(session, number=9, attempt=3)
    sent = [stream.head(200, {"a": "b"}), stream.data(b"12"), stream.end(frames.End())]
    parsed = [frames.decode_frame(frame) for frame in sent]
    assert [(frame.kind, frame.stream, frame.attempt) for frame in parsed] == [
        (frames.HEAD, 9, 3),
        (frames.DATA, 9, 3),
        (frames.END, 9, 3),
    ]


def test_data_uses_the_window_up_and_credit_raises_it() -> None:
    session = accepted_session()
    stream = open_stream(session, window_bytes=10)
    stream.data(b"x" * 7)
    assert stream.window == 3
    with pytest.raises(ValueError, match="exceed the window"):
        stream.data(b"x" * 4)
    assert session.receive_bytes(frames.encode_credit(7, 1, 5)) == [Credited(stream)]
    assert stream.window == 8


def test_cancel_ends_the_stream_with_one_end_and_later_frames_are_dropped() -> None:
    session = accepted_session()
    stream = open_stream(session)
    cancelled, reply = session.receive_bytes(frames.encode_frame(frames.CANCEL, 7, 1, b"client_disconnect"))
    assert cancelled == Cancelled(stream, "client_disconnect")
    assert isinstance(reply, Reply)
    end = frames.decode_end(frames.decode_frame(reply.frame).payload)
    assert (end.error, end.message) == ("cancelled", "client_disconnect")
    assert session.receive_bytes(frames.encode_credit(7, 1, 5)) == []
    assert session.receive_bytes(frames.encode_frame(frames.CANCEL, 7, 1, b"")) == []
    with pytest.raises(StreamClosed):
        stream.data(b"x")
    with pytest.raises(StreamClosed):
        stream.head(200, {})
    with pytest.raises(StreamClosed):
        stream.end(frames.End())


def test_frames_of_another_attempt_are_dropped() -> None:
    session = accepted_session()
    stream = open_stream(session, attempt=2)
    for kind in (frames.CANCEL, frames.BODY):
        assert session.receive_bytes(frames.encode_frame(kind, 7, 1, b"")) == []
    assert session.receive_bytes(frames.encode_credit(7, 3, 5)) == []
    assert (stream.is_open, stream.window) == (True, 10)


def test_a_newer_attempt_replaces_the_older_one_and_an_older_one_is_a_violation() -> None:
    session = accepted_session()
    old = open_stream(session, attempt=1)
    stop, start = session.receive_bytes(open_frames(attempt=2)[0])
    assert isinstance(stop, Cancelled)
    assert stop.stream is old
    assert isinstance(start, Opened)
    assert session.streams == [start.stream]
    with pytest.raises(ProtocolError, match="opened twice"):
        session.receive_bytes(open_frames(attempt=2)[0])


def test_too_many_streams_are_refused_as_busy() -> None:
    session = accepted_session()
    for number in range(limits().connection.streams):
        open_stream(session, number=number)
    (reply,) = session.receive_bytes(open_frames(number=limits().connection.streams)[0])
    assert isinstance(reply, Reply)
    end = frames.decode_end(frames.decode_frame(reply.frame).payload)
    assert (end.error, end.retryable) == ("busy", True)


def test_closing_the_session_closes_and_names_its_streams() -> None:
    session = accepted_session()
    streams = [open_stream(session, number=number) for number in (1, 2)]
    assert session.close() == streams
    assert not any(stream.is_open for stream in streams)
    assert session.close() == []


def test_control_messages_become_effects() -> None:
    session = accepted_session()
    notice = bridge.NodeNotice(status="available", mode="spare_on")
    asked = [
        bridge.Ping(timestamp_unix_ms=5),
        bridge.ModelsRefresh(),
        bridge.GracefulShutdown(reason="bye", drain_timeout_secs=9),
        bridge.GracefulShutdown(),
        notice,
    ]
    effects = [effect for message in asked for effect in session.receive_text(bridge.encode_message(message))]
    assert effects == [Pinged(5), ModelsWanted(), LeaveAsked("bye", 9.0), LeaveAsked("", None), Noticed(notice)]


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x01short",
        frames.encode_frame(frames.OPEN, 1, 1, b"\x00\x00"),
        frames.encode_frame(frames.OPEN, 1, 1, b"\x00\x00\x00\xff{}"),
        frames.encode_frame(frames.OPEN, 1, 1, b"\x00\x00\x00\x02[]"),
        frames.encode_frame(frames.OPEN, 1, 1, b"\x00\x00\x00\x02\xff\xfe"),
        frames.encode_frame(frames.HEAD, 1, 1, b"{}"),
        frames.encode_frame(frames.DATA, 1, 1, b"x"),
        frames.encode_frame(77, 1, 1, b""),
    ],
)
def test_malformed_and_misdirected_binary_frames_are_violations(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        accepted_session().receive_bytes(frame)


def test_malformed_credit_is_a_violation() -> None:
    session = accepted_session()
    open_stream(session)
    with pytest.raises(ProtocolError):
        session.receive_bytes(frames.encode_frame(frames.CREDIT, 7, 1, b"\x00"))


@pytest.mark.parametrize("frame", ["", "[]", "{}", '{"type":"surprise"}', '{"type":"ping","timestamp_unix_ms":"x"}'])
def test_malformed_text_frames_are_violations(frame: str) -> None:
    with pytest.raises(ProtocolError):
        accepted_session().receive_text(frame)


def test_nothing_may_come_before_the_ack_nor_a_second_one_nor_bridge_requests() -> None:
    with pytest.raises(ProtocolError, match="before register_ack"):
        ClientSession().receive_bytes(open_frames()[0])
    with pytest.raises(ProtocolError, match="not register_ack"):
        ClientSession().receive_text(bridge.encode_message(bridge.Ping()))
    with pytest.raises(ProtocolError, match="second register_ack"):
        accepted_session().receive_text(bridge.encode_message(ACK))
    with pytest.raises(ProtocolError, match="binary frames"):
        accepted_session().receive_text(bridge.encode_message(bridge.Cancel(request_id="r", reason="timeout")))
    older = bridge.RegisterAck(worker_id="w", models=[], protocol_version=bridge.BRIDGE_V1)
    with pytest.raises(ProtocolError, match="the gateway speaks"):
        ClientSession().receive_text(bridge.encode_message(older))


def test_box_and_server_sessions_understand_each_other_back_to_back() -> None:
    box, server = ClientSession(), server_side.ServerSession(NodeLimits())
    (registered,) = server.receive_text(box.register(bridge.Register(worker_name="box", models=["m"], max_concurrent=2)))
    assert isinstance(registered, server_side.Registered)
    assert (registered.models, registered.protocol) == (("m",), MUSTER_V1)
    box.receive_text(bridge.encode_message(ACK))
    body = b"z" * 600_000
    request = server_side.OpenRequest(
        request_id="req", attempt=1, model="m", path="/v1/chat/completions", body=body, headers={},
        is_streaming=True, deadline_ms=5000, tenant="t",
    )  # fmt: skip

    number, to_box = server.open_stream(request)
    (opened,) = [effect for frame in to_box for effect in box.receive_bytes(as_bytes(frame))]
    assert isinstance(opened, Opened)
    assert opened.body == body
    stream = opened.stream
    from_box = [stream.head(200, {"content-type": "text/plain"}), stream.data(b"\xe2\x82"), stream.data(b"\xac")]
    effects = [effect for frame in from_box for effect in server.receive_bytes(frame)]
    assert effects == [
        server_side.HeadArrived(number, 200, {"content-type": "text/plain"}),
        server_side.DataArrived(number, b"\xe2\x82"),
        server_side.DataArrived(number, b"\xac"),
    ]
    before = stream.window
    (credit,) = server.grant_credit(number, 3)
    assert box.receive_bytes(as_bytes(credit)) == [Credited(stream)]
    assert stream.window == before + 3

    late = stream.data(b"late")
    (cancel,) = server.cancel_stream(number, "client_disconnect")
    _, farewell = box.receive_bytes(as_bytes(cancel))
    assert isinstance(farewell, Reply)
    dropped = [effect for frame in (late, farewell.frame) for effect in server.receive_bytes(frame)]
    assert dropped == [server_side.FrameDropped(number)] * 2
    assert (server.open_streams, box.streams) == (0, [])


def as_bytes(frame: str | bytes) -> bytes:
    """Return a frame that must be binary."""
    assert isinstance(frame, bytes)
    return frame


def test_a_whole_answer_leaves_in_one_frame_and_closes_the_stream() -> None:
    session = accepted_session()
    stream = open_stream(session)
    frame = frames.decode_frame(stream.reply(frames.Head(status=200), b"{}", frames.End()))
    assert frame.kind == frames.REPLY
    assert frames.decode_reply(frame.payload) == (frames.Head(status=200), b"{}", frames.End())
    assert not stream.is_open
    with pytest.raises(StreamClosed):
        stream.end(frames.End())


@pytest.mark.parametrize(
    "message",
    [
        bridge.OpCommand(op_id="o", use=1, operation="model-load", body={"modelId": "m"}, token="t"),
        bridge.OpQuery(op_id="o", use=1),
        bridge.PolicyOffer(policies=[{}]),
        bridge.CheckpointOffer(note="n", old_size=0),
    ],
    ids=lambda message: type(message).__name__,
)
def test_what_the_control_plane_says_about_operations_is_handed_on_after_the_handshake(message: bridge.Message) -> None:
    frame = bridge.encode_message(message)
    assert accepted_session().receive_text(frame) == [Instructed(message)]  # type: ignore[arg-type]  # one of its kinds
    with pytest.raises(ProtocolError, match="register_ack"):
        ClientSession().receive_text(frame)
