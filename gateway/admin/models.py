"""The page of the model allow-list, with what stands in for a model and what clients are told of it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, ClassVar

from django import forms
from django.conf import settings
from django.contrib import admin
from django.db.models import JSONField, QuerySet, Value
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.widgets import (
    UnfoldAdminSelectWidget,
    UnfoldAdminTextareaWidget,
    UnfoldAdminTextInputWidget,
    UnfoldBooleanSwitchWidget,
)

from core.admin_pages import Created, CreatingAdmin, Offer, RowChange, Values, column
from core.limits import limits
from gateway.admin.callers import NameListField, limit_field
from gateway.models import Model, ModelAlias, Tenant
from gateway.routing import Target
from gateway.services.compatibility import change_model_requirements, find_fits, print_document, read_requirements
from gateway.services.explanations import explain_waits
from gateway.services.limits import CAPS, default_caps, model_caps
from gateway.services.models import (
    TargetState,
    allow_model,
    change_alias,
    change_model_canary,
    change_model_caps,
    change_model_details,
    change_model_prices,
    change_model_weights,
    create_alias,
    delete_alias,
    disallow_model,
    find_model,
    read_target_states,
    read_targets,
)
from gateway.values import Weights
from nodes.services.availability import read_served_models

DETAILS = ("fallbacks", "context_tokens", "tokenizer", "tidy", "resumes")


class ModelCapsForm(forms.Form):
    """The caps of a model."""

    max_tokens = limit_field("Most tokens to generate", "Empty: the installation's default.")
    max_prompt_chars = limit_field("Longest prompt in characters", "Empty: the installation's default.")
    max_queue = limit_field("Longest queue", "How many requests may wait for a node. Empty: the installation's default.")


class ModelDetailsForm(forms.Form):
    """What stands in for a model, and what clients are told of it."""

    fallbacks = NameListField(
        required=False,
        help_text="Models that answer instead when this one has no node or cannot answer in time. One to a line, in order.",
    )
    context_tokens = limit_field("Context window in tokens", "Shown to clients. Empty: what the nodes report.")
    tokenizer = forms.CharField(
        max_length=limits().gateway.model_name_chars,
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text="Folder below MUSTER_TOKENIZERS_DIR with its tokenizer.json, to count tokens without asking a node.",
    )
    tidy = forms.BooleanField(
        required=False,
        label="Tidy chat streams",
        widget=UnfoldBooleanSwitchWidget,
        help_text="Put chunks right that strict clients cannot read: no role, ids of tool calls that are null or said again.",
    )
    resumes = forms.BooleanField(
        required=False,
        label="Resume streams",
        widget=UnfoldBooleanSwitchWidget,
        help_text="When the node of a stream dies, have another one go on with its text. Clients may say otherwise.",
    )


class ModelCanaryForm(forms.Form):
    """What the nodes of a model are asked now and then."""

    question = forms.CharField(
        max_length=limits().gateway.canary_question_chars,
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text="Something every honest node answers alike, e.g. What is 17 times 3? Empty: nothing is asked.",
    )
    answer = forms.CharField(
        label="The answer contains",
        max_length=limits().gateway.canary_answer_chars,
        required=False,
        widget=UnfoldAdminTextInputWidget,
        help_text="For example 51. Capital letters do not matter.",
    )


class ModelForm(ModelCapsForm):
    """What is asked for a model to allow."""

    name = forms.CharField(
        max_length=limits().gateway.model_name_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text="The model name clients send, e.g. llama3.2",
    )
    field_order = ("name", *CAPS)


class ModelRequirementsForm(forms.Form):
    """What a GPU must have to run a model."""

    requirements = forms.CharField(
        required=False,
        max_length=limits().gateway.requirements_bytes,
        widget=UnfoldAdminTextareaWidget(attrs={"rows": 16, "spellcheck": "false"}),
        help_text="JSON; memory in MiB, qualities are good, better and best. Empty: what nodes measured of the model counts.",
    )


def _read_document(model: Model) -> Values:
    _, needed = read_requirements(model)
    return {"requirements": print_document(model.name, needed) if needed is not None else ""}


def _require(model: Model, actor: str, values: Values) -> str:
    change_model_requirements(name=model.name, document=values["requirements"], actor=actor)
    return f"Changed what {model.name} needs."


PRICES = ("input_price", "cached_price", "output_price")


def _price_field(label: str) -> forms.DecimalField:
    return forms.DecimalField(
        label=label,
        help_text=f"Of a million tokens, in {settings.CURRENCY}. 0: free.",
        min_value=0,
        max_value=limits().gateway.price,
        decimal_places=6,
        widget=UnfoldAdminTextInputWidget,
    )


class ModelPricesForm(forms.Form):
    """What the tokens of a model cost."""

    input_price = _price_field("Prompt")
    cached_price = _price_field("Prompt, what the node had cached")
    output_price = _price_field("Answer")


PARTS = Weights.__struct_fields__


def _weight_field(label: str, usual: float) -> forms.FloatField:
    return forms.FloatField(
        label=label,
        required=False,
        min_value=0,
        max_value=1,
        widget=UnfoldAdminTextInputWidget,
        help_text=f"From 0 to 1. Empty: {usual:g}, as the installation is set.",
    )


class ModelWeightsForm(forms.Form):
    """By what the nodes of a model are scored."""

    load = _weight_field("Free slots", limits().gateway.score_load)
    active = _weight_field("Few requests", limits().gateway.score_active)
    latency = _weight_field("Speed", limits().gateway.score_latency)
    reliability = _weight_field("Reliability", limits().gateway.score_reliability)
    affinity = _weight_field("Affinity to session and prompt", limits().gateway.score_affinity)


def _allow(model: Model, actor: str, values: Values) -> str:
    allow_model(name=model.name, actor=actor)
    return f"Clients may use {model.name} from now on."


def _disallow(model: Model, actor: str, values: Values) -> str:
    disallow_model(name=model.name, actor=actor)
    return f"Clients may not use {model.name} any more."


def _cap(model: Model, actor: str, values: Values) -> str:
    change_model_caps(name=model.name, actor=actor, **{name: values[name] for name in CAPS})
    return f"Changed the caps of {model.name}."


def _offer_raise(model: Model, values: Values) -> Offer:
    today, default = model_caps(model), default_caps()
    wanted = {name: values[name] or default[name] for name in CAPS}
    more = {name: value for name, value in wanted.items() if value > today[name]}
    return Offer(operation="limit-raise", target=f"model:{model.name}", params=more)


def _detail(model: Model, actor: str, values: Values) -> str:
    change_model_details(name=model.name, actor=actor, **{name: values[name] for name in DETAILS})
    return f"Changed the details of {model.name}."


def _price(model: Model, actor: str, values: Values) -> str:
    change_model_prices(name=model.name, actor=actor, **{name: values[name] for name in PRICES})
    return f"Changed the prices of {model.name}."


def _weigh(model: Model, actor: str, values: Values) -> str:
    given = {part: values[part] for part in PARTS if values[part] is not None}
    change_model_weights(name=model.name, weights=given, actor=actor)
    return f"Changed by what the nodes of {model.name} are scored."


def _ask_canary(model: Model, actor: str, values: Values) -> str:
    change_model_canary(name=model.name, actor=actor, question=values["question"], answer=values["answer"])
    return f"Nodes are asked for {model.name}." if values["question"] else f"Nodes are not asked for {model.name}."


@admin.register(Model)
class AllowListAdmin(CreatingAdmin):
    """Which models clients may use. Rows that are not allowed are names that nodes have declared."""

    list_display = (
        "name", "show_state", "show_served", "show_max_tokens", "show_max_prompt", "show_queue", "show_fallbacks",
        "show_changes",
    )  # fmt: skip
    list_filter = ("allowed",)
    search_fields = ("name",)
    fields = (
        "name", "show_state", "show_nodes", "owned_by", "show_max_tokens", "show_max_prompt", "show_queue", "show_fallbacks",
        "show_context", "show_tokenizer", "tidy", "resumes", "show_weights", *PRICES, "canary_question", "canary_answer",
        "created_at", "updated_at",
    )  # fmt: skip
    readonly_fields = fields
    empty_words = "Clients may use the models that are allowed here. Models that nodes have appear by themselves, not allowed."
    change_form_outer_before_template = "admin/muster/model.html"
    create_form = ModelForm
    create_title = "Allow a model"
    create_explanation = (
        "Clients may ask for it within seconds, whether a node serves it yet or not. "
        "Caps above the installation's defaults need approval once there is a policy."
    )
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="allow",
            label="Allow",
            explanation="Clients may use this model within seconds.",
            run=_allow,
            is_offered=lambda model: not model.allowed,
        ),
        RowChange(
            name="caps",
            label="Change caps",
            explanation="Takes effect within seconds, for requests that arrive from then on. "
            "Higher caps than the model has need approval once there is a policy.",
            run=_cap,
            form=ModelCapsForm,
            find_offer=_offer_raise,
            read_initial=lambda model: {name: getattr(model, name) for name in CAPS},
        ),
        RowChange(
            name="details",
            label="Change details",
            explanation="Takes effect within seconds, for requests that arrive from then on.",
            run=_detail,
            form=ModelDetailsForm,
            read_initial=lambda model: {name: getattr(model, name) for name in DETAILS},
        ),
        RowChange(
            name="prices",
            label="Change prices",
            explanation="Takes effect within seconds, for requests that arrive from then on. What was used until then keeps "
            "its cost.",
            run=_price,
            form=ModelPricesForm,
            read_initial=lambda model: {name: getattr(model, name) for name in PRICES},
        ),
        RowChange(
            name="weights",
            label="Change weights",
            explanation="Takes effect within seconds, for requests that arrive from then on. A request goes to the node with "
            "the highest score; ./muster manage replay_routing says first what other weights would change.",
            run=_weigh,
            form=ModelWeightsForm,
            read_initial=lambda model: dict(model.score_weights),
        ),
        RowChange(
            name="requirements",
            label="Change requirements",
            explanation="Says which GPUs can run the model, on its page and in the API. Within a minute a node gets no "
            "requests for it any more of whose GPUs none can; what runs there ends normally.",
            run=_require,
            form=ModelRequirementsForm,
            read_initial=_read_document,
        ),
        RowChange(
            name="canary",
            label="Set canary question",
            explanation="Gateways ask every node that serves the model now and then. A node whose answer does not contain the "
            "words gets no requests for the model until it answers rightly.",
            run=_ask_canary,
            form=ModelCanaryForm,
            read_initial=lambda model: {"question": model.canary_question, "answer": model.canary_answer},
        ),
        RowChange(
            name="disallow",
            label="Disallow",
            explanation="New requests for it get MODEL_NOT_ALLOWED within seconds. Requests under way end normally.",
            run=_disallow,
            is_offered=lambda model: model.allowed,
            is_danger=True,
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Model]:
        """Give every row the names that nodes serve at this moment, so that no column asks for itself."""
        served = Value(sorted(read_served_models()), output_field=JSONField())
        queryset: QuerySet[Model] = super().get_queryset(request).annotate(served_now=served)
        return queryset

    def describe_row(self, request: HttpRequest, row: Model) -> dict[str, Any]:  # Any: Django's template context
        found, most = find_fits(row.name), limits().nodes.gpu_page_default_rows
        return {"compatibility": found, "fits": found.fits[:most], "fits_beyond": max(0, len(found.fits) - most)}

    def create(self, actor: str, values: Values) -> Created:
        return Created(row=allow_model(name=values["name"], actor=actor, **{name: values[name] for name in CAPS}))

    def find_offer(self, values: Values) -> Offer | None:
        """Offer to raise the caps of a model that nodes have declared. One that nobody knows yet is allowed first."""
        model = find_model(values["name"])
        if model is None:
            return None
        return _offer_raise(model, {name: values[name] or getattr(model, name) for name in CAPS})

    @column("State", ordering="allowed", label={"allowed": "success", "declared": "info"})
    def show_state(self, model: Model) -> str:
        return "allowed" if model.allowed else "declared"

    @column("Nodes", label={"served": "success", "no node": "warning"})
    def show_served(self, model: Model) -> str:
        return "served" if model.name in getattr(model, "served_now", ()) else "no node"

    @column("Nodes")
    def show_nodes(self, model: Model) -> str:
        wait = explain_waits([model.name])[model.name]
        return wait.reason if wait.is_starting else f"{wait.reason} {wait.advice}"

    @column("Max tokens", ordering="max_tokens")
    def show_max_tokens(self, model: Model) -> str:
        return _print_cap(model.max_tokens)

    @column("Max prompt", ordering="max_prompt_chars")
    def show_max_prompt(self, model: Model) -> str:
        return "default" if model.max_prompt_chars is None else f"{model.max_prompt_chars:,} chars"

    @column("Max queue", ordering="max_queue")
    def show_queue(self, model: Model) -> str:
        return _print_cap(model.max_queue)

    @column("Fallbacks")
    def show_fallbacks(self, model: Model) -> str:
        return ", ".join(model.fallbacks) or "none"

    @column("Context window")
    def show_context(self, model: Model) -> str:
        return "reported by the nodes" if model.context_tokens is None else f"{model.context_tokens:,} tokens"

    @column("Score weights")
    def show_weights(self, model: Model) -> str:
        return ", ".join(f"{part} {weight:g}" for part, weight in model.score_weights.items()) or "default"

    @column("Tokenizer")
    def show_tokenizer(self, model: Model) -> str:
        return model.tokenizer or "none"


def _print_cap(value: int | None) -> str:
    return "default" if value is None else f"{value:,}"


TARGETS_HELP = (
    "One model to a line, then its weight: qwen3-8b 9. Without a weight: 1. The others stand in, heaviest first, "
    "when the chosen one cannot answer; a model of weight 0 only ever stands in."
)
STATE_WORDS = {TargetState.NO_NODE: "no node"}
"""Where a page says it otherwise than the API."""
STATE_STYLES = {
    TargetState.SERVED: "mst-available",
    TargetState.NO_NODE: "mst-draining",
    TargetState.NOT_ALLOWED: "mst-error",
}
_LINE = '<li><span class="mst-name">{}</span> <span>{} <span class="mst-badge {}">{}</span></span></li>'
_NUMBER = re.compile(r"[-+]?[0-9]*[.,]?[0-9]+%?")


class TargetsField(forms.CharField):
    """Models with weights, one to a line. Cleans to a list of targets in the order in which they were given."""

    widget = UnfoldAdminTextareaWidget(attrs={"rows": 4, "placeholder": "qwen3-8b 9", "spellcheck": "false"})

    def clean(self, value: str) -> list[Target]:
        """Return the targets. Raises ValidationError, which says the line."""
        lines = super().clean(value).splitlines()
        return [_read_target(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]

    def prepare_value(self, value: object) -> object:
        if isinstance(value, list):
            return "\n".join(f"{target.model} {target.weight}" for target in value)
        return value


def _read_target(number: int, line: str) -> Target:
    *words, last = line.split()
    if not words or not _NUMBER.fullmatch(last):
        return Target(line)
    most = limits().gateway.alias_weight
    if not last.isdecimal() or len(last) > len(str(most)) or int(last) > most:
        problem = f"Line {number}: the weight must be a whole number from 0 to {most}, not {last[:20]}."
        raise forms.ValidationError(problem, code="weight")
    return Target(" ".join(words), int(last))


class TargetsForm(forms.Form):
    """Where an alias leads."""

    targets = TargetsField(label="Models", help_text=TARGETS_HELP)


class AliasForm(TargetsForm):
    """What is asked for a new alias."""

    name = forms.CharField(
        max_length=limits().gateway.model_name_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text="What clients ask for, such as gpt-4o-mini. It hides a model of the same name; "
        "called auto it takes the place of the gateway's own choice.",
    )
    tenant = forms.ModelChoiceField(
        queryset=Tenant.objects.order_by("name"),
        required=False,
        widget=UnfoldAdminSelectWidget,
        label="For",
        empty_label="Everybody",
        help_text="A tenant’s own alias wins over one of the same name for everybody.",
    )
    field_order = ("name", "tenant", "targets")


def _change_targets(alias: ModelAlias, actor: str, values: Values) -> str:
    change_alias(alias_id=alias.pk, targets=values["targets"], actor=actor)
    return f"Changed where {alias} leads."


def _switch_off(alias: ModelAlias, actor: str, values: Values) -> str:
    change_alias(alias_id=alias.pk, is_active=False, actor=actor)
    return f"Switched {alias} off."


def _switch_on(alias: ModelAlias, actor: str, values: Values) -> str:
    change_alias(alias_id=alias.pk, is_active=True, actor=actor)
    return f"Switched {alias} on."


def _delete(alias: ModelAlias, actor: str, values: Values) -> str:
    name = str(alias)
    delete_alias(alias_id=alias.pk, actor=actor)
    return f"Deleted the alias {name}."


@admin.register(ModelAlias)
class AliasAdmin(CreatingAdmin):
    """Names that operators made for models."""

    list_display = ("name", "show_whom", "show_state", "show_targets", "show_changes")
    list_filter = ("is_active", "tenant")
    search_fields = ("name", "tenant__name", "targets")
    fields = ("name", "show_whom", "show_state", "show_targets", "created_at", "updated_at")
    readonly_fields = fields
    empty_words = "An alias is another name for models: clients ask for gpt-4o-mini, say, and one of yours answers."
    create_form = AliasForm
    create_title = "New model alias"
    create_explanation = "Clients may ask for it within seconds. Every answer says in x-muster-model which model gave it."
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="targets",
            label="Change models",
            explanation="Takes effect within seconds, for requests that arrive from then on.",
            run=_change_targets,
            form=TargetsForm,
            read_initial=lambda alias: {"targets": read_targets(alias)},
        ),
        RowChange(
            name="off",
            label="Switch off",
            explanation="The name means what it would without this alias: an alias for everybody, a model, or nothing.",
            run=_switch_off,
            is_offered=lambda alias: alias.is_active,
        ),
        RowChange(
            name="on",
            label="Switch on",
            explanation="Clients may ask for it again within seconds.",
            run=_switch_on,
            is_offered=lambda alias: not alias.is_active,
        ),
        RowChange(
            name="delete",
            label="Delete",
            explanation="The alias is gone for good. Requests under way end normally, and records keep its name.",
            run=_delete,
            is_danger=True,
            removes_row=True,
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[ModelAlias]:
        """Give every row the state of the models at this moment, so that no column asks for itself."""
        states = Value(dict(read_target_states()), output_field=JSONField())
        queryset: QuerySet[ModelAlias] = super().get_queryset(request).select_related("tenant").annotate(target_states=states)
        return queryset

    def create(self, actor: str, values: Values) -> Created:
        tenant = values["tenant"]
        alias = create_alias(
            name=values["name"],
            tenant_name=tenant.name if tenant is not None else None,
            targets=values["targets"],
            actor=actor,
        )
        return Created(row=alias)

    @column("For", ordering="tenant__name")
    def show_whom(self, alias: ModelAlias) -> str:
        return alias.tenant.name if alias.tenant is not None else "everybody"

    @column("State", ordering="is_active", label={"on": "success", "off": "default", "no model answers": "danger"})
    def show_state(self, alias: ModelAlias) -> str:
        if not alias.is_active:
            return "off"
        states = getattr(alias, "target_states", {})
        is_served = any(states.get(target.model) == TargetState.SERVED for target in read_targets(alias))
        return "on" if is_served else "no model answers"

    @column("Models")
    def show_targets(self, alias: ModelAlias) -> SafeString:
        states = getattr(alias, "target_states", {})
        targets = read_targets(alias)
        lines = []
        for target in targets:
            state = TargetState(states.get(target.model, TargetState.NOT_ALLOWED))
            lines.append(
                (target.model, _print_share(target, targets), STATE_STYLES[state], STATE_WORDS.get(state, state.value))
            )
        return format_html('<ul class="mst-targets">{}</ul>', format_html_join("", _LINE, lines))


def _print_share(target: Target, targets: Iterable[Target]) -> str:
    total = sum(other.weight for other in targets)
    return f"{100 * target.weight / total:.3g}\u00a0%" if target.weight and total else "stands in"
