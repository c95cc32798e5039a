"""docs/state-machines.md is made from the tables in the code; ``python -m tests.unit.test_state_machines`` writes it anew."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from core.limits import NodeLimits
from governance.states import APPROVALS, FINAL_APPROVALS, FINAL_RUNS, RUNS
from nodes.states import Freshness, NodeFacts, judge_availability
from runner.ledger import ledger
from runner.pool.models import TRANSITIONS
from wire.contract import FINAL_REQUEST_STATES, OPEN_REQUEST_STATES, NodeMode, NodeStatus

State = TypeVar("State", bound=str)
Event = TypeVar("Event", bound=str)

PAGE = Path(__file__).parents[2] / "docs" / "state-machines.md"
HEAD = """# State machines

`python -m tests.unit.test_state_machines` writes this page from the tables in the code. A state refuses an event that its row
does not name. States change by compare-and-set: of two changes at once one fails.
"""


def render() -> str:
    sections = [
        HEAD,
        _machine("Approval of an operation", "`governance/states.py`, `APPROVALS`", APPROVALS, FINAL_APPROVALS),
        _machine("One carrying out of an operation", "`governance/states.py`, `RUNS`", RUNS, FINAL_RUNS),
        _machine(
            "A run on its runner",
            "`runner/ledger/ledger.py`, `TRANSITIONS`",
            ledger.TRANSITIONS,
            ledger.FINAL_STATES,
        ),
        _machine("A model on a node", "`runner/pool/models.py`, `TRANSITIONS`", TRANSITIONS, frozenset()),
        _requests(),
        _nodes(),
    ]
    return "\n".join(sections)


def _machine(title: str, source: str, table: Mapping[tuple[State, Event], State], final: frozenset[State]) -> str:
    changes: dict[str, list[str]] = {state: [] for state, _ in table}
    for (state, event), after in table.items():
        changes[state].append(f"`{event}` → `{after}`")
    rows = [f"| `{state}` | {', '.join(named)} |" for state, named in changes.items()]
    ends = f" Final: {_list(sorted(final))}." if final else ""
    return "\n".join(
        [f"## {title}", "", f"Source: {source}.{ends}", "", "| State | Event → next state |", "|---|---|", *rows, ""]
    )


def _requests() -> str:
    return "\n".join(
        ["## A request", "",
            "Source: `wire/contract.py`. A request is `queued` in the database before it is sent, and ends in exactly one",
            "final state. The request of a gateway that died is closed as `interrupted`.", "",
            f"Open: {_list(sorted(OPEN_REQUEST_STATES))}. Final: {_list(sorted(FINAL_REQUEST_STATES))}.", ""],
    )  # fmt: skip


def _nodes() -> str:
    heard = [freshness for freshness in Freshness if freshness is not Freshness.OFFLINE]
    cases = [(freshness, is_held) for freshness in heard for is_held in (False, True)]
    rows = [" | ".join([f"| `{told}`", *(f"`{_judge(told, *case)}`" for case in cases)]) + " |" for told in NodeStatus]
    columns = " | ".join(f"{freshness}, held back" if is_held else str(freshness) for freshness, is_held in cases)
    return "\n".join(
        ["## Status of a node", "",
            "Source: `nodes/states.py`, `judge_availability`: no stored state but a judgement of each reading, by what the",
            "node reported and when. *Held back* means draining, cordoned, taken back by its owner, or accepting nothing by",
            "its own account. A `stale` node gets nothing new. A silent or unreachable node is `offline`.", "",
            f"| Reported | {columns} |", "|---" * (len(cases) + 1) + "|", *rows, "",
            "Once nothing runs on a draining or reclaimed node it is also [*drained*](operate.md#take-a-node-out).", ""],
    )  # fmt: skip


def _judge(reported: NodeStatus, freshness: Freshness, is_held: bool) -> NodeStatus:
    policy = NodeLimits()
    ages = {Freshness.FRESH: 0.0, Freshness.STALE: policy.stale_after_s, Freshness.OFFLINE: policy.offline_after_s}
    facts = NodeFacts(
        age_s=ages[freshness], protocol="", reported=reported, mode=NodeMode.SPARE_ON, draining=is_held, cordoned=False,
        is_accepting_jobs=True,
    )  # fmt: skip
    return judge_availability(facts, policy).status


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_the_page_of_the_state_machines_is_what_the_tables_say() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m tests.unit.test_state_machines"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
