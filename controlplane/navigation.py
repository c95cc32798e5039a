"""The console's navigation: nine entries, the tabs of each, where a page stands in them, and what the search finds.

``ENTRIES`` is the one table of all pages. Who may not see a page finds neither its tab nor an entry without tabs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from django.apps import apps
from django.contrib import admin
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import AnonymousUser
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy
from django.views.decorators.http import require_safe

from core.limits import limits
from core.models import User
from core.roles import has_tenants, may
from governance.alerts import count_open_problems
from governance.operations.queries import count_waiting_for
from governance.people import may_propose, may_see_operations

Words = str | Promise
Listing = Any
"""A class of ``core.admin_pages``, which is not loaded yet where this module is: its skin ships no types."""


@dataclass(frozen=True, slots=True)
class Tab:
    """One page of an entry.

    ``name``: of a URL (``approvals:inbox``), or of an admin model (``nodes.node``), whose every page is then the tab's.
    ``needs``: any of these permissions; an admin model needs that its rows may be seen or changed. ``is_for_all``: also for
    people who are not staff, such as approvers; ``allows``: who of them. ``others``: names of more URLs of the tab.
    """

    label: Words
    icon: str
    name: str
    needs: tuple[str, ...] = ()
    is_for_all: bool = False
    others: tuple[str, ...] = ()
    allows: Callable[[User | AnonymousUser], bool] | None = None

    @property
    def url(self) -> str:
        return reverse(self._view)

    @property
    def _view(self) -> str:
        return f"admin:{self.name.replace('.', '_')}_changelist" if self._is_model else self.name

    @property
    def _is_model(self) -> bool:
        return "." in self.name

    def is_for(self, request: HttpRequest) -> bool:
        if not self.is_for_all and not getattr(request.user, "is_staff", False):
            return False
        if self.allows is not None and not self.allows(request.user):
            return False
        app, _dot, model = self.name.partition(".")
        needs = (f"{app}.view_{model}", f"{app}.change_{model}") if self._is_model else self.needs
        return not needs or any(may(request.user, name) for name in needs)

    def is_front(self, view: str) -> bool:
        return view == self._view

    def holds(self, view: str) -> bool:
        """Return whether the page of this name belongs to the tab."""
        if self._is_model:
            return view.startswith(f"admin:{self.name.replace('.', '_')}_")
        return view in (self.name, *self.others)


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the sidebar; ``count``: how much waits there for the person."""

    label: Words
    icon: str
    tabs: tuple[Tab, ...]
    count: Callable[[HttpRequest], int] | None = None


def count_approvals(request: HttpRequest) -> int:
    return count_waiting_for(request.user) if isinstance(request.user, User) else 0


SEE_MODELS = ("gateway.view_model", "gateway.change_model")

ALERTS = Tab(gettext_lazy("Alerts"), "notifications", "governance.alert")
"""Also where the bell of the top bar leads."""
SYSTEM = Tab(
    gettext_lazy("System"), "monitor_heart", "system", ("gateway.view_gatewayprocess", "gateway.change_gatewayprocess")
)

