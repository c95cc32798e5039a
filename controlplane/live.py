"""Live counters for operators' pages: ``/ws/overview`` pushes a small JSON object on every hint and every two seconds."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.db import DatabaseError

from controlplane.overview import read_live_counters
from governance.hints import HINT_GROUP

PUSH_EVERY_S = 2.0
MIN_PAUSE_S = 0.25
"""A storm of hints costs at most four looks a second and page."""
TRY_AGAIN_LATER = 1013
"""Close code for "the database is away": the page comes back by itself, later and later."""


class OverviewConsumer(AsyncJsonWebsocketConsumer):  # type: ignore[misc]  # Channels ships no types
    """Pushes counters to one page of a signed-in operator. Whatever the page sends is ignored."""

    groups = [HINT_GROUP]

    async def connect(self) -> None:
        """Accept operators; everyone else sees a refused handshake (403)."""
        user = self.scope["user"]
        if not (user.is_active and user.is_staff):
            await self.close()
            return
        await self.accept()
        self._look = asyncio.Event()
        self._pusher = asyncio.create_task(self._push_counters())

    async def disconnect(self, code: int) -> None:
        """Stop pushing."""
        pusher: asyncio.Task[None] | None = getattr(self, "_pusher", None)
        if pusher is None:
            return
        pusher.cancel()
        with suppress(asyncio.CancelledError):
            await pusher

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None, **_rest: Any) -> None:
        """Ignore what the page sends: it has nothing to say here."""

    async def hint(self, message: dict[str, str]) -> None:
        """Look again now: rows have changed."""
        self._look.set()

    async def _push_counters(self) -> None:
        while True:
            try:
                counters = await database_sync_to_async(read_live_counters)()
            except DatabaseError:
                await self.close(code=TRY_AGAIN_LATER)
                return
            await self.send_json(counters)
            self._look.clear()
            await asyncio.sleep(MIN_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(PUSH_EVERY_S - MIN_PAUSE_S):
                    await self._look.wait()
