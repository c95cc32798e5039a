"""What the page of one request tells first: how it stands or ended, why, which way it went, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gateway.admin.endings import NOBODY_THERE, explain_ending, name_state
from gateway.models import RequestRecord
from gateway.services.waiting import Wait, explain_waits
from wire.contract import OPEN_REQUEST_STATES, RequestState


class TimePart(NamedTuple):
    """One stretch of a request's time. ``start`` and ``share`` in percent of the whole, ``ms`` in milliseconds."""

    name: str
    label: str
    ms: int
    start: float
    share: float


@dataclass(frozen=True, slots=True)
class Story:
    """The first lines of a request's page. ``now``: how the nodes of its model stand at this moment, where that matters.

    ``asked``: the name the client used, if another than the model's. ``badge``: the name of the colour of ``state``.
    """

    state: str
    badge: str
    is_open: bool
    what: str
    advice: str
    now: Wait | None
    asked: str
    parts: tuple[TimePart, ...]


def tell_request(record: RequestRecord) -> Story:
    """Return what a request's page says first. Two queries when boxes matter, else none."""
    is_open = RequestState(record.state) in OPEN_REQUEST_STATES
    asks_why = record.state == RequestState.QUEUED or record.error_code in NOBODY_THERE
    now = explain_waits([record.model])[record.model] if asks_why and record.model else None
    what, advice = _say_state(record, now)
    state, badge = name_state(record)
    return Story(
        state=state,
        badge=badge,
        is_open=is_open,
        what=what,
        advice=advice,
        now=now if not is_open else None,
        asked=record.asked_model,
        parts=split_time(record),
    )


def split_time(record: RequestRecord) -> tuple[TimePart, ...]:
    """Return where the time of a finished request went: queue, the wait for the first byte, the answer."""
    whole = record.latency_ms or 0
    if not whole or not record.attempts:
        return ()
    queue = min(record.queue_ms or 0, whole)
    first = min(max(record.ttfb_ms if record.ttfb_ms is not None else whole, queue), whole)
    stretches = (
        ("queue", "in the queue", queue),
        ("first", "to the first byte", first - queue),
        ("answer", "the answer", whole - first),
    )
    parts, start = [], 0
    for name, label, ms in stretches:
        parts.append(TimePart(name, label, ms, round(100 * start / whole, 3), round(100 * ms / whole, 3)))
        start += ms
    return tuple(parts)


def _say_state(record: RequestRecord, now: Wait | None) -> tuple[str, str]:
    match RequestState(record.state):
        case RequestState.QUEUED:
            return (f"It waits: {now.reason}", now.advice) if now is not None else ("It waits for a node.", "")
        case RequestState.ASSIGNED:
            return f"{record.node_name} is to answer it.", ""
        case RequestState.RUNNING:
            return f"{record.node_name} works on it.", ""
    ending = explain_ending(record)
    if ending is not None:
        return ending.what, ending.advice
    return ("Answered in full.", "") if record.state == RequestState.COMPLETED else (f"It was {record.state}.", "")
