"""Break-glass and its review: by people who neither asked for it, nor signed it, nor began it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
from django.utils import timezone

from governance import services
from governance.errors import ApprovalRefused, InvalidProposal, NotPermitted
from governance.models import ApproverKey, Decision, Operation, OperationRun
from governance.services.reviews import REVIEW, list_unreviewed
from governance.services.sweeps import sweep_operations
from governance.states import RunState
from tests.fakes.governed_nodes import FakeBox, fake_boxes, propose_load
from tests.fakes.governed_team import Member, Team, make_due, make_key
from tests.fakes.passkeys import SoftPasskey
from wire.optoken.approval import BREAK_GLASS
from wire.optoken.proposal import DEFAULT_CLASSES

pytestmark = pytest.mark.django_db
ANA, BEN, CLEO, DAN, EVE = range(5)


@pytest.fixture
def box() -> Iterator[FakeBox]:
    with fake_boxes() as found:
        found.local.add("box-a")
        yield found


def make_emergency(*names: str, **policy: object) -> tuple[Team, SoftPasskey]:
    """People of whom the second and the third have a key for break-glass, and the key of the second."""
    team = Team()
    for name in names:
        team.add(name)
    keys = [make_key(member.user, is_break_glass=True)[0] for member in team.members[1:3]]
    team.start(**policy)
    return team, keys[0]


def break_glass(team: Team, key: SoftPasskey, target: str) -> Operation:
    """What the first asked for and the second signed."""
    asked = propose_load(team[ANA], target, op_class=BREAK_GLASS)
    proof = key.sign(bytes.fromhex(asked.digest), approver=team[BEN].name)
    return services.approve(op_id=asked.pk, user=team[BEN].user, proof=proof, brought_by="session:ben")


def use_break_glass(*names: str, **policy: object) -> tuple[Team, Operation]:
    """People of an emergency, and what has been carried out in it."""
    team, key = make_emergency(*names, **policy)
    used = break_glass(team, key, "box-a")
    services.run_due()
    assert OperationRun.objects.get(operation=used).state == RunState.SUCCEEDED.value
    return team, used


def review(member: Member, used: Operation, **changes: object) -> Operation:
    asked: dict[str, object] = {
        "operation": REVIEW, "targets": [used.printed_id], "params": {}, "reason": "looked at", "proposer": member.proposer,
    }  # fmt: skip
    return services.propose(**(asked | changes))  # type: ignore[arg-type]


@pytest.fixture
def emergency(box: FakeBox) -> tuple[Team, Operation]:
    return use_break_glass("ana", "ben", "cleo", "dan", "eve")


@pytest.mark.parametrize("who", [ANA, BEN, CLEO], ids=["asked for it", "signed it", "began a use of it"])
def test_whoever_used_it_does_not_review_it(emergency: tuple[Team, Operation], who: int) -> None:
    team, used = emergency
    if who == CLEO:
        OperationRun.objects.filter(operation=used).update(started_by="cleo")
    asked = review(team[ANA if who == CLEO else EVE], used)
    with pytest.raises(ApprovalRefused, match="somebody else") as refusal:
        team[who].approve(asked)
    assert refusal.value.rule == "reviewer_used_it"
    view = services.read_operation(asked.pk, team[who].user)
    assert "approve" not in view.actions
    assert "somebody else" in view.hindrances["approve"]
    assert "approve" in services.read_operation(asked.pk, team[DAN].user).actions


def test_a_review_that_too_few_could_sign_is_refused_with_what_would_help(box: FakeBox) -> None:
    team, used = use_break_glass("ana", "ben", "cleo")
    with pytest.raises(InvalidProposal, match=r"2 approvers who did not use it.* leaves cleo.*change of the policy") as refusal:
        review(team[ANA], used)
    assert refusal.value.param == "targets"
    team.add("dan")
    change = services.draft_policy(approvers=team.choices(), reason="a reviewer more", proposer=team[ANA].proposer)
    for member in (team[BEN], team[CLEO]):
        member.approve(change)
    services.run_due()
    with pytest.raises(InvalidProposal, match="leaves cleo"):
        review(team[3], used)  # whoever asks for the review cannot sign it
    asked = review(team[BEN], used)
    team[CLEO].approve(asked)
    team[3].approve(asked)
    services.run_due()
    assert not list_unreviewed().exists()


def test_a_signature_of_a_user_that_is_stored_all_the_same_closes_nothing(emergency: tuple[Team, Operation]) -> None:
    team, used = emergency
    asked = review(team[EVE], used)
    Decision.objects.create(
        operation=asked, person=team[BEN].user, person_name="ben", is_approval=True, proof=team[BEN].proof(asked),
        key=ApproverKey.objects.get(user=team[BEN].user, is_break_glass=False),
    )  # fmt: skip
    team[CLEO].approve(asked)
    services.run_due()
    run = OperationRun.objects.get(operation=asked)
    assert run.state == RunState.FAILED.value
    assert "ben used" in run.message
    assert list_unreviewed().get() == used


def test_a_review_closes_only_what_its_signers_read(emergency: tuple[Team, Operation]) -> None:
    team, used = emergency
    asked = review(team[EVE], used)
    other = propose_load(team[ANA], "box-b")
    team[CLEO].approve(asked)
    team[DAN].approve(asked)
    Operation.objects.filter(pk=asked.pk).update(reviews=other)
    services.run_due()
    assert OperationRun.objects.get(operation=asked).state == RunState.FAILED.value
    assert list_unreviewed().get() == used


def test_break_glass_is_asked_for_use_by_use_whatever_the_policy_allows(box: FakeBox) -> None:
    classes = {**DEFAULT_CLASSES, BREAK_GLASS: {**DEFAULT_CLASSES[BREAK_GLASS], "maxUses": 3}}
    team = Team()
    for name in ("ana", "ben", "cleo"):
        team.add(name)
    for member in team.members[1:]:
        make_key(member.user, is_break_glass=True)
    team.start(classes=classes)
    with pytest.raises(InvalidProposal, match="used once") as refusal:
        propose_load(team[ANA], "box-a", op_class=BREAK_GLASS, max_uses=2)
    assert refusal.value.param == "max_uses"
    assert propose_load(team[ANA], "box-a", op_class=BREAK_GLASS).max_uses == 1


def test_of_two_approved_break_glass_operations_the_second_waits_for_the_review_of_the_first(box: FakeBox) -> None:
    team, key = make_emergency("ana", "ben", "cleo", "dan")
    first, second = break_glass(team, key, "box-a"), break_glass(team, key, "box-b")
    services.run_due()
    make_due(second)
    services.run_due()
    assert [order.target for order in box.sent] == ["box-a"]
    assert "has not been reviewed" in OperationRun.objects.get(operation=second).message
    with pytest.raises(NotPermitted, match="propose its review first"):
        propose_load(team[0], "box-c", op_class="break-glass")
    looked_at = review(team[ANA], first)
    team[2].approve(looked_at)
    team[3].approve(looked_at)
    services.run_due()
    make_due(second)
    services.run_due()
    assert [order.target for order in box.sent] == ["box-a", "box-b"]


def test_a_review_of_one_use_does_not_close_another(emergency: tuple[Team, Operation]) -> None:
    team, first = emergency
    unused = propose_load(team[0], "box-b")
    with pytest.raises(InvalidProposal, match="same operation"):
        review(team[ANA], first, reviews=unused.pk)
    found = review(team[ANA], first, reviews=None)
    assert found.reviews_id == first.pk


def test_a_review_that_was_only_asked_for_is_reminded_of(emergency: tuple[Team, Operation]) -> None:
    team, first = emergency
    review(team[ANA], first)
    Operation.objects.filter(pk=first.pk).update(dispatched_at=timezone.now() - timedelta(hours=25))
    sweep_operations()
    assert Operation.objects.get(pk=first.pk).warned_percent == 100
