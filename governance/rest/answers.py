"""What this API answers, and what its OpenAPI document says beyond that: refusals, examples, the stream."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from governance.operations.queries import OperationView
from governance.states import ApprovalState, RunState, Severity
from wire.contract import ErrorCode

STATES = [state.value for state in ApprovalState]
RUN_STATES = [state.value for state in RunState]


class ErrorBodySerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """The fields of an error. ``rule``: of APPROVAL_REFUSED only, the stable code of the rule that refused."""

    code = serializers.CharField()
    message = serializers.CharField()
    retryable = serializers.BooleanField()
    type = serializers.CharField()
    param = serializers.CharField(allow_null=True)
    rule = serializers.CharField(required=False)


class RefusalSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """The contract's error envelope, with the rule of governance that refused."""

    error = ErrorBodySerializer()


class SummarySerializer(serializers.Serializer[Any]):  # Any: a summary, or what holds one
    """One line of the list of operations."""

    op_id = serializers.CharField(source="printed_id")
    title = serializers.CharField()
    operation = serializers.CharField()
    op_class = serializers.CharField()
    state = serializers.ChoiceField(choices=STATES)
    run_state = serializers.ChoiceField(
        choices=RUN_STATES, allow_blank=True, help_text="Of the least finished run; empty: none yet"
    )
    requested_by = serializers.CharField()
    requested_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField(help_text="Until when it waits for approvals")
    not_after = serializers.DateTimeField()
    approvals = serializers.IntegerField()
    required = serializers.IntegerField()  # type: ignore[assignment]  # the metaclass takes fields off the class
    percent = serializers.IntegerField(allow_null=True)
    is_solo = serializers.BooleanField()
    is_break_glass = serializers.BooleanField()
    is_standing = serializers.BooleanField()


class PageSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """A page of the list. ``next_cursor``: of the next page, null on the last one."""

    operations = SummarySerializer(many=True)
    next_cursor = serializers.CharField(allow_null=True)


class LineSerializer(serializers.Serializer[Any]):  # Any: a value of the registry
    """One line of a statement in words. ``now``: what it is today, empty where there is nothing to compare."""

    label = serializers.CharField()  # type: ignore[assignment]  # the metaclass takes fields off the class
    value = serializers.CharField()
    now = serializers.CharField(allow_blank=True)


class DescriptionSerializer(serializers.Serializer[Any]):  # Any: a value of the registry
    """A statement in plain words."""

    title = serializers.CharField()
    lines = LineSerializer(many=True)


class ImpactSerializer(serializers.Serializer[Any]):  # Any: a value of the registry
    """What carrying it out would mean now."""

    level = serializers.ChoiceField(choices=["ok", "caution", "danger"])
    text = serializers.CharField()


class VerdictSerializer(serializers.Serializer[Any]):  # Any: a value of the verifier
    """How far the proofs satisfy the policy. ``missing_factors``: group → how many more of it."""

    required = serializers.IntegerField()  # type: ignore[assignment]  # the metaclass takes fields off the class
    missing = serializers.IntegerField()
    approved_by = serializers.ListField(child=serializers.CharField())
    missing_factors = serializers.DictField(child=serializers.IntegerField())
    missing_file_proofs = serializers.IntegerField()
    is_met = serializers.BooleanField()


class DecisionSerializer(serializers.Serializer[Any]):  # Any: a value of the services
    """What one person said."""

    person = serializers.CharField()
    is_approval = serializers.BooleanField()
    key_label = serializers.CharField(allow_blank=True)
    key_kind = serializers.CharField(allow_blank=True)
    thumbprint = serializers.CharField(allow_blank=True)
    brought_by = serializers.CharField(
        allow_blank=True, help_text="Who handed the proof in: `session:<person>` or `token:<name>#<key id>`"
    )
    comment = serializers.CharField(allow_blank=True)
    at = serializers.DateTimeField()
    withdrawn_at = serializers.DateTimeField(allow_null=True)
    proof = serializers.DictField(allow_null=True)


