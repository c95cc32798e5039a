"""Whom a node trusts and what it is: pinned policies, the owner's command, identity and keys, and the log that it witnesses."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import sqlite3
import stat
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.errors import ConfigError
from runner.ledger import FILE_NAME
from runner.limits import limits
from runner.operations import trust
from runner.operations.fingerprint import TRUSTED_NAME, is_asked_to_forget, read_trusted
from runner.operations.identity import FILE_NAME as IDENTITY_NAME
from runner.operations.identity import load_identity
from runner.operations.keys import KeyRing
from runner.operations.op_keys import FOLDER_NAME, OpKeys, TooManyKeys
from runner.operations.policies import ANOTHER, FORGOTTEN, WAITING, PolicyStore
from runner.operations.witness import Sighting, Witness
from tests.fakes.approvals import Fleet
from tests.fakes.audit_logs import FORK, KEY, LOG, checkpoint_of, offer_of, seal
from tests.fakes.ledgers import T0, opened
from wire.auditlog import Entry, to_bytes, verify_signature
from wire.bridge import CheckpointOffer
from wire.optoken import owns_runner_id


class Desk:
    """What the owner has confirmed on the box."""

    def __init__(self, confirmed: str | None = None) -> None:
        self.confirmed = confirmed

    def __call__(self) -> str | None:
        return self.confirmed


@pytest.fixture
def fleet() -> Fleet:
    return Fleet(T0)


@asynccontextmanager
async def store_of(tmp_path: Path, desk: Desk) -> AsyncIterator[PolicyStore]:
    async with opened(tmp_path) as ledger:
        store = PolicyStore(ledger, desk)
        await store.open()
        yield store


async def test_nothing_is_pinned_that_nobody_confirmed(tmp_path: Path, fleet: Fleet) -> None:
    desk = Desk()
    async with store_of(tmp_path, desk) as store:
        assert not await store.reconsider()
        assert await store.offer(fleet.links)
        assert (store.policy, store.error, store.offered_words) == (None, WAITING, fleet.words)
        assert not await store.reconsider(), "nothing was confirmed since"
        desk.confirmed = Fleet(T0).words
        await store.offer(fleet.links)
        assert (store.policy, store.error) == (None, ANOTHER)
    async with store_of(tmp_path, Desk()) as store:
        assert store.policy is None
        await store.offer(fleet.links)
    async with store_of(tmp_path, desk) as store:
        await store.offer(fleet.links)
        desk.confirmed = fleet.words
        assert await store.reconsider()
        assert (store.policy, store.error, store.offered_words) == (fleet.policy, "", "")


@pytest.mark.parametrize("form", ["words", "hex"])
async def test_a_confirmed_policy_is_pinned_and_survives_a_restart(tmp_path: Path, fleet: Fleet, form: str) -> None:
    confirmed = fleet.words if form == "words" else hashlib.sha256(fleet.documents[0]).hexdigest()
    async with store_of(tmp_path, Desk(confirmed)) as store:
        assert await store.offer(fleet.links)
        assert (store.policy, store.error) == (fleet.policy, "")
        assert not await store.offer(fleet.links), "what is held already changes nothing"
    async with store_of(tmp_path, Desk()) as store:
        assert store.policy == fleet.policy


async def test_a_chain_is_taken_over_version_by_version_and_never_back(tmp_path: Path, fleet: Fleet) -> None:
    async with store_of(tmp_path, Desk(fleet.words)) as store:
        await store.offer(fleet.links)
        for _ in range(3):
            fleet.add_policy()
        await store.offer(fleet.links[1:])
        assert store.policy is not None
        assert store.policy.ref.version == 4
        other = Fleet(T0, people=fleet.people, documents=fleet.documents[:1], links=fleet.links[:1])
        other.add_policy(origins=["https://other.example"])
        await store.offer(other.links)
        assert store.policy.ref.version == 4
        assert store.error.startswith("policy_rollback")
    async with store_of(tmp_path, Desk()) as store:
        assert store.policy == fleet.policy


async def test_a_gap_or_a_successor_that_only_the_new_people_signed_is_refused(tmp_path: Path, fleet: Fleet) -> None:
    async with store_of(tmp_path, Desk(fleet.words)) as store:
        for bad in (
            {},
            {"document": 7, "statement": "", "proofs": []},
            {"document": "e30", "statement": "e30", "proofs": "no"},
        ):
            await store.offer([bad])
            assert (store.policy, bool(store.error)) == (None, True)
        for _ in range(3):
            fleet.add_policy()
        await store.offer([fleet.links[0], fleet.links[1], fleet.links[3]])
        assert store.policy is not None
        assert store.policy.ref.version == 2
        assert "only the next one can follow" in store.error
        await store.offer([fleet.links[2]])
        fleet.people = Fleet(T0).people
        stolen = Fleet(T0, people=fleet.people, documents=fleet.documents[:3], links=fleet.links[:3])
        await store.offer([stolen.add_policy()])
        assert store.policy.ref.version == 3
        assert store.error.startswith("too_few_approvers")


async def test_a_pinned_policy_that_was_edited_on_the_disk_is_none(
    tmp_path: Path, fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    async with store_of(tmp_path, Desk(fleet.words)) as store:
        await store.offer(fleet.links)
    with contextlib.closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection, connection:
        connection.execute("UPDATE policies SET document = ?", (Fleet(T0).documents[0],))
    with caplog.at_level(logging.ERROR):
        async with store_of(tmp_path, Desk(fleet.words)) as store:
            assert store.policy is None
            assert "./muster trust --forget" in store.error
    assert "pinned policy does not hold" in caplog.text


async def test_what_was_forgotten_has_to_be_confirmed_again(tmp_path: Path, fleet: Fleet) -> None:
    desk = Desk(fleet.words)
    async with store_of(tmp_path, desk) as store:
        await store.offer(fleet.links)
        desk.confirmed = None
        await store.forget()
        assert (store.policy, store.error) == (None, FORGOTTEN)
        await store.offer(fleet.links)
        assert (store.policy, store.error) == (None, WAITING)


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


def test_words_and_fingerprints_are_written_down_in_one_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    digits = hashlib.sha256(b"a policy").hexdigest()
    for typed, taken in (
        ([WORDS], WORDS), (WORDS.split("-"), WORDS), ([WORDS.replace("-", " ").upper()], WORDS), ([digits.upper()], digits),
    ):  # fmt: skip
        assert run(tmp_path, *typed) == 0
        assert read_trusted(tmp_path) == taken
        assert (tmp_path / TRUSTED_NAME).stat().st_mode & 0o777 == 0o600
        assert "within 5 seconds" in capsys.readouterr().out
    assert run(tmp_path / "nowhere", WORDS) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["zusoz-linog"], "twelve words of five letters, or 64 hexadecimal digits; 2 words were given"),
        ([WORDS + "-vumas"], "13 words were given"),
        (["vibox", *WORDS.split("-")[1:]], "word 1, 'vibox', cannot be one of a fingerprint: its letter 5 is 'x'"),
        ([*WORDS.split("-")[:11], "vibo"], "word 12, 'vibo', cannot be one of a fingerprint: it has 4 letters, not 5"),
        (["0" * 63], "63 characters were given"), (["ab" * 31], "64 hexadecimal digits"), ([], "give a fingerprint, or one of"),
        (["--show", "--forget"], "give a fingerprint, or one of"), ([WORDS, "--renew-key"], "give a fingerprint, or one of"),
        (["--renew-key"], "made no key of its own yet"),
    ],
    ids=["short", "long", "letter", "word", "digits", "half", "nothing", "two wishes", "words and a wish", "no key"],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_in_clear_words(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *arguments) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


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
    version = f"main version 1, {fleet.words}"
    for words in ("attic#abc", "L2", version, "1745880000-", "example.org/audit, 7 entries, root AAAA"):
        assert words in said


def test_a_damaged_identity_ends_the_node_instead_of_making_it_another_one(tmp_path: Path) -> None:
    for content in (b"", b"no key", b"x" * 5000):
        (tmp_path / IDENTITY_NAME).write_bytes(content)
        with pytest.raises(ConfigError, match="put back the one that was there"):
            load_identity(tmp_path, "attic")
        assert (tmp_path / IDENTITY_NAME).read_bytes() == content
    for name in ("a#b", " attic", "x" * 101):  # it could be read in two ways
        with pytest.raises(ConfigError, match="--name"):
            load_identity(tmp_path / "other", name)


def test_an_identity_is_made_once_and_names_its_key(tmp_path: Path) -> None:
    made = load_identity(tmp_path, "attic")
    assert made.certified_id.startswith("attic#")
    assert owns_runner_id(made.certified_id, made.public_key)
    again = load_identity(tmp_path, "attic")
    assert (again.certified_id, again.public_key) == (made.certified_id, made.public_key)
    assert stat.S_IMODE((tmp_path / IDENTITY_NAME).stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == [IDENTITY_NAME]
    assert load_identity(tmp_path / "other", "attic").certified_id != made.certified_id


def test_the_first_key_is_made_once_and_a_key_ring_reads_it_and_no_file_of_others(tmp_path: Path) -> None:
    keys = OpKeys(tmp_path / FOLDER_NAME)
    for now in (T0, T0 + 10):
        keys.ensure(now)
    (kid,) = keys.list_kids()
    assert dict(KeyRing(keys.folder).read()) == keys.read()
    assert (len(keys.read()[kid]), stat.S_IMODE((keys.folder / f"{kid}.key").stat().st_mode)) == (64, 0o600)
    for name in ("other.key", ".0000000001-abcd.key.tmp"):
        (keys.folder / name).write_bytes(b"k" * 40)
    assert len(keys.read()) == 1
    assert run(tmp_path, "--renew-key") == 0
    assert len(keys.list_kids()) == 2


def test_a_renewed_key_leaves_the_old_one_valid_for_a_day_and_keys_cannot_pile_up(tmp_path: Path) -> None:
    keys, overlap_s = OpKeys(tmp_path), limits().operations.op_key_overlap_s
    keys.ensure(T0)
    (old,) = keys.list_kids()
    new = keys.renew(T0 + 1000)
    assert keys.list_kids() == [old, new]
    assert keys.drop_retired(T0 + 1000 + overlap_s - 1) == []
    assert keys.drop_retired(T0 + 1000 + overlap_s) == [old]
    assert keys.drop_retired(T0 + 100 * overlap_s) == [], "the newest is never dropped"
    assert keys.renew(T0 - 5000) == keys.list_kids()[-1], "also when the clock was set back"
    for _ in range(limits().operations.op_keys - len(keys.list_kids())):
        keys.renew(T0)
    with pytest.raises(TooManyKeys):
        keys.renew(T0)
    assert keys.renew(T0 + 2 * overlap_s) in keys.list_kids()


KEYS = [str(KEY)]


@asynccontextmanager
async def witness_in(tmp_path: Path) -> AsyncIterator[Witness]:
    async with opened(tmp_path) as ledger:
        witness = Witness(ledger, load_identity(tmp_path, "attic"))
        await witness.open()
        yield witness


async def judge(witness: Witness, offer: CheckpointOffer) -> Sighting:
    return await witness.judge(offer, log_keys=KEYS, runner_id="attic#abc")


def require_seen(sighting: Sighting, witness: Witness, entries: Sequence[Entry]) -> None:
    """Fail unless the box shows the checkpoint over ``entries``, as the log signed it, and signs that itself."""
    assert witness.seen is not None
    assert sighting.note == seal(entries).note
    message = checkpoint_of(entries).witness_message("")
    assert verify_signature(witness.public_key, message, to_bytes(sighting.signature))


@pytest.mark.parametrize("smaller", [offer_of(LOG[:9], old=5), offer_of(LOG[:9]), offer_of(FORK[:9])], ids=["5", "0", "fork"])
async def test_a_checkpoint_from_before_is_no_contradiction(tmp_path: Path, smaller: CheckpointOffer) -> None:
    async with witness_in(tmp_path) as witness:
        await judge(witness, offer_of(LOG[:20]))
        sighting = await judge(witness, smaller)
        assert sighting.alarm == ""
        require_seen(sighting, witness, LOG[:20])
        assert witness.seen == checkpoint_of(LOG[:20])
        assert (await judge(witness, offer_of(LOG[:30], old=20))).note == seal(LOG[:30]).note


async def test_growth_is_signed_and_remembered_over_a_restart(tmp_path: Path) -> None:
    async with witness_in(tmp_path) as witness:
        assert (await judge(witness, offer_of(LOG[:5]))).signature
        sighting = await judge(witness, offer_of(LOG[:23], old=5))
    seen = checkpoint_of(LOG[:23])
    assert sighting.note == seal(LOG[:23]).note
    key = load_identity(tmp_path, "attic").public_key
    assert verify_signature(key, seen.witness_message(""), to_bytes(sighting.signature))
    async with witness_in(tmp_path) as witness:
        assert witness.seen == seen
        assert (await judge(witness, offer_of(LOG[:23], old=23))).signature, "the same again is fine"


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (offer_of(FORK[:20], old=20), "another root over the same 20 entries"),
        (offer_of(FORK, old=20), "does not extend"),
        (CheckpointOffer(note=seal(LOG).note, old_size=20, proof=["AAAA"]), "does not extend"),
        (CheckpointOffer(note=seal(LOG).note, old_size=20, proof=["!"]), "not base64"),
        (CheckpointOffer(note=seal(LOG).note, old_size=20, proof=["AAAA"] * 500), "more than 128"),
        (offer_of(LOG, old=20, note=seal(LOG).note.replace("40", "41", 1)), "does not hold"),
        (offer_of(LOG, old=20, note="nonsense"), "not a checkpoint"),
        (offer_of(LOG, old=20, note="x" * 9000), "8192 characters"),
    ],
    ids=["fork", "rewritten", "bad proof", "no base64", "long proof", "altered", "no note", "long note"],
)
async def test_a_contradiction_is_an_alarm_and_never_stored(tmp_path: Path, offer: CheckpointOffer, words: str) -> None:
    async with witness_in(tmp_path) as witness:
        await judge(witness, offer_of(LOG[:20]))
        sighting = await judge(witness, offer)
        assert words in sighting.alarm
        require_seen(sighting, witness, LOG[:20])
        assert witness.seen == checkpoint_of(LOG[:20])
    async with witness_in(tmp_path) as witness:
        assert witness.seen == checkpoint_of(LOG[:20])


@pytest.mark.parametrize(("wants_name", "name"), [(True, "attic#abc"), (False, "")], ids=["this release", "an earlier one"])
async def test_a_node_signs_its_runner_id_for_a_control_plane_that_asks(tmp_path: Path, wants_name: bool, name: str) -> None:
    async with witness_in(tmp_path) as witness:
        offers = [offer_of(LOG[:20]), offer_of(FORK, old=20)]
        said = [await judge(witness, replace(offer, wants_name=wants_name)) for offer in offers]
        message = checkpoint_of(LOG[:20]).witness_message(name)
        assert all(verify_signature(witness.public_key, message, to_bytes(each.signature)) for each in said)
        assert [bool(each.alarm) for each in said] == [False, True]


async def test_a_checkpoint_of_an_unknown_signer_is_refused(tmp_path: Path) -> None:
    async with witness_in(tmp_path) as witness:
        sighting = await witness.judge(offer_of(LOG), log_keys=[], runner_id="attic#abc")
        assert ("not signed by a log key" in sighting.alarm, witness.seen) == (True, None)
        await judge(witness, offer_of(LOG[:20]))
        sighting = await judge(witness, offer_of(LOG, old=7))
        assert not sighting.alarm
        require_seen(sighting, witness, LOG[:20])
        assert witness.seen == checkpoint_of(LOG[:20])
