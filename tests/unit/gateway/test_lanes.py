"""Which model, which box and in whose words: native paths before translated ones, prospects, loads, preferences."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import GatewayLimits
from gateway.dialects import SURFACES
from gateway.errors import NoAvailableNode, NodeDraining
from gateway.heads import render_head
from gateway.outlook import Busy, Closed, Outlook, Ready, pick_name
from gateway.peer import serve_peer
from gateway.placement import choose_link
from gateway.values import InferenceRequest, PoolOptions
from nodes.links.http import END_HEADER
from nodes.states import POOL_RESPONSES
from tests.fakes.asgi_client import MemoryClient
from tests.unit.gateway.test_dispatch import CHAT, EMBED, Floor

MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


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


async def test_a_path_a_box_did_not_know_is_tried_again_after_a_while_and_when_the_box_changes() -> None:
    floor = Floor()
    link = floor.link("m")
    floor.dispatcher.note_unspoken(link, "m", MESSAGES)
    assert link.find_path("m", MESSAGES) == CHAT
    floor.registry.update_models(link, frozenset({"m", "n"}))
    assert link.find_path("m", MESSAGES) == MESSAGES
    floor.dispatcher.note_unspoken(link, "m", MESSAGES)
    link.unspoken["m", MESSAGES] = time.monotonic() - 1
    assert link.find_path("m", MESSAGES) == MESSAGES


CLOSED = Closed(NoAvailableNode())


@pytest.mark.parametrize(
    ("outlooks", "picked"),
    [
        ([CLOSED, Ready(), Ready()], "b"),
        ([Busy(1.0), Ready()], "a"),
        ([Busy(9.0), Busy(2.0), Ready()], "b"),
        ([Busy(9.0), CLOSED, Busy(8.0), Busy(8.5)], "c"),
        ([Busy(math.inf), CLOSED], "a"),
        ([CLOSED, Busy(8.0)], "b"),
        ([CLOSED, CLOSED], "a"),
    ],
)
def test_a_model_with_room_comes_first_then_one_that_answers_in_time_then_the_shortest_queue(
    outlooks: list[Outlook], picked: str
) -> None:
    assert pick_name(zip("abcd", outlooks, strict=False), budget_s=5.0) == picked


@dataclass(eq=False)
class Box:
    load: int
    last_served: int
    is_free: bool = True

    def can_take(self, now: float) -> bool:
        return self.is_free

    def is_called(self, name: str) -> bool:
        return name == f"box-{self.load}"


BOXES = st.lists(st.builds(Box, load=st.integers(0, 4), last_served=st.integers(0, 4), is_free=st.booleans()), max_size=8)


@given(boxes=BOXES, avoided=st.sets(st.integers(0, 7)))
def test_the_least_loaded_free_box_wins_and_ties_go_to_the_one_served_longest_ago(boxes: list[Box], avoided: set[int]) -> None:
    avoid = {box for index, box in enumerate(boxes) if index in avoided}
    chosen = choose_link(boxes, now=0.0, avoid=avoid)
    free = [box for box in boxes if box.is_free]
    preferred = [box for box in free if box not in avoid] or free
    if not preferred:
        assert chosen is None
        return
    assert chosen in preferred
    assert chosen is not None
    assert (chosen.load, chosen.last_served) == min((box.load, box.last_served) for box in preferred)


@given(BOXES, st.integers(0, 4))
def test_a_preferred_box_is_taken_while_it_is_free_and_is_no_condition(boxes: list[Box], load: int) -> None:
    found = choose_link(boxes, now=0.0, prefer=f"box-{load}")
    liked = [box for box in boxes if box.is_free and box.load == load]
    assert found in liked if liked else found is choose_link(boxes, now=0.0)


async def test_a_peer_names_model_and_tenant_in_any_script() -> None:
    floor = Floor()
    link = floor.link("модель")
    headers = {"x-muster-model": "модель", "x-muster-tenant": "大学", "x-muster-deadline-ms": "30000"}
    client = MemoryClient(headers={name: value.encode().decode("latin-1") for name, value in headers.items()})
    limits = GatewayLimits()
    serving = asyncio.create_task(
        serve_peer(dispatcher=floor.dispatcher, limits=limits, client=client.connection, link=link, surface=SURFACES[CHAT])
    )
    await client.wait(lambda: link.streams or serving.done())
    assert (link.streams[0].request.model, link.streams[0].request.tenant) == ("модель", "大学")
    link.streams[0].answer(b"{}")
    await serving


async def test_a_peer_may_send_a_conversation_that_was_kept_beside_the_largest_request() -> None:
    floor = Floor()
    link = floor.link("m")
    limits = GatewayLimits(max_body_bytes=100)
    headers = {"x-muster-model": "m", "x-muster-deadline-ms": "30000"}
    client = MemoryClient(headers=headers, body=[b"x" * 101], limits=limits)
    serving = asyncio.create_task(
        serve_peer(dispatcher=floor.dispatcher, limits=limits, client=client.connection, link=link, surface=SURFACES[CHAT])
    )
    await client.wait(lambda: link.streams or serving.done())
    assert link.streams[0].request.body == b"x" * 101
    link.streams[0].answer(b"{}")
    await serving


def test_no_box_speaks_for_a_gateway() -> None:
    said = {"content-type": "application/json", END_HEADER: "busy", "x-muster-anything": "1", "x-cache-hit": "1"}
    names = {name for name, _ in render_head(said, queue_ms=0, is_event_stream=False)}
    assert names == {b"content-type", b"x-cache-hit", b"x-queue-wait-ms"}


def test_headers_that_describe_the_engines_bytes_do_not_describe_ours() -> None:
    headers = {"content-type": "text/html", "content-encoding": "gzip", "etag": "x", "x-engine": "yes"}
    head = dict(render_head(headers, queue_ms=0, is_event_stream=False, content_type="application/json"))
    assert head[b"content-type"] == b"application/json"
    assert head[b"x-engine"] == b"yes"
    assert not {b"content-encoding", b"etag"} & set(head)
    assert dict(render_head(headers, queue_ms=0, is_event_stream=False))[b"content-encoding"] == b"gzip"


async def test_a_peer_may_ask_a_box_for_what_only_boxes_of_ours_answer() -> None:
    floor = Floor()
    link = floor.link("m", m={POOL_RESPONSES})
    client = MemoryClient(headers={"x-muster-model": "m", "x-muster-deadline-ms": "30000"})
    serving = asyncio.create_task(
        serve_peer(
            dispatcher=floor.dispatcher,
            limits=GatewayLimits(),
            client=client.connection,
            link=link,
            surface=SURFACES["/v1/responses"],
            lane=POOL_RESPONSES,
        )
    )
    await client.wait(lambda: link.streams or serving.done())
    assert link.streams[0].request.path == POOL_RESPONSES
    link.streams[0].answer(b"{}")
    await serving
    assert (client.status, client.body, link.active) == (200, b"{}", 0)
