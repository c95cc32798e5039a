"""The ledger of a runner: coroutines in front of one thread that owns the file.

An operation is a row, from the spent nonce of its token to its receipt: what makes one approval one run across restarts. What
has been submitted is carried out even if the caller is cancelled meanwhile, and in the order of submission. Whatever is
written is on disk before its caller hears of it. Times are Unix seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from runner.definitions.plan import Observation
from runner.ledger import costs
from runner.ledger.costs import CostRow, CostState
from runner.ledger.database import Database, LedgerError, LedgerFull, open_database, transaction
from runner.limits import limits
from wire import clock

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Clock = Callable[[], float]
_OBSERVED = tuple(part.name for part in fields(Observation))


class RunState(StrEnum):
    """Where a run stands on the runner. All but ``spent`` and ``running`` are final."""

    SPENT = "spent"
    """The nonce of its token is used up, and nothing has begun; it stays so where the token was refused or repeated a run."""
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The program ended in its midst, or cut it off."""


class RunEvent(StrEnum):
    """What happens to a run."""

    BEGIN = "begin"
    SUCCEED = "succeed"
    FAIL = "fail"
    INTERRUPT = "interrupt"


TRANSITIONS: dict[tuple[RunState, RunEvent], RunState] = {
    (RunState.SPENT, RunEvent.BEGIN): RunState.RUNNING,
    (RunState.RUNNING, RunEvent.SUCCEED): RunState.SUCCEEDED,
    (RunState.RUNNING, RunEvent.FAIL): RunState.FAILED,
    (RunState.RUNNING, RunEvent.INTERRUPT): RunState.INTERRUPTED,
}
FINAL_STATES = frozenset(TRANSITIONS.values()) - {old for old, _ in TRANSITIONS}
_BEFORE = {new: old for (old, _), new in TRANSITIONS.items()}
"""The one state from which each other is reached."""

INTERRUPTED: dict[str, object] = {"state": RunState.INTERRUPTED.value}
"""The outcome of an operation in whose midst the program ended."""
LOAD_INTERRUPTED = "the runner ended while the model was being loaded; load it again"
HOUR_S = 3600.0
DAY_S = 86_400.0

