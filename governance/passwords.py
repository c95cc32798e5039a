"""What goes with a password: the code of an authenticator app (TOTP, RFC 6238), and slowing down those who guess either.

Tries are counted for a name from one address, for an address as a whole, and for a name from everywhere. Passkeys are not
counted. A code is a second factor for those who only look; it works once and approves nothing.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import pyotp
import segno
from django.db import transaction
from django.db.models import F, Q
from django.utils.crypto import salted_hmac
from django.utils.translation import gettext, gettext_noop
from django.utils.translation import gettext as _

from core.limits import limits
from governance.audit import record_event
from governance.errors import NotPermitted, SignInRefused
from governance.models import OneTimePassword, SignInFailure
from wire import clock

if TYPE_CHECKING:
    from core.models import User


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a person scans or types into the app. ``picture``: a QR code as a ``data:`` URI."""

    secret: str = field(repr=False)
    picture: str = field(repr=False)


def has_app(user: User) -> bool:
    return OneTimePassword.objects.filter(user_id=user.pk, confirmed_at__isnull=False).exists()


def begin_app(user: User) -> Enrolment:
    """Return the secret to set an app up with; the same one until a code confirms it. Raises NotPermitted for a second app."""
    row, _made = OneTimePassword.objects.get_or_create(user_id=user.pk, defaults={"secret": pyotp.random_base32()})
    if row.confirmed_at is not None:
        raise NotPermitted(_("An authenticator app is set up already. Remove it first."))
    uri = pyotp.TOTP(row.secret).provisioning_uri(name=user.get_username(), issuer_name="Muster")
    picture = segno.make(uri, error="m").svg_data_uri(scale=5, border=2, dark="#000", light="#fff")
    return Enrolment(row.secret, picture)


@transaction.atomic
def confirm_app(*, user: User, code: str, actor: str) -> None:
    """Take the app into use after one right code. Raises SignInRefused for a wrong one, NotPermitted when there is nothing."""
    row = OneTimePassword.objects.select_for_update().filter(user_id=user.pk, confirmed_at__isnull=True).first()
    if row is None:
        raise NotPermitted(_("There is no authenticator app to confirm."))
    step = find_step(row.secret, code, now=clock.now(), after=row.last_step)
    if step is None:
        raise SignInRefused(_("This code is not right. Look whether the telephone's clock is, and type the newest code."))
    row.last_step, row.confirmed_at = step, clock.now()
    row.save(update_fields=["last_step", "confirmed_at"])
    record_event(actor=actor, action="one-time-password.set-up", target=user.get_username())


def spend_code(*, user: User, code: str) -> bool:
    """Return whether ``code`` is right and was not used before; from now on it is used."""
    row = OneTimePassword.objects.filter(user_id=user.pk, confirmed_at__isnull=False).first()
    if row is None:
        return False
    step = find_step(row.secret, code, now=clock.now(), after=row.last_step)
    return step is not None and bool(OneTimePassword.objects.filter(pk=row.pk, last_step__lt=step).update(last_step=step))


@transaction.atomic
def remove_app(*, user: User, actor: str) -> None:
    """Forget the person's app, if there is one."""
    removed, _by_table = OneTimePassword.objects.filter(user_id=user.pk).delete()
    if removed:
        record_event(actor=actor, action="one-time-password.remove", target=user.get_username())


def find_step(secret: str, code: str, *, now: datetime, after: int) -> int | None:
    """Return the time step whose code this is, if it is near ``now`` and later than the step ``after``; else None."""
    digits = code.replace(" ", "")
    if len(digits) != 6 or not (digits.isascii() and digits.isdigit()):
        return None
    app, around = pyotp.TOTP(secret), limits().governance.one_time_password_steps
    current = app.timecode(now)
    found = None
    for step in range(current - around, current + around + 1):
        if hmac.compare_digest(app.generate_otp(step), digits) and step > after:
            found = step
    return found


REFUSAL = gettext_noop("The name, password or code is not right, or there were too many tries. Wait a minute and try again.")
"""One text for every cause: it tells nobody which names exist."""
ANY = ""
"""In the place of a name or an address: counted over all of them."""


