"""The gateway's part of the admin REST API: the contract's ``GET /requests``, model aliases, and which GPUs can run a model."""

from __future__ import annotations

import uuid
from dataclasses import asdict
from datetime import date
from decimal import Decimal
from typing import Any, Protocol, cast

import msgspec
from django.conf import settings
from django.http import HttpResponse
from django.urls import path
from django.utils.translation import gettext as _
from drf_spectacular.utils import OpenApiParameter, extend_schema, extend_schema_field
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from core.limits import limits
from core.roles import SEE_REQUESTS, SEE_TENANT, Holder, find_tenants, limit_rows, may
from gateway.models import ModelAlias, RequestRecord, Tenant
from gateway.routing import Target
from gateway.services.compatibility import GpuFit, Quality, Source, change_model_requirements, find_fits
from gateway.services.decisions import find_decision
from gateway.services.errors import AliasNotFound, InvalidValue, TenantNotFound
from gateway.services.exports import print_line
from gateway.services.limits import clean_model_name
from gateway.services.models import (
    TargetState,
    change_alias,
    create_alias,
    delete_alias,
    find_alias,
    list_aliases,
    read_target_states,
    read_targets,
)
from gateway.services.tenants import change_tenant_weight, find_tenant, list_tenants
from gateway.services.usage import GROUPS, read_usage
from gateway.values import MILLION, RequestOutcome, judge_outcome
from governance.errors import NotPermitted
from governance.rest.requests import Flag, Form, GovernanceView, Text, WholeNumber
from nodes.api import ErrorSerializer, print_time
from wire import clock
from wire.contract import RequestState
from wire.ids import format_id, parse_id

_LIMIT = "How many at most, 1 to {0.list_rows}; {0.list_default_rows} by default"
CONTRACT_STATES = [state for state in RequestState if state is not RequestState.CANCELLED]
"""The contract's list of seven: a request whose caller left is ``interrupted`` there, ``cancelled`` in our own field."""


class RequestSerializer(serializers.Serializer[RequestRecord]):
    """One request record in the contract's shape, with our own fields behind it."""

    request_id = serializers.CharField(source="printed_id")
    node_id = serializers.SerializerMethodField()
    model = serializers.CharField()
    status = serializers.SerializerMethodField()
    prompt_tokens_est = serializers.IntegerField()
    max_tokens = serializers.IntegerField(allow_null=True)
    latency_ms = serializers.IntegerField(allow_null=True)
    error_code = serializers.CharField(allow_null=True)
    created_at = serializers.DateTimeField()
    state = serializers.ChoiceField(
        choices=[state.value for state in RequestState], help_text="As status, with cancelled for a caller that left"
    )
    outcome = serializers.SerializerMethodField()
    status_code = serializers.IntegerField(allow_null=True, help_text="HTTP status of the answer; null while there is none")
    engine_error = serializers.CharField(
        help_text="What the engine said when it failed or refused, without what it repeated of the request; mostly empty"
    )

    @extend_schema_field(serializers.ChoiceField(choices=[state.value for state in CONTRACT_STATES]))
    def get_status(self, record: RequestRecord) -> str:
        return RequestState.INTERRUPTED.value if record.state == RequestState.CANCELLED else record.state

    @extend_schema_field(serializers.ChoiceField(choices=[one.value for one in RequestOutcome], allow_null=True))
    def get_outcome(self, record: RequestRecord) -> str | None:
        return judge_outcome(RequestState(record.state), record.status_code)

    def get_node_id(self, record: RequestRecord) -> str | None:
        return format_id("node", record.node_id) if record.node_id else None


class RequestListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """The contract's envelope."""

    requests = RequestSerializer(many=True)


def _errors(*statuses: int) -> dict[int, type[ErrorSerializer]]:
    return dict.fromkeys(statuses, ErrorSerializer)


