"""The life of a request from its bytes to its record, over a real writer and boxes played by the test."""

from __future__ import annotations

import asyncio
import gc
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest

from core.limits import GatewayLimits
from nodes.links import EndKind
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import ANSWER, MESSAGES, SSE, Gateway, Make, Request, Rows


@pytest.mark.parametrize("streams", [True, False])
async def test_the_last_bytes_wait_until_the_records_end_is_sent_and_never_long(make_gateway: Make, *, streams: bool) -> None:
    gateway = make_gateway()
    link = gateway.link(slots=2)
    first, second = requests = gateway.ask(stream=streams), gateway.ask(stream=streams)
    await first.client.wait(lambda: len(link.streams) == 2)

    def list_states() -> set[object]:
        return {row[0] for row in gateway.rows.execute("SELECT state FROM gateway_requestrecord").fetchall()}

    async with asyncio.timeout(30):
        while list_states() != {"running"}:
            await asyncio.sleep(0.005)
    with psycopg.connect(gateway.rows.info.dsn, password=gateway.rows.info.password) as other:
        other.execute("SELECT 1 FROM gateway_requestrecord FOR UPDATE")
        answered_at = 0.0
        for request, stream in zip(requests, list(link.streams), strict=True):
            answered_at = time.monotonic()
            stream.answer(b"data: [DONE]\n\n" if streams else ANSWER, headers=SSE if streams else None)
            if request is first:
                await request.done()  # sent is enough: that the row is locked holds nobody up
        await second.done()  # it could not be sent meanwhile, and a slow database holds no answer for long
        assert time.monotonic() - answered_at >= 0.2
        assert first.client.is_whole
        assert second.client.is_whole
        assert list_states() == {"running"}
    async with asyncio.timeout(30):
        while list_states() != {"completed"}:
            await asyncio.sleep(0.005)


async def test_a_lost_box_before_the_first_byte_is_another_boxs_turn(make_gateway: Make) -> None:
    gateway = make_gateway()
    first, second = gateway.link(), gateway.link()
    request = gateway.ask()
    await request.on(first)
    gateway.registry.remove(first)
    await request.served(second, ANSWER)
    assert request.client.status == 200
    assert await request.record("state", "attempts", "node_name") == ("completed", 2, second.node_name)


