"""A PostgreSQL that answers and takes no writes, read-only or with a full disk: nothing is accepted or done by halves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.test import Client

from controlplane.launcher.embedded import EmbeddedServers
from gateway.errors import RecordsUnavailable
from gateway.records import Record, RecordWriter
from governance.models import AuditEvent, Operation
from tests.fakes.frozen_database import in_thread, wait_for
from tests.fakes.pipeline import Rows
from tests.fakes.records import make_record
from tests.system.governance.governance_rest import make_client
from tests.system.governance.team import make_team
from wire.contract import RequestState

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
    data = private_servers.postgres.server.data  # type: ignore[attr-defined]  # the server is a PostgreSQL
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
        await sync_to_async(wait_for)(lambda: states_of(rows)[running.id] == "completed", what="the end is written in the end")
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


def test_an_admin_token_reads_while_its_use_cannot_be_noted(operator: Client, rows: Rows) -> None:
    def act() -> None:
        with read_only(rows):
            connections.close_all()
            wait_for(lambda: propose(operator).status_code == 503, what="the server takes no writes")
            rows.execute("UPDATE governance_admintoken SET last_used_at = NULL")
            assert operator.get("/api/v1/operations").status_code == 200

    in_thread(act).result(120)


def propose(client: Client) -> Any:  # Any: what the test client returns
    return client.post("/api/v1/operations", PROPOSAL, content_type="application/json")


def count_proposals() -> tuple[int, int]:
    """Return how many operations there are, and how many the audit log says were proposed."""
    return Operation.objects.count(), AuditEvent.objects.filter(action="operation.propose").count()


def test_health_says_that_the_database_is_read_only(rows: Rows) -> None:
    def look() -> tuple[int, str]:
        connections.close_all()
        answer = Client().get("/healthz")
        return answer.status_code, answer.json()["database"]

    def act() -> None:
        assert look() == (200, "ok")
        with read_only(rows):
            assert look() == (503, "read-only")
        assert look() == (200, "ok")

    in_thread(act).result(120)
