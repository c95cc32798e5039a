"""Slots, the wait queue and the choice of a node and its words, on a real event loop over links whose nodes are the test."""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import GatewayLimits
from gateway import errors
from gateway.dialects.surface import SURFACES
from gateway.process import GatewayRuntime
from gateway.request.dispatch import Availability, Busy, Closed, Dispatcher, Job, Lease, Plan, Ready
from gateway.request.placement import choose_link
from gateway.request.response import render_head
from gateway.values import InferenceRequest
from gateway.views.peers import serve_peer
from nodes.links import LinkRegistry
from nodes.links.ejections import Ejection, Fault
from nodes.links.http import END_HEADER
from nodes.links.keeper import LinkKeeper
from nodes.states import POOL_RESPONSES, ProviderTerms
from tests.fakes.asgi_client import MemoryClient
from tests.fakes.examples import examples
from tests.fakes.links import FakeLink, make_row
from tests.fakes.pipeline import make_job
from tests.fakes.virtual_loop import VirtualLoop
from tests.fakes.waiting import turns
from wire import clock

CHAT, EMBED, AUDIO = "/v1/chat/completions", "/v1/embeddings", "/v1/audio/transcriptions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
SHORT = GatewayLimits(queue_s=0.04, no_node_wait_s=0.01, request_s=5.0)


class Floor:
    """A dispatcher with its registry and keeper."""

    def __init__(self, limits: GatewayLimits | None = None) -> None:
        self.registry = LinkRegistry()
        self.keeper = LinkKeeper(self.registry, gateway_id=uuid.UUID(int=9), connect_s=1.0)
        self.dispatcher = Dispatcher(self.registry, self.keeper, limits or GatewayLimits())

    def link(self, *models: str, slots: int = 1, **endpoints: set[str]) -> FakeLink:
        """Connect a node; ``endpoints`` are the paths on which it answers a model, where it says so."""
        link = FakeLink(*models, slots=slots)
        link.endpoints = {model: frozenset(paths) for model, paths in endpoints.items()}
        self.registry.add(link)
        return link

    def job(self, model: str = "m", *, max_queue: int = 100, endpoint: str = CHAT) -> Job:
        """Return a request that arrives now."""
        request = InferenceRequest(
            endpoint=endpoint, paths=SURFACES[endpoint].paths, model=model, is_streaming=False, max_tokens=None,
            prompt_chars=1, body=b"{}", headers={},
        )  # fmt: skip
        return make_job(self.dispatcher, request, max_queue=max_queue)

    def plan(self, model: str = "m", *, max_queue: int = 100, endpoint: str = CHAT) -> Plan:
        """Return where such a request may go."""
        return self.dispatcher.plan(self.job(model, max_queue=max_queue, endpoint=endpoint))

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


def explain(plan: Plan) -> tuple[type[errors.GatewayError], bool]:
    """Return why nobody can serve a request for one model, and whether waiting does not help either."""
    ((_, found),) = plan.choices
    assert isinstance(found, Closed)
    return type(found.error), found.is_final


async def settle() -> None:
    """Let every callback that is due run."""
    await turns(3)


async def fails(future: asyncio.Future[Lease]) -> errors.GatewayError:
    """Return the error a wait ends with."""
    async with asyncio.timeout(120):
        with pytest.raises(errors.GatewayError) as caught:
            await future
    return caught.value


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


async def test_every_slot_of_a_node_that_joins_is_taken_and_none_by_who_left_in_that_turn() -> None:
    floor = Floor()
    floor.link("m")
    lease = floor.take()
    left, *waits = [floor.queue() for _ in range(4)]
    left.set_exception(errors.ClientLeft())
    joined = floor.link("m", slots=2)
    assert ([wait.done() for wait in waits], joined.active) == ([True, True, False], 2)
    assert isinstance(await fails(left), errors.ClientLeft)
    lease.release()
    assert waits[2].done()


async def test_a_full_queue_refuses_and_a_requeued_request_keeps_its_place() -> None:
    floor = Floor()
    floor.link()
    job = floor.job(max_queue=2)
    lease = floor.dispatcher.acquire(job)
    assert isinstance(lease, Lease)
    second, third = floor.queue(max_queue=2), floor.queue(max_queue=2)
    with pytest.raises(errors.QueueFull):
        floor.queue(max_queue=2)
    refusal = floor.plan(max_queue=2).refusal
    assert isinstance(refusal, errors.QueueFull)
    assert refusal.retry_after_s
    assert floor.plan("other", max_queue=2).refusal is None
    job.attempts = 1  # its node was lost, and another one came
    again = floor.dispatcher.acquire(job)
    assert isinstance(again, asyncio.Future)
    lease.release()
    assert (again.done(), second.done(), third.done()) == (True, False, False)


