"""The pages of request records and gateway processes. Nothing on them changes anything."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.db.models.functions import Now
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString

from core.admin_pages import RowList, ShowingAdmin, column
from core.limits import limits
from gateway.admin.endings import name_state
from gateway.admin.filters import ErrorFilter, ModelFilter, NodeFilter, PeriodFilter, StateFilter, TenantFilter
from gateway.admin.paginator import EstimatedPaginator
from gateway.admin.stories import tell_request
from gateway.models import TAIL_CHARS, GatewayProcess, RequestRecord
from gateway.services.requests import find_records
from gateway.services.waiting import explain_waits
from wire.contract import RequestState
from wire.ids import format_id

_TWO_LINES = '<span class="mst-pair"><span>{}</span><small>{}</small></span>'
_STATE = '<span class="mst-pair"><span class="mst-badge mst-is-{}">{}</span><small class="mst-whole">{}</small></span>'
_WHOLE_LINES = '<span class="mst-pair"><span>{}</span><small class="mst-whole">{}</small></span>'


class RequestList(RowList):
    """One page of requests; those that wait know why."""

    def get_results(self, request: HttpRequest) -> None:
        """Find the rows, and once for all of them why those in the queue wait."""
        super().get_results(request)
        queued = [record for record in self.result_list if record.state == RequestState.QUEUED]
        waits = explain_waits({record.model for record in queued})
        for record in queued:
            record.waits_because = waits[record.model].brief


@admin.register(RequestRecord)
class RequestRecordAdmin(ShowingAdmin):
    """What clients asked, newest first. Bodies are never stored, so there is none to show."""

    list_display = (
        "show_short_id",
        "created_at",
        "show_caller",
        "show_models",
        "show_state",
        "show_times",
        "show_tokens",
        "show_node",
    )
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
        ("Who asked", {"fields": ("tenant", "key_name", "key_id")}),
        (
            "Which way",
            {"fields": ("show_asked", "model", "endpoint", "show_streaming", "node_name", "show_node_id", "attempts")},
        ),
        ("Time", {"fields": ("show_queue", "show_ttfb", "show_latency")}),
        ("Size", {"fields": ("prompt_tokens_est", "max_tokens", "show_tokens", "bytes_out", "gateway_id")}),
    )
    readonly_fields = tuple(name for _title, part in fieldsets for name in part["fields"])
    change_form_outer_before_template = "admin/muster/request.html"

    def get_changelist(self, request: HttpRequest, **kwargs: object) -> type[RequestList]:
        """Return the list that knows why requests wait."""
        return RequestList

    def describe_row(self, request: HttpRequest, row: RequestRecord) -> dict[str, Any]:  # Any: Django's template context
        """Return how the request stands or ended, and why; and where its box is shown."""
        shows_box = row.node_id is not None and request.user.has_perm("nodes.view_node")
        node_url = reverse("admin:nodes_node_change", args=[row.node_id]) if shows_box else ""
        return {"story": tell_request(row), "node_url": node_url}

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[RequestRecord], search_term: str
    ) -> tuple[QuerySet[RequestRecord], bool]:
        """Find by id or its end, or by the exact name of a model, tenant or key: a text search would read every row."""
        text = search_term.strip()
        return (find_records(queryset, text) if text else queryset), False

    @column("Request")
    def show_short_id(self, record: RequestRecord) -> SafeString:
        """Return the end of the printed id, the front being the time, which stands beside it; and the surface."""
        surface = record.endpoint.removeprefix("/v1/") + (" · stream" if record.is_streaming else "")
        return format_html(_TWO_LINES, record.printed_id[-TAIL_CHARS:], surface)

    @column("Request id")
    def show_id(self, record: RequestRecord) -> str:
        """Return the printed id."""
        return record.printed_id

    @column("Tenant / key")
    def show_caller(self, record: RequestRecord) -> SafeString:
        """Return who asked."""
        return format_html(_TWO_LINES, record.tenant, record.key_name)

    @column("Model")
    def show_models(self, record: RequestRecord) -> SafeString:
        """Return the model that answered or should, and the name the client used if that is another."""
        return format_html(_TWO_LINES, record.model or "–", f"asked for {record.asked_model}" if record.asked_model else "")

    @column("Asked for")
    def show_asked(self, record: RequestRecord) -> str:
        """Return the name the client used."""
        return record.asked_model or record.model or "–"

    @column("Streamed")
    def show_streaming(self, record: RequestRecord) -> str:
        """Return whether the client asked for a stream."""
        return "yes" if record.is_streaming else "no"

    @column("State")
    def show_state(self, record: RequestRecord) -> SafeString:
        """Return the state; below it why it waits, or the code with which it ended."""
        state, badge = name_state(record)
        return format_html(_STATE, badge, state, record.error_code or getattr(record, "waits_because", ""))

    @column("State")
    def show_plain_state(self, record: RequestRecord) -> str:
        """Return the state alone."""
        return name_state(record)[0]

    @column("Time")
    def show_times(self, record: RequestRecord) -> SafeString:
        """Return the whole time; below it what of it was the queue, and when the first byte came."""
        parts = [("queue", record.queue_ms), ("first", record.ttfb_ms)]
        below = " · ".join(f"{name}\u00a0{print_ms(value)}" for name, value in parts if value is not None)
        return format_html(_WHOLE_LINES, print_ms(record.latency_ms), below)

    @column("Latency")
    def show_latency(self, record: RequestRecord) -> str:
        """Return the time from arrival to the end."""
        return print_ms(record.latency_ms)

    @column("First byte")
    def show_ttfb(self, record: RequestRecord) -> str:
        """Return the time from arrival to the first byte of the answer."""
        return print_ms(record.ttfb_ms)

    @column("Queue")
    def show_queue(self, record: RequestRecord) -> str:
        """Return the time spent waiting for a box."""
        return print_ms(record.queue_ms)

    @column("Tokens in / out")
    def show_tokens(self, record: RequestRecord) -> str:
        """Return the tokens; ``~`` marks numbers that the engine did not report."""
        if record.prompt_tokens is None and record.completion_tokens is None:
            return f"~{record.prompt_tokens_est}\u00a0/\u00a0–"
        mark = "~" if record.tokens_estimated else ""
        sides = (record.prompt_tokens, record.completion_tokens)
        return "\u00a0/\u00a0".join("–" if side is None else f"{mark}{side}" for side in sides)

    @column("Node")
    def show_node(self, record: RequestRecord) -> str:
        """Return the box that served it last, and how many were tried when it was more than one."""
        name = record.node_name or "–"
        return f"{name} ×{record.attempts}" if record.attempts > 1 else name

    @column("Node id")
    def show_node_id(self, record: RequestRecord) -> str:
        """Return the printed id of the box."""
        return format_id("node", record.node_id) if record.node_id else "–"


@admin.register(GatewayProcess)
class GatewayProcessAdmin(ShowingAdmin):
    """Gateway processes and their heartbeats."""

    list_display = ("host", "pid", "show_state", "heartbeat_at", "started_at", "stopped_at", "internal_url")
    fields = ("id", "host", "pid", "show_state", "internal_url", "started_at", "heartbeat_at", "stopped_at")
    readonly_fields = fields
    list_per_page = 50
    is_live = True

    def get_queryset(self, request: HttpRequest) -> QuerySet[GatewayProcess]:
        """Return the processes with the time by the database's clock, by which they write their heartbeats."""
        processes: QuerySet[GatewayProcess] = super().get_queryset(request)
        return processes.annotate(database_now=Now())

    @column("State", label={"serving": "success", "stopped": "default", "lost": "danger"})
    def show_state(self, process: GatewayProcess) -> str:
        """Return whether it serves, was stopped, or is silent."""
        if process.stopped_at is not None:
            return "stopped"
        now: datetime = process.database_now  # type: ignore[attr-defined]  # the annotation
        return "serving" if now - process.heartbeat_at < timedelta(seconds=limits().gateway.dead_s) else "lost"


def print_ms(value: int | None) -> str:
    """Return milliseconds for people."""
    if value is None:
        return "–"
    return f"{value:,}\u00a0ms" if value < 10_000 else f"{value / 1000:,.1f}\u00a0s"
