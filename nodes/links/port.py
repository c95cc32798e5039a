"""The port every link implements, and the base that counts slots the same way for all of them.

Everything here runs on the event loop thread and calls back synchronously: a chunk goes from the socket that brought
it to the client's socket without a task switch.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import msgspec

from core.limits import limits
from nodes.session import OpenRequest
from nodes.states import BINARY_ENDPOINTS, DECLARED_ENDPOINTS, freshness_windows
from wire import clock
from wire.bridge import CANCEL_WORKER_DISCONNECT, GpuInfo
from wire.frames import End
from wire.ids import format_id

if TYPE_CHECKING:
    from nodes.links.ejections import Standing


class EndKind(StrEnum):
    """How a stream ended, as the relay has to treat it."""

    COMPLETE = "complete"
    ENGINE_FAILED = "engine_failed"
    LINK_LOST = "link_lost"
    BUSY = "busy"
    RECLAIMED = "reclaimed"
    TIMEOUT = "timeout"


class LinkEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a stream. ``retryable``: no part of an answer left the node, another node may try.

    ``retry_after_s``: of a busy end, when the node itself wants to be asked again; None = it does not say.
    """

    kind: EndKind
    message: str = ""
    retryable: bool = False
    retry_after_s: float | None = None
    detail: End | None = None


