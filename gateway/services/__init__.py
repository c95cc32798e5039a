"""Changes to tenants, client keys and the model allow-list. Admin pages, commands and the launcher all come through here.

Each function is atomic, writes its audit event in the same transaction and publishes a hint once it is committed.
"""

from __future__ import annotations

from gateway.services.errors import (
    InvalidValue,
    KeyNotFound,
    KeyRevoked,
    ModelNotFound,
    NameTaken,
    ServiceError,
    TenantNotFound,
)
from gateway.services.keys import (
    change_key_limits,
    create_api_key,
    find_api_key,
    list_api_keys,
    raise_key_limit,
    revoke_api_key,
)
from gateway.services.limits import ApprovalNeeded, default_limit, key_limit, tenant_limit
from gateway.services.models import (
    allow_model,
    change_model_caps,
    disallow_model,
    is_model_allowed,
    remember_models,
)
from gateway.services.tenants import (
    change_tenant_limit,
    create_tenant,
    disable_tenant,
    enable_tenant,
    find_tenant,
    list_tenants,
)

__all__ = [
    "ApprovalNeeded",
    "InvalidValue",
    "KeyNotFound",
    "KeyRevoked",
    "ModelNotFound",
    "NameTaken",
    "ServiceError",
    "TenantNotFound",
    "allow_model",
    "change_key_limits",
    "change_model_caps",
    "change_tenant_limit",
    "create_api_key",
    "create_tenant",
    "default_limit",
    "disable_tenant",
    "disallow_model",
    "enable_tenant",
    "find_api_key",
    "find_tenant",
    "is_model_allowed",
    "key_limit",
    "list_api_keys",
    "list_tenants",
    "raise_key_limit",
    "remember_models",
    "revoke_api_key",
    "tenant_limit",
]
