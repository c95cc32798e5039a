"""Every error of the control plane's HTTP API in the contract's one body.

``{"error": {"code", "message", "retryable", "type", "param"}}``: the contract's three fields and OpenAI's two. Where a rule of
approval refused, ``rule`` is its stable code.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from django.contrib import admin
from django.core.exceptions import BadRequest, DisallowedHost, PermissionDenied, RequestDataTooBig
from django.db import DatabaseError, DataError, InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.template.loader import render_to_string
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from rest_framework import exceptions
from rest_framework.permissions import SAFE_METHODS
from rest_framework.response import Response
from rest_framework.views import set_rollback

from controlplane.authentication import CHALLENGE
from core.errors import ContractError
from core.limits import limits
from governance.errors import ApprovalRefused
from governance.web.pages import STRICT_PATHS, close_page
from wire.contract import ErrorCode

PAGE_PREFIXES = ("/admin/", "/static/", "/tenants/")
"""Paths that answer with pages. STRICT_PATHS do unless JSON was asked for; all others answer JSON, except a browser's 404."""
DATABASE_AWAY = (OperationalError, InterfaceError)
"""What Django raises while the database refuses, says nothing, or takes too long, be it for a lock that somebody holds."""
NOT_STORABLE = (DataError, OverflowError)
"""What Django raises for text and numbers that PostgreSQL cannot take, such as a NUL character, wherever they came in."""
_REMOVE_IT = "The request holds a character or a number that the database cannot take, such as NUL. Remove it and try again."
_MALFORMED = "The address, or what was sent with it, is malformed."
_AWAY = gettext_lazy("The database did not answer in time.")
_TRY_AGAIN = gettext_lazy(
    "Nothing was changed; try again in a few seconds. If it stays so, see whether PostgreSQL runs and can be reached."
)
_LOOK_FIRST = gettext_lazy(
    "What you asked for may or may not have been done: look at it, once the database answers again, before you repeat it. "
    "If it stays so, see whether PostgreSQL runs and can be reached."
)

# Why a database that answers takes no changes, by SQLSTATE. The statement failed, and its transaction with it.
_UNWRITABLE = {
    "25006": gettext_lazy("The database takes no changes: it is read-only."),
    "53100": gettext_lazy("The database takes no changes: its disk is full."),
}
_MAKE_ROOM = gettext_lazy("Nothing was changed. See to the PostgreSQL server, then try again.")

logger = logging.getLogger(__name__)
_TYPES: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "authentication_error",
    HTTPStatus.NOT_FOUND: "not_found_error",
    HTTPStatus.TOO_MANY_REQUESTS: "rate_limit_error",
}


@dataclass(frozen=True, slots=True)
class Outage:
    """What is wrong with the database. ``is_undone``: what was asked for is sure not to have been done.

    ``is_away``: it gave no answer, rather than a refusal.
    """

    problem: str
    advice: str
    is_undone: bool
    is_away: bool = False


@dataclass(frozen=True, slots=True)
class ApiError:
    status: int
    code: ErrorCode
    message: str
    retryable: bool = False
    param: str | None = None
    rule: str | None = None

    def body(self) -> dict[str, dict[str, object]]:
        members: dict[str, object] = {
            "code": self.code.value,
            "message": self.message,
            "retryable": self.retryable,
            "type": error_type(self.status),
            "param": self.param,
        }
        return {"error": members if self.rule is None else {**members, "rule": self.rule}}


def error_type(status: int) -> str:
    """Return OpenAI's word for the class of error that an HTTP status stands for."""
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        return "server_error"
    return _TYPES.get(status, "invalid_request_error")


def render_exception(error: Exception, context: dict[str, Any]) -> Response | None:  # Any: Django REST framework's signature
    """Render ``error`` for a REST view. None for a defect of ours: Django logs it and ``server_error`` answers."""
    request = context.get("request")
    known = describe_error(error, method=request.method if request is not None else "GET")
    if known is None:
        return None
    set_rollback()
    response = Response(known.body(), status=known.status)
    if known.status == HTTPStatus.UNAUTHORIZED:
        response["WWW-Authenticate"] = getattr(error, "auth_header", None) or CHALLENGE
    allowed = getattr(context.get("view"), "allowed_methods", None)
    if known.status == HTTPStatus.METHOD_NOT_ALLOWED and allowed:
        response["Allow"] = ", ".join(allowed)
    wait = getattr(error, "wait", None) or getattr(error, "retry_after_s", None)
    if describe_outage(error) is not None:
        wait = limits().console.retry_s
    if wait:
        response["Retry-After"] = str(max(1, round(wait)))
    return response


