"""Who may use the playground, and who gets a key from it."""

from __future__ import annotations

from django.http import HttpRequest

SEE_MODELS = ("gateway.view_model", "gateway.change_model")
ADD_KEY = "gateway.add_apikey"
VIEW_RECORD = "gateway.view_requestrecord"


def may_play(request: HttpRequest) -> bool:
    """Return whether the page is for this person: an operator who may see which models there are."""
    user = request.user
    return bool(user.is_active and getattr(user, "is_staff", False)) and any(user.has_perm(name) for name in SEE_MODELS)


def may_lend(request: HttpRequest) -> bool:
    """Return whether the page may make keys for this person."""
    return request.user.has_perm(ADD_KEY)


def may_see_records(request: HttpRequest) -> bool:
    """Return whether this person may open the page of a request."""
    return request.user.has_perm(VIEW_RECORD)
