"""Admin pages of governance: admin tokens, webhooks, alerts and the audit trail."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

from django import forms
from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.utils import formats
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import format_lazy
from django.utils.translation import gettext
from django.utils.translation import gettext_lazy as _
from unfold.widgets import (
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from core.admin_pages import Created, CreatingAdmin, Offer, RowChange, ShowingAdmin, Values, column
from core.limits import limits
from core.roles import MEANINGS, Role
from governance.admin_tokens import create_admin_token, read_grant, revoke_admin_token
from governance.alerts import (
    count_states,
    filter_alerts,
    find_last_look,
    lift_lasting_silence,
    lift_silence,
    silence_alert,
)
from governance.audit import check_entry
from governance.audit_words import describe_actor, describe_detail, describe_event
from governance.checkpoints import read_status
from governance.models import AdminToken, Alert, AlertSilence, AuditEvent, WebhookEndpoint
from governance.notices import (
    DeliveryFailed,
    InvalidWebhook,
    Wishes,
    add_webhook,
    change_webhook,
    remove_webhook,
    try_webhook,
)
from governance.registry import SEVERITY_LABELS, AlertFacts, load_words
from governance.states import Severity
from wire import clock


class AdminTokenForm(forms.Form):
    name = forms.CharField(
        label=_("Name"),
        max_length=limits().governance.token_name_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=_("Who or what will use it"),
    )
    role = forms.ChoiceField(
        label=_("Role"),
        choices=[
            (role.value, format_lazy("{name}: {meaning}", name=name, meaning=meaning))
            for role, (name, meaning) in MEANINGS.items()
        ],
        initial=Role.VIEWER.value,
        widget=UnfoldAdminSelectWidget,
    )
    tenant = forms.CharField(
        label=_("Tenant"),
        max_length=80,
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text=_("For a tenant admin or tenant viewer: the tenant in which that counts."),
    )
    days = forms.IntegerField(
        label=_("Days"),
        required=False,
        min_value=1,
        max_value=limits().governance.token_days,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=_("The token works so long. Empty: it never expires."),
    )


def _read_params(values: Values) -> dict[str, object]:
    """Return what the form says as parameters of ``admin-token-mint``."""
    named = {name: values[name] for name in ("role", "tenant", "days") if values.get(name)}
    return {"name": values["name"], **named}


def _revoke(token: AdminToken, actor: str, values: Values) -> str:
    revoke_admin_token(token_id=token.pk, actor=actor)
    return gettext("Revoked the admin token %(name)s.") % {"name": token.name}


@admin.register(AdminToken)
class AdminTokenAdmin(CreatingAdmin):
    """Bearer tokens of the admin APIs. Shown once, revoked, never deleted."""

    list_display = (
        "name", "show_prefix", "show_role", "owner", "show_state", "created_at", "expires_at", "last_used_at", "show_changes",
    )  # fmt: skip
    list_select_related = ("owner",)
    search_fields = ("name", "keyid", "tenant")
    fields = ("name", "show_prefix", "show_role", "owner", "created_at", "expires_at", "last_used_at", "revoked_at")
    readonly_fields = fields
    empty_words = _("Programs send an admin token to use the admin APIs of control plane and gateway.")
    create_form = AdminTokenForm
    create_title = _("New admin token")
    create_explanation = _(
        "It opens the admin APIs of control plane and gateway. It is shown once. Once there is a policy, this needs approval."
    )
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="revoke",
            label=_("Revoke"),
            explanation=_("The token stops working at once, for good. Whatever uses it will be refused."),
            run=_revoke,
            is_offered=lambda token: token.revoked_at is None,
            is_danger=True,
        ),
    )

    def create(self, actor: str, values: Values) -> Created:
        token, text = create_admin_token(name=values["name"], actor=actor, grant=read_grant(_read_params(values)))
        return Created(row=token, secret=text, usage=gettext("Programs send it as: Authorization: Bearer <token>"))

    def find_offer(self, values: Values) -> Offer:
        return Offer(operation="admin-token-mint", target="control-plane", params=_read_params(values))

    @column(_("Token"))
    def show_prefix(self, token: AdminToken) -> str:
        return gettext("from the environment") if token.variable else f"msa_{token.keyid}…"

    @column(_("Role"), ordering="role")
    def show_role(self, token: AdminToken) -> str:
        if not token.role:
            return gettext("everything")
        name = MEANINGS[Role(token.role)][0]
        return gettext("%(role)s of %(tenant)s") % {"role": name, "tenant": token.tenant} if token.tenant else str(name)

    @column(_("State"), ordering="revoked_at", label={"active": "success", "expired": "warning", "revoked": "danger"})
    def show_state(self, token: AdminToken) -> tuple[str, str]:
        if token.revoked_at is None and token.expires_at is not None and token.expires_at <= clock.now():
            return "expired", gettext("expired")
        return ("active", gettext("active")) if token.revoked_at is None else ("revoked", gettext("revoked"))


_FORMAT_HINT = _(
    "Slack: your app, Incoming Webhooks. Discord: the channel's settings, Integrations, Webhooks. "
    "Teams: the channel's Workflows, “Send webhook alerts to a channel”. ntfy: https://ntfy.sh/ and a topic of yours. "
    "Anything else gets signed JSON."
)


class WishesForm(forms.Form):
    format = forms.ChoiceField(
        label=_("Format"), choices=WebhookEndpoint.Format.choices, widget=UnfoldAdminSelectWidget, help_text=_FORMAT_HINT
    )
    takes_alerts = forms.BooleanField(
        label=_("Alerts"),
        required=False,
        initial=True,
        widget=UnfoldBooleanSwitchWidget,
        help_text=_("One message when a problem begins, and one when it ends."),
    )
    least_severity = forms.TypedChoiceField(
        label=_("Alerts of at least"),
        coerce=int,
        initial=Severity.NOTICE.value,
        choices=[(severity.value, label) for severity, label in SEVERITY_LABELS.items()],
        widget=UnfoldAdminSelectWidget,
        help_text=_("Down: requests or operations fail. Impaired: something works less well. Notice: somebody has to act."),
    )
    takes_operations = forms.BooleanField(
        label=_("Approvals"),
        required=False,
        initial=True,
        widget=UnfoldBooleanSwitchWidget,
        help_text=_("What was proposed, approved and carried out."),
    )
    takes_events = forms.BooleanField(
        label=_("Events"),
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text=_(
            "Nodes that were drained or ejected, models that did not come back, budgets. Most of these are alerts too."
        ),
    )
    takes_usage = forms.BooleanField(
        label=_("Usage"),
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text=_("It gets what each finished request used, in batches of signed JSON, and nothing else."),
    )


class WebhookForm(WishesForm):
    name = forms.CharField(
        label=_("Name"), max_length=limits().governance.webhook_name_chars, widget=UnfoldAdminTextInputWidget
    )
    url = forms.CharField(
        label=_("Address"),
        max_length=limits().governance.webhook_url_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=_("https://…, or http://… on this machine or a private network. It is not shown again."),
    )
    field_order = ("name", "format", "url")


def _read_wishes(values: Values) -> Wishes:
    return Wishes(**{field.name: values[field.name] for field in dataclasses.fields(Wishes)})


def _remove_webhook(webhook: WebhookEndpoint, actor: str, values: Values) -> str:
    remove_webhook(name=webhook.name, actor=actor)
    return gettext("Removed the webhook %(name)s.") % {"name": webhook.name}


def _change_webhook(webhook: WebhookEndpoint, actor: str, values: Values) -> str:
    change_webhook(name=webhook.name, wishes=_read_wishes(values), actor=actor)
    return gettext("Changed the webhook %(name)s.") % {"name": webhook.name}


def _try_webhook(webhook: WebhookEndpoint, actor: str, values: Values) -> str:
    host = urlsplit(webhook.url).hostname
    try:
        answer = try_webhook(name=webhook.name, actor=actor)
    except DeliveryFailed as failure:
        why = gettext("The test did not get through. %(host)s: %(why)s.") % {"host": host, "why": failure}
        raise InvalidWebhook(why) from None
    said = {"host": host, "status": answer.status, "text": answer.text or gettext("nothing more")}
    if not answer.is_success:
        raise InvalidWebhook(gettext("%(host)s refused the test with HTTP %(status)d: %(text)s") % said)
    return gettext("%(host)s took the test with HTTP %(status)d: %(text)s") % said


@admin.register(WebhookEndpoint)
class WebhookAdmin(CreatingAdmin):
    """Where notices and alerts are posted to."""

    list_display = ("name", "format", "show_host", "show_wishes", "show_state", "created_at", "show_changes")
    search_fields = ("name",)
    fields = ("name", "format", "show_host", "show_wishes", "is_active", "show_last", "created_at")
    readonly_fields = fields
    empty_words = _("Webhooks tell Slack, Discord, Teams, ntfy or a program of yours about alerts and approvals.")
    create_form = WebhookForm
    create_title = _("New webhook")
    create_explanation = _("What you choose is posted there. Send a test from its page afterwards.")
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="test",
            label=_("Send a test"),
            explanation=_("A test message is posted there now; the answer is shown here."),
            run=_try_webhook,
            is_offered=lambda webhook: bool(webhook.is_active),
        ),
        RowChange(
            name="edit",
            label=_("Change"),
            explanation=_("Format, and what is sent there. For another address remove it and add a new one."),
            run=_change_webhook,
            form=WishesForm,
            read_initial=lambda webhook: {field.name: getattr(webhook, field.name) for field in dataclasses.fields(Wishes)},
            is_offered=lambda webhook: bool(webhook.is_active),
        ),
        RowChange(
            name="remove",
            label=_("Remove"),
            explanation=_("Nothing is posted there any more, what waits included. The name can be used again."),
            run=_remove_webhook,
            is_offered=lambda webhook: bool(webhook.is_active),
            is_danger=True,
        ),
    )

    def create(self, actor: str, values: Values) -> Created:
        wishes = _read_wishes(values)
        webhook, secret = add_webhook(name=values["name"], url=values["url"], wishes=wishes, actor=actor)
        if wishes.format != WebhookEndpoint.Format.GENERIC:
            return Created(row=webhook)  # chat services check no signature
        return Created(row=webhook, secret=secret, usage=_("Check with it the header X-Muster-Signature of what arrives."))

    @column(_("Host"))
    def show_host(self, webhook: WebhookEndpoint) -> str:
        # The rest of the address may hold a password and is shown to nobody.
        return urlsplit(webhook.url).hostname or ""

    @column(_("Gets"))
    def show_wishes(self, webhook: WebhookEndpoint) -> str:
        if webhook.takes_usage:
            return gettext("Usage")
        least = SEVERITY_LABELS[Severity(webhook.least_severity)]
        kinds = [
            *([gettext("alerts (%(least)s)") % {"least": least}] if webhook.takes_alerts else []),
            *([gettext("approvals")] if webhook.takes_operations else []),
            *([gettext("events")] if webhook.takes_events else []),
        ]
        return ", ".join(kinds)

    @column(_("State"), ordering="is_active", label={"active": "success", "removed": "danger"})
    def show_state(self, webhook: WebhookEndpoint) -> tuple[str, str]:
        return ("active", gettext("active")) if webhook.is_active else ("removed", gettext("removed"))

    @column(_("Last message"))
    def show_last(self, webhook: WebhookEndpoint) -> str:
        """Return how the last message fared, so that a dead address is seen."""
        last = webhook.notices.order_by("-created_at").first()
        if last is None:
            return gettext("none yet")
        if last.sent_at is not None:
            return gettext("sent %(at)s UTC") % {"at": _print(last.sent_at)}
        return gettext("not sent: %(why)s") % {"why": last.last_error or gettext("it is under way")}


@admin.register(AuditEvent)
class AuditEventAdmin(ShowingAdmin):
    """What was done, by whom, when, and whether the log still proves it. The database itself refuses changes."""

    list_display = ("show_seq", "at", "show_actor", "show_what", "show_detail")
    list_filter = ("action", "at")
    search_fields = ("actor", "action", "target", "op_id")
    fields = (
        "show_what", "at", "show_actor", "show_detail", "show_verification", "show_seq", "show_hash", "actor", "action",
        "target", "op_id", "detail",
    )  # fmt: skip
    readonly_fields = fields
    list_select_related = ("entry",)
    list_per_page = 50
    # A count would read the whole log for each page.
    show_full_result_count = False
    list_before_template = "admin/muster/audit_status.html"

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:  # Any: Django's
        context = {**(extra_context or {}), "audit_log": read_status()}
        return super().changelist_view(request, context)

    @column(_("Entry"), ordering="entry__seq")
    def show_seq(self, event: AuditEvent) -> str:
        entry = getattr(event, "entry", None)
        return str(entry.seq) if entry else gettext("not in the chain")

    @column(_("Who"), ordering="actor")
    def show_actor(self, event: AuditEvent) -> str:
        return describe_actor(event.actor)

    @column(_("What"), ordering="action")
    def show_what(self, event: AuditEvent) -> SafeString:
        return describe_event(event)

    @column(_("Details"))
    def show_detail(self, event: AuditEvent) -> SafeString:
        return format_html('<span class="mst-one-line" title="{0}">{0}</span>', describe_detail(event.detail) or "–")

    @column(_("Hash"))
    def show_hash(self, event: AuditEvent) -> str:
        entry = getattr(event, "entry", None)
        return f"{bytes(entry.hash).hex()[:12]}…" if entry else ""

    @column(_("Verification"))
    def show_verification(self, event: AuditEvent) -> str:
        """Return whether what this page shows is what was recorded."""
        entry = getattr(event, "entry", None)
        if entry is None:
            return gettext("not in the chain: somebody wrote it past the log")
        return gettext("agrees with its hash") if check_entry(entry.seq) else gettext("EDITED: this is not what was recorded")


_STATES = {"open": _("Open"), "silenced": _("Silenced"), "ended": _("Ended"), "all": _("All")}


class AlertStateFilter(admin.SimpleListFilter):
    """What is there now, unless another state is asked for."""

    title = _("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:  # Any: Django's signature
        return list(_STATES.items())

    def choices(self, changelist: Any) -> Iterator[Any]:  # Any: Django's signature
        """Return the states, the first of them selected when none is asked for."""
        for state, label in self.lookup_choices:
            query = changelist.get_query_string({self.parameter_name: state})
            yield {"selected": (self.value() or "open") == state, "query_string": query, "display": label}

    def queryset(self, request: HttpRequest, queryset: QuerySet[Alert]) -> QuerySet[Alert]:
        return filter_alerts(queryset, state=self.value() or "open")


class AlertKindFilter(admin.SimpleListFilter):
    title = _("kind")
    parameter_name = "kind"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # Any: Django's signature
        words = load_words()
        return sorted(((kind, words.name_kind(kind)) for kind in words.list_kinds()), key=lambda pair: pair[1])

    def queryset(self, request: HttpRequest, queryset: QuerySet[Alert]) -> QuerySet[Alert]:
        return queryset.filter(kind=self.value()) if self.value() else queryset


_SILENCES = (
    ("1", _("1 hour")), ("4", _("4 hours")), ("24", _("1 day")), ("168", _("7 days")), ("720", _("30 days")),
)  # fmt: skip


class SilenceForm(forms.Form):
    hours = forms.TypedChoiceField(label=_("For"), choices=_SILENCES, coerce=int, initial="4", widget=UnfoldAdminSelectWidget)
    reason = forms.CharField(
        label=_("Reason"),
        max_length=limits().governance.alert_reason_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=format_lazy(
            _("Others read it here and in the audit log. At most {most} characters."),
            most=limits().governance.alert_reason_chars,
        ),
    )
    is_lasting = forms.BooleanField(
        label=_("When it begins anew too"),
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text=_("Also what begins later, of this kind and for the same object, until the silence is over."),
    )


def _silence(alert: Alert, actor: str, values: Values) -> str:
    until = clock.now() + timedelta(hours=values["hours"])
    silence_alert(
        alert_id=alert.pk, until=until, reason=values["reason"], actor=actor, is_lasting=values["is_lasting"] or _is_over(alert)
    )
    return gettext("Silenced until %(until)s UTC.") % {"until": _print(until)}


def _lift(alert: Alert, actor: str, values: Values) -> str:
    lift_silence(alert_id=alert.pk, actor=actor)
    return gettext("The silence is lifted.")


def _print(moment: datetime | None) -> str:
    return formats.date_format(moment, "DATETIME_FORMAT") if moment is not None else ""


def _is_over(alert: Alert) -> bool:
    return alert.ended_at is not None


def _is_silenced(alert: Alert) -> bool:
    return alert.ended_at is None and alert.silenced_until is not None and alert.silenced_until > clock.now()


@admin.register(Alert)
class AlertAdmin(ShowingAdmin):
    """Problems of the installation: those that are there now, and those that were."""

    list_display = ("show_problem", "show_severity", "show_object", "since", "show_end", "show_fix", "show_changes")
    list_display_links = ("show_problem",)
    list_filter = (AlertStateFilter, AlertKindFilter, "severity")
    search_fields = ("object_name", "kind")
    fields = (
        "show_problem", "show_urgency", "show_kind", "show_object", "show_fix", "show_since", "show_seen", "show_ended",
        "show_silence", "show_told", "show_end_told",
    )  # fmt: skip
    readonly_fields = fields
    list_per_page = 50
    is_live = True
    empty_words = _("All clear: nothing of this kind needs attention.")
    list_before_template = "admin/muster/alerts_before.html"

    class Media:
        css: ClassVar = {"all": ["muster/alerts.css"]}

    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="silence",
            label=_("Silence"),
            explanation=_("It is hidden from Overview and the bell, and nobody is told of it, until then. This is audited."),
            run=_silence,
            form=SilenceForm,
            is_offered=lambda alert: not _is_silenced(alert),
        ),
        RowChange(
            name="unsilence",
            label=_("Lift the silence"),
            explanation=_("It counts again, and people are told of it."),
            run=_lift,
            is_offered=_is_silenced,
        ),
    )

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Alert | None:
        """Return the row, which pages then call by what it says."""
        row: Alert | None = super().get_object(request, object_id, from_field)
        if row is not None:
            row.sentence, _advice = load_words().describe(AlertFacts.of(row))
        return row

    def get_ordering(self, request: HttpRequest) -> Sequence[str]:
        """Return the order: the most urgent first, and of what is over the latest."""
        return {"ended": ("-ended_at", "-pk"), "all": ("-since", "-pk")}.get(
            request.GET.get("state", ""), ("severity", "since", "pk")
        )

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:  # Any: Django's
        chosen = request.GET.get("state", "open")
        counts = count_states()
        chips = [
            {"label": label, "url": f"?state={state}", "count": counts.get(state), "is_chosen": state == chosen}
            for state, label in _STATES.items()
        ]
        told = {"not_looked_since": find_last_look(), "chips": chips}
        return super().changelist_view(request, {**(extra_context or {}), **told})

    @column(_("Severity"), ordering="severity", label={"down": "danger", "impaired": "warning", "notice": "info"})
    def show_severity(self, alert: Alert) -> tuple[str, str]:
        severity = Severity(alert.severity)
        return severity.word, str(SEVERITY_LABELS[severity])

    @column(_("Severity"))
    def show_urgency(self, alert: Alert) -> str:
        return str(SEVERITY_LABELS[Severity(alert.severity)])

    @column(_("Since"))
    def show_since(self, alert: Alert) -> str:
        return _print(alert.since)

    @column(_("Last seen"))
    def show_seen(self, alert: Alert) -> str:
        return _print(alert.seen_at)

    @column(_("Ended"))
    def show_ended(self, alert: Alert) -> str:
        return _print(alert.ended_at)

    @column(_("Start told"))
    def show_told(self, alert: Alert) -> str:
        return _print(alert.told_at)

    @column(_("End told"))
    def show_end_told(self, alert: Alert) -> str:
        return _print(alert.end_told_at)

    @column(_("Problem"))
    def show_problem(self, alert: Alert) -> SafeString:
        what, advice = load_words().describe(AlertFacts.of(alert))
        return format_html('<strong class="mst-alert">{}</strong><span class="mst-advice">{}</span>', what, advice)

    @column(_("Kind"))
    def show_kind(self, alert: Alert) -> str:
        return load_words().name_kind(alert.kind)

    @column(_("Object"), ordering="object_name")
    def show_object(self, alert: Alert) -> SafeString | str:
        url = load_words().find_links(AlertFacts.of(alert)).object_url
        return format_html('<a class="mst-link" href="{}">{}</a>', url, alert.object_name) if url else alert.object_name

    @column(_("Until"), ordering="ended_at")
    def show_end(self, alert: Alert) -> str:
        if alert.ended_at is not None:
            return _print(alert.ended_at)
        if _is_silenced(alert):
            return gettext("silenced until %(until)s") % {"until": _print(alert.silenced_until)}
        return gettext("now") if alert.missed_at is None else gettext("just gone")

    @column(_("Silence"))
    def show_silence(self, alert: Alert) -> str:
        if alert.silenced_until is None:
            return ""
        said = {
            "until": _print(alert.silenced_until),
            "by": alert.silenced_by.partition(":")[2],
            "reason": alert.silence_reason,
        }
        return gettext("Until %(until)s UTC, by %(by)s: %(reason)s") % said

    @column(_("Fix"))
    def show_fix(self, alert: Alert) -> SafeString | str:
        links = load_words().find_links(AlertFacts.of(alert))
        is_needed = links.fix_url and alert.ended_at is None
        return format_html('<a class="mst-link" href="{}">{}</a>', links.fix_url, links.fix) if is_needed else ""


def _lift_lasting(silence: AlertSilence, actor: str, values: Values) -> str:
    lift_lasting_silence(silence_id=silence.pk, actor=actor)
    return gettext("The silence is lifted.")


@admin.register(AlertSilence)
class AlertSilenceAdmin(ShowingAdmin):
    """Kinds and objects of which nobody wants to hear for a while."""

    list_display = ("show_kind", "object_name", "until", "by", "reason", "show_changes")
    fields = ("show_kind", "object_name", "until", "by", "reason")
    readonly_fields = fields
    search_fields = ("object_name", "kind", "reason")
    empty_words = _(
        "A silence hides alerts of one kind and object for a while, those that begin later too. Make one on an alert."
    )
    removed_because = _("It may have ended.")
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="lift",
            label=_("Lift the silence"),
            explanation=_("What it hides counts again, and people are told of it."),
            run=_lift_lasting,
            removes_row=True,
        ),
    )

    @column(_("Kind"), ordering="kind")
    def show_kind(self, silence: AlertSilence) -> str:
        return load_words().name_kind(silence.kind)
