"""What a request held is free once it is over: nothing of it waits in a ring of references for the collector to come by.

The gateway's collector comes by seldom, for it would only find what lives as long as the process. A body is up to 32 MiB.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import psycopg
import pytest

from core.limits import GatewayLimits
from gateway.dialects import SURFACES
from nodes.links import EndKind
from tests.system.gateway.test_pipeline import ANSWER, SSE, Gateway, Request
from tests.unit.nodes.link_fakes import FakeStream

pytestmark = pytest.mark.timeout(180)  # above the sum of the waits and the start of a server
Rows = psycopg.Connection[tuple[object, ...]]
Story = Callable[[Gateway], Awaitable[None]]
BODY_BYTES = 1_000_000
CHUNK = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
MESSAGES = SURFACES["/v1/messages"]


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


async def has_no_key(gateway: Gateway) -> None:
    await ask(gateway, "mst_wrong").done()


async def is_not_json(gateway: Gateway) -> None:
    await ask(gateway, max_tokens="many").done()


async def names_an_unknown_model(gateway: Gateway) -> None:
    await ask(gateway, model="unknown").done()


async def is_over_a_cap(gateway: Gateway) -> None:
    await ask(gateway, max_tokens=101).done()


async def cannot_be_translated(gateway: Gateway) -> None:
    gateway.link("m", paths={"/v1/chat/completions"})
    await ask(gateway, surface=MESSAGES, max_tokens=5, messages=[{"role": "king", "content": "a"}]).done()


async def finds_no_box(gateway: Gateway) -> None:
    await ask(gateway).done()


async def finds_the_queue_full(gateway: Gateway) -> None:
    first, second = ask(gateway), ask(gateway)
    await asyncio.gather(first.done(), second.done())


async def leaves_the_queue(gateway: Gateway) -> None:
    request = ask(gateway)
    await request.client.wait(lambda: gateway.dispatcher.depth)
    request.client.leave()
    await request.done()


async def leaves_before_the_first_byte(gateway: Gateway) -> None:
    request, _ = await begin(gateway)
    request.client.leave()
    await request.done()


async def leaves_in_the_middle(gateway: Gateway) -> None:
    request, stream = await begin(gateway, stream=True)
    stream.answer(CHUNK, headers=SSE, ends=False)
    request.client.leave()
    await request.done()


async def loses_its_box(gateway: Gateway) -> None:
    request, stream = await begin(gateway)
    gateway.registry.remove(stream.link)
    await request.done()


async def loses_its_box_in_the_middle(gateway: Gateway) -> None:
    request, stream = await begin(gateway, stream=True)
    stream.answer(CHUNK, headers=SSE, ends=False)
    stream.end(EndKind.LINK_LOST)
    await request.done()


async def is_refused_by_the_engine(gateway: Gateway) -> None:
    request, stream = await begin(gateway)
    stream.answer(b'{"error":{"message":"no"}}', status=400)
    await request.done()


async def gets_an_impossible_answer(gateway: Gateway) -> None:
    request, stream = await begin(gateway)
    stream.sink.on_head(700, {})
    await request.done()


async def gets_a_translated_answer_that_breaks(gateway: Gateway) -> None:
    link = gateway.link("m", paths={"/v1/chat/completions"})
    request = ask(gateway, surface=MESSAGES, max_tokens=5, stream=True)
    stream = await request.on(link)
    stream.answer(CHUNK, b"data: nonsense\n\n", headers=SSE)
    await request.done()


STORIES: list[Story] = [
    finishes, has_no_key, is_not_json, names_an_unknown_model, is_over_a_cap, cannot_be_translated, finds_no_box,
    finds_the_queue_full, leaves_the_queue, leaves_before_the_first_byte, leaves_in_the_middle, loses_its_box,
    loses_its_box_in_the_middle, is_refused_by_the_engine, gets_an_impossible_answer, gets_a_translated_answer_that_breaks,
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
