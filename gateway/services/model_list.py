"""Models as the console lists them: what the allow-list, the nodes, aliases and requests say of each, joined by name."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from enum import StrEnum
from statistics import median

from core.limits import limits
from gateway.models import Model, ModelAlias
from gateway.services.rollups import Sums, read_top
from gateway.values import Dimension
from nodes.services.models import FleetModel, read_fleet_models


class Presence(StrEnum):
    """Where a model is, the most useful first."""

    LOADED = "loaded"
    LOADING = "loading"
    ON_DISK = "on_disk"
    NOWHERE = "nowhere"


class Kind(StrEnum):
    """What a list of models is narrowed to."""

    ALL = "all"
    LOADED = "loaded"
    LOADING = "loading"
    ON_DISK = "on_disk"
    MISSING = "missing"
    """Allowed, and on no node."""
    DENIED = "denied"


class Sort(StrEnum):
    """By what a list of models is sorted."""

    NAME = "name"
    STATE = "state"
    SIZE = "size"
    SPEED = "speed"
    REQUESTS = "requests"


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model of the list. ``row`` None = nobody may ask for it, and no gateway has noted it yet. ``size_mb``: in MiB, of one
    replica or of its files; ``aliases``: of everybody and of tenants, that lead to it.
    """

    name: str
    row: Model | None
    fleet: FleetModel
    aliases: tuple[str, ...] = ()
    sums: Sums = field(default_factory=Sums)

    @property
    def is_allowed(self) -> bool:
        return self.row is not None and self.row.allowed

    @property
    def presence(self) -> Presence:
        if self.fleet.loaded:
            return Presence.LOADED
        if self.fleet.loading:
            return Presence.LOADING
        return Presence.ON_DISK if self.fleet.available else Presence.NOWHERE

    @property
    def is_served(self) -> bool:
        """Whether a node that has it takes requests."""
        return any(place.takes_work for place in self.fleet.loaded)

    @property
    def where(self) -> tuple[str, ...]:
        """The first nodes that have it, load it or, where none does, could."""
        return tuple(place.node for place in self.fleet.places[: limits().nodes.listed_names]) or self.fleet.available_on

    @property
    def where_beyond(self) -> int:
        """How many more there are."""
        return (len(self.fleet.places) or self.fleet.available) - len(self.where)

    @property
    def percent(self) -> int | None:
        """How much of the load that is furthest is done."""
        return max((place.percent for place in self.fleet.loading if place.percent is not None), default=None)

    @property
    def size_mb(self) -> int | None:
        measured = [place.memory_mb for place in self.fleet.loaded if place.memory_mb]
        return max(measured) if measured else self.fleet.size_mb

    @property
    def context_tokens(self) -> int | None:
        """What clients are told: as the operator says, else the smallest that a node says."""
        if self.row is not None and self.row.context_tokens is not None:
            return self.row.context_tokens
        return min((place.context_tokens for place in self.fleet.loaded if place.context_tokens), default=None)

    @property
    def engine(self) -> str:
        return next((place.engine for place in self.fleet.places if place.engine), self.fleet.backend)

    @property
    def tokens_per_s(self) -> float | None:
        """The median of the nodes that have answered for it."""
        known = [place.tokens_per_s for place in self.fleet.loaded if place.tokens_per_s is not None]
        return median(known) if known else None

    def is_of(self, kind: Kind) -> bool:
        match kind:
            case Kind.ALL:
                return True
            case Kind.MISSING:
                return self.is_allowed and self.presence is Presence.NOWHERE
            case Kind.DENIED:
                return not self.is_allowed
            case _:
                return self.presence.value == kind.value


def list_models_of_fleet(span: timedelta) -> list[ListedModel]:
    """Return every model that is loaded, being loaded, on a node's disk, allowed or once declared, by name; five queries.

    ``span``: until now, of which requests are counted.
    """
    fleet, rows, aliases = read_fleet_models(), {row.name: row for row in Model.objects.all()}, _read_aliases()
    sums = {one.name: one.sums for one in read_top(span, Dimension.MODEL, most=len(rows) + 1)}
    return [
        ListedModel(
            name=name,
            row=rows.get(name),
            fleet=fleet.get(name) or FleetModel(name),
            aliases=tuple(aliases.get(name, ())),
            sums=sums.get(name) or Sums(),
        )
        for name in sorted({*fleet, *rows})
    ]


def find_listed_model(row: Model) -> ListedModel:
    """Return one model as the list shows it, without its requests; three queries."""
    fleet = read_fleet_models(only=row.name)
    return ListedModel(row.name, row, fleet[row.name], tuple(_read_aliases().get(row.name, ())))


def count_kinds(models: Iterable[ListedModel]) -> Counter[Kind]:
    """Return how many models each narrowing shows."""
    return Counter(kind for model in models for kind in Kind if model.is_of(kind))


_ORDER = list(Presence)
_KEYS: dict[Sort, Callable[[ListedModel], float]] = {
    Sort.STATE: lambda model: -_ORDER.index(model.presence),
    Sort.SIZE: lambda model: model.size_mb or -1,
    Sort.SPEED: lambda model: model.tokens_per_s or -1.0,
    Sort.REQUESTS: lambda model: model.sums.requests,
}


def sort_models(models: Iterable[ListedModel], by: Sort, *, is_reversed: bool = False) -> list[ListedModel]:
    """Return models in an order: names from A, everything else from the most; ``is_reversed``: the other way around."""
    named = sorted(models, key=lambda model: model.name, reverse=is_reversed and by is Sort.NAME)
    return named if by is Sort.NAME else sorted(named, key=_KEYS[by], reverse=not is_reversed)


def _read_aliases() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    rows = ModelAlias.objects.filter(is_active=True).order_by("name", "pk").values_list("name", "targets")
    for name, targets in rows:
        for target in targets:
            if name not in found[str(target["model"])]:
                found[str(target["model"])].append(name)
    return found
