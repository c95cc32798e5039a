"""The socket of the first page: who may open it and what it pushes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from channels.testing import WebsocketCommunicator
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import Permission
from django.contrib.sessions.backends.db import SessionStore

from controlplane.asgi import application
from controlplane.models import User
from governance.hints import HINT_GROUP
from nodes.models import Node, NodePresence
from tests.integration.gateway_admin.factories import make_record
from tests.integration.nodes.factories import make_node, make_presence
from wire.contract import RequestState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


def sign_in(name: str, *permissions: str, is_staff: bool) -> str:
    """Return the cookie header of a signed-in user."""
    user = User.objects.create_user(name, is_staff=is_staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save()
    return f"{settings.SESSION_COOKIE_NAME}={session.session_key}"


def socket(cookie: str = "", origin: str = "http://localhost:8000", path: str = "/ws/overview") -> WebsocketCommunicator:
    headers = [(b"origin", origin.encode()), (b"host", b"localhost:8000"), (b"cookie", cookie.encode())]
    return WebsocketCommunicator(application, path, headers=[pair for pair in headers if pair[1]])


async def receive(open_socket: WebsocketCommunicator) -> Any:
    return await open_socket.receive_json_from(timeout=30)


async def test_an_operator_gets_counters_at_once_and_again_on_a_hint() -> None:
    page = socket(await database_sync_to_async(sign_in)("ada", is_staff=True))
    connected, _ = await page.connect(timeout=30)
    assert connected
    assert (await receive(page))["queued"] == 0

    await database_sync_to_async(make_record)(state=RequestState.QUEUED, age_s=9, model="<b>tiny</b>")
    layer = get_channel_layer()
    assert layer is not None
    await layer.group_send(HINT_GROUP, {"type": "hint", "topic": "nodes", "ident": ""})

    async with asyncio.timeout(30):
        while (pushed := await receive(page))["queued"] == 0:
            pass  # it looks every few seconds as well, and may have done so before
    assert pushed["queued"] == 1
    assert "No node has &lt;b&gt;tiny&lt;/b&gt;." in pushed["html"]
    await page.disconnect(timeout=30)


async def test_counters_come_again_without_a_hint_and_whatever_the_page_sends_is_ignored() -> None:
    page = socket(await database_sync_to_async(sign_in)("ada", is_staff=True))
    await page.connect(timeout=30)
    await receive(page)
    await page.send_to(text_data="not json")

    assert set(await receive(page)) == {"nodes_online", "nodes_total", "queued", "running", "html"}
    await page.disconnect(timeout=30)


@pytest.mark.parametrize("who", ["nobody", "a user without staff rights", "another site", "no origin"])
async def test_everybody_else_is_turned_away(who: str) -> None:
    cookie = (
        "" if who == "nobody" else await database_sync_to_async(sign_in)("bob", is_staff=who != "a user without staff rights")
    )
    origin = {"another site": "http://evil.example", "no origin": ""}.get(who, "http://localhost:8000")
    page = socket(cookie, origin)

    connected, _ = await page.connect(timeout=30)

    assert not connected
    await page.disconnect(timeout=30)


# one box


def make_loading_box() -> Node:
    node = make_node("attic")
    make_presence(node, replicas=[{"model": "qwen", "state": "loading", "progress": 0.25, "detail": "<b>weights</b>"}])
    return node


def advance(node: Node, progress: float) -> None:
    replicas = [{"model": "qwen", "state": "loading", "progress": progress}]
    NodePresence.objects.filter(node=node).update(replicas=replicas)


async def test_the_page_of_a_box_gets_its_state_again_while_it_loads() -> None:
    node = await database_sync_to_async(make_loading_box)()
    cookie = await database_sync_to_async(sign_in)("ada", "view_node", is_staff=True)
    page = socket(cookie, path=f"/ws/nodes/{node.pk}")
    connected, _ = await page.connect(timeout=30)
    assert connected
    html = (await receive(page))["html"]
    assert 'value="25"' in html
    assert "&lt;b&gt;weights&lt;/b&gt;" in html

    await database_sync_to_async(advance)(node, 0.5)
    async with asyncio.timeout(30):
        while 'value="50"' not in (await receive(page))["html"]:
            pass  # it was rendered before
    await page.disconnect(timeout=30)


async def test_the_page_of_a_box_that_is_not_there_gets_nothing() -> None:
    cookie = await database_sync_to_async(sign_in)("ada", "view_node", is_staff=True)
    page = socket(cookie, path="/ws/nodes/00000000-0000-0000-0000-000000000000")
    await page.connect(timeout=30)
    assert (await receive(page)) == {"html": ""}
    await page.disconnect(timeout=30)


@pytest.mark.parametrize("who", ["nobody", "an operator without the permission", "a user without staff rights", "another site"])
async def test_the_state_of_a_box_is_for_those_who_may_see_its_page(who: str) -> None:
    node = await database_sync_to_async(make_loading_box)()
    permissions = () if who == "an operator without the permission" else ("view_node",)
    staff = who != "a user without staff rights"
    cookie = "" if who == "nobody" else await database_sync_to_async(sign_in)("bob", *permissions, is_staff=staff)
    origin = "http://evil.example" if who == "another site" else "http://localhost:8000"
    page = socket(cookie, origin, f"/ws/nodes/{node.pk}")

    connected, _ = await page.connect(timeout=30)

    assert not connected
    await page.disconnect(timeout=30)


@pytest.mark.parametrize("path", ["/ws/nothing", "/ws/nodes/not-an-id", "/", "/nodes/connect"])
@pytest.mark.parametrize("origin", ["http://localhost:8000", ""])
async def test_an_unknown_socket_path_is_not_found_wherever_it_is_asked_from(path: str, origin: str) -> None:
    page = socket(origin=origin, path=path)
    page.scope["extensions"] = {"websocket.http.response": {}}
    await page.send_input({"type": "websocket.connect"})
    started = await page.receive_output(timeout=30)
    assert (started["type"], started["status"]) == ("websocket.http.response.start", 404)
