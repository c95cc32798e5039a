"""How a newcomer would fare with a model, as values."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.errors import GatewayError


@dataclass(frozen=True, slots=True)
class Ready:
    """A slot is free now."""


@dataclass(frozen=True, slots=True)
class Busy:
    """Boxes are there and full; a newcomer would wait about this long."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """Nobody can serve it now."""

    error: GatewayError


Outlook = Ready | Busy | Closed


def pick_name(outlooks: Iterable[tuple[str, Outlook]], budget_s: float) -> str:
    """Return the first name that has room or whose wait fits in ``budget_s``; else that of the shortest wait, or the first.

    ``outlooks``: at least one, best first; read no further than needed.
    """
    best, best_wait_s = "", math.inf
    for name, outlook in outlooks:
        best = best or name
        match outlook:
            case Ready():
                return name
            case Busy(wait_s) if wait_s <= budget_s:
                return name
            case Busy(wait_s) if wait_s < best_wait_s:
                best, best_wait_s = name, wait_s
            case _:
                continue
    return best
