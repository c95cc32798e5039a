"""Lists of operations, the page of one with the parts that change while it is open, and what people do there."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.template.loader import render_to_string
from django.utils.dateparse import parse_datetime
from django.views.decorators.http import require_POST, require_safe

from core.limits import limits
from governance.admin_tokens import claim_admin_token
from governance.errors import ApprovalRefused, NotFound
from governance.models import OperationRun
from governance.operations import decisions, proposals
from governance.operations.approvals import active_policy
from governance.operations.proposals import use_approval
from governance.operations.queries import (
    DecisionView,
    OperationView,
    read_evidence,
    read_history,
    read_inbox,
    read_operation,
)
from governance.registry import Line
from governance.signin import may_act
from governance.states import OPEN_RUNS, ApprovalState, RunState
from governance.web.pages import (
    approval_json,
    approval_page,
    find_proposer,
    find_viewer,
    locate_operation,
    operation_form,
    read_object,
    render_page,
)
from wire.ids import format_id
from wire.optoken.approval import ApprovalError, decode_bytes, digest_words

TIMES = ("requestedAt", "notBefore", "notAfter")


@require_safe
@approval_page
def show_inbox(request: HttpRequest) -> HttpResponse:
    inbox = read_inbox(find_viewer(request))
    has_policy = active_policy() is not None
    return render_page(request, "approvals/inbox.html", {"section": "inbox", "inbox": inbox, "has_policy": has_policy})


@require_safe
@approval_page
def show_history(request: HttpRequest) -> HttpResponse:
    """Show what was asked for, newest first; ``?before=`` is the time that an earlier page ended with."""
    before = read_time(request.GET.get("before", ""))
    # One more than is shown tells whether there are older ones.
    found = read_history(before=before, limit=limits().governance.history_rows + 1)
    page = found[: limits().governance.history_rows]
    older = page[-1].requested_at.isoformat() if len(found) > limits().governance.history_rows else ""
    context = {"section": "history", "operations": page, "older": older, "is_later": before is not None}
    return render_page(request, "approvals/history.html", context)


def read_time(text: str) -> datetime | None:
    """Return a time with its zone; None for what is none."""
    try:
        found = parse_datetime(text)
    except ValueError:
        return None
    return found if found is None or found.tzinfo else found.replace(tzinfo=UTC)


@require_safe
@approval_page
def show_operation(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    view = read_operation(op_id, find_viewer(request))
    context = {**describe_live(view, is_able=may_act(request)), **describe_statement(view), "site_url": settings.PUBLIC_URL}
    return render_page(request, "approvals/operation.html", context)


def describe_statement(view: OperationView) -> dict[str, object]:
    """Return the members of the statement as the page shows them, for the script that computes the digest of what is shown."""
    statement = view.statement
    return {
        "statement": statement,
        "statement_text": decode_bytes(view.statement_b64).decode(),
        "params": json.dumps(statement["params"], ensure_ascii=False, indent=2, sort_keys=True),
        "times": {name: datetime.fromtimestamp(int(str(statement[name])), UTC) for name in TIMES},
        "assertion": json.dumps(dict(view.assertion)) if view.assertion else "",
    }


@require_safe
@approval_json
def show_live(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    """Answer with what changes on the page, as the socket pushes it: for browsers without one."""
    view = read_operation(op_id, find_viewer(request))
    return JsonResponse({"html": render_live(view, is_able=may_act(request))})


@require_safe
@approval_page
def download_evidence(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    name = format_id("op", op_id)
    evidence = read_evidence(name)
    if not evidence:
        raise NotFound(f"There is no operation {name}.")
    return JsonResponse(evidence, headers={"Content-Disposition": f'attachment; filename="{name}.json"'})


@require_POST
@approval_json
def approve(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    """Keep the proof that the person's browser made; the body is ``{"proof": {…}, "comment": ""}``."""
    proof, comment = _read_proof(request)
    person = find_viewer(request)
    operation = decisions.approve(
        op_id=op_id, user=person, proof=proof, brought_by=f"session:{person.get_username()}", comment=comment
    )
    messages.success(request, "Your approval is recorded.")
    return JsonResponse({"state": operation.state})


def _read_proof(request: HttpRequest) -> tuple[dict[str, object], str]:
    body = read_object(request, most_bytes=limits().governance.proof_body_bytes)
    proof = body.get("proof")
    if not isinstance(proof, dict):
        raise ApprovalRefused("The browser sent no proof that can be read. Reload the page and try again.", rule="bad_proof")
    return proof, str(body.get("comment", ""))


