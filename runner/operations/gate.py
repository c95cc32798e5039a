"""The gate in front of every lifecycle operation: no valid token, no operation; one token, one operation at most.

The caller checks the request itself before it comes here, because a token that has passed is spent, whatever follows.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.errors import OpTokenRefused, Unavailable, WrongState
from runner.ledger import Ledger, LedgerError, LedgerFull, OpAlreadyDone, OpIsRunning, OpStarted, StaleFence
from runner.operations.keys import KeyRing
from wire.optoken import Level, Operation, OpTokenError, Reason, Verified, Verifier, read_token

log = logging.getLogger(__name__)

REFUSED = "The operation token was not accepted. The log of this box says why; then ask for a new token."
KEY_READ_S = 10.0


class OperationRunning(WrongState):
    """The operation that the token belongs to was begun before and has not ended."""

    code = "operation_running"
    retryable = True


@dataclass(frozen=True, slots=True)
class Admitted:
    """An operation that may go on. ``op_id``: the approval behind it, None at L0, where tokens name none.

    ``recorded``: how it went when it was carried out already; then it must not be done again and the caller is told this.
    """

    level: Level
    operation: Operation
    op_id: str | None
    signers: tuple[str, ...]
    recorded: dict[str, object] | None = None


class Gate:
    """Admits operations by token. ``runner_id``: the audience this box answers to. Times are Unix seconds."""

    def __init__(
        self,
        *,
        key_path: Path | None,
        level: Level,
        min_signers: int,
        runner_id: str,
        ledger: Ledger,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = KeyRing(key_path)
        self._reading = asyncio.Lock()
        self._level = level
        self._min_signers = min_signers
        self._runner_id = runner_id
        self._ledger = ledger
        self._clock = clock

    async def admit(
        self, token: object, *, operation: Operation, model_id: str | None, params: Mapping[str, object]
    ) -> Admitted:
        """Return the operation that ``token`` permits, with its nonce spent and, from L1 on, its approval booked.

        ``token``: what stands in ``verifiedOpToken``. ``params``: all members of the request body. Raises OperationsDisabled
        (no usable key), OpTokenRefused (one text for all reasons), OperationRunning, Unavailable (the ledger fails).
        """
        verifier = await self._make_verifier()
        try:
            signed = read_token(token)
            verified = verifier.verify(signed, operation=operation, model_id=model_id, params=params, now=self._clock())
            admitted = await self._book(verified, operation, model_id)
        except OpTokenError as error:
            log.warning("operation refused operation=%s reason=%s", operation, error.reason)
            raise OpTokenRefused(REFUSED) from None
        except LedgerError as error:
            log.error("operation refused, the ledger failed operation=%s error=%s", operation, error)  # noqa: TRY400
            raise Unavailable("The ledger of this box cannot be written, so no operation is carried out.") from None
        log.info(
            "operation admitted operation=%s level=%s op=%s signers=%s repeated=%s",
            operation, admitted.level, admitted.op_id, len(admitted.signers), admitted.recorded is not None,
        )  # fmt: skip
        return admitted

    async def finish(self, admitted: Admitted, outcome: dict[str, object]) -> None:
        """Record how an admitted operation went (plain JSON), for whoever comes with another token of the same approval.

        Raises LedgerError.
        """
        if admitted.op_id is not None and admitted.recorded is None:
            await self._ledger.finish_op(admitted.op_id, outcome)

    async def _make_verifier(self) -> Verifier:
        try:
            async with self._reading:
                keys = await asyncio.wait_for(asyncio.to_thread(self._keys.read), KEY_READ_S)
        except TimeoutError:
            raise Unavailable("The key file of this box cannot be read in time, so no operation is carried out.") from None
        return Verifier(
            level=self._level,
            min_signers=self._min_signers,
            runner_id=self._runner_id,
            keys=keys,
            # Rounded down since tokens carry whole seconds. No allowance for slow clocks: a token that was spent just before
            # the ledger was lost would fit into it.
            not_before=math.floor(self._ledger.born_at),
        )

    async def _book(self, verified: Verified, operation: Operation, model_id: str | None) -> Admitted:
        try:
            if not await self._ledger.spend_nonce(verified.nonce, expires_at=verified.expires_at):
                raise OpTokenError(Reason.REPLAYED)
            recorded = await self._begin(verified, model_id)
        except LedgerFull:
            raise OpTokenError(Reason.LEDGER_FULL) from None
        return Admitted(verified.level, operation, verified.op_id, verified.signers, recorded)

    async def _begin(self, verified: Verified, model_id: str | None) -> dict[str, object] | None:
        if verified.op_id is None or verified.fence is None:
            return None
        begun = await self._ledger.begin_op(
            verified.op_id,
            slot="cache" if model_id is None else f"model:{model_id}",
            fence=verified.fence,
            max_uses=verified.max_uses,
            expires_at=verified.expires_at,
        )
        match begun:
            case OpStarted():
                return None
            case OpAlreadyDone(outcome):
                return outcome
            case StaleFence():
                raise OpTokenError(Reason.STALE_FENCE)
            case OpIsRunning():
                raise OperationRunning("The operation of this token is being carried out; wait until it has ended.")
