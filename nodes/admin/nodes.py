"""Operators' pages of nodes: the list with what can be done to many at once, and the page of one with its tabs."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db.models import Prefetch, QuerySet
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.loader import render_to_string
from django.urls import URLPattern, path, reverse
from django.utils.functional import Promise
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.cache import never_cache
from unfold.widgets import UnfoldAdminIntegerFieldWidget, UnfoldAdminTextInputWidget

from core.admin_pages import ChangeLink, Offer, RowChange, RowList, ShowingAdmin, Values, column, name_actor
from core.charts import choose_range
from core.errors import ContractError
from core.limits import limits
from core.roles import may
from nodes.models import Gpu, Node, ProviderState, Reach, clock_of, heartbeat_age_s, presence_of, with_clock
from nodes.pages import TABS, hint_at_runner, list_tabs, propose, read_head, read_tab
from nodes.services.charts import read_loads
from nodes.services.conditions import WORDS, Condition, judge_nodes, read_standing
from nodes.services.drains import EVICT, FORCED_DRAIN, cordon_node, drain_node, uncordon_node, undrain_node
from nodes.services.governance import set_op_key
from nodes.services.logs import ask_log
from nodes.services.nodes import is_removable, remove_node, set_api_key
from nodes.services.telemetry import describe_telemetry

_TEXT: dict[str, Any] = {"required": False, "widget": UnfoldAdminTextInputWidget}
_SECRET: dict[str, Any] = {"strip": False, "widget": forms.PasswordInput(attrs={"autocomplete": "off"})}


class DrainForm(forms.Form):
    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        max_length=limits().nodes.drain_reason_chars,
        **_TEXT,
        help_text=gettext_lazy("Shown beside the node and in the audit log"),
    )
    timeout_s = forms.FloatField(
        label=gettext_lazy("Interrupt running requests after (seconds)"),
        min_value=0,
        max_value=limits().nodes.drain_timeout_max_s,
        required=False,
        widget=UnfoldAdminIntegerFieldWidget,
        help_text=gettext_lazy("Empty: MUSTER_DRAIN_TIMEOUT_S, 120 unless it was changed"),
    )


class OpKeyForm(forms.Form):
    level = forms.ChoiceField(
        label=gettext_lazy("Level"),
        choices=[
            ("L0", gettext_lazy("L0: as public model runners check it")),
            ("L1", gettext_lazy("L1: bound to node and parameters")),
        ],
    )
    secret = forms.CharField(
        label=gettext_lazy("Key"),
        max_length=64,
        **_SECRET,
        help_text=gettext_lazy("The text in the node's key file, 16 to 64 bytes. It is not shown again"),
    )
    kid = forms.CharField(label=gettext_lazy("Id of the key"), max_length=64, **_TEXT, help_text=gettext_lazy("L1 needs one"))
    runner_id = forms.CharField(
        label=gettext_lazy("Runner id"),
        max_length=200,
        **_TEXT,
        help_text=gettext_lazy("L1: MUSTER_RUNNER_ID of the node. Empty = a name made from this one"),
    )


class ApiKeyForm(forms.Form):
    api_key = forms.CharField(
        label=gettext_lazy("API key"),
        max_length=limits().nodes.api_key_chars,
        required=False,
        **_SECRET,
        help_text=gettext_lazy("Empty: the calls carry none from now on. It is not shown again"),
    )


def _change_node(service: Callable[..., object], outcome: str | Promise) -> Callable[[Node, str, Values], str]:
    """Return what a button without questions does. ``outcome``: what the page says then, of the ``node``."""

    def run(node: Node, actor: str, _values: Values) -> str:
        service(node_id=node.pk, actor=actor)
        return str(outcome) % {"node": node.name}

    return run


def _drain(node: Node, actor: str, values: Values) -> str:
    changed = drain_node(node_id=node.pk, actor=actor, reason=values["reason"], timeout_s=values["timeout_s"])
    return _(
        "%(node)s is draining; what still runs at %(time)s UTC is interrupted. It becomes drained when nothing runs on it any "
        "more and it is safe to power off."
    ) % {"node": node.name, "time": f"{changed.drain_deadline_at:%H:%M:%S}"}


def _offer_drain(node: Node, values: Values) -> Offer:
    return Offer(FORCED_DRAIN, node.printed_id, {"timeout_s": int(values["timeout_s"] or 0)})


def _set_op_key(node: Node, actor: str, values: Values) -> str:
    given = {name: values[name] for name in ("kid", "secret", "level", "runner_id")}
    key = set_op_key(node_id=node.pk, actor=actor, **given)
    words = {"node": node.name, "key": key.kid or "–"}
    return _("%(node)s takes approved operations from now on; they are signed with the key %(key)s.") % words


def _set_api_key(node: Node, actor: str, values: Values) -> str:
    set_api_key(node_id=node.pk, api_key=values["api_key"], actor=actor)
    if values["api_key"]:
        return _("Calls of %(node)s carry the API key from now on.") % {"node": node.name}
    return _("Calls of %(node)s carry no API key from now on.") % {"node": node.name}


CORDON = RowChange(
    name="cordon",
    label=gettext_lazy("Cordon"),
    explanation=gettext_lazy("The node gets no new work. What runs goes on. A cordon survives reconnects and restarts."),
    run=_change_node(cordon_node, gettext_lazy("%(node)s is cordoned: it gets no new work until it is uncordoned.")),
    is_offered=lambda node: not node.cordoned,
)
UNCORDON = RowChange(
    name="uncordon",
    label=gettext_lazy("Uncordon"),
    explanation=gettext_lazy("The node gets work again."),
    run=_change_node(uncordon_node, gettext_lazy("%(node)s is no longer cordoned.")),
    is_offered=lambda node: node.cordoned,
)
DRAIN = RowChange(
    name="drain",
    label=gettext_lazy("Drain"),
    explanation=gettext_lazy("The node gets no new work; what still runs after the time below is interrupted."),
    run=_drain,
    is_offered=lambda node: not node.draining,
    form=DrainForm,
    find_offer=_offer_drain,
)
UNDRAIN = RowChange(
    name="undrain",
    label=gettext_lazy("Undrain"),
    explanation=gettext_lazy("The drain ends and the node gets work again."),
    run=_change_node(undrain_node, gettext_lazy("%(node)s is no longer draining.")),
    is_offered=lambda node: node.draining,
)
MAIN = ("cordon", "uncordon", "drain", "undrain")
"""Changes that stand beside the name of a node; the others are in its menu."""
PROPOSALS = (
    ("model-load", gettext_lazy("Propose: load")),
    ("model-unload", gettext_lazy("Propose: unload")),
    ("cache-flush", gettext_lazy("Propose: flush")),
    ("settings-reload", gettext_lazy("Propose: reload of settings")),
)
FORCED = (
    (FORCED_DRAIN, gettext_lazy("Propose: forced drain")),
    (EVICT, gettext_lazy("Request eviction (stop all work)")),
)
"""Operations on any node; they stop what runs."""


# The list


def _conditions_of(request: HttpRequest) -> dict[uuid.UUID, Condition]:
    """Return how each node stands; read once for each request."""
    found: dict[uuid.UUID, Condition] | None = getattr(request, "_muster_conditions", None)
    if found is None:
        found = judge_nodes(Node.objects.exclude(provider__state=ProviderState.DELETED))
        request._muster_conditions = found  # type: ignore[attr-defined]  # noqa: SLF001  # ours, on Django's request
    return found


class ConditionFilter(admin.SimpleListFilter):
    """By how a node stands. That is a judgement of each reading, which the rows do not hold."""

    title = gettext_lazy("state")
    parameter_name = "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:  # Any: generic in the stubs
        return [(condition.value, str(word)) for condition, word in WORDS.items()]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Node]) -> QuerySet[Node]:
        if self.value() is None:
            return queryset
        return queryset.filter(pk__in=[pk for pk, condition in _conditions_of(request).items() if condition == self.value()])


@dataclass(frozen=True, slots=True)
class Chip:
    """A filter with how many rows it leaves."""

    label: str
    count: int
    url: str
    is_current: bool
    name: str = ""


class NodeList(RowList):
    """The nodes of one page, each with what it says of itself and how busy its GPUs were."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        gpus = {node.pk: [gpu.pk for gpu in node.present_gpus] for node in self.result_list}
        loads = read_loads(gpus)
        for node in self.result_list:
            node.load_path = loads.get(node.pk, "")
            node.view = describe_telemetry(node, now=clock_of(node))


