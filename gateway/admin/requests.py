"""The pages of request records and gateway processes. Nothing on them changes anything."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, cast
from urllib.parse import urlencode

import msgspec
from channels.db import database_sync_to_async
from django.conf import settings
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import connection
from django.db.models import F, Func, IntegerField, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest, HttpResponse, StreamingHttpResponse
from django.template.defaultfilters import filesizeformat
from django.urls import URLPattern, path, reverse
from django.utils.formats import date_format
from django.utils.functional import Promise, cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache

from core.admin_pages import ShowingAdmin, column
from core.charts import Chart, Line
from core.limits import limits
from core.roles import may
from gateway.models import ApiKey, GatewayProcess, Model, RequestRecord, StoredResponse, Tenant
from gateway.services.decisions import explain_decision
from gateway.services.explanations import ERROR_WORDS, explain_request, explain_waits, name_state
from gateway.services.exports import print_line
from gateway.services.request_pages import (
    ANY_ERROR,
    Cursor,
    RequestFilter,
    RequestPage,
    find_keys,
    list_error_codes,
    read_page,
)
from gateway.services.requests import find_id
from gateway.services.rollups import RANGES, Series, read_series
from gateway.services.usage import read_cost
from gateway.services.waterfalls import draw_waterfall, find_rate, list_losses
from gateway.values import MILLION, Dimension, judge_outcome
from nodes.services.availability import find_node_ids, list_node_names, read_node_names
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState
from wire.ids import format_id

Words = str | Promise
DEFAULT_RANGE = "24h"
_STATES: tuple[tuple[str, Words], ...] = (
    ("wrong", gettext_lazy("Failed")),
    ("refused", gettext_lazy("Refused (caller's mistake)")),
    ("cancelled", gettext_lazy("Cancelled by the caller")),
    ("completed", gettext_lazy("Served")),
    ("open", gettext_lazy("In progress")),
    ("queued", gettext_lazy("Queued")),
)
_SLOWER_MS = (1_000, 5_000, 10_000, 30_000, 60_000)


@dataclass(frozen=True, slots=True)
class Choice:
    """One value of a filter, and the address that asks for it."""

    label: Words
    query: str
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Menu:
    """One filter: what is chosen (empty = nothing), the address without it, and its choices or the names to type from."""

    name: str
    label: Words
    chosen: Words
    without: str
    choices: tuple[Choice, ...] = ()
    names: tuple[str, ...] = ()
    value: str = ""
    hidden: tuple[tuple[str, str], ...] = ()
    """What else the form sends."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request as a list shows it."""

    record: RequestRecord
    url: str
    state: str
    badge: str
    error: Words
    node_url: str
    key_url: str

    @property
    def tail(self) -> str:
        return self.record.printed_id[-8:]

    @property
    def is_guessed(self) -> bool:
        """Whether nobody has counted its prompt, of a request that is under way."""
        return self.record.prompt_tokens is None and RequestState(self.record.state) in OPEN_REQUEST_STATES

    @property
    def prompt_tokens(self) -> int | None:
        return self.record.prompt_tokens_est if self.is_guessed else self.record.prompt_tokens

    @property
    def tokens_per_s(self) -> float | None:
        return find_rate(self.record)


@dataclass(frozen=True, slots=True)
class Rights:
    """What else the reader may look at, which decides what is a link."""

    nodes: bool
    keys: bool

    @classmethod
    def read(cls, request: HttpRequest) -> Rights:
        return cls(may(request.user, "nodes.view_node"), may(request.user, "gateway.view_apikey"))

    def node_url(self, record: RequestRecord) -> str:
        return reverse("admin:nodes_node_change", args=[record.node_id]) if self.nodes and record.node_id else ""

    def key_url(self, record: RequestRecord) -> str:
        return reverse("admin:gateway_apikey_change", args=[record.key_id]) if self.keys else ""


