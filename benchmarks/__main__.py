"""``./muster bench``: what Muster costs per request and per chunk, beside nginx on the same machine in the same run."""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks import nginx
from benchmarks.errors import BenchmarkError
from benchmarks.figures import SampleSet, compute_figures, judge_floors
from benchmarks.hotspots import render_hotspots
from benchmarks.muster import Muster
from benchmarks.plan import FULL_ROUNDS, MUSTER_SYSTEMS, QUICK_ROUNDS, TRANSLATED, Measure, System, estimate_s, is_measured
from benchmarks.processes import CorePlan, plan_cores
from benchmarks.report import render_problems, render_table, render_verdicts, write_json
from benchmarks.runner import Bench, Progress, profile_plan, run_plan, time_starts
from benchmarks.storage import open_storage
from benchmarks.toolchain import HERE, build_tools
from benchmarks.upstream import MockUpstream
from benchmarks.vllm_router import VllmRouter, install_vllm_router

PROFILE_DIR = HERE / "results" / "profiles"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="./muster bench",
        description=__doc__,
        epilog="./muster bench box checks the box alone, ./muster bench governance governed operations, "
        "./muster bench overload what five times the load does, ./muster bench node what relaying costs a node.",
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
        "--peers", action="store_true", help="measure vllm-router too: the first time its wheel is downloaded from PyPI"
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


def choose(only: str, *, profile: bool, peers: bool = False) -> tuple[list[System], list[Measure]]:
    """Return the systems and measures named by ``--only``. Raises BenchmarkError.

    The baseline always comes along, and with a translated system the one that it is compared with. ``peers``: whether
    vllm-router does as well; otherwise it is measured only when it is named.
    """
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {*System, *Measure}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise BenchmarkError(f"--only does not know {', '.join(unknown)}; it knows {', '.join(sorted(known))}")
    passed_through = [] if profile else [peer for system, peer in TRANSLATED.items() if system in names]
    systems = [system for system in System if system in names or system in passed_through]
    systems = systems or [system for system in System if system is not System.VLLM_ROUTER]
    measures = [measure for measure in Measure if measure in names] or list(Measure)
    if profile:
        systems = [system for system in systems if system in MUSTER_SYSTEMS]
        measures = [measure for measure in Measure if measure in names and measure != Measure.START]
        measures = measures or [Measure.REQUESTS, Measure.CHUNKS]
    else:
        added = {System.MOCK, System.VLLM_ROUTER} if peers else {System.MOCK}
        systems = [system for system in System if system in added or system in systems]
    if profile and not systems:
        raise BenchmarkError(f"--profile is about Muster: name one of {', '.join(MUSTER_SYSTEMS)}")
    return [system for system in systems if any(is_measured(system, measure) for measure in measures)], measures


@contextlib.contextmanager
def open_bench(systems: Sequence[System], cores: CorePlan, progress: Progress, *, profile: str | None) -> Iterator[Bench]:
    """Start everything that ``systems`` need and stop it after the block."""
    progress.show("compiling the mock upstream and the load client")
    tools = build_tools()
    with contextlib.ExitStack() as stack:
        work_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="muster-bench-")))
        mock = MockUpstream(tools, log_dir=work_dir, cores=cores.around)
        stack.callback(mock.stop)
        bench = Bench(tools=tools, cores=cores, mock=mock, nginx=None, vllm_router=None, muster=None, storage=None)
        if System.NGINX in systems:
            binary = nginx.find_nginx()
            assert binary is not None
            bench.nginx = nginx.Nginx(binary, upstream_port=mock.port, work_dir=work_dir, cores=cores.system)
            stack.callback(bench.nginx.stop)
        if System.VLLM_ROUTER in systems:
            progress.show("starting vllm-router")
            python = install_vllm_router()
            bench.vllm_router = VllmRouter(python, upstream_url=mock.url, work_dir=work_dir, cores=cores.system)
            stack.callback(bench.vllm_router.stop)
        wanted = [system for system in systems if system in MUSTER_SYSTEMS]
        if wanted:
            progress.show("starting PostgreSQL and Valkey")
            bench.storage = stack.enter_context(open_storage(cores=cores.around))
            progress.show("migrating the database and starting Muster")
            bench.muster = Muster(
                storage=bench.storage,
                upstream_url=mock.url,
                work_dir=work_dir,
                cores=cores,
                systems=wanted,
                profile=profile,
            )
            stack.callback(bench.muster.stop)
        yield bench


def measure_all(arguments: argparse.Namespace, progress: Progress) -> int:
    """Measure, print and write; return 1 when a floor was missed or a run had errors."""
    systems, measures = choose(arguments.only, profile=False, peers=arguments.peers)
    if System.NGINX in systems and nginx.find_nginx() is None:
        systems.remove(System.NGINX)
        progress.show("nginx is not installed: there will be no ratios (apt-get install nginx)")
    cores = plan_cores(pin=arguments.pin)
    rounds = arguments.rounds or (QUICK_ROUNDS if arguments.quick else FULL_ROUNDS)
    steps = [measure for measure in measures for system in systems if is_measured(system, measure)]
    total_s = rounds * sum(estimate_s(measure, quick=arguments.quick) for measure in steps)
    progress.show(f"{len(systems)} systems × {len(measures)} measures × {rounds} rounds: about {total_s / 60:.1f} minutes")
    with open_bench(systems, cores, progress, profile=None) as bench:
        samples = run_plan(bench, systems=systems, measures=measures, rounds=rounds, quick=arguments.quick, show=progress.show)
        is_start_timed = Measure.START in measures and System.DIRECT in systems
        starts_s = time_starts(bench, show=progress.show) if is_start_timed else []
    progress.finish()
    figures = compute_figures(SampleSet(samples), starts_s)
    verdicts = judge_floors(figures)
    pinned = f"gateway on core {cores.system[0]}" if cores.is_pinned else "not pinned"
    print(f"\nMedians of {rounds} round(s), {pinned}. Ratios travel between machines; microseconds do not.\n")
    for part in (render_table(figures), render_problems(figures), render_verdicts(verdicts)):
        if part:
            print(part + "\n")
    if arguments.json:
        options = {"quick": arguments.quick, "rounds": rounds, "only": arguments.only, "peers": arguments.peers}
        write_json(arguments.json, figures=figures, verdicts=verdicts, samples=samples, cores=cores, arguments=options)
        print(f"written: {arguments.json}")
    return 1 if any(verdict.passed is False and verdict.floor.is_binding for verdict in verdicts) else 0


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
    if given[:1] == ["overload"]:
        from benchmarks.overload import main as measure_overload

        return measure_overload(given[1:])
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
