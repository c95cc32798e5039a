"""One request record, for a page that follows what it sent. Reads only."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from gateway.models import RequestRecord
from wire.contract import OPEN_REQUEST_STATES, RequestState


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
