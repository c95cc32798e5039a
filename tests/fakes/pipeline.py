"""The pipeline of a gateway over a real writer and nodes that the test plays: requests go in, records come out."""

from __future__ import annotations

import asyncio
import json
import math
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

import msgspec
import psycopg
from asgiref.sync import sync_to_async
from django.db import connections

from core.db import threads
from core.db.base import ServerSilent
from core.db.loop import LoopConnection
from core.limits import GatewayLimits
from gateway.dialects.surface import SURFACES, Surface
from gateway.errors import RecordsUnavailable
from gateway.process import GatewayRuntime
from gateway.request.budgets import Budgets, Share, Spending, Terms, Valkey
from gateway.request.candidates import Candidate
from gateway.request.dispatch import Dispatcher, Job
from gateway.request.identity import KeyRing, RateLimiter
from gateway.request.models import Admission, AliasEntry, Catalogue, KeyEntry
from gateway.request.pipeline import Pipeline
from gateway.request.records import WRITE, RecordWriter, connect_records
from gateway.routing import Alias
from gateway.token_counts import TokenCounter
from gateway.values import Budget, BudgetKind, Caller, InferenceRequest, ModelEntry, OwnedBudget, Priority, Record
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from nodes.states import Windows
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.limits import set_limits
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.waiting import eventually, takes
from wire.contract import OPEN_REQUEST_STATES, RequestState
from wire.credentials import CredentialKind, mint_credential
from wire.ids import new_uuid7, parse_id

Rows = psycopg.Connection[tuple[object, ...]]
CHAT = "/v1/chat/completions"
MESSAGES, RESPONSES = SURFACES["/v1/messages"], SURFACES["/v1/responses"]
SSE = {"content-type": "text/event-stream"}
ANSWER = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}'


WHOLE = {
    "id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
}  # fmt: skip


def chunk(delta: dict[str, object], finish: str | None = None, **more: object) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return (
        b"data: " + json.dumps({"id": "chatcmpl-1", "created": 1, "model": "m", "choices": [choice], **more}).encode() + b"\n\n"
    )


REPLY = json.dumps(WHOLE).encode()


USAGE = b'data: {"id":"chatcmpl-1","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n'
STREAM = [
    chunk({"role": "assistant", "content": "Hel"}), chunk({"content": "lo"}), chunk({}, "stop"), USAGE, b"data: [DONE]\n\n",
]  # fmt: skip


class Gateway:
    """A pipeline with everything it holds, one key and allowed models, ``m`` first, each with its fallbacks."""

    def __init__(
        self, rows: Rows | None = None, *, limits: GatewayLimits | None = None, per_minute: int = 1000, max_queue: int = 10,
        max_prompt_chars: int = 1000, models: dict[str, tuple[str, ...]] | None = None, aliases: tuple[Alias, ...] = (),
        priority: Priority = Priority.NORMAL, tidy: bool = False, accept_s: float = 30.0,
        connect: Callable[[], Awaitable[LoopConnection]] = connect_records,
    ) -> None:  # fmt: skip
        self.rows = cast("Rows", rows)
        self.limits = limits or GatewayLimits(no_node_wait_s=29.0, stream_ping_s=60.0)  # longer than a machine stands still
        self.registry = LinkRegistry()
        gateway_id = uuid.uuid4()
        keeper = LinkKeeper(self.registry, gateway_id=gateway_id, connect_s=1.0)
        self.gateway_id, self.catalogue = gateway_id, Catalogue(self.limits)
        catalogue = self.catalogue
        minted = mint_credential(CredentialKind.CLIENT)
        self.key = minted.text
        caller = Caller(
            key_id=uuid.uuid4(), key_name="k", tenant="t", requests_per_minute=per_minute, allowed_models=frozenset(),
            priority=priority,
        )  # fmt: skip
        catalogue.apply_keys([(minted.keyid, KeyEntry(minted.digest, caller, revoked=False, expires_at=None))], replace=True)
        catalogue.apply_models([
            ModelEntry(
                name=name, allowed=True, owned_by="x", max_tokens=100, max_prompt_chars=max_prompt_chars, max_queue=max_queue,
                created=0, fallbacks=fallbacks, tidy=tidy,
            )
            for name, fallbacks in (models or {"m": ()}).items()
        ])  # fmt: skip
        catalogue.apply_aliases([AliasEntry(None, alias) for alias in aliases])
        self.records = RecordWriter(accept_s=accept_s, max_pending=1000, connect=connect)
        self.records.start()
        self.dispatcher = Dispatcher(self.registry, keeper, self.limits)
        self.pipeline = Pipeline(
            gateway_id=gateway_id, keys=KeyRing(catalogue), limiter=RateLimiter(),
            admission=Admission(catalogue, lambda name: False, self.dispatcher.rank_models), dispatcher=self.dispatcher,
            records=self.records, counter=TokenCounter(self.registry, None), limits=self.limits,
        )  # fmt: skip

    def link(self, *models: str, slots: int = 1, paths: set[str] | None = None) -> FakeLink:
        link = FakeLink(*models or ("m",), slots=slots)
        link.windows = Windows(600.0, 600.0, 600.0)  # nobody says for it that it is there
        if paths is not None:
            link.endpoints = {model: frozenset(paths) for model in link.models}
        self.registry.add(link)
        return link

    def ask(self, key: str = "", /, *, surface: Surface = SURFACES[CHAT], **fields: object) -> Request:
        return self.ask_with({"authorization": f"Bearer {key or self.key}"}, surface, fields)

    def ask_with(self, headers: Mapping[str, str], surface: Surface, fields: Mapping[str, object]) -> Request:
        """Send a request with these headers; its body is ``fields`` and what is missing among them."""
        content = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
        headers = {"content-type": "application/json", **headers}
        client = MemoryClient(body=[content], headers=headers, limits=self.limits)
        return Request(self, client, asyncio.create_task(self.pipeline.serve(client.connection, surface)))


