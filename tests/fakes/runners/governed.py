"""A node of level L2 on a real socket: enrolled beforehand where a test is about something else, with approvals for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runner.ledger.ledger import Ledger
from runner.operations.commands import Commands
from runner.operations.gate import Admitted, Gate, GateRules
from runner.operations.operation import Operations
from runner.operations.trust import PolicyStore, write_trusted
from runner.parts import Parts
from runner.pool.loads import Pool
from tests.fakes.ledgers import T0, Clock
from tests.fakes.policies import Fleet, Issuer
from tests.fakes.runners.parts import Bench, assembled, write_models
from tests.fakes.scripted_gateway import ConnectedBox
from tests.fakes.signed_tokens import KEY
from tests.fakes.waiting import eventually
from wire import bridge
from wire.ids import new_uuid7
from wire.optoken.approval import decode_bytes
from wire.optoken.documents import Receipt, digest_result, read_receipt
from wire.optoken.op_token import Binding, Grant, encode_token, params_digest, sign_l0, sign_l1
from wire.optoken.verifier import Level, Operation

FINAL = frozenset({"succeeded", "failed", "refused", "interrupted", "unknown"})


async def enrol(data: Path, fleet: Fleet) -> None:
    """Leave the data folder of a node on which a person confirmed the policy of ``fleet``, and that has taken it over."""
    data.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    write_trusted(data, fleet.words)
    ledger = await Ledger.open(data)
    try:
        store = PolicyStore(ledger, lambda: fleet.words)
        await store.offer(fleet.links)
        assert store.policy == fleet.policy
    finally:
        await ledger.close()


def options_of(tmp_path: Path) -> tuple[list[str], dict[str, str]]:
    """Flags and variables of a node with the models ``a`` and ``b`` and a data folder."""
    models = write_models(tmp_path / "models", "a", "b")
    return ["--threads", "1", "--data", str(tmp_path / "data")], {"MODEL_BASE_PATH": str(models)}


class Control:
    """The control plane of one connected node: sends commands, reads statuses."""

    def __init__(self, box: ConnectedBox, fleet: Fleet) -> None:
        governance = box.register.governance
        assert governance is not None
        self.box = box
        self.governance = governance
        self.issuer = Issuer.of(fleet, governance)

    def command(
        self, operation: str, body: dict[str, Any], *, op_id: str = "", use: int = 1, token: dict[str, Any] | None = None,
        **approval: Any,
    ) -> bridge.OpCommand:  # fmt: skip
        """An approved command; ``token`` stands in for the one that belongs to it."""
        op_id = op_id or new_uuid7().hex
        made = token or self.issuer.token(operation, body, op_id=op_id, use=use, **approval)
        return bridge.OpCommand(op_id=op_id, use=use, operation=operation, body=body, token=encode_token(made))

    async def carry_out(self, command: bridge.OpCommand) -> bridge.OpStatus:
        seen = len(self.statuses(command.op_id, command.use))
        await self.box.send(command)
        return await self.end_of(command.op_id, command.use, seen)

    async def query(self, op_id: str, use: int = 1) -> bridge.OpStatus:
        seen = len(self.statuses(op_id, use))
        await self.box.send(bridge.OpQuery(op_id=op_id, use=use))
        return await self.end_of(op_id, use, seen)

    def statuses(self, op_id: str, use: int = 1) -> list[bridge.OpStatus]:
        found = [message for message in self.box.messages if isinstance(message, bridge.OpStatus)]
        return [status for status in found if (status.op_id, status.use) == (op_id, use)]

    async def end_of(self, op_id: str, use: int, seen: int) -> bridge.OpStatus:
        at = 0
        while True:
            status = await self.box.expect(bridge.OpStatus, skip=at)
            at += 1
            if (status.op_id, status.use) != (op_id, use):
                continue
            if seen > 0:
                seen -= 1
            elif status.state in FINAL:
                return status

    def read(self, status: bridge.OpStatus) -> Receipt:
        """The receipt of a status, which must be signed by this node and be about this very result."""
        receipt = read_receipt(status.receipt, decode_bytes(self.governance.public_key))
        assert (receipt.op_id, receipt.use, receipt.outcome) == (status.op_id, status.use, status.state)
        assert receipt.result_digest == digest_result(status.result)
        assert receipt.runner_id == self.governance.runner_id
        return receipt

    async def report(self, *, skip: int) -> bridge.GovernanceReport:
        return await self.box.expect(bridge.GovernanceReport, skip=skip)


class Ear:
    """A gateway that listens."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, bridge.OpStatus]] = []

    def __call__(self, status: bridge.OpStatus) -> None:
        self.heard.append((time.monotonic(), status))

    @property
    def last(self) -> bridge.OpStatus:
        return self.heard[-1][1]

    async def hear_stage(self, stage: str) -> None:
        await eventually(lambda: self.heard and self.last.stage == stage, f"the stage {stage} is told")

    async def end(self) -> bridge.OpStatus:
        await eventually(lambda: self.heard and self.last.state in FINAL, "the operation ends")
        return self.last


