"""Changes to client keys (``mst_…``). A key is revoked, never deleted: its records keep pointing at it."""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from datetime import datetime

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from gateway.models import ApiKey
from gateway.services.errors import InvalidValue, KeyNotFound, KeyRevoked, NameTaken
from gateway.services.limits import (
    PRIORITY,
    RATE,
    clean_budgets,
    clean_limit,
    clean_model_name,
    clean_name,
    clean_priority,
    key_limit,
    read_budgets,
    require_approved_budgets,
    require_no_higher_budgets,
    require_no_promotion,
    require_no_raise,
    require_ordered,
    store_budgets,
    tenant_limit,
)
from gateway.services.tenants import create_tenant, get_tenant
from gateway.values import Budget, Priority
from governance.audit import record_event
from governance.registry import RunOrder
from wire import clock
from wire.credentials import CredentialKind, mint_credential


@transaction.atomic
def create_api_key(
    *,
    name: str,
    tenant_name: str,
    actor: str,
    requests_per_minute: int | None = None,
    allowed_models: Iterable[str] = (),
    expires_at: datetime | None = None,
    priority: str = Priority.NORMAL.value,
    is_within_tenant: bool = False,
) -> tuple[ApiKey, str]:
    """Create a key and return it with its text, which exists nowhere else and is shown once.

    ``allowed_models`` empty = every allow-listed model. ``is_within_tenant``: its maker may give no more than the tenant has,
    with a policy or without. Raises InvalidValue, TenantNotFound, and ApprovalNeeded for a limit
    above the tenant's or high priority: make the key without, then propose to raise it.
    """
    cleaned = clean_name(name, what="key")
    limit = clean_limit(requests_per_minute, param="requests_per_minute")
    models = _clean_models(allowed_models)
    chosen = clean_priority(priority)
    if expires_at is not None and expires_at <= clock.now():
        raise InvalidValue(_("The key must expire in the future, or never."), param="expires_at")
    tenant = get_tenant(tenant_name)
    most = tenant_limit(tenant)
    if is_within_tenant and limit is not None and limit > most:
        raise InvalidValue(_("The tenant has %(most)s requests per minute.") % {"most": most}, param="requests_per_minute")
    if is_within_tenant and chosen is Priority.HIGH:
        raise InvalidValue(_("Only operators give high priority."), param="priority")
    require_no_raise(before=most, after=limit, otherwise=most, what=f"the tenant {tenant.name}")
    require_no_promotion(before=Priority.NORMAL.value, after=chosen)
    minted = mint_credential(CredentialKind.CLIENT)
    key = ApiKey.objects.create(
        name=cleaned,
        tenant=tenant,
        keyid=minted.keyid,
        digest=minted.digest,
        requests_per_minute=limit,
        allowed_models=models,
        priority=chosen.value,
        expires_at=expires_at,
    )
    detail = {
        "keyid": minted.keyid,
        "tenant": tenant_name,
        "requests_per_minute": limit,
        "allowed_models": models,
        "priority": chosen.value,
    }
    record_event(actor=actor, action="api_key.create", target=cleaned, detail=detail)
    publish_hint("keys", str(key.pk))
    return key, minted.text


KEYLESS, KEYLESS_VARIABLE = "keyless", "MUSTER_REQUIRE_API_KEYS"
"""Name of the tenant and of its key under which requests without a key are, and the variable that lets them in."""


@transaction.atomic
def keep_keyless_key(*, is_on: bool, actor: str) -> None:
    """Make the tenant and the key of requests without a key, or end the key. One that somebody revoked stays so."""
    rows = ApiKey.objects.select_for_update().filter(variable=KEYLESS_VARIABLE)
    if not is_on:
        for key in rows.filter(revoked_at=None):
            revoke_api_key(key_id=key.pk, actor=actor)
            ApiKey.objects.filter(pk=key.pk).update(variable="")
        return
    if rows.exists():
        return
    with suppress(NameTaken):
        create_tenant(name=KEYLESS, actor=actor)
    key, _text = create_api_key(name=KEYLESS, tenant_name=KEYLESS, actor=actor)  # nobody has its text
    ApiKey.objects.filter(pk=key.pk).update(variable=KEYLESS_VARIABLE)


