"""The nodes REST API, field for field as in the node and gateway contract v1: register, heartbeat, mode and the list; and GPUs.

Our own extras come last in each answer. The contract writes addresses without a trailing slash; with one they work too.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar

from django.conf import settings
from django.urls import re_path
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import serializers
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from core.limits import limits
from core.throttle import AuthThrottle
from nodes.errors import BadRequest, InvalidNodeToken, NodeNotFound, TooManyWrongTokens
from nodes.models import Gpu, Node, NodeCredential, ProviderState, clock_of, presence_of, read_clock, with_clock
from nodes.services.availability import explain_unreachable, is_drained, judge_status, list_ejections, read_availability
from nodes.services.credentials import find_credential, read_bearer, read_credential_digests
from nodes.services.drains import set_mode
from nodes.services.figures import ModelFigures, read_gpu_figures, read_uptimes
from nodes.services.gpus import list_gpus, list_models
from nodes.services.history import Moment, Span, read_history
from nodes.services.nodes import Heartbeat, Registration, record_heartbeat, register_direct_node, require_own_node
from nodes.services.replicas import MemberState, ReplicaState, SpanningReplica, list_replicas
from nodes.states import Health
from wire.contract import NodeMode, NodeStatus
from wire.credentials import CredentialKind, digest_credential, parse_keyid
from wire.ids import parse_id

SCHEME = "bearer"
CHALLENGE = 'Bearer realm="muster-nodes"'
_INVALID = "The node credential is not valid. Send Authorization: Bearer msw_…."

throttle = AuthThrottle(read_digests=read_credential_digests)
"""By address. Of this process alone: it spares the database, and nobody guesses a credential anyway."""


@dataclass(frozen=True, slots=True)
class CredentialHolder:
    credential: NodeCredential
    is_authenticated: ClassVar[bool] = True


class NodeTokenAuthentication(BaseAuthentication):
    """``Authorization: Bearer msw_…``. There is no anonymous access: a missing token is an invalid one."""

    def authenticate(self, request: Request) -> tuple[CredentialHolder, None]:
        """Return the holder of the credential. Raises InvalidNodeToken (401), TooManyWrongTokens (429)."""
        scheme, _, text = get_authorization_header(request).decode("latin-1").partition(" ")
        text = text.strip()
        is_known_form = parse_keyid(read_bearer(text), CredentialKind.WORKER) is not None
        # Without a secret of the operator's own nobody guesses one: it costs no query then, and is not counted.
        if scheme.lower() != SCHEME or not (is_known_form or settings.OWN_WORKER_SECRET):
            raise InvalidNodeToken(_INVALID)
        return CredentialHolder(credential=_look_up(text, str(request.META.get("REMOTE_ADDR", "")))), None

    def authenticate_header(self, request: Request) -> str:
        return CHALLENGE


def _look_up(text: str, address: str) -> NodeCredential:
    # Behind a proxy many nodes have one address, so a good credential never waits.
    if throttle.must_wait(address, digest_credential(read_bearer(text))):
        raise TooManyWrongTokens("Too many wrong node credentials came from this address; wait a second and try again.")
    credential = find_credential(text)
    if credential is None:
        throttle.record_failure(address)
        raise InvalidNodeToken(_INVALID)
    return credential


class NodeTokenScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]  # drf-spectacular registers by subclassing
    target_class = "nodes.api.NodeTokenAuthentication"
    name = "nodeToken"

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        return {"type": "http", "scheme": "bearer", "description": "Credential of a GPU node, msw_…"}


STATUSES = [status.value for status in NodeStatus]
MODES = [mode.value for mode in NodeMode]


def print_time(moment: datetime | None) -> str | None:
    """Return an ISO 8601 UTC text ending in ``Z``, as the contract writes times."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z") if moment is not None else None


_GPU_LIMIT = "How many at most, 1 to {0.gpu_page_rows}; {0.gpu_page_default_rows} by default".format(limits().nodes)
_TEXT: dict[str, Any] = {"required": False, "allow_blank": True, "default": ""}
_OPTIONAL: dict[str, Any] = {"required": False, "allow_null": True, "default": None}
_OPTIONAL_COUNT: dict[str, Any] = {"min_value": 0, "max_value": limits().nodes.report_integer, **_OPTIONAL}


