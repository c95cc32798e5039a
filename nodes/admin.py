"""Admin pages of the node registry: boxes, their credentials, their providers."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django.utils import timezone
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from governance.pages import Created, CreatingAdmin, RowChange, ShowingAdmin, Values, column
from nodes.errors import NodeError
from nodes.models import Node, NodeCredential, NodePresence, Provider, ProviderState
from nodes.services import (
    cordon_node,
    create_credential,
    create_provider,
    delete_provider,
    describe_gpus,
    disable_provider,
    drain_node,
    enable_provider,
    heartbeat_age_s,
    judge_status,
    revoke_credential,
    status_expression,
    uncordon_node,
    undrain_node,
)
from wire.contract import NodeStatus

STATUS_COLOURS = {
    NodeStatus.AVAILABLE.value: "success",
    NodeStatus.BUSY.value: "info",
    NodeStatus.DRAINING.value: "warning",
    NodeStatus.ERROR.value: "danger",
    NodeStatus.OFFLINE.value: "default",
}


class DrainForm(forms.Form):
    """What is asked before a drain."""

    reason = forms.CharField(
        max_length=200,
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text="Shown beside the box and in the audit",
    )
    timeout_s = forms.FloatField(
        label="Time for running requests, seconds",
        min_value=0,
        max_value=86_400,
        required=False,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text="What still runs then is interrupted. Empty = the setting",
    )


class ProviderForm(forms.Form):
    """What is asked for a new provider."""

    name = forms.CharField(
        max_length=60, widget=UnfoldAdminTextInputWidget, help_text="Letters, digits, hyphens, underscores"
    )


class CredentialForm(forms.Form):
    """What is asked for a new node credential."""

    name = forms.CharField(max_length=80, widget=UnfoldAdminTextInputWidget, help_text="Which box or boxes will use it")
    provider = forms.ModelChoiceField(
        queryset=Provider.objects.exclude(state=ProviderState.DELETED),
        widget=UnfoldAdminSelectWidget,
        help_text="Boxes of a provider are switched on and off together",
    )
    max_nodes = forms.IntegerField(
        min_value=1, initial=1, widget=UnfoldAdminIntegerFieldWidget, help_text="How many boxes may enrol with it"
    )
    node = forms.ModelChoiceField(
        queryset=Node.objects.all(),
        required=False,
        widget=UnfoldAdminSelectWidget,
        help_text="Bind it to one known box, to replace that box's credential. Empty = boxes enrol with it",
    )


class StatusFilter(admin.SimpleListFilter):
    """Filters boxes by the status they have at this moment."""

    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # Any: generic in the stubs
        """Return the contract's words."""
        return [(status.value, status.value) for status in NodeStatus]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Node]) -> QuerySet[Node]:
        """Return the boxes that have the chosen status."""
        if self.value() is None:
            return queryset
        return queryset.annotate(status_now=status_expression(now=timezone.now())).filter(status_now=self.value())


def _cordon(node: Node, actor: str, values: Values) -> str:
    cordon_node(node_id=node.pk, actor=actor)
    return f"{node.name} is cordoned: it gets no new work until it is uncordoned."


def _uncordon(node: Node, actor: str, values: Values) -> str:
    uncordon_node(node_id=node.pk, actor=actor)
    return f"{node.name} is no longer cordoned."


def _drain(node: Node, actor: str, values: Values) -> str:
    drained = drain_node(node_id=node.pk, actor=actor, reason=values["reason"], timeout_s=values["timeout_s"])
    return f"{node.name} is draining; what still runs at {drained.drain_deadline_at:%H:%M:%S} UTC is interrupted."


def _undrain(node: Node, actor: str, values: Values) -> str:
    undrain_node(node_id=node.pk, actor=actor)
    return f"{node.name} is no longer draining."


