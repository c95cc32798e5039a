"""The pages of model aliases: names that clients ask for, and the models that answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import ClassVar

from django import forms
from django.contrib import admin
from django.db.models import JSONField, QuerySet, Value
from django.http import HttpRequest
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from unfold.widgets import UnfoldAdminSelectWidget, UnfoldAdminTextareaWidget, UnfoldAdminTextInputWidget

from core.admin_pages import Created, CreatingAdmin, RowChange, Values, column
from core.limits import limits
from gateway.models import ModelAlias, Tenant
from gateway.routing import Target
from gateway.services.models import (
    TargetState,
    change_alias,
    create_alias,
    delete_alias,
    read_target_states,
    read_targets,
)

TARGETS_HELP = gettext_lazy(
    "One model to a line, then its weight: qwen3-8b 9. Without a weight: 1. The others stand in, heaviest first, "
    "when the chosen one cannot answer; a model of weight 0 only ever stands in."
)
STATE_WORDS = {
    TargetState.SERVED: gettext_lazy("served"),
    TargetState.NO_NODE: gettext_lazy("no node"),
    TargetState.NOT_ALLOWED: gettext_lazy("not allowed"),
}
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
        problem = _("Line %(line)s: the weight must be a whole number from 0 to %(most)s, not %(given)s.")
        raise forms.ValidationError(problem % {"line": number, "most": most, "given": last[:20]}, code="weight")
    return Target(" ".join(words), int(last))


class TargetsForm(forms.Form):
    """Where an alias leads."""

    targets = TargetsField(label=gettext_lazy("Models"), help_text=TARGETS_HELP)


class AliasForm(TargetsForm):
    """What is asked for a new alias."""

    name = forms.CharField(
        label=gettext_lazy("Name"),
        max_length=limits().gateway.model_name_chars,
        widget=UnfoldAdminTextInputWidget,
        help_text=gettext_lazy(
            "What clients ask for, such as gpt-4o-mini. It hides a model of the same name; "
            "called auto it takes the place of the gateway's own choice."
        ),
    )
    tenant = forms.ModelChoiceField(
        queryset=Tenant.objects.order_by("name"),
        required=False,
        widget=UnfoldAdminSelectWidget,
        label=gettext_lazy("For"),
        empty_label=gettext_lazy("Everybody"),
        help_text=gettext_lazy("A tenant’s own alias wins over one of the same name for everybody."),
    )
    field_order = ("name", "tenant", "targets")


def _change_targets(alias: ModelAlias, actor: str, values: Values) -> str:
    change_alias(alias_id=alias.pk, targets=values["targets"], actor=actor)
    return _("Changed where %(alias)s leads.") % {"alias": alias}


def _switch_off(alias: ModelAlias, actor: str, values: Values) -> str:
    change_alias(alias_id=alias.pk, is_active=False, actor=actor)
    return _("Switched %(alias)s off.") % {"alias": alias}


def _switch_on(alias: ModelAlias, actor: str, values: Values) -> str:
    change_alias(alias_id=alias.pk, is_active=True, actor=actor)
    return _("Switched %(alias)s on.") % {"alias": alias}


def _delete(alias: ModelAlias, actor: str, values: Values) -> str:
    name = str(alias)
    delete_alias(alias_id=alias.pk, actor=actor)
    return _("Deleted the alias %(alias)s.") % {"alias": name}


@admin.register(ModelAlias)
class AliasAdmin(CreatingAdmin):
    """Names that operators made for models."""

    list_display = ("name", "show_whom", "show_state", "show_targets", "show_changes")
    list_filter = ("is_active", "tenant")
    search_fields = ("name", "tenant__name", "targets")
    fields = ("name", "show_whom", "show_state", "show_targets", "created_at", "updated_at")
    readonly_fields = fields
    empty_words = gettext_lazy(
        "An alias is another name for models: clients ask for gpt-4o-mini, say, and one of yours answers. "
        "Of several models it shares requests out by weight, and the others stand in."
    )
    create_form = AliasForm
    create_title = gettext_lazy("New model alias")
    create_explanation = gettext_lazy(
        "Clients may ask for it within seconds. Every answer says in x-muster-model which model gave it."
    )
    row_changes: ClassVar[tuple[RowChange, ...]] = (
        RowChange(
            name="targets",
            label=gettext_lazy("Change models"),
            explanation=gettext_lazy("Takes effect within seconds, for requests that arrive from then on."),
            run=_change_targets,
            form=TargetsForm,
            read_initial=lambda alias: {"targets": read_targets(alias)},
        ),
        RowChange(
            name="off",
            label=gettext_lazy("Switch off"),
            explanation=gettext_lazy(
                "The name means what it would without this alias: an alias for everybody, a model, or nothing."
            ),
            run=_switch_off,
            is_offered=lambda alias: alias.is_active,
        ),
        RowChange(
            name="on",
            label=gettext_lazy("Switch on"),
            explanation=gettext_lazy("Clients may ask for it again within seconds."),
            run=_switch_on,
            is_offered=lambda alias: not alias.is_active,
        ),
        RowChange(
            name="delete",
            label=gettext_lazy("Delete"),
            explanation=gettext_lazy("The alias is gone for good. Requests under way end normally, and records keep its name."),
            run=_delete,
            is_danger=True,
            removes_row=True,
        ),
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[ModelAlias]:
        """Give every row the state of the models at this moment, so that no column asks for itself; once a page."""
        known = request.__dict__
        if "target_states" not in known:
            known["target_states"] = dict(read_target_states())
        states = Value(known["target_states"], output_field=JSONField())
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

    @column(gettext_lazy("For"), ordering="tenant__name")
    def show_whom(self, alias: ModelAlias) -> str:
        return alias.tenant.name if alias.tenant is not None else _("everybody")

    @column(gettext_lazy("State"), ordering="is_active")
    def show_state(self, alias: ModelAlias) -> SafeString:
        if not alias.is_active:
            return _make_badge("", _("off"))
        states = getattr(alias, "target_states", {})
        if any(states.get(target.model) == TargetState.SERVED for target in read_targets(alias)):
            return _make_badge("mst-available", _("on"))
        return _make_badge("mst-error", _("no model answers"))

    @column(gettext_lazy("Models"))
    def show_targets(self, alias: ModelAlias) -> SafeString:
        states = getattr(alias, "target_states", {})
        targets = read_targets(alias)
        lines = []
        for target in targets:
            state = TargetState(states.get(target.model, TargetState.NOT_ALLOWED))
            lines.append((target.model, _print_share(target, targets), STATE_STYLES[state], STATE_WORDS[state]))
        return format_html('<ul class="mst-targets">{}</ul>', format_html_join("", _LINE, lines))


def _make_badge(style: str, words: str) -> SafeString:
    return format_html('<span class="mst-badge {}">{}</span>', style, words)


def _print_share(target: Target, targets: Iterable[Target]) -> str:
    total = sum(other.weight for other in targets)
    return f"{100 * target.weight / total:.3g}\u00a0%" if target.weight and total else _("stands in")
