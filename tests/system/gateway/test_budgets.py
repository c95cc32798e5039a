"""Budgets that several gateways share, over a real Valkey: never overspent, whatever ends, leaves or is away."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import redis
import redis.asyncio
from django.db import connections
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from controlplane.launcher.valkey import Valkey as ValkeyServer
from gateway.errors import BudgetExhausted, BudgetUnknown, GatewayError
from gateway.request.budgets import Budgets, Reservation, Valkey
from gateway.request.records import RecordWriter
from gateway.services.usage import Spent
from gateway.values import Budget, BudgetKind, Caller, Counter, OwnedBudget, Price, find_window
from nodes.links import EndKind
from tests.fakes.limits import set_limits
from tests.fakes.pipeline import REPLY, SSE, Make, Rows, chunk, give_budget, make_record
from tests.fakes.servers import RunningServer
from wire.contract import RequestState

T = TypeVar("T")
SOON_S = 1.0
"""Two rounds and more: until then what one gateway gave back is known to all."""
DAY, RATE, AT_ONCE = BudgetKind.TOKENS_PER_DAY, BudgetKind.ALL_REQUESTS_PER_MINUTE, BudgetKind.CONCURRENT_REQUESTS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = Path(tmp_path_factory.mktemp("v", numbered=True))
    running = RunningServer("Valkey", ValkeyServer(sockets=root), root / "valkey.log")
    running.start()
    yield running
    running.stop()


class FaultyClient(redis.asyncio.Redis):
    """A client that loses answers: ``loses`` = "after" it is carried out, or "before"."""

    loses = ""

    async def eval(self, *args: Any) -> Any:
        loses, self.loses = self.loses, ""
        answer = None if loses == "before" else await cast("Any", super().eval(*args))
        if loses:
            raise redis.exceptions.ConnectionError("the answer is lost")
        return answer


class Crowd:
    """Gateways on one Valkey, and what those used that are gone: this stands for PostgreSQL."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.alive: dict[uuid.UUID, Budgets] = {}
        self.gone: dict[uuid.UUID, int] = {}
        self.clients: list[FaultyClient] = []
        self.tasks: dict[Budgets, asyncio.Task[None]] = {}

    def add(self) -> Budgets:
        gateway_id = uuid.uuid4()
        client = cast("FaultyClient", FaultyClient.from_url(self.url, socket_timeout=5.0))
        self.clients.append(client)
        budgets = Budgets(
            gateway_id=gateway_id, valkey=cast("Valkey", client), spending=self, in_thread=self._call,
            find_others=lambda: self.alive.keys() - {gateway_id}, currency="EUR",
        )  # fmt: skip
        self.alive[gateway_id] = budgets
        return budgets

    def kill(self, budgets: Budgets, used: int) -> None:
        (gateway_id,) = (known for known, one in self.alive.items() if one is budgets)
        if budgets in self.tasks:
            self.tasks[budgets].cancel()
        del self.alive[gateway_id]
        self.gone[gateway_id] = used

    def sum_before(self, counter: Counter, *, without: Collection[uuid.UUID]) -> int | None:
        if self.alive.keys() - set(without):
            return None
        return sum(used for gateway_id, used in self.gone.items() if gateway_id not in without)

    def sum_of_gone(self, counter: Counter, gateway_id: uuid.UUID) -> int | None:
        return self.gone.get(gateway_id)

    async def close(self) -> None:
        for client in self.clients:
            await client.aclose()

    async def _call(self, function: Callable[..., T], *args: Any, **named: Any) -> T:
        return function(*args, **named)


@asynccontextmanager
async def crowd_of(server: RunningServer, number: int) -> AsyncIterator[tuple[Crowd, list[Budgets]]]:
    """Gateways that run, on a Valkey that knows nothing yet."""
    if server.process is None:
        server.start()
    with redis.Redis.from_url(server.server.url) as client:
        client.flushall()
    crowd = Crowd(server.server.url)
    budgets = [crowd.add() for _ in range(number)]
    crowd.tasks = {one: asyncio.create_task(one.run()) for one in budgets}
    try:
        yield crowd, budgets
    finally:
        for task in crowd.tasks.values():
            task.cancel()
        await asyncio.gather(*crowd.tasks.values(), return_exceptions=True)
        await crowd.close()


