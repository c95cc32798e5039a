"""The two halves of flow control: a gate that holds a sender back, and a queue that holds a client back."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from twisted.internet.interfaces import IPushProducer
from zope.interface import implementer

from core.limits import limits


@implementer(IPushProducer)
class WriteGate:
    """Closed while the transport holds more unsent bytes than it wants to. What sends waits at the gate."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._is_released = False

    def pauseProducing(self) -> None:  # noqa: N802  # Twisted's interface
        """Close the gate: the transport's buffer is full."""
        if not self._is_released:
            self._open.clear()

    def resumeProducing(self) -> None:  # noqa: N802  # Twisted's interface
        """Open the gate: the buffer has drained."""
        self._open.set()

    def stopProducing(self) -> None:  # noqa: N802  # Twisted's interface
        """Open the gate for good: the connection is gone and nobody may wait on it."""
        self._is_released = True
        self._open.set()

    async def wait_open(self) -> None:
        """Return once the transport takes more bytes, or is gone."""
        await self._open.wait()


class Pausable(Protocol):
    """The part of a transport that a queue needs."""

    def pauseProducing(self) -> None:  # noqa: N802  # Twisted's interface
        """Stop reading from the socket."""

    def resumeProducing(self) -> None:  # noqa: N802  # Twisted's interface
        """Read from the socket again."""


class PausingQueue(asyncio.Queue[dict[str, Any]]):  # Any: ASGI messages
    """An application's inbox that stops reading the socket above ``inbox_high`` messages and reads again at ``inbox_low``.

    The bytes of one read may still be parsed into further messages, so its bound is ``inbox_high`` plus one read (64 KiB).
    """

    def __init__(self, transport: Pausable) -> None:
        super().__init__()
        self._limits = limits().console
        self._transport = transport
        self._is_paused = False

    def put_nowait(self, item: dict[str, Any]) -> None:
        """Append a message; pause the client when enough are waiting."""
        super().put_nowait(item)
        if not self._is_paused and self.qsize() > self._limits.inbox_high:
            self._is_paused = True
            self._transport.pauseProducing()

    async def get(self) -> dict[str, Any]:
        """Take the next message; let the client go on when few are waiting."""
        item = await super().get()
        if self._is_paused and self.qsize() <= self._limits.inbox_low:
            self._is_paused = False
            self._transport.resumeProducing()
        return item
