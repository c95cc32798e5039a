"""The measurable targets against ModelRelay, with bounds wide enough for a loaded machine and too tight for polling."""

from __future__ import annotations

import asyncio
import json
import statistics
import time

import psycopg
import pytest

from tests.fakes.http_client import Reply, assert_failure
from tests.fakes.lab import Lab, bearer, chat_body, unique
from tests.fakes.scripted_worker import delta_text
from tests.fakes.stack import Gateway
from tests.fakes.waiting import eventually
from wire.bridge import ReplicaInfo

pytestmark = pytest.mark.asyncio


async def test_a_worker_that_joins_gets_the_waiting_request_at_once(lab: Lab) -> None:
    model = await lab.model()
    reply = lab.ask(model, "waiting")
    await lab.queued(1)
    worker = await lab.worker(model)
    job = await worker.job()
    await worker.answer(job)
    assert (await reply).status == 200


async def test_a_request_of_a_dead_worker_runs_elsewhere_at_once(lab: Lab) -> None:
    model = await lab.model()
    dying, standby = await lab.worker(model), await lab.worker(model)
    reply = lab.ask(model)
    worker = await lab.first_with_job([dying, standby])
    other = standby if worker is dying else dying
    worker.die()
    job = await other.job()
    await other.answer(job)
    assert (await reply).status == 200


