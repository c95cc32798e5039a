"""Libraries that have no HTTP server of their own, each model in a child process of ours that brings one.

CTranslate2 and faster-whisper keep nothing between requests, so tenants cannot meet there. ExLlamaV3, which needs a GPU and its
own build, finds cached pages by their tokens alone: its child serves one tenant (and tag) at a time and starts with an empty
page table for the next, so tenants that alternate pay with concurrency and reuse.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import aiohttp
import msgspec

from runner.definitions.fields import EXLLAMA_PAGE_TOKENS
from runner.definitions.plan import LoadPlan, Report
from runner.engines.children import SCOPE_HEADER
from runner.engines.http import HttpResponse, HttpServer
from runner.engines.http_engine import HttpEngine, OwnChild, ask_count, installed_version, read_option
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    TOKENIZE,
    TRANSCRIPTIONS,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
)
from runner.engines.process import Child
from runner.errors import EngineError
from runner.limits import limits

TRANSLATIONS = "/v1/audio/translations"


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """What tells one library from another. ``name`` is that of its child program too, ``distribution`` its package, ``title``
    its name in messages.

    ``needs``: what ``plan.path`` must be, a folder with ``file``. ``settings`` are those of its child beside the ones all have;
    ``capabilities`` are made from the plan and from what the child said about the model, and the ``version`` of its library
    where one is installed. ``keeps_prefixes``: it reuses prompts.
    """

    name: str
    distribution: str
    title: str
    needs: str
    file: str
    settings: Callable[[LoadPlan], Mapping[str, object]]
    capabilities: Callable[[LoadPlan, Mapping[str, object]], Capabilities]
    keeps_prefixes: bool = False


def make_library(library: Library, plan: LoadPlan, client: aiohttp.ClientSession) -> HttpEngine:
    server = HttpServer()
    probe = LibraryProbe(library, plan, server)
    loader = OwnChild(library.name, server, probe.start)
    return HttpEngine(
        server, loader, probe, name=library.name, poll_s=2.0, restart_max_s=30.0, count=partial(ask_count, server, TOKENIZE)
    )


class _Cached(msgspec.Struct):
    kv_cached_tokens: int = 0


class _Flushed(msgspec.Struct):
    entries: int


class LibraryProbe:
    has_metrics = False

    def __init__(self, library: Library, plan: LoadPlan, server: HttpServer) -> None:
        self._library = library
        self._plan = plan
        self._server = server
        self.capabilities = library.capabilities(plan, {})

    async def start(self, child: Child, key: str, report: Report) -> str:
        """Return where the child serves. Raises EngineError."""
        plan, library = self._plan, self._library
        if plan.path is None or not (plan.path / library.file).is_file():
            raise EngineError(f"{plan.model_id}: {library.needs} is needed, got {plan.path}")
        settings: dict[str, object] = {
            "folder": str(plan.path), "model_name": plan.model_id, "slots": plan.slots, "key": key,
            "enable_thinking": plan.options.get("enable_thinking"),
        }  # fmt: skip
        url = await child.start_ours(
            f"runner.engines.children.{library.name}", {**settings, **library.settings(plan)}, report,
            limit_s=limits().engines.library_load_s,
        )  # fmt: skip
        version = await asyncio.to_thread(installed_version, library.distribution)
        self.capabilities = library.capabilities(plan, {**child.info, "version": version})
        return url

    def send(self, call: Call) -> HttpResponse:
        if self._library.keeps_prefixes and call.cache_mode != "none":
            scope = hashlib.sha256(f"{len(call.tenant)}:{call.tenant}{call.cache_tag}".encode()).hexdigest()
            call = replace(call, headers={**call.headers, SCOPE_HEADER: scope})
        return self._server.send(call)

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        library = self._library
        if not library.keeps_prefixes:
            detail = f"{library.title} keeps nothing between requests, so there is no {request.scope} to flush"
            return FlushOutcome(FlushResult.NOTHING_KEPT, detail)
        if not self._server.base_url:
            return FlushOutcome(FlushResult.NOT_SUPPORTED, "the model is not loaded")
        # All of it, whatever the scope: no library can drop a part of its page table.
        status, body = await self._server.ask("POST", "/flush", timeout_s=limits().engines.exllama_flush_s)
        if status == 409:
            return FlushOutcome(FlushResult.REFUSED_BUSY, "requests are running; flush again when they have ended")
        if status != 200:
            raise EngineError(f"the flush was answered with {status}")
        removed = msgspec.json.decode(body, type=_Flushed).entries
        left = await self._server.ask_for("/stats", _Cached)
        if left is not None and left.kv_cached_tokens:
            raise EngineError(f"{left.kv_cached_tokens} tokens are still cached after the flush")
        wider = "" if request.scope in ("all", "model") else f"; wider than the {request.scope} that was asked for"
        return FlushOutcome(
            FlushResult.RELOADED, f"the generator was made anew with an empty page table{wider}", entries_removed=removed
        )

    async def read_stats(self) -> EngineStats:
        return await self._server.ask_for("/stats", EngineStats) or EngineStats()  # a child of ours names them so


def _text_capabilities(plan: LoadPlan, info: Mapping[str, object]) -> Capabilities:
    # Chat only where the model brings a template.
    has_chat = info.get("chat", True) is True
    context_tokens = info.get("context_tokens")
    return Capabilities(
        endpoints=(CHAT, COMPLETIONS, TOKENIZE) if has_chat else (COMPLETIONS, TOKENIZE),
        version=str(info.get("version", "")),
        context_tokens=context_tokens if isinstance(context_tokens, int) and context_tokens > 0 else None,
        isolates_tenants=True,
    )


# ---- CTranslate2's family. Options: ``device`` (cpu, cuda or auto) and ``compute_type``, as CTranslate2 names them ----


def _device_settings(plan: LoadPlan) -> dict[str, object]:
    device = read_option(plan.options, "device", str)
    return {
        "threads": plan.threads,
        # ``cuda:N`` was made into the GPU with that number when the load was planned.
        "device": (device or ("cuda" if plan.gpu_ids else "cpu")).partition(":")[0],
        "device_index": list(plan.gpu_ids),
        "compute_type": read_option(plan.options, "compute_type", str) or plan.quantization or "default",
    }


make_ct2 = partial(make_library, Library(
    name="ct2", distribution="ctranslate2", title="CTranslate2", needs="a folder with a CTranslate2 model.bin",
    file="model.bin", settings=lambda plan: {**_device_settings(plan), "context_tokens": plan.context_tokens or 0},
    capabilities=lambda plan, info: replace(
        _text_capabilities(plan, info), keeps_nothing=True,
        continuation={"continue_final_message": True, "add_generation_prompt": False},
    ),
))  # fmt: skip


def _whisper_settings(plan: LoadPlan) -> Mapping[str, object]:
    limit_mb = read_option(plan.options, "max_upload_mb", int) or limits().engines.whisper_upload_mb
    return {**_device_settings(plan), "max_upload_bytes": limit_mb * 1024 * 1024}


def _whisper_capabilities(plan: LoadPlan, info: Mapping[str, object]) -> Capabilities:
    translates = info.get("multilingual", True) is True  # only a model that knows languages does
    return Capabilities(
        endpoints=(TRANSCRIPTIONS, TRANSLATIONS) if translates else (TRANSCRIPTIONS,),
        version=str(info.get("version", "")),
        keeps_nothing=True,
        isolates_tenants=True,
        audio_input=True,
    )


make_whisper = partial(make_library, Library(
    name="whisper", distribution="faster-whisper", title="Whisper", needs="a folder with a Whisper model.bin of CTranslate2",
    file="model.bin", settings=_whisper_settings, capabilities=_whisper_capabilities,
))  # fmt: skip


# ---- ExLlamaV3. Options: the ``exllama_*`` fields of the settings files ----


def _exllama_settings(plan: LoadPlan) -> Mapping[str, object]:
    return {
        "gpu_ids": list(plan.gpu_ids), "context_tokens": plan.context_tokens or 0, **_cache_settings(plan),
        **_placement_settings(plan),
    }  # fmt: skip


def _cache_settings(plan: LoadPlan) -> Mapping[str, object]:
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


make_exllamav3 = partial(make_library, Library(
    name="exllamav3", distribution="exllamav3", title="ExLlamaV3", needs="a folder with an EXL3 model and its config.json",
    file="config.json", settings=_exllama_settings, keeps_prefixes=True,
    capabilities=lambda plan, info: replace(
        _text_capabilities(plan, info), prefix_caching=True, flushes_cache=True
    ),
))  # fmt: skip
