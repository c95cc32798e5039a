"""What travels from a client to a worker and back: bodies, streams and errors, each error code of the contract over HTTP."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from typing import Any  # bodies are JSON

import pytest

from tests.fakes.http_client import (
    NO_WORKERS_TEXT,
    OVERSIZED_TEXT,
    Reply,
    assert_failure,
    assert_stream_failure,
    call,
    send_raw,
)
from tests.fakes.lab import CHAT, IMPATIENT, MESSAGES, PROBE_TOKENS, RESPONSES, Lab, bearer, chat_body, heard_in_time, unique
from tests.fakes.scripted_worker import Job, ScriptedWorker, delta_text
from tests.fakes.waiting import DEADLINE_S, eventually
from wire import frames
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.asyncio

NOISE = {
    "user-agent": "contract-test/1",
    "cookie": "session=secret",
    "x-forwarded-for": "203.0.113.9",
    "accept-encoding": "gzip",
    "x-custom": "nope",
}
KEPT = {
    CHAT: {"openai-organization": "org-77"},
    RESPONSES: {"openai-organization": "org-77"},
    MESSAGES: {"anthropic-version": "2023-06-01", "anthropic-beta": "tools-2026"},
}
"""The headers of clients that a worker gets to see, by path."""


STREAMS = {
    CHAT: ['data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n', "data: [DONE]\n\n"],
    RESPONSES: [
        'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n',
        'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"a"}\n\n',
        'event: response.completed\ndata: {"type":"response.completed"}\n\n',
        "data: [DONE]\n\n",
    ],
    MESSAGES: [
        'event: message_start\ndata: {"type":"message_start"}\n\n',
        'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n',
        'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ],
}


def body_for(path: str, model: str, *, stream: bool) -> bytes:
    """Return an oddly written body with fields that the gateway has never heard of."""
    content = {
        CHAT: '"messages": [ {"role":"user", "content": "grüße 🦙"} ]',
        RESPONSES: '"input": "grüße 🦙"',
        MESSAGES: '"max_tokens": 16, "messages": [ {"role":"user", "content": "grüße 🦙"} ]',
    }[path]
    flag = ', "stream": true' if stream else ""
    return f'{{ "model" : "{model}",\n {content}, "x_unknown": {{"deep": [1, 2.50, null]}}{flag} }}'.encode()


# what travels


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_worker_gets_the_body_as_it_was_sent_and_the_headers_that_are_meant_for_it(lab: Lab, path: str) -> None:
    """Rows 40 to 45."""
    model = await lab.model()
    worker = await lab.worker(model)
    body = body_for(path, model, stream=False)
    shown = {**NOISE, **KEPT[path]} | ({"x-api-key": "not-the-bearer"} if path == MESSAGES else {})
    asked = lab.spawn(lab.post(body, path=path, headers=lab.headers(shown)))
    job = await worker.job()
    await worker.answer(job, "fine")
    reply = await asked
    assert reply.status == 200
    headers = dict(job.frame.pop("headers"))
    assert headers.pop("x-request-id", None) in (None, reply.request_id)
    assert headers == {"content-type": "application/json", **KEPT[path]}
    assert lab.stack.ready.api_key not in json.dumps(job.frame)
    assert list(job.frame) == ["type", "request_id", "model", "endpoint_path", "is_streaming", "body"]
    due = {"type": "request", "request_id": job.id, "model": model, "endpoint_path": path, "is_streaming": False}
    assert job.frame == {**due, "body": body.decode()}


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
async def test_a_stream_of_any_surface_passes_as_the_worker_wrote_it(lab: Lab, path: str) -> None:
    """Rows 40 to 42, 54 to 56."""
    model = await lab.model()
    worker = await lab.worker(model)
    body = body_for(path, model, stream=True)
    asked = lab.spawn(lab.post(body, path=path))
    job = await worker.job()
    for text in STREAMS[path]:
        await worker.chunk(job, text)
    await worker.complete(job, headers={"content-type": "text/event-stream"})
    reply = await asked
    got = json.loads(job.frame["body"])
    got.pop("stream_options", None)  # a stream may have been asked for its usage besides
    assert (got, job.frame["endpoint_path"], job.frame["is_streaming"]) == (json.loads(body), path, True)
    assert (reply.status, reply.whole, reply.body.decode()) == (200, True, "".join(STREAMS[path]))
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert (reply.headers["cache-control"], reply.headers["x-accel-buffering"]) == ("no-cache", "no")
    assert not {"content-length", "content-encoding"} & set(reply.headers)


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


@pytest.mark.parametrize("where", ["plain", "in the completion", "in chunks"])
async def test_an_upstream_error_keeps_its_status_and_body_streamed_or_not(lab: Lab, where: str) -> None:
    """Row 37."""
    model = await lab.model()
    worker = await lab.worker(model)
    for number, status in enumerate((400, 429, 500), start=1):
        reply = lab.ask(model, stream=where != "plain")
        job = await worker.job()
        body = json.dumps({"error": {"message": "the engine's own words", "type": "engine", "param": None, "code": "E77"}})
        if where == "in chunks":
            await worker.chunk(job, body[:20])
            await worker.chunk(job, body[20:])
        kind = {"content-type": "application/problem+json" if where == "plain" else "application/json"}
        await worker.complete(job, status=status, headers=kind, body="" if where == "in chunks" else body)
        got = await reply
        assert (got.status, got.headers["content-type"], got.body.decode()) == (status, kind["content-type"], body)
        assert len(worker.jobs) == number


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


# error codes


async def test_a_missing_unknown_or_foreign_key_is_401_invalid_api_key(lab: Lab) -> None:
    ready = lab.stack.ready
    for shown in ("", "Bearer nonsense", mint_credential(CredentialKind.CLIENT).text, ready.admin_token, ready.worker_secret):
        headers = {"authorization": shown if " " in shown else f"Bearer {shown}"} if shown else {"accept": "*/*"}
        reply = await lab.post(chat_body("any"), headers=headers)
        assert_failure(reply, 401, "INVALID_API_KEY")
        assert not shown or shown not in reply.body.decode()


async def test_a_model_nobody_has_heard_of_is_404_and_one_not_allow_listed_is_400(lab: Lab) -> None:
    assert_failure(await lab.ask(unique("unheard-of")), 404, "MODEL_NOT_ALLOWED")
    declared = unique("declared")
    await lab.worker(declared)

    async def refused() -> bool:
        return (await lab.ask(declared)).status == 400

    await eventually(refused, what="the declared model is known")
    assert_failure(await lab.ask(declared), 400, "MODEL_NOT_ALLOWED")


async def test_a_model_that_was_taken_off_the_list_or_is_not_for_this_key_is_400(lab: Lab) -> None:
    model, other = await lab.model(), await lab.model()
    _, text = lab.operate("gateway.services.create_api_key", name=unique("key"), tenant_name="default", allowed_models=[other])
    headers = {**bearer(text), "content-type": "application/json"}

    async def usable() -> bool:
        body = chat_body(other, max_tokens=PROBE_TOKENS)
        return (await lab.post(body, headers=headers)).status == 400

    await eventually(usable, what="the new key works")
    assert_failure(await lab.post(chat_body(model), headers=headers), 400, "MODEL_NOT_ALLOWED")
    lab.operate("gateway.services.disallow_model", name=model)

    async def gone() -> bool:
        return not await lab.knows(model, lab.gateway)

    await eventually(gone, what="the model is off the list")
    assert_failure(await lab.ask(model), 400, "MODEL_NOT_ALLOWED")


async def test_caps_on_prompt_and_max_tokens_are_400_with_their_codes(lab: Lab) -> None:
    model = await lab.model(max_prompt_chars=500, max_tokens=10)
    prompt = await lab.ask(model, "x" * 501)
    assert_failure(prompt, 400, "PROMPT_TOO_LARGE")
    assert prompt.error["param"] == "messages"
    for field in ("max_tokens", "max_completion_tokens"):
        limits: dict[str, Any] = {field: 11}
        tokens = await lab.post(chat_body(model, "x", **limits))
        assert_failure(tokens, 400, "MAX_TOKENS_TOO_LARGE")
        assert tokens.error["param"] in {field, "max_tokens"}
    worker = await lab.worker(model)
    fits = lab.ask(model, "x" * 300, max_tokens=10)
    await worker.answer(await worker.job())
    assert (await fits).status == 200


async def test_the_rate_limit_of_a_key_is_429_with_retry_after_and_rate_limit_headers(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    _, text = lab.operate("gateway.services.create_api_key", name=unique("key"), tenant_name="default", requests_per_minute=2)
    headers = {**bearer(text), "content-type": "application/json"}

    async def send() -> Reply:
        task = lab.spawn(lab.post(chat_body(model), headers=headers))
        await worker.answer(await worker.job())
        return await task

    async def known() -> bool:
        listed = await call("GET", lab.gateway.url + "/admin/keys", headers=bearer(lab.stack.ready.admin_token))
        return text[:16] in [row["prefix"] for row in listed.json["keys"]]

    await eventually(known, what="the new key is listed")
    for left in (1, 0):
        reply = await send()
        assert reply.status == 200
        shown = reply.headers
        assert shown["x-ratelimit-limit-requests"] == "2"
        assert shown["x-ratelimit-remaining-requests"] == str(left)
        assert shown["x-ratelimit-reset-requests"]
    refused = await lab.post(chat_body(model), headers=headers)
    assert_failure(refused, 429, "RATE_LIMITED")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.headers["x-ratelimit-reset-requests"]
    other = lab.ask(model)
    await worker.answer(await worker.job())
    assert (await other).status == 200


async def test_a_body_that_cannot_be_used_an_unknown_route_and_a_wrong_method_are_json_errors(lab: Lab) -> None:
    for body in (b"", b"{", b'{"model":"\xff"}', b'{"model":1,"messages":[]}'):
        assert_failure(await lab.post(body), 400, "BAD_REQUEST")
    assert_failure(await lab.post(b"{}", path="/v1/nonsense"), 404, "NOT_FOUND")
    wrong = await call("GET", lab.gateway.url + CHAT, headers=lab.headers())
    assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "BAD_REQUEST", "POST")


async def test_a_body_over_the_limit_is_413_without_being_read_to_the_end(lab: Lab) -> None:
    length = 64 * 1024 * 1024
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {lab.stack.ready.api_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
    answer = await send_raw(lab.gateway.url, head.encode() + b"{" * 1000)
    assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "BODY_TOO_LARGE"


async def test_no_node_for_a_known_model_is_503_no_available_node_after_the_wait(hasty_lab: Lab) -> None:
    """Row 48."""
    model = await hasty_lab.model()
    for stream in (False, True):
        assert_failure(await hasty_lab.ask(model, stream=stream), 503, "NO_AVAILABLE_NODE", NO_WORKERS_TEXT)
    assert [record["error_code"] for record in await hasty_lab.final(model, 2)] == ["NO_AVAILABLE_NODE"] * 2


@pytest.mark.parametrize("action", ["cordon_node", "drain_node"])
async def test_only_draining_or_cordoned_nodes_is_503_node_draining(lab: Lab, action: str) -> None:
    model = await lab.model()
    name = unique("kept-back")
    worker = await lab.worker(model, name=name, max_concurrent=2)
    running = lab.ask(model, "running", stream=True)
    job = await worker.job()
    node = await lab.node(name)
    arguments = {} if action == "cordon_node" else {"reason": "maintenance", "timeout_s": 60}
    lab.operate(f"nodes.services.{action}", node_id={"$id": node["node_id"]}, **arguments)

    async def draining() -> bool:
        return bool((await lab.node(name))["status"] == "draining")

    await eventually(draining, what="the node is listed as draining")

    async def known_here() -> bool:
        row = await lab.listed_worker(name)
        return row is not None and row["is_draining"] is True

    await eventually(known_here, what="the gateway knows")
    assert_failure(await lab.ask(model, x_pool_options=IMPATIENT), 503, "NODE_DRAINING")
    await worker.stream(job, ["finished"])
    assert (await running).events[-1] == "[DONE]"


async def test_an_engine_that_fails_is_502_forwarded_request_failed(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    reply = lab.ask(model)
    stream = await box.stream()
    await box.end(stream, frames.End(error="engine_failed", message="CUDA out of memory at 0xdead", retryable=False))
    failed = await reply
    assert_failure(failed, 502, "FORWARDED_REQUEST_FAILED")
    assert "0xdead" not in failed.body.decode()
    (record,) = await lab.final(model)
    assert (record["status"], record["error_code"]) == ("failed", "FORWARDED_REQUEST_FAILED")


@heard_in_time
async def test_a_request_that_runs_too_long_is_504_or_one_error_event_and_the_worker_is_told(hasty_lab: Lab) -> None:
    lab = hasty_lab
    model = await lab.model()
    worker = await lab.worker(model, max_concurrent=2)
    plain = lab.ask(model)
    waited = await worker.job()
    streamed = lab.ask(model, stream=True)
    begun = await worker.job()
    await worker.chunk(begun, delta_text(begun, "a"))
    assert_failure(await plain, 504, "REQUEST_TIMEOUT")
    assert_stream_failure(await streamed, "REQUEST_TIMEOUT")
    for job in (waited, begun):
        assert (await worker.cancelled(job))["reason"] == "timeout"
        assert len(worker.cancels(job)) == 1
    assert (await lab.ask_through(worker, model)).status == 200
