"""A gateway and its nodes in one process, on one event loop and a virtual clock: the harness of the system tests.

Real: the gateway's ASGI application with its runtime (dispatcher, keeper, records writer, keys), PostgreSQL and Valkey, and the
whole runner with its queue and serving. Played: the engines, the lines between (``memory_link``), and the clients
(``asgi_client``). Use on a ``VirtualLoop``::

    async with Fleet() as fleet:
        node = await fleet.add_node(slots=2)
        answer = fleet.ask(stream=True)
        call = await fleet.next_call(answer)
        call.emit(3)
        node.link.stall()
        await fleet.advance(20)

Seconds are virtual. Awaiting anything lets the clock run to what comes next; ``settle`` does not move it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar, cast

import aiohttp
from channels.layers import get_channel_layer
from django.conf import settings
from django.db import connections
from django.test import override_settings

from core.db.threads import run_upkeep
from core.hints import HintLayer
from gateway.models import RequestRecord
from gateway.process import GatewayRuntime
from gateway.services.keys import create_api_key
from gateway.services.models import allow_model
from gateway.services.tenants import create_tenant
from gateway.urls import make_application
from nodes.services.credentials import create_credential, create_provider
from runner.app import Runner
from runner.config import read_config
from runner.definitions.fields import ModelDefinition
from runner.definitions.plan import LoadPlan
from runner.engines.port import CHAT
from runner.engines.supervisor import Supervisor
from runner.parts import Phase
from runner.queue import FairQueue
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.control_process import close_thread_connections
from tests.fakes.engine import EngineCall, FakeEngine
from tests.fakes.memory_link import MemoryLink
from tests.fakes.virtual_loop import VirtualLoop
from tests.fakes.waiting import eventually, takes
from wire import clock
from wire.contract import OPEN_REQUEST_STATES

T = TypeVar("T")
ACTOR = "user:tests"
CHAT_PATH, MESSAGES_PATH = "/v1/chat/completions", "/v1/messages"
WITHIN_S = 120.0
"""Virtual seconds that any wait of a test may take."""
_PIECE = re.compile(r"<([\w-]+)\.(\d+)>")


@dataclass(frozen=True)
class Rows:
    """What the database holds before a fleet starts. Several fleets may use the same, one after the other."""

    keys: Mapping[str, str]
    """Texts of API keys, by name."""
    credential: str
    """Text of an enrolment credential for any number of nodes."""

    @classmethod
    def create(
        cls, *, models: Mapping[str, int | None] | Sequence[str] = ("m",), keys: Mapping[str, int | None] | None = None
    ) -> Self:
        """Create models (with their ``max_queue``), keys (with their requests per minute) and a credential. Synchronous."""
        caps = models if isinstance(models, Mapping) else dict.fromkeys(models)
        for name, max_queue in caps.items():
            allow_model(name=name, max_queue=max_queue, actor=ACTOR)
        create_tenant(name="acme", actor=ACTOR)
        made = {
            name: create_api_key(name=name, tenant_name="acme", requests_per_minute=per_minute, actor=ACTOR)[1]
            for name, per_minute in ({"k": None} if keys is None else keys).items()
        }
        create_provider(name="local", actor=ACTOR)
        _, credential = create_credential(name="fleet", provider_name="local", max_nodes=64, actor=ACTOR)
        return cls(made, credential)


class Answer:
    """One request of a client, and what came of it. ``number`` is its ``max_tokens``, as on its record and in engine calls."""

    def __init__(
        self, fleet: Fleet, number: int, client: MemoryClient, task: asyncio.Task[None], *, is_streaming: bool
    ) -> None:
        self.fleet, self.number, self.client, self.is_streaming = fleet, number, client, is_streaming
        self.task = task
        self.asked_at = clock.monotonic()
        self.ended_at: float | None = None
        self.has_left = False
        task.add_done_callback(self._note_end)

    def _note_end(self, task: asyncio.Task[None]) -> None:
        del task
        self.ended_at = clock.monotonic()

    @property
    def is_over(self) -> bool:
        return self.task.done()

    @property
    def status(self) -> int:
        return self.client.status

    @property
    def pieces(self) -> list[tuple[str, int]]:
        """The pieces of engines' text that the client has: (ident of the engine call, place in it)."""
        return [(ident, int(place)) for ident, place in _PIECE.findall(_unescape(self.client.body))]

    @property
    def error_code(self) -> str:
        """The code of the error that the client was told, as the answer or in its stream; "" = none."""
        found = re.findall(r'"code":\s*"([A-Z_]+)"', self.client.body.decode())
        return found[-1] if found else self.client.headers.get("x-error-code", "") if self.client.events else ""

    @property
    def calls(self) -> list[EngineCall]:
        found = [call for node in self.fleet.nodes for call in node.engine.calls if call.number == self.number]
        return sorted(found, key=lambda call: call.began_at)

    def leave(self) -> None:
        if not self.is_over:
            self.has_left = True
            self.client.leave()

    async def done(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            await asyncio.shield(self.task)

    async def rows(self) -> list[dict[str, Any]]:
        """Return its rows of the table of requests: one, or none where it was refused before it was read."""
        return (await self.fleet.read_rows([self.number]))[self.number]

    async def row(self) -> dict[str, Any]:
        """Return its row once that is final; nobody waits for the row of a refusal."""
        await self.done()

        async def find() -> dict[str, Any] | None:
            return next((row for row in await self.rows() if row["state"] not in OPEN_REQUEST_STATES), None)

        async with asyncio.timeout(WITHIN_S):
            return await eventually(find, pause_s=0.05)


class Node:
    """A node: the whole runner, with a fake engine. ``link`` is the newest, ``links`` all that it ever had."""

    def __init__(
        self,
        fleet: Fleet,
        name: str,
        *,
        models: Sequence[str],
        slots: int,
        endpoints: Sequence[str],
        options: Sequence[str] = (),
    ) -> None:
        self.fleet, self.name, self.models, self.slots = fleet, name, tuple(models), slots
        self.engine = FakeEngine(name=name, endpoints=endpoints, serves=True)
        self.engine.poll_s = self.engine.restart_max_s = 5.0
        self.links: list[MemoryLink] = []
        self.is_reachable = True
        """Whether it reaches the gateway when it dials."""
        words = ["--gateway", "ws://gateway", "--token", fleet.rows.credential, "--name", name]
        config = read_config([*words, "--backend", "http://played", "--max-concurrent", str(slots), *options], {})
        self.box = Runner(replace(config, engine=None), cast("aiohttp.ClientSession", self))
        self._leave, self._hurry = asyncio.Event(), asyncio.Event()
        self._supervisor: Supervisor | None = None
        self._queue: FairQueue | None = None
        self.task = asyncio.get_running_loop().create_task(self.box.run(self._leave, self._hurry))

    @property
    def link(self) -> MemoryLink:
        return self.links[-1]

    @property
    def is_running(self) -> bool:
        return not self.task.done()

    @property
    def queue(self) -> FairQueue:
        assert self._queue is not None
        return self._queue

    @property
    def gateway_link(self) -> Any:
        return next((link for link in self.fleet.runtime.registry if link.node_name == self.name), None)

    async def ws_connect(self, url: str, *, headers: dict[str, str], **_: Any) -> Any:
        """Open a link, as the runner has its HTTP client do. Raises aiohttp.ClientConnectionError while nobody listens."""
        if not (self.is_reachable and self.fleet.is_listening):
            raise aiohttp.ClientConnectionError("nobody listens")
        link = MemoryLink()
        self.links.append(link)
        self.fleet.serve_socket(link, link.make_scope(url, headers))
        await link.accepted.wait()
        return link.node_end

    async def start(self) -> None:
        while self.box._parts is None or self.box.parts.phase is not Phase.SERVING:
            assert self.is_running, "the runner ended"
            await takes(0.01)
        self._supervisor = Supervisor(self.engine, silent_s=10.0, on_change=lambda: None)
        await self._supervisor.load(lambda _progress: None)
        for name in self.models:
            self.load(name)

    def load(self, name: str) -> None:
        """Have a model more; all of them share engine, slots and queue."""
        assert self._supervisor is not None
        definition = ModelDefinition(model_id=name, backend="attached", target_inflight=self.slots)
        if self._queue is None:
            self._queue = self.box.parts._make_queue(definition)
        plan = LoadPlan(model_id="", backend="attached", slots=self.slots)
        self.box.parts.pool.registry.attach(definition, plan, self._supervisor, self._queue)

    def unload(self, name: str) -> None:
        self.box.parts.pool.registry.detach(name)

    def leave(self) -> None:
        """Ask the process to end: it finishes what runs, and takes nothing new."""
        self._leave.set()

    def hurry(self) -> None:
        """Ask a second time: it finishes nothing any more."""
        self._leave.set()
        self._hurry.set()

    async def close(self) -> None:
        self.hurry()
        if self.links and not self.link.is_clear:
            self.link.cut()
        await asyncio.wait([self.task])
        if self._supervisor is not None:
            await self._supervisor.unload(gently=False)
        self.task.result()


class _Runtime(GatewayRuntime):
    """A gateway that, when a task of its background dies, notes that instead of ending the process."""

    def __init__(self) -> None:
        super().__init__()
        self.deaths: list[BaseException] = []
        # Nobody here has a budget; what it says to Valkey is real, and would be late as soon as the clock moves.
        self.budgets.run = asyncio.Event().wait  # type: ignore[method-assign, assignment]  # it waits for ever

    def _take_dead_task(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.deaths.append(error)


class Fleet:
    """See the module. ``rows`` None = made by the fleet, with model ``m`` and key ``k``; the time-outs are as deployed."""

    def __init__(self, *, rows: Rows | None = None) -> None:
        self._given_rows = rows
        self.rows: Rows
        self.nodes: list[Node] = []
        self.answers: list[Answer] = []
        self.gateways: list[_Runtime] = []
        self.is_listening = False
        self._numbers = itertools.count(1)
        self._sockets: dict[asyncio.Task[None], MemoryLink] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        self.loop = loop
        self._tasks_before = asyncio.all_tasks()
        self._stack.enter_context(_counted_hints(loop))
        self._stack.enter_context(_lasting_connections())
        try:
            self.rows = await run_upkeep(Rows.create) if self._given_rows is None else self._given_rows
            await self.start_gateway()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            for answer in self.answers:
                answer.leave()
            for node in self.nodes:
                await node.close()
            if self.is_listening:
                await self.stop_gateway(grace_s=0.0)
            await close_layer()
            await self.settle()
            left = asyncio.all_tasks() - self._tasks_before - {asyncio.current_task()}
            if error is None:
                assert not self.deaths
                assert not left, f"tasks are left behind: {left}"
        finally:
            await self._stack.aclose()

    # the gateway

    @property
    def runtime(self) -> _Runtime:
        return self.gateways[-1]

    @property
    def deaths(self) -> list[BaseException]:
        return [error for runtime in self.gateways for error in runtime.deaths]

    async def start_gateway(self) -> None:
        """Start a gateway: the first, or the next after one that was stopped."""
        runtime = _Runtime()
        self.app = make_application(runtime)
        await runtime.start()
        self.gateways.append(runtime)
        self.is_listening = True

    async def stop_gateway(self, *, grace_s: float | None = None) -> None:
        """Stop it as its server does on a signal, after ``grace_s`` for what runs (None = the gateway's own time-out)."""
        runtime, self.is_listening = self.runtime, False
        runtime.begin_stop()
        until = clock.monotonic() + (runtime.limits.shutdown_grace_s if grace_s is None else grace_s)
        while runtime.running_requests and clock.monotonic() < until:
            await takes(0.05)
        runtime.interrupt_running()
        await runtime.say_goodbye()
        for link in list(self._sockets.values()):
            link.gateway_end.close(1012)
        if running := [answer.task for answer in self.answers if not answer.is_over]:
            _, late = await asyncio.wait(running, timeout=5.0)
            for task in late:
                task.cancel()
            await asyncio.wait(running)
        if self._sockets:
            await asyncio.wait(list(self._sockets))
        await runtime.stop()

    def serve_socket(self, link: MemoryLink, scope: dict[str, Any]) -> None:
        """Have the gateway serve its end of a link, as its server does."""
        task = self.loop.create_task(self.app(scope, link.gateway_end.receive, link.gateway_end.send))
        self._sockets[task] = link

        def note_end(done: asyncio.Task[None]) -> None:
            del self._sockets[done]
            link.accepted.set()
            link.gateway_end.close(1006)

        task.add_done_callback(note_end)

    # nodes, clients, time

    async def add_node(
        self, name: str = "", *, models: Sequence[str] = ("m",), slots: int = 1, endpoints: Sequence[str] = (CHAT,),
        options: Sequence[str] = (),
    ) -> Node:  # fmt: skip
        """Start a node and return once the gateway can send it work. ``endpoints``: API paths that its engine answers.

        ``options``: further ones of its command line.
        """
        node = Node(self, name or f"n{len(self.nodes)}", models=models, slots=slots, endpoints=endpoints, options=options)
        self.nodes.append(node)
        await node.start()
        await self.until(lambda: node.gateway_link is not None and node.gateway_link.models == set(models))
        return node

    def ask(self, model: str = "m", *, stream: bool = False, path: str = CHAT_PATH, key: str = "k", **fields: object) -> Answer:
        number = next(self._numbers)
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "max_tokens": number, "stream": stream}
        return self.send(path, json.dumps({**body, **fields}).encode(), key=key, stream=stream, number=number)

    def send(
        self, path: str, body: bytes = b"", *, method: str = "POST", key: str = "k", headers: Mapping[str, str] | None = None,
        stream: bool = False, number: int = 0,
    ) -> Answer:  # fmt: skip
        """Send any request, with a key's name or "" for none. ``calls`` and ``rows`` are of those that have a ``number``."""
        sent = {"content-type": "application/json"}
        if key:
            sent["authorization"] = f"Bearer {self.rows.keys[key]}"
        client = MemoryClient(body=[body], headers={**sent, **(headers or {})}, path=path, method=method)
        client.scope["client"] = ("127.0.0.1", 1)
        task = self.loop.create_task(self.app(client.scope, client.incoming.get, client.send))
        answer = Answer(self, number, client, task, is_streaming=stream)
        self.answers.append(answer)
        return answer

    async def call(self, path: str, body: bytes = b"", **more: Any) -> MemoryClient:
        answer = self.send(path, body, **more)
        await answer.done()
        return answer.client

    async def next_call(self, answer: Answer, *, count: int = 1) -> EngineCall:
        """Wait until engines were asked ``count`` times because of a request; return the newest of the calls."""
        await self.until(lambda: len(answer.calls) >= count or answer.is_over)
        assert len(answer.calls) >= count, (answer.status, answer.client.body)
        return answer.calls[-1]

    async def begin_stream(self, *, path: str = CHAT_PATH) -> tuple[Answer, EngineCall]:
        """Ask for a stream; return it once its client has the first piece, and the engine call that it comes from."""
        answer = self.ask(stream=True, path=path)
        call = await self.next_call(answer)
        call.emit()
        await self.settle()
        assert answer.pieces == [(call.ident, 0)]
        return answer, call

    def find_node(self, call: EngineCall) -> Node:
        return next(node for node in self.nodes if node.engine is call.engine)

    async def operate(self, service: Callable[..., T], **arguments: object) -> T:
        """Change something as an operator does, and let everything happen that follows at once."""
        result = await run_upkeep(partial(service, actor=ACTOR, **arguments))
        await self.settle()
        return result

    async def settle(self) -> None:
        """Let everything happen that happens before the clock moves."""
        await self.loop.settle()

    async def advance(self, seconds: float) -> None:
        await self.loop.pass_time(seconds)

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition; time passes in steps of 50 ms. Raises TimeoutError after WITHIN_S."""
        async with asyncio.timeout(WITHIN_S):
            await self.settle()
            while not condition():
                await self.advance(0.05)

    async def read_rows(self, numbers: Sequence[int]) -> dict[int, list[dict[str, Any]]]:
        ids = [runtime.gateway_id for runtime in self.gateways]

        def read() -> list[dict[str, Any]]:
            return [dict(row) for row in RequestRecord.objects.filter(gateway_id__in=ids, max_tokens__in=numbers).values()]

        found: dict[int, list[dict[str, Any]]] = {number: [] for number in numbers}
        for row in await run_upkeep(read):
            found[row["max_tokens"]].append(row)
        return found


def _unescape(body: bytes) -> str:
    return body.decode().replace("\\u003c", "<").replace("\\u003e", ">")


@contextmanager
def _counted_hints(loop: VirtualLoop) -> Iterator[None]:
    layers = {"default": {**settings.CHANNEL_LAYERS["default"], **LAYERS}}
    with override_settings(CHANNEL_LAYERS=layers):
        CountedHintLayer.loop = loop
        try:
            yield
        finally:
            CountedHintLayer.loop = None


@contextmanager
def _lasting_connections() -> Iterator[None]:
    """Let the threads of the ORM keep their connections to PostgreSQL; a new one for each query costs more than the query."""
    kept = connections.settings["default"]
    before, kept["CONN_MAX_AGE"] = kept["CONN_MAX_AGE"], None
    try:
        yield
    finally:
        kept["CONN_MAX_AGE"] = before
        close_thread_connections()


LAYERS = {"BACKEND": "tests.fakes.fleet.CountedHintLayer"}
"""What ``CHANNEL_LAYERS`` says instead of the product's class."""
_PAUSE_S = 0.2
"""The layer's reader sleeps for 0.1 s before it first looks whether anything was subscribed."""


class CountedHintLayer(HintLayer):
    """Delivers hints through Valkey, as the product's layer does. Hints of other processes come when they come."""

    loop: ClassVar[VirtualLoop | None] = None
    """The loop that listens; what other loops do (a thread's, to send) is not counted here."""
    _coming: ClassVar[Counter[tuple[str, str]]] = Counter()
    _listening: ClassVar[set[str]] = set()

    async def new_channel(self, prefix: str = "specific.") -> str:
        with _here().underway("a command to Valkey"):
            return await super().new_channel(prefix)

    async def group_add(self, group: str, channel: str) -> None:
        """Join a group; return once Valkey knows of it."""
        with _here().underway("a command to Valkey"):
            layer = self._get_layer()
            await layer.group_add(group, channel)
            name = layer._get_group_channel_name(group)
            shard = layer._get_shard(name)
            while not (await shard._redis.pubsub_numsub(name))[0][1]:
                pass
        await takes(_PAUSE_S)
        self._listening.add(channel)

    def send_hint(self, message: dict[str, Any]) -> None:
        with self._counted(message):
            super().send_hint(message)

    async def group_send(self, group: str, message: dict[str, Any]) -> None:
        with self._counted(message):
            await self._get_layer().group_send(group, message)

    @contextmanager
    def _counted(self, message: dict[str, Any]) -> Iterator[None]:
        """Send a hint in the block; it is under way until every listener of this process has it."""
        loop, key = self.loop, (message["topic"], message["ident"])
        if loop is None:
            yield
            return
        listeners = len(self._listening)
        for _ in range(listeners):
            self._coming[key] += 1
            loop.begin(f"hint {message['topic']}")
        try:
            yield
        except BaseException:
            for _ in range(listeners):
                self._coming[key] -= 1
                loop.end(f"hint {message['topic']}")
            raise

    async def receive(self, channel: str) -> dict[str, Any]:
        try:
            message = await super().receive(channel)
        except BaseException:
            self._listening.discard(channel)
            self._arrive(*self._coming.elements())
            raise
        if self._coming[key := (message["topic"], message["ident"])]:
            self._arrive(key)
        return message

    def _arrive(self, *hints: tuple[str, str]) -> None:
        for key in hints:
            self._coming[key] -= 1
            _here().end(f"hint {key[0]}")


def _here() -> VirtualLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    return loop


async def close_layer() -> None:
    with _here().underway("a command to Valkey"), suppress(asyncio.CancelledError):
        await get_channel_layer()._get_layer().flush()
