"""Operators' pages of the gateway. They show; every change is a page that asks, a POST and one call of a service."""

from __future__ import annotations

from gateway.admin.aliases import AliasAdmin
from gateway.admin.keys import ApiKeyAdmin
from gateway.admin.models import AllowListAdmin
from gateway.admin.requests import GatewayProcessAdmin, RequestRecordAdmin
from gateway.admin.responses import StoredResponseAdmin
from gateway.admin.tenants import TenantAdmin

__all__ = [
    "AliasAdmin",
    "AllowListAdmin",
    "ApiKeyAdmin",
    "GatewayProcessAdmin",
    "RequestRecordAdmin",
    "StoredResponseAdmin",
    "TenantAdmin",
]
