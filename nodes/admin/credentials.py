"""Pages of the node credentials: what boxes connect with."""

from __future__ import annotations

import shlex
from typing import ClassVar
from urllib.parse import urlsplit

from django import forms
from django.conf import settings
from django.contrib import admin
from django.urls import reverse
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from core.admin_pages import Created, CreatingAdmin, NextStep, RowChange, Values, column
from nodes.models import Node, NodeCredential, Provider, ProviderState
from nodes.services.credentials import create_credential, revoke_credential


class CredentialForm(forms.Form):
    """What is asked for a new node credential."""

    name = forms.CharField(max_length=80, widget=UnfoldAdminTextInputWidget, help_text="Which node or nodes will use it")
    provider = forms.ModelChoiceField(
        queryset=Provider.objects.exclude(state=ProviderState.DELETED),
        widget=UnfoldAdminSelectWidget,
        help_text="Nodes of a provider are switched on and off together",
    )
    max_nodes = forms.IntegerField(
        min_value=1, initial=1, widget=UnfoldAdminIntegerFieldWidget, help_text="How many nodes may enrol with it"
    )
    node = forms.ModelChoiceField(
        queryset=Node.objects.all(),
        required=False,
        widget=UnfoldAdminSelectWidget,
        help_text="Bind it to one known node, to replace that node's credential. Empty = nodes enrol with it",
    )


def _describe_use(credential: NodeCredential, text: str) -> tuple[NextStep, ...]:
    """Return how a node is started with a new credential, in lines that can be pasted, and what comes after that."""
    gateway = str(settings.GATEWAY_PUBLIC_URL).rstrip("/")
    host = urlsplit(gateway).hostname or ""
    elsewhere = ""
    if host == "localhost" or host.startswith("127."):
        elsewhere = (
            f" {gateway} is for this machine; on another write this machine's address, on which the gateway must listen."
        )
    provider = credential.provider.name
    named = "" if provider == "local" else f" --provider {shlex.quote(provider)}"
    start = f"./muster node --gateway {gateway} --token {text}{named} --data ./muster-node"
    return (
        NextStep(f"On the node, in a folder with Muster, start its program.{elsewhere}", start),
        NextStep("Wait until the node is in the list, a few seconds", url=reverse("admin:nodes_node_changelist")),
        NextStep(
            "Allow its models: clients may use only those that are allowed", url=reverse("admin:gateway_model_changelist")
        ),
        NextStep(
            "If loads are to be approved by several people: let the node trust the policy, with the words of the page Policy.",
            "./muster trust WORDS --data ./muster-node",
        ),
    )


def _revoke(credential: NodeCredential, actor: str, values: Values) -> str:
    revoke_credential(credential_id=credential.pk, actor=actor)
    return f"Revoked the node credential {credential.name}."


@admin.register(NodeCredential)
class NodeCredentialAdmin(CreatingAdmin):
    """What boxes connect with. Shown once, revoked, never deleted."""

    list_display = (
        "name",
        "show_prefix",
        "provider",
        "node",
        "max_nodes",
        "show_state",
        "last_used_at",
        "show_changes",
    )
    list_filter = ("provider",)
    list_select_related = ("provider", "node")
    search_fields = ("name", "keyid")
    fields = ("name", "show_prefix", "provider", "node", "max_nodes", "created_at", "last_used_at", "revoked_at")
    readonly_fields = fields
    empty_words = "A node shows its credential when it connects. Create one, then start the node with it."
    create_form = CredentialForm
    create_title = "New node credential"
    create_explanation = "A node shows it when it connects. It is shown here once."
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="revoke",
            label="Revoke",
            explanation="Nodes that use it are cut off and cannot come back with it, for good.",
            run=_revoke,
            is_offered=lambda credential: credential.revoked_at is None,
            is_danger=True,
        ),
    )

    def create(self, actor: str, values: Values) -> Created:
        """Create a credential."""
        credential, text = create_credential(
            name=values["name"],
            provider_name=values["provider"].name,
            max_nodes=values["max_nodes"],
            node_id=values["node"].pk if values["node"] else None,
            actor=actor,
        )
        return Created(row=credential, secret=text, steps=_describe_use(credential, text))

    @column("Credential")
    def show_prefix(self, credential: NodeCredential) -> str:
        """Return the public head of the credential."""
        return f"msw_{credential.keyid}…"

    @column("State", ordering="revoked_at", label={"active": "success", "revoked": "danger"})
    def show_state(self, credential: NodeCredential) -> str:
        """Return whether it may be used."""
        return "active" if credential.revoked_at is None else "revoked"
