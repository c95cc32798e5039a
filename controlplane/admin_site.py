"""The admin site of operators: Unfold's, with our overview as its first page."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.admin.apps import AdminConfig, SimpleAdminConfig
from django.http import HttpRequest
from django.template.response import TemplateResponse
from unfold.sites import UnfoldAdminSite


class MusterAdminSite(UnfoldAdminSite):  # type: ignore[misc]  # Unfold ships no types
    """The one admin site. Pages show; every change is a call of one service."""

    site_title = "Muster"
    site_header = "Muster"
    index_title = "Overview"

    def index(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> TemplateResponse:
        """Show what runs, the last hour and what is wrong now."""
        from controlplane.chart import draw_minutes  # these reach models, which are not there yet when apps are loaded
        from controlplane.overview import read_overview

        overview = read_overview()
        own = {"overview": overview, "chart": draw_minutes(overview.traffic.minutes)}
        response: TemplateResponse = super().index(request, {**own, **(extra_context or {})})
        return response


class MusterAdminConfig(AdminConfig):
    """Puts our site in the place of Django's."""

    default_site = "controlplane.admin_site.MusterAdminSite"

    def ready(self) -> None:
        """Load every app's pages, except in a process that shows none: they cost it a second and 15 MB."""
        if settings.ADMIN_PAGES:
            super().ready()
        else:
            SimpleAdminConfig.ready(self)
