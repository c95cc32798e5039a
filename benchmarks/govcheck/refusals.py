"""What is refused on the way to an approval and by the node, with the words that people see."""

from __future__ import annotations

from typing import Any  # Any: JSON

from benchmarks.boxcheck.findings import Section
from benchmarks.govcheck.fleet import MODEL, Fleet, Person
from wire.optoken.approval import decode_bytes, encode_bytes


def run(section: Section, fleet: Fleet) -> None:
    """Try each thing that must not work over the REST API."""
    ana, ben, cleo = fleet.people[:3]
    rows: list[list[object]] = [["attempt", "status", "rule", "words"]]
    wrong: list[str] = []

    def refused(title: str, operation: dict[str, Any], person: Person, proof: dict[str, str], rule: str) -> None:
        path = f"/api/v1/operations/{operation['op_id']}/approvals"
        reply = fleet.client.post(path, json={"proof": proof}, headers=person.headers)
        error = reply.json().get("error", {})
        said = error.get("rule") or error.get("code")
        rows.append([title, reply.status_code, said, error.get("message")])
        if said != rule:
            wrong.append(f"{title}: {said}")

    asked = dict(fleet.call("POST", "/api/v1/operations", {
        "operation": "model-load", "targets": [fleet.runner_id], "params": {"modelId": MODEL}, "reason": "to be refused",
    }))  # fmt: skip
    other = fleet.propose("model-unload", modelId=MODEL)
    refused("the signature over another statement", asked, ben, ben.sign(other["statement_b64"]), "bad_proof_signature")
    raw = bytearray(decode_bytes(asked["statement_b64"]))
    raw[raw.index(b'"maxUses":1') + 10] = ord("2")
    refused(
        "the signature over the statement with one byte changed",
        asked,
        ben,
        ben.sign(encode_bytes(bytes(raw))),
        "bad_proof_signature",
    )
    refused("the key of another person", asked, ben, {**ben.sign(asked["statement_b64"]), "approver": cleo.name}, "unknown_key")
    fleet.approve_as(asked, ana)
    refused("the same person twice", asked, ana, ana.sign(asked["statement_b64"]), "duplicate_proof")
    state = fleet.call("GET", f"/api/v1/operations/{asked['op_id']}")["state"]
    section.judge("M-1 approvals do not run it", passed=state == "pending", shown=state)
    fleet.approve_as(asked, ben)
    fleet.await_runs(asked["op_id"])
    refused("an approval after it was carried out", asked, cleo, cleo.sign(asked["statement_b64"]), "STATE_CHANGED")
    fleet.run("model-unload", modelId=MODEL)
    section.table(rows)
    section.judge("each is refused by the rule that is meant for it", passed=not wrong, shown="; ".join(wrong))
    section.keep(refusals=[dict(zip(map(str, rows[0]), row, strict=True)) for row in rows[1:]])
