"""Every error code of the contract, provoked over HTTP: status, body and headers."""

from __future__ import annotations

import json
from typing import Any  # bodies are JSON

import pytest

from tests.fakes import http_client
from tests.fakes.http_client import Reply, assert_failure, call, send_raw
from tests.fakes.lab import CHAT, IMPATIENT, PROBE_TOKENS, Lab, bearer, chat_body, heard_in_time, unique
from tests.fakes.waiting import eventually
from wire import frames
from wire.credentials import CredentialKind, mint_credential

pytestmark = pytest.mark.asyncio


KEYS = [None, "Bearer", "Basic abc", "Bearer nonsense", "unknown", "admin", "worker"]


@pytest.mark.parametrize("authorization", KEYS)
async def test_a_missing_malformed_unknown_or_foreign_key_is_401_invalid_api_key(lab: Lab, authorization: str | None) -> None:
    ready = lab.stack.ready
    known = {
        "unknown": f"Bearer {mint_credential(CredentialKind.CLIENT).text}",
        "admin": f"Bearer {ready.admin_token}",
        "worker": f"Bearer {ready.worker_secret}",
    }
    headers = {} if authorization is None else {"authorization": known.get(authorization, authorization)}
    reply = await lab.post(chat_body("any"), headers=headers or {"accept": "*/*"})
    assert_failure(reply, 401, "INVALID_API_KEY")
    assert ready.admin_token not in reply.body.decode()
    assert ready.worker_secret not in reply.body.decode()


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


BAD_BODIES = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"model":"\xff"}',
    "a list": b"[]",
    "no model": b'{"messages":[]}',
    "model is a number": b'{"model":1,"messages":[]}',
    "no messages": b'{"model":"MODEL"}',
    "messages is text": b'{"model":"MODEL","messages":"hi"}',
    "stream is text": b'{"model":"MODEL","messages":[],"stream":"yes"}',
    "negative max_tokens": b'{"model":"MODEL","messages":[],"max_tokens":-1}',
}


@pytest.mark.parametrize("name", BAD_BODIES)
async def test_a_body_that_cannot_be_used_is_400_bad_request(lab: Lab, name: str) -> None:
    model = await lab.model()
    assert_failure(await lab.post(BAD_BODIES[name].replace(b"MODEL", model.encode())), 400, "BAD_REQUEST")


async def test_unknown_routes_and_wrong_methods_are_json_too(lab: Lab) -> None:
    assert_failure(await lab.post(b"{}", path="/v1/nonsense"), 404, "NOT_FOUND")
    wrong = await call("GET", lab.gateway.url + CHAT, headers=lab.headers())
    assert wrong.status == 405
    assert wrong.error["code"] == "BAD_REQUEST"
    assert wrong.headers["allow"] == "POST"


async def test_a_body_over_the_limit_is_413_without_being_read_to_the_end(lab: Lab) -> None:
    length = 64 * 1024 * 1024
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {lab.stack.ready.api_key}\r\n"
        f"content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    )
    answer = await send_raw(lab.gateway.url, head.encode() + b"{" * 1000)
    assert answer.startswith(b"HTTP/1.1 413 "), answer[:200]
    assert json.loads(answer.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "BODY_TOO_LARGE"


START = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"


@pytest.mark.parametrize(
    "data",
    [
        b"NONSENSE\r\n\r\n",
        START + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        START + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello!",
        START + b"content-length: -1\r\n\r\n",
    ],
    ids=["no HTTP", "length and chunked", "two lengths", "negative length"],
)
async def test_malformed_http_is_refused_and_the_gateway_goes_on(lab: Lab, data: bytes) -> None:
    answer = await send_raw(lab.gateway.url, data)
    assert not answer.startswith(b"HTTP/1.1 2"), answer[:200]
    assert (await call("GET", lab.gateway.url + "/health")).status == 200


async def test_no_node_for_a_known_model_is_503_no_available_node_after_the_wait(hasty_lab: Lab) -> None:
    lab = hasty_lab
    assert_failure(await lab.ask(await lab.model()), 503, "NO_AVAILABLE_NODE", http_client.NO_WORKERS_TEXT)


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
async def test_a_request_that_runs_too_long_is_504_and_the_worker_is_told(hasty_lab: Lab) -> None:
    lab = hasty_lab
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model)
    job = await worker.job()
    assert_failure(await reply, 504, "REQUEST_TIMEOUT")
    assert (await worker.cancelled(job))["reason"] == "timeout"
    assert len(worker.cancels(job)) == 1
    again = lab.ask(model, "next")
    await worker.answer(await worker.job())
    assert (await again).status == 200


@heard_in_time
async def test_a_stream_that_runs_too_long_ends_with_one_error_event(hasty_lab: Lab) -> None:
    lab = hasty_lab
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model, stream=True)
    job = await worker.job()
    await worker.chunk(job, 'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
    http_client.assert_stream_failure(await reply, "REQUEST_TIMEOUT")
    assert (await worker.cancelled(job))["reason"] == "timeout"
