"""The worker socket over real rows, driven through ASGI in memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, cast

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections
from pytest_django import Settings

import nodes.channel
from governance.models import AuditEvent
from nodes.channel import OwnerWish, presence_reports
from nodes.links import EndKind
from nodes.links.relay import RelayLink
from nodes.models import Node, NodeCredential, NodePresence
from nodes.services.credentials import change_provider_terms, disable_provider, find_credentials, revoke_credential
from nodes.services.drains import cordon_node, set_mode
from nodes.services.sessions import load_node_rows, write_presences
from nodes.session import ModeRequested
from tests.fakes.limits import set_limits
from tests.fakes.links import GATEWAY, Door, NodeSocket, RequestSink, dial, enrol, hello, linked, open_request
from tests.fakes.nodes import ACTOR, audited
from tests.fakes.waiting import eventually, turns
from wire import bridge, frames
from wire.contract import NodeMode
from wire.credentials import CredentialKind, mint_credential
from wire.limits import WIRE

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
async def _patience_and_connections() -> AsyncIterator[None]:
    """A database that a busy machine keeps waiting is not away; the connection of the ORM's thread is given back."""
    set_limits(core={"database_s": 30.0})
    yield
    await sync_to_async(connections.close_all)()


# authentication


async def test_a_credential_is_taken_from_header_bearer_or_query_and_no_other_kind_opens_the_door(settings: Settings) -> None:
    _, secret = await enrol()
    door, failed = Door(), (1008, "worker authentication failed")
    query = {"query": f"worker_secret={secret}&provider=local"}
    ways: list[dict[str, Any]] = [
        {"headers": {"x-worker-secret": secret}}, {"headers": {"authorization": f"Bearer {secret}"}}, {"headers": {}, **query},
    ]  # fmt: skip
    for way in ways:
        async with dial(door, **way) as socket:
            socket.say(hello())
            assert (await socket.acknowledged()).models == ["m"]
    async with dial(door, headers={"x-worker-secret": "wrong"}, **query) as socket:
        assert await socket.closed() == failed, "a right query rescues no wrong header"
    settings.NODE_ALLOW_QUERY_SECRET = False
    async with dial(door, headers={}, **query) as socket:
        assert await socket.closed() == failed
    for number, kind in enumerate((CredentialKind.CLIENT, CredentialKind.ADMIN, CredentialKind.WORKER)):
        async with dial(door, mint_credential(kind).text, address=f"10.0.1.{number}") as socket:
            assert await socket.closed() == failed
            assert [event["type"] for event in socket.sent] == ["websocket.accept", "websocket.close"]


async def test_too_many_wrong_secrets_from_one_address_have_to_wait_and_good_ones_do_not() -> None:
    _, secret = await enrol(max_nodes=3)
    door = Door()
    for number in range(3):
        reasons = []
        for _ in range(5):
            async with dial(door, mint_credential(CredentialKind.WORKER).text) as attacker:
                reasons.append((await attacker.closed())[1])
        assert reasons == ["worker authentication failed"] * 3 + ["worker authentication temporarily rate limited"] * 2
        async with dial(door, secret) as socket:
            socket.say(hello(f"rig-{number}"))
            await socket.acknowledged()


async def test_what_comes_at_once_from_one_address_is_not_looked_up_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def note(texts: Collection[str]) -> dict[str, NodeCredential]:
        looks.append(len(texts))
        return find_credentials(texts)

    monkeypatch.setattr(nodes.channel, "find_credentials", note)
    door = Door()
    async with AsyncExitStack() as stack:
        sockets = [await stack.enter_async_context(dial(door, mint_credential(CredentialKind.WORKER).text)) for _ in range(20)]
        reasons = Counter([(await socket.closed())[1] for socket in sockets])
    assert reasons == {"worker authentication failed": 3, "worker authentication temporarily rate limited": 17}
    assert len([one for one in looks if one]) <= 4, "those that came meanwhile are looked up together"


