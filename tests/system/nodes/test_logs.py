"""The log of a node: asked through the gateway that holds its socket, told once, noted in the audit log, and soon forgotten."""

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

from nodes.errors import NodeNotFound
from nodes.models import Node, NodeLog
from nodes.services.logs import LogState, LogView, ask_log, forget_logs, read_log
from tests.fakes.limits import set_limits
from tests.fakes.links import Door, NodeSocket, dial, enrol, hello
from tests.fakes.nodes import ACTOR, audited, make_node, make_presence
from tests.fakes.waiting import eventually
from wire import bridge

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
async def _limits_and_connections() -> AsyncIterator[None]:
    set_limits(core={"database_s": 30.0}, nodes={"channel_sweep_s": 0.05, "channel_hint_pause_s": 0.01, "log_ask_s": 0.0})
    yield
    await sync_to_async(connections.close_all)()


@asynccontextmanager
async def linked(**said: Any) -> AsyncIterator[tuple[Door, NodeSocket]]:
    """A gateway at work, and a node on its socket."""
    door = Door()
    task = asyncio.create_task(door.channel.run())
    _, secret = await enrol("rig", max_nodes=1)
    try:
        async with dial(door, secret) as socket:
            socket.say(hello("rig", **said))
            await socket.acknowledged()
            yield door, socket
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def queries(socket: NodeSocket) -> list[bridge.LogQuery]:
    return [message for message in socket.messages if isinstance(message, bridge.LogQuery)]


@sync_to_async
def ask() -> None:
    ask_log(node_id=Node.objects.get().pk, actor=ACTOR)


@sync_to_async
def read() -> LogView:
    return read_log(Node.objects.select_related("presence").get())


async def until(state: LogState) -> LogView:
    async def found() -> LogView | None:
        seen = await read()
        return seen if seen.state is state else None

    async with asyncio.timeout(30):
        while (seen := await found()) is None:
            await asyncio.sleep(0.01)
    return seen


async def test_who_opens_the_log_sees_the_last_lines_of_the_node_and_stands_in_the_audit_log() -> None:
    async with linked(tells_log=True) as (_door, socket):
        assert (await read()).state is LogState.UNASKED
        await ask()
        await eventually(lambda: queries(socket))
        (query,) = queries(socket)
        long = "x" * 1_000
        lines = [bridge.LogLine(at_ms=1, level="error", text=long), bridge.LogLine(at_ms=2, level="odd", text="a\x00b")]
        socket.say(bridge.LogTail(query_id=str(uuid.uuid4()), lines=[bridge.LogLine(at_ms=1, level="info", text="unasked")]))
        socket.say(bridge.LogTail(query_id=query.query_id, lines=lines, left_out=3))
        seen = await until(LogState.TOLD)
        assert [(line.level, len(line.text)) for line in seen.lines] == [("error", 400), ("info", 3)]
        assert "\x00" not in seen.lines[1].text
        assert seen.left_out == 3
        (event,) = await sync_to_async(audited)("node.read_log")
        assert (event.actor, event.detail) == (ACTOR, {"name": "rig"})
        assert len(queries(socket)) == 1, "what was answered is not asked again"


@pytest.mark.parametrize("version", [bridge.MUSTER_V1, bridge.BRIDGE_V1])
async def test_a_node_that_does_not_tell_its_log_is_sent_no_question(version: str) -> None:
    async with linked(version=version) as (_door, socket):
        await ask()
        await until(LogState.UNTOLD)
        assert queries(socket) == []
        assert socket.sent[-1]["type"] != "websocket.close"


async def test_a_flood_of_lines_is_cut_and_the_newest_stay() -> None:
    async with linked(tells_log=True) as (_door, socket):
        await ask()
        await eventually(lambda: queries(socket))
        many = [bridge.LogLine(at_ms=n, level="info", text=str(n)) for n in range(2_000)]
        socket.say(bridge.LogTail(query_id=queries(socket)[0].query_id, lines=many))
        seen = await until(LogState.TOLD)
        assert (len(seen.lines), seen.lines[-1].text) == (600, "1999")


async def test_a_question_within_seconds_of_another_asks_and_notes_nothing() -> None:
    set_limits(nodes={"log_ask_s": 60.0})
    async with linked(tells_log=True) as (_door, socket):
        for _ in range(3):
            await ask()
        await eventually(lambda: queries(socket))
        assert len(await sync_to_async(audited)("node.read_log")) == 1


def test_a_node_without_a_socket_or_an_answer_is_said_to_be_so_and_what_was_told_goes() -> None:
    gone = make_node("gone")
    make_presence(gone, connected=False)
    ask_log(node_id=gone.pk, actor=ACTOR)
    assert (read_log(gone).state, NodeLog.objects.count()) == (LogState.UNREACHABLE, 0)
    with pytest.raises(NodeNotFound):
        ask_log(node_id=uuid.uuid4(), actor=ACTOR)
    node = make_node("there", credential=gone.credential)
    make_presence(node)
    ask_log(node_id=node.pk, actor=ACTOR)
    assert read_log(node).state is LogState.ASKED
    NodeLog.objects.update(asked_at=F("asked_at") - timedelta(seconds=16))
    assert (read_log(node).state, forget_logs()) == (LogState.SILENT, 0)
    NodeLog.objects.update(asked_at=F("asked_at") - timedelta(minutes=10))
    assert (forget_logs(), read_log(node).state) == (1, LogState.UNASKED)
