"""How a newcomer would fare with a model, as values."""

from __future__ import annotations

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
