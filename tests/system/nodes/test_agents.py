"""Agents of the central-server document: registration, session, heartbeats, commands, over real rows and ASGI in memory."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from asgiref.sync import sync_to_async
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.db import connections
from django.utils import timezone

from core.limits import limits
from gateway.process import GatewayRuntime
from gateway.services.models import allow_model
from gateway.urls import make_application
from governance.operations.runs import run_due
from governance.states import RunState
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.models import Node, NodeCredential, NodePresence, Reach
from nodes.services.agents import AgentReport, record_agent_heartbeats, register_agent
from nodes.services.availability import read_availability
from nodes.services.credentials import JWT_CREDENTIAL, revoke_credential
from nodes.services.drains import drain_node, sweep_presence
from nodes.services.sessions import load_node_rows
from nodes.states import Freshness, Health, judge_freshness
from tests.fakes.asgi_client import on_our_server
from tests.fakes.governed_team import Identity, approve_load, make_box, make_governed, only_run
from tests.fakes.limits import set_limits
from tests.fakes.links import NodeSocket, RequestSink, open_request
from tests.fakes.nodes import ACTOR, audited, make_credential, make_node, make_presence
from tests.fakes.waiting import DEADLINE_S, eventually
from wire import agent
from wire.agent import METALYARD
from wire.contract import NodeStatus
from wire.optoken.op_token import read_token

pytestmark = pytest.mark.django_db(transaction=True)

AGENT = "7a1c4d0e-6a52-4c55-9f0e-0d6f4f6c2b11"
SEED: dict[str, Any] = {
    "agent_id": AGENT,
    "agent_version": "1.2.0",
    "platform": {"os": "linux", "os_version": "Ubuntu 22.04", "arch": "x86_64"},
    "gpus": [
        {
            "gpu_id": "gpu-0", "vendor": "nvidia", "model": "RTX 4090", "vram_mb": 24576, "compute_capability": "8.9",
            "driver_version": "535.104.05", "cuda_version": "12.2", "status": "available",
        }
    ],
    "models_available": [
        {"model_id": "coder", "quantization": "q4_k_m", "vram_required_mb": 5500, "loaded": True},
        {"model_id": "chat", "quantization": "q4_k_m", "vram_required_mb": 5500, "loaded": False},
    ],
    "network": {"endpoint": "192.168.1.50:8080", "nat_type": "symmetric", "public_ip": "auto-detect"},
    "capacity": {"max_concurrent_requests": 2, "max_context_tokens": 16384},
}  # fmt: skip
BEAT: dict[str, Any] = {
    "type": "heartbeat",
    "timestamp": "2026-01-19T21:45:00Z",
    "gpu_states": [{"gpu_id": "gpu-0", "load_percent": 45, "vram_used_mb": 8200, "temperature_c": 68, "active_requests": 1}],
    "models_loaded": ["coder"],
    "queue_depth": 0,
}


@pytest.fixture(autouse=True)
async def _patience_and_connections(settings: Any) -> AsyncIterator[None]:
    """A database that a busy machine keeps waiting is not away; addresses of the document's example may be called."""
    settings.NODE_DIRECT_HOSTS = ["private"]
    set_limits(core={"database_s": 30.0}, nodes={"agent_look_s": 0.01})
    yield
    await sync_to_async(connections.close_all)()


