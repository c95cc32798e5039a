"""The life of a model: every pair of state and event, and the estimate of how long a load still takes."""

from __future__ import annotations

import itertools
import time

import pytest

from runner.pool.model import LoadProgress
from runner.pool.states import TRANSITIONS, IllegalTransition, ModelEvent, ModelState, next_state


@pytest.mark.parametrize(("state", "event"), list(itertools.product(ModelState, ModelEvent)))
def test_every_pair_either_has_its_place_in_the_table_or_is_refused(state: ModelState, event: ModelEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert next_state(state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalTransition, match=f"{state} cannot {event}"):
            next_state(state, event)


def test_every_state_can_be_left_and_unloaded_can_be_reached_from_each() -> None:
    for start in ModelState:
        reached, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            onward = [after for (before, _), after in TRANSITIONS.items() if before is state]
            assert onward, f"{state} has no exit"
            waiting += [after for after in onward if after not in reached]
            reached |= set(onward)
        assert ModelState.UNLOADED in reached


def test_the_time_left_follows_the_last_load_like_it() -> None:
    progress = LoadProgress(started_at=time.monotonic() - 400.0, expected_s=1000.0, fraction=0.2)
    left = progress.eta_s()
    assert left is not None
    assert 560 <= left <= 800


def test_the_time_left_is_taken_from_what_is_done_when_nothing_is_known_of_earlier_loads() -> None:
    progress = LoadProgress(started_at=time.monotonic() - 300.0, fraction=0.25)
    left = progress.eta_s()
    assert left is not None
    assert 850 <= left <= 1050
    assert LoadProgress(started_at=time.monotonic() - 3.0, fraction=0.01).eta_s() is None
    assert LoadProgress().eta_s() is None


def test_a_load_that_takes_longer_than_the_last_has_no_negative_time_left() -> None:
    assert LoadProgress(started_at=time.monotonic() - 30.0, expected_s=10.0, fraction=None).eta_s() == 0.0
