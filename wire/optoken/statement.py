"""Whether the statement and the proofs beside a token permit what a request asks of this box."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from wire.optoken.approval import (
    ApprovalError,
    Policy,
    PolicyRef,
    Rule,
    Statement,
    canonical,
    decode_bytes,
    find_class,
    read_statement,
    verify_approval,
)
from wire.optoken.canonical import TOKEN_MEMBER
from wire.optoken.refusal import OpTokenError, Reason

PinnedPolicy = Policy | Callable[[PolicyRef], Policy | None] | None
_MEMBERS = {"statement", "proofs"}
"""All that may stand beside the signed members: what a box does not know, it cannot honour."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the signed part of a token and the request ask for. ``params``: all members of the request body.

    ``statement_digest``: what the issuer says of it, 64 hex digits.
    """

    runner_id: str
    operation: str
    model_id: str | None
    params: Mapping[str, object]
    op_id: str
    use: int
    statement_digest: str


@dataclass(frozen=True, slots=True)
class Approval:
    """An approval that holds. ``daily_cap``: uses of the class that a box allows in 24 h, 0 = no cap."""

    statement: Statement
    approvers: tuple[str, ...]
    daily_cap: int


def check_statement(beside: Mapping[str, object], wanted: Wanted, *, policy: PinnedPolicy, now: float) -> Approval:
    """Return the approval that stands ``beside`` the signed members of a token, or raise OpTokenError.

    ``policy``: the one that this box has pinned, or what finds the one that a statement names. ``now``: Unix seconds.
    """
    if policy is None:
        raise OpTokenError(Reason.NO_POLICY)
    proofs = beside.get("proofs")
    if beside.keys() != _MEMBERS or not isinstance(proofs, list):
        raise OpTokenError(Reason.BAD_FIELD)
    try:
        statement = read_statement(decode_bytes(beside["statement"]))
        if not isinstance(policy, Policy):
            policy = policy(statement.policy)
        if policy is None:
            raise OpTokenError(Reason.NO_POLICY)
        _check_purpose(statement, wanted)
        verdict = verify_approval(statement, proofs, policy, now=now)
        if wanted.use > statement.max_uses:
            raise ApprovalError(Rule.TOO_MANY_USES, "every use that was approved is spent; ask for it again")
        return Approval(statement, verdict.approved_by, find_class(statement, policy).daily_cap)
    except ApprovalError as error:
        raise OpTokenError(Reason.NOT_APPROVED, rule=error.rule.value) from None


def _check_purpose(statement: Statement, wanted: Wanted) -> None:
    if not hmac.compare_digest(statement.digest.hex().encode(), wanted.statement_digest.encode()):
        raise OpTokenError(Reason.WRONG_STATEMENT)
    if wanted.runner_id not in statement.targets:
        raise OpTokenError(Reason.WRONG_TARGET)
    if statement.op_id != wanted.op_id:
        raise OpTokenError(Reason.WRONG_STATEMENT)
    if statement.operation != wanted.operation:
        raise OpTokenError(Reason.WRONG_OPERATION)
    covered = {name: value for name, value in wanted.params.items() if name != TOKEN_MEMBER and value is not None}
    try:
        actual = canonical(covered)
    except ApprovalError:
        raise OpTokenError(Reason.UNSIGNABLE_PARAMS) from None
    # Compared as bytes, because 1 and true are equal in Python and not in what people signed.
    if actual != canonical(dict(statement.params)):
        raise OpTokenError(Reason.WRONG_PARAMS)
    if statement.params.get("modelId") != wanted.model_id:
        raise OpTokenError(Reason.WRONG_MODEL)