BY_APPROVAL = "SELECT * FROM operations WHERE approval_id = ? AND use = ? AND op_key IS NOT NULL"
BY_TASK = "SELECT * FROM operations WHERE task_id = ?"
_BY_ID = "SELECT * FROM operations WHERE id = ?"
_BY_KEY = "SELECT * FROM operations WHERE op_key = ?"
_COUNT_BEGUN = "SELECT count(*) FROM operations WHERE op_key IS NOT NULL"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpOrder:
    """An operation that a token permits, and how many of its kind the runner takes.

    ``op_key``: tells the run from all others. ``slot``: what it changes, where none with a lower ``fence`` may follow it;
    ``other_slots``: what it changes beside that. ``expires_at``: when its approval can no longer be used; it is remembered for
    longer. ``approval_id`` and ``use``: which use of which approval it is. ``statement_digest``: of what people signed, hex, ""
    below L2. ``checkpoint``: of the audit log, as the token named it. ``most_per_hour``: operations of all kinds that may begin
    within an hour; ``most_per_day``: those of ``op_class`` within 24 h; None = no limit. ``ends``: the model that it unloads
    and that is no longer desired then, None = none. ``adds_desired``: it needs room for one more desired model.
    """

    op_key: str
    slot: str
    fence: int
    expires_at: float
    operation: str = ""
    model_id: str | None = None
    approval_id: str = ""
    use: int = 1
    op_class: str = ""
    statement_digest: str = ""
    checkpoint: str = ""
    most_per_hour: int | None = None
    most_per_day: int | None = None
    other_slots: tuple[str, ...] = ()
    ends: str | None = None
    adds_desired: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A row. ``op_key`` and ``fence``: None for a load without an approval; ``begun_at``: None where nothing has begun.

    ``outcome``: how it ended (plain JSON with its ``state``), None before. ``task_id``: of the load that it began, with the
    ``stage`` and the ``fraction`` (0.0 to 1.0) at which that stands, and in ``error`` why it was cut off.
    """

    run_id: int
    op_key: str | None
    operation: str
    model_id: str | None
    approval_id: str
    use: int
    fence: int | None
    statement_digest: str
    checkpoint: str
    ends: str | None
    state: RunState
    outcome: dict[str, object] | None
    receipt: str
    begun_at: float | None
    ended_at: float | None
    task_id: str | None
    stage: str
    fraction: float | None
    error: str | None


_PLAIN = tuple(part.name for part in fields(Run) if part.name not in {"state", "outcome"})


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """A model that an approval keeps loaded. ``fence``: of the load that was approved.

    ``document``: what the runner accepted, with the op token and its proofs; ``seal``: the runner's signature over it.
    ``unfinished``: loads that were begun since and in whose midst the program ended, one after the other.
    """

    model_id: str
    fence: int
    document: bytes
    seal: bytes
    unfinished: int = 0


@dataclass(frozen=True, slots=True)
class OpStarted:
    """The operation may be carried out now; say with ``finish_op`` how it went."""

    run: Run


@dataclass(frozen=True, slots=True)
class OpIsRunning:
    """The operation was begun before and has not ended."""


@dataclass(frozen=True, slots=True)
class OpAlreadyDone:
    """The operation was carried out before; ``run`` says how it went."""

    run: Run


@dataclass(frozen=True, slots=True)
class StaleFence:
    """A later operation has been accepted for the same slot, so this one would undo it."""


@dataclass(frozen=True, slots=True)
class TooManyOps:
    """As many operations began within ``within_s`` seconds as may; the next is let in after ``retry_after_s``."""

    most: int
    within_s: float
    retry_after_s: float
    is_of_class: bool


OpStart = OpStarted | OpIsRunning | OpAlreadyDone | StaleFence | TooManyOps


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
            async with asyncio.timeout(limits().ledger.answer_s):
                await asyncio.shield(opening)
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
            async with asyncio.timeout(limits().ledger.answer_s):
                await asyncio.shield(closing)
        except (sqlite3.Error, TimeoutError) as error:
            log.warning("ledger did not close in order error=%r", error)

    async def spend_nonce(self, nonce: str, *, expires_at: float) -> Run | None:
        """Spend the nonce of a token and return its row; None when it was spent before. Raises LedgerFull.

        ``expires_at``: of the token; its nonce is remembered for longer than that.
        """
        now = self._clock()
        return await self._run(lambda db: spend_nonce(db, nonce, expires_at=expires_at, now=now))

    async def begin_op(self, run_id: int, order: OpOrder) -> OpStart:
        """Begin an operation before it is carried out; at most one caller gets ``OpStarted`` for its key. Raises LedgerFull.

        ``run_id``: of the spent nonce of its token. A caller that is cancelled while it waits leaves the operation interrupted:
        its approval is used up.
        """
        now = self._clock()
        answers: list[OpStart] = []

        def begin(db: sqlite3.Connection) -> OpStart:
            answers.append(begin_op(db, run_id, order, now=now))
            return answers[0]

        def give_up(db: sqlite3.Connection) -> None:
            for answer in answers:
                if isinstance(answer, OpStarted):
                    finish_op(db, run_id, INTERRUPTED, receipt="", now=now)

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

        Without effect on a run that is not running.
        In the same transaction ``desired`` becomes what is loaded after a restart, and, when it ``has_ended``, the model that
        the operation unloads (``OpOrder.ends``) ceases to be. ``error``: why a load was cut off.
        """
        now = self._clock()

        def finish(db: sqlite3.Connection) -> list[DesiredModel]:
            finish_op(
                db, run_id, outcome, receipt=receipt, now=now, desired=desired, has_ended=has_ended, error=error
            )  # fmt: skip
            return read_desired(db) if desired is not None or has_ended else []

        found = await self._run(finish)
        if desired is not None or has_ended:
            self.desired_fences = {model.model_id: model.fence for model in found}

    async def certify_op(self, run_id: int, outcome: dict[str, object], *, receipt: str) -> Run:
        """Give a run that was interrupted and has no receipt one, and return it; the first receipt stays."""
        return await self._run(lambda db: certify_op(db, run_id, outcome, receipt=receipt))

    async def find_op(self, approval_id: str, use: int) -> Run | None:
        """Return one use of an approval, or None when it was never begun here."""
        return await self._run(lambda db: find_run(db, BY_APPROVAL, approval_id, use))

    async def start_load(self, task_id: str, *, run_id: int | None, model_id: str, stage: str) -> int:
        """Write down that a load begins, for the run that asked for it; None = nobody did, and the load is a run of its own.

        Return the run of the load.
        """
        now = self._clock()
        return await self._run(
            lambda db: start_load(db, task_id, run_id=run_id, model_id=model_id, stage=stage, now=now)
        )  # fmt: skip

    async def save_progress(self, run_id: int, stage: str, fraction: float | None) -> None:
        """Write down where a load stands; without effect on one that has ended."""
        query = "UPDATE operations SET stage = ?, fraction = ? WHERE id = ? AND state = ?"
        await self._execute(query, stage, fraction, run_id, RunState.RUNNING.value)

    async def find_load(self, task_id: str) -> Run | None:
        """Return the run of a load; of those without an approval the newest 1000 are kept."""
        return await self._run(lambda db: find_run(db, BY_TASK, task_id))

    async def read_desired(self) -> list[DesiredModel]:
        """Return the models that approvals keep loaded, in the order in which they were approved."""
        found = await self._run(read_desired)
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

    async def spend_ticket(self, ticket_id: str, *, expires_at: float, report: str) -> bool:
        """Use a ticket up; False when it was used before. Raises LedgerFull.

        ``expires_at``: until when it is remembered; ``report``: what gateways are told of it meanwhile (JSON).
        """
        now = self._clock()
        return await self._run(lambda db: spend_ticket(db, ticket_id, expires_at=expires_at, report=report, now=now))

    async def end_ticket(self, ticket_id: str, report: str) -> None:
        """Write down how the request of a ticket ended, once."""
        query = "UPDATE tickets SET report = ?, ended_at = ?, is_taken = 0 WHERE ticket_id = ? AND ended_at IS NULL"
        await self._execute(query, report, self._clock(), ticket_id)

    async def list_tickets(self, most: int) -> list[str]:
        """Return what gateways have not taken yet of tickets, the oldest first."""
        query = "SELECT report FROM tickets WHERE NOT is_taken ORDER BY begun_at LIMIT ?"
        return [str(row[0]) for row in await self._execute(query, most)]

    async def forget_tickets(self, reports: Sequence[tuple[str, bool]]) -> None:
        """Tell nothing more of tickets that a gateway knows. Each with whether it knows of the end; else that is still told."""

        def forget(db: sqlite3.Connection) -> None:
            with transaction(db):
                db.executemany(
                    "UPDATE tickets SET is_taken = 1 WHERE ticket_id = ? AND (ended_at IS NOT NULL) = ?",
                    [(ticket_id, int(has_ended)) for ticket_id, has_ended in reports],
                )

        await self._run(forget)

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
        # Nobody waits for it: its caller is being cancelled.
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
        interrupted = interrupt_ops(database.connection, now=now)
        interrupt_tickets(database.connection, now=now)
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
    for database in opened:
        database.close()


