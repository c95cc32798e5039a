"""What a browser may do with our pages, and what a session may do on them."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import translation
from django.utils.cache import patch_vary_headers
from django.utils.translation import gettext, gettext_lazy

from governance.errors import NotPermitted
from governance.signin import keep_session, may_act
from governance.web.pages import ADMIN_POLICY, POLICY, STRICT_PATHS, STRICT_POLICY, refuse, with_strict_policy
from wire import clock

ADMIN_PATH = "/admin/"
OFFLINE_PAGE = f"{settings.STATIC_URL}governance/offline.html"
OFFLINE_POLICY = "frame-ancestors 'none'"
"""That page is one file that is also opened from a disk: it brings the rest of its policy itself, with hashes."""

GOVERNED_PATHS = ("/admin/", "/approvals/", "/tenants/")
OPEN_PATHS = ("/admin/login/", "/admin/logout/", "/admin/checklist/hide/", "/admin/playground/code")
"""Posts that change nothing, or only the session or what the person is shown: the last writes programs."""
PROGRAM_PATHS = ("/api/", "/healthz", "/metrics", "/nodes", "/requests")
"""Addresses that programs ask: their texts are English, whatever language a client's library asks for."""
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})
LOOKING_ONLY = gettext_lazy(
    "Sign in with your passkey to do this. Password sessions are read-only once you have a passkey or an approval policy is in "
    "force. Nothing was changed."
)

Next = Callable[[HttpRequest], HttpResponse]


class ContentSecurityPolicyMiddleware:
    """Adds the policy to every response that brings none of its own."""

    def __init__(self, get_response: Next) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self._get_response(request)
        if request.path.startswith(STRICT_PATHS):
            response.headers["Content-Security-Policy"] = STRICT_POLICY
            response.headers.setdefault("Cache-Control", "no-store")
            # The address of an invitation is a secret, and our own server, or the proxy before it, may log referrers.
            response.headers["Referrer-Policy"] = "strict-origin"
            return response
        policy = ADMIN_POLICY if request.path.startswith(ADMIN_PATH) else POLICY
        policy = OFFLINE_POLICY if request.path == OFFLINE_PAGE else policy
        response.headers.setdefault("Content-Security-Policy", policy)
        return response


class LanguageMiddleware:
    """Answers people in the language that they chose or that their browser asks for, and programs in English."""

    def __init__(self, get_response: Next) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        is_program = request.path.startswith(PROGRAM_PATHS)
        language = settings.LANGUAGE_CODE if is_program else translation.get_language_from_request(request)
        with translation.override(language):
            response = self._get_response(request)
            if not is_program:
                response.headers["Content-Language"] = language
                patch_vary_headers(response, ["Accept-Language"])
            return response


class SessionMiddleware:
    """Ends sessions that were idle or have lived too long, and keeps sessions without a passkey to looking."""

    def __init__(self, get_response: Next) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if request.user.is_authenticated and keep_session(request, now=clock.unix_s()) and is_refused(request):
            return refuse_change(request)
        return self._get_response(request)


def is_refused(request: HttpRequest) -> bool:
    """Return whether a signed-in session asks for a change that it may not make."""
    path = request.path
    if request.method in SAFE_METHODS or not path.startswith(GOVERNED_PATHS) or path in OPEN_PATHS:
        return False
    return not may_act(request)


@with_strict_policy
def refuse_change(request: HttpRequest) -> HttpResponse:
    """Say what would do: a page to a person, an object to a script."""
    if request.content_type == "application/json":
        return refuse(NotPermitted(str(LOOKING_ONLY)))
    page = {"title": gettext("This needs your passkey"), "explanation": LOOKING_ONLY}
    return render(request, "signin/refused.html", page, status=HTTPStatus.FORBIDDEN)
