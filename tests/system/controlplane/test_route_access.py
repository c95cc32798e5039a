"""Every route of the control plane, read from its own URL table, asks who somebody is or stands on the list of public ones."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator, Sequence

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.urls.converters import get_converters

pytestmark = pytest.mark.django_db
METHODS = ("get", "post", "put", "patch", "delete")
REFUSED = {401, 403}
NOT_SERVED = {404, 405}
PUBLIC = {
    "": "leads to the admin",
    "admin": "leads to the admin",
    "favicon.ico": "an icon",
    "healthz": "whether it lives",
    "api/schema": "the description of the REST API",
    "api/docs": "the page of that description",
    "sign-in/": "the way in",
    "sign-in/passkey/options": "the way in",
    "sign-in/passkey": "the way in",
    "sign-in/out": "the way out",
    "sign-in/invitation/<str:token>": "the invitation is the credential",
    "sign-in/invitation/<str:token>/options": "the invitation is the credential",
    "sign-in/invitation/<str:token>/passkey": "the invitation is the credential",
    "admin/login/": "leads to the way in",
    "admin/logout/": "the way out",
    "admin/jsi18n/": "words of Django's own scripts",
}
"""Routes that answer whoever asks, and what they are."""
SAMPLES = {"int": "1", "str": "x", "path": "x", "slug": "x", "uuid": str(uuid.UUID(int=1)), "operation": f"op_{'0' * 32}"}


def walk(patterns: Sequence[URLPattern | URLResolver], before: str = "") -> Iterator[str]:
    """Return every route as it is written in the URL tables."""
    for each in patterns:
        route = before + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from walk(each.url_patterns, route)
        else:
            yield route


ROUTES = sorted(set(walk(get_resolver().url_patterns)))


def fill(route: str) -> str:
    """Return an address of a route: ``<int:key_id>`` becomes a number."""
    path = re.sub(r"\(\?P<\w+>[^)]*\)", "x", route).replace("^", "").replace("/?$", "").replace("$", "")
    for name in get_converters():
        while f"<{name}:" in path:
            head, _, tail = path.partition(f"<{name}:")
            path = head + SAMPLES[name] + tail.partition(">")[2]
    return "/" + path


def test_every_public_route_exists() -> None:
    assert set(PUBLIC) <= set(ROUTES)
    assert len(ROUTES) > 100


@pytest.mark.parametrize("route", [route for route in ROUTES if route not in PUBLIC])
def test_every_route_of_the_control_plane_asks_who_it_is_or_is_public(route: str) -> None:
    client, path = Client(), fill(route)
    answers = {method: getattr(client, method)(path, content_type="application/json") for method in METHODS}
    leads_in = {name for name, answer in answers.items() if answer.status_code == 302 and is_way_in(answer["Location"])}
    statuses = {name: answer.status_code for name, answer in answers.items() if name not in leads_in}
    assert set(statuses.values()) <= REFUSED | NOT_SERVED, (path, statuses)
    assert leads_in or set(statuses.values()) & REFUSED, (path, statuses)


def is_way_in(location: str) -> bool:
    return location.startswith(("/sign-in/", "/admin/login/"))
