"""The ledger as the rest of the program sees it: coroutines in front of one thread that owns the file.

What has been submitted is carried out even if the caller is cancelled meanwhile, and in the order of submission.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from runner.definitions.plan import Observation
from runner.ledger import costs, operations
from runner.ledger.costs import CostRow, CostState
from runner.ledger.database import Database, LedgerError, open_database, transaction
from runner.ledger.operations import DesiredModel, OpOrder, OpStart, OpStarted, Run
from runner.limits import limits
from wire import clock

log = logging.getLogger(__name__)


Result = TypeVar("Result")
Clock = Callable[[], float]
_OBSERVED = tuple(part.name for part in fields(Observation))


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy that this runner took over, with what made it valid. ``proofs``: as they came, plain JSON."""

    version: int
    document: bytes
    statement: bytes
    proofs: list[object]


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

    async def spend_nonce(self, nonce: str, *, expires_at: float) -> Run | None:
        """Spend the nonce of a token and return its row; None when it was spent before. Raises LedgerFull.

        ``expires_at``: of the token; its nonce is remembered for longer than that.
        """
        now = self._clock()
        return await self._run(lambda db: operations.spend_nonce(db, nonce, expires_at=expires_at, now=now))

    async def begin_op(self, run_id: int, order: OpOrder) -> OpStart:
        """Begin an operation before it is carried out; at most one caller gets ``OpStarted`` for its key. Raises LedgerFull.

        ``run_id``: of the spent nonce of its token. A caller that is cancelled while it waits leaves the operation interrupted:
        its approval is used up.
        """
        now = self._clock()
        answers: list[OpStart] = []

        def begin(db: sqlite3.Connection) -> OpStart:
            answers.append(operations.begin_op(db, run_id, order, now=now))
            return answers[0]

        def give_up(db: sqlite3.Connection) -> None:
            for answer in answers:
                if isinstance(answer, OpStarted):
                    operations.finish_op(db, run_id, operations.INTERRUPTED, receipt="", now=now)

        try:
            return await self._run(begin)
        except asyncio.CancelledError:
            self._submit_last(give_up)
            raise

    async def finish_op(
        self, run_id: int, outcome: dict[str, object], *, receipt: str = "", desired: DesiredModel | None = None,
        has_ended: bool = False, error: str | None = None,
    ) -> None:  # fmt: skip
        """Record how a run ended, and what was signed about it; whoever asks for it again is told this.

        In the same transaction ``desired`` becomes what is loaded after a restart, and, when it ``has_ended``, the model that
        the operation unloads (``OpOrder.ends``) ceases to be. ``error``: why a load was cut off.
        """
        now = self._clock()

        def finish(db: sqlite3.Connection) -> list[DesiredModel]:
            operations.finish_op(
                db, run_id, outcome, receipt=receipt, now=now, desired=desired, has_ended=has_ended, error=error
            )  # fmt: skip
            return operations.read_desired(db) if desired is not None or has_ended else []

        found = await self._run(finish)
        if desired is not None or has_ended:
            self.desired_fences = {model.model_id: model.fence for model in found}

    async def certify_op(self, run_id: int, outcome: dict[str, object], *, receipt: str) -> Run:
        """Give a run that was interrupted and has no receipt one, and return it; the first receipt stays."""
        return await self._run(lambda db: operations.certify_op(db, run_id, outcome, receipt=receipt))

    async def find_op(self, approval_id: str, use: int) -> Run | None:
        """Return one use of an approval, or None when it was never begun here."""
        return await self._run(lambda db: operations.find_run(db, operations.BY_APPROVAL, approval_id, use))

    async def start_load(self, task_id: str, *, run_id: int | None, model_id: str, stage: str) -> int:
        """Write down that a load begins, for the run that asked for it; None = nobody's. Return the run of the load."""
        now = self._clock()
        return await self._run(
            lambda db: operations.start_load(db, task_id, run_id=run_id, model_id=model_id, stage=stage, now=now)
        )  # fmt: skip

    async def save_progress(self, run_id: int, stage: str, fraction: float | None) -> None:
        """Write down where a load stands."""
        await self._run(lambda db: operations.save_progress(db, run_id, stage, fraction))

    async def find_load(self, task_id: str) -> Run | None:
        """Return the run of a load; of those without an approval the newest 1000 are kept."""
        return await self._run(lambda db: operations.find_run(db, operations.BY_TASK, task_id))

    async def read_desired(self) -> list[DesiredModel]:
        """Return the models that approvals keep loaded, in the order in which they were approved."""
        found = await self._run(operations.read_desired)
        self.desired_fences = {model.model_id: model.fence for model in found}
        return found

    async def count_unfinished(self, model: DesiredModel, *, has_ended: bool) -> None:
        """Count a load of a desired model as begun, before it begins; ``has_ended``: it did not end with the program."""
        query = "UPDATE desired_models SET unfinished = iif(?, 0, unfinished + 1) WHERE model_id = ? AND fence = ?"
        await self._execute(query, has_ended, model.model_id, model.fence)

    async def read_policies(self) -> list[PolicyRow]:
        """Return the pinned policies, version 1 first."""
        rows = await self._execute("SELECT version, document, statement, proofs FROM policies ORDER BY version")
        return [PolicyRow(version, document, statement, json.loads(proofs)) for version, document, statement, proofs in rows]

    async def add_policy(self, policy: PolicyRow) -> None:
        """Pin the next policy. A version that is there already stays as it is."""
        values = (policy.version, policy.document, policy.statement, json.dumps(policy.proofs), self._clock())
        await self._execute("INSERT OR IGNORE INTO policies VALUES (?, ?, ?, ?, ?)", *values)

    async def forget_trust(self, *facts: str) -> None:
        """Drop every pinned policy, what was approved under them to stay loaded, and the facts of these names, all at once."""

        def forget(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.execute("DELETE FROM policies")
                db.execute("DELETE FROM desired_models")
                db.executemany("DELETE FROM facts WHERE name = ?", [(name,) for name in facts])

        await self._run(forget)
        self.desired_fences = {}

    async def read_fact(self, name: str) -> str | None:
        """Return a fact, or None."""
        rows = await self._execute("SELECT value FROM facts WHERE name = ?", name)
        return str(rows[0][0]) if rows else None

    async def write_fact(self, name: str, value: str) -> None:
        """Replace a fact."""
        await self._execute("INSERT INTO facts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value", name, value)

    async def add_observation(self, seen: Observation) -> None:
        """Remember what a load took; per model and plan the newest ``observations_of_plan`` are kept."""

        def add(db: sqlite3.Connection) -> None:
            plan, bounds = (seen.backend, seen.model_id, seen.plan_key), limits().ledger
            with transaction(db):
                db.execute(
                    "INSERT INTO observations (backend, model_id, plan_key, weights_bytes, kv_bytes, measured_bytes, load_s,"
                    " loaded_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                    (*plan, seen.weights_bytes, seen.kv_bytes, seen.measured_bytes, seen.load_s, seen.loaded_at),
                )
                db.execute(
                    "DELETE FROM observations WHERE id IN (SELECT id FROM observations WHERE backend = ? AND model_id = ?"
                    " AND plan_key = ? ORDER BY id DESC LIMIT -1 OFFSET ?)",
                    (*plan, bounds.observations_of_plan),
                )
                db.execute(
                    "DELETE FROM observations WHERE id <= (SELECT max(id) FROM observations) - ?", (bounds.observations,)
                )  # fmt: skip

        await self._run(add)

    async def observations(self, backend: str, limit: int = 50) -> list[Observation]:
        """Return what was observed with a backend, newest first."""
        rows = await self._execute("SELECT * FROM observations WHERE backend = ? ORDER BY id DESC LIMIT ?", backend, limit)
        return [Observation(**{name: row[name] for name in _OBSERVED}) for row in rows]

    async def last_load_s(self, model_id: str, plan_key: str) -> float | None:
        """Return the seconds that the last such load took; None when there was none."""
        query = "SELECT load_s FROM observations WHERE model_id = ? AND plan_key = ? ORDER BY id DESC LIMIT 1"
        rows = await self._execute(query, model_id, plan_key)
        return float(rows[0][0]) if rows else None

    async def reserve_cost(
        self, *, tenant: str, model_id: str, month: str, amount_micros: int, cap_micros: int | None
    ) -> str | None:
        """Return the id of a reservation, or None when the cap (None = no cap) does not cover it.

        A caller that is cancelled while it waits leaves nothing reserved. Raises ValueError for a month or amount out of form.
        """
        costs.check_month(month)
        costs.check_amount(amount_micros)
        now = self._clock()
        cost = CostRow(uuid4().hex, tenant, model_id, month, CostState.RESERVED, amount_micros, amount_micros, now, None)
        try:
            is_covered = await self._run(lambda db: costs.reserve_cost(db, cost, cap_micros=cap_micros))
        except asyncio.CancelledError:
            self._submit_last(
                lambda db: costs.settle_cost(db, cost.cost_id, state=CostState.RELEASED, amount_micros=None, now=now)
            )
            raise
        return cost.cost_id if is_covered else None

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
        query = "UPDATE costs SET state = ?, settled_at = ? WHERE state = ? RETURNING id"
        return len(await self._execute(query, CostState.ABANDONED.value, self._clock(), CostState.RESERVED.value))

    async def spent(self, tenant: str, month: str) -> int:
        """Return what counts against the cap of a tenant in a month (``YYYY-MM``), in millionths."""
        rows = await self._execute(costs.SPENT, tenant, month)
        return int(rows[0][0]) if rows else 0

    async def spendings(self, month: str) -> list[tuple[str, int]]:
        """Return every tenant of a month (``YYYY-MM``) and what counts against its cap, by name."""
        rows = await self._execute("SELECT tenant, counted_micros FROM spendings WHERE month = ? ORDER BY tenant", month)
        return [(str(tenant), int(counted)) for tenant, counted in rows]

    async def cost_rows(self, limit: int) -> list[CostRow]:
        """Return the newest costs, newest first; 20 000 are kept, and every one that is still reserved."""
        return [costs.make_cost(row) for row in await self._execute("SELECT * FROM costs ORDER BY id DESC LIMIT ?", limit)]

    async def _execute(self, query: str, *values: object) -> list[sqlite3.Row]:
        return await self._run(lambda db: db.execute(query, values).fetchall())

    async def _run(self, job: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the answer.
            async with asyncio.timeout(limits().ledger.answer_s):
                return await asyncio.shield(self._submit(job))
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger cannot be used: {error}; look after the disk of the data directory") from None
        except TimeoutError:
            raise LedgerError(f"the ledger did not answer within {limits().ledger.answer_s:g} s; look after the disk") from None

    def _submit(self, job: Callable[[sqlite3.Connection], Result]) -> asyncio.Future[Result]:
        if self._is_closed:
            raise LedgerError("the ledger is closed; the node is stopping")
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
        interrupted = operations.interrupt_ops(database.connection, now=now)
    except BaseException:
        database.close()
        raise
    for run in interrupted:
        log.warning(
            "operation was interrupted by the end of the runner op=%s operation=%s model=%s task=%s",
            run.op_key, run.operation, run.model_id, run.task_id,
        )  # fmt: skip
    return database


def _close_unwanted(opened: list[Database]) -> None:
    """Close what was opened for somebody who no longer waits."""
    for database in opened:
        database.close()