ENTRIES = (
    Entry(gettext_lazy("Overview"), "space_dashboard", (
        Tab(gettext_lazy("Overview"), "space_dashboard", "admin:index"),
    )),
    Entry(gettext_lazy("Nodes"), "dns", (
        Tab(gettext_lazy("Nodes"), "dns", "nodes.node"),
        Tab(gettext_lazy("GPUs"), "memory", "nodes.gpu"),
        Tab(gettext_lazy("Providers"), "hub", "nodes.provider"),
    )),
    Entry(gettext_lazy("Models"), "deployed_code", (
        Tab(gettext_lazy("Models"), "deployed_code", "gateway.model"),
        Tab(gettext_lazy("Catalogue"), "library_books", "admin:gateway_catalogue", SEE_MODELS),
        Tab(gettext_lazy("Aliases"), "alt_route", "gateway.modelalias"),
    )),
    Entry(gettext_lazy("Requests"), "receipt_long", (
        Tab(gettext_lazy("Requests"), "receipt_long", "gateway.requestrecord"),
        Tab(gettext_lazy("Stored responses"), "forum", "gateway.storedresponse"),
    )),
    Entry(gettext_lazy("Usage"), "bar_chart", (
        Tab(gettext_lazy("Usage"), "bar_chart", "usage:page", ("gateway.view_requestrecord",)),
    )),
    Entry(gettext_lazy("Playground"), "chat", (
        Tab(gettext_lazy("Playground"), "chat", "playground:page", SEE_MODELS),
    )),
    Entry(gettext_lazy("Approvals"), "approval", (
        Tab(gettext_lazy("Approvals"), "approval", "approvals:inbox", is_for_all=True, allows=may_see_operations,
            others=("approvals:operation", "approvals:propose", "approvals:claim")),
        Tab(gettext_lazy("History"), "history", "approvals:history", is_for_all=True, allows=may_see_operations),
        Tab(gettext_lazy("Policy"), "policy", "approvals:policy", is_for_all=True, allows=may_see_operations,
            others=("approvals:draft_policy", "approvals:freeze")),
    ), count_approvals),
    Entry(gettext_lazy("Access"), "key", (
        Tab(gettext_lazy("My tenants"), "apartment", "tenants:list", is_for_all=True, allows=has_tenants, others=tuple(
            f"tenants:{name}" for name in ("tenant", "add-key", "rotate-key", "revoke-key", "add-member", "remove-member")
        )),
        Tab(gettext_lazy("API keys"), "key", "gateway.apikey"),
        Tab(gettext_lazy("Tenants"), "apartment", "gateway.tenant"),
        Tab(gettext_lazy("People"), "group", "controlplane.user"),
        Tab(gettext_lazy("Groups"), "groups", "auth.group"),
        Tab(gettext_lazy("Admin tokens"), "vpn_key", "governance.admintoken"),
        Tab(gettext_lazy("Node credentials"), "badge", "nodes.nodecredential"),
        Tab(gettext_lazy("Webhooks"), "webhook", "governance.webhookendpoint"),
    )),
    Entry(gettext_lazy("System"), "monitor_heart", (
        SYSTEM,
        ALERTS,
        Tab(gettext_lazy("Silences"), "notifications_off", "governance.alertsilence"),
        Tab(gettext_lazy("Gateways"), "lan", "gateway.gatewayprocess"),
        Tab(gettext_lazy("Audit"), "fact_check", "governance.auditevent"),
    )),
)  # fmt: skip


ACTIONS = (
    Tab(gettext_lazy("Add node"), "add_circle", "admin:nodes_node_setup", ("nodes.add_nodecredential",)),
    Tab(gettext_lazy("New API key"), "key", "admin:gateway_apikey_add", ("gateway.add_apikey",)),
    Tab(gettext_lazy("New tenant"), "apartment", "admin:gateway_tenant_add", ("gateway.add_tenant",)),
    Tab(gettext_lazy("Allow a model"), "deployed_code", "admin:gateway_model_add", ("gateway.add_model",)),
    Tab(gettext_lazy("Invite a person"), "person_add", "admin:controlplane_user_add", ("controlplane.add_user",)),
    Tab(gettext_lazy("New webhook"), "webhook", "admin:governance_webhookendpoint_add", ("governance.add_webhookendpoint",)),
    Tab(gettext_lazy("Propose an operation"), "approval", "approvals:propose", is_for_all=True, allows=may_propose),
    Tab(gettext_lazy("Freeze all operations"), "ac_unit", "approvals:freeze", is_for_all=True, allows=may_see_operations),
    Tab(gettext_lazy("My keys"), "passkey", "signin:keys", is_for_all=True),
)
"""What the search offers to do. What may be done to a row (``core.admin_pages.RowChange``) it offers behind the row's name."""
LOADS = (
    (gettext_lazy("Propose a load of %(model)s"), "model-load"),
    (gettext_lazy("Propose an unload of %(model)s"), "model-unload"),
)
"""What may be proposed of a model: its words, and the operation."""


