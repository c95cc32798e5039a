"""The server's half of a worker socket, for both protocols, without a socket."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from core.limits import NodeLimits, limits
from nodes.reports import (
    clean_telemetry,
    find_contexts,
    find_endpoints,
    find_engines,
    read_capabilities,
    read_replicas,
)
from nodes.session import (
    AnswerArrived,
    DataArrived,
    Effect,
    FrameDropped,
    GovernanceChanged,
    HeadArrived,
    LoadReported,
    ModelsChanged,
    OpenRequest,
    OperationReported,
    Registered,
    ServerSession,
    StreamEnded,
    TelemetryArrived,
)
from tests.fakes.examples import examples
from tests.fakes.links import open_request
from wire import bridge, frames
from wire.bridge import BRIDGE_V1, MUSTER_V1, GpuInfo, MemoryInfo, ModelFacts, ProtocolError, ReplicaInfo, Telemetry

SSE = {"content-type": "text/event-stream"}


def register(session: ServerSession, **fields: object) -> Registered:
    """Introduce a node and return what was made of it."""
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


@pytest.mark.parametrize("said", [{}, {"protocol_version": None}, {"protocol_version": "1"}, {"protocol_version": BRIDGE_V1}])
def test_a_worker_speaks_bridge_v1_by_its_name_its_number_or_without_a_word(said: dict[str, object]) -> None:
    session = ServerSession(NodeLimits())
    assert register(session, **said, replicas=[{"model": "m", "state": "loaded"}]).protocol == BRIDGE_V1
    _, sent = session.open_stream(a_request())
    assert json.loads(sent[0])["type"] == "request"


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
def test_what_a_box_is_called_is_text_of_one_line_that_fits_and_its_slots_are_within_the_cap(version: str) -> None:
    said = "gpu\r\n2026-01-01 ERROR forged\x00\x1b[2J"
    named = dict.fromkeys(("worker_name", "instance_id", "agent_version", "owner_name"), said)
    effect = register(ServerSession(NodeLimits()), protocol_version=version, **named)
    message = effect.message
    for text in (effect.name, message.instance_id, message.agent_version, message.owner_name):
        assert text is not None
        assert (text.isprintable(), text[:4]) == (True, "gpu ")
    for asked, expected in ((" rig ", "rig"), ("", "worker"), ("\n\x00 ", "worker"), ("abcdefgh", "abcdef")):
        assert register(ServerSession(NodeLimits(max_name_chars=6)), worker_name=asked).name == expected
    for slots, most in ((0, 1), (-5, 1), (1, 1), (8, 8), (9, 8), (10**30, 8)):
        effect = register(ServerSession(NodeLimits(max_concurrent_cap=8)), max_concurrent=slots)
        assert (effect.max_concurrent, bool(effect.warnings)) == (most, slots != most)


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
    if status == 500 or (began and status is None):
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


def test_a_head_that_comes_again_is_the_same_object_and_of_many_the_last_ones_are_kept() -> None:
    session = make_session(MUSTER_V1)

    def answer(**headers: str) -> dict[str, str]:
        stream = opened(session)
        (arrived,) = session.receive_bytes(
            frames.encode_reply(stream, 1, frames.Head(status=200, headers=headers), b"x", frames.End())
        )
        assert isinstance(arrived, AnswerArrived)
        assert arrived.headers == {name.lower(): value for name, value in headers.items()}
        return arrived.headers

    first = answer(Kind="a")
    assert answer(Kind="a") is first
    assert [answer(Kind=str(number))["kind"] for number in range(session.policy.http_kept_heads)] == ["0", "1", "2", "3"]
    assert answer(Kind="a") is not first
    long = "x" * session.policy.http_kept_head_bytes
    assert answer(Kind=long) is not answer(Kind=long)


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


# back to back with the node's half


def _binary(frame: str | bytes) -> bytes:
    assert isinstance(frame, bytes)
    return frame


# any order of events


class SessionMachine(RuleBasedStateMachine):
    """A well-behaved muster node and an impatient gateway: what each stream's sink would see, over any interleaving."""

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
        short = self.session.data_streams.get(frame[: frames.HEADER_BYTES])
        effects = self.session.receive_bytes(frame)
        data = [DataArrived(short, frame[frames.HEADER_BYTES :])] if short is not None else []
        assert data == (effects if [type(effect) for effect in effects] == [DataArrived] else []), (
            "listed are headers of legal DATA"
        )
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
        assert set(self.session.data_streams.values()) == self.headed - self.over
        assert self.session.dropped_frames == self.dropped


