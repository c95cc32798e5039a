"""Rows of tenants, their keys and requests, of gateways and operators; each takes only what the test is about."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.utils import timezone

from core.models import User
from gateway.models import ApiKey, GatewayProcess, RequestRecord, Tenant
from gateway.services import create_api_key, create_tenant
from tests.fakes.nodes import ACTOR
from wire.contract import RequestState
from wire.ids import new_uuid7

PASSWORD = "a password for tests only"


def make_operator(name: str = "ada", *, is_superuser: bool = True) -> User:
    return User.objects.create_user(name, password=PASSWORD, is_staff=True, is_superuser=is_superuser)


def make_tenant(name: str = "research") -> Tenant:
    return Tenant.objects.filter(name=name).first() or create_tenant(name=name, actor=ACTOR)


def make_key(name: str = "notebook", *, tenant: str = "research", **changes: Any) -> tuple[ApiKey, str]:
    make_tenant(tenant)
    return create_api_key(name=name, tenant_name=tenant, actor=ACTOR, **changes)


def make_gateway(*, silent_s: float = 0.0, stopped: bool = False) -> GatewayProcess:
    """Return a gateway that was heard ``silent_s`` seconds ago."""
    now = timezone.now()
    return GatewayProcess.objects.create(
        host="host", pid=1, heartbeat_at=now - timedelta(seconds=silent_s), stopped_at=now if stopped else None
    )


def make_record(*, age_s: float = 1.0, state: RequestState = RequestState.COMPLETED, **changes: Any) -> RequestRecord:
    """Return a request that arrived ``age_s`` seconds ago."""
    values: dict[str, Any] = {
        "gateway_id": new_uuid7(), "tenant": "research", "key_id": new_uuid7(), "key_name": "notebook", "model": "tiny",
        "endpoint": "/v1/chat/completions", "state": state.value, "created_at": timezone.now() - timedelta(seconds=age_s),
    }  # fmt: skip
    return RequestRecord.objects.create(**{**values, **changes})
