"""With the control plane's database, Redis and signing keys alone: every attempt on a node at L2 is refused."""

from __future__ import annotations

import json

from benchmarks.boxcheck.findings import Section
from benchmarks.govcheck.fleet import MODEL, Fleet

REPEATED = {"the earlier approval once more", "the earlier approval with one byte changed"}
"""They name a use that was carried out: the node answers how it went then, and does nothing."""


def run(section: Section, fleet: Fleet) -> None:
    """Load and unload once with approval, then steal everything and try."""
    fleet.run("model-load", modelId=MODEL)
    fleet.run("model-unload", modelId=MODEL)
    fleet.wait(lambda: not fleet.is_loaded(MODEL) or None, within_s=30, what="the node has said that it is unloaded")
    attempts = steal(fleet)
    section.table([["attempt", "operation", "ended as", "code"], *[
        [a["name"], a["operation"], a["state"], a["code"]] for a in attempts
    ]])  # fmt: skip
    refused = [a for a in attempts if a["state"] == "failed"]
    section.judge(
        "every attempt without approval is refused by the node",
        passed=all(a["state"] == "failed" or a["name"] in REPEATED for a in attempts) and len(attempts) > 20,
        shown=f"{len(refused)} of {len(attempts)} refused, the rest answered with the outcome of then",
    )
    untouched = fleet.is_loaded("muster-tiny") and not fleet.is_loaded(MODEL)
    section.judge("nothing was loaded or unloaded", passed=untouched)
    section.judge("the node still has the policy that people signed", passed=fleet.pinned_version() == 1)
    fleet.wait(
        lambda: fleet.chat("muster-tiny").status_code == 200 or None, within_s=20, what="the model that was there answers"
    )
    section.keep(attempts=attempts)


def steal(fleet: Fleet) -> list[dict[str, str]]:
    """Run the thief in the environment of the control plane; return its attempts. Raises BenchmarkError."""
    lines = fleet.backstage("benchmarks.govcheck.thief").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{")]
