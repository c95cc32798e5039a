"""Op tokens: what a box must be shown before it acts. Made when an approved run is sent, kept for minutes, never logged."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

from governance.checkpoints import latest_checkpoint
from governance.registry import Signer
from wire import clock
from wire.optoken import Binding, Grant, encode_token, params_digest, sign_l0, sign_l1, sign_l2
from wire.optoken.approval import Statement


def mint_token(
    signer: Signer, statement: Statement, proofs: Sequence[Mapping[str, object]], *, use: int, fence: int, expires_at: int
) -> str:
    """Return the token of one use of an approval for one box, at the level of that box. ``expires_at``: Unix seconds."""
    now = int(clock.unix_s())
    model = statement.params.get("modelId")
    grant = Grant(
        operation=statement.operation,
        model_id=model if isinstance(model, str) else None,
        signers=[str(proof["approver"]) for proof in proofs],
        nonce=secrets.token_hex(16),
        issued_at=now,
    )
    if signer.level == "L0":
        return encode_token(sign_l0(signer.key, grant))
    checkpoint = latest_checkpoint()
    binding = Binding(
        audience=signer.audience,
        params_digest=params_digest(statement.params),
        op_id=statement.op_id,
        fence=fence,
        expires_at=expires_at,
        kid=signer.kid,
        statement_digest=statement.digest.hex(),
        checkpoint=None if checkpoint is None else f"{checkpoint.size}:{bytes(checkpoint.root).hex()}",
        use=use,
    )
    if signer.level == "L1":
        return encode_token(sign_l1(signer.key, grant, binding))
    return encode_token(sign_l2(signer.key, grant, binding, statement=statement.raw, proofs=proofs))
