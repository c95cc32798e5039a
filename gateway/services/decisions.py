"""Why requests went to their nodes: one decision in words, and a day of them scored anew with other weights. Reads only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import msgspec
from django.utils.functional import Promise
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from core.limits import limits
from gateway.models import Model, RequestRecord
from gateway.services.errors import RequestNotFound
from gateway.services.models import require_weights
from gateway.values import Compared, Decided, Weights
from wire import clock
from wire.ids import parse_id

PARTS = Weights.__struct_fields__
"""The parts of a score, in the order in which weights and candidates have them."""
_REASONS: dict[str, str | Promise] = {
    "score": gettext_lazy("It had the best score, or one as good as the best and less to do."),
    "affinity": gettext_lazy("It had the best score, and its session or the beginning of its prompt had been there before."),
    "least_load": gettext_lazy("Nothing but the load of the nodes was known; it had the least to do."),
    "preferred": gettext_lazy("The caller asked for it (prefer_gpu)."),
    "only_free": gettext_lazy("No other node had a free slot."),
    "waited": gettext_lazy("The request waited, and this was the first slot that became free."),
}


@dataclass(frozen=True, slots=True)
class ScoredNode:
    """A node that was compared. ``score`` and ``parts`` (named as in ``PARTS``) are from 0 to 1."""

    node: str
    score: float
    parts: dict[str, float]
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """From where a request waited: its tier (``high``, ``normal``, ``low``), its place and the estimate as the wait began."""

    tier: str
    position: int
    estimate_ms: int
    waited_ms: int


@dataclass(frozen=True, slots=True)
class AffinityFacts:
    """What tied a request to nodes. ``session_node``: which its session had used last; empty = none. ``session_by``: as named
    by what. ``prefix``: how much of the prompt its node had been sent before, from 0 to 1.
    """

    session_by: str
    session_node: str
    prefix: float


@dataclass(frozen=True, slots=True)
class DecisionFacts:
    """Why a request went to its node. ``reason``: a word; empty = there was nothing to choose, or it was not recorded."""

    reason: str
    text: str
    node: str
    weights: dict[str, float]
    candidates: tuple[ScoredNode, ...]
    waited: QueueFacts | None = None
    affinity: AffinityFacts | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What is said behind ``text``: from where it waited, and what tied it to a node."""
        said = []
        if self.waited is not None:
            said.append(_say_wait(self.waited))
        if self.affinity is not None:
            said += _say_affinity(self.affinity, self)
        return tuple(said)


def find_decision(text: str) -> tuple[RequestRecord, DecisionFacts]:
    """Return a request (``req_…``) and why it went to its node. Raises RequestNotFound."""
    record_id = parse_id("req", text)
    record = None if record_id is None else RequestRecord.objects.filter(pk=record_id).first()
    if record is None:
        raise RequestNotFound(_("There is no request %(text)s.") % {"text": text[:80]}, param="request_id")
    return record, explain_decision(record)


def explain_decision(record: RequestRecord) -> DecisionFacts:
    """Return why a request went to its node; no query."""
    decision = _read(record.decision)
    if decision is None:
        no_choice = _("There was no other node to choose, or decisions were not recorded.")
        text = no_choice if record.node_id else _("It got no node.")
        return DecisionFacts("", text, record.node_name, {}, ())
    scored = tuple(
        ScoredNode(
            one.node,
            _score(one, decision.weights),
            {name: part / 1000 for name, part in zip(PARTS, one.parts, strict=True)},
            place == decision.chosen,
        )
        for place, one in enumerate(decision.candidates)
    )
    weights = {name: weight / 1000 for name, weight in zip(PARTS, decision.weights, strict=False)}
    waited = affinity = None
    if decision.position:
        waited = QueueFacts(decision.tier, decision.position, decision.estimate_ms, record.queue_ms or 0)
    if decision.session_node or decision.prefix:
        affinity = AffinityFacts(decision.session_by, decision.session_node, decision.prefix / 1000)
    return DecisionFacts(
        decision.reason, str(_REASONS.get(decision.reason, "")), record.node_name, weights, scored, waited, affinity
    )


def _say_wait(waited: QueueFacts) -> str:
    return _("It waited %(waited).1f s with %(tier)s priority, from place %(position)d; the estimate was %(estimate).1f s.") % {
        "waited": waited.waited_ms / 1000,
        "tier": waited.tier,
        "position": waited.position,
        "estimate": waited.estimate_ms / 1000,
    }


