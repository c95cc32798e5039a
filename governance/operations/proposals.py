"""Proposals: asking for an operation, taking that back, using a standing approval once more.

What is signed is built here, once; an edit is another operation.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.contrib.auth import get_user_model
from django.db import IntegrityError, connection, transaction
from django.db.models import Max, Q
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from core.roles import PROPOSE
from governance.errors import ApprovalRefused, Frozen, InvalidProposal, NotPermitted, StateChanged, TooManyOpen
from governance.models import Operation, OperationRun, PolicyVersion
from governance.operations.approvals import (
    REVIEW,
    audit_operation,
    end_operation,
    explain_unreviewed,
    find_operation,
    hold_policies,
    is_idle_standing,
    list_void,
    read_freeze,
    require_current,
    require_nothing_on_its_way,
    require_policy,
    require_reviewers,
    require_state,
    tell,
)
from governance.operations.runs import plan_runs
from governance.registry import find_kind
from governance.states import ApprovalEvent, ApprovalState
from wire import clock
from wire.ids import format_id, new_uuid7, parse_id
from wire.optoken.approval import BREAK_GLASS, POLICY_CHANGE, ApprovalError, OperationClass, Policy, find_class
from wire.optoken.documents import build_statement

OWNERLESS = "token:"
_PROPOSER_LOCK = 0x6D73_7072


@dataclass(frozen=True, slots=True)
class Proposer:
    """Who asks. ``name`` is what the statement says: a user name, or ``token:<name>#<key id>`` for a token without an owner."""

    name: str
    user_id: int | None = None

    @property
    def actor(self) -> str:
        """The proposer as the audit log writes one."""
        return self.name if self.name.startswith(OWNERLESS) else f"user:{self.name}"


@transaction.atomic
def propose(
    *,
    operation: str,
    targets: Sequence[str],
    params: Mapping[str, object],
    reason: str,
    proposer: Proposer,
    op_class: str = "",
    not_before: datetime | None = None,
    not_after: datetime | None = None,
    max_uses: int = 1,
    stops_on_failure: bool = True,
    reviews: uuid.UUID | None = None,
    idempotency_key: str | None = None,
) -> Operation:
    """Ask for an operation; returns it pending. ``op_class`` "" = the class that is named like the operation.

    ``not_before`` None = now; ``not_after`` None = as long as the class allows. With an ``idempotency_key`` that this proposer
    used before, the operation of then is returned when it asks for the same, else StateChanged is raised.
    Raises UnknownOperation, InvalidProposal, NoPolicy, NotPermitted, TooManyOpen.
    """
    kind = find_kind(operation)
    if operation == POLICY_CHANGE:
        raise InvalidProposal(_("A policy is changed by drafting its next version."), param="operation")
    request = kind.clean(targets, params)
    wanted = op_class or operation
    hold_proposer(proposer)
    if idempotency_key is not None:
        earlier = Operation.objects.filter(requested_by=proposer.name, idempotency_key=idempotency_key).first()
        if earlier is not None:
            goes_on = len(request.targets) > 1 and not stops_on_failure
            return _repeat(earlier, (operation, wanted, request.targets, dict(request.params), max_uses, not goes_on))
    row, policy = require_policy()
    if policy.expires_at <= clock.now().timestamp():
        raise InvalidProposal(_("The approval policy has expired; draft its next version first."), param="operation")
    require_proposer(proposer, policy, wanted)
    require_few(proposer)
    if wanted == BREAK_GLASS:
        if max_uses != 1:
            raise InvalidProposal(
                _("A break-glass is used once and then reviewed; ask again for the next use."), param="max_uses"
            )
        if why := explain_unreviewed():
            raise NotPermitted(why, param="op_class")
    reviewed = _find_reviewed(operation, request.targets, reviews)
    if reviewed is not None:
        require_reviewers(reviewed, policy=policy, op_class=wanted, proposer_name=proposer.name)
    return add_operation(
        operation=operation,
        op_class=wanted,
        targets=request.targets,
        params=request.params,
        reason=reason,
        proposer=proposer,
        policy_row=row,
        not_before=not_before,
        not_after=not_after,
        max_uses=max_uses,
        stops_on_failure=stops_on_failure,
        reviews=reviewed,
        idempotency_key=idempotency_key,
    )


