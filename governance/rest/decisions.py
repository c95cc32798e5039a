"""Deciding about an operation: approve with a proof, reject, withdraw, cancel; then use it again, or claim what it made."""

from __future__ import annotations

from typing import Any

from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from governance.admin_tokens import claim_admin_token
from governance.errors import NotPermitted
from governance.operations.decisions import approve, reject, withdraw
from governance.operations.lookup import find_operation
from governance.operations.proposals import cancel
from governance.operations.standing import use_approval
from governance.rest.access import GovernanceView, find_owner, get_caller, read_op_id, require_owner
from governance.rest.answers import ClaimedTokenSerializer, OperationSerializer
from governance.rest.forms import ApprovalForm, EmptyForm, RejectionForm
from governance.rest.operations import show_operation
from governance.rest.schema import APPROVAL, OP_ID, REJECTION, describe_refusals

_CHANGED = {200: OperationSerializer, **describe_refusals(400, 403, 404, 409, 413, 415)}


class ApprovalView(GovernanceView):
    """Approvals of an operation."""

    @extend_schema(
        operation_id="approve_operation", parameters=[OP_ID], request=ApprovalForm, examples=[APPROVAL], responses=_CHANGED
    )
    def post(self, request: Request, op_id: str) -> Response:
        """Approve with a signature over the digest of the statement, brought with a token of the person who signed."""
        ident = read_op_id(op_id)
        form = ApprovalForm(data=request.data)
        form.is_valid(raise_exception=True)
        approver = find_owner(request)
        if approver is None:
            raise NotPermitted(
                "A token of nobody brings no approvals: mint a token of your own with admin-token-mint, or before the first "
                "policy with ./muster manage create_admin_token --owner."
            )
        brought_by = get_caller(request).token
        return show_operation(request, approve(op_id=ident, user=approver, brought_by=brought_by, **form.validated_data))

    @extend_schema(operation_id="withdraw_approval", parameters=[OP_ID], request=None, responses=_CHANGED)
    def delete(self, request: Request, op_id: str) -> Response:
        """Take back what the owner of the token decided. Possible until the operation is on its way."""
        ident = read_op_id(op_id)
        return show_operation(request, withdraw(op_id=ident, user=require_owner(request, purpose="withdraw")))


class RejectionView(GovernanceView):
    """Rejections of an operation."""

    @extend_schema(
        operation_id="reject_operation", parameters=[OP_ID], request=RejectionForm, examples=[REJECTION], responses=_CHANGED
    )
    def post(self, request: Request, op_id: str) -> Response:
        """Reject, as the owner of the token, who must be an approver. No signature: saying no is the safe direction."""
        ident = read_op_id(op_id)
        form = RejectionForm(data=request.data)
        form.is_valid(raise_exception=True)
        person = require_owner(request, purpose="reject")
        return show_operation(request, reject(op_id=ident, user=person, **form.validated_data))


class CancelView(GovernanceView):
    """Taking a request back."""

    @extend_schema(operation_id="cancel_operation", parameters=[OP_ID], request=EmptyForm, responses=_CHANGED)
    def post(self, request: Request, op_id: str) -> Response:
        """Cancel an operation, as whoever asked for it. Possible until it is on its way."""
        ident = read_op_id(op_id)
        _read_empty(request)
        return show_operation(request, cancel(op_id=ident, proposer=get_caller(request).proposer))


class UseView(GovernanceView):
    """Uses of a standing approval."""

    @extend_schema(operation_id="use_approval", parameters=[OP_ID], request=EmptyForm, responses=_CHANGED)
    def post(self, request: Request, op_id: str) -> Response:
        """Carry a standing approval out once more."""
        ident = read_op_id(op_id)
        _read_empty(request)
        use_approval(op_id=ident, proposer=get_caller(request).proposer)
        return show_operation(request, find_operation(ident))


class ClaimView(GovernanceView):
    """The token that an approved admin-token-mint made."""

    @extend_schema(
        operation_id="claim_admin_token", parameters=[OP_ID], request=EmptyForm,
        responses={200: ClaimedTokenSerializer, **describe_refusals(400, 403, 404, 409, 413, 415)},
    )  # fmt: skip
    def post(self, request: Request, op_id: str) -> Response:
        """Take the token, as whoever asked for it. It is shown this once."""
        ident = read_op_id(op_id)
        _read_empty(request)
        person = require_owner(request, purpose="claim a token")
        token, secret = claim_admin_token(op_id=ident, user=person)
        answer: dict[str, Any] = {
            "token_id": token.pk,
            "name": token.name,
            "key_id": token.keyid,
            "secret": secret,
        }  # Any: JSON
        return Response(ClaimedTokenSerializer(answer).data, headers={"Cache-Control": "no-store"})


def _read_empty(request: Request) -> None:
    EmptyForm(data=request.data).is_valid(raise_exception=True)
