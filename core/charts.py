"""Charts of pages: what one shows, as data. ``templates/admin/muster/chart.html`` and ``muster/chart.js`` draw it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from django.utils.formats import date_format, number_format
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

RANGES: dict[str, tuple[str | Promise, timedelta]] = {
    "15min": (gettext_lazy("15 min"), timedelta(minutes=15)),
    "1h": (gettext_lazy("1 h"), timedelta(hours=1)),
    "6h": (gettext_lazy("6 h"), timedelta(hours=6)),
    "24h": (gettext_lazy("24 h"), timedelta(hours=24)),
    "7d": (gettext_lazy("7 d"), timedelta(days=7)),
    "30d": (gettext_lazy("30 d"), timedelta(days=30)),
}
"""How far back a page can look, by what its address says: the label, and how long that is."""

Unit = Literal["requests", "tokens", "ms", "MiB", "%", "W", "°C", ""]
Kind = Literal["bars", "lines", "areas"]
Colour = Literal[
    "good",
    "refused",
    "fault",
    "cancelled",
    "unused",
    "first",
    "second",
    "third",
    "fourth",
    "fifth",
    "sixth",
    "seventh",
    "eighth",
]
"""A custom property ``--mst-line-…`` of ``muster/chart.css``, in a light and a dark palette."""

_COUNTED = ("requests", "tokens")
"""Units whose values add up, and of which none means that nothing happened."""


def choose_range(name: str) -> str:
    """Return the name of a range that an address asks for, of an hour where it asks for none that there is."""
    return name if name in RANGES else "1h"


@dataclass(frozen=True, slots=True)
class Line:
    """One series. ``values``: one for each step of the chart; None = not known, and shown as a gap."""

    label: str
    values: Sequence[float | None]
    colour: Colour = "first"


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over one time. ``name``: of the chart in its page, a part of ids. ``starts``: of each step, unix time.

    ``is_stacked``: the lines add up, the first one at the bottom. ``link``: the address that a click on a step opens, with
    ``{since}`` and ``{until}`` for its two ends, in unix time.
    """

    name: str
    title: str
    unit: Unit
    starts: Sequence[int]
    step_s: int
    lines: Sequence[Line]
    kind: Kind = "lines"
    is_stacked: bool = False
    link: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw; of a count, zero is nothing."""
        return not any(
            value or (value is not None and self.unit not in _COUNTED) for line in self.lines for value in line.values
        )

    @property
    def data(self) -> dict[str, object]:
        """Return what the browser draws it from, and what a push brings anew."""
        return {
            "name": self.name,
            "unit": self.unit,
            "starts": list(self.starts),
            "step_s": self.step_s,
            "kind": self.kind,
            "is_stacked": self.is_stacked,
            "link": self.link,
            "is_empty": self.is_empty,
            "summary": self.summary,
            "lines": [
                {"label": line.label, "colour": line.colour, "values": [_shorten(value) for value in line.values]}
                for line in self.lines
            ],
        }

    @property
    def data_id(self) -> str:
        return f"chart-{self.name}-data"

    @property
    def summary(self) -> str:
        """Return what the chart shows, in sentences for those who do not see it."""
        if self.is_empty or not self.starts:
            return _("%(title)s: nothing in this time.") % {"title": self.title}
        since, until = datetime.fromtimestamp(self.starts[0], UTC), datetime.fromtimestamp(self.starts[-1] + self.step_s, UTC)
        form = "DATE_FORMAT" if timedelta(seconds=self.step_s) >= timedelta(days=1) else "DATETIME_FORMAT"
        moments = {"title": self.title, "since": date_format(since, form), "until": date_format(until, form)}
        return " ".join([_("%(title)s, from %(since)s to %(until)s UTC.") % moments, *map(self._describe, self.lines)])

    def _describe(self, line: Line) -> str:
        known = [value for value in line.values if value is not None]
        if not known:
            return _("%(line)s: not known.") % {"line": line.label}
        most = print_value(max(known), self.unit)
        if self.unit in _COUNTED:
            total = print_value(sum(known), self.unit)
            return _("%(line)s: %(total)s in all, at most %(most)s in one step.") % {
                "line": line.label, "total": total, "most": most,
            }  # fmt: skip
        values = {"line": line.label, "least": print_value(min(known), self.unit), "most": most}
        return _("%(line)s: between %(least)s and %(most)s.") % values


def print_value(value: float, unit: Unit) -> str:
    """Return a value with its unit, as the language writes numbers; counts stand alone. ``chart.js`` does the same."""
    shown, sign = value, "" if unit in _COUNTED else str(unit)
    if unit == "ms" and abs(value) >= 1_000:
        shown, sign = value / 1_000, "s"
    elif unit == "MiB" and abs(value) >= 1_024:
        shown, sign = value / 1_024, "GiB"
    places = 0 if float(shown).is_integer() or abs(shown) >= 100 else 1 if abs(shown) >= 10 else 2
    number = number_format(round(shown, places) if places else round(shown), decimal_pos=places or None, force_grouping=True)
    return f"{number}\u00a0{sign}" if sign else number


def draw_sparkline(values: Sequence[float | None], *, width: int, height: int, top: float = 0) -> str:
    """Return the path of a small line without axes, for the ``d`` of an SVG path: from zero up, with gaps where None is.

    ``top``: what the upper edge stands for; 0 = the highest value.
    """
    top = top or max((value for value in values if value is not None), default=0) or 1
    pitch = width / max(1, len(values) - 1)
    path, is_apart = [], True
    for index, value in enumerate(values):
        if value is not None:
            point = f"{index * pitch:.1f} {height - 1 - (height - 2) * max(0, value) / top:.1f}"
            path.append(f"M{point}h0" if is_apart else f"L{point}")  # round ends make a point of its own visible
        is_apart = value is None
    return "".join(path)


def _shorten(value: float | None) -> float | None:
    """Return a value without digits that nobody sees: a push carries all of them."""
    return None if value is None else int(value) if float(value).is_integer() else float(f"{value:.5g}")
