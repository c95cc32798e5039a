"""Runs the plan: every system at every measure in turn, round after round, with progress and time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.errors import BenchmarkError
from benchmarks.figures import Reading, Sample
from benchmarks.idle import measure_rest
from benchmarks.litellm import LiteLlm
from benchmarks.loadclient import LoadSpec, Target, run_load
from benchmarks.muster import Muster
from benchmarks.nginx import KEY, Nginx
from benchmarks.plan import BOXES, MODELS, ONCE, STARTS, TITLES, Measure, System, estimate_s, find_path, is_measured, plan_work
from benchmarks.processes import Child, CorePlan, core_busy_s
from benchmarks.toolchain import Tools
from benchmarks.upstream import MockUpstream, Pace
from benchmarks.vllm_router import VllmRouter

_WARM_UP = LoadSpec(connections=8, seconds=0.5, is_streaming=False)


@dataclass(slots=True)
class Bench:
    """Everything that is up during a run. ``musters``: the one that each of our systems belongs to."""

    tools: Tools
    cores: CorePlan
    mock: MockUpstream
    peers: dict[System, Nginx | VllmRouter | LiteLlm] = field(default_factory=dict)
    musters: dict[System, Muster] = field(default_factory=dict)

    def find_target(self, system: System) -> Target:
        """Return whom the load client asks to reach ``system``."""
        if system is System.MOCK:
            return Target(self.mock.port)
        if system in self.peers:
            return Target(self.peers[system].port, key=KEY)
        muster = self.musters[system]
        return Target(muster.port, find_path(system), model=MODELS[system], key=muster.key)

    def find_child(self, system: System) -> Child:
        """Return the process whose CPU and memory count for ``system``."""
        if system is System.MOCK:
            return self.mock.child
        return self.peers[system].child if system in self.peers else self.musters[system].gateway

    def set_pace(self, system: System, pace: Pace) -> None:
        """Tell whatever makes the chunks of ``system`` how to pace them."""
        self.mock.set_pace(pace)
        if system in self.musters:
            self.musters[system].set_pace(system, pace)

    def measure(self, system: System, measure: Measure, *, round_number: int, quick: bool) -> Sample:
        """Run one measure on one system and account for it."""
        work = plan_work(measure, quick=quick, system=system)
        self.set_pace(system, work.pace)
        child = self.find_child(system)
        muster = self.musters.get(system)
        database_before = muster.storage.database_cpu_s() if muster is not None else None
        cpu_before, main_before = child.cpu_s(), child.main_thread_cpu_s()
        pinned_before = self._pinned_cpu_s()
        busy_before, clock_before = core_busy_s(self.cores.system), time.monotonic()
        load = run_load(self.tools.load, self.find_target(system), work.spec, cores=self.cores.around)
        busy_s, clock_s = core_busy_s(self.cores.system) - busy_before, time.monotonic() - clock_before
        cpu_s, main_s = child.cpu_s() - cpu_before, child.main_thread_cpu_s() - main_before
        pinned_s = self._pinned_cpu_s() - pinned_before
        database_after = muster.storage.database_cpu_s() if muster is not None else None
        for each in self.musters.values():
            each.require_healthy()
        return Sample(
            system=system,
            measure=measure,
            round_number=round_number,
            cpu_s=cpu_s,
            rss_bytes=child.rss_bytes(),
            load=load,
            main_thread_cpu_s=main_s,
            neighbour_share=max(0.0, busy_s - pinned_s) / clock_s,
            database_cpu_s=(
                database_after - database_before if database_after is not None and database_before is not None else None
            ),
        )

    def _pinned_cpu_s(self) -> float:
        """Return the CPU seconds of everything of ours on the measured core; the mock and the nodes run on the others."""
        gateways = [muster.gateway for muster in dict.fromkeys(self.musters.values())]
        return sum(child.cpu_s() for child in (*gateways, *(peer.child for peer in self.peers.values())))

    def warm_up(self, system: System) -> None:
        """Let connections, caches and code paths settle before anything counts."""
        self.set_pace(system, Pace(1, 0))
        run_load(self.tools.load, self.find_target(system), _WARM_UP, cores=self.cores.around)


def run_plan(
    bench: Bench,
    *,
    systems: Sequence[System],
    measures: Sequence[Measure],
    rounds: int,
    quick: bool,
    show: Callable[[str], None],
) -> list[Sample]:
    """Measure everything ``rounds`` times. Systems alternate within a measure, so a slow minute hits all alike."""
    measures = [measure for measure in measures if measure not in ONCE]
    for system in systems:
        if any(is_measured(system, measure) for measure in measures):
            bench.warm_up(system)
    steps = [(r, m, s) for r in range(1, rounds + 1) for m in measures for s in systems if is_measured(s, m)]
    left_s = sum(estimate_s(measure, quick=quick) for _, measure, _ in steps)
    samples = []
    for number, (round_number, measure, system) in enumerate(steps, start=1):
        place = f"[{number}/{len(steps)}] round {round_number}, {measure}: {TITLES[system]}"
        show(f"{place} · about {_render_s(left_s)} left")
        sample = bench.measure(system, measure, round_number=round_number, quick=quick)
        for problem in sample.load.find_problems():
            show(f"    ! {problem}")
        samples.append(sample)
        left_s -= estimate_s(measure, quick=quick)
    return samples


def measure_nodes(bench: Bench, system: System, measures: Sequence[Measure], *, quick: bool) -> list[Reading]:
    """Return what a gateway takes for nodes that nobody asks, and how soon they are back after it was killed."""
    muster, readings = bench.musters[system], []
    if Measure.IDLE in measures:
        readings.append(Reading(system, Measure.IDLE, measure_rest({"": muster.gateway.popen.pid}, quick=quick)))
    if Measure.REGISTRATIONS in measures:
        roll, wanted = muster.count_registrations(system), BOXES[system].nodes
        problem = "" if roll.registered == wanted else f"{roll.registered} of {wanted} nodes came back"
        figures = {"registrations_per_s": roll.registered / roll.took_s} if not problem and roll.took_s else {}
        readings.append(Reading(system, Measure.REGISTRATIONS, figures, problem))
    return readings


def time_starts(bench: Bench, *, show: Callable[[str], None]) -> Reading:
    """Kill the gateway STARTS times; return after how many seconds it served again. Nothing can be measured afterwards."""
    times: list[float] = []
    for number in range(1, STARTS + 1):
        show(f"killing the gateway, {number} of {STARTS}")
        times.append(bench.musters[System.DIRECT].time_restart())
    return Reading(System.DIRECT, Measure.START, {"start_s": median(times)})


def measure_once(
    bench: Bench, *, systems: Sequence[System], measures: Sequence[Measure], quick: bool, show: Callable[[str], None]
) -> list[Reading]:
    """Return the readings of measures that are no loads. Nothing can be measured afterwards."""
    readings = []
    for system in systems:
        wanted = [measure for measure in ONCE if measure in measures and is_measured(system, measure)]
        try:
            if system is System.NODES_1000 and wanted:
                show(f"{', '.join(wanted)}: {TITLES[system]}")
                readings += measure_nodes(bench, system, wanted, quick=quick)
            elif Measure.START in wanted:
                readings.append(time_starts(bench, show=show))
        except BenchmarkError as error:
            readings.append(Reading(system, wanted[-1], problem=str(error)))
    return readings


def profile_plan(
    bench: Bench,
    *,
    systems: Sequence[System],
    measures: Sequence[Measure],
    quick: bool,
    folder: Path,
    show: Callable[[str], None],
) -> list[tuple[Sample, Path]]:
    """Run each measure once on each Muster system under the profiler and return the samples with their profiles."""
    for system in systems:
        bench.warm_up(system)
    folder.mkdir(parents=True, exist_ok=True)
    profiles = []
    for measure in measures:
        for system in (system for system in systems if is_measured(system, measure)):
            show(f"profiling {measure}: {TITLES[system]}")
            bench.musters[system].start_profile()
            sample = bench.measure(system, measure, round_number=1, quick=quick)
            written = bench.musters[system].stop_profile()
            kept = folder / f"{system}-{measure}{written.suffix}"
            kept.write_bytes(written.read_bytes())
            profiles.append((sample, kept))
    return profiles


class Progress:
    """Prints progress to stderr: rewrites one line on a terminal, one line per step elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._began = time.monotonic()

    def show(self, text: str) -> None:
        """Show where the run is."""
        elapsed = _render_s(time.monotonic() - self._began)
        if self._is_terminal and not text.startswith("    !"):
            sys.stderr.write(f"\r\033[K{elapsed:>7}  {text}")
        else:
            sys.stderr.write(f"{elapsed:>7}  {text}\n")
        sys.stderr.flush()

    def finish(self) -> None:
        """End the line."""
        if self._is_terminal:
            sys.stderr.write("\n")


def _render_s(seconds: float) -> str:
    whole = max(0, round(seconds))
    return f"{whole // 60} min {whole % 60:02} s" if whole >= 60 else f"{whole} s"