@dataclass(frozen=True, slots=True)
class Pace:
    """``free`` wrong tries cost nothing; then each one doubles the wait, from 1 s up to ``longest_s``."""

    free: int
    longest_s: int

    def wait(self, failures: int) -> timedelta:
        """Return how long to wait after that many wrong tries."""
        # 2**20 s is longer than any ``longest_s``; a counter must not make the number grow without end.
        return timedelta(seconds=min(2 ** min(failures - self.free, 20), self.longest_s) if failures >= self.free else 0)


NAME_PACE = Pace(free=5, longest_s=900)
ADDRESS_PACE = Pace(free=30, longest_s=60)
"""Looser, because behind a proxy or a company's router an address is many people."""
ANYWHERE_PACE = Pace(free=10, longest_s=60)
"""For a name from addresses that it is not known at. The wait is short: it may be a good person's first sign-in from there."""
CODE_PACE = Pace(free=5, longest_s=900)
"""For wrong codes behind a right password: only who knows the password can make somebody wait."""


@transaction.atomic
def book_try(*, name: str, address: str) -> bool:
    """Count one try before it is looked at, and return whether it was the last free one of its name.

    Raises SignInRefused while one has to wait; that try is not counted.
    """
    hidden = _hide(name)
    # The other two counts would let anybody keep somebody else out, so they pass over an address from which the name signed
    # in well.
    if _is_known(hidden, address):
        return _book(hidden, address, NAME_PACE) == NAME_PACE.free
    _book(ANY, address, ADDRESS_PACE)
    from_here, from_anywhere = _book(hidden, address, NAME_PACE), _book(hidden, ANY, ANYWHERE_PACE)
    return from_here == NAME_PACE.free or from_anywhere == ANYWHERE_PACE.free


@transaction.atomic
def book_code(*, name: str, address: str) -> bool:
    """Count one code behind a right password, and return whether it was the last free one. Raises SignInRefused as above."""
    place = address if _is_known(_hide(name), address) else ANY
    return _book(_hide(name, of="code"), place, CODE_PACE) == CODE_PACE.free


@transaction.atomic
def forgive(*, name: str, address: str) -> None:
    """Forget the tries of a name from an address after a right one, and know the address from then on."""
    hidden, now = _hide(name), clock.now()
    if not _is_known(hidden, address):
        # Of the address as a whole and of the name elsewhere only the right one itself.
        whole = Q(name=ANY, address=address) | Q(name=hidden, address=ANY)
        SignInFailure.objects.filter(whole, count__gt=0).update(count=F("count") - 1)
    SignInFailure.objects.filter(name=_hide(name, of="code"), address__in=[address, ANY]).delete()
    known = {"count": 0, "last_at": now, "signed_in_at": now}
    SignInFailure.objects.update_or_create(name=hidden, address=address, defaults=known)


def sweep_failures(*, now: datetime) -> int:
    """Delete what no longer counts; return how many rows that were."""
    forgotten, known = (
        timedelta(seconds=s) for s in (limits().governance.sign_in_forget_s, limits().governance.sign_in_known_s)
    )
    return SignInFailure.objects.filter(last_at__lt=now - forgotten).exclude(signed_in_at__gt=now - known).delete()[0]


def _hide(name: str, *, of: str = "name") -> str:
    # What was typed as a name may be a password, so rows hold a digest of it, keyed with the installation's secret key.
    return salted_hmac(f"muster.sign-in.{of}", name, algorithm="sha256").hexdigest()


def _is_known(hidden: str, address: str) -> bool:
    good = SignInFailure.objects.filter(
        name=hidden, address=address, signed_in_at__gt=clock.now() - timedelta(seconds=limits().governance.sign_in_known_s)
    )
    return good.exists()


def _book(name: str, address: str, pace: Pace) -> int:
    now = clock.now()
    row, _made = SignInFailure.objects.select_for_update().get_or_create(
        name=name, address=address, defaults={"count": 0, "last_at": now}
    )
    count = 0 if now - row.last_at > timedelta(seconds=limits().governance.sign_in_forget_s) else row.count
    if now < row.last_at + pace.wait(count):
        raise SignInRefused(gettext(REFUSAL))
    row.count, row.last_at = count + 1, now
    row.save(update_fields=["count", "last_at"])
    return row.count