class RequestListView(APIView):
    """Recent request records, newest first."""

    needs = {"GET": SEE_REQUESTS}
    is_per_tenant = True

    @extend_schema(
        operation_id="list_requests",
        parameters=[
            OpenApiParameter("limit", int, description=_LIMIT.format(limits().gateway)),
            OpenApiParameter(
                "status",
                str,
                enum=[state.value for state in RequestState],
                description="Only this status; interrupted has the cancelled ones too",
            ),
            OpenApiParameter("node_id", str, description="Only requests that this node served"),
        ],
        responses={200: RequestListSerializer, **_errors(400, 401)},
    )
    def get(self, request: Request) -> Response:
        """List recent requests, newest first. A parameter that cannot be used is 400 BAD_REQUEST and named in ``param``."""
        records = limit_rows(RequestRecord.objects.all(), _holder(request), SEE_REQUESTS, tenant="tenant")
        records = records.order_by("-created_at", "-id")
        state = request.query_params.get("status")
        if state is not None:
            records = records.filter(state__in=_read_status(state))
        node_id = request.query_params.get("node_id")
        if node_id is not None:
            records = records.filter(node_id=_read_node_id(node_id))
        page = records[: _read_limit(request.query_params.get("limit"))]
        return Response(RequestListSerializer({"requests": page}).data)


def _read_limit(text: str | None) -> int:
    if text is None:
        return limits().gateway.list_default_rows
    most = limits().gateway.list_rows
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise InvalidValue(f"limit must be a whole number from 1 to {most}.", param="limit")
    return int(text)


def _read_status(text: str) -> list[RequestState]:
    try:
        state = RequestState(text)
    except ValueError as error:
        words = ", ".join(state.value for state in RequestState)
        raise InvalidValue(f"status must be one of {words}.", param="status") from error
    return [state, RequestState.CANCELLED] if state is RequestState.INTERRUPTED else [state]


def _read_node_id(text: str) -> uuid.UUID:
    node_id = parse_id("node", text)
    if node_id is None:
        raise InvalidValue("node_id must look like node_ followed by 32 hexadecimal digits.", param="node_id")
    return node_id


class ScoredNodeSerializer(serializers.Serializer[Any]):  # Any: no model
    """A node that a request could have gone to."""

    node = serializers.CharField()
    score = serializers.FloatField()
    parts = serializers.DictField(child=serializers.FloatField(), help_text="From 0 to 1, by name")
    is_chosen = serializers.BooleanField()


class QueueFactsSerializer(serializers.Serializer[Any]):  # Any: no model
    """From where a request waited."""

    tier = serializers.CharField(help_text="high, normal or low")
    position = serializers.IntegerField(help_text="Its place as the wait began; 1 is next")
    estimate_ms = serializers.IntegerField(help_text="How long it was told then that it would wait")
    waited_ms = serializers.IntegerField()


class AffinityFactsSerializer(serializers.Serializer[Any]):  # Any: no model
    """What tied a request to nodes."""

    session_by = serializers.CharField(
        help_text="x-session-id, metadata.user_id, previous_response_id or key; empty: its session had used no node"
    )
    session_node = serializers.CharField(help_text="Which its session had used last")
    prefix = serializers.FloatField(help_text="How much of the prompt its node had been sent before, from 0 to 1")


class RoutingDecisionSerializer(serializers.Serializer[Any]):  # Any: no model
    """Why a request went to its node."""

    request_id = serializers.CharField()
    model = serializers.CharField()
    node = serializers.CharField(help_text="Empty: it got no node")
    reason = serializers.CharField(
        help_text="score, affinity, least_load, preferred, only_free or waited; empty: no choice, or not recorded"
    )
    text = serializers.CharField()
    weights = serializers.DictField(child=serializers.FloatField())
    candidates = ScoredNodeSerializer(many=True)
    waited = QueueFactsSerializer(allow_null=True, help_text="null: it did not wait")
    affinity = AffinityFactsSerializer(allow_null=True, help_text="null: nothing tied it to a node")


