"""Which box, and in whose words: native paths before translated ones, prospects of a model, preferences."""

from __future__ import annotations

import asyncio

import pytest

from gateway.errors import EndpointNotAnswered, NoAvailableNode, NodeDraining
from gateway.outlook import Busy, Closed, Ready
from gateway.values import InferenceRequest, PoolOptions, Timeouts
from tests.unit.gateway.test_dispatch import CHAT, EMBED, Floor, fails

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


async def test_a_box_that_speaks_chat_alone_is_asked_there_for_messages_and_responses() -> None:
    floor = Floor()
    link = floor.link("m", m={CHAT})
    for endpoint in (MESSAGES, RESPONSES):
        assert floor.take(endpoint=endpoint).link is link
        link.active = 0
        assert link.find_path("m", endpoint) == CHAT
        assert floor.dispatcher.needs_translation("m", endpoint=endpoint, lane=endpoint)


async def test_a_box_that_speaks_the_clients_path_is_asked_on_it() -> None:
    floor = Floor()
    link = floor.link("m", m={CHAT, MESSAGES})
    assert link.find_path("m", MESSAGES) == MESSAGES
    assert not floor.dispatcher.needs_translation("m", endpoint=MESSAGES, lane=MESSAGES)
    assert link.find_path("m", EMBED) is None
    with pytest.raises(EndpointNotAnswered):
        floor.dispatcher.check_room("m", EMBED, 10)


async def test_boxes_that_speak_the_clients_path_come_first_and_the_others_when_those_are_full() -> None:
    floor = Floor()
    plain, native = floor.link("m", slots=2, m={CHAT}), floor.link("m", slots=2, m={CHAT, MESSAGES})
    leases = [floor.take(endpoint=MESSAGES) for _ in range(4)]
    assert [lease.link for lease in leases] == [native, native, plain, plain]


async def test_a_box_that_declares_nothing_is_asked_natively_until_it_says_that_it_does_not_know_the_path() -> None:
    floor = Floor()
    link = floor.link("m")
    assert link.find_path("m", MESSAGES) == MESSAGES
    floor.dispatcher.note_unspoken(link, "m", MESSAGES)
    assert link.find_path("m", MESSAGES) == CHAT
    assert link.find_path("m", RESPONSES) == RESPONSES
    assert floor.take(endpoint=MESSAGES).link is link


async def test_what_serves_one_model_of_a_box_says_nothing_of_what_serves_the_others() -> None:
    floor = Floor()
    link = floor.link("m", "n", m={CHAT, MESSAGES}, n={CHAT, MESSAGES})
    floor.dispatcher.note_unspoken(link, "m", MESSAGES)
    assert (link.find_path("m", MESSAGES), link.find_path("n", MESSAGES)) == (CHAT, MESSAGES)


async def test_what_is_translated_waits_for_the_same_slots_as_what_is_not() -> None:
    floor = Floor()
    floor.link("m", m={CHAT})
    lease = floor.take()
    waiting = floor.queue(endpoint=MESSAGES)
    lease.release()
    assert (await waiting).link is lease.link


async def test_the_outlook_tells_free_from_full_from_closed() -> None:
    floor = Floor()
    assert isinstance(floor.dispatcher.outlook("m", CHAT), Closed)
    link = floor.link("m", slots=2)
    assert floor.dispatcher.outlook("m", CHAT) == Ready()
    leases = [floor.take(), floor.take()]
    assert floor.dispatcher.outlook("m", CHAT) == Busy(0.0)
    floor.dispatcher.note_held("m", 8.0)
    assert floor.dispatcher.outlook("m", CHAT) == Busy(4.0)
    waiting = floor.queue()
    assert floor.dispatcher.outlook("m", CHAT) == Busy(8.0)
    waiting.cancel()
    link.policy.draining = True
    found = floor.dispatcher.outlook("m", CHAT)
    assert isinstance(found, Closed)
    assert isinstance(found.error, NodeDraining)
    for lease in leases:
        lease.release()


async def test_how_long_a_slot_is_held_follows_what_is_measured() -> None:
    floor = Floor()
    floor.link("m")
    for _ in range(100):
        floor.dispatcher.note_held("m", 2.0)
    lease = floor.take()
    found = floor.dispatcher.outlook("m", CHAT)
    assert isinstance(found, Busy)
    assert found.wait_s == pytest.approx(2.0)
    lease.release()


async def test_models_rank_by_free_room_and_only_where_the_path_is_answered() -> None:
    floor = Floor()
    floor.link("small", slots=1)
    floor.link("large", slots=4)
    floor.link("vectors", slots=9, vectors={EMBED})
    floor.link("away", slots=9).policy.cordoned = True
    assert floor.dispatcher.rank_models(["small", "large", "vectors", "away", "unknown"], CHAT) == ["large", "small"]
    for _ in range(4):
        floor.take("large")
    assert floor.dispatcher.rank_models(["large", "small"], CHAT) == ["small", "large"]


async def test_a_preferred_box_is_taken_while_it_has_room_and_nothing_waits_for_it_otherwise() -> None:
    floor = Floor()
    other, liked = floor.link("m", slots=2), floor.link("m")
    options = PoolOptions(prefer_gpu=liked.node_name)
    request = InferenceRequest(
        endpoint=CHAT, model="m", is_streaming=False, max_tokens=None, prompt_chars=1, body=b"{}", headers={}, options=options
    )

    def ask() -> object:
        job = floor.dispatcher.new_job(request_id="r", request=request, tenant="t", max_queue=9)
        found = floor.dispatcher.acquire(job)
        return getattr(found, "link", None)

    assert [ask(), ask(), ask()] == [liked, other, other]


async def test_a_client_waits_no_longer_than_it_said() -> None:
    floor = Floor(Timeouts(queue_s=30, no_node_wait_s=20))
    floor.link("m").policy.draining = True
    request = InferenceRequest(
        endpoint=CHAT, model="m", is_streaming=False, max_tokens=None, prompt_chars=1, body=b"{}", headers={},
        options=PoolOptions(max_latency_ms=10),
    )  # fmt: skip
    found = floor.dispatcher.acquire(floor.dispatcher.new_job(request_id="r", request=request, tenant="t", max_queue=9))
    assert isinstance(found, asyncio.Future)
    assert isinstance(await fails(found), NoAvailableNode)
