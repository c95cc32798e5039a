"""A box of level L2 on a real socket: enrolled beforehand where a test is about something else, with approvals for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runner.ledger import Ledger
from runner.operations.fingerprint import write_trusted
from runner.operations.policies import PolicyStore
from tests.system.runner.scripted_gateway import ConnectedBox
from tests.system.runner.test_pool_lifecycle import write_models
from tests.unit.runner.box_approvals import Fleet, Issuer
from wire import bridge
from wire.ids import new_uuid7
from wire.optoken import encode_token
from wire.optoken.approval import decode_bytes
from wire.optoken.receipt import Receipt, digest_result, read_receipt

FINAL = frozenset({"succeeded", "failed", "refused", "interrupted", "unknown"})


async def enrol(data: Path, fleet: Fleet) -> None:
    """Leave the data folder of a box on which a person confirmed the policy of ``fleet``, and that has taken it over."""
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
    """Flags and variables of a box with the models ``a`` and ``b`` and a data folder."""
    models = write_models(tmp_path / "models", "a", "b")
    return ["--threads", "1", "--data", str(tmp_path / "data")], {"MODEL_BASE_PATH": str(models)}


class Control:
    """The control plane of one connected box: sends commands, reads statuses."""

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
        """Send a command and return how it ended."""
        seen = len(self.statuses(command.op_id, command.use))
        await self.box.send(command)
        return await self.end_of(command.op_id, command.use, seen)

    async def query(self, op_id: str, use: int = 1) -> bridge.OpStatus:
        """Ask where an operation stands."""
        seen = len(self.statuses(op_id, use))
        await self.box.send(bridge.OpQuery(op_id=op_id, use=use))
        return await self.end_of(op_id, use, seen)

    def statuses(self, op_id: str, use: int = 1) -> list[bridge.OpStatus]:
        """Everything the box has said of an operation."""
        found = [message for message in self.box.messages if isinstance(message, bridge.OpStatus)]
        return [status for status in found if (status.op_id, status.use) == (op_id, use)]

    async def end_of(self, op_id: str, use: int, seen: int) -> bridge.OpStatus:
        """The first final status after ``seen`` of them."""
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
        """The receipt of a status, which must be signed by this box and be about this very result."""
        receipt = read_receipt(status.receipt, decode_bytes(self.governance.public_key))
        assert (receipt.op_id, receipt.use, receipt.outcome) == (status.op_id, status.use, status.state)
        assert receipt.result_digest == digest_result(status.result)
        assert receipt.runner_id == self.governance.runner_id
        return receipt

    async def report(self, *, skip: int) -> bridge.GovernanceReport:
        """The next report after ``skip`` of them."""
        return await self.box.expect(bridge.GovernanceReport, skip=skip)