class RegisterSerializer(serializers.Serializer[Registration]):
    """Request of ``POST /nodes/register``."""

    node_name = serializers.CharField(max_length=120)
    owner_name = serializers.CharField(max_length=120, **_TEXT)
    public_base_url = serializers.CharField(
        max_length=300,
        allow_null=True,
        **_TEXT,
        help_text="Where the gateway reaches the node over HTTP; absent for a node that dials in",
    )
    gpu_name = serializers.CharField(max_length=200, **_TEXT)
    vram_total_mb = serializers.IntegerField(**_OPTIONAL_COUNT)
    current_model = serializers.CharField(max_length=200)
    agent_version = serializers.CharField(max_length=60, **_TEXT)
    max_concurrent = serializers.IntegerField(
        min_value=1,
        max_value=limits().nodes.max_concurrent_cap,
        **_OPTIONAL,
        help_text="Requests the node takes at once; 1 when it never said",
    )
    api_key = serializers.CharField(
        max_length=limits().nodes.api_key_chars,
        allow_blank=True,
        **_OPTIONAL,
        write_only=True,
        trim_whitespace=False,
        help_text="Sent as a bearer credential with every call of public_base_url; absent = as before, empty = none",
    )

    def to_registration(self) -> Registration:
        data = {**self.validated_data, "public_base_url": self.validated_data["public_base_url"] or ""}
        return Registration(**data)


class RegisterAnswerSerializer(serializers.Serializer[Any]):  # Any: an answer, no model
    """Response of ``POST /nodes/register``."""

    node_id = serializers.CharField()
    status = serializers.ChoiceField(choices=STATUSES)
    accepted_model = serializers.CharField()
    heartbeat_interval_sec = serializers.FloatField()
    # Ours, beyond the contract.
    reachable = serializers.BooleanField(help_text="Whether a gateway can send the node requests")
    unreachable_reason = serializers.CharField(allow_null=True)


class HeartbeatSerializer(serializers.Serializer[Heartbeat]):
    """Request of ``POST /nodes/heartbeat``. ``observed_at`` may be off by any amount: the server's clock rules."""

    node_id = serializers.CharField(max_length=60)
    status = serializers.ChoiceField(choices=STATUSES)
    mode = serializers.ChoiceField(choices=MODES, **_OPTIONAL)
    gpu_util_percent = serializers.FloatField(min_value=0, max_value=100, **_OPTIONAL)
    vram_used_mb = serializers.IntegerField(**_OPTIONAL_COUNT)
    vram_free_mb = serializers.IntegerField(**_OPTIONAL_COUNT)
    spare_score = serializers.FloatField(min_value=-1e9, max_value=1e9, **_OPTIONAL)
    is_accepting_jobs = serializers.BooleanField(**_OPTIONAL)
    active_request_count = serializers.IntegerField(
        min_value=0, max_value=limits().nodes.report_integer, required=False, default=0
    )
    last_local_error = serializers.CharField(allow_null=True, **_TEXT, max_length=20_000, trim_whitespace=False)
    observed_at = serializers.DateTimeField(**_OPTIONAL)

    def to_heartbeat(self, node_id: uuid.UUID) -> Heartbeat:
        """Return the validated request as the service takes it. Silence means accepting work, unless draining."""
        data: dict[str, Any] = {**self.validated_data, "node_id": node_id}  # Any: JSON
        data["status"] = NodeStatus(data["status"])
        data["mode"] = NodeMode(data["mode"]) if data["mode"] else None
        data["last_local_error"] = data["last_local_error"] or ""
        if data["is_accepting_jobs"] is None:
            data["is_accepting_jobs"] = data["status"] is not NodeStatus.DRAINING
        return Heartbeat(**data)


class HeartbeatAnswerSerializer(serializers.Serializer[Any]):  # Any: an answer, no model
    """Response of ``POST /nodes/heartbeat``."""

    ok = serializers.BooleanField()
    server_time = serializers.DateTimeField()
    effective_status = serializers.ChoiceField(choices=STATUSES)
    should_drain = serializers.BooleanField()
    # Ours, beyond the contract.
    reachable = serializers.BooleanField(help_text="Whether a gateway can send the node requests")
    unreachable_reason = serializers.CharField(allow_null=True)


