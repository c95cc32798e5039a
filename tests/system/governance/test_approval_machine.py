"""Whatever people, workers and boxes do in whatever order: nothing runs without its quorum, or twice, and nothing revives."""

from __future__ import annotations

import contextlib
from collections import Counter
from datetime import datetime, timedelta
from typing import Any, ClassVar

import pytest
from django.db import transaction
from django.utils import timezone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from governance import services
from governance.errors import GovernanceError
from governance.models import ApproverKey, AuditEvent, Operation, OperationRun, PolicyVersion
from governance.registry import RunOrder
from governance.services.sweeps import sweep_operations
from governance.states import FINAL_APPROVALS, FINAL_RUNS, OPEN_RUNS, ApprovalState, RunEvent, RunState
from tests.system.governance.fake_box import BOX, NAME, fake_boxes, propose_load
from tests.system.governance.team import Team, make_governed

PEOPLE = st.integers(0, 3)
WHICH = st.integers(0, 5)
TARGETS = ("box-a", "box-b", "box-c")
ENDS = st.sampled_from([RunEvent.SUCCEED, RunEvent.FAIL, RunEvent.LOSE, RunEvent.RESOLVE])
OPEN = [state.value for state in OPEN_RUNS]
BEGUN = {RunState.DISPATCHED.value, RunState.EXECUTING.value, RunState.UNKNOWN.value}


