"""The WebSocket endpoint that boxes dial: ``/v1/worker/connect``, raw ASGI, and what goes to them beside requests."""

from __future__ import annotations

from nodes.channel import Courier
from nodes.consumers.endpoint import WorkerEndpoint

__all__ = ["Courier", "WorkerEndpoint"]
