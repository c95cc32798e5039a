"""The life of a request from its bytes to its record, over boxes played by the test; bad boxes beside good ones."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from gateway.canary import Canaries
from nodes.links import EndKind
from nodes.links.ejections import Fault
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import ANSWER, MESSAGES, SSE, Gateway, Make, Request
from tests.fakes.waiting import eventually


@pytest.mark.parametrize("streams", [True, False])
async def test_the_last_bytes_wait_until_the_records_end_is_sent_and_never_long(make_gateway: Make, *, streams: bool) -> None:
    gateway = make_gateway()
    link = gateway.link(slots=2)
    first, second = requests = gateway.ask(stream=streams), gateway.ask(stream=streams)
    await first.client.wait(lambda: len(link.streams) == 2)

    def list_states() -> set[object]:
        return {row[0] for row in gateway.rows.execute("SELECT state FROM gateway_requestrecord").fetchall()}

    await eventually(lambda: list_states() == {"running"})
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
    await eventually(lambda: list_states() == {"completed"})


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


Story = Callable[[Gateway], Awaitable[None]]
BODY_BYTES = 1_000_000
PIECE = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


async def begin(gateway: Gateway) -> tuple[Request, FakeStream]:
    request = gateway.ask(stream=True, padding="x" * BODY_BYTES)
    return request, await request.on(gateway.link())


async def leaves_in_the_middle(gateway: Gateway) -> None:
    request, stream = await begin(gateway)
    stream.answer(PIECE, headers=SSE, ends=False)
    request.client.leave()
    await request.done()


async def loses_its_box_in_the_middle(gateway: Gateway) -> None:
    request, stream = await begin(gateway)
    stream.answer(PIECE, headers=SSE, ends=False)
    stream.end(EndKind.LINK_LOST)
    await request.done()


async def gets_a_translated_answer_that_breaks(gateway: Gateway) -> None:
    request = gateway.ask(surface=MESSAGES, max_tokens=5, stream=True, padding="x" * BODY_BYTES)
    await request.served(gateway.link(paths={"/v1/chat/completions"}), PIECE, b"data: nonsense\n\n", headers=SSE)


STORIES: list[Story] = [leaves_in_the_middle, loses_its_box_in_the_middle, gets_a_translated_answer_that_breaks]


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
async def test_nothing_of_a_request_is_left_when_it(make_gateway: Make, story: Story) -> None:
    gateway = make_gateway()
    gc.collect()
    gc.disable()
    try:
        await story(gateway)
        await asyncio.sleep(0)
        assert list_rings() == []
    finally:
        gc.enable()


Behaviour = Callable[[FakeStream], None]
GOOD: Behaviour = lambda stream: stream.answer(ANSWER)  # noqa: E731 - beside its like


def lie_about_capacity(stream: FakeStream) -> None:
    stream.end(EndKind.ENGINE_FAILED, retryable=True)


async def send(gateway: Gateway, behaviours: dict[FakeLink, Behaviour], *, streams: bool = False) -> tuple[int, FakeLink]:
    """Send one request, and have the nodes that get it answer it; return its status and who got it first."""
    request = gateway.ask(stream=streams)
    first: FakeLink | None = None
    while not request.task.done():
        await request.client.wait(lambda: request.task.done() or any(link.streams for link in behaviours))
        for link, behave in behaviours.items():
            if link.streams:
                first = first or link
                behave(link.streams[0])
    await request.done()
    assert first is not None
    return request.client.status, first


@pytest.mark.parametrize(
    ("behave", "streams"),
    [
        (lambda stream: stream.answer(b'{"error":{"message":"oom"}}', status=500), False),
        (lambda stream: stream.answer(PIECE, headers=SSE), True),
        (lie_about_capacity, False),
    ],
    ids=["errors", "cut streams", "thousand slots that all fail"],
)
async def test_a_node_that_fails_loses_its_share_and_callers_get_answers(
    make_gateway: Make, behave: Behaviour, *, streams: bool
) -> None:
    gateway = make_gateway()
    good, bad = gateway.link(slots=4), gateway.link(slots=1000)
    whole: Behaviour = lambda stream: stream.answer(PIECE, b"data: [DONE]\n\n", headers=SSE)  # noqa: E731  # as GOOD
    behaviours = {good: whole if streams else GOOD, bad: behave}
    ends = [await send(gateway, behaviours, streams=streams) for _ in range(34)][14:]
    assert sum(first is bad for _status, first in ends) <= 3, "one probe after ten seconds, and ever fewer"
    assert {status for status, first in ends if first is good} == {200}
    assert [ejection.node_id for ejection in gateway.registry.ejections] == [bad.node_id]


async def test_one_request_that_kills_every_node_it_meets_ejects_none(make_gateway: Make) -> None:
    gateway = make_gateway()
    links = [gateway.link(slots=4) for _ in range(4)]
    good, poison = dict.fromkeys(links, GOOD), dict.fromkeys(links, lie_about_capacity)
    for behaviours, count in ((good, 12), (poison, 6)):
        for _ in range(count):
            await send(gateway, behaviours)
    assert list(gateway.registry.ejections) == []
    ends = [await send(gateway, good) for _ in range(12)]
    assert ({status for status, _ in ends}, {first for _, first in ends}) == ({200}, set(links))


class Asker:
    """A gateway that asks the nodes of ``m`` what 17 times 3 is."""

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        entry = gateway.catalogue.models["m"]
        gateway.catalogue.apply_models([replace(entry, canary_question="What is 17 times 3?", canary_answer="51")])
        self.canaries = Canaries(
            gateway_id=gateway.gateway_id, registry=gateway.registry, dispatcher=gateway.dispatcher,
            catalogue=gateway.catalogue, records=gateway.records, interval_s=300.0,
        )  # fmt: skip

    async def ask(self, link: FakeLink) -> FakeStream:
        """Ask one node and return the question as it has it; ``told`` is done when its answer was judged."""
        self.told = asyncio.create_task(self.canaries.ask(link, self.gateway.catalogue.models["m"]))
        await eventually(lambda: link.streams)
        return link.streams[0]

    async def hear(self, link: FakeLink, text: str) -> None:
        (await self.ask(link)).answer(json.dumps({"choices": [{"message": {"content": text}}]}).encode())
        await self.told

    @property
    def faults(self) -> list[tuple[object, Fault]]:
        return [(one.node_id, one.fault) for one in self.gateway.registry.ejections]


async def test_a_lying_node_gets_no_requests_until_it_answers_rightly_and_the_honest_one_gets_them(make_gateway: Make) -> None:
    gateway = make_gateway()
    honest, liar = gateway.link(slots=4), gateway.link(slots=4)
    asker, both = Asker(gateway), {honest: GOOD, liar: GOOD}
    await asker.hear(honest, "17 times 3 is 51.")
    await asker.hear(liar, "I am happy to help!")
    assert asker.faults == [(liar.node_id, Fault.WRONG)]
    assert {(await send(gateway, both))[1] for _ in range(10)} == {honest}
    await asker.hear(liar, "It is 51")
    assert {(await send(gateway, both))[1] for _ in range(10)} == {honest, liar}


@pytest.mark.parametrize("end", ["refused", EndKind.ENGINE_FAILED, EndKind.BUSY, "lost"])
async def test_a_node_that_is_down_or_refuses_is_no_liar(make_gateway: Make, end: EndKind | str) -> None:
    gateway = make_gateway()
    gateway.link()
    link, asker = gateway.link(), Asker(gateway)
    stream = await asker.ask(link)
    if isinstance(end, EndKind):
        stream.end(end)
    elif end == "lost":
        gateway.registry.remove(link)
    else:
        stream.answer(b'{"error":{"message":"no"}}', status=500)
    await asker.told
    assert (asker.faults, link.active) == ([], 0)


async def test_a_question_looks_like_any_request_and_is_in_nobodys_books(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    usual = gateway.ask()
    expected = (await usual.on(link)).request
    link.streams[0].answer(b'{"choices":[]}')
    await usual.done()
    asker = Asker(gateway)
    stream = await asker.ask(link)
    said = stream.request
    assert (said.path, said.headers, said.priority) == (expected.path, expected.headers, expected.priority)
    assert (bool(said.tenant), said.tenant != expected.tenant, said.request_id[:4]) == (True, True, "req_")
    body = json.loads(said.body)
    assert (body["temperature"], body["max_tokens"]) == (0, 64)
    stream.answer(b'{"choices":[{"message":{"content":"51"}}],"usage":{"prompt_tokens":7,"completion_tokens":2}}')
    await asker.told
    written = "SELECT tenant, state, prompt_tokens FROM gateway_requestrecord WHERE key_name = 'canary'"
    assert await eventually(lambda: gateway.rows.execute(written).fetchall()) == [("", "completed", 7)]


async def test_only_a_node_with_a_free_slot_whose_time_has_come_is_asked(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, full = gateway.link(slots=2), gateway.link(slots=1)
    asker, now = Asker(gateway), time.monotonic()
    assert len(asker.canaries.list_due(now)) == 0, "the first question comes at random"
    full.external_load = 1
    assert [due for due, _entry in asker.canaries.list_due(now + 300)] == [link]
    await asker.hear(link, "51")
    assert asker.canaries.list_due(now + 140) == []
    gateway.catalogue.apply_models([replace(gateway.catalogue.models["m"], canary_question="")])
    assert asker.canaries.list_due(now + 1e6) == [], "off by default"
