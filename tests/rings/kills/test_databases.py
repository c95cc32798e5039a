"""A PostgreSQL that is frozen, dead, read-only or full, and a process that is killed while it appends to the audit log.

Nobody waits for ever, nothing is accepted or done by halves, what was refused is refused, and all comes back.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import Client
from pytest_django import Settings

from core.db import threads
from core.db.threads import DatabaseBusy, run_in_database, run_upkeep
from core.limits import GatewayLimits
from gateway.dialects.surface import SURFACES
from gateway.errors import RecordsUnavailable
from gateway.process import GatewayRuntime
from gateway.request.identity import KeyRing
from gateway.request.models import Catalogue
from gateway.request.records import RecordWriter
from gateway.values import Record
from governance.models import AuditEvent, Operation
from tests.fakes.audit_logs import LOG_KEY, database_url, judge_database, raw_connection, sizes
from tests.fakes.control_process import frozen, in_thread
from tests.fakes.governed_team import make_client, make_team
from tests.fakes.limits import set_limits
from tests.fakes.pipeline import (
    SSE,
    STREAM,
    Make,
    Rows,
    allow_keeping,
    is_waited_for,
    last_data,
    make_record,
)
from tests.fakes.servers import EmbeddedServers
from tests.fakes.waiting import eventually, turns, wait_until
from wire.auditlog import Status
from wire.contract import RequestState
from wire.credentials import CredentialKind, mint_credential

SLACK_S = 30.0


@pytest.fixture
def limit_s() -> float:
    """Less patience than we ship: what is tested waits it out."""
    set_limits(core={"database_s": 2.0}, gateway={"records_silence_s": 1.0})
    return 2.0


@pytest.mark.usefixtures("rows")
async def test_an_unknown_key_is_refused_while_the_server_is_frozen(private_servers: EmbeddedServers, limit_s: float) -> None:
    keys = KeyRing(Catalogue(GatewayLimits()))
    key = mint_credential(CredentialKind.CLIENT).text
    with frozen(private_servers):
        async with asyncio.timeout(limit_s + SLACK_S):
            with pytest.raises(RecordsUnavailable) as refused:
                await keys.identify({"authorization": f"Bearer {key}"})
    assert refused.value.retry_after_s


async def test_a_gateway_lives_through_a_freeze_and_its_heartbeat_goes_on(
    rows: Rows, private_servers: EmbeddedServers, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    def read_heartbeat(runtime: GatewayRuntime) -> object:
        row = rows.execute("SELECT heartbeat_at FROM gateway_gatewayprocess WHERE id = %s", [runtime.gateway_id]).fetchone()
        return row[0] if row is not None else None

    runtime = GatewayRuntime()
    await runtime.start()
    request.getfixturevalue("limit_s")
    try:
        with frozen(private_servers):
            await eventually(lambda: "gateway.sweep_failed" in caplog.text and "gateway.heartbeat_failed" in caplog.text)
        before = read_heartbeat(runtime)
        await eventually(lambda: read_heartbeat(runtime) != before)
        assert not any(task.done() for task in runtime._tasks)
    finally:
        await runtime.stop()


async def test_more_calls_than_may_wait_are_refused_at_once_and_upkeep_goes_on() -> None:
    await eventually(lambda: threads._room.taken == 0)  # a call of an earlier test has its place in the room
    set_limits(core={"database_s": SLACK_S, "database_waiting": 5})
    go_on = threading.Event()
    waiting = [asyncio.create_task(run_in_database(go_on.wait, 30)) for _ in range(5)]
    await turns(1)
    with pytest.raises(DatabaseBusy, match="wait for the database already"):
        await run_in_database(go_on.wait, 30)
    assert await run_upkeep(lambda: 3) == 3
    go_on.set()
    assert await asyncio.gather(*waiting) == [True] * 5
    assert await run_in_database(lambda: 4) == 4


async def test_a_call_that_nobody_waits_for_any_more_is_not_begun() -> None:
    set_limits(core={"database_s": SLACK_S})
    go_on = threading.Event()
    begun: list[int] = []
    busy = [asyncio.create_task(run_in_database(go_on.wait, 30)) for _ in range(4)]
    await turns(1)
    given_up = asyncio.create_task(run_in_database(begun.append, 1))
    await turns(1)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    go_on.set()
    await asyncio.gather(*busy)
    assert await asyncio.gather(*(run_in_database(time.monotonic) for _ in range(8)))
    assert begun == []


@pytest.mark.parametrize("moment", ["before", "while"])
async def test_an_answer_that_a_frozen_database_cannot_keep_reaches_its_client_and_is_not_kept_later(
    make_gateway: Make, rows: Rows, private_servers: EmbeddedServers, moment: str
) -> None:
    set_limits(gateway={"store_s": 1.0})
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={"/v1/chat/completions"})
    request = gateway.ask(surface=SURFACES["/v1/responses"], input="hi", stream=True)
    stream = await request.on(link)
    await eventually(lambda: rows.execute("SELECT 1 FROM gateway_requestrecord").fetchone())  # it is accepted
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        if moment == "while":
            blocker.execute("LOCK TABLE gateway_storedresponse")
            stream.answer(*STREAM, headers=SSE)
            # A machine that stands still for that second sees the keeping given up already.
            await request.client.wait(lambda: is_waited_for(rows) or request.task.done())
        with frozen(private_servers):
            if moment == "before":
                stream.answer(*STREAM, headers=SSE)
            await request.done()
        blocker.rollback()
    response = last_data(request.client.body)["response"]
    assert (response["store"], response["status"], request.client.is_whole) == (False, "completed", True)
    assert await request.record("state", "prompt_tokens", "completion_tokens") == ("completed", 3, 4)
    await asyncio.gather(*(run_in_database(int) for _ in range(8)))
    await eventually(lambda: threads._room.taken == 0)
    assert rows.execute("SELECT count(*) FROM gateway_storedresponse").fetchone() == (0,)


Unwritable = Callable[[], AbstractContextManager[None]]
PROPOSAL = {
    "operation": "admin-token-mint", "targets": ["control-plane"], "params": {"name": "ci"}, "reason": "for the build",
}  # fmt: skip
DISK = "64m"


@contextmanager
def read_only(rows: Rows) -> Iterator[None]:
    """Have the server refuse writes in every session but ours, as a standby or a managed one does."""
    rows.execute("SET default_transaction_read_only = off")
    rows.execute("ALTER SYSTEM SET default_transaction_read_only = on")
    rows.execute("SELECT pg_reload_conf()")
    try:
        yield
    finally:
        rows.execute("ALTER SYSTEM RESET default_transaction_read_only")
        rows.execute("SELECT pg_reload_conf()")


@contextmanager
def full_disk(rows: Rows, disk: Path) -> Iterator[None]:
    """Fill what is left on the disk that the tables lie on."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass
    try:
        yield
    finally:
        ballast.unlink()
        rows.execute("SELECT 1")


