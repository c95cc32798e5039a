"""The socket of the first page: who may open it and what it pushes."""

from __future__ import annotations

from typing import Any

import pytest
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from channels.testing import WebsocketCommunicator
from django.conf import settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.sessions.backends.db import SessionStore

from controlplane.asgi import application
from controlplane.models import User
from governance.hints import HINT_GROUP
from tests.integration.gateway_admin.factories import make_record
from wire.contract import RequestState

pytestmark = pytest.mark.django_db(transaction=True)


def sign_in(name: str, *, is_staff: bool) -> str:
    """Return the cookie header of a signed-in user."""
    user = User.objects.create_user(name, is_staff=is_staff)
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save()
    return f"{settings.SESSION_COOKIE_NAME}={session.session_key}"


def socket(cookie: str = "", origin: str = "http://localhost:8000") -> WebsocketCommunicator:
    headers = [(b"origin", origin.encode()), (b"host", b"localhost:8000"), (b"cookie", cookie.encode())]
    return WebsocketCommunicator(application, "/ws/overview", headers=[pair for pair in headers if pair[1]])


async def receive(open_socket: WebsocketCommunicator) -> Any:
    return await open_socket.receive_json_from(timeout=5)


async def test_an_operator_gets_counters_at_once_and_again_on_a_hint() -> None:
    page = socket(await database_sync_to_async(sign_in)("ada", is_staff=True))
    connected, _ = await page.connect(timeout=5)
    assert connected
    assert (await receive(page))["queued"] == 0

    await database_sync_to_async(make_record)(state=RequestState.QUEUED)
    layer = get_channel_layer()
    assert layer is not None
    await layer.group_send(HINT_GROUP, {"type": "hint", "topic": "nodes", "ident": ""})

    assert (await receive(page))["queued"] == 1
    await page.disconnect()


async def test_counters_come_again_without_a_hint_and_whatever_the_page_sends_is_ignored() -> None:
    page = socket(await database_sync_to_async(sign_in)("ada", is_staff=True))
    await page.connect(timeout=5)
    await receive(page)
    await page.send_to(text_data="not json")

    assert set(await receive(page)) == {"nodes_online", "nodes_total", "queued", "running"}
    await page.disconnect()


@pytest.mark.parametrize("who", ["nobody", "a user without staff rights", "another site", "no origin"])
async def test_everybody_else_is_turned_away(who: str) -> None:
    cookie = (
        "" if who == "nobody" else await database_sync_to_async(sign_in)("bob", is_staff=who != "a user without staff rights")
    )
    origin = {"another site": "http://evil.example", "no origin": ""}.get(who, "http://localhost:8000")
    page = socket(cookie, origin)

    connected, _ = await page.connect(timeout=5)

    assert not connected
    await page.disconnect()
