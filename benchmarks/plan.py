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
    DIRECT = "direct"
    RELAY = "relay"
    BRIDGE = "bridge"
    MESSAGES = "messages"
    MESSAGES_TRANSLATED = "messages-translated"
    RESPONSES = "responses"
    RESPONSES_TRANSLATED = "responses-translated"


TITLES = {
    System.MOCK: "mock alone (baseline)",
    System.NGINX: "nginx",
    System.VLLM_ROUTER: "vllm-router",
    System.DIRECT: "Muster, box called over HTTP",
    System.RELAY: "Muster, box dialled in (muster v1)",
    System.BRIDGE: "Muster, box dialled in (bridge v1)",
    System.MESSAGES: "Muster, Messages passed through",
    System.MESSAGES_TRANSLATED: "Muster, Messages translated",
    System.RESPONSES: "Muster, Responses passed through",
    System.RESPONSES_TRANSLATED: "Muster, Responses translated",
}
TRANSLATED = {System.MESSAGES_TRANSLATED: System.MESSAGES, System.RESPONSES_TRANSLATED: System.RESPONSES}
"""The systems whose answers the gateway translates, and those that pass on answers to the same questions as they come."""
SURFACE_SYSTEMS = (System.MESSAGES, System.MESSAGES_TRANSLATED, System.RESPONSES, System.RESPONSES_TRANSLATED)
MUSTER_SYSTEMS = (System.DIRECT, System.RELAY, System.BRIDGE, *SURFACE_SYSTEMS)
MODELS = {system: f"bench-{system}" for system in MUSTER_SYSTEMS}


@dataclass(frozen=True, slots=True)
class BoxPlan:
    """A box that dials in. ``asked``: the API path the load client asks its model on; ``declared``: those it answers itself."""

    protocol: str = "muster"
    asked: str = CHAT
    declared: tuple[str, ...] = (CHAT,)


BOXES = {
    System.RELAY: BoxPlan(),
    System.BRIDGE: BoxPlan(protocol="bridge"),
    System.MESSAGES: BoxPlan(asked=MESSAGES, declared=(CHAT, MESSAGES)),
    System.MESSAGES_TRANSLATED: BoxPlan(asked=MESSAGES),
    System.RESPONSES: BoxPlan(asked=RESPONSES, declared=(CHAT, RESPONSES)),
    System.RESPONSES_TRANSLATED: BoxPlan(asked=RESPONSES),
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
    START = "start"


# What takes bytes on at all, and how soon, is the same on every API path; the others are about the work per byte alone.
_SURFACE_MEASURES = (Measure.REQUESTS, Measure.CHUNKS)


def is_measured(system: System, measure: Measure) -> bool:
    """Return whether ``measure`` says anything about ``system`` that it does not say about another."""
    if measure is Measure.START:
        return system is System.DIRECT  # its node is a row: nobody has to dial in again
    return system not in SURFACE_SYSTEMS or measure in _SURFACE_MEASURES


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
MERGED_ABOVE = 1.1
"""More chunks per read than this and the busy case was not what it should be: something did not keep up."""
STARTS = 5
"""So often a gateway is killed and started again, after everything else: nodes that dialled in are not waited for."""
FULL_ROUNDS = 3
QUICK_ROUNDS = 1


def plan_work(measure: Measure, *, quick: bool) -> Work:
    """Return the load of ``measure``."""
    work = _FULL[measure]
    return replace(work, spec=replace(work.spec, seconds=_QUICK_SECONDS[measure])) if quick else work


def estimate_s(measure: Measure, *, quick: bool) -> float:
    """Return about how many seconds ``measure`` takes on one system, streams that run out included."""
    if measure is Measure.START:
        return 0.0  # not a load, and not in every round
    work = plan_work(measure, quick=quick)
    drain_s = work.pace.chunks * work.pace.delay_us / 1e6 if work.spec.is_streaming else 0.0
    return work.spec.seconds + drain_s + 0.3


class FloorKind(StrEnum):
    """How a floor is judged."""

    RATIO = "ratio"
    MILLISECONDS = "ms"
    SECONDS = "s"
    COUNT = "count"


@dataclass(frozen=True, slots=True)
class Floor:
    """The worst figure that still passes: at most ``limit``, for each Muster system of ``systems``.

    ``goal``: what the design asks for beyond the floor, in the floor's unit; to miss it is no failure. A floor that is not
    binding is shown when missed, but no failure either.
    """

    figure: str
    title: str
    kind: FloorKind
    limit: float
    systems: tuple[System, ...]
    goal: float | None = None
    is_binding: bool = True


OURS = (System.DIRECT, System.RELAY)
FLOORS = (
    Floor("request_ratio", "CPU per request, × nginx", FloorKind.RATIO, 5.5, (System.DIRECT,), goal=4.3),
    Floor("request_ratio", "CPU per request, × nginx", FloorKind.RATIO, 10.0, (System.RELAY,), goal=7.0),
    Floor("request_peer_ratio", "CPU per request, × vllm-router", FloorKind.RATIO, 1.0, (System.DIRECT,), goal=0.8),
    Floor("chunk_ratio", "CPU per chunk, × nginx", FloorKind.RATIO, 1.8, (System.DIRECT,), goal=1.5),
    Floor("chunk_ratio", "CPU per chunk, × nginx", FloorKind.RATIO, 1.8, (System.RELAY,), goal=1.4),
    Floor("request_passed_ratio", "CPU per request, × passed through", FloorKind.RATIO, 2.5, tuple(TRANSLATED), goal=2.0),
    Floor("chunk_passed_ratio", "CPU per chunk, × passed through", FloorKind.RATIO, 1.6, tuple(TRANSLATED), goal=1.3),
    # uvloop's timers count whole milliseconds, so the box that dialled in cannot wait 5 ms as exactly as the mock does.
    Floor("engine_added_ms", "added TTFB p50, engine needs 5 ms, ms", FloorKind.MILLISECONDS, 0.4, (System.DIRECT,), goal=0.25),
    Floor("added_p99_ms", "added TTFB p99 at 256 streams, ms", FloorKind.MILLISECONDS, 5.0, OURS, goal=1.0),
    Floor("opened_peer_ratio", "added TTFB p99, 256 at once, × vllm-router", FloorKind.RATIO, 1.0, OURS, goal=0.6),
    Floor("misplaced", "chunks lost, doubled, reordered or mixed up", FloorKind.COUNT, 0.0, MUSTER_SYSTEMS),
    Floor("start_s", "killed gateway serves again, s", FloorKind.SECONDS, 2.0, (System.DIRECT,)),
    # A request is durable in PostgreSQL before a box sees it, which nginx has nothing like.
    Floor("first_byte_ratio", "added TTFB p50 at 1 stream, × nginx", FloorKind.RATIO, 4.0, OURS, is_binding=False),
)
"""Floors and goals of the design's performance table. Bridge v1 is shown, and judged on whole streams only."""