class DecisionView(APIView):
    """Why one request went to its node."""

    needs = {"GET": SEE_REQUESTS}

    @extend_schema(operation_id="read_decision", responses={200: RoutingDecisionSerializer, **_errors(401, 404)})
    def get(self, request: Request, request_id: str) -> Response:
        """Read which nodes were compared for a request, the parts of their scores, and which one was chosen why."""
        record, facts = find_decision(request_id)
        shown = {"request_id": record.printed_id, "model": record.model} | asdict(facts)
        return Response(RoutingDecisionSerializer(shown).data)


class TargetForm(Form):
    """A model behind an alias."""

    model = Text(max_length=limits().gateway.model_name_chars)
    weight = WholeNumber(
        required=False,
        default=1,
        min_value=0,
        max_value=limits().gateway.alias_weight,
        help_text="Its share; 0: only when others cannot answer",
    )


class ChangeAliasForm(Form):
    """Body of ``PATCH /api/v1/aliases/{id}``. What is left out stays as it is."""

    targets = serializers.ListField(child=TargetForm(), min_length=1, max_length=limits().gateway.candidates, required=False)
    is_active = Flag(required=False, help_text="Whether it works; when it does not, the name means what it would without it")

    def validate_targets(self, value: list[dict[str, Any]]) -> list[Target]:  # Any: validated members
        return [Target(one["model"], one["weight"]) for one in value]


class AliasForm(ChangeAliasForm):
    """Body of ``POST /api/v1/aliases``."""

    name = Text(max_length=limits().gateway.model_name_chars, help_text="What clients ask for")
    tenant = Text(
        max_length=limits().gateway.name_chars,
        required=False,
        allow_null=True,
        default=None,
        help_text="Left out: for every tenant",
    )
    targets = serializers.ListField(child=TargetForm(), min_length=1, max_length=limits().gateway.candidates)


class TargetSerializer(serializers.Serializer[Any]):  # Any: a value, no model
    """A model behind an alias, as it is now."""

    model = serializers.CharField()
    weight = serializers.IntegerField()
    state = serializers.CharField(help_text="served, no node, or not allowed: the last two are passed over")


class AliasSerializer(serializers.Serializer[ModelAlias]):
    """One alias. Its tenant must be loaded; ``context["states"]``: what its models can do now."""

    id = serializers.IntegerField()
    name = serializers.CharField()
    tenant = serializers.CharField(allow_null=True, help_text="null: for every tenant")
    targets = TargetSerializer(many=True)
    is_active = serializers.BooleanField()
    created_at = serializers.DateTimeField()
    updated_at = serializers.DateTimeField()

    def to_representation(self, instance: ModelAlias) -> dict[str, Any]:  # Any: JSON
        states = self.context["states"]
        return {
            "id": instance.pk,
            "name": instance.name,
            "tenant": instance.tenant.name if instance.tenant is not None else None,
            "targets": [
                {"model": target.model, "weight": target.weight, "state": states.get(target.model, TargetState.NOT_ALLOWED)}
                for target in read_targets(instance)
            ],
            "is_active": instance.is_active,
            "created_at": print_time(instance.created_at),
            "updated_at": print_time(instance.updated_at),
        }


class AliasListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """Every alias."""

    aliases = AliasSerializer(many=True)


