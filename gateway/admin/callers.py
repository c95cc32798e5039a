"""The pages of callers: client API keys and tenants."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.widgets import (
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from core.admin_pages import Created, CreatingAdmin, NextStep, Offer, RowChange, Values, column
from core.limits import limits
from gateway.models import ApiKey, Model, StoredResponse, Tenant
from gateway.services.keys import change_key_budgets, change_key_limits, create_api_key, revoke_api_key
from gateway.services.limits import default_limit, hard_budgets, key_limit, read_budgets, tenant_limit
from gateway.services.responses import forget_responses
from gateway.services.tenants import (
    change_response_policy,
    change_tenant_budgets,
    change_tenant_limit,
    change_tenant_weight,
    create_tenant,
    disable_tenant,
    enable_tenant,
)
from gateway.values import MILLION, Budget, BudgetKind, Priority
from wire import clock


def limit_field(label: str, help_text: str) -> forms.IntegerField:
    return forms.IntegerField(
        label=label,
        help_text=help_text,
        required=False,
        min_value=1,
        max_value=limits().gateway.record_integer,
        widget=UnfoldAdminIntegerFieldWidget,
    )


class DateInput(UnfoldAdminTextInputWidget):  # type: ignore[misc]  # Unfold ships no types
    """The browser's own date picker: no script of ours."""

    input_type = "date"


class NameListField(forms.CharField):
    """Names, one to a line. Cleans to a list without blanks and doubles."""

    widget = UnfoldAdminTextareaWidget(attrs={"rows": 4})

    def clean(self, value: str) -> list[str]:
        lines = (line.strip() for line in super().clean(value).splitlines())
        return list(dict.fromkeys(line for line in lines if line))

    def prepare_value(self, value: object) -> object:
        return "\n".join(value) if isinstance(value, list) else value


class BudgetsField(forms.CharField):
    """Budgets, one to a line: a kind, an amount and perhaps ``soft``. Cleans to a list of Budget; of costs in the currency."""

    widget = UnfoldAdminTextareaWidget(attrs={"rows": 7, "placeholder": "tokens_per_day 1000000", "spellcheck": "false"})

    def clean(self, value: str) -> list[Budget]:
        """Return the budgets. Raises ValidationError, which says the line."""
        lines = super().clean(value).splitlines()
        return [_read_budget(number, line.split()) for number, line in enumerate(lines, 1) if line.strip()]

    def prepare_value(self, value: object) -> object:
        return "\n".join(map(_print_budget, value)) if isinstance(value, (list, tuple)) else value


def _read_budget(number: int, words: list[str]) -> Budget:
    kind, amount, *rest = [*words, "", ""][: max(2, len(words))]
    if kind not in set(BudgetKind):
        raise forms.ValidationError(f"Line {number}: give one of {', '.join(BudgetKind)}, not {kind[:40]}.", code="kind")
    problem = forms.ValidationError(f"Line {number}: write {kind}, an amount such as 1000, and perhaps soft.", code="budget")
    try:
        figure = Decimal(amount.replace("_", "")) * (MILLION if BudgetKind(kind).is_cost else 1)
        whole = int(figure)
    except (ArithmeticError, ValueError):
        raise problem from None
    if whole != figure or rest not in ([], ["soft"], ["hard"]):
        raise problem
    return Budget(BudgetKind(kind), whole, is_hard=rest != ["soft"])


def _print_budget(budget: Budget) -> str:
    amount = f"{Decimal(budget.amount) / MILLION:f}" if budget.kind.is_cost else str(budget.amount)
    return f"{budget.kind} {amount}" + ("" if budget.is_hard else " soft")


def _print_budgets(holder: ApiKey | Tenant) -> str:
    return "; ".join(map(_print_budget, read_budgets(holder))) or "none"


class BudgetsForm(forms.Form):
    """What all gateways together let a key or a tenant use."""

    budgets = BudgetsField(
        label="Limits and budgets",
        required=False,
        help_text=f"One to a line: {', '.join(BudgetKind)}, and the amount; a cost is in {settings.CURRENCY}. 0 refuses "
        "every request. Behind a budget of a day or a month (UTC), soft: it refuses nothing, and webhooks are told.",
    )


