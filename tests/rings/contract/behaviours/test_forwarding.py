"""Rows 40 to 45 and 54 to 56: what travels from the client to the worker, and how streams come back."""

from __future__ import annotations

import json

import pytest

from tests.fakes.http_client import Reply, call
from tests.fakes.lab import Lab
from tests.fakes.scripted_worker import Job, ScriptedWorker, delta_text

pytestmark = pytest.mark.asyncio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
NOISE = {
    "user-agent": "contract-test/1",
    "cookie": "session=secret",
    "x-forwarded-for": "203.0.113.9",
    "accept-encoding": "gzip",
    "x-custom": "nope",
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


async def exchange(
    lab: Lab, path: str, *, stream: bool, headers: dict[str, str] | None = None
) -> tuple[Job, bytes, Reply, str]:
    """Send one request through a fresh worker; return what the worker saw, what was sent, the reply and the model."""
    model = await lab.model()
    worker = await lab.worker(model)
    body = body_for(path, model, stream=stream)
    reply = lab.spawn(lab.post(body, path=path, headers=lab.headers(headers)))
    job = await worker.job()
    if stream:
        await send_stream(worker, job, path)
    else:
        await worker.answer(job, "fine")
    return job, body, await reply, model


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


async def send_stream(worker: ScriptedWorker, job: Job, path: str) -> None:
    """Answer with the stream of one surface."""
    for text in STREAMS[path]:
        await worker.chunk(job, text)
    await worker.complete(job, headers={"content-type": "text/event-stream"})


def assert_same_body(job: Job, sent: bytes, *, stream: bool) -> None:
    """Check that the body travelled untouched; a stream may have been asked for its usage besides."""
    if not stream:
        assert job.frame["body"] == sent.decode()
        return
    got, want = json.loads(job.frame["body"]), json.loads(sent)
    got.pop("stream_options", None)
    assert got == want


async def check_boundary(lab: Lab, path: str) -> None:
    for stream in (False, True):
        job, body, reply, model = await exchange(lab, path, stream=stream)
        assert job.frame["endpoint_path"] == path
        assert job.frame["model"] == model
        assert job.frame["is_streaming"] is stream
        assert_same_body(job, body, stream=stream)
        assert reply.status == 200


async def check_envelope(lab: Lab, path: str, shown: dict[str, str], kept: dict[str, str]) -> None:
    job, body, reply, model = await exchange(lab, path, stream=False, headers={**NOISE, **shown})
    assert reply.status == 200
    headers = dict(job.frame.pop("headers"))
    request_id = headers.pop("x-request-id", None)
    assert request_id in (None, reply.request_id)
    assert headers == {"content-type": "application/json", **kept}
    assert lab.stack.ready.api_key not in json.dumps(job.frame)
    assert list(job.frame) == ["type", "request_id", "model", "endpoint_path", "is_streaming", "body"]
    assert job.frame == {
        "type": "request",
        "request_id": job.id,
        "model": model,
        "endpoint_path": path,
        "is_streaming": False,
        "body": body.decode(),
    }


async def check_stream(lab: Lab, path: str) -> None:
    _, _, reply, _ = await exchange(lab, path, stream=True)
    assert reply.status == 200
    assert reply.whole
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.headers["cache-control"] == "no-cache"
    assert reply.headers["x-accel-buffering"] == "no"
    assert "content-length" not in reply.headers
    assert "content-encoding" not in reply.headers
    assert reply.body.decode() == "".join(STREAMS[path])


async def test_openai_chat_completions_http_boundary_preserves_model_stream_flag_and_body(lab: Lab) -> None:
    await check_boundary(lab, CHAT)


async def test_openai_responses_http_boundary_preserves_model_stream_flag_and_body(lab: Lab) -> None:
    await check_boundary(lab, RESPONSES)


async def test_anthropic_messages_http_boundary_preserves_model_stream_flag_and_body(lab: Lab) -> None:
    await check_boundary(lab, MESSAGES)


async def test_openai_responses_worker_request_preserves_exact_envelope_and_compatibility_headers(lab: Lab) -> None:
    organization = {"openai-organization": "org-77"}
    await check_envelope(lab, RESPONSES, organization, organization)


async def test_openai_chat_completions_worker_request_preserves_exact_envelope_and_compatibility_headers(
    lab: Lab,
) -> None:
    organization = {"openai-organization": "org-77"}
    await check_envelope(lab, CHAT, organization, organization)


async def test_anthropic_messages_worker_request_preserves_exact_envelope_and_compatibility_headers(lab: Lab) -> None:
    kept = {"anthropic-version": "2023-06-01", "anthropic-beta": "tools-2026"}
    await check_envelope(lab, MESSAGES, {**kept, "x-api-key": "not-the-bearer"}, kept)


async def test_openai_streaming_http_boundary_preserves_sse_shape_and_done_marker(lab: Lab) -> None:
    await check_stream(lab, CHAT)


async def test_openai_responses_streaming_http_boundary_preserves_sse_shape_and_done_marker(lab: Lab) -> None:
    await check_stream(lab, RESPONSES)


async def test_anthropic_streaming_http_boundary_preserves_event_sse_shape(lab: Lab) -> None:
    await check_stream(lab, MESSAGES)


async def test_the_client_asked_for_no_usage_and_sees_no_usage_chunk(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.ask(model, stream=True)
    job = await worker.job()
    await worker.stream(job, ["a", "b"], tokens=(3, 2))
    got = await reply
    assert [json.loads(data)["choices"][0]["delta"]["content"] for data in got.events[:-1]] == ["a", "b"]
    assert delta_text(job, "a").encode() in got.body


async def test_health_is_public_and_says_that_the_gateway_is_up(lab: Lab) -> None:
    reply = await call("GET", lab.gateway.url + "/health")
    assert reply.status == 200
    assert reply.json["ok"] is True
    assert reply.json["service"] == "gateway"
    assert reply.json["time"].endswith("Z")
