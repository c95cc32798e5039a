"""The usual request without a task, ASGI or a timer: checked, sent on and answered by calls from one socket to the other.

A request whose head is known and whose body came with it is taken here when nothing about it is unusual: a good key, a
model by its own name, a free slot on a node that is asked in the client's own words, and a database that keeps up. Keys,
bodies, models, limits and nodes are judged by the same functions as in ``gateway.request.pipeline``; what they refuse goes
there, to be refused. So does a request that turns out otherwise while it runs (an error of the engine, a lost node, a client
that leaves or reads slowly, a silence, a row that is not written): with its slot, its record and what came of its answer.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from django.conf import settings
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol, Handle, KnownCycle, KnownHead
from gateway import metrics
from gateway.errors import GatewayError
from gateway.request.attempt import Exchange, KeepAlive, count_answer_chars, find_usage, read_usage
from gateway.request.budgets import Reservation
from gateway.request.candidates import Candidate
from gateway.request.client import SCOPE_LINE
from gateway.request.dispatch import Job, Lease
from gateway.request.identity import RateState
from gateway.request.models import KeyEntry, check_caps, choose_priority
from gateway.request.pipeline import Call, Pipeline
from gateway.request.records import COMPLETED, count_tokens
from gateway.request.response import admit_origin, id_headers, name_node, render_head
from gateway.request.traces import RequestTrace, begin_trace
from gateway.values import Header, InferenceRequest, ModelEntry, Record
from gateway.views.endpoints import Inference
from nodes.links import EndKind, LinkEnd, Sink, Stream
from nodes.links.ejections import Trial, Verdict
from nodes.session import OpenRequest
from wire import clock
from wire.client_address import TrustedProxies
from wire.contract import RequestState
from wire.events import EndReader, open_end_reader
from wire.ids import format_id, new_uuid7
from wire.limits import WIRE

if TYPE_CHECKING:
    from wire.spans import Traces

# A member takes ten times as long to look up.
_OK = int(HTTPStatus.OK)
_COMPLETE, _GOOD, _RUNNING = EndKind.COMPLETE, Verdict.GOOD, RequestState.RUNNING


@dataclass(slots=True, eq=False)
class Plan:
    """What a known head and a model come to while keys, models and aliases stay as they are; also who asks."""

    key: KeyEntry
    entry: ModelEntry
    priority: str
    headers: Mapping[str, str] | None
    tenant: str
    key_id: uuid.UUID | None
    request_id: str = ""
    used_at: float = 0.0
    """Unix seconds at which the use of the key was noted last."""


class FastPath:
    """Takes usual requests of one gateway. ``inference``: what serves each inference path otherwise."""

    def __init__(self, pipeline: Pipeline, inference: Mapping[str, Inference]) -> None:
        self.pipeline = pipeline
        self.inference = {path: one for path, one in inference.items() if not (one.surface.is_form or one.surface.translate)}
        self.proxies: TrustedProxies | None = settings.TRUSTED_PROXIES or None
        self.origins = settings.CORS_ORIGINS
        limits = pipeline.limits
        self.max_stream_bytes, self.whole_bytes = limits.max_stream_bytes, min(limits.hold_bytes, limits.end_bytes)
        self.running: set[FastRequest] = set()
        self.look_s = min(limits.closed_s, limits.stream_ping_s / 4)
        self.grant_bytes = WIRE.stream_window_bytes // 8
        self._timer: asyncio.TimerHandle | None = None
        self._version = -1
        self._plans: dict[tuple[KnownHead, str], Plan] = {}
        """Of ``_version`` of the catalogue."""
        self._heads: dict[int, tuple[dict[str, str], bytes]] = {}
        self.default: tuple[object, bytes] = None, b""
        """The headers of every answer, of which the server makes a new list each second, and their lines."""
        self._node_heads: dict[tuple[str, str], bytes] = {}

    def begin(self, connection: GatewayHttpProtocol, head: KnownHead, body: bytes) -> bool:
        """Take a request that came whole; False: it is served as every other one."""
        pipeline, path = self.pipeline, head.scope["path"]
        if path not in self.inference or pipeline.is_stopping or not pipeline.records.keeps_up:
            return False
        now = clock.monotonic()
        try:
            request = self.inference[path].surface.parse(body, head.headers)
            plan = self._plan(head, request)
            if plan is None or check_caps(plan.entry, request) is not None:
                return False
            link = pipeline.dispatcher.find_free(plan, request, now)
            if link is None or link.is_peer or not (link.carries_bytes and link.reports_usage):
                return False
            caller = plan.key.caller
            reservation = None
            if caller.budgets and pipeline.budgets is not None:
                reservation = pipeline.draft_reservation(pipeline.budgets, caller, request, (plan.entry,))
                if pipeline.budgets.must_ask(reservation, now):  # the pipeline does, or says no
                    return False
            rate = pipeline.limiter.take(caller.key_id, caller.requests_per_minute, now)
        except GatewayError:
            return False
        lease = pipeline.dispatcher.grant(link, request.model, path, now, pipeline.dispatcher.choice)
        if reservation is not None:
            reservation.book(now)
        taken = FastRequest(self, connection, head, plan, request, lease, rate, reservation, now)
        connection.cycle, connection.fast = taken, taken  # type: ignore[assignment]
        self.running.add(taken)
        if self._timer is None:
            self._timer = connection.loop.call_later(self.look_s, self._look, connection.loop)
        taken.start()
        return True

    def _plan(self, head: KnownHead, request: InferenceRequest) -> Plan | None:
        """Return what a head and a model come to; None: it is for the pipeline to say. Raises GatewayError."""
        keys = self.pipeline.keys
        version, now = keys.catalogue.version, clock.unix_s()
        if self._version != version or len(self._plans) > self.pipeline.limits.known_heads:
            self._plans.clear()
            self._version = version
        plan = self._plans.get((head, request.model))
        if plan is None:
            key = keys.find(head.headers)
            if key is None or request.options is not None:
                return None
            entry, *others = self.pipeline.admission.admit(key.caller, request)
            if others or entry.name != request.model or entry.fallbacks:
                return None
            plan = self._plans[head, request.model] = Plan(
                key, entry, choose_priority(key.caller, None), head.headers, key.caller.tenant, key.caller.key_id
            )
        is_changed = (plan.entry.tidy or plan.entry.resumes) and request.is_streaming
        if request.options is not None or is_changed or not plan.key.is_usable(now):
            return None
        if now - plan.used_at > 1.0 or now < plan.used_at:
            keys.used[plan.key.caller.key_id] = plan.used_at = now
        return plan

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give what takes long to the pipeline, which keeps silent streams alive and ends what is late."""
        now = clock.monotonic()
        for one in list(self.running):
            if one.is_slow(now):
                one.hand_over()
        self._timer = loop.call_later(self.look_s, self._look, loop) if self.running else None

    def render_head(self, headers: dict[str, str]) -> bytes:
        """Return the lines of an engine's head that its client gets. Links say the usual heads with the same object."""
        known = self._heads.get(id(headers))
        if known is not None and known[0] is headers:
            return known[1]
        lines = _join(render_head(headers, queue_ms=0, is_event_stream=_is_event_stream(headers)))
        if len(self._heads) >= self.pipeline.limits.known_answer_heads:
            self._heads.clear()
        self._heads[id(headers)] = headers, lines
        return lines

    def render_origin(self, node: str, model: str) -> bytes:
        known = self._node_heads.get((node, model))
        if known is None:
            if len(self._node_heads) >= self.pipeline.limits.known_answer_heads:
                self._node_heads.clear()
            known = self._node_heads[node, model] = _join(name_node(node, model))
        return known


