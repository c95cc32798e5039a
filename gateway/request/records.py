"""Request records with group commit: one transaction for all that waits, flushed at once when the writer is idle.

A request is accepted when its row is durable; that is what ``accept`` waits for. Later changes ride along with the next
commit, at most ``records_linger_s`` later. A final state goes at once: ``finish`` is done when the kernel has its statement, so
that PostgreSQL carries it out even if this process is killed; only then the client gets its last bytes. A final state is never
overwritten: the statement changes open rows only, so a gateway that was declared dead and comes back changes nothing. The
event loop writes on a connection of its own, one commit under way at a time; rows travel as one JSON text.

What could not be accepted because the database did not take it in time gets a row too, a final one, once it is back: in
small portions beside the others, and no more of them than the writer may hold.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Protocol, get_args

import msgspec
import psycopg
from django.db import connection as django_connection

from core.db.base import ServerSilent
from core.db.loop import LoopConnection
from core.limits import limits
from gateway import metrics
from gateway.errors import GatewayError, RateLimited, RecordsUnavailable, ShuttingDown
from gateway.metrics import RECORDS_DROPPED
from gateway.request.access_log import AccessLog, Refused, make_line, make_refusal_line
from gateway.request.identity import RateLimiter
from gateway.services.usage import ADD_USAGE, RECORDED
from gateway.values import Caller, Decided, InferenceRequest, Record, RequestOutcome, judge_outcome
from wire import clock
from wire.bridge import TokenCounts
from wire.contract import OPEN_REQUEST_STATES, RequestState
from wire.ids import format_id

logger = logging.getLogger("muster.records")

_SQL = {
    uuid.UUID: "uuid",
    datetime: "timestamptz",
    str: "text",
    RequestState: "text",
    bool: "boolean",
    int: "integer",
    Decided: "jsonb",
}
_WIDTHS = {
    "status_code": "smallint",
    "attempts": "smallint",
    "bytes_out": "bigint",
    "reserved_tokens": "bigint",
    "reserved_micros": "bigint",
}
_TYPES = {
    one.name: _WIDTHS.get(one.name) or _SQL[(get_args(one.type) or (one.type,))[0]] for one in msgspec.structs.fields(Record)
}
_FIXED = {"id", "created_at", "gateway_id", "tenant", "key_id", "key_name", "endpoint", "is_streaming"}
_COLUMNS = ", ".join(_TYPES)
_RECORDSET = ", ".join(f"{name} {kind}" for name, kind in _TYPES.items())
_DEFAULTS = {one.name: one.default for one in msgspec.structs.fields(Record) if one.default not in (None, msgspec.NODEFAULT)}
"""A value that is the default does not travel."""


def _value(name: str) -> str:
    if name not in _DEFAULTS:
        return f"i.{name}"
    literal = repr(str(_DEFAULTS[name])) if _TYPES[name] == "text" else str(_DEFAULTS[name]).lower()
    return f"coalesce(i.{name}, {literal})"


_VALUES = ", ".join(map(_value, _TYPES))
_ASSIGNMENTS = ", ".join(f"{name} = excluded.{name}" for name in _TYPES if name not in _FIXED)
_OPEN = ", ".join(f"'{state.value}'" for state in sorted(OPEN_REQUEST_STATES))
# A row that was completed on its way in, and of which nobody knew whether it got in, was completed for nobody.
_IS_UNDONE = f"r.state = '{RequestState.COMPLETED.value}' AND excluded.error_code = '{RecordsUnavailable.code}'"
WRITE = "records_write"
"""Name of the one statement: it adds rows, and changes those that are there and open."""
# Built from the constants above alone; values travel as parameters. A row is found by its primary key, in the partition of its
# day: an UPDATE that joins the rows is planned by what PostgreSQL believes to know of their number, and reads the whole day
# where it knows nothing yet. An id is made once, so a row that is there already is the same one.
STATEMENTS = {
    WRITE: f"WITH written AS (INSERT INTO gateway_requestrecord AS r ({_COLUMNS}) SELECT {_VALUES} "  # noqa: S608
    f"FROM json_to_recordset($1::json) AS i({_RECORDSET}) "
    f"ON CONFLICT (id, created_at) DO UPDATE SET {_ASSIGNMENTS} WHERE r.state IN ({_OPEN}) OR {_IS_UNDONE}"
    # The one statement that makes a row final writes what it used, so that both are there or neither.
    f" RETURNING {RECORDED}) {ADD_USAGE.format(source='written')}"
}


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request ended: the record's final state, and the error if there was one."""

    state: RequestState
    error: GatewayError | None


