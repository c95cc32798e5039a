"""Tickets at a gateway: who gets one, what is signed and recorded, and what a node's report makes of the record."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any  # bodies are JSON

import httpx
import pytest
from asgiref.sync import sync_to_async
from django.db import connections
from django.utils import timezone

from core.hints import publish_hint
from gateway import metrics
from gateway.models import ApiKey, RequestRecord, UsageEvent
from gateway.process import GatewayRuntime
from gateway.services.figures import update_figures
from gateway.services.limits import store_budgets
from gateway.services.models import allow_model
from gateway.services.requests import close_orphaned_requests
from gateway.services.rollups import read_series, roll_up_requests
from gateway.services.tickets import store_usage
from gateway.urls import make_application
from gateway.values import TICKETS_PATH, Budget, BudgetKind
from nodes.models import Node, NodePresence, TicketKey
from nodes.services.certificates import NO_AUTHORITY, NO_CERTIFICATE, create_authority, rotate_authority
from nodes.services.tickets import (
    TicketKeyring,
    ensure_ticket_key,
    find_ticket_refusal,
    load_ticket_keys,
    renew_ticket_key,
    rotate_ticket_key,
)
from runner.config import TlsConfig
from runner.tls import ServerTls
from tests.fakes.asgi_client import on_our_server
from tests.fakes.limits import set_limits
from tests.fakes.links import NodeSocket, enrol, hello
from tests.fakes.nodes import ACTOR, audited, make_gateway, make_key, make_node, make_record
from tests.fakes.tls import shake_hands
from tests.fakes.waiting import eventually
from wire import bridge, clock, frames
from wire.contract import RequestState
from wire.ids import format_id, parse_id
from wire.ticket import Ticket, verify_ticket

pytestmark = pytest.mark.django_db(transaction=True)

URL = "http://10.0.0.5:8090"


@pytest.fixture(autouse=True)
async def _patience_and_connections(settings: Any) -> AsyncIterator[None]:
    settings.NODE_DIRECT_HOSTS = ["private"]
    set_limits(core={"database_s": 30.0})
    yield
    await sync_to_async(connections.close_all)()


class Central:
    """A running gateway, a client of it, and a node that takes tickets."""

    def __init__(self, runtime: GatewayRuntime, *, key: str, node_secret: str) -> None:
        self.runtime, self.key, self.node_secret = runtime, key, node_secret
        self.application = make_application(runtime)

    async def ask(self, *, key: str | None = None, **wish: object) -> httpx.Response:
        transport = httpx.ASGITransport(app=on_our_server(self.application))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            bearer = self.key if key is None else key
            headers = {"authorization": f"Bearer {bearer}"}
            return await client.post("/v1/tickets", json={"model": "m", **wish}, headers=headers)

    async def follow(self, path: str, key: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=on_our_server(self.application))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.get(path, headers={"authorization": f"Bearer {key}"})

    async def post(self, path: str, body: object, *, token: str | None = None) -> httpx.Response:
        transport = httpx.ASGITransport(app=on_our_server(self.application))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, json=body, headers={"authorization": f"Bearer {token or self.key}"})

    async def register_agent(self, number: int = 1, **changes: Any) -> dict[str, Any]:
        """Register an agent that takes tickets at its endpoint."""
        body = {
            "agent_id": f"7a1c4d0e-6a52-4c55-9f0e-0d6f4f6c2b0{number}", "models_available": [{"model_id": "m", "loaded": True}],
            "network": {"endpoint": "10.0.0.7:9000"}, "config": {"tickets": True}, **changes,
        }  # fmt: skip
        answer = await self.post("/api/v1/register", body, token=self.node_secret)
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    @asynccontextmanager
    async def agent_socket(self, session_id: str) -> AsyncIterator[NodeSocket]:
        socket = NodeSocket(headers={})
        socket.scope["path"] = f"/api/v1/session/{session_id}"
        task = asyncio.ensure_future(self.application(socket.scope, socket.to_server.get, socket.send))
        try:
            yield socket
        finally:
            socket.hang_up()
            async with asyncio.timeout(30):
                await task

    @asynccontextmanager
    async def node(self, ticket_url: str = URL, **fields: Any) -> AsyncIterator[NodeSocket]:
        """A node that has registered, once the gateway has looked at its URL."""
        socket = NodeSocket(headers={"x-worker-secret": self.node_secret})

        task = asyncio.ensure_future(self.application(socket.scope, socket.to_server.get, socket.send))
        socket.say(hello(ticket_url=ticket_url, **fields))
        await socket.acknowledged()
        try:
            yield socket
        finally:
            socket.hang_up()
            async with asyncio.timeout(30):
                await task


@sync_to_async
def _make_rows() -> str:
    allow_model(name="m", actor=ACTOR, max_tokens=500)
    return make_key()[1]


@pytest.fixture
async def central() -> AsyncIterator[Central]:
    key, (_, secret) = await _make_rows(), await enrol(max_nodes=3)
    runtime = GatewayRuntime()
    await runtime.start()
    try:
        yield Central(runtime, key=key, node_secret=secret)
    finally:
        await runtime.stop()


def reachable(central: Central) -> bool:
    links = list(central.runtime.registry)
    return bool(links) and all(link.ticket_url for link in links) and not central.runtime.node_channel.tickets.keyring.is_empty


def told_keys(socket: NodeSocket) -> dict[str, bytes]:
    """The keys that the node knows after everything it was told."""
    known: list[dict[str, str]] = []
    for event in socket.sent:
        said = json.loads(event["text"]) if "text" in event else {}
        if said.get("type") == "register_ack":
            known = said.get("ticket_keys", [])
        elif said.get("type") == "ticket_keys":
            known = said["keys"]
    return {key["kid"]: base64.urlsafe_b64decode(key["public_key"] + "=") for key in known}


@sync_to_async
def find_record(ticket_id: str) -> RequestRecord:
    record_id = parse_id("tkt", ticket_id)
    assert record_id is not None
    return RequestRecord.objects.get(pk=record_id)


async def take_ticket(central: Central, socket: NodeSocket, **wish: Any) -> tuple[dict[str, Any], Ticket]:
    await eventually(lambda: reachable(central) and told_keys(socket), "the node and the gateway know the first key")
    answer = await central.ask(**wish)
    assert answer.status_code == 201, answer.text
    said = answer.json()
    ticket = verify_ticket(said["ticket"], told_keys(socket), audience=said["node_id"], now=clock.unix_s())
    return said, ticket


async def test_a_ticket_is_for_the_node_that_has_room_and_its_request_has_a_record(central: Central) -> None:
    async with central.node() as socket:
        said, ticket = await take_ticket(central, socket, max_tokens=64, prompt_tokens_est=10)
        assert (said["base_url"], said["model"]) == (f"{URL}/v1", "m")
        assert (ticket.model, ticket.caps.max_tokens, ticket.tenant) == ("m", 64, "research")
        record = await find_record(said["ticket_id"])
        assert (record.state, record.endpoint, record.node_name, record.max_tokens) == ("assigned", TICKETS_PATH, "rig", 64)
        (link,) = central.runtime.registry
        assert link.active == 1, "its slot is held until it has begun"


async def test_a_slot_is_held_while_the_request_of_a_ticket_runs_and_free_when_it_ended(central: Central) -> None:
    set_limits(gateway={"ticket_s": 1.0})
    events = ("given", "relayed", "used", "expired")
    before = [metrics.TICKETS.labels(event)._value.get() for event in events]
    async with central.node(max_concurrent=1) as socket:
        said, ticket = await take_ticket(central, socket)
        (link,) = central.runtime.registry
        report = bridge.TicketUsage(ticket_id=said["ticket_id"], record_id=ticket.record_id, model="m", status="running")
        socket.say(bridge.UsageReport(reports=[report]))
        await eventually(lambda: clock.unix_s() > ticket.expires_at, "the ticket has expired")
        assert (link.active, (await central.ask()).json()["relay"]) == (1, True), "its request still runs"
        report.status = "completed"
        socket.say(bridge.UsageReport(reports=[report]))
        await eventually(lambda: not link.active, "it ended")
        await take_ticket(central, socket)
        assert link.active == 1
        await eventually(lambda: not link.active, "nobody used the ticket")
    counted = [metrics.TICKETS.labels(event)._value.get() - was for event, was in zip(events, before, strict=True)]
    assert counted == [2, 1, 1, 1]


async def test_a_gateway_that_stops_waits_for_no_direct_request_and_gives_no_more_tickets(central: Central) -> None:
    async with central.node() as socket:
        await take_ticket(central, socket)
        assert central.runtime.running_requests == 1
        central.runtime.begin_stop()
        assert (central.runtime.running_requests, central.runtime.tickets.slots) == (0, {})
        assert (await central.ask()).status_code == 503


async def test_what_a_node_reports_ends_the_record_once_and_the_node_hears_that(central: Central) -> None:
    async with central.node() as socket:
        said, ticket = await take_ticket(central, socket)
        assert ticket.caps.max_tokens == 500, "the cap of the model"
        usage = bridge.TokenCounts(prompt_tokens=7, completion_tokens=9, total_tokens=16)
        report = bridge.TicketUsage(
            ticket_id=said["ticket_id"], record_id=ticket.record_id, model="m", status="running", endpoint="/v1/messages"
        )
        socket.say(bridge.UsageReport(reports=[report]))
        await eventually(lambda: _taken(socket).get(said["ticket_id"]) == "running", "it began")
        assert (await find_record(said["ticket_id"])).state == "running"
        report.status, report.usage, report.http_status, report.inference_ms = "completed", usage, 200, 1250
        for _ in range(2):
            socket.say(bridge.UsageReport(reports=[report]))
        await eventually(lambda: _taken(socket).get(said["ticket_id"]) == "completed", "it ended")
        report.status, report.usage = "failed", None
        socket.say(bridge.UsageReport(reports=[report]))
        await eventually(lambda: _taken(socket).get(said["ticket_id"]) == "failed", "that is taken and changes nothing")
        record = await find_record(said["ticket_id"])
        assert (record.state, record.prompt_tokens, record.completion_tokens) == ("completed", 7, 9)
        assert (record.status_code, record.latency_ms, record.tokens_estimated) == (200, 1250, False)


def _taken(socket: NodeSocket) -> dict[str, str]:
    taken: dict[str, str] = {}
    for event in socket.sent:
        said = json.loads(event["text"]) if "text" in event else {}
        taken |= said.get("taken", {})
    return taken


async def test_without_a_node_that_can_be_reached_or_has_room_the_caller_is_told_to_ask_the_gateway(central: Central) -> None:
    relay = {"relay": True, "base_url": central.runtime.tickets.relay_url}
    answer = await central.ask()
    assert (answer.status_code, answer.json()) == (200, relay), "there is no node"
    async with central.node(ticket_url="") as socket:
        await eventually(lambda: bool(list(central.runtime.registry)), "the node is there")
        assert (await central.ask()).json() == relay, "it takes no tickets"
        del socket
    async with central.node(ticket_url="http://169.254.169.254/") as socket:
        await eventually(lambda: bool(list(central.runtime.registry)), "the node is there")
        node = await sync_to_async(Node.objects.get)()
        assert node.ticket_error
        assert (await central.ask()).json() == relay, "nobody is sent to an address that is never called"
    async with central.node(max_concurrent=1) as socket:
        await take_ticket(central, socket)
        assert (await central.ask()).json() == relay, "its slot is taken"
    assert await sync_to_async(RequestRecord.objects.count)() == 1, "only a ticket has a record"


async def test_whoever_follows_a_ticket_learns_that_its_node_was_lost_and_gets_another(central: Central) -> None:
    set_limits(gateway={"ticket_look_s": 0.02})
    async with central.node() as socket:
        said, _ = await take_ticket(central, socket)
        path = f"/v1/tickets/{said['ticket_id']}/events"
        stranger = (await _make_rows_of_another())[1]
        assert (await central.follow(path, stranger)).status_code == 404
        assert (await central.follow("/v1/tickets/tkt_0/events", central.key)).status_code == 404
        following = asyncio.ensure_future(central.follow(path, central.key))
        await asyncio.sleep(0.1)
    events = [line for line in (await following).text.splitlines() if line.startswith("data: ")]
    failover = json.loads(events[0][6:])
    assert (failover["type"], failover["reason"], failover["new_ticket"]) == ("x_pool_failover", "gpu_lost", None)
    assert failover["base_url"] == central.runtime.tickets.relay_url, "there is no other node"


async def begin_relayed(central: Central, socket: NodeSocket, **fields: Any) -> asyncio.Task[httpx.Response]:
    """Have a caller's stream begin on the only node there is, by way of the gateway."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 20, **fields}
    relayed = asyncio.ensure_future(central.post("/v1/chat/completions", body))
    (link,) = central.runtime.registry
    await eventually(lambda: any("bytes" in event for event in socket.sent), "the node has the request")
    socket.say(frames.encode_frame(frames.HEAD, 1, 1, b'{"status":200,"headers":{"content-type":"text/event-stream"}}'))
    socket.say(frames.encode_frame(frames.DATA, 1, 1, b'data: {"choices":[{"index":0,"delta":{"content":"Once"}}]}\n\n'))
    await eventually(lambda: bool(link.last_served) and _has_begun(link), "its client has the first words")
    return relayed