class RunSerializer(serializers.Serializer[Any]):  # Any: a value of the services
    """One carrying out on one target."""

    run_id = serializers.UUIDField(source="id")
    target = serializers.CharField()
    use = serializers.IntegerField()
    position = serializers.IntegerField()
    state = serializers.ChoiceField(choices=RUN_STATES)
    stage = serializers.CharField(allow_blank=True)
    percent = serializers.IntegerField(allow_null=True)
    eta_s = serializers.FloatField(allow_null=True)
    code = serializers.CharField(allow_blank=True)
    message = serializers.CharField(allow_blank=True)
    result = serializers.DictField()
    attempt = serializers.IntegerField()
    queued_at = serializers.DateTimeField()
    dispatched_at = serializers.DateTimeField(allow_null=True)
    ended_at = serializers.DateTimeField(allow_null=True)


class OperationSerializer(SummarySerializer):
    """Everything about one operation, for the owner of the token. Its first members are those of the list."""

    description = DescriptionSerializer()
    impacts = ImpactSerializer(many=True)
    statement = serializers.DictField(help_text="What is signed, parsed")
    statement_b64 = serializers.CharField(help_text="The signed bytes, base64url")
    digest = serializers.CharField(
        help_text="SHA-256 of the statement with its domain, hexadecimal; the challenge of a passkey"
    )
    words = serializers.CharField(help_text="Six words of the digest, to compare by eye and ear")
    reason = serializers.CharField(allow_blank=True)
    policy_version = serializers.IntegerField()
    policy_sha256 = serializers.CharField()
    not_before = serializers.DateTimeField()
    max_uses = serializers.IntegerField()
    uses = serializers.IntegerField()
    verdict = VerdictSerializer(allow_null=True)
    decisions = DecisionSerializer(many=True)
    runs = RunSerializer(many=True)
    state_reason = serializers.CharField(allow_blank=True)
    decided_at = serializers.DateTimeField(allow_null=True)
    actions = serializers.SerializerMethodField(help_text="What the owner of the token may do now")
    hindrances = serializers.DictField(child=serializers.CharField(), help_text="Action → why it cannot be done now")
    assertion = serializers.DictField(
        allow_null=True, help_text="WebAuthn request options for passkeys of the owner of the token"
    )
    is_frozen = serializers.BooleanField(help_text="All operations stand still")

    def get_fields(self) -> dict[str, serializers.Field[Any, Any, Any, Any]]:  # Any: fields of all types
        fields = super().get_fields()
        # The members of the list stand in ``summary`` of what is shown.
        for name in SummarySerializer().get_fields():
            fields[name].source = f"summary.{fields[name].source or name}"
        return fields

    def get_actions(self, view: OperationView) -> list[str]:
        """Return the actions in a fixed order."""
        return sorted(view.actions)


class ReceiptSerializer(serializers.Serializer[Any]):  # Any: a value of the services
    """What a node signed about a run. ``text``: as the node sent it, for a verifier."""

    run_id = serializers.UUIDField(source="id")
    target = serializers.CharField()
    use = serializers.IntegerField()
    receipt = serializers.DictField(
        source="receipt_members", allow_null=True, help_text="Its members, null when it cannot be read"
    )
    text = serializers.CharField(source="receipt")


class ReceiptListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """The receipts of an operation, in the order of its runs."""

    receipts = ReceiptSerializer(many=True)


class EvidenceSerializer(serializers.Serializer[Any]):  # Any: a bundle, no model
    """What ``python wire/optoken/approval.py`` checks; further members are for the reader."""

    policies = serializers.ListField(child=serializers.DictField())
    statement = serializers.CharField()
    proofs = serializers.ListField(child=serializers.DictField())
    receipts = serializers.ListField()


class ClaimedTokenSerializer(serializers.Serializer[Any]):  # Any: a row and its secret
    """A new admin token. ``secret`` is shown this once."""

    token_id = serializers.IntegerField()
    name = serializers.CharField()
    key_id = serializers.CharField()
    secret = serializers.CharField()


