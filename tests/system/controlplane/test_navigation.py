"""What stands around every page: entries, tabs and the way to the page, for who may see them; and what that costs."""

from __future__ import annotations

import re
from html import unescape

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.http import HttpRequest
from django.template.loader import render_to_string
from django.test import Client, RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import resolve, reverse

from controlplane.navigation import ENTRIES, Tab
from core.models import User
from gateway.services.models import allow_model
from governance.operations.queries import count_waiting_for
from governance.web.pages import STRICT_POLICY
from tests.fakes.governed_team import make_governed, propose_token
from tests.fakes.nodes import ACTOR, make_key, make_node, make_record
from wire import clock

pytestmark = pytest.mark.django_db

TABS = [(str(entry.label), tab) for entry in ENTRIES for tab in entry.tabs if tab.name != "tenants:list"]
"""Without that of members of tenants, who have no list of all of them."""
SHELL_QUERIES = 6
"""What waits for the person, open problems, the freeze, the tenants of whoever has no list of them, and whether the session may
only look and why: passkeys are read for one that may."""


def sign_in(name: str, *permissions: str, is_staff: bool = False, is_superuser: bool = False) -> Client:
    person = User.objects.create(username=name, is_staff=is_staff, is_superuser=is_superuser)
    person.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(person)
    return client


def read_links(page: str, part: str) -> list[tuple[str, str]]:
    """Return (text, aria-current) of each line of the ``nav`` whose opening tag holds ``part``."""
    (nav,) = re.findall(rf"<nav [^>]*{part}.*?</nav>", page, re.DOTALL)
    lines = re.findall(r"<li>(.*?)</li>", nav, re.DOTALL)
    without_icons = r'<span class="(?:material|mst-count).*?</span>|<[^>]+>'
    return [(re.sub(without_icons, "", line), "".join(re.findall(r'aria-current="(\w+)"', line))) for line in lines]


@pytest.mark.parametrize(("entry", "tab"), TABS, ids=[f"{entry}-{tab.label}" for entry, tab in TABS])
def test_every_page_of_the_table_has_its_name_its_tab_and_one_heading(entry: str, tab: Tab) -> None:
    page = sign_in("ada", is_staff=True, is_superuser=True).get(tab.url).content.decode()
    label = str(tab.label)
    assert f"<title>{label} | Muster</title>" in page
    assert len(re.findall("<h1[ >]", page)) == 1
    crumbs = read_links(page, "mst-crumbs")
    assert crumbs == [(label, "page")] if label == entry else [(entry, ""), (label, "page")]
    assert f'aria-current="page" title="{entry}"' in page
    siblings = [str(each.label) for name, each in TABS if name == entry]
    if len(siblings) > 1:
        assert read_links(page, "mst-tabs") == [(name, "page" if name == label else "") for name in siblings]


def test_a_row_and_what_is_done_to_it_stand_under_their_tab() -> None:
    client, node = sign_in("ada", is_staff=True, is_superuser=True), make_node("rack-2")
    page = client.get(reverse("admin:nodes_node_change", args=[node.pk])).content.decode()
    assert "<title>rack-2 | Nodes | Muster</title>" in page
    assert read_links(page, "mst-crumbs") == [("Nodes", ""), ("rack-2", "page")]
    assert ("Nodes", "true") in read_links(page, "mst-tabs")
    page = client.get(reverse("admin:nodes_node_confirm", args=[node.pk, "cordon"])).content.decode()
    assert read_links(page, "mst-crumbs") == [("Nodes", ""), ("Cordon: rack-2?", "page")]
    page = client.get(reverse("approvals:freeze")).content.decode()
    assert read_links(page, "mst-crumbs") == [("Approvals", ""), ("Policy", ""), ("Freeze all operations", "page")]
    page = client.get(reverse("signin:keys")).content.decode()
    assert read_links(page, "mst-crumbs") == [("My keys", "page")]


@pytest.mark.parametrize(
    ("permissions", "is_staff", "entries"),
    [
        (("view_operation",), False, ["Approvals"]),
        ((), True, ["Overview", "Approvals"]),
        (("view_gpu", "view_auditevent"), True, ["Overview", "Nodes", "Approvals", "System"]),
        (("view_model",), True, ["Overview", "Models", "Playground", "Approvals"]),
        (("view_model", "view_operation"), False, ["Approvals"]),
    ],
)
def test_a_person_sees_no_entry_of_pages_that_are_not_for_them(
    permissions: tuple[str, ...], *, is_staff: bool, entries: list[str]
) -> None:
    page = sign_in("eve", *permissions, is_staff=is_staff).get(reverse("approvals:inbox")).content.decode()
    assert [text for text, _ in read_links(page, 'id="sidebar"')] == entries