# Operations in the file, in the thread that owns it


def spend_nonce(db: sqlite3.Connection, nonce: str, *, expires_at: float, now: float) -> Run | None:
    digest = hashlib.sha256(nonce.encode("utf-8", "surrogatepass")).digest()
    with transaction(db):
        expired_at = now - limits().ledger.nonce_grace_s
        db.execute(
            "DELETE FROM operations WHERE nonce_expires_at < ? AND op_key IS NULL AND task_id IS NULL", (expired_at,)
        )  # fmt: skip
        spent = db.execute(
            "INSERT INTO operations (nonce, nonce_expires_at, state) VALUES (?, ?, ?) ON CONFLICT DO NOTHING RETURNING *",
            (digest, expires_at, RunState.SPENT.value),
        ).fetchone()
        if spent is None:
            return None
        # Forgetting the oldest instead would let their tokens in again.
        if _count(db, "SELECT count(*) FROM operations WHERE nonce_expires_at >= ?", expired_at) > limits().ledger.nonces:
            raise _full(limits().ledger.nonces)
    return _make_run(spent)


def begin_op(db: sqlite3.Connection, run_id: int, order: OpOrder, *, now: float) -> OpStart:
    with transaction(db):
        return _begin(db, run_id, order, now)


def _begin(db: sqlite3.Connection, run_id: int, order: OpOrder, now: float) -> OpStart:
    if _count(db, _COUNT_BEGUN) > limits().ledger.ops // 2:
        # Only where room is needed: a clock that was set forward for a moment then makes nothing be forgotten.
        db.execute(
            "DELETE FROM operations WHERE op_key IS NOT NULL AND state != ? AND expires_at < ?",
            (RunState.RUNNING.value, now - limits().ledger.op_life_s),
        )
    # Looked up before the fence is compared: the operation may have been overtaken since it was carried out.
    known = find_run(db, _BY_KEY, order.op_key)
    if known is not None and known.outcome is not None:
        return OpAlreadyDone(known)
    if known is not None:
        return OpIsRunning()
    slots = sorted({order.slot, *order.other_slots})
    marks = [db.execute("SELECT fence FROM fences WHERE slot = ?", (slot,)).fetchone() for slot in slots]
    if any(mark is not None and order.fence <= mark[0] for mark in marks):
        return StaleFence()
    too_many = _count_recent(db, order, now)
    if too_many is not None:
        return too_many
    # Refused before anything begins: an outcome must always find its place.
    bounds = limits().ledger
    rooms = (
        (_COUNT_BEGUN, 1, bounds.ops), ("SELECT count(*) FROM fences", marks.count(None), bounds.fences),
        ("SELECT count(*) FROM desired_models", int(order.adds_desired), bounds.desired_models),
    )  # fmt: skip
    for count, added, most in rooms:
        if added and _count(db, count) + added > most:
            raise _full(most)
    raised = "INSERT INTO fences VALUES (?, ?) ON CONFLICT DO UPDATE SET fence = excluded.fence"
    db.executemany(raised, [(slot, order.fence) for slot in slots])
    begun = db.execute(
        "UPDATE operations SET state = ?, op_key = ?, slot = ?, fence = ?, begun_at = ?, expires_at = ?, operation = ?,"
        " model_id = ?, approval_id = ?, use = ?, op_class = ?, statement_digest = ?, checkpoint = ?, ends = ?"
        " WHERE id = ? AND state = ? RETURNING *",
        (
            RunState.RUNNING.value, order.op_key, order.slot, order.fence, now, order.expires_at, order.operation,
            order.model_id, order.approval_id, order.use, order.op_class, order.statement_digest, order.checkpoint, order.ends,
            run_id, _BEFORE[RunState.RUNNING].value,
        ),
    ).fetchone()  # fmt: skip
    if begun is None:
        raise LedgerError("the token of this operation has begun another one")
    return OpStarted(_make_run(begun))


