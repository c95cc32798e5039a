"""Placement: scores, what ties a request to a node, and what a choice among a thousand nodes costs, on links of the test."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.limits import GatewayLimits
from gateway.request.placement import Choice, Placement, score
from gateway.values import Decided, InferenceRequest, Weights
from nodes.links import LinkRegistry
from nodes.links.ejections import Fault, Standing, Verdict
from tests.fakes.examples import examples
from tests.fakes.links import FakeLink

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
PROMPT = b'{"model":"m","messages":[{"role":"system","content":"%b"}]}' % (b"be brief " * 200)
LIMITS = GatewayLimits()
KEY = uuid.UUID(int=1)
NOW = 1000.0


@dataclass
class Figures:
    """What is known of a replica."""

    reliability: float | None = 1.0
    latency_ms: float | None = 100.0


@dataclass
class Asker:
    """A caller."""

    tenant: str = "t"
    key_id: uuid.UUID | None = KEY
    headers: Mapping[str, str] | None = field(default_factory=dict)
    request_id: str = "req_1"


def request(body: bytes = PROMPT, *, endpoint: str = CHAT, previous: str = "") -> InferenceRequest:
    return InferenceRequest(
        endpoint=endpoint, paths=(endpoint,), model="m", body=body, prompt_chars=len(body), previous_response_id=previous
    )


class Room:
    """A placement over some links, each with ten slots."""

    def __init__(self, *figures: Figures | None, **limits: Any) -> None:  # Any: fields of limits
        self.placement = Placement(replace(LIMITS, **limits))
        self.links = [FakeLink("m", slots=10) for _ in figures]
        for link, one in zip(self.links, figures, strict=True):
            link.figures = {"m": one} if one is not None else {}
        self.now = NOW

    def choose(self, asker: Asker | None = None, asked: InferenceRequest | None = None, *, held_s: float = 1.0) -> Choice:
        wish = self.placement.read_wish(asker or Asker(), asked or request(), "m", self.now)
        return self.placement.choose(self.links, "m", wish, held_s=held_s)

    def serve(self, link: FakeLink, asker: Asker | None = None, asked: InferenceRequest | None = None) -> None:
        """Have a link sent a request."""
        wish = self.placement.read_wish(asker or Asker(), asked or request(), "m", self.now)
        self.placement.note(Choice(link, wish, "score"), "m", self.now)


def test_the_score_is_the_one_of_the_design() -> None:
    weights = Placement(LIMITS).weights
    assert weights == Weights(0.25, 0.25, 0.20, 0.20, 0.10)
    assert score((1, 1, 1, 1, 1), weights) == pytest.approx(1)
    assert score((0.5, 0.5, 0.5, 0.5, 0), weights) == pytest.approx(0.45)
    for _link, parts, total in Room(Figures(0.7), None, Figures(0.9, 50.0)).choose().scored:
        assert total == pytest.approx(score(parts, weights))


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (Figures(latency_ms=100), Figures(latency_ms=200)),
        (Figures(reliability=0.99), Figures(reliability=0.6)),
        (Figures(), Figures(reliability=0.5, latency_ms=None)),
    ],
)
def test_of_two_idle_nodes_the_faster_and_the_more_reliable_one_gets_the_request(better: Figures, worse: Figures) -> None:
    for figures in ((better, worse), (worse, better)):
        room = Room(*figures)
        choice = room.choose()
        assert choice.link is room.links[figures.index(better)]
        assert choice.reason == "score"
        assert all(0 <= part <= 1 for _link, parts, _score in choice.scored for part in parts)


def test_a_model_with_weights_of_its_own_is_scored_by_them_and_its_decisions_say_so() -> None:
    room = Room(Figures(latency_ms=100), Figures(latency_ms=180))
    room.links[0].active = 5
    room.placement = Placement(LIMITS, {"m": Weights.make(LIMITS, {"latency": 1.0, "affinity": 0.0})})
    choice = room.choose()
    assert (choice.link, choice.wish) == (room.links[0], None)
    decision = room.placement.describe(choice, "m")
    assert decision is not None
    assert decision.weights == (250, 250, 1000, 200, 0)
    assert room.placement.choose(room.links, "other", None, held_s=1.0).link is room.links[1]


def test_milliseconds_do_not_decide() -> None:
    room = Room(Figures(latency_ms=2), Figures(latency_ms=45))
    assert [parts[2] for _link, parts, _score in room.choose().scored] == [1, 1]


def test_a_fast_node_that_is_full_of_work_gives_way_to_an_idle_slow_one() -> None:
    room = Room(Figures(latency_ms=100), Figures(latency_ms=180))
    room.links[0].active = 5
    assert room.choose().link is room.links[1]


def test_a_node_of_which_nothing_is_known_counts_as_an_average_one() -> None:
    room = Room(Figures(latency_ms=100), None, Figures(latency_ms=400, reliability=0.5))
    scores = [score for _link, _parts, score in room.choose().scored]
    assert scores[0] > scores[1] > scores[2]


@examples(50)
@given(loads=st.lists(st.integers(0, 9), min_size=2, max_size=8), reliable=st.none() | st.floats(0, 1))
def test_equal_nodes_keep_the_order_of_least_load_and_longest_wait(loads: list[int], reliable: float | None) -> None:
    room = Room(*[None if reliable is None else Figures(reliable) for _ in loads])
    for number, (link, load) in enumerate(zip(room.links, loads, strict=True)):
        link.active, link.last_served = load, -number
    best = min(room.links, key=lambda link: (link.load, link.last_served))
    assert room.choose(Asker(key_id=None), request(b"{}")).link.load == best.load
    if reliable is None:
        assert room.choose(Asker(key_id=None), request(b"{}")).link is best


SESSIONS = [
    (Asker(headers={"x-session-id": "s"}), request(b"{}"), Asker(headers={"x-session-id": "other"})),
    (Asker(), request(b'{"metadata":{"user_id": "u"}}', endpoint=MESSAGES), Asker(key_id=uuid.UUID(int=2))),
    (Asker(), request(b"{}"), Asker(key_id=uuid.UUID(int=2))),
    (Asker(), request(b"{}"), Asker(tenant="other")),
]


@pytest.mark.parametrize(("asker", "asked", "other"), SESSIONS, ids=["header", "user", "key", "tenant"])
def test_a_session_comes_back_to_its_node_for_five_minutes(asker: Asker, asked: InferenceRequest, other: Asker) -> None:
    room = Room(None, None, None)
    room.links[2].last_served = 9  # it would come last
    room.serve(room.links[2], asker, asked)
    choice = room.choose(asker, asked)
    assert (choice.link, choice.reason) == (room.links[2], "affinity")
    assert room.choose(other, request(b"{}")).link is not room.links[2]
    room.now += LIMITS.session_s
    assert room.choose(asker, asked).link is not room.links[2]


def test_a_conversation_of_responses_comes_back_to_the_node_of_its_last_answer() -> None:
    room = Room(None, None)
    first = Asker(key_id=None, request_id="req_7")
    room.serve(room.links[1], first, request(b"{}", endpoint=RESPONSES))
    asked = request(b"{}", endpoint=RESPONSES, previous="resp_7")
    room.links[1].last_served = 9
    assert room.choose(Asker(key_id=None), asked).link is room.links[1]
    assert room.choose(Asker(key_id=None), request(b"{}", endpoint=RESPONSES, previous="resp_8")).link is room.links[0]


def test_a_prompt_goes_where_its_beginning_was_computed_and_never_by_another_tenants() -> None:
    room = Room(None, None)
    room.links[1].last_served = 9
    room.serve(room.links[1], Asker(key_id=None))
    longer = request(PROMPT[:-3] + b'},{"role":"user","content":"Hi"}]}')
    choice = room.choose(Asker(key_id=None), longer)
    assert choice.link is room.links[1]
    assert 0.8 < choice.scored[1][1][4] <= 1
    room.serve(room.links[1], Asker(key_id=None), longer)
    room.serve(room.links[0], Asker(key_id=None), longer)
    assert room.placement.placed == 3
    assert 0.8 < room.placement.reused <= 1, "the first had nothing of it, and so had the other node"
    assert room.choose(Asker(key_id=None, tenant="other"), longer).link is room.links[0]
    unlike = request(PROMPT.replace(b"be brief", b"be clear"))
    assert room.choose(Asker(key_id=None), unlike).link is room.links[0]


def test_affinity_counts_only_while_the_wait_is_shorter_than_what_it_saves() -> None:
    room = Room(None, None, score_affinity=5.0)  # so much that nothing else would matter
    room.serve(room.links[1])
    room.links[1].active = 2
    tokens = len(PROMPT) / LIMITS.token_chars
    saved_s = tokens / LIMITS.prefill_tokens_s
    assert room.choose(held_s=saved_s / 0.2 * 0.9).link is room.links[1]
    assert room.choose(held_s=saved_s / 0.2 * 1.1).link is room.links[0]


def test_a_node_that_was_flushed_unloaded_or_came_back_has_computed_nothing() -> None:
    room = Room(None, None)
    registry = LinkRegistry()
    for link in room.links:
        registry.add(link)
    held = room.links[1]
    held.last_served = 9
    room.serve(held)
    assert room.choose().link is held
    registry.update_models(held, frozenset())
    registry.update_models(held, frozenset({"m"}))
    assert room.choose().link is room.links[0]
    room.serve(held)
    assert room.choose().link is held
    again = room.links[1] = FakeLink("m", slots=10, node_id=held.node_id)
    again.last_served = 9
    assert room.choose().link is room.links[0]


def test_whoever_got_an_error_is_not_sent_back_for_its_sessions_sake() -> None:
    room = Room(None, None)
    held = room.links[1]
    room.serve(held, Asker(), request(b"{}"))
    held.last_served = 9
    assert room.choose(asked=request(b"{}")).link is held
    held.standings["m"] = Standing()
    held.standings["m"].outcomes.append((room.now, uuid.UUID(int=1), Fault.FAILED))
    assert room.choose(asked=request(b"{}")).link is room.links[0]


def test_a_key_stands_for_a_session_only_while_nothing_better_is_known_and_its_node_is_not_busier() -> None:
    room = Room(None, None)
    alone, other = request(b"{}"), request(PROMPT.replace(b"be brief", b"be quick"))
    room.serve(room.links[1], asked=alone)
    assert room.choose(asked=alone).link is room.links[1]
    assert room.choose(asked=other).link is room.links[1]
    room.links[0].active, room.links[1].active = 2, 3
    for held_s in (0.0, 1.0):
        assert room.choose(asked=other, held_s=held_s).link is room.links[0]
    named = Asker(headers={"x-session-id": "s"})
    room.serve(room.links[1], named)
    assert room.choose(named, other, held_s=1.0).link is room.links[1]
    room.links[0].active = 3
    room.serve(room.links[0], Asker(key_id=uuid.UUID(int=2)), other)
    assert room.choose(asked=other).link is room.links[0]


def test_without_affinity_nothing_of_a_prompt_is_looked_at() -> None:
    room = Room(None, None, score_affinity=0.0)
    assert room.placement.read_wish(Asker(), request(), "m", room.now) is None
    assert room.choose().reason == "least_load"


def test_a_decision_names_the_best_eight_and_the_chosen_one() -> None:
    room = Room(*[Figures(latency_ms=100 + 10 * number) for number in range(12)])
    choice = room.choose()
    decision = room.placement.describe(choice, "m")
    assert decision is not None
    assert (decision.reason, decision.weights, len(decision.candidates)) == ("score", (250, 250, 200, 200, 100), 8)
    assert decision.candidates[decision.chosen].node == choice.link.node_name
    assert decision.candidates[0].parts == (1000, 1000, 1000, 1000, 0)
    last = Choice(room.links[-1], None, "preferred", choice.scored)
    shown = room.placement.describe(last, "m")
    assert shown is not None
    assert shown.candidates[shown.chosen].node == room.links[-1].node_name
    assert room.placement.describe(Choice(room.links[0], None, "waited"), "m") == Decided("waited")
    assert Room(None, None, decision_candidates=0).placement.describe(choice, "m") is None


def test_a_decision_says_what_tied_the_request_to_nodes() -> None:
    room = Room(None, None)
    named = Asker(headers={"x-session-id": "s"})
    room.serve(room.links[1], named)

    def describe(asker: Asker, asked: InferenceRequest) -> Decided:
        decision = room.placement.describe(room.choose(asker, asked), "m")
        assert decision is not None
        return decision

    def tied(decision: Decided) -> tuple[str, str, int]:
        return decision.session_by, decision.session_node, decision.prefix

    one, other = (link.node_name for link in room.links)
    assert tied(describe(named, request())) == ("x-session-id", other, 1000)
    assert tied(describe(Asker(), request())) == ("", "", 1000)
    assert tied(describe(Asker(), request(b"{}"))) == ("", "", 0)
    room.serve(room.links[0], asked=request(b"{}"))
    assert tied(describe(Asker(), request(b"{}"))) == ("key", one, 0)


def test_what_is_remembered_is_bounded() -> None:
    room = Room(None, sessions=5, prefix_blocks=20)
    for number in range(50):
        body = PROMPT.replace(b"be brief", b"%08d" % number)
        room.serve(room.links[0], Asker(headers={"x-session-id": str(number)}), request(body))
    assert len(room.placement._sessions) == 5
    assert len(room.placement._prefixes) == 20


def test_figures_of_a_replica_come_from_what_it_answered() -> None:
    registry = LinkRegistry()
    link = FakeLink("m")
    registry.add(link)
    now = 1000.0

    @dataclass
    class Heard:
        first_byte_at: float | None = None
        received: int = 0
        was_blocked: bool = False

    def answer(verdict: Verdict) -> None:
        nonlocal now
        trial = registry.ejections.begin(link, "m", caller=uuid.UUID(int=1), is_streaming=False, answer=Heard(), now=now)
        now += 0.5
        registry.ejections.end(trial, verdict, now)

    for _ in range(7):
        answer(Verdict.GOOD)
    assert link.standings["m"].reliability is None  # of few answers nothing follows
    answer(Verdict.GOOD)
    standing = link.standings["m"]
    assert standing.reliability == pytest.approx(0.9, abs=0.001)
    assert standing.latency_ms == pytest.approx(500)
    answer(Verdict.FAILED)
    assert standing.reliability == pytest.approx(9 / 11, abs=0.001)
    now += 100 * 3600
    answer(Verdict.GOOD)
    assert standing.good == pytest.approx(1 + 8 * 0.99**100, rel=0.01)
