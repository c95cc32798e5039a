"""What open pages of operators follow: ``/ws/overview`` its counters, ``/ws/nodes/{id}`` the state of one box.

Each looks at the rows on every hint and on a clock of its own, and pushes a small JSON object.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.db import DatabaseError
from django.template.loader import render_to_string

from controlplane.models import User
from controlplane.overview import read_live_counters
from governance.hints import HINT_GROUP
from nodes.services.boxes import read_box

PUSH_EVERY_S = 2.0
PUSH_CHANGES_EVERY_S = 0.5
"""While a model is loaded: what the box says of it is written about once a second."""
MIN_PAUSE_S = 0.25
"""A storm of hints costs at most four looks a second and page."""
TRY_AGAIN_LATER = 1013
"""Close code for "the database is away": the page comes back by itself, later and later."""
Pushed = dict[str, Any]
"""A JSON object."""


class PushConsumer(AsyncJsonWebsocketConsumer):  # type: ignore[misc]  # Channels ships no types
    """Pushes to one page of a signed-in operator what ``look`` returns. Whatever the page sends is ignored."""

    groups = [HINT_GROUP]

    def may_look(self, user: User) -> bool:
        """Whether this operator may see it; runs in a thread."""
        return True

    def look(self) -> tuple[Pushed, float]:
        """Return what to push and the seconds until the next look; runs in a thread."""
        raise NotImplementedError

    async def connect(self) -> None:
        """Accept operators; everyone else sees a refused handshake (403)."""
        user = self.scope["user"]
        if not (user.is_active and user.is_staff and await database_sync_to_async(self.may_look)(user)):
            await self.close()
            return
        await self.accept()
        self._look_again = asyncio.Event()
        self._pusher = asyncio.create_task(self._push())

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
        self._look_again.set()

    async def _push(self) -> None:
        while True:
            try:
                pushed, pause_s = await database_sync_to_async(self.look)()
            except DatabaseError:
                await self.close(code=TRY_AGAIN_LATER)
                return
            await self.send_json(pushed)
            self._look_again.clear()
            await asyncio.sleep(MIN_PAUSE_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s - MIN_PAUSE_S):
                    await self._look_again.wait()


class OverviewConsumer(PushConsumer):
    """The counters of the first page."""

    def look(self) -> tuple[Pushed, float]:
        """Return the counters."""
        return {**read_live_counters()}, PUSH_EVERY_S


class BoxConsumer(PushConsumer):
    """What the page of one box shows of its models and memory, as the same HTML that the page came with."""

    def may_look(self, user: User) -> bool:
        """Follow the permission of the page itself."""
        return user.has_perm("nodes.view_node") or user.has_perm("nodes.change_node")

    def look(self) -> tuple[Pushed, float]:
        """Return the state of the box, more often while a model is loaded."""
        box = read_box(self.scope["url_route"]["kwargs"]["node_id"])
        if box is None:
            return {"html": ""}, PUSH_EVERY_S
        html = render_to_string("admin/muster/box_state.html", {"box": box})
        return {"html": html}, PUSH_CHANGES_EVERY_S if box.changing else PUSH_EVERY_S