class AliasListView(GovernanceView):
    """The model aliases, and the way to make one."""

    needs = {"GET": "gateway.view_modelalias", "POST": "gateway.add_modelalias"}

    @extend_schema(operation_id="list_aliases", responses={200: AliasListSerializer, **_errors(401)})
    def get(self, request: Request) -> Response:
        """List every alias by name, those for everybody first, each with what its models can do at this moment."""
        return Response({"aliases": _show_aliases(list_aliases())})

    @extend_schema(
        operation_id="create_alias",
        request=AliasForm,
        responses={201: AliasSerializer, **_errors(400, 401, 404, 409, 413, 415)},
    )
    def post(self, request: Request) -> Response:
        """Let clients ask for models by another name. 404: no such tenant; 409: there is such an alias already."""
        form = AliasForm(data=request.data)
        form.is_valid(raise_exception=True)
        wanted = dict(form.validated_data)
        alias = create_alias(tenant_name=wanted.pop("tenant"), actor=_actor(request), **wanted)
        headers = {"Location": f"/api/v1/aliases/{alias.pk}"}
        return Response(_show_aliases([alias])[0], status=status.HTTP_201_CREATED, headers=headers)


class AliasView(GovernanceView):
    """One alias."""

    needs = {
        "GET": "gateway.view_modelalias",
        "PATCH": "gateway.change_modelalias",
        "DELETE": "gateway.delete_modelalias",
    }

    @extend_schema(operation_id="read_alias", responses={200: AliasSerializer, **_errors(401, 404)})
    def get(self, request: Request, alias_id: int) -> Response:
        """Read an alias."""
        alias = find_alias(alias_id)
        if alias is None:
            raise AliasNotFound(f"There is no alias {alias_id}.", param="alias_id")
        return Response(_show_aliases([alias])[0])

    @extend_schema(
        operation_id="change_alias",
        request=ChangeAliasForm,
        responses={200: AliasSerializer, **_errors(400, 401, 404, 413, 415)},
    )
    def patch(self, request: Request, alias_id: int) -> Response:
        """Change where an alias leads, or switch it off or on; for requests that arrive from then on."""
        form = ChangeAliasForm(data=request.data)
        form.is_valid(raise_exception=True)
        alias = change_alias(alias_id=alias_id, actor=_actor(request), **form.validated_data)
        return Response(_show_aliases([alias])[0])

    @extend_schema(operation_id="delete_alias", responses={204: None, **_errors(401, 404)})
    def delete(self, request: Request, alias_id: int) -> Response:
        """Delete an alias; requests under way end normally."""
        delete_alias(alias_id=alias_id, actor=_actor(request))
        return Response(status=status.HTTP_204_NO_CONTENT)


def _show_aliases(aliases: list[ModelAlias]) -> list[dict[str, Any]]:  # Any: JSON
    context = {"states": read_target_states()}
    return [AliasSerializer(alias, context=context).data for alias in aliases]


class TenantSerializer(serializers.Serializer[Tenant]):
    """Who the work is for."""

    name = serializers.CharField()
    is_active = serializers.BooleanField()
    requests_per_minute = serializers.IntegerField(allow_null=True, help_text="Of its keys; null: the setting")
    weight = serializers.IntegerField(help_text="Its part of the slots while requests wait, in percent of what others get")


class TenantListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """Every tenant."""

    tenants = TenantSerializer(many=True)


class ChangeTenantForm(Form):
    """Body of ``PATCH /api/v1/tenants/{name}``."""

    weight = WholeNumber(
        min_value=1,
        max_value=limits().gateway.tenant_weight,
        help_text="100: as much as other tenants; more than today needs approval once there is a policy",
    )


class TenantListView(GovernanceView):
    """The tenants."""

    needs = {"GET": SEE_TENANT}
    is_per_tenant = True

    @extend_schema(operation_id="list_tenants", responses={200: TenantListSerializer, **_errors(401)})
    def get(self, request: Request) -> Response:
        """List every tenant by name."""
        names = find_tenants(_holder(request), SEE_TENANT)
        tenants = [tenant for tenant in list_tenants() if names is None or tenant.name in names]
        return Response(TenantListSerializer({"tenants": tenants}).data)


