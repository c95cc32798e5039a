"""Where the time of one request went: its stretches to scale, with an axis. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from core.limits import limits
from gateway.models import RequestRecord
from wire.contract import OPEN_REQUEST_STATES, RequestState


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that failed before another one got the request. ``after_ms``: since the record was made; None = not recorded."""

    node_id: uuid.UUID
    model: str
    after_ms: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Stretch:
    """One stretch. ``kind``: the name of its colour. ``x`` and ``width``: its place in percent, as SVG reads them."""

    kind: str
    label: str
    starts_ms: int
    ms: int
    x: str
    width: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A time on the axis. ``x``: in percent; ``anchor``: of its text, as SVG has it."""

    label: str
    x: str
    anchor: str


@dataclass(frozen=True, slots=True)
class Waterfall:
    """The stretches of a request in their order, and its axis. ``is_growing``: it is still at it."""

    stretches: tuple[Stretch, ...]
    ticks: tuple[Tick, ...]
    total_ms: int
    is_growing: bool


def list_losses(record: RequestRecord) -> list[Loss]:
    """Return which nodes failed, as their lines in the record say."""
    losses = []
    for line in record.lost_attempts.splitlines():
        node_id, _space, rest = line.partition(" ")
        model, *more = rest.split("\t")
        after_ms, reason = (int(more[0]), more[1]) if len(more) > 1 and more[0].isdigit() else (None, "")
        losses.append(Loss(uuid.UUID(node_id), model, after_ms, reason))
    return losses


def draw_waterfall(record: RequestRecord, *, now: datetime, node_names: Mapping[uuid.UUID, str]) -> Waterfall | None:
    """Return where the time went until now, or until its end; None where nothing is known of it."""
    is_open = RequestState(record.state) in OPEN_REQUEST_STATES
    total = record.latency_ms or 0
    if is_open:
        total = max(1, round((now - record.created_at).total_seconds() * 1000))
    elif record.finished_at is None or not record.attempts:
        return None
    if not total:
        return None
    stretches = tuple(
        Stretch(kind, label, starts, ms, _percent(starts, total), _percent(ms, total, least=limits().gateway.page_bar_percent))
        for kind, label, starts, ms in _split(record, total, is_open=is_open, names=node_names)
    )
    return Waterfall(stretches, tuple(_draw_ticks(total)), total, is_open)


def find_rate(record: RequestRecord) -> float | None:
    """Return the tokens a second that a node generated: of a stream from its first byte on; None where nobody counted."""
    took_ms = (record.latency_ms or 0) - (record.ttfb_ms if record.is_streaming and record.ttfb_ms else record.queue_ms or 0)
    if not record.completion_tokens or record.tokens_estimated or took_ms <= 0:
        return None
    return 1000 * record.completion_tokens / took_ms


def _split(
    record: RequestRecord, total: int, *, is_open: bool, names: Mapping[uuid.UUID, str]
) -> Iterator[tuple[str, str, int, int]]:
    """Yield kind, label, start and length of each stretch."""
    # The clock of the whole runs from the first byte of the request, the record is made once it is let in.
    checked = 0
    if not is_open and record.finished_at is not None:
        checked = min(max(0, total - round((record.finished_at - record.created_at).total_seconds() * 1000)), total)
        yield "check", _("Key, limits and budget checked"), 0, checked
    at = checked
    for number, loss in enumerate(list_losses(record), start=1):
        if loss.after_ms is None:
            continue
        ends = min(max(at, checked + loss.after_ms), total)
        name = names.get(loss.node_id, _("a node that is gone"))
        yield "lost", _("Attempt %(number)d: %(node)s, failed") % {"number": number, "node": name}, at, ends - at
        at = ends
    if record.state == RequestState.QUEUED:
        yield "queue", _("Waits in the queue"), at, total - at
        return
    if at == checked:  # the wait is the sum over all attempts
        waited = min(record.queue_ms or 0, total - at)
        yield "queue", _("In the queue"), at, waited
        at += waited
    node = record.node_name or _("the node")
    first = total if record.ttfb_ms is None else min(max(record.ttfb_ms, at), total)
    label = _("%(node)s, until the first byte") if record.ttfb_ms is not None else _("%(node)s, without an answer")
    yield "first", (_("%(node)s works on it") if is_open else label) % {"node": node}, at, first - at
    if record.ttfb_ms is not None:
        yield "answer", _("The answer, streamed") if record.is_streaming else _("The answer"), first, total - first


def _percent(value: float, whole: float, *, least: float = 0.0) -> str:
    # Not as the language writes numbers: SVG reads it.
    return f"{max(least, 100 * value / whole):.3f}%"


def _draw_ticks(total: int) -> Iterator[Tick]:
    step = next(
        size * 10**power for power in range(10) for size in (1, 2, 5) if size * 10**power * limits().gateway.page_ticks >= total
    )  # fmt: skip
    for at in range(0, total + 1, step):
        anchor = "start" if at == 0 else "end" if at > 0.94 * total else "middle"
        yield Tick(print_ms(at), _percent(at, total), anchor)


def print_ms(value: int | None) -> str:
    """Return milliseconds as people read them: 12 ms, 3.4 s, 2 min 5 s, 1 h 30 min; a dash when not known."""
    if value is None:
        return "–"
    if value < 1_000:
        return f"{value}\u00a0ms"
    if value < 60_000:
        return f"{value / 1000:.2f}".rstrip("0").rstrip(".") + "\u00a0s"
    minutes, seconds = divmod(round(value / 1000), 60)
    if minutes < 60:
        return f"{minutes}\u00a0min" + (f" {seconds}\u00a0s" if seconds else "")
    hours, minutes = divmod(minutes, 60)
    return f"{number_format(hours, force_grouping=True)}\u00a0h" + (f" {minutes}\u00a0min" if minutes else "")