def _set_budgets(holder: ApiKey | Tenant, actor: str, values: Values) -> str:
    if isinstance(holder, Tenant):
        change_tenant_budgets(name=holder.name, budgets=values["budgets"], actor=actor)
    else:
        change_key_budgets(key_id=holder.pk, budgets=values["budgets"], actor=actor)
    return f"Changed the budgets of {holder.name}."


def _offer_budgets(holder: ApiKey | Tenant, values: Values) -> Offer:
    target = f"tenant:{holder.name}" if isinstance(holder, Tenant) else f"key:{holder.pk}"
    return Offer(operation="limit-raise", target=target, params=_list_more(holder, values["budgets"]))


def _list_more(holder: ApiKey | Tenant, budgets: list[Budget]) -> dict[str, object]:
    today = hard_budgets(holder)
    return {one.kind.value: one.amount for one in budgets if one.is_hard and one.amount > today.get(one.kind, one.amount)}


CHANGE_BUDGETS = RowChange(
    name="budgets",
    label="Change budgets",
    explanation="Takes effect within seconds, for requests that arrive from then on. All gateways count together. "
    "A higher hard budget needs approval once there is a policy; a new one does not.",
    run=_set_budgets,
    form=BudgetsForm,
    find_offer=_offer_budgets,
    read_initial=lambda holder: {"budgets": read_budgets(holder)},
)


KEY_RATE_HELP = "Empty: the tenant's limit, else the installation's default."
MODELS_HELP = "Models, aliases or auto, one to a line. Empty: every allow-listed model."


class KeyLimitsForm(forms.Form):
    """The limits of a key."""

    requests_per_minute = limit_field("Requests per minute", KEY_RATE_HELP)
    allowed_models = NameListField(required=False, help_text=MODELS_HELP)
    priority = forms.ChoiceField(
        choices=[(priority.value, priority.value) for priority in Priority],
        initial=Priority.NORMAL.value,
        widget=UnfoldAdminSelectWidget,
        help_text="Order in the node's queue",
    )


class ApiKeyForm(KeyLimitsForm):
    """What is asked for a new key."""

    name = forms.CharField(
        max_length=limits().gateway.name_chars, widget=UnfoldAdminTextInputWidget, help_text="Who or what will use it"
    )
    tenant = forms.ModelChoiceField(
        queryset=Tenant.objects.filter(is_active=True), widget=UnfoldAdminSelectWidget, empty_label="Choose a tenant"
    )
    last_day = forms.DateField(
        required=False,
        widget=DateInput,
        label="Expires on",
        help_text="It works until this day ends (UTC). Empty: it never expires.",
    )
    field_order = ("name", "tenant", *KeyLimitsForm.base_fields)


def _end_of(day: date | None) -> datetime | None:
    return datetime.combine(day + timedelta(days=1), time.min, tzinfo=UTC) if day is not None else None


def _revoke(key: ApiKey, actor: str, values: Values) -> str:
    revoke_api_key(key_id=key.pk, actor=actor)
    return f"Revoked the key {key.name}."


def _limit_key(key: ApiKey, actor: str, values: Values) -> str:
    change_key_limits(
        key_id=key.pk,
        requests_per_minute=values["requests_per_minute"],
        allowed_models=values["allowed_models"],
        priority=values["priority"],
        actor=actor,
    )
    return f"Changed the limits of {key.name}."


def _offer_key_raise(key: ApiKey, values: Values) -> Offer:
    wanted = values["requests_per_minute"] or tenant_limit(key.tenant)
    params: dict[str, object] = {"requests_per_minute": wanted} if wanted > key_limit(key) else {}
    if values["priority"] == Priority.HIGH.value and key.priority != Priority.HIGH.value:
        params["priority"] = Priority.HIGH.value
    return Offer(operation="limit-raise", target=f"key:{key.pk}", params=params)


