"""The pages of callers: client API keys and tenants."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin
from django.db.models import Count, Exists, OuterRef, Q, QuerySet
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from unfold.widgets import (
    UnfoldAdminCheckboxSelectMultipleWidget,
    UnfoldAdminDecimalFieldWidget,
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from core.admin_pages import Created, CreatingAdmin, NextStep, Offer, RowChange, RowList, Text, Values, column
from core.charts import draw_sparkline
from core.limits import limits
from gateway.models import ApiKey, Model, StoredResponse, Tenant
from gateway.routing import AUTO
from gateway.services.keys import (
    change_key_budgets,
    change_key_limits,
    create_api_key,
    revoke_api_key,
    rotate_api_key,
)
from gateway.services.limits import default_limit, hard_budgets, key_limit, read_budgets, tenant_limit
from gateway.services.models import list_offers
from gateway.services.responses import forget_responses
from gateway.services.rollups import Part, Sums, read_days
from gateway.services.tenants import (
    change_response_policy,
    change_tenant_budgets,
    change_tenant_limit,
    change_tenant_weight,
    create_tenant,
    disable_tenant,
    enable_tenant,
)
from gateway.values import MILLION, Budget, BudgetKind, Dimension, Priority
from nodes.services.availability import list_models_without, read_served_models
from wire import clock

CHAT_PATH = "/v1/chat/completions"


def limit_field(label: Text, help_text: Text) -> forms.IntegerField:
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


class BudgetsForm(forms.Form):
    """What all gateways together let a key or a tenant use: an amount for each kind, empty where there is none.

    Cleans to ``budgets``, a list of Budget; costs are typed in the currency.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: Django's form arguments
        super().__init__(*args, **kwargs)
        budgets: Iterable[Budget] = self.initial.pop("budgets", ())
        today = {one.kind: one for one in budgets}
        for kind, (label, unit) in _BUDGETS.items():
            self.fields[kind.value] = forms.DecimalField(
                label=label,
                required=False,
                min_value=0,
                max_value=Decimal(limits().gateway.budget_amount) / (MILLION if kind.is_cost else 1),
                decimal_places=6 if kind.is_cost else 0,
                help_text=_("In %(unit)s. Empty: no limit. 0 refuses every request.") % {"unit": unit},
                widget=UnfoldAdminDecimalFieldWidget,
            )
            if kind.is_budget:
                self.fields[_name_soft(kind)] = forms.BooleanField(
                    label=_("Only warn"),
                    required=False,
                    help_text=_("Muster refuses nothing when it is used up, and tells the webhooks."),
                    widget=UnfoldBooleanSwitchWidget,
                )
            if kind in today:
                amount = today[kind].amount
                self.initial[kind.value] = (Decimal(amount) / MILLION).normalize() if kind.is_cost else amount
                self.initial[_name_soft(kind)] = not today[kind].is_hard

    def clean(self) -> dict[str, Any]:  # Any: Django's cleaned data
        """Return the budgets as one list."""
        said = super().clean() or {}
        kinds = [kind for kind in BudgetKind if said.get(kind.value) is not None]
        said["budgets"] = [
            Budget(kind, int(said[kind.value] * (MILLION if kind.is_cost else 1)), is_hard=not said.get(_name_soft(kind)))
            for kind in kinds
        ]
        return said


_BUDGETS: dict[BudgetKind, tuple[Text, Text]] = {
    BudgetKind.ALL_REQUESTS_PER_MINUTE: (gettext_lazy("Requests per minute, all gateways"), gettext_lazy("requests")),
    BudgetKind.TOKENS_PER_MINUTE: (gettext_lazy("Tokens per minute"), gettext_lazy("tokens")),
    BudgetKind.CONCURRENT_REQUESTS: (gettext_lazy("Requests at a time"), gettext_lazy("requests")),
    BudgetKind.TOKENS_PER_DAY: (gettext_lazy("Tokens per day (UTC)"), gettext_lazy("tokens")),
    BudgetKind.TOKENS_PER_MONTH: (gettext_lazy("Tokens per month (UTC)"), gettext_lazy("tokens")),
    BudgetKind.COST_PER_DAY: (gettext_lazy("Cost per day (UTC)"), settings.CURRENCY),
    BudgetKind.COST_PER_MONTH: (gettext_lazy("Cost per month (UTC)"), settings.CURRENCY),
}
"""How a page calls each kind, and what its amount is in."""


