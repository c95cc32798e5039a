"""``GET /metrics`` of the control plane: who may read it, what it says of work, and what is left when parts are away."""

from __future__ import annotations

import io
import json
import logging
from datetime import timedelta
from typing import Any, cast

import pytest
from django.core.asgi import get_asgi_application
from django.db import OperationalError
from httpx import ASGITransport, AsyncClient
from prometheus_client.parser import text_string_to_metric_families
from pytest_django import Settings

from controlplane import metrics
from governance.admin_tokens import Grant, create_admin_token
from governance.models import AuditCheckpoint
from tests.fakes.control_process import free_port
from wire import RELEASE, clock
from wire.logs import make_formatter

pytestmark = pytest.mark.django_db(transaction=True)


def connect(address: str = "127.0.0.1") -> AsyncClient:
    transport = ASGITransport(app=cast("Any", get_asgi_application()), client=(address, 5))
    return AsyncClient(transport=transport, base_url="http://localhost")


async def read(client: AsyncClient, **headers: str) -> tuple[int, dict[str, float]]:
    answer = await client.get("/metrics", headers=headers)
    families = text_string_to_metric_families(answer.text) if answer.status_code == 200 else ()
    return answer.status_code, {
        "".join([sample.name, *(f",{value}" for value in sample.labels.values())]): sample.value
        for family in families
        for sample in family.samples
    }


@pytest.fixture(autouse=True)
def _any_host(settings: Settings) -> None:
    settings.ALLOWED_HOSTS = ["*"]


@pytest.fixture
def token() -> str:
    return create_admin_token(name="prometheus", actor="test")[1]


@pytest.fixture
def of_tenant() -> str:
    return create_admin_token(name="tenant", actor="test", grant=Grant(role="tenant-viewer", tenant="default"))[1]


async def test_only_this_machine_reads_them_without_a_token_and_nobody_where_that_is_set(
    token: str, of_tenant: str, settings: Settings
) -> None:
    client = connect()
    assert (await read(client))[0] == 200
    for passed_on in ({"x-forwarded-for": "203.0.113.9"}, {"via": "1.1 proxy"}, {"host": "muster.example.com"}):
        assert (await read(client, **passed_on))[0] == 403, passed_on
        assert (await read(client, **passed_on, authorization=f"Bearer {token}"))[0] == 200
    assert (await read(connect("10.0.0.5")))[0] == 403
    settings.METRICS_REQUIRE_TOKEN = True
    assert (await read(client, authorization=f"Bearer {of_tenant}"))[0] == 403
    assert (await read(client))[0] == 403
    assert (await read(client, authorization="Bearer msa_nonsense"))[0] == 403
    assert (await read(client, authorization=f"Bearer {token}"))[0] == 200


async def test_the_age_of_checkpoints_and_entries_that_none_covers_are_told(token: str) -> None:
    del token  # made an entry
    client = connect()
    _, before = await read(client)
    assert "muster_audit_checkpoint_age_seconds" not in before
    assert before["muster_audit_unsigned_entries"] == before["muster_audit_entries"] > 0
    made = {"root": b"r" * 32, "frontier": b"", "note": "", "made_at": clock.now() - timedelta(seconds=90)}
    await AuditCheckpoint.objects.acreate(size=int(before["muster_audit_entries"]) - 1, **made)
    _, after = await read(client)
    assert 90 <= after["muster_audit_checkpoint_age_seconds"] < 150
    assert after["muster_audit_unsigned_entries"] == 1
    assert (after["muster_database_up"], after["muster_valkey_up"]) == (1, 1)
    assert after["muster_control_requests_total,GET,other,200"] >= 1


async def test_what_is_away_is_said_and_the_rest_is_told_all_the_same(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> object:
        raise OperationalError("the database is away")

    settings.REDIS_URL = f"redis://127.0.0.1:{free_port()}/0"
    monkeypatch.setattr(metrics, "read_figures", fail)
    status, told = await read(connect())
    assert (status, told["muster_database_up"], told["muster_valkey_up"]) == (200, 0, 0)
    assert told[f"muster_build_info,control,{RELEASE}"] == 1
    assert not [name for name in told if name.startswith(("muster_operation", "muster_tasks"))]


async def test_a_line_about_a_request_names_its_route_and_never_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    log, written = logging.getLogger("governance.tests"), io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(make_formatter("json", is_terminal=False))

    def look() -> object:
        log.warning("looked")
        raise OperationalError

    monkeypatch.setattr(metrics, "read_figures", look)
    log.addHandler(handler)
    await read(connect())
    log.removeHandler(handler)
    (line,) = [json.loads(line) for line in written.getvalue().splitlines()]
    assert (line["event"], line["method"], line["route"], "path" in line) == ("looked", "GET", "metrics", False)
