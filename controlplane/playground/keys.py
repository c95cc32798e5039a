"""The key with which the page asks: made for the signed-in person and one tenant, good for an hour, kept in the session.

The session lies in the database, where keys otherwise are only hashes. So it holds the text sealed with a key that is
derived from ``MUSTER_SECRET_KEY``, which is not in the database. At sign-out the key is revoked.
"""

from __future__ import annotations

import base64
import hashlib
import uuid
from contextlib import suppress
from datetime import timedelta

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser
from django.contrib.sessions.backends.base import UpdateError
from django.http import HttpRequest
from django.utils import timezone

from controlplane.playground.errors import SignedOut, TenantRefused
from gateway.services import KeyNotFound, find_tenant, revoke_api_key
from gateway.services.keys import is_key_usable, replace_api_key
from gateway.services.values import MAX_NAME_CHARS
from governance.pages import name_actor

SESSION_KEYS = "muster_playground_keys"
"""In the session: tenant → ``{"id", "sealed"}``."""
LIFETIME = timedelta(hours=1)
RESERVE_S = 60
"""A key with less time left is replaced: a request that waits in a queue still needs it."""


def lend_key(request: HttpRequest, tenant_name: str) -> str:
    """Return the text of the person's key for a tenant, a new one when there is none that works.

    The session is stored at once. Raises TenantRefused for one that is missing or disabled, SignedOut when the session has
    ended meanwhile; no key is left then.
    """
    tenant = find_tenant(tenant_name)
    if tenant is None or not tenant.is_active:
        raise TenantRefused
    held = request.session.get(SESSION_KEYS, {})
    text = _open_held(held.get(tenant.name))
    if text is not None:
        return text
    key, text = replace_api_key(
        name=name_key(request.user.get_username()),
        tenant_name=tenant.name,
        actor=name_actor(request),
        expires_at=timezone.now() + LIFETIME,
    )
    sealed = _cipher().encrypt(text.encode()).decode()
    request.session[SESSION_KEYS] = {**held, tenant.name: {"id": str(key.pk), "sealed": sealed}}
    # Now, and not with the answer: that may wait for minutes, and by then another request may have changed the session.
    try:
        request.session.save()
    except UpdateError:
        revoke_api_key(key_id=key.pk, actor=name_actor(request))
        raise SignedOut from None
    request.session.modified = False
    return text


def forget_keys_of_session(request: HttpRequest, user: AbstractBaseUser | None, **kwargs: object) -> None:
    """Revoke what the session holds. Django calls it when a person signs out, or was idle for too long."""
    held = request.session.get(SESSION_KEYS, {})
    if user is None or not isinstance(held, dict):
        return
    for entry in held.values():
        with suppress(KeyNotFound, KeyError, TypeError, ValueError):  # then it is nothing that we wrote
            revoke_api_key(key_id=uuid.UUID(entry["id"]), actor=f"user:{user.get_username()}")


def name_key(username: str) -> str:
    """Return what the page's keys of a person are called; a name that is too long ends in a part of its hash."""
    name = f"playground: {username}"
    if len(name) <= MAX_NAME_CHARS:
        return name
    mark = hashlib.sha256(username.encode()).hexdigest()[:12]
    return f"{name[: MAX_NAME_CHARS - len(mark) - 1]}~{mark}"


def _open_held(entry: object) -> str | None:
    """Return the text of a key that the session holds, if it still works for a while."""
    if not isinstance(entry, dict):
        return None
    longest_s = int(LIFETIME.total_seconds()) - RESERVE_S
    try:
        text = _cipher().decrypt(str(entry["sealed"]).encode(), ttl=longest_s).decode()
        key_id = uuid.UUID(str(entry["id"]))
    except (InvalidToken, KeyError, ValueError):
        return None
    return text if is_key_usable(key_id) else None


def _cipher() -> Fernet:
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=b"muster playground keys").derive(
        settings.SECRET_KEY.encode()
    )
    return Fernet(base64.urlsafe_b64encode(derived))
