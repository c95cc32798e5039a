"""kill -9 of every part at eight points in the life of an operation: carried out exactly once, none lost, how soon it ends."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any  # Any: JSON

import psutil

from benchmarks.boxcheck.findings import Section
from benchmarks.errors import BenchmarkError
from benchmarks.govcheck.fleet import FINAL, MODEL, Fleet
from benchmarks.runner import Progress

VICTIMS = ("worker", "web", "valkey", "postgres", "runner")
END_S, CATCH_S = 90.0, 60.0
CATCHES = 5


@dataclass
class Case:
    """One kill. ``asked``: the operation, once it was asked for."""

    fleet: Fleet
    victim: str
    asked: dict[str, Any] = field(default_factory=dict)
    killed_at: float = 0.0
    """Unix seconds."""

    @property
    def op_id(self) -> str:
        """Of the operation."""
        return str(self.asked["op_id"])

    def ask(self, *, begins_in_s: float = 0.0) -> None:
        """Ask for the load."""
        self.asked = self.fleet.propose("model-load", modelId=MODEL, begins_in_s=begins_in_s)

    def sign(self, *people: int) -> None:
        """Have people approve."""
        for index in people:
            self.fleet.approve_patiently(self.asked, self.fleet.people[index])

    def kill(self) -> None:
        """Kill the victim, hard."""
        process = self.fleet.part(self.victim)
        assert process is not None, f"{self.victim} does not run"
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        self.killed_at = time.time()

    def run_state(self) -> str:
        """Return the state of the run, "" before there is one."""
        text = "SELECT state FROM governance_operationrun WHERE operation_id = %s"
        rows = self.fleet.query(text, self.op_id.removeprefix("op_"))
        return str(rows[0][0]) if rows else ""

    def await_state(self, *states: str) -> None:
        """Wait until the run is in one of these states."""
        self.fleet.wait(lambda: self.run_state() in states, within_s=CATCH_S, what=f"the run is {states}")


@contextlib.contextmanager
def stopped(process: psutil.Process | None) -> Iterator[None]:
    """Stop a process for the length of the block; it may be dead by the end."""
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def _pending(case: Case) -> None:
    case.ask()
    case.kill()
    case.sign(0, 1)


def _half_approved(case: Case) -> None:
    case.ask()
    case.sign(0)
    case.kill()
    case.sign(1)


def _last_approval(case: Case) -> None:
    case.ask()
    case.sign(0, 1)
    case.kill()


def _queued(case: Case) -> None:
    case.ask(begins_in_s=4)
    case.sign(0, 1)
    case.kill()


def _on_its_way(case: Case) -> None:
    with stopped(case.fleet.part("gateway")):
        case.ask()
        case.sign(0, 1)
        case.await_state("dispatched")
        case.kill()


def _working(case: Case) -> None:
    with _caught_engine(case):
        case.kill()


def _done_unheard(case: Case) -> None:
    with _caught_engine(case) as engine:
        gateway = case.fleet.part("gateway")
        with stopped(gateway):
            engine.send_signal(signal.SIGCONT)
            case.fleet.wait(
                lambda: any(outcome for _, outcome in case.fleet.ledger(case.op_id)), within_s=CATCH_S, what="the node is done"
            )
            case.kill()


def _ended(case: Case) -> None:
    case.ask()
    case.sign(0, 1)
    case.await_state("succeeded")
    case.kill()


@contextlib.contextmanager
def _caught_engine(case: Case) -> Iterator[psutil.Process]:
    """Ask for the load, and hold the engine that the node starts for it until the end of the block.

    An engine that had loaded before it could be held is unloaded, and the load asked for once more.
    """
    for _ in range(CATCHES):
        engine = _await_engine(case)
        with stopped(engine):
            case.await_state("executing", "dispatched", *FINAL)
            if case.run_state() not in FINAL:
                yield engine
                return
        case.fleet.run("model-unload", within_s=END_S, modelId=MODEL)
    raise BenchmarkError(f"{CATCHES} times the engine had loaded before it could be held")


def _await_engine(case: Case) -> psutil.Process:
    runner = case.fleet.part("runner")
    assert runner is not None
    before = {child.pid for child in runner.children(recursive=True)}
    case.ask()
    case.sign(0, 1)
    give_up_at = time.monotonic() + CATCH_S
    while not (new := [child for child in runner.children(recursive=True) if child.pid not in before]):
        assert time.monotonic() < give_up_at, "no engine was started"
        time.sleep(0.002)
    return new[-1]


POINTS: dict[str, Callable[[Case], None]] = {
    "asked for": _pending,
    "one of two approved": _half_approved,
    "last approval kept": _last_approval,
    "waiting for its window": _queued,
    "sent, node not reached": _on_its_way,
    "node works on it": _working,
    "node done, nobody heard": _done_unheard,
    "end recorded": _ended,
}


EVERY = tuple((victim, point) for victim in VICTIMS for point in POINTS)


def run(section: Section, fleet: Fleet, progress: Progress, *, cases: Sequence[tuple[str, str]] = EVERY) -> None:
    """Kill each victim at each point, or as ``cases`` say."""
    rows: list[list[object]] = [["killed", "when", "ended as", "model", "begun on the node", "attempts", "s to the end"]]
    faults: list[str] = []
    slowest = 0.0
    for number, (victim, point) in enumerate(cases):
        progress.show(f"kills: {number + 1} of {len(cases)}, {victim}: {point}")
        row, found = _judge(Case(fleet, victim), point)
        section.line("  " + "  ".join(map(str, row)))
        rows.append(row)
        faults += found
        slowest = max(slowest, float(str(row[-1])))
    section.table(rows)
    section.judge(
        "each operation was carried out exactly once, or says that it was cut off", passed=not faults, shown="; ".join(faults)
    )
    section.judge("none took longer than a minute to end", passed=slowest < 60, shown=f"at most {slowest:.1f} s after the kill")
    verified = fleet.muster("audit", "--data", str(fleet.data), "verify")
    section.judge("the audit chain is whole", passed="good" in verified.lower(), shown=verified.strip().splitlines()[-1][:120])
    section.keep(kills=[dict(zip(map(str, rows[0]), row, strict=True)) for row in rows[1:]])


def _judge(case: Case, point: str) -> tuple[list[object], list[str]]:
    """Make one case; return its line and what is wrong with it. The model is unloaded before and after."""
    fleet = case.fleet
    # The launcher waits longer before it starts a part again that has died often.
    fleet.wait(lambda: fleet.part(case.victim), within_s=END_S, what=f"{case.victim} runs again")
    POINTS[point](case)
    (run,) = fleet.await_runs(case.op_id, within_s=END_S)
    took_s = max(0.0, datetime.fromisoformat(run["ended_at"]).timestamp() - case.killed_at)
    begun = fleet.ledger(case.op_id)
    (unloaded,) = fleet.run("model-unload", within_s=END_S, modelId=MODEL)
    was_loaded = bool(unloaded["result"].get("wasLoaded"))
    faults = []
    if run["state"] not in {"succeeded", "resolved"}:
        faults.append(f"{case.victim}, {point}: {run['state']} {run['code']} {run['message']}")
    if [uses for uses, _ in begun] != [1]:
        faults.append(f"{case.victim}, {point}: begun {begun}")
    # A node that was started again has what its owner configured; what an operation loaded before is gone with the process.
    if was_loaded != (run["state"] == "succeeded") and case.victim != "runner":
        faults.append(f"{case.victim}, {point}: {run['state']}, but the model was {'' if was_loaded else 'not '}loaded")
    fleet.wait(lambda: not fleet.is_loaded(MODEL) or None, within_s=CATCH_S, what="unloaded again")
    shown = "loaded" if was_loaded else "not loaded"
    return [case.victim, point, run["state"], shown, sum(u for u, _ in begun), run["attempt"], f"{took_s:.1f}"], faults
