"""The log of a node as somebody sees it who may: asked of the node itself, kept for minutes, each look in the audit log."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum

import msgspec
from django.db import transaction
from django.utils.translation import gettext as _

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from nodes.errors import NodeNotFound
from nodes.models import Node, NodeLog, Question, Reach, presence_of, read_clock
from nodes.reports import read_stored
from wire.bridge import LogLine, LogTail
from wire.ids import new_uuid7


class LogState(StrEnum):
    """How far a question for the log of a node is."""

    UNASKED = "unasked"
    ASKED = "asked"
    TOLD = "told"
    UNTOLD = "untold"
    """The runner is too old, or its owner forbids it."""
    SILENT = "silent"
    """The node did not answer in time."""
    UNREACHABLE = "unreachable"
    """No gateway holds a socket of the node: nobody can be asked."""


@dataclass(frozen=True, slots=True)
class LogView:
    """What a page shows of a log. ``told_at``: when the node said ``lines``, the oldest first."""

    state: LogState
    told_at: datetime | None = None
    lines: tuple[LogLine, ...] = ()
    left_out: int = 0


@transaction.atomic
def ask_log(*, node_id: uuid.UUID, actor: str) -> None:
    """Have the node asked for its last log lines, and note who wanted them. Raises NodeNotFound.

    Within ``log_ask_s`` of the last question nothing is asked, and nothing noted: what that one brings is there for all.
    """
    node = Node.objects.select_for_update(of=("self",)).select_related("presence").filter(pk=node_id).first()
    if node is None:
        raise NodeNotFound(_("There is no node %(node_id)s.") % {"node_id": node_id}, param="node_id")
    now = read_clock()
    is_fresh = NodeLog.objects.filter(pk=node_id, asked_at__gt=now - timedelta(seconds=limits().nodes.log_ask_s)).exists()
    if is_fresh or not _holds_socket(node):
        return
    asked = {"query_id": new_uuid7(), "asked_at": now, "told_at": None, "is_told": False, "lines": [], "left_out": 0}
    NodeLog.objects.update_or_create(node_id=node_id, defaults=asked)
    record_event(actor=actor, action="node.read_log", target=node.printed_id, detail={"name": node.name})
    publish_hint("commands", str(node_id))


def read_log(node: Node) -> LogView:
    """Return what is known of the log of a node; two queries."""
    row, now, bounds = NodeLog.objects.filter(pk=node.pk).first(), read_clock(), limits().nodes
    if row is not None and row.told_at is not None and now - row.told_at < timedelta(seconds=bounds.log_kept_s):
        if not row.is_told:
            return LogView(LogState.UNTOLD, row.told_at)
        lines = tuple(read_stored(row.lines, list[LogLine]) or ())
        return LogView(LogState.TOLD, row.told_at, lines, row.left_out)
    if not _holds_socket(node):
        return LogView(LogState.UNREACHABLE)
    if row is None or row.told_at is not None:
        return LogView(LogState.UNASKED)
    is_waited_for = now - row.asked_at < timedelta(seconds=bounds.log_answer_s)
    return LogView(LogState.ASKED if is_waited_for else LogState.SILENT)


def _holds_socket(node: Node) -> bool:
    return node.reach == Reach.RELAY.value and presence_of(node).connected


def list_log_questions() -> dict[uuid.UUID, Question]:
    """Return by node the questions that wait for an answer; one query."""
    since = read_clock() - timedelta(seconds=limits().nodes.log_answer_s)
    rows = NodeLog.objects.filter(told_at=None, asked_at__gt=since).values_list("pk", "query_id")
    return {node_id: Question(query_id) for node_id, query_id in rows}


def store_log(node_id: uuid.UUID, query_id: uuid.UUID, tail: LogTail | None) -> None:
    """Write what a node answered to a question, unless another one was asked since. ``tail`` None: it does not tell its log."""
    said = {} if tail is None else {"lines": msgspec.to_builtins(tail.lines), "left_out": tail.left_out}
    rows = NodeLog.objects.filter(pk=node_id, query_id=query_id, told_at=None)
    rows.update(told_at=read_clock(), is_told=tail is not None, **said)


def forget_logs() -> int:
    """Delete what nodes told of their logs a while ago; return how many."""
    until = read_clock() - timedelta(seconds=limits().nodes.log_kept_s)
    return NodeLog.objects.filter(asked_at__lt=until).delete()[0]