def _name_soft(kind: BudgetKind) -> str:
    return f"{kind.value}_soft"


def _print_budget(budget: Budget) -> str:
    label, unit = _BUDGETS[budget.kind]
    amount = Decimal(budget.amount) / MILLION if budget.kind.is_cost else Decimal(budget.amount)
    values = {"label": label, "amount": number_format(amount.normalize(), force_grouping=True), "unit": unit}
    if budget.is_hard:
        return _("%(label)s: %(amount)s %(unit)s") % values
    return _("%(label)s: %(amount)s %(unit)s, only warns") % values


def _print_budgets(holder: ApiKey | Tenant) -> str:
    return "; ".join(map(_print_budget, read_budgets(holder))) or _("none")


def _set_budgets(holder: ApiKey | Tenant, actor: str, values: Values) -> str:
    if isinstance(holder, Tenant):
        change_tenant_budgets(name=holder.name, budgets=values["budgets"], actor=actor)
    else:
        change_key_budgets(key_id=holder.pk, budgets=values["budgets"], actor=actor)
    return _("Changed the limits and budgets of %(name)s.") % {"name": holder.name}


def _offer_budgets(holder: ApiKey | Tenant, values: Values) -> Offer:
    target = f"tenant:{holder.name}" if isinstance(holder, Tenant) else f"key:{holder.pk}"
    return Offer(operation="limit-raise", target=target, params=_list_more(holder, values["budgets"]))


def _list_more(holder: ApiKey | Tenant, budgets: list[Budget]) -> dict[str, object]:
    today = hard_budgets(holder)
    return {one.kind.value: one.amount for one in budgets if one.is_hard and one.amount > today.get(one.kind, one.amount)}


CHANGE_BUDGETS = RowChange(
    name="budgets",
    label=gettext_lazy("Change budgets"),
    explanation=gettext_lazy(
        "Takes effect within seconds, for requests that arrive from then on. All gateways count together. "
        "A higher hard budget needs approval once there is a policy; a new one does not."
    ),
    run=_set_budgets,
    form=BudgetsForm,
    find_offer=_offer_budgets,
    read_initial=lambda holder: {"budgets": read_budgets(holder)},
)


class ModelsField(forms.MultipleChoiceField):
    """Names that clients may ask for, to tick: what is allowed and aliases, and what is ticked already."""

    widget = UnfoldAdminCheckboxSelectMultipleWidget

    def offer(self, ticked: Iterable[str]) -> None:
        """Take what may be ticked now; ``ticked`` may hold what is gone since."""
        offers = list_offers()
        names = [AUTO, *offers.models, *(alias.name for alias in offers.aliases)]
        self.choices = [(name, name) for name in dict.fromkeys([*names, *ticked])]


