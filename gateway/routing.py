"""Which models may answer a name, in which order: aliases, fallback chains and ``auto``. A pure choice, as placement is.

Which node answers, and whether one can in time, is decided later: the dispatcher walks the candidates that come from here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from core.limits import limits
from gateway.errors import GatewayError, NoAvailableNode

AUTO = "auto"
"""The name by which a client leaves the choice to us, unless an alias is called so."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model behind an alias. ``weight``: its share among the targets; 0 = only when the others cannot answer."""

    model: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Alias:
    """A name that an operator made for models. A target is a model's name, never an alias. ``created`` in Unix seconds."""

    name: str
    targets: tuple[Target, ...]
    created: int = 0
    by_weight: tuple[Target, ...] = field(init=False, compare=False)
    """The targets, heaviest first; of equals the one that is named first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_weight", tuple(sorted(self.targets, key=lambda target: -target.weight)))


Refuse = Callable[[str, str], GatewayError | None]
"""``refuse(model, via)``: why this caller may not use ``model`` by asking for ``via``; None = it may."""
Choose = Callable[[Sequence[int]], int]
"""``choose(weights)``: the index of the target that comes first. There are at least two weights, all above 0."""


def may_use(allowed: frozenset[str], model: str, *, via: str) -> bool:
    """Return whether a key may use an allow-listed model by asking for ``via``: the model itself, an alias of it, ``auto``.

    ``allowed`` empty = every model. A key that names an alias may use its targets through that alias, and only through it.
    """
    return not allowed or model in allowed or via in allowed


def choose_by_weight(weights: Sequence[int], *, draw: Callable[[], float] = random.random) -> int:
    """Return an index, each with the probability of its weight. ``draw`` gives numbers from 0 to below 1."""
    rest = draw() * sum(weights)
    for index, weight in enumerate(weights):
        rest -= weight
        if rest < 0:
            return index
    return len(weights) - 1


def resolve(
    name: str,
    *,
    aliases: Mapping[str, Alias],
    refuse: Refuse,
    fallbacks_of: Callable[[str], Sequence[str]],
    rank_auto: Callable[[], Iterable[str]],
    extra: Sequence[str] = (),
    choose: Choose = choose_by_weight,
) -> list[str]:
    """Return the models that may answer a name that a client asked for, best first: 1 to ``candidates``, each once.

    An alias wins over ``auto`` and over a model of its name. Behind the chosen target come the other targets by weight, then
    ``extra`` (what the client named; an alias there stands for its targets), then the fallbacks of the first candidate.
    What the caller may not use is left out before anything is chosen. ``rank_auto``: models that nodes serve now, best first.

    Raises what ``refuse`` says of the first candidate when none is left, NoAvailableNode when ``auto`` finds nothing.
    """
    models: list[str] = []
    refusals: list[GatewayError] = []

    def add(some: Iterable[str], *, via: str) -> None:
        for model in some:
            if len(models) == limits().gateway.candidates:
                return
            if model in models:
                continue
            refusal = refuse(model, via)
            if refusal is None:
                models.append(model)
            else:
                refusals.append(refusal)

    alias = aliases.get(name)
    add(_list_models(name, aliases, rank_auto), via=name)
    if alias is not None and (chosen := _choose_target(alias, models, choose)) is not None:
        models.remove(chosen)
        models.insert(0, chosen)
    for other in extra[: limits().gateway.candidates]:
        add(_list_models(other, aliases, rank_auto), via=other)
    if not models:
        is_auto = alias is None and name == AUTO
        raise NoAvailableNode(_NOTHING_FOR_AUTO, retry_after_s=5) if is_auto or not refusals else refusals[0]
    for other in fallbacks_of(models[0]):
        add((other,), via=other)
    return models


_NOTHING_FOR_AUTO = "No node serves a model that this key may use; please retry."


def _list_models(name: str, aliases: Mapping[str, Alias], rank_auto: Callable[[], Iterable[str]]) -> Iterable[str]:
    alias = aliases.get(name)
    if alias is not None:
        return [target.model for target in alias.by_weight]
    return rank_auto() if name == AUTO else (name,)


def _choose_target(alias: Alias, usable: Sequence[str], choose: Choose) -> str | None:
    weighed = [target for target in alias.by_weight if target.weight > 0 and target.model in usable]
    if len(weighed) < 2:
        return None
    return weighed[choose([target.weight for target in weighed])].model
