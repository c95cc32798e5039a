"""The approval policy: what is in force, in words, and the draft of the next version."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from itertools import groupby

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.utils.dateparse import parse_date
from django.utils.module_loading import import_string
from django.views.decorators.http import require_http_methods, require_safe

from governance.errors import GovernanceError, InvalidProposal
from governance.models import ApproverKey, PolicyVersion
from governance.operations import policies
from governance.operations.policies import ApproverChoice, active_policy
from governance.operations.reading import list_policy_versions
from governance.web.approvals import locate_operation
from governance.web.frame import approval_page, find_proposer, render_page
from governance.web.policy_words import list_classes, list_people
from wire.optoken.approval import BREAK_GLASS, Policy, policy_words
from wire.optoken.proposal import DEFAULT_CLASSES


@dataclass(frozen=True, slots=True)
class ShownVersion:
    """A version and its fingerprint as twelve words."""

    row: PolicyVersion
    words: str


@dataclass(frozen=True, slots=True)
class OfferedKey:
    """A key that a draft may name."""

    pk: int
    kind: str
    label: str
    thumbprint: str
    is_break_glass: bool
    is_ticked: bool


@dataclass(frozen=True, slots=True)
class OfferedPerson:
    """Somebody with keys that a draft may name. ``groups``: with commas."""

    pk: int
    name: str
    groups: str
    keys: list[OfferedKey]


@dataclass(frozen=True, slots=True)
class OfferedThreshold:
    """How many a class needs in the draft."""

    name: str
    operations: str
    value: str


@require_safe
@approval_page
def show_policy(request: HttpRequest) -> HttpResponse:
    """Show the policy in force, its fingerprint, drafts and earlier versions, and which box holds which."""
    versions = [ShownVersion(row, policy_words(row.sha256)) for row in list_policy_versions()]
    adopted = [version for version in versions if version.row.state != PolicyVersion.State.DRAFT]
    found = active_policy()
    context: dict[str, object] = {
        "section": "policy",
        "drafts": [version for version in versions if version.row.state == PolicyVersion.State.DRAFT],
        "versions": adopted,
        "pins": read_pins(),
    }
    if found is not None:
        # A new box confirms the first version, and follows the signed chain from there by itself.
        first = next(version.words for version in adopted if version.row.version == 1)
        context |= {**_describe_policy(*found), "first_words": first}
    return render_page(request, "approvals/policy.html", context)


def _describe_policy(row: PolicyVersion, policy: Policy) -> dict[str, object]:
    return {
        "row": row,
        "policy": policy,
        "words": policy_words(policy.ref.sha256),
        "expires_at": datetime.fromtimestamp(policy.expires_at, UTC),
        "origins": sorted(policy.origins),
        "people": list_people(policy),
        "classes": list_classes(policy),
    }


def read_pins() -> list[Mapping[str, str]]:
    """Return which box holds which version, {"name", "text"} each, as the function says that ``GOVERNANCE_BOXES`` names."""
    path = getattr(settings, "GOVERNANCE_BOXES", "")
    return list(import_string(path)()) if path else []


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
    context = {
        "section": "policy",
        "policy": policy,
        "next_version": policy.ref.version + 1 if policy else 1,
        "problem": problem,
        "people": _list_offered(policy, sent),
        "thresholds": _list_thresholds(policy, sent),
        "is_solo": "solo" in sent if sent is not None else _is_solo(policy),
        "expires": sent.get("expires", "") if sent else "",
        "reason": sent.get("reason", "") if sent else "",
    }
    status = HTTPStatus.BAD_REQUEST if problem else HTTPStatus.OK
    return render_page(request, "approvals/policy_form.html", context, status=status)


def _draft(request: HttpRequest, policy: Policy | None) -> HttpResponse:
    sent, classes = request.POST, _base_classes(policy)
    is_solo = "solo" in sent
    thresholds = {} if is_solo else _read_thresholds(sent, classes)
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


def _is_solo(policy: Policy | None) -> bool:
    return policy is not None and any(found.solo for found in policy.classes.values())


def _read_approvers(sent: QueryDict) -> list[ApproverChoice]:
    ticked = [int(text) for text in sent.getlist("key") if text.isdecimal()]
    by_user: dict[int, tuple[str, list[int]]] = {}
    for key in ApproverKey.objects.filter(pk__in=ticked).select_related("user").order_by("pk"):
        by_user.setdefault(key.user.pk, (key.user.get_username(), []))[1].append(key.pk)
    if not by_user:
        raise InvalidProposal("Choose at least one key of one person.", param="approvers")
    return [
        ApproverChoice(name, _read_groups(sent.get(f"groups-{user_id}", "")), tuple(key_ids))
        for user_id, (name, key_ids) in by_user.items()
    ]


def _read_groups(text: str) -> tuple[str, ...]:
    return tuple(sorted({group.strip() for group in text.split(",")} - {""}))


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
    """Return the classes that a draft starts from: those in force, so that what this form does not show is kept.

    The class break-glass is left out of a policy without a key for it, and comes back with the first such key. Operations that
    no class in force names, because they are newer than the policy, are offered with the classes of a new policy.
    """
    if policy is None:
        return {name: dict(members) for name, members in DEFAULT_CLASSES.items()}
    document = json.loads(policy.raw)
    named = {operation for found in policy.classes.values() for operation in found.operations}
    newer = {
        name: dict(members) for name, members in DEFAULT_CLASSES.items() if name in settings.OPERATIONS and name not in named
    }
    return {BREAK_GLASS: dict(DEFAULT_CLASSES[BREAK_GLASS]), **newer, **document["classes"]}


def _list_offered(policy: Policy | None, sent: QueryDict | None) -> list[OfferedPerson]:
    rows = ApproverKey.objects.filter(revoked_at=None, user__is_active=True).select_related("user")
    people = groupby(rows.order_by("user__username", "pk"), key=lambda key: (key.user.pk, key.user.get_username()))
    return [_offer_person(user_id, name, keys, policy, sent) for (user_id, name), keys in people]


def _offer_person(
    user_id: int, name: str, keys: Iterable[ApproverKey], policy: Policy | None, sent: QueryDict | None
) -> OfferedPerson:
    ticked = set(sent.getlist("key")) if sent is not None else None
    groups = ", ".join(sorted(policy.groups.get(name, ()))) if policy else ""

    def is_ticked(key: ApproverKey) -> bool:
        if ticked is not None:
            return str(key.pk) in ticked
        return policy is None or key.keyid in policy.keys

    return OfferedPerson(
        pk=user_id,
        name=name,
        groups=sent.get(f"groups-{user_id}", "") if sent is not None else groups,
        keys=[
            OfferedKey(key.pk, key.get_kind_display(), key.label, key.thumbprint[:16], key.is_break_glass, is_ticked(key))
            for key in keys
        ],
    )


def _list_thresholds(policy: Policy | None, sent: QueryDict | None) -> list[OfferedThreshold]:
    found = []
    for name, members in sorted(_base_classes(policy).items()):
        operations = members.get("operations")
        words = ", ".join(operations) if isinstance(operations, list) and operations != [name] else ""
        value = sent.get(f"threshold-{name}", "") if sent is not None else str(members.get("threshold", ""))
        found.append(OfferedThreshold(name, words, value))
    return found
