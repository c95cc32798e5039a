"""Budgets that several gateways share, over a real Valkey: never overspent, whatever ends, leaves or is away."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
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
from core.limits import limits
from gateway.errors import BudgetExhausted, BudgetUnknown
from gateway.request import budgets as budgets_module
from gateway.request.budgets import Budgets, Reservation, Valkey
from gateway.request.records import RecordWriter
from gateway.services.keys import create_api_key
from gateway.services.shares import Answer, Claim, DealerTable, Order, read_answer
from gateway.services.tenants import create_tenant
from gateway.services.usage import Spent
from gateway.values import Budget, BudgetKind, Caller, Counter, OwnedBudget, Price, find_window
from nodes.links import EndKind
from tests.fakes.budgets import MemoryTerms, MemoryValkey, write_answer
from tests.fakes.limits import set_limits
from tests.fakes.pipeline import REPLY, SSE, Make, Rows, chunk, give_budget, make_record
from tests.fakes.servers import RunningServer
from tests.fakes.waiting import eventually
from wire import clock
from wire.contract import RequestState

T = TypeVar("T")
DAY, RATE, AT_ONCE = BudgetKind.TOKENS_PER_DAY, BudgetKind.ALL_REQUESTS_PER_MINUTE, BudgetKind.CONCURRENT_REQUESTS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = Path(tmp_path_factory.mktemp("v", numbered=True))
    running = RunningServer("Valkey", ValkeyServer(sockets=root), root / "valkey.log")
    running.start()
    yield running
    running.stop()


class FaultyClient(redis.asyncio.Redis):
    """A client that loses answers: ``loses`` = "after" it is carried out, or "before". ``is_cut``: none arrives any more."""

    loses = ""
    is_cut = False
    overtaken: tuple[Any, ...] = ()
    """An order of before, which may arrive once more."""

    async def eval(self, *args: Any) -> Any:
        loses, self.loses = "before" if self.is_cut else self.loses, ""
        self.overtaken = self.overtaken or args
        answer = None if loses == "before" else await cast("Any", super().eval(*args))
        if loses:
            raise redis.exceptions.ConnectionError("the answer is lost")
        return answer


class Crowd:
    """Gateways on one Valkey; this stands for PostgreSQL, with what those used that are gone and what it dealt out itself."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.alive: dict[uuid.UUID, Budgets] = {}
        self.gone: dict[uuid.UUID, int] = {}
        self.terms = MemoryTerms()
        self.clients: list[FaultyClient] = []
        self.tasks: dict[Budgets, asyncio.Task[None]] = {}

    def add(self) -> Budgets:
        gateway_id = uuid.uuid4()
        client = cast("FaultyClient", FaultyClient.from_url(self.url, socket_timeout=5.0))
        self.clients.append(client)
        budgets = Budgets(
            gateway_id=gateway_id, valkey=cast("Valkey", client), spending=self, terms=self.terms, in_thread=self._call,
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

    def sum_before(self, counters: Collection[Counter], *, without: Collection[uuid.UUID]) -> dict[Counter, int] | None:
        if self.alive.keys() - set(without):
            return None
        used = sum(used for gateway_id, used in self.gone.items() if gateway_id not in without)
        return dict.fromkeys(counters, used)

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


async def reserve_soon(budgets: Budgets, caller: Caller, tokens: int = 150) -> None:
    """Reserve as soon as gateways and Valkey have told each other what happened."""

    async def is_reserved() -> bool:
        with suppress(BudgetExhausted, BudgetUnknown):
            await reserve(budgets, caller, tokens)
            return True
        return False

    await eventually(is_reserved)


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
        await reserve_soon(other, caller)


async def test_a_new_valkey_is_dealt_out_of_once_all_have_said_what_they_hold(server: RunningServer) -> None:
    caller = caller_of(Budget(DAY, 1000))
    async with crowd_of(server, 3) as (crowd, (one, other, third)):
        await reserve(one, caller, 400)
        crowd.kill(third, 200)
        server.kill()
        server.start()
        await reserve_soon(other, caller, 400)
        for budgets in (one, other):
            with pytest.raises(BudgetExhausted):
                await reserve(budgets, caller, 1)


async def test_what_a_gateway_used_that_is_gone_stays_used_and_the_rest_is_free(server: RunningServer) -> None:
    set_limits(gateway={"sweep_s": 0.1})
    caller = caller_of(Budget(DAY, 1000))
    async with crowd_of(server, 2) as (crowd, (one, other)):
        await reserve(one, caller, 600)
        with pytest.raises(BudgetExhausted):
            await reserve(other, caller, 500)
        crowd.kill(one, 450)
        await reserve_soon(other, caller, 550)
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


async def pass_all(gateways: list[Budgets], caller: Caller, tokens: int) -> int:
    """Have gateways take turns in reserving until none of them can; return how many reservations there are."""
    passed, left = 0, list(gateways)
    while left:
        for budgets in list(left):
            try:
                await reserve(budgets, caller, tokens)
                passed += 1
            except BudgetExhausted:
                left.remove(budgets)
    return passed


@pytest.mark.parametrize("kind", [DAY, RATE, AT_ONCE])
async def test_while_valkey_is_away_postgresql_deals_out_what_nobody_holds(server: RunningServer, kind: BudgetKind) -> None:
    """Neither stops: all of a budget is used that nobody held, by a gateway that came later too, and nothing beyond."""
    async with crowd_of(server, 2) as (crowd, gateways):
        await asyncio.sleep(0.1)
        server.kill()
        caller = caller_of(Budget(kind, 40))
        await asyncio.gather(*(reserve(one, caller, 1) for one in gateways))
        late = crowd.add()
        crowd.tasks[late] = asyncio.create_task(late.run())
        assert await pass_all([*gateways, late], caller, 1) == 38


async def test_valkey_deals_again_once_all_reach_it(server: RunningServer) -> None:
    set_limits(gateway={"budget_hello_s": 0.2})
    caller = caller_of(Budget(DAY, 1000))
    async with crowd_of(server, 2) as (_crowd, (one, other)):
        await reserve(one, caller, 100)
        server.kill()
        await reserve(other, caller, 200)
        server.start()
        await eventually(lambda: one._dealer is one._valkey and other._dealer is other._valkey)
        await reserve(one, caller, 700)
        with pytest.raises(BudgetExhausted):
            await reserve(other, caller, 1)
        server.kill()
        await reserve(other, caller_of(Budget(AT_ONCE, 1)))  # of the next term


async def test_a_gateway_that_alone_does_not_reach_valkey_goes_on(server: RunningServer) -> None:
    set_limits(gateway={"budget_hello_s": 0.2})
    caller = caller_of(Budget(DAY, 1000))
    async with crowd_of(server, 3) as (crowd, (one, other, third)):
        await reserve(one, caller, 400)
        crowd.clients[1].is_cut = True
        await reserve(other, caller, 100)
        with pytest.raises(BudgetExhausted):
            await reserve(third, caller, 501)
        await reserve(third, caller, 500)
        assert {budgets._dealer for budgets in (one, other, third)} == {one._database, other._database, third._database}


async def test_what_nobody_can_say_is_not_guessed_at(server: RunningServer) -> None:
    """One gateway of two was killed a moment ago and may still live: nobody knows what it holds, so nothing is dealt."""
    set_limits(gateway={"budget_round_s": 0.05, "budget_tries": 1})
    async with crowd_of(server, 2) as (crowd, (one, other)):
        await reserve(one, caller_of(Budget(DAY, 1000)), 100)
        server.kill()
        crowd.tasks[other].cancel()
        with pytest.raises(BudgetUnknown):
            await reserve(one, caller_of(Budget(AT_ONCE, 1000)))
        await reserve(one, caller_of(Budget(DAY, 1000)), 400)  # it goes on with what it holds


async def test_a_gateway_that_stood_still_asks_before_it_uses_what_it_held(server: RunningServer) -> None:
    caller = caller_of(Budget(DAY, 1000))
    set_limits(gateway={"sweep_s": 0.1})
    async with crowd_of(server, 2) as (crowd, (one, other)):
        await reserve(one, caller, 500)
        draft = one.draft(caller, prompt_tokens=0, completion_tokens=100, prices={})
        await eventually(lambda: not one.must_ask(draft, clock.monotonic()))
        assert one.must_ask(draft, clock.monotonic() + limits().gateway.dead_s), "nor does the fast path use it"
        gateway_id = next(known for known, budgets in crowd.alive.items() if budgets is one)
        crowd.kill(one, 500)
        await reserve_soon(other, caller, 450)
        crowd.alive[gateway_id], one._good_until = one, -math.inf
        crowd.tasks[one] = asyncio.create_task(one.run())
        with pytest.raises(BudgetExhausted):
            await reserve(one, caller, 100)


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


async def test_a_cancellation_that_a_command_swallows_ends_it_all_the_same() -> None:
    """As one does that redis-py is sending in Python 3.11; a gateway that stops waits for this task."""
    asked = asyncio.Event()

    class Swallowing(MemoryValkey):
        async def eval(self, script: str, numkeys: int, *words: str) -> Any:
            asked.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return await super().eval(script, numkeys, *words)

    crowd = Crowd("redis://nowhere")
    budgets = Budgets(
        gateway_id=uuid.uuid4(), valkey=Swallowing(), spending=crowd, terms=crowd.terms, in_thread=crowd._call,
        find_others=tuple, currency="EUR",
    )  # fmt: skip
    task = asyncio.create_task(budgets.run())
    await asked.wait()
    task.cancel()
    _, late = await asyncio.wait([task], timeout=5.0)
    assert not late


WORDS = ["reserve"] * 6 + ["round"] * 4 + ["settle"] * 2 + ["kill", "flush", "start", "lose", "drop", "cut", "mend", "overtake"]
STEPS = st.lists(st.tuples(st.sampled_from(WORDS), st.integers(0, 5)), min_size=25, max_size=50)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_spent_and_reserved_is_never_more_than_the_budget(server: RunningServer, steps: list[tuple[str, int]]) -> None:
    """Whatever gateways reserve, settle, give back, whoever is killed, and whenever Valkey forgets or an answer is lost."""
    asyncio.run(_play(server, steps))


async def _play(server: RunningServer, steps: list[tuple[str, int]]) -> None:
    set_limits(gateway={"budget_hello_s": 0.0})
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
                await budgets._ping()
            case "kill":  # its requests are settled at what they reserved
                charged = self.used.get(budgets, 0) + sum(wanted for owner, _, wanted in self.open if owner is budgets)
                self.open = [one for one in self.open if one[0] is not budgets]
                self.crowd.kill(budgets, charged)
            case "flush":
                self.flush()
            case "lose" | "drop":
                self.pick(number).loses = "after" if step == "lose" else "before"
            case "cut" | "mend":
                self.pick(number).is_cut = step == "cut"
            case "overtake" if self.pick(number).overtaken and not self.pick(number).is_cut:
                order, self.pick(number).overtaken = self.pick(number).overtaken, ()
                await cast("Any", redis.asyncio.Redis.eval(self.pick(number), *order))
            case "start" if len(living) < 4:
                self.crowd.add()

    def pick(self, number: int) -> FaultyClient:
        return self.crowd.clients[number % len(self.crowd.clients)]

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


COUNTERS = ("{muster.budgets}:a", "{muster.budgets}:b")
ORDERS = st.lists(
    st.tuples(
        st.sampled_from(["deal"] * 6 + ["begin", "absorb", "again", "flush"]),
        st.sampled_from(["g1", "g2", "g3"]),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.lists(st.tuples(*[st.integers(0, 400)] * 5), min_size=1, max_size=2),
        st.sampled_from([0, 0, 0, 0, 1, 2]),
        st.sampled_from([1.0, 2.0, 3.0, 100 / 30]),
    ),
    min_size=5,
    max_size=40,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=ORDERS)
def test_valkeys_script_and_the_rule_that_postgresql_deals_by_say_the_same(server: RunningServer, orders: list[Any]) -> None:
    asyncio.run(_compare(server, orders))


async def _compare(server: RunningServer, orders: list[Any]) -> None:
    if server.process is None:
        server.start()
    async with redis.asyncio.Redis.from_url(server.server.url) as client:
        await client.flushall()
        model, known, sent = MemoryValkey(), {"g1": "", "g2": "", "g3": ""}, None
        for number, (step, gateway, says, figures, term, parts) in enumerate(orders, 1):
            names, real = COUNTERS[: len(figures)], cast("Valkey", client)
            match step:
                case "flush":
                    await client.flushall()
                    model.epoch.clear()
                    model.counters.clear()
                    continue
                case "deal":
                    claims = [[600, used, keep, need, least, 60] for used, keep, need, least, _ in figures]
                    sent = budgets_module._DEAL, 1 + len(names), budgets_module._EPOCH, *names, gateway, f"epoch {number}", \
                        known[gateway], str(says), repr(parts), str(number), str(term), json.dumps(claims)  # fmt: skip
                case "begin":
                    sent = budgets_module._BEGIN, 2, budgets_module._EPOCH, names[0], known[gateway], str(figures[0][4])
                case "absorb":
                    other = "g1" if gateway == "g2" else "g2"
                    sent = budgets_module._ABSORB, 2, budgets_module._EPOCH, names[0], known[gateway], other, str(figures[0][4])
            if sent is None:
                continue
            said, expected = await real.eval(*sent), await model.eval(*sent)
            if sent[0] != budgets_module._DEAL:
                continue
            answer = read_answer(said)
            assert write_answer(answer) == expected
            known[gateway] = answer.epoch
        for name in COUNTERS:
            found = {key.decode(): value.decode() for key, value in (await cast("Any", client.hgetall(name))).items()}
            expected = {key: str(value) for key, value in model.counters.get(name, {}).items()}
            assert {k: v for k, v in found.items() if k[:2] != "w:"} == {k: v for k, v in expected.items() if k[:2] != "w:"}


def _make_key(tenant: str) -> uuid.UUID:
    try:
        create_tenant(name=tenant, actor="user:tests")
        return create_api_key(name="k", tenant_name=tenant, actor="user:tests")[0].pk
    finally:
        connections.close_all()


async def test_postgresql_knows_what_gateways_used_that_are_gone(rows: Rows) -> None:
    gone, here, other = uuid.uuid4(), uuid.uuid4(), uuid.uuid4()
    key_id = await asyncio.to_thread(_make_key, "t")
    writer = RecordWriter(accept_s=30.0, max_pending=100)
    writer.start()
    for gateway_id, key, state, tokens in (
        (gone, key_id, RequestState.COMPLETED, 30),
        (gone, key_id, RequestState.RUNNING, 0),
        (here, key_id, RequestState.COMPLETED, 5),
        (gone, other, RequestState.COMPLETED, 1),
    ):
        record = make_record(gateway_id=gateway_id)
        record.tenant, record.key_id, record.prompt_tokens, record.state = "t", key, tokens, state
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
        of_key, rate = Counter(f"key:{key_id}", DAY, counter.window), Counter("tenant:t", RATE, find_window(RATE, now))
        sums = [
            spent.sum_before([counter, of_key, yesterday, cost, rate], without=[]),
            spent.sum_before([counter], without=[here]),
        ]
        return [
            *(used for found in sums for used in ([None] if found is None else found.values())),
            spent.sum_of_gone(counter, gone), spent.sum_of_gone(counter, here),
        ]  # fmt: skip

    assert await asyncio.to_thread(look) == [136, 135, 0, 8, 0, 131, None, 5], (
        "one of those of the gateway that is gone is still open"
    )
    rows.execute(
        "INSERT INTO gateway_gatewayprocess (id, host, pid, internal_url, started_at, heartbeat_at)"
        " VALUES (%s, 'h', 1, '', now(), now())",
        [here],
    )
    assert await asyncio.to_thread(look) == [None, 131, None, None], "what another one holds that lives is not known"


async def test_the_table_keeps_what_the_rule_says(rows: Rows) -> None:
    """A term is opened, dealt in, closed and followed by the next one, beside the same in memory."""
    del rows
    table, memory, numbers = DealerTable(), MemoryTerms(), itertools.count(1)

    def order(gateway: str, known: str, *, says: int = 0, term: int = 1, **claims: Claim) -> Order:
        number = next(numbers)
        return Order(
            gateway=gateway,
            new_id=f"epoch {number}",
            known_id=known,
            says=says,
            parts=2,
            number=number,
            term=term,
            claims=claims,
        )

    def play() -> list[tuple[object, object]]:
        compared: list[tuple[object, object]] = [(table.read_term(), memory.read_term())]

        def ask(asked: Order, *, reaches: bool = False) -> Answer:
            said = [one.deal(asked, now=5, reaches=reaches, living={"g1", "g2"}) for one in (table, memory)]
            compared.append((said[0], said[1]))
            compared.append((table.read_term(), memory.read_term()))
            return said[0]

        id_ = ask(order("g1", "")).epoch
        ask(order("g1", id_, says=1, a=Claim(100, 10, 5, 20, 1, 60)))
        ask(order("g2", id_, says=1, b=Claim(100, 0, 0, 20, 1, 60)))
        for one in (table, memory):
            one.begin(epoch_id=id_, name="a", base=7)
        ask(order("g2", id_, a=Claim(100, 0, 0, 20, 1, 60)))
        for one in (table, memory):
            one.absorb(epoch_id=id_, name="a", gateway="g1", used=11)
        back = ask(order("g1", id_, a=Claim(100, 11, 60, 0, 1, 60)), reaches=True)
        compared.append((back.holdings and back.holdings[0].held, 11 + 100 - (7 + 11) - 39 - 11))  # 39: what g2 holds
        compared.append((sorted(table.list_joined()), sorted(memory.list_joined())))
        ask(order("g2", id_), reaches=True)
        ask(order("g1", id_))
        ask(order("g1", id_, term=2))
        return compared

    def look() -> list[tuple[object, object]]:
        try:
            return play()
        finally:
            connections.close_all()

    compared = await asyncio.to_thread(look)
    assert [real for real, _ in compared] == [expected for _, expected in compared]
    assert [real for real, _ in compared if isinstance(real, tuple)] == [
        (0, False), *[(1, True)] * 5, (1, False), (1, False), (2, True),
    ]  # fmt: skip
