"""Closes requests whose gateway died, so that every accepted request reaches exactly one final state."""

from __future__ import annotations

import logging

from django.db import connection, transaction

from core.limits import limits
from wire import clock
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState

logger = logging.getLogger(__name__)

# A gateway cannot write its heartbeat while the database is away: after a restart of the database nobody is taken for
# dead before every living gateway had the time to write again.
_SILENT = """
    g.heartbeat_at < clock_timestamp() - make_interval(secs => %(dead_after_s)s)
    AND pg_postmaster_start_time() < clock_timestamp() - make_interval(secs => %(dead_after_s)s)
"""
_ORPHANS = f"""
         FROM gateway_requestrecord AS r
         LEFT JOIN gateway_gatewayprocess AS g ON g.id = r.gateway_id
        WHERE r.state = ANY(%(open)s)
          AND (
               g.stopped_at IS NOT NULL
               OR (g.id IS NULL AND r.created_at < clock_timestamp() - make_interval(secs => %(dead_after_s)s))
               OR ({_SILENT})
          )
"""
_LOOK = f"SELECT bool_or(g.id IS NOT NULL AND g.stopped_at IS NULL) {_ORPHANS}"  # a constant
"""Whether a request's gateway is silent; null when no request is an orphan."""
_CLOSE = f"""
UPDATE gateway_requestrecord AS record
   SET state = %(interrupted)s,
       error_code = %(error_code)s,
       finished_at = clock_timestamp(),
       latency_ms = LEAST(
           2147483647, GREATEST(0, extract(epoch FROM clock_timestamp() - record.created_at) * 1000)
       )::integer
  FROM (
        SELECT r.id, r.created_at
        {_ORPHANS}
         LIMIT %(batch)s
           FOR UPDATE OF r SKIP LOCKED
       ) AS orphan
 WHERE record.id = orphan.id AND record.created_at = orphan.created_at AND record.state = ANY(%(open)s)
"""  # noqa: S608  # a constant


def close_orphaned_requests(*, dead_after_s: float | None = None, confirm_s: float = 2.0) -> int:
    """Mark open requests of gateways that stopped, or were silent for ``dead_after_s`` seconds, as interrupted.

    Whoever seems silent is looked at once more, ``confirm_s`` seconds later: after a database that stood still (frozen with its
    machine, cut off by the network) everybody is, until the next heartbeat has come.
    Returns how many were closed. Final states are never touched; rows that a gateway is writing at the moment are left
    for the next call. Safe to run several times at once.
    """
    parameters: dict[str, str | float | list[str]] = {
        "interrupted": RequestState.INTERRUPTED.value,
        "error_code": ErrorCode.REQUEST_INTERRUPTED.value,
        "open": sorted(state.value for state in OPEN_REQUEST_STATES),
        "dead_after_s": limits().gateway.dead_s if dead_after_s is None else dead_after_s,
        "batch": limits().gateway.orphans_batch,
    }
    is_silent = _look(parameters)
    if is_silent is None:
        return 0
    if is_silent:
        clock.sleep(confirm_s)
    closed = 0
    while True:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(_CLOSE, parameters)
            batch = int(cursor.rowcount)
        closed += batch
        if batch < limits().gateway.orphans_batch:
            break
    if closed:
        logger.warning("orphaned_requests_closed count=%d", closed)
    return closed


def _look(parameters: dict[str, str | float | list[str]]) -> bool | None:
    with connection.cursor() as cursor:
        cursor.execute(_LOOK, parameters)
        is_silent: bool | None = cursor.fetchone()[0]
    return is_silent
