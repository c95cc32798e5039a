"""``./muster bench``: what Muster costs per request and per chunk, beside nginx on the same machine in the same run."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.errors import BenchmarkError
from benchmarks.figures import Reading, SampleSet, compute_figures, judge_floors
from benchmarks.hotspots import render_hotspots
from benchmarks.idle import measure_installation
from benchmarks.litellm import LiteLlm, install_litellm
from benchmarks.muster import Muster
from benchmarks.nginx import Nginx, find_nginx
from benchmarks.plan import (
    ASKED_PEERS,
    FULL_ROUNDS,
    GROWN,
    MUSTER_SYSTEMS,
    ONCE,
    PEERS,
    QUICK_ROUNDS,
    SCALE_SYSTEMS,
    TITLES,
    TRANSLATED,
    Measure,
    System,
    estimate_s,
    is_measured,
)
from benchmarks.processes import CorePlan, plan_cores
from benchmarks.report import render_completeness, render_problems, render_table, render_verdicts, write_json
from benchmarks.runner import Bench, Progress, measure_once, profile_plan, run_plan
from benchmarks.storage import open_storage
from benchmarks.toolchain import HERE, build_tools
from benchmarks.upstream import MockUpstream
from benchmarks.vllm_router import VllmRouter, install_vllm_router

PROFILE_DIR = HERE / "results" / "profiles"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="muster bench",
        description=__doc__,
        epilog="./muster bench box checks the box alone, ./muster bench governance governed operations, "
        "./muster bench overload what five times the load does, ./muster bench node what relaying costs a node, "
        "./muster bench console charts and pages, ./muster bench placement what comes of the ways to choose a node.",
    )
    parser.add_argument("--quick", action="store_true", help="one short round: a first impression, nothing to quote")
    parser.add_argument("--rounds", type=int, help=f"rounds to take medians of (default {FULL_ROUNDS}, quick {QUICK_ROUNDS})")
    parser.add_argument(
        "--only",
        default="",
        metavar="NAMES",
        help=f"comma list of systems ({', '.join(System)}) and measures ({', '.join(Measure)})",
    )
    parser.add_argument(
        "--peers",
        action="store_true",
        help="measure vllm-router and LiteLLM too: the first time their wheels are downloaded from PyPI",
    )
    parser.add_argument(
        "--scale", action="store_true", help="measure gateways with 1,000 nodes and with 10,000 keys too: some minutes more"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    parser.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the measured system on one core and everything else on the others",
    )
    parser.add_argument(
        "--profile",
        nargs="?",
        const="samples",
        choices=("samples", "calls"),
        help="show where the gateway's time goes instead: by sampling (default) or by counting every call",
    )
    return parser


def choose(only: str, *, profile: bool, peers: bool = False, scale: bool = False) -> tuple[list[System], list[Measure]]:
    """Return the systems and measures named by ``--only``. Raises BenchmarkError.

    The baseline comes along where time is measured, and with a system the one that it is compared with. ``peers`` and
    ``scale``: whether the systems of these options do as well; otherwise they are measured only when they are named.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {*System, *Measure}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchmarkError(f"--only does not know {', '.join(unknown)}; it knows {', '.join(sorted(known))}")
    compared = [] if profile else [peer for system, peer in {**TRANSLATED, **GROWN}.items() if system in names]
    systems = [system for system in System if system in names or system in compared]
    systems = systems or [system for system in System if system not in (*ASKED_PEERS, *SCALE_SYSTEMS)]
    measures = [measure for measure in Measure if measure in names] or list(Measure)
    if profile:
        systems = [system for system in systems if system in MUSTER_SYSTEMS]
        measures = [measure for measure in Measure if measure in names and measure not in ONCE]
        measures = measures or [Measure.REQUESTS, Measure.CHUNKS]
    else:
        chosen = {*systems, *(ASKED_PEERS if peers else ()), *(SCALE_SYSTEMS if scale else ())}
        if chosen - {System.UP, *SCALE_SYSTEMS}:
            chosen.add(System.MOCK)
        systems = [system for system in System if system in chosen]
    if profile and not systems:
        raise BenchmarkError(f"--profile is about Muster: name one of {', '.join(MUSTER_SYSTEMS)}")
    return [system for system in systems if any(is_measured(system, measure) for measure in measures)], measures


