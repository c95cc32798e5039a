"""Slowing down those who guess credentials, whose tries cost a query each. Nobody who has a good one waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from core.limits import limits
from wire import clock


class AuthThrottle:
    """Counts wrong credentials by client address; after ``failures`` of them the next has to wait for ``block_s`` seconds.

    ``read_digests`` returns the digests of all credentials that are good. While an address is blocked they are read once a
    second at most, whatever comes from it, and their holders do not wait. When they cannot be read, those read before count.
    Safe to use from several threads.
    """

    def __init__(
        self,
        *,
        failures: int | None = None,
        block_s: float | None = None,
        read_digests: Callable[[], Collection[bytes]] = tuple,
    ) -> None:
        self._bounds = limits().core
        self._limit = self._bounds.throttle_failures if failures is None else failures
        self._block_s = self._bounds.throttle_retry_s if block_s is None else block_s
        self._read_digests = read_digests
        self._failures: dict[str, tuple[int, float]] = {}
        self._good: frozenset[bytes] = frozenset()
        self._read_at = float("-inf")
        self._reading = threading.Lock()

    def must_wait(self, address: str, digest: bytes) -> bool:
        """Whether a credential has to wait for what its address did; never a good one. It may ask the database."""
        if not self.is_blocked(address):
            return False
        self.read_good()
        return not self.knows(digest)

    def is_blocked(self, address: str) -> bool:
        """Whether what comes from the address has to wait unless it is known to be good."""
        count, at = self._failures.get(address, (0, 0.0))
        return count >= self._limit and clock.monotonic() - at < self._block_s

    def record_failure(self, address: str) -> bool:
        """Count a wrong credential; old ones are forgotten. Return whether it is the first one of the address for a while."""
        now = clock.monotonic()
        count, at = self._failures.get(address, (0, float("-inf")))
        # Whoever has waited begins anew.
        has_served = count >= self._limit and now - at >= self._block_s
        is_first = now - at >= self._bounds.throttle_forget_s
        if has_served or is_first:
            count = 0
        if len(self._failures) >= self._bounds.throttle_addresses:
            self._failures.clear()
        self._failures[address] = (count + 1, now)
        return is_first

    def record_success(self, address: str) -> None:
        self._failures.pop(address, None)

    @property
    def is_reading_due(self) -> bool:
        """Whether ``read_good`` would ask the database."""
        return clock.monotonic() - self._read_at >= self._bounds.throttle_read_s

    def read_good(self) -> None:
        """Read which credentials are good, if that is due. Raises DatabaseError."""
        with self._reading:
            if self.is_reading_due:
                try:
                    self._good = frozenset(self._read_digests())
                # Also after a failure: the next try is a second later, and those read before count until then.
                finally:
                    self._read_at = clock.monotonic()

    def knows(self, digest: bytes) -> bool:
        """Whether the credential was good when that was read last."""
        return digest in self._good
