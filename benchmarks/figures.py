"""From samples of every round to the figures that are printed: medians, ratios, and the floors they meet or miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.loadclient import LoadResult
from benchmarks.plan import FLOORS, MERGED_ABOVE, MUSTER_SYSTEMS, TRANSLATED, Floor, FloorKind, Measure, System


@dataclass(frozen=True, slots=True)
class Sample:
    """One load run on one system. ``cpu_s`` and ``rss_bytes`` are those of the measured system alone."""

    system: System
    measure: Measure
    round_number: int
    cpu_s: float
    rss_bytes: int
    load: LoadResult
    database_cpu_s: float | None = None
    main_thread_cpu_s: float = 0.0
    neighbour_share: float = 0.0
    """Part of the measured core that other programs took while the load ran."""

    @property
    def cpu_us(self) -> float | None:
        """CPU microseconds per request, or per chunk when the measure is about chunks; None when there was none."""
        units = (
            self.load.chunks if self.measure in {Measure.CHUNKS, Measure.OPEN_STREAMS, Measure.OPENED} else self.load.answered
        )
        return self.cpu_s * 1e6 / units if units else None


@dataclass(slots=True)
class Figures:
    """The medians of one system. A figure is None when it was not measured or when its runs had errors."""

    system: System
    request_us: float | None = None
    chunk_us: float | None = None
    added_first_byte_us: float | None = None
    engine_added_ms: float | None = None
    added_p99_ms: float | None = None
    opened_p50_ms: float | None = None
    opened_p95_ms: float | None = None
    opened_p99_ms: float | None = None
    first_byte_us: float | None = None
    p99_ms: float | None = None
    request_ratio: float | None = None
    chunk_ratio: float | None = None
    first_byte_ratio: float | None = None
    request_peer_ratio: float | None = None
    opened_peer_ratio: float | None = None
    request_passed_ratio: float | None = None
    chunk_passed_ratio: float | None = None
    chunks_per_read: float | None = None
    transit_p99_us: float | None = None
    database_us: float | None = None
    rss_mb: float | None = None
    start_s: float | None = None
    neighbour_share: float = 0.0
    misplaced: int | None = None
    problems: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_merged(self) -> bool:
        """Whether chunks reached the client together, so that the figure per chunk looks better than it is."""
        return self.chunks_per_read is not None and self.chunks_per_read > MERGED_ABOVE


@dataclass(frozen=True, slots=True)
class Verdict:
    """One floor and its goal on one system. ``passed`` is about the floor; None when there was nothing to judge."""

    floor: Floor
    system: System
    value: float | None
    passed: bool | None

    @property
    def goal_ratio(self) -> float | None:
        """The figure as a multiple of its goal, at most 1 when the goal is met; None without goal or verdict."""
        return _divide(self.value, self.floor.goal) if self.passed is not None else None


class SampleSet:
    """Every sample of a run."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = list(samples)

    def select(self, system: System, measure: Measure) -> list[Sample]:
        """Return the samples of one system and measure, in order of their rounds."""
        return [s for s in self._samples if s.system is system and s.measure is measure]

    def of_system(self, system: System) -> list[Sample]:
        """Return all samples of one system."""
        return [s for s in self._samples if s.system is system]

    def list_systems(self) -> list[System]:
        """Return the systems that were measured, in the order of ``System``."""
        return [system for system in System if self.of_system(system)]

    def clean(self, system: System, measure: Measure) -> list[Sample]:
        """Return the samples when every one of them is without errors, else none: one bad run spoils the figure."""
        samples = self.select(system, measure)
        return [] if any(s.load.find_problems() for s in samples) else samples


def compute_figures(samples: SampleSet, starts_s: Sequence[float] = ()) -> dict[System, Figures]:
    """Return the figures of every measured system, with ratios to nginx and vllm-router, and of translation to passing through.

    ``starts_s``: after how many seconds a gateway that was killed served again, each time.
    """
    figures = {system: _measure_system(samples, system) for system in samples.list_systems()}
    if starts_s:
        figures.setdefault(System.DIRECT, Figures(System.DIRECT)).start_s = median(starts_s)
    for system, passed_through in TRANSLATED.items():
        if system in figures and passed_through in figures:
            own, peer = figures[system], figures[passed_through]
            own.request_passed_ratio = _divide(own.request_us, peer.request_us)
            own.chunk_passed_ratio = _divide(own.chunk_us, peer.chunk_us)
    peer_router = figures.get(System.VLLM_ROUTER)
    for own in figures.values():
        if peer_router is not None and own.system in MUSTER_SYSTEMS:
            own.request_peer_ratio = _divide(own.request_us, peer_router.request_us)
            own.opened_peer_ratio = _divide(own.opened_p99_ms, peer_router.opened_p99_ms)
    nginx = figures.get(System.NGINX)
    for own in figures.values():
        if nginx is None or own.system is System.MOCK:
            continue
        own.request_ratio = _divide(own.request_us, nginx.request_us)
        own.chunk_ratio = _divide(own.chunk_us, nginx.chunk_us)
        own.first_byte_ratio = _divide(own.added_first_byte_us, nginx.added_first_byte_us)
    return figures