def caller_of(*budgets: Budget) -> Caller:
    return Caller(
        key_id=uuid.uuid4(), key_name="k", tenant="t", requests_per_minute=1, allowed_models=frozenset(),
        budgets=tuple(OwnedBudget("tenant:t", "the tenant t", one) for one in budgets),
    )  # fmt: skip


async def reserve(budgets: Budgets, caller: Caller, tokens: int = 150) -> Reservation:
    draft = budgets.draft(caller, prompt_tokens=0, completion_tokens=tokens, prices={"m": Price(0, 0, 10**12)})
    await budgets.reserve(draft)
    return draft


@pytest.mark.parametrize("is_killed", [False, True], ids=["valkey stays", "valkey is killed"])
async def test_a_crowd_over_three_gateways_never_overspends(server: RunningServer, *, is_killed: bool) -> None:
    """200 requests that may use 30,000 tokens, against 10,000; at no moment more is used and reserved than that."""
    chance, caller = random.Random(7), caller_of(Budget(DAY, 10_000))
    held = most = served = 0
    async with crowd_of(server, 3) as (_crowd, gateways):

        async def ask(number: int) -> None:
            nonlocal held, most, served
            await asyncio.sleep(chance.random() * 1.5)
            try:
                reservation = await reserve(gateways[number % 3], caller)
            except (BudgetExhausted, BudgetUnknown):
                return
            held += 150
            most, served = max(most, held), served + 1
            await asyncio.sleep(chance.random() / 2)
            used = chance.randint(20, 150)
            reservation.settle(completion_tokens=used)
            held -= 150 - used

        requests = [asyncio.create_task(ask(number)) for number in range(200)]
        if is_killed:
            await asyncio.sleep(0.7)
            server.kill()
        await asyncio.gather(*requests)
    assert most <= 10_000
    assert served >= 66 if not is_killed else served > 10
    if not is_killed:
        assert held > 10_000 - 3 * 150, "what one gateway does not use another one gets"


async def test_a_rate_over_three_gateways_is_exact(server: RunningServer) -> None:
    caller, passed = caller_of(Budget(RATE, 1000)), 0
    async with crowd_of(server, 3) as (_crowd, gateways):

        async def flood(budgets: Budgets) -> None:
            nonlocal passed
            for _ in range(900):
                try:
                    (await reserve(budgets, caller)).settle()
                    passed += 1
                except BudgetExhausted:
                    await asyncio.sleep(0.002)

        await asyncio.gather(*map(flood, gateways))
    assert passed == 1000


async def test_requests_at_a_time_are_counted_over_all_and_given_back(server: RunningServer) -> None:
    caller = caller_of(Budget(AT_ONCE, 3))
    async with crowd_of(server, 2) as (_crowd, (one, other)):
        taken = [await reserve(one, caller), await reserve(one, caller), await reserve(other, caller)]
        with pytest.raises(BudgetExhausted, match="as soon as one of them ends"):
            await reserve(other, caller)
        taken[0].settle()
        await asyncio.sleep(SOON_S)
        await reserve(other, caller)


async def test_a_new_valkey_is_dealt_out_of_once_all_have_said_what_they_hold(server: RunningServer) -> None:
    caller = caller_of(Budget(DAY, 1000))
    async with crowd_of(server, 3) as (crowd, (one, other, third)):
        await reserve(one, caller, 400)
        crowd.kill(third, 200)
        server.kill()
        server.start()
        await asyncio.sleep(SOON_S)
        with pytest.raises(BudgetExhausted):
            await reserve(other, caller, 401)
        await reserve(other, caller, 400)
        with pytest.raises(BudgetExhausted):
            await reserve(one, caller, 1)


async def test_what_a_gateway_used_that_is_gone_stays_used_and_the_rest_is_free(server: RunningServer) -> None:
    set_limits(gateway={"sweep_s": 0.1})
    caller = caller_of(Budget(DAY, 1000))
    async with crowd_of(server, 2) as (crowd, (one, other)):
        await reserve(one, caller, 600)
        with pytest.raises(BudgetExhausted):
            await reserve(other, caller, 500)
        crowd.kill(one, 450)
        await asyncio.sleep(SOON_S)
        await reserve(other, caller, 550)
        with pytest.raises(BudgetExhausted):
            await reserve(other, caller, 1)