@transaction.atomic
def revoke_api_key(*, key_id: uuid.UUID, actor: str, tenants: Collection[str] | None = None) -> ApiKey:
    """Make a key useless everywhere within seconds, for good; doing so again changes nothing.

    ``tenants``: one of these has to have it, None: any. Raises KeyNotFound.
    """
    now, keys = clock.now(), _keys_of(tenants).filter(pk=key_id)
    changed = keys.filter(revoked_at__isnull=True).update(revoked_at=now, updated_at=now)
    key = keys.select_related("tenant").first()
    if key is None:
        raise KeyNotFound(_("There is no key %(key_id)s.") % {"key_id": key_id}, param="key_id")
    if changed:
        record_event(actor=actor, action="api_key.revoke", target=key.name, detail={"keyid": key.keyid})
        publish_hint("keys", str(key.pk))
    return key


@transaction.atomic
def rotate_api_key(*, key_id: uuid.UUID, actor: str) -> tuple[ApiKey, str]:
    """Give a key another text, which exists nowhere else and is shown once; the old one ends everywhere within seconds.

    Limits, budgets, what was used of them and records stay. Raises KeyNotFound, KeyRevoked.
    """
    key, minted = _lock_key(key_id), mint_credential(CredentialKind.CLIENT)
    before, key.keyid, key.digest = key.keyid, minted.keyid, minted.digest
    key.save(update_fields=["keyid", "digest", "updated_at"])
    record_event(actor=actor, action="api_key.rotate", target=key.name, detail={"from": before, "keyid": minted.keyid})
    publish_hint("keys", str(key.pk))
    return key, minted.text


@transaction.atomic
def change_key_limits(
    *,
    key_id: uuid.UUID,
    requests_per_minute: int | None,
    allowed_models: Iterable[str],
    actor: str,
    priority: str | None = None,
) -> ApiKey:
    """Set a key's rate (None = the tenant's), its models (empty = all allowed) and its priority (None = as it is).

    Raises InvalidValue, KeyNotFound, KeyRevoked, and ApprovalNeeded for more than the key has today.
    """
    limit = clean_limit(requests_per_minute, param="requests_per_minute")
    models = _clean_models(allowed_models)
    key = _lock_key(key_id)
    chosen = clean_priority(priority if priority is not None else key.priority)
    require_no_raise(before=key_limit(key), after=limit, otherwise=tenant_limit(key.tenant), what=f"the key {key.name}")
    require_no_promotion(before=key.priority, after=chosen)
    after = {"requests_per_minute": limit, "allowed_models": models, "priority": chosen.value}
    before = {field: getattr(key, field) for field in after}
    for field, value in after.items():
        setattr(key, field, value)
    key.save(update_fields=[*after, "updated_at"])
    record_event(actor=actor, action="api_key.limits", target=key.name, detail={"from": before, "to": after})
    publish_hint("keys", str(key.pk))
    return key


@transaction.atomic
def change_key_budgets(*, key_id: uuid.UUID, budgets: Iterable[Budget], actor: str) -> ApiKey:
    """Set what a key may use over all gateways; those that are left out are gone.

    Raises InvalidValue, KeyNotFound, KeyRevoked, and ApprovalNeeded when a hard one grows, becomes soft or goes.
    """
    after = clean_budgets(budgets)
    key = _lock_key(key_id)
    require_no_higher_budgets(read_budgets(key), after, what=f"the key {key.name}")
    before, key.budgets = key.budgets, store_budgets(after)
    key.save(update_fields=["budgets", "updated_at"])
    record_event(actor=actor, action="api_key.budgets", target=key.name, detail={"from": before, "to": key.budgets})
    publish_hint("keys", str(key.pk))
    return key


