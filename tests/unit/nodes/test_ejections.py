"""Which nodes get requests, by how they answer: a fleet of played nodes on a clock of the test's own."""

from __future__ import annotations

import math
import random
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import limits
from gateway.request.placement import choose_link
from nodes.links import Link, LinkRegistry
from nodes.links.ejections import Answer, Ejection, Fault, Trial, Verdict
from tests.fakes.clock import VirtualClock, install_virtual_clock
from tests.fakes.examples import examples
from tests.fakes.links import FakeLink

CALLER, OTHER = uuid.UUID(int=1), uuid.UUID(int=2)


@dataclass
class Heard:
    """What came of one attempt."""

    first_byte_at: float | None = None
    received: int = 0
    was_blocked: bool = False


@dataclass(eq=False)
class Node:
    """How a node answers: seconds to the first byte, bytes a second after it, and whether it fails."""

    link: FakeLink
    wait_s: float = 0.1
    pace: float = 1e6
    is_failing: bool = False
    served: int = 0


@dataclass
class Fleet:
    """Nodes that serve ``m``, one request after the other, each placed as a gateway places it."""

    clock: VirtualClock = field(default_factory=install_virtual_clock)
    nodes: list[Node] = field(default_factory=list)
    turn: int = 0
    told: list[Ejection] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.registry = LinkRegistry()
        self.registry.ejections.on_eject = self.told.append

    @property
    def now(self) -> float:
        return self.clock.monotonic_s

    @now.setter
    def now(self, now: float) -> None:
        self.clock.monotonic_s = now

    def add(self, *, slots: int = 4, **how: float | bool) -> Node:
        link = FakeLink("m", slots=slots)
        link.last_seen = math.inf  # never stale by the test's clock
        self.registry.add(link)
        self.nodes.append(Node(link, **how))  # type: ignore[arg-type]  # the fields of Node
        return self.nodes[-1]

    def proven(self) -> Node:
        """Return one that has answered well for a while."""
        node = self.add()
        for _ in range(8):
            self.answer(node)
        return node

    def place(self) -> tuple[Node, Ejection | None]:
        """Return who gets the next request."""
        links = self.registry.ejections.choose_from(self.registry.links_for("m"), "m", self.now)
        link = choose_link(links, now=self.now)
        assert link is not None, "somebody always gets it"
        self.turn += 1
        link.last_served = self.turn
        node = next(node for node in self.nodes if node.link is link)
        node.served += 1
        return node, self.registry.ejections.take_probe(link, "m", self.now)

    def begin(self, node: Node, answer: Answer, *, caller: uuid.UUID | None = CALLER, probed: Ejection | None = None) -> Trial:
        return self.registry.ejections.begin(
            node.link, "m", caller=caller, is_streaming=True, answer=answer, now=self.now, probed=probed
        )

    def serve(self, *, caller: uuid.UUID | None = CALLER, is_poison: bool = False, every_s: float = 0.0) -> Node:
        """Send one streamed request of 1,000 bytes to whoever gets it."""
        node, probed = self.place()
        self.answer(node, caller=caller, is_poison=is_poison, probed=probed)
        self.now += every_s
        self.registry.ejections.tick(self.now)
        return node

    def answer(
        self, node: Node, *, caller: uuid.UUID | None = CALLER, is_poison: bool = False, probed: Ejection | None = None
    ) -> None:
        heard = Heard()
        trial = self.begin(node, heard, caller=caller, probed=probed)
        self.now += node.wait_s
        heard.first_byte_at, heard.received = self.now, 1000
        self.now += 1000 / node.pace
        if probed is not None:
            probed.end_probe(self.now)
        self.registry.ejections.end(trial, Verdict.FAILED if node.is_failing or is_poison else Verdict.GOOD, self.now)

    def serve_many(self, count: int, **how: float) -> Counter[Node]:
        return Counter(self.serve(every_s=how.get("every_s", 0.0)) for _ in range(count))

    def faults(self) -> list[Fault]:
        return [ejection.fault for ejection in self.registry.ejections]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.mark.parametrize(
    ("how", "fault"),
    [
        ({"is_failing": True}, Fault.FAILED),
        ({"wait_s": 2.0}, Fault.SLOW),
        ({"pace": 125.0}, Fault.SLOW),  # 1 kbit/s
    ],
)
@pytest.mark.parametrize("healthy", [1, 3])
def test_a_bad_node_loses_its_share_within_some_requests_and_those_beside_it_do_not(
    fleet: Fleet, how: dict[str, float], fault: Fault, healthy: int
) -> None:
    good = [fleet.add() for _ in range(healthy)]
    bad = fleet.add(slots=1000, **how)
    fleet.serve_many(12 * (healthy + 1))
    assert fleet.faults() == [fault]
    served = fleet.serve_many(100)
    assert served[bad] <= 4, "one probe at a time, and ever fewer of them"
    assert all(served[node] >= 96 // healthy for node in good)


def test_a_node_full_of_requests_it_never_answers_is_ejected_before_they_end(fleet: Fleet) -> None:
    fleet.proven()
    full = fleet.add(slots=1000)
    for _ in range(5):
        fleet.begin(full, Heard())
    fleet.now += 3.0
    fleet.registry.ejections.tick(fleet.now)
    assert fleet.faults() == [Fault.SLOW]


def test_a_node_that_nobody_asked_for_hours_is_judged_as_before(fleet: Fleet) -> None:
    good, full = fleet.proven(), fleet.proven()
    fleet.now += 2 * 3600
    fleet.registry.ejections.tick(fleet.now)
    assert fleet.registry.ejections.size == 0, "what was measured then is forgotten"
    for _ in range(8):
        fleet.answer(good)
    for _ in range(5):
        fleet.begin(full, Heard())
    fleet.now += 3.0
    fleet.registry.ejections.tick(fleet.now)
    assert fleet.faults() == [Fault.SLOW]


def test_a_client_that_waited_long_and_left_tells_of_a_slow_node_and_one_that_left_soon_does_not(fleet: Fleet) -> None:
    fleet.proven()
    bad = fleet.add()
    for waited_s, faults in ((0.5, []), (20.0, [Fault.SLOW])):
        for _ in range(5):
            trial = fleet.begin(bad, Heard())
            fleet.now += waited_s
            fleet.registry.ejections.end(trial, Verdict.NOTHING, fleet.now)
        assert fleet.faults() == faults


def test_slow_readers_a_lost_link_and_whoever_chose_the_node_blame_nobody(fleet: Fleet) -> None:
    good, other = fleet.proven(), fleet.add()
    ejections = fleet.registry.ejections
    for _ in range(12):
        trial = fleet.begin(other, Heard(first_byte_at=fleet.now, received=1000, was_blocked=True))
        fleet.now += 60.0
        ejections.end(trial, Verdict.GOOD, fleet.now)
        fleet.answer(other, caller=None, is_poison=True)
    for _ in range(8):
        fleet.answer(good)
    trials = [fleet.begin(other, Heard()) for _ in range(30)]
    fleet.registry.remove(other.link)
    for trial in trials:
        ejections.end(trial, Verdict.FAILED, fleet.now)
    assert fleet.faults() == [], "all that were lost with a link are one fault"


@pytest.mark.parametrize("fault", [Fault.FAILED, Fault.UNSTEADY])
def test_the_last_node_is_never_kept_from_requests(fleet: Fleet, fault: Fault) -> None:
    alone = fleet.add(is_failing=fault is Fault.FAILED)
    if fault is Fault.UNSTEADY:
        for _ in range(10):
            fleet.registry.ejections.note_connect(alone.link.node_id, fleet.now)
    assert fleet.serve_many(50)[alone] == 50
    assert fleet.faults() == ([] if fault is Fault.FAILED else [fault])
    other = fleet.add()
    fleet.serve_many(20)
    assert fleet.faults() == [fault]
    fleet.registry.remove(other.link)
    assert fleet.serve_many(5)[alone] == 5


def test_a_gpu_that_is_five_times_slower_than_the_others_keeps_its_share(fleet: Fleet) -> None:
    fleet.add(wait_s=0.5), fleet.add(wait_s=0.5)
    old = fleet.add(wait_s=2.5, pace=5000.0)
    assert fleet.serve_many(90)[old] == 30
    assert fleet.faults() == []


def test_at_most_half_of_the_nodes_are_ejected_at_once(fleet: Fleet) -> None:
    fleet.add(), fleet.add()
    for _ in range(3):
        fleet.add(is_failing=True)
    fleet.serve_many(100)
    assert len(fleet.faults()) == 2


def test_a_request_that_fails_everywhere_ejects_nobody(fleet: Fleet) -> None:
    for _ in range(3):
        fleet.add()
    for number in range(200):
        is_poison = number % 3 != 0
        fleet.serve(caller=OTHER if is_poison else CALLER, is_poison=is_poison)
    assert fleet.faults() == []


def test_an_ejected_node_is_tried_by_one_request_at_a_time_and_then_gets_its_share_back(fleet: Fleet) -> None:
    fleet.add()
    bad = fleet.add(is_failing=True)
    fleet.serve_many(20)
    bad.is_failing = False
    fleet.now += limits().nodes.ejection_base_s
    probed = [fleet.place() for _ in range(10)]
    (probe,) = [ejection for node, ejection in probed if node is bad]  # while one is under way there is no second
    assert probe is not None
    probe.end_probe(fleet.now)
    fleet.now += 2.0
    for _ in range(8):
        fleet.serve()
    assert fleet.faults() == []
    assert fleet.serve_many(40)[bad] == 20


def test_each_ejection_is_twice_as_long_up_to_five_minutes(fleet: Fleet) -> None:
    fleet.add()
    bad = fleet.add(is_failing=True)
    fleet.serve_many(20)
    lengths = []
    for _ in range(7):
        (ejection,) = fleet.registry.ejections
        lengths.append(round(ejection.until - fleet.now))
        fleet.now = ejection.until
        fleet.registry.ejections.tick(fleet.now)
        before = bad.served
        while bad.served == before:
            fleet.serve()
    assert lengths[0] <= limits().nodes.ejection_base_s
    assert [round(length, -1) for length in lengths[1:]] == [20, 40, 80, 160, 300, 300]
    assert all(length <= limits().nodes.ejection_max_s for length in lengths)


def test_a_node_that_connects_ten_times_a_minute_waits_until_it_stays_and_only_one_that_does(fleet: Fleet) -> None:
    fleet.add()
    node = fleet.add()
    ejections = fleet.registry.ejections
    start = max(fleet.now, 1e9)  # above the clock by which the fixture connected them
    for turn in range(10):
        fleet.now = start + turn * 5.0
        ejections.note_connect(node.link.node_id, fleet.now)
        assert fleet.faults() == ([Fault.UNSTEADY] if turn == 9 else [])
    assert fleet.serve_many(20)[node] == 0
    (ejection,) = ejections
    assert round(ejection.until - start - 45.0) == limits().nodes.ejection_base_s
    ejections.note_connect(node.link.node_id, fleet.now)
    (ejection,) = ejections
    assert ejection.until - fleet.now == 2 * limits().nodes.ejection_base_s, "each further time it has to stay longer"
    fleet.now = ejection.until
    ejections.tick(fleet.now)
    assert fleet.faults() == []
    assert fleet.serve_many(20)[node] == 10


def test_a_wrong_canary_answer_ejects_until_a_right_one(fleet: Fleet) -> None:
    fleet.add()
    liar = fleet.add()
    ejections = fleet.registry.ejections
    ejections.note_canary(liar.link, "m", is_right=False, until=fleet.now + 600, now=fleet.now)
    assert fleet.serve_many(50, every_s=5.0)[liar] == 0, "nothing tries it but another canary"
    ejections.note_canary(liar.link, "m", is_right=True, until=fleet.now, now=fleet.now)
    assert fleet.serve_many(20)[liar] == 10


def test_when_most_nodes_answer_the_canary_wrongly_half_of_them_go_on_and_all_are_told_of(fleet: Fleet) -> None:
    nodes = [fleet.add() for _ in range(4)]
    for node in nodes:
        fleet.registry.ejections.note_canary(node.link, "m", is_right=False, until=fleet.now + 600, now=fleet.now)
    assert len(fleet.told) == 4
    served = fleet.serve_many(40)
    assert [served[node] for node in nodes] == [0, 0, 20, 20]


def test_operators_are_told_of_a_node_once_an_hour_and_nothing_is_remembered_for_ever(fleet: Fleet) -> None:
    fleet.add()
    fleet.add(is_failing=True)
    news = []

    def tell(ejection: Ejection) -> None:
        news.append(ejection.is_news)
        ejection.is_news = False  # as whoever wrote it down says

    fleet.registry.ejections.on_eject = tell
    fleet.serve_many(400, every_s=5.0)
    assert len(news) > 3
    assert news == [True] + [False] * (len(news) - 1)
    for node in fleet.nodes:
        fleet.registry.remove(node.link)
    fleet.registry.ejections.tick(fleet.now + 2 * 3600)
    fleet.registry.ejections.tick(fleet.now + 4 * 3600)
    assert fleet.registry.ejections.size == 0


@examples(10)
@given(
    bad=st.lists(st.sampled_from(["ok", "fails", "slow"]), min_size=1, max_size=6),
    pattern=st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=12),
)
def test_somebody_is_always_served_and_half_always_stay(bad: list[str], pattern: list[tuple[int, bool]]) -> None:
    fleet = Fleet()
    for kind in bad:
        fleet.add(is_failing=kind == "fails", wait_s=3.0 if kind == "slow" else 0.05)
    for number in range(120):
        caller, is_poison = pattern[number % len(pattern)]
        fleet.serve(caller=uuid.UUID(int=caller), is_poison=is_poison)
        held = [one for one in fleet.registry.ejections if one.bars(fleet.now)]
        assert 2 * len(held) <= len(bad)
    if set(bad) == {"ok"} and len({is_poison for _caller, is_poison in pattern}) == 1:
        assert fleet.told == []