async def test_dispatch_to_a_free_slot_is_event_driven(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    delays, refusals, commits = [], [], []
    async with await psycopg.AsyncConnection.connect(lab.stack.ready.database_url, autocommit=True) as database:
        for _ in range(25):
            started = time.perf_counter()
            assert (await lab.post(chat_body("nobody"))).status == 404
            refusals.append(time.perf_counter() - started)
            started = time.perf_counter()
            await database.execute("SELECT pg_logical_emit_message(true, 'tests', '')")  # something that a commit has to flush
            commits.append(time.perf_counter() - started)
            started = time.perf_counter()
            reply = lab.spawn(lab.post(chat_body(model)))
            job = await worker.job()
            delays.append(time.perf_counter() - started)
            await worker.answer(job)
            await reply
    # Connecting, the durable record and both sides of the loopback are included; a 25 ms poll alone would add 12. A refusal
    # comes the same way and is dispatched nowhere, and a transaction of ours waits for the same disk: they say how busy it is.
    usual = statistics.median(refusals) + statistics.median(commits)
    assert statistics.median(delays) < 0.050 + 4 * usual, (delays, refusals, commits)


async def test_a_finish_dispatches_the_next_in_line_at_once(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    replies = [lab.ask(model, f"{number}") for number in range(10)]
    delays = []
    job = await worker.job()
    await lab.queued(9)
    for _ in range(9):
        await worker.answer(job)
        await replies[int(job.text)]  # the finish has been heard, however busy the machine is
        started = time.perf_counter()
        job = await worker.job()
        delays.append(time.perf_counter() - started)
    await worker.answer(job)
    assert {(await reply).status for reply in replies} == {200}
    assert statistics.median(delays) < 0.050, delays


async def test_newcomers_do_not_pass_the_queue(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    first = lab.ask(model, "first")
    job = await worker.job()
    second = lab.ask(model, "second")
    await lab.queued(1)
    third = asyncio.gather(lab.ask(model, "third"), lab.ask(model, "fourth"))
    await lab.queued(3)
    for _ in range(4):
        await worker.answer(job)
        if len(worker.jobs) < 4 or job is not worker.jobs[3]:
            job = await worker.job()
    assert [found.text for found in worker.jobs[:2]] == ["first", "second"]
    await asyncio.gather(first, second, third)


async def test_an_unknown_model_is_refused_without_queueing(lab: Lab) -> None:
    model = unique("unheard-of")
    reply = await lab.post(chat_body(model), within_s=8)  # less than a request waits for a node
    assert_failure(reply, 404, "MODEL_NOT_ALLOWED")
    assert await lab.queue_depth(model=model) == 0


@pytest.mark.parametrize("kind", ["api_key", "admin_token"])
async def test_a_client_key_or_admin_token_can_never_connect_a_worker(lab: Lab, kind: str, second_address: str) -> None:
    credential = getattr(lab.stack.ready, kind)
    for header, query in ((credential, None), (None, credential)):
        worker = await lab.dial(secret=header, query_secret=query, local_host=second_address)
        code, reason = await worker.closed()
        assert code == 1008
        assert "authentication" in reason
        assert not worker.frames
    # A success ends the run of failures of that address.
    await lab.dial(secret=lab.secret, local_host=second_address)


async def test_a_client_at_one_gateway_uses_a_worker_at_another(lab: Lab, pair: tuple[Gateway, Gateway]) -> None:
    here, there = pair
    model = await lab.model(here, there)
    worker = await lab.worker(model, gateway=there)
    reply = lab.ask(model, "across", gateway=here)
    job = await worker.job()
    assert job.text == "across"
    usage = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    await worker.complete(job, body=json.dumps({"answer": "from the other side", "usage": usage}))
    assert (await reply).json["answer"] == "from the other side"
    (record,) = await lab.final(model)
    assert (record["status"], record["attempts"]) == ("completed", 1)
    assert (record["prompt_tokens"], record["completion_tokens"]) == (4, 5)


async def test_streams_and_cancels_cross_gateways(lab: Lab, pair: tuple[Gateway, Gateway]) -> None:
    here, there = pair
    model = await lab.model(here, there)
    worker = await lab.worker(model, gateway=there)
    exchange = await lab.open(model, gateway=here)
    job = await worker.job()
    for number in range(20):
        text = f"piece {number};"
        await worker.chunk(job, delta_text(job, text))
        await exchange.until(text.encode())
    exchange.leave()
    await worker.cancelled(job)
    following = lab.ask(model, "next", gateway=here, stream=True)
    await worker.stream(await worker.job(), ["whole"])
    assert (await following).events[-1] == "[DONE]"
    records = await lab.final(model, 2)
    assert [record["status"] for record in records] == ["cancelled", "completed"]


async def test_capacity_is_shared_between_gateways(lab: Lab, pair: tuple[Gateway, Gateway]) -> None:
    here, there = pair
    model = await lab.model(here, there)
    worker = await lab.worker(model, gateway=there)
    first = lab.ask(model, "first", gateway=there)
    job = await worker.job()
    second = lab.ask(model, "second", gateway=here)

    async def waits() -> bool:
        return await lab.queue_depth(here) + await lab.queue_depth(there) == 1

    await eventually(waits, what="the second request waits")
    assert len(worker.jobs) == 1
    await worker.answer(job)
    await worker.answer(await worker.job())
    assert [(await first).status, (await second).status] == [200, 200]


async def test_paths_files_and_priority_cross_gateways(lab: Lab, pair: tuple[Gateway, Gateway]) -> None:
    here, there = pair
    model = await lab.model(here, there)
    paths = ["/v1/audio/transcriptions", "/v1/embeddings"]
    replica = ReplicaInfo(model=model, state="loaded", endpoints=paths)
    box = await lab.box(model, gateway=there, replicas=[replica])
    made = await lab.admin("POST", "/admin/keys", body={"name": "urgent", "priority": "high"})
    key = bearer(made.json["secret"])

    async def refused_chat() -> Reply | None:
        reply = await lab.post(chat_body(model), gateway=here)
        return reply if reply.status == 400 else None

    refusal = await eventually(refused_chat, what="the other gateway knows the paths")
    assert refusal.error["message"].endswith("it answers /v1/audio/transcriptions, /v1/embeddings.")

    sound = b"\xff\xfe\x00" * 1000
    form = (
        b'--edge\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + sound + b"\r\n--edge\r\n"
        b'Content-Disposition: form-data; name="model"\r\n\r\n' + model.encode() + b"\r\n--edge--\r\n"
    )
    headers = {**key, "content-type": "multipart/form-data; boundary=edge", "x-cache-mode": "none"}
    reply = lab.spawn(lab.post(form, path=paths[0], gateway=here, headers=headers))
    stream = await box.stream()
    assert bytes(stream.body) == form
    assert (stream.meta.tenant, stream.meta.priority, stream.meta.path) == ("default", "high", paths[0])
    assert stream.meta.headers["x-cache-mode"] == "none"
    await box.answer(stream, b'{"text":"hi"}')
    assert (await reply).body == b'{"text":"hi"}'
