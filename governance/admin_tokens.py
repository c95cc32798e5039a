"""Changes to the credentials of the admin APIs. Every caller (admin pages, launcher, commands) comes through here."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, ClassVar

from django.conf import settings
from django.db import DatabaseError, transaction
from django.db.models import Q
from django.utils.translation import gettext as _

from core.limits import limits
from core.roles import Rights, Role, read_rights, read_rights_of_role
from core.throttle import AuthThrottle
from governance.audit import record_event
from governance.errors import InvalidGrant, InvalidName, NotFound, NotPermitted, StateChanged, TooManyWrongTokens
from governance.models import AdminToken, Operation
from governance.operations.approvals import (
    find_operation,
    require_approval,
)
from governance.operations.decisions import require_active
from governance.operations.proposals import Proposer
from governance.states import RunState
from wire import clock
from wire.credentials import (
    CredentialKind,
    MintedCredential,
    derive_credential,
    digest_credential,
    is_credential,
    mint_credential,
    parse_keyid,
    stand_in,
    verify_credential,
)

if TYPE_CHECKING:
    from core.models import User

logger = logging.getLogger("muster.governance")

MINT = "admin-token-mint"
_NO_DIGEST = bytes(32)


def _read_digests() -> list[bytes]:
    return [bytes(digest) for digest in AdminToken.objects.filter(revoked_at=None).values_list("digest", flat=True)]


throttle = AuthThrottle(read_digests=_read_digests)
"""By address. Of this process alone."""


@dataclass(frozen=True, slots=True)
class TokenHolder:
    """The caller of an admin API. ``actor`` is what the audit trail shows.

    ``rights``: what it may do, which for a token of a person is never more than the person may.
    ``token``: ``token:<name>#<key id>``; the key id tells tokens of one name apart: what the one asked for, the other must not
    cancel. ``proposer``: as whom it asks for operations; ``owner_id``: the person whose token it is, None for one of nobody.
    """

    actor: str
    token: str
    proposer: Proposer
    owner_id: int | None = None
    rights: Rights = field(default_factory=Rights)
    is_authenticated: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Grant:
    """What a token may do and how long: a role, the tenant in which a role of tenants counts, and its end (None: never).

    ``role`` "": everything, as tokens could that are older than roles.
    """

    role: str = ""
    tenant: str = ""
    expires_at: datetime | None = None


EVERYTHING = Grant()


@transaction.atomic
def create_admin_token(
    *, name: str, actor: str, owner: User | None = None, grant: Grant = EVERYTHING
) -> tuple[AdminToken, str]:
    """Create a token and return it with its text, which exists nowhere else and is shown once.

    Governed: once a policy is active, a token is proposed as ``admin-token-mint`` and claimed. Raises InvalidName,
    InvalidGrant, NeedsApproval.
    """
    return _mint(name=name, actor=actor, owner=owner, operation=None, grant=grant)


@transaction.atomic
def claim_admin_token(*, op_id: uuid.UUID, user: User) -> tuple[AdminToken, str]:
    """Make the token that was approved, once, for the person who asked for it; its text is returned and kept nowhere.

    Possible until the approved window ends. Raises NotFound, NotPermitted, StateChanged.
    """
    require_active(user)
    operation = find_operation(op_id, lock=True)
    statement = operation.read_statement()
    if statement.operation != MINT or statement.requested_by != user.get_username():
        raise NotPermitted(_("Only the person who asked for an admin token can claim it."), param="op_id")
    if not operation.runs.filter(state=RunState.SUCCEEDED.value).exists():
        raise StateChanged(_("This token has not been approved and made ready; wait until it has."), param="op_id")
    if clock.now().timestamp() >= statement.not_after:
        raise StateChanged(
            _("The approved window is over and the token was not claimed in it; propose another one."), param="op_id"
        )
    if AdminToken.objects.filter(minted_by=operation).exists():
        raise StateChanged(_("This token was claimed already; its text is shown once. Propose another one."), param="op_id")
    # Name, person and rights are those that were signed.
    actor, grant = f"user:{user.get_username()}", read_grant(statement.params)
    return _mint(name=str(statement.params["name"]), actor=actor, owner=user, operation=operation, grant=grant)


def read_grant(params: Mapping[str, object]) -> Grant:
    """Return what the parameters of ``admin-token-mint`` give: ``role``, ``tenant``, ``days``. Raises InvalidGrant."""
    days = params.get("days")
    if days is not None and not (isinstance(days, int) and 1 <= days <= limits().governance.token_days):
        raise InvalidGrant(_("Give 1 to %(most)s days, or none.") % {"most": limits().governance.token_days}, param="days")
    expires_at = clock.now() + timedelta(days=days) if isinstance(days, int) else None
    return check_grant(Grant(str(params.get("role", "")), str(params.get("tenant", "")), expires_at))


def check_grant(grant: Grant) -> Grant:
    """Return it as it is. Raises InvalidGrant for a role that is none, or that does not go with the tenant."""
    if grant.role and grant.role not in set(Role):
        raise InvalidGrant(_("There is no role %(role)s.") % {"role": grant.role[:40]}, param="role")
    if (grant.role in {Role.TENANT_ADMIN, Role.TENANT_VIEWER}) != bool(grant.tenant):
        raise InvalidGrant(_("A role of tenants needs a tenant, and other roles take none."), param="tenant")
    if grant.expires_at is not None and grant.expires_at <= clock.now():
        raise InvalidGrant(_("The token must expire in the future, or never."), param="expires_at")
    return grant


OWN_SECRET, OWN_NAME = "MUSTER_ADMIN_TOKEN", "environment"


@transaction.atomic
def keep_own_token(*, actor: str) -> None:
    """Make the token of MUSTER_ADMIN_TOKEN, and end that of another secret. One that somebody revoked stays so.

    Raises NeedsApproval for a new one once a policy is in force.
    """
    secret, wanted = settings.OWN_ADMIN_TOKEN, None
    if secret and not is_credential(secret):
        wanted = derive_credential(CredentialKind.ADMIN, secret, secret_key=settings.SECRET_KEY)
    for row in AdminToken.objects.select_for_update().filter(variable=OWN_SECRET, revoked_at=None):
        if wanted is not None and row.keyid == wanted.keyid:
            return
        revoke_admin_token(token_id=row.pk, actor=actor)
        # Its key id is free for when the secret comes back.
        AdminToken.objects.filter(pk=row.pk).update(keyid=mint_credential(CredentialKind.ADMIN).keyid)
    if wanted is None:
        return
    if AdminToken.objects.filter(keyid=wanted.keyid).exists():
        logger.warning("admin_token.own_revoked variable=%s; it was revoked on its page: choose another secret", OWN_SECRET)
        return
    _mint(name=OWN_NAME, actor=actor, owner=None, operation=None, own=wanted)


def _mint(
    *,
    name: str,
    actor: str,
    owner: User | None,
    operation: Operation | None,
    grant: Grant = EVERYTHING,
    own: MintedCredential | None = None,
) -> tuple[AdminToken, str]:
    if operation is None:
        require_approval(MINT, order=None)
    cleaned = name.strip()
    if not cleaned or len(cleaned) > limits().governance.token_name_chars:
        raise InvalidName(
            _("Give the token a name of 1 to %(most)s characters.") % {"most": limits().governance.token_name_chars},
            param="name",
        )
    check_grant(grant)
    minted = own or mint_credential(CredentialKind.ADMIN)
    token = AdminToken.objects.create(
        name=cleaned, keyid=minted.keyid, digest=minted.digest, owner_id=owner.pk if owner else None, minted_by=operation,
        role=grant.role, tenant=grant.tenant, expires_at=grant.expires_at, variable=OWN_SECRET if own is not None else "",
    )  # fmt: skip
    detail = {"keyid": minted.keyid, "role": grant.role, "tenant": grant.tenant}
    record_event(
        actor=actor, action="admin_token.create", target=cleaned, detail=detail,
        op_id=operation.printed_id if operation else "",
    )  # fmt: skip
    return token, minted.text


@transaction.atomic
def revoke_admin_token(*, token_id: int, actor: str) -> AdminToken:
    """Make a token useless from now on; doing so again changes nothing. Raises NotFound."""
    changed = AdminToken.objects.filter(pk=token_id, revoked_at__isnull=True).update(revoked_at=clock.now())
    token = AdminToken.objects.filter(pk=token_id).first()
    if token is None:
        raise NotFound(_("There is no admin token %(token_id)s.") % {"token_id": token_id}, param="token_id")
    if changed:
        record_event(actor=actor, action="admin_token.revoke", target=token.name, detail={"keyid": token.keyid})
    return token


def verify_admin_token(text: str, *, address: str = "") -> AdminToken | None:
    """Return the token that ``text`` is, or None when it is none, or a revoked one, or a credential of another kind.

    One that expired, or whose owner is switched off, is None too. Takes the same time whether the key id exists or not. Writes
    ``last_used_at`` at most once a minute. Raises TooManyWrongTokens after too many wrong ones from ``address``.
    """
    text = stand_in(text, settings.OWN_ADMIN_TOKEN, CredentialKind.ADMIN, secret_key=settings.SECRET_KEY)
    keyid = parse_keyid(text, CredentialKind.ADMIN)
    if keyid is None and (is_credential(text) or not settings.OWN_ADMIN_TOKEN):
        return None  # nobody guesses a token that Muster made
    if address and throttle.must_wait(address, digest_credential(text)):
        raise TooManyWrongTokens(_("Too many wrong admin tokens came from this address; wait a second and try again."))
    known = AdminToken.objects.select_related("owner").filter(keyid=keyid, revoked_at__isnull=True)
    token = known.first() if keyid is not None else None
    # Of an unknown id another digest is compared: both take the same steps.
    matches = verify_credential(text, bytes(token.digest) if token is not None else _NO_DIGEST)
    if token is None or not matches or not _is_good(token):
        throttle.record_failure(address)
        return None
    _touch(token)
    return token


def _is_good(token: AdminToken) -> bool:
    is_over = token.expires_at is not None and token.expires_at <= clock.now()
    return not is_over and (token.owner is None or token.owner.is_active)


def hold_token(token: AdminToken) -> TokenHolder:
    """Return who calls with a token that was verified, and what it may do now: never more than its owner."""
    actor, owner = f"token:{token.name}", token.owner
    name = f"{actor}#{token.keyid}"
    rights = read_rights_of_role(token.role, token.tenant)
    if owner is not None and token.role:
        rights = rights.within(read_rights(owner))
    proposer = Proposer(name) if owner is None else Proposer(owner.get_username(), owner.pk)
    return TokenHolder(actor, name, proposer, token.owner_id, rights)


def find_holder(text: str, *, address: str = "") -> TokenHolder | None:
    """Return who calls with ``text``, or None, as ``verify_admin_token`` does."""
    token = verify_admin_token(text, address=address)
    return None if token is None else hold_token(token)


def _touch(token: AdminToken) -> None:
    now = clock.now()
    if token.last_used_at is not None and now - token.last_used_at < timedelta(seconds=limits().governance.token_use_s):
        return
    due = Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - timedelta(seconds=limits().governance.token_use_s))
    with contextlib.suppress(DatabaseError):  # who reads needs no database that takes writes
        AdminToken.objects.filter(due, pk=token.pk).update(last_used_at=now)
    token.last_used_at = now
