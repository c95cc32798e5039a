"""Records of requests as a gateway's writer takes them, and the rows that came of them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, cast

import psycopg

from core.db import LoopConnection, ServerSilent
from gateway.record_sql import BOTH, INSERT, UPDATE
from gateway.records import Record, RecordWriter
from tests.fakes.pipeline import Rows
from tests.fakes.waiting import eventually, takes
from wire.contract import OPEN_REQUEST_STATES, RequestState
from wire.ids import new_uuid7

ACCEPT_S = 30.0
"""So long a commit may take on a machine that stands still, where its being slow is not the subject."""


def make_record(**changes: object) -> Record:
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
    (number,) = rows.execute("SELECT count(*) FROM gateway_requestrecord WHERE state = %s", [state.value]).fetchone() or (0,)
    return int(str(number))


async def written(writer: RecordWriter) -> None:
    """Wait until nothing waits and the last commit is through: an insert that follows it is durable."""
    await eventually(lambda: writer.pending == 0)
    await writer.accept(make_record())


class MemoryDatabase:
    """The table of request records as its statements see it, on connections that fail as they are told.

    ``fates``: what becomes of the next statements: ``dies before`` it is carried out, ``dies after`` (nobody hears that it
    was), ``fails`` (the connection stays), ``stalls`` (the silence is longer than is borne), ``slow`` (shorter), ``works``. A
    row with the model ``bad`` is refused, and with it its statement.
    """

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}  # Any: what JSON holds
        self.fates: list[str] = []
        self.is_away = False
        self.connections = 0

    async def connect(self) -> LoopConnection:
        """Return a connection. Raises OperationalError while the database is away."""
        await takes(0.001)
        if self.is_away:
            raise psycopg.OperationalError("connection refused")
        self.connections += 1
        return cast("LoopConnection", _MemoryConnection(self))

    def carry_out(self, statement: str, values: Sequence[bytes]) -> None:
        """Do what a statement of ``gateway.record_sql`` says, whole or not at all. Raises DataError."""
        parts = [json.loads(value) for value in values]
        if any(row["model"] == "bad" for rows in parts for row in rows):
            raise psycopg.DataError("a value that the table refuses")
        inserts = parts[0] if statement in {INSERT, BOTH} else []
        updates = parts[-1] if statement in {UPDATE, BOTH} else []
        open_before = {key for key, row in self.rows.items() if row["state"] in OPEN_REQUEST_STATES}
        for row in inserts:
            self.rows.setdefault(row["id"], row)
        for row in updates:
            if row["id"] in open_before:
                self.rows[row["id"]] = row


class _MemoryConnection:
    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._answer: asyncio.TimerHandle | None = None
        self.is_closed = False

    def send(
        self,
        statement: str,
        values: Sequence[bytes],
        *,
        on_sent: Callable[[], None],
        on_done: Callable[[psycopg.Error | None], None],
    ) -> None:
        assert self._answer is None, "one statement at a time"
        database = self._database
        fate = "dies before" if database.is_away else database.fates.pop(0) if database.fates else "works"
        on_sent()

        def answer() -> None:
            self._answer, error = None, None
            try:
                if fate in {"works", "slow", "dies after", "stalls"}:
                    database.carry_out(statement, values)
            except psycopg.DataError as refused:
                error = refused
            if fate == "fails":
                error = psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
            elif fate not in {"works", "slow"}:
                self.close()
                error = ServerSilent("silent") if fate == "stalls" else psycopg.OperationalError("server closed the connection")
            on_done(error)

        self._answer = asyncio.get_running_loop().call_later({"stalls": 6.0, "slow": 3.0}.get(fate, 0.002), answer)

    def close(self) -> None:
        self.is_closed = True
        if self._answer is not None:
            self._answer.cancel()
