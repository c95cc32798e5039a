"""Evidence of one operation as an auditor gets it: the chain of policies, the statement, the proofs and the receipts."""

from __future__ import annotations

import json
from typing import Any

from tests.fakes.passkeys import KeyFile
from tests.fakes.policies import NOW, approve, make_change, make_link, make_people, make_policy_bytes, make_statement
from wire.optoken.approval import canonical, encode_bytes, read_policy, read_statement
from wire.optoken.identity import make_runner_id
from wire.optoken.receipt import Receipt, digest_result, sign_receipt

ANN, BOB, CLEO, DAN = make_people(4)
FIRST_RAW = make_policy_bytes([ANN, BOB, CLEO])
FIRST = read_policy(FIRST_RAW)
SECOND_RAW = make_policy_bytes([ANN, BOB, CLEO, DAN], version=2, previous=FIRST.ref.sha256)
SECOND = read_policy(SECOND_RAW)
BOX_KEY, OTHER_BOX_KEY = KeyFile(), KeyFile()
BOX = make_runner_id("box-7", BOX_KEY.public_key)
PROVEN = make_statement(SECOND, targets=[BOX])


def make_receipt(key: KeyFile = BOX_KEY, **changes: Any) -> dict[str, str]:
    fields: dict[str, Any] = {
        "op_id": "op-1", "use": 1, "statement_digest": PROVEN.digest.hex(), "runner_id": BOX, "operation": "model-load",
        "outcome": "succeeded", "result_digest": digest_result({}), "fence": 7, "started_at": NOW, "ended_at": NOW + 60,
    }  # fmt: skip
    text = sign_receipt(key.private_key, Receipt(**(fields | changes)))
    return {"receipt": text, "publicKey": encode_bytes(key.public_key)}


def make_bundle(**changes: Any) -> dict[str, Any]:
    begin, change = make_change(FIRST_RAW, under=None), make_change(SECOND_RAW, under=FIRST)
    return {
        "policies": [
            make_link(FIRST_RAW, begin, approve(begin, [ANN, BOB])),
            make_link(SECOND_RAW, change, approve(change, [BOB, CLEO])),
        ],
        "statement": encode_bytes(PROVEN.raw),
        "proofs": approve(PROVEN, [ANN, DAN]),
        "receipts": [make_receipt()],
        **changes,
    }


def make_batch(*, format_version: int) -> dict[str, Any]:
    """The evidence of an operation on two boxes that was to go on after failures, or one of the first format."""
    made = make_statement(SECOND, targets=[BOX, "box-8"], stops_on_failure=False)
    if format_version == 1:
        members = {name: value for name, value in json.loads(made.raw).items() if name != "stopsOnFailure"} | {"v": 1}
        made = read_statement(canonical(members))
    return make_bundle(statement=encode_bytes(made.raw), proofs=approve(made, [ANN, DAN]), receipts=[])