def _has_begun(link: Any) -> bool:
    return any(stream.sink.first_byte_at is not None for stream in link._streams.values())


def lose_node(central: Central, socket: NodeSocket, reason: str) -> None:
    (link,) = [link for link in central.runtime.registry if link.node_name == "rig"]
    if reason == "gpu_lost":
        socket.hang_up()
        return
    if reason == "engine":
        socket.say(frames.encode_frame(frames.END, 1, 1, b'{"error":"engine_failed","message":"it fell over"}'))
        return
    if reason == "gpu_timeout":
        link.last_seen -= 60
    else:
        link.policy.draining, link.policy.reclaimed = True, reason == "gpu_reclaimed"
        link.policy.drain_deadline_at = clock.monotonic()
    central.runtime.keeper.tick()


@pytest.mark.parametrize("reason", ["gpu_lost", "gpu_timeout", "gpu_draining", "gpu_reclaimed", "engine"])
async def test_a_relayed_stream_whose_node_is_lost_names_another_before_its_error(central: Central, reason: str) -> None:
    async with central.node() as socket:
        await eventually(lambda: reachable(central), "the gateway knows where clients reach the node")
        relayed = await begin_relayed(central, socket, x_pool_options={"prefer_gpu": "rig"})
        async with central.node(worker_name="spare", instance_id="i2") as spare:
            await eventually(lambda: len(list(central.runtime.registry)) == 2 and reachable(central), "another node is there")
            lose_node(central, socket, reason)
            events = (await relayed).text.split("\n\n")
            assert [event.split("\n")[0] for event in events[1:2]] == ["event: x_pool_failover"]
            said = json.loads(events[1].partition("data: ")[2])
            assert '"error"' in events[2]
            expected = "gpu_lost" if reason == "engine" else reason
            assert (said["type"], said["reason"], said["base_url"]) == ("x_pool_failover", expected, f"{URL}/v1")
            assert said["choices"] == [], "an SDK that takes it for a chunk goes on reading, to the error"
            ticket = verify_ticket(said["new_ticket"], told_keys(spare), audience=said["node_id"], now=clock.unix_s())
            assert (ticket.model, ticket.caps.max_tokens) == ("m", 20)
            assert (await find_record(said["ticket_id"])).node_name == "spare"


