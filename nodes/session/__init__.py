"""The server's half of one worker socket as a protocol without I/O: frames in, effects out; calls in, frames out.

Speaks bridge v1 and muster v1, whichever the box announced, and hides the difference: both give ``HeadArrived``,
``DataArrived`` and ``StreamEnded`` for a stream. A stream is known here by a number that is never used twice in a
session, so frames of a stream that was cancelled, or of another attempt, cannot reach a request they do not belong to.
"""

from __future__ import annotations

from nodes.session.reports import (
    Capabilities,
    clean_result,
    find_contexts,
    find_endpoints,
    find_engines,
    read_capabilities,
    read_contexts,
    read_endpoints,
    read_engines,
    store_endpoints,
)
from nodes.session.server import (
    BoxLeaving,
    DataArrived,
    Effect,
    FrameDropped,
    GovernanceChanged,
    HeadArrived,
    LoadReported,
    ModelsChanged,
    ModeRequested,
    OpenRequest,
    OperationReported,
    Registered,
    ServerSession,
    StreamEnded,
    TelemetryArrived,
)

__all__ = [
    "BoxLeaving",
    "Capabilities",
    "DataArrived",
    "Effect",
    "FrameDropped",
    "GovernanceChanged",
    "HeadArrived",
    "LoadReported",
    "ModeRequested",
    "ModelsChanged",
    "OpenRequest",
    "OperationReported",
    "Registered",
    "ServerSession",
    "StreamEnded",
    "TelemetryArrived",
    "clean_result",
    "find_contexts",
    "find_endpoints",
    "find_engines",
    "read_capabilities",
    "read_contexts",
    "read_endpoints",
    "read_engines",
    "store_endpoints",
]
