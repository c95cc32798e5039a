"""Overview over HTTP: figures are those of the rows, in every range, for those who may see them, in so many queries."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.overview import RANGES, Board, read_board, read_overview
from core.models import User
from gateway.models import ApiKey, UsageEvent
from gateway.services.models import allow_model
from gateway.services.rollups import roll_up_requests
from governance.models import Operation
from nodes.models import NodeOnline, NodePresence, Provider, ProviderState
from nodes.services.availability import read_fleet, read_standing
from tests.fakes.governed_team import make_governed, propose_token
from tests.fakes.limits import set_limits
from tests.fakes.nodes import (
    ACTOR,
    make_credential,
    make_event,
    make_gateway,
    make_key,
    make_node,
    make_operator,
    make_presence,
    make_record,
)
from wire.contract import RequestState

pytestmark = pytest.mark.django_db

MOST_QUERIES = 36
"""Session, operator, shell; what needs attention; six for the range, three for the first steps; what waits for the person."""
FAILED: dict[str, Any] = {"state": RequestState.FAILED.value, "status_code": 502}
REFUSED: dict[str, Any] = {"state": RequestState.REJECTED.value, "status_code": 400}
HOUR_S = 3600.0


@pytest.fixture
def boss() -> Client:
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    return client


def open_page(client: Client, **query: str) -> str:
    return client.get(reverse("admin:index"), query).content.decode()


def read_figures(board: Board) -> dict[str, tuple[str, str, str]]:
    return {tile.name: (tile.figure, tile.change, tile.tone) for tile in board.tiles}


def test_the_numbers_are_those_of_the_rows() -> None:
    make_presence(make_node("alive"))
    make_presence(make_node("held"))
    make_presence(make_node("lost"), age_s=3600)
    make_node("never")
    make_node("cordoned", cordoned=True)
    make_record(state=RequestState.QUEUED, age_s=8)
    overview = read_overview()
    assert (overview.fleet.ready, overview.fleet.total) == (2, 5)
    assert (overview.open_requests.queued, overview.open_requests.running) == (1, 0)
    assert 7 <= overview.open_requests.oldest_wait_s < 60
    assert overview.live == {"nodes_ready": "2", "nodes_total": "of 5", "open": "0 running, 1 queued"}


@pytest.mark.django_db(transaction=True)
def test_charts_show_the_requests_of_the_range_that_was_asked_for(boss: Client) -> None:
    events = [make_event(ttft_ms=ttft_ms) for ttft_ms in (100, 200, 300)]
    events += [make_event(state=state.value, status_code=status, prompt_tokens=0) for state, status in (
        (RequestState.FAILED, 502), (RequestState.REJECTED, 400), (RequestState.REJECTED, 503), (RequestState.CANCELLED, 499),
    )]  # fmt: skip
    UsageEvent.objects.bulk_create([*events, make_event(ago_s=5 * HOUR_S), make_event(ago_s=40 * 24 * HOUR_S)])
    roll_up_requests()
    for name, steps, served in (
        ("15min", 15, 3), ("1h", 60, 3), ("6h", 180, 4), ("24h", 144, 4), ("7d", 168, 4), ("30d", 30, 4), ("x", 60, 3),
    ):  # fmt: skip
        response = boss.get(reverse("admin:index"), {"range": name})
        board = response.context["board"]
        assert board.range == (name if name in RANGES else "1h")
        assert [len(line.values) for line in board.requests.lines] == [steps] * 4
        assert [sum(line.values) for line in board.requests.lines] == [served, 1, 1, 2]
        median, worst, *_ = [[value for value in line.values if value is not None] for line in board.latency.lines]
        assert median == [pytest.approx(200, rel=0.1)]
        assert worst == [pytest.approx(300, rel=0.1)]
        assert '"name": "requests"' in response.content.decode()


@pytest.mark.django_db(transaction=True)
def test_a_tile_says_what_it_was_in_the_time_before_and_refused_requests_are_no_failures() -> None:
    UsageEvent.objects.bulk_create(
        [
            *[make_event(ago_s=60, completion_tokens=360) for _ in range(60)],
            *[make_event(ago_s=60, **FAILED) for _ in range(20)],
            *[make_event(ago_s=60, **REFUSED) for _ in range(40)],
            *[make_event(ago_s=1.5 * HOUR_S, completion_tokens=180) for _ in range(60)],
        ]
    )
    roll_up_requests()
    figures = read_figures(read_board("1h"))
    assert figures["failed"] == ("25", "▲ from 0\u00a0%", "worse")
    assert re.fullmatch(r"2(\.\d+)?", figures["rate"][0])
    assert re.fullmatch(r"▲ 10\d % from 1", figures["rate"][1])
    assert figures["rate"][2] == ""
    assert figures["tokens"][1].endswith("% from 3")


def test_without_a_time_before_no_change_is_claimed() -> None:
    UsageEvent.objects.bulk_create([make_event(), make_event(**FAILED)])
    figures = read_figures(read_board("1h"))
    assert {name: change for name, (_figure, change, _tone) in figures.items() if change} == {}
    assert figures["ttft"][0] == figures["memory"][0] == "–"


def test_the_line_of_nodes_counts_those_that_were_heard_at_each_moment() -> None:
    now = timezone.now()
    node, other = make_node("attic"), make_node("barn")
    for owner, began_s, ended_s in ((node, 5400, 0), (other, 5400, 3000), (other, 900, 0)):
        began_at, ended_at = now - timedelta(seconds=began_s), now - timedelta(seconds=ended_s)
        NodeOnline.objects.create(node=owner, began_at=began_at, ended_at=ended_at)
    (tile,) = [tile for tile in read_board("1h").tiles if tile.name == "nodes"]
    heights = re.findall(r" (\d+\.\d)", tile.path)
    assert (heights[0], heights[-2]) == ("1.0", "1.0")
    assert heights.count("12.0") == pytest.approx(35, abs=2)


def test_the_nodes_that_need_a_look_come_first_and_the_rest_is_counted(boss: Client) -> None:
    for number in range(5):
        make_presence(make_node(f"idle {number}"))
    make_presence(make_node("busy", max_concurrent=2), active_requests=2)
    make_presence(make_node("ill"), reported_status="error")
    make_presence(make_node("lost"), age_s=3600)
    make_presence(make_node("resting", cordoned=True))
    set_limits(console={"overview_nodes": 5})
    strips = read_overview().strips
    assert [(strip.name, strip.state) for strip in strips] == [
        ("ill", "error"), ("lost", "offline for 60 min"), ("resting", "cordoned"), ("busy", "busy"), ("idle 0", "ready"),
    ]  # fmt: skip
    assert "And 4 more nodes" in open_page(boss)


HELD: tuple[dict[str, Any], ...] = (
    {"cordoned": True}, {"draining": True}, {"mode": "spare_off"}, {"witness_alarm": "a fork"}, {"policy_error": "unknown"},
)  # fmt: skip
HEARD: tuple[dict[str, Any], ...] = (
    {"age_s": 3600}, {"age_s": 45}, {"reported_status": "error"}, {"reported_status": "offline"}, {"is_accepting_jobs": False},
    {"connected": False}, {"replicas": [{"model": "m", "state": "failed"}]}, {"reported_status": "busy"}, {},
)  # fmt: skip


def test_what_the_database_says_of_nodes_is_what_is_judged_of_each() -> None:
    for number, changes in enumerate(HELD):
        make_presence(make_node(f"held {number}", **changes))
    for number, changes in enumerate(HEARD):
        make_presence(make_node(f"heard {number}"), **changes)
    make_node("never")
    off = make_node("off", credential=make_credential("other", provider="switched-off")[0])
    make_presence(off)
    Provider.objects.filter(pk=off.provider_id).update(state=ProviderState.DISABLED)
    fleet, standing = read_fleet(), read_standing(most=100)
    assert standing.total == len(fleet.nodes) == len(HELD) + len(HEARD) + 2
    assert standing.ready == sum(node.takes_work for node in fleet.nodes)
    by_name = {node.name: node for node in fleet.nodes}
    assert {node.name for node in standing.loaded} == {"heard 7", "heard 8"}
    for node in (*standing.notable, *standing.loaded):
        assert node.unavailable is by_name[node.name].unavailable
    assert all(by_name[node.name].takes_work for node in standing.loaded)


def test_a_strip_shows_gpus_memory_and_models_as_text_too(boss: Client) -> None:
    gpu = {"index": 0, "name": "NVIDIA L4", "memory_total_mb": 24_576, "memory_used_mb": 6_144, "utilization_percent": 40.0}
    make_presence(make_node("attic", model_names=[f"m{number}" for number in range(6)]), gpus=[gpu])
    page = open_page(boss)
    assert 'title="NVIDIA L4: 40 %"' in page
    assert "<small>1 GPU</small>" in page
    assert "6.0 GiB of 24.0 GiB" in page
    assert "<span>m3</span><span>+2</span>" in page


PARTS = {
    "view_node": ("attic", "tile-nodes", "tile-memory"),
    "view_requestrecord": ("tile-rate", "tile-failed", "chart-requests-data", "Top models"),
    "view_tenant": ("Top tenants",),
}


@pytest.mark.parametrize("granted", [(), *((name,) for name in PARTS), tuple(PARTS)])
def test_everybody_sees_what_needs_attention_and_of_the_rest_what_they_may_see(granted: tuple[str, ...]) -> None:
    make_presence(make_node("attic", model_names=["tiny"]))
    person = make_operator("bob", is_superuser=False)
    person.user_permissions.set(Permission.objects.filter(codename__in=granted))
    client = Client()
    client.force_login(person)
    page = open_page(client)
    assert "Needs attention" in page
    for name, texts in PARTS.items():
        shown = {text for text in texts if text in page}
        assert shown == (set(texts) if name in granted else set()), name


def test_what_waits_for_a_person_is_theirs_alone_and_the_oldest_stands_first() -> None:
    team = make_governed()
    first = propose_token(team[0], reason="the first")
    second = propose_token(team[0], params={"name": "other"}, reason="the second")
    Operation.objects.filter(pk=first.pk).update(requested_at=timezone.now() - timedelta(hours=2))
    pages = {}
    for member in team.members[:2]:
        User.objects.filter(pk=member.user.pk).update(is_staff=True)
        client = Client()
        client.force_login(member.user)
        pages[member.name] = open_page(client)
    assert "Nothing waits for your approval." in pages[team[0].name], "who asked is not asked"
    links = re.findall(r"/approvals/([0-9a-f-]{36})", pages[team[1].name])
    assert links[:2] == [str(first.pk), str(second.pk)]
    assert re.search(r"Expires in \d+ (min|h|d)\.", pages[team[1].name])


def test_the_first_steps_go_when_they_are_made_and_for_one_person_when_they_hide_them(boss: Client) -> None:
    other = Client()
    other.force_login(make_operator("eve"))
    page = open_page(boss)
    assert [page.count(text) for text in ("First steps", "(to do)", "(done)")] == [1, 5, 0]
    make_node("one")
    make_node("two")
    make_key("demo")
    assert open_page(boss).count("(done)") == 1
    make_key("the app's")
    assert open_page(boss).count("(done)") == 2
    assert boss.get(reverse("admin:hide_checklist")).status_code == 405
    assert boss.post(reverse("admin:hide_checklist")).status_code == 302
    assert "First steps" not in open_page(boss)
    assert "First steps" in open_page(other)


@pytest.mark.django_db(transaction=True)
def test_the_first_steps_are_gone_once_all_are_made() -> None:
    make_governed()
    for name in ("one", "two"):
        make_node(name)
    make_key("the app's")
    UsageEvent.objects.bulk_create([make_event()])
    client = Client()
    client.force_login(make_operator("eve"))
    roll_up_requests()
    assert open_page(client).count("(to do)") == 1
    hiding = Client()
    hiding.force_login(make_operator("read-only"))
    assert hiding.post(reverse("admin:hide_checklist")).status_code == 302, "it changes nothing but what this person is shown"
    assert "First steps" not in open_page(hiding)
    assert "First steps" not in client.get(reverse("admin:index"), secure=True).content.decode()


@pytest.mark.django_db(transaction=True)
def test_the_page_takes_as_many_queries_for_many_rows_as_for_few(boss: Client) -> None:
    counts = []
    make_governed()
    for first in (0, 5):
        for number in range(first, first + 5):
            node = make_node(f"node {number}")
            make_presence(node)
            NodeOnline.objects.create(node=node, began_at=timezone.now() - timedelta(hours=1), ended_at=timezone.now())
            make_record()
            make_record(state=RequestState.QUEUED, age_s=9, model=f"model {number}")
            allow_model(name=f"unserved {number}", actor=ACTOR)
            make_record(model=f"unserved {number}", state=RequestState.FAILED)
            make_gateway(silent_s=60)
            key, _ = make_key(f"key {number}", expires_at=timezone.now() + timedelta(days=1))
            ApiKey.objects.filter(pk=key.pk).update(last_used_at=timezone.now())
            make_event(tenant=f"tenant {number}").save(force_insert=True)
        roll_up_requests()
        with CaptureQueriesContext(connection) as queries:
            open_page(boss)
        counts.append(len(queries))
    assert NodePresence.objects.count() == 10
    assert counts[0] == counts[1] <= MOST_QUERIES, counts
