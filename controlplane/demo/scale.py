"""The demo at the size of a large installation, for measuring: more nodes as rows, and the week's requests many times over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from django.db import connection, transaction

from controlplane.demo.fleet import CREDENTIAL, GATEWAY_ID
from gateway.services.usage import ADD_USAGE, RECORDED

_FRESH_S = 5.0
_BATCH = 250_000

_NODES = """
WITH numbered AS (
SELECT n.*, row_number() OVER (ORDER BY n.name) - 1 AS place, count(*) OVER () AS many
  FROM nodes_node AS n JOIN nodes_nodecredential AS c ON c.id = n.credential_id
 WHERE c.name = %(credential)s AND NOT n.draining AND NOT n.cordoned AND n.op_level = 'L2' AND n.name NOT LIKE 'rack-%%'
), added AS (
INSERT INTO nodes_node ({columns})
SELECT {values} FROM generate_series(1, %(nodes)s) AS i JOIN numbered AS n ON n.place = i %% n.many
RETURNING id
)
INSERT INTO nodes_nodepresence (node_id, connected, last_heartbeat_at, reported_status, is_accepting_jobs, active_requests,
       gpus, replicas, last_error, protocol, peer_address, probe_error, updated_at, gpu_util_percent, vram_used_mb,
       vram_free_mb)
SELECT id, false, now(), 'available', true, 0, '[]', '[]', '', '', '', '', now(), 50 * random(), 12000, 12000 FROM added
"""
_OWN = {
    "id": "gen_random_uuid()", "name": "'rack-' || lpad((i / 8)::text, 3, '0') || '-' || i %% 8", "runner_id": "''",
    "box_key": "''", "op_level": "''", "installation": "''", "agent_id": "NULL", "agent_session": "NULL",
    "instance_id": "''", "former_instances": "'{}'", "created_at": "now() - interval '20 days'", "updated_at": "now()",
}  # fmt: skip
_COPY = """
WITH added AS (
INSERT INTO gateway_requestrecord ({columns})
SELECT {values}
  FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS i
  JOIN demo_week AS r ON r.place = i * %(many)s / %(count)s
  JOIN demo_nodes AS d ON d.place = floor(%(nodes)s * random())::int
RETURNING {recorded}
)
"""
_RECORD = {
    "id": "gen_random_uuid()", "created_at": "r.created_at - moved.by", "finished_at": "r.finished_at - moved.by",
    "node_id": "CASE WHEN r.node_id IS NOT NULL THEN d.id END",
    "node_name": "CASE WHEN r.node_id IS NOT NULL THEN d.name ELSE '' END",
    "decision": "NULL",
}  # fmt: skip


def add_nodes(count: int) -> None:
    """Add nodes as rows: they are heard, and nothing is behind them."""
    columns = _list_columns("nodes_node")
    values = ", ".join(_OWN.get(column, f'n."{column}"') for column in columns)
    with connection.cursor() as cursor:
        statement = _NODES.format(columns=", ".join(f'"{column}"' for column in columns), values=values)
        cursor.execute(statement, {"credential": CREDENTIAL, "nodes": count})


def add_records(count: int, show: Callable[[float], None]) -> None:
    """Add requests by having each of the week again and again, a little earlier, on any node.

    They are written in the order in which they ended, as gateways do: events have no index by request but that of their time.
    """
    columns = _list_columns("gateway_requestrecord")
    names = ", ".join(f'"{column}"' for column in columns)
    values = ", ".join(_RECORD.get(column, f'r."{column}"') for column in columns)
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE TEMPORARY TABLE demo_week AS SELECT *, row_number() OVER (ORDER BY finished_at) - 1 AS place"
            "  FROM gateway_requestrecord WHERE gateway_id = %s",
            [GATEWAY_ID],
        )
        cursor.execute("CREATE INDEX ON demo_week (place)")
        cursor.execute(
            "CREATE TEMPORARY TABLE demo_nodes AS SELECT id, name, row_number() OVER () - 1 AS place FROM nodes_node"
        )
        cursor.execute("ANALYZE demo_week, demo_nodes")
        cursor.execute("SELECT (SELECT count(*) FROM demo_week), (SELECT count(*) FROM demo_nodes)")
        many, nodes = cursor.fetchone()
        copied = _COPY.format(columns=names, values=values, recorded=RECORDED).replace(
            "RETURNING",
            "CROSS JOIN LATERAL (SELECT interval '1 minute' * (random() + 0 * i) AS by) AS moved\n ORDER BY i\nRETURNING",
        )
        for first in range(0, count, _BATCH):
            last = min(first + _BATCH, count) - 1
            with transaction.atomic():
                cursor.execute(
                    copied + ADD_USAGE.format(source="added"),
                    {"first": first, "last": last, "many": many, "nodes": nodes, "count": count},
                )
            show(min(1.0, (last + 1) / count))


def _list_columns(table: str) -> list[str]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT column_name FROM information_schema.columns WHERE table_name = %s AND table_schema = current_schema()"
            " ORDER BY ordinal_position",
            [table],
        )
        return [name for (name,) in cursor.fetchall()]


async def keep_fresh() -> None:
    """Have the nodes that are rows alone heard, until cancelled."""
    while True:
        await asyncio.to_thread(_touch)
        await asyncio.sleep(_FRESH_S)


def _touch() -> None:
    try:
        with connection.cursor() as cursor:
            cursor.execute(
                "UPDATE nodes_nodepresence AS p"
                "   SET last_heartbeat_at = now(), reported_status = 'available', updated_at = now()"
                "  FROM nodes_node AS n WHERE n.id = p.node_id AND n.name LIKE 'rack-%'"
            )
    finally:
        connection.close()
