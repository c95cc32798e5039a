"""Failover slots: held on other nodes for requests whose node missed a second heartbeat, until it is heard or given up.

Source: central-server document, section 1.3. While every node is heard, nothing of this runs but one look at each link a tick.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from gateway.metrics import FAILOVER_HELD, FAILOVER_SLOTS
from gateway.request.dispatch import Dispatcher, Job
from nodes.links import Link, LinkCondition

logger = logging.getLogger("muster.gateway")


@runtime_checkable
class InFlight(Protocol):
    """A request that runs on a node, as the sink of its stream."""

    def find_failover(self) -> tuple[Job, tuple[str, ...]] | None:
        """Return it and the API paths on which another node may take it over; None where the loss of its node ends it."""


class FailoverSlots:
    """Which slots are held for which requests. One per gateway process.

    A request keeps its slot in ``Job.failover``: it is used when the request is placed anew, and released when it has ended.
    """

    def __init__(self, dispatcher: Dispatcher, *, most: int, requeues: int) -> None:
        self._dispatcher = dispatcher
        self._most = most
        self._requeues = requeues
        self.held: dict[Job, Link] = {}
        """Requests with a slot, and the silent node that each runs on; some were used or released since the last look."""
        self._late: set[Job] = set()
        """Those of them whose node was given up before the last look."""
        dispatcher.watch_silence(self.look)

    def look(self, silent: Sequence[Link]) -> None:
        """Hold slots for what runs on these nodes, which missed a second heartbeat, and give back those of all others.

        Whatever ran on a node that was given up has taken its slot, or ended, before the look after the next.
        """
        if not silent and not self.held:
            return
        in_flight = {link: _list_in_flight(link) for link in silent if link.active}
        for job, link in list(self.held.items()):
            lease = job.failover
            if lease is None or lease.released:
                del self.held[job]
                continue
            is_needed = job in in_flight.get(link, ()) or (link.closed and job not in self._late)
            if not is_needed or lease.link.condition() is not LinkCondition.READY:
                del self.held[job]
                job.failover = None
                lease.release()
        for link, jobs in in_flight.items():
            self._hold_for(link, jobs)
        self._late = {job for job, link in self.held.items() if link.closed}
        FAILOVER_HELD.set(len(self.held))

    def _hold_for(self, link: Link, jobs: Mapping[Job, tuple[str, ...]]) -> None:
        before = len(self.held)
        for job, paths in jobs.items():
            if len(self.held) >= self._most:
                break
            if job.failover is not None or job.losses >= self._requeues:
                continue
            if self._dispatcher.hold_failover(job, msgspec.structs.replace(job.request, paths=paths), link):
                self.held[job] = link
                FAILOVER_SLOTS.labels("held").inc()
        if len(self.held) > before:
            logger.warning(
                "node.failing node=%s silent_s=%.0f running=%d held=%d",
                link.node_name, link.silence_s, link.active, len(self.held) - before,
            )  # fmt: skip


def _list_in_flight(link: Link) -> dict[Job, tuple[str, ...]]:
    """Return what runs on a node and can go elsewhere, each with the API paths on which it can."""
    found = [sink.find_failover() for sink in link.list_sinks() if isinstance(sink, InFlight)]
    return dict(one for one in found if one is not None)
