"""The values that go into the ledger and come out of it. Times are Unix seconds, money is in millionths of a unit."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class TaskState(StrEnum):
    """Where a load task stands; all but ``loading`` are final."""

    LOADING = "loading"
    COMPLETED = "completed"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    """The program ended while the task ran."""


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One load. ``fraction``: share done, 0.0 to 1.0, None = cannot be told. ``result``: plain JSON, what callers are shown."""

    task_id: str
    model_id: str
    state: TaskState
    stage: str
    fraction: float | None
    started_at: float
    finished_at: float | None = None
    error: str | None = None
    result: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OpStarted:
    """The operation may be carried out now; say with ``finish_op`` how it went."""


@dataclass(frozen=True, slots=True)
class OpIsRunning:
    """The operation was begun before and has not ended."""


@dataclass(frozen=True, slots=True)
class OpAlreadyDone:
    """The operation was carried out as often as its approval allows; this is how it went."""

    outcome: dict[str, object]


@dataclass(frozen=True, slots=True)
class StaleFence:
    """A later operation has been accepted for the same slot, so this one would undo it."""


OpStart = OpStarted | OpIsRunning | OpAlreadyDone | StaleFence


class CostState(StrEnum):
    """What became of a reservation, and with that what it takes from the monthly cap."""

    RESERVED = "reserved"
    """The request is on its way; counts the reserved amount."""
    SETTLED = "settled"
    """Answered with its usage; counts the amount it really cost, be it more or less."""
    RELEASED = "released"
    """Given back by us before it cost anything; counts nothing."""
    FAILED_BEFORE_SUBMIT = "failed_before_submit"
    """Never reached the provider; counts nothing."""
    FAILED_AFTER_SUBMIT = "failed_after_submit"
    """Broke off when the provider had it; counts the amount the caller knows of, else the reserved one."""
    FAILED_USAGE_UNKNOWN = "failed_usage_unknown"
    """Answered or broke off, and the provider named no usage; counts the reserved amount."""
    ABANDONED = "abandoned"
    """The program ended meanwhile; counts the reserved amount, since it may have been billed."""


@dataclass(frozen=True, slots=True)
class CostRow:
    """One request to a paid provider. ``month``: ``YYYY-MM``. ``counted_micros``: what it takes from the cap as it stands."""

    cost_id: str
    tenant: str
    model_id: str
    month: str
    state: CostState
    reserved_micros: int
    counted_micros: int
    created_at: float
    settled_at: float | None
