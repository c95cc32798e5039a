"""Slots and the wait queue: who gets which node, and who waits.

Event-driven: a free slot, a join, a model update, a finish, a cancel and a loss each place work at once. Waiting
requests go first, oldest first over all models a node declares; a newcomer takes a slot only when nobody who could use
it waits. One synchronous function sees all state; the I/O it decides on happens after it, on the same loop turn.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec

from core.limits import GatewayLimits
from gateway.errors import (
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
)
from gateway.metrics import COUNTERS, FAILOVER_SLOTS, QUEUE_DEPTH
from gateway.request.candidates import Candidate, choose_path
from gateway.request.outcomes import Outcome, judge_node
from gateway.request.placement import Asker, Choice, Placement, Wish, choose_link
from gateway.request.queue import TIERS, Account, WaitQueue
from gateway.values import Decided, InferenceRequest, Priority, Unmatched, Weights
from nodes.links import Link, LinkCondition, LinkRegistry
from nodes.links.ejections import Answer, Ejection, Trial, Verdict
from nodes.links.keeper import LinkKeeper
from nodes.states import DECLARED_ENDPOINTS
from wire import clock


class Ready(msgspec.Struct, frozen=True):
    """A slot is free now, on ``link``. ``choice``: how it was chosen; None where there was nothing to choose."""

    link: Link
    choice: Choice | None = None


class Busy(msgspec.Struct, frozen=True):
    """Nodes are there and full; a newcomer would wait about this long."""

    wait_s: float


class Closed(msgspec.Struct, frozen=True):
    """Nobody can serve it now. ``is_final``: waiting does not help, so that a new request is refused at once."""

    error: GatewayError
    is_final: bool = False


Availability = Ready | Busy | Closed


@dataclass(frozen=True, slots=True)
class Plan:
    """Which models may serve a request and whether each has room now, best first; at least one."""

    choices: tuple[tuple[Candidate, Availability], ...]

    @property
    def is_closed(self) -> bool:
        return all(isinstance(found, Closed) for _, found in self.choices)

    @property
    def refusal(self) -> GatewayError | None:
        """Why a new request is refused at once, None when it may be accepted: what the first model says counts."""
        _, first = self.choices[0]
        return first.error if isinstance(first, Closed) and first.is_final and self.is_closed else None

    @property
    def is_served_elsewhere(self) -> bool:
        """Whether a node that did not refuse the request can serve it, now or when one of its slots is free."""
        return any(isinstance(one, Ready) or (isinstance(one, Busy) and one.wait_s < math.inf) for _, one in self.choices)

    def rank(self, budget_s: float) -> list[Candidate]:
        """Return the candidates as they are to be tried.

        Those that have room or whose wait fits in ``budget_s`` come in their order, then the shorter waits, then those that
        nobody serves.
        """

        def rank_one(choice: tuple[Candidate, Availability]) -> tuple[int, float]:
            match choice[1]:
                case Ready():
                    return 0, 0.0
                case Busy(wait_s) if wait_s < math.inf:
                    return (0, 0.0) if wait_s <= budget_s else (1, wait_s)
                case _:
                    return 2, 0.0

        return [candidate for candidate, _ in sorted(self.choices, key=rank_one)]

    def find_ready(self, candidate: Candidate) -> Ready | None:
        return next((found for one, found in self.choices if one is candidate and isinstance(found, Ready)), None)

    def list_ready(self) -> list[Candidate]:
        return [candidate for candidate, found in self.choices if isinstance(found, Ready)]


_NONE: frozenset[Link] = frozenset()


class JobTrace(Protocol):
    """A request that is traced, as far as its attempts go."""

    def begin_attempt(self, link: Link, model: str, *, number: int, at: float) -> Mapping[str, str]:
        """Note that a node is asked now; return the headers by which it goes on with the trace."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way to a node. ``deadline`` and ``accepted`` are clock.monotonic() seconds."""

    request_id: str
    candidates: tuple[Candidate, ...]
    """What may serve it, best first."""
    tenant: str
    priority: str
    sequence: int
    accepted: float
    deadline: float
    candidate: Candidate = field(init=False)
    """What is asked now."""
    max_wait_s: float = math.inf
    """Longest wait for a slot that the client accepts."""
    asked_model: str = ""
    """The name the client used."""
    prefer: str = ""
    """Name of a node or GPU that should serve it, if it can."""
    unmatched: Unmatched | None = None
    """What its ``x_pool_options`` name that is nothing here."""
    attempts: int = 0
    losses: int = 0
    avoid: set[Link] = field(default_factory=set)
    key_id: uuid.UUID | None = None
    headers: Mapping[str, str] | None = None
    """Of the client's request."""
    weight: float = 1.0
    """Of its tenant, in the share of slots while requests wait."""
    waiter: _Waiter | None = None
    """Its place in the queue, while it has one."""
    place: QueuePlace | None = None
    """Where its last wait began."""
    failover: Lease | None = None
    """A slot that is held on another node, while its own may be dead. Whoever ends the request releases it."""
    trace: JobTrace | None = None
    """None = it is not traced."""
    suspects: list[Trial] = field(default_factory=list)
    """Attempts that failed before their first byte: the nodes' fault once another one answers."""

    def __post_init__(self) -> None:
        self.candidate = self.candidates[0]

    @property
    def request(self) -> InferenceRequest:
        return self.candidate.request


