"""The contract's REST API for boxes, and boxes that the gateway calls over HTTP."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any  # REST bodies are JSON

import pytest
import pytest_asyncio

from tests.fakes.http_client import Reply, assert_failure, assert_stream_failure, call
from tests.fakes.lab import IMPATIENT, Lab, chat_body, unique
from tests.fakes.scripted_backend import ScriptedBackend, serve_backend
from tests.fakes.scripted_worker import ScriptedWorker
from tests.fakes.waiting import eventually
from wire.credentials import CredentialKind, mint_credential

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


async def test_an_upstream_error_of_a_direct_box_keeps_status_and_body(lab: Lab, backend: ScriptedBackend) -> None:
    node = await register(lab, backend.url)
    await node.heartbeat()
    backend.status = 422
    reply = await lab.ask(node.model)
    assert reply.status == 422
    assert reply.error["message"] == "the engine's own words"


async def test_a_node_whose_url_nobody_listens_on_is_offline_and_gets_no_request(lab: Lab, backend: ScriptedBackend) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # held, but nobody listens
        node = await register(lab, f"http://127.0.0.1:{deaf.getsockname()[1]}", reachable=False)
        beat = await node.heartbeat()
        assert (beat.json["effective_status"], beat.json["reachable"]) == ("offline", False)
        reply = await lab.ask(node.model)
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


async def test_a_box_that_reports_an_error_is_node_unhealthy(hasty_lab: Lab, backend: ScriptedBackend) -> None:
    lab = hasty_lab
    node = await register(lab, backend.url)

    async def unhealthy() -> Reply | None:
        await node.heartbeat(status="error", is_accepting_jobs=False, last_local_error="CUDA error 77")
        reply = await lab.ask(node.model)
        return reply if reply.status == 503 and reply.error["code"] == "NODE_UNHEALTHY" else None

    refused = await eventually(unhealthy, what="the box is unhealthy")
    assert_failure(refused, 503, "NODE_UNHEALTHY")
    assert "CUDA" not in refused.body.decode()
    assert (await lab.node(node.name))["status"] == "error"


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


async def test_wrong_node_tokens_are_401_invalid_node_token(lab: Lab, backend: ScriptedBackend) -> None:
    node = await register(lab, backend.url)
    other = await register(lab, backend.url)
    ready = lab.stack.ready
    body = registration(node.name, backend.url, node.model)
    for token in ("wrong", ready.api_key, ready.admin_token, mint_credential(CredentialKind.WORKER).text):
        refused = await lab.control("POST", "/nodes/register", token=token, body=body)
        assert (refused.status, refused.error["code"]) == (401, "INVALID_NODE_TOKEN"), refused
        assert refused.error["retryable"] is False
    node.token, own = other.token, node.token
    foreign = await node.heartbeat()
    assert (foreign.status, foreign.error["code"]) == (401, "INVALID_NODE_TOKEN")
    node.token = own
    assert (await node.heartbeat()).status == 200


async def test_registrations_and_heartbeats_that_cannot_be_used_are_refused(lab: Lab, backend: ScriptedBackend) -> None:
    node = await register(lab, backend.url)

    async def refused(body: Any, path: str = "/nodes/register") -> tuple[int, str]:
        reply = await lab.control("POST", path, token=node.token, body=body)
        assert set(reply.error) == {"code", "message", "retryable", "type", "param"}
        return reply.status, reply.error["code"]

    good = registration(node.name, backend.url, node.model)
    assert await refused({**good, "current_model": unique("unlisted")}) == (400, "MODEL_NOT_ALLOWED")
    assert await refused({**good, "public_base_url": "http://169.254.169.254/"}) == (400, "BAD_REQUEST")
    assert await refused({**good, "public_base_url": "ftp://127.0.0.1/"}) == (400, "BAD_REQUEST")
    assert await refused({"node_name": node.name}) == (400, "BAD_REQUEST")
    assert await refused([]) == (400, "BAD_REQUEST")
    beat = {"node_id": node.node_id, "status": "sleeping"}
    assert await refused(beat, "/nodes/heartbeat") == (400, "BAD_REQUEST")
    draining = {"node_id": node.node_id, "status": "draining", "is_accepting_jobs": True}
    assert await refused(draining, "/nodes/heartbeat") == (400, "BAD_REQUEST")
    unknown = {"node_id": "node_" + "0" * 32, "status": "available"}
    assert await refused(unknown, "/nodes/heartbeat") == (404, "BAD_REQUEST")
    assert await refused({"mode": "spare_off"}, f"/nodes/node_{'0' * 32}/mode") == (404, "BAD_REQUEST")


async def test_the_node_list_is_for_administrators_and_the_openapi_schema_is_served(lab: Lab) -> None:
    for token in (lab.stack.ready.api_key, lab.stack.ready.worker_secret, "wrong"):
        assert (await lab.control("GET", "/nodes", token=token)).status in {401, 403}
    schema = await call("GET", lab.stack.ready.control_url + "/api/schema?format=json", headers={"accept": "*/*"})
    assert schema.status == 200
    paths = {path.removesuffix("/") for path in json.loads(schema.body)["paths"]}
    for path in ("/nodes/register", "/nodes/heartbeat", "/nodes/{node_id}/mode", "/nodes", "/requests"):
        assert path in paths


async def test_drain_and_cordon_survive_a_reconnect(lab: Lab) -> None:
    for action, undo, arguments in (
        ("cordon_node", "uncordon_node", {}),
        ("drain_node", "undrain_node", {"reason": "maintenance"}),
    ):
        model, name = await lab.model(), unique("back-again")
        first = await lab.worker(model, name=name)
        node_id = {"$id": (await lab.node(name))["node_id"]}
        lab.operate(f"nodes.services.{action}", node_id=node_id, **arguments)
        if action == "drain_node":
            assert (await first.closed())[0] == 1000
        else:
            await first.close()
        second = await connect_again(lab, model, name)

        async def draining(model: str = model) -> Reply | None:
            reply = await lab.post(chat_body(model, x_pool_options=IMPATIENT))
            return reply if reply.error["code"] == "NODE_DRAINING" else None

        assert_failure(await eventually(draining, what=f"still kept back after {action}"), 503, "NODE_DRAINING")
        assert not second.jobs
        lab.operate(f"nodes.services.{undo}", node_id=node_id)
        await eventually(partial(serves_again, lab, model, name, [second]), what=f"serving after {undo}")


async def serves_again(lab: Lab, model: str, name: str, sessions: list[ScriptedWorker]) -> bool:
    """Return whether the box serves; it dials once more where the gateway has let its last session go."""
    if sessions[-1].close_code is not None:
        sessions.append(await connect_again(lab, model, name))
    return (await lab.ask_through(sessions[-1], model)).status == 200


async def connect_again(lab: Lab, model: str, name: str) -> ScriptedWorker:
    """Come back under the same name once the older session is gone."""
    await lab.let_go_of(name)
    return await lab.worker(model, name=name)
