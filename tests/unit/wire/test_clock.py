"""The clock of a process, and what it knows of the time in which the process stood still."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.clock import virtual_clock
from tests.fakes.examples import examples
from wire import clock


def test_the_time_is_that_of_the_machine_until_another_source_is_put_in_its_place() -> None:
    before = time.monotonic()
    assert before <= clock.monotonic() <= time.monotonic()
    assert abs(clock.now().timestamp() - time.time()) < 60
    with virtual_clock() as virtual:
        virtual.unix_s = 86_400.5
        assert clock.now() == datetime(1970, 1, 2, 0, 0, 0, 500_000, tzinfo=UTC)
        assert (clock.unix_s(), clock.unix_ms()) == (86_400.5, 86_400_500)
        virtual.advance(2.0)
        clock.sleep(3.0)
        assert (clock.unix_s(), clock.monotonic()) == (86_405.5, 1_005.0)
    assert clock.monotonic() >= before


def test_of_a_pause_two_seconds_count_as_silence_of_others() -> None:
    with virtual_clock() as virtual:
        assert clock.beat() == 0.0
        began = clock.awake()
        virtual.advance(0.5)
        assert clock.beat() == 0.0
        virtual.advance(30.0)
        assert clock.awake() - began == 2.5, "also before anybody noted the pause"
        assert clock.beat() == 28.0
        assert clock.awake() - began == 2.5
        virtual.advance(1.0)
        assert clock.beat() == 0.0
        assert clock.awake() - began == 3.5


@examples(25)
@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=50))
def test_time_awake_never_goes_back_and_never_runs_faster(steps: list[tuple[float, bool]]) -> None:
    with virtual_clock() as virtual:
        awake = clock.awake()
        for seconds, beats in steps:
            virtual.advance(seconds)
            if beats:
                clock.beat()
            assert -1e-6 <= clock.awake() - awake <= seconds + 1e-6
            awake = clock.awake()
        assert awake <= clock.monotonic() + 1e-6