class KeyLimitsForm(forms.Form):
    """The limits of a key."""

    requests_per_minute = limit_field(
        gettext_lazy("Requests per minute"), gettext_lazy("Empty: the tenant's limit, else the installation's default.")
    )
    allowed_models = ModelsField(
        label=gettext_lazy("Models"), required=False, help_text=gettext_lazy("None ticked: every allowed model.")
    )
    priority = forms.ChoiceField(
        label=gettext_lazy("Priority"),
        choices=[
            (Priority.HIGH.value, gettext_lazy("high")),
            (Priority.NORMAL.value, gettext_lazy("normal")),
            (Priority.LOW.value, gettext_lazy("low")),
        ],
        initial=Priority.NORMAL.value,
        widget=UnfoldAdminSelectWidget,
        help_text=gettext_lazy("Order in the queue while requests wait"),
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # Any: Django's form arguments
        super().__init__(*args, **kwargs)
        models = self.fields["allowed_models"]
        assert isinstance(models, ModelsField)
        models.offer(self.initial.get("allowed_models", ()))


class ApiKeyForm(KeyLimitsForm):
    """What is asked for a new key."""

    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=limits().gateway.name_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Who or what will use it"),
    )
    tenant = forms.ModelChoiceField(
        label=gettext_lazy("Tenant"),
        queryset=Tenant.objects.filter(is_active=True),
        widget=UnfoldAdminSelectWidget,
        empty_label=gettext_lazy("Choose a tenant"),
    )
    last_day = forms.DateField(
        required=False,
        widget=DateInput,
        label=gettext_lazy("Expires on"),
        help_text=gettext_lazy("The key works until this day ends (UTC). Empty: it never expires."),
    )
    field_order = ("name", "tenant", *KeyLimitsForm.base_fields)


def _end_of(day: date | None) -> datetime | None:
    return datetime.combine(day + timedelta(days=1), time.min, tzinfo=UTC) if day is not None else None


def _revoke(key: ApiKey, actor: str, values: Values) -> str:
    revoke_api_key(key_id=key.pk, actor=actor)
    return _("Revoked the key %(name)s.") % {"name": key.name}


def _rotate(key: ApiKey, actor: str, values: Values) -> Created:
    key, text = rotate_api_key(key_id=key.pk, actor=actor)
    return describe_key(key, text)


def _limit_key(key: ApiKey, actor: str, values: Values) -> str:
    change_key_limits(
        key_id=key.pk,
        requests_per_minute=values["requests_per_minute"],
        allowed_models=values["allowed_models"],
        priority=values["priority"],
        actor=actor,
    )
    return _("Changed the limits of %(name)s.") % {"name": key.name}


def _offer_key_raise(key: ApiKey, values: Values) -> Offer:
    wanted = values["requests_per_minute"] or tenant_limit(key.tenant)
    params: dict[str, object] = {"requests_per_minute": wanted} if wanted > key_limit(key) else {}
    if values["priority"] == Priority.HIGH.value and key.priority != Priority.HIGH.value:
        params["priority"] = Priority.HIGH.value
    return Offer(operation="limit-raise", target=f"key:{key.pk}", params=params)


def describe_key(key: ApiKey, text: str) -> Created:
    """Return the page that shows a key: where clients send it, and how each client is told."""
    base = str(settings.GATEWAY_PUBLIC_URL).rstrip("/")
    allowed = list(Model.objects.filter(allowed=True).order_by("name").values_list("name", flat=True))
    name = choose_chat_model(key.allowed_models or allowed) or AUTO
    steps = list_clients(base=base, key=text, model=name)
    if not allowed:
        models_url = reverse("admin:gateway_model_changelist")
        steps.insert(0, NextStep(_("Clients may not use any model yet. Allow one first"), url=models_url))
    usage = _("Base URL for OpenAI's clients: %(openai)s. For Anthropic's clients: %(anthropic)s.") % {
        "openai": f"{base}/v1", "anthropic": base,
    }  # fmt: skip
    return Created(row=key, secret=text, usage=usage, steps=tuple(steps), trial=name if allowed else "")


def choose_chat_model(names: Sequence[str]) -> str:
    """Return the model that a first question goes to: one that a node serves and that answers chats; "" of none."""
    silent, served = list_models_without(CHAT_PATH), read_served_models()
    chatty = [name for name in names if name not in silent] or list(names)
    return next(iter([name for name in chatty if name in served] or chatty), "")


