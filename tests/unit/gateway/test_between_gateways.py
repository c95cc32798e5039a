"""What crosses from one gateway to another, and which headers of a box: names in any script, large bodies, nothing made up."""

from __future__ import annotations

import asyncio

from core.limits import GatewayLimits
from gateway.dialects import SURFACES
from gateway.heads import render_head
from gateway.peer import serve_peer
from nodes.links.http import END_HEADER
from nodes.states import POOL_RESPONSES
from tests.fakes.asgi_client import MemoryClient
from tests.unit.gateway.test_dispatch import CHAT, Floor


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
