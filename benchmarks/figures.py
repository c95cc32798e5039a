"""From samples of every round to the figures that are printed: medians, ratios, and the floors they meet or miss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.loadclient import LoadResult
from benchmarks.plan import FLOORS, GROWN, MERGED_ABOVE, MUSTER_SYSTEMS, TRANSLATED, Floor, Measure, System

NOT_MEASURED = "not measured"


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


@dataclass(frozen=True, slots=True)
class Reading:
    """What a measure that runs once came to: fields of ``Figures`` by name, or ``problem`` when it went wrong."""

    system: System
    measure: Measure
    figures: Mapping[str, float] = field(default_factory=dict)
    problem: str = ""


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
    request_litellm_ratio: float | None = None
    chunk_litellm_ratio: float | None = None
    request_grown_ratio: float | None = None
    request_passed_ratio: float | None = None
    chunk_passed_ratio: float | None = None
    chunks_per_read: float | None = None
    transit_p99_us: float | None = None
    database_us: float | None = None
    rss_mb: float | None = None
    start_s: float | None = None
    idle_ms_per_s: float | None = None
    idle_all_ms_per_s: float | None = None
    pss_mb: float | None = None
    pss_all_mb: float | None = None
    registrations_per_s: float | None = None
    neighbour_share: float = 0.0
    misplaced: int | None = None
    problems: dict[str, list[str]] = field(default_factory=dict)

    @property
    def is_merged(self) -> bool:
        """Whether chunks reached the client together, so that the figure per chunk looks better than it is."""
        return self.chunks_per_read is not None and self.chunks_per_read > MERGED_ABOVE


@dataclass(frozen=True, slots=True)
class Verdict:
    """One floor and its goal on one system. ``passed`` is about the floor; None when it was not judged: ``reason`` says why."""

    floor: Floor
    system: System
    value: float | None
    passed: bool | None
    reason: str = ""

    @property
    def goal_ratio(self) -> float | None:
        """How many times the figure is off its goal, at most 1 when the goal is met; None without goal, figure or verdict."""
        if self.passed is None or self.value is None or self.floor.goal is None:
            return None
        return _divide(self.floor.goal, self.value) if self.floor.is_least else _divide(self.value, self.floor.goal)


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


def compute_figures(samples: SampleSet, readings: Sequence[Reading] = ()) -> dict[System, Figures]:
    """Return the figures of every measured system, with the ratios of one system's figures to another's."""
    figures = {system: _measure_system(samples, system) for system in samples.list_systems()}
    for reading in readings:
        own = figures.setdefault(reading.system, Figures(reading.system))
        for name, value in reading.figures.items():
            setattr(own, name, value)
        if reading.problem:
            own.problems.setdefault(reading.measure, []).append(reading.problem)
    for own in figures.values():
        _compare(own, figures)
    return {system: figures[system] for system in System if system in figures}


def _compare(own: Figures, figures: Mapping[System, Figures]) -> None:
    """Set the ratios of one system to those that it is compared with; a system that was not measured has no figures."""

    def find(system: System | None) -> Figures:
        return figures.get(system, Figures(own.system)) if system is not None else Figures(own.system)

    nginx, router, litellm = find(System.NGINX), find(System.VLLM_ROUTER), find(System.LITELLM)
    if own.system is not System.MOCK:
        own.request_ratio = _divide(own.request_us, nginx.request_us)
        own.chunk_ratio = _divide(own.chunk_us, nginx.chunk_us)
        own.first_byte_ratio = _divide(own.added_first_byte_us, nginx.added_first_byte_us)
    if own.system in MUSTER_SYSTEMS:
        own.request_peer_ratio = _divide(own.request_us, router.request_us)
        own.opened_peer_ratio = _divide(own.opened_p99_ms, router.opened_p99_ms)
        own.request_litellm_ratio = _divide(litellm.request_us, own.request_us)
        own.chunk_litellm_ratio = _divide(litellm.chunk_us, own.chunk_us)
    passed_through, few = find(TRANSLATED.get(own.system)), find(GROWN.get(own.system))
    own.request_passed_ratio = _divide(own.request_us, passed_through.request_us)
    own.chunk_passed_ratio = _divide(own.chunk_us, passed_through.chunk_us)
    own.request_grown_ratio = _divide(own.request_us, few.request_us)


def judge_floors(figures: Mapping[System, Figures]) -> list[Verdict]:
    """Return one verdict for each floor and each system that it binds and that was measured."""
    nginx_us = figures[System.NGINX].request_us if System.NGINX in figures else None
    floors = [floor.adapt(nginx_us) for floor in FLOORS]
    return [_judge(floor, figures[system]) for floor in floors for system in floor.systems if system in figures]


def _judge(floor: Floor, own: Figures) -> Verdict:
    value: float | None = getattr(own, floor.figure)
    if value is None and floor.measure in own.problems:
        return Verdict(floor, own.system, None, passed=False, reason="errors")
    reason = ""
    if value is None:
        reason = NOT_MEASURED
    elif value < 0:
        reason = "faster than the mock alone, so noise is larger than the figure"
    elif floor.measure is None and own.problems and floor.is_met(value):
        reason = "not known where runs had errors"
    elif floor.measure is Measure.CHUNKS and own.is_merged:
        reason = "chunks were merged"
    return Verdict(floor, own.system, value, None if reason or value is None else floor.is_met(value), reason)


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
    added_us = _added(samples, system, measure, read)
    return added_us / 1e3 if added_us is not None else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _divide(value: float | None, by: float | None) -> float | None:
    """Return a quotient, or None where it says nothing: time that is added is below zero when the baseline was slower."""
    return value / by if value is not None and by is not None and value >= 0 and by > 0 else None