SessionMachine.TestCase.settings = settings(examples(15), stateful_step_count=40)
TestSessionMachine = SessionMachine.TestCase


CHAT, EMBED = "/v1/chat/completions", "/v1/embeddings"
MEGABYTE = 1024 * 1024
LIMITS: dict[str, dict[str, Any]] = {
    "gguf_n_ctx": {"kind": "integer", "minimum": 1, "step": 1, "unit": "tokens", "default": None},
    "gguf_type_k": {"kind": "enum", "allowed_values": ["f16", "q8_0"], "default": "f16"},
}
FACTS = ModelFacts(
    name="m", backend="gguf", quantization="Q4_K_M", state="loaded", replicas=1, loaded_replicas=1, replica_max=4,
    target_inflight=2, configured_target_inflight=3, estimate_mb=700, estimate_replicas=1,
    estimate_source="observed_load_delta", load_constraints=LIMITS, device="cpu",
)  # fmt: skip


def cleaned(**fields: object) -> Telemetry:
    message = Telemetry(**fields)  # type: ignore[arg-type]  # names of its fields
    clean_telemetry(message)
    return message


def loaded(model: str, *endpoints: str, state: str = "loaded") -> ReplicaInfo:
    return ReplicaInfo(model=model, state=state, endpoints=list(endpoints))


def facts_of(telemetry: Telemetry) -> list[ModelFacts]:
    assert telemetry.memory is not None
    assert telemetry.memory.models is not None
    return telemetry.memory.models


# cutting


def test_a_modest_report_stays_as_it_is() -> None:
    replica = ReplicaInfo(
        model="m", state="loading", engine="vllm", detail="weights", progress=0.5, eta_s=9.0, endpoints=[CHAT],
        context_tokens=4096, kept=True, gave_up_ms=7, gpus=[0, 3], device="cpu",
    )  # fmt: skip
    said = {
        "gpus": [GpuInfo(index=1, name="L4", memory_total_mb=9, memory_used_mb=3, temperature_c=61.5, power_w=70.0)],
        "replicas": [replica],
        "available": ["a", "b"],
        "memory": MemoryInfo(kind="host", total_mb=9, used_mb=3, weights_mb=2, kv_mb=1, models=[FACTS]),
        "queue_depth": 3,
        "avg_wait_ms": 40,
        "last_error": "CUDA",
    }
    assert cleaned(**said) == Telemetry(**said)  # type: ignore[arg-type]  # names of its fields


def test_a_flood_is_cut_to_what_can_be_kept() -> None:
    text, most = "x" * 65_536, limits().nodes
    paths = ["/" + text, *[f"/{n}" for n in range(99)]]
    replica = ReplicaInfo(model=text, state=text, engine=text, detail=text, endpoints=paths)
    message = cleaned(
        gpus=[GpuInfo(index=0, name=text)] * 2_000,
        replicas=[replica] * 2_000,
        available=[f"{number}{text}" for number in range(600)],
        last_error=text,
        memory=MemoryInfo(kind=text),
    )
    kept = (len(message.gpus), len(message.replicas), len(message.available))
    assert kept == (most.report_gpus, most.report_replicas, most.report_available)
    assert len(message.replicas[0].endpoints) <= most.report_endpoints
    assert len(msgspec.json.encode(message)) < 512 * 1024
    session = registered()[0]
    (effect,) = session.receive_text(bridge.encode_message(Telemetry(replicas=[loaded("m")] * 10_000)))
    assert isinstance(effect, TelemetryArrived)
    assert len(effect.telemetry.replicas) == most.report_replicas, "cut before anybody sees it"


