"""Changes to tenants. A tenant is switched off, never deleted: its records keep its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from core.hints import publish_hint
from gateway.models import Tenant
from gateway.services.errors import NameTaken, TenantNotFound
from gateway.services.limits import (
    RATE,
    WEIGHT,
    clean_budgets,
    clean_days,
    clean_limit,
    clean_name,
    clean_weight,
    default_limit,
    read_budgets,
    require_approved_budgets,
    require_no_higher_budgets,
    require_no_higher_weight,
    require_no_raise,
    require_ordered,
    store_budgets,
    tenant_limit,
)
from gateway.values import Budget
from governance.audit import record_event
from governance.registry import RunOrder
from wire import clock


@transaction.atomic
def create_tenant(*, name: str, actor: str, requests_per_minute: int | None = None) -> Tenant:
    """Create a tenant; its keys get ``requests_per_minute`` unless they say otherwise.

    Raises InvalidValue, NameTaken, and ApprovalNeeded for more than the setting gives everybody.
    """
    cleaned = clean_name(name, what="tenant")
    limit = clean_limit(requests_per_minute, param="requests_per_minute")
    most = default_limit()
    require_no_raise(before=most, after=limit, otherwise=most, what="a new tenant")
    try:
        with transaction.atomic():
            tenant = Tenant.objects.create(name=cleaned, requests_per_minute=limit)
    except IntegrityError as error:
        raise NameTaken(_("There is a tenant %(cleaned)s already.") % {"cleaned": cleaned}, param="name") from error
    record_event(actor=actor, action="tenant.create", target=cleaned, detail={"requests_per_minute": limit})
    publish_hint("tenants", cleaned)
    return tenant


def disable_tenant(*, name: str, actor: str) -> Tenant:
    """Refuse every key of the tenant from now on; requests under way end normally. Raises TenantNotFound."""
    return _set_active(name=name, is_active=False, actor=actor)


def enable_tenant(*, name: str, actor: str) -> Tenant:
    """Accept the tenant's keys again. Raises TenantNotFound."""
    return _set_active(name=name, is_active=True, actor=actor)


@transaction.atomic
def change_tenant_limit(
    *,
    name: str,
    requests_per_minute: int | None,
    actor: str,
    order: RunOrder | None = None,
    budgets: Mapping[str, int] | None = None,
    weight: int | None = None,
) -> Tenant:
    """Set what the tenant's keys get by default; None = the setting, of an approved run = as it is.

    ``order``: the approved run that this carries out; ``budgets``: the new amounts of hard ones, by kind, that it brings,
    ``weight``: the new one that it brings.
    Raises InvalidValue, TenantNotFound, and ApprovalNeeded for more than the tenant has today without such a run.
    """
    limit, more = clean_limit(requests_per_minute, param=RATE), dict(budgets or {})
    if order is not None:
        given = {param: value for param, value in ((RATE, limit), (WEIGHT, weight)) if value is not None}
        require_ordered(order, target=f"tenant:{name}", params={**given, **more})
    tenant, what = get_tenant(name), f"the tenant {name}"
    after: dict[str, object] = {}
    if limit is not None or order is None:
        require_no_raise(before=tenant_limit(tenant), after=limit, otherwise=default_limit(), what=what, order=order)
        after[RATE] = limit
    if more and order is not None:
        after["budgets"] = store_budgets(require_approved_budgets(tenant, more, what=what, order=order))
    if weight is not None and order is not None:
        require_no_higher_weight(tenant, weight, order=order)
        after[WEIGHT] = clean_weight(weight)
    before = {field: getattr(tenant, field) for field in after}
    for field, value in after.items():
        setattr(tenant, field, value)
    tenant.save(update_fields=[*after, "updated_at"])
    detail = {"from": before[RATE], "to": limit} if list(after) == [RATE] else {"from": before, "to": after}
    record_event(actor=actor, action="tenant.limit", target=name, detail=detail, op_id=order.op_id if order is not None else "")
    publish_hint("tenants", name)
    return tenant


@transaction.atomic
def change_tenant_budgets(*, name: str, budgets: Iterable[Budget], actor: str) -> Tenant:
    """Set what all keys of a tenant may use together, over all gateways; those that are left out are gone.

    Raises InvalidValue, TenantNotFound, and ApprovalNeeded when a hard one grows, becomes soft or goes.
    """
    after = clean_budgets(budgets)
    tenant = get_tenant(name)
    require_no_higher_budgets(read_budgets(tenant), after, what=f"the tenant {name}")
    before, tenant.budgets = tenant.budgets, store_budgets(after)
    tenant.save(update_fields=["budgets", "updated_at"])
    record_event(actor=actor, action="tenant.budgets", target=name, detail={"from": before, "to": tenant.budgets})
    publish_hint("tenants", name)
    return tenant


@transaction.atomic
def change_tenant_weight(*, name: str, weight: int, actor: str) -> Tenant:
    """Set which part of the slots a tenant gets while requests wait, in percent of what others get.

    Raises InvalidValue, TenantNotFound, and ApprovalNeeded for more than it has today.
    """
    weight, tenant = clean_weight(weight), get_tenant(name)
    require_no_higher_weight(tenant, weight)
    before, tenant.weight = tenant.weight, weight
    if weight != before:
        tenant.save(update_fields=["weight", "updated_at"])
        record_event(actor=actor, action="tenant.weight", target=name, detail={"from": before, "to": weight})
        publish_hint("tenants", name)
    return tenant


@transaction.atomic
def change_response_policy(*, name: str, stores_responses: bool, responses_kept_days: int, actor: str) -> Tenant:
    """Set whether answers of /v1/responses are kept for the tenant, prompts included, and for how many days.

    Applies to answers from then on: what is kept already stays until the day it was given (``forget_responses`` deletes it).
    Raises InvalidValue, TenantNotFound.
    """
    days = clean_days(responses_kept_days, param="responses_kept_days")
    tenant = get_tenant(name)
    after = {"stores_responses": stores_responses, "responses_kept_days": days}
    before = {"stores_responses": tenant.stores_responses, "responses_kept_days": tenant.responses_kept_days}
    if after == before:
        return tenant
    tenant.stores_responses, tenant.responses_kept_days = stores_responses, days
    tenant.save(update_fields=["stores_responses", "responses_kept_days", "updated_at"])
    record_event(actor=actor, action="tenant.response_policy", target=name, detail={"from": before, "to": after})
    publish_hint("tenants", name)
    return tenant


def find_tenant(name: str) -> Tenant | None:
    return Tenant.objects.filter(name=name).first()


def list_tenants() -> list[Tenant]:
    return list(Tenant.objects.order_by("name"))


def get_tenant(name: str) -> Tenant:
    """Return the tenant, locked until the caller's transaction ends. Raises TenantNotFound."""
    tenant = Tenant.objects.select_for_update().filter(name=name).first()
    if tenant is None:
        raise TenantNotFound(_("There is no tenant %(name)s. Create it first.") % {"name": name}, param="tenant")
    return tenant


@transaction.atomic
def _set_active(*, name: str, is_active: bool, actor: str) -> Tenant:
    tenant = get_tenant(name)
    changed = Tenant.objects.filter(pk=tenant.pk, is_active=not is_active).update(is_active=is_active, updated_at=clock.now())
    if changed:
        record_event(actor=actor, action="tenant.enable" if is_active else "tenant.disable", target=name)
        publish_hint("tenants", name)
    tenant.refresh_from_db()
    return tenant
