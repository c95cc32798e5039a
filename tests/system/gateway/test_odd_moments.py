"""Requests at their odd moments: other models, other words, kept answers, clients that leave; each ends once."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from core.limits import GatewayLimits
from gateway import metrics
from gateway.dialects import SURFACES
from gateway.dialects.translation import Translation
from gateway.errors import ShuttingDown
from gateway.values import InferenceRequest
from nodes.links import EndKind
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import (
    CHAT,
    MESSAGES,
    REPLY,
    RESPONSES,
    SSE,
    STREAM,
    Make,
    Request,
    Rows,
    allow_keeping,
    chunk,
    end_waits,
    is_waited_for,
    last_data,
)


@pytest.mark.parametrize("kind", [EndKind.ENGINE_FAILED, EndKind.RECLAIMED], ids=str)
async def test_a_fallback_answers_after_the_models_only_box_did_not(make_gateway: Make, kind: EndKind) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    link, spare = gateway.link(), gateway.link("spare")
    request = gateway.ask()
    stream = await request.on(link)
    link.policy.reclaimed = kind is EndKind.RECLAIMED
    stream.end(kind, retryable=True)
    await request.served(spare, REPLY)
    assert link.streams == []
    assert await request.record("model", "asked_model", "attempts", "state") == ("spare", "m", 2, "completed")


async def test_a_fallback_answers_while_the_models_queue_is_full_or_its_provider_is_off(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()}, max_queue=0)
    link, spare = gateway.link(), gateway.link("spare")
    first = gateway.ask()
    stream = await first.on(link)
    second = gateway.ask()
    await second.served(spare, REPLY)
    assert await second.record("model", "asked_model", "state") == ("spare", "m", "completed")
    gateway.registry.remove(spare)
    for message, is_off in (("Service temporarily at capacity, please retry", False), ("Provider is currently disabled", True)):
        gateway.pipeline.dispatcher._keeper.disabled_models = frozenset({"m"} if is_off else ())
        refused = gateway.ask()
        await refused.done()
        assert (refused.client.status, refused.error["message"]) == (503, message)
        assert await refused.record("state", "model") == ("rejected", "m")
    stream.answer(REPLY)
    await first.done()


async def finish(request: Request, stream: FakeStream, *, streams: bool) -> Any:
    """Have the engine answer, and return the response that the client gets."""
    stream.answer(*(STREAM if streams else [REPLY]), headers=SSE if streams else None)
    await request.done()
    said = last_data(request.client.body)
    assert request.client.is_whole
    assert await request.record("state") == ("completed",)
    return said["response"] if streams else said


def nest(levels: int) -> Any:
    nested: Any = "deep"
    for _ in range(levels):
        nested = {"a": [nested]}
    return nested


DEEP = {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "mcp", "more": nest(220)}]}


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize(
    ("fields", "is_kept"),
    [
        ({"input": "hi", "x_pool_options": {}}, True),
        ({"input": "hi", "instructions": "data: x"}, False),  # its tenant is gone by then
        ({"input": [{"role": "user", "content": "hi"}, DEEP]}, False),
    ],
    ids=["kept", "gone", "nested"],
)
async def test_an_answer_is_whole_and_kept_or_says_that_it_is_not(
    make_gateway: Make, fields: dict[str, Any], *, is_kept: bool, streams: bool
) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, stream=streams, **fields)
    stream = await request.on(link)
    if "instructions" in fields:
        gateway.rows.execute("DELETE FROM gateway_tenant WHERE name = 't'")
    response = await finish(request, stream, streams=streams)
    assert (response["store"], response["status"], "x_pool_meta" in response) == (is_kept, "completed", is_kept)
    kept = gateway.rows.execute("SELECT id FROM gateway_storedresponse").fetchall()
    assert kept == ([(response["id"],)] if is_kept else [])


UNSAYABLE = [{"role": "user", "content": [{"type": "holograph", "data": "x"}]}]


async def test_what_cannot_be_translated_is_refused_by_name_once_nobody_speaks_it(make_gateway: Make) -> None:
    gateway = make_gateway()
    native, _ = gateway.link(paths={"/v1/messages", CHAT}), gateway.link(paths={CHAT})
    first = gateway.ask(surface=MESSAGES, max_tokens=5)
    await first.on(native)
    second = gateway.ask(surface=MESSAGES, max_tokens=5, messages=UNSAYABLE)
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())
    first.client.leave()
    gateway.registry.remove(native)
    await first.done()
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())  # it had just been given the lost slot
    end_waits(gateway)
    await second.done()
    assert second.client.status == 400
    assert second.error["param"] == "messages[0].content[0].type"
    assert await second.record("state") == ("rejected",)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("trouble", ["whole", "empty", "large", "unknown path", "deadline", "refused"])
async def test_after_signs_of_life_every_trouble_is_one_event_and_an_end(make_gateway: Make, path: str, trouble: str) -> None:
    gateway = make_gateway(limits=GatewayLimits(stream_ping_s=0.01))
    link = gateway.link()
    request = gateway.ask(surface=SURFACES[path], stream=True, max_tokens=5, input="hi")
    stream = await request.on(link)
    await request.client.wait(lambda: b": ping" in request.client.body)
    if trouble == "whole":
        stream.answer(REPLY)
    elif trouble == "refused":
        stream.answer(b'{"error":{"message":"no memory left"}}', status=503)
    elif trouble == "empty":
        for _ in range(GatewayLimits().max_requeues):
            stream.answer(headers=SSE)
            stream = await request.on(link)
        stream.answer(headers=SSE)
    elif trouble == "large":
        stream.answer(*[b"x" * 1024 * 1024] * 17)
    elif trouble == "unknown path":
        stream.answer(b"Not Found", status=404)
        if path != CHAT:
            stream = await request.on(link)
            assert stream.request.path == CHAT
            stream.answer(b"Not Found", status=404)
    else:
        stream.sink._take_deadline()  # type: ignore[attr-defined]  # a timer that short may be up before the first sign of life
    await request.done()
    events = [event for event in request.client.body.split(b"\n\n") if event and event != b": ping"]
    said: list[dict[str, Any]] = [json.loads(event.rpartition(b"data:")[2]) for event in events]
    assert request.client.is_whole
    assert len([one for one in said if "error" in one or one.get("type") == "response.failed"]) == 1
    assert b"[DONE]" not in request.client.body
    assert (b"no memory left" in events[-1]) is (trouble == "refused")
    assert (await request.record("state"))[0] == "failed"


DOCUMENT = [{"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}]
"""What no chat completion can carry."""


async def test_a_request_that_was_tried_more_often_than_a_column_can_count_is_final_all_the_same(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask()
    stream = await request.on(link)
    stream.sink._job.attempts = 40_000  # type: ignore[attr-defined]  # as after minutes of boxes that say "busy" at once
    stream.end(EndKind.BUSY)
    await request.served(link, REPLY)
    assert await request.record("state", "attempts") == ("completed", 32_767)


async def test_nothing_is_begun_for_a_request_that_was_being_accepted_as_the_gateway_stopped(
    make_gateway: Make, rows: Rows
) -> None:
    gateway = make_gateway()
    link = gateway.link()
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_requestrecord")
        request = gateway.ask()
        await request.client.wait(lambda: is_waited_for(rows))
        gateway.pipeline.is_stopping = True
        gateway.dispatcher.fail_waiting(ShuttingDown(retry_after_s=2))
        blocker.rollback()
    await request.client.wait(lambda: link.streams or request.task.done())
    await request.done()
    assert (request.client.status, request.error["code"]) == (503, "REQUEST_INTERRUPTED")
    assert await request.record("state", "attempts") == ("interrupted", 0)


async def test_a_bug_of_ours_is_a_failure_and_no_interruption(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()

    def translate(_request: InferenceRequest) -> Translation:
        raise RuntimeError("a bug")

    request = gateway.ask(surface=replace(MESSAGES, translate=translate), max_tokens=5)
    with pytest.raises(RuntimeError):
        await request.served(link, b"Not Found", status=404)
    row = gateway.rows.execute("SELECT id FROM gateway_requestrecord").fetchone()
    assert row is not None
    final = await request.gateway_record(uuid.UUID(str(row[0])), "state", "error_code", "status_code")
    assert final == ("failed", "INTERNAL_ERROR", 500)


def find_chats(link: FakeLink) -> list[FakeStream]:
    return [one for one in link.streams if one.request.path == CHAT]


async def test_requests_that_find_a_path_unknown_one_after_the_other_are_all_asked_again_in_chat(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link(slots=2)
    requests = [gateway.ask(surface=MESSAGES, max_tokens=5) for _ in range(2)]
    await requests[0].client.wait(lambda: len(link.streams) == 2)
    for stream, request in zip(list(link.streams), requests, strict=True):
        assert stream.request.path == "/v1/messages"
        stream.answer(b"Not Found", status=404)
        await request.client.wait(lambda: find_chats(link) or request.task.done())  # noqa: B023  # awaited within the turn
        for again in find_chats(link):
            again.answer(REPLY)
        await request.done()
        assert request.client.status == 200
        assert await request.record("state", "attempts") == ("completed", 2)


@pytest.mark.parametrize("ending", ["left", "lost", "failed"])
async def test_a_stream_that_ends_in_the_middle_is_counted_as_far_as_it_came(make_gateway: Make, ending: str) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=MESSAGES, max_tokens=5, stream=True)
    stream = await request.on(link)
    stream.answer(*(chunk({"content": word}) for word in "abcde"), headers=SSE, ends=False)
    if ending == "left":
        request.client.leave()
    elif ending == "lost":
        stream.end(EndKind.LINK_LOST)
    else:
        stream.sink.on_data(b'data: {"error":{"message":"oom"}}\n\n')
    await request.done()
    state, prompt, completion, is_estimated = await request.record(
        "state", "prompt_tokens", "completion_tokens", "tokens_estimated"
    )
    assert state == {"left": "cancelled", "lost": "interrupted", "failed": "failed"}[ending]
    assert (prompt, completion, is_estimated) == (0, 4, True)


async def test_what_was_counted_is_written_down_for_a_client_that_leaves_before_the_last_bytes(
    make_gateway: Make, rows: Rows
) -> None:
    gateway, before = make_gateway(), metrics.TALLY.in_flight
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="hi", stream=True)
    stream = await request.on(link)
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_storedresponse")
        stream.answer(*STREAM, headers=SSE)
        await request.client.wait(lambda: is_waited_for(rows))
        request.client.leave()
        await request.done()
        blocker.rollback()
    row = await request.record("state", "status_code", "prompt_tokens", "completion_tokens", "tokens_estimated")
    assert row == ("cancelled", 499, 3, 4, False)
    assert (request.client.is_whole, metrics.TALLY.in_flight) == (False, before)


async def test_text_of_earlier_turns_counts(make_gateway: Make) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="a" * 900)
    await request.served(link, REPLY)
    kept_id = json.loads(request.client.body)["id"]
    following = gateway.ask(surface=RESPONSES, input="a" * 200, previous_response_id=kept_id)
    await following.done()
    assert (following.client.status, following.error["code"]) == (400, "PROMPT_TOO_LARGE")
