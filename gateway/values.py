"""Plain values of the gateway: what a caller is, what a request asks for, and every limit and time-out. No I/O."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from gateway.whole_numbers import WholeNumber
from wire.contract import RequestState
from wire.limits import WIRE

DEAD_AFTER_S = 10.0
"""A gateway that wrote no heartbeat for so long is taken for dead."""


class Priority(StrEnum):
    """How a box orders what waits on it."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class RequestOutcome(StrEnum):
    """What became of a request, in the words of pages and metrics."""

    SERVED = "served"
    REFUSED = "refused"
    """The caller's mistake: counted apart, in no error rate and no alert."""
    FAILED = "failed"
    """A fault of the node, its engine or the gateway, or a lack of capacity."""
    CANCELLED = "cancelled"
    """The caller left."""


_OUTCOMES = {
    RequestState.COMPLETED: RequestOutcome.SERVED,
    RequestState.FAILED: RequestOutcome.FAILED,
    RequestState.INTERRUPTED: RequestOutcome.FAILED,
    RequestState.CANCELLED: RequestOutcome.CANCELLED,
}


def judge_outcome(state: RequestState, status_code: int | None) -> RequestOutcome | None:
    """Return what became of a request, None while it is open. ``status_code``: the HTTP status that its caller got.

    A rejected request with a 4xx is the caller's mistake, its own limit (429) included. With a 5xx nobody could take it:
    a full queue, or a database that is away.
    """
    if state is RequestState.REJECTED:
        is_callers = status_code is not None and 400 <= status_code < 500
        return RequestOutcome.REFUSED if is_callers else RequestOutcome.FAILED
    return _OUTCOMES.get(state)


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every await of the request path that can hang is bounded by one of these. Seconds."""

    queue_s: float = 30.0
    request_s: float = 300.0
    no_node_wait_s: float = 9.0
    stream_ping_s: float = 9.5
    """Longest silence of a stream, from acceptance on; above the wait for a box, whose end is better said with a status."""
    accept_s: float = 5.0
    client_write_s: float = 30.0
    header_s: float = 10.0
    body_s: float = 60.0
    keep_alive_s: float = 75.0
    upstream_connect_s: float = 5.0
    shutdown_grace_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the request path."""

    max_queue: int = 100
    max_body_bytes: int = 32 * 1024 * 1024
    max_audio_bytes: int = 64 * 1024 * 1024
    max_prompt_chars: int = 1_000_000
    max_tokens_cap: int = 32_768
    requests_per_minute: int = 6_000
    max_requeues: int = 3
    max_stream_bytes: int = 256 * 1024 * 1024
    max_buffer_bytes: int = 4 * 1024 * 1024
    max_pending_records: int = 100_000
    max_engine_error_chars: int = WIRE.error_quote_chars
    """Of what an engine says when it fails or refuses, on the record and in the log; 0 = nothing is kept."""


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client. ``allowed_models`` empty means every allow-listed model.

    ``stores_responses``, ``responses_kept_days``: whether and how long its tenant lets answers of /v1/responses be kept.
    """

    key_id: uuid.UUID
    key_name: str
    tenant: str
    requests_per_minute: int
    allowed_models: frozenset[str]
    priority: Priority = Priority.NORMAL
    stores_responses: bool = False
    responses_kept_days: int = 30


class PoolOptions(msgspec.Struct, frozen=True, kw_only=True):
    """``x_pool_options``: what an aware client may ask of the pool (central-server design, section 3.1).

    ``prefer_gpu``: name or id of a box or a GPU, preferred, not required. ``max_latency_ms``: longest wait for a box.
    ``priority`` can only lower what the key has; ``fallback_models`` are tried in their order.
    """

    prefer_gpu: str | None = None
    max_latency_ms: WholeNumber | None = None
    fallback_models: tuple[str, ...] = ()
    priority: Priority | None = None


class Unmatched(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What a client named in ``x_pool_options`` that is nothing here: the name of no node or GPU, of no model for this key."""

    prefer_gpu: str = ""
    fallback_models: tuple[str, ...] = ()


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway reads of a request body; the body itself travels on untouched unless it is translated.

    ``endpoint``: the surface the client speaks. ``lane``: the API path a box must answer, natively or by translation;
    empty = the endpoint. ``options`` None: the client sent no ``x_pool_options``. ``store`` and ``previous_response_id`` are
    of /v1/responses alone.
    """

    endpoint: str
    model: str
    is_streaming: bool
    max_tokens: int | None
    prompt_chars: int
    body: bytes
    headers: dict[str, str]
    max_tokens_field: str = "max_tokens"
    lane: str = ""
    options: PoolOptions | None = None
    store: bool | None = None
    previous_response_id: str = ""
    is_pool_shaped: bool = False
    """Whether it uses fields that only llm-pool's form of /v1/responses has."""

    @property
    def path(self) -> str:
        """The API path a box must be able to answer."""
        return self.lane or self.endpoint
