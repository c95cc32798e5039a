"""Operators' pages of GPUs: the list, and what one GPU does and can do, with its history."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django import forms
from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.formats import number_format
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from core.admin_pages import ShowingAdmin, column
from core.charts import RANGES, choose_range
from core.limits import limits
from nodes.admin.nodes import describe_age
from nodes.models import Gpu, clock_of, presence_of
from nodes.pages import Fact
from nodes.reports import read_replicas
from nodes.services.charts import chart_gpus
from nodes.services.conditions import print_moment, read_standing
from nodes.services.figures import read_gpu_figures, read_uptimes
from nodes.services.gpus import list_gpus, list_models


@admin.register(Gpu)
class GpuAdmin(ShowingAdmin):
    list_display = (
        *("show_name", "show_node", "show_state", "show_memory", "show_load", "show_temperature", "show_power"),
        *("show_models", "show_running", "show_seen"),
    )
    list_display_links = ("show_name",)
    list_filter = ("vendor", "node__provider")
    list_per_page = limits().nodes.page_nodes
    list_max_show_all = 0
    list_fullwidth = True
    search_fields = ("model", "own_id", "node__name")
    is_live = True
    empty_words = gettext_lazy("A GPU appears here when a node that has it is heard.")
    empty_link = (gettext_lazy("Add a node"), "admin:nodes_node_setup")
    removed_because = gettext_lazy("Its node has not named it for too long.")

    @property
    def media(self) -> forms.Media:
        return super().media + forms.Media(css={"all": ["muster/nodes.css"]})

    def get_queryset(self, request: HttpRequest) -> QuerySet[Gpu]:
        return list_gpus(with_gone=True).order_by(*self.get_ordering(request))

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        return ("node__name", "index", "own_id")

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        """Show what a GPU does, how models do on it, and its history."""
        if object_id is None or request.method == "POST" or not self.has_view_permission(request):
            raise PermissionDenied
        gpu = self.get_object(request, unquote(object_id))
        if gpu is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        span, now = choose_range(request.GET.get("range", "")), clock_of(gpu)
        context = {
            "title": str(gpu),
            "original": gpu,
            "standing": read_standing(gpu.node, now=now),
            "facts": [fact for fact in _list_facts(gpu) if fact.value],
            "figures": read_gpu_figures([gpu], now=now)[gpu.pk],
            "uptime_percent": 100 * read_uptimes([gpu.node_id]).get(gpu.node_id, 0.0),
            "memory": _measure(gpu),
            "models": list_models(gpu),
            "charts": chart_gpus([gpu], span, now=now),
            "ranges": [(name, label) for name, (label, _span) in RANGES.items()],
            "range": span,
            "is_fullwidth": "1",
        }
        return self.render_page(request, "admin/muster/gpu.html", context)

    @column(gettext_lazy("GPU"), ordering="model")
    def show_name(self, gpu: Gpu) -> str:
        return f"{gpu.index} · {gpu.model or gpu.own_id}"

    @column(gettext_lazy("Node"), ordering="node__name")
    def show_node(self, gpu: Gpu) -> SafeString:
        url = reverse("admin:nodes_node_change", args=[gpu.node_id])
        return format_html('<a class="mst-link" href="{}">{}</a>', url, gpu.node.name)

    @column(gettext_lazy("State"))
    def show_state(self, gpu: Gpu) -> SafeString:
        if gpu.gone_at is not None:
            return format_html('<span class="mst-badge mst-condition-offline">{}</span>', _("gone"))
        standing = read_standing(gpu.node, now=clock_of(gpu))
        return format_html('<span class="mst-badge mst-condition-{}">{}</span>', standing.condition, standing.label)

    @column(gettext_lazy("Memory"), ordering="vram_used_mb")
    def show_memory(self, gpu: Gpu) -> SafeString | str:
        memory = _measure(gpu)
        if memory is None:
            return "–"
        return SafeString(render_to_string("admin/muster/gpu_memory.html", {"memory": memory}))

    @column(gettext_lazy("Utilisation"), ordering="load_percent")
    def show_load(self, gpu: Gpu) -> SafeString | str:
        if gpu.load_percent is None:
            return "–"
        context = {"percent": gpu.load_percent, "path": "", "node": gpu.model}
        return SafeString(render_to_string("admin/muster/nodes_load.html", context))

    @column(gettext_lazy("Temperature"), ordering="temperature_c")
    def show_temperature(self, gpu: Gpu) -> str:
        return "–" if gpu.temperature_c is None else f"{gpu.temperature_c:.0f} °C"

    @column(gettext_lazy("Power"), ordering="power_w")
    def show_power(self, gpu: Gpu) -> str:
        return "–" if gpu.power_w is None else f"{gpu.power_w:.0f} W"

    @column(gettext_lazy("Models"))
    def show_models(self, gpu: Gpu) -> SafeString:
        chips = [{"name": name} for name in list_models(gpu)]
        most = limits().nodes.page_chips
        return SafeString(render_to_string("admin/muster/nodes_models.html", {"chips": chips[:most], "beyond": chips[most:]}))

    @column(gettext_lazy("Requests"), ordering="active_requests")
    def show_running(self, gpu: Gpu) -> str:
        return "–" if gpu.active_requests is None else str(gpu.active_requests)

    @column(gettext_lazy("Last reported"), ordering="last_seen_at")
    def show_seen(self, gpu: Gpu) -> str:
        return describe_age(max(0.0, (clock_of(gpu) - gpu.last_seen_at).total_seconds()))


def _measure(gpu: Gpu) -> dict[str, int] | None:
    """Return the memory of a GPU in MiB; None where it does not say how much it has."""
    if not gpu.vram_mb:
        return None
    used = gpu.vram_used_mb or 0
    return {"used_mb": used, "total_mb": gpu.vram_mb, "percent": round(100 * min(used, gpu.vram_mb) / gpu.vram_mb)}


def _list_facts(gpu: Gpu) -> Iterable[Fact]:
    node = reverse("admin:nodes_node_change", args=[gpu.node_id])
    yield Fact(_("Node"), gpu.node.name, url=node)
    if gpu.gone_at is not None:
        yield Fact(_("Gone since"), print_moment(gpu.gone_at), _("Its node no longer names it."), is_bad=True)
    number = {"index": gpu.index, "name": gpu.own_id}
    is_plain = gpu.own_id == str(gpu.index)
    yield Fact(_("On its node"), (_("number %(index)d") if is_plain else _("number %(index)d, %(name)s")) % number)
    yield Fact(_("Vendor"), gpu.vendor)
    yield Fact(
        _("Joined with"), gpu.group, _("GPUs that NVLink or one PCI switch joins have the same word.") if gpu.group else ""
    )
    yield Fact(_("Compute capability"), gpu.compute_capability)
    yield Fact(_("Driver"), gpu.driver_version)
    yield Fact(_("Runtime"), gpu.runtime_version)
    yield Fact(_("Requests at once"), "" if gpu.max_batch is None else str(gpu.max_batch))
    tokens = gpu.max_context_tokens
    yield Fact(
        _("Context"), "" if tokens is None else _("%(count)s tokens") % {"count": number_format(tokens, force_grouping=True)}
    )
    here = [one for one in read_replicas(presence_of(gpu.node).replicas) if gpu.index in one.gpus]
    yield Fact(_("Replicas on it"), ", ".join(f"{one.model} ({one.engine})" if one.engine else one.model for one in here))
    yield Fact(_("Models that it cannot run"), ", ".join(gpu.node.excluded_models))
    yield Fact(_("First reported"), print_moment(gpu.first_seen_at))
    yield Fact(_("GPU ID"), gpu.printed_id)
