"""Slowing down those who guess passwords and codes: every try is booked before it is looked at.

Counted for a name from one address, for an address as a whole, and for a name from everywhere. The last would let anybody keep
somebody else out, so it and the second pass over an address from which the name signed in well. Passkeys are not counted.
What was typed as a name may be a password: rows hold a digest of it, keyed with the installation's secret key.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F, Q
from django.utils.crypto import salted_hmac

from core.limits import limits
from governance.errors import SignInRefused
from governance.models import SignInFailure
from wire import clock

REFUSAL = "The name, password or code is not right, or there were too many tries. Wait a minute and try again."
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
    if _is_known(hidden, address):
        return _book(hidden, address, NAME_PACE) == NAME_PACE.free
    _book(ANY, address, ADDRESS_PACE)
    from_here, from_anywhere = _book(hidden, address, NAME_PACE), _book(hidden, ANY, ANYWHERE_PACE)
    return from_here == NAME_PACE.free or from_anywhere == ANYWHERE_PACE.free


@transaction.atomic
def book_code(*, name: str, address: str) -> None:
    """Count one code behind a right password. Raises SignInRefused while one has to wait."""
    place = address if _is_known(_hide(name), address) else ANY
    _book(_hide(name, of="code"), place, CODE_PACE)


@transaction.atomic
def forgive(*, name: str, address: str) -> None:
    """Forget the tries of a name from an address after a right one, and know the address from then on.

    Of the address as a whole and of the name elsewhere only the right one itself is forgotten.
    """
    hidden, now = _hide(name), clock.now()
    if not _is_known(hidden, address):
        whole = Q(name=ANY, address=address) | Q(name=hidden, address=ANY)
        SignInFailure.objects.filter(whole, count__gt=0).update(count=F("count") - 1)
    SignInFailure.objects.filter(name=_hide(name, of="code"), address__in=[address, ANY]).delete()
    known = {"count": 0, "last_at": now, "signed_in_at": now}
    SignInFailure.objects.update_or_create(name=hidden, address=address, defaults=known)


def sweep_failures(*, now: datetime) -> int:
    """Delete what no longer counts; return how many rows that were."""
    past = SignInFailure.objects.filter(last_at__lt=now - timedelta(seconds=limits().governance.sign_in_forget_s)).exclude(
        signed_in_at__gt=now - timedelta(seconds=limits().governance.sign_in_known_s)
    )
    deleted, _ = past.delete()
    return deleted


def _hide(name: str, *, of: str = "name") -> str:
    return salted_hmac(f"muster.sign-in.{of}", name, algorithm="sha256").hexdigest()


def _is_known(hidden: str, address: str) -> bool:
    good = SignInFailure.objects.filter(
        name=hidden, address=address, signed_in_at__gt=clock.now() - timedelta(seconds=limits().governance.sign_in_known_s)
    )
    return good.exists()


def _book(name: str, address: str, pace: Pace) -> int:
    now = clock.now()
    row, _ = SignInFailure.objects.select_for_update().get_or_create(
        name=name, address=address, defaults={"count": 0, "last_at": now}
    )
    count = 0 if now - row.last_at > timedelta(seconds=limits().governance.sign_in_forget_s) else row.count
    if now < row.last_at + pace.wait(count):
        raise SignInRefused(REFUSAL)
    row.count, row.last_at = count + 1, now
    row.save(update_fields=["count", "last_at"])
    return row.count
