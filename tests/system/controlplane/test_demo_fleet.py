"""``./muster demo fleet``: what it writes into an installation, once, in the product's own tables."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db.models import Sum

from controlplane.commands import Command
from controlplane.demo.fleet import MODELS, NODES, TENANTS
from controlplane.demo.scene import FILE
from core.models import User
from gateway.models import Model, RequestDay, RequestRecord, Tenant, UsageEvent
from gateway.values import Dimension
from governance.audit import check_tail
from governance.models import Operation, OperationRun
from governance.states import ApprovalState, RunState
from nodes.models import GpuTenMinutes, Node
from nodes.services.credentials import create_provider
from tests.fakes.pipeline import CHAT
from wire import clock
from wire.ids import new_uuid7
from wire.optoken.approval import decode_bytes
from wire.optoken.documents import read_receipt

pytestmark = pytest.mark.django_db(transaction=True)
WEEK = 300


@pytest.fixture(autouse=True)
def _installation() -> None:
    User.objects.create_superuser("admin", password="for tests only")
    create_provider(name="local", actor="test")
    Model.objects.create(name="muster-tiny", allowed=True)


def write(data: Path) -> None:
    call_command(Command("demo_fleet"), "--data", str(data), "--week", str(WEEK), "--write-only", stdout=StringIO())


def test_the_fleet_is_written_once_and_everything_in_it_holds(tmp_path: Path) -> None:
    write(tmp_path)
    assert Node.objects.count() == len(NODES) == 12
    assert set(Tenant.objects.values_list("name", flat=True)) >= {tenant.name for tenant in TENANTS}
    assert Model.objects.filter(allowed=True).count() == len(MODELS) + 1  # one of them no node has; the built-in one is off
    records = RequestRecord.objects.count()
    assert 0.6 * WEEK < records < 1.4 * WEEK
    assert not RequestRecord.objects.filter(finished_at__gt=clock.now()).exists()
    assert UsageEvent.objects.count() == records
    counted = RequestDay.objects.filter(dimension=Dimension.ALL).aggregate(
        *(Sum(name) for name in ("served", "refused", "failed", "cancelled"))
    )
    assert sum(counted.values()) == records
    assert GpuTenMinutes.objects.filter(temperature_c__gt=20).count() > 1_000
    assert {*Operation.objects.values_list("state", flat=True)} == {state.value for state in ApprovalState}
    assert {*OperationRun.objects.values_list("state", flat=True)} == {RunState.SUCCEEDED, RunState.FAILED, RunState.QUEUED}
    for run in OperationRun.objects.exclude(receipt=""):
        assert read_receipt(run.receipt, decode_bytes(run.receipt_key)).op_id == run.operation.printed_id
    assert check_tail().bad is None
    kept = json.loads((tmp_path / FILE).read_text(encoding="utf-8"))
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    assert kept["policy"]["version"] == 2
    write(tmp_path)  # again: it finds what it wrote
    assert RequestRecord.objects.count() == records


def test_an_installation_that_serves_somebody_is_left_alone(tmp_path: Path) -> None:
    RequestRecord.objects.create(
        created_at=clock.now(), gateway_id=new_uuid7(), tenant="research", key_id=new_uuid7(), key_name="notebook",
        endpoint=CHAT, model="muster-tiny", state="completed",
    )  # fmt: skip
    with pytest.raises(CommandError, match=r"This installation is in use \(1 requests\).*a directory of its own"):
        write(tmp_path)
    assert not Node.objects.exists()
    assert not (tmp_path / FILE).exists()
