"""The database backend that ``DATABASES`` names: PostgreSQL's own, whose connections give up on a server that has gone silent.

A frozen server keeps its sockets open and its kernel acknowledges what arrives: neither ``statement_timeout``, which the
server would have to enforce, nor TCP's own timers end such a wait. Only whoever waits can.
"""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from django.db.backends.postgresql import base
from psycopg import IsolationLevel
from psycopg.abc import PQGen
from psycopg.waiting import WAIT_R

from core.limits import limits
from wire import clock

RV = TypeVar("RV")


class ServerSilent(psycopg.OperationalError):
    """The server did not answer in time; the connection was closed, and what was asked for may still come to pass."""


@dataclass(frozen=True, slots=True)
class WaitLimit:
    """How long to wait for the database.

    ``silence_s``: without a byte from it. ``ends_at`` (``clock.monotonic`` seconds): for all; None = as long as it talks.
    """

    silence_s: float
    ends_at: float | None = None

    @property
    def left_s(self) -> float:
        """Seconds that the next step may take without a byte, never negative."""
        if self.ends_at is None:
            return self.silence_s
        return max(0.0, min(self.silence_s, self.ends_at - clock.monotonic()))


class _OfThread(threading.local):
    limit: WaitLimit | None = None


_of_thread = _OfThread()
_of_process: list[WaitLimit] = []


def limit_process(silence_s: float) -> None:
    """Have every connection of this process, in any thread, bear no longer silence where its thread has no limit of its own.

    A statement that computes, or waits for a lock, sends no byte either. So this is for processes that serve others, not for
    commands: those may rightly wait as long as a migration takes.
    """
    _of_process[:] = [WaitLimit(silence_s=silence_s)]


@contextmanager
def limit_waits(limit: WaitLimit) -> Iterator[None]:
    """Have every connection that this thread uses in the block wait no longer than that."""
    before, _of_thread.limit = _of_thread.limit, limit
    try:
        yield
    finally:
        _of_thread.limit = before


def read_wait_limit() -> WaitLimit | None:
    """Return what binds the calling thread at the moment; None = it waits for ever."""
    if _of_thread.limit is not None:
        return _of_thread.limit
    return _of_process[0] if _of_process else None


class BoundConnection(psycopg.Connection[Any]):  # Any: rows are as their cursor makes them
    """A connection whose every wait ends as ``limit`` says, else as that of its thread or process, if any."""

    limit: WaitLimit | None = None
    on_sent: Callable[[], None] | None = None
    """Called in the next wait that is bound by a limit, once all bytes are the kernel's and only the answer is awaited."""

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Return what ``gen`` comes to. Raises ServerSilent, with the connection closed, and whatever ``gen`` raises."""
        limit = self.limit or read_wait_limit()
        if limit is None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(_end_on_silence(gen, limit, self.on_sent), interval, timeout)
        except ServerSilent:
            # What was asked for may still come to pass: nothing more is asked on this connection.
            self.pgconn.finish()
            raise
        finally:
            self.on_sent = None


def _end_on_silence(gen: PQGen[RV], limit: WaitLimit, on_sent: Callable[[], None] | None) -> PQGen[RV]:
    """Pass on what the two sides say to each other; raise ServerSilent when the socket is not ready for too long."""
    silent_from = clock.monotonic()
    ends_at = limit.ends_at if limit.ends_at is not None else float("inf")
    try:
        wanted = next(gen)
        while True:
            if on_sent is not None and wanted == WAIT_R:
                on_sent()
                on_sent = None
            ready = yield wanted
            now = clock.monotonic()
            if ready:
                silent_from = now
            if now >= min(silent_from + limit.silence_s, ends_at):
                raise ServerSilent(f"the database did not answer within {now - silent_from:.1f} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: RV = end.value
        return result
    finally:
        if isinstance(gen, Generator):
            gen.close()


LAZILY = "set_config('synchronous_commit', 'off', true)"
"""SQL by which the commit of its transaction does not wait for the disk: for what is written again within seconds anyway.

A crash of PostgreSQL forgets the last of it, never a part. Without it an idle installation writes 50 MB an hour of heartbeats.
"""


class DatabaseWrapper(base.DatabaseWrapper):
    """Django's PostgreSQL backend. Without ``limit_waits`` and ``limit_process`` it behaves exactly like it."""

    def get_connection_params(self) -> dict[str, Any]:  # Any: Django's own signature
        """Return the arguments of ``connect``, with the server's own limits where the thread is bound by one."""
        parameters: dict[str, Any] = super().get_connection_params()
        limit = read_wait_limit()
        if limit is not None:
            least_s = limits().core.database_statement_s
            limit_s = limit.left_s if limit.ends_at is not None else max(least_s, limit.silence_s)
            option = f"-c statement_timeout={max(1, int(1000 * limit_s))}"
            parameters["options"] = f"{parameters.get('options', '')} {option}".strip()
            parameters["connect_timeout"] = _limit_connect(str(parameters.get("connect_timeout", "")), limit.left_s)
        return parameters

    def keep(self) -> None:
        """Leave the connection open for the next work of this thread, whatever ``CONN_MAX_AGE`` says."""
        self.close_at = None

    def close_if_left(self) -> None:
        """Close a kept connection that the server closed meanwhile, so that the next statement opens another. Asks nothing."""
        if self.connection is None or self.in_atomic_block:
            return
        told = select.poll()
        told.register(self.connection.pgconn.socket, select.POLLIN)
        if told.poll(0):  # a server says nothing to who asks nothing, but that it ends
            self.close()

    def get_new_connection(self, conn_params: dict[str, Any]) -> BoundConnection:
        """Return an open connection. Raises OperationalError of the driver."""
        self.isolation_level = IsolationLevel.READ_COMMITTED
        return BoundConnection.connect(**conn_params)


def _limit_connect(given: str, left_s: float) -> int:
    """Return libpq's ``connect_timeout``, whole seconds: what the URL says, where that is a limit and a lower one."""
    # libpq waits no less than that.
    limit_s = max(limits().core.database_least_connect_s, int(left_s))
    return min(limit_s, int(given)) if given.isdecimal() and int(given) > 0 else limit_s
