"""Who is calling, and how often they may: a client key to a Caller, from memory, in constant time; requests per minute."""

from __future__ import annotations

import hmac
import math
import uuid
from collections import deque
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import Enum
from functools import lru_cache
from typing import Any

import msgspec
from django.conf import settings
from django.db import DatabaseError

from core.db.threads import run_in_database
from core.limits import limits
from core.throttle import AuthThrottle
from gateway.errors import InvalidApiKey, RateLimited, RecordsUnavailable
from gateway.request.client import came_directly
from gateway.request.models import Catalogue, KeyEntry
from gateway.values import Caller, derive
from wire import clock
from wire.credentials import CredentialKind, digest_credential, has_good_checksum, read_keyid

_NO_DIGEST = bytes(32)


class Keyless(Enum):
    """Which requests without a key are let in: none, those of programs on this machine, or all."""

    REFUSED = "refused"
    NEAR = "near"
    ADMITTED = "admitted"


class KeyRing:
    """Checks client keys. A key id that memory does not have is looked up once; misses are remembered briefly.

    An address that asks for too many of them waits for the next sweep, which brings every key into memory.
    """

    def __init__(self, catalogue: Catalogue, throttle: AuthThrottle | None = None) -> None:
        self.catalogue = catalogue
        self.keyless = Keyless.REFUSED
        self._throttle = throttle or AuthThrottle()
        self._unknown: dict[str, float] = {}
        self.used: dict[uuid.UUID, float] = {}

    async def identify(
        self, headers: Mapping[str, str], *, address: str = "", scope: Mapping[str, Any] | None = None
    ) -> Caller:
        """Return the caller. ``scope``: of ASGI, where a request without a key may be let in.

        Raises InvalidApiKey; RecordsUnavailable, RateLimited when a lookup is needed and not possible.
        """
        text, keyid, digest = derive(headers, _read_key.__name__, _read_key)
        if keyid is None:
            if self.keyless is not Keyless.REFUSED and scope is not None and self._admits_keyless(headers, scope):
                assert self.catalogue.keyless is not None
                return self.catalogue.keyless.caller
            raise InvalidApiKey("API key is missing." if not text else "")
        entry = self.catalogue.keys.get(keyid)
        if entry is None and has_good_checksum(text):  # noise with a bad checksum costs no query
            entry = await self._look_up(keyid, address)
        now = clock.unix_s()
        matches = hmac.compare_digest(digest, entry.digest if entry is not None else _NO_DIGEST)
        if entry is None or not matches or not entry.is_usable(now):
            raise InvalidApiKey
        self.used[entry.caller.key_id] = now
        return entry.caller

    def find(self, headers: Mapping[str, str]) -> KeyEntry | None:
        """Return the good key in memory that a caller has; None: ``identify`` says what is to be said."""
        _text, keyid, digest = derive(headers, _read_key.__name__, _read_key)
        entry = self.catalogue.keys.get(keyid) if keyid is not None else None
        is_good = entry is not None and hmac.compare_digest(digest, entry.digest) and entry.is_usable(clock.unix_s())
        return entry if is_good else None

    def _admits_keyless(self, headers: Mapping[str, str], scope: Mapping[str, Any]) -> bool:
        # Whoever shows anything at all is held to it.
        if "authorization" in headers or "x-api-key" in headers:
            return False
        entry, origin = self.catalogue.keyless, headers.get("origin", "")
        if entry is None or not entry.is_usable(clock.unix_s()):
            return False
        # A page that somebody opens may send requests from their machine; it needs to be named as for requests with a key.
        if origin and not {"*", origin} & set(settings.CORS_ORIGINS):
            return False
        return self.keyless is Keyless.ADMITTED or came_directly(scope, headers)

    def forget_unknown(self) -> None:
        self._unknown.clear()

    async def _look_up(self, keyid: str, address: str) -> KeyEntry | None:
        now = clock.monotonic()
        if self._unknown.get(keyid, 0.0) > now:
            return None
        try:
            version = self.catalogue.version
            entry = await run_in_database(self._load, keyid, address)
            if entry is not None and version != self.catalogue.version:
                # What a sweep took meanwhile is newer: the key may have been revoked or rotated since we looked.
                entry = await run_in_database(self._load, keyid, address)
        except DatabaseError:
            raise RecordsUnavailable("The key cannot be checked now; please retry", retry_after_s=2) from None
        if entry is None:
            if len(self._unknown) >= limits().gateway.unknown_keys:
                self._unknown.clear()
            self._unknown[keyid] = now + limits().gateway.unknown_key_s
            return None
        return self.catalogue.keys.setdefault(keyid, entry)

    def _load(self, keyid: str, address: str) -> KeyEntry | None:
        # Asked in the thread: those of an address that came at once wait here one after the other.
        if self._throttle.is_blocked(address):
            wait_s = limits().core.throttle_retry_s
            message = f"Too many unknown API keys came from this address; check the key and try again in {wait_s} s."
            raise RateLimited(message, retry_after_s=wait_s)
        entry = self.catalogue.load_key(keyid)
        if entry is None:
            self._throttle.record_failure(address)
        return entry


