"""Commands on their way: a real gateway on a real socket, a box that says what the test wants, an approved operation."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import pytest
import uvicorn
from asgiref.sync import sync_to_async
from django.conf import settings as django_settings
from django.db import connection, connections
from django.utils import timezone
from pytest_django import Settings

from controlplane.gateway_server.http_protocol import GatewayHttpProtocol
from controlplane.gateway_server.ws_protocol import GatewayWebSocketProtocol
from gateway.runtime import GatewayRuntime
from gateway.urls import make_application
from governance import services
from governance.checkpoints import make_checkpoint
from governance.models import Operation, WitnessStatement
from governance.states import RunState
from nodes.models import Node, NodeCommand, NodePresence
from tests.fakes.governed_nodes import Identity, approve_load, only_run
from tests.fakes.limits import set_limits
from tests.fakes.nodes import make_credential
from tests.fakes.scripted_box import ScriptedBox
from tests.fakes.waiting import eventually
from tests.system.gateway_server.serving import run_server
from tests.system.governance.team import Team, make_due, make_governed
from wire import bridge
from wire.auditlog import LogKey, open_note, to_bytes, verify_consistency, verify_signature
from wire.optoken.approval import decode_bytes, encode_bytes, read_policy

pytestmark = pytest.mark.django_db(transaction=True)

T = TypeVar("T")
LOG_SEED = encode_bytes(b"\x07" * 32)


@pytest.fixture(autouse=True)
async def _close_connections() -> AsyncIterator[None]:
    yield
    await sync_to_async(connections.close_all)()


@pytest.fixture(autouse=True)
def _patient() -> None:
    """A database that a busy machine keeps waiting is not away."""
    set_limits(core={"database_s": 30.0})


@asynccontextmanager
async def gateway() -> AsyncIterator[tuple[GatewayRuntime, str]]:
    """A gateway that serves on loopback; yields it with the address of its worker socket."""
    runtime = GatewayRuntime()
    await runtime.start()
    config = uvicorn.Config(
        make_application(runtime),
        host="127.0.0.1",
        port=0,
        http=GatewayHttpProtocol,
        ws=GatewayWebSocketProtocol,
        lifespan="off",
        log_config=None,
        ws_per_message_deflate=False,
    )
    try:
        async with run_server(uvicorn.Server(config)) as port:
            try:
                yield runtime, f"ws://127.0.0.1:{port}/v1/worker/connect"
            finally:
                await runtime.stop()
    finally:
        await runtime.stop()


class Fleet:
    """A team that approves, and one box with its credential."""

    def __init__(self, team: Team | None = None, name: str = "rig") -> None:
        self.team = team or make_governed()
        self.rig = Identity(name)
        _, self.secret = make_credential(name, max_nodes=1)
        self.boxes: list[ScriptedBox] = []

    def add(self, name: str) -> Fleet:
        """Another box with the same team."""
        return Fleet(self.team, name)

    async def dial(self, url: str, **said: Any) -> ScriptedBox:
        """Connect the box."""
        box = await ScriptedBox.dial(
            url, secret=self.secret, name=self.rig.name, models=["m"], instance_id="i1", governance=self.rig.tell(**said)
        )
        self.boxes.append(box)
        return box

    async def approve(self) -> Operation:
        """Have a load approved and sent on its way."""
        return await sync_to_async(self._approve)()

    def _approve(self) -> Operation:
        operation = approve_load(self.team, self.rig.runner_id)
        services.run_due()
        return operation


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    made = await sync_to_async(Fleet)()
    yield made
    for box in made.boxes:
        await box.close()


async def received(box: ScriptedBox, kind: type[T], count: int = 1) -> T:
    """Return the newest message of a kind, once there are so many."""

    def find() -> T | None:
        found = [cast("T", message) for message in box.messages if isinstance(message, kind)]
        return found[-1] if len(found) >= count else None

    return await eventually(find, what=f"{count} {kind.__name__}")


def state_is(operation: Operation, state: RunState) -> Callable[[], Awaitable[bool]]:
    @sync_to_async
    def check() -> bool:
        return only_run(operation).state == state.value

    return check


async def reaches(operation: Operation, state: RunState) -> None:
    await eventually(state_is(operation, state), what=f"run {state.value}")


@sync_to_async
def let_time_pass(seconds: float) -> None:
    before = timezone.now() - timedelta(seconds=seconds)
    NodeCommand.objects.update(updated_at=before, sent_at=before)


async def test_an_approved_load_is_carried_out_and_its_end_is_proved(fleet: Fleet) -> None:
    async with gateway() as (_, url):
        box = await fleet.dial(url)
        operation = await fleet.approve()
        command = await received(box, bridge.OpCommand)
        assert (command.operation, command.body, command.use) == ("model-load", {"modelId": "m"}, 1)
        await box.send(bridge.OpStatus(op_id=command.op_id, use=1, state="running", stage="weights", fraction=0.5))
        await reaches(operation, RunState.EXECUTING)
        await box.send(fleet.rig.end(command.op_id, "succeeded", result={"gpuMemoryUsedMB": 7}))
        await reaches(operation, RunState.SUCCEEDED)
    run = await sync_to_async(only_run)(operation)
    assert (run.code, run.result, bool(run.receipt)) == ("", {"gpuMemoryUsedMB": 7}, True)


async def test_a_box_that_was_away_gets_its_command_when_it_comes_back(fleet: Fleet) -> None:
    async with gateway() as (_, url):
        box = await fleet.dial(url)
        await box.close()
        await eventually(NodePresence.objects.filter(connected=False).aexists, what="the box is known to be away")
        operation = await fleet.approve()
        await reaches(operation, RunState.QUEUED)
        box = await fleet.dial(url)
        await sync_to_async(make_due)(operation)
        await sync_to_async(services.run_due)()
        assert (await received(box, bridge.OpCommand)).operation == "model-load"


async def test_a_box_that_vanished_with_its_answer_is_asked_when_it_is_back(fleet: Fleet) -> None:
    async with gateway() as (_, url):
        box = await fleet.dial(url)
        operation = await fleet.approve()
        command = await received(box, bridge.OpCommand)
        box.die()
        box = await fleet.dial(url)
        query = await received(box, bridge.OpQuery)
        assert (query.op_id, query.use) == (command.op_id, 1)
        await box.send(fleet.rig.end(command.op_id, "succeeded"))
        await reaches(operation, RunState.SUCCEEDED)


async def test_another_gateway_takes_over_from_one_that_is_gone(fleet: Fleet) -> None:
    async with gateway() as (_, url):
        operation = None
        async with gateway() as (_, first):
            box = await fleet.dial(first)
            operation = await fleet.approve()
            command = await received(box, bridge.OpCommand)
        box = await fleet.dial(url)
        await let_time_pass(6)
        await received(box, bridge.OpQuery)
        await box.send(bridge.OpStatus(op_id=command.op_id, use=1, state="unknown"))
        await reaches(operation, RunState.QUEUED)
        await sync_to_async(make_due)(operation)
        await sync_to_async(services.run_due)()
        again = await received(box, bridge.OpCommand)
        assert again.op_id == command.op_id
        assert again.token != command.token


async def test_a_box_on_two_gateways_is_sent_it_once_and_heard_by_both(fleet: Fleet) -> None:
    async with gateway() as (first, url), gateway() as (second, other):
        boxes = [await fleet.dial(url), await fleet.dial(other)]
        await eventually(lambda: len(first.registry) == len(second.registry) == 1, what="both linked")
        operation = await fleet.approve()

        def commands() -> list[tuple[int, bridge.OpCommand]]:
            return [(n, m) for n, box in enumerate(boxes) for m in box.messages if isinstance(m, bridge.OpCommand)]

        ((index, command),) = await eventually(commands, what="a command")
        end = fleet.rig.end(command.op_id, "succeeded")
        await boxes[1 - index].send(end)
        await boxes[index].send(end)
        await reaches(operation, RunState.SUCCEEDED)
        assert len(commands()) == 1


async def test_what_a_box_says_while_the_database_fails_is_kept(fleet: Fleet) -> None:
    async with gateway() as (runtime, url):
        box = await fleet.dial(url)
        operation = await fleet.approve()
        command = await received(box, bridge.OpCommand)
        await sync_to_async(rename_table)("nodes_nodecommand", "nodes_away")
        try:
            await box.send(fleet.rig.end(command.op_id, "succeeded"))
            await eventually(lambda: runtime.workers.courier.waiting_statuses, what="a status that waits")
        finally:
            await sync_to_async(rename_table)("nodes_away", "nodes_nodecommand")
        await reaches(operation, RunState.SUCCEEDED)
        await eventually(lambda: not runtime.workers.courier.waiting_statuses, what="nothing that waits")


def rename_table(old: str, new: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")


async def test_a_box_without_governance_is_told_of_no_operation(fleet: Fleet) -> None:
    async with gateway() as (_, url):
        governed = await fleet.dial(url)
        await fleet.approve()
        await received(governed, bridge.OpCommand)
        await governed.close()
        plain = await ScriptedBox.dial(url, secret=fleet.secret, name="rig", models=["m"], instance_id="i2")
        fleet.boxes.append(plain)
        other = await sync_to_async(Fleet.add)(fleet, "other")
        beside = await other.dial(url)
        await other.approve()
        await received(beside, bridge.OpCommand)  # so no round of deliveries goes on that still knows the governed box
        await let_time_pass(60)
        before = await NodeCommand.objects.aget(node__name="rig")
        await received(beside, bridge.OpQuery)  # so a round has passed the plain box as well
        assert not [m for m in plain.messages if isinstance(m, bridge.OpCommand | bridge.OpQuery | bridge.PolicyOffer)]
        assert (await NodeCommand.objects.aget(pk=before.pk)).updated_at == before.updated_at


# Policies and checkpoints


async def test_a_box_without_a_policy_is_offered_all_of_them(fleet: Fleet) -> None:
    async with gateway() as (_, url):
        box = await fleet.dial(url, policy_version=0, policy_sha256="")
        offer = await received(box, bridge.PolicyOffer)
        (link,) = offer.policies
        policy = read_policy(decode_bytes(link["document"]))
        assert policy.ref.version == 1
        waits = fleet.rig.tell(policy_version=0, policy_error="nobody trusts it yet")
        await box.send(bridge.GovernanceReport(governance=waits))
        await eventually(Node.objects.filter(policy_error=waits.policy_error).aexists, what="the error")
        await box.send(bridge.GovernanceReport(governance=fleet.rig.tell(policy_sha256=policy.ref.sha256)))

        @sync_to_async
        def pinned() -> bool:
            return Node.objects.get().policy_version == 1

        await eventually(pinned, what="version 1 pinned")
        assert len([message for message in box.messages if isinstance(message, bridge.PolicyOffer)]) == 1


async def test_a_box_that_has_the_newest_policy_is_offered_none(fleet: Fleet) -> None:
    async with gateway() as (runtime, url):
        box = await fleet.dial(url)
        runtime.workers.courier.wake()
        await fleet.approve()
        await received(box, bridge.OpCommand)
        assert not [message for message in box.messages if isinstance(message, bridge.PolicyOffer)]


async def test_a_box_witnesses_the_audit_log_step_by_step(fleet: Fleet, settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_SEED
    make = sync_to_async(lambda: make_checkpoint(now=timezone.now()))
    first = await make()
    assert first is not None
    async with gateway() as (runtime, url):
        box = await fleet.dial(url)
        offer = await received(box, bridge.CheckpointOffer)
        assert (offer.note, offer.old_size, offer.proof) == (first.note, 0, [])
        root = base64.b64encode(bytes(first.root)).decode()
        checkpoint = open_note(offer.note, [find_log_key()], verify_signature)
        signature = base64.b64encode(fleet.rig.private_key.sign(checkpoint.witness_message(""))).decode()
        said = fleet.rig.tell(witness_size=first.size, witness_root=root)
        await box.send(bridge.GovernanceReport(governance=said, witness_signature=signature))
        await eventually(WitnessStatement.objects.filter(size=first.size, alarm=False).aexists, what="the word of the box")
        second = await make()
        assert second is not None
        assert second.size > first.size
        runtime.workers.courier.wake("checkpoints")
        offer = await received(box, bridge.CheckpointOffer, count=2)
        assert offer.old_size == first.size
        proof = [to_bytes(step) for step in offer.proof]
        assert verify_consistency(
            old=first.size, size=second.size, old_root=bytes(first.root), new_root=bytes(second.root), proof=proof
        )


async def test_a_box_that_saw_a_longer_log_is_shown_the_short_one_and_its_alarm_is_heard(
    fleet: Fleet, settings: Settings
) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_SEED
    checkpoint = await sync_to_async(lambda: make_checkpoint(now=timezone.now()))()
    assert checkpoint is not None
    seen = {"witness_size": checkpoint.size + 100_000, "witness_root": base64.b64encode(b"x" * 32).decode()}
    async with gateway() as (_, url):
        box = await fleet.dial(url, **seen)
        offer = await received(box, bridge.CheckpointOffer)
        assert offer.note == checkpoint.note
        await box.send(bridge.GovernanceReport(governance=fleet.rig.tell(**seen), witness_alarm="the log is shorter"))
        await eventually(Node.objects.filter(witness_alarm="the log is shorter").aexists, what="the alarm")


def find_log_key() -> LogKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    public = Ed25519PrivateKey.from_private_bytes(b"\x07" * 32).public_key().public_bytes_raw()
    return LogKey(django_settings.GOVERNANCE_LOG_ORIGIN, public)


async def test_statuses_are_bounded_and_a_last_word_stays_the_last(fleet: Fleet) -> None:
    async with gateway() as (runtime, url):
        await fleet.dial(url)
        await eventually(lambda: len(runtime.registry), what="linked")
        (link,) = list(runtime.registry)
        courier = runtime.workers.courier
        ended = bridge.OpStatus(op_id="op", use=1, state="failed")
        courier.take_status(link, ended)  # type: ignore[arg-type]  # the only link is a relay link
        courier.take_status(link, bridge.OpStatus(op_id="op", use=1, state="running"))  # type: ignore[arg-type]
        for number in range(100):
            courier.take_status(link, bridge.OpStatus(op_id=f"op{number}", use=1, state="running"))  # type: ignore[arg-type]
        waiting = courier.waiting_statuses
        assert len(waiting) == 64
        assert ended in waiting
        await eventually(lambda: not courier.waiting_statuses, what="all written")
