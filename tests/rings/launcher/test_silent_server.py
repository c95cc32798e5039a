"""Control plane and worker beside a PostgreSQL that is frozen: nothing waits for ever, and all comes back by itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from celery import Celery
from django.conf import settings as django_settings
from django.db import OperationalError, connection
from django.test import Client
from pytest_django import DjangoDbBlocker, Settings
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect
from websockets.typing import Origin

from controlplane.live import CloseCode
from core.db import base
from core.db.base import limit_process
from governance.admin_tokens import claim_admin_token
from governance.models import AuditEvent, OperationRun
from governance.operations.runs import reconcile, run_due, work_on
from governance.states import RunState
from nodes.direct import call_direct_node, find_unattended
from nodes.models import Reach
from nodes.services.governance import set_op_key
from tests.fakes.control_process import (
    WITHIN_S,
    ServerProcess,
    count_blocked,
    frozen,
    go_on,
    held,
    in_thread,
    private_database,
    serve_control,
    serve_worker,
    stop_tree,
    wait_for_the_abandoned,
)
from tests.fakes.direct_node import run_direct_node
from tests.fakes.governed_team import Team, approve_load, make_due, make_governed, only_run, propose_token
from tests.fakes.nodes import ACTOR, make_node, make_presence
from tests.fakes.servers import EmbeddedServers
from tests.fakes.waiting import wait_until

COMMIT_LOCK = 77
LOAD = "/v1/models/load"
pytestmark = pytest.mark.timeout(360)
SILENCE_S = 4.0
"""So long may the machine stand still while nobody has frozen anything."""
CROWD = 20
"""Pages that are asked for at once, and once more. Each takes a thread; of others, which stay, there are fewer than 40."""


@pytest.fixture(scope="module")
def servers(django_db_blocker: DjangoDbBlocker) -> Iterator[EmbeddedServers]:
    """A PostgreSQL of this module alone, migrated, which is Django's database in the tests below."""
    with private_database(django_db_blocker) as private:
        yield private


@pytest.fixture(scope="module")
def team(servers: EmbeddedServers) -> Team:
    return make_governed()


@pytest.fixture(scope="module")
def processes(servers: EmbeddedServers) -> dict[str, str]:
    """The environment of processes on the private servers, with less patience than we ship: what is tested waits it out."""
    return {"DATABASE_URL": servers.database_url, "REDIS_URL": servers.redis_url, "MUSTER_DATABASE_SILENCE_S": str(SILENCE_S)}


