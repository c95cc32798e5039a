"""Django applications of the control plane itself: the operators' pages, their admin site, and what is checked at the start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from django.apps import AppConfig
from django.conf import settings
from django.contrib.admin.apps import AdminConfig, SimpleAdminConfig
from django.contrib.auth.decorators import login_not_required
from django.core.checks import WARNING, CheckMessage, Error, register
from django.db.models.signals import post_migrate
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, URLResolver, path, reverse
from django.utils.decorators import method_decorator
from django.utils.http import urlencode
from django.utils.translation import gettext as _
from django.views.decorators.http import require_POST
from unfold.sites import UnfoldAdminSite


class MusterAdminSite(UnfoldAdminSite):  # type: ignore[misc]  # Unfold ships no types
    """The one admin site. Pages show; every change is a call of one service."""

    site_title = "Muster"
    site_header = "Muster"
    index_title = "Overview"

    def index(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> TemplateResponse:
        # It reaches models: not there yet when apps are loaded.
        from controlplane.overview import RANGES, choose_range, list_seen, read_board, read_checklist, read_overview
        from core.models import User
        from governance.operations.queries import list_waiting_for

        assert isinstance(request.user, User)  # or nobody would be let in
        overview, name = read_overview(), choose_range(request.GET.get("range", ""))
        own = {
            "title": _("Overview"),
            "overview": overview,
            "board": read_board(name),
            "sees": list_seen(request.user),
            "waiting": list_waiting_for(request.user),
            "checklist": read_checklist(request, overview.fleet),
            "ranges": [(name, title) for name, (title, _span) in RANGES.items()],
            "range": name,
        }
        response: TemplateResponse = super().index(request, {**own, **(extra_context or {})})
        return response

    def get_urls(self) -> list[URLPattern | URLResolver]:
        from controlplane.enrolment import urlpatterns

        hide = path("checklist/hide/", self.admin_view(require_POST(self.hide_checklist)), name="hide_checklist")
        # Before those of the rows, which take any address below theirs.
        return [hide, *urlpatterns, *super().get_urls()]

    def hide_checklist(self, request: HttpRequest) -> HttpResponse:
        """Put away the first steps on Overview, for this person alone."""
        from controlplane.overview import hide_checklist
        from core.models import User

        assert isinstance(request.user, User)  # or nobody would be let in
        hide_checklist(request.user)
        return HttpResponseRedirect(reverse("admin:index"))

    def may_act(self, request: HttpRequest) -> bool:
        """Return whether the session may do what its person may; the pages of ``core.admin_pages`` ask."""
        from governance.signin import may_act

        return may_act(request)

    @method_decorator(login_not_required)
    def login(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Send whoever is not signed in to the one page where people do that."""
        if request.method == "GET" and self.has_permission(request):
            return HttpResponseRedirect(reverse("admin:index"))
        wanted = request.GET.get("next") or reverse("admin:index")
        # That page takes only addresses of ours as ``next``.
        return HttpResponseRedirect(f"{reverse('signin:login')}?{urlencode({'next': wanted})}")

    def logout(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        from governance.web.signin import sign_out

        return sign_out(request)


class MusterAdminConfig(AdminConfig):
    default_site = "controlplane.apps.MusterAdminSite"

    def ready(self) -> None:
        if settings.ADMIN_PAGES:
            super().ready()
        else:
            # Pages that nobody opens cost a process a second and 15 MB.
            SimpleAdminConfig.ready(self)
        # The last application that has models: the permissions of all others exist by then.
        post_migrate.connect(make_roles, sender=self, dispatch_uid="muster roles")


def make_roles(**_told: object) -> None:
    from core.roles import make_role_groups

    make_role_groups(is_update=True)


class ControlplaneConfig(AppConfig):
    """Pages and commands. It has no rows of its own; the label ``controlplane`` belongs to the people of ``core``."""

    name = "controlplane"
    label = "console"

    def ready(self) -> None:
        register(check_gateway_urls, "controlplane")
        register(check_proxies, "controlplane")
        if settings.ADMIN_PAGES:  # nobody signs out anywhere else, and what follows loads the pages
            from django.contrib.auth.signals import user_logged_out

            from controlplane.playground.keys import forget_keys_of_session

            user_logged_out.connect(forget_keys_of_session, dispatch_uid="muster playground keys")


def check_proxies(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    """Return what is missing when a TLS proxy stands in front of which nobody said where it is."""
    if not settings.BEHIND_TLS or settings.TRUSTED_PROXIES:
        return []
    return [
        CheckMessage(
            WARNING,
            "MUSTER_BEHIND_TLS is on and MUSTER_TRUSTED_PROXIES is empty: no forwarding header is believed, so everybody "
            "behind the proxy has its address, and pages take every request for plain HTTP.",
            hint="Name the addresses that the proxy calls from, such as MUSTER_TRUSTED_PROXIES=127.0.0.1, and let it set "
            "X-Forwarded-For and X-Forwarded-Proto as docs/lan-and-https.md shows.",
            id="controlplane.W001",
        )
    ]


def is_gateway_url(url: str) -> bool:
    """Return whether ``url`` is nothing but http or https, a host and perhaps a port."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return False
    is_bare = parts.path in {"", "/"} and not (parts.query or parts.fragment or parts.username or parts.password)
    return parts.scheme in {"http", "https"} and bool(parts.hostname) and is_bare and port != 0


def check_gateway_urls(app_configs: Sequence[AppConfig] | None, **kwargs: object) -> list[CheckMessage]:
    named = {
        "MUSTER_PLAYGROUND_GATEWAY_URL": settings.PLAYGROUND_GATEWAY_URL,
        "MUSTER_GATEWAY_PUBLIC_URL": settings.GATEWAY_PUBLIC_URL,
    }
    hint = "Give scheme, host and port alone, such as http://127.0.0.1:8080."
    return [
        Error(f"{name} is no address of a gateway", hint=hint, id="controlplane.E001")
        for name, url in named.items()
        if not is_gateway_url(str(url))
    ]
