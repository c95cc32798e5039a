"""A process that is killed while it appends to the audit log."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from pytest_django import Settings

from governance.models import AuditEvent
from tests.fakes.waiting import wait_until
from tests.system.governance.audit_rows import (
    LOG_KEY,
    database_url,
    judge,
    raw_connection,
    sizes,
)
from wire.auditlog import Status

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def log_key(settings: Settings) -> None:
    settings.GOVERNANCE_LOG_KEY = LOG_KEY


def test_a_process_killed_while_it_appends_leaves_a_whole_chain() -> None:
    command = [sys.executable, "-m", "tests.fakes.audit_process"]
    name = f"killed {os.getpid()}"
    environment = {**os.environ, "DATABASE_URL": database_url(), "DJANGO_SETTINGS_MODULE": "controlplane.settings"}
    environment["PGAPPNAME"] = name
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = 0
        try:
            while told < 40:
                told = int(process.stdout.readline())
            assert count_backends(name) == 1
        finally:
            process.kill()
        process.wait(10)
    wait_until(lambda: count_backends(name) == 0, what="the server is through with what the process had begun")
    verdict = judge()
    assert verdict.status is Status.GOOD
    assert verdict.size == AuditEvent.objects.count() >= told
    assert sizes() == list(range(1, verdict.size + 1))


def count_backends(name: str) -> int:
    """Return how many connections of the program ``name`` the server knows."""
    with raw_connection() as session:
        found = session.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", [name]).fetchone()
        assert found is not None
        return int(str(found[0]))
