"""The contract's REST API for boxes, and boxes that the gateway calls over HTTP."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any  # REST bodies are JSON

import pytest
import pytest_asyncio

from tests.fakes.http_client import Reply, assert_failure, assert_stream_failure
from tests.fakes.lab import IMPATIENT, Lab, unique
from tests.fakes.scripted_backend import ScriptedBackend, serve_backend
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio

RECLAIM_GRACE_S = 1.0
"""MUSTER_RECLAIM_GRACE_S of the stack."""


@dataclass
class DirectNode:
    """A registered box and the credential that speaks for it."""

    lab: Lab
    token: str
    node_id: str
    model: str
    name: str

    async def heartbeat(self, **changes: Any) -> Reply:
        """Send a heartbeat; the box keeps sending them only when a test says so."""
        body = {
            "node_id": self.node_id,
            "status": "available",
            "mode": "spare_on",
            "gpu_util_percent": 22.4,
            "vram_used_mb": 24576,
            "vram_free_mb": 73728,
            "spare_score": 78.2,
            "is_accepting_jobs": True,
            "active_request_count": 0,
            "last_local_error": None,
            "observed_at": "2026-03-13T08:15:30Z",
            **changes,
        }
        return await self.lab.control("POST", "/nodes/heartbeat", token=self.token, body=body)


def registration(name: str, url: str, model: str) -> dict[str, Any]:
    """Return the contract's example of a registration."""
    return {
        "node_name": name,
        "owner_name": "JOY",
        "public_base_url": url,
        "gpu_name": "RTX Pro 6000 Blackwell",
        "vram_total_mb": 98304,
        "current_model": model,
        "agent_version": "0.1.0",
    }


async def register(lab: Lab, url: str, *, reachable: bool = True) -> DirectNode:
    """Register a box with a credential and a model of its own."""
    model, name = await lab.model(), unique("direct")
    _, token = lab.operate("nodes.services.create_credential", name=name, provider_name="local")
    reply = await lab.control("POST", "/nodes/register", token=token, body=registration(name, url, model))
    assert reply.status == 200, reply
    contract = {"node_id", "status", "accepted_model", "heartbeat_interval_sec"}
    assert set(reply.json) == contract | {"reachable", "unreachable_reason"}
    assert reply.json["reachable"] is reachable, reply.json
    assert reply.json["status"] == "offline"
    assert reply.json["accepted_model"] == model
    return DirectNode(lab, token, reply.json["node_id"], model, name)


@pytest_asyncio.fixture
async def backend() -> AsyncIterator[ScriptedBackend]:
    """An engine on loopback."""
    async with serve_backend() as running:
        yield running


async def test_a_registered_box_that_reports_itself_serves_requests(lab: Lab, backend: ScriptedBackend) -> None:
    node = await register(lab, backend.url)
    beat = await node.heartbeat()
    assert beat.status == 200
    contract = {"ok", "server_time", "effective_status", "should_drain"}
    assert set(beat.json) == contract | {"reachable", "unreachable_reason"}
    assert (beat.json["ok"], beat.json["effective_status"], beat.json["should_drain"]) == (True, "available", False)
    reply = await lab.ask(node.model, "over HTTP")
    assert reply.status == 200
    assert reply.json["choices"][0]["message"]["content"] == "direct"
    (seen,) = backend.calls
    assert seen.body["messages"][0]["content"] == "over HTTP"
    assert not {"authorization", "x-api-key", "cookie"} & set(seen.headers)
    streamed = await lab.ask(node.model, stream=True)
    assert streamed.events[-1] == "[DONE]"
    assert not any('"choices":[]' in data.replace(" ", "") for data in streamed.events)
    first, second = await lab.final(node.model, 2)
    assert (first["node_name"], second["node_name"]) == (node.name, node.name)
    assert (first["prompt_tokens"], first["completion_tokens"], first["tokens_estimated"]) == (11, 2, False)
    assert second["completion_tokens"] >= 1
    await node.heartbeat()
    row = await lab.node(node.name)
    assert (row["status"], row["mode"], row["current_model"]) == ("available", "spare_on", node.model)
    assert row["vram_free_mb"] == 73728