@dataclass(frozen=True, slots=True)
class Kind:
    """Rows of one admin model that the search finds. ``has_actions``: also what may be done to each."""

    name: Words
    icon: str
    app: str
    model: str
    has_actions: bool = False


FOUND_ROWS = (
    Kind(gettext_lazy("Node"), "dns", "nodes", "node", has_actions=True),
    Kind(gettext_lazy("GPU"), "memory", "nodes", "gpu"),
    Kind(gettext_lazy("Model"), "deployed_code", "gateway", "model"),
    Kind(gettext_lazy("Model alias"), "alt_route", "gateway", "modelalias"),
    Kind(gettext_lazy("API key"), "key", "gateway", "apikey", has_actions=True),
    Kind(gettext_lazy("Tenant"), "apartment", "gateway", "tenant"),
    Kind(gettext_lazy("Person"), "group", "controlplane", "user"),
    Kind(gettext_lazy("Request"), "receipt_long", "gateway", "requestrecord"),
)
_REQUEST_ID = re.compile(r"(req_)?[0-9a-f-]{12,36}")


@dataclass(frozen=True, slots=True)
class Link:
    """A way to a page as the shell shows it. ``current``: as ``aria-current`` says it, "" = elsewhere."""

    label: Words
    url: str = ""
    icon: str = ""
    current: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Shell:
    """What stands around a page.

    ``crumbs``: the way to it, the page itself last. ``title``: its name for the browser's tab; ``name``: of its entry.
    ``problems``: the way to what needs attention, and how much that is. ``is_front``: the page is a tab's own.
    """

    entries: tuple[Link, ...] = ()
    tabs: tuple[Link, ...] = ()
    crumbs: tuple[Link, ...] = ()
    heading: Words = ""
    title: Words = ""
    name: Words = ""
    is_front: bool = False
    problems: Link | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One thing that the search found. ``kind``: what it is, for people."""

    title: str
    kind: str
    link: str
    icon: str


def read_shell(request: HttpRequest | None, page: Mapping[str, Any]) -> Shell:
    """Return what stands around a page; ``page``: its template context, of which the title and the row are read."""
    title = str(page.get("title") or "")
    if request is None or not getattr(getattr(request, "user", None), "is_authenticated", False):
        return Shell(heading=title, title=title)
    view = request.resolver_match.view_name if request.resolver_match is not None else ""
    entries: list[Link] = []
    place: _Place | None = None
    for entry in ENTRIES:
        visible = [tab for tab in entry.tabs if tab.is_for(request)]
        if not visible:
            continue
        here = next((tab for tab in visible if tab.holds(view)), None)
        count = entry.count(request) if entry.count is not None else 0
        current = "" if here is None else "page" if here.is_front(view) else "true"
        entries.append(Link(entry.label, visible[0].url, entry.icon, current, count))
        if here is not None:
            place = _Place(entry, visible, here, current)
    row = page.get("original")
    heading = str(row) if isinstance(row, Model) else title
    if place is None:
        shell = Shell(crumbs=(Link(heading),) if heading else (), heading=heading, title=heading)
    else:
        shell = place.show(heading)
    problems = Link(ALERTS.label, ALERTS.url, ALERTS.icon, count=count_open_problems()) if ALERTS.is_for(request) else None
    return replace(shell, entries=tuple(entries), problems=problems)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a page stands: the tab ``here`` of an entry. ``current``: as of ``Link``, "page" is the tab's own page."""

    entry: Entry
    visible: Sequence[Tab]
    here: Tab
    current: str

    def show(self, heading: str) -> Shell:
        tabs = tuple(Link(tab.label, tab.url, tab.icon, self.current if tab is self.here else "") for tab in self.visible)
        name, label, is_front = str(self.entry.label), str(self.here.label), self.current == "page"
        crumbs = [Link(name, self.visible[0].url)]
        if label != name:
            crumbs.append(Link(label, self.here.url))
        if not is_front and heading:
            crumbs.append(Link(heading))
        return Shell(
            tabs=tabs if len(tabs) > 1 else (),
            crumbs=(*crumbs[:-1], Link(crumbs[-1].label)) if is_front or heading else tuple(crumbs),
            is_front=is_front,
            heading=label if is_front else heading,
            title=label if is_front or not heading else f"{heading} | {label}",
            name=name,
        )


