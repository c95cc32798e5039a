"""Sums for charts: each event counted once in the minute of its end, kept for as long as is said, and read in one query."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from gateway.models import RequestDay, RequestHour, RequestMinute, RequestSums, RequestTenMinutes, UsageDelivery, UsageEvent
from gateway.services import rollups
from gateway.services.models import allow_model
from gateway.services.rollups import (
    OUTCOMES,
    Metric,
    Order,
    Quantiles,
    read_comparison,
    read_provider_requests,
    read_series,
    read_top,
    roll_up_requests,
)
from gateway.values import Dimension, RequestOutcome, judge_outcome
from tests.fakes.limits import set_limits
from tests.fakes.nodes import ACTOR, make_credential, make_event, make_node, make_record
from wire.contract import OPEN_REQUEST_STATES, RequestState

pytestmark = pytest.mark.django_db(transaction=True)

NODE, OTHER_NODE = uuid.UUID(int=8), uuid.UUID(int=9)
LEVELS: dict[type[RequestSums], timedelta] = {
    RequestMinute: timedelta(minutes=1), RequestTenMinutes: timedelta(minutes=10), RequestHour: timedelta(hours=1),
    RequestDay: timedelta(days=1),
}  # fmt: skip
ORIGIN = datetime(2000, 1, 1, tzinfo=UTC)


def add(**values: Any) -> None:
    make_event(**({"node_id": NODE} | values)).save(force_insert=True)


def make_many(count: int, seed: int) -> list[UsageEvent]:
    chosen = random.Random(seed)
    states = [state for state in RequestState if state not in OPEN_REQUEST_STATES]
    return [
        make_event(
            ago_s=chosen.uniform(0, 90_000), tenant=chosen.choice("tuv"), model=chosen.choice(["m", "n", "typo"]),
            key_id=uuid.UUID(int=chosen.randrange(3)), node_id=chosen.choice([None, NODE, OTHER_NODE]),
            state=chosen.choice(states).value,
            status_code=chosen.choice([200, 400, 499, 503, None]), prompt_tokens=chosen.randrange(100),
            cost_micros=chosen.randrange(100), cached_tokens=chosen.randrange(9),
            latency_ms=chosen.choice([None, chosen.randrange(20_000)]),
            ttft_ms=chosen.choice([None, chosen.randrange(2_000)]), queue_ms=chosen.choice([None, 0, 30]),
            completion_tokens=chosen.choice([1, 3]), is_estimated=chosen.choice([False, False, True]),
        )
        for _ in range(count)
    ]  # fmt: skip


def count_by_hand(events: list[UsageEvent], step: timedelta) -> Counter[tuple[object, ...]]:
    """Return what the tables of a step should hold, as (time, dimension, name, what) → sum."""
    due: Counter[tuple[object, ...]] = Counter()
    for one in events:
        outcome = judge_outcome(RequestState(one.state), one.status_code)
        model = one.model if one.model in {"m", "n"} else ""
        names = {Dimension.ALL: "", Dimension.MODEL: model, Dimension.TENANT: one.tenant}
        names |= {Dimension.NODE: str(one.node_id)} if one.node_id else {}
        if step == timedelta(days=1):
            names |= {Dimension.KEY: str(one.key_id), Dimension.TENANT_MODEL: f"{one.tenant}\n{model}"}
        for dimension, name in names.items():
            key = (one.finished_at - (one.finished_at - ORIGIN) % step, dimension.value, name)
            is_served = outcome is RequestOutcome.SERVED
            due[*key, str(outcome)] += 1
            due[*key, "prompt_tokens"] += one.prompt_tokens
            due[*key, "cost_micros"] += one.cost_micros
            due[*key, "cached_tokens"] += one.cached_tokens
            due[*key, "node_ms"] += max(0, (one.latency_ms or 0) - (one.queue_ms or 0)) if one.node_id else 0
            if step == timedelta(days=1) and dimension in (Dimension.NODE, Dimension.KEY, Dimension.TENANT_MODEL):
                continue
            due[*key, "latency"] += is_served and one.latency_ms is not None
            due[*key, "ttft"] += is_served and one.ttft_ms is not None
            is_counted = one.completion_tokens > 1 and not one.is_estimated
            due[*key, "token_time"] += is_served and is_counted and None not in (one.ttft_ms, one.latency_ms)
            due[*key, "queue_time"] += None not in (one.node_id, one.queue_ms)
    return +due


def read_table(model: type[RequestSums]) -> Counter[tuple[object, ...]]:
    found: Counter[tuple[object, ...]] = Counter()
    for row in model._default_manager.all():
        for name in ("served", "refused", "failed", "cancelled", "prompt_tokens", "cost_micros", "cached_tokens", "node_ms"):
            found[row.at, row.dimension, row.name, name] = getattr(row, name)
        for metric in Metric:
            found[row.at, row.dimension, row.name, str(metric)] = sum(element >> 10 for element in getattr(row, metric))
    return +found


@pytest.fixture
def known() -> None:
    for name in ("m", "n"):
        allow_model(name=name, actor=ACTOR)


def test_tables_say_what_a_count_of_the_events_says(known: None) -> None:
    set_limits(gateway={"rollup_batch": 70})
    first, second = make_many(300, seed=1), make_many(200, seed=2)
    UsageEvent.objects.bulk_create(first)
    assert roll_up_requests() == 300
    UsageEvent.objects.bulk_create(second)
    assert [roll_up_requests(), roll_up_requests()] == [200, 0]
    for model, step in LEVELS.items():
        assert read_table(model) == count_by_hand(first + second, step), step


def connect() -> psycopg.Connection[tuple[object, ...]]:
    given = connection.get_connection_params()
    return psycopg.connect(**{name: given[name] for name in ("host", "port", "dbname", "user", "password") if given.get(name)})


def test_an_event_that_is_committed_late_is_counted_then(known: None) -> None:
    with connect() as slow:
        slow.execute(
            "INSERT INTO gateway_usageevent (event_id, created_at, finished_at, gateway_id, tenant, key_id, key_name, model, "
            "state, prompt_tokens, completion_tokens, tokens, cost_micros, is_estimated) SELECT gen_random_uuid(), now(), "
            "now(), gen_random_uuid(), 'late', gen_random_uuid(), 'k', 'm', 'completed', 0, 0, 0, 0, false"
        )
        add()
        assert roll_up_requests() == 0, "what was written beside a transaction that still runs is not passed over"
        slow.commit()
    assert [roll_up_requests(), roll_up_requests()] == [2, 0]
    assert {one.name for one in read_top(timedelta(hours=1), Dimension.TENANT, most=9)} == {"t", "late"}


def test_a_batch_whose_worker_dies_is_counted_again_and_once(known: None, monkeypatch: pytest.MonkeyPatch) -> None:
    add()

    def die(*_args: object, **_values: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(UsageDelivery, "save", die)  # the last thing before the transaction ends
        with pytest.raises(KeyboardInterrupt):
            roll_up_requests()
    assert read_series(timedelta(hours=1)).total.requests == 0
    assert roll_up_requests() == 1
    assert read_series(timedelta(hours=1)).total.requests == 1


def test_whoever_finds_another_worker_at_it_leaves_it_the_rest() -> None:
    add()
    assert roll_up_requests() == 1
    add()
    with connect() as other:
        other.execute("SELECT FROM gateway_usagedelivery WHERE webhook_id = 0 FOR UPDATE")
        assert roll_up_requests() == 0
    assert roll_up_requests() == 1


@pytest.mark.parametrize(
    ("span", "steps", "step_s"),
    [
        (timedelta(minutes=15), 15, 60), (timedelta(hours=1), 60, 60), (timedelta(hours=6), 180, 120),
        (timedelta(days=1), 144, 600), (timedelta(days=7), 168, 3_600), (timedelta(days=30), 180, 14_400),
        (timedelta(days=90), 90, 86_400),
    ],
)  # fmt: skip
def test_a_series_has_steps_that_fit_its_span_and_every_request_in_it(span: timedelta, steps: int, step_s: int) -> None:
    ages = [0.0, span.total_seconds() * 0.4, span.total_seconds() * 0.4, span.total_seconds() + step_s]
    UsageEvent.objects.bulk_create([make_event(ago_s=age, node_id=NODE, latency_ms=2_000, ttft_ms=50) for age in ages])
    roll_up_requests()

    for name, dimension in (("", Dimension.ALL), (str(NODE), Dimension.NODE), ("t", Dimension.TENANT)):
        with CaptureQueriesContext(connection) as queries:
            series = read_series(span, dimension=dimension, name=name, metric=Metric.TTFT)
        assert (len(queries), len(series.points), series.step.total_seconds()) == (1, steps, step_s)
        assert [later - earlier for (earlier, _), (later, _) in zip(series.points, series.points[1:], strict=False)] == [
            series.step
        ] * (steps - 1)
        assert [sums.requests for _, sums in series.points if sums.requests] == [2, 1]
        assert series.total == rollups.Sums(
            served=3,
            prompt_tokens=27,
            completion_tokens=9,
            cost_micros=15,
            node_ms=3 * 1_990,
            p50_ms=series.total.p50_ms,
            p95_ms=series.total.p95_ms,
        )
        if dimension is not Dimension.NODE or span <= timedelta(days=30):
            assert series.total.p50_ms == pytest.approx(50, rel=0.05)
    assert read_series(span, dimension=Dimension.NODE, name=str(OTHER_NODE)).total == rollups.Sums()


def test_quantiles_of_many_rows_are_those_of_all_their_requests() -> None:
    chosen = random.Random(3)
    times = [round(chosen.lognormvariate(6, 1)) + 1 for _ in range(900)]
    for at in range(3):  # each minute gets more in a second round
        UsageEvent.objects.bulk_create([make_event(ago_s=60 * chosen.randrange(50), latency_ms=one) for one in times[at::3]])
        roll_up_requests()
    total = read_series(timedelta(hours=1), metric=Metric.LATENCY).total
    times.sort()
    assert total.p50_ms == pytest.approx(times[449], rel=0.06)
    assert total.p95_ms == pytest.approx(times[854], rel=0.06)


@pytest.mark.parametrize("span", [timedelta(minutes=15), timedelta(hours=24), timedelta(days=7)])
def test_the_first_names_are_those_with_most_of_what_is_asked_for(known: None, span: timedelta) -> None:
    for values in ({"tenant": "busy"}, {"tenant": "busy"}, {"tenant": "dear", "cost_micros": 90}):
        add(**values)
    add(tenant="broken", state="failed")
    add(tenant="old", ago_s=span.total_seconds() + 172_800)
    roll_up_requests()
    with CaptureQueriesContext(connection) as queries:
        assert [(one.name, one.sums.requests) for one in read_top(span, Dimension.TENANT, most=2)] == [
            ("busy", 2),
            ("broken", 1),
        ]
    assert len(queries) == 1
    assert read_top(span, Dimension.TENANT, most=1, order=Order.COST)[0].name == "dear"
    assert read_top(span, Dimension.TENANT, most=1, order=Order.FAILED)[0].sums.failed_percent == 100
    assert read_top(span, Dimension.TENANT_MODEL, most=1)[0].name == "busy\nm"


def test_requests_are_counted_by_the_provider_of_their_node() -> None:
    nodes = [make_node("a"), make_node("b", credential=make_credential("b", provider="lab")[0])]
    for node, state, times in ((nodes[0], "completed", 2), (nodes[1], "completed", 3), (nodes[1], "failed", 1)):
        for _ in range(times):
            add(node_id=node.pk, state=state, status_code=200 if state == "completed" else 502)
    add(node_id=OTHER_NODE)  # it was removed since
    add(node_id=nodes[0].pk, ago_s=100_000)
    while roll_up_requests():
        pass
    none = dict.fromkeys(OUTCOMES, 0)
    assert read_provider_requests() == {"local": {**none, "served": 2}, "lab": {**none, "served": 3, "failed": 1}}


def test_names_that_clients_make_up_share_one_row(known: None) -> None:
    for number in range(5):
        add(model=f"made up {number}", state="rejected", status_code=404, node_id=None)
    roll_up_requests()
    assert [(one.name, one.sums.refused) for one in read_top(timedelta(hours=1), Dimension.MODEL, most=9)] == [("", 5)]


def test_what_is_older_than_its_table_keeps_is_deleted_a_bounded_number_of_rows_at_a_time(known: None) -> None:
    set_limits(gateway={"rollup_minutes_days": 40})
    UsageEvent.objects.bulk_create([make_event(ago_s=20 * 86_400 + 60 * minute, node_id=None) for minute in range(8)])
    add()
    roll_up_requests()
    minutes, tens = RequestMinute.objects.count(), RequestTenMinutes.objects.count()
    assert minutes == 3 * 8 + 4
    set_limits(gateway={"rollup_minutes_days": 2, "rollup_forgotten": 10})
    left = []
    for _ in range(4):
        roll_up_requests()
        left.append(RequestMinute.objects.count())
    assert left == [minutes - 10, minutes - 20, 4, 4]
    assert RequestTenMinutes.objects.count() == tens
    add(ago_s=3 * 86_400)
    roll_up_requests()
    assert RequestMinute.objects.count() == 4, "what comes too late for a table is not put there"
    assert read_series(timedelta(days=7)).total.requests == 2


def test_the_most_that_was_open_at_once_is_kept(known: None) -> None:
    queued = [make_record(state=RequestState.QUEUED, model="m") for _ in range(3)]
    make_record(state=RequestState.RUNNING, model="n")
    roll_up_requests()
    for record in queued:
        record.delete()
    roll_up_requests()
    total = read_series(timedelta(hours=1)).total
    assert (total.queued_most, total.running_most, total.requests) == (3, 1, 0)
    assert read_series(timedelta(days=30), dimension=Dimension.MODEL, name="m").total.queued_most == 3
    assert read_series(timedelta(days=90), dimension=Dimension.MODEL, name="n").total.running_most == 1


def test_days_are_summed_up_by_name_the_first_ones_each_and_the_others_together(known: None) -> None:
    for tenant, count, days in (("big", 4, 0), ("mid", 3, 1), ("low", 2, 0), ("low", 1, 2), ("far", 9, 8)):
        UsageEvent.objects.bulk_create([make_event(ago_s=days * 86_400, tenant=tenant, cached_tokens=2) for _ in range(count)])
    roll_up_requests()
    part = rollups.Part(7, Dimension.TENANT)
    with CaptureQueriesContext(connection) as queries:
        named, others = rollups.read_totals(part, most=1, order=Order.REQUESTS)
        first = rollups.read_first_names(part, most=2, order=Order.REQUESTS)
        by_day = rollups.read_days(part, most=9)
    assert len(queries) == 3
    assert [(one.name, one.sums.requests) for one in named] == [("big", 4)]
    assert others is not None
    assert (others.requests, others.cached_tokens, others.node_ms) == (6, 12, 0)
    assert (first, len(part.starts)) == (["big", "low"], 7)
    assert {name: [day.requests for day in of_name[-3:]] for name, of_name in by_day.items()} == {
        "big": [0, 0, 4], "low": [1, 0, 2], "mid": [0, 3, 0],
    }  # fmt: skip
    of_one = rollups.Part(7, Dimension.TENANT_MODEL, tenant="low")
    assert rollups.read_totals(of_one, most=9, order=Order.REQUESTS)[0][0].name == "low\nm"
    assert list(rollups.read_days(rollups.Part(7, Dimension.TENANT, names=("mid",)), most=9)) == ["mid"]
    first_day = rollups.read_first_day()
    assert first_day is not None
    assert (datetime.now(UTC) - first_day).days == 8


@pytest.mark.parametrize("span", [timedelta(minutes=15), timedelta(hours=6), timedelta(days=1), timedelta(days=7)])
def test_a_comparison_says_in_one_query_what_series_say_and_how_the_time_before_was(known: None, span: timedelta) -> None:
    UsageEvent.objects.bulk_create(make_many(400, seed=3))
    before = 1.5 * span.total_seconds()
    UsageEvent.objects.bulk_create(make_event(ago_s=before, ttft_ms=40, node_id=NODE) for _ in range(7))
    roll_up_requests()
    with CaptureQueriesContext(connection) as queries:
        found = read_comparison(span, (Metric.TTFT, Metric.QUEUE_TIME))
    assert len(queries) == 1
    for metric in (Metric.TTFT, Metric.QUEUE_TIME):
        series = read_series(span, metric=metric)
        assert found.step == series.step
        assert [at for at, _sums in found.points] == [at for at, _sums in series.points]
        assert [sums.requests for _at, sums in found.points] == [sums.requests for _at, sums in series.points]
        assert list(found.quantiles[metric]) == [Quantiles(sums.p50_ms, sums.p95_ms) for _at, sums in series.points]
        assert found.of_all[metric] == Quantiles(series.total.p50_ms, series.total.p95_ms)
        assert (found.total.requests, found.total.cost_micros) == (series.total.requests, series.total.cost_micros)
    past_ends_at = found.points[0][0]
    past = [one for one in UsageEvent.objects.all() if past_ends_at - span <= one.finished_at < past_ends_at]
    assert found.before.requests >= 7
    if span <= timedelta(hours=6):  # the time before is read in coarser steps, which end within the first one of this time
        assert found.before.requests == pytest.approx(len(past), abs=len(past) / 5)
    assert found.of_before[Metric.TTFT].p50_ms is not None
