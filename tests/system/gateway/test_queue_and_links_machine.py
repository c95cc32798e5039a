"""Whatever clients, engines, nodes and lines do in whatever order: each request ends once, as its client and its record say.

By default some examples that are always the same. MUSTER_TEST_EXAMPLES=N runs N examples of a random seed, which a failure
prints; ``--hypothesis-seed=S`` runs those of a seed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from gateway import metrics
from tests.fakes.engine import PROMPT_TOKENS, CallState, EngineCall
from tests.fakes.fleet import CHAT_PATH, MESSAGES_PATH, Answer, Fleet, Node, Rows
from tests.fakes.limits import set_limits, set_runner_limits
from tests.fakes.memory_link import Way
from tests.fakes.virtual_loop import VirtualLoop
from wire.contract import OPEN_REQUEST_STATES, ErrorCode, RequestState

T = TypeVar("T")
EXAMPLES_VARIABLE = "MUSTER_TEST_EXAMPLES"
DEFAULT_EXAMPLES, STEPS = 8, 25
MODEL, MAX_QUEUE = "tight", 2
MAX_NODES = 3
REQUEST_S, SILENCE_S = 12.0, 3.0
GATEWAY = {
    "queue_s": 5.0, "request_s": REQUEST_S, "no_node_wait_s": 2.0, "stream_ping_s": 2.5, "client_write_s": 4.0,
    "shutdown_grace_s": 1.0,
}  # fmt: skip
NODES = {"heartbeat_interval_s": 1.0, "stale_after_s": 2.0, "offline_after_s": 4.0}
RUNNER = {
    "connect_s": 3.0, "ack_s": 3.0, "silence_s": SILENCE_S, "heartbeat_s": 1.0, "reconnect_max_s": 1.0, "auth_retry_s": 1.0,
    "healthy_after_s": 1.0, "drain_s": 3.0,
}  # fmt: skip
LOST_S = SILENCE_S + 2.0
"""After so long a node that lost its gateway knows of it, and has stopped what it did for it."""
WHICH = st.integers(0, 7)
WAYS = st.sampled_from([None, Way.UP, Way.DOWN])
SETTLED_S = REQUEST_S + LOST_S


class Bugs(logging.Handler):
    """What the product logs as a bug of its own."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if record.exc_info:
            self.seen.append(f"{record.getMessage()}: {record.exc_info[1]!r}")