def judge_floors(figures: dict[System, Figures]) -> list[Verdict]:
    """Return one verdict for each floor and each system that it binds and that was measured."""
    verdicts = []
    for floor in FLOORS:
        for system in floor.systems:
            if system not in figures:
                continue
            value: float | None = getattr(figures[system], floor.figure)
            verdicts.append(Verdict(floor, system, value, _judge(floor, figures[system], value)))
    return verdicts


def _judge(floor: Floor, own: Figures, value: float | None) -> bool | None:
    if value is None:
        # Nothing measured is no verdict; measured and spoilt by errors is a failure.
        return False if own.problems else None
    if floor.kind is FloorKind.COUNT and own.problems:
        return False
    if floor.figure in {"chunk_ratio", "chunk_passed_ratio"} and own.is_merged:
        return None
    return value <= floor.limit


def _measure_system(samples: SampleSet, system: System) -> Figures:
    own = Figures(system)
    for sample in samples.of_system(system):
        problems = sample.load.find_problems()
        if problems:
            own.problems.setdefault(sample.measure, []).extend(f"round {sample.round_number}: {p}" for p in problems)
    if system is not System.MOCK:
        own.request_us = _median(s.cpu_us for s in samples.clean(system, Measure.REQUESTS))
        own.chunk_us = _median(s.cpu_us for s in samples.clean(system, Measure.CHUNKS))
        own.rss_mb = _median(s.rss_bytes / 1e6 for s in samples.of_system(system))
    if system in MUSTER_SYSTEMS:
        own.database_us = _median(
            s.database_cpu_s * 1e6 / s.load.answered
            for s in samples.clean(system, Measure.REQUESTS)
            if s.database_cpu_s is not None
        )
    busy = samples.clean(system, Measure.CHUNKS)
    own.chunks_per_read = _median(s.load.chunks / s.load.reads for s in busy)
    own.transit_p99_us = _median(s.load.transit_us.p99 for s in busy)
    own.first_byte_us = _median(s.load.ttfb_us.p50 for s in samples.clean(system, Measure.FIRST_BYTE))
    own.p99_ms = _median(s.load.ttfb_us.p99 / 1e3 for s in samples.clean(system, Measure.OPEN_STREAMS))
    own.neighbour_share = max((s.neighbour_share for s in samples.of_system(system)), default=0.0)
    own.misplaced = sum(s.load.misplaced for s in samples.of_system(system))
    if system is not System.MOCK:
        own.added_first_byte_us = _added(samples, system, Measure.FIRST_BYTE, lambda load: load.ttfb_us.p50)
        own.engine_added_ms = _added_ms(samples, system, Measure.ENGINE, lambda load: load.ttfb_us.p50)
        own.added_p99_ms = _added_ms(samples, system, Measure.OPEN_STREAMS, lambda load: load.ttfb_us.p99)
        own.opened_p50_ms = _added_ms(samples, system, Measure.OPENED, lambda load: load.ttfb_us.p50)
        own.opened_p95_ms = _added_ms(samples, system, Measure.OPENED, lambda load: load.ttfb_us.p95)
        own.opened_p99_ms = _added_ms(samples, system, Measure.OPENED, lambda load: load.ttfb_us.p99)
    return own


def _added(samples: SampleSet, system: System, measure: Measure, read: Callable[[LoadResult], float]) -> float | None:
    """Return the median over rounds of what a system adds to the baseline measured in the same round."""
    base = {s.round_number: read(s.load) for s in samples.clean(System.MOCK, measure)}
    own = samples.clean(system, measure)
    return _median(read(s.load) - base[s.round_number] for s in own if s.round_number in base)


def _added_ms(samples: SampleSet, system: System, measure: Measure, read: Callable[[LoadResult], float]) -> float | None:
    return _divide(_added(samples, system, measure, read), 1e3)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _divide(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by is not None and by > 0 else None