def add_operation(
    *,
    operation: str,
    op_class: str,
    targets: Sequence[str],
    params: Mapping[str, object],
    reason: str,
    proposer: Proposer,
    policy_row: PolicyVersion,
    not_before: datetime | None = None,
    not_after: datetime | None = None,
    max_uses: int = 1,
    stops_on_failure: bool = True,
    reviews: Operation | None = None,
    adopts: PolicyVersion | None = None,
    idempotency_key: str | None = None,
) -> Operation:
    """Build the statement and store it, inside the caller's transaction. Raises InvalidProposal naming the field at fault."""
    policy, why = policy_row.read_policy(), reason.strip()
    if not why or len(why) > limits().governance.operation_reason_chars:
        raise InvalidProposal(
            _("Say why, in 1 to %(most)s characters.") % {"most": limits().governance.operation_reason_chars}, param="reason"
        )
    rules = policy.classes.get(op_class)
    if rules is None or operation not in rules.operations:
        fitting = sorted(name for name, found in policy.classes.items() if operation in found.operations)
        if not fitting:
            raise InvalidProposal(
                _(
                    "The policy names nobody for %(operation)s: approve a policy that does. A draft of its next version "
                    "offers it."
                )
                % {"operation": operation},
                param="operation",
            )
        raise InvalidProposal(
            _("The policy has no class %(op_class)r for %(operation)s; it has: %(fitting)s.")
            % {"op_class": op_class, "operation": operation, "fitting": ", ".join(fitting)},
            param="op_class",
        )
    now = clock.now()
    opens_at, closes_at = _choose_window(now, rules, not_before, not_after)
    op_id = new_uuid7()
    try:
        statement = build_statement(
            op_id=format_id("op", op_id), operation=operation, op_class=op_class, targets=targets, params=params,
            policy_ref=policy.ref, requested_by=proposer.name, reason=why, requested_at=int(now.timestamp()),
            not_before=int(opens_at.timestamp()), not_after=int(closes_at.timestamp()), max_uses=max_uses,
            stops_on_failure=stops_on_failure,
        )  # fmt: skip
        find_class(statement, policy)
    except ApprovalError as error:
        raise InvalidProposal(
            _("This cannot be signed (%(value)s): %(error)s.") % {"value": error.rule.value, "error": error}, param="params"
        ) from None
    ends_at = datetime.fromtimestamp(statement.not_after, UTC)
    found = Operation(
        pk=op_id, statement=statement.raw, digest=statement.digest.hex(), operation=operation, op_class=op_class,
        policy=policy_row, requested_by=proposer.name, reason=why, requested_at=now,
        not_before=datetime.fromtimestamp(statement.not_before, UTC), not_after=ends_at,
        expires_at=min(now + timedelta(seconds=rules.life_s), ends_at), max_uses=max_uses,
        stops_on_failure=statement.stops_on_failure, reviews=reviews, adopts=adopts, idempotency_key=idempotency_key,
    )  # fmt: skip
    try:
        with transaction.atomic():
            found.save(force_insert=True)
    except IntegrityError:
        raise StateChanged(_("The same was asked for at the same moment; look at it again."), param="idempotency_key") from None
    asked = {"operation": operation, "class": op_class, "targets": list(targets)}
    detail = {**asked, "digest": found.digest, "policy": policy.ref.version}
    audit_operation(found, "operation.propose", actor=proposer.actor, detail=detail)
    tell(found, "break_glass" if op_class == BREAK_GLASS else "proposed")
    publish_hint("operations", str(found.pk))
    return found


@transaction.atomic
def cancel(*, op_id: uuid.UUID, proposer: Proposer) -> Operation:
    """Take an operation back, by whoever asked for it, before anything was dispatched; a standing one also between two uses.

    Raises NotFound, NotPermitted, StateChanged.
    """
    operation = find_operation(op_id, lock=True)
    if operation.requested_by != proposer.name:
        raise NotPermitted(
            _("Only %(requested_by)s can cancel this; an approver can reject it.") % {"requested_by": operation.requested_by},
            param="op_id",
        )
    require_nothing_on_its_way(operation)
    end_operation(operation, ApprovalEvent.CANCEL, reason=f"cancelled by {proposer.name}", actor=proposer.actor)
    return operation


@transaction.atomic
def use_approval(*, op_id: uuid.UUID, proposer: Proposer) -> list[OperationRun]:
    """Carry a standing approval out once more and return the runs. The node counts as well.

    Whoever may ask for operations of its class may use it. Raises NotFound, StateChanged, NotPermitted,
    ApprovalRefused (not a standing one, used up, a new policy, an approver's key revoked since, not reviewed), Frozen.
    """
    operation = find_operation(op_id, lock=True)
    require_state(operation, ApprovalState.APPROVED)
    if operation.max_uses == 1:
        raise ApprovalRefused(_("This is no standing approval: it is carried out once, by itself."), rule="too_many_uses")
    require_proposer(proposer, operation.policy.read_policy(), operation.op_class)
    if clock.now() >= operation.not_after:
        raise StateChanged(_("The window of this approval is over; ask for a new one."), param="op_id")
    if read_freeze() is not None:
        raise Frozen(_("Everything is frozen; a quorum can lift that."))
    hold_policies(to_change=False)
    require_current(operation)
    if list_void(operation):
        raise ApprovalRefused(
            _("A key that approved this was revoked, or its person deactivated; another approver must sign."),
            rule="too_few_approvers",
        )
    used = OperationRun.objects.filter(operation=operation).aggregate(last=Max("use"))["last"] or 0
    if used >= operation.max_uses:
        raise ApprovalRefused(
            _("All %(max_uses)s uses are spent; ask for a new approval.") % {"max_uses": operation.max_uses},
            rule="too_many_uses",
        )
    if not is_idle_standing(operation):
        raise StateChanged(_("Its last use has not ended; wait for that."), param="op_id")
    if operation.op_class == BREAK_GLASS and (why := explain_unreviewed()):
        raise ApprovalRefused(why, rule="not_reviewed")
    audit_operation(operation, "operation.use", actor=proposer.actor, detail={"use": used + 1})
    return plan_runs(operation, use=used + 1, started_by=proposer.name)


