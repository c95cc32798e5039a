"""The life of a request from its bytes to its record, over a real writer and boxes played by the test."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import datetime
from typing import Any

import psycopg
import pytest

from core.db import threads
from core.limits import GatewayLimits
from gateway.admission import Admission, RateLimiter
from gateway.auth import KeyRing
from gateway.catalogue import AliasEntry, Catalogue, KeyEntry, ModelEntry
from gateway.counting import TokenCounter
from gateway.dialects import SURFACES, Surface
from gateway.dispatch import Dispatcher
from gateway.errors import ShuttingDown
from gateway.pipeline import Pipeline
from gateway.records import RecordWriter
from gateway.routing import Alias
from gateway.values import Caller, Priority
from nodes.links import EndKind, LinkRegistry
from nodes.links.keeper import LinkKeeper
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.limits import set_limits
from tests.unit.nodes.link_fakes import FakeLink, FakeStream
from wire.credentials import CredentialKind, mint_credential
from wire.ids import parse_id

pytestmark = pytest.mark.timeout(180)  # above the sum of the waits and the start of a server
Rows = psycopg.Connection[tuple[object, ...]]
CHAT = SURFACES["/v1/chat/completions"]
SSE = {"content-type": "text/event-stream"}
DATABASE_S = 30.0
ANSWER = b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}'


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
            key_id=uuid.uuid4(),
            key_name="k",
            tenant="t",
            requests_per_minute=per_minute,
            allowed_models=frozenset(),
            priority=priority,
        )
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
            gateway_id=gateway_id,
            keys=KeyRing(catalogue),
            limiter=RateLimiter(),
            admission=Admission(catalogue, lambda name: False, self.dispatcher.rank_models),
            dispatcher=self.dispatcher,
            records=self.records,
            counter=TokenCounter(self.registry, None),
            limits=self.limits,
        )

    def link(self, *models: str, slots: int = 1, paths: set[str] | None = None) -> FakeLink:
        link = FakeLink(*models or ("m",), slots=slots)
        link.stale_after_s = link.offline_after_s = 600.0  # nobody says for it that it is there
        if paths is not None:
            link.endpoints = {model: frozenset(paths) for model in link.models}
        self.registry.add(link)
        return link

    def ask(self, key: str = "", /, *, surface: Surface = CHAT, **fields: object) -> Request:
        """Send a request, a chat request if nothing else is said."""
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

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = json.loads(self.client.body)["error"]
        return error

    async def record(self, *columns: str) -> tuple[object, ...]:
        """Return columns of its row, once it is final."""
        row_id = parse_id("req", self.client.headers["x-request-id"])
        return await self.gateway_record(row_id, *columns)

    async def gateway_record(self, row_id: uuid.UUID | None, *columns: str) -> tuple[object, ...]:
        query = f"SELECT {', '.join(columns)} FROM gateway_requestrecord WHERE id = %s AND finished_at IS NOT NULL"
        async with asyncio.timeout(30):
            while (row := self.gateway.rows.execute(query, [row_id]).fetchone()) is None:
                await asyncio.sleep(0.005)
        return row


@pytest.fixture
async def make_gateway(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Gateway]]:
    """Makes gateways whose database may be slow, for that is not the subject, and lets nothing of them outlive the test."""
    set_limits(core={"database_s": DATABASE_S})
    set_limits(gateway={"keeping_s": DATABASE_S})
    made: list[Gateway] = []

    def make(**options: Any) -> Gateway:
        made.append(Gateway(rows, **options))
        return made[-1]

    yield make
    for gateway in made:
        assert all(link.active == 0 for link in gateway.registry)
        assert gateway.dispatcher.depth == 0
        await gateway.records.stop()
    async with asyncio.timeout(DATABASE_S):
        while threads._room.taken:  # what nobody waits for any more may still be written
            await asyncio.sleep(0.005)


Make = Callable[..., Gateway]


async def test_an_answer_and_its_record(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(max_tokens=9)
    stream = await request.on(link)
    assert gateway.rows.execute("SELECT state, node_name FROM gateway_requestrecord").fetchall()
    stream.answer(ANSWER)
    await request.done()
    assert (request.client.status, request.client.body) == (200, ANSWER)
    assert request.client.headers["x-ratelimit-remaining-requests"] == "999"
    row = await request.record(
        "state", "status_code", "node_name", "attempts", "prompt_tokens", "completion_tokens", "tokens_estimated", "max_tokens"
    )
    assert row == ("completed", 200, link.node_name, 1, 3, 4, False, 9)
    created, finished = await request.record("created_at", "finished_at")
    assert isinstance(created, datetime)
    assert isinstance(finished, datetime)
    assert created <= finished


@pytest.mark.parametrize("streams", [True, False])
async def test_the_last_bytes_wait_until_the_records_end_is_sent_and_never_long(make_gateway: Make, *, streams: bool) -> None:
    gateway = make_gateway()
    link = gateway.link(slots=2)
    first, second = requests = gateway.ask(stream=streams), gateway.ask(stream=streams)
    await first.client.wait(lambda: len(link.streams) == 2)

    def list_states() -> set[object]:
        return {row[0] for row in gateway.rows.execute("SELECT state FROM gateway_requestrecord").fetchall()}

    async with asyncio.timeout(30):
        while list_states() != {"running"}:
            await asyncio.sleep(0.005)
    with psycopg.connect(gateway.rows.info.dsn, password=gateway.rows.info.password) as other:
        other.execute("SELECT 1 FROM gateway_requestrecord FOR UPDATE")
        answered_at = 0.0
        for request, stream in zip(requests, list(link.streams), strict=True):
            answered_at = time.monotonic()
            stream.answer(b"data: [DONE]\n\n" if streams else ANSWER, headers=SSE if streams else None)
            if request is first:
                await request.done()  # sent is enough: that the row is locked holds nobody up
        await second.done()  # it could not be sent meanwhile, and a slow database holds no answer for long
        assert time.monotonic() - answered_at >= 0.2
        assert first.client.is_whole
        assert second.client.is_whole
        assert list_states() == {"running"}
    async with asyncio.timeout(30):
        while list_states() != {"completed"}:
            await asyncio.sleep(0.005)


async def test_an_engines_error_is_passed_on_and_recorded_as_a_failure(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask()
    (await request.on(link)).answer(b'{"error":{"message":"oom"}}', status=500)
    await request.done()
    assert (request.client.status, request.client.body) == (500, b'{"error":{"message":"oom"}}')
    assert await request.record("state", "status_code", "error_code") == ("failed", 500, "FORWARDED_REQUEST_FAILED")


async def test_a_lost_box_before_the_first_byte_is_another_boxs_turn(make_gateway: Make) -> None:
    gateway = make_gateway()
    first, second = gateway.link(), gateway.link()
    request = gateway.ask()
    await request.on(first)
    gateway.registry.remove(first)
    (await request.on(second)).answer(ANSWER)
    await request.done()
    assert request.client.status == 200
    assert await request.record("state", "attempts", "node_name") == ("completed", 2, second.node_name)


async def test_after_three_more_boxes_it_is_given_up(make_gateway: Make) -> None:
    gateway = make_gateway()
    request = gateway.ask()
    for _ in range(4):
        link = gateway.link()
        await request.on(link)
        gateway.registry.remove(link)
    await request.done()
    assert (request.client.status, request.error["code"]) == (503, "REQUEST_INTERRUPTED")
    assert await request.record("state", "attempts") == ("interrupted", 4)


async def test_a_busy_box_costs_no_attempt_of_the_four(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask()
    for _ in range(6):
        (await request.on(link)).end(EndKind.BUSY)
    (await request.on(link)).answer(ANSWER)
    await request.done()
    assert request.client.status == 200
    assert await request.record("state", "attempts") == ("completed", 7)


@pytest.mark.parametrize("streams", [False, True])
async def test_what_full_nodes_refuse_goes_to_another_node_then_to_a_fallback_then_back_to_the_caller(
    make_gateway: Make, *, streams: bool
) -> None:
    gateway = make_gateway(models={"m": ("other",), "other": ()})
    first, second, fallback = gateway.link("m"), gateway.link("m"), gateway.link("other")
    request = gateway.ask(stream=streams)
    (await request.on(first)).end(EndKind.BUSY, retry_after_s=7.0)
    (await request.on(second)).end(EndKind.BUSY, retry_after_s=7.0)
    stream = await request.on(fallback)
    assert stream.request.model == "other"
    stream.end(EndKind.BUSY, retry_after_s=7.0)
    await request.done()
    assert (request.client.status, request.error["code"]) == (503, "NO_AVAILABLE_NODE")
    assert request.client.headers["retry-after"] == "7"
    assert await request.record("state", "attempts") == ("failed", 3)
    assert all(link.busy_until > time.monotonic() + 1 for link in (first, second, fallback))


async def test_what_a_full_node_refused_waits_for_a_node_that_is_at_work(make_gateway: Make) -> None:
    gateway = make_gateway()
    first = gateway.link()
    running = gateway.ask()
    await running.on(first)
    full = gateway.link()
    request = gateway.ask()
    (await request.on(full)).end(EndKind.BUSY, retry_after_s=60.0)
    (await running.on(first)).answer(ANSWER)
    await running.done()
    (await request.on(first)).answer(ANSWER)
    await request.done()
    assert request.client.status == 200


async def test_a_stream_that_broke_is_told_and_recorded(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(stream=True)
    stream = await request.on(link)
    stream.answer(b"data: 1\n\n", headers=SSE, ends=False)
    gateway.registry.remove(link)
    await request.done()
    assert request.client.body.count(b"REQUEST_INTERRUPTED") == 1
    assert await request.record("state", "error_code") == ("interrupted", "REQUEST_INTERRUPTED")


@pytest.mark.parametrize("moment", ["queued", "waiting", "streaming"])
async def test_a_client_that_leaves_is_recorded_as_cancelled(make_gateway: Make, moment: str) -> None:
    gateway = make_gateway()
    link = gateway.link() if moment != "queued" else None
    request = gateway.ask(stream=True)
    if link is None:
        await request.client.wait(lambda: gateway.dispatcher.depth)
    else:
        stream = await request.on(link)
        if moment == "streaming":
            stream.answer(b"data: 1\n\n", headers=SSE, ends=False)
    ((row_id,),) = gateway.rows.execute("SELECT id FROM gateway_requestrecord").fetchall()
    request.client.leave()
    await request.done()
    row = await request.gateway_record(uuid.UUID(str(row_id)), "state", "error_code", "status_code")
    assert row == ("cancelled", "CLIENT_CLOSED_REQUEST", 499)


async def test_a_client_that_reads_late_is_waited_for_before_the_end(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(stream=True)
    stream = await request.on(link)
    request.client.reading.clear()
    stream.answer(b"data: 1\n\n", b"data: [DONE]\n\n", headers=SSE)
    assert link.active == 0  # the slot does not wait for the client
    for _ in range(5):
        await asyncio.sleep(0)
    assert not request.task.done()
    request.client.reading.set()
    await request.done()
    assert request.client.is_whole
    assert await request.record("state") == ("completed",)


async def test_a_task_that_is_cancelled_as_its_slot_is_granted_gives_it_back(make_gateway: Make) -> None:
    gateway = make_gateway()
    request = gateway.ask()
    await request.client.wait(lambda: gateway.dispatcher.depth)
    link = gateway.link()
    assert link.active == 1
    request.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request.task
    assert link.active == 0


REFUSALS: list[tuple[dict[str, object], int, str]] = [
    ({"model": "nobody"}, 404, "MODEL_NOT_ALLOWED"),
    ({"model": "a\x00b"}, 400, "BAD_REQUEST"),
    ({"messages": []}, 400, "BAD_REQUEST"),
    ({"max_tokens": 10**40}, 400, "MAX_TOKENS_TOO_LARGE"),
    ({"max_tokens": 2**31}, 400, "MAX_TOKENS_TOO_LARGE"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, 400, "PROMPT_TOO_LARGE"),
]


@pytest.mark.parametrize(("fields", "status", "code"), REFUSALS, ids=lambda value: str(value)[:20])
async def test_a_refusal_is_said_and_recorded_and_harms_nobody(
    make_gateway: Make, fields: dict[str, Any], status: int, code: str
) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask(**fields)
    await request.done()
    assert (request.client.status, request.error["code"]) == (status, code)
    assert await request.record("state", "status_code", "error_code") == ("rejected", status, code)
    other = gateway.ask()
    (await other.on(link)).answer(ANSWER)
    await other.done()
    assert await other.record("state") == ("completed",)
    assert gateway.records.is_healthy


async def test_an_unknown_key_is_refused_without_a_record(make_gateway: Make) -> None:
    gateway = make_gateway()
    request = gateway.ask("sk-x")
    await request.done()
    assert (request.client.status, request.error["code"]) == (401, "INVALID_API_KEY")
    assert request.client.headers["www-authenticate"] == "Bearer"
    assert gateway.rows.execute("SELECT count(*) FROM gateway_requestrecord").fetchone() == (0,)


async def test_a_key_over_its_rate_is_told_when_to_come_back(make_gateway: Make) -> None:
    gateway = make_gateway(per_minute=1)
    link = gateway.link()
    first = gateway.ask()
    (await first.on(link)).answer(ANSWER)
    await first.done()
    second = gateway.ask()
    await second.done()
    assert (second.client.status, second.error["code"]) == (429, "RATE_LIMITED")
    assert 1 <= int(second.client.headers["retry-after"]) <= 60
    assert second.client.headers["x-ratelimit-remaining-requests"] == "0"


async def test_a_full_queue_refuses_before_anything_is_accepted(make_gateway: Make) -> None:
    gateway = make_gateway(max_queue=1)
    link = gateway.link()
    running = gateway.ask()
    stream = await running.on(link)
    waiting = gateway.ask()
    await waiting.client.wait(lambda: gateway.dispatcher.depth)
    refused = gateway.ask()
    await refused.done()
    assert (refused.client.status, refused.error["code"]) == (503, "NO_AVAILABLE_NODE")
    assert "retry-after" in refused.client.headers
    assert await refused.record("state") == ("rejected",)
    stream.answer(ANSWER)
    (await waiting.on(link)).answer(ANSWER)
    await asyncio.gather(running.done(), waiting.done())


async def test_nobody_to_serve_the_model_is_said_after_a_short_wait(make_gateway: Make) -> None:
    gateway = make_gateway(limits=GatewayLimits(no_node_wait_s=0.5))
    request = gateway.ask()
    await request.done()
    assert (request.client.status, request.error["code"]) == (503, "NO_AVAILABLE_NODE")
    assert await request.record("state") == ("failed",)


async def test_stopping_sends_the_waiting_away_and_takes_nothing_new(make_gateway: Make) -> None:
    gateway = make_gateway()
    waiting = gateway.ask()
    await waiting.client.wait(lambda: gateway.dispatcher.depth)
    gateway.pipeline.is_stopping = True
    gateway.dispatcher.fail_waiting(ShuttingDown(retry_after_s=2))
    late = gateway.ask()
    await asyncio.gather(waiting.done(), late.done())
    assert [request.client.status for request in (waiting, late)] == [503, 503]
    assert await waiting.record("state") == ("interrupted",)


async def test_usage_beyond_all_reason_is_clamped(make_gateway: Make) -> None:
    gateway = make_gateway()
    link = gateway.link()
    request = gateway.ask()
    (await request.on(link)).answer(b'{"usage":{"prompt_tokens":-5,"completion_tokens":%d}}' % 10**30)
    await request.done()
    assert await request.record("state", "prompt_tokens", "completion_tokens") == ("completed", 0, 2**31 - 1)


async def test_many_requests_over_boxes_that_come_and_go_all_end_in_one_state(make_gateway: Make) -> None:
    gateway = make_gateway(max_queue=1000)
    requests = [gateway.ask(stream=number % 2 == 0) for number in range(120)]
    pending = {request.task for request in requests}
    turn = 0
    while pending:
        links = [link for link in gateway.registry if isinstance(link, FakeLink)]
        if len(links) < 3:
            links.append(gateway.link(slots=3))
        turn += 1
        for link in links:
            for stream in list(link.streams)[: 1 + turn % 3]:
                stream.answer(ANSWER)
        if turn % 7 == 0:
            gateway.registry.remove(links[turn % len(links)])
        if turn % 5 == 0 and turn < 60:
            requests[turn].client.leave()
        await asyncio.sleep(0.001)
        pending = {task for task in pending if not task.done()}
    await asyncio.gather(*(request.task for request in requests))
    async with asyncio.timeout(30):
        while gateway.records.pending:
            await asyncio.sleep(0.005)
    await gateway.records.stop()
    states = [state for (state,) in gateway.rows.execute("SELECT state FROM gateway_requestrecord").fetchall()]
    assert len(states) == 120
    assert set(states) <= {"completed", "cancelled", "interrupted"}
    assert states.count("completed") > 80
