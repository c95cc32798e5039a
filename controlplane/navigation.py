"""The sidebar and the search of the admin. Each entry shows only to operators who may look at what it leads to."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from django.apps import apps
from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse

from controlplane.playground.keys import may_play
from core.limits import limits
from core.models import User
from governance.operations.queries import count_waiting_for


class Item(TypedDict):
    """One entry, as Unfold reads it."""

    title: str
    icon: str
    link: str
    badge: NotRequired[int]


class Group(TypedDict):
    title: str
    separator: bool
    items: list[Item]


PAGES = {
    "Fleet": (
        ("Nodes", "dns", "nodes", "node"),
        ("GPUs", "memory", "nodes", "gpu"),
        ("Node credentials", "badge", "nodes", "nodecredential"),
        ("Providers", "hub", "nodes", "provider"),
    ),
    "Gateway": (
        ("Models", "deployed_code", "gateway", "model"),
        ("Model aliases", "alt_route", "gateway", "modelalias"),
        ("Requests", "receipt_long", "gateway", "requestrecord"),
        ("Stored responses", "forum", "gateway", "storedresponse"),
        ("API keys", "key", "gateway", "apikey"),
        ("Tenants", "apartment", "gateway", "tenant"),
        ("Gateway processes", "lan", "gateway", "gatewayprocess"),
    ),
    "Governance": (
        ("Operators", "group", "controlplane", "user"),
        ("Admin tokens", "vpn_key", "governance", "admintoken"),
        ("Webhooks", "webhook", "governance", "webhookendpoint"),
        ("Audit", "history", "governance", "auditevent"),
    ),
}
"""Heading → (title, icon, app, model) of its entries."""


FOUND_ROWS = (
    ("Node", "dns", "nodes", "node"),
    ("GPU", "memory", "nodes", "gpu"),
    ("Model", "deployed_code", "gateway", "model"),
    ("Model alias", "alt_route", "gateway", "modelalias"),
    ("API key", "key", "gateway", "apikey"),
    ("Tenant", "apartment", "gateway", "tenant"),
    ("Operator", "group", "controlplane", "user"),
    ("Request", "receipt_long", "gateway", "requestrecord"),
)
"""(kind, icon, app, model) of the rows that the search finds, in its order."""
_REQUEST_ID = re.compile(r"(req_)?[0-9a-z-]{6,36}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that the search found. ``kind``: what it is, for people."""

    title: str
    kind: str
    link: str
    icon: str


def build_sidebar(request: HttpRequest) -> list[Group]:
    overview = Item(title="Overview", icon="space_dashboard", link=reverse("admin:index"))
    groups = [Group(title="", separator=False, items=[overview, _link_approvals(request)])]
    playground = Item(title="Playground", icon="chat", link=reverse("playground:page"))
    for title, pages in PAGES.items():
        items = [playground] if title == "Gateway" and may_play(request) else []
        items += [
            Item(title=name, icon=icon, link=reverse(f"admin:{app}_{model}_changelist"))
            for name, icon, app, model in pages
            if request.user.has_perm(f"{app}.view_{model}") or request.user.has_perm(f"{app}.change_{model}")
        ]
        if items:
            groups.append(Group(title=title, separator=True, items=items))
    return groups


def find_entries(request: HttpRequest, text: str) -> list[Entry]:
    """Return the pages whose title holds ``text``, then rows that the lists find for it; one query for each kind of row."""
    term = text.replace("\x00", "").strip()[: limits().console.search_chars]
    asked = term.lower()
    if not asked:
        return []
    items = [item for group in build_sidebar(request) for item in group["items"]]
    found = [Entry(item["title"], "Page", item["link"], item["icon"]) for item in items if asked in item["title"].lower()]
    for kind, icon, app, model in FOUND_ROWS:
        # Requests are many, and words other than an id would be searched in all of them.
        if kind == "Request" and not _REQUEST_ID.fullmatch(asked):
            continue
        listing = admin.site.get_model_admin(apps.get_model(app, model))
        if not listing.has_view_permission(request):
            continue
        rows, _ = listing.get_search_results(request, listing.get_queryset(request), term)
        page = f"admin:{app}_{model}_change"
        found += [Entry(str(row), kind, reverse(page, args=[row.pk]), icon) for row in rows[: limits().console.search_rows]]
    return found


def _link_approvals(request: HttpRequest) -> Item:
    """Return the way to the approval pages, with how many operations wait for the operator."""
    waiting = count_waiting_for(request.user) if isinstance(request.user, User) else 0
    entry = Item(title="Approvals", icon="approval", link=reverse("approvals:inbox"))
    return Item(**entry, badge=waiting) if waiting else entry
