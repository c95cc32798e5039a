"""Operations of a runner: checked, let in by the gate, carried out to their end, recorded with a receipt, told when repeated.

Bodies, answers and outcomes are those of the model-runner specification.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from runner.definitions.plan import Cluster, Member, Progress
from runner.definitions.settings import SettingsChange
from runner.engines.cluster import decline, split_address
from runner.engines.port import FlushOutcome, FlushRequest, FlushResult, FlushScope
from runner.errors import (
    InvalidRequest,
    OperationInterrupted,
    RequestRefused,
    RunnerError,
    Unavailable,
    UnknownTask,
    WrongState,
    refusal_fields,
)
from runner.ledger.database import LedgerError
from runner.ledger.ledger import INTERRUPTED, DesiredModel, Ledger, Run, RunState
from runner.limits import MIB, limits
from runner.operations.gate import KEEP_PARAM, Accepted, Admitted, Gate, OperationRunning
from runner.operations.keys import Identity
from runner.pool.loads import LoadOrder, LoadResult, Pool
from runner.pool.models import Model, ModelState
from wire import clock
from wire.optoken.documents import Outcome, Receipt, ReceiptError, digest_result, sign_receipt
from wire.optoken.verifier import Level, Operation

log = logging.getLogger(__name__)

OnBegin = Callable[[], None]
"""Called, and must not block, once nothing can refuse an operation any more but itself."""
KEPT_FIELD = "keptLoaded"
"""Says in the result of a load that the runner loads the model again after a restart."""
SEAL_DOMAIN = b"desired-model/v1\x00"
_TASK_STATES = {
    RunState.RUNNING: "loading", RunState.SUCCEEDED: "completed", RunState.FAILED: "failed",
    RunState.INTERRUPTED: "interrupted",
}  # fmt: skip
"""What a load is said to be over HTTP."""


def _tell_nobody() -> None:
    """Nobody follows an operation that came over HTTP."""


class MemberBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A node of a replica over several: its runner id, its cluster address and the GPUs that it gives."""

    node: str
    address: str
    gpus: list[int]


class LoadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/models/load``. ``overrides`` are the backend's own fields; most others are those of the specification.

    ``gpus``: the GPUs that each replica takes, by their numbers on the node. ``members``: one replica over these nodes, the
    first of which is the head and one of which this must be. ``keepLoaded``: the runner loads the model again by itself after
    every restart, until it is unloaded by an operation.
    """

    modelId: str  # noqa: N815  # names of the specification, here and below
    quantization: str | None = None
    maxContextLength: int | None = None  # noqa: N815
    gpuMemoryBudgetMB: int | None = None  # noqa: N815
    evictModel: str | None = None  # noqa: N815
    gpus: list[int] | None = None
    members: list[MemberBody] | None = None
    overrides: dict[str, object] = {}
    keepLoaded: bool | None = None  # noqa: N815
    verifiedOpToken: Any = None  # noqa: N815  # Any: an object, its text, or base64url of it


class UnloadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/models/unload``. ``force`` ends what runs instead of waiting for it."""

    modelId: str  # noqa: N815
    force: bool = False
    verifiedOpToken: Any = None  # noqa: N815  # as above


class FlushBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``POST /v1/cache/flush``."""

    scope: FlushScope
    tenantId: str | None = None  # noqa: N815
    modelId: str | None = None  # noqa: N815
    tag: str | None = None
    verifiedOpToken: Any = None  # noqa: N815  # as above


class ReloadBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The operation ``settings-reload``, which has no parameters. Over the node's own port its owner asks without a token."""

    verifiedOpToken: Any = None  # noqa: N815  # as above


@dataclass(frozen=True, slots=True)
class Reply:
    """An HTTP status and a JSON object. ``task_id``: of the load as which the operation goes on, None = it has ended."""

    status: int
    body: dict[str, object]
    task_id: str | None = None