async def test_a_relayed_stream_says_so_when_there_is_no_other_node_and_nothing_unasked(central: Central) -> None:
    cases: list[tuple[dict[str, object], bool]] = [({"x_pool_options": {}}, True), ({}, False)]
    for fields, expected in cases:
        async with central.node() as socket:
            await eventually(lambda: reachable(central), "the gateway knows where clients reach the node")
            relayed = await begin_relayed(central, socket, **fields)
            socket.hang_up()
            text = (await relayed).text
            assert ("x_pool_failover" in text, '"error"' in text) == (expected, True), text
            assert (f'"new_ticket":null,"base_url":"{central.runtime.tickets.relay_url}"' in text) is expected
            await eventually(lambda: not list(central.runtime.registry), "the node is gone")


def read_keys(keys: list[dict[str, str]]) -> dict[str, bytes]:
    return {key["kid"]: base64.urlsafe_b64decode(key["public_key"] + "=") for key in keys}


def list_said(socket: NodeSocket, kind: str) -> list[dict[str, Any]]:
    said = [json.loads(event["text"]) for event in socket.sent if "text" in event]
    return [message for message in said if message["type"] == kind]


def _answer_probes() -> None:
    NodePresence.objects.update(probed_at=timezone.now(), probe_error="")
    publish_hint("nodes")


