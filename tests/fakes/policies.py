"""People with keys, a policy that names them, statements and their approvals; tests change one thing in them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tests.fakes.audit_logs import KEY as LOG_KEY
from tests.fakes.passkeys import ORIGIN, RP_ID, KeyFile, Proof, SoftPasskey
from wire.bridge import NodeGovernance
from wire.ids import new_uuid7
from wire.optoken.approval import (
    Policy,
    Statement,
    canonical,
    decode_bytes,
    encode_bytes,
    policy_words,
    read_policy,
    read_statement,
)
from wire.optoken.documents import (
    DEFAULT_CLASSES,
    ApproverEntry,
    KeyEntry,
    Receipt,
    build_policy,
    build_statement,
    digest_result,
    sign_receipt,
)
from wire.optoken.op_token import Binding, Grant, make_runner_id, params_digest, sign_l1, sign_l2

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
    return [Person(name, tuple(groups), has_break_glass=break_glass) for name in NAMES[:count]]


def make_policy_bytes(people: Iterable[Person], *, classes: PolicyClasses = DEFAULT_CLASSES, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "policy_id": "main", "version": 1, "previous": "", "issued_at": NOW - 86_400, "expires_at": NOW + YEAR_S,
        "origins": [ORIGIN], "rp_ids": [RP_ID], "log_keys": [],
    }  # fmt: skip
    return build_policy(approvers=[person.entry for person in people], classes=classes, **(fields | changes))


def make_policy(people: Iterable[Person], *, classes: PolicyClasses = DEFAULT_CLASSES, **changes: Any) -> Policy:
    return read_policy(make_policy_bytes(people, classes=classes, **changes))


def make_statement(policy: Policy, **changes: Any) -> Statement:
    """A request to load a model on one node, valid from ``NOW`` for an hour."""
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


DAY_S = 86_400


def make_document(people: Sequence[Person], *, now: float, **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "issued_at": int(now) - DAY_S, "expires_at": int(now) + 30 * DAY_S, "log_keys": [str(LOG_KEY)],
    }  # fmt: skip
    return make_policy_bytes(people, **(fields | changes))


@dataclass
class Fleet:
    """Four people, of whom two must agree, and the chain of policies that they made."""

    now: float = field(default_factory=time.time)
    people: list[Person] = field(default_factory=lambda: make_people(4, break_glass=True))
    documents: list[bytes] = field(default_factory=list)
    links: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.documents:
            self.add_policy()

    @property
    def policy(self) -> Policy:
        return read_policy(self.documents[-1])

    @property
    def words(self) -> str:
        return policy_words(read_policy(self.documents[0]).ref.sha256)

    def add_policy(self, **changes: Any) -> dict[str, Any]:
        current = self.policy if self.documents else None
        following = {} if current is None else {"version": current.ref.version + 1, "previous": current.ref.sha256}
        document = make_document(self.people, now=self.now, **(following | changes))
        change = make_change(document, under=current, requested_at=int(self.now), not_before=int(self.now) - 60,
                             not_after=int(self.now) + 3600)  # fmt: skip
        self.documents.append(document)
        self.links.append(make_link(document, change, approve(change, self.people[:2])))
        return self.links[-1]


@dataclass
class Issuer:
    """The control plane of one node: it has the HMAC keys, and nothing of the people. ``fence`` grows with every token."""

    fleet: Fleet
    runner_id: str
    kid: str
    key: bytes
    fence: int = 0

    @classmethod
    def of(cls, fleet: Fleet, box: NodeGovernance) -> Issuer:
        kid, key = list(box.op_keys.items())[-1]
        return cls(fleet, box.runner_id, kid, decode_bytes(key))

    def token(
        self, operation: str, params: Mapping[str, object], *, op_id: str = "", use: int = 1, approvers: int = 2,
        fence: int | None = None, checkpoint: str | None = None, now: float | None = None, **statement: Any,
    ) -> dict[str, Any]:  # fmt: skip
        """Return a fresh L2 token for an operation that so many people approved."""
        now, op_id = time.time() if now is None else now, op_id or new_uuid7().hex
        made = make_statement(
            self.fleet.policy,
            **{
                "op_id": op_id, "operation": operation, "op_class": operation, "targets": [self.runner_id],
                "params": dict(params), "requested_at": int(now), "not_before": int(now) - 60,
                "not_after": int(now) + 3600, **statement,
            },
        )  # fmt: skip
        proofs = self._prove(made, approvers)
        grant, binding = self._grant(operation, params, op_id=op_id, use=use, fence=fence, checkpoint=checkpoint, now=now)
        return sign_l2(self.key, grant, binding, statement=made.raw, proofs=proofs)

    def bare_token(self, operation: str, params: Mapping[str, object]) -> dict[str, Any]:
        """Return what the issuer can make all alone: a good L1 token."""
        grant, binding = self._grant(
            operation, params, op_id=new_uuid7().hex, use=1, fence=None, checkpoint=None, now=time.time()
        )
        return sign_l1(self.key, grant, binding)

    def _prove(self, statement: Any, count: int) -> list[dict[str, Any]]:
        people = self.fleet.people[:count]
        if statement.op_class == "break-glass":
            return [person.approve(statement, key=person.break_glass) for person in people]
        return approve(statement, people)

    def _grant(
        self, operation: str, params: Mapping[str, object], *, op_id: str, use: int, fence: int | None,
        checkpoint: str | None, now: float,
    ) -> tuple[Grant, Binding]:  # fmt: skip
        self.fence += 1
        model = params.get("modelId")
        assert model is None or isinstance(model, str)
        grant = Grant(operation, model, ["ada", "bob"], secrets.token_hex(16), int(now))
        binding = Binding(
            audience=self.runner_id, params_digest=params_digest(params), op_id=op_id, expires_at=int(now) + 300, use=use,
            fence=self.fence if fence is None else fence, kid=self.kid, checkpoint=checkpoint,
        )  # fmt: skip
        return grant, binding


ANN, BOB, CLEO, DAN = make_people(4)
FIRST_RAW = make_policy_bytes([ANN, BOB, CLEO])
FIRST = read_policy(FIRST_RAW)
SECOND_RAW = make_policy_bytes([ANN, BOB, CLEO, DAN], version=2, previous=FIRST.ref.sha256)
SECOND = read_policy(SECOND_RAW)
BOX_KEY, OTHER_BOX_KEY = KeyFile(), KeyFile()
BOX = make_runner_id("box-7", BOX_KEY.public_key)
PROVEN = make_statement(SECOND, targets=[BOX])


def make_receipt(key: KeyFile = BOX_KEY, **changes: Any) -> dict[str, str]:
    fields: dict[str, Any] = {
        "op_id": "op-1", "use": 1, "statement_digest": PROVEN.digest.hex(), "runner_id": BOX, "operation": "model-load",
        "outcome": "succeeded", "result_digest": digest_result({}), "fence": 7, "started_at": NOW, "ended_at": NOW + 60,
    }  # fmt: skip
    text = sign_receipt(key.private_key, Receipt(**(fields | changes)))
    return {"receipt": text, "publicKey": encode_bytes(key.public_key)}


def make_bundle(**changes: Any) -> dict[str, Any]:
    begin, change = make_change(FIRST_RAW, under=None), make_change(SECOND_RAW, under=FIRST)
    return {
        "policies": [
            make_link(FIRST_RAW, begin, approve(begin, [ANN, BOB])),
            make_link(SECOND_RAW, change, approve(change, [BOB, CLEO])),
        ],
        "statement": encode_bytes(PROVEN.raw), "proofs": approve(PROVEN, [ANN, DAN]), "receipts": [make_receipt()], **changes,
    }  # fmt: skip


def make_batch(*, format_version: int) -> dict[str, Any]:
    """The evidence of an operation on two nodes that was to go on after failures, or one of the first format."""
    made = make_statement(SECOND, targets=[BOX, "box-8"], stops_on_failure=False)
    if format_version == 1:
        members = {name: value for name, value in json.loads(made.raw).items() if name != "stopsOnFailure"} | {"v": 1}
        made = read_statement(canonical(members))
    return make_bundle(statement=encode_bytes(made.raw), proofs=approve(made, [ANN, DAN]), receipts=[])
