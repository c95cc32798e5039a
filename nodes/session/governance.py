"""What a box says of operations and of how it decides about them, cut to sizes that can be kept. Nothing here raises.

Ids, keys and receipts are never shortened: one that is too long is dropped, because its head would be another one.
"""

from __future__ import annotations

import json
import math

from wire import bridge

MAX_RESULT_BYTES = 64 * 1024
MAX_OP_KEYS = 8
MAX_USE = 2**31 - 1
MAX_RECEIPT_CHARS = 8 * 1024
MAX_NOTE_CHARS = 8 * 1024
_ID_CHARS = 64
_RUNNER_ID_CHARS = 200
_KEY_CHARS = 400
_SECRET_CHARS = 128
_DIGEST_CHARS = 64
_STAGE_CHARS = 200
_CODE_CHARS = 80
_MESSAGE_CHARS = 500
_ALARM_CHARS = 300
_MAX_ETA_S = 1e6
_MAX_COUNT = 2**31 - 1
_MAX_SIZE = 2**53 - 1
_MAX_CLOCK_MS = 2**47

STATES = frozenset({"running", "succeeded", "failed", "refused", "interrupted", "unknown"})
LEVELS = frozenset({"L0", "L1", "L2"})


def clean_status(status: bridge.OpStatus) -> None:
    """Cut an ``op_status``, in place. A state that is none becomes "" and an impossible id or use names nothing."""
    status.op_id = _keep_whole(status.op_id, _ID_CHARS)
    status.use = status.use if 1 <= status.use <= MAX_USE else 0
    status.state = status.state if status.state in STATES else ""
    status.stage = _cut(status.stage, _STAGE_CHARS)
    status.fraction = _clamp(status.fraction, 1.0)
    status.eta_s = _clamp(status.eta_s, _MAX_ETA_S)
    status.code = _cut(status.code, _CODE_CHARS)
    status.message = _cut(status.message, _MESSAGE_CHARS)
    status.result = clean_result(status.result)
    status.receipt = _keep_whole(status.receipt, MAX_RECEIPT_CHARS)


def clean_result(result: dict[str, object]) -> dict[str, object]:
    """Return the result of an operation as it is, or one word on why it is not kept."""
    return result if _can_be_stored(result) else {"omitted": "it is too large, or cannot be stored"}


def clean_report(report: bridge.GovernanceReport) -> None:
    """Cut a ``governance_report``, in place."""
    clean_governance(report.governance)
    report.witness_signature = _keep_whole(report.witness_signature, _SECRET_CHARS)
    note = report.witness_note
    is_note = len(note) <= MAX_NOTE_CHARS and all(line.isprintable() for line in note.split("\n"))
    report.witness_note = note if is_note else ""
    report.witness_alarm = _cut(report.witness_alarm, _ALARM_CHARS)


def clean_governance(governance: bridge.BoxGovernance) -> None:
    """Cut how a box decides, in place. A level that is none becomes ""."""
    governance.level = governance.level if governance.level in LEVELS else ""
    governance.runner_id = _keep_whole(governance.runner_id, _RUNNER_ID_CHARS)
    governance.public_key = _keep_whole(governance.public_key, _KEY_CHARS)
    newest = list(governance.op_keys.items())[-MAX_OP_KEYS:]
    governance.op_keys = {
        kid: secret
        for kid, secret in newest
        if kid and _keep_whole(kid, _ID_CHARS) and secret and _keep_whole(secret, _SECRET_CHARS)
    }
    governance.policy_version = min(max(0, governance.policy_version), _MAX_COUNT)
    governance.policy_sha256 = _keep_whole(governance.policy_sha256, _DIGEST_CHARS)
    governance.policy_error = _cut(governance.policy_error, _ALARM_CHARS)
    governance.witness_size = min(max(0, governance.witness_size), _MAX_SIZE)
    governance.witness_root = _keep_whole(governance.witness_root, _DIGEST_CHARS)
    governance.clock_ms = min(max(0, governance.clock_ms), _MAX_CLOCK_MS)


def _keep_whole(text: str, limit: int) -> str:
    return text if len(text) <= limit and text.isprintable() else ""


def _cut(text: str, limit: int) -> str:
    return "".join(c if c.isprintable() else " " for c in text[:limit]).strip()


def _clamp(value: float | None, top: float) -> float | None:
    return None if value is None or not math.isfinite(value) else min(max(0.0, value), top)


def _can_be_stored(result: dict[str, object]) -> bool:
    """Whether PostgreSQL takes it as JSON: no NUL, no lone surrogate, no infinity, and not too large."""
    try:
        text = json.dumps(result, allow_nan=False)
    except (ValueError, RecursionError):
        return False
    return len(text) <= MAX_RESULT_BYTES and "\\u0000" not in text and _is_encodable(result)


def _is_encodable(result: dict[str, object]) -> bool:
    try:
        json.dumps(result, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
