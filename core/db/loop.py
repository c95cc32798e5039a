"""A PostgreSQL connection that an event loop serves: one prepared statement at a time, without a thread and without a task.

libpq's asynchronous commands do the work (PostgreSQL's manual, "Asynchronous Command Processing"): a statement is handed to the
socket at once, and the loop calls when its answer has come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psycopg
from psycopg import pq
from psycopg.errors import error_from_result

from core.db.base import BoundConnection, ServerSilent, WaitLimit


class LoopConnection:
    """An open connection with its prepared statements. Only a server that leaves or falls silent closes it."""

    def __init__(self, connection: BoundConnection, *, silence_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._pgconn = connection.pgconn
        self._pgconn.nonblocking = 1
        self._socket = self._pgconn.socket
        self.silence_s = silence_s
        self.is_closed = False
        self._on_sent: Callable[[], None] | None = None
        self._on_done: Callable[[psycopg.Error | None], None] | None = None
        self._error: psycopg.Error | None = None
        self._heard_at = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._socket, self._take_answer)

    @classmethod
    async def open(cls, parameters: Mapping[str, Any], statements: Mapping[str, str], *, silence_s: float) -> LoopConnection:
        """Connect with the ``parameters`` of libpq and prepare ``statements`` (SQL with ``$1``… by name). Raises psycopg.Error.

        Connecting and each statement take at most ``silence_s`` without a byte of the server.
        """

        def connect() -> BoundConnection:
            connection = BoundConnection.connect(**parameters, autocommit=True)
            connection.limit = WaitLimit(silence_s=silence_s)
            try:
                for name, statement in statements.items():
                    connection.execute(f"PREPARE {name} AS {statement}".encode(), prepare=False)
            except BaseException:
                connection.close()
                raise
            return connection

        # In a thread: names are looked up and passwords are worked out while it is made.
        return cls(await asyncio.get_running_loop().run_in_executor(None, connect), silence_s=silence_s)

    def send(
        self,
        statement: str,
        values: Sequence[bytes],
        *,
        on_sent: Callable[[], None],
        on_done: Callable[[psycopg.Error | None], None],
    ) -> None:
        """Begin a prepared statement with ``values`` in text form. One at a time.

        ``on_sent`` is called when the kernel has all of it, perhaps before this returns: the server carries it out then even
        if this process is killed. ``on_done`` is called later with what went wrong, None = it was carried out; ServerSilent
        when nothing came for ``silence_s``. Neither is called after ``close``.
        """
        self._on_sent, self._on_done, self._error = on_sent, on_done, None
        self._heard_at = self._loop.time()
        if self._watch is None:
            self._watch = self._loop.call_later(self.silence_s, self._look_for_silence)
        try:
            self._pgconn.send_query_prepared(statement.encode(), values)
        except psycopg.Error as error:
            # Later: ``on_done`` is not called before this returns.
            self._loop.call_soon(self._lose, error)
            return
        self._flush()

    def close(self) -> None:
        """Close the connection; idempotent. What is under way may still be carried out."""
        if self.is_closed:
            return
        self.is_closed = True
        self._on_sent = self._on_done = None
        if self._watch is not None:
            self._watch.cancel()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._connection.close()

    def _flush(self) -> None:
        try:
            is_more = bool(self._pgconn.flush())
        except psycopg.Error as error:
            self._loop.call_soon(self._lose, error)
            return
        if is_more:
            self._loop.add_writer(self._socket, self._flush)
            return
        self._loop.remove_writer(self._socket)
        sent, self._on_sent = self._on_sent, None
        if sent is not None:
            sent()

    def _take_answer(self) -> None:
        self._heard_at = self._loop.time()
        try:
            self._pgconn.consume_input()
            if self._on_sent is not None:
                self._flush()  # a server may have to be read before it reads on
            while self._on_done is not None and not self._pgconn.is_busy():
                result = self._pgconn.get_result()
                if result is None:
                    if self._pgconn.status == pq.ConnStatus.BAD:
                        break
                    done, self._on_done = self._on_done, None
                    done(self._error)
                elif result.status == pq.ExecStatus.FATAL_ERROR:
                    self._error = error_from_result(result)
        except psycopg.Error as error:
            self._lose(error)
            return
        if self._pgconn.status == pq.ConnStatus.BAD:
            self._lose(self._error or psycopg.OperationalError("the server closed the connection"))

    def _look_for_silence(self) -> None:
        # One timer for all statements: they are many, and a silent server is rare.
        self._watch = None
        if self._on_done is None:
            return
        silent_s = self._loop.time() - self._heard_at
        if silent_s >= self.silence_s:
            self._lose(ServerSilent(f"the database did not answer within {silent_s:.1f} s"))
        else:
            self._watch = self._loop.call_later(self.silence_s - silent_s, self._look_for_silence)

    def _lose(self, error: psycopg.Error) -> None:
        """The connection is of no use any more."""
        done = self._on_done
        self.close()
        if done is not None:
            done(error)
