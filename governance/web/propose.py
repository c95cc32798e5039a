"""Asking for an operation: choose it, fill it in, look at what it would mean, send it."""

from __future__ import annotations

import uuid
from http import HTTPStatus
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.views.decorators.http import require_http_methods

from governance.errors import GovernanceError
from governance.operations import proposals
from governance.operations.policies import active_policy
from governance.registry import OperationKind, find_kind
from governance.web.approvals import locate_operation
from governance.web.frame import approval_page, find_proposer, render_page
from governance.web.policy_words import say_needs
from governance.web.proposal_form import ProposalForm, read_prefill
from wire.ids import parse_id
from wire.optoken.approval import POLICY_CHANGE, Policy

REVIEW = "break-glass-review"
SENT_BY_US = frozenset({"csrfmiddlewaretoken", "step"})


@require_http_methods(["GET", "HEAD", "POST"])
@approval_page
def propose(request: HttpRequest) -> HttpResponse:
    """Show what can be asked for; with ``?operation=`` its form; ``step`` of a POST: look, edit or send."""
    sent = request.POST if request.method == "POST" else request.GET
    name = sent.get("operation", "")
    if not name or name == POLICY_CHANGE:
        # As the settings have them: what is asked for every day comes first.
        kinds = [find_kind(each) for each in settings.OPERATIONS if each != POLICY_CHANGE]
        return render_page(request, "approvals/propose.html", {"kinds": kinds})
    kind, found = find_kind(name), active_policy()
    policy = found[1] if found else None
    classes = _list_classes(name, policy)
    if request.method != "POST":
        return _show_form(request, kind, ProposalForm(kind, classes, initial=_prefill(request)))
    form = ProposalForm(kind, classes, request.POST)
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
    """Return the classes that cover an operation, the one of its own name first."""
    if policy is None:
        return []
    names = [name for name, found in policy.classes.items() if operation in found.operations]
    return sorted(names, key=lambda name: (name != operation, name))


def _prefill(request: HttpRequest) -> dict[str, Any]:
    found: dict[str, Any] = read_prefill(request.GET)
    return found


def _show_form(request: HttpRequest, kind: OperationKind, form: ProposalForm) -> HttpResponse:
    status = HTTPStatus.BAD_REQUEST if form.errors else HTTPStatus.OK
    return render_page(request, "approvals/propose_form.html", {"kind": kind, "form": form}, status=status)


def _show_preview(request: HttpRequest, kind: OperationKind, form: ProposalForm, policy: Policy | None) -> HttpResponse:
    wanted = kind.clean(form.read_targets(), form.read_params())
    rest = form.read_rest()
    rules = policy.classes.get(rest["op_class"] or kind.name) if policy else None
    context = {
        "description": kind.describe(wanted.targets, wanted.params),
        "impacts": kind.preview(wanted.targets, wanted.params),
        "reason": rest["reason"],
        "needed": say_needs(rules, policy) if rules and policy else "There is no policy for this; it cannot be approved.",
        "sent": [(name, value) for name, values in request.POST.lists() if name not in SENT_BY_US for value in values],
    }
    return render_page(request, "approvals/propose_preview.html", context)


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
