"""The tenants page."""

from __future__ import annotations

from typing import ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from unfold.widgets import UnfoldAdminTextInputWidget

from gateway.admin.forms import limit_field
from gateway.models import Tenant
from gateway.services import (
    ServiceError,
    change_tenant_limit,
    create_tenant,
    default_limit,
    disable_tenant,
    enable_tenant,
)
from gateway.services.values import MAX_NAME_CHARS
from governance.pages import Created, CreatingAdmin, Offer, RowChange, Values, column

RATE_HELP = "What its keys get unless a key says otherwise. Empty: the installation's default."


class TenantForm(forms.Form):
    """What is asked for a new tenant."""

    name = forms.CharField(max_length=MAX_NAME_CHARS, widget=UnfoldAdminTextInputWidget, help_text="A team or a customer")
    requests_per_minute = limit_field("Requests per minute", RATE_HELP)


class TenantLimitForm(forms.Form):
    """The limits of a tenant."""

    requests_per_minute = limit_field("Requests per minute", RATE_HELP)


def _disable(tenant: Tenant, actor: str, values: Values) -> str:
    disable_tenant(name=tenant.name, actor=actor)
    return f"Disabled {tenant.name}: its keys are refused from now on."


def _enable(tenant: Tenant, actor: str, values: Values) -> str:
    enable_tenant(name=tenant.name, actor=actor)
    return f"Enabled {tenant.name}."


def _limit(tenant: Tenant, actor: str, values: Values) -> str:
    change_tenant_limit(name=tenant.name, requests_per_minute=values["requests_per_minute"], actor=actor)
    return f"Changed the limits of {tenant.name}."


def _offer_raise(tenant: Tenant, values: Values) -> Offer:
    wanted = values["requests_per_minute"] or default_limit()
    return Offer(operation="limit-raise", target=f"tenant:{tenant.name}", params={"requests_per_minute": wanted})


@admin.register(Tenant)
class TenantAdmin(CreatingAdmin):
    """Who the work is for."""

    list_display = ("name", "show_state", "show_rate", "show_keys", "created_at", "show_changes")
    search_fields = ("name",)
    fields = ("name", "is_active", "requests_per_minute", "created_at", "updated_at")
    readonly_fields = fields
    refusals = (ServiceError,)
    create_form = TenantForm
    create_title = "New tenant"
    create_explanation = "Keys belong to a tenant, and its name stands in every request record."
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="limits",
            label="Change limits",
            explanation="Takes effect within seconds, for requests that arrive from then on. "
            "Giving the tenant more than it has needs approval once there is a policy.",
            run=_limit,
            form=TenantLimitForm,
            find_offer=_offer_raise,
            read_initial=lambda tenant: {"requests_per_minute": tenant.requests_per_minute},
        ),
        RowChange(
            name="disable",
            label="Disable",
            explanation="Its keys are refused within seconds. Requests under way end normally. It can be enabled again.",
            run=_disable,
            is_offered=lambda tenant: tenant.is_active,
            is_danger=True,
        ),
        RowChange(
            name="enable",
            label="Enable",
            explanation="The keys of this tenant work again within seconds, except revoked and expired ones.",
            run=_enable,
            is_offered=lambda tenant: not tenant.is_active,
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tenant]:
        """Count usable keys in the same query."""
        usable = Count("keys", filter=Q(keys__revoked_at__isnull=True))
        queryset: QuerySet[Tenant] = super().get_queryset(request).annotate(usable_keys=usable)
        return queryset

    def create(self, actor: str, values: Values) -> Created:
        """Create a tenant."""
        return Created(row=create_tenant(name=values["name"], requests_per_minute=values["requests_per_minute"], actor=actor))

    @column("State", ordering="is_active", label={"active": "success", "disabled": "danger"})
    def show_state(self, tenant: Tenant) -> str:
        """Return whether its keys are accepted."""
        return "active" if tenant.is_active else "disabled"

    @column("Requests/min", ordering="requests_per_minute")
    def show_rate(self, tenant: Tenant) -> str:
        """Return the rate its keys get."""
        return "default" if tenant.requests_per_minute is None else str(tenant.requests_per_minute)

    @column("Keys in use", ordering="usable_keys")
    def show_keys(self, tenant: Tenant) -> int:
        """Return how many keys are not revoked."""
        return int(getattr(tenant, "usable_keys", 0))