class ModeSerializer(serializers.Serializer[Any]):  # Any: a request, no model
    """Request of ``POST /nodes/{node_id}/mode``."""

    mode = serializers.ChoiceField(choices=MODES)
    reason = serializers.CharField(max_length=200, allow_null=True, **_TEXT)


class ModeAnswerSerializer(serializers.Serializer[Any]):  # Any: an answer, no model
    """Response of ``POST /nodes/{node_id}/mode``."""

    node_id = serializers.CharField()
    mode = serializers.ChoiceField(choices=MODES)
    status = serializers.ChoiceField(choices=STATUSES)


class NodeSerializer(serializers.Serializer[Node]):
    """One node in ``GET /nodes``. ``status`` is judged when it is read; node, provider and presence must be loaded."""

    node_id = serializers.CharField(source="printed_id")
    node_name = serializers.CharField(source="name")
    owner_name = serializers.CharField()
    status = serializers.ChoiceField(choices=STATUSES)
    mode = serializers.ChoiceField(choices=MODES)
    current_model = serializers.CharField(allow_null=True)
    gpu_util_percent = serializers.FloatField(allow_null=True)
    vram_free_mb = serializers.IntegerField(allow_null=True)
    spare_score = serializers.FloatField(allow_null=True)
    active_request_count = serializers.IntegerField()
    last_heartbeat_at = serializers.DateTimeField(allow_null=True)
    # Ours, beyond the contract.
    health = serializers.ChoiceField(choices=[one.value for one in Health], help_text="Of its session, by when it was heard")
    models = serializers.ListField(child=serializers.CharField())
    excluded_models = serializers.ListField(
        child=serializers.CharField(), help_text="Those of them for which it gets nothing: none of its GPUs can run them"
    )
    max_concurrent = serializers.IntegerField()
    cordoned = serializers.BooleanField()
    draining = serializers.BooleanField()
    drain_deadline_at = serializers.DateTimeField(allow_null=True)
    drained = serializers.BooleanField(help_text="Nothing runs on the draining or reclaimed node: it is safe to power off")
    drained_at = serializers.DateTimeField(allow_null=True)
    drain_interrupted = serializers.IntegerField(help_text="Requests that the drain or reclaim interrupted")
    reach = serializers.ChoiceField(choices=["relay", "direct"])
    connected = serializers.BooleanField()
    reachable = serializers.BooleanField(help_text="Whether a gateway can send the node requests")
    unreachable_reason = serializers.CharField(allow_null=True)
    provider = serializers.CharField()
    gpu_name = serializers.CharField()
    vram_total_mb = serializers.IntegerField(allow_null=True)
    vram_used_mb = serializers.IntegerField(allow_null=True)
    agent_version = serializers.CharField()
    last_error = serializers.CharField()
    replicas = serializers.ListField(child=serializers.DictField())
    available_models = serializers.ListField(child=serializers.CharField())
    memory = serializers.DictField(allow_null=True)
    gpus = serializers.ListField(child=serializers.DictField())
    queue_depth = serializers.IntegerField(allow_null=True)
    avg_wait_ms = serializers.IntegerField(allow_null=True)
    ejections = serializers.ListField(
        child=serializers.DictField(), help_text="Models for which gateways send it nothing new: model, reason, since, until"
    )

    def to_representation(self, instance: Node) -> dict[str, Any]:  # Any: JSON
        live, unreachable, now = presence_of(instance), explain_unreachable(instance), clock_of(instance)
        ejections, availability = list_ejections(live, now=now), read_availability(instance, now=now)
        values = {
            "node_id": instance.printed_id,
            "node_name": instance.name,
            "status": availability.status.value,
            "health": availability.health.value,
            "current_model": instance.model_names[0] if instance.model_names else None,
            "active_request_count": live.active_requests,
            "last_heartbeat_at": print_time(live.last_heartbeat_at),
            "models": instance.model_names,
            "drain_deadline_at": print_time(instance.drain_deadline_at),
            "drained": is_drained(instance),
            "drained_at": print_time(instance.drained_at),
            "reachable": not unreachable,
            "unreachable_reason": unreachable or None,
            "provider": instance.provider.name,
            "available_models": live.available_models or [],
            "ejections": [
                {"model": one.model, "reason": one.reason, "since": print_time(one.since), "until": print_time(one.until)}
                for one in ejections
            ],
        }
        # What is not worked out above is a column of one of the two rows.
        return {
            name: values[name] if name in values else getattr(instance if name in _NODE_COLUMNS else live, name)
            for name in self.fields.keys()  # noqa: SIM118  # iterating it gives the fields in the stubs
        }


