"""The box as a witness of the audit log: it goes along with growth, and with nothing else."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from runner.operations.identity import load_identity
from runner.operations.witness import FACT, Sighting, Witness
from tests.fakes.audit_logs import FORK, KEY, LOG, checkpoint_of, offer_of, seal
from tests.fakes.ledgers import opened
from wire.auditlog import Entry, to_bytes, to_text, verify_signature
from wire.bridge import CheckpointOffer

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
async def test_a_checkpoint_from_before_is_no_contradiction_and_is_answered_with_what_was_seen(
    tmp_path: Path, smaller: CheckpointOffer
) -> None:
    async with witness_in(tmp_path) as witness:
        await judge(witness, offer_of(LOG[:20]))
        sighting = await judge(witness, smaller)
        assert sighting.alarm == ""
        require_seen(sighting, witness, LOG[:20])
        assert witness.seen == checkpoint_of(LOG[:20])
        assert (await judge(witness, offer_of(LOG[:30], old=20))).note == seal(LOG[:30]).note


async def test_what_was_seen_before_notes_were_kept_is_shown_without_one_until_the_next(tmp_path: Path) -> None:
    async with opened(tmp_path) as ledger:
        seen = checkpoint_of(LOG[:5])
        await ledger.write_fact(FACT, json.dumps({"origin": seen.origin, "size": seen.size, "root": to_text(seen.root)}))
    async with witness_in(tmp_path) as witness:
        assert witness.seen == seen
        assert (await judge(witness, offer_of(LOG[:3]))).note == ""
        assert (await judge(witness, offer_of(LOG[:5], old=5))).note == seal(LOG[:5]).note
    async with witness_in(tmp_path) as witness:
        assert (await judge(witness, offer_of(LOG[:3]))).note == seal(LOG[:5]).note


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


async def test_a_checkpoint_of_an_unknown_signer_is_refused_also_as_the_first_one(tmp_path: Path) -> None:
    async with witness_in(tmp_path) as witness:
        sighting = await witness.judge(offer_of(LOG), log_keys=[], runner_id="attic#abc")
        assert "not signed by a log key" in sighting.alarm
        assert witness.seen is None


async def test_a_proof_that_begins_elsewhere_proves_nothing_and_is_no_alarm(tmp_path: Path) -> None:
    async with witness_in(tmp_path) as witness:
        await judge(witness, offer_of(LOG[:20]))
        sighting = await judge(witness, offer_of(LOG, old=7))
        assert not sighting.alarm
        require_seen(sighting, witness, LOG[:20])
        assert witness.seen == checkpoint_of(LOG[:20])
