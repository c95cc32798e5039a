"""Budgets as they stand: what of each is used and reserved, and when it begins anew. Reads only.

Of hard ones the dealer knows it (Valkey, or PostgreSQL while an open term deals), as exactly as gateways count. What no dealer
knows, such as soft ones, is told from the sums of days.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

import redis
from django.conf import settings
from django.db.models import Sum

from core.limits import limits
from core.valkey import open_client
from gateway.models import ApiKey, RequestRecord, Tenant
from gateway.services.limits import read_budgets
from gateway.services.rollups import sum_days
from gateway.services.shares import DealerTable, State
from gateway.values import Budget, Counter, Dimension, find_window
from wire import clock
from wire.contract import OPEN_REQUEST_STATES


class BudgetLevel(StrEnum):
    """How far a budget is used, what is reserved included."""

    FINE = "fine"
    NEAR = "near"
    USED_UP = "used_up"


@dataclass(frozen=True, slots=True)
class BudgetState:
    """One budget of a tenant, or of a key of it (``key_id``). Amounts are tokens, or millionths of the currency.

    ``is_exact``: whether it is what gateways count; else it is about that.
    """

    tenant: str
    key_id: uuid.UUID | None
    key_name: str
    budget: Budget
    used: int
    reserved: int
    renews_at: datetime
    is_exact: bool

    @property
    def percent(self) -> float:
        taken = 100 * (self.used + self.reserved)
        return taken / self.budget.amount if self.budget.amount else 100.0

    @property
    def level(self) -> BudgetLevel:
        if self.percent >= 100:
            return BudgetLevel.USED_UP
        return BudgetLevel.NEAR if self.percent >= limits().gateway.page_budget_percent else BudgetLevel.FINE


def read_budget_states(*, tenant: str = "") -> tuple[BudgetState, ...]:
    """Return the budgets of days and months of every tenant and key (of one tenant), those that are used most first."""
    now, most = clock.now(), limits().gateway.page_choices
    tenants = Tenant.objects.exclude(budgets=[])
    keys = ApiKey.objects.exclude(budgets=[]).filter(revoked_at=None).select_related("tenant")
    if tenant:
        tenants, keys = tenants.filter(name=tenant), keys.filter(tenant__name=tenant)
    holders: list[Tenant | ApiKey] = [*tenants[:most], *keys[:most]]
    wanted = [
        (holder, budget, Counter(_name_owner(holder), budget.kind, find_window(budget.kind, now)))
        for holder in holders
        for budget in read_budgets(holder)
        if budget.kind.is_budget
    ]
    if not wanted:
        return ()
    dealt, reserved = _read_dealt([counter for _, budget, counter in wanted if budget.is_hard]), _sum_reserved()
    counted = _sum_finished({counter for *_, counter in wanted if counter.key not in dealt})
    found = []
    for holder, budget, counter in wanted:
        taken, held = dealt.get(counter.key), reserved.get((counter.owner, budget.kind.is_cost), 0)
        used = counted.get(counter, 0) if taken is None else max(0, taken - held)
        assert counter.window.ends_at is not None  # it is of a day or a month
        key = holder if isinstance(holder, ApiKey) else None
        found.append(
            BudgetState(
                tenant=key.tenant.name if key is not None else holder.name,
                key_id=key.pk if key is not None else None,
                key_name=key.name if key is not None else "",
                budget=budget,
                used=used,
                reserved=held,
                renews_at=counter.window.ends_at,
                is_exact=taken is not None,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.percent))


def _name_owner(holder: Tenant | ApiKey) -> str:
    return f"tenant:{holder.name}" if isinstance(holder, Tenant) else f"key:{holder.pk}"


def _read_dealt(counters: Collection[Counter]) -> dict[str, int]:
    """Return what is used of counters, what is reserved included, by their keys; without those that no dealer knows."""
    names = [counter.key for counter in counters]
    if not names:
        return {}
    states = DealerTable().read_counters(names)
    if states is None:
        states = _read_valkey(names)
    return {name: _add_up(state) for name, state in states.items() if "base" in state}


def _add_up(state: State) -> int:
    return int(state["base"]) + sum(int(value) for name, value in state.items() if name.startswith("u:"))


def _read_valkey(names: list[str]) -> dict[str, State]:
    wait_s = limits().gateway.budget_valkey_s
    try:
        with open_client(settings.REDIS_URL, socket_timeout=wait_s, socket_connect_timeout=wait_s) as client:
            pipeline = client.pipeline(transaction=False)
            for name in names:
                pipeline.hgetall(name)
            answers = pipeline.execute()
    except redis.RedisError:
        return {}
    return {
        name: {field.decode(): value.decode() for field, value in answer.items()}
        for name, answer in zip(names, answers, strict=True)
    }


def _sum_reserved() -> dict[tuple[str, bool], int]:
    """Return what open requests have reserved, by owner and whether it is cost."""
    rows = RequestRecord.objects.filter(state__in=[state.value for state in OPEN_REQUEST_STATES]).order_by()
    found: dict[tuple[str, bool], int] = {}
    sums = rows.values_list("tenant", "key_id").annotate(Sum("reserved_tokens"), Sum("reserved_micros"))
    for tenant, key_id, tokens, micros in sums:
        for owner in (f"tenant:{tenant}", f"key:{key_id}"):
            for is_cost, amount in ((False, tokens), (True, micros)):
                found[owner, is_cost] = found.get((owner, is_cost), 0) + int(amount or 0)
    return found


def _sum_finished(counters: Iterable[Counter]) -> dict[Counter, int]:
    """Return what requests used that ended in the days of each counter."""
    found: dict[Counter, int] = {}
    groups: dict[tuple[Dimension, datetime], list[Counter]] = {}
    for counter in counters:
        dimension = Dimension.KEY if counter.owner.startswith("key:") else Dimension.TENANT
        assert counter.window.starts_at is not None  # it is of a day or a month
        groups.setdefault((dimension, counter.window.starts_at), []).append(counter)
    for (dimension, starts_at), group in groups.items():
        sums = sum_days(dimension, since=starts_at, names={counter.owner.partition(":")[2] for counter in group})
        for counter in group:
            one = sums.get(counter.owner.partition(":")[2])
            if one is not None:
                is_cost = counter.kind.is_cost
                found[counter] = one.cost_micros if is_cost else one.prompt_tokens + one.completion_tokens
    return found
