"""The sidebar of the admin. Each entry shows only to operators who may look at what it leads to."""

from __future__ import annotations

from typing import NotRequired, TypedDict

from django.http import HttpRequest
from django.urls import reverse

from controlplane.models import User
from controlplane.playground.access import may_play
from governance.services import count_waiting_for


class Item(TypedDict):
    """One entry, as Unfold reads it."""

    title: str
    icon: str
    link: str
    badge: NotRequired[int]


class Group(TypedDict):
    """Entries under a heading, as Unfold reads them."""

    title: str
    separator: bool
    items: list[Item]


PAGES = {
    "Fleet": (
        ("Nodes", "dns", "nodes", "node"),
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


def build_sidebar(request: HttpRequest) -> list[Group]:
    """Return what the signed-in operator may see."""
    overview = Item(title="Overview", icon="space_dashboard", link=reverse("admin:index"))
    groups = [Group(title="", separator=False, items=[overview, _link_approvals(request)])]
    for title, pages in PAGES.items():
        items = [_link_playground()] if title == "Gateway" and may_play(request) else []
        items += [
            Item(title=name, icon=icon, link=reverse(f"admin:{app}_{model}_changelist"))
            for name, icon, app, model in pages
            if request.user.has_perm(f"{app}.view_{model}") or request.user.has_perm(f"{app}.change_{model}")
        ]
        if items:
            groups.append(Group(title=title, separator=True, items=items))
    return groups


def _link_playground() -> Item:
    return Item(title="Playground", icon="chat", link=reverse("playground:page"))


def _link_approvals(request: HttpRequest) -> Item:
    """Return the way to the approval pages, with how many operations wait for the operator."""
    waiting = count_waiting_for(request.user) if isinstance(request.user, User) else 0
    entry = Item(title="Approvals", icon="approval", link=reverse("approvals:inbox"))
    return Item(**entry, badge=waiting) if waiting else entry
