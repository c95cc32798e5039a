"""What auditors and witnesses fetch of the audit log: its newest checkpoint, and proofs that it only grew."""

from __future__ import annotations

from django.http import HttpResponse
from drf_spectacular.utils import extend_schema
from rest_framework.request import Request
from rest_framework.response import Response

from governance.checkpoints import consistency, latest_checkpoint
from governance.rest.access import GovernanceView, NothingThere
from governance.rest.answers import ConsistencySerializer
from governance.rest.forms import ConsistencyForm
from governance.rest.schema import describe_bytes, describe_refusals
from wire.auditlog import to_text


class CheckpointView(GovernanceView):
    """The newest signed checkpoint."""

    @extend_schema(
        operation_id="read_checkpoint",
        responses={**describe_bytes(media_type="text/plain", description="C2SP signed note"), **describe_refusals(404)},
    )
    def get(self, request: Request) -> HttpResponse:
        """Read the newest checkpoint: a signed note with the size of the log and the root over it."""
        checkpoint = latest_checkpoint()
        if checkpoint is None:
            raise NothingThere("There is no checkpoint yet. One is signed every few minutes once MUSTER_LOG_KEY is set.")
        return HttpResponse(checkpoint.note, content_type="text/plain; charset=utf-8")


class ConsistencyView(GovernanceView):
    """Proofs that the log only grew."""

    @extend_schema(
        operation_id="prove_consistency", parameters=[ConsistencyForm],
        responses={200: ConsistencySerializer, **describe_refusals(400)},
    )  # fmt: skip
    def get(self, request: Request) -> Response:
        """Prove that the log of ``old`` entries is the head of the log of ``new`` entries."""
        form = ConsistencyForm(data=request.query_params)
        form.is_valid(raise_exception=True)
        old, new = form.validated_data["old"], form.validated_data["new"]
        proof = [to_text(step) for step in consistency(old, new)]
        return Response(ConsistencySerializer({"old": old, "new": new, "proof": proof}).data)