class Central:
    """A gateway as an agent sees it."""

    def __init__(self) -> None:
        self.runtime = GatewayRuntime()
        self.application = make_application(self.runtime)
        self.secret = ""

    async def post(self, path: str, body: object, *, secret: str | None = None) -> httpx.Response:
        token = self.secret if secret is None else secret
        headers = {"authorization": f"Bearer {token}"} if token else {}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        transport = httpx.ASGITransport(app=on_our_server(self.application), client=("10.0.0.9", 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.post(path, content=content, headers=headers)

    async def register(self, **changes: object) -> dict[str, Any]:
        answer = await self.post("/api/v1/register", {**SEED, **changes})
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    async def beat(self, session_id: str, wait: float = 0, **changes: object) -> dict[str, Any]:
        answer = await self.post(f"/api/v1/session/{session_id}?wait={wait}", {**BEAT, **changes})
        assert answer.status_code == 200, answer.text
        said: dict[str, Any] = answer.json()
        return said

    @asynccontextmanager
    async def dial(self, session_id: str, **headers: str) -> AsyncIterator[NodeSocket]:
        """Open the session's socket; at the end it hangs up and the server must have let go."""
        socket = NodeSocket(headers=headers)
        socket.scope["path"] = f"/api/v1/session/{session_id}"
        task = asyncio.ensure_future(self.application(socket.scope, socket.to_server.get, socket.send))
        try:
            yield socket
        finally:
            socket.hang_up()
            async with asyncio.timeout(30):
                await task
            await self.runtime.node_channel.close()

    @asynccontextmanager
    async def delivering(self) -> AsyncIterator[None]:
        """Have commands go out meanwhile."""
        task = asyncio.ensure_future(self.runtime.node_channel.run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def central() -> Central:
    made = Central()
    for name in ("coder", "chat"):
        await sync_to_async(allow_model)(name=name, actor=ACTOR)
    _, made.secret = await sync_to_async(make_credential)("rigs", max_nodes=3)
    return made


@sync_to_async
def read_node() -> tuple[Node, NodePresence]:
    node = Node.objects.select_related("presence").get()
    return node, node.presence


def commands(socket: NodeSocket) -> list[dict[str, Any]]:
    return [json.loads(event["text"]) for event in socket.sent if event.get("text")]


async def eventually_stored(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not await sync_to_async(condition)():
            pass


def tell(socket: NodeSocket, message: object) -> None:
    socket.say(json.dumps(message))


async def test_the_documents_registration_enrols_a_node_with_its_gpus_models_and_endpoint(central: Central) -> None:
    answer = await central.register()
    node, presence = await read_node()
    assert answer["heartbeat_interval"] == 15.0
    assert answer["config"]["warnings"] == []
    assert (answer["config"]["stale_after_s"], answer["config"]["dead_after_s"]) == (17.0, 47.0)
    assert uuid.UUID(answer["session_id"]) == node.agent_session
    assert (node.agent_id, node.name, node.agent_version) == (AGENT, "agent-7a1c4d0e", "1.2.0")
    assert (node.reach, node.public_base_url) == (Reach.DIRECT, "http://192.168.1.50:8080")
    assert (node.model_names, node.max_concurrent) == (["coder"], 2), "only what is loaded gets requests"
    assert (node.gpu_name, node.vram_total_mb) == ("nvidia RTX 4090", 24576)
    assert (presence.available_models, presence.peer_address, presence.protocol) == (["chat"], "10.0.0.9", METALYARD)
    assert presence.replicas[0]["context_tokens"] == 16384
    (row,) = await sync_to_async(load_node_rows)()
    assert (row.is_direct, row.contexts, row.unreachable) == (
        True,
        {"coder": 16384},
        "its public_base_url has not been called yet",
    )


async def test_the_same_agent_again_is_the_same_node_in_a_new_session_that_fences_the_older(central: Central) -> None:
    first, second = await central.register(), await central.register()
    assert first["node_id"] == second["node_id"]
    assert first["session_id"] != second["session_id"]
    old = await central.post(f"/api/v1/session/{first['session_id']}", BEAT)
    assert (old.status_code, old.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert "Register again" in old.json()["error"]["message"]
    node, _ = await read_node()
    assert node.epoch == 2


async def test_an_agent_id_belongs_to_the_credential_that_enrolled_it(central: Central) -> None:
    await central.register()
    _, other = await sync_to_async(make_credential)("others", max_nodes=3)
    refused = await central.post("/api/v1/register", SEED, secret=other)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "agent_id")
    assert await sync_to_async(Node.objects.count)() == 1


async def test_two_agents_of_one_credential_that_want_one_name_are_two_nodes(central: Central) -> None:
    await central.register(node_name="rig")
    await central.register(node_name="rig", agent_id=str(uuid.uuid4()))
    names = await sync_to_async(lambda: sorted(Node.objects.values_list("name", flat=True)))()
    assert names[0] == "rig"
    assert names[1].startswith("rig-")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"agent_id": "rig-7"}, "agent_id"),
        ({"agent_id": 7}, "agent_id"),
        ({"gpus": [{"gpu_id": "gpu-0", "vram_mb": "24 GB"}]}, "gpus[0].vram_mb"),
        ({"models_available": [{"quantization": "q4"}]}, "models_available[0]"),
        ({"capacity": {"max_concurrent_requests": "two"}}, "capacity.max_concurrent_requests"),
    ],
)
async def test_a_registration_that_cannot_be_used_is_refused_naming_the_member(
    central: Central, changes: dict[str, object], param: str
) -> None:
    refused = await central.post("/api/v1/register", {**SEED, **changes})
    said = refused.json()["error"]
    assert (refused.status_code, said["code"], said["param"]) == (400, "BAD_REQUEST", param)
    assert await sync_to_async(Node.objects.count)() == 0


