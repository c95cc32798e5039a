"""People with keys, a policy that names them, statements and their approvals; tests change one thing in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fakes.passkeys import ORIGIN, RP_ID, KeyFile, Proof, SoftPasskey
from wire.optoken.approval import Policy, Statement, canonical, encode_bytes, read_policy, read_statement
from wire.optoken.proposal import DEFAULT_CLASSES, ApproverEntry, KeyEntry, build_policy, build_statement

NOW = 1_745_880_000
YEAR_S = 365 * 86_400
NAMES = ("ada", "bob", "cleo", "dan", "eve", "fay", "gus", "hal", "ida", "jon", "kay", "leo")
PolicyClasses = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True)
class Person:
    """An approver. ``passkey`` signs unless a test asks for another key."""

    name: str
    groups: tuple[str, ...] = ()
    passkey: SoftPasskey = field(default_factory=SoftPasskey)
    second: SoftPasskey = field(default_factory=SoftPasskey)
    key_file: KeyFile = field(default_factory=KeyFile)
    break_glass: KeyFile = field(default_factory=KeyFile)
    has_break_glass: bool = False

    @property
    def entry(self) -> ApproverEntry:
        keys = [
            KeyEntry(self.passkey.keyid, "webauthn", self.passkey.public_key),
            KeyEntry(self.second.keyid, "webauthn", self.second.public_key),
            KeyEntry(self.key_file.keyid, "ed25519", self.key_file.public_key),
        ]
        if self.has_break_glass:
            keys.append(KeyEntry(self.break_glass.keyid, "ed25519", self.break_glass.public_key, is_break_glass=True))
        return ApproverEntry(self.name, self.groups, keys)

    def approve(self, statement: Statement, *, key: SoftPasskey | KeyFile | None = None) -> Proof:
        return (key or self.passkey).sign(statement.digest, approver=self.name)


def make_people(count: int, *, groups: Sequence[str] = (), break_glass: bool = False) -> list[Person]:
    """``count`` people, each with two passkeys and a key file, all in the same groups."""
    return [Person(name, tuple(groups), has_break_glass=break_glass) for name in NAMES[:count]]


def make_policy_bytes(people: Iterable[Person], *, classes: PolicyClasses = DEFAULT_CLASSES, **changes: Any) -> bytes:
    """The document of a policy that names ``people``."""
    fields: dict[str, Any] = {
        "policy_id": "main", "version": 1, "previous": "", "issued_at": NOW - 86_400, "expires_at": NOW + YEAR_S,
        "origins": [ORIGIN], "rp_ids": [RP_ID], "log_keys": [],
    }  # fmt: skip
    return build_policy(approvers=[person.entry for person in people], classes=classes, **(fields | changes))


def make_policy(people: Iterable[Person], *, classes: PolicyClasses = DEFAULT_CLASSES, **changes: Any) -> Policy:
    """A policy that names ``people``."""
    return read_policy(make_policy_bytes(people, classes=classes, **changes))


def make_statement(policy: Policy, **changes: Any) -> Statement:
    """A request to load a model on one box, valid from ``NOW`` for an hour."""
    fields: dict[str, Any] = {
        "op_id": "op-1", "operation": "model-load", "op_class": "model-load", "targets": ["box-7"],
        "params": {"modelId": "org/model"}, "requested_by": "zoe", "reason": "needed", "requested_at": NOW,
        "not_before": NOW, "not_after": NOW + 3600, "max_uses": 1, "policy_ref": policy.ref,
    }  # fmt: skip
    return build_statement(**(fields | changes))


def edit_statement(statement: Statement, **members: Any) -> Statement:
    """The statement with other JSON members; ``class_`` stands for ``class``."""
    current: dict[str, Any] = {**json.loads(statement.raw), **{name.rstrip("_"): value for name, value in members.items()}}
    return read_statement(canonical(current))


def approve(statement: Statement, people: Iterable[Person]) -> list[Proof]:
    return [person.approve(statement) for person in people]


def make_change(new: bytes, *, under: Policy | None, **changes: Any) -> Statement:
    """The request to put the policy ``new`` in force. ``under``: the one that holds now; None for the first."""
    made = read_policy(new)
    params = {"version": made.ref.version, "sha256": made.ref.sha256}
    fields: dict[str, Any] = {"operation": "policy-change", "op_class": "policy-change", "targets": ["fleet"], "params": params}
    return make_statement(under or made, **(fields | changes))


def make_link(new: bytes, statement: Statement, proofs: Sequence[Proof]) -> dict[str, Any]:
    return {"document": encode_bytes(new), "statement": encode_bytes(statement.raw), "proofs": list(proofs)}


def renamed(person: Person, name: str) -> Person:
    return replace(person, name=name)