class TenantView(GovernanceView):
    """One tenant."""

    needs = {"GET": SEE_TENANT, "PATCH": "gateway.change_tenant"}
    is_per_tenant = True

    @extend_schema(operation_id="read_tenant", responses={200: TenantSerializer, **_errors(401, 404)})
    def get(self, request: Request, name: str) -> Response:
        """Read a tenant."""
        tenant = find_tenant(name) if may(_holder(request), SEE_TENANT, tenant=name) else None
        if tenant is None:
            raise TenantNotFound(f"There is no tenant {name[:80]}.", param="name")
        return Response(TenantSerializer(tenant).data)

    @extend_schema(
        operation_id="change_tenant",
        request=ChangeTenantForm,
        responses={200: TenantSerializer, **_errors(400, 401, 403, 404, 413, 415)},
    )
    def patch(self, request: Request, name: str) -> Response:
        """Change the weight of a tenant, for requests that arrive from then on. 403: that takes an approved limit-raise."""
        _require(request, self.needs["PATCH"], tenant=name)
        form = ChangeTenantForm(data=request.data)
        form.is_valid(raise_exception=True)
        tenant = change_tenant_weight(name=name, weight=form.validated_data["weight"], actor=_actor(request))
        return Response(TenantSerializer(tenant).data)


def _holder(request: Request) -> Holder:
    return cast("Holder", request.user)  # what DEFAULT_AUTHENTICATION_CLASSES puts there


def _require(request: Request, permission: str, *, tenant: str) -> None:
    """Raise NotPermitted unless the token may do this in the tenant; "" = in all."""
    if not may(_holder(request), permission, tenant=tenant):
        where = _("Its role does not count in the tenant %(tenant)s.") % {"tenant": tenant[:80]}
        raise NotPermitted(where if tenant else _("Name a tenant of yours: ?tenant=NAME."), param="tenant")


def _actor(request: Request) -> str:
    return cast("_Named", request.user).actor  # what DEFAULT_AUTHENTICATION_CLASSES puts there


class _Named(Protocol):
    @property
    def actor(self) -> str:
        """``token:<name>``."""


class FitSerializer(serializers.Serializer[GpuFit]):
    """Whether a GPU can run the model. Memory in MiB."""

    gpu_id = serializers.SerializerMethodField()
    node_id = serializers.SerializerMethodField()
    node_name = serializers.CharField(source="gpu.node_name")
    index = serializers.IntegerField(source="gpu.index")
    vendor = serializers.CharField(source="gpu.vendor")
    model = serializers.CharField(source="gpu.model")
    vram_mb = serializers.IntegerField(source="gpu.vram_mb", allow_null=True)
    vram_free_mb = serializers.IntegerField(source="gpu.vram_free_mb", allow_null=True)
    status = serializers.CharField(source="gpu.status.value", help_text="Of its node")
    can_run = serializers.BooleanField()
    quantization = serializers.CharField(allow_null=True, help_text="The best that its memory holds; null where none is named")
    quality = serializers.ChoiceField(choices=[one.value for one in Quality], allow_null=True)
    fits_now = serializers.BooleanField(help_text="Its free memory holds it")
    quantization_now = serializers.CharField(source="now", allow_null=True, help_text="The best that its free memory holds")
    loaded = serializers.BooleanField(source="is_loaded", help_text="Its node has the model loaded")
    reason = serializers.CharField(help_text="Why it cannot run it, or what is not known; mostly empty")

    def get_gpu_id(self, fit: GpuFit) -> str:
        return format_id("gpu", fit.gpu.gpu_id)

    def get_node_id(self, fit: GpuFit) -> str:
        return format_id("node", fit.gpu.node_id)


class CompatibilitySerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """Response of ``GET /api/v1/compatibility``: the document of the model, whence it is, and every GPU of the fleet."""

    model = serializers.CharField()
    requirements = serializers.DictField(allow_null=True, help_text="As in the document of the model; null = nobody knows")
    requirements_from = serializers.ChoiceField(choices=[one.value for one in Source])
    gpus = FitSerializer(many=True)