def test_what_stands_around_a_page_takes_few_queries_however_much_waits(rf: RequestFactory) -> None:
    team = make_governed()
    team[1].user.is_staff = True
    team[1].user.user_permissions.add(Permission.objects.get(codename="view_alert"))
    request: HttpRequest = rf.get(reverse("approvals:inbox"))
    request.user, request.session, request.resolver_match = team[1].user, Client().session, resolve(request.path)
    team[1].user.has_perm("nodes.view_node")  # asked by every page that is guarded
    for waiting in (1, 3):
        for _ in range(waiting):
            propose_token(team[0])
        with CaptureQueriesContext(connection) as queries:
            page = render_to_string("admin/base_site.html", {"title": "A page"}, request)
        assert f'<span class="mst-count">{count_waiting_for(team[1].user)}<' in page
        assert len(queries) <= SHELL_QUERIES, [query["sql"] for query in queries]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/admin/nothing/", 404), ("/approvals/nothing", 404), ("/admin/nodes/node/", 403), ("/admin/auth/group/?id__in=x", 403)],
)
def test_an_error_page_keeps_the_navigation(path: str, status: int) -> None:
    response = sign_in("eve", is_staff=True).get(path, headers={"accept": "text/html"})
    page = response.content.decode()
    assert response.status_code == status
    assert [text for text, _ in read_links(page, 'id="sidebar"')] == ["Overview", "Approvals"]
    assert len(re.findall("<h1[ >]", page)) == 1
    assert response["Content-Security-Policy"] == STRICT_POLICY


def find(client: Client, text: str) -> list[tuple[str, str, str]]:
    """Return (title, kind, address) of what the palette finds."""
    page = unescape(client.get(reverse("palette"), {"s": text}).content.decode())
    return [
        (title, kind, href)
        for href, title, kind in re.findall(r'href="(.*?)".*?mst-name">(.*?)</span><small>(.*?)</small>', page, re.DOTALL)
    ]


def test_the_palette_finds_pages_rows_and_what_may_be_done() -> None:
    client = sign_in("ada", is_staff=True, is_superuser=True)
    nodes, record = [make_node(name) for name in ("rack-1", "rack-2")], make_record(finished_at=clock.now())
    make_key("ci-bot", tenant="research")
    allow_model(name="llama-3", actor=ACTOR)
    every_page = [str(tab.label) for _, tab in TABS]
    assert [title for title, kind, _ in find(client, "") if kind == "Page"] == every_page
    drain = reverse("admin:nodes_node_confirm", args=[nodes[1].pk, "drain"])
    assert ("Drain rack-2", "Action", drain) in find(client, "drain rack-2")
    assert {title for title, kind, _ in find(client, "drain ra") if kind == "Action"} == {"Drain rack-1", "Drain rack-2"}
    assert {
        ("Drain rack-2", "Action", drain),
        ("rack-2", "Node", reverse("admin:nodes_node_change", args=[nodes[1].pk])),
    } <= set(find(client, "rack-2"))
    assert {kind for _, kind, _ in find(client, "rack")} == {"Node"}
    assert ("New API key", "Action", reverse("admin:gateway_apikey_add")) in find(client, "new key")
    assert ("ci-bot", "API key") in [found[:2] for found in find(client, "ci-bot")]
    assert ("research", "Tenant") in [found[:2] for found in find(client, "research")]
    propose = "/approvals/propose?operation=model-load&modelId=llama-3"
    assert ("Propose a load of llama-3", "Action", propose) in find(client, "load llama-3")
    request = ("Request", reverse("admin:gateway_requestrecord_change", args=[record.pk]))
    for text in (record.printed_id, str(record.pk), record.printed_id[-12:]):
        assert [found[1:] for found in find(client, text)] == [request], text
    assert find(client, "nothing of the kind") == []


def test_the_palette_offers_nothing_that_is_not_for_the_person() -> None:
    make_node("rack-2")
    assert {title for title, _, _ in find(sign_in("eve", "view_operation", "add_operation"), "")} == {
        "Approvals", "History", "Policy", "Propose an operation", "Freeze all operations", "My keys",
    }  # fmt: skip
    assert find(sign_in("bob", "view_node"), "rack") == []
    assert {title for title, _, _ in find(sign_in("dan"), "")} == {"My keys"}
    reads = {title for title, _, _ in find(sign_in("fay", "view_operation"), "")}
    assert reads == {"Approvals", "History", "Policy", "Freeze all operations", "My keys"}
    assert [found[:2] for found in find(sign_in("cleo", "view_node", is_staff=True), "rack-2")] == [("rack-2", "Node")]
    assert Client().get(reverse("palette"), {"s": "rack"}).status_code == 302
