"""Hard budgets over real HTTP: three gateway processes on one PostgreSQL and Valkey, which stays, is killed or stands still."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any  # bodies are JSON

import psutil
import psycopg
import pytest

from tests.fakes.control_process import standing_still
from tests.fakes.http_client import Reply, call
from tests.fakes.lab import CHAT, Lab, bearer, chat_body, unique
from tests.fakes.scripted_box import ScriptedBox, Stream
from tests.fakes.stack import Gateway, Stack, run_stack
from tests.fakes.waiting import eventually, takes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REQUESTS, ANSWER_TOKENS, SMALL_TOKENS = 200, 100, 40
BUDGET = 10_000
VALKEY = ("valkey-server", "redis-server")
_SPENT = """
SELECT (SELECT coalesce(sum(tokens), 0) FROM gateway_usageevent WHERE key_name = %(key)s)::bigint,
       (SELECT coalesce(sum(reserved_tokens), 0) FROM gateway_requestrecord
         WHERE key_name = %(key)s AND state IN ('queued', 'assigned', 'running'))::bigint
"""


@dataclass(frozen=True)
class Key:
    name: str
    text: str


@dataclass(frozen=True)
class Town:
    """A stack with three gateways, a node at each, and one model."""

    lab: Lab
    gateways: list[Gateway]
    model: str

    async def make_key(self, **budgets: int) -> Key:
        """Return a key of a tenant with these budgets once all gateways know it: one that asks for too much is told so."""
        name, operate = unique("budget"), self.lab.operate
        operate("gateway.services.tenants.create_tenant", name=name)
        operate("gateway.services.tenants.change_tenant_budgets", name=name, budgets={"$budgets": budgets})
        made = Key(name, str(operate("gateway.services.keys.create_api_key", name=name, tenant_name=name)[1]))

        async def is_known() -> bool:
            asked = (self.ask(made, number, tokens=budgets["tokens_per_day"] + 1) for number in range(len(self.gateways)))
            return all(reply.status == 429 for reply in await asyncio.gather(*asked))

        await eventually(is_known, what="all gateways know the key")
        return made

    async def serve_all(self) -> None:
        """Wait until every gateway serves a key with a budget that nobody holds yet."""
        key = await self.make_key(tokens_per_day=BUDGET)

        async def is_served() -> bool:
            asked = (self.ask(key, number, tokens=1) for number in range(len(self.gateways)))
            return all(reply.status == 200 for reply in await asyncio.gather(*asked))

        await eventually(is_served, within_s=60, what="all gateways serve")

    async def read_spent(self, key: Key) -> tuple[int, int]:
        """Return what events say a key used, and what its open requests have reserved; one statement sees both."""
        async with await psycopg.AsyncConnection.connect(self.lab.stack.ready.database_url) as database:
            used, reserved = await (await database.execute(_SPENT, {"key": key.name})).fetchone() or (0, 0)
        return used, reserved

    async def ask(self, key: Key, number: int, *, tokens: int = ANSWER_TOKENS) -> Reply:
        url = self.gateways[number % len(self.gateways)].url + CHAT
        headers = {**bearer(key.text), "content-type": "application/json"}
        return await call("POST", url, headers=headers, body=chat_body(self.model, "count", max_tokens=tokens), within_s=60)


@pytest.fixture(scope="module")
def thrifty() -> Iterator[tuple[Stack, list[Gateway]]]:
    with (
        run_stack("thrifty", {"MUSTER_RATE_LIMIT_RPM": "1000000", "MUSTER_QUEUE_TIMEOUT_S": "60"}) as stack,
        ExitStack() as more,
    ):
        others = [more.enter_context(stack.lend_gateway(f"thrifty-{number}", {})) for number in (1, 2)]
        yield stack, [stack.main, *others]


@pytest.fixture
async def town(thrifty: tuple[Stack, list[Gateway]]) -> AsyncIterator[Town]:
    stack, gateways = thrifty
    lab = Lab(stack, stack.ready.worker_secret, stack.main)
    try:
        model = await lab.model(*gateways)
        boxes = [await lab.box(model, max_concurrent=40, gateway=gateway) for gateway in gateways]
        async with asyncio.TaskGroup() as answering:
            tasks = [answering.create_task(answer_all(box, number)) for number, box in enumerate(boxes)]
            yield Town(lab, gateways, model)
            for task in tasks:
                task.cancel()
    finally:
        await lab.close()


async def answer_all(box: ScriptedBox, seed: int) -> None:
    """Answer whatever is asked, with usage of up to what was asked for."""
    draw = random.Random(seed)
    async with asyncio.TaskGroup() as answers:
        while True:
            stream = await box.stream(within_s=600)
            answers.create_task(answer(box, stream, draw.randint(20, ANSWER_TOKENS)))


async def answer(box: ScriptedBox, stream: Stream, tokens: int) -> None:
    most = json.loads(bytes(stream.body))["max_tokens"]
    usage = {"prompt_tokens": 5, "completion_tokens": min(tokens, most), "total_tokens": 5 + min(tokens, most)}
    await takes(0.2)
    choice = {"index": 0, "message": {"role": "assistant", "content": "1"}, "finish_reason": "stop"}
    body: dict[str, Any] = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": usage,
    }
    await box.answer(stream, json.dumps(body).encode())


@asynccontextmanager
async def valkey_is(stack: Stack, state: str) -> AsyncIterator[None]:
    """Kill Valkey again whenever it is back, or have it stand still, until the block ends."""
    if state == "there":
        yield
        return
    if state == "standing still":
        await eventually(lambda: stack.find_part(*VALKEY), "the one that was killed before is back")
        with standing_still(stack.part(*VALKEY)):
            yield
        return

    async def kill() -> None:
        while True:
            found = stack.find_part(*VALKEY)
            if found is not None:
                try:
                    found.kill()
                except psutil.NoSuchProcess:
                    continue
            await takes(0.05)

    killing = asyncio.create_task(kill())
    try:
        yield
    finally:
        killing.cancel()
        await asyncio.gather(killing, return_exceptions=True)


@pytest.mark.parametrize("state", ["there", "killed", "standing still"])
async def test_200_requests_at_once_never_overspend_a_hard_budget(town: Town, state: str) -> None:
    """At no moment more is used and reserved than the budget, and what one gateway does not use another one gets."""
    await town.serve_all()
    key, most, is_over = await town.make_key(tokens_per_day=BUDGET), 0, asyncio.Event()

    async def watch() -> None:
        nonlocal most
        while not is_over.is_set():
            most = max(most, sum(await town.read_spent(key)))
            await takes(0.01)

    watching, began = asyncio.create_task(watch()), time.monotonic()
    asking = [asyncio.create_task(town.ask(key, number)) for number in range(REQUESTS // 2)]
    async with valkey_is(town.lab.stack, state):
        asking += [asyncio.create_task(town.ask(key, number)) for number in range(REQUESTS // 2)]
        replies = await asyncio.gather(*asking)
        took_s = time.monotonic() - began
        later = await use_up(town, key)
    await town.lab.settled(town.model)
    is_over.set()
    await watching
    used, reserved = await town.read_spent(key)
    counts = Counter(reply.status for reply in replies)
    print(
        f"\nValkey {state}: {REQUESTS} requests in {took_s:.1f} s, answers {dict(counts)}, used {used} of {BUDGET},"
        f" most used and reserved {most}, answers until it was used up {dict(later)}"
    )
    assert max(most, used) <= BUDGET
    assert reserved == 0
    assert set(counts) <= {200, 429, 503}
    assert counts[200] > BUDGET // 3 // (ANSWER_TOKENS + 20)
    assert used > BUDGET - SMALL_TOKENS - 20, "no gateway stops while another one holds what it could use"


async def use_up(town: Town, key: Key) -> Counter[int]:
    """Ask every gateway for a little more until all are refused; return the statuses of the answers."""
    statuses: Counter[int] = Counter()
    while True:
        asked = (town.ask(key, number, tokens=SMALL_TOKENS) for number in range(2 * len(town.gateways)))
        some = Counter(reply.status for reply in await asyncio.gather(*asked))
        statuses += some
        if set(some) == {429}:
            return statuses


async def test_a_limit_of_requests_a_minute_is_exact_over_three_gateways(town: Town) -> None:
    limit = 300
    await town.serve_all()
    key = await town.make_key(all_requests_per_minute=limit, tokens_per_day=20_000)
    began = time.monotonic()
    replies = await asyncio.gather(*(town.ask(key, number, tokens=1) for number in range(limit + 100)))
    took_s = time.monotonic() - began
    counts = Counter(reply.status for reply in replies)
    print(f"\n{limit + 100} requests in {took_s:.1f} s against {limit} a minute: {dict(counts)}")
    assert took_s < 60
    assert counts == {200: limit, 429: 100}