class RequirementsSerializer(serializers.Serializer[Any]):  # Any: a document, no model
    """Body of ``PUT /api/v1/compatibility/{model}``."""

    model = serializers.CharField()
    requirements = serializers.DictField(help_text="min_vram_mb, quantizations, compute_capability")


def _tell_fits(model: str) -> Response:
    found = find_fits(model)
    needed = None if found.requirements is None else msgspec.to_builtins(found.requirements)
    answer = {"model": found.model, "requirements": needed, "requirements_from": found.source.value, "gpus": found.fits}
    return Response(CompatibilitySerializer(answer).data)


class RequirementsView(GovernanceView):
    """What one model needs."""

    needs = {"PUT": "gateway.change_model", "DELETE": "gateway.change_model"}

    @extend_schema(
        operation_id="change_requirements",
        request=RequirementsSerializer,
        responses={200: CompatibilitySerializer, **_errors(400, 401, 404, 413, 415)},
    )
    def put(self, request: Request, model: str) -> Response:
        """Set the document of a model, as in the admin; answers which GPUs can run it now. A node none of whose GPUs can gets
        no requests for it any more.
        """
        document = msgspec.json.encode(request.data).decode()
        name = clean_model_name(model, param="model")
        return _tell_fits(change_model_requirements(name=name, document=document, actor=_actor(request)).name)

    @extend_schema(operation_id="delete_requirements", responses={200: CompatibilitySerializer, **_errors(400, 401, 404)})
    def delete(self, request: Request, model: str) -> Response:
        """Drop the document of a model: what nodes measured counts from then on."""
        name = clean_model_name(model, param="model")
        return _tell_fits(change_model_requirements(name=name, document="", actor=_actor(request)).name)


class CompatibilityView(APIView):
    """Which GPUs can run a model."""

    needs = {"GET": "gateway.view_model"}

    @extend_schema(
        operation_id="read_compatibility",
        parameters=[OpenApiParameter("model", str, required=True, description="The name of the model")],
        responses={200: CompatibilitySerializer, **_errors(400, 401, 404)},
    )
    def get(self, request: Request) -> Response:
        """Return which GPUs of the fleet can run a model and at what quality: those that can first."""
        name = request.query_params.get("model")
        if not name:
            raise InvalidValue("Say which model: ?model=NAME.", param="model")
        return _tell_fits(clean_model_name(name, param="model"))


class UsageSerializer(serializers.Serializer[Any]):  # Any: a sum, no model
    """What one group used. The members of groups that were not asked for are left out."""

    day = serializers.DateField(required=False)
    model = serializers.CharField(required=False)
    key_id = serializers.UUIDField(required=False)
    key_name = serializers.CharField(required=False)
    tenant = serializers.CharField(required=False)
    node_id = serializers.CharField(required=False, help_text="Empty: no node got them")
    requests = serializers.IntegerField()
    prompt_tokens = serializers.IntegerField()
    cached_tokens = serializers.IntegerField(help_text="Of the prompt, what nodes had cached; charged at the cached price")
    completion_tokens = serializers.IntegerField()
    tokens = serializers.IntegerField(help_text="What budgets count: both, or what was reserved where nobody knows")
    cost = serializers.SerializerMethodField(help_text="In the currency, six places")

    def get_cost(self, row: dict[str, Any]) -> str:  # Any: columns
        return f"{Decimal(row['cost_micros']) / MILLION:.6f}"


class UsageListSerializer(serializers.Serializer[Any]):  # Any: an envelope, no model
    """Sums by group."""

    currency = serializers.CharField()
    usage = UsageSerializer(many=True)


_SUMS = ("requests", "prompt_tokens", "cached_tokens", "completion_tokens", "tokens", "cost")
_USAGE_PARAMETERS = [
    OpenApiParameter("group_by", str, description=f"Some of {', '.join(GROUPS)}, separated by commas; day by default"),
    OpenApiParameter("from", date, description="First UTC day; the first of this month by default"),
    OpenApiParameter("to", date, description="Last UTC day; today by default"),
    OpenApiParameter("tenant", str, description="Only this tenant"),
]


