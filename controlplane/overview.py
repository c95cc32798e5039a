"""The first page of the admin: how requests and nodes do over a range and now, what waits for whom, and the first steps."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.http import HttpRequest
from django.urls import reverse
from django.utils.formats import number_format
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from controlplane.templatetags.muster import print_duration
from core.charts import Chart, Colour, Line, draw_sparkline, print_value
from core.limits import limits
from core.models import User
from core.roles import may
from gateway.services.keys import has_own_key
from gateway.services.requests import OpenRequests, read_open_requests
from gateway.services.rollups import Comparison, Metric, Named, Quantiles, Sums, has_counted_any, read_comparison, read_top
from gateway.values import Dimension
from governance.alerts import ShownAlert, list_open_problems
from governance.operations.approvals import active_policy
from nodes.services.availability import FleetStanding, NodeHealth, read_standing
from nodes.services.history import FleetHistory, read_fleet_history, read_memory
from nodes.services.telemetry import NodeTelemetry, read_telemetries
from nodes.states import Unavailable
from wire import clock

_HOUR = timedelta(hours=1)
RANGES: dict[str, tuple[str | Promise, timedelta]] = {
    "15min": (gettext_lazy("15 min"), timedelta(minutes=15)),
    "1h": (gettext_lazy("1 h"), _HOUR),
    "6h": (gettext_lazy("6 h"), timedelta(hours=6)),
    "24h": (gettext_lazy("24 h"), timedelta(days=1)),
    "7d": (gettext_lazy("7 d"), timedelta(days=7)),
    "30d": (gettext_lazy("30 d"), timedelta(days=30)),
}
"""How far back a page can go, by what its address says."""
METRICS = (Metric.TTFT, Metric.QUEUE_TIME)
WIDTH, HEIGHT = 100, 24
"""Of a sparkline, in units of its view box."""
NODES, REQUESTS, TENANTS, OPEN = "nodes", "requests", "tenants", ""
SEES: Mapping[str, tuple[str, ...]] = {
    NODES: ("nodes.view_node", "nodes.change_node"),
    REQUESTS: ("gateway.view_requestrecord", "gateway.change_requestrecord"),
    TENANTS: ("gateway.view_tenant", "gateway.change_tenant"),
}
"""Parts of the page, and the permissions of which one lets a person see them. Every operator sees what needs attention."""


def list_seen(user: User | AnonymousUser) -> frozenset[str]:
    """Return the parts of the page that a person may see."""
    return frozenset(part for part, permissions in SEES.items() if any(may(user, name) for name in permissions)) | {OPEN}


def choose_range(name: str) -> str:
    return name if name in RANGES else "1h"


# What changes from one second to the next


@dataclass(frozen=True, slots=True)
class Strip:
    """One node in a line. ``state``: in words; ``tone``: its colour. ``beyond``: models that are not named."""

    id: uuid.UUID
    name: str
    state: str
    tone: str
    active: int
    slots: int
    is_heard: bool
    models: tuple[str, ...]
    beyond: int
    telemetry: NodeTelemetry | None


@dataclass(frozen=True, slots=True)
class Overview:
    """How things stand. ``strips``: the nodes that need a look first; ``hidden`` more are not shown."""

    fleet: FleetStanding
    open_requests: OpenRequests
    problems: tuple[ShownAlert, ...]
    strips: tuple[Strip, ...]

    @property
    def hidden(self) -> int:
        return self.fleet.total - len(self.strips)

    @property
    def live(self) -> Mapping[str, str]:
        return print_live(self)


def read_overview() -> Overview:
    """Collect what the open page refreshes by itself; six queries, however many rows there are."""
    fleet = read_standing(most=limits().console.overview_nodes)
    return Overview(fleet, read_open_requests(), list_open_problems(), list_strips(fleet))


def print_live(overview: Overview) -> dict[str, str]:
    """Return what the open page refreshes by itself within its tiles."""
    open_requests = overview.open_requests
    return {
        "nodes_ready": print_count(overview.fleet.ready),
        "nodes_total": _("of %(total)s") % {"total": print_count(overview.fleet.total)},
        "open": _("%(running)s running, %(queued)s queued")
        % {"running": print_count(open_requests.running), "queued": print_count(open_requests.queued)},
    }


def list_strips(fleet: FleetStanding) -> tuple[Strip, ...]:
    """Return the nodes that need a look first, at most ``overview_nodes``; one query."""
    first = sorted((*fleet.notable, *fleet.loaded), key=_rank_node)[: limits().console.overview_nodes]
    found = read_telemetries([node.id for node in first if node.id is not None])
    return tuple(_describe_strip(node, found.get(node.id)) for node in first if node.id is not None)


_RANKS = {reason: rank for rank, reason in enumerate((
    Unavailable.ERROR, Unavailable.UNREACHABLE, Unavailable.SILENT, Unavailable.LATE, Unavailable.DRAINING,
    Unavailable.HOLDS_BACK, Unavailable.TAKEN_BACK, Unavailable.CORDONED, None, Unavailable.DRAINED, Unavailable.PROVIDER_OFF,
))}  # fmt: skip
"""What keeps a node from work, the worst first; None = nothing does."""


def _rank_node(node: NodeHealth) -> tuple[int, float, str]:
    is_well = not (node.failed or node.ejections or node.witness_alarm or node.policy_error)
    load = node.active_requests / node.max_concurrent if node.max_concurrent else 0.0
    # A node that fails at something and still takes work stands before those that only were cordoned.
    return min(_RANKS[node.unavailable], len(_RANKS) if is_well else _RANKS[Unavailable.DRAINING]), -load, node.name


def _describe_strip(node: NodeHealth, telemetry: NodeTelemetry | None) -> Strip:
    assert node.id is not None
    most = limits().console.overview_models
    state, tone = _describe_state(node)
    return Strip(
        id=node.id,
        name=node.name,
        state=state,
        tone=tone,
        active=node.active_requests,
        slots=node.max_concurrent,
        is_heard=node.unavailable not in {Unavailable.SILENT, Unavailable.UNREACHABLE},
        models=node.model_names[:most],
        beyond=max(0, len(node.model_names) - most),
        telemetry=telemetry,
    )


_STATES: Mapping[Unavailable, tuple[str | Promise, str]] = {
    Unavailable.SILENT: (gettext_lazy("offline for %(time)s"), "offline"),
    Unavailable.UNREACHABLE: (gettext_lazy("unreachable"), "error"),
    Unavailable.PROVIDER_OFF: (gettext_lazy("provider switched off"), "draining"),
    Unavailable.ERROR: (gettext_lazy("error"), "error"),
    Unavailable.DRAINED: (gettext_lazy("drained: safe to power off"), "drained"),
    Unavailable.DRAINING: (gettext_lazy("draining, %(count)s running"), "draining"),
    Unavailable.CORDONED: (gettext_lazy("cordoned"), "draining"),
    Unavailable.TAKEN_BACK: (gettext_lazy("taken back by its owner"), "draining"),
    Unavailable.HOLDS_BACK: (gettext_lazy("takes no work"), "draining"),
    Unavailable.LATE: (gettext_lazy("late with its heartbeats"), "draining"),
}
"""What keeps a node from work: in words, and the tone that goes with it."""


def _describe_state(node: NodeHealth) -> tuple[str, str]:
    """Return the state in words and its tone."""
    if node.age_s is None:
        return _("never seen"), "offline"
    if node.unavailable is not None:
        text, tone = _STATES[node.unavailable]
        return str(text) % {"time": print_duration(node.age_s), "count": node.active_requests}, tone
    if node.failed:
        return _("a model failed"), "error"
    return (_("busy"), "busy") if node.active_requests >= node.max_concurrent else (_("ready"), "available")


# What requests came to


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure of the range. ``change``: against the time before; ``tone``: better, worse or neither.

    ``path``: of its sparkline. ``part``: what a person must be allowed to see.
    """

    name: str
    part: str
    label: str
    figure: str
    unit: str = ""
    change: str = ""
    tone: str = ""
    path: str = ""
    url: str = ""
    meaning: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """What the page shows of a range. ``began_at``: of its first step."""

    range: str
    title: str
    began_at: datetime
    total: Sums
    tiles: tuple[Tile, ...]
    requests: Chart
    latency: Chart
    tokens: Chart
    models: tuple[Named, ...]
    tenants: tuple[Named, ...]

    @property
    def charts(self) -> tuple[Chart, ...]:
        return (self.requests, self.latency, self.tokens)


