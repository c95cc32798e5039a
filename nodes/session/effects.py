"""What a session tells its caller of a box's frames, and what the caller hands it to open a stream."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from wire import bridge, frames


@dataclass(frozen=True, slots=True)
class Registered:
    """The box introduced itself; names and models are already sanitized."""

    name: str
    models: tuple[str, ...]
    max_concurrent: int
    protocol: str
    warnings: tuple[str, ...]
    message: bridge.Register


class HeadArrived(msgspec.Struct, frozen=True):
    """Status and headers of a stream's response; at most once, before any data."""

    stream: int
    status: int
    headers: dict[str, str]


class DataArrived(msgspec.Struct, frozen=True, gc=False):
    """Response bytes of a stream, in order."""

    stream: int
    data: bytes


class StreamEnded(msgspec.Struct, frozen=True):
    """The last effect of a stream."""

    stream: int
    end: frames.End


@dataclass(frozen=True, slots=True)
class LoadReported:
    """The box said how many requests it runs."""

    load: int


@dataclass(frozen=True, slots=True)
class ModelsChanged:
    """The box replaced its model list (sanitized)."""

    models: tuple[str, ...]
    load: int


@dataclass(frozen=True, slots=True)
class TelemetryArrived:
    """The box described itself."""

    telemetry: bridge.Telemetry


@dataclass(frozen=True, slots=True)
class ModeRequested:
    """The owner, at the box, lends it or takes it back."""

    mode: str
    reason: str


@dataclass(frozen=True, slots=True)
class BoxLeaving:
    """The box finishes what runs and wants nothing new."""

    reason: str


@dataclass(frozen=True, slots=True)
class OperationReported:
    """The box said where an operation stands (cut to size)."""

    status: bridge.OpStatus


@dataclass(frozen=True, slots=True)
class GovernanceChanged:
    """The box said how it decides about operations now (cut to size)."""

    report: bridge.GovernanceReport


class FrameDropped(msgspec.Struct, frozen=True, gc=False):
    """A late frame of a stream that is over; counted, never delivered."""

    stream: int


Effect = (
    Registered
    | HeadArrived
    | DataArrived
    | StreamEnded
    | LoadReported
    | ModelsChanged
    | TelemetryArrived
    | ModeRequested
    | BoxLeaving
    | OperationReported
    | GovernanceChanged
    | FrameDropped
)


class OpenRequest(msgspec.Struct, frozen=True):
    """What a link needs to start one attempt of one request. ``attempt`` counts from 1; ``deadline_ms`` is what remains.

    ``priority``: high, low or empty for normal.
    """

    request_id: str
    attempt: int
    model: str
    path: str
    body: bytes
    headers: dict[str, str]
    is_streaming: bool
    deadline_ms: int
    tenant: str
    priority: str = ""
