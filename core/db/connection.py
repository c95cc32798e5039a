"""A psycopg connection that stops waiting by itself when the server says nothing.

A frozen server keeps its sockets open and its kernel acknowledges what arrives: neither ``statement_timeout``, which the
server would have to enforce, nor TCP's own timers end such a wait. Only whoever waits can.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.waiting import WAIT_R

from wire import clock

RV = TypeVar("RV")


class ServerSilent(psycopg.OperationalError):
    """The server did not answer in time; the connection was closed, and what was asked for may still come to pass."""


@dataclass(frozen=True, slots=True)
class Patience:
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
    patience: Patience | None = None


_of_thread = _OfThread()
_of_process: list[Patience] = []


def limit_process(silence_s: float) -> None:
    """Have every connection of this process, in any thread, bear no longer silence where its thread has no limit of its own.

    A statement that computes, or waits for a lock, sends no byte either. So this is for processes that serve others, not for
    commands: those may rightly wait as long as a migration takes.
    """
    _of_process[:] = [Patience(silence_s=silence_s)]


@contextmanager
def limit_patience(patience: Patience) -> Iterator[None]:
    """Have every connection that this thread uses in the block wait no longer than that."""
    before, _of_thread.patience = _of_thread.patience, patience
    try:
        yield
    finally:
        _of_thread.patience = before


def read_patience() -> Patience | None:
    """Return what binds the calling thread at the moment; None = it waits for ever."""
    if _of_thread.patience is not None:
        return _of_thread.patience
    return _of_process[0] if _of_process else None


class PatientConnection(psycopg.Connection[Any]):  # Any: rows are as their cursor makes them
    """A connection whose every wait ends as ``patience`` says, else as that of its thread or process, if any."""

    patience: Patience | None = None
    on_sent: Callable[[], None] | None = None
    """Called in the next wait that is bound by a patience, once all bytes are the kernel's and only the answer is awaited."""

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        """Return what ``gen`` comes to. Raises ServerSilent, with the connection closed, and whatever ``gen`` raises."""
        patience = self.patience or read_patience()
        if patience is None:
            return super().wait(gen, interval, timeout)
        try:
            return super().wait(_end_on_silence(gen, patience, self.on_sent), interval, timeout)
        except ServerSilent:
            self.pgconn.finish()
            raise
        finally:
            self.on_sent = None


def _end_on_silence(gen: PQGen[RV], patience: Patience, on_sent: Callable[[], None] | None) -> PQGen[RV]:
    """Pass on what the two sides say to each other; raise ServerSilent when the socket is not ready for too long."""
    silent_from = clock.monotonic()
    ends_at = patience.ends_at if patience.ends_at is not None else float("inf")
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
            if now >= min(silent_from + patience.silence_s, ends_at):
                raise ServerSilent(f"the database did not answer within {now - silent_from:.1f} s")
            wanted = gen.send(ready)
    except StopIteration as end:
        result: RV = end.value
        return result
    finally:
        if isinstance(gen, Generator):
            gen.close()
