"""What a page says of one operation: the parts that change while it is open, and proofs and receipts in words."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from django.template.loader import render_to_string

from governance.operations.values import DecisionView, OperationView, RunView
from governance.registry import Line
from governance.states import OPEN_RUNS, ApprovalState, RunState
from wire.optoken.approval import ApprovalError, decode_bytes, digest_words

LIVE_TEMPLATE = "approvals/live.html"
ONLY_LOOKING = "This session is for looking, because it was opened with a password. Sign in with your passkey to act."
RUN_WORDS = {
    RunState.QUEUED: "waits for its turn",
    RunState.DISPATCHED: "sent to the node",
    RunState.EXECUTING: "being carried out",
    RunState.UNKNOWN: "outcome not known yet",
    RunState.RESOLVED: "resolved: the node was asked what it has",
    RunState.SKIPPED: "skipped",
}
KEY_WORDS = {"webauthn": "passkey", "ed25519": "key file"}
_FLAGS = ((0x01, "user present"), (0x04, "user verified"), (0x08, "may be copied to other devices"), (0x10, "is copied"))
_RECEIPT_LABELS = {
    "opId": "Operation id", "use": "Use", "statementDigest": "Statement", "runnerId": "Node", "operation": "Operation",
    "outcome": "Outcome", "resultDigest": "Digest of the result", "fence": "Fence", "startedAt": "Begun (Unix s)",
    "endedAt": "Ended (Unix s)", "checkpoint": "Audit log seen (entries)",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ShownDecision:
    """A decision and its proof in words; ``kind``: passkey or key file."""

    row: DecisionView
    kind: str
    proof: list[Line]


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A carrying out, its state in words, and its receipt."""

    row: RunView
    state_text: str
    shows_bar: bool
    receipt: list[Line]


def describe_live(view: OperationView, *, is_able: bool) -> dict[str, object]:
    """Return what the live parts show. ``is_able``: whether the session may act; else nothing is offered."""
    offers = view.actions if is_able else frozenset()
    hindrance = view.hindrances.get("approve", "") if is_able else ONLY_LOOKING
    is_pending = view.summary.state == ApprovalState.PENDING
    return {
        "operation": view,
        "offers": offers,
        "offered": " ".join(sorted(offers)),
        "said": say_state(view),
        "missing": list_missing(view),
        "decisions": [_show_decision(decision) for decision in view.decisions],
        "hindrances": [hindrance] if hindrance and is_pending else [],
        "runs": [_show_run(run) for run in view.runs],
        "waits_frozen": view.is_frozen and view.summary.state == ApprovalState.APPROVED and _has_more_to_do(view),
    }


def _has_more_to_do(view: OperationView) -> bool:
    return not view.runs or any(run.state == RunState.QUEUED for run in view.runs)


def render_live(view: OperationView, *, is_able: bool) -> str:
    """Return the HTML that is pushed to an open page."""
    return render_to_string(LIVE_TEMPLATE, describe_live(view, is_able=is_able))


def say_state(view: OperationView) -> str:
    """Return what a screen reader is told when it changes. Progress is told in steps of ten, or it would never be silent."""
    summary = view.summary
    said = [f"{summary.state}, {summary.approvals} of {summary.required} approvals"]
    for run in view.runs:
        words = RUN_WORDS.get(RunState(run.state), run.state)
        is_moving = run.state == RunState.EXECUTING and run.percent is not None
        said.append(f"{run.target}: {words}" + (f", {(run.percent or 0) // 10 * 10} percent" if is_moving else ""))
    return "; ".join(said)


def list_missing(view: OperationView) -> list[str]:
    """Return what is still needed, each in a few words."""
    verdict = view.verdict
    if verdict is None:
        return ["the approvals cannot be judged: the policy or a proof does not hold"]
    found = []
    if verdict.missing:
        found.append("1 more person" if verdict.missing == 1 else f"{verdict.missing} more people")
    found += [f"{count} of the group {group}" for group, count in sorted(verdict.missing_factors.items())]
    if verdict.missing_file_proofs:
        found.append(f"{verdict.missing_file_proofs} signed with a key file")
    return found


def _show_decision(decision: DecisionView) -> ShownDecision:
    proof = describe_proof(decision.proof) if decision.proof else []
    return ShownDecision(decision, KEY_WORDS.get(decision.key_kind, decision.key_kind), proof)


def _show_run(run: RunView) -> ShownRun:
    state = RunState(run.state)
    receipt = [
        Line(_RECEIPT_LABELS[name], str(value)) for name, value in (run.receipt or {}).items() if name in _RECEIPT_LABELS
    ]
    shows_bar = state in OPEN_RUNS and state is not RunState.QUEUED
    return ShownRun(run, RUN_WORDS.get(state, state.value), shows_bar, receipt)


def describe_proof(proof: Mapping[str, object]) -> list[Line]:
    """Return a proof in words. It was verified before it was stored; one that cannot be read any more is said to be so."""
    lines = [
        Line("Kind", KEY_WORDS.get(str(proof.get("type")), str(proof.get("type")))),
        Line("Key id", str(proof.get("keyid"))),
    ]
    if proof.get("type") == "webauthn":
        try:
            lines += _describe_assertion(proof)
        except (ApprovalError, ValueError, KeyError, IndexError) as error:
            lines.append(Line("Problem", f"this proof cannot be read: {error}"))
    return [*lines, Line("Signature", str(proof.get("signature")))]


def _describe_assertion(proof: Mapping[str, object]) -> list[Line]:
    client = json.loads(decode_bytes(proof["clientDataJSON"]))
    device = decode_bytes(proof["authenticatorData"])
    origin, site = str(client["origin"]), device[:32]
    host = urlsplit(origin).hostname or ""
    belongs = hashlib.sha256(host.encode()).digest() == site
    flags = [words for bit, words in _FLAGS if device[32] & bit]
    return [
        Line("Signed on", origin),
        Line("Site (RP id)", host if belongs else f"SHA-256 {site.hex()}"),
        Line("Purpose", str(client["type"])),
        Line("Six words signed", digest_words(decode_bytes(client["challenge"]))),
        Line("In a foreign frame", "yes" if client.get("crossOrigin") else "no"),
        Line("The device says", ", ".join(flags) or "nothing"),
        Line("Counter", str(int.from_bytes(device[33:37]))),
    ]
