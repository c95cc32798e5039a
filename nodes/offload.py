"""Running ORM work beside an event loop: a few threads, one bounded wait, connections given back.

The loop that relays tokens must never wait for SQL; everything that needs the ORM there goes through here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from django.db import close_old_connections

P = ParamSpec("P")
R = TypeVar("R")

_THREADS = 4
_pool = ThreadPoolExecutor(max_workers=_THREADS, thread_name_prefix="orm")


async def run_in_database(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run ``function`` in a thread of the ORM pool and return its result. Raises what it raises."""

    def call() -> R:
        close_old_connections()
        try:
            return function(*args, **kwargs)
        finally:
            close_old_connections()

    return await asyncio.get_running_loop().run_in_executor(_pool, call)
