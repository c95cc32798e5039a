"""ExLlamaV3, the library, in a child process that brings our HTTP server. Needs a GPU and its own build of the library."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager

import aiohttp
import msgspec

from runner.definitions.fields import EXLLAMA_PAGE_TOKENS
from runner.engines.library_child import LibraryChild, read_option
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    TOKENIZE,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    LoadPlan,
    Report,
    Response,
)
from runner.errors import EngineError
from runner.limits import limits

SCOPE_HEADER = "x-prefix-scope"


class _Flushed(msgspec.Struct):
    entries: int


class ExLlamaV3Engine:
    """The adapter. Options of the plan: the ``exllama_*`` fields of the settings files.

    Requests of different tenants never share cached prefixes: the child serves one tenant (and tag) at a time and starts
    with an empty page table for the next, so tenants that alternate pay with concurrency and reuse.
    """

    name = "exllamav3"
    poll_s = 2.0
    restart_max_s = 30.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._child = LibraryChild("runner.engines.children.exllamav3", client, distribution="exllamav3")

    @property
    def capabilities(self) -> Capabilities:
        """Chat only where the model brings a template."""
        has_chat = self._child.info.get("chat", True) is True
        return Capabilities(
            endpoints=(CHAT, COMPLETIONS, TOKENIZE) if has_chat else (COMPLETIONS, TOKENIZE),
            version=str(self._child.info.get("version", "")),
            max_inflight=self._plan.slots,
            context_tokens=self._child.context_tokens,
            prefix_caching=True,
            reports_cached_tokens=True,
            isolates_tenants=True,
            flushes_cache=True,
            reports_progress=True,
            counts_tokens=True,
        )

    @property
    def pids(self) -> tuple[int, ...]:
        """The child process."""
        return self._child.pids

    async def load(self, report: Report) -> None:
        """Start the child and load. Raises EngineError."""
        plan = self._plan
        if plan.path is None or not (plan.path / "config.json").is_file():
            raise EngineError(f"{plan.model_id}: a folder with an EXL3 model and its config.json is needed, got {plan.path}")
        await self._child.start(
            {
                "folder": str(plan.path),
                "model_name": plan.model_id,
                "slots": plan.slots,
                "gpu_ids": list(plan.gpu_ids),
                "context_tokens": plan.context_tokens or 0,
                "enable_thinking": plan.options.get("enable_thinking"),
                **_cache_settings(plan),
                **_placement_settings(plan),
            },
            report,
        )

    async def unload(self, *, gently: bool) -> None:
        """Have the child unload and exit, or kill it; return when it is gone."""
        await self._child.stop(gently=gently)

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Start over with an empty page table, whatever the scope: the library cannot drop a part of it."""
        if not self._child.server.base_url:
            return FlushOutcome(FlushResult.NOT_SUPPORTED, "the model is not loaded")
        status, body = await self._child.server.ask("POST", "/flush", timeout_s=limits().engines.exllama_flush_s)
        if status == 409:
            return FlushOutcome(FlushResult.REFUSED_BUSY, "requests are running; flush again when they have ended")
        if status != 200:
            raise EngineError(f"the flush was answered with {status}")
        removed = msgspec.json.decode(body, type=_Flushed).entries
        left = (await self._cached_tokens()) or 0
        if left:
            raise EngineError(f"{left} tokens are still cached after the flush")
        wider = "" if request.scope in ("all", "model") else f"; wider than the {request.scope} that was asked for"
        return FlushOutcome(
            FlushResult.RELOADED, f"the generator was made anew with an empty page table{wider}", entries_removed=removed
        )

    async def stats(self) -> EngineStats:
        """Return requests, pages and reuse as the child counts them."""
        return await self._child.stats()

    def stream(self, call: Call) -> AbstractAsyncContextManager[Response]:
        """Send a request to the child with the scope that it may share prefixes in; none for ``cache_mode`` none."""
        if call.cache_mode == "none":
            return self._child.send(call)
        scope = hashlib.sha256(f"{len(call.tenant)}:{call.tenant}{call.cache_tag}".encode()).hexdigest()
        return self._child.send(call, {SCOPE_HEADER: scope})

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Have the child count. Raises InvalidRequest, EngineError."""
        return await self._child.count_tokens(fields)

    async def health(self) -> Health:
        """Ask the child once."""
        return await self._child.health()

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        await self._child.wait_gone()

    async def _cached_tokens(self) -> int | None:
        _status, body = await self._child.server.ask("GET", "/stats")
        return msgspec.json.decode(body, type=dict[str, int]).get("kv_cached_tokens")


def _cache_settings(plan: LoadPlan) -> Mapping[str, object]:
    """Return size and precision of the cache. Raises EngineError for values that the library would not take."""
    options = plan.options
    size = read_option(options, "exllama_cache_size", int)
    if size is None:
        wanted = (plan.context_tokens or limits().engines.excontext_tokens) * plan.slots
        size = -(-wanted // EXLLAMA_PAGE_TOKENS) * EXLLAMA_PAGE_TOKENS
    if size < EXLLAMA_PAGE_TOKENS or size % EXLLAMA_PAGE_TOKENS:
        raise EngineError(f"exllama_cache_size must be a multiple of {EXLLAMA_PAGE_TOKENS}, got {size}")
    k_bits, v_bits = read_option(options, "exllama_cache_k_bits", int), read_option(options, "exllama_cache_v_bits", int)
    quant = read_option(options, "exllama_cache_quant", str)
    if quant is not None:
        match = re.fullmatch(r"\s*([2-8])\s*(?:,\s*([2-8])\s*)?", quant)
        if match is None:
            raise EngineError(f"exllama_cache_quant must be bits or k,v bits from 2 to 8, such as 8,8; got {quant!r}")
        k_bits, v_bits = int(match[1]), int(match[2] or match[1])
    if (k_bits is None) != (v_bits is None):
        raise EngineError("exllama_cache_k_bits and exllama_cache_v_bits go together")
    return {"cache_size": size, "k_bits": k_bits or 0, "v_bits": v_bits or 0}


def _placement_settings(plan: LoadPlan) -> Mapping[str, object]:
    """Return where the weights go, and limits of the generator. Raises EngineError."""
    options = plan.options
    split = read_option(options, "exllama_gpu_split", str)
    try:
        shares = [float(share) for share in split.split(",")] if split else []
    except ValueError:
        raise EngineError(f"exllama_gpu_split must be gigabytes per GPU such as 24,24; got {split!r}") from None
    return {
        "gpu_split": shares,
        "tensor_parallel": read_option(options, "exllama_tensor_parallel", bool) or False,
        "tp_backend": read_option(options, "exllama_tp_backend", str) or "native",
        "max_batch_size": read_option(options, "exllama_max_batch_size", int) or plan.slots,
        "max_chunk_size": read_option(options, "exllama_max_chunk_size", int) or 2048,
        "max_q_size": read_option(options, "exllama_max_q_size", int) or 8,
        "max_rq_tokens": read_option(options, "exllama_max_rq_tokens", int) or 0,
    }