async def ask_agent_ticket(central: Central, registered: dict[str, Any]) -> tuple[dict[str, Any], Ticket]:
    await sync_to_async(_answer_probes)()
    await eventually(
        lambda: any(link.ticket_url and not link.unhealthy_reason for link in central.runtime.registry), "its endpoint answers"
    )
    answer = await central.ask(max_tokens=64)
    assert answer.status_code == 201, answer.text
    said = answer.json()
    keys = read_keys(registered["config"]["ticket_keys"])
    return said, verify_ticket(said["ticket"], keys, audience=registered["node_id"], now=clock.unix_s())


async def test_an_agent_that_asks_for_tickets_gets_clients_and_its_first_report_counts(central: Central) -> None:
    registered = await central.register_agent()
    assert registered["config"]["warnings"] == []
    said, ticket = await ask_agent_ticket(central, registered)
    assert (said["base_url"], ticket.gpu_endpoint) == ("http://10.0.0.7:9000/v1", "http://10.0.0.7:9000")
    (link,) = central.runtime.registry
    path, ticket_id = f"/api/v1/session/{registered['session_id']}", said["ticket_id"]
    report: dict[str, Any] = {"ticket_id": ticket_id, "model": "m", "status": "running"}
    message = {"type": "usage_report", "reports": [report]}
    taken = (await central.post(path, message, token=central.node_secret)).json()
    assert taken == {"commands": [], "taken": {ticket_id: "running"}, "refused": {}}
    report |= {"status": "completed", "usage": {"prompt_tokens": 7, "completion_tokens": 9}, "inference_ms": 1250}
    async with central.agent_socket(registered["session_id"]) as socket:
        for number in (1, 2):
            socket.say(json.dumps(message))
            await eventually(lambda: len(list_said(socket, "usage_taken")) == number, "it is answered")  # noqa: B023
        first, again = list_said(socket, "usage_taken")
        assert first == {"type": "usage_taken", "taken": {ticket_id: "completed"}}
        assert "has ended already, as completed" in again["refused"][ticket_id]
    record = await find_record(ticket_id)
    assert (record.state, record.prompt_tokens, record.completion_tokens, record.latency_ms) == ("completed", 7, 9, 1250)
    assert not link.active, "its slot is free"


