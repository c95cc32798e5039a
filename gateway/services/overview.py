"""What the operators' first page says of gateways, allowed models and keys. Reads only."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import Count, F
from django.db.models.functions import Now

from core.limits import limits
from gateway.models import ApiKey, GatewayProcess, Model, RequestRecord
from wire import clock


@dataclass(frozen=True, slots=True)
class GatewayHealth:
    """A gateway process that was not stopped, as its heartbeats show it. ``silent_s``: since the last one."""

    name: str
    heard_at: datetime
    silent_s: float

    @property
    def is_alive(self) -> bool:
        """Whether it was heard recently enough not to count as lost."""
        return self.silent_s < limits().gateway.dead_s


@dataclass(frozen=True, slots=True)
class ExpiringKey:
    """An API key that is in use and ends soon."""

    key_id: uuid.UUID
    name: str
    expires_at: datetime


def read_gateways() -> tuple[GatewayHealth, ...]:
    """Return the gateway processes that should serve, in one query.

    A process that died wrote no end. It counts until it is forgotten, or until one that started later took its place: on the
    same host, under the same internal address.
    """
    since = Now() - timedelta(seconds=limits().gateway.forgotten_s)
    rows = GatewayProcess.objects.filter(stopped_at=None, heartbeat_at__gte=since)
    processes = list(rows.annotate(silence=Now() - F("heartbeat_at")).order_by("host", "pid"))
    newest: dict[tuple[str, str], datetime] = {}
    for process in processes:
        place = process.host, process.internal_url
        newest[place] = max(newest.get(place, process.started_at), process.started_at)
    found = []
    for process in processes:
        health = GatewayHealth(str(process), process.heartbeat_at, process.silence.total_seconds())
        was_replaced = newest[process.host, process.internal_url] > max(process.started_at, process.heartbeat_at)
        if health.is_alive or not was_replaced:
            found.append(health)
    return tuple(found)


def count_asked_models() -> dict[str, int]:
    """Return every allowed model with the requests for it within ``page_asked_s``, in two queries."""
    names = Model.objects.filter(allowed=True).values_list("name", flat=True)
    since = clock.now() - timedelta(seconds=limits().gateway.page_asked_s)
    recent = RequestRecord.objects.filter(created_at__gte=since).values_list("model")
    asked = dict(recent.annotate(requests=Count("pk")).order_by())
    return {name: asked.get(name, 0) for name in names}


def read_expiring_keys() -> tuple[ExpiringKey, ...]:
    """Return the keys that end within ``page_key_warning_s`` and were used within it, the first to end first; one query."""
    now = clock.now()
    within = timedelta(seconds=limits().gateway.page_key_warning_s)
    usable = ApiKey.objects.filter(revoked_at=None, last_used_at__gte=now - within)
    rows = usable.filter(expires_at__range=(now, now + within)).order_by("expires_at")
    return tuple(ExpiringKey(key.pk, key.name, key.expires_at) for key in rows if key.expires_at is not None)
