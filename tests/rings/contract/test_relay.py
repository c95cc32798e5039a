"""The relay under unkind clients and workers."""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import httpx
import pytest

from tests.fakes.http_client import assert_stream_failure, iterate, send_raw
from tests.fakes.lab import Lab, chat_body
from tests.fakes.scripted_worker import Job, ScriptedWorker, delta_text
from tests.fakes.waiting import DEADLINE_S, eventually

pytestmark = pytest.mark.asyncio


async def flood(worker: ScriptedWorker, job: Job, total: int) -> None:
    """Send far more than every buffer on the way holds."""
    piece = delta_text(job, "x" * 60_000)
    for _ in range(total // len(piece)):
        await worker.chunk(job, piece)


async def test_a_client_that_does_not_read_is_closed_and_other_streams_on_the_worker_go_on(narrow_lab: Lab) -> None:
    # A machine that stands still for a second looks like a stream that is held up for it: once, not every time.
    rounds = [await go_on_beside_a_slow_client(narrow_lab)]
    while rounds[-1] < 2:
        assert len(rounds) < 5, rounds
        rounds.append(await go_on_beside_a_slow_client(narrow_lab))


async def go_on_beside_a_slow_client(lab: Lab) -> int:
    """Return how many pieces a stream passed on until the client of another one on the same worker was given up."""
    model = await lab.model()
    worker = await lab.worker(model, max_concurrent=2)
    slow = await lab.open(model, "slow", receive_buffer=4096)
    stuck = await worker.job()
    good = await lab.open(model, "good")
    live = await worker.job()
    flooding = asyncio.create_task(flood(worker, stuck, 40 * 1024 * 1024))
    number = 0
    while not worker.cancels(stuck):
        text = f"good {number};"
        await worker.chunk(live, delta_text(live, text))
        await good.until(text.encode())
        number += 1
        assert number < 100_000
    flooding.cancel()
    await asyncio.gather(flooding, return_exceptions=True)
    await slow.closed_by_peer(within_s=DEADLINE_S)
    await worker.stream(live, ["end"])
    assert (await good.finish()).events[-1] == "[DONE]"
    records = await lab.final(model, 2)
    assert {record["status"] for record in records} == {"cancelled", "completed"}
    again = lab.ask(model, "the slot is free")
    await worker.answer(await worker.job())
    assert (await again).status == 200
    return number


async def test_many_streams_on_one_worker_keep_their_order_and_never_mix(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model, max_concurrent=32)
    replies = {f"caller {number}": lab.ask(model, f"caller {number}", stream=True) for number in range(32)}
    jobs = [await worker.job() for _ in replies]
    for round_number in range(20):
        for job in jobs:
            await worker.chunk(job, delta_text(job, f"{job.text}:{round_number}"))
    for job in jobs:
        await worker.chunk(job, "data: [DONE]\n\n")
        await worker.complete(job, headers={"content-type": "text/event-stream"})
    for text, task in replies.items():
        events = (await task).events
        contents = [json.loads(data)["choices"][0]["delta"]["content"] for data in events[:-1]]
        assert contents == [f"{text}:{number}" for number in range(20)]
        assert events[-1] == "[DONE]"


@pytest.mark.parametrize("status", [400, 429, 500])
@pytest.mark.parametrize("through_chunks", [False, True], ids=["in the completion", "in chunks"])
async def test_an_upstream_error_on_a_stream_keeps_its_status_and_body(lab: Lab, status: int, through_chunks: bool) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model, stream=True)
    job = await worker.job()
    body = json.dumps({"error": {"message": "no such adapter", "type": "engine", "param": None, "code": None}})
    if through_chunks:
        await worker.chunk(job, body[:20])
        await worker.chunk(job, body[20:])
    await worker.complete(job, status=status, body="" if through_chunks else body)
    got = await reply
    assert got.status == status
    assert got.headers["content-type"] == "application/json"
    assert got.body.decode() == body


