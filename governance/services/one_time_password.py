"""Authenticator apps (TOTP, RFC 6238): a second factor for those who only look. A code works once and approves nothing."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

import pyotp
import segno
from django.db import transaction

from core.limits import limits
from governance.audit import record_event
from governance.errors import NotPermitted, SignInRefused
from governance.models import OneTimePassword
from wire import clock

if TYPE_CHECKING:
    from core.models import User


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a person scans or types into the app. ``picture``: a QR code as a ``data:`` URI."""

    secret: str = field(repr=False)
    picture: str = field(repr=False)


def has_app(user: User) -> bool:
    """Return whether the person's app is set up."""
    return OneTimePassword.objects.filter(user_id=user.pk, confirmed_at__isnull=False).exists()


def begin_app(user: User) -> Enrolment:
    """Return the secret to set an app up with; the same one until a code confirms it. Raises NotPermitted for a second app."""
    row, _ = OneTimePassword.objects.get_or_create(user_id=user.pk, defaults={"secret": pyotp.random_base32()})
    if row.confirmed_at is not None:
        raise NotPermitted("An authenticator app is set up already. Remove it first.")
    uri = pyotp.TOTP(row.secret).provisioning_uri(name=user.get_username(), issuer_name="Muster")
    picture = segno.make(uri, error="m").svg_data_uri(scale=5, border=2, dark="#000", light="#fff")
    return Enrolment(row.secret, picture)


@transaction.atomic
def confirm_app(*, user: User, code: str, actor: str) -> None:
    """Take the app into use after one right code. Raises SignInRefused for a wrong one, NotPermitted when there is nothing."""
    row = OneTimePassword.objects.select_for_update().filter(user_id=user.pk, confirmed_at__isnull=True).first()
    if row is None:
        raise NotPermitted("There is no authenticator app to confirm.")
    step = find_step(row.secret, code, now=clock.now(), after=row.last_step)
    if step is None:
        raise SignInRefused("This code is not right. Look whether the telephone's clock is, and type the newest code.")
    row.last_step, row.confirmed_at = step, clock.now()
    row.save(update_fields=["last_step", "confirmed_at"])
    record_event(actor=actor, action="one-time-password.set-up", target=user.get_username())


def spend_code(*, user: User, code: str) -> bool:
    """Return whether ``code`` is right and was not used before; from now on it is used."""
    row = OneTimePassword.objects.filter(user_id=user.pk, confirmed_at__isnull=False).first()
    if row is None:
        return False
    step = find_step(row.secret, code, now=clock.now(), after=row.last_step)
    if step is None:
        return False
    return bool(OneTimePassword.objects.filter(pk=row.pk, last_step__lt=step).update(last_step=step))


@transaction.atomic
def remove_app(*, user: User, actor: str) -> None:
    """Forget the person's app, if there is one."""
    removed, _ = OneTimePassword.objects.filter(user_id=user.pk).delete()
    if removed:
        record_event(actor=actor, action="one-time-password.remove", target=user.get_username())


def find_step(secret: str, code: str, *, now: datetime, after: int) -> int | None:
    """Return the time step whose code this is, if it is near ``now`` and later than the step ``after``; else None."""
    digits = code.replace(" ", "")
    if len(digits) != 6 or not (digits.isascii() and digits.isdigit()):
        return None
    app = pyotp.TOTP(secret)
    current = app.timecode(now)
    found = None
    for step in range(
        current - limits().governance.one_time_password_steps, current + limits().governance.one_time_password_steps + 1
    ):
        if hmac.compare_digest(app.generate_otp(step), digits) and step > after:
            found = step
    return found
