"""Process trees: making sure that nothing of one is left, and which connections it has not let go of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import psutil

from runner.limits import limits
from wire import clock


def list_tree(pid: int | None) -> list[psutil.Process]:
    """Return a process and all that descends from it, nothing when there is none."""
    if pid is None:
        return []
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def list_left(pids: Iterable[int]) -> set[int]:
    """Return the ports of clients that have closed a connection to a server in these trees, which still holds it open. Blocks.

    Its own connections to others do not count: a server may keep those as long as it likes.
    """
    found = []
    for pid in pids:
        for process in list_tree(pid):
            with contextlib.suppress(psutil.Error):
                found += process.net_connections(kind="tcp")
    served = {connection.laddr.port for connection in found if connection.status == psutil.CONN_LISTEN}
    return {
        connection.raddr.port
        for connection in found
        if connection.status == psutil.CONN_CLOSE_WAIT and connection.laddr.port in served
    }


async def kill_rest(tree: list[psutil.Process]) -> list[int]:
    """Kill what still runs of ``tree``; return the process ids of what has not gone within ``gone_s``."""
    give_up_at = clock.monotonic() + limits().engines.gone_s
    while True:
        left = [process for process in tree if _is_alive(process)]
        if not left or clock.monotonic() >= give_up_at:
            return [process.pid for process in left]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        await asyncio.sleep(limits().engines.gone_poll_s)


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs; a process id that another program has got in the meantime does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
