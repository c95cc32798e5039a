"""The list of requests and the page of one: what they find without reading a whole table, what they say, and the file."""

from __future__ import annotations

import asyncio
import csv
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from gateway.admin.requests import EXPORTED, write_curl, write_export
from gateway.models import RequestRecord
from gateway.services.request_pages import Cursor, RequestFilter, read_page
from gateway.services.rollups import roll_up_requests
from tests.fakes.limits import set_limits
from tests.fakes.nodes import make_event, make_key, make_node, make_operator, make_record
from wire.contract import ErrorCode, RequestState
from wire.ids import format_id, new_uuid7

pytestmark = pytest.mark.django_db
LIST = "admin:gateway_requestrecord_changelist"


def walk(wanted: RequestFilter, *, size: int) -> list[RequestRecord]:
    """Return what all pages show, one after the other."""
    found: list[RequestRecord] = []
    cursor = None
    for _ in range(100):
        page = read_page(wanted, before=cursor, size=size)
        found += page.records
        if page.older is None:
            return found
        cursor = Cursor.read(str(page.older))
        assert cursor is not None
    raise AssertionError("the pages do not end")


def test_the_pages_of_a_list_have_each_request_once_also_of_one_moment() -> None:
    moment = timezone.now()
    records = [make_record(created_at=moment) for _ in range(7)] + [make_record(age_s=number) for number in range(1, 6)]
    found = walk(RequestFilter(), size=3)
    assert {one.pk for one in found} == {one.pk for one in records}
    assert len(found) == len(records)
    assert [one.created_at for one in found] == sorted((one.created_at for one in records), reverse=True)


def test_what_has_no_index_is_looked_for_among_so_many_records_and_the_page_says_how_far_back(boss: Client) -> None:
    set_limits(gateway={"page_scanned_first": 2, "page_scanned_records": 5})
    rare = make_record(age_s=60, tenant="rare")
    for number in range(12):
        make_record(age_s=10 + number)
    first = read_page(RequestFilter(tenant="rare"), before=None, size=50)
    assert first.records == ()
    assert first.looked_back_to is not None
    assert [one.pk for one in walk(RequestFilter(tenant="rare"), size=50)] == [rare.pk]
    html = boss.get(reverse(LIST), {"tenant": "rare"}).content.decode()
    assert "The newest requests were looked through, back to" in html
    assert "Look further back" in html
    assert len(walk(RequestFilter(), size=50)) == 13


def test_failed_requests_are_found_behind_however_many_that_were_served() -> None:
    set_limits(gateway={"page_scanned_first": 2, "page_scanned_records": 5})
    failed = make_record(age_s=60, state=RequestState.FAILED, error_code="FORWARDED_REQUEST_FAILED", status_code=502)
    for number in range(12):
        make_record(age_s=10 + number)
    for wanted in (RequestFilter(state="wrong"), RequestFilter(error="FORWARDED_REQUEST_FAILED"), RequestFilter(error="any")):
        assert [one.pk for one in read_page(wanted, before=None, size=50).records] == [failed.pk]
    with connection.cursor() as cursor:
        cursor.execute("SELECT indisvalid FROM pg_index WHERE indexrelid = 'gateway_requestrecord_unserved'::regclass")
        assert cursor.fetchall() == [(True,)]


def test_a_bar_leads_to_the_requests_that_ended_in_its_time(boss: Client) -> None:
    ended = make_record(age_s=100, finished_at=timezone.now())
    make_record(age_s=100, finished_at=timezone.now() - timedelta(seconds=90))
    now = timezone.now()
    query = {"since": f"{now - timedelta(minutes=1):%Y-%m-%dT%H:%M:%SZ}", "until": f"{now:%Y-%m-%dT%H:%M:59Z}"}
    page = boss.get(reverse(LIST), query)
    assert [row.record.pk for row in page.context["rows"]] == [ended.pk]
    assert "data-follow>" not in page.content.decode(), "a time that is over is not followed"


@pytest.mark.django_db(transaction=True)
def test_the_list_counts_what_ended_and_says_when_the_chart_knows_less_than_the_filters(boss: Client) -> None:
    for state, status in (("completed", 200), ("rejected", 400), ("failed", 502)):
        make_event(state=state, status_code=status).save(force_insert=True)
    roll_up_requests()
    html = boss.get(reverse(LIST)).content.decode()
    assert "3 requests ended within 24 h: 1 served, 1 refused, 1 failed." in html
    assert "does not know every filter" not in html
    assert "does not know every filter" not in boss.get(reverse(LIST), {"tenant": "t"}).content.decode()
    assert "does not know every filter" in boss.get(reverse(LIST), {"tenant": "t", "error": "any"}).content.decode()
    assert boss.get(reverse(LIST), {"state": "refused"}).context["chart"].lines[0].label == "Refused"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"error_code": ErrorCode.RATE_LIMITED, "state": RequestState.REJECTED, "status_code": 429},
            "The caller&#x27;s mistake.",
        ),
        (
            {"error_code": ErrorCode.FORWARDED_REQUEST_FAILED, "status_code": 502, "engine_error": "out of memory"},
            "out of memory",
        ),
        ({"error_code": ErrorCode.FORWARDED_REQUEST_FAILED, "status_code": 502}, "The engine&#x27;s fault."),
        ({"error_code": ErrorCode.REQUEST_INTERRUPTED}, "The node&#x27;s fault"),
        ({"error_code": ErrorCode.NO_AVAILABLE_NODE}, "A lack of room"),
        ({"error_code": ErrorCode.NODE_DRAINING}, "An operator&#x27;s doing"),
        ({"error_code": ErrorCode.INTERNAL_ERROR}, "Muster&#x27;s fault"),
        ({"error_code": ErrorCode.CLIENT_CLOSED_REQUEST, "state": RequestState.CANCELLED}, "Nobody&#x27;s fault."),
    ],
    ids=["caller", "words", "engine", "node", "room", "operator", "ours", "nobody"],
)
def test_the_page_of_a_request_says_whose_fault_it_was(boss: Client, changes: dict[str, Any], said: str) -> None:
    record = make_record(**{"state": RequestState.FAILED, **changes})
    assert said in boss.get(reverse("admin:gateway_requestrecord_change", args=[record.pk])).content.decode()


