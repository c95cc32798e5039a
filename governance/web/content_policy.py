"""The headers of the pages on which people sign in and approve: nothing but files of our own runs, and nothing is kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from django.http import HttpRequest, HttpResponseBase

STRICT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
"""No inline script, no inline style, nothing of anybody else: what is read there is signed there."""
STRICT_PATHS = ("/approvals/", "/sign-in/")
"""Where people sign in and sign: every answer is held to the policy, also errors that no view of ours made."""

Arguments = ParamSpec("Arguments")
Response = TypeVar("Response", bound=HttpResponseBase)


def with_strict_policy(
    view: Callable[Concatenate[HttpRequest, Arguments], Response],
) -> Callable[Concatenate[HttpRequest, Arguments], Response]:
    """Give what a view answers the strict policy, and keep it out of every cache."""

    @wraps(view)
    def answer(request: HttpRequest, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Response:
        return close_page(view(request, *args, **kwargs))

    return answer


def close_page(response: Response) -> Response:
    """Return the response with the strict policy, kept out of every cache."""
    response.headers["Content-Security-Policy"] = STRICT_POLICY
    response.headers["Cache-Control"] = "no-store, private"
    return response
