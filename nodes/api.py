"""The nodes REST API of the contract: register, heartbeat, mode (boxes) and the list (administrators)."""

from __future__ import annotations

import uuid

from drf_spectacular.utils import extend_schema
from rest_framework.permissions import IsAuthenticated
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from core.limits import limits
from nodes.authentication import CredentialHolder, NodeTokenAuthentication
from nodes.errors import NodeNotFound
from nodes.models import Node, NodePresence, ProviderState, read_clock, with_clock
from nodes.serializers import (
    ErrorSerializer,
    HeartbeatAnswerSerializer,
    HeartbeatSerializer,
    ModeAnswerSerializer,
    ModeSerializer,
    NodeListSerializer,
    NodeSerializer,
    RegisterAnswerSerializer,
    RegisterSerializer,
    print_time,
)
from nodes.services.availability import judge_status
from nodes.services.drains import set_mode
from nodes.services.nodes import record_heartbeat, register_direct_node, require_own_node
from wire.contract import NodeMode
from wire.ids import parse_id


class NodeView(APIView):
    """Base of what boxes call: their own credential, and nothing else, opens it."""

    authentication_classes = (NodeTokenAuthentication,)
    permission_classes = (IsAuthenticated,)


class RegisterView(NodeView):
    """Enrols a box, or refreshes what is known of it."""

    @extend_schema(
        operation_id="register_node",
        request=RegisterSerializer,
        responses={
            200: RegisterAnswerSerializer,
            400: ErrorSerializer,
            401: ErrorSerializer,
            403: ErrorSerializer,
            429: ErrorSerializer,
        },
    )
    def post(self, request: Request) -> Response:
        """Register a box; again with the same credential and ``node_name`` refreshes the same one."""
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
        responses={
            200: HeartbeatAnswerSerializer,
            400: ErrorSerializer,
            401: ErrorSerializer,
            404: ErrorSerializer,
            429: ErrorSerializer,
        },
    )
    def post(self, request: Request) -> Response:
        """Record a heartbeat. ``should_drain`` asks the box to finish what it runs and take nothing new."""
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
    """Lends a box or takes it back, as its owner wishes."""

    @extend_schema(
        operation_id="set_node_mode",
        request=ModeSerializer,
        responses={
            200: ModeAnswerSerializer,
            400: ErrorSerializer,
            401: ErrorSerializer,
            404: ErrorSerializer,
            429: ErrorSerializer,
        },
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
        presence = NodePresence.objects.filter(node=node).first()
        status = judge_status(node, presence, now=read_clock())
        return Response({"node_id": node.printed_id, "mode": node.mode, "status": status.value})


class NodeListView(APIView):
    """What administrators see of the fleet."""

    @extend_schema(operation_id="list_nodes", responses={200: NodeListSerializer, 401: ErrorSerializer})
    def get(self, request: Request) -> Response:
        """List every box by name with the status it has at this moment."""
        nodes = Node.objects.select_related("provider", "presence").exclude(provider__state=ProviderState.DELETED)
        return Response({"nodes": [NodeSerializer(node).data for node in with_clock(nodes).order_by("name", "pk")]})


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
    """Return a whole number of seconds as an integer, the way the contract writes it."""
    return int(seconds) if seconds == int(seconds) else seconds
