"""The session of a person: how it was opened, how long it lives, and the challenge that a browser was given.

``request.session["muster_assurance"]`` is how the person signed in. What that allows is ``governance.people``'s.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from django.contrib.auth import BACKEND_SESSION_KEY, SESSION_KEY, get_user, login, logout
from django.contrib.auth.models import AnonymousUser
from django.contrib.sessions.backends.base import SessionBase
from django.contrib.sessions.backends.db import SessionStore
from django.contrib.sessions.models import Session
from django.db import transaction
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from core.limits import limits
from governance.audit import record_event
from governance.errors import SignInRefused
from governance.keys import list_passkey_ids
from governance.people import Assurance, may_change
from wire import COMMAND, clock
from wire.optoken.approval import decode_bytes, encode_bytes

if TYPE_CHECKING:
    from core.models import User

ASSURANCE = "muster_assurance"
SIGNED_IN_AT = "muster_signed_in_at"
SEEN_AT = "muster_seen_at"
CHALLENGE = "muster_challenge"
HALF = "muster_half"
FOLLOWS = "X-Muster-Follow"
# Attribute of a request: whom ``may_act`` was asked of, and its answer.
_MAY_ACT = "_muster_may_act"
_BACKEND = "django.contrib.auth.backends.ModelBackend"


@dataclass(frozen=True, slots=True)
class SessionView:
    """One open session of a person, as its owner sees it."""

    opened_at: datetime
    seen_at: datetime
    assurance: str
    is_this: bool


@dataclass(frozen=True, slots=True)
class ReadOnly:
    """Why a session may only look, as a sentence, and the one link that changes it."""

    reason: str
    link: str
    url: str


def open_session(request: HttpRequest, user: User, *, assurance: Assurance) -> None:
    # Whatever the session held before is gone and its key is new, so that a planted one is worth nothing.
    request.session.flush()
    now = int(clock.unix_s())
    with transaction.atomic():
        login(request, user, backend=_BACKEND)
        request.session.update({ASSURANCE: assurance.value, SIGNED_IN_AT: now, SEEN_AT: now})
        record_event(actor=_name(user), action="sign-in.open", target=user.get_username(), detail={"by": assurance.value})


def close_session(request: HttpRequest) -> None:
    """Sign out, if anybody is signed in."""
    user = request.user
    if user.is_authenticated:
        with transaction.atomic():
            record_event(actor=_name(user), action="sign-in.close", target=user.get_username(), detail={})
    logout(request)


def read_assurance(request: HttpRequest) -> Assurance:
    """Return how the person signed in; the weakest way when the session does not say."""
    said = request.session.get(ASSURANCE)
    return Assurance(said) if said in set(Assurance) else Assurance.PASSWORD


def may_act(request: HttpRequest) -> bool:
    """Return whether the session may do what its person may; otherwise it may only look. One query for each request."""
    if isinstance(request.user, AnonymousUser):
        return False
    asked = (request.user.pk, read_assurance(request))
    known: tuple[object, bool] | None = getattr(request, _MAY_ACT, None)
    if known is None or known[0] != asked:
        known = (asked, may_change(request.user, asked[1]))
        setattr(request, _MAY_ACT, known)
    return known[1]


def find_read_only(request: HttpRequest) -> ReadOnly | None:
    """Return why the session of a signed-in person may only look and what repairs it; None when it may act."""
    user = request.user
    if isinstance(user, AnonymousUser) or may_act(request):
        return None
    if list_passkey_ids(user):
        reason = _("This session is read-only, because you signed in without your passkey.")
        wanted = urlencode({"next": request.get_full_path() if request.method == "GET" else request.path})
        return ReadOnly(reason, _("Sign in with your passkey"), f"{reverse('signin:login')}?{wanted}")
    reason = _(
        "This session is read-only, because you signed in without a passkey and have none that is in use. An administrator can "
        "send you an invitation, with which you make one; on the server %(muster)s manage invite makes it."
    ) % {"muster": COMMAND}
    return ReadOnly(reason, _("My keys"), reverse("signin:keys"))


def keep_session(request: HttpRequest, *, now: float) -> bool:
    """Note that the session is in use; False when it has been idle for too long or is too old, and has been ended."""
    if not _is_alive(request.session, now=now):
        logout(request)
        return False
    seen_at = request.session.get(SEEN_AT)
    # A page that asks by itself for what is new says so in the header FOLLOWS: that is no use of the session.
    if isinstance(seen_at, int) and now - seen_at > limits().governance.session_seen_s and FOLLOWS not in request.headers:
        request.session[SEEN_AT] = int(now)
    return True


def find_living(session_key: str, *, now: float) -> HttpRequest | None:
    """Return a request as the person of the session would make it now; None when the session has ended in any way.

    For what stays open longer than a request. It is no use of the session.
    """
    request = HttpRequest()
    request.session = SessionStore(session_key)
    request.user = get_user(request)
    return request if request.user.is_authenticated and _is_alive(request.session, now=now) else None


def _is_alive(session: SessionBase, *, now: float) -> bool:
    opened_at, seen_at = session.get(SIGNED_IN_AT), session.get(SEEN_AT)
    if not (isinstance(opened_at, int) and isinstance(seen_at, int)):
        return True  # opened by a program and not by a person; the cookie's age bounds it
    bounds = limits().governance
    # Groups of an issuer are read at sign-in alone, so that is repeated sooner.
    longest_s = bounds.oidc_session_s if session.get(ASSURANCE) == Assurance.OIDC else bounds.session_max_s
    return now - seen_at <= bounds.session_idle_s and now - opened_at <= min(longest_s, bounds.session_max_s)


def give_challenge(request: HttpRequest, purpose: str) -> bytes:
    """Return 32 random bytes for the browser to sign within ``challenge_s``. The newest one counts, once, for ``purpose``."""
    challenge = secrets.token_bytes(32)
    request.session[CHALLENGE] = {"of": purpose, "bytes": encode_bytes(challenge), "at": int(clock.unix_s())}
    if not request.user.is_authenticated:
        request.session.set_expiry(limits().governance.challenge_s)
    return challenge


def take_challenge(request: HttpRequest, purpose: str) -> bytes:
    """Return what was given for ``purpose`` and forget it. Raises SignInRefused when there is nothing or it is too old."""
    given = request.session.pop(CHALLENGE, None)
    if given is not None:
        # Saved before anything is verified: an answer that makes us fail must not be worth a second try.
        request.session.save()
    is_good = (
        isinstance(given, dict) and given["of"] == purpose and clock.unix_s() - given["at"] <= limits().governance.challenge_s
    )
    if not is_good:
        raise SignInRefused(_("That took too long, or was done in another window. Try again."))
    return decode_bytes(given["bytes"])


def keep_half(request: HttpRequest, user: User) -> None:
    """Remember for ``challenge_s`` whose password was right, until the code of the app follows. It signs nobody in."""
    request.session[HALF] = {"user": user.pk, "at": int(clock.unix_s())}
    if not request.user.is_authenticated:
        request.session.set_expiry(limits().governance.challenge_s)


def read_half(request: HttpRequest) -> int | None:
    """Return the id of the person whose code is awaited; None when there is none, or it took too long."""
    half = request.session.get(HALF)
    if not isinstance(half, dict) or clock.unix_s() - half["at"] > limits().governance.challenge_s:
        return None
    return int(half["user"])


def drop_half(request: HttpRequest) -> None:
    request.session.pop(HALF, None)


def list_sessions(request: HttpRequest) -> list[SessionView]:
    """Return the person's open sessions, the newest first."""
    views = [
        SessionView(
            opened_at=datetime.fromtimestamp(data[SIGNED_IN_AT], UTC),
            seen_at=datetime.fromtimestamp(data[SEEN_AT], UTC),
            assurance=str(data.get(ASSURANCE, "")),
            is_this=key == request.session.session_key,
        )
        for key, data in _sessions_of(request.user.pk)
        if SIGNED_IN_AT in data and SEEN_AT in data
    ]
    return sorted(views, key=lambda view: view.opened_at, reverse=True)


