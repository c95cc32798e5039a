"""What open pages follow: ``/ws/overview`` its counters, ``/ws/nodes/{id}`` one node, ``/ws/operations/{id}`` one operation.

Each looks at the rows on every hint and on a clock of its own, and pushes a small JSON object.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar
from urllib.parse import parse_qs

from asgiref.sync import ThreadSensitiveContext
from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncJsonWebsocketConsumer
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import Error as DatabaseFailure
from django.db import connections
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.utils import translation

from controlplane.overview import (
    NODES,
    OPEN,
    REQUESTS,
    TENANTS,
    Overview,
    choose_range,
    list_seen,
    read_board,
    read_overview,
)
from core.hints import HINT_GROUP
from core.limits import limits
from core.models import User
from core.roles import may
from governance.errors import NotFound
from governance.operations.queries import list_waiting_for, mark_pending, read_operation
from governance.people import may_see_operations
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of Overview as JSON. ``look``: by which it changed last; ``needs``: what a person must see to get it."""

    text: str
    look: int
    needs: str


_Topic = tuple[str, str]
"""What two pages have to have in common to be pushed the same: language and range."""
_Pieces = Mapping[tuple[str, str], _Piece]
"""By kind, which is that of a member of the push, and name."""


@dataclass(eq=False, slots=True)
class FollowedPage:
    """One open Overview. ``sent``: the look that it got last; ``pending``: how all operations stood when it was checked."""

    session_key: str
    topic: _Topic
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    sees: frozenset[str] = frozenset()
    checked_at: float | None = None
    pending: object = None
    waiting: _Piece | None = None
    sent: int = 0
    ended: CloseCode | None = None


