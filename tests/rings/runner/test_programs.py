"""Programs of the runner and of the auditor, each started as a process as people start it."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.audit_logs import KEY, LOG, export, make_body, make_chain, make_proof, seal, witness
from tests.fakes.ledgers import Clock
from tests.fakes.policies import ANN, BOX, FIRST, PROVEN, approve, make_batch, make_bundle
from tests.fakes.runners.governed import MODEL, admit, opened, write_key
from tests.fakes.runners.process import ROOT
from wire import auditlog
from wire.auditlog import USAGE_STATUS, Record
from wire.ids import new_uuid7
from wire.optoken import approval
from wire.optoken.approval import digest_words, policy_words
from wire.optoken.verifier import Level

PROGRAM = Path(str(approval.__file__))
SIZE = len(LOG)
Alone = Callable[..., subprocess.CompletedProcess[str]]


def run(*arguments: str | Path, cwd: Path, isolated: bool = True, program: Path = PROGRAM) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-I"] if isolated else []), "-W", "error", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=30)


def write(folder: Path, content: object) -> Path:
    path = folder / "bundle.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


@pytest.mark.parametrize("how", ["isolated", "plain", "a copy alone"])
def test_an_auditor_runs_the_program_from_anywhere(tmp_path: Path, how: str) -> None:
    program = Path(shutil.copy(PROGRAM, tmp_path / "check.py")) if how == "a copy alone" else PROGRAM
    done = run(write(tmp_path, make_bundle()), cwd=tmp_path, isolated=how != "plain", program=program)
    assert (done.returncode, done.stderr) == (0, "")
    words = policy_words(FIRST.ref.sha256)
    for told in ("APPROVED model-load", "ada, dan", "asked for by zoe", digest_words(PROVEN.digest), "version 2", words, BOX):
        assert told in done.stdout
    assert f'{BOX} says "succeeded"' in done.stdout


def test_the_program_proves_batches_and_says_which_rule_refused_or_how_it_is_called(tmp_path: Path) -> None:
    for version, told in ((1, "stops at a failure"), (2, "goes on after failures")):
        done = run(write(tmp_path, make_batch(format_version=version)), cwd=tmp_path)
        assert (done.returncode, done.stderr, told in done.stdout) == (0, "", True)
    done = run(write(tmp_path, make_bundle(proofs=approve(PROVEN, [ANN]))), cwd=tmp_path)
    assert (done.returncode, done.stdout.startswith("NOT APPROVED (too_few_approvers)")) == (1, True)
    (tmp_path / "deep").write_text("[" * 100_000)
    for arguments in ((), ("nothing",), ("deep",), (write(tmp_path, {"operation": 7}),)):
        done = run(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stdout, done.stderr.startswith("usage: ")) == (2, "", True)


@pytest.fixture
def alone(tmp_path: Path) -> Alone:
    """Run a copy of the file in an empty folder, without any package installed."""
    copy = tmp_path / "auditlog.py"
    copy.write_bytes(Path(str(auditlog.__file__)).read_bytes())

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", str(copy), *words]
        return subprocess.run(
            command, cwd=tmp_path, env={**os.environ}, capture_output=True, text=True, timeout=30, check=False
        )

    return run


def test_the_file_alone_calls_a_log_unwitnessed_that_no_checkpoint_covers_key_or_not(alone: Alone, tmp_path: Path) -> None:
    forged = make_chain(make_body(number + 100) for number in range(SIZE))
    cases: list[tuple[int, str, list[Record]]] = [
        (4, "unwitnessed: 40 entries verified", [*LOG]), (4, "no signed checkpoint covers any of it", [seal([]), *LOG]),
        (4, "show no checkpoint that the log signed", [*LOG, replace(witness(LOG), note="")]),
        (0, "entries 31 to 40 are covered by no signed checkpoint yet", [*LOG[:30], seal(LOG[:30]), *LOG[30:]]),
        (0, "good: 40 entries", [*LOG, witness(LOG)]), (1, "entry 6: missing", [*LOG[:5], *LOG[6:]]),
        (2, "", [*LOG[:30], seal(LOG)]), (3, "", [*forged, seal(LOG)]),
    ]  # fmt: skip
    for status, words, records in cases:
        (tmp_path / "log").write_text(export(records))
        for key in ([], ["--key", str(KEY)]) if status in {0, 1, 4} else (["--key", str(KEY)],):
            done = alone("verify", "log", *key)
            assert (done.returncode, words in done.stdout, not done.stderr) == (status, True, bool(key)), done
    (tmp_path / "kept").write_text(seal(LOG).note)
    for entries, status in ((LOG, 0), (LOG[:30], 2)):
        (tmp_path / "log").write_text(export(entries))
        assert alone("verify", "log", "--checkpoint", "kept").returncode == status


def test_the_file_alone_checks_a_proof_and_never_mistakes_a_typing_error_for_a_short_log(alone: Alone, tmp_path: Path) -> None:
    for changes, status in (({}, 0), ({"opId": "op-4"}, 1)):
        (tmp_path / "proof").write_text(json.dumps(make_proof() | changes))
        assert alone("prove-check", "proof").returncode == status
    for words in (["verify"], ["verify", "nowhere"], ["judge", "proof"], ["verify", "proof"]):
        assert alone(*words).returncode == USAGE_STATUS


def run_sign(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "runner.operations.sign", *arguments],
        capture_output=True, text=True, check=False, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=30,
    )  # fmt: skip


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    return write_key(tmp_path / "model-api.key")


SIGN = ("--operation", "model-load", "--model", MODEL, "--signer", "a", "--signer", "b")


@pytest.mark.parametrize(("level", "extra"), [(Level.L0, ()), (Level.L1, ("--base64url",))])
async def test_the_signing_program_makes_tokens(key_file: Path, tmp_path: Path, level: Level, extra: tuple[str, ...]) -> None:
    params: dict[str, object] = {"modelId": MODEL, "maxContextLength": 4096, "overrides": {"a": [1]}}
    given = ("--level", level, "--runner-id", "box-7", "--param", "maxContextLength=4096", "--param", 'overrides={"a": [1]}')
    signed = await asyncio.to_thread(run_sign, "--key", str(key_file), *SIGN, *given, *extra)
    assert (signed.returncode, signed.stderr) == (0, "")
    async with opened(key_file, tmp_path / "data", level=level, clock=Clock(time.time())) as gate:
        admitted = await admit(gate, signed.stdout, params=params)
    assert (admitted.level, admitted.signers) == (level, ("a", "b"))


def test_programs_say_in_one_line_what_they_cannot_do(key_file: Path) -> None:
    bound = ("--level", "L1", "--runner-id", "x", "--param")
    for arguments, words in (
        (("--level", "L1"), "--runner-id"), (("--level", "L2"), "proofs of approvers"), ((*bound, "a"), "NAME=VALUE"),
        ((*bound, "a=0.5"), "float"), (("--key", "/missing.key"), "missing.key"),
    ):  # fmt: skip
        signed = run_sign("--key", str(key_file), *SIGN, *arguments)
        assert (signed.returncode, signed.stdout, words in signed.stderr) == (2, "", True)
    command = [sys.executable, "-m", "runner", "--gateway", "nonsense", "--token", "msw_x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("runner: --gateway must look like")


def draw(queue: multiprocessing.queues.SimpleQueue[int]) -> None:
    queue.put(new_uuid7().int)


def test_a_forked_process_draws_other_numbers() -> None:
    new_uuid7()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=draw, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    drawn = [queue.get() for _ in children]
    for child in children:
        child.join(10)
    assert len({value & ((1 << 62) - 1) for value in [*drawn, new_uuid7().int]}) == 3
