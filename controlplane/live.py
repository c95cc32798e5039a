"""What open pages follow: ``/ws/overview`` its counters, ``/ws/nodes/{id}`` one node, ``/ws/operations/{id}`` one operation.

Each looks at the rows on every hint and on a clock of its own, and pushes a small JSON object.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import IntEnum
from typing import Any

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import Error as DatabaseFailure
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils import translation

from controlplane.overview import read_overview
from core.hints import HINT_GROUP
from core.limits import limits
from core.models import User
from governance.errors import NotFound
from governance.operations.queries import read_operation
from governance.signin import find_living, find_read_only, may_act
from governance.states import RunState
from governance.web.operations import render_live
from nodes.pages import find_head
from wire import clock

Pushed = dict[str, Any]
"""A JSON object."""


class CloseCode(IntEnum):
    """Why a page gets no further push."""

    TRY_AGAIN_LATER = 1013
    """The database is away: the page comes back by itself, later and later."""
    SIGNED_OUT = 4401
    """The session of whoever opened this has ended."""
    NOT_PERMITTED = 4403
    """They may not look, or not any more."""


def read_language(scope: dict[str, Any]) -> str:
    """Return the language of the page that opened a socket, as ``LanguageMiddleware`` chose it."""
    request = HttpRequest()
    request.COOKIES = scope["cookies"]
    request.META["HTTP_ACCEPT_LANGUAGE"] = dict(scope["headers"]).get(b"accept-language", b"").decode("latin-1")
    return translation.get_language_from_request(request)


class PushConsumer(AsyncJsonWebsocketConsumer):  # type: ignore[misc]  # Channels ships no types
    """Pushes to one page of a signed-in operator what ``look`` returns. Whatever the page sends is ignored."""

    groups = [HINT_GROUP]
    is_for_staff = True
    """Whether only operators may look, or everybody who is signed in."""

    def may_look(self, user: User) -> bool:
        """Whether this operator may see it; runs in a thread."""
        return True

    def look(self, request: HttpRequest) -> tuple[Pushed, float]:
        """Return what to push and the seconds until the next look; runs in a thread.

        ``request``: of whoever looks, as they would make it now.
        """
        raise NotImplementedError

    def _look_while_let_in(self) -> tuple[Pushed, float] | CloseCode:
        """Return what to push; a close code once the session has ended or its person may not look any more."""
        request = find_living(self.scope["cookies"].get(settings.SESSION_COOKIE_NAME, ""), now=clock.unix_s())
        if request is None or isinstance(request.user, AnonymousUser):
            return CloseCode.SIGNED_OUT
        user = request.user
        may_look = (user.is_staff or not self.is_for_staff) and self.may_look(user)
        return self.look(request) if may_look else CloseCode.NOT_PERMITTED

    async def connect(self) -> None:
        self._language = read_language(self.scope)
        # Everybody: a browser learns no reason for a refused handshake. The first look says who is let in.
        await self.accept()
        self._look_again = asyncio.Event()
        self._pusher = asyncio.create_task(self._push())

    async def disconnect(self, code: int) -> None:
        pusher: asyncio.Task[None] | None = getattr(self, "_pusher", None)
        if pusher is None:
            return
        pusher.cancel()
        with suppress(asyncio.CancelledError):
            await pusher

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None, **_rest: Any) -> None:
        """Ignore what the page sends: it has nothing to say here."""

    async def hint(self, message: dict[str, str]) -> None:
        self._look_again.set()

    async def _push(self) -> None:
        while True:
            try:
                with translation.override(self._language):
                    seen = await database_sync_to_async(self._look_while_let_in)()
            except DatabaseFailure:
                await self.close(code=CloseCode.TRY_AGAIN_LATER)
                return
            if isinstance(seen, CloseCode):
                await self.close(code=seen)
                return
            pushed, pause_s = seen
            await self.send_json(pushed)
            self._look_again.clear()
            await asyncio.sleep(limits().console.push_pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s - limits().console.push_pause_s):
                    await self._look_again.wait()


class OverviewConsumer(PushConsumer):
    """The counters of the first page, what needs attention, and the nodes, as the same HTML that the page came with."""

    def look(self, request: HttpRequest) -> tuple[Pushed, float]:
        """Return how things stand."""
        overview = read_overview()
        parts = {
            name: render_to_string(f"admin/muster/overview_{name}.html", {"overview": overview})
            for name in ("problems", "nodes")
        }
        return {"counters": overview.live, "parts": parts}, limits().console.push_s


class NodePageConsumer(PushConsumer):
    """What the page of one node shows of its state, models and memory, as the same HTML that the page came with."""

    def may_look(self, user: User) -> bool:
        return user.has_perm("nodes.view_node") or user.has_perm("nodes.change_node")

    def look(self, request: HttpRequest) -> tuple[Pushed, float]:
        """Return the state of the node, more often while a model is loaded or a drain runs."""
        found = find_head(self.scope["url_route"]["kwargs"]["node_id"])
        if found is None:
            return {"html": ""}, limits().console.push_s
        node, head = found
        page = {
            "original": node,
            "head": head,
            "telemetry": head.telemetry,
            "may_change": request.user.has_perm("nodes.change_node"),
            "read_only": find_read_only(request),
        }
        pushed = {
            "head": render_to_string("admin/muster/node_head.html", page),
            "html": render_to_string("admin/muster/node_state.html", page),
        }
        is_moving = head.telemetry.changing or node.draining
        return pushed, limits().console.push_changes_s if is_moving else limits().console.push_s


class OperationConsumer(PushConsumer):
    """What the page of one operation shows of approvals and progress, as the same HTML that the page came with."""

    is_for_staff = False

    def look(self, request: HttpRequest) -> tuple[Pushed, float]:
        """Return the state of the operation, more often while a node works on it."""
        assert isinstance(request.user, User)  # or nobody would look
        try:
            operation = read_operation(self.scope["url_route"]["kwargs"]["operation_id"], request.user)
        except NotFound:
            return {"html": ""}, limits().console.push_s
        html = render_live(operation, is_able=may_act(request))
        is_moving = operation.summary.run_state in {RunState.DISPATCHED, RunState.EXECUTING}
        return {"html": html}, limits().console.push_changes_s if is_moving else limits().console.push_s
