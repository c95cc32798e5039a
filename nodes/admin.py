"""Operators' pages of nodes, their credentials and providers: they show, ask, and call one service on a confirmed POST."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any, ClassVar
from urllib.parse import urlencode, urlsplit

from django import forms
from django.conf import settings
from django.contrib import admin
from django.db.models import Count, Q, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget

from core.admin_pages import ChangeLink, Created, CreatingAdmin, NextStep, Offer, RowChange, ShowingAdmin, Values, column
from core.limits import limits
from governance.operations.approvals import active_policy
from nodes.models import (
    Gpu,
    Node,
    NodeCredential,
    Provider,
    ProviderState,
    Reach,
    clock_of,
    heartbeat_age_s,
    presence_of,
    with_clock,
)
from nodes.services.availability import (
    explain_unreachable,
    is_drained,
    judge_status,
    list_ejections,
)
from nodes.services.credentials import (
    create_credential,
    create_provider,
    delete_provider,
    disable_provider,
    enable_provider,
    revoke_credential,
)
from nodes.services.drains import EVICT, FORCED_DRAIN, cordon_node, describe_drain, drain_node, uncordon_node, undrain_node
from nodes.services.figures import read_gpu_figures, read_uptimes
from nodes.services.governance import set_op_key
from nodes.services.gpus import list_gpus, list_models
from nodes.services.history import Span, draw_history, read_history
from nodes.services.nodes import set_api_key
from nodes.services.telemetry import count_replicas, describe_counts, describe_gpus, describe_telemetry
from wire import clock
from wire.contract import NodeMode, NodeStatus

LEVELS = {
    "L2": "L2: approvals are verified on the node",
    "L1": "L1: the node checks a key of its own",
    "L0": "L0: the node checks a shared key",
}
STATUS_COLOURS = {
    NodeStatus.AVAILABLE.value: "success",
    NodeStatus.BUSY.value: "info",
    NodeStatus.DRAINING.value: "warning",
    NodeStatus.ERROR.value: "danger",
    NodeStatus.OFFLINE.value: "default",
    "drained": "primary",
}
"""By the words of the contract, and ours for a draining node on which nothing runs."""
_SCHEDULING_COLOURS = {
    **dict.fromkeys(("cordoned", "draining", "cordoned, draining"), "warning"),
    **dict.fromkeys(("drained", "cordoned, drained"), "primary"),
}


_TEXT: dict[str, Any] = {"required": False, "widget": UnfoldAdminTextInputWidget}
_SECRET: dict[str, Any] = {"strip": False, "widget": forms.PasswordInput(attrs={"autocomplete": "off"})}


class DrainForm(forms.Form):
    reason = forms.CharField(max_length=200, **_TEXT, help_text="Shown beside the node and in the audit")
    timeout_s = forms.FloatField(
        label="Interrupt running requests after (seconds)",
        min_value=0,
        max_value=86_400,
        required=False,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text="Empty: MUSTER_DRAIN_TIMEOUT_S, 120 unless it was changed",
    )


class OpKeyForm(forms.Form):
    level = forms.ChoiceField(
        choices=[("L0", "L0: as public model runners check it"), ("L1", "L1: bound to node and parameters")]
    )
    secret = forms.CharField(
        label="Key",
        max_length=64,
        **_SECRET,
        help_text="The text in the node's key file, 16 to 64 bytes. It is not shown again",
    )
    kid = forms.CharField(label="Id of the key", max_length=64, **_TEXT, help_text="L1 needs one")
    runner_id = forms.CharField(
        label="Runner id",
        max_length=200,
        **_TEXT,
        help_text="L1: MUSTER_RUNNER_ID of the node. Empty = a name made from this one",
    )


class ApiKeyForm(forms.Form):
    api_key = forms.CharField(
        label="API key",
        max_length=limits().nodes.api_key_chars,
        required=False,
        **_SECRET,
        help_text="Empty: the calls carry none from now on. It is not shown again",
    )


class StatusFilter(admin.SimpleListFilter):
    title = "status"
    parameter_name = "status"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # Any: generic in the stubs
        return [(status.value, status.value) for status in NodeStatus]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Node]) -> QuerySet[Node]:
        if self.value() is None:
            return queryset
        # The status is a judgement of each reading, which the rows do not hold.
        nodes = with_clock(queryset.select_related("presence"))
        return queryset.filter(pk__in=[node.pk for node in nodes if judge_status(node, now=clock_of(node)) == self.value()])


def _change_node(service: Callable[..., object], outcome: str) -> Callable[[Node, str, Values], str]:
    """Return what a button without questions does. ``outcome``: what the page says then, after the node's name."""

    def run(node: Node, actor: str, _values: Values) -> str:
        service(node_id=node.pk, actor=actor)
        return f"{node.name} {outcome}"

    return run