async def test_what_an_agent_may_not_say_of_a_ticket_changes_nothing_and_is_answered(central: Central) -> None:
    registered, other = await central.register_agent(1), await central.register_agent(2, config={})
    said, ticket = await ask_agent_ticket(central, registered)
    far = "tkt_ffffffffffffffffffffffffffffffff"
    for who, changes, why in (
        (other, {}, "another node"),
        (registered, {"ticket_id": far}, "No ticket of this id"),
        (registered, {"ticket_id": "tkt_1"}, "No ticket of this id"),
        (registered, {"record_id": far}, "record_id"),
        (registered, {"status": "done"}, "status must be one of"),
    ):
        report = {"ticket_id": said["ticket_id"], "model": "m", "status": "completed", **changes}
        message = {"type": "usage_report", "reports": [report]}
        answer = await central.post(f"/api/v1/session/{who['session_id']}", message, token=central.node_secret)
        assert why in answer.json()["refused"][report["ticket_id"]], changes
    assert (await find_record(said["ticket_id"])).state == "assigned"
    del ticket
    session = f"/api/v1/session/{registered['session_id']}"
    wrong = await central.post(session, {"type": "usage_report", "reports": [{"status": 1}]}, token=central.node_secret)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "reports[0].status")


async def test_an_agent_hears_of_a_new_key_on_its_socket_and_when_it_polls_and_the_others_hear_nothing(
    central: Central,
) -> None:
    registered, unaware = await central.register_agent(1), await central.register_agent(2, config={})
    async with central.agent_socket(registered["session_id"]) as socket, central.agent_socket(unaware["session_id"]) as other:
        await eventually(lambda: bool(list_said(socket, "ticket_keys")), "it is told the keys of now")
        kid = await sync_to_async(rotate_ticket_key)(actor=ACTOR)
        await eventually(lambda: kid in str(list_said(socket, "ticket_keys")), "it is told the new key")
        assert not list_said(other, "ticket_keys")
    beat = {"type": "heartbeat", "gpu_states": [], "models_loaded": ["m"]}
    for who, knows in ((registered, True), (unaware, False)):
        answer = await central.post(f"/api/v1/session/{who['session_id']}", beat, token=central.node_secret)
        assert (kid in read_keys(answer.json().get("ticket_keys", []))) is knows


@pytest.mark.parametrize(
    ("changes", "warning"),
    [
        ({"config": {}}, ""),
        ({"network": {"endpoint": "8.8.8.8:80"}}, "network.endpoint is not called"),
        ({"network": {}}, "config.tickets needs network.endpoint"),
    ],
)
async def test_no_client_is_sent_to_an_agent_that_did_not_ask_for_it_or_cannot_be_reached(
    central: Central, changes: dict[str, Any], warning: str
) -> None:
    registered = await central.register_agent(**changes)
    assert warning in " ".join(registered["config"]["warnings"])
    assert (await central.ask()).json()["relay"] is True


@pytest.mark.parametrize(("policy", "reason"), [({"reclaimed": True}, "gpu_reclaimed"), ({}, "gpu_lost")])
async def test_whoever_follows_a_ticket_after_its_node_has_cut_the_request_is_told_so(
    central: Central, policy: dict[str, bool], reason: str
) -> None:
    async with central.node() as socket:
        said, ticket = await take_ticket(central, socket)
        (link,) = central.runtime.registry
        for name, value in policy.items():
            setattr(link.policy, name, value)
        report = bridge.TicketUsage(ticket_id=said["ticket_id"], record_id=ticket.record_id, model="m", status="interrupted")
        socket.say(bridge.UsageReport(reports=[report]))
        await eventually(lambda: not link.active, "its slot is free")
        told = (await central.follow(f"/v1/tickets/{said['ticket_id']}/events", central.key)).text
        assert f'"type":"x_pool_failover","reason":"{reason}"' in told


async def test_following_ends_when_the_request_of_a_ticket_has_ended(central: Central) -> None:
    set_limits(gateway={"ticket_look_s": 0.02})
    async with central.node() as socket:
        said, ticket = await take_ticket(central, socket)
        following = asyncio.ensure_future(central.follow(f"/v1/tickets/{said['ticket_id']}/events", central.key))
        await asyncio.sleep(0.1)
        report = bridge.TicketUsage(ticket_id=said["ticket_id"], record_id=ticket.record_id, model="m", status="completed")
        socket.say(bridge.UsageReport(reports=[report]))
        assert "x_pool_end" in (await following).text
        assert "x_pool_failover" not in following.result().text


@sync_to_async
def _make_rows_of_another() -> Any:
    return make_key("other", tenant="rival")


@sync_to_async
def _make_spender() -> str:
    """A key that may have one request at a time, and 1,000 tokens a day."""
    budgets = [Budget(BudgetKind.CONCURRENT_REQUESTS, 1), Budget(BudgetKind.TOKENS_PER_DAY, 1000)]
    key, text = make_key("spender", tenant="frugal")
    ApiKey.objects.filter(pk=key.pk).update(budgets=store_budgets(budgets))
    return text


