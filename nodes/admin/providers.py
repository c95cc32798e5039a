"""Pages of the providers: groups of boxes that are switched on and off together."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from unfold.widgets import UnfoldAdminTextInputWidget

from core.admin_pages import Created, CreatingAdmin, RowChange, Values, column
from nodes.models import Provider, ProviderState
from nodes.services.credentials import create_provider, delete_provider, disable_provider, enable_provider


class ProviderForm(forms.Form):
    """What is asked for a new provider."""

    name = forms.CharField(max_length=60, widget=UnfoldAdminTextInputWidget, help_text="Letters, digits, hyphens, underscores")


def _enable(provider: Provider, actor: str, values: Values) -> str:
    enable_provider(name=provider.name, actor=actor)
    return f"Provider {provider.name} is enabled."


def _disable(provider: Provider, actor: str, values: Values) -> str:
    disable_provider(name=provider.name, actor=actor)
    return f"Provider {provider.name} is disabled: its nodes get no work and cannot connect."


def _delete(provider: Provider, actor: str, values: Values) -> str:
    delete_provider(name=provider.name, actor=actor)
    return f"Provider {provider.name} is deleted and its credentials are revoked."


@admin.register(Provider)
class ProviderAdmin(CreatingAdmin):
    """Groups of boxes that are switched on and off together."""

    list_display = ("name", "show_state", "show_nodes", "show_credentials", "created_at", "show_changes")
    list_filter = ("state",)
    search_fields = ("name",)
    fields = ("name", "show_state", "created_at", "updated_at")
    readonly_fields = fields
    empty_words = "A provider is a group of nodes that are switched on and off together. Every credential belongs to one."
    create_form = ProviderForm
    create_title = "New provider"
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="disable",
            label="Disable",
            explanation="Its nodes get no new work and cannot connect until it is enabled again.",
            run=_disable,
            is_offered=lambda provider: provider.state == ProviderState.ENABLED,
        ),
        RowChange(
            name="enable",
            label="Enable",
            explanation="Its nodes may connect and get work again.",
            run=_enable,
            is_offered=lambda provider: provider.state == ProviderState.DISABLED,
        ),
        RowChange(
            name="delete",
            label="Delete",
            explanation="Its nodes are cut off and all its credentials are revoked, for good. Records stay.",
            run=_delete,
            is_offered=lambda provider: provider.state != ProviderState.DELETED,
            is_danger=True,
        ),
    )

    def create(self, actor: str, values: Values) -> Created:
        """Create a provider."""
        return Created(row=create_provider(name=values["name"], actor=actor))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Provider]:
        """Return providers with how many boxes and usable credentials they have."""
        providers: QuerySet[Provider] = super().get_queryset(request)
        return providers.annotate(
            node_count=Count("nodes", distinct=True),
            credential_count=Count("credentials", distinct=True, filter=Q(credentials__revoked_at__isnull=True)),
        )

    @column("State", ordering="state", label={"enabled": "success", "disabled": "warning", "deleted": "danger"})
    def show_state(self, provider: Provider) -> str:
        """Return the state as a word."""
        return provider.state

    @column("Nodes", ordering="node_count")
    def show_nodes(self, provider: Any) -> int:  # Any: carries an annotation
        """Return how many boxes it has."""
        return int(provider.node_count)

    @column("Credentials", ordering="credential_count")
    def show_credentials(self, provider: Any) -> int:  # Any: carries an annotation
        """Return how many of its credentials may be used."""
        return int(provider.credential_count)