class Lease(msgspec.Struct, eq=False):
    """A slot on a node, held by the one who iterates the answer. ``path``: the API path on which the node is asked.

    ``release`` is idempotent.
    """

    dispatcher: Dispatcher
    link: Link
    path: str
    model: str = ""
    granted: float = 0.0
    """clock.monotonic() seconds; 0 = not to be counted in how long requests take."""
    probed: Ejection | None = None
    """The ejection of the replica that this request tries to end."""
    choice: Choice | None = None
    """How the link was chosen; None where there was nothing to choose."""
    account: Account | None = None
    """Of its tenant, where it waited for the slot."""
    released: bool = False

    def release(self) -> None:
        if not self.released:
            self.released = True
            self.link.active -= 1
            self.link.released_at, now = clock.awake(), clock.monotonic()
            if self.probed is not None:
                self.probed.end_probe(now)
            if self.account is not None:
                self.dispatcher.end_share(self.account, self.granted, now)
            if self.granted:
                self.dispatcher.note_held(self.model, now - self.granted)
            self.dispatcher.place_on(self.link)


class QueuePlace(NamedTuple):
    """Where a request waits, the first one at 1, and for how long it probably will."""

    position: int
    estimate_ms: int


@dataclass(slots=True, eq=False, order=False)
class _Waiter:
    job: Job
    future: asyncio.Future[Lease]
    model: str
    paths: tuple[str, ...]
    tenant: str
    weight: float
    tier: int
    since: float
    due: float
    sequence: int
    no_node_at: float
    """Until when it waits for a node to be there at all; clock.monotonic() seconds."""
    timer: asyncio.TimerHandle | None = None