async def test_an_address_with_many_sockets_that_do_not_register_gets_no_more_of_them_but_good_ones() -> None:
    _, secret = await enrol()
    door = Door(max_unregistered=6)
    async with AsyncExitStack() as stack:
        held = [await stack.enter_async_context(dial(door, mint_credential(CredentialKind.WORKER).text)) for _ in range(6)]
        free = asyncio.Event()
        stack.callback(free.set)
        for socket in held:
            socket.slow = free  # it reads nothing, so that the server comes no further
        async with dial(door, mint_credential(CredentialKind.WORKER).text) as socket:
            await eventually(lambda: len(socket.sent) == 2)
            head, body = socket.sent
            assert (head["status"], dict(head["headers"])[b"retry-after"]) == (429, b"1")
            assert "register" in json.loads(body["body"])["error"]["message"]
        async with dial(door, mint_credential(CredentialKind.WORKER).text, address="10.0.0.2") as socket:
            assert await socket.closed() == (1008, "worker authentication failed")
        async with dial(door, secret) as socket:
            socket.say(hello())
            await socket.acknowledged()
    async with dial(door, mint_credential(CredentialKind.WORKER).text) as socket:
        assert (await socket.closed())[0] == 1008, "places are given back"


async def test_nodes_that_have_registered_keep_no_other_of_their_address_out() -> None:
    _, secret = await enrol(max_nodes=3)
    door = Door(max_unregistered=2)
    async with AsyncExitStack() as stack:
        for number in range(3):
            socket = await stack.enter_async_context(dial(door, secret))
            socket.say(hello(f"rig-{number}"))
            await socket.acknowledged()
        async with dial(door, mint_credential(CredentialKind.WORKER).text) as socket:
            assert await socket.closed() == (1008, "worker authentication failed")


async def test_a_node_of_another_or_a_disabled_provider_is_refused() -> None:
    _, secret = await enrol(provider="lab")
    for query in ("provider=other", "provider=", "provider=lab"):
        if query == "provider=lab":
            await sync_to_async(disable_provider)(name="lab", actor=ACTOR)
        async with dial(Door(), secret, query=query) as socket:
            code, reason = await socket.closed()
            assert (code, "provider" in reason) == (1008, True)


# registration


async def test_a_box_is_acknowledged_linked_and_marked_as_connected() -> None:
    credential, secret = await enrol()
    door = Door()
    async with dial(door, secret) as socket:
        socket.say(hello(current_load=1))
        ack = await socket.acknowledged()
        (link,) = door.links
        assert ack.worker_id == ack.node_id == f"node_{link.node_id.hex}"
        assert (ack.heartbeat_interval_s, ack.window_bytes, ack.gateways) == (5.0, WIRE.stream_window_bytes, ["http://gw"])
        assert ack.accepting is True
        assert (link.node_name, link.max_concurrent, link.epoch, link.credential_id) == ("rig", 2, 1, credential.pk)
        assert (link.external_load, link.windows) == (1, (10.0, 10.0, 15.0))
        assert door.registry.served_models() == ["m"]
        assert await NodePresence.objects.filter(node_id=link.node_id, connected=True).aexists()
    assert len(door.registry) == 0
    assert not await NodePresence.objects.filter(connected=True).aexists()
    assert len(await sync_to_async(audited)("node.disconnect")) == 1
    async with linked(version=bridge.BRIDGE_V1) as (_, socket, link):
        assert list(json.loads(socket.sent[1]["text"])) == ["type", "worker_id", "models", "protocol_version"]
        assert link.windows == (30.0, 30.0, 45.0)


async def test_a_cordoned_box_comes_back_cordoned_and_within_the_limits_of_the_socket() -> None:
    door = Door(max_concurrent_cap=3, max_models=1)
    _, secret = await enrol(max_nodes=1)
    async with dial(door, secret) as socket:
        socket.say(hello(max_concurrent=99, models=["a", "b"]))
        ack = await socket.acknowledged()
        assert (ack.models, len(ack.warnings), door.links[0].max_concurrent) == (["a"], 2, 3)
        await sync_to_async(cordon_node)(node_id=door.links[0].node_id, actor=ACTOR)
        async with dial(door, secret) as other:
            other.say(hello("é" * 120))
            code, reason = await other.closed()
        assert code == 1008
        assert len(reason.encode()) <= 123, "a refusal with a long name fits a close frame"
    async with dial(door, secret) as socket:
        socket.say(hello())
        assert (await socket.acknowledged()).accepting is False
        assert not door.links[0].can_take(time.monotonic())


