"""What was used: sums for people, warnings, and batches for webhooks, in order and at least once."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, date, datetime, timedelta

import pytest
from django.db import connection
from django.test import Client

from gateway.models import UsageDelivery, UsageEvent
from gateway.services import usage
from gateway.services.errors import InvalidValue
from gateway.services.tenants import change_tenant_budgets, create_tenant
from gateway.services.usage import deliver_usage, forget_old_usage, read_usage, tell_reached_budgets
from gateway.values import Budget, BudgetKind
from governance.admin_tokens import create_admin_token
from governance.models import Notice, WebhookEndpoint
from governance.notices import DeliveryFailed, add_webhook, write_message
from tests.fakes.limits import set_limits
from wire.ids import format_id

pytestmark = pytest.mark.django_db(transaction=True)
ACTOR = "user:root"
KEY = uuid.UUID(int=7)


def add(tenant: str = "t", *, tokens: int = 10, micros: int = 0, model: str = "m", at: datetime | None = None) -> UsageEvent:
    moment = at or datetime.now(UTC)
    return UsageEvent.objects.create(
        event_id=uuid.uuid4(), created_at=moment, finished_at=moment, gateway_id=uuid.uuid4(), tenant=tenant, key_id=KEY,
        key_name="k", model=model, state="completed", prompt_tokens=tokens - 1, completion_tokens=1, tokens=tokens,
        cost_micros=micros,
    )  # fmt: skip


def test_usage_is_summed_up_by_what_was_asked_for() -> None:
    today = datetime.now(UTC)
    add(tokens=10, micros=5), add(tokens=20, model="n"), add("u", tokens=1)
    add(tokens=40, at=today - timedelta(days=1))
    first, last = today.date() - timedelta(days=1), today.date()

    by_tenant = read_usage(groups=["tenant"], first=first, last=last)
    assert [(row["tenant"], row["requests"], row["tokens"]) for row in by_tenant] == [
        ("t", 3, 70), ("u", 1, 1),
    ]  # fmt: skip
    assert [row["tokens"] for row in read_usage(groups=["day", "model"], tenant="t", first=first, last=last)] == [40, 10, 20]
    assert read_usage(groups=["key"], first=first, last=last)[0]["key_name"] == "k"


def test_a_rejected_request_is_no_usage(posted: list[dict[str, object]]) -> None:
    set_limits(gateway={"usage_batch": 2})
    add_webhook(name="billing", url="https://example.org/x", takes_usage=True, actor=ACTOR)
    deliver_usage()
    due()
    for _ in range(3):
        UsageEvent.objects.filter(pk=add(tokens=1).pk).update(state="rejected")
    assert deliver_usage() == 0
    seen = UsageDelivery.objects.get()
    assert not UsageEvent.objects.extra(where=["written_in > %s::text::xid8"], params=[str(seen.written_in)]).exists()
    add(tokens=7)
    due()
    assert deliver_usage() == 1
    assert [event["tokens"] for batch in posted for event in batch["events"]] == [7]  # type: ignore[attr-defined]
    today = datetime.now(UTC).date()
    assert [row["requests"] for row in read_usage(groups=["tenant"], first=today, last=today)] == [1]


@pytest.mark.parametrize("groups", [["hour"], [], ["day", "day"]])
def test_a_group_that_there_is_not_is_refused(groups: list[str]) -> None:
    with pytest.raises(InvalidValue):
        read_usage(groups=groups, first=date(2026, 1, 1), last=date(2026, 1, 2))


def test_the_api_answers_as_json_and_as_a_file(client: Client) -> None:
    add("=cmd", tokens=1_500, micros=2_500_000)
    _token, text = create_admin_token(name="ci", actor=ACTOR)
    headers = {"authorization": f"Bearer {text}"}

    listed = client.get("/api/v1/usage?group_by=tenant,model", headers=headers)
    exported = client.get("/api/v1/usage.csv?group_by=tenant", headers=headers)

    assert listed.json() == {
        "currency": "EUR",
        "usage": [{
            "tenant": "=cmd", "model": "m", "requests": 1, "prompt_tokens": 1499, "cached_tokens": 0, "completion_tokens": 1,
            "tokens": 1500, "cost": "2.500000",
        }],
    }  # fmt: skip
    assert exported.content.decode().splitlines() == [
        "tenant,requests,prompt_tokens,cached_tokens,completion_tokens,tokens,cost,currency",
        "'=cmd,1,1499,0,1,1500,2.500000,EUR",
    ]  # fmt: skip
    (by_node,) = client.get("/api/v1/usage?group_by=node", headers=headers).json()["usage"]
    assert (by_node["node_id"], by_node["requests"]) == ("", 1)
    node = uuid.UUID(int=7)
    UsageEvent.objects.update(node_id=node)
    (by_node,) = client.get("/api/v1/usage?group_by=node", headers=headers).json()["usage"]
    assert by_node["node_id"] == format_id("node", node)
    assert client.get("/api/v1/usage?from=yesterday", headers=headers).status_code == 400
    assert client.get("/api/v1/usage?from=2020-01-01", headers=headers).json()["error"]["param"] == "to"
    assert client.get("/api/v1/usage").status_code == 401


def test_webhooks_are_told_once_of_80_and_once_of_100_percent() -> None:
    create_tenant(name="t", actor=ACTOR)
    change_tenant_budgets(name="t", budgets=[Budget(BudgetKind.TOKENS_PER_DAY, 100, is_hard=False)], actor=ACTOR)
    add_webhook(name="ops", url="https://example.org/x", actor=ACTOR)
    told = []
    for tokens in (79, 1, 1, 19, 50):
        add(tokens=tokens)
        told.append(tell_reached_budgets())

    assert told == [0, 1, 0, 1, 0]
    bodies = [write_message(notice).body for notice in Notice.objects.order_by("pk")]
    assert [(body["event"], body["percent"], body["used"], body["owner"]) for body in bodies] == [
        ("budget_reached", 80, 80, "tenant:t"), ("budget_reached", 100, 100, "tenant:t"),
    ]  # fmt: skip


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """What webhooks of usage got; one whose address ends in ``down`` takes nothing."""
    got: list[dict[str, object]] = []

    def post(*, url: str, secret: str, body: bytes, at: int) -> None:
        assert secret
        assert at
        if url.endswith("down"):
            raise DeliveryFailed("answered with 500")
        got.append(json.loads(body))

    monkeypatch.setattr(usage, "post_notice", post)
    return got


def due() -> None:
    UsageDelivery.objects.update(due_at=datetime.now(UTC) - timedelta(seconds=1))


def test_a_webhook_gets_every_event_in_order_from_its_beginning_on(posted: list[dict[str, object]]) -> None:
    set_limits(gateway={"usage_batch": 2})
    add(tokens=5)
    hook, _secret = add_webhook(name="billing", url="https://example.org/x", takes_usage=True, actor=ACTOR)
    assert deliver_usage() == 0, "what was before it came is in the table"
    tokens = [add(tokens=number).tokens for number in range(10, 15)]

    assert deliver_usage() == 3
    batches = [batch["events"] for batch in posted]
    assert [len(batch) for batch in batches] == [2, 2, 1]  # type: ignore[arg-type]
    events = [event for batch in batches for event in batch]  # type: ignore[attr-defined]
    assert [event["tokens"] for event in events] == tokens
    assert events[0]["event_id"].startswith("req_")
    assert deliver_usage() == 0

    WebhookEndpoint.objects.filter(pk=hook.pk).update(url="https://example.org/down")
    add(tokens=20)
    assert deliver_usage() == 0
    WebhookEndpoint.objects.filter(pk=hook.pk).update(url="https://example.org/x")
    assert deliver_usage() == 0, "it is tried again after a pause"
    due()
    assert deliver_usage() == 1


def test_an_event_of_a_transaction_that_began_earlier_and_ends_later_is_not_passed_over(
    posted: list[dict[str, object]],
) -> None:
    add_webhook(name="billing", url="https://example.org/x", takes_usage=True, actor=ACTOR)
    deliver_usage()
    other = connection.copy()
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id()")
        add(tokens=1)
        assert deliver_usage() == 0, "an older transaction is under way, and may write one before it"
        other.rollback()
        due()
        assert deliver_usage() == 1
    finally:
        other.close()


def test_a_transaction_of_another_database_holds_no_event_back(posted: list[dict[str, object]]) -> None:
    add_webhook(name="billing", url="https://example.org/x", takes_usage=True, actor=ACTOR)
    deliver_usage()
    elsewhere = connection.copy()
    elsewhere.settings_dict = elsewhere.settings_dict | {"NAME": "postgres"}
    try:
        elsewhere.set_autocommit(False)
        with elsewhere.cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id()")
        add(tokens=1)
        assert deliver_usage() == 1
    finally:
        elsewhere.rollback()
        elsewhere.close()


def test_old_events_are_deleted() -> None:
    add(at=datetime.now(UTC) - timedelta(days=401))
    add(at=datetime.now(UTC) - timedelta(days=399))
    assert forget_old_usage() == 1