def terms_of(floor: Floor, *terms: ProviderTerms, model: str = "m") -> None:
    """Have the nodes of these providers declare a model."""
    rows = [make_row(uuid.uuid4(), provider=one.name, terms=one, model_names=(model, f"{model}-too")) for one in terms]
    floor.keeper.apply(rows, targets={}, peers={})


async def test_a_provider_has_a_bound_over_all_its_models_and_where_another_has_them_too_both_must_be_full() -> None:
    floor = Floor()
    floor.link("m", "m-too", "else")
    floor.take("else")
    terms_of(floor, ProviderTerms("lab", max_queue=2))
    floor.queue("m"), floor.queue("m-too"), floor.queue("else")
    with pytest.raises(errors.QueueFull, match="2 requests wait for these nodes"):
        floor.queue("m")
    assert isinstance(floor.plan("m").refusal, errors.QueueFull)
    assert floor.plan("else").refusal is None
    assert floor.dispatcher.depths_by_provider() == {"lab": 2}
    terms_of(floor, ProviderTerms("lab", max_queue=2), ProviderTerms("other"))
    assert floor.plan("m").refusal is None
    terms_of(floor, ProviderTerms("lab", max_queue=2), ProviderTerms("other", max_queue=3))
    floor.queue("m")
    assert isinstance(floor.plan("m").refusal, errors.QueueFull)


def test_a_provider_says_how_long_requests_wait_for_a_slot_and_for_a_node_and_the_most_patient_one_counts() -> None:
    async def wait() -> None:
        floor, loop = Floor(replace(SHORT, queue_s=30.0, no_node_wait_s=9.0, request_s=600.0)), asyncio.get_running_loop()
        for terms, no_node_s, queue_s in (
            ([ProviderTerms("a", queue_s=5, no_node_s=2)], 2.0, 5.0),
            ([ProviderTerms("a", queue_s=5, no_node_s=2), ProviderTerms("b")], 9.0, 30.0),
            ([ProviderTerms("a", queue_s=90), ProviderTerms("b", no_node_s=30)], 30.0, 90.0),
        ):
            terms_of(floor, *terms)
            began = loop.time()
            assert type(await fails(floor.queue())) is errors.NoAvailableNode
            assert loop.time() - began == pytest.approx(no_node_s, abs=0.01)
            link, began = floor.link(), loop.time()
            link.last_seen = math.inf  # it is heard all the time
            lease = floor.take()
            assert type(await fails(floor.queue())) is errors.QueueTimeout
            assert loop.time() - began == pytest.approx(queue_s, abs=0.01)
            lease.release()
            floor.registry.remove(link)

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(wait())


async def test_a_request_whose_node_was_lost_waits_no_longer_than_it_would_have_at_first() -> None:
    floor = Floor(replace(SHORT, queue_s=60.0, request_s=600.0))
    floor.link()
    floor.take()
    job = floor.job()
    job.accepted -= 60
    wait = floor.dispatcher.acquire(job)
    assert isinstance(wait, asyncio.Future)
    async with asyncio.timeout(30):
        assert type(await fails(wait)) is errors.QueueTimeout


async def test_a_wait_for_a_model_with_busy_boxes_times_out_and_frees_its_place() -> None:
    floor = Floor(SHORT)
    floor.link()
    floor.take()
    began = time.monotonic()
    floor.dispatcher.note_held("m", 12.0)
    for wait, again_s in [(floor.queue(), 24.0), (floor.queue(), 12.0)]:
        error = await fails(wait)
        assert (type(error), error.retry_after_s) == (errors.QueueTimeout, again_s)
    assert time.monotonic() - began >= SHORT.queue_s
    assert floor.dispatcher.depth == 0


