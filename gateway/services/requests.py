"""Finding request records: one, for a page that follows what it sent, or those that somebody names. Reads only."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.db.models import Q, QuerySet, TextField
from django.db.models.functions import Cast, Right

from core.limits import limits
from gateway.models import TAIL_CHARS, ApiKey, Model, ModelAlias, RequestRecord, Tenant
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, RequestState
from wire.ids import parse_id

_TAIL = re.compile(rf"[0-9a-f]{{{TAIL_CHARS},31}}\Z")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """How a request stands. Times in milliseconds; None = not known (yet). ``is_final``: nothing changes any more."""

    state: str
    is_final: bool
    error_code: str | None
    model: str
    node: str
    queue_ms: int | None
    ttfb_ms: int | None
    latency_ms: int | None
    prompt_tokens: int | None
    completion_tokens: int | None
    tokens_estimated: bool


def find_request(record_id: uuid.UUID) -> RequestFacts | None:
    """Return how a request stands; None when there is no record of that id."""
    record = RequestRecord.objects.filter(pk=record_id).first()
    if record is None:
        return None
    return RequestFacts(
        state=record.state,
        is_final=RequestState(record.state) not in OPEN_REQUEST_STATES,
        error_code=record.error_code,
        model=record.model,
        node=record.node_name,
        queue_ms=record.queue_ms,
        ttfb_ms=record.ttfb_ms,
        latency_ms=record.latency_ms,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        tokens_estimated=record.tokens_estimated,
    )


def find_records(records: QuerySet[RequestRecord], text: str) -> QuerySet[RequestRecord]:
    """Return those of ``records`` that ``text`` names.

    It is an id (``req_…`` or a UUID), the last TAIL_CHARS characters of one or more, or the exact name of a model or alias, a
    tenant or a key, in any case. Whose name it is shows in small tables; one that is in none of them, such as that of
    a model that clients ask for in vain, is looked for among the records of the last ``page_unknown_name_s``.
    """
    record_id = parse_id("req", text)
    if record_id is not None:
        return records.filter(pk=record_id)
    tail = text.removeprefix("…").lower()
    if _TAIL.match(tail):
        ids = [pk for pk in _with_tail(tail[-TAIL_CHARS:]).values_list("pk", flat=True) if pk.hex.endswith(tail)]
        if ids:
            return records.filter(pk__in=ids)
    known: tuple[tuple[str, QuerySet[Any, Any]], ...] = (  # Any: names or UUIDs, of different tables
        ("model", Model.objects.filter(name__iexact=text).values_list("name", flat=True)),
        ("asked_model", ModelAlias.objects.filter(name__iexact=text).values_list("name", flat=True)),
        ("tenant", Tenant.objects.filter(name__iexact=text).values_list("name", flat=True)),
        ("key_id", ApiKey.objects.filter(name__iexact=text).values_list("pk", flat=True)),
    )
    named = Q()
    for field, names in known:
        if found := list(names):
            named |= Q(**{f"{field}__in": found})
    if named:
        return records.filter(named)
    unknown = (Q(**{f"{field}__iexact": text}) for field in ("model", "asked_model", "tenant", "key_name"))
    since = clock.now() - timedelta(seconds=limits().gateway.page_unknown_name_s)
    return records.filter(reduce(or_, unknown), created_at__gte=since)


def _with_tail(tail: str) -> QuerySet[RequestRecord]:
    """Return the records whose id ends so: by the index of finished ones, and among the few that are open."""
    states = [state.value for state in OPEN_REQUEST_STATES]
    is_it = Q(tail=tail)
    return RequestRecord.objects.alias(tail=Right(Cast("id", TextField()), TAIL_CHARS)).filter(
        (is_it & Q(finished_at__isnull=False)) | (is_it & Q(state__in=states))
    )
