"""People: how they sign in, what their session may do, how they are invited. Sessions are ``governance.signin``'s."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.contrib.auth import authenticate, get_user_model
from django.contrib.auth.models import AnonymousUser
from django.core.exceptions import ValidationError
from django.db import transaction
from django.db.models import Exists
from django.http import HttpRequest
from django.utils.translation import gettext
from django.utils.translation import gettext as _

from core.limits import limits
from core.roles import PROPOSE, SEE_OPERATIONS, Role, may
from governance.audit import record_event
from governance.errors import NotPermitted, SignInRefused
from governance.keys import enrol_passkey, find_passkey, note_use
from governance.members import set_member
from governance.models import ApproverKey, Invitation, PolicyVersion
from governance.operations.approvals import active_policy
from governance.passwords import REFUSAL, book_code, book_try, forgive, has_app, spend_code
from wire import clock

if TYPE_CHECKING:
    from core.models import User
    from governance.passkeys import NewPasskey

PASSKEY_REFUSAL = "This passkey was not accepted. Use another one, or ask an administrator for an invitation."

logger = logging.getLogger(__name__)


class Assurance(StrEnum):
    """How somebody signed in."""

    PASSKEY = "passkey"
    OIDC = "oidc"
    TOTP = "totp"
    PASSWORD = "password"  # noqa: S105 - the name of a way, not a secret


def may_change(user: User, assurance: Assurance) -> bool:
    """Return whether such a session may do what its person may; otherwise it may only look."""
    # Of single sign-on the issuer answers for how people prove who they are.
    if assurance in {Assurance.PASSKEY, Assurance.OIDC}:
        return True
    # A password is enough until there is something better: an active policy, or a passkey of the person. One that was
    # revoked since counts too, so that losing it opens no door.
    passkeys = ApproverKey.objects.filter(user_id=user.pk, kind=ApproverKey.Kind.WEBAUTHN)
    policies = PolicyVersion.objects.filter(state=PolicyVersion.State.ACTIVE)
    return get_user_model().objects.filter(pk=user.pk).exclude(Exists(passkeys) | Exists(policies)).exists()


def may_enrol(user: User, assurance: Assurance) -> bool:
    """Return whether such a session may add a key: by passkey, or before the first policy for a person who never had a key."""
    # Under a policy a password alone would otherwise make itself a passkey, and with that everything its person may do. The
    # first key comes by invitation then, which a second person or the server's shell issues.
    has_had_key = ApproverKey.objects.filter(user_id=user.pk).exists()
    return assurance is Assurance.PASSKEY or (not has_had_key and may_change(user, assurance))


def sign_in_by_password(request: HttpRequest, *, name: str, password: str, address: str) -> User:
    """Return whose name and password these are; ``needs_code`` says what is still missing. Raises SignInRefused."""
    # Every try is booked before it is looked at.
    is_last_free = book_try(name=name, address=address)
    # A name that nobody has costs the same time: a password is hashed either way.
    user = authenticate(request, username=name, password=password)
    if user is None:
        if is_last_free:
            _note_guessing(None)
        raise SignInRefused(gettext(REFUSAL))
    require_local(user)
    if not needs_code(user):
        forgive(name=name, address=address)
    return user


def require_local(user: User) -> None:
    """Raise SignInRefused for somebody who has to sign in at the issuer: never for owners, who come in when it is away.

    Whoever left there would otherwise keep the roles of their groups for as long as they have a passkey here.
    """
    if settings.OIDC is None or user.is_superuser:
        return
    said = {"name": settings.OIDC.name}
    if settings.LOCAL_SIGN_IN == "owners":
        raise SignInRefused(gettext("Only owners sign in here without %(name)s.") % said)
    from allauth.socialaccount.models import SocialAccount  # only pages have it

    lately = clock.now() - timedelta(seconds=limits().governance.oidc_session_s)
    given = SocialAccount.objects.filter(user_id=user.pk, provider=settings.OIDC.url, last_login__lt=lately)
    if given.exclude(extra_data__roles=[]).exists():
        text = gettext("Your roles come from %(name)s and were read too long ago. Sign in with %(name)s first.")
        raise SignInRefused(text % said)


def needs_code(user: User) -> bool:
    """Return whether a password alone does not sign the person in."""
    return has_app(user)


def sign_in_by_code(user: User, *, code: str, address: str) -> None:
    """Spend the code of the app of somebody whose password was right. Raises SignInRefused."""
    is_last_free = book_code(name=user.get_username(), address=address)
    if not user.is_active or not spend_code(user=user, code=code):
        if is_last_free:
            _note_guessing(user)
        raise SignInRefused(gettext(REFUSAL))
    forgive(name=user.get_username(), address=address)


@transaction.atomic
def _note_guessing(user: User | None) -> None:
    # Once a block. A name that was typed may be a password, and is not kept.
    target = user.get_username() if user is not None else ""
    record_event(actor="system:sign-in", action="sign-in.slow-down", target=target, detail={})


def sign_in_by_passkey(answer: Mapping[str, Any], *, challenge: bytes) -> User:
    """Return whose passkey answered ``challenge``. Raises SignInRefused."""
    from governance.passkeys import read_keyid, verify_known  # only pages need the library behind it
    from wire.optoken.approval import decode_bytes

    key = find_passkey(read_keyid(answer))
    if key is None or not key.user.is_active:
        raise SignInRefused(PASSKEY_REFUSAL)
    require_local(key.user)
    count = verify_known(answer, keyid=key.keyid, public_key=decode_bytes(key.public_key), challenge=challenge)
    # Logged and not refused: passkeys that are copied between devices do not count together.
    if count and count <= key.sign_count:
        logger.warning("passkey_count_went_back key=%s", key.thumbprint)
    note_use(key, sign_count=count)
    return key.user


def may_see_operations(person: User | AnonymousUser) -> bool:
    """Return whether somebody may read operations and the policy: by a role, or because the policy names them."""
    return getattr(person, "is_staff", False) or may(person, SEE_OPERATIONS) or _is_in_policy(person)


def may_propose(person: User | AnonymousUser) -> bool:
    """Return whether somebody may ask for operations, as ``require_proposer`` has it; a class of the policy may let fewer."""
    return may(person, PROPOSE) or _is_in_policy(person)


def _is_in_policy(person: User | AnonymousUser) -> bool:
    found = active_policy() if person.is_authenticated else None
    return found is not None and person.get_username() in found[1].groups


# Invitations


@transaction.atomic
def create_invitation(*, user: User, actor: str, hours: int = 72) -> tuple[Invitation, str]:
    """Return a new invitation and its token, which is stored nowhere. Earlier ones of the person end.

    Raises NotPermitted for somebody who is switched off or a life outside 1 to invitation_max_hours.
    """
    if not user.is_active:
        raise NotPermitted(_("This person is switched off. Switch the account on first."))
    if not 1 <= hours <= limits().governance.invitation_max_hours:
        raise NotPermitted(
            _("An invitation lives 1 to %(invitation_max_hours)s hours.")
            % {"invitation_max_hours": limits().governance.invitation_max_hours},
            param="hours",
        )
    now = clock.now()
    Invitation.objects.filter(user_id=user.pk, used_at__isnull=True, expires_at__gt=now).update(expires_at=now)
    text = secrets.token_urlsafe(32)
    invitation = Invitation.objects.create(
        user_id=user.pk, digest=_digest(text), created_by=actor, expires_at=now + timedelta(hours=hours)
    )
    record_event(
        actor=actor,
        action="invitation.create",
        target=user.get_username(),
        detail={"invitation": invitation.pk, "hours": hours},
    )
    return invitation, text


@transaction.atomic
def invite_member(*, name: str, email: str, tenant: str, role: Role, actor: str, may_add_known: bool) -> str:
    """Make somebody a member of a tenant; return the text of the invitation of a new person, "" for one who is known.

    ``may_add_known``: whoever may only invite to a tenant gets no link to the account of somebody who is here already, and adds
    nobody without their knowing. Raises NotPermitted.
    """
    people = get_user_model()
    known = people.objects.filter(username__iexact=name).first()
    if known is not None:
        if not may_add_known:
            raise NotPermitted(
                _("There is somebody of this name. Ask an owner of this installation to add them."), param="name"
            )
        set_member(person=known, tenant=tenant, role=role, actor=actor)
        return ""
    if settings.OIDC is not None and settings.LOCAL_SIGN_IN == "owners":
        text = _("People sign in with %(name)s here: a group of it makes somebody a member.")
        raise NotPermitted(text % {"name": settings.OIDC.name})
    try:
        people.username_validator(name)
    except ValidationError:
        raise NotPermitted(_("A username has letters, digits and @ . + - _ only."), param="name") from None
    person = people.objects.create_user(name, email=email)
    record_event(actor=actor, action="operator.create", target=name, detail={"fields": ["username"]})
    set_member(person=person, tenant=tenant, role=role, actor=actor)
    return create_invitation(user=person, actor=actor)[1]


def make_invitation_url(text: str) -> str:
    """Return the link that is handed to the person."""
    return f"{settings.PUBLIC_URL.rstrip('/')}/sign-in/invitation/{text}"


def find_invitation(text: str) -> Invitation:
    """Return the invitation that may be used now. Raises SignInRefused."""
    found = Invitation.objects.select_related("user").filter(
        digest=_digest(text), used_at__isnull=True, expires_at__gt=clock.now(), user__is_active=True
    )
    invitation = found.first()
    if invitation is None:
        raise SignInRefused(_("This invitation was used, has ended or never was. Ask an administrator for a new one."))
    require_local(invitation.user)
    return invitation


@transaction.atomic
def accept_invitation(*, text: str, passkey: NewPasskey, label: str) -> User:
    """Spend the invitation, enrol the passkey, return the person. Raises SignInRefused, NotPermitted, InvalidName."""
    invitation = find_invitation(text)
    # Compare and set: of two browsers with the same link one makes the passkey.
    spent = Invitation.objects.filter(pk=invitation.pk, used_at__isnull=True, expires_at__gt=clock.now()).update(
        used_at=clock.now()
    )
    if not spent:
        raise SignInRefused(_("This invitation was used. Ask an administrator for a new one."))
    person = invitation.user
    actor = f"user:{person.get_username()}"
    record_event(actor=actor, action="invitation.use", target=person.get_username(), detail={"invitation": invitation.pk})
    enrol_passkey(user=person, passkey=passkey, label=label, actor=actor)
    return person


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
