"""The page of usage: sums by day and name from the sums of days alone, and budgets as gateways count them."""

from __future__ import annotations

import csv
import uuid
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from core.valkey import open_client
from gateway.models import ApiKey, Tenant, UsageEvent
from gateway.services.budgets import BudgetLevel, read_budget_states
from gateway.services.models import allow_model
from gateway.services.rollups import roll_up_requests
from gateway.values import BudgetKind, Counter, find_window
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, make_event, make_key, make_node, make_operator, make_record, make_tenant
from wire import clock
from wire.contract import RequestState

pytestmark = pytest.mark.django_db(transaction=True)
PAGE = "/admin/usage/"


def use(count: int = 1, **changes: Any) -> None:
    UsageEvent.objects.bulk_create([make_event(**changes) for _ in range(count)])


@pytest.fixture
def key() -> ApiKey:
    """A key of acme that asked m twice on a node, and once yesterday; globex asked n, and something that is not known."""
    for name in ("m", "n"):
        allow_model(name=name, actor=ACTOR)
    made, _text = make_key("ci", tenant="acme")
    node = make_node("attic")
    use(2, tenant="acme", key_id=made.pk, model="m", node_id=node.pk, cached_tokens=4, latency_ms=3_610_000)
    use(tenant="acme", key_id=made.pk, model="m", ago_s=86_400)
    make_tenant("globex")
    use(tenant="globex", model="n", cost_micros=2_500_000)
    use(tenant="globex", model="made up", state="rejected", status_code=404, prompt_tokens=0, completion_tokens=0)
    roll_up_requests()
    return made


def test_the_table_has_each_tenant_and_model_with_their_sums_and_shares(boss: Client, key: ApiKey) -> None:
    page = boss.get(PAGE)
    rows = page.context["rows"]
    assert [(row.tenant, row.model, row.used.sums.requests, round(row.used.share)) for row in rows] == [
        ("acme", "m", 3, 75), ("globex", "n", 1, 25), ("globex", "", 1, 0),
    ]  # fmt: skip
    total = page.context["total"]
    assert (total.sums.requests, total.tokens, total.sums.cached_tokens, total.sums.refused) == (5, 48, 8, 1)
    html = page.content.decode().replace("\u00a0", " ")
    for said in ("2 h", "2.50", "unknown models", "Usage is counted since", "tenant=acme&amp;model=m"):
        assert said in html, said


@pytest.mark.parametrize(
    ("query", "lines"),
    [
        ("by=tenant", {"acme": 36, "globex": 12}),
        ("by=tenant&of=requests", {"acme": 3, "globex": 2}),
        ("by=model&of=requests", {"m": 3, "n": 1, "unknown models": 1}),
        ("by=node&of=requests", {"attic": 2, "Other nodes, or none": 3}),
        ("by=key&tenant=acme", {"ci (acme)": 36}),
        ("by=model&tenant=globex&of=cost", {"n": 2.5, "unknown models": 0.000005}),
        ("by=node&tenant=acme", {"m": 36}),
        ("by=nonsense&of=nonsense&range=nonsense&tenant=nobody", {}),
    ],
)
def test_the_chart_is_by_what_is_chosen(boss: Client, key: ApiKey, query: str, lines: dict[str, float]) -> None:
    page = boss.get(f"{PAGE}?{query}")
    assert {line.label: sum(line.values) for line in page.context["chart"].lines} == pytest.approx(lines)


def test_names_beyond_the_first_eight_are_one_line(boss: Client) -> None:
    for number in range(10):
        use(10 - number, tenant=f"t{number}")
    roll_up_requests()
    lines = boss.get(f"{PAGE}?of=requests").context["chart"].lines
    assert [line.label for line in lines] == [*(f"t{number}" for number in range(8)), "Others"]
    assert sum(lines[-1].values) == 3


def test_the_page_takes_as_many_queries_for_many_rows_as_for_few(boss: Client, key: ApiKey) -> None:
    for by in ("tenant", "model", "key", "node"):
        counts = []
        for extra in (0, 5):
            for number in range(extra):
                other, _text = make_key(f"{by} {number}", tenant=f"{by} {number}")
                use(tenant=f"{by} {number}", key_id=other.pk, node_id=uuid.uuid4(), model="m")
            roll_up_requests()
            with CaptureQueriesContext(connection) as queries:
                assert boss.get(f"{PAGE}?by={by}").status_code == 200
            counts.append(len(queries))
            raw = [query for query in queries if "gateway_usageevent" in query["sql"]]
            assert not raw, "what each request used is not read for a page"
        assert counts[0] == counts[1] <= 16, by


