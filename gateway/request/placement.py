"""Placement: which of the nodes that can take a request gets it, and what was compared for that.

The score is that of the central-server design (section 2.2), every part of it from 0 to 1. Nodes of which nothing is known but
their load keep the order of least load. Everything here is synchronous, and nothing of it runs where a model has one node.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Protocol, TypeVar
from weakref import WeakValueDictionary

import msgspec

from core.limits import GatewayLimits
from gateway.dialects.responses_answer import make_response_id
from gateway.request.prefixes import Blocks, PrefixIndex
from gateway.values import Compared, Decided, InferenceRequest, Weights, derive
from nodes.links import Link


class Replica(Protocol):
    """What the order of least load reads of a link."""

    last_served: int

    @property
    def load(self) -> int:
        """Requests known to run on the node."""

    def can_take(self, now: float) -> bool:
        """Whether it is ready and has a free slot."""

    def is_called(self, name: str) -> bool:
        """Whether a client that prefers a node by this name means it."""


L = TypeVar("L", bound=Replica)


def choose_link(candidates: Iterable[L], *, now: float, avoid: Collection[L] = (), prefer: str = "") -> L | None:
    """Return the least loaded candidate that can take work; among equals the one served longest ago.

    Those in ``avoid`` (they failed this request before) are chosen only when nothing else can take it. One that is called
    ``prefer`` comes before the others while it can take work.
    """
    if prefer:
        candidates = list(candidates)
        liked = choose_link([link for link in candidates if link.is_called(prefer) and link not in avoid], now=now)
        if liked is not None:
            return liked
    free = [link for link in candidates if link.can_take(now)]
    return min([link for link in free if link not in avoid] or free, key=_order, default=None)


def _order(link: Replica) -> tuple[int, int]:
    return link.load, link.last_served


Parts = tuple[float, float, float, float, float]
"""The parts of a node's score, each from 0 to 1, the more the better, in the order of ``Weights``.

