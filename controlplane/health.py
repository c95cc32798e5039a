"""Whether this control plane can do its work: ``GET /healthz``, for supervisors and load balancers."""

from __future__ import annotations

from http import HTTPStatus

from django.db import Error as DatabaseFailure
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from core.db import Patience, limit_patience
from core.hints import read_unreadable
from core.limits import limits
from wire import clock


@never_cache
@require_safe
def show_health(request: HttpRequest) -> JsonResponse:
    """Answer 200, or 503 when the database is away or takes no writes.

    Without Redis we are degraded, not down: it only carries hints.
    """
    database, redis_ok = look_at_database(), is_redis_reachable()
    database_ok = database == "ok"
    body = {
        "ok": database_ok,
        "service": "control",
        "database": database,
        "redis": "ok" if redis_ok else "unreachable",
    }
    return JsonResponse(body, status=HTTPStatus.OK if database_ok else HTTPStatus.SERVICE_UNAVAILABLE)


def look_at_database() -> str:
    """Return ``ok``, ``read-only``, or ``unreachable`` when the database does not answer within ``health_database_s``."""
    patience = Patience(
        silence_s=limits().console.health_database_s, ends_at=clock.monotonic() + limits().console.health_database_s
    )
    try:
        with limit_patience(patience), connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('transaction_read_only')")
            (answer,) = cursor.fetchone()
    except DatabaseFailure:
        return "unreachable"
    return "read-only" if answer == "on" else "ok"


def is_redis_reachable() -> bool:
    """Return whether Redis answers within READ_TIMEOUT_S."""
    return read_unreadable() is not None