@pytest.mark.parametrize(
    ("place", "name", "value", "error"),
    [
        ("", "last_seen", -1e9, errors.NodeStale),
        ("policy", "draining", True, errors.NodeDraining),
        ("", "unhealthy_reason", "ECC", errors.NodeUnhealthy),
        ("", "busy_elsewhere", True, errors.NoAvailableNode),
        ("policy", "provider_enabled", False, errors.NoAvailableNode),
        ("nowhere", "", None, errors.NoAvailableNode),
    ],
)
async def test_a_wait_for_boxes_that_take_no_work_ends_early_and_says_why(
    place: str, name: str, value: object, error: type[errors.GatewayError]
) -> None:
    floor = Floor(replace(SHORT, queue_s=5.0))
    if place != "nowhere":
        link = floor.link()
        setattr(getattr(link, place) if place else link, name, value)
    caught = await fails(floor.queue())
    assert (type(caught), bool(caught.retry_after_s)) == (error, True)


async def test_a_model_that_no_gpu_can_run_where_it_is_loaded_is_refused_in_words() -> None:
    floor = Floor(SHORT)
    rows = [make_row(uuid.uuid4(), model_names=("m",), excluded=frozenset(names)) for names in ({"m"}, {"m", "n"})]
    floor.keeper.apply(rows, targets={}, peers={})
    refusal = await fails(floor.queue("m"))
    assert "no GPU of the nodes that have it loaded can run it" in refusal.message
    floor.keeper.apply([rows[0], make_row(uuid.uuid4(), model_names=("m",))], targets={}, peers={})
    assert "no GPU" not in (await fails(floor.queue("m"))).message


async def test_rows_explain_why_a_model_has_no_box_and_a_provider_that_is_gone_ends_the_waits_for_it_alone() -> None:
    def apply(*states: str, model: str = "m") -> None:
        rows = [make_row(uuid.uuid4(), provider_state=state, connected=False, model_names=(model,)) for state in states]
        floor.keeper.apply(rows, targets={}, peers={})

    floor = Floor()
    apply("disabled")
    assert type(floor.plan("m").refusal) is errors.ProviderDisabled
    assert explain(floor.plan("x")) == (errors.NoAvailableNode, False)
    apply("disabled", "enabled")
    assert explain(floor.plan("m")) == (errors.NoAvailableNode, False)
    here, elsewhere = floor.queue("m"), floor.queue("x")
    apply("deleted")
    assert explain(floor.plan("m")) == (errors.ProviderDeleted, False)
    assert type(await fails(here)) is errors.ProviderDeleted
    apply("deleted", "enabled", model="x")
    assert not elsewhere.done()  # another provider has the model too
    elsewhere.cancel()


STEP = st.tuples(
    st.sampled_from(["arrive", "finish", "leave", "leave and finish", "join", "lose", "drain", "resume", "turn"]),
    st.integers(0, 6),
)


class Crowd:
    """Clients, nodes and what became of each request, under a schedule that hypothesis chose."""

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
            lease = self.leases.pop(pick % len(self.leases))
            lease.release()
            lease.release()  # which counts once

    def leave(self, pick: int) -> None:
        waiting = [future for _, _, future in self.waits if not future.done()]
        if waiting:
            waiting[pick % len(waiting)].set_exception(errors.ClientLeft())

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
    assert floor.plan().refusal is None
    refusal = floor.plan(endpoint=AUDIO).refusal
    assert isinstance(refusal, errors.EndpointNotAnswered)
    assert "its nodes answer other paths" in refusal.message


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


async def test_under_five_times_the_load_every_slot_works_and_what_has_no_place_is_refused_at_once() -> None:
    floor = Floor()
    box = floor.link(slots=4)
    running, waiting, answered, refused = list[Lease](), list[asyncio.Future[Lease]](), 0, 0
    for wave in range(100):
        for _ in range(5 * box.max_concurrent):
            job = floor.job(max_queue=2)
            plan = floor.dispatcher.plan(job)
            if isinstance(plan.refusal, errors.QueueFull):
                refused += 1
                continue
            found = floor.dispatcher.acquire(job, plan)
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


class LookedAt(FakeLink):
    """Counts how often somebody asks whether it can take work."""

    looks = 0

    def can_take(self, now: float) -> bool:
        LookedAt.looks += 1
        return super().can_take(now)


