"""Canary questions: a node that makes its answers up, beside an honest one."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace

import pytest

from gateway.canary import Canaries
from nodes.links import EndKind
from nodes.links.ejections import Fault
from tests.system.gateway.test_ejections import GOOD, send
from tests.system.gateway.test_pipeline import Gateway, Make, make_gateway
from tests.unit.nodes.link_fakes import FakeLink, FakeStream

__all__ = ["make_gateway"]
pytestmark = pytest.mark.timeout(180)
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