@dataclass(frozen=True, slots=True)
class Ending:
    """How an operation ended. ``body``: the answer of the model-runner API, plain JSON; ``status``: its HTTP status.

    ``unloaded``: the model that a load unloaded first, "" = it came to none. ``error``: why a load was cut off.
    """

    outcome: Outcome
    status: int
    body: dict[str, object]
    unloaded: str = ""
    error: str | None = None

    def as_record(self) -> dict[str, object]:
        """Return what the ledger keeps."""
        if self.outcome == "interrupted":
            return dict(INTERRUPTED)
        return {"state": self.outcome, "status": self.status, "body": self.body}


CUT_OFF = Ending("interrupted", 409, {})
BROKEN = Ending("failed", 500, {"error": {"code": "internal_error", "message": "See the log."}})


@dataclass(frozen=True, slots=True)
class Load:
    """A load under way. ``fraction``: share done, 0.0 to 1.0, None = cannot be told. ``result``: JSON that callers see."""

    task_id: str
    model_id: str
    started_at: float
    run_id: int = 0
    stage: str = "waiting"
    fraction: float | None = 0.0
    state: RunState = RunState.RUNNING
    error: str | None = None
    result: dict[str, object] = field(default_factory=dict)


class Operations:
    """``params`` of each call is the decoded request body without its token: what a token may bind.

    What a token has let in is carried out to its end, also when the caller leaves meanwhile.
    """

    def __init__(self, pool: Pool, gate: Gate, ledger: Ledger, identity: Identity | None, *, cluster_address: str = "") -> None:
        self._pool = pool
        self._gate = gate
        self._ledger = ledger
        self._identity = identity
        self._cluster_address = cluster_address
        self._governed: set[asyncio.Task[Reply]] = set()
        self._loads: dict[str, Load] = {}
        self._running: dict[str, asyncio.Task[None]] = {}
        self._followers: dict[str, list[Admitted]] = {}
        """The operations that a load carries out, by its task."""
        self._news: dict[str, asyncio.Event] = {}
        self._task_of_model: dict[str, str] = {}
        self._starting = 0
        self._is_closing = False
        self.is_stopping = False
        """No operation is let in any more; what runs goes on."""

    async def close(self) -> None:
        """Cancel the loads under way and wait for them; unloads and flushes may go on for a while."""
        self._is_closing = self.is_stopping = True
        await self._cancel_loads()
        if self._governed:
            _, late = await asyncio.wait(self._governed, timeout=limits().operations.close_s)
            for each in late:
                each.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._cancel_loads()  # one that was let in before the end may have begun since

    async def _cancel_loads(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    # The operations

    async def load(self, body: LoadBody, params: Mapping[str, object], *, on_begin: OnBegin = _tell_nobody) -> Reply:
        """Start a load: 202 with its task; 200 when the model is loaded already. Raises RequestRefused."""
        overrides = _overrides(body)
        if body.members is not None:
            overrides["gpus"] = self._find_own(body, body.members).gpus
        if body.keepLoaded and self._identity is None:
            raise InvalidRequest(
                "To keep a model loaded the node needs a place to remember it: start it with --data DIR.", param=KEEP_PARAM
            )
        model = self._pool.registry.find_or_plan(body.modelId)
        self._pool.loader.check(model, overrides)
        if body.evictModel is not None:
            self._pool.registry.find(body.evictModel)
        return await self._run(
            body.verifiedOpToken, Operation.MODEL_LOAD, body.modelId, params, on_begin,
            lambda run: self._start_load(body, overrides, run),
        )  # fmt: skip

    def _find_own(self, body: LoadBody, members: list[MemberBody]) -> MemberBody:
        """Return this node's part of a replica over several. Raises InvalidRequest when it cannot take that."""
        identity = self._identity
        if identity is None or self._gate.level is not Level.L2:
            raise InvalidRequest("A replica over several nodes needs a node of level 2 with a data folder.", param="members")
        if body.keepLoaded or body.gpus is not None:
            raise InvalidRequest("members cannot go together with keepLoaded and gpus; leave those out.", param="members")
        own = next((member for member in members if member.node == identity.certified_id), None)
        if own is None:
            raise InvalidRequest(f"members does not name this node, {identity.certified_id}.", param="members")
        if not self._cluster_address or own.address != self._cluster_address:
            said = f"is {self._cluster_address}" if self._cluster_address else "was not given; start it with --cluster-address"
            raise InvalidRequest(f"members names {own.address} for this node, whose cluster address {said}.", param="members")
        nodes, sizes = {member.node for member in members}, {len(member.gpus) for member in members}
        if len(nodes) < len(members) or not 2 <= len(members) <= limits().cluster.members or len(sizes) > 1:
            raise InvalidRequest(
                f"members must name 2 to {limits().cluster.members} nodes, each once and with as many GPUs as the others.",
                param="members",
            )
        for member in members:
            try:
                split_address(member.address)
            except ValueError as error:
                raise InvalidRequest(f"members: {error}.", param="members") from None
        return own

    def _make_cluster(self, body: LoadBody, run: Run | None) -> Cluster | None:
        identity = self._identity
        if body.members is None or identity is None:
            return None
        if run is None or not run.statement_digest:
            raise InvalidRequest(
                "A replica over several nodes needs an approval that its members can compare.", param="members"
            )
        members = tuple(Member(one.node, one.address, tuple(one.gpus)) for one in body.members)
        return Cluster(
            replica_id=f"{run.approval_id}.{run.use}", digest=run.statement_digest, members=members,
            own=next(member for member in members if member.node == identity.certified_id), public_key=identity.public_key,
            sign=identity.private_key.sign,
        )  # fmt: skip

    async def unload(self, body: UnloadBody, params: Mapping[str, object], *, on_begin: OnBegin = _tell_nobody) -> Reply:
        """Unload a model and answer when it is gone. Raises RequestRefused, EngineError."""
        if body.modelId not in self._ledger.desired_fences:  # else its files may be gone, and it must not be desired for ever
            self._pool.registry.find(body.modelId)
        return await self._run(
            body.verifiedOpToken, Operation.MODEL_UNLOAD, body.modelId, params, on_begin, lambda _: self._unload(body)
        )  # fmt: skip

    async def flush(self, body: FlushBody, params: Mapping[str, object], *, on_begin: OnBegin = _tell_nobody) -> Reply:
        """Flush what the scope names and say for each model what came of it. Raises RequestRefused."""
        self._flush_targets(body)
        return await self._run(
            body.verifiedOpToken, Operation.CACHE_FLUSH, body.modelId, params, on_begin, lambda _: self._flush(body)
        )  # fmt: skip

    async def reload_settings(
        self, body: ReloadBody, read_again: Callable[[], Awaitable[SettingsChange]], *, on_begin: OnBegin = _tell_nobody
    ) -> Reply:
        """Have ``read_again`` take over the settings files and say what that changed. Raises RequestRefused.

        A model that is loaded and would change, or a file that cannot be used, ends the operation: that is its signed outcome.
        """

        async def read(_: Run) -> Reply:
            return Reply(200, reload_fields(await read_again()))

        return await self._run(body.verifiedOpToken, Operation.SETTINGS_RELOAD, None, {}, on_begin, read)

    async def load_again(self, body: LoadBody) -> dict[str, object]:
        """Load a model that is to stay loaded, and return its task once that has ended. Raises RequestRefused, LedgerError.

        This is no new run of an operation: it needs no token and has no receipt. The caller has verified what was approved.
        """
        if self.is_stopping:
            raise Unavailable("The node is shutting down.", retry_after_s=5)
        overrides = _overrides(body)
        self._pool.loader.check(self._pool.registry.find_or_plan(body.modelId), overrides)
        try:
            begun = await self._start_load(body, overrides, None)
        except RunnerError as error:
            self._pool.loader.note_refusal(body.modelId, error)
            raise
        if begun.task_id is not None:
            return await self.wait(begun.task_id)
        return {**begun.body, "status": "completed"}  # somebody else has loaded it, or is about to

    async def find(self, op_id: str, use: int) -> Run | None:
        """Return one use of an approval as the ledger has it, None when it was never begun here. Raises LedgerError.

        One that was cut off gets its receipt now: it says what the node has loaded, which nobody could sign at the time.
        """
        run = await self._ledger.find_op(op_id, use)
        return run if run is None else await self._certify(run)

    # Admit, carry out, record

    async def _run(
        self, token: object, operation: Operation, model_id: str | None, params: Mapping[str, object], on_begin: OnBegin,
        carry_out: Callable[[Run], Awaitable[Reply]],
    ) -> Reply:  # fmt: skip
        """Let an operation in, carry it out, write down how it went. Raises RequestRefused, and what ``carry_out`` raises.

        ``carry_out`` is called once the operation has been booked.
        """

        async def govern() -> Reply:
            if self.is_stopping:
                raise Unavailable("The node is shutting down.", retry_after_s=5)
            try:
                admitted = await self._gate.admit(token, operation=operation, model_id=model_id, params=params)
            except OperationRunning as running:
                task_id = self._find_task(running.op_key)
                if task_id is None:
                    raise
                return Reply(200, {**await self.read_task(task_id), "repeated": True})
            if admitted.recorded is not None:
                return await self._repeat(admitted.run, admitted.recorded)
            return await self._carry_out(admitted, on_begin, carry_out)

        # A caller who hangs up does not cut off what an approval was spent on.
        task = asyncio.create_task(govern())
        self._governed.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _find_task(self, op_key: str) -> str | None:
        return next(
            (task_id for task_id, found in self._followers.items() if any(each.run.op_key == op_key for each in found)), None
        )  # fmt: skip

    def _forget(self, task: asyncio.Task[Reply]) -> None:
        self._governed.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, RunnerError):
            log.critical("operation failed unexpectedly", exc_info=error)

    async def _carry_out(
        self, admitted: Admitted, on_begin: OnBegin, carry_out: Callable[[Run], Awaitable[Reply]]
    ) -> Reply:  # fmt: skip
        ending: Ending | None = BROKEN
        refused: RequestRefused | None = None
        receipt, body = "", dict[str, object]()
        try:
            on_begin()
            done = await carry_out(admitted.run)
            if done.task_id is not None:
                ending = None
                self._followers.setdefault(done.task_id, []).append(admitted)
                return done
            ending = Ending("succeeded", done.status, done.body)
        except asyncio.CancelledError:
            ending = CUT_OFF
            raise
        except LedgerError as error:
            log.error("operation ended, the ledger failed operation=%s error=%s", admitted.operation, error)  # noqa: TRY400
            refused = Unavailable("The ledger of this node cannot be used, so the operation was not carried out.")
            ending = _failed(refused)
            raise refused from None
        except RunnerError as error:
            refused = error if isinstance(error, RequestRefused) else None
            ending = _failed(error)
            raise
        finally:
            if ending is not None:
                receipt, body, _ = await self._record(admitted.run, ending, admitted.keeps)
            if refused is not None and receipt:
                refused.details["receipt"] = receipt
        return Reply(done.status, {**body, "receipt": receipt} if receipt else body)

    async def _record(self, run: Run, ending: Ending, keeps: Accepted | None) -> tuple[str, dict[str, object], bool]:
        """Write down how a run ended; return its receipt ("" = none), the body that it is about, whether both are on disk."""
        if run.op_key is None:
            return "", ending.body, False
        is_cut_off, desired, unkept = ending.outcome == "interrupted", None, ending
        if keeps is not None and self._identity is not None and ending.outcome == "succeeded":
            desired = seal_accepted(keeps, self._identity)
            ending = replace(ending, body={**ending.body, KEPT_FIELD: True})
        is_unload = run.operation == Operation.MODEL_UNLOAD.value and ending.outcome == "succeeded"
        has_ended = run.ends is not None and not is_cut_off and (is_unload or ending.unloaded == run.ends)
        receipt = "" if is_cut_off else self._sign(run, ending)
        try:
            await self._ledger.finish_op(
                run.run_id, ending.as_record(), receipt=receipt, desired=desired, has_ended=has_ended, error=ending.error
            )  # fmt: skip
        except LedgerError as error:
            # It was done, and its token is spent: the caller must hear how it went even if nobody else will.
            log.error("outcome of an operation was not recorded operation=%s error=%s", run.operation, error)  # noqa: TRY400
            if desired is None:
                return receipt, ending.body, False
            return self._sign(run, unkept), unkept.body, False  # what is not on disk is not loaded again
        return receipt, ending.body, True

    def _sign(self, run: Run, ending: Ending) -> str:
        """Return the receipt of a run, "" when there can be none."""
        identity = self._identity
        if identity is None or run.op_key is None or run.begun_at is None or run.fence is None:
            return ""
        ended_at = int(run.ended_at or clock.unix_s())
        try:
            return sign_receipt(
                identity.private_key,
                Receipt(
                    op_id=run.approval_id, use=run.use, statement_digest=run.statement_digest,
                    runner_id=identity.certified_id, operation=run.operation, outcome=ending.outcome,
                    result_digest=digest_result(ending.body), fence=run.fence, started_at=int(run.begun_at),
                    ended_at=ended_at, checkpoint=run.checkpoint,
                ),
            )  # fmt: skip
        except (ReceiptError, ValueError) as error:
            # It was done all the same, and must be recorded.
            log.error("operation has no receipt op=%s error=%s", run.op_key, error)  # noqa: TRY400
            return ""

    async def _repeat(self, run: Run, recorded: Mapping[str, object]) -> Reply:
        """Answer an operation that was carried out before, in the same words. Raises OperationInterrupted."""
        if run.state is RunState.INTERRUPTED:
            receipt = (await self._certify(run)).receipt
            raise OperationInterrupted(
                "This operation was cut off by a restart of the node. See GET /v1/capabilities for what is loaded, "
                "then ask for a new token.",
                details={"receipt": receipt} if receipt else {},
            )
        status, body = recorded.get("status"), recorded.get("body")
        shown = dict(body) if isinstance(body, dict) else {}
        task_id = shown.get("taskId")
        if isinstance(task_id, str) and status == 202:  # as an earlier version of this program wrote loads down
            return Reply(200, {**await self.read_task(task_id), "repeated": True})
        signed: dict[str, object] = {"receipt": run.receipt} if run.receipt else {}
        return Reply(status if isinstance(status, int) else 200, {**shown, **signed, "repeated": True})

    async def _certify(self, run: Run) -> Run:
        """Return a run with its receipt where it was cut off and has none: about what the node has loaded at this moment."""
        if run.state is not RunState.INTERRUPTED or run.receipt or not run.operation:
            return run
        registry = self._pool.registry
        states = {model.model_id: model.state.value for model in registry.models}
        state = "all" if run.model_id is None else states.get(run.model_id, "unknown")
        result: dict[str, object] = {"modelId": run.model_id, "state": state, "loaded": registry.ready_ids()}
        receipt = self._sign(run, replace(CUT_OFF, body=result))
        outcome = {**INTERRUPTED, "body": result}
        if not receipt:
            return replace(run, outcome=outcome)
        return await self._ledger.certify_op(run.run_id, outcome, receipt=receipt)

    # Loads

    async def read_task(self, task_id: str) -> dict[str, object]:
        """Return a load task as JSON members. Raises UnknownTask."""
        load = self._loads.get(task_id)
        if load is not None:
            return self._show(load)
        run = await self._ledger.find_load(task_id)
        if run is None:
            raise UnknownTask(f"There is no load task {task_id!r} here; the newest 1000 are kept.")
        body = None if run.outcome is None else run.outcome.get("body")
        if isinstance(body, dict) and run.state is not RunState.INTERRUPTED:
            return {**body, "receipt": run.receipt} if run.receipt else body
        return self._show(
            Load(
                task_id, run.model_id or "", run.begun_at or 0.0, stage=run.stage, fraction=run.fraction, state=run.state,
                error=run.error,
            )
        )  # fmt: skip

    async def wait(self, task_id: str) -> dict[str, object]:
        """Return a load task once it has ended. Raises UnknownTask."""
        running = self._running.get(task_id)
        if running is not None:
            await asyncio.shield(asyncio.gather(running, return_exceptions=True))
        return await self.read_task(task_id)

    def view(self, task_id: str) -> tuple[Load, float | None] | None:
        """Return a load and the seconds until it ends (None = cannot be told); None when it has ended."""
        load = self._loads.get(task_id)
        if load is None or task_id not in self._running:
            return None
        progress = next((model.load for model in self._pool.registry.models if model.model_id == load.model_id), None)
        return load, None if progress is None else progress.eta_s()

    async def wait_news(self, task_id: str, *, within_s: float) -> None:
        """Return when a load has something new to say, or has ended, or after so many seconds."""
        if task_id in self._running:
            news = self._news.setdefault(task_id, asyncio.Event())
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the news.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(within_s):
                    await news.wait()

    def _tell_news(self, task_id: str) -> None:
        news = self._news.pop(task_id, None)
        if news is not None:
            news.set()

    def _show(self, load: Load) -> dict[str, object]:
        shown: dict[str, object] = {
            "taskId": load.task_id, "status": _TASK_STATES[load.state], "modelId": load.model_id, "stage": load.stage,
            "progress": 1.0 if load.state is RunState.SUCCEEDED else round(load.fraction or 0.0, 3),
        }  # fmt: skip
        if load.state is RunState.RUNNING:
            progress = self._pool.registry.find(load.model_id).load
            eta = progress.eta_s() if progress is not None else None
            shown["eta"] = None if eta is None else round(eta)
        if load.error:
            shown["error"] = load.error
        return {**shown, **load.result, "startedAt": int(load.started_at)}

    async def _start_load(self, body: LoadBody, overrides: Mapping[str, object], run: Run | None) -> Reply:
        if len(self._running) + self._starting >= limits().operations.loads:
            raise WrongState(f"{limits().operations.loads} loads are under way; wait for one to end.")
        self._starting += 1
        try:
            return await self._begin_load(body, overrides, run)
        finally:
            self._starting -= 1

    async def _begin_load(self, body: LoadBody, overrides: Mapping[str, object], run: Run | None) -> Reply:
        registry = self._pool.registry
        registry.define(registry.find_or_plan(body.modelId).definition)
        cluster = self._make_cluster(body, run)
        try:
            order = await self._pool.loader.order(
                body.modelId, overrides=overrides, evict=body.evictModel, cluster=cluster
            )  # fmt: skip
        except RunnerError as error:
            if cluster is not None and not cluster.is_head:
                await decline(cluster, str(error))
            raise
        if isinstance(order, Model):
            return await self._already(order)
        task_id = f"load-{secrets.token_hex(8)}"
        load = Load(task_id, order.model.model_id, clock.unix_s())
        self._loads[task_id], self._task_of_model[load.model_id] = load, task_id
        try:
            # Written before it begins, so that a runner killed from here on finds it and says "interrupted".
            run_id = await self._ledger.start_load(
                task_id, run_id=None if run is None else run.run_id, model_id=load.model_id, stage=load.stage
            )  # fmt: skip
        except BaseException:
            self._pool.loader.call_off(order)
            del self._loads[task_id], self._task_of_model[load.model_id]
            raise
        self._loads[task_id] = load = replace(load, run_id=run_id)
        self._running[task_id] = task = asyncio.create_task(self._carry_out_load(order, task_id))
        task.add_done_callback(_report_failure)
        return Reply(202, self._show(load), task_id)

    async def _already(self, model: Model) -> Reply:
        task_id = self._task_of_model.get(model.model_id)
        is_loading = model.state is ModelState.LOADING
        if is_loading and task_id is not None:
            # Nothing may wait between this look and the caller's note that it follows the task.
            if task_id in self._running:
                return Reply(202, self._show(self._loads[task_id]), task_id)
            return Reply(202, await self.read_task(task_id))
        memory = model.memory_bytes
        return Reply(
            202 if is_loading else 200,
            {
                "taskId": task_id, "status": "loading" if is_loading else "completed", "modelId": model.model_id,
                "gpuMemoryUsedMB": None if memory is None else memory // MIB,
                "loadTimeMs": None if model.load_s is None else round(model.load_s * 1000), "alreadyLoaded": True,
                "evicted": None,
            },
        )  # fmt: skip

    async def _carry_out_load(self, order: LoadOrder, task_id: str) -> None:
        saved_at = clock.monotonic()

        def note(progress: Progress) -> None:
            nonlocal saved_at
            before = self._loads[task_id]
            load = replace(before, stage=progress.stage, fraction=progress.fraction)
            self._loads[task_id] = load
            self._tell_news(task_id)
            if load.stage != before.stage or clock.monotonic() - saved_at >= limits().operations.task_save_gap_s:
                saved_at = clock.monotonic()
                progressed = self._ledger.save_progress(load.run_id, load.stage, load.fraction)
                saves.add(save := asyncio.create_task(self._save(progressed, task_id)))
                save.add_done_callback(saves.discard)

        saves: set[asyncio.Task[bool]] = set()
        changes: dict[str, Any] = {
            "state": RunState.FAILED, "error": "it failed in an unexpected way; the log of this node says how",
            "result": {"code": "model_load_failed"},
        }  # fmt: skip
        try:
            result = await self._pool.loader.carry_out(order, note)
            changes = {"state": RunState.SUCCEEDED, "stage": "ready", "fraction": 1.0, "result": load_result(result)}
        except RunnerError as error:
            changes |= {"error": str(error), "result": failure_fields(error)}
        except asyncio.CancelledError:
            state = RunState.INTERRUPTED if self._is_closing else RunState.FAILED
            changes = {"state": state, "error": "the load was cancelled", "result": {}}
            raise
        finally:
            await self._end_load(replace(self._loads[task_id], **changes), saves, unloaded=order.progress.evicted)

    async def _end_load(self, load: Load, saves: set[asyncio.Task[bool]], *, unloaded: str) -> None:
        """Record how a load ended for every operation that it carried out, and for itself."""
        task_id = load.task_id
        if load.state is RunState.INTERRUPTED:
            ending = replace(CUT_OFF, error=load.error, unloaded=unloaded)
        else:
            is_loaded = load.state is RunState.SUCCEEDED
            ending = Ending("succeeded" if is_loaded else "failed", 200, self._show(load), unloaded)
        receipts, is_on_disk, is_own = list[str](), False, True
        try:
            for admitted in self._followers.get(task_id, []):
                receipt, _, is_recorded = await self._record(admitted.run, ending, admitted.keeps)
                receipts.append(receipt)
                if admitted.run.run_id == load.run_id and admitted.run.op_key is not None:
                    is_on_disk, is_own = is_recorded, False
            self._followers.pop(task_id, None)
            if receipts and receipts[0]:
                load = replace(load, result={**load.result, "receipt": receipts[0]})
            self._loads[task_id] = load
            if self._task_of_model.get(load.model_id) == task_id and load.state is not RunState.SUCCEEDED:
                del self._task_of_model[load.model_id]
            await asyncio.gather(*saves)
            if is_own:
                receipt = receipts[0] if receipts else ""
                is_on_disk = await self._save(
                    self._ledger.finish_op(load.run_id, ending.as_record(), receipt=receipt, error=ending.error), task_id
                )  # fmt: skip
            if is_on_disk:
                del self._loads[task_id]  # else this process alone knows how it ended
        finally:
            del self._running[task_id]
            self._tell_news(task_id)

    async def _save(self, writing: Awaitable[None], task_id: str) -> bool:
        try:
            await writing
        # A load does not end because its progress cannot be written.
        except LedgerError as error:
            log.warning("load task was not written down task=%s error=%s", task_id, error)
            return False
        return True

    # Steps of unload and flush

    async def _unload(self, body: UnloadBody) -> Reply:
        known = any(model.model_id == body.modelId for model in self._pool.registry.models)
        if not known:
            return Reply(200, {"modelId": body.modelId, "gpuMemoryFreedMB": 0, "kvCacheFlushed": True, "wasLoaded": False})
        result = await self._pool.unloader.unload(body.modelId, force=body.force)
        self._task_of_model.pop(body.modelId, None)
        return Reply(
            200,
            {
                "modelId": result.model_id, "gpuMemoryFreedMB": max(0, result.before_bytes - result.after_bytes) // MIB,
                "kvCacheFlushed": True, "memoryBeforeMB": result.before_bytes // MIB,
                "memoryAfterMB": result.after_bytes // MIB, "requestsCut": result.cut, "wasLoaded": result.was_loaded,
            },
        )  # fmt: skip

    def _flush_targets(self, body: FlushBody) -> list[Model]:
        needed = {FlushScope.MODEL: "modelId", FlushScope.TENANT: "tenantId", FlushScope.TAG: "tag"}.get(body.scope)
        if needed is not None and not getattr(body, needed):
            raise InvalidRequest(f"The scope {body.scope!s} needs {needed}.", param=needed)
        if body.modelId is not None:  # also with "all": the token names this model and no other
            return [self._pool.registry.find(body.modelId)]
        return [model for model in self._pool.registry.models if model.is_ready]

    async def _flush(self, body: FlushBody) -> Reply:
        request = FlushRequest(body.scope, tenant=body.tenantId, tag=body.tag)
        # Of several, one may have been unloaded while the others were flushed; then nothing is left in it.
        outcomes = [
            (model.model_id, await self._pool.unloader.flush(model, request))
            for model in self._flush_targets(body)
            if model.is_ready or body.modelId is not None
        ]
        entries = [outcome.entries_removed for _, outcome in outcomes if outcome.entries_removed is not None]
        freed = [outcome.memory_freed_mb for _, outcome in outcomes if outcome.memory_freed_mb is not None]
        done = {FlushResult.FLUSHED, FlushResult.RELOADED, FlushResult.NOTHING_KEPT}
        return Reply(
            200,
            {
                # With nothing loaded nothing is kept either.
                "flushed": all(outcome.result in done for _, outcome in outcomes),
                "entriesRemoved": sum(entries) if entries else None, "memoryFreedMB": sum(freed) if freed else None,
                "models": [flush_fields(model_id, outcome) for model_id, outcome in outcomes],
            },
        )  # fmt: skip


