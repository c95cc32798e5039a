"""The governed operation of the gateway: giving a key, a tenant or a model more than it has."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from core.limits import limits
from gateway.models import ApiKey, Model, Tenant
from gateway.services.errors import ServiceError
from gateway.services.explanations import join_names
from gateway.services.keys import find_api_key, list_api_keys, raise_key_limit
from gateway.services.limits import CAPS, PRIORITY, RATE, WEIGHT, hard_budgets, key_limit, model_caps, tenant_limit
from gateway.services.limits import LIMIT_RAISE as NAME
from gateway.services.models import find_model, list_models, raise_model_caps
from gateway.services.tenants import change_tenant_limit, find_tenant, list_tenants
from gateway.values import BudgetKind, Priority
from governance.errors import InvalidProposal
from governance.registry import Asked, Brief, Description, Done, Impact, Line, NotNow, Request, RunOrder, Sent, Signer
from nodes.services.availability import Has, ServingNode, read_nodes_of

KEY, TENANT, MODEL = "key", "tenant", "model"
ACTOR = "system:governance"


class _Param(NamedTuple):
    """What may be raised. ``owners``: which kinds of targets have it; ``offer``: how a page writes what one has."""

    owners: str
    label: str
    help: str
    offer: str


_BUDGETS = {
    BudgetKind.ALL_REQUESTS_PER_MINUTE: ("Requests per minute over all gateways", "{:,} a minute over all gateways"),
    BudgetKind.TOKENS_PER_MINUTE: ("Tokens per minute", "{:,} tokens a minute"),
    BudgetKind.CONCURRENT_REQUESTS: ("Requests at a time", "{:,} at a time"),
    BudgetKind.TOKENS_PER_DAY: ("Tokens per day", "{:,} tokens a day"),
    BudgetKind.TOKENS_PER_MONTH: ("Tokens per month", "{:,} tokens a month"),
    BudgetKind.COST_PER_DAY: ("Cost per day, in millionths of the currency", "{:,} millionths a day"),
    BudgetKind.COST_PER_MONTH: ("Cost per month, in millionths of the currency", "{:,} millionths a month"),
}
_BUDGET_HELP = "Of keys and tenants that have a hard one."
_PARAMS = {
    RATE: _Param("keys and tenants", "Requests per minute", "Of keys and tenants.", "{} a minute"),
    PRIORITY: _Param("keys", "Priority", "Of keys.", "{}"),
    WEIGHT: _Param(
        "tenants",
        "Weight in the queue, in percent",
        "Of tenants: their part of the slots while requests wait; 100 is as much as others.",
        "{} % in the queue",
    ),
    "max_tokens": _Param(
        "models", "Most tokens to generate", "Of models: requests that ask for more are refused.", "{:,} tokens"
    ),
    "max_prompt_chars": _Param(
        "models", "Longest prompt in characters", "Of models: longer prompts are refused.", "{:,} characters"
    ),
    "max_queue": _Param(
        "models",
        "Longest queue in requests",
        "Of models: so many may wait for a node; what comes then is refused.",
        "{:,} waiting",
    ),
    **{
        kind.value: _Param("keys and tenants that have it", label, _BUDGET_HELP, offer)
        for kind, (label, offer) in _BUDGETS.items()
    },
}


@dataclass(frozen=True, slots=True)
class _Holder:
    """Who gets more. ``target``: as in the statement; ``label``: for people; ``today``: what applies, by param.

    ``note``: what people should know when they choose it.
    """

    target: str
    label: str
    today: Mapping[str, int | str]
    is_usable: bool = True
    note: str = ""

    @property
    def offer(self) -> str:
        has = ", ".join(_PARAMS[name].offer.format(value) for name, value in self.today.items())
        return f"{self.label} ({has}{self.note})"

    def is_raise(self, name: str, value: object) -> bool:
        today = self.today[name]
        if isinstance(today, int):
            return isinstance(value, int) and value > today
        return today != Priority.HIGH.value


class LimitRaise:
    """Rates and budgets of keys and tenants, weights of tenants, high priority of keys, caps of models.

    Lowering needs nobody's approval.
    """

    name = NAME
    title = gettext_noop("Raise a limit")
    is_remote = False

    def clean(self, targets: Sequence[str], params: Mapping[str, object]) -> Request:
        """Return the request: targets ``key:<id>``, ``tenant:<name>`` or ``model:<name>``, and params that fit all of them.

        Keys: requests_per_minute, priority "high". Tenants: requests_per_minute, weight. Both: the kinds of their hard budgets.
        Models: max_tokens, max_prompt_chars, max_queue. Raises InvalidProposal: also for what is no raise, which can be done at
        once.
        """
        cleaned = _clean_params(params)
        holders = []
        for target in dict.fromkeys(targets):
            holder = _find(target)
            if holder is None or not holder.is_usable:
                raise InvalidProposal(
                    _("There is no usable key, tenant or model %(target)r.") % {"target": target[:100]}, param="targets"
                )
            for name, value in cleaned.items():
                _require_fitting(holder, name)
                _require_raise(holder, name, value)
            holders.append(holder.target)
        if not holders:
            raise InvalidProposal(_("Name what is raised: key:<id>, tenant:<name> or model:<name>."), param="targets")
        return Request(tuple(holders), cleaned)

    def choices(self) -> dict[str, object]:
        """Return what the page that proposes offers: tenants, models and usable keys with what they have, and the params."""
        tenants = [_describe_tenant(tenant) for tenant in list_tenants()]
        models = [_describe_model(model) for model in list_models()]
        keys = [_describe_key(key) for key in list_api_keys() if key.revoked_at is None]
        return {
            "targets": [(holder.target, holder.offer) for holder in [*tenants, *models, *keys]],
            "targets_label": "Tenants, models and keys",
            "params": [_make_field(name) for name in _PARAMS],
        }

    def describe(self, targets: Sequence[str], params: Mapping[str, object]) -> Description:
        lines, labels = [], []
        for target in targets:
            holder = _find(target)
            label = holder.label if holder is not None else f"{target}, which does not exist any more"
            labels.append(label)
            today = holder.today if holder is not None else {}
            lines += [
                Line(f"{_PARAMS[name].label} of {label}", str(params[name]), str(today.get(name, "")))
                for name in _PARAMS
                if name in params
            ]
        return Description(f"Raise the limits of {join_names(labels)}", lines)

    def sum_up(self, asked: Sequence[Asked]) -> Sequence[Brief]:
        """Return the title of each, with one query for the names of all keys."""
        wanted = {target.removeprefix(f"{KEY}:") for targets, _params in asked for target in targets}
        keys = ApiKey.objects.filter(pk__in=[each for each in map(_read_id, wanted) if each]).select_related("tenant")
        labels = {f"{KEY}:{key.pk}": _label_key(key) for key in keys}
        return [
            Brief(f"Raise the limits of {join_names([labels.get(target, target.replace(':', ' ', 1)) for target in targets])}")
            for targets, _params in asked
        ]

    def preview(self, targets: Sequence[str], params: Mapping[str, object]) -> Sequence[Impact]:
        """Return who else is concerned: the keys that follow a tenant, the nodes that are shared, who waits."""
        impacts = [*_preview_tenants(_names(targets, TENANT)), *_preview_models(_names(targets, MODEL), params)]
        if WEIGHT in params:
            impacts.append(Impact("caution", "While requests wait, every other tenant gets less of the slots."))
        if PRIORITY in params:
            impacts.append(Impact("caution", "On a busy node, requests of high priority go before all others."))
        return impacts or (Impact("ok", "Nobody else's limit changes."),)

    def find_signer(self, target: str) -> Signer | None:
        del target
        return None

    def carry_out(self, order: RunOrder) -> Sent | Done | NotNow:
        """Raise it. Raises InvalidProposal when that cannot be done any more, or would be no raise any more."""
        kind, _, name = order.target.partition(":")
        params = order.params
        try:
            if kind == KEY:
                chosen = params.get(PRIORITY)
                raise_key_limit(
                    key_id=uuid.UUID(name),
                    requests_per_minute=_read_number(params, RATE),
                    priority=chosen if isinstance(chosen, str) else None,
                    actor=ACTOR,
                    order=order,
                    budgets=_read_budgets(params),
                )
            elif kind == MODEL:
                caps = {cap: _read_number(params, cap) for cap in CAPS}
                raise_model_caps(name=name, actor=ACTOR, order=order, **caps)
            else:
                change_tenant_limit(
                    name=name,
                    requests_per_minute=_read_number(params, RATE),
                    actor=ACTOR,
                    order=order,
                    budgets=_read_budgets(params),
                    weight=_read_number(params, WEIGHT),
                )
        except ServiceError as error:
            raise InvalidProposal(error.message, param=error.param) from None
        return Done("The new limits apply within seconds, to requests that arrive from then on.")


def _clean_params(params: Mapping[str, object]) -> dict[str, object]:
    if not params or set(params) - set(_PARAMS):
        numbers = ", ".join(name for name in _PARAMS if name != PRIORITY)
        raise InvalidProposal(
            _("Give whole numbers for %(numbers)s, or %(priority)s: high, and nothing else.")
            % {"numbers": numbers, "priority": PRIORITY},
            param="params",
        )
    for name, value in params.items():
        if name == PRIORITY:
            if value != Priority.HIGH.value:
                raise InvalidProposal(_("Only high priority is asked for; normal and low can be set at once."), param=PRIORITY)
        elif not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _most(name):
            raise InvalidProposal(
                _("%(name)s must be a whole number from 1 to %(most)s.") % {"name": name, "most": _most(name)}, param=name
            )
    return dict(params)


def _most(name: str) -> int:
    if name == WEIGHT:
        return limits().gateway.tenant_weight
    return limits().gateway.budget_amount if name in _BUDGETS else limits().gateway.record_integer


def _read_budgets(params: Mapping[str, object]) -> dict[str, int]:
    return {name: value for name, value in params.items() if name in _BUDGETS and isinstance(value, int)}


def _require_fitting(holder: _Holder, name: str) -> None:
    if name not in holder.today:
        raise InvalidProposal(
            _("%(name)s belongs to %(owners)s; the %(label)s takes %(today)s. Leave it out, or choose other targets.")
            % {"name": name, "owners": _PARAMS[name].owners, "label": holder.label, "today": ", ".join(holder.today)},
            param=name,
        )


def _require_raise(holder: _Holder, name: str, value: object) -> None:
    if not holder.is_raise(name, value):
        raise InvalidProposal(
            _(
                "%(name)s of the %(label)s is %(today)s today, so that %(value)s is no raise. Ask for more or leave it "
                "out; lowering needs no approval."
            )
            % {"name": name, "label": holder.label, "today": holder.today[name], "value": value},
            param=name,
        )


def _find(target: str) -> _Holder | None:
    kind, _, name = target.partition(":")
    if kind == TENANT:
        tenant = find_tenant(name)
        return None if tenant is None else _describe_tenant(tenant)
    if kind == MODEL:
        model = find_model(name)
        return None if model is None else _describe_model(model)
    ident = _read_id(name) if kind == KEY else None
    key = None if ident is None else find_api_key(ident)
    return None if key is None else _describe_key(key)


def _read_id(text: str) -> uuid.UUID | None:
    try:
        return uuid.UUID(text)
    except ValueError:
        return None


def _describe_tenant(tenant: Tenant) -> _Holder:
    today: dict[str, int | str] = {RATE: tenant_limit(tenant), WEIGHT: tenant.weight, **hard_budgets(tenant)}
    return _Holder(f"{TENANT}:{tenant.name}", f"tenant {tenant.name}", today)


def _describe_model(model: Model) -> _Holder:
    note = "" if model.allowed else "; not allowed yet"
    return _Holder(f"{MODEL}:{model.name}", f"model {model.name}", model_caps(model), note=note)


def _label_key(key: ApiKey) -> str:
    return f"key {key.name} of {key.tenant.name}"


def _describe_key(key: ApiKey) -> _Holder:
    today: dict[str, int | str] = {RATE: key_limit(key), PRIORITY: key.priority, **hard_budgets(key)}
    return _Holder(f"{KEY}:{key.pk}", _label_key(key), today, is_usable=key.revoked_at is None)


def _make_field(name: str) -> dict[str, object]:
    common = {"name": name, "label": _PARAMS[name].label, "help": _PARAMS[name].help, "required": False}
    if name == PRIORITY:
        return {**common, "kind": "select", "choices": [("", "as it is"), (Priority.HIGH.value, "high")]}
    return {**common, "kind": "number", "min": 1, "max": _most(name)}


def _preview_tenants(names: Sequence[str]) -> list[Impact]:
    keys = [key for key in list_api_keys() if key.requests_per_minute is None and key.revoked_at is None] if names else []
    following = {name: sum(key.tenant.name == name for key in keys) for name in names}
    return [
        Impact("caution", f"{count} keys of {name} have no limit of their own and get the new one.")
        for name, count in following.items()
    ]


def _preview_models(names: Sequence[str], params: Mapping[str, object]) -> list[Impact]:
    impacts = []
    if names and params.keys() & {"max_tokens", "max_prompt_chars"}:
        impacts += [
            Impact("caution", f"Longer requests for {name} hold a slot longer, whoever sends them. {_say_serving(name, nodes)}")
            for name, nodes in read_nodes_of(names).items()
        ]
    if names and "max_queue" in params:
        text = f"More requests for {join_names(names)} may wait, each of them for longer, where they are refused today."
        impacts.append(Impact("caution", text))
    return impacts


def _say_serving(name: str, nodes: Sequence[ServingNode]) -> str:
    serving = [node for node in nodes if node.has is Has.LOADED and node.unavailable is None]
    if not serving:
        return f"No node serves {name} now."
    slots = sum(node.slots for node in serving)
    count = "1 node serves" if len(serving) == 1 else f"{len(serving)} nodes serve"
    return f"{count} {name} now, with {slots} {'slot' if slots == 1 else 'slots'} in all."


def _names(targets: Sequence[str], kind: str) -> list[str]:
    return [target.partition(":")[2] for target in targets if target.startswith(f"{kind}:")]


def _read_number(params: Mapping[str, object], name: str) -> int | None:
    value = params.get(name)
    return value if isinstance(value, int) else None


LIMIT_RAISE = LimitRaise()
