"""The REST API of governance: operations, decisions about them, policy, freeze, proofs of the audit log, and alerts."""

from __future__ import annotations

import base64
import json
import uuid
from datetime import UTC, datetime, timedelta

from django.db.models import Q
from django.http import HttpResponse
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import status
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from core.limits import limits
from core.roles import DECIDE, PROPOSE, SEE_OPERATIONS
from governance.admin_tokens import claim_admin_token
from governance.alerts import lift_silence, list_alerts, read_alert, read_last_look, silence_alert
from governance.checkpoints import consistency, latest_checkpoint
from governance.errors import NotFound, NotPermitted
from governance.models import Freeze, Operation
from governance.operations.approvals import (
    active_policy,
    find_operation,
    policy_chain,
    read_freeze,
)
from governance.operations.decisions import approve, reject, withdraw
from governance.operations.policies import draft_policy, freeze
from governance.operations.proposals import cancel, propose, use_approval
from governance.operations.queries import OperationSummary, read_evidence, read_operation, summarise, with_parts
from governance.rest.answers import (
    ALERT_ID,
    APPROVAL,
    DRAFT,
    FREEZE,
    OP_ID,
    PROPOSAL,
    REJECTION,
    SILENCE,
    AlertPageSerializer,
    AlertSerializer,
    ClaimedTokenSerializer,
    ConsistencySerializer,
    EvidenceSerializer,
    FreezeSerializer,
    OperationSerializer,
    PageSerializer,
    PolicyChainSerializer,
    PolicySerializer,
    ReceiptListSerializer,
    describe_bytes,
    describe_refusals,
)
from governance.rest.requests import (
    AlertListForm,
    ApprovalForm,
    ChainForm,
    ConsistencyForm,
    DraftForm,
    EmptyForm,
    FreezeForm,
    GovernanceView,
    ListForm,
    ProposalForm,
    RejectionForm,
    SilenceForm,
    find_owner,
    get_caller,
    read_form,
    read_op_id,
    require_owner,
)
from wire import COMMAND
from wire.auditlog import to_text
from wire.optoken.approval import decode_bytes, encode_bytes


class OperationListView(GovernanceView):
    needs = {"GET": SEE_OPERATIONS, "POST": PROPOSE}

    @extend_schema(
        operation_id="list_operations", parameters=[ListForm], responses={200: PageSerializer, **describe_refusals(400)}
    )
    def get(self, request: Request) -> Response:
        """List operations, newest first, a page at a time."""
        form = read_form(ListForm, request.query_params)
        summaries, cursor = list_operations(**form)
        return Response(PageSerializer({"operations": summaries, "next_cursor": cursor}).data)

    @extend_schema(
        operation_id="propose_operation",
        request=ProposalForm,
        parameters=[
            OpenApiParameter(
                "Idempotency-Key", str, OpenApiParameter.HEADER,
                description=f"Up to {limits().governance.idempotency_key_chars} visible ASCII characters; again with the "
                "same request: the same answer",
            )
        ],
        examples=[PROPOSAL],
        responses={201: OperationSerializer, **describe_refusals(400, 403, 409, 413, 415, 429)},
    )  # fmt: skip
    def post(self, request: Request) -> Response:
        """Ask for an operation. Nothing happens until enough people have signed its statement."""
        key = read_key(request.headers.get("Idempotency-Key"))
        form = read_form(ProposalForm, request.data)
        found = propose(**form, proposer=get_caller(request).proposer, idempotency_key=key)
        return show_operation(request, found, status_code=status.HTTP_201_CREATED)


class OperationView(GovernanceView):
    needs = {"GET": SEE_OPERATIONS}

    @extend_schema(
        operation_id="read_operation", parameters=[OP_ID], responses={200: OperationSerializer, **describe_refusals(404)}
    )
    def get(self, request: Request, op_id: str) -> Response:
        """Read everything about an operation: what is signed, in words and in bytes, who said what, how it is carried out."""
        view = read_operation(read_op_id(op_id), find_owner(request))
        return Response(OperationSerializer(view).data)


