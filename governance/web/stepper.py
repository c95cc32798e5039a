"""The stepper of an operation: from proposed to done, where it stands on each target, and what to do when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from governance.models import OperationRun
from governance.operations.queries import OperationView
from governance.registry import find_kind, make_query
from governance.states import ApprovalState, RunState


class Mark(StrEnum):
    """How a step stands. Each has a sign of its own on the page, beside its colour."""

    DONE = "done"
    NOW = "now"
    WAITS = "waits"
    WRONG = "wrong"
    UNSURE = "unsure"
    AHEAD = "ahead"


MARK_WORDS = {
    Mark.DONE: gettext_lazy("done"),
    Mark.NOW: gettext_lazy("now"),
    Mark.WAITS: gettext_lazy("waits"),
    Mark.WRONG: gettext_lazy("ended here"),
    Mark.UNSURE: gettext_lazy("not known"),
    Mark.AHEAD: gettext_lazy("to come"),
}


@dataclass(frozen=True, slots=True)
class Step:
    """One step. ``percent`` and ``left_s`` of the one that moves; None = not known."""

    label: str
    mark: Mark
    at: datetime | None = None
    text: str = ""
    percent: int | None = None
    left_s: float | None = None

    @property
    def words(self) -> str:
        """How it stands, for those who see no colours."""
        return str(MARK_WORDS[self.mark])


@dataclass(frozen=True, slots=True)
class Track:
    """The steps on one target. ``said``: the node's words; ``advice``: what to do; ``again``: query that asks for it anew."""

    target: str
    steps: Sequence[Step]
    said: str = ""
    code: str = ""
    advice: str = ""
    again: str = ""
    run: OperationRun | None = None

    @property
    def is_wrong(self) -> bool:
        return any(step.mark in {Mark.WRONG, Mark.UNSURE} for step in self.steps)


_ENDED = {
    ApprovalState.REJECTED: gettext_lazy("Rejected"),
    ApprovalState.EXPIRED: gettext_lazy("Expired"),
    ApprovalState.CANCELLED: gettext_lazy("Cancelled"),
    ApprovalState.BLOCKED: gettext_lazy("Blocked"),
}


@dataclass(frozen=True, slots=True)
class Stepper:
    """``head``: the steps that several targets have in common; of one target they stand in its track."""

    head: Sequence[Step]
    tracks: Sequence[Track]


def make_stepper(view: OperationView) -> Stepper:
    """Return the steps of the last use on each target; one track before there is any run."""
    head = [
        Step(_("Proposed"), Mark.DONE, view.summary.requested_at, _("by %(name)s") % {"name": view.summary.requested_by}),
        _judge_approval(view),
    ]
    last = max((run.use for run in view.runs), default=0)
    runs = [run for run in view.runs if run.use == last]
    is_remote = find_kind(view.summary.operation).is_remote
    if len(runs) > 1:
        return Stepper(head, [_judge_run(view, run, is_remote=is_remote) for run in runs])
    if runs:
        track = _judge_run(view, runs[0], is_remote=is_remote)
        return Stepper([], [replace(track, steps=[*head, *track.steps])])
    if head[1].mark is Mark.WRONG:
        advice = _("Propose it again if it is still wanted.")
        return Stepper([], [Track("", head, said=view.state_reason, advice=advice, again=_ask_again(view))])
    return Stepper([], [Track("", [*head, *_list_ahead(is_remote=is_remote)])])


def _judge_approval(view: OperationView) -> Step:
    summary = view.summary
    count = _("%(given)s of %(needed)s") % {"given": summary.approvals, "needed": summary.required}
    match ApprovalState(summary.state):
        case ApprovalState.PENDING:
            return Step(_("Approval"), Mark.NOW, text=count)
        case ApprovalState.APPROVED:
            return Step(_("Approved"), Mark.DONE, view.decided_at, count)
        case ended:
            is_past = bool(view.runs) and any(run.dispatched_at for run in view.runs)
            label = _("Approved") if is_past else str(_ENDED[ended])
            return Step(label, Mark.DONE if is_past else Mark.WRONG, view.decided_at, count)


def _list_ahead(*, is_remote: bool) -> list[Step]:
    labels = [_("Sent"), _("Accepted"), _("Carried out")] if is_remote else []
    return [Step(label, Mark.AHEAD) for label in [*labels, _("Done")]]


def _judge_run(view: OperationView, run: OperationRun, *, is_remote: bool) -> Track:
    steps, advice = _list_steps(run, is_remote=is_remote)
    has_stopped = RunState(run.state) in {RunState.FAILED, RunState.SKIPPED, RunState.RESOLVED}
    return Track(
        target=run.target, steps=steps, said=run.message, code=run.code, advice=advice,
        again=_ask_again(view, run) if has_stopped else "", run=run,
    )  # fmt: skip


