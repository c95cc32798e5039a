"""Admin pages of governance: admin tokens and the audit trail."""

from __future__ import annotations

from typing import ClassVar

from django import forms
from django.contrib import admin
from unfold.widgets import UnfoldAdminTextInputWidget

from governance.models import AdminToken, AuditEvent
from governance.pages import Created, CreatingAdmin, RowChange, ShowingAdmin, Values, column
from governance.services import MAX_NAME_CHARS, create_admin_token, revoke_admin_token


class AdminTokenForm(forms.Form):
    """What is asked for a new admin token."""

    name = forms.CharField(max_length=MAX_NAME_CHARS, widget=UnfoldAdminTextInputWidget, help_text="Who or what will use it")


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
    create_form = AdminTokenForm
    create_title = "New admin token"
    create_explanation = "It opens the admin APIs of control plane and gateway. It is shown once."
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
        """Create a token."""
        token, text = create_admin_token(name=values["name"], actor=actor)
        return Created(row=token, secret=text, usage="Send it as: Authorization: Bearer <token>")

    @column("Token")
    def show_prefix(self, token: AdminToken) -> str:
        """Return the public head of the token."""
        return f"msa_{token.keyid}…"

    @column("State", ordering="revoked_at", label={"active": "success", "revoked": "danger"})
    def show_state(self, token: AdminToken) -> str:
        """Return whether it may be used."""
        return "active" if token.revoked_at is None else "revoked"


@admin.register(AuditEvent)
class AuditEventAdmin(ShowingAdmin):
    """What was done, by whom, when. The database itself refuses changes."""

    list_display = ("at", "actor", "action", "target", "show_detail")
    list_filter = ("action", "at")
    search_fields = ("actor", "action", "target")
    fields = ("at", "actor", "action", "target", "detail")
    readonly_fields = fields
    list_per_page = 50
    show_full_result_count = False

    @column("Detail")
    def show_detail(self, event: AuditEvent) -> str:
        """Return the detail on one line."""
        return ", ".join(f"{key}={value}" for key, value in event.detail.items())[:120]
