"""What a caller may use today, and the rule that more of it needs approval. Less of it never does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from http import HTTPStatus

import msgspec
from django.utils.translation import gettext as _

from core.limits import limits
from gateway.models import ApiKey, Model, Tenant
from gateway.services.errors import InvalidValue, ServiceError
from gateway.values import Budget, BudgetKind, Priority
from governance.errors import NeedsApproval
from governance.operations.approvals import require_approval
from governance.registry import RunOrder
from wire.contract import ErrorCode

LIMIT_RAISE = "limit-raise"
"""As in ``settings.OPERATIONS`` and in the policy."""

RATE, PRIORITY, WEIGHT = "requests_per_minute", "priority", "weight"
CAPS = ("max_tokens", "max_prompt_chars", "max_queue")
"""The caps of a model: columns of its row, and params of the operation."""
_UNITS = {
    RATE: "requests per minute",
    WEIGHT: "% in the queue",
    "max_tokens": "tokens to generate",
    "max_prompt_chars": "characters of prompt",
    "max_queue": "waiting requests",
    BudgetKind.ALL_REQUESTS_PER_MINUTE: "requests per minute over all gateways",
    BudgetKind.TOKENS_PER_MINUTE: "tokens per minute",
    BudgetKind.CONCURRENT_REQUESTS: "requests at a time",
    BudgetKind.TOKENS_PER_DAY: "tokens per day",
    BudgetKind.TOKENS_PER_MONTH: "tokens per month",
    BudgetKind.COST_PER_DAY: "millionths of the currency per day",
    BudgetKind.COST_PER_MONTH: "millionths of the currency per month",
}


class ApprovalNeeded(ServiceError, code=ErrorCode.APPROVAL_REFUSED, status=HTTPStatus.FORBIDDEN):
    """The change gives somebody more than they have: it is proposed, approved and then carried out."""

    type = "permission_error"


def default_limit() -> int:
    return limits().gateway.requests_per_minute


def tenant_limit(tenant: Tenant) -> int:
    return tenant.requests_per_minute if tenant.requests_per_minute is not None else default_limit()


def key_limit(key: ApiKey) -> int:
    """Return the requests per minute that apply to a key. The key's tenant must be loaded."""
    return key.requests_per_minute if key.requests_per_minute is not None else tenant_limit(key.tenant)


def default_caps() -> dict[str, int]:
    bounds = limits().gateway
    return dict(zip(CAPS, (bounds.max_tokens_cap, bounds.max_prompt_chars, bounds.max_queue), strict=True))


def model_caps(model: Model) -> dict[str, int]:
    """Return the caps that apply to a model, whether clients may use it or not."""
    own = {name: getattr(model, name) for name in CAPS}
    return {name: own[name] if own[name] is not None else default for name, default in default_caps().items()}


def require_no_raise(*, before: int, after: int | None, otherwise: int, what: str, order: RunOrder | None = None) -> None:
    """Let a rate pass that is no higher than the one of today, or that an approved run brings.

    ``after`` None = ``otherwise`` applies. Raises ApprovalNeeded, and InvalidValue for a run that brings no more than today.
    """
    wanted = after if after is not None else otherwise
    if order is not None:
        _require_rise({RATE: wanted}, {RATE: before}, what=what)
    if wanted > before:
        _require(_say_more(RATE, wanted, before, what=what), RATE, order)


def require_no_higher_weight(tenant: Tenant, after: int, *, order: RunOrder | None = None) -> None:
    """Let a weight pass that is no higher than the one of today, or that an approved run brings.

    Raises ApprovalNeeded, and InvalidValue for a run that brings no more than today.
    """
    what = f"the tenant {tenant.name}"
    if order is not None:
        _require_rise({WEIGHT: after}, {WEIGHT: tenant.weight}, what=what)
    if after > tenant.weight:
        _require(_say_more(WEIGHT, after, tenant.weight, what=what), WEIGHT, order)


def require_no_promotion(*, before: str, after: Priority, order: RunOrder | None = None) -> None:
    """Let a priority pass that does not become high, or that an approved run brings. Raises ApprovalNeeded."""
    if after is Priority.HIGH and before != Priority.HIGH.value:
        _require("High priority goes before everybody else on a node.", PRIORITY, order)


