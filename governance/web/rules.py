"""The rules of a policy in words: what each class is for, who must approve, and who could bring about what."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from core.limits import limits
from wire.optoken.approval import BREAK_GLASS, OperationClass, Policy

_CLASSES = MappingProxyType({
    "model-load": (
        gettext_lazy("Loading a model"),
        gettext_lazy("A node loads a model into its GPU memory; another one makes room where that is asked for."),
    ),
    "model-unload": (
        gettext_lazy("Unloading a model"), gettext_lazy("Its requests end or are cut off; its memory becomes free."),
    ),
    "cache-flush": (gettext_lazy("Flushing caches"), gettext_lazy("Cached prompts go; the next requests are slower.")),
    "settings-reload": (
        gettext_lazy("Reloading the settings of a node"),
        gettext_lazy("The node reads its settings files again; they decide what can be loaded there."),
    ),
    "node-drain": (
        gettext_lazy("Draining a node by force"),
        gettext_lazy("Requests that still run after a time of your choice are interrupted. A plain drain needs nobody."),
    ),
    "node-evict": (gettext_lazy("Evicting a node"), gettext_lazy("All its work stops at once, and it gets no more.")),
    "limit-raise": (
        gettext_lazy("Raising a limit"), gettext_lazy("A key, a tenant or a model gets more. Lowering needs nobody."),
    ),
    "admin-token-mint": (
        gettext_lazy("Making an admin token"),
        gettext_lazy("Whoever holds it uses the admin APIs of control plane and gateway."),
    ),
    "policy-change": (
        gettext_lazy("Changing this policy"),
        gettext_lazy("Whoever can do that can in the end do everything, so nothing may need more people."),
    ),
    "unfreeze": (
        gettext_lazy("Lifting a freeze"), gettext_lazy("Approved operations run again. One approver alone may freeze."),
    ),
    "break-glass-review": (
        gettext_lazy("Reviewing an emergency"),
        gettext_lazy("People who did not use it confirm that a break-glass use was looked at."),
    ),
    "standing": (
        gettext_lazy("A standing approval"),
        gettext_lazy("One approval lets the requester load, unload or flush several times within its window."),
    ),
    BREAK_GLASS: (
        gettext_lazy("An emergency (break-glass)"),
        gettext_lazy("With keys kept for it alone, a few times a day on each node; others must review it afterwards."),
    ),
})  # fmt: skip
"""What the classes of a new policy are called in a sentence, and what each lets people do."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One class as a sentence. ``people``: who can approve, by name; ``extras``: what is asked beyond their number."""

    name: str
    subject: str
    does: str
    needed: int
    people: str
    extras: Sequence[str]
    bounds: str
    is_solo: bool
    is_break_glass: bool


def name_class(name: str) -> str:
    """Return what a class is called at the beginning of a sentence."""
    return str(_CLASSES[name][0]) if name in _CLASSES else _("The class %(name)s") % {"name": name}


def tell_class(name: str, operations: Collection[str]) -> str:
    """Return what a class lets people do, in a sentence."""
    if name in _CLASSES:
        return str(_CLASSES[name][1])
    return _("It is for: %(operations)s.") % {"operations": ", ".join(sorted(operations))}


def list_rules(policy: Policy) -> list[Rule]:
    return [
        Rule(
            name=name,
            subject=name_class(name),
            does=tell_class(name, found.operations),
            needed=found.required,
            people=name_people(find_helpers(policy, found)),
            extras=_list_extras(found),
            bounds=_say_bounds(found),
            is_solo=found.solo,
            is_break_glass=name == BREAK_GLASS,
        )
        for name, found in sorted(policy.classes.items(), key=lambda item: order_of(item[0]))
    ]


def order_of(name: str) -> tuple[int, str]:
    """Return where a class stands: what is asked for every day first."""
    names = list(_CLASSES)
    return (names.index(name) if name in _CLASSES else len(names), name)


def name_people(names: Collection[str]) -> str:
    """Return the names, or how many they are when they are many."""
    if len(names) > limits().governance.named_people:
        return ngettext("%(count)s person", "%(count)s people", len(names)) % {"count": len(names)}
    return ", ".join(sorted(names)) or _("nobody")