_NODE_COLUMNS = frozenset(field.name for field in Node._meta.concrete_fields)  # noqa: SLF001  # Django documents it


class NodeListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """Response of ``GET /nodes``."""

    nodes = NodeSerializer(many=True)


class FiguresSerializer(serializers.Serializer[ModelFigures]):
    """How a model does on a node, by its request records. Times in milliseconds, without the queue; null = not known."""

    model = serializers.CharField()
    reliability = serializers.FloatField(source="figures.reliability", help_text="Share of requests that end well, 0 to 1")
    latency_ms = serializers.FloatField(source="figures.latency_ms", allow_null=True, help_text="Median")
    latency_p95_ms = serializers.FloatField(allow_null=True)
    ttft_ms = serializers.FloatField(source="figures.ttft_ms", allow_null=True, help_text="Median, of streams")
    tokens_per_s = serializers.FloatField(source="figures.tokens_per_s", allow_null=True, help_text="Median")
    requests = serializers.FloatField(help_text="How many requests they rest on; one of an hour ago counts as 0.99")
    of = serializers.SerializerMethodField(help_text="gpu: of this GPU alone; node: of all GPUs of its node together")

    @extend_schema_field(serializers.ChoiceField(choices=["gpu", "node"]))
    def get_of(self, one: ModelFigures) -> str:
        return "gpu" if one.is_of_gpu else "node"


class GpuSerializer(serializers.Serializer[Gpu]):
    """One GPU. Memory in MiB; ``status``, ``queue_depth`` and ``uptime_24h`` are those of its node."""

    gpu_id = serializers.CharField(source="printed_id")
    node_id = serializers.CharField(source="node.printed_id")
    node_name = serializers.CharField(source="node.name")
    own_id = serializers.CharField(help_text="What the node calls it")
    index = serializers.IntegerField()
    vendor = serializers.CharField()
    model = serializers.CharField()
    vram_mb = serializers.IntegerField(allow_null=True)
    compute_capability = serializers.CharField()
    driver_version = serializers.CharField()
    runtime_version = serializers.CharField()
    group = serializers.CharField(help_text="GPUs that are joined by NVLink or one PCI switch share it")
    max_batch = serializers.IntegerField(allow_null=True, help_text="Requests that it takes at once")
    max_context_tokens = serializers.IntegerField(allow_null=True)
    load_percent = serializers.FloatField(allow_null=True)
    vram_used_mb = serializers.IntegerField(allow_null=True)
    vram_free_mb = serializers.IntegerField(allow_null=True)
    temperature_c = serializers.FloatField(allow_null=True)
    power_w = serializers.FloatField(allow_null=True)
    active_requests = serializers.IntegerField(allow_null=True)
    queue_depth = serializers.IntegerField(source="node.presence.queue_depth", allow_null=True)
    models = serializers.SerializerMethodField()
    status = serializers.SerializerMethodField()
    uptime_24h = serializers.SerializerMethodField()
    figures = serializers.SerializerMethodField()
    first_seen_at = serializers.DateTimeField()
    last_seen_at = serializers.DateTimeField()
    gone_at = serializers.DateTimeField(allow_null=True, help_text="When its node no longer named it")

    @extend_schema_field(serializers.ListField(child=serializers.CharField(), help_text="Those that are loaded on it"))
    def get_models(self, gpu: Gpu) -> list[str]:
        return list_models(gpu)

    @extend_schema_field(serializers.ChoiceField(choices=STATUSES))
    def get_status(self, gpu: Gpu) -> str:
        return judge_status(gpu.node, now=clock_of(gpu)).value

    @extend_schema_field(serializers.FloatField(help_text="Share of the last 24 hours in which its node was heard, 0 to 1"))
    def get_uptime_24h(self, gpu: Gpu) -> float:
        uptimes: dict[uuid.UUID, float] = self.context["uptimes"]
        return round(uptimes.get(gpu.node_id, 0.0), 4)

    @extend_schema_field(FiguresSerializer(many=True))
    def get_figures(self, gpu: Gpu) -> Any:  # Any: JSON
        figures: dict[uuid.UUID, list[ModelFigures]] = self.context["figures"]
        return [FiguresSerializer(one).data for one in figures.get(gpu.pk, [])]


