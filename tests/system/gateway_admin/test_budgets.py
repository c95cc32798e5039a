"""Limits and budgets that all gateways count together: who may set which, and how a page says them."""

from __future__ import annotations

from decimal import Decimal

import pytest

from core.limits import limits
from gateway.admin.callers import BudgetsForm
from gateway.models import ApiKey
from gateway.request.models import Catalogue
from gateway.services.errors import InvalidValue
from gateway.services.keys import change_key_budgets, create_api_key
from gateway.services.limits import ApprovalNeeded, read_budgets
from gateway.services.models import allow_model, change_model_prices
from gateway.services.tenants import change_tenant_budgets, create_tenant
from gateway.values import Budget, BudgetKind, Price
from governance.operations import proposals
from governance.operations.runs import run_due
from tests.fakes.governed_team import Team, make_governed

pytestmark = pytest.mark.django_db(transaction=True)
ACTOR = "user:root"
DAY, MINUTE = BudgetKind.TOKENS_PER_DAY, BudgetKind.TOKENS_PER_MINUTE


@pytest.fixture
def key() -> ApiKey:
    create_tenant(name="research", actor=ACTOR)
    key, _text = create_api_key(name="demo", tenant_name="research", actor=ACTOR)
    return change_key_budgets(key_id=key.pk, budgets=[Budget(DAY, 1000), Budget(MINUTE, 50)], actor=ACTOR)


def test_the_gateway_reads_the_hard_ones_of_key_and_tenant_and_the_prices(key: ApiKey) -> None:
    change_tenant_budgets(
        name="research", budgets=[Budget(BudgetKind.COST_PER_MONTH, 5_000_000, is_hard=False), Budget(DAY, 7)], actor=ACTOR
    )
    allow_model(name="m", actor=ACTOR)
    change_model_prices(name="m", input_price=Decimal("0.5"), cached_price=Decimal(0), output_price=Decimal("1.5"), actor=ACTOR)
    catalogue = Catalogue(limits().gateway)

    ((_keyid, entry),) = catalogue.load_keys(None)
    drawn = [(one.owner.partition(":")[0], one.budget.kind, one.budget.amount) for one in entry.caller.budgets]

    assert drawn == [("key", MINUTE, 50), ("key", DAY, 1000), ("tenant", DAY, 7)]
    assert catalogue.load_models()[0].price == Price(500_000, 0, 1_500_000)


@pytest.mark.parametrize(
    "budgets",
    [
        [Budget(DAY, 1), Budget(DAY, 2)],
        [Budget(MINUTE, 1, is_hard=False)],
        [Budget(DAY, -1)],
        [Budget(DAY, 2**53)],
    ],
)
def test_a_budget_that_cannot_be_is_refused_in_words(key: ApiKey, budgets: list[Budget]) -> None:
    with pytest.raises(InvalidValue):
        change_key_budgets(key_id=key.pk, budgets=budgets, actor=ACTOR)


@pytest.mark.parametrize(
    "budgets",
    [
        [Budget(DAY, 1001), Budget(MINUTE, 50)],
        [Budget(DAY, 1000, is_hard=False), Budget(MINUTE, 50)],
        [Budget(DAY, 1000)],
        [],
    ],
)
def test_more_than_today_needs_approval(key: ApiKey, budgets: list[Budget]) -> None:
    make_governed()
    with pytest.raises(ApprovalNeeded):
        change_key_budgets(key_id=key.pk, budgets=budgets, actor=ACTOR)
    less = [Budget(MINUTE, 50), Budget(BudgetKind.CONCURRENT_REQUESTS, 2), Budget(DAY, 999)]
    assert read_budgets(change_key_budgets(key_id=key.pk, budgets=less, actor=ACTOR)) == tuple(less)


def _raise(team: Team, target: str, **params: object) -> str:
    operation = proposals.propose(
        operation="limit-raise", targets=[target], params=params, reason="a demo", proposer=team[0].proposer, max_uses=1
    )
    for member in team.members[1:3]:
        member.approve(operation)
    run_due()
    return str(operation.runs.get().state)


def test_an_approved_raise_changes_the_amount_and_nothing_else(key: ApiKey) -> None:
    change_tenant_budgets(name="research", budgets=[Budget(DAY, 10)], actor=ACTOR)
    team = make_governed()

    assert _raise(team, f"key:{key.pk}", tokens_per_day=2000) == "succeeded"
    assert _raise(team, "tenant:research", tokens_per_day=20) == "succeeded"

    key.refresh_from_db()
    assert read_budgets(key) == (Budget(MINUTE, 50), Budget(DAY, 2000))
    assert read_budgets(key.tenant) == (Budget(DAY, 20),)


def test_a_cached_token_costs_no_more_than_another_one() -> None:
    allow_model(name="m", actor=ACTOR)
    with pytest.raises(InvalidValue, match="cached_price must not be above input_price"):
        change_model_prices(name="m", input_price=Decimal(1), cached_price=Decimal(2), output_price=Decimal(1), actor=ACTOR)


def test_a_form_has_a_field_for_each_kind_and_keeps_what_stands_there() -> None:
    budgets = [Budget(DAY, 1000, is_hard=False), Budget(BudgetKind.COST_PER_MONTH, 12_500_000)]
    shown = BudgetsForm(initial={"budgets": budgets})
    sent = {name: shown.get_initial_for_field(field, name) for name, field in shown.fields.items()}

    form = BudgetsForm({name: value for name, value in sent.items() if value})

    assert form.is_valid(), form.errors
    assert form.cleaned_data["budgets"] == budgets


@pytest.mark.parametrize("amount", ["x", "1.5", "-1"])
def test_an_amount_that_cannot_be_is_refused_beside_its_field(amount: str) -> None:
    form = BudgetsForm({"tokens_per_day": amount, "tokens_per_minute": "5"})

    assert list(form.errors) == ["tokens_per_day"]
    assert form["tokens_per_minute"].value() == "5"
