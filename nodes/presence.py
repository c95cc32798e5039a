"""What this process knows of the boxes on its sockets, in the form in which it is written to the database."""

from __future__ import annotations

import time

import msgspec

from nodes.links import LinkRegistry
from nodes.links.relay import RelayLink
from nodes.services import sessions


def presence_reports(registry: LinkRegistry) -> list[sessions.PresenceReport]:
    """Return what this process knows of the boxes on its sockets, for writing to the database."""
    now = time.monotonic()
    reports = []
    for link in registry:
        if not isinstance(link, RelayLink):
            continue
        telemetry = link.telemetry
        reports.append(
            sessions.PresenceReport(
                node_id=link.node_id,
                epoch=link.epoch,
                age_s=now - link.last_seen,
                active=link.load,
                max_concurrent=link.max_concurrent,
                models=tuple(sorted(link.models)),
                status=_status_of(link),
                last_error=(telemetry.last_error or "") if telemetry is not None else "",
                gpus=msgspec.to_builtins(telemetry.gpus) if telemetry is not None else None,
                replicas=msgspec.to_builtins(telemetry.replicas) if telemetry is not None else None,
            )
        )
    return reports


def _status_of(link: RelayLink) -> str:
    if link.box_draining:
        return "draining"
    return "available" if link.has_slot() else "busy"
