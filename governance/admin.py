"""Admin pages of governance: admin tokens and the audit trail."""

from __future__ import annotations

from typing import Any, ClassVar
from urllib.parse import urlsplit

from django import forms
from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from unfold.widgets import UnfoldAdminTextInputWidget, UnfoldBooleanSwitchWidget

from core.admin_pages import Created, CreatingAdmin, Offer, RowChange, ShowingAdmin, Values, column
from core.limits import limits
from governance.admin_tokens import create_admin_token, revoke_admin_token
from governance.audit import check_entry
from governance.checkpoints import read_status
from governance.models import AdminToken, AuditEvent, WebhookEndpoint
from governance.notices import add_webhook, remove_webhook


class AdminTokenForm(forms.Form):
    name = forms.CharField(
        max_length=limits().governance.token_name_chars, widget=UnfoldAdminTextInputWidget, help_text="Who or what will use it"
    )


def _revoke(token: AdminToken, actor: str, values: Values) -> str:
    revoke_admin_token(token_id=token.pk, actor=actor)
    return f"Revoked the admin token {token.name}."


@admin.register(AdminToken)
class AdminTokenAdmin(CreatingAdmin):
    """Bearer tokens of the admin APIs. Shown once, revoked, never deleted."""

    list_display = ("name", "show_prefix", "show_state", "created_at", "last_used_at", "show_changes")
    search_fields = ("name", "keyid")
    fields = ("name", "show_prefix", "created_at", "last_used_at", "revoked_at")
    readonly_fields = fields
    empty_words = "Programs send an admin token to use the admin APIs of control plane and gateway."
    create_form = AdminTokenForm
    create_title = "New admin token"
    create_explanation = (
        "It opens the admin APIs of control plane and gateway. It is shown once. Once there is a policy, this needs approval."
    )
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="revoke",
            label="Revoke",
            explanation="The token stops working at once, for good. Whatever uses it will be refused.",
            run=_revoke,
            is_offered=lambda token: token.revoked_at is None,
            is_danger=True,
        ),
    )

    def create(self, actor: str, values: Values) -> Created:
        token, text = create_admin_token(name=values["name"], actor=actor)
        return Created(row=token, secret=text, usage="Send it as: Authorization: Bearer <token>")

    def find_offer(self, values: Values) -> Offer:
        return Offer(operation="admin-token-mint", target="control-plane", params={"name": values["name"]})

    @column("Token")
    def show_prefix(self, token: AdminToken) -> str:
        return f"msa_{token.keyid}…"

    @column("State", ordering="revoked_at", label={"active": "success", "revoked": "danger"})
    def show_state(self, token: AdminToken) -> str:
        return "active" if token.revoked_at is None else "revoked"


class WebhookForm(forms.Form):
    name = forms.CharField(max_length=limits().governance.webhook_name_chars, widget=UnfoldAdminTextInputWidget)
    url = forms.CharField(
        label="Address",
        max_length=limits().governance.webhook_url_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text="https://…, or http://… on this machine or a private network. It is not shown again.",
    )
    takes_usage = forms.BooleanField(
        label="Usage",
        required=False,
        widget=UnfoldBooleanSwitchWidget,
        help_text="It gets what each finished request used, in batches, instead of notices.",
    )


def _remove_webhook(webhook: WebhookEndpoint, actor: str, values: Values) -> str:
    remove_webhook(name=webhook.name, actor=actor)
    return f"Removed the webhook {webhook.name}."


@admin.register(WebhookEndpoint)
class WebhookAdmin(CreatingAdmin):
    """Where notices of operations are posted to."""

    list_display = ("name", "show_host", "show_state", "takes_usage", "created_at", "show_changes")
    search_fields = ("name",)
    fields = ("name", "show_host", "show_state", "takes_usage", "created_at")
    readonly_fields = fields
    empty_words = "Webhooks tell Slack, PagerDuty or a program of yours about approvals."
    create_form = WebhookForm
    create_title = "New webhook"
    create_explanation = (
        "Every notice of an operation is posted there as JSON. The next page shows once the secret that signs it."
    )
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="remove",
            label="Remove",
            explanation="Nothing is posted there any more, what waits included. The name can be used again.",
            run=_remove_webhook,
            is_offered=lambda webhook: bool(webhook.is_active),
            is_danger=True,
        ),
    )

    def create(self, actor: str, values: Values) -> Created:
        webhook, secret = add_webhook(name=values["name"], url=values["url"], takes_usage=values["takes_usage"], actor=actor)
        return Created(row=webhook, secret=secret, usage="Check with it the header X-Muster-Signature of what arrives.")

    @column("Host")
    def show_host(self, webhook: WebhookEndpoint) -> str:
        # The rest of the address may hold a password and is shown to nobody.
        return urlsplit(webhook.url).hostname or ""

    @column("State", ordering="is_active", label={"active": "success", "removed": "danger"})
    def show_state(self, webhook: WebhookEndpoint) -> str:
        return "active" if webhook.is_active else "removed"


@admin.register(AuditEvent)
class AuditEventAdmin(ShowingAdmin):
    """What was done, by whom, when, and whether the log still proves it. The database itself refuses changes."""

    list_display = ("show_seq", "at", "actor", "action", "target", "show_detail", "show_hash")
    list_filter = ("action", "at")
    search_fields = ("actor", "action", "target", "op_id")
    fields = ("at", "actor", "action", "target", "op_id", "detail", "show_seq", "show_hash", "show_verification")
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

    @column("Entry", ordering="entry__seq")
    def show_seq(self, event: AuditEvent) -> str:
        entry = getattr(event, "entry", None)
        return str(entry.seq) if entry else "not in the chain"

    @column("Hash")
    def show_hash(self, event: AuditEvent) -> str:
        entry = getattr(event, "entry", None)
        return f"{bytes(entry.hash).hex()[:12]}…" if entry else ""

    @column("Verification")
    def show_verification(self, event: AuditEvent) -> str:
        """Return whether what this page shows is what was recorded."""
        entry = getattr(event, "entry", None)
        if entry is None:
            return "not in the chain: somebody wrote it past the log"
        return "agrees with its hash" if check_entry(entry.seq) else "EDITED: this is not what was recorded"

    @column("Detail")
    def show_detail(self, event: AuditEvent) -> str:
        return ", ".join(f"{key}={value}" for key, value in event.detail.items())[:120]
