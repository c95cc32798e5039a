"""Plain values of the gateway: what a caller is and what a request asks for. No I/O."""

from __future__ import annotations

import numbers
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from core.limits import GatewayLimits
from wire.contract import RequestState

Header = tuple[bytes, bytes]
CHAT_PATH = "/v1/chat/completions"
"""The API path to whose requests those of other dialects are translated."""
BUDGETS_KEY = "{muster.budgets}"
"""Of the epoch in Valkey, and the beginning of each counter's; in braces, so that a cluster keeps them together."""
TICKETS_PATH = "/v1/tickets"
"""Where a ticket is asked for. The record of its request names this endpoint."""
T = TypeVar("T")


class HeaderView(Mapping[str, str]):
    """The request's headers by lower-case name, decoded when asked for. Of a repeated header the last one counts.

    Clients send the same headers with every request: what was worked out of them once is kept with them (``derive``).
    """

    __slots__ = ("_derived", "_raw")

    def __init__(self, raw: Iterable[Header]) -> None:
        self._raw = dict(raw)
        self._derived: dict[str, Any] = {}

    def __getitem__(self, name: str) -> str:
        return self._raw[name.encode("latin-1")].decode("latin-1")

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.encode("latin-1") in self._raw

    def __iter__(self) -> Iterator[str]:
        return (name.decode("latin-1") for name in self._raw)

    def __len__(self) -> int:
        return len(self._raw)

    def derive(self, name: str, work: Callable[[Mapping[str, str]], T]) -> T:
        """Return ``work(self)``, which is done once for each ``name``; whoever gets it does not change it."""
        found: T | None = self._derived.get(name)
        if found is None:
            found = self._derived[name] = work(self)
        return found


def derive(headers: Mapping[str, str], name: str, work: Callable[[Mapping[str, str]], T]) -> T:
    return headers.derive(name, work) if isinstance(headers, HeaderView) else work(headers)


class Priority(StrEnum):
    """How a node orders what waits on it."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class RequestOutcome(StrEnum):
    """What became of a request, in the words of pages and metrics."""

    SERVED = "served"
    REFUSED = "refused"
    """The caller's mistake: counted apart, in no error rate and no alert."""
    FAILED = "failed"
    """A fault of the node, its engine or the gateway, or a lack of capacity."""
    CANCELLED = "cancelled"
    """The caller left."""


_OUTCOMES = {
    RequestState.COMPLETED: RequestOutcome.SERVED,
    RequestState.FAILED: RequestOutcome.FAILED,
    RequestState.INTERRUPTED: RequestOutcome.FAILED,
    RequestState.CANCELLED: RequestOutcome.CANCELLED,
}


def judge_outcome(state: RequestState, status_code: int | None) -> RequestOutcome | None:
    """Return what became of a request, None while it is open. ``status_code``: the HTTP status that its caller got.

    A rejected request with a 4xx is the caller's mistake, its own limit (429) included. With a 5xx nobody could take it:
    a full queue, or a database that is away.
    """
    if state is RequestState.REJECTED:
        is_callers = status_code is not None and 400 <= status_code < 500
        return RequestOutcome.REFUSED if is_callers else RequestOutcome.FAILED
    return _OUTCOMES.get(state)


class Dimension(IntEnum):
    """What requests are summed up by, and so what the name of a sum is; stored as a number."""

    ALL = 0
    """No name."""
    MODEL = 1
    """The model that answered, or would have; no name = one that is not known here, as clients can ask for anything."""
    NODE = 2
    """The id of the node."""
    TENANT = 3
    KEY = 4
    """The id of the API key; of days alone, as the next one."""
    TENANT_MODEL = 5
    """The tenant, a new line, and the model."""


class BudgetKind(StrEnum):
    """What all gateways together let a key or a tenant use: limits, of now or a minute, and budgets, of a UTC day or month."""

    ALL_REQUESTS_PER_MINUTE = "all_requests_per_minute"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    CONCURRENT_REQUESTS = "concurrent_requests"
    TOKENS_PER_DAY = "tokens_per_day"
    TOKENS_PER_MONTH = "tokens_per_month"
    COST_PER_DAY = "cost_per_day"
    COST_PER_MONTH = "cost_per_month"

    @property
    def is_cost(self) -> bool:
        return self in (BudgetKind.COST_PER_DAY, BudgetKind.COST_PER_MONTH)

    @property
    def is_budget(self) -> bool:
        """Whether it is for a day or a month, so that it can be soft; every other one is a limit, and hard."""
        return self.is_cost or self in (BudgetKind.TOKENS_PER_DAY, BudgetKind.TOKENS_PER_MONTH)


