"""How the operators' pages print numbers."""

from __future__ import annotations

from datetime import datetime

from django import template
from django.utils.formats import get_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _

from gateway.services.waterfalls import print_ms
from nodes.operations.targets import print_memory
from wire import clock

register = template.Library()

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))
_SCALES = ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k"))


@register.filter
def age(seconds: float | None) -> str:
    """Return how long ago something was, in its largest fitting unit."""
    return _("never") if seconds is None else _("%(time)s ago") % {"time": print_duration(seconds)}


@register.filter
def seconds(milliseconds: int) -> str:
    """Return milliseconds as seconds with three significant digits, without the unit."""
    return _localize(milliseconds / 1000) if milliseconds < 100_000 else f"{milliseconds / 1000:.0f}"


@register.filter
def beside(milliseconds: int, other_ms: int) -> SafeString:
    """Return two times, the second one smaller, and the unit once where both have the same: 36 · 201 ms."""
    (number, unit), (other, other_unit) = _measure(milliseconds), _measure(other_ms)
    between = "" if unit == other_unit else f"\u00a0{unit}"
    return format_html("{}<small>{}\u00a0· {}\u00a0{}</small>", number, between, other, other_unit)


@register.filter
def compact(value: int) -> str:
    """Return a count with three significant digits: 950, 2.75M."""
    for size, letter in _SCALES:
        if value >= size:
            return f"{_localize(value / size)}{letter}"
    return str(value)


@register.filter
def ms(milliseconds: int | None) -> str:
    """Return a time as people read it: 12 ms, 3.4 s, 2 min 5 s; a dash when not known."""
    return print_ms(milliseconds)


@register.filter
def memory(mb: int | None) -> str:
    """Return MiB as a page shows them: 512 MiB, 17.5 GiB; a dash when not known."""
    return "–" if mb is None else print_memory(mb)


@register.filter
def time_left(moment: datetime) -> str:
    """Return how long it is until a moment, in its largest fitting unit."""
    return print_duration(max(0.0, (moment - clock.now()).total_seconds()))


@register.filter
def duration(seconds: float) -> str:
    return print_duration(seconds)


def print_duration(duration_s: float) -> str:
    for size, unit in _UNITS:
        if duration_s >= 2 * size:
            return f"{duration_s / size:.0f} {unit}"
    return f"{duration_s:.0f} s"


def _measure(milliseconds: int) -> tuple[str, str]:
    return (str(milliseconds), "ms") if milliseconds < 1000 else (seconds(milliseconds), "s")


def _localize(value: float) -> str:
    """Return a number with three significant digits as the language of the page writes it."""
    return f"{value:.3g}".replace(".", get_format("DECIMAL_SEPARATOR"))
