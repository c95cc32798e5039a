"""What pages and APIs show of operations. Reads only."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple

from django.db.models import Count, Exists, Max, Min, OuterRef, Q, QuerySet
from django.utils.translation import gettext as _

from core.limits import limits
from governance.errors import NotFound, UnknownOperation
from governance.models import AdminToken, ApproverKey, Decision, Operation, OperationRun
from governance.operations.approvals import (
    explain_own_review,
    find_new_policy,
    find_operation,
    is_current,
    list_lasting_approvals,
    list_lasting_proofs,
    list_proofs,
    policy_chain,
    read_freeze,
)
from governance.registry import Asked, Brief, Description, FindsUndone, Impact, Line, SumsUp, Undone, find_kind
from governance.states import OPEN_RUNS, ApprovalState, RunState
from wire import clock
from wire.ids import parse_id
from wire.optoken.approval import (
    ApprovalError,
    Policy,
    Statement,
    Verdict,
    digest_words,
    encode_bytes,
    judge,
    read_canonical,
    select_proofs,
)

if TYPE_CHECKING:
    from core.models import User

# Which of several run states stands for all of them: the first that occurs.
_RUN_ORDER = [
    RunState.UNKNOWN, RunState.EXECUTING, RunState.DISPATCHED, RunState.QUEUED, RunState.FAILED, RunState.RESOLVED,
    RunState.SKIPPED, RunState.SUCCEEDED,
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class OperationFigures:
    """Operations in numbers. ``waiting``: by the state of those whose approval is not final; ``runs``: of all ever, by state.

    ``pending_since``, ``open_since``: since when the oldest one waits for approvals, and the oldest run has not ended.
    """

    waiting: Mapping[str, int]
    runs: Mapping[str, int]
    pending_since: datetime | None
    open_since: datetime | None


def read_figures() -> OperationFigures:
    """Return operations in numbers, in four queries over indexed states."""
    waiting = Operation.objects.filter(state__in=[ApprovalState.PENDING, ApprovalState.APPROVED], expires_at__gt=clock.now())
    runs = OperationRun.objects.order_by()
    return OperationFigures(
        waiting=dict(waiting.order_by().values_list("state").annotate(Count("pk"))),
        runs=dict(runs.values_list("state").annotate(Count("pk"))),
        pending_since=waiting.filter(state=ApprovalState.PENDING).aggregate(Min("requested_at"))["requested_at__min"],
        open_since=runs.filter(state__in=OPEN_RUNS).aggregate(Min("queued_at"))["queued_at__min"],
    )


@dataclass(frozen=True, slots=True)
class OperationSummary:
    """One line of a list. ``run_state``: the least finished state of its runs, "" before there are any; ``percent`` of them.

    ``impact``: what it would mean now in a few words; "" = not asked for, or nothing to say.
    """

    id: uuid.UUID
    printed_id: str
    title: str
    operation: str
    op_class: str
    state: str
    run_state: str
    requested_by: str
    requested_at: datetime
    expires_at: datetime
    not_after: datetime
    approvals: int
    required: int
    percent: int | None
    is_solo: bool
    is_break_glass: bool
    is_standing: bool
    approved_by: tuple[str, ...]
    impact: str

    @property
    def missing(self) -> range:
        """One number for each approval that is missing at least."""
        return range(max(0, self.required - self.approvals))


@dataclass(frozen=True, slots=True)
class DecisionView:
    """What one person said. ``thumbprint``, the key fields and ``brought_by`` are empty for a rejection, which nobody signs."""

    person: str
    is_approval: bool
    key_label: str
    key_kind: str
    thumbprint: str
    brought_by: str
    comment: str
    at: datetime
    withdrawn_at: datetime | None
    proof: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class OperationView:
    """Everything about one operation, for one viewer.

    ``statement``: its parsed members; ``statement_b64``: the signed bytes in base64url. ``actions``: what the viewer may do,
    of approve, reject, withdraw, cancel, use, claim; ``hindrances``: action → why not, in one sentence. ``assertion``: WebAuthn
    request options for the viewer's passkeys that the policy names, None when there are none; the challenge is the digest.
    ``could_approve``: who has not approved and may; ``groups``: of each approver. ``undone``: what the operation has brought
    about and that is not so any more.
    """

    summary: OperationSummary
    description: Description
    impacts: Sequence[Impact]
    statement: Mapping[str, object]
    statement_b64: str
    digest: str
    words: str
    reason: str
    policy_version: int
    policy_sha256: str
    not_before: datetime
    max_uses: int
    uses: int
    verdict: Verdict | None
    decisions: Sequence[DecisionView]
    runs: Sequence[OperationRun]
    state_reason: str
    decided_at: datetime | None
    actions: frozenset[str]
    hindrances: Mapping[str, str]
    assertion: Mapping[str, object] | None
    is_frozen: bool
    could_approve: Sequence[str]
    groups: Mapping[str, frozenset[str]]
    undone: Sequence[Undone] = ()


@dataclass(frozen=True, slots=True)
class RunOnNode:
    """A carrying-out on one node, for that node's page. ``op_id``: the operation's, printed; ``ended_at`` None = it runs.

    ``model``: what it is about, empty = no model, or nobody can read what was signed.
    """

    op_id: str
    operation: str
    model: str
    state: RunState
    percent: int | None
    code: str
    message: str
    started_by: str
    queued_at: datetime
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class Inbox:
    """What a person sees first."""

    to_approve: Sequence[OperationSummary]
    mine: Sequence[OperationSummary]
    others: Sequence[OperationSummary]


def read_inbox(user: User) -> Inbox:
    """Return what waits for this person, what they asked for, and what others have open or had within two days."""
    name, now = user.get_username(), clock.now()
    # Two pages, so that however much is done in two days, nothing that waits drops off the list.
    pending = Q(state=ApprovalState.PENDING.value)
    has_open_run = Exists(OperationRun.objects.filter(operation=OuterRef("pk"), ended_at=None))
    is_usable = Q(state=ApprovalState.APPROVED.value, not_after__gt=now) & (Q(dispatched_at=None) | Q(max_uses__gt=1))
    shown = has_open_run | is_usable | Q(decided_at__gte=now - timedelta(seconds=limits().governance.page_recent_s))
    waiting = _list_newest(Operation.objects.filter(pending), limits().governance.page_rows)
    rows = [*waiting, *_list_newest(Operation.objects.filter(shown).exclude(pending), limits().governance.page_rows)]
    to_approve, mine, others = [], [], []
    for operation, summary in zip(rows, summarise_all(rows), strict=True):
        if operation.requested_by == name:
            mine.append(summary)
        elif operation.state == ApprovalState.PENDING.value and _may_decide(operation, name):
            to_approve.append(summary)
        else:
            others.append(summary)
    return Inbox(to_approve, mine, others)


def read_history(*, before: datetime | None, limit: int) -> list[OperationSummary]:
    """Return operations by the time they were asked for, newest first, from before a time."""
    rows = Operation.objects.all() if before is None else Operation.objects.filter(requested_at__lt=before)
    return summarise_all(_list_newest(rows, limit))


def count_open() -> dict[str, int]:
    """Return how many operations wait for approvals and how many runs are not over, by state; two queries."""
    counted = {f"approval {ApprovalState.PENDING}": Operation.objects.filter(state=ApprovalState.PENDING.value).count()}
    rows = OperationRun.objects.filter(state__in=OPEN_RUNS).values_list("state").annotate(runs=Count("pk"))
    return counted | {f"run {state}": count for state, count in sorted(rows)}


@dataclass(frozen=True, slots=True)
class Underway:
    """An operation that waits, runs or has ended just now, for the page of what it is about. ``asked``: people who may still
    sign; ``params``: what is signed. ``runs``: of its last use.
    """

    summary: OperationSummary
    params: Mapping[str, object]
    asked: tuple[str, ...]
    runs: tuple[OperationRun, ...]


def list_underway(operation: str, *, recent_s: float) -> list[Underway]:
    """Return what is open of a kind of operation, or has ended within ``recent_s``, newest first; three queries."""
    now = clock.now()
    runs = OperationRun.objects.filter(operation=OuterRef("pk"))
    is_open = Exists(runs.filter(ended_at=None)) | Exists(runs.filter(ended_at__gte=now - timedelta(seconds=recent_s)))
    waits = Q(state=ApprovalState.PENDING.value, expires_at__gt=now)
    is_usable = Q(state=ApprovalState.APPROVED.value, dispatched_at=None, not_after__gt=now)
    rows = Operation.objects.filter(waits | is_usable | is_open, operation=operation)
    found = []
    for row in _list_newest(rows, limits().governance.page_rows):
        with contextlib.suppress(ApprovalError):  # one that was changed in the database is about nothing
            is_pending = row.state == ApprovalState.PENDING.value
            people = sorted(row.policy.read_policy().groups) if is_pending else ()
            asked = tuple(name for name in people if name != row.requested_by and _may_decide(row, name))
            last = max((run.use for run in row.runs.all()), default=0)
            own = tuple(run for run in row.runs.all() if run.use == last)
            found.append(Underway(summarise(row), row.read_statement().params, asked, own))
    return found


def list_open_runs(node_id: uuid.UUID) -> list[RunOnNode]:
    """Return what a node is given to carry out now; one query."""
    return _list_runs(OperationRun.objects.filter(node_id=node_id, ended_at=None))


def list_runs_of_node(node_id: uuid.UUID, *, before: datetime | None, most: int) -> list[RunOnNode]:
    """Return what a node was given to carry out, the newest first, from before a time; one query."""
    runs = OperationRun.objects.filter(node_id=node_id)
    runs = runs if before is None else runs.filter(queued_at__lt=before)
    return _list_runs(runs.order_by("-queued_at")[:most])


def _list_runs(runs: QuerySet[OperationRun]) -> list[RunOnNode]:
    return [
        RunOnNode(
            run.operation.printed_id, run.operation.operation, _model_of(run.operation), RunState(run.state), run.percent,
            run.code, run.message, run.started_by, run.queued_at, run.ended_at,
        )
        for run in runs.select_related("operation")
    ]  # fmt: skip


def _model_of(operation: Operation) -> str:
    try:
        return str(operation.read_statement().params.get("modelId") or "")
    except ApprovalError:
        return ""


def count_waiting_for(user: User) -> int:
    """Return how many operations wait for this person. One query: every page asks."""
    return len(_find_waiting_for(user))


def list_waiting_for(user: User) -> list[OperationSummary]:
    """Return the operations that wait for this person, the oldest first."""
    ids = [operation.pk for operation in _find_waiting_for(user)]
    return summarise_all(list(with_parts(Operation.objects.filter(pk__in=ids)).order_by("requested_at"))) if ids else []


class PendingMark(NamedTuple):
    """Another one whenever what waits for somebody may be another. ``operations``: how many are undecided."""

    operations: int
    newest: datetime | None
    decisions: int


def mark_pending() -> PendingMark:
    """Return how what waits for people stands; one query."""
    pending = Operation.objects.filter(state=ApprovalState.PENDING.value, expires_at__gt=clock.now())
    return PendingMark(
        **pending.aggregate(
            operations=Count("pk", distinct=True),
            newest=Max("requested_at"),
            decisions=Count("decisions", filter=Q(decisions__withdrawn_at=None)),
        )
    )


def _find_waiting_for(user: User) -> list[Operation]:
    name = user.get_username()
    decided = Decision.objects.filter(operation=OuterRef("pk"), person_name=name, withdrawn_at=None)
    pending = Operation.objects.filter(state=ApprovalState.PENDING.value, expires_at__gt=clock.now())
    others = pending.exclude(Exists(decided)).exclude(requested_by=name).select_related("policy", "adopts")
    newest = others.order_by("-requested_at")[: limits().governance.page_rows]
    return [operation for operation in newest if _is_named(operation, name)]


def read_operation(op_id: uuid.UUID, user: User | None) -> OperationView:
    """Return everything about an operation, with what ``user`` may do to it now. Raises NotFound."""
    operation = find_operation(op_id)
    statement, policy = operation.read_statement(), operation.policy.read_policy()
    actions, hindrances = _find_actions(operation, statement, policy, user)
    return OperationView(
        summary=summarise(operation),
        description=_describe(operation, statement),
        impacts=_preview(operation, statement),
        statement=read_canonical(statement.raw, limit=len(statement.raw)),
        statement_b64=encode_bytes(statement.raw),
        digest=statement.digest.hex(),
        words=digest_words(statement.digest),
        reason=operation.reason,
        policy_version=statement.policy.version,
        policy_sha256=statement.policy.sha256,
        not_before=operation.not_before,
        max_uses=operation.max_uses,
        uses=len({run.use for run in operation.runs.all()}),
        verdict=_judge(statement, list_proofs(operation), policy),
        decisions=[_show_decision(decision) for decision in sorted(operation.decisions.all(), key=lambda d: d.at)],
        runs=list(operation.runs.all()),
        state_reason=operation.state_reason,
        decided_at=operation.decided_at,
        actions=frozenset(actions),
        hindrances=hindrances,
        assertion=_make_assertion(statement, policy, user),
        is_frozen=read_freeze() is not None,
        could_approve=_list_able(operation, policy),
        groups=policy.groups,
        undone=_find_undone(operation),
    )


def _find_undone(operation: Operation) -> Sequence[Undone]:
    kind = find_kind(operation.operation)
    has_succeeded = any(run.state == RunState.SUCCEEDED.value for run in operation.runs.all())
    return kind.find_undone(operation.pk) if has_succeeded and isinstance(kind, FindsUndone) else ()


def with_parts(rows: QuerySet[Operation]) -> QuerySet[Operation]:
    """Return operations with what ``summarise`` reads of each."""
    return rows.select_related("policy", "adopts").prefetch_related("decisions", "runs")


def _list_newest(rows: QuerySet[Operation], most: int) -> list[Operation]:
    return list(with_parts(rows).order_by("-requested_at")[:most])


def _may_decide(operation: Operation, name: str) -> bool:
    """Whether a person is asked: named by the policy (or the one that is to follow), and not decided yet."""
    if any(d.person_name == name and d.withdrawn_at is None for d in operation.decisions.all()):
        return False
    return _is_named(operation, name)


def _is_named(operation: Operation, name: str) -> bool:
    if name in operation.policy.read_policy().groups:
        return True
    return operation.adopts is not None and name in operation.adopts.read_policy().groups


def summarise_all(rows: Sequence[Operation]) -> list[OperationSummary]:
    """Return the lines of a list, read with ``with_parts``: as many queries for many operations as for one of each kind."""
    briefs: dict[uuid.UUID, Brief] = {}
    by_kind: dict[str, list[tuple[uuid.UUID, Asked]]] = {}
    for operation in rows:
        # One row that was changed in the database does not take the whole list away.
        with suppress(ApprovalError, UnknownOperation):
            statement = operation.read_statement()
            if isinstance(find_kind(operation.operation), SumsUp):
                by_kind.setdefault(operation.operation, []).append((operation.pk, (statement.targets, statement.params)))
    for name, asked in by_kind.items():
        kind = find_kind(name)
        assert isinstance(kind, SumsUp)
        found = kind.sum_up([each for _pk, each in asked])
        briefs |= {pk: brief for (pk, _asked), brief in zip(asked, found, strict=True)}
    return [summarise(operation, briefs.get(operation.pk)) for operation in rows]


def summarise(operation: Operation, brief: Brief | None = None) -> OperationSummary:
    """Return the line of a list; the operation should have been read with ``with_parts``. ``brief``: as its kind sums it up."""
    rules = operation.policy.read_policy().classes.get(operation.op_class)
    # Of a standing approval, how the last use went.
    last = max((run.use for run in operation.runs.all()), default=0)
    runs = [run for run in operation.runs.all() if run.use == last]
    states = {RunState(run.state) for run in runs}
    approved_by = tuple(d.person_name for d in operation.decisions.all() if d.is_approval and d.withdrawn_at is None)
    is_undone = operation.state in {ApprovalState.PENDING.value, ApprovalState.APPROVED.value} and not operation.dispatched_at
    return OperationSummary(
        id=operation.pk, printed_id=operation.printed_id, title=brief.title if brief else _title_of(operation),
        operation=operation.operation, op_class=operation.op_class, state=operation.state,
        run_state=next((state.value for state in _RUN_ORDER if state in states), ""), requested_by=operation.requested_by,
        requested_at=operation.requested_at, expires_at=operation.expires_at, not_after=operation.not_after,
        approvals=len(approved_by), required=rules.required if rules else 0, percent=_percent_of(runs),
        is_solo=rules is not None and rules.solo, is_break_glass=operation.op_class == "break-glass",
        is_standing=operation.max_uses > 1, approved_by=approved_by, impact=brief.impact if brief and is_undone else "",
    )  # fmt: skip


def _title_of(operation: Operation) -> str:
    # One row that was changed in the database does not take the whole list away.
    try:
        return _describe(operation, operation.read_statement()).title
    except (ApprovalError, UnknownOperation):
        return f"{operation.operation}: what was signed cannot be read"


def _percent_of(runs: Sequence[OperationRun]) -> int | None:
    """Return how much of the runs is done; None before anything begins."""
    if not any(run.dispatched_at for run in runs):
        return None
    done = [1.0 if RunState(run.state) not in OPEN_RUNS else run.fraction or 0.0 for run in runs]
    return round(100 * sum(done) / len(done))


def _describe(operation: Operation, statement: Statement) -> Description:
    found = find_kind(operation.operation).describe(statement.targets, statement.params)
    if operation.op_class == operation.operation:
        return found
    return Description(found.title, [*found.lines, Line("Under the class", operation.op_class)])


def _preview(operation: Operation, statement: Statement) -> Sequence[Impact]:
    """Return what it would mean, as long as it has not been done."""
    if operation.state not in {ApprovalState.PENDING.value, ApprovalState.APPROVED.value} or operation.dispatched_at:
        return ()
    return find_kind(operation.operation).preview(statement.targets, statement.params)


def _judge(statement: Statement, proofs: list[dict[str, object]], policy: Policy) -> Verdict | None:
    try:
        return judge(statement, select_proofs(proofs, policy), policy)
    except ApprovalError:
        return None


def _find_actions(
    operation: Operation, statement: Statement, policy: Policy, user: User | None
) -> tuple[set[str], dict[str, str]]:
    """Return what a person may do, and why not what they may not."""
    actions: set[str] = set()
    hindrances: dict[str, str] = {}
    if user is None:
        return actions, hindrances
    name, state = user.get_username(), ApprovalState(operation.state)
    is_free = not any(RunState(run.state) in OPEN_RUNS for run in operation.runs.all())
    is_on_its_way = operation.dispatched_at is not None and not (operation.max_uses > 1 and is_free)
    is_undecided = state in {ApprovalState.PENDING, ApprovalState.APPROVED} and not is_on_its_way
    own = next((d for d in operation.decisions.all() if d.person_id == user.pk and d.withdrawn_at is None), None)
    is_requester, rules = name == operation.requested_by, policy.classes.get(operation.op_class)
    new, is_solo = find_new_policy(statement), rules is not None and rules.solo
    is_named = name in policy.groups or (new is not None and name in new.groups)
    if is_requester and is_undecided:
        actions.add("cancel")
    if own is not None and is_undecided:
        actions.add("withdraw")
    if not is_requester and is_named and own is None and is_undecided:
        actions.add("reject")
    why_not = _why_no_approval(
        operation, is_requester=is_requester and not is_solo, is_named=is_named, has_decided=own is not None,
        has_key=bool(_list_usable(statement, [policy] if new is None else [policy, new], user)),
    ) or explain_own_review(operation, policy, [name])  # fmt: skip
    if why_not:
        hindrances["approve"] = why_not
    else:
        actions.add("approve")
    if operation.max_uses > 1 and state is ApprovalState.APPROVED and clock.now() < operation.not_after and is_free:
        if len({run.use for run in operation.runs.all()}) < operation.max_uses:
            actions.add("use")
        else:
            hindrances["use"] = _("All uses are spent.")
    is_claimable = any(run.result.get("claimable") for run in operation.runs.all() if isinstance(run.result, dict))
    in_time = clock.now() < operation.not_after
    if is_requester and is_claimable and in_time and not AdminToken.objects.filter(minted_by=operation).exists():
        actions.add("claim")
    return actions, hindrances


def _why_no_approval(
    operation: Operation, *, is_requester: bool, is_named: bool, has_decided: bool, has_key: bool
) -> str | None:
    """Return the first rule that keeps a person from approving, None when nothing does."""
    if operation.state != ApprovalState.PENDING.value:
        return _("It is %(state)s; nothing can be approved any more.") % {"state": operation.state}
    if clock.now() >= operation.expires_at:
        return _("Nobody approved this in time; ask for it again.")
    if not is_current(operation):
        return _("The policy changed since this was asked for; ask for it again.")
    if is_requester:
        return _("You asked for this and cannot approve it; someone else must.")
    if not is_named:
        return _("The policy does not name you as an approver.")
    if has_decided:
        return _("You decided about this already; one person counts once, with any key.")
    if not has_key:
        return _("The policy names no key of yours for this class. Enrol one; a change of policy then takes it in.")
    return None


def _list_usable(statement: Statement, policies: Sequence[Policy], user: User) -> list[ApproverKey]:
    """Return the person's keys with which they could approve: named by a policy, and of the right class."""
    wants_break_glass = statement.op_class == "break-glass"
    named = {key.keyid for policy in policies for key in policy.keys.values() if key.is_break_glass == wants_break_glass}
    return list(ApproverKey.objects.filter(user=user, revoked_at=None, keyid__in=named))


