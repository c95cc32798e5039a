"""The catalogue and the page that asks for a load: what they show, the form, and the proposal that comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from django import forms
from django.db import transaction
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextInputWidget, UnfoldBooleanSwitchWidget

from core.errors import ContractError
from core.limits import limits
from gateway.models import Model
from gateway.services.catalogue import (
    CatalogueFile,
    CatalogueModel,
    ModelKind,
    Need,
    RoomFit,
    Wanted,
    judge_rooms,
    list_entries,
    read_catalogue,
    want_file,
)
from gateway.services.models import remember_models
from governance.operations.approvals import active_policy
from governance.operations.proposals import Proposer, propose
from governance.web.rules import say_needs
from nodes.operations.load import KEEP, MODEL_LOAD, Room, read_rooms
from nodes.services.hub import list_searchers, read_search
from nodes.services.models import FleetModel, read_fleet_models
from wire.ids import parse_id

Context = dict[str, Any]  # Any: Django's template context
KINDS: Mapping[ModelKind, str | Promise] = {
    ModelKind.CHAT: gettext_lazy("Chat"),
    ModelKind.CODE: gettext_lazy("Code"),
    ModelKind.VISION: gettext_lazy("Vision"),
    ModelKind.EMBEDDING: gettext_lazy("Embeddings"),
    ModelKind.SPEECH: gettext_lazy("Speech to text"),
    ModelKind.IMAGE: gettext_lazy("Images"),
}
_CONTEXTS = (2_048, 4_096, 8_192, 16_384, 32_768, 65_536, 131_072)


def describe_catalogue(request: HttpRequest) -> Context:
    """Return the catalogue with the room for each model; three queries."""
    asked, rooms = request.GET, read_rooms()
    text = asked.get("q", "").replace("\x00", "").strip()[: limits().console.search_chars]
    kind, licence = asked.get("kind", ""), asked.get("licence", "")
    chosen = {"q": text, "kind": kind, "licence": licence, "fits": "1" if asked.get("fits") == "1" else ""}
    everything = read_catalogue()

    def locate(**changes: str) -> str:
        return "?" + urlencode([(name, value) for name, value in {**chosen, **changes}.items() if value])

    entries = list_entries(rooms, text=text, kind=kind, licence=licence, fits_only=bool(chosen["fits"]))
    return {
        "entries": entries,
        "kinds": KINDS,
        "kind_chips": [
            (_("All kinds"), locate(kind=""), not kind),
            *((label, locate(kind=name.value), name.value == kind) for name, label in KINDS.items()),
        ],
        "licences": sorted({model.licence for model in everything.models}),
        "licence": licence,
        "chosen": chosen,
        "text": text,
        "listed_on": everything.listed_on,
        "count": len(everything.models),
        "fits_url": locate(fits="" if chosen["fits"] else "1"),
        "is_narrowed": any(chosen.values()),
        "nodes": len(rooms),
        "context": limits().gateway.catalogue_context_tokens,
        "load_url": reverse("admin:gateway_model_load"),
        **_describe_search(asked.get("through", ""), text),
    }


def _describe_search(through: str, text: str) -> Context:
    """Return what a node found at its hub, and the nodes that can be asked; two queries, and two of an open search."""
    node_id = parse_id("node", through)
    search = read_search(node_id) if node_id is not None else None
    return {
        "search": search,
        "is_searching": search is not None and search.state == "asked",
        "searchers": list_searchers(),
        "search_text": search.text if search is not None else text,
    }


class LoadForm(forms.Form):
    """Where a model is to be loaded, how, and why."""

    model = forms.CharField(max_length=limits().gateway.model_name_chars, widget=forms.HiddenInput)
    node = forms.ChoiceField(label=gettext_lazy("Node"), widget=forms.RadioSelect)
    context = forms.TypedChoiceField(
        label=gettext_lazy("Context"),
        coerce=int,
        empty_value=None,
        required=False,
        widget=UnfoldAdminSelectWidget,
        help_text=gettext_lazy("Tokens of prompt and answer together. More takes more memory for each request."),
    )
    evict = forms.ChoiceField(
        label=gettext_lazy("Replace (unload first)"),
        required=False,
        widget=UnfoldAdminSelectWidget,
        help_text=gettext_lazy("What runs on it may finish first."),
    )
    keep = forms.BooleanField(
        label=gettext_lazy("Keep it loaded"),
        required=False,
        initial=True,
        widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy(
            "The node loads it again by itself after every restart, until an unload is approved. Approvers sign this."
        ),
    )
    reason = forms.CharField(
        label=gettext_lazy("Why?"),
        max_length=limits().governance.operation_reason_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Approvers read this."),
    )

    def __init__(self, rooms: Sequence[Room], wanted: Wanted | None, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rooms, self.wanted = rooms, wanted
        self.fits: list[RoomFit] = judge_rooms(rooms, wanted) if wanted is not None else judge_rooms(rooms, Wanted(0, 0))
        able = [fit.room for fit in self.fits if fit.room.runner_id]  # one that cannot now may later, and waits
        self.fields["node"].choices = [(room.runner_id, room.node) for room in able]  # type: ignore[attr-defined]  # a choice field
        loaded = sorted({model for room in able for model, _mb in room.loaded})
        self.fields["evict"].choices = [("", _("nothing")), *((name, name) for name in loaded)]  # type: ignore[attr-defined]  # as above

    def blame(self, refusal: ContractError) -> None:
        """Show the words of a refusal at the field that it names."""
        names = {"targets": "node", "reason": "reason", "evictModel": "evict", "maxContextLength": "context", KEEP: "keep"}
        self.add_error(names.get(refusal.param or ""), forms.ValidationError(refusal.message))


def make_load_form(request: HttpRequest) -> LoadForm:
    """Return the form of a load, filled in as the address asks for it: ``model``, ``node``, ``context``. Four queries."""
    said = request.POST if request.method == "POST" else request.GET
    name = said.get("model", "").strip()[: limits().gateway.model_name_chars]
    context = int(text) if (text := said.get("context", "")).isdecimal() and len(text) < len(str(2**31)) else None
    listed = read_catalogue().find(name)
    wanted = _find_wanted(name, listed, context)
    if request.method == "POST":
        form = LoadForm(read_rooms(), wanted, request.POST)
    else:
        why = _("Load %(model)s.") % {"model": listed[0].name if listed is not None else name}
        form = LoadForm(read_rooms(), wanted, initial={"model": name, "context": context or "", "reason": why})
        best = next((fit for fit in form.fits if fit.is_possible), None)
        asked = next((fit for fit in form.fits if fit.room.node == said.get("node")), best)
        form.initial["node"] = asked.room.runner_id if asked is not None else None
        form.initial["keep"] = asked is None or asked.room.keeps
        if asked is not None and len(asked.frees) == 1:
            form.initial["evict"] = asked.frees[0]
    most = listed[0].context_tokens if listed is not None else None
    sizes = [size for size in _CONTEXTS if most is None or size < most] + ([most] if most else [])
    form.fields["context"].choices = [("", _("as the node is set up")), *((size, f"{size:,}") for size in sizes)]  # type: ignore[attr-defined]  # as above
    return form


def _find_wanted(name: str, listed: tuple[CatalogueModel, CatalogueFile] | None, context: int | None) -> Wanted | None:
    if listed is not None:
        tokens = listed[0].limit_context(context or limits().gateway.catalogue_context_tokens)
        return want_file(*listed, context_tokens=tokens)
    size_mb = read_fleet_models(only=name)[name].size_mb if name else None
    return Wanted(size_mb, size_mb) if size_mb else None


def describe_load(request: HttpRequest, form: LoadForm) -> Context:
    """Return the page that asks for a load."""
    name = str(form["model"].value() or "")
    listed, found = read_catalogue().find(name), active_policy()
    policy = found[1] if found is not None else None
    rules = policy.classes.get(MODEL_LOAD.name) if policy is not None else None
    fleet = read_fleet_models(only=name).get(name, FleetModel(name)) if name else FleetModel("")
    context_tokens = form["context"].value() or limits().gateway.catalogue_context_tokens
    tokens = listed[0].limit_context(int(context_tokens)) if listed is not None and str(context_tokens).isdecimal() else None
    params = {"operation": MODEL_LOAD.name, "modelId": name, "reason": str(form["reason"].value() or "")}
    node = str(form["node"].value() or "")
    return {
        "title": _("Load a model"),
        "form": form,
        "name": name,
        "entry": listed[0] if listed is not None else None,
        "file": listed[1] if listed is not None else None,
        "need": _split_need(listed, tokens),
        "tokens": tokens,
        "fleet": fleet,
        "fits": form.fits[: limits().gateway.page_places],
        "fits_beyond": max(0, len(form.fits) - limits().gateway.page_places),
        "loaded_on": {place.node_id for place in fleet.loaded},
        "has_policy": policy is not None,
        "needed": say_needs(rules, policy) if rules is not None and policy is not None else "",
        "proposal_url": f"{reverse('approvals:propose')}?{urlencode({**params, **({'target': node} if node else {})})}",
        "row": Model.objects.filter(name=name).first(),
    }


def _split_need(listed: tuple[CatalogueModel, CatalogueFile] | None, tokens: int | None) -> Need | None:
    if listed is None or tokens is None:
        return None
    model, file = listed
    return model.estimate(file, context_tokens=tokens, has_gpu=True)


@transaction.atomic
def propose_load(form: LoadForm, *, proposer: Proposer) -> Model:
    """Ask for the load that a valid form describes, and return the model, whose page follows it.

    Raises ContractError, as ``governance.operations.proposals.propose`` does.
    """
    said = form.cleaned_data
    params: dict[str, object] = {"modelId": said["model"]}
    if said["context"]:
        params["maxContextLength"] = said["context"]
    if said["evict"]:
        params["evictModel"] = said["evict"]
    if said["keep"]:
        params[KEEP] = True
    remember_models(names=[said["model"]])
    propose(operation=MODEL_LOAD.name, targets=[said["node"]], params=params, reason=said["reason"], proposer=proposer)
    return Model.objects.get(name=said["model"])
