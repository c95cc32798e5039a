"""The reconciler outside Celery: looks again and again, survives a database that is away, ends when told."""

from __future__ import annotations

import logging
import threading

import pytest
from django.db import OperationalError

from controlplane.reconciling import Reconciler
from governance import services
from governance.models import OperationRun
from governance.states import RunState
from tests.fakes.governed_team import make_governed, propose_token
from tests.fakes.limits import set_limits
from tests.fakes.waiting import wait_until

WITHIN_S = 30.0
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(autouse=True)
def patient_stop() -> None:
    """Let a look that is under way take long to end, as it does where the machine stands still."""
    set_limits(console={"reconcile_stop_s": WITHIN_S})


@pytest.mark.django_db(transaction=True)
def test_what_is_due_is_carried_out_without_any_message() -> None:
    team = make_governed()
    operation = propose_token(team[0])
    for member in team.members[1:]:
        member.approve(operation)
    reconciler = Reconciler(every_s=0.05)
    reconciler.start()
    try:
        wait_until(lambda: OperationRun.objects.filter(operation=operation, state=RunState.SUCCEEDED.value).exists())
    finally:
        assert reconciler.stop()
    assert services.run_due() == 0


def test_a_database_that_is_away_is_said_once_and_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    looks: list[bool] = []

    def look() -> int:
        looks.append(len(looks) < 3)
        if looks[-1]:
            raise OperationalError("the server closed the connection")
        return 0

    with caplog.at_level(logging.INFO, logger="controlplane.reconciling"):
        reconciler = Reconciler(look, every_s=0.01)
        reconciler.start()
        wait_until(lambda: len(looks) >= 6)
        assert reconciler.stop()
    said = [record.getMessage() for record in caplog.records if record.name == "controlplane.reconciling"]
    assert said == ["reconcile_waits reason=OperationalError", "reconcile_goes_on"]


def test_it_ends_at_once_between_two_looks_and_waits_for_the_one_under_way() -> None:
    is_looking, may_end = threading.Event(), threading.Event()

    def look() -> int:
        is_looking.set()
        may_end.wait(WITHIN_S)
        return 0

    reconciler = Reconciler(look, every_s=3600)
    reconciler.start()
    assert is_looking.wait(WITHIN_S)
    stopping = threading.Thread(target=reconciler.stop)
    stopping.start()
    assert stopping.is_alive()
    may_end.set()
    stopping.join(WITHIN_S)
    assert reconciler.stop()
    assert Reconciler(look).stop()