def list_clients(*, base: str, key: str, model: str) -> list[NextStep]:
    """Return how each client is told of the gateway at ``base``: what can be pasted as it stands, the key filled in."""
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Tell me a story."}], "stream": True})
    curl = (
        f"curl -N {base}/v1/chat/completions \\\n  -H {shlex.quote(f'Authorization: Bearer {key}')} \\\n"
        f"  -H 'Content-Type: application/json' \\\n  -d {shlex.quote(body)}"
    )
    python = (
        "from openai import OpenAI\n\n"
        f"client = OpenAI(base_url={json.dumps(f'{base}/v1')}, api_key={json.dumps(key)})\n"
        'question = [{"role": "user", "content": "Tell me a story."}]\n'
        f"for chunk in client.chat.completions.create(model={json.dumps(model)}, messages=question, stream=True):\n"
        '    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)'
    )
    openai = f"export OPENAI_BASE_URL={shlex.quote(f'{base}/v1')}\nexport OPENAI_API_KEY={shlex.quote(key)}"
    claude = (
        f"export ANTHROPIC_BASE_URL={shlex.quote(base)} ANTHROPIC_AUTH_TOKEN={shlex.quote(key)}\n"
        f"export ANTHROPIC_MODEL={shlex.quote(model)} ANTHROPIC_DEFAULT_HAIKU_MODEL={shlex.quote(model)}\nclaude"
    )
    codex = (
        f"export MUSTER_API_KEY={shlex.quote(key)}\n"
        f"codex -m {shlex.quote(model)} -c model_provider=muster -c model_providers.muster.name=Muster \\\n"
        f"  -c model_providers.muster.base_url={shlex.quote(f'{base}/v1')} \\\n"
        "  -c model_providers.muster.env_key=MUSTER_API_KEY -c model_providers.muster.wire_api=responses"
    )
    aider = (
        f"export OPENAI_API_BASE={shlex.quote(f'{base}/v1')} OPENAI_API_KEY={shlex.quote(key)}\n"
        f"aider --model {shlex.quote(f'openai/{model}')} --edit-format diff"
    )
    webui = (
        f"OPENAI_API_BASE_URL={shlex.quote(f'{base}/v1')} OPENAI_API_KEY={shlex.quote(key)} ENABLE_OLLAMA_API=false \\\n"
        "  open-webui serve"
    )
    return [
        NextStep(_("In a terminal, with curl"), curl),
        NextStep(_("Variables of programs that use an OpenAI library"), openai),
        *(
            NextStep(name, command, is_folded=True)
            for name, command in (
                ("Python", python), ("Claude Code", claude), ("Codex", codex), ("aider", aider), ("Open WebUI", webui),
            )
        ),
    ]  # fmt: skip


def _is_usable(key: ApiKey) -> bool:
    return key.revoked_at is None


def _draw_use(days: Iterable[Sums]) -> SafeString:
    """Return a small line of requests by day, with their number."""
    counts = [day.requests for day in days]
    used = sum(counts)
    said = ngettext("%(count)s request", "%(count)s requests", used) % {"count": number_format(used, force_grouping=True)}
    path = draw_sparkline(counts, width=100, height=24) if used else ""
    return SafeString(render_to_string("admin/muster/use.html", {"path": path, "said": said}))


class UseList(RowList):
    """A list whose rows say what they were used for, which is one query for all of a page. ``dimension``: of the rows."""

    dimension: ClassVar[Dimension]

    def get_results(self, request: HttpRequest) -> None:
        """Find the rows of the page, and give each its ``use``."""
        super().get_results(request)
        rows: list[Any] = list(self.result_list)  # type: ignore[has-type]  # Django types no list of results
        names = [self.name(row) for row in rows]
        days_back = limits().gateway.page_use_days
        part = Part(days_back, self.dimension, names=tuple(names))
        days = read_days(part, most=days_back * len(names)) if names else {}
        for row in rows:
            row.use = days.get(self.name(row), ())
        self.result_list = rows

    def name(self, row: ApiKey | Tenant) -> str:
        """Return the name of the row's sums."""
        return row.name if isinstance(row, Tenant) else str(row.pk)


class KeyList(UseList):
    dimension = Dimension.KEY


class TenantList(UseList):
    dimension = Dimension.TENANT


