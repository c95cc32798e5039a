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
from django.urls import reverse
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext
from django.views.decorators.http import require_POST, require_safe

from core.limits import limits
from governance.admin_tokens import claim_admin_token
from governance.errors import ApprovalRefused, NotFound
from governance.models import OperationRun, PolicyVersion
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
from governance.operations.visits import mark_seen, read_missed
from governance.people import may_propose
from governance.registry import Description, Line
from governance.signin import may_act
from governance.states import ApprovalState, RunState
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
from governance.web.rules import Reach, compare_reach
from governance.web.stepper import make_stepper
from wire import clock
from wire.ids import format_id
from wire.optoken.approval import POLICY_CHANGE, ApprovalError, decode_bytes, digest_words

TIMES = ("requestedAt", "notBefore", "notAfter")


@require_safe
@approval_page
def show_inbox(request: HttpRequest) -> HttpResponse:
    """Show what waits for the person, what they asked for, what others did, and what they missed."""
    viewer = find_viewer(request)
    inbox, missed = read_inbox(viewer), read_missed(viewer)
    has_policy = active_policy() is not None
    context = {"section": "inbox", "inbox": inbox, "missed": missed, "has_policy": has_policy, "now": clock.now()}
    context["may_propose"] = may_propose(viewer)
    return render_page(request, "approvals/inbox.html", context)


@require_POST
@approval_page
def mark_as_seen(request: HttpRequest) -> HttpResponse:
    """Note that the person has seen what they missed, up to the moment of the page that showed it."""
    until = read_time(request.POST.get("until", ""))
    if until is not None:
        mark_seen(user=find_viewer(request), until=until)
    return HttpResponseRedirect(reverse("approvals:inbox"), status=HTTPStatus.SEE_OTHER)


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
    context = {
        **describe_live(view, is_able=may_act(request)),
        **describe_statement(view),
        **_split_description(view),
        "reach": _compare_policies(view),
        "site_url": settings.PUBLIC_URL,
    }
    return render_page(request, "approvals/operation.html", context)


def _compare_policies(view: OperationView) -> Reach | None:
    """Return who could do more or less under a policy that waits for approvals; None = nobody, or another operation."""
    params = view.statement["params"]
    if view.summary.operation != POLICY_CHANGE or view.summary.state != ApprovalState.PENDING or not isinstance(params, dict):
        return None
    row, found = PolicyVersion.objects.filter(sha256=str(params.get("sha256", ""))).first(), active_policy()
    if row is None:
        return None
    reach = compare_reach(found[1] if found else None, row.read_policy())
    rows = [(name, cells) for name, cells in reach.rows if any(cell.is_new or cell.is_changed for cell in cells)]
    return Reach(reach.people, rows) if rows else None


def _split_description(view: OperationView) -> dict[str, object]:
    """Return what changes, and apart from it the lines beyond those that fit a screen: what stays as it is goes there first."""
    is_done = bool(view.runs) and view.summary.run_state != RunState.QUEUED
    lines, title = view.description.lines, view.description.title
    same = [] if is_done else [line for line in lines if line.now and line.now == line.value]
    changed = [line for line in lines if line not in same]
    most = limits().governance.page_lines
    rest = Description(title, [*changed[most:], *same])
    return {"is_done": is_done, "brief": Description(title, changed[:most]), "rest": rest}


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
        raise NotFound(_("There is no operation %(name)s.") % {"name": name})
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
    messages.success(request, _("Your approval is recorded."))
    return JsonResponse({"state": operation.state})


def _read_proof(request: HttpRequest) -> tuple[dict[str, object], str]:
    body = read_object(request, most_bytes=limits().governance.proof_body_bytes)
    proof = body.get("proof")
    if not isinstance(proof, dict):
        raise ApprovalRefused(_("The browser sent no proof that can be read. Reload the page and try again."), rule="bad_proof")
    return proof, str(body.get("comment", ""))


