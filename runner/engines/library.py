"""ExLlamaV3, the library, in a child process that brings our HTTP server. Needs a GPU and its own build of the library."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial

import aiohttp
import msgspec

from runner.definitions.fields import EXLLAMA_PAGE_TOKENS
from runner.engines.http import HttpServer
from runner.engines.http_engine import ask_child, installed_version, read_option
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
    Health,
    LoadPlan,
    Report,
    Response,
)
from runner.engines.process import Child
from runner.errors import EngineError
from runner.limits import limits


class _Numbers(msgspec.Struct):
    """What ``/stats`` of a child answers; names as in EngineStats."""

    running: int | None = None
    waiting: int | None = None
    kv_total_tokens: int | None = None
    kv_used_tokens: int | None = None
    kv_bytes: int | None = None
    cache_queried_tokens: int | None = None
    cache_hit_tokens: int | None = None


class LibraryChild:
    """One child at a time, with a new random key for each. ``module`` is a program of ``runner.engines.children``,
    ``distribution`` the package whose library it holds.
    """

    def __init__(self, module: str, client: aiohttp.ClientSession, *, distribution: str) -> None:
        self._module = module
        self._distribution = distribution
        self._child = Child(module.rpartition(".")[2])
        self.server = HttpServer(client)

    @property
    def pids(self) -> tuple[int, ...]:
        """The child, while there is one."""
        return (self._child.pid,) if self._child.is_running and self._child.pid is not None else ()

    @property
    def info(self) -> Mapping[str, object]:
        """What the child said about itself when it was ready, and the ``version`` of its library where one is installed."""
        return self._child.info

    async def start(self, settings: Mapping[str, object], report: Report) -> None:
        """Start the child and have it load; ``settings`` less the key. Raises EngineError; no process is left then."""
        key = secrets.token_urlsafe(24)
        url = await self._child.start_ours(
            self._module, {**settings, "key": key}, report, limit_s=limits().engines.library_load_s
        )
        self.server.base_url, self.server.headers = url, {"Authorization": f"Bearer {key}"}
        self._child.info["version"] = await asyncio.to_thread(installed_version, self._distribution)

    async def stop(self, *, gently: bool) -> None:
        """End the child; return when the process is gone."""
        await self._child.stop(gently=gently)
        self.server.base_url = ""

    def send(self, call: Call, extra_headers: Mapping[str, str] | None = None) -> AbstractAsyncContextManager[Response]:
        """Send a call as it is, with headers of ours. Raises aiohttp.ClientError or OSError."""
        if not self.server.base_url:
            raise ConnectionRefusedError("the model is not loaded")
        if extra_headers:
            call = dataclasses.replace(call, headers={**call.headers, **extra_headers})
        return self.server.send(call)

    @property
    def context_tokens(self) -> int | None:
        """Tokens that one request may have, None where the child does not tell."""
        told = self.info.get("context_tokens")
        return told if isinstance(told, int) and told > 0 else None

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Have the child count the tokens of a prompt. Raises InvalidRequest, EngineError."""
        if not self.server.base_url:
            raise EngineError("the model is not loaded")
        return await ask_child(self.server, fields)

    async def stats(self) -> EngineStats:
        """Return the child's numbers, an empty value when it does not answer."""
        if not self.server.base_url:
            return EngineStats()
        try:
            status, body = await self.server.ask("GET", "/stats")
            numbers = msgspec.json.decode(body, type=_Numbers) if status == 200 else _Numbers()
        except (EngineError, msgspec.DecodeError):
            return EngineStats()
        return EngineStats(**msgspec.structs.asdict(numbers))

    async def health(self) -> Health:
        """Ask ``/health`` once."""
        return await self.server.check() if self.server.base_url else Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        await self._child.wait_gone()


@dataclass(frozen=True, slots=True)
class LibraryKind:
    """What tells one library from another. ``module`` is its child program, ``distribution`` its package; ``title`` names it
    in messages.

    ``needs``: what ``plan.path`` must be, a folder with ``model.bin``. ``settings`` are those of its child beside the ones all
    have; ``capabilities`` are made from the plan and from what the child said about the model.
    """

    name: str
    module: str
    distribution: str
    title: str
    needs: str
    settings: Callable[[LoadPlan], Mapping[str, object]]
    capabilities: Callable[[LoadPlan, Mapping[str, object]], Capabilities]