class StatementView(GovernanceView):
    needs = {"GET": SEE_OPERATIONS}

    @extend_schema(
        operation_id="read_statement",
        parameters=[
            OP_ID,
            OpenApiParameter("X-Statement-Digest", str, OpenApiParameter.HEADER, response=[200], description="Hexadecimal"),
            OpenApiParameter("X-Statement-Words", str, OpenApiParameter.HEADER, response=[200], description="Six words of it"),
        ],
        responses={
            **describe_bytes(media_type="application/octet-stream", description="Canonical JSON"), **describe_refusals(404)
        },
    )  # fmt: skip
    def get(self, request: Request, op_id: str) -> HttpResponse:
        """Read the statement as it is signed. The digest in the header is for comparing: compute your own."""
        view = read_operation(read_op_id(op_id), None)
        headers = {"X-Statement-Digest": view.digest, "X-Statement-Words": view.words}
        return HttpResponse(decode_bytes(view.statement_b64), content_type="application/octet-stream", headers=headers)


class EvidenceView(GovernanceView):
    needs = {"GET": SEE_OPERATIONS}

    @extend_schema(
        operation_id="read_evidence", parameters=[OP_ID], responses={200: EvidenceSerializer, **describe_refusals(404)}
    )
    def get(self, request: Request, op_id: str) -> Response:
        """Read the bundle that the stand-alone verifier checks without asking this server anything."""
        bundle = read_evidence(str(read_op_id(op_id)))
        if not bundle:
            raise NotFound(f"There is no operation {op_id[:60]}.", param="op_id")
        return Response(bundle)


class ReceiptListView(GovernanceView):
    needs = {"GET": SEE_OPERATIONS}

    @extend_schema(
        operation_id="list_receipts", parameters=[OP_ID], responses={200: ReceiptListSerializer, **describe_refusals(404)}
    )
    def get(self, request: Request, op_id: str) -> Response:
        """List the receipts of an operation's runs, as far as nodes have sent them."""
        view = read_operation(read_op_id(op_id), None)
        return Response(ReceiptListSerializer({"receipts": [run for run in view.runs if run.receipt]}).data)


def show_operation(request: Request, operation: Operation, *, status_code: int = status.HTTP_200_OK) -> Response:
    """Return the answer of a change: the operation as it is now, for the owner of the token."""
    view = read_operation(operation.pk, find_owner(request))
    headers = {"Location": f"/api/v1/operations/{operation.printed_id}"} if status_code == status.HTTP_201_CREATED else None
    return Response(OperationSerializer(view).data, status=status_code, headers=headers)


# Pages of the list, and what stands in cursors and idempotency keys

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def list_operations(
    *,
    limit: int,
    state: str | None = None,
    operation: str | None = None,
    requested_by: str | None = None,
    cursor: str | None = None,
) -> tuple[list[OperationSummary], str | None]:
    """Return a page of operations, newest first, and the cursor of the next one (None: it is the last).

    Raises ValidationError for a cursor that is none.
    """
    wanted = {"state": state, "operation": operation, "requested_by": requested_by}
    rows = Operation.objects.filter(**{name: value for name, value in wanted.items() if value is not None})
    if cursor is not None:
        at, ident = _read_cursor(cursor)
        # Not an offset: rows that are added meanwhile would shift it.
        rows = rows.filter(Q(requested_at__lt=at) | Q(requested_at=at, id__lt=ident))
    page = list(with_parts(rows).order_by("-requested_at", "-id")[: limit + 1])
    shown = [summarise(row) for row in page[:limit]]
    return shown, _make_cursor(page[limit - 1]) if len(page) > limit else None


