"""Lists of operations, the page of one, and what people do there."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from http import HTTPStatus

from django.conf import settings
from django.contrib import messages
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.views.decorators.http import require_POST, require_safe

from core.limits import limits
from governance.admin_tokens import claim_admin_token
from governance.errors import ApprovalRefused, OperationNotFound
from governance.operations import decisions, proposals
from governance.operations.evidence import read_evidence
from governance.operations.policies import active_policy
from governance.operations.reading import read_history, read_inbox, read_operation
from governance.operations.standing import use_approval
from governance.operations.values import OperationView
from governance.signin import may_act
from governance.web.frame import approval_form, approval_json, approval_page, find_proposer, find_viewer, render_page
from governance.web.operation_parts import describe_live, render_live
from wire.ids import format_id
from wire.optoken.approval import decode_bytes

TIMES = ("requestedAt", "notBefore", "notAfter")


def locate_operation(op_id: uuid.UUID) -> str:
    """Return the address of the page of an operation."""
    return reverse("approvals:operation", args=[op_id])


@require_safe
@approval_page
def show_inbox(request: HttpRequest) -> HttpResponse:
    """Show what waits for this person, what they asked for, and the rest."""
    inbox = read_inbox(find_viewer(request))
    has_policy = active_policy() is not None
    return render_page(request, "approvals/inbox.html", {"section": "inbox", "inbox": inbox, "has_policy": has_policy})


@require_safe
@approval_page
def show_history(request: HttpRequest) -> HttpResponse:
    """Show what was asked for, newest first; ``?before=`` is the time that an earlier page ended with."""
    before = read_time(request.GET.get("before", ""))
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
    """Show one operation: what it does, what is signed, who approved, what became of it."""
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
    """Answer with what the stand-alone verifier checks."""
    name = format_id("op", op_id)
    evidence = read_evidence(name)
    if not evidence:
        raise OperationNotFound(f"There is no operation {name}.")
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
    try:
        body = json.loads(request.body) if len(request.body) <= limits().governance.proof_body_bytes else None
    except (ValueError, RecursionError):
        body = None
    proof = body.get("proof") if isinstance(body, dict) else None
    if not isinstance(body, dict) or not isinstance(proof, dict):
        raise ApprovalRefused("The browser sent no proof that can be read. Reload the page and try again.", rule="bad_proof")
    return proof, str(body.get("comment", ""))


def _return(request: HttpRequest, op_id: uuid.UUID, said: str) -> HttpResponse:
    messages.success(request, said)
    return HttpResponseRedirect(locate_operation(op_id), status=HTTPStatus.SEE_OTHER)


@require_POST
@approval_form(back_to=locate_operation)
def reject(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    """Say no, with a reason."""
    decisions.reject(op_id=op_id, user=find_viewer(request), comment=request.POST.get("comment", ""))
    return _return(request, op_id, "Your rejection is recorded.")


@require_POST
@approval_form(back_to=locate_operation)
def withdraw(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    """Take one's own decision back."""
    decisions.withdraw(op_id=op_id, user=find_viewer(request))
    return _return(request, op_id, "Your decision is withdrawn.")


@require_POST
@approval_form(back_to=locate_operation)
def cancel(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    """Take one's own operation back."""
    proposals.cancel(op_id=op_id, proposer=find_proposer(request))
    return _return(request, op_id, "The operation is cancelled.")


@require_POST
@approval_form(back_to=locate_operation)
def use(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    """Carry a standing approval out once more."""
    use_approval(op_id=op_id, proposer=find_proposer(request))
    return _return(request, op_id, "It is carried out once more.")


@require_POST
@approval_form(back_to=locate_operation)
def claim(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    """Show the admin token that was approved. It passes no session and no cache, and is shown once."""
    token, secret = claim_admin_token(op_id=op_id, user=find_viewer(request))
    context = {"token": token, "secret": secret, "back_url": locate_operation(op_id)}
    return render_page(request, "approvals/claimed.html", context)
