"""The approval policy: which one is active, drafting the next one, adopting it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.auth import get_user_model
from django.db import transaction

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.checkpoints import log_public_key
from governance.errors import InvalidProposal, NoPolicy
from governance.models import ApproverKey, Operation, PolicyVersion
from governance.operations.proposals import add_operation, hold_proposer, name_actor, require_few, require_proposer
from governance.operations.values import Proposer
from wire import clock
from wire.ids import new_uuid7
from wire.optoken.approval import POLICY_CHANGE, ApprovalError, Policy, decode_bytes, read_policy
from wire.optoken.proposal import DEFAULT_CLASSES, ApproverEntry, KeyEntry, build_policy

SOLO: Mapping[str, object] = {"solo": True, "threshold": 1}
"""What makes a class one that its requester may approve alone. Never the default."""


@dataclass(frozen=True, slots=True)
class ApproverChoice:
    """A person for the next policy. ``key_ids``: primary keys of ApproverKey rows of that person."""

    username: str
    groups: tuple[str, ...]
    key_ids: tuple[int, ...]


def active_policy() -> tuple[PolicyVersion, Policy] | None:
    """Return the policy in force; None before the first one."""
    row = PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).first()
    return None if row is None else (row, read_policy(bytes(row.document)))


def require_policy() -> tuple[PolicyVersion, Policy]:
    """Return the policy in force. Raises NoPolicy."""
    found = active_policy()
    if found is None:
        raise NoPolicy("There is no approval policy yet. Draft the first one and have it signed, then ask again.")
    return found


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
    now = clock.now()
    wanted = {name: dict(members) for name, members in (classes or DEFAULT_CLASSES).items()}
    for name, members in wanted.items():
        members.update(SOLO if is_solo and name != "break-glass" else {})
        if name in (thresholds or {}):
            members["threshold"] = (thresholds or {})[name]
    if unknown := sorted(set(thresholds or {}) - set(wanted)):
        raise InvalidProposal(f"There is no class {unknown[0]!r}; there are {', '.join(sorted(wanted))}.", param="thresholds")
    origin = urlsplit(settings.PUBLIC_URL)
    try:
        document = build_policy(
            policy_id=found[1].ref.id if found else f"policy-{new_uuid7().hex}",
            version=found[1].ref.version + 1 if found else 1,
            previous=found[1].ref.sha256 if found else "",
            issued_at=int(now.timestamp()),
            expires_at=int((expires_at or now + timedelta(seconds=limits().governance.policy_life_s)).timestamp()),
            origins=[f"{origin.scheme}://{origin.netloc}"],
            rp_ids=[origin.hostname or "localhost"],
            log_keys=[log_public_key()] if settings.GOVERNANCE_LOG_KEY else [],
            approvers=[_make_approver(choice) for choice in approvers],
            classes=wanted,
        )
    except ApprovalError as error:
        raise InvalidProposal(f"This policy cannot be used: {error}.", param="approvers") from None
    policy = read_policy(document)
    row, is_new = PolicyVersion.objects.get_or_create(
        sha256=policy.ref.sha256,
        defaults={"version": policy.ref.version, "document": document, "created_by": proposer.name},
    )
    if not is_new:
        raise InvalidProposal("The very same policy was drafted before; approve that one.", param="approvers")
    record_event(
        actor=name_actor(proposer), action="policy.draft", target=f"policy version {policy.ref.version}",
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
        policy=found[1] if found else policy,
        adopts=row,
    )


def _make_approver(choice: ApproverChoice) -> ApproverEntry:
    user = get_user_model().objects.filter(username=choice.username, is_active=True).first()
    if user is None:
        raise InvalidProposal(f"There is no active person {choice.username!r}.", param="approvers")
    keys = list(ApproverKey.objects.filter(user=user, pk__in=choice.key_ids, revoked_at=None).order_by("pk"))
    if len(keys) != len(set(choice.key_ids)) or not keys:
        raise InvalidProposal(f"{choice.username} needs at least one key of their own that is not revoked.", param="approvers")
    entries = [KeyEntry(key.keyid, key.kind, decode_bytes(key.public_key), key.is_break_glass) for key in keys]
    return ApproverEntry(choice.username, sorted(set(choice.groups)), entries)


def adopt_policy(row: PolicyVersion, *, actor: str, op_id: str) -> int:
    """Put a policy in force in the place of the active one, inside the caller's transaction; pending operations are blocked.

    Returns how many operations were blocked. The caller has verified the approvals.
    """
    from governance.operations.sweeps import block_stale

    now = clock.now()
    PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE).update(state=PolicyVersion.State.SUPERSEDED)
    PolicyVersion.objects.filter(pk=row.pk).update(state=PolicyVersion.State.ACTIVE, activated_at=now)
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