def read_key(text: str | None) -> str | None:
    """Return an idempotency key as it is. Raises ValidationError."""
    if text is None:
        return None
    if not (1 <= len(text) <= limits().governance.idempotency_key_chars and text.isascii() and text.isprintable()):
        raise ValidationError(
            {"Idempotency-Key": [f"Give 1 to {limits().governance.idempotency_key_chars} visible ASCII characters."]}
        )
    return text


def _make_cursor(row: Operation) -> str:
    micros = (row.requested_at - _EPOCH) // timedelta(microseconds=1)
    return base64.urlsafe_b64encode(micros.to_bytes(8) + row.pk.bytes).decode()


def _read_cursor(text: str) -> tuple[datetime, uuid.UUID]:
    try:
        raw = base64.urlsafe_b64decode(text)
    except ValueError:
        raw = b""
    micros = int.from_bytes(raw[:8])
    if len(raw) != 24 or micros > 2**53:  # a time and an id
        raise ValidationError({"cursor": ["Give the next_cursor of a page of this list."]})
    return _EPOCH + timedelta(microseconds=micros), uuid.UUID(bytes=raw[8:])


# Deciding about an operation, using it again, claiming what it made

_CHANGED = {200: OperationSerializer, **describe_refusals(400, 403, 404, 409, 413, 415)}


class ApprovalView(GovernanceView):
    needs = {"POST": DECIDE, "DELETE": DECIDE}

    @extend_schema(
        operation_id="approve_operation", parameters=[OP_ID], request=ApprovalForm, examples=[APPROVAL], responses=_CHANGED
    )
    def post(self, request: Request, op_id: str) -> Response:
        """Approve with a signature over the digest of the statement, brought with a token of the person who signed."""
        ident = read_op_id(op_id)
        form = read_form(ApprovalForm, request.data)
        approver = find_owner(request)
        if approver is None:
            raise NotPermitted(
                "A token of nobody brings no approvals: mint a token of your own with admin-token-mint, or before the first "
                f"policy with {COMMAND} manage create_admin_token --owner."
            )
        brought_by = get_caller(request).token
        return show_operation(request, approve(op_id=ident, user=approver, brought_by=brought_by, **form))

    @extend_schema(operation_id="withdraw_approval", parameters=[OP_ID], request=None, responses=_CHANGED)
    def delete(self, request: Request, op_id: str) -> Response:
        """Take back what the owner of the token decided. Possible until the operation is on its way."""
        ident = read_op_id(op_id)
        return show_operation(request, withdraw(op_id=ident, user=require_owner(request, purpose="withdraw")))


class RejectionView(GovernanceView):
    needs = {"POST": DECIDE}

    @extend_schema(
        operation_id="reject_operation", parameters=[OP_ID], request=RejectionForm, examples=[REJECTION], responses=_CHANGED
    )
    def post(self, request: Request, op_id: str) -> Response:
        """Reject, as the owner of the token, who must be an approver. No signature: saying no is the safe direction."""
        ident = read_op_id(op_id)
        form = read_form(RejectionForm, request.data)
        person = require_owner(request, purpose="reject")
        return show_operation(request, reject(op_id=ident, user=person, **form))


class CancelView(GovernanceView):
    needs = {"POST": PROPOSE}

    @extend_schema(operation_id="cancel_operation", parameters=[OP_ID], request=EmptyForm, responses=_CHANGED)
    def post(self, request: Request, op_id: str) -> Response:
        """Cancel an operation, as whoever asked for it. Possible until it is on its way."""
        ident = read_op_id(op_id)
        read_form(EmptyForm, request.data)
        return show_operation(request, cancel(op_id=ident, proposer=get_caller(request).proposer))


class UseView(GovernanceView):
    needs = {"POST": PROPOSE}

    @extend_schema(operation_id="use_approval", parameters=[OP_ID], request=EmptyForm, responses=_CHANGED)
    def post(self, request: Request, op_id: str) -> Response:
        """Carry a standing approval out once more."""
        ident = read_op_id(op_id)
        read_form(EmptyForm, request.data)
        use_approval(op_id=ident, proposer=get_caller(request).proposer)
        return show_operation(request, find_operation(ident))


