"""./muster trust: what the owner of a box does in its data folder, and what it refuses."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from runner.operations import trust
from runner.operations.fingerprint import TRUSTED_NAME, is_asked_to_forget, read_trusted
from runner.operations.op_keys import FOLDER_NAME, OpKeys
from runner.operations.policies import PolicyStore
from tests.fakes.approvals import Fleet
from tests.fakes.ledgers import T0, opened

WORDS = "zusoz-linog-kipaz-hupup-kofij-vumas-lusab-babad-gutih-tugad-bufol-zizin"


async def pin(data: Path, fleet: Fleet) -> None:
    """Leave a box that follows this policy."""
    async with opened(data) as ledger:
        await ledger.write_fact("box", json.dumps({"runnerId": "attic#abc", "level": "L2"}))
        await ledger.write_fact("witness", json.dumps({"origin": "example.org/audit", "size": 7, "root": "AAAA"}))
        store = PolicyStore(ledger, lambda: fleet.words)
        await store.offer(fleet.links)


def run(data: Path, *arguments: str) -> int:
    return trust.main([*arguments, "--data", str(data)])


@pytest.mark.parametrize(
    "typed", [[WORDS], WORDS.split("-"), [WORDS.replace("-", " ").upper()]], ids=["one word", "twelve words", "capitals"]
)
def test_words_are_written_down_in_one_form(tmp_path: Path, typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, *typed) == 0
    assert read_trusted(tmp_path) == WORDS
    assert (tmp_path / TRUSTED_NAME).stat().st_mode & 0o777 == 0o600
    assert "within 5 seconds" in capsys.readouterr().out


def test_a_full_fingerprint_is_taken_too(tmp_path: Path) -> None:
    digits = hashlib.sha256(b"a policy").hexdigest()
    assert run(tmp_path, digits.upper()) == 0
    assert read_trusted(tmp_path) == digits


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zusoz-linog"], "twelve words of five letters, or 64 hexadecimal digits; 2 words were given"),
        ([WORDS + "-vumas"], "13 words were given"),
        (["vibox", *WORDS.split("-")[1:]], "word 1, 'vibox', cannot be one of a fingerprint: its letter 5 is 'x'"),
        ([*WORDS.split("-")[:11], "vibo"], "word 12, 'vibo', cannot be one of a fingerprint: it has 4 letters, not 5"),
        (["0" * 63], "63 characters were given"),
        (["ab" * 31], "64 hexadecimal digits"),
        ([], "give a fingerprint, or one of"),
        (["--show", "--forget"], "give a fingerprint, or one of"),
        ([WORDS, "--renew-key"], "give a fingerprint, or one of"),
        (["--renew-key"], "made no key of its own yet"),
    ],
    ids=["short", "long", "letter", "word", "digits", "half", "nothing", "two wishes", "words and a wish", "no key"],
)
def test_what_cannot_be_done_is_refused_in_clear_words(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *arguments) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_data_folder_must_be_there_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("MUSTER_DATA", raising=False)
    assert trust.main([WORDS]) == 2
    assert run(tmp_path / "nowhere", WORDS) == 2
    said = capsys.readouterr().err
    assert "MUSTER_DATA" in said
    assert "there is no folder" in said
    monkeypatch.setenv("MUSTER_DATA", str(tmp_path))
    assert trust.main([WORDS]) == 0


async def test_a_box_that_follows_a_policy_takes_another_one_only_after_it_forgot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = Fleet(T0)
    await pin(tmp_path, fleet)
    assert run(tmp_path, fleet.words) == 0
    assert "follows that policy already" in capsys.readouterr().out
    assert run(tmp_path, WORDS) == 2
    assert "run --forget first" in capsys.readouterr().err
    assert read_trusted(tmp_path) is None
    assert run(tmp_path, "--forget") == 0
    assert is_asked_to_forget(tmp_path)
    assert run(tmp_path, WORDS) == 0
    assert read_trusted(tmp_path) == WORDS
    assert run(tmp_path, "--forget") == 0
    assert read_trusted(tmp_path) is None


async def test_show_says_what_the_box_is_and_believes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "--show") == 0
    assert "none pinned; run ./muster trust" in capsys.readouterr().out
    fleet = Fleet(T0)
    await pin(tmp_path, fleet)
    OpKeys(tmp_path / FOLDER_NAME).ensure(T0)
    async with opened(tmp_path):  # while a box uses it
        assert run(tmp_path, "--show") == 0
    said = capsys.readouterr().out
    for words in (
        "attic#abc",
        "L2",
        f"main version 1, {fleet.words}",
        "1745880000-",
        "example.org/audit, 7 entries, root AAAA",
    ):
        assert words in said


def test_a_key_is_renewed_beside_the_old_one(tmp_path: Path) -> None:
    keys = OpKeys(tmp_path / FOLDER_NAME)
    keys.ensure(T0 + 1e9)
    assert run(tmp_path, "--renew-key") == 0
    assert len(keys.list_kids()) == 2