COMPLETED = Ending(RequestState.COMPLETED, None)
TORN_DOWN = Ending(RequestState.INTERRUPTED, ShuttingDown())
BUGGED = Ending(RequestState.FAILED, GatewayError())
"""How it ends when nothing of ours was raised and the gateway does not stop either."""


class AnswerProgress(Protocol):
    """What went through to the client. ``first_byte_at``: clock.monotonic() seconds; ``events``: pieces of a stream."""

    bytes_out: int
    events: int
    first_byte_at: float | None


@dataclass(slots=True)
class Recorder:
    """Writes the records of one gateway process."""

    gateway_id: uuid.UUID
    records: RecordWriter
    _refusals: RateLimiter = field(default_factory=RateLimiter)
    logs_dispatch: bool = field(default_factory=lambda: logger.isEnabledFor(logging.DEBUG))
    """Whether the log says of each request which node got it: at the level ``debug``."""
    access: AccessLog | None = None
    """None: nobody wants lines."""

    def make_record(self, record_id: uuid.UUID, caller: Caller, request: InferenceRequest, *, asked_model: str = "") -> Record:
        """Return the row of a request, not written yet. ``asked_model``: the client's name for the model, if another."""
        bounds = limits().gateway
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
            max_tokens=None if request.max_tokens is None else min(request.max_tokens, bounds.record_integer),
            prompt_tokens_est=request.prompt_chars // bounds.token_chars,
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

    def count_refusal(self, error: GatewayError, refused: Refused) -> None:
        metrics.REFUSALS.labels(error.code).inc()
        outcome = judge_outcome(error.state, error.status) or RequestOutcome.FAILED
        metrics.COUNTERS.count(outcome)
        if self.access is not None and not self.access.skips(outcome):
            self.access.add(make_refusal_line, clock.now(), error, outcome, refused)

    def forget_idle(self) -> None:
        self._refusals.forget_idle()

    def note_wait(self, record: Record, *, model: str, asked_model: str) -> None:
        """Write down that a request waits for a node with a model, where its row says something else.

        Another model than the first was chosen then, or the node was lost that worked on it.
        """
        if record.state is RequestState.QUEUED and record.model == model:
            return
        name_model(record, model, asked_model=asked_model)
        record.state = RequestState.QUEUED
        self.records.touch(record)

    def note_dispatch(self, record: Record) -> None:
        """Say which node got a request, where ``logs_dispatch``."""
        logger.debug(
            "request.dispatched request=%s node=%s model=%s attempt=%d queue_ms=%d",
            format_id("req", record.id), record.node_name, record.model, record.attempts, record.queue_ms or 0,
        )  # fmt: skip

    def note_start(self, record: Record) -> None:
        record.state = RequestState.RUNNING
        # In the turn of the loop that assigned the node, so both are one write.
        self.records.touch(record)

    def note_loss(self, record: Record, node_id: uuid.UUID, *, model: str, reason: str) -> None:
        """Write down that a node failed, and when: the row will name another one."""
        after_ms = max(0, round((clock.now() - record.created_at).total_seconds() * 1000))
        logger.info(
            "request.requeued request=%s node=%s model=%s reason=%s",
            format_id("req", record.id),
            record.node_name,
            model,
            reason,
        )
        record.lost_attempts += f"{node_id.hex} {model}\t{after_ms}\t{reason}\n"

    def is_refused(self, record: Record) -> bool:
        """Whether the writer could not make a row durable in time, and closed the record."""
        return record.state is RequestState.REJECTED and record.error_code == RecordsUnavailable.code

    def require_open(self, record: Record) -> None:
        """Raise RecordsUnavailable for a record that the writer has closed: nothing more is begun for it."""
        if self.is_refused(record):
            raise RecordsUnavailable(retry_after_s=2)

    def seal(self, record: Record, ending: Ending) -> None:
        self._seal(record, ending)
        self.records.touch(record)

    def _seal(self, record: Record, ending: Ending) -> None:
        if ending.error is not None:
            record.error_code = ending.error.code
            if record.status_code is None:
                record.status_code = ending.error.status
            is_refused = judge_outcome(ending.state, record.status_code) is RequestOutcome.REFUSED
            (metrics.REFUSALS if is_refused else metrics.ERRORS).labels(ending.error.code).inc()
        record.finished_at = clock.now()
        # Last, because the writer may read the row at any moment.
        record.state = ending.state

    def finish(
        self,
        record: Record,
        progress: AnswerProgress | None,
        started: float,
        ending: Ending,
        *,
        bytes_in: int = 0,
        trace: str = "",
    ) -> None:
        """Write the final state, once; a request that was torn down (the gateway stops) ends as interrupted."""
        if record.state in OPEN_REQUEST_STATES:
            self.fill_in(record, progress, started, ending)
            self.count(record, started, error=ending.error, bytes_in=bytes_in, trace=trace)
            self.records.touch(record)

    def fill_in(self, record: Record, progress: AnswerProgress | None, started: float, ending: Ending) -> None:
        """Give an open record its final state, which somebody else writes and counts."""
        if progress is not None:
            record.bytes_out = progress.bytes_out
            if progress.first_byte_at is not None:
                record.ttfb_ms = int((progress.first_byte_at - started) * 1000)
            if progress.events and record.completion_tokens is None:  # it broke, or was left: what came until then was made too
                count_tokens(record, progress, None)
        record.latency_ms = int((clock.monotonic() - started) * 1000)
        self._seal(record, ending)

    def count(
        self, record: Record, started: float, *, error: GatewayError | None = None, bytes_in: int = 0, trace: str = ""
    ) -> None:
        """Count a request that has ended, once, and have it logged."""
        outcome = judge_outcome(record.state, record.status_code) or RequestOutcome.FAILED
        metrics.COUNTERS.in_flight -= 1
        metrics.COUNTERS.add(
            model=record.model,
            state=record.state,
            outcome=outcome,
            latency_s=clock.monotonic() - started,
            ttfb_ms=record.ttfb_ms,
            queue_ms=record.queue_ms,
            prompt_tokens=record.prompt_tokens,
            completion_tokens=record.completion_tokens,
            cached_tokens=record.cached_tokens,
            is_streaming=record.is_streaming,
            node_id=record.node_id,
            node=record.node_name,
            tenant=record.tenant,
        )
        if self.access is not None and not self.access.skips(outcome):
            self.access.add(make_line, record, error, outcome, bytes_in, trace)


