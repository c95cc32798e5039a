"""A valid token of each level, and the request that it permits; tests change one thing in them."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet

from tests.fakes.passkeys import Proof
from tests.fakes.policies import NOW as POLICY_NOW
from tests.fakes.policies import approve, make_people, make_policy, make_statement
from wire.optoken.approval import Statement
from wire.optoken.op_token import Binding, Grant, params_digest, read_token, sign_l0, sign_l1, sign_l2
from wire.optoken.verifier import Level, Operation, Verified, Verifier

NOW = POLICY_NOW
KEY = b"a key of the tests, 32 bytes long"
OTHER_KEY = b"another key of the tests, as long"
BOX = "box-7"
MODEL = "meta-llama/Llama-3.1-70B-Instruct"
PARAMS: dict[str, object] = {
    "modelId": MODEL, "quantization": "awq-4bit", "maxContextLength": 32768, "evictModel": "meta-llama/Llama-3.1-8B-Instruct",
    "overrides": {"target_inflight": 4, "flags": ["a", "b"]},
}  # fmt: skip
FLUSH_PARAMS: dict[str, object] = {"scope": "tenant", "tenantId": "community-x", "modelId": None}
KID = "2026-10"

PEOPLE = make_people(4)
POLICY = make_policy(PEOPLE)
STATEMENT = make_statement(POLICY, params=PARAMS, targets=[BOX, "box-9"])
PROOFS = approve(STATEMENT, PEOPLE[:2])

Token = dict[str, Any]  # Any: tests put anything into a token.


def make_grant(**changes: Any) -> Grant:
    fields: dict[str, Any] = {
        "operation": Operation.MODEL_LOAD, "model_id": MODEL, "signers": ["admin1", "admin2"], "nonce": "0123456789abcdef",
        "issued_at": NOW,
    }  # fmt: skip
    return Grant(**(fields | changes))


def make_binding(**changes: Any) -> Binding:
    fields: dict[str, Any] = {
        "audience": BOX, "params_digest": params_digest(PARAMS), "op_id": "op-1", "fence": 7, "expires_at": NOW + 300,
        "kid": KID,
    }  # fmt: skip
    return Binding(**(fields | changes))


def make_l0(key: bytes = KEY, **changes: Any) -> Token:
    return sign_l0(key, make_grant(**changes))


def make_l1(key: bytes = KEY, grant: Grant | None = None, **changes: Any) -> Token:
    return sign_l1(key, grant or make_grant(), make_binding(**changes))


def make_l2(
    key: bytes = KEY, grant: Grant | None = None, *, statement: Statement = STATEMENT, proofs: Sequence[Proof] = PROOFS,
    **changes: Any,
) -> Token:  # fmt: skip
    """A signed L2 token, approved by two of four people unless other ``proofs`` are given."""
    binding = make_binding(**({"op_id": statement.op_id} | changes))
    return sign_l2(key, grant or make_grant(), binding, statement=statement.raw, proofs=proofs)


def sign_claims(claims: Mapping[str, Any], key: bytes = KEY) -> Token:
    """Sign any claims, by the rule of their level, with nothing of the code under test."""
    compact = "v" in claims
    text = json.dumps(claims, sort_keys=True, separators=(",", ":") if compact else None, ensure_ascii=not compact)
    return {"opToken": dict(claims), "signature": hmac.new(key, text.encode(), hashlib.sha256).hexdigest()}


def make_verifier(level: Level = Level.L0, **changes: Any) -> Verifier:
    fields: dict[str, Any] = {"level": level, "min_signers": 2, "runner_id": BOX, "keys": {"": KEY, KID: KEY}, "policy": POLICY}
    return Verifier(**(fields | changes))


def verify(
    token: object, verifier: Verifier | None = None, *, operation: Operation = Operation.MODEL_LOAD,
    model_id: str | None = MODEL, params: Mapping[str, object] = PARAMS, now: float = NOW,
) -> Verified:  # fmt: skip
    """Check a token for the request that the valid ones permit, at the moment of their issue."""
    return (verifier or make_verifier()).verify(
        read_token(token), operation=operation, model_id=model_id, params=params, now=now
    )


Case = TypeVar("Case")
Outcome = TypeVar("Outcome")


def by_outcome(table: Mapping[Outcome, Mapping[str, Case]]) -> list[ParameterSet]:
    """Return (case, outcome) of each row, as ``parametrize`` takes them, under the row's name."""
    return [pytest.param(case, outcome, id=name) for outcome, rows in table.items() for name, case in rows.items()]