@pytest.fixture
def disk(private_servers: EmbeddedServers, rows: Rows, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small disk of its own for the tables and indexes of the database."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    data = private_servers.postgres.server.data  # type: ignore[union-attr]  # the server is a PostgreSQL
    place = data.parent.parent / "small-disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", place], check=False, capture_output=True)
    if mounted.returncode != 0:
        place.rmdir()
        pytest.skip("no disk can be mounted here")
    try:
        folder = place / "tables"
        folder.mkdir(mode=0o700)
        os.chown(folder, data.stat().st_uid, data.stat().st_gid)
        rows.execute(f"CREATE TABLESPACE small LOCATION '{folder}'")
        for kind in ("TABLE", "INDEX"):
            rows.execute(f"ALTER {kind} ALL IN TABLESPACE pg_default SET TABLESPACE small")
        yield place
        for kind in ("TABLE", "INDEX"):
            rows.execute(f"ALTER {kind} ALL IN TABLESPACE small SET TABLESPACE pg_default")
        rows.execute("DROP TABLESPACE small")
    finally:
        subprocess.run(["umount", "-l", place], check=True)
        place.rmdir()


@pytest.fixture(scope="module")
def operator(private_servers: EmbeddedServers) -> Client:
    """A program of a person whose changes are governed."""

    def prepare() -> Client:
        team = make_team()
        client = make_client(team[0])
        team.start()
        return client

    client = in_thread(prepare).result(60)
    assert isinstance(client, Client)
    return client


@pytest.fixture(params=["read-only", "full"])
def unwritable(request: pytest.FixtureRequest, rows: Rows) -> Unwritable:
    """The way in which the database takes no writes within a block."""
    if request.param == "read-only":
        return lambda: read_only(rows)
    disk: Path = request.getfixturevalue("disk")
    return lambda: full_disk(rows, disk)


def make_long_record() -> Record:
    """Return a request with a long name: few rows fill a page that has room left."""
    return make_record(tenant="t" * 60, key_name="k" * 60, model="m" * 200)


def states_of(rows: Rows) -> dict[object, object]:
    """Return the state of every request in the database."""
    return dict(rows.execute("SELECT id, state FROM gateway_requestrecord").fetchall())  # type: ignore[arg-type]  # two columns