def _repeat(earlier: Operation, wanted: tuple[object, ...]) -> Operation:
    asked = earlier.read_statement()
    parts = (asked.operation, asked.op_class, asked.targets, dict(asked.params), asked.max_uses, asked.stops_on_failure)
    if parts != wanted:
        raise StateChanged(_("This Idempotency-Key was used for another operation; choose a new one."), param="idempotency_key")
    return earlier


def _choose_window(
    now: datetime, rules: OperationClass, not_before: datetime | None, not_after: datetime | None
) -> tuple[datetime, datetime]:
    """Return from when to when an operation may be used, by its class where nobody says. Raises InvalidProposal."""
    opens_at = max(not_before or now, now - timedelta(seconds=1))
    ahead = timedelta(seconds=limits().governance.operation_ahead_s)
    if opens_at > now + ahead:
        raise InvalidProposal(_("The window must begin within %(days)s days.") % {"days": ahead.days}, param="not_before")
    closes_at = not_after or opens_at + timedelta(seconds=rules.usable_s)
    if closes_at <= max(opens_at, now):
        raise InvalidProposal(_("The window must end after it begins, and in the future."), param="not_after")
    return opens_at, closes_at


def hold_proposer(proposer: Proposer) -> None:
    # Whoever asks under the same name at the same moment waits: bounds and Idempotency-Keys are counted one by one.
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s, hashtext(%s))", [_PROPOSER_LOCK, proposer.name])


def require_proposer(proposer: Proposer, policy: Policy | None, op_class: str) -> None:
    """Raise NotPermitted unless somebody may ask for operations of a class. ``policy`` None: there is none yet."""
    rules = policy.classes.get(op_class) if policy is not None else None
    if rules is not None and rules.proposers and proposer.name not in rules.proposers:
        raise NotPermitted(
            _("The policy lets only %(proposers)s ask for %(op_class)s.")
            % {"proposers": ", ".join(rules.proposers), "op_class": op_class},
            param="op_class",
        )
    if proposer.user_id is None:
        if not proposer.name.startswith(OWNERLESS):
            raise NotPermitted(
                _("Only a person who is signed in, or an admin token, can ask for operations."), param="requested_by"
            )
        return
    user = get_user_model().objects.filter(pk=proposer.user_id, is_active=True).first()
    # The name is what approvers sign, so it has to be that of the person who asks.
    is_known = user is not None and user.get_username() == proposer.name
    if user is None or not is_known or not (user.has_perm(PROPOSE) or (policy is not None and proposer.name in policy.groups)):
        raise NotPermitted(_("Only operators and approvers can ask for operations."), param="requested_by")


def require_few(proposer: Proposer) -> None:
    """Raise TooManyOpen when somebody has too much open, or asks too often."""
    own = Operation.objects.filter(requested_by=proposer.name)
    is_open = Q(state=ApprovalState.PENDING.value) | Q(state=ApprovalState.APPROVED.value, dispatched_at=None)
    if own.filter(is_open).count() >= limits().governance.operation_open:
        raise TooManyOpen(
            _("You have %(operation_open)s open operations; cancel some or wait until they are decided.")
            % {"operation_open": limits().governance.operation_open}
        )
    if own.filter(requested_at__gte=clock.now() - timedelta(hours=1)).count() >= limits().governance.operation_per_hour:
        raise TooManyOpen(
            _("You asked for %(operation_per_hour)s operations within an hour; wait a little.")
            % {"operation_per_hour": limits().governance.operation_per_hour}
        )


def _find_reviewed(operation: str, targets: Sequence[str], reviews: uuid.UUID | None) -> Operation | None:
    """Return the operation that a review is about: the one that approvers sign as its target."""
    if operation != REVIEW:
        return None
    named = parse_id("op", targets[0]) if len(targets) == 1 else None
    if reviews is not None and reviews != named:
        raise InvalidProposal(_("The review must name the same operation as its target."), param="reviews")
    found = Operation.objects.filter(pk=named, op_class=BREAK_GLASS, dispatched_at__isnull=False).first() if named else None
    if found is None:
        raise InvalidProposal(_("Name the break-glass operation that is reviewed; it must have been used."), param="targets")
    return found