class UsageView(APIView):
    """What requests used, summed up."""

    needs = {"GET": SEE_REQUESTS}
    is_per_tenant = True

    @extend_schema(
        operation_id="list_usage", parameters=_USAGE_PARAMETERS, responses={200: UsageListSerializer, **_errors(400, 401)}
    )
    def get(self, request: Request) -> Response:
        """Sum up what requests used by day, model, key, tenant and node. Budgets count the same."""
        rows = _read_usage(request)
        return Response(UsageListSerializer({"currency": settings.CURRENCY, "usage": rows}).data)


class UsageFileView(APIView):
    """The same as a file."""

    needs = {"GET": SEE_REQUESTS}
    is_per_tenant = True

    @extend_schema(
        operation_id="export_usage",
        parameters=_USAGE_PARAMETERS,
        responses={(200, "text/csv"): str, **_errors(400, 401)},
    )
    def get(self, request: Request) -> HttpResponse:
        """Return the same as CSV (RFC 4180), with a line of names."""
        rows = UsageSerializer(_read_usage(request), many=True).data
        names = [*(field for group in _read_groups(request) for field in GROUPS[group]), *_SUMS]
        lines = [[*names, "currency"], *([row[name] for name in names] + [settings.CURRENCY] for row in rows)]
        answer = HttpResponse("".join(map(print_line, lines)), content_type="text/csv; charset=utf-8")
        answer["content-disposition"] = 'attachment; filename="usage.csv"'
        return answer


def _read_groups(request: Request) -> list[str]:
    return [name.strip() for name in request.query_params.get("group_by", "day").split(",")]


def _read_usage(request: Request) -> list[dict[str, Any]]:  # Any: columns
    today = clock.now().date()
    first, last = _read_day(request, "from", today.replace(day=1)), _read_day(request, "to", today)
    rows = read_usage(groups=_read_groups(request), first=first, last=last, tenant=_read_tenant(request))
    for row in rows:
        if "node_id" in row:
            row["node_id"] = format_id("node", row["node_id"]) if row["node_id"] is not None else ""
    return rows


def _read_tenant(request: Request) -> str | None:
    """Return the tenant that is asked for, None for all; a token of one tenant asks for its own. Raises NotPermitted."""
    asked, names = request.query_params.get("tenant"), find_tenants(_holder(request), SEE_REQUESTS)
    if asked is None and names is not None and len(names) == 1:
        return next(iter(names))
    _require(request, SEE_REQUESTS, tenant=asked or "")
    return asked


def _read_day(request: Request, name: str, default: date) -> date:
    text = request.query_params.get(name)
    try:
        return default if text is None else date.fromisoformat(text)
    except ValueError:
        raise InvalidValue(f"{name} must be a day such as 2026-11-28.", param=name) from None


urlpatterns = [
    path("api/v1/usage", UsageView.as_view(), name="usage"),
    path("api/v1/usage.csv", UsageFileView.as_view(), name="usage-file"),
    path("requests", RequestListView.as_view(), name="requests"),
    path("api/v1/compatibility", CompatibilityView.as_view(), name="compatibility"),
    path("api/v1/compatibility/<path:model>", RequirementsView.as_view(), name="requirements"),
    path("requests/<str:request_id>/decision", DecisionView.as_view(), name="decision"),
    path("api/v1/tenants", TenantListView.as_view(), name="tenants"),
    path("api/v1/tenants/<str:name>", TenantView.as_view(), name="tenant"),
    path("api/v1/aliases", AliasListView.as_view(), name="aliases"),
    path("api/v1/aliases/<int:alias_id>", AliasView.as_view(), name="alias"),
]
