"""Slowing down those who guess passwords and codes: every try is booked before it is looked at.

Counted for a name from one address, so that nobody can lock somebody else out, and for an address as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import F
from django.utils import timezone

from governance.errors import SignInRefused
from governance.models import SignInFailure

REFUSAL = "The name, password or code is not right, or there were too many tries. Wait a minute and try again."
"""One text for every cause: it tells nobody which names exist."""
FORGET_AFTER = timedelta(hours=1)
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
CODE_PACE = Pace(free=5, longest_s=900)
"""For wrong codes behind a right password, from wherever they come: only who knows the password can make somebody wait."""


@transaction.atomic
def book_try(*, name: str, address: str) -> int:
    """Count one try before it is looked at, and return how many of this name and address are counted now.

    Raises SignInRefused while one has to wait; that try is not counted.
    """
    _book(ANY, address, ADDRESS_PACE)
    return _book(name, address, NAME_PACE)


@transaction.atomic
def book_code(*, name: str) -> None:
    """Count one code behind a right password. Raises SignInRefused while one has to wait."""
    _book(name, ANY, CODE_PACE)


@transaction.atomic
def forgive(*, name: str, address: str) -> None:
    """Forget the tries of a name after a right one; of its address only the right one itself."""
    SignInFailure.objects.filter(name=name, address__in=[address, ANY]).delete()
    SignInFailure.objects.filter(name=ANY, address=address, count__gt=0).update(count=F("count") - 1)


def sweep_failures(*, now: datetime) -> int:
    """Delete what no longer counts; return how many rows that were."""
    deleted, _ = SignInFailure.objects.filter(last_at__lt=now - FORGET_AFTER).delete()
    return deleted


def _book(name: str, address: str, pace: Pace) -> int:
    now = timezone.now()
    row, _ = SignInFailure.objects.select_for_update().get_or_create(
        name=name, address=address, defaults={"count": 0, "last_at": now}
    )
    count = 0 if now - row.last_at > FORGET_AFTER else row.count
    if now < row.last_at + pace.wait(count):
        raise SignInRefused(REFUSAL)
    row.count, row.last_at = count + 1, now
    row.save(update_fields=["count", "last_at"])
    return row.count