def find_peers(systems: Sequence[System], progress: Progress) -> tuple[dict[System, Path], dict[System, str]]:
    """Return by which program each of the peers among ``systems`` is started, and why the others cannot be."""
    programs: dict[System, Path] = {}
    absences: dict[System, str] = {}
    for system in (system for system in PEERS if system in systems):
        progress.show(f"looking for {TITLES[system]}")
        try:
            match system:
                case System.VLLM_ROUTER:
                    programs[system] = install_vllm_router()
                case System.LITELLM:
                    programs[system] = install_litellm()
                case _:
                    programs[system] = find_nginx()
        except BenchmarkError as error:
            absences[system] = str(error)
            progress.show(f"    ! {TITLES[system]} is left out: {error}")
    return programs, absences


@contextlib.contextmanager
def open_bench(
    systems: Sequence[System],
    cores: CorePlan,
    progress: Progress,
    *,
    programs: Mapping[System, Path] | None = None,
    profile: str | None = None,
) -> Iterator[Bench]:
    """Start everything that ``systems`` need and stop it after the block. ``programs``: what ``find_peers`` returned."""
    progress.show("compiling the mock upstream and the load client")
    tools = build_tools()
    with contextlib.ExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        mock = MockUpstream(tools, log_dir=work_dir, cores=cores.around)
        stack.callback(mock.stop)
        bench = Bench(tools=tools, cores=cores, mock=mock)
        for system, program in (programs or {}).items():
            progress.show(f"starting {TITLES[system]}")
            peer: Nginx | VllmRouter | LiteLlm
            match system:
                case System.VLLM_ROUTER:
                    peer = VllmRouter(program, upstream_url=mock.url, work_dir=work_dir, cores=cores.system)
                case System.LITELLM:
                    peer = LiteLlm(program, upstream_url=mock.url, work_dir=work_dir, cores=cores.system)
                case _:
                    peer = Nginx(program, upstream_port=mock.port, work_dir=work_dir, cores=cores.system)
            stack.callback(peer.stop)
            bench.peers[system] = peer
        together = [system for system in systems if system in MUSTER_SYSTEMS and system not in SCALE_SYSTEMS]
        alone = [[system] for system in systems if system in SCALE_SYSTEMS]
        for wanted in ([together] if together else []) + alone:
            progress.show(f"starting Muster for {', '.join(wanted)}, with PostgreSQL and Valkey of its own")
            storage = stack.enter_context(open_storage(cores=cores.around))
            folder = work_dir / wanted[0]
            folder.mkdir()
            muster = Muster(
                storage=storage, upstream_url=mock.url, work_dir=folder, cores=cores, systems=wanted, profile=profile
            )
            stack.callback(muster.stop)
            bench.musters.update(dict.fromkeys(wanted, muster))
        yield bench