class Sink(Protocol):
    """Receives what a stream brings. Calls come in order and never after ``on_end`` or ``Stream.cancel``."""

    __slots__ = ()

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Status and headers (names in lower case) of the response. Others may share the headers: nobody changes them."""

    def on_data(self, data: bytes) -> None:
        """The next bytes of the response body."""

    def on_end(self, end: LinkEnd) -> None:
        """The stream is over; called exactly once unless it was cancelled."""

    def on_whole(self, status: int, headers: dict[str, str], body: bytes, end: LinkEnd) -> None:
        """Take an answer that came in one piece: all that the other calls say."""
        self.on_head(status, headers)
        if body:
            self.on_data(body)
        self.on_end(end)


class Stream(Protocol):
    """One open request on a link."""

    sink: Sink
    """Who is called; another one may take over."""

    def cancel(self, reason: str) -> None:
        """Stop it. Idempotent, at once, and no sink call follows."""

    def grant(self, amount: int) -> None:
        """The client took ``amount`` more bytes; the node may send as many."""


class Figures(Protocol):
    """How well a replica answers, from what was measured of it; None = not known yet."""

    @property
    def reliability(self) -> float | None:
        """Share of the requests that it answers, from 0 to 1."""

    @property
    def latency_ms(self) -> float | None:
        """How long it takes for an answer."""


class LinkCondition(StrEnum):
    """Whether a node may get new work now, and if not, why not."""

    READY = "ready"
    STALE = "stale"
    DRAINING = "draining"
    BUSY = "busy"
    """It says that its slots are taken, by more than what is sent from here."""
    UNHEALTHY = "unhealthy"
    DISABLED = "disabled"


_READY = LinkCondition.READY  # a member takes ten times as long to look up


@dataclass(slots=True)
class NodePolicy:
    """What operators and the owner decided about a node, as last read from its row."""

    provider: str = ""
    provider_enabled: bool = True
    cordoned: bool = False
    draining: bool = False
    reclaimed: bool = False
    drain_deadline_at: float | None = None
    """Wall-clock seconds at which in-flight work ends as interrupted."""


class Link:
    """One way to one node. Subclasses open streams; slots, load and condition are counted here.

    ``active`` is what this gateway runs on it. ``external_load`` is what the node says it runs beyond that: it orders the
    choice.
    """

    # Each request reads some fifty of them: of more than 30 without slots each one is looked up in a dictionary.
    __slots__ = (
        "__weakref__", "_declared_slots", "active", "busy_elsewhere", "busy_until", "carries_bytes", "closed", "contexts",
        "drain_then_close", "endpoints", "engines", "excluded", "external_load", "figures", "is_peer", "last_seen",
        "last_served", "max_concurrent", "models", "node_draining", "node_id", "node_name", "policy", "ramp_until",
        "released_at", "replicas", "reports_usage", "standings", "ticket_url", "unhealthy_reason", "unspoken", "windows",
    )  # fmt: skip

    def __init__(self, *, node_id: uuid.UUID, node_name: str, models: frozenset[str], max_concurrent: int) -> None:
        self.node_id = node_id
        self.node_name = node_name
        self.models = models
        self.excluded: frozenset[str] = frozenset()
        """Models that it is sent no requests for, as none of its GPUs can run them by their documents."""
        self.endpoints: Mapping[str, frozenset[str]] = {}
        """API paths by model; a model that is not in it answers any client's."""
        self.unspoken: dict[tuple[str, str], float] = {}
        """Models and API paths that the engine turned out not to know, and until when (clock.monotonic()) that is believed."""
        self.contexts: Mapping[str, int] = {}
        """Tokens that one request may have, by model, as far as the node says."""
        self.engines: Mapping[str, frozenset[str]] = {}
        """Names of the engines that serve a model, as far as the node says."""
        self.carries_bytes = True
        """Whether a body that is no text can travel to the node."""
        self.max_concurrent = max_concurrent
        self._declared_slots = max_concurrent
        self.ramp_until = 0.0
        """clock.monotonic() seconds until which a node that came back gets few requests at a time; 0 = as many as it takes."""
        self.active = 0
        self.external_load = 0
        self.last_served = 0
        self.policy = NodePolicy()
        self.node_draining = False
        self.busy_elsewhere = False
        """Whether the node says that its slots are taken, while this gateway holds some of them or none."""
        self.released_at = 0.0
        """clock.awake() seconds at which the last request from here ended."""
        self.unhealthy_reason = ""
        self.busy_until = 0.0
        self.last_seen = clock.awake()
        self.windows = freshness_windows(limits().nodes, protocol="")
        """After how much silence it gets nothing new, its requests get slots elsewhere, and it is given up."""
        self.reports_usage = False
        self.standings: dict[str, Standing] = {}
        """What ``Ejections`` remembers of its replicas, by model."""
        self.figures: Mapping[str, Figures] = {}
        """How well its replicas answer, by model, as the rows say it; what is not there this gateway measures itself."""
        self.replicas: dict[str, int] = {}
        """Numbers of its replicas, by model, for whoever remembers what they computed; another number has computed nothing."""
        self.is_peer = False
        """Whether another gateway, which may be lost itself, stands between this one and the node."""
        self.ticket_url = ""
        """Where clients reach the node with a ticket; empty = nowhere."""
        self.drain_then_close = False
        """Whether the node was told to leave once nothing runs on it."""
        self.closed = False

    @property
    def gpus(self) -> Sequence[GpuInfo]:
        """The GPUs of the node as it said last; none where it gives no telemetry."""
        return ()

    @property
    def load(self) -> int:
        """Requests known to run on the node."""
        return self.active + self.external_load

    def answers(self, model: str, endpoint: str) -> bool:
        """Whether the node may be sent a request for this model on this API path as it is."""
        if endpoint in BINARY_ENDPOINTS and not self.carries_bytes:
            return False
        if model not in self.models or model in self.excluded:
            return False
        if self.unspoken and self.unspoken.get((model, endpoint), 0.0) > clock.monotonic():
            return False
        paths = self.endpoints.get(model)
        return endpoint not in DECLARED_ENDPOINTS if paths is None else endpoint in paths

    def find_path(self, model: str, paths: Sequence[str]) -> str | None:
        """Return the first of some API paths on which the node can be asked for the model."""
        for path in paths:
            if self.answers(model, path):
                return path
        return None

    def context_of(self, model: str) -> int | None:
        """Return the tokens that a request for the model may have, prompt and answer, on any replica; None = not known."""
        return self.contexts.get(model)

    @property
    def has_clear_line(self) -> bool:
        """Whether what is sent to the node now will reach it soon."""
        return True

    def is_called(self, name: str) -> bool:
        """Whether a client that prefers a node or GPU by this name means this node."""
        return name in (self.node_name, format_id("node", self.node_id))

    def has_slot(self) -> bool:
        """Whether one more request fits by our own count."""
        return self.active < self.max_concurrent

    @property
    def silence_s(self) -> float:
        """For how long nothing was heard of the node."""
        return clock.awake() - self.last_seen

    def declare_slots(self, slots: int) -> None:
        """Take how many requests the node takes at a time; while it ramps up it gets no more than it had."""
        self._declared_slots = slots
        self.max_concurrent = min(self.max_concurrent, slots) if self.ramp_until else slots

    def begin_ramp(self, until: float) -> None:
        """Send a node that came back one request at a time; each that it answers doubles that, until it has all its slots."""
        self.max_concurrent, self.ramp_until = 1, until

    def ramp_up(self, now: float) -> None:
        """Take that a request was answered, or that time passed."""
        slots = self._declared_slots
        self.max_concurrent = slots if now >= self.ramp_until else min(2 * self.max_concurrent, slots)
        if self.max_concurrent == slots:
            self.ramp_until = 0.0

    def condition(self) -> LinkCondition:
        """Return whether the node may get new work."""
        policy = self.policy
        if not policy.provider_enabled:
            return LinkCondition.DISABLED
        if self.unhealthy_reason:
            return LinkCondition.UNHEALTHY
        if policy.cordoned or policy.draining or policy.reclaimed or self.node_draining or self.closed:
            return LinkCondition.DRAINING
        if clock.awake() - self.last_seen >= self.windows.stale_s:
            return LinkCondition.STALE
        if self.busy_elsewhere:
            return LinkCondition.BUSY
        return _READY

    def can_take(self, now: float) -> bool:
        """Whether a request can be placed here right now."""
        return (
            self.active < self.max_concurrent and now >= self.busy_until and self.has_clear_line and self.condition() is _READY
        )

    def report_load(self, load: int) -> None:
        """Take the node's own count of running requests."""
        # It never blocks a slot: the report may be older than the last cancel.
        self.external_load = min(max(0, load - self.active), limits().nodes.report_load)

    def open_stream(self, request: OpenRequest, sink: Sink) -> Stream:
        """Start a request on the node. The caller holds a slot."""
        raise NotImplementedError

    def list_sinks(self) -> Sequence[Sink]:
        """Return who hears the open streams of this link, the one that was opened first comes first."""
        raise NotImplementedError

    def end_streams(self, kind: EndKind, message: str, *, reason: str = CANCEL_WORKER_DISCONNECT) -> None:
        """End every open stream of this link; each sink hears ``on_end`` once. ``reason``: the word for the node."""
        raise NotImplementedError

    def close(self, reason: str) -> None:
        """Let go of the node."""
        raise NotImplementedError


Listener = Callable[["Link | None"], None]
"""Called when a link can take more (or, with None, when links changed in any other way)."""
