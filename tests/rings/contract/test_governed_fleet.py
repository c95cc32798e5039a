"""Governed operations on a whole installation with its real node: refused, done once whatever is killed, safe from a thief.

A few points of ``benchmarks.govcheck``, which makes all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.boxcheck.findings import Section
from benchmarks.govcheck import kills, refusals, stolen
from benchmarks.govcheck.fleet import MODEL, Fleet, open_fleet
from benchmarks.runner import Progress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = (
    ("worker", "last approval kept"), ("web", "last approval kept"), ("valkey", "sent, node not reached"),
    ("postgres", "node done, nobody heard"), ("runner", "node works on it"),
)  # fmt: skip


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with open_fleet() as running:
        running.enrol()
        yield running


@pytest.fixture
def section() -> Section:
    return Section("check", lambda text: print(text, flush=True))


def test_an_approved_load_serves_and_an_approved_unload_ends_it(fleet: Fleet) -> None:
    (loaded,) = fleet.run("model-load", modelId=MODEL)
    assert (loaded["state"], loaded["attempt"]) == ("succeeded", 1)
    fleet.wait(lambda: fleet.chat(MODEL).status_code == 200 or None, within_s=60, what="the model answers")
    (unloaded,) = fleet.run("model-unload", modelId=MODEL)
    assert unloaded["result"]["wasLoaded"] is True
    fleet.wait(lambda: fleet.chat(MODEL).status_code != 200 or None, within_s=60, what="the model is gone")


def kill_runner(fleet: Fleet) -> None:
    """kill -9, and wait until the installation runs another one that has connected."""
    runner = fleet.part("runner")
    assert runner is not None
    connects = "SELECT count(*) FROM governance_auditevent WHERE action = 'node.connect'"
    (before,) = fleet.query(connects)
    runner.kill()
    fleet.wait(lambda: fleet.query(connects)[0] > before or None, within_s=60, what="the runner connected again")


def test_a_kept_model_serves_after_its_runner_is_killed_and_one_that_is_not_is_said_to_be_gone(fleet: Fleet) -> None:
    (kept,) = fleet.run("model-load", modelId=MODEL, keepLoaded=True)
    assert (kept["state"], kept["result"]["keptLoaded"]) == ("succeeded", True)
    kill_runner(fleet)
    fleet.wait(lambda: fleet.chat(MODEL).status_code == 200 or None, within_s=60, what="the kept model answers again")
    (unloaded,) = fleet.run("model-unload", modelId=MODEL)
    assert unloaded["state"] == "succeeded"
    (plain,) = fleet.run("model-load", modelId=MODEL)
    assert plain["state"] == "succeeded"
    assert "any more" not in fleet.backstage("benchmarks.govcheck.problems")
    kill_runner(fleet)

    def read_loss() -> str | None:
        words = fleet.backstage("benchmarks.govcheck.problems")
        return words if "any more" in words else None

    said = fleet.wait(read_loss, within_s=60, what="Overview names the model")
    assert f"{MODEL} was loaded on local and is not any more." in said
    assert "Propose it again: /approvals/propose?operation=model-load&target=local%23" in said


def test_what_must_not_count_is_refused_with_its_rule(fleet: Fleet, section: Section) -> None:
    refusals.run(section, fleet)
    assert section.passed, section.findings


def test_whatever_is_killed_an_operation_is_carried_out_once(fleet: Fleet, section: Section) -> None:
    kills.run(section, fleet, Progress(), cases=CASES)
    assert section.passed, section.findings


def test_a_stolen_control_plane_cannot_operate_the_box(fleet: Fleet, section: Section) -> None:
    stolen.run(section, fleet)
    assert section.passed, section.findings