def _return(request: HttpRequest, op_id: uuid.UUID, said: str) -> HttpResponse:
    messages.success(request, said)
    return HttpResponseRedirect(locate_operation(op_id), status=HTTPStatus.SEE_OTHER)


@require_POST
@operation_form
def reject(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    decisions.reject(op_id=op_id, user=find_viewer(request), comment=request.POST.get("comment", ""))
    return _return(request, op_id, _("Your rejection is recorded."))


@require_POST
@operation_form
def withdraw(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    decisions.withdraw(op_id=op_id, user=find_viewer(request))
    return _return(request, op_id, _("Your decision is withdrawn."))


@require_POST
@operation_form
def cancel(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    proposals.cancel(op_id=op_id, proposer=find_proposer(request))
    return _return(request, op_id, _("The operation is cancelled."))


@require_POST
@operation_form
def use(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    use_approval(op_id=op_id, proposer=find_proposer(request))
    return _return(request, op_id, _("It is carried out once more."))


@require_POST
@operation_form
def claim(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
    token, secret = claim_admin_token(op_id=op_id, user=find_viewer(request))
    # On the answer itself, which passes no session and no cache: it is shown once.
    context = {"token": token, "secret": secret, "back_url": locate_operation(op_id)}
    return render_page(request, "approvals/claimed.html", context)


# What the page says of one operation: the parts that change while it is open, and proofs and receipts in words

LIVE_TEMPLATE = "approvals/live.html"
ONLY_LOOKING = gettext_lazy(
    "This session is for looking, because it was opened with a password. Sign in with your passkey to act."
)
APPROVAL_WORDS = {
    ApprovalState.PENDING: gettext_lazy("waiting for approvals"),
    ApprovalState.APPROVED: gettext_lazy("approved"),
    ApprovalState.REJECTED: gettext_lazy("rejected"),
    ApprovalState.EXPIRED: gettext_lazy("expired"),
    ApprovalState.CANCELLED: gettext_lazy("cancelled"),
    ApprovalState.BLOCKED: gettext_lazy("blocked: the policy changed"),
}
RUN_WORDS = {
    RunState.QUEUED: gettext_lazy("waits for its turn"),
    RunState.DISPATCHED: gettext_lazy("sent to the node"),
    RunState.EXECUTING: gettext_lazy("being carried out"),
    RunState.SUCCEEDED: gettext_lazy("succeeded"),
    RunState.FAILED: gettext_lazy("failed"),
    RunState.UNKNOWN: gettext_lazy("outcome not known yet"),
    RunState.RESOLVED: gettext_lazy("resolved: the node was asked what it has"),
    RunState.SKIPPED: gettext_lazy("skipped"),
}
KEY_WORDS = {"webauthn": gettext_lazy("passkey"), "ed25519": gettext_lazy("key file")}
_FLAGS = (
    (0x01, gettext_lazy("user present")),
    (0x04, gettext_lazy("user verified")),
    (0x08, gettext_lazy("may be copied to other devices")),
    (0x10, gettext_lazy("is copied")),
)
_RECEIPT_LABELS = {
    "opId": gettext_lazy("Operation id"),
    "use": gettext_lazy("Use"),
    "statementDigest": gettext_lazy("Statement"),
    "runnerId": gettext_lazy("Node"),
    "operation": gettext_lazy("Operation"),
    "outcome": gettext_lazy("Outcome"),
    "resultDigest": gettext_lazy("Digest of the result"),
    "fence": gettext_lazy("Fence"),
    "startedAt": gettext_lazy("Begun (Unix s)"),
    "endedAt": gettext_lazy("Ended (Unix s)"),
    "checkpoint": gettext_lazy("Audit log seen (entries)"),
}


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
        "stepper": make_stepper(view),
        "runs": [_show_run(run) for run in view.runs],
        "waits_frozen": view.is_frozen and view.summary.state == ApprovalState.APPROVED and has_more_to_do,
    }


def render_live(view: OperationView, *, is_able: bool) -> str:
    """Return the HTML that is pushed to an open page."""
    return render_to_string(LIVE_TEMPLATE, describe_live(view, is_able=is_able))


def say_state(view: OperationView) -> str:
    """Return what a screen reader is told when it changes."""
    summary = view.summary
    count = _("%(given)s of %(needed)s approvals") % {"given": summary.approvals, "needed": summary.required}
    said = [f"{APPROVAL_WORDS[ApprovalState(summary.state)]}, {count}"]
    for run in view.runs:
        # Told in steps of ten, or it would never be silent.
        tenth = (run.percent or 0) // 10 * 10
        is_moving = run.state == RunState.EXECUTING and run.percent is not None
        words = _("%(percent)s percent") % {"percent": tenth} if is_moving else RUN_WORDS[RunState(run.state)]
        said.append(f"{run.target}: {words}")
    return "; ".join(said)


def list_missing(view: OperationView) -> list[str]:
    """Return who or what is missing, a sentence each."""
    verdict = view.verdict
    if verdict is None:
        return [_("The approvals cannot be judged: the policy or a proof does not hold.")]
    found = []
    if verdict.missing:
        text = ngettext("%(count)s more of: %(names)s", "%(count)s more of: %(names)s", verdict.missing)
        found.append(text % {"count": verdict.missing, "names": ", ".join(view.could_approve) or _("nobody is left")})
    for group, count in sorted(verdict.missing_factors.items()):
        names = ", ".join(name for name in view.could_approve if group in view.groups.get(name, ()))
        text = _("%(count)s of the group %(group)s: %(names)s")
        found.append(text % {"count": count, "group": group, "names": names or _("nobody is left")})
    if count := verdict.missing_file_proofs:
        found.append(_("%(count)s signed with a key file") % {"count": count})
    return found


def _show_decision(decision: DecisionView) -> dict[str, object]:
    proof = describe_proof(decision.proof) if decision.proof else []
    return {"row": decision, "kind": KEY_WORDS.get(decision.key_kind, decision.key_kind), "proof": proof}


def _show_run(run: OperationRun) -> dict[str, object]:
    receipt = [
        Line(str(_RECEIPT_LABELS[name]), str(value))
        for name, value in (run.receipt_members or {}).items()
        if name in _RECEIPT_LABELS
    ]
    return {"row": run, "receipt": receipt}


def describe_proof(proof: Mapping[str, object]) -> list[Line]:
    """Return a proof in words."""
    lines = [
        Line(_("Kind"), str(KEY_WORDS.get(str(proof.get("type")), proof.get("type")))),
        Line(_("Key id"), str(proof.get("keyid"))),
    ]
    if proof.get("type") == "webauthn":
        try:
            lines += _describe_assertion(proof)
        # It was verified before it was stored, so it has been changed in the database since.
        except (ApprovalError, ValueError, KeyError, IndexError) as error:
            lines.append(Line(_("Problem"), _("this proof cannot be read: %(why)s") % {"why": error}))
    return [*lines, Line(_("Signature"), str(proof.get("signature")))]


def _describe_assertion(proof: Mapping[str, object]) -> list[Line]:
    client = json.loads(decode_bytes(proof["clientDataJSON"]))
    device = decode_bytes(proof["authenticatorData"])
    origin, site = str(client["origin"]), device[:32]
    host = urlsplit(origin).hostname or ""
    belongs = hashlib.sha256(host.encode()).digest() == site
    flags = [str(words) for bit, words in _FLAGS if device[32] & bit]
    return [
        Line(_("Signed on"), origin),
        Line(_("Site (RP id)"), host if belongs else f"SHA-256 {site.hex()}"),
        Line(_("Purpose"), str(client["type"])),
        Line(_("Six words signed"), digest_words(decode_bytes(client["challenge"]))),
        Line(_("In a foreign frame"), _("yes") if client.get("crossOrigin") else _("no")),
        Line(_("The device says"), ", ".join(flags) or _("nothing")),
        Line(_("Counter"), str(int.from_bytes(device[33:37]))),
    ]
