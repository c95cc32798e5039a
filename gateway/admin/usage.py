"""The page of usage: what tenants, keys, models and nodes used, by UTC day, and how far their budgets are used."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from decimal import Decimal
from typing import Any
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from core.charts import Chart, Colour, Line
from core.limits import limits
from core.roles import may
from gateway.models import ApiKey, Tenant
from gateway.services.budgets import BudgetLevel, BudgetState, read_budget_states
from gateway.services.exports import print_line
from gateway.services.rollups import (
    Named,
    Order,
    Part,
    Sums,
    add_sums,
    read_counted_until,
    read_days,
    read_first_day,
    read_first_names,
    read_totals,
)
from gateway.values import MILLION, BudgetKind, Dimension
from nodes.services.availability import read_node_names
from wire import clock
from wire.ids import format_id

Words = str | Promise
RANGES: dict[str, tuple[Words, int]] = {
    "7d": (gettext_lazy("7 d"), 7),
    "30d": (gettext_lazy("30 d"), 30),
    "90d": (gettext_lazy("90 d"), 90),
}
"""How many days the page shows, by what its address says."""
DEFAULT_RANGE = "30d"
GROUPS: dict[str, tuple[Words, Dimension]] = {
    "tenant": (gettext_lazy("Tenant"), Dimension.TENANT),
    "model": (gettext_lazy("Model"), Dimension.MODEL),
    "key": (gettext_lazy("Key"), Dimension.KEY),
    "node": (gettext_lazy("Node"), Dimension.NODE),
}
"""What the chart and the file are by."""
MEASURES: dict[str, tuple[Words, Order]] = {
    "tokens": (gettext_lazy("Tokens"), Order.TOKENS),
    "requests": (gettext_lazy("Requests"), Order.REQUESTS),
    "cost": (gettext_lazy("Cost"), Order.COST),
}
COLOURS: tuple[Colour, ...] = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "refused")
_KINDS: dict[BudgetKind, Words] = {
    BudgetKind.TOKENS_PER_DAY: gettext_lazy("tokens a day"),
    BudgetKind.TOKENS_PER_MONTH: gettext_lazy("tokens a month"),
    BudgetKind.COST_PER_DAY: gettext_lazy("cost a day"),
    BudgetKind.COST_PER_MONTH: gettext_lazy("cost a month"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to look at it, and its address."""

    label: Words
    query: str
    is_chosen: bool
    reason: str = ""
    """Why it cannot be chosen; empty = it can."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the address asks for. ``tenant`` empty = all."""

    range: str
    group: str
    measure: str
    tenant: str

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Asked:
        def choose(name: str, known: Mapping[str, object], default: str) -> str:
            value = given.get(name, "")
            return value if value in known else default

        tenant = given.get("tenant", "").replace("\x00", "").strip()[: limits().gateway.name_chars]
        group = choose("by", GROUPS, "tenant")
        if tenant and group == "node":  # nodes are not counted by tenant
            group = "model"
        return cls(choose("range", RANGES, DEFAULT_RANGE), group, choose("of", MEASURES, "tokens"), tenant)

    @property
    def days(self) -> int:
        return RANGES[self.range][1]

    def query(self, **changes: str) -> str:
        values = {"range": self.range, "by": self.group, "of": self.measure, "tenant": self.tenant, **changes}
        return urlencode({name: value for name, value in values.items() if value})


@dataclass(frozen=True, slots=True)
class Used:
    """The sums of one row, and its share of the measure that was chosen, in percent."""

    sums: Sums
    share: float

    @property
    def tokens(self) -> int:
        return self.sums.prompt_tokens + self.sums.completion_tokens

    @property
    def cost(self) -> Decimal:
        return Decimal(self.sums.cost_micros) / MILLION

    @property
    def node_hours(self) -> float:
        return self.sums.node_ms / 3_600_000


@dataclass(frozen=True, slots=True)
class UsageRow:
    """What one tenant used of one model. ``requests_url``: their requests."""

    tenant: str
    model: str
    used: Used
    requests_url: str


@dataclass(frozen=True, slots=True)
class BudgetRow:
    """One budget as the page shows it: places of its bar in percent, as SVG reads them, and its state in words."""

    owner: str
    url: str
    kind: Words
    is_cost: bool
    state: BudgetState
    level: str
    words: str

    @property
    def used(self) -> int | Decimal:
        return self._print(self.state.used)

    @property
    def reserved(self) -> int | Decimal:
        return self._print(self.state.reserved)

    @property
    def amount(self) -> int | Decimal:
        return self._print(self.state.budget.amount)

    @property
    def used_width(self) -> str:
        return self._percent(self.state.used)

    @property
    def reserved_width(self) -> str:
        return self._percent(self.state.reserved)

    def _percent(self, part: int) -> str:
        amount = self.state.budget.amount
        return f"{min(100.0, 100 * part / amount):.2f}%" if amount else "100%"

    def _print(self, amount: int) -> int | Decimal:
        return Decimal(amount) / MILLION if self.is_cost else amount


