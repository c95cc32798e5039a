"""The gate in front of every lifecycle operation: no valid token, no operation; one token, one operation at most.

The caller checks the request itself before it comes here, because a token that has passed is spent, whatever follows.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import assert_never

import msgspec

from runner.errors import InvalidRequest, OperationLimit, OperationsDisabled, OpTokenRefused, Unavailable, WrongState
from runner.ledger.database import LedgerError, LedgerFull
from runner.ledger.ledger import Ledger, OpAlreadyDone, OpIsRunning, OpOrder, OpStarted, Run, StaleFence, TooManyOps
from runner.limits import limits
from runner.operations.keys import KeyRing
from wire import clock
from wire.optoken.approval import Policy
from wire.optoken.op_token import OpTokenError, Reason, SignedToken, encode_token, read_token
from wire.optoken.verifier import Level, Operation, Verified, Verifier

log = logging.getLogger(__name__)

REFUSED = "The operation token was not accepted. The log of this node says why; then ask for a new token."
LIMIT_REASON = "operation_limit"
"""What an operation is counted under that its token permits and this node's own limits do not."""
KEEP_PARAM = "keepLoaded"


class Accepted(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A load that the gate let in and that says that the model stays loaded. ``token``: base64url, as ``read_token`` takes it.

    ``params``: every member of the request but the token. ``accepted_at_ms``: Unix milliseconds, the moment at which the token
    was verified.
    """

    v: int = 1
    model_id: str
    runner_id: str
    op_key: str
    fence: int
    accepted_at_ms: int
    params: dict[str, object]
    token: str


class OperationRunning(WrongState):
    """The operation that the token belongs to was begun before and has not ended. ``op_key``: its name in the ledger."""

    code = "operation_running"
    retryable = True

    def __init__(self, op_key: str) -> None:
        super().__init__("The operation of this token is being carried out; wait until it has ended.")
        self.op_key = op_key


@dataclass(frozen=True, slots=True)
class Admitted:
    """An operation that may go on. ``run``: its row in the ledger, which names no approval at L0, where tokens name none.

    ``keeps``: the model of a load that is to stay loaded.
    """

    level: Level
    operation: Operation
    signers: tuple[str, ...]
    run: Run
    keeps: Accepted | None = None

    @property
    def op_id(self) -> str | None:
        """The approval behind it, None at L0."""
        return None if self.run.op_key is None else self.run.approval_id

    @property
    def recorded(self) -> dict[str, object] | None:
        """How it went when it was carried out already; then it must not be done again and the caller is told this."""
        return self.run.outcome

    @property
    def receipt(self) -> str:
        """The receipt of what was carried out already, "" = none."""
        return self.run.receipt


@dataclass(frozen=True, slots=True)
class GateRules:
    """What the owner of a node asks of tokens. ``runner_id``: the audience this node answers to.

    ``policy`` returns the pinned policy. ``ops_per_hour``: how many may begin within an hour, whoever approved; None = any.
    ``disabled``: why no operation is carried out at all, "" = they are.
    """

    key_path: Path | None
    level: Level
    min_signers: int
    runner_id: str
    policy: Callable[[], Policy | None] = field(default=lambda: None)
    ops_per_hour: int | None = None
    disabled: str = ""
    counted_signers: frozenset[str] | None = None
    """Below L2: the names that count towards ``min_signers``; None = any."""


class Gate:
    """Admits operations by token. Times are Unix seconds."""

    def __init__(self, rules: GateRules, *, ledger: Ledger, clock: Callable[[], float] = clock.unix_s) -> None:
        self._rules = rules
        self._keys = KeyRing(rules.key_path)
        self._reading = asyncio.Lock()
        self._ledger = ledger
        self._clock = clock
        self.refusals: dict[str, int] = {}
        """How many tokens were refused, by reason."""

    @property
    def level(self) -> Level:
        return self._rules.level

    async def admit(
        self, token: object, *, operation: Operation, model_id: str | None, params: Mapping[str, object]
    ) -> Admitted:
        """Return the operation that ``token`` permits, with its nonce spent and, from L1 on, its approval booked.

        ``token``: what stands in ``verifiedOpToken``, or that as ``read_token`` reads it. ``params``: all members of the
        request body. Raises OperationsDisabled (no usable key, or no place to remember), OpTokenRefused (one text for all
        reasons), OperationRunning, OperationLimit (nothing was booked), Unavailable (the ledger fails), InvalidRequest (a
        token of L0 cannot keep a model loaded).
        """
        verifier, now = await self._make_verifier(), self._clock()
        try:
            signed = token if isinstance(token, SignedToken) else read_token(token)
            verified = verifier.verify(signed, operation=operation, model_id=model_id, params=params, now=now)
            keeps = self._read_keeps(signed, verified, operation, params, now)
            order = self._make_order(signed, verified, operation, model_id, params, adds_desired=keeps is not None)
            admitted = Admitted(verified.level, operation, verified.signers, await self._book(verified, order), keeps)
        except OpTokenError as error:
            self._count(error.reason.value)
            log.warning("operation refused operation=%s reason=%s", operation, error)
            raise OpTokenRefused(REFUSED) from None
        except OperationLimit as error:
            self._count(LIMIT_REASON)
            log.warning("operation refused operation=%s reason=%s: %s", operation, LIMIT_REASON, error)
            raise
        except LedgerError as error:
            log.error("operation refused, the ledger failed operation=%s error=%s", operation, error)  # noqa: TRY400
            raise Unavailable("The ledger of this node cannot be written, so no operation is carried out.") from None
        log.info(
            "operation admitted operation=%s level=%s op=%s class=%s approvers=%s signers=%s repeated=%s",
            operation, admitted.level, admitted.op_id, verified.op_class or "-", len(verified.approvers),
            len(admitted.signers), admitted.recorded is not None,
        )  # fmt: skip
        return admitted

    def _read_keeps(
        self, signed: SignedToken, verified: Verified, operation: Operation, params: Mapping[str, object], now: float
    ) -> Accepted | None:  # fmt: skip
        """Return what is to be written down of a load whose model stays loaded. Raises InvalidRequest."""
        if operation is not Operation.MODEL_LOAD or params.get(KEEP_PARAM) is not True:
            return None
        if verified.op_key is None or verified.fence is None:
            raise InvalidRequest(
                "A token of level 0 signs no parameters, so it cannot keep a model loaded. Use tokens of level 1 or 2, or "
                "switch the model on in the settings file of the node.", param=KEEP_PARAM,
            )  # fmt: skip
        return Accepted(
            model_id=str(params["modelId"]), runner_id=self._rules.runner_id, op_key=verified.op_key, fence=verified.fence,
            accepted_at_ms=int(now * 1000), params={name: value for name, value in params.items() if value is not None},
            token=encode_token({**signed.extra, "opToken": dict(signed.claims), "signature": signed.signature}),
        )  # fmt: skip

    def _count(self, reason: str) -> None:
        self.refusals[reason] = self.refusals.get(reason, 0) + 1

    async def _make_verifier(self) -> Verifier:
        rules = self._rules
        if rules.disabled:
            raise OperationsDisabled(f"Operations are disabled: {rules.disabled}.")
        try:
            # Not wait_for: in Python 3.11 it swallows a cancellation that comes together with the answer.
            async with self._reading, asyncio.timeout(limits().operations.key_read_s):
                keys = await asyncio.to_thread(self._keys.read)
        except TimeoutError:
            raise Unavailable("The key file of this node cannot be read in time, so no operation is carried out.") from None
        return Verifier(
            level=rules.level,
            min_signers=rules.min_signers,
            runner_id=rules.runner_id,
            keys=keys,
            # Rounded down since tokens carry whole seconds. No allowance for clocks here: a token that was spent just before
            # the ledger was lost would fit into it. A node whose first ledger this is has made it (``Governance.open``).
            not_before=math.floor(self._ledger.born_at),
            policy=rules.policy(),
            counted_signers=rules.counted_signers,
        )

    def _make_order(
        self, signed: SignedToken, verified: Verified, operation: Operation, model_id: str | None, params: Mapping[str, object],
        *, adds_desired: bool,
    ) -> OpOrder | None:  # fmt: skip
        """Return what the ledger is to begin; None at L0, whose tokens name no approval."""
        op_key, fence = verified.op_key, verified.fence
        if verified.op_id is None or op_key is None or fence is None:
            return None
        named = params.get("evictModel")
        evicted = named if isinstance(named, str) else None
        whole = "settings" if operation is Operation.SETTINGS_RELOAD else "cache"
        return OpOrder(
            op_key=op_key, slot=whole if model_id is None else f"model:{model_id}", fence=fence,
            expires_at=max(verified.expires_at, verified.not_after or 0), operation=operation.value, model_id=model_id,
            approval_id=verified.op_id, use=verified.use, op_class=verified.op_class,
            statement_digest="" if verified.statement is None else verified.statement.digest.hex(),
            checkpoint=str(signed.claims.get("checkpoint") or ""), most_per_hour=self._rules.ops_per_hour,
            most_per_day=verified.daily_cap or None,
            # What was approved earlier for the model that it evicts must not follow it either.
            other_slots=() if evicted is None else (f"model:{evicted}",),
            ends=model_id if operation is Operation.MODEL_UNLOAD else evicted if evicted != model_id else None,
            adds_desired=adds_desired,
        )  # fmt: skip

    async def _book(self, verified: Verified, order: OpOrder | None) -> Run:
        """Spend the nonce and begin the operation; return its row, which has an outcome when it was carried out before."""
        try:
            spent = await self._ledger.spend_nonce(verified.nonce, expires_at=verified.expires_at)
            if spent is None:
                raise OpTokenError(Reason.REPLAYED)
            if order is None:
                return spent
            begun = await self._ledger.begin_op(spent.run_id, order)
        except LedgerFull:
            raise OpTokenError(Reason.LEDGER_FULL) from None
        match begun:
            case OpStarted(run) | OpAlreadyDone(run):
                return run
            case StaleFence():
                raise OpTokenError(Reason.STALE_FENCE)
            case OpIsRunning():
                raise OperationRunning(order.op_key)
            case TooManyOps(most, within_s, retry_after_s, is_of_class):
                kind = f"operations of the class {verified.op_class}" if is_of_class else "operations"
                raise OperationLimit(
                    f"{most} {kind} began on this node within {within_s / 3600:g} h, the most that it carries out; wait.",
                    retry_after_s=retry_after_s,
                )
            case _:
                assert_never(begun)
