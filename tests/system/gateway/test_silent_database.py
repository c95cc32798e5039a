"""A PostgreSQL that is frozen: it keeps every socket open and says nothing. Nobody waits for ever, and all comes back."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from django.db import DatabaseError, connection, transaction

from controlplane.launcher.embedded import EmbeddedServers
from core.db import threads
from core.db.threads import DatabaseBusy, run_in_database, run_upkeep
from core.limits import GatewayLimits
from gateway.auth import KeyRing
from gateway.catalogue import Catalogue
from gateway.errors import RecordsUnavailable
from gateway.records import Record, RecordWriter
from gateway.runtime import GatewayRuntime
from tests.fakes.frozen_database import frozen
from tests.fakes.limits import set_limits
from wire.contract import RequestState
from wire.credentials import CredentialKind, mint_credential
from wire.ids import new_uuid7

pytestmark = pytest.mark.timeout(240)  # above the sum of the waits and the start of a server
Rows = psycopg.Connection[tuple[object, ...]]
SLACK_S = 30.0


def ask() -> int:
    with connection.cursor() as cursor:
        cursor.execute("SELECT 7")
        (answer,) = cursor.fetchone()
        return int(answer)


class Halfway:
    """A query whose connection is open before the server freezes: ``is_connected`` then, and ``go_on`` afterwards."""

    def __init__(self) -> None:
        self.is_connected = threading.Event()
        self.go_on = threading.Event()

    def run(self) -> int:
        with transaction.atomic():
            ask()
            self.is_connected.set()
            assert self.go_on.wait(30)
            return ask()


async def halfway(run: Callable[[Callable[[], int]], Coroutine[Any, Any, int]]) -> tuple[Halfway, asyncio.Task[int]]:
    """Return a query that is connected, and its caller; a busy machine may take all the time of one for that."""
    while True:
        query = Halfway()
        caller = asyncio.create_task(run(query.run))
        await until(lambda: query.is_connected.is_set() or caller.done())  # noqa: B023  # awaited within the turn
        if query.is_connected.is_set():
            return query, caller
        query.go_on.set()
        await asyncio.gather(caller, return_exceptions=True)


def make_record() -> Record:
    """Return a request that was just accepted."""
    return Record(
        id=new_uuid7(),
        created_at=datetime.now(UTC),
        gateway_id=uuid.UUID(int=1),
        tenant="t",
        key_id=uuid.UUID(int=2),
        key_name="k",
        endpoint="/v1/chat/completions",
        model="m",
        is_streaming=True,
    )


async def accepted(writer: RecordWriter) -> Record:
    """Return a request that the writer has accepted; a busy machine may keep the database silent for as long as it bears."""
    while True:
        record = make_record()
        with suppress(RecordsUnavailable):
            await writer.accept(record)
            return record


def read_state(rows: Rows, record: Record) -> object:
    """Return the state of a record's row, or None when it has none."""
    row = rows.execute("SELECT state FROM gateway_requestrecord WHERE id = %s", [record.id]).fetchone()
    return row[0] if row is not None else None


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
def limit_s() -> float:
    """Less patience than we ship: what is tested waits it out."""
    set_limits(core={"database_s": 2.0}, gateway={"records_silence_s": 1.0})
    return 2.0


@pytest.mark.usefixtures("rows")
async def test_what_asks_a_frozen_server_ends_and_all_threads_come_back(
    private_servers: EmbeddedServers, limit_s: float
) -> None:
    begun = [await halfway(run) for run in (run_in_database, run_in_database, run_upkeep, run_upkeep)]
    callers = [caller for _, caller in begun]
    with frozen(private_servers):
        for query, _ in begun:
            query.go_on.set()
        callers += [asyncio.create_task(run_in_database(ask)) for _ in range(12)]
        async with asyncio.timeout(limit_s + SLACK_S):
            failures = await asyncio.gather(*callers, return_exceptions=True)
        assert all(isinstance(failure, DatabaseError) for failure in failures), failures
    async with asyncio.timeout(SLACK_S):
        while await asyncio.gather(*(run_in_database(ask) for _ in range(8)), return_exceptions=True) != [7] * 8:
            pass  # a server that has just thawed may need longer than they wait
        while await asyncio.gather(*(run_upkeep(ask) for _ in range(8)), return_exceptions=True) != [7] * 8:
            pass
    await until(lambda: threads._room.taken == 0)


@pytest.mark.usefixtures("rows")
async def test_an_unknown_key_is_refused_while_the_server_is_frozen(private_servers: EmbeddedServers, limit_s: float) -> None:
    keys = KeyRing(Catalogue(GatewayLimits()))
    key = mint_credential(CredentialKind.CLIENT).text
    with frozen(private_servers):
        async with asyncio.timeout(limit_s + SLACK_S):
            with pytest.raises(RecordsUnavailable) as refused:
                await keys.identify({"authorization": f"Bearer {key}"}, allow_x_api_key=False)
    assert refused.value.retry_after_s


@pytest.mark.usefixtures("limit_s")
async def test_the_writer_gives_up_on_a_frozen_server_and_leaves_no_request_open(
    rows: Rows, private_servers: EmbeddedServers
) -> None:
    writer = RecordWriter(accept_s=30.0, max_pending=100)
    writer.start()
    try:
        running, refused = await accepted(writer), make_record()
        with frozen(private_servers):
            with pytest.raises(RecordsUnavailable):
                await writer.accept(refused)
            running.state = RequestState.COMPLETED
            writer.touch(running)
            await until(lambda: not writer.is_healthy)
        await until(lambda: read_state(rows, running) == "completed")
        await until(lambda: writer.is_healthy and read_state(rows, refused) in {None, "rejected"})
    finally:
        await writer.stop()


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
            await until(lambda: "gateway.sweep_failed" in caplog.text and "gateway.heartbeat_failed" in caplog.text)
        before = read_heartbeat(runtime)
        await until(lambda: read_heartbeat(runtime) != before)
        assert not any(task.done() for task in runtime._tasks)
    finally:
        await runtime.stop()


async def test_more_calls_than_may_wait_are_refused_at_once_and_upkeep_goes_on() -> None:
    await until(lambda: threads._room.taken == 0)  # a call of an earlier test has its place in the room
    set_limits(core={"database_s": SLACK_S, "database_waiting": 5})
    go_on = threading.Event()
    waiting = [asyncio.create_task(run_in_database(go_on.wait, 30)) for _ in range(5)]
    await asyncio.sleep(0)
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
    await asyncio.sleep(0)
    given_up = asyncio.create_task(run_in_database(begun.append, 1))
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.gather(given_up, return_exceptions=True)
    go_on.set()
    await asyncio.gather(*busy)
    assert await asyncio.gather(*(run_in_database(time.monotonic) for _ in range(8)))
    assert begun == []
