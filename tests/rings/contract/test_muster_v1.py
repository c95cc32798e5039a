"""muster v1: binary frames, flow control, attempts, telemetry."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes.http_client import assert_failure, assert_stream_failure
from tests.fakes.lab import IMPATIENT, Lab, unique
from tests.fakes.waiting import eventually
from wire import bridge, frames

pytestmark = pytest.mark.asyncio

SSE = "text/event-stream"


async def test_the_acknowledgement_names_the_node_and_the_rules(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    assert box.ack is not None
    assert box.ack.protocol_version == bridge.MUSTER_V1
    assert box.ack.node_id is not None
    assert box.ack.node_id.startswith("node_")
    assert box.ack.heartbeat_interval_s is not None
    assert box.ack.heartbeat_interval_s > 0
    assert box.ack.window_bytes is not None
    assert box.ack.window_bytes > 0
    assert box.ack.models == [model]


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


async def test_a_chunk_may_split_a_character(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    reply = lab.ask(model, stream=True)
    stream = await box.stream()
    text = 'data: {"choices":[{"index":0,"delta":{"content":"🦙"}}]}\n\ndata: [DONE]\n\n'.encode()
    await box.head(stream, content_type=SSE)
    for index in range(len(text)):
        await box.data(stream, text[index : index + 1])
    await box.end(stream)
    got = await reply
    assert got.body == text
    assert got.headers["content-type"] == SSE


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


async def test_an_engine_that_fails_after_the_first_byte_ends_the_stream_with_an_error_event(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    exchange = await lab.open(model)
    stream = await box.stream()
    await box.head(stream, content_type=SSE)
    await box.data(stream, b'data: {"choices":[]}\n\n')
    await exchange.until(b"choices")
    await box.end(stream, frames.End(error="engine_failed", message="segfault in kernel", retryable=True))
    got = await exchange.finish()
    assert_stream_failure(got, "FORWARDED_REQUEST_FAILED")
    assert b"segfault" not in got.body
    (record,) = await lab.final(model)
    assert (record["status"], record["attempts"]) == ("failed", 1)


async def test_an_end_without_a_head_is_a_failed_request(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    reply = lab.ask(model)
    await box.end(await box.stream())
    assert_failure(await reply, 502, "FORWARDED_REQUEST_FAILED")


async def test_an_upstream_error_keeps_status_and_body_on_streams_too(lab: Lab) -> None:
    model = await lab.model()
    box = await lab.box(model)
    reply = lab.ask(model, stream=True)
    stream = await box.stream()
    await box.head(stream, status=404)
    await box.data(stream, b'{"error":{"message":"no such adapter"}}')
    await box.end(stream)
    got = await reply
    assert (got.status, got.body) == (404, b'{"error":{"message":"no such adapter"}}')


async def test_telemetry_shows_in_the_node_list(lab: Lab) -> None:
    model, name = await lab.model(), unique("gpu-box")
    box = await lab.box(model, name=name)
    gpu = bridge.GpuInfo(index=0, name="Scripted GPU", memory_total_mb=1000, memory_used_mb=400, utilization_percent=73.0)
    replica = bridge.ReplicaInfo(model=model, state="loaded", engine="scripted", slots=4, active=1)
    await box.send(bridge.Telemetry(current_load=1, gpus=[gpu], replicas=[replica]))

    async def shown() -> dict[str, Any] | None:
        row = await lab.node(name)
        return row if row["gpu_util_percent"] == 73.0 else None

    row = await eventually(shown, what="the telemetry is listed")
    assert row["vram_free_mb"] == 600
    assert row["current_model"] == model


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
