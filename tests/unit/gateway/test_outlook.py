"""Which of several models a request is given to."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from gateway.errors import NoAvailableNode
from gateway.outlook import Busy, Closed, Outlook, Ready, pick_name

CLOSED = Closed(NoAvailableNode())


@pytest.mark.parametrize(
    ("outlooks", "picked"),
    [
        ([CLOSED, Ready(), Ready()], "b"),
        ([Busy(1.0), Ready()], "a"),
        ([Busy(9.0), Busy(2.0), Ready()], "b"),
        ([Busy(9.0), CLOSED, Busy(8.0), Busy(8.5)], "c"),
        ([Busy(math.inf), CLOSED], "a"),
        ([CLOSED, Busy(8.0)], "b"),
        ([CLOSED, CLOSED], "a"),
    ],
)
def test_a_model_with_room_comes_first_then_one_that_answers_in_time_then_the_shortest_queue(
    outlooks: list[Outlook], picked: str
) -> None:
    assert pick_name(zip("abcd", outlooks, strict=False), budget_s=5.0) == picked


def test_no_more_is_looked_at_than_needed() -> None:
    def look() -> Iterator[tuple[str, Outlook]]:
        yield "a", Ready()
        raise AssertionError("the first one has room")

    assert pick_name(look(), budget_s=5.0) == "a"