class Budget(msgspec.Struct, frozen=True):
    """``amount``: requests, tokens, or millionths of the currency. A soft one refuses nothing; its use is told of."""

    kind: BudgetKind
    amount: int
    is_hard: bool = True


@dataclass(frozen=True, slots=True)
class OwnedBudget:
    """A hard budget that a request draws on. ``owner``: ``key:<id>`` or ``tenant:<name>``, ``label``: the same for people."""

    owner: str
    label: str
    budget: Budget


@dataclass(frozen=True, slots=True)
class Window:
    """When a counter counts: a UTC day or month. ``name`` is part of its name, empty for limits of now or of a minute."""

    name: str = ""
    starts_at: datetime | None = None
    ends_at: datetime | None = None


def find_window(kind: BudgetKind, now: datetime) -> Window:
    """Return the UTC day or month that ``now`` is in, where the kind has one."""
    if not kind.is_budget:
        return Window()
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if kind in (BudgetKind.TOKENS_PER_DAY, BudgetKind.COST_PER_DAY):
        return Window(f"{day:%Y-%m-%d}", day, day + timedelta(days=1))
    first = day.replace(day=1)
    return Window(f"{first:%Y-%m}", first, (first + timedelta(days=31)).replace(day=1))


@dataclass(frozen=True, slots=True)
class Counter:
    """One limit or budget of an owner (``key:<id>`` or ``tenant:<name>``)."""

    owner: str
    kind: BudgetKind
    window: Window

    @property
    def key(self) -> str:
        """Its name with whoever deals it out."""
        return f"{BUDGETS_KEY}:{self.owner}:{self.kind}:{self.window.name}"


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million tokens, in millionths of the currency."""

    input: int = 0
    cached: int = 0
    output: int = 0

    def cost(self, *, prompt_tokens: int, cached_tokens: int = 0, completion_tokens: int) -> int:
        """Return millionths of the currency, rounded up."""
        cached = min(cached_tokens, prompt_tokens)
        total = (prompt_tokens - cached) * self.input + cached * self.cached + completion_tokens * self.output
        return -(-total // MILLION)


MILLION = 10**6


class Weights(msgspec.Struct, frozen=True):
    """How much each part of a node's score counts, from 0 to 1."""

    load: float
    active: float
    latency: float
    reliability: float
    affinity: float

    @classmethod
    def make(cls, limits: GatewayLimits, own: Mapping[str, float]) -> Weights:
        """Return those of a model, or of all: the ones it has of its own, the others as they are set here."""
        return cls(**{name: own.get(name, getattr(limits, f"score_{name}")) for name in cls.__struct_fields__})

    @property
    def thousandths(self) -> tuple[int, ...]:
        return tuple(round(1000 * weight) for weight in msgspec.structs.astuple(self))


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client. ``allowed_models`` empty means every allow-listed model.

    ``stores_responses``, ``responses_kept_days``: whether and how long its tenant lets answers of /v1/responses be kept.
    """

    key_id: uuid.UUID
    key_name: str
    tenant: str
    requests_per_minute: int
    allowed_models: frozenset[str]
    priority: Priority = Priority.NORMAL
    stores_responses: bool = False
    responses_kept_days: int = 30
    budgets: tuple[OwnedBudget, ...] = ()
    """The hard ones of the key and of its tenant."""
    weight: float = 1.0
    """Of its tenant, in the share of slots while requests wait."""


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``x_pool_options``: what an aware client may ask of the pool (central-server design, section 3.1).

    ``prefer_gpu``: name or id of a node or a GPU, preferred, not required. ``max_latency_ms``: longest wait for a node.
    ``priority`` can only lower what the key has; ``fallback_models`` are tried in their order. ``resume``: whether another node
    goes on with a stream whose node dies; None = as the model's setting says.
    """

    prefer_gpu: str | None = None
    max_latency_ms: WholeNumber | None = None
    fallback_models: tuple[str, ...] = ()
    priority: Priority | None = None
    resume: bool | None = None