def require_no_higher_caps(model: Model, after: Mapping[str, int | None], *, what: str, advice: str = "") -> None:
    """Let caps pass of which none is higher than the one of today. None = the default. Raises ApprovalNeeded.

    ``advice``: a sentence on what can be done at once.
    """
    today, default = model_caps(model), default_caps()
    wanted = {name: value if value is not None else default[name] for name, value in after.items()}
    more = [name for name in wanted if wanted[name] > today[name]]
    if more:
        why = [_say_more(name, wanted[name], today[name], what=what) for name in more]
        _require(" ".join([*why, advice] if advice else why), more[0], None)


def require_approved_caps(model: Model, caps: Mapping[str, int], *, order: RunOrder) -> None:
    """Let caps pass that an approved run brings: to this model, these and no others, each more than the model has today.

    Raises ApprovalNeeded, and InvalidValue when one is no more than today.
    """
    require_ordered(order, target=f"model:{model.name}", params=caps)
    _require(f"More for the model {model.name}.", next(iter(caps), ""), order)
    _require_rise(caps, model_caps(model), what=f"the model {model.name}")


def read_budgets(holder: ApiKey | Tenant) -> tuple[Budget, ...]:
    return msgspec.convert(holder.budgets, tuple[Budget, ...])


def hard_budgets(holder: ApiKey | Tenant) -> dict[str, int]:
    """Return the amounts that a key or a tenant cannot pass, by kind."""
    return {budget.kind.value: budget.amount for budget in read_budgets(holder) if budget.is_hard}


def require_no_higher_budgets(before: Iterable[Budget], after: Iterable[Budget], *, what: str) -> None:
    """Let budgets pass under which no hard one grows, becomes soft or goes. Raises ApprovalNeeded."""
    left = {budget.kind: budget.amount for budget in after if budget.is_hard}
    for budget in before:
        if not budget.is_hard or left.get(budget.kind, budget.amount + 1) <= budget.amount:
            continue
        if budget.kind in left:
            why = _say_more(budget.kind, left[budget.kind], budget.amount, what=what)
        else:
            why = f"Without its hard {budget.kind} of {budget.amount} {what} has more than today; propose a higher one instead."
        _require(why, budget.kind, None)


def require_approved_budgets(holder: ApiKey | Tenant, wanted: Mapping[str, int], *, what: str, order: RunOrder) -> list[Budget]:
    """Return the budgets with those that an approved run brings; each more than today.

    Raises ApprovalNeeded, and InvalidValue when one is no more than today.
    """
    _require(f"More for {what}.", next(iter(wanted), ""), order)
    today = hard_budgets(holder)
    gone = next((kind for kind in wanted if kind not in today), None)
    if gone is not None:
        raise InvalidValue(
            _("%(whom)s has no hard %(gone)s any more. Nothing was changed.")
            % {"whom": f"{what[0].upper()}{what[1:]}", "gone": gone},
            param=gone,
        )
    _require_rise(wanted, today, what=what)
    return [
        msgspec.structs.replace(budget, amount=wanted.get(budget.kind, budget.amount)) if budget.is_hard else budget
        for budget in read_budgets(holder)
    ]


def clean_budgets(budgets: Iterable[Budget], *, param: str = "budgets") -> list[Budget]:
    """Return budgets, each kind once, in the order of the kinds. Raises InvalidValue."""
    by_kind: dict[BudgetKind, Budget] = {}
    most = limits().gateway.budget_amount
    for budget in budgets:
        if budget.kind in by_kind:
            raise InvalidValue(_("%(kind)s stands there twice; give it once.") % {"kind": budget.kind}, param=param)
        if not 0 <= budget.amount <= most:
            raise InvalidValue(
                _("%(kind)s must be between 0 and %(most)s; 0 refuses every request.") % {"kind": budget.kind, "most": most},
                param=param,
            )
        if not budget.is_hard and not budget.kind.is_budget:
            raise InvalidValue(
                _("%(kind)s is a limit, and limits are hard. Only budgets of a day or a month can be soft.")
                % {"kind": budget.kind},
                param=param,
            )
        by_kind[budget.kind] = budget
    return [by_kind[kind] for kind in BudgetKind if kind in by_kind]


