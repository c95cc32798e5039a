"""The vLLM adapter: one API server with its workers per replica."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec

from runner.definitions.plan import LoadPlan
from runner.engines.child import Child
from runner.engines.descendants import kill_rest, list_tree
from runner.engines.exposition import Samples, read_samples
from runner.engines.http import HttpServer
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
    FlushScope,
    Health,
    Progress,
    Report,
    Response,
)  # fmt: skip
from runner.engines.private_folders import make_private_folder
from runner.engines.token_counts import ask_count
from runner.engines.vllm import command
from runner.engines.vllm.flushing import Flusher
from runner.engines.vllm.salts import PRIORITIES, Salts, seal_body
from runner.engines.vllm.startup import StartupLog
from runner.errors import EngineError, EngineUnavailable, ModalityUnsupported
from runner.limits import limits

_CACHE_HINT = " (here: vllm_kv_cache_memory_bytes or the memory budget, or a shorter context)"
_TOKENIZER_PATHS = frozenset({"/tokenize", "/detokenize"})
_LISTS = frozenset({"/v1/models"})
_COUNTED = frozenset({
    "model", "messages", "prompt", "tools", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
    "add_generation_prompt", "continue_final_message", "add_special_tokens",
})  # fmt: skip
"""What of a request decides how long its prompt is; a template of the client's own is refused where it is used."""
_HEADERS = frozenset({"accept", "content-type", "traceparent", "tracestate"})
"""What reaches vLLM of a client's headers. Others steer it: one of them overrides the priority of the body."""
_PRIORITY_HEADER = "x-vllm-priority"


