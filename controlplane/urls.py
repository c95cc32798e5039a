"""Every address of the control plane, and whether it can do its work. The client-facing API is on the gateway, not here."""

from __future__ import annotations

from http import HTTPStatus

from django.conf import settings
from django.contrib import admin
from django.db import Error as DatabaseFailure
from django.db import connection
from django.http import HttpRequest, JsonResponse
from django.urls import URLPattern, URLResolver, include, path
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from django.views.generic import RedirectView
from django.views.i18n import set_language
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from controlplane.metrics import show_metrics
from controlplane.navigation import show_found
from controlplane.system import show_system
from core.db.base import WaitLimit, limit_waits
from core.hints import read_unreadable
from core.limits import limits
from wire import clock


@never_cache
@require_safe
def show_health(request: HttpRequest) -> JsonResponse:
    """Answer 200, or 503 when the database is away or takes no writes."""
    database, redis = look_at_database(), "unreachable" if read_unreadable() is None else "ok"
    # Without Redis it is degraded, not down: that only carries hints.
    is_ok = database == "ok"
    body = {"ok": is_ok, "service": "control", "database": database, "redis": redis}
    return JsonResponse(body, status=HTTPStatus.OK if is_ok else HTTPStatus.SERVICE_UNAVAILABLE)


def look_at_database() -> str:
    """Return ``ok``, ``read-only``, or ``unreachable`` when the database does not answer within ``health_database_s``."""
    longest_s = limits().console.health_database_s
    try:
        with limit_waits(WaitLimit(longest_s, ends_at=clock.monotonic() + longest_s)), connection.cursor() as cursor:
            cursor.execute("SELECT current_setting('transaction_read_only')")
            (answer,) = cursor.fetchone()
    except DatabaseFailure:
        return "unreachable"
    return "read-only" if answer == "on" else "ok"


urlpatterns: list[URLPattern | URLResolver] = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/search/", show_found, name="palette"),
    path("admin/system/", show_system, name="system"),
    path("admin/playground/", include("controlplane.playground.views")),
    path("admin/usage/", include("gateway.admin.usage")),
    path("admin/", admin.site.urls),
    path("tenants/", include("gateway.admin.own_tenants")),
    path("favicon.ico", RedirectView.as_view(url=f"{settings.STATIC_URL}muster/favicon.svg")),
    path("language", set_language, name="set_language"),
    path("healthz", show_health, name="healthz"),
    path("metrics", show_metrics, name="metrics"),
    path("api/schema", SpectacularAPIView.as_view(), name="schema"),
    path("api/docs", SpectacularSwaggerSplitView.as_view(url_name="schema"), name="docs"),
    path("", include("nodes.api")),
    path("", include("gateway.api")),
    path("", include("governance.urls")),
]

handler400 = "controlplane.api_errors.bad_request"
handler403 = "controlplane.api_errors.permission_denied"
handler404 = "controlplane.api_errors.page_not_found"
handler500 = "controlplane.api_errors.server_error"