def find_able(policy: Policy, found: OperationClass) -> set[str]:
    """Return who has a key that counts for a class."""
    return {key.approver for key in policy.keys.values() if key.is_break_glass == (found.name == BREAK_GLASS)}


def find_helpers(policy: Policy, found: OperationClass) -> set[str]:
    """Return whose approval brings a class nearer: where groups take every seat, their members alone."""
    able = find_able(policy, found)
    if found.threshold > sum(found.factors.values()):
        return able
    return {name for name in able if not policy.groups[name].isdisjoint(found.factors)}


def say_needs(found: OperationClass, policy: Policy) -> str:
    """Return who must approve, such as "2 of 3, not counting the requester; 1 of the group owners"."""
    said = {"needed": found.required, "able": len(find_able(policy, found))}
    text = (
        _("%(needed)s of %(able)s, counting the requester")
        if found.solo
        else _("%(needed)s of %(able)s, not counting the requester")
    )
    return "; ".join([text % said, *_list_extras(found)])


def _list_extras(found: OperationClass) -> list[str]:
    words = [
        _("%(count)s of the group %(group)s") % {"count": count, "group": group}
        for group, count in sorted(found.factors.items())
        if count != found.required or len(found.factors) > 1
    ]
    if found.file_proofs:
        words.append(_("%(count)s with a key file") % {"count": found.file_proofs})
    if found.device_bound:
        words.append(_("with keys that cannot be copied"))
    if found.deny_threshold > 1:
        words.append(_("%(count)s rejections end it") % {"count": found.deny_threshold})
    return words


def _say_bounds(found: OperationClass) -> str:
    words = [_("waits %(time)s") % {"time": _say_duration(found.life_s)}]
    words.append(_("usable %(time)s") % {"time": _say_duration(found.usable_s)})
    if found.max_uses > 1:
        words.append(_("up to %(count)s uses") % {"count": found.max_uses})
    if found.daily_cap:
        words.append(_("%(count)s a day and node") % {"count": found.daily_cap})
    if found.proposers:
        words.append(_("asked for by %(names)s only") % {"names": ", ".join(found.proposers)})
    return "; ".join(words)


def _say_duration(seconds: int) -> str:
    if seconds >= 2 * 86_400:
        return _("%(count)s days") % {"count": seconds // 86_400}
    if seconds >= 2 * 3_600:
        return _("%(count)s hours") % {"count": seconds // 3_600}
    if seconds >= 120:
        return _("%(count)s minutes") % {"count": seconds // 60}
    return _("%(count)s seconds") % {"count": seconds}


# Who could bring about what


@dataclass(frozen=True, slots=True)
class Cell:
    """What one person can do under one class. ``others``: how many more people it takes, None = they may not approve it."""

    person: str
    others: int | None
    before: int | None
    is_new: bool

    @property
    def text(self) -> str:
        return _say_others(self.others)

    @property
    def text_before(self) -> str:
        return _say_others(self.before)

    @property
    def is_changed(self) -> bool:
        return not self.is_new and self.others != self.before


@dataclass(frozen=True, slots=True)
class Reach:
    """Who could bring about what: a row for each class, a cell for each person in the order of ``people``."""

    people: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]


def compare_reach(old: Policy | None, new: Policy) -> Reach:
    """Return what each person could do under a policy, beside the one in force."""
    people = sorted(set(new.groups) | (set(old.groups) if old is not None else set()))
    names = sorted({*new.classes, *(old.classes if old is not None else ())}, key=order_of)
    rows = [
        (
            name_class(name),
            [
                Cell(person, count_others(new, name, person), count_others(old, name, person), is_new=old is None)
                for person in people
            ],
        )
        for name in names
    ]
    return Reach(people, rows)


def count_others(policy: Policy | None, name: str, person: str) -> int | None:
    """Return how many people it takes beside this one, whoever of them asks; None when their approval does not count."""
    found = policy.classes.get(name) if policy is not None else None
    if policy is None or found is None or person not in find_helpers(policy, found):
        return None
    # Where the requester does not count, whoever approves needs another one to ask, and whoever asks needs all the others.
    return found.required - 1 if found.solo else found.required


def _say_others(others: int | None) -> str:
    if others is None:
        return _("may not")
    if others == 0:
        return _("alone")
    return ngettext("needs %(count)s more", "needs %(count)s more", others) % {"count": others}
