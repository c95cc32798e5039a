"""``GET /requests`` of the contract: recent request records, for administrators."""

from __future__ import annotations

import uuid
from typing import Any

from drf_spectacular.utils import OpenApiParameter, extend_schema
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from gateway.models import RequestRecord
from gateway.services import InvalidValue
from nodes.serializers import ErrorSerializer
from wire.contract import RequestState
from wire.ids import format_id, parse_id

DEFAULT_LIMIT = 50
MAX_LIMIT = 1000


class RequestSerializer(serializers.Serializer[RequestRecord]):
    """One request record in the contract's shape."""

    request_id = serializers.CharField(source="printed_id")
    node_id = serializers.SerializerMethodField()
    model = serializers.CharField()
    status = serializers.ChoiceField(source="state", choices=[state.value for state in RequestState])
    prompt_tokens_est = serializers.IntegerField()
    max_tokens = serializers.IntegerField(allow_null=True)
    latency_ms = serializers.IntegerField(allow_null=True)
    error_code = serializers.CharField(allow_null=True)
    created_at = serializers.DateTimeField()

    def get_node_id(self, record: RequestRecord) -> str | None:
        """Return the printed id of the box that served it last, if any did."""
        return format_id("node", record.node_id) if record.node_id else None


class RequestListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """The contract's envelope."""

    requests = RequestSerializer(many=True)


class RequestListView(APIView):
    """Recent request records, newest first."""

    @extend_schema(
        operation_id="list_requests",
        parameters=[
            OpenApiParameter("limit", int, description=f"How many at most, 1 to {MAX_LIMIT}; {DEFAULT_LIMIT} by default"),
            OpenApiParameter("status", str, enum=[state.value for state in RequestState], description="Only this status"),
            OpenApiParameter("node_id", str, description="Only requests that this box served"),
        ],
        responses={200: RequestListSerializer, 400: ErrorSerializer, 401: ErrorSerializer},
    )
    def get(self, request: Request) -> Response:
        """List recent requests, newest first. A parameter that cannot be used is 400 BAD_REQUEST and named in ``param``."""
        records = RequestRecord.objects.order_by("-created_at", "-id")
        status = request.query_params.get("status")
        if status is not None:
            records = records.filter(state=_read_status(status))
        node_id = request.query_params.get("node_id")
        if node_id is not None:
            records = records.filter(node_id=_read_node_id(node_id))
        page = records[: _read_limit(request.query_params.get("limit"))]
        return Response(RequestListSerializer({"requests": page}).data)


def _read_limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_LIMIT)) and 1 <= int(text) <= MAX_LIMIT):
        raise InvalidValue(f"limit must be a whole number from 1 to {MAX_LIMIT}.", param="limit")
    return int(text)


def _read_status(text: str) -> RequestState:
    try:
        return RequestState(text)
    except ValueError as error:
        words = ", ".join(state.value for state in RequestState)
        raise InvalidValue(f"status must be one of {words}.", param="status") from error


def _read_node_id(text: str) -> uuid.UUID:
    node_id = parse_id("node", text)
    if node_id is None:
        raise InvalidValue("node_id must look like node_ followed by 32 hexadecimal digits.", param="node_id")
    return node_id