async def test_of_a_thousand_nodes_few_are_compared_and_every_free_slot_is_found() -> None:
    floor = Floor()
    links = [LookedAt("m", slots=2) for _ in range(1000)]
    for link in links:
        floor.registry.add(link)
    LookedAt.looks = 0
    for _ in range(1000):
        floor.take()
    assert LookedAt.looks <= GatewayLimits().placed_among * 1000
    assert [link.active for link in links].count(1) > 900, "idle nodes come before busy ones"
    for _ in range(999):
        floor.take()
    (free,) = (link for link in links if link.active < 2)
    lease = floor.take()
    assert lease.link is free
    wait = floor.queue()
    lease.release()
    assert wait.result().link is free


async def test_most_nodes_that_are_compared_were_so_for_the_last_request_and_full_ones_are_left_behind() -> None:
    floor, most = Floor(), GatewayLimits().placed_among
    links = [LookedAt("m", slots=2) for _ in range(1000)]
    for link in links:
        floor.registry.add(link)
    for _ in range(100):
        floor.take()
    placed = [number for number, link in enumerate(links) if link.active]
    assert placed[-1] < 100 * most // 4 + most
    for link in links[:900]:
        link.active = 2
    LookedAt.looks = 0
    for _ in range(100):
        floor.take()
    assert LookedAt.looks < 700 // most * (1000 + most)


async def test_the_nodes_that_hold_a_prompt_are_compared_in_place_of_others() -> None:
    floor, most = Floor(), GatewayLimits().placed_among
    for _ in range(1000):
        floor.registry.add(LookedAt("m", slots=9))
    body = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}' % (b"said before " * 100)
    asked = InferenceRequest(endpoint=CHAT, paths=(CHAT,), model="m", body=body, prompt_chars=1200)
    chosen = set()
    for _ in range(20):
        LookedAt.looks = 0
        lease = floor.dispatcher.acquire(make_job(floor.dispatcher, asked))
        assert isinstance(lease, Lease)
        chosen.add(lease.link)
        assert LookedAt.looks <= most
        lease.release()
    assert len(chosen) == 1, "of idle nodes the one that was sent the prompt before is the best"


async def test_a_plan_tells_free_from_full_from_closed() -> None:
    floor = Floor()
    assert floor.plan().is_closed
    link = floor.link("m", slots=2)
    assert [found for _, found in floor.plan().choices] == [Ready(link)]
    leases = [floor.take(), floor.take()]
    assert [found for _, found in floor.plan().choices] == [Busy(0.0)]
    floor.dispatcher.note_held("m", 8.0)
    assert [found for _, found in floor.plan().choices] == [Busy(4.0)]
    waiting = floor.queue()
    assert [found for _, found in floor.plan().choices] == [Busy(8.0)]
    waiting.cancel()
    link.policy.draining = True
    assert explain(floor.plan()) == (errors.NodeDraining, False)
    for lease in leases:
        lease.release()


async def test_models_rank_by_free_room_and_only_where_the_path_is_answered() -> None:
    floor = Floor()
    floor.link("small", slots=1)
    floor.link("large", slots=4)
    floor.link("vectors", slots=9, vectors={EMBED})
    floor.link("away", slots=9).policy.cordoned = True
    assert floor.dispatcher.rank_models(["small", "large", "vectors", "away", "unknown"], (CHAT,)) == ["large", "small"]
    for _ in range(4):
        floor.take("large")
    assert floor.dispatcher.rank_models(["large", "small"], (CHAT,)) == ["small", "large"]


CLOSED = Closed(errors.NoAvailableNode())
FULL = Closed(errors.QueueFull(), is_final=True)


READY = Ready(FakeLink())


@pytest.mark.parametrize(
    ("found", "ranked"),
    [
        ([CLOSED, READY, READY], "bca"),
        ([Busy(1.0), READY], "ab"),
        ([Busy(9.0), Busy(2.0), READY], "bca"),
        ([Busy(9.0), CLOSED, Busy(8.0), Busy(8.5)], "cdab"),
        ([Busy(math.inf), CLOSED], "ab"),
        ([CLOSED, Busy(math.inf)], "ab"),
        ([CLOSED, Busy(8.0)], "ba"),
        ([CLOSED, CLOSED], "ab"),
    ],
)
async def test_a_model_with_room_comes_first_then_one_that_answers_in_time_then_the_shortest_queue(
    found: list[Availability], ranked: str
) -> None:
    floor = Floor()
    plan = Plan(tuple(zip([floor.job(name).candidate for name in "abcd"], found, strict=False)))
    assert "".join(candidate.entry.name for candidate in plan.rank(5.0)) == ranked