async def test_a_bad_first_frame_or_none_at_all_closes_the_socket() -> None:
    _, secret = await enrol()
    door = Door()
    frames_: list[str | bytes] = ["nonsense", b"binary", '{"type":"pong"}', '{"type":"register","protocol_version":"2030-01"}']
    for frame in (*frames_, '{"type":"register","x":' + "[" * 100_000):
        async with dial(door, secret) as socket:
            socket.say(frame)
            assert await socket.closed() == (1002, "worker registration protocol error")
    assert len(door.registry) == 0
    assert await Node.objects.acount() == 0
    async with dial(Door(handshake_timeout_s=0.01), secret) as socket:
        assert await socket.closed() == (1008, "no register frame in time")


async def test_a_worker_is_answered_with_the_version_that_it_names_and_one_that_names_none_may_be_refused(
    settings: Settings,
) -> None:
    _, secret = await enrol()
    for said, answered in (("1", "1"), (bridge.BRIDGE_V1, bridge.BRIDGE_V1), (None, bridge.BRIDGE_V1)):
        async with dial(Door(), secret) as socket:
            socket.say(bridge.Register(worker_name="rig", models=["m"], protocol_version=said))
            assert (await socket.acknowledged()).protocol_version == answered
    settings.NODE_REJECT_UNVERSIONED = True
    async with dial(Door(), secret) as socket:
        socket.say(bridge.Register(worker_name="rig", models=["m"]))
        code, reason = await socket.closed()
        assert (code, bridge.BRIDGE_V1 in reason) == (1002, True)
    async with dial(Door(), secret) as socket:
        socket.say(bridge.Register(worker_name="rig", models=["m"], protocol_version="1"))
        await socket.acknowledged()


async def test_a_provider_bounds_the_models_that_a_node_may_declare() -> None:
    _, secret = await enrol()
    await sync_to_async(change_provider_terms)(
        name="local", max_queue=None, queue_s=None, no_node_s=None, max_models=2, actor=ACTOR
    )
    door = Door()
    async with dial(door, secret) as socket:
        socket.say(bridge.Register(worker_name="rig", models=["a", "b", "c"]))
        ack = await socket.acknowledged()
        assert (ack.models, ack.warnings) == (["a", "b"], ["model list truncated to 2 entries"])
        socket.say(bridge.ModelsUpdate(models=["c", "d", "e"], current_load=0))
        await eventually(lambda: door.links[0].models == {"c", "d"}, pause_s=0.001)