class OverviewFeed:
    """What the open Overviews of a process are pushed: looked at once for all of them, in a thread, while there are any.

    Not through the channel layer: several processes would each send to the pages of all, and HTML would go through Valkey.
    """

    def __init__(self) -> None:
        self._pages: set[FollowedPage] = set()
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self._look_number = 0
        self._pieces: dict[_Topic, _Pieces] = {}
        self._summed_at: dict[_Topic, float] = {}
        self._texts: dict[tuple[_Topic, int, frozenset[str]], str] = {}

    def join(self, page: FollowedPage) -> None:
        self._pages.add(page)
        if self._task is None:
            self._woken = asyncio.Event()
            # Not in the thread of the page that happens to be the first: that ends with it.
            self._task = asyncio.create_task(self._run(), context=Context())
        self._woken.set()

    async def leave(self, page: FollowedPage) -> None:
        """Forget a page; with the last one the looks end, and the one that is under way is waited for."""
        self._pages.discard(page)
        if not self._pages and self._task is not None:
            task, self._task = self._task, None
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def write(self, page: FollowedPage) -> str:
        """Return what the page has not been sent yet, as JSON. Pages that miss the same get the same text."""
        key = (page.topic, page.sent, page.sees)
        if key not in self._texts:
            self._texts[key] = _write_pieces(
                {name: one for name, one in self._pieces[page.topic].items() if one.look > page.sent and one.needs in page.sees}
            )
        text = self._texts[key]
        if page.waiting is not None and page.waiting.look > page.sent:
            text = f'{text[:-1]},"waiting":{page.waiting.text}}}'
        page.sent = self._look_number
        return text

    async def _run(self) -> None:
        try:
            async with ThreadSensitiveContext():
                try:
                    await self._look_again_and_again()
                finally:
                    await database_sync_to_async(connections.close_all)()
        except DatabaseFailure:
            pass
        finally:
            if asyncio.current_task() is self._task:
                self._task = None
            for page in self._pages:
                page.ended = CloseCode.TRY_AGAIN_LATER
                page.woken.set()

    async def _look_again_and_again(self) -> None:
        while True:
            pages = tuple(self._pages)
            self._pieces = await database_sync_to_async(self.look)(pages, self._look_number + 1)
            self._look_number += 1
            self._texts.clear()
            for page in pages:
                page.woken.set()
            self._woken.clear()
            await asyncio.sleep(limits().console.push_pause_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(limits().console.push_overview_s - limits().console.push_pause_s):
                    await self._woken.wait()

    def look(self, pages: Sequence[FollowedPage], number: int) -> dict[_Topic, _Pieces]:
        """Return what the pages show, and check whether their people may see it still; runs in a thread."""
        pending, checked = mark_pending(), dict[tuple[str, str], _Checked]()
        now = clock.monotonic()
        for page in pages:
            with translation.override(page.topic[0]):
                if page.checked_at is None or page.pending != pending or now - page.checked_at >= limits().console.push_check_s:
                    self._check(page, checked, number, is_anything_pending=pending.operations > 0)
                    page.checked_at, page.pending = now, pending
        topics = {page.topic for page in pages if page.ended is None}
        found: dict[_Topic, _Pieces] = {}
        for language in {topic[0] for topic in topics}:
            with translation.override(language):
                overview = read_overview()
                live: dict[tuple[str, str], tuple[str, object]] = {
                    ("counters", name): (OPEN, value) for name, value in overview.live.items()
                }
                live |= {("parts", name): _render(name, {"overview": overview}) for name in ("problems", "nodes")}
                for topic in (topic for topic in topics if topic[0] == language):
                    found[topic] = self._renew(topic, live | self._read_sums(topic, overview, now), number)
        self._summed_at = {topic: at for topic, at in self._summed_at.items() if topic in topics}
        return found

    def _check(
        self, page: FollowedPage, checked: dict[tuple[str, str], _Checked], number: int, *, is_anything_pending: bool
    ) -> None:
        key = (page.session_key, page.topic[0])
        if key not in checked:
            checked[key] = _check_session(page.session_key, is_anything_pending=is_anything_pending)
        page.ended, page.sees, waiting = checked[key]
        if page.waiting is None or page.waiting.text != waiting:
            page.waiting = _Piece(waiting, number, OPEN)

    def _read_sums(self, topic: _Topic, overview: Overview, now: float) -> dict[tuple[str, str], tuple[str, object]]:
        """Return the charts and figures of a range; nothing while those of the last time are new enough."""
        if topic in self._pieces and now - self._summed_at[topic] < limits().console.push_sums_s:
            return {}
        self._summed_at[topic] = now
        board = read_board(topic[1])
        context: dict[str, object] = {"overview": overview, "board": board}
        tiles = {f"tile-{tile.name}": _render("tile", {**context, "tile": tile}, tile.part) for tile in board.tiles}
        parts = tiles | {name: _render(name, context) for name in ("models", "tenants")}
        charts: dict[tuple[str, str], tuple[str, object]] = {
            ("charts", chart.name): (REQUESTS, chart.data) for chart in board.charts
        }
        return charts | {("parts", name): part for name, part in parts.items()}

    def _renew(self, topic: _Topic, found: Mapping[tuple[str, str], tuple[str, object]], number: int) -> _Pieces:
        """Return the pieces of a topic, of which those are new that say something else than before."""
        pieces = dict(self._pieces.get(topic, {}))
        for key, (needs, value) in found.items():
            text = _print(value)
            if key not in pieces or pieces[key].text != text:
                pieces[key] = _Piece(text, number, needs)
        return pieces


_Checked = tuple[CloseCode | None, frozenset[str], str]
"""Why the pages of a session end, what they may see, and what waits for their person, as JSON."""


def _check_session(session_key: str, *, is_anything_pending: bool) -> _Checked:
    request = find_living(session_key, now=clock.unix_s())
    if request is None or not isinstance(request.user, User):
        return CloseCode.SIGNED_OUT, frozenset(), ""
    if not request.user.is_staff:
        return CloseCode.NOT_PERMITTED, frozenset(), ""
    _needs, html = _render("waiting", {"waiting": list_waiting_for(request.user) if is_anything_pending else ()})
    return None, list_seen(request.user), _print(html)


_NEEDS = {"nodes": NODES, "models": REQUESTS, "tenants": TENANTS}


def _render(name: str, context: dict[str, object], needs: str | None = None) -> tuple[str, str]:
    return _NEEDS.get(name, OPEN) if needs is None else needs, render_to_string(f"admin/muster/overview_{name}.html", context)


def _print(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _write_pieces(pieces: _Pieces) -> str:
    """Return a push of these pieces."""
    kinds: dict[str, list[str]] = {"counters": [], "parts": [], "charts": []}
    for (kind, name), piece in pieces.items():
        kinds[kind].append(f'"{name}":{piece.text}')
    return "{" + ",".join(f'"{kind}":{{{",".join(members)}}}' for kind, members in kinds.items()) + "}"


class OverviewConsumer(PushConsumer):
    """The first page: its figures, charts, and parts as the same HTML that the page came with, whenever they change."""

    groups: list[str] = []

    def __init__(self, feed: OverviewFeed, **options: Any) -> None:  # Any: Channels'
        super().__init__(**options)
        self._feed = feed

    async def _push(self) -> None:
        asked = parse_qs(self.scope["query_string"].decode("latin-1")).get("range", [""])[0]
        key = self.scope["cookies"].get(settings.SESSION_COOKIE_NAME, "")
        page = FollowedPage(key, (self._language, choose_range(asked)))
        self._feed.join(page)
        try:
            while True:
                await page.woken.wait()
                page.woken.clear()
                if page.ended is not None:
                    await self.close(code=page.ended)
                    return
                await self.send(text_data=self._feed.write(page))
        finally:
            await self._feed.leave(page)


_NodeView = tuple[uuid.UUID, str, bool, bool]
"""What pages of a node have to have in common to be pushed the same: node, language, and what their session may do."""


class NodePageConsumer(PushConsumer):
    """What the page of one node shows of its state, models and memory, as the same HTML that the page came with.

    Pages of one node that look at once, as each hint has them do, share one look.
    """

    _shared: ClassVar[dict[_NodeView, tuple[float, Pushed, float]]] = {}
    """Of the last ``push_pause_s``: when it was looked, what was seen, and the seconds until the next look."""

    def may_look(self, user: User) -> bool:
        return may(user, "nodes.view_node") or may(user, "nodes.change_node")

    def look(self, request: HttpRequest) -> tuple[Pushed, float]:
        """Return the state of the node, more often while a model is loaded or a drain runs."""
        node_id, may_change = self.scope["url_route"]["kwargs"]["node_id"], may(request.user, "nodes.change_node")
        is_read_only = find_read_only(request) is not None
        view, now = (node_id, self._language, may_change, is_read_only), clock.monotonic()
        shared = {one: seen for one, seen in self._shared.items() if now - seen[0] < limits().console.push_pause_s}
        if view not in shared:
            shared[view] = (now, *self._look(node_id, may_change=may_change, is_read_only=is_read_only))
        NodePageConsumer._shared = shared
        _at, pushed, pause_s = shared[view]
        return pushed, pause_s

    def _look(self, node_id: uuid.UUID, *, may_change: bool, is_read_only: bool) -> tuple[Pushed, float]:
        found = find_head(node_id)
        if found is None:
            return {"html": ""}, limits().console.push_s
        node, head = found
        page = {
            "original": node,
            "head": head,
            "telemetry": head.telemetry,
            "may_change": may_change,
            "read_only": is_read_only,
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

    def may_look(self, user: User) -> bool:
        return may_see_operations(user)

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