async def test_bodies_that_are_no_registration_and_tokens_that_are_none_are_refused(central: Central) -> None:
    for body in (b"", b"[]", b"{", b"[" * 5000, b"\xff"):
        assert (await central.post("/api/v1/register", body)).status_code == 400, body[:10]
    for secret in ("", "msw_wrong"):
        refused = await central.post("/api/v1/register", SEED, secret=secret)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "INVALID_NODE_TOKEN")
    by_member = await central.post("/api/v1/register", {**SEED, "auth_token": central.secret}, secret="")
    assert by_member.status_code == 200


def sign(claims: dict[str, object], key: Any, algorithm: str = "HS256", kid: str = "") -> str:
    token: str = jwt.encode({"sub": AGENT, "exp": time.time() + 60, **claims}, key, algorithm=algorithm, headers={"kid": kid})
    return token


async def test_a_jwt_signed_with_the_credential_is_as_good_as_it_and_every_other_is_refused(central: Central) -> None:
    secret, central.secret = central.secret, ""
    kid = secret.split("_")[1]
    for token, status in (
        (sign({}, secret, kid=kid), 200),
        (sign({"exp": time.time() - 60}, secret, kid=kid), 401),
        (sign({}, f"{secret}x", kid=kid), 401),
        (sign({}, secret, kid="someoneelse0"), 401),
        (sign({"sub": str(uuid.uuid4())}, secret, kid=kid), 401),
        (jwt.encode({"sub": AGENT}, secret, headers={"kid": kid}), 401),
        (jwt.encode({"sub": AGENT, "exp": time.time() + 60}, "", algorithm="none", headers={"kid": kid}), 401),
    ):
        answer = await central.post("/api/v1/register", {**SEED, "auth_token": token})
        assert answer.status_code == status, (jwt.decode(token, options={"verify_signature": False}), answer.text)


async def test_a_jwt_of_the_operators_issuer_enrols_until_its_credential_is_revoked(
    central: Central, settings: Any, tmp_path: Path
) -> None:
    private, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    public = jwt.algorithms.OKPAlgorithm.to_jwk(private.public_key(), as_dict=True)
    (tmp_path / "jwks.json").write_text(json.dumps({"keys": [{**public, "kid": "k1", "alg": "EdDSA", "use": "sig"}]}))
    settings.AGENT_JWKS, central.secret = str(tmp_path / "jwks.json"), ""
    for token, status in (
        (sign({}, private, "EdDSA", "k1"), 200),
        (sign({}, stranger, "EdDSA", "k1"), 401),
        (sign({}, private, "EdDSA", "k2"), 401),
        (sign({"provider": "nobody"}, private, "EdDSA", "k1"), 401),
    ):
        assert (await central.post("/api/v1/register", {**SEED, "auth_token": token})).status_code == status
    row = await sync_to_async(NodeCredential.objects.get)(name=JWT_CREDENTIAL)
    await sync_to_async(revoke_credential)(credential_id=row.pk, actor=ACTOR)
    refused = await central.post("/api/v1/register", {**SEED, "auth_token": sign({}, private, "EdDSA", "k1")})
    assert refused.status_code == 401


async def test_an_endpoint_outside_the_allow_list_is_recorded_and_said_to_be_unreachable(central: Central) -> None:
    answer = await central.register(network={"endpoint": "169.254.169.254:80"})
    assert "metadata" in answer["config"]["warnings"][0]
    node, presence = await read_node()
    assert node.public_base_url == "http://169.254.169.254:80"
    assert "metadata" in presence.probe_error
    without = await central.register(network={})
    assert "endpoint is missing" in without["config"]["warnings"][0]
    assert (await read_node())[0].reach == Reach.RELAY


async def test_a_heartbeat_brings_gpus_load_and_models_up_to_date(central: Central) -> None:
    session_id = (await central.register())["session_id"]
    said = await central.beat(session_id, models_loaded=["chat"], queue_depth=3)
    assert (said["commands"], said["should_drain"]) == ([], False)
    node, presence = await read_node()
    assert node.model_names == ["chat"]
    assert presence.available_models == ["coder"]
    (gpu,) = presence.gpus
    assert (gpu["memory_used_mb"], gpu["utilization_percent"], gpu["temperature_c"]) == (8200, 45, 68)
    assert (presence.vram_free_mb, presence.active_requests, presence.queue_depth) == (16376, 1, 3)
    full = [{"gpu_id": "gpu-0", "active_requests": 2}]
    await central.beat(session_id, gpu_states=full)
    assert (await read_node())[1].reported_status == NodeStatus.BUSY.value


