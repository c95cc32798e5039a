"""One approval, several uses: numbered, one after the other, only while everything that it rests on holds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.utils import timezone

from governance import services
from governance.errors import ApprovalRefused, GovernanceError, NotPermitted, StateChanged
from governance.models import ApproverKey, Notice, Operation, OperationRun, WebhookEndpoint
from governance.services import Proposer
from governance.states import ApprovalState, RunEvent
from tests.system.governance.fake_box import FakeBox, fake_boxes, propose_load
from tests.system.governance.team import Team, make_governed
from wire.optoken.approval import verify_bundle

pytestmark = pytest.mark.django_db


@pytest.fixture
def box() -> Iterator[FakeBox]:
    with fake_boxes() as found:
        yield found


@pytest.fixture
def team() -> Team:
    return make_governed("ana", "ben", "cleo", "dan")


@pytest.fixture
def standing(box: FakeBox, team: Team) -> Operation:
    operation = propose_load(team[0], op_class="standing", max_uses=3)
    team[1].approve(operation)
    return team[2].approve(operation)


def use(team: Team, operation: Operation, *, end: RunEvent | None = RunEvent.SUCCEED) -> OperationRun:
    run = services.use_approval(op_id=operation.pk, proposer=team[0].proposer)[0]
    services.run_due()
    if end is not None:
        assert services.finish_run(run_id=run.pk, event=end)
    return run


def test_each_use_has_its_number_and_the_last_one_ends_it(box: FakeBox, team: Team, standing: Operation) -> None:
    for _ in range(3):
        use(team, standing)
    assert [order.use for order in box.sent] == [1, 2, 3]
    assert len({order.op_id for order in box.sent}) == 1
    with pytest.raises(ApprovalRefused, match="All 3 uses are spent"):
        use(team, standing)


def test_no_use_begins_while_nobody_knows_how_the_last_one_went(team: Team, standing: Operation) -> None:
    run = use(team, standing, end=RunEvent.LOSE)
    with pytest.raises(StateChanged, match="has not ended"):
        use(team, standing)
    services.finish_run(run_id=run.pk, event=RunEvent.RESOLVE)
    use(team, standing)


def test_the_requester_ends_it_between_two_uses_but_not_during_one(team: Team, standing: Operation) -> None:
    run = use(team, standing, end=None)
    with pytest.raises(StateChanged, match="on its way"):
        services.cancel(op_id=standing.pk, proposer=team[0].proposer)
    services.finish_run(run_id=run.pk, event=RunEvent.SUCCEED)
    assert services.cancel(op_id=standing.pk, proposer=team[0].proposer).state == ApprovalState.CANCELLED.value
    with pytest.raises(StateChanged):
        use(team, standing)


def test_an_approval_withdrawn_after_a_use_stops_the_next_and_the_proof_of_the_first_stays(
    team: Team, standing: Operation
) -> None:
    use(team, standing)
    assert services.withdraw(op_id=standing.pk, user=team[2].user).state == ApprovalState.PENDING.value
    with pytest.raises(StateChanged):
        use(team, standing)
    assert verify_bundle(services.read_evidence(standing.printed_id))[2].is_met
    team[2].approve(standing)
    use(team, standing)
    assert verify_bundle(services.read_evidence(standing.printed_id))[2].is_met


def test_a_revoked_key_takes_its_approval_out_before_the_next_use(team: Team, standing: Operation) -> None:
    use(team, standing)
    ApproverKey.objects.filter(user=team[1].user).update(revoked_at=timezone.now())
    with pytest.raises(ApprovalRefused, match="revoked") as refusal:
        use(team, standing)
    assert refusal.value.rule == "too_few_approvers"


def test_a_new_policy_ends_it(team: Team, standing: Operation) -> None:
    use(team, standing)
    change = services.draft_policy(approvers=team.choices(), reason="anew", proposer=team[0].proposer)
    team[1].approve(change)
    team[2].approve(change)
    services.run_due()
    with pytest.raises(GovernanceError, match="policy changed"):
        use(team, standing)


def test_its_window_bounds_it(team: Team, standing: Operation) -> None:
    use(team, standing)
    Operation.objects.filter(pk=standing.pk).update(not_after=timezone.now())
    with pytest.raises(StateChanged, match="window"):
        use(team, standing)


def test_only_those_who_may_ask_for_it_use_it(team: Team, standing: Operation) -> None:
    outsider = Team().add("mallory", is_staff=False)
    with pytest.raises(NotPermitted):
        services.use_approval(op_id=standing.pk, proposer=outsider.proposer)
    with pytest.raises(NotPermitted):
        services.use_approval(op_id=standing.pk, proposer=Proposer("ana", outsider.user.pk))


def test_people_are_told_of_every_use(team: Team, standing: Operation) -> None:
    WebhookEndpoint.objects.create(name="chat", url="https://chat.example/x", secret="s" * 32)
    use(team, standing)
    use(team, standing)
    use(team, standing, end=RunEvent.LOSE)
    assert sorted(Notice.objects.filter(operation=standing).values_list("event", flat=True)) == [
        "succeeded.1.0", "succeeded.2.0", "unknown.3.0",
    ]  # fmt: skip


def test_a_list_shows_how_the_last_use_went(team: Team, standing: Operation) -> None:
    use(team, standing, end=RunEvent.FAIL)
    use(team, standing)
    assert services.read_operation(standing.pk, team[0].user).summary.run_state == "succeeded"


def test_a_window_of_years_ahead_is_refused(box: FakeBox, team: Team) -> None:
    with pytest.raises(GovernanceError, match="30 days"):
        propose_load(team[0], not_before=timezone.now() + timedelta(days=400))
