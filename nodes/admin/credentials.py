"""Operators' pages of node credentials and providers: they show, ask, and call one service on a confirmed POST."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import urlsplit

from django import forms
from django.conf import settings
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import (
    UnfoldAdminIntegerFieldWidget,
    UnfoldAdminSelectWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from core.admin_pages import Created, CreatingAdmin, NextStep, RowChange, Values, column
from core.limits import limits
from core.roles import may
from nodes.models import Node, NodeCredential, Provider, ProviderState
from nodes.services.credentials import (
    change_provider_terms,
    create_credential,
    create_provider,
    delete_provider,
    disable_provider,
    enable_provider,
    revoke_credential,
    trust_models,
)
from wire import COMMAND


class CredentialForm(forms.Form):
    name = forms.CharField(
        max_length=80, widget=UnfoldAdminTextInputWidget, help_text=gettext_lazy("Which node or nodes will use it")
    )
    provider = forms.ModelChoiceField(
        queryset=Provider.objects.exclude(state=ProviderState.DELETED),
        widget=UnfoldAdminSelectWidget,
        help_text=gettext_lazy("Nodes of a provider are switched on and off together"),
    )
    max_nodes = forms.IntegerField(
        min_value=1, initial=1, widget=UnfoldAdminIntegerFieldWidget, help_text=gettext_lazy("How many nodes may enrol with it")
    )
    allows_models = forms.BooleanField(
        required=False,
        label=gettext_lazy("Allow its models"),
        widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy("Clients may use what its nodes declare without another click. For people whom you trust"),
    )
    node = forms.ModelChoiceField(
        queryset=Node.objects.all(),
        required=False,
        widget=UnfoldAdminSelectWidget,
        help_text=gettext_lazy("Bind it to one known node, to replace that node's credential. Empty = nodes enrol with it"),
    )


ALLOW_MODELS = "gateway.change_model"
"""The permission that it takes to have models allowed."""
_ALLOW_MODELS = gettext_lazy("Allow its models: clients may use only those that are allowed")


def _describe_use(credential: NodeCredential, text: str) -> tuple[NextStep, ...]:
    """Return how a node is started with a new credential, in lines that can be pasted, and what comes after that."""
    gateway = str(settings.GATEWAY_PUBLIC_URL).rstrip("/")
    host = urlsplit(gateway).hostname or ""
    start_text = _("On the node, in a folder with Muster, start its program.")
    if host == "localhost" or host.startswith("127."):
        start_text = _(
            "On the node, in a folder with Muster, start its program. %(gateway)s is for this machine; on another write this "
            "machine's address, on which the gateway must listen."
        ) % {"gateway": gateway}
    provider = credential.provider.name
    named = "" if provider == "local" else f" --provider {shlex.quote(provider)}"
    start = f"{COMMAND} node --gateway {gateway} --token {text}{named} --data ./muster-node"
    return (
        NextStep(start_text, start),
        NextStep(_("Wait until the node is in the list, a few seconds"), url=reverse("admin:nodes_node_changelist")),
        *([] if credential.allows_models else [NextStep(_ALLOW_MODELS, url=reverse("admin:gateway_model_changelist"))]),
        NextStep(
            _(
                "If loads are to be approved by several people: let the node trust the policy, with the words of the page "
                "Policy."
            ),
            f"{COMMAND} trust WORDS --data ./muster-node",
        ),
    )


def _revoke(credential: NodeCredential, actor: str, values: Values) -> str:
    revoke_credential(credential_id=credential.pk, actor=actor)
    return _("Revoked the node credential %(name)s.") % {"name": credential.name}


def _trust(credential: NodeCredential, actor: str, values: Values) -> str:
    trust_models(credential_id=credential.pk, trusts=True, actor=actor)
    return _("Clients may use what the nodes of %(name)s declare.") % {"name": credential.name}


def _distrust(credential: NodeCredential, actor: str, values: Values) -> str:
    trust_models(credential_id=credential.pk, trusts=False, actor=actor)
    return _("Each further model of the nodes of %(name)s waits for an operator.") % {"name": credential.name}


@admin.register(NodeCredential)
class NodeCredentialAdmin(CreatingAdmin):
    list_display = ("name", "show_prefix", "provider", "node", "max_nodes", "show_state", "last_used_at", "show_changes")
    list_filter = ("provider",)
    list_select_related = ("provider", "node")
    search_fields = ("name", "keyid")
    fields = (
        *("name", "show_prefix", "provider", "node", "max_nodes", "allows_models", "created_at", "last_used_at", "revoked_at"),
    )
    readonly_fields = fields
    empty_words = gettext_lazy("A node shows its credential when it connects. Create one, then start the node with it.")
    create_form = CredentialForm
    create_title = gettext_lazy("New node credential")
    create_explanation = gettext_lazy("A node shows it when it connects. It is shown here once.")
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="trust",
            label=gettext_lazy("Allow its models"),
            explanation=gettext_lazy(
                "Clients may use what its nodes declare, now and later, but for models that an operator refused."
            ),
            run=_trust,
            permission=ALLOW_MODELS,
            is_offered=lambda credential: credential.revoked_at is None and not credential.allows_models,
        ),
        RowChange(
            name="distrust",
            label=gettext_lazy("Stop allowing its models"),
            explanation=gettext_lazy("What is allowed stays allowed. Each further model waits for an operator."),
            run=_distrust,
            permission=ALLOW_MODELS,
            is_offered=lambda credential: credential.revoked_at is None and credential.allows_models,
        ),
        RowChange(
            name="revoke",
            label=gettext_lazy("Revoke"),
            explanation=gettext_lazy("Nodes that use it are cut off and cannot come back with it, for good."),
            run=_revoke,
            is_offered=lambda credential: credential.revoked_at is None,
            is_danger=True,
        ),
    )

    def _try_create(self, request: HttpRequest, form: forms.Form) -> Created | None:
        if form.cleaned_data["allows_models"] and not may(request.user, ALLOW_MODELS):
            form.add_error("allows_models", _("You may not decide which models clients may use. Leave it off."))
            return None
        return super()._try_create(request, form)

    def create(self, actor: str, values: Values) -> Created:
        credential, text = create_credential(
            name=values["name"],
            provider_name=values["provider"].name,
            max_nodes=values["max_nodes"],
            node_id=values["node"].pk if values["node"] else None,
            allows_models=values["allows_models"],
            actor=actor,
        )
        return Created(row=credential, secret=text, steps=_describe_use(credential, text))

    @column(gettext_lazy("Credential"))
    def show_prefix(self, credential: NodeCredential) -> str:
        return _("from the environment") if credential.variable else f"msw_{credential.keyid}…"

    @column(gettext_lazy("State"), ordering="revoked_at", label={"active": "success", "revoked": "danger"})
    def show_state(self, credential: NodeCredential) -> tuple[str, str]:
        return ("active", _("active")) if credential.revoked_at is None else ("revoked", _("revoked"))


class ProviderForm(forms.Form):
    name = forms.CharField(
        max_length=60, widget=UnfoldAdminTextInputWidget, help_text=gettext_lazy("Letters, digits, hyphens, underscores")
    )


TERMS = ("max_queue", "queue_s", "no_node_s", "max_models")


class ProviderTermsForm(forms.Form):
    """How requests wait for the models of a provider, and what its nodes may declare."""

    max_queue = forms.IntegerField(
        required=False,
        min_value=1,
        label=gettext_lazy("Longest queue"),
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy(
            "How many requests may wait for all its models together. Empty: as many as each model lets wait."
        ),
    )
    queue_s = forms.IntegerField(
        required=False,
        min_value=1,
        label=gettext_lazy("Longest wait in seconds"),
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy("For a slot on one of its nodes. Empty: the installation's default."),
    )
    no_node_s = forms.IntegerField(
        required=False,
        min_value=0,
        label=gettext_lazy("Longest wait without a node, in seconds"),
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy("While none of its nodes is there. Empty: the installation's default."),
    )
    max_models = forms.IntegerField(
        required=False,
        min_value=1,
        max_value=limits().nodes.max_models,
        label=gettext_lazy("Models of a node"),
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy("How many one of its nodes may declare; further ones are dropped when it registers."),
    )


def _show_seconds(seconds: int | None) -> str:
    return _("the installation's default") if seconds is None else _("%(seconds)d s") % {"seconds": seconds}


def _change_terms(provider: Provider, actor: str, values: Values) -> str:
    change_provider_terms(name=provider.name, actor=actor, **{name: values[name] for name in TERMS})
    return _("Changed the limits of %(provider)s.") % {"provider": provider.name}


def _change_provider(service: Callable[..., object], outcome: str | Promise) -> Callable[[Provider, str, Values], str]:
    def run(provider: Provider, actor: str, _values: Values) -> str:
        service(name=provider.name, actor=actor)
        return str(outcome) % {"provider": provider.name}

    return run


@admin.register(Provider)
class ProviderAdmin(CreatingAdmin):
    list_display = ("name", "show_state", "show_nodes", "show_credentials", "created_at", "show_changes")
    list_filter = ("state",)
    search_fields = ("name",)
    fields = ("name", "state", "show_queue", "show_wait", "show_wait_for_node", "show_models", "created_at", "updated_at")
    readonly_fields = fields
    empty_words = gettext_lazy(
        "A provider is a group of nodes that are switched on and off together. Every credential belongs to one."
    )
    create_form = ProviderForm
    create_title = gettext_lazy("New provider")
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="terms",
            label=gettext_lazy("Change limits"),
            explanation=gettext_lazy(
                "Takes effect within seconds, for requests that arrive from then on. Of a model that several providers have, "
                "the most patient one counts."
            ),
            run=_change_terms,
            form=ProviderTermsForm,
            is_offered=lambda provider: provider.state != ProviderState.DELETED,
            read_initial=lambda provider: {name: getattr(provider, name) for name in TERMS},
        ),
        RowChange(
            name="disable",
            label=gettext_lazy("Disable"),
            explanation=gettext_lazy("Its nodes get no new work and cannot connect until it is enabled again."),
            run=_change_provider(
                disable_provider, gettext_lazy("Provider %(provider)s is disabled: its nodes get no work and cannot connect.")
            ),
            is_offered=lambda provider: provider.state == ProviderState.ENABLED,
        ),
        RowChange(
            name="enable",
            label=gettext_lazy("Enable"),
            explanation=gettext_lazy("Its nodes may connect and get work again."),
            run=_change_provider(enable_provider, gettext_lazy("Provider %(provider)s is enabled.")),
            is_offered=lambda provider: provider.state == ProviderState.DISABLED,
        ),
        RowChange(
            name="delete",
            label=gettext_lazy("Delete"),
            explanation=gettext_lazy("Its nodes are cut off and all its credentials are revoked, for good. Records stay."),
            run=_change_provider(
                delete_provider, gettext_lazy("Provider %(provider)s is deleted and its credentials are revoked.")
            ),
            is_offered=lambda provider: provider.state != ProviderState.DELETED,
            is_danger=True,
        ),
    )

    def create(self, actor: str, values: Values) -> Created:
        return Created(row=create_provider(name=values["name"], actor=actor))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Provider]:
        providers: QuerySet[Provider] = super().get_queryset(request)
        return providers.annotate(
            node_count=Count("nodes", distinct=True),
            credential_count=Count("credentials", distinct=True, filter=Q(credentials__revoked_at__isnull=True)),
        )

    @column(gettext_lazy("State"), ordering="state", label={"enabled": "success", "disabled": "warning", "deleted": "danger"})
    def show_state(self, provider: Provider) -> tuple[str, str]:
        return provider.state, {"enabled": _("enabled"), "disabled": _("disabled"), "deleted": _("deleted")}[provider.state]

    @column(gettext_lazy("Longest queue"))
    def show_queue(self, provider: Provider) -> str:
        return _("as many as each model lets wait") if provider.max_queue is None else str(provider.max_queue)

    @column(gettext_lazy("Longest wait"))
    def show_wait(self, provider: Provider) -> str:
        return _show_seconds(provider.queue_s)

    @column(gettext_lazy("Longest wait without a node"))
    def show_wait_for_node(self, provider: Provider) -> str:
        return _show_seconds(provider.no_node_s)

    @column(gettext_lazy("Models of a node"))
    def show_models(self, provider: Provider) -> str:
        return str(limits().nodes.max_models if provider.max_models is None else provider.max_models)

    @column(gettext_lazy("Nodes"), ordering="node_count")
    def show_nodes(self, provider: Any) -> int:  # Any: carries an annotation
        return int(provider.node_count)

    @column(gettext_lazy("Credentials"), ordering="credential_count")
    def show_credentials(self, provider: Any) -> int:  # Any: carries an annotation
        return int(provider.credential_count)