@examples(5)
@given(bad=st.integers(0, 4), how=st.sampled_from(["fails", "slow"]))
def test_wherever_the_bad_node_stands_it_loses_its_share_and_gets_it_back_once_it_is_mended(bad: int, how: str) -> None:
    fleet = Fleet()
    for number in range(5):
        is_bad = number == bad
        fleet.add(is_failing=is_bad and how == "fails", wait_s=4.0 if is_bad and how == "slow" else 0.05)
    fleet.serve_many(60)
    served = fleet.serve_many(100)
    assert served[fleet.nodes[bad]] <= 2
    assert min(served[node] for number, node in enumerate(fleet.nodes) if number != bad) >= 20
    fleet.nodes[bad].is_failing, fleet.nodes[bad].wait_s = False, 0.05
    fleet.now += limits().nodes.ejection_max_s
    fleet.serve_many(40, every_s=1.0)
    assert fleet.serve_many(100)[fleet.nodes[bad]] == 20


class LookedAt(LinkRegistry):
    """Counts how often all links of a model are asked for."""

    looks = 0

    def links_for(self, model: str) -> Sequence[Link]:
        self.looks += 1
        return super().links_for(model)


class Crowd:
    """Many nodes of ``m`` whose answers all take longer than what is never slow."""

    def __init__(self, nodes: int, draw: random.Random) -> None:
        self.registry, self.now, self.told, self._draw = LookedAt(), 0.0, list[Ejection](), draw
        self.ejections = self.registry.ejections
        self.ejections.on_eject = self.told.append
        self.usual_s: dict[FakeLink, float] = {}
        for _ in range(nodes):
            self.join()

    def join(self) -> None:
        link = FakeLink("m")
        link.last_seen = math.inf
        self.registry.add(link)
        self.usual_s[link] = self._draw.choice((1.1, 9.0))

    def leave(self, link: FakeLink) -> None:
        self.registry.remove(link)
        del self.usual_s[link]

    def answer(self, link: FakeLink, waited_s: float, *, is_streaming: bool) -> bool:
        """Have a node answer; return whether it was judged slow."""
        began, streamed_s = self.now, 2 * waited_s
        self.now += waited_s + (streamed_s if is_streaming else 0)
        heard = Heard(began + waited_s, 1000) if is_streaming else Heard()
        trial = self.ejections.begin(link, "m", caller=CALLER, is_streaming=is_streaming, answer=heard, now=began)
        count = len(self.told)
        self.ejections.end(trial, Verdict.GOOD, self.now)
        return len(self.told) > count or link.standings["m"].outcomes[-1][2] is Fault.SLOW

    def is_slow(self, link: FakeLink, waited_s: float, *, is_streaming: bool) -> bool:
        """Return what the plain rule says: many times the median of what all others take that are not ejected."""
        bounds, held = limits().nodes, {one.node_id for one in self.ejections}
        others = [
            one.standings["m"] for one in self.usual_s if one is not link and "m" in one.standings and one.node_id not in held
        ]
        measures = {0: waited_s, 2: 2 * waited_s / 1000} if is_streaming else {1: waited_s}
        for measure, value in measures.items():
            known = [one.means[measure] for one in others if one.counts[measure] >= bounds.ejection_faults]
            if known and value > bounds.ejection_slow_factor * median(known):
                return True
        return False