@admin.register(Node)
class NodeAdmin(ShowingAdmin):
    """The GPU boxes: what they are, how they do, and holding them back from work."""

    list_display = (
        "name",
        "show_status",
        "show_heartbeat",
        "show_models",
        "show_load",
        "show_gpus",
        "mode",
        "show_held_back",
        "show_changes",
    )
    list_filter = (StatusFilter, "provider", "mode")
    list_select_related = ("provider", "presence")
    search_fields = ("name", "owner_name", "gpu_name")
    refusals = (NodeError,)
    fieldsets = (
        ("Now", {"fields": ("show_status", "show_heartbeat", "show_load", "show_gpus", "show_replicas", "show_error")}),
        ("Decided", {"fields": ("mode", "cordoned", "draining", "drain_deadline_at", "drain_reason")}),
        ("Box", {"fields": ("name", "printed_id", "owner_name", "provider", "credential", "show_models")}),
        (
            "Link",
            {"fields": ("reach", "public_base_url", "show_connected", "max_concurrent", "agent_version", "created_at")},
        ),
    )
    readonly_fields = tuple(name for _, options in fieldsets for name in options["fields"])
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="cordon",
            label="Cordon",
            explanation="The box gets no new work. What runs goes on. A cordon survives reconnects and restarts.",
            run=_cordon,
            is_offered=lambda node: not node.cordoned,
        ),
        RowChange(
            name="uncordon",
            label="Uncordon",
            explanation="The box gets work again.",
            run=_uncordon,
            is_offered=lambda node: node.cordoned,
        ),
        RowChange(
            name="drain",
            label="Drain",
            explanation="The box gets no new work; what still runs after the time below is interrupted.",
            run=_drain,
            is_offered=lambda node: not node.draining,
            form=DrainForm,
            is_danger=True,
        ),
        RowChange(
            name="undrain",
            label="Undrain",
            explanation="The drain ends and the box gets work again.",
            run=_undrain,
            is_offered=lambda node: node.draining,
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        """Return boxes with what every page shows of them, in one query."""
        boxes: QuerySet[Node] = super().get_queryset(request)
        return boxes.select_related("provider", "presence", "credential").exclude(provider__state=ProviderState.DELETED)

    @column("Status", label=STATUS_COLOURS)
    def show_status(self, node: Node) -> str:
        """Return the contract status at this moment."""
        return judge_status(node, _presence(node), now=timezone.now()).value

    @column("Heartbeat", ordering="presence__last_heartbeat_at")
    def show_heartbeat(self, node: Node) -> str:
        """Return how long ago the box was heard."""
        presence = _presence(node)
        return describe_age(heartbeat_age_s(presence, now=timezone.now()) if presence is not None else None)

    @column("Models")
    def show_models(self, node: Node) -> str:
        """Return the models it serves; a few of many."""
        names = ", ".join(node.model_names[:3])
        return f"{names} + {len(node.model_names) - 3} more" if len(node.model_names) > 3 else names or "-"

    @column("Load", ordering="presence__active_requests")
    def show_load(self, node: Node) -> str:
        """Return requests it runs of those it takes."""
        presence = _presence(node)
        return f"{presence.active_requests if presence is not None else 0} / {node.max_concurrent}"

    @column("GPU")
    def show_gpus(self, node: Node) -> str:
        """Return name, use and memory of its GPUs."""
        return describe_gpus(node, _presence(node)) or "-"

    @column("Held back", label={"cordoned": "warning", "draining": "warning", "cordoned, draining": "warning"})
    def show_held_back(self, node: Node) -> str:
        """Return what operators decided against new work on it."""
        words = [word for word, is_so in (("cordoned", node.cordoned), ("draining", node.draining)) if is_so]
        return ", ".join(words)

    @column("Replicas")
    def show_replicas(self, node: Node) -> str:
        """Return what the box says it has loaded."""
        presence = _presence(node)
        replicas = presence.replicas if presence is not None else []
        return ", ".join(f"{replica.get('model', '?')}: {replica.get('state', '?')}" for replica in replicas) or "-"

    @column("Last error")
    def show_error(self, node: Node) -> str:
        """Return the last error the box reported."""
        presence = _presence(node)
        return (presence.last_error if presence is not None else "") or "-"

    @column("Connected")
    def show_connected(self, node: Node) -> str:
        """Return whether a gateway holds its socket, and from where."""
        presence = _presence(node)
        if presence is None or not presence.connected:
            return "no socket"
        return f"{presence.protocol or 'socket'} from {presence.peer_address or 'an unknown address'}"


def _enable(provider: Provider, actor: str, values: Values) -> str:
    enable_provider(name=provider.name, actor=actor)
    return f"Provider {provider.name} is enabled."


def _disable(provider: Provider, actor: str, values: Values) -> str:
    disable_provider(name=provider.name, actor=actor)
    return f"Provider {provider.name} is disabled: its boxes get no work and cannot connect."


def _delete(provider: Provider, actor: str, values: Values) -> str:
    delete_provider(name=provider.name, actor=actor)
    return f"Provider {provider.name} is deleted and its credentials are revoked."


@admin.register(Provider)
class ProviderAdmin(CreatingAdmin):
    """Groups of boxes that are switched on and off together."""

    list_display = ("name", "show_state", "show_nodes", "show_credentials", "created_at", "show_changes")
    list_filter = ("state",)
    search_fields = ("name",)
    refusals = (NodeError,)
    fields = ("name", "show_state", "created_at", "updated_at")
    readonly_fields = fields
    create_form = ProviderForm
    create_title = "New provider"
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="disable",
            label="Disable",
            explanation="Its boxes get no new work and cannot connect until it is enabled again.",
            run=_disable,
            is_offered=lambda provider: provider.state == ProviderState.ENABLED,
        ),
        RowChange(
            name="enable",
            label="Enable",
            explanation="Its boxes may connect and get work again.",
            run=_enable,
            is_offered=lambda provider: provider.state == ProviderState.DISABLED,
        ),
        RowChange(
            name="delete",
            label="Delete",
            explanation="Its boxes are cut off and all its credentials are revoked, for good. Records stay.",
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

    @column("Boxes", ordering="node_count")
    def show_nodes(self, provider: Any) -> int:  # Any: carries an annotation
        """Return how many boxes it has."""
        return int(provider.node_count)

    @column("Credentials", ordering="credential_count")
    def show_credentials(self, provider: Any) -> int:  # Any: carries an annotation
        """Return how many of its credentials may be used."""
        return int(provider.credential_count)


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
    refusals = (NodeError,)
    fields = ("name", "show_prefix", "provider", "node", "max_nodes", "created_at", "last_used_at", "revoked_at")
    readonly_fields = fields
    create_form = CredentialForm
    create_title = "New node credential"
    create_explanation = "A GPU box shows it when it connects. It is shown here once."
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="revoke",
            label="Revoke",
            explanation="Boxes that use it are cut off and cannot come back with it, for good.",
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
        return Created(
            row=credential, secret=text, usage="On the box: ./muster node --gateway URL --token <credential>"
        )

    @column("Credential")
    def show_prefix(self, credential: NodeCredential) -> str:
        """Return the public head of the credential."""
        return f"msw_{credential.keyid}…"

    @column("State", ordering="revoked_at", label={"active": "success", "revoked": "danger"})
    def show_state(self, credential: NodeCredential) -> str:
        """Return whether it may be used."""
        return "active" if credential.revoked_at is None else "revoked"


def describe_age(age_s: float | None) -> str:
    """Return an age as an operator reads it: ``3 s ago``, ``5 min ago``, ``2 h ago``, ``4 d ago`` or ``never``."""
    if age_s is None:
        return "never"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if age_s < limit_s:
            return f"{age_s // unit_s:.0f} {unit} ago"
    return f"{age_s // 86_400:.0f} d ago"


def _presence(node: Node) -> NodePresence | None:
    return getattr(node, "presence", None)