class Approvals(RuleBasedStateMachine):
    """Four people, any number of operations on three boxes, workers, and a clock that may jump."""

    team: ClassVar[Team]

    def __init__(self) -> None:
        super().__init__()
        self.undo = transaction.atomic()
        self.undo.__enter__()
        self.operations: list[Operation] = []
        self.ended: dict[Any, str] = {}
        self.runs_ended: dict[Any, tuple[str, datetime | None]] = {}
        self.has_new_policy = False
        BOX.reset()
        BOX.watch = self.check_order

    def teardown(self) -> None:
        transaction.set_rollback(True)
        self.undo.__exit__(None, None, None)

    @initialize(begin_with=st.sampled_from(["one", "batch", "standing"]))
    def begin(self, begin_with: str) -> None:
        """Have something approved, so that most of what is tried finds something to work on."""
        self.ask(0, begin_with, later=False, goes_on=False)
        for who in (1, 2):
            self.approve(who, 0)

    def pick(self, which: int) -> Operation | None:
        return self.operations[which % len(self.operations)] if self.operations else None

    def pick_run(self, which: int) -> OperationRun | None:
        rows = list(OperationRun.objects.filter(operation__in=self.operations).order_by("queued_at", "position"))
        return rows[which % len(rows)] if rows else None

    # What people do

    @rule(who=PEOPLE, what=st.sampled_from(["one", "batch", "standing"]), later=st.booleans(), goes_on=st.booleans())
    def ask(self, who: int, what: str, *, later: bool, goes_on: bool) -> None:
        changes: dict[str, object] = {"not_before": timezone.now() + timedelta(hours=1) if later else None}
        if what == "standing":
            changes |= {"op_class": "standing", "max_uses": 2}
        targets = TARGETS if what == "batch" else TARGETS[:1]
        with contextlib.suppress(GovernanceError):
            self.operations.append(propose_load(self.team[who], *targets, stops_on_failure=not goes_on, **changes))

    @rule(who=PEOPLE, which=WHICH)
    def approve(self, who: int, which: int) -> None:
        if (operation := self.pick(which)) is not None:
            with contextlib.suppress(GovernanceError):
                self.team[who].approve(operation)

    @rule(who=PEOPLE, which=WHICH)
    def approve_with_the_proof_of_another(self, who: int, which: int) -> None:
        if (operation := self.pick(which)) is not None:
            proof = self.team[(who + 1) % 4].proof(operation)
            with pytest.raises(GovernanceError):
                services.approve(op_id=operation.pk, user=self.team[who].user, proof=proof, brought_by="session:x")

    @rule(who=PEOPLE, which=WHICH, how=st.sampled_from(["reject", "withdraw", "cancel"]))
    def take_back(self, who: int, which: int, how: str) -> None:
        if (operation := self.pick(which)) is not None:
            user, op_id = self.team[who].user, operation.pk
            with contextlib.suppress(GovernanceError):
                if how == "reject":
                    services.reject(op_id=op_id, user=user, comment="no")
                elif how == "withdraw":
                    services.withdraw(op_id=op_id, user=user)
                else:
                    services.cancel(op_id=op_id, proposer=self.team[who].proposer)

    @rule(who=PEOPLE, which=WHICH)
    def use(self, who: int, which: int) -> None:
        if (operation := self.pick(which)) is not None:
            with contextlib.suppress(GovernanceError):
                services.use_approval(op_id=operation.pk, proposer=self.team[who].proposer)

    @rule(who=PEOPLE)
    def lose_a_key(self, who: int) -> None:
        ApproverKey.objects.filter(user=self.team[who].user).update(revoked_at=timezone.now())
        self.work(is_late=True)

    @rule(who=PEOPLE)
    def find_it_again(self, who: int) -> None:
        ApproverKey.objects.filter(user=self.team[who].user).update(revoked_at=None)

    @rule(is_on=st.booleans())
    def freeze(self, *, is_on: bool) -> None:
        with contextlib.suppress(GovernanceError):
            if is_on:
                services.freeze(user=self.team[3].user, reason="odd")
                self.work(is_late=True)
            elif (found := services.read_freeze()) is not None:
                services.lift_freeze(named=services.name_freeze(found), operation=None)

    @precondition(lambda self: not self.has_new_policy)  # which is slow
    @rule()
    def change_the_policy(self) -> None:
        self.has_new_policy = True
        self.find_it_again(1)
        self.find_it_again(2)
        with contextlib.suppress(GovernanceError):
            change = services.draft_policy(approvers=self.team.choices(), reason="anew", proposer=self.team[0].proposer)
            self.team[1].approve(change)
            self.team[2].approve(change)
            self.work(is_late=True)

    # What time, workers and boxes do

    @rule(which=WHICH)
    def let_it_expire(self, which: int) -> None:
        if (operation := self.pick(which)) is not None:
            Operation.objects.filter(pk=operation.pk).update(expires_at=timezone.now())

    @rule(which=WHICH)
    def end_its_window(self, which: int) -> None:
        if (operation := self.pick(which)) is not None:
            Operation.objects.filter(pk=operation.pk).update(not_after=timezone.now())

    @rule()
    def sweep(self) -> None:
        sweep_operations()

    @rule(is_late=st.booleans())
    def work(self, *, is_late: bool) -> None:
        if is_late:
            OperationRun.objects.filter(ended_at=None).update(due_at=timezone.now())
        services.run_due()

    @rule(box=st.sampled_from(TARGETS), is_away=st.booleans())
    def lose_or_find_a_box(self, box: str, *, is_away: bool) -> None:
        (BOX.away.add if is_away else BOX.away.discard)(box)

    @rule(which=WHICH, event=ENDS)
    def hear_the_end(self, which: int, event: RunEvent) -> None:
        if (run := self.pick_run(which)) is not None:
            services.finish_run(run_id=run.pk, event=event)

    @rule(event=ENDS)
    def carry_one_further(self, event: RunEvent) -> None:
        self.work(is_late=True)
        begun = OperationRun.objects.filter(operation__in=self.operations, state__in=BEGUN).order_by("dispatched_at").first()
        if begun is not None:
            services.finish_run(run_id=begun.pk, event=event)
        self.work(is_late=True)

    @rule(which=WHICH)
    def hear_how_far(self, which: int) -> None:
        if (run := self.pick_run(which)) is not None:
            services.note_progress(run_id=run.pk, stage="weights", fraction=0.5, eta_s=3.0)

    @rule(which=WHICH)
    def hear_that_it_never_came(self, which: int) -> None:
        if (run := self.pick_run(which)) is not None:
            services.requeue_run(run_id=run.pk, reason="never heard of it")

    # What must hold

    @invariant()
    def everything_holds(self) -> None:
        ids = [operation.pk for operation in self.operations]
        rows = list(Operation.objects.filter(pk__in=ids).prefetch_related("runs", "decisions", "decisions__key"))
        for row in rows:
            runs = sorted(row.runs.all(), key=lambda run: (run.use, run.position))
            self.is_carried_out_one_by_one(row, runs)
            self.stays_ended(row, runs)
        assert PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).count() == 1
        events = AuditEvent.objects.filter(op_id__in=[row.printed_id for row in rows])
        told = events.filter(action__in=[f"operation.run.{state.value}" for state in FINAL_RUNS])
        assert told.count() == len(self.runs_ended)
        called_back = events.filter(action="operation.run.queued").values_list("op_id", "detail__target", "detail__use")
        sent_times = Counter((order.op_id, order.target, order.use) for order in BOX.sent)
        sent_times.subtract(Counter(called_back))
        assert not any(times > 1 for times in sent_times.values()), "sent again though nobody called it back"

    def check_order(self, order: RunOrder) -> None:
        row = OperationRun.objects.select_related("operation").get(pk=order.run_id).operation
        standing = [d for d in row.decisions.all() if d.is_approval and d.withdrawn_at is None]
        assert len({d.person_name for d in standing} - {row.requested_by}) >= 2
        is_first = all(other.op_id != order.op_id for other in BOX.sent)
        assert not (is_first and any(d.key is not None and d.key.revoked_at for d in standing))
        assert order.use <= row.max_uses
        assert services.read_freeze() is None
        assert row.policy_id == PolicyVersion.objects.get(state=PolicyVersion.State.ACTIVE).pk

    def is_carried_out_one_by_one(self, row: Operation, runs: list[OperationRun]) -> None:
        begun = [run for run in runs if run.state in BEGUN]
        assert len(begun) <= 1
        assert not begun or (row.state == ApprovalState.APPROVED.value and row.dispatched_at is not None)
        assert len({run.use for run in runs if run.state in OPEN}) <= 1
        assert not any(run.code == "approval_invalid" for run in runs), "approved did not mean approved"
        states = [run.state for run in runs if run.use == 1]
        first = next((place for place, state in enumerate(states) if state != RunState.SUCCEEDED.value), len(states))
        assert not row.stops_on_failure or set(states[first + 1 :]) <= {RunState.QUEUED.value, RunState.SKIPPED.value}

    def stays_ended(self, row: Operation, runs: list[OperationRun]) -> None:
        if ApprovalState(row.state) in FINAL_APPROVALS:
            self.ended.setdefault(row.pk, row.state)
            assert not any(run.state in OPEN for run in runs)
        assert row.state == self.ended.get(row.pk, row.state)
        people = [d.person_id for d in row.decisions.all() if d.withdrawn_at is None]
        assert len(people) == len(set(people))
        for run in runs:
            assert (run.ended_at is not None) == (RunState(run.state) in FINAL_RUNS)
            assert (run.state, run.ended_at) == self.runs_ended.get(run.pk, (run.state, run.ended_at))
            if run.ended_at is not None:
                self.runs_ended[run.pk] = (run.state, run.ended_at)


@pytest.mark.django_db
@pytest.mark.timeout(240)
def test_no_order_of_events_breaks_the_rules() -> None:
    Approvals.team = make_governed("ana", "ben", "cleo", "dan")
    with fake_boxes() as box:
        assert box.name == NAME
        run_state_machine_as_test(
            Approvals,
            settings=settings(
                max_examples=9, stateful_step_count=14, deadline=None, derandomize=True, database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
