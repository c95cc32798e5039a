"""Request records with group commit: one transaction for all that waits, flushed at once when the writer is idle.

A request is accepted when its row is durable; that is what ``accept`` waits for. Later changes ride along with the next
commit, at most ``_LINGER_S`` later. A final state is never overwritten: the update only finds open rows, so a gateway
that was declared dead and comes back changes nothing. One thread with its own connection does the SQL; rows travel as
one JSON text per commit, which costs the event loop almost nothing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import uuid
from datetime import UTC, datetime

import msgspec
import psycopg
from django.db import connection as django_connection

from gateway.errors import RecordsUnavailable
from gateway.metrics import RECORD_FLUSHES, RECORDS_PENDING
from wire.contract import OPEN_REQUEST_STATES, RequestState

logger = logging.getLogger("muster.records")

_LINGER_S = 0.02
_RETRY_S = 0.25


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


_TYPES = {
    "id": "uuid",
    "created_at": "timestamptz",
    "gateway_id": "uuid",
    "tenant": "text",
    "key_id": "uuid",
    "key_name": "text",
    "endpoint": "text",
    "model": "text",
    "is_streaming": "boolean",
    "state": "text",
    "error_code": "text",
    "status_code": "smallint",
    "node_id": "uuid",
    "node_name": "text",
    "attempts": "smallint",
    "max_tokens": "integer",
    "prompt_tokens_est": "integer",
    "prompt_tokens": "integer",
    "completion_tokens": "integer",
    "tokens_estimated": "boolean",
    "bytes_out": "bigint",
    "queue_ms": "integer",
    "ttfb_ms": "integer",
    "latency_ms": "integer",
    "finished_at": "timestamptz",
}
_FIXED = {"id", "created_at", "gateway_id", "tenant", "key_id", "key_name", "endpoint", "model", "is_streaming"}
_COLUMNS = ", ".join(_TYPES)
_RECORDSET = ", ".join(f"{name} {kind}" for name, kind in _TYPES.items())
_ASSIGNMENTS = ", ".join(f"{name} = v.{name}" for name in _TYPES if name not in _FIXED)
_OPEN = ", ".join(f"'{state.value}'" for state in sorted(OPEN_REQUEST_STATES))
# Built from the constants above alone; values travel as parameters.
_INSERT = (
    f"INSERT INTO gateway_requestrecord ({_COLUMNS}) SELECT {_COLUMNS} "  # noqa: S608
    f"FROM json_to_recordset(%(inserts)s::json) AS i({_RECORDSET})"
)
_UPDATE = (
    f"UPDATE gateway_requestrecord r SET {_ASSIGNMENTS} FROM json_to_recordset(%(updates)s::json) AS v({_RECORDSET}) "  # noqa: S608
    f"WHERE r.id = v.id AND r.created_at = v.created_at AND r.state IN ({_OPEN})"
)
_BOTH = f"WITH added AS ({_INSERT}) {_UPDATE}"

_encoder = msgspec.json.Encoder()


class _Accept:
    """A row on its way in and the future of whoever waits for it (None: nobody does)."""

    __slots__ = ("future", "record")

    def __init__(self, record: Record, future: asyncio.Future[None] | None) -> None:
        self.record = record
        self.future = future


class RecordWriter:
    """Writes records. ``accept``, ``touch`` and ``add_final`` are called on the event loop; the rest is the thread's."""

    def __init__(self, *, accept_s: float, max_pending: int) -> None:
        self._accept_s = accept_s
        self._max_pending = max_pending
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inserts: list[_Accept] = []
        self._updates: dict[uuid.UUID, Record] = {}
        self._wake = threading.Event()
        self._lingering: asyncio.TimerHandle | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._database: psycopg.Connection[tuple[object, ...]] | None = None
        self.is_healthy = True

    def start(self) -> None:
        """Start the writer thread. Call on the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="records", daemon=True)
        self._thread.start()

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Write everything that waits, then end the thread."""
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
            future.set_exception(RecordsUnavailable(retry_after_s=2))
            return future
        entry = _Accept(record, future)
        self._inserts.append(entry)
        self._wake.set()
        if not self.is_healthy:
            self._loop.call_later(self._accept_s, self._give_up, entry)
        return future

    def touch(self, record: Record) -> None:
        """Write a row's new content soon."""
        self._updates[record.id] = record
        if self._lingering is None and self._loop is not None:
            self._lingering = self._loop.call_later(_LINGER_S, self._end_linger)

    def add_final(self, record: Record) -> None:
        """Insert a row that is final from the start (a refusal); nobody waits for it and overload drops it."""
        if self.is_healthy and len(self._inserts) < self._max_pending:
            self._inserts.append(_Accept(record, None))
            self.touch_nothing()

    def touch_nothing(self) -> None:
        """Arrange a flush soon without a new change."""
        if self._lingering is None and self._loop is not None:
            self._lingering = self._loop.call_later(_LINGER_S, self._end_linger)

    @property
    def pending(self) -> int:
        """Changes not yet written."""
        return len(self._inserts) + len(self._updates)

    # event loop

    def _end_linger(self) -> None:
        self._lingering = None
        self._wake.set()

    def _give_up(self, entry: _Accept) -> None:
        if entry.future is not None and not entry.future.done():
            if entry in self._inserts:
                self._inserts.remove(entry)
            entry.future.set_exception(RecordsUnavailable(retry_after_s=2))

    def _resolve(self, entries: list[_Accept]) -> None:
        for entry in entries:
            if entry.future is not None and not entry.future.done():
                entry.future.set_result(None)

    def _reject(self, entries: list[_Accept]) -> None:
        """The commit failed or its fate is unknown: nobody was promised anything, and a row that did get in is closed."""
        for entry in entries:
            record = entry.record
            if entry.future is not None and not entry.future.done():
                entry.future.set_exception(RecordsUnavailable(retry_after_s=2))
            record.error_code = RecordsUnavailable.code
            record.status_code = RecordsUnavailable.status
            record.finished_at = datetime.now(UTC)
            record.state = RequestState.REJECTED
            if len(self._updates) < self._max_pending:
                self.touch(record)

    # thread

    def _run(self) -> None:
        while True:
            self._wake.wait(timeout=1.0)
            self._wake.clear()
            inserts, self._inserts = self._inserts, []
            updates, self._updates = self._updates, {}
            if inserts or updates:
                self._flush(inserts, updates)
            RECORDS_PENDING.set(self.pending)
            if self._stopping and not self._inserts and not self._updates:
                break
        if self._database is not None:
            self._database.close()

    def _flush(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record]) -> None:
        assert self._loop is not None
        try:
            self._write(inserts, updates)
        except (psycopg.Error, OSError) as error:
            self._fail(inserts, updates, error)
            return
        if not self.is_healthy:
            logger.info("records.recovered")
        self.is_healthy = True
        RECORD_FLUSHES.labels("ok").inc()
        if any(entry.future is not None for entry in inserts):
            self._loop.call_soon_threadsafe(self._resolve, inserts)

    def _write(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record]) -> None:
        database = self._connect()
        values: dict[str, str] = {}
        if inserts:
            values["inserts"] = _encoder.encode([entry.record for entry in inserts]).decode()
        if updates:
            values["updates"] = _encoder.encode(list(updates.values())).decode()
        statement = _BOTH if inserts and updates else _INSERT if inserts else _UPDATE
        database.execute(statement, values, prepare=True)

    def _fail(self, inserts: list[_Accept], updates: dict[uuid.UUID, Record], error: Exception) -> None:
        assert self._loop is not None
        if self.is_healthy:
            logger.error("records.unavailable error=%s", type(error).__name__)
        self.is_healthy = False
        RECORD_FLUSHES.labels("failed").inc()
        if self._database is not None:
            self._database.close()
            self._database = None
        if not isinstance(error, psycopg.OperationalError | OSError):
            logger.error("records.refused error=%s", error)
        self._loop.call_soon_threadsafe(self._reject, inserts)
        for key, record in updates.items():
            self._updates.setdefault(key, record)
        if not self._stopping:
            threading.Event().wait(_RETRY_S)
            self._wake.set()
        elif isinstance(error, psycopg.OperationalError | OSError):
            self._updates.clear()

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        if self._database is None or self._database.closed:
            parameters = django_connection.get_connection_params()
            wanted = {
                k: v for k, v in parameters.items() if k in {"dbname", "user", "password", "host", "port", "sslmode"}
            }
            self._database = psycopg.connect(
                **wanted,
                autocommit=True,
                connect_timeout=3,
                application_name="muster-records",
                options="-c statement_timeout=5000",
            )
        return self._database
