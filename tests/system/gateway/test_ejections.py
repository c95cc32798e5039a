"""Bad nodes beside good ones, through the whole life of requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from gateway.canary import Canaries
from nodes.links import EndKind
from nodes.links.ejections import Fault
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.pipeline import ANSWER, SSE, Gateway, Make

Behaviour = Callable[[FakeStream], None]
GOOD: Behaviour = lambda stream: stream.answer(ANSWER)  # noqa: E731 - beside its like
CHUNK = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


def cut(stream: FakeStream) -> None:
    stream.answer(CHUNK, headers=SSE)


def lie_about_capacity(stream: FakeStream) -> None:
    stream.end(EndKind.ENGINE_FAILED, retryable=True)


async def send(gateway: object, behaviours: dict[FakeLink, Behaviour], *, streams: bool) -> tuple[int, FakeLink]:
    """Send one request, and have the nodes that get it answer it; return its status and who got it first."""
    request = gateway.ask(stream=streams)  # type: ignore[attr-defined]  # Gateway of test_pipeline
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


def stream_whole(stream: FakeStream) -> None:
    stream.answer(CHUNK, b"data: [DONE]\n\n", headers=SSE)


@pytest.mark.parametrize(
    ("behave", "streams"),
    [
        (lambda stream: stream.answer(b'{"error":{"message":"oom"}}', status=500), False),
        (cut, True),
        (lie_about_capacity, False),
    ],
    ids=["errors", "cut streams", "thousand slots that all fail"],
)
async def test_a_node_that_fails_loses_its_share_and_callers_get_answers(
    make_gateway: Make, behave: Behaviour, *, streams: bool
) -> None:
    gateway = make_gateway()
    good, bad = gateway.link(slots=4), gateway.link(slots=1000)
    behaviours = {good: stream_whole if streams else GOOD, bad: behave}
    for _ in range(14):
        await send(gateway, behaviours, streams=streams)
    ends = [await send(gateway, behaviours, streams=streams) for _ in range(20)]
    assert sum(first is bad for _status, first in ends) <= 3, "one probe after ten seconds, and ever fewer"
    assert {status for status, first in ends if first is good} == {200}
    assert [ejection.node_id for ejection in gateway.registry.ejections] == [bad.node_id]


async def test_one_request_that_kills_every_node_it_meets_ejects_none(make_gateway: Make) -> None:
    gateway = make_gateway()
    links = [gateway.link(slots=4) for _ in range(4)]
    good = dict.fromkeys(links, GOOD)
    for _ in range(12):
        await send(gateway, good, streams=False)
    for _ in range(6):
        await send(gateway, dict.fromkeys(links, lie_about_capacity), streams=False)
    assert list(gateway.registry.ejections) == []
    ends = [await send(gateway, good, streams=False) for _ in range(12)]
    assert {status for status, _first in ends} == {200}
    assert {first for _status, first in ends} == set(links)


FOREVER_S = 1e6


class Asker:
    """A gateway that asks the nodes of ``m`` what 17 times 3 is."""

    def __init__(self, gateway: Gateway, *, interval_s: float = 300.0) -> None:
        self.gateway = gateway
        entry = gateway.catalogue.models["m"]
        gateway.catalogue.apply_models([replace(entry, canary_question="What is 17 times 3?", canary_answer="51")])
        self.canaries = Canaries(
            gateway_id=gateway.gateway_id,
            registry=gateway.registry,
            dispatcher=gateway.dispatcher,
            catalogue=gateway.catalogue,
            records=gateway.records,
            interval_s=interval_s,
        )

    async def ask(self, link: FakeLink) -> FakeStream:
        """Ask one node and return the question as it has it; ``told`` is done when its answer was judged."""
        self.told = asyncio.create_task(self.canaries.ask(link, self.gateway.catalogue.models["m"]))
        async with asyncio.timeout(30):
            while not link.streams:
                await asyncio.sleep(0)
        return link.streams[0]

    async def hear(self, link: FakeLink, text: str) -> None:
        (await self.ask(link)).answer(json.dumps({"choices": [{"message": {"content": text}}]}).encode())
        await self.told

    @property
    def faults(self) -> dict[str, Fault]:
        links = {link.node_id: link.node_name for link in self.gateway.registry}
        return {links[one.node_id]: one.fault for one in self.gateway.registry.ejections}


async def test_a_lying_node_gets_no_requests_until_it_answers_rightly_and_the_honest_one_gets_them(make_gateway: Make) -> None:
    gateway = make_gateway()
    honest, liar = gateway.link(slots=4), gateway.link(slots=4)
    asker = Asker(gateway)
    await asker.hear(honest, "17 times 3 is 51.")
    await asker.hear(liar, "I am happy to help!")
    assert asker.faults == {liar.node_name: Fault.WRONG}
    firsts = {(await send(gateway, {honest: GOOD, liar: GOOD}, streams=False))[1] for _ in range(10)}
    assert firsts == {honest}
    await asker.hear(liar, "It is 51")
    firsts = {(await send(gateway, {honest: GOOD, liar: GOOD}, streams=False))[1] for _ in range(10)}
    assert firsts == {honest, liar}


@pytest.mark.parametrize("end", ["refused", "failed", "busy", "lost"])
async def test_a_node_that_is_down_or_refuses_is_no_liar(make_gateway: Make, end: str) -> None:
    gateway = make_gateway()
    gateway.link()
    link = gateway.link()
    asker = Asker(gateway)
    stream = await asker.ask(link)
    if end == "refused":
        stream.answer(b'{"error":{"message":"no"}}', status=500)
    elif end == "lost":
        gateway.registry.remove(link)
    else:
        stream.end(EndKind.BUSY if end == "busy" else EndKind.ENGINE_FAILED)
    await asker.told
    assert asker.faults == {}
    assert link.active == 0


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
    assert said.tenant
    assert said.tenant != expected.tenant
    assert said.request_id.startswith("req_")
    body = json.loads(said.body)
    assert (body["temperature"], body["max_tokens"]) == (0, 64)
    stream.answer(b'{"choices":[{"message":{"content":"51"}}],"usage":{"prompt_tokens":7,"completion_tokens":2}}')
    await asker.told
    async with asyncio.timeout(30):
        while not (
            rows := gateway.rows.execute(
                "SELECT tenant, state, prompt_tokens FROM gateway_requestrecord WHERE key_name = 'canary'"
            ).fetchall()
        ):
            await asyncio.sleep(0.005)
    assert rows == [("", "completed", 7)]


async def test_only_a_node_with_a_free_slot_whose_time_has_come_is_asked(make_gateway: Make) -> None:
    gateway = make_gateway()
    link, full = gateway.link(slots=2), gateway.link(slots=1)
    asker = Asker(gateway)
    now = time.monotonic()
    assert len(asker.canaries.list_due(now)) == 0, "the first question comes at random"
    full.external_load = 1
    due = asker.canaries.list_due(now + 300)
    assert [link for link, _entry in due] == [link]
    await asker.hear(link, "51")
    assert asker.canaries.list_due(now + 140) == []
    asker.gateway.catalogue.apply_models([replace(asker.gateway.catalogue.models["m"], canary_question="")])
    assert asker.canaries.list_due(now + FOREVER_S) == [], "off by default"
