"""The page of client API keys."""

from __future__ import annotations

import json
import shlex
from datetime import UTC, date, datetime, time, timedelta
from typing import ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from core.admin_pages import Created, CreatingAdmin, NextStep, Offer, RowChange, Values, column
from core.limits import limits
from gateway.admin.forms import DateInput, NameListField, limit_field
from gateway.models import ApiKey, Model, Tenant
from gateway.services import change_key_limits, create_api_key, key_limit, revoke_api_key, tenant_limit
from gateway.values import Priority
from wire import clock

RATE_HELP = "Empty: the tenant's limit, else the installation's default."
MODELS_HELP = "Models, aliases or auto, one to a line. Empty: every allow-listed model."


def _priority_field() -> forms.ChoiceField:
    """Return the choice of a priority."""
    return forms.ChoiceField(
        choices=[(priority.value, priority.value) for priority in Priority],
        initial=Priority.NORMAL.value,
        widget=UnfoldAdminSelectWidget,
        help_text="Order in the node's queue",
    )


class ApiKeyForm(forms.Form):
    """What is asked for a new key."""

    name = forms.CharField(
        max_length=limits().gateway.name_chars, widget=UnfoldAdminTextInputWidget, help_text="Who or what will use it"
    )
    tenant = forms.ModelChoiceField(
        queryset=Tenant.objects.filter(is_active=True), widget=UnfoldAdminSelectWidget, empty_label="Choose a tenant"
    )
    requests_per_minute = limit_field("Requests per minute", RATE_HELP)
    allowed_models = NameListField(required=False, help_text=MODELS_HELP)
    priority = _priority_field()
    last_day = forms.DateField(
        required=False,
        widget=DateInput,
        label="Expires on",
        help_text="It works until this day ends (UTC). Empty: it never expires.",
    )


class KeyLimitsForm(forms.Form):
    """The limits of a key."""

    requests_per_minute = limit_field("Requests per minute", RATE_HELP)
    allowed_models = NameListField(required=False, help_text=MODELS_HELP)
    priority = _priority_field()


def _end_of(day: date | None) -> datetime | None:
    return datetime.combine(day + timedelta(days=1), time.min, tzinfo=UTC) if day is not None else None


def _revoke(key: ApiKey, actor: str, values: Values) -> str:
    revoke_api_key(key_id=key.pk, actor=actor)
    return f"Revoked the key {key.name}."


def _limit(key: ApiKey, actor: str, values: Values) -> str:
    change_key_limits(
        key_id=key.pk,
        requests_per_minute=values["requests_per_minute"],
        allowed_models=values["allowed_models"],
        priority=values["priority"],
        actor=actor,
    )
    return f"Changed the limits of {key.name}."


def _offer_raise(key: ApiKey, values: Values) -> Offer:
    wanted = values["requests_per_minute"] or tenant_limit(key.tenant)
    params: dict[str, object] = {"requests_per_minute": wanted} if wanted > key_limit(key) else {}
    if values["priority"] == Priority.HIGH.value and key.priority != Priority.HIGH.value:
        params["priority"] = Priority.HIGH.value
    return Offer(operation="limit-raise", target=f"key:{key.pk}", params=params)


def _describe_use(key: ApiKey, text: str) -> tuple[NextStep, ...]:
    """Return how a client uses a new key, in lines that can be pasted as they stand."""
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
        "show_name",
        "tenant",
        "show_state",
        "show_rate",
        "show_models",
        "priority",
        "last_used_at",
        "created_at",
        "show_changes",
    )
    list_select_related = ("tenant",)
    is_live = True
    empty_words = (
        "A client sends an API key with every request. Create one for each app or person, so that you can revoke it alone."
    )
    list_filter = ("tenant", ("revoked_at", admin.EmptyFieldListFilter))
    search_fields = ("name", "keyid", "tenant__name")
    fields = (
        "name",
        "show_prefix",
        "tenant",
        "show_state",
        "requests_per_minute",
        "show_models",
        "priority",
        "last_used_at",
        "created_at",
        "expires_at",
        "revoked_at",
    )
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
            run=_limit,
            is_offered=_is_usable,
            form=KeyLimitsForm,
            find_offer=_offer_raise,
            read_initial=lambda key: {
                "requests_per_minute": key.requests_per_minute,
                "allowed_models": key.allowed_models,
                "priority": key.priority,
            },
        ),
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
        """Create a key."""
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

    @column("Name", ordering="name")
    def show_name(self, key: ApiKey) -> SafeString:
        """Return the name; below it the public head of the key."""
        return format_html('<span class="mst-pair"><span>{}</span><small>{}…</small></span>', key.name, key.prefix)

    @column("Key")
    def show_prefix(self, key: ApiKey) -> str:
        """Return the public head of the key."""
        return f"{key.prefix}…"

    @column(
        "State",
        ordering="revoked_at",
        label={"active": "success", "expired": "warning", "revoked": "danger", "tenant off": "warning"},
    )
    def show_state(self, key: ApiKey) -> str:
        """Return whether it may be used, and if not why."""
        if key.revoked_at is not None:
            return "revoked"
        if key.expires_at is not None and key.expires_at <= clock.now():
            return "expired"
        return "active" if key.tenant.is_active else "tenant off"

    @column("Requests/min")
    def show_rate(self, key: ApiKey) -> str:
        """Return the rate that applies, and where it comes from."""
        if key.requests_per_minute is not None:
            return str(key.requests_per_minute)
        return "default" if key.tenant.requests_per_minute is None else f"{key.tenant.requests_per_minute} (tenant)"

    @column("Models")
    def show_models(self, key: ApiKey) -> str:
        """Return which models it may use."""
        return ", ".join(key.allowed_models) or "all allowed"