def seal_accepted(accepted: Accepted, identity: Identity) -> DesiredModel:
    """Return what the ledger keeps of a load that is to stay loaded, signed by this runner."""
    document = msgspec.json.encode(accepted)
    return DesiredModel(accepted.model_id, accepted.fence, document, identity.private_key.sign(SEAL_DOMAIN + document))


def load_result(result: LoadResult) -> dict[str, object]:
    """Return what a completed load came to."""
    return {
        "gpuMemoryUsedMB": None if result.memory_bytes is None else result.memory_bytes // MIB,
        "predictedMemoryMB": None if result.predicted_bytes is None else result.predicted_bytes // MIB,
        "loadTimeMs": round(result.load_s * 1000), "replicas": result.replicas, "evicted": result.evicted,
    }  # fmt: skip


def failure_fields(error: RunnerError) -> dict[str, object]:
    """Return the code of what went wrong, with its details."""
    if isinstance(error, RequestRefused):
        return {"code": error.code, **error.details}
    return {"code": "model_load_failed"}


def flush_fields(model_id: str, outcome: FlushOutcome) -> dict[str, object]:
    """Return what a flush came to for one model."""
    return {
        "modelId": model_id, "outcome": outcome.result.value, "detail": outcome.detail,
        "entriesRemoved": outcome.entries_removed, "memoryFreedMB": outcome.memory_freed_mb,
    }  # fmt: skip


def reload_fields(change: SettingsChange) -> dict[str, object]:
    """Return what a reload of the settings came to, in llm-pool's words."""
    return {
        "added_models": list(change.added), "removed_models": list(change.removed), "updated_models": list(change.updated),
        "unchanged_models": list(change.unchanged), "service_restart_required": change.service_restart_required,
    }  # fmt: skip


def _failed(error: RunnerError) -> Ending:
    if isinstance(error, RequestRefused):
        return Ending("failed", error.status, {"error": refusal_fields(error)})
    fields = {**failure_fields(error), "message": str(error), "type": "api_error", "param": None, "retryable": False}
    return Ending("failed", 500, {"error": fields})


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("load failed unexpectedly", exc_info=error)


def _overrides(body: LoadBody) -> dict[str, object]:
    """Return the overrides of a load: the backend's own fields and those of the specification that were given."""
    named = {
        "quantization": body.quantization, "maxContextLength": body.maxContextLength,
        "gpuMemoryBudgetMB": body.gpuMemoryBudgetMB, "gpus": body.gpus,
    }  # fmt: skip
    return {**body.overrides, **{name: value for name, value in named.items() if value is not None}}
