"""The server's half of a worker socket, for both protocols, without a socket."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from core.limits import NodeLimits
from nodes.session import (
    DataArrived,
    Effect,
    FrameDropped,
    HeadArrived,
    LoadReported,
    ModelsChanged,
    OpenRequest,
    Registered,
    ServerSession,
    StreamEnded,
)
from tests.fakes.examples import examples
from tests.fakes.links import open_request
from wire import bridge, frames
from wire.bridge import BRIDGE_V1, MUSTER_V1, ProtocolError

SSE = {"content-type": "text/event-stream"}


def register(session: ServerSession, **fields: object) -> Registered:
    """Introduce a box and return what was made of it."""
    (effect,) = session.receive_text(json.dumps({"type": "register", "models": ["m"], **fields}))
    assert isinstance(effect, Registered)
    return effect


def make_session(version: str = BRIDGE_V1, **bounds: int) -> ServerSession:
    """Return a session whose node has registered."""
    session = ServerSession(NodeLimits(**bounds))
    register(session, protocol_version=version)
    return session


def a_request(name: str = "req_1", **changes: object) -> OpenRequest:
    """Return a request for one attempt."""
    return open_request(request_id=name, **{"headers": {"content-type": "application/json"}, **changes})


def opened(session: ServerSession, request: OpenRequest | None = None) -> int:
    """Open a stream and return its number."""
    return session.open_stream(request or a_request())[0]


def chunk(name: str, text: str) -> str:
    return json.dumps({"type": "response_chunk", "request_id": name, "chunk": text})


def complete(name: str, status: int = 200, **fields: object) -> str:
    return json.dumps({"type": "response_complete", "request_id": name, "status_code": status, **fields})


def head(stream: int, *, status: int = 200, attempt: int = 1, headers: dict[str, str] | None = None) -> bytes:
    payload = frames.encode_json(frames.Head(status=status, headers=headers or {}))
    return frames.encode_frame(frames.HEAD, stream, attempt, payload)


def data(stream: int, payload: bytes, *, attempt: int = 1) -> bytes:
    return frames.encode_frame(frames.DATA, stream, attempt, payload)


def end(stream: int, error: str = "", *, attempt: int = 1) -> bytes:
    return frames.encode_frame(frames.END, stream, attempt, frames.encode_json(frames.End(error=error)))


# registration


@pytest.mark.parametrize(
    "frame",
    [
        *(json.dumps({"type": "register", "protocol_version": version}) for version in ("", "2025-01-bridge-v0", "2026-11-v2")),
        '{"type":"pong"}', chunk("r", "x"), complete("r"), '{"type":"error"}', '{"type":"telemetry"}', data(1, b"x"),
    ],
)  # fmt: skip
def test_anything_before_a_registration_of_a_known_version_ends_the_session(frame: str | bytes) -> None:
    session = ServerSession(NodeLimits())
    with pytest.raises(ProtocolError):
        session.receive_bytes(frame) if isinstance(frame, bytes) else session.receive_text(frame)
    assert session.protocol is None


@pytest.mark.parametrize(
    ("version", "frame"),
    [
        (BRIDGE_V1, '{"type":"register","models":["m"]}'),
        (BRIDGE_V1, '{"type":"telemetry"}'),
        (BRIDGE_V1, '{"type":"mode_change","mode":"spare_on"}'),
        (BRIDGE_V1, '{"type":"draining"}'),
        (BRIDGE_V1, chunk("other", "x")),
        (BRIDGE_V1, complete("other")),
        (BRIDGE_V1, '{"type":"error","request_id":"other"}'),
        (BRIDGE_V1, data(1, b"x")),
        (MUSTER_V1, '{"type":"register","models":["m"]}'),
        (MUSTER_V1, chunk("req_1", "x")),
        (MUSTER_V1, complete("req_1")),
        (
            MUSTER_V1,
            bridge.encode_message(bridge.OpStatus("op", 1, "running", result={"x": "y" * NodeLimits().control_frame_chars})),
        ),
        *((MUSTER_V1, frames.encode_frame(kind, 1, 1)) for kind in (frames.OPEN, frames.BODY, frames.CANCEL, frames.CREDIT)),
        *((MUSTER_V1, frames.encode_frame(kind, 1, 1)) for kind in (0, 20, 255)),
        (MUSTER_V1, data(1, b"before its head")),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_its_protocol_does_not_let_a_box_say_ends_the_session(version: str, frame: str | bytes) -> None:
    session = make_session(version)
    opened(session)
    with pytest.raises(ProtocolError):
        session.receive_bytes(frame) if isinstance(frame, bytes) else session.receive_text(frame)


@pytest.mark.parametrize(
    ("models", "taken", "warning"),
    [
        ([" b ", "a", "b", "", "  ", "a\n", "é", "x" * 201, "c\x00d"], ("b", "a", "é"), ""),
        (list("edcba"), ("e", "d", "c"), "truncated to 3"),
        ([], (), "no models accepted"),
        (["", " "], (), "no models accepted"),
        (["x" * 500], (), "no models accepted"),
    ],
)
def test_model_names_are_trimmed_deduplicated_cut_and_kept_in_order(
    models: list[str], taken: tuple[str, ...], warning: str
) -> None:
    effect = register(ServerSession(NodeLimits(max_models=3)), models=models)
    assert effect.models == taken
    assert [warning in told for told in effect.warnings] == ([True] if warning else [])
    session = make_session(max_models=2)
    frame = '{"type":"models_update","models":[" b","b","a","c"],"current_load":-3}'
    assert session.receive_text(frame) == [ModelsChanged(("b", "a"), 0)]


@pytest.mark.parametrize("version", [BRIDGE_V1, MUSTER_V1])
def test_what_a_box_is_called_is_text_of_one_line_that_fits(version: str) -> None:
    said = "gpu\r\n2026-01-01 ERROR forged\x00\x1b[2J"
    named = dict.fromkeys(("worker_name", "instance_id", "agent_version", "owner_name"), said)
    effect = register(ServerSession(NodeLimits()), protocol_version=version, **named)
    message = effect.message
    for text in (effect.name, message.instance_id, message.agent_version, message.owner_name):
        assert text is not None
        assert text.isprintable()
        assert text.startswith("gpu ")
    for asked, given in ((" rig ", "rig"), ("", "worker"), ("\n\x00 ", "worker"), ("abcdefgh", "abcdef")):
        assert register(ServerSession(NodeLimits(max_name_chars=6)), worker_name=asked).name == given


@pytest.mark.parametrize(("asked", "given"), [(0, 1), (-5, 1), (1, 1), (8, 8), (9, 8), (10**30, 8)])
def test_max_concurrent_is_kept_between_one_and_the_cap(asked: int, given: int) -> None:
    effect = register(ServerSession(NodeLimits(max_concurrent_cap=8)), max_concurrent=asked)
    assert effect.max_concurrent == given
    assert bool(effect.warnings) == (asked != given)


# bridge v1 streams


def test_a_request_for_a_bridge_worker_is_one_golden_frame_and_nothing_if_it_is_no_text() -> None:
    number, sent = make_session().open_stream(a_request(body='{"é":1}'.encode(), is_streaming=False))
    assert number == 1
    frame = (
        '{"type":"request","request_id":"req_1","model":"m","endpoint_path":"/v1/chat/completions","is_streaming":false,'
        '"body":"{\\"é\\":1}","headers":{"content-type":"application/json"}}'
    )
    assert sent == [frame]
    session = make_session()
    with pytest.raises(UnicodeDecodeError):
        session.open_stream(a_request(body=b"\xff"))
    assert session.open_streams == 0


def test_a_second_attempt_has_a_name_of_its_own() -> None:
    session = make_session()
    first = opened(session)
    session.cancel_stream(first, "timeout")
    second, (sent,) = session.open_stream(a_request(attempt=2))
    assert json.loads(sent)["request_id"] == "req_1.2"
    assert session.receive_text(chunk("req_1", "data: late")) == [FrameDropped(0)]
    assert session.receive_text(chunk("req_1.2", "data: x"))[0] == HeadArrived(second, 200, SSE)


@pytest.mark.parametrize(
    "starts",
    [["data: x\n\n"], ["event: ping\n"], [": comment\n"], ["\n\ndata: x"], ["id: 1\n"], ["retry: 5\n"], [" ", "d", "ata: x"]],
)
def test_an_event_stream_is_passed_on_as_soon_as_it_is_recognised(starts: list[str]) -> None:
    session = make_session()
    stream = opened(session)
    *held, first = [session.receive_text(chunk("req_1", start)) for start in starts]
    assert held == [[]] * (len(starts) - 1)
    assert first == [HeadArrived(stream, 200, SSE), DataArrived(stream, "".join(starts).encode())]
    assert session.receive_text(chunk("req_1", "é")) == [DataArrived(stream, "é".encode())]
    ended = session.receive_text(complete("req_1", 200, body="", token_counts={"completion_tokens": 3}))
    assert ended == [StreamEnded(stream, frames.End(usage=bridge.TokenCounts(completion_tokens=3)))]
    assert session.open_streams == 0


@pytest.mark.parametrize(
    ("pieces", "status", "headers", "body"),
    [
        (['{"error":', '"overloaded"}'], 529, {"Content-Type": "application/json"}, ""),
        ([], 200, {"X-A": "b"}, '{"a":1}'),
        ([], 204, {}, ""),
    ],
    ids=["in pieces", "whole", "empty"],
)
def test_other_text_is_held_until_the_completion_says_what_it_is(
    pieces: list[str], status: int, headers: dict[str, str], body: str
) -> None:
    session = make_session()
    stream = opened(session)
    for piece in pieces:
        assert session.receive_text(chunk("req_1", piece)) == []
    whole = ("".join(pieces) + body).encode()
    assert session.receive_text(complete("req_1", status, headers=headers, body=body)) == [
        HeadArrived(stream, status, {name.lower(): value for name, value in headers.items()}),
        *([DataArrived(stream, whole)] if whole else []),
        StreamEnded(stream, frames.End()),
    ]


def test_held_text_has_a_limit_and_costs_no_more_than_its_size() -> None:
    pieces = 4096
    session = make_session(bridge_held_chars=pieces)
    stream = opened(session)
    effects: list[Effect] = []
    for _ in range(pieces):
        effects += session.receive_text('{"type":"response_chunk","request_id":"req_1","chunk":"x"}')
    assert effects == [HeadArrived(stream, 200, SSE), DataArrived(stream, b"x" * pieces)]


@pytest.mark.parametrize("began", [False, True])
@pytest.mark.parametrize("status", [-1, 0, 101, 199, 600, 10**12, 500, None])
def test_an_error_or_an_impossible_status_is_the_engines_failure_and_retryable_only_before_the_first_chunk(
    status: int | None, *, began: bool
) -> None:
    session = make_session()
    stream = opened(session)
    if began or status == 500:
        session.receive_text(chunk("req_1", "data: x\n\n"))
    error = '{"type":"error","request_id":"req_1","code":"c","message":"m"}'
    (effect,) = session.receive_text(error if status is None else complete("req_1", status, body="x"))
    assert isinstance(effect, StreamEnded)
    assert (effect.stream, effect.end.error) == (stream, "engine_failed")
    assert effect.end.retryable is (status is None and not began)
    assert session.receive_text('{"type":"error","request_id":"req_1"}') == [FrameDropped(0)]


def test_late_frames_of_a_bridge_stream_are_dropped_and_counted_however_many_came_since() -> None:
    session = make_session()
    cancelled, ended = opened(session), opened(session, a_request("req_2"))
    assert session.cancel_stream(cancelled, "client_disconnect") == [
        '{"type":"cancel","request_id":"req_1","reason":"client_disconnect"}'
    ]
    session.receive_text(complete("req_2", body="x"))
    for frame in (chunk("req_1", "data: x"), complete("req_1"), chunk("req_2", "x"), complete("req_2")):
        assert session.receive_text(frame) == [FrameDropped(0)]
    assert session.dropped_frames == 4
    assert session.cancel_stream(cancelled, "x") == session.cancel_stream(ended, "x") == session.grant_credit(ended, 5) == []
    for number in range(3, 4000):
        session.cancel_stream(opened(session, a_request(f"req_{number}")), "timeout")
    assert session.receive_text(chunk("req_1", "x")) == [FrameDropped(0)]


# muster v1 streams


def test_streams_and_attempts_that_were_never_opened_end_the_session() -> None:
    for stream, attempt in ((0, 1), (2, 1), (2**63, 1), (1, 2), (1, 0)):
        session = make_session(MUSTER_V1)
        opened(session)
        with pytest.raises(ProtocolError):
            session.receive_bytes(head(stream, attempt=attempt))
    for second in (head(1), frames.encode_reply(1, 1, frames.Head(status=200), b"", frames.End())):
        session = make_session(MUSTER_V1)
        opened(session)
        session.receive_bytes(head(1))
        with pytest.raises(ProtocolError):  # nothing comes twice within a stream
            session.receive_bytes(second)


def test_late_frames_are_dropped_however_many_streams_came_since() -> None:
    session = make_session(MUSTER_V1)
    first = opened(session)
    cancelled = [session.cancel_stream(stream, "timeout") for stream in [first, *(opened(session) for _ in range(5000))]]
    assert all(cancelled)
    assert session.receive_bytes(data(first, b"x")) == [FrameDropped(first)]
    assert session.receive_bytes(end(first, "cancelled")) == [FrameDropped(first)]


def test_credit_and_cancel_name_stream_and_attempt() -> None:
    session = make_session(MUSTER_V1)
    stream = opened(session, a_request(attempt=3))
    assert session.grant_credit(stream, 7) == [frames.encode_credit(stream, 3, 7)]
    assert session.cancel_stream(stream, "timeout") == [frames.encode_frame(frames.CANCEL, stream, 3, b"timeout")]
    assert session.grant_credit(stream, 7) == []
    assert session.cancel_stream(stream, "timeout") == []


# back to back with the box's half


def _binary(frame: str | bytes) -> bytes:
    assert isinstance(frame, bytes)
    return frame


# any order of events


class SessionMachine(RuleBasedStateMachine):
    """A well-behaved muster box and an impatient gateway: what each stream's sink would see, over any interleaving."""

    streams = Bundle("streams")

    def __init__(self) -> None:
        super().__init__()
        self.session = make_session(MUSTER_V1)
        self.seen: dict[int, list[Effect]] = {}
        self.attempt: dict[int, int] = {}
        self.headed: set[int] = set()
        self.over: set[int] = set()
        self.ended_by_box: set[int] = set()

    @initialize()
    def begin(self) -> None:
        self.dropped = 0

    @rule(target=streams, attempt=st.integers(1, 4), body=st.binary(max_size=5))
    def open(self, attempt: int, body: bytes) -> int:
        stream, sent = self.session.open_stream(a_request(attempt=attempt, body=body))
        assert len(sent) == 1
        assert stream not in self.seen
        self.seen[stream] = []
        self.attempt[stream] = attempt
        return stream

    def receive(self, stream: int, frame: bytes) -> None:
        effects = self.session.receive_bytes(frame)
        if stream in self.over:
            assert effects == [FrameDropped(stream)]
            self.dropped += 1
            return
        self.seen[stream] += effects

    @rule(stream=streams)
    def send_head(self, stream: int) -> None:
        if stream not in self.headed:
            self.headed.add(stream)
            self.receive(stream, head(stream, attempt=self.attempt[stream]))

    @rule(stream=streams, payload=st.binary(max_size=4))
    def send_data(self, stream: int, payload: bytes) -> None:
        if stream in self.headed and stream not in self.ended_by_box:
            self.receive(stream, data(stream, payload, attempt=self.attempt[stream]))

    @rule(stream=streams, error=st.sampled_from(["", "cancelled", "engine_failed", "busy"]))
    def send_end(self, stream: int, error: str) -> None:
        self.receive(stream, end(stream, error, attempt=self.attempt[stream]))
        self.ended_by_box.add(stream)
        self.over.add(stream)

    @rule(stream=streams)
    def reply(self, stream: int) -> None:
        if stream not in self.headed:
            self.headed.add(stream)
            frame = frames.encode_reply(stream, self.attempt[stream], frames.Head(status=200), b"b", frames.End())
            self.receive(stream, frame)
            self.ended_by_box.add(stream)
            self.over.add(stream)

    @rule(stream=consumes(streams))
    def cancel(self, stream: int) -> None:
        assert len(self.session.cancel_stream(stream, "timeout")) == (stream not in self.over)
        self.over.add(stream)
        self.receive(stream, data(stream, b"late", attempt=self.attempt[stream]))

    @rule(stream=streams)
    def grant(self, stream: int) -> None:
        assert len(self.session.grant_credit(stream, 9)) == (stream not in self.over)

    @precondition(lambda self: self.seen)
    @rule()
    def tick(self) -> None:
        assert self.session.receive_text('{"type":"pong"}') == [LoadReported(0)]

    @invariant()
    def each_stream_is_in_order(self) -> None:
        for stream, effects in self.seen.items():
            kinds: list[Any] = [type(effect) for effect in effects]  # classes of the union
            assert kinds.count(HeadArrived) <= 1
            assert kinds.count(StreamEnded) <= 1
            if DataArrived in kinds:
                assert kinds[0] is HeadArrived
            if StreamEnded in kinds:
                assert kinds[-1] is StreamEnded
                assert stream in self.over

    @invariant()
    def nothing_is_kept_of_what_is_over(self) -> None:
        assert self.session.open_streams == len(self.seen.keys() - self.over)
        assert self.session.dropped_frames == self.dropped


SessionMachine.TestCase.settings = settings(examples(15), stateful_step_count=40)
TestSessionMachine = SessionMachine.TestCase