def test_the_file_has_a_line_for_each_day_and_name(boss: Client, key: ApiKey) -> None:
    def read(query: str) -> list[list[str]]:
        return list(csv.reader(boss.get(f"{PAGE}export.csv?{query}").content.decode().splitlines()))

    names, *rows = read("range=7d")
    assert [(row[1], row[2], row[names.index("requests")], row[names.index("cached_tokens")]) for row in rows] == [
        ("acme", "m", "1", "0"), ("acme", "m", "2", "8"), ("globex", "", "1", "0"), ("globex", "n", "1", "0"),
    ]  # fmt: skip
    assert {row[names.index("currency")] for row in rows} == {settings.CURRENCY}
    names, row, _other = read("by=key&range=7d&tenant=acme")
    assert (row[1], row[2]) == ("ci (acme)", str(key.pk))
    set_limits(gateway={"page_export_rows": 2})
    assert read("range=7d")[-1] == ["cut after 2 rows: choose fewer days or a tenant"]
    assert len(read("range=7d")) == 4


def test_the_page_is_for_those_who_may_see_requests(boss: Client) -> None:
    stranger = Client()
    stranger.force_login(make_operator("bob", is_superuser=False))
    assert [stranger.get(url).status_code for url in (PAGE, f"{PAGE}export.csv")] == [403, 403]
    assert boss.post(PAGE).status_code == 405
    empty = boss.get(PAGE).content.decode()
    assert "Nothing was used in this time." in empty
    assert "No tenant and no key has a budget." in empty


def set_budgets(holder: Tenant | ApiKey, *budgets: tuple[BudgetKind, int, bool]) -> None:
    holder.budgets = [{"kind": kind.value, "amount": amount, "is_hard": is_hard} for kind, amount, is_hard in budgets]
    holder.save(update_fields=["budgets", "updated_at"])


def test_a_hard_budget_is_told_as_gateways_count_it_and_a_soft_one_from_the_sums_of_days(boss: Client, key: ApiKey) -> None:
    tenant = key.tenant
    set_budgets(tenant, (BudgetKind.TOKENS_PER_DAY, 1000, True), (BudgetKind.COST_PER_MONTH, 20, False))
    set_budgets(key, (BudgetKind.TOKENS_PER_MONTH, 30, True), (BudgetKind.CONCURRENT_REQUESTS, 2, True))
    make_record(tenant="acme", key_id=key.pk, state=RequestState.RUNNING, reserved_tokens=50)
    counter = Counter("tenant:acme", BudgetKind.TOKENS_PER_DAY, find_window(BudgetKind.TOKENS_PER_DAY, clock.now()))
    gateways = {"h:one": 500, "u:one": 300, "h:two": 100, "u:two": 100, "base": 450, "epoch": "x"}
    with open_client(settings.REDIS_URL) as valkey:
        valkey.hset(counter.key, mapping=gateways)
        try:
            found = {one.budget.kind: one for one in read_budget_states()}
            html = boss.get(PAGE).content.decode()
        finally:
            valkey.delete(counter.key)
    exact = found[BudgetKind.TOKENS_PER_DAY]
    assert (exact.used, exact.reserved, exact.is_exact, exact.level) == (800, 50, True, BudgetLevel.NEAR)
    soft = found[BudgetKind.COST_PER_MONTH]
    assert (soft.reserved, soft.is_exact) == (0, False)
    of_key = found[BudgetKind.TOKENS_PER_MONTH]
    assert (of_key.reserved, of_key.is_exact, of_key.level) == (50, False, BudgetLevel.USED_UP)
    assert BudgetKind.CONCURRENT_REQUESTS not in found
    for said in ("800 used, 50 reserved, of 1,000 tokens.", "nearly used up", "key ci of acme", "Soft: it refuses nothing."):
        assert said in html, said
    assert read_budget_states(tenant="globex") == ()
