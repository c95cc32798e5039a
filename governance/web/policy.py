"""The approval policy: what is in force, in words, the draft of the next version, and the freeze of everything."""

from __future__ import annotations

from datetime import UTC, datetime
from http import HTTPStatus

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.module_loading import import_string
from django.utils.translation import gettext as _
from django.views.decorators.http import require_http_methods, require_safe

from governance.errors import GovernanceError
from governance.models import PolicyVersion
from governance.operations import policies
from governance.operations.approvals import active_policy
from governance.operations.policies import list_policy_versions
from governance.people import may_propose
from governance.web.operations import KEY_WORDS
from governance.web.pages import approval_page, find_proposer, find_viewer, locate_operation, render_page, require_asker
from governance.web.policy_editor import Draft, describe_draft, list_presets, read_draft
from governance.web.rules import list_rules
from wire.optoken.approval import Key, Policy

Shown = dict[str, object]
"""What a template reads of one thing, by name."""


@require_safe
@approval_page
def show_policy(request: HttpRequest) -> HttpResponse:
    """Show the policy in force, its fingerprint, drafts and earlier versions, and which node holds which."""
    versions = list_policy_versions()
    adopted = [version for version in versions if version.state != PolicyVersion.State.DRAFT]
    found = active_policy()
    context: Shown = {
        "section": "policy",
        "may_propose": may_propose(request.user),
        "drafts": [version for version in versions if version.state == PolicyVersion.State.DRAFT],
        "versions": adopted,
        # Which node holds which version, {"name", "text"} each: governance itself knows no nodes.
        "pins": import_string(settings.GOVERNANCE_PINS)(),
    }
    if found is not None:
        # A new node confirms the first version, and follows the signed chain from there by itself.
        first = next(version.words for version in adopted if version.version == 1)
        context |= {**_describe_policy(*found), "first_words": first}
    return render_page(request, "approvals/policy.html", context)


def _describe_policy(row: PolicyVersion, policy: Policy) -> Shown:
    return {
        "row": row,
        "policy": policy,
        "words": row.words,
        "expires_at": datetime.fromtimestamp(policy.expires_at, UTC),
        "origins": sorted(policy.origins),
        "people": list_people(policy),
        "rules": list_rules(policy),
    }


@require_http_methods(["GET", "HEAD", "POST"])
@approval_page
def draft_policy(request: HttpRequest) -> HttpResponse:
    """Show the editor of the next version, opened with the one in force; ``step`` of a POST: preview, else draft it."""
    require_asker(request)
    found = active_policy()
    policy = found[1] if found else None
    sent = request.POST if request.method == "POST" else None
    draft, problem = read_draft(policy, sent), ""
    if sent is not None and sent.get("step") == "preview":
        return render_page(request, "approvals/policy_preview.html", describe_draft(draft, policy))
    if sent is not None and not (faults := draft.find_faults()):
        try:
            return _submit(request, draft)
        except GovernanceError as error:
            problem = error.message
    elif sent is not None:
        problem = faults.get("") or _("This policy is impossible. What is wrong stands beside the rules.")
    context = {
        "section": "policy",
        "policy": policy,
        "next_version": policy.ref.version + 1 if policy else 1,
        "problem": problem,
        "draft": draft,
        "presets": list_presets(draft),
        **describe_draft(draft, policy),
    }
    status = HTTPStatus.BAD_REQUEST if problem else HTTPStatus.OK
    return render_page(request, "approvals/policy_form.html", context, status=status)


def _submit(request: HttpRequest, draft: Draft) -> HttpResponse:
    operation = policies.draft_policy(**draft.build(), reason=draft.reason, proposer=find_proposer(request))
    messages.success(request, _("The draft waits for approvals. It is in force once enough of you have signed it."))
    return HttpResponseRedirect(locate_operation(operation.pk), status=HTTPStatus.SEE_OTHER)


def list_people(policy: Policy) -> list[Shown]:
    keys: dict[str, list[Key]] = {}
    for key in policy.keys.values():
        keys.setdefault(key.approver, []).append(key)
    return [
        {"name": name, "groups": ", ".join(sorted(groups)), "keys": [_show_key(key) for key in keys.get(name, [])]}
        for name, groups in sorted(policy.groups.items())
    ]


def _show_key(key: Key) -> Shown:
    kind = KEY_WORDS.get(key.kind, key.kind)
    return {"kind": kind, "thumbprint": key.thumbprint, "is_break_glass": key.is_break_glass}


# The freeze


@require_http_methods(["GET", "HEAD", "POST"])
@approval_page
def freeze(request: HttpRequest) -> HttpResponse:
    reason, problem = request.POST.get("reason", ""), ""
    if request.method == "POST":
        try:
            policies.freeze(user=find_viewer(request), reason=reason)
        except GovernanceError as error:
            problem = error.message
        else:
            messages.success(request, _("Everything is frozen."))
            return HttpResponseRedirect(reverse("approvals:inbox"), status=HTTPStatus.SEE_OTHER)
    status = HTTPStatus.CONFLICT if problem else HTTPStatus.OK
    return render_page(request, "approvals/freeze.html", {"reason": reason, "problem": problem}, status=status)
