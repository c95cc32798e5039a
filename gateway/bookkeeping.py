"""The record of a request from its first row to its final state: what is written down, and when."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Protocol

from core.limits import limits
from gateway import metrics
from gateway.admission import RateLimiter
from gateway.errors import GatewayError, RateLimited, RecordsUnavailable, ShuttingDown
from gateway.outcome import Served
from gateway.request.records import Record, RecordWriter
from gateway.values import Caller, InferenceRequest, RequestOutcome, judge_outcome
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: the record's final state, and the error if there was one."""

    state: RequestState
    error: GatewayError | None


COMPLETED = Ending(RequestState.COMPLETED, None)
TORN_DOWN = Ending(RequestState.INTERRUPTED, ShuttingDown())
BUGGED = Ending(RequestState.FAILED, GatewayError())
"""How it ends when nothing of ours was raised and the gateway does not stop either."""


class Passage(Protocol):
    """What went through to the client. ``first_byte_at``: clock.monotonic() seconds; ``events``: pieces of a stream."""

    bytes_out: int
    events: int
    first_byte_at: float | None


@dataclass(slots=True)
class Bookkeeper:
    """Writes the records of one gateway process."""

    gateway_id: uuid.UUID
    records: RecordWriter
    _refusals: RateLimiter = field(default_factory=RateLimiter)

    def make_record(self, record_id: uuid.UUID, caller: Caller, request: InferenceRequest, *, asked_model: str = "") -> Record:
        """Return the row of a request, not written yet. ``asked_model``: the client's name for the model, if another."""
        return Record(
            id=record_id,
            created_at=clock.now(),
            gateway_id=self.gateway_id,
            tenant=caller.tenant,
            key_id=caller.key_id,
            key_name=caller.key_name,
            endpoint=request.endpoint,
            model=request.model,
            asked_model="" if asked_model == request.model else asked_model,
            is_streaming=request.is_streaming,
            max_tokens=None if request.max_tokens is None else min(request.max_tokens, limits().gateway.record_integer),
            prompt_tokens_est=request.prompt_chars // limits().gateway.token_chars,
        )

    def record_refusal(
        self, error: GatewayError, caller: Caller, request: InferenceRequest, record_id: uuid.UUID, *, asked_model: str = ""
    ) -> None:
        """Write down what a known caller was refused; nobody waits for that row, and a flood is not written out."""
        try:
            self._refusals.take(caller.key_id, limits().gateway.refusals_per_minute)
        except RateLimited:
            return
        record = self.make_record(record_id, caller, request, asked_model=asked_model)
        record.status_code = error.status
        record.error_code = error.code
        record.latency_ms = 0
        record.finished_at = record.created_at
        record.state = RequestState.REJECTED
        self.records.add_final(record)

    def count_refusal(self, error: GatewayError) -> None:
        """Count a request that was not accepted."""
        metrics.REFUSALS.labels(error.code).inc()
        metrics.TALLY.count(judge_outcome(error.state, error.status) or RequestOutcome.FAILED)

    def forget_idle(self) -> None:
        """Drop what is remembered of callers that were refused nothing for a minute."""
        self._refusals.forget_idle()

    def note_wait(self, record: Record, *, model: str, asked_model: str) -> None:
        """Write down that a request waits for a box with a model, where its row says something else.

        Another model than the first was chosen then, or the box was lost that worked on it.
        """
        if record.state is RequestState.QUEUED and record.model == model:
            return
        name_model(record, model, asked_model=asked_model)
        record.state = RequestState.QUEUED
        self.records.touch(record)

    def note_start(self, record: Record) -> None:
        """Write down that the node gets the request now: in the turn of the loop that assigned it, so both are one write."""
        record.state = RequestState.RUNNING
        self.records.touch(record)

    def is_refused(self, record: Record) -> bool:
        """Whether the writer could not make a row durable in time, and closed the record."""
        return record.state is RequestState.REJECTED and record.error_code == RecordsUnavailable.code

    def require_open(self, record: Record) -> None:
        """Raise RecordsUnavailable for a record that the writer has closed: nothing more is begun for it."""
        if self.is_refused(record):
            raise RecordsUnavailable(retry_after_s=2)

    def seal(self, record: Record, ending: Ending) -> None:
        """Fill in how it ended. The state is set last: the writer may read the row at any moment."""
        if ending.error is not None:
            record.error_code = ending.error.code
            if record.status_code is None:
                record.status_code = ending.error.status
            is_refused = judge_outcome(ending.state, record.status_code) is RequestOutcome.REFUSED
            (metrics.REFUSALS if is_refused else metrics.ERRORS).labels(ending.error.code).inc()
        record.finished_at = clock.now()
        record.state = ending.state
        self.records.touch(record)

    def finish(self, record: Record, passage: Passage | None, started: float, ending: Ending) -> None:
        """Write the final state, once; a request that was torn down (the gateway stops) ends as interrupted."""
        if record.state not in OPEN_REQUEST_STATES:
            return
        if passage is not None:
            record.bytes_out = passage.bytes_out
            if passage.first_byte_at is not None:
                record.ttfb_ms = int((passage.first_byte_at - started) * 1000)
            if passage.events and record.completion_tokens is None:  # it broke, or was left: what came until then was made too
                count_tokens(record, Served(200, None), passage)
        elapsed = clock.monotonic() - started
        record.latency_ms = int(elapsed * 1000)
        self.seal(record, ending)
        metrics.TALLY.in_flight -= 1
        metrics.TALLY.add(
            model=record.model,
            state=record.state,
            outcome=judge_outcome(record.state, record.status_code) or RequestOutcome.FAILED,
            latency_s=elapsed,
            ttfb_s=record.ttfb_ms / 1000 if record.ttfb_ms is not None else None,
            queue_s=record.queue_ms / 1000 if record.queue_ms is not None else None,
            tokens=(record.prompt_tokens or 0, record.completion_tokens or 0),
        )


def name_model(record: Record, model: str, *, asked_model: str) -> None:
    """Have a record name the model that is asked, and what the client called it where that is another name."""
    record.model = model
    record.asked_model = "" if asked_model == model else asked_model


def unread_request(endpoint: str) -> InferenceRequest:
    """Return what is known of a request whose body could not be read."""
    return InferenceRequest(
        endpoint=endpoint, model="", is_streaming=False, max_tokens=None, prompt_chars=0, body=b"", headers={}
    )


def count_tokens(record: Record, outcome: Served, passage: Passage) -> None:
    """Fill in the tokens: what the engine counted, else an estimate that is marked as one."""
    usage = outcome.usage
    if usage is not None:
        record.prompt_tokens = min(max(0, usage.prompt_tokens), limits().gateway.record_integer)
        record.completion_tokens = min(max(0, usage.completion_tokens), limits().gateway.record_integer)
    elif outcome.status < 400:
        record.tokens_estimated = True
        record.prompt_tokens = record.prompt_tokens_est
        events = max(0, passage.events - 1)
        said = outcome.text_chars if outcome.text_chars is not None else passage.bytes_out
        record.completion_tokens = events if record.is_streaming else -(-said // limits().gateway.token_chars)