def _list_steps(run: OperationRun, *, is_remote: bool) -> tuple[list[Step], str]:
    """Return the steps after the approval, and what to do now."""
    state, has_begun = RunState(run.state), bool(run.stage or run.fraction is not None)
    done = [Step(_("Done"), Mark.AHEAD)]
    if not is_remote:
        return _list_local_steps(run)
    sent, accepted = Step(_("Sent"), Mark.DONE, run.dispatched_at), Step(_("Accepted"), Mark.DONE)
    work = Step(_("Carried out"), Mark.DONE)
    match state:
        case RunState.QUEUED:
            waiting = Step(_("Sent"), Mark.WAITS, text=run.message or _("waits for its turn"))
            return [waiting, *_list_ahead(is_remote=True)[1:]], ""
        case RunState.DISPATCHED:
            asked = Step(_("Accepted"), Mark.NOW, text=_("the node has not answered yet"))
            return [sent, asked, *_list_ahead(is_remote=True)[2:]], ""
        case RunState.EXECUTING:
            moving = Step(_name_stage(run), Mark.NOW, percent=run.percent, left_s=run.eta_s)
            return [sent, accepted, moving, *done], ""
        case RunState.SUCCEEDED:
            receipt = _("with the node's receipt") if run.receipt else ""
            return [sent, accepted, work, Step(_("Done"), Mark.DONE, run.ended_at, receipt)], ""
        case RunState.UNKNOWN:
            lost = Step(_name_stage(run), Mark.UNSURE, text=_("the node was cut off"))
            advice = _("Wait for the node: when it is back it says what it has, and this page shows it. Nothing is sent twice.")
            return [sent, accepted, lost, *done], advice
        case RunState.RESOLVED:
            looked = Step(_("Looked up"), Mark.UNSURE, run.ended_at)
            return [sent, accepted, looked], _("Look at what the node has now. Propose it again if that is not what you want.")
        case RunState.SKIPPED:
            return [Step(_("Skipped"), Mark.WRONG, run.ended_at)], _("Nothing was sent to this node.")
        case RunState.FAILED:
            return _list_failed(run, sent=sent, accepted=accepted, has_begun=has_begun), _advise(run, has_begun=has_begun)


def _list_local_steps(run: OperationRun) -> tuple[list[Step], str]:
    match RunState(run.state):
        case RunState.SUCCEEDED:
            return [Step(_("Done"), Mark.DONE, run.ended_at)], ""
        case RunState.FAILED | RunState.SKIPPED | RunState.RESOLVED:
            return [Step(_("Failed"), Mark.WRONG, run.ended_at)], _("Mend what the words below name, then propose it again.")
        case _:
            return [Step(_("Done"), Mark.WAITS, text=run.message)], ""


def _list_failed(run: OperationRun, *, sent: Step, accepted: Step, has_begun: bool) -> list[Step]:
    if run.dispatched_at is None:
        return [Step(_("Not sent"), Mark.WRONG, run.ended_at)]
    if not has_begun:
        return [sent, Step(_("Refused by the node"), Mark.WRONG, run.ended_at)]
    return [sent, accepted, Step(_("Failed: %(stage)s") % {"stage": _name_stage(run)}, Mark.WRONG, run.ended_at)]


def _advise(run: OperationRun, *, has_begun: bool) -> str:
    if run.code == "approval_invalid":
        return _("Somebody may have changed the database. Look at the audit log before you propose it again.")
    if run.code == "receipt_invalid":
        return _("Do not trust this node's answer. Look at its page and at the audit log.")
    if has_begun:
        return _("Nothing else was changed. Mend what the node names, then propose it again: what was approved is spent.")
    return _("The node changed nothing. Mend what it names, then propose it again: what was approved is spent.")


def _name_stage(run: OperationRun) -> str:
    """Return what the node says that it does, in its own words."""
    if run.stage == "begun":
        return _("Started")
    return run.stage[:1].upper() + run.stage[1:] if run.stage else _("Carried out")


def _ask_again(view: OperationView, run: OperationRun | None = None) -> str:
    """Return the query of the page that proposes; "" for a policy, which is drafted."""
    operation = view.summary.operation
    if operation in {"policy-change", "unfreeze"}:
        return ""
    targets = [run.target] if run is not None else list(map(str, _as_list(view.statement["targets"])))
    params = view.statement["params"]
    return make_query(operation, targets, params if isinstance(params, dict) else {}, op_class=view.summary.op_class)


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