class ClaimView(GovernanceView):
    needs = {"POST": PROPOSE}

    @extend_schema(
        operation_id="claim_admin_token", parameters=[OP_ID], request=EmptyForm,
        responses={200: ClaimedTokenSerializer, **describe_refusals(400, 403, 404, 409, 413, 415)},
    )  # fmt: skip
    def post(self, request: Request, op_id: str) -> Response:
        """Take the token, as whoever asked for it. It is shown this once."""
        ident = read_op_id(op_id)
        read_form(EmptyForm, request.data)
        person = require_owner(request, purpose="claim a token")
        token, secret = claim_admin_token(op_id=ident, user=person)
        answer = {"token_id": token.pk, "name": token.name, "key_id": token.keyid, "secret": secret}
        # Shown this once: no cache may keep it.
        return Response(ClaimedTokenSerializer(answer).data, headers={"Cache-Control": "no-store"})


# The policy, the freeze, and what auditors and witnesses fetch of the audit log


class PolicyView(GovernanceView):
    needs = {"GET": SEE_OPERATIONS}

    @extend_schema(operation_id="read_policy", responses={200: PolicySerializer, **describe_refusals(404)})
    def get(self, request: Request) -> Response:
        """Read the policy in force, parsed and as the bytes that were signed."""
        found = active_policy()
        if found is None:
            raise NotFound("No policy is in force. Draft the first one: POST /api/v1/policy/drafts.")
        row, policy = found
        return Response(
            PolicySerializer(
                {
                    "version": row.version,
                    "sha256": row.sha256,
                    "words": row.words,
                    "activated_at": row.activated_at,
                    "document": json.loads(policy.raw),
                    "document_b64": encode_bytes(policy.raw),
                }
            ).data
        )


class PolicyChainView(GovernanceView):
    needs = {"GET": SEE_OPERATIONS}

    @extend_schema(
        operation_id="read_policy_chain",
        parameters=[ChainForm],
        responses={200: PolicyChainSerializer, **describe_refusals(400)},
    )
    def get(self, request: Request) -> Response:
        """Read every version behind the one that is held, each with what proves that it was approved."""
        form = read_form(ChainForm, request.query_params)
        chain = policy_chain(after_version=form["after"])
        return Response(PolicyChainSerializer({"policies": chain}).data)


class PolicyDraftView(GovernanceView):
    needs = {"POST": PROPOSE}

    @extend_schema(
        operation_id="draft_policy", request=DraftForm, examples=[DRAFT],
        responses={201: OperationSerializer, **describe_refusals(400, 403, 409, 413, 415, 429)},
    )  # fmt: skip
    def post(self, request: Request) -> Response:
        """Draft the next policy and ask for its approval, under the policy in force and under itself."""
        form = read_form(DraftForm, request.data)
        found = draft_policy(**form, proposer=get_caller(request).proposer)
        return show_operation(request, found, status_code=status.HTTP_201_CREATED)


class FreezeView(GovernanceView):
    needs = {"GET": SEE_OPERATIONS, "POST": DECIDE}

    @extend_schema(operation_id="read_freeze", responses={200: FreezeSerializer, **describe_refusals()})
    def get(self, request: Request) -> Response:
        """Say whether everything stands still, since when and why."""
        return Response(_show_freeze(read_freeze()))

    @extend_schema(
        operation_id="freeze_operations", request=FreezeForm, examples=[FREEZE],
        responses={200: FreezeSerializer, **describe_refusals(400, 403, 409, 413, 415)},
    )  # fmt: skip
    def post(self, request: Request) -> Response:
        """Freeze everything, as the owner of the token, who must be an approver. Lifting it is the operation unfreeze."""
        form = read_form(FreezeForm, request.data)
        person = require_owner(request, purpose="freeze")
        return Response(_show_freeze(freeze(user=person, **form)))


