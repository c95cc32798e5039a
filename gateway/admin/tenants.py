"""The tenants page."""

from __future__ import annotations

from typing import ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminTextInputWidget, UnfoldBooleanSwitchWidget

from core.admin_pages import Created, CreatingAdmin, Offer, RowChange, Values, column
from core.limits import limits
from gateway.admin.forms import limit_field
from gateway.models import StoredResponse, Tenant
from gateway.services import (
    change_response_policy,
    change_tenant_limit,
    create_tenant,
    default_limit,
    disable_tenant,
    enable_tenant,
    forget_responses,
)

RATE_HELP = "What its keys get unless a key says otherwise. Empty: the installation's default."


class TenantForm(forms.Form):
    """What is asked for a new tenant."""

    name = forms.CharField(
        max_length=limits().gateway.name_chars, widget=UnfoldAdminTextInputWidget, help_text="A team or a customer"
    )
    requests_per_minute = limit_field("Requests per minute", RATE_HELP)


class TenantLimitForm(forms.Form):
    """The limits of a tenant."""

    requests_per_minute = limit_field("Requests per minute", RATE_HELP)


class ResponsePolicyForm(forms.Form):
    """Whether answers are kept, and how long."""

    stores_responses = forms.BooleanField(
        label="Keep answers of /v1/responses",
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text="With the prompts they answer, in this installation's database",
    )
    responses_kept_days = forms.IntegerField(
        label="Days",
        min_value=1,
        max_value=limits().gateway.kept_days,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text="Then they are deleted",
    )


def _disable(tenant: Tenant, actor: str, values: Values) -> str:
    disable_tenant(name=tenant.name, actor=actor)
    return f"Disabled {tenant.name}: its keys are refused from now on."


def _enable(tenant: Tenant, actor: str, values: Values) -> str:
    enable_tenant(name=tenant.name, actor=actor)
    return f"Enabled {tenant.name}."


def _limit(tenant: Tenant, actor: str, values: Values) -> str:
    change_tenant_limit(name=tenant.name, requests_per_minute=values["requests_per_minute"], actor=actor)
    return f"Changed the limits of {tenant.name}."


def _set_response_policy(tenant: Tenant, actor: str, values: Values) -> str:
    changed = change_response_policy(
        name=tenant.name,
        stores_responses=values["stores_responses"],
        responses_kept_days=values["responses_kept_days"],
        actor=actor,
    )
    if not changed.stores_responses:
        return f"Answers are not kept for {tenant.name}."
    return f"Answers are kept for {tenant.name}, for {changed.responses_kept_days} days."


def _forget_responses(tenant: Tenant, actor: str, values: Values) -> str:
    deleted = forget_responses(tenant=tenant.name, actor=actor)
    return f"Deleted what was kept for {tenant.name}: {deleted} answers."


def _has_kept(tenant: Tenant) -> bool:
    return bool(getattr(tenant, "has_kept", False))


def _offer_raise(tenant: Tenant, values: Values) -> Offer:
    wanted = values["requests_per_minute"] or default_limit()
    return Offer(operation="limit-raise", target=f"tenant:{tenant.name}", params={"requests_per_minute": wanted})


@admin.register(Tenant)
class TenantAdmin(CreatingAdmin):
    """Who the work is for."""

    list_display = ("name", "show_state", "show_rate", "show_keys", "show_kept", "created_at", "show_changes")
    search_fields = ("name",)
    fields = (
        "name",
        "is_active",
        "requests_per_minute",
        "stores_responses",
        "responses_kept_days",
        "created_at",
        "updated_at",
    )
    readonly_fields = fields
    empty_words = "A tenant is a team or a customer. API keys belong to one, and share its limits."
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
            name="responses",
            label="Keep answers",
            explanation="Takes effect within seconds, for answers of /v1/responses that are made from then on. Clients of this "
            "tenant can then ask for them again and go on from them; operators who may view kept responses can read them. "
            "What is kept already stays until the day it was given: another change deletes it.",
            run=_set_response_policy,
            form=ResponsePolicyForm,
            read_initial=lambda tenant: {
                "stores_responses": tenant.stores_responses,
                "responses_kept_days": tenant.responses_kept_days,
            },
        ),
        RowChange(
            name="forget",
            label="Delete kept answers",
            explanation="Every kept answer of this tenant is deleted, with its prompts, for good. Conversations that go on "
            "from one are refused from then on. Whether new answers are kept does not change.",
            run=_forget_responses,
            is_offered=_has_kept,
            is_danger=True,
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
        """Count usable keys, and look for kept answers, in the same query."""
        usable = Count("keys", filter=Q(keys__revoked_at__isnull=True))
        kept = Exists(StoredResponse.objects.filter(tenant=OuterRef("pk")))
        queryset: QuerySet[Tenant] = super().get_queryset(request).annotate(usable_keys=usable, has_kept=kept)
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

    @column("Keeps answers", ordering="stores_responses")
    def show_kept(self, tenant: Tenant) -> str:
        """Return for how long answers are kept, or that none are."""
        return f"{tenant.responses_kept_days} days" if tenant.stores_responses else "no"
