"""What Muster takes while nobody asks: CPU per second and memory of processes that are left alone."""

from __future__ import annotations

import subprocess
import time

from benchmarks.errors import BenchmarkError
from benchmarks.figures import Reading
from benchmarks.govcheck.fleet import open_fleet
from benchmarks.plan import IDLE_S, IDLE_SETTLE_S, QUICK_IDLE_S, QUICK_IDLE_SETTLE_S, Measure, System
from benchmarks.processes import tree_cpu_s, tree_pss_bytes


def measure_rest(pids: dict[str, int], *, quick: bool) -> dict[str, float]:
    """Leave process trees alone for a while and return what each took, as figures.

    ``pids``: by the ending of the figures' names (``""`` or ``"_all"``) the root of a tree. CPU in ms per second; PSS in MB,
    left out where the system does not tell.
    """
    settle_s, seconds = (QUICK_IDLE_SETTLE_S, QUICK_IDLE_S) if quick else (IDLE_SETTLE_S, IDLE_S)
    time.sleep(settle_s)
    began, before = time.monotonic(), {name: tree_cpu_s(pid) for name, pid in pids.items()}
    time.sleep(seconds)
    took = {name: tree_cpu_s(pid) - before[name] for name, pid in pids.items()}
    passed_s = time.monotonic() - began
    figures = {f"idle{name}_ms_per_s": cpu_s * 1e3 / passed_s for name, cpu_s in took.items()}
    for name, pid in pids.items():
        pss = tree_pss_bytes(pid)
        if pss is not None:
            figures[f"pss{name}_mb"] = pss / 1e6
    return figures


def measure_installation(*, quick: bool) -> Reading:
    """Run ``./muster up`` with its node, which nobody asks, and return what its gateway and all of it take.

    It is started once before: whoever loads a checkout for the first time compiles it, and keeps 30 MB of that.
    """
    try:
        with open_fleet():
            pass
        with open_fleet() as fleet:
            gateway = fleet.part("gateway")
            if gateway is None:
                raise BenchmarkError("./muster up has no gateway")
            figures = measure_rest({"": gateway.pid, "_all": fleet.process.pid}, quick=quick)
            if not gateway.is_running():
                raise BenchmarkError("the gateway of ./muster up ended")
    except (BenchmarkError, subprocess.TimeoutExpired) as error:
        return Reading(System.UP, Measure.IDLE, problem=str(error))
    return Reading(System.UP, Measure.IDLE, figures)
