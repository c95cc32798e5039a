"""The pages of models: the list, a model, the catalogue and a load, and what an operator may change of a model."""

from __future__ import annotations

from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin, messages
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.http import urlencode
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.cache import never_cache
from unfold.widgets import (
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from core.admin_pages import Created, CreatingAdmin, Offer, RowChange, Text, Values, name_actor
from core.errors import ContractError
from core.limits import limits
from gateway.admin.callers import NameListField, limit_field
from gateway.admin.loads import LoadForm, describe_catalogue, describe_load, make_load_form, propose_load
from gateway.admin.model_pages import describe_list, describe_page
from gateway.models import Model
from gateway.services.compatibility import change_model_requirements, print_document, read_requirements
from gateway.services.errors import InvalidValue
from gateway.services.limits import CAPS, default_caps, model_caps
from gateway.services.models import (
    allow_model,
    change_model_canary,
    change_model_caps,
    change_model_details,
    change_model_prices,
    change_model_weights,
    disallow_model,
    find_model,
)
from gateway.values import Weights
from governance.web.pages import find_proposer
from nodes.services.hub import search_hub
from wire import COMMAND
from wire.ids import parse_id

DETAILS = ("fallbacks", "context_tokens", "tokenizer", "tidy", "resumes")


class ModelCapsForm(forms.Form):
    """The caps of a model."""

    max_tokens = limit_field(gettext_lazy("Most tokens to generate"), gettext_lazy("Empty: the installation's default."))
    max_prompt_chars = limit_field(
        gettext_lazy("Longest prompt in characters"), gettext_lazy("Empty: the installation's default.")
    )
    max_queue = limit_field(
        gettext_lazy("Longest queue"), gettext_lazy("How many requests may wait for a node. Empty: the installation's default.")
    )


class ModelDetailsForm(forms.Form):
    """What stands in for a model, and what clients are told of it."""

    fallbacks = NameListField(
        required=False,
        help_text=gettext_lazy(
            "Models that answer instead when this one has no node or cannot answer in time. One to a line, in order."
        ),
    )
    context_tokens = limit_field(
        gettext_lazy("Context window in tokens"), gettext_lazy("Shown to clients. Empty: what the nodes report.")
    )
    tokenizer = forms.CharField(
        max_length=limits().gateway.model_name_chars,
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy(
            "Folder below MUSTER_TOKENIZERS_DIR with its tokenizer.json, to count tokens without asking a node."
        ),
    )
    tidy = forms.BooleanField(
        required=False,
        label=gettext_lazy("Tidy chat streams"),
        widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy(
            "Put chunks right that strict clients cannot read: no role, ids of tool calls that are null or said again."
        ),
    )
    resumes = forms.BooleanField(
        required=False,
        label=gettext_lazy("Resume streams"),
        widget=UnfoldBooleanSwitchWidget,
        help_text=gettext_lazy(
            "When the node of a stream dies, have another one go on with its text. Clients may say otherwise."
        ),
    )


class ModelCanaryForm(forms.Form):
    """What the nodes of a model are asked now and then."""

    question = forms.CharField(
        max_length=limits().gateway.canary_question_chars,
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("Something every honest node answers alike, e.g. What is 17 times 3? Empty: nothing is asked."),
    )
    answer = forms.CharField(
        label=gettext_lazy("The answer contains"),
        max_length=limits().gateway.canary_answer_chars,
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("For example 51. Capital letters do not matter."),
    )


class ModelForm(ModelCapsForm):
    """What is asked for a model to allow."""

    name = forms.CharField(
        max_length=limits().gateway.model_name_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy("The model name clients send, e.g. llama3.2"),
    )
    field_order = ("name", *CAPS)


class ModelRequirementsForm(forms.Form):
    """What a GPU must have to run a model."""

    requirements = forms.CharField(
        required=False,
        max_length=limits().gateway.requirements_bytes,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 16, "spellcheck": "false"}),
        help_text=gettext_lazy(
            "JSON; memory in MiB, qualities are good, better and best. Empty: what nodes measured of the model counts."
        ),
    )


