"""Which box gets a request."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.placement import choose_link


@dataclass(eq=False)
class Box:
    load: int
    last_served: int
    is_free: bool = True

    def can_take(self, now: float) -> bool:
        return self.is_free

    def is_called(self, name: str) -> bool:
        return name == f"box-{self.load}"


BOXES = st.lists(st.builds(Box, load=st.integers(0, 4), last_served=st.integers(0, 4), is_free=st.booleans()), max_size=8)


def test_nobody_free_is_nobody() -> None:
    assert choose_link([], now=0.0) is None
    assert choose_link([Box(0, 0, is_free=False)], now=0.0) is None


def test_equals_take_turns() -> None:
    boxes = [Box(0, 0) for _ in range(3)]
    served = []
    for turn in range(1, 10):
        chosen = choose_link(boxes, now=0.0)
        assert chosen is not None
        chosen.last_served = turn
        served.append(boxes.index(chosen))
    assert served == [0, 1, 2] * 3


def test_a_box_that_failed_the_request_is_the_last_resort() -> None:
    idle, loaded = Box(0, 0), Box(3, 9)
    assert choose_link([idle, loaded], now=0.0, avoid={idle}) is loaded
    assert choose_link([idle], now=0.0, avoid={idle}) is idle
    loaded.is_free = False
    assert choose_link([idle, loaded], now=0.0, avoid={idle}) is idle


@given(boxes=BOXES, avoided=st.sets(st.integers(0, 7)))
def test_the_least_loaded_free_box_wins_and_ties_go_to_the_one_served_longest_ago(boxes: list[Box], avoided: set[int]) -> None:
    avoid = {box for index, box in enumerate(boxes) if index in avoided}
    chosen = choose_link(boxes, now=0.0, avoid=avoid)
    free = [box for box in boxes if box.is_free]
    preferred = [box for box in free if box not in avoid] or free
    if not preferred:
        assert chosen is None
        return
    assert chosen in preferred
    assert chosen is not None
    assert (chosen.load, chosen.last_served) == min((box.load, box.last_served) for box in preferred)


@given(BOXES, st.integers(0, 4))
def test_a_preferred_box_is_taken_while_it_is_free_and_is_no_condition(boxes: list[Box], load: int) -> None:
    found = choose_link(boxes, now=0.0, prefer=f"box-{load}")
    liked = [box for box in boxes if box.is_free and box.load == load]
    assert found in liked if liked else found is choose_link(boxes, now=0.0)
