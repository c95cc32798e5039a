"""Plain values of the gateway: what a caller is, what a request asks for, and every limit and time-out. No I/O."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from enum import StrEnum

import msgspec


class Priority(StrEnum):
    """How a box orders what waits on it."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Every await of the request path that can hang is bounded by one of these. Seconds."""

    queue_s: float = 30.0
    request_s: float = 300.0
    no_node_wait_s: float = 10.0
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


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated client. ``allowed_models`` empty means every allow-listed model."""

    key_id: uuid.UUID
    key_name: str
    tenant: str
    requests_per_minute: int
    allowed_models: frozenset[str]
    priority: Priority = Priority.NORMAL


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What the gateway reads of a request body; the body itself travels on untouched."""

    endpoint: str
    model: str
    is_streaming: bool
    wants_usage: bool
    max_tokens: int | None
    prompt_chars: int
    body: bytes
    headers: dict[str, str]
    max_tokens_field: str = "max_tokens"