def describe_error(error: Exception, *, method: str = "GET") -> ApiError | None:
    """Return what a caller is told about ``error``; None when it is not an error of the caller or of our own trees.

    ``method``: of its request.
    """
    outage = describe_outage(error, method=method)
    if outage is not None:
        words = f"{outage.problem} {outage.advice}"
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, ErrorCode.INTERNAL_ERROR, words, retryable=outage.is_undone)
    if isinstance(error, NOT_STORABLE):
        return ApiError(HTTPStatus.BAD_REQUEST, ErrorCode.BAD_REQUEST, _REMOVE_IT)
    if isinstance(error, ContractError):
        rule = error.rule if isinstance(error, ApprovalRefused) else None
        return ApiError(error.status, error.code, error.message, retryable=error.retryable, param=error.param, rule=rule)
    if isinstance(error, exceptions.NotAuthenticated | exceptions.AuthenticationFailed):
        return ApiError(
            HTTPStatus.UNAUTHORIZED, ErrorCode.INVALID_ADMIN_TOKEN, "Send an admin token: Authorization: Bearer msa_…."
        )
    if isinstance(error, exceptions.ValidationError):
        param, message = first_problem(error.detail)
        return ApiError(HTTPStatus.BAD_REQUEST, ErrorCode.BAD_REQUEST, message, param=param)
    if isinstance(error, Http404 | exceptions.NotFound):
        return ApiError(HTTPStatus.NOT_FOUND, ErrorCode.NOT_FOUND, "There is nothing at this address.")
    if isinstance(error, PermissionDenied | exceptions.PermissionDenied):
        return ApiError(HTTPStatus.FORBIDDEN, ErrorCode.INVALID_ADMIN_TOKEN, "This credential may not do that.")
    if isinstance(error, RequestDataTooBig):
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, ErrorCode.BODY_TOO_LARGE, "The body is too large.")
    if isinstance(error, exceptions.Throttled):
        return ApiError(error.status_code, ErrorCode.RATE_LIMITED, str(error.detail), retryable=True)
    if isinstance(error, exceptions.APIException):
        is_ours = error.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR
        code = ErrorCode.INTERNAL_ERROR if is_ours else ErrorCode.BAD_REQUEST
        return ApiError(error.status_code, code, str(error.detail), retryable=is_ours)
    return None


def describe_outage(error: BaseException | None, *, method: str = "GET") -> Outage | None:
    """Return what is wrong with the database; None when ``error`` is not about that. ``method``: of the request."""
    why = _UNWRITABLE.get(getattr(error.__cause__, "sqlstate", None) or "") if isinstance(error, DatabaseError) else None
    if why is not None:
        return Outage(str(why), str(_MAKE_ROOM), is_undone=True)
    if not isinstance(error, DATABASE_AWAY):
        return None
    # A change may have been committed before its answer was lost.
    is_safe = method in SAFE_METHODS
    return Outage(str(_AWAY), str(_TRY_AGAIN if is_safe else _LOOK_FIRST), is_undone=is_safe, is_away=True)


def first_problem(detail: object, path: str = "") -> tuple[str | None, str]:
    """Return the field and the text of the first problem in what a serializer reports."""
    if isinstance(detail, dict) and detail:
        key, inner = next(iter(detail.items()))
        return first_problem(inner, f"{path}.{key}" if path else str(key))
    if isinstance(detail, list) and detail:
        return first_problem(next((item for item in detail if item), detail[0]), path)
    is_field = bool(path) and path != "non_field_errors"
    return (path, f"{path}: {detail}") if is_field else (None, str(detail))


