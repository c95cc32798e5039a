"""Models of the fleet as its nodes have them now: loaded, loading, or on their disks. Reads only; a node may say anything."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any  # a row of iterate_rows

from django.db import connection

from core.limits import limits
from nodes.models import Node, ProviderState, clock_of
from nodes.reports import read_replicas
from nodes.services.availability import Has, has_model, iterate_rows, read_availability
from wire.bridge import RESERVED, ReplicaInfo
from wire.contract import NodeStatus

_READ = (
    *("model_names", "figures", "excluded_models", "runner_id", "max_concurrent"),
    *("presence__replicas", "presence__available_models"),
)
"""Columns that are read; facts of models are long, and read on their own."""


@dataclass(frozen=True, slots=True)
class ModelPlace:
    """One node that has a model, or is loading it. Memory in MiB, of all replicas there; None = the node does not say.

    ``takes_work``: gateways may send it requests. ``kept``: an approval keeps the model loaded there. ``endpoints``: API paths
    that it answers there, empty = any.
    """

    node_id: uuid.UUID
    node: str
    runner_id: str
    has: Has
    takes_work: bool
    slots: int
    active: int
    percent: int | None = None
    eta_s: float | None = None
    detail: str = ""
    engine: str = ""
    context_tokens: int | None = None
    memory_mb: int | None = None
    weights_mb: int | None = None
    kv_mb: int | None = None
    kept: bool = False
    tokens_per_s: float | None = None
    endpoints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetModel:
    """A model on nodes that are heard. ``available``: how many could load it, with the names of the first of them.

    ``backend``, ``quantization`` and ``size_mb`` (what a replica takes, or what its files hold) are as a node says; empty and
    None = none says it.
    """

    name: str
    places: tuple[ModelPlace, ...] = ()
    available: int = 0
    available_on: tuple[str, ...] = ()
    backend: str = ""
    quantization: str = ""
    size_mb: int | None = None

    @property
    def loaded(self) -> tuple[ModelPlace, ...]:
        return tuple(place for place in self.places if place.has is Has.LOADED)

    @property
    def loading(self) -> tuple[ModelPlace, ...]:
        return tuple(place for place in self.places if place.has is Has.LOADING)


def read_fleet_models(only: str | None = None) -> dict[str, FleetModel]:
    """Return the models that nodes have, load or could load, by name; ``only``: that model alone. Two queries."""
    places: dict[str, list[ModelPlace]] = defaultdict(list)
    counts: Counter[str] = Counter()
    names: dict[str, list[str]] = defaultdict(list)
    named = set[str]()
    rows = Node.objects.exclude(provider__state=ProviderState.DELETED).order_by("name")
    if only is not None:
        rows = rows.filter(has_model(only))
    for node in iterate_rows(rows, *_READ):
        availability = read_availability(node, now=clock_of(node), is_enabled=node.provider__state == ProviderState.ENABLED)
        if availability.status is NodeStatus.OFFLINE:
            continue
        found = _list_places(node, takes_work=availability.unavailable is None)
        for model, place in found.items():
            places[model].append(place)
        available = {model for model in node.available_models or () if isinstance(model, str)} - found.keys()
        counts.update(available)
        for model in available - named:  # of most models the first nodes are soon known
            names[model].append(node.name)
            if len(names[model]) == limits().nodes.listed_names:
                named.add(model)
    facts = _read_facts(only)
    models = {*places, *counts} if only is None else {only}
    return {
        model: FleetModel(model, tuple(places[model]), counts[model], tuple(names[model]), *facts.get(model, ("", "", None)))
        for model in sorted(models)
    }


def _list_places(node: Any, *, takes_work: bool) -> dict[str, ModelPlace]:
    said: dict[str, list[ReplicaInfo]] = defaultdict(list)
    for replica in read_replicas(node.replicas):
        if replica.state in {"loaded", "loading", RESERVED}:
            said[replica.model].append(replica)
    found = {model: _join(node, model, replicas, takes_work=takes_work) for model, replicas in said.items()}
    for model in node.model_names:  # of a node that says no more of them
        if model not in found:
            found[model] = _join(node, model, (), takes_work=takes_work)
    return found


def _join(node: Any, model: str, replicas: Sequence[ReplicaInfo], *, takes_work: bool) -> ModelPlace:
    is_loaded = model in node.model_names or any(replica.state != "loading" for replica in replicas)
    figures = node.figures.get(model) if isinstance(node.figures, dict) else None
    first = replicas[0] if replicas else None
    return ModelPlace(
        node_id=node.pk,
        node=node.name,
        runner_id=node.runner_id,
        has=Has.LOADED if is_loaded else Has.LOADING,
        takes_work=takes_work and model not in node.excluded_models,
        slots=sum(replica.slots for replica in replicas) or node.max_concurrent,
        active=sum(replica.active for replica in replicas),
        percent=None if first is None or is_loaded else first.percent,
        eta_s=None if first is None or is_loaded else first.eta_s,
        detail=first.detail if first is not None else "",
        engine=first.engine if first is not None else "",
        context_tokens=min((one.context_tokens for one in replicas if one.context_tokens), default=None),
        memory_mb=_sum(replica.memory_mb for replica in replicas),
        weights_mb=_sum(replica.weights_mb for replica in replicas),
        kv_mb=_sum(replica.kv_mb for replica in replicas),
        kept=any(replica.kept for replica in replicas),
        tokens_per_s=figures.get("tokens_per_s") if isinstance(figures, dict) else None,
        endpoints=tuple(sorted({path for replica in replicas for path in replica.endpoints})),
    )


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


# What was stored may be of another release, so each step looks at the type first.
_FACTS = """
SELECT f ->> 'name', max(coalesce(f ->> 'backend', '')), max(coalesce(f ->> 'quantization', '')),
       max(CASE WHEN jsonb_typeof(f -> 'estimate_mb') = 'number'
                THEN (f ->> 'estimate_mb')::float8 / greatest(1, coalesce((f ->> 'estimate_replicas')::float8, 1)) END)::bigint
  FROM nodes_nodepresence AS p,
       jsonb_array_elements(CASE jsonb_typeof(p.memory -> 'models') WHEN 'array' THEN p.memory -> 'models' ELSE '[]' END) AS f
 WHERE jsonb_typeof(f) = 'object' AND (%(only)s::text IS NULL OR f ->> 'name' = %(only)s) GROUP BY 1
"""


def _read_facts(only: str | None) -> dict[str, tuple[str, str, int | None]]:
    with connection.cursor() as cursor:
        cursor.execute(_FACTS, {"only": only})
        return {name: (backend, quantization, size) for name, backend, quantization, size in cursor.fetchall() if name}
