"""The sockets of pages: who may open them, what they push, when they end; and the hints and looks that wake what waits."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from celery import Celery
from channels.db import database_sync_to_async
from channels.layers import channel_layers, get_channel_layer
from channels.testing import WebsocketCommunicator
from django.conf import LazySettings, settings
from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
from django.contrib.auth.models import Permission
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.db import OperationalError, connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from pytest_django import Settings
from redis import asyncio as aioredis

from controlplane.asgi import application
from controlplane.live import CloseCode, FollowedPage, OverviewFeed
from controlplane.problems import look_for_problems
from controlplane.serve_control import Reconciler
from controlplane.serve_worker import DueHere
from core import hints
from core.hints import HINT_GROUP, publish_hint
from core.models import User
from governance.models import OperationRun
from governance.operations.runs import reconcile, run_due
from governance.states import RunState
from nodes.models import Node, NodePresence
from tests.fakes.governed_team import make_governed, propose_token
from tests.fakes.limits import set_limits
from tests.fakes.nodes import make_node, make_presence, make_record
from tests.fakes.waiting import turns, wait_until
from wire.contract import RequestState

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(180)]


def sign_in(name: str, *permissions: str, is_staff: bool) -> str:
    user = User.objects.create_user(name, is_staff=is_staff)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return open_session(user)


def open_session(user: User) -> str:
    session = SessionStore()
    session[SESSION_KEY] = str(user.pk)
    session[BACKEND_SESSION_KEY] = settings.AUTHENTICATION_BACKENDS[0]
    session[HASH_SESSION_KEY] = user.get_session_auth_hash()
    session.save()
    return f"{settings.SESSION_COOKIE_NAME}={session.session_key}"


def dial(cookie: str = "", origin: str = "http://localhost:8000", path: str = "/ws/overview") -> WebsocketCommunicator:
    headers = [(b"origin", origin.encode()), (b"host", b"localhost:8000"), (b"cookie", cookie.encode())]
    return WebsocketCommunicator(application, path, headers=[pair for pair in headers if pair[1]])


async def receive(open_socket: WebsocketCommunicator) -> Any:
    return await open_socket.receive_json_from(timeout=30)


async def test_an_operator_gets_counters_at_once_and_again_on_a_hint() -> None:
    page = dial(await database_sync_to_async(sign_in)("ada", is_staff=True))
    connected, _ = await page.connect(timeout=30)
    assert connected
    assert (await receive(page))["counters"]["open"] == "0 running, 0 queued"
    await database_sync_to_async(make_record)(state=RequestState.QUEUED, age_s=9, model="<b>tiny</b>")
    await database_sync_to_async(look_for_problems)()
    layer = get_channel_layer()
    assert layer is not None
    await layer.group_send(HINT_GROUP, {"type": "hint", "topic": "nodes", "ident": ""})
    async with asyncio.timeout(30):
        while "No node has &lt;b&gt;tiny&lt;/b&gt;." not in (pushed := await receive(page))["parts"]["problems"]:
            pass  # it looks every few seconds as well, and may have done so before
    assert pushed["counters"]["open"] == "0 running, 1 queued"
    await page.disconnect(timeout=30)


async def test_pages_are_pushed_what_their_people_may_see_and_then_only_what_changed() -> None:
    node = await database_sync_to_async(make_loading_box)()
    seen: dict[str, Any] = {}
    for name, rights in (("ada", ("view_node",)), ("bob", ("view_requestrecord",))):
        page = dial(await database_sync_to_async(sign_in)(name, *rights, is_staff=True), path="/ws/overview?range=15min")
        await page.connect(timeout=30)
        first, second = await receive(page), await receive(page)
        assert not second["parts"]
        assert not second["charts"]
        seen[name] = (set(first["parts"]), set(first["charts"]))
        await page.disconnect(timeout=30)
    assert seen["ada"] == ({"problems", "nodes", "tile-nodes", "tile-memory"}, set())
    assert seen["bob"] == (
        {"problems", "models", "tile-rate", "tile-failed", "tile-ttft", "tile-tokens"},
        {"requests", "latency", "tokens"},
    )
    assert node.name == "attic"


async def test_an_approval_that_newly_waits_for_a_person_comes_to_the_open_page() -> None:
    team = await database_sync_to_async(make_governed)()
    await database_sync_to_async(User.objects.update)(is_staff=True)
    page = dial(await database_sync_to_async(open_session)(team.members[1].user))
    await page.connect(timeout=30)
    assert "Nothing waits for your approval." in (await receive(page))["waiting"]
    await database_sync_to_async(propose_token)(team[0])
    async with asyncio.timeout(30):
        while "waiting" not in (pushed := await receive(page)):
            pass
    assert "0 of 2 approvals" in pushed["waiting"]
    await page.disconnect(timeout=30)


def test_a_look_costs_as_many_queries_for_many_pages_as_for_one() -> None:
    key = sign_in("ada", is_staff=True).partition("=")[2]
    counts = []
    for pages in (1, 100):
        with CaptureQueriesContext(connection) as queries:
            OverviewFeed().look([FollowedPage(key, ("en", "1h")) for _ in range(pages)], 1)
        counts.append(len(queries))
    assert counts[0] == counts[1]


async def expect_close(page: WebsocketCommunicator) -> int:
    """Return the code that the page is closed with; what is pushed before goes unread."""
    while (event := await page.receive_output(timeout=30))["type"] != "websocket.close":
        assert event["type"] in {"websocket.accept", "websocket.send"}
    return int(event["code"])


async def expect_nothing_but_close(page: WebsocketCommunicator) -> int:
    connected, _ = await page.connect(timeout=30)
    assert connected
    event = await page.receive_output(timeout=30)
    assert event["type"] == "websocket.close", event
    await page.disconnect(timeout=30)
    return int(event["code"])


OWN = "http://localhost:8000"


ORIGINS = {
    OWN: True, "https://muster.example": True, "https://pages.example:8443": True, "": False, "null": False,
    "http://localhost:9999": False, "http://localhost": False, "https://localhost:8000": False, "http://127.0.0.1:8000": False,
    "http://muster.example": False, "https://pages.example": False, "http://evil.example": False, f"{OWN}.evil.example": False,
    f"{OWN}/": False,
}  # fmt: skip


async def test_only_pages_of_our_own_origins_open_a_socket(settings: LazySettings) -> None:
    settings.PUBLIC_URL = "https://muster.example/"
    settings.CSRF_TRUSTED_ORIGINS = ["https://pages.example:8443"]
    cookie, opened = await database_sync_to_async(sign_in)("ada", is_staff=True), {}
    for origin in ORIGINS:
        page = dial(cookie, origin)
        opened[origin], _ = await page.connect(timeout=30)
        await page.disconnect(timeout=30)
    assert opened == ORIGINS
    for origin, is_ours in (("https://localhost:8000", True), (OWN, False)):  # behind TLS it is that of https
        page = dial(cookie, origin)
        page.scope["scheme"] = "wss"  # as the server puts it for what a trusted proxy sends
        connected, _ = await page.connect(timeout=30)
        assert connected is is_ours
        await page.disconnect(timeout=30)


async def test_a_host_that_is_not_ours_makes_no_origin_ours() -> None:
    page = dial(await database_sync_to_async(sign_in)("ada", is_staff=True), "http://evil.example")
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
    page = dial(cookie, path=f"/ws/nodes/{node.pk}")
    await page.connect(timeout=30)
    await receive(page)
    await database_sync_to_async(end)(how, cookie)
    assert await expect_close(page) == code
    await page.disconnect(timeout=30)


@pytest.mark.parametrize(
    ("how", "code"), [("nobody", CloseCode.SIGNED_OUT), ("no operator", CloseCode.NOT_PERMITTED), ENDS[0], ENDS[3], ENDS[6]]
)
async def test_who_may_not_look_is_told_only_why(how: str, code: int) -> None:
    node = await database_sync_to_async(make_loading_box)()
    cookie = await database_sync_to_async(sign_in)("ada", "view_node", is_staff=how != "no operator")
    await database_sync_to_async(end)(how, cookie)
    assert await expect_nothing_but_close(dial("" if how == "nobody" else cookie, path=f"/ws/nodes/{node.pk}")) == code


async def test_an_operation_is_followed_by_who_may_read_operations_alone() -> None:
    path = f"/ws/operations/{uuid.uuid4()}"
    cookie = await database_sync_to_async(sign_in)("member", is_staff=False)
    assert await expect_nothing_but_close(dial(cookie, path=path)) == CloseCode.NOT_PERMITTED
    page = dial(await database_sync_to_async(sign_in)("approver", "view_operation", is_staff=False), path=path)
    assert (await page.connect())[0]
    assert await receive(page) == {"html": ""}
    await page.disconnect()


# one node


def make_loading_box() -> Node:
    node = make_node("attic")
    make_presence(node, replicas=[{"model": "qwen", "state": "loading", "progress": 0.25, "detail": "<b>weights</b>"}])
    return node


def advance(node: Node, progress: float) -> None:
    replicas = [{"model": "qwen", "state": "loading", "progress": progress}]
    NodePresence.objects.filter(node=node).update(replicas=replicas)


async def test_pages_of_one_node_share_a_look_and_those_who_may_change_it_get_another() -> None:
    set_limits(console={"push_pause_s": 60.0, "push_s": 120.0, "push_changes_s": 120.0})
    node = await database_sync_to_async(make_loading_box)()
    pushed = []
    for name, *rights in (("ada", "view_node"), ("bob", "view_node"), ("eve", "view_node", "change_node")):
        page = dial(await database_sync_to_async(sign_in)(name, *rights, is_staff=True), path=f"/ws/nodes/{node.pk}")
        await page.connect(timeout=30)
        pushed.append(await receive(page))
        await database_sync_to_async(advance)(node, 0.75)
        await page.disconnect(timeout=30)
    assert ["25 %" in push["html"] for push in pushed] == [True, True, False]
    assert ["Drain it" in push["head"] for push in pushed] == [False, False, True]


@pytest.mark.parametrize("path", ["/ws/nothing", "/ws/nodes/not-an-id", "/", "/nodes/connect"])
@pytest.mark.parametrize("origin", ["http://localhost:8000", ""])
async def test_an_unknown_socket_path_is_not_found_wherever_it_is_asked_from(path: str, origin: str) -> None:
    page = dial(origin=origin, path=path)
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
    reconciler = Reconciler(reconcile, pause_s=0.01)
    reconciler.start()
    try:
        wait_until(lambda: OperationRun.objects.filter(operation=operation, state=RunState.SUCCEEDED.value).exists())
    finally:
        assert reconciler.stop()
    assert run_due() == 0


def test_a_database_that_is_away_is_said_once_and_waited_for_and_a_defect_ends_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    looks: list[bool] = []

    def look() -> int:
        looks.append(len(looks) < 3)
        if looks[-1]:
            raise OperationalError("the server closed the connection")
        if len(looks) == 5:
            raise KeyError("a defect")
        return 0

    with caplog.at_level(logging.INFO, logger="controlplane.serve_control"):
        reconciler = Reconciler(look, pause_s=0.01)
        reconciler.start()
        wait_until(lambda: len(looks) >= 7)
        assert reconciler.stop()
    said = [record.getMessage() for record in caplog.records if record.name == "controlplane.serve_control"]
    assert said[:2] == ["reconcile_waits reason=OperationalError", "reconcile_goes_on"]
    assert [each for each in said[2:] if "reconcile_failed" not in each] == []
    assert len(said) == 3, "one look that fails does not end the looks"


def test_what_is_due_by_the_clock_is_carried_out_here_and_not_again_while_it_is_under_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    started: list[str] = []
    may_end = threading.Event()
    app = Celery(set_as_current=False)
    app.conf.beat_schedule = {name: {"task": name, "schedule": 0.001} for name in ("held", "broken")}

    @app.task(name="held")
    def hold() -> None:
        started.append("held")
        may_end.wait(WITHIN_S)

    @app.task(name="broken")
    def fail() -> None:
        started.append("broken")
        raise OperationalError("the server closed the connection") if started.count("broken") < 3 else KeyError("a defect")

    with caplog.at_level(logging.INFO, logger="controlplane.serve_worker"):
        scheduler = DueHere(app=app)
        wait_until(lambda: scheduler.tick() is not None and started.count("broken") > 4)
        assert started.count("held") == 1
        may_end.set()
        wait_until(lambda: scheduler.tick() is not None and started.count("held") > 1)
    said = [record.getMessage() for record in caplog.records if record.name == "controlplane.serve_worker"]
    assert said[0] == "due_tasks_wait reason=OperationalError"
    assert said.count(said[0]) <= 2
    assert "due_task_failed task=broken" in said


@contextmanager
def unreachable(settings: Settings, url: str) -> Iterator[None]:
    settings.CHANNEL_LAYERS = {
        "default": {**settings.CHANNEL_LAYERS["default"], "CONFIG": {"hosts": [url], "prefix": "muster"}}
    }
    channel_layers.backends.clear()
    try:
        yield
    finally:
        channel_layers.backends.clear()


async def listen(publish: Callable[[], None], *idents: str) -> dict[str, str]:
    """Join the group, call ``publish`` in a thread and return the first hint about one of ``idents``.

    Others come as well: Valkey's channels belong to no database of it, so this hears what other tests publish meanwhile.
    """

    def work() -> None:
        try:
            publish()
        finally:
            connection.close()

    layer = get_channel_layer()
    assert layer is not None
    channel = await layer.new_channel()
    await layer.group_add(HINT_GROUP, channel)
    await asyncio.to_thread(work)
    async with asyncio.timeout(WITHIN_S):
        while (heard := await layer.receive(channel))["ident"] not in idents:
            pass
    await layer.flush()
    return dict(heard)


def test_a_hint_arrives_once_the_change_is_committed_and_none_of_one_that_is_rolled_back() -> None:
    set_limits(core={"hint_send_s": WITHIN_S})  # none is lost because the machine stands still
    undone, kept = str(uuid.uuid4()), str(uuid.uuid4())

    def change() -> None:
        with transaction.atomic():
            publish_hint("nodes", undone)
            transaction.set_rollback(True)
        with transaction.atomic():
            publish_hint("models", kept)

    assert asyncio.run(listen(change, undone, kept))["ident"] == kept


def test_hints_of_another_installation_and_of_another_database_number_go_by_another_channel(settings: Settings) -> None:
    def name(url: str) -> object:
        return hints.HintLayer(hosts=[url], prefix="muster")._group

    names = {name("redis://a/0"), name("redis://a/1"), name("unix:///x.sock?db=2")}
    assert len(names | {name("redis://b:7/0")}) == 3, "however this process reaches Valkey"
    settings.SECRET_KEY = "that of another installation"
    assert name("redis://a/0") not in names


async def flood(valkey: aioredis.Redis, messages: list[bytes]) -> tuple[list[str], list[str]]:
    """Publish to two listeners, one of whom stands still until the other has heard ``end``; return what each heard.

    The group is the test's own: the hints of other tests go through the same server.
    """
    layer = get_channel_layer()
    assert layer is not None
    group = f"flood.{uuid.uuid4()}"
    reader, sleeper = await layer.new_channel(), await layer.new_channel()
    for channel in (sleeper, reader):
        await layer.group_add(group, channel)

    async def read(channel: str) -> list[str]:
        heard: list[str] = []
        async with asyncio.timeout(WITHIN_S):
            while heard[-1:] != ["end"]:
                heard.append((await layer.receive(channel))["ident"])
        return heard

    reading = asyncio.create_task(read(reader))
    for message in [*messages, make_hint("end")]:
        await valkey.publish(hints.name_channel(layer.prefix, group), message)
        await turns(1)
    heard = await reading, await read(sleeper)
    await layer.flush()
    return heard


def make_hint(ident: str) -> bytes:
    return msgspec.msgpack.encode({"type": "hint", "topic": "nodes", "ident": ident})


async def test_of_the_hints_that_nobody_takes_the_newest_are_kept_and_whoever_reads_gets_all(settings: Settings) -> None:
    sent = [f"{uuid.uuid4().hex}:{number}" for number in range(1500)]
    dropped = hints.dropped_hints.total
    async with aioredis.Redis.from_url(settings.REDIS_URL) as valkey:
        read, kept = await flood(valkey, [make_hint(ident) for ident in sent])
    assert read == [*sent, "end"]
    assert kept == [*sent[-999:], "end"]
    assert hints.dropped_hints.total - dropped == 501


async def test_a_message_longer_than_any_hint_is_not_kept(settings: Settings) -> None:
    unreadable = hints.unreadable_hints.total
    async with aioredis.Redis.from_url(settings.REDIS_URL) as valkey:
        read, kept = await flood(valkey, [make_hint("x" * 100_000), make_hint("short")])
    assert read == kept == ["short", "end"]
    assert hints.unreadable_hints.total - unreadable >= 2


@pytest.mark.django_db(transaction=True)
def test_nobody_listening_at_redis_is_logged_and_not_raised(settings: Settings, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with unreachable(settings, f"redis://127.0.0.1:{closed.getsockname()[1]}/0"):
            publish_hint("keys")
    assert "hint_not_sent" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_redis_that_does_not_answer_holds_the_caller_for_a_second_only(
    settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with unreachable(settings, f"redis://127.0.0.1:{silent.getsockname()[1]}/0"):
            started = time.monotonic()
            publish_hint("keys")
            assert time.monotonic() - started < 30
    assert "hint_not_sent" in caplog.text
