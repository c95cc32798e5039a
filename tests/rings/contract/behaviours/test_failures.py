"""Rows 46 to 51: failures as a client sees them, in the contract's envelope with ModelRelay's sentences."""

from __future__ import annotations

import asyncio

import pytest

from tests.fakes import http_client
from tests.fakes.http_client import assert_failure
from tests.fakes.lab import Lab, chat_body, heard_in_time, unique
from tests.fakes.waiting import eventually

pytestmark = pytest.mark.asyncio


@heard_in_time
async def test_queue_timeout_http_boundary_returns_sanitized_service_unavailable_text(hasty_lab: Lab) -> None:
    await eventually(lambda: are_told_of_the_timeout(hasty_lab), what="two requests wait for as long as they may")


async def are_told_of_the_timeout(lab: Lab) -> bool:
    """Check it with fresh names. False: this machine stood still until the request before them, or the worker, was given up."""
    model = await lab.model()
    worker = await lab.worker(model)
    running = lab.ask(model, "running")
    job = await worker.job()
    replies = await asyncio.gather(*(lab.ask(model, stream=stream) for stream in (False, True)))
    await worker.answer(job)
    if (await running).status != 200 or "NODE_STALE" in {reply.error["code"] for reply in replies}:
        return False
    for reply in replies:
        assert_failure(reply, 504, "REQUEST_TIMEOUT", http_client.TIMED_OUT_TEXT)
    return True


async def test_queue_full_http_boundary_returns_capacity_message_without_internal_reason(lab: Lab) -> None:
    model = await lab.model(max_queue=2)
    worker = await lab.worker(model)
    lab.ask(model, "running")
    await worker.job()
    for number in range(2):
        lab.ask(model, f"queued {number}")
    await lab.queued(2)
    assert_failure(await lab.ask(model), 503, "NO_AVAILABLE_NODE", http_client.BUSY_TEXT)
    assert_failure(await lab.ask(model, stream=True), 503, "NO_AVAILABLE_NODE", http_client.BUSY_TEXT)


async def test_no_workers_http_boundary_returns_sanitized_worker_unavailable_text(hasty_lab: Lab) -> None:
    lab = hasty_lab
    model = await lab.model()
    for stream in (False, True):
        assert_failure(await lab.ask(model, stream=stream), 503, "NO_AVAILABLE_NODE", http_client.NO_WORKERS_TEXT)
    records = await lab.final(model, 2)
    assert [record["error_code"] for record in records] == ["NO_AVAILABLE_NODE"] * 2


async def provider_with_secret(lab: Lab) -> tuple[str, str]:
    """Return a fresh provider and an enrolment credential of it."""
    provider = unique("provider")
    lab.operate("nodes.services.create_provider", name=provider)
    _, secret = lab.operate("nodes.services.create_credential", name=unique("c"), provider_name=provider, max_nodes=9)
    return provider, str(secret)


async def test_disabled_provider_http_boundary_returns_sanitized_disabled_message(lab: Lab) -> None:
    provider, secret = await provider_with_secret(lab)
    model = await lab.model()
    worker = await lab.worker(model, secret=secret, provider=provider)
    assert (await lab.ask_through(worker, model)).status == 200
    lab.operate("nodes.services.disable_provider", name=provider)
    refused = await eventually(lambda: lab.refused_through(worker, model), what="the gateway knows")
    assert_failure(refused, 503, "NO_AVAILABLE_NODE", http_client.DISABLED_TEXT)
    at_once = await lab.post(chat_body(model), within_s=8)  # less than a request waits for a node
    assert_failure(at_once, 503, "NO_AVAILABLE_NODE", http_client.DISABLED_TEXT)


async def test_requeue_exhaustion_http_boundary_returns_sanitized_retry_exhausted_text(lab: Lab) -> None:
    model = await lab.model()
    workers = [await lab.worker(model) for _ in range(4)]
    reply = lab.ask(model, stream=True)
    left = list(workers)
    while left:
        worker = await lab.first_with_job(left)
        worker.die()
        left.remove(worker)
    assert_failure(await reply, 503, "REQUEST_INTERRUPTED", http_client.EXHAUSTED_TEXT)


async def test_provider_deletion_http_boundary_hides_internal_delete_reason_behind_generic_service_error(
    lab: Lab,
) -> None:
    provider, secret = await provider_with_secret(lab)
    model = await lab.model()
    worker = await lab.worker(model, secret=secret, provider=provider)
    lab.ask(model, "running")
    await worker.job()
    queued = lab.ask(model, "queued")
    await lab.queued(1)
    lab.operate("nodes.services.delete_provider", name=provider)
    assert_failure(await queued, 503, "NO_AVAILABLE_NODE", http_client.DELETED_TEXT)