def _tell_gpus(gpus: Sequence[Gpu]) -> Any:  # Any: JSON
    nodes = {gpu.node_id for gpu in gpus}
    context = {"figures": read_gpu_figures(gpus, now=read_clock()), "uptimes": read_uptimes(nodes)} if gpus else {}
    return [GpuSerializer(gpu, context=context).data for gpu in gpus]


class GpuListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """Response of ``GET /api/v1/gpus``."""

    gpus = GpuSerializer(many=True)
    next = serializers.CharField(allow_null=True, help_text="What ``after`` of the next page is; null = there is none")


class ErrorDetailSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """The fields of an error."""

    code = serializers.CharField()
    message = serializers.CharField()
    retryable = serializers.BooleanField()
    type = serializers.CharField()
    param = serializers.CharField(allow_null=True)


class ErrorSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """The contract's error envelope."""

    error = ErrorDetailSerializer()


_ERRORS = dict.fromkeys((400, 401, 429), ErrorSerializer)


class NodeView(APIView):
    """Base of what nodes call: their own credential, and nothing else, opens it."""

    authentication_classes = (NodeTokenAuthentication,)
    permission_classes = (IsAuthenticated,)


class RegisterView(NodeView):
    """Enrols a node, or refreshes what is known of it."""

    @extend_schema(
        operation_id="register_node",
        request=RegisterSerializer,
        responses={200: RegisterAnswerSerializer, **_ERRORS, 403: ErrorSerializer},
    )
    def post(self, request: Request) -> Response:
        """Register a node; again with the same credential and ``node_name`` refreshes the same one."""
        form = RegisterSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        registration = form.to_registration()
        registered = register_direct_node(credential=_holder(request).credential, registration=registration)
        return Response(
            {
                "node_id": registered.node.printed_id,
                "status": registered.status.value,
                "accepted_model": registration.current_model,
                "heartbeat_interval_sec": _plain_number(limits().nodes.heartbeat_interval_s),
                "reachable": not registered.unreachable,
                "unreachable_reason": registered.unreachable or None,
            }
        )


class HeartbeatView(NodeView):
    """Takes a sign of life and answers what the server makes of it."""

    @extend_schema(
        operation_id="heartbeat_node",
        request=HeartbeatSerializer,
        responses={200: HeartbeatAnswerSerializer, **_ERRORS, 404: ErrorSerializer},
    )
    def post(self, request: Request) -> Response:
        """Record a heartbeat. ``should_drain`` asks the node to finish what it runs and take nothing new."""
        form = HeartbeatSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        heartbeat = form.to_heartbeat(_read_node_id(form.validated_data["node_id"]))
        result = record_heartbeat(credential=_holder(request).credential, heartbeat=heartbeat)
        return Response(
            {
                "ok": True,
                "server_time": print_time(result.server_time),
                "effective_status": result.effective_status.value,
                "should_drain": result.should_drain,
                "reachable": not result.unreachable,
                "unreachable_reason": result.unreachable or None,
            }
        )


class ModeView(NodeView):
    """Lends a node or takes it back, as its owner wishes."""

    @extend_schema(
        operation_id="set_node_mode",
        request=ModeSerializer,
        responses={200: ModeAnswerSerializer, **_ERRORS, 404: ErrorSerializer},
    )
    def post(self, request: Request, node_id: str) -> Response:
        """Switch the mode. After ``spare_off`` running requests get the reclaim grace and are then interrupted."""
        own = require_own_node(credential=_holder(request).credential, node_id=_read_node_id(node_id))
        form = ModeSerializer(data=request.data)
        form.is_valid(raise_exception=True)
        node = set_mode(
            node_id=own.pk,
            mode=NodeMode(form.validated_data["mode"]),
            reason=form.validated_data["reason"] or "",
            actor=f"node:{own.name}",
        )
        status = judge_status(node, now=read_clock())
        return Response({"node_id": node.printed_id, "mode": node.mode, "status": status.value})