async def test_a_busy_box_costs_no_attempt_of_the_four(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask()
    for _ in range(6):
        (await request.on(link)).end(EndKind.BUSY)
    await request.served(link, ANSWER)
    assert request.client.status == 200
    assert await request.record("state", "attempts") == ("completed", 7)


@pytest.mark.parametrize("streams", [False, True])
async def test_what_full_nodes_refuse_goes_to_another_node_then_to_a_fallback_then_back_to_the_caller(
    make_gateway: Make, *, streams: bool
) -> None:
    gateway = make_gateway(models={"m": ("other",), "other": ()})
    first, second, fallback = gateway.link("m"), gateway.link("m"), gateway.link("other")
    request = gateway.ask(stream=streams)
    (await request.on(first)).end(EndKind.BUSY, retry_after_s=7.0)
    (await request.on(second)).end(EndKind.BUSY, retry_after_s=7.0)
    stream = await request.on(fallback)
    assert stream.request.model == "other"
    stream.end(EndKind.BUSY, retry_after_s=7.0)
    await request.done()
    assert (request.client.status, request.error["code"]) == (503, "NO_AVAILABLE_NODE")
    assert request.client.headers["retry-after"] == "7"
    assert await request.record("state", "attempts") == ("failed", 3)
    assert all(link.busy_until > time.monotonic() + 1 for link in (first, second, fallback))


@pytest.mark.parametrize("moment", ["queued", "waiting", "streaming"])
async def test_a_client_that_leaves_is_recorded_as_cancelled(make_gateway: Make, moment: str) -> None:
    gateway = make_gateway()
    link = gateway.link() if moment != "queued" else None
    request = gateway.ask(stream=True)
    if link is None:
        await request.client.wait(lambda: gateway.dispatcher.depth)
    else:
        stream = await request.on(link)
        if moment == "streaming":
            stream.answer(b"data: 1\n\n", headers=SSE, ends=False)
    ((row_id,),) = gateway.rows.execute("SELECT id FROM gateway_requestrecord").fetchall()
    request.client.leave()
    await request.done()
    row = await request.gateway_record(uuid.UUID(str(row_id)), "state", "error_code", "status_code")
    assert row == ("cancelled", "CLIENT_CLOSED_REQUEST", 499)


async def test_a_task_that_is_cancelled_as_its_slot_is_granted_gives_it_back(make_gateway: Make) -> None:
    gateway = make_gateway()
    request = gateway.ask()
    await request.client.wait(lambda: gateway.dispatcher.depth)
    link = gateway.link()
    assert link.active == 1
    request.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request.task
    assert link.active == 0


REFUSALS: list[tuple[dict[str, object], int, str]] = [
    ({"model": "nobody"}, 404, "MODEL_NOT_ALLOWED"),
    ({"model": "a\x00b"}, 400, "BAD_REQUEST"),
    ({"messages": []}, 400, "BAD_REQUEST"),
    ({"max_tokens": 10**40}, 400, "MAX_TOKENS_TOO_LARGE"),
    ({"max_tokens": 2**31}, 400, "MAX_TOKENS_TOO_LARGE"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, 400, "PROMPT_TOO_LARGE"),
]


@pytest.mark.parametrize(("fields", "status", "code"), REFUSALS, ids=lambda value: str(value)[:20])
async def test_a_refusal_is_said_and_recorded_and_harms_nobody(
    make_gateway: Make, fields: dict[str, Any], status: int, code: str
) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(**fields)
    await request.done()
    assert (request.client.status, request.error["code"]) == (status, code)
    assert await request.record("state", "status_code", "error_code") == ("rejected", status, code)
    other = gateway.ask()
    await other.served(link, ANSWER)
    assert await other.record("state") == ("completed",)
    assert gateway.records.is_healthy


async def test_many_requests_over_boxes_that_come_and_go_all_end_in_one_state(make_gateway: Make) -> None:
    gateway = make_gateway(max_queue=1000)
    requests = [gateway.ask(stream=number % 2 == 0) for number in range(120)]
    pending = {request.task for request in requests}
    turn = 0
    while pending:
        links = [link for link in gateway.registry if isinstance(link, FakeLink)]
        if len(links) < 3:
            links.append(gateway.link(slots=3))
        turn += 1
        for link in links:
            for stream in list(link.streams)[: 1 + turn % 3]:
                stream.answer(ANSWER)
        if turn % 7 == 0:
            gateway.registry.remove(links[turn % len(links)])
        if turn % 5 == 0 and turn < 60:
            requests[turn].client.leave()
        await asyncio.sleep(0.001)
        pending = {task for task in pending if not task.done()}
    await asyncio.gather(*(request.task for request in requests))
    async with asyncio.timeout(30):
        while gateway.records.pending:
            await asyncio.sleep(0.005)
    await gateway.records.stop()
    states = [state for (state,) in gateway.rows.execute("SELECT state FROM gateway_requestrecord").fetchall()]
    assert len(states) == 120
    assert set(states) <= {"completed", "cancelled", "interrupted"}
    assert states.count("completed") > 80


Story = Callable[[Gateway], Awaitable[None]]
BODY_BYTES = 1_000_000
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


@pytest.fixture
async def gateway(rows: Rows) -> AsyncIterator[Gateway]:
    """A gateway whose queue is short and whose patience is too."""
    made = Gateway(rows, max_queue=1, limits=GatewayLimits(queue_s=0.2, no_node_wait_s=0.1, request_s=30.0))
    yield made
    await made.records.stop()


def ask(gateway: Gateway, key: str = "", /, **fields: Any) -> Request:
    """Send a request with a large field that nobody reads."""
    return gateway.ask(key, **{"padding": "x" * BODY_BYTES, **fields})


async def begin(gateway: Gateway, **fields: Any) -> tuple[Request, FakeStream]:
    link = gateway.link()
    request = ask(gateway, **fields)
    return request, await request.on(link)


async def finishes(gateway: Gateway) -> None:
    request, stream = await begin(gateway)
    stream.answer(ANSWER)
    await request.done()


async def is_over_a_cap(gateway: Gateway) -> None:
    await ask(gateway, max_tokens=101).done()


async def cannot_be_translated(gateway: Gateway) -> None:
    gateway.link("m", paths={"/v1/chat/completions"})
    await ask(gateway, surface=MESSAGES, max_tokens=5, messages=[{"role": "king", "content": "a"}]).done()


async def finds_the_queue_full(gateway: Gateway) -> None:
    first, second = ask(gateway), ask(gateway)
    await asyncio.gather(first.done(), second.done())


async def leaves_in_the_middle(gateway: Gateway) -> None:
    request, stream = await begin(gateway, stream=True)
    stream.answer(CHUNK, headers=SSE, ends=False)
    request.client.leave()
    await request.done()


async def loses_its_box_in_the_middle(gateway: Gateway) -> None:
    request, stream = await begin(gateway, stream=True)
    stream.answer(CHUNK, headers=SSE, ends=False)
    stream.end(EndKind.LINK_LOST)
    await request.done()


async def gets_a_translated_answer_that_breaks(gateway: Gateway) -> None:
    link = gateway.link("m", paths={"/v1/chat/completions"})
    request = ask(gateway, surface=MESSAGES, max_tokens=5, stream=True)
    stream = await request.on(link)
    stream.answer(CHUNK, b"data: nonsense\n\n", headers=SSE)
    await request.done()


STORIES: list[Story] = [
    finishes, is_over_a_cap, cannot_be_translated, finds_the_queue_full, leaves_in_the_middle, loses_its_box_in_the_middle,
    gets_a_translated_answer_that_breaks,
]  # fmt: skip


def list_rings() -> list[str]:
    """Collect, and name the kinds of objects by which large texts or bytes were held that nobody could reach any more."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        holders = [
            type(holder).__name__
            for holder in gc.garbage
            if any(isinstance(one, bytes | str) and len(one) >= BODY_BYTES for one in gc.get_referents(holder))
        ]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
    return holders


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
async def test_nothing_of_a_request_is_left_when_it(gateway: Gateway, story: Story) -> None:
    gc.collect()
    gc.disable()
    try:
        await story(gateway)
        await asyncio.sleep(0)
        assert list_rings() == []
    finally:
        gc.enable()