class Unmatched(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a client named in ``x_pool_options`` that is nothing here: the name of no node or GPU, of no model for this key.

    ``resume``: why the answer could not have gone on at another node.
    """

    prefer_gpu: str = ""
    fallback_models: tuple[str, ...] = ()
    resume: str = ""


class Compared(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A node that a request could have gone to, and the parts of its score in thousandths (``Decided``)."""

    node: str
    load: int
    active: int
    latency: int
    reliability: int
    affinity: int

    @property
    def parts(self) -> tuple[int, int, int, int, int]:
        return self.load, self.active, self.latency, self.reliability, self.affinity


class Decided(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Why a request went to its node, where it had a choice; kept with its record.

    ``reason``: ``score``, ``affinity``, ``least_load`` (nothing else was known), ``preferred`` (the caller named the node),
    ``only_free``, or ``waited`` (the first slot that became free). ``candidates``: the best of what was compared, by score;
    ``chosen``: the place of the node among them. ``weights``: of the parts, in thousandths.

    ``session_by``: what said which session it was, ``session_node``: the node that the session had used last. ``prefix``: how
    much of the prompt the node had been sent before, in thousandths. ``tier``, ``position``, ``estimate_ms``: of its wait, as
    it began; empty and 0 where it did not wait.
    """

    reason: str
    candidates: tuple[Compared, ...] = ()
    chosen: int = 0
    weights: tuple[int, ...] = ()
    session_by: str = ""
    session_node: str = ""
    prefix: int = 0
    tier: str = ""
    position: int = 0
    estimate_ms: int = 0


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway reads of a request body; the body itself travels on untouched unless it is translated.

    ``endpoint``: the surface the client speaks. ``paths``: the API paths on which a node may be asked, best first; on another
    one than the endpoint the request is translated. ``options`` None: the client sent no ``x_pool_options``. ``store`` and
    ``previous_response_id`` are of /v1/responses alone.
    """

    endpoint: str
    model: str
    is_streaming: bool = False
    max_tokens: int | None = None
    prompt_chars: int = 0
    body: bytes = b""
    headers: dict[str, str] = {}
    max_tokens_field: str = "max_tokens"
    paths: tuple[str, ...]
    options: PoolOptions | None = None
    store: bool | None = None
    previous_response_id: str = ""
    is_pool_shaped: bool = False
    """Whether it uses fields that only llm-pool's form of /v1/responses has."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """An allow-list row with its caps resolved against the settings.

    ``fallbacks``: names of models, in their order. ``context_tokens`` None = what nodes say; ``tokenizer`` empty = none here.
    """

    name: str
    allowed: bool
    owned_by: str
    max_tokens: int
    max_prompt_chars: int
    max_queue: int
    created: int
    fallbacks: tuple[str, ...] = ()
    context_tokens: int | None = None
    tokenizer: str = ""
    tidy: bool = False
    refused: bool = False
    """Whether an operator took it back, so that no credential allows it."""
    """Whether chunks of its chat streams are put right for strict clients."""
    resumes: bool = False
    """Whether another node goes on with a stream whose node dies, where the client does not say."""
    canary_question: str = ""
    """What its nodes are asked now and then; empty = nothing."""
    canary_answer: str = ""
    version: int = field(default=0, compare=False)
    """Another one whenever the row is written."""
    price: Price = Price()
    weights: Weights | None = None
    """Of the parts of its nodes' scores; None = as everywhere."""


if TYPE_CHECKING:
    WholeNumber: TypeAlias = int
else:
    # What msgspec does not know it asks a hook for. Every int is an instance of this, so the values stay plain.
    WholeNumber = numbers.Integral


def read_whole_number(kind: type[Any], value: Any) -> Any:  # Any: msgspec's hook, called with whatever stood in the JSON
    """Return a number for a field of the type ``WholeNumber``; the ``dec_hook`` of a decoder. Raises ValueError."""
    if kind is object:  # unlike Any, it is asked for too
        return value
    if kind is not WholeNumber:
        raise NotImplementedError(kind)
    if type(value) is int:
        return value
    if type(value) is float and value.is_integer():
        return int(value)
    raise ValueError(f"Expected `int`, got `{type(value).__name__}`")


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One row of ``gateway_requestrecord``; field names are column names. Set ``state`` last: it is what makes it final."""

    id: uuid.UUID
    created_at: datetime
    gateway_id: uuid.UUID
    tenant: str
    key_id: uuid.UUID
    key_name: str
    endpoint: str
    model: str
    is_streaming: bool
    state: RequestState = RequestState.QUEUED
    error_code: str | None = None
    status_code: int | None = None
    node_id: uuid.UUID | None = None
    node_name: str = ""
    attempts: int = 0
    max_tokens: int | None = None
    prompt_tokens_est: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Of the prompt, those that the node had cached."""
    tokens_estimated: bool = False
    bytes_out: int = 0
    queue_ms: int | None = None
    ttfb_ms: int | None = None
    latency_ms: int | None = None
    finished_at: datetime | None = None
    engine_error: str = ""
    """What the engine said when it failed or refused (``wire.engine_errors.quote_message``)."""
    lost_attempts: str = ""
    """A line for each node that failed before another one got the request: its id in hex, the model, and behind a tab each the
    milliseconds since the record was made, and why (``RetryReason``).
    """
    asked_model: str = ""
    """What the client asked for, where ``model`` (which answers) has another name."""
    reserved_tokens: int | None = None
    reserved_micros: int | None = None
    decision: Decided | None = None
    """Why it went to its node, where it had a choice."""