def _join(headers: Iterable[Header]) -> bytes:
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def _admit_page(headers: Mapping[str, str]) -> bytes:
    return _join(admit_origin(headers, settings.CORS_ORIGINS))


class _Over:
    """What uvicorn looks at of a cycle that is over, for all of them."""

    disconnected = more_body = False
    keep_alive = response_started = response_complete = True
    message_event = asyncio.Event()


_OVER = _Over()


class FastRequest(KnownCycle, Sink):
    """One request; also the sink of its node's stream, and what the node is judged by (``nodes.links.ejections.Answer``)."""

    # Assigned in ``__init__``: of more than 30 attributes without slots each one is looked up in a dictionary.
    __slots__ = (
        "_accepted", "_beginning", "_connection", "_head", "_is_durable", "_last", "_lease", "_number", "_path", "_plan",
        "_rate", "_record", "_record_id", "_reservation", "_seen_at", "_seen_events", "_trace", "_trial", "_ungranted",
        "bytes_out", "ends", "events", "first_byte_at", "headers", "is_closing", "parts", "received", "request", "request_id",
        "started", "status", "stream", "tail", "was_blocked",
    )  # fmt: skip

    def __init__(
        self,
        path: FastPath,
        connection: GatewayHttpProtocol,
        head: KnownHead,
        plan: Plan,
        request: InferenceRequest,
        lease: Lease,
        rate: RateState,
        reservation: Reservation | None,
        now: float,
    ) -> None:
        super().__init__(connection, head.scope)
        self._path, self._connection, self._head = path, connection, head
        self._plan, self.request, self._lease, self._rate, self._reservation = plan, request, lease, rate, reservation
        self.started = self._seen_at = now
        self.stream: Stream | None = None
        self.ends: EndReader | None = None
        self.first_byte_at: float | None = None
        # The end of the answer, once it is whole: its closing events, or all of its body.
        self._last: bytes | None = None
        self.parts: list[bytes] = []
        self.headers: dict[str, str] = _NO_HEADERS
        self.tail = b""
        self.status = self.received = self.events = self.bytes_out = self._seen_events = self._ungranted = 0
        self.is_closing = self.was_blocked = self._is_durable = False
        self._accepted: asyncio.Future[None] | None = None
        """Whom the pipeline has wait for the row, once this was handed over."""
        self._beginning = b""
        """Status and headers of a stream, made while the engine is thinking."""
        self._record: Record | None = None
        self._trace: RequestTrace | None = None
        self._record_id = new_uuid7()
        self.request_id = format_id("req", self._record_id)

    def start(self) -> None:
        """Ask the node, then write the row: what need not be there before the node is asked is made meanwhile."""
        pipeline, request, lease = self._path.pipeline, self.request, self._lease
        metrics.COUNTERS.in_flight += 1
        self._number = pipeline.dispatcher.take_number()
        headers = request.headers
        if pipeline.traces is not None and pipeline.traces.keeps_root(self._record_id.int):  # no known head has a traceparent
            headers = self._begin_trace(pipeline.traces)
        opened = OpenRequest(
            request_id=self.request_id,
            attempt=1,
            model=request.model,
            path=request.endpoint,
            body=request.body,
            headers=headers,
            is_streaming=request.is_streaming,
            deadline_ms=int(pipeline.limits.request_s * 1000),
            tenant=self._plan.key.caller.tenant,
            priority=self._plan.priority,
        )
        self.stream = lease.link.open_stream(opened, self)
        self._connection.loop.call_soon(self._enter)  # links write what they send in the turn of the loop before

    def _begin_trace(self, traces: Traces) -> dict[str, str]:
        """Return the headers that the node gets."""
        request, at = self.request, self.started
        self._trace = begin_trace(traces, self._head.headers, request.endpoint, self._record_id, at=at)
        if self._trace is None:
            return request.headers
        return {**request.headers, **self._trace.begin_attempt(self._lease.link, request.model, number=1, at=at)}

    def _enter(self) -> Record:
        """Write the row, and have the node judged, unless that has begun; return the record."""
        if self._record is not None:
            return self._record
        path, request, lease, caller = self._path, self.request, self._lease, self._plan.key.caller
        record = path.pipeline.recorder.make_record(self._record_id, caller, request, asked_model=request.model)
        record.queue_ms, record.attempts = 0, 1
        record.node_id, record.node_name = lease.link.node_id, lease.link.node_name
        if lease.choice is not None:
            record.decision = path.pipeline.dispatcher.describe(lease)
        record.state = _RUNNING
        if self._reservation is not None:
            record.reserved_tokens, record.reserved_micros = self._reservation.tokens, self._reservation.micros
        self._record = record
        self._trial: Trial = path.pipeline.dispatcher.ejections.begin(
            lease.link,
            request.model,
            caller=caller.key_id,
            is_streaming=request.is_streaming,
            answer=self,
            now=self.started,
            probed=lease.probed,
        )
        path.pipeline.records.enter(record, self._take_row)
        if path.pipeline.recorder.logs_dispatch:
            path.pipeline.recorder.note_dispatch(record)
        return record

    def is_slow(self, now: float) -> bool:
        """Whether its deadline is near, its stream has been silent for half of what may be, or has said all it has to say."""
        if self._last is not None:
            return False
        if self._seen_events != self.events:
            self._seen_events, self._seen_at = self.events, now
        path, limits = self._path, self._path.pipeline.limits
        if self.request.is_streaming and (self.is_closing or now - self._seen_at >= limits.stream_ping_s / 2):
            return True
        return now + 2 * path.look_s > self.started + limits.request_s

    def find_failover(self) -> tuple[Job, tuple[str, ...]] | None:
        """Return what ``Exchange.find_failover`` does: from now on the pipeline has a request that may need another node."""
        return None if self.first_byte_at is not None or self._last is not None else self.hand_over().find_failover()

    # nodes.links.Sink

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        if status != _OK or (self.request.is_streaming and not _is_event_stream(headers)):
            self.hand_over().on_head(status, headers)
            return
        self.status, self.headers = status, headers
        if self._is_durable:
            self._beginning = self._render_beginning()

    def on_data(self, data: bytes) -> None:
        """Pass a stream on, or keep the parts of an answer until it is whole."""
        size = len(data)
        if not self.request.is_streaming:
            self._take_part(data, size)
            return
        if self._connection.flow.write_paused or self.received + size > self._path.max_stream_bytes:
            self.hand_over().on_data(data)
            return
        ends = self.ends
        if ends is None:
            ends = self._open_stream(data)
            if ends is None:
                return
        self.received += size
        self._ungranted += size
        if self._ungranted > self._path.grant_bytes and self.stream is not None:
            self.stream.grant(self._ungranted)
            self._ungranted = 0
        data = ends.feed(data)
        if ends.closing and not self.is_closing:
            self.is_closing = True
            self.events += 1
        if data:
            self.events += 1
            self.bytes_out += len(data)
            self.tail = data
            if self.response_started:
                self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
                return
            self.parts.append(data)
        if self._is_durable and not self.response_started:
            self._say_start()

    def on_end(self, end: LinkEnd) -> None:
        """Finish a whole answer; every other end is judged by the pipeline."""
        ends = self.ends
        is_usual = end.kind is _COMPLETE and self.status and self._record is not None and not self._connection.flow.write_paused
        if is_usual and not self.request.is_streaming:
            self._finish(b"".join(self.parts), end)
        elif is_usual and ends is not None and ends.closing and not (b"error" in ends.recent or b"abort" in ends.recent):
            self._finish(ends.finish(), end)
        else:
            self.hand_over(is_over=True).on_end(end)

    def on_whole(self, status: int, headers: dict[str, str], body: bytes, end: LinkEnd) -> None:
        is_usual = status == _OK and end.kind is _COMPLETE and not self.request.is_streaming
        if (
            not is_usual
            or self._record is None
            or not body
            or len(body) > self._path.whole_bytes
            or self._connection.flow.write_paused
        ):
            self.hand_over(is_over=True).on_whole(status, headers, body, end)
            return
        self.status, self.headers, self.received = status, headers, len(body)
        self.first_byte_at = clock.monotonic()
        self._finish(body, end)

    # inside

    def _finish(self, last: bytes, end: LinkEnd) -> None:
        record = self._record
        assert record is not None
        usage, text_chars = end.detail.usage if end.detail is not None else None, None
        if usage is None and self.ends is not None:
            usage = find_usage(self.ends.recent)
        elif usage is None:
            usage = read_usage(last)
            text_chars = count_answer_chars(last) if usage is None else None
        # The node is done: its slot goes to the next before the record is written.
        self.stream, self._last = None, last
        self._lease.release()
        self._path.pipeline.dispatcher.ejections.end(self._trial, _GOOD, clock.monotonic())
        self.bytes_out += len(last)
        record.status_code = self.status
        if self._trace is not None:
            first_byte_at, answer = (None, last) if self.ends is None else (self.first_byte_at, self.ends.recent)
            self._trace.end_served(self.status, usage, first_byte_at=first_byte_at, answer=answer)
        count_tokens(record, self, usage, text_chars=text_chars)
        if self._is_durable:
            self._conclude()
        elif self._path.pipeline.records.is_entering(record):  # its row is written once, with its end
            self._path.pipeline.recorder.fill_in(record, self, self.started, COMPLETED)

    def _take_part(self, data: bytes, size: int) -> None:
        if self.received + size > self._path.whole_bytes:
            self.hand_over().on_data(data)
            return
        self.received += size
        if self.first_byte_at is None:
            self.first_byte_at = clock.monotonic()
        self.parts.append(data)
        if self.stream is not None:
            self.stream.grant(size)

    def _open_stream(self, data: bytes) -> EndReader | None:
        self.ends = open_end_reader(self.request.endpoint)
        # Nobody knows how such a stream ends.
        if self.ends is None:
            self.hand_over().on_data(data)
            return None
        self.first_byte_at = clock.monotonic()
        return self.ends

    def _take_row(self, error: GatewayError | None) -> None:
        if self._accepted is not None:
            if not self._accepted.done():
                self._accepted.set_result(None) if error is None else self._accepted.set_exception(error)
            return
        if error is not None:
            self.hand_over()
            self._take_row(error)
            return
        self._is_durable = True
        if self.ends is not None and not self.disconnected:
            self._say_start()
        elif self.status and self.request.is_streaming:
            self._beginning = self._render_beginning()
        if self._last is not None:
            self._conclude()

    def _conclude(self) -> None:
        pipeline, record = self._path.pipeline, self._record
        assert record is not None
        if record.state is COMPLETED.state:
            self._deliver(None)
            return
        pipeline.recorder.fill_in(record, self, self.started, COMPLETED)
        pipeline.records.send(record, self._deliver)

    def _deliver(self, _error: GatewayError | None) -> None:
        record = self._record
        assert record is not None
        self._path.running.discard(self)
        trace = "" if self._trace is None else self._trace.trace_id
        self._path.pipeline.recorder.count(record, self.started, bytes_in=len(self.request.body), trace=trace)
        if self._reservation is not None:
            self._path.pipeline.settle(self._reservation, record)
        if self._trace is not None:
            self._trace.finish(record)
        connection, last = self._connection, self._last
        connection.fast = None
        if self.disconnected or last is None:
            return
        if self.request.is_streaming:
            self.transport.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last) if last else b"0\r\n\r\n")
        else:
            self.transport.write(b"".join([*self._render_lines(), b"content-length: %d\r\n\r\n" % len(last), last]))
            self.response_started = True
        self.response_complete = True
        if not self.keep_alive:
            self.transport.close()
        if cast("object", connection.cycle) is self:  # of one that is over nothing else is looked at
            connection.cycle = _OVER  # type: ignore[assignment]
        self.on_response()

    def _say_start(self) -> None:
        self.response_started = True
        pieces = [b"%x\r\n%b\r\n" % (len(part), part) for part in self.parts]
        self.parts.clear()
        self.transport.write(b"".join([self._beginning or self._render_beginning(), *pieces]))

    def _render_beginning(self) -> bytes:
        return b"".join([*self._render_lines(), b"transfer-encoding: chunked\r\n\r\n"])

    def _render_lines(self) -> list[bytes]:
        path, rate, default = self._path, self._rate, self.default_headers
        if default is not path.default[0]:
            path.default = default, _join(default)
        lines = [
            STATUS_LINE[self.status],
            path.default[1],
            path.render_head(self.headers),
            b"x-request-id: %b\r\nx-ratelimit-limit-requests: %d\r\nx-ratelimit-remaining-requests: %d\r\n"
            b"x-ratelimit-reset-requests: %ds\r\n"
            % (self.request_id.encode(), rate.limit, rate.remaining, math.ceil(rate.reset_s)),
            path.render_origin(self._lease.link.node_name, self.request.model),
        ]
        if path.origins:
            lines.append(self._head.headers.derive(_admit_page.__name__, _admit_page))
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        return lines

    # to the pipeline

    def take_lost(self) -> None:
        """The client is gone. An answer that is whole is recorded as one."""
        self.disconnected = True
        if self._last is None:
            self.hand_over()

    def hand_over(self, *, is_over: bool = False) -> Exchange:
        """Give the request to the pipeline; return the attempt, which hears of the node from now on.

        ``is_over``: the stream has ended, and only its end is to be told.
        """
        path, pipeline, connection, entry = self._path, self._path.pipeline, self._connection, self._plan.entry
        path.running.discard(self)
        connection.fast = None
        if not self._is_durable:
            self._accepted = connection.loop.create_future()
        record = self._enter()
        handle = Handle(connection)
        handle.cycle = self
        scope = {**self.scope, "client": connection.client, "server": connection.server, "extensions": {SCOPE_LINE: handle}}
        if path.proxies:
            path.proxies.correct_scope(scope)
        inference = path.inference[self.scope["path"]]
        client = inference.make_client(scope, self._head.headers, self.request.body)
        extra: list[Header] = [*id_headers(self.request_id, is_anthropic=False), *self._rate.headers()]
        call = Call(client, inference.surface, record.id, self.request_id, extra, started=self.started)
        call.bytes_in = len(self.request.body)
        job = call.job = pipeline.dispatcher.new_job(
            request_id=self.request_id,
            candidates=[Candidate(entry, self.request)],
            tenant=self._plan.tenant,
            asked_model=entry.name,
            priority=self._plan.priority,
            key_id=self._plan.key_id,
            headers=self._head.headers,
            weight=self._plan.key.caller.weight,
        )
        job.accepted, job.deadline = self.started, self.started + pipeline.limits.request_s
        job.sequence, job.attempts = self._number, 1
        call.caller, call.record, call.reservation = self._plan.key.caller, record, self._reservation
        call.trace = job.trace = self._trace
        client.watch()
        if self._accepted is not None:
            call.accepted = self._accepted
            client.hold(call.accepted)
        if self.response_started:
            client.started, client.tail = True, self.tail or client.tail
        if self.request.is_streaming:
            call.keepalive = KeepAlive(client, extra=extra, every_s=pipeline.limits.stream_ping_s)
        exchange = call.exchange = pipeline.make_exchange(call, job, self._lease)
        if is_over:
            self.stream = None
        elif self.stream is not None:
            self.stream.sink = exchange
            self.stream.grant(self._ungranted)
        exchange.adopt(self)
        call.trial, self._trial.answer = self._trial, exchange
        if call.keepalive is not None:
            quiet_s = clock.monotonic() - self._seen_at
            call.keepalive.start(quiet_s + path.look_s if self.events else quiet_s)  # what was said last was seen later
        connection.serve_beside(self, inference.serve(client, pipeline.take_over(call, job, record)))
        return exchange


_NO_HEADERS: dict[str, str] = {}


def _is_event_stream(headers: Mapping[str, str]) -> bool:
    return headers.get("content-type", "").startswith("text/event-stream")
