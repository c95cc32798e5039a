"""One test's view of the stack: fresh model names, workers and clients that are gone when the test is over."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any  # bodies and rows are JSON

import aiohttp
import psycopg
from psycopg.rows import dict_row

from conformance.engine.server import serve_engine
from tests.fakes.http_client import REPLY_WITHIN_S, Exchange, Reply, call
from tests.fakes.scripted_box import ScriptedBox, ScriptedWorker, Stream
from tests.fakes.stack import Gateway, Stack
from tests.fakes.waiting import DEADLINE_S, eventually
from wire.frames import End

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OPEN_STATES = {"queued", "assigned", "running"}
ACTOR = "contract-tests"
PROBE_TOKENS = 2_000_000_000
"""Over every cap: asks whether a model is admitted without queueing anything."""
TRY_AGAIN = 1013
"""With what a gateway closes the socket of a node whose registration its database was too slow for; real ones dial again."""
_numbers = itertools.count(1)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def unique(prefix: str) -> str:
    """Return a name that no other test, nor another run on the same database, uses."""
    return f"{prefix}-{os.getpid()}-{next(_numbers)}"


def chat_body(model: str, text: str = "hello", *, stream: bool = False, **more: Any) -> bytes:
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    if stream:
        body["stream"] = True
    return json.dumps(body).encode()


@dataclass
class Lab:
    """What a test works with. ``secret`` is an enrolment credential for scripted workers."""

    stack: Stack
    secret: str
    gateway: Gateway
    models: list[str] = field(default_factory=list)
    """Those that this test had allow-listed."""
    workers: list[ScriptedWorker | ScriptedBox] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    # what operators do

    def operate(self, function: str, **arguments: Any) -> Any:
        return self.stack.backstage.call(function, actor=ACTOR, **arguments)

    async def model(self, *gateways: Gateway, prefix: str = "model", **caps: int) -> str:
        """Return the name of a model that has just been allow-listed and that the gateways know of."""
        name = unique(prefix)
        await self.allow(name, *gateways, **caps)
        return name

    async def allow(self, name: str, *gateways: Gateway, **caps: int) -> None:
        self.models.append(name)
        self.operate("gateway.services.models.allow_model", name=name, **caps)
        for gateway in gateways or (self.gateway,):
            await eventually(partial(self.knows, name, gateway), what=f"{gateway.name} knows {name}")

    async def knows(self, model: str, gateway: Gateway) -> bool:
        """Return whether the gateway would admit ``model``, found out without queueing anything."""
        reply = await self.post(chat_body(model, max_tokens=PROBE_TOKENS), gateway=gateway)
        assert reply.status in {400, 404}, reply
        return bool(reply.error["code"] == "MAX_TOKENS_TOO_LARGE")

    async def node(self, name: str) -> dict[str, Any]:
        return await eventually(lambda: self._find_node(name), what=f"node {name} is listed")

    async def _find_node(self, name: str) -> dict[str, Any] | None:
        headers = bearer(self.stack.ready.admin_token)
        reply = await call("GET", f"{self.stack.ready.control_url}/nodes", headers=headers)
        return next((row for row in reply.json["nodes"] if row["node_name"] == name), None)

    # records

    async def records(self, model: str) -> list[dict[str, Any]]:
        """Return the request records of a model as the database holds them, oldest first; the state is ``status``.

        Those that ``knows`` left are not among them.
        """
        query = (
            "SELECT *, state AS status FROM gateway_requestrecord"
            " WHERE model = %s AND max_tokens IS DISTINCT FROM %s ORDER BY created_at, id"
        )
        url = self.stack.ready.database_url
        async with await psycopg.AsyncConnection.connect(url, row_factory=dict_row) as database:
            found = await database.execute(query, (model, PROBE_TOKENS))
            return [dict(row) for row in await found.fetchall()]

    async def settled(self, model: str, *, within_s: float = 60.0) -> list[dict[str, Any]]:
        """Return all records of a model once each has its final state."""

        async def closed() -> list[dict[str, Any]] | None:
            rows = await self.records(model)
            return None if any(row["status"] in OPEN_STATES for row in rows) else rows

        rows: list[dict[str, Any]] = await eventually(closed, within_s=within_s, what=f"final records of {model}", pause_s=0.1)
        return rows

    async def final(self, model: str, count: int = 1, *, within_s: float = DEADLINE_S) -> list[dict[str, Any]]:
        async def closed() -> list[dict[str, Any]] | None:
            rows = await self.records(model)
            done = len(rows) >= count and not any(row["status"] in OPEN_STATES for row in rows)
            return rows if done else None

        what = f"{count} final records of {model}"
        rows: list[dict[str, Any]] = await eventually(closed, within_s=within_s, what=what, pause_s=0.03)
        assert len(rows) == count, rows
        return rows

    # workers

    async def worker(
        self, *models: str, name: str | None = None, max_concurrent: int = 1, gateway: Gateway | None = None
    ) -> ScriptedWorker:
        name = name or unique("worker")

        async def connect() -> ScriptedWorker | None:
            worker = await self.dial(secret=self.secret, gateway=gateway)
            try:
                await worker.register(models, name=name, max_concurrent=max_concurrent)
            except AssertionError:
                if worker.close_code != TRY_AGAIN:
                    raise
                return None
            return worker

        return await eventually(connect, what=f"the gateway takes {name}")

    async def dial(
        self, *, secret: str | None, gateway: Gateway | None = None, provider: str | None = "local"
    ) -> ScriptedWorker:
        worker = await ScriptedWorker.dial((gateway or self.gateway).worker_url, secret=secret, provider=provider)
        self.workers.append(worker)
        return worker

    async def box(
        self, *models: str, max_concurrent: int = 1, gateway: Gateway | None = None, instance_id: str | None = None,
        endpoints: Sequence[str] = (CHAT,),
    ) -> ScriptedBox:  # fmt: skip
        name = unique("box")

        async def connect() -> ScriptedBox | None:
            try:
                return await ScriptedBox.dial(
                    (gateway or self.gateway).worker_url, secret=self.secret, name=name, models=models,
                    max_concurrent=max_concurrent, instance_id=instance_id, endpoints=endpoints,
                )  # fmt: skip
            except AssertionError as error:
                if f"closed {TRY_AGAIN} " not in str(error):
                    raise
                return None

        box = await eventually(connect, what=f"the gateway takes {name}")
        self.workers.append(box)
        return box

    async def queue_depth(self, gateway: Gateway | None = None) -> int:
        """Return how many requests wait in a gateway for the models of this test, from ``/admin/stats``.

        Those of the test before may still wait there: a gateway hears a moment later that their clients have left.
        """
        headers = bearer(self.stack.ready.admin_token)
        reply = await call("GET", f"{(gateway or self.gateway).url}/admin/stats", headers=headers)
        depths = reply.json["queue_depth_by_model"]
        return sum(int(depths.get(name, 0)) for name in self.models)

    async def queued(self, count: int) -> None:
        async def reached() -> bool:
            return await self.queue_depth() == count

        await eventually(reached, what=f"{count} queued")

    # clients

    def headers(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        return {**bearer(self.stack.ready.api_key), "content-type": "application/json", **(extra or {})}

    async def post(
        self, body: bytes, *, path: str = CHAT, gateway: Gateway | None = None, headers: Mapping[str, str] | None = None,
        within_s: float = REPLY_WITHIN_S,
    ) -> Reply:  # fmt: skip
        url = (gateway or self.gateway).url + path
        return await call("POST", url, headers=headers or self.headers(), body=body, within_s=within_s)

    def ask(self, model: str, text: str = "hello", *, gateway: Gateway | None = None, **more: Any) -> asyncio.Task[Reply]:
        return self.spawn(self.post(chat_body(model, text, **more), gateway=gateway))

    async def open(
        self, model: str, text: str = "hello", *, stream: bool = True, gateway: Gateway | None = None,
        receive_buffer: int | None = None, **more: Any,
    ) -> Exchange:  # fmt: skip
        """Start a chat completion and return the open exchange, for reading slowly or leaving."""
        exchange = await Exchange.open(
            (gateway or self.gateway).url + CHAT, headers=self.headers(), body=chat_body(model, text, stream=stream, **more),
            receive_buffer=receive_buffer,
        )  # fmt: skip
        self.exchanges.append(exchange)
        return exchange

    def spawn(self, work: Coroutine[Any, Any, Reply]) -> asyncio.Task[Reply]:
        """Run something beside the test; it is cancelled when the test ends."""
        task = asyncio.create_task(work)
        self.tasks.append(task)
        return task

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for exchange in self.exchanges:
            exchange.leave()
            await exchange.close()
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.gather(*(worker.close() for worker in self.workers), return_exceptions=True)


_CONCURRENT = 8
_PASSED = ("retry-after", "x-should-retry")


@asynccontextmanager
async def engine_box(lab: Lab, model: str, *, native: Sequence[str] = ()) -> AsyncIterator[ScriptedBox]:
    """Connect a node that answers ``model`` on chat completions and, byte for byte, on the ``native`` paths."""
    async with serve_engine(models=[model], native=native) as url, aiohttp.ClientSession() as session:
        box = await lab.box(model, endpoints=[CHAT, *native], max_concurrent=_CONCURRENT)
        forwarding = asyncio.create_task(_forward_all(box, url, session))
        try:
            yield box
        finally:
            forwarding.cancel()
            await asyncio.gather(forwarding, return_exceptions=True)


async def _forward_all(box: ScriptedBox, url: str, session: aiohttp.ClientSession) -> None:
    async with asyncio.TaskGroup() as group:
        while True:
            stream = await box.stream(within_s=60)
            group.create_task(_forward(box, stream, url, session))


async def _forward(box: ScriptedBox, stream: Stream, url: str, session: aiohttp.ClientSession) -> None:
    headers = {"content-type": stream.meta.headers.get("content-type", "application/json")}
    try:
        async with session.post(url + stream.meta.path, data=bytes(stream.body), headers=headers) as answer:
            passed = {name: answer.headers[name] for name in _PASSED if name in answer.headers}
            await box.head(stream, status=answer.status, content_type=answer.headers["content-type"], headers=passed)
            async for piece in answer.content.iter_any():
                await box.data(stream, piece)
    except aiohttp.ClientError as error:
        await box.end(stream, End(error="engine_failed", message=type(error).__name__))
    else:
        await box.end(stream)
