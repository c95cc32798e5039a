"""Our channel layer on a virtual loop: the clock stands while a command to Valkey, or a hint on its way, is under way."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from typing import Any, ClassVar

from channels.layers import get_channel_layer

from core.hints import HintLayer
from tests.fakes.virtual_loop import VirtualLoop
from tests.fakes.waiting import takes

LAYERS = {"BACKEND": "tests.fakes.counted_hints.CountedHintLayer"}
"""What ``CHANNEL_LAYERS`` says instead of the product's class."""
_PAUSE_S = 0.2
"""The layer's reader sleeps for 0.1 s before it first looks whether anything was subscribed."""


class CountedHintLayer(HintLayer):
    """Delivers hints through Valkey, as the product's layer does. Hints of other processes come when they come."""

    loop: ClassVar[VirtualLoop | None] = None
    """The loop that listens; what other loops do (a thread's, to send) is not counted here."""
    _coming: ClassVar[Counter[tuple[str, str]]] = Counter()
    _listening: ClassVar[set[str]] = set()

    async def new_channel(self, prefix: str = "specific.") -> str:
        with _here().underway("a command to Valkey"):
            return await super().new_channel(prefix)

    async def group_add(self, group: str, channel: str) -> None:
        """Join a group; return once Valkey knows of it."""
        with _here().underway("a command to Valkey"):
            layer = self._get_layer()
            await layer.group_add(group, channel)
            name = layer._get_group_channel_name(group)
            shard = layer._get_shard(name)
            while not (await shard._redis.pubsub_numsub(name))[0][1]:
                pass
        await takes(_PAUSE_S)
        self._listening.add(channel)

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        """Send a hint; it is under way until every listener of this process has it."""
        loop, key = self.loop, (message["topic"], message["ident"])
        if loop is None:
            await self._get_layer().group_send(group, message)
            return
        listeners = len(self._listening)
        for _ in range(listeners):
            self._coming[key] += 1
            loop.begin(f"hint {message['topic']}")
        try:
            await self._get_layer().group_send(group, message)
        except BaseException:
            for _ in range(listeners):
                self._coming[key] -= 1
                loop.end(f"hint {message['topic']}")
            raise

    async def receive(self, channel: str) -> dict[str, Any]:
        try:
            message = await super().receive(channel)
        except BaseException:
            self._listening.discard(channel)
            self._arrive(*self._coming.elements())
            raise
        if self._coming[key := (message["topic"], message["ident"])]:
            self._arrive(key)
        return message

    def _arrive(self, *hints: tuple[str, str]) -> None:
        for key in hints:
            self._coming[key] -= 1
            _here().end(f"hint {key[0]}")


def _here() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def close_layer() -> None:
    with _here().underway("a command to Valkey"), suppress(asyncio.CancelledError):
        await get_channel_layer()._get_layer().flush()