class NodeListView(APIView):
    """What administrators see of the fleet."""

    needs = {"GET": "nodes.view_node"}

    @extend_schema(operation_id="list_nodes", responses={200: NodeListSerializer, 401: ErrorSerializer})
    def get(self, request: Request) -> Response:
        """List every node by name with the status it has at this moment."""
        nodes = Node.objects.select_related("provider", "presence").exclude(provider__state=ProviderState.DELETED)
        return Response({"nodes": [NodeSerializer(node).data for node in with_clock(nodes).order_by("name", "pk")]})


class GpuListView(APIView):
    """The GPUs of the fleet."""

    needs = {"GET": "nodes.view_gpu"}

    @extend_schema(
        operation_id="list_gpus",
        parameters=[
            OpenApiParameter("node_id", str, description="Only those of this node"),
            OpenApiParameter("gone", bool, description="Also those that their node no longer names"),
            OpenApiParameter("limit", int, description=_GPU_LIMIT),
            OpenApiParameter("after", str, description="The GPU after which the page begins, by id"),
        ],
        responses={200: GpuListSerializer, 400: ErrorSerializer, 401: ErrorSerializer, 404: ErrorSerializer},
    )
    def get(self, request: Request) -> Response:
        """List GPUs by id. A parameter that cannot be used is 400 BAD_REQUEST and named in ``param``."""
        asked = request.query_params
        node_id = _read_node_id(asked["node_id"]) if "node_id" in asked else None
        gpus = list_gpus(node_id=node_id, with_gone=_read_flag(asked.get("gone", "false"), "gone")).order_by("id")
        if "after" in asked:
            gpus = gpus.filter(id__gt=_read_gpu_id(asked["after"], "after"))
        limit = _read_limit(asked.get("limit"))
        page = list(gpus[: limit + 1])
        following = page[limit - 1].printed_id if len(page) > limit else None
        return Response({"gpus": _tell_gpus(page[:limit]), "next": following})


class GpuView(APIView):
    """One GPU."""

    needs = {"GET": "nodes.view_gpu"}

    @extend_schema(
        operation_id="read_gpu",
        responses={200: GpuSerializer, 400: ErrorSerializer, 401: ErrorSerializer, 404: ErrorSerializer},
    )
    def get(self, request: Request, gpu_id: str) -> Response:
        """Return a GPU, also one that its node no longer names."""
        gpu = list_gpus(with_gone=True).filter(pk=_read_gpu_id(gpu_id, "gpu_id")).first()
        if gpu is None:
            raise NodeNotFound("There is no GPU with that id, or its node has not named it for too long.", param="gpu_id")
        return Response(_tell_gpus([gpu])[0])


class MemberSerializer(serializers.Serializer[MemberState]):
    """One node of a replica; ``state`` is empty when it is away or does not speak of the replica."""

    runner_id = serializers.CharField()
    node_id = serializers.CharField(source="node.printed_id", default=None, allow_null=True)
    role = serializers.SerializerMethodField()
    state = serializers.CharField()
    reason = serializers.CharField(help_text="Why it is not part of it any more, or what it does to become so")
    gpus = serializers.ListField(child=serializers.IntegerField(), help_text="Their numbers on the node")

    @extend_schema_field(serializers.ChoiceField(choices=["head", "member"]))
    def get_role(self, member: MemberState) -> str:
        return "head" if member.is_head else "member"


class ReplicaSerializer(serializers.Serializer[SpanningReplica]):
    """A replica over several nodes, the head first; it serves while all of them are there."""

    replica_id = serializers.CharField(help_text="The approval that it came of, and which use of it")
    model = serializers.CharField()
    state = serializers.ChoiceField(choices=[state.value for state in ReplicaState])
    reason = serializers.CharField(help_text="Why it ended")
    members = MemberSerializer(many=True)


class ReplicaListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """Response of ``GET /api/v1/replicas``."""

    replicas = ReplicaSerializer(many=True)


