"""What a notice says, in an e-mail and to a webhook: words, title and a link. Nothing in it can approve."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from django.conf import settings
from django.template.loader import render_to_string

from governance.errors import UnknownOperation
from governance.models import AuditEvent, Freeze, Notice, Operation, OperationRun
from governance.notices import FLEET_EVENTS, RUN_EVENTS
from governance.registry import find_kind
from wire.ids import format_id, parse_id
from wire.optoken.approval import digest_words, read_statement

_FLEET_MEMBERS = {
    "drained": ("interrupted",),
    "ejected": ("model", "reason"),
    "reload_failed": ("model", "reason"),
    "messages_unreadable": ("total",),
}
"""Of each of FLEET_EVENTS: what of the audit event's detail a webhook gets."""


@dataclass(frozen=True, slots=True)
class Message:
    """A notice in words. ``subject``: one line. ``body``: what a webhook gets, as JSON members."""

    subject: str
    text: str
    body: Mapping[str, object]


def write_message(notice: Notice) -> Message:
    """Return what the notice says as things stand now. Raises ApprovalError when the stored statement was tampered with."""
    event, _, which = notice.event.partition(".")
    if event in FLEET_EVENTS:
        return _write_fleet_event(notice, event, AuditEvent.objects.get(pk=int(which)))
    if notice.operation is None:
        return _write_freeze(notice, event)
    operation = notice.operation
    run = _find_run(operation, which) if event in RUN_EVENTS else None
    link = f"{settings.PUBLIC_URL.rstrip('/')}/approvals/{operation.pk}/"
    title, words = _find_title(operation), digest_words(bytes.fromhex(operation.digest))
    receipt = hashlib.sha256(run.receipt.encode()).hexdigest() if run is not None and run.receipt else ""
    context = {
        "event": event,
        "operation": operation,
        "title": title,
        "words": words,
        "link": link,
        "run": run,
        "receipt": receipt,
    }
    body: dict[str, object] = {
        "id": str(notice.pk),
        "event": event,
        "operation": {
            "id": format_id("op", operation.pk),
            "operation": operation.operation,
            "class": operation.op_class,
            "state": operation.state,
            "title": title,
            "digest": operation.digest,
            "words": words,
            "requestedBy": operation.requested_by,
            "expiresAt": int(operation.expires_at.timestamp()),
        },
        "link": link,
    }
    if run is not None:
        body["run"] = {"target": run.target, "state": run.state, "code": run.code, "receiptSha256": receipt}
    return Message(*_render(event, context), body=body)


def _write_freeze(notice: Notice, event: str) -> Message:
    freeze = Freeze.objects.filter(frozen_at__lte=notice.created_at).order_by("-frozen_at").first()
    link = f"{settings.PUBLIC_URL.rstrip('/')}/approvals/"
    by = freeze.frozen_by if freeze is not None else ""
    body: dict[str, object] = {"id": str(notice.pk), "event": event, "operation": None, "link": link, "frozenBy": by}
    return Message(*_render(event, {"event": event, "freeze": freeze, "link": link}), body=body)


def _write_fleet_event(notice: Notice, event: str, audited: AuditEvent) -> Message:
    is_of_node = event != "messages_unreadable"
    link = f"{settings.PUBLIC_URL.rstrip('/')}/admin/"
    if is_of_node:
        link += f"nodes/node/{parse_id('node', audited.target)}/change/"
    body: dict[str, object] = {
        "id": str(notice.pk),
        "event": event,
        "operation": None,
        **({"node": {"id": audited.target, "name": audited.detail["name"]}} if is_of_node else {}),
        "at": int(audited.at.timestamp()),
        **{member: audited.detail[member] for member in _FLEET_MEMBERS[event]},
        "link": link,
    }
    if audited.op_id:
        body["operation"] = {"id": audited.op_id}
    return Message(*_render(event, {"event": audited, "link": link}), body=body)


def _render(event: str, context: Mapping[str, object]) -> tuple[str, str]:
    """Return subject and text: the first line of a template is the subject."""
    subject, _, text = render_to_string(f"notices/{event}.txt", dict(context)).strip().partition("\n")
    return " ".join(subject.split())[:200], text.strip() + "\n"


def _find_title(operation: Operation) -> str:
    statement = read_statement(bytes(operation.statement))
    try:
        return find_kind(operation.operation).describe(statement.targets, statement.params).title
    except UnknownOperation:  # the release that knew it is gone
        return operation.operation


def _find_run(operation: Operation, which: str) -> OperationRun | None:
    """Return the carrying out that a notice is about: ``<use>.<position>``, or the last one that ended."""
    runs = operation.runs.filter(ended_at__isnull=False)
    use, _, position = which.partition(".")
    if position:
        return operation.runs.filter(use=int(use), position=int(position)).first()
    return runs.order_by("-ended_at").first()
