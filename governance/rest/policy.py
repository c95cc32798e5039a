"""The approval policy and the freeze."""

from __future__ import annotations

import json

from drf_spectacular.utils import extend_schema
from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response

from governance.models import Freeze
from governance.operations.evidence import policy_chain
from governance.operations.freezes import freeze, read_freeze
from governance.operations.policies import active_policy, draft_policy
from governance.rest.access import GovernanceView, NothingThere, get_caller, require_owner
from governance.rest.answers import FreezeSerializer, OperationSerializer, PolicyChainSerializer, PolicySerializer
from governance.rest.forms import ChainForm, DraftForm, FreezeForm
from governance.rest.operations import show_operation
from governance.rest.schema import DRAFT, FREEZE, describe_refusals
from wire.optoken.approval import encode_bytes, policy_words


class PolicyView(GovernanceView):
    """The policy in force."""

    @extend_schema(operation_id="read_policy", responses={200: PolicySerializer, **describe_refusals(404)})
    def get(self, request: Request) -> Response:
        """Read the policy in force, parsed and as the bytes that were signed."""
        found = active_policy()
        if found is None:
            raise NothingThere("No policy is in force. Draft the first one: POST /api/v1/policy/drafts.")
        row, policy = found
        return Response(
            PolicySerializer(
                {
                    "version": row.version,
                    "sha256": row.sha256,
                    "words": policy_words(row.sha256),
                    "activated_at": row.activated_at,
                    "document": json.loads(policy.raw),
                    "document_b64": encode_bytes(policy.raw),
                }
            ).data
        )


class PolicyChainView(GovernanceView):
    """How the policy came to be what it is."""

    @extend_schema(
        operation_id="read_policy_chain",
        parameters=[ChainForm],
        responses={200: PolicyChainSerializer, **describe_refusals(400)},
    )
    def get(self, request: Request) -> Response:
        """Read every version behind the one that is held, each with what proves that it was approved."""
        form = ChainForm(data=request.query_params)
        form.is_valid(raise_exception=True)
        chain = policy_chain(after_version=form.validated_data["after"])
        return Response(PolicyChainSerializer({"policies": chain}).data)


class PolicyDraftView(GovernanceView):
    """The next policy."""

    @extend_schema(
        operation_id="draft_policy", request=DraftForm, examples=[DRAFT],
        responses={201: OperationSerializer, **describe_refusals(400, 403, 409, 413, 415, 429)},
    )  # fmt: skip
    def post(self, request: Request) -> Response:
        """Draft the next policy and ask for its approval, under the policy in force and under itself."""
        form = DraftForm(data=request.data)
        form.is_valid(raise_exception=True)
        found = draft_policy(**form.validated_data, proposer=get_caller(request).proposer)
        return show_operation(request, found, status_code=status.HTTP_201_CREATED)


class FreezeView(GovernanceView):
    """The freeze of all operations."""

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
        form = FreezeForm(data=request.data)
        form.is_valid(raise_exception=True)
        person = require_owner(request, purpose="freeze")
        return Response(_show_freeze(freeze(user=person, **form.validated_data)))


def _show_freeze(row: Freeze | None) -> dict[str, object]:
    known = {name: getattr(row, name, None) for name in ("frozen_by", "frozen_at", "reason")}
    return dict(FreezeSerializer({"is_frozen": row is not None, **known}).data)
