"""Time-ordered identifiers."""

from __future__ import annotations

import multiprocessing
import time
import uuid

from hypothesis import given
from hypothesis import strategies as st

from wire.ids import format_id, new_uuid7, parse_id


def test_an_id_carries_version_variant_and_the_time() -> None:
    before = time.time_ns() // 1_000_000
    values = [new_uuid7() for _ in range(2000)]
    after = time.time_ns() // 1_000_000
    assert {value.version for value in values} == {7}
    assert {value.variant for value in values} == {uuid.RFC_4122}
    stamps = [value.int >> 80 for value in values]
    assert before <= stamps[0]
    assert stamps[-1] <= after
    assert stamps == sorted(stamps)
    assert len(set(values)) == len(values)


def test_every_random_bit_moves() -> None:
    values = [new_uuid7().int for _ in range(400)]
    ever_set, always_set = 0, (1 << 128) - 1
    for value in values:
        ever_set |= value
        always_set &= value
    random_bits = (0xFFF << 64) | ((1 << 62) - 1)
    assert ever_set & random_bits == random_bits
    assert always_set & random_bits == 0


def test_a_forked_process_draws_other_numbers() -> None:
    new_uuid7()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    children = [context.Process(target=_draw, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    drawn = [queue.get() for _ in children]
    for child in children:
        child.join(10)
    low = (1 << 62) - 1
    assert len({value & low for value in [*drawn, new_uuid7().int]}) == 3


def _draw(queue: multiprocessing.queues.SimpleQueue[int]) -> None:
    queue.put(new_uuid7().int)


@given(st.uuids())
def test_a_printed_id_reads_back(value: uuid.UUID) -> None:
    assert parse_id("req", format_id("req", value)) == value
    assert parse_id("req", str(value)) == value


@given(st.text(max_size=40).filter(lambda text: len(text.replace("-", "")) != 32))
def test_other_texts_are_no_id(text: str) -> None:
    assert parse_id("node", text) is None
    assert parse_id("node", "req_" + text) is None
