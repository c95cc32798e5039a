"""What goes between a gateway and its nodes beside requests, over sockets in memory: commands, policies, checkpoints."""

from __future__ import annotations

import asyncio
import base64
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import psycopg
import pytest
from asgiref.sync import sync_to_async
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.conf import settings as django_settings
from django.db import connection, connections
from django.utils import timezone
from pytest_django import Settings

from governance.checkpoints import make_checkpoint
from governance.models import Operation, OperationRun, WitnessStatement
from governance.operations.runs import run_due
from governance.states import RunState
from nodes.models import Node, NodePresence
from tests.fakes.governed_team import Identity, Team, approve_load, make_due, make_governed, only_run
from tests.fakes.limits import set_limits
from tests.fakes.links import Door, NodeSocket, dial, hello
from tests.fakes.nodes import make_credential
from tests.fakes.waiting import eventually
from wire import bridge
from wire.auditlog import LogKey, open_note, to_bytes, verify_consistency, verify_signature
from wire.optoken.approval import decode_bytes, encode_bytes, read_policy

pytestmark = pytest.mark.django_db(transaction=True)

T = TypeVar("T")
LOG_SEED = b"\x07" * 32


@pytest.fixture(autouse=True)
async def _limits_and_connections() -> AsyncIterator[None]:
    """A database that a busy machine keeps waiting is not away; one that is, is tried again soon."""
    set_limits(
        core={"database_s": 30.0}, nodes={"channel_sweep_s": 0.05, "channel_retry_s": 0.02, "channel_hint_pause_s": 0.01}
    )
    yield
    await sync_to_async(connections.close_all)()


@asynccontextmanager
async def gateway(number: int = 1) -> AsyncIterator[Door]:
    """A gateway that carries commands."""
    door = Door(gateway_id=uuid.UUID(int=number))
    task = asyncio.create_task(door.channel.run())
    try:
        yield door
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


class Governed:
    """A team that approves, and one node with its credential."""

    def __init__(self, team: Team | None = None, name: str = "rig") -> None:
        self.team = team or make_governed()
        self.rig = Identity(name)
        _, self.secret = make_credential(name, max_nodes=1)

    @asynccontextmanager
    async def link(
        self, door: Door, *, is_plain: bool = False, instance_id: str = "i1", **said: Any
    ) -> AsyncIterator[NodeSocket]:
        """Connect the node; ``is_plain``: without a word on how it decides."""
        async with dial(door, self.secret) as socket:
            socket.say(hello(self.rig.name, instance_id=instance_id, governance=None if is_plain else self.rig.tell(**said)))
            await socket.acknowledged()
            yield socket

    async def approve(self) -> Operation:
        """Have a load approved and sent on its way."""
        return await sync_to_async(self._approve)()

    def _approve(self) -> Operation:
        operation = approve_load(self.team, self.rig.runner_id)
        run_due()
        return operation


@pytest.fixture
async def governed() -> Governed:
    return await sync_to_async(Governed)()


def heard(socket: NodeSocket, kind: type[T]) -> list[T]:
    """What of a kind the node was told."""
    return [cast("T", message) for message in socket.messages if isinstance(message, kind)]


async def received(socket: NodeSocket, kind: type[T], count: int = 1) -> T:
    """Return the newest message of a kind, once there are so many."""
    return (
        await eventually(lambda: found if len(found := heard(socket, kind)) >= count else None, f"{count} {kind.__name__}")
    )[-1]


async def reaches(operation: Operation, state: RunState) -> None:
    @sync_to_async
    def check() -> bool:
        return only_run(operation).state == state.value

    await eventually(cast("Callable[[], Awaitable[bool]]", check), f"run {state.value}")


@sync_to_async
def let_time_pass(seconds: float) -> None:
    before = timezone.now() - timedelta(seconds=seconds)
    OperationRun.objects.update(contact_at=before, sent_at=before)


@sync_to_async
def dispatch_again(operation: Operation) -> None:
    make_due(operation)
    run_due()


