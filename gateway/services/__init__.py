"""Changes to tenants, client keys, the model allow-list and aliases. Admin pages, commands and the launcher come through here.

Each function is atomic, writes its audit event in the same transaction and publishes a hint once it is committed.
"""

from __future__ import annotations

from gateway.services.aliases import (
    TargetState,
    change_alias,
    create_alias,
    delete_alias,
    find_alias,
    list_aliases,
    read_target_states,
    read_targets,
)
from gateway.services.errors import (
    AliasNotFound,
    InvalidValue,
    KeyNotFound,
    KeyRevoked,
    ModelNotFound,
    NameTaken,
    ResponseNotKept,
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
from gateway.services.limits import ApprovalNeeded, default_caps, default_limit, key_limit, model_caps, tenant_limit
from gateway.services.models import (
    allow_model,
    change_model_canary,
    change_model_caps,
    change_model_details,
    disallow_model,
    find_model,
    is_model_allowed,
    list_models,
    raise_model_caps,
    remember_models,
)
from gateway.services.responses import delete_expired_responses, forget_responses
from gateway.services.tenants import (
    change_response_policy,
    change_tenant_limit,
    create_tenant,
    disable_tenant,
    enable_tenant,
    find_tenant,
    list_tenants,
)

__all__ = [
    "AliasNotFound",
    "ApprovalNeeded",
    "InvalidValue",
    "KeyNotFound",
    "KeyRevoked",
    "ModelNotFound",
    "NameTaken",
    "ResponseNotKept",
    "ServiceError",
    "TargetState",
    "TenantNotFound",
    "allow_model",
    "change_alias",
    "change_key_limits",
    "change_model_canary",
    "change_model_caps",
    "change_model_details",
    "change_response_policy",
    "change_tenant_limit",
    "create_alias",
    "create_api_key",
    "create_tenant",
    "default_caps",
    "default_limit",
    "delete_alias",
    "delete_expired_responses",
    "disable_tenant",
    "disallow_model",
    "enable_tenant",
    "find_alias",
    "find_api_key",
    "find_model",
    "find_tenant",
    "forget_responses",
    "is_model_allowed",
    "key_limit",
    "list_aliases",
    "list_api_keys",
    "list_models",
    "list_tenants",
    "model_caps",
    "raise_key_limit",
    "raise_model_caps",
    "read_target_states",
    "read_targets",
    "remember_models",
    "revoke_api_key",
    "tenant_limit",
]