class PolicySerializer(serializers.Serializer[Any]):  # Any: a row and what it holds
    """The policy in force."""

    version = serializers.IntegerField()
    sha256 = serializers.CharField()
    words = serializers.CharField(help_text="Twelve words of the SHA-256, as every node shows them")
    activated_at = serializers.DateTimeField(allow_null=True)
    document = serializers.DictField(help_text="Parsed")
    document_b64 = serializers.CharField(help_text="The signed bytes, base64url")


class PolicyLinkSerializer(serializers.Serializer[Any]):  # Any: a bundle, no model
    """One version with the statement and the proofs that brought it in."""

    document = serializers.CharField()
    statement = serializers.CharField()
    proofs = serializers.ListField(child=serializers.DictField())


class PolicyChainSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """The versions behind the one that is held, oldest first."""

    policies = PolicyLinkSerializer(many=True)


class FreezeSerializer(serializers.Serializer[Any]):  # Any: a row or nothing
    """Whether everything stands still. The other members are null while nothing does."""

    is_frozen = serializers.BooleanField()
    frozen_by = serializers.CharField(allow_null=True)
    frozen_at = serializers.DateTimeField(allow_null=True)
    reason = serializers.CharField(allow_null=True, allow_blank=True)


class ConsistencySerializer(serializers.Serializer[Any]):  # Any: a proof, no model
    """The proof (RFC 9162 section 2.1.4) that the log of ``old`` entries is the head of that of ``new``: hashes in base64."""

    old = serializers.IntegerField()
    new = serializers.IntegerField()
    proof = serializers.ListField(child=serializers.CharField())


class AlertObjectSerializer(serializers.Serializer[Any]):  # Any: a value of the services
    """What an alert is about."""

    type = serializers.CharField(help_text="node, model, replica, gateway, key, tenant, policy, certificate or installation")
    id = serializers.CharField(allow_blank=True)
    name = serializers.CharField(allow_blank=True)


class AlertSerializer(serializers.Serializer[Any]):  # Any: a value of the services
    """A problem from its start to its end. The other times are null while they have not come."""

    alert_id = serializers.IntegerField(source="id")
    kind = serializers.CharField(help_text="Stable, such as `node.offline`")
    severity = serializers.ChoiceField(choices=[severity.word for severity in Severity], source="severity.word")
    object = AlertObjectSerializer(source="of")
    what = serializers.CharField(help_text="In English")
    advice = serializers.CharField(allow_blank=True)
    since = serializers.DateTimeField()
    seen_at = serializers.DateTimeField(help_text="When it was there the last time")
    ended_at = serializers.DateTimeField(allow_null=True)
    silenced_until = serializers.DateTimeField(allow_null=True)
    silenced_by = serializers.CharField(allow_blank=True)
    silence_reason = serializers.CharField(allow_blank=True)


class AlertPageSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """A page of the list. ``looked_at``: when somebody last looked for problems, null = never."""

    alerts = AlertSerializer(many=True)
    looked_at = serializers.DateTimeField(allow_null=True)
    next_cursor = serializers.CharField(allow_null=True)


# The OpenAPI document

EXAMPLE_ID = "op_019ab0f0c0de7000800000000000beef"
STREAM_PATH = "/api/v1/operations/{op_id}/events"

OP_ID = OpenApiParameter(
    "op_id",
    str,
    OpenApiParameter.PATH,
    description="`op_` and 32 hexadecimal digits",
    examples=[OpenApiExample("id", EXAMPLE_ID)],
)

ALERT_ID = OpenApiParameter("alert_id", int, OpenApiParameter.PATH, description="Of the list")

# A refusal of each status: code, message, parameter.
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
SILENCE = OpenApiExample(
    "maintenance",
    request_only=True,
    value={"until": "2026-11-21T08:00:00Z", "reason": "The fans are changed.", "lasting": True},
)
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
    """Add the event stream to the document (a hook of drf-spectacular)."""
    refusals = {str(status): _refer(status) for status in (401, 404, 405, 503)}
    event = {"type": "string", "description": "Lines `event: status` and `data: {…}`; see docs/api.md"}
    # It is no view of the REST framework, so nothing else describes it.
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
