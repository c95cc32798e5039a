"""Who is calling: a client key to a Caller, from memory, in constant time."""

from __future__ import annotations

import hmac
import uuid
from collections.abc import Mapping

from django.db import DatabaseError

from core.db.threads import run_in_database
from core.limits import limits
from core.throttle import AuthThrottle
from gateway.errors import InvalidApiKey, RateLimited, RecordsUnavailable
from gateway.request.models import Catalogue, KeyEntry
from gateway.values import Caller, derive
from wire import clock
from wire.credentials import CredentialKind, digest_credential, has_good_checksum, read_keyid

_NO_DIGEST = bytes(32)


class KeyRing:
    """Checks client keys. A key id that memory does not have is looked up once; misses are remembered briefly.

    An address that asks for too many of them waits for the next sweep, which brings every key into memory.
    """

    def __init__(self, catalogue: Catalogue, throttle: AuthThrottle | None = None) -> None:
        self._catalogue = catalogue
        self._throttle = throttle or AuthThrottle()
        self._unknown: dict[str, float] = {}
        self.used: dict[uuid.UUID, float] = {}

    async def identify(self, headers: Mapping[str, str], *, allow_x_api_key: bool, address: str = "") -> Caller:
        """Return the caller. Raises InvalidApiKey; RecordsUnavailable, RateLimited when a lookup is needed and not possible."""
        read = _read_either if allow_x_api_key else _read_bearer
        text, keyid, digest = derive(headers, read.__name__, read)
        if keyid is None:
            raise InvalidApiKey("API key is missing." if not text else "")
        entry = self._catalogue.keys.get(keyid)
        if entry is None and has_good_checksum(text):  # noise with a bad checksum costs no query
            entry = await self._look_up(keyid, address)
        now = clock.unix_s()
        matches = hmac.compare_digest(digest, entry.digest if entry is not None else _NO_DIGEST)
        if entry is None or not matches or not entry.is_usable(now):
            raise InvalidApiKey
        self.used[entry.caller.key_id] = now
        return entry.caller

    def forget_unknown(self) -> None:
        """Look unknown key ids up again; called when keys changed."""
        self._unknown.clear()

    async def _look_up(self, keyid: str, address: str) -> KeyEntry | None:
        now = clock.monotonic()
        if self._unknown.get(keyid, 0.0) > now:
            return None
        try:
            entry = await run_in_database(self._load, keyid, address)
        except DatabaseError:
            raise RecordsUnavailable("The key cannot be checked now; please retry", retry_after_s=2) from None
        if entry is None:
            if len(self._unknown) >= limits().gateway.unknown_keys:
                self._unknown.clear()
            self._unknown[keyid] = now + limits().gateway.unknown_key_s
            return None
        # What a sweep took meanwhile is newer: the key may have been revoked since we looked.
        return self._catalogue.keys.setdefault(keyid, entry)

    def _load(self, keyid: str, address: str) -> KeyEntry | None:
        """Return the entry from its row; runs in a thread, where those of an address wait that came at once."""
        if self._throttle.is_blocked(address):
            wait_s = limits().core.throttle_retry_s
            message = f"Too many unknown API keys came from this address; check the key and try again in {wait_s} s."
            raise RateLimited(message, retry_after_s=wait_s)
        entry = self._catalogue.load_key(keyid)
        if entry is None:
            self._throttle.record_failure(address)
        return entry


def _read_bearer(headers: Mapping[str, str]) -> tuple[str, str | None, bytes]:
    return _read_key(headers, allow_x_api_key=False)


def _read_either(headers: Mapping[str, str]) -> tuple[str, str | None, bytes]:
    return _read_key(headers, allow_x_api_key=True)


def _read_key(headers: Mapping[str, str], *, allow_x_api_key: bool) -> tuple[str, str | None, bytes]:
    """Return what may be a key, its id (None = it is none) and its digest.

    Clients send both headers at once, and the one for another service may be in the first.
    """
    authorization = headers.get("authorization", "")
    bearer = authorization[7:].strip() if authorization[:7].lower() == "bearer " else ""
    other = headers.get("x-api-key", "").strip() if allow_x_api_key else ""
    text = other if other and read_keyid(bearer, CredentialKind.CLIENT) is None else bearer
    keyid = read_keyid(text, CredentialKind.CLIENT) if text else None
    return text, keyid, digest_credential(text) if keyid is not None else b""