def store_budgets(budgets: Iterable[Budget]) -> list[dict[str, object]]:
    return [{"kind": budget.kind.value, "amount": budget.amount, "is_hard": budget.is_hard} for budget in budgets]


def require_ordered(order: RunOrder, *, target: str, params: Mapping[str, object]) -> None:
    """Let nothing pass but what an approved run is for: this target, these values and no others. Raises ApprovalNeeded."""
    if order.target != target or dict(order.params) != dict(params):
        raise ApprovalNeeded(
            _("What was approved for %(target)s is not this; propose %(limit_raise)s for %(wanted)s.")
            % {"target": order.target, "limit_raise": LIMIT_RAISE, "wanted": target},
            param="name",
        )


def _require_rise(wanted: Mapping[str, int], today: Mapping[str, int], *, what: str) -> None:
    reached = next((name for name in wanted if wanted[name] <= today[name]), None)
    if reached is not None:
        raise InvalidValue(
            _(
                "%(whom)s has %(today)s %(units)s by now, and approved were %(wanted)s: no raise any more. "
                "Nothing was changed; lowering needs no approval."
            )
            % {
                "whom": f"{what[0].upper()}{what[1:]}",
                "today": today[reached],
                "units": _UNITS[reached],
                "wanted": wanted[reached],
            },
            param=reached,
        )


def _say_more(name: str, wanted: int, today: int, *, what: str) -> str:
    return f"{wanted} {_UNITS[name]} is more than {what} has today, which is {today}."


def _require(why: str, param: str, order: RunOrder | None) -> None:
    try:
        require_approval(LIMIT_RAISE, order=order)
    except NeedsApproval as refusal:
        raise ApprovalNeeded(f"{why} {refusal.message}", param=param) from None


def clean_name(name: str, *, what: str, param: str = "name", max_chars: int | None = None) -> str:
    """Return ``name`` trimmed. Raises InvalidValue when it is empty, too long or holds control characters."""
    cleaned = name.strip()
    max_chars = limits().gateway.name_chars if max_chars is None else max_chars
    if not cleaned or len(cleaned) > max_chars or not cleaned.isprintable():
        raise InvalidValue(
            _("Give the %(what)s a name of 1 to %(most)s printable characters.") % {"what": what, "most": max_chars},
            param=param,
        )
    return cleaned


def clean_model_name(name: str, *, param: str = "name") -> str:
    return clean_name(name, what="model", param=param, max_chars=limits().gateway.model_name_chars)


def clean_priority(value: str, *, param: str = "priority") -> Priority:
    try:
        return Priority(value)
    except ValueError:
        raise InvalidValue(
            _("%(param)s must be one of %(priority)s.") % {"param": param, "priority": ", ".join(Priority)}, param=param
        ) from None


def clean_limit(value: int | None, *, param: str) -> int | None:
    """Return a limit of at least 1, or None for "not set here". Raises InvalidValue."""
    most = limits().gateway.record_integer
    if value is not None and not 1 <= value <= most:
        raise InvalidValue(
            _("%(param)s must be between 1 and %(most)s, or empty for the default.") % {"param": param, "most": most},
            param=param,
        )
    return value


def clean_weight(value: int) -> int:
    """Return the weight of a tenant, in percent. Raises InvalidValue."""
    most = limits().gateway.tenant_weight
    if not 1 <= value <= most:
        raise InvalidValue(
            _("%(weight)s must be between 1 and %(most)s; 100 is as much as other tenants have.")
            % {"weight": WEIGHT, "most": most},
            param=WEIGHT,
        )
    return value


def clean_days(value: int, *, param: str) -> int:
    if not 1 <= value <= limits().gateway.kept_days:
        raise InvalidValue(
            _("%(param)s must be between 1 and %(kept_days)s.") % {"param": param, "kept_days": limits().gateway.kept_days},
            param=param,
        )
    return value
