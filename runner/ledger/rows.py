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
class OpDetails:
    """What is written down of an operation beside its order, and how many of its kind the box takes.

    ``approval_id`` and ``use``: which use of which approval it is. ``statement_digest``: of what people signed, hex, "" below
    L2. ``checkpoint``: of the audit log, as the token named it. ``most_per_hour``: operations of all kinds that may begin
    within an hour; ``most_per_day``: those of ``op_class`` within 24 h; None = no limit. ``other_slots``: what it changes
    beside its own slot, which must not overtake it either. ``ends``: the model that it unloads and that is no longer desired
    then, None = none. ``adds_desired``: it needs room for one more desired model.
    """

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
class OpRow:
    """An operation that was begun. ``outcome``: how it went (plain JSON), None while it runs. Times are Unix seconds."""

    op_key: str
    operation: str
    model_id: str | None
    approval_id: str
    use: int
    fence: int
    statement_digest: str
    checkpoint: str
    outcome: dict[str, object] | None
    begun_at: float
    ended_at: float | None
    receipt: str


@dataclass(frozen=True, slots=True)
class PolicyRow:
    """A policy that this box took over, with what made it valid. ``proofs``: as they came, plain JSON."""

    version: int
    document: bytes
    statement: bytes
    proofs: list[object]


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
    receipt: str = ""


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