async def test_each_chunk_reaches_the_client_at_once_and_is_not_held_for_the_next(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    exchange = await lab.open(model)
    job = await worker.job()
    delays: list[float] = []

    async def is_prompt() -> bool:
        """Return whether a fifth of the next pieces took less than what waiting for the next one would cost each of them.

        Nagle with delayed acknowledgements would show as 40 ms on every piece but the first, a busy machine on some.
        """
        delays.clear()
        for number in range(20):
            text = f"piece {number};"
            exchange.body.clear()
            started = time.perf_counter()
            await worker.chunk(job, delta_text(job, text))
            await exchange.until(text.encode())
            delays.append(time.perf_counter() - started)
        return statistics.quantiles(delays, n=5)[0] < 0.030

    await eventually(is_prompt, what="pieces arrive at once")
    await worker.stream(job, [])
    assert (await exchange.finish()).whole


async def test_a_body_of_20_mb_is_accepted_and_arrives_whole(lab: Lab) -> None:
    model = await lab.model(max_prompt_chars=30_000_000)
    worker = await lab.worker(model)
    image = "data:image/png;base64," + "QUJD" * (5 * 1024 * 1024)
    content = [{"type": "text", "text": "what is this?"}, {"type": "image_url", "image_url": {"url": image}}]
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": content}]}).encode()
    assert len(body) > 20_000_000
    reply = lab.spawn(lab.post(body, within_s=90))
    job = await worker.job(within_s=60)
    assert job.frame["body"].encode() == body
    await worker.answer(job)
    assert (await reply).status == 200


async def test_a_cancel_never_overtakes_its_request(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model, max_concurrent=64)
    for number in range(30):
        exchange = await lab.open(model, f"hit and run {number}", stream=False)
        exchange.leave()
    last = lab.ask(model, "last")
    await eventually(lambda: any(job.text == "last" for job in worker.jobs), what="the last request arrived")
    await worker.answer(next(job for job in worker.jobs if job.text == "last"))
    assert (await last).status == 200

    async def settled() -> bool:
        records = await lab.records(model)
        return not any(record["status"] in {"queued", "assigned", "running"} for record in records)

    await eventually(settled, what="every record is final")

    def is_each_cancelled() -> bool:
        started = {job.id for job in worker.jobs if job.text != "last"}
        return {frame["request_id"] for frame in worker.of_kind("cancel")} == started

    await eventually(is_each_cancelled, what="each one that reached the worker was cancelled")
    seen: set[str] = set()
    for frame in worker.frames:
        if frame["type"] == "request":
            seen.add(frame["request_id"])
        if frame["type"] == "cancel":
            assert frame["request_id"] in seen


@pytest.mark.parametrize("where", ["queued", "plain", "streamed"])
async def test_a_slot_is_usable_again_as_soon_as_its_client_has_left(lab: Lab, where: str) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    leaving = await lab.open(model, "leaving", stream=where == "streamed")
    job = await worker.job()
    waiting = lab.ask(model, "waiting")
    await lab.queued(1)
    if where == "streamed":
        await worker.chunk(job, delta_text(job, "begun"))
        await leaving.until(b"begun")
    if where == "queued":
        second = await lab.open(model, "leaving too", stream=False)
        await lab.queued(2)
        second.leave()
        await lab.queued(1)
    leaving.leave()
    await worker.cancelled(job)
    # The worker says nothing about the cancelled request, as the real one does.
    following = await worker.job()
    assert following.text == "waiting"
    await worker.answer(following)
    assert (await waiting).status == 200


async def test_a_worker_that_names_a_request_of_another_is_closed_and_hurts_nobody(lab: Lab) -> None:
    model = await lab.model()
    victim = await lab.worker(model)
    reply = lab.ask(model, "mine", stream=True)
    job = await victim.job()
    hostile = await lab.worker(await lab.model())
    await hostile.chunk(job, delta_text(job, "FORGED"))
    assert (await hostile.closed())[0] == 1002
    other = await lab.worker(await lab.model())
    await other.complete(job, body='{"forged": true}')
    assert (await other.closed())[0] == 1002
    await victim.stream(job, ["genuine"])
    got = await reply
    assert b"FORGED" not in got.body
    assert got.events[-1] == "[DONE]"


@pytest.mark.parametrize(
    "data",
    ["nonsense", '{"type":"surprise"}', '{"no":"type"}', "[]", b"binary"],
    ids=["no JSON", "unknown type", "no type", "a list", "binary"],
)
async def test_a_frame_outside_the_protocol_closes_the_socket_with_1002(lab: Lab, data: str | bytes) -> None:
    worker = await lab.worker(await lab.model())
    await worker.socket.send(data)
    assert (await worker.closed())[0] == 1002


async def test_worker_loss_after_the_first_byte_is_one_error_event_and_no_done(lab: Lab) -> None:
    model = await lab.model()
    dying = await lab.worker(model)
    standby_model_reply = await lab.open(model, "stream")
    job = await dying.job()
    standby = await lab.worker(model)
    await dying.chunk(job, delta_text(job, "begun"))
    await standby_model_reply.until(b"begun")
    dying.die()
    got = await standby_model_reply.finish()
    assert_stream_failure(got, "REQUEST_INTERRUPTED")
    assert got.body.count(b"begun") == 1
    (record,) = await lab.final(model)
    assert (record["status"], record["error_code"], record["attempts"]) == ("interrupted", "REQUEST_INTERRUPTED", 1)
    assert not standby.jobs


@pytest.mark.parametrize("dials_in_as", ["bridge worker", "box"])
async def test_a_node_that_is_lost_behind_its_closing_event_has_answered(lab: Lab, dials_in_as: str) -> None:
    model = await lab.model()
    if dials_in_as == "box":
        box = await lab.box(model)
        reply = await lab.open(model, "stream")
        stream = await box.stream()
        await box.head(stream, content_type="text/event-stream")
        await box.data(stream, b'data: {"choices":[{"index":0,"delta":{"content":"whole"}}]}\n\n')
        await reply.until(b"whole")
        await box.data(stream, b"data: [DONE]\n\n")
        await box.close()
    else:
        worker = await lab.worker(model)
        reply = await lab.open(model, "stream")
        job = await worker.job()
        await worker.chunk(job, delta_text(job, "whole"))
        await reply.until(b"whole")
        await worker.chunk(job, "data: [DONE]\n\n")
        await worker.close()
    got = await reply.finish()
    assert (got.events.count("[DONE]"), got.events[-1], got.whole) == (1, "[DONE]", True)
    (record,) = await lab.final(model)
    assert (record["status"], record["error_code"], record["attempts"]) == ("completed", None, 1)


async def test_several_requests_travel_over_one_kept_alive_connection(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    headers = lab.headers()
    async with httpx.AsyncClient(base_url=lab.gateway.url, headers=headers, trust_env=False, timeout=DEADLINE_S) as client:
        for number in range(3):
            task = asyncio.create_task(client.post("/v1/chat/completions", content=chat_body(model, f"{number}")))
            await worker.answer(await worker.job())
            assert (await task).status_code == 200


async def test_a_stream_is_delivered_piece_by_piece_as_whole_events(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    exchange = await lab.open(model)
    job = await worker.job()
    events = [delta_text(job, f"piece {number}") for number in range(10)]
    got = iterate(exchange)
    for text in events:
        await worker.chunk(job, text)
        assert await anext(got) == text.encode()
    await worker.stream(job, [])
    assert (await exchange.finish()).events[-1] == "[DONE]"


@pytest.mark.parametrize("sent", ["half a head", "half a body"])
async def test_a_client_that_never_finishes_its_request_is_closed(narrow_lab: Lab, sent: str) -> None:
    lab = narrow_lab
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {lab.stack.ready.api_key}\r\n"
    if sent == "half a body":
        head += "content-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    async with asyncio.timeout(DEADLINE_S):
        answer = await send_raw(lab.gateway.url, head.encode(), within_s=60)
    assert not answer.startswith(b"HTTP/1.1 2"), answer