def page_not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 404: a page where people read pages and to browsers everywhere, the envelope to everybody else."""
    if _wants_page(request):
        problem = _("The address is wrong. Every decision is kept: look for it in the history.")
        return _render_problem(request, HTTPStatus.NOT_FOUND, _("Page not found"), problem)
    if request.path.startswith(PAGE_PREFIXES) or (not request.path.startswith(STRICT_PATHS) and _is_browser(request)):
        # What is said names rows: it is for those who may see them.
        is_told = request.path.startswith("/admin/") and admin.site.has_permission(request)
        said = exception.args[0] if is_told and exception.args and isinstance(exception.args[0], str) else ""
        return _render_error(request, "404.html", {"said": said}, HTTPStatus.NOT_FOUND)
    return _json(ApiError(HTTPStatus.NOT_FOUND, ErrorCode.NOT_FOUND, f"There is nothing at {request.path}."))


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    if isinstance(exception, DisallowedHost):
        return _refuse_host(request)
    if request.path.startswith(PAGE_PREFIXES):
        said = str(exception) if isinstance(exception, BadRequest) else ""
        words = _REMOVE_IT if isinstance(exception, NOT_STORABLE) else said or _MALFORMED
        return _render_error(request, "400.html", {"words": words}, HTTPStatus.BAD_REQUEST)
    if _wants_page(request):
        problem = _("Nothing was done. Go back and try again.")
        return _render_problem(request, HTTPStatus.BAD_REQUEST, _("This cannot be understood"), problem)
    known = describe_error(exception)
    return _json(known or ApiError(HTTPStatus.BAD_REQUEST, ErrorCode.BAD_REQUEST, "The request cannot be understood."))


def _refuse_host(request: HttpRequest) -> HttpResponse:
    """Say which host was refused and which setting allows it."""
    # Not ``request.get_host()``: that is what failed.
    host = str(request.META.get("HTTP_HOST", ""))[: limits().console.refused_host_chars]
    logger.warning("host_refused host=%r", host)
    # A browser names HTML outright; whoever accepts anything gets a page only where people read pages.
    is_browser = "text/html" in request.headers.get("Accept", "") and not request.path.startswith("/api/")
    is_page = request.path.startswith((*PAGE_PREFIXES, *STRICT_PATHS))
    wants_json = request.get_preferred_type(["text/html", "application/json"]) == "application/json"
    if wants_json or not (is_browser or is_page) or request.content_type == "application/json":
        message = f"The control plane does not answer to the host {host!r}. Add it to MUSTER_ALLOWED_HOSTS and start again."
        return _json(ApiError(HTTPStatus.BAD_REQUEST, ErrorCode.BAD_REQUEST, message))
    text = render_to_string("400.html", {"host": host})
    return close_page(HttpResponse(text, status=HTTPStatus.BAD_REQUEST))


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    if request.path.startswith(PAGE_PREFIXES):
        return _render_error(request, "403.html", {}, HTTPStatus.FORBIDDEN)
    if _wants_page(request):
        problem = _("You may not do that, and nothing was done. Sign in as somebody who may.")
        return _render_problem(request, HTTPStatus.FORBIDDEN, _("This is not for you"), problem)
    return _json(ApiError(HTTPStatus.FORBIDDEN, ErrorCode.INVALID_ADMIN_TOKEN, "This credential may not do that."))


def server_error(request: HttpRequest) -> HttpResponse:
    """Answer 500 while Django handles, and logs, a defect; 503 or 400 when it is the database. Says nothing more of it."""
    error = sys.exception()
    if isinstance(error, NOT_STORABLE):
        return bad_request(request, error)
    outage = describe_outage(error, method=request.method or "GET")
    if isinstance(error, Exception) and outage is not None:
        return _say_outage(request, error, outage)
    if request.path.startswith(PAGE_PREFIXES):
        return _render_error(request, "500.html", {}, HTTPStatus.INTERNAL_SERVER_ERROR)
    if _wants_page(request):
        problem = _("The control plane failed on this request. It has been logged.")
        return _render_problem(request, HTTPStatus.INTERNAL_SERVER_ERROR, _("Something broke"), problem)
    message = "The control plane failed on this request. It has been logged."
    return _json(ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, ErrorCode.INTERNAL_ERROR, message, retryable=True))


def _say_outage(request: HttpRequest, error: Exception, outage: Outage) -> HttpResponse:
    is_script = request.content_type == "application/json"
    if _wants_page(request) or (request.path.startswith(PAGE_PREFIXES) and not is_script):
        # A database that only refuses changes still says who is signed in; one that is away is not waited for again.
        reader = None if outage.is_away else request
        answer: HttpResponse = _render_error(reader, "503.html", {"outage": outage}, HTTPStatus.SERVICE_UNAVAILABLE)
    else:
        known = describe_error(error, method=request.method or "GET")
        assert known is not None  # it knows the database's errors
        answer = _json(known)
    answer["Retry-After"] = str(limits().console.retry_s)
    return answer


def _wants_page(request: HttpRequest) -> bool:
    if not request.path.startswith(STRICT_PATHS) or request.content_type == "application/json":
        return False
    return request.get_preferred_type(["text/html", "application/json"]) != "application/json"


def _is_browser(request: HttpRequest) -> bool:
    """Return whether whoever asks would rather have a page. Programs that take anything get JSON."""
    return request.method in SAFE_METHODS and request.get_preferred_type(["application/json", "text/html"]) == "text/html"


def _render_problem(request: HttpRequest, status: HTTPStatus, title: str, problem: str) -> HttpResponse:
    return _render_error(request, "approvals/problem.html", {"title": title, "problem": problem}, status)


def _render_error(request: HttpRequest | None, template: str, context: dict[str, object], status: HTTPStatus) -> HttpResponse:
    """Return a page in the place of another, with the navigation of who is signed in. Without ``request`` it reads nothing."""
    try:
        text = render_to_string(template, context, request)
    except DatabaseError:
        text = render_to_string(template, context)
    return close_page(HttpResponse(text, status=status))


def _json(error: ApiError) -> JsonResponse:
    return JsonResponse(error.body(), status=error.status)
