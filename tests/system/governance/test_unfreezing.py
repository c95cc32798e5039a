"""Lifting a freeze: the one that people signed, and no other."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest

from governance import services
from governance.errors import InvalidProposal
from governance.models import Freeze, Operation, OperationRun
from governance.registry import find_kind
from governance.states import RunState
from tests.system.governance.team import Team, make_governed
from wire.optoken.approval import canonical, read_statement

pytestmark = pytest.mark.django_db


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo", "dan")


def ask(team: Team, **params: object) -> Operation:
    asked = {"operation": "unfreeze", "targets": ["control-plane"], "params": params, "reason": "all is well"}
    return services.propose(**asked, proposer=team[0].proposer)  # type: ignore[arg-type]


def carry_out(team: Team, operation: Operation) -> OperationRun:
    team[1].approve(operation)
    team[2].approve(operation)
    services.run_due()
    return OperationRun.objects.get(operation=operation)


def freeze(team: Team, reason: str) -> Freeze:
    return services.freeze(user=team[3].user, reason=reason)


def test_what_is_signed_names_the_freeze_that_it_ends(team: Team) -> None:
    row = freeze(team, "one")
    operation = ask(team)
    signed = read_statement(bytes(operation.statement)).params
    assert signed == {"freeze": row.pk, "frozenBy": "dan", "frozenAt": int(row.frozen_at.timestamp())}
    told = find_kind("unfreeze").describe(["control-plane"], signed)
    assert "dan" in told.lines[0].value
    assert told.lines[0].now == "in force"
    assert carry_out(team, operation).state == RunState.SUCCEEDED.value
    assert Freeze.objects.get(pk=row.pk).lifted_by == operation


def test_what_was_signed_for_one_freeze_does_not_end_a_later_one(team: Team) -> None:
    freeze(team, "one")
    one, other = ask(team), ask(team)
    carry_out(team, one)
    assert services.read_freeze() is None
    later = freeze(team, "two")
    Freeze.objects.filter(pk=later.pk).update(frozen_at=other.requested_at - timedelta(seconds=5))  # a clock that was wrong
    assert (
        "another one, by dan" in find_kind("unfreeze").describe([], read_statement(bytes(other.statement)).params).lines[0].now
    )
    run = carry_out(team, other)
    assert (run.state, run.code) == (RunState.FAILED.value, "state_changed")
    assert "ask for unfreeze again" in run.message
    assert services.read_freeze() == later


def test_a_number_that_a_restored_database_gives_again_is_another_freeze(team: Team) -> None:
    row = freeze(team, "one")
    operation = ask(team)
    Freeze.objects.filter(pk=row.pk).update(frozen_by="cleo")
    assert carry_out(team, operation).state == RunState.FAILED.value
    assert services.read_freeze() is not None


def test_what_was_signed_before_freezes_were_named_ends_none(team: Team) -> None:
    freeze(team, "one")
    operation = ask(team)
    statement = read_statement(canonical(json.loads(bytes(operation.statement)) | {"params": {}}))
    Operation.objects.filter(pk=operation.pk).update(statement=statement.raw, digest=statement.digest.hex())
    operation.refresh_from_db()
    run = carry_out(team, operation)
    assert run.state == RunState.FAILED.value
    assert "names no freeze" in run.message
    assert services.read_freeze() is not None


def test_a_freeze_that_has_ended_is_not_lifted_twice(team: Team) -> None:
    freeze(team, "one")
    one, other = ask(team), ask(team)
    carry_out(team, one)
    assert "not frozen any more" in carry_out(team, other).message


def test_nobody_asks_to_lift_another_freeze_than_the_one_in_force(team: Team) -> None:
    row = freeze(team, "one")
    assert ask(team, freeze=row.pk).digest
    with pytest.raises(InvalidProposal, match=f"freeze {row.pk}, by dan") as refusal:
        ask(team, freeze=row.pk + 1)
    assert refusal.value.param == "freeze"
