"""What the OpenAPI document says of this API beyond what serializers tell: refusals, examples, the stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse

from governance.rest.answers import RefusalSerializer
from wire.contract import ErrorCode

EXAMPLE_ID = "op_019ab0f0c0de7000800000000000beef"
STREAM_PATH = "/api/v1/operations/{op_id}/events"

OP_ID = OpenApiParameter(
    "op_id",
    str,
    OpenApiParameter.PATH,
    description="`op_` and 32 hexadecimal digits",
    examples=[OpenApiExample("id", EXAMPLE_ID)],
)

_REFUSALS: dict[int, tuple[ErrorCode, str, str | None]] = {
    400: (
        ErrorCode.BAD_REQUEST,
        "params.contextLength: 4096.5 cannot be signed; give a whole number, or text",
        "params.contextLength",
    ),
    401: (ErrorCode.INVALID_ADMIN_TOKEN, "Send an admin token: Authorization: Bearer msa_….", None),
    403: (ErrorCode.NOT_PERMITTED, "Only a person can reject: use an admin token that belongs to one.", None),
    404: (ErrorCode.NOT_FOUND, f"There is no operation {EXAMPLE_ID}.", "op_id"),
    409: (ErrorCode.STATE_CHANGED, "This operation is expired already; look at it again.", "op_id"),
    413: (ErrorCode.BODY_TOO_LARGE, "The body is larger than 1048576 bytes.", None),
    415: (ErrorCode.BAD_REQUEST, 'Unsupported media type "text/plain" in request.', None),
    429: (ErrorCode.TOO_MANY_OPEN, "You have 20 open operations; cancel some or wait until they are decided.", None),
    503: (ErrorCode.TOO_MANY_OPEN, "32 streams are open, which is all this process keeps; try again in 5 s.", None),
}
"""A refusal of each status: code, message, parameter."""

PROPOSAL = OpenApiExample(
    "load a model",
    request_only=True,
    value={
        "operation": "model-load",
        "targets": ["attic#kq3mzp6a7x2d5n4bwlhvyt3cre"],
        "params": {"modelId": "muster-tiny", "contextLength": 4096},
        "reason": "The evening batch needs it.",
    },
)
APPROVAL = OpenApiExample(
    "with a key file",
    request_only=True,
    value={
        "proof": {"type": "ed25519", "approver": "bo", "keyid": "9f1c2ab34d5e6f70", "signature": "q0J…"},
        "comment": "Compared the six words.",
    },
)
REJECTION = OpenApiExample("too early", request_only=True, value={"comment": "Not while the batch runs."})
FREEZE = OpenApiExample("freeze", request_only=True, value={"reason": "A key of ours was seen elsewhere."})
DRAFT = OpenApiExample(
    "three people",
    request_only=True,
    value={
        "approvers": [
            {"username": "ada", "groups": ["owners"], "key_ids": [1]},
            {"username": "bo", "groups": ["operators"], "key_ids": [2]},
            {"username": "cy", "groups": ["operators"], "key_ids": [3]},
        ],
        "thresholds": {"model-load": 2},
        "reason": "Our first policy.",
    },
)


def describe_refusals(*statuses: int) -> dict[int, OpenApiResponse]:
    """Return the refusals of a view by status, each with an example; 401 is among them always."""
    return {status: _describe(status) for status in sorted({401, *statuses})}


def _describe(status: int) -> OpenApiResponse:
    code, message, param = _REFUSALS[status]
    kind = "rate_limit_error" if status == HTTPStatus.TOO_MANY_REQUESTS else "invalid_request_error"
    body = {"code": code.value, "message": message, "retryable": status in {429, 503}, "param": param}
    body["type"] = "server_error" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else kind
    return OpenApiResponse(
        RefusalSerializer, description=HTTPStatus(status).phrase, examples=[OpenApiExample(code.value, {"error": body})]
    )


def describe_bytes(*, media_type: str, description: str) -> dict[tuple[int, str], OpenApiResponse]:
    """Return a successful answer that is not JSON."""
    binary = OpenApiTypes.STR if media_type.startswith("text/") else OpenApiTypes.BINARY
    return {(200, media_type): OpenApiResponse(binary, description=description)}


def add_stream(result: dict[str, Any], generator: object, **_rest: object) -> dict[str, Any]:  # Any: an OpenAPI document
    """Add the event stream, which is no view of the REST framework, to the document (a hook of drf-spectacular)."""
    refusals = {str(status): _refer(status) for status in (401, 404, 405, 503)}
    event = {"type": "string", "description": "Lines `event: status` and `data: {…}`; see docs/api.md"}
    result["paths"][STREAM_PATH] = {
        "get": {
            "operationId": "follow_operation",
            "description": "Follow an operation as server-sent events: one for each change, until it is final.",
            "tags": ["api"],
            "parameters": [
                {"name": "op_id", "in": "path", "required": True, "schema": {"type": "string"}, "example": EXAMPLE_ID}
            ],
            "security": [{"adminToken": []}],
            "responses": {
                "200": {"description": "The stream", "content": {"text/event-stream": {"schema": event}}},
                **refusals,
            },
        }
    }
    result["paths"] = dict(sorted(result["paths"].items()))
    return result


def _refer(status: int) -> dict[str, Any]:  # Any: a part of an OpenAPI document
    schema = {"$ref": "#/components/schemas/Refusal"}
    return {"description": HTTPStatus(status).phrase, "content": {"application/json": {"schema": schema}}}
