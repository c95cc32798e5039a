"""Request records with group commit: one transaction for all that waits, flushed at once when the writer is idle.

A request is accepted when its row is durable; that is what ``accept`` waits for. Later changes ride along with the next
commit, at most ``records_linger_s`` later. A final state goes at once: ``finish`` is done when the kernel has its statement, so
that PostgreSQL carries it out even if this process is killed; only then the client gets its last bytes. A final state is never
overwritten: the update only finds open rows, so a gateway that was declared dead and comes back changes nothing. The event loop
writes on a connection of its own, one commit under way at a time; rows travel as one JSON text.

What could not be accepted because the database did not take it in time gets a row too, a final one, once it is back: in
small portions beside the others, and no more of them than the writer may hold.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime

import msgspec
import psycopg
from django.db import connection as django_connection

from core.db import LoopConnection, ServerSilent
from core.limits import limits
from gateway.errors import RecordsUnavailable
from gateway.metrics import RECORD_FLUSHES, RECORDS_DROPPED, RECORDS_PENDING
from gateway.record_sql import BOTH, INSERT, STATEMENTS, UPDATE
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState

logger = logging.getLogger("muster.records")


class Record(msgspec.Struct, kw_only=True):
    """One row of ``gateway_requestrecord``; field names are column names. Set ``state`` last: it is what makes it final."""

    id: uuid.UUID
    created_at: datetime
    gateway_id: uuid.UUID
    tenant: str
    key_id: uuid.UUID
    key_name: str
    endpoint: str
    model: str
    is_streaming: bool
    state: RequestState = RequestState.QUEUED
    error_code: str | None = None
    status_code: int | None = None
    node_id: uuid.UUID | None = None
    node_name: str = ""
    attempts: int = 0
    max_tokens: int | None = None
    prompt_tokens_est: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    tokens_estimated: bool = False
    bytes_out: int = 0
    queue_ms: int | None = None
    ttfb_ms: int | None = None
    latency_ms: int | None = None
    finished_at: datetime | None = None
    engine_error: str = ""
    """What the engine said when it failed or refused (``wire.engine_errors.quote_message``)."""
    asked_model: str = ""
    """What the client asked for, where ``model`` (which answers) has another name."""


_WRITTEN, _REFUSED_BATCH, _FAILED = (RECORD_FLUSHES.labels(result) for result in ("ok", "refused", "failed"))
_encoder = msgspec.json.Encoder()
_REFUSED = (psycopg.DataError, psycopg.IntegrityError, msgspec.MsgspecError, ArithmeticError, ValueError, TypeError)
"""One of the values is at fault; every other error means that the database is away."""
_NOT_OF_LIBPQ = {"context", "cursor_factory", "prepare_threshold", "options"}


class _Accept:
    """A row on its way in and the future of whoever waits for it (None: nobody does).

    ``was_refused``: of a request that could not be accepted earlier on.
    """

    __slots__ = ("due_at", "future", "given_up", "record", "was_refused")

    def __init__(self, record: Record, future: asyncio.Future[None] | None, *, was_refused: bool = False) -> None:
        self.record = record
        self.future = future
        self.given_up = False
        self.due_at = 0.0
        self.was_refused = was_refused

    @property
    def is_answered(self) -> bool:
        """Whether nobody waits any more."""
        return self.future is None or self.future.done()


@dataclass(slots=True, eq=False)
class _Batch:
    """What one commit writes."""

    inserts: list[_Accept]
    updates: dict[uuid.UUID, Record]
    finishing: list[asyncio.Future[None]] = field(default_factory=list)
    """Of those who wait until the statement is sent."""
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
        self._entering: set[uuid.UUID] = set()
        """Of ``_inserts``: they are written as they are then, so their changes need no update."""
        self._updates: dict[uuid.UUID, Record] = {}
        self._finishing: list[asyncio.Future[None]] = []
        """Of those who wait until the updates are sent."""
        self._unsent: deque[tuple[float, asyncio.Future[None]]] = deque()
        """Those same, with the moment at which they wait no longer, in loop time."""
        self._send_watch: asyncio.TimerHandle | None = None
        self._outstanding: deque[_Accept] = deque()
        self._refused: deque[Record] = deque()
        """Final rows of requests that never were on their way in."""
        self._doubtful: deque[Record] = deque()
        """Refused, but perhaps on their way in: they are closed or added when the database has been back for a while."""
        self._single: deque[_Batch] = deque()
        """Of a batch in which one row is at fault: each is written alone."""
        self._under_way: _Batch | None = None
        self._database: LoopConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._next: asyncio.Handle | None = None
        """When the next batch is begun."""
        self._is_due = False
        """Whether something waits that shall be written as soon as nothing is under way."""
        self._rest: asyncio.TimerHandle | None = None
        """Until then the database is left alone: it was away a moment ago."""
        self._stopping = False
        self._ended: asyncio.Future[None] | None = None
        self.is_healthy = True

    def start(self) -> None:
        """Connect. Call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._connecting = self._loop.create_task(self._connect())

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Write everything that waits, then close the connection."""
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
        if len(self._inserts) >= self._max_pending:
            _close(record)
            self._keep(record, self._refused)
            future.set_exception(RecordsUnavailable(retry_after_s=2))
            return future
        entry = _Accept(record, future)
        self._inserts.append(entry)
        self._entering.add(record.id)
        self._wake()
        entry.due_at = self._loop.time() + self._accept_s
        self._outstanding.append(entry)
        if self._watch is None:
            self._watch = self._loop.call_later(self._accept_s / 8, self._check_outstanding)
        return future

    def touch(self, record: Record) -> None:
        """Write a row's new content soon, together with what comes until then."""
        if record.id in self._entering:
            return
        self._updates[record.id] = record
        self._wake(self._limits.records_linger_s)

    async def finish(self, record: Record) -> None:
        """Write a row's final state; return when PostgreSQL will carry that out whatever becomes of us, or can not soon."""
        if not self.is_healthy or self._loop is None:
            self.touch(record)
            return
        future: asyncio.Future[None] = self._loop.create_future()
        self._updates[record.id] = record
        self._finishing.append(future)
        self._unsent.append((self._loop.time() + self._limits.records_send_s, future))
        if self._send_watch is None:
            self._send_watch = self._loop.call_later(self._limits.records_send_s, self._check_unsent)
        self._wake()
        await future

    def add_final(self, record: Record) -> None:
        """Insert a row that is final from the start (a refusal); nobody waits for it and overload drops it."""
        if self.is_healthy and len(self._inserts) < self._max_pending:
            self._inserts.append(_Accept(record, None))
            self._wake(self._limits.records_linger_s)
        else:
            RECORDS_DROPPED.inc()

    @property
    def pending(self) -> int:
        """Changes not yet written."""
        under_way = self._under_way.size if self._under_way is not None else 0
        return len(self._inserts) + len(self._updates) + len(self._refused) + len(self._single) + under_way

    # inside

    def _check_outstanding(self) -> None:
        """Give up on what waits too long. One timer for all: requests are many, and a stuck database is rare."""
        assert self._loop is not None
        now = self._loop.time()
        outstanding = self._outstanding
        while outstanding and (outstanding[0].is_answered or outstanding[0].due_at <= now):
            entry = outstanding.popleft()
            if entry.future is not None and not entry.future.done():
                _close(entry.record)
                entry.given_up = True
                entry.future.set_exception(RecordsUnavailable(retry_after_s=2))
        self._watch = self._loop.call_later(self._accept_s / 8, self._check_outstanding) if outstanding else None

    def _check_unsent(self) -> None:
        """Let those go on who wait too long for their statement to be sent. One timer for all, as above."""
        assert self._loop is not None
        now = self._loop.time()
        while self._unsent and (self._unsent[0][1].done() or self._unsent[0][0] <= now):
            _settle([self._unsent.popleft()[1]])
        left_s = self._unsent[0][0] - now if self._unsent else 0.0
        self._send_watch = self._loop.call_later(left_s, self._check_unsent) if self._unsent else None

    def _resolve(self, entries: list[_Accept]) -> None:
        self._reject([entry for entry in entries if entry.given_up])  # it got in after all, and nobody serves it
        for entry in entries:
            if entry.future is not None and not entry.future.done():
                entry.future.set_result(None)

    def _reject(self, entries: list[_Accept]) -> None:
        """The commit failed or its fate is unknown: nobody was promised anything, and a row that did get in is closed."""
        for entry in entries:
            if entry.future is not None and not entry.future.done():
                entry.future.set_exception(RecordsUnavailable(retry_after_s=2))
            _close(entry.record)
            if len(self._updates) < self._max_pending:
                self.touch(entry.record)

    def _reject_unknown(self, entries: list[_Accept]) -> None:
        self._reject(entries)
        for entry in entries:
            self._keep(entry.record, self._doubtful)

    def _close_late(self) -> None:
        """See to it that what was refused has a final row. Not earlier: what is on its way in would hold the others up."""
        while self._doubtful and len(self._updates) < self._max_pending:
            record = self._doubtful.popleft()
            self._keep(record, self._refused)
            self.touch(record)

    def _keep(self, record: Record, waiting: deque[Record]) -> None:
        """Have a refused request's row written later, unless too many wait for that already."""
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
        """Write what waits, unless a batch is under way: its end begins the next one."""
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
        if not inserts and not updates:
            _settle(finishing)
            return None
        return _Batch(inserts, updates, finishing)

    def _write(self, batch: _Batch) -> None:
        assert self._loop is not None
        self._under_way = batch
        if self._database is None or self._database.is_closed:
            self._connecting = self._loop.create_task(self._connect())
            return
        inserts, updates = batch.inserts, batch.updates
        values = []
        try:
            if inserts:
                values.append(_encoder.encode([entry.record for entry in inserts]))
            if updates:
                values.append(_encoder.encode(list(updates.values())))
        except _REFUSED as error:
            self._loop.call_soon(self._end_batch, batch, error)
            return
        statement = BOTH if len(values) > 1 else INSERT if inserts else UPDATE
        self._database.send(
            statement, values, on_sent=lambda: _settle(batch.finishing), on_done=lambda error: self._end_batch(batch, error)
        )

    def _end_batch(self, batch: _Batch, error: Exception | None) -> None:
        """Take what became of a batch, and begin the next one."""
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
        RECORDS_PENDING.set(self.pending)
        if (self._is_due or self._stopping) and self._next is None:
            self._begin()

    def _repeats(self, batch: _Batch, error: Exception | None) -> bool:
        """Whether a batch is written once more because the connection turned out to have died: that changes nothing twice."""
        if not isinstance(error, psycopg.OperationalError) or isinstance(error, ServerSilent) or batch.was_repeated:
            return False
        batch.was_repeated = True
        return self._database is not None and self._database.is_closed

    def _take_success(self, batch: _Batch) -> None:
        assert self._loop is not None
        if not self.is_healthy:
            logger.info("records.recovered")
            self._loop.call_later(self._limits.records_late_s, self._close_late)
        self.is_healthy = True
        _WRITTEN.inc()
        self._resolve(batch.inserts)

    def _drop_refused(self, batch: _Batch, reason: str) -> None:
        for record in [*(entry.record for entry in batch.inserts), *batch.updates.values()]:
            logger.error("records.refused id=%s error=%s", record.id, reason)
        _REFUSED_BATCH.inc()
        self._reject(batch.inserts)

    def _fail(self, batch: _Batch, error: Exception) -> None:
        """The database is away: nobody was promised anything, and what has a row is written when it is back."""
        assert self._loop is not None
        if self.is_healthy:
            logger.error("records.unavailable error=%s", type(error).__name__)
        self.is_healthy = False
        _FAILED.inc()
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
        self._reject_unknown([entry for entry in batch.inserts if not entry.was_refused])
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


def _settle(waiting: Iterable[asyncio.Future[None]]) -> None:
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _close(record: Record) -> None:
    """Fill in that a request could not be written down in time, unless it has ended otherwise."""
    if record.state not in OPEN_REQUEST_STATES:
        return
    record.error_code = RecordsUnavailable.code
    record.status_code = RecordsUnavailable.status
    record.finished_at = clock.now()
    record.state = RequestState.REJECTED