def give_budget(gateway: Gateway, tokens: int) -> Share:
    """Give the key of a gateway a budget of a day, all of which the gateway holds, so that nobody is asked."""
    owned = OwnedBudget("key:k", "the key k", Budget(BudgetKind.TOKENS_PER_DAY, tokens))
    known = list(gateway.catalogue.keys.items())
    keys = [(keyid, replace(entry, caller=replace(entry.caller, budgets=(owned,)))) for keyid, entry in known]
    gateway.catalogue.apply_keys(keys, replace=True)
    gateway.pipeline.budgets = Budgets(
        gateway_id=gateway.gateway_id, valkey=cast("Valkey", None), spending=cast("Spending", None),
        terms=cast("Terms", None), in_thread=cast("Callable[..., Awaitable[Any]]", None), find_others=tuple, currency="EUR",
    )  # fmt: skip
    share = gateway.pipeline.budgets.draft(
        keys[0][1].caller, prompt_tokens=0, completion_tokens=0, prices={}
    ).wanted[0][0]  # fmt: skip
    share.cap, share.is_begun, share.asked_at = tokens, True, math.inf  # as if Valkey had dealt it out
    gateway.pipeline.budgets._good_until = math.inf
    return share


class Request:
    """A request under way."""

    def __init__(self, gateway: Gateway, client: MemoryClient, task: asyncio.Task[None]) -> None:
        self.gateway = gateway
        self.client = client
        self.task = task

    async def on(self, link: FakeLink) -> FakeStream:
        await self.client.wait(lambda: link.streams or self.task.done())
        return link.streams[0]

    async def done(self) -> None:
        async with asyncio.timeout(30):
            await self.task

    async def served(self, link: FakeLink, *data: bytes, **options: Any) -> None:
        (await self.on(link)).answer(*data, **options)
        await self.done()

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.client.body)["error"]
        return error

    async def record(self, *columns: str) -> tuple[object, ...]:
        row_id = parse_id("req", self.client.headers["x-request-id"])
        return await self.gateway_record(row_id, *columns)

    async def gateway_record(self, row_id: uuid.UUID | None, *columns: str) -> tuple[object, ...]:
        query = f"SELECT {', '.join(columns)} FROM gateway_requestrecord WHERE id = %s AND finished_at IS NOT NULL"
        return await eventually(lambda: self.gateway.rows.execute(query, [row_id]).fetchone(), "the record is final")


Make = Callable[..., Gateway]


def allow_keeping(gateway: Gateway) -> None:
    """Let the tenant's answers be kept, in memory and in the database."""
    catalogue = gateway.pipeline.keys.catalogue
    keys = [
        (keyid, KeyEntry(entry.digest, replace(entry.caller, stores_responses=True), revoked=False, expires_at=None))
        for keyid, entry in catalogue.keys.items()
    ]
    catalogue.apply_keys(keys, replace=True)
    gateway.rows.execute("DELETE FROM gateway_storedresponse")
    gateway.rows.execute("DELETE FROM gateway_tenant WHERE name = 't'")
    gateway.rows.execute(
        "INSERT INTO gateway_tenant (name, is_active, stores_responses, responses_kept_days, created_at, updated_at)"
        " VALUES ('t', true, true, 30, now(), now())"
    )


