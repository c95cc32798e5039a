"""Which box gets a request: a pure choice over what is known at this instant."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, TypeVar


class Candidate(Protocol):
    """What placement reads of a link."""

    last_served: int

    @property
    def load(self) -> int:
        """Requests known to run on the box."""

    def can_take(self, now: float) -> bool:
        """Whether it is ready and has a free slot."""

    def is_called(self, name: str) -> bool:
        """Whether a client that prefers a box by this name means it."""


L = TypeVar("L", bound=Candidate)


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
    best: L | None = None
    fallback: L | None = None
    for link in candidates:
        if not link.can_take(now):
            continue
        if avoid and link in avoid:
            fallback = _better(fallback, link)
        else:
            best = _better(best, link)
    return best if best is not None else fallback


def _better(current: L | None, link: L) -> L:
    if current is None or (link.load, link.last_served) < (current.load, current.last_served):
        return link
    return current
