"""Which policy a box follows: confirmed by a person first, then version after version, never back."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from runner.ledger import FILE_NAME
from runner.operations.policies import ANOTHER, FORGOTTEN, WAITING, PolicyStore
from tests.fakes.approvals import Fleet
from tests.fakes.ledgers import T0, opened
from tests.fakes.policies import approve, make_change, make_link


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
    async with store_of(tmp_path, Desk()) as store:
        assert await store.offer(fleet.links)
        assert (store.policy, store.error, store.offered_words) == (None, WAITING, fleet.words)
    async with store_of(tmp_path, Desk()) as store:
        assert store.policy is None


@pytest.mark.parametrize("form", ["words", "hex"])
async def test_a_confirmed_policy_is_pinned_and_survives_a_restart(tmp_path: Path, fleet: Fleet, form: str) -> None:
    confirmed = fleet.words if form == "words" else hashlib.sha256(fleet.documents[0]).hexdigest()
    async with store_of(tmp_path, Desk(confirmed)) as store:
        assert await store.offer(fleet.links)
        assert (store.policy, store.error) == (fleet.policy, "")
        assert not await store.offer(fleet.links), "what is held already changes nothing"
    async with store_of(tmp_path, Desk()) as store:
        assert store.policy == fleet.policy


async def test_another_policy_than_the_confirmed_one_is_refused(tmp_path: Path, fleet: Fleet) -> None:
    async with store_of(tmp_path, Desk(Fleet(T0).words)) as store:
        await store.offer(fleet.links)
        assert (store.policy, store.error) == (None, ANOTHER)


async def test_an_offer_is_judged_again_once_it_was_confirmed(tmp_path: Path, fleet: Fleet) -> None:
    desk = Desk()
    async with store_of(tmp_path, desk) as store:
        assert not await store.reconsider()
        await store.offer(fleet.links)
        assert not await store.reconsider(), "nothing was confirmed since"
        desk.confirmed = fleet.words
        assert await store.reconsider()
        assert (store.policy, store.error, store.offered_words) == (fleet.policy, "", "")


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


async def test_a_gap_is_refused_and_what_came_before_it_kept(tmp_path: Path, fleet: Fleet) -> None:
    for _ in range(3):
        fleet.add_policy()
    async with store_of(tmp_path, Desk(fleet.words)) as store:
        await store.offer([fleet.links[0], fleet.links[1], fleet.links[3]])
        assert store.policy is not None
        assert store.policy.ref.version == 2
        assert "only the next one can follow" in store.error


async def test_a_successor_that_only_the_new_people_signed_is_refused(tmp_path: Path, fleet: Fleet) -> None:
    stolen = Fleet(T0)
    async with store_of(tmp_path, Desk(fleet.words)) as store:
        await store.offer(fleet.links)
        fleet.people = stolen.people
        link = fleet.add_policy()
        await store.offer([link])
        assert store.policy is not None
        assert store.policy.ref.version == 1
        assert store.error.startswith("too_few_approvers")


async def test_one_signature_is_not_enough_for_a_successor(tmp_path: Path, fleet: Fleet) -> None:
    async with store_of(tmp_path, Desk(fleet.words)) as store:
        await store.offer(fleet.links)
        before = fleet.policy
        fleet.add_policy()
        change = make_change(fleet.documents[-1], under=before)
        await store.offer([make_link(fleet.documents[-1], change, approve(change, fleet.people[:1]))])
        assert store.policy == before
        assert store.error.startswith("too_few_approvers")


@pytest.mark.parametrize(
    "offered",
    [{}, {"document": 7, "statement": "", "proofs": []}, {"document": "e30", "statement": "e30", "proofs": "no"}],
    ids=["empty", "number", "text for a list"],
)
async def test_a_malformed_offer_is_an_error_and_nothing_else(tmp_path: Path, fleet: Fleet, offered: dict[str, object]) -> None:
    async with store_of(tmp_path, Desk(fleet.words)) as store:
        await store.offer([offered])
        assert store.policy is None
        assert store.error


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
