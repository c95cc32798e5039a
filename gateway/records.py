"""Request records with group commit: one transaction for all that waits, flushed at once when the writer is idle.

A request is accepted when its row is durable; that is what ``accept`` waits for. Later changes ride along with the next
commit, at most ``records_linger_s`` later. A final state goes at once: ``finish`` is done when the kernel has its statement, so
that PostgreSQL carries it out even if this process is killed; only then the client gets its last bytes. A final state is never
overwritten: the update only finds open rows, so a gateway that was declared dead and comes back changes nothing. One thread
with its own connection does the SQL; rows travel as one JSON text per commit, which costs the event loop almost nothing.

What could not be accepted because the database did not take it in time gets a row too, a final one, once it is back: in
small portions beside the others, and no more of them than the writer may hold.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from collections import deque
from collections.abc import Iterable
from datetime import datetime

import msgspec
import psycopg
from django.db import connection as django_connection

from core.db import Patience, PatientConnection, ServerSilent
from core.limits import limits
from gateway.errors import RecordsUnavailable
from gateway.metrics import RECORD_FLUSHES, RECORDS_DROPPED, RECORDS_PENDING
from gateway.record_sql import BOTH, INSERT, UPDATE
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


class RecordWriter:
    """Writes records. ``accept``, ``touch`` and ``add_final`` are called on the event loop; the rest is the thread's."""

    def __init__(self, *, accept_s: float, max_pending: int) -> None:
        self._limits = limits().gateway
        self._accept_s = accept_s
        self._max_pending = max_pending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inserts: list[_Accept] = []
        self._updates: dict[uuid.UUID, Record] = {}
        self._finishing: list[asyncio.Future[None]] = []
        """Of those who wait until the updates are sent."""
        self._prepared: set[str] = set()
        self._lock = threading.Lock()
        """Held while the three above change hands: a dict insertion may yield to the other thread half-way (UUID.__hash__)."""
        self._outstanding: deque[_Accept] = deque()
        self._refused: deque[Record] = deque()
        """Final rows of requests that never were on their way in. Both threads add to it, the writer's takes from it."""
        self._doubtful: deque[Record] = deque()
        """Refused, but perhaps on their way in: they are closed or added when the database has been back for a while."""
        self._watch: asyncio.TimerHandle | None = None
        self._wake = threading.Event()
        self._lingering: asyncio.TimerHandle | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._database: PatientConnection | None = None
        self.is_healthy = True

    def start(self) -> None:
        """Start the writer thread. Call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Write everything that waits, then end the thread."""
        self._close_late()
        self._stopping = True
        self._wake.set()
        thread = self._thread
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(None, thread.join, timeout_s)
            if thread.is_alive():
                logger.error("records.not_flushed pending=%d", len(self._updates) + len(self._inserts))

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
        with self._lock:
            self._inserts.append(entry)
        self._wake.set()
        entry.due_at = self._loop.time() + self._accept_s
        self._outstanding.append(entry)
        if self._watch is None:
            self._watch = self._loop.call_later(self._accept_s / 8, self._check_outstanding)
        return future

    def touch(self, record: Record) -> None:
        """Write a row's new content soon."""
        with self._lock:
            self._updates[record.id] = record
        self._arrange_flush()

    async def finish(self, record: Record) -> None:
        """Write a row's final state; return when PostgreSQL will carry that out whatever becomes of us, or can not soon."""
        if not self.is_healthy or self._loop is None:
            self.touch(record)
            return
        future: asyncio.Future[None] = self._loop.create_future()
        with self._lock:
            self._updates[record.id] = record
            self._finishing.append(future)
        if self._lingering is not None:
            self._lingering.cancel()
        self._end_linger()
        timer = self._loop.call_later(self._limits.records_send_s, _settle, [future])
        try:
            await future
        finally:
            timer.cancel()

    def add_final(self, record: Record) -> None:
        """Insert a row that is final from the start (a refusal); nobody waits for it and overload drops it."""
        if self.is_healthy and len(self._inserts) < self._max_pending:
            with self._lock:
                self._inserts.append(_Accept(record, None))
            self._arrange_flush()
        else:
            RECORDS_DROPPED.inc()

    @property
    def pending(self) -> int:
        """Changes not yet written."""
        return len(self._inserts) + len(self._updates) + len(self._refused)

    # event loop

    def _arrange_flush(self) -> None:
        """Have the thread write soon, together with what comes until then."""
        if self._lingering is None and self._loop is not None:
            self._lingering = self._loop.call_later(self._limits.records_linger_s, self._end_linger)

    def _end_linger(self) -> None:
        self._lingering = None
        self._wake.set()

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

    # either

    def _keep(self, record: Record, waiting: deque[Record]) -> None:
        """Have a refused request's row written later, unless too many wait for that already."""
        if len(waiting) < self._max_pending:
            waiting.append(record)
        else:
            RECORDS_DROPPED.inc()

    # thread

    def _run(self) -> None:
        gathered = 0
        while True:
            self._wake.wait(timeout=1.0)
            if gathered >= self._limits.records_busy_batch and not self._stopping:
                clock.sleep(self._limits.records_gather_s)
            self._wake.clear()
            with self._lock:
                inserts, self._inserts = self._inserts, []
                updates, self._updates = self._updates, {}
                finishing, self._finishing = self._finishing, []
            for entry in inserts:
                if entry.given_up:
                    self._keep(entry.record, self._refused)
            inserts = [entry for entry in inserts if not entry.given_up]
            gathered = len(inserts) + len(finishing)
            if self._refused and (self.is_healthy or not (inserts or updates)):
                inserts += self._take_refused()
            if inserts or updates:
                self._flush(inserts, updates, finishing)
            RECORDS_PENDING.set(self.pending)
            if self._stopping and not self.pending:
                break
        if self._database is not None:
            self._database.close()

    def _take_refused(self) -> list[_Accept]:
        self._wake.set()  # there may be more
        number = min(self._limits.records_refused_batch, len(self._refused))
        return [_Accept(self._refused.popleft(), None, was_refused=True) for _ in range(number)]

    def _flush(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record], finishing: list[asyncio.Future[None]]) -> bool:
        """Write a batch; return False when the database is away and the batch was given back."""
        assert self._loop is not None
        try:
            self._write(inserts, updates, finishing)
        except _REFUSED as error:
            if len(inserts) + len(updates) > 1:
                return self._flush_singly(inserts, updates)
            self._drop_refused(inserts, updates, type(error).__name__)
            return True
        except (psycopg.Error, OSError) as error:
            self._fail(inserts, updates, error)
            return False
        if not self.is_healthy:
            logger.info("records.recovered")
            self._loop.call_soon_threadsafe(self._loop.call_later, limits().gateway.records_late_s, self._close_late)
        self.is_healthy = True
        RECORD_FLUSHES.labels("ok").inc()
        if any(entry.future is not None for entry in inserts):
            self._loop.call_soon_threadsafe(self._resolve, inserts)
        return True

    def _flush_singly(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record]) -> bool:
        """One of them holds a value that the table refuses: write each alone, so that only that one is lost."""
        while inserts or updates:
            key = next(iter(updates)) if not inserts else None
            first, rest = inserts[:1], inserts[1:]
            one = {key: updates.pop(key)} if key is not None else {}
            inserts = rest
            if not self._flush(first, one, []):
                self._give_back(inserts, updates)
                return False
        return True

    def _drop_refused(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record], reason: str) -> None:
        assert self._loop is not None
        for record in [entry.record for entry in inserts] + list(updates.values()):
            logger.error("records.refused id=%s error=%s", record.id, reason)
        RECORD_FLUSHES.labels("refused").inc()
        self._loop.call_soon_threadsafe(self._reject, inserts)

    def _give_back(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._reject_unknown, [entry for entry in inserts if not entry.was_refused])
        self._refused.extendleft(entry.record for entry in inserts if entry.was_refused)
        with self._lock:
            for key, record in updates.items():
                self._updates.setdefault(key, record)

    def _write(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record], finishing: list[asyncio.Future[None]]) -> None:
        """Write a batch, a second time where the connection turns out to have died: doing it twice changes nothing."""
        values: dict[str, str] = {}
        if inserts:
            values["inserts"] = _encoder.encode([entry.record for entry in inserts]).decode()
        if updates:
            values["updates"] = _encoder.encode(list(updates.values())).decode()
        statement = BOTH if inserts and updates else INSERT if inserts else UPDATE
        known = self._database
        try:
            self._execute(statement, values, finishing)
        except ServerSilent:
            raise
        except psycopg.OperationalError:
            if known is None or not known.closed or known is not self._database:
                raise
            logger.info("records.reconnecting")
            self._execute(statement, values, finishing)
        finally:
            self._tell_sent(finishing)

    def _execute(self, statement: str, values: dict[str, str], finishing: list[asyncio.Future[None]]) -> None:
        database = self._connect()
        if finishing and statement in self._prepared:  # else the first answer is that it was prepared
            database.on_sent = lambda: self._tell_sent(finishing)
        database.execute(statement, values, prepare=True)
        self._prepared.add(statement)

    def _tell_sent(self, finishing: list[asyncio.Future[None]]) -> None:
        """Let those go on who wait for a statement of this batch to be sent, once."""
        if finishing and self._loop is not None:
            self._loop.call_soon_threadsafe(_settle, finishing.copy())
            finishing.clear()

    def _fail(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record], error: Exception) -> None:
        assert self._loop is not None
        if self.is_healthy:
            logger.error("records.unavailable error=%s", type(error).__name__)
        self.is_healthy = False
        RECORD_FLUSHES.labels("failed").inc()
        if self._database is not None:
            self._database.close()
            self._database = None
        self._give_back(inserts, updates)
        if not self._stopping:
            threading.Event().wait(limits().gateway.records_retry_s)
            self._wake.set()
        else:
            self._updates.clear()
            self._refused.clear()

    def _connect(self) -> PatientConnection:
        if self._database is None or self._database.closed:
            parameters = django_connection.get_connection_params()
            wanted = {name: value for name, value in parameters.items() if name not in _NOT_OF_LIBPQ}
            options = f"{parameters.get('options', '')} -c statement_timeout=5000".strip()
            own = {"connect_timeout": 3, "application_name": "muster-records", "options": options}
            database = PatientConnection.connect(**{**wanted, **own}, autocommit=True)
            database.patience = Patience(silence_s=limits().gateway.records_silence_s)
            self._database = database
            self._prepared.clear()
        return self._database


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
