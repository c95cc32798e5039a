"""The last word on a request: its final state, its model and its tokens, whatever happened to it on the way."""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from controlplane.launcher.embedded import EmbeddedServers
from core.db import threads
from core.db.threads import run_in_database
from core.limits import GatewayLimits
from gateway.dialects.translation import Translation
from gateway.errors import ShuttingDown
from gateway.routing import Alias, Target
from gateway.values import InferenceRequest
from nodes.links import EndKind
from tests.fakes.frozen_database import frozen
from tests.fakes.limits import set_limits
from tests.system.gateway.test_client_surfaces import CHAT, MESSAGES, RESPONSES, STREAM, WHOLE, chunk
from tests.system.gateway.test_odd_moments import allow_keeping
from tests.system.gateway.test_pipeline import SSE, Gateway, Make, Rows, make_gateway
from tests.system.gateway.test_silent_database import until
from tests.unit.nodes.link_fakes import FakeLink, FakeStream

__all__ = ["make_gateway"]

pytestmark = pytest.mark.timeout(180)  # above the sum of the waits and the start of a server
ANSWER = json.dumps(WHOLE).encode()
DOCUMENT = [{"role": "user", "content": [{"type": "document", "source": {"type": "file", "file_id": "f"}}]}]
"""What no chat completion can carry."""


# final states


async def test_a_request_that_was_tried_more_often_than_a_column_can_count_is_final_all_the_same(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask()
    stream = await request.on(link)
    stream.sink._job.attempts = 40_000  # type: ignore[attr-defined]  # as after minutes of boxes that say "busy" at once
    stream.end(EndKind.BUSY)
    (await request.on(link)).answer(ANSWER)
    await request.done()
    assert await request.record("state", "attempts") == ("completed", 32_767)


async def test_nothing_is_begun_for_a_request_that_was_being_accepted_as_the_gateway_stopped(
    make_gateway: Make, rows: Rows
) -> None:
    gateway = make_gateway()
    link = gateway.link()
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_requestrecord")
        request = gateway.ask()
        await request.client.wait(lambda: rows.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone())
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
    (await request.on(link)).answer(b"Not Found", status=404)
    with pytest.raises(RuntimeError):
        await request.done()
    row = gateway.rows.execute("SELECT id FROM gateway_requestrecord").fetchone()
    assert row is not None
    final = await request.gateway_record(uuid.UUID(str(row[0])), "state", "error_code", "status_code")
    assert final == ("failed", "INTERNAL_ERROR", 500)


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_what_an_engine_refuses_for_its_size_is_the_callers_mistake(make_gateway: Make, *, streams: bool) -> None:
    gateway = make_gateway()
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=MESSAGES, max_tokens=5, stream=streams)
    stream = await request.on(link)
    said = b'{"error":{"message":"This model\'s maximum context length is 10 tokens, you asked for 20 tokens","code":400}}'
    if streams:
        stream.answer(chunk({"content": "a"}), b"data: " + said + b"\n\n", headers=SSE)
    else:
        stream.answer(said)
    await request.done()
    assert b"prompt is too long" in request.client.body
    assert await request.record("state", "error_code") == ("rejected", "context_length_exceeded")


# models


async def test_a_refusal_behind_an_alias_is_recorded_under_both_names(make_gateway: Make) -> None:
    gateway = make_gateway(aliases=(Alias("nickname", (Target("m"),)),), max_queue=0)
    request = gateway.ask(model="nickname")
    await request.done()
    assert request.client.status == 503
    assert await request.record("state", "model", "asked_model") == ("rejected", "m", "nickname")


async def occupy(gateway: Gateway) -> Any:
    """Have the one box of ``m``, which speaks Messages itself, taken for an hour."""
    link = gateway.link(paths={"/v1/messages"})
    first = gateway.ask(surface=MESSAGES, max_tokens=5)
    stream = await first.on(link)
    gateway.dispatcher.note_held("m", 3600.0)
    return first, stream


async def test_a_fallback_that_cannot_be_told_the_request_does_not_cost_it(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()})
    first, stream = await occupy(gateway)
    gateway.link("spare", paths={CHAT})
    second = gateway.ask(surface=MESSAGES, max_tokens=5, messages=DOCUMENT)
    await second.client.wait(lambda: gateway.dispatcher.depth or second.task.done())
    stream.answer(ANSWER)
    await first.done()
    (await second.on(stream.link)).answer(ANSWER)
    await second.done()
    assert second.client.status == 200
    assert await second.record("model", "asked_model", "attempts") == ("m", "", 1)


async def test_a_wait_that_no_fallback_can_end_is_over_in_time(make_gateway: Make) -> None:
    gateway = make_gateway(models={"m": ("spare",), "spare": ()}, limits=GatewayLimits(queue_s=0.05))
    first, stream = await occupy(gateway)
    gateway.link("spare", paths={CHAT})
    second = gateway.ask(surface=MESSAGES, max_tokens=5, messages=DOCUMENT)
    await second.done()
    assert (second.client.status, second.error["code"]) == (504, "REQUEST_TIMEOUT")
    assert await second.record("state", "model") == ("failed", "m")
    stream.answer(ANSWER)
    await first.done()


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
            again.answer(ANSWER)
        await request.done()
        assert request.client.status == 200
        assert await request.record("state", "attempts") == ("completed", 2)


