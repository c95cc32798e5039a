"""Charts of GPUs: load, what memory is used for, temperature and power over a range, from the history of samples and means."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import connection
from django.utils.translation import gettext as _

from core.charts import RANGES, Chart, Colour, Line, draw_sparkline
from nodes.models import Gpu, GpuMinute, GpuMoment, GpuSample, GpuTenMinutes, read_clock

_COLOURS: tuple[Colour, ...] = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")


@dataclass(frozen=True, slots=True)
class _Steps:
    """Which table a range is read from, and how much of it one step of a chart is."""

    model: type[GpuMoment]
    step: timedelta


_STEPS = {
    "15min": _Steps(GpuSample, timedelta(seconds=10)),
    "1h": _Steps(GpuSample, timedelta(seconds=30)),
    "6h": _Steps(GpuMinute, timedelta(minutes=3)),
    "24h": _Steps(GpuMinute, timedelta(minutes=10)),
    "7d": _Steps(GpuTenMinutes, timedelta(hours=1)),
    "30d": _Steps(GpuTenMinutes, timedelta(hours=4)),
}
"""Of each range: 90 to 180 steps."""
# The index of a GPU and a time finds the rows.
_READ = """
SELECT gpu_id, floor(extract(epoch FROM at - %(begins_at)s) / %(step)s)::int AS place, avg(load_percent), avg(vram_used_mb),
       avg(temperature_c), avg(power_w), avg(weights_mb), avg(kv_mb)
  FROM {table} WHERE gpu_id = ANY(%(gpus)s) AND at >= %(begins_at)s AND at < %(ends_at)s
 GROUP BY gpu_id, place
"""


@dataclass(frozen=True, slots=True)
class _Moment:
    load: float | None
    used_mb: float | None
    heat: float | None
    power: float | None
    weights_mb: float | None
    kv_mb: float | None


@dataclass(frozen=True, slots=True)
class _History:
    """What GPUs did: by GPU and step. Memory of GPUs whose size is not known is left out of sums."""

    gpus: Sequence[Gpu]
    moments: dict[uuid.UUID, dict[int, _Moment]]
    starts: Sequence[int]
    step_s: int

    def trace(self, gpu: Gpu, read: Callable[[_Moment], float | None]) -> list[float | None]:
        found = self.moments.get(gpu.pk, {})
        return [read(found[place]) if place in found else None for place in range(len(self.starts))]

    def add(self, read: Callable[[_Moment], float | None]) -> list[float | None]:
        """Return the sum over the GPUs at each step; None where none says it."""
        traces = [self.trace(gpu, read) for gpu in self.gpus]
        return [_sum(values) for values in zip(*traces, strict=True)] if traces else [None] * len(self.starts)


def chart_gpus(gpus: Sequence[Gpu], name: str, *, now: datetime) -> list[Chart]:
    """Return four charts of GPUs, which stand in the order of their numbers, over a range of ``RANGES``; one query.

    Memory is that of all of them together. Of many GPUs the lines are the mean and the highest.
    """
    history = _read(gpus, name, now=now)
    lines: list[tuple[str, str, Any, Callable[[_Moment], float | None]]] = [  # Any: a unit, as a literal
        ("load", _("GPU utilisation"), "%", lambda one: one.load),
        ("heat", _("GPU temperature"), "°C", lambda one: one.heat),
        ("power", _("GPU power"), "W", lambda one: one.power),
    ]
    charts = [
        Chart(key, title, unit, history.starts, history.step_s, tuple(_draw_lines(history, read)))
        for key, title, unit, read in lines
    ]
    return [charts[0], _chart_memory(history), *charts[1:]]


_LOADS = """
SELECT g.node_id, floor(extract(epoch FROM m.at - %(begins_at)s) / %(step)s)::int AS place, avg(m.load_percent)
  FROM unnest(%(nodes)s::uuid[], %(gpus)s::uuid[]) AS g (node_id, gpu_id) JOIN nodes_gpuminute AS m USING (gpu_id)
 WHERE m.at >= %(begins_at)s
 GROUP BY g.node_id, place
