"""Changes to the credentials of the admin APIs. Every caller (admin pages, launcher, commands) comes through here."""

from __future__ import annotations

from datetime import timedelta

from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from governance.audit import record_event
from governance.errors import AdminTokenNotFound, InvalidName
from governance.models import AdminToken
from wire.credentials import CredentialKind, mint_credential, parse_keyid, verify_credential

MAX_NAME_CHARS = 80
TOUCH_EVERY = timedelta(minutes=1)
_NO_DIGEST = bytes(32)


@transaction.atomic
def create_admin_token(*, name: str, actor: str) -> tuple[AdminToken, str]:
    """Create a token and return it with its text, which exists nowhere else and is shown once. Raises InvalidName."""
    cleaned = name.strip()
    if not cleaned or len(cleaned) > MAX_NAME_CHARS:
        raise InvalidName(f"Give the token a name of 1 to {MAX_NAME_CHARS} characters.", param="name")
    minted = mint_credential(CredentialKind.ADMIN)
    token = AdminToken.objects.create(name=cleaned, keyid=minted.keyid, digest=minted.digest)
    record_event(actor=actor, action="admin_token.create", target=cleaned, detail={"keyid": minted.keyid})
    return token, minted.text


@transaction.atomic
def revoke_admin_token(*, token_id: int, actor: str) -> AdminToken:
    """Make a token useless from now on; doing so again changes nothing. Raises AdminTokenNotFound."""
    changed = AdminToken.objects.filter(pk=token_id, revoked_at__isnull=True).update(revoked_at=timezone.now())
    token = AdminToken.objects.filter(pk=token_id).first()
    if token is None:
        raise AdminTokenNotFound(f"There is no admin token {token_id}.", param="token_id")
    if changed:
        record_event(actor=actor, action="admin_token.revoke", target=token.name, detail={"keyid": token.keyid})
    return token


def verify_admin_token(text: str) -> AdminToken | None:
    """Return the token that ``text`` is, or None when it is none, or a revoked one, or a credential of another kind.

    Takes the same time whether the key id exists or not. Writes ``last_used_at`` at most once a minute.
    """
    keyid = parse_keyid(text, CredentialKind.ADMIN)
    if keyid is None:
        return None
    token = AdminToken.objects.filter(keyid=keyid, revoked_at__isnull=True).first()
    matches = verify_credential(text, bytes(token.digest) if token is not None else _NO_DIGEST)
    if token is None or not matches:
        return None
    _touch(token)
    return token


def _touch(token: AdminToken) -> None:
    now = timezone.now()
    if token.last_used_at is not None and now - token.last_used_at < TOUCH_EVERY:
        return
    due = Q(last_used_at__isnull=True) | Q(last_used_at__lt=now - TOUCH_EVERY)
    AdminToken.objects.filter(due, pk=token.pk).update(last_used_at=now)
    token.last_used_at = now