def _return(request: HttpRequest, op_id: uuid.UUID, said: str) -> HttpResponse:
    messages.success(request, said)
    return HttpResponseRedirect(locate_operation(op_id), status=HTTPStatus.SEE_OTHER)


@require_POST
@operation_form
def reject(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    decisions.reject(op_id=op_id, user=find_viewer(request), comment=request.POST.get("comment", ""))
    return _return(request, op_id, "Your rejection is recorded.")


@require_POST
@operation_form
def withdraw(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    decisions.withdraw(op_id=op_id, user=find_viewer(request))
    return _return(request, op_id, "Your decision is withdrawn.")


@require_POST
@operation_form
def cancel(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    proposals.cancel(op_id=op_id, proposer=find_proposer(request))
    return _return(request, op_id, "The operation is cancelled.")


@require_POST
@operation_form
def use(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    use_approval(op_id=op_id, proposer=find_proposer(request))
    return _return(request, op_id, "It is carried out once more.")


@require_POST
@operation_form
def claim(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    token, secret = claim_admin_token(op_id=op_id, user=find_viewer(request))
    # On the answer itself, which passes no session and no cache: it is shown once.
    context = {"token": token, "secret": secret, "back_url": locate_operation(op_id)}
    return render_page(request, "approvals/claimed.html", context)


# What the page says of one operation: the parts that change while it is open, and proofs and receipts in words

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


def describe_live(view: OperationView, *, is_able: bool) -> dict[str, object]:
    """Return what the live parts show. ``is_able``: whether the session may act; else nothing is offered."""
    offers = view.actions if is_able else frozenset()
    refusal = view.hindrances.get("approve", "") if is_able else ONLY_LOOKING
    is_pending = view.summary.state == ApprovalState.PENDING
    has_more_to_do = not view.runs or any(run.state == RunState.QUEUED for run in view.runs)
    return {
        "operation": view,
        "offers": offers,
        "offered": " ".join(sorted(offers)),
        "said": say_state(view),
        "missing": list_missing(view),
        "decisions": [_show_decision(decision) for decision in view.decisions],
        "hindrances": [refusal] if refusal and is_pending else [],
        "runs": [_show_run(run) for run in view.runs],
        "waits_frozen": view.is_frozen and view.summary.state == ApprovalState.APPROVED and has_more_to_do,
    }


def render_live(view: OperationView, *, is_able: bool) -> str:
    """Return the HTML that is pushed to an open page."""
    return render_to_string(LIVE_TEMPLATE, describe_live(view, is_able=is_able))


def say_state(view: OperationView) -> str:
    """Return what a screen reader is told when it changes."""
    summary = view.summary
    said = [f"{summary.state}, {summary.approvals} of {summary.required} approvals"]
    for run in view.runs:
        words = RUN_WORDS.get(RunState(run.state), run.state)
        # Told in steps of ten, or it would never be silent.
        is_moving = run.state == RunState.EXECUTING and run.percent is not None
        said.append(f"{run.target}: {words}" + (f", {(run.percent or 0) // 10 * 10} percent" if is_moving else ""))
    return "; ".join(said)


def list_missing(view: OperationView) -> list[str]:
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


def _show_decision(decision: DecisionView) -> dict[str, object]:
    proof = describe_proof(decision.proof) if decision.proof else []
    return {"row": decision, "kind": KEY_WORDS.get(decision.key_kind, decision.key_kind), "proof": proof}


def _show_run(run: OperationRun) -> dict[str, object]:
    state = RunState(run.state)
    receipt = [
        Line(_RECEIPT_LABELS[name], str(value))
        for name, value in (run.receipt_members or {}).items()
        if name in _RECEIPT_LABELS
    ]
    shows_bar = state in OPEN_RUNS and state is not RunState.QUEUED
    return {"row": run, "state_text": RUN_WORDS.get(state, state.value), "shows_bar": shows_bar, "receipt": receipt}


def describe_proof(proof: Mapping[str, object]) -> list[Line]:
    """Return a proof in words."""
    lines = [
        Line("Kind", KEY_WORDS.get(str(proof.get("type")), str(proof.get("type")))),
        Line("Key id", str(proof.get("keyid"))),
    ]
    if proof.get("type") == "webauthn":
        try:
            lines += _describe_assertion(proof)
        # It was verified before it was stored, so it has been changed in the database since.
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