async def test_a_node_whose_url_nobody_listens_on_is_offline_and_gets_no_request(lab: Lab, backend: ScriptedBackend) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # held, but nobody listens
        node = await register(lab, f"http://127.0.0.1:{deaf.getsockname()[1]}", reachable=False)
        beat = await node.heartbeat()
        assert (beat.json["effective_status"], beat.json["reachable"]) == ("offline", False)
        reply = await lab.ask(node.model, x_pool_options=IMPATIENT)
    assert_failure(reply, 503, "NODE_UNHEALTHY")


async def test_a_client_that_leaves_aborts_the_call_to_a_direct_box(lab: Lab, backend: ScriptedBackend) -> None:
    node = await register(lab, backend.url)
    await node.heartbeat()
    backend.hold.clear()
    exchange = await lab.open(node.model, stream=False)
    await eventually(lambda: backend.calls, what="the engine works")
    exchange.leave()
    await eventually(lambda: backend.gone == 1, what="the engine was told")
    (record,) = await lab.final(node.model)
    assert record["status"] == "cancelled"


async def test_a_box_that_stops_reporting_is_excluded_as_node_stale(hasty_lab: Lab, backend: ScriptedBackend) -> None:
    lab = hasty_lab
    node = await register(lab, backend.url)

    async def serving() -> bool:
        await node.heartbeat()
        return (await lab.ask(node.model)).status == 200

    await eventually(serving, what="the box serves", pause_s=0.1)

    async def stale() -> Reply | None:
        reply = await lab.ask(node.model)
        # A request that a machine which stands still holds up on its way to the box ends by its own time-out.
        return None if reply.status in {200, 504} else reply

    refused = await eventually(stale, what="the box is stale", pause_s=0.1)
    assert_failure(refused, 503, "NODE_STALE")
    served = len(backend.calls)
    await eventually(serving, what="a heartbeat brings it back", pause_s=0.1)
    assert len(backend.calls) > served


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
async def test_spare_off_gives_work_in_flight_the_grace_period_then_interrupts_it(
    lab: Lab, backend: ScriptedBackend, stream: bool
) -> None:
    node = await register(lab, backend.url)
    await node.heartbeat()
    backend.hold.clear()
    exchange = await lab.open(node.model, stream=stream)
    await eventually(lambda: backend.calls, what="the engine works")
    if stream:
        await exchange.until(b"begun")
    body = {"mode": "spare_off", "reason": "owner_reclaim"}
    changed = await lab.control("POST", f"/nodes/{node.node_id}/mode", token=node.token, body=body)
    assert changed.status == 200
    assert changed.json == {"node_id": node.node_id, "mode": "spare_off", "status": "draining"}
    got = await exchange.finish()
    if stream:
        assert_stream_failure(got, "REQUEST_INTERRUPTED")
    else:
        assert_failure(got, 503, "REQUEST_INTERRUPTED")
    await eventually(lambda: backend.gone == 1, what="the engine was told to stop")
    await node.heartbeat(mode="spare_off", status="draining", is_accepting_jobs=False)
    assert (await lab.node(node.name))["mode"] == "spare_off"
    (record,) = await lab.final(node.model)
    assert (record["status"], record["error_code"]) == ("interrupted", "REQUEST_INTERRUPTED")
    lab.ask(node.model, "not on a reclaimed box")
    await lab.queued(1)
    assert len(backend.calls) == 1


async def test_work_that_fits_the_grace_period_finishes_after_spare_off(lab: Lab, backend: ScriptedBackend) -> None:
    async def finished() -> bool:
        """Return whether it did; it may not only where this machine took longer than the grace."""
        node = await register(lab, backend.url)
        await node.heartbeat()
        backend.calls.clear()
        backend.hold.clear()
        reply = lab.ask(node.model)
        await eventually(lambda: backend.calls, what="the engine works")
        body = {"mode": "spare_off", "reason": "owner_reclaim"}
        began = time.monotonic()
        await lab.control("POST", f"/nodes/{node.node_id}/mode", token=node.token, body=body)
        backend.hold.set()
        answered = await reply
        assert answered.status == 200 or time.monotonic() - began > RECLAIM_GRACE_S, answered
        return answered.status == 200

    await eventually(finished, what="a request finishes within the grace")
