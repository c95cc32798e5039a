"""Finding out what a llama.cpp server that others started does with prompts: pins them to slots, reuses, forgets.

By default such a server keeps a second copy of prompts in host memory, which brings an erased prompt back and crosses
slots; it does not say so anywhere. So it is tried with a prompt of random letters, once per load.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import msgspec

from runner.engines.http import HttpServer
from runner.errors import EngineError
from runner.limits import limits


@dataclass(frozen=True, slots=True)
class Findings:
    """``isolates``: a prompt stays in its slot and may be kept from being reused. ``erases``: an erased one is gone."""

    isolates: bool = False
    erases: bool = False
    detail: str = ""


class _Timings(msgspec.Struct):
    cache_n: int


class _Completion(msgspec.Struct):
    timings: _Timings


async def probe_slots(server: HttpServer, *, model: str | None) -> Findings:
    """Try slot 0 of an idle server. An answer that cannot be understood means that nothing can be relied on."""
    try:
        return await _probe(_Prober(server, model))
    except (EngineError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return Findings(detail=f"what the server keeps of prompts could not be found out: {error}")


class _Prober:
    def __init__(self, server: HttpServer, model: str | None) -> None:
        self._server = server
        self._routing: dict[str, object] = {} if model is None else {"model": model}

    async def count_reused(self, prompt: str, *, may_reuse: bool) -> int:
        """Run a prompt in slot 0; return how much of it was there already. Raises EngineError, msgspec.DecodeError."""
        body = {**self._routing, "prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": may_reuse}
        status, answer = await self._server.ask("POST", "/completion", body=body, timeout_s=limits().engines.llama_probe_s)
        if status != 200:
            raise EngineError(f"/completion answers HTTP {status}")
        return msgspec.json.decode(answer, type=_Completion).timings.cache_n

    async def can_erase(self) -> bool:
        """Erase slot 0; return whether the server did."""
        status, _ = await self._server.ask(
            "POST", "/slots/0?action=erase", body=self._routing or None, timeout_s=limits().engines.llama_probe_s
        )
        return status == 200


async def _probe(prober: _Prober) -> Findings:
    first, second = secrets.token_hex(48), secrets.token_hex(48)
    await prober.count_reused(first, may_reuse=True)
    if await prober.count_reused(first, may_reuse=True) <= limits().engines.llama_probe_tokens:
        return Findings(detail="the server reports no reuse of prompts, so nothing can be said about it")
    if await prober.count_reused(first, may_reuse=False):
        return Findings(detail="the server reuses prompts also where it is told not to")
    await prober.count_reused(second, may_reuse=True)  # now a copy of the first would be in host memory
    if await prober.count_reused(first, may_reuse=True) > limits().engines.llama_probe_tokens:
        return Findings(detail="the server keeps copies of prompts in host memory: start it with --cache-ram 0")
    if not await prober.can_erase():
        return Findings(isolates=True, detail="the server does not erase slots: start it with --slot-save-path")
    if await prober.count_reused(first, may_reuse=True):
        return Findings(isolates=True, detail="the server brings erased prompts back")
    await prober.can_erase()
    return Findings(isolates=True, erases=True)
