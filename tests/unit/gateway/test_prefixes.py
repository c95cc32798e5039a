"""The index of prompt beginnings: what it says of whom, what it forgets, and that tenants never meet."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from gateway.request.prefixes import PrefixIndex
from tests.fakes.examples import examples


def index(**changes: int) -> PrefixIndex:
    return PrefixIndex(**{"block_bytes": 4, "most": 1000, "per_prompt": 64, **changes})


def test_a_replica_holds_as_many_blocks_as_it_was_sent_from_the_beginning() -> None:
    prefixes = index()
    prefixes.note(prefixes.cut("t", "m", b"aaaabbbbcccc"), 1)
    prefixes.note(prefixes.cut("t", "m", b"aaaabbbbdddd"), 2)
    asked = prefixes.cut("t", "m", b"aaaabbbbccccee")
    assert len(asked) == 3
    assert prefixes.count_held(asked) == {1: 3, 2: 2}
    assert prefixes.count_held(prefixes.cut("t", "m", b"xaaabbbbcccc")) == {}
    assert prefixes.count_held(prefixes.cut("t", "m", b"aaa")) == {}


def test_other_tenants_and_models_share_no_block() -> None:
    prefixes = index()
    prefixes.note(prefixes.cut("t", "m", b"aaaabbbb"), 1)
    assert prefixes.count_held(prefixes.cut("other", "m", b"aaaabbbb")) == {}
    assert prefixes.count_held(prefixes.cut("t", "other", b"aaaabbbb")) == {}


def test_the_block_used_longest_ago_goes_first_and_a_block_names_the_newest_replicas() -> None:
    prefixes = index(most=3)
    old, new = prefixes.cut("t", "m", b"aaaabbbb"), prefixes.cut("t", "m", b"cccc")
    prefixes.note(old, 1)
    prefixes.note(new, 1)
    prefixes.note(old, 1)
    prefixes.note(prefixes.cut("t", "m", b"dddd"), 1)
    assert (len(prefixes), prefixes.count_held(new), prefixes.count_held(old)) == (3, {}, {1: 2})
    for replica in range(2, 6):
        prefixes.note(old, replica)
    assert prefixes.count_held(old) == {5: 2, 4: 2, 3: 2}


@examples(200)
@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(1, 4)), max_size=20), st.binary(max_size=40))
def test_no_replica_is_said_to_hold_a_block_that_it_was_not_sent(sent: list[tuple[bytes, int]], asked: bytes) -> None:
    prefixes = index()
    for prompt, replica in sent:
        prefixes.note(prefixes.cut("t", "m", prompt), replica)
    for replica, count in prefixes.count_held(prefixes.cut("t", "m", asked)).items():
        beginning = asked[: 4 * count]
        assert any(number == replica and prompt.startswith(beginning) for prompt, number in sent)


def test_the_largest_index_takes_at_most_32_mib() -> None:
    prefixes = PrefixIndex(block_bytes=256, most=160_000, per_prompt=24)
    tracemalloc.start()
    try:
        for number in range(7_000):
            text = b"%07d" % number
            prefixes.note(prefixes.cut("t", "m", text * 4_000), number)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(prefixes) == 160_000
    assert size <= 32 * 1024 * 1024