def end_waits(gateway: Gateway) -> None:
    """Have the time of whoever waits for a node be up; with so short a time it may be before the first sign of life."""
    dispatcher = gateway.dispatcher
    for waiter in dispatcher._queue.list_waiting(dispatcher._queue.models):
        dispatcher._take_timer(waiter, is_last=True)


def is_waited_for(rows: Rows) -> bool:
    """Whether somebody waits for a lock of a table of this database that another connection holds."""
    here = "(SELECT oid FROM pg_database WHERE datname = current_database())"
    waiting = f"SELECT 1 FROM pg_locks WHERE NOT granted AND database = {here}"
    return rows.execute(waiting).fetchone() is not None


def last_data(body: bytes) -> Any:
    return json.loads(body.rpartition(b"\ndata:")[2])


@asynccontextmanager
async def gateways(rows: Rows) -> AsyncIterator[Make]:
    """Makes gateways whose database may be slow, for that is not the subject, and lets nothing of them outlive the test."""
    set_limits(core={"database_s": 30.0}, gateway={"store_s": 30.0})
    made: list[Gateway] = []

    def make(**options: Any) -> Gateway:
        made.append(Gateway(rows, **options))
        return made[-1]

    yield make
    for gateway in made:
        assert all(link.active == 0 for link in gateway.registry)
        assert gateway.dispatcher.depth == 0
        await gateway.records.stop()
    await eventually(lambda: not threads._room.taken, "what nobody waits for any more is written")
    await sync_to_async(connections.close_all)()


@asynccontextmanager
async def run_gateway(runtime: GatewayRuntime | None = None) -> AsyncIterator[GatewayRuntime]:
    """Run all that a gateway process does beside its server."""
    runtime = runtime or GatewayRuntime()
    await runtime.start()
    try:
        yield runtime
    finally:
        await runtime.stop()
        await sync_to_async(connections.close_all)()


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


def make_job(dispatcher: Dispatcher, request: InferenceRequest, *, max_queue: int = 100) -> Job:
    """Return a job of a request that arrives now, for the model that it names."""
    entry = ModelEntry(
        name=request.model, allowed=True, owned_by="", max_tokens=9, max_prompt_chars=9, max_queue=max_queue, created=0
    )
    return dispatcher.new_job(request_id="req_1", candidates=[Candidate(entry, request)], tenant="t", asked_model=request.model)


_OMITTED = {one.name: one.default for one in msgspec.structs.fields(Record) if one.default is not msgspec.NODEFAULT}
"""What the statements fill in of a row that does not say it."""


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
        self.is_slow_to_take = False
        """Whether the kernel does not take statements: nobody hears that they are sent."""
        self.connections = 0
        self.written: list[list[str]] = []
        """The states of the rows of each statement that was carried out."""

    async def connect(self) -> LoopConnection:
        """Return a connection. Raises OperationalError while the database is away."""
        await takes(0.001)
        if self.is_away:
            raise psycopg.OperationalError("connection refused")
        self.connections += 1
        return cast("LoopConnection", _MemoryConnection(self))

    def carry_out(self, statement: str, values: Sequence[bytes]) -> None:
        """Do what a statement of ``gateway.request.records`` says, whole or not at all. Raises DataError."""
        assert statement == WRITE
        rows = [{**_OMITTED, **row} for value in values for row in json.loads(value)]
        assert len({row["id"] for row in rows}) == len(rows), "PostgreSQL takes a row once in a statement"
        if any(row["model"] == "bad" for row in rows):
            raise psycopg.DataError("a value that the table refuses")
        self.written.append([row["state"] for row in rows])
        for row in rows:
            before = self.rows.get(row["id"], row)["state"]
            is_undone = before == RequestState.COMPLETED and row["error_code"] == RecordsUnavailable.code
            if row["id"] not in self.rows or before in OPEN_REQUEST_STATES or is_undone:
                self.rows[row["id"]] = row


class _MemoryConnection:
    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database
        self._answer: asyncio.TimerHandle | None = None
        self.is_closed = False

    def send(
        self, statement: str, values: Sequence[bytes], *, on_sent: Callable[[], None],
        on_done: Callable[[psycopg.Error | None], None],
    ) -> None:  # fmt: skip
        assert self._answer is None, "one statement at a time"
        database = self._database
        fate = "dies before" if database.is_away else database.fates.pop(0) if database.fates else "works"
        if not database.is_slow_to_take:
            on_sent()

        def answer() -> None:
            self._answer = None
            error: psycopg.Error | None = None
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
