"""Ejections: replicas and nodes that get no new requests for a while, because of how they answered. No I/O, no clock.

Every gateway judges for itself, from the requests that it sent. A node is compared with the other nodes of the same model,
and only by what the callers met whom it failed: a request that fails everywhere is the caller's fault.
"""

from __future__ import annotations

import math
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import Protocol

import msgspec

from core.limits import NodeLimits, limits
from nodes.links.port import Link, LinkCondition


class Fault(StrEnum):
    """Why a node gets no new requests."""

    FAILED = "failed"
    SLOW = "slow"
    WRONG = "wrong"
    UNSTEADY = "unsteady"
    """It connected ten times within a minute."""


class Verdict(StrEnum):
    """What the end of an attempt says of the node."""

    GOOD = "good"
    FAILED = "failed"
    SUSPECT = "suspect"
    """It failed before the first byte, and another node may answer: then it was the node's fault, else the request's."""
    NOTHING = "nothing"


# A member takes ten times as long to look up.
_SLOW, _GOOD, _FAILED, _SUSPECT = Fault.SLOW, Verdict.GOOD, Verdict.FAILED, Verdict.SUSPECT


class Answer(Protocol):
    """What is read of an attempt. Times are clock.monotonic() seconds."""

    first_byte_at: float | None
    received: int
    was_blocked: bool
    """Whether its client took it more slowly than it came."""


@dataclass(slots=True)
class _Unheard:
    first_byte_at: float | None = None
    received: int = 0
    was_blocked: bool = False


_UNHEARD = _Unheard()
_FIRST_BYTE, _WHOLE, _PACE = range(3)
"""What is measured: seconds to the first byte of a stream, to a whole answer, and seconds a byte of a stream."""


@dataclass(slots=True, eq=False)
class Ejection:
    """A replica, or with an empty model a whole node, that is held back. Times are clock.monotonic() seconds.

    After ``until`` one request at a time may go to it (half-open).
    """

    node_id: uuid.UUID
    model: str
    fault: Fault
    since: float
    until: float
    passes: int = 0
    is_probing: bool = False
    is_news: bool = True
    """Whether operators have not been told of one like it lately."""
    is_only_told: bool = False
    """Whether the node goes on getting requests: half of the model's nodes are ejected already."""

    def bars(self, now: float) -> bool:
        """Whether it may get no request now, except as the last node of a model."""
        return not self.is_only_told and (now < self.until or self.is_probing)

    def end_probe(self, now: float) -> None:
        """The request that tried it gave its slot back; how it was answered is judged apart."""
        if self.is_probing:
            self.is_probing = False
            self.until = max(self.until, now + limits().nodes.ejection_probe_pause_s)


