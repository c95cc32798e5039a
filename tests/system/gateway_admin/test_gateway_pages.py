"""The page of the gateway processes."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models.functions import Now
from django.test import Client
from django.urls import reverse

from gateway.models import GatewayProcess
from tests.fakes.clock import shift_clock
from tests.system.gateway_admin.test_pages import boss

__all__ = ["boss"]

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize("off_s", [-3600, 3600], ids=["behind", "ahead"])
def test_whether_a_gateway_serves_does_not_depend_on_the_clock_of_the_page(
    boss: Client, monkeypatch: pytest.MonkeyPatch, off_s: int
) -> None:
    for host, silent_s in (("alive", 0), ("silent", 60)):
        GatewayProcess.objects.create(host=host, pid=1, heartbeat_at=Now() - timedelta(seconds=silent_s))
    shift_clock(monkeypatch, off_s)
    page = boss.get(reverse("admin:gateway_gatewayprocess_changelist")).content.decode()
    rows = {host: page.split(f">{host}<")[1].split("</tr>")[0] for host in ("alive", "silent")}
    assert "serving" in rows["alive"]
    assert "lost" in rows["silent"]