@examples(10)
@given(seed=st.integers(0, 10_000))
def test_of_many_nodes_exactly_those_are_slow_that_are_so_beside_the_median_of_all_others(seed: int) -> None:
    draw = random.Random(seed)
    crowd, found = Crowd(24, draw), Counter[bool]()
    for _ in range(1500):
        link = draw.choice(list(crowd.usual_s))
        match draw.random():
            case chance if chance < 0.02:
                crowd.leave(link)
                crowd.join()
            case chance if chance < 0.06:
                crowd.ejections.note_canary(link, "m", is_right=draw.random() < 0.7, until=math.inf, now=crowd.now)
            case chance if chance < 0.1:
                crowd.usual_s[link] = draw.choice((1.1, 9.0))
            case _:
                waited_s = crowd.usual_s[link] * draw.choice((1.0, 1.0, 1.0, 1.0, 7.0, 9.0))
                is_streaming = draw.random() < 0.5
                expected = crowd.is_slow(link, waited_s, is_streaming=is_streaming)
                assert crowd.answer(link, waited_s, is_streaming=is_streaming) is expected
                found[expected] += 1
    assert found[True]
    assert found[False]


@pytest.mark.parametrize("change", ["leave", "are ejected", "become quick"])
def test_a_node_is_slow_at_once_when_those_that_were_as_slow(change: str) -> None:
    crowd = Crowd(40, random.Random(1))
    quick, slow = list(crowd.usual_s)[:8], list(crowd.usual_s)[8:]
    for link in [*quick, *slow] * 6:
        crowd.answer(link, 1.1 if link in quick else 9.0, is_streaming=False)
    last, crowd.registry.looks = slow.pop(), 0
    while not crowd.registry.looks:  # until it is compared with all of them
        assert not crowd.answer(last, 60.0, is_streaming=False)
    for link in slow[:25]:
        if change == "leave":
            crowd.leave(link)
        elif change == "are ejected":
            crowd.ejections.note_canary(link, "m", is_right=False, until=math.inf, now=crowd.now)
        else:
            for _ in range(12):
                crowd.answer(link, 1.1, is_streaming=False)
    assert crowd.answer(last, 60.0, is_streaming=False)


def test_few_answers_of_a_thousand_nodes_are_compared_with_all_of_them() -> None:
    draw = random.Random(1)
    crowd = Crowd(1000, draw)
    for link in list(crowd.usual_s) * 6:
        crowd.answer(link, 2.0 + draw.random(), is_streaming=False)
    crowd.registry.looks = 0
    for _ in range(2000):
        assert not crowd.answer(draw.choice(list(crowd.usual_s)), 2.0 + draw.random(), is_streaming=False)
    assert crowd.registry.looks <= 10
