"""Whatever people, workers, nodes, crashes and thieves do in whatever order: what a quorum signed happens once, nothing else.

The whole life of operations, with a crash before and after every commit of the control plane and every write of the runner's
ledger. MUSTER_TEST_EXAMPLES=N plays N times as many orders, ``--hypothesis-profile=default --hypothesis-seed=N`` others.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import secrets
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar, Self

import pytest
from django.db import transaction
from django.db.models import Model
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from msgspec import Struct
from pytest_django import Settings

from core.models import User
from governance import tasks
from governance.errors import GovernanceError
from governance.models import ApproverKey, AuditEntry, AuditEvent, Decision, Operation, OperationRun, PolicyVersion
from governance.operations import decisions, proposals
from governance.operations import policies as freezes
from governance.operations.approvals import read_freeze
from governance.operations.policies import draft_policy, lift_freeze, name_freeze
from governance.operations.proposals import propose, use_approval
from governance.operations.runs import reconcile
from governance.states import APPROVALS, FINAL_APPROVALS, FINAL_RUNS, OPEN_RUNS, RUNS, ApprovalState, RunState
from nodes.channel import RECEIPT_INVALID
from nodes.models import NodeOpKey
from runner.ledger.ledger import FINAL_STATES
from runner.ledger.ledger import TRANSITIONS as LEDGER_TRANSITIONS
from runner.ledger.ledger import RunState as LedgerState
from tests.fakes.audit_logs import chain_events
from tests.fakes.clock import TickingClock, VirtualClock
from tests.fakes.examples import TIMES
from tests.fakes.governed_team import Member, Team, make_team
from tests.fakes.nodes import make_node, make_presence
from tests.fakes.passkeys import KeyFile, SoftPasskey
from tests.fakes.runner_process import (
    BROKER,
    BROKER_PATH,
    Effect,
    FleetNode,
    Gateway,
    Processes,
    make_folders,
    read_desired,
    read_ops,
)
from wire import bridge, clock
from wire.auditlog import entry_hash
from wire.optoken.approval import decode_bytes, encode_bytes, read_policy, read_statement
from wire.optoken.documents import ReceiptError, read_receipt
from wire.optoken.op_token import Binding, Grant, encode_token, owns_runner_id, params_digest, sign_l2

IN_POLICY = ("ana", "ben", "cleo", "dan")
NAMES = ("rig", "den")
PRODUCT = ("controlplane", "core", "gateway", "governance", "nodes", "runner", "wire")
MARKS = 40
FORGED = ("as signed", "too late", "far ahead", "other params", "other node", "own key", "twice one", "use 2")
WRITTEN = ("statement", "approvals", "run", "sending")
MOST_MODULES, MOST_CLASSES = 40, 60
"""That an approved load may cross: a newcomer has to read them."""
WHO = st.integers(0, 4)
"""The last one has a key and stands in no policy."""
WHICH = st.integers(0, 7)
SIGNERS = st.sampled_from([(), (1,), (1, 2), (1, 2), (2, 3), (0, 4), (1, 2, 3)])
NODE = st.sampled_from([0, 1])
KINDS = st.sampled_from(["load", "load", "flush", "unload", "drain"])
POINTS = {"flush": 8, "load": 12}
"""Of each kind: before and after what is looked up, the nonce, the booking, the steps of the load, the outcome."""
OPEN = [state.value for state in OPEN_RUNS]
RUN_EVENTS = {f"operation.run.{state.value}": state for state in RunState} | {"operation.dispatch": RunState.DISPATCHED}
APPROVAL_EVENTS = {
    "operation.approved": ApprovalState.APPROVED, "operation.fall_short": ApprovalState.PENDING,
    "operation.rejected": ApprovalState.REJECTED, "operation.expire": ApprovalState.EXPIRED,
    "operation.cancel": ApprovalState.CANCELLED, "operation.block": ApprovalState.BLOCKED,
}  # fmt: skip
RUN_MOVES = {(old, new) for (old, _), new in RUNS.items()}
LEDGER_MOVES = {(old, new) for (old, _), new in LEDGER_TRANSITIONS.items()}
ENDED = [state.value for state in FINAL_STATES]
APPROVAL_MOVES = {(old, new) for (old, _), new in APPROVALS.items()} | {(ApprovalState.APPROVED, ApprovalState.REJECTED)}
"""A rejection of what is approved makes it pending first, in the same transaction."""


@dataclass
class Asked:
    """An operation as the test knows it. ``nodes``: of its targets, in their order; ``needed``: approvers, by its policy.

    ``signed``: who ever signed these bytes, wherever the signature went. ``is_attacked``: somebody wrote into its rows, or
    showed a node what is none of theirs, so that the rows may say anything; ``is_twisted``: what its nodes said was changed.
    """

    row: Operation
    kind: str
    mark: str
    nodes: list[int]
    needed: int
    signed: set[str] = field(default_factory=set)
    is_attacked: bool = False
    is_twisted: bool = False

    @property
    def is_remote(self) -> bool:
        return self.kind != "drain"

    def find_params(self) -> dict[str, object]:
        return dict(read_statement(bytes(self.row.statement)).params)


class OperationLife(RuleBasedStateMachine):
    """Five people, two nodes, their control plane, what connects them, and a thief with the database."""

    team: ClassVar[Team]
    folders: ClassVar[list[Path]]
    clock: ClassVar[VirtualClock]
    began_at: ClassVar[tuple[float, float]]
    comes_back: ClassVar[bool]
    """Whether nodes do in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.clock.unix_s, self.clock.monotonic_s = self.began_at
        self.undo = transaction.atomic()
        self.undo.__enter__()
        BROKER.rings.clear()
        self.place = Path(tempfile.mkdtemp(prefix="operation-life-"))
        self.processes = Processes()
        self.nodes = [self.make_node(index) for index in (0, 1)]
        self.gateway = Gateway(self.processes, self.nodes)
        self.asked: list[Asked] = []
        self.killed = [False, False]
        self.drains = self.sent_seen = 0
        self.proved: set[tuple[Any, str]] = set()
        self.effects_seen = [0, 0]
        self.begun: list[dict[tuple[str, int], sqlite3.Row]] = [{}, {}]
        self.run_states: dict[tuple[str, str, int], RunState] = {}
        self.approval_states: dict[str, ApprovalState] = {}
        last = AuditEntry.objects.order_by("-seq").first()
        assert last is not None
        self.audited = (last.seq, bytes(last.hash))

    def make_node(self, index: int) -> FleetNode:
        row = make_node(NAMES[index], keeps_models=True)
        make_presence(row, connected=False)
        folder = self.place / NAMES[index]
        shutil.copytree(self.folders[index], folder)
        return FleetNode(row, folder, ["m", *(f"u{number}" for number in range(MARKS))])

    def teardown(self) -> None:
        try:
            if sys.exc_info()[0] is None:
                self.settle()
        finally:
            for node in self.nodes:
                node.process.kill()
            shutil.rmtree(self.place)
            transaction.set_rollback(True)
            self.undo.__exit__(None, None, None)

    @initialize(kind=KINDS, both=st.booleans())
    def begin(self, kind: str, *, both: bool) -> None:
        """Have something approved, so that most of what is tried finds something to work on."""
        self.link()
        self.ask(0, kind, (1, 2), both=both, where=0, window="now", goes_on=False)

    def pick(self, which: int) -> Asked | None:
        return self.asked[-1 - which % len(self.asked)] if self.asked else None

    # What people do

    @rule(
        who=WHO, kind=KINDS, signers=SIGNERS, both=st.booleans(), where=NODE,
        window=st.sampled_from(["now", "now", "later", "standing"]), goes_on=st.booleans(),
    )  # fmt: skip
    def ask(self, who: int, kind: str, signers: tuple[int, ...], *, both: bool, where: int, window: str, goes_on: bool) -> None:
        number = len(self.asked)
        mark = {"load": str(1000 + number), "flush": f"t{number}", "unload": f"u{number}", "drain": ""}[kind]
        kinds: dict[str, tuple[str, dict[str, object]]] = {
            "load": ("model-load", {"modelId": "m", "maxContextLength": 1000 + number, "keepLoaded": number % 2 == 0}),
            "flush": ("cache-flush", {"scope": "tag", "tag": mark, "modelId": "m"}),
            "unload": ("model-unload", {"modelId": mark}),
            "drain": ("node-drain", {"timeout_s": 0}),
        }
        operation, params = kinds[kind]
        indices = [0, 1] if both else [where]
        changes: dict[str, Any] = {"not_before": clock.now() + timedelta(hours=1)} if window == "later" else {}
        if window == "standing" and kind != "drain":
            changes = {"op_class": "standing", "max_uses": 2}
        targets = [self.nodes[index].row.name for index in indices]
        with contextlib.suppress(GovernanceError):
            row = self.processes.perform(lambda: propose(
                operation=operation, targets=targets, params=params, reason="odd", proposer=self.team[who].proposer,
                stops_on_failure=not goes_on, **changes,
            ))  # fmt: skip
            if row is not None:
                needed = read_policy(bytes(row.policy.document)).classes[row.op_class].threshold
                self.asked.append(Asked(row, kind, mark, indices, needed))
                for each in signers:
                    self.approve(each, 0)
                if window == "standing":
                    self.use(who, 0)

    @rule(who=WHO, kind=KINDS, both=st.booleans(), where=NODE)
    def have_it_done(self, who: int, kind: str, *, both: bool, where: int) -> None:
        self.ask(who, kind, (0, 1, 2, 3), both=both, where=where, window="now", goes_on=False)
        self.carry_on()

    @rule(who=WHO, which=WHICH)
    def approve(self, who: int, which: int) -> None:
        if (asked := self.pick(which)) is not None:
            member = self.team[who]
            asked.signed.add(member.name)
            with contextlib.suppress(GovernanceError):
                self.processes.perform(lambda: member.approve(asked.row))

    @rule(who=WHO, which=WHICH, how=st.sampled_from(["reject", "withdraw", "cancel"]))
    def take_back(self, who: int, which: int, how: str) -> None:
        if (asked := self.pick(which)) is not None:
            member, op_id = self.team[who], asked.row.pk
            calls: dict[str, Callable[[], object]] = {
                "reject": lambda: decisions.reject(op_id=op_id, user=member.user, comment="no"),
                "withdraw": lambda: decisions.withdraw(op_id=op_id, user=member.user),
                "cancel": lambda: proposals.cancel(op_id=op_id, proposer=member.proposer),
            }
            with contextlib.suppress(GovernanceError):
                self.processes.perform(calls[how])

    @rule(who=WHO, which=WHICH)
    def use(self, who: int, which: int) -> None:
        if (asked := self.pick(which)) is not None:
            with contextlib.suppress(GovernanceError):
                self.processes.perform(lambda: use_approval(op_id=asked.row.pk, proposer=self.team[who].proposer))

    @rule(who=WHO, is_lost=st.booleans())
    def lose_a_key(self, who: int, *, is_lost: bool) -> None:
        """Have a key revoked, or all keys of the person found again; what was taken out with one does not come back."""
        ApproverKey.objects.filter(user=self.team[who].user).update(revoked_at=clock.now() if is_lost else None)

    @rule(is_on=st.booleans())
    def freeze(self, *, is_on: bool) -> None:
        with contextlib.suppress(GovernanceError):
            if is_on:
                self.processes.perform(lambda: freezes.freeze(user=self.team[3].user, reason="odd"))
            elif (found := read_freeze()) is not None:
                named = name_freeze(found)
                self.processes.perform(transaction.atomic(lambda: lift_freeze(named=named, operation=None)))

    @precondition(lambda self: PolicyVersion.objects.count() < 3)  # which is slow
    @rule(needed=st.integers(1, 3))
    def change_the_policy(self, needed: int) -> None:
        with contextlib.suppress(GovernanceError):
            change = draft_policy(
                approvers=self.team.choices()[:4], reason="anew", proposer=self.team[0].proposer,
                thresholds={"model-load": needed, "cache-flush": needed, "policy-change": max(2, needed)},
            )  # fmt: skip
            for who in (1, 2, 3):
                with contextlib.suppress(GovernanceError):
                    self.team[who].approve(change)
            self.work()

    # What time and the processes of the control plane do

    @rule(seconds=st.sampled_from([1.0, 3.0, 6.0, 11.0, 61.0, 301.0, 3_600.0, 90_000.0]))
    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)
        for node in self.nodes:
            node.process.run()
            node.notice_its_end()

    @rule()
    def work(self) -> None:
        self.processes.perform(reconcile)

    @precondition(lambda self: bool(BROKER.rings))
    @rule(times=st.integers(0, 2))
    def answer_a_ring(self, times: int) -> None:
        run_id = BROKER.rings.pop(0)
        for _ in range(times):
            self.processes.perform(lambda: tasks.work(run_id))

    @rule(seconds=st.sampled_from([0.0, 11.0]))
    def hold_up_a_worker(self, seconds: float) -> None:
        """Have another worker look while the first one, which has taken a run, stands still."""

        def meanwhile() -> None:
            self.clock.advance(seconds)
            reconcile()

        self.processes.interrupt(meanwhile)
        self.work()

    @rule(statements=st.integers(0, 30), has_committed=st.booleans(), then=st.sampled_from(["work", "look", "hear", "approve"]))
    def kill_the_control_plane(self, statements: int, *, has_committed: bool, then: str) -> None:
        if then == "hear" and not any(node.link is not None and node.link.up for node in self.nodes):
            then = "work"
        self.processes.kill_at(statements, has_committed=has_committed)
        match then:
            case "work":
                self.work()
            case "look":
                self.gateway.look()
            case "hear":
                self.hear_one()
            case _:
                self.approve(1, 0)

    @rule()
    def look(self) -> None:
        self.gateway.look()

    # What happens to messages

    def is_on_its_way(self, direction: str, text: str = "") -> bool:
        return any(text in frame for node in self.nodes if node.link is not None for frame in getattr(node.link, direction))

    @precondition(lambda self: self.is_on_its_way("down"))
    @rule(node=NODE, place=st.integers(0, 3), fate=st.sampled_from(["arrives", "arrives", "arrives", "twice", "lost"]))
    def tell_one(self, node: int, place: int, fate: str) -> None:
        for each in (self.nodes[node], self.nodes[1 - node]):
            if each.link is not None and each.link.down:
                frame = each.link.down.pop(place % len(each.link.down))
                for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
                    each.take(frame)
                return

    @precondition(lambda self: self.is_on_its_way("up"))
    @rule(place=st.integers(0, 3), fate=st.sampled_from(["arrives", "arrives", "arrives", "twice", "lost"]))
    def hear_one(self, place: int = 0, fate: str = "arrives") -> None:
        for node in self.nodes:
            if node.link is not None and node.link.up:
                frame = node.link.up.pop(place % len(node.link.up))
                for _ in range({"lost": 0, "twice": 2}.get(fate, 1)):
                    self.gateway.take(node, frame)

    @rule()
    def carry_on(self) -> None:
        self.work()
        self.gateway.look()
        self.deliver()

    def deliver(self) -> None:
        for _ in range(20):
            waiting = [node for node in self.nodes if node.link is not None and (node.link.down or node.link.up)]
            for node in waiting:
                while node.link is not None and node.link.down:
                    node.take(node.link.down.pop(0))
                while node.link is not None and node.link.up:
                    self.gateway.take(node, node.link.up.pop(0))
            if not waiting:
                return

    @precondition(lambda self: self.is_on_its_way("up", '"receipt":'))
    @rule(how=st.sampled_from(["state", "result", "receipt", "swap"]))
    def twist_a_status(self, how: str) -> None:
        links = [(node, node.link) for node in self.nodes if node.link is not None]
        node, link, frame = next((node, link, each) for node, link in links for each in link.up if '"receipt":' in each)
        link.up.remove(frame)
        said = bridge.decode_worker_message(frame)
        assert isinstance(said, bridge.OpStatus)
        for asked in self.asked:
            asked.is_twisted |= asked.row.printed_id == said.op_id
        match how:
            case "state":
                said.state = "failed" if said.state == "succeeded" else "succeeded"
            case "result":
                said.result = {**said.result, "loadTimeMs": 1}
            case "receipt":
                said.receipt = said.receipt[:-8] + "AAAAAAAA"
            case _:
                kept = list(OperationRun.objects.exclude(receipt="").values_list("receipt", flat=True)[:1])
                said.receipt = kept[0] if kept else ""
        self.gateway.take(node, bridge.encode_message(said))

    # What nodes do

    @rule(node=NODE, mood=st.sampled_from(["works", "fails", "hangs"]))
    def change_the_mood(self, node: int, mood: Any) -> None:
        self.nodes[node].process.set_mood(mood)
        self.nodes[node].notice_its_end()

    @rule(node=NODE)
    def lose_the_link(self, node: int) -> None:
        self.nodes[node].unlink()

    @precondition(lambda self: any(node.link is None for node in self.nodes))
    @rule()
    def link(self) -> None:
        """Have every node register that is not linked; a runner that starts for it carries nothing out yet."""
        for node in self.nodes:
            if node.link is None:
                is_start = not node.process.is_up
                self.gateway.link(node)
                booked = read_ops(node.process.folder).values() if is_start else []
                assert all(row["state"] in ENDED for row in booked), "begun by a runner that has ended, and not interrupted"

    @rule(node=NODE, calls=st.integers(-1, 11))
    def kill_a_runner(self, node: int, calls: int) -> None:
        """Kill it at once (-1), or when its ledger was called so many times more in what comes next."""
        self.killed[node] = True
        each = self.nodes[node]
        if calls < 0:
            each.process.kill()
            each.notice_its_end()
            return
        each.process.kill_at(calls)
        self.carry_on()

    @precondition(lambda self: any(not node.process.is_up for node in self.nodes))
    @rule(calls=st.integers(0, 8))
    def kill_a_runner_that_starts(self, calls: int) -> None:
        """Kill it before or after it opens its ledger, or at a call of it from there until it has registered."""
        index = next(index for index, node in enumerate(self.nodes) if not node.process.is_up)
        self.killed[index] = True
        self.nodes[index].process.start(kill_at=calls)

    # What a thief does who has the database of the control plane

    @precondition(lambda self: any(asked.is_remote for asked in self.asked))
    @rule(which=WHICH, node=NODE, what=st.sampled_from([*FORGED, *WRITTEN, "old command"]))
    def steal(self, which: int, node: int, what: str) -> None:
        able = [asked for asked in self.asked if asked.is_remote]
        asked = able[-1 - which % len(able)]
        if what == "old command":
            self.show_an_old_command(node)
        elif what in FORGED:
            self.forge_a_token(asked, node, what)
        else:
            self.write_into_the_rows(asked, what)

    def show_an_old_command(self, node: int) -> None:
        for frame in self.gateway.sent[-1:]:
            command = bridge.decode_server_message(frame)
            assert isinstance(command, bridge.OpCommand)
            self.mark_attacked(command.op_id)
            self.nodes[node].take(frame)

    def forge_a_token(self, asked: Asked, node: int, what: str) -> None:
        """Make a token with the node's key from what people signed, or from something else, and show it to a node."""
        self.mark_attacked(asked.row.printed_id)
        row = Operation.objects.get(pk=asked.row.pk)
        statement, proofs = read_statement(bytes(row.statement)), [
            dict(each.proof) for each in Decision.objects.filter(operation=row, is_approval=True) if each.proof
        ]  # fmt: skip
        document = json.loads(statement.raw)
        match what:
            case "other params":
                document["params"] = self.forged_params(asked)
            case "other node":
                document["targets"] = [self.nodes[node].runner_id]
            case "own key":
                named = [member for member in self.team.members[:3] if member.name != row.requested_by]
                proofs = [self.forge_proof(statement.digest, member) for member in named]
            case "too late":
                self.clock.advance(max(0.0, statement.not_after + 1 - clock.unix_s()))
            case "twice one" if proofs:
                proofs = [proofs[0], {**proofs[0], "approver": "dan"}]
        if document != json.loads(statement.raw):
            statement = read_statement(json.dumps(document, separators=(",", ":"), sort_keys=True).encode())
        params = dict(statement.params)
        self.show(node, asked, statement.raw, params, proofs, use=2 if what == "use 2" else 1, ahead=what == "far ahead")

    def forge_proof(self, digest: bytes, member: Member) -> dict[str, object]:
        """What a key of the thief makes of it, in the name of a key of a person."""
        key = (
            replace(self.team[0].passkey, private_key=SoftPasskey().private_key) if member.key.kind == "webauthn" else KeyFile()
        )
        return {**key.sign(digest, approver=member.name), "keyid": member.key.keyid}

    def forged_params(self, asked: Asked) -> dict[str, object]:
        changed = {"modelId": "m", "maxContextLength": 9999, "tag": "forged"}
        return {name: changed.get(name, value) for name, value in asked.find_params().items()} | (
            {"modelId": "u39"} if asked.kind == "unload" else {}
        )

    def show(
        self, node: int, asked: Asked, statement: bytes, params: dict[str, object], proofs: list[dict[str, object]], *,
        use: int, ahead: bool,
    ) -> None:  # fmt: skip
        key = NodeOpKey.objects.get(node=self.nodes[node].row)
        model, now = params.get("modelId"), int(clock.unix_s())
        op_id = asked.row.printed_id
        grant = Grant(asked.row.operation, str(model), ["ben", "cleo"], secrets.token_hex(16), now)
        binding = Binding(
            audience=self.nodes[node].runner_id, params_digest=params_digest(params), op_id=op_id, kid=key.kid, use=use,
            fence=clock.unix_ms() + (3_600_000 if ahead else -60_000), expires_at=now + 300,
        )  # fmt: skip
        token = encode_token(sign_l2(bytes(key.secret), grant, binding, statement=statement, proofs=proofs))
        command = bridge.OpCommand(op_id=op_id, use=use, operation=asked.row.operation, body=params, token=token)
        if ahead:  # what is sent later has a lower fence then, and is refused for an hour
            for each in self.asked:
                each.is_attacked |= node in each.nodes
        self.nodes[node].take(bridge.encode_message(command))

    def write_into_the_rows(self, asked: Asked, what: str) -> None:
        self.mark_attacked(asked.row.printed_id)
        runs = OperationRun.objects.filter(operation=asked.row)
        match what:
            case "statement":
                document = {**json.loads(bytes(asked.row.statement)), "params": self.forged_params(asked)}
                raw = json.dumps(document, separators=(",", ":"), sort_keys=True).encode()
                rows = Operation.objects.filter(pk=asked.row.pk)
                rows.update(statement=raw, digest=read_statement(raw).digest.hex())
            case "approvals":
                self.invent_approvals(asked)
            case "run":
                runs.update(state=RunState.QUEUED.value, ended_at=None, due_at=clock.now())
            case _:
                runs.update(sent_at=None)
        self.carry_on()

    def invent_approvals(self, asked: Asked) -> None:
        digest = read_statement(bytes(asked.row.statement)).digest
        for who in (1, 2, 3):
            member = self.team[who]
            if not Decision.objects.filter(operation=asked.row, person=member.user, withdrawn_at=None).exists():
                Decision.objects.create(
                    operation=asked.row, person=member.user, person_name=member.name, is_approval=True, key=member.key,
                    proof=self.forge_proof(digest, member),
                )  # fmt: skip
        Operation.objects.filter(pk=asked.row.pk).update(state=ApprovalState.APPROVED.value)
        for position, index in enumerate(asked.nodes):
            OperationRun.objects.get_or_create(
                operation=asked.row, target=self.nodes[index].runner_id, use=1,
                defaults={"position": position, "due_at": clock.now()},
            )  # fmt: skip

    def mark_attacked(self, printed_id: str) -> None:
        for asked in self.asked:
            asked.is_attacked |= asked.row.printed_id == printed_id

    # What must hold

    @invariant()
    def everything_holds(self) -> None:
        self.read_ledgers()
        for index in (0, 1):
            self.check_effects(index)
        self.check_audit()
        self.check_rows()
        assert len(self.gateway.sent) == self.sent_seen or read_freeze() is None, "sent while everything is frozen"
        self.sent_seen = len(self.gateway.sent)

    def read_ledgers(self) -> None:
        """See what runners booked since, and that nothing that was approved earlier came behind what was approved later."""
        for index, node in enumerate(self.nodes):
            if not node.process.is_up:
                continue
            rows = read_ops(node.process.folder)
            before = self.begun[index]
            assert before.keys() <= rows.keys(), "the ledger has forgotten"
            for key, row in rows.items():
                if key in before:
                    self.compare(before[key], row)
                    continue
                mates = [other["fence"] for other in before.values() if other["slot"] == row["slot"]]
                assert row["fence"] > max(mates, default=0), "an earlier operation came behind a later one"
            self.begun[index] = rows
            loads = [row for row in rows.values() if row["operation"] == "model-load"]
            kept = {row["fence"] for row in loads if row["state"] == "succeeded"}
            assert set(read_desired(node.process.folder).values()) <= kept, "kept loaded, and its load did not succeed"

    def compare(self, before: sqlite3.Row, row: sqlite3.Row) -> None:
        """Have a run go on as the table says, and keep what it was given once."""
        state, now = (LedgerState(each["state"]) for each in (before, row))
        assert state is now or (state, now) in LEDGER_MOVES, f"{state} became {now}"
        for name in ("nonce", "op_key", "slot", "fence", "begun_at", "statement_digest"):
            assert before[name] == row[name], f"the {name} of a run changed"
        assert before["receipt"] in {"", row["receipt"]}, "a receipt changed"
        assert before["outcome"] in {None, row["outcome"]} or (row["receipt"] and not before["receipt"])

    def check_effects(self, index: int) -> None:
        node = self.nodes[index]
        by_mark = {asked.mark: asked for asked in self.asked if asked.is_remote}
        for effect in node.effects[self.effects_seen[index] :]:
            asked = by_mark.get(effect.mark)
            assert asked is not None, f"nobody signed {effect}"
            self.check_effect(effect, asked, index)
        self.effects_seen[index] = len(node.effects)
        done = Counter(effect.mark for effect in node.effects)
        for mark, times in done.items():
            asked = by_mark[mark]
            ids = {asked.row.printed_id}
            booked = sum(op_id in ids for op_id, _ in self.begun[index])
            assert times <= asked.row.max_uses, "done more often than was signed"
            assert not node.process.is_up or times <= booked, "done and not booked, or twice"

    def check_effect(self, effect: Effect, asked: Asked, index: int) -> None:
        signers = (asked.signed & set(IN_POLICY)) - {asked.row.requested_by}
        assert effect.kind == asked.kind
        assert index in asked.nodes, "done where nobody signed"
        assert len(signers) >= asked.needed, "done without its quorum"
        assert effect.policy == asked.row.policy.version, "done under another policy"
        assert asked.row.not_before.timestamp() - 60 <= effect.at_s <= asked.row.not_after.timestamp(), "done out of its window"
        if not asked.is_attacked:
            standing = Decision.objects.filter(operation=asked.row, is_approval=True, withdrawn_at=None)
            assert standing.count() >= asked.needed, "done after it was taken back"

    def check_audit(self) -> None:
        """Have every event in the chain, and each state follow from the one before by the tables."""
        chain_events()
        seq, last = self.audited
        exempt = {asked.row.printed_id for asked in self.asked if asked.is_attacked}
        for entry in AuditEntry.objects.filter(seq__gt=seq).select_related("event").order_by("seq"):
            event = entry.event
            assert (entry.seq, bytes(entry.prev_hash)) == (seq + 1, last)
            assert entry_hash(entry.seq, last, bytes(event.body)) == bytes(entry.hash)
            seq, last = entry.seq, bytes(entry.hash)
            self.drains += event.action == "node.drain"
            if event.op_id not in exempt:
                self.follow(event)
        self.audited = (seq, last)

    def follow(self, event: AuditEvent) -> None:
        if event.action in APPROVAL_EVENTS:
            before, after = self.approval_states.get(event.op_id, ApprovalState.PENDING), APPROVAL_EVENTS[event.action]
            assert (before, after) in APPROVAL_MOVES, f"{before} became {after}"
            self.approval_states[event.op_id] = after
        if event.action in RUN_EVENTS:
            key = (event.op_id, str(event.detail["target"]), int(str(event.detail["use"])))
            old, new = self.run_states.get(key, RunState.QUEUED), RUN_EVENTS[event.action]
            assert (old, new) in RUN_MOVES, f"{old} became {new}"
            self.run_states[key] = new

    def check_rows(self) -> None:
        """Have rows say what the audit trail says, and ended runs what their runner wrote down."""
        by_pk = {asked.row.pk: asked for asked in self.asked}
        drained = 0
        for row in Operation.objects.filter(pk__in=by_pk).prefetch_related("runs"):
            asked = by_pk[row.pk]
            for run in row.runs.all():
                self.check_receipt(run, asked)
                drained += asked.kind == "drain" and run.state == RunState.SUCCEEDED.value
                if not asked.is_attacked:
                    assert run.state == self.run_states.get((row.printed_id, run.target, run.use), RunState.QUEUED)
                    assert (run.ended_at is not None) == (RunState(run.state) in FINAL_RUNS)
                    self.check_agreement(run, asked)
            if not asked.is_attacked:
                assert row.state == self.approval_states.get(row.printed_id, ApprovalState.PENDING)
                assert row.state not in FINAL_APPROVALS or not any(run.state in OPEN for run in row.runs.all())
        assert self.drains == drained, "a drain was done twice, or not at all"

    def check_receipt(self, run: OperationRun, asked: Asked) -> None:
        if not run.receipt or (run.pk, run.receipt) in self.proved:
            return
        self.proved.add((run.pk, run.receipt))
        node = next(node for node in self.nodes if node.row.name == run.target.partition("#")[0])
        key = decode_bytes(run.receipt_key)
        assert owns_runner_id(run.target, key)
        try:
            receipt = read_receipt(run.receipt, key)
        except ReceiptError as error:
            pytest.fail(f"a receipt is kept that proves nothing: {error}")
        assert (receipt.op_id, receipt.use, receipt.runner_id) == (asked.row.printed_id, run.use, run.target)
        assert receipt.statement_digest == asked.row.digest
        booked = self.begun[self.nodes.index(node)].get((asked.row.printed_id, run.use))
        assert booked is None or booked["receipt"] in {"", run.receipt}

    def check_agreement(self, run: OperationRun, asked: Asked) -> None:
        if not asked.is_remote or run.state in OPEN:
            return
        index = next(index for index, node in enumerate(self.nodes) if run.target.startswith(f"{node.row.name}#"))
        if not self.nodes[index].process.is_up:
            return
        booked = self.begun[index].get((asked.row.printed_id, run.use))
        outcome = None if booked is None else booked["state"]
        if run.state == RunState.SKIPPED.value:
            assert outcome is None, "skipped, and done"
        elif run.state == RunState.SUCCEEDED.value:
            assert outcome == "succeeded" or asked.is_twisted
            assert run.receipt or run.code == RECEIPT_INVALID
        elif run.state == RunState.FAILED.value:
            assert outcome in {None, "failed"} or asked.is_twisted, "failed, and done"

    def settle(self) -> None:
        """Let everybody live for as long as it takes, or, where nodes never come back, for as long as anything may take."""
        for node in self.nodes:
            node.process.set_mood("works")
            node.notice_its_end()
        if self.comes_back:
            self.freeze(is_on=False)
            for who in range(5):
                self.lose_a_key(who, is_lost=False)
            self.be_killed()
            self.live()
        for node in self.nodes:
            node.process.kill()
            node.notice_its_end()
        for days in (1, 1, 1, 8, 2):
            self.clock.advance(days * 90_000.0)
            self.work()
        self.link()
        self.everything_holds()
        for asked in self.asked:
            if not asked.is_attacked:
                row = Operation.objects.get(pk=asked.row.pk)
                runs = list(row.runs.all())
                assert row.state != ApprovalState.PENDING.value, "nobody is asked any more, and it is pending"
                assert not any(run.state in OPEN for run in runs), "a run has no end"
                assert row.state != ApprovalState.APPROVED.value or runs

        if self.comes_back:
            self.be_robbed()

    def be_killed(self) -> None:
        """Have the first runner killed before and after each call of its ledger in the life of each kind of operation."""
        self.clock.advance(3_700.0)  # a fence of a thief may be an hour ahead
        for kind in ("flush", "load"):
            calls = 0
            while self.is_killed_in(kind, calls):
                calls += 1
            assert calls >= POINTS[kind], "the ledger is called less often than it is written"
        self.link()
        states = [row["state"] for row in read_ops(self.nodes[0].process.folder).values()]
        assert "interrupted" in states, "no operation was cut off"

    def is_killed_in(self, kind: str, calls: int) -> bool:
        """Have an operation carried out and the runner killed at this call; return whether there were so many."""
        for _ in range(2):  # what was cut off before is not asked about any more
            self.link()
            self.carry_on()
            self.clock.advance(11.0)
        process = self.nodes[0].process
        self.ask(0, kind, (1, 2, 3), both=False, where=0, window="now", goes_on=False)
        self.kill_a_runner(0, calls)
        self.everything_holds()
        if process.is_up:
            process.kill_at(None)
            return False
        process.start(kill_at=calls % 4)  # and again while it comes back
        self.nodes[0].notice_its_end()
        return True

    def be_robbed(self) -> None:
        """Have the thief try everything: on what one person signed, on what is signed and then repeated, and too late."""
        half, whole, late = (self.ask_for_load(signers) for signers in [(1,), (1, 2, 3), (1, 2, 3)])
        for node in (0, 1):
            for what in ("as signed", "other params", "other node", "own key", "twice one"):
                self.forge_a_token(half, node, what)
            for what in ("far ahead", "use 2", "as signed"):
                self.forge_a_token(whole, node, what)
            self.everything_holds()
            self.forge_a_token(late, node, "as signed")  # its fence is behind that of the other
            self.everything_holds()
            self.show_an_old_command(node)
        self.forge_a_token(late, 0, "too late")
        for what in WRITTEN:
            self.write_into_the_rows(half, what)
            self.write_into_the_rows(whole, what)
        self.everything_holds()

    def ask_for_load(self, signers: tuple[int, ...]) -> Asked:
        self.ask(0, "load", signers, both=False, where=0, window="now", goes_on=False)
        return self.asked[-1]

    def live(self) -> None:
        for _ in range(80):
            self.link()
            self.carry_on()
            self.everything_holds()
            left = OperationRun.objects.filter(operation__in=[a.row for a in self.asked if not a.is_attacked], state__in=OPEN)
            opens_at = left.order_by("operation__not_before").values_list("operation__not_before", flat=True).first()
            if opens_at is None:
                break
            self.clock.advance(max(7.0, opens_at.timestamp() - clock.unix_s()))
        else:
            pytest.fail("everybody lives, and a run has no end")
        for asked in self.asked:
            if asked.is_remote and not (asked.is_attacked or asked.is_twisted):
                self.check_done_once(asked)

    def check_done_once(self, asked: Asked) -> None:
        for index in asked.nodes:
            target = self.nodes[index].runner_id
            runs = list(OperationRun.objects.filter(operation=asked.row, target=target))
            done = sum(effect.mark == asked.mark for effect in self.nodes[index].effects)
            states = Counter(run.state for run in runs)
            lost = states[RunState.RESOLVED.value]
            broken = sum(run.state == RunState.FAILED.value and bool(run.receipt) for run in runs)
            assert states[RunState.SUCCEEDED.value] + broken <= done <= states[RunState.SUCCEEDED.value] + broken + lost
            assert not lost or self.killed[index], "no runner was killed, and nobody knows how it went"