@transaction.atomic
def raise_key_limit(
    *,
    key_id: uuid.UUID,
    requests_per_minute: int | None,
    priority: str | None,
    actor: str,
    order: RunOrder,
    budgets: Mapping[str, int] | None = None,
) -> ApiKey:
    """Carry out an approved raise: None = as it is. ``budgets``: new amounts of hard ones by kind. All of it or nothing.

    Raises KeyNotFound, KeyRevoked; InvalidValue when the key has as much by now; ApprovalNeeded when ``order`` is no approved
    run for this key.
    """
    limit, more = clean_limit(requests_per_minute, param="requests_per_minute"), dict(budgets or {})
    given = {name: value for name, value in ((RATE, limit), (PRIORITY, priority)) if value is not None} | more
    require_ordered(order, target=f"key:{key_id}", params=given)
    key = _lock_key(key_id)
    what = f"the key {key.name}"
    chosen = clean_priority(priority if priority is not None else key.priority)
    if limit is not None:
        require_no_raise(before=key_limit(key), after=limit, otherwise=limit, what=what, order=order)
    require_no_promotion(before=key.priority, after=chosen, order=order)
    after: dict[str, object] = {
        "requests_per_minute": limit if limit is not None else key.requests_per_minute,
        "priority": chosen.value,
    }
    if more:
        after["budgets"] = store_budgets(require_approved_budgets(key, more, what=what, order=order))
    before = {field: getattr(key, field) for field in after}
    for field, value in after.items():
        setattr(key, field, value)
    key.save(update_fields=[*after, "updated_at"])
    record_event(actor=actor, action="api_key.raise", target=key.name, detail={"from": before, "to": after}, op_id=order.op_id)
    publish_hint("keys", str(key.pk))
    return key


def find_api_key(key_id: uuid.UUID) -> ApiKey | None:
    """Return a key with its tenant, revoked or not; None when there is none of that id."""
    return ApiKey.objects.select_related("tenant").filter(pk=key_id).first()


def is_key_usable(key_id: uuid.UUID) -> bool:
    """Return whether the gateways take the key now: not revoked, not expired, its tenant enabled."""
    key = find_api_key(key_id)
    if key is None or key.revoked_at is not None or not key.tenant.is_active:
        return False
    return key.expires_at is None or clock.now() < key.expires_at


def has_own_key() -> bool:
    """Return whether there is a usable key that people made for an application: none of the quick start or a playground."""
    ready_made = Q(name="demo") | Q(name__startswith="playground: ")
    return ApiKey.objects.filter(revoked_at=None).exclude(ready_made).exists()


def list_api_keys(*, tenants: Collection[str] | None = None) -> list[ApiKey]:
    """Return the keys of these tenants, None: of all, the newest first."""
    return list(_keys_of(tenants).select_related("tenant").order_by("-created_at"))


def _keys_of(tenants: Collection[str] | None) -> QuerySet[ApiKey]:
    return ApiKey.objects.all() if tenants is None else ApiKey.objects.filter(tenant__name__in=tenants)


def _lock_key(key_id: uuid.UUID) -> ApiKey:
    key = ApiKey.objects.select_for_update(of=("self",)).select_related("tenant").filter(pk=key_id).first()
    if key is None:
        raise KeyNotFound(_("There is no key %(key_id)s.") % {"key_id": key_id}, param="key_id")
    if key.revoked_at is not None:
        raise KeyRevoked(_("The key %(name)s is revoked; create another one.") % {"name": key.name}, param="key_id")
    return key


def _clean_models(names: Iterable[str]) -> list[str]:
    models = sorted({clean_model_name(name, param="allowed_models") for name in names})
    if len(models) > limits().gateway.key_models:
        raise InvalidValue(
            _("A key may name at most %(key_models)s models.") % {"key_models": limits().gateway.key_models},
            param="allowed_models",
        )
    return models
