"""Whom a node trusts and what it is: policies, the owner's command, keys, the log that it witnesses, what stays loaded."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import sqlite3
import stat
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from runner.config import OperationsConfig
from runner.errors import ConfigError, InvalidRequest, OpTokenRefused, WrongState
from runner.ledger.database import FILE_NAME
from runner.ledger.ledger import DesiredModel, Ledger
from runner.limits import limits
from runner.operations import trust
from runner.operations.desired_state import DesiredState, NotDesired, open_sealed
from runner.operations.gate import Accepted, Gate, GateRules
from runner.operations.keys import IDENTITY_NAME, OP_KEYS_NAME, Identity, KeyRing, OpKeys, TooManyKeys, load_identity
from runner.operations.operation import LoadBody, seal_accepted
from runner.operations.trust import (
    ANOTHER,
    FORGOTTEN,
    TRUSTED_NAME,
    WAITING,
    Governance,
    PolicyStore,
    Sighting,
    Witness,
    is_asked_to_forget,
    read_trusted,
    write_trusted,
)
from tests.fakes.audit_logs import FORK, KEY, LOG, checkpoint_of, offer_of, seal
from tests.fakes.ledgers import T0, Clock, opened
from tests.fakes.policies import Fleet, Issuer
from tests.fakes.runners.governed import admit, l0, write_key
from tests.fakes.runners.governed import opened as opened_gate
from tests.fakes.waiting import eventually
from wire.auditlog import Entry, to_bytes, verify_signature
from wire.bridge import CheckpointOffer, PolicyOffer
from wire.optoken.op_token import encode_token, owns_runner_id
from wire.optoken.verifier import Operation


class Desk:
    """What the owner has confirmed on the node."""

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
        assert (store.policy, store.error, store.offered_fingerprint) == (None, WAITING, fleet.words)
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
        assert (store.policy, store.error, store.offered_fingerprint) == (fleet.policy, "", "")


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


async def test_a_pinned_policy_that_was_edited_is_none(tmp_path: Path, fleet: Fleet, caplog: pytest.LogCaptureFixture) -> None:
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
    """Leave a node that follows this policy."""
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
def test_what_cannot_be_done_is_said(
    tmp_path: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, *arguments) == 2
    assert words in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


async def test_a_box_takes_another_policy_only_after_it_forgot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    OpKeys(tmp_path / OP_KEYS_NAME).ensure(T0)
    async with opened(tmp_path):  # while a node uses it
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
    keys = OpKeys(tmp_path / OP_KEYS_NAME)
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
    """Fail unless the node shows the checkpoint over ``entries``, as the log signed it, and signs that itself."""
    assert witness.seen is not None
    assert sighting.note == seal(entries).note
    message = checkpoint_of(entries).witness_message("")
    assert verify_signature(witness.identity.public_key, message, to_bytes(sighting.signature))


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
        said = [await judge(witness, msgspec.structs.replace(offer, wants_name=wants_name)) for offer in offers]
        message = checkpoint_of(LOG[:20]).witness_message(name)
        assert all(verify_signature(witness.identity.public_key, message, to_bytes(each.signature)) for each in said)
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


NOW = T0 + 10
LATER = T0 + 400 * 86_400
"""Long after token, window and policy have expired."""
PARAMS: dict[str, object] = {"modelId": "a", "maxContextLength": 512, "keepLoaded": True}


class Node:
    """A runner without its models: it lets loads in, writes them down, and loads again what ``loads`` says how."""

    def __init__(
        self, governance: Governance, ledger: Ledger, fleet: Fleet, clock: Clock, *, level: int, thief: Identity
    ) -> None:
        told = governance.describe()
        assert told is not None
        assert governance.identity is not None
        self.governance, self.ledger, self.clock, self.fleet = governance, ledger, clock, fleet
        self.identity: Identity = governance.identity
        self.issuer = Issuer.of(fleet, told)
        rules = GateRules(
            key_path=governance.key_path, level=governance.level, min_signers=1, runner_id=governance.runner_id,
            policy=lambda: governance.policy, disabled=governance.disabled,
        )  # fmt: skip
        self.gate = Gate(rules, ledger=ledger, clock=clock)
        self.bodies: list[LoadBody] = []
        self.answers: list[Mapping[str, object] | Exception] = []
        self.changes: list[dict[str, str]] = []
        self.level, self.thief = level, thief
        self.state = self.make_state()

    def make_state(self, *, pauses_s: Sequence[float] = (0.0, 0.0)) -> DesiredState:
        return DesiredState(
            self.ledger, self.governance, self.load, min_signers=1, pauses_s=pauses_s, clock=self.clock,
            on_change=lambda: self.changes.append(self.state.models),
        )  # fmt: skip

    async def load(self, body: LoadBody) -> Mapping[str, object]:
        self.bodies.append(body)
        answer = self.answers.pop(0) if self.answers else {"status": "completed"}
        if isinstance(answer, Exception):
            raise answer
        return answer

    def token(self, params: Mapping[str, object], **changes: Any) -> dict[str, Any]:
        if self.level == 1:
            return self.issuer.bare_token("model-load", params)
        return self.issuer.token("model-load", params, now=self.clock.now, **changes)

    async def accept(self, params: Mapping[str, object] = PARAMS, **changes: Any) -> DesiredModel:
        """Let a load in and write it down as one that succeeded."""
        admitted = await self.gate.admit(
            self.token(params, **changes), operation=Operation.MODEL_LOAD, model_id=str(params["modelId"]), params=params
        )
        assert admitted.keeps is not None
        model = seal_accepted(admitted.keeps, self.identity)
        await self.ledger.finish_op(admitted.run.run_id, {"state": "succeeded"}, desired=model)
        return model


@asynccontextmanager
async def node_in(tmp_path: Path, *, level: int = 2, fleet: Fleet | None = None, name: str = "attic") -> AsyncIterator[Node]:
    data = tmp_path / "data"
    is_new = not data.exists()
    data.mkdir(exist_ok=True)
    clock = Clock(T0 if is_new else NOW)
    ledger = await Ledger.open(data, clock=clock)
    fleet = fleet or Fleet(T0)
    try:
        wanted = OperationsConfig(key_path=None, level=level, is_level_given=True, min_signers=1, runner_id="", ops_per_hour=60)
        governance = Governance(wanted, data=data, name=name, ledger=ledger, clock=clock)
        if is_new:
            write_trusted(data, fleet.words)
        await governance.open()
        await governance.take_policies(PolicyOffer(policies=fleet.links))
        clock.now = NOW
        thief = load_identity(tmp_path, "thief")
        node = Node(governance, ledger, fleet, clock, level=level, thief=thief)
        await node.state.open()
        yield node
    finally:
        await ledger.close()


def rewrite(model: DesiredModel, node: Node, **changes: object) -> DesiredModel:
    """The same row with another document, under the seal of the right one."""
    accepted = open_sealed(model, node.identity)
    return replace(model, document=msgspec.json.encode(msgspec.structs.replace(accepted, **changes)))


def resign(model: DesiredModel, node: Node, **changes: object) -> DesiredModel:
    """The same row with another document, sealed by the runner: what even its own key cannot make load."""
    accepted = msgspec.structs.replace(open_sealed(model, node.identity), **changes)
    return replace(seal_accepted(accepted, node.identity), model_id=model.model_id, fence=model.fence)


def swap_token(model: DesiredModel, node: Node, token: Mapping[str, object], **changes: object) -> DesiredModel:
    return resign(model, node, token=encode_token(token), **changes)


async def test_what_was_approved_is_believed_under_newer_policies_and_long_after_everything_expired(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        model = await node.accept()
        node.fleet.add_policy()
        await node.governance.take_policies(PolicyOffer(policies=node.fleet.links))
        assert node.governance.policy is not None
        assert node.governance.policy.ref.version == 2
        node.clock.now = LATER
        assert node.state.verify(model).params == PARAMS
        assert [each.document for each in await node.ledger.read_desired()] == [model.document]


async def test_a_renewed_key_does_not_end_it_and_a_node_that_asks_for_more_wants_it_approved_again(tmp_path: Path) -> None:
    fleet = Fleet(T0)
    async with node_in(tmp_path, level=1, fleet=fleet) as node:
        node.clock.now = time.time()
        model = await node.accept()
        for path in node.governance.key_path.iterdir():  # type: ignore[union-attr]  # a folder at level 1
            path.unlink()
        assert node.state.verify(model).model_id == "a"
    async with node_in(tmp_path, level=2, fleet=fleet) as node:
        with pytest.raises(NotDesired, match="level_too_low"):
            node.state.verify(model)


Forgery = Callable[[Node, DesiredModel], DesiredModel]

FORGERIES: dict[str, tuple[Forgery, str]] = {
    "another model in the row": (lambda n, m: replace(m, model_id="b"), "another model"),
    "another fence in the row": (lambda n, m: replace(m, fence=m.fence + 1), "another model"),
    "another model in the document": (lambda n, m: replace(rewrite(m, n, model_id="b"), model_id="b"), "did not sign"),
    "other parameters": (lambda n, m: rewrite(m, n, params={**PARAMS, "maxContextLength": 9}), "did not sign"),
    "a later moment": (lambda n, m: rewrite(m, n, accepted_at_ms=1), "did not sign"),
    "no seal": (lambda n, m: replace(m, seal=b""), "did not sign"),
    "a seal of somebody else": (lambda n, m: seal_accepted(open_sealed(m, n.identity), n.thief), "did not sign"),
    "no document": (lambda n, m: replace(m, document=b"{}"), "did not sign"),
    # From here on the forger has the runner's own key; what people signed still decides.
    "sealed with other parameters": (lambda n, m: resign(m, n, params={**PARAMS, "maxContextLength": 9}), "wrong_params"),
    "sealed with another model": (
        lambda n, m: replace(resign(m, n, model_id="b", params={**PARAMS, "modelId": "b"}), model_id="b"), "wrong_model",
    ),
    "sealed for another use": (lambda n, m: resign(m, n, op_key="op-9.1"), "another operation"),
    "sealed at a moment outside the window": (
        lambda n, m: resign(m, n, accepted_at_ms=int(LATER * 1000)), "does not hold",
    ),
    "sealed with what the control plane makes alone": (
        lambda n, m: swap_token(m, n, n.issuer.bare_token("model-load", PARAMS)), "does not hold",
    ),
    "sealed with one approval too few": (
        lambda n, m: swap_token(m, n, n.issuer.token("model-load", PARAMS, now=NOW, approvers=1)), "too_few_approvers",
    ),
    "sealed with the approval of an unload": (
        lambda n, m: swap_token(m, n, n.issuer.token("model-unload", {"modelId": "a"}, now=NOW)), "does not hold",
    ),
    "sealed with the approval of another node": (
        lambda n, m: swap_token(m, n, n.issuer.token("model-load", PARAMS, now=NOW, targets=["other#node"])), "wrong_target",
    ),
    "sealed with the approvals of other people": (
        lambda n, m: swap_token(m, n, replace(n.issuer, fleet=Fleet(T0)).token("model-load", PARAMS, now=NOW)), "does not hold",
    ),
    "sealed with a statement that does not say to keep it": (
        lambda n, m: swap_token(
            m, n, n.issuer.token("model-load", {"modelId": "a"}, now=NOW), params={"modelId": "a"}
        ), "not to stay loaded",
    ),
    "a statement that does not say to keep it, with parameters that do": (
        lambda n, m: swap_token(
            m, n, n.issuer.token("model-load", {"modelId": "a"}, now=NOW), params={"modelId": "a", "keepLoaded": True}
        ), "wrong_params",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FORGERIES))
async def test_a_row_that_was_tampered_with_loads_nothing_and_says_so(tmp_path: Path, name: str) -> None:
    forge, words = FORGERIES[name]
    async with node_in(tmp_path) as node:
        model = await node.accept()
        with pytest.raises(NotDesired, match=words):
            node.state.verify(forge(node, model))
        assert node.state.verify(model).model_id == "a", "it differs from what holds in one thing"


async def test_a_row_of_another_node_loads_nothing(tmp_path: Path) -> None:
    fleet = Fleet(T0)
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    async with node_in(tmp_path / "one", fleet=fleet) as one, node_in(tmp_path / "two", fleet=fleet) as two:
        model = await one.accept()
        with pytest.raises(NotDesired, match="did not sign"):
            two.state.verify(model)


async def test_a_node_that_forgot_whom_it_trusts_keeps_nothing_loaded(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        model = await node.accept()
        assert node.governance.policies is not None
        await node.governance.policies.forget()
        with pytest.raises(NotDesired, match="no_policy"):
            node.state.verify(model)


async def test_only_a_load_whose_statement_says_so_is_kept(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        for params in ({"modelId": "a"}, {"modelId": "a", "keepLoaded": False}):
            request: dict[str, Any] = {"operation": Operation.MODEL_LOAD, "model_id": "a"}
            with pytest.raises(OpTokenRefused):
                await node.gate.admit(node.token(params), **request, params={"modelId": "a", "keepLoaded": True})
            assert (await node.gate.admit(node.token(params), **request, params=params)).keeps is None
        assert await node.ledger.read_desired() == []


async def test_a_model_is_loaded_again_with_its_parameters(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        await node.accept({**PARAMS, "evictModel": "b"})
        node.answers = [WrongState("no room")]
        await node.state.restore()
        assert [(body.modelId, body.maxContextLength, body.evictModel) for body in node.bodies] == [("a", 512, None)] * 2
        assert (node.state.models, node.state.gave_up_ms) == ({"a": ""}, {})


async def test_a_load_that_fails_is_tried_a_few_times_then_said_to_have_failed(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        await node.accept()
        node.answers = [WrongState("no room"), {"status": "failed", "error": "no file"}, WrongState("no room at all")]
        await node.state.restore()
        assert len(node.bodies) == 3
        assert node.state.models == {"a": "3 attempts failed, the last with: no room at all"}
        assert {"a": "attempt 1 of 3 failed: no room; the next follows after 0 s"} in node.changes
        assert node.state.gave_up_ms == {"a": NOW * 1000}
        assert [model.unfinished for model in await node.ledger.read_desired()] == [0]
        await node.accept({"modelId": "b", "keepLoaded": True})
        node.answers, node.state = [WrongState("no room")], node.make_state(pauses_s=(3600.0,))
        restoring = asyncio.create_task(node.state.restore())
        await eventually(lambda: [body.modelId for body in node.bodies[3:]] == ["a", "b"], "one that waits holds no other up")
        assert (node.state.models["a"][:21], node.state.models["b"]) == ("attempt 1 of 2 failed", "")
        assert node.state.gave_up_ms == {}, "attempts follow"
        restoring.cancel()


async def test_a_model_that_takes_the_runner_down_with_it_is_not_tried_for_ever(tmp_path: Path) -> None:
    async with node_in(tmp_path) as node:
        model = await node.accept()
        for _ in range(limits().operations.unfinished):
            await node.ledger.count_unfinished(model, has_ended=False)
        await node.state.restore()
        assert node.bodies == []
        assert "the runner ended 3 times in a row" in node.state.models["a"]
        await node.accept()  # an approval is the way out
        await node.state.restore()
        assert len(node.bodies) == 1
        await node.ledger._run(lambda db: db.execute("UPDATE desired_models SET seal = x'00'").rowcount)
        await node.state.restore()
        assert ("did not sign" in node.state.models["a"], len(node.bodies)) == (True, 1)
        with pytest.raises(msgspec.ValidationError):  # the document holds no more than what is verified
            msgspec.convert({"v": 1, "surprise": True}, Accepted)


@pytest.mark.parametrize("said_by", ["owner", "control"])
async def test_a_node_that_its_owner_took_back_loads_nothing_until_it_is_lent(tmp_path: Path, said_by: str) -> None:
    async with node_in(tmp_path) as node:
        await node.accept()
        await node.state.hear_mode(said_by=said_by, is_reclaimed=True)
    async with node_in(tmp_path, fleet=node.fleet) as again:
        assert again.state.is_reclaimed_by_owner is (said_by == "owner")
        work = asyncio.create_task(again.state.restore())
        await eventually(lambda: "the owner took the node back" in again.state.models.get("a", ""))
        assert again.bodies == []
        other = "control" if said_by == "owner" else "owner"
        await again.state.hear_mode(said_by=other, is_reclaimed=False)
        assert not work.done()
        await again.state.hear_mode(said_by=said_by, is_reclaimed=False)
        await work
        assert len(again.bodies) == 1


async def test_a_token_of_level_0_cannot_keep_a_model_loaded(tmp_path: Path) -> None:
    async with opened_gate(write_key(tmp_path / "op.key"), tmp_path / "data") as gate:
        token = l0(model_id="a")
        with pytest.raises(InvalidRequest, match="signs no parameters"):
            await admit(gate, token, model_id="a", params=PARAMS)
        admitted = await admit(gate, token, model_id="a", params={"modelId": "a"})
        assert admitted.keeps is None, "the token was not spent by the refusal"
