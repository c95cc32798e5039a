"""Ejections of nodes as rows: what each gateway holds against a node, written by it, read by pages and the API."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Q

from core.hints import publish_hint
from core.limits import limits
from governance.audit import record_event
from governance.services.notices import notify_of_event
from nodes.models import NodePresence
from nodes.services.clock import read_clock

_REASONS = {
    "failed": "it failed requests that other nodes answered",
    "slow": "it answers much more slowly than other nodes",
    "wrong": "it answered the canary question wrongly",
    "unsteady": "it reconnected ten times within a minute",
}


@dataclass(frozen=True, slots=True)
class EjectionReport:
    """What a gateway holds against a node; an empty model = every model. ``left_s``: how long yet, negative = it is tried.

    ``is_news``: operators are to be told. ``is_held`` False: it goes on getting requests, for half of the others are ejected.
    """

    node_id: uuid.UUID
    model: str
    reason: str
    age_s: float
    left_s: float
    is_news: bool
    is_held: bool = True


@dataclass(frozen=True, slots=True)
class ShownEjection:
    """An ejection in words, which leave the model out. ``model`` empty = every model."""

    model: str
    reason: str
    since: datetime
    until: datetime
    words: str


def write_ejections(reports: Sequence[EjectionReport], *, gateway_id: uuid.UUID) -> None:
    """Write all that a gateway holds against nodes, in place of what it wrote before; what is new goes to the audit log."""
    with transaction.atomic():
        now, key = read_clock(), gateway_id.hex
        held: dict[uuid.UUID, list[dict[str, object]]] = {}
        for one in reports:
            since, until = now - timedelta(seconds=one.age_s), now + timedelta(seconds=one.left_s)
            told: dict[str, object] = {"model": one.model, "reason": one.reason}
            told |= {"since": since.isoformat(), "until": until.isoformat()}
            held.setdefault(one.node_id, []).append(told if one.is_held else {**told, "is_held": False})
        rows = NodePresence.objects.select_for_update(of=("self",)).select_related("node").order_by("pk")
        for presence in rows.filter(Q(pk__in=list(held)) | Q(ejections__has_key=key)):
            others = {gateway: entries for gateway, entries in presence.ejections.items() if gateway != key}
            entries = held.get(presence.pk)
            presence.ejections = {
                **{gateway: kept for gateway, told in others.items() if (kept := [e for e in told if _is_shown(e, now)])},
                **({key: entries} if entries else {}),
            }
            presence.save(update_fields=["ejections"])
            publish_hint("nodes", str(presence.pk))
            for one in reports:
                if one.node_id == presence.pk and one.is_news:
                    _tell(presence, one)


def list_ejections(presence: NodePresence | None, *, now: datetime) -> list[ShownEjection]:
    """Return for which models gateways send a node nothing new at the moment, and why; one line a model and reason."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    for told in presence.ejections.values() if presence is not None else ():
        for entry in told:
            key = (entry["model"], entry["reason"])
            if _is_shown(entry, now) and (key not in found or found[key]["until"] < entry["until"]):
                found[key] = entry
    return [_show(entry, now) for _key, entry in sorted(found.items())]


def _is_shown(entry: dict[str, str], now: datetime) -> bool:
    return datetime.fromisoformat(entry["until"]) > now - timedelta(seconds=limits().nodes.ejection_shown_s)


def _show(entry: dict[str, str], now: datetime) -> ShownEjection:
    since, until = datetime.fromisoformat(entry["since"]), datetime.fromisoformat(entry["until"])
    if not entry.get("is_held", True):
        when = "it gets requests all the same, because half of the model's nodes are ejected"
    elif until <= now:
        when = "one request at a time tries it"
    else:
        when = f"no new requests until {until:%H:%M:%S} UTC"
    reason = _REASONS.get(entry["reason"], entry["reason"])
    return ShownEjection(entry["model"], entry["reason"], since, until, f"{reason}; {when}")


def _tell(presence: NodePresence, report: EjectionReport) -> None:
    node = presence.node
    detail = {"name": node.name, "model": report.model, "reason": _REASONS.get(report.reason, report.reason)}
    event = record_event(actor="system:gateway", action="node.ejected", target=node.printed_id, detail=detail)
    notify_of_event(event, "ejected", usernames=())