def make_people() -> Team:
    """Three with passkeys, one with a key file, and one whom no policy names; the policy of the four is active."""
    team = make_team("ana", "ben", "cleo")
    key_file, user = KeyFile(), User.objects.create_user("dan", is_staff=True)
    row = ApproverKey.objects.create(
        user=user, kind=ApproverKey.Kind.ED25519, keyid=key_file.keyid, public_key=encode_bytes(key_file.public_key),
        thumbprint=hashlib.sha256(key_file.public_key).hexdigest(), label="key file of dan",
    )  # fmt: skip
    team.members.append(Member(user, key_file, row))  # type: ignore[arg-type]  # it signs as a passkey does
    team.start()
    team.add("eve")
    return team


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> VirtualClock:
    ticking = TickingClock()
    clock.install(ticking)  # the fixture real_clock takes it away again
    monkeypatch.setattr("django.utils.timezone.now", clock.now)
    return ticking


@pytest.mark.django_db
@pytest.mark.timeout(1200)  # with another profile it plays for many minutes
@pytest.mark.parametrize("comes_back", [True, False], ids=["nodes come back", "nodes stay away"])
def test_what_a_quorum_signed_happens_once_and_nothing_else_does(
    tmp_path: Path, settings: Settings, turned: VirtualClock, *, comes_back: bool
) -> None:
    settings.TASK_APP, OperationLife.comes_back = BROKER_PATH, comes_back
    OperationLife.clock, OperationLife.team = turned, make_people()
    OperationLife.folders = make_folders(tmp_path, NAMES)
    turned.advance(60.0)
    chain_events()
    OperationLife.began_at = (turned.unix_s, turned.monotonic_s)
    run_state_machine_as_test(OperationLife, settings=choose_length())