async def test_heartbeats_out_of_order_are_signs_of_life_and_the_clock_of_an_agent_may_say_anything(central: Central) -> None:
    session_id = (await central.register())["session_id"]

    async def report(timestamp: str, depth: int) -> tuple[int | None, str]:
        await central.beat(session_id, timestamp=timestamp, queue_depth=depth)
        presence = (await read_node())[1]
        return presence.queue_depth, presence.reported_status

    assert await report("2026-01-19T21:45:00Z", 3) == (3, "available")
    assert await report("2026-01-19T21:44:45Z", 7) == (3, "available"), "said before the one that came sooner"
    heard_at = (await read_node())[1].last_heartbeat_at
    for number, timestamp in enumerate(("2026-01-19T15:45:00Z", "2099-01-01T00:00:00Z", "1970-01-01T00:00:00Z", "noon", "")):
        assert await report(timestamp, number) == (number, "available"), "a clock that is off by hours is believed in nothing"
    presence = (await read_node())[1]
    assert heard_at is not None
    assert presence.last_heartbeat_at is not None
    assert timedelta(0) < presence.last_heartbeat_at - heard_at < timedelta(seconds=DEADLINE_S)


def test_of_heartbeats_that_are_stored_together_the_one_said_last_counts() -> None:
    allow_model(name="coder", actor=ACTOR)
    said = agent.decode_register(json.dumps({**SEED, "auth_token": ""}).encode())
    session = register_agent(credential=make_credential()[0], said=said, peer_address="10.0.0.2", endpoint=("", ""))
    told = [agent.decode_message(json.dumps({**BEAT, "timestamp": f"2026-01-19T21:45:{second}Z", "queue_depth": second}))
            for second in (10, 30, 20)]  # fmt: skip
    reports = [AgentReport(session.session_id, one) for one in told if isinstance(one, agent.AgentHeartbeat)]
    assert len(record_agent_heartbeats(reports)) == 3
    assert NodePresence.objects.get().queue_depth == 30


@pytest.mark.parametrize(
    ("age_s", "freshness"),
    [(16.0, Freshness.FRESH), (18.0, Freshness.STALE), (46.0, Freshness.STALE), (48.0, Freshness.OFFLINE)],
)
def test_one_missed_heartbeat_makes_an_agent_suspect_and_three_make_it_dead(age_s: float, freshness: Freshness) -> None:
    assert judge_freshness(age_s, limits().nodes, protocol=METALYARD) is freshness


async def test_an_agent_that_three_heartbeats_are_missed_of_is_swept_offline_and_one_late_is_not(central: Central) -> None:
    await central.register()

    @sync_to_async
    def age(seconds: float) -> str:
        heard = timezone.now() - timedelta(seconds=seconds)
        NodePresence.objects.update(last_heartbeat_at=heard, probed_at=timezone.now())
        sweep_presence()
        return NodePresence.objects.get().reported_status

    @sync_to_async
    def judge() -> tuple[Health, set[Health]]:
        node = Node.objects.select_related("presence").get()
        rows = load_node_rows()
        keeper = LinkKeeper(LinkRegistry(), gateway_id=uuid.uuid4(), connect_s=1.0)
        keeper.apply(rows, targets={}, peers={})
        return read_availability(node, now=timezone.now()).health, {found.health for _, found in keeper.judge_nodes()}

    assert await age(40.0) == "available"
    assert await judge() == (Health.FAILING, {Health.FAILING})
    assert await age(50.0) == "offline"
    assert await judge() == (Health.DEAD, {Health.DEAD}), "pages, API and metrics say the same"
    assert [event.action for event in await sync_to_async(audited)("node.offline")] == ["node.offline"]


async def test_heartbeats_over_the_socket_count_and_a_goodbye_takes_the_node_offline(central: Central) -> None:
    session_id = (await central.register())["session_id"]
    async with central.dial(session_id) as socket:
        await eventually(lambda: socket.sent, pause_s=0.001)
        assert socket.sent[0]["type"] == "websocket.accept"
        tell(socket, {**BEAT, "queue_depth": 5})
        await eventually_stored(lambda: NodePresence.objects.get().queue_depth == 5)
        socket.to_server.put_nowait({"type": "websocket.disconnect", "code": 1000})
    assert (await read_node())[1].reported_status == NodeStatus.OFFLINE.value