def close_other_sessions(request: HttpRequest) -> int:
    """End every session of the person but this one; return how many those were."""
    keys = [key for key, _at in _sessions_of(request.user.pk) if key != request.session.session_key]
    with transaction.atomic():
        Session.objects.filter(session_key__in=keys).delete()
        record_event(
            actor=_name(request.user),
            action="sign-in.close-others",
            target=request.user.get_username(),
            detail={"sessions": len(keys)},
        )
    return len(keys)


def close_sessions(*, person: User, actor: str) -> int:
    """End every session of a person; return how many those were."""
    keys = [key for key, _ in _sessions_of(person.pk)]
    with transaction.atomic():
        Session.objects.filter(session_key__in=keys).delete()
        if keys:
            record_event(actor=actor, action="sign-in.close-all", target=person.get_username(), detail={"sessions": len(keys)})
    return len(keys)


def sweep_sessions() -> int:
    """Delete the sessions that have ended; return how many those were."""
    deleted, _by_table = Session.objects.filter(expire_date__lt=clock.now()).delete()
    return deleted


def _sessions_of(user_id: object) -> list[tuple[str, dict[str, Any]]]:  # Any: what a session holds
    """Return key and content of the open sessions of a person."""
    found = []
    # All sessions are read: Django's rows have no column for the person, and they are few.
    for row in Session.objects.filter(expire_date__gt=clock.now()).iterator():
        data = row.get_decoded()
        if data.get(SESSION_KEY) == str(user_id) and BACKEND_SESSION_KEY in data:
            found.append((row.session_key, data))
    return found


def _name(user: User | AnonymousUser) -> str:
    return f"user:{user.get_username()}"
