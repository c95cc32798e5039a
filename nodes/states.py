"""Health of a node as a pure function of what is known about it, and of the limits that govern it.

Source: node and gateway contract v1, "Heartbeat Staleness Rules"; one table for every kind of link.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import NamedTuple

from core.limits import NodeLimits
from wire import clock
from wire.agent import METALYARD, METALYARD_RELAY
from wire.bridge import BRIDGE_V1, GpuInfo
from wire.contract import NodeMode, NodeStatus

POOL_RESPONSES = "/v1/pool/responses"
"""Where a node of ours answers llm-pool's form of /v1/responses, for any chat model."""
TOKENIZE = "/v1/tokenize"
"""API path on which a node says how many tokens a prompt has; for gateways, not for their clients."""
CONTINUATIONS = "/v1/pool/continuations"
"""API path on which a node goes on with the last message of a chat, the assistant's; for gateways, not for their clients."""
DECLARED_ENDPOINTS = frozenset({POOL_RESPONSES, CONTINUATIONS})
"""API paths on which only a node is asked that says it answers them."""

BINARY_ENDPOINTS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""API paths whose bodies hold a file; bridge v1 carries text alone."""


class Freshness(StrEnum):
    """How old the last sign of life is."""

    FRESH = "fresh"
    STALE = "stale"
    OFFLINE = "offline"


class Health(StrEnum):
    """Where the session of a node stands. Source: central-server document, section 1.3, which names no second heartbeat."""

    REGISTERING = "registering"
    """It registered, and was not heard since."""
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    """It missed a heartbeat: it gets nothing new."""
    FAILING = "failing"
    """It missed two: what runs there has slots on other nodes, as far as there are."""
    DEAD = "dead"
    """It missed three, and was given up."""
    DRAINING = "draining"
    OFFLINE = "offline"
    """It left, or says that it does."""


class Unavailable(StrEnum):
    """Why a node takes no new work, said of the node; the first that holds counts."""

    SILENT = "is offline"
    UNREACHABLE = "cannot be reached"
    PROVIDER_OFF = "belongs to a provider that is switched off"
    ERROR = "reports an error"
    DRAINED = "was drained"
    DRAINING = "is being drained"
    CORDONED = "is cordoned"
    TAKEN_BACK = "was taken back by its owner"
    HOLDS_BACK = "says itself that it takes no work"
    LATE = "is late with its heartbeats"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is known of a node at one moment. ``age_s``: of its last sign of life, None = there was none.

    ``unreachable``: why no gateway can send it a request, empty = one can. ``is_drained``: nothing runs on it any more.
    ``silence_before_s``: for how long it had been silent when its row was last written, which tells who left from who was lost.
    """

    age_s: float | None
    protocol: str
    reported: NodeStatus
    mode: NodeMode
    draining: bool
    cordoned: bool
    is_accepting_jobs: bool
    unreachable: str = ""
    is_enabled: bool = True
    is_drained: bool = False
    silence_before_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a node may get new work. ``status`` is what every list shows; ``unavailable`` None = it may."""

    status: NodeStatus
    freshness: Freshness
    unavailable: Unavailable | None
    health: Health


def judge_availability(facts: NodeFacts, policy: NodeLimits) -> Availability:
    """Return whether a node may get new work, and if not why. What it says of itself may be overridden."""
    windows = freshness_windows(policy, protocol=facts.protocol)
    freshness = windows.judge(facts.age_s)
    status = _judge_status(facts, freshness)
    return Availability(
        status, freshness, _find_reason(facts, freshness, status), _judge_health(facts, windows=windows, status=status)
    )


def judge_freshness(age_s: float | None, policy: NodeLimits, *, protocol: str) -> Freshness:
    """Return the freshness of a sign of life ``age_s`` seconds old (None = never seen)."""
    return freshness_windows(policy, protocol=protocol).judge(age_s)


def _judge_status(facts: NodeFacts, freshness: Freshness) -> NodeStatus:
    if facts.unreachable or freshness is Freshness.OFFLINE or facts.reported is NodeStatus.OFFLINE:
        return NodeStatus.OFFLINE
    if facts.reported is NodeStatus.ERROR:
        return NodeStatus.ERROR
    is_held_back = facts.draining or facts.cordoned or facts.mode is NodeMode.SPARE_OFF or not facts.is_accepting_jobs
    return NodeStatus.DRAINING if is_held_back else facts.reported


def _judge_health(facts: NodeFacts, *, windows: Windows, status: NodeStatus) -> Health:
    if facts.age_s is None:
        return Health.REGISTERING
    if facts.reported is NodeStatus.OFFLINE:
        return Health.DEAD if facts.silence_before_s >= windows.offline_s else Health.OFFLINE
    if facts.age_s >= windows.offline_s:
        return Health.DEAD
    if facts.age_s >= windows.failover_s:
        return Health.FAILING
    if facts.age_s >= windows.stale_s:
        return Health.SUSPECT
    return Health.DRAINING if status is NodeStatus.DRAINING else Health.HEALTHY


def _find_reason(facts: NodeFacts, freshness: Freshness, status: NodeStatus) -> Unavailable | None:
    is_heard = freshness is not Freshness.OFFLINE and facts.reported is not NodeStatus.OFFLINE
    reasons = {
        Unavailable.SILENT: not is_heard,
        Unavailable.UNREACHABLE: bool(facts.unreachable),
        Unavailable.PROVIDER_OFF: not facts.is_enabled,
        Unavailable.ERROR: status is NodeStatus.ERROR,
        Unavailable.DRAINED: facts.draining and facts.is_drained,
        Unavailable.DRAINING: facts.draining,
        Unavailable.CORDONED: facts.cordoned,
        Unavailable.TAKEN_BACK: facts.mode is NodeMode.SPARE_OFF,
        Unavailable.HOLDS_BACK: status is NodeStatus.DRAINING,
        Unavailable.LATE: freshness is not Freshness.FRESH,
    }
    return next((unavailable for unavailable, holds in reasons.items() if holds), None)


@dataclass(frozen=True, slots=True)
class Figures:
    """How a model does on a node, worked out of request records and never said by the node; None = not known.

    ``reliability``: the share of requests that end well, 0.0 to 1.0, older ones counting less. The others are medians:
    ``latency_ms`` of whole requests, ``ttft_ms`` to the first byte, ``tokens_per_s`` of the answer. A node that has not
    answered for the model yet has the median of those that have.
    """

    reliability: float = 0.5
    latency_ms: float | None = None
    ttft_ms: float | None = None
    tokens_per_s: float | None = None


class ProviderTerms(NamedTuple):
    """What a provider says of requests that wait for its models; None = as everywhere."""

    name: str
    max_queue: int | None = None
    queue_s: int | None = None
    no_node_s: int | None = None

    @property
    def is_special(self) -> bool:
        return self[1:] != (None, None, None)


_NO_TERMS = ProviderTerms("")


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node as read from the database for routing. Moments are clock.monotonic() seconds, told by the database's clock."""

    node_id: uuid.UUID
    name: str
    provider: str
    provider_state: str
    is_direct: bool
    public_base_url: str
    model_names: tuple[str, ...]
    max_concurrent: int
    mode: str
    cordoned: bool
    draining: bool
    drain_reason: str
    drain_deadline_at: float | None
    draining_since: datetime | None
    """Names the drain or reclaim in force; None = none is."""
    epoch: int
    instance_id: str
    heard_at: float | None
    reported_status: str
    is_accepting_jobs: bool
    active_requests: int
    connected: bool
    gateway_id: uuid.UUID | None
    unreachable: str
    """Why no gateway can reach it; empty = one can."""
    endpoints: Mapping[str, frozenset[str]]
    """API paths by model; a model that is not in it answers any."""
    protocol: str
    """What its last session spoke; empty = REST heartbeats."""
    contexts: Mapping[str, int] = field(default_factory=dict)
    """Tokens that one request may have, by model, as far as the node says."""
    engines: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Names of the engines that serve a model, as far as the node says."""
    figures: Mapping[str, Figures] = field(default_factory=dict)
    """By model; one that is not in it was served by no node yet."""
    agent_session: uuid.UUID | None = None
    """The session of its agent, if one registered it."""
    api_key: str = field(default="", repr=False)
    """What calls of its URL authenticate with; empty = nothing."""
    ticket_url: str = ""
    """Where clients reach it with a ticket; empty = nowhere, or not as the operator wants it."""
    gpus: tuple[GpuInfo, ...] = ()
    """Of a node that is called over HTTP, as it said last."""
    silence_before_s: float = 0.0
    """For how long it had been silent when its row was last written."""
    excluded: frozenset[str] = frozenset()
    """Models that it is sent no requests for, as none of its GPUs can run them by their documents."""
    terms: ProviderTerms = _NO_TERMS
    allowed_by: str = ""
    """Name of its credential, where that allows what its nodes declare; empty = each model waits for an operator."""

    @property
    def carries_bytes(self) -> bool:
        """Whether a body that is no text can travel to it."""
        return self.protocol != BRIDGE_V1

    @property
    def heartbeat_age_s(self) -> float | None:
        """For how many seconds nothing was heard of the node; None = never anything."""
        return None if self.heard_at is None else clock.monotonic() - self.heard_at

    @property
    def drain_remaining_s(self) -> float | None:
        """In how many seconds work that still runs there ends; None = never."""
        return None if self.drain_deadline_at is None else self.drain_deadline_at - clock.monotonic()


@dataclass(frozen=True, slots=True)
class DrainCount:
    """Requests that a gateway runs on a draining node, and which drain it knows of (``Node.draining_since``)."""

    node_id: uuid.UUID
    draining_since: datetime
    active: int


class Windows(NamedTuple):
    """After how many seconds of silence a node gets nothing new, its requests get slots elsewhere, and it is given up.

    These belong to the protocol of its session. Whoever asks whether a node is there asks ``freshness_windows`` for them.
    """

    stale_s: float
    failover_s: float
    offline_s: float

    def judge(self, age_s: float | None) -> Freshness:
        """Return the freshness of a sign of life ``age_s`` seconds old (None = never seen)."""
        if age_s is None or age_s >= self.offline_s:
            return Freshness.OFFLINE
        return Freshness.STALE if age_s >= self.stale_s else Freshness.FRESH


def freshness_windows(policy: NodeLimits, *, protocol: str) -> Windows:
    """Return the windows of a node that speaks ``protocol`` (empty = REST heartbeats)."""
    if protocol == BRIDGE_V1:  # it gives a sign of life only when pinged
        unanswered_s = min(2 * policy.bridge_ping_interval_s, policy.bridge_pong_window_s)
        return Windows(unanswered_s, unanswered_s, policy.bridge_pong_window_s)
    if protocol in (METALYARD, METALYARD_RELAY):  # one missed heartbeat, two, three
        beat_s, late_s = policy.agent_heartbeat_s, policy.agent_late_s
        return Windows(beat_s + late_s, 2 * beat_s + late_s, 3 * beat_s + late_s)
    # By the contract's table a node is late once its second heartbeat is due.
    second_s = max(policy.stale_after_s, 2 * policy.heartbeat_interval_s)
    return Windows(policy.stale_after_s, min(second_s, policy.offline_after_s), policy.offline_after_s)