def _list_able(operation: Operation, policy: Policy) -> list[str]:
    """Return who could still approve: named by the policy with a key of the right class, not the requester, not decided yet."""
    rules = policy.classes.get(operation.op_class)
    wants_break_glass = operation.op_class == "break-glass"
    able = {key.approver for key in policy.keys.values() if key.is_break_glass == wants_break_glass}
    if rules is not None and not rules.solo:
        able.discard(operation.requested_by)
    return sorted(able - {d.person_name for d in operation.decisions.all() if d.withdrawn_at is None})


def _make_assertion(statement: Statement, policy: Policy, user: User | None) -> dict[str, object] | None:
    if user is None:
        return None
    new = find_new_policy(statement)
    keys = _list_usable(statement, [policy] if new is None else [policy, new], user)
    passkeys = [key for key in keys if key.kind == ApproverKey.Kind.WEBAUTHN]
    if not passkeys or not policy.rp_ids:
        return None
    return {
        "rpId": min(policy.rp_ids),
        "allowCredentials": [{"type": "public-key", "id": key.keyid, "transports": list(key.transports)} for key in passkeys],
        "userVerification": "required",
        "timeout": limits().governance.passkey_decision_ms,
    }


def _show_decision(decision: Decision) -> DecisionView:
    key = decision.key
    return DecisionView(
        person=decision.person_name, is_approval=decision.is_approval, key_label=key.label if key else "",
        key_kind=key.kind if key else "", thumbprint=key.thumbprint if key else "", brought_by=decision.brought_by,
        comment=decision.comment, at=decision.at, withdrawn_at=decision.withdrawn_at, proof=decision.proof,
    )  # fmt: skip


# What convinces a stranger


def read_evidence(op_id: str) -> dict[str, object]:
    """Return what the stand-alone verifier checks of an operation; empty when there is no such operation.

    ``op_id``: printed or bare. Members: policies, statement, proofs, receipts (with the key of the node where it is known),
    decisions and state for the reader.
    """
    ident = parse_id("op", op_id)
    if ident is None:
        return {}
    try:
        operation = find_operation(ident)
    except NotFound:
        return {}
    return {
        "policies": policy_chain(after_version=0, up_to=operation.policy.version),
        "statement": encode_bytes(bytes(operation.statement)),
        "proofs": list_lasting_proofs(operation),
        "decisions": [
            {"approver": each.person_name, "at": int(each.at.timestamp()), "broughtBy": each.brought_by}
            for each in list_lasting_approvals(operation)
        ],
        "receipts": [{"receipt": run.receipt, "publicKey": run.receipt_key} for run in operation.runs.all() if run.receipt],
        "state": operation.state,
        "runs": [{"target": run.target, "use": run.use, "state": run.state} for run in operation.runs.all()],
    }
