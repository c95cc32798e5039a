"""Pages of request records: what is looked for, and the newest that fit it, without reading a table of millions.

Time, state, error and node have an index. For anything else the newest records are looked through, a bounded number of them;
the page says how far back that was, and the next one goes on from there.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from urllib.parse import urlencode

from django.db.models import Q, QuerySet

from core.limits import limits
from gateway.models import ApiKey, RequestRecord
from gateway.services.requests import FAILED, REFUSED, find_id, find_named, find_scan_start
from nodes.services.availability import find_node_ids
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState

Records = QuerySet[RequestRecord]
STATES = ("open", "completed", "wrong", "refused", "cancelled", *(state.value for state in sorted(OPEN_REQUEST_STATES)))
"""What can be looked for: groups of states, or one state. ``wrong``: failed in any way."""
ANY_ERROR = "any"
_UNSERVED = ("cancelled", "failed", "interrupted", "rejected")
_OPEN = [state.value for state in OPEN_REQUEST_STATES]
_MOST_ID = uuid.UUID(int=2**128 - 1)


@dataclass(frozen=True, slots=True)
class RequestFilter:
    """What is looked for; an empty value = any. ``key``: its id or its name. ``node``: its printed id or its name.

    ``begins_at``, ``ends_at``: with an end, of requests that ended within; without, of requests that came since. ``text``: an
    id or its end, or the name of a model, tenant or key. ``slower_ms``: that took at least so long.
    """

    state: str = ""
    model: str = ""
    node: str = ""
    tenant: str = ""
    key: str = ""
    error: str = ""
    slower_ms: int | None = None
    begins_at: datetime | None = None
    ends_at: datetime | None = None
    text: str = ""

    @classmethod
    def read(cls, given: Mapping[str, str]) -> RequestFilter:
        """Return what an address asks for. What nobody can mean is passed over."""
        words = {name: _clean(given.get(name, "")) for name in ("state", "model", "node", "tenant", "key", "error")}
        if words["state"] not in (*STATES, *RequestState):
            words["state"] = ""
        if words["error"] not in (ANY_ERROR, *ErrorCode):
            words["error"] = ""
        slower = _read_number(given.get("slower", ""))
        return cls(
            **words,
            slower_ms=slower,
            begins_at=_read_moment(given.get("since", "")),
            ends_at=_read_moment(given.get("until", "")),
            text=_clean(given.get("q", "")),
        )

    def list_parameters(self) -> dict[str, str]:
        """Return what ``read`` takes, without what is not asked for."""
        found = {name: getattr(self, name) for name in ("state", "model", "node", "tenant", "key", "error")}
        found |= {"slower": "" if self.slower_ms is None else str(self.slower_ms), "q": self.text}
        found |= {"since": _print_moment(self.begins_at), "until": _print_moment(self.ends_at)}
        return {name: value for name, value in found.items() if value}

    def print_query(self, **changes: object) -> str:
        """Return the address's part behind the question mark, with some of it changed."""
        return urlencode(replace(self, **changes).list_parameters())  # type: ignore[arg-type]  # fields by name


def _clean(text: str) -> str:
    return text.replace("\x00", "").strip()[: limits().gateway.model_name_chars]


def _read_number(text: str) -> int | None:
    is_one = text.isascii() and text.isdigit() and len(text) <= len(str(limits().gateway.record_integer))
    return min(int(text), limits().gateway.record_integer) if is_one else None


def _read_moment(text: str) -> datetime | None:
    seconds = _read_number(text) if len(text) > len("20261128") else None  # a day can be written so
    try:
        moment = datetime.fromtimestamp(seconds, UTC) if seconds is not None else datetime.fromisoformat(text)
        return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _print_moment(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%dT%H:%M:%SZ}"


