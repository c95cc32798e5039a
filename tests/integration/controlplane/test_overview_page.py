"""The first page: its numbers, its warnings, its queries."""

from __future__ import annotations

import re

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from controlplane.models import User
from controlplane.overview import count_live, read_overview
from gateway.models import RequestRecord
from nodes.models import Node
from tests.integration.gateway_admin.factories import make_record
from tests.integration.nodes.factories import make_node, make_presence
from wire.contract import RequestState

pytestmark = pytest.mark.django_db
MOST_QUERIES = 11
"""Session, operator, and one or two each for nodes, open requests and the last hour; three for what waits."""
POLYGLOT = "\"'><img src=x onerror=alert(1)>"


@pytest.fixture
def boss() -> Client:
    """The browser of an operator who may do everything."""
    client = Client()
    client.force_login(User.objects.create_superuser("ada"))
    return client


def test_the_numbers_are_those_of_the_rows() -> None:
    make_presence(make_node("alive"))
    make_presence(make_node("lost"), age_s=3600)
    make_node("never")
    for latency_ms in (100, 200, 300):
        make_record(latency_ms=latency_ms, prompt_tokens=10, completion_tokens=20)
    make_record(state=RequestState.FAILED, latency_ms=9000)
    make_record(state=RequestState.QUEUED, age_s=8)
    make_record(age_s=2 * 3600)

    overview = read_overview()

    assert (overview.fleet.online, len(overview.fleet.nodes)) == (1, 3)
    assert (overview.open_requests.queued, overview.open_requests.running) == (1, 0)
    assert 7 <= overview.open_requests.oldest_wait_s < 60
    traffic = overview.traffic
    assert (traffic.requests, traffic.faults, traffic.fault_percent) == (5, 1, 20.0)
    assert (traffic.p50_ms, traffic.p95_ms) == (200, 290)
    assert (traffic.prompt_tokens, traffic.completion_tokens) == (30, 60)
    assert sum(minute.requests for minute in traffic.minutes) == 5
    assert len(traffic.minutes) == 60
    assert count_live(overview) == {"nodes_online": 1, "nodes_total": 3, "queued": 1, "running": 0}


def test_what_waits_is_said_with_its_reason_and_what_to_do(boss: Client) -> None:
    make_presence(make_node("attic", model_names=["tiny"], draining=True))
    make_presence(make_node("cellar", model_names=["big"], max_concurrent=1))
    running = make_record(model="big", state=RequestState.RUNNING)
    RequestRecord.objects.filter(pk=running.pk).update(node_id=Node.objects.get(name="cellar").pk)
    for model in ("tiny", "big", "unheard-of"):
        make_record(model=model, state=RequestState.QUEUED, age_s=9)
    page = boss.get(reverse("admin:index")).content.decode()

    assert re.search(r"1 waits for tiny, for \d+\ss\.", page)
    assert "Only attic has tiny, and it is being drained. Undrain attic, or load tiny on another box." in page
    assert "Every box that has big is full: cellar 1 of 1." in page
    assert "No box has unheard-of." in page


def test_an_empty_installation_has_a_first_page(boss: Client) -> None:
    page = boss.get(reverse("admin:index")).content.decode()

    assert "No box has connected yet" in page


def test_the_page_takes_as_many_queries_for_many_rows_as_for_few(boss: Client) -> None:
    counts = []
    for first in (0, 5):
        for number in range(first, first + 5):
            make_presence(make_node(f"node {number}"))
            make_record()
            make_record(state=RequestState.QUEUED, age_s=9, model=f"model {number}")
        with CaptureQueriesContext(connection) as queries:
            boss.get(reverse("admin:index"))
        counts.append(len(queries))

    assert counts[0] == counts[1] <= MOST_QUERIES


def test_names_and_errors_of_boxes_are_shown_as_text(boss: Client) -> None:
    make_presence(make_node(POLYGLOT), reported_status="error", last_error=POLYGLOT)
    page = boss.get(reverse("admin:index")).content.decode()

    assert "<img src=x" not in page
    assert page.count("&lt;img src=x") >= 2


def test_the_sidebar_shows_an_operator_only_what_they_may_open() -> None:
    operator = User.objects.create_user("bob", is_staff=True)
    client = Client()
    client.force_login(operator)
    page = client.get(reverse("admin:index")).content.decode()

    assert reverse("admin:gateway_apikey_changelist") not in page.split('id="overview"')[0]
