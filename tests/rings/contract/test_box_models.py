"""What a box has loaded decides what the gateway offers and where it routes: models, API paths, files, tenants, caches."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import pytest

from tests.fakes.http_client import assert_failure, call
from tests.fakes.lab import CHAT, IMPATIENT, Lab, bearer, chat_body, unique
from tests.fakes.waiting import eventually
from wire.bridge import MemoryInfo, ModelsUpdate, ReplicaInfo, Telemetry

pytestmark = pytest.mark.asyncio

AUDIO, TRANSLATE, IMAGES = "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/images/generations"
EMBED, COMPLETE = "/v1/embeddings", "/v1/completions"


def loaded(model: str, *endpoints: str) -> ReplicaInfo:
    return ReplicaInfo(model=model, state="loaded", engine="scripted", endpoints=list(endpoints))


async def lists(lab: Lab, model: str) -> bool:
    """Return whether ``GET /v1/models`` has the model."""
    reply = await call("GET", lab.gateway.url + "/v1/models")
    return any(row["id"] == model for row in reply.json["data"])


def recording(model: str, sound: bytes, *, edge: str = "edge-7MA4YWxk", stream: bool = False) -> tuple[bytes, str]:
    """Return a transcription request as SDKs send it, and its content type."""
    head = f'--{edge}\r\nContent-Disposition: form-data; name="'
    parts = [
        f'{head}file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'.encode() + sound,
        f'{head}model"\r\n\r\n{model}'.encode(),
        f'{head}stream"\r\n\r\n{str(stream).lower()}'.encode(),
    ]
    return b"\r\n".join([*parts, f"--{edge}--\r\n".encode()]), f"multipart/form-data; boundary={edge}"


# loading and unloading


async def test_a_load_is_offered_and_routed_as_soon_as_the_box_says_so(lab: Lab) -> None:
    first, second = await lab.model(), await lab.model()
    box = await lab.box(first, max_concurrent=2)
    assert not await lists(lab, second)

    running = lab.ask(first)
    stream = await box.stream()
    await box.send(Telemetry(replicas=[loaded(first), loaded(second, EMBED)]))
    await box.send(ModelsUpdate(models=[first, second]))
    await box.answer(stream, b"{}")
    assert (await running).status == 200
    assert await lists(lab, second), "what the box said before its answer has been heard"

    reply = lab.spawn(lab.post(json.dumps({"model": second, "input": "x"}).encode(), path=EMBED))
    stream = await box.stream()
    assert (stream.meta.model, stream.meta.path) == (second, EMBED)
    await box.answer(stream, b'{"data":[]}', usage=(3, 0))
    assert (await reply).status == 200


async def test_an_unloaded_model_is_not_offered_and_what_runs_finishes(lab: Lab) -> None:
    kept, gone = await lab.model(), await lab.model()
    box = await lab.box(kept, gone, max_concurrent=2)
    running = lab.ask(gone)
    stream = await box.stream()
    other = lab.ask(kept)
    beside = await box.stream()

    await box.send(ModelsUpdate(models=[kept], current_load=1))
    await box.answer(beside, b"{}")
    assert (await other).status == 200
    assert not await lists(lab, gone), "what the box said before its answer has been heard"
    refused = await lab.ask(gone, x_pool_options=IMPATIENT)
    assert_failure(refused, 503, "NO_AVAILABLE_NODE")

    await box.answer(stream, b'{"finished":true}')
    assert (await running).body == b'{"finished":true}'
    reply = lab.ask(kept)
    await box.answer(await box.stream(), b"{}")
    assert (await reply).status == 200


async def test_a_request_waits_for_a_model_that_is_being_loaded(lab: Lab) -> None:
    first, second = await lab.model(), await lab.model()
    box = await lab.box(first)
    await box.send(Telemetry(replicas=[loaded(first), ReplicaInfo(model=second, state="loading", progress=0.4)]))
    waiting = lab.ask(second)
    await lab.queued(1)
    await box.send(ModelsUpdate(models=[first, second]))
    await box.answer(await box.stream(), b'{"late":true}')
    assert (await waiting).body == b'{"late":true}'


# API paths


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (EMBED, {"input": ["a", "b"]}),
        (COMPLETE, {"prompt": "once"}),
        (IMAGES, {"prompt": "a llama", "size": "512x512"}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_every_json_surface_reaches_a_box_that_answers_it(lab: Lab, path: str, body: dict[str, Any]) -> None:
    model = await lab.model()
    chat = await lab.box(model)
    box = await lab.box(model, replicas=[loaded(model, path)])
    sent = json.dumps({"model": model, **body}).encode()
    for _ in range(3):
        reply = lab.spawn(lab.post(sent, path=path))
        stream = await box.stream()
        assert (stream.meta.path, bytes(stream.body)) == (path, sent)
        await box.answer(stream, b'{"ok":1}')
        assert (await reply).body == b'{"ok":1}'
    assert chat.streams == []
    assert {row["endpoint"] for row in await lab.final(model, 3)} == {path}


async def test_a_path_that_no_box_answers_is_refused_at_once_with_those_that_are(lab: Lab) -> None:
    model = await lab.model()
    await lab.box(model, replicas=[loaded(model, CHAT, COMPLETE)])
    made = await lab.admin("POST", "/admin/keys", body={"name": "k"})  # the refusals of one key are not all written down
    headers = {**bearer(made.json["secret"]), "content-type": "application/json"}
    reply = await lab.post(json.dumps({"model": model, "input": "x"}).encode(), path=EMBED, headers=headers)
    assert_failure(reply, 400, "BAD_REQUEST")
    assert reply.error["param"] == "model"
    assert reply.error["message"] == f"The model '{model}' does not answer {EMBED}; it answers {CHAT}, {COMPLETE}."

    body, content_type = recording(model, b"RIFF")
    refused = await lab.post(body, path=AUDIO, headers={**headers, "content-type": content_type})
    assert (refused.status, refused.error["param"]) == (400, "model")
    rows = await lab.final(model, 2)
    columns = ("status", "error_code", "node_id", "queue_ms", "latency_ms")
    assert {tuple(row[name] for name in columns) for row in rows} == {("rejected", "BAD_REQUEST", None, None, 0)}


async def test_the_refusal_has_the_shape_of_the_callers_dialect(lab: Lab) -> None:
    model = await lab.model()
    await lab.box(model, replicas=[loaded(model, EMBED)])
    body = json.dumps({"model": model, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}).encode()
    reply = await lab.post(body, path="/v1/messages", headers=lab.headers({"anthropic-version": "2023-06-01"}))
    assert (reply.status, reply.json["type"], reply.error["type"]) == (400, "error", "invalid_request_error")
    assert "does not answer /v1/messages" in reply.error["message"]


async def test_paths_follow_telemetry_too(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    sent = json.dumps({"model": model, "input": "x"}).encode()
    assert (await lab.post(sent, path=EMBED)).status == 400
    await box.send(Telemetry(replicas=[loaded(model, CHAT, EMBED)]))
    reply = await eventually(lambda: _answered(lab, box, sent), what="embeddings are answered")
    assert reply.status == 200


async def _answered(lab: Lab, box: Any, sent: bytes) -> Any:
    reply = asyncio.ensure_future(lab.post(sent, path=EMBED))
    while not reply.done() and len(box.streams) == 0:
        await asyncio.sleep(0.005)
    if box.streams:
        await box.answer(await box.stream(), b"{}")
    got = await reply
    return got if got.status == 200 else None


# files


@pytest.mark.parametrize("path", [AUDIO, TRANSLATE])
async def test_a_recording_travels_byte_for_byte(lab: Lab, path: str) -> None:
    model = await lab.model()
    box = await lab.box(model, replicas=[loaded(model, AUDIO, TRANSLATE)])
    body, content_type = recording(model, os.urandom(3_000_000))
    reply = lab.spawn(lab.post(body, path=path, headers=lab.headers({"content-type": content_type})))
    stream = await box.stream()
    assert bytes(stream.body) == body
    assert (stream.meta.model, stream.meta.path, stream.meta.is_streaming) == (model, path, False)
    assert stream.meta.headers["content-type"] == content_type
    await box.head(stream, content_type="text/plain; charset=utf-8")
    await box.data(stream, "Grüß Gott.\n".encode())
    await box.end(stream)
    got = await reply
    assert (got.status, got.body.decode()) == (200, "Grüß Gott.\n")
    (record,) = await lab.final(model)
    assert (record["endpoint"], record["prompt_tokens_est"], record["status"]) == (path, 0, "completed")


async def test_a_recording_larger_than_a_json_body_may_be_is_taken(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, replicas=[loaded(model, AUDIO)])
    body, content_type = recording(model, bytes(40 * 1024 * 1024))
    reply = lab.spawn(lab.post(body, path=AUDIO, headers=lab.headers({"content-type": content_type}), within_s=90))
    stream = await box.stream(within_s=60)
    assert len(stream.body) == len(body)
    await box.answer(stream, b'{"text":""}')
    assert (await reply).status == 200


async def test_a_streamed_transcription_is_passed_on_as_it_comes(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, replicas=[loaded(model, AUDIO)])
    body, content_type = recording(model, b"RIFF", stream=True)
    reply = lab.spawn(lab.post(body, path=AUDIO, headers=lab.headers({"content-type": content_type})))
    stream = await box.stream()
    assert stream.meta.is_streaming
    await box.head(stream, content_type="text/event-stream")
    text = b'data: {"type":"transcript.text.delta","delta":"hi"}\n\ndata: [DONE]\n\n'
    await box.data(stream, text)
    await box.end(stream)
    assert (await reply).body == text


async def test_a_bad_form_is_refused_before_it_costs_a_slot(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, replicas=[loaded(model, AUDIO)])
    body, content_type = recording(model, b"RIFF")
    edge = content_type.partition("=")[2]
    for sent, kind, param in (
        (body[:-8], content_type, None),
        (body, "application/json", None),
        (body.replace(b'name="model"', b'name="other"'), content_type, "model"),
        (body.replace(b'name="file"', b'name="other"'), content_type, "file"),
        (body + b"x" * 10, content_type.replace(edge, "wrong"), None),
    ):
        reply = await lab.post(sent, path=AUDIO, headers=lab.headers({"content-type": kind}))
        assert_failure(reply, 400, "BAD_REQUEST")
        assert reply.error["param"] == param
    assert box.streams == []


async def test_a_bridge_worker_is_not_sent_a_recording(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    body, content_type = recording(model, b"\xff\xfe")
    reply = await lab.post(body, path=AUDIO, headers=lab.headers({"content-type": content_type}))
    assert_failure(reply, 400, "BAD_REQUEST")
    assert worker.jobs == []


# tenant, priority, cache


async def test_the_box_hears_tenant_and_priority_of_the_key_and_never_of_the_client(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    name = unique("tenant")
    lab.operate("gateway.services.create_tenant", name=name)
    for priority, heard in (("high", "high"), ("normal", ""), ("low", "low")):
        made = await lab.admin("POST", "/admin/keys", body={"name": "k", "tenant": name, "priority": priority})
        headers = {
            **bearer(made.json["secret"]),
            "content-type": "application/json",
            "x-tenant-id": "somebody-else",
            "x-priority": "high",
        }
        reply = lab.spawn(lab.post(chat_body(model), headers=headers))
        stream = await box.stream()
        assert (stream.meta.tenant, stream.meta.priority) == (name, heard)
        assert not {"x-tenant-id", "x-priority", "authorization"} & set(stream.meta.headers)
        await box.answer(stream, b"{}")
        assert (await reply).status == 200
    wrong = await lab.admin("POST", "/admin/keys", body={"name": "k", "tenant": name, "priority": "urgent"})
    assert_failure(wrong, 400, "BAD_REQUEST")


async def test_cache_wishes_reach_the_box_and_its_figures_reach_the_client(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    wishes = {"x-cache-mode": "prefix", "x-cache-tag": "doc:42.v1_a-b"}
    reply = lab.spawn(lab.post(chat_body(model), headers=lab.headers(wishes)))
    stream = await box.stream()
    assert wishes.items() <= stream.meta.headers.items()
    figures = {"x-cache-hit": "true", "x-cache-tokens-reused": "512", "x-queue-wait-ms": "3", "x-gpu-time-ms": "71"}
    await box.head(stream, headers=figures)
    await box.data(stream, b"{}")
    await box.end(stream)
    assert figures.items() <= (await reply).headers.items()


@pytest.mark.parametrize(
    ("name", "value"),
    [("X-Cache-Mode", "always"), ("X-Cache-Mode", ""), ("X-Cache-Tag", "x" * 65), ("X-Cache-Tag", "a b"), ("X-Cache-Tag", "")],
)
async def test_a_cache_wish_that_cannot_be_read_is_refused(lab: Lab, name: str, value: str) -> None:
    model = await lab.model()
    reply = await lab.post(chat_body(model), headers=lab.headers({name.lower(): value}))
    assert_failure(reply, 400, "BAD_REQUEST")
    assert reply.error["param"] == name


async def test_a_bridge_worker_does_not_hear_of_caches(lab: Lab) -> None:
    model = await lab.model()
    worker = await lab.worker(model)
    reply = lab.spawn(lab.post(chat_body(model), headers=lab.headers({"x-cache-mode": "none"})))
    job = await worker.job()
    assert "x-cache-mode" not in job.frame.get("headers", {})
    await worker.answer(job)
    assert (await reply).status == 200


# what operators see


async def test_what_a_box_says_is_listed_for_operators(lab: Lab) -> None:
    model = await lab.model()
    name = unique("box")
    box = await lab.box(model, name=name)
    half = ReplicaInfo(model="next", state="loading", engine="vllm", detail="reading weights", progress=0.5, eta_s=12.0)
    await box.send(
        Telemetry(
            replicas=[loaded(model, CHAT), half],
            available=["other"],
            memory=MemoryInfo(total_mb=24_000, used_mb=9_000, weights_mb=7_000, kv_mb=1_000),
            queue_depth=2,
            avg_wait_ms=35,
        )
    )

    async def written() -> dict[str, Any] | None:
        row = await lab.node(name)
        return row if row["queue_depth"] == 2 else None

    row = await eventually(written, what="the report is listed")
    assert [replica["state"] for replica in row["replicas"]] == ["loaded", "loading"]
    assert row["replicas"][1]["progress"] == 0.5
    assert (row["available_models"], row["avg_wait_ms"], row["memory"]["weights_mb"]) == (["other"], 35, 7_000)


async def test_a_flood_of_words_is_cut_and_the_box_keeps_working(lab: Lab) -> None:
    model = await lab.model()
    name = unique("box")
    box = await lab.box(model, name=name)
    shout = "x" * 100_000
    many = [ReplicaInfo(model=f"m{number}", state="loading", detail="y" * 400) for number in range(3_000)]
    await box.send(Telemetry(replicas=[ReplicaInfo(model=shout, state=shout, detail=shout), *many], last_error=shout))

    async def written() -> dict[str, Any] | None:
        row = await lab.node(name)
        return row if len(row["replicas"]) > 1 else None

    row = await eventually(written, what="the report is listed")
    assert len(row["replicas"]) == 256
    assert len(json.dumps(row)) < 400_000
    reply = lab.ask(model)
    await box.answer(await box.stream(), b"{}")
    assert (await reply).status == 200
