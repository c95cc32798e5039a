"""Slots and the wait queue on a real event loop, over links whose boxes are the test."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import GatewayLimits
from gateway.dispatch import Dispatcher, Job, Lease
from gateway.errors import (
    ClientLeft,
    EndpointNotAnswered,
    GatewayError,
    NoAvailableNode,
    NodeDraining,
    NodeStale,
    NodeUnhealthy,
    ProviderDeleted,
    ProviderDisabled,
    QueueFull,
    QueueTimeout,
    ShuttingDown,
)
from gateway.values import InferenceRequest
from nodes.links import LinkRegistry
from nodes.links.ejections import Ejection, Fault
from nodes.links.keeper import LinkKeeper
from tests.fakes.examples import examples
from tests.fakes.links import FakeLink, make_row
from wire import clock

CHAT, EMBED, AUDIO = "/v1/chat/completions", "/v1/embeddings", "/v1/audio/transcriptions"
MESSAGES = "/v1/messages"
SHORT = GatewayLimits(queue_s=0.04, no_node_wait_s=0.01, request_s=5.0)


class Floor:
    """A dispatcher with its registry and keeper."""

    def __init__(self, limits: GatewayLimits | None = None) -> None:
        self.registry = LinkRegistry()
        self.keeper = LinkKeeper(self.registry, gateway_id=uuid.UUID(int=9), connect_s=1.0)
        self.dispatcher = Dispatcher(self.registry, self.keeper, limits or GatewayLimits())

    def link(self, *models: str, slots: int = 1, **endpoints: set[str]) -> FakeLink:
        """Connect a box; ``endpoints`` are the paths on which it answers a model, where it says so."""
        link = FakeLink(*models, slots=slots)
        link.endpoints = {model: frozenset(paths) for model, paths in endpoints.items()}
        self.registry.add(link)
        return link

    def job(self, model: str = "m", *, max_queue: int = 100, endpoint: str = CHAT) -> Job:
        """Return a request that arrives now."""
        request = InferenceRequest(
            endpoint=endpoint, model=model, is_streaming=False, max_tokens=None, prompt_chars=1, body=b"{}", headers={}
        )
        return self.dispatcher.new_job(request_id="r", request=request, tenant="t", max_queue=max_queue)

    def take(self, model: str = "m", *, endpoint: str = CHAT) -> Lease:
        """Get a slot that is free."""
        found = self.dispatcher.acquire(self.job(model, endpoint=endpoint))
        assert isinstance(found, Lease)
        return found

    def queue(self, model: str = "m", *, max_queue: int = 100, endpoint: str = CHAT) -> asyncio.Future[Lease]:
        """Wait in line."""
        found = self.dispatcher.acquire(self.job(model, max_queue=max_queue, endpoint=endpoint))
        assert isinstance(found, asyncio.Future)
        return found


async def settle() -> None:
    """Let every callback that is due run."""
    for _ in range(3):
        await asyncio.sleep(0)


async def fails(future: asyncio.Future[Lease]) -> GatewayError:
    """Return the error a wait ends with."""
    async with asyncio.timeout(30):
        with pytest.raises(GatewayError) as caught:
            await future
    return caught.value


async def test_release_is_idempotent() -> None:
    floor = Floor()
    box = floor.link(slots=2)
    first, _second = floor.take(), floor.take()
    first.release()
    first.release()
    assert box.active == 1


async def test_waiting_requests_are_served_oldest_first_over_all_models_of_a_box() -> None:
    floor = Floor()
    box = floor.link("a", "b")
    lease = floor.take("a")
    order = ["b", "a", "a", "b", "b"]
    waits = [floor.queue(model) for model in order]
    assert floor.dispatcher.depth == 5
    assert floor.dispatcher.depths() == {"a": 2, "b": 3}
    for index in range(5):
        lease.release()
        done = [wait.done() for wait in waits]
        assert done == [True] * (index + 1) + [False] * (4 - index)
        lease = waits[index].result()
        assert box.active == 1
    lease.release()
    assert (box.active, floor.dispatcher.depth, floor.dispatcher.depths()) == (0, 0, {})


async def test_ending_every_wait_spares_those_that_left_already() -> None:
    floor = Floor()
    first, second = floor.queue(), floor.queue()
    first.cancel()
    floor.dispatcher.fail_waiting(ShuttingDown())
    assert isinstance(await fails(second), ShuttingDown)
    assert floor.dispatcher.depth == 0


async def test_a_full_queue_refuses_and_a_requeued_request_keeps_its_place() -> None:
    floor = Floor()
    floor.link()
    job = floor.job(max_queue=2)
    lease = floor.dispatcher.acquire(job)
    assert isinstance(lease, Lease)
    second, third = floor.queue(max_queue=2), floor.queue(max_queue=2)
    with pytest.raises(QueueFull):
        floor.queue(max_queue=2)
    with pytest.raises(QueueFull) as caught:
        floor.dispatcher.check_room("m", CHAT, 2)
    assert caught.value.retry_after_s
    floor.dispatcher.check_room("other", CHAT, 2)
    job.attempts = 1  # its box was lost, and another one came
    again = floor.dispatcher.acquire(job)
    assert isinstance(again, asyncio.Future)
    lease.release()
    assert (again.done(), second.done(), third.done()) == (True, False, False)


async def test_a_request_that_gives_its_slot_back_tries_an_ejected_box_no_longer() -> None:
    floor = Floor()
    box = floor.link()
    now = clock.monotonic()
    ejection = Ejection(box.node_id, "m", Fault.FAILED, since=now - 60, until=now - 1, is_probing=True)
    box.active += 1
    Lease(floor.dispatcher, box, "m", granted=now, probed=ejection).release()
    assert not ejection.is_probing


async def test_a_request_whose_node_was_lost_waits_no_longer_than_it_would_have_at_first() -> None:
    floor = Floor(replace(SHORT, queue_s=60.0, request_s=600.0))
    floor.link()
    floor.take()
    job = floor.job()
    job.accepted -= 60
    wait = floor.dispatcher.acquire(job)
    assert isinstance(wait, asyncio.Future)
    async with asyncio.timeout(30):
        assert type(await fails(wait)) is QueueTimeout


async def test_a_wait_for_a_model_with_busy_boxes_times_out_and_frees_its_place() -> None:
    floor = Floor(SHORT)
    floor.link()
    floor.take()
    began = time.monotonic()
    error = await fails(floor.queue())
    assert type(error) is QueueTimeout
    assert time.monotonic() - began >= SHORT.queue_s
    assert floor.dispatcher.depth == 0


def _stale(link: FakeLink) -> None:
    link.last_seen = time.monotonic() - 11


def _drain(link: FakeLink) -> None:
    link.policy.draining = True


def _sicken(link: FakeLink) -> None:
    link.unhealthy_reason = "ECC"


def _occupy(link: FakeLink) -> None:
    link.busy_elsewhere = True


def _disable(link: FakeLink) -> None:
    link.policy.provider_enabled = False


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (_stale, NodeStale),
        (_drain, NodeDraining),
        (_sicken, NodeUnhealthy),
        (_occupy, NoAvailableNode),
        (_disable, NoAvailableNode),
    ],
)
async def test_a_wait_for_boxes_that_take_no_work_ends_early_and_says_why(
    change: Callable[[FakeLink], None], error: type[GatewayError]
) -> None:
    floor = Floor(replace(SHORT, queue_s=5.0))
    change(floor.link())
    caught = await fails(floor.queue())
    assert type(caught) is error
    assert caught.retry_after_s


async def test_a_wait_for_a_model_nobody_serves_ends_early() -> None:
    floor = Floor(replace(SHORT, queue_s=5.0))
    assert type(await fails(floor.queue())) is NoAvailableNode


@pytest.mark.parametrize(("state", "error"), [("disabled", ProviderDisabled), ("deleted", ProviderDeleted)])
async def test_rows_explain_why_a_model_has_no_box(state: str, error: type[GatewayError]) -> None:
    floor = Floor()
    floor.keeper.apply([make_row(uuid.uuid4(), provider_state=state, connected=False)], targets={}, peers={})
    assert type(floor.dispatcher.explain(floor.job("m").request)) is error
    assert type(floor.dispatcher.explain(floor.job("x").request)) is NoAvailableNode


async def test_a_switched_off_provider_refuses_at_once_unless_another_has_the_model() -> None:
    floor = Floor()
    off = make_row(uuid.uuid4(), provider_state="disabled", connected=False)
    floor.keeper.apply([off], targets={}, peers={})
    with pytest.raises(ProviderDisabled):
        floor.dispatcher.refuse_disabled("m")
    floor.dispatcher.refuse_disabled("x")
    floor.keeper.apply([off, make_row(uuid.uuid4(), connected=False)], targets={}, peers={})
    floor.dispatcher.refuse_disabled("m")


async def test_a_deleted_provider_ends_the_waits_for_its_boxes_at_once() -> None:
    floor = Floor()
    here, elsewhere = floor.queue("m"), floor.queue("x")
    floor.keeper.apply([make_row(uuid.uuid4(), provider_state="deleted", connected=False)], targets={}, peers={})
    assert here.done()
    assert type(await fails(here)) is ProviderDeleted
    assert not elsewhere.done()
    floor.keeper.apply(
        [make_row(uuid.uuid4(), provider_state=state, connected=False, model_names=("x",)) for state in ("deleted", "enabled")],
        targets={},
        peers={},
    )
    assert not elsewhere.done()  # another provider has the model too
    elsewhere.cancel()


STEP = st.tuples(
    st.sampled_from(["arrive", "finish", "leave", "leave and finish", "join", "lose", "drain", "resume", "turn"]),
    st.integers(0, 6),
)


class Crowd:
    """Clients, boxes and what became of each request, under a schedule that hypothesis chose."""

    def __init__(self) -> None:
        self.floor = Floor()
        self.links: list[FakeLink] = []
        self.waits: list[tuple[int, str, asyncio.Future[Lease]]] = []
        self.leases: list[Lease] = []
        self.count = 0

    def arrive(self, pick: int) -> None:
        job = self.floor.job("ab"[pick % 2])
        found = self.floor.dispatcher.acquire(job)
        if isinstance(found, Lease):
            model = job.request.model
            assert not [1 for _, waiting, future in self.waits if waiting == model and not future.done()]
            self.leases.append(found)
        else:
            self.waits.append((job.sequence, job.request.model, found))

    def finish(self, pick: int) -> None:
        if self.leases:
            self.leases.pop(pick % len(self.leases)).release()

    def leave(self, pick: int) -> None:
        waiting = [future for _, _, future in self.waits if not future.done()]
        if waiting:
            waiting[pick % len(waiting)].set_exception(ClientLeft())

    def join(self, pick: int) -> None:
        models = [("a",), ("b",), ("a", "b")][pick % 3]
        self.links.append(self.floor.link(*models, slots=1 + pick % 2))

    def lose(self, pick: int) -> None:
        if self.links:
            link = self.links.pop(pick % len(self.links))
            self.floor.registry.remove(link)
            for lease in [lease for lease in self.leases if lease.link is link]:
                self.leases.remove(lease)
                lease.release()

    def set_draining(self, pick: int, *, value: bool) -> None:
        if self.links:
            link = self.links[pick % len(self.links)]
            link.policy.draining = value
            self.floor.registry.announce(link)

    def collect(self) -> None:
        """Take the slots that waits were given; those given were the oldest of what could be served."""
        for entry in [entry for entry in self.waits if entry[2].done()]:
            self.waits.remove(entry)
            if entry[2].exception() is None:
                self.leases.append(entry[2].result())

    async def play(self, step: str, pick: int) -> None:
        match step:
            case "arrive":
                self.arrive(pick)
            case "finish":
                self.finish(pick)
            case "leave":
                self.leave(pick)
            case "leave and finish":
                self.leave(pick)
                self.finish(pick)
            case "join":
                self.join(pick)
            case "lose":
                self.lose(pick)
            case "drain" | "resume":
                self.set_draining(pick, value=step == "drain")
            case _:
                await settle()
        self.collect()

    def check(self) -> None:
        now = time.monotonic()
        for link in self.links:
            mine = [lease for lease in self.leases if lease.link is link]
            assert link.active == len(mine) <= link.max_concurrent
            if link.can_take(now):
                assert not [1 for _, model, future in self.waits if model in link.models and not future.done()]
        for model in "ab":
            line = [sequence for sequence, waiting, _ in self.waits if waiting == model]
            assert line == sorted(line)


@examples(30)
@given(st.lists(STEP, max_size=80))
def test_no_schedule_leaks_a_slot_idles_a_box_or_loses_a_request(schedule: list[tuple[str, int]]) -> None:
    async def play() -> None:
        crowd = Crowd()
        for step, pick in schedule:
            await crowd.play(step, pick)
            crowd.check()
        for _, _, future in crowd.waits:
            if not future.done():
                future.cancel()
        await settle()
        while crowd.leases:
            crowd.finish(0)
        assert crowd.floor.dispatcher.depth == 0
        assert crowd.floor.dispatcher.depths() == {}
        assert all(link.active == 0 for link in crowd.links)

    asyncio.run(play())


async def test_text_links_are_not_asked_to_carry_a_file() -> None:
    floor = Floor()
    floor.link().carries_bytes = False
    floor.registry.update_models(next(iter(floor.registry)), frozenset({"m"}))
    floor.dispatcher.check_room("m", CHAT, 1)
    with pytest.raises(EndpointNotAnswered, match="its boxes answer other paths"):
        floor.dispatcher.check_room("m", AUDIO, 1)


async def test_a_free_slot_goes_to_the_oldest_that_the_box_can_answer() -> None:
    floor = Floor()
    chat = floor.link(m={CHAT})
    lease = floor.take()
    other = floor.link(m={EMBED})
    blocked = floor.take(endpoint=EMBED)
    first, second = floor.queue(endpoint=EMBED), floor.queue(endpoint=CHAT)
    assert (floor.dispatcher.depth, floor.dispatcher.depths()) == (2, {"m": 2})
    lease.release()
    assert second.result().link is chat
    assert not first.done()
    blocked.release()
    assert first.result().link is other
    assert floor.dispatcher.depths() == {}


async def test_a_wait_ends_when_only_boxes_came_that_do_not_answer_the_path() -> None:
    floor = Floor(SHORT)
    waiting = floor.queue(endpoint=AUDIO)
    floor.link(m={CHAT})
    assert type(await fails(waiting)) is EndpointNotAnswered


async def test_under_five_times_the_load_every_slot_works_and_what_has_no_place_is_refused_at_once() -> None:
    floor = Floor()
    box = floor.link(slots=4)
    running, waiting, answered, refused = list[Lease](), list[asyncio.Future[Lease]](), 0, 0
    for wave in range(100):
        for _ in range(5 * box.max_concurrent):
            try:
                floor.dispatcher.check_room("m", CHAT, 2)
                found = floor.dispatcher.acquire(floor.job(max_queue=2))
            except QueueFull:
                refused += 1
            else:
                (running if isinstance(found, Lease) else waiting).append(found)  # type: ignore[arg-type]  # by its own kind
        assert (box.active, floor.dispatcher.depth) == (4, 2), wave
        for lease in running:
            lease.release()
        answered += len(running)
        await settle()
        placed = [future for future in waiting if future.done()]
        running, waiting = [future.result() for future in placed], [future for future in waiting if not future.done()]
        assert box.active == len(running) == 2
        assert not waiting
    assert (answered, refused) == (4 * 100, 5 * 4 * 100 - answered - len(running))
    for lease in running:
        lease.release()
    assert (box.active, floor.dispatcher.depth) == (0, 0)