def read_board(name: str) -> Board:
    """Return what the page shows of a range: six queries."""
    title, span = RANGES[name]
    found, most = read_comparison(span, METRICS), limits().console.overview_top
    began_at, now = found.points[0][0], clock.now()
    history = read_fleet_history(began_at, step=found.step, points=len(found.points))
    starts, step_s = [int(at.timestamp()) for at, _sums in found.points], int(found.step.total_seconds())
    requests = f"{reverse('admin:gateway_requestrecord_changelist')}?since={{since}}&until={{until}}"
    is_idle = not found.total.requests
    # The last step is as long as it has lasted.
    lengths = [min(step_s, max(1.0, (now - at).total_seconds())) for at, _sums in found.points]

    def chart_latency(label: str, metric: Metric, colours: tuple[Colour, Colour]) -> list[Line]:
        medians, worst = _("%(what)s, median"), _("%(what)s, p95")
        values = found.quantiles[metric]
        return [
            Line(medians % {"what": label}, [one.p50_ms for one in values], colours[0]),
            Line(worst % {"what": label}, [one.p95_ms for one in values], colours[1]),
        ]

    def chart_rate(label: str, column: str, colour: Colour) -> Line:
        rates = [getattr(sums, column) / length for (_at, sums), length in zip(found.points, lengths, strict=True)]
        return Line(label, [None] * len(rates) if is_idle else rates, colour)

    return Board(
        range=name,
        title=str(title),
        began_at=began_at,
        total=found.total,
        tiles=_make_tiles(found, history, lengths, span, str(title)),
        requests=Chart(
            "requests",
            _("Requests by outcome"),
            "requests",
            starts,
            step_s,
            [
                Line(_("Served"), [sums.served for _at, sums in found.points], "good"),
                Line(_("Cancelled by the caller"), [sums.cancelled for _at, sums in found.points], "cancelled"),
                Line(_("Refused (caller's mistake)"), [sums.refused for _at, sums in found.points], "refused"),
                Line(_("Failed"), [sums.failed for _at, sums in found.points], "fault"),
            ],
            kind="bars",
            is_stacked=True,
            link=requests,
        ),
        latency=Chart(
            "latency",
            _("Time to first token"),
            "ms",
            starts,
            step_s,
            [
                *chart_latency(_("First token"), Metric.TTFT, ("first", "second")),
                *chart_latency(_("Queue"), Metric.QUEUE_TIME, ("third", "fourth")),
            ],
        ),
        tokens=Chart(
            "tokens",
            _("Tokens per second"),
            "",
            starts,
            step_s,
            [chart_rate(_("Out"), "completion_tokens", "first"), chart_rate(_("In"), "prompt_tokens", "second")],
        ),
        models=read_top(span, Dimension.MODEL, most=most),
        tenants=read_top(span, Dimension.TENANT, most=most),
    )


