"""What the record of a request says while the request waits: operators' pages explain the wait from it."""

from __future__ import annotations

import asyncio

import pytest

from tests.system.gateway.test_pipeline import ANSWER, Gateway, Make, make_gateway

__all__ = ["make_gateway"]

pytestmark = pytest.mark.timeout(180)  # above the sum of the waits and the start of a server


async def until_record(gateway: Gateway, columns: str, *wanted: object) -> None:
    """Wait until the only open record says that."""
    found = None
    async with asyncio.timeout(30):
        while found != wanted:
            row = f"SELECT {columns} FROM gateway_requestrecord WHERE state IN ('queued', 'assigned', 'running')"
            found = gateway.rows.execute(row).fetchone()
            await asyncio.sleep(0.005)


async def test_a_request_that_lost_its_box_is_queued_until_it_has_another(make_gateway: Make) -> None:
    gateway = make_gateway()
    first = gateway.link()
    request = gateway.ask()
    await request.on(first)
    await until_record(gateway, "state, node_name", "running", first.node_name)
    gateway.registry.remove(first)
    await until_record(gateway, "state, model, attempts", "queued", "m", 1)
    second = gateway.link()
    (await request.on(second)).answer(ANSWER)
    await request.done()
    assert await request.record("state", "attempts", "node_name") == ("completed", 2, second.node_name)


async def test_a_request_that_waits_for_a_fallback_is_written_down_under_that_model(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    spare = gateway.link("spare")
    busy = gateway.ask(model="spare")
    held = await busy.on(spare)
    gateway.rows.execute("DELETE FROM gateway_requestrecord")
    request = gateway.ask()
    await until_record(gateway, "state, model, asked_model", "queued", "spare", "m")
    held.answer(ANSWER)
    await busy.done()
    (await request.on(spare)).answer(ANSWER)
    await request.done()
    assert await request.record("state", "model", "asked_model") == ("completed", "spare", "m")
