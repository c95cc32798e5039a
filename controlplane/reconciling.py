"""The reconciler: looks every few seconds for operations that are due, so that a lost message or a deaf worker only costs time.

It needs neither Celery nor the broker; web and worker each run one, in a thread with a database connection of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from django.db import Error as DatabaseFailure
from django.db import connections

from core.db.threads import with_kept_connection
from core.limits import limits

logger = logging.getLogger(__name__)


class Reconciler:
    """Calls ``look`` every ``every_s`` seconds from ``start`` until ``stop``, whatever becomes of one call."""

    def __init__(self, look: Callable[[], int] | None = None, *, every_s: float | None = None) -> None:
        self._look = look or _look_for_operations
        self._every_s = limits().console.reconcile_s if every_s is None else every_s
        self._stopping = threading.Event()
        self._is_away = False
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begin, with the first look at once."""
        self._thread.start()

    def stop(self) -> bool:
        """End after the look under way; False when that takes longer than ``reconcile_stop_s``: its transaction rolls back."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(limits().console.reconcile_stop_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with_kept_connection(self._look)
                self._note_database(is_away=False)
            except DatabaseFailure as error:
                self._note_database(is_away=True, why=type(error).__name__)
            except Exception:
                # One operation that cannot be looked at must not stop the looks at all others.
                logger.exception("reconcile_failed")
            self._stopping.wait(self._every_s)
        connections.close_all()

    def _note_database(self, *, is_away: bool, why: str = "") -> None:
        """Log when the database goes away and when it is back, not every few seconds in between."""
        if is_away and not self._is_away:
            logger.warning("reconcile_waits reason=%s", why)
        elif self._is_away and not is_away:
            logger.info("reconcile_goes_on")
        self._is_away = is_away


def _look_for_operations() -> int:
    from governance.operations.runs import reconcile  # needs the apps to be loaded, which they are by now

    return reconcile()