def _make_tiles(
    found: Comparison, history: FleetHistory, lengths: Sequence[float], span: timedelta, title: str
) -> tuple[Tile, ...]:
    listing = reverse("admin:gateway_requestrecord_changelist")
    since = f"since={found.points[0][0].timestamp():.0f}"
    total, before, span_s = found.total, found.before, span.total_seconds()
    sums = [one for _at, one in found.points]
    is_known = before.requests > 0
    lasted_s = sum(lengths)
    per_minute, per_minute_before = 60 * total.requests / lasted_s, 60 * before.requests / span_s
    out, out_before = total.completion_tokens / lasted_s, before.completion_tokens / span_s
    ttft, ttft_before = (part.get(Metric.TTFT, Quantiles()).p95_ms for part in (found.of_all, found.of_before))
    used_mb, total_mb = read_memory()
    mean_mb = [value for value in history.used_mb if value is not None]
    return (
        Tile(
            "nodes", NODES, _("Nodes ready"), "",
            change=_print_online(history.online[-1], history.online[0]) if any(history.online) else "",
            tone=_judge(history.online[-1], history.online[0], is_more_better=True),
            path=_sparkle([*history.online]), url=reverse("admin:nodes_node_changelist"),
            meaning=_("Nodes that take work; and how many were heard, now and %(range)s ago.") % {"range": title},
        ),
        Tile(
            "rate", REQUESTS, _("Requests per minute"), print_rate(per_minute),
            change=_compare(per_minute, per_minute_before, print_rate) if is_known else "",
            path=_sparkle([one.requests for one in sums]), url=f"{listing}?{since}",
        ),
        Tile(
            "failed", REQUESTS, _("Failed"), print_rate(total.failed_percent), "%",
            change=_compare(total.failed_percent, before.failed_percent, print_percent, is_share=True) if is_known else "",
            tone=_judge(total.failed_percent, before.failed_percent, is_more_better=False) if is_known else "",
            path=_sparkle([one.failed_percent for one in sums]), url=f"{listing}?state=wrong&{since}",
            meaning=_("A node, an engine or the gateway failed, or there was no capacity. What was refused does not count."),
        ),
        Tile(
            "ttft", REQUESTS, _("Time to first token, p95"), "–" if ttft is None else print_value(ttft, "ms"),
            change="" if ttft is None or ttft_before is None else _compare(ttft, ttft_before, print_ms),
            tone=_judge(ttft or 0, ttft_before or 0, is_more_better=False) if ttft and ttft_before else "",
            path=_sparkle([one.p95_ms for one in found.quantiles[Metric.TTFT]]),
        ),
        Tile(
            "tokens", REQUESTS, _("Tokens per second, out"), print_rate(out),
            change=_compare(out, out_before, print_rate) if is_known else "",
            path=_sparkle([one.completion_tokens / length for one, length in zip(sums, lengths, strict=True)]),
        ),
        Tile(
            "memory", NODES, _("GPU memory in use"), print_memory(used_mb) if total_mb else "–",
            _("of %(total)s") % {"total": print_memory(total_mb)} if total_mb else "",
            change=_compare(sum(mean_mb) / len(mean_mb), history.used_before, print_memory)
            if mean_mb and history.used_before is not None else "",
            path=_sparkle([*history.used_mb]), url=reverse("admin:nodes_gpu_changelist"),
        ),
    )  # fmt: skip