"""
_LOAD_SPAN, _LOAD_STEP = timedelta(hours=1), timedelta(minutes=2)


def read_loads(gpus: Mapping[uuid.UUID, Sequence[uuid.UUID]]) -> dict[uuid.UUID, str]:
    """Return how busy the GPUs of each node were within the hour, as the path of a small line; one query for all of them."""
    pairs = [(node_id, gpu_id) for node_id, own in gpus.items() for gpu_id in own]
    if not pairs:
        return {}
    places = _LOAD_SPAN // _LOAD_STEP
    values: dict[str, Any] = {"nodes": [node_id for node_id, _gpu in pairs], "gpus": [gpu_id for _node, gpu_id in pairs]}
    values |= {"begins_at": read_clock() - _LOAD_SPAN, "step": _LOAD_STEP.total_seconds()}
    found: dict[uuid.UUID, list[float | None]] = {}
    with connection.cursor() as cursor:
        cursor.execute(_LOADS, values)
        for node_id, place, load in cursor.fetchall():
            if place < places:
                found.setdefault(node_id, [None] * places)[place] = load
    return {node_id: draw_sparkline(loads, width=100, height=24, top=100) for node_id, loads in found.items()}


def _read(gpus: Sequence[Gpu], name: str, *, now: datetime) -> _History:
    steps, span = _STEPS[name], RANGES[name][1]
    step_s, table = int(steps.step.total_seconds()), steps.model._meta.db_table  # noqa: SLF001  # Django documents it
    last = int(now.timestamp()) // step_s * step_s
    starts = [last - step_s * back for back in reversed(range(int(span / steps.step)))]
    moments: dict[uuid.UUID, dict[int, _Moment]] = defaultdict(dict)
    values: dict[str, Any] = {"step": step_s, "gpus": [gpu.pk for gpu in gpus]}
    values["begins_at"] = datetime.fromtimestamp(starts[0], tz=now.tzinfo)
    values["ends_at"] = datetime.fromtimestamp(last + step_s, tz=now.tzinfo)
    with connection.cursor() as cursor:
        cursor.execute(_READ.format(table=table), values)
        for gpu_id, place, *said in cursor.fetchall():
            moments[gpu_id][place] = _Moment(*said)
    return _History(gpus, moments, starts, step_s)


def _draw_lines(history: _History, read: Callable[[_Moment], float | None]) -> Iterator[Line]:
    if len(history.gpus) <= len(_COLOURS):
        for gpu, colour in zip(history.gpus, _COLOURS, strict=False):
            yield Line(_("GPU %(index)d") % {"index": gpu.index}, history.trace(gpu, read), colour)
        return
    columns = list(zip(*(history.trace(gpu, read) for gpu in history.gpus), strict=True))
    known = [[value for value in column if value is not None] for column in columns]
    yield Line(_("mean of %(count)d GPUs") % {"count": len(history.gpus)}, [sum(k) / len(k) if k else None for k in known])
    yield Line(_("highest"), [max(k, default=None) for k in known], "second")


def _chart_memory(history: _History) -> Chart:
    used, weights, kv = (history.add(read) for read in (lambda o: o.used_mb, lambda o: o.weights_mb, lambda o: o.kv_mb))
    total = sum(gpu.vram_mb or 0 for gpu in history.gpus)
    # Estimates of weights may be above what is used: a stack that is higher than the memory would be a lie.
    held = [None if u is None else min(w or 0, u) for u, w in zip(used, weights, strict=True)]
    cached = [None if u is None else min(k or 0, u - (h or 0)) for u, h, k in zip(used, held, kv, strict=True)]
    other = [None if u is None else u - (h or 0) - (c or 0) for u, h, c in zip(used, held, cached, strict=True)]
    lines = [Line(_("weights"), held, "first"), Line(_("KV cache"), cached, "third"), Line(_("other"), other, "second")]
    if total:
        lines.append(Line(_("free"), [None if u is None else max(0, total - u) for u in used], "unused"))
    return Chart(
        "memory", _("GPU memory"), "MiB", history.starts, history.step_s, tuple(lines), "areas", is_stacked=True
    )  # fmt: skip


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