async def test_a_ticket_reserves_from_budgets_and_is_charged_what_its_node_reports_or_else_all_of_it(central: Central) -> None:
    async with central.node() as socket:
        await eventually(lambda: reachable(central), "the gateway knows where clients reach the node")
        central.key = await _make_spender()
        said, ticket = await take_ticket(central, socket, max_tokens=500)
        second = await central.ask(max_tokens=500)
        assert (second.status_code, second.json()["error"]["code"]) == (429, "RATE_LIMITED"), "the first one holds it"
        usage = bridge.TokenCounts(prompt_tokens=7, completion_tokens=9, total_tokens=16)
        report = bridge.TicketUsage(
            ticket_id=said["ticket_id"], record_id=ticket.record_id, model="m", status="completed", usage=usage
        )
        socket.say(bridge.UsageReport(reports=[report]))
        await eventually(lambda: not central.runtime.tickets.held, "it is settled")
        unused, _ = await take_ticket(central, socket, max_tokens=500)
        set_limits(gateway={"ticket_unused_s": 0.0, "ticket_back_s": 0.0})
        await central.runtime._reconcile()
        assert (await find_record(unused["ticket_id"])).error_code == "TICKET_UNUSED"
        assert not central.runtime.tickets.held
        again = await central.ask(max_tokens=500)
        assert (again.status_code, "day" in again.text) == (429, True), "nobody told what it used: all of it counts"
        await take_ticket(central, socket, max_tokens=400)


async def test_what_another_gateway_heard_of_a_ticket_settles_it_here(central: Central) -> None:
    async with central.node() as socket:
        await eventually(lambda: reachable(central), "the gateway knows where clients reach the node")
        central.key = await _make_spender()
        said, _ = await take_ticket(central, socket, max_tokens=500)
        record = await find_record(said["ticket_id"])
        assert record.node_id is not None
        await sync_to_async(store_usage)([(record.node_id, report_of(record))])
        assert (await central.ask(max_tokens=10)).status_code == 429
        await central.runtime._reconcile()
        await take_ticket(central, socket, max_tokens=500)


async def test_the_rules_of_relayed_requests_hold(central: Central) -> None:
    async with central.node() as socket:
        await take_ticket(central, socket)
        for wish, status, code in (
            ({"key": "mst_wrong"}, 401, "INVALID_API_KEY"),
            ({"model": "other"}, 404, "MODEL_NOT_ALLOWED"),
            ({"max_tokens": 501}, 400, "MAX_TOKENS_TOO_LARGE"),
            ({"max_tokens": -1}, 400, "BAD_REQUEST"),
            ({"dialects": ["klingon"]}, 400, "BAD_REQUEST"),
            ({"x_pool_options": {"max_latency_ms": -1}}, 400, "BAD_REQUEST"),
        ):
            answer = await central.ask(**wish)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), wish


async def test_a_node_is_asked_for_only_in_dialects_that_it_answers(central: Central) -> None:
    async with central.node(endpoints=["/v1/chat/completions"]) as socket:
        await take_ticket(central, socket, dialects=["chat"])
        assert (await central.ask(dialects=["chat", "messages"])).json()["relay"] is True


async def test_a_new_key_reaches_nodes_before_it_signs_and_the_old_one_holds_meanwhile(central: Central) -> None:
    async with central.node() as socket:
        _, first = await take_ticket(central, socket)
        before = told_keys(socket)
        kid = await sync_to_async(rotate_ticket_key)(actor=ACTOR)
        await eventually(lambda: kid in told_keys(socket), "the node knows the new key")
        assert told_keys(socket).keys() == {*before, kid}
        said, _ = await take_ticket(central, socket)
        assert json.loads(base64.urlsafe_b64decode(said["ticket"].split(".")[0] + "=="))["kid"] in before, (
            "it does not sign yet"
        )
        del first


@pytest.mark.django_db
def test_keys_are_made_once_renewed_by_age_and_forgotten() -> None:
    keyring = TicketKeyring()
    assert keyring.find_signing() is None
    assert (ensure_ticket_key(), ensure_ticket_key(), renew_ticket_key()) == (True, False, False)
    (row,) = TicketKey.objects.all()
    assert "PRIVATE" not in row.sealed_private
    TicketKey.objects.update(created_at=timezone.now() - timedelta(days=91))
    assert (renew_ticket_key(), renew_ticket_key()) == (True, False)
    keyring.take(load_ticket_keys())
    signing = keyring.find_signing()
    assert signing is not None
    assert signing.kid == row.kid, "the new one is not known everywhere"
    assert len(keyring.list_public()) == 2
    TicketKey.objects.filter(pk=row.pk).update(retired_at=timezone.now() - timedelta(seconds=601))
    keyring.take(load_ticket_keys())
    assert [key.kid for key in keyring.list_public()] != [row.kid]
    assert len(keyring.list_public()) == 1
    TicketKey.objects.filter(pk=row.pk).update(retired_at=timezone.now() - timedelta(days=8))
    renew_ticket_key()
    assert TicketKey.objects.count() == 1
    assert [event.action for event in audited("ticket_key.rotate")] == ["ticket_key.rotate"] * 2