def _show_freeze(row: Freeze | None) -> dict[str, object]:
    known = {name: getattr(row, name, None) for name in ("frozen_by", "frozen_at", "reason")}
    return dict(FreezeSerializer({"is_frozen": row is not None, **known}).data)


class CheckpointView(GovernanceView):
    needs = {"GET": "governance.view_auditevent"}

    @extend_schema(
        operation_id="read_checkpoint",
        responses={**describe_bytes(media_type="text/plain", description="C2SP signed note"), **describe_refusals(404)},
    )
    def get(self, request: Request) -> HttpResponse:
        """Read the newest checkpoint: a signed note with the size of the log and the root over it."""
        checkpoint = latest_checkpoint()
        if checkpoint is None:
            raise NotFound("There is no checkpoint yet. One is signed every few minutes once MUSTER_LOG_KEY is set.")
        return HttpResponse(checkpoint.note, content_type="text/plain; charset=utf-8")


class ConsistencyView(GovernanceView):
    needs = {"GET": "governance.view_auditevent"}

    @extend_schema(
        operation_id="prove_consistency", parameters=[ConsistencyForm],
        responses={200: ConsistencySerializer, **describe_refusals(400)},
    )  # fmt: skip
    def get(self, request: Request) -> Response:
        """Prove that the log of ``old`` entries is the head of the log of ``new`` entries."""
        form = read_form(ConsistencyForm, request.query_params)
        old, new = form["old"], form["new"]
        proof = [to_text(step) for step in consistency(old, new)]
        return Response(ConsistencySerializer({"old": old, "new": new, "proof": proof}).data)


# Alerts


class AlertListView(GovernanceView):
    needs = {"GET": "governance.view_alert"}

    @extend_schema(
        operation_id="list_alerts", parameters=[AlertListForm], responses={200: AlertPageSerializer, **describe_refusals(400)}
    )
    def get(self, request: Request) -> Response:
        """List alerts, newest first, a page at a time: those that are open, or of another state."""
        alerts, cursor = list_alerts(**read_form(AlertListForm, request.query_params))
        page = {"alerts": alerts, "looked_at": read_last_look(), "next_cursor": None if cursor is None else str(cursor)}
        return Response(AlertPageSerializer(page).data)


class AlertView(GovernanceView):
    needs = {"GET": "governance.view_alert"}

    @extend_schema(operation_id="read_alert", parameters=[ALERT_ID], responses={200: AlertSerializer, **describe_refusals(404)})
    def get(self, request: Request, alert_id: int) -> Response:
        """Read one alert."""
        return Response(AlertSerializer(read_alert(alert_id)).data)


class AlertSilenceView(GovernanceView):
    needs = {"POST": "governance.change_alert", "DELETE": "governance.change_alert"}

    @extend_schema(
        operation_id="silence_alert", parameters=[ALERT_ID], request=SilenceForm, examples=[SILENCE],
        responses={200: AlertSerializer, **describe_refusals(400, 404, 413, 415)},
    )  # fmt: skip
    def post(self, request: Request, alert_id: int) -> Response:
        """Hide an alert from counts and messages until then. Again: another end and reason."""
        form = read_form(SilenceForm, request.data)
        silence_alert(
            alert_id=alert_id,
            until=form["until"],
            reason=form["reason"],
            is_lasting=form["lasting"],
            actor=get_caller(request).actor,
        )
        return Response(AlertSerializer(read_alert(alert_id)).data)

    @extend_schema(
        operation_id="lift_silence", parameters=[ALERT_ID], request=None,
        responses={200: AlertSerializer, **describe_refusals(404)},
    )  # fmt: skip
    def delete(self, request: Request, alert_id: int) -> Response:
        """Lift the silence of an alert, and of what begins later of its kind, for the same object."""
        lift_silence(alert_id=alert_id, actor=get_caller(request).actor)
        return Response(AlertSerializer(read_alert(alert_id)).data)
