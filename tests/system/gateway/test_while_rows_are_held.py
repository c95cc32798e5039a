"""A gateway beside others that change and hold the same rows: what it takes from memory, and that it stays alive."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections
from django.db.models.functions import Now

from core.db.threads import run_upkeep
from core.limits import GatewayLimits
from gateway.auth import KeyRing
from gateway.catalogue import Catalogue, KeyEntry
from gateway.errors import InvalidApiKey
from gateway.models import ApiKey, GatewayProcess
from gateway.runtime import GatewayRuntime
from gateway.services import create_api_key, create_tenant, revoke_api_key
from nodes.services.sessions import SessionEnd, close_sessions

pytestmark = pytest.mark.django_db(transaction=True)

ACTOR = "user:ada"


@pytest.fixture(autouse=True)
async def _close_connections() -> AsyncIterator[None]:
    yield
    await sync_to_async(connections.close_all)()


@sync_to_async
def make_key() -> tuple[ApiKey, str]:
    create_tenant(name="acme", actor=ACTOR)
    return create_api_key(name="k", tenant_name="acme", actor=ACTOR)


@pytest.fixture
async def runtime() -> AsyncIterator[GatewayRuntime]:
    runtime = GatewayRuntime()
    await runtime.start()
    yield runtime
    await runtime.stop()


async def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


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
            async with asyncio.timeout(30):
                while (await row.aget()).heartbeat_at == last:
                    await asyncio.sleep(0.05)
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
