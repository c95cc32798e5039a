"""Processes that stand still with all they have started: their sockets stay open and say nothing, as in a stopped machine."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.fakes.waiting import takes_blocking

WITHIN_S = 30.0
_STANDING = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}


@contextmanager
def standing_still(parent: psutil.Process) -> Iterator[None]:
    """Stop a process and everything below it without ending it, and let it all go on after the block."""
    stopped = stop_tree(parent)
    try:
        yield
    finally:
        go_on(stopped)


def stop_tree(parent: psutil.Process) -> list[psutil.Process]:
    """Stop a process and everything below it; return what stands now, for ``go_on``."""
    stopped = [parent]
    try:
        _stop(parent)  # first: it starts no others then
        stopped += parent.children(recursive=True)
        for process in stopped[1:]:
            _stop(process)
    except BaseException:
        go_on(stopped)  # nobody else would
        raise
    return stopped


def go_on(stopped: list[psutil.Process]) -> None:
    """Let the processes go on. One that had ended before is gone as soon as its parent, which goes on last, looks after it."""
    for process in reversed(stopped):
        with suppress(psutil.NoSuchProcess):
            process.resume()


def _stop(process: psutil.Process) -> None:
    """Stop a process and return once it stands, or has ended: until it comes to see the signal it may still answer."""
    until = time.monotonic() + WITHIN_S
    with suppress(psutil.NoSuchProcess):
        process.suspend()
        while process.status() not in _STANDING:
            assert time.monotonic() < until, f"{process} does not stand still"
            takes_blocking(0.01)
            process.suspend()
