"""Every address of the control plane. The client-facing API is on the gateway, not here."""

from __future__ import annotations

from django.conf import settings
from django.contrib import admin
from django.urls import URLPattern, URLResolver, include, path
from django.views.generic import RedirectView
from drf_spectacular.views import SpectacularAPIView, SpectacularSwaggerSplitView

from controlplane.health import show_health

urlpatterns: list[URLPattern | URLResolver] = [
    path("", RedirectView.as_view(pattern_name="admin:index")),
    path("admin", RedirectView.as_view(pattern_name="admin:index")),
    path("admin/playground/", include("controlplane.playground.urls")),
    path("admin/", admin.site.urls),
    path("sign-in/", include("governance.views.signin_urls")),
    path("favicon.ico", RedirectView.as_view(url=f"{settings.STATIC_URL}muster/favicon.svg")),
    path("healthz", show_health, name="healthz"),
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
