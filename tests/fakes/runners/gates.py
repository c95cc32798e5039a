"""A gate over a ledger, and tokens of the levels L0 and L1 for the load that it is asked for."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from runner.ledger import Ledger
from runner.operations.gate import Admitted, Gate, GateRules
from tests.fakes.ledgers import T0, Clock
from wire.optoken import Binding, Grant, Level, Operation, params_digest, sign_l0, sign_l1

KEY = b"a key of the tests, 32 bytes long"
OTHER_KEY = b"another key of the tests, as long"
MODEL = "org/model"
NOW = T0 + 10
PARAMS: dict[str, object] = {"modelId": MODEL, "evictModel": "org/other"}


def l0(key: bytes = KEY, **changes: Any) -> dict[str, object]:
    return sign_l0(key, grant(**changes))


def l1(key: bytes = KEY, nonce: str = "nonce-of-l1", **changes: Any) -> dict[str, object]:
    fields: dict[str, Any] = {
        "audience": "box-7", "params_digest": params_digest(PARAMS), "op_id": "op-1", "fence": 7, "expires_at": int(NOW) + 300,
    }  # fmt: skip
    return sign_l1(key, grant(nonce=nonce), Binding(**(fields | changes)))


def grant(**changes: Any) -> Grant:
    fields: dict[str, Any] = {
        "operation": Operation.MODEL_LOAD, "model_id": MODEL, "signers": ["a", "b"], "nonce": "nonce-of-l0",
        "issued_at": int(NOW),
    }  # fmt: skip
    return Grant(**(fields | changes))


def write_key(path: Path, content: bytes = KEY + b"\n", *, mode: int = 0o600) -> Path:
    path.write_bytes(content)
    path.chmod(mode)
    return path


@asynccontextmanager
async def opened(
    key_path: Path | None, data: Path, *, level: Level = Level.L0, clock: Clock | None = None, boot: float = T0 + 0.5,
    counted: frozenset[str] | None = None,
) -> AsyncIterator[Gate]:  # fmt: skip
    """A gate with a ledger that was begun before the tokens were issued."""
    ledger = await Ledger.open(data, clock=Clock(boot))
    try:
        rules = GateRules(key_path=key_path, level=level, min_signers=2, runner_id="box-7", counted_signers=counted)
        yield Gate(rules, ledger=ledger, clock=clock or Clock(NOW))
    finally:
        await ledger.close()


async def admit(gate: Gate, token: object, **changes: Any) -> Admitted:
    request: dict[str, Any] = {"operation": Operation.MODEL_LOAD, "model_id": MODEL, "params": PARAMS}
    return await gate.admit(token, **(request | changes))
