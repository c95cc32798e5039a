"""Where a server of somebody else's is, and the keys for it: the owner names the variable, never the key itself."""

from __future__ import annotations

import os

from runner.definitions.plan import LoadPlan
from runner.engines.library_child import read_option
from runner.errors import EngineError


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


def bearer(plan: LoadPlan, option: str = "server_api_key_env") -> dict[str, str]:
    """Return the header with that key, none when the plan names no variable. Raises EngineError as ``read_key``."""
    key = read_key(plan, option)
    return {"Authorization": f"Bearer {key}"} if key else {}
