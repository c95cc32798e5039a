"""Operations that pass the gate: let in once, carried out to their end, recorded with a receipt, told again when repeated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from runner.errors import OperationInterrupted, RequestRefused, RunnerError, Unavailable
from runner.ledger import Ledger, LedgerError, OpRow
from runner.ledger.approvals import INTERRUPTED
from runner.limits import limits
from runner.operations.bodies import Reply
from runner.operations.desired_state import seal_accepted
from runner.operations.gate import Admitted, Gate, OperationRunning
from runner.operations.outcomes import refusal_outcome
from runner.operations.receipts import Booked, Clerk
from wire import clock
from wire.optoken import Operation
from wire.optoken.receipt import Outcome

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """An operation that goes on as a task after its caller was answered; how it ended is said with ``end_task``."""

    task_id: str
    reply: Reply


@dataclass(frozen=True, slots=True)
class Ending:
    """How an operation ended. ``body``: the answer of the model-runner API, plain JSON; ``status``: its HTTP status.

    ``unloaded``: the model that a load unloaded first, "" = it came to none.
    """

    outcome: Outcome
    status: int
    body: dict[str, object]
    unloaded: str = ""

    def as_record(self) -> dict[str, object]:
        """Return what the ledger keeps."""
        return {"state": self.outcome, "status": self.status, "body": self.body}


KEPT_FIELD = "keptLoaded"
"""Says in the result of a load that the runner loads the model again after a restart."""
CUT_OFF = Ending("interrupted", 409, {})
BROKEN = Ending("failed", 500, {"error": {"code": "internal_error", "message": "See the log."}})


class Box(Protocol):
    """What is asked of those who carry out."""

    def describe_now(self, model_id: str | None) -> dict[str, object]:
        """Return what the box has loaded at this moment, of a model or at all (plain JSON)."""

    async def read_task(self, task_id: str) -> dict[str, object]:
        """Return a load task as JSON members. Raises UnknownTask."""


class Executions:
    """What a token has let in is carried out to its end, also when the caller leaves meanwhile."""

    def __init__(self, box: Box, gate: Gate, ledger: Ledger, clerk: Clerk) -> None:
        self._box = box
        self._gate = gate
        self._ledger = ledger
        self._clerk = clerk
        self._governed: set[asyncio.Task[Reply]] = set()
        self._awaiting: dict[str, list[Admitted]] = {}
        self._task_of: dict[str, str] = {}
        self.is_stopping = False
        """No operation is let in any more."""

    async def close(self) -> None:
        """Let what is being carried out go on for a while, then cut it off."""
        if self._governed:
            _, late = await asyncio.wait(self._governed, timeout=limits().operations.close_s)
            for each in late:
                each.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def run(
        self, token: object, operation: Operation, model_id: str | None, params: Mapping[str, object],
        carry_out: Callable[[], Awaitable[Reply | Begun]],
    ) -> Reply:  # fmt: skip
        """Let an operation in, carry it out, write down how it went. Raises RequestRefused, and what ``carry_out`` raises.

        ``carry_out`` is called once the operation has been booked.
        """
        return await self._shielded(self._govern(token, operation, model_id, params, carry_out))

    async def end_task(self, task_id: str, ending: Ending) -> str:
        """Record how a task ended for every operation that it carried out; return the receipt of the first, "" = none."""
        receipts = []
        for admitted in self._awaiting.pop(task_id, []):
            receipts.append((await self._record(admitted, ending))[0])
            if admitted.booked is not None:
                self._task_of.pop(admitted.booked.op_key, None)
        return receipts[0] if receipts else ""

    async def find(self, op_id: str, use: int) -> OpRow | None:
        """Return one use of an approval as the ledger has it, None when it was never begun here. Raises LedgerError.

        One that was cut off gets its receipt now: it says what the box has loaded, which nobody could sign at the time.
        """
        row = await self._ledger.find_op(op_id, use)
        return row if row is None else await self._certify(row)

    async def _shielded(self, work: Coroutine[None, None, Reply]) -> Reply:
        task = asyncio.create_task(work)
        self._governed.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Reply]) -> None:
        self._governed.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RunnerError):
            log.critical("operation failed unexpectedly", exc_info=error)

    async def _govern(
        self, token: object, operation: Operation, model_id: str | None, params: Mapping[str, object],
        carry_out: Callable[[], Awaitable[Reply | Begun]],
    ) -> Reply:  # fmt: skip
        if self.is_stopping:
            raise Unavailable("The box is shutting down.", retry_after_s=5)
        try:
            admitted = await self._gate.admit(token, operation=operation, model_id=model_id, params=params)
        except OperationRunning as running:
            task_id = self._task_of.get(running.op_key)
            if task_id is None:
                raise
            return Reply(200, {**await self._box.read_task(task_id), "repeated": True})
        if admitted.recorded is not None:
            return await self._repeat(admitted)
        return await self._carry_out(admitted, carry_out)

    async def _carry_out(self, admitted: Admitted, carry_out: Callable[[], Awaitable[Reply | Begun]]) -> Reply:
        ending: Ending | None = BROKEN
        refused: RequestRefused | None = None
        receipt, body = "", dict[str, object]()
        try:
            done = await carry_out()
            if isinstance(done, Begun):
                ending = None
                self._follow(done.task_id, admitted)
                return done.reply
            ending = Ending("succeeded", done.status, done.body)
        except asyncio.CancelledError:
            ending = CUT_OFF
            raise
        except LedgerError as error:
            log.error("operation ended, the ledger failed operation=%s error=%s", admitted.operation, error)  # noqa: TRY400
            refused = Unavailable("The ledger of this box cannot be used, so the operation was not carried out.")
            ending = _failed(refused)
            raise refused from None
        except RunnerError as error:
            refused = error if isinstance(error, RequestRefused) else None
            ending = _failed(error)
            raise
        finally:
            if ending is not None:
                receipt, body = await self._record(admitted, ending)
            if refused is not None and receipt:
                refused.details["receipt"] = receipt
        return Reply(done.status, {**body, "receipt": receipt} if receipt else body)

    def _follow(self, task_id: str, admitted: Admitted) -> None:
        self._awaiting.setdefault(task_id, []).append(admitted)
        if admitted.booked is not None:
            self._task_of[admitted.booked.op_key] = task_id

    async def _record(self, admitted: Admitted, ending: Ending) -> tuple[str, dict[str, object]]:
        """Write down how an operation ended; return its receipt ("" = none) and the body that the receipt is about."""
        if admitted.booked is None:
            return "", ending.body
        is_cut_off, desired, identity = ending.outcome == "interrupted", None, self._clerk.identity
        unkept = ending
        if admitted.keeps is not None and identity is not None and ending.outcome == "succeeded":
            desired = seal_accepted(admitted.keeps, identity)
            ending = replace(ending, body={**ending.body, KEPT_FIELD: True})
        is_unload = admitted.operation is Operation.MODEL_UNLOAD and ending.outcome == "succeeded"
        has_ended = admitted.ends is not None and not is_cut_off and (is_unload or ending.unloaded == admitted.ends)
        receipt = "" if is_cut_off else self._clerk.sign(admitted.booked, ending.outcome, ending.body, ended_at=clock.unix_s())
        try:
            record = dict(INTERRUPTED) if is_cut_off else ending.as_record()
            await self._gate.finish(admitted, record, receipt=receipt, desired=desired, has_ended=has_ended)
        except LedgerError as error:
            # It was done, and its token is spent: the caller must hear how it went even if nobody else will.
            log.error("outcome of an operation was not recorded operation=%s error=%s", admitted.operation, error)  # noqa: TRY400
            if desired is not None:  # what is not on disk is not loaded again
                ending = unkept
                receipt = self._clerk.sign(admitted.booked, ending.outcome, ending.body, ended_at=clock.unix_s())
        return receipt, ending.body

    async def _repeat(self, admitted: Admitted) -> Reply:
        """Answer an operation that was carried out before, in the same words. Raises OperationInterrupted."""
        recorded, receipt = admitted.recorded or {}, admitted.receipt
        if recorded.get("state") == INTERRUPTED["state"]:
            assert admitted.booked is not None
            row = await self.find(admitted.booked.op_id, admitted.booked.use)
            raise OperationInterrupted(
                "This operation was cut off by a restart of the box. See GET /v1/capabilities for what is loaded, "
                "then ask for a new token.",
                details={} if row is None or not row.receipt else {"receipt": row.receipt},
            )
        status, body = recorded.get("status"), recorded.get("body")
        shown = dict(body) if isinstance(body, dict) else {}
        task_id = shown.get("taskId")
        if isinstance(task_id, str) and status == 202:  # as an earlier version of this program wrote loads down
            return Reply(200, {**await self._box.read_task(task_id), "repeated": True})
        signed: dict[str, object] = {"receipt": receipt} if receipt else {}
        return Reply(status if isinstance(status, int) else 200, {**shown, **signed, "repeated": True})

    async def _certify(self, row: OpRow) -> OpRow:
        if row.outcome is None or row.outcome.get("state") != INTERRUPTED["state"] or row.receipt or not row.operation:
            return row
        result = self._box.describe_now(row.model_id)
        booked = Booked(
            op_key=row.op_key, op_id=row.approval_id, use=row.use, operation=row.operation, fence=row.fence,
            statement_digest=row.statement_digest, checkpoint=row.checkpoint, begun_at=row.begun_at,
        )  # fmt: skip
        receipt = self._clerk.sign(booked, "interrupted", result, ended_at=row.ended_at or clock.unix_s())
        outcome = {**INTERRUPTED, "body": result}
        if not receipt:
            return replace(row, outcome=outcome)
        return await self._ledger.certify_op(row.op_key, outcome, receipt=receipt) or row


def _failed(error: RunnerError) -> Ending:
    status, body = refusal_outcome(error)
    return Ending("failed", status, body)
