"""The admin site of operators: Unfold's, with our overview as its first page."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.contrib.admin.apps import AdminConfig, SimpleAdminConfig
from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
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

    def may_act(self, request: HttpRequest) -> bool:
        """Return whether the session may do what its person may; the pages of ``core.admin_pages`` ask."""
        from governance.signin import may_act

        return may_act(request)

    def search(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> TemplateResponse:
        """Show what the search of every page finds for ``?s=``, as a part of a page. Nothing is remembered: rows change."""
        from controlplane.navigation import find_entries

        context = {"results": find_entries(request, request.GET.get("s", "")), **(extra_context or {})}
        return TemplateResponse(request, "unfold/helpers/command_results.html", context)

    @method_decorator(login_not_required)
    def login(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Send whoever is not signed in to the one page where people do that; it takes only addresses of ours as ``next``."""
        if request.method == "GET" and self.has_permission(request):
            return HttpResponseRedirect(reverse("admin:index"))
        wanted = request.GET.get("next") or reverse("admin:index")
        return HttpResponseRedirect(f"{reverse('signin:login')}?{urlencode({'next': wanted})}")

    def logout(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """End the session on POST, as the sign-in pages do."""
        from governance.views.signin import sign_out

        return sign_out(request)


class MusterAdminConfig(AdminConfig):
    """Puts our site in the place of Django's."""

    default_site = "controlplane.admin_site.MusterAdminSite"

    def ready(self) -> None:
        """Load every app's pages, except in a process that shows none: they cost it a second and 15 MB."""
        if settings.ADMIN_PAGES:
            super().ready()
        else:
            SimpleAdminConfig.ready(self)
