"""The sockets of pages: who may open them, what they push, and when they end."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import pytest
from channels.db import database_sync_to_async
from channels.layers import get_channel_layer
from channels.testing import WebsocketCommunicator
from django.conf import LazySettings, settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import Permission
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.db import OperationalError
from django.utils import timezone

from controlplane.asgi import application
from controlplane.live import CloseCode
from controlplane.reconciling import Reconciler
from core.hints import HINT_GROUP
from core.models import User
from governance import services
from governance.models import OperationRun
from governance.states import RunState
from nodes.models import Node, NodePresence
from tests.fakes.governed_team import make_governed, propose_token
from tests.fakes.limits import set_limits
from tests.fakes.waiting import wait_until
from tests.system.gateway_admin.factories import make_record
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


async def expect_close(page: WebsocketCommunicator) -> int:
    """Return the code that the page is closed with; what is pushed before goes unread."""
    while (event := await page.receive_output(timeout=30))["type"] != "websocket.close":
        assert event["type"] in {"websocket.accept", "websocket.send"}
    return int(event["code"])


async def expect_nothing_but_close(page: WebsocketCommunicator) -> int:
    """Return the code of a page that is told nothing before it is closed."""
    connected, _ = await page.connect(timeout=30)
    assert connected
    event = await page.receive_output(timeout=30)
    assert event["type"] == "websocket.close", event
    await page.disconnect(timeout=30)
    return int(event["code"])


@pytest.mark.parametrize(
    ("is_staff", "code"), [(None, CloseCode.SIGNED_OUT), (False, CloseCode.NOT_PERMITTED)], ids=["nobody", "no operator"]
)
async def test_everybody_else_is_told_only_why(is_staff: bool | None, code: int) -> None:
    cookie = "" if is_staff is None else await database_sync_to_async(sign_in)("bob", is_staff=is_staff)
    assert await expect_nothing_but_close(socket(cookie)) == code


OWN = "http://localhost:8000"


ORIGINS = {
    OWN: True,
    "https://muster.example": True,
    "https://pages.example:8443": True,
    "": False,
    "null": False,
    "http://localhost:9999": False,
    "http://localhost": False,
    "https://localhost:8000": False,
    "http://127.0.0.1:8000": False,
    "http://muster.example": False,
    "https://pages.example": False,
    "http://evil.example": False,
    f"{OWN}.evil.example": False,
    f"{OWN}/": False,
}


async def test_only_pages_of_our_own_origins_open_a_socket(settings: LazySettings) -> None:
    settings.PUBLIC_URL = "https://muster.example/"
    settings.CSRF_TRUSTED_ORIGINS = ["https://pages.example:8443"]
    cookie, opened = await database_sync_to_async(sign_in)("ada", is_staff=True), {}
    for origin in ORIGINS:
        page = socket(cookie, origin)
        opened[origin], _ = await page.connect(timeout=30)
        await page.disconnect(timeout=30)
    assert opened == ORIGINS


async def test_a_host_that_is_not_ours_makes_no_origin_ours() -> None:
    page = socket(await database_sync_to_async(sign_in)("ada", is_staff=True), "http://evil.example")
    page.scope["headers"] = [(name, b"evil.example" if name == b"host" else value) for name, value in page.scope["headers"]]
    connected, _ = await page.connect(timeout=30)
    assert not connected
    await page.disconnect(timeout=30)


# the end of a session


def change_session(cookie: str, **marks: int) -> None:
    session = SessionStore(cookie.partition("=")[2])
    session.update(marks)
    session.save()


def end(how: str, cookie: str) -> None:
    """Let something end the session behind a cookie, or the right to look."""
    now, user = int(time.time()), User.objects.get()
    match how:
        case "idle":
            change_session(cookie, muster_signed_in_at=now - 3600, muster_seen_at=now - 31 * 60)
        case "old":
            change_session(cookie, muster_signed_in_at=now - 12 * 3600 - 1, muster_seen_at=now)
        case "expired":
            Session.objects.update(expire_date=timezone.now())
        case "signed out":
            Session.objects.all().delete()
        case "switched off":
            User.objects.update(is_active=False)
        case "new password":
            user.set_password("another password for tests")
            user.save()
        case "rights withdrawn":
            user.user_permissions.clear()
        case "no operator any more":
            User.objects.update(is_staff=False)


ENDS = [
    *[(how, CloseCode.SIGNED_OUT) for how in ("idle", "old", "expired", "signed out", "switched off", "new password")],
    *[(how, CloseCode.NOT_PERMITTED) for how in ("rights withdrawn", "no operator any more")],
]


@pytest.mark.parametrize(("how", "code"), ENDS)
async def test_a_page_that_is_open_ends_with_its_session(how: str, code: int) -> None:
    node = await database_sync_to_async(make_loading_box)()
    cookie = await database_sync_to_async(sign_in)("ada", "view_node", is_staff=True)
    page = socket(cookie, path=f"/ws/nodes/{node.pk}")
    await page.connect(timeout=30)
    await receive(page)
    await database_sync_to_async(end)(how, cookie)
    assert await expect_close(page) == code
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


@pytest.mark.parametrize("path", ["/ws/nothing", "/ws/nodes/not-an-id", "/", "/nodes/connect"])
@pytest.mark.parametrize("origin", ["http://localhost:8000", ""])
async def test_an_unknown_socket_path_is_not_found_wherever_it_is_asked_from(path: str, origin: str) -> None:
    page = socket(origin=origin, path=path)
    page.scope["extensions"] = {"websocket.http.response": {}}
    await page.send_input({"type": "websocket.connect"})
    started = await page.receive_output(timeout=30)
    assert (started["type"], started["status"]) == ("websocket.http.response.start", 404)


WITHIN_S = 30.0


@pytest.fixture(autouse=True)
def patient_stop() -> None:
    """Let a look that is under way take long to end, as it does where the machine stands still."""
    set_limits(console={"reconcile_stop_s": WITHIN_S})


@pytest.mark.django_db(transaction=True)
def test_what_is_due_is_carried_out_without_any_message() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    for member in team.members[1:]:
        member.approve(operation)
    reconciler = Reconciler(every_s=0.05)
    reconciler.start()
    try:
        wait_until(lambda: OperationRun.objects.filter(operation=operation, state=RunState.SUCCEEDED.value).exists())
    finally:
        assert reconciler.stop()
    assert services.run_due() == 0


def test_a_database_that_is_away_is_said_once_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[bool] = []

    def look() -> int:
        looks.append(len(looks) < 3)
        if looks[-1]:
            raise OperationalError("the server closed the connection")
        return 0

    with caplog.at_level(logging.INFO, logger="controlplane.reconciling"):
        reconciler = Reconciler(look, every_s=0.01)
        reconciler.start()
        wait_until(lambda: len(looks) >= 6)
        assert reconciler.stop()
    said = [record.getMessage() for record in caplog.records if record.name == "controlplane.reconciling"]
    assert said == ["reconcile_waits reason=OperationalError", "reconcile_goes_on"]
