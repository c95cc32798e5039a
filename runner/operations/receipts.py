"""What this box signs about an operation: how it ended, what was approved, and the result by its digest."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from runner.operations.keys import Identity
from wire.optoken.receipt import Outcome, Receipt, ReceiptError, digest_result, sign_receipt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Booked:
    """The operation that a receipt is about, as the ledger has it. ``op_key`` tells it from all others; see ``Receipt``."""

    op_key: str
    op_id: str
    use: int
    operation: str
    statement_digest: str
    fence: int
    checkpoint: str
    begun_at: float


class Clerk:
    """Signs receipts; without an identity there are none."""

    def __init__(self, identity: Identity | None) -> None:
        self._identity = identity

    @property
    def identity(self) -> Identity | None:
        """Whose key it is; None without a data folder."""
        return self._identity

    def sign(self, booked: Booked, outcome: Outcome, result: Mapping[str, object], *, ended_at: float) -> str:
        """Return the receipt, "" when there can be none. The result has to be plain JSON. ``ended_at``: Unix seconds."""
        if self._identity is None:
            return ""
        try:
            return sign_receipt(
                self._identity.private_key,
                Receipt(
                    op_id=booked.op_id,
                    use=booked.use,
                    statement_digest=booked.statement_digest,
                    runner_id=self._identity.certified_id,
                    operation=booked.operation,
                    outcome=outcome,
                    result_digest=digest_result(result),
                    fence=booked.fence,
                    started_at=int(booked.begun_at),
                    ended_at=int(ended_at),
                    checkpoint=booked.checkpoint,
                ),
            )
        except (ReceiptError, ValueError) as error:
            # It was done all the same, and must be recorded.
            log.error("operation has no receipt op=%s error=%s", booked.op_key, error)  # noqa: TRY400
            return ""