def _drain(node: Node, actor: str, values: Values) -> str:
    changed = drain_node(node_id=node.pk, actor=actor, reason=values["reason"], timeout_s=values["timeout_s"])
    return (
        f"{node.name} is draining; what still runs at {changed.drain_deadline_at:%H:%M:%S} UTC is interrupted. Its status "
        "becomes drained when nothing runs on it any more and it is safe to power off."
    )


def _offer_drain(node: Node, values: Values) -> Offer:
    return Offer(FORCED_DRAIN, node.printed_id, {"timeout_s": int(values["timeout_s"] or 0)})


def _set_op_key(node: Node, actor: str, values: Values) -> str:
    given = {name: values[name] for name in ("kid", "secret", "level", "runner_id")}
    key = set_op_key(node_id=node.pk, actor=actor, **given)
    return f"{node.name} takes approved operations from now on; they are signed with the key {key.kid or 'without an id'}."


def _set_api_key(node: Node, actor: str, values: Values) -> str:
    set_api_key(node_id=node.pk, api_key=values["api_key"], actor=actor)
    return f"Calls of {node.name} carry {'the' if values['api_key'] else 'no'} API key from now on."


PROPOSALS = (
    ("model-load", "Propose: load"),
    ("model-unload", "Propose: unload"),
    ("cache-flush", "Propose: flush"),
    ("settings-reload", "Propose: reload of settings"),
)
FORCED = ((FORCED_DRAIN, "Propose: forced drain"), (EVICT, "Request eviction (stop all work)"))