@admin.register(ApiKey)
class ApiKeyAdmin(CreatingAdmin):
    """Client keys. Shown once, revoked, never deleted."""

    list_display = (
        "show_name", "tenant", "show_state", "show_use", "show_rate", "show_models", "last_used_at", "expires_at",
        "show_changes",
    )  # fmt: skip
    list_select_related = ("tenant",)
    is_live = True
    empty_words = gettext_lazy(
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
    create_title = gettext_lazy("New API key")
    create_explanation = gettext_lazy(
        "Clients send it as a bearer token. The next page shows it once; Muster stores only its hash."
    )
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="limits",
            label=gettext_lazy("Change limits"),
            explanation=gettext_lazy(
                "Takes effect within seconds, for requests that arrive from then on. "
                "Giving the key more than it has needs approval once there is a policy."
            ),
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
            name="rotate",
            label=gettext_lazy("Rotate"),
            explanation=gettext_lazy(
                "The key gets another text, which the next page shows once. The text that clients have now stops working "
                "within five seconds. Limits, budgets and what was used of them stay."
            ),
            run=_rotate,
            is_offered=_is_usable,
            is_danger=True,
        ),
        RowChange(
            name="revoke",
            label=gettext_lazy("Revoke"),
            explanation=gettext_lazy(
                "The key stops working everywhere within five seconds, for good. Requests under way end normally."
            ),
            run=_revoke,
            is_offered=_is_usable,
            is_danger=True,
        ),
    )

    def get_changelist(self, request: HttpRequest, **kwargs: object) -> type[RowList]:
        return KeyList

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
        return describe_key(key, text)

    @column(gettext_lazy("Limits and budgets"))
    def show_budgets(self, key: ApiKey) -> str:
        return _print_budgets(key)

    @column(gettext_lazy("Name"), ordering="name")
    def show_name(self, key: ApiKey) -> SafeString:
        return format_html(
            '<span class="mst-pair"><span>{}</span><small class="mst-whole">{}</small></span>', key.name, self.show_prefix(key)
        )

    @column(gettext_lazy("Key"))
    def show_prefix(self, key: ApiKey) -> str:
        return _("requests without a key") if key.variable else f"{key.prefix}…"

    @column(
        gettext_lazy("State"),
        ordering="revoked_at",
        label={"active": "success", "expired": "warning", "revoked": "danger", "tenant disabled": "warning"},
    )
    def show_state(self, key: ApiKey) -> tuple[str, str]:
        if key.revoked_at is not None:
            return "revoked", _("revoked")
        if key.expires_at is not None and key.expires_at <= clock.now():
            return "expired", _("expired")
        return ("active", _("active")) if key.tenant.is_active else ("tenant disabled", _("tenant disabled"))

    @column(gettext_lazy("Last 7 days"))
    def show_use(self, key: ApiKey) -> SafeString:
        return _draw_use(getattr(key, "use", ()))

    @column(gettext_lazy("Requests/min"))
    def show_rate(self, key: ApiKey) -> str:
        if key.requests_per_minute is not None:
            return number_format(key.requests_per_minute, force_grouping=True)
        if key.tenant.requests_per_minute is None:
            return _("default")
        return _("%(limit)s (tenant)") % {"limit": number_format(key.tenant.requests_per_minute, force_grouping=True)}

    @column(gettext_lazy("Models"))
    def show_models(self, key: ApiKey) -> str:
        return ", ".join(key.allowed_models) or _("all allowed")


class TenantLimitForm(forms.Form):
    """The limits of a tenant."""

    requests_per_minute = limit_field(
        gettext_lazy("Requests per minute"),
        gettext_lazy("What its keys get unless a key says otherwise. Empty: the installation's default."),
    )


class TenantForm(TenantLimitForm):
    """What is asked for a new tenant."""

    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=limits().gateway.name_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("A team or a customer"),
    )
    field_order = ("name",)


class TenantWeightForm(forms.Form):
    """The weight of a tenant in the queue."""

    weight = forms.IntegerField(
        label=gettext_lazy("Weight in percent"),
        min_value=1,
        max_value=limits().gateway.tenant_weight,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy(
            "Its part of the slots while requests wait. 100: as much as other tenants; 250: two and a half times that."
        ),
    )


