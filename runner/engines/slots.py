"""Which slot of llama.cpp a call goes to, so that no tenant reuses what another left there. Pure.

llama.cpp reuses whatever prompt its slot held before when a call says ``cache_prompt``. So a call may say that only in a
slot whose content is known to be its own; everywhere else it starts from nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from runner.engines.port import CacheMode, FlushRequest, FlushScope


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose prompt a slot holds: the scope in which cache entries are shared."""

    tenant: str
    tag: str


@dataclass(frozen=True, slots=True)
class Lease:
    """One call's slot. ``owner`` is whose the content will be, None = nobody's. ``reuses``: what is there is its own.

    A lease that is not ``is_pinned`` only holds a place: the engine chooses the slot itself.
    """

    slot: int
    owner: Owner | None
    reuses: bool = False
    is_pinned: bool = True


@dataclass(slots=True)
class _Slot:
    index: int
    owner: Owner | None = None
    is_blank: bool = True
    lease: Lease | None = None
    last_used: int = 0


class SlotBook:
    """Which of ``count`` slots is whose and which are in use. Every method is one synchronous decision."""

    def __init__(self, count: int) -> None:
        self._slots = [_Slot(index) for index in range(count)]
        self._clock = 0
        self._unpinned = 0

    def take(self, owner: Owner, cache_mode: CacheMode) -> Lease | None:
        """Return a slot for a call, None when all are in use.

        Its own most recent slot first, else an empty one, else one that is nobody's, else the one unused for longest.
        A call that is to leave nothing spares its tenant's own slots as it would anybody's.
        """
        free = self._free()
        own = [slot for slot in free if slot.owner == owner and cache_mode != "none"]
        if own:
            slot = max(own, key=lambda slot: slot.last_used)
            return self._hold(slot, Lease(slot.index, owner, reuses=True))
        if not free:
            return None
        slot = min(free, key=lambda slot: (not slot.is_blank, slot.owner is not None, slot.last_used))
        return self._hold(slot, Lease(slot.index, None if cache_mode == "none" else owner))

    def take_unpinned(self) -> Lease | None:
        """Return a place for a call that the engine puts where it likes, None when all are in use.

        From now until it ends nothing is known of any slot that is free meanwhile.
        """
        free = self._free()
        if not free:
            return None
        for slot in free:
            slot.owner, slot.is_blank = None, False
        self._unpinned += 1
        slot = min(free, key=lambda slot: slot.last_used)  # the engine's own rule, so most likely the right guess
        return self._hold(slot, Lease(slot.index, None, is_pinned=False))

    def release(self, lease: Lease, *, was_answered: bool) -> None:
        """End a call. Only an answer proves that its prompt has replaced what the slot held before."""
        slot = self._slots[lease.slot]
        slot.lease = None
        slot.is_blank = False
        self._clock += 1
        slot.last_used = self._clock
        is_known = (was_answered or lease.reuses) and lease.is_pinned and not self._unpinned
        slot.owner = lease.owner if is_known else None
        if not lease.is_pinned:
            self._unpinned -= 1

    def seize(self, request: FlushRequest) -> list[Lease] | None:
        """Take every slot that may hold what is to be flushed; None when one of them is in use, and then none is taken."""
        if self._unpinned:
            return None
        wanted = [slot for slot in self._slots if _may_hold(slot, request)]
        if any(slot.lease is not None for slot in wanted):
            return None
        return [self._hold(slot, Lease(slot.index, None)) for slot in wanted]

    def return_seized(self, leases: list[Lease], *, erased: set[int]) -> None:
        """Give seized slots back; those in ``erased`` are empty now, the others stay whose they were."""
        for lease in leases:
            slot = self._slots[lease.slot]
            slot.lease = None
            if lease.slot in erased:
                slot.owner, slot.is_blank = None, True

    def _free(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.lease is None]

    @staticmethod
    def _hold(slot: _Slot, lease: Lease) -> Lease:
        slot.lease = lease
        return lease


def _may_hold(slot: _Slot, request: FlushRequest) -> bool:
    """Return whether a slot may hold what is to go; of a slot that is nobody's, nobody knows."""
    if request.scope in {FlushScope.ALL, FlushScope.MODEL}:
        return True
    owner = slot.lease.owner if slot.lease is not None else slot.owner
    if owner is None:
        return slot.lease is None and not slot.is_blank
    if request.tenant is not None and owner.tenant != request.tenant:
        return False
    return request.scope is FlushScope.TENANT or owner.tag == request.tag
