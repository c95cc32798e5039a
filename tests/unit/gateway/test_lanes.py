"""A request is answered, recorded, counted and logged alike whether its head was known or went through the parser and ASGI."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from uvicorn.server import ServerState

from controlplane.gateway_server.fast_path import FastPath
from controlplane.gateway_server.http_protocol import GatewayHttpProtocol, KnownHead, KnownRequests
from controlplane.gateway_server.server import GatewayApp
from core.limits import limits
from gateway import metrics
from gateway.process import GatewayRuntime
from gateway.request.access_log import AccessLog, AccessMode, write_json
from gateway.request.client import Receive, Scope, Send
from gateway.urls import make_inference
from nodes.links import EndKind, Sink
from nodes.session import OpenRequest
from nodes.states import Windows
from tests.fakes.clock import install_virtual_clock
from tests.fakes.examples import examples
from tests.fakes.limits import set_limits
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import REPLY, SSE, STREAM, Gateway, MemoryDatabase, give_budget
from tests.fakes.server_door import MemoryTransport
from tests.fakes.traces import Remembered
from tests.fakes.virtual_loop import VirtualLoop
from tests.fakes.waiting import eventually, takes, turns

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/messages", "/v1/responses", "/v1/rerank")
USER = {"role": "user", "content": "hi"}
BODIES: tuple[dict[str, Any] | bytes, ...] = (
    {"model": "m", "messages": [USER], "prompt": "a", "input": "a", "query": "a", "documents": ["a"], "max_tokens": 5},
    {"model": "m", "messages": [USER], "input": "a", "prompt": "a", "max_tokens": 5, "stream": True},
    {"model": "m", "messages": [USER], "input": "a", "max_tokens": 5, "x_pool_options": {"priority": "low"}},
    {"model": "m", "messages": [USER], "max_tokens": 1_000_000},
    {"model": "m", "messages": [], "input": [], "max_tokens": 5},
    {"model": "nobody's", "messages": [USER], "input": "a", "max_tokens": 5},
    {"model": "m", "messages": [USER], "input": "\u00e9", "max_tokens": 5, "store": False},
    b"",
    b"[]",
    b'{"model": "m", "messages": [{}], "messages": [{}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
)
HEADERS = (
    b"User-Agent: openai", b"accept: text/event-stream", b"X-Cache-Mode: prefix", b"x-cache-mode: never", b"X-Cache-Tag: a b",
    b"content-type: application/json", b"Content-Type: text/plain", b"content-encoding: gzip", b"anthropic-version: 2023-06-01",
    b"connection: keep-alive", b"Connection: close", b"expect: 100-continue", b"x-long: " + b"a" * 5000, b"x-twice: 1",
    b"x-twice: 2", b"transfer-encoding: chunked", b"X-Forwarded-For: 203.0.113.9",
)  # fmt: skip
LENGTHS = (b"content-length: %d", b"Content-Length: %d", b"CONTENT-LENGTH:%d", b"Content-Length:  %d", b"content-length: 00%d")
NODES = (
    "answers", "streams", "refuses", "fails", "is busy once", "breaks off", "is lost once", "streams late", "answers late",
    "breaks off late", "says it failed", "answers at once",
)  # fmt: skip
CLIENTS = ("reads", "reads", "leaves", "leaves in the middle", "reads late")
DATABASES = ("works", "works", "works", "fails", "dies before")
BUDGET = 300
"""Tokens of the key: enough for many requests with small answers, and not for one that asks for a thousand."""
LATE_S = 0.02
"""Longer than a commit takes."""


class Node(FakeLink):
    """Answers each request as ``how`` says."""

    how = "answers"
    asked = 0

    def open_stream(self, request: OpenRequest, sink: Sink) -> FakeStream:
        stream = super().open_stream(request, sink)
        self.asked += 1
        loop = asyncio.get_running_loop()
        if self.how == "answers at once":
            loop.call_soon(self._play, stream)
        else:  # sockets are written in the turn of the loop before
            loop.call_soon(loop.call_soon, self._play, stream)
        return stream

    def _play(self, stream: FakeStream) -> None:
        is_first = self.asked % 2 == 1
        if self.how == "is busy once" and is_first:
            stream.end(EndKind.BUSY)
        elif self.how == "says nothing":
            return
        elif self.how == "is lost once" and is_first:
            stream.end(EndKind.LINK_LOST)
        elif self.how == "refuses":
            stream.answer(b'{"error":{"message":"no such thing","code":5}}', status=400)
        elif self.how == "fails":
            stream.answer(b"out of memory", status=500, headers={"content-type": "text/plain"})
        elif self.how == "breaks off":
            stream.answer(*STREAM[:2], headers=SSE, ends=False)
            stream.end(EndKind.ENGINE_FAILED)
        elif self.how == "breaks off late":
            stream.answer(*STREAM[:2], headers=SSE, ends=False)
            asyncio.get_running_loop().call_later(LATE_S, stream.end, EndKind.ENGINE_FAILED)
        elif self.how == "streams":
            stream.answer(*STREAM, headers=SSE)
        elif self.how == "says it failed":
            stream.answer(STREAM[0], b'data: {"error":{"message":"out of memory"}}\n\n', b"data: [DONE]\n\n", headers=SSE)
        elif self.how == "streams late":
            stream.answer(*STREAM[:2], headers=SSE, ends=False)
            asyncio.get_running_loop().call_later(LATE_S, self._go_on, stream)
        elif self.how == "answers late":
            asyncio.get_running_loop().call_later(LATE_S, stream.answer, REPLY)
        else:
            stream.answer(REPLY)

    def _go_on(self, stream: FakeStream) -> None:
        for part in STREAM[2:]:
            if stream in self.streams:
                stream.sink.on_data(part)
        stream.end(EndKind.COMPLETE)


@dataclass(frozen=True)
class Ask:
    """A request, sent in ``pieces`` reads, and what node, client and database do with it."""

    head: bytes
    body: bytes
    pieces: int
    how: str
    client: str = "reads"
    database: str = "works"


@st.composite
def asks(draw: st.DrawFn) -> Ask:
    body = draw(st.sampled_from(BODIES))
    separators = draw(st.sampled_from([None, (",", ":")]))
    data = body if isinstance(body, bytes) else json.dumps(body, separators=separators).encode()
    key = draw(st.sampled_from([b"Authorization: Bearer KEY"] * 4 + [b"x-api-key: KEY", b"authorization: bearer nonsense"]))
    lines = [b"Host: a", key, draw(st.sampled_from(LENGTHS[:2] * 2 + LENGTHS[2:])) % len(data)]
    lines += draw(st.lists(st.sampled_from(HEADERS[:6] * 3 + HEADERS), max_size=3, unique=True))
    lines = draw(st.permutations(lines))
    version = draw(st.sampled_from([b"HTTP/1.1"] * 9 + [b"HTTP/1.0"]))
    method = draw(st.sampled_from([b"POST"] * 9 + [b"PUT"]))
    target = draw(st.sampled_from(PATHS)).encode() + draw(st.sampled_from([b""] * 9 + [b"?a=1"]))
    head = b"%b %b %b\r\n%b\r\n\r\n" % (method, target, version, b"\r\n".join(lines))
    pieces, node = draw(st.sampled_from([1, 1, 1, 2, 5])), draw(st.sampled_from(NODES))
    return Ask(head, data, pieces, node, draw(st.sampled_from(CLIENTS)), draw(st.sampled_from(DATABASES)))


@dataclass(frozen=True)
class Seen:
    """What became of a request: bytes to its client, rows, what was counted, its line in the access log, and its spans."""

    said: bytes
    is_over: bool
    rows: list[dict[str, Any]]
    counted: dict[str, float]
    asked: int
    lines: list[bytes]
    spans: list[object]


class CountedRequests(KnownRequests):
    """Counts the heads that it found."""

    found = 0

    def find(self, data: bytes) -> tuple[KnownHead, bytes] | None:
        found = super().find(data)
        CountedRequests.found += found is not None
        return found


class CountedPath(FastPath):
    """Counts the requests that it took."""

    taken = 0

    def begin(self, connection: GatewayHttpProtocol, head: KnownHead, body: bytes) -> bool:
        is_taken = super().begin(connection, head, body)
        CountedPath.taken += is_taken
        return is_taken


class Lane:
    """A gateway's HTTP server in memory. ``is_known``: it remembers heads."""

    def __init__(self, *, is_known: bool, is_traced: bool = False) -> None:
        self.remembered = Remembered() if is_traced else None
        self.database = MemoryDatabase()
        self.gateway = Gateway(connect=self.database.connect, limits=limits().gateway)
        self.gateway.pipeline.traces = None if self.remembered is None else self.remembered.traces
        self.lines: list[bytes] = []
        stream = SimpleNamespace(write=self.lines.append, flush=lambda: None)
        self.access = AccessLog(AccessMode.ON, self.gateway.limits, stream=cast("BinaryIO", stream), write_line=write_json)
        self.gateway.pipeline.recorder.access = self.access
        self.node = Node(name="node", node_id=uuid.UUID(int=7))
        self.node.windows = Windows(1e9, 1e9, 1e9)
        self.node.reports_usage = True
        self.gateway.registry.add(self.node)
        self.share = give_budget(self.gateway, BUDGET)
        runtime = cast("GatewayRuntime", SimpleNamespace(pipeline=self.gateway.pipeline, limits=self.gateway.limits))
        inference = make_inference(runtime)

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            await inference[scope["path"]].serve_scope(scope, receive)

        app = GatewayApp(runtime, route, inference)
        fast = CountedPath(self.gateway.pipeline, inference)

        class Protocol(GatewayHttpProtocol):
            known = CountedRequests(inference, app.serve_known, fast.begin) if is_known else None

        self._config = uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, server_header=False)
        self._config.load()
        self._protocol = Protocol
        self._connect()

    def _connect(self) -> None:
        self.transport = MemoryTransport()
        self.protocol = self._protocol(self._config, ServerState(), {})
        self.protocol.connection_made(self.transport)

    async def ask(self, ask: Ask) -> Seen:
        if self.transport.is_over or self.protocol.is_deaf:
            self.protocol.connection_lost(None)
            self._connect()
        self.node.how, self.node.asked = ask.how, 0
        await self.records_rest()
        self.database.fates = [ask.database]
        self.transport.on_said = self._leave_in_the_middle if ask.client == "leaves in the middle" else None
        before, rows_before, said_before = count(), set(self.database.rows), len(self.transport.said)
        data = ask.head.replace(b"KEY", self.gateway.key.encode()) + ask.body
        size = -(-len(data) // ask.pieces)
        for start in range(0, len(data), size):
            if not self.transport.is_over:
                self.protocol.data_received(data[start : start + size])
                await turns(1)
        if not self.transport.is_over:
            await self._behave(ask.client)
        await self.rest()
        said = b"" if ask.client == "leaves" else bytes(self.transport.said[said_before:])
        rows = [row for key, row in self.database.rows.items() if key not in rows_before]
        counted = {name: value - before.get(name, 0.0) for name, value in count().items() if value != before.get(name, 0.0)}
        self.access.stop()
        lines, self.lines[:] = [mask(line) for batch in self.lines for line in batch.splitlines()], []
        ended = sum(number for name, number in counted.items() if name.startswith("muster_request_outcomes"))
        assert len(lines) == ended, "each request has one line"
        spans = [] if self.remembered is None else [tell(span) for span in self.remembered.take()]
        return Seen(mask(said), self.transport.is_over, [strip(row) for row in rows], counted, self.node.asked, lines, spans)

    async def _behave(self, client: str) -> None:
        """Do what the client does beside reading."""
        if client == "leaves":
            await turns(10)  # until whatever the node says at once was heard
            self._leave()
        elif client == "reads late":
            self.protocol.pause_writing()
            await takes(2 * LATE_S)
            if self.transport.is_over:
                self.protocol.connection_lost(None)
            else:
                self.protocol.resume_writing()

    def _leave(self) -> None:
        if not self.transport.is_over:
            self.transport.is_over = True
            self.protocol.connection_lost(None)

    def _leave_in_the_middle(self) -> None:
        """The client has got the first bytes, and the node has not said the last ones."""
        self.transport.on_said = None
        if self.node.active:
            asyncio.get_running_loop().call_soon(self._leave)

    async def records_rest(self) -> None:
        """Wait until the database is well."""
        await eventually(lambda: self.gateway.records.keeps_up)

    async def rest(self) -> None:
        """Wait until the request is answered and its row is final."""
        records, protocol = self.gateway.records, self.protocol

        def is_over() -> bool:
            is_answered = self.transport.is_over or protocol.cycle is None or protocol.cycle.response_complete
            return is_answered and not (protocol.tasks or protocol.fast or records.pending or self.node.active)

        await eventually(is_over, within_s=3.0, pause_s=0.001)

    async def close(self) -> None:
        self.protocol.connection_lost(None)
        await turns()
        await self.gateway.records.stop()


def count() -> dict[str, float]:
    """Return the series that a request changes, but for times and for how many rows went into one commit."""
    series = itertools.chain(metrics.COUNTERS.collect(), metrics.REFUSALS.collect(), metrics.ERRORS.collect())
    return {
        f"{sample.name}{sorted(sample.labels.items())}": sample.value
        for one in series
        for sample in one.samples
        if not sample.name.endswith(("_sum", "_created")) and "flushes" not in sample.name
    }


def mask(said: bytes) -> bytes:
    """Put one name in place of a request's own id, which stands in others made of it too."""
    for found in set(re.findall(rb"req_([0-9a-z]+)", said)):
        said = said.replace(found, b"ID")
    return said


def strip(row: Mapping[str, Any]) -> dict[str, Any]:
    own = {"id", "gateway_id", "key_id"}
    return {name: value for name, value in row.items() if name not in own}


def tell(span: ReadableSpan) -> object:
    """Return what a span says, but for ids and times."""
    first, said = "gen_ai.response.time_to_first_chunk", dict(span.attributes or {})
    said.pop("muster.request.id", None)
    if first in said:
        said[first] = 0.0
    return span.name, span.kind, span.status.status_code, said, span.parent is not None


def make_known(ask: Ask) -> Ask:
    """Return the same head with a body that is answered, by a node, a client and a database with which nothing is wrong."""
    is_streaming = b'"stream"' in ask.body
    body = json.dumps(BODIES[1 if is_streaming else 0]).encode()
    head = re.sub(rb"(?i)(content-length:) *[0-9]+", rb"\1 %d" % len(body), ask.head)
    return Ask(head, body, 1, "streams" if is_streaming else "answers")


@examples(30)
@given(requests=st.lists(asks(), min_size=1, max_size=4), is_traced=st.booleans())
def test_a_known_head_makes_no_difference(requests: list[Ask], *, is_traced: bool) -> None:
    async def compare() -> None:
        short = {"records_linger_s": 0.0, "busy_pause_s": 0.0, "records_retry_s": 0.01}
        set_limits(gateway={**short, "no_node_wait_s": 29.0, "stream_ping_s": 60.0})
        install_virtual_clock()
        lanes = [Lane(is_known=is_known, is_traced=is_traced) for is_known in (True, False)]
        try:
            for ask in [version for one in requests for version in (make_known(one), one, one)]:
                known, general = [await lane.ask(ask) for lane in lanes]
                assert known == general
                await eventually(lambda: not any(lane.share.open for lane in lanes), "all is settled")
                assert lanes[0].share.used == lanes[1].share.used
        finally:
            for lane in lanes:
                await lane.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(compare())


GOOD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer KEY\r\nContent-Length: %d\r\n\r\n"


def list_usual() -> Iterator[Ask]:
    """Yield a usual head with each body, and with each thing that node, client and database do, one at a time."""
    for body in BODIES:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        yield Ask(GOOD % len(data), data, 1, "answers")
    for body in BODIES[:2]:
        data = json.dumps(body).encode()
        usual = Ask(GOOD % len(data), data, 1, "streams late" if body.get("stream") else "answers late")  # type: ignore[union-attr]  # it is an object
        yield from (replace(usual, how=how) for how in NODES)
        yield from (replace(usual, client=client) for client in sorted({*CLIENTS}))
        yield from (replace(usual, database=database) for database in sorted({*DATABASES}))


def test_whatever_happens_to_a_usual_request_makes_no_difference() -> None:
    before = CountedPath.taken
    compare = test_a_known_head_makes_no_difference.hypothesis.inner_test  # type: ignore[attr-defined]
    for ask in list_usual():
        compare([make_known(ask), ask], is_traced=True)
        if ask.client != "reads":  # behind a request that was given to the pipeline, too
            compare([make_known(ask), replace(ask, how="fails", client="reads"), ask], is_traced=True)
    assert CountedPath.taken > before + 50


async def ask_in_vain(lane: Lane, body: dict[str, Any]) -> FakeStream:
    """Have a usual request served without a task by a node that says nothing yet; return its stream."""
    data = json.dumps(body).encode()
    await lane.ask(Ask(GOOD % len(data), data, 1, "streams" if body.get("stream") else "answers"))
    lane.transport.said.clear()
    lane.node.how = "says nothing"
    lane.protocol.data_received((GOOD % len(data)).replace(b"KEY", lane.gateway.key.encode()) + data)
    await turns(1)
    assert lane.protocol.fast is not None
    return lane.node.streams[0]


async def test_a_stream_that_says_nothing_is_kept_alive_and_goes_on() -> None:
    set_limits(gateway={"stream_ping_s": 0.1})
    lane = Lane(is_known=True)
    try:
        stream = await ask_in_vain(lane, BODIES[1])  # type: ignore[arg-type]  # it is an object
        await eventually(lambda: b": ping" in lane.transport.said)
        stream.answer(*STREAM[:2], headers=SSE, ends=False)
        await eventually(lambda: lane.transport.said.count(b": ping") > 1)
        for part in STREAM[2:]:
            stream.sink.on_data(part)
        stream.end(EndKind.COMPLETE)
        await lane.rest()
        assert lane.transport.said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert [row["state"] for row in lane.database.rows.values()] == ["completed", "completed"]
    finally:
        await lane.close()


def test_the_end_of_an_answer_waits_until_its_record_is_sent_and_never_long() -> None:
    async def live() -> None:
        lane = Lane(is_known=True)
        try:
            stream = await ask_in_vain(lane, BODIES[0])  # type: ignore[arg-type]  # it is an object
            await eventually(lambda: len(lane.database.rows) == 2)
            lane.database.is_slow_to_take = True
            lane.database.fates = ["slow"]
            stream.answer(REPLY)
            await turns(3)
            assert not lane.transport.said
            await eventually(lambda: lane.transport.said.endswith(REPLY))
        finally:
            await lane.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(live())


async def test_a_request_that_takes_too_long_is_ended_at_its_deadline() -> None:
    set_limits(gateway={"stream_ping_s": 0.1})
    virtual = install_virtual_clock()
    lane = Lane(is_known=True)
    try:
        stream = await ask_in_vain(lane, BODIES[0])  # type: ignore[arg-type]  # it is an object
        virtual.advance(limits().gateway.request_s)
        await lane.rest()
        assert stream.cancelled == "timeout"
        assert lane.transport.said.startswith(b"HTTP/1.1 504 ")
        assert [row["state"] for row in lane.database.rows.values()] == ["completed", "failed"]
    finally:
        await lane.close()


async def test_what_others_may_have_of_a_budget_by_now_is_asked_for_and_not_used() -> None:
    lane = Lane(is_known=True)
    budgets, data = lane.gateway.pipeline.budgets, json.dumps(BODIES[0]).encode()
    assert budgets is not None
    try:
        await lane.ask(Ask(GOOD % len(data), data, 1, "answers"))
        lane.transport.said.clear()
        lane.node.how, budgets._good_until = "says nothing", -math.inf
        lane.protocol.data_received((GOOD % len(data)).replace(b"KEY", lane.gateway.key.encode()) + data)
        await turns(1)
        assert lane.protocol.fast is None
        await eventually(lambda: budgets._asked is not None)
        assert (lane.share.open, lane.node.streams) == (0, [])
        budgets._good_until = math.inf  # as after a round with the dealer
        assert budgets._asked is not None
        budgets._asked.set_result(None)
        await eventually(lambda: lane.node.streams)
        lane.node.streams[0].answer(REPLY)
        await lane.rest()
        assert lane.transport.said.endswith(REPLY)
    finally:
        await lane.close()


async def test_a_request_whose_node_falls_silent_gets_a_slot_elsewhere_and_needs_it() -> None:
    lane = Lane(is_known=True)
    try:
        stream = await ask_in_vain(lane, BODIES[0])  # type: ignore[arg-type]  # it is an object
        other = lane.gateway.link("m")
        lane.node.windows = Windows(0.0, 0.0, 1e9)
        lane.gateway.dispatcher._keeper.tick()
        assert (lane.protocol.fast, other.active, len(other.streams)) == (None, 1, 0)
        lane.gateway.registry.remove(lane.node)
        await eventually(lambda: other.streams)
        other.streams[0].answer(REPLY)
        await lane.rest()
        assert stream not in lane.node.streams
        assert lane.transport.said.endswith(REPLY)
        assert other.active == 0
    finally:
        await lane.close()


async def test_no_more_heads_are_remembered_than_the_limits_say() -> None:
    async def serve(scope: Scope, _headers: object, _body: bytes) -> None:
        raise AssertionError(scope)

    set_limits(gateway={"known_heads": 3})
    known = KnownRequests({"/x"}, serve, lambda *_: False)
    scope = {"path": "/x", "method": "POST", "http_version": "1.1", "headers": [(b"host", b"a")]}
    request = b"POST /x HTTP/1.1\r\nx: %d\r\ncontent-length: 2\r\n\r\n{}"
    for number in range(100):
        known.learn(request % number, scope)
        assert known.find(request % number) is not None
    assert sum(known.find(request % number) is not None for number in range(100)) <= 3
    before = [known.find(request % number) is None for number in range(100)]
    traced = b"POST /x HTTP/1.1\r\ntraceparent: 00-1\r\ncontent-length: 2\r\n\r\n{}"
    for _ in range(3):  # it never comes again, and costs no other its place
        known.learn(traced, {**scope, "headers": [(b"traceparent", b"00-1")]})
    assert known.find(traced) is None
    assert [known.find(request % number) is None for number in range(100)] == before
    large = b"POST /x HTTP/1.1\r\nx: %b\r\ncontent-length: 2\r\n\r\n{}" % (b"a" * limits().gateway.known_head_bytes)
    known.learn(large, scope)
    assert known.find(large) is None


async def test_a_known_head_lets_no_larger_body_in() -> None:
    set_limits(gateway={"max_body_bytes": 1024})
    message = {"role": "user", "content": "hi"}
    lane = Lane(is_known=True)
    try:
        for size, status in ((1, b"200 "), (1024, b"413 ")):
            body = json.dumps({"model": "m", "messages": [message], "user": "u" * size}).encode()
            seen = await lane.ask(Ask(GOOD % len(body), body, 1, "answers"))
            assert seen.said.startswith(b"HTTP/1.1 " + status)
    finally:
        await lane.close()
