"""docs/state-machines.md is made from the tables in the code; ``python -m tests.unit.test_state_machines`` writes it anew."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from core.limits import NodeLimits
from governance.states import APPROVALS, FINAL_APPROVALS, FINAL_RUNS, RUNS, ApprovalState, RunState
from nodes.states import Freshness, NodeFacts, judge_availability
from runner.ledger import RunState as LedgerState
from runner.ledger import operations as ledger_operations
from runner.pool.states import TRANSITIONS, ModelState
from wire.contract import FINAL_REQUEST_STATES, OPEN_REQUEST_STATES, NodeMode, NodeStatus

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)

PAGE = Path(__file__).parents[2] / "docs" / "state-machines.md"
HEAD = """# State machines

Made from the tables in the code by `python -m tests.unit.test_state_machines`; a test fails when this page is older.
An event that is not listed for a state is refused there. States change by compare-and-set: of two changes at once one fails.
"""


def render() -> str:
    sections = [
        HEAD,
        _machine("Approval of an operation", "`governance/states.py`, `APPROVALS`", APPROVALS, ApprovalState, FINAL_APPROVALS),
        _machine("One carrying out of an operation", "`governance/states.py`, `RUNS`", RUNS, RunState, FINAL_RUNS),
        _machine(
            "A run on its runner",
            "`runner/ledger/operations.py`, `TRANSITIONS`",
            ledger_operations.TRANSITIONS,
            LedgerState,
            ledger_operations.FINAL_STATES,
        ),
        _machine("A model on a node", "`runner/pool/states.py`, `TRANSITIONS`", TRANSITIONS, ModelState, ()),
        _requests(),
        _nodes(),
    ]
    return "\n".join(sections)


def _machine(
    title: str, source: str, table: Mapping[tuple[State, Event], State], states: Iterable[str], final: Iterable[str]
) -> str:
    ends = set(final)
    rows = [f"| `{state}` | `{event}` | `{after}` |" for (state, event), after in table.items()]
    lines = [f"## {title}", "", f"Source: {source}. States: {_list(states)}."]
    if ends:
        lines.append(f"Final: {_list(state for state in states if state in ends)}.")
    return "\n".join([*lines, "", "| State | Event | Next state |", "|---|---|---|", *rows, ""])


def _requests() -> str:
    return "\n".join(
        ["## A request", "",
            "Source: `wire/contract.py`. A request is `queued` in the database before it is sent. It ends in exactly one final",
            "state, which nothing changes afterwards; the request of a gateway that died is closed as `interrupted`.", "",
            f"Open: {_list(sorted(OPEN_REQUEST_STATES))}. Final: {_list(sorted(FINAL_REQUEST_STATES))}.", ""],
    )  # fmt: skip


def _nodes() -> str:
    rows, policy = [], NodeLimits()
    for freshness, reported, held_back in itertools.product(Freshness, NodeStatus, (False, True)):
        ages = {Freshness.FRESH: 0.0, Freshness.STALE: policy.stale_after_s, Freshness.OFFLINE: policy.offline_after_s}
        facts = NodeFacts(
            age_s=ages[freshness], protocol="", reported=reported, mode=NodeMode.SPARE_ON, draining=held_back, cordoned=False,
            is_accepting_jobs=True,
        )  # fmt: skip
        status = judge_availability(facts, policy).status
        rows.append(f"| {freshness} | `{reported}` | {'yes' if held_back else 'no'} | `{status}` |")
    return "\n".join(
        ["## Status of a node", "",
            "Source: `nodes/states.py`, `judge_availability`: no stored state but a judgement of each reading.",
            "*Held back* means draining, cordoned, taken back by its owner, or accepting nothing by its own account. A node",
            "that no gateway can reach (no socket, and no URL that answers) is `offline` whatever it reports; a `stale` node",
            "gets nothing new.", "", "| Last sign of life | Reported | Held back | Status |", "|---|---|---|---|", *rows, "",
            "Beside the status, a draining or reclaimed node is *drained* once nothing runs on it any more (`drained_at`); see",
            "[operate.md](operate.md#take-a-node-out).", ""],
    )  # fmt: skip


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_the_page_of_the_state_machines_is_what_the_tables_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m tests.unit.test_state_machines"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