def _sparkle(values: Sequence[float | None]) -> str:
    """Return the path of a tile's line; of more steps than there is room for, the mean of some together."""
    together = -(-len(values) // WIDTH) if values else 1
    parts = [values[first : first + together] for first in range(0, len(values), together)]
    known = [[value for value in part if value is not None] for part in parts]
    return draw_sparkline([sum(part) / len(part) if part else None for part in known], width=WIDTH, height=HEIGHT)


def print_rate(value: float) -> str:
    return print_value(round(value, 2), "")


def print_percent(value: float) -> str:
    return print_value(round(value, 2), "%")


def print_ms(value: float) -> str:
    return print_value(value, "ms")


def print_memory(value: float) -> str:
    return print_value(value, "MiB")


def print_count(value: float) -> str:
    return number_format(round(value), force_grouping=True)


def _print_online(now: int, before: int) -> str:
    if now == before:
        return _("%(now)s online") % {"now": print_count(now)}
    return _("%(now)s online, %(before)s before") % {"now": print_count(now), "before": print_count(before)}


def _compare(value: float, before: float, print_it: Callable[[float], str], *, is_share: bool = False) -> str:
    """Return what a figure was before, with the change in percent where that says anything: not of a share, itself one."""
    was = print_it(before)
    if was == print_it(value):
        return _("as before")
    sign = "▲" if value > before else "▼"
    if is_share or before <= 0 or not limits().console.overview_change_percent <= 100 * abs(value - before) / before <= 999:
        return _("%(sign)s from %(before)s") % {"sign": sign, "before": was}
    percent = number_format(round(100 * abs(value - before) / before))
    return _("%(sign)s %(percent)s %% from %(before)s") % {"sign": sign, "percent": percent, "before": was}


def _judge(value: float, before: float, *, is_more_better: bool) -> str:
    """Return whether a figure is better or worse than before; neither when it is about the same."""
    if 100 * abs(value - before) <= limits().console.overview_judged_percent * before:
        return ""
    return "better" if (value > before) is is_more_better else "worse"


# The first steps


@dataclass(frozen=True, slots=True)
class Step:
    """One of the first steps. ``url``: where it is made; empty = not in a page that this person may open."""

    text: str
    is_done: bool
    url: str = ""


def read_checklist(request: HttpRequest, fleet: FleetStanding) -> tuple[Step, ...]:
    """Return the first steps of an installation; none once all are made, or when the person put them away. Three queries."""
    user = request.user
    if not isinstance(user, User) or user.checklist_hidden_at is not None:
        return ()
    policy = active_policy()

    def link(name: str, permission: str) -> str:
        return reverse(name) if may(user, permission) else ""

    steps = (
        Step(_("Send a first request"), has_counted_any(), link("playground:page", "gateway.add_apikey")),
        Step(_("Add a second node"), fleet.total > 1, link("admin:nodes_node_setup", "nodes.add_nodecredential")),
        Step(_("Make a key for an application"), has_own_key(), link("admin:gateway_apikey_add", "gateway.add_apikey")),
        Step(_("Serve these pages over HTTPS"), request.is_secure() or settings.PUBLIC_URL.startswith("https://")),
        Step(
            _("Let two people approve changes"),
            policy is not None and len(policy[1].groups) > 1,
            reverse("approvals:policy"),
        ),
    )
    return () if all(step.is_done for step in steps) else steps


def hide_checklist(user: User) -> None:
    """Put the first steps away for this person."""
    User.objects.filter(pk=user.pk).update(checklist_hidden_at=clock.now())
