"""vLLM: its own API server in a child process, spoken to over a Unix socket that only we can reach."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec

from runner.definitions.plan import LoadPlan
from runner.engines.http import HttpServer
from runner.engines.http_engine import Samples, ask_count, read_samples
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
    Priority,
    Progress,
    Report,
    Response,
)
from runner.engines.process import Child, kill_rest, list_tree, make_private_folder
from runner.engines.vllm_command import (
    StartupLog,
    build_command,
    build_environment,
    caches_prefixes,
    can_sleep,
    find_python,
    is_pooling,
    sees_pictures,
    takes_lora,
    weights_bytes,
)  # fmt: skip
from runner.errors import EngineError, EngineUnavailable, InvalidRequest, ModalityUnsupported
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
        self._capabilities = _describe(plan, with_vision=False)

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
        python = await asyncio.to_thread(find_python)
        self._log = StartupLog(report)
        try:
            self._folder = await asyncio.to_thread(make_private_folder, "vllm")
            server = self._open_session(self._folder / "s")
            started = await asyncio.to_thread(build_command, python, self._plan, self._folder / "s")
            self._weights_bytes = await asyncio.to_thread(weights_bytes, self._plan)
            self._capabilities = _describe(self._plan, with_vision=await asyncio.to_thread(sees_pictures, self._plan))
            report(Progress("starting vLLM", 0.0))
            await self._child.start_foreign(started, build_environment(self._plan), self._log.feed)
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


def _describe(plan: LoadPlan, *, with_vision: bool) -> Capabilities:
    is_caching, pools = caches_prefixes(plan), is_pooling(plan)
    return Capabilities(
        endpoints=(EMBEDDINGS, TOKENIZE) if pools else (CHAT, COMPLETIONS, RESPONSES, MESSAGES, TOKENIZE),
        streaming=not pools,
        prefix_caching=is_caching,
        keeps_nothing=not is_caching,
        reports_cached_tokens=is_caching,
        isolates_tenants=True,
        engine_priority=True,
        flushes_cache=not pools,
        sleeps=can_sleep(plan),
        loads_lora=takes_lora(plan),
        reports_progress=True,
        counts_tokens=True,
        vision_input=with_vision,
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