class Dispatcher:
    """The queue of every model of this process, over the links of this process."""

    def __init__(
        self, registry: LinkRegistry, keeper: LinkKeeper, limits: GatewayLimits, *, weights: Mapping[str, Weights] | None = None
    ) -> None:
        """``weights``: of the parts of scores, by the models that have their own."""
        self._registry = registry
        self.ejections = registry.ejections
        self._keeper = keeper
        self._limits = limits
        self._queue: WaitQueue[_Waiter] = WaitQueue(limits.starvation_s, limits.idle_tenants)
        self._sequence = itertools.count(1)
        self._served = itertools.count(1)
        self._start = 0
        """Where the links begin that are compared for the next request."""
        # How long a request holds a slot, by model: a moving average in seconds.
        self._held_s: dict[str, float] = {}
        self._placement = Placement(limits, weights)
        self.choice: Choice | None = None
        """How the link was chosen that was found last; None where there was nothing to choose."""
        registry.subscribe(self._take_change)
        COUNTERS.count_waiting = self._queue.count_tiers
        COUNTERS.count_queued = self.depths
        COUNTERS.read_reuse = lambda: (self._placement.placed, self._placement.reused)

    def new_job(
        self,
        *,
        request_id: str,
        candidates: Sequence[Candidate],
        tenant: str,
        asked_model: str,
        priority: str = "",
        key_id: uuid.UUID | None = None,
        headers: Mapping[str, str] | None = None,
        weight: float = 1.0,
    ) -> Job:
        """Return a job whose place in the queue and whose deadline count from now. ``priority`` is for the node."""
        now, options = clock.monotonic(), candidates[0].asked.options
        wait_ms = options.max_latency_ms if options is not None else None
        return Job(
            request_id=request_id,
            candidates=tuple(candidates),
            tenant=tenant,
            priority=priority,
            sequence=next(self._sequence),
            accepted=now,
            deadline=now + self._limits.request_s,
            asked_model=asked_model,
            key_id=key_id,
            headers=headers,
            weight=weight,
            max_wait_s=math.inf if wait_ms is None else wait_ms / 1000,
            prefer=(options.prefer_gpu or "") if options is not None else "",
        )

    def plan(self, job: Job) -> Plan:
        """Return where a request may go now: a new one, or one that may go to another node after an attempt."""
        now = clock.monotonic()
        return Plan(tuple([(candidate, self._judge(candidate, job, now)) for candidate in job.candidates]))

    def _judge(self, candidate: Candidate, job: Job, now: float) -> Availability:
        model, paths, avoid = candidate.entry.name, candidate.asked.paths, job.avoid
        if model in self._keeper.disabled_models:
            return Closed(ProviderDisabled(retry_after_s=30), is_final=True)
        if not self._queue.holds(model, paths):
            link = self._choose(model, paths, job, candidate.asked, now=now, avoid=avoid, prefer=job.prefer)
            if link is not None and link not in avoid:
                return Ready(link, self.choice)
        mismatch = self._find_mismatch(model, paths)
        if mismatch is not None:
            return Closed(mismatch, is_final=True)
        if (full := self._find_full(candidate, job)) is not None:
            return Closed(full, is_final=True)
        ready = [link for link in self._links_open(model, paths, now) if link.condition() is LinkCondition.READY]
        if not ready:
            return Closed(self._explain(model, paths) or NoAvailableNode(retry_after_s=5))
        if avoid and all(link in avoid for link in ready):
            return Busy(math.inf)
        wait_s = self._estimate_wait(model, ready, self._count_ahead(job, model))
        if wait_s > self._limits.refuse_wait_s and not job.attempts:
            message = f"A request for the model '{model}' would wait about {math.ceil(wait_s)} s; please retry"
            return Closed(QueueFull(message, retry_after_s=wait_s), is_final=True)
        return Busy(wait_s)

    def _find_full(self, candidate: Candidate, job: Job) -> QueueFull | None:
        if job.attempts:  # it had a place before
            return None
        if self._queue.count(candidate.entry.name) >= candidate.entry.max_queue:
            return QueueFull(retry_after_s=1)
        if self._queue.count_tenant(job.tenant) >= self._limits.max_tenant_queue:
            number = self._limits.max_tenant_queue
            return QueueFull(f"{number} requests of this tenant wait already, which is the most; please retry", retry_after_s=1)
        return self._find_full_provider(candidate.entry.name)

    def _find_full_provider(self, model: str) -> QueueFull | None:
        terms = self._keeper.terms.get(model, ())
        if not terms or any(one.max_queue is None or self._count_waiting(one.name) < one.max_queue for one in terms):
            return None
        number = max(one.max_queue or 0 for one in terms)
        return QueueFull(f"{number} requests wait for these nodes already, which is the most; please retry", retry_after_s=1)

    def _count_waiting(self, provider: str) -> int:
        return sum(
            number
            for model, number in self.depths().items()
            if any(one.name == provider for one in self._keeper.terms.get(model, ()))
        )

    def _find_waits(self, model: str) -> tuple[float, float]:
        """Return for how many seconds a request may wait, with a node and without one."""
        queue_s, no_node_s = self._limits.queue_s, self._limits.no_node_wait_s
        terms = self._keeper.terms.get(model)
        if terms is None:
            return queue_s, no_node_s
        return (
            max(queue_s if one.queue_s is None else one.queue_s for one in terms),
            max(no_node_s if one.no_node_s is None else one.no_node_s for one in terms),
        )

    def _count_ahead(self, job: Job, model: str) -> int:
        before = (math.inf, 0) if job.waiter is None else (job.waiter.due, job.waiter.sequence)
        return self._queue.count_ahead(model, tenant=job.tenant, weight=job.weight, tier=TIERS[job.priority], before=before)

    def _estimate_wait(self, model: str, ready: Sequence[Link], ahead: int) -> float:
        slots = sum(max(1, link.max_concurrent) for link in ready)
        return self._held_s.get(model, 0.0) * (ahead + 1) / slots

    def _estimate_anew(self, job: Job) -> float | None:
        """Return how long the request would probably wait if it came now; None where nobody knows."""
        links = self._links_open(job.request.model, job.request.paths, clock.monotonic())
        ready = [link for link in links if link.condition() is LinkCondition.READY]
        return (
            self._estimate_wait(job.request.model, ready, self._count_ahead(job, job.request.model)) if ready else 0
        ) or None

    def find_place(self, job: Job) -> QueuePlace | None:
        """Return where a request waits; None where it waits for no slot, or no node could give it one."""
        if job.waiter is None:
            return None
        model, now = job.waiter.model, clock.monotonic()
        links = self._links_open(model, job.waiter.paths, now)
        ready = [link for link in links if link.condition() is LinkCondition.READY]
        if not ready:
            return None
        ahead = self._count_ahead(job, model)
        return QueuePlace(ahead + 1, int(1000 * self._estimate_wait(model, ready, ahead)))

    def knows_node(self, name: str) -> bool:
        """Whether a node or GPU of that name is connected, to this gateway or to one it can ask."""
        return any(link.is_called(name) for link in self._registry)

    def is_answered(self, model: str, paths: tuple[str, ...]) -> bool:
        """Whether some node can be asked for the model on one of these API paths."""
        return bool(self._registry.links_answering(model, paths))

    def rank_models(self, models: Iterable[str], paths: tuple[str, ...]) -> list[str]:
        """Return those of ``models`` that nodes serve on one of these API paths, the one with most room first."""
        now = clock.monotonic()
        rooms: list[tuple[int, int, str]] = []
        for model in models:
            ready = [link for link in self._links_open(model, paths, now) if link.condition() is LinkCondition.READY]
            if ready:
                free = sum(max(0, link.max_concurrent - link.load) for link in ready)
                rooms.append((-free, self._queue.count(model), model))
        return [model for _free, _waiting, model in sorted(rooms)]

    def note_held(self, model: str, seconds: float) -> None:
        known = self._held_s.get(model)
        self._held_s[model] = seconds if known is None else known + 0.1 * (seconds - known)

    def note_unspoken(self, link: Link, model: str, endpoint: str) -> None:
        self._registry.note_unspoken(link, model, endpoint)

    @property
    def depth(self) -> int:
        return sum(self.depths().values())

    def depths(self) -> dict[str, int]:
        return self._queue.counts()

    def depths_by_provider(self) -> dict[str, int]:
        """Return how many requests wait, by provider; one for a model of several providers counts for each of them."""
        rows = self._keeper.rows.values()
        models: dict[str, set[str]] = {row.provider: set() for row in rows if row.provider_state != "deleted"}
        for row in rows:
            models.get(row.provider, set()).update(row.model_names)
        return {name: sum(self._queue.count(model) for model in declared) for name, declared in sorted(models.items())}

    def acquire(self, job: Job, plan: Plan | None = None) -> Lease | asyncio.Future[Lease]:
        """Return a slot for the job's candidate, or the future of one. Raises QueueFull.

        ``plan``: of this turn of the loop; None = there is none. The future fails with a GatewayError when the wait is over;
        cancelling it, or setting an exception on it, takes the request out of the queue.
        """
        request, now = job.request, clock.monotonic()
        model, paths = request.model, request.paths
        if job.failover is not None and (held := self._take_failover(job, now)) is not None:
            return held
        if not self._queue.holds(model, paths):
            ready = plan.find_ready(job.candidate) if plan is not None else None
            if ready is not None:
                return self.grant(ready.link, model, choose_path(ready.link, request), now, ready.choice)
            link = self._choose(model, paths, job, request, now=now, avoid=job.avoid, prefer=job.prefer)
            if link is not None:
                return self.grant(link, model, choose_path(link, request), now, self.choice)
        if (full := self._find_full(job.candidate, job)) is not None:
            raise full
        return self._enqueue(job, now)

    def find_free(self, asker: Asker, request: InferenceRequest, now: float) -> Link | None:
        """Return a link on which a new request can begin now (clock.monotonic()), None when it has to wait, or is refused.

        ``choice`` says how it was chosen.
        """
        model = request.model
        if model in self._queue.lines or model in self._keeper.disabled_models:
            return None
        return self._choose(model, request.paths, asker, request, now=now)

    def hold_failover(self, job: Job, request: InferenceRequest, lost: Link) -> bool:
        """Hold a slot for a request that may lose its node; False while no other node has one that nobody waits for."""
        now, model, avoid = clock.monotonic(), request.model, {*job.avoid, lost}
        if self._queue.holds(model, request.paths) or model in self._keeper.disabled_models:
            return False
        link = self._choose(model, request.paths, job, request, now=now, avoid=avoid)
        if link is None or link in avoid:
            return False
        link.active += 1
        job.failover = Lease(self, link, choose_path(link, request), model, choice=self.choice)
        return True

    def _take_failover(self, job: Job, now: float) -> Lease | None:
        """Return the slot that is held for a request, as one that was granted now; None where it is of no use any more."""
        held, job.failover, request = job.failover, None, job.request
        assert held is not None
        link = held.link
        is_open = link not in job.avoid and now >= link.busy_until and link.condition() is LinkCondition.READY
        if not is_open or link.find_path(request.model, request.paths) is None:
            held.release()
            return None
        held.released, link.active = True, link.active - 1  # in this turn of the loop nobody else gets it
        FAILOVER_SLOTS.labels("used").inc()
        return self.grant(link, request.model, choose_path(link, request), now, held.choice)

    def name_wait(self, request: InferenceRequest) -> str:
        """Return what a request waits for: a ``slot`` of a node that is ready, or what keeps the nodes from being so."""
        reason = self._explain(request.model, request.paths)
        return "slot" if reason is None else reason.code

    def watch_silence(self, listener: Callable[[Sequence[Link]], None]) -> None:
        """Have ``listener`` called at each tick with the nodes that missed a second heartbeat and are not given up."""
        self._keeper.on_silence = listener

    def describe(self, lease: Lease, job: Job | None = None) -> Decided | None:
        """Return why a lease is on its node, and from where it waited for that.

        None where it had no choice and no wait, or decisions are not recorded.
        """
        place = None if job is None else job.place
        if lease.choice is not None:
            found = self._placement.describe(lease.choice, lease.model)
        else:
            found = None if place is None or not self._limits.decision_candidates else Decided("waited")
        if found is None or job is None or place is None:
            return found
        tier = job.priority or Priority.NORMAL.value
        return msgspec.structs.replace(found, tier=tier, position=place.position, estimate_ms=place.estimate_ms)

    def take_number(self) -> int:
        return next(self._sequence)

    def grant(self, link: Link, model: str, path: str, now: float, choice: Choice | None = None) -> Lease:
        """Take a slot of a link that can take a request now (clock.monotonic())."""
        link.active += 1
        link.last_served = next(self._served)
        if choice is not None:
            self._placement.note(choice, model, now)
        return Lease(self, link, path, model, now, self.ejections.take_probe(link, model, now), choice)

    def place_on(self, link: Link) -> None:
        if not self._queue.lines:
            return
        now = clock.monotonic()
        while link.can_take(now):
            waiter = self._queue.choose(link.models, lambda model, paths: link in self._links_open(model, paths, now), now)
            if waiter is None:
                return
            self._remove(waiter)
            if not waiter.future.done():  # its client left earlier in this loop turn
                waiter.future.set_result(self._grant_waiter(waiter.job, link, now))

    def begin_trial(self, job: Job, lease: Lease, answer: Answer, *, caller: uuid.UUID) -> Trial:
        """Return an attempt to judge a node by. A caller who chose the node cannot blame it."""
        link, request = lease.link, job.request
        return self.ejections.begin(
            link,
            request.model,
            caller=None if job.prefer and link.is_called(job.prefer) else caller,
            is_streaming=request.is_streaming,
            answer=answer,
            now=clock.monotonic(),
            probed=lease.probed,
        )

    def end_trial(self, job: Job, trial: Trial, outcome: Outcome | None) -> None:
        """Judge a node by how an attempt ended; None: the caller left. What failed on every node was the request's fault."""
        now, verdict, link = clock.monotonic(), judge_node(outcome), trial.link
        if verdict in {Verdict.FAILED, Verdict.SUSPECT}:
            was_taken_back = link.policy.reclaimed or link.policy.draining or link.node_draining
            if was_taken_back or link.is_peer or (job.suspects and verdict is Verdict.FAILED):
                verdict = Verdict.NOTHING
        self.ejections.end(trial, verdict, now)
        if verdict is Verdict.SUSPECT:
            job.suspects.append(trial)
        elif verdict is Verdict.GOOD:
            for suspect in job.suspects:
                self.ejections.end(suspect, Verdict.FAILED, now)

    def fail_waiting(self, error: GatewayError) -> None:
        for waiter in self._queue.list_waiting(self._queue.models):
            self._end(waiter, error)

    def note_busy(self, link: Link, pause_s: float | None = None) -> None:
        """The node itself refused a request: leave it alone for as long as it says (None = a moment), then try again."""
        pause_s = self._limits.busy_pause_s if pause_s is None else pause_s
        link.busy_until = clock.monotonic() + pause_s
        asyncio.get_running_loop().call_later(pause_s + 0.001, self.place_on, link)

    # inside

    def _links_open(self, model: str, paths: tuple[str, ...], now: float) -> Sequence[Link]:
        """Return the links that may get a request for the model: ejected ones only where there is no other."""
        return self.ejections.choose_from(self._registry.links_answering(model, paths), model, now)

    def _choose(
        self,
        model: str,
        paths: tuple[str, ...],
        asker: Asker,
        asked: InferenceRequest,
        *,
        now: float,
        avoid: Collection[Link] = _NONE,
        prefer: str = "",
    ) -> Link | None:
        """Return the link that is to get a request now, None while none can take it; ``choice`` says how it was chosen."""
        self.choice = None
        links = self._registry.links_answering(model, paths)
        if len(links) < 2:  # there is nothing to choose, whatever it has done and is called
            return links[0] if links and links[0].can_take(now) else None
        wish = self._placement.read_wish(asker, asked, model, now)
        if len(links) > self._limits.placed_among and not (avoid or prefer):
            liked = self._placement.list_liked(wish, model, paths) if wish is not None else ()
            some = self._take_some(links, len(liked))
            if liked:
                some = [*some, *(link for link in liked if link not in some)]
            some = self.ejections.list_free(some, model, now)
            if len(paths) > 1:
                some = [link for link in some if link.answers(model, paths[0])]
            if (found := self._pick(some, model, wish, now)) is not None:
                return found
            self._start += self._limits.placed_among
        links = self.ejections.choose_from(links, model, now)
        if prefer and (
            liked_one := choose_link([link for link in links if link.is_called(prefer) and link not in avoid], now=now)
        ):
            self.choice = Choice(liked_one, wish, "preferred")
            return liked_one
        if len(paths) > 1:  # a node that answers the first needs no translation
            own = [link for link in links if link not in avoid and link.answers(model, paths[0])]
            if (native := self._pick(own, model, wish, now)) is not None:
                return native
        if avoid:
            others = [link for link in links if link not in avoid]
            if (other := self._pick(others, model, wish, now)) is not None:
                return other
        return self._pick(links, model, wish, now)

    def _pick(self, links: Sequence[Link], model: str, wish: Wish | None, now: float) -> Link | None:
        free = [link for link in links if link.can_take(now)]
        if not free:
            return None
        self.choice = self._placement.choose(free, model, wish, held_s=self._held_s.get(model, 0.0))
        return self.choice.link

    def _grant_waiter(self, job: Job, link: Link, now: float) -> Lease:
        request = job.request
        model = request.model
        choice = None
        if len(self._registry.links_answering(model, request.paths)) > 1:  # the first free node was taken, and is remembered
            choice = Choice(link, self._placement.read_wish(job, request, model, now), "waited")
        lease = self.grant(link, model, choose_path(link, request), now, choice)
        lease.account = self._queue.begin(job.tenant, job.weight, now)
        return lease

    def end_share(self, account: Account, began: float, now: float) -> None:
        """Take that a request ended that had waited."""
        self._queue.end(account, began, now)

    def _take_some(self, links: Sequence[Link], liked: int) -> Sequence[Link]:
        most = self._limits.placed_among
        start, number = self._start % len(links), max(most // 2, most - liked)
        self._start = start + max(1, number // 4)  # what was just looked at is in the processor's cache
        some = links[start : start + number]
        return [*some, *links[: number - len(some)]] if len(some) < number else some

    def _find_mismatch(self, model: str, paths: tuple[str, ...]) -> GatewayError | None:
        registry = self._registry
        if registry.links_answering(model, paths) or not registry.links_for(model):
            # That nobody serves the model at all may pass.
            return None
        answered = [path for path in registry.endpoints_of(model) if path not in DECLARED_ENDPOINTS]
        instead = f"it answers {', '.join(answered)}." if answered else "its nodes answer other paths."
        return EndpointNotAnswered(f"The model '{model}' does not answer {paths[0]}; {instead}", param="model")

    def _enqueue(self, job: Job, now: float) -> asyncio.Future[Lease]:
        loop, request = asyncio.get_running_loop(), job.request
        queue_s, no_node_s = self._find_waits(request.model)
        waiter = job.waiter = _Waiter(
            job,
            loop.create_future(),
            model=request.model,
            paths=request.paths,
            tenant=job.tenant,
            weight=job.weight,
            tier=TIERS[job.priority],
            since=job.accepted,
            due=min(job.accepted + min(queue_s, job.max_wait_s), job.deadline),
            sequence=job.sequence,
            no_node_at=job.accepted + no_node_s,
        )
        waiter.future.add_done_callback(lambda _future: self._remove(waiter))  # by us, or because the client left
        self._queue.add(waiter, now)
        QUEUE_DEPTH.inc()
        self._arm(waiter)
        return waiter.future

    def _arm(self, waiter: _Waiter) -> None:
        now = clock.monotonic()
        limit = waiter.due
        due = waiter.no_node_at if now < waiter.no_node_at < limit else limit
        delay = max(0.0, due - now)
        waiter.timer = asyncio.get_running_loop().call_later(delay, self._take_timer, waiter, due >= limit)

    def _take_timer(self, waiter: _Waiter, is_last: bool) -> None:
        if waiter.future.done():
            return
        reason = self._explain(waiter.job.request.model, waiter.job.request.paths)
        if reason is not None:
            self._end(waiter, reason)
        elif is_last:
            self._remove(waiter)  # whoever comes again waits behind all others
            self._end(waiter, QueueTimeout(retry_after_s=self._estimate_anew(waiter.job)))
        else:
            self._arm(waiter)

    def _end(self, waiter: _Waiter, error: GatewayError) -> None:
        self._remove(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    def _explain(self, model: str, paths: tuple[str, ...]) -> GatewayError | None:
        """Return why nobody can serve such a request at all, or None when it is only a matter of waiting."""
        conditions = {link.condition() for link in self._registry.links_answering(model, paths)}
        if LinkCondition.READY in conditions:
            return None
        if LinkCondition.BUSY in conditions:
            return NoAvailableNode("Every node that serves the model is busy with work of its own right now.", retry_after_s=5)
        if LinkCondition.STALE in conditions:
            return NodeStale(retry_after_s=5)
        if LinkCondition.DRAINING in conditions:
            return NodeDraining(retry_after_s=10)
        if LinkCondition.UNHEALTHY in conditions:
            return NodeUnhealthy(retry_after_s=10)
        mismatch = self._find_mismatch(model, paths)
        return mismatch or self._explain_rows(model) or NoAvailableNode(retry_after_s=5)

    def _explain_rows(self, model: str) -> GatewayError | None:
        rows = [row for row in self._keeper.rows.values() if model in row.model_names]
        if rows and all(model in row.excluded for row in rows):
            words = f"By what is known of the model '{model}', no GPU of the nodes that have it loaded can run it."
            return NoAvailableNode(words, retry_after_s=30)
        states = {row.provider_state for row in rows}
        if not states or "enabled" in states:
            return None
        return ProviderDisabled(retry_after_s=30) if "disabled" in states else ProviderDeleted(retry_after_s=30)

    def _take_change(self, link: Link | None) -> None:
        if not self._queue.lines:
            return
        for candidate in [link] if link is not None else list(self._registry):
            self.place_on(candidate)
        if link is None:
            self._fail_deleted()

    def _fail_deleted(self) -> None:
        for model in self._queue.models:
            rows = [row for row in self._keeper.rows.values() if model in row.model_names]
            if rows and all(row.provider_state == "deleted" for row in rows):
                for waiter in self._queue.list_waiting([model]):
                    self._end(waiter, ProviderDeleted(retry_after_s=30))

    def _remove(self, waiter: _Waiter) -> None:
        if waiter.timer is not None:
            waiter.timer.cancel()
            waiter.timer = None
        if self._queue.remove(waiter, clock.monotonic()):
            waiter.job.waiter = None
            QUEUE_DEPTH.dec()