def _count_recent(db: sqlite3.Connection, order: OpOrder, now: float) -> TooManyOps | None:
    # What began "later than now", before a clock was set back, counts as well.
    for most, within_s, op_class in (
        (order.most_per_hour, HOUR_S, None), (order.most_per_day, DAY_S, order.op_class)
    ):  # fmt: skip
        if most is None:
            continue
        begun = db.execute(
            "SELECT begun_at FROM operations WHERE begun_at > ? AND op_key IS NOT NULL AND op_class = coalesce(?, op_class)"
            " ORDER BY begun_at DESC",
            (now - within_s, op_class),
        )
        times = [row[0] for row in begun]  # the newest first
        if len(times) >= most:
            # The one that has to grow old enough is the one that uses up the last place.
            retry_after_s = within_s if most == 0 else times[most - 1] + within_s - now
            return TooManyOps(most, within_s, max(1.0, retry_after_s), is_of_class=op_class is not None)
    return None


def spend_ticket(db: sqlite3.Connection, ticket_id: str, *, expires_at: float, report: str, now: float) -> bool:
    bounds = limits().ledger
    with transaction(db):
        db.execute(
            "DELETE FROM tickets WHERE expires_at < ? AND ((is_taken AND ended_at IS NOT NULL) OR begun_at < ?)",
            (now, now - bounds.ticket_report_s),
        )
        spent = db.execute(
            "INSERT INTO tickets (ticket_id, expires_at, report, begun_at) VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING"
            " RETURNING ticket_id",
            (ticket_id, expires_at, report, now),
        ).fetchone()
        if spent is None:
            return False
        # Forgetting the oldest instead would let it in again, or lose what it took.
        if _count(db, "SELECT count(*) FROM tickets") > bounds.tickets:
            raise _full(bounds.tickets)
    return True


def interrupt_tickets(db: sqlite3.Connection, *, now: float) -> None:
    """Have the requests that the end of the program cut off told as interrupted."""
    db.execute(
        "UPDATE tickets SET report = json_set(report, '$.status', 'interrupted'), ended_at = ?, is_taken = 0"
        " WHERE ended_at IS NULL",
        (now,),
    )


def start_load(
    db: sqlite3.Connection, task_id: str, *, run_id: int | None, model_id: str, stage: str, now: float
) -> int:  # fmt: skip
    with transaction(db):
        if run_id is None:
            run_id = int(db.execute("INSERT INTO operations (state) VALUES (?)", (RunState.SPENT.value,)).lastrowid or 0)
        db.execute(
            "UPDATE operations SET state = ?, task_id = ?, operation = 'model-load', model_id = coalesce(model_id, ?),"
            " stage = ?, fraction = 0.0, begun_at = coalesce(begun_at, ?) WHERE id = ? AND outcome IS NULL",
            (RunState.RUNNING.value, task_id, model_id, stage, now, run_id),
        )
        # Beyond the newest, ended loads without an approval are forgotten.
        db.execute(
            "DELETE FROM operations WHERE task_id IS NOT NULL AND op_key IS NULL AND state != ?"
            " AND coalesce(nonce_expires_at, 0) < ? AND id NOT IN"
            " (SELECT id FROM operations WHERE task_id IS NOT NULL ORDER BY begun_at DESC, id DESC LIMIT ?)",
            (RunState.RUNNING.value, now - limits().ledger.nonce_grace_s, limits().ledger.tasks),
        )
    return run_id


