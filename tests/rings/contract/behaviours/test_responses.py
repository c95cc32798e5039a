"""Rows 36 to 39: what a worker answers is what the client gets."""

from __future__ import annotations

import json

import pytest

from tests.fakes.http_client import OVERSIZED_TEXT, assert_stream_failure
from tests.fakes.lab import Lab, heard_in_time
from tests.fakes.scripted_worker import delta_text

pytestmark = pytest.mark.asyncio


async def test_response_complete_preserves_status_headers_body_and_token_counts_for_success(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model)
    job = await worker.job()
    body = '{ "odd" :  "spacing",\n "unicode": "grüße 🦙", "choices": [] }'
    headers = {"content-type": "application/json; charset=utf-8", "set-cookie": "a=b", "content-length": "3"}
    await worker.complete(job, status=201, headers=headers, body=body, tokens=(17, 4))
    got = await reply
    assert got.status == 201
    assert got.body.decode() == body
    assert got.headers["content-type"] == "application/json; charset=utf-8"
    assert "set-cookie" not in got.headers
    (record,) = await lab.final(model)
    assert record["status"] == "completed"
    assert (record["prompt_tokens"], record["completion_tokens"]) == (17, 4)
    assert record["tokens_estimated"] is False


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
async def test_response_complete_preserves_upstream_error_body_without_flattening_headers(lab: Lab, status: int) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model)
    job = await worker.job()
    body = json.dumps({"error": {"message": "the engine's own words", "type": "engine", "code": "E77"}})
    await worker.complete(job, status=status, headers={"content-type": "application/problem+json"}, body=body)
    got = await reply
    assert got.status == status
    assert got.body.decode() == body
    assert got.headers["content-type"] == "application/problem+json"
    assert len(worker.jobs) == 1


async def test_streaming_pass_through_preserves_chunk_order_done_termination_and_completion_metadata(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model, stream=True)
    job = await worker.job()
    assert job.frame["is_streaming"] is True
    sent = [delta_text(job, f"piece {number};") for number in range(200)]
    big = delta_text(job, "x" * 80_000)
    for text in [*sent, big, "data: [DONE]\n\n"]:
        await worker.chunk(job, text)
    await worker.complete(job, headers={"content-type": "text/event-stream"}, tokens=(5, 201))
    got = await reply
    assert got.status == 200
    assert got.whole
    assert got.headers["content-type"].startswith("text/event-stream")
    assert got.body.decode() == "".join([*sent, big, "data: [DONE]\n\n"])
    (record,) = await lab.final(model)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (5, 201)


@heard_in_time
async def test_oversized_stream_emits_sse_error_and_terminates_without_delivering_completion(hasty_lab: Lab) -> None:
    lab = hasty_lab
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model, stream=True)
    job = await worker.job()
    for number in range(10):
        await worker.chunk(job, delta_text(job, f"{number}" + "x" * 10_000))
    got = await reply
    assert_stream_failure(got, "FORWARDED_REQUEST_FAILED", OVERSIZED_TEXT)
    assert len(got.body) < 70_000
    await worker.cancelled(job)
    await worker.chunk(job, "data: [DONE]\n\n")
    await worker.complete(job, headers={"content-type": "text/event-stream"})
    again = lab.ask(model, "the slot is free")
    await worker.answer(await worker.job())
    assert (await again).status == 200
    records = await lab.final(model, 2)
    assert [record["status"] for record in records] == ["failed", "completed"]