async def test_a_socket_needs_a_session_and_no_other_credential_opens_it(central: Central) -> None:
    session_id = (await central.register())["session_id"]
    _, other = await sync_to_async(make_credential)("others")
    for path, headers, status in (
        (str(uuid.uuid4()), {}, 401),
        ("nonsense", {}, 401),
        (str(uuid.uuid4()), {"authorization": f"Bearer {central.secret}"}, 404),
        (session_id, {"authorization": f"Bearer {other}"}, 401),
        (session_id, {"authorization": "Bearer nonsense"}, 401),
    ):
        async with central.dial(path, **headers) as socket:
            await eventually(lambda: len(socket.sent) > 1, pause_s=0.001)
            assert socket.sent[0] == {**socket.sent[0], "type": "websocket.http.response.start", "status": status}
            assert b'"error"' in socket.sent[1]["body"]


@pytest.mark.parametrize(
    ("frame", "code"), [("{", 1002), ('{"type":"register"}', 1002), ('{"type":"heartbeat","queue_depth":"many"}', 1002)]
)
async def test_a_message_that_cannot_be_used_closes_the_socket_saying_why(central: Central, frame: str, code: int) -> None:
    session_id = (await central.register())["session_id"]
    async with central.dial(session_id) as socket:
        socket.say(frame)
        assert (await socket.closed())[0] == code
        assert "cannot be used" in socket.sent[-1]["reason"]


async def test_a_session_that_was_fenced_is_closed_at_its_next_heartbeat(central: Central) -> None:
    session_id = (await central.register())["session_id"]
    async with central.dial(session_id) as socket:
        await eventually(lambda: socket.sent, pause_s=0.001)
        await central.register()
        tell(socket, BEAT)
        assert (await socket.closed())[0] == 1008


async def test_a_drain_reaches_the_agent_as_a_command_by_socket_and_by_poll(central: Central) -> None:
    session_id = (await central.register())["session_id"]
    node, _ = await read_node()
    async with central.dial(session_id) as socket:
        await eventually(lambda: socket.sent, pause_s=0.001)
        await sync_to_async(drain_node)(node_id=node.pk, reason="new GPU", actor=ACTOR)
        rows = await sync_to_async(load_node_rows)()
        central.runtime.keeper.apply(rows, targets={}, peers={})
        central.runtime.node_channel.tell_agents(central.runtime.keeper.rows)
        await eventually(lambda: commands(socket), pause_s=0.001)
        (command,) = commands(socket)
        assert (command["type"], command["command"], command["params"]["reason"]) == ("command", "drain", "new GPU")
        assert 0 < command["params"]["deadline_s"] <= 120
    assert (await central.beat(session_id))["commands"] == [], "the session was told"
    session_id = (await central.register())["session_id"]
    rows = await sync_to_async(load_node_rows)()
    central.runtime.keeper.apply(rows, targets={}, peers={})
    said = [await central.beat(session_id, wait=5), await central.beat(session_id)]
    assert [one["should_drain"] for one in said] == [True, True]
    assert [one["command_id"] for each in said for one in each["commands"]] == [command["command_id"]], "once, by the same id"


class Governed:
    """An agent that takes operations, and one approved load that waits for it."""

    def __init__(self) -> None:
        self.session = uuid.uuid4()
        self.rig = Identity()
        self.node = make_box(self.rig)
        self.begin_session(self.session)
        NodePresence.objects.update(protocol=METALYARD, connected=False, probed_at=timezone.now())
        self.operation = approve_load(make_governed(), self.rig.runner_id)
        run_due()

    def begin_session(self, session: uuid.UUID) -> None:
        Node.objects.update(
            agent_id=AGENT, agent_session=session, agent_session_at=timezone.now(), reach=Reach.DIRECT,
            public_base_url="http://192.168.1.50:8080",
        )  # fmt: skip

    @property
    def run(self) -> tuple[str, str]:
        run = only_run(self.operation)
        return run.state, run.code


async def test_an_approved_load_reaches_the_agent_as_load_model_with_its_token_and_its_status_ends_the_run(
    central: Central,
) -> None:
    governed = await sync_to_async(Governed)()
    async with central.delivering(), central.dial(str(governed.session)) as socket:
        await eventually(lambda: commands(socket), pause_s=0.001)
        (command,) = commands(socket)
        assert (command["command"], command["params"]["model_id"]) == ("load_model", "m")
        token = read_token(command["params"]["verifiedOpToken"])
        assert token is not None
        tell(socket, {"type": "command_status", "command_id": command["command_id"], "state": "running", "progress": 0.5})
        tell(socket, {"type": "command_status", "command_id": command["command_id"], "state": "failed", "message": "no room"})
        await eventually_stored(lambda: governed.run[0] == RunState.FAILED.value)