class Desk:
    """Commands over gated engines, and the control plane that approves them."""

    def __init__(self, parts: Parts, fleet: Fleet) -> None:
        governance = parts.governance
        told = governance.describe()
        assert told is not None
        assert governance.identity is not None
        self.parts = parts
        self.told = told
        self.bench = Bench(parts)
        self.issuer = Issuer.of(fleet, told)
        self.public_key = governance.identity.public_key
        self.gate = Gate(
            GateRules(
                key_path=governance.key_path, level=governance.level, min_signers=2, runner_id=governance.runner_id,
                policy=lambda: governance.policy,
            ),
            ledger=parts.ledger,
        )  # fmt: skip
        pool = Pool(parts.pool.registry, self.bench.loader, parts.pool.unloader, parts.pool.capacity)
        address = parts.config.operations.cluster_address
        self.operations = Operations(pool, self.gate, parts.ledger, governance.identity, cluster_address=address)
        self.commands = Commands(self.operations, parts.seek, parts.reload_settings)

    def command(self, operation: str = "model-load", *, op_id: str = "", **body: Any) -> bridge.OpCommand:
        op_id = op_id or new_uuid7().hex
        token = encode_token(self.issuer.token(operation, body, op_id=op_id))
        return bridge.OpCommand(op_id=op_id, use=1, operation=operation, body=body, token=token)

    def hold_loads(self) -> None:
        self.bench.prepare = lambda engine: engine.may_load.clear()

    async def loading(self) -> None:
        await eventually(lambda: len(self.bench.engines) == 1, "the engine is started")


@asynccontextmanager
async def desk_of(tmp_path: Path, *options: str) -> AsyncIterator[Desk]:
    fleet = Fleet()
    if not (tmp_path / "data").exists():
        await enrol(tmp_path / "data", fleet)
    async with assembled(tmp_path, *options) as parts:
        desk = Desk(parts, fleet)
        try:
            yield desk
        finally:
            await desk.commands.close()
            await desk.operations.close()


MODEL = "org/model"
NOW = T0 + 10
PARAMS: dict[str, object] = {"modelId": MODEL, "evictModel": "org/other"}


def l0(key: bytes = KEY, **changes: Any) -> dict[str, object]:
    return sign_l0(key, grant(**changes))


def l1(key: bytes = KEY, nonce: str = "nonce-of-l1", **changes: Any) -> dict[str, object]:
    fields: dict[str, Any] = {
        "audience": "box-7", "params_digest": params_digest(PARAMS), "op_id": "op-1", "fence": 7, "expires_at": int(NOW) + 300,
    }  # fmt: skip
    return sign_l1(key, grant(nonce=nonce), Binding(**(fields | changes)))


def grant(**changes: Any) -> Grant:
    fields: dict[str, Any] = {
        "operation": Operation.MODEL_LOAD, "model_id": MODEL, "signers": ["a", "b"], "nonce": "nonce-of-l0",
        "issued_at": int(NOW),
    }  # fmt: skip
    return Grant(**(fields | changes))


def write_key(path: Path, content: bytes = KEY + b"\n") -> Path:
    path.write_bytes(content)
    path.chmod(0o600)
    return path


@asynccontextmanager
async def opened(
    key_path: Path | None, data: Path, *, level: Level = Level.L0, clock: Clock | None = None, boot: float = T0 + 0.5,
    counted: frozenset[str] | None = None,
) -> AsyncIterator[Gate]:  # fmt: skip
    """A gate with a ledger that was begun before the tokens were issued."""
    ledger = await Ledger.open(data, clock=Clock(boot))
    try:
        rules = GateRules(key_path=key_path, level=level, min_signers=2, runner_id="box-7", counted_signers=counted)
        yield Gate(rules, ledger=ledger, clock=clock or Clock(NOW))
    finally:
        await ledger.close()


async def admit(gate: Gate, token: object, **changes: Any) -> Admitted:
    request: dict[str, Any] = {"operation": Operation.MODEL_LOAD, "model_id": MODEL, "params": PARAMS}
    return await gate.admit(token, **(request | changes))
