"""One attempt of one request: what reaches the client, and what becomes of slot and node, over every way it can end."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import GatewayLimits
from gateway.dialects.surface import SURFACES, Surface
from gateway.errors import ClientLeft, ClientTooSlow, ForwardedRequestFailed, RequestInterrupted, RequestTimeout, StreamTooLarge
from gateway.request import attempt as answers
from gateway.request.attempt import Exchange
from gateway.request.dispatch import Dispatcher, Lease
from gateway.request.outcomes import Broken, Outcome, Retry, RetryReason, Served
from gateway.values import InferenceRequest
from nodes.links import EndKind, LinkRegistry
from nodes.links.keeper import LinkKeeper
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.examples import examples
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import make_job
from tests.fakes.waiting import turns
from wire.bridge import TokenCounts

SSE = {"content-type": "text/event-stream; charset=utf-8"}
JSON = {"content-type": "application/json"}
CHAT = SURFACES["/v1/chat/completions"]
DONE = b"data: [DONE]\n\n"


class Attempt:
    """An exchange that runs, with the node and the client in the hands of the test."""

    def __init__(
        self, *, streams: bool = True, limits: GatewayLimits | None = None, surface: Surface | None = CHAT,
        deadline_s: float = 30.0,
    ) -> None:  # fmt: skip
        registry = LinkRegistry()
        keeper = LinkKeeper(registry, gateway_id=uuid.UUID(int=9), connect_s=1.0)
        dispatcher = Dispatcher(registry, keeper, GatewayLimits(request_s=deadline_s))
        self.link = FakeLink()
        registry.add(self.link)
        request = InferenceRequest(
            endpoint=CHAT.path, paths=CHAT.paths, model="m", is_streaming=streams, max_tokens=None, prompt_chars=1,
            body=b'{"a":1}', headers={"content-type": "application/json"},
        )  # fmt: skip
        self.job = make_job(dispatcher, request)
        lease = dispatcher.acquire(self.job)
        assert isinstance(lease, Lease)
        self.lease = lease
        self.job.attempts = 1
        self.client = MemoryClient(limits=limits)
        self.exchange = Exchange(
            job=self.job, lease=lease, client=self.client.connection, surface=surface, limits=limits or GatewayLimits(),
            extra=[(b"x-request-id", b"req_1")],
        )  # fmt: skip
        self.task: asyncio.Task[Outcome] | None = None

    async def begin(self) -> FakeStream:
        """Start the exchange and return the stream on the node."""
        self.client.connection.watch()
        self.task = asyncio.create_task(self.exchange.run())
        await self.client.wait(lambda: self.link.streams)
        return self.link.streams[0]

    async def outcome(self) -> Outcome:
        """Return how it ended; by then slot and node are free."""
        assert self.task is not None
        async with asyncio.timeout(30):
            try:
                return await self.task
            finally:
                assert self.link.active == 0
                assert self.link.streams == []
                self.lease.release()
                assert self.link.active == 0

    async def broken(self, error: type, *, told: bool) -> None:
        """Check that it ended as a failure of this kind, of which the client was told or not."""
        outcome = await self.outcome()
        assert isinstance(outcome, Broken)
        assert (type(outcome.error), outcome.told) == (error, told)


async def test_an_event_stream_passes_through_byte_for_byte_as_its_events_become_whole() -> None:
    attempt = Attempt()
    stream = await attempt.begin()
    stream.sink.on_head(200, {**SSE, "x-engine": "yes", "server": "vllm", "set-cookie": "a=b", "content-length": "9"})
    assert attempt.client.events == []
    stream.sink.on_data(b"data: \xc3")
    assert (attempt.client.body, stream.granted) == (b"", 7)
    stream.sink.on_data(b"\xa9\n\n")
    assert attempt.client.body == b"data: \xc3\xa9\n\n"
    stream.sink.on_data(DONE)
    stream.end(EndKind.COMPLETE)
    assert await attempt.outcome() == Served(200, None)
    client = attempt.client
    assert client.body == b"data: \xc3\xa9\n\n" + DONE
    assert client.is_whole
    ours = {"x-accel-buffering": "no", "cache-control": "no-cache", "x-queue-wait-ms": "0", "x-request-id": "req_1"}
    assert client.headers == {**SSE, "x-engine": "yes", **ours}
    assert (attempt.exchange.bytes_out, attempt.exchange.events) == (24, 2)


async def test_a_second_attempt_is_told_apart_from_the_first() -> None:
    attempt = Attempt()
    attempt.job.attempts = 2
    stream = await attempt.begin()
    assert stream.request.attempt == 2
    stream.end(EndKind.COMPLETE)
    await attempt.outcome()


async def test_whoever_left_before_it_is_waited_for_waits_for_nothing() -> None:
    client = MemoryClient()
    client.connection.watch()
    client.leave()
    waited: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(ClientLeft):
        await client.connection.wait(waited)
    assert waited.cancelled()


async def test_headers_that_could_split_the_response_are_left_out() -> None:
    attempt = Attempt(streams=False)
    stream = await attempt.begin()
    stream.answer(b"x", headers={**JSON, "x-a": "b\r\nevil: 1", "x b": "c", "x-é": "d", "x-ok": "\xe9", "x-nul": "\0", "": "e"})
    await attempt.outcome()
    assert attempt.client.headers.keys() == {"content-type", "x-ok", "x-queue-wait-ms", "x-request-id"}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_a_body_where_there_may_be_none_is_a_failure(*, content_type: str, streams: bool) -> None:
    attempt = Attempt(streams=streams)
    stream = await attempt.begin()
    stream.sink.on_head(204, {"content-type": content_type})
    stream.sink.on_data(b"data: x\n\n")
    await attempt.broken(ForwardedRequestFailed, told=False)


@pytest.mark.parametrize("status", [0, 199, 302, 600, -1])
@pytest.mark.parametrize("streams", [True, False])
async def test_an_impossible_status_never_reaches_the_server(status: int, *, streams: bool) -> None:
    attempt = Attempt(streams=streams)
    stream = await attempt.begin()
    stream.answer(b"x", status=status)
    await attempt.broken(ForwardedRequestFailed, told=False)
    assert stream.cancelled
    assert attempt.client.events == []


BEFORE = [
    (EndKind.LINK_LOST, False, RetryReason.LOST, RequestInterrupted),
    (EndKind.RECLAIMED, False, RetryReason.RECLAIMED, RequestInterrupted),
    (EndKind.BUSY, True, RetryReason.BUSY, ForwardedRequestFailed),
    (EndKind.ENGINE_FAILED, True, RetryReason.ENGINE, ForwardedRequestFailed),
    (EndKind.ENGINE_FAILED, False, None, ForwardedRequestFailed),
    (EndKind.TIMEOUT, False, None, RequestTimeout),
]


@pytest.mark.parametrize(("kind", "retryable", "reason", "error"), BEFORE)
@pytest.mark.parametrize("headed", [False, True])
async def test_nothing_reached_the_client_so_another_box_may_try(
    kind: EndKind, reason: RetryReason | None, error: type, *, retryable: bool, headed: bool
) -> None:
    attempt = Attempt()
    stream = await attempt.begin()
    if headed:
        stream.answer(b"", headers=SSE, ends=False)
    stream.end(kind, retryable=retryable)
    outcome = await attempt.outcome()
    assert attempt.client.events == []
    assert attempt.exchange.first_byte_at is None
    if reason is None:
        assert isinstance(outcome, Broken)
        assert not outcome.told
    else:
        assert isinstance(outcome, Retry)
        assert outcome.reason is reason
    assert type(outcome.error) is error


@pytest.mark.parametrize("surface", [None, CHAT])
async def test_a_broken_body_that_is_no_event_stream_is_cut(surface: Surface | None) -> None:
    attempt = Attempt(surface=surface)
    stream = await attempt.begin()
    stream.answer(b'{"half":\n\n', headers=SSE if surface is None else JSON, ends=False)
    stream.end(EndKind.ENGINE_FAILED)
    await attempt.broken(ForwardedRequestFailed, told=True)
    assert attempt.client.handle.aborted
    assert not attempt.client.is_whole
    assert attempt.client.body == b'{"half":\n\n'


@pytest.mark.parametrize("streams", [True, False])
async def test_an_answer_over_the_ceiling_is_ended(*, streams: bool) -> None:
    attempt = Attempt(streams=streams, limits=GatewayLimits(max_stream_bytes=1000))
    stream = await attempt.begin()
    stream.answer(b"x" * 1000, headers=SSE, ends=False)
    assert stream in attempt.link.streams
    stream.sink.on_data(b"y")
    await attempt.broken(StreamTooLarge, told=streams)
    assert stream.cancelled
    assert b"y" not in attempt.client.body.partition(b"data:")[0]


@pytest.mark.parametrize(("status", "retryable"), [(400, False), (422, False), (500, True), (503, True)])
async def test_an_error_that_is_too_long_is_cut_and_keeps_its_status(status: int, *, retryable: bool) -> None:
    attempt = Attempt(streams=False)
    stream = await attempt.begin()
    body = b'{"error":{"code":400,"message":"this is no seed: ' + b"9" * 2_000_000
    stream.answer(body[:1000], body[1000:], status=status, headers=JSON, ends=False)
    await attempt.outcome()
    assert stream.cancelled
    error = json.loads(attempt.client.body)["error"]
    assert (attempt.client.status, error["retryable"]) == (status, retryable)
    assert "this is no seed" in error["message"]
    assert len(attempt.client.body) < 10_000


async def test_a_large_answer_is_held_only_up_to_a_bound_and_then_passed_on() -> None:
    attempt = Attempt(streams=False)
    stream = await attempt.begin()
    part = bytes(range(256)) * 1024
    stream.answer(*[part] * 4, ends=False)
    assert attempt.client.events == []
    stream.sink.on_data(part)
    assert attempt.client.body == part * 5
    assert stream.granted == len(part) * 5
    stream.sink.on_data(b'{"usage":{"prompt_tokens":1,"completion_tokens":2}}')
    stream.end(EndKind.COMPLETE)
    assert await attempt.outcome() == Served(200, TokenCounts(prompt_tokens=1, completion_tokens=2, total_tokens=3))
    assert attempt.client.is_whole


@pytest.mark.parametrize("streams", [True, False])
async def test_the_deadline_before_the_first_byte_is_a_timeout(*, streams: bool) -> None:
    attempt = Attempt(streams=streams, deadline_s=0.01)
    stream = await attempt.begin()
    await attempt.broken(RequestTimeout, told=False)
    assert stream.cancelled == "timeout"


@pytest.mark.parametrize("began", [True, False])
async def test_a_client_that_leaves_frees_slot_and_box_at_once(*, began: bool) -> None:
    attempt = Attempt()
    stream = await attempt.begin()
    if began:
        stream.answer(b"data: 1\n\n", headers=SSE, ends=False)
    attempt.client.leave()
    assert attempt.link.active == 0  # within the call, not a loop turn later
    assert stream.cancelled == "client_disconnect"
    with pytest.raises(ClientLeft):
        await attempt.outcome()
    assert not attempt.client.is_whole


async def test_a_client_that_left_before_is_not_served() -> None:
    attempt = Attempt()
    attempt.client.connection.watch()
    attempt.client.leave()
    with pytest.raises(ClientLeft):
        await attempt.exchange.run()
    assert attempt.link.active == 0
    assert attempt.link.streams == []


async def test_a_slow_client_gets_no_credit_for_the_box_until_it_has_read() -> None:
    attempt = Attempt()
    stream = await attempt.begin()
    stream.answer(b"data: %b\n\n" % (b"a" * 92), headers=SSE, ends=False)
    assert stream.granted == 100
    attempt.client.reading.clear()
    for _ in range(5):
        stream.sink.on_data(b"data: %b\n\n" % (b"b" * 92))
    assert stream.granted == 100
    attempt.client.reading.set()
    await attempt.client.wait(lambda: stream.granted == 600)
    attempt.client.reading.clear()
    stream.sink.on_data(b"data: %b\n\n" % (b"c" * 92))
    attempt.client.reading.set()
    await attempt.client.wait(lambda: stream.granted >= 700)
    assert stream.granted == 700  # what was read at first is not granted once more
    stream.sink.on_data(DONE)
    stream.end(EndKind.COMPLETE)
    await attempt.outcome()
    events = [b"data: %b\n\n" % (letter * 92) for letter in (b"a", *[b"b"] * 5, b"c")]
    assert attempt.client.body == b"".join(events) + DONE


async def test_a_client_with_too_much_waiting_is_closed_within_the_call() -> None:
    attempt = Attempt(limits=GatewayLimits(max_buffer_bytes=1000))
    stream = await attempt.begin()
    attempt.client.reading.clear()
    stream.answer(*[b"x" * 298 + b"\n\n"] * 10, headers=SSE, ends=False)
    assert stream.cancelled
    assert attempt.link.active == 0
    with pytest.raises(ClientTooSlow):
        await attempt.outcome()
    assert attempt.client.handle.aborted


USAGE = TokenCounts(prompt_tokens=5, completion_tokens=6, total_tokens=11)
CACHED = TokenCounts(prompt_tokens=5, completion_tokens=6, total_tokens=11, cached_tokens=1)


@pytest.mark.parametrize(
    ("parts", "usage"),
    [
        ([b'data: {"usage":{"prompt_tokens":5,"completion_tokens":6,"total_tokens":11}}\n\n', b"data: [DONE]\n\n"], USAGE),
        (
            [b'data: {"usage":{"prompt_tokens_details":{"cached_tokens":1},"prompt_tokens":5,"completion_tokens":6}}\n\n'],
            CACHED,
        ),
        ([b'event: message_delta\ndata: {"usage":{"input_tokens":5,"output_tokens":6}}\n\n'], USAGE),
        ([b'data: {"usage":{"prompt_tokens":5,"completion_tokens":6},"x":1}\n\n', b'data: {"usage":null}\n\n'], USAGE),
        *(([part, b"\n\n"], None) for part in (b'data: {"usage":{"prompt_tokens":"many"}}\n\n', b'data: {"usage":{')),
        *(([part, b"\n\n"], None) for part in (b'"usage":{{{{{}}}}', b'"usage"')),
    ],
)
async def test_usage_that_makes_sense_is_read_from_the_stream_when_the_link_does_not_report_it(
    parts: list[bytes], usage: TokenCounts | None
) -> None:
    attempt = Attempt()
    stream = await attempt.begin()
    stream.answer(*parts, DONE, headers=SSE)
    assert await attempt.outcome() == Served(200, usage)


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b'{"usage":[]}', b'{"usage":{"prompt_tokens":"x"}}', b"\xff", b'{"a":' + b"[" * 100_000],
    ids=lambda body: repr(body[:12]),
)
async def test_a_whole_answer_that_is_not_what_was_expected_is_passed_on_without_usage(body: bytes) -> None:
    attempt = Attempt(streams=False)
    stream = await attempt.begin()
    stream.answer(body)
    assert await attempt.outcome() == Served(200, None)
    assert attempt.client.body == body


async def test_looking_for_usage_costs_little_on_a_hostile_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[int] = []

    class Decoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[object, int]:
            looked_at.append(len(s))
            return super().raw_decode(s, idx)

    monkeypatch.setattr(answers, "_prefix_decoder", Decoder())
    attempt = Attempt(limits=replace(GatewayLimits(), max_buffer_bytes=64 * 1024 * 1024))
    stream = await attempt.begin()
    stream.answer(b'"usage":{' * 30_000, headers=SSE)
    await attempt.outcome()
    assert 0 < len(looked_at) < 20
    assert sum(looked_at) < 100_000


MOVE = st.sampled_from(["head", "data", "empty", "block", "open", "turn", "leave", "complete", "lost", "engine"])
ENDS = {"complete": EndKind.COMPLETE, "lost": EndKind.LINK_LOST, "engine": EndKind.ENGINE_FAILED}


class Play:
    """An attempt whose node and client do what hypothesis says."""

    def __init__(self, *, streams: bool) -> None:
        self.attempt = Attempt(streams=streams)
        self.client = self.attempt.client
        self.sent: list[bytes] = []
        self.headed = False

    async def move(self, move: str, stream: FakeStream) -> None:
        is_open = stream in self.attempt.link.streams
        if move == "head" and is_open and not self.headed:
            self.headed = True
            stream.sink.on_head(200, SSE)
        elif move in {"data", "empty"} and is_open and self.headed:
            data = b"" if move == "empty" else b"data: %d\n\n" % len(self.sent)
            self.sent.append(data)
            stream.sink.on_data(data)
        elif move in ENDS:
            stream.end(ENDS[move])
        elif move in {"block", "open"}:
            self.client.reading.clear() if move == "block" else self.client.reading.set()
        elif move == "leave":
            self.client.leave()
        else:
            await turns(1)

    async def finish(self, stream: FakeStream) -> Outcome | None:
        """Let everybody finish; return the outcome, None when the client left."""
        self.client.reading.set()
        stream.end(EndKind.LINK_LOST)
        try:
            outcome = await self.attempt.outcome()
            await self.client.connection.drain()
        except ClientLeft:
            return None
        return outcome

    def check(self, outcome: Outcome | None) -> None:
        whole, is_gone = b"".join(self.sent), self.client.connection.is_gone
        seen, _, tail = self.client.body.partition(b'data: {"error"')
        assert whole.startswith(seen)
        if isinstance(outcome, Served):
            assert is_gone or (seen == whole and self.client.is_whole and not tail)
        elif isinstance(outcome, Retry):
            assert self.client.events == []
        elif isinstance(outcome, Broken):
            assert is_gone or bool(tail) == outcome.told  # who leaves may do so before or after being told


@examples(30)
@given(streams=st.booleans(), moves=st.lists(MOVE, max_size=25))
def test_whatever_happens_the_client_sees_a_prefix_then_at_most_one_end(moves: list[str], *, streams: bool) -> None:
    async def play() -> None:
        play = Play(streams=streams)
        stream = await play.attempt.begin()
        for move in moves:
            await play.move(move, stream)
        play.check(await play.finish(stream))

    asyncio.run(play())
