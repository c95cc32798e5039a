"""Bad nodes beside good ones, through the whole life of requests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nodes.links import EndKind
from tests.system.gateway.test_pipeline import ANSWER, SSE, Make, make_gateway
from tests.unit.nodes.link_fakes import FakeLink, FakeStream

__all__ = ["make_gateway"]
pytestmark = pytest.mark.timeout(180)

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


async def test_what_callers_ask_wrongly_ejects_no_node(make_gateway: Make) -> None:
    gateway = make_gateway()
    first, second = gateway.link(slots=4), gateway.link(slots=4)
    wrong: Behaviour = lambda stream: stream.answer(b'{"error":{"message":"no such field"}}', status=400)  # noqa: E731
    for _ in range(20):
        await send(gateway, {first: GOOD, second: wrong}, streams=False)
    assert list(gateway.registry.ejections) == []


async def test_an_owner_who_takes_a_node_back_ejects_it_not(make_gateway: Make) -> None:
    gateway = make_gateway()
    first, second = gateway.link(slots=40), gateway.link(slots=40)
    for _ in range(12):
        await send(gateway, {first: GOOD, second: GOOD}, streams=False)
    requests = [gateway.ask(stream=True) for _ in range(20)]
    await requests[-1].client.wait(lambda: len(first.streams) + len(second.streams) == 20)
    for stream in [*first.streams, *second.streams]:
        stream.answer(CHUNK, headers=SSE, ends=False)
    second.policy.reclaimed = True
    second.end_streams(EndKind.RECLAIMED, "the owner took it back")
    for stream in list(first.streams):
        stream.sink.on_data(b"data: [DONE]\n\n")
        stream.end(EndKind.COMPLETE)
    for request in requests:
        await request.done()
    assert list(gateway.registry.ejections) == []
