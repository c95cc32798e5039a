"""The first page: its numbers, its warnings, its queries."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from controlplane.overview import count_live, read_overview
from core.models import User
from gateway.models import ApiKey, GatewayProcess, RequestRecord
from gateway.services import allow_model
from gateway.services.overview import read_gateways
from nodes.models import Node
from tests.system.gateway_admin.factories import ACTOR, make_gateway, make_key, make_record
from tests.system.governance.team import make_governed
from tests.system.nodes.factories import make_node, make_presence
from wire.contract import RequestState

pytestmark = pytest.mark.django_db
MOST_QUERIES = 21
"""Session, operator, and one or two each for nodes, gateways, open requests, the last hour, allowed models, the policy and keys
that end; three for what waits, two for models that no node answers for, and one for those that a node lost."""
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
    make_record(state=RequestState.REJECTED, status_code=400)
    make_record(state=RequestState.REJECTED, status_code=503)
    make_record(state=RequestState.CANCELLED, status_code=499)
    make_record(state=RequestState.QUEUED, age_s=8)
    make_record(age_s=2 * 3600)

    overview = read_overview()

    assert (overview.fleet.online, len(overview.fleet.nodes)) == (1, 3)
    assert (overview.open_requests.queued, overview.open_requests.running) == (1, 0)
    assert 7 <= overview.open_requests.oldest_wait_s < 60
    traffic = overview.traffic
    assert (traffic.requests, traffic.served, traffic.refused, traffic.failed) == (8, 3, 1, 2)
    assert traffic.failed_percent == pytest.approx(200 / 7)
    assert (traffic.p50_ms, traffic.p95_ms) == (200, 290)
    assert (traffic.prompt_tokens, traffic.completion_tokens) == (30, 60)
    assert sum(minute.requests for minute in traffic.minutes) == 8
    assert sum(minute.refused for minute in traffic.minutes) == 1
    assert sum(minute.failed for minute in traffic.minutes) == 2
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
    assert "Only attic has tiny, and it is being drained. Undrain attic, or load tiny on another node." in page
    assert "Every node that has big is full: cellar 1 of 1." in page
    assert "No node has unheard-of." in page


def test_an_allowed_model_that_no_node_has_is_named_with_the_requests_for_it() -> None:
    make_presence(make_node("attic", model_names=["tiny"]), available_models=["big"])
    for name in ("tiny", "big", "llama3.2"):
        allow_model(name=name, actor=ACTOR)
    make_record(model="llama3.2", state=RequestState.FAILED)
    make_record(model="llama3.2", state=RequestState.FAILED, age_s=2 * 3600)

    said = {problem.what: problem.advice for problem in read_overview().problems}

    assert said["No node answers for llama3.2, and clients sent 1 request for it in the last hour."].startswith(
        "No node has llama3.2."
    )
    assert said["Clients may use big, and no node answers for it."].startswith("No node has big loaded; attic could load it.")
    assert not any("tiny" in what for what in said)


def test_a_gateway_that_died_counts_until_another_one_took_its_place() -> None:
    make_gateway(stopped=True)
    died = make_gateway(silent_s=120)
    GatewayProcess.objects.filter(pk=died.pk).update(started_at=timezone.now() - timedelta(hours=1))
    assert [gateway.silent_s >= 120 for gateway in read_gateways()] == [True]
    assert "No gateway runs." in {problem.what for problem in read_overview().problems}

    make_gateway()

    assert [gateway.silent_s < 60 for gateway in read_gateways()] == [True]
    assert not any("gateway" in problem.what for problem in read_overview().problems)


def test_a_policy_and_a_key_that_end_soon_are_named_and_so_is_a_node_that_trusts_none() -> None:
    make_governed(expires_at=timezone.now() + timedelta(days=3))
    make_presence(make_node("attic", op_level="L2", model_names=["tiny"]))
    key, _ = make_key("ci", expires_at=timezone.now() + timedelta(days=1))
    make_key("unused", expires_at=timezone.now() + timedelta(days=1))
    ApiKey.objects.filter(pk=key.pk).update(last_used_at=timezone.now())

    said = " ".join(problem.what for problem in read_overview().problems)

    assert "The approval policy, version 1, expires on" in said
    assert "The API key ci expires on" in said
    assert "attic trusts no policy." in said
    assert "unused" not in said


def test_a_replica_that_failed_is_named_with_the_words_of_its_engine(boss: Client) -> None:
    node = make_node("attic", model_names=["tiny"])
    make_presence(node, replicas=[{"model": "tiny", "state": "failed", "detail": "connection refused"}])
    page = boss.get(reverse("admin:index")).content.decode()

    assert "tiny failed on attic." in page
    assert "connection refused" in page
    assert reverse("admin:nodes_node_change", args=[node.pk]) in page.split('id="problems"')[1]


def test_an_empty_installation_has_a_first_page(boss: Client) -> None:
    page = boss.get(reverse("admin:index")).content.decode()

    assert "No node has connected yet" in page
    assert "No gateway runs." in page


def test_the_page_takes_as_many_queries_for_many_rows_as_for_few(boss: Client) -> None:
    counts = []
    make_governed()
    for first in (0, 5):
        for number in range(first, first + 5):
            make_presence(make_node(f"node {number}"))
            make_record()
            make_record(state=RequestState.QUEUED, age_s=9, model=f"model {number}")
            allow_model(name=f"unserved {number}", actor=ACTOR)
            make_record(model=f"unserved {number}", state=RequestState.FAILED)
            make_gateway(silent_s=60)
            key, _ = make_key(f"key {number}", expires_at=timezone.now() + timedelta(days=1))
            ApiKey.objects.filter(pk=key.pk).update(last_used_at=timezone.now())
        with CaptureQueriesContext(connection) as queries:
            boss.get(reverse("admin:index"))
        counts.append(len(queries))

    assert counts[0] == counts[1] <= MOST_QUERIES, counts


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