def test_the_page_of_a_request_has_its_way_its_cost_and_what_to_look_at_next(boss: Client) -> None:
    first, second, (key, _text) = make_node("den"), make_node("attic"), make_key()
    record = make_record(
        age_s=2, finished_at=timezone.now(), latency_ms=2010, queue_ms=20, ttfb_ms=500, attempts=2, node_id=second.pk,
        node_name="attic", key_id=key.pk, prompt_tokens=1200, cached_tokens=200, completion_tokens=150, is_streaming=True,
        lost_attempts=f"{first.pk.hex} tiny\t140\tlost\n", state=RequestState.INTERRUPTED, error_code="REQUEST_INTERRUPTED",
    )  # fmt: skip
    make_event(event_id=record.pk, cost_micros=1_234_500).save(force_insert=True)
    type(make_event()).objects.update(created_at=record.created_at)
    with CaptureQueriesContext(connection) as queries:
        html = boss.get(reverse("admin:gateway_requestrecord_change", args=[record.pk])).content.decode()
    assert len(queries) <= 10
    for said in (
        "Attempt 1: den, failed", "Attempt 1 on den failed: the link to it was lost before it answered.", "1,200",
        "200 of them cached",
        "1.234500 EUR", f"key={key.pk}", f"node={format_id('node', second.pk)}", "error=REQUEST_INTERRUPTED",
        reverse("admin:nodes_node_change", args=[second.pk]), reverse("admin:gateway_apikey_change", args=[key.pk]),
        "$MUSTER_KEY", record.printed_id,
    ):  # fmt: skip
        assert said in html, said


def test_the_command_asks_the_same_without_key_and_prompt() -> None:
    hostile = RequestRecord(endpoint="/v1/chat/completions", model="it's; rm", is_streaming=True, max_tokens=5)
    command = write_curl(hostile)
    assert "'\\''" in command
    assert '"stream":true' in command
    assert '"max_tokens":5' in command
    assert '"input":"…"' in write_curl(RequestRecord(endpoint="/v1/embeddings", model="m"))


def read_export(wanted: RequestFilter) -> list[list[str]]:
    async def read() -> str:
        return "".join([piece async for piece in write_export(wanted)])

    return list(csv.reader(asyncio.run(read()).splitlines()))


@pytest.mark.django_db(transaction=True)
def test_a_file_has_what_is_filtered_and_says_where_it_was_cut() -> None:
    set_limits(gateway={"page_export_rows": 5, "page_export_batch": 2})
    make_record(tenant="other")
    for number in range(4):
        make_record(tenant="=cmd()", age_s=number + 2, state=RequestState.FAILED, engine_error="no room")
    names, *rows = read_export(RequestFilter(tenant="=cmd()"))
    assert names == list(EXPORTED)
    assert [(row[names.index("tenant")], row[names.index("outcome")], row[names.index("engine_error")]) for row in rows] == [
        ("'=cmd()", "failed", "no room")
    ] * 4
    make_record()
    make_record()
    *_, last = read_export(RequestFilter())
    assert last == ["cut after 5 rows: choose a shorter time or more filters"]


def test_the_file_is_for_those_who_may_see_requests(boss: Client) -> None:
    url = reverse("admin:gateway_requestrecord_export")
    answer = boss.get(url)
    assert (answer.status_code, answer["content-type"]) == (200, "text/csv; charset=utf-8")
    assert "attachment" in answer["content-disposition"]
    stranger = Client()
    stranger.force_login(make_operator("bob", is_superuser=False))
    assert [stranger.get(page).status_code for page in (url, reverse(LIST))] == [403, 403]
    eve = make_operator("eve", is_superuser=False)
    eve.user_permissions.add(Permission.objects.get(codename="view_requestrecord"))
    stranger.force_login(eve)
    record = make_record(node_id=new_uuid7(), node_name="attic")
    pages = [reverse(LIST), reverse("admin:gateway_requestrecord_change", args=[record.pk])]
    for page in pages:
        html = stranger.get(page).content.decode()
        assert "attic" in html
        assert "/admin/nodes/node/" not in html, "who may not see nodes is offered no link to one"
    assert stranger.get(reverse("admin:gateway_requestrecord_change", args=[new_uuid7()])).status_code == 404