def _read_document(model: Model) -> Values:
    _source, needed = read_requirements(model)
    return {"requirements": print_document(model.name, needed) if needed is not None else ""}


def _require(model: Model, actor: str, values: Values) -> str:
    change_model_requirements(name=model.name, document=values["requirements"], actor=actor)
    return _("Changed what %(model)s needs.") % {"model": model.name}


PRICES = ("input_price", "cached_price", "output_price")


def _price_field(label: Text) -> forms.DecimalField:
    return forms.DecimalField(
        label=label,
        help_text=format_lazy(gettext_lazy("Of a million tokens, in {currency}. 0: free."), currency=settings.CURRENCY),
        min_value=0,
        max_value=limits().gateway.price,
        decimal_places=6,
        widget=UnfoldAdminTextInputWidget,
    )


class ModelPricesForm(forms.Form):
    """What the tokens of a model cost."""

    input_price = _price_field(gettext_lazy("Prompt"))
    cached_price = _price_field(gettext_lazy("Prompt, what the node had cached"))
    output_price = _price_field(gettext_lazy("Answer"))


PARTS = Weights.__struct_fields__


def _weight_field(label: Text, usual: float) -> forms.FloatField:
    return forms.FloatField(
        label=label,
        required=False,
        min_value=0,
        max_value=1,
        widget=UnfoldAdminTextInputWidget,
        help_text=format_lazy(gettext_lazy("From 0 to 1. Empty: {usual}, as the installation is set."), usual=f"{usual:g}"),
    )


class ModelWeightsForm(forms.Form):
    """By what the nodes of a model are scored."""

    load = _weight_field(gettext_lazy("Free slots"), limits().gateway.score_load)
    active = _weight_field(gettext_lazy("Few requests"), limits().gateway.score_active)
    latency = _weight_field(gettext_lazy("Speed"), limits().gateway.score_latency)
    reliability = _weight_field(gettext_lazy("Reliability"), limits().gateway.score_reliability)
    affinity = _weight_field(gettext_lazy("Affinity to session and prompt"), limits().gateway.score_affinity)


def _allow(model: Model, actor: str, values: Values) -> str:
    allow_model(name=model.name, actor=actor)
    return _("Clients may use %(model)s from now on.") % {"model": model.name}


def _disallow(model: Model, actor: str, values: Values) -> str:
    disallow_model(name=model.name, actor=actor)
    return _("Clients may not use %(model)s any more.") % {"model": model.name}


def _cap(model: Model, actor: str, values: Values) -> str:
    change_model_caps(name=model.name, actor=actor, **{name: values[name] for name in CAPS})
    return _("Changed the limits of %(model)s.") % {"model": model.name}


def _offer_raise(model: Model, values: Values) -> Offer:
    today, default = model_caps(model), default_caps()
    wanted = {name: values[name] or default[name] for name in CAPS}
    more = {name: value for name, value in wanted.items() if value > today[name]}
    return Offer(operation="limit-raise", target=f"model:{model.name}", params=more)


def _detail(model: Model, actor: str, values: Values) -> str:
    change_model_details(name=model.name, actor=actor, **{name: values[name] for name in DETAILS})
    return _("Changed the details of %(model)s.") % {"model": model.name}


def _price(model: Model, actor: str, values: Values) -> str:
    change_model_prices(name=model.name, actor=actor, **{name: values[name] for name in PRICES})
    return _("Changed the prices of %(model)s.") % {"model": model.name}


def _weigh(model: Model, actor: str, values: Values) -> str:
    given = {part: values[part] for part in PARTS if values[part] is not None}
    change_model_weights(name=model.name, weights=given, actor=actor)
    return _("Changed by what the nodes of %(model)s are scored.") % {"model": model.name}


