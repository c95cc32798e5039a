"""llama.cpp in a child process, so that a crash or a hang of the engine can be killed without harm to the runner."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec
import psutil

from runner.definitions.plan import LoadPlan, Progress, Report
from runner.engines.child import Child, gpu_environment
from runner.engines.http import HttpServer
from runner.engines.library_child import installed_version
from runner.engines.llama_slots import LlamaSlots, plain_call
from runner.engines.llamacpp_log import LoadLog
from runner.engines.port import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    TOKENIZE,
    Call,
    Capabilities,
    EngineStats,
    FlushOutcome,
    FlushRequest,
    FlushResult,
    Health,
    Response,
)
from runner.engines.token_counts import ask_llama
from runner.errors import EngineError
from runner.limits import limits

BATCH_TOKENS = 512


class _Meta(msgspec.Struct):
    size: int | None = None


class _Model(msgspec.Struct):
    meta: _Meta | None = None


class _ModelList(msgspec.Struct):
    data: list[_Model] = []


class LlamaCpp:
    """One GGUF model in one child, with a new random key each time it is loaded."""

    name = "llamacpp"
    poll_s = 2.0
    restart_max_s = 30.0
    child_module = "runner.engines.children.llamacpp"

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        self._plan = plan
        self._child = Child(f"llama.cpp {plan.model_id}")
        self._server = HttpServer(client)
        self._slots = LlamaSlots(self._server, plan.slots)
        self._kv_bytes: int | None = None
        self._weights_bytes: int | None = None
        self._capabilities = _first_capabilities(plan)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do; whether it takes tools and images is known once it is loaded."""
        return self._capabilities

    @property
    def pids(self) -> tuple[int, ...]:
        """The child, while there is one."""
        return (self._child.pid,) if self._child.pid is not None else ()

    async def load(self, report: Report) -> None:
        """Start the child and load the model. Raises EngineError with what llama.cpp says is wrong."""
        path = self._plan.path
        if path is None:
            raise EngineError(f"{self._plan.model_id} has no GGUF file: give its path in the settings")
        await self.unload(gently=False)
        report(Progress("starting the engine process"))
        key = secrets.token_urlsafe(24)
        # Known before its address is: a request that meets the new child brings the new key. It closes idle connections when it
        # likes, and a POST must not be caught by that on a connection used before.
        self._server.headers = {"Authorization": f"Bearer {key}", "Connection": "close"}
        is_told = asyncio.Event()
        log = LoadLog(report, on_loaded=is_told.set)
        watch = asyncio.create_task(self._watch_reading(path, log, report))
        try:
            self._server.base_url = await self._child.start_ours(
                self.child_module, child_settings(self._plan, path, key), report,
                limit_s=limits().engines.llama_load_s, on_line=log.read,
                environment=gpu_environment(self._plan.gpu_ids, is_cpu=self._plan.options.get("device") == "cpu"),
            )  # fmt: skip
            await _wait_told(is_told)
        except EngineError as error:
            raise EngineError(f"{path.name} could not be loaded: {log.reason or error}") from None
        except BaseException:
            await self._child.kill()
            raise
        finally:
            log.close()
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch
        try:
            await self._meet(log)
        except BaseException:
            await self._child.kill()
            raise

    async def unload(self, *, gently: bool) -> None:
        """Have the child unload and exit, kill it when that takes too long, or at once; its memory goes with it."""
        try:
            await self._child.stop(gently=gently)
        finally:
            self._server.base_url = ""

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Erase the slots in question: there is no other copy, as the child keeps no prompts in host memory."""
        if not self._child.is_running:
            return FlushOutcome(FlushResult.FLUSHED, "nothing is loaded", 0, 0)
        return await self._slots.flush(request)

    async def stats(self) -> EngineStats:
        """Return the numbers of llama.cpp; an empty value when it does not answer."""
        if not self._child.is_running:
            return EngineStats()
        try:
            stats = await self._slots.read_stats()
        except EngineError:
            return EngineStats()
        return replace(stats, kv_bytes=self._kv_bytes, weights_bytes=self._weights_bytes)

    async def read_metrics(self) -> str:
        """Return llama.cpp's ``/metrics``, an empty text when they do not come."""
        return await self._server.read_metrics() if self._child.is_running else ""

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Response]:
        """Send a call, pinned to a slot of its tenant's where it generates. Raises aiohttp.ClientError, OSError."""
        needs_slot = call.path.partition("?")[0] != EMBEDDINGS
        async with self._slots.send(call) if needs_slot else self._server.send(plain_call(call)) as response:
            yield response

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Ask the server; no slot is needed for it. Raises InvalidRequest, EngineError."""
        return await ask_llama(self._server, fields)

    @property
    def batch_s(self) -> float:
        """What a full batch takes at the speed that llama.cpp has counted so far."""
        if self._slots.token_s is None:
            return limits().engines.llama_batch_s
        return self._slots.token_s * _count_batch_tokens(self._plan)

    async def ask_loop(self) -> None:
        """Ask for the slots, which the loop itself tells."""
        await self._slots.ask_loop()

    async def health(self) -> Health:
        """Ask ``/health`` once."""
        return await self._server.check() if self._child.is_running else Health.UNREACHABLE

    async def wait_gone(self) -> None:
        """Return when the child has exited."""
        await self._child.wait_gone()

    async def _meet(self, log: LoadLog) -> None:
        """Ask the loaded server what it is. Raises EngineError when it does not answer."""
        self._slots = LlamaSlots(self._server, self._plan.slots)
        self._kv_bytes = log.kv_bytes
        self._weights_bytes = await self._ask_weights_bytes()
        properties = await self._slots.read_properties()
        self._capabilities = replace(
            self._capabilities,
            version=properties.version or await asyncio.to_thread(installed_version, "xllamacpp"),
            context_tokens=properties.context_tokens,
            function_calling=properties.chat_template_caps.supports_tools and CHAT in self._capabilities.endpoints,
            vision_input=properties.modalities.vision,
            audio_input=properties.modalities.audio,
        )

    async def _ask_weights_bytes(self) -> int | None:
        status, body = await self._server.ask("GET", "/v1/models")
        if status != 200:
            return None
        listed = msgspec.json.decode(body, type=_ModelList)
        return listed.data[0].meta.size if listed.data and listed.data[0].meta is not None else None

    async def _watch_reading(self, path: Path, log: LoadLog, report: Report) -> None:
        """Report how much of the weights has arrived in the child's memory: llama.cpp has no other word of it."""
        total = sum(part.stat().st_size for part in weight_files(path)) or 1
        while log.is_reading:
            await asyncio.sleep(limits().engines.llama_watch_s)
            if (pid := self._child.pid) is None or not log.is_reading:
                continue
            with contextlib.suppress(psutil.Error):
                share = psutil.Process(pid).memory_info().rss / total
                report(Progress("reading weights", min(share, 0.99)))


