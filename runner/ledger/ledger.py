"""The ledger as the rest of the program sees it: coroutines in front of one thread that owns the file.

What has been submitted is carried out even if the caller is cancelled meanwhile, and in the order of submission.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from runner.definitions.plan import Observation
from runner.ledger import approvals, costs, history, trust
from runner.ledger.database import Database, LedgerError, open_database
from runner.ledger.rows import CostRow, CostState, DesiredModel, OpDetails, OpRow, OpStart, OpStarted, PolicyRow, TaskRow
from runner.limits import limits
from wire import clock

log = logging.getLogger(__name__)


Result = TypeVar("Result")
Clock = Callable[[], float]


class Ledger:
    """One open ledger. Every method raises LedgerError when the file cannot be used; see the rows for units."""

    def __init__(self, executor: ThreadPoolExecutor, database: Database, clock: Clock) -> None:
        self._executor = executor
        self._database = database
        self._clock = clock
        self._waiting = 0
        self._is_closed = False
        self.is_new = database.is_new
        """No earlier ledger was found, or it could not be read: nothing from before ``born_at`` is remembered."""
        self.born_at = database.born_at
        self.desired_fences: dict[str, int] = {}
        """The models that approvals keep loaded, with the fence of their load, as they were last read or written."""

    @classmethod
    async def open(cls, directory: Path, *, clock: Clock = clock.unix_s) -> Ledger:
        """Open the ledger in ``directory``, or begin one. Operations that were running are now interrupted.

        Raises LedgerError: not writable, in use by another process, or written by a later version.
        """
        executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ledger")
        opened: list[Database] = []
        now = clock()
        opening = asyncio.get_running_loop().run_in_executor(executor, lambda: opened.append(_open(directory, now)))
        try:
            await asyncio.wait_for(asyncio.shield(opening), limits().ledger.answer_s)
        except BaseException as error:
            executor.submit(_close_unwanted, opened)  # behind what is being opened, in the thread that owns it
            executor.shutdown(wait=False)
            if isinstance(error, TimeoutError):
                raise LedgerError(f"the disk of {directory} does not answer; choose another data directory") from None
            raise
        return cls(executor, opened[0], clock)

    async def close(self) -> None:
        """Do what has been submitted, then close the file. Safe to call twice."""
        if self._is_closed:
            return
        closing = asyncio.get_running_loop().run_in_executor(self._executor, self._database.close)
        self._is_closed = True
        self._executor.shutdown(wait=False)
        try:
            await asyncio.wait_for(asyncio.shield(closing), limits().ledger.answer_s)
        except (sqlite3.Error, TimeoutError) as error:
            log.warning("ledger did not close in order error=%r", error)

    async def spend_nonce(self, nonce: str, *, expires_at: float) -> bool:
        """Return whether the nonce was never seen; True means that it is on disk now. Raises LedgerFull."""
        now = self._clock()
        return await self._run(lambda db: approvals.spend_nonce(db, nonce, expires_at=expires_at, now=now))

    async def begin_op(
        self, op_id: str, *, slot: str, fence: int, max_uses: int, expires_at: float, details: OpDetails | None = None
    ) -> OpStart:
        """Book an operation before it is carried out; at most one caller gets ``OpStarted`` per use. Raises LedgerFull.

        ``slot``: the thing whose operations must not overtake each other. ``fence``: must be above the slot's last.
        ``expires_at``: when its approval can no longer be used; it is remembered for longer than that.
        A caller that is cancelled while it waits leaves the operation interrupted: its approval is used up.
        """
        now, written = self._clock(), details or OpDetails()
        answers: list[OpStart] = []

        def begin(db: sqlite3.Connection) -> OpStart:
            answer = approvals.begin_op(
                db, op_id, slot=slot, fence=fence, max_uses=max_uses, expires_at=expires_at, details=written, now=now
            )
            answers.append(answer)
            return answer

        def give_up(db: sqlite3.Connection) -> None:
            if OpStarted() in answers:
                approvals.finish_op(db, op_id, approvals.INTERRUPTED, receipt="", now=now)

        try:
            return await self._run(begin)
        except asyncio.CancelledError:
            self._submit_last(give_up)
            raise

    async def finish_op(
        self, op_id: str, outcome: dict[str, object], *, receipt: str = "", desired: DesiredModel | None = None,
        has_ended: bool = False,
    ) -> None:  # fmt: skip
        """Record how a begun operation went, and what was signed about it; whoever asks for it again is told this.

        In the same transaction ``desired`` becomes what is loaded after a restart, and, when it ``has_ended``, the model that
        the operation unloads (``OpDetails.ends``) ceases to be.
        """
        now = self._clock()

        def finish(db: sqlite3.Connection) -> list[DesiredModel]:
            approvals.finish_op(db, op_id, outcome, receipt=receipt, now=now, desired=desired, has_ended=has_ended)
            return approvals.read_desired(db) if desired is not None or has_ended else []

        found = await self._run(finish)
        if desired is not None or has_ended:
            self.desired_fences = {model.model_id: model.fence for model in found}

    async def read_desired(self) -> list[DesiredModel]:
        """Return the models that approvals keep loaded, in the order in which they were approved."""
        found = await self._run(approvals.read_desired)
        self.desired_fences = {model.model_id: model.fence for model in found}
        return found

    async def count_unfinished(self, model: DesiredModel, *, has_ended: bool) -> None:
        """Count a load of a desired model as begun, before it begins; ``has_ended``: it did not end with the program."""
        await self._run(lambda db: approvals.count_unfinished(db, model.model_id, model.fence, has_ended=has_ended))

    async def certify_op(self, op_id: str, outcome: dict[str, object], *, receipt: str) -> OpRow | None:
        """Give an operation that ended without a receipt one, and return it; the first receipt stays."""
        return await self._run(lambda db: approvals.certify_op(db, op_id, outcome, receipt=receipt))

    async def find_op(self, approval_id: str, use: int) -> OpRow | None:
        """Return one use of an approval, or None when it was never begun here."""
        return await self._run(lambda db: approvals.find_op(db, approval_id, use))

    async def read_policies(self) -> list[PolicyRow]:
        """Return the pinned policies, version 1 first."""
        return await self._run(trust.read_policies)

    async def add_policy(self, policy: PolicyRow) -> None:
        """Pin the next policy."""
        now = self._clock()
        await self._run(lambda db: trust.add_policy(db, policy, now=now))

    async def forget_trust(self, *facts: str) -> None:
        """Drop every pinned policy, the desired models and the facts of these names."""
        await self._run(lambda db: trust.forget_trust(db, *facts))
        self.desired_fences = {}

    async def read_fact(self, name: str) -> str | None:
        """Return a fact, or None."""
        return await self._run(lambda db: trust.read_fact(db, name))

    async def write_fact(self, name: str, value: str) -> None:
        """Replace a fact."""
        await self._run(lambda db: trust.write_fact(db, name, value))

    async def save_task(self, task: TaskRow) -> None:
        """Write a task down, new or changed; the newest 1000 are kept."""
        await self._run(lambda db: history.save_task(db, task))

    async def read_task(self, task_id: str) -> TaskRow | None:
        """Return a task, or None when there is none of that name."""
        return await self._run(lambda db: history.read_task(db, task_id))

    async def interrupt_tasks(self, now: float) -> list[TaskRow]:
        """End what an earlier process left loading, as interrupted, and return it. For the start of the program."""
        return await self._run(lambda db: history.interrupt_tasks(db, now=now))

    async def recent_tasks(self, limit: int) -> list[TaskRow]:
        """Return the newest tasks, newest first."""
        return await self._run(lambda db: history.recent_tasks(db, limit))

    async def add_observation(self, observation: Observation) -> None:
        """Remember what a load took."""
        await self._run(lambda db: history.add_observation(db, observation))

    async def observations(self, backend: str, limit: int = 50) -> list[Observation]:
        """Return what was observed with a backend, newest first."""
        return await self._run(lambda db: history.read_observations(db, backend, limit))

    async def last_load_s(self, model_id: str, plan_key: str) -> float | None:
        """Return the seconds that the last such load took; None when there was none."""
        return await self._run(lambda db: history.read_last_load_s(db, model_id, plan_key))

    async def reserve_cost(
        self, *, tenant: str, model_id: str, month: str, amount_micros: int, cap_micros: int | None
    ) -> str | None:
        """Return the id of a reservation, or None when the cap (None = no cap) does not cover it.

        A caller that is cancelled while it waits leaves nothing reserved. Raises ValueError for a month or amount out of form.
        """
        costs.check_month(month)
        costs.check_amount(amount_micros)
        cost_id, now = uuid4().hex, self._clock()
        try:
            is_covered = await self._run(
                lambda db: costs.reserve_cost(
                    db,
                    cost_id,
                    tenant=tenant,
                    model_id=model_id,
                    month=month,
                    amount_micros=amount_micros,
                    cap_micros=cap_micros,
                    now=now,
                )
            )
        except asyncio.CancelledError:
            self._submit_last(lambda db: costs.settle_cost(db, cost_id, state=CostState.RELEASED, amount_micros=None, now=now))
            raise
        return cost_id if is_covered else None

    async def settle_cost(self, cost_id: str, *, state: CostState, amount_micros: int | None = None) -> bool:
        """End a reservation in ``state`` (CostState says what each counts); False when it had ended before.

        ``amount_micros``: the real cost, needed for ``settled``. Raises ValueError for an amount or a state that cannot be.
        """
        if state in {CostState.RESERVED, CostState.ABANDONED} or (state is CostState.SETTLED and amount_micros is None):
            raise ValueError(f"a reservation does not end as {state} with the amount {amount_micros}")
        if amount_micros is not None:
            costs.check_amount(amount_micros)
        now = self._clock()
        return await self._run(lambda db: costs.settle_cost(db, cost_id, state=state, amount_micros=amount_micros, now=now))

    async def abandon_costs(self) -> int:
        """Mark what an earlier process left reserved; it goes on counting. For the start of the program. Returns how many."""
        now = self._clock()
        return await self._run(lambda db: costs.abandon_costs(db, now=now))

    async def spent(self, tenant: str, month: str) -> int:
        """Return what counts against the cap of a tenant in a month (``YYYY-MM``)."""
        return await self._run(lambda db: costs.read_spent(db, tenant, month))

    async def spendings(self, month: str) -> list[tuple[str, int]]:
        """Return every tenant of a month (``YYYY-MM``) and what counts against its cap, by name."""
        return await self._run(lambda db: costs.read_spendings(db, month))

    async def cost_rows(self, limit: int) -> list[CostRow]:
        """Return the newest costs, newest first; 20 000 are kept, and every one that is still reserved."""
        return await self._run(lambda db: costs.read_rows(db, limit))

    async def _run(self, job: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return await asyncio.wait_for(asyncio.shield(self._submit(job)), limits().ledger.answer_s)
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger cannot be used: {error}; look after the disk of the data directory") from None
        except TimeoutError:
            raise LedgerError(f"the ledger did not answer within {limits().ledger.answer_s:g} s; look after the disk") from None

    def _submit(self, job: Callable[[sqlite3.Connection], Result]) -> asyncio.Future[Result]:
        if self._is_closed:
            raise LedgerError("the ledger is closed; the box is stopping")
        if self._waiting >= limits().ledger.waiting:
            raise LedgerError(f"{limits().ledger.waiting} requests wait for the ledger; its disk is too slow")
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, lambda: job(self._database.connection))
        future.add_done_callback(self._answered)
        return future

    def _submit_last(self, job: Callable[[sqlite3.Connection], object]) -> None:
        """Submit what undoes the work of a caller that is being cancelled, and wait for nothing."""
        with contextlib.suppress(LedgerError):
            self._submit(job)

    def _answered(self, future: asyncio.Future[Result]) -> None:
        self._waiting -= 1
        # Asked for here because a cancelled caller never does, and the loop would complain.
        if not future.cancelled() and (error := future.exception()) is not None:
            log.debug("ledger job failed error=%r", error)


def _open(directory: Path, now: float) -> Database:
    database = open_database(directory, now=now)
    try:
        interrupted = approvals.interrupt_ops(database.connection, now=now)
    except BaseException:
        database.close()
        raise
    if interrupted:
        log.warning("operations were interrupted by the end of the program count=%d", interrupted)
    return database


def _close_unwanted(opened: list[Database]) -> None:
    """Close what was opened for somebody who no longer waits."""
    for database in opened:
        database.close()