def _ask_canary(model: Model, actor: str, values: Values) -> str:
    change_model_canary(name=model.name, actor=actor, question=values["question"], answer=values["answer"])
    text = _("Nodes are asked for %(model)s.") if values["question"] else _("Nodes are not asked for %(model)s.")
    return text % {"model": model.name}


@admin.register(Model)
class AllowListAdmin(CreatingAdmin):
    """Which models clients may use. Rows that are not allowed are names that nodes have declared."""

    search_fields = ("name",)
    empty_words = gettext_lazy(
        "Clients may use the models that are allowed here. Models that nodes have appear by themselves, not allowed."
    )
    change_form_outer_before_template = "admin/muster/model.html"
    create_form = ModelForm
    create_title = gettext_lazy("Allow a model")
    create_explanation = gettext_lazy(
        "Clients may ask for it within seconds, whether a node serves it yet or not. "
        "Caps above the installation's defaults need approval once there is a policy."
    )
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="allow",
            label=gettext_lazy("Allow"),
            explanation=gettext_lazy("Clients may use this model within seconds."),
            run=_allow,
            is_offered=lambda model: not model.allowed,
        ),
        RowChange(
            name="caps",
            label=gettext_lazy("Change limits"),
            explanation=gettext_lazy(
                "Takes effect within seconds, for requests that arrive from then on. "
                "Higher caps than the model has need approval once there is a policy."
            ),
            run=_cap,
            form=ModelCapsForm,
            find_offer=_offer_raise,
            read_initial=lambda model: {name: getattr(model, name) for name in CAPS},
        ),
        RowChange(
            name="details",
            label=gettext_lazy("Change details"),
            explanation=gettext_lazy("Takes effect within seconds, for requests that arrive from then on."),
            run=_detail,
            form=ModelDetailsForm,
            read_initial=lambda model: {name: getattr(model, name) for name in DETAILS},
        ),
        RowChange(
            name="prices",
            label=gettext_lazy("Change prices"),
            explanation=gettext_lazy(
                "Takes effect within seconds, for requests that arrive from then on. What was used until then keeps its cost."
            ),
            run=_price,
            form=ModelPricesForm,
            read_initial=lambda model: {name: getattr(model, name) for name in PRICES},
        ),
        RowChange(
            name="weights",
            label=gettext_lazy("Change weights"),
            explanation=format_lazy(
                gettext_lazy(
                    "Takes effect within seconds, for requests that arrive from then on. A request goes to the node with "
                    "the highest score; {muster} manage replay_routing says first what other weights would change."
                ),
                muster=COMMAND,
            ),
            run=_weigh,
            form=ModelWeightsForm,
            read_initial=lambda model: dict(model.score_weights),
        ),
        RowChange(
            name="requirements",
            label=gettext_lazy("Change requirements"),
            explanation=gettext_lazy(
                "Says which GPUs can run the model, on its page and in the API. Within a minute a node gets no "
                "requests for it any more of whose GPUs none can; what runs there ends normally."
            ),
            run=_require,
            form=ModelRequirementsForm,
            read_initial=_read_document,
        ),
        RowChange(
            name="canary",
            label=gettext_lazy("Set canary question"),
            explanation=gettext_lazy(
                "Gateways ask every node that serves the model now and then. A node whose answer does not contain the "
                "words gets no requests for the model until it answers rightly."
            ),
            run=_ask_canary,
            form=ModelCanaryForm,
            read_initial=lambda model: {"question": model.canary_question, "answer": model.canary_answer},
        ),
        RowChange(
            name="disallow",
            label=gettext_lazy("Disallow"),
            explanation=gettext_lazy(
                "New requests for it get MODEL_NOT_ALLOWED within seconds. Requests under way end normally."
            ),
            run=_disallow,
            is_offered=lambda model: model.allowed,
            is_danger=True,
        ),
    )

    def get_urls(self) -> list[URLPattern]:
        load = never_cache(self.admin_site.admin_view(self.load_view))
        found = never_cache(self.admin_site.admin_view(self.catalogue_view))
        # Django takes whatever follows for the id of a row.
        own = [path("catalogue/", found, name="gateway_catalogue"), path("load/", load, name="gateway_model_load")]
        return [*own, *super().get_urls()]

    def changelist_view(
        self,
        request: HttpRequest,
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        """Show every model that nodes have or that may be asked for, whether there is a row of it or not."""
        self._require_viewer(request)
        context = {"title": _("Models"), "may_change": self._may_act(request), **describe_list(request)}
        return self.render_page(request, "admin/muster/models.html", {**context, **(extra_context or {})})

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,  # Any: Django's template context
    ) -> HttpResponse:
        """Show the page of a model, the tab that ``?tab=`` names."""
        if request.method == "POST":
            raise PermissionDenied  # its changes have pages of their own
        self._require_viewer(request)
        row = self.get_object(request, unquote(object_id or ""))
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id or "")
        may_change = self._may_act(request)
        links = {change.name: self._confirm_url(row, change) for change in self.row_changes if change.is_offered(row)}
        context = {"title": row.name, "original": row, "may_change": may_change, "changes": links if may_change else {}}
        page = {**context, **describe_page(request, row), **(extra_context or {})}
        template = "model_underway" if request.GET.get("part") == "underway" else "model_page"
        return self.render_page(request, f"admin/muster/{template}.html", page)

    def catalogue_view(self, request: HttpRequest) -> HttpResponse:
        """Show the open models that nodes can fetch, and on which of them they fit; on POST have a node search its hub."""
        self._require_viewer(request)
        if request.method == "POST":
            return self._search_hub(request)
        return self.render_page(
            request, "admin/muster/catalogue.html", {"title": _("Catalogue"), **describe_catalogue(request)}
        )

    def _search_hub(self, request: HttpRequest) -> HttpResponse:
        text, through = request.POST.get("text", ""), request.POST.get("through", "")
        try:
            node_id = parse_id("node", through)
            if node_id is None:
                raise InvalidValue(_("Choose a node that is to search."), param="through")
            search_hub(node_id=node_id, text=text, actor=name_actor(request))
        except ContractError as refusal:
            messages.error(request, refusal.message)
        query = urlencode({"q": text, "through": through})
        return HttpResponseRedirect(f"{reverse('admin:gateway_catalogue')}?{query}#hub")

    def load_view(self, request: HttpRequest) -> HttpResponse:
        """Ask on GET where a model is to be loaded; on POST ask for its load, and lead to the page that follows it."""
        self._require_viewer(request)
        form = make_load_form(request)
        if request.method == "POST" and form.is_valid() and (row := self._propose_load(request, form)) is not None:
            return HttpResponseRedirect(reverse("admin:gateway_model_change", args=[row.pk]))
        return self.render_page(request, "admin/muster/load_model.html", describe_load(request, form))

    def _propose_load(self, request: HttpRequest, form: LoadForm) -> Model | None:
        try:
            return propose_load(form, proposer=find_proposer(request))
        except ContractError as refusal:
            form.blame(refusal)
            return None

    def _require_viewer(self, request: HttpRequest) -> None:
        if not self.has_view_permission(request):
            raise PermissionDenied

    def _may_act(self, request: HttpRequest) -> bool:
        return self.may_change(request) and bool(self.admin_site.may_act(request))

    def create(self, actor: str, values: Values) -> Created:
        return Created(row=allow_model(name=values["name"], actor=actor, **{name: values[name] for name in CAPS}))

    def find_offer(self, values: Values) -> Offer | None:
        """Offer to raise the caps of a model that nodes have declared. One that nobody knows yet is allowed first."""
        model = find_model(values["name"])
        if model is None:
            return None
        return _offer_raise(model, {name: values[name] or getattr(model, name) for name in CAPS})