@require_safe
@never_cache
def show_usage(request: HttpRequest) -> HttpResponse:
    """Show what was used within some days. Everything is read from sums of days, and from who deals out budgets."""
    _require_right(request)
    asked = Asked.read(request.GET)
    order = MEASURES[asked.measure][1]
    pairs = Part(asked.days, Dimension.TENANT_MODEL, tenant=asked.tenant)
    named, others = read_totals(pairs, most=limits().gateway.page_usage_rows, order=order)
    total, first = add_sums([*(one.sums for one in named), *([others] if others is not None else [])]), read_first_day()
    context: dict[str, Any] = {  # Any: Django's template context
        **admin.site.each_context(request),
        "title": _("Usage"),
        "asked": asked,
        "ranges": [(name, label) for name, (label, _days) in RANGES.items()],
        "range": asked.range,
        "groups": [
            Choice(
                label,
                asked.query(by=name),
                name == asked.group,
                _("Nodes are not counted by tenant.") if name == "node" and asked.tenant else "",
            )
            for name, (label, _dimension) in GROUPS.items()
        ],
        "measures": [Choice(label, asked.query(of=name), name == asked.measure) for name, (label, _order) in MEASURES.items()],
        "tenants": list(Tenant.objects.values_list("name", flat=True)[: limits().gateway.page_choices]),
        "chart": draw_usage(asked),
        "rows": _list_rows(asked, named, total),
        "others": Used(others, _share(asked, others, total)) if others is not None else None,
        "total": Used(total, 100.0),
        "currency": settings.CURRENCY,
        "budgets": [show_budget(one) for one in read_budget_states(tenant=asked.tenant)],
        "counted_until": read_counted_until(),
        "counted_since": first if first is not None and first > pairs.starts[0] else None,
        "export": asked.query(),
        "without_tenant": asked.query(tenant=""),
    }
    return TemplateResponse(request, "admin/muster/usage.html", context)


@require_safe
@never_cache
def export_usage(request: HttpRequest) -> HttpResponse:
    """Return the days of the chart's names as CSV (RFC 4180), of every name; by tenant with its models."""
    _require_right(request)
    asked = Asked.read(request.GET)
    most = limits().gateway.page_export_rows
    part = _choose_part(asked)
    if asked.group in ("tenant", "model"):
        part, columns = Part(asked.days, Dimension.TENANT_MODEL, tenant=asked.tenant), ("tenant", "model")
        found = read_days(part, most=most + 1)
        shown = {name: tuple(name.split("\n", 1)) for name in found}
    else:
        columns, found = (asked.group, f"{asked.group}_id"), read_days(part, most=most + 1)
        shown = {name: (label, name) for name, label in name_all(asked.group, found).items()}
    rows = [
        print_line([f"{start:%Y-%m-%d}", *shown[name], *_export(days[index]), settings.CURRENCY])
        for index, start in enumerate(part.starts)
        for name, days in found.items()
        if days[index].requests
    ]
    lines = [print_line(["day", *columns, *EXPORTED, "currency"]), *rows[:most]]
    if len(rows) > most:
        lines.append(print_line([f"cut after {most} rows: choose fewer days or a tenant"]))
    answer = HttpResponse("".join(lines), content_type="text/csv; charset=utf-8")
    answer["content-disposition"] = f'attachment; filename="usage-{clock.now():%Y-%m-%d}.csv"'
    return answer


EXPORTED = (
    "requests", "served", "refused", "failed", "cancelled", "prompt_tokens", "cached_tokens", "completion_tokens",
    "node_seconds", "cost",
)  # fmt: skip


def _export(sums: Sums) -> tuple[object, ...]:
    counts = (sums.requests, sums.served, sums.refused, sums.failed, sums.cancelled)
    tokens = (sums.prompt_tokens, sums.cached_tokens, sums.completion_tokens)
    return (*counts, *tokens, f"{sums.node_ms / 1000:.3f}", f"{Decimal(sums.cost_micros) / MILLION:.6f}")


def _require_right(request: HttpRequest) -> None:
    if not may(request.user, "gateway.view_requestrecord"):
        raise PermissionDenied


def _choose_part(asked: Asked) -> Part:
    """Return the days and names that the chart is of; of one tenant those of its models or keys."""
    dimension = GROUPS[asked.group][1]
    if not asked.tenant:
        return Part(asked.days, dimension)
    if dimension is Dimension.MODEL:
        return Part(asked.days, Dimension.TENANT_MODEL, tenant=asked.tenant)
    if dimension is Dimension.KEY:
        keys = ApiKey.objects.filter(tenant__name=asked.tenant).values_list("pk", flat=True)
        return Part(asked.days, dimension, names=tuple(str(key) for key in keys))
    return Part(asked.days, dimension, names=(asked.tenant,))