class ResponsePolicyForm(forms.Form):
    """Whether answers are kept, and how long."""

    stores_responses = forms.BooleanField(
        label=gettext_lazy("Keep answers of /v1/responses"),
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy("With the prompts they answer, in this installation's database"),
    )
    responses_kept_days = forms.IntegerField(
        label=gettext_lazy("Days"),
        min_value=1,
        max_value=limits().gateway.kept_days,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy("Then they are deleted"),
    )


def _disable(tenant: Tenant, actor: str, values: Values) -> str:
    disable_tenant(name=tenant.name, actor=actor)
    return _("Disabled %(name)s. Its keys are refused from now on.") % {"name": tenant.name}


def _enable(tenant: Tenant, actor: str, values: Values) -> str:
    enable_tenant(name=tenant.name, actor=actor)
    return _("Enabled %(name)s.") % {"name": tenant.name}


def _limit_tenant(tenant: Tenant, actor: str, values: Values) -> str:
    change_tenant_limit(name=tenant.name, requests_per_minute=values["requests_per_minute"], actor=actor)
    return _("Changed the limits of %(name)s.") % {"name": tenant.name}


def _weigh_tenant(tenant: Tenant, actor: str, values: Values) -> str:
    change_tenant_weight(name=tenant.name, weight=values["weight"], actor=actor)
    return _("Changed the weight of %(name)s.") % {"name": tenant.name}


def _set_response_policy(tenant: Tenant, actor: str, values: Values) -> str:
    changed = change_response_policy(
        name=tenant.name,
        stores_responses=values["stores_responses"],
        responses_kept_days=values["responses_kept_days"],
        actor=actor,
    )
    if not changed.stores_responses:
        return _("Muster keeps no answers for %(name)s.") % {"name": tenant.name}
    days = changed.responses_kept_days
    said = ngettext(
        "Muster keeps answers for %(name)s for %(days)s day.", "Muster keeps answers for %(name)s for %(days)s days.", days
    )
    return said % {"name": tenant.name, "days": days}


def _forget_responses(tenant: Tenant, actor: str, values: Values) -> str:
    deleted = forget_responses(tenant=tenant.name, actor=actor)
    said = ngettext("Deleted %(count)s answer of %(name)s.", "Deleted %(count)s answers of %(name)s.", deleted)
    return said % {"count": deleted, "name": tenant.name}


def _has_kept(tenant: Tenant) -> bool:
    return bool(getattr(tenant, "has_kept", False))


def _offer_tenant_raise(tenant: Tenant, values: Values) -> Offer:
    wanted = values["requests_per_minute"] or default_limit()
    return Offer(operation="limit-raise", target=f"tenant:{tenant.name}", params={"requests_per_minute": wanted})