@pytest.mark.parametrize(
    ("budget", "tokens", "words"),
    [
        (Budget(DAY, 0), 10, "The tenant t may use nothing: its budget is 0 tokens per day. An operator can raise it."),
        (Budget(DAY, 0), 0, "may use nothing"),
        (Budget(DAY, 100), 101, "up to 101 tokens per day with its prompt and max_tokens, and the tenant t has 100"),
        (Budget(BudgetKind.COST_PER_MONTH, 2_500_000), 10, r"up to 10 EUR a month .* has 2\.5 EUR a month"),
    ],
)
async def test_a_refusal_says_which_budget_of_whom(server: RunningServer, budget: Budget, tokens: int, words: str) -> None:
    async with crowd_of(server, 1) as (_crowd, (one,)):
        with pytest.raises(BudgetExhausted, match=words) as refused:
            await reserve(one, caller_of(budget), tokens)
        assert refused.value.status == 429
        assert refused.value.retry_after_s


async def test_without_valkey_a_budget_nobody_holds_is_not_guessed_at(server: RunningServer) -> None:
    async with crowd_of(server, 2) as (_crowd, (one, _other)):
        await asyncio.sleep(0.1)
        server.kill()
        await asyncio.sleep(2.5)
        with pytest.raises(BudgetUnknown):
            await reserve(one, caller_of(Budget(DAY, 1000)))
        passed = 0
        with suppress(GatewayError):
            while passed < 100:
                await reserve(one, caller_of(Budget(RATE, 50)))
                passed += 1
        assert passed == 25, "of two gateways each lets half of a rate pass"


@pytest.mark.parametrize("ending", ["completed", "failed", "left", "interrupted"])
async def test_whatever_ends_a_request_settles_it_once(make_gateway: Make, ending: str) -> None:
    gateway = make_gateway(models={"m": ()})
    share, link = give_budget(gateway, 1000), gateway.link("m")
    request = gateway.ask(max_tokens=20, stream=ending == "interrupted", n=2)
    await request.on(link)
    assert (share.used, share.open) == (45, 1), "two characters make a token, a message four more, and twice max_tokens"
    match ending:
        case "completed":
            await request.served(link, REPLY)
        case "failed":
            await request.served(link, b'{"error":{"message":"no"}}', status=400)
        case "left":
            request.client.leave()
            await request.done()
        case _:
            link.streams[0].answer(chunk({"content": "x"}), headers=SSE, ends=False)
            link.streams[0].end(EndKind.LINK_LOST)
            await request.done()
    assert (share.used, share.open) == (7 if ending == "completed" else 0, 0)


async def test_a_refusal_for_a_budget_is_said_with_its_end_and_leaves_nothing(make_gateway: Make) -> None:
    gateway = make_gateway()
    share, _link = give_budget(gateway, 20), gateway.link("m")
    request = gateway.ask(max_tokens=20)
    await request.done()

    assert request.client.status == 429
    assert "the key k has 20 tokens per day in all" in request.error["message"]
    assert 0 < int(request.client.headers["retry-after"]) <= 86_400
    assert (share.used, share.open) == (0, 0)
    assert await request.record("state", "error_code") == ("rejected", "RATE_LIMITED")


WORDS = ["reserve"] * 6 + ["round"] * 3 + ["settle"] * 2 + ["kill", "flush", "start", "lose", "cut"]
STEPS = st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 5)), min_size=25, max_size=50)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_spent_and_reserved_is_never_more_than_the_budget(server: RunningServer, steps: list[tuple[str, int]]) -> None:
    """Whatever gateways reserve, settle, give back, whoever is killed, and whenever Valkey forgets or an answer is lost."""
    asyncio.run(_play(server, steps))


async def _play(server: RunningServer, steps: list[tuple[str, int]]) -> None:
    if server.process is None:
        server.start()
    with redis.Redis.from_url(server.server.url) as client:
        client.flushall()
        play = Play(Crowd(server.server.url), client.flushall)
        for _ in range(2):
            await play.crowd.add().hold_round()
        for step, number in steps:
            await play.take(step, number)
            assert play.spent <= play.AMOUNT
    await play.crowd.close()


