"""The audit log at 100 000 entries: seconds to verify, the status of each kind of tampering, the proof of one operation."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any  # Any: JSON

from benchmarks.boxcheck.findings import Section
from benchmarks.govcheck.fleet import MODEL, ROOT, Fleet
from wire.auditlog import entry_hash

ENTRIES = 100_000
Lines = list[dict[str, Any]]


def run(section: Section, fleet: Fleet) -> None:
    """Fill the log, verify it in the database and as an export, tamper with copies of the export, prove one operation."""
    (done,) = fleet.run("model-load", modelId=MODEL)
    op_id = str(fleet.query("SELECT operation_id FROM governance_operationrun WHERE id = %s", done["run_id"])[0][0])
    fleet.run("model-unload", modelId=MODEL)
    began = time.monotonic()
    fleet.query(
        "INSERT INTO governance_auditevent (at, actor, action, target, detail)"
        " SELECT now(), 'user:ada', 'check.fill', 't' || n, jsonb_build_object('n', n) FROM generate_series(1, %s) AS n"
        " RETURNING 1", ENTRIES,
    )  # fmt: skip
    section.line(f"  {ENTRIES} entries were appended in {time.monotonic() - began:.1f} s")
    fleet.muster("audit", "--data", str(fleet.data), "checkpoint")
    began = time.monotonic()
    said = fleet.muster("audit", "--data", str(fleet.data), "verify")
    verify_s = time.monotonic() - began
    demand = f"{ENTRIES} entries verify within 10 s, start of the program included"
    section.judge(demand, passed=verify_s < 10, shown=f"{verify_s:.1f} s")
    section.line("  " + said.strip().replace("\n", "\n  "))
    export = fleet.directory / "audit.jsonl"
    fleet.muster("audit", "--data", str(fleet.data), "export", str(export))
    _tamper(section, export)
    _prove(section, fleet, op_id)
    section.keep(entries=ENTRIES, verify_s=verify_s)


def _tamper(section: Section, export: Path) -> None:
    head, *rest = export.read_text().splitlines()
    rows: list[list[object]] = [["tampering", "status", "what the verifier says", "s"]]
    wrong: list[str] = []
    for title, status, change in TAMPERINGS:
        records = [json.loads(line) for line in rest]
        changed = export.with_name("changed.jsonl")
        changed.write_text("\n".join([head, *map(json.dumps, change(records))]) + "\n")
        began = time.monotonic()
        done = _verifier("verify", str(changed))
        rows.append([title, done.returncode, done.stdout.strip().splitlines()[0][:110], f"{time.monotonic() - began:.1f}"])
        if done.returncode != status:
            wrong.append(f"{title}: {done.returncode}")
    section.table(rows)
    section.judge("each kind of tampering has its status", passed=not wrong, shown="; ".join(wrong))


def _prove(section: Section, fleet: Fleet, op_id: str) -> None:
    bundle = fleet.directory / "proof.json"
    fleet.muster("audit", "--data", str(fleet.data), "prove", op_id, "--out", str(bundle))
    paths = _verifier("prove-check", str(bundle))
    people = subprocess.run(
        [sys.executable, "-I", str(ROOT / "wire" / "optoken" / "approval.py"), str(bundle)], capture_output=True, text=True,
        check=False, cwd="/",
    )  # fmt: skip
    section.line("  " + (paths.stdout + people.stdout).strip().replace("\n", "\n  "))
    statuses = (paths.returncode, people.returncode)
    section.judge("stand-alone verifiers accept the proof of one operation", passed=not any(statuses), shown=statuses)


def _verifier(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the stand-alone verifier, isolated from everything of ours."""
    command = [sys.executable, "-I", str(ROOT / "wire" / "auditlog.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def _entries(records: Lines) -> list[int]:
    return [place for place, record in enumerate(records) if "seq" in record]


def _nothing(records: Lines) -> Lines:
    return records


def _edited(records: Lines) -> Lines:
    place = _entries(records)[ENTRIES // 2]
    body = base64.b64decode(records[place]["body"])
    records[place]["body"] = base64.b64encode(body.replace(b"user:ada", b"user:eve")).decode()
    return records


def _missing(records: Lines) -> Lines:
    del records[_entries(records)[ENTRIES // 2]]
    return records


def _reordered(records: Lines) -> Lines:
    one, other = _entries(records)[ENTRIES // 2 : ENTRIES // 2 + 2]
    records[one], records[other] = records[other], records[one]
    return records


def _inserted(records: Lines) -> Lines:
    place = _entries(records)[ENTRIES // 2]
    return [*records[:place], dict(records[place]), *records[place:]]


def _truncated(records: Lines) -> Lines:
    last = set(_entries(records)[-2000:])
    return [record for place, record in enumerate(records) if place not in last]


def _bad_signature(records: Lines) -> Lines:
    for record in records:
        if "checkpoint" in record:
            text, _, signature = str(record["checkpoint"]).rpartition(" ")
            raw = bytearray(base64.b64decode(signature))
            raw[-1] ^= 1
            record["checkpoint"] = f"{text} {base64.b64encode(bytes(raw)).decode()}\n"
    return records


def _rewritten(records: Lines) -> Lines:
    """Edit one entry and make every hash after it fit."""
    places = _entries(_edited(records))
    previous = base64.b64decode(records[places[ENTRIES // 2]]["prev"])
    for place in places[ENTRIES // 2 :]:
        record = records[place]
        made = entry_hash(record["seq"], previous, base64.b64decode(record["body"]))
        record |= {"prev": base64.b64encode(previous).decode(), "hash": base64.b64encode(made).decode()}
        previous = made
    return records


TAMPERINGS: tuple[tuple[str, int, Callable[[Lines], Lines]], ...] = (
    ("none", 0, _nothing),
    ("an entry edited", 1, _edited),
    ("an entry taken out", 1, _missing),
    ("two entries swapped", 1, _reordered),
    ("an entry put in", 1, _inserted),
    ("the last 2000 entries cut off", 2, _truncated),
    ("a checkpoint's signature changed", 3, _bad_signature),
    ("an entry edited and the chain made to fit", 3, _rewritten),
)
