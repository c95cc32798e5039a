"""The approval policy: what is in force, in words, the draft of the next version, and the freeze of everything."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import groupby

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import reverse
from django.utils.dateparse import parse_date
from django.utils.module_loading import import_string
from django.views.decorators.http import require_http_methods, require_safe

from governance.errors import GovernanceError, InvalidProposal
from governance.models import ApproverKey, PolicyVersion
from governance.operations import policies
from governance.operations.approvals import active_policy
from governance.operations.policies import ApproverChoice, list_policy_versions
from governance.web.operations import KEY_WORDS
from governance.web.pages import approval_page, find_proposer, find_viewer, locate_operation, render_page
from wire.optoken.approval import BREAK_GLASS, Key, OperationClass, Policy
from wire.optoken.documents import DEFAULT_CLASSES

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
        "classes": list_classes(policy),
    }


@require_http_methods(["GET", "HEAD", "POST"])
@approval_page
def draft_policy(request: HttpRequest) -> HttpResponse:
    """Show the form of the next version, prefilled with the one in force; draft it on POST."""
    found = active_policy()
    policy = found[1] if found else None
    problem = ""
    if request.method == "POST":
        try:
            return _draft(request, policy)
        except GovernanceError as error:
            problem = error.message
    sent = request.POST if request.method == "POST" else None
    is_solo = policy is not None and any(found.solo for found in policy.classes.values())
    context = {
        "section": "policy",
        "policy": policy,
        "next_version": policy.ref.version + 1 if policy else 1,
        "problem": problem,
        "people": _list_offered(policy, sent),
        "thresholds": _list_thresholds(policy, sent),
        "is_solo": "solo" in sent if sent is not None else is_solo,
        "expires": sent.get("expires", "") if sent else "",
        "reason": sent.get("reason", "") if sent else "",
    }
    status = HTTPStatus.BAD_REQUEST if problem else HTTPStatus.OK
    return render_page(request, "approvals/policy_form.html", context, status=status)


def _draft(request: HttpRequest, policy: Policy | None) -> HttpResponse:
    sent, classes = request.POST, _base_classes(policy)
    is_solo = "solo" in sent
    thresholds = {} if is_solo else _read_thresholds(sent, classes)
    # Whether it is solo is said by the form, not by the classes in force.
    for members in classes.values():
        members["solo"] = False
    operation = policies.draft_policy(
        approvers=_read_approvers(sent),
        thresholds=thresholds,
        classes=classes,
        is_solo=is_solo,
        expires_at=_read_expiry(sent.get("expires", "")),
        reason=sent.get("reason", ""),
        proposer=find_proposer(request),
    )
    messages.success(request, "The draft waits for approvals. It is in force once enough of you have signed it.")
    return HttpResponseRedirect(locate_operation(operation.pk), status=HTTPStatus.SEE_OTHER)


def _read_approvers(sent: QueryDict) -> list[ApproverChoice]:
    ticked = [int(text) for text in sent.getlist("key") if text.isdecimal()]
    by_user: dict[int, tuple[str, list[int]]] = {}
    for key in ApproverKey.objects.filter(pk__in=ticked).select_related("user").order_by("pk"):
        by_user.setdefault(key.user.pk, (key.user.get_username(), []))[1].append(key.pk)
    if not by_user:
        raise InvalidProposal("Choose at least one key of one person.", param="approvers")
    found = []
    for user_id, (name, key_ids) in by_user.items():
        groups = {group.strip() for group in sent.get(f"groups-{user_id}", "").split(",")} - {""}
        found.append(ApproverChoice(name, tuple(sorted(groups)), tuple(key_ids)))
    return found


def _read_thresholds(sent: QueryDict, classes: Iterable[str]) -> dict[str, int]:
    found = {}
    for name in classes:
        text = sent.get(f"threshold-{name}", "")
        if not text.isdecimal() or not 1 <= int(text) <= 64:
            raise InvalidProposal(f"{name} needs a number of approvals from 1 to 64.", param="thresholds")
        found[name] = int(text)
    return found


def _read_expiry(text: str) -> datetime | None:
    if not text:
        return None
    try:
        day = parse_date(text)
    except ValueError:
        day = None
    if day is None:
        raise InvalidProposal("The day of expiry is no date; write it like 2030-12-31.", param="expires_at")
    return datetime(day.year, day.month, day.day, tzinfo=UTC)


def _base_classes(policy: Policy | None) -> dict[str, dict[str, object]]:
    """Return the classes that a draft starts from: those in force, so that what this form does not show is kept."""
    if policy is None:
        return {name: dict(members) for name, members in DEFAULT_CLASSES.items()}
    document = json.loads(policy.raw)
    named = {operation for found in policy.classes.values() for operation in found.operations}
    # Operations that no class in force names, because they are newer than the policy, come with the classes of a new
    # policy.
    newer = {
        name: dict(members) for name, members in DEFAULT_CLASSES.items() if name in settings.OPERATIONS and name not in named
    }
    # Left out of a policy without a key for it, the class comes back with the first such key.
    return {BREAK_GLASS: dict(DEFAULT_CLASSES[BREAK_GLASS]), **newer, **document["classes"]}


def _list_offered(policy: Policy | None, sent: QueryDict | None) -> list[Shown]:
    rows = ApproverKey.objects.filter(revoked_at=None, user__is_active=True).select_related("user")
    people = groupby(rows.order_by("user__username", "pk"), key=lambda key: (key.user.pk, key.user.get_username()))
    return [_offer_person(user_id, name, keys, policy, sent) for (user_id, name), keys in people]


def _offer_person(user_id: int, name: str, keys: Iterable[ApproverKey], policy: Policy | None, sent: QueryDict | None) -> Shown:
    ticked = set(sent.getlist("key")) if sent is not None else None
    groups = ", ".join(sorted(policy.groups.get(name, ()))) if policy else ""

    def is_ticked(key: ApproverKey) -> bool:
        if ticked is not None:
            return str(key.pk) in ticked
        return policy is None or key.keyid in policy.keys

    shown = [
        {
            "pk": key.pk, "kind": key.get_kind_display(), "label": key.label, "thumbprint": key.thumbprint[:16],
            "is_break_glass": key.is_break_glass, "is_ticked": is_ticked(key),
        }
        for key in keys
    ]  # fmt: skip
    named = sent.get(f"groups-{user_id}", "") if sent is not None else groups
    return {"pk": user_id, "name": name, "groups": named, "keys": shown}


def _list_thresholds(policy: Policy | None, sent: QueryDict | None) -> list[Shown]:
    found: list[Shown] = []
    for name, members in sorted(_base_classes(policy).items()):
        operations = members.get("operations")
        words = ", ".join(operations) if isinstance(operations, list) and operations != [name] else ""
        value = sent.get(f"threshold-{name}", "") if sent is not None else str(members.get("threshold", ""))
        found.append({"name": name, "operations": words, "value": value})
    return found


# In words

_UNITS = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))


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


def list_classes(policy: Policy) -> list[Shown]:
    return [
        {
            "name": name,
            "needs": say_needs(found, policy),
            "operations": ", ".join(sorted(found.operations)),
            "bounds": _say_bounds(found),
            "solo": found.solo,
            "is_break_glass": name == BREAK_GLASS,
        }
        for name, found in sorted(policy.classes.items())
    ]


def say_needs(found: OperationClass, policy: Policy) -> str:
    """Return who must approve, such as "2 of 3, not counting the requester; 1 of the group owners"."""
    able = {key.approver for key in policy.keys.values() if key.is_break_glass == (found.name == BREAK_GLASS)}
    needed = max(found.threshold, sum(found.factors.values()))
    words = [f"{needed} of {len(able)}, {'' if found.solo else 'not '}counting the requester"]
    words += [f"{count} of the group {group}" for group, count in sorted(found.factors.items())]
    if found.file_proofs:
        words.append(f"{found.file_proofs} with a key file")
    if found.device_bound:
        words.append("with keys that cannot be copied")
    if found.deny_threshold > 1:
        words.append(f"{found.deny_threshold} rejections end it")
    return "; ".join(words)


def _say_bounds(found: OperationClass) -> str:
    words = [f"waits {_say_duration(found.life_s)}", f"usable {_say_duration(found.usable_s)}"]
    if found.max_uses > 1:
        words.append(f"up to {found.max_uses} uses")
    if found.daily_cap:
        words.append(f"{found.daily_cap} a day and node")
    if found.proposers:
        words.append(f"asked for by {', '.join(found.proposers)} only")
    return "; ".join(words)


def _say_duration(seconds: int) -> str:
    size, unit = next((size, unit) for size, unit in _UNITS if seconds >= 2 * size or size == 1)
    return f"{seconds // size} {unit}"


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
            messages.success(request, "Everything is frozen.")
            return HttpResponseRedirect(reverse("approvals:inbox"), status=HTTPStatus.SEE_OTHER)
    status = HTTPStatus.CONFLICT if problem else HTTPStatus.OK
    return render_page(request, "approvals/freeze.html", {"reason": reason, "problem": problem}, status=status)
