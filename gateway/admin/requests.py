"""The pages of request records and gateway processes. Nothing on them changes anything."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, cast

import msgspec
from django.contrib import admin
from django.core.paginator import Paginator
from django.db import connection
from django.db.models import F, Func, IntegerField, QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.template.defaultfilters import filesizeformat
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html
from django.utils.safestring import SafeString

from core.admin_pages import RowList, ShowingAdmin, column
from core.limits import limits
from gateway.models import TAIL_CHARS, GatewayProcess, Model, RequestRecord, StoredResponse, Tenant
from gateway.services.decisions import explain_decision
from gateway.services.explanations import explain_request, explain_waits, name_state
from gateway.services.requests import FAILED, REFUSED, find_records
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState
from wire.ids import format_id

RequestRecords = QuerySet[RequestRecord]
Choices = list[tuple[str, str]]

PERIODS: dict[str, tuple[str, timedelta]] = {
    "15m": ("last 15 minutes", timedelta(minutes=15)),
    "1h": ("last hour", timedelta(hours=1)),
    "6h": ("last 6 hours", timedelta(hours=6)),
    "24h": ("last 24 hours", timedelta(hours=24)),
    "7d": ("last 7 days", timedelta(days=7)),
    "30d": ("last 30 days", timedelta(days=30)),
}


def _same(words: Iterable[str]) -> Choices:
    return [(word, word) for word in words]


class StateFilter(admin.SimpleListFilter):
    """By what became of a request, or by its state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        groups = [("open", "In progress"), ("refused", "Refused (caller's mistake)"), ("wrong", "Failed, any way")]
        return groups + _same(state.value for state in RequestState if state is not RequestState.REJECTED)

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        match self.value():
            case "open":
                return queryset.filter(state__in=[state.value for state in OPEN_REQUEST_STATES])
            case "refused":
                return queryset.filter(REFUSED)
            case "wrong":
                return queryset.filter(FAILED)
            case None | "":
                return queryset
            case state:
                return queryset.filter(state=state)


class PeriodFilter(admin.SimpleListFilter):
    title = "time"
    parameter_name = "period"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        return [(name, label) for name, (label, _) in PERIODS.items()]

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        period = PERIODS.get(self.value() or "")
        return queryset.filter(created_at__gte=clock.now() - period[1]) if period else queryset


class _NameFilter(admin.SimpleListFilter):
    column: str

    def list_names(self) -> Iterable[str]:
        raise NotImplementedError

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        return _same(self.list_names())

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        return queryset.filter(**{self.column: self.value()}) if self.value() else queryset


class ModelFilter(_NameFilter):
    title = parameter_name = column = "model"

    def list_names(self) -> Iterable[str]:
        return Model.objects.values_list("name", flat=True)[: limits().gateway.page_choices]


class TenantFilter(_NameFilter):
    title = parameter_name = column = "tenant"

    def list_names(self) -> Iterable[str]:
        return Tenant.objects.values_list("name", flat=True)[: limits().gateway.page_choices]


class NodeFilter(_NameFilter):
    """By node, as far as it served something during the last day."""

    title = parameter_name = "node"
    column = "node_name"

    def list_names(self) -> Iterable[str]:
        since = clock.now() - timedelta(days=1)
        recent = RequestRecord.objects.filter(created_at__gte=since).exclude(node_name="").order_by("-created_at")
        names = set(recent.values_list("node_name", flat=True)[: limits().gateway.page_recent_records])
        return sorted(names)[: limits().gateway.page_choices]


class ErrorFilter(admin.SimpleListFilter):
    title = "error"
    parameter_name = "error"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        return [("any", "any error"), *_same(code.value for code in ErrorCode)]

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        value = self.value()
        if value == "any":
            return queryset.filter(error_code__isnull=False)
        return queryset.filter(error_code=value) if value else queryset


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


_TWO_LINES = '<span class="mst-pair"><span>{}</span><small>{}</small></span>'
_STATE = '<span class="mst-pair"><span class="mst-badge mst-is-{}">{}</span><small class="mst-whole">{}</small></span>'
_WHOLE_LINES = '<span class="mst-pair"><span>{}</span><small class="mst-whole">{}</small></span>'


