"""The verifier as a program: one file that an auditor copies away and runs."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.passkeys import KeyFile
from tests.fakes.policies import (
    NOW,
    approve,
    make_change,
    make_link,
    make_people,
    make_policy_bytes,
    make_statement,
)
from wire.optoken import approval
from wire.optoken.approval import (
    ApprovalError,
    Rule,
    canonical,
    decode_bytes,
    digest_words,
    encode_bytes,
    policy_words,
    read_policy,
    read_statement,
    verify_bundle,
    verify_receipts,
)
from wire.optoken.identity import make_runner_id
from wire.optoken.receipt import Receipt, digest_result, sign_receipt

PROGRAM = Path(approval.__file__)
ADA, BOB, CLEO, DAN = PEOPLE = make_people(4)
FIRST_RAW = make_policy_bytes(PEOPLE[:3])
FIRST = read_policy(FIRST_RAW)
SECOND_RAW = make_policy_bytes(PEOPLE, version=2, previous=FIRST.ref.sha256)
SECOND = read_policy(SECOND_RAW)
BOX_KEY, OTHER_KEY = KeyFile(), KeyFile()
BOX = make_runner_id("box-7", BOX_KEY.public_key)
STATEMENT = make_statement(SECOND, targets=[BOX])


def make_receipt(key: KeyFile = BOX_KEY, **changes: Any) -> dict[str, str]:
    fields: dict[str, Any] = {
        "op_id": "op-1", "use": 1, "statement_digest": STATEMENT.digest.hex(), "runner_id": BOX, "operation": "model-load",
        "outcome": "succeeded", "result_digest": digest_result({}), "fence": 7, "started_at": NOW, "ended_at": NOW + 60,
    }  # fmt: skip
    text = sign_receipt(key.private_key, Receipt(**(fields | changes)))
    return {"receipt": text, "publicKey": encode_bytes(key.public_key)}


def make_bundle(**changes: Any) -> dict[str, Any]:
    begin, change = make_change(FIRST_RAW, under=None), make_change(SECOND_RAW, under=FIRST)
    return {
        "policies": [
            make_link(FIRST_RAW, begin, approve(begin, [ADA, BOB])),
            make_link(SECOND_RAW, change, approve(change, [BOB, CLEO])),
        ],
        "statement": encode_bytes(STATEMENT.raw),
        "proofs": approve(STATEMENT, [ADA, DAN]),
        "receipts": [make_receipt()],
        **changes,
    }


def run(*arguments: str | Path, cwd: Path, isolated: bool = True, program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-I"] if isolated else []), "-W", "error", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=30)


def write(folder: Path, content: object) -> Path:
    path = folder / "bundle.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_the_program_imports_nothing_of_ours() -> None:
    tree = ast.parse(PROGRAM.read_text(encoding="utf-8"))
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in modules} - sys.stdlib_module_names == {"cryptography"}


@pytest.mark.parametrize("isolated", [True, False], ids=["isolated", "plain"])
def test_an_auditor_runs_the_program_from_anywhere(tmp_path: Path, isolated: bool) -> None:
    done = run(write(tmp_path, make_bundle()), cwd=tmp_path, isolated=isolated)
    assert (done.returncode, done.stderr) == (0, "")
    words = policy_words(FIRST.ref.sha256)
    for told in (
        "APPROVED model-load",
        "ada, dan",
        "asked for by zoe",
        digest_words(STATEMENT.digest),
        "version 2",
        words,
        BOX,
    ):
        assert told in done.stdout
    assert f'{BOX} says "succeeded"' in done.stdout


def test_a_copy_of_the_program_alone_is_enough(tmp_path: Path) -> None:
    copy = Path(shutil.copy(PROGRAM, tmp_path / "check.py"))
    done = run(write(tmp_path, {"operation": make_bundle()}), cwd=tmp_path, program=copy)
    assert (done.returncode, done.stderr) == (0, "")


def make_batch(*, format_version: int) -> dict[str, Any]:
    """The evidence of an operation on two boxes that was to go on after failures, or one of the first format."""
    made = make_statement(SECOND, targets=[BOX, "box-8"], stops_on_failure=False)
    if format_version == 1:
        members = {name: value for name, value in json.loads(made.raw).items() if name != "stopsOnFailure"} | {"v": 1}
        made = read_statement(canonical(members))
    return make_bundle(statement=encode_bytes(made.raw), proofs=approve(made, [ADA, DAN]), receipts=[])


@pytest.mark.parametrize(
    ("format_version", "told"), [(1, "stops at a failure"), (2, "goes on after failures")], ids=["first", "second"]
)
def test_the_program_proves_batches_of_both_formats(tmp_path: Path, format_version: int, told: str) -> None:
    done = run(write(tmp_path, make_batch(format_version=format_version)), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert told in done.stdout


def test_what_a_failure_does_to_a_batch_cannot_be_changed_after_it_was_signed() -> None:
    bundle = make_batch(format_version=2)
    changed = canonical(json.loads(decode_bytes(bundle["statement"])) | {"stopsOnFailure": True})
    with pytest.raises(ApprovalError) as caught:
        verify_bundle(bundle | {"statement": encode_bytes(changed)})
    assert caught.value.rule is Rule.WRONG_CHALLENGE


def test_the_program_says_which_rule_refused(tmp_path: Path) -> None:
    done = run(write(tmp_path, make_bundle(proofs=approve(STATEMENT, [ADA]))), cwd=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("NOT APPROVED (too_few_approvers)")


def test_the_program_says_how_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no JSON")
    (tmp_path / "deep").write_text("[" * 100_000)
    for arguments in ((), ("nothing",), ("text",), ("deep",), (write(tmp_path, []),), (write(tmp_path, {"operation": 7}),)):
        done = run(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("usage: ")


BUNDLE_ROWS: dict[str, tuple[dict[str, Any], Rule]] = {
    "no policies": ({"policies": []}, Rule.WRONG_POLICY),
    "policies as text": ({"policies": "x"}, Rule.BAD_POLICY),
    "policies without the first": ({"policies": make_bundle()["policies"][1:]}, Rule.WRONG_POLICY),
    "policies without the one that is named": ({"policies": make_bundle()["policies"][:1]}, Rule.WRONG_POLICY),
    "proofs left out": ({"proofs": None}, Rule.WRONG_POLICY),
    "statement left out": ({"statement": None}, Rule.BAD_PROOF),
    "statement changed": (
        {"statement": encode_bytes(STATEMENT.raw.replace(b'"requestedBy":"zoe"', b'"requestedBy":"zo3"'))},
        Rule.WRONG_CHALLENGE,
    ),
    "requester among the approvers": (
        {"statement": encode_bytes(STATEMENT.raw.replace(b'"requestedBy":"zoe"', b'"requestedBy":"ada"'))},
        Rule.WRONG_CHALLENGE,
    ),
}


@pytest.mark.parametrize(("changes", "rule"), BUNDLE_ROWS.values(), ids=BUNDLE_ROWS)
def test_evidence_that_does_not_hold_is_refused(changes: dict[str, Any], rule: Rule) -> None:
    with pytest.raises(ApprovalError) as caught:
        verify_bundle(make_bundle(**changes))
    assert caught.value.rule is rule


def test_evidence_names_the_policy_the_statement_and_who_approved() -> None:
    policy, statement, verdict = verify_bundle(make_bundle())
    assert (policy, statement, verdict.approved_by) == (SECOND, STATEMENT, ("ada", "dan"))
    assert [receipt["outcome"] for receipt in verify_receipts(make_bundle(), statement)] == ["succeeded"]
    assert verify_receipts({}, statement) == []


RECEIPT_ROWS: dict[str, Any] = {
    "of another operation": [make_receipt(statement_digest="ab" * 32)],
    "of no statement": [make_receipt(statement_digest="")],
    "of a box that was not asked": [
        make_receipt(OTHER_KEY, runner_id=make_runner_id("box-8", OTHER_KEY.public_key)),
    ],
    "signed by another box": [make_receipt(KeyFile())],
    "checked with another key": [{**make_receipt(), "publicKey": encode_bytes(KeyFile().public_key)}],
    "checked with a passkey": [{**make_receipt(), "publicKey": encode_bytes(ADA.passkey.public_key)}],
    "not a list": {"receipt": "x"},
    "null": [None],
    "with a member more": [{**make_receipt(), "note": "x"}],
}


@pytest.mark.parametrize("receipts", RECEIPT_ROWS.values(), ids=RECEIPT_ROWS)
def test_receipts_of_others_are_refused(receipts: Any) -> None:
    with pytest.raises(ApprovalError) as caught:
        verify_receipts(make_bundle(receipts=receipts), STATEMENT)
    assert caught.value.rule in {Rule.BAD_RECEIPT, Rule.BAD_PROOF}