``load``: the share of its slots that is free. ``active``: 1/(requests + 1). ``latency``: the fastest candidate's over its own.
``reliability``: the share of its requests that it answers. ``affinity``: how much of the prompt it has probably computed, 1 for
the node that the session used last.
"""


def score(parts: Parts, weights: Weights) -> float:
    total: float = sum(part * weight for part, weight in zip(parts, msgspec.structs.astuple(weights), strict=True))
    return total


class Asker(Protocol):
    """Who asks, as far as its affinity to a node depends on it."""

    tenant: str
    key_id: uuid.UUID | None
    headers: Mapping[str, str] | None
    request_id: str
    """Empty where the answer begins no session."""


class Wish(msgspec.Struct, frozen=True):
    """What ties a request to a node. ``session``, ``answer``: the caller's session, and the one that its answer may begin.

    ``prefill_s``: how long a node that has nothing of the prompt computes it, before the first token.
    """

    session: int
    session_by: str
    """What says which session it is; ``key``: the client says nothing, so its key stands for one."""
    used: int
    """The number of the replica that the session used last; 0: none, or too long ago."""
    answer: int
    blocks: Blocks
    held: Mapping[int, int]
    """How many of the blocks replicas hold, by their numbers."""
    prefill_s: float


class Choice(msgspec.Struct, frozen=True, eq=False):
    """How a link was chosen where there were several. ``scored``: what was compared; empty for the order of least load."""

    link: Link
    wish: Wish | None
    reason: str
    scored: Sequence[tuple[Link, Parts, float]] = ()


class Placement:
    """Scores the nodes of this process, and remembers which of them was sent what."""

    def __init__(self, limits: GatewayLimits, own_weights: Mapping[str, Weights] | None = None) -> None:
        """``own_weights``: by the models that have their own."""
        self._limits = limits
        self.weights = Weights.make(limits, {})
        self._own_weights = {} if own_weights is None else own_weights
        self._said = self.weights, self.weights.thousandths
        """The weights that a decision named last, and how."""
        self._prefixes = PrefixIndex(
            block_bytes=limits.prefix_block_bytes, most=limits.prefix_blocks, per_prompt=limits.prefix_prompt_blocks
        )
        self._sessions: dict[int, tuple[int, float]] = {}
        """The number of the replica that a session used last, and until when (clock.monotonic()) that counts."""
        self._numbers = itertools.count(1)
        self.placed = 0
        """Prompts for which there were several nodes."""
        self.reused = 0.0
        """The shares of them that the chosen node had been sent before, summed up."""
        self._links: WeakValueDictionary[int, Link] = WeakValueDictionary()
        """By the numbers of their replicas (``Link.replicas``)."""

    def read_wish(self, asker: Asker, request: InferenceRequest, model: str, now: float) -> Wish | None:
        """Return what ties a request to a node; None where affinity counts for nothing."""
        if not self._own_weights.get(model, self.weights).affinity:
            return None
        body, tenant = request.body, asker.tenant
        session, by = (
            derive(asker.headers, _read_session.__name__, _read_session) if asker.headers is not None else "",
            "x-session-id",
        )
        answer = 0
        if not session and request.endpoint == "/v1/messages":
            session, by = _read_user(body), "metadata.user_id"
        if request.endpoint == "/v1/responses":
            if not session:
                session, by = request.previous_response_id, "previous_response_id"
            answer = hash((tenant, model, make_response_id(asker.request_id)))
        start = _find_prompt(body)
        blocks = self._prefixes.cut(tenant, model, body[start : start + self._prefixes.most_bytes])
        held = self._prefixes.count_held(blocks) if blocks else _NONE
        who: str | int = session
        if not session:  # the number of a UUID, whose own hash is worked out in Python
            who, by = 0 if asker.key_id is None else asker.key_id.int, "key"
        number, used = hash((tenant, model, who)) if who else 0, 0
        if known := self._sessions.get(number):
            used = known[0] if now < known[1] else 0
        tokens = request.prompt_chars / self._limits.token_chars
        return Wish(number, by, used, answer, blocks, held, tokens / self._limits.prefill_tokens_s)

    def list_liked(self, wish: Wish, model: str, paths: tuple[str, ...]) -> list[Link]:
        """Return the links that have probably computed some of a prompt, or that its session used."""
        found = [self._links.get(number) for number in (*wish.held, wish.used) if number]
        known = [link for link in dict.fromkeys(found) if link is not None and not link.closed]
        return [link for link in known if link.find_path(model, paths) is not None]

    def choose(self, links: Sequence[Link], model: str, wish: Wish | None, *, held_s: float) -> Choice:
        """Return the best of several links that can take a request now. ``held_s``: how long a request holds a slot."""
        if len(links) == 1:
            return Choice(links[0], wish, "only_free")
        figures = [link.figures.get(model) or link.standings.get(model) for link in links]
        shares = self._find_shares(links, model, wish, held_s) if wish is not None else {}
        known = [one for one in figures if one is not None]
        latencies = [latency_ms for one in known if (latency_ms := one.latency_ms)]
        reliabilities = [reliability for one in known if (reliability := one.reliability) is not None]
        is_known = bool(shares or latencies or reliabilities)
        if not is_known and not self._limits.decision_candidates:
            return Choice(min(links, key=_order), wish, "least_load")
        floor = self._limits.score_latency_floor_ms
        fastest = max(floor, min(latencies, default=floor))
        # A node of which nothing is known yet counts as an average one.
        usual_latency = min(1.0, fastest * len(latencies) / sum(latencies)) if latencies else 1.0
        usual_reliability = sum(reliabilities) / len(reliabilities) if reliabilities else 1.0
        scored: list[tuple[Link, Parts, float]] = []
        w_load, w_active, w_latency, w_reliability, w_affinity = msgspec.structs.astuple(
            self._own_weights.get(model, self.weights)
        )
        top = 0.0
        for link, one in zip(links, figures, strict=True):
            load, slots = link.active + link.external_load, link.max_concurrent
            idle, active = 1 - load / slots if load < slots else 0.0, 1 / (load + 1)
            fast, reliable = usual_latency, usual_reliability
            if one is not None:
                if latency_ms := one.latency_ms:
                    fast = fastest / latency_ms if latency_ms > fastest else 1.0
                if (reliability := one.reliability) is not None:
                    reliable = reliability
            affine = shares.get(link, 0.0) if shares else 0.0
            # As ``score`` says it; a call for each candidate would take longer than the sum.
            total = w_load * idle + w_active * active + w_latency * fast + w_reliability * reliable + w_affinity * affine
            scored.append((link, (idle, active, fast, reliable, affine), total))
            if total > top:
                top = total
        if not is_known:
            return Choice(min(links, key=_order), wish, "least_load", scored)
        least = top - self._limits.score_margin
        chosen = min([link for link, _parts, total in scored if total >= least], key=_order)
        return Choice(chosen, wish, "affinity" if shares.get(chosen) else "score", scored)

    def note(self, choice: Choice, model: str, now: float) -> None:
        """Take that a request goes where it was chosen to go."""
        link, wish, sessions = choice.link, choice.wish, self._sessions
        if wish is None:
            return
        number = link.replicas.get(model)
        if number is None:
            number = link.replicas[model] = next(self._numbers)
            self._links[number] = link
        until = now + self._limits.session_s
        for session in (wish.session, wish.answer):
            if session:
                sessions.pop(session, None)
                sessions[session] = number, until
        while len(sessions) > self._limits.sessions:
            del sessions[next(iter(sessions))]
        if wish.blocks:
            self.placed += 1
            if wish.held and (count := wish.held.get(number)):
                self.reused += self._prefixes.measure(count, wish.blocks)
            self._prefixes.note(wish.blocks, number)

    def describe(self, choice: Choice, model: str) -> Decided | None:
        """Return what a record keeps of a choice; None where no decision is recorded."""
        most, wish = self._limits.decision_candidates, choice.wish
        if not most:
            return None
        session_by = session_node = ""
        prefix = 0
        if wish is not None:
            if (used := self._links.get(wish.used)) is not None and not (wish.held and wish.session_by == "key"):
                session_by, session_node = wish.session_by, used.node_name
            if wish.held and (count := wish.held.get(choice.link.replicas.get(model, 0))):
                prefix = int(1000 * self._prefixes.measure(count, wish.blocks))
        if not choice.scored:
            return Decided(choice.reason, session_by=session_by, session_node=session_node, prefix=prefix)
        ranked = sorted(choice.scored, key=_TOTAL, reverse=True)
        chosen = next(place for place, one in enumerate(ranked) if one[0] is choice.link)
        if chosen >= most:
            ranked[most - 1], chosen = ranked[chosen], most - 1
        candidates = tuple([
            Compared(link.node_name, int(1000 * a), int(1000 * b), int(1000 * c), int(1000 * d), int(1000 * e))
            for link, (a, b, c, d, e), _ in ranked[:most]
        ])  # fmt: skip  # a loop over the parts of each would take longer than all else
        weights = self._own_weights.get(model, self.weights)
        if self._said[0] is not weights:
            self._said = weights, weights.thousandths
        return Decided(
            choice.reason, candidates, chosen, self._said[1], session_by=session_by, session_node=session_node, prefix=prefix
        )

    def _find_shares(self, links: Sequence[Link], model: str, wish: Wish, held_s: float) -> dict[Link, float]:
        """Return the affinity of each link that has one and is not so much busier that another one is sooner done."""
        shares: dict[Link, float] = {}
        for number, count in wish.held.items():
            self._add_share(shares, number, self._prefixes.measure(count, wish.blocks), links)
        by_key = wish.session_by == "key" and not shares
        if wish.used and (by_key or wish.session_by != "key"):
            self._add_share(shares, wish.used, 1.0, links, model)
        # Of other requests of its key a prompt has nothing: the key breaks ties, and saves no time.
        held_s, prefill_s = (held_s or 1.0, 0.0) if by_key else (held_s, wish.prefill_s)
        if held_s and any(link.load for link in shares):
            shortest_s = min([held_s * (link.active + link.external_load) / link.max_concurrent for link in links])
            for link, share in list(shares.items()):
                if held_s * link.load / link.max_concurrent - shortest_s > share * prefill_s:
                    del shares[link]
        return shares

    def _add_share(self, shares: dict[Link, float], number: int, share: float, links: Sequence[Link], model: str = "") -> None:
        link = self._links.get(number)
        if (
            link is not None
            and link in links
            and number in link.replicas.values()
            and (not model or _answered_well(link, model))
        ):
            shares[link] = share


_NONE: Mapping[int, int] = {}
_TOTAL = itemgetter(2)
_MARKS = (b'"messages":', b'"system":', b'"instructions":', b'"input":', b'"prompt":')
_USER = b'"user_id"'


def _find_prompt(body: bytes) -> int:
    """Return where a prompt begins: at the first of these fields. Other texts with such words only make a guess a bad one."""
    start = len(body)
    for mark in _MARKS:
        at = body.find(mark, 0, start)
        if at >= 0:
            start = at
    return start


def _read_session(headers: Mapping[str, str]) -> str:
    return headers.get("x-session-id", "")


def _read_user(body: bytes) -> str:
    """Return the text of ``metadata.user_id``, "" where a body has none."""
    at = body.rfind(_USER)
    if at < 0:
        return ""
    begin = body.find(b'"', at + len(_USER))
    end = body.find(b'"', begin + 1)
    return body[begin + 1 : end].decode("utf-8", "replace") if 0 <= begin < end else ""


def _answered_well(link: Link, model: str) -> bool:
    # Whoever retries after an error shall not come to the same node for its session's sake.
    standing = link.standings.get(model)
    return standing is None or not standing.outcomes or standing.outcomes[-1][2] is None
