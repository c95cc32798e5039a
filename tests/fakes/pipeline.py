"""The pipeline of a gateway over a real writer and nodes that the test plays: requests go in, records come out."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import psycopg
from asgiref.sync import sync_to_async
from django.db import connections

from core.db import threads
from core.limits import GatewayLimits
from gateway.admission import Admission, RateLimiter
from gateway.auth import KeyRing
from gateway.catalogue import AliasEntry, Catalogue, KeyEntry, ModelEntry
from gateway.counting import TokenCounter
from gateway.dialects import SURFACES, Surface
from gateway.dispatch import Dispatcher
from gateway.pipeline import Pipeline
from gateway.records import RecordWriter
from gateway.routing import Alias
from gateway.values import Caller, Priority
from nodes.links import LinkRegistry
from nodes.links.keeper import LinkKeeper
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.limits import set_limits
from tests.fakes.links import FakeLink, FakeStream
from tests.fakes.waiting import eventually
from wire.credentials import CredentialKind, mint_credential
from wire.ids import parse_id

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
        self,
        rows: Rows,
        *,
        limits: GatewayLimits | None = None,
        per_minute: int = 1000,
        max_queue: int = 10,
        max_prompt_chars: int = 1000,
        models: dict[str, tuple[str, ...]] | None = None,
        aliases: tuple[Alias, ...] = (),
        priority: Priority = Priority.NORMAL,
        tidy: bool = False,
    ) -> None:
        self.rows = rows
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
        catalogue.apply_models(
            [
                ModelEntry(
                    name=name,
                    allowed=True,
                    owned_by="x",
                    max_tokens=100,
                    max_prompt_chars=max_prompt_chars,
                    max_queue=max_queue,
                    created=0,
                    fallbacks=fallbacks,
                    tidy=tidy,
                )
                for name, fallbacks in (models or {"m": ()}).items()
            ]
        )
        catalogue.apply_aliases([AliasEntry(None, alias) for alias in aliases])
        self.records = RecordWriter(accept_s=30.0, max_pending=1000)
        self.records.start()
        self.dispatcher = Dispatcher(self.registry, keeper, self.limits)
        self.pipeline = Pipeline(
            gateway_id=gateway_id, keys=KeyRing(catalogue), limiter=RateLimiter(),
            admission=Admission(catalogue, lambda name: False, self.dispatcher.rank_models), dispatcher=self.dispatcher,
            records=self.records, counter=TokenCounter(self.registry, None), limits=self.limits,
        )  # fmt: skip

    def link(self, *models: str, slots: int = 1, paths: set[str] | None = None) -> FakeLink:
        link = FakeLink(*models or ("m",), slots=slots)
        link.stale_after_s = link.offline_after_s = 600.0  # nobody says for it that it is there
        if paths is not None:
            link.endpoints = {model: frozenset(paths) for model in link.models}
        self.registry.add(link)
        return link

    def ask(self, key: str = "", /, *, surface: Surface = SURFACES[CHAT], **fields: object) -> Request:
        content = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}).encode()
        headers = {"authorization": f"Bearer {key or self.key}", "content-type": "application/json"}
        client = MemoryClient(body=[content], headers=headers, limits=self.limits)
        return Request(self, client, asyncio.create_task(self.pipeline.serve(client.connection, surface)))


class Request:
    """A request under way."""

    def __init__(self, gateway: Gateway, client: MemoryClient, task: asyncio.Task[None]) -> None:
        self.gateway = gateway
        self.client = client
        self.task = task

    async def on(self, link: FakeLink) -> FakeStream:
        """Wait until it is on that box."""
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
    catalogue = gateway.pipeline.keys._catalogue
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
    """Have the time of whoever waits for a box be up; with so short a time it may be before the first sign of life."""
    dispatcher = gateway.dispatcher
    for waiter in dispatcher._list_waiting(list(dispatcher._queues)):
        dispatcher._take_timer(waiter, is_last=True)


def is_waited_for(rows: Rows) -> bool:
    """Whether somebody waits for a lock of a table of this database that another connection holds."""
    here = "(SELECT oid FROM pg_database WHERE datname = current_database())"
    waiting = f"SELECT 1 FROM pg_locks WHERE NOT granted AND database = {here}"
    return rows.execute(waiting).fetchone() is not None


def last_data(body: bytes) -> Any:
    """Return what the last event of a stream says, or what a whole answer says."""
    return json.loads(body.rpartition(b"\ndata:")[2])


@asynccontextmanager
async def gateways(rows: Rows) -> AsyncIterator[Make]:
    """Makes gateways whose database may be slow, for that is not the subject, and lets nothing of them outlive the test."""
    set_limits(core={"database_s": 30.0}, gateway={"keeping_s": 30.0})
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
