"""People of the demo: who signs, the policy that names them, and operations in every state a page can show.

Each is asked for, approved and ended by the product's own services, under a clock that stands where the scene wants it. So
signatures, receipts and the audit log hold, and whoever checks them finds nothing wrong.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from django.apps import apps
from django.db import connection, transaction

from controlplane.demo.fleet import NODE
from controlplane.demo.nodes import NodeKeys, Pinned, runner_id_of
from core.models import User
from governance.keys import add_key_file, list_keys
from governance.operations.approvals import active_policy, sweep_operations
from governance.operations.decisions import approve, reject
from governance.operations.policies import ApproverChoice, draft_policy
from governance.operations.proposals import Proposer, cancel, propose
from governance.operations.runs import RunEnd, finish_run, run_due
from governance.states import RunEvent
from wire import clock
from wire.ids import format_id
from wire.optoken.approval import Statement, encode_bytes, read_statement
from wire.optoken.documents import Outcome, Receipt, digest_result, sign_receipt


class PastClock:
    """A clock that stands still, at a moment that the scene chooses."""

    def __init__(self, at: datetime) -> None:
        self.at = at

    def time(self) -> float:
        return self.at.timestamp()

    def monotonic(self) -> float:
        return self.at.timestamp()

    def sleep(self, seconds: float, /) -> None:
        self.at += timedelta(seconds=seconds)


@contextmanager
def past(at: datetime) -> Iterator[PastClock]:
    """Have every service read a clock that stands at ``at``."""
    source = PastClock(at)
    before = clock.install(source)
    try:
        yield source
    finally:
        clock.install(before)


@dataclass(frozen=True, slots=True)
class Signer:
    """A person with a key file."""

    user: User
    private: Ed25519PrivateKey

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    def enrol(self) -> None:
        line = f"ed25519 {encode_bytes(self.public)} {self.user.username}"
        add_key_file(user=self.user, line=line, label="key file", actor=f"user:{self.user.username}")

    def sign(self, digest: bytes) -> dict[str, object]:
        keyid = hashlib.sha256(self.public).hexdigest()[:32]
        signature = encode_bytes(self.private.sign(digest))
        return {"type": "ed25519", "approver": self.user.username, "keyid": keyid, "signature": signature}


class Approvals:
    """Writes the operations of the scene. ``signers``: ana, who asks, ben and cleo; ``keys``: of the nodes, by name."""

    def __init__(self, now: datetime, *, admin: User, signers: Sequence[Signer], keys: Mapping[str, NodeKeys]) -> None:
        self._now, self._admin, self._keys = now, admin, keys
        self._ana, self._ben, self._cleo = signers
        self._fence = 0

    def write_past(self) -> Pinned:
        """Write what was decided before now, and return the policy in force. One transaction: no worker sees half of it."""
        with past(self._now), transaction.atomic():
            self._adopt(timedelta(days=20), "The first policy: two of three for whatever changes a node.")
            self._ask(timedelta(days=10, hours=2), "model-load", "helios", {"modelId": "phi-4-14b"}, "To compare it.")
            self._adopt(timedelta(days=10), "The administrator signs too.", with_admin=True)
            for days, hours, operation, node, params, reason in _DONE:
                asked = self._ask(timedelta(days=days, hours=hours), operation, node, params, reason)
                self._sign(asked, self._ben, self._cleo)
                self._end(asked, node, RunEvent.SUCCEED, "succeeded", {"modelId": params["modelId"]} if params else {})
            failed = self._ask(
                timedelta(days=3, hours=1), "model-load", "juno", {"modelId": "llama-3.1-8b"}, "A second model for the night."
            )
            self._sign(failed, self._ben, self._cleo)
            self._end(failed, "juno", RunEvent.FAIL, "failed", {}, code="out_of_memory", message=NODE["juno"].last_error)
            self._reject(timedelta(days=2, hours=6))
            self._cancel(timedelta(days=2))
            self._ask(
                timedelta(days=1, hours=6), "model-load", "draco", {"modelId": "phi-4-14b"}, "For the workshop on Friday."
            )
            with past(self._now - timedelta(hours=5)):
                sweep_operations()  # nobody signed the last one in time
        self._set_dates()
        found = active_policy()
        assert found is not None
        return Pinned(found[1].ref.version, found[1].ref.sha256)

    def write_open(self) -> None:
        """Write what waits for somebody now, and what runs: a worker takes that up, and a node carries it out."""
        with past(self._now):
            first = self._ask(
                timedelta(minutes=34), "model-load", "ceres", {"modelId": "qwen3-32b", "keepLoaded": True},
                "Ceres is at 88 %, and half of what it gets could go to the general model.",
            )  # fmt: skip
            self._sign(first, self._ben)
            self._ask(
                timedelta(minutes=12), "limit-raise", "tenant:marketing", {"cost_per_month": self._raise_of("marketing")},
                "The campaign runs until the end of the month.",
            )  # fmt: skip
            own = self._ask(
                timedelta(hours=2),
                "model-unload",
                "fjord",
                {"modelId": "bge-m3"},
                "Make room before the new index.",
                by_admin=True,
            )
            self._sign(own, self._cleo)
            away = self._ask(timedelta(minutes=50), "model-load", "iris", {"modelId": "qwen3-8b"}, "When it is back.")
            self._sign(away, self._ben, self._cleo)
            runs = self._ask(timedelta(minutes=3), "model-load", "ember", {"modelId": "phi-4-14b"}, "A small model beside it.")
            self._sign(runs, self._ben, self._cleo)
        self._set_dates()

    def _ask(
        self, age: timedelta, operation: str, target: str, params: Mapping[str, object], reason: str, *, by_admin: bool = False
    ) -> uuid.UUID:
        user = self._admin if by_admin else self._ana.user
        with past(self._now - age):
            found = propose(
                operation=operation, targets=target.split("+"), params=params, reason=reason,
                proposer=Proposer(user.username, user.pk),
            )  # fmt: skip
        return found.pk

    def _sign(self, op_id: uuid.UUID, *signers: Signer) -> None:
        for minutes, signer in enumerate(signers, start=1):
            statement = self._read(op_id)
            with past(datetime.fromtimestamp(statement.requested_at, self._now.tzinfo) + timedelta(seconds=40 * minutes)):
                name = signer.user.username
                approve(op_id=op_id, user=signer.user, proof=signer.sign(statement.digest), brought_by=f"token:{name}#demo")

    def _read(self, op_id: uuid.UUID) -> Statement:
        row = apps.get_model("governance", "Operation").objects.get(pk=op_id)
        return read_statement(bytes(row.statement))

    def _adopt(self, age: timedelta, reason: str, *, with_admin: bool = False) -> None:
        people = [signer.user for signer in (self._ana, self._ben, self._cleo)] + [self._admin] * with_admin
        with past(self._now - age) as source:
            choices = [ApproverChoice(user.username, (), tuple(key.pk for key in list_keys(user))) for user in people]
            asked = draft_policy(approvers=choices, reason=reason, proposer=Proposer("ana", self._ana.user.pk))
            self._sign(asked.pk, self._ben, self._cleo)
            source.sleep(120)
            run_due()

    def _end(
        self, op_id: uuid.UUID, target: str, event: RunEvent, outcome: Outcome, result: dict[str, object], *, code: str = "",
        message: str = "",
    ) -> None:  # fmt: skip
        statement = self._read(op_id)
        rows = apps.get_model("governance", "OperationRun").objects.filter(operation_id=op_id)
        apps.get_model("governance", "Operation").objects.filter(pk=op_id).update(
            dispatched_at=datetime.fromtimestamp(statement.requested_at + 82, self._now.tzinfo)
        )
        for run, name in zip(rows.order_by("position"), target.split("+"), strict=True):
            node, self._fence = NODE[name], self._fence + 1
            sent = datetime.fromtimestamp(statement.requested_at + 82 + 30 * run.position, self._now.tzinfo)
            rows.filter(pk=run.pk).update(
                state="executing", fence=self._fence, attempt=1, dispatched_at=sent, sent_at=sent, node_id=node.id, fraction=0.9
            )
            keys = self._keys[name]
            receipt = Receipt(
                op_id=format_id("op", op_id), use=1, statement_digest=statement.digest.hex(),
                runner_id=runner_id_of(node, keys),
                operation=statement.operation, outcome=outcome, result_digest=digest_result(result), fence=self._fence,
                started_at=int(sent.timestamp()), ended_at=int(sent.timestamp()) + 47,
            )  # fmt: skip
            end = RunEnd(
                event, code, message, result, receipt=sign_receipt(keys.private, receipt), receipt_key=encode_bytes(keys.public)
            )
            with past(sent + timedelta(seconds=47)):
                finish_run(run.pk, end)

    def _reject(self, age: timedelta) -> None:
        asked = self._ask(age, "model-load", "iris", {"modelId": "qwen3-8b"}, "The widget needs a second node.")
        with past(self._now - age + timedelta(minutes=11)):
            reject(op_id=asked, user=self._ben.user, comment="Iris runs the tests tonight. Take borealis.")

    def _cancel(self, age: timedelta) -> None:
        asked = self._ask(age, "cache-flush", "ceres", {"scope": "model", "modelId": "qwen2.5-coder-32b"}, "After last night.")
        with past(self._now - age + timedelta(minutes=4)):
            cancel(op_id=asked, proposer=Proposer("ana", self._ana.user.pk))

    def _raise_of(self, tenant: str) -> int:
        budgets = apps.get_model("gateway", "Tenant").objects.get(name=tenant).budgets
        return int(budgets[0]["amount"] * 1.5)

    def _set_dates(self) -> None:
        # Columns that Django itself fills in with the time of day.
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE governance_decision AS d SET at = o.requested_at + interval '40 seconds' * placed.place"
                "  FROM (SELECT id, row_number() OVER (PARTITION BY operation_id ORDER BY id) AS place"
                "          FROM governance_decision) AS placed, governance_operation AS o"
                " WHERE d.id = placed.id AND o.id = d.operation_id"
            )
            cursor.execute(
                "UPDATE governance_operationrun AS r SET queued_at = o.requested_at + interval '80 seconds'"
                "  FROM governance_operation AS o WHERE o.id = r.operation_id"
            )
            cursor.execute("UPDATE governance_operation SET updated_at = coalesce(decided_at, requested_at)")


_DONE: tuple[tuple[int, int, str, str, dict[str, object], str], ...] = (
    (6, 4, "model-load", "atlas", {"modelId": "llama-3.3-70b", "keepLoaded": True}, "The general model, for everybody."),
    (5, 22, "model-load", "borealis", {"modelId": "qwen3-32b", "keepLoaded": True}, "The support bot answers from it."),
    (4, 7, "model-load", "ember", {"modelId": "mistral-small-24b"}, "Translations for marketing."),
    (1, 3, "settings-reload", "borealis+ceres", {}, "More slots while the code assistant is rolled out."),
    (0, 9, "model-unload", "studio", {"modelId": "gemma-3-27b"}, "Nobody asked for it in a week."),
)
