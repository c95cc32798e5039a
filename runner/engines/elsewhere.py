"""Where a server of somebody else's is, and the keys for it: the owner names the variable, never the key itself."""

from __future__ import annotations

import os

import msgspec

from runner.definitions.plan import LoadPlan
from runner.engines.library_child import read_option
from runner.errors import EngineError
from wire.unreadable import UNREADABLE

_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_kwargs_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw] | None)


def read_url(plan: LoadPlan, *, example: str) -> str:
    """Return ``server_url`` up to, not including, ``/v1``. Raises EngineError that shows ``example``."""
    url = read_option(plan.options, "server_url", str) or ""
    if not url.startswith(("http://", "https://")):
        raise EngineError(f"{plan.model_id} needs server_url, like {example}")
    return url.rstrip("/").removesuffix("/v1")


def read_key(plan: LoadPlan, option: str) -> str:
    """Return the key in the variable that ``option`` names, empty when it names none.

    Raises EngineError naming the variable when that is empty or holds what cannot be a key.
    """
    name = read_option(plan.options, option, str)
    if not name:
        return ""
    key = os.environ.get(name, "").strip()
    if not key:
        raise EngineError(f"{plan.model_id}: the environment variable {name} ({option}) is empty")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise EngineError(f"{plan.model_id}: what {name} ({option}) holds cannot be a key: it has spaces or special characters")
    return key


def set_thinking(plan: LoadPlan, body: bytes) -> bytes:
    """Return the body of a chat completion in which ``enable_thinking`` of the plan holds where the client says nothing.

    For servers that were started without it; a body that is no JSON object is theirs to refuse.
    """
    wanted = plan.options.get("enable_thinking")
    if wanted is None:
        return body
    try:
        fields = _fields_decoder.decode(body)
        given = _kwargs_decoder.decode(fields.get("chat_template_kwargs", b"null")) or {}
    except UNREADABLE:
        return body
    if "enable_thinking" in given:
        return body
    kwargs = {**given, "enable_thinking": wanted}
    return msgspec.json.encode({**fields, "chat_template_kwargs": kwargs})


def bearer(plan: LoadPlan, option: str = "server_api_key_env") -> dict[str, str]:
    """Return the header with that key, none when the plan names no variable. Raises EngineError as ``read_key``."""
    key = read_key(plan, option)
    return {"Authorization": f"Bearer {key}"} if key else {}