def measure_all(arguments: argparse.Namespace, progress: Progress) -> int:
    """Measure, print and write; return 1 when a floor was missed or a run had errors."""
    quick = arguments.quick
    systems, measures = choose(arguments.only, profile=False, peers=arguments.peers, scale=arguments.scale)
    programs, absences = find_peers(systems, progress)
    systems = [system for system in systems if system not in absences]
    cores = plan_cores(pin=arguments.pin)
    rounds = arguments.rounds or (QUICK_ROUNDS if quick else FULL_ROUNDS)
    steps = [measure for measure in measures for system in systems if is_measured(system, measure)]
    total_s = sum(estimate_s(measure, quick=quick) * (1 if measure in ONCE else rounds) for measure in steps)
    progress.show(f"{len(systems)} systems × {len(measures)} measures × {rounds} rounds: about {total_s / 60:.1f} minutes")
    readings, samples = [], []
    if System.UP in systems:
        # First, while nothing else of ours runs.
        progress.show(f"{Measure.IDLE}: {TITLES[System.UP]}")
        readings.append(measure_installation(quick=quick))
    # Those of --scale run afterwards: a thousand nodes take part of the measured core even when nobody asks.
    ordinary = [system for system in systems if system not in (System.UP, *SCALE_SYSTEMS)]
    grown = [system for system in systems if system in SCALE_SYSTEMS]
    for group in (ordinary, grown):
        if not group:
            continue
        try:
            with open_bench(group, cores, progress, programs=programs if group is ordinary else {}) as bench:
                samples += run_plan(bench, systems=group, measures=measures, rounds=rounds, quick=quick, show=progress.show)
                readings += measure_once(bench, systems=group, measures=measures, quick=quick, show=progress.show)
        except BenchmarkError as error:
            if not samples:
                raise
            readings += [Reading(system, Measure.REQUESTS, problem=str(error)) for system in group]
    progress.finish()
    figures = compute_figures(SampleSet(samples), readings)
    verdicts = judge_floors(figures)
    pinned = f"gateway on core {cores.system[0]}" if cores.is_pinned else "not pinned"
    print(f"\nMedians of {rounds} round(s), {pinned}. Ratios travel between machines; microseconds do not.\n")
    completeness = render_completeness(figures, absences)
    for part in (render_table(figures), render_problems(figures), render_verdicts(verdicts), completeness):
        if part:
            print(part + "\n")
    if arguments.json:
        options = {name: getattr(arguments, name) for name in ("quick", "only", "peers", "scale")}
        write_json(
            arguments.json, figures=figures, absences=absences, verdicts=verdicts, samples=samples, cores=cores,
            arguments={**options, "rounds": rounds},
        )  # fmt: skip
        print(f"written: {arguments.json}")
    is_missed = any(verdict.passed is False and verdict.floor.is_binding for verdict in verdicts)
    return 1 if is_missed or any(own.problems for own in figures.values()) else 0


def profile_all(arguments: argparse.Namespace, progress: Progress) -> int:
    """Profile the gateway and print its dearest functions; the files stay for ``python -m pstats``."""
    systems, measures = choose(arguments.only, profile=True)
    cores = plan_cores(pin=arguments.pin)
    with open_bench(systems, cores, progress, profile=arguments.profile) as bench:
        profiles = profile_plan(
            bench, systems=systems, measures=measures, quick=arguments.quick, folder=PROFILE_DIR, show=progress.show
        )
    progress.finish()
    for sample, path in profiles:
        print("\n" + render_hotspots(sample, path))
        for problem in sample.load.find_problems():
            print(f"  ! {problem}")
    print(f"\nprofiles: {PROFILE_DIR}")
    return 0


def main(argv: list[str] | None = None) -> int:
    """Run the command line; the exit code is 2 when the benchmark itself could not run."""
    given = sys.argv[1:] if argv is None else argv
    if given[:1] == ["box"]:
        from benchmarks.boxcheck.__main__ import main as check_box  # a program of its own, with needs of its own

        return check_box(given[1:])
    if given[:1] == ["governance"]:
        from benchmarks.govcheck.__main__ import main as check_governance

        return check_governance(given[1:])
    if given[:1] == ["node"]:
        from benchmarks.node import main as measure_node

        return measure_node(given[1:])
    if given[:1] == ["console"]:
        from benchmarks.console import main as measure_console

        return measure_console(given[1:])
    if given[:1] == ["overload"]:
        from benchmarks.overload import main as measure_overload

        return measure_overload(given[1:])
    if given[:1] == ["placement"]:
        from benchmarks.placement import main as measure_placement

        return measure_placement(given[1:])
    arguments = build_parser().parse_args(given)
    progress = Progress()
    try:
        return profile_all(arguments, progress) if arguments.profile else measure_all(arguments, progress)
    except BenchmarkError as error:
        progress.finish()
        print(f"muster bench: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        progress.finish()
        print("muster bench: stopped", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
