"""Who is let in where: every address of the control plane, by every method, for every role of people and of tokens.

``tests/permissions.toml`` says for each address who is let in; everybody else has to be refused. The addresses come from the
URL configuration, so that a new one without a line fails. Views are called as they are, without what stands around them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import isawaitable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.contrib.auth.models import AnonymousUser
from django.contrib.messages.storage.fallback import FallbackStorage
from django.contrib.sessions.backends.db import SessionStore
from django.core.exceptions import BadRequest, PermissionDenied
from django.db import transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.test import RequestFactory
from django.urls import URLPattern, URLResolver, get_resolver, resolve
from django.urls.converters import get_converters

from core.models import User
from core.roles import Role
from governance.admin_tokens import Grant, create_admin_token
from governance.errors import GovernanceError
from governance.members import change_roles, set_member
from governance.models import AdminToken
from governance.signin import ASSURANCE
from tests.fakes.nodes import make_key, make_node, make_presence
from wire import clock

pytestmark = pytest.mark.django_db

TABLE = Path(__file__).parents[2] / "permissions.toml"
PEOPLE = ("anybody", "no role", "approver", "viewer", "operator", "owner", "tenant admin", "tenant viewer", "other tenant")
TOKENS = (
    "no token", "approver", "viewer", "operator", "owner", "before roles", "tenant admin", "expired", "viewer's of an approver",
)  # fmt: skip
"""The last: a token with the role viewer whose person is an approver alone."""
PROGRAMS = ("api/", "metrics", "requests", "^nodes", "^api/")
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
SAMPLES = {"int": "1", "str": "x", "path": "x", "slug": "x", "uuid": str(UUID(int=1)), "operation": f"op_{'0' * 32}"}
PARTS = {
    "tenant_id": "gateway.tenant", "key_id": "gateway.apikey", "member_id": "controlplane.membership",
}  # fmt: skip
"""Of the pages of tenants: which row a part of an address names."""
WAYS_IN = ("/sign-in/", "/admin/login/")


def walk(patterns: Sequence[URLPattern | URLResolver], before: str = "") -> Iterator[str]:
    for each in patterns:
        route = before + str(each.pattern)
        if isinstance(each, URLResolver):
            yield from walk(each.url_patterns, route)
        else:
            yield route


ROUTES = sorted(set(walk(get_resolver().url_patterns)))
PAGES = [route for route in ROUTES if not route.startswith(PROGRAMS)]
CALLS = [route for route in ROUTES if route.startswith(PROGRAMS)]


@cache
def read_table() -> Mapping[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def fill(route: str, rows: Mapping[str, str]) -> str:
    """Return an address of a route, with the row of the model that stands in it where there is one."""
    path = re.sub(r"\(\?P<\w+>[^)]*\)", "x", route).replace("^", "").replace("/?$", "").replace("$", "")
    model = ".".join(route.split("/")[1:3])
    for name in get_converters():
        while f"<{name}:" in path:
            head, _, tail = path.partition(f"<{name}:")
            word, _, rest = tail.partition(">")
            named = model if word == "object_id" else PARTS.get(word, "") if route.startswith("tenants/") else ""
            sample = rows.get(named, "x") if word == "object_id" else rows.get(named, SAMPLES[name])
            path = head + sample + rest
    return "/" + path.replace("<id>", rows.get(model, "1"))


def make_rows() -> dict[str, str]:
    """Make a row for most pages; return the key of one for each model that has any."""
    node = make_node("rack-1")
    make_presence(node)
    make_key("notebook", tenant="research")
    set_member(person=User.objects.create_user("sam"), tenant="research", role=Role.TENANT_VIEWER, actor="t")
    found = {}
    for model in apps.get_models():
        row = model._default_manager.first()
        if row is not None:
            found[f"{model._meta.app_label}.{model._meta.model_name}"] = str(row.pk)
    return found


def make_person(who: str) -> User | AnonymousUser:
    if who == "anybody":
        return AnonymousUser()
    person = User.objects.create_user(f"the-{who.replace(' ', '-')}")
    if who in {"tenant admin", "tenant viewer"}:
        set_member(person=person, tenant="research", role=Role(who.replace(" ", "-")), actor="t")
        return User.objects.get(pk=person.pk)
    if who == "other tenant":
        set_member(person=person, tenant="sales", role=Role.TENANT_ADMIN, actor="t")
        return User.objects.get(pk=person.pk)
    roles = [] if who == "no role" else [Role(who)]
    return User.objects.get(pk=change_roles(person=person, roles=roles, actor="t").pk)


def make_token(who: str) -> str:
    if who == "no token":
        return ""
    grant, owner = Grant(), None
    if who in {role.value for role in Role}:
        grant = Grant(who)
    elif who == "tenant admin":
        grant = Grant("tenant-admin", "research")
    elif who == "viewer's of an approver":
        grant = Grant("viewer")
        owner = change_roles(person=User.objects.create_user("ana"), roles=[Role.APPROVER], actor="t")
    token, text = create_admin_token(name=who, actor="t", owner=owner, grant=grant)
    if who == "expired":
        AdminToken.objects.filter(pk=token.pk).update(expires_at=clock.now())
    return text


def open_session() -> str:
    session = SessionStore()
    session[ASSURANCE] = "passkey"
    session.save()
    return str(session.session_key)


@dataclass(frozen=True)
class Asker:
    """Who asks: a person with a session that a passkey opened, or a program with a token."""

    user: User | AnonymousUser
    token: str = ""
    who: str = ""
    session_key: str = field(default_factory=open_session)

    def make(self, method: str, path: str) -> HttpRequest:
        # Of its own address: wrong tokens keep out others who come from theirs.
        told: dict[str, Any] = {"REMOTE_ADDR": f"10.0.0.{1 + TOKENS.index(self.who)}"} if self.who in TOKENS else {}
        if self.token:
            told["HTTP_AUTHORIZATION"] = f"Bearer {self.token}"
        if path.startswith(("/admin", "/approvals", "/sign-in")):
            body: dict[str, Any] = {}
        else:
            body = {"data": json.dumps({}), "content_type": "application/json"}
        request: HttpRequest = RequestFactory().generic(method, path, **body, **told)
        request.session = SessionStore(self.session_key)
        request.user = self.user
        request._messages = FallbackStorage(request)  # type: ignore[attr-defined]
        request._dont_enforce_csrf_checks = True  # type: ignore[attr-defined]
        request.allauth = None  # type: ignore[attr-defined]
        return request

    def ask(self, method: str, path: str) -> str:
        """Return ``in``, ``out``, or ``none``: no such method there."""
        found = resolve(path)
        view: Callable[..., HttpResponse] = found.func
        with transaction.atomic():
            try:
                answer = view(self.make(method, path), *found.args, **found.kwargs)
                answer = async_to_sync(_wait)(answer) if isawaitable(answer) else answer
                status, location = answer.status_code, answer.headers.get("Location", "")
            except PermissionDenied:
                status, location = 403, ""
            except (Http404, BadRequest):
                status, location = 404, ""
            except GovernanceError as error:
                status, location = error.status, ""
            finally:
                transaction.set_rollback(True)
        if status == 405:
            return "none"
        # The pages of sign-in lead on to others; every other page leads there who is not let in.
        leads_in = status == 302 and (
            (location.startswith(WAYS_IN) and not path.startswith("/sign-in")) or "?next=" in location
        )
        # A tenant is not there for who is no member.
        is_hidden = status == 404 and path.startswith("/tenants/")
        return "out" if leads_in or is_hidden or status in {401, 403, 429} else "in"


async def _wait(answer: Awaitable[HttpResponse]) -> HttpResponse:
    return await answer


def list_methods(routes: Sequence[str]) -> Sequence[str]:
    return METHODS if routes is CALLS else METHODS[:2]


def find_let_in(asker: Asker, routes: Sequence[str], rows: Mapping[str, str]) -> set[str]:
    elsewhere = set(read_table().get("elsewhere", {}))
    found = set()
    for route in routes:
        if route in elsewhere:
            continue
        for method in list_methods(routes):
            if asker.ask(method, fill(route, rows)) == "in":
                found.add(f"{method} {route}")
    return found


def list_expected(who: str, section: str) -> set[str]:
    words = read_table()["words"]

    def holds(names: str) -> bool:
        return any(name == who or (name in words and holds(words[name])) for name in map(str.strip, names.split(",")))

    lines: dict[str, dict[str, str]] = read_table()[section]
    return {f"{method} {route}" for route, methods in lines.items() for method, names in methods.items() if holds(names)}


@pytest.mark.parametrize("who", PEOPLE)
def test_people_are_let_in_where_their_roles_say_and_nowhere_else(who: str) -> None:
    rows = make_rows()
    found = find_let_in(Asker(make_person(who)), PAGES, rows)
    print(f"{who}: let in {len(found)} of {len(PAGES) * 2} times")
    assert found == list_expected(who, "pages")


@pytest.mark.parametrize("who", TOKENS)
def test_tokens_may_call_what_their_roles_say_and_nothing_else(who: str) -> None:
    rows = make_rows()
    found = find_let_in(Asker(AnonymousUser(), make_token(who), who), CALLS, rows)
    print(f"{who}: let in {len(found)} of {len(CALLS) * len(METHODS)} times")
    assert found == list_expected(who, "calls")


def test_every_address_has_a_line_and_every_line_an_address() -> None:
    table = read_table()
    listed = [*table["pages"], *table["calls"], *table["elsewhere"]]
    assert sorted(listed) == ROUTES, "write who may call it into tests/permissions.toml"


def test_one_module_asks_what_somebody_may() -> None:
    root = TABLE.parents[1]
    asking = {
        str(path.relative_to(root))
        for package in ("controlplane", "core", "gateway", "governance", "nodes")
        for path in (root / package).rglob("*.py")
        if ".has_perm(" in path.read_text(encoding="utf-8")
    }
    # The second is on the way of an operation, which crosses no module more.
    assert asking == {"core/roles.py", "governance/operations/proposals.py"}
