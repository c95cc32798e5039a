"""The pauses before a part is started again."""

from __future__ import annotations

from controlplane.launcher.backoff import Backoff


def test_a_first_death_costs_no_pause_and_the_next_ones_double_up_to_the_longest() -> None:
    backoff = Backoff()
    assert [backoff.next_pause_s(1.0) for _ in range(8)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


def test_a_healthy_run_starts_over() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.next_pause_s(1.0)
    assert backoff.next_pause_s(10.0) == 0.0
    assert backoff.next_pause_s(9.9) == 0.5


def test_thousands_of_failures_do_not_overflow() -> None:
    backoff = Backoff(failures=100_000)
    assert backoff.next_pause_s(0.0) == 15.0
