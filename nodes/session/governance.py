"""What a box says of operations and of how it decides about them, cut to sizes that can be kept. Nothing here raises.

Ids, keys and receipts are never shortened: one that is too long is dropped, because its head would be another one.
"""

from __future__ import annotations

import json
import math

from core.limits import limits
from wire import bridge

STATES = frozenset({"running", "succeeded", "failed", "refused", "interrupted", "unknown"})
LEVELS = frozenset({"L0", "L1", "L2"})


def clean_status(status: bridge.OpStatus) -> None:
    """Cut an ``op_status``, in place. A state that is none becomes "" and an impossible id or use names nothing."""
    status.op_id = _keep_whole(status.op_id, limits().nodes.op_id_chars)
    status.use = status.use if 1 <= status.use <= limits().nodes.report_integer else 0
    status.state = status.state if status.state in STATES else ""
    status.stage = _cut(status.stage, limits().nodes.status_stage_chars)
    status.fraction = _clamp(status.fraction, 1.0)
    status.eta_s = _clamp(status.eta_s, limits().nodes.report_eta_s)
    status.code = _cut(status.code, limits().nodes.status_code_chars)
    status.message = _cut(status.message, limits().nodes.status_message_chars)
    status.result = clean_result(status.result)
    status.receipt = _keep_whole(status.receipt, limits().nodes.status_receipt_chars)


def clean_result(result: dict[str, object]) -> dict[str, object]:
    """Return the result of an operation as it is, or one word on why it is not kept."""
    return result if _can_be_stored(result) else {"omitted": "it is too large, or cannot be stored"}


def clean_report(report: bridge.GovernanceReport) -> None:
    """Cut a ``governance_report``, in place."""
    clean_governance(report.governance)
    report.witness_signature = _keep_whole(report.witness_signature, limits().nodes.op_key_chars)
    note = report.witness_note
    is_note = len(note) <= limits().nodes.witness_note_chars and all(line.isprintable() for line in note.split("\n"))
    report.witness_note = note if is_note else ""
    report.witness_alarm = _cut(report.witness_alarm, limits().nodes.witness_alarm_chars)


def clean_governance(governance: bridge.BoxGovernance) -> None:
    """Cut how a box decides, in place. A level that is none becomes ""."""
    governance.level = governance.level if governance.level in LEVELS else ""
    governance.runner_id = _keep_whole(governance.runner_id, limits().nodes.runner_id_chars)
    governance.public_key = _keep_whole(governance.public_key, limits().nodes.public_key_chars)
    newest = list(governance.op_keys.items())[-limits().nodes.op_keys :]
    governance.op_keys = {
        kid: secret
        for kid, secret in newest
        if kid and _keep_whole(kid, limits().nodes.op_id_chars) and secret and _keep_whole(secret, limits().nodes.op_key_chars)
    }
    governance.policy_version = min(max(0, governance.policy_version), limits().nodes.report_integer)
    governance.policy_sha256 = _keep_whole(governance.policy_sha256, limits().nodes.digest_chars)
    governance.policy_error = _cut(governance.policy_error, limits().nodes.witness_alarm_chars)
    governance.witness_size = min(max(0, governance.witness_size), limits().nodes.report_exact_integer)
    governance.witness_root = _keep_whole(governance.witness_root, limits().nodes.digest_chars)
    governance.clock_ms = min(max(0, governance.clock_ms), limits().nodes.report_clock_ms)


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
    return len(text) <= limits().nodes.status_result_bytes and "\\u0000" not in text and _is_encodable(result)


def _is_encodable(result: dict[str, object]) -> bool:
    try:
        json.dumps(result, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