@dataclass(slots=True, eq=False)
class Standing:
    """What is remembered of a replica. ``outcomes``: when, whose request, and what was wrong with the answer."""

    outcomes: deque[tuple[float, uuid.UUID, Fault | None]] = field(
        default_factory=lambda: deque(maxlen=limits().nodes.ejection_answers)
    )
    counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    means: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Of each measure, moving averages of good answers."""
    open: dict[Trial, None] = field(default_factory=dict)
    times: int = 0
    back_at: float = -math.inf
    told_at: float = -math.inf
    heard_at: float = -math.inf
    lost_link: int = 0
    good: float = 0.0
    failed: float = 0.0
    """Answers, and requests without one; the older they are the less they count."""
    counted_at: float = 0.0
    mean_ms: float = 0.0
    """How long answers take, a moving average."""
    reliability: float | None = None
    latency_ms: float | None = None
    """Known once there are some answers (``nodes.links.port.Figures``)."""

    def count(self, bounds: NodeLimits, now: float, *, took_ms: float | None) -> None:
        """Count an answer that took so long, or None: a request without one."""
        if now - self.counted_at > 1.0:  # in a second nothing grows old
            kept = bounds.figure_kept ** ((now - self.counted_at) / 3600)
            self.good, self.failed, self.counted_at = self.good * kept, self.failed * kept, now
        if took_ms is None:
            self.failed += 1
        else:
            self.good += 1
            self.mean_ms += (bounds.ejection_mean_weight if self.mean_ms else 1.0) * (took_ms - self.mean_ms)
        counted = self.good + self.failed
        if counted + 0.5 >= bounds.figure_answers:
            self.reliability = (self.good + 1) / (counted + 2)
            self.latency_ms = self.mean_ms or None


class Trial(msgspec.Struct, eq=False):
    """One attempt under way. ``caller`` None: the caller chose the node, so it cannot be blamed for what went wrong there."""

    link: Link
    model: str
    caller: uuid.UUID | None
    is_streaming: bool
    answer: Answer
    began: float
    probed: Ejection | None
    standing: Standing
    is_judged: bool = False


Key = tuple[uuid.UUID, str]


class Ejections:
    """Judges the nodes linked here. ``links_for``: the links of a model; ``on_eject`` is called with each new ejection."""

    def __init__(self, links_for: Callable[[str], Sequence[Link]]) -> None:
        self._limits = limits().nodes
        self._links_for = links_for
        self._held: dict[Key, Ejection] = {}
        self._standings: dict[Key, Standing] = {}
        self._connects: dict[uuid.UUID, deque[float]] = {}
        self._changes = 0
        """How often something changed of what nodes are compared with."""
        self._floors: dict[tuple[str, int], tuple[float, int]] = {}
        """What a measure of a model's nodes is typically not below, and up to how many changes that is certain."""
        self.on_eject: Callable[[Ejection], None] = lambda _ejection: None

    def __iter__(self) -> Iterator[Ejection]:
        return iter(list(self._held.values()))

    @property
    def size(self) -> int:
        """How many replicas and nodes something is remembered of."""
        return len({*self._standings, *self._held}) + len(self._connects)

    def list_marks(self) -> list[tuple[object, ...]]:
        """Return a value that changes whenever there is something new to write of the ejections."""
        return [(one.node_id, one.model, one.fault, one.until, one.is_only_told) for one in self]

    def note_change(self) -> None:
        """Take that a link came to a model or left it."""
        self._changes += 1

    # placing

    def choose_from(self, links: Sequence[Link], model: str, now: float) -> Sequence[Link]:
        """Return those of ``links`` that may get a request for the model: all of them where nothing else is ready."""
        free = self.list_free(links, model, now)
        if free is links:
            return links
        return free if any(link.condition() is LinkCondition.READY for link in free) else links

    def list_free(self, links: Sequence[Link], model: str, now: float) -> Sequence[Link]:
        return [link for link in links if not self._bars(link, model, now)] if self._held else links

    def take_probe(self, link: Link, model: str, now: float) -> Ejection | None:
        """Return the ejection that a request placed now tries to end, if it does."""
        ejection = self._held.get((link.node_id, model)) if self._held else None
        if ejection is None or ejection.fault is Fault.WRONG or ejection.bars(now):
            return None
        ejection.is_probing = True
        return ejection

    # judging

    def begin(
        self,
        link: Link,
        model: str,
        *,
        caller: uuid.UUID | None,
        is_streaming: bool,
        answer: Answer,
        now: float,
        probed: Ejection | None = None,
    ) -> Trial:
        """Return an attempt that begins now; whoever begins one ends it."""
        standing = link.standings.get(model) or self._standing(link, model)
        trial = Trial(link, model, caller, is_streaming, answer, now, probed, standing)
        standing.open[trial] = None
        return trial

    def end(self, trial: Trial, verdict: Verdict, now: float) -> None:
        """Take how an attempt ended. A suspect is judged by a second call, once its request is over."""
        standing = trial.standing
        standing.open.pop(trial, None)
        answer, trial.answer = trial.answer, _UNHEARD  # the request keeps the trial, and is kept by its answer
        if trial.caller is None or trial.is_judged or verdict is _SUSPECT:
            return
        if verdict is _FAILED:
            if trial.link.closed and standing.lost_link == id(trial.link):
                return  # one link that was lost is one fault, whatever ran on it
            standing.lost_link = id(trial.link) if trial.link.closed else 0
            self._take(trial, standing, Fault.FAILED, now)
            return
        is_slow = self._measure(trial, answer, standing, now, is_whole=verdict is _GOOD)
        if trial.link.ramp_until and not is_slow:
            trial.link.ramp_up(now)
        if is_slow or verdict is _GOOD:
            self._take(trial, standing, Fault.SLOW if is_slow else None, now)

    def note_connect(self, node_id: uuid.UUID, now: float) -> None:
        """Take that a node connected; one that does so all the time gets no new requests until it stays."""
        connects = self._connects.setdefault(node_id, deque(maxlen=self._limits.ejection_links))
        connects.append(now)
        if len(connects) == self._limits.ejection_links and now - connects[0] <= self._limits.ejection_links_s:
            self._eject((node_id, ""), Fault.UNSTEADY, now)

    def note_canary(self, link: Link, model: str, *, is_right: bool, until: float, now: float) -> None:
        """Take a node's answer to a model's canary question; a wrong one ejects it until a right one, ``until`` at most."""
        key = (link.node_id, model)
        held = self._held.get(key)
        if not is_right:
            self._eject(key, Fault.WRONG, now, until=until)
            self._held[key].is_only_told = not self._may_eject(link.node_id, model, now)
        elif held is not None and held.fault is Fault.WRONG:
            self._readmit(held, now)

    def tick(self, now: float) -> list[Link]:
        """Judge what takes too long, let go of what is over; return the links that may get work again."""
        for standing in list(self._standings.values()):
            for trial in list(standing.open):
                if now - trial.began <= self._limits.ejection_slow_s:
                    break  # the oldest is first
                if not trial.is_judged and self._measure(trial, trial.answer, standing, now, is_whole=False):
                    self._take(trial, standing, Fault.SLOW, now)
        for ejection in self:
            is_over = ejection.fault in {Fault.UNSTEADY, Fault.WRONG} and now >= ejection.until
            if is_over or now - ejection.until > self._limits.ejection_forget_s:
                self._readmit(ejection, now)
        self._keep_half()
        self._forget(now)
        due = [one for one in self._held.values() if not one.bars(now)]
        return [link for one in due for link in self._links_for(one.model) if link.node_id == one.node_id]

    # inside

    def _standing(self, link: Link, model: str) -> Standing:
        # The link keeps it at hand: hashing a UUID costs more than judging.
        standing = link.standings[model] = self._standings.setdefault((link.node_id, model), Standing())
        self._changes += 1
        return standing

    def _bars(self, link: Link, model: str, now: float) -> bool:
        ofs = (self._held.get((link.node_id, model)), self._held.get((link.node_id, "")))
        return any(ejection is not None and ejection.bars(now) for ejection in ofs)

    def _measure(self, trial: Trial, answer: Answer, standing: Standing, now: float, *, is_whole: bool) -> bool:
        """Return whether an attempt is slower than those of the other nodes; ``is_whole``: remember its measures."""
        first, received = answer.first_byte_at, answer.received
        if not trial.is_streaming:
            waited_s = now - trial.began
            if is_whole:
                self._learn(standing, _WHOLE, waited_s)
            return waited_s > self._limits.ejection_slow_s and self._is_slow(trial, _WHOLE, waited_s)
        waited_s = (now if first is None else first) - trial.began
        if is_whole:
            self._learn(standing, _FIRST_BYTE, waited_s)
        if waited_s > self._limits.ejection_slow_s and self._is_slow(trial, _FIRST_BYTE, waited_s):
            return True
        if first is None or not received or answer.was_blocked:
            return False
        streamed_s = now - first
        pace = streamed_s / received
        if is_whole:
            self._learn(standing, _PACE, pace)
        return (
            pace > self._limits.ejection_slow_s_per_byte
            and streamed_s > self._limits.ejection_slow_s
            and self._is_slow(trial, _PACE, pace)
        )

    def _is_slow(self, trial: Trial, measure: int, value: float) -> bool:
        """Return whether a value is many times the median of the other nodes.

        Of many nodes it is compared with a lower value first: each change moves the median past one node at most, so one that
        is far below it now stays below for some changes. Only what is slow beside that one is compared with all nodes.
        """
        factor, floor = self._limits.ejection_slow_factor, self._floors.get((trial.model, measure))
        if floor is not None and self._changes <= floor[1] and value <= factor * floor[0]:
            return False
        enough = self._limits.ejection_faults
        others = self._others(trial.standing, trial.model)
        known = sorted([one.means[measure] for one in others if one.counts[measure] >= enough])
        if not known:
            return False
        if spare := len(known) // 4:  # one of them is for whoever asks next: this node is among its others, and it is not
            self._floors[trial.model, measure] = known[(len(known) - 1) // 2 - spare], self._changes + spare - 1
        return value > factor * median(known)

    def _others(self, own: Standing, model: str) -> list[Standing]:
        links = self._links_for(model)
        if held := {node_id for node_id, held_model in self._held if held_model == model}:
            links = [link for link in links if link.node_id not in held]
        standings = [link.standings.get(model) for link in links]
        return [one for one in standings if one is not None and one is not own]

    def _take(self, trial: Trial, standing: Standing, fault: Fault | None, now: float) -> None:
        assert trial.caller is not None
        trial.is_judged, standing.heard_at = True, now
        standing.outcomes.append((now, trial.caller, fault))
        if fault is not _SLOW:
            standing.count(self._limits, now, took_ms=(now - trial.began) * 1000 if fault is None else None)
        if fault is None and not self._held:
            return
        key = (trial.link.node_id, trial.model)
        held = self._held.get(key)
        if held is None:
            if fault is not None and self._is_outlier(key, standing, now) and self._may_eject(*key, now):
                self._eject(key, fault, now)
        elif trial.probed is held:
            if fault is not None:
                self._eject(key, fault, now)
                return
            held.passes, held.until = held.passes + 1, now
            if held.passes >= self._limits.ejection_probes:
                self._readmit(held, now)

    def _is_outlier(self, key: Key, standing: Standing, now: float) -> bool:
        recent = [one for one in standing.outcomes if now - one[0] <= self._limits.ejection_memory_s]
        callers = {caller for _at, caller, fault in recent if fault is not None}
        faults = sum(fault is not None for _at, _caller, fault in recent)
        if faults < self._limits.ejection_faults or 2 * faults < len(recent):
            return False
        met = []
        for other in self._others(standing, key[1]):
            answers = [
                fault
                for at, caller, fault in other.outcomes
                if caller in callers and now - at <= self._limits.ejection_memory_s
            ]
            if answers:
                met.append((sum(fault is not None for fault in answers), len(answers)))
        met.sort(key=lambda pair: pair[0] / pair[1])
        better = met[: (len(met) + 1) // 2]
        bad, count = sum(bad for bad, _count in better), sum(count for _bad, count in better)
        return count - bad >= self._limits.ejection_faults and self._limits.ejection_fewer * bad * len(recent) <= faults * count

    def _may_eject(self, node_id: uuid.UUID, model: str, now: float) -> bool:
        # At most half of the nodes that could serve the model, so never the last one.
        ready = {link.node_id for link in self._links_for(model) if link.condition() is LinkCondition.READY} | {node_id}
        held = (self._held.get((other, model)) for other in ready if other != node_id)
        ejected = sum(one is not None and not one.is_only_told for one in held)
        return 2 * (ejected + 1) <= len(ready)

    def _eject(self, key: Key, fault: Fault, now: float, *, until: float | None = None) -> None:
        standing, before = self._standings.setdefault(key, Standing()), self._held.get(key)
        if before is None and now - standing.back_at > self._limits.ejection_max_s:
            standing.times = 0
        standing.times += 1
        standing.heard_at = now
        standing.outcomes.clear()
        until = (
            now + min(self._limits.ejection_max_s, self._limits.ejection_base_s * 2.0 ** min(standing.times - 1, 9))
            if until is None
            else until
        )
        is_news = now - standing.told_at > self._limits.ejection_forget_s or (before is not None and before.is_news)
        since = before.since if before is not None and before.fault is fault else now
        self._held[key] = Ejection(*key, fault, since, until, is_news=is_news)
        self._changes += 1
        if is_news:
            standing.told_at = now
        self.on_eject(self._held[key])

    def _readmit(self, ejection: Ejection, now: float) -> None:
        key = (ejection.node_id, ejection.model)
        del self._held[key]
        standing = self._standings.setdefault(key, Standing())
        standing.back_at = standing.heard_at = now
        standing.counts = [0, 0, 0]
        self._changes += 1

    def _keep_half(self) -> None:
        # When healthy nodes leave, those that are ejected are tried sooner than was meant.
        for model in {one.model for one in self._held.values() if one.model}:
            nodes = {link.node_id for link in self._links_for(model)}
            held = [one for one in self._held.values() if one.model == model and one.node_id in nodes]
            held = sorted((one for one in held if one.fault is not Fault.WRONG), key=lambda one: one.until)
            for ejection in held[: max(0, len(held) - len(nodes) // 2)]:
                ejection.until = min(ejection.until, ejection.since + self._limits.ejection_base_s)

    def _forget(self, now: float) -> None:
        idle = {
            key
            for key, standing in self._standings.items()
            if now - standing.heard_at > self._limits.ejection_forget_s and not standing.open and key not in self._held
        }
        for key in idle:
            del self._standings[key]
        for model in {model for _, model in idle}:  # a link that kept one would have it judged by nobody
            for link in self._links_for(model):
                if (link.node_id, model) in idle:
                    link.standings.pop(model, None)
        for node_id in [
            node_id for node_id, connects in self._connects.items() if now - connects[-1] > self._limits.ejection_links_s
        ]:
            del self._connects[node_id]
        self._floors = {key: floor for key, floor in self._floors.items() if self._changes <= floor[1]}

    def _learn(self, standing: Standing, measure: int, value: float) -> None:
        means, counts = standing.means, standing.counts
        means[measure] = (
            means[measure] + self._limits.ejection_mean_weight * (value - means[measure]) if counts[measure] else value
        )
        counts[measure] += 1
        self._changes += 1
