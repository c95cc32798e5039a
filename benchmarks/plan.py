"""What is measured, on what, for how long, and the floors that the figures must meet. Values only."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.answers import CHAT, MESSAGES, RESPONSES
from benchmarks.loadclient import LoadSpec
from benchmarks.upstream import Pace


class System(StrEnum):
    """What stands between the load client and the source of chunks."""

    MOCK = "mock"
    NGINX = "nginx"
    VLLM_ROUTER = "vllm-router"
    LITELLM = "litellm"
    DIRECT = "direct"
    RELAY = "relay"
    BRIDGE = "bridge"
    MESSAGES = "messages"
    MESSAGES_TRANSLATED = "messages-translated"
    RESPONSES = "responses"
    RESPONSES_TRANSLATED = "responses-translated"
    FEW = "few"
    NODES_1000 = "nodes-1000"
    KEYS_10000 = "keys-10000"
    UP = "up"


TITLES = {
    System.MOCK: "mock alone (baseline)",
    System.NGINX: "nginx",
    System.VLLM_ROUTER: "vllm-router",
    System.LITELLM: "LiteLLM",
    System.DIRECT: "node called over HTTP",
    System.RELAY: "node dialled in (muster v1)",
    System.BRIDGE: "node dialled in (bridge v1)",
    System.MESSAGES: "Messages passed through",
    System.MESSAGES_TRANSLATED: "Messages translated",
    System.RESPONSES: "Responses passed through",
    System.RESPONSES_TRANSLATED: "Responses translated",
    System.FEW: "10 nodes, 10 keys",
    System.NODES_1000: "1,000 nodes, 10 keys",
    System.KEYS_10000: "10 nodes, 10,000 keys",
    System.UP: "./muster up at rest",
}
TRANSLATED = {System.MESSAGES_TRANSLATED: System.MESSAGES, System.RESPONSES_TRANSLATED: System.RESPONSES}
"""The systems whose answers the gateway translates, and those that pass on answers to the same questions as they come."""
GROWN = {System.NODES_1000: System.FEW, System.KEYS_10000: System.FEW}
"""The systems with many rows of one kind, and the one with few that they are compared with."""
PEERS = (System.NGINX, System.VLLM_ROUTER, System.LITELLM)
ASKED_PEERS = (System.VLLM_ROUTER, System.LITELLM)
"""Measured with ``--peers`` or by name: their wheels are downloaded."""
SURFACE_SYSTEMS = (System.MESSAGES, System.MESSAGES_TRANSLATED, System.RESPONSES, System.RESPONSES_TRANSLATED)
SCALE_SYSTEMS = (System.FEW, System.NODES_1000, System.KEYS_10000)
"""Measured with ``--scale`` or by name: each has a gateway and a database of its own."""
MUSTER_SYSTEMS = (System.DIRECT, System.RELAY, System.BRIDGE, *SURFACE_SYSTEMS, *SCALE_SYSTEMS)
MODELS = {system: f"bench-{system}" for system in MUSTER_SYSTEMS}
KEYS = {System.FEW: 10, System.NODES_1000: 10, System.KEYS_10000: 10_000}
"""How many API keys a database has; otherwise one. The load client asks with one of them."""


@dataclass(frozen=True, slots=True)
class BoxPlan:
    """A node that dials in, or ``nodes`` of them in one process, each with so many slots and GPUs.

    ``asked``: the API path the load client asks its model on; ``declared``: those the node answers itself.
    """

    protocol: str = "muster"
    asked: str = CHAT
    declared: tuple[str, ...] = (CHAT,)
    nodes: int = 1
    slots: int | None = None
    gpus: int = 0


BOXES = {
    System.RELAY: BoxPlan(),
    System.BRIDGE: BoxPlan(protocol="bridge"),
    System.MESSAGES: BoxPlan(asked=MESSAGES, declared=(CHAT, MESSAGES)),
    System.MESSAGES_TRANSLATED: BoxPlan(asked=MESSAGES),
    System.RESPONSES: BoxPlan(asked=RESPONSES, declared=(CHAT, RESPONSES)),
    System.RESPONSES_TRANSLATED: BoxPlan(asked=RESPONSES),
    System.FEW: BoxPlan(nodes=10, slots=8, gpus=4),
    System.NODES_1000: BoxPlan(nodes=1000, slots=8, gpus=4),
    System.KEYS_10000: BoxPlan(nodes=10, slots=8, gpus=4),
}


def find_path(system: System) -> str:
    """Return the API path the load client asks ``system`` on."""
    return BOXES[system].asked if system in BOXES else CHAT


class Measure(StrEnum):
    """One kind of load."""

    REQUESTS = "requests"
    CHUNKS = "chunks"
    FIRST_BYTE = "firstbyte"
    ENGINE = "engine"
    OPEN_STREAMS = "streams"
    OPENED = "opened"
    IDLE = "idle"
    REGISTRATIONS = "registrations"
    START = "start"


ONCE = (Measure.IDLE, Measure.REGISTRATIONS, Measure.START)
"""No loads: each is measured once in a run, not in every round."""
# What takes bytes on at all, and how soon, is the same on every API path; the others are about the work per byte alone.
_WORK_MEASURES = (Measure.REQUESTS, Measure.CHUNKS)
_SYSTEMS_OF = {
    Measure.IDLE: (System.UP, System.NODES_1000),
    Measure.REGISTRATIONS: (System.NODES_1000,),
    Measure.START: (System.DIRECT,),  # its node is a row: nobody has to dial in again
}


def is_measured(system: System, measure: Measure) -> bool:
    """Return whether ``measure`` says anything about ``system`` that it does not say about another."""
    if measure in _SYSTEMS_OF:
        return system in _SYSTEMS_OF[measure]
    if system is System.UP:
        return False
    if system in SCALE_SYSTEMS:
        return measure is Measure.REQUESTS
    return measure in _WORK_MEASURES if system in (*SURFACE_SYSTEMS, System.LITELLM) else True


@dataclass(frozen=True, slots=True)
class Work:
    """The load of one measure and the pace of the streams in it."""

    spec: LoadSpec
    pace: Pace


# Chunks of the busy case come 10 ms apart on each of 128 streams: 12,800 a second, spread out so that two of one stream
# never wait together and each is handled alone.
_FULL = {
    Measure.REQUESTS: Work(LoadSpec(connections=32, seconds=4.0, is_streaming=False, warmup_ms=300), Pace(1, 0)),
    Measure.CHUNKS: Work(
        LoadSpec(connections=128, seconds=4.0, is_streaming=True, ramp_ms=1000), Pace(chunks=200, delay_us=10_000)
    ),
    Measure.FIRST_BYTE: Work(
        LoadSpec(connections=1, seconds=3.0, is_streaming=True, warmup_ms=300), Pace(chunks=4, delay_us=0)
    ),
    Measure.ENGINE: Work(
        LoadSpec(connections=1, seconds=3.0, is_streaming=True, warmup_ms=300), Pace(chunks=4, delay_us=0, first_us=5_000)
    ),
    Measure.OPEN_STREAMS: Work(
        LoadSpec(connections=256, seconds=8.0, is_streaming=True, ramp_ms=2000, warmup_ms=2000),
        Pace(chunks=100, delay_us=20_000),
    ),
    # Each connection asks twice, three seconds apart, and the second time counts: 256 new connections overflow the accept
    # queue of some servers, and its lost SYNs are sent again after a second. A stream outlasts the time that is left.
    Measure.OPENED: Work(
        LoadSpec(connections=256, seconds=3.5, is_streaming=True, warmup_ms=2500, period_ms=3000),
        Pace(chunks=50, delay_us=20_000),
    ),
}
_QUICK_SECONDS = {
    Measure.REQUESTS: 1.5,
    Measure.CHUNKS: 1.5,
    Measure.FIRST_BYTE: 1.0,
    Measure.ENGINE: 1.0,
    Measure.OPEN_STREAMS: 4.0,
    Measure.OPENED: 3.5,
}
# A chunk costs LiteLLM most of a millisecond: of 128 streams it would merge the chunks or not end them in time.
_LITELLM_STREAMS = 8
MERGED_ABOVE = 1.1
"""More chunks per read than this and the busy case was not what it should be: something did not keep up."""
STARTS = 5
"""So often a gateway is killed and started again, after everything else: nodes that dialled in are not waited for."""
FULL_ROUNDS = 3
QUICK_ROUNDS = 1


_ONCE_S = {Measure.IDLE: 45.0, Measure.REGISTRATIONS: 15.0, Measure.START: 15.0}
IDLE_SETTLE_S, IDLE_S = 10.0, 20.0
QUICK_IDLE_SETTLE_S, QUICK_IDLE_S = 5.0, 10.0
"""How long what was started is left alone, and then how long it is looked at."""


def plan_work(measure: Measure, *, quick: bool, system: System = System.MOCK) -> Work:
    """Return the load of ``measure`` on ``system``."""
    work = _FULL[measure]
    if system is System.LITELLM and measure is Measure.CHUNKS:
        work = replace(work, spec=replace(work.spec, connections=_LITELLM_STREAMS))
    return replace(work, spec=replace(work.spec, seconds=_QUICK_SECONDS[measure])) if quick else work


def estimate_s(measure: Measure, *, quick: bool) -> float:
    """Return about how many seconds ``measure`` takes on one system once, streams that run out included."""
    if measure in ONCE:
        return _ONCE_S[measure]
    work = plan_work(measure, quick=quick)
    drain_s = work.pace.chunks * work.pace.delay_us / 1e6 if work.spec.is_streaming else 0.0
    return work.spec.seconds + drain_s + 0.3


@dataclass(frozen=True, slots=True)
class Floor:
    """The worst figure that still passes, for each system of ``systems``: at most ``limit``, or with ``is_least`` at least.

    ``measure``: what the figure comes from, None when from every load. ``goal``: what the design asks for beyond the floor, in
    the floor's unit; to miss it is no failure. A floor that is not binding is shown when missed, but no failure either.
    ``is_time``: time or CPU time, or with ``is_least`` a number per time, as of the machine on which nginx takes ``NGINX_US``
    for a request; ``scale`` is what limit and goal were multiplied by for the run that is judged (ADR 0017).
    """

    figure: str
    title: str
    measure: Measure | None
    limit: float
    systems: tuple[System, ...]
    goal: float | None = None
    is_least: bool = False
    is_binding: bool = True
    is_time: bool = False
    scale: float = 1.0
    tie: float = 0.0
    """By how much a figure may be beyond the limit and count as the same."""

    def adapt(self, nginx_us: float | None) -> Floor:
        """Return the floor for a run in which nginx took so much CPU for a request; None: it was not measured."""
        if not self.is_time or nginx_us is None:
            return self
        scale = NGINX_US / nginx_us if self.is_least else nginx_us / NGINX_US
        return replace(self, limit=self.limit * scale, goal=None if self.goal is None else self.goal * scale, scale=scale)

    def is_met(self, value: float) -> bool:
        """Return whether a figure passes."""
        return value >= self.limit if self.is_least else value <= self.limit * (1 + self.tie)


NGINX_US = 12.4
"""CPU of nginx for a request in the run from which the floors come."""
TIE = 0.25
"""Two systems that take CPU within this of each other take the same, as far as such a run can tell."""
_REQUESTS, _CHUNKS, _OPENED, _REGISTRATIONS = Measure.REQUESTS, Measure.CHUNKS, Measure.OPENED, Measure.REGISTRATIONS
_DIRECT, _RELAY, _BOTH = (System.DIRECT,), (System.RELAY,), (System.DIRECT, System.RELAY)
_UP, _NODES = (System.UP,), (System.NODES_1000,)
FLOORS = (
    Floor("request_ratio", "CPU per request, × nginx", _REQUESTS, 5.5, _DIRECT, goal=4.3),
    Floor("request_ratio", "CPU per request, × nginx", _REQUESTS, 10.0, _RELAY, goal=7.0),
    Floor("request_peer_ratio", "CPU per request, × vllm-router", _REQUESTS, 1.0, _DIRECT, goal=0.8, tie=TIE),
    Floor("request_litellm_ratio", "CPU per request, times cheaper than LiteLLM", _REQUESTS, 150, _DIRECT, 250, is_least=True),
    Floor("chunk_ratio", "CPU per chunk, × nginx", _CHUNKS, 1.8, _DIRECT, goal=1.5),
    Floor("chunk_ratio", "CPU per chunk, × nginx", _CHUNKS, 1.8, _RELAY, goal=1.4),
    Floor("chunk_litellm_ratio", "CPU per chunk, times cheaper than LiteLLM", _CHUNKS, 20, _DIRECT, 35, is_least=True),
    Floor("request_passed_ratio", "CPU per request, × passed through", _REQUESTS, 2.5, tuple(TRANSLATED), goal=2.0),
    Floor("chunk_passed_ratio", "CPU per chunk, × passed through", _CHUNKS, 1.6, tuple(TRANSLATED), goal=1.3),
    Floor("request_grown_ratio", "CPU per request, × 10 nodes and keys", _REQUESTS, 1.5, tuple(GROWN), goal=1.3),
    # uvloop's timers count whole milliseconds, so the node that dialled in cannot wait 5 ms as exactly as the mock does.
    Floor("engine_added_ms", "added TTFB p50, engine needs 5 ms, ms", Measure.ENGINE, 0.4, _DIRECT, 0.25, is_time=True),
    Floor("added_p99_ms", "added TTFB p99 at 256 streams, ms", Measure.OPEN_STREAMS, 5.0, _BOTH, 1.0, is_time=True),
    Floor("opened_peer_ratio", "added TTFB p99, 256 at once, × vllm-router", _OPENED, 1.0, _BOTH, goal=0.6),
    Floor("misplaced", "chunks lost, doubled, reordered or mixed up", None, 0.0, MUSTER_SYSTEMS),
    Floor("idle_ms_per_s", "idle CPU of the gateway, ms per s", Measure.IDLE, 5.0, _UP, 3.0, is_time=True),
    Floor("idle_all_ms_per_s", "idle CPU of everything, ms per s", Measure.IDLE, 15.0, _UP, 8.0, is_time=True),
    Floor("idle_ms_per_s", "idle CPU of the gateway, ms per s", Measure.IDLE, 60.0, _NODES, 30.0, is_time=True),
    Floor("pss_mb", "PSS of the gateway, MB", Measure.IDLE, 75.0, _UP, goal=65.0),
    Floor("pss_all_mb", "PSS of everything, MB", Measure.IDLE, 360.0, _UP, goal=280.0),
    Floor("registrations_per_s", "registrations per s after a restart", _REGISTRATIONS, 200, _NODES, 500, True, is_time=True),
    Floor("start_s", "killed gateway serves again, s", Measure.START, 2.0, _DIRECT),
    # A request is durable in PostgreSQL before a node sees it, which nginx has nothing like.
    Floor("first_byte_ratio", "added TTFB p50 at 1 stream, × nginx", Measure.FIRST_BYTE, 4.0, _BOTH, is_binding=False),
)
"""Floors and goals of the design's performance table. Bridge v1 is shown, and judged on whole streams only."""
