"""What this process knows of the boxes on its sockets, in the form in which it is written to the database."""

from __future__ import annotations

import msgspec

from nodes.links import LinkRegistry
from nodes.links.relay import RelayLink
from nodes.services import sessions
from nodes.session import store_endpoints
from wire import bridge


def presence_reports(registry: LinkRegistry, *, news_only: bool = False) -> list[sessions.PresenceReport]:
    """Return what this process knows of the boxes on its sockets, for writing to the database.

    ``news_only``: of those alone that said something which was not returned before.
    """
    reports = []
    for link in registry:
        if not isinstance(link, RelayLink) or (news_only and not link.has_news):
            continue
        link.has_news = False
        telemetry = link.telemetry
        reports.append(
            sessions.PresenceReport(
                node_id=link.node_id,
                epoch=link.epoch,
                age_s=link.silence_s,
                active=link.load,
                max_concurrent=link.max_concurrent,
                models=tuple(sorted(link.models)),
                status=_status_of(link),
                last_error=(telemetry.last_error or "") if telemetry is not None else "",
                endpoints=store_endpoints(link.endpoints),
                said=_read_state(telemetry) if telemetry is not None else None,
                link_id=link.link_id,
            )
        )
    return reports


def _read_state(telemetry: bridge.Telemetry) -> sessions.ReportedState:
    return sessions.ReportedState(
        gpus=msgspec.to_builtins(telemetry.gpus),
        replicas=msgspec.to_builtins(telemetry.replicas),
        available=list(telemetry.available),
        memory=msgspec.to_builtins(telemetry.memory),
        queue_depth=telemetry.queue_depth,
        avg_wait_ms=telemetry.avg_wait_ms,
    )


def _serves_nothing(link: RelayLink) -> bool:
    """Return whether a node says why it serves no model, and neither loads one nor could: its engine or server is away."""
    said = link.telemetry
    if link.models or said is None or not said.last_error or said.available:
        return False
    return not any(replica.state == "loading" for replica in said.replicas)


def _status_of(link: RelayLink) -> str:
    if link.box_draining:
        return "draining"
    if _serves_nothing(link):
        return "error"
    return "available" if link.has_slot() else "busy"