class VllmEngine:
    """One replica: a child process, a private Unix socket, a session for it.

    ``client`` is not used: a TCP session reaches no Unix socket. The model runs on the GPUs of the plan, and on the CPU when
    it names none.
    """

    name = "vllm"
    poll_s = 2.0
    restart_max_s = 120.0

    def __init__(self, plan: LoadPlan, client: aiohttp.ClientSession) -> None:
        del client
        self._plan = plan
        self._child = Child(f"vllm {plan.model_id}")
        self._salts = Salts()
        self._folder: Path | None = None
        self._session: aiohttp.ClientSession | None = None
        self._server: HttpServer | None = None
        self._log = StartupLog(_ignore)
        self._weights_bytes: int | None = None
        self._is_asleep = False
        self._capabilities = _describe(plan, sees_pictures=False)

    @property
    def capabilities(self) -> Capabilities:
        """What the plan switches on; whether the model takes pictures is read from its files when it is loaded."""
        return self._capabilities

    @property
    def pids(self) -> tuple[int, ...]:
        """The process that holds the server and its workers."""
        return (self._child.pid,) if self._child.pid is not None else ()

    async def load(self, report: Report) -> None:
        """Start the server and wait until it is healthy. Raises EngineError with vLLM's own reason; nothing is left then."""
        await self.unload(gently=False)
        python = await asyncio.to_thread(command.find_python)
        self._log = StartupLog(report)
        try:
            self._folder = await asyncio.to_thread(make_private_folder, "vllm")
            server = self._open_session(self._folder / "s")
            started = await asyncio.to_thread(command.build_command, python, self._plan, self._folder / "s")
            self._weights_bytes = await asyncio.to_thread(command.weights_bytes, self._plan)
            sees_pictures = await asyncio.to_thread(command.sees_pictures, self._plan)
            self._capabilities = _describe(self._plan, sees_pictures=sees_pictures)
            report(Progress("starting vLLM", 0.0))
            # The warden replaces the guard that the child begins as, so it is a child of this process as well.
            warden = [sys.executable, "-m", "runner.engines.children.warden", str(os.getpid())]
            environment = command.build_environment(self._plan)
            await self._child.start_foreign([*warden, *started], environment, self._log.feed)
            async with asyncio.timeout(limits().engines.server_load_s):
                await self._wait_healthy(server)
        except TimeoutError:
            await self.unload(gently=False)
            raise EngineError(
                f"vLLM did not load {self._plan.model_id} within {limits().engines.server_load_s:.0f} s"
            ) from None
        except BaseException:
            await self.unload(gently=False)
            raise
        self._server = server
        self._capabilities = replace(
            self._capabilities, context_tokens=await self._ask_context(server), version=await _ask_version(server)
        )
        report(Progress("ready", 1.0))

    async def unload(self, *, gently: bool) -> None:
        """End the server, all of its workers and its socket. Raises EngineError when a process cannot be killed."""
        tree = await asyncio.to_thread(list_tree, self._child.pid)
        server, self._server = self._server, None
        if gently and server is not None:
            gently = await server.check() is Health.OK  # one that hangs would not hear the signal either
        if server is not None:
            server.close()
        self._is_asleep = False
        session, self._session = self._session, None
        folder, self._folder = self._folder, None
        try:
            await self._child.stop(gently=gently, limit_s=limits().engines.server_stop_s)
        finally:
            left = await kill_rest(tree)
            if session is not None:
                await session.close()
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if left:
            raise EngineError(f"processes {left} of vLLM cannot be killed: they wait for a driver; restart the machine")

    async def flush(self, request: FlushRequest) -> FlushOutcome:
        """Clear the whole cache, or make what one tenant or tag has cached unreachable. Raises EngineError."""
        server = self._loaded()
        if not self.capabilities.flushes_cache:
            return FlushOutcome(FlushResult.NOTHING_KEPT, "a model that embeds keeps nothing between requests")
        if request.scope in {FlushScope.TENANT, FlushScope.TAG}:
            self._salts.forget(request)
            # Blocks are found by the salt alone, so with the old one gone there is no request that could find them.
            detail = "the salt was changed: nothing cached before can be found again; vLLM reuses that memory when it needs it"
            return FlushOutcome(FlushResult.FLUSHED, detail)
        outcome = await Flusher(server, self._plan.model_id, self._scrape).flush()
        if outcome.result is FlushResult.FLUSHED:
            self._salts.forget(request)
        return outcome

    async def stats(self) -> EngineStats:
        """Return vLLM's metrics; empty when they do not come."""
        if self._server is None:
            return EngineStats()
        try:
            return self._read_stats(await self._scrape())
        except EngineError:
            return EngineStats()

    async def read_metrics(self) -> str:
        """Return vLLM's ``/metrics``, an empty text when they do not come."""
        return "" if self._server is None else await self._server.read_metrics()

    @asynccontextmanager
    async def stream(self, call: Call) -> AsyncIterator[Response]:
        """Send a request under the salt and priority of its tenant. Raises aiohttp.ClientError, OSError, RequestRefused."""
        if self._server is None:
            raise aiohttp.ClientConnectionError("vLLM is not loaded")
        if self._is_asleep:  # it would wait without an end
            raise EngineUnavailable("the model sleeps; wake it first")
        async with self._server.send(self._seal(call)) as response:
            yield response

    async def count_tokens(self, fields: Mapping[str, msgspec.Raw]) -> int:
        """Ask the server's front end, which counts while the model works. Raises InvalidRequest, EngineError."""
        asked = {name: value for name, value in fields.items() if name in _COUNTED}
        return await ask_count(self._loaded(), "/tokenize", asked)

    async def health(self) -> Health:
        """Ask ``/health`` once."""
        return Health.UNREACHABLE if self._server is None else await self._server.check()

    async def wait_gone(self) -> None:
        """Return when the server has exited."""
        # Not by waiting for the process: asyncio does that until its pipes close, which orphaned workers hold open.
        while self._child.is_running:  # noqa: ASYNC110  # a process sets no event
            await asyncio.sleep(limits().engines.server_look_s)

    async def load_lora(self, name: str, path: Path) -> None:
        """Load an adapter under ``name``, which requests then give as their model. Raises EngineError."""
        await self._command("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
        # Blocks are told apart by the adapter's name: those of another adapter that had it must not be found.
        self._salts.forget(FlushRequest(FlushScope.MODEL))

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter. Raises EngineError, also when there is none of this name."""
        await self._command("/v1/unload_lora_adapter", {"lora_name": name})

    async def sleep(self, level: int = 1) -> None:
        """Free GPU memory: 1 moves the weights to host memory, 2 drops them. Running requests end. Raises EngineError."""
        if not self.capabilities.sleeps:
            raise EngineError("sleep mode is off: it needs a GPU and vllm_enable_sleep_mode")
        self._is_asleep = True  # at once: a request that came in between would hang
        try:
            await self._command(f"/sleep?level={level}", None)
        except EngineError:
            self._is_asleep = False
            raise

    async def wake(self) -> None:
        """Bring the model back after ``sleep``. Raises EngineError."""
        await self._command("/wake_up", None)
        self._is_asleep = False

    def _open_session(self, socket: Path) -> HttpServer:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.UnixConnector(str(socket), limit=0, keepalive_timeout=limits().engines.keepalive_s),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=limits().engines.connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers={"User-Agent"},
        )
        server = HttpServer(self._session, socket=str(socket))
        server.base_url = "http://vllm"
        return server

    async def _wait_healthy(self, server: HttpServer) -> None:
        """Return once it answers. Raises EngineError when the process ends first."""
        while await server.check() is not Health.OK:
            if not self._child.is_running:
                await self._child.kill()  # also waits for the last lines to be read
                raise EngineError(f"vLLM could not load {self._plan.model_id}: {self._last_words()}")
            await asyncio.sleep(limits().engines.server_look_s)

    async def _ask_context(self, server: HttpServer) -> int | None:
        """Return the tokens that one request may have, None when the server does not tell."""
        try:
            status, body = await server.ask("GET", "/v1/models")
            listed = msgspec.json.decode(body, type=_ModelList) if status == 200 else _ModelList()
        except (EngineError, msgspec.DecodeError, UnicodeDecodeError):
            return None
        return listed.data[0].max_model_len if listed.data else None

    def _last_words(self) -> str:
        words = self._log.failure() or self._child.last_words()
        return words + _CACHE_HINT if "cache blocks" in words or "KV cache" in words else words

    def _loaded(self) -> HttpServer:
        if self._server is None:
            raise EngineError("vLLM is not loaded")
        return self._server

    def _seal(self, call: Call) -> Call:
        """Return the call with our salt and priority. Raises ModalityUnsupported for a path that is not for clients."""
        path = call.path.partition("?")[0]
        headers = {name: value for name, value in call.headers.items() if name.lower() in _HEADERS}
        if path in self.capabilities.endpoints:
            headers[_PRIORITY_HEADER] = str(PRIORITIES[call.priority])
            body = seal_body(call.body, salt=self._salts.salt_for(call), priority=call.priority)
            return replace(call, headers=headers, body=body)
        if path not in _TOKENIZER_PATHS | _LISTS:
            raise ModalityUnsupported(f"{self._plan.model_id} does not serve {path}")
        return replace(call, headers=headers)

    async def _command(self, path: str, body: object) -> None:
        """POST something that is answered with 200. Raises EngineError with vLLM's reason."""
        status, answer = await self._loaded().ask("POST", path, body=body, timeout_s=limits().engines.vllm_sleep_s)
        if status != 200:
            raise EngineError(f"vLLM refuses {path.partition('?')[0]} (HTTP {status}): {_reason(answer)}")

    async def _scrape(self) -> Samples:
        status, text = await self._loaded().ask("GET", "/metrics")
        if status != 200:
            raise EngineError(f"/metrics was answered with HTTP {status}")
        return read_samples(text.decode("utf-8", "replace"), "vllm:")

    def _read_stats(self, samples: Samples) -> EngineStats:
        config = samples.labels("vllm:cache_config_info")
        total = _number(config.get("kv_cache_size_tokens"))
        if total is None:
            blocks, block = _number(config.get("num_gpu_blocks")), _number(config.get("block_size"))
            total = blocks * block if blocks is not None and block is not None else None
        used = samples.total("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
        return EngineStats(
            running=samples.count("vllm:num_requests_running"),
            waiting=samples.count("vllm:num_requests_waiting"),
            kv_total_tokens=total,
            kv_used_tokens=round(used * total) if used is not None and total is not None else None,
            kv_bytes=_number(config.get("kv_cache_memory_bytes")) or self._log.kv_bytes,
            weights_bytes=self._log.weights_bytes or self._weights_bytes,
            cache_queried_tokens=samples.count("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
            cache_hit_tokens=samples.count("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        )


def _describe(plan: LoadPlan, *, sees_pictures: bool) -> Capabilities:
    is_caching, is_pooling = command.caches_prefixes(plan), command.is_pooling(plan)
    return Capabilities(
        endpoints=(EMBEDDINGS, TOKENIZE) if is_pooling else (CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENIZE),
        streaming=not is_pooling,
        prefix_caching=is_caching,
        keeps_nothing=not is_caching,
        reports_cached_tokens=is_caching,
        isolates_tenants=True,
        engine_priority=True,
        flushes_cache=not is_pooling,
        sleeps=command.can_sleep(plan),
        loads_lora=command.takes_lora(plan),
        reports_progress=True,
        counts_tokens=True,
        vision_input=sees_pictures,
        function_calling=bool(plan.options.get("vllm_tool_call_parser")),
    )


class _Version(msgspec.Struct):
    version: str = ""


async def _ask_version(server: HttpServer) -> str:
    """Return what ``GET /version`` says, empty where it says nothing."""
    try:
        status, body = await server.ask("GET", "/version")
        return msgspec.json.decode(body, type=_Version).version if status == 200 else ""
    except (EngineError, msgspec.DecodeError, UnicodeDecodeError):
        return ""


class _Listed(msgspec.Struct):
    max_model_len: int | None = None


class _ModelList(msgspec.Struct):
    data: list[_Listed] = []


class _Problem(msgspec.Struct):
    message: str = ""


class _Refusal(msgspec.Struct):
    error: _Problem | None = None
    message: str = ""


def _reason(answer: bytes) -> str:
    """Return the message of an error answer."""
    try:
        refusal = msgspec.json.decode(answer, type=_Refusal)
    except msgspec.DecodeError:
        return answer[:200].decode("utf-8", "replace")
    return refusal.error.message if refusal.error is not None else refusal.message


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None


def _ignore(_progress: Progress) -> None:
    """Progress nobody asked for."""