def find_entries(request: HttpRequest, text: str) -> list[Found]:
    """Return pages and actions whose words begin as those of ``text`` do, then rows that the lists find for it.

    Without a text: every page and action. With one: a query for each kind of row, and those of what may be done to it.
    """
    term = text.replace("\x00", "").strip()[: limits().console.search_chars]
    pages = [tab for entry in ENTRIES for tab in entry.tabs if _is_meant(tab, term) and tab.is_for(request)]
    found = [Found(str(tab.label), _("Page"), tab.url, tab.icon) for tab in pages]
    actions = [action for action in ACTIONS if _is_meant(action, term) and action.is_for(request)]
    found += [Found(str(action.label), _("Action"), action.url, action.icon) for action in actions]
    if not term or not getattr(request.user, "is_staff", False):
        return found
    verb, _space, rest = term.partition(" ")
    for kind in FOUND_ROWS:
        listing = admin.site.get_model_admin(apps.get_model(kind.app, kind.model))
        if not listing.has_view_permission(request):
            continue
        rows = _search(listing, request, kind, term)
        found += [Found(str(row), str(kind.name), _locate(kind, row), kind.icon) for row in rows]
        if kind.model == "model":
            models = rows or (_search(listing, request, kind, rest.split(" ")[-1]) if rest else [])
            found += _offer_loads(request, models)
        elif kind.has_actions:  # a session that may only look finds the form, disabled, below the reason
            found += _offer_changes(listing, request, kind, rows, verb=verb.lower(), rest=rest.strip())
    return found


def _is_meant(tab: Tab, term: str) -> bool:
    """Return whether each word of the term begins a word of the tab's name."""
    words = str(tab.label).lower().split()
    return all(any(word.startswith(part) for word in words) for part in term.lower().split())


def _search(listing: Listing, request: HttpRequest, kind: Kind, term: str) -> list[Model]:
    # Requests are many, and words other than an id would be searched in all of them.
    if kind.model == "requestrecord" and not _REQUEST_ID.fullmatch(term.lower()):
        return []
    rows, _is_distinct = listing.get_search_results(request, listing.get_queryset(request), term)
    return list(rows[: limits().console.search_rows])


def _offer_changes(
    listing: Listing, request: HttpRequest, kind: Kind, rows: Sequence[Model], *, verb: str, rest: str
) -> list[Found]:
    """Return what may be done to rows: to the one that was found, or, where the text begins with a verb, that to the others."""
    is_verb = any(str(change.label).lower().startswith(verb) for change in listing.row_changes)
    if len(rows) == 1:
        verb = ""
    elif rows or not is_verb:
        return []
    else:
        rows = _search(listing, request, kind, rest)
    words = _("%(change)s %(row)s")
    return [
        Found(words % {"change": link.label, "row": row}, _("Action"), link.url, kind.icon)
        for row in rows
        for link in listing.list_links(request, row)
        if str(link.label).lower().startswith(verb)
    ]


def _offer_loads(request: HttpRequest, models: Sequence[Model]) -> list[Found]:
    return [
        Found(str(words) % {"model": model}, _("Action"), f"{reverse('approvals:propose')}?{query}", "approval")
        for model in models[:1]
        for words, operation in LOADS
        for query in [urlencode({"operation": operation, "modelId": str(model)})]
    ]


def _locate(kind: Kind, row: Model) -> str:
    return reverse(f"admin:{kind.app}_{kind.model}_change", args=[row.pk])


@require_safe
@login_required
def show_found(request: HttpRequest) -> HttpResponse:
    """Answer with what the palette finds for ``?s=``, as a part of a page. Nothing is remembered: rows change."""
    found = {"results": find_entries(request, request.GET.get("s", ""))}
    response = render(request, "unfold/helpers/command_results.html", found)
    response["Cache-Control"] = "no-store"
    return response
