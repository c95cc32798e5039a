"""Listing operations, asking for one, reading one: its statement, its evidence, its receipts."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response

from core.limits import limits
from governance.errors import OperationNotFound
from governance.models import Operation
from governance.operations.evidence import read_evidence
from governance.operations.proposals import propose
from governance.operations.reading import read_operation
from governance.rest.access import GovernanceView, find_owner, get_caller, read_op_id
from governance.rest.answers import EvidenceSerializer, OperationSerializer, PageSerializer, ReceiptListSerializer
from governance.rest.forms import ListForm, ProposalForm
from governance.rest.listing import list_operations, read_key
from governance.rest.schema import OP_ID, PROPOSAL, describe_bytes, describe_refusals
from wire.optoken.approval import decode_bytes


class OperationListView(GovernanceView):
    """The operations, and the way to ask for one."""

    @extend_schema(
        operation_id="list_operations", parameters=[ListForm], responses={200: PageSerializer, **describe_refusals(400)}
    )
    def get(self, request: Request) -> Response:
        """List operations, newest first, a page at a time."""
        form = ListForm(data=request.query_params)
        form.is_valid(raise_exception=True)
        summaries, cursor = list_operations(**form.validated_data)
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
        form = ProposalForm(data=request.data)
        form.is_valid(raise_exception=True)
        found = propose(**form.validated_data, proposer=get_caller(request).proposer, idempotency_key=key)
        return show_operation(request, found, status_code=status.HTTP_201_CREATED)


class OperationView(GovernanceView):
    """One operation."""

    @extend_schema(
        operation_id="read_operation", parameters=[OP_ID], responses={200: OperationSerializer, **describe_refusals(404)}
    )
    def get(self, request: Request, op_id: str) -> Response:
        """Read everything about an operation: what is signed, in words and in bytes, who said what, how it is carried out."""
        view = read_operation(read_op_id(op_id), find_owner(request))
        return Response(OperationSerializer(view).data)


class StatementView(GovernanceView):
    """The bytes that people sign."""

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
    """What convinces a stranger."""

    @extend_schema(
        operation_id="read_evidence", parameters=[OP_ID], responses={200: EvidenceSerializer, **describe_refusals(404)}
    )
    def get(self, request: Request, op_id: str) -> Response:
        """Read the bundle that the stand-alone verifier checks without asking this server anything."""
        bundle: dict[str, Any] = dict(read_evidence(str(read_op_id(op_id))))  # Any: JSON
        if not bundle:
            raise OperationNotFound(f"There is no operation {op_id[:60]}.", param="op_id")
        return Response(bundle)


class ReceiptListView(GovernanceView):
    """What the boxes signed about it."""

    @extend_schema(
        operation_id="list_receipts", parameters=[OP_ID], responses={200: ReceiptListSerializer, **describe_refusals(404)}
    )
    def get(self, request: Request, op_id: str) -> Response:
        """List the receipts of an operation's runs, as far as boxes have sent them."""
        view = read_operation(read_op_id(op_id), None)
        return Response(ReceiptListSerializer({"receipts": [run for run in view.runs if run.receipt_text]}).data)


def show_operation(request: Request, operation: Operation, *, status_code: int = status.HTTP_200_OK) -> Response:
    """Return the answer of a change: the operation as it is now, for the owner of the token."""
    view = read_operation(operation.pk, find_owner(request))
    headers = {"Location": f"/api/v1/operations/{operation.printed_id}"} if status_code == status.HTTP_201_CREATED else None
    return Response(OperationSerializer(view).data, status=status_code, headers=headers)