@admin.register(Tenant)
class TenantAdmin(CreatingAdmin):
    """Who the work is for."""

    list_display = ("name", "show_state", "show_use", "show_rate", "show_keys", "show_budgets", "show_kept", "show_changes")
    search_fields = ("name",)
    fields = (
        "name", "is_active", "requests_per_minute", "show_budgets", "show_weight", "stores_responses", "responses_kept_days",
        "created_at", "updated_at",
    )  # fmt: skip
    readonly_fields = fields
    empty_words = gettext_lazy("A tenant is a team or a customer. API keys belong to one, and share its limits.")
    create_form = TenantForm
    create_title = gettext_lazy("New tenant")
    create_explanation = gettext_lazy("Keys belong to a tenant, and its name stands in every request record.")
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="limits",
            label=gettext_lazy("Change limits"),
            explanation=gettext_lazy(
                "Takes effect within seconds, for requests that arrive from then on. "
                "Giving the tenant more than it has needs approval once there is a policy."
            ),
            run=_limit_tenant,
            form=TenantLimitForm,
            find_offer=_offer_tenant_raise,
            read_initial=lambda tenant: {"requests_per_minute": tenant.requests_per_minute},
        ),
        CHANGE_BUDGETS,
        RowChange(
            name="weight",
            label=gettext_lazy("Change weight"),
            explanation=gettext_lazy(
                "Takes effect within seconds, for requests that arrive from then on. It counts only while requests "
                "wait. A higher weight takes from other tenants and needs approval once there is a policy."
            ),
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
            label=gettext_lazy("Keep answers"),
            explanation=gettext_lazy(
                "Takes effect within seconds, for answers of /v1/responses that are made from then on. Clients of this "
                "tenant can then ask for them again and go on from them; operators who may view kept responses can read them. "
                "What is kept already stays until the day it was given: another change deletes it."
            ),
            run=_set_response_policy,
            form=ResponsePolicyForm,
            read_initial=lambda tenant: {
                "stores_responses": tenant.stores_responses,
                "responses_kept_days": tenant.responses_kept_days,
            },
        ),
        RowChange(
            name="forget",
            label=gettext_lazy("Delete kept answers"),
            explanation=gettext_lazy(
                "Every kept answer of this tenant is deleted, with its prompts, for good. Conversations that go on "
                "from one are refused from then on. Whether new answers are kept does not change."
            ),
            run=_forget_responses,
            is_offered=_has_kept,
            is_danger=True,
        ),
        RowChange(
            name="disable",
            label=gettext_lazy("Disable"),
            explanation=gettext_lazy(
                "Its keys are refused within seconds. Requests under way end normally. It can be enabled again."
            ),
            run=_disable,
            is_offered=lambda tenant: tenant.is_active,
            is_danger=True,
        ),
        RowChange(
            name="enable",
            label=gettext_lazy("Enable"),
            explanation=gettext_lazy("The keys of this tenant work again within seconds, except revoked and expired ones."),
            run=_enable,
            is_offered=lambda tenant: not tenant.is_active,
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Tenant]:
        usable = Count("keys", filter=Q(keys__revoked_at__isnull=True))
        kept = Exists(StoredResponse.objects.filter(tenant=OuterRef("pk")))
        queryset: QuerySet[Tenant] = super().get_queryset(request).annotate(usable_keys=usable, has_kept=kept)
        return queryset

    def get_changelist(self, request: HttpRequest, **kwargs: object) -> type[RowList]:
        return TenantList

    def create(self, actor: str, values: Values) -> Created:
        return Created(row=create_tenant(name=values["name"], requests_per_minute=values["requests_per_minute"], actor=actor))

    @column(gettext_lazy("State"), ordering="is_active", label={"active": "success", "disabled": "danger"})
    def show_state(self, tenant: Tenant) -> tuple[str, str]:
        return ("active", _("active")) if tenant.is_active else ("disabled", _("disabled"))

    @column(gettext_lazy("Last 7 days"))
    def show_use(self, tenant: Tenant) -> SafeString:
        return _draw_use(getattr(tenant, "use", ()))

    @column(gettext_lazy("Requests/min"), ordering="requests_per_minute")
    def show_rate(self, tenant: Tenant) -> str:
        limit = tenant.requests_per_minute
        return _("default") if limit is None else number_format(limit, force_grouping=True)

    @column(gettext_lazy("Limits and budgets"))
    def show_budgets(self, tenant: Tenant) -> str:
        return _print_budgets(tenant)

    @column(gettext_lazy("Weight in the queue"))
    def show_weight(self, tenant: Tenant) -> str:
        return f"{tenant.weight} %"

    @column(gettext_lazy("Keys in use"), ordering="usable_keys")
    def show_keys(self, tenant: Tenant) -> int:
        return int(getattr(tenant, "usable_keys", 0))

    @column(gettext_lazy("Keeps answers"), ordering="stores_responses")
    def show_kept(self, tenant: Tenant) -> str:
        if not tenant.stores_responses:
            return _("no")
        return ngettext("%(days)s day", "%(days)s days", tenant.responses_kept_days) % {"days": tenant.responses_kept_days}