class LibraryEngine:
    """The adapter of CTranslate2's family: libraries that keep nothing between requests, so that tenants cannot meet.

    Options of the plan: ``device`` (cpu, cuda or auto) and ``compute_type``, as CTranslate2 names them.
    """

    poll_s = 2.0
    restart_max_s = 30.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession, *, kind: LibraryKind) -> None:
        self._plan = plan
        self._kind = kind
        self._child = LibraryChild(kind.module, client, distribution=kind.distribution)
        self.name = kind.name

    @property
    def capabilities(self) -> Capabilities:
        """What the model can do; of one that is not loaded, what such models can."""
        return self._kind.capabilities(self._plan, self._child.info)

    @property
    def pids(self) -> tuple[int, ...]:
        """The child process."""
        return self._child.pids

    async def load(self, report: Report) -> None:
        """Start the child and load. Raises EngineError."""
        plan = self._plan
        if plan.path is None or not (plan.path / "model.bin").is_file():
            raise EngineError(f"{plan.model_id}: {self._kind.needs} is needed, got {plan.path}")
        device = read_option(plan.options, "device", str)
        settings = {
            "folder": str(plan.path),
            "model_name": plan.model_id,
            "slots": plan.slots,
            "threads": plan.threads,
            # ``cuda:N`` was made into the GPU with that number when the load was planned.
            "device": (device or ("cuda" if plan.gpu_ids else "cpu")).partition(":")[0],
            "enable_thinking": plan.options.get("enable_thinking"),
            "device_index": list(plan.gpu_ids),
            "compute_type": read_option(plan.options, "compute_type", str) or plan.quantization or "default",
        }
        await self._child.start({**settings, **self._kind.settings(plan)}, report)

    async def unload(self, *, gently: bool) -> None:
        """Have the child unload and exit, or kill it; return when it is gone."""
        await self._child.stop(gently=gently)

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Say that there is nothing to flush."""
        words = f"{self._kind.title} keeps nothing between requests, so there is no {request.scope} to flush"
        return FlushOutcome(FlushResult.NOTHING_KEPT, words)

    async def stats(self) -> EngineStats:
        """Return running and waiting requests; the library tells no more."""
        return await self._child.stats()

    def stream(self, call: Call) -> AbstractAsyncContextManager[Response]:
        """Send a request to the child."""
        return self._child.send(call)

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Have the child count, where its library reads text. Raises InvalidRequest, EngineError."""
        return await self._child.count_tokens(fields)

    async def health(self) -> Health:
        """Ask the child once."""
        return await self._child.health()

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        await self._child.wait_gone()


def _ct2_settings(plan: LoadPlan) -> Mapping[str, object]:
    return {"context_tokens": plan.context_tokens or 0}


def _ct2_capabilities(plan: LoadPlan, info: Mapping[str, object]) -> Capabilities:
    """Chat only where the model brings a template."""
    has_chat = info.get("chat", True) is True
    context_tokens = info.get("context_tokens")
    return Capabilities(
        endpoints=(CHAT, COMPLETIONS, TOKENIZE) if has_chat else (COMPLETIONS, TOKENIZE),
        version=str(info.get("version", "")),
        max_inflight=plan.slots,
        context_tokens=context_tokens if isinstance(context_tokens, int) else None,
        keeps_nothing=True,
        isolates_tenants=True,
        reports_progress=True,
        counts_tokens=True,
    )


_CT2 = LibraryKind(
    name="ct2",
    module="runner.engines.children.ct2",
    distribution="ctranslate2",
    title="CTranslate2",
    needs="a folder with a CTranslate2 model.bin",
    settings=_ct2_settings,
    capabilities=_ct2_capabilities,
)
Ct2Engine = partial(LibraryEngine, kind=_CT2)
"""The adapter, for a plan and a client."""


TRANSLATIONS = "/v1/audio/translations"


def _whisper_settings(plan: LoadPlan) -> Mapping[str, object]:
    limit_mb = read_option(plan.options, "max_upload_mb", int) or limits().engines.whisper_upload_mb
    return {"max_upload_bytes": limit_mb * 1024 * 1024}


def _whisper_capabilities(plan: LoadPlan, info: Mapping[str, object]) -> Capabilities:
    """Translations only where the model knows languages. A client that leaves is noticed between segments."""
    translates = info.get("multilingual", True) is True
    return Capabilities(
        endpoints=(TRANSCRIPTIONS, TRANSLATIONS) if translates else (TRANSCRIPTIONS,),
        version=str(info.get("version", "")),
        max_inflight=plan.slots,
        keeps_nothing=True,
        isolates_tenants=True,
        reports_progress=True,
        audio_input=True,
    )


_WHISPER = LibraryKind(
    name="whisper",
    module="runner.engines.children.whisper",
    distribution="faster-whisper",
    title="Whisper",
    needs="a folder with a Whisper model.bin of CTranslate2",
    settings=_whisper_settings,
    capabilities=_whisper_capabilities,
)
WhisperEngine = partial(LibraryEngine, kind=_WHISPER)
"""The adapter, for a plan and a client; it also takes the option ``max_upload_mb``."""


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