def rename_table(old: str, new: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {old} RENAME TO {new}")


async def test_an_approved_load_is_carried_out_and_its_end_is_proved_though_the_database_was_away(
    governed: Governed, caplog: pytest.LogCaptureFixture
) -> None:
    async with gateway() as door, governed.link(door) as socket:
        operation = await governed.approve()
        command = await received(socket, bridge.OpCommand)
        assert (command.operation, command.body, command.use) == ("model-load", {"modelId": "m"}, 1)
        socket.say(bridge.OpStatus(op_id=command.op_id, use=1, state="running", stage="weights", fraction=0.5))
        await reaches(operation, RunState.EXECUTING)
        await sync_to_async(rename_table)("governance_operationrun", "governance_away")
        try:
            socket.say(governed.rig.end(command.op_id, "succeeded", result={"gpuMemoryUsedMB": 7}))
            await eventually(lambda: "node.courier_waits" in caplog.text, "a round that the database failed")
            await eventually(lambda: door.channel.waiting_statuses, "a status that waits")
        finally:
            await sync_to_async(rename_table)("governance_away", "governance_operationrun")
        await reaches(operation, RunState.SUCCEEDED)
        await eventually(lambda: not door.channel.waiting_statuses, "nothing that waits")
    run = await sync_to_async(only_run)(operation)
    assert (run.code, run.result, bool(run.receipt)) == ("", {"gpuMemoryUsedMB": 7}, True)


async def test_a_last_word_that_comes_while_progress_is_being_stored_is_stored_next(governed: Governed) -> None:
    @sync_to_async
    def is_held_up() -> bool:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'")
            return cursor.fetchone() is not None

    async with gateway() as door, governed.link(door) as socket:
        operation = await governed.approve()
        command = await received(socket, bridge.OpCommand)
        with psycopg.connect(**connection.get_connection_params()) as other:
            other.execute("SELECT 1 FROM governance_operationrun FOR UPDATE")
            socket.say(bridge.OpStatus(op_id=command.op_id, use=1, state="running", stage="weights"))
            await eventually(cast("Callable[[], Awaitable[bool]]", is_held_up), "progress that waits for the row")
            socket.say(governed.rig.end(command.op_id, "succeeded"))
            await eventually(lambda: [each.state for each in door.channel.waiting_statuses] == ["succeeded"])
        await reaches(operation, RunState.SUCCEEDED)


async def test_a_box_that_was_away_gets_its_command_when_it_comes_back(governed: Governed) -> None:
    async with gateway() as door:
        async with governed.link(door):
            pass
        await eventually(NodePresence.objects.filter(connected=False).aexists, "the node is known to be away")
        operation = await governed.approve()
        await reaches(operation, RunState.QUEUED)
        async with governed.link(door) as socket:
            await dispatch_again(operation)
            command = await received(socket, bridge.OpCommand)
            assert command.operation == "model-load"
        async with governed.link(door) as socket:  # it vanished with its answer
            query = await received(socket, bridge.OpQuery)
            assert (query.op_id, query.use) == (command.op_id, 1)
            socket.say(governed.rig.end(command.op_id, "succeeded"))
            await reaches(operation, RunState.SUCCEEDED)


async def test_a_box_on_two_gateways_is_sent_it_once_and_the_one_that_is_left_goes_on(governed: Governed) -> None:
    async with gateway(1) as first, gateway(2) as second, AsyncExitStack() as leaving:
        here = await leaving.enter_async_context(governed.link(first))
        async with governed.link(second) as there:
            operation = await governed.approve()

            def commands() -> list[bridge.OpCommand]:
                return [command for socket in (here, there) for command in heard(socket, bridge.OpCommand)]

            (command,) = await eventually(commands, "a command")
            await leaving.aclose()
            await let_time_pass(6)
            await received(there, bridge.OpQuery)
            assert len(commands()) == 1
            there.say(bridge.OpStatus(op_id=command.op_id, use=1, state="unknown"))
            await reaches(operation, RunState.QUEUED)
            await dispatch_again(operation)
            (again,) = await eventually(lambda: commands()[1:], "the command again")
            assert (again.op_id == command.op_id, again.token == command.token) == (True, False)
            there.say(governed.rig.end(command.op_id, "succeeded"))
            await reaches(operation, RunState.SUCCEEDED)


async def test_a_box_without_governance_is_told_of_no_operation(governed: Governed) -> None:
    other = await sync_to_async(Governed)(governed.team, "other")
    async with gateway() as door, other.link(door) as beside:
        async with governed.link(door) as socket:
            await governed.approve()
            await received(socket, bridge.OpCommand)
        async with governed.link(door, is_plain=True, instance_id="i2") as plain:
            await other.approve()
            await received(beside, bridge.OpCommand)  # so no round of deliveries goes on that still knows the governed node
            await let_time_pass(60)
            before = await OperationRun.objects.aget(target=governed.rig.runner_id)
            await received(beside, bridge.OpQuery)  # so a round has passed the plain node as well
            assert not [m for m in plain.messages if isinstance(m, bridge.OpCommand | bridge.OpQuery | bridge.PolicyOffer)]
            assert (await OperationRun.objects.aget(pk=before.pk)).contact_at == before.contact_at


# Policies and checkpoints


async def test_a_box_without_a_policy_is_offered_all_of_them_and_one_that_has_the_newest_none(governed: Governed) -> None:
    async with gateway() as door, governed.link(door, policy_version=0, policy_sha256="") as socket:
        offer = await received(socket, bridge.PolicyOffer)
        (link,) = offer.policies
        policy = read_policy(decode_bytes(link["document"]))
        assert policy.ref.version == 1
        waits = governed.rig.tell(policy_version=0, policy_error="nobody trusts it yet")
        socket.say(bridge.GovernanceReport(governance=waits))
        await eventually(Node.objects.filter(policy_error=waits.policy_error).aexists, "the error")
        socket.say(bridge.GovernanceReport(governance=governed.rig.tell(policy_sha256=policy.ref.sha256)))
        await eventually(Node.objects.filter(policy_version=1).aexists, "version 1 pinned")
        door.channel.wake()
        await governed.approve()
        await received(socket, bridge.OpCommand)
        assert len(heard(socket, bridge.PolicyOffer)) == 1


def find_log_key() -> LogKey:
    public = Ed25519PrivateKey.from_private_bytes(LOG_SEED).public_key().public_bytes_raw()
    return LogKey(django_settings.GOVERNANCE_LOG_ORIGIN, public)


async def test_a_box_witnesses_the_audit_log_step_by_step(governed: Governed, settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = encode_bytes(LOG_SEED)
    make = sync_to_async(lambda: make_checkpoint(now=timezone.now()))
    first = await make()
    assert first is not None
    async with gateway() as door, governed.link(door) as socket:
        offer = await received(socket, bridge.CheckpointOffer)
        assert (offer.note, offer.old_size, offer.proof) == (first.note, 0, [])
        root = base64.b64encode(bytes(first.root)).decode()
        checkpoint = open_note(offer.note, [find_log_key()], verify_signature)
        signature = base64.b64encode(governed.rig.private_key.sign(checkpoint.witness_message(""))).decode()
        said = governed.rig.tell(witness_size=first.size, witness_root=root)
        socket.say(bridge.GovernanceReport(governance=said, witness_signature=signature))
        await eventually(WitnessStatement.objects.filter(size=first.size, alarm=False).aexists, "the word of the node")
        second = await make()
        assert second is not None
        assert second.size > first.size
        door.channel.wake("checkpoints")
        offer = await received(socket, bridge.CheckpointOffer, count=2)
        assert offer.old_size == first.size
        proof = [to_bytes(step) for step in offer.proof]
        assert verify_consistency(
            old=first.size, size=second.size, old_root=bytes(first.root), new_root=bytes(second.root), proof=proof
        )


async def test_a_box_that_saw_a_longer_log_is_shown_the_short_one_and_its_alarm_is_heard(
    governed: Governed, settings: Settings
) -> None:
    settings.GOVERNANCE_LOG_KEY = encode_bytes(LOG_SEED)
    checkpoint = await sync_to_async(lambda: make_checkpoint(now=timezone.now()))()
    assert checkpoint is not None
    seen: dict[str, Any] = {"witness_size": checkpoint.size + 100_000, "witness_root": base64.b64encode(b"x" * 32).decode()}
    async with gateway() as door, governed.link(door, **seen) as socket:
        offer = await received(socket, bridge.CheckpointOffer)
        assert offer.note == checkpoint.note
        socket.say(bridge.GovernanceReport(governance=governed.rig.tell(**seen), witness_alarm="the log is shorter"))
        await eventually(Node.objects.filter(witness_alarm="the log is shorter").aexists, "the alarm")