@dataclass(frozen=True, slots=True)
class Cursor:
    """Behind which record a page begins: when it came, and its id."""

    at: datetime
    record_id: uuid.UUID = _MOST_ID

    @classmethod
    def read(cls, text: str) -> Cursor | None:
        at, _, record_id = text.partition("-")
        try:
            return cls(datetime.fromtimestamp(int(at[:16]) / 1e6, UTC), uuid.UUID(record_id))
        except (ValueError, OverflowError):
            return None

    def __str__(self) -> str:
        return f"{round(self.at.timestamp() * 1e6)}-{self.record_id.hex}"


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Records, newest first. ``older``: where the next page begins, None = there is none.

    ``looked_back_to``: the records before it were not looked through; None = all were.
    """

    records: tuple[RequestRecord, ...]
    older: Cursor | None
    looked_back_to: datetime | None


def read_page(wanted: RequestFilter, *, before: Cursor | None, size: int) -> RequestPage:
    """Return the newest records that fit, at most ``size``, of those behind ``before``; in at most four queries.

    Most of what is looked for is among the newest few, so these are looked through first.
    """
    found, rest = _find_indexed(wanted)
    if before is not None:
        found = found.filter(created_at__lte=before.at).exclude(created_at=before.at, id__gte=before.record_id)
    newest = found.order_by("-created_at", "-id")
    records: tuple[RequestRecord, ...] = ()
    if rest is None:
        records = tuple(newest[: size + 1])
        return RequestPage(records[:size], _point_at(records[size - 1]) if len(records) > size else None, None)
    horizon: datetime | None = None
    for most in (limits().gateway.page_scanned_first, limits().gateway.page_scanned_records):
        horizon = find_scan_start(found, most=most)
        looked = newest if horizon is None else newest.filter(created_at__gt=horizon)
        records = tuple(looked.filter(rest)[: size + 1])
        if len(records) > size or horizon is None:
            break
    if len(records) > size:
        return RequestPage(records[:size], _point_at(records[size - 1]), None)
    return RequestPage(records, None if horizon is None else Cursor(horizon), horizon)


def _point_at(record: RequestRecord) -> Cursor:
    return Cursor(record.created_at, record.pk)


def _find_indexed(wanted: RequestFilter) -> tuple[Records, Q | None]:
    """Return the records that an index finds, and what else they must be; None = nothing else."""
    records = RequestRecord.objects.all()
    if wanted.text:
        named = find_id(records, wanted.text)
        if named is not None:
            return named, None
    rest = Q()
    if wanted.begins_at is not None and wanted.ends_at is not None:
        longest = timedelta(seconds=limits().gateway.request_s)
        records = records.filter(created_at__gte=wanted.begins_at - longest, created_at__lt=wanted.ends_at)
        rest &= Q(finished_at__gte=wanted.begins_at, finished_at__lt=wanted.ends_at)
    elif wanted.begins_at is not None:
        records = records.filter(created_at__gte=wanted.begins_at)
    rest &= _judge_state(wanted.state)
    if wanted.error:
        rest &= Q(error_code__isnull=False) if wanted.error == ANY_ERROR else Q(error_code=wanted.error)
    is_open = wanted.state == "open" or wanted.state in OPEN_REQUEST_STATES
    is_unserved = bool(wanted.error) or wanted.state in ("wrong", "refused", *_UNSERVED)
    if is_open:
        records = records.filter(state__in=_OPEN)
    elif is_unserved:
        records = records.filter(state__in=_UNSERVED)
    if wanted.node:
        ids = find_node_ids(wanted.node)
        is_it = Q(node_id__in=ids) if ids else Q(node_name=wanted.node)
        if ids and not (is_open or is_unserved):
            records = records.filter(is_it)
        else:
            rest &= is_it
    rest &= _find_names(wanted)
    return records, rest or None


def _judge_state(state: str) -> Q:
    match state:
        case "" | "open":
            return Q()
        case "refused":
            return REFUSED
        case "wrong":
            return FAILED
        case one:
            return Q(state=one)


def _find_names(wanted: RequestFilter) -> Q:
    rest = Q()
    if wanted.model:
        rest &= Q(model=wanted.model) | Q(asked_model=wanted.model)
    if wanted.tenant:
        rest &= Q(tenant=wanted.tenant)
    if wanted.key:
        rest &= Q(key_id__in=find_keys(wanted.key)) | Q(key_name=wanted.key)
    if wanted.slower_ms is not None:
        rest &= Q(latency_ms__gte=wanted.slower_ms)
    return rest & find_named(wanted.text) if wanted.text else rest


def find_keys(key: str) -> list[uuid.UUID]:
    """Return the ids of the API keys that are called so, or the one that this is the id of."""
    try:
        return [uuid.UUID(key)]
    except ValueError:
        return list(ApiKey.objects.filter(name__iexact=key).values_list("pk", flat=True)[: limits().gateway.page_choices])


def list_error_codes() -> list[ErrorCode]:
    """Return the codes that the record of a request can have."""
    return [code for code in ErrorCode if code not in _NEVER_RECORDED]


_NEVER_RECORDED = frozenset({
    ErrorCode.INVALID_API_KEY, ErrorCode.INVALID_NODE_TOKEN, ErrorCode.INVALID_ADMIN_TOKEN, ErrorCode.NOT_FOUND,
    ErrorCode.APPROVAL_REFUSED, ErrorCode.STATE_CHANGED, ErrorCode.FROZEN, ErrorCode.NO_POLICY, ErrorCode.TOO_MANY_OPEN,
    ErrorCode.NOT_PERMITTED,
})  # fmt: skip
"""Codes of what is no request of a known caller."""
