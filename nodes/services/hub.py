"""What a node's hub has: asked of the node, which may reach it where the control plane may not, and kept for minutes."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum

import msgspec
from django.db import transaction
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.errors import BadRequest, NodeNotFound
from nodes.models import HubSearch, Node, ProviderState, Question, Reach, read_clock
from nodes.reports import read_stored
from wire.bridge import HubAnswer, HubModel
from wire.ids import new_uuid7

CANNOT = "cannot"
"""In the place of an error: the runner is too old, or its downloads are switched off."""


class SearchState(StrEnum):
    """How far a search is."""

    ASKED = "asked"
    FOUND = "found"
    FAILED = "failed"
    """The node says why."""
    CANNOT = "cannot"
    SILENT = "silent"
    """The node did not answer in time."""


@dataclass(frozen=True, slots=True)
class SearchView:
    """What a page shows of a search through a node."""

    node_id: uuid.UUID
    node: str
    text: str
    state: SearchState
    error: str = ""
    models: tuple[HubModel, ...] = ()


@transaction.atomic
def search_hub(*, node_id: uuid.UUID, text: str, actor: str) -> None:
    """Have a node look for a text at its hub. Raises NodeNotFound, and BadRequest where nobody can ask it, or for no text."""
    node = Node.objects.select_for_update(of=("self",)).select_related("presence").filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(_("There is no node %(node_id)s.") % {"node_id": node_id}, param="node_id")
    wanted, most = " ".join(text.split()), limits().nodes.hub_text_chars
    if not wanted or len(wanted) > most or not wanted.isprintable():
        raise BadRequest(_("Write 1 to %(most)s printable characters to look for.") % {"most": most}, param="text")
    if node not in list_searchers():
        raise BadRequest(
            _("%(name)s is not connected, or its program is none that could be asked.") % {"name": node.name}, param="node_id"
        )
    asked = {"query_id": new_uuid7(), "text": wanted, "asked_at": read_clock(), "told_at": None, "error": "", "found": []}
    HubSearch.objects.update_or_create(node_id=node_id, defaults=asked)
    record_event(actor=actor, action="node.search_hub", target=node.printed_id, detail={"name": node.name})
    publish_hint("commands", str(node_id))


def list_searchers() -> list[Node]:
    """Return the nodes that can be asked, by name; one query. Whether their runners answer, only they can say."""
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).filter(reach=Reach.RELAY.value, presence__connected=True)
    return list(rows.exclude(runner_id="").order_by("name").only("pk", "name"))


def read_search(node_id: uuid.UUID) -> SearchView | None:
    """Return the last search through a node; None = there was none for a while. Two queries."""
    row, now, bounds = HubSearch.objects.select_related("node").filter(pk=node_id).first(), read_clock(), limits().nodes
    if row is None or now - row.asked_at > timedelta(seconds=bounds.log_kept_s):
        return None
    if row.told_at is None:
        is_waited_for = now - row.asked_at < timedelta(seconds=bounds.hub_answer_s)
        state = SearchState.ASKED if is_waited_for else SearchState.SILENT
    elif row.error == CANNOT:
        state = SearchState.CANNOT
    else:
        state = SearchState.FAILED if row.error else SearchState.FOUND
    found = tuple(read_stored(row.found, list[HubModel]) or ())
    return SearchView(row.node_id, row.node.name, row.text, state, row.error, found)


def list_hub_questions() -> dict[uuid.UUID, Question]:
    """Return by node the searches that wait for an answer; one query."""
    since = read_clock() - timedelta(seconds=limits().nodes.hub_answer_s)
    rows = HubSearch.objects.filter(told_at=None, asked_at__gt=since).values_list("pk", "query_id", "text")
    return {node_id: Question(query_id, text) for node_id, query_id, text in rows}


def store_answer(node_id: uuid.UUID, query_id: uuid.UUID, answer: HubAnswer | None) -> None:
    """Write what a node answered, unless another question was asked since. ``answer`` None: it answers none."""
    said = {"error": CANNOT} if answer is None else {"found": msgspec.to_builtins(answer.models), "error": answer.error}
    HubSearch.objects.filter(pk=node_id, query_id=query_id, told_at=None).update(told_at=read_clock(), **said)


def forget_searches() -> int:
    """Delete what was looked for a while ago; return how many."""
    until = read_clock() - timedelta(seconds=limits().nodes.log_kept_s)
    return HubSearch.objects.filter(asked_at__lt=until).delete()[0]
