"""Slowing down those who guess worker credentials."""

from __future__ import annotations

import time

from nodes.states import SocketPolicy

_AUTH_TABLE_LIMIT = 10_000
_RECENT_S = 600.0


class AuthThrottle:
    """Counts failed authentications by client address and blocks an address for a moment after too many."""

    def __init__(self, policy: SocketPolicy) -> None:
        self._policy = policy
        self._failures: dict[str, tuple[int, float]] = {}

    def is_blocked(self, address: str) -> bool:
        """Return whether the address has to wait."""
        count, at = self._failures.get(address, (0, 0.0))
        return count >= self._policy.auth_failures and time.monotonic() - at < self._policy.auth_block_s

    def record_failure(self, address: str) -> None:
        """Count one failure; old entries are forgotten."""
        now = time.monotonic()
        count, at = self._failures.get(address, (0, 0.0))
        served_block = count >= self._policy.auth_failures and now - at >= self._policy.auth_block_s
        if served_block or now - at >= self._policy.auth_forget_s:
            count = 0
        if len(self._failures) >= _AUTH_TABLE_LIMIT:
            self._failures.clear()
        self._failures[address] = (count + 1, now)

    def record_success(self, address: str) -> None:
        """Forget the failures of an address."""
        self._failures.pop(address, None)


class RecentCallers:
    """Remembers, by digest, credentials that were good a short while ago: their holders guess nothing."""

    def __init__(self) -> None:
        self._good_until: dict[bytes, float] = {}

    def note(self, digest: bytes) -> None:
        """Remember a credential that was just found good."""
        if len(self._good_until) >= _AUTH_TABLE_LIMIT:
            self._good_until.clear()
        self._good_until[digest] = time.monotonic() + _RECENT_S

    def knows(self, digest: bytes) -> bool:
        """Whether it was good lately; it may have been revoked since."""
        return self._good_until.get(digest, 0.0) > time.monotonic()