async def _wait_told(is_told: asyncio.Event) -> None:
    """Wait a moment for the end of the log of a load: another thread of the child writes it, also after the child's answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limits().engines.llama_log_s):
            await is_told.wait()


def child_settings(plan: LoadPlan, path: Path, key: str) -> dict[str, object]:
    """Return what the child program is told. Raises EngineError for an option that cannot be used."""
    options: Mapping[str, object] = plan.options
    return {
        "model_path": str(path), "model_id": plan.model_id, "key": key, "slots": plan.slots, "threads": plan.threads,
        "context_tokens": plan.context_tokens or limits().engines.context_tokens,
        "embedding": options.get("gguf_embedding") is True, "batch_tokens": _count_batch_tokens(plan),
        "gpu_layers": 0 if options.get("device") == "cpu" else options.get("gguf_n_gpu_layers", -1),
        "enable_thinking": options.get("enable_thinking"),
        "flash_attn": options.get("gguf_flash_attn") or "auto",
        "type_k": options.get("gguf_type_k") or "f16",
        "type_v": options.get("gguf_type_v") or "f16",
    }  # fmt: skip


def _count_batch_tokens(plan: LoadPlan) -> int:
    if plan.options.get("gguf_embedding") is True:  # an input has to fit into one batch
        return max(BATCH_TOKENS, plan.context_tokens or limits().engines.context_tokens)
    return BATCH_TOKENS


def weight_files(path: Path) -> list[Path]:
    """Return the files of a model: all parts of one that is split (``name-00001-of-00003.gguf``), else the one."""
    stem, is_split, count = path.stem.rpartition("-of-")
    if not is_split or not count.isdigit():
        return [path] if path.is_file() else []
    return sorted(path.parent.glob(f"{stem[:-5]}?????-of-{count}.gguf"))


def _first_capabilities(plan: LoadPlan) -> Capabilities:
    if plan.options.get("gguf_embedding") is True:
        return Capabilities(
            (EMBEDDINGS, TOKENIZE), max_inflight=plan.slots, streaming=False, keeps_nothing=True, reports_progress=True,
            counts_tokens=True,
        )  # fmt: skip
    return Capabilities(
        (CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENIZE),
        private_endpoints=(RESPONSES,),  # its events lack the numbers and the whole object that SDKs go by
        max_inflight=plan.slots,
        prefix_caching=True,
        reports_cached_tokens=True,
        isolates_tenants=True,
        flushes_cache=True,
        reports_progress=True,
        counts_tokens=True,
    )
