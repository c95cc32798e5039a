"""Filters of the requests page. Choices come from small tables or the last day, never from a scan of all records."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest

from core.limits import limits
from gateway.models import Model, RequestRecord, Tenant
from gateway.services.traffic import FAILED, REFUSED
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState

RequestRecords = QuerySet[RequestRecord]
Choices = list[tuple[str, str]]

PERIODS: dict[str, timedelta] = {
    "15m": timedelta(minutes=15),
    "1h": timedelta(hours=1),
    "24h": timedelta(hours=24),
    "7d": timedelta(days=7),
}


def _same(words: Iterable[str]) -> Choices:
    return [(word, word) for word in words]


class StateFilter(admin.SimpleListFilter):
    """By what became of a request, or by its state."""

    title = "state"
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        """Return the groups that operators ask for, and every state that is none of them."""
        groups = [("open", "In progress"), ("refused", "Refused (caller's mistake)"), ("wrong", "Failed, any way")]
        return groups + _same(state.value for state in RequestState if state is not RequestState.REJECTED)

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        """Return the records in that state."""
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
    """By age."""

    title = "time"
    parameter_name = "period"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        """Return the periods."""
        return [("15m", "last 15 minutes"), ("1h", "last hour"), ("24h", "last 24 hours"), ("7d", "last 7 days")]

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        """Return the records of that period."""
        period = PERIODS.get(self.value() or "")
        return queryset.filter(created_at__gte=clock.now() - period) if period else queryset


class ModelFilter(admin.SimpleListFilter):
    """By model."""

    title = "model"
    parameter_name = "model"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        """Return the known models."""
        return _same(Model.objects.values_list("name", flat=True)[: limits().gateway.page_choices])

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        """Return the records of that model."""
        return queryset.filter(model=self.value()) if self.value() else queryset


class TenantFilter(admin.SimpleListFilter):
    """By tenant."""

    title = "tenant"
    parameter_name = "tenant"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        """Return the tenants."""
        return _same(Tenant.objects.values_list("name", flat=True)[: limits().gateway.page_choices])

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        """Return the records of that tenant."""
        return queryset.filter(tenant=self.value()) if self.value() else queryset


class NodeFilter(admin.SimpleListFilter):
    """By box, as far as it served something during the last day."""

    title = "node"
    parameter_name = "node"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        """Return the boxes of the last day's newest records."""
        since = clock.now() - timedelta(days=1)
        recent = RequestRecord.objects.filter(created_at__gte=since).exclude(node_name="").order_by("-created_at")
        names = set(recent.values_list("node_name", flat=True)[: limits().gateway.page_recent_records])
        return _same(sorted(names)[: limits().gateway.page_choices])

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        """Return the records that box served last."""
        return queryset.filter(node_name=self.value()) if self.value() else queryset


class ErrorFilter(admin.SimpleListFilter):
    """By error code."""

    title = "error"
    parameter_name = "error"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Choices:  # Any: Django's signature
        """Return "any" and the closed vocabulary."""
        return [("any", "any error"), *_same(code.value for code in ErrorCode)]

    def queryset(self, request: HttpRequest, queryset: RequestRecords) -> RequestRecords:
        """Return the records with that error."""
        value = self.value()
        if value == "any":
            return queryset.filter(error_code__isnull=False)
        return queryset.filter(error_code=value) if value else queryset