def name_all(group: str, names: Collection[str]) -> dict[str, str]:
    """Return what people call the names of a group, by name; at most one query."""
    match group:
        case "key":
            keys = ApiKey.objects.filter(pk__in=list(names)).values_list("pk", "name", "tenant__name")
            known = {str(key): f"{name} ({tenant})" for key, name, tenant in keys}
            return {name: known.get(name, _("a key that is gone")) for name in names}
        case "node":
            nodes = {str(node): name for node, name in read_node_names([uuid.UUID(name) for name in names]).items()}
            return {name: nodes.get(name, format_id("node", uuid.UUID(name))) for name in names}
        case "model":
            # Of one tenant a name is the tenant's and the model's.
            return {name: name.rpartition("\n")[2] or _("unknown models") for name in names}
    return {name: name for name in names}


def draw_usage(asked: Asked) -> Chart:
    """Return the chart: the first names each, and what everything came to without them. Three queries, and one for names."""
    part = _choose_part(asked)
    first = read_first_names(part, most=len(COLOURS), order=MEASURES[asked.measure][1])
    labels = name_all(asked.group, first)
    found = read_days(replace(part, names=tuple(first)), most=part.days * len(first)) if first else {}
    whole = Part(asked.days, Dimension.TENANT, names=(asked.tenant,)) if asked.tenant else Part(asked.days, Dimension.ALL)
    days = next(iter(read_days(whole, most=asked.days).values()), ())
    lines = [
        Line(labels[name], [_measure(asked, day) for day in found[name]], colour)
        for colour, name in zip(COLOURS, first, strict=False)
    ]
    rest = [_measure(asked, day) - sum(line.values[index] or 0 for line in lines) for index, day in enumerate(days)]
    if any(value > 0 for value in rest):
        label = _("Other nodes, or none") if asked.group == "node" else _("Others")
        lines.append(Line(label, [max(0.0, round(value, 6)) for value in rest], "cancelled"))
    titles = {
        "tokens": _("Tokens by day"),
        "requests": _("Requests by day"),
        "cost": _("Cost by day, in %(currency)s") % {"currency": settings.CURRENCY},
    }
    starts = [int(start.timestamp()) for start in part.starts]
    unit: Any = "" if asked.measure == "cost" else asked.measure  # Any: one of the units of charts
    step_s = int(timedelta(days=1).total_seconds())
    return Chart("usage", titles[asked.measure], unit, starts, step_s, lines, "bars", is_stacked=True)


def _measure(asked: Asked, sums: Sums) -> float:
    match asked.measure:
        case "requests":
            return sums.requests
        case "cost":
            return sums.cost_micros / MILLION
    return sums.prompt_tokens + sums.completion_tokens


def _share(asked: Asked, sums: Sums, total: Sums) -> float:
    whole = _measure(asked, total)
    return 100 * _measure(asked, sums) / whole if whole else 0.0


def _list_rows(asked: Asked, named: Iterable[Named], total: Sums) -> list[UsageRow]:
    requests, rows = reverse("admin:gateway_requestrecord_changelist"), []
    for one in named:
        tenant, _line, model = one.name.partition("\n")
        query = urlencode({"range": "30d" if asked.days >= 30 else "7d", "tenant": tenant, "model": model})
        rows.append(UsageRow(tenant, model, Used(one.sums, _share(asked, one.sums, total)), f"{requests}?{query}"))
    return rows


def show_budget(state: BudgetState) -> BudgetRow:
    kind = state.budget.kind
    if state.level is BudgetLevel.USED_UP:
        words = _("used up: further requests are refused") if state.budget.is_hard else _("used up: webhooks were told")
    elif state.level is BudgetLevel.NEAR:
        words = _("nearly used up")
    else:
        words = _("within the budget")
    is_key = state.key_id is not None
    url = (
        reverse("admin:gateway_apikey_change", args=[state.key_id])
        if is_key
        else f"{reverse('usage:page')}?{urlencode({'tenant': state.tenant})}"
    )
    owner = _("key %(key)s of %(tenant)s") % {"key": state.key_name, "tenant": state.tenant} if is_key else state.tenant
    return BudgetRow(owner, url, _KINDS[kind], kind.is_cost, state, state.level.value, words)


app_name = "usage"
urlpatterns = [
    path("", admin.site.admin_view(show_usage), name="page"),
    path("export.csv", admin.site.admin_view(export_usage), name="export"),
]
