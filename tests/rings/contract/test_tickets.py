"""Tickets over real processes, by the client that we ship: no gateway while a stream runs, and a drain whose time is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import psycopg
import pytest

from conformance.engine.server import serve_engine
from muster.client import AsyncClient, Bounds
from tests.fakes.control_process import free_port
from tests.fakes.lab import Lab
from tests.fakes.stack import Gateway
from tests.fakes.waiting import eventually
from tests.rings.contract.test_gateways import ROLLED, is_linked, run_node

SLOW = [{"role": "user", "content": "[[pace:300]] hello"}]
ENDLESS = [{"role": "user", "content": "[[pace:300]] [[endless]] hello"}]


@asynccontextmanager
async def reachable_node(lab: Lab, gateway: Gateway, model: str) -> AsyncIterator[str]:
    """A runner that has a link to the gateway alone and takes tickets, as soon as one is given."""
    async with serve_engine(models=[model]) as engine:
        with run_node(lab, engine, model, gateway) as name:
            await eventually(partial(is_linked, gateway, name), within_s=60, what="the gateway has the node")
            yield name


async def gives_tickets(client: AsyncClient, model: str) -> bool:
    """Whether a request goes to the node itself now."""
    before = client.direct
    _ = [part async for part in client.chat(model, [{"role": "user", "content": "hello"}], max_tokens=8)]
    return client.direct > before


@pytest.mark.timeout(300)
async def test_a_direct_stream_goes_on_without_any_gateway_and_is_reported_when_one_is_back(lab: Lab) -> None:
    port = free_port()
    settings = {**ROLLED, "MUSTER_INTERNAL_URL": f"http://127.0.0.1:{port}"}
    gateway = lab.stack.gateway("lone", settings, port=port)
    try:
        model = await lab.model(gateway)
        client = AsyncClient(gateway.url, lab.stack.ready.api_key)
        async with client, reachable_node(lab, gateway, model):
            await eventually(partial(gives_tickets, client, model), within_s=60, what="the gateway gives tickets")
            before, direct = len(await lab.settled(model)), client.direct
            stream = client.chat(model, SLOW, max_tokens=64)
            parts = [await anext(stream)]
            assert gateway.process is not None
            gateway.process.kill()
            gateway.process.wait()
            parts += [part async for part in stream]
            assert len(parts) > 3
            assert all(isinstance(part, str) for part in parts), "nothing began anew"
            assert client.direct == direct + 1
            gateway = await asyncio.to_thread(lab.stack.gateway, "lone", settings, port=port)
            record = (await lab.final(model, before + 1, within_s=90))[-1]
            assert (record["status"], record["endpoint"], record["tokens_estimated"]) == ("completed", "/v1/tickets", False)
            assert record["completion_tokens"] > 3
    finally:
        lab.stack.gateways["lone"].stop()


@pytest.mark.timeout(300)
async def test_a_drain_whose_deadline_passes_cuts_a_direct_stream_and_its_record_says_so(lab: Lab) -> None:
    gateway = lab.stack.main
    model = await lab.model(gateway)
    client = AsyncClient(gateway.url, lab.stack.ready.api_key, bounds=Bounds(follow_s=2.0))
    async with client, reachable_node(lab, gateway, model) as name:
        await eventually(partial(gives_tickets, client, model), within_s=60, what="the gateway gives tickets")
        stream = client.chat(model, ENDLESS)
        first = await anext(stream)
        assert isinstance(first, str)
        node = await lab.node(name)
        lab.operate("nodes.services.drains.drain_node", node_id=node["node_id"].removeprefix("node_"), reason="fans")
        async with await psycopg.AsyncConnection.connect(lab.stack.ready.database_url) as database:  # without its approval
            await database.execute(
                "UPDATE nodes_node SET drain_deadline_at = clock_timestamp() + interval '1 s' WHERE name = %s", [name]
            )
        lab.stack.backstage.call("core.hints.publish_hint", topic="nodes")
        with pytest.raises(httpx.HTTPStatusError) as refused:  # it asked the gateway then, which has no other node
            async for _ in stream:
                pass
        assert refused.value.response.json()["error"]["code"] == "NODE_DRAINING"
        record = [row for row in await lab.settled(model) if row["endpoint"] == "/v1/tickets"][-1]
        assert (record["status"], record["error_code"]) == ("interrupted", "REQUEST_INTERRUPTED")
