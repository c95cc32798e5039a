"""What the services of governance take and return."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from governance.registry import Description, Impact, Undone
from wire.optoken.approval import Verdict


@dataclass(frozen=True, slots=True)
class Proposer:
    """Who asks. ``name`` is what the statement says: a user name, or ``token:<name>#<key id>`` for a token without an owner."""

    name: str
    user_id: int | None = None


@dataclass(frozen=True, slots=True)
class OperationSummary:
    """One line of a list. ``run_state``: the least finished state of its runs, "" before there are any; ``percent`` of them."""

    id: uuid.UUID
    printed_id: str
    title: str
    operation: str
    op_class: str
    state: str
    run_state: str
    requested_by: str
    requested_at: datetime
    expires_at: datetime
    not_after: datetime
    approvals: int
    required: int
    percent: int | None
    is_solo: bool
    is_break_glass: bool
    is_standing: bool


@dataclass(frozen=True, slots=True)
class DecisionView:
    """What one person said. ``thumbprint``, the key fields and ``brought_by`` are empty for a rejection, which nobody signs."""

    person: str
    is_approval: bool
    key_label: str
    key_kind: str
    thumbprint: str
    brought_by: str
    comment: str
    at: datetime
    withdrawn_at: datetime | None
    proof: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class RunView:
    """One carrying out on one target. ``receipt``: decoded, None without one."""

    id: uuid.UUID
    target: str
    use: int
    position: int
    state: str
    stage: str
    percent: int | None
    eta_s: float | None
    code: str
    message: str
    result: Mapping[str, object]
    receipt: Mapping[str, object] | None
    receipt_text: str
    attempt: int
    queued_at: datetime
    dispatched_at: datetime | None
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class OperationView:
    """Everything about one operation, for one viewer.

    ``statement``: its parsed members; ``statement_b64``: the signed bytes in base64url. ``actions``: what the viewer may do,
    of approve, reject, withdraw, cancel, use, claim; ``hindrances``: action → why not, in one sentence. ``assertion``: WebAuthn
    request options for the viewer's passkeys that the policy names, None when there are none; the challenge is the digest.
    ``undone``: what the operation has brought about and that is not so any more.
    """

    summary: OperationSummary
    description: Description
    impacts: Sequence[Impact]
    statement: Mapping[str, object]
    statement_b64: str
    digest: str
    words: str
    reason: str
    policy_version: int
    policy_sha256: str
    not_before: datetime
    max_uses: int
    uses: int
    verdict: Verdict | None
    decisions: Sequence[DecisionView]
    runs: Sequence[RunView]
    state_reason: str
    decided_at: datetime | None
    actions: frozenset[str]
    hindrances: Mapping[str, str]
    assertion: Mapping[str, object] | None
    is_frozen: bool
    undone: Sequence[Undone] = ()


@dataclass(frozen=True, slots=True)
class Inbox:
    """What a person sees first."""

    to_approve: Sequence[OperationSummary]
    mine: Sequence[OperationSummary]
    others: Sequence[OperationSummary]