@pytest.mark.parametrize("number", [-1, -(10**40), 10**40])
def test_numbers_are_brought_into_their_range(number: int) -> None:
    most, is_high = limits().nodes, number > 0
    gpu = GpuInfo(index=number, name="g", memory_total_mb=number, memory_used_mb=number, utilization_percent=float(number))
    replica = ReplicaInfo(
        model="m", state="s", slots=number, active=number, progress=float(number), memory_mb=number, context_tokens=number,
        gave_up_ms=number,
    )  # fmt: skip
    message = cleaned(gpus=[gpu], replicas=[replica], queue_depth=number, avg_wait_ms=number, current_load=number)
    found = message.replicas[0]
    assert (message.gpus[0].memory_total_mb, found.memory_mb) == ((most.report_mb,) * 2 if is_high else (0, 0))
    assert (message.gpus[0].utilization_percent, found.progress) == ((100.0, 1.0) if is_high else (0.0, 0.0))
    assert found.slots == (most.report_load if is_high else 0)
    assert found.context_tokens == (most.report_context_tokens if is_high else None)
    assert (message.avg_wait_ms or 0) < 2**31
    assert most.report_gpus * most.report_mb < 2**31, "the memory of all GPUs together fits its column"
    assert (found.gave_up_ms or 0) <= 10**15


@pytest.mark.parametrize("text", ["a\x00b", "a\nb", "a\u202eb", "\x1b[31m"])
def test_text_becomes_printable_and_only_paths_are_taken_for_endpoints(text: str) -> None:
    replica = ReplicaInfo(
        model=text, state=text, detail=text, endpoints=["v1/chat", "", "/v1/x\n", CHAT, CHAT, "/" + "x" * 200]
    )
    message = cleaned(replicas=[replica], last_error=text, available=[text])
    said = [message.replicas[0].model, message.replicas[0].detail, message.last_error or "", *message.available]
    assert all(word.isprintable() and word for word in said)
    assert message.replicas[0].endpoints == [CHAT]


@examples(15)
@given(st.lists(st.tuples(st.text(), st.text(), st.integers() | st.none(), st.floats(allow_nan=False) | st.none()), max_size=8))
def test_whatever_is_said_can_be_written_as_json_for_postgresql(rows: list[tuple[str, str, int | None, float | None]]) -> None:
    replicas = [ReplicaInfo(model=m, state=s, memory_mb=mb, progress=p, eta_s=p, detail=m) for m, s, mb, p in rows]
    message = cleaned(replicas=replicas, available=[row[0] for row in rows])
    text = json.dumps(msgspec.to_builtins(message), allow_nan=False)
    assert "\\u0000" not in text
    text.encode()


def test_what_a_load_may_set_is_cut_to_size() -> None:
    most = limits().nodes
    wild: dict[str, dict[str, Any]] = {
        "x" * 1000: {"a": "\x00" * 1000, "b": [1, "w" * 1000, None] * 100, "c": {"deep": {}}, "d": 1e308 * 10, "e": 2**80},
        **{f"f{number}": dict.fromkeys(map(str, range(100)), 1) for number in range(100)},
    }
    facts = [ModelFacts(name="n" * 1000, estimate_mb=-5, replicas=2**70, load_constraints=wild)] * 300
    kept = facts_of(cleaned(memory=MemoryInfo(models=facts)))
    assert len(kept) == most.report_models
    (name, said), *others = kept[0].load_constraints.items()
    assert (len(kept[0].name), kept[0].estimate_mb, len(name), len(others)) == (200, 0, 40, most.report_constraints - 1)
    assert {key: said[key] for key in "cde"} == {"c": None, "d": None, "e": None}
    assert all(len(word) <= 40 for word in said["b"])
    assert all(len(inner) <= most.report_constraints for _, inner in others)
    names = [str(number) for number in range(most.report_constraints)]
    long = {name: dict.fromkeys(names, "w" * 200) for name in names}
    assert facts_of(cleaned(memory=MemoryInfo(models=[ModelFacts(name="n", load_constraints=long)])))[0].load_constraints == {}
    assert len(msgspec.json.encode(kept)) < MEGABYTE


# paths, contexts, engines


@pytest.mark.parametrize(
    ("replicas", "registered", "found"),
    [
        ([loaded("a", EMBED)], [CHAT], {"a": {EMBED}, "b": {CHAT}}),
        ([loaded("a")], [], {}),
        ([], [], {}),
        ([loaded("a", EMBED), loaded("a", CHAT)], [], {"a": {EMBED, CHAT}}),
        ([loaded("a", EMBED), loaded("a")], [], {}),
        ([loaded("a", EMBED), loaded("a")], [CHAT], {"a": {EMBED, CHAT}, "b": {CHAT}}),
        ([loaded("a", EMBED, state="failed")], [CHAT], {"a": {CHAT}, "b": {CHAT}}),
        ([loaded("a", EMBED, state="unloaded")], [CHAT], {"a": {CHAT}, "b": {CHAT}}),
    ],
)
def test_a_model_is_asked_on_the_paths_that_its_copies_name_or_else_its_box(
    replicas: list[ReplicaInfo], registered: list[str], found: dict[str, set[str]]
) -> None:
    assert find_endpoints(["a", "b"], replicas=replicas, registered=registered) == found


