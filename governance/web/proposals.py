"""Asking for an operation: choose it, fill its form in, look at what it would mean, send it.

A kind may say what can be chosen (``governance.registry.OffersChoices``). The others are asked for by target names and JSON.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, cast

from django import forms
from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_http_methods

from core.limits import limits
from governance.errors import GovernanceError
from governance.operations import proposals
from governance.operations.approvals import (
    REVIEW,
    active_policy,
)
from governance.registry import OffersChoices, OperationKind, Request, find_kind
from governance.web.pages import approval_page, find_proposer, locate_operation, render_page, require_asker
from governance.web.rules import say_needs, tell_class
from wire.ids import parse_id
from wire.optoken.approval import MAX_TARGETS, POLICY_CHANGE, Policy

if TYPE_CHECKING:
    from django.utils.functional import _StrOrPromise as StrOrPromise

SENT_BY_US = frozenset({"csrfmiddlewaretoken", "step"})
LEVELS = ("danger", "caution", "ok")


@require_http_methods(["GET", "HEAD", "POST"])
@approval_page
def propose(request: HttpRequest) -> HttpResponse:
    """Show what can be asked for; with ``?operation=`` its form; ``step`` of a POST: look, edit or send."""
    require_asker(request)
    sent = request.POST if request.method == "POST" else request.GET
    name = sent.get("operation", "")
    if not name or name == POLICY_CHANGE:
        # As the settings have them: what is asked for every day comes first.
        kinds = [(find_kind(each), tell_class(each, ())) for each in settings.OPERATIONS if each != POLICY_CHANGE]
        does_change = tell_class(POLICY_CHANGE, ())
        return render_page(request, "approvals/propose.html", {"kinds": kinds, "does_change": does_change})
    kind, found = find_kind(name), active_policy()
    policy = found[1] if found else None
    classes = _list_classes(name, policy)
    if request.method != "POST":
        return _show_form(request, kind, ProposalForm(kind, classes, initial=read_prefill(request.GET)))
    form = ProposalForm(kind, classes, request.POST)
    if request.POST.get("step") == "preview":
        return _show_impact(request, kind, form, policy)
    if not form.is_valid() or request.POST.get("step") == "edit":
        return _show_form(request, kind, form)
    try:
        if request.POST.get("step") == "send":
            return _send(request, kind, form)
        return _show_preview(request, kind, form, policy)
    except GovernanceError as error:
        form.blame(error.param, error.message)
        return _show_form(request, kind, form)


def _list_classes(operation: str, policy: Policy | None) -> list[str]:
    if policy is None:
        return []
    names = [name for name, found in policy.classes.items() if operation in found.operations]
    return sorted(names, key=lambda name: (name != operation, name))


def _show_form(request: HttpRequest, kind: OperationKind, form: ProposalForm) -> HttpResponse:
    status = HTTPStatus.BAD_REQUEST if form.errors else HTTPStatus.OK
    return render_page(request, "approvals/propose_form.html", {"kind": kind, "form": form}, status=status)


def _show_preview(request: HttpRequest, kind: OperationKind, form: ProposalForm, policy: Policy | None) -> HttpResponse:
    wanted = kind.clean(form.read_targets(), form.read_params())
    rest = form.read_rest()
    context = {
        **_describe_impact(kind, wanted, rest["op_class"], policy),
        "reason": rest["reason"],
        "sent": [(name, value) for name, values in request.POST.lists() if name not in SENT_BY_US for value in values],
    }
    return render_page(request, "approvals/propose_preview.html", context)


def _show_impact(request: HttpRequest, kind: OperationKind, form: ProposalForm, policy: Policy | None) -> HttpResponse:
    """Answer with what it would mean as the form stands, for the panel beside it; what is missing yet is no error there."""
    # Why it is asked for has no part in that.
    is_whole = form.is_valid() or set(form.errors) <= {"reason"}
    context: dict[str, object] = {"is_whole": is_whole}
    if is_whole:
        try:
            wanted = kind.clean(form.read_targets(), form.read_params())
            context |= _describe_impact(kind, wanted, form.cleaned_data.get("op_class", ""), policy)
        except GovernanceError as error:
            context |= {"is_whole": False, "problem": error.message}
    return render_page(request, "approvals/propose_impact.html", context)


def _describe_impact(kind: OperationKind, wanted: Request, op_class: str, policy: Policy | None) -> dict[str, object]:
    rules = policy.classes.get(op_class or kind.name) if policy else None
    impacts = sorted(kind.preview(wanted.targets, wanted.params), key=lambda impact: LEVELS.index(impact.level))
    changes = [impact.memory for impact in impacts if impact.memory is not None]
    return {
        "description": kind.describe(wanted.targets, wanted.params),
        "impacts": impacts,
        "misfits": [change.node for change in changes if change.fits is False],
        "fitting": [change.node for change in changes if change.fits],
        "needed": say_needs(rules, policy) if rules and policy else _("There is no policy for this; it cannot be approved."),
    }


def _send(request: HttpRequest, kind: OperationKind, form: ProposalForm) -> HttpResponse:
    targets = form.read_targets()
    operation = proposals.propose(
        operation=kind.name,
        targets=targets,
        params=form.read_params(),
        proposer=find_proposer(request),
        reviews=_find_reviewed(kind.name, targets),
        **form.read_rest(),
    )
    return HttpResponseRedirect(locate_operation(operation.pk), status=HTTPStatus.SEE_OTHER)


def _find_reviewed(operation: str, targets: list[str]) -> uuid.UUID | None:
    return parse_id("op", targets[0]) if operation == REVIEW and len(targets) == 1 else None


# The form, made for each kind of operation

PARAM_PREFIX = "param-"
FieldSpec = Mapping[str, Any]  # Any: what each member holds is said at governance.registry.Choices
BY_HAND: FieldSpec = {"name": "", "label": "Parameters", "kind": "json", "required": False, "help": "A JSON object."}


def _make_moment(label: StrOrPromise, help_text: StrOrPromise) -> forms.DateTimeField:
    widget = forms.DateTimeInput({"type": "datetime-local"})
    return forms.DateTimeField(label=label, required=False, widget=widget, help_text=help_text)


class ProposalForm(forms.Form):
    """What, why and how. ``what`` and ``how`` are its fields by the sections of the page."""

    reason = forms.CharField(
        label=gettext_lazy("Why?"),
        max_length=limits().governance.operation_reason_chars,
        widget=forms.Textarea({"rows": 3}),
        help_text=gettext_lazy(
            "Approvers read this. At most 1,000 characters. Its digest is signed; the text itself is not part of the log."
        ),
    )
    op_class = forms.ChoiceField(label=gettext_lazy("Class of the policy"), required=False)
    not_before = _make_moment(gettext_lazy("Not before (UTC)"), gettext_lazy("Empty: at once."))
    not_after = _make_moment(gettext_lazy("Not after (UTC)"), gettext_lazy("Empty: as long as the policy allows."))
    max_uses = forms.IntegerField(
        label=gettext_lazy("Uses"),
        min_value=1,
        max_value=limits().governance.operation_uses,
        initial=1,
        help_text=gettext_lazy("More than one is a standing approval."),
    )
    stops_on_failure = forms.BooleanField(
        label=gettext_lazy("With several targets, stop at the first that fails"), required=False, initial=True
    )

    def __init__(self, kind: OperationKind, classes: Sequence[str], sent: QueryDict | None = None, **options: Any) -> None:
        super().__init__(sent, **options)
        self.fields["op_class"] = forms.ChoiceField(
            label=_("Class of the policy"), choices=[(name, name) for name in classes], required=False
        )
        if len(classes) < 2:
            del self.fields["op_class"]
        self._kind, self._what = kind, list[str]()
        offered = cast("Mapping[str, Any]", kind.choices() if isinstance(kind, OffersChoices) else {})
        self._rare = list[str]()
        self._add_targets(offered.get("targets"), offered.get("targets_label", "Targets"))
        self._add_params(offered.get("params"))

    def _add(self, name: str, field: forms.Field) -> None:
        self.fields[name] = field
        self._what.append(name)

    def _add_targets(self, offered: Sequence[tuple[str, str]] | None, label: str) -> None:
        if offered is None:
            widget = forms.Textarea({"rows": 2, "class": "mono", "spellcheck": "false"})
            text = _("One on each line, in the order in which they are dealt with. Operations of the control plane need none.")
            self._add("targets", forms.CharField(label=label, required=False, widget=widget, help_text=text))
        elif offered:
            field = forms.MultipleChoiceField(label=label, choices=list(offered), widget=forms.CheckboxSelectMultiple)
            field.initial = [value for value, _ in offered] if len(offered) == 1 else None
            field.is_list = True  # type: ignore[attr-defined]  # read by the template
            self._add("targets", field)

    def _add_params(self, offered: Sequence[FieldSpec] | None) -> None:
        specs: Sequence[FieldSpec] = [BY_HAND] if offered is None else offered
        for spec in specs:
            name = f"{PARAM_PREFIX}{spec['name']}"
            self._add(name, _make_field(spec))
            if spec.get("is_rare"):
                self._rare.append(name)

    @property
    def what(self) -> list[forms.BoundField]:
        """Targets and the parameters that most people fill in."""
        return [self[name] for name in self._what if name not in self._rare]

    @property
    def rare(self) -> list[forms.BoundField]:
        return [self[name] for name in self._rare]

    @property
    def is_rare_open(self) -> bool:
        """Whether something was said there, or is wrong there."""
        return any(field.errors or field.value() for field in self.rare)

    @property
    def is_how_open(self) -> bool:
        """Whether a window or more than one use was asked for, another class was chosen, or something is wrong there."""
        asked = [self[name].value() for name in ("not_before", "not_after")]
        is_many = str(self["max_uses"].value()) != str(self.fields["max_uses"].initial)
        is_other = "op_class" in self.fields and self["op_class"].value() not in {None, "", self._kind.name}
        return any(asked) or is_many or is_other or any(field.errors for field in self.how)

    @property
    def how(self) -> list[forms.BoundField]:
        names = ("op_class", "not_before", "not_after", "max_uses", "stops_on_failure")
        return [self[name] for name in names if name in self.fields]

    def clean_targets(self) -> list[str]:
        """Return the targets in their order. Refuses more than a statement can name."""
        given = self.cleaned_data["targets"]
        targets = [line.strip() for line in given.splitlines() if line.strip()] if isinstance(given, str) else list(given)
        if len(targets) > MAX_TARGETS:
            raise forms.ValidationError(_("At most %(most)s targets fit into one operation.") % {"most": MAX_TARGETS})
        return targets

    def read_targets(self) -> list[str]:
        return list(self.cleaned_data.get("targets", []))

    def read_params(self) -> dict[str, object]:
        """Return the parameters of a valid form; what was left empty is left out."""
        found: dict[str, object] = {}
        for name in self._what:
            if not name.startswith(PARAM_PREFIX):
                continue
            value = self.cleaned_data[name]
            if name == PARAM_PREFIX:
                found |= value or {}
            elif value is not None and value != "" and value is not False:
                found[name.removeprefix(PARAM_PREFIX)] = value
        return found

    def read_rest(self) -> dict[str, Any]:
        names = ("reason", "not_before", "not_after", "max_uses", "stops_on_failure")
        return {"op_class": self.cleaned_data.get("op_class", ""), **{name: self.cleaned_data[name] for name in names}}

    def blame(self, param: str | None, message: str) -> None:
        """Show the words of an error at the field it names."""
        place = param if param in {"op_class", "not_after", "reason", "targets"} else f"{PARAM_PREFIX}{param}"
        self.add_error(place if place in self.fields else None, message)


def _make_field(spec: FieldSpec) -> forms.Field:
    common = {"label": spec["label"], "help_text": spec.get("help", ""), "required": spec.get("required", True)}
    match spec.get("kind", "text"):
        case "number":
            common["help_text"] = " ".join(
                filter(None, [str(common["help_text"]), _say_bounds(spec.get("min"), spec.get("max"))])
            )
            return forms.IntegerField(min_value=spec.get("min"), max_value=spec.get("max"), **common)
        case "checkbox":
            return forms.BooleanField(**{**common, "required": False}, initial=bool(spec.get("initial")))
        case "select":
            offered = list(spec["choices"])
            if "others" in spec:
                return forms.CharField(widget=SelectOrText(offered, spec["others"]), **common)
            has_blank = common["required"] or any(value == "" for value, _ in offered)
            return forms.ChoiceField(choices=offered if has_blank else [("", "–"), *offered], **common)
        case "json" | "list":
            widget = forms.Textarea({"rows": 4, "class": "mono", "spellcheck": "false"})
            return JsonField(is_list=spec["kind"] == "list", widget=widget, **common)
        case _:
            return forms.CharField(**common)


def _say_bounds(least: int | None, most: int | None) -> str:
    """Return the limit of a number, for beside its field."""
    if least is not None and most is not None:
        return _("From %(least)s to %(most)s.") % {"least": least, "most": most}
    return _("At least %(least)s.") % {"least": least} if least is not None else ""


class SelectOrText(forms.MultiWidget):
    """A list, and a text field under it for what the list does not hold; the text counts where there is one."""

    use_fieldset = False

    def __init__(self, offered: Sequence[tuple[str, str]], label: str) -> None:
        self._values = {value for value, _ in offered}
        named = _("%(label)s, by name") % {"label": label}
        text = forms.TextInput({"aria-label": named, "placeholder": named, "class": "other"})
        super().__init__({"": forms.Select(choices=offered), "other": text})

    def id_for_label(self, id_: str) -> str:
        # The label is for the list.
        return f"{id_}_0" if id_ else ""

    def use_required_attribute(self, initial: object) -> bool:
        # Either of the two is enough.
        return False

    def decompress(self, value: str | None) -> list[str | None]:
        return [value, None] if value is None or value in self._values else [None, value]

    def value_from_datadict(self, data: Any, files: Any, name: str) -> Any:  # Any: Django's signature
        chosen, text = super().value_from_datadict(data, files, name)
        return (text or "").strip() or chosen or ""


class JsonField(forms.CharField):
    """A JSON object or list, written by hand. No floats: they cannot be signed."""

    def __init__(self, *, is_list: bool, **common: Any) -> None:  # Any: Django's arguments
        super().__init__(**common)
        self._is_list = is_list

    def to_python(self, value: object) -> Any:  # Any: Django's signature
        text = super().to_python(value)
        if not text:
            return None
        try:
            found = json.loads(text, parse_float=_refuse_float, parse_constant=_refuse_float)
        except (ValueError, RecursionError) as error:
            raise forms.ValidationError(_("Not JSON that can be signed: %(why)s.") % {"why": error}) from None
        if not isinstance(found, list if self._is_list else dict):
            said = _("Write a JSON list, such as [0, 1].")
            raise forms.ValidationError(said if self._is_list else _('Write a JSON object, such as {"modelId": "tiny"}.'))
        return found

    def run_validators(self, value: object) -> None:
        """Skip the checks of text: this is an object by now."""


def _refuse_float(text: str) -> object:
    raise ValueError(f"{text} is no whole number")


def read_prefill(query: QueryDict) -> dict[str, object]:
    """Return the first values of a form from an address: ``target`` (repeated), names of fields, names of parameters."""
    found: dict[str, object] = {}
    for name in query:
        is_own = name in ProposalForm.base_fields or name.startswith(PARAM_PREFIX)
        found[name if is_own else f"{PARAM_PREFIX}{name}"] = query[name]
    targets = query.getlist("target")
    return {**found, "targets": targets} if targets else found