def name_model(record: Record, model: str, *, asked_model: str) -> None:
    record.model = model
    record.asked_model = "" if asked_model == model else asked_model


def _fit(count: int, most: int) -> int:
    # Comparisons, because max and min are calls.
    return count if 0 <= count <= most else 0 if count < 0 else most


def count_tokens(record: Record, progress: AnswerProgress, usage: TokenCounts | None, *, text_chars: int | None = None) -> None:
    """Fill in the tokens: what the engine counted, else an estimate that is marked as one, from ``text_chars`` if known."""
    bounds = limits().gateway
    if usage is not None:
        record.prompt_tokens = prompt = _fit(usage.prompt_tokens, bounds.record_integer)
        record.completion_tokens = _fit(usage.completion_tokens, bounds.record_integer)
        record.cached_tokens = _fit(usage.cached_tokens, prompt) or None
    else:
        record.tokens_estimated = True
        record.prompt_tokens = record.prompt_tokens_est
        events = max(0, progress.events - 1)
        said = text_chars if text_chars is not None else progress.bytes_out
        record.completion_tokens = events if record.is_streaming else -(-said // bounds.token_chars)


_encoder = msgspec.json.Encoder()
# One of the values is at fault; every other error means that the database is away.
_REFUSED = (psycopg.DataError, psycopg.IntegrityError, msgspec.MsgspecError, ArithmeticError, ValueError, TypeError)
_NOT_OF_LIBPQ = {"context", "cursor_factory", "prepare_threshold", "options"}


Settle = Callable[[GatewayError | None], None]
"""Told once what became of a row: None, or why it is not written."""


_Sending = tuple[float, Settle]
"""Whoever waits for a statement to be sent, and the loop time at which it waits no longer."""


class _Accept(msgspec.Struct, eq=False):
    """A row on its way in, and who is told of that once; None: nobody is, or was already."""

    record: Record
    settle: Settle | None
    due_at: float = 0.0
    """Loop time at which it waits no longer."""
    given_up: bool = False
    was_refused: bool = False
    """Whether its request could not be accepted earlier on."""

    def answer(self, error: GatewayError | None = None) -> None:
        settle, self.settle = self.settle, None
        if settle is not None:
            settle(error)

    def forget(self, _future: object) -> None:
        self.settle = None


def _settle_future(future: asyncio.Future[None], error: GatewayError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)


@dataclass(slots=True, eq=False)
class _Batch:
    inserts: list[_Accept]
    updates: dict[int, Record]
    finishing: list[_Sending] = field(default_factory=list)
    was_repeated: bool = False

    @property
    def size(self) -> int:
        return len(self.inserts) + len(self.updates)


async def connect_records() -> LoopConnection:
    """Return a connection to Django's database with the statements of records. Raises psycopg.Error, OSError."""
    parameters = django_connection.get_connection_params()
    wanted = {name: value for name, value in parameters.items() if name not in _NOT_OF_LIBPQ}
    options = f"{parameters.get('options', '')} -c statement_timeout=5000".strip()
    own = {"connect_timeout": 3, "application_name": "muster-records", "options": options}
    return await LoopConnection.open({**wanted, **own}, STATEMENTS, silence_s=limits().gateway.records_silence_s)


class RecordWriter:
    """Writes records. Everything is called on the event loop."""

    def __init__(
        self, *, accept_s: float, max_pending: int, connect: Callable[[], Awaitable[LoopConnection]] = connect_records
    ) -> None:
        self._limits = limits().gateway
        self._open = connect
        self._accept_s = accept_s
        self._max_pending = max_pending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inserts: list[_Accept] = []
        # Of ``_inserts``, by ``id``: they are written as they are then, so their changes need no update.
        self._entering: set[int] = set()
        # By ``id``: a request has one record, and hashing a UUID takes longer than all the rest.
        self._updates: dict[int, Record] = {}
        self._finishing: list[_Sending] = []
        """Of ``_updates``."""
        self._send_watch: asyncio.TimerHandle | None = None
        # Final rows of requests that never were on their way in.
        self._refused: deque[Record] = deque()
        # Refused, but perhaps on their way in: they are closed or added when the database has been back for a while.
        self._doubtful: deque[Record] = deque()
        # Of a batch in which one row is at fault: each is written alone.
        self._single: deque[_Batch] = deque()
        self._under_way: _Batch | None = None
        self._database: LoopConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None
        """When the next batch is begun."""
        self._is_due = False
        """Whether something waits that shall be written as soon as nothing is under way."""
        # Until then the database is left alone: it was away a moment ago.
        self._rest: asyncio.TimerHandle | None = None
        self._stopping = False
        self._ended: asyncio.Future[None] | None = None
        self.is_healthy = True
        # Whether a row was given up since the last commit.
        self._is_late = False

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        metrics.COUNTERS.count_pending = lambda: self.pending
        self._connecting = self._loop.create_task(self._connect())

    async def stop(self, timeout_s: float = 10.0) -> None:
        assert self._loop is not None
        self._close_late()
        self._stopping = True
        self._ended = self._loop.create_future()
        self._wake()
        await asyncio.wait([self._ended], timeout=timeout_s)
        if not self._ended.done():
            logger.error("records.not_flushed pending=%d", self.pending)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._database is not None:
            self._database.close()

    def accept(self, record: Record) -> asyncio.Future[None]:
        """Insert a row; the future is done when it is durable, or fails with RecordsUnavailable."""
        assert self._loop is not None
        future: asyncio.Future[None] = self._loop.create_future()
        entry = self.enter(record, partial(_settle_future, future))
        future.add_done_callback(entry.forget)
        return future

    def enter(self, record: Record, settle: Settle) -> _Accept:
        """Insert a row; ``settle`` is told when it is durable, or RecordsUnavailable: at once only unless it ``keeps_up``."""
        assert self._loop is not None
        entry = _Accept(record, settle, self._loop.time() + self._accept_s)
        if len(self._inserts) >= self._max_pending:
            _close(record)
            self._keep(record, self._refused)
            entry.answer(RecordsUnavailable(retry_after_s=2))
            return entry
        self._inserts.append(entry)
        self._entering.add(id(record))
        self._wake()
        if self._watch is None:
            self._watch = self._loop.call_later(self._accept_s / 8, self._check_outstanding)
        return entry

    def is_entering(self, record: Record) -> bool:
        """Whether a row was not sent yet, so that it is written as it will be then. A final state of it is no promise."""
        return id(record) in self._entering

    def touch(self, record: Record) -> None:
        if id(record) in self._entering:
            return
        self._updates[id(record)] = record
        self._wake(self._limits.records_linger_s)

    def finish(self, record: Record) -> asyncio.Future[None]:
        """Write a row's final state; done when PostgreSQL will carry that out whatever becomes of us, or can not soon."""
        assert self._loop is not None
        future: asyncio.Future[None] = self._loop.create_future()
        self.send(record, partial(_settle_future, future))
        return future

    def send(self, record: Record, settle: Settle) -> None:
        """Do what ``finish`` does; ``settle`` is told None then, perhaps at once."""
        assert self._loop is not None
        if not self.is_healthy:
            self.touch(record)
            settle(None)
            return
        self._updates[id(record)] = record
        self._finishing.append((self._loop.time() + self._limits.records_send_s, settle))
        if self._send_watch is None:
            self._send_watch = self._loop.call_later(self._limits.records_send_s, self._check_unsent)
        self._wake()

    def add_final(self, record: Record) -> None:
        """Insert a row that is final from the start (a refusal); nobody waits for it and overload drops it."""
        if self.is_healthy and len(self._inserts) < self._max_pending:
            self._inserts.append(_Accept(record, None))
            self._wake(self._limits.records_linger_s)
        else:
            RECORDS_DROPPED.inc()

    @property
    def keeps_up(self) -> bool:
        """Whether the last commit went well, in time: a row that is handed over now will most likely be durable soon."""
        return self.is_healthy and not self._is_late and len(self._inserts) < self._max_pending

    @property
    def pending(self) -> int:
        under_way = self._under_way.size if self._under_way is not None else 0
        return len(self._inserts) + len(self._updates) + len(self._refused) + len(self._single) + under_way

    # inside

    def _check_outstanding(self) -> None:
        assert self._loop is not None
        # One timer for all: requests are many, and a stuck database is rare.
        now = self._loop.time()
        under_way = [] if self._under_way is None else [self._under_way]
        waiting = [*(batch.inserts for batch in (*under_way, *self._single)), self._inserts]
        for entry in chain.from_iterable(waiting):
            if entry.due_at > now:
                break  # those behind it came later
            if entry.settle is not None:
                _close(entry.record)
                entry.given_up = self._is_late = True
                entry.answer(RecordsUnavailable(retry_after_s=2))
        self._watch = self._loop.call_later(self._accept_s / 8, self._check_outstanding) if any(waiting) else None

    def _check_unsent(self) -> None:
        assert self._loop is not None
        now = self._loop.time()
        waiting = [self._finishing] if self._under_way is None else [self._under_way.finishing, self._finishing]
        for each in waiting:
            _settle(each, now)
        due_at = min((each[0][0] for each in waiting if each), default=None)
        self._send_watch = None if due_at is None else self._loop.call_later(due_at - now, self._check_unsent)

    def _resolve(self, entries: list[_Accept]) -> None:
        for entry in entries:
            if entry.given_up:  # it got in after all, and nobody serves it
                self.touch(entry.record)
            else:
                entry.answer()

    def _reject(self, entries: list[_Accept]) -> None:
        for entry in entries:
            # The commit failed or its fate is unknown: nobody was promised anything.
            _close(entry.record)
            entry.answer(RecordsUnavailable(retry_after_s=2))

    def _close_late(self) -> None:
        # Not earlier: what is on its way in would hold the others up.
        while self._doubtful:
            self._keep(self._doubtful.popleft(), self._refused)
        if self._refused:
            self._wake(self._limits.records_linger_s)

    def _keep(self, record: Record, waiting: deque[Record]) -> None:
        if len(waiting) < self._max_pending:
            waiting.append(record)
        else:
            RECORDS_DROPPED.inc()

    # the connection

    def _wake(self, delay_s: float = 0.0) -> None:
        """Have a batch begun: in ``delay_s``, or at once behind all that this turn of the loop does."""
        if self._loop is None or self._is_due:
            return
        if delay_s and self._next is None:
            self._next = self._loop.call_later(delay_s, self._make_due)
        elif not delay_s:
            if self._next is not None:
                self._next.cancel()
            self._is_due = True
            self._next = self._loop.call_soon(self._begin)

    def _make_due(self) -> None:
        self._is_due = True
        self._begin()

    def _begin(self) -> None:
        self._next = None
        if self._under_way is not None or self._connecting is not None or self._rest is not None:
            return
        self._is_due = False
        batch = self._take_batch()
        if batch is not None:
            self._write(batch)
        elif self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _take_batch(self) -> _Batch | None:
        if self._single:
            self._is_due = True
            return self._single.popleft()
        inserts, self._inserts = self._inserts, []
        self._entering.clear()
        updates, self._updates = self._updates, {}
        finishing, self._finishing = self._finishing, []
        for entry in inserts:
            if entry.given_up:
                self._keep(entry.record, self._refused)
        inserts = [entry for entry in inserts if not entry.given_up]
        if self._refused and (self.is_healthy or not (inserts or updates)):
            number = min(self._limits.records_refused_batch, len(self._refused))
            inserts += [_Accept(self._refused.popleft(), None, was_refused=True) for _ in range(number)]
        self._is_due = bool(self._refused)  # the others go with later batches
        if not inserts and not updates and (self.is_healthy or not self._doubtful):
            _settle(finishing)
            return None  # else even an empty batch tells that the database is back
        return _Batch(inserts, updates, finishing)

    def _write(self, batch: _Batch) -> None:
        assert self._loop is not None
        self._under_way = batch
        if self._database is None or self._database.is_closed:
            self._connecting = self._loop.create_task(self._connect())
            return
        rows = {id(entry.record): entry.record for entry in batch.inserts} | batch.updates  # a statement takes each row once
        try:
            values = [_encoder.encode(list(rows.values()))]
        except _REFUSED as error:
            self._loop.call_soon(self._end_batch, batch, error)
            return
        self._database.send(
            WRITE, values, on_sent=lambda: _settle(batch.finishing), on_done=lambda error: self._end_batch(batch, error)
        )

    def _end_batch(self, batch: _Batch, error: Exception | None) -> None:
        if self._repeats(batch, error):
            logger.info("records.reconnecting")
            self._write(batch)
            return
        self._under_way = None
        _settle(batch.finishing)
        if error is None:
            self._take_success(batch)
        elif not isinstance(error, _REFUSED):
            self._fail(batch, error)
        elif batch.size > 1:  # one of them holds a value that the table refuses: written each alone, only that one is lost
            self._single.extend(_Batch([entry], {}) for entry in batch.inserts)
            self._single.extend(_Batch([], {key: record}) for key, record in batch.updates.items())
            self._is_due = True
        else:
            self._drop_refused(batch, type(error).__name__)
        if (self._is_due or self._stopping) and self._next is None:
            self._begin()

    def _repeats(self, batch: _Batch, error: Exception | None) -> bool:
        if not isinstance(error, psycopg.OperationalError) or isinstance(error, ServerSilent) or batch.was_repeated:
            return False
        # The connection turned out to have died. The statement changes nothing twice.
        batch.was_repeated = True
        return self._database is not None and self._database.is_closed

    def _take_success(self, batch: _Batch) -> None:
        assert self._loop is not None
        if not self.is_healthy:
            logger.info("records.recovered")
            self._loop.call_later(self._limits.records_late_s, self._close_late)
        self.is_healthy, self._is_late = True, False
        metrics.COUNTERS.flushes["ok"] += 1
        self._resolve(batch.inserts)

    def _drop_refused(self, batch: _Batch, reason: str) -> None:
        for record in [*(entry.record for entry in batch.inserts), *batch.updates.values()]:
            logger.error("records.refused id=%s error=%s", record.id, reason)
        metrics.COUNTERS.flushes["refused"] += 1
        self._reject(batch.inserts)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        """The database is away: nobody was promised anything, and what has a row is written when it is back."""
        assert self._loop is not None
        if self.is_healthy:
            logger.error("records.unavailable error=%s", type(error).__name__)
        self.is_healthy = False
        metrics.COUNTERS.flushes["failed"] += 1
        if self._database is not None:
            self._database.close()
            self._database = None
        while self._single:
            one = self._single.popleft()
            batch.inserts += one.inserts
            batch.updates |= one.updates
        for key, record in batch.updates.items():
            self._updates.setdefault(key, record)
        self._refused.extendleft(entry.record for entry in batch.inserts if entry.was_refused)
        unknown = [entry for entry in batch.inserts if not entry.was_refused]
        self._reject(unknown)
        for entry in unknown:
            self._keep(entry.record, self._doubtful)
        if self._stopping:
            self._updates.clear()
            self._refused.clear()
            return
        self._is_due = False
        if self._next is not None:
            self._next.cancel()
        self._next = None
        self._rest = self._loop.call_later(self._limits.records_retry_s, self._end_rest)

    def _end_rest(self) -> None:
        self._rest = None
        self._make_due()

    async def _connect(self) -> None:
        failure: Exception | None = None
        try:
            self._database = await self._open()
        except (psycopg.Error, OSError) as error:
            failure = error
        self._connecting = None
        batch = self._under_way
        if batch is None:
            self._begin()
        elif failure is None:
            self._write(batch)
        else:
            batch.was_repeated = True
            self._end_batch(batch, failure)


def _settle(waiting: list[_Sending], until: float = math.inf) -> None:
    """Let those of ``waiting`` go on who were to wait until then."""
    due = [settle for due_at, settle in waiting if due_at <= until]
    del waiting[: len(due)]
    for settle in due:
        settle(None)


def _close(record: Record) -> None:
    """Fill in that a request could not be written down in time, unless its client left it. Nobody got an answer."""
    if record.state not in OPEN_REQUEST_STATES and record.state is not RequestState.COMPLETED:
        return
    record.error_code = RecordsUnavailable.code
    record.status_code = RecordsUnavailable.status
    record.finished_at = clock.now()
    record.state = RequestState.REJECTED