@pytest.mark.django_db
def test_a_key_that_cannot_be_decrypted_is_replaced(settings: Any) -> None:
    ensure_ticket_key()
    settings.SECRET_KEY = "another secret of this installation"
    keyring = TicketKeyring()
    keyring.take(load_ticket_keys())
    assert keyring.is_empty
    assert keyring.find_signing() is None
    assert ensure_ticket_key()
    keyring.take(load_ticket_keys())
    assert keyring.find_signing() is not None


@pytest.mark.parametrize(("url", "is_refused"), [(URL, False), ("http://127.0.0.1:1", True), ("http://8.8.8.8", True)])
def test_clients_are_sent_only_where_the_operator_lets_gateways_call(url: str, is_refused: bool, settings: Any) -> None:
    assert bool(find_ticket_refusal(url)) is is_refused


def report_of(record: RequestRecord, **changes: Any) -> bridge.TicketUsage:
    values = {
        "ticket_id": f"tkt_{record.pk.hex}", "record_id": format_id("req", record.pk), "model": "tiny", "status": "completed",
        "http_status": 200,
    }  # fmt: skip
    return bridge.TicketUsage(**{**values, **changes})


def ticket_record(node: Node, **changes: Any) -> RequestRecord:
    values: dict[str, Any] = {"endpoint": TICKETS_PATH, "node_id": node.pk, "state": RequestState.RUNNING, "max_tokens": 50}
    return make_record(**values | changes)


@pytest.mark.django_db
def test_a_node_speaks_for_its_own_tickets_alone() -> None:
    node, other = make_node(), make_node("other")
    record, relayed = ticket_record(node), make_record(node_id=node.pk, state=RequestState.RUNNING)
    for who, report in (
        (other, report_of(record)), (node, report_of(relayed)), (node, report_of(record, ticket_id="tkt_0")),
        (node, report_of(record, status="queued")), (node, report_of(record, record_id="req_x")),
    ):  # fmt: skip
        assert store_usage([(who.pk, report)]).ended == []
    (ended,) = store_usage([(node.pk, report_of(record, bytes_out=10_000))]).ended
    assert [event.event_id for event in UsageEvent.objects.all()] == [record.pk], "what it used is told once"
    assert update_figures() == 0, "a node does not praise itself"
    assert ended.state is RequestState.COMPLETED
    record.refresh_from_db()
    assert (record.completion_tokens, record.tokens_estimated) == (50, True), "an estimate is no more than the ticket permits"


@pytest.mark.django_db(transaction=True)
def test_a_ticket_without_a_report_ends_when_its_time_is_over_and_a_gateway_is_back() -> None:
    node, gone = make_node(), make_gateway(stopped=True)
    fresh = ticket_record(node, gateway_id=gone.pk, age_s=500)
    unused = ticket_record(node, gateway_id=gone.pk, age_s=130, state=RequestState.ASSIGNED, reserved_tokens=90)
    late = ticket_record(node, gateway_id=gone.pk, age_s=1000, reserved_tokens=80)
    assert close_orphaned_requests(confirm_s=0.01) == 0, "no gateway is there to which a node could tell it"
    back = make_gateway()
    assert close_orphaned_requests(confirm_s=0.01) == 0, "nodes have a minute to tell what they kept"
    type(back).objects.filter(pk=back.pk).update(started_at=timezone.now() - timedelta(seconds=61))
    assert close_orphaned_requests(confirm_s=0.01) == 2
    for record in (fresh, unused, late):
        record.refresh_from_db()
    assert [record.state for record in (fresh, unused, late)] == ["running", "cancelled", "interrupted"]
    roll_up_requests()
    sums = read_series(timedelta(hours=1)).total
    assert (unused.error_code, sums.failed, sums.cancelled) == ("TICKET_UNUSED", 1, 1), (
        "a ticket that nobody used has not failed"
    )
    assert {event.event_id: event.tokens for event in UsageEvent.objects.all()} == {unused.pk: 90, late.pk: 80}, "at the cap"
    assert store_usage([(node.pk, report_of(late))]).ended == [], "what has ended stays as it is"


class TlsNode:
    """A node whose port shows what its own code has been certified for. ``socket``: its session, once it has one."""

    def __init__(self, tls: ServerTls, url: str) -> None:
        self.tls, self.url = tls, url
        self._seen = 0

    async def follow(self, socket: NodeSocket) -> None:
        """Answer the gateway as the runner does, until nothing new has been said."""
        messages = socket.messages
        for message in messages[self._seen :]:
            if isinstance(message, bridge.NodeAuthorities):
                self.tls.hear_authorities(message.certificates)
                socket.say(self.tls.ask() or self.tls.describe())
            elif isinstance(message, bridge.NodeCertificate) and await self.tls.take(message):
                socket.say(self.tls.describe())
        self._seen = len(messages)

    async def until(self, socket: NodeSocket, condition: Callable[[], object], what: str) -> None:
        async def is_so() -> bool:
            await self.follow(socket)
            return bool(condition())

        await eventually(is_so, what)


