"""Writing ASGI messages from synchronous code, in order, with a bound on what waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

AsgiMessage = dict[str, Any]
"""An ASGI event; the specification leaves its values open."""
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]


class _Rest:
    """The part of a coroutine that is left after its first suspension, as something a task can await."""

    __slots__ = ("_coroutine", "_first")

    def __init__(self, coroutine: Coroutine[Any, Any, None], first: object) -> None:
        self._coroutine = coroutine
        self._first = first

    def __await__(self) -> Generator[Any, Any, None]:
        awaited: Any = self._first  # what the server suspended on; asyncio knows its type
        while True:
            try:
                value = yield awaited
            except BaseException as error:  # noqa: BLE001 - thrown into the server's coroutine, which decides
                step = self._throw(error)
            else:
                step = self._send(value)
            if step is _DONE:
                return
            awaited = step

    def _send(self, value: object) -> object:
        try:
            return self._coroutine.send(value)
        except StopIteration:
            return _DONE

    def _throw(self, error: BaseException) -> object:
        try:
            return self._coroutine.throw(error)
        except StopIteration:
            return _DONE


_DONE = object()


class Outbox:
    """Ordered, bounded, synchronous writing to one ASGI connection.

    ``on_stuck`` is called once, with a reason, when the peer took nothing for ``timeout_s``, when more than
    ``limit_bytes`` wait, or when the server refuses the connection; nothing is written afterwards.
    ``on_drained`` is called when everything that waited was taken.
    """

    def __init__(
        self,
        send: AsgiSend,
        *,
        limit_bytes: int,
        timeout_s: float,
        on_stuck: Callable[[str], None],
        on_drained: Callable[[], None] | None = None,
    ) -> None:
        self._send = send
        self._limit_bytes = limit_bytes
        self._timeout_s = timeout_s
        self._on_stuck = on_stuck
        self._on_drained = on_drained
        self._waiting: deque[tuple[AsgiMessage, int]] = deque()
        self._waiting_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self.dead = False
        self.is_blocked = False
        """Whether the peer does not keep up at the moment: there is a task, and it waits for it."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes handed over and not yet taken by the server."""
        return self._waiting_bytes

    def put(self, message: AsgiMessage, size: int) -> None:
        """Write one message of about ``size`` bytes, now or when those before it are through."""
        if self.dead:
            return
        if self._task is not None:
            self._waiting.append((message, size))
            self._waiting_bytes += size
            if self._waiting_bytes > self._limit_bytes:
                self._fail("too many bytes wait for this peer")
            return
        coroutine: Any = self._send(message)  # a coroutine by the ASGI specification
        try:
            # By hand: a server that is not under back-pressure finishes ``send`` without suspending it, and then no task is
            # needed. Only when it does suspend a task waits for it, and whatever follows queues up behind.
            suspended = coroutine.send(None)
        except StopIteration:
            return
        except (OSError, RuntimeError) as error:
            self._fail(f"the connection refused a write: {error}")
            return
        self._waiting_bytes += size
        self._task = asyncio.get_running_loop().create_task(self._drain(_Rest(coroutine, suspended), size))
        self.is_blocked = True

    def stop(self) -> None:
        """Write nothing more and forget what waits."""
        self.dead = True
        self._waiting.clear()
        self._waiting_bytes = 0
        if self._task is not None:
            self._task.cancel()
            self._let_go()

    async def _drain(self, first: _Rest, size: int) -> None:
        try:
            await self._bounded(first)
            self._waiting_bytes -= size
            while self._waiting:
                message, size = self._waiting.popleft()
                await self._bounded(self._send(message))
                self._waiting_bytes -= size
        except TimeoutError:
            self._let_go()
            self._fail(f"the peer took nothing for {self._timeout_s:g} s")
            return
        except (OSError, RuntimeError) as error:
            self._let_go()
            self._fail(f"the connection refused a write: {error}")
            return
        self._let_go()
        if self._on_drained is not None:
            self._on_drained()

    def _let_go(self) -> None:
        self._task = None
        self.is_blocked = False

    async def _bounded(self, write: Awaitable[None] | _Rest) -> None:
        async with asyncio.timeout(self._timeout_s):
            await write

    def _fail(self, reason: str) -> None:
        if self.dead:
            return
        self.stop()
        self._on_stuck(reason)
