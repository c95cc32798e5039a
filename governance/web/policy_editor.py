"""The editor of the next version of the policy: its form, what it would mean, and what is impossible said beside the field.

It makes the parameters of ``policies.draft_policy`` and nothing else. A rule for some people alone is a group of theirs in the
policy, named after the class, of which as many must approve as the rule says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from itertools import groupby
from typing import Any

from django.conf import settings
from django.http import QueryDict
from django.utils.dateparse import parse_date
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from governance.errors import GovernanceError, InvalidProposal
from governance.models import ApproverKey
from governance.operations import policies
from governance.operations.kinds import describe_change
from governance.operations.policies import ApproverChoice
from governance.web.rules import compare_reach, name_class, order_of, tell_class
from wire.optoken.approval import BREAK_GLASS, MAX_APPROVERS, POLICY_CHANGE, Policy
from wire.optoken.documents import DEFAULT_CLASSES

Members = dict[str, Any]  # Any: members of a class in a policy document


class Preset(StrEnum):
    """What nine of ten want, and ``own``: a number and people for each operation."""

    TWO = "two"
    ONE = "one"
    ALONE = "alone"
    OWN = "own"


_PRESETS = {
    Preset.TWO: (
        gettext_lazy("Two of the others"),
        gettext_lazy("Two people approve, not counting who asks; a forced drain needs one. Two of three is usual."),
    ),
    Preset.ONE: (gettext_lazy("One of the others"), gettext_lazy("One person approves what somebody else asks for.")),
    Preset.ALONE: (
        gettext_lazy("Alone (solo)"),
        gettext_lazy(
            "Whoever asks may approve their own. For one person with one machine: whoever holds one key and this session holds "
            "everything, and every operation is marked as solo."
        ),
    ),
    Preset.OWN: (gettext_lazy("A number and people for each operation"), gettext_lazy("As set below.")),
}


@dataclass(frozen=True, slots=True)
class OfferedKey:
    pk: int
    kind: str
    label: str
    thumbprint: str
    is_break_glass: bool
    is_ticked: bool


@dataclass(frozen=True, slots=True)
class Person:
    """Somebody with enrolled keys. ``groups``: as typed, without those that rules make."""

    pk: int
    name: str
    groups: str
    keys: tuple[OfferedKey, ...]

    def has_key(self, *, is_break_glass: bool) -> bool:
        """Whether a key of the kind is ticked."""
        return any(key.is_ticked and key.is_break_glass == is_break_glass for key in self.keys)

    @property
    def typed_groups(self) -> set[str]:
        return {group.strip() for group in self.groups.split(",")} - {""}


@dataclass(frozen=True, slots=True)
class EditedRule:
    """One class as the form has it. ``people``: ids of who counts; None = groups of its own, which the form leaves alone."""

    name: str
    number: str
    people: frozenset[int] | None
    kept_groups: str
    sentence: SafeString
    does: str

    @property
    def threshold(self) -> int | None:
        return int(self.number) if self.number.isdecimal() and 1 <= int(self.number) <= MAX_APPROVERS else None


@dataclass(slots=True)
class Draft:
    """What the form holds. ``faults``: class or field → what is impossible about it, "" = the whole."""

    people: list[Person]
    rules: list[EditedRule]
    preset: Preset
    expires: str
    reason: str
    classes: dict[str, Members]
    faults: dict[str, str] = field(default_factory=dict)

    @property
    def approvers(self) -> list[Person]:
        return [person for person in self.people if any(key.is_ticked for key in person.keys)]

    def build(self) -> dict[str, Any]:  # Any: arguments of policies.draft_policy
        """Return the parameters of ``policies.draft_policy``. Raises InvalidProposal."""
        if not self.approvers:
            raise InvalidProposal(_("Choose at least one key of one person."), param="approvers")
        groups = {person.pk: person.typed_groups for person in self.approvers}
        classes = {name: dict(members, solo=False) for name, members in self.classes.items()}
        thresholds: dict[str, int] = {}
        for rule in self.rules:
            if self.preset is Preset.ALONE:
                classes[rule.name]["factors"] = {}
                continue
            if rule.threshold is None:
                text = _("%(class)s needs a number of approvals from 1 to %(most)s.")
                raise InvalidProposal(text % {"class": rule.name, "most": MAX_APPROVERS}, param="thresholds")
            thresholds[rule.name] = rule.threshold
            if rule.people is not None:
                classes[rule.name]["factors"] = self._narrow(rule, groups, dict(classes[rule.name].get("factors") or {}))
        chosen = [
            ApproverChoice(
                person.name, tuple(sorted(groups[person.pk])), tuple(sorted(key.pk for key in person.keys if key.is_ticked))
            )
            for person in self.approvers
        ]
        return {
            "approvers": chosen, "thresholds": thresholds, "classes": classes, "is_solo": self.preset is Preset.ALONE,
            "expires_at": _read_expiry(self.expires),
        }  # fmt: skip

    def _narrow(self, rule: EditedRule, groups: Mapping[int, set[str]], before: Mapping[str, int]) -> dict[str, int]:
        """Return the factors of a rule; people of whom alone some count are put into a group of theirs."""
        assert rule.people is not None
        assert rule.threshold is not None
        able = {person.pk for person in self.approvers if person.has_key(is_break_glass=rule.name == BREAK_GLASS)}
        chosen = able & rule.people
        if chosen == able or not chosen:
            return {}
        same = next((name for name in before if {pk for pk, named in groups.items() if name in named} == chosen), rule.name)
        for pk in groups:
            groups[pk].discard(rule.name)
        for pk in chosen:
            groups[pk].add(same)
        return {same: rule.threshold}

    def find_faults(self) -> dict[str, str]:
        """Return what is impossible, by class; "" = the whole."""
        if not self.approvers:
            return {"": _("Choose at least one key of one person.")}
        if self.preset is Preset.ALONE:
            return {}
        found = {rule.name: fault for rule in self.rules if (fault := self._find_fault(rule))}
        highest = max((rule.threshold or 0 for rule in self.rules), default=0)
        change = next((rule for rule in self.rules if rule.name == POLICY_CHANGE), None)
        if change is not None and (change.threshold or 0) < highest:
            text = _("At least %(most)s: changing the policy must need as many people as any other operation.")
            found.setdefault(POLICY_CHANGE, text % {"most": highest})
        return found

    def _find_fault(self, rule: EditedRule) -> str:
        if rule.threshold is None:
            return _("Write a whole number from 1 to %(most)s.") % {"most": MAX_APPROVERS}
        able = [
            person
            for person in self.approvers
            if person.has_key(is_break_glass=rule.name == BREAK_GLASS) and (rule.people is None or person.pk in rule.people)
        ]
        if rule.name == BREAK_GLASS and not any(person.has_key(is_break_glass=True) for person in self.approvers):
            return ""  # the class is left out of the policy
        said = {"needed": rule.threshold, "able": len(able), "most": len(able) - 1}
        if rule.threshold > len(able):
            return _("%(needed)s must approve, and only %(able)s can. Lower the number or tick more people.") % said
        if rule.threshold == len(able):
            text = _(
                "Leave one person to spare: with %(able)s people at most %(most)s, or the loss of one key locks everybody out."
            )
            return text % said
        return ""


def read_draft(policy: Policy | None, sent: QueryDict | None) -> Draft:
    """Return what was sent, or the policy in force as the form opens with it."""
    classes, people = _base_classes(policy), _list_people(policy, sent)
    preset = _read_preset(sent) if sent is not None else _guess_preset(policy, classes)
    rules = [_read_rule(name, members, people, preset, sent, policy) for name, members in classes.items()]
    rules.sort(key=lambda rule: order_of(rule.name))
    return Draft(
        people=people, rules=rules, preset=preset, classes=classes,
        expires=sent.get("expires", "") if sent is not None else "", reason=sent.get("reason", "") if sent is not None else "",
    )  # fmt: skip


def describe_draft(draft: Draft, policy: Policy | None) -> dict[str, object]:
    """Return what the preview shows: faults, who could then do what, and what differs from the policy in force."""
    draft.faults = draft.find_faults()
    shown: dict[str, object] = {
        "faults": [(name_class(name) if name else "", name, text) for name, text in draft.faults.items()]
    }
    if draft.faults:
        return shown
    try:
        new = policies.make_policy(**draft.build(), found=policy)
    except GovernanceError as error:
        return {"faults": [("", "", error.message)]}
    lines = [line for line in describe_change(policy, new) if line.value != line.now]
    return {**shown, "reach": compare_reach(policy, new), "changes": lines}


def list_presets(draft: Draft) -> list[dict[str, object]]:
    return [
        {"value": preset.value, "label": label, "help": text, "is_chosen": preset is draft.preset}
        for preset, (label, text) in _PRESETS.items()
    ]


def _read_preset(sent: QueryDict) -> Preset:
    try:
        return Preset(sent.get("preset", Preset.OWN))
    except ValueError:
        return Preset.OWN


def _guess_preset(policy: Policy | None, classes: Mapping[str, Members]) -> Preset:
    if policy is None:
        return Preset.TWO
    # A class that was left out, or is newer than the policy, is as in a new one.
    needs = {name: (members.get("threshold"), bool(members.get("factors"))) for name, members in classes.items()}
    if all(found.solo for name, found in policy.classes.items() if name != BREAK_GLASS):
        return Preset.ALONE
    if needs == {name: (members["threshold"], False) for name, members in DEFAULT_CLASSES.items()}:
        return Preset.TWO
    return Preset.ONE if set(needs.values()) == {(1, False)} else Preset.OWN


def _base_classes(policy: Policy | None) -> dict[str, Members]:
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


def _list_people(policy: Policy | None, sent: QueryDict | None) -> list[Person]:
    rows = ApproverKey.objects.filter(revoked_at=None, user__is_active=True).select_related("user")
    people = groupby(rows.order_by("user__username", "pk"), key=lambda key: (key.user.pk, key.user.get_username()))
    return [_make_person(user_id, name, keys, policy, sent) for (user_id, name), keys in people]


def _make_person(user_id: int, name: str, keys: Iterable[ApproverKey], policy: Policy | None, sent: QueryDict | None) -> Person:
    ticked = set(sent.getlist("key")) if sent is not None else None

    def is_ticked(key: ApproverKey) -> bool:
        if ticked is not None:
            return str(key.pk) in ticked
        return policy is None or key.keyid in policy.keys

    offered = [
        OfferedKey(
            pk=key.pk, kind=str(key.get_kind_display()), label=key.label, thumbprint=key.thumbprint[:16],
            is_break_glass=key.is_break_glass, is_ticked=is_ticked(key),
        )
        for key in keys
    ]  # fmt: skip
    if sent is not None:
        groups = sent.get(f"groups-{user_id}", "")
    else:
        made = {name for name, found in policy.classes.items() if name in found.factors} if policy is not None else set()
        groups = ", ".join(sorted(policy.groups.get(name, frozenset()) - made)) if policy is not None else ""
    return Person(user_id, name, groups, tuple(offered))


def _read_rule(
    name: str, members: Members, people: list[Person], preset: Preset, sent: QueryDict | None, policy: Policy | None
) -> EditedRule:
    number = str(members.get("threshold", ""))
    chosen, kept = _read_group(members, people, policy)
    if sent is not None and preset is Preset.OWN:
        number = sent.get(f"threshold-{name}", "")
        if "rules" in sent and chosen is not None:
            chosen = frozenset(int(text) for text in sent.getlist(f"people-{name}") if text.isdecimal())
    elif sent is not None:
        number, chosen, kept = "1" if preset is Preset.ONE else _usual_number(name, number), frozenset(p.pk for p in people), ""
    sentence = _write_sentence(name, number, chosen, people)
    operations = members.get("operations")
    does = tell_class(name, operations if isinstance(operations, list) else ())
    return EditedRule(name, number, chosen, kept, sentence, does)


def _usual_number(name: str, otherwise: str) -> str:
    return str(DEFAULT_CLASSES[name]["threshold"]) if name in DEFAULT_CLASSES else otherwise


def _read_group(members: Members, people: list[Person], policy: Policy | None) -> tuple[frozenset[int] | None, str]:
    """Return who counts for a class in force; None, and the groups in words, when groups are asked for beside others."""
    factors = members.get("factors") or {}
    if not factors:
        return frozenset(person.pk for person in people), ""
    only = next(iter(factors)) if len(factors) == 1 else ""
    if policy is not None and only and factors[only] >= int(members.get("threshold", 1)):
        return frozenset(person.pk for person in people if only in policy.groups.get(person.name, ())), ""
    return None, ", ".join(f"{count} × {group}" for group, count in sorted(factors.items()))


def _write_sentence(name: str, number: str, chosen: frozenset[int] | None, people: list[Person]) -> SafeString:
    """Return a rule as a sentence with its fields in it."""
    subject = format_html('<strong id="rule-{}">{}</strong>', name, name_class(name))
    count = format_html(
        '<input class="rule-number" type="number" id="threshold-{0}" name="threshold-{0}" min="1" max="{1}" value="{2}" '
        'aria-labelledby="rule-{0}" aria-describedby="help-{0} fault-{0}">', name, MAX_APPROVERS, number,
    )  # fmt: skip
    able = [person for person in people if any(key.is_break_glass == (name == BREAK_GLASS) for key in person.keys)]
    who = format_html_join(
        "",
        '<label class="check"><input type="checkbox" name="people-{}" value="{}"{}> <span>{}</span></label>',
        ((name, p.pk, " checked" if chosen is None or p.pk in chosen else "", p.name) for p in able),
    )
    if chosen is None:
        who = format_html("<span>{}</span>", _("the approvers"))
    said = {"subject": subject, "number": count, "people": who or _("nobody with such a key")}
    return format_html(_("{subject} needs {number} of {people}"), **said)


def _read_expiry(text: str) -> datetime | None:
    if not text:
        return None
    try:
        day = parse_date(text)
    except ValueError:
        day = None
    if day is None:
        raise InvalidProposal(_("The day of expiry is no date; write it like 2030-12-31."), param="expires_at")
    return datetime(day.year, day.month, day.day, tzinfo=UTC)