def _describe_use(key: ApiKey, text: str) -> tuple[NextStep, ...]:
    base = str(settings.GATEWAY_PUBLIC_URL).rstrip("/")
    allowed = Model.objects.filter(allowed=True).order_by("name").values_list("name", flat=True).first()
    name = next(iter(key.allowed_models), allowed) or "auto"
    body = json.dumps({"model": name, "messages": [{"role": "user", "content": "Tell me a story."}]})
    curl = (
        f"curl {base}/v1/chat/completions \\\n  -H {shlex.quote(f'Authorization: Bearer {text}')} \\\n"
        f"  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"
    )
    steps = [NextStep("Try it:", curl)]
    if allowed is None:
        models_url = reverse("admin:gateway_model_changelist")
        steps.insert(0, NextStep("Clients may not use any model yet. Allow one first", url=models_url))
    environment = f"export OPENAI_BASE_URL={shlex.quote(f'{base}/v1')}\nexport OPENAI_API_KEY={shlex.quote(text)}"
    return (*steps, NextStep("For a program that uses an OpenAI library:", environment))


def _is_usable(key: ApiKey) -> bool:
    return key.revoked_at is None


@admin.register(ApiKey)
class ApiKeyAdmin(CreatingAdmin):
    """Client keys. Shown once, revoked, never deleted."""

    list_display = (
        "show_name", "tenant", "show_state", "show_rate", "show_models", "priority", "last_used_at", "created_at",
        "show_changes",
    )  # fmt: skip
    list_select_related = ("tenant",)
    is_live = True
    empty_words = (
        "A client sends an API key with every request. Create one for each app or person, so that you can revoke it alone."
    )
    list_filter = ("tenant", ("revoked_at", admin.EmptyFieldListFilter))
    search_fields = ("name", "keyid", "tenant__name")
    fields = (
        "name", "show_prefix", "tenant", "show_state", "requests_per_minute", "show_models", "priority", "show_budgets",
        "last_used_at", "created_at", "expires_at", "revoked_at",
    )  # fmt: skip
    readonly_fields = fields
    create_form = ApiKeyForm
    create_title = "New API key"
    create_explanation = "Clients send it as a bearer token. The next page shows it once; only its hash is stored."
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="limits",
            label="Change limits",
            explanation="Takes effect within seconds, for requests that arrive from then on. "
            "Giving the key more than it has needs approval once there is a policy.",
            run=_limit_key,
            is_offered=_is_usable,
            form=KeyLimitsForm,
            find_offer=_offer_key_raise,
            read_initial=lambda key: {
                "requests_per_minute": key.requests_per_minute,
                "allowed_models": key.allowed_models,
                "priority": key.priority,
            },
        ),
        replace(CHANGE_BUDGETS, is_offered=_is_usable),
        RowChange(
            name="revoke",
            label="Revoke",
            explanation="The key stops working everywhere within five seconds, for good. Requests under way end normally.",
            run=_revoke,
            is_offered=_is_usable,
            is_danger=True,
        ),
    )

    def create(self, actor: str, values: Values) -> Created:
        key, text = create_api_key(
            name=values["name"],
            tenant_name=values["tenant"].name,
            requests_per_minute=values["requests_per_minute"],
            allowed_models=values["allowed_models"],
            priority=values["priority"],
            expires_at=_end_of(values["last_day"]),
            actor=actor,
        )
        return Created(row=key, secret=text, steps=_describe_use(key, text))

    @column("Limits and budgets")
    def show_budgets(self, key: ApiKey) -> str:
        return _print_budgets(key)

    @column("Name", ordering="name")
    def show_name(self, key: ApiKey) -> SafeString:
        return format_html('<span class="mst-pair"><span>{}</span><small>{}…</small></span>', key.name, key.prefix)

    @column("Key")
    def show_prefix(self, key: ApiKey) -> str:
        return f"{key.prefix}…"

    @column(
        "State",
        ordering="revoked_at",
        label={"active": "success", "expired": "warning", "revoked": "danger", "tenant off": "warning"},
    )
    def show_state(self, key: ApiKey) -> str:
        if key.revoked_at is not None:
            return "revoked"
        if key.expires_at is not None and key.expires_at <= clock.now():
            return "expired"
        return "active" if key.tenant.is_active else "tenant off"

    @column("Requests/min")
    def show_rate(self, key: ApiKey) -> str:
        if key.requests_per_minute is not None:
            return str(key.requests_per_minute)
        return "default" if key.tenant.requests_per_minute is None else f"{key.tenant.requests_per_minute} (tenant)"

    @column("Models")
    def show_models(self, key: ApiKey) -> str:
        return ", ".join(key.allowed_models) or "all allowed"