def _read_key(headers: Mapping[str, str]) -> tuple[str, str | None, bytes]:
    authorization = headers.get("authorization", "")
    bearer = authorization[7:].strip() if authorization[:7].lower() == "bearer " else ""
    other = headers.get("x-api-key", "").strip()
    # Clients send both headers at once, and the one for another service may be in the first.
    text = other if other and read_keyid(bearer, CredentialKind.CLIENT) is None else bearer
    keyid = read_keyid(text, CredentialKind.CLIENT) if text else None
    return text, keyid, digest_credential(text) if keyid is not None else b""


class RateState(msgspec.Struct, frozen=True, gc=False):
    """Where a key stands in its window. ``reset_s``: until the oldest request of the window leaves it."""

    limit: int
    remaining: int
    reset_s: float

    def headers(self, *, is_anthropic: bool = False) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit headers, or Anthropic's, whose reset is a moment (RFC 3339)."""
        if is_anthropic:
            return [
                (b"anthropic-ratelimit-requests-limit", b"%d" % self.limit),
                (b"anthropic-ratelimit-requests-remaining", b"%d" % self.remaining),
                (b"anthropic-ratelimit-requests-reset", _write_moment(int(clock.unix_s()) + math.ceil(self.reset_s))),
            ]
        return [
            (b"x-ratelimit-limit-requests", b"%d" % self.limit),
            (b"x-ratelimit-remaining-requests", b"%d" % self.remaining),
            (b"x-ratelimit-reset-requests", b"%ds" % math.ceil(self.reset_s)),
        ]


@lru_cache(maxsize=256)
def _write_moment(second: int) -> bytes:
    return datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()


class RateLimiter:
    """Requests per minute of each key over a moving window; exact within this process."""

    def __init__(self) -> None:
        self._window_s = limits().gateway.rate_window_s
        # By the number of a key's id: a UUID hashes in Python, which takes as long as all the rest.
        self._windows: dict[int, deque[float]] = {}

    def take(self, key_id: uuid.UUID, limit: int, now: float | None = None) -> RateState:
        """Count one request, at ``now`` (clock.monotonic()). Raises RateLimited with the wait until one would pass."""
        now = clock.monotonic() if now is None else now
        window = self._windows.get(key_id.int)
        if window is None:
            window = self._windows[key_id.int] = deque()
        start = now - self._window_s
        while window and window[0] <= start:
            window.popleft()
        if limit < 1:
            raise RateLimited("This key may send no requests.", retry_after_s=self._window_s)
        if len(window) >= limit:
            # Rounding may put a sum of floats a hair above the window.
            wait = min(self._window_s, window[len(window) - limit] + self._window_s - now)
            raise RateLimited(
                f"Rate limit of {limit} requests per minute exceeded; try again in {math.ceil(wait)} s.",
                retry_after_s=wait,
            )
        window.append(now)
        return RateState(limit, limit - len(window), window[0] + self._window_s - now)

    def give_back(self, key_id: uuid.UUID) -> None:
        """Take back the request that was counted last: nothing came of it."""
        window = self._windows.get(key_id.int)
        if window:
            window.pop()

    def peek(self, key_id: uuid.UUID, limit: int) -> RateState:
        """Return where a key stands without counting."""
        window = self._windows.get(key_id.int)
        if not window:
            return RateState(limit, limit, 0.0)
        return RateState(limit, max(0, limit - len(window)), max(0.0, window[0] + self._window_s - clock.monotonic()))

    def forget_idle(self) -> None:
        start = clock.monotonic() - self._window_s
        for number in [one for one, window in self._windows.items() if not window or window[-1] <= start]:
            del self._windows[number]
