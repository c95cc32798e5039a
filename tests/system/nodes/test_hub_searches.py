"""A search of a node's hub: asked through the gateway that holds its socket, shown once it answers, and soon forgotten."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.db.models import F
from django.test import Client

from nodes.errors import BadRequest, NodeNotFound
from nodes.models import HubSearch, Node
from nodes.services.hub import SearchState, SearchView, forget_searches, read_search, search_hub
from tests.fakes.governed_team import open_session
from tests.fakes.limits import set_limits
from tests.fakes.links import Door, NodeSocket, dial, enrol, hello
from tests.fakes.nodes import ACTOR, audited, make_node, make_operator, make_presence
from tests.fakes.waiting import eventually
from wire import bridge

pytestmark = pytest.mark.django_db(transaction=True)
PAGE = "/admin/gateway/model/catalogue/"


@pytest.fixture(autouse=True)
async def _limits_and_connections() -> AsyncIterator[None]:
    set_limits(core={"database_s": 30.0}, nodes={"channel_sweep_s": 0.05, "channel_hint_pause_s": 0.01})
    yield
    await sync_to_async(connections.close_all)()


@asynccontextmanager
async def linked(**said: Any) -> AsyncIterator[NodeSocket]:
    """A gateway at work, and a node on its socket."""
    door = Door()
    task = asyncio.create_task(door.channel.run())
    _, secret = await enrol("rig", max_nodes=1)
    try:
        async with dial(door, secret) as socket:
            socket.say(hello("rig", **said))
            await socket.acknowledged()
            yield socket
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def queries(socket: NodeSocket) -> list[bridge.HubQuery]:
    return [message for message in socket.messages if isinstance(message, bridge.HubQuery)]


@sync_to_async
def search(text: str = " qwen  3 ") -> None:
    Node.objects.filter(runner_id="").update(runner_id="rig#1")
    search_hub(node_id=Node.objects.get().pk, text=text, actor=ACTOR)


async def until(state: SearchState) -> SearchView:
    async with asyncio.timeout(30):
        while True:
            seen = await sync_to_async(lambda: read_search(Node.objects.get().pk))()
            if seen is not None and seen.state is state:
                return seen
            await asyncio.sleep(0.01)


async def test_a_node_says_what_its_hub_has_and_nothing_else_is_taken() -> None:
    async with linked(searches_hub=True) as socket:
        await search()
        await eventually(lambda: queries(socket))
        (query,) = queries(socket)
        assert query.text == "qwen 3"
        many = [bridge.HubModel(name=f"acme/m{n}", downloads=-n, files=["x.gguf"] * 99) for n in range(99)]
        socket.say(bridge.HubAnswer(query_id=str(uuid.uuid4()), models=[bridge.HubModel(name="un/asked")]))
        socket.say(bridge.HubAnswer(query_id=query.query_id, models=[bridge.HubModel(name="a\x00/b"), *many]))
        seen = await until(SearchState.FOUND)
        assert (seen.node, seen.text, len(seen.models)) == ("rig", "qwen 3", 19)
        assert (seen.models[0].name, seen.models[0].downloads, len(seen.models[0].files)) == ("acme/m0", 0, 24)
        assert [event.detail for event in await sync_to_async(audited)("node.search_hub")] == [{"name": "rig"}]


async def test_a_node_whose_hub_cannot_be_reached_says_why() -> None:
    async with linked(searches_hub=True) as socket:
        await search()
        await eventually(lambda: queries(socket))
        socket.say(bridge.HubAnswer(query_id=queries(socket)[0].query_id, error="The hub cannot be searched."))
        assert (await until(SearchState.FAILED)).error == "The hub cannot be searched."


@pytest.mark.parametrize("version", [bridge.MUSTER_V1, bridge.BRIDGE_V1])
async def test_a_node_that_does_not_search_is_sent_no_question(version: str) -> None:
    async with linked(version=version) as socket:
        await search()
        await until(SearchState.CANNOT)
        assert queries(socket) == []
        assert socket.sent[-1]["type"] != "websocket.close"


def test_what_nobody_can_be_asked_for_is_refused_and_searches_go() -> None:
    away, there = make_node("away", runner_id="away#1"), make_node("there", runner_id="there#1")
    make_presence(away, connected=False)
    make_presence(there)
    for node_id, text, words in (
        (away.pk, "qwen", "not connected"),
        (there.pk, "  ", "1 to 100"),
        (there.pk, "x" * 101, "1 to"),
    ):
        with pytest.raises(BadRequest, match=words):
            search_hub(node_id=node_id, text=text, actor=ACTOR)
    with pytest.raises(NodeNotFound):
        search_hub(node_id=uuid.uuid4(), text="qwen", actor=ACTOR)
    search_hub(node_id=there.pk, text="qwen", actor=ACTOR)
    HubSearch.objects.update(asked_at=F("asked_at") - timedelta(seconds=30))
    seen = read_search(there.pk)
    assert (seen.state if seen else None, forget_searches()) == (SearchState.SILENT, 0)
    HubSearch.objects.update(asked_at=F("asked_at") - timedelta(minutes=10))
    assert (read_search(there.pk), forget_searches(), read_search(there.pk)) == (None, 1, None)


STATES: dict[str, tuple[dict[str, Any], str]] = {
    "asked": ({}, "rig is searching for “qwen”…"),
    "found": ({"found": [{"name": "acme/qwen"}, {"name": "acme/parts", "files": ["a.gguf"], "is_gated": True}]}, "acme/qwen"),
    "nothing": ({"found": []}, "rig found nothing called “qwen” that it may fetch."),
    "failed": ({"error": "The hub cannot be searched."}, "rig says: The hub cannot be searched."),
    "cannot": ({"error": "cannot"}, "rig cannot search: its runner is of an older version"),
}


def read(client: Client, through: str) -> str:
    return client.get(PAGE, {"through": through, "q": "qwen"}).content.decode()


def test_the_catalogue_shows_how_far_a_search_is() -> None:
    client, node = open_session(make_operator()), make_node("rig", runner_id="rig#1")
    make_presence(node)
    sent = client.post(PAGE, {"text": "qwen", "through": node.printed_id})
    assert sent["Location"] == f"{PAGE}?q=qwen&through={node.printed_id}#hub"
    for changes, words in STATES.values():
        told_at = F("asked_at") if changes else None
        HubSearch.objects.update(**{"told_at": told_at, "error": "", "found": [], **changes})
        page = read(client, node.printed_id)
        assert words in page
        assert ("data-fast" in page) is (not changes)
    HubSearch.objects.update(error="", **STATES["found"][0])
    page = read(client, node.printed_id)
    assert "/admin/gateway/model/load/?model=acme%2Fqwen" in page
    assert '<option value="acme/parts/a.gguf">' in page
    assert "terms to accept on the hub" in page
    refused = client.post(PAGE, {"text": "qwen", "through": "nobody"}, follow=True).content.decode()
    assert "Choose a node that is to search." in refused