def test_the_smallest_context_and_the_engines_of_the_replicas_that_are_there_count_and_are_found_again() -> None:
    told = [
        ("a", "llamacpp", "loaded", 8192),
        ("a", "vllm", "loading", 4096),
        ("a", "tgi", "failed", 1),
        ("b", "", "loaded", None),
    ]
    replicas = [ReplicaInfo(model=m, engine=engine, state=state, context_tokens=size) for m, engine, state, size in told]
    stored = json.loads(msgspec.json.encode(replicas))
    assert find_contexts(replicas) == find_contexts(read_replicas(stored)) == {"a": 4096}
    assert find_engines(replicas) == find_engines(read_replicas(stored)) == {"a": {"llamacpp", "vllm"}}
    wrong = {"model": "a", "state": "loaded", "context_tokens": "x", "engine": 7}
    odd_ones: tuple[object, ...] = (None, {}, [7], [{"model": "a"}], [wrong])
    for odd in odd_ones:
        assert read_replicas(odd) == []
    assert b"context_tokens" not in msgspec.json.encode(loaded("m"))


# the model-runner API


COPIES = [{"id": "a", "replicas": 2, "gpuMemoryMB": 9.0}]


@pytest.mark.parametrize(
    ("answer", "names", "replicas", "ailment"),
    [
        ({"models": {}}, (), [], ""),
        ({"models": {"loaded": [{"id": " "}, {"id": "x" * 201}, {"id": "a"}]}}, ("a",), None, ""),
        ({"models": {"failed": [{"id": "a", "reason": "out of memory"}]}}, (), [("a", "failed", None)], ""),
        ({"models": {"loaded": COPIES}}, ("a",), [("a", "loaded", 4), ("a", "loaded", 4)], ""),
        ({"models": {}, "health": "un\nwell" * 50}, (), [], ("un well" * 50)[:40]),
        ({"models": {}, "health": ""}, (), [], "unknown"),
        ({"models": {"loaded": [{"id": "a", "replicas": 1e300, "gpuMemoryMB": -1}] * 999}}, ("a",), None, ""),
    ],
)
def test_capabilities_are_cut_to_what_can_be_kept(
    answer: dict[str, Any], names: tuple[str, ...], replicas: list[tuple[str, str, int | None]] | None, ailment: str
) -> None:
    said = read_capabilities(json.dumps(answer).encode(), policy=NodeLimits())
    assert (said.models, said.ailment) == (names, ailment)
    assert len(said.telemetry.replicas) <= limits().nodes.report_replicas
    if replicas is not None:
        assert [(one.model, one.state, one.memory_mb) for one in said.telemetry.replicas] == replicas


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", "truncated"),
        (b"{}", "models"),
        (b'{"models": {"loaded": [{"id": 7}]}}', r"\$\.models\.loaded\[0\]\.id"),
        (b'{"models": {}, "queue": {"depth": "many"}}', r"\$\.queue\.depth"),
        (b"[" * 100_000, "object"),
    ],
    ids=["empty", "no models", "id", "depth", "deep"],
)
def test_capabilities_that_cannot_be_read_are_refused_with_the_member_that_is_wrong(body: bytes, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        read_capabilities(body, policy=NodeLimits())


# operations and how a node decides about them, of muster v1 alone

STATUS: dict[str, Any] = {"op_id": "op-1", "use": 1, "state": "running"}
GOVERNANCE = bridge.NodeGovernance(level="L2", runner_id="rig#abc", public_key="AAAA", op_keys={"k1": "c2VjcmV0"}, clock_ms=5)
RESULT_BYTES, RECEIPT_CHARS = limits().nodes.status_result_bytes, limits().nodes.status_receipt_chars


def registered(
    version: str = bridge.MUSTER_V1, governance: bridge.NodeGovernance | None = None
) -> tuple[ServerSession, Registered]:
    session = ServerSession(NodeLimits())
    hello = bridge.Register(worker_name="rig", models=["m"], protocol_version=version, governance=governance)
    (effect,) = session.receive_text(bridge.encode_message(hello))
    assert isinstance(effect, Registered)
    return session, effect


def reported(report: bridge.GovernanceReport) -> bridge.GovernanceReport:
    """Send a report and return what arrives of it."""
    (effect,) = registered()[0].receive_text(bridge.encode_message(report))
    assert isinstance(effect, GovernanceChanged)
    return effect.report


@pytest.mark.parametrize(
    ("sent", "arrives"),
    [
        ({"stage": "loading", "fraction": 0.5, "eta_s": 3.0}, {"stage": "loading", "fraction": 0.5, "eta_s": 3.0}),
        ({"stage": "s" * 999, "code": "c" * 999}, {"stage": "s" * 200, "code": "c" * 80}),
        ({"message": "a\x00b\n" + "m" * 999}, {"message": "a b " + "m" * 496}),
        ({"op_id": "x" * 65}, {"op_id": ""}),
        ({"op_id": "a\nb"}, {"op_id": ""}),
        ({"use": 0}, {"use": 0}),
        ({"use": -1}, {"use": 0}),
        ({"use": 2**40}, {"use": 0}),
        ({"state": "approved"}, {"state": ""}),
        ({"fraction": 7.0, "eta_s": -3.0}, {"fraction": 1.0, "eta_s": 0.0}),
        ({"result": {"a": "x" * (RESULT_BYTES - 9)}}, {"result": {"a": "x" * (RESULT_BYTES - 9)}}),
        ({"result": {"a": "x" * RESULT_BYTES}}, {"result": None}),
        ({"result": {"a": "x\x00y"}}, {"result": None}),
        ({"result": {"a\x00": 1}}, {"result": None}),
        ({"receipt": "r" * RECEIPT_CHARS}, {"receipt": "r" * RECEIPT_CHARS}),
        ({"receipt": "r" * (RECEIPT_CHARS + 1)}, {"receipt": ""}),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_a_status_is_cut_to_what_can_be_kept_and_what_is_left_out_is_said(
    sent: dict[str, Any], arrives: dict[str, Any]
) -> None:
    (effect,) = registered()[0].receive_text(bridge.encode_message(bridge.OpStatus(**{**STATUS, **sent})))
    assert isinstance(effect, OperationReported)
    if arrives.get("result", sent) is None:
        assert set(effect.status.result) == {"omitted"}
        return
    assert effect.status == bridge.OpStatus(**{**STATUS, **arrives})


def test_a_bridge_v1_box_may_not_speak_of_operations_and_has_no_governance() -> None:
    for message in (bridge.OpStatus(**STATUS), bridge.GovernanceReport(governance=GOVERNANCE)):
        session, _ = registered(bridge.BRIDGE_V1)
        with pytest.raises(ProtocolError):
            session.receive_text(bridge.encode_message(message))
    assert registered(bridge.BRIDGE_V1, GOVERNANCE)[1].message.governance is None
    assert registered(bridge.MUSTER_V1, GOVERNANCE)[1].message.governance == GOVERNANCE


def test_a_report_is_cut_to_size_and_of_too_many_keys_the_newest_are_kept() -> None:
    keys = {f"k{number}": "c2VjcmV0" for number in range(20)}
    said = bridge.NodeGovernance(
        level="L9", runner_id="r" * 201, public_key="p" * 401, op_keys={"": "x", "k" * 65: "x", "long": "s" * 129, **keys},
        policy_version=2**40, policy_error="e" * 999, witness_size=-1, clock_ms=2**60,
    )  # fmt: skip
    report = reported(bridge.GovernanceReport(governance=said, witness_signature="s" * 129, witness_alarm="a" * 999))
    kept = report.governance
    assert (kept.level, kept.runner_id, kept.public_key) == ("", "", "")
    assert list(kept.op_keys) == list(keys)[-limits().nodes.op_keys :]
    assert (kept.policy_version, kept.witness_size, len(kept.policy_error)) == (2**31 - 1, 0, 300)
    assert (report.witness_signature, len(report.witness_alarm)) == ("", 300)


@pytest.mark.parametrize(
    ("note", "kept"), [("a\n1\n\n\u2014 a b\n", True), ("x" * 8193, False), ("a\x00", False), ("a\r\n", False)]
)
def test_a_note_keeps_its_lines_and_nothing_that_is_none(note: str, kept: bool) -> None:
    assert reported(bridge.GovernanceReport(governance=GOVERNANCE, witness_note=note)).witness_note == (note if kept else "")