def show_rows(page: RequestPage, rights: Rights) -> list[Row]:
    """Return the rows of a list; those that wait know why. Two queries when one waits, else none."""
    queued = {record.model for record in page.records if record.state == RequestState.QUEUED}
    waits = explain_waits(queued)
    rows = []
    for record in page.records:
        state, badge = name_state(record)
        error = name_error(record.error_code) if record.error_code else ""
        if record.state == RequestState.QUEUED:
            error = waits[record.model].brief
        url = reverse("admin:gateway_requestrecord_change", args=[record.pk])
        rows.append(Row(record, url, state, badge, error, rights.node_url(record), rights.key_url(record)))
    return rows


def name_error(code: str) -> Words:
    return ERROR_WORDS.get(ErrorCode(code), code) if code in set(ErrorCode) else code


def list_menus(wanted: RequestFilter, chosen_range: str) -> list[Menu]:
    """Return the filters of the list; a query for each whose names are rows."""
    most = limits().gateway.page_choices

    def query(**changes: object) -> str:
        return print_query(wanted, chosen_range, **changes)

    def choose(name: str, label: Words, values: Iterable[tuple[Any, Words]]) -> Menu:  # Any: a word or a number
        now = getattr(wanted, name)
        nothing = None if name == "slower_ms" else ""
        choices = tuple(Choice(title, query(**{name: value}), value == now) for value, title in values)
        title = next((one.label for one in choices if one.is_chosen), str(now) if now else "")
        return Menu(name, label, title, query(**{name: nothing}), choices)

    def type_in(name: str, label: Words, names: Iterable[str], *, shown: str = "") -> Menu:
        value = getattr(wanted, name)
        others = replace(wanted, **{name: ""}).list_parameters()  # type: ignore[arg-type]  # a text, by name
        hidden = tuple({**others, "range": chosen_range}.items())
        return Menu(name, label, shown or value, query(**{name: ""}), names=tuple(names), value=shown or value, hidden=hidden)

    codes = [(ANY_ERROR, gettext_lazy("Any error")), *((code.value, name_error(code)) for code in list_error_codes())]
    slower = [(ms, _("%(seconds)d s") % {"seconds": ms // 1000}) for ms in _SLOWER_MS]
    key = ApiKey.objects.filter(pk__in=find_keys(wanted.key)).values_list("name", flat=True).first() if wanted.key else None
    return [
        choose("state", gettext_lazy("State"), _STATES),
        type_in("model", gettext_lazy("Model"), Model.objects.values_list("name", flat=True)[:most]),
        type_in("node", gettext_lazy("Node"), list_node_names(most=most), shown=_name_node(wanted.node)),
        type_in("tenant", gettext_lazy("Tenant"), Tenant.objects.values_list("name", flat=True)[:most]),
        type_in(
            "key", gettext_lazy("Key"), ApiKey.objects.filter(revoked_at=None).values_list("name", flat=True)[:most],
            shown=key or "",
        ),
        choose("error", gettext_lazy("Error"), codes),
        choose("slower_ms", gettext_lazy("Slower than"), slower),
    ]  # fmt: skip


def _name_node(node: str) -> str:
    if not node.startswith("node_"):
        return ""
    return next(iter(read_node_names(find_node_ids(node)).values()), "")


def print_query(wanted: RequestFilter, chosen_range: str, **changes: object) -> str:
    """Return the part of an address behind the question mark: the filters, some of them changed, and the range."""
    query = wanted.print_query(**changes)
    return f"range={chosen_range}&{query}" if query else f"range={chosen_range}"


def draw_histogram(wanted: RequestFilter, chosen_range: str) -> tuple[Chart, Series, bool]:
    """Return how requests ended over the range; and whether every filter counts in it. One query, of sums.

    Sums know one name at a time; of several filters the first is counted.
    """
    names = {
        Dimension.NODE: next((str(one) for one in find_node_ids(wanted.node)), "") if wanted.node else "",
        Dimension.MODEL: wanted.model,
        Dimension.TENANT: wanted.tenant,
    }
    dimension = next((one for one, name in names.items() if name), Dimension.ALL)
    series = read_series(RANGES[chosen_range][1], dimension=dimension, name=names.get(dimension, ""))
    points = [sums for _at, sums in series.points]
    groups = [
        ("completed", Line(_("Served"), [one.served for one in points], "good")),
        ("refused", Line(_("Refused"), [one.refused for one in points], "refused")),
        ("wrong", Line(_("Failed"), [one.failed for one in points], "fault")),
        ("cancelled", Line(_("Cancelled"), [one.cancelled for one in points], "cancelled")),
    ]
    lines = [line for state, line in groups if wanted.state in ("", state)] or [line for _state, line in groups]
    link = f"?{print_query(wanted, chosen_range, begins_at=None, ends_at=None)}&since={{since}}&until={{until}}"
    starts = [int(at.timestamp()) for at, _sums in series.points]
    step_s = int(series.step.total_seconds())
    chart = Chart("outcomes", _("Requests that ended"), "requests", starts, step_s, lines, "bars", is_stacked=True, link=link)
    asked = [bool(name) for name in (wanted.node, wanted.model, wanted.tenant, wanted.key, wanted.error, wanted.text)]
    is_whole = sum(asked) == (dimension is not Dimension.ALL) and wanted.slower_ms is None and wanted.state != "open"
    return chart, series, is_whole


EXPORTED: tuple[str, ...] = (
    "request_id", "came_at", "ended_at", "state", "outcome", "error_code", "status_code", "engine_error", "tenant", "key_id",
    "key_name", "model", "asked_model", "endpoint", "is_streaming", "node_id", "node_name", "attempts", "prompt_tokens",
    "cached_tokens", "completion_tokens", "tokens_estimated", "queue_ms", "ttft_ms", "latency_ms", "tokens_per_s",
)  # fmt: skip


def _export_row(record: RequestRecord) -> str:
    rate = find_rate(record)
    return print_line([
        record.printed_id, record.created_at, record.finished_at, record.state,
        judge_outcome(RequestState(record.state), record.status_code), record.error_code, record.status_code,
        record.engine_error, record.tenant, record.key_id, record.key_name, record.model, record.asked_model, record.endpoint,
        record.is_streaming, format_id("node", record.node_id) if record.node_id else "", record.node_name, record.attempts,
        record.prompt_tokens, record.cached_tokens, record.completion_tokens, record.tokens_estimated, record.queue_ms,
        record.ttfb_ms, record.latency_ms, "" if rate is None else f"{rate:.1f}",
    ])  # fmt: skip


async def write_export(wanted: RequestFilter) -> AsyncIterator[str]:
    """Yield a file of what is filtered, newest first, a page of rows at a time; its last line says when it was cut."""
    bounds = limits().gateway
    yield print_line(EXPORTED)
    written, cursor = 0, None
    while True:
        size = min(bounds.page_export_batch, bounds.page_export_rows - written)
        page = await database_sync_to_async(read_page)(wanted, before=cursor, size=size)
        written += len(page.records)
        yield "".join(map(_export_row, page.records))
        cursor = page.older
        if cursor is None:
            return
        if written >= bounds.page_export_rows:
            yield print_line([f"cut after {written} rows: choose a shorter time or more filters"])
            return


@admin.register(RequestRecord)
class RequestRecordAdmin(ShowingAdmin):
    """What clients asked, newest first. Bodies are never stored, so there is none to show."""

    def get_urls(self) -> list[URLPattern]:
        view = never_cache(self.admin_site.admin_view(self.export_view))
        return [path("export.csv", view, name="gateway_requestrecord_export"), *super().get_urls()]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[RequestRecord], search_term: str
    ) -> tuple[QuerySet[RequestRecord], bool]:
        """Find by id or its end, for the search over all pages."""
        found = find_id(queryset, search_term.strip())
        return (queryset.none() if found is None else found), False

    def changelist_view(
        self,
        request: HttpRequest,
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        """Show the newest requests that fit, below how many ended when."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        wanted, chosen_range = RequestFilter.read(request.GET), read_range(request.GET)
        before = Cursor.read(request.GET.get("before", ""))
        page = read_page(_within(wanted, chosen_range), before=before, size=limits().gateway.page_request_rows)
        chart, series, is_whole = draw_histogram(wanted, chosen_range)
        here = print_query(wanted, chosen_range)
        context = {
            **(extra_context or {}),
            "title": _("Requests"),
            "rows": show_rows(page, Rights.read(request)),
            "menus": list_menus(wanted, chosen_range),
            "wanted": wanted,
            "hidden": tuple({**replace(wanted, text="").list_parameters(), "range": chosen_range}.items()),
            "is_filtered": bool(wanted.list_parameters()),
            "moment": _name_moment(wanted),
            "without_moment": print_query(wanted, chosen_range, begins_at=None, ends_at=None),
            "without_text": print_query(wanted, chosen_range, text=""),
            "chart": chart,
            "total": series.total,
            "is_whole": is_whole,
            "ranges": [(name, label) for name, (label, _span) in RANGES.items()],
            "range": chosen_range,
            "range_label": RANGES[chosen_range][0],
            "page": page,
            "is_first": before is None,
            "newest": here,
            "older": f"{here}&before={page.older}" if page.older is not None else "",
            "export": here,
            "most_exported": limits().gateway.page_export_rows,
            "as_of": clock.now(),
            "is_followed": before is None and wanted.ends_at is None,
        }
        return self.render_page(request, "admin/muster/requests.html", context)

    def export_view(self, request: HttpRequest) -> StreamingHttpResponse:
        """Return what is filtered as CSV (RFC 4180); never a prompt or an answer, which nobody keeps."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        wanted = _within(RequestFilter.read(request.GET), read_range(request.GET))
        answer = StreamingHttpResponse(write_export(wanted), content_type="text/csv; charset=utf-8")
        answer["content-disposition"] = f'attachment; filename="requests-{clock.now():%Y-%m-%d-%H%M}.csv"'
        return answer

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        """Show one request: what became of it, whose fault it was, and where its time went."""
        if not self.has_view_permission(request) or object_id is None or request.method == "POST":
            raise PermissionDenied
        record: RequestRecord | None = self.get_object(request, unquote(object_id))
        if record is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        return self.render_page(request, "admin/muster/request.html", describe_request(record, Rights.read(request)))


def describe_request(record: RequestRecord, rights: Rights) -> dict[str, Any]:  # Any: Django's template context
    """Return what the page of a request shows, in a bounded number of queries."""
    losses = list_losses(record)
    names = read_node_names({loss.node_id for loss in losses}) if losses else {}
    cost = read_cost(record)
    lists = reverse("admin:gateway_requestrecord_changelist")
    same: list[tuple[Words, str]] = [(_("Same key"), f"key={record.key_id}")]
    if record.error_code:
        same.insert(0, (_("Same error"), urlencode({"error": record.error_code})))
    if record.node_id:
        same.append((_("Same node"), f"node={format_id('node', record.node_id)}"))
    same.append((_("Same model"), urlencode({"model": record.model})))
    return {
        "title": _("Request %(tail)s") % {"tail": record.printed_id[-8:]},
        "record": record,
        "original": record,
        "explanation": explain_request(record),
        "decision": explain_decision(record),
        "waterfall": draw_waterfall(record, now=clock.now(), node_names=names),
        "losses": [(names.get(loss.node_id, ""), LOSS_WORDS.get(loss.reason, "")) for loss in losses],
        "node_url": rights.node_url(record),
        "key_url": rights.key_url(record),
        "rate": find_rate(record),
        "cost": None if cost is None else Decimal(cost) / MILLION,
        "currency": settings.CURRENCY,
        "same": [(label, f"{lists}?range=7d&{query}") for label, query in same],
        "curl": write_curl(record),
        "playground": urlencode({"model": record.asked_model or record.model}),
    }


LOSS_WORDS: dict[str, Words] = {
    "lost": gettext_lazy("the link to it was lost before it answered"),
    "engine": gettext_lazy("its engine failed"),
    "reclaimed": gettext_lazy("its owner took it back"),
    "broken": gettext_lazy("the link to it was lost in the middle of the answer"),
    "uncontinued": gettext_lazy("it could not go on with the answer of another node"),
}
"""Why another node was tried (``gateway.request.outcomes.RetryReason``)."""
_QUESTIONS: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "…"},
    "/v1/responses": {"input": "…"},
    "/v1/embeddings": {"input": "…"},
    "/v1/messages": {"messages": [{"role": "user", "content": "…"}]},
}


def write_curl(record: RequestRecord) -> str:
    """Return a command that asks the same of the gateway, but for key and prompt, which nobody keeps."""
    body: dict[str, object] = {"model": record.asked_model or record.model}
    body |= _QUESTIONS.get(record.endpoint, {"messages": [{"role": "user", "content": "…"}]})
    if record.max_tokens is not None or record.endpoint == "/v1/messages":
        body["max_tokens"] = record.max_tokens or 256
    if record.is_streaming:
        body["stream"] = True
    text = msgspec.json.encode(body).decode().replace("'", "'\\''")
    url = shlex.quote(f"{settings.GATEWAY_PUBLIC_URL.rstrip('/')}{record.endpoint}")
    return "\n".join([
        f"curl {url} \\", '  -H "Authorization: Bearer $MUSTER_KEY" \\', "  -H 'Content-Type: application/json' \\",
        f"  -d '{text}'",
    ])  # fmt: skip


def read_range(given: Mapping[str, str]) -> str:
    chosen = given.get("range", "")
    return chosen if chosen in RANGES else DEFAULT_RANGE


def _within(wanted: RequestFilter, chosen_range: str) -> RequestFilter:
    if wanted.begins_at is not None or wanted.text:
        return wanted
    return replace(wanted, begins_at=clock.now() - RANGES[chosen_range][1])


def _name_moment(wanted: RequestFilter) -> str:
    """Return the time that the address itself names, for people."""
    if wanted.begins_at is None:
        return ""
    since = date_format(wanted.begins_at, "DATETIME_FORMAT")
    if wanted.ends_at is None:
        return _("came since %(since)s UTC") % {"since": since}
    until = date_format(wanted.ends_at, "DATETIME_FORMAT")
    return _("ended from %(since)s to %(until)s UTC") % {"since": since, "until": until}


class EstimatedPaginator(Paginator):  # type: ignore[type-arg]  # takes no parameter at run time
    """Counts up to ``page_exact_rows``. Beyond that a filtered list shows this number, all records the planner's estimate."""

    @cached_property
    def count(self) -> int:
        queryset = cast("QuerySet[Any]", self.object_list)
        most = limits().gateway.page_exact_rows
        counted = int(queryset.order_by()[: most + 1].count())
        if counted <= most:
            return counted
        return most if queryset.query.where else max(most, _estimate_rows(queryset.query.get_meta().db_table))


def _estimate_rows(table: str) -> int:
    """Return what ANALYZE last saw in a table and its partitions; 0 when it never ran."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT coalesce(sum(greatest(reltuples, 0)), 0)::bigint FROM pg_class "
            "WHERE relkind = 'r' AND oid IN (SELECT relid FROM pg_partition_tree(%s::regclass))",
            [table],
        )
        row = cursor.fetchone()
    return int(row[0]) if row else 0


@admin.register(GatewayProcess)
class GatewayProcessAdmin(ShowingAdmin):
    list_display = ("host", "pid", "show_state", "heartbeat_at", "started_at", "stopped_at", "release", "internal_url")
    fields = ("id", "host", "pid", "show_state", "release", "internal_url", "started_at", "heartbeat_at", "stopped_at")
    readonly_fields = fields
    list_per_page = 50
    is_live = True

    def get_queryset(self, request: HttpRequest) -> QuerySet[GatewayProcess]:
        processes: QuerySet[GatewayProcess] = super().get_queryset(request)
        return processes.annotate(database_now=Now())  # heartbeats are written by the database's clock

    @column(gettext_lazy("State"), label={"serving": "success", "stopped": "default", "lost": "danger"})
    def show_state(self, process: GatewayProcess) -> tuple[str, str]:
        if process.stopped_at is not None:
            return "stopped", _("stopped")
        now: datetime = process.database_now  # type: ignore[attr-defined]  # the annotation
        is_heard = now - process.heartbeat_at < timedelta(seconds=limits().gateway.dead_s)
        return ("serving", _("serving")) if is_heard else ("lost", _("lost"))


_SIZE = Func(F("body"), function="octet_length", output_field=IntegerField()) + Func(
    F("input_items"), function="octet_length", output_field=IntegerField()
)


@admin.register(StoredResponse)
class StoredResponseAdmin(ShowingAdmin):
    """Kept answers, newest first. Contents are read for the page of one row alone."""

    list_display = ("id", "tenant", "model", "show_size", "created_at", "expires_at")
    list_select_related = ("tenant",)
    list_filter = ("tenant",)
    empty_words = gettext_lazy(
        "Answers of /v1/responses are kept here, with their prompts, for tenants that have Keep answers switched on: "
        "their clients can go on from an earlier answer."
    )
    empty_link = (gettext_lazy("Choose a tenant"), "admin:gateway_tenant_changelist")
    search_fields = ("id__exact",)
    search_help_text = gettext_lazy("The id of a response: resp_…")
    ordering = ("-created_at",)
    sortable_by = ("created_at", "expires_at")
    paginator = EstimatedPaginator
    show_full_result_count = False
    list_per_page = 50
    list_max_show_all = 0
    fields = (
        "id", "tenant", "show_key", "model", "show_previous", "created_at", "expires_at", "show_size",
        "show_input", "show_body",
    )  # fmt: skip
    readonly_fields = fields

    def has_view_permission(self, request: HttpRequest, obj: StoredResponse | None = None) -> bool:
        """Ask for the permission to view itself: that to change stands for it on other pages, and here it shows prompts."""
        return bool(may(request.user, "gateway.view_storedresponse"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[StoredResponse]:
        """Leave contents in the database; sizes come without them."""
        queryset: QuerySet[StoredResponse] = super().get_queryset(request)
        return queryset.defer("input_items", "body").annotate(size_bytes=_SIZE)

    @column(gettext_lazy("Key"))
    def show_key(self, response: StoredResponse) -> str:
        name = ApiKey.objects.filter(pk=response.key_id).values_list("name", flat=True).first()
        return name or str(response.key_id)

    @column(gettext_lazy("Goes on from"))
    def show_previous(self, response: StoredResponse) -> SafeString | str:
        if not response.previous_id:
            return "–"
        url = reverse("admin:gateway_storedresponse_change", args=[response.previous_id])
        return format_html('<a class="mst-link" href="{}">{}</a>', url, response.previous_id)

    @column(gettext_lazy("Size"))
    def show_size(self, response: StoredResponse) -> str:
        return filesizeformat(getattr(response, "size_bytes", 0))

    @column(gettext_lazy("Input"))
    def show_input(self, response: StoredResponse) -> SafeString:
        return _fold(bytes(response.input_items))

    @column(gettext_lazy("Answer"))
    def show_body(self, response: StoredResponse) -> SafeString:
        return _fold(bytes(response.body))


def _fold(content: bytes) -> SafeString:
    """Return JSON behind a disclosure: indented when it is short, else its beginning."""
    if len(content) <= limits().gateway.page_body_chars:
        text = msgspec.json.format(content, indent=2).decode()
    else:
        text = content[: limits().gateway.page_body_chars].decode(errors="replace") + " …"
    return format_html(
        '<details><summary class="cursor-pointer">{}</summary>'
        '<pre class="max-w-full whitespace-pre-wrap break-words">{}</pre></details>',
        _("Show"),
        text,
    )
