"""The approval policy: drafting the next one, adopting it, and the freeze of everything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import IntegrityError, transaction
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.checkpoints import log_keys
from governance.errors import Frozen, InvalidProposal, NotPermitted, StateChanged
from governance.models import ApproverKey, Freeze, Operation, PolicyVersion
from governance.operations.approvals import (
    active_policy,
    block_stale,
    require_policy,
    tell,
)
from governance.operations.proposals import Proposer, add_operation, hold_proposer, require_few, require_proposer
from wire import clock
from wire.ids import new_uuid7
from wire.optoken.approval import POLICY_CHANGE, ApprovalError, Policy, decode_bytes, read_policy
from wire.optoken.documents import DEFAULT_CLASSES, ApproverEntry, KeyEntry, build_policy

if TYPE_CHECKING:
    from core.models import User

SOLO: Mapping[str, object] = {"solo": True, "threshold": 1}
"""What makes a class one that its requester may approve alone. Never the default."""


@dataclass(frozen=True, slots=True)
class ApproverChoice:
    """A person for the next policy. ``key_ids``: primary keys of ApproverKey rows of that person."""

    username: str
    groups: tuple[str, ...]
    key_ids: tuple[int, ...]


@transaction.atomic
def draft_policy(
    *,
    approvers: Sequence[ApproverChoice],
    reason: str,
    proposer: Proposer,
    thresholds: Mapping[str, int] | None = None,
    classes: Mapping[str, Mapping[str, object]] | None = None,
    is_solo: bool = False,
    expires_at: datetime | None = None,
) -> Operation:
    """Make the next version of the policy as a draft and ask for its approval, by the old threshold and by its own.

    ``classes``: whole classes in the place of the default ones; ``thresholds``: by class, over those.
    Raises InvalidProposal, NotPermitted, TooManyOpen.
    """
    hold_proposer(proposer)
    found = active_policy()
    require_proposer(proposer, found[1] if found else None, POLICY_CHANGE)
    require_few(proposer)
    policy = make_policy(
        approvers=approvers, thresholds=thresholds, classes=classes, is_solo=is_solo, expires_at=expires_at,
        found=found[1] if found else None,
    )  # fmt: skip
    row, is_new = PolicyVersion.objects.get_or_create(
        sha256=policy.ref.sha256, defaults={"version": policy.ref.version, "document": policy.raw, "created_by": proposer.name}
    )
    if not is_new:
        raise InvalidProposal(_("The very same policy was drafted before; approve that one."), param="approvers")
    record_event(
        actor=proposer.actor, action="policy.draft", target=f"policy version {policy.ref.version}",
        detail={"sha256": policy.ref.sha256},
    )  # fmt: skip
    return add_operation(
        operation=POLICY_CHANGE,
        op_class=POLICY_CHANGE,
        targets=(f"policy:{policy.ref.id}",),
        params={"version": policy.ref.version, "sha256": policy.ref.sha256},
        reason=reason,
        proposer=proposer,
        policy_row=found[0] if found else row,
        adopts=row,
    )


def make_policy(
    *,
    approvers: Sequence[ApproverChoice],
    thresholds: Mapping[str, int] | None,
    classes: Mapping[str, Mapping[str, object]] | None,
    is_solo: bool,
    expires_at: datetime | None,
    found: Policy | None,
) -> Policy:
    """Return what ``draft_policy`` would draft behind the policy ``found``; nothing is stored. Raises InvalidProposal."""
    now = clock.now()
    wanted = {name: dict(members) for name, members in (classes or DEFAULT_CLASSES).items()}
    for name, members in wanted.items():
        members.update(SOLO if is_solo and name != "break-glass" else {})
        if name in (thresholds or {}):
            members["threshold"] = (thresholds or {})[name]
    if unknown := sorted(set(thresholds or {}) - set(wanted)):
        raise InvalidProposal(
            _("There is no class %(unknown)r; there are %(wanted)s.")
            % {"unknown": unknown[0], "wanted": ", ".join(sorted(wanted))},
            param="thresholds",
        )
    origin = urlsplit(settings.PUBLIC_URL)
    try:
        document = build_policy(
            policy_id=found.ref.id if found else f"policy-{new_uuid7().hex}",
            version=found.ref.version + 1 if found else 1,
            previous=found.ref.sha256 if found else "",
            issued_at=int(now.timestamp()),
            expires_at=int((expires_at or now + timedelta(seconds=limits().governance.policy_life_s)).timestamp()),
            origins=[f"{origin.scheme}://{origin.netloc}"],
            rp_ids=[origin.hostname or "localhost"],
            log_keys=[str(key) for key in log_keys()],
            approvers=[_make_approver(choice) for choice in approvers],
            classes=wanted,
        )
    except ApprovalError as error:
        raise InvalidProposal(_("This policy cannot be used: %(error)s.") % {"error": error}, param="approvers") from None
    return read_policy(document)


def _make_approver(choice: ApproverChoice) -> ApproverEntry:
    user = get_user_model().objects.filter(username=choice.username, is_active=True).first()
    if user is None:
        raise InvalidProposal(_("There is no active person %(username)r.") % {"username": choice.username}, param="approvers")
    keys = list(ApproverKey.objects.filter(user=user, pk__in=choice.key_ids, revoked_at=None).order_by("pk"))
    if len(keys) != len(set(choice.key_ids)) or not keys:
        raise InvalidProposal(
            _("%(username)s needs at least one key of their own that is not revoked.") % {"username": choice.username},
            param="approvers",
        )
    entries = [KeyEntry(key.keyid, key.kind, decode_bytes(key.public_key), key.is_break_glass) for key in keys]
    return ApproverEntry(choice.username, sorted(set(choice.groups)), entries)


def adopt_policy(row: PolicyVersion, *, actor: str, op_id: str) -> int:
    """Put a policy in force in the place of the active one, inside the caller's transaction; pending operations are blocked.

    Returns how many operations were blocked. The caller has verified the approvals.
    """
    now = clock.now()
    PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).update(state=PolicyVersion.State.SUPERSEDED)
    PolicyVersion.objects.filter(pk=row.pk).update(state=PolicyVersion.State.ACTIVE, activated_at=now)
    # Such drafts follow a version that is in force no more.
    PolicyVersion.objects.filter(state=PolicyVersion.State.DRAFT, version__lte=row.version).update(
        state=PolicyVersion.State.DROPPED
    )
    record_event(
        actor=actor,
        action="policy.activate",
        target=f"policy version {row.version}",
        detail={"sha256": row.sha256},
        op_id=op_id,
    )
    publish_hint("policy", str(row.version))
    return block_stale()


def list_policy_versions() -> list[PolicyVersion]:
    """Return every version that was ever in force or is a draft, newest first."""
    return list(PolicyVersion.objects.exclude(state=PolicyVersion.State.DROPPED).order_by("-version", "-created_at"))


# The freeze: any one approver stops everything at once; lifting it is an operation of its own


@transaction.atomic
def freeze(*, user: User, reason: str) -> Freeze:
    """Send nothing on its way any more but an unfreeze or a policy-change; what nodes do already goes on.

    Any approver of the active policy may.

    Raises NoPolicy, NotPermitted, Frozen (it is frozen already).
    """
    _row, policy = require_policy()
    name = user.get_username()
    if name not in policy.groups or not type(user).objects.filter(pk=user.pk, is_active=True).exists():
        raise NotPermitted(_("Only approvers of the active policy can freeze."))
    try:
        with transaction.atomic():
            row = Freeze.objects.create(frozen_by=name, reason=reason.strip()[: limits().governance.freeze_reason_chars])
    except IntegrityError:
        raise Frozen(_("Everything is frozen already.")) from None
    record_event(actor=f"user:{name}", action="freeze", target="control-plane")
    tell(None, "frozen")
    publish_hint("operations")
    return row


def name_freeze(row: Freeze) -> dict[str, object]:
    """Return what a statement names a freeze by."""
    # Its number alone would not do: a restored database gives numbers again.
    return {"freeze": row.pk, "frozenBy": row.frozen_by, "frozenAt": int(row.frozen_at.timestamp())}


def lift_freeze(*, named: Mapping[str, object], operation: Operation | None) -> bool:
    """End the freeze in force, inside the transaction that carries out an approved unfreeze. False when there is none.

    ``named``: which one was signed, as ``name_freeze`` says it. Raises StateChanged when it is not the one in force.
    """
    row = Freeze.objects.select_for_update().filter(lifted_at=None).first()
    if row is None:
        return False
    if named != name_freeze(row):
        raise StateChanged(
            _(
                "What was signed is not for the freeze in force: %(frozen_by)s froze everything at %(frozen_at)s UTC "
                "(freeze %(pk)s). Look at why, and ask for unfreeze again."
            )
            % {"frozen_by": row.frozen_by, "frozen_at": f"{row.frozen_at:%Y-%m-%d %H:%M:%S}", "pk": row.pk},
            param="freeze",
        )
    row.lifted_at, row.lifted_by = clock.now(), operation
    row.save(update_fields=["lifted_at", "lifted_by"])
    op_id = operation.printed_id if operation else ""
    record_event(actor="system:governance", action="unfreeze", target="control-plane", op_id=op_id)
    publish_hint("operations")
    return True
