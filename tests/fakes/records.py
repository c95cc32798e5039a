"""Records of requests as a gateway's writer takes them, and the rows that came of them."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from gateway.records import Record, RecordWriter
from tests.fakes.pipeline import Rows
from tests.fakes.waiting import eventually
from wire.contract import RequestState
from wire.ids import new_uuid7

ACCEPT_S = 30.0
"""So long a commit may take on a machine that stands still, where its being slow is not the subject."""


def make_record(**changes: object) -> Record:
    """Return a request that was just accepted."""
    values: dict[str, Any] = {  # the types of the fields
        "id": new_uuid7(), "created_at": datetime.now(UTC), "gateway_id": uuid.UUID(int=1), "tenant": "t",
        "key_id": uuid.UUID(int=2), "key_name": "k", "endpoint": "/v1/chat/completions", "model": "m", "is_streaming": True,
    }  # fmt: skip
    return Record(**{**values, **changes})


def read(rows: Rows, record: Record, *columns: str) -> tuple[object, ...] | None:
    """Return columns of a record's row (its state, if none is named), or None when it has none."""
    names = ", ".join(columns) or "state"
    return rows.execute(f"SELECT {names} FROM gateway_requestrecord WHERE id = %s", [record.id]).fetchone()


def count(rows: Rows, state: RequestState) -> int:
    """Return how many rows are in a state."""
    (number,) = rows.execute("SELECT count(*) FROM gateway_requestrecord WHERE state = %s", [state.value]).fetchone() or (0,)
    return int(str(number))


async def written(writer: RecordWriter) -> None:
    """Wait until nothing waits and the last commit is through: an insert that follows it is durable."""
    await eventually(lambda: writer.pending == 0)
    await writer.accept(make_record())
