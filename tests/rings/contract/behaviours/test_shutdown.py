"""Rows 3 to 5: draining a worker, and deleting a provider."""

from __future__ import annotations

import pytest

from tests.fakes import http_client
from tests.fakes.http_client import assert_failure
from tests.fakes.lab import Lab, unique

pytestmark = pytest.mark.asyncio


async def test_graceful_shutdown_stops_new_assignments_and_disconnects_after_in_flight_completion(lab: Lab) -> None:
    model = await lab.model()
    name = unique("leaving")
    leaving = await lab.worker(model, name=name, max_concurrent=4)
    running = lab.ask(model, "running")
    job = await leaving.job()
    node = await lab.node(name)
    lab.operate("nodes.services.drain_node", node_id={"$id": node["node_id"]}, reason="maintenance", timeout_s=60)
    notice = await leaving.frame("graceful_shutdown")
    assert notice["reason"] == "maintenance"
    assert 0 < notice["drain_timeout_secs"] <= 60
    other = await lab.worker(model)
    following = lab.ask(model, "after the drain")
    await other.answer(await other.job())
    assert (await following).status == 200
    await leaving.answer(job)
    assert (await running).status == 200
    assert await leaving.closed() == (1000, "graceful shutdown complete")
    assert len(leaving.jobs) == 1


async def test_graceful_shutdown_times_out_in_flight_work_that_does_not_finish_before_deadline(lab: Lab) -> None:
    model = await lab.model()
    name = unique("leaving")
    leaving = await lab.worker(model, name=name)
    running = lab.ask(model, "never finishes")
    job = await leaving.job()
    node = await lab.node(name)
    lab.operate("nodes.services.drain_node", node_id={"$id": node["node_id"]}, reason="maintenance", timeout_s=0.5)
    cancel = await leaving.cancelled(job)
    assert cancel["reason"] == "graceful_shutdown"
    assert await leaving.closed() == (1000, "graceful shutdown timed out")
    assert_failure(await running, 503, "REQUEST_INTERRUPTED")
    (record,) = await lab.final(model)
    assert (record["status"], record["error_code"]) == ("interrupted", "REQUEST_INTERRUPTED")


async def test_provider_deletion_drains_queued_requests_with_explicit_errors_and_closes_workers(lab: Lab) -> None:
    provider = unique("provider")
    lab.operate("nodes.services.create_provider", name=provider)
    _, secret = lab.operate("nodes.services.create_credential", name=unique("c"), provider_name=provider, max_nodes=9)
    model = await lab.model()
    worker = await lab.worker(model, secret=secret, provider=provider)
    lab.ask(model, "running")
    await worker.job()
    queued = []
    for number in range(2):
        queued.append(lab.ask(model, f"queued {number}"))
        await lab.queued(number + 1)
    lab.operate("nodes.services.delete_provider", name=provider)
    for reply in queued:
        assert_failure(await reply, 503, "NO_AVAILABLE_NODE", http_client.DELETED_TEXT)
    await worker.closed()
    assert len(worker.jobs) == 1
