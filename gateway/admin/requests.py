"""The pages of request records and gateway processes. Nothing on them changes anything."""

from __future__ import annotations

from datetime import timedelta

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone

from gateway.admin.filters import ErrorFilter, ModelFilter, NodeFilter, PeriodFilter, StateFilter, TenantFilter
from gateway.admin.paginator import EstimatedPaginator
from gateway.models import GatewayProcess, RequestRecord
from governance.pages import ShowingAdmin, column
from wire.ids import format_id, parse_id

HEARTBEAT_LIMIT = timedelta(seconds=10)
"""A gateway that is silent for so long is taken for dead."""

STATE_COLOURS = {
    "queued": "info",
    "assigned": "info",
    "running": "info",
    "completed": "success",
    "failed": "danger",
    "interrupted": "danger",
    "rejected": "warning",
    "cancelled": "default",
}


@admin.register(RequestRecord)
class RequestRecordAdmin(ShowingAdmin):
    """What clients asked, newest first. Bodies are never stored, so there is none to show."""

    list_display = (
        "show_short_id",
        "created_at",
        "show_caller",
        "model",
        "show_state",
        "show_latency",
        "show_ttfb",
        "show_queue",
        "show_tokens",
        "show_node",
        "error_code",
    )
    list_filter = (StateFilter, PeriodFilter, ModelFilter, TenantFilter, NodeFilter, ErrorFilter)
    search_fields = ("id",)
    search_help_text = "A request id: req_… or a UUID"
    ordering = ("-created_at", "-id")
    sortable_by = ("created_at",)
    paginator = EstimatedPaginator
    show_full_result_count = False
    list_per_page = 50
    list_max_show_all = 0
    list_fullwidth = True
    fields = (
        "show_id",
        "created_at",
        "finished_at",
        "show_state",
        "error_code",
        "status_code",
        "tenant",
        "key_name",
        "key_id",
        "endpoint",
        "model",
        "is_streaming",
        "node_name",
        "show_node_id",
        "attempts",
        "show_queue",
        "show_ttfb",
        "show_latency",
        "prompt_tokens_est",
        "max_tokens",
        "show_tokens",
        "bytes_out",
        "gateway_id",
    )
    readonly_fields = fields

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[RequestRecord], search_term: str
    ) -> tuple[QuerySet[RequestRecord], bool]:
        """Find by request id alone: a text search over millions of rows would scan them all."""
        text = search_term.strip()
        if not text:
            return queryset, False
        record_id = parse_id("req", text)
        return (queryset.filter(pk=record_id) if record_id else queryset.none()), False

    @column("Request")
    def show_short_id(self, record: RequestRecord) -> str:
        """Return the end of the printed id: the front is the time, which stands beside it."""
        return record.printed_id[-12:]

    @column("Request id")
    def show_id(self, record: RequestRecord) -> str:
        """Return the printed id."""
        return record.printed_id

    @column("Tenant / key")
    def show_caller(self, record: RequestRecord) -> str:
        """Return who asked."""
        return f"{record.tenant} /\u00a0{record.key_name}"

    @column("State", label=STATE_COLOURS)
    def show_state(self, record: RequestRecord) -> str:
        """Return the state."""
        return record.state

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

    @column("State", label={"serving": "success", "stopped": "default", "lost": "danger"})
    def show_state(self, process: GatewayProcess) -> str:
        """Return whether it serves, was stopped, or is silent."""
        if process.stopped_at is not None:
            return "stopped"
        return "serving" if timezone.now() - process.heartbeat_at < HEARTBEAT_LIMIT else "lost"


def print_ms(value: int | None) -> str:
    """Return milliseconds for people."""
    if value is None:
        return "–"
    return f"{value:,}\u00a0ms" if value < 10_000 else f"{value / 1000:,.1f}\u00a0s"