def _say_affinity(affinity: AffinityFacts, facts: DecisionFacts) -> list[str]:
    said = []
    values = {"session": affinity.session_by, "node": affinity.session_node}
    is_key = affinity.session_by == "key"
    if affinity.session_node == facts.node and affinity.session_node:
        sentence = _("Its key was at %(node)s last.") if is_key else _("Its session (%(session)s) was at %(node)s last.")
        said.append(sentence % values)
    elif affinity.session_node:
        compared = {one.node: one.parts["affinity"] for one in facts.candidates}
        last = (
            _("Its key was at %(node)s last, %(why)s.")
            if is_key
            else _("Its session (%(session)s) was at %(node)s last, %(why)s.")
        )
        why = {
            None: _("which had no free slot or was not compared"),
            0.0: _("which counted for nothing, having more to do"),
        }.get(compared.get(affinity.session_node), _("which others outweighed"))
        said.append(last % {**values, "why": why})
    if affinity.prefix:
        said.append(
            _("%(node)s had been sent the first %(percent)d%% of the prompt before.")
            % {"node": facts.node, "percent": round(100 * affinity.prefix)}
        )
    return said


def _read(stored: object) -> Decided | None:
    try:
        return None if stored is None else msgspec.convert(stored, Decided)
    except msgspec.ValidationError:  # a later release wrote it
        return None


def _score(one: Compared, weights: Iterable[float]) -> float:
    """Return a score from 0 to 1; ``weights`` and the parts are in thousandths."""
    return sum(part * weight for part, weight in zip(one.parts, weights, strict=False)) / 1e6


@dataclass(slots=True)
class Replay:
    """What other weights would have changed. ``moves``: requests by model, node and the node they would have gone to."""

    compared: int = 0
    changed: int = 0
    moves: Counter[tuple[str, str, str]] = field(default_factory=Counter)


def read_weights(text: str) -> dict[str, float]:
    """Return the weights that ``load=0.3,latency=0.4`` sets. Raises InvalidValue."""
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            weights[name.strip()] = float(value)
        except ValueError:
            weights[name.strip()] = math.nan
    require_weights(weights, param="weights")
    return weights


def replay_routing(weights: Mapping[str, float], *, model: str = "", hours: float = 24.0) -> Replay:
    """Score the decisions of the last hours anew, the newest first.

    ``weights``: those to try; the others are as each model has them, or as they are set here. Each decision is taken by
    itself: a request that had gone elsewhere would have changed the load that later ones met.
    """
    bounds = limits().gateway
    records = RequestRecord.objects.filter(created_at__gte=clock.now() - timedelta(hours=hours), decision__isnull=False)
    if model:
        records = records.filter(model=model)
    rows = records.order_by("-created_at").values_list("model", "decision")[: bounds.replayed_records]
    own = dict(Model.objects.values_list("name", "score_weights"))
    tried = {name: Weights.make(bounds, {**weights_of, **weights}).thousandths for name, weights_of in own.items()}
    otherwise = Weights.make(bounds, weights).thousandths
    replay = Replay()
    for name, stored in rows.iterator():
        decision = _read(stored)
        if decision is None or len(decision.candidates) < 2 or decision.reason == "least_load":
            continue
        replay.compared += 1
        chosen = decision.candidates[decision.chosen]
        used = tried.get(name, otherwise)
        scores = [_score(one, used) for one in decision.candidates]
        best = decision.candidates[scores.index(max(scores))]
        if max(scores) > scores[decision.chosen] + bounds.score_margin:
            replay.changed += 1
            replay.moves[name, chosen.node, best.node] += 1
    return replay


def print_decision(record: RequestRecord, facts: DecisionFacts) -> str:
    """Return a decision as text for a terminal."""
    lines = [f"{record.printed_id} of {record.model} went to {facts.node or 'no node'}. {facts.text}"]
    lines += [f"  {note}" for note in facts.notes]
    if facts.candidates:
        width = max(len(one.node) for one in facts.candidates)
        lines.append(f"  {'node':{width}}  score  " + "  ".join(f"{name:>11}" for name in PARTS))
        for one in facts.candidates:
            parts = "  ".join(f"{one.parts[name]:11.3f}" for name in PARTS)
            lines.append(f"{'*' if one.is_chosen else ' '} {one.node:{width}}  {one.score:.3f}  {parts}")
        weights = "  ".join(f"{facts.weights.get(name, 0):11.3f}" for name in PARTS)
        lines.append(f"  {'weight':{width}}         {weights}")
    return "\n".join(lines)


def print_replay(replay: Replay) -> str:
    """Return what other weights would have changed, as text for a terminal."""
    if not replay.compared:
        return "No request of that time had a choice that was recorded."
    share = 100 * replay.changed / replay.compared
    lines = [f"{replay.changed:,} of {replay.compared:,} requests with a choice would have gone elsewhere ({share:.1f} %)."]
    for (model, node, other), count in replay.moves.most_common(limits().gateway.page_choices):
        lines.append(f"  {count:,}  {model}: {node} → {other}")
    return "\n".join(lines)