async def fill_up(writer: RecordWriter, accepted: list[Record]) -> RecordsUnavailable:
    """Send requests until one is refused: pages have room for some more. Those before it join ``accepted``."""
    for _ in range(5000):
        record = make_long_record()
        try:
            await writer.accept(record)
        except RecordsUnavailable as refusal:
            return refusal
        accepted.append(record)
    pytest.fail("nothing was refused")


async def test_nothing_is_accepted_that_is_not_written_and_all_of_it_works_again_afterwards(
    rows: Rows, unwritable: Unwritable
) -> None:
    writer = RecordWriter(accept_s=30.0, max_pending=1000)
    writer.start()
    try:
        running = make_long_record()
        await writer.accept(running)
        accepted = [running]
        with unwritable():
            refusal = await fill_up(writer, accepted)
            assert refusal.status == 503
            assert refusal.retry_after_s
            assert not writer.is_healthy
            running.state = RequestState.COMPLETED
            writer.touch(running)
            states = states_of(rows)
            assert all(states.get(record.id) for record in accepted)
        await sync_to_async(wait_until)(
            lambda: states_of(rows)[running.id] == "completed", what="the end is written in the end"
        )
        again = make_long_record()
        await writer.accept(again)
        assert again.id in states_of(rows)
    finally:
        await writer.stop()
    open_rows = {ident for ident, state in states_of(rows).items() if state in {"queued", "assigned"}}
    assert open_rows <= {record.id for record in [*accepted, again]}, "a request that was refused is not left open"


def test_governed_changes_are_refused_whole_in_words_and_made_when_there_is_room_again(
    operator: Client, unwritable: Unwritable
) -> None:
    def act() -> None:
        begun = count_proposals()
        with unwritable():
            connections.close_all()
            answers = (propose(operator) for _ in range(300))  # pages have room for some more
            answer = next(answer for answer in answers if answer.status_code != 201)
            assert answer.status_code == 503, answer.content
            error = answer.json()["error"]
            assert error["message"].startswith("The database takes no changes")
            assert "Nothing was changed" in error["message"]
            assert error["retryable"]
            assert answer["Retry-After"]
            operations, events = count_proposals()
            assert operations - begun[0] == events - begun[1]
        connections.close_all()
        assert propose(operator).status_code == 201
        after = count_proposals()
        assert (after[0] - operations, after[1] - events) == (1, 1)

    in_thread(act).result(120)


def test_an_admin_token_reads_and_health_says_so_while_the_database_is_read_only(operator: Client, rows: Rows) -> None:
    def look() -> tuple[int, str]:
        connections.close_all()
        answer = Client().get("/healthz")
        return answer.status_code, answer.json()["database"]

    def act() -> None:
        assert look() == (200, "ok")
        with read_only(rows):
            wait_until(lambda: look() == (503, "read-only"), what="the server takes no writes")
            assert propose(operator).status_code == 503
            rows.execute("UPDATE governance_admintoken SET last_used_at = NULL")
            assert operator.get("/api/v1/operations").status_code == 200
        assert look() == (200, "ok")

    in_thread(act).result(120)


def propose(client: Client) -> Any:  # Any: what the test client returns
    return client.post("/api/v1/operations", PROPOSAL, content_type="application/json")


def count_proposals() -> tuple[int, int]:
    """Return how many operations there are, and how many the audit log says were proposed."""
    return Operation.objects.count(), AuditEvent.objects.filter(action="operation.propose").count()


@pytest.mark.django_db(transaction=True)  # on the database of the tests, before the private one takes its place
def test_a_process_killed_while_it_appends_leaves_a_whole_chain(settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_KEY
    command = [sys.executable, "-m", "tests.fakes.audit_process"]
    name = f"killed {os.getpid()}"
    environment = {**os.environ, "DATABASE_URL": database_url(), "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    environment["PGAPPNAME"] = name
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = 0
        try:
            while told < 40:
                told = int(process.stdout.readline())
            assert count_backends(name) == 1
        finally:
            process.kill()
        process.wait(10)
    wait_until(lambda: count_backends(name) == 0, what="the server is through with what the process had begun")
    verdict = judge_database()
    assert verdict.status is Status.GOOD
    assert verdict.size == AuditEvent.objects.count() >= told
    assert sizes() == list(range(1, verdict.size + 1))


def count_backends(name: str) -> int:
    """Return how many connections of the program ``name`` the server knows."""
    with raw_connection() as session:
        found = session.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name]).fetchone()
        assert found is not None
        return int(str(found[0]))