class Play:
    """One budget, and what was spent and is reserved of it by gateways that live and that were killed."""

    AMOUNT = 1000

    def __init__(self, crowd: Crowd, flush: Callable[[], object]) -> None:
        self.crowd, self.flush = crowd, flush
        self.caller = caller_of(Budget(DAY, self.AMOUNT))
        self.spent = 0
        self.open: list[tuple[Budgets, Reservation, int]] = []
        self.used: dict[Budgets, int] = {}

    async def take(self, step: str, number: int) -> None:
        living = list(self.crowd.alive.values())
        budgets = living[number % len(living)] if living else self.crowd.add()
        match step:
            case "reserve":
                await self.reserve(budgets, 60 * (number + 1))
            case "settle" if self.open:
                self.settle(number)
            case "round":
                await budgets.hold_round()
            case "kill":  # its requests are settled at what they reserved
                charged = self.used.get(budgets, 0) + sum(wanted for owner, _, wanted in self.open if owner is budgets)
                self.open = [one for one in self.open if one[0] is not budgets]
                self.crowd.kill(budgets, charged)
            case "flush":
                self.flush()
            case "lose" | "cut":
                self.crowd.clients[number % len(self.crowd.clients)].loses = "after" if step == "lose" else "before"
            case "start" if len(living) < 4:
                self.crowd.add()

    async def reserve(self, budgets: Budgets, wanted: int) -> None:
        """Reserve with one round at most, without the task that holds them."""
        draft = budgets.draft(self.caller, prompt_tokens=0, completion_tokens=wanted, prices={})
        ((share, _wanted),) = draft.wanted
        if draft.find_lacking(0.0):
            budgets._needs[share] = [wanted]  # what ``reserve`` leaves for the next round
            await budgets.hold_round(is_due=False)
        if not draft.find_lacking(0.0):
            draft.book(0.0)
            self.open.append((budgets, draft, wanted))
            self.spent += wanted

    def settle(self, number: int) -> None:
        owner, reservation, wanted = self.open.pop(number % len(self.open))
        used = wanted * number // 5
        reservation.settle(completion_tokens=used)
        self.spent -= wanted - used
        self.used[owner] = self.used.get(owner, 0) + used


async def test_postgresql_knows_what_gateways_used_that_are_gone(rows: Rows) -> None:
    gone, here, key_id = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
    writer = RecordWriter(accept_s=30.0, max_pending=100)
    writer.start()
    for gateway_id, state, tokens in (
        (gone, RequestState.COMPLETED, 30),
        (gone, RequestState.RUNNING, 0),
        (here, RequestState.COMPLETED, 5),
    ):
        record = make_record(gateway_id=gateway_id)
        record.tenant, record.key_id, record.prompt_tokens, record.state = "t", key_id, tokens, state
        record.reserved_tokens, record.reserved_micros = 100, 8
        await writer.accept(record)
    await writer.stop()
    now = datetime.now(UTC)
    counter = Counter("tenant:t", DAY, find_window(DAY, now))

    def look() -> list[int | None]:
        try:
            return ask()
        finally:
            connections.close_all()

    def ask() -> list[int | None]:
        spent = Spent()
        yesterday = Counter("tenant:t", DAY, find_window(DAY, now - timedelta(days=1)))
        cost = Counter("tenant:t", BudgetKind.COST_PER_MONTH, find_window(BudgetKind.COST_PER_MONTH, now))
        return [
            spent.sum_before(counter, without=[]), spent.sum_before(counter, without=[here]),
            spent.sum_before(yesterday, without=[]), spent.sum_before(cost, without=[]),
            spent.sum_of_gone(counter, gone), spent.sum_of_gone(counter, here),
        ]  # fmt: skip

    assert await asyncio.to_thread(look) == [135, 130, 0, 8, None, 5], "one of those of the gateway that is gone is still open"
    rows.execute(
        "INSERT INTO gateway_gatewayprocess (id, host, pid, internal_url, started_at, heartbeat_at)"
        " VALUES (%s, 'h', 1, '', now(), now())",
        [here],
    )
    assert await asyncio.to_thread(look) == [None, 130, None, None, None, None], (
        "what another one holds that lives is not known"
    )
