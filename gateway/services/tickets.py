"""What nodes say of requests that came to them with tickets, in the records of those requests. At most once in effect."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from django.db import connection, transaction

from core.limits import limits
from gateway.models import RequestRecord
from gateway.services.usage import ADD_USAGE
from gateway.values import TICKETS_PATH
from wire import clock
from wire.bridge import TicketUsage
from wire.contract import FINAL_REQUEST_STATES, OPEN_REQUEST_STATES, ErrorCode, RequestState
from wire.ids import parse_id

_CODES = {
    RequestState.FAILED: ErrorCode.FORWARDED_REQUEST_FAILED,
    RequestState.INTERRUPTED: ErrorCode.REQUEST_INTERRUPTED,
    RequestState.REJECTED: ErrorCode.BAD_REQUEST,
    RequestState.CANCELLED: ErrorCode.CLIENT_CLOSED_REQUEST,
}
_STATES = FINAL_REQUEST_STATES | {RequestState.RUNNING}
_OPEN = [state.value for state in OPEN_REQUEST_STATES]
_UNKNOWN = "No ticket of this id was given, or its record is not kept any more."


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A record that has ended. Tokens None: nobody said."""

    record_id: uuid.UUID
    model: str
    state: RequestState
    status_code: int | None
    latency_ms: int
    queue_ms: int
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None
    is_estimated: bool


@dataclass(frozen=True, slots=True)
class StoredUsage:
    """The records that have ended by what nodes said, and why the rest had no effect, by node and ticket."""

    ended: list[EndedRequest]
    refused: dict[tuple[uuid.UUID, str], str]


class _NoEffect(Exception):
    """What a node says of a ticket changes nothing; the text says why."""


@transaction.atomic
def store_usage(reports: Sequence[tuple[uuid.UUID, TicketUsage]]) -> StoredUsage:
    """Write down what nodes say, each with the node that says it.

    Without effect: a report of a record that has ended, of another node's, or of one that came with no ticket.
    """
    stored = StoredUsage([], {})
    for node_id, report in reports:
        try:
            ended = _store(node_id, report)
        except _NoEffect as refusal:
            stored.refused[node_id, report.ticket_id] = str(refusal)
        else:
            stored.ended.extend([ended] if ended is not None else [])
    return stored


def _store(node_id: uuid.UUID, report: TicketUsage) -> EndedRequest | None:
    """Return the record if it has ended now. Raises _NoEffect."""
    record_id = parse_id("tkt", report.ticket_id)
    is_sound = record_id is not None and report.ticket_id == f"tkt_{record_id.hex}"
    if record_id is None or not is_sound or (record_id.int >> 80) / 1000 > clock.unix_s() + limits().gateway.ticket_made_s:
        raise _NoEffect(_UNKNOWN)  # a moment far ahead is no date
    if report.record_id and parse_id("req", report.record_id) != record_id:
        raise _NoEffect("The record_id is not that of the ticket.")
    if report.status not in _STATES:
        raise _NoEffect(f"The status must be one of {', '.join(sorted(_STATES))}.")
    records = RequestRecord.objects.filter(pk=record_id, created_at__range=_find_partition(record_id), endpoint=TICKETS_PATH)
    record = records.select_for_update().first()
    if record is None:
        raise _NoEffect(_UNKNOWN)
    if record.node_id != node_id:
        raise _NoEffect("The ticket was given for another node.")
    if record.state not in _OPEN:
        raise _NoEffect(f"The request of the ticket has ended already, as {record.state}; only the first report counts.")
    state = RequestState(report.status)
    if state is RequestState.RUNNING:
        records.filter(state=RequestState.ASSIGNED.value).update(state=state.value, is_streaming=report.is_streaming)
        return None
    _fill_in(record, report, state)
    record.save(update_fields=[*_FILLED])
    with connection.cursor() as cursor:
        cursor.execute(_ADD_USAGE, {"id": record.pk, "created_at": record.created_at})
    return _read_ended(record)


def find_ended(record_ids: Sequence[uuid.UUID]) -> list[EndedRequest]:
    """Return those of some records that have ended. One at least is named."""
    first = _find_partition(min(record_ids))[0]
    ended = RequestRecord.objects.filter(pk__in=record_ids, created_at__gte=first).exclude(state__in=_OPEN)
    return [_read_ended(record) for record in ended]


def _find_partition(record_id: uuid.UUID) -> tuple[datetime, datetime]:
    """Return when a record was made at the earliest and at the latest, by the moment in its id."""
    around = timedelta(seconds=limits().gateway.ticket_made_s)
    made_at = datetime.fromtimestamp((record_id.int >> 80) / 1000, UTC)
    return made_at - around, made_at + around


def _read_ended(record: RequestRecord) -> EndedRequest:
    return EndedRequest(
        record_id=record.pk,
        model=record.model,
        state=RequestState(record.state),
        status_code=record.status_code,
        latency_ms=record.latency_ms or 0,
        queue_ms=record.queue_ms or 0,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=record.cached_tokens,
        is_estimated=record.tokens_estimated,
    )


_ADD_USAGE = f"""
WITH written AS (SELECT * FROM gateway_requestrecord WHERE id = %(id)s AND created_at = %(created_at)s)
{ADD_USAGE.format(source="written")}
"""  # noqa: S608  # constants
_FILLED = (
    *("state", "error_code", "status_code", "is_streaming", "prompt_tokens", "completion_tokens", "cached_tokens"),
    *("tokens_estimated", "bytes_out", "queue_ms", "latency_ms", "finished_at"),
)


def _fill_in(record: RequestRecord, report: TicketUsage, state: RequestState) -> None:
    most = limits().gateway.record_integer

    def whole(value: int) -> int:
        return min(max(0, value), most)

    record.error_code = _CODES[state].value if state in _CODES else None
    record.status_code = report.http_status if 100 <= report.http_status <= 599 else None
    record.is_streaming = report.is_streaming
    record.bytes_out, record.queue_ms, record.latency_ms = (
        whole(report.bytes_out), whole(report.queue_ms), whole(report.inference_ms),
    )  # fmt: skip
    if report.usage is not None:
        record.prompt_tokens = whole(report.usage.prompt_tokens)
        record.completion_tokens = whole(report.usage.completion_tokens)
        record.cached_tokens = min(whole(report.usage.cached_tokens), record.prompt_tokens) or None
    elif state is not RequestState.REJECTED:
        record.tokens_estimated = True
        record.prompt_tokens = record.prompt_tokens_est
        said = -(-record.bytes_out // limits().gateway.token_chars)
        record.completion_tokens = min(said, record.max_tokens or said)
    record.finished_at = clock.now()
    # Last, as everywhere: it is what makes the row final.
    record.state = state.value