class TenantLimitForm(forms.Form):
    """The limits of a tenant."""

    requests_per_minute = limit_field(
        "Requests per minute", "What its keys get unless a key says otherwise. Empty: the installation's default."
    )


class TenantForm(TenantLimitForm):
    """What is asked for a new tenant."""

    name = forms.CharField(
        max_length=limits().gateway.name_chars, widget=UnfoldAdminTextInputWidget, help_text="A team or a customer"
    )
    field_order = ("name",)


class TenantWeightForm(forms.Form):
    """The weight of a tenant in the queue."""

    weight = forms.IntegerField(
        label="Weight in percent",
        min_value=1,
        max_value=limits().gateway.tenant_weight,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text="Its part of the slots while requests wait. 100: as much as other tenants; 250: two and a half times that.",
    )


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


def _limit_tenant(tenant: Tenant, actor: str, values: Values) -> str:
    change_tenant_limit(name=tenant.name, requests_per_minute=values["requests_per_minute"], actor=actor)
    return f"Changed the limits of {tenant.name}."


def _weigh_tenant(tenant: Tenant, actor: str, values: Values) -> str:
    change_tenant_weight(name=tenant.name, weight=values["weight"], actor=actor)
    return f"Changed the weight of {tenant.name}."


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


def _offer_tenant_raise(tenant: Tenant, values: Values) -> Offer:
    wanted = values["requests_per_minute"] or default_limit()
    return Offer(operation="limit-raise", target=f"tenant:{tenant.name}", params={"requests_per_minute": wanted})


@admin.register(Tenant)
class TenantAdmin(CreatingAdmin):
    """Who the work is for."""

    list_display = ("name", "show_state", "show_rate", "show_keys", "show_kept", "created_at", "show_changes")
    search_fields = ("name",)
    fields = (
        "name", "is_active", "requests_per_minute", "show_budgets", "show_weight", "stores_responses", "responses_kept_days",
        "created_at", "updated_at",
    )  # fmt: skip
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
            run=_limit_tenant,
            form=TenantLimitForm,
            find_offer=_offer_tenant_raise,
            read_initial=lambda tenant: {"requests_per_minute": tenant.requests_per_minute},
        ),
        CHANGE_BUDGETS,
        RowChange(
            name="weight",
            label="Change weight",
            explanation="Takes effect within seconds, for requests that arrive from then on. It counts only while requests "
            "wait. A higher weight takes from other tenants and needs approval once there is a policy.",
            run=_weigh_tenant,
            form=TenantWeightForm,
            find_offer=lambda tenant, values: Offer(
                operation="limit-raise",
                target=f"tenant:{tenant.name}",
                params={"weight": values["weight"]} if values["weight"] > tenant.weight else {},
            ),
            read_initial=lambda tenant: {"weight": tenant.weight},
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
        usable = Count("keys", filter=Q(keys__revoked_at__isnull=True))
        kept = Exists(StoredResponse.objects.filter(tenant=OuterRef("pk")))
        queryset: QuerySet[Tenant] = super().get_queryset(request).annotate(usable_keys=usable, has_kept=kept)
        return queryset

    def create(self, actor: str, values: Values) -> Created:
        return Created(row=create_tenant(name=values["name"], requests_per_minute=values["requests_per_minute"], actor=actor))

    @column("State", ordering="is_active", label={"active": "success", "disabled": "danger"})
    def show_state(self, tenant: Tenant) -> str:
        return "active" if tenant.is_active else "disabled"

    @column("Requests/min", ordering="requests_per_minute")
    def show_rate(self, tenant: Tenant) -> str:
        return "default" if tenant.requests_per_minute is None else str(tenant.requests_per_minute)

    @column("Limits and budgets")
    def show_budgets(self, tenant: Tenant) -> str:
        return _print_budgets(tenant)

    @column("Weight in the queue")
    def show_weight(self, tenant: Tenant) -> str:
        return f"{tenant.weight} %"

    @column("Keys in use", ordering="usable_keys")
    def show_keys(self, tenant: Tenant) -> int:
        return int(getattr(tenant, "usable_keys", 0))

    @column("Keeps answers", ordering="stores_responses")
    def show_kept(self, tenant: Tenant) -> str:
        return f"{tenant.responses_kept_days} days" if tenant.stores_responses else "no"