def finish_op(
    db: sqlite3.Connection, run_id: int, outcome: dict[str, object], *, receipt: str, now: float,
    desired: DesiredModel | None = None, has_ended: bool = False, error: str | None = None,
) -> None:  # fmt: skip
    after = RunState(str(outcome["state"]))
    with transaction(db):
        found = db.execute(
            "UPDATE operations SET state = ?, outcome = ?, receipt = ?, ended_at = ?, error = ?"
            " WHERE id = ? AND state = ? RETURNING fence, ends",
            (after.value, _encode(outcome), receipt, now, error, run_id, _BEFORE[after].value),
        ).fetchone()
        if found is None:
            return
        if has_ended:
            db.execute("DELETE FROM desired_models WHERE model_id = ? AND fence <= ?", (found["ends"], found["fence"]))
        if desired is not None:
            db.execute(
                "INSERT INTO desired_models (model_id, fence, document, seal) VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET"
                " fence = excluded.fence, document = excluded.document, seal = excluded.seal, unfinished = 0"
                " WHERE excluded.fence > fence",
                (desired.model_id, desired.fence, desired.document, desired.seal),
            )
            # An unload that was approved later may have ended before this load was written down.
            _drop_ended(db, RunState.SUCCEEDED, "model-unload")


def certify_op(db: sqlite3.Connection, run_id: int, outcome: dict[str, object], *, receipt: str) -> Run:
    db.execute(
        "UPDATE operations SET outcome = ?, receipt = ? WHERE id = ? AND state = ? AND receipt = ''",
        (_encode(outcome), receipt, run_id, RunState.INTERRUPTED.value),
    )
    return _make_run(db.execute(_BY_ID, (run_id,)).fetchone())


def interrupt_ops(db: sqlite3.Connection, *, now: float) -> list[Run]:
    """Give every run that goes on no more the outcome ``INTERRUPTED``; return them."""
    with transaction(db):
        cut_off = db.execute(
            "UPDATE operations SET state = ?, outcome = '{}', ended_at = ?, error = iif(task_id IS NULL, NULL, ?)"
            " WHERE state = ? RETURNING *",
            (RunState.INTERRUPTED.value, now, LOAD_INTERRUPTED, _BEFORE[RunState.INTERRUPTED].value),
        ).fetchall()
        _drop_ended(db, RunState.SUCCEEDED, "model-unload")
        # Nothing is loaded now, and to unload the model of an interrupted operation was the last that people approved.
        _drop_ended(db, RunState.INTERRUPTED, None)
    return [_make_run(row) for row in cut_off]


def _drop_ended(db: sqlite3.Connection, state: RunState, operation: str | None) -> None:
    """Have no model desired that a later operation in this state was to unload. ``operation``: of this kind alone."""
    db.execute(
        "DELETE FROM desired_models WHERE EXISTS (SELECT 1 FROM operations WHERE operations.ends = desired_models.model_id"
        " AND operations.fence > desired_models.fence AND operations.state = ? AND operation = coalesce(?, operation))",
        (state.value, operation),
    )


def find_run(db: sqlite3.Connection, query: str, *values: object) -> Run | None:
    row = db.execute(query, values).fetchone()
    return None if row is None else _make_run(row)


def _make_run(row: sqlite3.Row) -> Run:
    state, ended = RunState(row["state"]), row["outcome"]
    outcome = None if ended is None else {"state": state.value, **json.loads(ended)}
    return Run(run_id=row["id"], state=state, outcome=outcome, **{name: row[name] for name in _PLAIN if name != "run_id"})


def _encode(outcome: dict[str, object]) -> str:
    # Its state has a column of its own.
    return json.dumps({name: value for name, value in outcome.items() if name != "state"})


def read_desired(db: sqlite3.Connection) -> list[DesiredModel]:
    query = "SELECT model_id, fence, document, seal, unfinished FROM desired_models ORDER BY fence, model_id"
    return [DesiredModel(*row) for row in db.execute(query)]


def _count(db: sqlite3.Connection, query: str, *values: object) -> int:
    return int(db.execute(query, values).fetchone()[0])


def _full(most: int) -> LedgerFull:
    return LedgerFull(f"the ledger holds its {most} entries; wait until some have expired")