class RequestList(RowList):
    """One page of requests; those that wait know why."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        queued = [record for record in self.result_list if record.state == RequestState.QUEUED]
        waits = explain_waits({record.model for record in queued})
        for record in queued:
            record.waits_because = waits[record.model].brief


@admin.register(RequestRecord)
class RequestRecordAdmin(ShowingAdmin):
    """What clients asked, newest first. Bodies are never stored, so there is none to show."""

    list_display = (
        "show_short_id", "created_at", "show_caller", "show_models", "show_state", "show_times", "show_tokens", "show_node",
    )  # fmt: skip
    list_filter = (StateFilter, PeriodFilter, ModelFilter, TenantFilter, NodeFilter, ErrorFilter)
    search_fields = ("id",)
    search_help_text = "Request id or its end; model, tenant or key"
    ordering = ("-created_at", "-id")
    sortable_by = ("created_at",)
    paginator = EstimatedPaginator
    show_full_result_count = False
    list_per_page = 50
    list_max_show_all = 0
    list_fullwidth = True
    is_live = True
    fieldsets = (
        (None, {"fields": ("show_id", "created_at", "finished_at", "show_plain_state", "error_code", "status_code")}),
        ("Caller", {"fields": ("tenant", "key_name", "key_id")}),
        (
            "Routing",
            {"fields": ("show_asked", "model", "endpoint", "show_streaming", "node_name", "show_node_id", "attempts")},
        ),
        ("Time", {"fields": ("show_queue", "show_ttfb", "show_latency")}),
        ("Tokens", {"fields": ("show_estimate", "max_tokens", "show_tokens", "bytes_out", "gateway_id")}),
    )
    readonly_fields = tuple(name for _title, part in fieldsets for name in part["fields"])
    change_form_outer_before_template = "admin/muster/request.html"

    def get_changelist(self, request: HttpRequest, **kwargs: object) -> type[RequestList]:
        return RequestList

    def describe_row(self, request: HttpRequest, row: RequestRecord) -> dict[str, Any]:  # Any: Django's template context
        """Return how the request stands or ended, and why; and where its node is shown."""
        shows_node = row.node_id is not None and request.user.has_perm("nodes.view_node")
        node_url = reverse("admin:nodes_node_change", args=[row.node_id]) if shows_node else ""
        return {"explanation": explain_request(row), "decision": explain_decision(row), "node_url": node_url}

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[RequestRecord], search_term: str
    ) -> tuple[QuerySet[RequestRecord], bool]:
        """Find by id or its end, or by the exact name of a model, tenant or key: a text search would read every row."""
        text = search_term.strip()
        return (find_records(queryset, text) if text else queryset), False

    @column("Request")
    def show_short_id(self, record: RequestRecord) -> SafeString:
        # The front of the id is the time, which stands beside it.
        surface = record.endpoint.removeprefix("/v1/") + (" · stream" if record.is_streaming else "")
        return format_html(_TWO_LINES, record.printed_id[-TAIL_CHARS:], surface)

    @column("Request id")
    def show_id(self, record: RequestRecord) -> str:
        return record.printed_id

    @column("Tenant / key")
    def show_caller(self, record: RequestRecord) -> SafeString:
        return format_html(_TWO_LINES, record.tenant, record.key_name)

    @column("Model")
    def show_models(self, record: RequestRecord) -> SafeString:
        return format_html(_TWO_LINES, record.model or "–", f"asked for {record.asked_model}" if record.asked_model else "")

    @column("Asked for")
    def show_asked(self, record: RequestRecord) -> str:
        return record.asked_model or record.model or "–"

    @column("Streamed")
    def show_streaming(self, record: RequestRecord) -> str:
        return "yes" if record.is_streaming else "no"

    @column("State")
    def show_state(self, record: RequestRecord) -> SafeString:
        state, badge = name_state(record)
        return format_html(_STATE, badge, state, record.error_code or getattr(record, "waits_because", ""))

    @column("State")
    def show_plain_state(self, record: RequestRecord) -> str:
        return name_state(record)[0]

    @column("Time")
    def show_times(self, record: RequestRecord) -> SafeString:
        parts = [("queue", record.queue_ms), ("first", record.ttfb_ms)]
        below = " · ".join(f"{name}\u00a0{print_ms(value)}" for name, value in parts if value is not None)
        return format_html(_WHOLE_LINES, print_ms(record.latency_ms), below)

    @column("Latency")
    def show_latency(self, record: RequestRecord) -> str:
        return print_ms(record.latency_ms)

    @column("First byte")
    def show_ttfb(self, record: RequestRecord) -> str:
        return print_ms(record.ttfb_ms)

    @column("Queue")
    def show_queue(self, record: RequestRecord) -> str:
        return print_ms(record.queue_ms)

    @column("Prompt tokens (estimate)")
    def show_estimate(self, record: RequestRecord) -> str:
        return str(record.prompt_tokens_est)

    @column("Tokens in / out")
    def show_tokens(self, record: RequestRecord) -> str:
        if record.prompt_tokens is None and record.completion_tokens is None:
            return f"~{record.prompt_tokens_est}\u00a0/\u00a0–"
        # ``~`` marks numbers that the engine did not report.
        mark = "~" if record.tokens_estimated else ""
        sides = (record.prompt_tokens, record.completion_tokens)
        return "\u00a0/\u00a0".join("–" if side is None else f"{mark}{side}" for side in sides)

    @column("Node")
    def show_node(self, record: RequestRecord) -> str:
        name = record.node_name or "–"
        return f"{name} ×{record.attempts}" if record.attempts > 1 else name

    @column("Node id")
    def show_node_id(self, record: RequestRecord) -> str:
        return format_id("node", record.node_id) if record.node_id else "–"


@admin.register(GatewayProcess)
class GatewayProcessAdmin(ShowingAdmin):
    list_display = ("host", "pid", "show_state", "heartbeat_at", "started_at", "stopped_at", "internal_url")
    fields = ("id", "host", "pid", "show_state", "internal_url", "started_at", "heartbeat_at", "stopped_at")
    readonly_fields = fields
    list_per_page = 50
    is_live = True

    def get_queryset(self, request: HttpRequest) -> QuerySet[GatewayProcess]:
        processes: QuerySet[GatewayProcess] = super().get_queryset(request)
        return processes.annotate(database_now=Now())  # heartbeats are written by the database's clock

    @column("State", label={"serving": "success", "stopped": "default", "lost": "danger"})
    def show_state(self, process: GatewayProcess) -> str:
        if process.stopped_at is not None:
            return "stopped"
        now: datetime = process.database_now  # type: ignore[attr-defined]  # the annotation
        return "serving" if now - process.heartbeat_at < timedelta(seconds=limits().gateway.dead_s) else "lost"


def print_ms(value: int | None) -> str:
    if value is None:
        return "–"
    return f"{value:,}\u00a0ms" if value < 10_000 else f"{value / 1000:,.1f}\u00a0s"


_SIZE = Func(F("body"), function="octet_length", output_field=IntegerField()) + Func(
    F("input_items"), function="octet_length", output_field=IntegerField()
)


@admin.register(StoredResponse)
class StoredResponseAdmin(ShowingAdmin):
    """Kept answers, newest first. Contents are read for the page of one row alone."""

    list_display = ("id", "tenant", "model", "show_size", "created_at", "expires_at")
    list_select_related = ("tenant",)
    list_filter = ("tenant",)
    empty_words = (
        "Answers of /v1/responses are kept here, with their prompts, for tenants that have Keep answers switched on: "
        "their clients can go on from an earlier answer."
    )
    empty_link = ("Choose a tenant", "admin:gateway_tenant_changelist")
    search_fields = ("id__exact",)
    search_help_text = "The id of a response: resp_…"
    ordering = ("-created_at",)
    sortable_by = ("created_at", "expires_at")
    paginator = EstimatedPaginator
    show_full_result_count = False
    list_per_page = 50
    list_max_show_all = 0
    fields = (
        "id", "tenant", "key_id", "model", "previous_id", "created_at", "expires_at", "show_size", "show_input", "show_body",
    )  # fmt: skip
    readonly_fields = fields

    def has_view_permission(self, request: HttpRequest, obj: StoredResponse | None = None) -> bool:
        """Ask for the permission to view itself: that to change stands for it on other pages, and here it shows prompts."""
        return bool(request.user.has_perm("gateway.view_storedresponse"))

    def get_queryset(self, request: HttpRequest) -> QuerySet[StoredResponse]:
        """Leave contents in the database; sizes come without them."""
        queryset: QuerySet[StoredResponse] = super().get_queryset(request)
        return queryset.defer("input_items", "body").annotate(size_bytes=_SIZE)

    @column("Size")
    def show_size(self, response: StoredResponse) -> str:
        return filesizeformat(getattr(response, "size_bytes", 0))

    @column("Input")
    def show_input(self, response: StoredResponse) -> SafeString:
        return _fold(bytes(response.input_items))

    @column("Answer")
    def show_body(self, response: StoredResponse) -> SafeString:
        return _fold(bytes(response.body))


def _fold(content: bytes) -> SafeString:
    """Return JSON behind a disclosure: indented when it is short, else its beginning."""
    if len(content) <= limits().gateway.page_body_chars:
        text = msgspec.json.format(content, indent=2).decode()
    else:
        text = content[: limits().gateway.page_body_chars].decode(errors="replace") + " …"
    return format_html(
        '<details><summary class="cursor-pointer">Show</summary>'
        '<pre class="max-w-full whitespace-pre-wrap break-words">{}</pre></details>',
        text,
    )
