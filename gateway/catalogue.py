"""In-memory copies of keys and models, so that the request path asks no database.

Filled from the rows, refreshed when a hint arrives and by a sweep every two seconds; a revoked key therefore stops
working everywhere within five seconds, also when every hint is lost.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection
from django.db.models import Q
from django.utils import timezone

from gateway.models import ApiKey, Model
from gateway.values import Caller, Limits, Priority

_OVERLAP_S = 30
"""A row is read again for this long after its change: its transaction may commit after a later one."""


@dataclass(frozen=True, slots=True)
class KeyEntry:
    """A client key as the request path needs it. ``expires_at`` in Unix seconds."""

    digest: bytes
    caller: Caller
    revoked: bool
    expires_at: float | None

    def is_usable(self, now: float) -> bool:
        """Whether the key works at ``now`` (Unix seconds)."""
        return not self.revoked and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """An allow-list row with its caps resolved against the settings."""

    name: str
    allowed: bool
    owned_by: str
    max_tokens: int
    max_prompt_chars: int
    max_queue: int
    created: int


class Catalogue:
    """Keys by key id and models by name. ``apply_*`` runs on the event loop; ``load_*`` in a database thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.keys: dict[str, KeyEntry] = {}
        self.models: dict[str, ModelEntry] = {}

    def load_keys(self, since: datetime | None) -> list[tuple[str, KeyEntry]]:
        """Return the keys changed since then (None = all of them); tenants count as part of their keys."""
        query = ApiKey.objects.select_related("tenant")
        if since is not None:
            start = since - timedelta(seconds=_OVERLAP_S)
            query = query.filter(Q(updated_at__gte=start) | Q(tenant__updated_at__gte=start))
        return [(key.keyid, self._key_entry(key)) for key in query]

    def load_key(self, keyid: str) -> KeyEntry | None:
        """Return one key, for a caller that comes before the next sweep."""
        key = ApiKey.objects.select_related("tenant").filter(keyid=keyid).first()
        return self._key_entry(key) if key is not None else None

    def load_models(self) -> list[ModelEntry]:
        """Return every model row."""
        limits = self._limits
        return [
            ModelEntry(
                name=row.name,
                allowed=row.allowed,
                owned_by=row.owned_by,
                max_tokens=row.max_tokens if row.max_tokens is not None else limits.max_tokens_cap,
                max_prompt_chars=row.max_prompt_chars if row.max_prompt_chars is not None else limits.max_prompt_chars,
                max_queue=row.max_queue if row.max_queue is not None else limits.max_queue,
                created=int(row.created_at.timestamp()),
            )
            for row in Model.objects.all()
        ]

    def apply_keys(self, entries: list[tuple[str, KeyEntry]], *, replace: bool) -> None:
        """Take loaded keys."""
        if replace:
            self.keys = dict(entries)
        else:
            self.keys.update(entries)

    def apply_models(self, entries: list[ModelEntry]) -> None:
        """Take loaded models."""
        self.models = {entry.name: entry for entry in entries}

    def _key_entry(self, key: ApiKey) -> KeyEntry:
        tenant = key.tenant
        limit = key.requests_per_minute or tenant.requests_per_minute or self._limits.requests_per_minute
        return KeyEntry(
            digest=bytes(key.digest),
            caller=Caller(
                key_id=key.pk,
                key_name=key.name,
                tenant=tenant.name,
                requests_per_minute=limit,
                allowed_models=frozenset(key.allowed_models),
                priority=Priority(key.priority),
            ),
            revoked=key.revoked_at is not None or not tenant.is_active,
            expires_at=key.expires_at.timestamp() if key.expires_at is not None else None,
        )


def store_key_use(used: dict[uuid.UUID, float]) -> None:
    """Write when keys were last used; ``used`` maps key id to Unix seconds. Leaves ``updated_at`` alone."""
    for key_id, at in used.items():
        moment = datetime.fromtimestamp(at, tz=timezone.get_current_timezone())
        ApiKey.objects.filter(Q(last_used_at__lt=moment) | Q(last_used_at=None), pk=key_id).update(last_used_at=moment)


def read_database_time() -> datetime:
    """Return the database's clock, against which ``updated_at`` is compared."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT now()")
        now: datetime = cursor.fetchone()[0]
    return now
