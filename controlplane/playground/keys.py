"""Who may use the playground, and the key with which the page asks: made for one session and one tenant, kept in that session.

At sign-out the key is revoked.
"""

from __future__ import annotations

import hashlib
import uuid
from contextlib import suppress
from datetime import datetime, timedelta

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings
from django.contrib.auth.models import AbstractBaseUser
from django.contrib.sessions.models import Session
from django.db import transaction
from django.http import HttpRequest

from controlplane.navigation import SEE_MODELS
from controlplane.playground.asks import TENANT_FIELD, AskRefused, SignedOut
from core.admin_pages import name_actor
from core.limits import limits
from core.roles import may
from gateway.services.errors import KeyNotFound
from gateway.services.keys import create_api_key, is_key_usable, revoke_api_key
from gateway.services.tenants import find_tenant
from wire import clock
from wire.credentials import derive_cipher

ADD_KEY = "gateway.add_apikey"
VIEW_RECORD = "gateway.view_requestrecord"


def may_play(request: HttpRequest) -> bool:
    """Return whether the page is for this person: an operator who may see which models there are."""
    user = request.user
    return bool(user.is_active and getattr(user, "is_staff", False)) and any(may(user, name) for name in SEE_MODELS)


def may_lend(request: HttpRequest) -> bool:
    return may(request.user, ADD_KEY)


def may_see_records(request: HttpRequest) -> bool:
    return may(request.user, VIEW_RECORD)


SESSION_KEYS = "muster_playground_keys"
"""In the session: tenant → ``{"id", "sealed"}``."""


def lend_key(request: HttpRequest, tenant_name: str) -> str:
    """Return the text of the session's key for a tenant, a new one when there is none that works.

    Raises AskRefused for a tenant that is missing or disabled, SignedOut when the session has ended meanwhile.
    """
    tenant = find_tenant(tenant_name)
    if tenant is None or not tenant.is_active:
        raise AskRefused("Choose a tenant that is enabled.", param=TENANT_FIELD)
    # One key for each browser, so that none ends what another has begun.
    text = _open_held(request.session.get(SESSION_KEYS, {}).get(tenant.name))
    return text if text is not None else _make_key(request, tenant.name)


@transaction.atomic
def _make_key(request: HttpRequest, tenant_name: str) -> str:
    """Return the text of a key that another tab has made by now, or of a new one. A predecessor ends at its own time."""
    # Locked: the second of two tabs finds what the first has stored, and nobody signs out in between.
    session = Session.objects.select_for_update().filter(session_key=request.session.session_key).first()
    if session is None:
        raise SignedOut
    held = session.get_decoded().get(SESSION_KEYS, {})
    text = _open_held(held.get(tenant_name))
    if text is None:
        key, text = create_api_key(
            name=name_key(request.user.get_username()),
            tenant_name=tenant_name,
            actor=name_actor(request),
            expires_at=clock.now() + timedelta(seconds=limits().console.playground_key_s),
        )
        # The session lies in the database, where keys otherwise are only hashes: sealed with what is not in the database.
        sealed = _cipher().encrypt(text.encode()).decode()
        held = {**held, tenant_name: {"id": str(key.pk), "sealed": sealed}}
    request.session[SESSION_KEYS] = held
    # Now, and not with the answer: that may wait for minutes, and by then another request may have changed the session.
    request.session.save()
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
    if len(name) <= limits().gateway.name_chars:
        return name
    mark = hashlib.sha256(username.encode()).hexdigest()[:12]
    return f"{name[: limits().gateway.name_chars - len(mark) - 1]}~{mark}"


def _open_held(entry: object, *, at: datetime | None = None) -> str | None:
    """Return the text of a key that the session holds, if it still works a while after ``at`` (None = now)."""
    if not isinstance(entry, dict):
        return None
    longest_s = int(limits().console.playground_key_s) - limits().console.playground_key_reserve_s
    now_s = int((at or clock.now()).timestamp())
    try:
        text = _cipher().decrypt_at_time(str(entry["sealed"]).encode(), longest_s, now_s).decode()
        key_id = uuid.UUID(str(entry["id"]))
    except (InvalidToken, KeyError, ValueError):
        return None
    return text if is_key_usable(key_id) else None


def _cipher() -> Fernet:
    return derive_cipher(settings.SECRET_KEY, purpose="muster playground keys")
