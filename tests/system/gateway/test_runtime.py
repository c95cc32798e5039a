"""A gateway's background: start, staying in step with rows that others change and hold, and stopping when a part of it dies."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from asgiref.sync import sync_to_async
from channels.layers import get_channel_layer
from django.db import connection, connections
from django.db.models.functions import Now

from core.db.threads import run_upkeep
from core.hints import HINT_GROUP
from core.limits import GatewayLimits
from gateway.auth import KeyRing
from gateway.catalogue import Catalogue, KeyEntry
from gateway.errors import InvalidApiKey
from gateway.models import ApiKey, GatewayProcess
from gateway.runtime import GatewayRuntime
from gateway.services import create_api_key, create_tenant, revoke_api_key
from nodes.consumers.courier import Courier
from nodes.links import Link, LinkRegistry
from nodes.models import NodePresence
from nodes.services.ejections import list_ejections
from nodes.services.sessions import SessionEnd, close_sessions
from tests.fakes.clock import shift_clock
from tests.fakes.nodes import audited, make_node, make_presence
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.django_db(transaction=True)

ACTOR = "user:ada"


@pytest.fixture(autouse=True)
async def _close_connections() -> AsyncIterator[None]:
    yield
    await sync_to_async(connections.close_all)()


@asynccontextmanager
async def run_gateway(runtime: GatewayRuntime | None = None) -> AsyncIterator[GatewayRuntime]:
    runtime = runtime or GatewayRuntime()
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.stop()


@sync_to_async
def make_key() -> tuple[ApiKey, str]:
    create_tenant(name="acme", actor=ACTOR)
    return create_api_key(name="k", tenant_name="acme", actor=ACTOR)


class CountingRuntime(GatewayRuntime):
    """Counts its sweeps."""

    sweeps = 0

    async def _sweep(self) -> None:
        self.sweeps += 1
        await super()._sweep()


async def test_a_storm_of_hints_costs_ten_sweeps_a_second_and_a_single_hint_is_followed_at_once() -> None:
    loop = asyncio.get_running_loop()
    async with run_gateway(CountingRuntime()) as runtime:
        assert isinstance(runtime, CountingRuntime)
        layer = get_channel_layer()
        begun_at, begun_with = loop.time(), runtime.sweeps
        while runtime.sweeps < begun_with + 10:
            await layer.group_send(HINT_GROUP, {"type": "hint", "topic": "models", "ident": ""})
        assert loop.time() - begun_at > 0.85
        waits = []
        for _ in range(10):
            quiet_at = loop.time() + 0.2
            await eventually(lambda quiet_at=quiet_at: loop.time() > quiet_at)  # type: ignore[misc]  # of a default
            before, sent_at = runtime.sweeps, loop.time()
            await layer.group_send(HINT_GROUP, {"type": "hint", "topic": "models", "ident": ""})
            while runtime.sweeps == before:
                await asyncio.sleep(0)
            waits.append(loop.time() - sent_at)
        assert min(waits) < 0.05


class CountedRegistry(LinkRegistry):
    """Counts how often somebody goes through the links."""

    rounds = 0

    def __iter__(self) -> Iterator[Link]:
        self.rounds += 1
        return super().__iter__()


async def test_a_storm_of_hints_costs_ten_looks_at_the_commands_of_nodes_a_second() -> None:
    loop, registry = asyncio.get_running_loop(), CountedRegistry()
    courier = Courier(registry, gateway_id=uuid.uuid4())
    running = asyncio.create_task(courier.run())
    await eventually(lambda: registry.rounds)
    begun_at, begun_with = loop.time(), registry.rounds
    while registry.rounds < begun_with + 6:
        courier.wake("commands")
        await asyncio.sleep(0)
    assert loop.time() - begun_at > 0.3
    running.cancel()


async def test_a_change_without_a_hint_is_found_by_the_sweep() -> None:
    async with run_gateway() as runtime:
        key, _ = await make_key()
        await eventually(lambda: key.keyid in runtime.catalogue.keys)
        now = runtime.catalogue.keys[key.keyid]
        await ApiKey.objects.filter(pk=key.pk).aupdate(requests_per_minute=3)
        await eventually(lambda: runtime.catalogue.keys[key.keyid] != now)
        assert runtime.catalogue.keys[key.keyid].caller.requests_per_minute == 3


async def test_a_database_that_was_replaced_by_one_with_lower_marks_is_read_whole() -> None:
    async with run_gateway() as runtime:
        key, _ = await make_key()
        await eventually(lambda: key.keyid in runtime.catalogue.keys)
        runtime._keys_mark = 2**60  # as read from the one before it
        await sync_to_async(revoke_api_key)(key_id=key.pk, actor=ACTOR)
        await eventually(lambda: runtime.catalogue.keys[key.keyid].revoked)


async def test_a_gateway_whose_clock_is_wrong_is_alive_by_the_clock_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    shift_clock(monkeypatch, -3600)
    async with run_gateway() as runtime:
        row = GatewayProcess.objects.filter(pk=runtime.gateway_id)
        first = (await row.aget()).heartbeat_at
        await eventually(row.exclude(heartbeat_at=first).aexists)
        assert await row.filter(heartbeat_at__gt=Now() - timedelta(minutes=1)).aexists()


async def test_what_a_gateway_ejects_is_written_down_and_told_once() -> None:
    node = await sync_to_async(make_node)()
    await sync_to_async(make_presence)(node)

    @sync_to_async
    def read() -> list[str]:
        return [one.reason for one in list_ejections(NodePresence.objects.get(pk=node.pk), now=datetime.now(UTC))]

    async def shows(reasons: list[str]) -> bool:
        return await read() == reasons

    async with run_gateway() as runtime:
        ejections = runtime.registry.ejections
        for _ in range(12):
            ejections.note_connect(node.pk, time.monotonic())
        await eventually(lambda: shows(["unsteady"]))
        ejections.tick(time.monotonic() + 3600)
        await eventually(lambda: shows([]))
    assert len(await sync_to_async(audited)("node.ejected")) == 1


async def test_a_gateway_whose_background_dies_stops_itself() -> None:
    stopped: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    try:
        async with run_gateway() as runtime:
            sweeps = runtime._tasks[0]
            runtime.keeper.apply = None  # type: ignore[method-assign, assignment]  # whatever bug there may be
            await eventually(sweeps.done)
            await eventually(lambda: stopped)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert stopped == [signal.SIGTERM]


@pytest.fixture
async def runtime() -> AsyncIterator[GatewayRuntime]:
    runtime = GatewayRuntime()
    await runtime.start()
    yield runtime
    await runtime.stop()


class OvertakenCatalogue(Catalogue):
    """A catalogue whose look-up of a key is still on its way when the key is revoked and a sweep takes the change."""

    def load_key(self, keyid: str) -> KeyEntry | None:
        entry = super().load_key(keyid)
        revoke_api_key(key_id=ApiKey.objects.get(keyid=keyid).pk, actor=ACTOR)
        self.apply_keys(self.load_keys(None), replace=False)
        return entry


async def test_a_look_up_that_a_revocation_overtook_does_not_let_the_key_live_on() -> None:
    _, text = await make_key()
    ring = KeyRing(OvertakenCatalogue(GatewayLimits()))
    for _ in range(2):
        with pytest.raises(InvalidApiKey):
            await ring.identify({"authorization": f"Bearer {text}"}, allow_x_api_key=True)


async def test_boxes_that_leave_while_their_rows_are_held_do_not_make_a_gateway_look_dead(runtime: GatewayRuntime) -> None:
    parameters = connection.get_connection_params()
    wanted = {name: parameters[name] for name in ("dbname", "user", "password", "host", "port") if name in parameters}
    with psycopg.connect(**wanted) as other:
        other.execute("LOCK TABLE nodes_nodepresence IN ACCESS EXCLUSIVE MODE")  # as a migration does
        leaving = [
            run_upkeep(close_sessions, [SessionEnd(uuid.uuid4(), uuid.uuid4(), "gone")], gateway_id=uuid.uuid4())
            for _ in range(64)
        ]
        farewell = asyncio.gather(*leaving, return_exceptions=True)
        row = GatewayProcess.objects.filter(pk=runtime.gateway_id)
        for _ in range(3):
            last = (await row.aget()).heartbeat_at
            await eventually(row.exclude(heartbeat_at=last).aexists)
        other.rollback()
    await farewell


@sync_to_async
def end_key(key: ApiKey, **columns: object) -> None:
    ApiKey.objects.filter(pk=key.pk).update(**columns)


@pytest.mark.parametrize("column", ["revoked_at", "expires_at"])
async def test_keys_that_ended_long_ago_are_not_held_in_memory_and_stay_refused(column: str) -> None:
    key, text = await make_key()
    catalogue = Catalogue(GatewayLimits())
    await end_key(key, **{column: Now() - timedelta(hours=23)})
    assert [keyid for keyid, _entry in await sync_to_async(catalogue.load_keys)(None)] == [key.keyid]
    await end_key(key, **{column: Now() - timedelta(hours=25)})
    assert await sync_to_async(catalogue.load_keys)(None) == []
    with pytest.raises(InvalidApiKey):
        await KeyRing(catalogue).identify({"authorization": f"Bearer {text}"}, allow_x_api_key=True)
