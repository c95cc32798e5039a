"""A policy in plain words: people with their keys, classes with what they need."""

from __future__ import annotations

from dataclasses import dataclass

from wire.optoken.approval import BREAK_GLASS, Key, OperationClass, Policy

_UNITS = ((86_400, "days"), (3_600, "hours"), (60, "minutes"), (1, "seconds"))
_KINDS = {"webauthn": "passkey", "ed25519": "key file"}


@dataclass(frozen=True, slots=True)
class ShownKey:
    """A key; ``thumbprint``: 64 hex digits."""

    kind: str
    thumbprint: str
    is_break_glass: bool


@dataclass(frozen=True, slots=True)
class ShownPerson:
    """An approver with groups and keys."""

    name: str
    groups: str
    keys: list[ShownKey]


@dataclass(frozen=True, slots=True)
class ShownClass:
    """What a class needs, in words."""

    name: str
    needs: str
    operations: str
    bounds: str
    solo: bool
    is_break_glass: bool


def list_people(policy: Policy) -> list[ShownPerson]:
    """Return the approvers by name."""
    keys: dict[str, list[Key]] = {}
    for key in policy.keys.values():
        keys.setdefault(key.approver, []).append(key)
    return [
        ShownPerson(name, ", ".join(sorted(groups)), [_show_key(key) for key in keys.get(name, [])])
        for name, groups in sorted(policy.groups.items())
    ]


def _show_key(key: Key) -> ShownKey:
    return ShownKey(_KINDS.get(key.kind, key.kind), key.thumbprint, key.is_break_glass)


def list_classes(policy: Policy) -> list[ShownClass]:
    """Return the classes by name."""
    return [
        ShownClass(
            name=name,
            needs=say_needs(found, policy),
            operations=", ".join(sorted(found.operations)),
            bounds=_say_bounds(found),
            solo=found.solo,
            is_break_glass=name == BREAK_GLASS,
        )
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