@asynccontextmanager
async def serve_tls(folder: Path, *, host: str = "127.0.0.1") -> AsyncIterator[TlsNode]:
    tls = ServerTls(TlsConfig(folder=folder, host=host), now=clock.unix_s)
    await asyncio.to_thread(tls.open)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls.context) as server:
        yield TlsNode(tls, f"https://{host}:{server.sockets[0].getsockname()[1]}")


@sync_to_async
def find_ticket_error() -> str:
    return Node.objects.get().ticket_error


@pytest.fixture
def _loopback(settings: Any) -> None:
    settings.NODE_DIRECT_ALLOW_LOOPBACK = True


@pytest.mark.usefixtures("_loopback")
async def test_a_node_is_certified_over_its_session_and_clients_are_sent_there_once_they_can_verify_it(
    central: Central, tmp_path: Path
) -> None:
    certificates = central.runtime.node_channel.tickets.certificates
    async with (
        serve_tls(tmp_path / "node") as node,
        central.node(node.url, takes_certificates=True) as socket,
        httpx.AsyncClient(
            transport=httpx.ASGITransport(app=on_our_server(central.application)), base_url="http://gateway"
        ) as client,
    ):
        await node.follow(socket)
        await eventually(lambda: _is_said(NO_AUTHORITY), "the operator is told what is missing")
        assert (await client.get("/v1/ca")).status_code == 404
        await sync_to_async(create_authority)(actor=ACTOR)
        await node.until(socket, lambda: node.tls.is_held and reachable(central), "it is certified and clients are sent there")
        said, _ = await take_ticket(central, socket)
        assert (said["base_url"], said["ca_url"]) == (f"{node.url}/v1", "http://127.0.0.1:8080/v1/ca")
        answer = await client.get("/v1/ca")
        assert (answer.status_code, answer.text) == (200, certificates.authorities)
        shake_hands(node.tls.context, ssl.create_default_context(cadata=answer.text), "127.0.0.1")
        # The key of the CA was stolen: what it certified holds no more, and the node gets another certificate at once.
        await sync_to_async(rotate_authority)(is_at_once=True, actor=ACTOR)
        await eventually(lambda: certificates.authorities not in ("", answer.text), "the gateway has read it")
        await node.until(socket, lambda: node.tls.is_held and reachable(central), "it is certified anew")
        trust = ssl.create_default_context(cadata=certificates.authorities)
        shake_hands(node.tls.context, trust, "127.0.0.1")
        with pytest.raises(ssl.SSLCertVerificationError):
            shake_hands(node.tls.context, ssl.create_default_context(cadata=answer.text), "127.0.0.1")
        # Its certificate has expired, and the next one did not come.
        socket.say(bridge.CertificateRequest(is_held=False))
        await eventually(lambda: _is_said(NO_CERTIFICATE), "no client is sent where it would be refused")


async def _is_said(error: str) -> bool:
    return error in await find_ticket_error()


@pytest.mark.usefixtures("_loopback")
@pytest.mark.parametrize("what", ["another node's", "plain", "nobody's"])
async def test_a_node_gets_no_certificate_for_a_host_where_its_own_key_does_not_answer(
    central: Central, tmp_path: Path, what: str
) -> None:
    await sync_to_async(create_authority)(actor=ACTOR)
    async with AsyncExitStack() as stack:
        mine, other = [await stack.enter_async_context(serve_tls(tmp_path / name)) for name in ("mine", "other")]
        if what == "plain":
            server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
            await stack.enter_async_context(server)
            url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        else:
            url = other.url if what == "another node's" else "https://127.0.0.1:1"
        socket = await stack.enter_async_context(central.node(url, takes_certificates=True))

        def answers() -> list[bridge.NodeCertificate]:
            return [one for one in socket.messages if isinstance(one, bridge.NodeCertificate)]

        await mine.until(socket, answers, "an answer")
        (answer,) = answers()
        expected = {"another node's": "Another key", "plain": "cannot be reached", "nobody's": "cannot be reached"}[what]
        assert (answer.certificate, expected in answer.error) == ("", True), answer.error
        await eventually(lambda: _is_said("gets no certificate"), "operators see it")
        assert not any(link.ticket_url for link in central.runtime.registry)
        assert not mine.tls.is_held
        socket.say(bridge.CertificateRequest(is_held=False, csr="-----BEGIN"))
        await eventually(lambda: len(answers()) == 2, "what cannot be read is answered too")
        assert await sync_to_async(lambda: audited("node_ca.issue"))() == []