async def test_a_poll_that_waits_is_answered_as_soon_as_a_command_is_there(central: Central) -> None:
    governed, central.secret = await sync_to_async(Governed)(), ""
    async with central.delivering():
        said = await central.beat(str(governed.session), wait=20)
    assert [one["command"] for one in said["commands"]] == ["load_model"]
    async with central.delivering():
        again = await central.beat(str(governed.session), wait=0.5)
    assert again["commands"] == [], "it was sent, and the agent has it"


async def test_a_command_that_an_earlier_session_was_sent_is_unknown_and_sent_again(central: Central) -> None:
    set_limits(nodes={"command_unheard_s": 0.0})
    governed, central.secret = await sync_to_async(Governed)(), ""
    async with central.delivering():
        assert (await central.beat(str(governed.session), wait=20))["commands"]
    later = uuid.uuid4()
    await sync_to_async(governed.begin_session)(later)
    async with central.delivering():
        await central.beat(str(later), wait=0.5)
    assert (await sync_to_async(lambda: governed.run)())[0] == RunState.QUEUED.value


async def test_an_agent_that_asked_for_it_gets_requests_over_its_socket(central: Central) -> None:
    session_id = (await central.register(config={"relay": True}, network={}))["session_id"]
    async with central.dial(session_id) as socket:
        await eventually(lambda: len(central.runtime.registry), pause_s=0.001)
        (link,) = central.runtime.registry
        assert (set(link.models), link.max_concurrent, link.context_of("coder")) == ({"coder"}, 2, 16384)
        node, presence = await read_node()
        assert (presence.connected, node.reach, node.agent_session) == (True, Reach.RELAY, uuid.UUID(session_id))
        link.open_stream(open_request(model="coder"), RequestSink())
        await eventually(lambda: any(event.get("bytes") for event in socket.sent), "a frame with the request", pause_s=0.001)
        tell(socket, {**BEAT, "models_loaded": ["chat"]})
        await eventually(lambda: link.models == {"chat"}, pause_s=0.001)
        assert link.gpus[0].memory_used_mb == 8200
        tell(socket, {**BEAT, "status": "draining"})
        await eventually(lambda: link.node_draining, pause_s=0.001)
    assert not len(central.runtime.registry)
    async with central.dial(session_id):  # it lost its socket, not its session
        await eventually(lambda: len(central.runtime.registry), pause_s=0.001)
    assert (await read_node())[0].agent_session == uuid.UUID(session_id)


def test_heartbeats_of_many_agents_take_the_statements_of_one(django_assert_num_queries: Any) -> None:
    credential = make_credential(max_nodes=3)[0]
    nodes = [make_node(f"n{number}", credential=credential, agent_session=uuid.uuid4()) for number in range(3)]
    for node in nodes:
        make_presence(node, protocol=METALYARD, gpus=[{"index": 0, "name": "a", "gpu_id": "g", "memory_total_mb": 9}])
    said = [agent.GpuState(gpu_id="g", vram_used_mb=5, load_percent=40.0, active_requests=1)]
    beat = agent.AgentHeartbeat(timestamp="2026-01-19T21:45:00Z", gpu_states=said, queue_depth=2, last_error="hot")
    sessions = [node.agent_session for node in nodes if node.agent_session is not None]
    record_agent_heartbeats([AgentReport(session, beat) for session in sessions])  # endpoints and statuses change once
    for some in (sessions[:1], sessions):
        with django_assert_num_queries(6):  # two are those of the transaction
            answers = record_agent_heartbeats([AgentReport(session, beat) for session in [*some, uuid.uuid4()]])
        assert [type(answer).__name__ for answer in answers] == ["AgentStanding"] * len(some) + ["SessionUnknown"]
    presence = NodePresence.objects.get(node=nodes[2])
    written = (presence.active_requests, presence.queue_depth, presence.last_error, presence.gpu_util_percent)
    assert written == (1, 2, "hot", 40.0)
    assert (presence.vram_used_mb, presence.vram_free_mb, presence.gpus[0]["memory_used_mb"]) == (5, 4, 5)
    assert presence.observed_at == datetime(2026, 1, 19, 21, 45, tzinfo=UTC)