# tokens


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
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="hi", stream=True)
    stream = await request.on(link)
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        blocker.execute("LOCK TABLE gateway_storedresponse")
        stream.answer(*STREAM, headers=SSE)
        await request.client.wait(lambda: rows.execute("SELECT 1 FROM pg_locks WHERE NOT granted").fetchone())
        request.client.leave()
        await request.done()
        blocker.rollback()
    row = await request.record("state", "status_code", "prompt_tokens", "completion_tokens", "tokens_estimated")
    assert row == ("cancelled", 499, 3, 4, False)


# kept conversations


async def test_pictures_of_earlier_turns_do_not_count_as_text(make_gateway: Make) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    picture = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * 5000}
    request = gateway.ask(
        surface=RESPONSES, input=[{"role": "user", "content": [{"type": "input_text", "text": "?"}, picture]}]
    )
    (await request.on(link)).answer(ANSWER)
    await request.done()
    kept_id = json.loads(request.client.body)["id"]
    following = gateway.ask(surface=RESPONSES, input="and now?", previous_response_id=kept_id)
    stream = await following.on(link)
    assert "A" * 5000 in stream.request.body.decode()
    stream.answer(ANSWER)
    await following.done()
    assert await following.record("state") == ("completed",)


async def test_text_of_earlier_turns_counts(make_gateway: Make) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="a" * 900)
    (await request.on(link)).answer(ANSWER)
    await request.done()
    kept_id = json.loads(request.client.body)["id"]
    following = gateway.ask(surface=RESPONSES, input="a" * 200, previous_response_id=kept_id)
    await following.done()
    assert (following.client.status, following.error["code"]) == (400, "PROMPT_TOO_LARGE")


def nest(levels: int) -> Any:
    nested: Any = "deep"
    for _ in range(levels):
        nested = {"a": [nested]}
    return nested


async def test_a_tool_that_is_nested_without_end_is_refused_by_name(make_gateway: Make) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="hi", tools=[{"type": "mcp", "more": nest(220)}])
    await request.done()
    assert (request.client.status, request.error["param"]) == (400, "tools")


@pytest.mark.parametrize("streams", [True, False], ids=["streamed", "whole"])
async def test_an_item_that_is_nested_without_end_costs_the_keeping_and_not_the_answer(
    make_gateway: Make, *, streams: bool
) -> None:
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    brought = {"type": "tool_search_output", "call_id": "c", "tools": [{"type": "mcp", "more": nest(220)}]}
    request = gateway.ask(surface=RESPONSES, input=[{"role": "user", "content": "hi"}, brought], stream=streams)
    stream = await request.on(link)
    stream.answer(*(STREAM if streams else [ANSWER]), headers=SSE if streams else None)
    await request.done()
    data = request.client.body.rpartition(b"\ndata:")[2]
    response = json.loads(data)["response"] if streams else json.loads(data)
    assert (response["store"], response["status"]) == (False, "completed")
    assert await request.record("state") == ("completed",)


@pytest.mark.parametrize("moment", ["before", "while"])
async def test_an_answer_that_a_frozen_database_cannot_keep_reaches_its_client_and_is_not_kept_later(
    make_gateway: Make, rows: Rows, private_servers: EmbeddedServers, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    set_limits(gateway={"keeping_s": 1.0})
    gateway = make_gateway()
    allow_keeping(gateway)
    link = gateway.link(paths={CHAT})
    request = gateway.ask(surface=RESPONSES, input="hi", stream=True)
    stream = await request.on(link)
    with psycopg.connect(rows.info.dsn, autocommit=False) as blocker:
        if moment == "while":
            blocker.execute("LOCK TABLE gateway_storedresponse")
            stream.answer(*STREAM, headers=SSE)
            waiting = "SELECT 1 FROM pg_locks WHERE NOT granted"
            # A machine that stands still for that second sees the keeping given up already.
            await request.client.wait(lambda: rows.execute(waiting).fetchone() or request.task.done())
        with frozen(private_servers):
            if moment == "before":
                stream.answer(*STREAM, headers=SSE)
            await request.done()
        blocker.rollback()
    response = json.loads(request.client.body.rpartition(b"\ndata:")[2])["response"]
    assert (response["store"], response["status"], request.client.is_whole) == (False, "completed", True)
    assert await request.record("state", "prompt_tokens", "completion_tokens") == ("completed", 3, 4)
    await asyncio.gather(*(run_in_database(int) for _ in range(8)))
    await until(lambda: threads._room.taken == 0)
    assert rows.execute("SELECT count(*) FROM gateway_storedresponse").fetchone() == (0,)
