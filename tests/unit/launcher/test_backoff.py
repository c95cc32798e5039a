"""The pauses before a part is started again."""

from __future__ import annotations

from controlplane.launcher.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff = Backoff()
    assert [backoff.next_pause_s(1.0) for _ in range(7)] == [0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0]


def test_a_healthy_minute_starts_over() -> None:
    backoff = Backoff()
    for _ in range(5):
        backoff.next_pause_s(1.0)
    assert backoff.next_pause_s(60.0) == 0.5
    assert backoff.next_pause_s(59.9) == 1.0


def test_thousands_of_failures_do_not_overflow() -> None:
    backoff = Backoff(failures=100_000)
    assert backoff.next_pause_s(0.0) == 15.0