@pytest.mark.parametrize(
    ("found", "refusal"),
    [
        ([CLOSED], None),
        ([FULL], errors.QueueFull),
        ([FULL, CLOSED], errors.QueueFull),
        ([CLOSED, FULL], None),
        ([FULL, Busy(1.0)], None),
        ([FULL, READY], None),
    ],
)
async def test_a_new_request_is_refused_where_waiting_does_not_help_and_no_other_model_can_take_it(
    found: list[Availability], refusal: type[errors.GatewayError] | None
) -> None:
    floor = Floor()
    plan = Plan(tuple(zip([floor.job(name).candidate for name in "ab"], found, strict=False)))
    assert type(plan.refusal) is (refusal or type(None))


@dataclass(eq=False)
class Box:
    load: int
    last_served: int
    is_free: bool = True

    def can_take(self, now: float) -> bool:
        return self.is_free

    def is_called(self, name: str) -> bool:
        return name == f"box-{self.load}"


choose_box = cast("Callable[..., Box | None]", choose_link)
"""A box has what placement reads of a link."""
BOXES = st.lists(st.builds(Box, load=st.integers(0, 4), last_served=st.integers(0, 4), is_free=st.booleans()), max_size=8)


@given(boxes=BOXES, avoided=st.sets(st.integers(0, 7)), liked=st.integers(0, 4))
def test_the_least_loaded_free_box_wins_unless_another_is_preferred_and_free(
    boxes: list[Box], avoided: set[int], liked: int
) -> None:
    avoid = {box for index, box in enumerate(boxes) if index in avoided}
    chosen = choose_box(boxes, now=0.0, avoid=avoid)
    free = [box for box in boxes if box.is_free]
    best = min(((box in avoid, box.load, box.last_served) for box in free), default=None)
    assert best == (None if chosen is None else (chosen in avoid, chosen.load, chosen.last_served))
    assert chosen is None or chosen.is_free
    found, fans = choose_box(boxes, now=0.0, prefer=f"box-{liked}"), [box for box in free if box.load == liked]
    assert found in fans if fans else found is choose_box(boxes, now=0.0)


@pytest.mark.parametrize("path", [RESPONSES, POOL_RESPONSES], ids=["the client's path", "what only nodes of ours answer"])
async def test_a_peer_names_model_and_tenant_in_any_script_and_may_send_a_kept_conversation_too(path: str) -> None:
    floor, limits = Floor(), GatewayLimits(max_body_bytes=100)  # a conversation that was kept stands beside the largest request
    link = floor.link("модель")
    link.endpoints = {"модель": frozenset({POOL_RESPONSES})} if path == POOL_RESPONSES else {}
    headers = {"x-muster-model": "модель", "x-muster-tenant": "大学", "x-muster-deadline-ms": "30000"}
    said = {name: value.encode().decode("latin-1") for name, value in headers.items()}
    client = MemoryClient(headers=said, body=[b"x" * 101], limits=limits)
    runtime = cast("GatewayRuntime", SimpleNamespace(dispatcher=floor.dispatcher, limits=limits))
    peer = serve_peer(runtime, client=client.connection, link=link, surface=SURFACES[RESPONSES], path=path)
    serving = asyncio.create_task(peer)
    await client.wait(lambda: link.streams or serving.done())
    request = link.streams[0].request
    assert (request.model, request.tenant, request.body, request.path) == ("модель", "大学", b"x" * 101, path)
    link.streams[0].answer(b"{}")
    await serving
    assert (client.status, client.body, link.active) == (200, b"{}", 0)


def test_no_box_speaks_for_a_gateway_and_headers_of_the_engines_bytes_do_not_describe_ours() -> None:
    said = {"content-type": "application/json", END_HEADER: "busy", "x-muster-anything": "1", "x-cache-hit": "1", "etag": "x"}
    names = {name for name, _ in render_head({**said, "content-encoding": "gzip"}, queue_ms=0, is_event_stream=False)}
    assert names == {b"content-type", b"x-cache-hit", b"x-queue-wait-ms", b"content-encoding", b"etag"}
    head = dict(render_head({**said, "content-encoding": "gzip"}, queue_ms=0, is_event_stream=False, content_type="text/html"))
    assert (head[b"content-type"], set(head) & {b"content-encoding", b"etag"}) == (b"text/html", set())