class QueueAndLinks(RuleBasedStateMachine):
    """A gateway whose queue has room for two, up to three nodes with a slot or two, and any number of clients."""

    rows: ClassVar[Rows]

    def __init__(self) -> None:
        super().__init__()
        self.bugs = Bugs()
        for name in ("muster", "runner", "asyncio"):
            logging.getLogger(name).addHandler(self.bugs)
        self.runner = asyncio.Runner(loop_factory=VirtualLoop)
        self.in_flight_before = metrics.COUNTERS.in_flight
        set_limits(gateway=GATEWAY, nodes=NODES)
        set_runner_limits(connection=RUNNER, admission={"timeout_s": 5.0})
        self.fleet = Fleet(rows=self.rows)
        self.run(self.fleet.__aenter__())
        self.finals: dict[object, tuple[object, ...]] = {}
        self.calls_when_shown: dict[int, int] = {}
        self.disturbed_at: dict[Node, float] = {}
        self.drained: set[Node] = set()
        self.restarts = 0

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something, and let everything happen that follows at once."""

        async def settled() -> T:
            result = await work
            await self.fleet.settle()
            return result

        return self.runner.get_loop().run_until_complete(settled())

    def call(self, which: int) -> EngineCall | None:
        """Return something that an engine works on."""
        running = [call for node in self.fleet.nodes for call in node.engine.running]
        return running[which % len(running)] if running else None

    def node(self, which: int) -> Node | None:
        """Return a node that runs, one whose engine works if there is any."""
        running = [node for node in self.fleet.nodes if node.is_running]
        running = [node for node in running if node.engine.running] or running
        return running[which % len(running)] if running else None

    def disturb(self, node: Node) -> None:
        self.disturbed_at[node] = max(self.fleet.loop.time(), self.disturbed_at.get(node, 0.0))

    def add(self, slots: int) -> None:
        self.run(self.fleet.add_node(models=[MODEL], slots=slots))

    def act(self, action: Callable[[], object]) -> None:
        """Do something on the loop, and let everything happen that follows at once."""

        async def work() -> None:
            action()

        self.run(work())

    @initialize(slots=st.integers(1, 2), has_second=st.booleans())
    def begin(self, slots: int, *, has_second: bool) -> None:
        for number in (slots, 1)[: 1 + has_second]:
            self.add(number)

    # clients

    @rule(stream=st.booleans(), path=st.sampled_from([CHAT_PATH, MESSAGES_PATH]), key=st.sampled_from(["k", "k", "k", "few"]))
    def ask(self, *, stream: bool, path: str, key: str) -> None:
        self.act(lambda: self.fleet.ask(MODEL, stream=stream, path=path, key=key))

    @rule(count=st.integers(1, 2), path=st.sampled_from([CHAT_PATH, MESSAGES_PATH]))
    def ask_and_hear(self, count: int, path: str) -> None:
        """Most of what can go wrong does so behind the first byte."""
        asked: list[Answer] = []
        self.act(lambda: asked.append(self.fleet.ask(MODEL, stream=True, path=path)))
        for call in asked[0].calls[-1:]:
            self.act(partial(call.emit, count))

    @rule(count=st.integers(2, 4), stream=st.booleans())
    def crowd(self, count: int, *, stream: bool) -> None:
        self.act(lambda: [self.fleet.ask(MODEL, stream=stream) for _ in range(count)])

    @rule(which=WHICH)
    def leave(self, which: int) -> None:
        open_ones = [answer for answer in self.fleet.answers if not answer.is_over]
        if open_ones:
            self.act(open_ones[which % len(open_ones)].leave)

    @rule(which=WHICH, reads=st.booleans())
    def read_on_or_stop_reading(self, which: int, *, reads: bool) -> None:
        streams = [answer for answer in self.fleet.answers if answer.is_streaming and not answer.is_over]
        if streams:
            reading = streams[which % len(streams)].client.reading
            self.act(reading.set if reads else reading.clear)

    # engines

    @rule(which=WHICH, count=st.integers(1, 3))
    def emit(self, which: int, count: int) -> None:
        if (call := self.call(which)) is not None:
            self.act(lambda: call.emit(count))

    @rule(which=WHICH, count=st.integers(0, 2))
    def finish(self, which: int, count: int) -> None:
        if (call := self.call(which)) is not None:
            self.act(lambda: call.emit(count))
            self.act(call.finish)

    @rule(which=WHICH)
    def fail(self, which: int) -> None:
        if (call := self.call(which)) is not None:
            self.act(call.fail)

    @rule(which=WHICH, status=st.sampled_from([400, 429, 500, 503]))
    def refuse(self, which: int, status: int) -> None:
        call = self.call(which)
        if call is not None and not call.emitted:
            self.act(lambda: call.refuse(status))

    # nodes and lines

    @precondition(lambda self: len(self.fleet.nodes) < MAX_NODES)
    @rule(slots=st.integers(1, 2))
    def join(self, slots: int) -> None:
        self.add(slots)

    @rule(which=WHICH)
    def drain(self, which: int) -> None:
        node = self.node(which)
        if node is not None and len(self.drained) < 2:
            self.drained.add(node)
            self.act(node.leave)

    @rule(which=WHICH, untold=WAYS, let_through=st.integers(0, 2))
    def cut(self, which: int, untold: Way | None, let_through: int) -> None:
        if (node := self.node(which)) is not None:
            self.disturb(node)
            self.act(lambda: node.link.cut(untold=untold, let_through=let_through))

    @rule(which=WHICH)
    def miss_two_heartbeats(self, which: int) -> None:
        """A node that works on something is not heard for long enough that slots elsewhere are held for that."""
        node = self.node(which)
        if node is not None and node.engine.running:
            self.disturb(node)
            self.act(lambda: node.link.stall(Way.UP))
            self.run(self.fleet.advance(2.5))

    @rule(which=WHICH, way=WAYS)
    def stall(self, which: int, way: Way | None) -> None:
        if (node := self.node(which)) is not None:
            self.disturb(node)
            self.act(lambda: node.link.stall(way))

    @rule(which=WHICH)
    def resume(self, which: int) -> None:
        if (node := self.node(which)) is not None:
            self.act(node.link.resume)

    @rule(which=WHICH, way=WAYS, seconds=st.sampled_from([0.0, 0.02, 0.4]))
    def delay(self, which: int, way: Way | None, seconds: float) -> None:
        if (node := self.node(which)) is not None:
            self.disturbed_at[node] = math.inf if seconds else self.fleet.loop.time()  # what is delayed stays so
            self.act(lambda: node.link.delay(seconds, way))

    # time, and the gateway

    @rule(seconds=st.sampled_from([0.05, 0.6, 1.5, 3.5]))
    def wait(self, seconds: float) -> None:
        self.run(self.fleet.advance(seconds))

    @precondition(lambda self: self.restarts < 1 and len(self.fleet.answers) > 2)
    @rule()
    def restart_the_gateway(self) -> None:
        self.restarts += 1
        self.run(self.fleet.stop_gateway())
        self.run(self.fleet.start_gateway())

    # what must hold

    @invariant()
    def no_bound_is_passed(self) -> None:
        for link in self.fleet.runtime.registry:
            assert 0 <= link.active <= link.max_concurrent
        for node in self.fleet.nodes:
            assert len(node.engine.running) <= node.slots
        queue = self.fleet.runtime.dispatcher._queue
        waiting = queue.list_waiting(queue.models)
        assert sum(not waiter.job.attempts for waiter in waiting) <= MAX_QUEUE

    @invariant()
    def every_slot_has_one_holder(self) -> None:
        """A request that runs on a node, or one that may need it because its own node fell silent."""
        runtime, held = self.fleet.runtime, Counter[object]()
        for job, silent in runtime.pipeline.failover.held.items():
            if job.failover is None or job.failover.released:
                continue
            held[job.failover.link] += 1
            assert job.failover.link is not silent
            is_silent = silent.closed or silent.silence_s >= silent.windows.failover_s
            assert is_silent or silent.silence_s <= runtime.limits.tick_s, "a node was heard, and its slots are held on"
        for link in runtime.registry:
            assert link.active == len(link.list_sinks()) + held[link]

    @invariant()
    def nothing_broke(self) -> None:
        assert not self.bugs.seen
        assert not self.fleet.deaths

    @invariant()
    def no_engine_works_for_nobody(self) -> None:
        now = self.fleet.loop.time()
        for node in self.fleet.nodes:
            for call in node.engine.running:
                answer = self.fleet.answers[call.number - 1]
                later = [other.began_at for other in answer.calls if other.began_at > call.began_at]
                over_at = min([*later, answer.ended_at] if answer.ended_at is not None else later, default=None)
                if over_at is None:
                    continue
                disturbed_at = self.disturbed_at.get(node)
                is_clear = disturbed_at is None or disturbed_at < call.began_at
                assert not is_clear, f"{call.ident} goes on for nobody"
                assert now - over_at <= LOST_S, f"{call.ident} goes on for nobody, for too long"

    @invariant()
    def an_answer_comes_from_one_call(self) -> None:
        for answer in self.fleet.answers:
            pieces = answer.pieces
            if not pieces:
                continue
            ident = pieces[0][0]
            assert pieces == [(ident, place) for place in range(len(pieces))]
            count = self.calls_when_shown.setdefault(answer.number, len(answer.calls))
            assert len(answer.calls) == count, "another node was asked after the first byte"
            assert answer.calls[-1].ident == ident

    @invariant()
    def a_final_state_stays(self) -> None:
        numbers = [answer.number for answer in self.fleet.answers]
        if not numbers:
            return
        for rows in self.run(self.fleet.read_rows(numbers)).values():
            assert len(rows) <= 1
            for row in rows:
                is_final = row["state"] not in OPEN_REQUEST_STATES
                assert is_final is (row["finished_at"] is not None)
                if is_final:
                    final = tuple(row.values())
                    assert self.finals.setdefault(row["id"], final) == final

    def teardown(self) -> None:
        try:
            self.end()
        finally:
            try:
                self.run(self.fleet.__aexit__(None, None, None))
            finally:
                self.runner.close()
                for name in ("muster", "runner", "asyncio"):
                    logging.getLogger(name).removeHandler(self.bugs)
        self.nothing_broke()

    def end(self) -> None:
        """Have everything come to its end, and compare what clients saw with what is written down."""
        fleet = self.fleet
        until = fleet.loop.time() + SETTLED_S
        while not all(answer.is_over for answer in fleet.answers):
            assert fleet.loop.time() < until, [answer.number for answer in fleet.answers if not answer.is_over]
            self.run(fleet.advance(0.5))
        if any(node.engine.running for node in fleet.nodes):
            self.run(fleet.advance(LOST_S))
        self.run(fleet.advance(0.1))
        self.no_engine_works_for_nobody()
        assert fleet.runtime.dispatcher.depth == 0
        assert all(link.active == 0 for link in fleet.runtime.registry)
        for node in fleet.nodes:
            assert (node.engine.running, node.queue.active, node.queue.depth) == ([], 0, 0)
        assert metrics.COUNTERS.in_flight == self.in_flight_before
        found = self.run(fleet.read_rows([answer.number for answer in fleet.answers]))
        for answer in fleet.answers:
            self.agrees(answer, found[answer.number])

    def agrees(self, answer: Answer, rows: list[dict[str, Any]]) -> None:
        """Compare what a client saw with the record of its request."""
        if not rows:  # refused before it was known whose it is, and what it asks
            assert answer.has_left or answer.error_code in {ErrorCode.REQUEST_INTERRUPTED, ErrorCode.RATE_LIMITED}
            return
        (row,) = rows
        state, calls = row["state"], answer.calls
        assert state not in OPEN_REQUEST_STATES
        assert row["attempts"] >= len(calls)
        has_given_up = answer.has_left or not answer.client.reading.is_set()
        if state == RequestState.COMPLETED:
            # A node that was cut off may begin on the request after the one that answered it.
            named = answer.client.headers.get("x-muster-node", "") if answer.client.events else ""
            told = [one for one in calls if one.ident.startswith(f"{named}-")] if named else calls
            call = next(one for one in calls if one.ident == answer.pieces[0][0]) if answer.pieces else told[-1]
            assert call.state is CallState.FINISHED
            assert (row["prompt_tokens"], row["completion_tokens"]) == (PROMPT_TOKENS, len(call.emitted))
            assert row["node_name"] == call.ident.partition("-")[0]
            if not has_given_up:
                assert answer.client.is_whole
                assert (answer.status, answer.error_code) == (200, "")
                assert len(answer.pieces) == len(call.emitted)
        elif state == RequestState.CANCELLED:
            assert has_given_up
        elif not has_given_up:
            assert answer.error_code or answer.status >= 400  # an engine's own error passes as it is
            assert answer.client.is_whole or answer.client.handle.aborted


@pytest.mark.django_db
@pytest.mark.timeout(900)
def test_no_order_of_events_breaks_the_rules(fleet_rows: Rows, request: pytest.FixtureRequest) -> None:
    wanted, given = os.environ.get(EXAMPLES_VARIABLE), request.config.getoption("--hypothesis-seed")
    number = int(given) if given is not None else random.randrange(2**32) if wanted else 1
    print(f"reproduce with --hypothesis-seed={number}")
    shrinks = [Phase.shrink] if wanted else []  # which may take minutes
    QueueAndLinks.rows = fleet_rows
    run_state_machine_as_test(
        seed(number)(QueueAndLinks),
        settings=settings(
            max_examples=int(wanted or DEFAULT_EXAMPLES), stateful_step_count=STEPS, deadline=None, derandomize=False,
            database=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate, *shrinks],
            report_multiple_bugs=False,
        ),
    )  # fmt: skip