@pytest.fixture
def bound_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bind this process as a server process is bound."""
    monkeypatch.setattr(base, "_of_process", [])
    limit_process(SILENCE_S)


def ask(statement: str) -> object:
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchall()[0][0]


def connect_and_then(work: Callable[[], object]) -> tuple[Future[object], threading.Event]:
    """Return the result to come of ``work`` over an open connection, and what lets it begin."""
    is_connected, go_on = threading.Event(), threading.Event()

    def run() -> object:
        ask("SELECT 1")
        is_connected.set()
        assert go_on.wait(WITHIN_S)
        return work()

    answer = in_thread(run)
    assert is_connected.wait(WITHIN_S)
    return answer, go_on


# what binds a connection


@pytest.mark.usefixtures("bound_process")
def test_every_thread_of_a_bound_process_gives_a_frozen_server_up_and_asks_a_thawed_one_again(servers: EmbeddedServers) -> None:
    connected, go_on = connect_and_then(lambda: ask("SELECT 2"))
    with frozen(servers):
        go_on.set()
        fresh = in_thread(lambda: ask("SELECT 3"))
        for future in (connected, fresh):
            assert isinstance(future.exception(WITHIN_S), OperationalError)
    # One that has just thawed may need longer than they wait.
    wait_until(lambda: in_thread(lambda: ask("SELECT 4")).exception(WITHIN_S) is None, what="a thawed server is asked again")


@pytest.mark.usefixtures("bound_process", "team")
def test_silence_ends_the_wait_for_a_row_that_somebody_holds_and_not_a_long_answer(servers: EmbeddedServers) -> None:
    pieces = f"SELECT repeat('x', 20000), pg_sleep(0.5) FROM generate_series(1, {2 * int(SILENCE_S) + 1})"
    with held(servers, "SELECT FROM controlplane_user FOR UPDATE"):
        blocked = in_thread(lambda: ask("SELECT id FROM controlplane_user FOR UPDATE"))
        talking = in_thread(lambda: ask(pieces))
        assert isinstance(blocked.exception(WITHIN_S), OperationalError)
        assert talking.result(WITHIN_S) == "x" * 20000


# the control plane


@pytest.fixture(scope="class")
def control(
    token: str, cookie: str, processes: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """It carries out by itself what is approved, so it comes after ``token`` and is gone when other tests look at that."""
    del token, cookie
    with serve_control(tmp_path_factory.mktemp("silent") / "control.log", env=processes) as process:
        yield process


@pytest.fixture(scope="module")
def token(team: Team) -> str:
    """An admin token, minted as it has to be once there is a policy."""
    operation = propose_token(team[0], params={"name": "script"})
    for member in team.members[1:]:
        member.approve(operation)
    run_due()
    return claim_admin_token(op_id=operation.pk, user=team[0].user)[1]


@pytest.fixture(scope="module")
def cookie(team: Team) -> str:
    """The session of an operator."""
    browser = Client()
    browser.force_login(team[0].user)
    return f"{django_settings.SESSION_COOKIE_NAME}={browser.cookies[django_settings.SESSION_COOKIE_NAME].value}"


@pytest.fixture
def person(control: ServerProcess, cookie: str) -> Iterator[httpx.Client]:
    """A browser that is signed in."""
    headers = {"cookie": cookie, "accept": "text/html"}
    with httpx.Client(base_url=control.url, headers=headers, timeout=WITHIN_S) as client:
        yield client


@pytest.fixture
def script(control: ServerProcess, token: str) -> Iterator[httpx.Client]:
    """A program with an admin token."""
    headers = {"authorization": f"Bearer {token}", "accept": "application/json"}
    with httpx.Client(base_url=control.url, headers=headers, timeout=WITHIN_S) as client:
        yield client


def is_fine(get: Callable[[], httpx.Response]) -> bool:
    return get().status_code == 200


def is_left(get: Callable[[], httpx.Response]) -> bool:
    """Return whether a client with little patience left; one that stood still long enough finds the refusal instead."""
    try:
        assert get().status_code == 503
    except httpx.ReadTimeout:
        return True
    return False


def count_threads(control: ServerProcess) -> int:
    return int(psutil.Process(control.process.pid).num_threads())


def closed_with(page: Any) -> int:
    """Read until the server closes; return its code."""
    with suppress(ConnectionClosed):
        while True:
            page.recv(WITHIN_S)
    return int(page.close_code)


def read_page(open_page: Callable[[], Any]) -> dict[str, Any]:
    with open_page() as page:
        try:
            return dict(json.loads(page.recv(WITHIN_S)))
        except ConnectionClosed:
            return {}


class TestControlPlane:
    """One process for both tests."""

    def test_requests_during_a_freeze_are_503_with_what_to_do_and_everything_comes_back(
        self, servers: EmbeddedServers, control: ServerProcess, person: httpx.Client, script: httpx.Client
    ) -> None:
        asked: dict[str, Callable[[], httpx.Response]] = {
            "page": lambda: person.get("/approvals/"),
            "admin": lambda: person.get("/admin/"),
            "read": lambda: script.get("/requests"),
            "change": lambda: script.post("/api/v1/freeze", json={"reason": "in vain"}),
            "health": lambda: script.get("/healthz"),
        }
        reads = {name: get for name, get in asked.items() if name != "change"}
        for name, get in reads.items():
            wait_until(partial(is_fine, get), what=name)
        before = count_threads(control)
        with ExitStack() as opened:
            clients = opened.enter_context(ThreadPoolExecutor(2 * CROWD))
            opened.enter_context(held(servers, "LOCK TABLE django_session"))
            caught: list[Future[httpx.Response]] = []

            def is_caught_halfway() -> bool:
                if not caught or caught[-1].done():
                    caught.append(clients.submit(asked["page"]))
                return count_blocked(servers) > 0

            wait_until(is_caught_halfway, what="a request waits for its session")
            with frozen(servers):
                impatient = httpx.Timeout(WITHIN_S, read=0.1)
                leaving = [clients.submit(is_left, partial(person.get, "/approvals/", timeout=impatient)) for _ in range(CROWD)]
                assert any(future.result() for future in leaving)
                staying = [clients.submit(asked["page"]) for _ in range(CROWD)]
                waiting = {name: clients.submit(get) for name, get in asked.items()}
                said = {name: future.result() for name, future in waiting.items()}
                assert {future.result().status_code for future in (*staying, caught[-1])} == {503}
        assert {name: answer.status_code for name, answer in said.items()} == dict.fromkeys(asked, 503)
        for page in (said["page"], said["admin"]):
            assert page.headers["content-type"].startswith("text/html")
            assert "Nothing was changed; try again" in page.text
        error = said["read"].json()["error"]
        assert (error["code"], error["retryable"], error["type"]) == ("INTERNAL_ERROR", True, "server_error")
        assert "see whether PostgreSQL runs" in error["message"]
        assert int(said["read"].headers["retry-after"]) > 0
        error = said["change"].json()["error"]
        assert (error["retryable"], "may or may not have been done" in error["message"]) == (False, True)
        assert said["health"].json()["database"] == "unreachable"
        for name, get in reads.items():
            wait_until(partial(is_fine, get), what=name)
        wait_until(lambda: count_threads(control) < before + 2 * CROWD, what="the threads come back")

    def test_what_follows_something_ends_in_a_freeze_and_may_come_back(
        self, servers: EmbeddedServers, control: ServerProcess, team: Team, cookie: str, script: httpx.Client
    ) -> None:
        operation = propose_token(team[0], params={"name": "followed"})
        path = f"/api/v1/operations/{operation.printed_id}/events"
        url, headers = control.url.replace("http", "ws", 1) + "/ws/overview", {"cookie": cookie}

        def open_page() -> Any:
            return connect(url, origin=Origin(control.url), additional_headers=headers, open_timeout=WITHIN_S)

        def is_followed() -> bool:
            with script.stream("GET", path) as answer:
                return next(answer.iter_lines(), "") == "event: status"

        with ExitStack() as opened:
            page = opened.enter_context(open_page())
            assert "open" in json.loads(page.recv(WITHIN_S))["counters"]
            lines = opened.enter_context(script.stream("GET", path)).iter_lines()
            assert next(lines) == "event: status"
            clients = opened.enter_context(ThreadPoolExecutor(4))
            with frozen(servers):
                cut = clients.submit(list, lines)
                later = clients.submit(lambda: script.get(path))
                page_of_now = clients.submit(lambda: closed_with(opened.enter_context(open_page())))
                assert (closed_with(page), page_of_now.result()) == (CloseCode.TRY_AGAIN_LATER, CloseCode.TRY_AGAIN_LATER)
                assert cut.result()[-1] == ""  # ended as a whole, after an event
                assert (later.result().status_code, later.result().json()["error"]["retryable"]) == (503, True)
        wait_until(lambda: "counters" in read_page(open_page), what="the page is live again")
        wait_until(is_followed, what="the operation is followed again")


# what was approved


@pytest.fixture
def slow_commit(servers: EmbeddedServers) -> Iterator[None]:
    """Let every transaction that changes a run wait, in the midst of its COMMIT, for the advisory lock COMMIT_LOCK."""
    with psycopg.connect(servers.database_url, autocommit=True) as database:
        database.execute(
            "CREATE FUNCTION wait_at_commit() RETURNS trigger LANGUAGE plpgsql AS"
            f" $$ BEGIN PERFORM pg_advisory_xact_lock_shared({COMMIT_LOCK}); RETURN NULL; END $$"
        )
        database.execute(
            "CREATE CONSTRAINT TRIGGER wait_at_commit AFTER UPDATE ON governance_operationrun DEFERRABLE INITIALLY DEFERRED"
            " FOR EACH ROW WHEN (NEW.state = 'succeeded') EXECUTE FUNCTION wait_at_commit()"
        )
    yield
    with psycopg.connect(servers.database_url, autocommit=True) as database:
        database.execute("DROP FUNCTION wait_at_commit() CASCADE")


def approve_token(team: Team, name: str) -> OperationRun:
    """A run that nothing but the database carries out."""
    operation = propose_token(team[0], params={"name": name})
    for member in team.members[1:]:
        member.approve(operation)
    return OperationRun.objects.get(operation=operation)


def is_logged(log: Path, text: str) -> bool:
    return text in log.read_text()


def is_done(run: OperationRun) -> bool:
    return OperationRun.objects.filter(pk=run.pk, state=RunState.SUCCEEDED.value).exists()


def assert_carried_out_once(run: OperationRun) -> None:
    run.refresh_from_db()
    assert (run.state, run.attempt) == (RunState.SUCCEEDED.value, 1)
    ends = AuditEvent.objects.filter(op_id=run.operation.printed_id, action="operation.run.succeeded")
    assert ends.count() == 1


@pytest.mark.usefixtures("bound_process", "slow_commit")
def test_executions_that_a_freeze_cuts_off_come_to_exactly_one_end(servers: EmbeddedServers, team: Team) -> None:
    begun, ending = approve_token(team, "begun"), approve_token(team, "ending")
    with ExitStack() as holding:
        holding.enter_context(held(servers, f"SELECT FROM governance_operation WHERE id = '{begun.operation_id}' FOR UPDATE"))
        holding.enter_context(held(servers, f"SELECT pg_advisory_xact_lock({COMMIT_LOCK})"))
        workers = [in_thread(partial(work_on, run.pk)) for run in (begun, ending)]
        wait_until(lambda: count_blocked(servers) == len(workers), what="one has begun, and one is in its COMMIT")
        with frozen(servers):
            assert all(isinstance(worker.exception(WITHIN_S), OperationalError) for worker in workers)
    wait_for_the_abandoned(servers)
    # What the server was about to commit, it commits although nobody waits for the answer any more.
    assert (is_done(begun), is_done(ending)) == (False, True)
    for run in (begun, ending):
        make_due(run.operation)
    for again in [in_thread(reconcile) for _ in range(3)]:
        again.result(WITHIN_S)
    wait_until(lambda: is_done(begun), what="the other one is carried out")
    for run in (begun, ending):
        assert_carried_out_once(run)


@pytest.mark.usefixtures("bound_process")
def test_a_box_called_when_the_database_froze_is_called_once(servers: EmbeddedServers, team: Team, settings: Settings) -> None:
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True
    stopped: list[psutil.Process] = []

    class Freezing(JSONResponse):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            stopped.extend(stop_tree(psutil.Process(servers.postgres.pid)))
            await super().__call__(scope, receive, send)

    with run_direct_node() as box:
        box.answers = {LOAD: (202, Freezing({"taskId": "load-1"}, 202)), "/v1/capabilities": (200, {"models": {}})}
        node = make_node("far", reach=Reach.DIRECT, public_base_url=box.url)
        make_presence(node, age_s=0)
        set_op_key(node_id=node.pk, kid="k1", secret="a key of the tests, 32 bytes long", level="L0", actor=ACTOR)
        operation = approve_load(team, "far")
        run_due()
        run_id = only_run(operation).pk
        try:
            assert isinstance(in_thread(lambda: call_direct_node(run_id)).exception(WITHIN_S), OperationalError)
        finally:
            go_on(stopped)
        assert stopped
        wait_for_the_abandoned(servers)
        OperationRun.objects.filter(pk=run_id).update(contact_at=only_run(operation).queued_at - timedelta(minutes=1))
        assert find_unattended() == [run_id]
        for again in [in_thread(lambda: call_direct_node(run_id)) for _ in range(2)]:
            again.result(WITHIN_S)
        assert box.paths().count(f"POST {LOAD}") == 1
    assert (only_run(operation).state, only_run(operation).code) == (RunState.RESOLVED.value, "interrupted")
    ended = AuditEvent.objects.filter(op_id=operation.printed_id, action="operation.run.resolved")
    assert ended.count() == 1


def test_a_worker_gives_a_frozen_server_up_and_carries_out_what_is_due_when_it_is_back(
    servers: EmbeddedServers, team: Team, processes: dict[str, str], tmp_path: Path
) -> None:
    run, log = approve_token(team, "worker"), tmp_path / "worker.log"
    broker = servers.redis_url.replace("unix://", "redis+socket://").replace("?db=", "?virtual_host=")
    with serve_worker(log, env=processes), Celery(broker=broker, set_as_current=False) as bell:
        with held(servers, f"SELECT FROM governance_operation WHERE id = '{run.operation_id}' FOR UPDATE"):
            bell.send_task("governance.tasks.work", args=[str(run.pk)])
            wait_until(lambda: count_blocked(servers), what="the worker has begun", within_s=2 * WITHIN_S)
            with frozen(servers):
                bell.send_task("controlplane.tasks.sweep")
                for sign in ("due_tasks_wait", "controlplane.tasks.sweep", "OperationalError"):
                    wait_until(partial(is_logged, log, sign), what=sign)
        make_due(run.operation)
        bell.send_task("governance.tasks.work", args=[str(run.pk)])
        wait_until(lambda: is_done(run), what="it is carried out")
    assert_carried_out_once(run)
