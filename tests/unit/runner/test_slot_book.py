"""Which slot of llama.cpp a call gets, and when it may reuse what is there."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.engines.llama_slots import is_object, pin_body
from runner.engines.port import CacheMode, FlushRequest, FlushScope
from runner.engines.slots import Lease, Owner, SlotBook
from tests.fakes.examples import examples

ALPHA = Owner("alpha", "")
BETA = Owner("beta", "")
ALPHA_TAGGED = Owner("alpha", "night")
ALL = FlushRequest(FlushScope.ALL)


def run_call(book: SlotBook, owner: Owner, mode: CacheMode = "auto", *, was_answered: bool = True) -> Lease:
    """Run one call from its start to its end."""
    lease = book.take(owner, mode)
    assert lease is not None
    book.release(lease, was_answered=was_answered)
    return lease


def test_the_first_call_of_a_tenant_reuses_nothing_and_the_second_its_own_slot() -> None:
    book = SlotBook(2)
    first, second = run_call(book, ALPHA), run_call(book, ALPHA)
    assert (first.reuses, second.reuses) == (False, True)
    assert first.slot == second.slot


def test_another_tenant_gets_an_empty_slot_before_anybodys() -> None:
    book = SlotBook(2)
    first, second = run_call(book, ALPHA), run_call(book, BETA)
    assert first.slot != second.slot
    assert run_call(book, ALPHA).reuses
    assert run_call(book, BETA).reuses


def test_where_no_slot_is_free_of_others_the_one_unused_for_longest_is_taken_without_reuse() -> None:
    book = SlotBook(2)
    old, recent = run_call(book, ALPHA), run_call(book, BETA)
    taken = run_call(book, Owner("gamma", ""))
    assert (taken.slot, taken.reuses) == (old.slot, False)
    assert run_call(book, BETA) == Lease(recent.slot, BETA, reuses=True)
    assert not run_call(book, ALPHA).reuses


def test_of_several_own_slots_the_most_recent_is_preferred() -> None:
    book = SlotBook(3)
    leases = [book.take(ALPHA, "auto"), book.take(ALPHA, "auto")]
    first, second = [lease for lease in leases if lease is not None]
    book.release(second, was_answered=True)
    book.release(first, was_answered=True)
    assert run_call(book, ALPHA).slot == first.slot


def test_a_tag_is_an_owner_of_its_own_within_the_tenant() -> None:
    book = SlotBook(2)
    run_call(book, ALPHA)
    assert not run_call(book, ALPHA_TAGGED).reuses
    assert run_call(book, ALPHA_TAGGED).reuses


def test_a_call_that_leaves_nothing_reuses_nothing_and_its_slot_is_nobodys_afterwards() -> None:
    book = SlotBook(2)
    kept = run_call(book, ALPHA)
    private = run_call(book, ALPHA, "none")
    assert private.slot != kept.slot
    assert not private.reuses
    assert run_call(book, BETA) == Lease(private.slot, BETA, reuses=False)
    assert run_call(book, ALPHA).reuses


def test_a_call_without_an_answer_does_not_make_the_former_owners_prompt_its_own() -> None:
    book = SlotBook(1)
    run_call(book, ALPHA)
    run_call(book, BETA, was_answered=False)
    assert not run_call(book, BETA).reuses


def test_a_call_without_an_answer_in_its_own_slot_keeps_it() -> None:
    book = SlotBook(1)
    run_call(book, ALPHA)
    run_call(book, ALPHA, was_answered=False)
    assert run_call(book, ALPHA).reuses


def test_all_slots_in_use_is_an_outcome() -> None:
    book = SlotBook(1)
    lease = book.take(ALPHA, "auto")
    assert lease is not None
    assert book.take(BETA, "auto") is None
    assert book.take_unpinned() is None
    book.release(lease, was_answered=True)
    assert book.take(BETA, "auto") is not None


def test_after_a_call_of_unknown_place_no_slot_that_was_free_is_reused() -> None:
    book = SlotBook(3)
    run_call(book, ALPHA)
    busy = book.take(BETA, "auto")
    unpinned = book.take_unpinned()
    assert busy is not None
    assert unpinned is not None
    assert not unpinned.is_pinned
    assert not run_call(book, ALPHA).reuses  # it may be there at this moment
    book.release(unpinned, was_answered=True)
    book.release(busy, was_answered=True)  # never free meanwhile
    assert not run_call(book, ALPHA).reuses
    assert run_call(book, BETA).reuses


def test_a_slot_freed_while_a_call_of_unknown_place_runs_is_nobodys() -> None:
    book = SlotBook(2)
    busy = book.take(BETA, "auto")
    unpinned = book.take_unpinned()
    assert busy is not None
    assert unpinned is not None
    book.release(busy, was_answered=True)
    book.release(unpinned, was_answered=True)
    assert not run_call(book, BETA).reuses


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        (ALL, {0, 1, 2}),
        (FlushRequest(FlushScope.MODEL), {0, 1, 2}),
        (FlushRequest(FlushScope.TENANT, tenant="alpha"), {0, 1}),
        (FlushRequest(FlushScope.TENANT, tenant="nobody"), set()),
        (FlushRequest(FlushScope.TAG, tag="night"), {1}),
        (FlushRequest(FlushScope.TAG, tag="night", tenant="beta"), set()),
    ],
)
def test_a_flush_takes_the_slots_of_its_scope(request_: FlushRequest, wanted: set[int]) -> None:
    book = SlotBook(3)
    slots = [run_call(book, owner).slot for owner in (ALPHA, ALPHA_TAGGED, BETA)]
    assert slots == [0, 1, 2]
    seized = book.seize(request_)
    assert seized is not None
    assert {lease.slot for lease in seized} == wanted


def test_a_flush_takes_slots_that_are_nobodys_since_nobody_knows_what_they_hold() -> None:
    book = SlotBook(2)
    private = run_call(book, ALPHA, "none")
    seized = book.seize(FlushRequest(FlushScope.TENANT, tenant="alpha"))
    assert seized is not None
    assert [lease.slot for lease in seized] == [private.slot]


def test_a_busy_slot_refuses_the_flush_of_its_owner_only_and_nothing_is_taken() -> None:
    book = SlotBook(2)
    lease = book.take(ALPHA, "auto")
    assert lease is not None
    run_call(book, BETA)
    assert book.seize(ALL) is None
    assert book.seize(FlushRequest(FlushScope.TENANT, tenant="alpha")) is None
    assert book.seize(FlushRequest(FlushScope.TENANT, tenant="beta")) is not None
    assert book.take(BETA, "auto") is None  # it is being erased


def test_a_call_of_unknown_place_refuses_every_flush() -> None:
    book = SlotBook(2)
    assert book.take_unpinned() is not None
    assert book.seize(FlushRequest(FlushScope.TENANT, tenant="beta")) is None


def test_erased_slots_are_empty_and_the_others_keep_their_owner() -> None:
    book = SlotBook(2)
    first, second = run_call(book, ALPHA), run_call(book, BETA)
    seized = book.seize(ALL)
    assert seized is not None
    book.return_seized(seized, erased={first.slot})
    assert run_call(book, BETA) == Lease(second.slot, BETA, reuses=True)
    assert not run_call(book, ALPHA).reuses


@examples(25)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["call", "lost", "private", "unpinned", "end"])), max_size=40))
def test_whatever_happens_a_call_reuses_only_what_its_owner_left(steps: list[tuple[int, str]]) -> None:
    """A model of the engine: a lost call changes nothing, a call of unknown place lands in any slot that is free."""
    book = SlotBook(3)
    content: dict[int, object] = {}
    running: list[tuple[Lease, Owner, bool]] = []
    for number, step in steps:
        owner = Owner(f"tenant {number % 3}", "")
        if step == "end" and running:
            lease, whose, is_lost = running.pop(number % len(running))
            if not is_lost and lease.is_pinned:
                content[lease.slot] = whose
            if not lease.is_pinned:  # wherever it was: the worst is that it was in every slot that is free now
                busy = {other.slot for other, _, _ in running if other.is_pinned}
                content.update(dict.fromkeys({0, 1, 2} - busy, whose))
            book.release(lease, was_answered=not is_lost)
        elif step in {"call", "lost", "private", "unpinned"}:
            taken = book.take_unpinned() if step == "unpinned" else book.take(owner, "none" if step == "private" else "prefix")
            if taken is None:
                continue
            assert not taken.reuses or content.get(taken.slot) == owner
            running.append((taken, Owner("private", "") if step == "private" else owner, step == "lost"))


@pytest.mark.parametrize(
    ("body", "sent"),
    [
        (b"{}", b'{"id_slot":1,"cache_prompt":false}'),
        (b' { "a" : "}" } \n', b' { "a" : "}" ,"id_slot":1,"cache_prompt":false}'),
        (b'{"id_slot":7,"cache_prompt":true}', b'{"id_slot":7,"cache_prompt":true,"id_slot":1,"cache_prompt":false}'),
    ],
)
def test_the_slot_comes_last_in_the_body_and_the_rest_stays_as_it_is(body: bytes, sent: bytes) -> None:
    assert pin_body(body, Lease(1, ALPHA)) == sent


@pytest.mark.parametrize("body", [b"", b"[]", b'"}"', b'{"a":1}}', b'{"a":"b}', b"\xef\xbb\xbf{}", b"null", b"{" * 5000])
def test_what_is_no_json_object_is_not_pinned(body: bytes) -> None:
    assert not is_object(body)