@admin.register(Node)
class NodeAdmin(ShowingAdmin):
    list_display = (
        *("name", "show_standing", "show_gpus", "show_memory", "show_utilisation", "show_models"),
        *("show_slots", "show_runner", "show_heartbeat"),
    )
    list_filter = (ConditionFilter, "provider")
    list_select_related = ("provider", "presence")
    list_per_page = limits().nodes.page_nodes
    list_max_show_all = 0
    list_fullwidth = True
    list_before_template = "admin/muster/nodes_chips.html"
    search_fields = ("name", "owner_name", "gpu_name")
    ordering = ("name", "id")
    actions = ("cordon_nodes", "uncordon_nodes", "drain_nodes", "undrain_nodes")
    is_live = True
    removed_because = gettext_lazy("It was removed, or was not heard for 30 days.")
    empty_words = gettext_lazy(
        "A node is a machine with GPUs that answers requests. It appears here when it connects with a credential."
    )
    empty_link = (gettext_lazy("Add a node"), "admin:nodes_node_setup")
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        CORDON,
        UNCORDON,
        DRAIN,
        UNDRAIN,
        RowChange(
            name="op-key",
            label=gettext_lazy("Operation key"),
            explanation=gettext_lazy(
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
            label=gettext_lazy("API key"),
            explanation=gettext_lazy(
                "Every call of the node's URL carries this key as a bearer credential. It is stored encrypted, is never shown "
                "and goes to no other address."
            ),
            run=_set_api_key,
            is_offered=lambda node: node.reach == Reach.DIRECT.value,
            form=ApiKeyForm,
        ),
        RowChange(
            name="remove",
            label=gettext_lazy("Remove"),
            explanation=gettext_lazy(
                "The node leaves the list for good, with the history of its GPUs. Its requests keep its name. If its program "
                "connects again, it enrols as a new node; revoke its credential to keep it out."
            ),
            run=_change_node(remove_node, gettext_lazy("%(node)s is removed.")),
            is_offered=is_removable,
            is_danger=True,
            removes_row=True,
        ),
    )

    @property
    def media(self) -> forms.Media:
        return super().media + forms.Media(css={"all": ["muster/nodes.css"]})

    def get_changelist(self, request: HttpRequest, **kwargs: object) -> type[RowList]:
        return NodeList

    def get_queryset(self, request: HttpRequest) -> QuerySet[Node]:
        nodes: QuerySet[Node] = super().get_queryset(request)
        nodes = nodes.select_related("provider", "presence", "credential").exclude(provider__state=ProviderState.DELETED)
        present = Gpu.objects.filter(gone_at=None).order_by("index", "own_id")
        return with_clock(nodes.prefetch_related(Prefetch("gpus", present, to_attr="present_gpus")))

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list below one chip for each state that there is."""
        context = {"chips": self._list_chips(request), **(extra_context or {})}
        return super().changelist_view(request, context)

    def _list_chips(self, request: HttpRequest) -> list[Chip]:
        counts, asked = Counter(_conditions_of(request).values()), request.GET.copy()
        current = asked.pop("state", [""])[-1]
        asked.pop("p", None)

        def link(value: str) -> str:
            query = asked.copy()
            if value:
                query["state"] = value
            return f"?{query.urlencode()}"

        found = [Chip(_("All"), counts.total(), link(""), not current)]
        for condition, word in WORDS.items():
            if counts[condition] or condition.value == current:
                chip = Chip(str(word), counts[condition], link(condition.value), condition.value == current, condition.value)
                found.append(chip)
        return found

    @admin.display(description=gettext_lazy("State"))
    def show_standing(self, node: Node) -> SafeString:
        standing = read_standing(node, now=clock_of(node))
        html = '<span class="mst-pair"><span class="mst-badge mst-condition-{}">{}</span><small>{}</small></span>'
        is_plain = standing.condition in (Condition.READY, Condition.BUSY)  # the column of slots says the same
        return format_html(html, standing.condition, standing.label, "" if is_plain else standing.text)

    @column(gettext_lazy("GPUs"), ordering="gpu_name")
    def show_gpus(self, node: Any) -> str:  # Any: carries its GPUs, here and below
        models = Counter(gpu.model or _("GPU") for gpu in node.present_gpus)
        return ", ".join(f"{name} × {count}" if count > 1 else name for name, count in models.items()) or "–"

    @column(gettext_lazy("Memory"), ordering="presence__vram_used_mb")
    def show_memory(self, node: Any) -> SafeString | str:
        memory = node.view.memory
        if memory is None:
            return "–"
        return SafeString(render_to_string("admin/muster/memory_bar.html", {"memory": memory, "is_small": True}))

    @column(gettext_lazy("Utilisation"), ordering="presence__gpu_util_percent")
    def show_utilisation(self, node: Any) -> SafeString | str:
        loads = [gpu.load_percent for gpu in node.present_gpus if gpu.load_percent is not None]
        if not loads:
            return "–"
        context = {"percent": sum(loads) / len(loads), "path": node.load_path, "node": node.name}
        return SafeString(render_to_string("admin/muster/nodes_load.html", context))

    @column(gettext_lazy("Models"))
    def show_models(self, node: Any) -> SafeString:
        most = limits().nodes.page_chips
        loading = {one.model: one.percent for one in node.view.changing if one.state == "loading"}
        names = [*node.model_names, *(name for name in loading if name not in node.model_names)]
        chips = [{"name": name, "is_loading": name in loading, "percent": loading.get(name)} for name in names]
        context = {"chips": chips[:most], "beyond": chips[most:]}
        return SafeString(render_to_string("admin/muster/nodes_models.html", context))

    @column(gettext_lazy("Slots"), ordering="presence__active_requests")
    def show_slots(self, node: Node) -> str:
        return f"{presence_of(node).active_requests} / {node.max_concurrent}"

    @column(gettext_lazy("Runner"), ordering="agent_version")
    def show_runner(self, node: Node) -> SafeString | str:
        hint = hint_at_runner(node)
        if not hint:
            return node.agent_version or "–"
        html = '<span class="mst-pair">{}<small class="mst-older" title="{}">{}</small></span>'
        return format_html(html, node.agent_version, hint, _("older than the server"))

    @column(gettext_lazy("Last seen"), ordering="presence__last_heartbeat_at")
    def show_heartbeat(self, node: Node) -> str:
        return describe_age(heartbeat_age_s(presence_of(node), now=clock_of(node)))

    # Changes of many

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Whether this session may cordon and drain; ``actions`` ask for it."""
        return self.may_change(request) and bool(self.admin_site.may_act(request))

    @admin.action(description=gettext_lazy("Cordon"), permissions=["operate"])
    def cordon_nodes(self, request: HttpRequest, nodes: QuerySet[Node]) -> HttpResponse | None:
        return self._change_many(request, nodes, "cordon_nodes", CORDON)

    @admin.action(description=gettext_lazy("Uncordon"), permissions=["operate"])
    def uncordon_nodes(self, request: HttpRequest, nodes: QuerySet[Node]) -> HttpResponse | None:
        return self._change_many(request, nodes, "uncordon_nodes", UNCORDON)

    @admin.action(description=gettext_lazy("Drain"), permissions=["operate"])
    def drain_nodes(self, request: HttpRequest, nodes: QuerySet[Node]) -> HttpResponse | None:
        return self._change_many(request, nodes, "drain_nodes", DRAIN)

    @admin.action(description=gettext_lazy("Undrain"), permissions=["operate"])
    def undrain_nodes(self, request: HttpRequest, nodes: QuerySet[Node]) -> HttpResponse | None:
        return self._change_many(request, nodes, "undrain_nodes", UNDRAIN)

    def _change_many(
        self, request: HttpRequest, nodes: QuerySet[Node], action: str, change: RowChange
    ) -> HttpResponse | None:  # fmt: skip
        """Ask once for all, then change each by its service; None = done, and the list follows."""
        most = limits().nodes.bulk_nodes
        rows = [node for node in nodes[: most + 1] if change.is_offered(node)]
        if nodes.count() > most:
            messages.error(request, _("Choose at most %(most)d nodes at once. Nothing was changed.") % {"most": most})
            return None
        if not rows:
            messages.warning(request, _("%(change)s: nothing to do for these nodes.") % {"change": change.label})
            return None
        is_confirmed = "confirmed" in request.POST
        form = (change.form or forms.Form)(request.POST if is_confirmed else None)
        if is_confirmed and form.is_valid() and self._run_for_all(request, rows, change, form):
            return None
        title = ngettext("%(change)s: %(count)d node?", "%(change)s: %(count)d nodes?", len(rows))
        context = {
            "title": title % {"change": change.label, "count": len(rows)},
            "explanation": change.explanation,
            "button": change.label,
            "is_danger": change.is_danger,
            "form": form,
            "back_url": reverse("admin:nodes_node_changelist"),
            "rows": rows,
            "action": action,
            "checkbox_name": ACTION_CHECKBOX_NAME,
        }
        return self.render_page(request, "admin/muster/nodes_confirm.html", context)

    def _run_for_all(self, request: HttpRequest, rows: Sequence[Node], change: RowChange, form: forms.Form) -> bool:
        """Change the rows one after another; False when the first of them is refused, and nothing was changed."""
        done = 0
        for node in rows:
            try:
                change.run(node, name_actor(request), form.cleaned_data)
            except ContractError as refusal:
                if not done:
                    form.add_error(None, ValidationError(str(refusal), code=refusal.code.value))
                    return False
                messages.error(request, f"{node.name}: {refusal}")
            else:
                done += 1
        text = ngettext("%(change)s: done for %(count)d node.", "%(change)s: done for %(count)d nodes.", done)
        messages.success(request, text % {"change": change.label, "count": done})
        return True

    # The page of one

    def get_urls(self) -> list[URLPattern]:
        tab = never_cache(self.admin_site.admin_view(self.tab_view))
        log = never_cache(self.admin_site.admin_view(self.log_view))
        own = [
            path("<path:object_id>/tab/<slug:tab>/", tab, name="nodes_node_tab"),
            path("<path:object_id>/log/", log, name="nodes_node_log"),
        ]
        return [*own, *super().get_urls()]

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        """Show the page of a node, with its first tab."""
        if object_id is None or request.method == "POST":  # nothing is edited here, and nodes come by themselves
            raise PermissionDenied
        return self.tab_view(request, object_id, next(iter(TABS)))

    def tab_view(self, request: HttpRequest, object_id: str, tab: str) -> HttpResponse:
        """Show the page of a node, with one tab."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        node = self.get_object(request, unquote(object_id))
        if node is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if tab not in TABS:
            raise Http404(_("The page of a node has no tab %(tab)s.") % {"tab": tab})
        span, before = choose_range(request.GET.get("range", "")), request.GET.get("before", "")
        context = {
            "title": node.name,
            "subtitle": TABS[tab],
            "original": node,
            "tabs": list_tabs(node, tab),
            "tab": tab,
            "tab_template": f"admin/muster/node_{tab}.html",
            "telemetry": (head := read_head(node, now=clock_of(node))).telemetry,
            "head": head,
            "is_fullwidth": "1",
            "may_change": self.may_change(request),
            "may_read_log": may(request.user, "nodes.view_nodelog"),
            **self._split_links(request, node),
            **read_tab(node, tab, span=span, before=before),
        }
        return self.render_page(request, "admin/muster/node.html", context)

    def _split_links(self, request: HttpRequest, node: Node) -> dict[str, list[ChangeLink]]:
        links = self.list_links(request, node)
        count = sum(change.is_offered(node) for change in self.row_changes if change.name in MAIN)
        main = links[:count] if self.may_change(request) else []
        return {"row_changes": main, "menu": links[len(main) :]}

    def list_links(self, request: HttpRequest, row: Node) -> list[ChangeLink]:
        """Return the changes that can be made at once, then those that others have to approve."""
        links = super().list_links(request, row)
        # To ask for an operation is a permission of its own: who has it need not be able to cordon or drain.
        if not (self.may_change(request) or may(request.user, "governance.add_operation")):
            return links
        if row.runner_id and row.op_level:
            links += [ChangeLink(label, propose(operation, row.runner_id), is_danger=False) for operation, label in PROPOSALS]
        forced = [ChangeLink(label, propose(operation, row.printed_id), is_danger=True) for operation, label in FORCED]
        return [*links, *forced]

    def log_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Have the node asked for its log, on a POST alone, and lead to the tab that shows it."""
        if not may(request.user, "nodes.view_nodelog") or not self.has_view_permission(request):
            raise PermissionDenied
        node = self.get_object(request, unquote(object_id))
        if node is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method == "POST":
            ask_log(node_id=node.pk, actor=name_actor(request))
        return HttpResponseRedirect(reverse("admin:nodes_node_tab", args=[node.pk, "logs"]))


def describe_age(age_s: float | None) -> str:
    """Return an age as an operator reads it: ``3 s ago``, ``5 min ago``, ``2 h ago``, ``4 d ago`` or ``never``."""
    if age_s is None:
        return _("never")
    units = ((120, 1, _("%(n)d s ago")), (7_200, 60, _("%(n)d min ago")), (172_800, 3_600, _("%(n)d h ago")))
    for limit_s, unit_s, text in units:
        if age_s < limit_s:
            return text % {"n": age_s // unit_s}
    return _("%(n)d d ago") % {"n": age_s // 86_400}