@admin.register(Node)
class NodeAdmin(ShowingAdmin):
    list_display = (
        *("name", "show_status", "show_heartbeat", "show_models", "show_load", "show_gpus"),
        *("show_lending", "show_held_back", "show_changes"),
    )
    list_filter = (StatusFilter, "provider", "mode")
    list_select_related = ("provider", "presence")
    search_fields = ("name", "owner_name", "gpu_name")
    change_form_outer_before_template = "admin/muster/node.html"
    is_live = True
    empty_words = "A node is a machine with GPUs that answers requests. It appears here when it connects with a credential."
    empty_link = ("Create a node credential", "admin:nodes_nodecredential_add")
    fieldsets = (
        ("Now", {"fields": ("show_status", "show_heartbeat", "show_load", "show_error", "show_ejections", "show_rival")}),
        ("Scheduling", {"fields": ("show_lending", "show_held_back", "show_drain", "drain_deadline_at", "drain_reason")}),
        ("Governance", {"fields": ("show_level", "runner_id", "show_policy", "witness_size", "show_alarms", "show_skew")}),
        ("Node", {"fields": ("name", "show_id", "owner_name", "provider", "credential", "show_models", "show_gpu_rows")}),
        (
            "Link",
            {
                "fields": (
                    *("show_reach", "public_base_url", "show_tickets", "show_connected", "max_concurrent", "agent_version"),
                    "created_at",
                )
            },
        ),
    )
    readonly_fields = tuple(name for _, options in fieldsets for name in options["fields"])
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="cordon",
            label="Cordon",
            explanation="The node gets no new work. What runs goes on. A cordon survives reconnects and restarts.",
            run=_change_node(cordon_node, "is cordoned: it gets no new work until it is uncordoned."),
            is_offered=lambda node: not node.cordoned,
        ),
        RowChange(
            name="uncordon",
            label="Uncordon",
            explanation="The node gets work again.",
            run=_change_node(uncordon_node, "is no longer cordoned."),
            is_offered=lambda node: node.cordoned,
        ),
        RowChange(
            name="drain",
            label="Drain",
            explanation="The node gets no new work; what still runs after the time below is interrupted.",
            run=_drain,
            is_offered=lambda node: not node.draining,
            form=DrainForm,
            is_danger=True,
            find_offer=_offer_drain,
        ),
        RowChange(
            name="undrain",
            label="Undrain",
            explanation="The drain ends and the node gets work again.",
            run=_change_node(undrain_node, "is no longer draining."),
            is_offered=lambda node: node.draining,
        ),
        RowChange(
            name="op-key",
            label="Operation key",
            explanation=(
                "Approved operations for this node are signed with this key from now on. Whoever has it can operate the node "
                "without any approval, so keep it nowhere else."
            ),
            run=_set_op_key,
            is_offered=lambda node: node.reach == Reach.DIRECT.value,
            form=OpKeyForm,
            is_danger=True,
        ),
        RowChange(
            name="api-key",
            label="API key",
            explanation=(
                "Every call of the node's URL carries this key as a bearer credential. It is stored encrypted, is never shown "
                "and goes to no other address."
            ),
            run=_set_api_key,
            is_offered=lambda node: node.reach == Reach.DIRECT.value,
            form=ApiKeyForm,
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        nodes: QuerySet[Node] = super().get_queryset(request)
        nodes = nodes.select_related("provider", "presence", "credential").exclude(provider__state=ProviderState.DELETED)
        return with_clock(nodes)

    def describe_row(self, request: HttpRequest, row: Node) -> dict[str, Any]:  # Any: Django's template context
        return {"telemetry": describe_telemetry(row, now=clock_of(row))}

    def list_links(self, request: HttpRequest, row: Node) -> list[ChangeLink]:
        """Return the changes that can be made at once, then those that others have to approve."""
        links = super().list_links(request, row)
        # To ask for an operation is a permission of its own: who has it need not be able to cordon or drain.
        if not (self.may_change(request) or request.user.has_perm("governance.add_operation")):
            return links
        if row.runner_id and row.op_level:
            links += [_propose(operation, label, row.runner_id) for operation, label in PROPOSALS]
        return [*links, *(_propose(operation, label, row.printed_id) for operation, label in FORCED)]

    @column("Status", label=STATUS_COLOURS)
    def show_status(self, node: Node) -> str:
        status = judge_status(node, now=clock_of(node))
        return "drained" if status is NodeStatus.DRAINING and is_drained(node) else status.value

    @column("Last seen", ordering="presence__last_heartbeat_at")
    def show_heartbeat(self, node: Node) -> str:
        return describe_age(heartbeat_age_s(presence_of(node), now=clock_of(node)))

    @column("Models")
    def show_models(self, node: Node) -> str:
        names = ", ".join(node.model_names[:3])
        beyond = f" + {len(node.model_names) - 3} more" if len(node.model_names) > 3 else ""
        counts = describe_counts(count_replicas(presence_of(node)))
        return " · ".join(part for part in (names + beyond, counts) if part) or "-"

    @column("Load", ordering="presence__active_requests")
    def show_load(self, node: Node) -> str:
        return f"{presence_of(node).active_requests} / {node.max_concurrent}"

    @column("GPU")
    def show_gpus(self, node: Node) -> str:
        return describe_gpus(node) or "-"

    @column("GPUs")
    def show_gpu_rows(self, node: Node) -> SafeString | str:
        rows = [
            (reverse("admin:nodes_gpu_change", args=[gpu.pk]), f"{gpu.index} · {gpu}") for gpu in list_gpus(node_id=node.pk)
        ]
        link = '<a class="text-primary-600 dark:text-primary-500" href="{}">{}</a>'
        return format_html_join(", ", link, rows) or "-"

    @column("Scheduling", label=_SCHEDULING_COLOURS)
    def show_held_back(self, node: Node) -> str:
        drain = "drained" if is_drained(node) else "draining"
        held = [name for name, is_so in (("cordoned", node.cordoned), (drain, node.draining)) if is_so]
        return ", ".join(held) or "open"

    @column("Lending", ordering="mode", label={"reclaimed by owner": "warning"})
    def show_lending(self, node: Node) -> str:
        return "on" if node.mode == NodeMode.SPARE_ON.value else "reclaimed by owner"

    @column("Node ID")
    def show_id(self, node: Node) -> str:
        return node.printed_id

    @column("Connection")
    def show_reach(self, node: Node) -> str:
        return "outbound: the node dials in" if node.reach == Reach.RELAY.value else "inbound: called over HTTP"

    @column("Tickets")
    def show_tickets(self, node: Node) -> str:
        if not node.ticket_url:
            return "no: clients reach it through a gateway alone"
        why = f"; no client is sent there, because the URL {node.ticket_error}" if node.ticket_error else ""
        return f"clients with a ticket reach it at {node.ticket_url}{why}"

    @column("Drain")
    def show_drain(self, node: Node) -> str:
        text = describe_drain(node)
        return f"{text} (asked for by {node.drain_actor})" if text and node.drain_actor else text or "-"

    @column("Last error")
    def show_error(self, node: Node) -> str:
        why = explain_unreachable(node) if node.reach == Reach.DIRECT.value else ""
        return " · ".join(filter(None, (presence_of(node).last_error, why and f"cannot be reached: {why}"))) or "-"

    @column("Ejected by gateways")
    def show_ejections(self, node: Node) -> str:
        found = list_ejections(presence_of(node), now=clock_of(node))
        return " · ".join(f"{one.model}: {one.text}" if one.model else one.text for one in found) or "-"

    @column("Duplicate node")
    def show_rival(self, node: Node) -> str:
        shown_s = limits().nodes.rival_shown_s
        age_s = (clock.now() - node.rival_seen_at).total_seconds() if node.rival_seen_at is not None else shown_s
        if age_s >= shown_s:
            return "-"
        whence = node.rival_address or "an unknown address"
        return f"refused {describe_age(age_s)}, from {whence}: give it another name or its own credential"

    @column("Level")
    def show_level(self, node: Node) -> str:
        return LEVELS.get(node.op_level, "takes no operations from here")

    @column("Policy")
    def show_policy(self, node: Node) -> str:
        found = active_policy()
        newest = found[0].version if found is not None else 0
        pinned = f"version {node.policy_version} pinned"
        if not node.policy_version:
            pinned = "This node trusts no policy yet. Run ./muster trust WORDS on it"
        return f"{pinned} · version {newest} is in force" if newest else f"{pinned} · none is in force"

    @column("Alarms")
    def show_alarms(self, node: Node) -> str:
        return " · ".join(text for text in (node.witness_alarm, node.policy_error) if text) or "-"

    @column("Clock")
    def show_skew(self, node: Node) -> str:
        if node.clock_skew_ms is None:
            return "-"
        text = f"{abs(node.clock_skew_ms) / 1000:.1f} s {'behind' if node.clock_skew_ms > 0 else 'ahead'}"
        if abs(node.clock_skew_ms) > limits().nodes.clock_skew_ms:
            return f"{text}: no operation is sent to it"
        return f"{text}: set it" if abs(node.clock_skew_ms) > limits().nodes.clock_skew_warning_ms else text

    @column("Connected")
    def show_connected(self, node: Node) -> str:
        presence = presence_of(node)
        if not presence.connected:
            return "not connected"
        return f"{presence.protocol or 'socket'} from {presence.peer_address or 'an unknown address'}"


def describe_age(age_s: float | None) -> str:
    """Return an age as an operator reads it: ``3 s ago``, ``5 min ago``, ``2 h ago``, ``4 d ago`` or ``never``."""
    if age_s is None:
        return "never"
    for limit_s, unit_s, unit in ((120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if age_s < limit_s:
            return f"{age_s // unit_s:.0f} {unit} ago"
    return f"{age_s // 86_400:.0f} d ago"


def _propose(operation: str, label: str, target: str) -> ChangeLink:
    query = urlencode({"operation": operation, "target": target})
    return ChangeLink(label, f"{reverse('approvals:propose')}?{query}", is_danger=False)


@admin.register(Gpu)
class GpuAdmin(ShowingAdmin):
    list_display = (
        "show_name",
        "show_node",
        "show_state",
        "show_load",
        "show_memory",
        "show_heat",
        "show_running",
        "show_seen",
    )
    list_filter = ("vendor", "node__provider")
    search_fields = ("model", "own_id", "node__name")
    is_live = True
    empty_words = "A GPU appears here when a node that has it is heard."
    empty_link = ("Create a node credential", "admin:nodes_nodecredential_add")
    removed_because = "Its node has not named it for too long."
    fieldsets = (
        (
            "Now",
            {"fields": ("show_state", "show_load", "show_memory", "show_heat", "show_running", "show_models", "show_seen")},
        ),
        (
            "GPU",
            {"fields": ("show_id", "show_node", "model", "vendor", "show_own_id", "group", "show_first", "show_gone")},
        ),
        ("Runs with", {"fields": ("compute_capability", "driver_version", "runtime_version")}),
        ("Limits", {"fields": ("show_batch", "show_context")}),
    )
    readonly_fields = tuple(name for _, options in fieldsets for name in options["fields"])
    change_form_outer_before_template = "admin/muster/gpu.html"

    def describe_row(self, request: HttpRequest, row: Gpu) -> dict[str, Any]:  # Any: Django's template context
        now = clock_of(row)
        figures = read_gpu_figures([row], now=now)[row.pk]
        uptime = read_uptimes([row.node_id]).get(row.node_id, 0.0)
        charts = [draw_history(read_history(row.pk, span), now=now, vram_mb=row.vram_mb) for span in Span]
        return {"figures": figures, "uptime_percent": 100 * uptime, "charts": charts}

    def get_queryset(self, request: HttpRequest) -> QuerySet[Gpu]:
        return list_gpus(with_gone=True).order_by(*self.get_ordering(request))

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return ("node__name", "index", "own_id")

    @column("GPU", ordering="model")
    def show_name(self, gpu: Gpu) -> str:
        return f"{gpu.index} · {gpu.model or gpu.own_id}"

    @column("Node", ordering="node__name")
    def show_node(self, gpu: Gpu) -> SafeString:
        url = reverse("admin:nodes_node_change", args=[gpu.node_id])
        return format_html('<a class="text-primary-600 dark:text-primary-500" href="{}">{}</a>', url, gpu.node.name)

    @column("Status", label={**STATUS_COLOURS, "gone": "danger"})
    def show_state(self, gpu: Gpu) -> str:
        return "gone" if gpu.gone_at is not None else judge_status(gpu.node, now=clock_of(gpu)).value

    @column("Load", ordering="load_percent")
    def show_load(self, gpu: Gpu) -> str:
        return "-" if gpu.load_percent is None else f"{gpu.load_percent:.0f} %"

    @column("Memory", ordering="vram_used_mb")
    def show_memory(self, gpu: Gpu) -> str:
        used, total = (None if mb is None else f"{mb / 1024:.1f}" for mb in (gpu.vram_used_mb, gpu.vram_mb))
        return f"{used or '?'} of {total or '?'} GiB" if used or total else "-"

    @column("Temperature", ordering="temperature_c")
    def show_heat(self, gpu: Gpu) -> str:
        parts = ((gpu.temperature_c, "°C"), (gpu.power_w, "W"))
        return ", ".join(f"{value:.0f} {unit}" for value, unit in parts if value is not None) or "-"

    @column("Requests", ordering="active_requests")
    def show_running(self, gpu: Gpu) -> str:
        return "-" if gpu.active_requests is None else str(gpu.active_requests)

    @column("Models")
    def show_models(self, gpu: Gpu) -> str:
        return ", ".join(list_models(gpu)) or "-"

    @column("Last reported", ordering="last_seen_at")
    def show_seen(self, gpu: Gpu) -> str:
        return describe_age(max(0.0, (clock_of(gpu) - gpu.last_seen_at).total_seconds()))

    @column("GPU ID")
    def show_id(self, gpu: Gpu) -> str:
        return gpu.printed_id

    @column("On its node")
    def show_own_id(self, gpu: Gpu) -> str:
        return f"number {gpu.index}" if gpu.own_id == str(gpu.index) else f"number {gpu.index}, {gpu.own_id}"

    @column("First reported")
    def show_first(self, gpu: Gpu) -> str:
        return f"{gpu.first_seen_at:%Y-%m-%d %H:%M} UTC"

    @column("Gone since")
    def show_gone(self, gpu: Gpu) -> str:
        return "-" if gpu.gone_at is None else f"{gpu.gone_at:%Y-%m-%d %H:%M} UTC"

    @column("Requests at once")
    def show_batch(self, gpu: Gpu) -> str:
        return "-" if gpu.max_batch is None else f"{gpu.max_batch}"

    @column("Context")
    def show_context(self, gpu: Gpu) -> str:
        return "-" if gpu.max_context_tokens is None else f"{gpu.max_context_tokens:,} tokens"


class CredentialForm(forms.Form):
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
    list_display = ("name", "show_prefix", "provider", "node", "max_nodes", "show_state", "last_used_at", "show_changes")
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
        return f"msw_{credential.keyid}…"

    @column("State", ordering="revoked_at", label={"active": "success", "revoked": "danger"})
    def show_state(self, credential: NodeCredential) -> str:
        return "active" if credential.revoked_at is None else "revoked"


class ProviderForm(forms.Form):
    name = forms.CharField(max_length=60, widget=UnfoldAdminTextInputWidget, help_text="Letters, digits, hyphens, underscores")


def _change_provider(service: Callable[..., object], outcome: str) -> Callable[[Provider, str, Values], str]:
    def run(provider: Provider, actor: str, _values: Values) -> str:
        service(name=provider.name, actor=actor)
        return f"Provider {provider.name} {outcome}"

    return run


@admin.register(Provider)
class ProviderAdmin(CreatingAdmin):
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
            run=_change_provider(disable_provider, "is disabled: its nodes get no work and cannot connect."),
            is_offered=lambda provider: provider.state == ProviderState.ENABLED,
        ),
        RowChange(
            name="enable",
            label="Enable",
            explanation="Its nodes may connect and get work again.",
            run=_change_provider(enable_provider, "is enabled."),
            is_offered=lambda provider: provider.state == ProviderState.DISABLED,
        ),
        RowChange(
            name="delete",
            label="Delete",
            explanation="Its nodes are cut off and all its credentials are revoked, for good. Records stay.",
            run=_change_provider(delete_provider, "is deleted and its credentials are revoked."),
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

    @column("State", ordering="state", label={"enabled": "success", "disabled": "warning", "deleted": "danger"})
    def show_state(self, provider: Provider) -> str:
        return provider.state

    @column("Nodes", ordering="node_count")
    def show_nodes(self, provider: Any) -> int:  # Any: carries an annotation
        return int(provider.node_count)

    @column("Credentials", ordering="credential_count")
    def show_credentials(self, provider: Any) -> int:  # Any: carries an annotation
        return int(provider.credential_count)
