"""The two state machines of an operation: its approval, and each carrying out of it. Tables; what is absent is refused.

And how urgent an alert is.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum


class ApprovalState(StrEnum):
    """Where the approval of an operation stands. All but ``pending`` and ``approved`` are final."""

    PENDING = "pending"
    APPROVED = "approved"
    REJECTED = "rejected"
    EXPIRED = "expired"
    CANCELLED = "cancelled"
    BLOCKED = "blocked"
    """The policy changed while it was pending; it is asked for again under the new one."""


class ApprovalEvent(StrEnum):
    """What happens to an approval."""

    MEET = "meet"
    FALL_SHORT = "fall_short"
    """An approval was withdrawn before anything was dispatched."""
    REJECT = "reject"
    EXPIRE = "expire"
    CANCEL = "cancel"
    BLOCK = "block"


class RunState(StrEnum):
    """Where one carrying out stands."""

    QUEUED = "queued"
    DISPATCHED = "dispatched"
    EXECUTING = "executing"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    UNKNOWN = "unknown"
    """The node was cut off while it worked; what it has now decides."""
    RESOLVED = "resolved"
    """It had been unknown; what the node really has was looked up and is in the message."""
    SKIPPED = "skipped"
    """Never begun: an earlier one of the batch failed, or the operation ended before."""


class RunEvent(StrEnum):
    """What happens to a carrying out."""

    DISPATCH = "dispatch"
    REQUEUE = "requeue"
    """The node never heard of it: it is sent again."""
    PROGRESS = "progress"
    SUCCEED = "succeed"
    FAIL = "fail"
    LOSE = "lose"
    RESOLVE = "resolve"
    SKIP = "skip"


class IllegalTransition(Exception):
    """The event does not happen in that state."""


_A, _E = ApprovalState, ApprovalEvent
APPROVALS: dict[tuple[ApprovalState, ApprovalEvent], ApprovalState] = {
    (_A.PENDING, _E.MEET): _A.APPROVED,
    (_A.APPROVED, _E.FALL_SHORT): _A.PENDING,
    (_A.PENDING, _E.REJECT): _A.REJECTED,
    (_A.PENDING, _E.EXPIRE): _A.EXPIRED,
    (_A.APPROVED, _E.EXPIRE): _A.EXPIRED,
    (_A.PENDING, _E.CANCEL): _A.CANCELLED,
    (_A.APPROVED, _E.CANCEL): _A.CANCELLED,
    (_A.PENDING, _E.BLOCK): _A.BLOCKED,
    (_A.APPROVED, _E.BLOCK): _A.BLOCKED,
}

_R, _V = RunState, RunEvent
RUNS: dict[tuple[RunState, RunEvent], RunState] = {
    (_R.QUEUED, _V.DISPATCH): _R.DISPATCHED,
    (_R.QUEUED, _V.SUCCEED): _R.SUCCEEDED,
    (_R.QUEUED, _V.FAIL): _R.FAILED,
    (_R.QUEUED, _V.SKIP): _R.SKIPPED,
    (_R.DISPATCHED, _V.REQUEUE): _R.QUEUED,
    (_R.EXECUTING, _V.REQUEUE): _R.QUEUED,  # it said so before its gate refused
    (_R.DISPATCHED, _V.PROGRESS): _R.EXECUTING,
    (_R.DISPATCHED, _V.SUCCEED): _R.SUCCEEDED,
    (_R.DISPATCHED, _V.FAIL): _R.FAILED,
    (_R.DISPATCHED, _V.LOSE): _R.UNKNOWN,
    (_R.EXECUTING, _V.PROGRESS): _R.EXECUTING,
    (_R.EXECUTING, _V.SUCCEED): _R.SUCCEEDED,
    (_R.EXECUTING, _V.FAIL): _R.FAILED,
    (_R.EXECUTING, _V.LOSE): _R.UNKNOWN,
    (_R.UNKNOWN, _V.SUCCEED): _R.SUCCEEDED,
    (_R.UNKNOWN, _V.FAIL): _R.FAILED,
    (_R.UNKNOWN, _V.RESOLVE): _R.RESOLVED,
}

OPEN_RUNS = frozenset({_R.QUEUED, _R.DISPATCHED, _R.EXECUTING, _R.UNKNOWN})
FINAL_RUNS = frozenset(RunState) - OPEN_RUNS
FINAL_APPROVALS = frozenset({_A.REJECTED, _A.EXPIRED, _A.CANCELLED, _A.BLOCKED})


def next_run(state: RunState, event: RunEvent) -> RunState:
    """Return the state after ``event``. Raises IllegalTransition."""
    found = RUNS.get((state, event))
    if found is None:
        raise IllegalTransition(f"{event} does not happen to a run that is {state}")
    return found


def sources_of(event: RunEvent) -> list[RunState]:
    """Return the states in which ``event`` may happen, for compare-and-set."""
    return [state for state, other in RUNS if other is event]


class Severity(IntEnum):
    """How urgent an alert is; the lower the sooner."""

    DOWN = 0
    """Requests or operations fail because of it."""
    IMPAIRED = 1
    """Something works less well, or is at risk."""
    NOTICE = 2
    """It will fail, or cannot be used, unless somebody acts."""

    @property
    def word(self) -> str:
        """The name in the API, in metrics and in messages."""
        return self.name.lower()
