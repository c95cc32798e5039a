"""Nodes that speak muster v1: binary frames and flow control, what they have loaded, files, tenants, and owners."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.fakes.http_client import assert_failure, call
from tests.fakes.lab import CHAT, IMPATIENT, Lab, bearer, chat_body, unique
from tests.fakes.waiting import eventually
from wire import bridge, frames
from wire.bridge import MemoryInfo, ModelsUpdate, ReplicaInfo, Telemetry

pytestmark = pytest.mark.asyncio

SSE = "text/event-stream"
AUDIO, EMBED, COMPLETE = "/v1/audio/transcriptions", "/v1/embeddings", "/v1/completions"
DELTA = b'data: {"type":"transcript.text.delta","delta":"Good "}\n\n'
DONE = b'data: {"type":"transcript.text.done","text":"Good morning"}\n\n'


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


# frames


async def test_a_request_travels_as_binary_frames_with_meta_and_untouched_body(lab: Lab) -> None:
    model = await lab.model(max_prompt_chars=3_000_000)
    box = await lab.box(model)
    reply = lab.ask(model, "x" * 1_000_000)
    stream = await box.stream()
    assert stream.attempt == 1
    assert (stream.meta.path, stream.meta.method, stream.meta.model) == ("/v1/chat/completions", "POST", model)
    assert stream.meta.is_streaming is False
    assert 0 < stream.meta.deadline_ms <= 300_000
    assert stream.meta.request_id.startswith("req_")
    assert set(stream.meta.headers) <= {"content-type", "openai-organization", "x-request-id"}
    assert json.loads(stream.body)["messages"][0]["content"] == "x" * 1_000_000
    await box.answer(stream, b'{"ok":true}', usage=(100, 1))
    got = await reply
    assert (got.status, got.body, got.request_id) == (200, b'{"ok":true}', stream.meta.request_id)
    (record,) = await lab.final(model)
    assert (record["prompt_tokens"], record["completion_tokens"], record["tokens_estimated"]) == (100, 1, False)


async def test_the_window_opens_only_as_the_client_reads(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, max_concurrent=2)
    slow = await lab.open(model, "slow", receive_buffer=4096)
    stuck = await box.stream()
    await box.head(stuck, content_type=SSE)
    piece = b"data: " + b"x" * 16_000 + b"\n\n"
    sent = 0

    async def stalled() -> bool:
        """Send whatever the window allows until it stays shut."""
        nonlocal sent
        before = sent
        while stuck.window >= len(piece):
            await box.data(stuck, piece)
            sent += len(piece)
        other = lab.ask(model, "meanwhile")
        await box.answer(await box.stream(), b"{}")
        assert (await other).status == 200
        return sent == before

    await eventually(stalled, what="the window shuts")
    limit = 32 * 1024 * 1024
    assert sent < limit
    reading = lab.spawn(slow.finish())
    await box.credit(stuck, len(piece))
    await box.data(stuck, b"data: [DONE]\n\n")
    await box.end(stuck)
    got = await reading
    assert len(got.body) == sent + len(b"data: [DONE]\n\n")
    assert got.whole


async def test_a_cancel_names_the_stream_and_late_frames_are_dropped(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    exchange = await lab.open(model)
    stream = await box.stream()
    await box.head(stream, content_type=SSE)
    await box.data(stream, b"data: begun\n\n")
    await exchange.until(b"begun")
    exchange.leave()
    assert await box.cancelled(stream) == "client_disconnect"
    await box.data(stream, b"data: LATE\n\n")
    await box.end(stream, frames.End(error="cancelled"))
    reply = lab.ask(model)
    following = await box.stream()
    assert following.id != stream.id
    await box.answer(following, b'{"clean":true}')
    assert (await reply).body == b'{"clean":true}'


async def test_frames_of_another_attempt_or_stream_reach_nobody(lab: Lab) -> None:
    model = await lab.model()
    for wrong_stream, wrong_attempt in ((0, 1), (77, 0)):
        hostile = await lab.box(model)
        reply = lab.ask(model)
        stream = await hostile.stream()
        name = unique("honest")
        honest = await lab.box(model, name=name)
        where = (stream.id + wrong_stream, stream.attempt + wrong_attempt)
        head = frames.encode_json(frames.Head(status=200, headers={"content-type": "text/plain"}))
        await hostile.socket.send(frames.encode_frame(frames.HEAD, *where, head))
        await hostile.socket.send(frames.encode_frame(frames.DATA, *where, b"FORGED"))
        assert (await hostile.closed())[0] == 1002
        await honest.answer(await honest.stream(), b'{"genuine":true}')
        assert (await reply).body == b'{"genuine":true}'
        await honest.close()
        await lab.let_go_of(name)


@pytest.mark.parametrize("error", ["engine_failed", "busy"])
async def test_a_failure_before_any_byte_is_tried_on_another_box(lab: Lab, error: str) -> None:
    model = await lab.model()
    first = await lab.box(model)
    reply = lab.ask(model)
    stream = await first.stream()
    second = await lab.box(model)
    await first.end(stream, frames.End(error=error, retryable=True))
    again = await second.stream()
    assert again.attempt == 2
    assert again.meta.request_id == stream.meta.request_id
    await second.answer(again, b"{}")
    assert (await reply).status == 200
    (record,) = await lab.final(model)
    assert (record["status"], record["attempts"]) == ("completed", 2)


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


# files


async def test_a_recording_larger_than_a_json_body_may_be_travels_byte_for_byte(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, replicas=[loaded(model, AUDIO)])
    body, content_type = recording(model, os.urandom(40 * 1024 * 1024))
    reply = lab.spawn(lab.post(body, path=AUDIO, headers=lab.headers({"content-type": content_type}), within_s=90))
    stream = await box.stream(within_s=60)
    assert bytes(stream.body) == body
    assert (stream.meta.model, stream.meta.path, stream.meta.is_streaming) == (model, AUDIO, False)
    assert stream.meta.headers["content-type"] == content_type
    await box.head(stream, content_type="text/plain; charset=utf-8")
    await box.data(stream, "Grüß Gott.\n".encode())
    await box.end(stream)
    got = await reply
    assert (got.status, got.body.decode()) == (200, "Grüß Gott.\n")
    (record,) = await lab.final(model)
    assert (record["endpoint"], record["prompt_tokens_est"], record["status"]) == (AUDIO, 0, "completed")


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken"])
async def test_a_streamed_transcript_passes_as_it_comes_and_a_break_is_said(lab: Lab, breaks: bool) -> None:
    model = await lab.model()
    box = await lab.box(model, endpoints=(AUDIO,))
    form, content_type = recording(model, b"RIFF", stream=True)
    asked = lab.spawn(lab.post(form, path=AUDIO, headers=lab.headers({"content-type": content_type})))
    stream = await box.stream()
    assert (bytes(stream.body), stream.meta.is_streaming) == (form, True)
    await box.head(stream, content_type=SSE)
    await box.data(stream, DELTA)
    if breaks:
        await box.end(stream, frames.End(error="the engine died"))
    else:
        await box.data(stream, DONE)
        await box.end(stream)
    reply = await asked
    assert reply.headers["content-type"].startswith(SSE)
    if not breaks:
        assert (reply.status, reply.body) == (200, DELTA + DONE)
        return
    assert reply.body.startswith(DELTA)
    error = json.loads(reply.events[-1])["error"]
    assert (error["type"], error["code"]) == ("server_error", "FORWARDED_REQUEST_FAILED")
    assert "[DONE]" not in reply.events


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


# operators and owners


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


async def test_a_box_that_says_it_leaves_gets_nothing_new_and_finishes_what_runs(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model, max_concurrent=2)
    running = lab.ask(model)
    stream = await box.stream()
    other = lab.ask(model, "beside it")
    beside = await box.stream()
    await box.send(bridge.Draining(reason="going home"))
    await box.answer(beside, b"{}")
    assert (await other).status == 200  # so what it said before that answer has been heard
    assert_failure(await lab.ask(model, "one more", x_pool_options=IMPATIENT), 503, "NODE_DRAINING")
    await box.answer(stream, b"{}")
    assert (await running).status == 200
    assert len(box.streams) == 2


async def test_an_owner_at_the_box_takes_it_back_and_lends_it_again(lab: Lab) -> None:
    model, name = await lab.model(), unique("reclaimed")
    box = await lab.box(model, name=name)
    reply = lab.ask(model)
    stream = await box.stream()
    await box.send(bridge.ModeChange(mode="spare_off", reason="owner_reclaim"))
    assert_failure(await reply, 503, "REQUEST_INTERRUPTED")
    assert await box.cancelled(stream)

    async def written() -> bool:
        row = await lab.node(name)
        return (row["mode"], row["status"]) == ("spare_off", "draining")

    await eventually(written, what="the owner's decision is written down")
    await box.send(bridge.ModeChange(mode="spare_on"))
    again = lab.ask(model)
    following = await box.stream()
    await box.answer(following, b"{}")
    assert (await again).status == 200


async def test_a_second_program_with_the_same_name_fences_the_first(lab: Lab) -> None:
    model, name = await lab.model(), unique("twin")
    older = await lab.box(model, name=name)
    newer = await lab.box(model, name=name)
    assert older.ack is not None
    assert newer.ack is not None
    assert older.ack.node_id == newer.ack.node_id
    await older.closed()
    reply = lab.ask(model)
    await newer.answer(await newer.stream(), b"{}")
    assert (await reply).status == 200
    assert not older.streams
