"""Pages: their headers, who may see them, the frame around them, errors in words.

That a session without a passkey only looks is not settled here: ``controlplane.middleware`` refuses its POSTs.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from django.contrib import messages
from django.contrib.auth.models import AbstractUser
from django.contrib.auth.views import redirect_to_login
from django.http import HttpRequest, HttpResponse, HttpResponseBase, HttpResponseRedirect, JsonResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext as _

from core.errors import ContractError
from governance.errors import GovernanceError, NotPermitted
from governance.operations.approvals import read_freeze
from governance.operations.proposals import Proposer
from governance.people import may_propose, may_see_operations
from governance.signin import find_read_only
from wire import COMMAND

if TYPE_CHECKING:
    from core.models import User

STRICT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""No inline script, no inline style, nothing of anybody else: what is read there is signed there."""
POLICY = STRICT_POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'")
ADMIN_POLICY = POLICY.replace("script-src 'self'", "script-src 'self' 'unsafe-eval'")
"""For the admin alone: Alpine, which its skin is built on, compiles its expressions. No inline script runs there either."""
STRICT_PATHS = ("/approvals/", "/sign-in/")
"""Where people sign in and sign: every answer is held to the policy, also errors that no view of ours made."""

Parameters = ParamSpec("Parameters")
View = Callable[Concatenate[HttpRequest, Parameters], HttpResponse]
Response = TypeVar("Response", bound=HttpResponseBase)


def with_strict_policy(
    view: Callable[Concatenate[HttpRequest, Parameters], Response],
) -> Callable[Concatenate[HttpRequest, Parameters], Response]:
    """Give what a view answers the strict policy, and keep it out of every cache."""

    @wraps(view)
    def answer(request: HttpRequest, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Response:
        return close_page(view(request, *args, **kwargs))

    return answer


def close_page(response: Response) -> Response:
    response.headers["Content-Security-Policy"] = STRICT_POLICY
    response.headers["Cache-Control"] = "no-store, private"
    return response


def approval_page(view: View[Parameters]) -> View[Parameters]:
    """Let a view show a page to people who are signed in. An error of ours becomes a page with its words and its status."""

    @wraps(view)
    def guarded(request: HttpRequest, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> HttpResponse:
        if not request.user.is_authenticated:
            return redirect_to_login(request.get_full_path())
        try:
            require_reader(request)
            response = view(request, *args, **kwargs)
        except GovernanceError as error:
            response = show_problem(request, error)
        return close_page(response)

    return guarded


def show_problem(request: HttpRequest, error: GovernanceError) -> HttpResponse:
    context = {"title": "This cannot be done", "problem": error.message}
    return render_page(request, "approvals/problem.html", context, status=error.status)


def require_reader(request: HttpRequest) -> None:
    """Raise NotPermitted for somebody who may not read operations."""
    if not may_see_operations(request.user):
        raise NotPermitted(_("Operations are for viewers, operators and approvers. Ask an owner for one of these roles."))


def require_asker(request: HttpRequest) -> None:
    """Raise NotPermitted for somebody who may not ask for operations."""
    if not may_propose(request.user):
        raise NotPermitted(_("Only operators, and people whom the policy names, ask for operations. Your role reads them."))


def locate_operation(op_id: uuid.UUID) -> str:
    return reverse("approvals:operation", args=[op_id])


def operation_form(view: Callable[[HttpRequest, uuid.UUID], HttpResponse]) -> Callable[[HttpRequest, uuid.UUID], HttpResponse]:
    """Let a view act on a form of the page of an operation; it returns there, with the words of an error when there is one."""

    @wraps(view)
    def guarded(request: HttpRequest, op_id: uuid.UUID) -> HttpResponse:
        page = locate_operation(op_id)
        if not request.user.is_authenticated:
            return redirect_to_login(page)
        try:
            require_reader(request)
        except NotPermitted as error:
            return close_page(show_problem(request, error))
        try:
            response = view(request, op_id)
        except GovernanceError as error:
            messages.error(request, error.message)
            response = HttpResponseRedirect(page, status=HTTPStatus.SEE_OTHER)
        return close_page(response)

    return guarded


def describe_refusal(error: ContractError) -> dict[str, dict[str, str]]:
    """Return what a script of a page is told: ``param`` names the field and ``rule`` the rule of approval, "" = none."""
    said = {"code": error.code.value, "message": error.message, "param": error.param or "", "rule": getattr(error, "rule", "")}
    return {"error": said}


def refuse(error: ContractError) -> HttpResponse:
    return close_page(JsonResponse(describe_refusal(error), status=error.status))


def script_answer(view: View[Parameters]) -> View[Parameters]:
    """Let a view answer a script of a page. Errors are as ``describe_refusal`` says."""

    @wraps(view)
    def guarded(request: HttpRequest, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> HttpResponse:
        try:
            return close_page(view(request, *args, **kwargs))
        except ContractError as error:
            return refuse(error)

    return guarded


def approval_json(view: View[Parameters]) -> View[Parameters]:
    """Let a view answer a script of a page to people who are signed in, as ``script_answer`` does."""

    @wraps(view)
    def guarded(request: HttpRequest, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> HttpResponse:
        if not request.user.is_authenticated:
            raise NotPermitted(_("You are no longer signed in. Sign in again; nothing was done."))
        require_reader(request)
        return view(request, *args, **kwargs)

    return script_answer(guarded)


def read_object(request: HttpRequest, *, most_bytes: int) -> dict[str, Any]:  # Any: JSON
    """Return the JSON object that a script of ours sent; an empty one for anything else."""
    try:
        body = json.loads(request.body) if len(request.body) <= most_bytes else None
    except (ValueError, RecursionError):
        body = None
    return body if isinstance(body, dict) else {}


def render_page(
    request: HttpRequest,
    template: str,
    context: Mapping[str, Any] | None = None,  # Any: Django's template context
    *,
    status: int = HTTPStatus.OK,
) -> HttpResponse:
    return TemplateResponse(request, template, dict(context or {}), status=status).render()


def show_freeze(request: HttpRequest) -> dict[str, object]:
    """Return the freeze in force as ``frozen``, for the banner on every page."""
    del request
    # Lazy: read only by pages that have the banner.
    return {"frozen": SimpleLazyObject(read_freeze)}


def show_read_only(request: HttpRequest) -> dict[str, object]:
    """Return why the session may only look as ``read_only``, for the banner on every page."""
    # Lazy, as above. A CSRF failure is told before the middleware has looked for the user.
    return {"read_only": SimpleLazyObject(lambda: find_read_only(request) if hasattr(request, "user") else None)}


def show_command(_request: HttpRequest) -> dict[str, object]:
    """Return how a person types the launcher on this server as ``muster``, for pages that tell what to run."""
    return {"muster": COMMAND}


def find_viewer(request: HttpRequest) -> User:
    """Return the person of a request that one of the decorators above has let in."""
    # A copy is the row itself: what Django puts into a request is a stand-in of another type.
    user = copy(request.user)
    assert isinstance(user, AbstractUser)
    return user


def find_proposer(request: HttpRequest) -> Proposer:
    user = find_viewer(request)
    return Proposer(name=user.get_username(), user_id=user.pk)