def choose_length() -> settings:
    """One order in the gate, always the same, of whose faults nobody waits for the shortest; else what the profile says."""
    common: dict[str, Any] = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
    if settings.get_current_profile_name() == "ci":
        phases = (Phase.explicit, Phase.generate)
        return settings(
            max_examples=TIMES, stateful_step_count=20, derandomize=True,
            phases=phases, **common,
        )  # fmt: skip
    return settings(**common)


class Rooms:
    """Which modules and classes of the product a ``with`` block crosses. What runs when a module is imported does not count."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.classes: set[str] = set()

    def __enter__(self) -> Self:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, found: object) -> None:
        is_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
        module = str(frame.f_globals.get("__name__"))
        if event != "return" or not is_function or module.partition(".")[0] not in PRODUCT or module == "wire.logs":
            return  # what writes the lines of the log decides nothing of an operation
        self.modules.add(module)
        # msgspec and Django make their instances without a frame of ours: they are seen where they are held.
        held = [each for each in (found, *frame.f_locals.values()) if isinstance(each, Struct | Model)]
        if "self" in frame.f_locals:
            held.append(frame.f_locals["self"])
        self.classes |= {f"{type(each).__module__}.{type(each).__qualname__}" for each in held}


@pytest.mark.django_db
def test_an_approved_load_crosses_few_rooms(tmp_path: Path, settings: Settings, turned: VirtualClock) -> None:
    """Print and count what runs from the proposal to the stored receipt, without the pages and the sockets at both ends."""
    settings.TASK_APP, OperationLife.comes_back = BROKER_PATH, False
    OperationLife.clock, OperationLife.team = turned, make_people()
    OperationLife.folders = make_folders(tmp_path, NAMES)
    turned.advance(60.0)
    chain_events()
    OperationLife.began_at = (turned.unix_s, turned.monotonic_s)
    life = OperationLife()
    try:
        life.link()
        load_one_model(life)  # so that what is imported at its first use is
        with Rooms() as rooms:
            run = load_one_model(life)
        assert run.state == RunState.SUCCEEDED.value
        assert run.receipt
    finally:
        life.teardown()
    for name, found, most in [("modules", rooms.modules, MOST_MODULES), ("classes", rooms.classes, MOST_CLASSES)]:
        print(f"\n{len(found)} {name} of an approved load:", *sorted(found), sep="\n  ")
        assert len(found) <= most, f"an approved load crosses {len(found)} {name}"


def load_one_model(life: OperationLife) -> OperationRun:
    life.ask(0, "load", (1, 2), both=False, where=0, window="now", goes_on=False)
    life.answer_a_ring(1)
    life.carry_on()
    return OperationRun.objects.get(operation=life.asked[-1].row)
