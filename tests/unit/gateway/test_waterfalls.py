"""Where the time of a request went, to scale."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.models import RequestRecord
from gateway.services.waterfalls import Waterfall, draw_waterfall, find_rate, list_losses, print_ms
from wire.contract import RequestState

CAME = datetime(2026, 11, 28, 12, tzinfo=UTC)
FIRST, SECOND = uuid.UUID(int=1), uuid.UUID(int=2)


def record(*, ended_ms: int | None = 990, **changes: Any) -> RequestRecord:
    """Return a request whose record was made 10 ms after its first byte, and ended ``ended_ms`` after that."""
    ended = None if ended_ms is None else CAME + timedelta(milliseconds=ended_ms)
    values: dict[str, Any] = {
        "created_at": CAME, "finished_at": ended, "state": RequestState.COMPLETED.value, "attempts": 1, "queue_ms": 90,
        "ttfb_ms": 250, "latency_ms": 1000, "node_name": "attic", "is_streaming": True,
    }  # fmt: skip
    return RequestRecord(**{**values, **changes})


def draw(one: RequestRecord, *, after_s: float = 60.0) -> Waterfall | None:
    return draw_waterfall(one, now=CAME + timedelta(seconds=after_s), node_names={FIRST: "den"})


def list_times(one: RequestRecord) -> list[tuple[str, int, int]]:
    drawn = draw(one)
    assert drawn is not None
    return [(stretch.kind, stretch.starts_ms, stretch.ms) for stretch in drawn.stretches]


def test_the_stretches_of_a_request_follow_each_other_and_leave_no_rest() -> None:
    assert list_times(record()) == [("check", 0, 10), ("queue", 10, 90), ("first", 100, 150), ("answer", 250, 750)]
    assert list_times(record(ttfb_ms=None, ended_ms=1000)) == [("check", 0, 0), ("queue", 0, 90), ("first", 90, 910)]
    assert list_times(record(queue_ms=5000, ttfb_ms=20)) == [
        ("check", 0, 10), ("queue", 10, 990), ("first", 1000, 0), ("answer", 1000, 0),
    ]  # fmt: skip


def test_places_are_percent_of_the_whole_with_a_point_whatever_the_language() -> None:
    drawn = draw(record())
    assert drawn is not None
    assert [(stretch.x, stretch.width) for stretch in drawn.stretches][1:3] == [("1.000%", "9.000%"), ("10.000%", "15.000%")]
    assert drawn.stretches[0].width == "1.000%"
    assert [tick.label for tick in drawn.ticks] == [print_ms(ms) for ms in (0, 200, 400, 600, 800, 1000)]


def test_a_node_that_failed_has_a_stretch_of_its_own_until_it_was_noticed() -> None:
    lost = f"{FIRST.hex} m\t140\tlost\n{SECOND.hex} m\t200\tengine\n"
    drawn = draw(record(lost_attempts=lost, attempts=3))
    assert drawn is not None
    assert [(one.kind, one.starts_ms, one.ms) for one in drawn.stretches] == [
        ("check", 0, 10), ("lost", 10, 140), ("lost", 150, 60), ("first", 210, 40), ("answer", 250, 750),
    ]  # fmt: skip
    assert "den" in drawn.stretches[1].label
    old = record(lost_attempts=f"{FIRST.hex} a model, with spaces\n")
    assert [(one.node_id, one.model, one.after_ms) for one in list_losses(old)] == [(FIRST, "a model, with spaces", None)]
    assert [kind for kind, *_ in list_times(old)] == ["check", "queue", "first", "answer"]


def test_an_open_request_grows_until_now() -> None:
    times = {"ended_ms": None, "latency_ms": None, "ttfb_ms": None}
    waiting = draw(record(state=RequestState.QUEUED.value, queue_ms=None, attempts=0, **times), after_s=3)
    assert waiting is not None
    assert (waiting.is_growing, waiting.total_ms, [(one.kind, one.ms) for one in waiting.stretches]) == (
        True, 3000, [("queue", 3000)],
    )  # fmt: skip
    running = draw(record(state=RequestState.RUNNING.value, **times), after_s=3)
    assert running is not None
    assert [(one.kind, one.ms) for one in running.stretches] == [("queue", 90), ("first", 2910)]


def test_nothing_is_drawn_of_a_request_that_no_node_got() -> None:
    assert draw(record(attempts=0)) is None
    assert draw(record(latency_ms=0)) is None


def test_the_speed_is_that_of_the_answer_where_somebody_counted() -> None:
    assert find_rate(record(completion_tokens=75)) == 100
    assert find_rate(record(completion_tokens=91, is_streaming=False)) == 100
    assert find_rate(record(completion_tokens=75, tokens_estimated=True)) is None
    assert find_rate(record(completion_tokens=None)) is None


def test_a_time_is_printed_with_the_unit_that_fits() -> None:
    printed = [print_ms(ms) for ms in (None, 0, 999, 1000, 3450, 59_990, 60_000, 125_000, 5_400_000, 7_200_000_000)]
    assert [text.replace("\u00a0", " ") for text in printed] == [
        "–", "0 ms", "999 ms", "1 s", "3.45 s", "59.99 s", "1 min", "2 min 5 s", "1 h 30 min",
        "2,000 h",
    ]  # fmt: skip
