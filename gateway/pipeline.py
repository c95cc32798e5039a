"""The life of a request as one function: who, what, may it, write it down, find a box, relay, close the record."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import assert_never

from gateway import metrics
from gateway.admission import Admission, RateLimiter
from gateway.auth import KeyRing
from gateway.client import ClientConnection, Header
from gateway.dialects import Surface
from gateway.dispatch import Dispatcher, Job, Lease
from gateway.errors import (
    ForwardedRequestFailed,
    GatewayError,
    RateLimited,
    RecordsUnavailable,
    RequestInterrupted,
    RequeueExhausted,
    ShuttingDown,
)
from gateway.records import MAX_COUNT, Record, RecordWriter
from gateway.relay import Broken, Exchange, Outcome, Retry, RetryReason, Served
from gateway.values import Caller, InferenceRequest, Limits, Priority, Timeouts
from wire.contract import RequestState
from wire.ids import format_id, new_uuid7

_CHARS_PER_TOKEN = 4
_RECORDED_REFUSALS_PER_MINUTE = 60
_PARSED_BESIDE_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: the record's final state, and the error if there was one."""

    state: RequestState
    error: GatewayError | None


_TORN_DOWN = Ending(RequestState.INTERRUPTED, ShuttingDown())


@dataclass(slots=True)
class Pipeline:
    """The stages and what they share. One per gateway process."""

    gateway_id: uuid.UUID
    keys: KeyRing
    limiter: RateLimiter
    admission: Admission
    dispatcher: Dispatcher
    records: RecordWriter
    limits: Limits
    timeouts: Timeouts
    is_stopping: bool = False
    _refusals: RateLimiter = field(default_factory=RateLimiter)

    async def serve(self, client: ClientConnection, surface: Surface) -> None:
        """Answer one inference request. The only place that calls the stages in sequence."""
        record_id = new_uuid7()
        request_id = format_id("req", record_id)
        extra: list[Header] = [(b"x-request-id", request_id.encode())]
        record: Record | None = None
        exchange: Exchange | None = None
        started = time.monotonic()
        ending = _TORN_DOWN
        try:
            if self.is_stopping:
                raise ShuttingDown(retry_after_s=2)
            caller = await self.keys.identify(client.headers, allow_x_api_key=True)
            body = await client.read_body(self.limits.max_audio_bytes if surface.is_form else None)
            record, job = await self._admit(client, surface, caller, body, record_id, extra)
            while True:
                lease = await self._find_slot(client, job, record)
                exchange = Exchange(job=job, lease=lease, client=client, surface=surface, limits=self.limits, extra=extra)
                outcome = await exchange.run()
                if not self._should_retry(outcome, job, lease):
                    break
            await client.drain()  # until then the server would cut what the client has not taken
            ending = self._conclude(outcome, record, exchange)
        except GatewayError as error:
            ending = Ending(error.state, error)
            self._refuse(error, client, surface, request_id, extra)
        finally:
            client.unwatch()
            if record is not None:
                self._finish_record(record, exchange, started, ending)
            elif ending.error is not None:
                metrics.REFUSALS.labels(ending.error.code).inc()

    # stages

    async def _admit(
        self,
        client: ClientConnection,
        surface: Surface,
        caller: Caller,
        body: bytes,
        record_id: uuid.UUID,
        extra: list[Header],
    ) -> tuple[Record, Job]:
        """Check, then accept: from the durable row on, the request reaches exactly one final state."""
        request: InferenceRequest | None = None
        try:
            rate = self.limiter.take(caller.key_id, caller.requests_per_minute)
            extra += rate.headers()
            request = await _parse(surface, body, client)
            model = self.admission.admit(caller, request)
            self.dispatcher.refuse_disabled(model.name)
            self.dispatcher.check_room(model.name, request.endpoint, model.max_queue)
        except GatewayError as error:
            if isinstance(error, RateLimited):
                extra += self.limiter.peek(caller.key_id, caller.requests_per_minute).headers()
            self._record_refusal(error, caller, surface, request, record_id)
            raise
        request_id = format_id("req", record_id)
        job = self.dispatcher.new_job(
            request_id=request_id,
            request=request,
            tenant=caller.tenant,
            max_queue=model.max_queue,
            priority="" if caller.priority is Priority.NORMAL else caller.priority.value,
        )
        record = self._new_record(record_id, caller, request)
        client.watch()
        metrics.TALLY.in_flight += 1
        try:
            await client.wait(self.records.accept(record))
        except GatewayError as error:
            metrics.TALLY.in_flight -= 1
            if not isinstance(error, RecordsUnavailable):
                self._seal(record, Ending(error.state, error))
                self.records.touch(record)
            raise
        return record, job

    async def _find_slot(self, client: ClientConnection, job: Job, record: Record) -> Lease:
        asked_at = time.monotonic()
        found = self.dispatcher.acquire(job)
        try:
            lease = found if isinstance(found, Lease) else await client.wait(found)
        except asyncio.CancelledError:
            if isinstance(found, asyncio.Future) and found.done() and not found.cancelled() and found.exception() is None:
                found.result().release()  # granted in the same loop turn as the cancel
            raise
        job.attempts += 1
        record.queue_ms = (record.queue_ms or 0) + int((time.monotonic() - asked_at) * 1000)
        record.attempts = job.attempts
        record.node_id = lease.link.node_id
        record.node_name = lease.link.node_name
        record.state = RequestState.RUNNING if job.request.is_streaming else RequestState.ASSIGNED
        self.records.touch(record)
        return lease

    def _should_retry(self, outcome: Outcome, job: Job, lease: Lease) -> bool:
        """Decide whether another box gets the request. Raises RequeueExhausted when it had its chances."""
        if not isinstance(outcome, Retry):
            return False
        if self.is_stopping:
            raise ShuttingDown(retry_after_s=2)
        metrics.REDISPATCHES.labels(outcome.reason).inc()
        if outcome.reason is RetryReason.BUSY:
            job.avoid.add(lease.link)
            self.dispatcher.note_busy(lease.link)
            return True
        job.losses += 1
        job.avoid.add(lease.link)
        if job.losses > self.limits.max_requeues:
            raise RequeueExhausted(retry_after_s=5) if isinstance(outcome.error, RequestInterrupted) else outcome.error
        if outcome.reason is RetryReason.RECLAIMED and self.dispatcher.explain(job.request) is not None:
            raise RequestInterrupted(retry_after_s=5)
        if outcome.reason is RetryReason.ENGINE and self.dispatcher.explain(job.request) is not None:
            raise ForwardedRequestFailed(retry_after_s=2)
        return True

    # endings

    def _conclude(self, outcome: Outcome, record: Record, exchange: Exchange) -> Ending:
        match outcome:
            case Served():
                self._count_tokens(record, outcome, exchange)
                record.status_code = outcome.status
                if outcome.status < 400:
                    return Ending(RequestState.COMPLETED, None)
                return Ending(RequestState.FAILED, ForwardedRequestFailed())
            case Broken():
                if not outcome.told:
                    raise outcome.error
                return Ending(outcome.error.state, outcome.error)
            case Retry():
                raise AssertionError("a retry never concludes a request")
            case _:
                assert_never(outcome)

    def _refuse(
        self, error: GatewayError, client: ClientConnection, surface: Surface, request_id: str, extra: list[Header]
    ) -> None:
        """Say the error, if anybody listens and nothing was said before."""
        if not client.is_gone and not client.started:
            send_error(client, surface, error, request_id, extra)

    def _seal(self, record: Record, ending: Ending) -> None:
        """Fill in how it ended. The state is set last: the writer may read the row at any moment."""
        if ending.error is not None:
            record.error_code = ending.error.code
            if record.status_code is None:
                record.status_code = ending.error.status
            metrics.ERRORS.labels(ending.error.code).inc()
        record.finished_at = datetime.now(UTC)
        record.state = ending.state

    def _finish_record(self, record: Record, exchange: Exchange | None, started: float, ending: Ending) -> None:
        """Write the final state; a request that was torn down (the gateway stops) ends as interrupted."""
        if exchange is not None:
            record.bytes_out = exchange.bytes_out
            if exchange.first_byte_at is not None:
                record.ttfb_ms = int((exchange.first_byte_at - started) * 1000)
        elapsed = time.monotonic() - started
        record.latency_ms = int(elapsed * 1000)
        self._seal(record, ending)
        self.records.touch(record)
        metrics.TALLY.in_flight -= 1
        metrics.TALLY.add(
            model=record.model,
            state=record.state,
            latency_s=elapsed,
            ttfb_s=record.ttfb_ms / 1000 if record.ttfb_ms is not None else None,
            queue_s=record.queue_ms / 1000 if record.queue_ms is not None else None,
            tokens=(record.prompt_tokens or 0, record.completion_tokens or 0),
        )

    def _count_tokens(self, record: Record, outcome: Served, exchange: Exchange) -> None:
        usage = outcome.usage
        if usage is not None:
            record.prompt_tokens = min(max(0, usage.prompt_tokens), MAX_COUNT)
            record.completion_tokens = min(max(0, usage.completion_tokens), MAX_COUNT)
        elif outcome.status < 400:
            record.tokens_estimated = True
            record.prompt_tokens = record.prompt_tokens_est
            events = max(0, exchange.events - 1)
            said = outcome.text_chars if outcome.text_chars is not None else exchange.bytes_out
            record.completion_tokens = events if record.is_streaming else -(-said // _CHARS_PER_TOKEN)

    # records

    def _new_record(self, record_id: uuid.UUID, caller: Caller, request: InferenceRequest) -> Record:
        return Record(
            id=record_id,
            created_at=datetime.now(UTC),
            gateway_id=self.gateway_id,
            tenant=caller.tenant,
            key_id=caller.key_id,
            key_name=caller.key_name,
            endpoint=request.endpoint,
            model=request.model,
            is_streaming=request.is_streaming,
            max_tokens=None if request.max_tokens is None else min(request.max_tokens, MAX_COUNT),
            prompt_tokens_est=request.prompt_chars // _CHARS_PER_TOKEN,
        )

    def _record_refusal(
        self,
        error: GatewayError,
        caller: Caller,
        surface: Surface,
        request: InferenceRequest | None,
        record_id: uuid.UUID,
    ) -> None:
        """Write down what a known caller was refused; nobody waits for that row, and a flood is not written out."""
        try:
            self._refusals.take(caller.key_id, _RECORDED_REFUSALS_PER_MINUTE)
        except RateLimited:
            return
        parsed = request or InferenceRequest(
            endpoint=surface.path,
            model="",
            is_streaming=False,
            wants_usage=False,
            max_tokens=None,
            prompt_chars=0,
            body=b"",
            headers={},
        )
        record = self._new_record(record_id, caller, parsed)
        record.status_code = error.status
        record.error_code = error.code
        record.latency_ms = 0
        record.finished_at = record.created_at
        record.state = RequestState.REJECTED
        self.records.add_final(record)


async def _parse(surface: Surface, body: bytes, client: ClientConnection) -> InferenceRequest:
    """Read a body, a large form in a thread: it is walked in small steps, between which the event loop gets its turn."""
    if surface.is_form and len(body) > _PARSED_BESIDE_BYTES:
        return await asyncio.to_thread(surface.parse, body, client.headers)
    return surface.parse(body, client.headers)


def send_error(client: ClientConnection, surface: Surface, error: GatewayError, request_id: str, extra: list[Header]) -> None:
    """Send an error as a whole response in the surface's dialect."""
    headers: list[Header] = [(b"content-type", b"application/json"), *extra]
    if surface.is_anthropic:
        headers.append((b"request-id", request_id.encode()))
    if error.retry_after_s is not None:
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s))))
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    client.respond(error.status, headers, surface.render_error(error, request_id))