class ReplicaListView(APIView):
    """Replicas over several nodes."""

    needs = {"GET": "nodes.view_node"}

    @extend_schema(operation_id="list_replicas", responses={200: ReplicaListSerializer, 401: ErrorSerializer})
    def get(self, request: Request) -> Response:
        """List the replicas over several nodes that their nodes speak of, by model."""
        return Response({"replicas": [ReplicaSerializer(replica).data for replica in list_replicas()]})


class MomentSerializer(serializers.Serializer[Moment]):
    """How a GPU did at ``at``, or on average in the ``step_s`` seconds that begin then; null = not known."""

    at = serializers.DateTimeField()
    load_percent = serializers.FloatField(allow_null=True)
    vram_used_mb = serializers.FloatField(allow_null=True)
    temperature_c = serializers.FloatField(allow_null=True)
    power_w = serializers.FloatField(allow_null=True)
    active_requests = serializers.FloatField(allow_null=True)


class HistorySerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """Response of ``GET /api/v1/gpus/{gpu_id}/history``."""

    step_s = serializers.FloatField()
    moments = MomentSerializer(many=True)


class GpuHistoryView(APIView):
    """How a GPU did lately."""

    needs = {"GET": "nodes.view_gpu"}

    @extend_schema(
        operation_id="read_gpu_history",
        parameters=[OpenApiParameter("span", str, enum=list(Span), description="2h by default")],
        responses={200: HistorySerializer, 400: ErrorSerializer, 401: ErrorSerializer},
    )
    def get(self, request: Request, gpu_id: str) -> Response:
        """Return what is known, oldest first: of 2h every 10 seconds, of 2d every minute, of 30d every 10 minutes."""
        text = request.query_params.get("span", Span.HOURS.value)
        if text not in list(Span):
            raise BadRequest(f"span must be one of {', '.join(Span)}.", param="span")
        history = read_history(_read_gpu_id(gpu_id, "gpu_id"), Span(text))
        return Response(HistorySerializer({"step_s": history.step_s, "moments": history.moments}).data)


def _read_gpu_id(text: str, param: str) -> uuid.UUID:
    gpu_id = parse_id("gpu", text)
    if gpu_id is None:
        raise BadRequest(f"{param} must look like gpu_ followed by 32 hexadecimal digits.", param=param)
    return gpu_id


def _read_flag(text: str, param: str) -> bool:
    if text not in ("true", "false"):
        raise BadRequest(f"{param} must be true or false.", param=param)
    return text == "true"


def _read_limit(text: str | None) -> int:
    most = limits().nodes.gpu_page_rows
    if text is None:
        return limits().nodes.gpu_page_default_rows
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise BadRequest(f"limit must be a whole number from 1 to {most}.", param="limit")
    return int(text)


def _holder(request: Request) -> CredentialHolder:
    holder: object = request.user
    if not isinstance(holder, CredentialHolder):
        raise TypeError("a node view must authenticate with NodeTokenAuthentication")
    return holder


def _read_node_id(text: str) -> uuid.UUID:
    node_id = parse_id("node", text)
    if node_id is None:
        raise NodeNotFound("There is no node with that node_id; use the one that register answered.", param="node_id")
    return node_id


def _plain_number(seconds: float) -> float:
    # The contract writes a whole number of seconds as an integer.
    return int(seconds) if seconds == int(seconds) else seconds


urlpatterns = [
    re_path(r"^nodes/?$", NodeListView.as_view(), name="nodes"),
    re_path(r"^api/v1/gpus/?$", GpuListView.as_view(), name="gpus"),
    re_path(r"^api/v1/gpus/(?P<gpu_id>[^/]+)/history/?$", GpuHistoryView.as_view(), name="gpu-history"),
    re_path(r"^api/v1/gpus/(?P<gpu_id>[^/]+)/?$", GpuView.as_view(), name="gpu"),
    re_path(r"^api/v1/replicas/?$", ReplicaListView.as_view(), name="replicas"),
    re_path(r"^nodes/register/?$", RegisterView.as_view(), name="node-register"),
    re_path(r"^nodes/heartbeat/?$", HeartbeatView.as_view(), name="node-heartbeat"),
    re_path(r"^nodes/(?P<node_id>[^/]+)/mode/?$", ModeView.as_view(), name="node-mode"),
]
