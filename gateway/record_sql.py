"""The prepared statements that write request records: rows travel as one JSON text for inserts, one for updates.

The columns are the fields of ``gateway.request.records.Record``.
"""

from __future__ import annotations

from wire.contract import OPEN_REQUEST_STATES

_TYPES = {
    "id": "uuid",
    "created_at": "timestamptz",
    "gateway_id": "uuid",
    "tenant": "text",
    "key_id": "uuid",
    "key_name": "text",
    "endpoint": "text",
    "model": "text",
    "asked_model": "text",
    "is_streaming": "boolean",
    "state": "text",
    "error_code": "text",
    "status_code": "smallint",
    "engine_error": "text",
    "node_id": "uuid",
    "node_name": "text",
    "attempts": "smallint",
    "max_tokens": "integer",
    "prompt_tokens_est": "integer",
    "prompt_tokens": "integer",
    "completion_tokens": "integer",
    "tokens_estimated": "boolean",
    "bytes_out": "bigint",
    "queue_ms": "integer",
    "ttfb_ms": "integer",
    "latency_ms": "integer",
    "finished_at": "timestamptz",
}
_FIXED = {"id", "created_at", "gateway_id", "tenant", "key_id", "key_name", "endpoint", "is_streaming"}
_COLUMNS = ", ".join(_TYPES)
_RECORDSET = ", ".join(f"{name} {kind}" for name, kind in _TYPES.items())
_ASSIGNMENTS = ", ".join(f"{name} = v.{name}" for name in _TYPES if name not in _FIXED)
_OPEN = ", ".join(f"'{state.value}'" for state in sorted(OPEN_REQUEST_STATES))
# Built from the constants above alone; values travel as parameters.
# An id is made once, so a row that is there already is the same one: a commit whose acknowledgement was lost. Its second
# attempt waits for the first where that is still under way.
_INSERT = (
    f"INSERT INTO gateway_requestrecord ({_COLUMNS}) SELECT {_COLUMNS} "  # noqa: S608
    f"FROM json_to_recordset($1::json) AS i({_RECORDSET}) ON CONFLICT DO NOTHING"
)


def _update(parameter: str) -> str:
    return (
        f"UPDATE gateway_requestrecord r SET {_ASSIGNMENTS} FROM json_to_recordset({parameter}::json) AS v({_RECORDSET}) "  # noqa: S608
        f"WHERE r.id = v.id AND r.created_at = v.created_at AND r.state IN ({_OPEN})"
    )


INSERT, UPDATE, BOTH = "records_insert", "records_update", "records_both"
"""Names of the statements. ``BOTH`` takes the inserts first."""
STATEMENTS = {INSERT: _INSERT, UPDATE: _update("$1"), BOTH: f"WITH added AS ({_INSERT}) {_update('$2')}"}