async def test_a_request_that_gives_its_slot_back_tries_an_ejected_box_no_longer() -> None:
    floor = Floor()
    box = floor.link()
    now = clock.monotonic()
    ejection = Ejection(box.node_id, "m", Fault.FAILED, since=now - 60, until=now - 1, is_probing=True)
    box.active += 1
    Lease(floor.dispatcher, box, CHAT, "m", granted=now, probed=ejection).release()
    assert not ejection.is_probing


async def test_a_box_that_failed_the_request_is_avoided_too_where_only_some_speak_its_dialect() -> None:
    floor = Floor()
    first, second = floor.link(slots=5, m={MESSAGES}), floor.link(slots=5, m={MESSAGES})
    floor.link(slots=5, m={CHAT})
    job = floor.job(endpoint=MESSAGES)
    job.avoid.add(first)
    leases = [floor.dispatcher.acquire(job) for _ in range(3)]
    assert [lease.link for lease in leases if isinstance(lease, Lease)] == [second] * 3


def test_a_tenant_has_a_bound_over_all_models_and_a_request_that_had_a_place_keeps_it() -> None:
    async def play() -> None:
        floor = Floor(replace(GatewayLimits(), max_tenant_queue=2))
        floor.link("a", "b")
        floor.take("a")
        waits = [floor.queue("a"), floor.queue("b")]
        refusal = floor.plan("a").refusal
        assert isinstance(refusal, errors.QueueFull)
        assert "of this tenant" in refusal.message
        with pytest.raises(errors.QueueFull):
            floor.queue("b")
        other = floor.job("a")
        other.tenant = "other"
        assert floor.dispatcher.plan(other).refusal is None
        job = floor.job("b")
        job.attempts = 1
        waits.append(floor.dispatcher.acquire(job))  # type: ignore[arg-type]  # it waits
        for wait in waits:
            wait.cancel()
        await settle()
        assert floor.dispatcher.depth == 0

    asyncio.run(play())


async def test_a_wait_that_would_be_too_long_is_refused_at_once_and_says_how_long() -> None:
    floor = Floor()
    floor.link()
    floor.take()
    floor.dispatcher.note_held("m", 25.0)
    waits = [floor.queue()]
    plan = floor.plan()
    assert plan.refusal is None
    assert plan.choices[0][1] == Busy(50.0)
    waits.append(floor.queue())
    refusal = floor.plan().refusal
    assert isinstance(refusal, errors.QueueFull)
    assert (refusal.status, refusal.retry_after_s) == (503, 75.0)
    for wait in waits:
        wait.cancel()


async def test_the_weight_of_a_tenant_counts_in_its_place_and_in_its_share() -> None:
    floor = Floor()
    floor.link()
    lease = floor.take()
    waits = [floor.queue() for _ in range(4)]
    jobs = [floor.job(), floor.job()]
    for job, (tenant, weight) in zip(jobs, (("heavy", 2.0), ("light", 0.25)), strict=True):
        job.tenant, job.weight = tenant, weight
        found = floor.dispatcher.acquire(job)
        assert isinstance(found, asyncio.Future)
        waits.append(found)
    places = [floor.dispatcher.find_place(job) for job in jobs]
    assert [place and place.position for place in places] == [3, 6]
    lease.release()
    held = next(wait.result() for wait in waits if wait.done())
    assert held.account is not None
    assert held.account.weight == {"t": 1.0, "heavy": 2.0, "light": 0.25}[held.account.tenant]
    held.release()
    for wait in waits:
        if wait.done():
            wait.result().release()
        wait.cancel()


async def test_who_waits_knows_its_place_until_it_has_a_slot() -> None:
    floor = Floor()
    floor.link()
    lease = floor.take()
    floor.dispatcher.note_held("m", 2.0)
    jobs = [floor.job(), floor.job()]
    waits = [floor.dispatcher.acquire(job) for job in jobs]
    assert [floor.dispatcher.find_place(job) for job in jobs] == [(1, 2000), (2, 4000)]
    lease.release()
    assert floor.dispatcher.find_place(jobs[0]) is None
    assert isinstance(waits[0], asyncio.Future)
    waits[0].result().release()
    assert isinstance(waits[1], asyncio.Future)
    waits[1].result().release()
    assert floor.dispatcher.depth == 0
