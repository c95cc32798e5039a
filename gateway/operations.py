"""The governed operation of the gateway: giving a key or a tenant more than it has."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.models import ApiKey
from gateway.services import (
    ServiceError,
    change_tenant_limit,
    find_api_key,
    find_tenant,
    key_limit,
    list_api_keys,
    list_tenants,
    raise_key_limit,
    tenant_limit,
)
from gateway.services.limits import LIMIT_RAISE as NAME
from gateway.services.values import MAX_LIMIT
from gateway.values import Priority
from governance.errors import InvalidProposal
from governance.registry import Description, Done, Impact, Line, NotNow, Request, RunOrder, Sent, Signer

KEY, TENANT = "key", "tenant"
ACTOR = "system:governance"
RATE, PRIORITY = "requests_per_minute", "priority"
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who gets more. ``target``: as in the statement; ``label``: for people; ``rate``, ``priority``: what applies today."""

    target: str
    label: str
    rate: int
    priority: str
    is_usable: bool


class LimitRaise:
    """More requests per minute for keys or tenants, or high priority for keys. Lowering needs nobody's approval."""

    name = NAME
    title = "Raise a limit"
    is_remote = False

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request: targets ``key:<id>`` or ``tenant:<name>``; params requests_per_minute, or priority "high".

        Raises InvalidProposal: also for what is no raise, which can be done at once.
        """
        cleaned = _clean_params(params)
        holders = []
        for target in dict.fromkeys(targets):
            holder = _find(target)
            if holder is None or not holder.is_usable:
                raise InvalidProposal(f"There is no usable key or tenant {target[:100]!r}.", param="targets")
            if PRIORITY in cleaned and not holder.target.startswith(f"{KEY}:"):
                raise InvalidProposal("Priority belongs to keys; a tenant has none.", param=PRIORITY)
            rate = cleaned.get(RATE)
            is_raise = isinstance(rate, int) and rate > holder.rate
            if not is_raise and not (PRIORITY in cleaned and holder.priority != Priority.HIGH.value):
                raise InvalidProposal(f"{holder.label} has that already, or more; lowering needs no approval.", param="params")
            holders.append(holder.target)
        if not holders:
            raise InvalidProposal("Name what is raised: key:<id> or tenant:<name>.", param="targets")
        return Request(tuple(holders), cleaned)

    def choices(self) -> dict[str, object]:
        """Return what the page that proposes offers: tenants and usable keys with what they have, and the two params."""
        tenants = [
            _Holder(f"{TENANT}:{t.name}", f"tenant {t.name}", tenant_limit(t), "", is_usable=True) for t in list_tenants()
        ]
        keys = [_describe_key(key) for key in list_api_keys() if key.revoked_at is None]
        targets = [
            (h.target, f"{h.label} ({h.rate} a minute{f', {h.priority}' if h.priority else ''})") for h in [*tenants, *keys]
        ]
        rate = {"name": RATE, "label": "Requests per minute", "kind": "number", "required": False}
        priority = {"name": PRIORITY, "label": "Priority", "kind": "select", "required": False}
        return {
            "targets": targets,
            "targets_label": "Keys and tenants",
            "params": [rate, {**priority, "choices": [("", "as it is"), ("high", "high")]}],
        }

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        """Return what each target would have, beside what it has."""
        lines, labels = [], []
        for target in targets:
            holder = _find(target)
            label = holder.label if holder is not None else f"{target}, which does not exist any more"
            labels.append(label)
            if RATE in params:
                now = str(holder.rate) if holder is not None else ""
                lines.append(Line(f"Requests per minute of {label}", str(params[RATE]), now))
            if PRIORITY in params:
                lines.append(Line(f"Priority of {label}", str(params[PRIORITY]), holder.priority if holder is not None else ""))
        beyond = f" and {len(labels) - _MAX_NAMED} more" if len(labels) > _MAX_NAMED else ""
        return Description(f"Raise the limits of {', '.join(labels[:_MAX_NAMED])}{beyond}", lines)

    def preview(self, targets: Sequence[str], params: Mapping[str, object]) -> Sequence[Impact]:
        """Return who else is concerned: the keys that follow a tenant, the boxes that are shared."""
        impacts = []
        keys = list_api_keys() if any(target.startswith(f"{TENANT}:") for target in targets) else []
        for target in targets:
            kind, _, name = target.partition(":")
            if kind == TENANT:
                following = sum(
                    key.tenant.name == name and key.requests_per_minute is None and key.revoked_at is None for key in keys
                )
                impacts.append(Impact("caution", f"{following} keys of {name} have no limit of their own and get the new one."))
        if PRIORITY in params:
            impacts.append(Impact("caution", "On a busy box, requests of high priority go before all others."))
        return impacts or (Impact("ok", "Nobody else's limit changes."),)

    def find_signer(self, target: str) -> Signer | None:
        """Return None: no box takes part."""
        del target
        return None

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Raise it. Raises InvalidProposal when the key or tenant cannot be changed any more."""
        rate, priority = order.params.get(RATE), order.params.get(PRIORITY)
        kind, _, name = order.target.partition(":")
        limit = rate if isinstance(rate, int) else None
        try:
            if kind == KEY:
                wanted = priority if isinstance(priority, str) else None
                raise_key_limit(key_id=uuid.UUID(name), requests_per_minute=limit, priority=wanted, actor=ACTOR, order=order)
            else:
                change_tenant_limit(name=name, requests_per_minute=limit, actor=ACTOR, order=order)
        except ServiceError as error:
            raise InvalidProposal(error.message, param=error.param) from None
        return Done("The new limits apply within seconds, to requests that arrive from then on.")


def _clean_params(params: Mapping[str, object]) -> dict[str, object]:
    if not params or set(params) - {RATE, PRIORITY}:
        raise InvalidProposal(f"Give {RATE} (a whole number), or {PRIORITY}: high.", param="params")
    rate, priority = params.get(RATE), params.get(PRIORITY)
    if RATE in params and (not isinstance(rate, int) or isinstance(rate, bool) or not 1 <= rate <= MAX_LIMIT):
        raise InvalidProposal(f"{RATE} must be a whole number from 1 to {MAX_LIMIT}.", param=RATE)
    if PRIORITY in params and priority != Priority.HIGH.value:
        raise InvalidProposal("Only high priority is asked for; normal and low can be set at once.", param=PRIORITY)
    return dict(params)


def _find(target: str) -> _Holder | None:
    """Return whom a target names; None for nobody."""
    kind, _, name = target.partition(":")
    if kind == TENANT:
        tenant = find_tenant(name)
        return None if tenant is None else _Holder(target, f"tenant {tenant.name}", tenant_limit(tenant), "", is_usable=True)
    try:
        key = find_api_key(uuid.UUID(name)) if kind == KEY else None
    except ValueError:
        return None
    return None if key is None else _describe_key(key)


def _describe_key(key: ApiKey) -> _Holder:
    label = f"key {key.name} of {key.tenant.name}"
    return _Holder(f"{KEY}:{key.pk}", label, key_limit(key), key.priority, is_usable=key.revoked_at is None)


LIMIT_RAISE = LimitRaise()
