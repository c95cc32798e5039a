"""Cache salts: what keeps one tenant's KV blocks from being found by another. Pure.

vLLM hashes the salt of a request into every block of its prefix, so blocks are shared only among requests with equal
salts. A salt is an HMAC over tenant, tag and how often they were flushed, under a key that lives as long as this process:
nobody outside can guess one, and a flush of one tenant is a new salt.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

import msgspec

from runner.engines.port import Call, FlushRequest, FlushScope, Priority
from runner.errors import InvalidRequest
from runner.limits import limits
from wire.unreadable import UNREADABLE

PRIORITIES: dict[Priority, int] = {"high": -10, "normal": 0, "low": 10}
"""vLLM serves lower numbers first."""
_OURS_ALONE = ("request_id", "kv_transfer_params", "ec_transfer_params")
"""Fields that steer the engine and not the answer; a client's request id could collide with another's."""

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Salts:
    """The salts of one engine, and which of them a flush has made void."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._epochs: dict[tuple[str | None, str | None], int] = {}

    def salt_for(self, call: Call) -> str:
        """Return the salt of a request: stable within tenant and tag, unique when nothing is to be reused."""
        if call.cache_mode == "none":
            return secrets.token_hex(16)
        tenant, tag = call.tenant, call.cache_tag
        epochs = [self._epochs.get(key, 0) for key in ((tenant, None), (None, tag), (tenant, tag))]
        # As JSON, so that no two pairs of tenant and tag run together into the same text.
        named = msgspec.json.encode([tenant, tag, *epochs])
        return hmac.new(self._key, named, hashlib.sha256).hexdigest()

    def forget(self, request: FlushRequest) -> None:
        """Make the salts void that a flush names; what was cached under them is never found again."""
        if request.scope in {FlushScope.ALL, FlushScope.MODEL} or len(self._epochs) >= limits().engines.vllm_epochs:
            self._key = secrets.token_bytes(32)
            self._epochs.clear()
            return
        tag = request.tag if request.scope is FlushScope.TAG else None
        key = (request.tenant, tag)
        self._epochs[key] = self._epochs.get(key, 0) + 1


def seal_body(body: bytes, *, salt: str, priority: Priority) -> bytes:
    """Return the body with our salt and priority in place of whatever the client said about them.

    The values of all other fields stay byte for byte. Raises InvalidRequest when it is no JSON object: vLLM would read some
    texts that are none, such as UTF-16, and would find a client's own salt in them.
    """
    try:
        fields = _fields_decoder.decode(body)
    except UNREADABLE:
        raise InvalidRequest("the body must be a JSON object in UTF-8") from None
    for name in _OURS_ALONE:
        fields.pop(name, None)
    fields["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    fields["priority"] = msgspec.Raw(msgspec.json.encode(PRIORITIES[priority]))
    return msgspec.json.encode(fields)