async def test_wrong_secrets_have_one_line_in_the_log_for_each_address(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    for address in ("10.0.0.1", "10.0.0.1", "10.0.0.2"):
        async with dial(door, mint_credential(CredentialKind.WORKER).text, address=address) as socket:
            await socket.closed()
    lines = [record.message for record in caplog.records if record.message.startswith("worker.wrong_secret")]
    assert lines == ["worker.wrong_secret address=10.0.0.1", "worker.wrong_secret address=10.0.0.2"]


async def test_a_newer_session_of_a_box_replaces_the_older_and_a_second_box_is_told() -> None:
    _, secret = await enrol()
    door = Door()

    def box(key: str, start: str) -> bridge.Register:
        governance = bridge.NodeGovernance(level="L1", runner_id=f"rig-{key}", public_key=key)
        return hello(instance_id=start, governance=governance)

    async with dial(door, secret) as old:
        old.say(box("a", "i1"))
        await old.acknowledged()
        async with dial(door, secret) as second:
            second.say(box("b", "of b"))
            assert await second.closed() == (1008, bridge.NAME_TAKEN)
        assert (door.links[0].epoch, door.links[0].closed) == (1, False)
        sink = RequestSink()
        door.links[0].open_stream(open_request(), sink)
        async with dial(door, secret) as new:
            new.say(box("a", "i2"))
            await new.acknowledged()
            assert (await old.closed())[0] == 1000
            assert sink.heard == [EndKind.LINK_LOST]
            (link,) = door.links
            assert link.epoch == 2
            await eventually(old.to_server.empty)
            assert await NodePresence.objects.filter(node_id=link.node_id, connected=True).aexists()


# serving


async def test_a_stream_runs_over_the_socket_a_late_frame_is_dropped_and_a_forged_one_ends_the_session() -> None:
    async with linked() as (_, socket, link):
        sink, other = RequestSink(), RequestSink()
        link.open_stream(open_request(), sink)
        cancelled = link.open_stream(open_request(request_id="req_2"), other)
        socket.say(frames.encode_frame(frames.HEAD, 1, 1, b'{"status":200,"headers":{"A":"b"}}'))
        socket.say(frames.encode_frame(frames.DATA, 1, 1, b"x"))
        cancelled.cancel("client_disconnect")
        socket.say(frames.encode_frame(frames.HEAD, 2, 1, b'{"status":200}'))
        socket.say(frames.encode_frame(frames.END, 1, 1, b"{}"))
        await eventually(lambda: EndKind.COMPLETE in sink.heard)
        assert sink.heard == [(200, {"a": "b"}), b"x", EndKind.COMPLETE]
        assert other.heard == []
        assert link.session.open_streams == 0
        lost = RequestSink()
        link.open_stream(open_request(request_id="req_3"), lost)
        socket.say(frames.encode_frame(frames.DATA, 77, 1, b"x"))
        assert await socket.closed() == (1002, "worker protocol error")
        assert lost.heard == [EndKind.LINK_LOST]


async def test_what_a_box_reports_reaches_link_registry_and_presence() -> None:
    async with linked(endpoints=["/v1/chat/completions"]) as (door, socket, link):
        assert list(door.registry.links_answering("m", ("/v1/chat/completions",))) == [link]
        gpu = bridge.GpuInfo(index=0, name="g", memory_used_mb=5)
        embeds = bridge.ReplicaInfo(model="a", state="loaded", endpoints=["/v1/embeddings"])
        socket.say(bridge.Telemetry(current_load=2, gpus=[gpu], last_error="hot", replicas=[embeds]))
        socket.say(bridge.ModelsUpdate(models=["a", "b"], current_load=2))
        await eventually(lambda: link.models == {"a", "b"})
        assert door.registry.served_models() == ["a", "b"]
        answering = [list(door.registry.links_answering("a", (f"/v1/{path}",))) for path in ("embeddings", "chat/completions")]
        assert answering == [[link], []]
        (report,) = presence_reports(door.registry)
        assert (report.active, report.models, report.status, report.last_error) == (2, ("a", "b"), "available", "hot")
        assert report.said is not None
        assert report.said.gpus == [bridge.GpuInfo(index=0, name="g", memory_used_mb=5)]
        socket.say(bridge.Draining(reason="update"))
        await eventually(lambda: link.node_draining)
        assert presence_reports(door.registry)[0].status == "draining"


def has_heard(link: RelayLink, depth: int, models: list[str]) -> bool:
    return link.telemetry is not None and link.telemetry.queue_depth == depth and link.models == set(models)


async def test_a_node_that_serves_nothing_and_says_why_is_in_error() -> None:
    loading, failed = (bridge.ReplicaInfo(model="m", state=state) for state in ("loading", "failed"))
    told: list[tuple[bridge.Telemetry, list[str], str]] = [
        (bridge.Telemetry(last_error="cannot use http://127.0.0.1:9: refused"), [], "error"),
        (bridge.Telemetry(last_error="out of memory"), ["m"], "available"),  # another model serves
        (bridge.Telemetry(last_error="out of memory", available=["m"]), [], "available"),  # it could load one
        (bridge.Telemetry(last_error="it died", replicas=[loading]), [], "available"),
        (bridge.Telemetry(last_error="it died", replicas=[failed]), [], "error"),
        (bridge.Telemetry(), [], "available"),
    ]
    async with linked() as (door, socket, link):
        for depth, (said, models, status) in enumerate(told, start=1):
            said.queue_depth = depth
            socket.say(said)
            socket.say(bridge.ModelsUpdate(models=models))
            await eventually(partial(has_heard, link, depth, models))
            assert presence_reports(door.registry)[0].status == status, said


async def test_only_boxes_that_said_something_new_are_written_between_two_full_rounds() -> None:
    loaded, unloading = ([bridge.ReplicaInfo(model="m", state=state)] for state in ("loaded", "unloading"))
    async with linked(replicas=loaded) as (door, socket, link):
        assert [len(presence_reports(door.registry, news_only=True)) for _ in range(2)] == [1, 0]
        socket.say(bridge.Telemetry(replicas=loaded, queue_depth=1))
        await eventually(lambda: link.telemetry is not None and link.telemetry.queue_depth == 1)
        assert presence_reports(door.registry, news_only=True) == []
        socket.say(bridge.Telemetry(replicas=unloading))
        await eventually(lambda: link.has_news)
        (report,) = presence_reports(door.registry, news_only=True)
        assert report.said is not None
        assert report.said.replicas == unloading
        assert len(presence_reports(door.registry)) == 1


# the owner at the node


async def test_the_owner_takes_the_box_back_at_once_and_for_good_until_lending_it_again_ends_no_work() -> None:
    async with linked() as (door, socket, link):
        rows = await sync_to_async(load_node_rows)()

        async def sweep() -> bool:
            door.keeper.apply(await sync_to_async(load_node_rows)(), targets={}, peers={})
            return link.policy.reclaimed and link.policy.drain_deadline_at is not None

        with psycopg.connect(**connection.get_connection_params()) as other:
            other.execute("SELECT 1 FROM nodes_node FOR UPDATE")  # until here the owner's word cannot be stored
            socket.say(bridge.ModeChange(mode="spare_off", reason="gaming"))
            await eventually(lambda: link.policy.reclaimed)
            assert link.wanted_mode is not None
            door.keeper.apply(rows, targets={}, peers={})  # rows from before the owner spoke
            assert (link.policy.reclaimed, link.policy.drain_deadline_at is not None) == (True, True)
        await eventually(lambda: link.wanted_mode is None)
        assert (await Node.objects.aget(pk=link.node_id)).mode == NodeMode.SPARE_OFF.value
        assert await sweep()
        with psycopg.connect(**connection.get_connection_params()) as other:
            other.execute("SELECT 1 FROM nodes_node FOR UPDATE")
            link.policy.drain_deadline_at = time.monotonic()  # the grace is over
            socket.say(bridge.ModeChange(mode="spare_on", reason="done"))
            await eventually(lambda: not link.policy.reclaimed)
            sink = RequestSink()
            link.active += 1
            link.open_stream(open_request(), sink)
            door.keeper.tick()
            assert sink.heard == [], "the grace of before ends no work"
        for mode in ("spare_on", "spare_off", "spare_on"):
            socket.say(f'{{"type":"mode_change","mode":"{mode}"}}')
        await eventually(lambda: socket.to_server.empty() and link.wanted_mode is None)
        stored = (await Node.objects.aget(pk=link.node_id)).mode
        assert (stored, link.policy.reclaimed) == (NodeMode.SPARE_ON.value, False), "of quick decisions the last stands"
        await sync_to_async(set_mode)(node_id=link.node_id, mode=NodeMode.SPARE_OFF, reason="r", actor=ACTOR)
        assert await sweep(), "an operator's decision reaches it, too"


async def test_what_the_owner_said_just_before_the_link_closed_is_stored() -> None:
    async with linked(instance_id="i") as (door, socket, link):
        socket.say(bridge.ModeChange(mode="spare_off", reason="gaming"))
        socket.hang_up()  # both are read in one turn of the loop: the link is gone before anything could be stored
    assert link.closed
    assert (await Node.objects.aget(pk=link.node_id)).mode == NodeMode.SPARE_OFF.value
    assert door.channel.owner_wishes == {}


async def test_a_word_of_the_owner_that_waits_for_the_database_holds_for_the_next_link() -> None:
    door, effect = Door(), ModeRequested("spare_off", "gaming")
    _, secret = await enrol()
    for turn in range(2):
        async with dial(door, secret) as socket:
            socket.say(hello(instance_id="i"))
            await socket.acknowledged()
            (link,) = door.links
            assert (link.policy.reclaimed, link.wanted_mode) == ((True, effect) if turn else (False, None))
        door.channel.owner_wishes[link.node_id] = OwnerWish(effect, time.monotonic())


async def test_when_a_gateway_stops_its_nodes_leave_at_once_and_cut_off_sockets_print_no_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, secret = await enrol(max_nodes=8)
    door = Door()
    sockets = [NodeSocket(headers={"x-worker-secret": secret}) for _ in range(8)]
    tasks = [asyncio.create_task(door.endpoint(socket.scope, socket.to_server.get, socket.send)) for socket in sockets]
    for number, socket in enumerate(sockets):
        socket.say(hello(f"rig-{number}", instance_id="i"))
    for socket in sockets:
        await socket.acknowledged()
    await door.channel.end_sessions()
    assert not await NodePresence.objects.filter(connected=True).aexists()
    late = presence_reports(door.registry)
    await sync_to_async(write_presences)(late, gateway_id=GATEWAY)
    assert not await NodePresence.objects.filter(connected=True).aexists(), "no late report brings a node back"
    with psycopg.connect(**connection.get_connection_params()) as other:
        other.execute("LOCK TABLE nodes_nodepresence IN ACCESS EXCLUSIVE MODE")  # nothing more can be stored
        for task in tasks:
            task.cancel()  # as the server does when its grace is over
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        await door.channel.close()
        other.rollback()
    assert ended == [None] * 8
    assert sum("worker.cut_off" in record.message for record in caplog.records) == 8
    assert not any(record.exc_info for record in caplog.records)
    assert await AuditEvent.objects.filter(action="node.disconnect").acount() == 8


async def test_a_revoked_credential_cuts_its_boxes_off() -> None:
    credential, secret = await enrol()
    _, other = await enrol("other")
    door = Door()
    async with dial(door, secret) as socket, dial(door, other) as kept:
        socket.say(hello())
        kept.say(hello("kept"))
        await socket.acknowledged()
        await kept.acknowledged()
        sink = RequestSink()
        next(link for link in door.links if link.node_name == "rig").open_stream(open_request(), sink)
        await sync_to_async(revoke_credential)(credential_id=credential.pk, actor=ACTOR)
        in_use = [link.credential_id for link in door.links]
        revoked = NodeCredential.objects.filter(pk__in=in_use, revoked_at__isnull=False).values_list("pk", flat=True)
        door.keeper.cut_off(await sync_to_async(lambda: set(revoked))())
        assert await socket.closed() == (1008, "worker credential was revoked")
        assert sink.heard == [EndKind.LINK_LOST]
        assert [link.node_name for link in door.links] == ["kept"]


async def test_a_box_whose_line_is_full_gets_nothing_new_until_it_is_drained() -> None:
    async with linked() as (door, socket, link):
        announced: list[object] = []
        door.registry.subscribe(announced.append)
        go = asyncio.Event()
        socket.slow = go
        assert link.can_take(time.monotonic())
        for _ in range(40):
            link.send_frames([bytes(1024 * 1024)])
        assert not link.can_take(time.monotonic())
        assert not announced
        go.set()
        await eventually(lambda: announced)
        assert link.can_take(time.monotonic())


async def test_a_node_that_reconnects_all_the_time_gets_no_requests_beside_one_that_stays_and_is_one_node() -> None:
    door = Door()
    _, secret = await enrol(max_nodes=2)
    async with dial(door, secret) as steady:
        steady.say(hello("steady"))
        await steady.acknowledged()
        epochs = []
        for turn in range(10):
            async with dial(door, secret) as socket:
                socket.say(hello("flaps", instance_id=f"start-{turn}"))
                await socket.acknowledged()
                (flapping,) = (link for link in door.links if link.node_name == "flaps")
                epochs.append(flapping.epoch)
                chosen = door.registry.ejections.choose_from(door.registry.links_for("m"), "m", time.monotonic())
                assert [link.node_name for link in chosen] == (["steady", "flaps"] if turn < 9 else ["steady"])
        assert epochs == list(range(1, 11))
        assert await sync_to_async(Node.objects.filter(name="flaps").count)() == 1


@pytest.fixture(autouse=True)
async def _close_connections() -> AsyncIterator[None]:
    """Give back the connection of the thread in which the ORM ran for the test itself."""
    yield
    await sync_to_async(connections.close_all)()


@pytest.fixture(autouse=True)
def _patient() -> None:
    """A database that a busy machine keeps waiting is not away."""
    set_limits(core={"database_s": 30.0})


async def test_what_a_node_says_costs_no_task() -> None:
    async with linked() as (_, socket, link):
        await turns()  # the acknowledgement was the last that needed a task
        loop, made = asyncio.get_running_loop(), list[object]()

        def make_task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> asyncio.Task[Any]:
            made.append(work)
            return asyncio.Task(work, loop=loop, **options)

        loop.set_task_factory(cast("Any", make_task))  # the stub knows what one version of Python hands over
        for load in range(100):
            socket.say(f'{{"type":"pong","current_load":{load}}}')
        await eventually(lambda: link.load == 99)
        loop.set_task_factory(None)
        assert made == []


async def test_a_box_that_was_quiet_takes_work_again_with_its_next_frame() -> None:
    async with linked() as (door, socket, link):
        heard: list[object] = []
        door.registry.subscribe(heard.append)
        socket.say(bridge.Pong())
        await eventually(socket.to_server.empty)
        assert heard == []
        link.last_seen -= 12
        socket.say(bridge.Pong())
        await eventually(lambda: heard)
        assert heard == [link]
