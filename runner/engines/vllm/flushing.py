"""Clearing vLLM's prefix cache, and seeing for ourselves that it is clear.

vLLM answers HTTP 200 also when it has cleared nothing, because a request holds blocks. So the body decides, and then a
prompt of ours that was cached before must be computed anew.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

import msgspec

from runner.engines.exposition import Samples
from runner.engines.http import HttpServer
from runner.engines.port import COMPLETIONS, FlushOutcome, FlushResult
from runner.errors import EngineError
from runner.limits import limits

_BUSY = FlushOutcome(FlushResult.REFUSED_BUSY, "requests are running; try again when none is")


class _Reset(msgspec.Struct):
    success: bool = False


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Completion(msgspec.Struct):
    usage: _Usage | None = None


class _Limit(msgspec.Struct):
    max_model_len: int | None = None


class _Limits(msgspec.Struct):
    data: list[_Limit] = []


class Flusher:
    """Clears the cache of one server. ``model`` is the name it serves under, ``scrape`` reads its metrics."""

    def __init__(self, server: HttpServer, model: str, scrape: Callable[[], Awaitable[Samples]]) -> None:
        self._server = server
        self._model = model
        self._scrape = scrape

    async def flush(self) -> FlushOutcome:
        """Clear it, unless requests run for longer than ``vllm_busy_s``.

        Raises EngineError when vLLM does not answer, or when it reuses what it says is gone.
        """
        samples = await self._wait_idle()
        if samples is None:
            return _BUSY
        is_caching = samples.labels("vllm:cache_config_info").get("enable_prefix_caching") != "False"
        canary, salt = await self._make_canary(_block_tokens(samples)), secrets.token_hex(16)
        reused_before = 0
        if canary:
            await self._ask_canary(canary, salt)
            reused_before = await self._ask_canary(canary, salt)
            if is_caching and not reused_before:
                raise EngineError("the cache cannot be checked: a prompt sent twice was not found in it")
        if not await self._reset():
            return _BUSY
        if not canary:
            return FlushOutcome(FlushResult.FLUSHED, "the context is shorter than one cache block: nothing is ever reused")
        reused_after = await self._ask_canary(canary, salt)
        if reused_after:
            raise EngineError(f"vLLM says its cache is clear, and still reuses {reused_after} tokens of a prompt from before")
        seen = f"of a prompt of {len(canary)} tokens, {reused_before} were reused before and none after"
        return FlushOutcome(FlushResult.FLUSHED, f"{seen}; vLLM keeps the memory reserved")

    async def _wait_idle(self) -> Samples | None:
        """Return the metrics once no request runs or waits, None when that does not come."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + limits().engines.vllm_busy_s
        while True:
            samples = await self._scrape()
            if not samples.total("vllm:num_requests_running") and not samples.total("vllm:num_requests_waiting"):
                return samples
            if clock() >= give_up_at:
                return None
            await asyncio.sleep(limits().engines.vllm_retry_s)

    async def _reset(self) -> bool:
        """Ask for the reset until it succeeds or ``vllm_busy_s`` is over; return whether it did."""
        clock = asyncio.get_running_loop().time
        give_up_at = clock() + limits().engines.vllm_busy_s
        while True:
            status, body = await self._server.ask("POST", "/reset_prefix_cache", timeout_s=limits().engines.vllm_flush_s)
            if status != 200:
                raise EngineError(f"/reset_prefix_cache was answered with HTTP {status}")
            try:
                if msgspec.json.decode(body, type=_Reset).success:
                    return True
            except msgspec.DecodeError:
                raise EngineError("/reset_prefix_cache was answered with something else than JSON") from None
            if clock() >= give_up_at:
                return False
            await asyncio.sleep(limits().engines.vllm_retry_s)

    async def _make_canary(self, block_tokens: int) -> list[int]:
        """Return token ids that fill two blocks, or one where no more fits; none when not even that does."""
        status, body = await self._server.ask("GET", "/v1/models")
        try:
            listed = msgspec.json.decode(body, type=_Limits).data if status == 200 else []
        except msgspec.DecodeError:
            listed = []
        longest = next((entry.max_model_len for entry in listed if entry.max_model_len), 2 * block_tokens + 2)
        # One token more than whole blocks, because the last one is always computed; and one for the answer.
        length = next((blocks * block_tokens + 1 for blocks in (2, 1) if blocks * block_tokens + 2 <= longest), 0)
        return [3 + index % 40 for index in range(length)]

    async def _ask_canary(self, tokens: list[int], salt: str) -> int:
        """Have the prompt completed; return how many of its tokens came from the cache."""
        body = {
            "model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0,
            "cache_salt": salt, "priority": -100,
        }  # fmt: skip
        status, answer = await self._server.ask("POST", COMPLETIONS, body=body, timeout_s=limits().engines.vllm_flush_s)
        if status != 200:
            raise EngineError(f"the cache cannot be checked: a prompt was answered with HTTP {status}")
        try:
            usage = msgspec.json.decode(answer, type=_Completion).usage
        except msgspec.DecodeError:
            raise EngineError("the cache cannot be checked: a prompt was not answered with JSON") from None
        # Older versions leave the details out when the number is zero.
        details = usage.prompt_tokens_details if usage is not None else None
        return (details.cached_tokens or 0) if details is not None else 0


def _block_tokens(samples: Samples) -> int:
    labels = samples.labels("vllm:cache_config_info")
    for name in ("effective_attention_block_size", "block_size"):
        if labels.get(name, "").isdigit():
            return int(labels[name])
    return 16
